"""Distillation: train what a checkpoint keeps in floating point against the original model; the codes stay.

``student`` makes one quantized linear trainable, ``loss`` measures the distance of two models' outputs, ``trainer``
is the loop, ``state`` the file an interrupted run goes on from. Like the rest of the quantizer it knows no folders
and no datasets: sequences come in as tensors, and a callable takes the result.
"""

from omniw4.distill.student import Student, StudentLinear
from omniw4.distill.trainer import Example, Progress, Report, distill

__all__ = ["Example", "Progress", "Report", "Student", "StudentLinear", "distill"]
