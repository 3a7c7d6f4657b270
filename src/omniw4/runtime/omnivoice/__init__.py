"""The package omnivoice on the fused engine: ``accelerate(model, checkpoint)``, ``restore(model)``."""

from omniw4.runtime.omnivoice.patch import Accelerated, accelerate, restore

__all__ = ["Accelerated", "accelerate", "restore"]
