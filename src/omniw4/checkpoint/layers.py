"""Finished layers of an unfinished run, one file each: what ``--resume`` goes on with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from urllib.parse import quote

from omniw4.checkpoint import schema
from omniw4.checkpoint.header import TensorFile, read_header
from omniw4.checkpoint.reader import check_linear_values, dump_report, parse_report, read_tensor
from omniw4.errors import CheckpointError, MalformedHeaderError
from omniw4.storage import TensorFileWriter, sha256_tensors
from omniw4.storage.files import without_nan
from omniw4.tensors import LayerReport, LinearSpec, QuantizedLinear


class LayerStore:
    """Quantized linears in ``<partial>/layers/``, each whole or absent.

    Args:
        partial: the ``partial`` of an :class:`omniw4.storage.OutputFolder`.
    """

    def __init__(self, partial: str | Path) -> None:
        self.folder = Path(partial) / "layers"
        self._files: dict[str, TensorFile] = {}
        if self.folder.is_dir():
            for file in sorted(self.folder.glob("*.safetensors")):
                self._adopt(file)

    def put(self, path: str, linear: QuantizedLinear, report: LayerReport) -> None:
        """Store one linear, replacing an earlier one of the same path.

        Raises:
            NonFiniteTensorError, ScaleValueError: values that no reader would accept.
            StorageError: it cannot be written.
        """
        check_linear_values(path, linear)
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = linear.tensors()
        metadata = {
            "path": path,
            "spec": json.dumps(linear.spec.to_dict()),
            "report": json.dumps(without_nan(dump_report(report))),
            "seconds": repr(float(report.seconds)),
            "sha256": sha256_tensors(tensors.values()),
        }
        file = self._file_of(path)
        with TensorFileWriter(file, {f"{path}.{k}": (t.dtype, t.shape) for k, t in tensors.items()}, metadata) as out:
            for part, tensor in tensors.items():
                out.write(f"{path}.{part}", tensor)
        self._files[path] = read_header(file)
        schema.check_linear(path, linear.spec, self._files[path].tensors)

    def done(self) -> set[str]:
        """Paths of the linears that are here."""
        return set(self._files)

    def spec(self, path: str) -> LinearSpec:
        return LinearSpec(**json.loads(self._files[path].metadata["spec"]))

    def report(self, path: str) -> LayerReport:
        report = parse_report(path, json.loads(self._files[path].metadata["report"]))
        report.seconds = float(self._files[path].metadata["seconds"])
        return report

    def file(self, path: str) -> TensorFile:
        """The file of one linear; its tensors have their full names."""
        return self._files[path]

    def linear(self, path: str) -> QuantizedLinear:
        return _linear(self.spec(path), self._files[path])

    def _file_of(self, path: str) -> Path:
        name = quote(path, safe="")
        if len(name) > 200:  # file systems end at 255
            name = hashlib.sha256(path.encode()).hexdigest()
        return self.folder / f"{name}.safetensors"

    def _adopt(self, file: Path) -> None:
        """Take a layer of an earlier run; one that is damaged is left out, and so made again."""
        try:
            found = read_header(file)
            path = found.metadata["path"]
            spec = LinearSpec(**json.loads(found.metadata["spec"]))
            parse_report(path, json.loads(found.metadata["report"]))
            float(found.metadata["seconds"])
            schema.check_linear(path, spec, found.tensors)
            if file != self._file_of(path):
                raise MalformedHeaderError(f"{file.name} holds the layer {path!r}")
            if found.metadata["sha256"] != sha256_tensors(_linear(spec, found).tensors().values()):
                raise MalformedHeaderError(f"{file.name} is not what was written")
        except (CheckpointError, KeyError, TypeError, ValueError):
            return
        self._files[path] = found


def _linear(spec: LinearSpec, file: TensorFile) -> QuantizedLinear:
    return QuantizedLinear(spec, **{name.rpartition(".")[2]: read_tensor(file, name) for name in file.tensors})
