"""WebDataset shards: tar archives where the members of one sample stand together and share the name before the dot.

    KEY.image.png     a member for each picture, mask and tensor: KEY.FIELD.EXTENSION
    KEY.mask.png
    KEY.points.npy
    KEY.json          everything else, by feature name: {"boxes": [[...]], "key": "...", "label": 3}

WebDataset takes all before the first dot of the base name for the key, so `_member_key` writes dots, and what else
would lead a reader astray, as %XX; the key itself is in the JSON. `ustar` has the bytes of a member: they hold no time,
owner or order that is not ours, so equal samples are equal bytes and parts can be joined. The archive ends in two
blocks of zeros, the trailer, and a file without them is not whole.

A tar archive protects its headers with checksums, but not its data: PNG has its own, and the manifest's checksum of the
whole file shows any change.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, final

import numpy as np

from datamat.errors import CorruptDataError, SchemaError
from datamat.features import BBoxes, ClassLabel, Image, Mask, Scalar, Text
from datamat.formats import Block, Buffer, ColumnKind, Offsets, Record, ShardFormat, ShardReader, ShardWriter, Value
from datamat.formats.block import check_block, checked_record, row_of
from datamat.formats.buffered import BufferedFile, read_up_to
from datamat.formats.guards import bound, located, refuse_finished
from datamat.formats.ranges import RangeReader
from datamat.formats.ustar import BLOCK_BYTES, END_OF_ARCHIVE, member, parse_header, read_pax_path

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from datamat.features import Feature, Features
    from datamat.formats import Places
    from datamat.formats.ustar import Member

__all__ = ["WebDatasetFormat"]

_UNSAFE = re.compile(
    r"[%.\\\x00-\x1f\x7f]"  # a dot ends the key; the others are at odds with tools
    r"|(?:(?<=/)|^)/|/$"  # a name that begins or ends in a slash, or holds two, is another file once unpacked
    r"|^_(?=_)"  # webdataset passes over folders that begin and end in two underscores
)
_JPEG = b"\xff\xd8"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class WebDatasetFormat(ShardFormat):
    """Tar archives as webdataset, wids, Hugging Face `datasets` and DALI read them.

    Args:
        features: of the records; `with_features` gives them.
    """

    name = "webdataset"
    extension = "tar"
    joins_parts = True
    trailer = END_OF_ARCHIVE

    features: Features | None = None

    def options(self) -> dict[str, str | int | float | bool | None]:
        """Return no options: there is one way to write the format."""
        return {}

    def with_features(self, features: Features) -> WebDatasetFormat:
        """Return the format for these features; raises `SchemaError` where two names differ by case alone."""
        lowered: dict[str, str] = {}
        for name in features:
            other = lowered.setdefault(name.lower(), name)
            if other != name:
                raise SchemaError(
                    f"fields {other!r} and {name!r} are one to webdataset, which lowers the case of names; rename one"
                )
        return WebDatasetFormat(features)

    def writer(self, file: BinaryIO, columns: Mapping[str, ColumnKind]) -> ShardWriter:
        """Return a writer of samples, each as members that stand together."""
        return _WebDatasetWriter(file, columns, bound(self.features, self.name))

    def reader(self, path: str | os.PathLike[str], places: Places) -> ShardReader:
        """Return a reader by ranges."""
        return RangeReader(path, places, self.read_record)

    def read_record(
        self, buffer: Buffer, *, skip: int = 0, path: str = "", number: int = 0, offset: int = 0
    ) -> dict[str, Value]:
        """Decode the sample whose members fill the buffer."""
        del skip
        file = io.BytesIO(buffer)
        try:
            found = self._read_sample(file)
            if found is None or file.tell() != len(buffer):
                raise CorruptDataError(f"the sample has {file.tell()} bytes, but the index says {len(buffer)}")
            return found
        except CorruptDataError as exc:
            raise located(exc, path, number, offset) from exc

    def read_file(self, file: BinaryIO, *, path: str) -> Iterator[tuple[dict[str, Value], tuple[int, ...]]]:
        """Yield each sample with the offset of its first header and its bytes."""
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

    def _read_sample(self, file: BinaryIO) -> dict[str, Value] | None:
        """Return the record of the next sample, None at the end of the archive."""
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
                raise CorruptDataError(f"the sample {key!r} has no .json, and {name!r} of another one follows")
            key = directory + slash + stem
            members[extensions] = data
        return _record(members, bound(self.features, self.name))


@final
class _WebDatasetWriter(ShardWriter):
    """Writes each sample as one run of members."""

    __slots__ = ("_columns", "_features", "_file", "_finished", "_sizes")

    def __init__(self, file: BinaryIO, columns: Mapping[str, ColumnKind], features: Features) -> None:
        self._columns = dict(columns)
        self._features = features
        self._file = BufferedFile(file)
        self._sizes = array("Q")
        self._finished = False

    @property
    def num_records(self) -> int:
        """How many samples were appended."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """How many bytes of file they make so far."""
        return self._file.num_bytes

    def append(self, record: Record) -> None:
        """Append one sample."""
        refuse_finished(self._finished)
        pieces = _members(checked_record(record, self._columns), self._features)
        self._file.add(pieces)
        self._sizes.append(sum(map(len, pieces)))

    def append_block(self, columns: Block) -> None:
        """Append n samples, one by one."""
        refuse_finished(self._finished)
        for index in range(check_block(columns, self._columns)):
            self.append(row_of(columns, index))

    def finish(self) -> Offsets:
        """Write what is still buffered and return where the samples lie."""
        refuse_finished(self._finished)
        self._finished = True
        self._file.flush()
        sizes = np.array(self._sizes, np.uint64)
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)


def _members(record: Mapping[str, Any], features: Features) -> list[bytes]:
    """Return the members of one sample, in pieces."""
    key = _member_key(record["key"].decode())
    pieces: list[bytes] = []
    plain: dict[str, Any] = {}
    for name, feature in features.items():
        if isinstance(feature, (Image, Mask)):
            data = record[name]
            pieces += member(f"{key}.{_member_field(name)}.{'jpg' if data.startswith(_JPEG) else 'png'}", data)
            continue
        value = feature.decode(name, record)
        if _is_plain(feature):
            plain[name] = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        else:
            pieces += member(f"{key}.{_member_field(name)}.npy", _npy(value))
    text = json.dumps(plain, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return pieces + member(f"{key}.json", text.encode())


def _record(members: Mapping[str, bytes], features: Features) -> dict[str, Value]:
    """Return the record of a sample from its members, by their names without the key."""
    record: dict[str, Any] = {}
    try:
        plain = json.loads(members["json"])
        for name, feature in features.items():
            ending = _member_field(name)
            if isinstance(feature, (Image, Mask)):
                record[name] = [members[f"{ending}.png"] if f"{ending}.png" in members else members[f"{ending}.jpg"]]
                continue
            value = plain[name] if _is_plain(feature) else _array(members[f"{ending}.npy"])
            for column, found in feature.encode(name, _typed(feature, value)).items():
                record[column] = [found] if isinstance(found, bytes) else found
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptDataError(
            f"the sample with the members {', '.join(sorted(members))} is not as the features say ({exc!r})"
        ) from exc
    return record


def _is_plain(feature: Feature) -> bool:
    """Tell whether values go into the JSON: it has no complex numbers, and arrays are faster apart."""
    if isinstance(feature, Scalar):
        return np.dtype(feature.dtype).kind != "c"
    return isinstance(feature, (Text, ClassLabel, BBoxes))


def _typed(feature: Feature, value: Any) -> Any:
    """Return a value from the JSON or an array file as `feature.encode` wants it."""
    if isinstance(feature, Scalar):
        return np.asarray(value, feature.dtype)[()]
    return np.asarray(value, np.float32).reshape(-1, 4) if isinstance(feature, BBoxes) else value


def _npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value, order="C"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> np.ndarray:
    """Return the array of an .npy file, which `numpy.load` would make room for before it looks whether it is there."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("the array file is not of version 1.0")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)


def _member_key(key: str) -> str:
    if not key:
        raise SchemaError("the key is empty, which no member of a tar archive can be named after; give the row a key")
    return _escaped(key)


def _member_field(name: str) -> str:
    return _escaped(name).replace("/", "%2F")


def _escaped(text: str) -> str:
    """Return the text with each character that a name can't hold as %XX, so that different texts stay different."""
    return _UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", text)


def _read_member(file: BinaryIO) -> tuple[str, bytes] | None:
    """Return name and data of the next member, None at the end of the archive."""
    header = file.read(BLOCK_BYTES)
    if header == END_OF_ARCHIVE[:BLOCK_BYTES]:
        rest = file.read(2 * BLOCK_BYTES)
        if rest != END_OF_ARCHIVE[BLOCK_BYTES:]:
            raise CorruptDataError(f"{len(rest)} bytes follow the first zero block; a second one ends the archive")
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
