"""Configs: precedence, validation, and every shipped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from omniw4 import config
from omniw4.errors import ConfigError

SHIPPED = sorted(p.stem for p in config.config_dir().glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_shipped_files() -> None:
    assert {"default", "best", "seed", "rtn", "w4a8", "float16"} <= set(SHIPPED)


def test_shipped_files_are_what_their_names_say() -> None:
    default, half, eight = (config.load(name) for name in ("default", "float16", "w4a8"))
    assert default.recipe.weights.scale_type == eight.recipe.weights.scale_type == "integer"
    changed = config.difference(default.model_dump(), half.model_dump())
    assert changed == ["recipe.weights.scale_type: 'integer' -> 'float16'"]
    assert (default.recipe.activations.bits, eight.recipe.activations.bits) == (4, 8)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_config_loads(name: str) -> None:
    loaded = config.load(name)
    again = config.parse(loaded.model_dump(mode="json"), origin="dump")
    assert again == loaded, "what is stored in a checkpoint re-runs as it is"


def test_recipes_of_before_there_was_an_order_are_those_of_today() -> None:
    """Stored recipes, fingerprints of runs and keys of comparisons are dumps; a natural order is not in them."""
    stored = config.load().recipe.model_dump(mode="json")
    assert list(stored["gptq"]) == ["enabled", "hessian", "damp", "block_size", "sweeps"]
    assert config.parse({"recipe": stored}, origin="stored").recipe == config.load().recipe
    ordered = config.load(None, {"recipe": {"gptq": {"order": "activation"}}}).recipe.model_dump(mode="json")
    assert config.difference(stored, ordered) == ["gptq.order: none -> 'activation'"]
    again = config.parse({"recipe": ordered}, origin="stored").recipe
    assert again.gptq.order == "activation"


@pytest.mark.parametrize(("value", "read"), [(0, 0.0), (1, 1.0), ("0.5", 0.5), (0.3, 0.3), ("search", "search")])
def test_the_strength_of_smoothing_is_a_number_or_a_search(value: Any, read: Any) -> None:
    smooth = config.load(None, {"recipe": {"smooth": {"strength": value}}}).recipe.smooth
    assert (smooth.strength, type(smooth.strength)) == (read, type(read))
    assert smooth.model_dump(mode="json")["strength"] == read
    assert smooth.enabled == (read != 0)


def test_default_spells_out_every_key() -> None:
    def keys(model: type[BaseModel]) -> dict[str, Any]:
        nested = {n: f.annotation for n, f in model.model_fields.items()}
        is_model = lambda t: isinstance(t, type) and issubclass(t, BaseModel)  # noqa: E731
        return {n: keys(t) if is_model(t) else None for n, t in nested.items()}

    def shape(data: Any) -> Any:
        return {k: shape(v) if isinstance(v, dict) else None for k, v in data.items()}

    text = (config.config_dir() / "default.yaml").read_text(encoding="utf-8")
    assert shape(yaml.safe_load(text)) == keys(config.Config)


def test_a_file_is_a_diff_on_the_default(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "recipe: {lowrank: {rank: 32}}")
    loaded, default = config.load(path), config.load()
    assert loaded.recipe.lowrank.rank == 32
    assert config.difference(default.model_dump(), loaded.model_dump()) == ["recipe.lowrank.rank: 16 -> 32"]


def test_precedence_flags_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "calibrate: {samples: 5, seed: 7}")
    loaded = config.load(path, {"calibrate": {"samples": 9, "seed": None}, "recipe": {"lowrank": {"rank": None}}})
    assert loaded.calibrate.samples == 9
    assert loaded.calibrate.seed == 7, "a flag that was not given changes nothing"
    assert loaded.calibrate.seq_len == config.load().calibrate.seq_len


def test_zero_and_false_are_values_not_absence() -> None:
    loaded = config.load(None, {"recipe": {"lowrank": {"rank": 0}, "gptq": {"enabled": False}}})
    assert loaded.recipe.lowrank.rank == 0
    assert loaded.recipe.gptq.enabled is False


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert config.load(write(tmp_path / "empty.yaml", "")) == config.load()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("recipe: {lowrank: {rank: 512}}", "recipe.lowrank.rank"),
        ("recipe: {lowrank: {rnak: 8}}", "recipe.lowrank.rnak"),
        ("recipes: {}", "recipes"),
        ("recipe: {activations: {clip: 0}}", "recipe.activations.clip"),
        ("recipe: {activations: {clip: 1.5}}", "recipe.activations.clip"),
        ("recipe: {rotation: full}", "recipe.rotation"),
        ("recipe: {smooth: {strength: seek}}", "smooth.strength is 'seek', wanted a number from 0 to 1, or search"),
        ("recipe: {smooth: {strength: 1.5}}", "recipe.smooth.strength is 1.5, wanted a number from 0 to 1, or search"),
        ("recipe: {smooth: {strength: true}}", "recipe.smooth.strength is true"),
        ("recipe: {smooth: {strength: .nan}}", "recipe.smooth.strength is nan"),
        ("recipe: {gptq: {order: size}}", "recipe.gptq.order"),
        ("recipe: {overrides: [{act_bits: 8}]}", "recipe.overrides.0.pattern"),
        ("calibrate: {samples: 0}", "calibrate.samples"),
        ("calibrate: {samples: many}", "calibrate.samples"),
        ("verify: {gates: {min_argmax_agreement: 2}}", "verify.gates.min_argmax_agreement"),
        ("recipe: [1, 2]", "recipe"),
        ("[1, 2]", "list"),
        ("recipe: {", "cannot read"),
        ("\x00", "cannot read"),
    ],
)
def test_wrong_files_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path / "wrong.yaml", text)
    with pytest.raises(ConfigError, match=r"wrong\.yaml") as caught:
        config.load(path)
    assert named in caught.value.message


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.yaml", "calibrate: {samples: 0, seq_len: 0}\nrecipe: {group_size: 0}")
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    for name in ("calibrate.samples", "calibrate.seq_len", "recipe.group_size"):
        assert name in caught.value.message


def test_missing_file_lists_the_shipped_ones(tmp_path: Path) -> None:
    for source in (tmp_path / "none.yaml", "none"):
        with pytest.raises(ConfigError, match="no config file") as caught:
            config.load(source)
        assert "seed" in caught.value.hint


def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot read config"):
        config.load(path)


def test_merge_leaves_its_arguments_alone() -> None:
    base: dict[str, Any] = {"a": {"b": 1, "c": [1, 2]}}
    assert config.merge(base, {"a": {"c": [3]}, "d": 4}) == {"a": {"b": 1, "c": [3]}, "d": 4}
    assert base == {"a": {"b": 1, "c": [1, 2]}}


def test_difference_names_leaves() -> None:
    a = {"x": 1, "y": {"z": 2, "same": 0}, "gone": True}
    b = {"x": 1, "y": {"z": 3, "same": 0}, "new": "n"}
    assert config.difference(a, b) == ["gone: True -> none", "new: none -> 'n'", "y.z: 2 -> 3"]
    assert config.difference(a, a) == []


def test_difference_of_hashes_names_the_key_alone() -> None:
    a = {"model": {"name": "a", "hash": "0" * 64}, "calibration": None}
    b = {"model": {"name": "a", "hash": "f" * 64}, "calibration": {"tokens": 8}}
    assert config.difference(a, b) == ["calibration: none -> some", "model.hash is another"]
