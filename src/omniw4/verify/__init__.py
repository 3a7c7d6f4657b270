"""Judge a quantized checkpoint against the model it was made from.

``verify.run(directory, model, ...) -> VerifyResult`` is the whole verb::

    from omniw4 import verify

    result = verify.run(
        "out",                      # the checkpoint folder
        "path/or/hub-id",           # the original model
        dataset=None,               # text as calibrate takes it, or hidden states (.safetensors); None: built-in
        prompts=None,               # for an OmniVoice, in place of a dataset: prompts to decode (.jsonl)
        num_step=32,                # steps of decoding a prompt
        settings=config.verify,     # config.Verify: windows, seq_len, gates
        device="cpu", dtype="auto", # "auto": float32 on a CPU, the model's own dtype on a GPU
        bos=None,                   # "model" | "always" | "never"; None: as at calibration
        layer_tokens=64,            # held-out rows each linear is checked on; 0: no layer check
        error_ranks=False,          # also the rank that would hold 95 % of each linear's code error
        gguf_file=None, trust_remote_code=False,
        on_progress=None,           # called with verify.Progress(stage, done, total, detail, eta_seconds)
    )
    result.passed                   # bool: every gate passed
    result.failed_gates             # list[Gate(name, passed, value, limit, relation, detail)]
    result.layers                   # list[LayerCheck(path, relative_error, sqnr_db, op_error, op_tolerance, ...)]
    result.perplexity               # Perplexity(reference, quantized, ratio, reason)
    result.kl, result.argmax_agreement, result.effective_bits, result.device, result.path
    result.decoding                 # of prompts: DecodingCheck(agreement, agreement_by_step, kl, match, ...)
    result.windows, result.bos, result.warnings, result.peak_memory_bytes, result.seconds
    result.to_dict()                # the document of --json

A failed gate is not an exception: the caller decides what exit code it means. A folder that is no checkpoint, a model
that cannot be read or a text that is too short raise their own :class:`omniw4.errors.OmniW4Error`.
"""

from omniw4.verify.result import Gate, LayerCheck, Perplexity, Progress, VerifyResult
from omniw4.verify.run import LAYER_TOKENS, run

__all__ = ["LAYER_TOKENS", "Gate", "LayerCheck", "Perplexity", "Progress", "VerifyResult", "run"]
