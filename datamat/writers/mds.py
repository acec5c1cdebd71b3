"""Reads MosaicML's MDS: shards of samples, whose columns an `index.json` names."""

# Read without `streaming`, which decodes pictures, whose bytes should be kept, unpickles what it finds, and needs
# torch, transformers and the clients of eight stores.

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import path_inside
from datamat.errors import CorruptDataError, SourceError, count_of
from datamat.features import Image, Json, ListOf, Scalar, Tensor, Text
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import (
    CODECS,
    RecordForm,
    RecordsSource,
    numbered_item,
    of_index,
    raw_picture,
    read_document,
    unpacked_files,
)
from datamat.writers.unpacking import SpoolOptions, UnpackedFiles

if TYPE_CHECKING:
    from datamat.features import Feature


_NUMBERS = frozenset(
    ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
_ARRAY_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


@final
class MdsForm(RecordForm):
    """MosaicML's MDS, as streaming 0.x writes it: a table of offsets, then sizes and values of each sample."""

    def __init__(self, files: UnpackedFiles, shards: Sequence[Mapping[str, Any]]) -> None:
        self._files = files
        self._counts = [int(shard["samples"]) for shard in shards]
        first = shards[0]
        self._columns = list(zip(first["column_names"], first["column_encodings"], first["column_sizes"], strict=True))
        self.tell({name: _of_encoding(name, encoding) for name, encoding, _ in self._columns})

    def field_names(self) -> list[str]:
        return [name for name, _, _ in self._columns]

    def counts(self) -> list[int]:
        return self._counts

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        with open(self._files.path(file), "rb") as opened:
            data = numbered_item(opened, self._files.paths[file], number)
        sizes, place = [], 0
        for _, _, size in self._columns:
            if size is None:
                size = int.from_bytes(data[place : place + 4], "little")  # noqa: PLW2901 -- as the file has it
                place += 4
            sizes.append(size)
        found = {}
        for (name, encoding, _), size in zip(self._columns, sizes, strict=True):
            if name in names:
                found[name] = _value(encoding, data[place : place + size])
            place += size
        return found


_LISTS = {"jpeg_array": 0, "jpegarray": 0, "list[jpeg]": 4, "list[png]": 4, "list[pil]": 4}
"""Lists of pictures, and the bytes before their number (streaming 0.13, base/format/mds/encodings.py)."""


def _of_encoding(name: str, encoding: str) -> Feature | str | None:
    kind, _, arguments = encoding.partition(":")
    if kind in _NUMBERS | {"int"}:
        return Scalar("int64" if kind == "int" else kind)
    simple: dict[str, Feature | None] = {
        "str": Text(), "str_int": Scalar("int64"), "str_float": Scalar("float64"), "json": Json(),
        "bytes": None, "jpeg": None, "png": None, "pil": None, **dict.fromkeys(_LISTS, ListOf(Image())),
    }  # fmt: skip
    if kind in simple:
        return simple[kind]
    if kind == "ndarray":
        dtype, _, shape = arguments.partition(":")
        return Tensor(tuple(map(int, shape.split(","))), dtype) if shape else None
    what = "is never unpickled" if kind == "pkl" else "is not read here"
    return f"column {name!r} is {encoding} of MDS, which {what}; leave it out with drop=[{name!r}]"


def _value(encoding: str, data: bytes) -> Any:
    kind, _, arguments = encoding.partition(":")
    if kind in _NUMBERS | {"int"}:
        return np.frombuffer(data, "int64" if kind == "int" else kind)[0]
    if kind == "ndarray":
        return _array(arguments, data)
    if kind == "pil":
        return raw_picture(data)
    if kind in _LISTS:
        return _list(kind, data)
    parsers: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode, "str_int": int, "str_float": float, "json": json.loads,
    }  # fmt: skip
    return parsers.get(kind, bytes)(data)


def _list(kind: str, data: bytes) -> list[Any]:
    """Return the pictures of a list: how many there are, the size of each, the files; before that, perhaps, a zero."""
    head = _LISTS[kind]
    count = int.from_bytes(data[head : head + 4], "little")
    place = head + 4 * (1 + count)
    ends = np.cumsum([place, *np.frombuffer(data, "<u4", count, head + 4).tolist()]).tolist()
    if ends[-1] != len(data):
        raise CorruptDataError(
            f"a list of {count_of(count, 'picture')} takes {ends[-1]:,} bytes, but {len(data):,} are there"
        )
    pictures = [data[start:end] for start, end in itertools.pairwise(ends)]
    return list(map(raw_picture, pictures)) if kind == "list[pil]" else pictures


def _array(arguments: str, data: bytes) -> np.ndarray:
    dtype, _, sizes = arguments.partition(":")
    place = 0
    if not dtype:
        dtype, place = _ARRAY_DTYPES[data[0]], 1
    if sizes:
        shape = tuple(map(int, sizes.split(",")))
    else:
        num_axes, width = data[place] >> 2, 1 << (data[place] & 3)
        place += 1
        shape = tuple(np.frombuffer(data, f"<u{width}", num_axes, place).tolist())
        place += num_axes * width
    return np.frombuffer(data, dtype, offset=place).reshape(shape)


def _shards(folder: pathlib.Path) -> tuple[list[SourceFile], list[Mapping[str, Any]]]:
    """Return the shards of an MDS folder, and what its `index.json` says of each.

    Raises:
        SourceError: it is not MDS, or a shard is missing, has other columns, or is compressed with an unknown codec.
    """
    try:
        shards = [shard for shard in read_document(folder / "index.json")["shards"] if shard["samples"]]
        files = [_file(folder, shard) for shard in shards]
        columns = [[shard[f"column_{part}"] for part in ("names", "encodings", "sizes")] for shard in shards]
    except (KeyError, TypeError) as error:
        raise SourceError(
            f"{folder / 'index.json'} is not an index of MDS ({error!r}); restore it, or write the dataset again"
        ) from error
    if not files:
        raise SourceError(f"{folder} has no samples; pass a folder that has some")
    for file, theirs in zip(files, columns, strict=True):
        if theirs != columns[0]:
            raise SourceError(f"{file.path} has other columns than {files[0].name}; write them to two folders")
    return files, shards


def _file(folder: pathlib.Path, shard: Mapping[str, Any]) -> SourceFile:
    """Return a shard as it is there: as it is read, or as it was uploaded."""
    index, name = folder / "index.json", shard["raw_data"]["basename"]
    plain = path_inside(folder, name, index)
    if plain.is_file():
        return SourceFile(name, str(plain), None)
    packed = (shard.get("zip_data") or {}).get("basename")
    if packed is None or not path_inside(folder, packed, index).is_file():
        also = f", nor does {packed}" if packed else ""
        raise SourceError(f"{plain} does not exist{also}; copy the shard to the folder")
    codec = CODECS.get(str(shard["compression"]).partition(":")[0])
    if codec is None:
        raise SourceError(
            f"{folder / packed} is compressed by {shard['compression']}, which is not read here (want "
            f"{', '.join(CODECS)}); pass the object that reads it, streaming.StreamingDataset(local=...), as the "
            "source"
        )
    return SourceFile(name, str(folder / packed), codec)


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the samples of an MDS folder, or of folders with one for each split."""

    def source(folder: pathlib.Path) -> DataSource:
        found, shards = _shards(folder)
        return RecordsSource(found, MdsForm(unpacked_files(found, spool), shards))

    return of_index(folder, source)
