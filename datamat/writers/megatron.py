"""Reads token sets of Megatron-LM: documents of `PREFIX.bin` and `PREFIX.idx`, see `datamat.formats.megatron`."""

# Read without megatron-core, which imports torch, and trusts the index.

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import SourceError, count_of
from datamat.features import Tensor, Tokens
from datamat.formats.megatron import DTYPES, HEAD, MAGIC
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import RecordForm, RecordsSource
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray


_AT_ONCE = 1 << 20  # sequences whose places are checked together


@final
class _Pair:
    """Two files that belong together, mapped into memory when they are read. Copies start unmapped.

    Raises:
        SourceError: the index is not one, or does not fit the tokens.
    """

    def __init__(self, stem: str) -> None:
        self.data, self.index = f"{stem}.bin", f"{stem}.idx"
        with open(self.index, "rb") as file:
            head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise SourceError(
                f"{self.index} begins with {head[:9]!r}; want {MAGIC!r} and {HEAD.size} bytes or more, as "
                "Megatron-LM writes; copy it again, or name the kind of the source if it is another one"
            )
        _, version, code, self._num_sequences, self._num_bounds = HEAD.unpack(head)
        if version != 1 or code not in DTYPES:
            raise SourceError(
                f"{self.index} has version {version} and dtype code {code}; want version 1 and a code of "
                f"{min(DTYPES)} to {max(DTYPES)}; copy the file again"
            )
        self.dtype = np.dtype(DTYPES[code])
        size, wanted = os.path.getsize(self.index), HEAD.size + 12 * self._num_sequences + 8 * self._num_bounds
        if size != wanted:
            is_multimodal = size == wanted + self._num_sequences
            raise SourceError(
                f"{self.index} has {size:,} bytes; want {wanted:,} for {count_of(self._num_sequences, 'sequence')} and "
                f"{count_of(self._num_bounds, 'bound')} of documents; "
                + ("datasets with modes are not read here" if is_multimodal else "copy the file again")
            )
        num_bytes = self._check_places()
        if os.path.getsize(self.data) != num_bytes:
            raise SourceError(
                f"{self.data} has {os.path.getsize(self.data):,} bytes; want the {num_bytes:,} of the tokens of "
                f"{self.dtype} that {os.path.basename(self.index)} divides; copy both files again"
            )
        bounds = self._bounds
        # If no document was ever ended, each sequence is one.
        self.is_plain = len(bounds) < 2 or np.array_equal(bounds, np.arange(self._num_sequences + 1))
        if not self.is_plain and (bounds[0] or bounds[-1] != self._num_sequences or (np.diff(bounds) < 0).any()):
            raise SourceError(
                f"{self.index}: its documents begin at sequence {bounds[0]} and end at {bounds[-1]}; want them in "
                f"order, from 0 to {self._num_sequences}; write the dataset again, with end_document after each"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, np.ndarray)}

    def __len__(self) -> int:
        return int(self._num_sequences if self.is_plain else self._num_bounds - 1)

    @functools.cached_property
    def _lengths(self) -> NDArray[np.int32]:
        return _mapped(self.index, "<i4", HEAD.size, self._num_sequences)

    @functools.cached_property
    def _starts(self) -> NDArray[np.int64]:
        return _mapped(self.index, "<i8", HEAD.size + 4 * self._num_sequences, self._num_sequences)

    @functools.cached_property
    def _bounds(self) -> NDArray[np.int64]:
        return _mapped(self.index, "<i8", HEAD.size + 12 * self._num_sequences, self._num_bounds)

    @functools.cached_property
    def _tokens(self) -> NDArray[Any]:
        return _mapped(self.data, self.dtype, 0, os.path.getsize(self.data) // self.dtype.itemsize)

    def _check_places(self) -> int:
        """Return the bytes of all sequences; raise `SourceError` unless each begins where the one before it ends."""
        found = 0
        for first in range(0, self._num_sequences, _AT_ONCE):
            lengths = self._lengths[first : first + _AT_ONCE].astype(np.int64)
            starts = self._starts[first : first + _AT_ONCE]
            ends = found + np.cumsum(lengths * self.dtype.itemsize)
            wanted = ends - lengths * self.dtype.itemsize
            wrong = np.flatnonzero((lengths < 0) | (starts != wanted))
            if len(wrong):
                place = int(wrong[0])
                raise SourceError(
                    f"{self.index}: sequence {first + place} has {lengths[place]} tokens from byte {starts[place]} on; "
                    f"want 0 or more, from byte {wanted[place]} on, where the one before it ends; copy or write the "
                    "file again"
                )
            found = int(ends[-1])
        return found

    def document(self, number: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the tokens of a document, and how many of them each of its sequences has; both mapped."""
        first, behind = (number, number + 1) if self.is_plain else self._bounds[number : number + 2].tolist()
        start, stop = (
            int(self._starts[one]) // self.dtype.itemsize if one < self._num_sequences else len(self._tokens)
            for one in (first, behind)
        )
        return self._tokens[start:stop], self._lengths[first:behind]


def _mapped(path: str, dtype: Any, start: int, count: int) -> NDArray[Any]:
    # Plain arrays, as slices of a memmap take five times as long.
    return np.asarray(np.memmap(path, dtype, "r", start, count)) if count else np.empty(0, dtype)


@final
class MegatronForm(RecordForm):
    """Documents of Megatron-LM: `tokens` and, if documents have several sequences, the `lengths` of these.

    Raises:
        SourceError: the files hold tokens of different dtypes.
    """

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self._pairs = pairs
        dtype = pairs[0].dtype
        for pair in pairs:
            if pair.dtype != dtype:
                raise SourceError(
                    f"{pair.data} has tokens of {pair.dtype}, {pairs[0].data} of {dtype}; write them to two datasets"
                )
        self.features = {"tokens": Tensor((None,), dtype.name) if dtype.kind == "f" else Tokens(dtype.name)}
        if not all(pair.is_plain for pair in pairs):
            self.features["lengths"] = Tensor((None,), "int32")

    def field_names(self) -> list[str]:
        return list(self.features)

    def counts(self) -> list[int]:
        return list(map(len, self._pairs))

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        found = zip(("tokens", "lengths"), self._pairs[file].document(number), strict=True)
        return {name: np.array(value) for name, value in found if name in names}

    def read_block(self, files: Sequence[int], numbers: Sequence[int], names: Sequence[str]) -> Mapping[str, Any]:
        found = [self._pairs[file].document(number) for file, number in zip(files, numbers, strict=True)]
        columns = zip(("tokens", "lengths"), zip(*found, strict=True), strict=True)
        return {
            name: (np.concatenate(values), np.fromiter(map(len, values), np.int64, len(values)))
            for name, values in columns
            if name in names
        }


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the documents of pairs of files; either file of a pair may be given.

    Raises:
        SourceError: one of a pair is missing, or they do not fit each other.
    """
    del spool
    stems = {os.path.splitext(file.path)[0]: os.path.splitext(file.name)[0] for file in files}
    for stem in stems:
        for ending, other in ((".bin", ".idx"), (".idx", ".bin")):
            if not os.path.isfile(stem + ending):
                raise SourceError(
                    f"{stem + other} has no {os.path.basename(stem) + ending} next to it; copy it there: they belong "
                    "together"
                )
    form = MegatronForm([_Pair(stem) for stem in stems])
    source = RecordsSource([SourceFile(f"{name}.bin", f"{stem}.bin") for stem, name in stems.items()], form)
    source.files = {**source.files, **{f"{name}.idx": f"{stem}.idx" for stem, name in stems.items()}}
    return source
