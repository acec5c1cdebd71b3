"""WebDataset: samples in tar archives, and as its objects give them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, SourceError, count_of
from datamat.features import Bytes, Json, Nullable, Scalar, Text
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile, stem_and_ending
from datamat.writers.records import RecordForm, RecordsSource
from datamat.writers.samples import fit_key, flattened
from datamat.writers.unpacking import PIECE, SpoolOptions, unpacked_by_content

if TYPE_CHECKING:
    from datamat.features import Feature


_KNOWN_BYTES = frozenset([
    "jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "wav", "flac", "mp3", "ogg", "opus", "m4a",
    "mp4", "avi", "mov", "mkv", "webm", "pdf", "bin", "npz",
])  # fmt: skip
_KNOWN_TEXT = frozenset(["txt", "text", "transcript", "caption", "md", "html", "xml", "csv"])
_KNOWN_NUMBER = frozenset(["cls", "cls2", "class", "count", "index", "inx", "id"])
_KNOWN_JSON = frozenset({"json", "jsn"})
_NEVER_DECODED = frozenset({"bin", "npz", "pdf"})


@final
class TarForm(RecordForm):
    """WebDataset: members of a tar archive that stand together and share the name before the first dot.

    Args:
        paths: the archives.
        spool: where those are unpacked that are compressed.
    """

    def __init__(self, paths: Sequence[str], spool: SpoolOptions) -> None:
        self._paths = paths
        self._files = unpacked_by_content(paths, _is_tar, spool)
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()
        found = [self._samples(path, self._files.path(number)) for number, path in enumerate(paths)]
        names = list(dict.fromkeys(name for samples in found for _, members in samples for name in members))
        self._places = {name: place for place, name in enumerate(names)}
        self._keys = [[key for key, _ in samples] for samples in found]
        self._spans = [
            np.array([[members.get(name, (-1, 0)) for name in names] for _, members in samples], np.int64).reshape(
                len(samples), len(names), 2
            )
            for samples in found
        ]
        self.features = {name: feature for name in names if (feature := feature_of_ending(name))}
        self.refused = {name: reason for name in names if (reason := self._why_not(name))}

    def field_names(self) -> list[str]:
        return list(self._places)

    def counts(self) -> list[int]:
        return [len(keys) for keys in self._keys]

    def keys(self, file: int) -> Sequence[str] | None:
        return self._keys[file]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw, self._may_miss = declared_members(features)

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with open(self._files.path(file), "rb") as archive:
            for name in names:
                start, size = self._spans[file][number, self._places[name]].tolist()
                if start < 0:
                    if name not in self._may_miss:
                        raise CorruptDataError(missing_member(self._paths[file], self._keys[file][number], name))
                    found[name] = None
                    continue
                archive.seek(start)
                data = archive.read(size)
                if len(data) != size:
                    raise CorruptDataError(
                        f"{self._paths[file]}: member {name!r} of sample {self._keys[file][number]!r} is cut off: "
                        f"{len(data):,} of {size:,} bytes"
                    )
                found[name] = data if name in self._raw else content_of_member(name, data)
        return found

    def _samples(self, path: str, unpacked: str) -> list[tuple[str, dict[str, tuple[int, int]]]]:
        samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
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
                    samples[-1][1][ending] = member.offset_data, member.size
                end = archive.offset
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:  # of Python's own, too: sizes below zero
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{path} cannot be read as a tar archive: {error}; copy or write it again") from error
        if (damage := _after_the_end(unpacked, end)) is not None:
            raise SourceError(f"{path} {damage}; copy or write it again")
        return samples

    def _why_not(self, name: str) -> str:
        drop = f"leave it out with drop=[{name!r}]"
        place = self._places[name]
        without = [
            keys[number]
            for keys, spans in zip(self._keys, self._spans, strict=True)
            for number in np.flatnonzero(spans[:, place, 0] < 0).tolist()
        ]
        if without:
            return (
                f"{len(without)} samples have no member {name!r}, the first {without[0]!r}; add it, declare it with "
                f"features={{{name!r}: Nullable(...)}}, or {drop}"
            )
        return why_unknown(name)


def _is_tar(head: bytes) -> bool:
    with contextlib.suppress(tarfile.HeaderError):
        tarfile.TarInfo.frombuf(head, tarfile.ENCODING, "surrogateescape")
        return True
    return False


def _after_the_end(path: str, end: int) -> str | None:
    """Return what is wrong with what follows the last member that `tarfile` gives; None if that is the archive's end.

    It takes whatever is no header for the end, also where an archive was cut off or is damaged. By POSIX, an archive
    ends with blocks of zeros.
    """
    with open(path, "rb") as file:
        file.seek(end)
        if not (piece := file.read(PIECE)):
            return f"has no end: it was cut off behind byte {end:,}, or whoever wrote it was stopped"
        while piece:
            if piece.count(0) < len(piece):
                return f"is damaged behind byte {end:,}, or another archive was joined to it"
            piece = file.read(PIECE)
    return None


def declared_members(features: Mapping[str, Feature]) -> tuple[frozenset[str], frozenset[str]]:
    """Return which fields are stored as their bytes, and which may be missing."""
    raw = {name for name, feature in features.items() if feature in (Bytes(), Nullable(Bytes()))}
    return frozenset(raw), frozenset(name for name, feature in features.items() if feature.takes_none)


def missing_member(place: str, key: str, name: str) -> str:
    """Return what to write where a sample lacks a member."""
    return (
        f"{place}: sample {key!r} has no {name!r}; add it, declare it with features={{{name!r}: Nullable(...)}}, or "
        f"leave the field out with drop=[{name!r}]"
    )


def why_unknown(name: str) -> str:
    """Return what to write where an extension does not say what a file holds; "" where it does."""
    if _ending(name) in _KNOWN_BYTES | _KNOWN_TEXT | _KNOWN_NUMBER | _KNOWN_JSON | {"npy"}:
        return ""
    return (
        f"nobody knows the extension of the members {name!r}, or what it holds is never unpickled; pass "
        f"features={{{name!r}: Bytes()}} to store its bytes, or leave it out with drop=[{name!r}]"
    )


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def feature_of_ending(name: str) -> Feature | None:
    """Return the feature of members with an extension; None where their bytes, or their content, say more."""
    ending = _ending(name)
    if ending in _KNOWN_TEXT:
        return Text()
    if ending in _KNOWN_JSON:
        return Json()
    if ending in _NEVER_DECODED:
        return Bytes()
    return Scalar("int64") if ending in _KNOWN_NUMBER else None


def content_of_member(name: str, data: bytes) -> Any:
    """Return the content of a member by its extension, as WebDataset decodes it; pictures stay encoded."""
    ending = _ending(name)
    try:
        if ending in _KNOWN_TEXT:
            return data.decode()
        if ending in _KNOWN_NUMBER:
            return int(data)
        if ending in _KNOWN_JSON:
            return json.loads(data)
        return np.load(io.BytesIO(data), allow_pickle=False) if ending == "npy" else data
    except ValueError as error:
        raise CorruptDataError(f"member {name!r} does not hold what its extension says: {error}") from error


@final
class TarRows:
    """Samples as the objects of WebDataset give them: dicts of members, decoded or not, and notes such as `__url__`.

    Members that are still bytes are decoded as those of tars are. The notes are no fields: they hold absolute paths.
    """

    def __init__(self) -> None:
        self.features: dict[str, Feature] = {}
        self.refused: dict[str, str] = {}
        self._raw: frozenset[str] = frozenset()
        self._may_miss: frozenset[str] = frozenset()

    @staticmethod
    def are(row: Any) -> bool:
        """Tell whether a row of an iterator is such a sample."""
        return isinstance(row, Mapping) and "__key__" in row

    def show(self, row: Mapping[str, Any]) -> None:
        """Take features, and what cannot be stored without one, from the first row."""
        for name, value in members_of(row).items():
            feature = feature_of_ending(name)
            if isinstance(value, bytes):
                self.features |= {} if feature is None else {name: feature}
                self.refused |= {name: reason} if (reason := why_unknown(name)) else {}
            elif feature == Json() and isinstance(value, (Mapping, list)):
                self.features[name] = feature  # its keys may vary from sample to sample

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares."""
        self._raw, self._may_miss = declared_members(features)

    def nested(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a row but those that are stored as JSON."""
        return {name: value for name, value in members_of(row).items() if name not in self.features}

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the members of a row by name; None for those that are declared to be missing at times."""
        found = {
            name: content_of_member(name, value) if isinstance(value, bytes) and name not in self._raw else value
            for name, value in members_of(row).items()
        }
        return found | dict.fromkeys(self._may_miss - found.keys())


def members_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a row, without its notes."""
    return {name: value for name, value in row.items() if not (name.startswith("__") and name.endswith("__"))}


def archive_of(url: str | None) -> str:
    """Return what the keys of an archive's samples begin with where archives repeat keys."""
    return fit_key(stem_and_ending(os.path.basename(url or ""))[0])


def keys_of_tars(named: Sequence[tuple[str, str | None]]) -> Iterator[str]:
    """Yield the key of each sample, behind the name of its archive where archives repeat keys, as files of tars do.

    Args:
        named: key and archive of each sample.
    """
    repeats = len({key for key, _ in named}) < len(named) and len({archive for _, archive in named}) > 1
    return (f"{archive}-{key}" if repeats else key for key, archive in named)


def sample_of_tar(row: Mapping[str, Any], members: TarRows) -> dict[str, Any]:
    """Return a row of WebDataset as a sample, with its key."""
    key = row["__key__"]
    if not isinstance(key, str):
        raise SourceError(
            f"a row is a batch of {count_of(len(key), 'sample')}; leave .batched() out, so that each is one"
        )
    found: dict[str, Any] = {"key": fit_key(key)}
    for name, value in members.read(row).items():
        found |= {name: value} if name in members.features else dict(flattened({name: value}))
    return found


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the samples of tar archives."""
    return RecordsSource(files, TarForm([file.path for file in files], spool))
