"""Statistics of the values of a field: counts and numbers that are added up exactly, in any order.

    worker   a part: `observe` of each field ── Counts, Numbers, int ──> lines of text in the receipt
    driver   parts of a shard, added ──────────────────────────────────> the same lines in the shard's entry
    reader   shards of a split, added ── summarized ───────────────────> means, deviations, counts by class name

Sums are exact: integers, in a unit of which every float64 is a multiple. So the lines are the same, byte for byte,
however records were divided into parts, whichever worker made them, and whether a run was killed and resumed. Rounded
sums would differ: the number of records of a part that are observed together depends on what its process has done
before, and a conversion or another number of shards adds the same records in other groups.
"""

from __future__ import annotations

import functools
import math
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import xxhash

from datamat.errors import CorruptDataError

_UNIT_BITS = 1074
"""Every finite float64 is a multiple of 2**-1074."""
_SMALL = 1 << 31
"""Integers below this have squares within int64."""
_LARGEST = 1e150
"""Floats above have no finite square; they count as not finite."""
_MANY_IDS = 1 << 16
_MOST_ADDED = 1 << 14  # numbers at once: they stay in cache, which makes sums of floats twice as fast
_LEAST_RUN = 8
"""Mean length of runs of one class id above which runs are counted instead of pixels."""
_MOST_IN_WORDS = 4
_MOST_IDS = 1024
"""Maximum number of different class ids to count; more would fill manifests of many shards."""
_SUM = re.compile(r"(-?[0-9]{1,2000})(?:/([0-9]{1,324}))?")
_MOST_BIN = 1100


@final
class Counts:
    """Counts of class ids, up to 1,024 different ids; beyond that, nothing is counted.

    Args:
        counts: number of occurrences of each id.

    Attributes:
        counts: number of occurrences of each id; empty if there are more than 1,024 ids.
        is_full: whether there are more. This depends only on the ids, not on their order.

    Example:
        >>> seen = Counts.of(np.array([1, 1, 0], np.int64))
        >>> seen.add(Counts.of(np.array([1])))
        >>> seen
        Counts({0: 1, 1: 3})
    """

    __slots__ = ("counts", "is_full")

    def __init__(self, counts: Mapping[int, int] | None = None, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self._set(counts or {})

    @classmethod
    def of(cls, ids: np.ndarray) -> Counts:
        """Return the counts of ids: non-negative integers of any shape."""
        flat = ids.reshape(-1)
        if flat.size > _MANY_IDS:
            ends = np.flatnonzero(flat[1:] != flat[:-1])
            if len(ends) < len(flat) // _LEAST_RUN:  # as in masks: a quarter of the time
                ends = np.append(ends, len(flat) - 1)
                return cls._of_counted(np.bincount(flat[ends], np.diff(ends, prepend=-1)).astype(np.int64))
            if flat.dtype == np.uint8 and not flat.size % 2 and flat.flags.c_contiguous:
                both = np.bincount(flat.view(np.uint16), minlength=1 << 16).reshape(256, 256)
                return cls._of_counted(both.sum(axis=0) + both.sum(axis=1))
        if len(flat) > 16 and int(flat.max()) < max(4 * len(flat), _MANY_IDS):
            return cls._of_counted(np.bincount(flat))
        values, times = np.unique(flat, return_counts=True)
        return cls(dict(zip(values.tolist(), times.tolist(), strict=True)))

    @classmethod
    def _of_counted(cls, found: np.ndarray) -> Counts:
        """Return the counts of ids, given the number of occurrences of each, from 0."""
        places = np.flatnonzero(found)
        return cls(dict(zip(places.tolist(), found[places].tolist(), strict=True)))

    def add(self, other: Counts) -> None:
        """Add the counts of other values."""
        counts = dict(self.counts)
        for one, number in other.counts.items():
            counts[one] = counts.get(one, 0) + number
        self.is_full |= other.is_full
        self._set(counts)

    def _set(self, counts: Mapping[int, int]) -> None:
        self.is_full |= len(counts) > _MOST_IDS
        self.counts: dict[int, int] = {} if self.is_full else dict(sorted(counts.items()))

    def copy(self) -> Counts:
        """Return an independent copy."""
        return Counts(self.counts, is_full=self.is_full)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and self.to_text() == other.to_text()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Counts({self.counts})"

    def to_text(self) -> str:
        """Return the counts as one word: ID:NUMBER, separated by commas; "+" for too many ids."""
        return "+" if self.is_full else _pairs_to_text(self.counts)

    @classmethod
    def from_text(cls, words: Sequence[str]) -> Counts:
        """Return the counts written by `to_text`."""
        (word,) = words
        return cls(is_full=True) if word == "+" else cls(_pairs_from_text(word))

    def summary(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Return the counts by class name, or by id, as text, for ids without a name. Counts of named classes may be 0.

        {} for too many ids.
        """
        if self.is_full:
            return {}
        names = names or ()
        left = {str(one): number for one, number in self.counts.items() if one >= len(names)}
        return {**{name: self.counts.get(one, 0) for one, name in enumerate(names)}, **left}


@final
class Numbers:
    """Count, minimum, maximum, exact sum and exact sum of squares of numbers.

    Attributes:
        count: number of finite numbers.
        least, most: the smallest and the largest; 0 if there are none.
        total: their sum, in units of 2**-1074.
        squares: the sum of their squares, in the same units; those of floats are rounded to float64 one by one.
        bins: number in each bin: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, ...; empty unless requested.
        num_others: number that are NaN, infinite, or beyond 1e150.

    Example:
        >>> numbers = Numbers.of(np.array([1.0, 2.0, 4.0]))
        >>> numbers.summary()["mean"]
        2.3333333333333335
    """

    __slots__ = ("bins", "count", "least", "most", "num_others", "squares", "total")

    def __init__(self) -> None:
        self.count = self.num_others = 0
        self.least: int | float = 0
        self.most: int | float = 0
        self.total = self.squares = 0
        self.bins: dict[int, int] = {}

    @classmethod
    def of(cls, numbers: np.ndarray, *, with_bins: bool = False) -> Numbers:
        """Return the statistics of some numbers.

        Args:
            numbers: integers, booleans or floats of any shape.
            with_bins: whether to count them by powers of two: for non-negative integers such as lengths.
        """
        found = cls()
        flat = numbers.reshape(-1)
        if flat.dtype.kind not in "iub":
            flat = flat.astype(np.float64, copy=False)
            is_in = np.abs(flat) <= _LARGEST  # False for NaN
            if not is_in.all():
                found.num_others = int(len(flat) - np.count_nonzero(is_in))
                flat = flat[is_in]
        elif flat.dtype.kind == "b":
            flat = flat.view(np.uint8)
        found.count = len(flat)
        if not found.count:
            return found
        found.least, found.most = flat.min().item() + 0, flat.max().item() + 0  # 0.0 instead of -0.0
        for start in range(0, len(flat), _MOST_ADDED):
            found._add_sums(flat[start : start + _MOST_ADDED])
        if with_bins:
            places = np.bincount(np.frexp(flat.astype(np.float64))[1])
            found.bins = {place: number for place, number in enumerate(places.tolist()) if number}
        return found

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> list[Numbers]:
        """Return what `of` does for each row of (k, n) numbers, many rows at once where they are of a usual size."""
        width = rows.shape[1]
        if not 0 < width <= _MOST_ADDED:
            return [cls.of(row) for row in rows]
        if len(rows) > (step := max(_MOST_ADDED // width, 1)):
            return [one for start in range(0, len(rows), step) for one in cls.of_rows(rows[start : start + step])]
        if rows.dtype.kind in "iub":
            if int(rows.min()) <= -_SMALL or int(rows.max()) >= _SMALL:
                return [cls.of(row) for row in rows]
            numbers = rows.astype(np.int64)
            totals = [one << _UNIT_BITS for one in numbers.sum(axis=1).tolist()]
            squares = _exact_int_sums(numbers * numbers)
        else:
            numbers = rows.astype(np.float64)
            if not (np.abs(numbers) <= _LARGEST).all():  # False for NaN
                return [cls.of(row) for row in rows]
            totals, squares = _exact_sums(numbers), _exact_sums(numbers * numbers)
        made = []
        bounds = zip((numbers.min(axis=1) + 0).tolist(), (numbers.max(axis=1) + 0).tolist(), strict=True)
        for (least, most), total, square in zip(bounds, totals, squares, strict=True):
            one = cls()
            one.count, one.least, one.most, one.total, one.squares = width, least, most, total, square
            made.append(one)
        return made

    def _add_sums(self, flat: np.ndarray) -> None:
        """Add up to 16,384 numbers; the contribution of each is independent of the others."""
        if flat.dtype.kind == "f":
            (total,), (squares,) = _exact_sums(flat[None]), _exact_sums((flat * flat)[None])
            self.total += total
            self.squares += squares
        elif self.least > -_SMALL and self.most < _SMALL:
            numbers = flat.astype(np.int64, copy=False)
            self.total += int(numbers.sum()) << _UNIT_BITS
            self.squares += _exact_int_sums((numbers * numbers)[None])[0]
        else:
            numbers = flat.tolist()
            self.total += sum(numbers) << _UNIT_BITS
            self.squares += sum(one * one for one in numbers) << _UNIT_BITS

    def add(self, other: Numbers) -> None:
        """Add the statistics of other numbers."""
        if other.count:
            self.least = min(self.least, other.least) if self.count else other.least
            self.most = max(self.most, other.most) if self.count else other.most
        self.count += other.count
        self.num_others += other.num_others
        self.total += other.total
        self.squares += other.squares
        for place, number in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + number

    def copy(self) -> Numbers:
        """Return an independent copy."""
        found = Numbers()
        for name in self.__slots__:
            setattr(found, name, getattr(self, name))
        found.bins = dict(self.bins)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.to_text() == other.to_text()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Numbers({self.summary()})"

    def to_text(self) -> str:
        """Return it as words: count, minimum, maximum, sum, sum of squares, bins, and count of non-finite numbers."""
        sums = f"{self.count} {self.least!r} {self.most!r} {_sum_to_text(self.total)} {_sum_to_text(self.squares)}"
        return f"{sums} {_pairs_to_text(dict(sorted(self.bins.items())))} {self.num_others}"

    @classmethod
    def from_text(cls, words: Sequence[str]) -> Numbers:
        """Return the numbers written by `to_text`."""
        count, least, most, total, squares, bins, others = words
        found = cls()
        found.count, found.num_others = int(count), int(others)
        found.least, found.most = _number(least), _number(most)
        found.total, found.squares = _sum_from_text(total), _sum_from_text(squares)
        found.bins = _pairs_from_text(bins)
        if any(not 0 <= place <= _MOST_BIN for place in found.bins):
            raise ValueError("no bin")
        return found

    @property
    def mean(self) -> float:
        """Their mean; NaN if there are none."""
        return self.total / (self.count << _UNIT_BITS) if self.count else math.nan

    @property
    def std(self) -> float:
        """Their standard deviation, with n rather than n - 1; NaN if there are none."""
        if not self.count:
            return math.nan
        if self.least == self.most:
            return 0.0
        variance = (self.squares * self.count << _UNIT_BITS) - self.total**2  # times the square of count and unit
        return math.sqrt(max(variance / (self.count << _UNIT_BITS) ** 2, 0.0))

    def summary(self) -> dict[str, Any]:
        """Return count, min, max, mean and std; and, if present, `histogram` by powers of two and `not_finite`."""
        found: dict[str, Any] = {"count": self.count}
        if self.count:
            found |= {"min": self.least, "max": self.most, "mean": self.mean, "std": self.std}
        if self.bins:
            found["histogram"] = {_bin_name(place): number for place, number in sorted(self.bins.items())}
        if self.num_others:
            found["not_finite"] = self.num_others
        return found


Observed: TypeAlias = Counts | Numbers | int
"""A statistic of some values: counts of classes, numbers, or an int to add up."""

FieldStatistics: TypeAlias = dict[str, Observed]
"""The statistics of a field, by name."""


def _exact_int_sums(squares: np.ndarray) -> list[int]:
    """Return the sum of each row of (k, n) integers from 0 to 2**62, n at most 16,384, in units of 2**-1074."""
    upper, lower = (squares >> 32).sum(axis=1).tolist(), (squares & 0xFFFFFFFF).sum(axis=1).tolist()
    return [(high << 32) + low << _UNIT_BITS for high, low in zip(upper, lower, strict=True)]


def _exact_sums(numbers: np.ndarray) -> list[int]:
    """Return the exact sum of each row of (k, n) finite float64 numbers, n at most 16,384, in units of 2**-1074.

    A pass takes the upper 38 bits of all numbers, counted from the largest, and leaves the lower ones to the next: to
    add and subtract a number 2**14 times as large rounds to multiples of 2**-52 of it (Rump, Ogita and Oishi, "Accurate
    floating-point summation", 2008). 2**14 numbers of 38 bits add up without rounding.
    """
    totals = [0] * len(numbers)
    while (most := np.abs(numbers).max(axis=1)).any():
        large = np.ldexp(1.5, np.frexp(most)[1] + 14)[:, None]
        upper = numbers + large
        upper -= large
        numbers = numbers - upper
        for row, one in enumerate(upper.sum(axis=1).tolist()):
            numerator, denominator = one.as_integer_ratio()  # a power of two
            totals[row] += numerator << _UNIT_BITS + 1 - denominator.bit_length()
    return totals


def _sum_to_text(total: int) -> str:
    """Return a sum as an integer or a fraction in lowest terms."""
    bits = min((total & -total).bit_length() - 1, _UNIT_BITS) if total else _UNIT_BITS
    return f"{total >> bits}" + (f"/{1 << _UNIT_BITS - bits}" if bits < _UNIT_BITS else "")


def _sum_from_text(text: str) -> int:
    found = _SUM.fullmatch(text)  # other numbers may exhaust the memory
    if not found:
        raise ValueError("no sum")
    total, rest = divmod(int(found[1]) << _UNIT_BITS, int(found[2] or 1))
    if rest:
        raise ValueError("no sum of float64 numbers")
    return total


def _number(word: str) -> int | float:
    return int(word) if word.lstrip("-").isdigit() else float(word)


def _pairs_to_text(pairs: Mapping[int, int]) -> str:
    return ",".join(f"{one}:{number}" for one, number in pairs.items()) or "-"


def _pairs_from_text(word: str) -> dict[int, int]:
    pairs = [] if word == "-" else [pair.split(":") for pair in word.split(",")]
    return {int(one): int(number) for one, number in pairs}


def _bin_name(place: int) -> str:
    low, high = (1 << place >> 1), (1 << place) - 1
    return str(high) if low >= high else f"{low}-{high}"


def merged(into: FieldStatistics, other: Mapping[str, Observed]) -> FieldStatistics:
    """Add the statistics of other values of a field to `into`, and return it."""
    for name, found in other.items():
        mine = into.get(name)
        if mine is None:
            into[name] = found if isinstance(found, int) else found.copy()
        elif isinstance(found, int):
            into[name] = mine + found  # type: ignore[operator]  # both are
        else:
            mine.add(found)  # type: ignore[union-attr,arg-type]  # same class, from the same feature
    return into


@final
class Statistics:
    """The statistics of all fields of some records.

    Attributes:
        num_records: number of records.
        fields: statistics of each field.
    """

    __slots__ = ("fields", "num_records")

    def __init__(self) -> None:
        self.num_records = 0
        self.fields: dict[str, FieldStatistics] = {}

    def observe(self, name: str, found: Mapping[str, Observed]) -> None:
        """Add the statistics of more values of a field."""
        merged(self.fields.setdefault(name, {}), found)

    def add(self, other: Statistics) -> Statistics:
        """Add the statistics of other records, and return these."""
        self.num_records += other.num_records
        for name, found in other.fields.items():
            self.observe(name, found)
        return self

    def to_lines(self) -> tuple[str, ...]:
        """Return lines of text, in a fixed order: records and digest, then one line per statistic."""
        lines = [
            f"{_KINDS[type(found)]} {_quoted(field)} {_quoted(name)} {_text_of(found)}"
            for field, known in sorted(self.fields.items())
            for name, found in sorted(known.items())
        ]
        return (f"records {self.num_records} {_digest_of(self.num_records, lines)}", *lines)

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Statistics | None:
        """Return the statistics written by `to_lines`; None for no lines, which means unknown.

        Raises:
            CorruptDataError: the lines are damaged.
        """
        lines = list(lines)
        if not lines:
            return None
        check_lines(lines)
        found = cls()
        found.num_records = int(lines[0].split(" ")[1])
        for line in lines[1:]:
            try:
                kind, field, name, *rest = line.split(" ")
                known = found.fields.setdefault(urllib.parse.unquote(field), {})
                known[urllib.parse.unquote(name)] = _READERS[kind](rest)
            except (ValueError, KeyError, ZeroDivisionError) as error:
                raise CorruptDataError(f"statistics {line[:80]!r}: {error!r}; datamat did not write them") from error
        return found

    @classmethod
    def total(cls, each: Iterable[Sequence[str]]) -> Statistics | None:
        """Return the combined statistics of several sets of lines; None if one of them is unknown."""
        found = cls()
        for lines in each:
            other = cls.from_lines(lines)
            if other is None:
                return None
            found.add(other)
        return found


def shared_bounds(each: Iterable[Sequence[str]], names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Return the statistics whose value is the same in all records, by field and statistic.

    Args:
        each: lines of the statistics of several sets of records, of which only the named ones are parsed.
        names: field and name of each statistic that counts integers.
    """
    wanted = {f"numbers {_quoted(field)} {_quoted(name)} ": (field, name) for field, name in names}
    found: dict[str, set[str]] = {start: set() for start in wanted}
    for lines in each:
        if not found:
            break
        known = {
            start: line[len(start) :].split(" ")[1:3] for line in lines for start in found if line.startswith(start)
        }
        is_empty = lines[:1] and lines[0].startswith("records 0 ")
        found = {start: one | {*known.get(start, ())} for start, one in found.items() if start in known or is_empty}
        found = {start: one for start, one in found.items() if len(one) < 2}
    return {wanted[start]: int(number) for start, one in found.items() for number in one}


def check_lines(lines: Sequence[str]) -> None:
    """Raise `CorruptDataError` if lines of statistics are damaged; no lines are valid."""
    if not lines:
        return
    kind, _, rest = lines[0].partition(" ")
    number, _, digest = rest.partition(" ")
    if kind != "records" or not number.isdecimal() or digest != _digest_of(int(number), lines[1:]):
        raise CorruptDataError(f"statistics {lines[0][:80]!r}: the lines below it do not have this digest")


def _digest_of(num_records: int, lines: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join([str(num_records), *lines]).encode())


@functools.lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    """Return a name without spaces and braces."""
    return urllib.parse.quote(name, safe="/_-.[]")


def _text_of(found: Observed) -> str:
    return str(found) if isinstance(found, int) else found.to_text()


_KINDS: dict[type, str] = {Counts: "counts", Numbers: "numbers", int: "number"}
_READERS: dict[str, Any] = {
    "counts": Counts.from_text,
    "numbers": Numbers.from_text,
    "number": lambda words: int(words[0]),
}


def summarized(found: Mapping[str, Observed], class_names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the statistics of a field as JSON values.

    Counts are by class name, numbers as in `Numbers.summary`. Statistics whose names differ only in a number, such as
    `channels[0]`, become one with lists: `{"channels": {"mean": [...], "std": [...], ...}}`.
    """
    summary: dict[str, Any] = {}
    for name, one in sorted(found.items()):
        family, _, number = name.removesuffix("]").partition("[")
        if isinstance(one, Counts):
            summary[name] = one.summary(class_names)
        elif isinstance(one, int):
            summary[name] = one
        elif number.isdigit() and name.endswith("]"):
            for key, value in one.summary().items():
                summary.setdefault(family, {}).setdefault(key, []).append(value)
        else:
            summary[name] = one.summary()
    return summary


def summarized_in_words(summary: Mapping[str, Any]) -> str:
    """Return the statistics of a field in one line.

    Args:
        summary: result of `summarized`.

    Example:
        >>> summarized_in_words({"classes": {"cat": 3, "dog": 1}, "missing": 2})
        'classes: cat 3, dog 1; missing: 2'
    """
    return "; ".join(f"{name}: {_in_words(value)}" for name, value in summary.items())


def _in_words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return _round(value)
    if not value:
        return "more than 1,024 classes, not counted"
    if "count" not in value or set(value) - _SUMMARY:
        most = sorted(value.items(), key=lambda item: -item[1])
        more = f" and {len(most) - _MOST_IN_WORDS:,} more" if len(most) > _MOST_IN_WORDS else ""
        return ", ".join(f"{name} {number:,}" for name, number in most[:_MOST_IN_WORDS]) + more
    others = f", {_round(value['not_finite'])} not finite" if "not_finite" in value else ""
    if "min" not in value:
        return f"none{others}"
    if value["min"] == value["max"]:
        return f"{_round(value['min'])}{others}"
    return (
        f"{_round(value['min'])} to {_round(value['max'])}, mean {_round(value['mean'])}, std {_round(value['std'])}"
        f"{others}"
    )


_SUMMARY = {"count", "min", "max", "mean", "std", "histogram", "not_finite"}


def _round(value: Any) -> str:
    if isinstance(value, list):
        return f"({', '.join(map(_round, value))})"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
