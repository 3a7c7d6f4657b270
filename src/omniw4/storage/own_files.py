"""Results that a verb puts into a folder that may hold other files: only its own are replaced, each in one step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from omniw4.errors import OutputExistsError
from omniw4.storage.files import atomic_copy, atomic_write, explain_os_errors, read_note


@dataclass(frozen=True)
class OwnFiles:
    """The files of one verb's result.

    Attributes:
        marker: the one that is JSON and in every such result. A folder whose marker is not this verb's holds somebody
            else's files of the same names, and none of them is replaced.
        names: names or patterns of the others.
        keys: what the marker, an object, has at least.
    """

    marker: str
    names: tuple[str, ...]
    keys: frozenset[str]

    def check(self, out: str | Path) -> None:
        """Refuse what :meth:`put` would refuse, making nothing: before slow work that ends there.

        Raises:
            OutputExistsError: ``out`` is a file, or a file of one of the names is not this verb's.
            StorageError: it cannot be written into, or not be made.
        """
        out = Path(out)
        nearest = next(folder for folder in (out.absolute(), *out.absolute().parents) if os.path.lexists(folder))
        if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
            with explain_os_errors("write", out):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not os.path.lexists(out):
            return
        if not out.is_dir():
            raise OutputExistsError(
                f"output {str(out)!r} exists and is not a folder", hint="give --out the name of a folder"
            )
        with explain_os_errors("read", out):
            found = sorted(entry.name for entry in out.iterdir() if self._is_named(entry.name))
        for name in found:
            if not (out / name).is_file():
                raise OutputExistsError(
                    f"{str(out / name)!r} is no file and will not be replaced", hint="give --out another folder"
                )
        if found and not self._is_ours(out / self.marker):
            raise OutputExistsError(
                f"{str(out / found[0])!r} is of no earlier result and will not be replaced",
                hint="give --out another folder, or move the file away",
            )

    def put(self, out: str | Path, files: Mapping[str, str | Path]) -> Path:
        """Write the files into ``out``, which is made if need be, and leave everything else in it as it is.

        Each file is old or new at every instant. The marker comes first: after a kill on the way the folder is still
        known for this verb's, and the next run replaces what is there.

        Args:
            files: text, or the path of a file to copy, by name; the marker among them.

        Raises:
            OutputExistsError: as :meth:`check`.
            StorageError: a file cannot be written.
        """
        out = Path(out)
        self.check(out)
        with explain_os_errors("make folder", out):
            out.mkdir(parents=True, exist_ok=True)
        for name in sorted(files, key=lambda name: name != self.marker):
            content = files[name]
            if isinstance(content, Path):
                atomic_copy(content, out / name)
            else:
                atomic_write(out / name, content)
        return out

    def _is_named(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in (self.marker, *self.names))

    def _is_ours(self, marker: Path) -> bool:
        found = read_note(marker)
        return isinstance(found, dict) and self.keys <= found.keys()
