"""An output folder that appears in one step, and can be resumed after a crash."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from omniw4.config import difference
from omniw4.errors import OutputExistsError, OutputLockedError, ResumeError
from omniw4.storage.files import TEMP_SUFFIX, atomic_write_json, explain_os_errors, read_note, sync_folder, without_nan

_NOTE, _COMMITTING = "fingerprint.json", "committing.json"


class OutputFolder:
    """An output folder under construction; make one with :meth:`begin` and use it as a context manager.

    Attributes:
        out: the final folder; absent, or the old one, until :meth:`commit`.
        partial: ``<out>.partial/``, for whatever a later ``--resume`` needs; removed by :meth:`commit`.
        result: ``<out>.partial/result/``, the files of the finished folder; empty at the beginning, also on resume.
        resumed: True when ``partial`` holds the work of an earlier run with the same fingerprint.
    """

    def __init__(
        self,
        out: Path,
        partial: Path,
        lock: int,
        overwrite: bool,
        resumed: bool,
        marker: str | None,
        resumable: bool = True,
    ) -> None:
        self.out, self.partial, self.resumed = out, partial, resumed
        self._marker, self._resumable = marker, resumable
        self.result = partial / "result"
        self._lock: int | None = lock
        self._overwrite = overwrite

    @classmethod
    def begin(
        cls,
        out: str | Path,
        fingerprint: dict[str, Any],
        *,
        overwrite: bool = False,
        resume: bool = False,
        marker: str | None = None,
        resumable: bool = True,
    ) -> OutputFolder:
        """Lock ``<out>.partial/`` and make it ready.

        Args:
            fingerprint: JSON-like dict of everything that decides the bytes of the result; an interrupted run is
                resumed only when it is the same.
            overwrite: replace an existing ``out`` on commit; without ``resume``, also drop an interrupted run.
            resume: go on with an interrupted run if there is one.
            marker: a file that every result of this kind holds; ``overwrite`` replaces no folder without it.
            resumable: whether the verb can go on with an interrupted run. Where it cannot, ``partial`` goes with every
                end but a kill, and what a kill left of the same ``fingerprint["verb"]`` is dropped without a word.

        Raises:
            OutputExistsError: ``out`` or an interrupted run exists, and no flag says what to do with it.
            OutputLockedError: another process is at it.
            ResumeError: the interrupted run has another fingerprint; the differences are named.
            StorageError: the folder cannot be made.
        """
        out = _resolved(out)
        partial = cls.partial_of(out)
        if not partial.is_dir() or partial == out:
            _refuse_existing(out, overwrite, marker)
        with explain_os_errors("make folder", partial):
            lock = _lock_folder(partial)
            try:
                _finish_interrupted_commit(out, partial)
                _refuse_existing(out, overwrite, marker)
                useless = not resumable and _verb_of(partial) == fingerprint.get("verb")
                resumed = _leftover_is_wanted(out, partial, fingerprint, overwrite or useless, resume, resumable)
                for entry in partial.iterdir():
                    # its note stays until another takes its place: without one the folder is nobody's
                    if entry.name == "result" or (not resumed and not _is_note(entry)):
                        _remove(entry)
                for stale in partial.rglob(f"*{TEMP_SUFFIX}"):
                    stale.unlink()
                (partial / "result").mkdir()
                atomic_write_json(partial / _NOTE, fingerprint)
            except BaseException:
                with contextlib.suppress(OSError):
                    if not _holds_work(partial):
                        shutil.rmtree(partial)
                os.close(lock)
                raise
        return cls(out, partial, lock, overwrite, resumed, marker, resumable)

    @staticmethod
    def partial_of(out: str | Path) -> Path:
        """``<out>.partial/``, where an output folder is made."""
        out = _resolved(out)
        return out.with_name(f"{out.name}.partial") if out.name else out

    @classmethod
    def check(cls, out: str | Path, *, overwrite: bool = False, marker: str | None = None) -> None:
        """Refuse what :meth:`begin` is sure to refuse, making nothing: before slow work that ends there.

        Raises:
            OutputExistsError, OutputLockedError, StorageError: as :meth:`begin`.
        """
        out = _resolved(out)
        partial = cls.partial_of(out)
        if not partial.is_dir() or partial == out:
            _refuse_existing(out, overwrite, marker)
            return
        with explain_os_errors("open", partial):
            os.close(_lock_folder(partial))

    def commit(self) -> Path:
        """Publish ``result`` as ``out`` in one step and remove ``partial``; returns ``out``.

        Raises:
            ValueError: ``result`` holds no file.
            OutputExistsError: ``out`` appeared meanwhile.
            StorageError: a system call failed; ``out`` is as it was.
        """
        if not any(self.result.iterdir()):
            raise ValueError(f"nothing to commit: write the files of the result into {self.result}")
        with explain_os_errors("write", self.out):
            _sync_tree(self.result)
            identity = self.result.stat()
            atomic_write_json(self.partial / _COMMITTING, [identity.st_dev, identity.st_ino])
            _refuse_existing(self.out, self._overwrite, self._marker)
            _publish(self.result, self.out, self.partial / "replaced")
            sync_folder(self.out.parent)
            self.discard()
        return self.out

    def discard(self) -> None:
        """Remove ``partial`` and give the lock back."""
        with contextlib.suppress(OSError):
            _clear(self.partial)
            self.partial.rmdir()
        self.close()

    def close(self) -> None:
        """Give the lock back; work that can be resumed stays in ``partial``, any other is removed."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if not self._resumable:
                _finish_interrupted_commit(self.out, self.partial)  # the old folder may be in there
            if not self._resumable or not _holds_work(self.partial):
                shutil.rmtree(self.partial)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _resolved(out: str | Path) -> Path:
    with explain_os_errors("write", Path(out)):
        try:
            return Path(out).resolve()
        except RuntimeError as e:  # what pathlib makes of a link to itself
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from e


def _refuse_existing(out: Path, overwrite: bool, marker: str | None) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise OutputExistsError(f"output {str(out)!r} exists and is not a folder", hint="give --out another name")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputExistsError(
            f"output folder {str(out)!r} exists", hint="give --out another name, or replace it with --overwrite"
        )
    for precious in (Path.cwd(), Path.home()):
        if out == precious or out in precious.parents:
            raise OutputExistsError(
                f"output folder {str(out)!r} holds the current or the home folder and will not be replaced",
                hint="give --out the name of a folder of its own",
            )
    if marker is not None and not (out / marker).is_file():
        raise OutputExistsError(
            f"output folder {str(out)!r} holds no {marker}, so it is no earlier result and will not be replaced",
            hint="give --out another name, or delete the folder yourself",
        )


def _lock_folder(partial: Path) -> int:
    """A descriptor of the folder with an exclusive flock, which the kernel drops when the process ends."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked, current = os.fstat(descriptor), os.stat(partial)
            if (locked.st_dev, locked.st_ino) == (current.st_dev, current.st_ino):
                return descriptor
        except FileNotFoundError:
            pass  # its owner committed between our mkdir and our lock: try again
        except BlockingIOError as e:
            os.close(descriptor)
            raise OutputLockedError(
                f"another process is writing {str(partial)!r}", hint="wait for it, or give --out another name"
            ) from e
        os.close(descriptor)


def _verb_of(partial: Path) -> str | None:
    """The verb that an interrupted run was of; None where nothing says so."""
    found = read_note(partial / _NOTE)
    return found.get("verb") if isinstance(found, dict) else None


def _leftover_is_wanted(
    out: Path, partial: Path, fingerprint: dict[str, Any], overwrite: bool, resume: bool, resumable: bool
) -> bool:
    if not _holds_work(partial):
        return False
    if overwrite and not resume:
        if not any(os.path.lexists(partial / name) for name in (_NOTE, _COMMITTING)):
            raise OutputExistsError(
                f"{str(partial)!r}, where {str(out)!r} would be made, holds files of no interrupted run",
                hint="give --out another name, or move that folder away",
            )
        return False
    if not resume:
        raise OutputExistsError(
            f"an interrupted run is in {str(partial)!r}",
            hint="go on with --resume, or start again with --overwrite"
            if resumable
            else "give --out another name, or drop that run with --overwrite",
        )
    found = read_note(partial / _NOTE)
    if found is None:
        raise ResumeError(
            f"cannot resume {str(out)!r}: {str(partial)!r} holds files but no readable fingerprint.json",
            hint="start again with --overwrite"
            if os.path.lexists(partial / _NOTE)
            else "give --out another name, or move that folder away",
        )
    wanted = json.loads(json.dumps(without_nan(fingerprint)))
    if found != wanted:
        changes = "; ".join(difference(found, wanted)) if isinstance(found, dict) else "no fingerprint"
        raise ResumeError(
            f"cannot resume {str(out)!r}, the interrupted run was made with other inputs: {changes}",
            hint="repeat the command with the old inputs, or start again with --overwrite",
        )
    return True


def _holds_work(partial: Path) -> bool:
    """Whether anything in ``partial`` would be missed: begin() alone makes a fingerprint and an empty result."""
    names = {entry.name for entry in partial.iterdir() if not entry.name.endswith(TEMP_SUFFIX)}
    result = partial / "result"
    return not names <= {_NOTE, "result"} or (result.is_dir() and any(result.iterdir()))


def _finish_interrupted_commit(out: Path, partial: Path) -> None:
    """Settle what a kill inside :meth:`OutputFolder.commit` left: put the old folder back, or drop the rest."""
    replaced, marker = partial / "replaced", partial / _COMMITTING
    if replaced.is_dir() and not os.path.lexists(out):
        os.rename(replaced, out)
    if marker.is_file() and out.is_dir():
        identity = out.stat()
        if read_note(marker) == [identity.st_dev, identity.st_ino]:
            _clear(partial)


def _publish(result: Path, out: Path, replaced: Path) -> None:
    if not os.path.lexists(out) or not any(out.iterdir()):
        os.rename(result, out)
    elif not _exchange(result, out):
        os.rename(out, replaced)  # no atomic exchange here: begin() puts it back after a kill on this line
        os.rename(result, out)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders in one step (Linux renameat2 with RENAME_EXCHANGE); False where there is no such call."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_fdcwd, exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), ctypes.c_uint(exchange)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            sync_folder(Path(root) / name)
        sync_folder(Path(root))


def _clear(partial: Path) -> None:
    """Remove all that is in it, the notes on what it is last: after a kill in between, begin() must find them."""
    notes = (_NOTE, _COMMITTING)
    for entry in sorted(partial.iterdir(), key=lambda entry: notes.index(entry.name) if entry.name in notes else -1):
        _remove(entry)


def _is_note(entry: Path) -> bool:
    return entry.name == _NOTE and entry.is_file() and not entry.is_symlink()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
