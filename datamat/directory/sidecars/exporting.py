"""Write the files that other readers need beside the shards, and remove them before shards change.

    manifest ──> built-in sidecars, sidecars of the user ──> files ──> the directory
    shards ──────────────────(an index of one shard)──────────┘

A run writes them when every shard has its name, before the manifest: if there is a manifest, all of them are there.
They contain only data of the manifest and the shards, so they can be rewritten at any time, byte for byte.

`.datamat/sidecars.json` records the files that datamat wrote, by name:

    "index.json": "DIGEST"                     a file of a built-in sidecar; "" for an index of a shard
    "CHECKSUMS": "DIGEST MANIFEST-DIGEST"      a file of a user's sidecar, which may be absent later

An unlisted file of the same name belongs to the user: it is neither overwritten nor removed. `README.md` and
`croissant.json` are for people, who may complete them: once changed, they belong to the user. The others are for
programs, which fail on outdated counts: a changed one is rewritten, and the changed file moves to
`.datamat/quarantine/edited`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import xxhash

from datamat.directory.files import (
    MADE,
    WORK,
    commit,
    fsync_folder,
    is_stand_in,
    locked,
    publish,
    read_json,
    refuse_links,
    render_json,
)
from datamat.directory.manifest import MANIFEST_FILE, Manifest
from datamat.directory.publication import finish_publication
from datamat.directory.sidecars import FromShard, Sidecar
from datamat.directory.sidecars.croissant import croissant_sidecars
from datamat.directory.sidecars.huggingface import hugging_face_sidecars
from datamat.directory.sidecars.indexes import (
    dali_sidecars,
    index_ahead,
    litdata_sidecars,
    tar_index,
    wids_sidecars,
)
from datamat.directory.sidecars.tfds import tfds_sidecars
from datamat.errors import OptionError, OutputError, count_of
from datamat.features import Features
from datamat.folders import LocalFolder
from datamat.folders.local import read_regular, regular_path
from datamat.folders.places import local_folder
from datamat.values import frozen

BUILT_IN: tuple[Sidecar, ...] = (
    tfds_sidecars,
    hugging_face_sidecars,
    wids_sidecars,
    litdata_sidecars,
    croissant_sidecars,
    dali_sidecars,
)
_DOCUMENTS = frozenset({"README.md", "croissant.json"})
_MOST_BYTES = 1 << 32  # largest file: the index of a hundred million members
_AHEAD = pathlib.PurePath(WORK, "shards")  # removed at the end of a run, with leftovers of killed processes
RECORD = f"{WORK}/sidecars.json"
"""The digest of each file of a directory that datamat wrote for other readers."""
_EDITED = pathlib.PurePath(WORK, "quarantine", "edited")
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO})  # unreadable files, links, sockets
_LEFT_ALONE = "left alone, it is not as datamat wrote it; move it away and export again to have datamat's"
_NOT_WHAT_READERS_NEED = "readers that go by it may not open the dataset"
_LOGGER = logging.getLogger(__name__)


Files: TypeAlias = "Mapping[str, bytes | FromShard]"


class _Written(NamedTuple):
    """The record of a file that datamat wrote.

    Attributes:
        digest: XXH3-128 of its content, 32 hex digits. "" if unknown: for a built-in index of a shard, which `verify`
            rebuilds to compare, and for user files while they are being written.
        manifest: digest of the manifest that it describes, for a file of a user's sidecar; "" for a built-in one.
    """

    digest: str
    manifest: str = ""


Record: TypeAlias = Mapping[str, _Written]


@frozen()
class ExportReport:
    """The report of `export`. Its `str` names each changed file.

    Attributes:
        path: the directory whose sidecars were written.
        written: files that were missing or out of date.
        unchanged: files that were up to date.
        kept: files that are not datamat's: they were there before, or are for people and were edited.
        edited: files for programs that were edited; the edited versions are in `.datamat/quarantine/edited`.
    """

    path: pathlib.Path
    written: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()

    def __str__(self) -> str:
        aside = f"had been changed; the changed file is in {_EDITED}"
        changes = {"written": self.written, aside: self.edited, _LEFT_ALONE: self.kept}
        lines = [f"  {name}: {what}" for what, names in changes.items() for name in names]
        return "\n".join(
            [f"{self.path}: {count_of(len(self.written) + len(self.unchanged), 'file')} for other readers", *lines]
        )


def export(path: str | os.PathLike[str], *, sidecars: Sequence[Sidecar] = ()) -> ExportReport:
    """Write the files that other readers need beside the shards of a finished directory, if they are missing.

    Args:
        path: the finished directory. Files in it that are not datamat's stay as they are.
        sidecars: sidecars of your own, written beside the built-in ones; see `Sidecar`.

    Raises:
        OptionError: a sidecar returns anything but files that it may own; or the path is a URL.
        OutputError: there is no manifest, because the run is not finished; or a run is at work there; or a link is in
            the way.
        CorruptDataError: the manifest, or a tar shard, is damaged.

    Example:
        >>> print(export("out/camvid"))   # doctest: +SKIP
        out/camvid: 6 files for other readers
          features.json: written
    """
    output = local_folder(path, "export", "its run has written them there: run it again if some are missing")
    Manifest.read(output)
    work = output / WORK
    refuse_links(work)
    work.mkdir(exist_ok=True)
    with locked(work / "lock"):
        finish_publication(LocalFolder(output))
        manifest = Manifest.read(output)
        files = built_in_files(manifest)
        added = _added_files(manifest, sidecars, files)
        record = _read_record(output)
        if record is None:  # an edited file is kept aside
            record = {name: _Written(_known_digest(content)) for name, content in {**files, **added}.items()}
        report = _write(output, manifest, files, added, record, trusted=None)
        with contextlib.suppress(OSError):  # not empty: a run was killed, and the next one resumes from it
            (output / _AHEAD).rmdir()
    return report


def write_sidecars(
    output: pathlib.Path,
    manifest: Manifest,
    files: Files,
    logger: logging.Logger = _LOGGER,
    *,
    sidecars: Sequence[Sidecar] = (),
    trusted: Manifest | None = None,
) -> None:
    """Do what `export` does, at the end of a run, which holds the lock.

    Args:
        output: the directory, with all its shards.
        manifest: the manifest of the run, whether or not it is written already.
        files: what `built_in_files` returned for it.
        logger: receives a message for each file that is kept or was edited.
        sidecars: the user's sidecars, written beside the built-in ones.
        trusted: manifest of shards whose indexes, if they exist, are right: that of the previous set.
    """
    if not manifest.has_one_count:
        logger.info(
            "%s: appended shards have another number of shards in their names, of which TFDS wants one: there are no "
            "files for it; convert the directory, or append on a disk, to have them",
            output,
        )
    added = _added_files(manifest, sidecars, files)
    report = _write(output, manifest, files, added, _read_record(output) or {}, trusted=trusted)
    for name in report.kept:
        if name in _DOCUMENTS:
            logger.info("%s: %s", output / name, _LEFT_ALONE)
        else:
            logger.warning("%s: %s; until then %s", output / name, _LEFT_ALONE, _NOT_WHAT_READERS_NEED)
    _warn_of_edits(output, report.edited, logger)


def withdraw_sidecars(output: pathlib.Path, before: Manifest | None, logger: logging.Logger = _LOGGER) -> set[str]:
    """Remove earlier files for other readers, which become wrong when shards change; return the removed ones.

    Args:
        output: the directory.
        before: manifest of the present shards; None if there is none.
        logger: receives a warning for each edited file.
    """
    record = _read_record(output)
    if record is None and before:  # without a record, what is as that manifest gave it is datamat's, and nothing else
        texts = {name: content for name, content in built_in_files(before).items() if isinstance(content, bytes)}
        record = {name: _Written(_digest(text)) for name, text in texts.items() if _content(output / name) == text}
    _warn_of_edits(output, _remove(output, record or {}, set(record or {})), logger)
    return {name for name in record or () if not os.path.lexists(output / name)}


def sidecar_names(manifest: Manifest) -> set[str]:
    """Return the names of all files that the built-in sidecars write for this manifest."""
    return set(built_in_files(manifest))


def known_sidecars(output: pathlib.Path, *, documents: bool = False) -> set[str]:
    """Return the names of the files for programs that datamat wrote to a directory, from its record.

    Args:
        output: the directory.
        documents: whether to include those for people.
    """
    return {*(_read_record(output) or ())} - (frozenset() if documents else _DOCUMENTS)


def sidecar_problems(
    output: pathlib.Path, manifest: Manifest, damaged: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the defects of files for other readers, and the differences of those for people, by name.

    Missing ones are harmless and not reported.
    """
    record = _read_record(output)
    files = built_in_files(manifest)
    mine = set(files if record is None else record)  # others are the user's own
    wrong: dict[str, str] = {}
    edited: dict[str, str] = {}
    for name in [*(name for name in files if name in mine), *sorted(mine - files.keys())]:
        wanted, added = files.get(name), (record or {}).get(name, _Written(""))
        if isinstance(wanted, FromShard) and wanted.shard.file in damaged:
            continue
        found = _content(output / name)
        if found is None:
            continue
        if wanted is not None and found != _rendered(output, wanted):
            is_edited = name in _DOCUMENTS and not _is_broken(name, found)
            (edited if is_edited else wrong)[name] = (
                "edited, or of another version of the dataset; remove it and export again to have datamat's"
                if is_edited
                else "differs from what manifest and shards give; export rebuilds it"
            )
        elif wanted is None and added.manifest and added.digest not in {"", _digest(found)}:
            wrong[name] = "differs from what its sidecar wrote; export(..., sidecars=[...]) rebuilds it"
    return wrong, edited


def _is_broken(name: str, content: bytes) -> bool:
    """Return True if a file that should be JSON is not, so that it was damaged rather than edited."""
    if not name.endswith(".json"):
        return False
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return True
    return False


def built_in_files(manifest: Manifest) -> Files:
    """Return the files of the built-in sidecars, by name."""
    manifest = _as_read(manifest)
    return {name: content for sidecar in BUILT_IN for name, content in sidecar(manifest).items()}


def _added_files(manifest: Manifest, sidecars: Sequence[Sidecar], files: Files) -> Files:
    """Return the files of the user's sidecars, by name; `files` are the built-in ones."""
    found: dict[str, bytes | FromShard] = {}
    taken = {MANIFEST_FILE, *files, *(info.index_file for info in manifest.all_files)} if sidecars else set()
    endings = {info.extension for info in manifest.all_files}
    for sidecar in sidecars:
        made = _called(sidecar, _as_read(manifest))
        for name, content in made.items():
            _check_file(sidecar, name, content, {*taken, *found}, endings)
        found |= made
    return found


def _as_read(manifest: Manifest) -> Manifest:
    """Return a manifest as it would be read back: in a run, features are still as declared."""
    return dataclasses.replace(manifest, features=Features(dict(sorted(manifest.features.items()))))


def _called(sidecar: Sidecar, manifest: Manifest) -> dict[str, bytes | FromShard]:
    try:
        return dict(sidecar(manifest))
    except Exception as error:
        error.add_note(
            f"raised by the sidecar {_name_of(sidecar)}; the shards are finished: correct it, and the next run writes "
            "what is missing"
        )
        raise


def _check_file(sidecar: Sidecar, name: object, content: object, taken: Collection[str], endings: set[str]) -> None:
    """Raise if a user's sidecar returns a file that it cannot own."""
    place = f"sidecar {_name_of(sidecar)}: file {name!r}"
    if not isinstance(name, str) or name != os.path.basename(name) or name[:1] in {"", "."} or not name.isprintable():
        raise OptionError(f"{place}; want the plain name of a file in the directory, without a leading dot")
    if name in taken:
        raise OptionError(f"{place} belongs to datamat or to another sidecar; choose another name")
    if name.partition(".")[2] in endings:
        raise OptionError(f"{place} has the extension of a shard, which readers take for data; choose another one")
    if not isinstance(content, (bytes, FromShard)):
        raise OptionError(f"{place} is a {type(content).__name__}; want bytes or a FromShard")


def _name_of(sidecar: Sidecar) -> str:
    return str(getattr(sidecar, "__qualname__", type(sidecar).__qualname__))


def _rendered(output: pathlib.Path, content: bytes | FromShard) -> bytes:
    if isinstance(content, bytes):
        return content
    path = regular_path(output, content.shard.file)
    if not is_stand_in(path):
        return content.make(path)
    if content.make is not tar_index:
        raise OutputError(
            f"a sidecar reads {content.shard.file}, which is in a store and no longer here; leave the sidecar out, and "
            "call export on a copy of the dataset"
        )
    made: bytes = read_regular(output / WORK / MADE / f"{content.shard.file}.idx", max_bytes=_MOST_BYTES)
    return made


def _write(
    output: pathlib.Path,
    manifest: Manifest,
    files: Files,
    added: Files,
    record: Record,
    *,
    trusted: Manifest | None,
) -> ExportReport:
    """Write missing or outdated files, and remove obsolete files of earlier runs.

    Args:
        output: directory of the files.
        manifest: manifest described by the files.
        files: the files of the built-in sidecars.
        added: the files of the user's sidecars.
        record: records of files that datamat wrote before, by name.
        trusted: manifest of shards whose indexes, if they exist, are right, since rebuilding one takes time.
    """
    wanted = {**files, **added}
    kept = [name for name, content in wanted.items() if _is_foreign(output, name, content, record)]
    edited, left = _of_absent_sidecars(output, manifest, {n: entry for n, entry in record.items() if n not in wanted})
    now = {name: _Written(_known_digest(content)) for name, content in files.items() if name not in kept}
    if added:
        described = _digest(manifest.render())
        now |= {name: _Written(_known_digest(text), described) for name, text in added.items() if name not in kept}
    made = {name for name in now if name in added and not now[name].digest}  # from shards: their digests come below
    now |= {name: record[name] for name in made if record.get(name, _Written("")).manifest == now[name].manifest}
    edited += _remove(output, record, record.keys() - wanted.keys() - left.keys())
    if {**now, **left} != record or not (output / RECORD).is_file():
        # Before the files, so that the next run recognizes files of a run that is killed from here on.
        _write_record(output, {**now, **left})
    standing = {**now, **left}
    checksums = {shard.file: shard.checksum for shard in trusted.all_files} if trusted else {}
    written = []
    for name in now:
        content = wanted[name]
        if name in files and name in record and _stands(output / name, content, checksums):
            continue
        if name in files and _is_made_ahead(output, name, content):
            written.append(name)
            continue
        text = _rendered(output, content)
        if _content(output / name) != text:
            is_other = _is_edited(output / name, record.get(name)) or _is_folder(output / name)
            edited += _set_aside(output, [name]) if is_other else []
            if standing[name].digest not in {"", _digest(text)}:  # other bytes for the same shards
                standing |= {other: standing[other]._replace(digest="") for other in made}
                _write_record(output, standing)
            _commit(output, name, text, flushes_name=False)
            written.append(name)
        if name in made:
            now[name] = now[name]._replace(digest=_digest(text))
    fsync_folder(output)
    if {**now, **left} != standing:
        _write_record(output, {**now, **left})
    unchanged = tuple(sorted(now.keys() - set(written)))
    return ExportReport(output, tuple(written), unchanged, tuple(kept), tuple(edited))


def _stands(path: pathlib.Path, content: bytes | FromShard, checksums: Mapping[str, str]) -> bool:
    """Return True if an index of the shard's present bytes exists; `checksums` are those of trusted shards."""
    if isinstance(content, bytes):
        return False
    return checksums.get(content.shard.file) == content.shard.checksum and path.is_file()


def _is_made_ahead(output: pathlib.Path, name: str, content: bytes | FromShard) -> bool:
    """Give an index made by a worker its final name; return False if there is none."""
    if isinstance(content, bytes):
        return False
    ahead = index_ahead(output / _AHEAD, content.shard.file, content.shard.checksum)
    if os.path.lexists(output / name) or ahead.is_symlink() or not ahead.is_file():
        return False
    publish(ahead, output / name, flushes_name=False)
    return True


def _of_absent_sidecars(output: pathlib.Path, manifest: Manifest, record: Record) -> tuple[list[str], Record]:
    """Handle files of user sidecars that are not given now.

    A file that describes this manifest stays if it is intact. A damaged one is set aside, since it cannot be rewritten.

    Returns:
        The names of those set aside, and the records of those that stay.
    """
    record = {name: entry for name, entry in record.items() if entry.manifest}
    if not record:
        return [], {}
    described = _digest(manifest.render())
    damaged = [name for name, entry in record.items() if _is_edited(output / name, entry)]
    whole = {name: entry for name, entry in record.items() if name not in damaged and os.path.lexists(output / name)}
    return _set_aside(output, damaged), {name: entry for name, entry in whole.items() if entry.manifest == described}


def _is_foreign(output: pathlib.Path, name: str, content: bytes | FromShard, record: Record) -> bool:
    """Return True if an existing file must not be overwritten: it is not recorded, or is for people and edited."""
    found = _content(output / name)
    if name in record and (name not in _DOCUMENTS or (found is not None and _is_broken(name, found))):
        return False
    is_recorded = found is not None and name in record and record[name].digest == _digest(found)
    return found is not None and not is_recorded and found != _rendered(output, content)


def _is_edited(path: pathlib.Path, written: _Written | None) -> bool:
    """Return True if a file written by datamat has been changed."""
    if written is None or not written.digest:
        return False
    found = _content(path)
    return found is not None and _digest(found) != written.digest and path.is_file()


def _remove(output: pathlib.Path, record: Record, names: Collection[str]) -> list[str]:
    """Remove datamat's files; move edited ones aside, except those for people, and return the moved ones."""
    edited = [name for name in sorted(names) if _is_edited(output / name, record[name])]
    for name in sorted(set(names) - set(edited)):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder in its place is not datamat's
            (output / name).unlink()
    moved = _set_aside(output, [name for name in edited if name not in _DOCUMENTS])
    if names:
        fsync_folder(output)
    return moved


def _set_aside(output: pathlib.Path, names: Sequence[str]) -> list[str]:
    """Move edited files to where they do not mislead programs; return their names."""
    moved = []
    for name in names:
        if name in _DOCUMENTS or (output / name).is_symlink():
            continue
        (output / _EDITED).mkdir(parents=True, exist_ok=True)
        place = output / _EDITED / name
        if _is_folder(output / name):  # it cannot replace a file or a non-empty folder
            places = (place.with_name(f"{name}.folder{number}") for number in itertools.count())
            place = next(path for path in places if not os.path.lexists(path))
        os.replace(output / name, place)
        moved.append(name)
    return moved


def _is_folder(path: pathlib.Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _warn_of_edits(output: pathlib.Path, names: Sequence[str], logger: logging.Logger) -> None:
    for name in names:
        logger.warning(
            "%s had been changed since datamat wrote it; the changed file is %s", output / name, output / _EDITED / name
        )


def _read_record(output: pathlib.Path) -> Record | None:
    """Return the record of each file that datamat wrote, by name; None if there is no record."""
    with contextlib.suppress(OSError, ValueError):
        value = read_json(output / RECORD)
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            split = {name: text.partition(" ") for name, text in value.items()}
            return {
                name: _Written(digest, manifest)
                for name, (digest, _, manifest) in split.items()
                if name == os.path.basename(name) not in {"", ".", ".."}
            }
    return None


def _write_record(output: pathlib.Path, record: Record) -> None:
    value = {name: f"{digest} {manifest}" if manifest else digest for name, (digest, manifest) in record.items()}
    _commit(output, RECORD, render_json(value))


def _known_digest(content: bytes | FromShard) -> str:
    return _digest(content) if isinstance(content, bytes) else ""


def _digest(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def _content(path: pathlib.Path) -> bytes | None:
    """Return the content of a file; None if it does not exist; empty if it is not a readable regular file.

    Raises:
        OSError: the disk fails, so that the owner of the file is unknown.
    """
    try:
        content = read_regular(path, max_bytes=_MOST_BYTES)
        regular_path(path.parent, path.name)  # raises if it is elsewhere
        return content
    except FileNotFoundError:
        return None
    except (ValueError, IsADirectoryError):
        return b""
    except OSError as error:
        if error.errno in _NOT_OURS:
            return b""
        raise


def _commit(output: pathlib.Path, name: str | pathlib.PurePath, content: bytes, *, flushes_name: bool = True) -> None:
    through = output / _AHEAD
    through.mkdir(parents=True, exist_ok=True)
    with commit(output / name, through=through, flushes_name=flushes_name) as file:
        file.write(content)
