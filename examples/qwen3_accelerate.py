"""Scores of a text by any Qwen3, its forward on the fused engine.

    python examples/qwen3_accelerate.py Qwen/Qwen3-0.6B "The capital of France is Paris."
    python examples/qwen3_accelerate.py Qwen/Qwen3-0.6B "The capital of France is Paris." --checkpoint qwen3-w4a4/

Prints the mean negative log-likelihood a token. `--device cpu` runs the reference, slowly.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from omniw4.runtime import accelerate


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--checkpoint")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args(arguments)
    on_cpu = chosen.device == "cpu"
    backend = "reference" if on_cpu else "w4a4" if chosen.checkpoint else "fp16"

    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32 if on_cpu else torch.float16)
    accelerate(model.to(chosen.device), chosen.checkpoint, backend=backend)
    ids = AutoTokenizer.from_pretrained(chosen.model)(chosen.text, return_tensors="pt").input_ids.to(chosen.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
    loss = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
    print(f"{loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
