"""Reads samples of members whose extensions name the fields, in a WebDataset tar or as files in a folder."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from datamat.errors import CorruptDataError
from datamat.features import Bytes, Json, Nullable, Scalar, Text
from datamat.writers.records import RecordForm
from datamat.writers.unpacking import UnpackedFiles

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

Place: TypeAlias = tuple[int, int, int]
"""Where a member lies: number of its file, first byte, and size, which is -1 for the whole file."""

_NOWHERE = (-1, 0, 0)


@final
class MembersForm(RecordForm):
    """Samples of members.

    Args:
        samples: the samples of each source file: key, and the place of each member by its extension.
        files: the files that members lie in.
        advice: what else helps if samples lack a member, with `{0}` for its name.
    """

    def __init__(
        self, samples: Sequence[Sequence[tuple[str, Mapping[str, Place]]]], files: UnpackedFiles, advice: str = ""
    ) -> None:
        self._files = files
        self._raw: frozenset[str] = frozenset()
        names = list(dict.fromkeys(name for some in samples for _, members in some for name in members))
        self._columns = {name: column for column, name in enumerate(names)}
        self._keys = [[key for key, _ in some] for some in samples]
        self._places = [  # int64 (samples, names, 3) of each source file
            np.array([[members.get(name, _NOWHERE) for name in names] for _, members in some], np.int64).reshape(
                len(some), len(names), 3
            )
            for some in samples
        ]
        self.tell({name: self._why_not(name, advice) or feature_of_ending(name) for name in names})

    def field_names(self) -> list[str]:
        return list(self._columns)

    def counts(self) -> list[int]:
        return [len(keys) for keys in self._keys]

    def keys(self, file: int) -> Sequence[str] | None:
        return self._keys[file]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._raw = stored_raw(features)

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        row, found = self._places[file][number].tolist(), {}
        for name in names:
            where, start, size = row[self._columns[name]]
            if where < 0:
                continue
            with open(self._files.path(where), "rb") as opened:
                opened.seek(start)
                data = opened.read(size)
            place = f"{self._files.paths[where]}: sample {self._keys[file][number]!r}: "
            if size >= 0 and len(data) != size:
                raise CorruptDataError(f"{place}member {name!r} is cut off: {len(data):,} of {size:,} bytes")
            found[name] = data if name in self._raw else content_of_member(name, data, place)
        return found

    def _why_not(self, name: str, advice: str) -> str:
        column = self._columns[name]
        without = [
            keys[number]
            for keys, places in zip(self._keys, self._places, strict=True)
            for number in np.flatnonzero(places[:, column, 0] < 0).tolist()
        ]
        if not without:
            return why_unknown(name)
        return (
            f"{len(without)} samples have no member {name!r}, the first is {without[0]!r}; add it, declare it with "
            f"features={{{name!r}: Nullable(...)}}, or leave it out with drop=[{name!r}]{advice.format(name)}"
        )


def stored_raw(features: Mapping[str, Feature]) -> frozenset[str]:
    """Return which declared fields are stored as the bytes of their members."""
    return frozenset(name for name, feature in features.items() if feature in (Bytes(), Nullable(Bytes())))


def why_unknown(name: str) -> str:
    """Return what to write if an extension does not say what a file holds, otherwise ""."""
    if _ending(name) in _KNOWN_BYTES | _KNOWN_TEXT | _KNOWN_NUMBER | _KNOWN_JSON | {"npy"}:
        return ""
    return (
        f"the extension of the members {name!r} is unknown, or its content is never unpickled; pass "
        f"features={{{name!r}: Bytes()}} to store its bytes, or leave it out with drop=[{name!r}]"
    )


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def feature_of_ending(name: str) -> Feature | None:
    """Return the feature of members with an extension; None if their bytes or their content say more."""
    ending = _ending(name)
    if ending in _KNOWN_TEXT:
        return Text()
    if ending in _KNOWN_JSON:
        return Json()
    if ending in _NEVER_DECODED:
        return Bytes()
    return Scalar("int64") if ending in _KNOWN_NUMBER else None


def content_of_member(name: str, data: bytes, place: str = "") -> Any:
    """Return the content of a member by its extension, as WebDataset decodes it; pictures stay encoded.

    Args:
        name: its extension.
        data: its bytes.
        place: what messages begin with.
    """
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
        raise CorruptDataError(f"{place}member {name!r} does not hold what its extension says: {error}") from error
