"""What kind of work a kernel or an operator does, by its name."""

from __future__ import annotations

import re

KINDS = ("GEMM", "attention", "elementwise", "memory", "reduce", "quantize", "other")

# the first that matches decides: a fused kernel counts as what makes it long
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("quantize", r"quantiz|quant_|_quant\b|pack_lora|fp8_cast|to_fp8"),
        ("attention", r"attention|flash|fmha|sdpa|varlen|_mha"),
        ("GEMM", r"gemm|gemv|nvjet|cutlass|cublas|wgmma|xmma|matmul|splitk|_mm\b|convolution|conv[123]d|conv_|"
                 r"::(addmm|bmm|mm|linear|matmul|baddbmm)\b"),
        ("reduce", r"reduce|norm|softmax|inv_rms|triton_(red|per)|topk|sort|scan|cum(sum|prod)|argm|"
                   r"::(mean|sum|amax|amin|max|min|any|all|var|std|prod|linalg)"),
        ("memory", r"memcpy|memset|copy|\bcat|catarray|index|gather|scatter|embedding|transpose|contiguous|fill|clone|"
                   r"::(empty|zeros|ones|to|slice|select|view|reshape|expand|permute|t|chunk|split|narrow|arange|full|"
                   r"as_strided|unsqueeze|squeeze|stack|pad|resize_|detach|alias|lift_fresh|unbind)\b|::_(to|unsafe|reshape)"),
        ("elementwise", r"elementwise|pointwise|triton_poi|swiglu|silu|gelu|rope|rotary|sigmoid|"
                        r"::(mul|add|sub|div|neg|pow|rsqrt|sqrt|exp|cos|sin|where|clamp|round|eq|ne|lt|gt|le|ge|abs|"
                        r"bitwise|logical|reciprocal|tanh|relu|maximum|minimum|rand|normal|bernoulli|item|isfinite)"),
    )
)  # fmt: skip


def kind_of(name: str) -> str:
    """One of :data:`KINDS`; "other" for a name that no rule knows."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), "other")
