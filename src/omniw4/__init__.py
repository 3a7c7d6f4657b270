"""omniw4: W4A4 quantization and inference for Qwen3-like models."""

__version__ = "0.1.0"
