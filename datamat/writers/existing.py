"""Opens existing datasets as a `DataSource`: samples by position, which an index lists and a writer reads."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import decimal
import fnmatch
import functools
import glob
import io
import itertools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final
from urllib.parse import unquote

import numpy as np
import xxhash

from datamat.codecs import encode_png
from datamat.codecs.files import PICTURES
from datamat.directory.files import commit_json, read_json, temporary_folder
from datamat.directory.manifest import MANIFEST_FILE, Manifest
from datamat.directory.rows import Rows, follows_links, note_files, refuse_output_in
from datamat.errors import (
    CorruptDataError,
    DatamatError,
    InputError,
    MissingDependencyError,
    OptionError,
    SchemaError,
    SourceError,
    count_of,
    join_problems,
    kind_of,
)
from datamat.features import (
    Audio,
    Bytes,
    ClassLabel,
    Depth,
    Features,
    Image,
    Json,
    ListOf,
    Mask,
    Nullable,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Video,
)
from datamat.features.base import as_array, dtype_of, holds_numbers, is_number_dtype
from datamat.folders import LocalFolder
from datamat.folders.local import expand_home
from datamat.formats import get_format
from datamat.formats.example import decode_example, encode_example
from datamat.formats.tfrecord import frame, read_payload
from datamat.parallel.logs import get_logger
from datamat.readers.cache import RecordCache
from datamat.readers.records import KeyIndex, RecordFiles
from datamat.readers.remote import Loaded
from datamat.transforms.seeding import signature_of
from datamat.transforms.targets import target_of
from datamat.values import frozen
from datamat.writers.base import SOURCE_KINDS, DataSource
from datamat.writers.foreign import (
    DAMAGES,
    INFO_FILE,
    FilesForm,
    LitdataForm,
    MdsForm,
    RecordForm,
    SpoolOptions,
    StoredFile,
    TarForm,
    TarRows,
    TfdsFiles,
    TFRecordForm,
    UnpackedFiles,
    litdata_chunks,
    litdata_table,
    mds_shards,
)
from datamat.writers.tables import TableRows, content_of, listed_column, table_of

if TYPE_CHECKING:
    from typing import BinaryIO

    import pyarrow as pa

    from datamat.features import Feature


__all__ = [
    "MOST_AHEAD",
    "ArrowSource",
    "SpooledSource",
    "converted",
    "dicts_of",
    "files_below",
    "fill_lists",
    "identity_of",
    "names_of",
    "open_source",
    "packed",
    "shows_type",
    "unpacked",
    "without_items",
]

_logger = get_logger("datamat.writers")


# ---------------------------------------------------------------- columns of Arrow
#
# What the columns of a table hold, whoever made it: the feature of each, and its cells as `read_block` returns them.
#
#     schema ──> Column: name, feature ── cells ──> array (n, ...), (values, lengths), or a list of n
#           └──> refused: columns that no feature stores, with their type and what to write instead
#
# Structs become fields `outer/inner`. Hugging Face notes its own types in the schema: labels, pictures, arrays.


_OF_ROWS = frozenset({"key", "split"})
_OF_TARS = frozenset({"__key__", "__url__"})  # of rows that Hugging Face's builder `webdataset` made
_HF_NOTE = b"huggingface"
_HF_FILE = {"bytes", "path"}  # of a struct that holds an encoded file
_HF_FILES_OF: dict[str, Feature] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_OF_FILES_ALONE = (Image, Audio, Video, Mask, Depth, Bytes)


@frozen()
class Column:
    """A column of a table, or a field of a struct in it.

    Attributes:
        name: name of the field: that of the column, and of the fields of structs that lead to it, with `/` between.
        path: the same, as a tuple.
        type: its `pyarrow.DataType`.
        feature: the feature that holds its cells; None for bytes, of which the first decides, and where none does.
        refused: why no feature holds its cells, and what to write; "" where one does.
        is_file: whether it is a struct of Hugging Face that holds an encoded file, or a list of these.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    feature: Feature | None
    refused: str = ""
    is_file: bool = False

    def cells(self, table: pa.Table, numbers: np.ndarray, feature: Feature | None) -> Any:
        """Return the cells of some rows, as `DatasetWriter.read_block` returns a column.

        Args:
            table: rows of the table, all its columns.
            numbers: number of each row, for messages.
            feature: feature that is to hold the cells.

        Raises:
            SourceError: a cell is empty.
        """
        column = table.column(self.path[0])
        for name in self.path[1:]:
            column = _field_of(column, name)
        if isinstance(feature, Json):
            return _json_cells(column)
        if self.is_file:
            return [self.content(cell, f"row {numbers[place]}, ") for place, cell in enumerate(column.to_pylist())]
        if column.null_count and not (feature is not None and feature.takes_none):
            place = int(numbers[np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]])
            raise SourceError(
                f"row {place}, column {self.name!r} of the table is empty; fill it in, or drop the row; or declare it "
                f"with features={{{self.name!r}: Nullable(...)}}"
            )
        found = _cells_of(column, self.feature) if feature == self.feature else None
        return column.to_pylist() if found is None else found

    def content(self, cell: Any, place: str) -> Any:
        """Return the content of the file that a cell of Hugging Face holds, or names; of a list, that of each.

        Args:
            cell: the cell, as Arrow has it, or as a step of a stream has decoded it.
            place: what messages say before the name of the column.

        Raises:
            SourceError: it is empty.
        """
        if self.feature is None:
            return _content_of_file(cell, self.name, place)
        if cell is None:
            raise SourceError(f"{place}column {self.name!r} of the table is empty; fill it in, or drop the row")
        return _with_contents(cell, self.feature, self.name, place)


def _with_contents(cell: Any, feature: Any, name: str, place: str) -> Any:
    """Return a list, or a dict in one, with the content of each file that it holds, or names."""
    match feature:
        case ListOf(feature=item):
            pairs = enumerate(cell or ())
            return [_with_contents(value, item, name, f"{place}item {number} of ") for number, value in pairs]
        case Mapping():
            return None if cell is None else {
                part: _with_contents(value, feature[part], f"{name}/{part}", place) for part, value in cell.items()
            }  # fmt: skip
        case Image() | Audio() | Video():
            found = _content_of_file(cell, name, place)
            return encode_png(found) if isinstance(found, np.ndarray) else found
    return cell


def columns_of_schema(schema: Any) -> list[Column]:
    """Return the columns of an Arrow schema, those of keys and splits excepted.

    Args:
        schema: a `pyarrow.Schema`.
    """
    noted = json.loads((schema.metadata or {}).get(_HF_NOTE, b"{}")).get("info", {}).get("features") or {}
    columns = [_columns_of(field.name, (field.name,), field.type, noted.get(field.name)) for field in schema]
    no_fields = _OF_ROWS | (_OF_TARS if {*schema.names} >= _OF_TARS else frozenset())
    return [column for some in columns for column in some if column.name not in no_fields]


def _dicts_of(columns: Iterable[Column]) -> frozenset[str]:
    """Return the names of the structs that columns are fields of."""
    return frozenset("/".join(column.path[:end]) for column in columns for end in range(1, len(column.path)))


def _columns_of(name: str, path: tuple[str, ...], kind: Any, noted: Any) -> list[Column]:
    """Return the column of a field, or those of the fields of a struct.

    Args:
        name: name of the field.
        path: its names, from the column down.
        kind: its type.
        noted: what Hugging Face's note in the schema says of it; None where there is none.
    """
    import pyarrow as pa

    noted = noted if isinstance(noted, dict) else {}
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in {"arrow.fixed_shape_tensor", "arrow.json"}:
        kind = kind.storage_type
    if pa.types.is_struct(kind):
        if noted.get("_type") in _HF_FILES_OF and {field.name for field in kind} == _HF_FILE:
            return [Column(name, path, kind, None, is_file=True)]
        if noted.get("_type") == "Sequence" and isinstance(noted.get("feature"), dict):  # a dict of lists, then
            noted = {part: {"_type": "Sequence", "feature": item} for part, item in noted["feature"].items()}
        inner = [
            _columns_of(f"{name}/{field.name}", (*path, field.name), field.type, noted.get(field.name))
            for field in kind
        ]
        return [column for some in inner for column in some]
    files = _with_files(noted, kind)
    if files is not None:
        return [Column(name, path, kind, files, is_file=True)]
    feature = _noted_feature(noted, kind) or _feature_of_type(kind)
    refused = "" if feature is not None or _is_binary(kind) else _refusal(name, kind)
    return [Column(name, path, kind, feature, refused)]


def _with_files(noted: Any, kind: Any) -> Any:
    """Return the feature of what holds encoded files, by Hugging Face's note: a file, a list or a dict of some.

    Args:
        noted: the note about it.
        kind: its Arrow type.

    Returns:
        A feature, or a dict of them by name; None where it holds no files, or something that no feature stores.
    """
    import pyarrow as pa

    shape, _ = _list_shape(kind)
    if shape and isinstance(noted, Mapping):
        item = None if len(shape) > 1 else _with_files(noted.get("feature"), kind.value_type)
        return None if item is None else ListOf(item)
    if not pa.types.is_struct(kind) or not isinstance(noted, Mapping):
        return None
    if isinstance(noted.get("_type"), str):
        is_file = noted["_type"] in _HF_FILES_OF and {field.name for field in kind} == _HF_FILE
        return _HF_FILES_OF[noted["_type"]] if is_file else None
    files = {field.name: _with_files(noted.get(field.name), field.type) for field in kind}
    if not any(files.values()):
        return None
    rest = {
        field.name: _noted_feature(noted.get(field.name) or {}, field.type) or _feature_of_type(field.type)
        for field in kind if not files[field.name]
    }  # fmt: skip
    return None if None in rest.values() else {field.name: files[field.name] or rest[field.name] for field in kind}


def _noted_feature(noted: Mapping[str, Any], kind: Any) -> Feature | None:
    """Return the feature that Hugging Face's note about a column asks for; None where its Arrow type says enough."""
    match noted:
        case {"_type": "ClassLabel", "names": [*names]}:
            return ClassLabel(tuple(names))
        case {"_type": "Sequence" | "List" | "LargeList", "feature": {"_type": "ClassLabel", "names": [*names]}}:
            return ClassLabel(tuple(names), shape=(None,))
        case {"_type": "Array2D" | "Array3D" | "Array4D" | "Array5D", "shape": [*shape], "dtype": str(dtype)}:
            return _tensor(shape, dtype)
    del kind
    return None


def _readable(table: pa.Table) -> pa.Table:
    """Return a table with its views as the types that they are views of, which `take` and `flatten` know."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for place, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type):
            chunks = [pc.run_end_decode(chunk) for chunk in table.column(place).chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, field.type.value_type))
    return table.cast(_readable_schema(table.schema))


def _readable_schema(schema: Any) -> Any:
    """Return the schema that `_readable` gives a table."""
    import pyarrow as pa

    return pa.schema([field.with_type(_without_views(field.type)) for field in schema], schema.metadata)


def _without_views(kind: Any) -> Any:
    """Return an Arrow type, or the one that it is a view of. polars writes all text as `string_view`."""
    import pyarrow as pa

    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_run_end_encoded(kind):
        return _without_views(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    for is_list, list_of in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_list(kind):
            return list_of(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


def _feature_of_type(kind: Any) -> Feature | None:  # noqa: PLR0911 -- one for each kind of type
    """Return the feature that holds every value of an Arrow type; None where there is none, and for bytes."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return _feature_of_type(kind.value_type)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Scalar(np.dtype(kind.to_pandas_dtype()).name)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Text()
    if types.is_date(kind) or types.is_timestamp(kind):
        return _time(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor(kind.shape, np.dtype(kind.value_type.to_pandas_dtype()).name)
    if isinstance(kind, pa.BaseExtensionType):
        return Json() if kind.extension_name == "arrow.json" else None
    shape, inner = _list_shape(kind)
    if shape == (None,) and (types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)):
        return ListOf(Text())
    if len(shape) == 1 and (_is_binary(inner) or types.is_date(inner) or types.is_timestamp(inner)):
        return ListOf(Bytes() if _is_binary(inner) else _time(inner))
    are_numbers = types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)
    if shape and are_numbers and None not in shape[1:]:
        return Tensor(shape, np.dtype(inner.to_pandas_dtype()).name)
    return Json() if (shape or types.is_map(kind)) and not _not_in_json(kind, "") else None


def _time(kind: Any) -> Timestamp:
    return Timestamp("UTC" if getattr(kind, "tz", None) is not None else None)


def _list_shape(kind: Any) -> tuple[tuple[int | None, ...], Any]:
    """Return the sizes of lists in lists, None for those that vary, and the type of what they hold."""
    import pyarrow as pa

    sizes: list[int | None] = []
    while True:
        if pa.types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            sizes.append(None)
        else:
            return tuple(sizes), kind
        kind = kind.value_type


def _not_in_json(kind: Any, place: str) -> str:
    """Return the first part of a nested type that JSON cannot hold, and where it is; "" where there is none."""
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind):
        if not (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
            return f"{kind.key_type} for keys at {place or 'its map'}"
        return _not_in_json(kind.item_type, f"{place}[key]")
    if types.is_struct(kind):
        return next(filter(None, (_not_in_json(field.type, f"{place}.{field.name}") for field in kind)), "")
    if types.is_dictionary(kind) or _list_shape(kind)[0]:
        return _not_in_json(kind.value_type, place if types.is_dictionary(kind) else f"{place}[]")
    plain = (types.is_boolean, types.is_integer, types.is_floating, types.is_null)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return "" if is_text or any(test(kind) for test in plain) else f"{kind} at {place}"


def _refusal(name: str, kind: Any) -> str:
    import pyarrow as pa

    where = f"column {name!r} is {kind}, which no feature stores exactly; "
    drop = f"leave it out with drop=[{name!r}]"
    if pa.types.is_null(kind):
        return f"column {name!r} holds nothing but empty cells; {drop}"
    if pa.types.is_decimal(kind):
        return (
            f"{where}pass features={{{name!r}: Scalar('float64')}} to round it, or Text() to keep its digits, or {drop}"
        )
    inner = _not_in_json(kind, "") if _list_shape(kind)[0] or pa.types.is_map(kind) else ""
    if inner:
        shape, item = _list_shape(kind)
        rest = f"; {drop}"
        if len(shape) == 1 and pa.types.is_struct(item):
            parts = ", ".join(f"{field.name!r}: {_suggested(field.type)}" for field in item)
            declared = f"features={{{name!r}: ListOf({{{parts}}})}}"
            rest = f" by its type alone; declare what it holds with ImportWriter({declared}), or {drop}"
        return f"column {name!r} is {kind}, and no feature stores {inner}{rest}, or convert it where the source is made"
    return f"{where}pass features={{{name!r}: Text()}} to store it as text, or {drop}"


def _suggested(kind: Any) -> str:
    """Return the feature to declare for an Arrow type, as code; pictures for what may be a file."""
    import pyarrow as pa

    is_file = pa.types.is_struct(kind) and {field.name for field in kind} == _HF_FILE
    if is_file or _is_binary(kind):
        return "Image()"
    feature = _feature_of_type(kind)
    match feature:
        case None:
            return "..."
        case Scalar(dtype=dtype):
            return f"Scalar({dtype!r})"
    return repr(feature)


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )  # fmt: skip


def _tensor(shape: Sequence[int | None], dtype: str) -> Tensor | None:
    try:
        return Tensor(tuple(shape), np.dtype(dtype).name)
    except (TypeError, ValueError):  # numpy or Tensor has no such type
        return None


def _field_of(column: Any, name: str) -> Any:
    """Return a field of a struct; it is empty where the struct is."""
    import pyarrow.compute as pc

    return pc.struct_field(column, name)


def _cells_of(column: Any, feature: Feature | None) -> Any:
    """Return cells without a Python object for each; None where `to_pylist` does as well."""
    import pyarrow as pa

    match feature:
        case Scalar() | Timestamp() | ClassLabel(shape=()):
            return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
        case Tensor() | ClassLabel():
            return _arrays_of(column, feature)
    return None


def _arrays_of(column: Any, feature: Tensor | ClassLabel) -> Any:
    """Return lists of numbers as one array, or as (values, lengths)."""
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    count, lengths = len(array), None
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        if lengths is None and not pa.types.is_fixed_size_list(array.type):
            lengths = np.asarray(array.value_lengths(), np.int64)
        array = array.flatten()
    if array.null_count:
        raise SourceError(f"a list of numbers has an empty item ({column.type}); fill it in, or drop the column")
    values = array.to_numpy(zero_copy_only=False)
    _, sizes = feature.value_type()
    if None not in sizes:
        return values.reshape(count, *sizes)
    assert lengths is not None, "a size that varies is that of a list"
    return values.reshape(-1, *sizes[1:]), lengths


def _json_cells(column: Any) -> list[Any]:
    """Return nested cells with dicts for maps, which Arrow gives as lists of pairs."""
    cells: list[Any] = column.to_pylist()
    if getattr(column.type, "extension_name", "") == "arrow.json":
        return [None if cell is None else json.loads(cell) for cell in cells]
    return [_as_json(cell, column.type) for cell in cells] if "map<" in str(column.type) else cells


def _as_json(cell: Any, kind: Any) -> Any:
    import pyarrow as pa

    if cell is None:
        return None
    if pa.types.is_map(kind):
        return {key: _as_json(item, kind.item_type) for key, item in cell}
    if pa.types.is_struct(kind):
        return {field.name: _as_json(cell[field.name], field.type) for field in kind}
    return [_as_json(item, kind.value_type) for item in cell] if _list_shape(kind)[0] else cell


def _content_of_file(cell: Any, name: str, place: str) -> Any:
    """Return the content of a file that a cell of Hugging Face holds, or names; a picture that is decoded as it is."""
    if cell is None or (isinstance(cell, Mapping) and cell["bytes"] is None and not cell["path"]):
        raise SourceError(f"{place}column {name!r} of the table is empty; fill it in, or drop the row")
    if not isinstance(cell, Mapping):  # a step of a stream that needs the picture, such as a filter, has decoded it
        return _plain(cell)
    return cell["bytes"] if cell["bytes"] is not None else pathlib.Path(cell["path"]).read_bytes()


# ---------------------------------------------------------------- samples by position
#
# Existing datasets as samples by position:
#
#     a folder, a file   by its kind: one of `SOURCE_KINDS`, named or found
#     an object          with `len` and items: a list, a torch `Dataset`, a `datasets.Dataset`; or arrays, by column
#     a table            of pyarrow, pandas or polars: each row is a sample
#     an iterator        a generator, a function that returns one, a torch `IterableDataset`, a streamed dataset
#     a DataSource       as it is
#     {split: ...}       several of these
#
# One contract holds for all. The driver reads what lists the samples: footers, headers, lengths; an iterator, which
# only it can read, it writes to disk row by row. Workers get paths and positions, and each reads the samples of its
# rows: a row group, or a record by its offset. The files that the samples lie in count by their content.


_WANTED = (
    "a folder finished by datamat, prepared by TFDS or saved by Hugging Face datasets; Parquet or Arrow files, or a "
    "folder of them; an object with len() and items by position (list, torch Dataset, datasets.Dataset); an iterator, "
    "or a function that returns one; a table of pyarrow, pandas or polars; equally long numpy arrays in a tuple or by "
    "name; or a dict of these by split"
)
_PAIR = ("x", "y")
_HF_FILES = ("state.json", "dataset_dict.json")  # beside a dataset_info.json, as TFDS has it
_SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing")
_UNFIT = re.compile(r"[/\\#\x00-\x1f\x7f]+|\.\.+")  # of keys, where they become part of names
_OF_OBJECTS = ("arrow", "huggingface", "tfds", "litdata", "mds")  # kinds of files that objects may be, too
_SHARD_NUMBER = re.compile(r"-\d{5,}-of-\d{5,}\Z")
_PACKINGS = (".gz", ".bz2", ".xz", ".zst", ".zlib")  # extensions of compressed files, behind those of what they hold
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_LOOKED_AT = 3  # items of a list, which may be long
_SPLIT_OF = re.compile(rf"({'|'.join(_SPLITS)})(?=[-_./]|\Z)")


class Narrowed(Protocol):
    """A source that knows its fields before it reads a sample, and reads only those that are wanted."""

    def field_names(self) -> Sequence[str]:
        """Return the names of the fields of a sample."""

    def narrow(self, names: Collection[str]) -> None:
        """Read these fields only."""


def open_source(
    dataset: Any, *, names: Sequence[str] | None = None, kind: str | None = None, spool: SpoolOptions | None = None
) -> DataSource:
    """Return the samples of an existing dataset.

    Args:
        dataset: any of the kinds that the table above lists.
        names: names of the fields, for samples that are tuples or arrays without names; None takes "x" and "y" for two
            fields, "x" for one, "field_0" and so on for more.
        kind: what the dataset is said to be, one of `SOURCE_KINDS`; None finds out.
        spool: how rows of iterators are written to disk; None refuses iterators.

    Raises:
        SourceError: the dataset is of no kind that can be read, or a folder is incomplete.
        MissingDependencyError: the package that reads the dataset is not installed.
    """
    if isinstance(dataset, Mapping) and dataset and not _are_arrays(dataset.values()):
        if _are_columns(dataset):
            raise SourceError(
                f"the source is a dict of lists ({join_problems(list(map(str, dataset)))}), which stands for a list of "
                "samples per split; for one list per field pass pyarrow.table(source), or numpy arrays in the lists' "
                "place"
            )
        parts = {
            str(split): open_source(part, names=names, kind=kind, spool=spool and spool.below(str(split)))
            for split, part in dataset.items()
        }
        return _SplitSource(parts)
    if isinstance(dataset, Rows):
        raise SourceError(
            "the source is an Index: its rows name inputs, which a function or a writer reads; pass it to "
            "materialize(function, index, ...), or return it from the index of a writer"
        )
    paths = _paths_of(dataset, is_named=kind is not None)
    if paths is not None:
        with _damage_named(paths[0]):
            return _of_paths(paths, kind, SpoolOptions() if spool is None else spool)
    if kind in _OF_FILES and kind not in _OF_OBJECTS:
        raise SourceError(f"the source is a {type(dataset).__qualname__}, and {kind!r} reads files; give their path")
    found = dataset if isinstance(dataset, DataSource) else _of_object(dataset, names, spool)
    if found is None:
        which = ", which ImportWriter alone reads" if spool is None and _is_stream(dataset) else ""
        raise SourceError(f"the dataset is a {type(dataset).__qualname__}{which}; want {_WANTED}")
    return found


def _of_object(dataset: Any, names: Sequence[str] | None, spool: SpoolOptions | None) -> DataSource | None:
    if _module_of(dataset) == "datasets":
        return _of_hugging_face(dataset, spool)
    table = table_of(dataset)
    if table is not None:
        return ArrowSource(_MemoryTable(table))
    found = _in_memory(dataset, names)
    if found is not None or isinstance(dataset, Mapping):
        return found
    if _is_stream(dataset):
        return None if spool is None else SpooledSource(RowStream(dataset, names), spool)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, (str, bytes)):
        return _MapSource(dataset, names)
    return None


def _in_memory(dataset: Any, names: Sequence[str] | None) -> DataSource | None:
    """Return the source of columns, arrays, or a list; None for anything else."""
    column = listed_column(dataset)
    if column is not None:
        return _MapSource(column, names)
    if isinstance(dataset, Mapping):
        return _with_names(_ColumnSource(dict(dataset)), dataset) if dataset else None
    if not isinstance(dataset, (list, tuple)) or not dataset:
        return None
    if isinstance(dataset, tuple) and _are_arrays(dataset):
        return _ColumnSource(dict(zip(_names(names, len(dataset)), dataset, strict=True)))
    _refuse_paths(dataset)
    if table_of(dataset[0]) is not None:
        return ArrowSource(_MemoryTable(_joined_tables(dataset)))
    items = _MapSource(dataset, names)
    return _with_names(items, dataset[0]) if isinstance(dataset[0], Mapping) else items


def _refuse_paths(items: Sequence[Any]) -> None:
    """Raise `OptionError` where a list that is to be a dataset holds paths of files: nobody wants these as text."""
    first = items[0]
    if all(isinstance(item, (str, os.PathLike)) and os.path.isfile(item) for item in items[:_MOST_LOOKED_AT]):
        raise OptionError(
            f"the list holds paths of files, the first is {os.fspath(first)!r}; say what is in them, as in "
            f"Materializer('webdataset', paths, output): want one of {', '.join(SOURCE_KINDS)}"
        )


def _joined_tables(tables: Sequence[Any]) -> pa.Table:
    """Return the tables of a list, such as the batches of one, as one table."""
    import pyarrow as pa

    found = [table_of(table) for table in tables]
    try:
        return pa.concat_tables(found)
    except (pa.ArrowException, TypeError) as error:
        raise SourceError(f"the tables of the list do not fit together: {error}; give all the same columns") from error


def identity_of(source: DataSource) -> Any:
    """Return what stands for the content of a source in fingerprints.

    Args:
        source: dataset that `open_source` returned.
    """
    return source if source.identity is None else source.identity


def _are_arrays(values: Iterable[Any]) -> bool:
    return all(isinstance(column, np.ndarray) for column in values)


def _are_columns(dataset: Mapping[Any, Any]) -> bool:
    """Return whether a dict holds equally long lists of plain values under names that are none of splits."""
    columns = list(dataset.values())
    are_plain = all(
        isinstance(column, (list, tuple)) and column and isinstance(column[0], (str, int, float)) for column in columns
    )
    return are_plain and len({len(column) for column in columns}) == 1 and not {*map(str, dataset)} & {*_SPLITS}


def _module_of(value: Any) -> str:
    return next((name for base in type(value).__mro__ if (name := base.__module__.partition(".")[0]) == "datasets"), "")


def _is_stream(dataset: Any) -> bool:
    """Return whether samples come one after another: from an iterator, a function, or what has no positions."""
    if isinstance(dataset, Iterator) or (callable(dataset) and not hasattr(dataset, "__len__")):
        return not isinstance(dataset, type)
    has_positions = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_value = isinstance(dataset, (str, bytes, Mapping, Collection))
    return hasattr(dataset, "__iter__") and not is_value and (not has_positions or _is_torch_iterable(dataset))


def _is_torch_iterable(dataset: Any) -> bool:
    """Return whether it is an `IterableDataset`, which has `__getitem__` of its base class, and may have a length."""
    return any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)


# ---------------------------------------------------------------- files and folders


@frozen()
class SourceFile:
    """A file that samples lie in.

    Attributes:
        name: its path below the source, with `/`; of several sources that are files, what tells them apart.
        path: its absolute path.
    """

    name: str
    path: str

    @property
    def stem(self) -> str:
        """What the keys of its samples begin with: the name without its suffix, and `-` for `/`."""
        return _stem_and_ending(self.name)[0].replace("/", "-")


def _stem_and_ending(name: str) -> tuple[str, str]:
    """Return a name without its extension, and that: both parts of `.tar.gz`, and `.tfrecord` of TFDS' names.

    TFDS and Beam put the number of a shard last, which is part of the stem: `x.tfrecord-00000-of-00002`.
    """
    base, packing = os.path.splitext(name)
    if packing.lower() not in _PACKINGS:
        base, packing = name, ""
    match = _SHARD_NUMBER.search(base)
    number = "" if match is None else match[0]
    stem, ending = os.path.splitext(base[: len(base) - len(number)])
    return stem + number, (ending + packing).lower()


def _ending_of(name: str) -> str:
    return _stem_and_ending(name)[1]


def splits_of(files: Sequence[SourceFile]) -> list[str | None]:
    """Return the split of each file by its name or first folder, where all of them have one: `train-00000.parquet`."""
    found = [_SPLIT_OF.match(file.name) for file in files]
    return [match[1] for match in found if match] if all(found) else [None] * len(files)


def _paths_of(dataset: Any, *, is_named: bool) -> list[pathlib.Path] | None:
    """Return the files and folders that a source names; None where it is no path.

    A list of paths is one only where the kind is named: otherwise a list of str is a dataset of texts.
    """
    if isinstance(dataset, (str, os.PathLike)):
        text = os.path.abspath(os.fspath(dataset))
        if glob.has_magic(text) and not os.path.lexists(text):
            found = files_of_pattern(text)
            if not found:
                raise SourceError(f"no file matches {text!r}; correct the pattern")
            return found
        return [pathlib.Path(text)] if os.path.lexists(text) else [pathlib.Path(path) for path in _of_braces(text)]
    is_listed = is_named and isinstance(dataset, (list, tuple)) and bool(dataset)
    if is_listed and all(isinstance(path, (str, os.PathLike)) for path in dataset):
        return [pathlib.Path(os.path.abspath(path)) for path in dataset]
    return None


def _of_braces(text: str) -> list[str]:
    """Return the paths that a pattern of WebDataset names: `shard-{000..127}.tar`."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last = match.groups()
    numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return [path for number in numbers for path in _of_braces(text[: match.start()] + number + text[match.end() :])]


def files_below(
    root: str | os.PathLike[str], pattern: str = "**/*", suffixes: str | Sequence[str] = ()
) -> list[pathlib.PurePosixPath]:
    """Return the visible files below a folder, as sorted paths relative to it.

    Links to folders are not searched by `**`, but for those that lead out of the folder where a run follows these.

    Args:
        root: folder that holds the files.
        pattern: glob pattern, relative to `root`.
        suffixes: suffixes of the files to return, such as ".png", or one of them; empty returns all.

    Raises:
        SourceError: the folder does not exist.
        OptionError: a suffix does not begin with a dot.
        OutputError: a run lists its source, and files of its output would be among them.
    """
    folder = pathlib.Path(root)
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; give the folder that holds the samples as source")
    real = os.path.join(os.path.realpath(folder), "")
    suffixes = [suffix.lower() for suffix in ([suffixes] if isinstance(suffixes, str) else suffixes)]
    if wrong := [suffix for suffix in suffixes if suffix[:1] != "."]:
        raise OptionError(f"suffixes holds {wrong[0]!r}; want suffixes with their dot, as in suffixes=['.jpg', '.png']")

    def takes(path: str) -> bool:
        below = pathlib.PurePosixPath(path.removeprefix(real))
        return path.startswith(real) and _fits(below.parts, pattern.split("/")) and is_listed(below)

    def is_listed(below: pathlib.PurePosixPath) -> bool:
        is_wanted = not suffixes or below.suffix.lower() in suffixes or _ending_of(below.name) in suffixes
        return is_wanted and not any(part.startswith(".") for part in below.parts)

    refuse_output_in(os.fspath(folder), takes)
    visible = _visible_files(folder, pattern)
    found = [path for path in visible if is_listed(path)] if suffixes else visible
    note_files(folder, found, [] if len(found) == len(visible) else [path for path in visible if not is_listed(path)])
    return found


def _visible_files(folder: pathlib.Path, pattern: str = "**/*") -> list[pathlib.PurePosixPath]:
    """Return the files below a folder that are not hidden, sorted."""
    found = []
    for path in _linked(folder, pattern) if follows_links() else folder.glob(pattern):
        below = pathlib.PurePosixPath(path.relative_to(folder).as_posix())
        visible = not any(part.startswith(".") for part in below.parts)
        # Not `is_file`: a dangling link is a missing sample, which is reported when the file is checked.
        if visible and not path.is_dir():
            found.append(below)
        elif visible and "**" in pattern and not follows_links() and path.is_symlink() and path.is_dir():
            _note_link(folder, path)
    return sorted(found)


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path fits a glob pattern, both given by their parts."""
    if not parts or not pattern:
        return not parts and not pattern
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or _fits(parts[1:], pattern)
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def files_of_pattern(pattern: str) -> list[pathlib.Path]:
    """Return what a glob pattern finds, in the order of the names; raises `OutputError` as `files_below` does."""
    absolute = os.path.abspath(pattern).split("/")
    refuse_output_in(repr(pattern), lambda path: _fits(path.split("/"), absolute))
    return [pathlib.Path(path) for path in sorted(glob.glob(pattern, recursive=True))]


def _note_link(root: pathlib.Path, path: pathlib.Path) -> None:
    target = os.path.realpath(path)
    if not pathlib.Path(target).is_relative_to(os.path.realpath(root)):
        _logger.warning(
            "%s is a link out of the source, to the folder %s, and is not searched; where the link is yours, pass "
            "follow_links=True",
            path,
            target,
        )


def _linked(root: pathlib.Path, pattern: str) -> set[pathlib.Path]:
    """Return what a pattern finds below a folder, also in folders outside that links lead to.

    A folder is not searched again below itself: links may lead in circles.
    """
    real_root = os.path.realpath(root)

    def search(folder: pathlib.Path, parts: Sequence[str], above: frozenset[str]) -> Iterator[pathlib.Path]:
        first, *rest = parts
        if first == "**" and rest:
            yield from search(folder, rest, above)
        with os.scandir(folder) as listed:
            entries = list(listed)
        for entry in entries:
            if first != "**" and not fnmatch.fnmatchcase(entry.name, first):
                continue
            path = folder / entry.name
            if not rest:
                yield path
            real = os.path.realpath(path)
            inner = first == "**" and entry.is_symlink() and pathlib.Path(real).is_relative_to(real_root)
            if (rest or first == "**") and entry.is_dir() and real not in above and not inner:
                yield from search(path, parts if first == "**" else rest, above | {real})

    return set(search(root, pattern.split("/"), frozenset({real_root})))


def _listed(paths: Sequence[pathlib.Path], suffixes: Sequence[str]) -> list[SourceFile]:
    """Return the files that paths stand for: a folder for those in it with a suffix, a file for itself."""
    found = []
    folders = [path for path in paths if path.is_dir()]
    for path in paths:
        if path.is_dir():
            prefix = f"{path.name}/" if len(folders) > 1 else ""
            names = [str(name) for name in files_below(path, suffixes=suffixes)]
            found += [SourceFile(prefix + name, os.path.join(path, name)) for name in names]
        else:
            found.append(SourceFile(path.name, str(path)))
    names = [file.name for file in found]
    if len(set(names)) < len(names):  # of files in several folders: by their paths below what these share
        shared = os.path.commonpath([os.path.dirname(file.path) for file in found])
        found = [SourceFile(os.path.relpath(file.path, shared).replace(os.sep, "/"), file.path) for file in found]
    return sorted(found, key=lambda file: file.name)


@contextlib.contextmanager
def _damage_named(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except DAMAGES as error:
        if isinstance(error, DatamatError):
            raise
        raise SourceError(
            f"{path} is damaged, or no dataset of its kind: {type(error).__name__}: {error}; copy or write it again"
        ) from error


def _of_paths(paths: Sequence[pathlib.Path], kind: str | None, spool: SpoolOptions) -> DataSource:
    for path in paths:
        if not path.exists():
            raise SourceError(f"{path} does not exist; correct the path of the source")
    chosen = _kind_of(paths) if kind in {None, "dataset"} else kind
    if chosen not in _OF_FILES:
        raise SourceError(f"{chosen!r} reads objects, and {paths[0]} is a path; want {_WANTED}")
    suffixes, made = _OF_FILES[chosen]
    if not suffixes:
        return made(paths, spool)
    for path in paths:
        ending = _ending_of(path.name)
        is_unpacked_here = suffixes[0] + ".gz" in suffixes and ending.endswith(_PACKINGS)  # whatever it is called
        if path.is_file() and ending not in suffixes and not is_unpacked_here and (hint := _hint_of_packed(ending)):
            raise SourceError(f"{path} is compressed; {hint.format(str(path))}")
    files = _listed(paths, suffixes)
    if not files:
        raise SourceError(
            f"{paths[0]} holds no files that end in {' or '.join(suffixes)}; give the folder that does, or a pattern "
            f"of files that are called otherwise, as in {str(paths[0] / '*')!r}"
        )
    return made(files, spool)


def _kind_of(paths: Sequence[pathlib.Path]) -> str:
    """Return the kind of files or of a folder by what they are called; raise `SourceError` where nothing says it."""
    first = paths[0]
    if first.is_dir():
        if len(paths) == 1:
            if (first / MANIFEST_FILE).is_file():
                return "datamat"
            if any((first / name).is_file() for name in _HF_FILES):
                return "huggingface"
            if (first / INFO_FILE).is_file():
                return "tfds"
            index = next(iter([*first.glob("index.json"), *sorted(first.glob("*/index.json"))]), None)
            if index is not None:
                return "litdata" if "chunks" in read_json(index) else "mds"
        endings = {_ending_of(path.name) for path in _visible_files(first)}
    else:
        endings = {_ending_of(path.name) for path in paths}
    kinds = {kind for kind, (suffixes, _) in _OF_FILES.items() if endings & set(suffixes)}
    if len(kinds) == 1:
        return kinds.pop()
    if first.is_dir() and not endings & set(PICTURES):
        raise SourceError(
            f"{first} holds none of {', '.join([MANIFEST_FILE, *_HF_FILES, INFO_FILE])}, which identify datasets, and "
            f"{'files of several kinds' if kinds else 'no files of a known kind'} "
            f"({', '.join(sorted(filter(None, endings))[:6]) or 'none has an extension'}); want {_WANTED}; or name the "
            "kind, as in Materializer('parquet', ...)"
        )
    ending = min(endings & set(PICTURES), default=_ending_of(first.name))
    raise _unknown_kind(first, ending)


def _unknown_kind(first: pathlib.Path, ending: str) -> SourceError:
    hint = _OTHERS.get(ending) or _hint_of_packed(ending)
    if hint:
        return SourceError(f"{first} is no dataset of a known kind; {hint.format(str(first))}")
    if ending in _PACKINGS:
        why = f"{first} is compressed, and its name does not say what it holds"
    else:
        why = (
            f"{first}: nobody knows the extension {ending!r}"
            if ending
            else f"{first} has no extension that would say what it is"
        )
    return SourceError(
        f"{why}; name the kind of the file, as in Materializer('{'webdataset' if ending in _PACKINGS else 'parquet'}', "
        f"{first.name!r}, ...), which may be {', '.join(SOURCE_KINDS)}"
    )


def _hint_of_packed(ending: str) -> str | None:
    """Return what to write for a file that is compressed, given its extension; None where only its kind is missing."""
    inner, packing = os.path.splitext(ending) if ending.count(".") > 1 else ("", ending)
    if inner in {".csv", ".tsv"} and packing in {".gz", ".bz2", ".zst", ".lz4"}:
        return _OTHERS[inner]
    if inner == ".jsonl" and packing in _OPENERS:
        return f"pass its rows, as in Materializer(map(json.loads, {_OPENERS[packing]}.open({{0!r}})), ...)"
    unpack = _UNPACKERS.get(packing)
    if unpack is None or (packing in _PACKINGS and not inner):
        return None
    return f"unpack it first, with {unpack}, and pass what comes out"


_OPENERS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
"""Modules of Python that open compressed files, by extension."""
_UNPACKERS = {
    **dict.fromkeys([".zip", ".jar"], "shutil.unpack_archive({0!r}, 'unpacked', 'zip')"),
    ".gz": "gunzip {0}",
    ".bz2": "bunzip2 {0}",
    ".xz": "unxz {0}",
    ".zst": "unzstd {0}",
    ".lz4": "lz4 -d {0}",
    ".lzma": "unlzma {0}",
    ".z": "uncompress {0}",
    ".br": "brotli -d {0}",
    ".7z": "7z x {0}",
    ".rar": "unrar x {0}",
}
"""What unpacks files that are not read packed, by extension."""
_OF_HDF5 = "pass its arrays, as in Materializer(source={{name: x[:] for name, x in h5py.File({0!r}).items()}}, ...)"
_OTHERS = {
    **dict.fromkeys(
        PICTURES,
        "'image_folder' reads pictures in a folder for each class, as in Materializer('image_folder', FOLDER, ...); "
        "for others, write a function: materialize(fn, sorted(glob.glob(PATTERN)), ...)",
    ),
    ".csv": "the writer 'table' reads it, as in Materializer('table', {0!r}, ...)",
    ".tsv": "the writer 'table' reads it, as in Materializer('table', {0!r}, ...)",
    **dict.fromkeys([".jsonl", ".ndjson"], "pass its rows, as in Materializer(map(json.loads, open({0!r})), ...)"),
    ".json": "pass its rows, as in Materializer(source=json.loads(pathlib.Path({0!r}).read_text()), ...)",
    ".txt": "pass its lines, as in Materializer(source=pathlib.Path({0!r}).read_text().splitlines(), ...)",
    ".xlsx": "pass its rows, as in Materializer(source=pandas.read_excel({0!r}), ...)",
    **dict.fromkeys([".h5", ".hdf5"], _OF_HDF5),
    ".npy": "pass its array, as in Materializer(source=numpy.load({0!r}, mmap_mode='r'), ...)",
    ".npz": "pass its arrays, as in Materializer(source=dict(numpy.load({0!r})), ...)",
    ".pkl": "it is never unpickled here; pass its rows, as in Materializer(source=rows, ...)",
}
"""What to write for files that hold rows, by extension."""


def _finished(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    del spool
    return _FinishedSource(paths[0])


def _prepared(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    del spool
    return _TfdsSource(paths[0])


def _saved(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    if not any((paths[0] / name).is_file() for name in _HF_FILES):
        return _of_paths(paths, None, spool)  # Parquet or Arrow files, whose schema has its notes
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{paths[0]} was saved by Hugging Face datasets, which is not installed; install it with: "
            "pip install datasets"
        ) from error
    return open_source(datasets.load_from_disk(str(paths[0])))


# ---------------------------------------------------------------- rows and columns


@final
class _MapSource(DataSource):
    """Items of any object that has a length.

    Args:
        dataset: the object.
        names: names of the fields, for items that are tuples.
        identity: what stands for its content in fingerprints; None for the object itself.
    """

    def __init__(self, dataset: Any, names: Sequence[str] | None, identity: Any = None) -> None:
        self._dataset = dataset
        self.identity = dataset if identity is None else identity
        self._names = names
        self._members = TarRows()
        self.dicts: frozenset[str] | None = None  # until the first item shows them

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        item = self._dataset[number]
        is_of_tar = TarRows.are(item)
        if self.dicts is None:
            if is_of_tar:
                self._members.show(item)
                self.features, self.refused = self._members.features, self._members.refused
            self.dicts = _dicts_in(self._members.nested(item) if is_of_tar else item)
        return _sample_of_tar(item, self._members) if is_of_tar else _sample_of(item, self._names)

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self._members.declare(features)


@final
class _ColumnSource(DataSource):
    """Rows of arrays (n, ...)."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise SourceError(f"the arrays differ in length ({found}); give each one row per sample")
        self.identity = self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: column[number] for name, column in self._columns.items()}


def _with_names(source: DataSource, fields: Mapping[Any, Any]) -> DataSource:
    """Return the source of items in memory; where they have them, `key` and `split` are keys and splits, as in tables.

    Args:
        source: the items.
        fields: what an item holds, by name.
    """
    return _NamedSource(source) if {*_OF_ROWS, "__key__"} & fields.keys() else source


@final
class _NamedSource(DataSource):
    """Items in memory that hold their own key, or split."""

    def __init__(self, items: DataSource) -> None:
        self._items = items
        self.identity = items.identity
        assert items[0], "it shows the features of samples of WebDataset"
        self.features, self.refused = items.features, getattr(items, "refused", {})

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        if hasattr(self._items, "declare"):
            self._items.declare(features)

    @property
    def dicts(self) -> Collection[str]:
        """The names of the dicts in an item."""
        return dicts_of(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: value for name, value in self._items[number].items() if name not in _OF_ROWS}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        for number in range(len(self)):
            item = self._items[number]
            key, split = item.get("key"), item.get("split")
            yield f"{number:08d}" if key is None else str(key), None if split is None else str(split)


class ArrowRows(Protocol):
    """Rows of Arrow data by position, wherever they lie."""

    schema: Any
    identity: Any
    files: Sequence[SourceFile]

    def __len__(self) -> int:
        """Return the number of rows."""

    def take(self, numbers: np.ndarray) -> pa.Table:
        """Return rows by their numbers, in this order."""

    def column(self, name: str) -> Iterator[Any]:
        """Yield the cells of a column, in order."""

    def names(self) -> Iterator[tuple[str, str | None]]:
        """Yield key and split of each row, by where it lies."""

    def narrow(self, columns: Collection[str]) -> None:
        """Read these columns only."""


@final
class ArrowSource(DataSource):
    """Rows of a table; its columns `key` and `split`, if any, hold the keys and splits, as in CSV files.

    Args:
        rows: the rows, in memory or in files.
    """

    def __init__(self, rows: ArrowRows) -> None:
        self._rows = rows
        self._columns = {column.name: column for column in columns_of_schema(rows.schema)}
        self._has = _OF_ROWS & {*rows.schema.names}
        self._is_of_tars = "key" not in self._has and {*rows.schema.names} >= _OF_TARS
        self.identity = rows.identity
        self.files = {file.name: file.path for file in rows.files}
        self.features = {
            name: feature for name, column in self._columns.items() if (feature := column.feature) is not None
        }
        self.refused = {name: column.refused for name, column in self._columns.items() if column.refused}
        self.dicts = _dicts_of(self._columns.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        block = self.block(np.array([number]))
        return {name: cells[0][:] if isinstance(cells, tuple) else cells[0] for name, cells in block.items()}

    def block(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return the columns of some rows, as `DatasetWriter.read_block` does.

        Args:
            numbers: int64 (n,), the rows.
        """
        table = self._rows.take(numbers)
        return {name: column.cells(table, numbers, self.features.get(name)) for name, column in self._columns.items()}

    def field_names(self) -> list[str]:
        """Return the names of the fields."""
        return list(self._columns)

    def narrow(self, names: Collection[str]) -> None:
        """Read these fields only."""
        self._columns = {name: column for name, column in self._columns.items() if name in names}
        self._rows.narrow(
            {column.path[0] for column in self._columns.values()} | self._has
            | (_OF_TARS if self._is_of_tars else frozenset())
        )  # fmt: skip

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self.features = {**self.features, **features}

    def cells_of(self, name: str) -> Iterator[Any]:
        """Yield the cells of a column, in order, without reading others."""
        return self._rows.column(name)

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        keys = self._rows.column("key") if "key" in self._has else itertools.repeat(None)
        if self._is_of_tars:
            archives = map(_archive_of, self._rows.column("__url__"))
            keys = _keys_of_tars(list(zip(map(_fit, self._rows.column("__key__")), archives, strict=True)))
        splits = self._rows.column("split") if "split" in self._has else itertools.repeat(None)
        for number, ((place, of_file), key, split) in enumerate(zip(self._rows.names(), keys, splits, strict=False)):
            if key is None and "key" in self._has:
                raise SourceError(f"row {number}, column 'key' of the table is empty; fill it in, or drop the row")
            yield place if key is None else str(key), split if "split" in self._has else of_file


@final
class _MemoryTable:
    """The rows of a table in memory."""

    files: Sequence[SourceFile] = ()

    def __init__(self, table: pa.Table) -> None:
        self.identity = content_of(table)
        self._table = _readable(table)
        self.schema = self._table.schema

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def take(self, numbers: np.ndarray) -> pa.Table:
        # `slice` copies nothing, and `take` of text fails above 2 GB in a column.
        first = int(numbers[0])
        if (np.diff(numbers) == 1).all():
            return self._table.slice(first, len(numbers))
        return self._table.take(numbers)

    def column(self, name: str) -> Iterator[Any]:
        return iter(self._table.column(name).to_pylist())

    def names(self) -> Iterator[tuple[str, str | None]]:
        return ((f"{number:08d}", None) for number in range(len(self)))

    def narrow(self, columns: Collection[str]) -> None:
        self._table = self._table.select([name for name in self._table.column_names if name in columns])


_MOST_DECODED = 256 << 20  # bytes of row groups that a worker holds


@frozen()
class FolderValue:
    """A value that the name of a folder gives all rows below it: `year=2026`.

    Attributes:
        value: the value.
        is_number: whether the folders of that name all hold integers; otherwise they hold text.
    """

    value: int | str | None
    is_number: bool

    def field(self, name: str) -> Any:
        """Return the field of its column."""
        import pyarrow as pa

        return pa.field(name, pa.int64() if self.is_number else pa.string())


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # of Hive, Spark, pyarrow and polars: an empty cell


def folder_values(files: Sequence[SourceFile]) -> list[dict[str, FolderValue]]:
    """Return the columns that the folders of each file name, as Hive, Spark and `pyarrow.dataset` lay tables out.

    Args:
        files: the files of one table.

    Raises:
        SourceError: some files lie in such folders, and others do not.
    """
    shared = os.path.commonpath([os.path.dirname(file.path) for file in files]) if files else ""
    found: list[dict[str, str | None]] = []
    for file in files:
        below = os.path.dirname(file.name) or os.path.relpath(os.path.dirname(file.path), shared).replace(os.sep, "/")
        pairs = [part.partition("=") for part in below.split("/") if "=" in part]
        found.append({name: None if text == _NO_VALUE else unquote(text) for name, _, text in pairs if name})
    for file, values in zip(files, found, strict=True):
        if values.keys() != found[0].keys():
            raise SourceError(
                f"{file.path} lies in folders that give it the columns ({', '.join(values)}), but {files[0].path} in "
                f"folders that give it ({', '.join(found[0])}); lay all files out alike"
            )
    numbers = {
        name: all(values[name] is None or re.fullmatch(r"-?(0|[1-9]\d{0,17})", values[name] or "") for values in found)
        for name in (found[0] if found else ())
    }
    return [
        {name: FolderValue(int(text) if text is not None and numbers[name] else text, numbers[name])
         for name, text in values.items()}
        for values in found
    ]  # fmt: skip


def _with_folders(table: pa.Table, values: Mapping[str, FolderValue]) -> pa.Table:
    """Return a table with the columns that its folders give."""
    import pyarrow as pa

    for name, value in values.items():
        field = value.field(name)
        table = table.append_column(field, pa.repeat(pa.scalar(value.value, field.type), table.num_rows))
    return table


@final
class _TableFiles:
    """The rows of Parquet or Arrow files, each group of rows read when one of them is needed.

    Args:
        files: the files, in the order of their rows.
        is_parquet: whether they are Parquet; Arrow files are mapped into memory.
        may_differ: whether a column may be missing in some files, or of a narrower type, as where each file has the
            types of its own values.
    """

    def __init__(self, files: Sequence[SourceFile], *, is_parquet: bool, may_differ: bool = False) -> None:
        self.files = files
        self.identity = "the rows of files"  # whose content counts
        self._is_parquet = is_parquet
        self._may_differ = may_differ
        self._splits = splits_of(files)
        groups: list[tuple[int, int]] = []
        rows: list[int] = []
        self.schema: Any = None
        self._folders: list[dict[str, Any]] = []
        for number, (file, values) in enumerate(zip(files, folder_values(files), strict=True)):
            schema, counts = self._outline(file)
            # A writer may repeat the values in the file, as polars does: they are typed there.
            self._folders.append({name: value for name, value in values.items() if name not in schema.names})
            for name, value in self._folders[-1].items():
                schema = schema.append(value.field(name))
            schema = _readable_schema(schema)
            if self.schema is None:
                self.schema = schema
            if may_differ:
                self.schema = self._widened(schema, file)
            else:
                self._check_schema(schema, file)
            groups += [(number, group) for group in range(len(counts))]
            rows += counts
        self._groups = groups
        self._ends = np.cumsum(rows, dtype=np.int64) if rows else np.zeros(0, np.int64)
        self._wanted: Collection[str] | None = None
        self._held: dict[int, pa.Table] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, numbers: np.ndarray) -> pa.Table:
        import pyarrow as pa

        places = np.searchsorted(self._ends, numbers, side="right")
        pieces, order = [], []
        for place in np.unique(places).tolist():
            chosen = np.flatnonzero(places == place)
            start = self._ends[place - 1] if place else 0
            pieces.append(self._group(place).take(numbers[chosen] - start))
            order.append(chosen)
        found = pa.concat_tables(pieces)
        here = np.concatenate(order)
        return found if len(pieces) == 1 else found.take(np.argsort(here))

    def column(self, name: str) -> Iterator[Any]:
        for place in range(len(self._groups)):
            yield from self._read(place, [name]).column(name).to_pylist()

    def names(self) -> Iterator[tuple[str, str | None]]:
        before = 0
        numbers: dict[int, int] = {}
        for (file, _), end in zip(self._groups, self._ends.tolist(), strict=True):
            stem = f"{self.files[file].stem}-" if len(self.files) > 1 else ""
            first = numbers.get(file, 0)
            for number in range(first, first + end - before):
                yield f"{stem}{number:08d}", self._splits[file]
            numbers[file], before = first + end - before, end

    def narrow(self, columns: Collection[str]) -> None:
        self._wanted = columns
        self._held = {}

    def _group(self, place: int) -> pa.Table:
        """Return a group of rows; those read last stay in memory."""
        found = self._held.pop(place, None)
        if found is None:
            found = self._read(place, self._wanted)
            while self._held and found.nbytes + sum(table.nbytes for table in self._held.values()) > _MOST_DECODED:
                del self._held[next(iter(self._held))]
        self._held[place] = found
        return found

    def _read(self, place: int, columns: Collection[str] | None) -> pa.Table:
        import pyarrow as pa
        from pyarrow import parquet

        number, group = self._groups[place]
        file = self.files[number]
        names = [name for name in self.schema.names if columns is None or name in columns]
        own = [name for name in names if name not in self._folders[number]]
        wanted = pa.schema([self.schema.field(name) for name in names])
        try:
            if self._is_parquet:
                with parquet.ParquetFile(file.path, page_checksum_verification=True) as opened:
                    found = opened.read_row_group(group, columns=own, use_threads=False)
            else:
                found = _mapped(file.path).read_all()
                found.validate(full=True)  # Arrow follows offsets blindly, also out of its memory
            if self._may_differ:
                found = _readable(found.select([name for name in own if name in found.column_names]))
                return pa.concat_tables([wanted.empty_table(), found], promote_options="permissive")
            return _readable(_with_folders(found.select(own), self._folders[number]).select(names)).cast(wanted)
        except (pa.ArrowException, OSError) as error:
            text = str(error).partition("\n")[0]
            raise CorruptDataError(f"{file.path}: row group {group} cannot be read: {text}") from error

    def _outline(self, file: SourceFile) -> tuple[Any, list[int]]:
        """Return the schema of a file, and how many rows each of its groups has."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            if self._is_parquet:
                with parquet.ParquetFile(file.path) as opened:
                    footer = opened.metadata
                    counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
                    return opened.schema_arrow, counts
            reader = _mapped(file.path)
            return reader.schema, [reader.read_all().num_rows]
        except (pa.ArrowException, OSError) as error:
            text = str(error).partition("\n")[0]
            kind = "Parquet" if self._is_parquet else "Arrow"
            raise SourceError(f"{file.path} cannot be read as {kind}: {text}; write the file again") from error

    def _widened(self, schema: Any, file: SourceFile) -> Any:
        """Return a schema for the rows of a file and of those before it."""
        import pyarrow as pa

        try:
            return pa.unify_schemas([self.schema, schema], promote_options="permissive")
        except pa.ArrowException as error:
            raise SourceError(
                f"{file.path}: its columns do not fit those of {self.files[0].path}: {error}; give all rows values of "
                "one type"
            ) from error

    def _check_schema(self, schema: Any, file: SourceFile) -> None:
        if schema.equals(self.schema):
            return
        ours, theirs = ({field.name: str(field.type) for field in found} for found in (self.schema, schema))
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if names or len(self.schema) != len(schema):
            name = names[0]
            raise SourceError(
                f"{file.path}: column {name!r} is {theirs.get(name, 'missing')}, but {ours.get(name, 'missing')} in "
                f"{self.files[0].path}; give all files the same columns, or leave it out of the files"
            )


def _mapped(path: str) -> Any:
    """Return a reader of an Arrow file or stream, mapped into memory; also of the one in a chunk of litdata."""
    import pyarrow as pa

    data = pa.memory_map(path).read_buffer()
    if (span := litdata_table(path)) is not None:
        data = data.slice(*span)
    try:
        return pa.ipc.open_file(data)
    except pa.ArrowInvalid:
        stream = pa.ipc.open_stream(data)
        # Arrow takes the end of the file for that of the stream, also where batches are missing.
        if not data.slice(max(0, data.size - 4)).equals(pa.py_buffer(bytes(4))):
            raise pa.ArrowInvalid("the stream has no end: it was cut off, or whoever wrote it was stopped") from None
        return stream


@final
class _HfTable:
    """The rows of a `datasets.Dataset`, as its Arrow table holds them: encoded files are not decoded."""

    files: Sequence[SourceFile] = ()

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")
        self.schema = dataset.features.arrow_schema
        # By this name `datasets` itself identifies a table and everything that was done to it.
        self.identity = dataset._fingerprint

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, numbers: np.ndarray) -> pa.Table:
        found: pa.Table = self._dataset[numbers.tolist()]
        return found

    def column(self, name: str) -> Iterator[Any]:
        for batch in self._dataset.select_columns([name]).iter(_BATCH_ROWS):
            yield from batch.column(name).to_pylist()

    def names(self) -> Iterator[tuple[str, str | None]]:
        return ((f"{number:08d}", None) for number in range(len(self)))

    def narrow(self, columns: Collection[str]) -> None:
        self._dataset = self._dataset.select_columns([name for name in self.schema.names if name in columns])


def _of_hugging_face(dataset: Any, spool: SpoolOptions | None) -> DataSource | None:
    if hasattr(dataset, "__len__"):
        # The rows of `with_transform` are those that the user's function makes of the table.
        has_transform = dataset.format["type"] == "custom"
        return _MapSource(dataset, None, dataset._fingerprint) if has_transform else ArrowSource(_HfTable(dataset))
    return None if spool is None else SpooledSource(RowStream(dataset, None), spool)


@final
class _SplitSource(DataSource):
    """One dataset per split."""

    def __init__(self, parts: dict[str, DataSource]) -> None:
        self.parts = list(parts.values())
        self._parts = parts
        self.identity = {split: identity_of(part) for split, part in parts.items()}
        first = next(iter(parts.values()))
        self.features = first.features
        self.refused = getattr(first, "refused", {})
        self.files = {
            f"{split}/{name}": path for split, part in parts.items() for name, path in _files_of(part).items()
        }

    @functools.cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self._parts.values())))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not number and isinstance(self.parts[0], SpooledSource):
            return self.parts[0][0]  # without counting the rows of iterators
        place = bisect.bisect_right(self._ends, number)
        return list(self._parts.values())[place][number - (self._ends[place - 1] if place else 0)]

    @property
    def dicts(self) -> Collection[str]:
        """The names of the dicts in a sample."""
        return dicts_of(self.parts[0])

    def field_names(self) -> Sequence[str] | None:
        """Return the names of the fields; None where only a sample shows them."""
        return names_of(next(iter(self._parts.values())))

    def narrow(self, names: Collection[str]) -> None:
        """Read these fields only, where a part can."""
        for part in self._parts.values():
            if names_of(part) is not None:
                part.narrow(names)  # type: ignore[attr-defined]  # it is `Narrowed`

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self.features = {**self.features, **features}
        for part in self._parts.values():
            if hasattr(part, "declare"):
                part.declare(features)

    def block(self, numbers: np.ndarray) -> dict[str, Any] | None:
        """Return the columns of some rows of one table; None for other rows."""
        place = bisect.bisect_right(self._ends, int(numbers.min()))
        part = self.parts[place]
        if not isinstance(part, ArrowSource) or numbers.max() >= self._ends[place]:
            return None
        return part.block(numbers - (self._ends[place - 1] if place else 0))

    def contents(self) -> Iterator[int] | None:
        """Return the digest of each row, 0 where it is not known; None where none is."""
        if not any(isinstance(part, SpooledSource) for part in self.parts):
            return None
        return itertools.chain.from_iterable(
            part.contents() if isinstance(part, SpooledSource) else itertools.repeat(0, len(part))
            for part in self.parts
        )

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        for split, part in self._parts.items():
            for key, _ in part.keys_and_splits():
                yield f"{split}-{key}", split


def names_of(source: DataSource) -> Sequence[str] | None:
    """Return the names of the fields of a source; None where only a sample shows them."""
    found = getattr(source, "field_names", None)
    return None if found is None else found()


def dicts_of(source: DataSource) -> Collection[str]:
    """Return the names of the fields that are dicts in a sample of a source, whose fields are `DICT/FIELD` here.

    Args:
        source: dataset that `open_source` returned, whose first sample was read where it does not know its fields.
    """
    return getattr(source, "dicts", None) or frozenset()


def _files_of(source: DataSource) -> dict[str, str]:
    return getattr(source, "files", None) or {}


@final
class RecordsSource(DataSource):
    """Records of files that another library wrote, each read by its place.

    Args:
        files: the files, in the order of their records.
        form: how the library lays out records.
    """

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

    def field_names(self) -> list[str]:
        """Return the names of the fields."""
        return self._names

    def narrow(self, names: Collection[str]) -> None:
        """Read these fields only."""
        self._names = [name for name in self._names if name in names]

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self._form.declare(features)
        self.features = {**self.features, **features}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        own = [self._form.keys(file) for file in range(len(self._sources))]
        known = [key for keys in own if keys is not None for key in keys]
        are_unique = len(set(known)) == len(known)
        for file, (source, split, count) in enumerate(
            zip(self._sources, self._splits, self._form.counts(), strict=True)
        ):
            stem = f"{source.stem}-" if len(self._sources) > 1 else ""
            keys = own[file]
            for number in range(count):
                key = f"{number:08d}" if keys is None else _fit(keys[number])
                yield key if keys is not None and are_unique else f"{stem}{key}", split


# ---------------------------------------------------------------- rows that come one after another
#
# An iterator is read once, by the driver, and each row is written to disk as it comes:
#
#     iterator ── sample ──> rows.tfrecord    encoded; pictures as they came, so that workers compress them, and
#                                             lists and dicts with pictures or bytes in them as they are, `packed`
#                            rows.offsets     uint64 per row: where it begins
#                            rows.jsonl       [key, split, digest, archive] per row
#                            state.json       how many rows are complete, their features, and the state of the source
#
# Workers read rows by offset. `state.json` is replaced every second or so, after the rows that it counts; what lies
# behind them is cut off. A folder that the user names is kept: a finished one is not read again, and an unfinished one
# continues where it ended, if the source says how:
#
#     state_dict() and load_state_dict(state)    Hugging Face, torchdata, and whoever follows them
#     rows(start=...)                            a function that returns the rows from there on
#
# Without either, it begins again.


_ROWS, _OFFSETS, _NAMES, _STATE = "rows.tfrecord", "rows.offsets", "rows.jsonl", "state.json"
_BATCH_ROWS = 4096
_SAVE_S = 1.0
_END: Any = object()
_NOT_EXACT = "BufferShuffled"  # of Hugging Face: the rows in its buffer are lost when a state is loaded


@final
class RowStream:
    """The rows of an iterator, of what has one, or of a function that returns one.

    Args:
        rows: what the rows come from.
        names: names of the fields, for rows that are tuples.
    """

    def __init__(self, rows: Any, names: Sequence[str] | None) -> None:
        if type(rows).__name__ == "DataLoader":
            raise SourceError(
                "the dataset is a DataLoader, which gives batches; give its dataset, as in loader.dataset"
            )
        if _module_of(rows) == "datasets" and rows.features is None and hasattr(rows, "_resolve_features"):
            rows = rows._resolve_features()
        schema = rows.features.arrow_schema if _module_of(rows) == "datasets" and rows.features else None
        self._columns = [] if schema is None else columns_of_schema(schema)
        self._gives_tables = False
        if self._columns:
            import datasets

            for name in [column.name for column in self._columns if column.is_file and len(column.path) == 1]:
                rows = rows.cast_column(name, _undecoded(rows.features[name]))
            assert datasets
        self._rows = rows
        self._names = names
        self._members = TarRows()
        self._first: tuple[Any, Any] | None = None  # archive and key of the first sample of WebDataset

    @property
    def features(self) -> dict[str, Feature]:
        """The features that the source declares; a stream of tables does so with its first one."""
        declared = {column.name: column.feature for column in self._columns if column.feature is not None}
        return {**self._members.features, **declared}

    @property
    def has_columns(self) -> bool:
        """Whether the source declares its fields."""
        return bool(self._columns)

    @property
    def refused(self) -> dict[str, str]:
        """The fields that no feature stores, each with the reason."""
        return {**self._members.refused, **{one.name: one.refused for one in self._columns if one.refused}}

    def show(self, row: Any) -> None:
        """Take what the first row shows of the fields."""
        if self._is_of_tar(row):
            self._members.show(row)

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self._members.declare(features)

    def start(self, count: int, state: Any) -> Iterator[Any] | None:
        """Return the rows from a number on; None where the source cannot begin there.

        Args:
            count: number of rows that are not needed again.
            state: what `state` returned after them.
        """
        if callable(self._rows) and not hasattr(self._rows, "__iter__"):
            if count and not self._takes_start:
                return None
            found: Iterable[Any] = self._rows(start=count) if self._takes_start else self._rows()
            return self._single_rows(iter(found))
        if count and (state is None or not self._has_state):
            return None
        if count:
            self._rows.load_state_dict(state)
        rows: Iterable[Any] = self._rows.as_numpy_iterator() if hasattr(self._rows, "as_numpy_iterator") else self._rows
        return self._single_rows(iter(rows))

    def _single_rows(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the rows of each item that is a table, such as a batch of Arrow or a chunk of pandas; other items."""
        number, schema = 0, None
        # Not `for item in items`: an iterator of litdata begins again whenever it is asked for itself.
        while (item := self._next(items, number)) is not _END:
            table = table_of(item) if not number or schema is not None else None
            if table is None:
                yield item
            else:
                table = _readable(table)
                if schema is None:
                    schema, self._gives_tables = table.schema, True
                    self._columns = columns_of_schema(schema)
                if not table.schema.equals(schema):
                    raise SourceError(
                        f"table {number} of the source has other columns than the first one "
                        f"({_described(table.schema)}; want {_described(schema)}); give all of them the same"
                    )
                yield from TableRows(table)
            number += 1

    def _next(self, items: Iterator[Any], number: int) -> Any:
        try:
            return next(items, _END)
        except Exception as error:
            error.add_note(f"datamat: the source raised this in place of its item {number} (counted from 0)")
            raise

    def state(self) -> Any:
        """Return what the source needs to continue after the row that it gave last; None where it has no such state."""
        return self._rows.state_dict() if self._has_state and not self._gives_tables else None

    def sample(self, row: Any) -> dict[str, Any]:
        """Return a row as a sample."""
        if self._is_of_tar(row):
            return _sample_of_tar(row, self._members)
        if not self._columns:
            return _sample_of(row, self._names)
        found = {name: row[name] for name in _OF_ROWS if name in row}
        if row.keys() >= _OF_TARS:
            found = {"key": _fit(row["__key__"]), **found}
        for column in self._columns:
            value = row
            for name in column.path:
                value = None if value is None else value[name]
            found[column.name] = _typed(value, column)
        return found

    def dicts(self, row: Any) -> frozenset[str]:
        """Return the names of the fields of a row that are dicts."""
        row = self._members.nested(row) if self._is_of_tar(row) else row
        return _dicts_of(self._columns) if self._columns else _dicts_in(row)

    def archive(self, row: Any) -> str | None:
        """Return what tells the keys of a sample of WebDataset from those of other archives; None for other rows.

        Raises:
            SourceError: the first sample comes again, as it does without end where shards are drawn.
        """
        if not TarRows.are(row) or "key" in row:
            return None
        place = row.get("__url__"), row["__key__"]
        if place == self._first:
            raise SourceError(
                f"the first sample, {row['__key__']!r}, comes again; give each sample once: leave resampled=True, "
                ".repeat() and .with_epoch() out"
            )
        self._first = self._first or place
        return _archive_of(place[0])

    def _is_of_tar(self, row: Any) -> bool:
        return not self._columns and TarRows.are(row)

    @property
    def _takes_start(self) -> bool:
        try:
            return "start" in signature_of(self._rows).parameters
        except (TypeError, ValueError):
            return False

    @property
    def _has_state(self) -> bool:
        if not (hasattr(self._rows, "state_dict") and hasattr(self._rows, "load_state_dict")):
            return False
        # litdata's asks for what only its loader knows.
        if any(one.default is one.empty for one in signature_of(self._rows.state_dict).parameters.values()):
            return False
        step = getattr(self._rows, "_ex_iterable", None)
        while step is not None:
            if type(step).__name__.startswith(_NOT_EXACT):
                return False
            step = getattr(step, "ex_iterable", None)
        return True


def _undecoded(kind: Any) -> Any:
    """Return a type of Hugging Face whose encoded files, if any, are left as they are."""
    if isinstance(kind, dict):
        return {name: _undecoded(inner) for name, inner in kind.items()}
    if hasattr(kind, "decode"):
        return dataclasses.replace(kind, decode=False)
    inner = getattr(kind, "feature", None)
    return kind if inner is None else dataclasses.replace(kind, feature=_undecoded(inner))


def _typed(value: Any, column: Column) -> Any:
    """Return a Python value in the type that its column declares."""
    if value is None:
        return None
    if column.is_file:
        return column.content(value, "")
    match column.feature:
        case Tensor(dtype=dtype):
            return np.asarray(without_items(value, column.feature), dtype_of(dtype))
        case Json():
            return _as_json(value, column.type)
        case Scalar(dtype=dtype):
            return dtype_of(dtype).type(value)
    return value


def _unchanged(value: Any) -> Any:
    return value


def _described(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


@final
class SpooledSource(DataSource):
    """The rows of an iterator, by position, from a folder that they are written to as they come.

    Args:
        stream: the rows.
        options: where they are written.
    """

    identity = "rows of an iterator"  # each with its digest

    def __init__(self, stream: RowStream, options: SpoolOptions) -> None:
        self._stream: RowStream | None = stream
        self._declared: dict[str, Feature] = {}
        self.features = dict(stream.features)
        self.refused = stream.refused
        self.dicts: frozenset[str] = frozenset()
        self._packed: frozenset[str] = frozenset()
        self._wanted: list[str] | None = None
        self._first: dict[str, Any] | None = None  # the first row, with lists of later ones for those without items
        self._ahead: list[tuple[Any, Any]] = []  # rows that came to show what lists hold, each with the state after it
        self._iterator: Iterator[Any] | None = None
        self._count = -1  # until all have come
        self._offsets: np.ndarray | None = None
        if options.folder is None:
            self._folder = temporary_folder(self)
        else:
            self._folder = os.path.abspath(expand_home(options.folder))
            os.makedirs(self._folder, exist_ok=True)
        self._found = self._former_state()

    def __getstate__(self) -> dict[str, Any]:
        self._fill()
        unsent: dict[str, Any] = {"_stream": None, "_iterator": None, "_first": None, "_ahead": [], "_offsets": None}
        return {**self.__dict__, **unsent}

    def __len__(self) -> int:
        self._fill()
        return self._count

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not number and self._count < 0 and self._first is not None:
            return dict(self._first)
        self._fill()
        if self._offsets is None:
            self._offsets = np.fromfile(os.path.join(self._folder, _OFFSETS), "<u8")
        try:
            with open(os.path.join(self._folder, _ROWS), "rb") as file:
                file.seek(int(self._offsets[number]))
                payload = read_payload(file)
            if payload is None:
                raise CorruptDataError("the file ends before it")
            columns = decode_example(payload)
        except CorruptDataError as error:
            raise CorruptDataError(f"{self._folder}: row {number} is damaged: {error}; remove the folder") from error
        sample = {name: feature.decode(name, columns) for name, feature in self._stored.items()}
        return {name: unpacked(value) if name in self._packed else value for name, value in sample.items()}

    def field_names(self) -> list[str]:
        """Return the names of the fields, by the first row."""
        if self._found:
            return list(self._found["fields"])
        self._begin()
        return [] if self._first is None else list(self._first)

    def narrow(self, names: Collection[str]) -> None:
        """Store these fields only."""
        self._wanted = [name for name in self.field_names() if name in names]
        self._first = self._first and {name: self._first[name] for name in self._wanted}

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self._declared = dict(features)
        if self._stream is not None:
            self._stream.declare(features)
        self.features = {**self.features, **features}

    @property
    def has_columns(self) -> bool:
        """Whether the source says what its fields hold, so that bytes which are no picture are meant to be there."""
        return self._found is not None or (self._stream is not None and self._stream.has_columns)

    @property
    def is_empty(self) -> bool:
        """Whether there is no first row."""
        return not self.field_names()

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        first = next(self._named(), None)
        keys: Iterable[str | None] = (key for key, _, _, _ in self._named())
        if first is not None and first[3] is not None:
            keys = _keys_of_tars([(str(key), archive) for key, _, _, archive in self._named()])
        for number, (key, (_, split, _, _)) in enumerate(zip(keys, self._named(), strict=True)):
            yield f"{number:08d}" if key is None else key, split

    def contents(self) -> Iterator[int]:
        """Yield a digest of each row."""
        for _, _, digest, _ in self._named():
            yield digest

    def _named(self) -> Iterator[tuple[str | None, str | None, int, str | None]]:
        self._fill()
        with open(os.path.join(self._folder, _NAMES), "rb") as file:
            for line in itertools.islice(file, self._count):
                yield json.loads(line)

    def _begin(self) -> None:
        """Take the first row, which shows the fields."""
        if self._iterator is not None or self._stream is None:
            return
        self._iterator = self._stream.start(0, None)
        assert self._iterator is not None, "every source begins at its beginning"
        row = next(self._iterator, _END)
        if row is not _END:
            self._ahead.append((row, self._stream.state()))
            self._stream.show(row)
            sample = self._stream.sample(row)
            self._first = {name: value for name, value in sample.items() if name not in _OF_ROWS}
            self.features = {**self._stream.features, **self.features}
            self.refused = self._stream.refused
            self.dicts = self._stream.dicts(row)
            fill_lists(self._first, self.features, self._look_ahead())

    def _look_ahead(self) -> Iterator[dict[str, Any]]:
        """Yield the rows behind the first, which stay to be written."""
        assert self._stream is not None
        assert self._iterator is not None
        while (row := next(self._iterator, _END)) is not _END:
            self._ahead.append((row, self._stream.state()))
            try:
                yield self._stream.sample(row)
            except (SchemaError, InputError, SourceError):
                return  # it is refused with its number when it is written

    def _former_state(self) -> dict[str, Any] | None:
        path = os.path.join(self._folder, _STATE)
        if not os.path.exists(path):
            return None
        try:
            found: dict[str, Any] = read_json(path)
            stored = Features.from_json(found["features"])
            self._stored: dict[str, Feature] = {name: stored[name] for name in found["fields"] if name in stored}
            self.dicts, self._packed = frozenset(found["dicts"]), frozenset(found["packed"])
            return found
        except (OSError, ValueError, KeyError) as error:
            raise SourceError(f"{path} is damaged: {error}; remove the folder {self._folder}") from error

    def _fill(self) -> None:
        """Write all rows that are not there yet."""
        if self._count >= 0:
            return
        found = self._found
        if found is not None:
            self._check_former(found)
            if found["is_complete"]:
                self._count = found["count"]
                return
            self._iterator = self._stream.start(found["count"], found["state"]) if self._stream else None
            if self._iterator is not None:
                self._write(found)
                return
            self._found = None  # it begins again
        self._begin()
        self._write({"count": 0, "num_bytes": 0, "name_bytes": 0})

    def _check_former(self, found: Mapping[str, Any]) -> None:
        declared = {name: feature.to_json() for name, feature in self._declared.items()}
        wanted = list(found["fields"]) if self._wanted is None else self._wanted
        if list(self._stored) != wanted or found["declared"] != declared:
            raise SourceError(
                f"{self._folder} holds rows with the fields {', '.join(self._stored)}, written for other columns= or "
                "features=; remove the folder, or name another"
            )

    def _write(self, former: Mapping[str, Any]) -> None:
        """Write rows behind those that are there.

        Args:
            former: how many rows, and bytes in each file, are complete.
        """
        stream, count = self._stream, former["count"]
        assert stream is not None
        paths = [os.path.join(self._folder, name) for name in (_ROWS, _OFFSETS, _NAMES)]
        with contextlib.ExitStack() as stack:
            rows, offsets, names = (stack.enter_context(open(path, "ab")) for path in paths)
            rows.truncate(former["num_bytes"])
            offsets.truncate(8 * count)
            names.truncate(former["name_bytes"])
            place, name_bytes = former["num_bytes"], former["name_bytes"]
            saved = time.monotonic()
            for row, state in self._rows_with_state(count):
                key, split, columns = self._encoded(row, count)
                archive = stream.archive(row)
                payload = encode_example(columns, self._kinds)
                digest = xxhash.xxh3_64_intdigest(payload) >> 1
                offsets.write(place.to_bytes(8, "little"))
                place += rows.write(b"".join(frame([payload], len(payload))))
                name_bytes += names.write(json.dumps([key, split, digest, archive]).encode() + b"\n")
                count += 1
                if time.monotonic() - saved > _SAVE_S:
                    self._save((rows, offsets, names), (count, place, name_bytes), state)
                    saved = time.monotonic()
            if count:
                self._save((rows, offsets, names), (count, place, name_bytes), None)
        self._iterator, self._stream, self._count = None, None, count

    def _rows_with_state(self, count: int) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Yield each row, and a function that returns the state of the source after it."""
        stream, iterator = self._stream, self._iterator
        assert stream is not None
        assert iterator is not None
        for row, state in self._ahead:
            yield row, functools.partial(_unchanged, state)
        self._ahead = []
        # Not `for row in iterator`: that of litdata begins again whenever it is asked for itself.
        while (row := next(iterator, _END)) is not _END:
            yield row, stream.state

    def _save(self, files: Sequence[BinaryIO], size: tuple[int, int, int], state: Callable[[], Any] | None) -> None:
        """Let the rows that are written count.

        Args:
            files: files of rows, offsets and names.
            size: number of rows, and bytes in the files of rows and of names.
            state: function that returns the state of the source; None where all rows are there.
        """
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        found = None if state is None else state()
        try:
            json.dumps(found)
        except (TypeError, ValueError):  # it cannot be stored, so the source cannot continue
            found = None
        commit_json(
            os.path.join(self._folder, _STATE),
            {
                **dict(zip(("count", "num_bytes", "name_bytes"), size, strict=True)),
                "fields": self._fields,
                "dicts": sorted(self.dicts),
                "packed": sorted(self._packed),
                "features": {name: feature.to_json() for name, feature in self._stored.items()},
                "declared": {name: feature.to_json() for name, feature in self._declared.items()},
                "state": found,
                "is_complete": state is None,
            },
        )

    def _encoded(self, row: Any, number: int) -> tuple[str | None, str | None, dict[str, Any]]:
        """Return key, split and columns of a row; raise `SourceError` where it is not like the first one."""
        assert self._stream is not None
        try:
            sample = self._stream.sample(row)
            key, split = (sample.pop(name, None) for name in ("key", "split"))
            if number == 0 or not hasattr(self, "_kinds"):
                self._decide(sample, number)
            columns: dict[str, Any] = {}
            if sample.keys() != self._known:
                odd = sorted(map(str, sample.keys() ^ self._known))[0]
                has = "has the field" if odd in sample else "lacks the field"
                raise SchemaError(f"it {has} {odd!r}, unlike the first row; give all rows the same fields")
            for name, feature in self._stored.items():
                value = sample[name]
                if name in self._packed:  # what its feature refuses is refused when the sample is encoded
                    columns |= feature.encode(name, packed(name, value))
                    continue
                if value is None and not feature.takes_none:
                    raise SchemaError(
                        f"field {name!r} is None; fill it in, declare it with features={{{name!r}: Nullable(...)}}, "
                        f"leave the row out, or leave the field out with drop=[{name!r}]"
                    )
                declared = self._declared.get(name)
                value = without_items(value, feature) if declared != feature else converted(value, feature)
                columns |= feature.encode(name, value)
        except (SchemaError, InputError, SourceError) as error:
            text = str(error).replace("; cast it in read", "; give all rows one type, or declare it with features=")
            raise SourceError(f"row {number}: {text}") from error
        return None if key is None else str(key), None if split is None else str(split), columns

    def _decide(self, sample: Mapping[str, Any], number: int) -> None:
        """Decide how fields are stored: as declared, or as the first row shows."""
        self._fields = list(sample)
        self._known = frozenset(sample)
        if number == 0:
            names = self._fields if self._wanted is None else self._wanted
            shown = {**sample, **(self._first or {})}
            found = {name: self._stored_as(name, shown[name]) for name in names}
            self._packed = frozenset(name for name, feature in found.items() if feature is None)
            self._stored = {name: feature or Bytes() for name, feature in found.items()}
        self._kinds = {
            column: kind for name, feature in self._stored.items() for column, kind in feature.columns(name).items()
        }

    def _stored_as(self, name: str, value: Any) -> Feature | None:
        """Return how a field is stored: pictures as they come, all else by its feature; None if as it is."""
        feature: Any = self.features.get(name)
        if _holds_files(feature):
            return None
        stored: Feature | None = feature
        if isinstance(feature, Nullable):
            return stored
        if isinstance(value, (bytes, bytearray)):
            return Text() if feature is not None and feature.value_type() == ("string", ()) else Bytes()
        is_number = isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biufcV"
        if is_number and (feature is None or target_of(feature) in {"image", "mask"}):
            return Tensor((None,) * value.ndim, value.dtype.name)
        if stored is not None:
            return stored
        try:
            found = Features.infer({name: value})[name]
        except (SchemaError, InputError) as error:
            raise SchemaError(
                f"{error}; or declare its feature with features={{{name!r}: ...}}, or leave it out with drop=[{name!r}]"
            ) from error
        return None if isinstance(found, Mapping) or _holds_files(found) else found


def _holds_files(feature: Any) -> bool:
    """Return whether a feature is of dicts, or of a list, or may be missing, and pictures or bytes may be in it."""
    inner = feature
    while isinstance(inner, (Nullable, ListOf)):
        inner = inner.feature
    return inner is not feature and isinstance(inner, (Mapping, *_OF_FILES_ALONE))


# A value as it is, whatever lists and dicts it is made of: the length of a JSON text, uint64, that text, and the bytes
# of what JSON has not, one after another. What JSON has not is a dict with the name of its kind there:
#
#     {"dict": [[key, value], ...]}    {"tuple": [...]}    {"bytes": length}    {"array": [dtype, shape, length]}
#     {"scalar": [dtype, length]}      {"objects": [shape, [...]]}              {"datetime": text}, and so on


def packed(name: str, value: Any) -> bytes:
    """Return the bytes that `unpacked` makes an equal value of; pictures and tensors are arrays there.

    Args:
        name: name of its field, for messages.
        value: dicts, lists and tuples of str, numbers, None, bytes, arrays, pictures, tensors, times, decimals and
            paths.

    Raises:
        SchemaError: something else is in it.

    Example:
        >>> unpacked(packed("boxes", [{"data": b"a", "size": (1, 2.5)}]))
        [{'data': b'a', 'size': (1, 2.5)}]
    """
    parts: list[bytes] = []
    try:
        text = json.dumps(_tree_of(name, value, "", parts), separators=(",", ":")).encode()
    except RecursionError as error:
        raise SchemaError(f"field {name!r} is nested too deep, or holds itself; flatten it in the source") from error
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpacked(data: bytes) -> Any:
    """Return the value that `packed` was given.

    Args:
        data: what it returned.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    return _value_of(json.loads(data[8:end]), io.BytesIO(data[end:]))


def _tree_of(name: str, value: Any, place: str, parts: list[bytes]) -> Any:
    """Return a value as JSON has it, and add to `parts` the bytes that it has not."""
    value = as_array(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _tree_of_array(name, value, place, parts)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (bytes, bytearray)):
        parts.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, Mapping):
        pairs = value.items()
        return {
            "dict": [
                [_tree_of(name, key, place, parts), _tree_of(name, item, f"{place}[{key!r}]", parts)]
                for key, item in pairs
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [_tree_of(name, item, f"{place}[{number}]", parts) for number, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    for kind, (types, text_of, _) in _WRITTEN_OUT.items():
        if isinstance(value, types):
            return {kind: text_of(value)}
    raise SchemaError(
        f"field {name!r} holds {kind_of(value)}{place and f' at {place}'}, which rows of an iterator cannot "
        "keep; give dicts, lists, str, numbers, bytes, arrays, pictures and times, or leave it out with "
        f"drop=[{name!r}]"
    )


def _tree_of_array(name: str, value: Any, place: str, parts: list[bytes]) -> Any:
    if value.dtype.kind in "OT":  # of Python's objects, such as text
        flat = enumerate(value.ravel().tolist())
        return {"objects": [value.shape, [_tree_of(name, item, f"{place}[{number}]", parts) for number, item in flat]]}
    is_plain = is_number_dtype(value.dtype) or value.dtype.kind in "SU"
    if not is_plain:
        raise SchemaError(
            f"field {name!r} holds an array of {value.dtype}{place and f' at {place}'}, which rows of an iterator "
            "cannot keep; give one array for each of its fields"
        )
    parts.append(value.tobytes())
    dtype = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
    if isinstance(value, np.generic):
        return {"scalar": [dtype, len(parts[-1])]}
    return {"array": [dtype, value.shape, len(parts[-1])]}


def _value_of(tree: Any, parts: io.BytesIO) -> Any:  # noqa: PLR0911 -- one for each kind
    """Return the value of what `_tree_of` returned, whose bytes come next in a file."""
    if isinstance(tree, list):
        return [_value_of(item, parts) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, held),) = tree.items()
    match kind:
        case "dict":
            return {_value_of(key, parts): _value_of(item, parts) for key, item in held}
        case "tuple":
            return tuple(_value_of(item, parts) for item in held)
        case "bytes":
            return parts.read(held)
        case "array":
            dtype, shape, length = held
            return np.ndarray(shape, dtype_of(dtype), bytearray(parts.read(length)))  # which may be written to
        case "scalar":
            dtype, length = held
            return np.ndarray((), dtype_of(dtype), parts.read(length))[()]
        case "objects":
            shape, items = held
            found = np.empty(len(items), object)
            found[:] = [_value_of(item, parts) for item in items]
            return found.reshape(shape)
    return _WRITTEN_OUT[kind][2](held)


_WRITTEN_OUT: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "float": (float, repr, float),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "path": (pathlib.PurePath, str, pathlib.Path),
}
"""Types whose values are written as text, by kind: how, and how they are read."""


@final
class _FinishedSource(DataSource):
    """Records of a finished directory; images stay encoded, so that their bytes are stored unchanged."""

    def __init__(self, folder: pathlib.Path) -> None:
        manifest, loaded = Manifest.read(folder), Loaded(LocalFolder(folder))
        shard_format = get_format(manifest.format).with_features(manifest.features)
        self._records = RecordFiles(loaded, manifest.shards, shard_format, RecordCache(0))
        self._keys = KeyIndex(loaded, manifest, None, self._records)
        self._splits = {split: sum(info.num_records for info in infos) for split, infos in manifest.splits.items()}
        self.features = {name: feature for name, feature in manifest.features.items() if name != "key"}
        self.identity = [info.checksum for info in manifest.shards]
        self.dicts = frozenset(manifest.features.nesting.groups)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> dict[str, Any]:
        columns: Any = self._records.read_record(number)
        return {name: feature.encoded_value(name, columns) for name, feature in self.features.items()}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        splits = itertools.chain.from_iterable(itertools.repeat(*item) for item in self._splits.items())
        for key, split in zip(self._keys.keys(), splits, strict=True):
            yield key.replace("#", "-"), split  # a copy is a sample of its own here, and # marks copies


@final
class _TfdsSource(DataSource):
    """Records of a directory that TFDS prepared."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._files = TfdsFiles(folder)
        self.features = self._files.features
        self.dicts = self._files.dicts
        self.identity = self._files.identity
        self.files = self._files.files

    def __len__(self) -> int:
        return sum(self._files.splits.values())

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._files.read_sample(number)

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        for split, count in self._files.splits.items():
            for number in range(count):
                yield f"{split}-{number:08d}", split


def _names(names: Sequence[str] | None, count: int) -> Sequence[str]:
    if names is None:
        return _PAIR[:count] if count <= len(_PAIR) else [f"field_{number}" for number in range(count)]
    if len(names) != count:
        raise SourceError(
            f"names are {', '.join(names)}, but a sample has {count_of(count, 'value')}; give one name for each"
        )
    return names


def _sample_of(item: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return an item of any dataset as a sample."""
    if isinstance(item, Mapping):
        return dict(_flattened(item))
    if hasattr(item, "_asdict"):
        return dict(_flattened(item._asdict()))
    values = item if isinstance(item, (tuple, list)) else (item,)
    return {name: _plain(value) for name, value in zip(_names(names, len(values)), values, strict=True)}


def _fit(key: str) -> str:
    """Return the key of a sample in a tar without what no key may hold, such as the slashes of its folders."""
    return _UNFIT.sub("-", key)


def _archive_of(url: str | None) -> str:
    """Return what the keys of an archive's samples begin with where archives repeat keys."""
    return _fit(_stem_and_ending(os.path.basename(url or ""))[0])


def _keys_of_tars(named: Sequence[tuple[str, str | None]]) -> Iterator[str]:
    """Yield the key of each sample, behind the name of its archive where archives repeat keys, as files of tars do.

    Args:
        named: key and archive of each sample.
    """
    repeats = len({key for key, _ in named}) < len(named) and len({archive for _, archive in named}) > 1
    return (f"{archive}-{key}" if repeats else key for key, archive in named)


def _sample_of_tar(row: Mapping[str, Any], members: TarRows) -> dict[str, Any]:
    """Return a row of WebDataset as a sample, with its key."""
    key = row["__key__"]
    if not isinstance(key, str):
        raise SourceError(
            f"a row is a batch of {count_of(len(key), 'sample')}; leave .batched() out, so that each is one"
        )
    found: dict[str, Any] = {"key": _fit(key)}
    for name, value in members.read(row).items():
        found |= {name: value} if name in members.features else dict(_flattened({name: value}))
    return found


def _dicts_in(item: Any, prefix: str = "") -> frozenset[str]:
    """Return the names of the dicts in an item of any dataset, as `_flattened` calls them."""
    fields = item._asdict() if hasattr(item, "_asdict") else item
    if not isinstance(fields, Mapping):
        return frozenset()
    inner = {f"{prefix}{name}": value for name, value in fields.items() if isinstance(value, Mapping)}
    return frozenset(inner).union(*(_dicts_in(value, f"{name}/") for name, value in inner.items()))


def _flattened(item: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> Any:
    """Return a value as features accept it: PIL images, tensors and lists of numbers as arrays."""
    value = _listed_numbers(value) if isinstance(value, (list, tuple)) else as_array(value)
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value


def _listed_numbers(value: Sequence[Any]) -> Any:
    """Return lists of numbers as an array, and any other list as it is: JSON holds it, also one without items."""
    if not len(value) or hasattr(value[0], "getbands"):  # pictures of Pillow, one of which may be as large as another
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return value
    return array if array.dtype.kind in "biufc" else value


def without_items(value: Any, feature: Feature | None) -> Any:
    """Return a list without items, which shows no type, as the array that its feature wants; any other value as it is.

    Args:
        value: value of a field.
        feature: feature of the field.
    """
    if feature is None or not isinstance(value, (list, tuple)) or value:
        return value
    if isinstance(getattr(feature, "feature", None), Mapping):  # a list of dicts, which needs no type
        return value
    dtype, shape = feature.value_type()
    if not shape or not holds_numbers(dtype):
        return value
    return np.empty((0, *(size or 0 for size in shape[1:])), dtype_of(dtype))


MOST_AHEAD = 100
"""Samples that are looked at for a list with items."""


def fill_lists(first: dict[str, Any], known: Collection[str], rest: Iterable[Mapping[str, Any]]) -> None:
    """Give the fields of a first sample that are lists without items the first list of the next samples that has some.

    Args:
        first: the sample; changed in place.
        known: fields whose feature is known.
        rest: the samples behind it, of which no more are asked for than needed, nor more than a hundred.
    """
    empty = {name for name, value in first.items() if isinstance(value, (list, tuple)) and not value} - set(known)
    samples = iter(rest)
    for _ in range(MOST_AHEAD):
        if not empty or (sample := next(samples, None)) is None:
            return
        found = {name: sample[name] for name in empty if shows_type(sample.get(name))}
        first |= found
        empty -= found.keys()


def shows_type(value: Any) -> bool:
    """Return whether a value shows what lists of its field hold: a list with items does, an array, too."""
    return (isinstance(value, (list, tuple)) and len(value) > 0) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _list_of_files(feature: Feature) -> bool:
    match feature:
        case ListOf(feature=item):
            return isinstance(item, _OF_FILES_ALONE)
    return False


def converted(value: Any, feature: Feature) -> Any:  # noqa: PLR0911 -- one for each kind of type
    """Return a value in the type of a declared feature, where only its type differs.

    Args:
        value: value of a field, as the source has it.
        feature: feature that the user declares for the field.
    """
    if value is None:
        return None
    if isinstance(feature, _OF_FILES_ALONE) and isinstance(value, Mapping) and value.keys() == _HF_FILE:
        return _content_of_file(value, "", "")
    inner = feature.feature if isinstance(feature, (Nullable, ListOf)) else feature
    if _list_of_files(feature):
        return [converted(item, inner) for item in value]
    if isinstance(inner, Mapping):  # a dict, or a list of dicts
        rows = [value] if isinstance(value, Mapping) else value
        made = [
            {name: converted(part, inner[name]) if name in inner else part for name, part in row.items()}
            if isinstance(row, Mapping) else row
            for row in rows
        ]  # fmt: skip
        return made[0] if isinstance(value, Mapping) else made
    if isinstance(feature, Nullable):
        return converted(value, feature.feature)
    value = without_items(value, feature)
    dtype, shape = feature.value_type()
    if (dtype, shape) == ("string", ()) and not isinstance(value, str):
        return value.decode() if isinstance(value, bytes) else str(value)
    if isinstance(feature, Scalar) and isinstance(value, (decimal.Decimal, np.generic)):
        found = dtype_of(dtype).type(value)
        return found if found == value or dtype_of(dtype).kind in "fcV" else value
    if shape and holds_numbers(dtype) and isinstance(value, (list, tuple, np.ndarray)):
        array = np.asarray(value)
        is_wider = array.dtype.kind in "biu" or dtype_of(dtype).kind in "fcV"
        return array.astype(dtype_of(dtype)) if array.dtype.kind in "biuf" and is_wider else value
    return value


# ---------------------------------------------------------------- kinds


def _table_files(files: Sequence[SourceFile], spool: SpoolOptions, *, is_parquet: bool) -> DataSource:
    del spool
    return ArrowSource(_TableFiles(files, is_parquet=is_parquet))


def _tars(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    return RecordsSource(files, TarForm([file.path for file in files], spool))


def _files(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    del spool
    files = _listed(paths, ())
    if not files:
        raise SourceError(f"{paths[0]} holds no files; give the folder that does")
    source = RecordsSource([SourceFile(paths[0].name, str(paths[0]))], FilesForm({one.name: one.path for one in files}))
    source.files = {one.name: one.path for one in files}
    return source


def _tfrecords(files: Sequence[SourceFile], spool: SpoolOptions) -> DataSource:
    return RecordsSource(files, TFRecordForm([file.path for file in files], spool))


def _mds(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    def source(folder: pathlib.Path) -> DataSource:
        found, shards = mds_shards(folder)
        return RecordsSource(_as_sources(found), MdsForm(_unpacked(found, spool), shards))

    return _of_index(paths[0], source)


def _litdata(paths: Sequence[pathlib.Path], spool: SpoolOptions) -> DataSource:
    def source(folder: pathlib.Path) -> DataSource:
        found, counts, config = litdata_chunks(folder)
        tables = [litdata_table(file.path) for file in found]
        if found and None not in tables:
            return ArrowSource(_TableFiles(_as_sources(found), is_parquet=False, may_differ=True))
        if any(tables):
            raise SourceError(
                f"{folder} holds chunks of two forms: {found[tables.index(None)].name} has no table of Arrow, others "
                "have; pass the object that reads them, litdata.StreamingDataset(...), as the source"
            )
        return RecordsSource(_as_sources(found), LitdataForm(_unpacked(found, spool), counts, config))

    return _of_index(paths[0], source)


def _as_sources(files: Sequence[StoredFile]) -> list[SourceFile]:
    return [SourceFile(file.name, file.path) for file in files]


def _unpacked(files: Sequence[StoredFile], spool: SpoolOptions) -> UnpackedFiles:
    return UnpackedFiles([file.path for file in files], [file.codec for file in files], spool)


def _of_index(folder: pathlib.Path, source: Callable[[pathlib.Path], DataSource]) -> DataSource:
    """Return the source of a folder with an `index.json`, or of folders with one, by split."""
    if (folder / "index.json").is_file():
        return source(folder)
    parts = {path.parent.name: source(path.parent) for path in sorted(folder.glob("*/index.json"))}
    if not parts:
        raise SourceError(f"{folder} holds no index.json, nor does a folder in it; give the folder that has one")
    return _SplitSource(parts)


def _also_packed(*endings: str) -> tuple[str, ...]:
    return tuple(ending + packing for ending in endings for packing in ("", *_PACKINGS))


_OF_FILES: dict[str, tuple[tuple[str, ...], Callable[[Any, SpoolOptions], DataSource]]] = {
    "datamat": ((), _finished),
    "tfds": ((), _prepared),
    "huggingface": ((), _saved),
    "files": ((), _files),
    "mds": ((), _mds),
    "litdata": ((), _litdata),
    "webdataset": ((*_also_packed(".tar"), ".tgz"), _tars),
    "tfrecord": (_also_packed(".tfrecord", ".tfrecords", ".tfrec"), _tfrecords),
    "parquet": ((".parquet", ".pq"), functools.partial(_table_files, is_parquet=True)),
    "arrow": ((".arrow", ".feather", ".ipc"), functools.partial(_table_files, is_parquet=False)),
}
"""What opens paths of a kind: suffixes of its files, none where it is a folder, and a function of files or paths."""
