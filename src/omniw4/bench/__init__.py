"""Time the ops and the model, quantized against the original.

``bench.run(directory, model, ...) -> BenchResult`` is the whole verb::

    from omniw4 import bench

    result = bench.run(
        "out",                        # checkpoint: gives the shapes and the spec; None: the backbone's shapes
        "path/or/hub-id",             # the original; needed for "model" and "quantize"
        what=("ops",),                # any of bench.WHAT: "ops", "model", "quantize", "backbone", "omnivoice"
        shapes=bench.parse_shapes("16x2048x1024,..."),   # --shapes MxNxK; None: every (N, K) at several M
        prefill=bench.parse_prefill("1x128,2x352"),      # --prefill BATCHxTOKENS for "model"; None: a few
        device="cpu", dtype="auto",   # "auto": float32 on a CPU, float16 on a GPU
        engines=None, tokens=None,    # --engines and --tokens for "backbone"; --engines for "omnivoice" too; None: all
        layout=None,                  # kernel family; None: the best compiled for the device
        warmup=None, repetitions=None,
        calibrate_flags=(), quantize_flags=(),   # passed on by "quantize", such as ("--samples", "32")
        gguf_file=None, trust_remote_code=False,
        on_progress=None,             # called with bench.Progress(stage, done, total, detail)
    )
    result.environment.line()         # one line for above the table
    result.notes                      # what must be said wherever a number is printed
    result.ops                        # list[OpRow]: op m n k timing tops gbs intensity roofline speedup
    result.model                      # list[ModelRow]: batch seq_len mode quantized original speedup relative_error
    result.quantize                   # list[ProcessRow]: what seconds cpu_seconds peak_rss_bytes
    result.backbone               # list[BackboneRow]: engine tokens bucket timing speedups error weight_bytes
    result.omnivoice                  # list[OmniVoiceRow]: engine batch samples mean_rtf speedup memory_bytes start_up
    result.passed                     # every output was checked against FP64 before it was timed
    result.to_dict()                  # the document of --json, raw samples included

Times are microseconds. A row whose output is wrong is not timed; ``passed`` is False then, and the caller decides what
exit code that means.
"""

from omniw4.bench.linear import parse_shapes
from omniw4.bench.model import parse_prefill
from omniw4.bench.result import BackboneRow, BenchResult, Ceiling, ModelRow, OpRow, ProcessRow, Progress
from omniw4.bench.run import WHAT, run
from omniw4.bench.timing import Timing

__all__ = [
    "WHAT",
    "BackboneRow",
    "BenchResult",
    "Ceiling",
    "ModelRow",
    "OpRow",
    "ProcessRow",
    "Progress",
    "Timing",
    "parse_prefill",
    "parse_shapes",
    "run",
]
