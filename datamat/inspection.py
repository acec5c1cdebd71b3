"""What is in a file of records, whoever wrote it: how many, with which fields, and whether it is whole.

    first bytes ──> which format ──> records, one at a time ──> FieldFinder per field, the first records as text
                                              └── damage: where, and what could be read before it

TFRecord (also gzip), Parquet, tar (also gzip), ArrayRecord, and finished directories of datamat. Every checksum that
the format has is tested. Pictures are known by their headers and not decoded; memory does not grow with the file.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gzip
import pathlib
import struct
import tarfile
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

from datamat.errors import CorruptDataError, InputError, MissingDependencyError, OptionError
from datamat.findings import Field, FieldFinder, shown
from datamat.formats.framing import FRAMING_BYTES, frame, read_payload
from datamat.manifest import Manifest
from datamat.messages import EXAMPLE, parse_payload

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from datamat.features import Feature
    from datamat.messages import Values

__all__ = ["Inspection", "inspect"]

Look: TypeAlias = "Callable[[], tuple[str, Mapping[str, Values]]]"
"""Looks into a record that was read: what it is, and its fields."""

_LOOKED_INTO = 100_000  # records whose fields are looked at: of many tiny ones, the rest is only read and counted
_BATCH_ROWS = 64
_RECORDS_AT_ONCE = 16
_BLOCK_BYTES = 512  # of a tar archive
_HEAD_BYTES = 1024
_LENGTH = struct.Struct("<Q")
_RIEGELI = bytes.fromhex("83af70d10d884a3f")  # hash of the first block's header, with which ArrayRecord files begin
_GZIP = b"\x1f\x8b"


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """What was found in a file; its `str` is what `datamat inspect` prints.

    Attributes:
        path: the file or directory.
        format: in words.
        num_bytes: size of the file, or of all shards.
        num_records: that could be read.
        contents: how many records of which kind ("tf.train.Example"); of a directory, how many in which split.
        fields: what was found in each, in the order in which they came.
        num_looked_into: records that `fields` tells of.
        records: the first ones, as text.
        problem: the first damage: record, byte and what is wrong; "" where there is none.
    """

    path: str
    format: str
    num_bytes: int
    num_records: int
    contents: Mapping[str, int]
    fields: tuple[Field, ...]
    num_looked_into: int
    records: tuple[str, ...] = ()
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.problem

    def __str__(self) -> str:
        contents = ", ".join(f"{count:,} {kind}" for kind, count in self.contents.items())
        told = f" ({contents})" if contents else ""
        lines = [f"{self.path}: {self.format}, {self.num_bytes:,} bytes, {self.num_records:,} records{told}"]
        if self.problem:
            lines.append(f"DAMAGED: {self.problem}")
        lines += _table(self.fields)
        if self.fields and self.num_looked_into < self.num_records:
            lines.append(f"fields as in the first {self.num_looked_into:,} records")
        return "\n".join([*lines, *self.records])


def inspect(path: str | os.PathLike[str], *, records: int = 1) -> Inspection:
    """Look into a file of records, or a finished directory.

    Args:
        path: a TFRecord, Parquet, tar or ArrayRecord file, TFRecord and tar also compressed by gzip; or a finished
            directory of datamat, whose manifest is read and whose first shard is looked into.
        records: how many of the first records to show.

    Returns:
        What was found. Damage does not raise: `problem` tells its place, and all before it counts.

    Raises:
        InputError: the file is of no format that is known here.
        OutputError: the directory is not a finished one of datamat.
        OSError: the file cannot be opened.
        MissingDependencyError: the package that reads the format is not installed.

    Example:
        >>> print(inspect("train.tfrecord", records=2))   # doctest: +SKIP
    """
    if records < 0:
        raise OptionError(f"inspect: records is {records}; want 0 or more")
    place = pathlib.Path(path)
    if place.is_dir():
        return _inspect_directory(place, records)
    name, read = _format_of(place)
    return _inspect_file(place, name, read, records)


def _inspect_directory(folder: pathlib.Path, records: int) -> Inspection:
    manifest = Manifest.read(folder)
    first = next((info.file for info in manifest.shards if info.num_records), manifest.shards[0].file)
    shard = inspect(folder / first, records=records)
    return dataclasses.replace(
        shard,
        path=str(folder),
        format=f"finished directory of {len(manifest.shards)} shards, {manifest.format}",
        num_bytes=manifest.num_bytes,
        num_records=manifest.num_records,
        contents={split: sum(info.num_records for info in infos) for split, infos in manifest.splits.items()},
        problem=f"{first}: {shard.problem}" if shard.problem else "",
    )


def _inspect_file(
    path: pathlib.Path, name: str, read: Callable[[pathlib.Path], Iterator[Look]], most_shown: int
) -> Inspection:
    finders: dict[str, FieldFinder] = {}
    contents: collections.Counter[str] = collections.Counter()
    number, texts, problem = 0, [], ""
    try:
        for look in read(path):
            if number < max(_LOOKED_INTO, most_shown):
                kind, values = look()
                contents[kind] += 1
                for field, value in values.items():
                    finders.setdefault(field, FieldFinder(field)).add(value)
                if number < most_shown:
                    texts.append(_record_text(number, kind, values))
            number += 1
    except CorruptDataError as error:
        problem = f"record {number}: {error}; {number:,} records can be read before it"
    return Inspection(
        str(path),
        name,
        path.stat().st_size,
        number,
        {kind: count for kind, count in contents.items() if kind},
        tuple(finder.found() for finder in finders.values()),
        sum(contents.values()),
        tuple(texts),
        problem,
    )


def _record_text(number: int, kind: str, values: Mapping[str, Values]) -> str:
    title = f"record {number}" + (f", {kind}" if kind and kind != EXAMPLE else "")
    return "\n".join([f"{title}:", *(f"  {name or '(payload)'}: {shown(value)}" for name, value in values.items())])


def _table(fields: tuple[Field, ...]) -> list[str]:
    rows = [
        (
            field.name or "(payload)",
            field.kind,
            str(field.lengths[0]) if field.lengths[0] == field.lengths[1] else "{} to {}".format(*field.lengths),
            field.told,
            _declaration(field.feature) if field.feature is not None else "",
        )
        for field in fields
    ]
    head = ("field", "kind", "values", "told", "as a feature")
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _declaration(feature: Feature) -> str:
    """Return a feature as one would write it, without what is left out."""
    fields = {field.name: field for field in dataclasses.fields(feature)}  # type: ignore[arg-type]  # all of them are
    said = {name: getattr(feature, name) for name, field in fields.items() if getattr(feature, name) != field.default}
    return f"{type(feature).__name__}({', '.join(f'{name}={value!r}' for name, value in said.items())})"


def _format_of(path: pathlib.Path) -> tuple[str, Callable[[pathlib.Path], Iterator[Look]]]:
    """Return the format of a file, by its first bytes, and what reads it; raise `InputError` where it is none."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    inner = _inflated(head) if head.startswith(_GZIP) else head
    packed = ", gzip" if inner is not head else ""
    if inner.startswith(b"PAR1") and not packed:
        return "Parquet", _read_parquet
    if inner[257:262] == b"ustar":
        return f"tar archive{packed}", _read_tar
    if inner.startswith(_RIEGELI) and not packed:
        return "ArrayRecord", _read_arrayrecord
    if not inner or _is_framed(inner) or "tfrecord" in path.name:
        return f"TFRecord{packed}", functools.partial(_read_tfrecord, packed=bool(packed))
    raise InputError(
        f"{path}: its first bytes {head[:8].hex(' ')} are those of none of TFRecord, Parquet, tar and ArrayRecord; "
        "give a file of records, or a finished directory"
    )


def _inflated(head: bytes) -> bytes:
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _HEAD_BYTES)
    except zlib.error:
        return head


def _is_framed(head: bytes) -> bool:
    """Tell whether bytes begin as a TFRecord does: with a length and its checksum."""
    return len(head) >= FRAMING_BYTES and frame([b""], _LENGTH.unpack_from(head)[0])[0] == head[:12]


def _read_tfrecord(path: pathlib.Path, *, packed: bool) -> Iterator[Look]:
    offset = 0
    opened: Any = gzip.open(path) if packed else open(path, "rb", buffering=1 << 20)  # noqa: SIM115 -- closed below
    with opened as file:
        while True:
            try:
                payload = read_payload(file)
            except (CorruptDataError, EOFError, OSError, zlib.error) as error:
                where = f"at byte {offset:,}{' once inflated' if packed else ''}"
                raise CorruptDataError(f"{where}: {error}") from error
            if payload is None:
                return
            offset += len(payload) + FRAMING_BYTES
            yield functools.partial(parse_payload, payload)


def _read_arrayrecord(path: pathlib.Path) -> Iterator[Look]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{path} is an ArrayRecord file, which the package array-record reads; "
            "install it with: pip install 'datamat[arrayrecord]'"
        ) from error
    reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:1")
    try:
        for start in range(0, reader.num_records(), _RECORDS_AT_ONCE):
            for payload in reader.read(start, min(start + _RECORDS_AT_ONCE, reader.num_records())):
                yield functools.partial(parse_payload, payload)
    except RuntimeError as error:
        raise CorruptDataError(f"{error}") from error
    finally:
        reader.close()


def _read_parquet(path: pathlib.Path) -> Iterator[Look]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                names = batch.schema.names
                for row in range(batch.num_rows):
                    yield functools.partial(_row_of, batch, names, row)
    except (pa.ArrowException, OSError) as error:
        raise CorruptDataError(str(error).partition("\n")[0]) from error


def _row_of(batch: Any, names: list[str], row: int) -> tuple[str, dict[str, Values]]:
    columns = {name: _values_of(batch.column(place)[row]) for place, name in enumerate(names)}
    return "", {name: values for name, values in columns.items() if values is not None}


def _values_of(scalar: Any) -> Values | None:
    """Return one cell of a table as a record would hold it; None where it is null."""
    value = scalar.as_py()
    if value is None:
        return None
    if isinstance(value, dict):  # an image of Hugging Face `datasets` is {bytes, path}
        value = value["bytes"] if isinstance(value.get("bytes"), bytes) else repr(value)
    if isinstance(value, (str, bytes)):
        return [value.encode() if isinstance(value, str) else value]
    array = np.asarray(value)
    if array.dtype.kind in "biufc":
        return _typed(array, scalar.type).reshape(-1)
    return [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]


def _typed(array: np.ndarray, arrow_type: Any) -> np.ndarray:
    """Return numbers in the type that the table has them in: Python's own have lost it."""
    while hasattr(arrow_type, "value_type"):
        arrow_type = arrow_type.value_type
    return array.astype(arrow_type.to_pandas_dtype())


def _read_tar(path: pathlib.Path) -> Iterator[Look]:
    """Yield the samples of an archive: members that stand together and have the name before the first dot in common."""
    sample: dict[str, Values] = {}
    current = failure = None
    try:
        with tarfile.open(path, "r:*") as archive:
            for name, data in _files_of(archive):
                if current not in (None, stem := _sample_name(name)):
                    yield functools.partial(_as_it_is, sample)
                    sample = {}
                current = stem
                sample[_sample_name(name, ending=True)] = [data]
            _check_end(archive)
    except (tarfile.TarError, CorruptDataError, EOFError, OSError, zlib.error) as error:
        failure = error
    if sample:  # the members that it has are whole
        yield functools.partial(_as_it_is, sample)
    if failure is not None:
        raise CorruptDataError(str(failure)) from failure


def _as_it_is(sample: dict[str, Values]) -> tuple[str, dict[str, Values]]:
    return "", sample


def _files_of(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # else the archive keeps them all
        if member.isfile():
            file = archive.extractfile(member)
            data = file.read() if file else b""
            if len(data) != member.size:
                raise CorruptDataError(f"{member.name}: {len(data):,} of {member.size:,} bytes are there")
            yield member.name, data


def _sample_name(name: str, *, ending: bool = False) -> str:
    directory, slash, base = name.rpartition("/")
    stem, _, endings = base.partition(".")
    return endings if ending else directory + slash + stem


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise where an archive does not end as it should: `tarfile` takes a damaged header for the end."""
    file: BinaryIO = archive.fileobj  # type: ignore[assignment]  # it was opened from a path
    file.seek(archive.offset)
    block = file.read(_BLOCK_BYTES)
    if not block:
        raise CorruptDataError("the archive does not end in blocks of zeros: it was cut off")
    if any(block):
        raise CorruptDataError(f"at byte {archive.offset:,}: no header of a member, and no end of the archive")
