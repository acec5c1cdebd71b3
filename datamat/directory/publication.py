"""Publish a changed set by one write of the manifest: readers see the old set before it and the new set after it.

    .datamat/run-N/NAME          (1) new shards, their offsets and index files wait where no reader looks
                   SHARD.json        entry of a waiting shard
    manifest.json                (2) the new one replaces the old, if that is still the one that the run has seen
                                 (3) files of the old set are deleted; waiting ones get their names
                                 (4) the manifest without the places of (3) replaces that of (2)

The manifest of (2) lists the files to delete, and the waiting place of each file to move: at any moment a file is at
one of its two places, and readers take the matching one. So a kill is harmless: the next process that writes to the
directory first completes (3) and (4). The same code serves disks and stores.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from datamat.directory.files import WORK, check_lock
from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES, Manifest, content_of_manifest
from datamat.errors import CorruptDataError
from datamat.folders.base import ASIDE, AbsentError, ChangedError, ExistsError, ReplaceIf, UnsupportedError, each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from datamat.folders.base import Folder, Mode


def version_there(folder: Folder, name: str = MANIFEST_FILE) -> str:
    """Return the version of a file, by default the manifest; "" if there is none."""
    found = folder.stat(name)
    return "" if found is None else found.version


def publish_manifest(folder: Folder, manifest: Manifest, seen: str, going: Iterable[str] = ()) -> str:
    """Replace the manifest that was seen, and move and delete files according to the new one.

    Args:
        folder: folder of the set.
        manifest: the new manifest; its files are flushed and in the listed places.
        seen: version of the manifest to replace; "" if there must be none.
        going: names of files of the old set to delete; names of the new set are allowed.

    Returns:
        The version of the final manifest.

    Raises:
        OutputError: another run has published since `seen`; or a file can be neither moved nor found.
        OutputLockedError: another run has taken over the output.
    """
    names = list(going)
    versions = zip(names, _each(folder, lambda name: version_there(folder, name), names), strict=True)
    manifest = dataclasses.replace(manifest, going={name: version for name, version in versions if version})
    return _settled(folder, manifest, _written(folder, manifest, seen))


def finish_publication(folder: Folder) -> None:
    """Finish the publication of a killed process; call this before writing to a set."""
    if (here := folder.local_path()) is not None:
        for path in (*here.glob(f"{ASIDE}*"), *(here / WORK).glob(f"{ASIDE}*")):  # leftover drafts of the manifest
            path.unlink(missing_ok=True)
    try:
        version = version_there(folder)
        content = folder.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES) if version else None
        if content is not None:
            _settled(folder, Manifest.parse(content, folder.place(MANIFEST_FILE)), version)
    except (CorruptDataError, ChangedError):  # reported when it is read; another process was faster
        return


def _settled(folder: Folder, manifest: Manifest, version: str) -> str:
    """Delete old files, then move new ones, so that listings show only one set; return the final version."""
    if not manifest.moving and not manifest.going:
        return version

    def delete(name: str) -> None:
        # A late process must not delete a file that has since moved to the name, or belongs to a later set.
        if version_there(folder, name) == manifest.going[name]:
            check_published(folder, version)
            folder.delete(name)

    def move(name: str) -> None:
        check_published(folder, version)
        try:
            folder.move(manifest.moving[name], name)
        except AbsentError:  # already moved: before a kill, or the response was lost
            check_published(folder, version)
            if folder.stat(name) is None:
                raise

    settled = dataclasses.replace(manifest, moving={}, going={})
    try:
        _each(folder, delete, manifest.going)
        _each(folder, move, manifest.moving)
    except ChangedError:
        if _is_there(folder, settled.render()):  # another process was faster
            return version_there(folder)
        raise
    return _written(folder, settled, version)


def _written(folder: Folder, manifest: Manifest, seen: str) -> str:
    content = manifest.render()
    mode: Mode = ReplaceIf(seen) if seen else "create"
    if not seen and folder.local_path() is not None and not version_there(folder):
        mode = "overwrite"  # safe with the lock; without hard links, a "create" takes two steps
    try:
        check_published(folder, seen)
        with contextlib.suppress(UnsupportedError):  # a store without conditions
            return folder.write(MANIFEST_FILE, content, mode)
        return folder.write(MANIFEST_FILE, content)
    except (ChangedError, ExistsError):
        if _is_there(folder, content):  # ours, whose response was lost; or from another run of the same job
            return version_there(folder)
        raise _published_by_another(folder) from None


def remove_unlisted(folder: Folder, names: Iterable[str]) -> None:
    """Delete files that this process has made too late, except those in the published set."""
    manifest = Manifest.parse(content_of_manifest(folder), folder.place(MANIFEST_FILE))
    listed = manifest.file_names.union(manifest.moving.values())
    _each(folder, folder.delete, [name for name in names if name not in listed])


def _is_there(folder: Folder, content: bytes) -> bool:
    return folder.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES) == content


def _published_by_another(folder: Folder) -> ChangedError:
    return ChangedError(
        f"{folder.place(MANIFEST_FILE)} is not the one that this run has seen: another has published meanwhile, and "
        "its set stays; run again"
    )


def check_published(folder: Folder, version: str) -> None:
    """Raise if another process has taken over, by the lock on a disk, and by the manifest elsewhere.

    Args:
        folder: folder of the set.
        version: version of the present manifest, as far as known.

    Raises:
        ChangedError: another process has published.
        OutputLockedError: another run has the lock.
    """
    if (here := folder.local_path()) is not None:
        check_lock(here / WORK)
    elif version_there(folder) != version:
        raise _published_by_another(folder)


def _each(folder: Folder, call: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """Call a function for each name, concurrently if each call is a request."""
    return each(call, names) if folder.local_path() is None else [*map(call, names)]
