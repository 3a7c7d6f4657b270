"""Files that are whole or absent: temporary name in the same folder, sync, rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from omniw4.errors import OutputExistsError, OutputLockedError, StorageError

CHUNK = 4 << 20
TEMP_SUFFIX = ".omniw4-tmp"
Stamp = tuple[int, int, int]


def stamp_of(found: os.stat_result) -> Stamp:
    """What differs when a file was replaced or written to: inode, bytes, time."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def explain_os_errors(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into one sentence: ``cannot <what> '<path>': <reason>``."""
    try:
        yield
    except BrokenPipeError:  # of who reads what is said meanwhile, no matter of the path
        raise
    except OSError as e:
        hints = {
            errno.ENOSPC: "free some space, or choose a folder on another disk",
            errno.EDQUOT: "your disk quota is used up: free some space, or choose a folder on another disk",
            errno.EFBIG: "the file is larger than this disk or your ulimit allows",
            errno.EROFS: "choose a folder you can write to",
            errno.EACCES: "choose a folder you can write to",
            errno.EPERM: "choose a folder you can write to",
            errno.ENOTDIR: "a part of this path is a file: choose a folder elsewhere",
            errno.ENAMETOOLONG: "choose a shorter name",
            errno.ELOOP: "a part of this path is a link to itself: choose a folder elsewhere",
        }
        reason = e.strerror or str(e)
        raise StorageError(f"cannot {what} {str(path)!r}: {reason}", hint=hints.get(e.errno or 0, "")) from e


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes ``path``'s place, synced, when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMP_SUFFIX}")
    with explain_os_errors("write", path):
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Write a whole file, or leave what was there. Text is UTF-8. Raises StorageError."""
    with replacing(Path(path)) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def check_file(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuse what :func:`put_file` would refuse, leaving nothing: before slow work that ends there.

    Raises:
        OutputExistsError: it exists and ``overwrite`` is not given, or it is no ordinary file.
        StorageError: nothing can be written there.
    """
    path = Path(path)
    _refuse_existing(path, overwrite)
    with explain_os_errors("write", path):
        nearest = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
        with tempfile.TemporaryFile(dir=nearest):  # of no name
            pass


@contextlib.contextmanager
def reserving(path: str | Path, *, overwrite: bool = False) -> Iterator[None]:
    """Hold the name of a file that slow work ends with: a second process is refused at once, not after its work.

    What a killed process left of the same name is swept. Folders that had to be made go again unless the block wrote.

    Raises:
        OutputExistsError, StorageError: as :func:`check_file`.
        OutputLockedError: another process is at it.
    """
    path = Path(path)
    check_file(path, overwrite=overwrite)
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    with explain_os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock{TEMP_SUFFIX}")
        descriptor = _lock(lock, path)
    try:
        for entry in path.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(TEMP_SUFFIX)}", entry.name):
                entry.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
            for folder in missing:
                folder.rmdir()
        os.close(descriptor)


def _lock(file: Path, wanted: Path) -> int:
    """A descriptor of ``file``, made if need be, with an exclusive flock, which ends with the process."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            os.close(descriptor)
            raise OutputLockedError(
                f"another process is writing {str(wanted)!r}", hint="wait for it, or give --out another name"
            ) from e
        except OSError:  # a file system without locks
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        os.close(descriptor)  # its owner removed it between our two steps: try again


def put_file(path: str | Path, data: bytes | str, *, overwrite: bool = False) -> None:
    """:func:`atomic_write` of a file that a user named, into a folder that is made if need be.

    Raises:
        OutputExistsError, StorageError: as :func:`check_file`.
    """
    path = Path(path)
    _refuse_existing(path, overwrite)
    with explain_os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data)


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise OutputExistsError(
            f"output {str(path)!r} is no file and will not be replaced", hint="give --out another name"
        )
    if not overwrite:
        raise OutputExistsError(
            f"output {str(path)!r} exists", hint="give --out another name, or replace it with --overwrite"
        )


def atomic_write_json(path: str | Path, obj: Any) -> None:
    """Write an object as JSON (2 spaces, keys in their order); NaN and inf become ``null``, as JSON has neither."""
    atomic_write(path, json_text(obj))


def json_text(obj: Any) -> str:
    """What :func:`atomic_write_json` writes."""
    return json.dumps(without_nan(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_note(path: Path) -> Any:
    """What :func:`atomic_write_json` wrote; None where there is no such file, or none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def atomic_copy(source: str | Path, target: str | Path) -> None:
    """Copy a file's bytes (not its mode or times). Raises StorageError."""
    with explain_os_errors("read", Path(source)), open(source, "rb") as reader, replacing(Path(target)) as file:
        shutil.copyfileobj(reader, file, CHUNK)


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes, read in chunks. Raises StorageError."""
    with explain_os_errors("read", Path(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_nan(obj: Any) -> Any:
    if isinstance(obj, Mapping):
        return {str(key): without_nan(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [without_nan(value) for value in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return None
    return obj
