"""One place: files below a path or URL, read and written in the same way wherever they lie.

    places      which folder a path or URL names                               <- start reading here
    base        what a folder promises: `Folder`
    local       a folder on a disk
    objects     S3, Google, Azure
    forked      calls that hang in forked processes, made by another one
    options     what users of fsspec say to those stores, in the words of their client
    other       what else fsspec knows: web servers, `hf://`, `sftp://`, `memory://`, ...
    urls        which URLs there are, and what may be shown of them
    retries     which errors pass, and how long to wait

Importing this package imports neither obstore nor fsspec.
"""

from __future__ import annotations

from datamat.folders.base import (
    AbsentError,
    ChangedError,
    DeniedError,
    ExistsError,
    Folder,
    Mode,
    Range,
    ReplaceIf,
    Stat,
    UnsupportedError,
    checked,
    create_once,
)
from datamat.folders.local import LocalFolder
from datamat.folders.places import open_file, open_folder, open_output, register_folder

__all__ = [
    "AbsentError",
    "ChangedError",
    "DeniedError",
    "ExistsError",
    "Folder",
    "LocalFolder",
    "Mode",
    "Range",
    "ReplaceIf",
    "Stat",
    "UnsupportedError",
    "checked",
    "create_once",
    "open_file",
    "open_folder",
    "open_output",
    "register_folder",
]
