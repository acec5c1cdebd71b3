"""Writes the files that other readers need beside the shards, and takes them away before shards change.

    manifest ──> tfds, huggingface, wids, litdata, croissant ──> texts ─┐
    tar shards ──> dali ──> indexes ────────────────────────────────────┴──> the directory

A run writes them when every shard has its name, before the manifest: where there is a manifest, all is there. They hold
nothing that is not in manifest and shards, so that they can be written again at any time, with the same bytes.

Most are for programs, and are datamat's as the shards are. `README.md` and `croissant.json` are for people, who may
complete them: they are datamat's as long as they are what the manifest gave, and are left alone otherwise. What an
earlier run wrote is known by its manifest, which `.datamat/shards` keeps until the next run is finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import pathlib
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError, OutputError
from datamat.features import Features
from datamat.interop.croissant import croissant_sidecars
from datamat.interop.dali import dali_sidecars, tar_index
from datamat.interop.huggingface import hugging_face_sidecars
from datamat.interop.litdata import litdata_sidecars
from datamat.interop.tfds import tfds_sidecars
from datamat.interop.wids import wids_sidecars
from datamat.manifest import Manifest
from datamat.storage import commit, fsync_folder, locked, read_regular, refuse_links

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["ExportReport", "export", "sidecar_names", "sidecar_problems", "withdraw_sidecars", "write_sidecars"]

_DOCUMENTS = frozenset({"README.md", "croissant.json"})
_MOST_BYTES = 1 << 32  # of one file: the index of a hundred million members
_ASIDE = pathlib.PurePath(".datamat", "shards")  # the manifest that was there before the run that is under way
_COMING = _ASIDE / "coming"  # the manifest that this run is about to write
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO})  # not to be read, a link, a socket
_LEFT_ALONE = "left alone, it is not as datamat wrote it; move it away and export again to have datamat's"
_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ExportReport:
    """What `export` did. `str` of it names each file that is not as it was.

    Attributes:
        path: the directory.
        written: files that were missing, or not as they should be.
        unchanged: files that were as they should be.
        kept: files for people that somebody has changed, or wrote before datamat did.
    """

    path: pathlib.Path
    written: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = {"written": self.written, _LEFT_ALONE: self.kept}
        lines = [f"  {name}: {what}" for what, names in told.items() for name in names]
        return "\n".join([f"{self.path}: {len(self.written) + len(self.unchanged)} files for other readers", *lines])


def export(path: str | os.PathLike[str]) -> ExportReport:
    """Write the files that other readers need beside the shards of a finished directory, where they are not there.

    Args:
        path: the directory. A `README.md` or `croissant.json` that is not datamat's is left alone.

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
        report = _write(output, manifest, trusted=None)
        with contextlib.suppress(OSError):  # it is not empty: a run was killed, and goes on from what is there
            (output / _ASIDE).rmdir()
    return report


def write_sidecars(output: pathlib.Path, manifest: Manifest, logger: logging.Logger = _LOGGER) -> None:
    """Write what `export` writes, at the end of a run, which holds the lock.

    Args:
        output: the directory, with all its shards.
        manifest: what it holds, whether or not that is written already.
        logger: is told of files that are left alone.
    """
    is_finished = _read(output) is not None
    if not is_finished:  # a run that is killed from here on leaves files of this manifest
        (output / _COMING).mkdir(parents=True, exist_ok=True)
        manifest.write(output / _COMING)
    report = _write(output, manifest, trusted=manifest if is_finished else _read(output / _ASIDE))
    for name in report.kept:
        logger.info("%s: %s", output / name, _LEFT_ALONE)


def withdraw_sidecars(output: pathlib.Path, fingerprints: Mapping[str, str]) -> None:
    """Remove what earlier runs wrote for other readers, because it will not tell the truth once shards change.

    Args:
        output: the directory, whose manifest is put aside.
        fingerprints: of the shards that are to be, by name. What a finished run wrote for just these shards stays.
    """
    before, begun = _read(output / _ASIDE), _read(output / _COMING)
    if before and {shard.name: shard.fingerprint for shard in before.shards} != fingerprints:
        _remove_sidecars(output, before)
    if begun:
        _remove_sidecars(output, begun)


def sidecar_names(manifest: Manifest) -> set[str]:
    """Return the names of all files that a directory with this manifest has for other readers."""
    return {*_texts(manifest), *dali_sidecars(manifest)}


def sidecar_problems(output: pathlib.Path, manifest: Manifest) -> dict[str, str]:
    """Return what is wrong with files that programs read, by name; those that are missing do no harm, and are not told.

    Args:
        output: a finished directory whose shards are as its manifest says.
        manifest: what it holds.
    """
    wanted = {name: text for name, text in _texts(manifest).items() if name not in _DOCUMENTS}
    wrong = [name for name, text in wanted.items() if _content(output / name) not in (None, text)]
    for name, shard in dali_sidecars(manifest).items():
        found = _content(output / name)
        wrong += [name] if found is not None and found != tar_index(output / shard.file) else []
    return dict.fromkeys(wrong, "differs from what manifest and shards give; export writes it anew")


def _texts(manifest: Manifest) -> dict[str, bytes]:
    """Return the files that come from the manifest alone."""
    # In the order that a manifest has once it is read back: a run still knows the one in which they were declared.
    manifest = dataclasses.replace(manifest, features=Features(dict(sorted(manifest.features.items()))))
    return {
        **tfds_sidecars(manifest),
        **hugging_face_sidecars(manifest),
        **wids_sidecars(manifest),
        **litdata_sidecars(manifest),
        **croissant_sidecars(manifest),
    }


def _write(output: pathlib.Path, manifest: Manifest, *, trusted: Manifest | None) -> ExportReport:
    """Write what is not as it should be.

    Args:
        output: the directory.
        manifest: what it holds.
        trusted: the index of a tar shard that this manifest has, too, is as it should be where it is there: it takes
            time to make it and compare.
    """
    texts, names = _texts(manifest), sidecar_names(manifest)
    written, kept = [], []
    for name, text in texts.items():
        found = _content(output / name)
        if found is not None and found != text and name in _DOCUMENTS:
            kept.append(name)
        elif found != text:
            _commit(output / name, text)
            written.append(name)
    known = {shard.file: shard.checksum for shard in trusted.all_files} if trusted else {}
    for name, shard in dali_sidecars(manifest).items():
        if known.get(shard.file) == shard.checksum and (output / name).is_file():
            continue
        index = tar_index(output / shard.file)
        if _content(output / name) != index:
            _commit(output / name, index)
            written.append(name)
    return ExportReport(output, tuple(written), tuple(sorted(names - {*written, *kept})), tuple(kept))


def _remove_sidecars(output: pathlib.Path, manifest: Manifest) -> None:
    """Remove what was written for a manifest: not what people have changed since."""
    texts = _texts(manifest)
    for name in sidecar_names(manifest):
        if name not in _DOCUMENTS or _content(output / name) == texts[name]:
            (output / name).unlink(missing_ok=True)
    fsync_folder(output)


def _read(folder: pathlib.Path) -> Manifest | None:
    with contextlib.suppress(OutputError, CorruptDataError):
        return Manifest.read(folder)
    return None


def _content(path: pathlib.Path) -> bytes | None:
    """Return the content of a file, None where nothing is there; nothing of what is no file that we may read.

    Raises:
        OSError: the disk fails: that says nothing about whose file it is.
    """
    try:
        return read_regular(path, max_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:
        return b""
    except OSError as error:
        if error.errno in _NOT_OURS:
            return b""
        raise


def _commit(path: pathlib.Path, content: bytes) -> None:
    # Through `shards`, which the end of a run removes: what a kill leaves there is not seen, and does not stay.
    through = path.parent / _ASIDE
    through.mkdir(parents=True, exist_ok=True)
    with commit(path, through=through) as file:
        file.write(content)
