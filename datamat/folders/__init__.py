"""One place: files below a path or URL, read in the same way wherever they lie.

    places      which folder a path or URL names                               <- start reading here
    base        what a folder promises: `Folder`
    local       a folder on a disk
    objects     S3, Azure
    forked      calls that hang in forked processes, made by another one
    options     what users of fsspec say to those stores, in the words of their client
    other       what else fsspec knows: web servers, `gs://`, `hf://`, `sftp://`, ...
    urls        which URLs there are, and what may be shown of them
    retries     which errors pass, and how long to wait

Importing this package imports neither obstore nor fsspec.
"""

from __future__ import annotations

from datamat.folders.base import AbsentError, DeniedError, Folder, checked
from datamat.folders.local import LocalFolder
from datamat.folders.places import open_file, open_folder, register_folder

__all__ = [
    "AbsentError",
    "DeniedError",
    "Folder",
    "LocalFolder",
    "checked",
    "open_file",
    "open_folder",
    "register_folder",
]
