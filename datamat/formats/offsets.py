"""Offsets: the places of the records in a file, beside each shard, in memory and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from datamat.errors import CorruptDataError, OptionError
from datamat.values import frozen

RecordSpan: TypeAlias = tuple[int, int, int]
"""Offset, size and skip of one record, as in `Offsets`; skip is 0 for formats without one."""

_LINES_AT_ONCE = 1 << 14  # Python's integers take several times the memory of the table


class RecordSpans(Protocol):
    """Lookup of the places of records: `Offsets`, or a file that contains them."""

    def span(self, number: int) -> RecordSpan:
        """Return the span of a record, by its number in the file; raise `CorruptDataError` if the lookup is damaged."""

    def spans(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return offset, size and skip of many records, int64 (n, 3); raise as `span` does."""


@final
@frozen(eq=False)
class Offsets:
    """The place of each record in one file: the content of its `.idx` file.

    Args:
        offset: uint64 (n,), first byte of the range to read for each record.
        size: uint64 (n,), number of bytes in that range, including framing.
        skip: uint64 (n,), position of each record in its member after decompression, for formats that compress several
            records together; None if the range is the record itself.
    """

    offset: NDArray[np.uint64]
    size: NDArray[np.uint64]
    skip: NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        for column in self._columns():
            if column.dtype != np.uint64 or column.shape != (len(self.offset),):
                raise OptionError(
                    f"offsets need uint64 columns of {len(self.offset)} values, one per record; "
                    f"got {column.dtype} {column.shape}"
                )

    def __len__(self) -> int:
        return len(self.offset)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Offsets):
            return NotImplemented
        mine, others = self._columns(), other._columns()
        if not len(self) and not len(other):  # without records, it is unknown whether the format has a skip
            return True
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    __hash__ = None  # type: ignore[assignment]  # equality compares arrays, which have no hash

    def span(self, number: int) -> RecordSpan:
        """Return offset, size and skip of one record."""
        skip = 0 if self.skip is None else int(self.skip[number])
        return int(self.offset[number]), int(self.size[number]), skip

    def spans(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return offset, size and skip of many records, int64 (n, 3)."""
        found = np.zeros((len(numbers), 3), np.int64)
        for place, column in enumerate(self._columns()):
            found[:, place] = column[numbers]
        return found

    def shifted(self, base: int) -> Offsets:
        """Return the offsets of the same records in a longer file in which this one starts at byte `base`."""
        return Offsets(self.offset + np.uint64(base), self.size, self.skip)

    @staticmethod
    def joined(parts: Iterable[tuple[Offsets, int]]) -> Offsets:
        """Return the offsets in the concatenation of several files.

        Args:
            parts: offsets and length in bytes of each file.

        >>> one = Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64))
        >>> Offsets.joined([(one, 50), (one, 50)]).offset.tolist()
        [0, 20, 50, 70]
        """
        base, shifted = 0, []
        for offsets, num_bytes in parts:  # one at a time: the shard of a million records has 16 MB of them
            if len(offsets):  # an empty part does not show whether there is a skip column
                shifted.append(offsets.shifted(base)._columns())
            base += num_bytes
        if not shifted:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        return Offsets(*(np.concatenate(column) for column in zip(*shifted, strict=True)))

    def to_text(self) -> str:
        r"""Return the text of the index file: a line `OFFSET SIZE` per record, or `MEMBER_OFFSET MEMBER_SIZE SKIP`.

        NVIDIA DALI reads the two-column form, which is byte for byte what its `tfrecord2idx` writes
        (https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx).

        >>> Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64)).to_text()
        '0 20\n20 30\n'
        """
        return b"".join(self.text_blocks()).decode()

    def text_blocks(self) -> Iterator[bytes]:
        """Yield the text in pieces of many lines, so that memory stays small for any number of records."""
        for start in range(0, len(self), _LINES_AT_ONCE):
            yield _lines([column[start : start + _LINES_AT_ONCE] for column in self._columns()])

    def to_bytes(self) -> bytes:
        """Return them as numbers, a tenth of the work of text: how many columns there are, then each."""
        columns = self._columns()
        return b"".join([np.uint64(len(columns)).tobytes(), *(column.tobytes() for column in columns)])

    @staticmethod
    def from_bytes(content: bytes) -> Offsets:
        """Return the offsets of `to_bytes`; raise `ValueError` for anything else."""
        numbers = np.frombuffer(content, np.uint64)
        if numbers[:1].tolist() not in ([2], [3]):
            raise ValueError("not offsets")
        return Offsets(*numbers[1:].reshape(int(numbers[0]), -1))

    @staticmethod
    def from_text(text: str) -> Offsets:
        r"""Parse the text written by `to_text`.

        Raises:
            CorruptDataError: the lines do not all have two numbers, or all three, separated by single spaces.

        >>> Offsets.from_text("0 20\n20 30\n").size.tolist()
        [20, 30]
        """
        if not text:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        num_columns = text.partition("\n")[0].count(" ") + 1
        if num_columns not in (2, 3) or not _is_table(text, num_columns):
            number, line = _first_bad_line(text, num_columns)
            raise CorruptDataError(
                f"line {number} of the record index is {line!r}; want 'OFFSET SIZE' or, for compressed shards, "
                f"'OFFSET SIZE SKIP' in every line; remove the shard and run the job again"
            )
        numbers = np.fromstring(text, np.uint64, sep=" ").reshape(-1, num_columns)
        return Offsets(*(np.ascontiguousarray(column) for column in numbers.T))

    def _columns(self) -> tuple[NDArray[np.uint64], ...]:
        return (self.offset, self.size) if self.skip is None else (self.offset, self.size, self.skip)


def _lines(columns: Sequence[NDArray[np.uint64]]) -> bytes:
    """Return a line of numbers for each row: digits of all columns at once, in a third of the time of formatting."""
    widths = [len(str(column.max())) for column in columns]
    text = np.full((len(columns[0]), sum(widths) + len(widths)), ord(" "), np.uint8)
    text[:, -1] = ord("\n")
    is_kept = np.ones(text.shape, bool)
    end = 0
    for column, width in zip(columns, widths, strict=True):
        left = column
        for place in reversed(range(end, end + width)):
            is_kept[:, place] = left > 0  # no leading zeros
            rest = left // np.uint64(10)
            text[:, place] = left - rest * np.uint64(10) + np.uint64(ord("0"))
            left = rest
        end += width + 1
        is_kept[:, end - 2] = True
    return text[is_kept].tobytes()


def _is_table(text: str, num_columns: int) -> bool:
    """Return True if every line is `num_columns` runs of digits, separated by single spaces, and ends in a newline."""
    try:
        raw = np.frombuffer(text.encode("ascii"), np.uint8)
    except UnicodeEncodeError:
        return False
    is_digit = (raw >= ord("0")) & (raw <= ord("9"))
    ends = np.flatnonzero(~is_digit)
    separators = raw[ends]
    if len(ends) % num_columns or raw[-1] != ord("\n") or (np.diff(ends, prepend=-1) < 2).any():
        return False
    expected = np.array([ord(" ")] * (num_columns - 1) + [ord("\n")], np.uint8)
    # 20 digits hold every uint64, but not every 20 digits are one: 19 do for files of eight exabytes.
    return bool((separators.reshape(-1, num_columns) == expected).all() and np.diff(ends, prepend=-1).max() <= 20)


def _first_bad_line(text: str, num_columns: int) -> tuple[int, str]:
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        is_last = number == len(lines)
        if num_columns not in (2, 3) or is_last or not _is_table(line + "\n", num_columns):
            return number, line[:80]
    raise AssertionError("the text has no bad line")
