"""Writes the files that other readers need beside the shards, and takes them away before shards change.

    manifest ──> tfds, huggingface, wids, litdata, croissant ──> texts ─┐
    tar shards ──> dali ──> indexes ────────────────────────────────────┴──> OUT, and the record of what is datamat's

A run writes them when every shard has its name, before the manifest: where there is a manifest, all is there. They hold
nothing that is not in manifest and shards, so that they can be written again at any time, with the same bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from typing import TYPE_CHECKING, Literal

import xxhash

from datamat.errors import CorruptDataError
from datamat.features import Features
from datamat.interop.croissant import croissant_sidecars
from datamat.interop.dali import dali_sidecars, tar_index
from datamat.interop.huggingface import hugging_face_sidecars
from datamat.interop.litdata import litdata_sidecars
from datamat.interop.record import DOCUMENTS, Record, work_folder
from datamat.interop.tfds import tfds_sidecars
from datamat.interop.wids import wids_sidecars
from datamat.manifest import Manifest
from datamat.storage import commit, fsync_folder, locked, read_regular, refuse_links

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["ExportReport", "export", "sidecar_names", "sidecar_problems", "withdraw_sidecars", "write_sidecars"]

_MOST_BYTES = 1 << 32  # of one file: the index of a hundred million members
_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ExportReport:
    """What `export` did. `str` of it names each file that is not as it was.

    Attributes:
        path: the directory.
        written: files that were missing, or not as they should be.
        unchanged: files that were as they should be.
        removed: files of an earlier state of the directory, which it has no more.
        kept: files that should be written, and are not datamat's, or were changed by somebody.
    """

    path: pathlib.Path
    written: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def blocked(self) -> tuple[str, ...]:
        """Those of `kept` that programs read: what a client finds there is not of this directory."""
        return tuple(name for name in self.kept if name not in DOCUMENTS)

    def __str__(self) -> str:
        told = {"written": self.written, "removed": self.removed, _LEFT_ALONE: self.kept}
        lines = [f"  {name}: {what}" for what, names in told.items() for name in names]
        return "\n".join([f"{self.path}: {len(self.written) + len(self.unchanged)} files for other readers", *lines])


_LEFT_ALONE = "left alone, it is not as datamat wrote it; move it away and export again to have datamat's"


@dataclasses.dataclass(frozen=True, slots=True)
class _Sidecar:
    """One file: the digest of what it is made from, and what makes it."""

    name: str
    made_from: str
    content: Callable[[], bytes]
    is_text: bool


def export(path: str | os.PathLike[str]) -> ExportReport:
    """Write the files that other readers need beside the shards of a finished directory, where they are not there.

    Args:
        path: the directory. What is in it that datamat did not write is left alone.

    Raises:
        OutputError: there is no manifest: the run is not finished. Or a run is at work there, or a link is in the way.
        CorruptDataError: the manifest, or a tar shard, is damaged.

    Example:
        >>> print(export("out/camvid"))   # doctest: +SKIP
        out/camvid: 6 files for other readers
          features.json: written
    """
    output = pathlib.Path(path)
    manifest = Manifest.read(output)
    work = output / ".datamat"
    refuse_links(work)
    work.mkdir(exist_ok=True)
    with locked(work / "lock"):
        return write_sidecars(output, manifest)


def write_sidecars(output: pathlib.Path, manifest: Manifest, logger: logging.Logger = _LOGGER) -> ExportReport:
    """Do what `export` does, in a directory whose lock the caller holds.

    Args:
        output: the directory, with all its shards.
        manifest: what it holds, whether or not that is written already.
        logger: is told of files that are left alone.
    """
    record = Record.read(output) or Record()
    sidecars = _sidecars(output, manifest)
    states = {sidecar.name: _state(output, sidecar, record) for sidecar in sidecars}
    pending = [sidecar for sidecar in sidecars if states[sidecar.name] == "write"]
    stale = [name for name in record.made_from if name not in states and _is_ours(output, name, record)]
    final = Record({sidecar.name: (sidecar.made_from,) for sidecar in sidecars if states[sidecar.name] != "keep"})
    if pending or stale or final != record:
        _write_all(output, pending, stale, record=record, final=final)
    report = ExportReport(
        output,
        written=tuple(sidecar.name for sidecar in pending),
        unchanged=tuple(name for name, state in states.items() if state == "same"),
        removed=tuple(stale),
        kept=tuple(name for name, state in states.items() if state == "keep"),
    )
    for name in report.kept:
        logger.log(logging.INFO if name in DOCUMENTS else logging.WARNING, "%s: %s", output / name, _LEFT_ALONE)
    return report


def withdraw_sidecars(output: pathlib.Path) -> None:
    """Remove what datamat wrote for other readers, because it will not tell the truth once a shard changes."""
    record = Record.read(output)
    if record is not None:
        _remove(output, [name for name in record.made_from if _is_ours(output, name, record)])


def sidecar_names(manifest: Manifest) -> set[str]:
    """Return the names of all files that a directory with this manifest has for other readers."""
    return {*_texts(manifest), *dali_sidecars(manifest)}


def sidecar_problems(output: pathlib.Path, manifest: Manifest) -> dict[str, str]:
    """Return what is wrong with files that programs read, by name. One that is not there does no harm, and is not told.

    Args:
        output: a finished directory.
        manifest: what it holds.
    """
    record = Record.read(output)
    problems = {}
    for sidecar in _sidecars(output, manifest):
        digest = _digest(output / sidecar.name)
        is_ours = record is None or record.owns(sidecar.name, digest or "")
        if digest is not None and is_ours and sidecar.name not in DOCUMENTS and not _is_as_made(sidecar, digest):
            problems[sidecar.name] = "differs from what manifest and shards give; export writes it anew"
    return problems


def _is_as_made(sidecar: _Sidecar, digest: str) -> bool:
    try:
        return digest == (sidecar.made_from if sidecar.is_text else xxhash.xxh3_128_hexdigest(sidecar.content()))
    except (OSError, CorruptDataError):
        return True  # the shard that it comes from has a problem of its own


def _texts(manifest: Manifest) -> Mapping[str, bytes]:
    # In the order that a manifest has once it is read back: a run still knows the one in which they were declared.
    manifest = dataclasses.replace(manifest, features=Features(dict(sorted(manifest.features.items()))))
    return {
        **tfds_sidecars(manifest),
        **hugging_face_sidecars(manifest),
        **wids_sidecars(manifest),
        **litdata_sidecars(manifest),
        **croissant_sidecars(manifest),
    }


def _sidecars(output: pathlib.Path, manifest: Manifest) -> list[_Sidecar]:
    texts = [
        _Sidecar(name, xxhash.xxh3_128_hexdigest(text), lambda text=text: text, is_text=True)  # type: ignore[misc]
        for name, text in _texts(manifest).items()
    ]
    indexes = [
        _Sidecar(name, shard.checksum, lambda file=shard.file: tar_index(output / file), is_text=False)  # type: ignore[misc]
        for name, shard in dali_sidecars(manifest).items()
    ]
    return [*texts, *indexes]


def _state(output: pathlib.Path, sidecar: _Sidecar, record: Record) -> Literal["same", "write", "keep"]:
    digest = _digest(output / sidecar.name)
    if digest is None:
        return "write"
    known = record.made_from.get(sidecar.name, ())
    if digest == sidecar.made_from if sidecar.is_text else sidecar.made_from in known:
        return "same"
    if record.owns(sidecar.name, digest):
        return "write"
    is_same = not sidecar.is_text and digest == xxhash.xxh3_128_hexdigest(sidecar.content())
    return "same" if is_same else "keep"


def _is_ours(output: pathlib.Path, name: str, record: Record) -> bool:
    digest = _digest(output / name)
    return digest is not None and record.owns(name, digest)


def _digest(path: pathlib.Path) -> str | None:
    """Return the digest of a file, None where nothing is there, "" for what is no file that can be read."""
    try:
        return xxhash.xxh3_128_hexdigest(read_regular(path, max_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""


def _write_all(
    output: pathlib.Path, pending: Iterable[_Sidecar], stale: Iterable[str], *, record: Record, final: Record
) -> None:
    """Write files and remove others so that a kill in between leaves none of which nobody knows whose it is."""
    through = work_folder(output)
    through.mkdir(parents=True, exist_ok=True)
    for left in through.glob(".*.tmp"):  # by a run that was killed
        left.unlink()
    begun = dict(record.made_from)
    for sidecar in pending:
        known = {*begun.get(sidecar.name, ()), sidecar.made_from}
        begun[sidecar.name] = tuple(sorted(known)) if sidecar.is_text else ()
    Record(begun).write(output)
    for sidecar in pending:
        with commit(output / sidecar.name, through=through) as file:
            file.write(sidecar.content())
    _remove(output, stale)
    final.write(output)


def _remove(output: pathlib.Path, names: Iterable[str]) -> None:
    for name in names:
        (output / name).unlink(missing_ok=True)
    fsync_folder(output)
