"""Weights and statistics in, :class:`omniw4.tensors.QuantizedLinear` out: pure maths, and the walk over layers."""
