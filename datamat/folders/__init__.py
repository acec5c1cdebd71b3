"""One interface to files below a path or URL, wherever they are.

    places      the folder of a path or URL                                    <- start reading here
    base        the contract: `Folder`
    local       a folder on a disk
    objects     S3, Google, Azure
    forked      makes calls that hang in forked processes in another one
    options     translates fsspec's options for those stores
    other       everything else in fsspec: web servers, `hf://`, `sftp://`, `memory://`, ...
    urls        kinds of URLs, and their secrets
    retries     transient errors, and how long to wait

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
