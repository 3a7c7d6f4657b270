"""``omniw4 verify DIR --model MODEL``: is the checkpoint sound, and how good is it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from omniw4.cli import options, settings
from omniw4.cli.output import clock, figure, size, table
from omniw4.errors import UsageError, VerdictError

if TYPE_CHECKING:
    from omniw4.verify import Gate, VerifyResult

_SHOWN_LAYERS = 5
_QUALITY = (
    "quantize again with `--config default`, more calibration text, `--override '*.down_proj:act_bits=8'` or a higher"
    " rank; or loosen the gate"
)
_WHAT_HELPS = {
    "structure": "copy the checkpoint again, or make it anew with `omniw4 quantize`",
    "hashes": "copy the checkpoint again, or make it anew with `omniw4 quantize`",
    "finite_tensors": "make the checkpoint anew with `omniw4 quantize`",
    "untouched_tensors": "give the model that the checkpoint was made from with --model, as it was then",
    "source_model": "give the model that the checkpoint was made from with --model, as it was then",
    "repack_identity": "make a damaged cache anew with `omniw4 repack DIR --overwrite`; without one this is a bug",
    "ops_within_tolerance": "compile the kernels anew with `make kernels`; on a CPU this is a bug of omniw4",
    "finite_outputs": "try --dtype bfloat16 or float32; float16 overflows in some models",
}


def command(
    directory: options.Checkpoint,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="The original: folder, .gguf file, or Hub name.")
    ],
    dataset: options.Dataset = None,
    prompts: options.Prompts = None,
    num_step: options.NumStep = 32,
    windows: Annotated[
        int | None, typer.Option("--windows", metavar="N", help="Held-out windows.", show_default="16")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", metavar="N", help="Tokens a window.", show_default="1024")
    ] = None,
    bos: options.Bos = None,
    layer_tokens: Annotated[
        int,
        typer.Option("--layer-tokens", metavar="N", min=0, help="Held-out rows each linear is checked on; 0: none."),
    ] = 64,
    error_ranks: Annotated[
        bool,
        typer.Option("--error-ranks", help="Also find the rank that holds 95 % of each linear's code error; slow."),
    ] = False,
    max_perplexity_ratio: Annotated[
        float | None,
        typer.Option("--max-perplexity-ratio", metavar="X", help="Gate: quantized over reference perplexity."),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", metavar="X", help="Gate: mean KL divergence in nats.")
    ] = None,
    min_argmax_agreement: Annotated[
        float | None, typer.Option("--min-argmax-agreement", metavar="X", help="Gate: share of equal first choices.")
    ] = None,
    max_layer_error: Annotated[
        float | None, typer.Option("--max-layer-error", metavar="X", help="Gate: relative error of the worst linear.")
    ] = None,
    config: options.Config = None,
    assignments: options.Set = [],  # noqa: B006
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check a checkpoint, and compare it with the model it was made from; exit code 1 when a gate fails."""
    gates = {
        "max_perplexity_ratio": max_perplexity_ratio,
        "max_kl": max_kl,
        "min_argmax_agreement": min_argmax_agreement,
        "max_layer_error": max_layer_error,
    }
    flags = {"windows": windows, "seq_len": seq_len, "gates": gates}
    chosen = settings.load(config, assignments, {"verify": flags}).verify
    if dataset is not None and prompts is not None:
        raise UsageError("--dataset and --prompts exclude each other", hint="--prompts is for an OmniVoice")
    output = options.start(json_mode=json_mode, quiet=quiet)

    from omniw4.verify.run import run

    options.check_device(device)
    with output.progress("verifying") as bar:
        result = run(
            directory,
            model,
            dataset=dataset,
            prompts=prompts,
            num_step=num_step,
            settings=chosen,
            device=device,
            dtype=dtype,
            bos=bos,
            layer_tokens=layer_tokens,
            error_ranks=error_ranks,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
            on_progress=lambda p: bar.step(p.done, p.total, p.detail, p.eta_seconds, title=p.stage),
        )
    for warning in result.warnings:
        output.warn(warning)
    output.result(report(result), result.to_dict())
    if not result.passed:
        failed = result.failed_gates
        count = f"{len(failed)} of {len(result.gates)} gates failed"
        raise VerdictError(f"{count}: {'; '.join(map(_told, failed))}", hint=_what_helps(failed[0]))


def report(result: VerifyResult) -> str:
    """The verdict for a person."""
    parts = []
    if result.layers:
        worst = sorted(result.layers, key=lambda layer: -layer.relative_error)[:_SHOWN_LAYERS]
        rows = [
            (c.path, f"{c.out_features}×{c.in_features}", f"{c.relative_error:.5f}", f"{c.sqnr_db:.1f}",
             f"{c.op_error:.1e}", f"{c.effective_bits:.2f}")
            for c in worst
        ]  # fmt: skip
        head = (
            f"worst {len(worst)} of {len(result.layers)} linears",
            "shape",
            "rel. error",
            "SQNR dB",
            "op error",
            "bits",
        )
        parts.append(table(head, rows))
    p = result.perplexity
    perplexity = f"{figure(p.quantized, '.3f')} against {figure(p.reference, '.3f')}, ratio {figure(p.ratio, '.4f')}"
    facts = [
        ("perplexity", perplexity if p.ratio is not None else f"- ({p.reason or 'not measured'})"),
        ("KL", f"{figure(result.kl, '.4f')} nats"),
        ("argmax agreement", figure(result.argmax_agreement, ".2%")),
        ("bits a weight", f"{figure(result.effective_bits, '.2f')}, low-rank branch included"),
        ("ran", f"{result.path or '-'} on {result.device}, {result.dtype or '-'}"),
    ]
    if ranks := sorted(layer.rank_95 for layer in result.layers if layer.rank_95 is not None):
        told = f"from {ranks[0]} to {ranks[-1]}, median {ranks[len(ranks) // 2]}"
        facts.append(("rank for 95 %", f"{told}: of what the codes alone miss"))
    if (d := result.decoding) is not None:
        facts[2] = ("step agreement", f"{d.agreement:.2%} of masked codes, {d.prompts} prompts, {d.num_step} steps")
        alone = f"{d.match:.2%} of codes decoded alone, {d.identical} of {d.prompts} prompts to the last code"
        facts.insert(3, ("final match", alone))
    if result.hidden_error is not None:
        facts.insert(3, ("hidden states", f"relative error {result.hidden_error:.5f}"))
    if result.peak_memory_bytes:
        facts.append(("took", f"{clock(sum(_stages(result)))}, {size(result.peak_memory_bytes)} at the peak"))
    parts.append("\n".join(f"{name:<17} {value}" for name, value in facts))
    parts.append("\n".join(f"{'pass' if gate.passed else 'FAIL'}  {_told(gate)}" for gate in result.gates))
    parts.append("passed" if result.passed else "failed")
    return "\n\n".join(parts)


def _what_helps(gate: Gate) -> str:
    """What to do about a failed gate; those without an entry judge quality."""
    if gate.value is None:
        return "this model or --dataset does not give the figure: leave the gate out"
    return _WHAT_HELPS.get(gate.name, _QUALITY)


def _stages(result: VerifyResult) -> list[float]:
    return [seconds for name, seconds in result.seconds.items() if not name.startswith("forward_")]


def _told(gate: Gate) -> str:
    if isinstance(gate.limit, bool):
        return f"{gate.name}{f': {gate.detail}' if gate.detail else ''}"
    detail = f" ({gate.detail})" if gate.detail else ""
    return f"{gate.name}: {figure(gate.value, '.5g')} {gate.relation} {gate.limit}{detail}"
