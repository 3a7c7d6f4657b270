"""A verdict as verify prints it, failed and hostile to HTML."""

from __future__ import annotations

from typing import Any

VERDICT: dict[str, Any] = {
    "passed": False,
    "gates": [
        {"name": "max_kl", "passed": False, "value": 0.3, "relation": "<=", "limit": 0.1, "detail": "too <much>"}
    ],
    "layers": [{"path": "model.layers.0.mlp.up_proj", "relative_error": 0.031, "sqnr_db": 15.1}],
    "perplexity": {"reference": 13.89, "quantized": 17.04, "ratio": 1.2268, "reason": ""},
    "kl": 0.24, "argmax_agreement": 0.762, "effective_bits": 5.01, "device": "cpu", "path": "reference",
    "dtype": "float32", "warnings": ["BOS <differs> & more"],
}  # fmt: skip
