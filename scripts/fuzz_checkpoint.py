"""Coverage-guided fuzzing of the checkpoint reader with atheris (libFuzzer), from a corpus of valid and broken files.

An input is one byte that says which file of a valid checkpoint is replaced, and the file's new content. The judge is
the one of the tests (tests/checkpoint/hostile/mutation.py): a named error of one short sentence, or the same numbers.
A finding ends the run with exit code 77; the input that made it lies in the corpus folder as ``crash-<sha>`` and can
be given again as an argument.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEEDS_A_KIND = 12  # mutations of each kind in the corpus, beside the valid files
HEADER = "header of "  # stands for a weight file whose length field is put right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help="run these inputs alone, such as a crash that was found")
    parser.add_argument("--seconds", type=int, default=600, help="how long to search (600)")
    parser.add_argument("--corpus", type=Path, default=ROOT / ".cache" / "fuzz", help="where inputs are kept")
    options = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("error: atheris is not installed\n\nhint: run `make fuzz`, or pip install atheris")
    sys.path[:0] = [str(ROOT / part) for part in ("src", "tests", "tests/checkpoint", "tests/checkpoint/hostile")]
    import safetensors  # noqa: F401  # before the hooks: what is not ours needs no coverage
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["omniw4.checkpoint"]):
        import omniw4.checkpoint  # noqa: F401
    from mutation import Base, Mutation, Target
    from raw_checkpoint import raw_checkpoint

    with tempfile.TemporaryDirectory(prefix="omniw4-fuzz-") as scratch:
        base = Base.read("three files", raw_checkpoint(3).write(Path(scratch) / "base"))
        target = Target(base, Path(scratch) / "target")
        places = [*base.files, *(HEADER + name for name in base.weight_files)]

        def one_input(data: bytes) -> None:
            if data:
                place = places[data[0] % len(places)]
                target.judge(Mutation("input", _files(base, place, data[1:])))

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            changed = _mutate_json(data, random.Random(seed))
            return atheris.Mutate(data, max_size) if changed is None else changed[:max_size]

        options.corpus.mkdir(parents=True, exist_ok=True)
        print(f"{_seed(options.corpus, base, places)} seeds in {options.corpus}", file=sys.stderr)
        libfuzzer = [f"-artifact_prefix={options.corpus}/", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]
        if not options.inputs:
            libfuzzer += [f"-max_total_time={options.seconds}", "-max_len=8192", str(options.corpus)]
        atheris.Setup([sys.argv[0], *libfuzzer, *options.inputs], one_input, custom_mutator=mutate)
        atheris.Fuzz()


def _files(base: Any, place: str, content: bytes) -> dict[str, bytes | None]:
    from mutation import join_file, split_file

    if not place.startswith(HEADER):
        return {place: content}
    name = place.removeprefix(HEADER)
    return {name: join_file(content, split_file(base.files[name])[1])}


def _mutate_json(data: bytes, rng: random.Random) -> bytes | None:
    """Half of the time one node of an input that is JSON, replaced; otherwise None: the bytes are to be mutated."""
    from mutate_json import VALUES, paths, replaced

    if rng.random() < 0.5:
        return None
    try:
        document = json.loads(data[1:])
        path = rng.choice(paths(document) or [()])
        return data[:1] + json.dumps(replaced(document, path, rng.choice(VALUES))).encode()
    except (ValueError, RecursionError):
        return None


def _seed(corpus: Path, base: Any, places: list[str]) -> int:
    """Write the valid files and some mutations of every kind as inputs; returns how many."""
    from mutation import split_file
    from test_mutations import KINDS

    seeds = {name: [content] for name, content in base.files.items()}
    seeds |= {HEADER + name: [split_file(base.files[name])[0]] for name in base.weight_files}
    for kind in KINDS.values():
        for mutation in itertools.islice(kind(base), 0, 40 * SEEDS_A_KIND, 40):
            for name, content in mutation.files.items():
                seeds[name].append(content or b"")
    count = 0
    for number, place in enumerate(places):
        for content in seeds[place]:
            (corpus / f"seed-{count:05}").write_bytes(bytes([number]) + content)
            count += 1
    return count


if __name__ == "__main__":
    main()
