"""Statistics on disk: what is written is read back, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calibration_models import MODELS, make_tokenizer, token_set
from safetensors.torch import load_file, save_file

from collected import Collected
from omniw4.calibrate import Stats, calibrate, fingerprint
from omniw4.calibrate.capture import capture
from omniw4.calibrate.sources import HiddenSource, TokenSource
from omniw4.calibrate.stats import pack_upper, unpack_upper
from omniw4.errors import ModelError, StatsError
from omniw4.model import LoadedModel, block_linears

DATA = token_set([24, 24, 10])
Q = "model.layers.0.self_attn.q_proj"


def loaded(name: str = "qwen3") -> LoadedModel:
    return LoadedModel(MODELS[name](), make_tokenizer(), "some/model", "abc123")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    calibrate(loaded(), DATA, tmp_path, batch_size=2)
    return tmp_path


@pytest.mark.parametrize("k", [1, 2, 64, 65])
def test_a_packed_triangle_is_the_matrix(k: int) -> None:
    matrix = torch.randn(k, k)
    matrix = matrix + matrix.T
    packed = pack_upper(matrix)
    assert packed.tolist() == [matrix[i, j].item() for i in range(k) for j in range(i, k)]
    assert torch.equal(unpack_upper(packed, k), matrix)


@pytest.mark.parametrize("k", [512, 513, 1300])
def test_a_triangle_of_several_panels_is_the_matrix(k: int) -> None:
    matrix = torch.randn(k, k)
    matrix = matrix + matrix.T
    packed = pack_upper(matrix)
    assert torch.equal(packed, matrix[torch.ones(k, k, dtype=torch.bool).triu()])
    assert torch.equal(unpack_upper(packed, k), matrix)


def test_every_block_linear_reads_back_bit_for_bit(folder: Path) -> None:
    sink = Collected()
    capture(loaded().model, TokenSource(DATA), sink, batch_size=2)
    stats = Stats.open(folder)
    assert stats.paths == list(block_linears(loaded().model))
    for path in stats.paths:
        found, wanted = stats.linear(path), sink.stats[path]
        for name in ("hessian", "hessian_normalized", "absmax", "rms"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), (path, name)
        assert (found.tokens, found.excluded) == (58, 0)


def test_linears_of_one_input_name_one_group(folder: Path) -> None:
    stats = Stats.open(folder)
    assert {stats.group_of(Q.replace("q_proj", p)) for p in ("q_proj", "k_proj", "v_proj")} == {Q}
    assert stats.group_of(Q.replace("q_proj", "o_proj")) != Q


def test_the_json_is_readable_and_complete(folder: Path) -> None:
    document = json.loads((folder / "stats.json").read_text())
    assert document["fingerprint"] == fingerprint(loaded(), DATA)
    assert document["fingerprint"]["model"] == {"name": "some/model", "hash": "abc123"}
    assert document["fingerprint"]["data"] == DATA.fingerprint
    assert document["fingerprint"]["dtype"] == "float32"
    assert {"omniw4", "torch", "transformers"} <= document["provenance"].keys()
    assert str(folder) not in (folder / "stats.json").read_text()


def test_equal_calibrations_write_equal_bytes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    calibrate(loaded(), DATA, other, batch_size=2)
    assert (other / "stats.safetensors").read_bytes() == (folder / "stats.safetensors").read_bytes()


def test_a_calibration_that_fails_leaves_nothing_that_opens(tmp_path: Path) -> None:
    def stop(done: int, total: int, path: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(loaded(), DATA, tmp_path, on_block=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StatsError, match=r"holds no stats\.json"):
        Stats.open(tmp_path)


def test_statistics_of_another_model_are_refused(folder: Path) -> None:
    Stats.open(folder).check_model("abc123")
    with pytest.raises(StatsError, match="another model than the one given: of 'some/model'"):
        Stats.open(folder).check_model("def456")


def test_a_linear_without_statistics_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(StatsError, match=r"no statistics for lm_head"):
        Stats.open(folder).linear("lm_head")


def truncate(folder: Path) -> None:
    path = folder / "stats.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = json.loads((folder / "stats.json").read_text())
        change(document)
        (folder / "stats.json").write_text(json.dumps(document))

    return apply


def drop_tensor(folder: Path) -> None:
    from safetensors import safe_open

    path = folder / "stats.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors[f"{Q}.rms"]
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "stats.json").unlink(), r"holds no stats\.json"),
        (lambda f: (f / "stats.safetensors").unlink(), r"holds no stats\.safetensors"),
        (lambda f: (f / "stats.json").write_text("{"), "not readable"),
        (lambda f: (f / "stats.json").write_text("[]"), "not readable"),
        (lambda f: (f / "stats.json").write_text('{"a":' * 100_000), "not readable"),
        (edit(lambda d: d["groups"][Q].update(tokens="3")), f"not readable: ValueError {Q} has the counts"),
        (edit(lambda d: d["groups"][Q].update(in_features=-1)), f"not readable: ValueError {Q} has the counts"),
        (edit(lambda d: d.pop("groups")), "groups"),
        (edit(lambda d: d.update(format_version=99)), "format version 99, wanted 1"),
        (edit(lambda d: d["fingerprint"].update(dtype="float16")), "different calibrations"),
        (truncate, r"stats\.safetensors .* damaged \(\d+ bytes"),
        (drop_tensor, r"lacks model\.layers\.0\.self_attn\.q_proj\.rms"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(StatsError, match=message):
        Stats.open(folder)


def test_counts_and_tensors_must_fit(folder: Path) -> None:
    edit(lambda d: d["groups"][Q].update(in_features=3))(folder)
    with pytest.raises(StatsError, match=rf"{Q}\.hessian of the statistics has shape \[\d+\], wanted \[6\]"):
        Stats.open(folder).linear(Q)


def test_statistics_that_are_replaced_while_they_are_read(folder: Path) -> None:
    """By another calibration into the same folder: a checkpoint of two would be of neither."""
    from safetensors import safe_open

    opened, path = Stats.open(folder), folder / "stats.safetensors"
    opened.linear(Q)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, {**metadata, "fingerprint": "0" * 64})
    with pytest.raises(StatsError, match="were replaced while they were read"):
        opened.linear(Q)


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(StatsError, match="no statistics folder"):
        Stats.open(tmp_path / "none")


def test_statistics_with_nan_are_refused_when_read(folder: Path) -> None:
    from safetensors import safe_open

    path = folder / "stats.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[f"{Q}.hessian"][7] = float("nan")
    save_file(tensors, path, metadata)
    with pytest.raises(StatsError, match=r"q_proj hold NaN"):
        Stats.open(folder).linear(Q)


@pytest.mark.parametrize("name", ["hessian", "hessian_normalized", "absmax", "rms"])
def test_a_flipped_bit_is_refused_when_read(folder: Path, name: str) -> None:
    from safetensors import safe_open

    path = folder / "stats.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors[f"{Q}.{name}"].view(torch.int32)[1] ^= 1
    save_file(tensors, path, metadata)
    with pytest.raises(StatsError, match="q_proj are not what was written"):
        Stats.open(folder).linear(Q)


def test_statistics_of_an_earlier_version_have_no_hash(folder: Path) -> None:
    wanted = Stats.open(folder).linear(Q)
    edit(lambda d: [group.pop("sha256") for group in d["groups"].values()])(folder)
    assert torch.equal(Stats.open(folder).linear(Q).hessian, wanted.hessian)


def test_data_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    big = token_set([24])
    big.tokens[0, 0] = 300
    with pytest.raises(ModelError, match=r"token 300 .* vocabulary of 300"):
        calibrate(loaded(), big, tmp_path)
    narrow = HiddenSource(torch.zeros(1, 8, 64), torch.ones(1, 8, dtype=torch.bool))
    with pytest.raises(ModelError, match="64 wide, the model's backbone is 128"):
        calibrate(loaded("llm"), narrow, tmp_path)
