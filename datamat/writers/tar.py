"""Reads WebDataset: samples in tar archives, and from its objects."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from datamat.errors import SourceError, count_of
from datamat.features import Json
from datamat.writers.base import DataSource
from datamat.writers.members import (
    MembersForm,
    Place,
    content_of_member,
    feature_of_ending,
    stored_raw,
    why_unknown,
)
from datamat.writers.paths import SourceFile, stem_and_ending
from datamat.writers.records import RecordsSource
from datamat.writers.samples import Items, dicts_in, fit_key, flattened
from datamat.writers.unpacking import PIECE, SpoolOptions, unpacked_by_content

if TYPE_CHECKING:
    from datamat.features import Feature


def _samples(path: str, number: int, unpacked: str) -> list[tuple[str, dict[str, Place]]]:
    """Return the samples of an archive: adjacent members with the same name before the first dot."""
    samples: list[tuple[str, dict[str, Place]]] = []
    try:
        with tarfile.open(unpacked, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else the archive keeps them all
                folder, slash, base = member.name.removeprefix("./").rpartition("/")
                stem, dot, ending = base.partition(".")
                if not member.isfile() or not stem or folder.partition("/")[0] == "__MACOSX":
                    continue  # folders and hidden files
                if not dot:
                    raise SourceError(
                        f"{path}: member {member.name!r} has no extension, which would name its field; write the "
                        "archive without it, or with names such as '0001.jpg'"
                    )
                key, ending = folder + slash + stem, ending.lower()
                if not samples or samples[-1][0] != key:
                    samples.append((key, {}))
                if ending in samples[-1][1]:
                    raise SourceError(f"{path}: sample {key!r} has two members {ending!r}; give each its own name")
                samples[-1][1][ending] = number, member.offset_data, member.size
            end = archive.offset
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:  # ValueError from Python itself: negative sizes
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{path} cannot be read as a tar archive: {error}; copy or write it again") from error
    if (damage := _after_the_end(unpacked, end)) is not None:
        raise SourceError(f"{path} {damage}; copy or write it again")
    return samples


def _is_tar(head: bytes) -> bool:
    with contextlib.suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
        return True
    return False


def _after_the_end(path: str, end: int) -> str | None:
    """Return what is wrong after the last member that `tarfile` gives; None if the archive ends there.

    `tarfile` takes anything but a header for the end, even if an archive was cut off or damaged. By POSIX, an archive
    ends with blocks of zeros.
    """
    with open(path, "rb") as file:
        file.seek(end)
        if not (piece := file.read(PIECE)):
            return f"has no end: it was cut off after byte {end:,}, or its writer was stopped"
        while piece:
            if piece.count(0) < len(piece):
                return f"is damaged after byte {end:,}, or another archive was appended to it"
            piece = file.read(PIECE)
    return None


def is_of_tar(item: Any) -> bool:
    """Return True if an item of an object is a sample from an object of WebDataset."""
    return isinstance(item, Mapping) and "__key__" in item


@final
class TarItems(Items):
    """Samples from objects of WebDataset: dicts of members, decoded or not, and notes such as `__url__`.

    Members that are still bytes are decoded as in tars. The notes are not fields, as they hold absolute paths.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self.features, self.refused = {}, {}
        self._raw: frozenset[str] = frozenset()
        for name, value in _members_of(first).items():
            feature = feature_of_ending(name)
            if isinstance(value, bytes):
                self.features |= {} if feature is None else {name: feature}
                self.refused |= {name: reason} if (reason := why_unknown(name)) else {}
            elif feature == Json() and isinstance(value, (Mapping, list)):
                self.features[name] = feature  # its keys may vary from sample to sample

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw = stored_raw(features)

    def sample(self, item: Mapping[str, Any]) -> dict[str, Any]:
        key = item["__key__"]
        if not isinstance(key, str):
            raise SourceError(
                f"a row is a batch of {count_of(len(key), 'sample')}; leave .batched() out, so that each row is one "
                "sample"
            )
        found: dict[str, Any] = {"key": fit_key(key)}
        for name, value in _members_of(item).items():
            content = content_of_member(name, value) if isinstance(value, bytes) and name not in self._raw else value
            found |= {name: content} if name in self.features else dict(flattened({name: content}))
        return found

    def dicts(self, item: Mapping[str, Any]) -> frozenset[str]:
        return dicts_in({name: value for name, value in _members_of(item).items() if name not in self.features})


def _members_of(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if not (name.startswith("__") and name.endswith("__"))}


def archive_of(url: str | None) -> str:
    """Return the beginning of the keys of an archive's samples, for archives that repeat keys."""
    return fit_key(stem_and_ending(os.path.basename(url or ""))[0])


def keys_of_tars(named: Sequence[tuple[str, str | None]]) -> Iterator[str]:
    """Yield the key of each sample, after the name of its archive if archives repeat keys, as for tar files."""
    repeats = len({key for key, _ in named}) < len(named) and len({archive for _, archive in named}) > 1
    return (f"{archive}-{key}" if repeats else key for key, archive in named)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the samples of tar archives."""
    paths = [file.path for file in files]
    archives = unpacked_by_content(paths, _is_tar, spool)
    samples = [_samples(path, number, archives.path(number)) for number, path in enumerate(paths)]
    return RecordsSource(files, MembersForm(samples, archives))
