"""What a model costs on a GPU, before any kernel is built: operations, bytes, bound, time at every width.

::

    from omniw4 import roofline

    result = roofline.compute(roofline.omnivoice(), roofline.get("H200"), 704)
    result.rows            # op, shape, count, ops, bytes, intensity, bound, times by width, speedup(width)
    result.total_us("w4a4")
    result.to_dict()       # the document of --json

Pure arithmetic on shapes: no weights, no GPU, no torch (:func:`of_source` aside, which builds the model on the meta
device, and :func:`omniw4.roofline.measure.measured`).
"""

from omniw4.roofline.cost import WIDTHS
from omniw4.roofline.gpu import Gpu, get, known, of_device
from omniw4.roofline.model import Backbone, LinearOp, NormOp, of_checkpoint, of_config, of_source, omnivoice
from omniw4.roofline.table import Roofline, Row, Time, compute

__all__ = [
    "WIDTHS",
    "Backbone",
    "Gpu",
    "LinearOp",
    "NormOp",
    "Roofline",
    "Row",
    "Time",
    "compute",
    "get",
    "known",
    "of_checkpoint",
    "of_config",
    "of_device",
    "of_source",
    "omnivoice",
]
