"""GPTQ of GPTQModel, for scripts/peers.py: MODEL TOKENS OUT. Runs in an environment of its own."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST_ERROR = 0.3  # of 4 bits in groups of 64, far above what rounding alone does

source, tokens_file, target = sys.argv[1:]
tokens = load_file(tokens_file)["tokens"]
rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
# format v1 keeps zero points less one
settings = QuantizeConfig(bits=4, group_size=64, format="gptq_v2", offload_to_disk=False)
model = GPTQModel.load(source, settings, device="cpu", dtype=torch.float32)
began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
model.quantize(rows, batch_size=1)
seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
found = dict(model.model.named_modules())
changed = 0
with torch.no_grad():
    for name, module in original.named_modules():
        packed = found.get(name)
        if isinstance(module, torch.nn.Linear) and hasattr(packed, "dequantize_weight"):
            weight = packed.dequantize_weight().T.float()
            error = float((weight - module.weight).norm() / module.weight.norm())
            if error > MOST_ERROR:
                sys.exit(f"error: {name} is {error:.2f} of its norm away: the packed weight was misread")
            module.weight.copy_(weight)
            changed += 1
if not changed:
    sys.exit("error: GPTQModel packed no linear")
original.save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "linears": changed}))
