"""Reads TFRecord files of `tf.train.Example`, by any writer."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.describe import ColumnProfiler, parse_payload
from datamat.errors import CorruptDataError, SchemaError, SourceError
from datamat.features import Bytes, Json, ListOf, Nullable, Scalar, Tensor
from datamat.features.base import dtype_of, holds_numbers
from datamat.features.pictures import PictureFile
from datamat.formats.tfrecord import FRAMING_BYTES, read_payload, record_size
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import RecordForm, RecordsSource
from datamat.writers.unpacking import SpoolOptions, unpacked_by_content

if TYPE_CHECKING:
    from datamat.directory.describe import ColumnProfile, Values
    from datamat.features import Feature


_LENGTH_BYTES = 8
_MOST_PROFILED = 1000  # records of a TFRecord file whose fields are looked into


@final
class TFRecordForm(RecordForm):
    """TFRecord files of `tf.train.Example` by any writer; the first records show the fields."""

    def __init__(self, paths: Sequence[str], spool: SpoolOptions) -> None:
        self._paths = paths
        self._files = unpacked_by_content(paths, _is_tfrecord, spool)
        self._offsets = [record_offsets(path, self._files.path(number)) for number, path in enumerate(paths)]
        profilers: dict[str, ColumnProfiler] = {}
        stepped: set[str] = set()  # feature lists of a `SequenceExample`
        count = 0
        places = ((file, number) for file, offsets in enumerate(self._offsets) for number in range(len(offsets)))
        for file, number in itertools.islice(places, _MOST_PROFILED):
            count += 1
            for name, values in self._values(file, number).items():
                profiler = profilers.setdefault(name, ColumnProfiler(name))
                for step in values if isinstance(values, tuple) else [values]:
                    profiler.add(step)
                if isinstance(values, tuple):
                    stepped.add(name)
        found = {name: profiler.found() for name, profiler in profilers.items()}
        self._names = {name or "payload": name for name in found}
        self.tell({
            name: _of_steps(found[field]) if field in stepped else _profiled(found[field], count)
            for name, field in self._names.items()
        })  # fmt: skip

    def field_names(self) -> list[str]:
        return list(self._names)

    def counts(self) -> list[int]:
        return [len(offsets) for offsets in self._offsets]

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        values = self._values(file, number)
        place = f"{self._paths[file]}: record {number} has"
        return {name: _value(values.get(self._names[name]), self.features.get(name), name, place) for name in names}

    def _values(self, file: int, number: int) -> Mapping[str, Values | tuple[Values, ...]]:
        path = self._files.path(file)
        try:
            with open(path, "rb") as opened:
                opened.seek(int(self._offsets[file][number]))
                payload = read_payload(opened)
        except CorruptDataError as error:
            raise CorruptDataError(
                f"{self._paths[file]}: record {number} is damaged: {error}; copy or write the file again"
            ) from error
        return parse_payload(payload or b"", joins_steps=False)[1]


def _value(values: Any, feature: Feature | None, name: str, place: str) -> Any:
    """Return the value of a field in a record, in the form that its feature takes.

    Args:
        values: bytes, a 1-D array of numbers, or a tuple of such steps; None if the record has no such field.
        feature: the feature; None for a single value whose bytes say more.
        name: name of the field, for messages.
        place: what messages begin with.

    Raises:
        SchemaError: there is no value.
        CorruptDataError: there are several, and the feature takes one.
    """
    match feature:
        case Nullable(feature=inner):
            return _value(values, inner, name, place) if values is not None and len(values) else None
        case ListOf(feature=item) if isinstance(values, tuple):
            return [_value(step, item, name, place) for step in values]
    dtype, shape = ("", ()) if feature is None else feature.value_type()
    if isinstance(values, np.ndarray) or not values:  # a list without values shows no type
        is_array = shape and holds_numbers(dtype) and not isinstance(feature, PictureFile)
        if is_array and (values is not None or None in shape):
            numbers = values if isinstance(values, np.ndarray) else np.empty(0, dtype_of(dtype))
            fits = shape.count(None) < 2
            return numbers.reshape([-1 if size is None else size for size in shape]) if fits else numbers
    match feature:
        case ListOf(feature=item):
            return [_value([value], item, name, place) for value in values or ()]
        case Json() if isinstance(values, list):
            return [value.decode() for value in values]
    drop = f"leave it out with drop=[{name!r}]"
    if values is None:
        raise SchemaError(f"{place} no field {name!r}; declare it with features={{{name!r}: Nullable(...)}}, or {drop}")
    if len(values) != 1:
        raise CorruptDataError(
            f"{place} {len(values)} values of field {name!r}, but the first records have one; write one in each, "
            "declare "
            f"it with features={{{name!r}: ListOf(...)}}, or {drop}"
        )
    value = values[0]
    return value.decode() if (dtype, shape) == ("string", ()) and isinstance(value, bytes) else value


def _is_tfrecord(head: bytes) -> bool:
    with contextlib.suppress(CorruptDataError):
        return record_size(head, 0) > 0
    return False


def _profiled(profile: ColumnProfile, count: int) -> Feature | str:
    """Return the feature of a field, or why there is none."""
    drop = f"leave it out with drop=[{profile.name!r}]"
    is_list = profile.lengths != (1, 1)
    if profile.num_records < count and not is_list:
        return (
            f"{count - profile.num_records} of the first {count} records have no field {profile.name!r}; declare it "
            f"with features={{{profile.name!r}: Nullable(...)}}, or {drop}"
        )
    if profile.kind == "bytes":
        return ListOf(Bytes()) if is_list else Bytes()
    if profile.num_records < count and isinstance(profile.feature, Tensor):
        return Tensor((None,), profile.kind)
    return profile.feature or (
        f"field {profile.name!r} holds {profile.kind}, {profile.lengths[0]} to {profile.lengths[1]} per record; {drop}"
    )


def _of_steps(profile: ColumnProfile) -> Feature | str:
    """Return the feature of a feature list, whose steps the profile describes, or why there is none."""
    one = _profiled(profile, 0)
    if isinstance(one, str):
        return one
    return ListOf(ListOf(Scalar(one.dtype)) if isinstance(one, Tensor) and None in one.shape else one)


def record_offsets(path: str, unpacked: str) -> np.ndarray:
    """Return the offset of each record of a TFRecord file, int64 (n,), by following the lengths."""
    offsets, place, size = [], 0, os.path.getsize(unpacked)
    with open(unpacked, "rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            offsets.append(place)
            place += int.from_bytes(head, "little") + FRAMING_BYTES
            if place > size:
                raise SourceError(
                    f"{path} is not a TFRecord, or was cut off: record {len(offsets) - 1} would end at byte {place:,} "
                    "of "
                    f"{size:,}; copy or write it again"
                )
            file.seek(place)
    return np.array(offsets, np.int64)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the records of files."""
    return RecordsSource(files, TFRecordForm([file.path for file in files], spool))
