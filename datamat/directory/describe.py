"""Describe a file of records from any writer: its fields, their types, and samples."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gzip
import os
import pathlib
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, final

import numpy as np

from datamat import codecs
from datamat.directory.display import Table, render_html, statistics_table
from datamat.directory.equal_inputs import EqualInputs, equal_inputs
from datamat.directory.fetched import FilesHere
from datamat.directory.manifest import MANIFEST_FILE, MOST_MANIFEST_BYTES
from datamat.errors import CorruptDataError, InputError, MissingDependencyError, OptionError, OutputError, count_of
from datamat.features import Image, ListOf, Scalar, Tensor, Text
from datamat.features.statistics import summarized_in_words
from datamat.folders import open_file, open_folder
from datamat.folders.local import open_regular
from datamat.formats.example import LEN, decode_example, fields, varint
from datamat.formats.tfrecord import FRAMING_BYTES, frame, read_payload
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.codecs import ImageInfo
    from datamat.features import Feature

# ---------------------------------------------------------------- findings
#
# Common properties of the values of a field: kind, lengths, range, images and their sizes, text.
#
# Values are examined one record at a time and dropped, so that memory stays at a few numbers per field. Only the header
# of an image is read.


_MOST_VALUES = 16  # up to this many distinct integers are listed; otherwise only the range is given
_MOST_SHOWN = 60
_PICTURE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"BM")
_ANY_SIZE = 1 << 62
_MOST_INDEX_BYTES = 1 << 28  # largest index behind a URL that is compared


@frozen()
class ColumnProfile:
    """The findings of `describe` about one field.

    Attributes:
        name: name of the field.
        kind: "image", "text", "bytes", or the name of a numpy dtype.
        num_records: number of examined records with the field.
        lengths: smallest and largest number of values in one record.
        details: description of range, sizes and encodings.
        feature: feature that can hold every value; None if bytes are neither images nor text, or there are no values.
    """

    name: str
    kind: str
    num_records: int
    lengths: tuple[int, int]
    details: str
    feature: Feature | None


@final
class ColumnProfiler:
    """Examines the values of a field, record by record."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_records = 0
        self._lengths = _Range()
        self._sizes = _Range()
        self._numbers = _Range()
        self._values: set[int] | None = set()  # None once there are too many
        self._kinds: collections.Counter[str] = collections.Counter()
        self._pictures = _Pictures()

    def add(self, values: Sequence[bytes] | np.ndarray) -> None:
        """Examine the values of one record: bytes, or a 1-D array of numbers."""
        self._num_records += 1
        self._lengths.add(len(values))
        if isinstance(values, np.ndarray):
            self._add_numbers(values)
        else:
            for value in values:
                self._add_bytes(value)

    def found(self) -> ColumnProfile:
        """Return the findings."""
        kind = self._kind()
        lengths = self._lengths.bounds
        return ColumnProfile(
            self._name, kind, self._num_records, lengths, self._describe(kind), self._feature(kind, lengths)
        )

    def _add_numbers(self, values: np.ndarray) -> None:
        self._kinds[values.dtype.name] += 1
        finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        if not len(finite):
            return
        self._numbers.add(finite.min().item())
        self._numbers.add(finite.max().item())
        if self._values is not None and values.dtype.kind in "iub":
            self._values.update(int(value) for value in np.unique(finite)[: _MOST_VALUES + 1])
            if len(self._values) > _MOST_VALUES:
                self._values = None

    def _add_bytes(self, value: bytes) -> None:
        self._sizes.add(len(value))
        info = picture_of(value)
        if info is not None:
            self._kinds["image"] += 1
            self._pictures.add(info)
        else:
            self._kinds["text" if _is_text(value) else "bytes"] += 1

    def _kind(self) -> str:
        kinds = set(self._kinds)
        if not kinds:
            return "no value"
        if len(kinds) == 1:
            return kinds.pop()
        return "bytes" if kinds <= {"image", "text", "bytes"} else "/".join(sorted(kinds))

    def _describe(self, kind: str) -> str:
        if kind == "no value":
            return ""
        if kind == "image":
            return f"{self._pictures}, {self._sizes} bytes"
        if kind in {"text", "bytes"}:
            mixed = ", ".join(f"{count:,} {name}" for name, count in sorted(self._kinds.items()))
            return f"{self._sizes} bytes" + (f" ({mixed})" if len(self._kinds) > 1 else "")
        if self._values and np.dtype(kind).kind in "iub":
            return "values " + ", ".join(map(str, sorted(self._values)))
        return f"{self._numbers}" if self._numbers.is_set else "no finite number"

    def _feature(self, kind: str, lengths: tuple[int, int]) -> Feature | None:
        is_one = lengths == (1, 1)
        if kind in {"image", "text"}:
            one = self._pictures.feature() if kind == "image" else Text()
            return one if is_one else ListOf(one)
        if kind in {"no value", "bytes"} or "/" in kind:
            return None
        return Scalar(kind) if is_one else Tensor((lengths[0] if lengths[0] == lengths[1] else None,), kind)


def picture_of(value: bytes) -> ImageInfo | None:
    """Return the header of an encoded image; None if the bytes are not an image that datamat reads."""
    if not value.startswith(_PICTURE_STARTS):
        return None
    try:
        return codecs.probe(value, max_pixels=_ANY_SIZE)
    except InputError:
        return None


def preview_values(values: Sequence[bytes] | np.ndarray) -> str:
    """Return the values of one field of one record as text, shortened if long."""
    if isinstance(values, np.ndarray):
        few = ", ".join(f"{value:g}" if values.dtype.kind == "f" else str(value) for value in values[:8].tolist())
        more = f", ... ({count_of(len(values), 'value')})" if len(values) > 8 else ""
        return few + more if len(values) == 1 else f"[{few}{more}]"
    texts = [_shown_bytes(value) for value in values[:8]]
    return texts[0] if len(values) == 1 else f"[{', '.join(texts)}{', ...' if len(values) > 8 else ''}]"


class _Range:
    """Smallest and largest of some numbers."""

    __slots__ = ("least", "most")

    def __init__(self) -> None:
        self.least: Any = None
        self.most: Any = None

    def add(self, number: Any) -> None:
        if self.least is None:
            self.least = self.most = number
        elif number < self.least:
            self.least = number
        elif number > self.most:
            self.most = number

    @property
    def is_set(self) -> bool:
        return self.least is not None

    @property
    def bounds(self) -> tuple[int, int]:
        return (self.least or 0, self.most or 0)

    def __str__(self) -> str:
        texts = [f"{number:,}" if isinstance(number, int) else f"{number:g}" for number in (self.least, self.most)]
        return texts[0] if self.least == self.most else f"{texts[0]} to {texts[1]}"


class _Pictures:
    """Sizes and encodings of images, from their headers."""

    def __init__(self) -> None:
        self._encodings: collections.Counter[str] = collections.Counter()
        self._heights, self._widths = _Range(), _Range()
        self._channels: set[int] = set()
        self._depths: set[int] = set()

    def add(self, info: ImageInfo) -> None:
        self._encodings[info.encoding] += 1
        self._heights.add(info.height)
        self._widths.add(info.width)
        self._depths.add(info.bit_depth)
        is_wide = info.bit_depth > 8
        self._channels.add(info.channels if is_wide else 4 if info.alpha else 3 if info.palette else info.channels)

    def feature(self) -> Feature:
        sizes = [size.least if size.least == size.most else None for size in (self._heights, self._widths)]
        channels = next(iter(self._channels)) if len(self._channels) == 1 else 4 if 4 in self._channels else 3
        encoding = "jpeg" if set(self._encodings) == {"jpeg"} and channels != 4 else "png"
        dtype = "uint16" if self._depths == {16} else "uint8"
        return Image((*sizes, channels), encoding, dtype=dtype)  # type: ignore[arg-type]

    def __str__(self) -> str:
        encodings = ", ".join(name for name, _ in self._encodings.most_common())
        channels = " or ".join(map(str, sorted(self._channels)))
        plural = "" if self._channels == {1} else "s"
        return f"{encodings}, height {self._heights}, width {self._widths}, {channels} channel{plural}"


def _is_text(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or all(letter.isprintable() or letter in "\n\r\t" for letter in text)


def _shown_bytes(value: bytes) -> str:
    info = picture_of(value)
    if info is not None:
        return f"<{info.encoding}, {info.height} x {info.width}, {count_of(len(value), 'byte')}>"
    if _is_text(value):
        text = value.decode()
        return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
    return f"<{count_of(len(value), 'byte')}: {value[:16].hex(' ')}{' ...' if len(value) > 16 else ''}>"


# ---------------------------------------------------------------- messages
#
# The kind of a record's payload: `tf.train.Example`, `tf.train.SequenceExample`, or something else, from any writer.
#
# TFRecord and ArrayRecord files do not declare their payloads. A payload counts as a message only if every byte of its
# outer structure parses as one (tensorflow/core/example/example.proto); anything else is raw.


EXAMPLE, SEQUENCE, RAW = "tf.train.Example", "tf.train.SequenceExample", "raw payload"

Values: TypeAlias = "Sequence[bytes] | np.ndarray"
"""The values of one field of a record: a list of bytes, or a 1-D array of numbers."""

_LISTS = 2  # SequenceExample { Features context = 1; FeatureLists feature_lists = 2; }


def parse_payload(payload: bytes, *, joins_steps: bool = True) -> tuple[str, Mapping[str, Any]]:
    r"""Return the kind of a payload and its fields.

    A feature list becomes the field `NAME[]`: the values of all its steps concatenated, or a tuple of the values of
    each step. A raw payload is one field without a name.

    Example:
        >>> parse_payload(b"\n\x0f\n\r\n\x03key\x12\x06\n\x04\n\x02a1")
        ('tf.train.Example', {'key': [b'a1']})
        >>> parse_payload(b"anything")
        ('raw payload', {'': [b'anything']})
    """
    try:
        numbers = _message_fields(payload)
        if numbers == {1}:
            return EXAMPLE, _columns(payload)
        if numbers:
            lists = _feature_lists(payload)
            joined = {name: _joined(steps) if joins_steps else steps for name, steps in lists.items()}
            return SEQUENCE, {**_columns(payload), **joined}
    except (CorruptDataError, UnicodeDecodeError):
        pass
    return RAW, {"": [payload]}


def _message_fields(data: bytes) -> set[int]:
    """Return the numbers of the outer fields; empty if one is not a map of names.

    Raises:
        CorruptDataError: it is not a message at all.
    """
    numbers = set()
    for number, wire_type, start, stop in fields(data, 0, len(data)):
        if number not in {1, _LISTS} or wire_type != LEN:
            return set()
        numbers.add(number)
        for entry, entry_type, begin, end in fields(data, start, stop):
            inner = [(name, kind) for name, kind, _, _ in fields(data, begin, end)] if entry_type == LEN else []
            if entry != 1 or inner not in ([(1, LEN), (2, LEN)], [(1, LEN)], [(2, LEN), (1, LEN)]):
                return set()
    return numbers


def _feature_lists(data: bytes) -> dict[str, tuple[Values, ...]]:
    found: dict[str, tuple[Values, ...]] = {}
    for number, _, start, stop in fields(data, 0, len(data)):
        if number != _LISTS:
            continue
        for _, _, begin, end in fields(data, start, stop):
            name, steps = "", []
            for part, _, first, last in fields(data, begin, end):
                if part == 1:
                    name = data[first:last].decode()
                else:
                    steps += [_feature(data[a:b]) for _, _, a, b in fields(data, first, last)]
            found[f"{name}[]"] = tuple(steps)
    return found


def _feature(data: bytes) -> Values:
    """Decode one Feature, as if alone in an Example."""
    value = b"\x12" + varint(len(data)) + data
    entry = b"\x0a" + varint(len(value)) + value
    return _columns(b"\x0a" + varint(len(entry)) + entry)[""]


def _columns(data: bytes) -> dict[str, Values]:
    columns = decode_example(data)
    return {name: [values] if isinstance(values, bytes) else values for name, values in columns.items()}


def _joined(steps: Sequence[Values]) -> Values:
    arrays = [step for step in steps if isinstance(step, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    return [value for step in steps for value in step]


# ---------------------------------------------------------------- inspection
#
# The content of a file of records from any writer: number of records, fields, and damage.
#
#     first bytes ──> which format ──> records, one at a time ──> ColumnProfiler per field, the first records as text
#                                               └── damage: its place, and the number of records before it
#
# TFRecord (also gzip), Parquet, tar (also gzip), ArrayRecord, and finished directories of datamat. All checksums of the
# format are verified. Images are recognised by their headers and not decoded; memory does not grow with the file.


ReadRecord: TypeAlias = "Callable[[], tuple[str, Mapping[str, Values]]]"
"""Parses a record: returns its kind and its fields."""

_LOOKED_INTO = 100_000  # records whose fields are examined; others are only read and counted
_BATCH_ROWS = 64
_RECORDS_AT_ONCE = 16
_MOST_MEMBER_BYTES = 1 << 30  # largest member of an archive, which is read at once
_MOST_INFLATION = 1032  # maximum of deflate: 258 bytes from two bits
_BLOCK_BYTES = 512  # of a tar archive
_HEAD_BYTES = 1024
_LENGTH = struct.Struct("<Q")
_RIEGELI = bytes.fromhex("83af70d10d884a3f")  # hash of the first block's header, at the start of ArrayRecord files
_GZIP = b"\x1f\x8b"


@frozen()
class Description:
    """The description of a file; its `str` is the output of `datamat describe`.

    Attributes:
        path: the file or directory that was inspected.
        format: description of the file's format.
        num_bytes: size of the file, or of all shards.
        num_records: number of readable records.
        contents: number of records of each kind ("tf.train.Example"); for a directory, by split.
        fields: profile of each field, in order of appearance.
        num_looked_into: number of records described by `fields`.
        records: the first records, as text.
        problem: the first damage, with record, byte and reason; "" if there is none.
        statistics: for a finished directory, statistics of each field, by split and field, as in `Manifest.statistics`.
        equal_inputs: for a finished directory, rows whose input file also belongs to a row in another split.
    """

    path: str
    format: str
    num_bytes: int
    num_records: int
    contents: Mapping[str, int]
    fields: tuple[ColumnProfile, ...]
    num_looked_into: int
    records: tuple[str, ...] = ()
    problem: str = ""
    statistics: Mapping[str, Mapping[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    equal_inputs: EqualInputs = dataclasses.field(default_factory=EqualInputs)

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return not self.problem

    def __str__(self) -> str:
        contents = ", ".join(f"{count:,} {kind}" for kind, count in self.contents.items())
        in_brackets = f" ({contents})" if contents else ""
        number = count_of(self.num_records, "record")
        lines = [
            f"{self.path}: {self.format}, {count_of(self.num_bytes, 'byte')}, {number}{in_brackets}",
        ]
        if self.problem:
            lines.append(f"DAMAGED: {self.problem}")
        if self.equal_inputs:
            lines.append(f"{self.equal_inputs}")
        lines += _table(self.fields)
        if self.fields and self.num_looked_into < self.num_records:
            lines.append(f"fields as in the first {count_of(self.num_looked_into, 'record')}")
        for split, known in self.statistics.items():
            lines += [f"{split}: {field}: {summarized_in_words(summary)}" for field, summary in known.items()]
        return "\n".join([*lines, *self.records])

    def __repr__(self) -> str:
        state = "" if self.ok else ", DAMAGED"
        size = f"{count_of(self.num_records, 'record')}, {count_of(len(self.fields), 'field')}"
        return f"Description({self.path}: {self.format}, {size}{state})"

    def _repr_html_(self) -> str:
        facts = [
            ("path", self.path),
            ("format", self.format),
            ("bytes", f"{self.num_bytes:,}"),
            *((kind or "records", f"{count:,}") for kind, count in self.contents.items()),
            *([] if self.ok else [("DAMAGED", self.problem)]),
            *([("equal inputs", str(self.equal_inputs))] if self.equal_inputs else []),
        ]
        rows = [
            [one.name, one.kind, one.num_records, " to ".join(map(str, one.lengths)), one.details]
            for one in self.fields
        ]
        tables = [Table(["field", "kind", "records", "values", "details"], rows), statistics_table(self.statistics)]
        return render_html(f"Description: {count_of(self.num_records, 'record')}", facts, tables, self.records)


def describe(
    path: str | os.PathLike[str], *, records: int = 1, storage_options: Mapping[str, Any] | None = None
) -> Description:
    """Describe the content of a file of records or a finished directory.

    Args:
        path: a TFRecord, Parquet, tar or ArrayRecord file (TFRecord and tar may be gzipped), or a finished directory,
            whose manifest is read and whose first shard is inspected. Or any URL of one of these that fsspec can read;
            the file is copied to a temporary folder, and then removed.
        records: number of records to show.
        storage_options: fsspec options for the URL, such as `{"key": ..., "secret": ...}` or `{"anon": True}`.

    Returns:
        The description. Damage does not raise: `problem` gives its place, and everything before it still counts.

    Raises:
        InputError: the file's format is unknown.
        OutputError: there is no such file or finished directory, or the URL cannot be read.
        OSError: the file cannot be opened.
        CorruptDataError: it is a pipe or a device, or, in a directory, a link that leads out of it.
        MissingDependencyError: the package that reads the format is not installed.

    Example:
        >>> print(describe("train.tfrecord", records=2))   # doctest: +SKIP
    """
    if records < 0:
        raise OptionError(f"describe: records is {records}; want 0 or more")
    folder = open_folder(path, storage_options)
    files = FilesHere(folder)
    if files.fetch_if_there(MANIFEST_FILE, MOST_MANIFEST_BYTES):
        return _describe_directory(files, records)
    parent, name = open_file(path, storage_options)
    if not name or parent.stat(name) is None:
        raise OutputError(f"{folder} is not a file of records, and has no {MANIFEST_FILE}; correct the path or URL")
    files = FilesHere(parent)
    files.fetch_if_there(name, _ANY_SIZE)
    return _describe_file(files, files.path / name, parent.place(name), records)


def _describe_directory(files: FilesHere, records: int) -> Description:
    manifest = files.manifest()
    info = next((info for info in manifest.shards if info.num_records), manifest.shards[0])
    sizes = {index.file: index.num_bytes for index in manifest.index if index.kind == "index"}
    if sum(sizes.values()) <= _MOST_INDEX_BYTES:
        files.fetch_all(sizes)
    path = files.listed(info)
    shard = _describe_file(files, path, files.root.place(info.file), records)
    if not shard.problem and (found := info.differences_of(path)):
        what = next(iter(found.values()))
        shard = dataclasses.replace(shard, problem=f"it {what}: it is not the file that {MANIFEST_FILE} lists")
    return dataclasses.replace(
        shard,
        path=str(files.root),
        format=f"finished directory of {count_of(len(manifest.shards), 'shard')}, {manifest.format}",
        num_bytes=manifest.num_bytes,
        num_records=manifest.num_records,
        contents={split: sum(info.num_records for info in infos) for split, infos in manifest.splits.items()},
        problem=f"{info.file}: {shard.problem}" if shard.problem else "",
        statistics=manifest.statistics,
        equal_inputs=equal_inputs(files.path, manifest.splits),
    )


def _describe_file(files: FilesHere, path: pathlib.Path, place: str, most_shown: int) -> Description:
    try:
        format_name, read = _format_of(path)
    except InputError as error:
        raise InputError(files.named(str(error))) from None
    finders: dict[str, ColumnProfiler] = {}
    contents: collections.Counter[str] = collections.Counter()
    number, texts, problem = 0, [], ""
    try:
        for look in read(path):
            if number < max(_LOOKED_INTO, most_shown):
                kind, values = look()
                contents[kind] += 1
                for field, value in values.items():
                    finders.setdefault(field, ColumnProfiler(field)).add(value)
                if number < most_shown:
                    texts.append(_record_text(number, kind, values))
            number += 1
    except CorruptDataError as error:
        problem = files.named(f"record {number}: {error}; {number:,} records can be read before it")
    return Description(
        place,
        format_name,
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
    return "\n".join(
        [f"{title}:", *(f"  {name or '(payload)'}: {preview_values(value)}" for name, value in values.items())]
    )


def _table(fields: tuple[ColumnProfile, ...]) -> list[str]:
    rows = [
        (
            field.name or "(payload)",
            field.kind,
            str(field.lengths[0]) if field.lengths[0] == field.lengths[1] else "{} to {}".format(*field.lengths),
            field.details,
            _declaration(field.feature) if field.feature is not None else "",
        )
        for field in fields
    ]
    head = ("field", "kind", "values", "details", "as a feature")
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _declaration(feature: Feature) -> str:
    """Return a feature as source code, without defaults."""
    fields = {field.name: field for field in dataclasses.fields(feature)}  # type: ignore[arg-type]  # all are dataclasses
    given = {name: getattr(feature, name) for name, field in fields.items() if getattr(feature, name) != field.default}
    return f"{type(feature).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def _format_of(path: pathlib.Path) -> tuple[str, Callable[[pathlib.Path], Iterator[ReadRecord]]]:
    """Return the format of a file, by its first bytes, and its reader; raise `InputError` if it is unknown."""
    with open_regular(path) as file:
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
    """Return True if bytes begin like a TFRecord: with a length and its checksum."""
    return len(head) >= FRAMING_BYTES and frame([b""], _LENGTH.unpack_from(head)[0])[0] == head[:12]


def _read_tfrecord(path: pathlib.Path, *, packed: bool) -> Iterator[ReadRecord]:
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


def _read_arrayrecord(path: pathlib.Path) -> Iterator[ReadRecord]:
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


def _read_parquet(path: pathlib.Path) -> Iterator[ReadRecord]:
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
    """Return a cell of a table as the values of a record, with lists flattened; None for null."""
    import pyarrow as pa
    from pyarrow import types

    if not scalar.is_valid:
        return None
    array = scalar.values if _is_list(scalar.type) else pa.array([scalar], scalar.type)
    while _is_list(array.type):
        array = array.flatten()
    is_number = types.is_boolean(array.type) or types.is_integer(array.type) or types.is_floating(array.type)
    if is_number and not array.null_count:
        numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
        return numbers
    try:
        found = array.to_pylist()
    except OverflowError:  # times outside the years of `datetime`
        found = array.to_numpy(zero_copy_only=False).tolist()
    return [_bytes_of(value) for value in found]


def _is_list(arrow_type: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):  # an image of Hugging Face `datasets`
        value = value["bytes"]
    return value if isinstance(value, bytes) else str(value).encode()


def _read_tar(path: pathlib.Path) -> Iterator[ReadRecord]:
    """Yield the samples of an archive: consecutive members with the same name before the first dot."""
    sample: dict[str, Values] = {}
    current = failure = None
    try:
        with tarfile.open(path, "r:*") as archive:
            for name, data in _files_of(archive, min(_MOST_MEMBER_BYTES, path.stat().st_size * _MOST_INFLATION)):
                if current not in (None, stem := _sample_name(name)):
                    yield functools.partial(_as_it_is, sample)
                    sample = {}
                current = stem
                sample[_sample_name(name, ending=True)] = [data]
            _check_end(archive)
    except (tarfile.TarError, CorruptDataError, EOFError, OSError, OverflowError, ValueError, zlib.error) as error:
        failure = error
    if sample:  # its members are complete
        yield functools.partial(_as_it_is, sample)
    if failure is not None:
        raise CorruptDataError(str(failure)) from failure


def _as_it_is(sample: dict[str, Values]) -> tuple[str, dict[str, Values]]:
    return "", sample


def _files_of(archive: tarfile.TarFile, most_bytes: int) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        if not 0 <= member.size <= most_bytes:
            raise CorruptDataError(
                f"{member.name}: its header says {member.size:,} bytes; want 0 to {most_bytes:,}, which is all that "
                "this file can hold and describe reads"
            )
        archive.members = []  # type: ignore[attr-defined]  # otherwise the archive keeps them all
        if member.isfile():
            file = archive.extractfile(member)
            yield member.name, file.read() if file else b""


def _sample_name(name: str, *, ending: bool = False) -> str:
    directory, slash, base = name.rpartition("/")
    stem, _, endings = base.partition(".")
    return endings if ending else directory + slash + stem


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise if an archive does not end properly: `tarfile` mistakes a damaged header for the end."""
    file: BinaryIO = archive.fileobj  # type: ignore[assignment]  # it was opened from a path
    file.seek(archive.offset)
    block = file.read(_BLOCK_BYTES)
    if not block:
        raise CorruptDataError("the archive does not end in blocks of zeros: it was cut off")
    if any(block):
        raise CorruptDataError(f"at byte {archive.offset:,}: no header of a member, and no end of the archive")
