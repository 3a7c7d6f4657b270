"""The whole verification on tiny models: sound checkpoints pass, and each kind of damage fails its own gate."""

import json
import math
import shutil
from datetime import UTC, datetime, timedelta

import pytest
import torch
from safetensors.torch import load_file, save_file

from omniw4 import verify
from omniw4.calibrate.dataset import tokenize
from omniw4.checkpoint import Checkpoint
from omniw4.checkpoint.header import read_header
from omniw4.config import Gates, Verify
from omniw4.errors import CheckpointError, DatasetError, UsageError
from omniw4.repack import cache
from tiny_checkpoint import make_checkpoint, make_model, make_tokenizer

SETTINGS = Verify(windows=3, seq_len=48)
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with q/k/v bias, and its checkpoint."""
    root = tmp_path_factory.mktemp("verify")
    model = make_model(root / "model", "qwen3")
    return make_checkpoint(root / "checkpoint", model), model


@pytest.fixture(scope="module")
def result(folders):
    return verify.run(*folders, settings=SETTINGS, layer_tokens=32)


def gate(result, name):
    return next(gate for gate in result.gates if gate.name == name)


def copy(folder, target):
    shutil.copytree(folder, target)
    return target


def test_a_sound_checkpoint_passes(result):
    assert result.passed, result.failed_gates
    names = [gate.name for gate in result.gates]
    assert names == [
        "structure",
        "hashes",
        "source_model",
        "untouched_tensors",
        "finite_tensors",
        "repack_identity",
        "ops_within_tolerance",
        "finite_outputs",
    ]
    assert len(result.layers) == 14
    assert result.path == "reference"
    assert result.dtype == "float32"
    assert result.peak_memory_bytes > 0


def test_the_document_has_the_documented_keys(folders, result):
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    for key in (
        "passed",
        "gates",
        "layers",
        "perplexity",
        "kl",
        "argmax_agreement",
        "effective_bits",
        "device",
        "path",
    ):
        assert key in document
    assert document["hash"] == Checkpoint.open(folders[0]).hash
    assert document["model"] == Checkpoint.open(folders[0]).provenance["source"]
    assert datetime.now(UTC) - datetime.fromisoformat(document["date"]) < timedelta(hours=1)
    assert document["perplexity"].keys() >= {"reference", "quantized", "ratio"}
    assert document["gates"][0].keys() >= {"name", "passed", "value", "limit", "detail"}
    assert document["layers"][0].keys() >= {"path", "relative_error", "sqnr_db", "op_error", "op_tolerance"}


def test_figures_equal_those_of_transformers_own_loss(folders, result):
    """Perplexity of the reference by another road: transformers' shifted loss over the same windows."""
    from transformers import AutoModelForCausalLM

    from omniw4.calibrate.dataset import read_text
    from omniw4.verify.windows import make_windows

    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    windows = make_windows(read_text(None), make_tokenizer(adds_bos=True), 3, 48, 0).ids
    with torch.no_grad():
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows]
    assert result.perplexity.reference == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)


def test_it_says_the_same_twice(folders, result):
    again = verify.run(*folders, settings=SETTINGS, layer_tokens=32)
    assert again.perplexity == result.perplexity
    assert (again.kl, again.argmax_agreement) == (result.kl, result.argmax_agreement)
    assert again.layers == result.layers
    assert again.windows == result.windows


def test_weights_alone_are_closer_than_with_quantized_activations(folders, tmp_path, result):
    weights_only = make_checkpoint(tmp_path / "a16", folders[1], act_bits=16)
    assert verify.run(weights_only, folders[1], settings=SETTINGS, layer_tokens=0).kl < 0.7 * result.kl


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("spec", [{"act_bits": 8}, {"rank": 0, "rotation": "none"}])
def test_other_models_and_specs_pass(tmp_path, kind, spec):
    model = make_model(tmp_path / "model", kind)
    found = verify.run(make_checkpoint(tmp_path / "out", model, **spec), model, settings=SETTINGS, layer_tokens=16)
    assert found.passed, found.failed_gates


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_passes(folders, dtype):
    found = verify.run(*folders, settings=Verify(windows=1, seq_len=32), layer_tokens=16, dtype=dtype)
    assert found.passed, found.failed_gates
    assert found.dtype == dtype


def test_gates_of_the_config_are_judged(folders):
    strict = Gates(max_perplexity_ratio=1e-3, max_kl=1e-9, min_argmax_agreement=1.0, max_layer_error=1e-9)
    found = verify.run(*folders, settings=Verify(windows=1, seq_len=32, gates=strict), layer_tokens=16)
    assert not found.passed
    names = {gate.name for gate in found.failed_gates}
    assert names == {"max_perplexity_ratio", "max_kl", "min_argmax_agreement", "max_layer_error"}
    assert "worst layer model.layers" in gate(found, "max_layer_error").detail
    loose = Gates(max_perplexity_ratio=1e3, max_kl=1e3, min_argmax_agreement=0.0, max_layer_error=1e3)
    assert verify.run(*folders, settings=Verify(windows=1, seq_len=32, gates=loose), layer_tokens=16).passed


def test_a_gate_on_what_was_not_measured_fails(folders):
    settings = Verify(windows=1, seq_len=32, gates=Gates(max_layer_error=1.0))
    found = verify.run(*folders, settings=settings, layer_tokens=0)
    assert [gate.name for gate in found.failed_gates] == ["max_layer_error"]
    assert "no layer was checked" in found.failed_gates[0].detail


def test_one_flipped_bit_fails_the_hashes(folders, tmp_path):
    folder = copy(folders[0], tmp_path / "copy")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    found = verify.run(folder, folders[1], settings=SETTINGS, layer_tokens=0)
    assert not gate(found, "hashes").passed
    assert "model.safetensors" in gate(found, "hashes").detail


def test_a_truncated_file_fails_the_structure_and_ends_there(folders, tmp_path):
    folder = copy(folders[0], tmp_path / "copy")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    found = verify.run(folder, folders[1], settings=SETTINGS)
    assert [gate.name for gate in found.gates] == ["structure"]
    assert not found.passed
    assert "model.safetensors" in found.gates[0].detail
    assert found.perplexity.ratio is None


def test_no_checkpoint_is_an_error_and_no_verdict(folders, tmp_path):
    with pytest.raises(CheckpointError):
        verify.run(tmp_path / "nowhere", folders[1])


def damage(folder, name, change):
    """Change a tensor of a checkpoint, hashes left as they are."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt", "omniw4_format_version": "1"})


def test_another_embedding_is_noticed(folders, tmp_path):
    folder = copy(folders[0], tmp_path / "copy")
    damage(folder, "model.embed_tokens.weight", lambda t: t[7].add_(1.0))
    found = verify.run(folder, folders[1], settings=SETTINGS, layer_tokens=0)
    assert "model.embed_tokens.weight" in gate(found, "untouched_tensors").detail
    assert not gate(found, "untouched_tensors").passed


def test_another_model_is_noticed(folders, tmp_path):
    other = make_model(tmp_path / "other", "qwen3", seed=1)
    found = verify.run(folders[0], other, settings=SETTINGS, layer_tokens=16)
    assert not gate(found, "source_model").passed
    assert not gate(found, "untouched_tensors").passed
    assert gate(found, "structure").passed


def test_a_repack_that_loses_a_bit_is_named(folders, monkeypatch):
    from omniw4 import repack

    original = repack.LAYOUTS["wgmma_s8"].unpack

    def lossy(packed, spec, n, k):
        back = original(packed, spec, n, k)
        back.w_scales[0, 0] += 1
        return back

    monkeypatch.setattr(repack.LAYOUTS["wgmma_s8"], "unpack", lossy)
    found = verify.run(*folders, settings=Verify(windows=1, seq_len=32), layer_tokens=8)
    assert "wgmma_s8 w_scales[0, 0]" in gate(found, "repack_identity").detail
    assert not any(layer.repack_identical for layer in found.layers)


def test_an_op_that_is_wrong_in_one_layer_is_named(folders, monkeypatch):
    from omniw4.runtime.linear import W4A4Linear

    original = W4A4Linear.forward

    def wrong(self, x):
        y = original(self, x)
        return y * 1.01 if self.in_features == 128 else y

    monkeypatch.setattr(W4A4Linear, "forward", wrong)
    found = verify.run(*folders, settings=Verify(windows=1, seq_len=32), layer_tokens=16)
    assert not gate(found, "ops_within_tolerance").passed
    assert "down_proj" in gate(found, "ops_within_tolerance").detail
    assert [layer.path for layer in found.layers if not layer.op_passed] == [
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    ]


def test_outputs_that_are_not_finite_fail(folders, monkeypatch):
    from omniw4.runtime.linear import W4A4Linear

    original = W4A4Linear.forward
    monkeypatch.setattr(W4A4Linear, "forward", lambda self, x: original(self, x) * float("inf"))
    settings = Verify(windows=1, seq_len=32, gates=Gates(max_kl=100.0, max_perplexity_ratio=100.0))
    found = verify.run(*folders, settings=settings, layer_tokens=8)
    failed = {gate.name for gate in found.failed_gates}
    assert failed >= {"finite_outputs", "ops_within_tolerance", "max_kl", "max_perplexity_ratio"}
    json.dumps(found.to_dict(), allow_nan=False)


def fingerprint(model, text, *, bos):
    data = tokenize([text], make_tokenizer(adds_bos=True), 4, 48, bos=bos).fingerprint
    return {"model": {}, "data": data, "dtype": "float32"}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "held-out.txt"
    file.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 20)
    return file


def test_the_text_of_the_calibration_is_warned_about(folders, tmp_path, text):
    calibration = fingerprint(folders[1], text.read_text(), bos="model")
    folder = make_checkpoint(tmp_path / "out", folders[1], calibration=calibration)
    found = verify.run(folder, folders[1], dataset=str(text), settings=SETTINGS, layer_tokens=0)
    assert any("is the text of the calibration" in warning for warning in found.warnings)
    assert found.windows["held_out"] is False
    other = verify.run(folder, folders[1], settings=SETTINGS, layer_tokens=0)
    assert other.windows["held_out"] is True
    assert not any("is the text of the calibration" in warning for warning in other.warnings)


def test_bos_follows_the_calibration_unless_told(folders, tmp_path, text):
    calibration = fingerprint(folders[1], text.read_text(), bos="never")
    folder = make_checkpoint(tmp_path / "out", folders[1], calibration=calibration)
    found = verify.run(folder, folders[1], settings=SETTINGS, layer_tokens=0)
    assert found.bos["same"] is True
    assert found.bos["evaluation"] == {"policy": "never", "token": None}
    told = verify.run(folder, folders[1], settings=SETTINGS, layer_tokens=0, bos="model")
    assert told.bos["same"] is False
    assert told.bos["evaluation"] == {"policy": "model", "token": 0}
    assert any("begin without BOS, evaluation windows begin with BOS" in warning for warning in told.warnings)
    assert told.windows["ids_sha256"] != found.windows["ids_sha256"]


def test_an_unknown_bos_policy_is_refused(folders):
    with pytest.raises(UsageError, match="sometimes"):
        verify.run(*folders, settings=SETTINGS, bos="sometimes")


def test_a_short_text_is_refused_or_said(folders, tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("Not even one window of forty-eight.")
    with pytest.raises(DatasetError, match="wanted at least 47"):
        verify.run(*folders, dataset=str(file), settings=SETTINGS)
    file.write_text("Two windows of forty-eight tokens, not three of them. " * 2)
    found = verify.run(*folders, dataset=str(file), settings=SETTINGS, layer_tokens=0)
    assert found.windows["count"] == 2
    assert any("2 of the 3 windows" in warning for warning in found.warnings)


def test_progress_goes_through_every_stage(folders):
    seen = []
    verify.run(*folders, settings=SETTINGS, layer_tokens=8, on_progress=seen.append)
    assert list(dict.fromkeys(p.stage for p in seen)) == ["structure", "layers", "evaluate"]
    for stage, total in (("layers", 14), ("evaluate", 3)):
        steps = [p for p in seen if p.stage == stage]
        assert [p.done for p in steps] == list(range(1, total + 1))
        assert all(p.total == total and p.eta_seconds >= 0 for p in steps)


def test_untouched_tensors_are_held_once(folders):
    """Sharing is what keeps two models in the memory of one and a quarter."""
    from omniw4 import model as sources
    from omniw4.runtime.load import load
    from omniw4.verify.run import _share_untouched

    reference, quantized = sources.load(folders[1], dtype="float32").model, load(folders[0])
    paths = set(sources.block_linears(reference))
    assert _share_untouched(reference, quantized, paths).passed
    pairs = dict(reference.named_parameters())
    shared = [name for name, p in quantized.named_parameters() if p.data_ptr() == pairs[name].data_ptr()]
    assert "model.embed_tokens.weight" in shared
    assert len(shared) == len(list(quantized.parameters()))


def test_untouched_tensors_are_compared_bit_for_bit():
    """NaN is the same as the same NaN, which `finite_outputs` is there for; 0 is not -0."""
    from omniw4.verify.run import _same_bits

    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64):
        x = torch.arange(6).to(dtype)
        assert _same_bits(x, x.clone())
        assert not _same_bits(x, x.flip(0))
        assert _same_bits(x[2], x[2].clone())
        assert _same_bits(x[:0], x[:0].clone())
        assert _same_bits(x.view(2, 3).T, x.view(2, 3).T.contiguous())
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    assert _same_bits(nan, nan.clone())
    assert not _same_bits(zero, -zero)
    assert not _same_bits(zero, zero.half())


def test_what_no_file_holds_is_not_judged(folders):
    """The frequencies of RoPE, made on a GPU, differ in their last bits from those made on a CPU."""
    from omniw4 import model as sources
    from omniw4.runtime.load import load
    from omniw4.verify.run import _share_untouched

    reference, quantized = sources.load(folders[1], dtype="float32").model, load(folders[0])
    paths, made = set(sources.block_linears(reference)), quantized.model.rotary_emb.inv_freq
    made.copy_(torch.nextafter(made, torch.ones_like(made)))
    assert not torch.equal(made, reference.model.rotary_emb.inv_freq)
    assert _share_untouched(reference, quantized, paths).passed
    quantized = load(folders[0])  # the one before has its tensors of the reference by now
    quantized.model.norm.weight.data[0] += 1
    assert "model.norm.weight" in _share_untouched(reference, quantized, paths).detail


def test_a_packed_cache_beside_the_checkpoint_is_compared_with_it(folders, tmp_path):
    """A flipped code in the cache, whose header is whole, would be run by the kernels without a word."""
    checkpoint = copy(folders[0], tmp_path / "checkpoint")
    report = cache.write(checkpoint, Checkpoint.open(checkpoint), "mma_s8")
    short = {"settings": Verify(windows=1, seq_len=16), "layer_tokens": 0}
    assert verify.run(checkpoint, folders[1], **short).passed
    data = bytearray(report.file.read_bytes())
    data[read_header(report.file).tensors[f"{DOWN}.qweight"].begin] ^= 1
    report.file.write_bytes(data)
    found = gate(verify.run(checkpoint, folders[1], **short), "repack_identity")
    assert not found.passed
    assert found.detail == f"{DOWN}: cache {report.file.name} qweight[0, 0]"
    report.file.write_bytes(data[:-100])
    found = gate(verify.run(checkpoint, folders[1], **short), "repack_identity")
    assert not found.passed
    assert "cannot be read" in found.detail
    cache.write(checkpoint, Checkpoint.open(checkpoint), "mma_s8")
    assert verify.run(checkpoint, folders[1], **short).passed
