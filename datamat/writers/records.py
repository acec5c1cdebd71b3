"""Reads records of files written by other libraries, each by its place; a `RecordForm` describes a library's files."""

from __future__ import annotations

import abc
import json
import os
import pathlib
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, DatamatError, SourceError
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile, splits_of
from datamat.writers.samples import fit_key
from datamat.writers.splits import SplitSource
from datamat.writers.unpacking import SpoolOptions, UnpackedFiles

if TYPE_CHECKING:
    from typing import BinaryIO

    from datamat.features import Feature


DAMAGES = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""What reading damaged bytes raises, besides errors of the codecs."""


class RecordForm(abc.ABC):
    """How a library lays out records in its files.

    Attributes:
        features: features of the fields, as far as the files declare them.
        refused: fields that no feature stores, each with the reason and what to write.
        dicts: names of the fields that are dicts in a sample, whose fields are `DICT/FIELD` here.
        counts_on: whether the numbers of records without names continue from file to file.
    """

    features: Mapping[str, Feature]
    refused: Mapping[str, str] = {}
    dicts: Collection[str] = frozenset()
    counts_on: bool = False

    @abc.abstractmethod
    def field_names(self) -> Sequence[str]:
        """Return the names of the fields."""

    @abc.abstractmethod
    def counts(self) -> Sequence[int]:
        """Return the number of records of each file."""

    def keys(self, file: int) -> Sequence[str] | None:
        """Return the names of the records of a file; None if they have none."""
        del file
        return None

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares."""
        self.features = {**self.features, **features}

    @abc.abstractmethod
    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        """Return fields of a record."""

    def read_block(
        self, files: Sequence[int], numbers: Sequence[int], names: Sequence[str]
    ) -> Mapping[str, Any] | None:
        """Return fields of several records, as `DataSource.block` does; None if they must be read one by one."""
        del files, numbers, names
        return None

    def tell(self, found: Mapping[str, Feature | str | None]) -> None:
        """Set `features` and `refused`, given the feature of each field, or why there is none, or None."""
        self.features = {
            name: feature for name, feature in found.items() if feature is not None and not isinstance(feature, str)
        }
        self.refused = {name: reason for name, reason in found.items() if isinstance(reason, str)}


@final
class RecordsSource(DataSource):
    """Records of files that another library wrote, each read by its place.

    Args:
        files: the files, in the order of their records.
        form: how the library lays out records.
    """

    keys_are_places = True
    has_schema = True

    def __init__(self, files: Sequence[SourceFile], form: RecordForm) -> None:
        self._sources = files
        self._splits = splits_of(files)
        self._form = form
        self._ends = np.cumsum(form.counts(), dtype=np.int64)
        self._names = list(form.field_names())
        self.features = dict(form.features)
        self.refused = form.refused
        self.dicts = form.dicts
        self.files = {file.name: file.path for file in files}
        self.identity = f"records as {type(form).__name__} reads them"  # of files whose content counts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        file = int(np.searchsorted(self._ends, number, side="right"))
        inner = number - int(self._ends[file - 1] if file else 0)
        try:
            return self._form.read(file, inner, self._names)
        except DAMAGES as error:
            path = self._sources[file].path
            if isinstance(error, DatamatError) and (not isinstance(error, CorruptDataError) or path in str(error)):
                raise
            raise CorruptDataError(
                f"{path}: record {inner} is damaged: {error}; copy or write the file again"
            ) from error

    def block(self, positions: np.ndarray) -> Mapping[str, Any] | None:
        files = np.searchsorted(self._ends, positions, side="right")
        numbers = positions - np.concatenate([[0], self._ends])[files]
        return self._form.read_block(files.tolist(), numbers.tolist(), self._names)

    def field_names(self) -> list[str]:
        return self._names

    def narrow(self, names: Collection[str]) -> None:
        self._names = [name for name in self._names if name in names]

    def declare(self, features: Mapping[str, Feature]) -> None:
        self._form.declare(features)
        self.features = {**self.features, **features}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        own = [self._form.keys(file) for file in range(len(self._sources))]
        known = [key for keys in own if keys is not None for key in keys]
        are_unique = len(set(known)) == len(known)
        ends = self._ends.tolist()
        for source, split, keys, start, end in zip(self._sources, self._splits, own, [0, *ends], ends, strict=False):
            has_stem = len(self._sources) > 1 and not (self._form.counts_on if keys is None else are_unique)
            stem, first = (f"{source.stem}-" if has_stem else ""), (start if self._form.counts_on else 0)
            for number in range(end - start):
                yield stem + (f"{first + number:08d}" if keys is None else fit_key(keys[number])), split


def read_document(path: pathlib.Path) -> Any:
    """Return the content of a JSON file of a dataset; raise `SourceError` if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} cannot be read as JSON ({error}); copy or write the dataset again") from error


CODECS = {"gz": "gz", "bz2": "bz2", "zstd": "zst", "br": "br", "snappy": "snappy"}  # by MosaicML's and litdata's names


def numbered_item(file: BinaryIO, path: str, number: int) -> bytes:
    """Return an item of a file that begins with a count and the offsets of its items, uint32 each, and their end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(4 * (1 + number))
    place = file.read(8)
    begin, end = np.frombuffer(place, "<u4").tolist() if len(place) == 8 else (1, 0)
    if not begin <= end <= size:
        raise CorruptDataError(f"{path}: item {number} is cut off, or has no place in its {size:,} bytes")
    file.seek(begin)
    return file.read(end - begin)


_MODES = {"L": 1, "RGB": 3, "RGBA": 4}


def raw_picture(data: bytes) -> np.ndarray:
    """Return the pixels of a picture of Pillow: width, height and length of the mode, the mode, the raw pixels."""
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + length].decode()
    if mode not in _MODES:
        raise CorruptDataError(f"a picture is of Pillow's mode {mode!r}; want {', '.join(_MODES)}")
    return np.frombuffer(data, np.uint8, offset=12 + length).reshape(height, width, _MODES[mode])


def of_index(folder: pathlib.Path, source: Callable[[pathlib.Path], DataSource]) -> DataSource:
    """Return the source of a folder with an `index.json`, or of folders with one, by split."""
    if (folder / "index.json").is_file():
        return source(folder)
    parts = {path.parent.name: source(path.parent) for path in sorted(folder.glob("*/index.json"))}
    if not parts:
        raise SourceError(f"{folder} holds no index.json, nor does a folder in it; give the folder that has one")
    return SplitSource(parts)


def unpacked_files(files: Sequence[SourceFile], spool: SpoolOptions) -> UnpackedFiles:
    """Return the files, those that are compressed unpacked when they are needed."""
    return UnpackedFiles([file.path for file in files], [file.codec for file in files], spool)
