"""Keys of rows and records, and names of shards: formatting, parsing, hashing and look-up.

KEY                   a row, and its record if it was stored untransformed
KEY#COPY              a record that is one of several copies, or was drawn by a transform
KEY#COPY-NUMBER       a record if the transform gave several for one copy
NAME-SPLIT-XXXXX-of-YYYYY      a shard: dataset, split, number of the shard, and number of shards in the split
"""

from __future__ import annotations

import contextlib
import functools
import re
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import OptionError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


# ---------------------------------------------------------------- names of datasets, splits and shards
#
# They become file names, and manifests come from untrusted places: nothing in a name may lead elsewhere.


DATASET_NAME = re.compile(r"\w+(?:-\w+)*\Z")
SPLIT_NAME = re.compile(r"\w+\Z")  # Hugging Face and TFDS accept word characters only
_SHARD = r"(\w+(?:-\w+)*)-(\w+)-(\d{5})-of-(\d{5})"
_SHARD_NAME = re.compile(rf"{_SHARD}\Z")
_SHARD_FILE = re.compile(rf"{_SHARD}(?:\.\w+)+\Z")


@frozen()
class ShardName:
    """The name of a shard, with which the names of its files begin: NAME-SPLIT-XXXXX-of-YYYYY.

    Attributes:
        dataset: name of the dataset.
        split: name of the split.
        number: number of the shard in the split, from 0.
        count: number of shards of the split.

    Example:
        >>> str(ShardName("camvid", "train", 3, 8))
        'camvid-train-00003-of-00008'
        >>> ShardName.parse("camvid-train-00003-of-00008").short
        'train-00003'
    """

    dataset: str
    split: str
    number: int
    count: int

    @classmethod
    def parse(cls, name: str) -> ShardName:
        """Return the parts of a shard's name; raise `ValueError` for other names."""
        found = _SHARD_NAME.match(name)
        if not found:
            raise ValueError(f"{name!r} is not the name of a shard; want NAME-SPLIT-XXXXX-of-YYYYY")
        return cls(found[1], found[2], int(found[3]), int(found[4]))

    def __str__(self) -> str:
        return f"{self.dataset}-{self.split}-{self.number:05d}-of-{self.count:05d}"

    @property
    def short(self) -> str:
        """The name within the dataset: SPLIT-XXXXX."""
        return f"{self.split}-{self.number:05d}"


def is_shard_file(name: str) -> bool:
    """Return True if a file name is a shard's name and an extension."""
    return bool(_SHARD_FILE.match(name))


# ---------------------------------------------------------------- keys of records


# Keys become names of files and archive members: no separators, copy marks, control characters or `..`, and not empty.
# Such characters in a user's key are escaped as in a URL. One search over many keys, joined by newlines, tests all.
_BAD_KEY = re.compile(r"[/\\#\x00-\x09\x0b-\x1f\x7f]|\.\.|(?:\A|\n)(?:\n|\Z)")
_ESCAPE = r"%([01][0-9A-F]|2[35EF]|5C|7F)"  # of an unsafe character, or a % that seems to begin an escape
_ESCAPED = re.compile(_ESCAPE)
_UNSAFE = re.compile(rf"[/\\#\x00-\x1f\x7f]|(?<=\.)\.|%(?={_ESCAPE[1:]})")
_COPY = re.compile(r"(0|[1-9][0-9]{0,17})(?:-(0|[1-9][0-9]{0,17}))?\Z")


def safe_key(key: str) -> str:
    r"""Return the stored form of a row's key; every key has one, except the empty one and lone surrogates.

    `/`, `\`, `#`, control characters and the second dot of `..` become `%2F` and the like; most keys stay unchanged.
    Different keys have different forms; `original_key` is the inverse.

    Example:
        >>> safe_key("cats/1.png"), safe_key("50%"), original_key("cats%2F1.png")
        ('cats%2F1.png', '50%', 'cats/1.png')
    """
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", key)


def original_key(key: str) -> str:
    """Return the key of a row in its source, given the stored key; see `safe_key`.

    Args:
        key: stored key, as in `sample["key"]`; the key of a copy keeps its `#COPY`.

    Example:
        >>> original_key("cats%2F1.png#0"), original_key("a")
        ('cats/1.png#0', 'a')
    """
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), key)


def safe_keys(keys: Sequence[Any]) -> Sequence[Any]:
    """Return the stored forms of many keys; other values than strings stay unchanged."""
    if bad_key(keys) is None and not any("%" in key for key in keys):
        return keys
    return [safe_key(key) if type(key) is str else key for key in keys]


def bad_key(keys: Sequence[Any]) -> int | None:
    """Return the position of the first value that is not a valid key of a row; None if all are valid."""
    if set(map(type, keys)) == {str}:
        joined = "\n".join(keys)
        if not _BAD_KEY.search(joined) and joined.count("\n") == len(keys) - 1 and _encodes(joined):
            return None
    bad = (
        position
        for position, key in enumerate(keys)
        if type(key) is not str or "\n" in key or _BAD_KEY.search(key) or not _encodes(key)
    )
    return next(bad, None)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@frozen()
class RecordKey:
    """The key of a record: KEY, KEY#COPY or KEY#COPY-NUMBER.

    Attributes:
        row_key: key of the row that the record was made from.
        copy: number of the copy, from 0; None if the row was stored untransformed.
        number: number of the record among those that a transform gave for the copy, from 0; None if it gave one.

    Example:
        >>> RecordKey.parse("0001TP#3-1")
        RecordKey(row_key='0001TP', copy=3, number=1)
        >>> str(RecordKey("0001TP", 3))
        '0001TP#3'
    """

    row_key: str
    copy: int | None = None
    number: int | None = None

    @classmethod
    def parse(cls, key: str) -> RecordKey:
        """Return the parts of a key; raise `OptionError` for an invalid one, such as "0001TP#" or "0001TP#01"."""
        row_key, mark, suffix = key.partition("#")
        if not mark:
            return cls(row_key)
        found = _COPY.match(suffix)
        if not found:
            raise OptionError(f"record {key!r}: want KEY, KEY#COPY or KEY#COPY-NUMBER, with numbers from 0")
        return cls(row_key, int(found[1]), None if found[2] is None else int(found[2]))

    @classmethod
    def meant_by(cls, key: str) -> Iterator[RecordKey]:
        """Yield the records that a user may mean by a key: the row may be given by its stored or its source key."""
        row_key, mark, suffix = key.rpartition("#")
        for form in (key, f"{safe_key(row_key)}{mark}{suffix}", safe_key(key)):  # a source key may contain "#"
            with contextlib.suppress(OptionError):
                yield cls.parse(form)

    def __str__(self) -> str:
        return self.row_key if self.copy is None else self.format(self.row_key, self.copy, self.number)

    @staticmethod
    def format(row_key: str, copy: int, number: int | None = None) -> str:
        """Return the key of a record as text without creating a `RecordKey`, since workers do this for every record."""
        return f"{row_key}#{copy}" if number is None else f"{row_key}#{copy}-{number}"

    @staticmethod
    def row_of(key: str) -> str:
        """Return the row key of a record without creating a `RecordKey`."""
        return key.partition("#")[0]


@frozen()
class RecordNames:
    """The keys of a row's records, if each copy gives one record.

    Attributes:
        copies: records of each row.
        augmented: whether a transform applies.

    Example:
        >>> RecordNames(copies=2, augmented=True).of("a")
        ['a#0', 'a#1']
    """

    copies: int
    augmented: bool

    @property
    def are_plain(self) -> bool:
        """Whether records have the keys of their rows."""
        return self.copies == 1 and not self.augmented

    def of(self, row_key: str) -> list[str]:
        """Return the keys of a row's records, in order."""
        return [row_key] if self.are_plain else [f"{row_key}#{copy}" for copy in range(self.copies)]

    def place_of(self, key: RecordKey) -> int | None:
        """Return the position of a record among those of its row; None if the row has no such record."""
        if self.are_plain:
            return 0 if key.copy is None else None
        return key.copy if key.copy is not None and key.copy < self.copies and key.number is None else None


def stored_key(record: Mapping[str, Any]) -> str:
    """Return the key in a record's columns."""
    key = record["key"]
    return (key if isinstance(key, bytes) else bytes(key[0])).decode()


def row_runs(keys: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the rows of consecutive records: key of the row, position of its first record, number of its records.

    Args:
        keys: keys of records in order, with those of a row next to each other.

    Example:
        >>> list(row_runs(["a#0", "a#1", "b#0-0"]))
        [('a', 0, 2), ('b', 2, 1)]
    """
    first = 0
    for row_key, records in groupby(keys, key=RecordKey.row_of):
        count = sum(1 for _ in records)
        yield row_key, first, count
        first += count


def records_by_row(keys: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return the position of the first record and the number of records of each row, by key; see `row_runs`."""
    return {row_key: (first, count) for row_key, first, count in row_runs(keys)}


# ---------------------------------------------------------------- hashes and look-up


def key_hash(key: str) -> int:
    """Return the stable 64-bit hash of `key` (XXH3) that decides its split and its place in a shard."""
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogatepass"))  # of any look-up


_PIECE_ROWS = 1 << 17  # processed at a time; more would not be faster
_MOST_NARROW = 1 << 32  # up to this many rows, numbers take four bytes


def sorted_hashes(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return hashes in ascending order, and the row number of each: 12 bytes per row, 16 beyond 2**32 rows.

    Args:
        hashes: uint64 (n,), the `key_hash` of each row's key.

    Returns:
        uint64 (n,), and uint32 or uint64 (n,); rows with equal hashes stay in order.

    Example:
        >>> sorted_hashes(np.array([7, 3, 7], np.uint64))
        (array([3, 7, 7], dtype=uint64), array([1, 0, 2], dtype=uint32))
    """
    order = _order_of(hashes)
    return np.ascontiguousarray(hashes[order]), order.astype(row_type(len(hashes)))


def row_type(num_rows: int) -> np.dtype[Any]:
    """Return the dtype of row numbers for this many rows."""
    return np.dtype("<u4" if num_rows <= _MOST_NARROW else "<u8")


def packed_hashes(num_rows: int, hashes_of: Callable[[np.ndarray], np.ndarray]) -> Iterator[bytes]:
    """Yield `sorted_hashes` of the keys of rows as bytes: all hashes, then all numbers, little-endian.

    Args:
        num_rows: number of rows.
        hashes_of: returns uint64 (n,), the hashes of rows by number: memory only holds those of a piece, and all
            numbers.
    """
    order = ordered_by(hashes_of, np.arange(num_rows, dtype=row_type(num_rows)))
    for piece in pieces(num_rows):
        yield hashes_of(order[piece]).astype("<u8", copy=False).tobytes()
    for piece in pieces(num_rows):
        yield order[piece].tobytes()


def pieces(count: int) -> Iterator[slice]:
    """Yield slices of this many rows, to be processed one at a time."""
    for start in range(0, count, _PIECE_ROWS):
        yield slice(start, min(start + _PIECE_ROWS, count))


def ordered_by(values: Callable[[np.ndarray], np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return rows in ascending order of their values; the sort is stable.

    Besides the rows and their order, memory only holds a piece of them: they are first distributed by the first byte of
    their values, and then each 256th is sorted.

    Args:
        values: returns uint64 (n,), evenly distributed, for rows by number.
        rows: numbers of rows, any unsigned dtype, (n,).

    Example:
        >>> ordered_by(lambda rows: 9 - rows, np.array([1, 2, 3], np.uint32))
        array([3, 2, 1], dtype=uint32)
    """
    if len(rows) <= _PIECE_ROWS:
        return np.asarray(rows[_order_of(values(rows))])
    ends = np.cumsum(sum(np.bincount(_heads(values(rows[piece])), minlength=256) for piece in pieces(len(rows))))
    begins = np.concatenate([[0], ends[:-1]])
    found, free = np.empty_like(rows), begins.copy()
    for piece in pieces(len(rows)):
        heads = _heads(values(rows[piece]))
        counts = np.bincount(heads, minlength=256)
        targets = np.arange(len(heads)) + np.repeat(free - (np.cumsum(counts) - counts), counts)
        found[targets] = rows[piece][np.argsort(heads, kind="stable")]
        free += counts
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        here = found[begin:end]
        found[begin:end] = here[_order_of(values(here))]
    return found


def _order_of(values: np.ndarray) -> np.ndarray:
    """Return the order of values, like a stable sort, but in half the time, as equal ones are rare."""
    order = np.argsort(values)
    found = values[order]
    return np.argsort(values, kind="stable") if (found[1:] == found[:-1]).any() else order


def _heads(values: np.ndarray) -> np.ndarray:
    return np.asarray((values >> np.uint64(56)).astype(np.uint8))


class KeyLookup:
    """Finds rows by key through their sorted hashes, with 12 bytes of memory per row, whatever its key.

    Args:
        hashes: uint64 (n,), the `key_hash` of each row's key.
        keys_at: returns the keys of rows by number, to distinguish equal hashes.

    Example:
        >>> keys = ["a", "b"]
        >>> lookup = KeyLookup.of(keys)
        >>> lookup.find("b"), lookup.find("c"), lookup.find_all(["c", "a"])
        (1, None, array([-1,  0]))
    """

    def __init__(self, hashes: np.ndarray, keys_at: Callable[[Sequence[int]], Sequence[str]]) -> None:
        self._hashes, self._rows = sorted_hashes(hashes)
        self._keys_at = keys_at

    @classmethod
    def of(cls, keys: Sequence[str], keys_at: Callable[[Sequence[int]], Sequence[str]] | None = None) -> KeyLookup:
        """Return the look-up of these keys, which are kept in memory unless `keys_at` returns them."""
        hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))
        return cls(hashes, keys_at or (lambda rows: [keys[row] for row in rows]))

    def find(self, key: str) -> int | None:
        """Return the number of the first row with this key; None if there is none."""
        wanted = np.uint64(key_hash(key))
        place = int(self._hashes.searchsorted(wanted))
        while place < len(self._rows) and self._hashes[place] == wanted:
            row = int(self._rows[place])
            if self._keys_at((row,))[0] == key:
                return row
            place += 1
        return None

    def find_all(self, keys: Sequence[str]) -> np.ndarray:
        """Return int64 (n,): the number of the first row with each key; -1 if there is none."""
        found = np.full(len(keys), -1, np.int64)
        hashes = np.fromiter(map(key_hash, keys), np.uint64, len(keys))
        places = np.searchsorted(self._hashes, hashes)
        asked = np.flatnonzero(places < len(self._rows))
        asked = asked[self._hashes[places[asked]] == hashes[asked]]
        rows = self._rows[places[asked]].tolist()
        for number, row, key in zip(asked.tolist(), rows, self._keys_at(rows), strict=True):
            other = row if key == keys[number] else self.find(keys[number])
            found[number] = -1 if other is None else other
        return found


MIX64_STEPS = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def mix64(values: np.ndarray) -> np.ndarray:
    """Return uint64 values scattered over the whole range by the finalizer of splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        for shift, factor in MIX64_STEPS:
            values = (values ^ (values >> shift)) * factor
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


class KeyDigest:
    """A digest of a sequence of keys that can be combined from digests of its parts.

    The keys' 128-bit XXH3 hashes are the coefficients of a polynomial over the prime field of 2**127 - 1, evaluated at
    a fixed point: a lost, duplicated, changed or moved key changes it, and parts can be computed separately.

    Example:
        >>> whole, first, second = KeyDigest(["a", "b", "c"]), KeyDigest(["a"]), KeyDigest(["b", "c"])
        >>> (first + second).hexdigest() == whole.hexdigest()
        True
    """

    _PRIME = (1 << 127) - 1
    _POINT = 0x5851F42D4C957F2D14057B7EF767814F  # any fixed point; this is Knuth's and PCG's multiplier, joined

    __slots__ = ("count", "value")

    def __init__(self, keys: Iterable[str] = (), *, value: int = 0, count: int = 0) -> None:
        self.value = value
        self.count = count
        self.extend(keys)

    def add(self, key: str) -> None:
        """Append one key."""
        self.value = (self.value * self._POINT + xxhash.xxh3_128_intdigest(key.encode())) % self._PRIME
        self.count += 1

    def extend(self, keys: Iterable[str]) -> None:
        """Append many keys, in an eighth of the time."""
        self.extend_encoded(map(str.encode, keys))

    def extend_encoded(self, keys: Iterable[bytes]) -> None:
        """Append many keys, given as UTF-8."""
        iterator, (powers, parts) = iter(keys), _powers()
        while digests := b"".join(map(xxhash.xxh3_128_digest, islice(iterator, _KEYS_AT_ONCE))):
            hashes = np.frombuffer(digests, ">u4").reshape(-1, 4).T.astype(np.uint64)
            count = hashes.shape[1]
            run = 0
            # Products of 54 bits, 1,024 of which have a sum of 64 bits at most.
            for place, sums in enumerate(np.inner(hashes, parts[:, -count:]).tolist()):
                run += sum(number << shift for number, shift in zip(sums, _SHIFTS, strict=True)) << 32 * (3 - place)
            self.value = (self.value * powers[count] + run) % self._PRIME
            self.count += count

    def __add__(self, other: KeyDigest) -> KeyDigest:
        """Return the digest of these keys followed by the other's."""
        moved = self.value * pow(self._POINT, other.count, self._PRIME)
        return KeyDigest(value=(moved + other.value) % self._PRIME, count=self.count + other.count)

    def hexdigest(self) -> str:
        """Return 32 hex digits."""
        return f"{self.value:032x}"


_KEYS_AT_ONCE = 1024
_SHIFTS = range(0, 132, 22)


@functools.cache
def _powers() -> tuple[list[int], np.ndarray]:
    """Return the powers of the point, from that of 0 up; and all but the last in parts, uint64 (6, n).

    These go from the highest power down, 22 bits at a time, the lowest bits first.
    """
    whole = [1]
    while len(whole) <= _KEYS_AT_ONCE:
        whole.append(whole[-1] * KeyDigest._POINT % KeyDigest._PRIME)
    parts = [[power >> shift & (1 << 22) - 1 for power in reversed(whole[:-1])] for shift in _SHIFTS]
    return whole, np.array(parts, np.uint64)
