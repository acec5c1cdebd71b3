"""WebDataset shards: tar archives in which the members of a sample are adjacent and share the name before the dot.

    KEY.image.png     a member for each image, mask and tensor: KEY.FIELD.EXTENSION; none if the value is None
    KEY.mask.png
    KEY.points.npy
    KEY.views.0.png   a member for each file in a list: KEY.FIELD.NUMBER.EXTENSION
    KEY.json          everything else, by feature name: {"boxes": [[...]], "key": "...", "label": 3}

`tar_form` decides the form of a field. WebDataset takes everything before the first dot of the base name as the key, so
`_member_key` writes dots, and other characters that would mislead a reader, as %XX; the key itself is in the JSON.
Times, owners and order of members are fixed, so equal samples give equal bytes and parts can be joined. The archive
ends in two blocks of zeros, the trailer; a file without them is incomplete.

A tar archive protects its headers with checksums, but not its data: PNG has its own, and the manifest's checksum of the
whole file shows any change.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TypeAlias, final

import numpy as np
import xxhash

from datamat.errors import CorruptDataError, SchemaError, count_of
from datamat.features import (
    Audio,
    BBoxes,
    ClassLabel,
    Feature,
    Json,
    Keypoints,
    ListOf,
    Nullable,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
)
from datamat.features.audio import sound_extension
from datamat.features.base import (
    as_bfloat16,
    by_column,
    dtype_of,
    holds_numbers,
    ragged,
    rows_of,
    values_of,
    whole,
)
from datamat.features.pictures import PictureFile, picture_extension
from datamat.features.video import video_extension
from datamat.formats import Block, Buffer, Offsets, Record, ShardFormat, ShardReader, ShardWriter
from datamat.formats.example import check_block, checked_record
from datamat.formats.io import BufferedFile, RangeReader, bound, located, read_up_to, refuse_finished
from datamat.values import frozen

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from datamat.features import Features
    from datamat.features.base import ArrowType, Column, Kind
    from datamat.formats import RecordSpans


# ---------------------------------------------------------------- members of an archive
#
# Members of tar archives: headers, written and read one at a time; equal members have equal headers.
#
# POSIX 1003.1 calls the form ustar: a header of 512 bytes, the data, zeros up to the next multiple of 512. Times are 0,
# owners root without a name, modes 0644. Names are UTF-8, as every reader in use assumes.
#
# A header holds a name of 100 bytes: here up to 70 before the first dot, and up to 30 from there on. A longer name goes
# into a pax header before it (`path`), which tar, Python and webdataset read. Readers that skip pax headers (wids) find
# a short name in the header itself: the beginning of the long one with a digest, and its extensions. Each half is
# shortened on its own, so the members of a sample still share the name before the dot.


BLOCK_BYTES = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)

_OCTAL = re.compile(rb"[0-7]+")
_NAME_BYTES = 100
_STEM_BYTES = 70
_LARGEST = 8**11 - 1  # the largest number of eleven octal digits
_REST = b"ustar\x0000" + bytes(247)  # owners' names, device, prefix and padding: none


class Member(NamedTuple):
    """The content of a header."""

    name: str
    size: int
    type: bytes
    """b"0" for a file, b"x" for a pax header."""

    @property
    def padded(self) -> int:
        """Bytes of the data in the archive, including padding."""
        return -(-self.size // BLOCK_BYTES) * BLOCK_BYTES


def member(name: str, data: bytes) -> list[bytes]:
    """Return a file as an archive member, in pieces, without copying the data; raise `SchemaError` over 8 GiB."""
    if len(data) > _LARGEST:
        raise SchemaError(f"member {name!r} has {len(data)} bytes; a tar archive allows {_LARGEST}; split the sample")
    encoded = name.encode()
    short = _shortened(encoded)
    pax = [] if short == encoded else _stored(b"././@PaxHeader", _pax_record(b"path", encoded), b"x")
    return [*pax, *_stored(short, data, b"0")]


def parse_header(block: Buffer) -> Member:
    """Return the content of a header of 512 bytes.

    Raises:
        CorruptDataError: it is not a ustar header, or was changed.
    """
    raw = bytes(block)
    if len(raw) < BLOCK_BYTES:
        raise CorruptDataError(f"the data ends inside a tar header, after {len(raw)} of its {BLOCK_BYTES} bytes")
    # The sum of all bytes, with the field itself read as spaces.
    stored, found = raw[148:156], b"%06o\0 " % (sum(raw[:148]) + sum(raw[156:]) + 8 * ord(" "))
    if stored != found:
        raise CorruptDataError(f"the checksum of the tar header is {found!r}, but {stored!r} is stored")
    if raw[257:265] != b"ustar\x0000" or raw[156:157] not in (b"0", b"x"):
        raise CorruptDataError(
            f"the tar header is of kind {raw[257:265]!r} and type {raw[156:157]!r}, want ustar and a file"
        )
    size = raw[124:136].rstrip(b"\0 ")
    try:
        if not _OCTAL.fullmatch(size):  # `int` would accept a sign, too
            raise ValueError(f"the size is {size!r}")
        return Member(raw[:_NAME_BYTES].rstrip(b"\0").decode(), int(size, 8), raw[156:157])
    except ValueError as exc:
        raise CorruptDataError(f"the tar header has a broken name or size ({exc})") from exc


def read_pax_path(data: bytes) -> str:
    """Return the name of the next member in a pax header.

    Raises:
        CorruptDataError: the header does not contain exactly one `path`.
    """
    length, _, rest = data.partition(b" ")
    if length != b"%d" % len(data) or not rest.startswith(b"path=") or not rest.endswith(b"\n"):
        raise CorruptDataError(f"the pax header holds {data[:40]!r}; want the name of the next member")
    try:
        return rest[5:-1].decode()
    except UnicodeDecodeError as exc:
        raise CorruptDataError(f"the name in the pax header is not UTF-8 ({exc})") from exc


def _stored(name: bytes, data: bytes, kind: bytes) -> list[bytes]:
    """Return header, data and padding."""
    head, rest, total = _parts_of_header(len(data), kind)
    checksum = b"%06o\0 " % (total + sum(name))
    return [name.ljust(_NAME_BYTES, b"\0") + head + checksum + rest, data, bytes(-len(data) % BLOCK_BYTES)]


@functools.lru_cache(maxsize=256)  # the sum takes half of the time, and most members have a few sizes
def _parts_of_header(size: int, kind: bytes) -> tuple[bytes, bytes, int]:
    """Return the bytes between name and checksum, the bytes after it, and the checksum without the name."""
    head = b"0000644\x000000000\x000000000\x00%011o\x0000000000000\x00" % size
    rest = kind + bytes(_NAME_BYTES) + _REST
    return head, rest, sum(head) + sum(rest) + 8 * ord(" ")


def _pax_record(key: bytes, value: bytes) -> bytes:
    """Return `LENGTH key=value` and a newline; LENGTH counts everything, including itself."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


def _shortened(name: bytes) -> bytes:
    """Return a name that fits into a header, unchanged if possible."""
    folder, slash, base = name.rpartition(b"/")
    stem, dot, extensions = base.partition(b".")
    stem = folder + slash + stem
    if len(stem) > _STEM_BYTES:
        digest = b"~" + xxhash.xxh3_64_hexdigest(stem).encode()
        begin = base.partition(b".")[0][: _STEM_BYTES - len(digest)]
        stem = begin.decode(errors="ignore").encode() + digest  # never inside a character
    room = _NAME_BYTES - _STEM_BYTES - len(dot)
    return stem + dot + extensions[-room:].decode(errors="ignore").encode()


OUTPUT_VERSION = 1
"""Incremented when the same records give different bytes; shards of the format are then rebuilt."""

_UNSAFE = re.compile(
    r"[%.\\\x00-\x1f\x7f]"  # a dot ends the key; the others trip up tools
    r"|(?:(?<=/)|^)/|/$"  # a leading, trailing or double slash makes another file name when unpacked
    r"|^_(?=_)"  # webdataset skips folders that begin and end with two underscores
)


@final
@frozen()
class WebDatasetFormat(ShardFormat):
    """Tar archives for webdataset, wids, Hugging Face `datasets` and DALI.

    Args:
        features: features of the records; `with_features` sets them.
    """

    name = "webdataset"
    extension = "tar"
    joins_parts = True
    reads_ranges = True
    gains_from_threads = False

    features: Features | None = None

    def options(self) -> dict[str, str | int | float | bool | None]:
        return {}

    def with_features(self, features: Features) -> WebDatasetFormat:
        """Return the format for these features; raise `SchemaError` if two names differ by case alone."""
        lowered: dict[str, str] = {}
        for name in features:
            other = lowered.setdefault(name.lower(), name)
            if other != name:
                raise SchemaError(
                    f"fields {other!r} and {name!r} are the same to webdataset, which ignores case; rename one"
                )
        return WebDatasetFormat(features)

    def writer(self, file: BinaryIO, columns: Mapping[str, Kind]) -> ShardWriter:
        return _WebDatasetWriter(file, columns, bound(self.features, self.name))

    def trailer(self, file: BinaryIO, parts: Sequence[tuple[int, int]]) -> bytes:
        del file, parts
        return END_OF_ARCHIVE

    def reader(self, path: str | os.PathLike[str], spans: RecordSpans) -> ShardReader:
        return RangeReader(path, spans, self._read_record)

    def _read_record(self, buffer: Buffer, skip: int) -> dict[str, Column]:
        """Decode the sample whose members fill the buffer."""
        del skip
        file = io.BytesIO(buffer)
        found = self._read_sample(file)
        if found is None or file.tell() != len(buffer):
            raise CorruptDataError(
                f"the sample has {count_of(file.tell(), 'byte')}, but the index says {len(buffer):,}"
            )
        return found

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Column], tuple[int, ...]]]:
        """Yield each sample with the offset of its first header and its length."""
        offset = 0
        for number in itertools.count():
            try:
                record = self._read_sample(file)
            except CorruptDataError as exc:
                raise located(exc, path, number, offset) from exc
            if record is None:
                return
            end = file.tell()
            yield record, (offset, end - offset)
            offset = end

    def _read_sample(self, file: BinaryIO) -> dict[str, Column] | None:
        """Return the record of the next sample, or None at the end of the archive."""
        members: dict[str, bytes] = {}
        key = name = ""
        while not name.endswith(".json"):
            found = _read_member(file)
            if found is None:
                if members:
                    raise CorruptDataError(f"the archive ends inside the sample {key!r}, which has no .json")
                return None
            name, data = found
            directory, slash, base = name.rpartition("/")
            stem, _, extensions = base.partition(".")
            if members and directory + slash + stem != key:
                raise CorruptDataError(f"the sample {key!r} has no .json before {name!r} of another sample")
            key = directory + slash + stem
            members[extensions] = data
        return _record(members, _fields(bound(self.features, self.name)))


@final
class _WebDatasetWriter(ShardWriter):
    """Writes each sample as a run of members."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, Kind], features: Features) -> None:
        self._columns = dict(columns)
        self._fields = _fields(features)
        self._file = BufferedFile(file)
        self._sizes = array("Q")
        self._finished = False

    @property
    def num_records(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def append(self, record: Record) -> None:
        refuse_finished(self._finished)
        pieces = _members(checked_record(record, self._columns), self._fields)
        self._file.add(pieces)
        self._sizes.append(sum(map(len, pieces)))

    def append_block(self, columns: Block) -> None:
        refuse_finished(self._finished)
        if check_block(columns, self._columns):
            for pieces in _block_members(columns, self._fields):
                self._file.add(pieces)
                self._sizes.append(sum(map(len, pieces)))

    def finish(self) -> Offsets:
        refuse_finished(self._finished)
        self._finished = True
        self._file.flush()
        sizes = np.array(self._sizes, np.uint64)
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@frozen()
class TarForm:
    """The form of a field in a tar shard.

    Attributes:
        kind: "json" puts a value into the .json file of the sample, "npy" into a separate array file; both encode it
            again when a record is read, which must give the same columns. "file" stores each column as a file: bytes
            with the extension from `extension`, numbers as .npy.
        extension: function of a bytes column that returns the extension of its file, without the dot.
        to_json: function of a decoded value that returns its JSON form.
        of_json: function of the JSON form that returns an argument for `Feature.encode`; raises `ValueError` if it is
            not valid.
    """

    kind: Literal["json", "npy", "file"] = "file"
    extension: Callable[[bytes], str] = lambda _: "bin"
    to_json: Callable[[Any], Any] = _plain
    of_json: Callable[[Any], Any] = _plain


@functools.singledispatch
def tar_form(feature: Feature) -> TarForm:
    """Return the form of a field in a tar shard; columns of unknown types are files.

    Workers also use this, so types cannot be registered by users: a registration in `__main__` would not reach workers.
    """
    del feature
    return TarForm()


for _kind, _form in {
    Tensor: TarForm("npy"),
    Tokens: TarForm("npy"),
    Polygons: TarForm("json", to_json=lambda value: [row[~np.isnan(row[:, 0])].tolist() for row in value]),
    PictureFile: TarForm(extension=picture_extension),
    Audio: TarForm(extension=lambda data: sound_extension(data) or "bin"),
    Video: TarForm(extension=lambda data: video_extension(data) or "bin"),
}.items():
    tar_form.register(_kind, functools.partial(lambda found, _: found, _form))


@tar_form.register(ClassLabel)
@tar_form.register(BBoxes)
@tar_form.register(Text)
@tar_form.register(Json)
@tar_form.register(Scalar)
@tar_form.register(Keypoints)
def _(feature: Feature) -> TarForm:
    dtype, shape = feature.value_type()
    if dtype.startswith("complex"):  # not in JSON
        return TarForm("npy")

    def of_json(plain: Any) -> Any:
        array = np.asarray(plain, dtype_of(dtype))
        return array.reshape([-1 if size is None else size for size in shape]) if shape else array[()]

    return TarForm("json", of_json=of_json if holds_numbers(dtype) else _plain)


@tar_form.register(Timestamp)
def _(feature: Timestamp) -> TarForm:
    zone = "" if feature.tz is None else "Z"
    return TarForm(
        "json",
        to_json=lambda value: str(np.datetime_as_string(value)) + zone,  # ISO 8601
        of_json=lambda plain: np.datetime64(plain.removesuffix("Z"), "us"),
    )


@tar_form.register(Nullable)
def _(feature: Nullable) -> TarForm:
    one = tar_form(feature.feature)
    return TarForm(
        one.kind,
        one.extension,
        lambda value: None if value is None else one.to_json(value),
        lambda plain: None if plain is None else one.of_json(plain),
    )


@tar_form.register(ListOf)
def _(feature: ListOf) -> TarForm:
    if feature.array and not feature.has_gaps:
        return tar_form(feature.array)
    one = tar_form(feature.feature)
    return TarForm(
        "json" if one.kind == "json" else "file",
        one.extension,
        lambda value: [one.to_json(item) for item in value],
        lambda plain: [one.of_json(item) for item in plain],
    )


_Fields: TypeAlias = Mapping[str, "tuple[Feature, TarForm, Mapping[str, ArrowType]]"]


@functools.lru_cache(maxsize=16)
def _fields(features: Features) -> _Fields:
    """Return feature, form and columns of each field, the columns by suffix."""
    return {name: (feature, tar_form(feature), feature.columns("")) for name, feature in features.items()}


def _of_field(name: str, types: Mapping[str, ArrowType], columns: Mapping[str, Any]) -> Any:
    """Return the columns of a field in its feature's form."""
    return whole({part: columns[name + part] for part in types})


def _members(record: Mapping[str, Any], fields: _Fields) -> list[bytes]:
    """Return the members of one sample, in pieces."""
    key = _member_key(record["key"].decode())
    pieces: list[bytes] = []
    plain: dict[str, Any] = {}
    for name, (feature, form, types) in fields.items():
        if form.kind == "json":
            plain[name] = form.to_json(feature.decode(_of_field(name, types, record)))
        elif form.kind == "npy":
            value = feature.decode(_of_field(name, types, record))
            if value is not None:
                pieces += member(f"{key}.{_member_field(name)}.npy", _npy(value))
        else:
            for part, stored in types.items():
                for extension, data in _files(form, record[name + part], is_one=_is_one(stored)):
                    pieces += member(f"{key}.{_member_field(name + part)}.{extension}", data)
    return pieces + member(f"{key}.json", _to_json(plain).encode())


_to_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def _block_members(columns: Block, fields: _Fields) -> Iterator[list[bytes]]:
    """Yield the members of each sample of a block, in pieces."""
    files: list[tuple[str, Sequence[Sequence[tuple[str, bytes]]]]] = []
    plain: dict[str, Sequence[Any]] = {}
    for name, (feature, form, types) in fields.items():
        if form.kind == "json":
            plain[name] = [form.to_json(value) for value in _decoded(feature, _of_field(name, types, columns))]
        elif form.kind == "npy":
            files.append((_member_field(name), _npy_files(_decoded(feature, _of_field(name, types, columns)))))
        else:
            for part, stored in types.items():
                values, is_one = values_of(columns[name + part]), _is_one(stored)
                files.append((_member_field(name + part), [_files(form, value, is_one=is_one) for value in values]))
    for row, key in enumerate(_decoded(fields["key"][0], columns["key"])):
        stem = _member_key(key)
        pieces: list[bytes] = []
        for field, found in files:
            for extension, data in found[row]:
                pieces += member(f"{stem}.{field}.{extension}", data)
        text = _to_json({name: values[row] for name, values in plain.items()})
        yield pieces + member(f"{stem}.json", text.encode())


def _decoded(feature: Feature, stored: Any) -> Sequence[Any]:
    """Return the values of a field in a block."""
    columns = by_column("", stored)
    if feature.decodes_many():
        found = feature.decode_many(whole({part: ragged(values) for part, values in columns.items()}))
        if found is not None:
            return list(found)
    return [feature.decode(whole(row)) for row in rows_of(columns)]


def _npy_files(values: Sequence[Any]) -> list[list[tuple[str, bytes]]]:
    """Return extension and content of each value's .npy file; nothing for None."""
    heads: dict[Any, bytes] = {}
    files: list[list[tuple[str, bytes]]] = []
    for found in values:
        if found is None:
            files.append([])
            continue
        value = _in_npy(found)
        kind = value.dtype.str, value.shape
        if kind not in heads:
            heads[kind] = _npy(np.empty(value.shape, value.dtype))[: -value.nbytes or None]
        files.append([("npy", heads[kind] + value.tobytes())])
    return files


def _record(members: Mapping[str, bytes], fields: _Fields) -> dict[str, Column]:
    """Return the record of a sample.

    Args:
        members: content of each member, by its name without the key.
        fields: the fields of the record, which define the members.
    """
    record: dict[str, Any] = {}
    try:
        plain = json.loads(members["json"])
        files = {name.partition(".")[0]: data for name, data in members.items() if "." in name}
        for name, (feature, form, types) in fields.items():
            if form.kind == "file":
                for part, stored in types.items():
                    field = _member_field(name + part)
                    if stored.kind == "bytes_list":
                        record[name + part] = _list_of_files(members, field)
                    else:
                        record[name + part] = [files[field]] if stored.kind == "bytes" else _array(files[field])
                continue
            if form.kind == "json":
                value = form.of_json(plain[name])
            elif isinstance(feature, Nullable) and _member_field(name) not in files:
                value = None
            else:
                value = _array(files[_member_field(name)])
                if feature.value_type()[0] == "bfloat16":
                    value = as_bfloat16(value)
            for column, found in by_column(name, feature.encode(value)).items():
                record[column] = [found] if isinstance(found, bytes) else found
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(
            f"the sample with the members {', '.join(sorted(members))} does not match the features ({exc!r})"
        ) from exc
    return record


def _is_one(stored: ArrowType) -> bool:
    """Return True if a column holds at most one value rather than a list."""
    return stored.is_nullable and (stored.holds_numbers or not stored.sizes)


def _files(form: TarForm, column: Column, *, is_one: bool) -> list[tuple[str, bytes]]:
    """Return extension and content of a column's files: one, or one for each value of a list."""
    if isinstance(column, bytes):
        return [(form.extension(column), column)]
    if isinstance(column, np.ndarray):
        return [("npy", _npy(column))]
    number = "" if is_one else "{}."  # a single file needs no number
    return [(number.format(place) + form.extension(value), value) for place, value in enumerate(column)]


def _list_of_files(members: Mapping[str, bytes], field: str) -> list[bytes]:
    """Return the files of a list, in order of their numbers."""
    names = [name.split(".") for name in members if name.startswith(f"{field}.")]
    found = sorted(names, key=lambda parts: int(parts[1]) if len(parts) > 2 else 0)
    return [members[".".join(parts)] for parts in found]


def _in_npy(value: Any) -> np.ndarray:
    """Convert an array to a dtype of numpy for a file: bfloat16 to float32, which is exact."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(_in_npy(value), order="C"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> np.ndarray:
    """Return the array of an .npy file; `numpy.load` would allocate the size claimed in the header first."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("the .npy file is not of version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)


def _member_key(key: str) -> str:
    if not key:
        raise SchemaError("the key is empty, so no member of a tar archive can bear it; give the row a key")
    return _escaped(key)


def _member_field(name: str) -> str:
    return _escaped(name).replace("/", "%2F")


def _escaped(text: str) -> str:
    """Return the text with each unsafe character as %XX, so that distinct texts stay distinct."""
    return _UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", text)


def _read_member(file: BinaryIO) -> tuple[str, bytes] | None:
    """Return name and data of the next member, or None at the end of the archive."""
    header = file.read(BLOCK_BYTES)
    if header == END_OF_ARCHIVE[:BLOCK_BYTES]:
        rest = file.read(2 * BLOCK_BYTES)
        if rest != END_OF_ARCHIVE[BLOCK_BYTES:]:
            raise CorruptDataError(f"{len(rest)} bytes follow the first zero block; want another zero block")
        return None
    found = parse_header(header)
    data = _read_data(file, found)
    if found.type == b"x":
        following = parse_header(file.read(BLOCK_BYTES))
        return read_pax_path(data), _read_data(file, following)
    return found.name, data


def _read_data(file: BinaryIO, header: Member) -> bytes:
    data = read_up_to(file, header.padded)
    if len(data) < header.padded:
        raise CorruptDataError(
            f"the data ends inside the member {header.name!r}, after {len(data)} of {header.padded} bytes"
        )
    return data[: header.size]
