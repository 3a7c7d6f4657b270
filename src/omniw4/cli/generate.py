"""``omniw4 generate MODEL --out FILE``: the model writes the text that it is calibrated and distilled on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from omniw4.cli import options, settings
from omniw4.cli.output import size
from omniw4.errors import UsageError

_SUFFIX = ".jsonl"


def command(
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A .jsonl file to write, whole or not at all.")],
    samples: options.Samples = None,
    seq_len: options.SeqLen = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Sequences a forward; the text stays.")
    ] = 32,
    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="X", help="1: the model's own distribution."),
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Which texts.", show_default="0")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--begin",
            metavar="TOKEN",
            help="What a text begins after: of a chat model, the token between documents.",
            show_default="BOS, or else EOS",
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: options.Overwrite = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Let a language model write its own text, to calibrate and distil on without data."""
    flags = {"samples": samples, "seq_len": seq_len, "seed": seed}
    chosen = settings.load(None, (), {"calibrate": flags}).calibrate
    if not 0 < temperature < float("inf"):
        raise UsageError(f"--temperature is {temperature:g}, wanted a finite number above 0")
    if out.suffix != _SUFFIX:
        raise UsageError(
            f"--out {out.name!r} does not end in {_SUFFIX}, by which `--dataset` knows what is in it",
            hint=f"name it {out.stem if out.stem.strip('.') and not out.stem.startswith('.') else 'own'}{_SUFFIX}",
        )
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4 import model as models
    from omniw4 import storage
    from omniw4.calibrate import own_text

    options.check_device(device)
    models.check_dtype(dtype)
    storage.check_file(out, overwrite=overwrite)
    skeleton = models.skeleton(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    own_text.check_causal(skeleton, model)
    models.check_positions(skeleton, chosen.seq_len)
    del skeleton
    own_text.begin_token(
        models.tokenizer(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code), model, begin
    )
    with storage.reserving(out, overwrite=overwrite):
        loaded = models.load(
            model, dtype=dtype, device=device, gguf_file=gguf_file, trust_remote_code=trust_remote_code
        )
        output.note(f"{loaded.source} writes {chosen.samples}×{chosen.seq_len} tokens")
        with output.progress("writing") as bar:
            own = own_text.write_text(
                loaded,
                chosen.samples,
                chosen.seq_len,
                temperature=temperature,
                seed=chosen.seed,
                batch_size=batch_size,
                begin=begin,
                on_tokens=bar.step,
            )
        warnings = [f"{own.empty} of {chosen.samples} texts are empty and were left out"] if own.empty else []
        for warning in warnings:
            output.warn(warning)
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in own.texts).encode()
        storage.put_file(out, lines, overwrite=overwrite)
    document = {
        "out": str(out),
        "texts": len(own.texts),
        "empty": own.empty,
        "tokens": own.tokens,
        "samples": chosen.samples,
        "seq_len": chosen.seq_len,
        "temperature": temperature,
        "seed": chosen.seed,
        "begin": own.begin_token,
        "begin_id": own.begin,
        "model": {"name": Path(model).name, "hash": loaded.hash},
        "warnings": warnings,
    }
    output.result(f"Wrote {out} · {len(own.texts)} texts · {own.tokens} tokens · {size(len(lines))}", document)
