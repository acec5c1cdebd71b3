"""Publishes a changed set: one write of the manifest, before which readers open the old set, and after it the new one.

    .datamat/run-N/NAME          (1) new shards, their offsets and index files wait where no reader looks
                   SHARD.json        of a shard that waits: its entry
    manifest.json                (2) the new one replaces the old, which must still be the one that the run has seen
                                 (3) files of the old set go; those that wait get their names
                                 (4) the manifest without the places of (3) replaces that of (2)

The manifest of (2) lists the files that go, and each that moves with the place where it waits: at any moment a file is
at one of both, and readers take the one that fits. So a kill costs nothing: whoever writes to the directory next does
what is left of (3) and (4) before anything else. The same code serves a disk and a store.
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


__all__ = ["check_published", "finish_publication", "publish_manifest", "remove_unlisted", "version_there"]


def version_there(folder: Folder, name: str = MANIFEST_FILE) -> str:
    """Return the version of a file that is there, by default the manifest; "" where there is none."""
    found = folder.stat(name)
    return "" if found is None else found.version


def publish_manifest(folder: Folder, manifest: Manifest, seen: str, going: Iterable[str] = ()) -> str:
    """Replace the manifest that was seen, and do all that the new one says of files that move and go.

    Args:
        folder: where the set is.
        manifest: the new one; the files that it lists are flushed, and where it says.
        seen: version of the manifest that may be replaced; "" where there must be none.
        going: names of files of the old set, which are deleted; a name that the new set has, too, may be among them.

    Returns:
        The version of the manifest that is there in the end.

    Raises:
        OutputError: another has published since that was seen; or a file can be neither moved nor found.
        OutputLockedError: another run has the output now.
    """
    names = list(going)
    versions = zip(names, _each(folder, lambda name: version_there(folder, name), names), strict=True)
    manifest = dataclasses.replace(manifest, going={name: version for name, version in versions if version})
    return _settled(folder, manifest, _written(folder, manifest, seen))


def finish_publication(folder: Folder) -> None:
    """Finish what a killed process has begun to publish; whoever writes to a set calls this first."""
    if (here := folder.local_path()) is not None:
        for path in (*here.glob(f"{ASIDE}*"), *(here / WORK).glob(f"{ASIDE}*")):  # what it has left of the manifest
            path.unlink(missing_ok=True)
    try:
        version = version_there(folder)
        content = folder.read_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES) if version else None
        if content is not None:
            _settled(folder, Manifest.parse(content, folder.place(MANIFEST_FILE)), version)
    except (CorruptDataError, ChangedError):  # whoever reads it says so; another is faster
        return


def _settled(folder: Folder, manifest: Manifest, version: str) -> str:
    """Delete what goes, then move what moves, so that who lists names sees one set only; return the last version."""
    if not manifest.moving and not manifest.going:
        return version

    def delete(name: str) -> None:
        # Who is late does not delete what has the name by now: a file that has moved there, or one of a later set.
        if version_there(folder, name) == manifest.going[name]:
            check_published(folder, version)
            folder.delete(name)

    def move(name: str) -> None:
        check_published(folder, version)
        try:
            folder.move(manifest.moving[name], name)
        except AbsentError:  # it has moved: before a kill, or its answer was lost
            check_published(folder, version)
            if folder.stat(name) is None:
                raise

    settled = dataclasses.replace(manifest, moving={}, going={})
    try:
        _each(folder, delete, manifest.going)
        _each(folder, move, manifest.moving)
    except ChangedError:
        if _is_there(folder, settled.render()):  # another was faster
            return version_there(folder)
        raise
    return _written(folder, settled, version)


def _written(folder: Folder, manifest: Manifest, seen: str) -> str:
    content = manifest.render()
    mode: Mode = ReplaceIf(seen) if seen else "create"
    if not seen and folder.local_path() is not None and not version_there(folder):
        mode = "overwrite"  # with the lock, nobody else does; where there are no hard links, a "create" is two steps
    try:
        check_published(folder, seen)
        with contextlib.suppress(UnsupportedError):  # a store that keeps no conditions
            return folder.write(MANIFEST_FILE, content, mode)
        return folder.write(MANIFEST_FILE, content)
    except (ChangedError, ExistsError):
        if _is_there(folder, content):  # ours, whose answer was lost; or of another run of the same job
            return version_there(folder)
        raise _published_by_another(folder) from None


def remove_unlisted(folder: Folder, names: Iterable[str]) -> None:
    """Delete files that this process has made too late, but for those that the published set has, or waits for."""
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
    """Raise where another process has taken over: by the lock on a disk, and elsewhere by the manifest.

    Args:
        folder: where the set is.
        version: version of the manifest that is there, as far as this process knows.

    Raises:
        ChangedError: another has published.
        OutputLockedError: another run has the lock.
    """
    if (here := folder.local_path()) is not None:
        check_lock(here / WORK)
    elif version_there(folder) != version:
        raise _published_by_another(folder)


def _each(folder: Folder, call: Callable[[str], Any], names: Iterable[str]) -> list[Any]:
    """Call a function for each name: for many at once where each is a request."""
    return each(call, names) if folder.local_path() is None else [*map(call, names)]
