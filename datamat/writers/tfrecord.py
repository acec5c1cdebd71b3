"""TFRecord files of `tf.train.Example`, by any writer."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.describe import ColumnProfiler, parse_payload
from datamat.errors import CorruptDataError, SourceError
from datamat.features import Bytes, Json, ListOf, Nullable, Text
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
    """TFRecord files of `tf.train.Example` by any writer; the first records show the fields.

    Args:
        paths: the files.
        spool: where those are unpacked that are compressed.
    """

    def __init__(self, paths: Sequence[str], spool: SpoolOptions) -> None:
        self._paths = paths
        self._files = unpacked_by_content(paths, _is_tfrecord, spool)
        self._offsets = [record_offsets(path, self._files.path(number)) for number, path in enumerate(paths)]
        profilers: dict[str, ColumnProfiler] = {}
        count = 0
        for file, number in itertools.islice(self._all(), _MOST_PROFILED):
            count += 1
            for name, values in self._values(file, number).items():
                profilers.setdefault(name, ColumnProfiler(name)).add(values)
        found = {name: profiler.found() for name, profiler in profilers.items()}
        self._names = {name or "payload": name for name in found}
        self.tell({name: _profiled(found[field], count) for name, field in self._names.items()})

    def field_names(self) -> list[str]:
        return list(self._names)

    def counts(self) -> list[int]:
        return [len(offsets) for offsets in self._offsets]

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        values = self._values(file, number)
        found: dict[str, Any] = {}
        for name in names:
            value = values.get(self._names[name])
            feature = self.features.get(name)
            if isinstance(feature, Nullable):
                if value is None or not len(value):
                    found[name] = None
                    continue
                feature = feature.feature
            if value is None:
                raise CorruptDataError(
                    f"{self._paths[file]}: record {number} has no field {name!r}; declare it with "
                    f"features={{{name!r}: Nullable(...)}}, or leave it out with drop=[{name!r}]"
                )
            if isinstance(feature, ListOf):
                is_text = isinstance(feature.feature, Text)
                found[name] = [item.decode() if is_text else item for item in value]
                continue
            is_array, is_json = isinstance(value, np.ndarray), isinstance(feature, Json)
            may_be_many = feature and (feature.value_type()[1] if is_array else is_json)
            if not may_be_many and len(value) != 1:
                raise CorruptDataError(
                    f"{self._paths[file]}: record {number} has {len(value)} values of field {name!r}, the first "
                    f"records have one; write one in each, or leave it out with drop=[{name!r}]"
                )
            if is_array:
                found[name] = value if may_be_many else value[0]
            elif is_json:
                found[name] = [item.decode() for item in value]
            else:
                data = value[0]
                is_text = feature is not None and feature.value_type() == ("string", ())
                found[name] = data.decode() if is_text else data
        return found

    def _all(self) -> Iterator[tuple[int, int]]:
        for file, offsets in enumerate(self._offsets):
            for number in range(len(offsets)):
                yield file, number

    def _values(self, file: int, number: int) -> Mapping[str, Values]:
        path = self._files.path(file)
        try:
            with open(path, "rb") as opened:
                opened.seek(int(self._offsets[file][number]))
                payload = read_payload(opened)
        except CorruptDataError as error:
            raise CorruptDataError(
                f"{self._paths[file]}: record {number} is damaged: {error}; copy or write the file again"
            ) from error
        return parse_payload(payload or b"")[1]


def _is_tfrecord(head: bytes) -> bool:
    with contextlib.suppress(CorruptDataError):
        return record_size(head, 0) > 0
    return False


def _profiled(profile: ColumnProfile, count: int) -> Feature | str:
    """Return the feature of a field, or why there is none."""
    drop = f"leave it out with drop=[{profile.name!r}]"
    if profile.num_records < count:
        return f"{count - profile.num_records} of the first {count} records have no field {profile.name!r}; {drop}"
    if profile.feature is not None:
        return profile.feature
    if profile.kind == "bytes" and profile.lengths == (1, 1):
        return Bytes()
    if profile.kind == "text":
        return Json()
    return (
        f"field {profile.name!r} holds {profile.kind}, {profile.lengths[0]} to {profile.lengths[1]} per record; {drop}"
    )


def record_offsets(path: str, unpacked: str) -> np.ndarray:
    """Return the offset of each record of a TFRecord file, int64 (n,), by following the lengths."""
    offsets, place, size = [], 0, os.path.getsize(unpacked)
    with open(unpacked, "rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            offsets.append(place)
            place += int.from_bytes(head, "little") + FRAMING_BYTES
            if place > size:
                raise SourceError(
                    f"{path} is no TFRecord, or was cut off: record {len(offsets) - 1} would end at byte {place:,} of "
                    f"{size:,}; copy or write it again"
                )
            file.seek(place)
    return np.array(offsets, np.int64)


def open_files(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    """Return the records of files."""
    return RecordsSource(files, TFRecordForm([file.path for file in files], spool))
