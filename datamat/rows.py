"""The index on disk, by columns, so that a worker reads its own rows and nobody holds them all.

`RowStore` maps the files that `row_writer` wrote into memory: row i of any column is two offsets away. What is kept per
row in the driver while it plans are a few integers.

    rows.json                   number of rows, source, splits, fields
    key.text key.ends           UTF-8 of all keys; where each ends (uint64)
    FIELD.text FIELD.ends       a field of strings; FIELD.numbers: one of int64 or float64
    FIELD.size FIELD.mtime      of input files: bytes and nanoseconds (int64)
    split.codes hash.codes      uint16 number of the split; uint64 hash of the key
    digest.codes                uint64 digest of all that the row says, for fingerprints
    order.codes                 row numbers in the order of the plan (written by `RowStore.set_order`)
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from datamat.index import IndexRow
from datamat.storage import read_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

__all__ = ["Field", "FieldKind", "RowStore"]

FieldKind = Literal["text", "int64", "float64"]


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of the rows.

    Attributes:
        name: as the index has it.
        number: position among the fields.
        kind: of its values.
        holds_file: whether they are paths of input files.
    """

    name: str
    number: int
    kind: FieldKind
    holds_file: bool

    @property
    def stem(self) -> str:
        """What the names of its files begin with: they don't hold the field's own name, which may be anything."""
        return f"field{self.number}"


class RowStore:
    """The rows that `row_writer.write_rows` wrote; safe to open in any number of processes.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        found = read_json(folder / "rows.json")
        self.num_rows: int = found["num_rows"]
        self.source: str = found["source"]
        self.splits: list[str] = found["splits"]
        self._fields = [Field(**field) for field in found["fields"]]

    def __len__(self) -> int:
        return self.num_rows

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """uint64 (num_rows,): hash of each key."""
        return self._codes("hash.codes", np.uint64)

    @functools.cached_property
    def split_codes(self) -> np.ndarray:
        """uint16 (num_rows,): position of each row's split in `splits`."""
        return self._codes("split.codes", np.uint16)

    @functools.cached_property
    def digests(self) -> np.ndarray:
        """uint64 (num_rows,): digest of key, fields, and size and time of the input files."""
        return self._codes("digest.codes", np.uint64)

    @functools.cached_property
    def order(self) -> np.ndarray:
        """uint32 (num_rows,): row numbers in the order of the plan."""
        return self._codes("order.codes", np.uint32)

    def set_order(self, order: np.ndarray) -> None:
        """Write the order of the plan."""
        with open(self.folder / "order.codes", "wb") as file:
            file.write(np.ascontiguousarray(order, np.uint32).data)
        self.__dict__.pop("order", None)

    def input_bytes(self) -> np.ndarray:
        """Return int64 (num_rows,): bytes of the input files of each row."""
        total = np.zeros(self.num_rows, np.int64)
        for field in self._fields:
            if field.holds_file:
                total += self._codes(f"{field.stem}.size", np.int64)
        return total

    def read(self, positions: np.ndarray) -> list[IndexRow]:
        """Return rows by number, the paths of their input files joined to the source.

        Args:
            positions: row numbers, any integer dtype, (n,).
        """
        keys = self._text("key", positions)
        origins = self._text("origin", positions)
        splits = [self.splits[code] for code in self.split_codes[positions].tolist()]
        names = [field.name for field in self._fields]
        columns = [self._values(field, positions) for field in self._fields]
        values = zip(*columns, strict=True) if columns else [()] * len(keys)
        return [
            IndexRow(key, split, dict(zip(names, row, strict=True)), origin)
            for key, split, row, origin in zip(keys, splits, values, origins, strict=True)
        ]

    def keys(self, positions: np.ndarray) -> list[str]:
        """Return the keys of rows by number."""
        return self._text("key", positions)

    def columns(self, positions: np.ndarray) -> Iterator[tuple[str, Any]]:
        """Yield each field of rows by number: int64 or float64 (n,), or n strings as the index gave them."""
        for field in self._fields:
            if field.kind == "text":
                yield field.name, self._text(field.stem, positions)
            else:
                yield field.name, np.asarray(self._codes(f"{field.stem}.numbers", np.dtype(field.kind))[positions])

    def file_columns(self, positions: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield name, sizes in bytes and times of change in nanoseconds, int64 (n,), of each field that holds files.

        Both are 0 where a row has no such file.
        """
        for field in self._fields:
            if field.holds_file:
                sizes, mtimes = (self._codes(f"{field.stem}.{what}", np.int64)[positions] for what in ("size", "mtime"))
                yield field.name, np.asarray(sizes), np.asarray(mtimes)

    def _values(self, field: Field, positions: np.ndarray) -> list[Any]:
        if field.kind != "text":
            numbers: list[Any] = self._codes(f"{field.stem}.numbers", np.dtype(field.kind))[positions].tolist()
            return numbers
        values = self._text(field.stem, positions)
        if field.holds_file:
            return [os.path.join(self.source, value) if value else "" for value in values]
        return values

    def _text(self, stem: str, positions: np.ndarray) -> list[str]:
        text, ends = self._codes(f"{stem}.text", np.uint8), self._codes(f"{stem}.ends", np.uint64)
        positions = np.asarray(positions, np.int64)
        stops = ends[positions].tolist()
        starts = np.where(positions > 0, ends[positions - 1], 0).astype(np.int64).tolist()
        whole = memoryview(text.data)
        return [bytes(whole[a:b]).decode("utf-8", "surrogateescape") for a, b in zip(starts, stops, strict=True)]

    def _codes(self, name: str, dtype: Any) -> np.ndarray:
        if name not in self.__dict__:
            path = self.folder / name
            empty = not path.stat().st_size  # a file of no bytes cannot be mapped
            self.__dict__[name] = np.zeros(0, dtype) if empty else np.memmap(path, dtype, "r")
        mapped: np.ndarray = self.__dict__[name]
        return mapped
