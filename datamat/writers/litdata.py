"""Reads chunks of litdata, which an `index.json` lists."""

# Read without litdata, which decodes pictures, whose bytes should be kept, unpickles what it finds, and loads torch.

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import path_inside
from datamat.errors import CorruptDataError, SourceError
from datamat.features import Scalar, Tensor, Text
from datamat.features.base import dtype_of
from datamat.writers.arrow import ArrowFiles, ArrowSource, TableFiles
from datamat.writers.base import DataSource
from datamat.writers.paths import SourceFile
from datamat.writers.records import (
    RecordForm,
    RecordsSource,
    numbered_item,
    of_index,
    raw_picture,
    read_document,
    unpacked_files,
)
from datamat.writers.unpacking import FRAMED_MAGIC, ZSTD_MAGIC, SpoolOptions, UnpackedFiles, unpacked_item

if TYPE_CHECKING:
    from datamat.features import Feature


_NUMPY_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bool",
)  # fmt: skip
_TORCH_DTYPES = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128", "float16",
    "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16",
)  # fmt: skip
"""Dtypes of litdata 0.2 by their numbers: those of numpy, and those of torch, where some have two."""


_FEATURES: dict[str, Feature | None] = {
    "str": Text(), "text": Text(), "int": Scalar("int64"), "float": Scalar("float64"), "bool": Scalar("bool"),
    "bytes": None, "jpeg": None, "image": None, "pil": None, "numpy": None, "tensor": None,
}  # fmt: skip


@final
class LitdataForm(RecordForm):
    """litdata's chunks: a table of offsets, then sizes and values of the leaves of each item.

    An item written for its `TokensLoader` is one array of tokens, without a size. That loader cuts all tokens of a
    chunk into blocks; here, items stay as they were written.

    Args:
        files: the chunks.
        counts: number of items in each.
        config: what `index.json` says of all of them.
    """

    def __init__(self, files: UnpackedFiles, counts: Sequence[int], config: Mapping[str, Any]) -> None:
        self._files = files
        self._counts = counts
        self._may_pack_items = _compression(config)[1] == "sample"
        self._has_sizes = config.get("item_loader") != _OF_TOKENS
        spec = json.loads(config["data_spec"])[1]
        self._columns = dict(zip(_leaf_names(spec, ""), config["data_format"], strict=True))
        self.dicts = frozenset(_spec_dicts(spec, ""))
        self.tell({name: _of_format(name, kind) for name, kind in self._columns.items()})

    def field_names(self) -> list[str]:
        return list(self._columns)

    def counts(self) -> Sequence[int]:
        return self._counts

    def read(self, file: int, number: int, names: Sequence[str]) -> dict[str, Any]:
        with open(self._files.path(file), "rb") as opened:
            data = numbered_item(opened, self._files.paths[file], number)
        # Not where Arrow holds the same rows behind them. Else the size of a first value begins them, below 4 GB.
        if self._may_pack_items and data.startswith(ZSTD_MAGIC):
            try:
                data = unpacked_item(data, self._files.spool)
            except CorruptDataError as error:
                raise CorruptDataError(
                    f"{self._files.paths[file]}: item {number} is damaged: {error}; copy the chunk again"
                ) from error
        sizes, place = [len(data)], 0
        if self._has_sizes:
            sizes, place = np.frombuffer(data, "<u4", len(self._columns)).tolist(), 4 * len(self._columns)
        found = {}
        for (name, kind), size in zip(self._columns.items(), sizes, strict=True):
            if name in names:
                found[name] = _value(kind, data[place : place + size])
            place += size
        return found


def _leaf_names(spec: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names of the leaves of an item: keys of dicts and positions in lists, with `/` between."""
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        return [prefix or "x"]
    if not kind.endswith(("dict", "OrderedDict", "list", "tuple")):
        raise SourceError(f"items of litdata hold a {kind}; want dicts, lists and tuples")
    keys = json.loads(spec["context"]) if "ict" in kind else range(len(children))
    below = [
        _leaf_names(child, f"{prefix}/{key}" if prefix else str(key)) for key, child in zip(keys, children, strict=True)
    ]
    return [name for names in below for name in names]


def _spec_dicts(spec: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the names of the dicts in dicts; a list between two of them leaves the inner one as it is called."""
    if "ict" not in (spec["type"] or ""):
        return
    if prefix:
        yield prefix
    for key, child in zip(json.loads(spec["context"]), spec["children_spec"], strict=True):
        yield from _spec_dicts(child, f"{prefix}/{key}" if prefix else str(key))


def _of_format(name: str, kind: str) -> Feature | str | None:
    base, _, number = kind.partition(":")
    if base in {"no_header_numpy", "no_header_tensor"}:
        dtypes = _NUMPY_DTYPES if base.endswith("numpy") else _TORCH_DTYPES
        return Tensor((None,), dtypes[int(number)])
    if base in _FEATURES:
        return _FEATURES[base]
    what = "is never unpickled" if base == "pickle" else "is not read here"
    return (
        f"field {name!r} is {kind} of litdata, which {what}; leave it out with drop=[{name!r}], or pass "
        "litdata.StreamingDataset(...) as the source"
    )


def _value(kind: str, data: bytes) -> Any:
    base, _, number = kind.partition(":")
    if base == "pil":
        return raw_picture(data)
    if base == "numpy":
        dtype, rank = np.frombuffer(data, "<u4", 2).tolist()
        shape = np.frombuffer(data, "<u4", rank, 8).tolist()
        return np.frombuffer(data, _NUMPY_DTYPES[dtype], offset=8 + 4 * rank).reshape(shape)
    if base == "tensor":
        dtype, rank = np.frombuffer(data, ">u4", 2).tolist()
        shape = np.frombuffer(data, ">u4", rank, 8).tolist()
        return np.frombuffer(data, dtype_of(_TORCH_DTYPES[dtype]), offset=8 + 4 * rank).reshape(shape)
    if base in {"no_header_numpy", "no_header_tensor"}:
        dtypes = _NUMPY_DTYPES if base.endswith("numpy") else _TORCH_DTYPES
        return np.frombuffer(data, dtype_of(dtypes[int(number)]))
    parsers: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode,
        "text": bytes.decode,
        "int": lambda data: np.frombuffer(data, "<i8")[0],
        "float": lambda data: np.frombuffer(data, "<f8")[0],
        "bool": lambda data: np.bool_(data != b"\0"),
    }
    return parsers.get(base, bytes)(data)


def _chunks(folder: pathlib.Path) -> tuple[list[SourceFile], list[int], Mapping[str, Any]]:
    """Return the chunks of a litdata folder, the number of items in each, and its configuration.

    Raises:
        SourceError: it is not litdata, a chunk is missing, or its chunks are encrypted, of an unknown loader, or
            compressed with an unknown codec.
    """
    index = read_document(folder / "index.json")
    try:
        config, chunks = index["config"], index["chunks"]
        names, counts = [chunk["filename"] for chunk in chunks], [int(chunk["chunk_size"]) for chunk in chunks]
        compression, level = _compression(config)
        packed = (compression != "zstd" and compression) or config.get("encryption")
        loader = config.get("item_loader") or "PyTreeLoader"
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"{folder / 'index.json'} is not an index of litdata ({error!r}); restore it, or write the dataset again"
        ) from error
    if packed or loader not in {"PyTreeLoader", _OF_TOKENS}:
        raise SourceError(
            f"{folder} holds chunks {'packed by ' + str(packed) if packed else 'of the item loader ' + loader}, which "
            "are not read here; pass the object that reads them, litdata.StreamingDataset(...), as the source"
        )
    paths = [path_inside(folder, name, folder / "index.json") for name in names]
    if missing := next((path for path in paths if not path.is_file()), None):
        raise SourceError(f"{missing} does not exist; copy the chunk to the folder")
    return [_file(path, compression and level) for path in paths], counts, config


_OF_TOKENS = "TokensLoader"
_TABLE_MAGIC = b"LDARW01\0"


def _table_span(path: str) -> tuple[int, int] | None:
    """Return where the table of Arrow begins in a chunk of litdata, and its bytes; None if the chunk has none.

    Rows of texts, numbers, bytes, lists and dicts alone are one Arrow file behind the offsets, which are all the same;
    then come its size, uint32, and a magic number (litdata 0.2.76, streaming/item_loader.py).
    """
    tail = 4 + len(_TABLE_MAGIC)
    with open(path, "rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(num_bytes - tail, 0))
        end = file.read()
    size = int.from_bytes(end[:4], "little")
    if not end.endswith(_TABLE_MAGIC) or len(end) < tail or size > num_bytes - tail:
        return None
    return num_bytes - tail - size, size


def _file(path: pathlib.Path, level: str) -> SourceFile:
    """Return a chunk; of those that are compressed by the batch, some are not, as their first bytes say."""
    codec = "zst" if level == "chunk" else None
    if level == "batch":
        with open(path, "rb") as file:
            codec = "framed" if file.read(len(FRAMED_MAGIC)) == FRAMED_MAGIC else None
    return SourceFile(path.name, str(path), codec)


def _compression(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the codec of a litdata folder, "" for none, and what is compressed as one: chunk, batch or sample."""
    name = str(config.get("compression") or "").partition(":")[0]
    return name.removesuffix("_framed"), str(config.get("compression_level") or "chunk")


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the items of a folder of litdata, or of folders with one for each split."""

    def source(folder: pathlib.Path) -> DataSource:
        found, counts, config = _chunks(folder)
        tables = [_table_span(file.path) for file in found]
        if found and None not in tables:
            return ArrowSource(TableFiles(found, ArrowFiles(_table_span)))
        if any(tables):
            raise SourceError(
                f"{folder} holds chunks of two forms: {found[tables.index(None)].name} has no table of Arrow, others "
                "have; pass the object that reads them, litdata.StreamingDataset(...), as the source"
            )
        return RecordsSource(found, LitdataForm(unpacked_files(found, spool), counts, config))

    return of_index(folder, source)
