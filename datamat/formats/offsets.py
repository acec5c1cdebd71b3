"""Where the records of a file lie: the offsets that stand beside each shard, in memory and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, final

import numpy as np

from datamat.errors import CorruptDataError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["Offsets", "Place", "Places"]

Place: TypeAlias = tuple[int, int, int]
"""Offset, size and skip of one record, as `Offsets` has them; the skip is 0 where it has none."""

_LINES_AT_ONCE = 1 << 14  # Python's integers take several times the memory of the table


class Places(Protocol):
    """What a reader of single records asks: where one lies. `Offsets` tell it, and so may a file that holds them."""

    def place(self, number: int) -> Place:
        """Return the place of a record, by its number in the file; raise `CorruptDataError` where it cannot be told."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """Where each record of one file lies: the content of its `.idx` file.

    Args:
        offset: uint64 (n,), the first byte of the range that must be read for the record.
        size: uint64 (n,), the bytes of that range, framing included.
        skip: uint64 (n,), for compressed formats where the range is a compressed member: the position of the record
            inside the member once it is decompressed. None where the range is the record itself.
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
        if not len(self) and not len(other):  # without records nothing says whether there is a skip
            return True
        return len(mine) == len(others) and all(map(np.array_equal, mine, others))

    __hash__ = None  # type: ignore[assignment]  # arrays decide equality, and arrays have no hash

    def place(self, number: int) -> Place:
        """Return offset, size and skip of one record."""
        skip = 0 if self.skip is None else int(self.skip[number])
        return int(self.offset[number]), int(self.size[number]), skip

    def shifted(self, base: int) -> Offsets:
        """Return the offsets of the same records when the file starts `base` bytes into a longer one."""
        return Offsets(self.offset + np.uint64(base), self.size, self.skip)

    @staticmethod
    def joined(parts: Iterable[tuple[Offsets, int]]) -> Offsets:
        """Return the offsets inside the file made of several files, one after the other.

        Args:
            parts: for each file, its offsets and its length in bytes.

        >>> one = Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64))
        >>> Offsets.joined([(one, 50), (one, 50)]).offset.tolist()
        [0, 20, 50, 70]
        """
        base, shifted = 0, []
        for offsets, num_bytes in parts:
            if len(offsets):  # an empty part has no say in whether there is a skip column
                shifted.append(offsets.shifted(base)._columns())
            base += num_bytes
        if not shifted:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        return Offsets(*(np.concatenate(column) for column in zip(*shifted, strict=True)))

    def to_text(self) -> str:
        r"""Return the index file: a line `OFFSET SIZE` per record, `MEMBER_OFFSET MEMBER_SIZE SKIP` with a skip.

        The two-column form is what NVIDIA DALI reads, byte for byte what its `tfrecord2idx` writes
        (https://github.com/NVIDIA/DALI/blob/main/tools/tfrecord2idx).

        >>> Offsets(np.array([0, 20], np.uint64), np.array([20, 30], np.uint64)).to_text()
        '0 20\n20 30\n'
        """
        table = np.column_stack(self._columns())
        line = " ".join(["%d"] * table.shape[1]) + "\n"
        # One format call over many numbers takes half the time of a call per line (measured: 0.15 us per record).
        blocks = (table[start : start + _LINES_AT_ONCE] for start in range(0, len(table), _LINES_AT_ONCE))
        return "".join(line * len(block) % tuple(block.ravel().tolist()) for block in blocks)

    @staticmethod
    def from_text(text: str) -> Offsets:
        r"""Read back what `to_text` wrote.

        Raises:
            CorruptDataError: a line is not two, or throughout three, numbers with one space between them.

        >>> Offsets.from_text("0 20\n20 30\n").size.tolist()
        [20, 30]
        """
        if not text:
            return Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64))
        num_columns = text.partition("\n")[0].count(" ") + 1
        if num_columns not in (2, 3) or not _is_table(text, num_columns):
            number, line = _first_bad_line(text, num_columns)
            raise CorruptDataError(
                f"line {number} of the record index is {line!r}, expected 'OFFSET SIZE' or, for compressed shards, "
                f"'OFFSET SIZE SKIP' in every line; remove the shard and run the job again"
            )
        numbers = np.fromstring(text, np.uint64, sep=" ").reshape(-1, num_columns)
        return Offsets(*(np.ascontiguousarray(column) for column in numbers.T))

    def _columns(self) -> tuple[NDArray[np.uint64], ...]:
        return (self.offset, self.size) if self.skip is None else (self.offset, self.size, self.skip)


def _is_table(text: str, num_columns: int) -> bool:
    """Whether every line is `num_columns` runs of digits with single spaces between, and ends in a newline."""
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
