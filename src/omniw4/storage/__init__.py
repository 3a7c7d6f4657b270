"""Files that are whole or absent, and output folders that appear in one step. Imports no torch.

A file is written to a temporary name in its own folder, synced, and renamed over the target; a folder is built in
``<out>.partial/`` beside the target and renamed when it is finished. So a process killed at any instant leaves the
old content or the new one, never a mixture. A few files that a verb keeps in a folder with others are replaced one
by one. Every failing system call becomes a
:class:`~omniw4.errors.StorageError`.
"""

from omniw4.storage.files import (
    atomic_copy,
    atomic_write,
    atomic_write_json,
    check_file,
    explain_os_errors,
    json_text,
    put_file,
    reserving,
    sha256_file,
)
from omniw4.storage.output_folder import OutputFolder
from omniw4.storage.own_files import OwnFiles
from omniw4.storage.tensor_file import ITEMSIZE, TensorFileWriter, dtype_name, sha256_tensors, tensor_bytes, told_sizes

__all__ = [
    "ITEMSIZE",
    "OutputFolder",
    "OwnFiles",
    "TensorFileWriter",
    "atomic_copy",
    "atomic_write",
    "atomic_write_json",
    "check_file",
    "dtype_name",
    "explain_os_errors",
    "json_text",
    "put_file",
    "reserving",
    "sha256_file",
    "sha256_tensors",
    "tensor_bytes",
    "told_sizes",
]
