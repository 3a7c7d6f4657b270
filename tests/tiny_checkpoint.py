"""A random two-layer language model with a byte tokenizer, and a data-free checkpoint of it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from omniw4 import int4
from omniw4 import model as sources
from omniw4.checkpoint import LayerStore, assemble
from omniw4.hadamard import hadamard64
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def make_tokenizer(*, adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=258, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator([], trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_model(folder: Path, kind: str = "llama", *, adds_bos: bool = True, seed: int = 0) -> Path:
    """Save a random model whose logits are far from uniform, so that figures move when weights do."""
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
            elif parameter.numel() < 1000:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(torch.float16).save_pretrained(folder)
    make_tokenizer(adds_bos=adds_bos).save_pretrained(folder)
    return folder


def quantize_nearest(weight: torch.Tensor, bias: torch.Tensor | None, spec: LinearSpec) -> QuantizedLinear:
    """Round to nearest after H64, and the SVD of what is left."""
    rotated = hadamard64(weight) if spec.rotation == "hadamard64" else weight.float()
    codes, scales = int4.quantize_groups(rotated)
    u, s, v = torch.linalg.svd(rotated - int4.dequantize(codes, scales), full_matrices=False)
    rank = spec.rank
    return QuantizedLinear(
        spec,
        int4.pack_nibbles(codes),
        scales,
        (v[:rank].T * s[:rank]).half().contiguous() if rank else None,
        u[:, :rank].half().contiguous() if rank else None,
        bias=None if bias is None else bias.half(),
    )


def make_checkpoint(folder: Path, model_folder: Path, *, spoil=None, calibration=None, **spec) -> Path:
    """Quantize every linear of the blocks; ``spoil(path, linear)`` may damage one before it is stored."""
    loaded = sources.load(str(model_folder))
    store = LayerStore(folder.with_name(folder.name + ".layers"))
    with torch.no_grad():
        for path, linear in sources.block_linears(loaded.model).items():
            quantized = quantize_nearest(linear.weight.float(), linear.bias, LinearSpec(**spec))
            if spoil is not None:
                spoil(path, quantized)
            report = LayerReport(path, linear.out_features, linear.in_features, "rtn", 0.0, 0.0, 0.0, 0.0)
            store.put(path, quantized, report)
    assemble(folder, store, loaded, recipe={}, calibration=calibration)
    return folder
