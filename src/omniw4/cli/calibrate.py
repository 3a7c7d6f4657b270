"""``omniw4 calibrate MODEL --out DIR``: text in, statistics out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniw4 import config as configs
from omniw4.cli import options, processes, settings
from omniw4.cli.output import size
from omniw4.errors import ModelError, QuantMethodError, UsageError

if TYPE_CHECKING:
    from omniw4.calibrate import HiddenSource, TokenSet
    from omniw4.calibrate.walk import Resident
    from omniw4.checkpoint import Checkpoint
    from omniw4.model import LoadedModel


def command(
    model: options.Model,
    out: options.Out,
    dataset: options.Dataset = None,
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="FILE", help="Captured hidden states (.safetensors) in place of text."),
    ] = None,
    prompts: options.Prompts = None,
    num_step: options.NumStep = 32,
    through: Annotated[
        Path | None,
        typer.Option(
            "--through", metavar="DIR", help="A checkpoint of MODEL: see inputs as its quantized linears make them."
        ),
    ] = None,
    samples: options.Samples = None,
    seq_len: options.SeqLen = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", help="Sequences a forward; the statistics stay.", show_default="1"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Which stretches of the text.", show_default="0")
    ] = None,
    bos: options.Bos = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where there would be a warning on the data.")] = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    config: options.Config = None,
    assignments: options.Set = [],  # noqa: B006
    gguf_file: options.GgufFile = None,
    trust_remote_code: options.TrustRemoteCode = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Leave the blocks on disk and load each when its turn comes: less memory.")
    ] = False,
    overwrite: options.Overwrite = False,
    json_mode: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Capture the statistics that `omniw4 quantize` needs."""
    flags = {"samples": samples, "seq_len": seq_len, "batch_size": batch_size, "seed": seed, "bos": bos}
    chosen = settings.load(config, assignments, {"calibrate": flags}).calibrate
    _check_exclusions({"--dataset": dataset, "--source": source, "--prompts": prompts, "--offload": offload or None})
    team = processes.find()
    output = options.start(json_mode=json_mode, quiet=quiet or not team.last)

    from omniw4 import calibrate, storage
    from omniw4 import model as models

    device = team.join(device)
    options.check_device(device)
    models.check_dtype(dtype)
    if team.last:
        options.check_inputs_apart(
            out, model=model, dataset=dataset, source=source, prompts=prompts, through=through, config=config
        )
        storage.OutputFolder.check(out, overwrite=overwrite, marker="stats.json")
    hidden = calibrate.read_hidden(source, strict=strict) if source is not None else None
    spoken = calibrate.read_prompts(prompts) if prompts is not None else None
    docs = calibrate.read_text(dataset) if hidden is None and spoken is None else []
    skeleton = models.skeleton(model, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    if spoken is None:
        models.check_positions(skeleton, chosen.seq_len if hidden is None else hidden.hidden_states.shape[1])
    del skeleton
    checkpoint = None if through is None else _open_checkpoint(through, model, gguf_file)
    opening: dict[str, Any] = {"dtype": dtype, "gguf_file": gguf_file, "trust_remote_code": trust_remote_code}

    def load() -> tuple[LoadedModel, TokenSet | HiddenSource, Resident | None]:
        streamed = models.offload(model, device=device, **opening) if offload else None
        loaded = models.load(model, device=device, **opening) if streamed is None else streamed.loaded
        resident: Resident | None = None if streamed is None else streamed.resident
        if checkpoint is not None:
            resident = _standing_in(loaded, checkpoint, resident, device)
        if spoken is not None:
            tokens = chosen.samples * chosen.seq_len
            captured = calibrate.capture_decoding(loaded, spoken, tokens=tokens, seed=chosen.seed, num_step=num_step)
            return loaded, captured, resident
        if hidden is not None:
            return loaded, hidden, resident
        return loaded, _tokenize(docs, loaded, chosen, calibrate.dataset_name(dataset), strict), resident

    relay = calibrate.Relay(team.rank, team.world)
    if not team.last:
        loaded, data, resident = load()
        calibrate.contribute(loaded, data, relay, batch_size=chosen.batch_size, resident=resident)
        return
    with storage.OutputFolder.begin(
        out, {"verb": "calibrate"}, overwrite=overwrite, marker="stats.json", resumable=False
    ) as folder:
        loaded, data, resident = load()
        for warning in data.warnings:
            output.warn(warning)
        passed = "" if through is None else f", through the linears of {through.name}"
        output.note(f"calibrating {loaded.source} on {_told(data.fingerprint)}{passed}")
        with output.progress("calibrating") as bar:
            stats = calibrate.calibrate(
                loaded,
                data,
                folder.result,
                batch_size=chosen.batch_size,
                on_block=lambda i, n, path: bar.step(i, n, path),
                resident=resident,
                relay=relay,
                through=None if checkpoint is None else {"checkpoint": checkpoint.hash, "recipe": checkpoint.recipe},
            )
        excluded = {name: g["excluded"] for name, g in stats.groups.items() if g["excluded"]}
        if excluded:
            worst = max(excluded, key=lambda name: excluded[name])
            output.warn(
                f"rows with NaN or inf were left out at {len(excluded)} inputs, most at {worst}: {excluded[worst]}"
            )
        written = folder.commit()
    document = {
        "out": str(out),
        "linears": len(stats.paths),
        "groups": len(stats.groups),
        "excluded_rows": excluded,
        "warnings": data.warnings,
        "fingerprint": stats.fingerprint,
    }
    total = sum(f.stat().st_size for f in written.iterdir())
    inputs = f"{len(stats.paths)} linears, {len(stats.groups)} distinct inputs"
    output.result(f"Wrote {out}/ · {inputs} · {data.fingerprint['tokens']} tokens · {size(total)}", document)


def _check_exclusions(flags: dict[str, Any]) -> None:
    for one, other, hint in (
        ("--dataset", "--source", "--source is for models that read no text"),
        ("--dataset", "--prompts", "--prompts is for an OmniVoice, which decodes them"),
        ("--source", "--prompts", "capture with --prompts, or give what is captured with --source"),
        ("--prompts", "--offload", "prompts are decoded by the whole model"),
    ):
        if flags[one] is not None and flags[other] is not None:
            raise UsageError(f"{one} and {other} exclude each other", hint=hint)


def _open_checkpoint(folder: Path, model: str, gguf_file: str | None) -> Checkpoint:
    """The checkpoint to see inputs through, known to be whole and of this very model."""
    from omniw4.checkpoint import Checkpoint, other_origin
    from omniw4.model import source_hash

    try:
        checkpoint = Checkpoint.open(folder)
    except QuantMethodError as e:
        raise UsageError(f"--through {folder.name!r} is no checkpoint of omniw4: {e.message}", hint=e.hint) from e
    if told := other_origin(checkpoint, Path(model).name, source_hash(model, gguf_file=gguf_file)):
        raise ModelError(
            f"--through {folder.name!r}: {told}", hint="give a checkpoint of the model that is calibrated, as it is now"
        )
    checkpoint.check_hashes()
    return checkpoint


def _standing_in(loaded: LoadedModel, checkpoint: Checkpoint, resident: Resident | None, device: str) -> Resident:
    import torch

    from omniw4.runtime.stand_in import stand_in_by_block

    if device.startswith("cuda") and next(loaded.model.parameters()).dtype == torch.float32:
        raise UsageError(
            "--through on a GPU runs quantized linears, which take 16 bits there, and the model is in float32",
            hint="add --dtype float16 or bfloat16, or use --device cpu",
        )
    return stand_in_by_block(loaded.model, checkpoint, resident)


def _tokenize(docs: list[str], loaded: LoadedModel, chosen: configs.Calibrate, name: str, strict: bool) -> TokenSet:
    from omniw4 import calibrate

    if loaded.tokenizer is None:
        raise UsageError(
            f"model {loaded.source!r} has no tokenizer, so that text cannot calibrate it",
            hint="give captured hidden states with --source",
        )
    return calibrate.tokenize(
        docs, loaded.tokenizer, chosen.samples, chosen.seq_len, chosen.seed, chosen.bos, strict=strict, name=name
    )


def _told(fingerprint: dict[str, Any]) -> str:
    bos = fingerprint["bos"]
    begin = f"BOS {bos['token']}" if bos["token"] is not None else "no BOS"
    counts = f"{fingerprint['samples']}×{fingerprint['seq_len']} ({fingerprint['tokens']} tokens)"
    return f"{fingerprint['dataset']}: {counts}, {begin} ({bos['policy']})"
