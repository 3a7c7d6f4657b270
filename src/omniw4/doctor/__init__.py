"""What this machine can run: versions, GPU, compiled kernels and whether each computes the right integers.

::

    from omniw4 import doctor

    checks = doctor.run()          # list[Check(name, status, found, advice)]
    doctor.worst(checks)           # "ok", "warning" or "problem"
"""

from omniw4.doctor.check import Check, worst
from omniw4.doctor.run import run

__all__ = ["Check", "run", "worst"]
