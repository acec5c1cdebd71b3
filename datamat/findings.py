"""What the values of one field have in common: kind, lengths, range, pictures and their sizes, text.

Values are looked at one record at a time and then let go, so that memory stays at a few numbers per field. Of a
picture only the header is read.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat import codecs
from datamat.errors import InputError
from datamat.features import Image, Scalar, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.codecs import ImageInfo
    from datamat.features import Feature

__all__ = ["Field", "FieldFinder", "picture_of", "shown"]

_MOST_VALUES = 16  # different integers that are listed one by one; more are told by their range
_MOST_SHOWN = 60
_PICTURE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"BM")
_ANY_SIZE = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """What was found in one field.

    Attributes:
        name: of the field.
        kind: "image", "text", "bytes", or the name of a numpy dtype.
        num_records: how many of the records that were looked into hold it.
        lengths: least and most values in one record.
        told: range, sizes, encodings, in words.
        feature: that would hold every value; None where bytes are neither pictures nor text, or there is no value.
    """

    name: str
    kind: str
    num_records: int
    lengths: tuple[int, int]
    told: str
    feature: Feature | None


@final
class FieldFinder:
    """Looks at the values of a field, record after record.

    Args:
        name: of the field.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_records = 0
        self._lengths = _Range()
        self._sizes = _Range()
        self._numbers = _Range()
        self._values: set[int] | None = set()  # None where there are too many
        self._kinds: collections.Counter[str] = collections.Counter()
        self._pictures = _Pictures()

    def add(self, values: Sequence[bytes] | np.ndarray) -> None:
        """Look at the values of one record: bytes, or a 1-D array of numbers."""
        self._num_records += 1
        self._lengths.add(len(values))
        if isinstance(values, np.ndarray):
            self._add_numbers(values)
        else:
            for value in values:
                self._add_bytes(value)

    def found(self) -> Field:
        """Return what was found."""
        kind = self._kind()
        lengths = self._lengths.bounds
        return Field(self._name, kind, self._num_records, lengths, self._told(kind), self._feature(kind, lengths))

    def _add_numbers(self, values: np.ndarray) -> None:
        self._kinds[values.dtype.name] += 1
        finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        if not len(finite):
            return
        self._numbers.add(finite.min().item())
        self._numbers.add(finite.max().item())
        if self._values is not None and values.dtype.kind in "iub":
            self._values.update(int(value) for value in np.unique(finite)[: _MOST_VALUES + 1])
            if len(self._values) > _MOST_VALUES:
                self._values = None

    def _add_bytes(self, value: bytes) -> None:
        self._sizes.add(len(value))
        info = picture_of(value)
        if info is not None:
            self._kinds["image"] += 1
            self._pictures.add(info)
        else:
            self._kinds["text" if _is_text(value) else "bytes"] += 1

    def _kind(self) -> str:
        kinds = set(self._kinds)
        if not kinds:
            return "no value"
        if len(kinds) == 1:
            return kinds.pop()
        return "bytes" if kinds <= {"image", "text", "bytes"} else "/".join(sorted(kinds))

    def _told(self, kind: str) -> str:
        if kind == "no value":
            return ""
        if kind == "image":
            return f"{self._pictures}, {self._sizes} bytes"
        if kind in {"text", "bytes"}:
            mixed = ", ".join(f"{count:,} {name}" for name, count in sorted(self._kinds.items()))
            return f"{self._sizes} bytes" + (f" ({mixed})" if len(self._kinds) > 1 else "")
        if self._values and np.dtype(kind).kind in "iub":
            return "values " + ", ".join(map(str, sorted(self._values)))
        return f"{self._numbers}" if self._numbers.is_set else "no finite number"

    def _feature(self, kind: str, lengths: tuple[int, int]) -> Feature | None:
        is_one = lengths == (1, 1)
        if kind in {"image", "text"}:
            return (self._pictures.feature() if kind == "image" else Text()) if is_one else None
        if kind in {"no value", "bytes"} or "/" in kind:
            return None
        return Scalar(kind) if is_one else Tensor((lengths[0] if lengths[0] == lengths[1] else None,), kind)


def picture_of(value: bytes) -> ImageInfo | None:
    """Return what the header of an encoded picture says, or None where the bytes are none that datamat reads."""
    if not value.startswith(_PICTURE_STARTS):
        return None
    try:
        return codecs.probe(value, max_pixels=_ANY_SIZE)
    except InputError:
        return None


def shown(values: Sequence[bytes] | np.ndarray) -> str:
    """Return the values of one field of one record for a person to see, cut where they grow long."""
    if isinstance(values, np.ndarray):
        few = ", ".join(f"{value:g}" if values.dtype.kind == "f" else str(value) for value in values[:8].tolist())
        more = f", ... ({len(values):,} values)" if len(values) > 8 else ""
        return few + more if len(values) == 1 else f"[{few}{more}]"
    texts = [_shown_bytes(value) for value in values[:8]]
    return texts[0] if len(values) == 1 else f"[{', '.join(texts)}{', ...' if len(values) > 8 else ''}]"


class _Range:
    """Least and most of some numbers."""

    __slots__ = ("least", "most")

    def __init__(self) -> None:
        self.least: Any = None
        self.most: Any = None

    def add(self, number: Any) -> None:
        if self.least is None:
            self.least = self.most = number
        elif number < self.least:
            self.least = number
        elif number > self.most:
            self.most = number

    @property
    def is_set(self) -> bool:
        return self.least is not None

    @property
    def bounds(self) -> tuple[int, int]:
        return (self.least or 0, self.most or 0)

    def __str__(self) -> str:
        texts = [f"{number:,}" if isinstance(number, int) else f"{number:g}" for number in (self.least, self.most)]
        return texts[0] if self.least == self.most else f"{texts[0]} to {texts[1]}"


class _Pictures:
    """Sizes and encodings of pictures, as their headers tell."""

    def __init__(self) -> None:
        self._encodings: collections.Counter[str] = collections.Counter()
        self._heights, self._widths = _Range(), _Range()
        self._channels: set[int] = set()

    def add(self, info: ImageInfo) -> None:
        self._encodings[info.encoding] += 1
        self._heights.add(info.height)
        self._widths.add(info.width)
        self._channels.add(4 if info.alpha else 3 if info.palette else info.channels)

    def feature(self) -> Feature:
        sizes = [size.least if size.least == size.most else None for size in (self._heights, self._widths)]
        channels = next(iter(self._channels)) if len(self._channels) == 1 else 4 if 4 in self._channels else 3
        encoding = "jpeg" if set(self._encodings) == {"jpeg"} and channels != 4 else "png"
        return Image((*sizes, channels if channels in {1, 3, 4} else 3), encoding)  # type: ignore[arg-type]

    def __str__(self) -> str:
        encodings = ", ".join(name for name, _ in self._encodings.most_common())
        channels = " or ".join(map(str, sorted(self._channels)))
        plural = "" if self._channels == {1} else "s"
        return f"{encodings}, height {self._heights}, width {self._widths}, {channels} channel{plural}"


def _is_text(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or all(letter.isprintable() or letter in "\n\r\t" for letter in text)


def _shown_bytes(value: bytes) -> str:
    info = picture_of(value)
    if info is not None:
        return f"<{info.encoding}, {info.height} x {info.width}, {len(value):,} bytes>"
    if _is_text(value):
        text = value.decode()
        return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
    return f"<{len(value):,} bytes: {value[:16].hex(' ')}{' ...' if len(value) > 16 else ''}>"
