"""Quantized linears in any Hugging Face model: the module, the swap, loading a checkpoint. Imports nothing."""
