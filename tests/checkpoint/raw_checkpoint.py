"""A small checkpoint written with json and struct alone, independent of the package's own writer."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "linear.safetensors"
PATH = "model.layers.0.mlp.down_proj"  # the golden linear: N=24, K=192, R=16, smooth, bias
PLAIN = "model.layers.0.mlp.up_proj"  # N=8, K=128, no low-rank branch, no smoothing, no bias
ITEMSIZE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
Tensor = tuple[str, list[int], bytes]


def report(out_features: int, in_features: int) -> dict[str, Any]:
    return {
        "out_features": out_features,
        "in_features": in_features,
        "method": "gptq",
        "relative_error": 0.01,
        "sqnr_db": 20.0,
        "damp": 0.01,
        "rank_energy": None,
        "rounds": [0.02, 0.01, None],
        "best_round": 1,
        "rtn_error": 0.02,
        "warnings": [],
    }


def golden_tensors() -> dict[str, Tensor]:
    with safe_open(GOLDEN, "np") as file:
        names = ("qweight", "w_scales", "proj_down", "proj_up", "smooth", "bias")
        arrays = {name: file.get_tensor(name) for name in names}
    return {
        f"{PATH}.{name}": ("U8" if name == "qweight" else "F16", list(array.shape), array.tobytes())
        for name, array in arrays.items()
    }


@dataclass
class RawCheckpoint:
    """Everything a checkpoint consists of, to be edited and written."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    shards: int = 1
    unlisted: set[str] = field(default_factory=set)  # tensors left out of the manifest
    listed: dict[str, str] = field(default_factory=dict)  # manifest entries that differ from the tensors
    absent: set[str] = field(default_factory=set)  # tensors listed and not written

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(name for name in self.tensors if name not in self.absent)
        size = math.ceil(len(names) / self.shards)
        parts = [names[i : i + size] for i in range(0, len(names), size)]
        files = (
            ["model.safetensors"]
            if self.shards == 1
            else [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
        )
        for file, part in zip(files, parts, strict=True):
            write_tensors(folder / file, {name: self.tensors[name] for name in part})
        described = {
            name: f"{dtype}[{','.join(map(str, shape))}]"
            for name, (dtype, shape, _) in self.tensors.items()
            if name not in self.unlisted
        }
        digests = hashes(folder, files)
        manifest = {"tensors": {**described, **self.listed}, "files": digests, **self.manifest}
        manifest["hash"] = content_hash(self.config.get("quantization_config"), digests)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "omniw4.json").write_text(json.dumps(manifest))
        if self.shards > 1:
            weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder


def hashes(folder: Path, files: list[str]) -> dict[str, Any]:
    return {
        file: {
            "bytes": (folder / file).stat().st_size,
            "sha256": hashlib.sha256((folder / file).read_bytes()).hexdigest(),
        }
        for file in files
    }


def content_hash(quantization_config: Any, files: dict[str, Any]) -> str:
    shards = {name: entry["sha256"] for name, entry in files.items()}
    canonical = json.dumps([quantization_config, shards], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    write_parts(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_parts(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def read_parts(path: Path) -> tuple[bytes, bytes]:
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return raw[8:end], raw[end:]


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header's JSON, an object, in place."""
    raw, data = read_parts(path)
    header = json.loads(raw)
    edit(header)
    write_parts(path, json.dumps(header).encode(), data)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def zeros(dtype: str, *shape: int) -> Tensor:
    return (dtype, list(shape), bytes(ITEMSIZE[dtype] * math.prod(shape)))


def raw_checkpoint(shards: int = 1) -> RawCheckpoint:
    settings = {
        "weight_bits": 4,
        "act_bits": 4,
        "act_clip": 0.95,
        "group_size": 64,
        "rank": 16,
        "rotation": "hadamard64",
        "smooth": True,
        "scale_type": "float16",
    }
    modules = {PATH: {}, PLAIN: {"rank": 0, "smooth": False, "act_bits": 8}, "lm_head": "skip"}
    return RawCheckpoint(
        tensors={
            **golden_tensors(),
            f"{PLAIN}.qweight": zeros("U8", 8, 64),
            f"{PLAIN}.w_scales": zeros("F16", 8, 2),
            "lm_head.weight": zeros("F32", 5, 64),
            "model.norm.weight": zeros("BF16", 64),
        },
        config={
            "architectures": ["Qwen3ForCausalLM"],
            "quantization_config": {"quant_method": "omniw4", "format_version": 1, **settings, "modules": modules},
        },
        manifest={
            "format_version": 1,
            "omniw4_version": "0.1.0",
            "source": {"name": "tiny", "hash": "0" * 64},
            "recipe": {"lowrank": {"rank": 16}},
            "calibration": None,
            "layers": {PATH: report(24, 192), PLAIN: report(8, 128)},
            "skipped": {"lm_head": "outside the repeated blocks"},
        },
        shards=shards,
    )
