"""Explain the time of a step: by kind of kernel, idle time, launches, the longest gaps and the Python that ran in them.

::

    from omniw4 import profile

    engines = profile.backbone(["hf", "reference"], model, tokens=704, sequences=2, device="cpu")
    result = profile.run(engines, device="cpu", out="profile")
    result.engines         # EngineProfile: step_ms, busy_ms, idle_share, kernels, launches, breakdown, top, gaps, trace
    result.to_dict()       # the document of --json

An engine is a name and a callable that does one step (:class:`omniw4.profile.engines.Engine`).
"""

from omniw4.profile.engines import BACKENDS, Engine, backbone, omnivoice
from omniw4.profile.result import EngineProfile, Gap, KindRow, ProfileResult
from omniw4.profile.run import run

__all__ = [
    "BACKENDS",
    "Engine",
    "EngineProfile",
    "Gap",
    "KindRow",
    "ProfileResult",
    "backbone",
    "omnivoice",
    "run",
]
