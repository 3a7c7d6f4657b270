"""Stands in for torchaudio beside a CPU build of torch: the package omnivoice uses ``functional.resample`` alone."""

from torchaudio import functional

__all__ = ["functional"]
