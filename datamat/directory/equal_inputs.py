"""Find equal inputs in different splits, by the digests of input files in `_index/`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from datamat.directory.index_files import DIGEST, SIZE, read_index
from datamat.directory.manifest import index_file
from datamat.errors import CorruptDataError, OutputError
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping, Sequence

_MOST_COMPARED = 20_000_000  # rows, of 40 bytes each
_MOST_NAMED = 3
_LARGEST = np.dtype([("split", "i4"), ("row", "i8"), ("field", "i4"), ("size", "i8"), ("digest", "<u8", 2)])


@frozen()
class EqualInputs:
    """Rows that share their input with a row in another split: a model would be tested on training data.

    Attributes:
        num_rows: number of such rows, in all splits.
        first: the first few inputs, each as row keys by split.
    """

    num_rows: int = 0
    first: tuple[Mapping[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.num_rows > 0

    def __str__(self) -> str:
        named = ", ".join(" = ".join(f"{split} {key!r}" for split, key in keys.items()) for keys in self.first)
        more = ", ..." if self.num_rows > sum(map(len, self.first)) else ""
        rows = "row has" if self.num_rows == 1 else "rows have"
        return f"{self.num_rows:,} {rows} the same input file as a row of another split ({named}{more})"


def equal_inputs(folder: pathlib.Path, splits: Iterable[str]) -> EqualInputs:
    """Compare the input files of different splits by their digests in the index.

    For a row with several files the largest counts: many masks are equal, but pictures should not be. A file shared by
    several rows of a split is a container of samples, whose digest does not show whether they are equal.

    Returns:
        None if the index cannot be read, which `verify` reports, or is too large to compare.
    """
    with contextlib.suppress(CorruptDataError, OutputError, KeyError, ValueError, TypeError):  # damaged files
        return _compared(folder, list(splits))
    return EqualInputs()


def _compared(folder: pathlib.Path, names: Sequence[str]) -> EqualInputs:
    found = [_largest_inputs(folder, name) for name in names] if len(names) > 1 else []
    rows = np.concatenate([np.zeros(0, _LARGEST), *found])
    rows["split"] = np.repeat(np.arange(len(found)), [len(each) for each in found])
    rows = rows[rows["size"] > 0]
    if len(rows) > _MOST_COMPARED:
        return EqualInputs()
    half = np.ascontiguousarray(rows["digest"][:, 0])
    order = np.argsort(half)
    again = half[order[1:]] == half[order[:-1]]
    rows = rows[order[np.append(again, False) | np.append(False, again)]] if len(rows) else rows
    if not len(rows):
        return EqualInputs()
    is_new = np.concatenate([[True], (rows["digest"][1:] != rows["digest"][:-1]).any(1)])
    starts = np.flatnonzero(is_new)
    mixed = np.minimum.reduceat(rows["split"], starts) != np.maximum.reduceat(rows["split"], starts)
    rows = rows[np.repeat(mixed, np.diff(np.append(starts, len(rows))))]
    if not len(rows):
        return EqualInputs()
    return _named(folder, names, rows)


def _largest_inputs(folder: pathlib.Path, split: str) -> np.ndarray:
    """Return size and digest of the largest input file of each row; size 0 if there is none."""
    table = read_index(folder, index_file(split), lambda name: name.endswith((SIZE, DIGEST)))
    found = np.zeros(len(table), _LARGEST)
    found["row"] = np.arange(len(table))
    for number, name in enumerate(name for name in table.column_names if name.endswith(DIGEST)):
        digests, sizes = (table[f"{name.removesuffix(DIGEST)}{ending}"].combine_chunks() for ending in (DIGEST, SIZE))
        # From the buffers: `pyarrow.compute`, which finds nulls, takes 0.2 s to import.
        valid, values = sizes.buffers()
        size = np.frombuffer(values, "<i8", len(table))
        digest = np.frombuffer(digests.buffers()[1], "<u8", 2 * len(table)).reshape(-1, 2)
        is_larger = (size > found["size"]) & ((digest[:, 0] | digest[:, 1]) != 0)
        if valid is not None:
            is_larger &= np.unpackbits(np.frombuffer(valid, np.uint8), count=len(table), bitorder="little").view(bool)
        for column, values in (("field", number), ("size", size[is_larger]), ("digest", digest[is_larger])):
            found[column][is_larger] = values
    return found


def _named(folder: pathlib.Path, splits: Sequence[str], rows: np.ndarray) -> EqualInputs:
    """Return the equal inputs among rows of `_LARGEST`, grouped by digest."""
    tables = {}
    for code in np.unique(rows["split"]).tolist():
        table = read_index(folder, index_file(splits[code]))
        columns = [name.removesuffix(DIGEST) for name in table.column_names if name.endswith(DIGEST)]
        tables[code] = table["key"], [table[name] for name in columns]
    groups: dict[tuple[int, ...], list[tuple[int, str, str]]] = {}
    for code, row, field, _, digest in rows.tolist():
        keys, paths = tables[code]
        groups.setdefault(tuple(digest), []).append((code, keys[row].as_py(), str(paths[field][row].as_py())))
    equal = sorted(
        sorted(group) for group in groups.values() if len({(code, path) for code, _, path in group}) == len(group)
    )
    first = [{splits[code]: key for code, key, _ in reversed(group)} for group in equal[:_MOST_NAMED]]
    ordered = ({split: keys[split] for split in splits if split in keys} for keys in first)
    return EqualInputs(sum(map(len, equal)), tuple(ordered))
