"""Find the folder for a path or URL."""

from __future__ import annotations

import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from datamat.errors import OptionError
from datamat.folders.base import Folder, not_written
from datamat.folders.local import LocalFolder, expand_home
from datamat.folders.options import OBJECT_SCHEMES
from datamat.folders.urls import (
    READ_ONLY,
    WEB_SCHEMES,
    halves,
    is_url,
    refuse_braces,
    refuse_chain,
    scheme_of,
    without_secrets,
)
from datamat.options import check_mappings

_registered: dict[str, Callable[[str, Mapping[str, Any]], Folder]] = {}


def register_folder(scheme: str, opener: Callable[[str, Mapping[str, Any]], Folder]) -> Callable[[], None]:
    """Open URLs of a scheme with a class of your own, in this process.

    Args:
        scheme: scheme of the URLs, in small letters: "store" for `store://place/set`.
        opener: takes the URL and `storage_options`, and returns the folder; for example a subclass of `Folder`.
            Processes started by spawn or forkserver register it again when they import the module that does so.

    Returns:
        A function that undoes this.
    """
    before = _registered.get(scheme)
    _registered[scheme] = opener

    def undo() -> None:
        if before is None:
            _registered.pop(scheme, None)
        else:
            _registered[scheme] = before

    return undo


def open_folder(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder for a user's path or URL.

    Args:
        place: path or URL, possibly `file://`. In a path, `~` is the home folder.
        storage_options: options for a URL, often credentials.

    Raises:
        OptionError: there are options for a path, or the URL is a chain of filesystems.

    Example:
        >>> str(open_folder("/data/camvid")), str(open_folder("https://me:word@host/camvid"))
        ('/data/camvid', 'https://host/camvid')
    """
    text = os.fspath(place)
    check_mappings(storage_options=storage_options)
    refuse_braces(text)
    if not is_url(text) or text.startswith("file://"):
        if storage_options is not None:
            raise OptionError(f"storage_options are for URLs, and {text} is a path; leave them out")
        return LocalFolder(pathlib.Path(os.path.abspath(expand_home(text.removeprefix("file://")))))
    refuse_chain(text)
    options = dict(storage_options or {})
    if opener := _registered.get(scheme_of(text)):
        return opener(text, options)
    if scheme_of(text) in OBJECT_SCHEMES:
        from datamat.folders.objects import ObjectFolder

        return ObjectFolder(text, options)
    from datamat.folders.other import FsspecFolder

    return FsspecFolder(text, options)


def local_folder(place: str | os.PathLike[str], who: str, remedy: str) -> pathlib.Path:
    """Return the local path of a folder given by a user.

    Raises:
        OptionError: it has none; the message names `who` needs one, and the `remedy`.
    """
    found = open_folder(place).local_path()
    if found is None:
        raise OptionError(
            f"{who}: {without_secrets(os.fspath(place))} is a URL, whose files have no paths on this machine; {remedy}"
        )
    return found


def open_file(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> tuple[Folder, str]:
    """Return the folder of a file given by a user, as `open_folder` does, and the file's name in it."""
    text = os.fspath(place)
    if not is_url(text) or text.startswith("file://"):
        folder, name = os.path.split(os.path.abspath(expand_home(text.removeprefix("file://"))))
        return open_folder(folder, storage_options), name
    head, query = halves(text)
    parent, _, name = head.rstrip("/").rpartition("/")
    name = urllib.parse.unquote(name) if scheme_of(text) in WEB_SCHEMES else name
    return open_folder(f"{parent}{'?' if query else ''}{query}", storage_options), name


def open_output(place: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder to write to, as `open_folder` does; options given with a path are for the source.

    Raises:
        OptionError: it is read-only, or the URL contains a password or a signature, or names no folder.
    """
    text = os.fspath(place)
    if not is_url(text) or text.startswith("file://"):
        return open_folder(text)
    folder = open_folder(text, storage_options)
    scheme, _, path = text.partition("://")
    if scheme_of(text) in READ_ONLY:
        raise not_written(text)
    if re.match(r"[^/]*:[^/]*@", path) or re.search(r"\?.*=", path):
        raise OptionError(
            f"a {scheme}:// URL holds a password or a signature, which would end in logs and manifests; "
            "give them in storage_options={...}, or by the environment"
        )
    if not path.strip("/"):
        raise OptionError(f"{text} names no folder; want a URL such as {scheme}://bucket/out")
    return folder
