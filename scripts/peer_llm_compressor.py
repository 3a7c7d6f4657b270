"""GPTQ of llm-compressor, for scripts/peers.py: MODEL TOKENS OUT. Runs in an environment of its own."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

source, tokens_file, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
tokens = load_file(tokens_file)["tokens"]
data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
recipe = GPTQModifier(config_groups={"all": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"])
began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(tokens), max_seq_length=tokens.shape[1])
seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
found = dict(model.named_modules())
changed = 0
with torch.no_grad():
    for name, module in original.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":  # rounded in place by the modifier
            changed += not torch.equal(module.weight, found[name].weight)
            module.weight.copy_(found[name].weight)
if not changed:
    sys.exit("error: llm-compressor changed no weight")
original.save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "linears": changed}))
