"""Maps Arrow types to features, and cells to the columns that `read_block` returns."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs import encode_png
from datamat.errors import SourceError
from datamat.features import (
    Audio,
    Bytes,
    ClassLabel,
    Image,
    Json,
    ListOf,
    Nullable,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Video,
)
from datamat.features.base import TextColumn, dtype_of
from datamat.values import frozen
from datamat.writers.samples import (
    HF_FILE,
    content_of_file,
    empty_cell,
    in_mode,
    is_no_file,
    resampled,
    without_items,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from datamat.features import Feature


OF_ROWS = frozenset({"key", "split"})
OF_TARS = frozenset({"__key__", "__url__"})  # of rows that Hugging Face's builder `webdataset` made
_HF_NOTE = b"huggingface"
_HF_FILES_OF: dict[str, Feature] = {"Image": Image(), "Audio": Audio(), "Video": Video()}
_MOST_TEXT_BYTES = 1 << 31  # that chunks of `string` can be joined to
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}  # of modes of Pillow


@frozen()
class Column:
    """A column of a table, or a field of a struct in it.

    Attributes:
        name: name of the field: that of the column, and of the fields of structs that lead to it, with `/` between.
        path: the same, as a tuple.
        type: its `pyarrow.DataType`.
        feature: the feature that holds its cells; None for bytes, of which the first decides, and where none does.
        refused: why no feature holds its cells, and what to write; "" if one does.
        is_file: whether it is a struct of Hugging Face that holds an encoded file, or a list of these.
        noted: what Hugging Face's note says of it.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    feature: Feature | None
    refused: str = ""
    is_file: bool = False
    noted: Any = None

    def cells(self, table: pa.Table, numbers: np.ndarray, feature: Feature | None, *, for_block: bool = False) -> Any:
        """Return the cells of some rows, as `DatasetWriter.read_block` returns a column.

        Args:
            table: rows of the table, all its columns.
            numbers: number of each row, for messages.
            feature: feature that is to hold the cells.
            for_block: whether only features take the cells: then texts are a `TextColumn`, and numbers that may be
                missing a masked array, without a Python object for each.

        Raises:
            SourceError: a cell is empty.
        """
        import pyarrow.compute as pc

        column = table.column(self.path[0])
        for name in self.path[1:]:
            column = pc.struct_field(column, name)  # empty where the struct is
        if isinstance(feature, Json):
            return _json_cells(column)
        if self.is_file:
            may_miss = feature is not None and feature.takes_none
            return [
                None if may_miss and is_no_file(cell) else self.content(cell, f"row {numbers[place]}, ")
                for place, cell in enumerate(column.to_pylist())
            ]
        if column.null_count and not (feature is not None and feature.takes_none):
            place = int(numbers[np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]])
            raise SourceError(empty_cell(self.name, f"row {place}, "))
        found = _cells_of(column, self.feature) if feature == self.feature else None
        if found is None and for_block:
            found = _block_of(column, self.feature, feature)
        return column.to_pylist() if found is None else found

    def content(self, cell: Any, place: str) -> Any:
        """Return the content of the file that a cell of Hugging Face holds, or names; of a list, that of each.

        Args:
            cell: the cell, as Arrow has it, or as a step of a stream has decoded it.
            place: what messages say before the name of the column.

        Raises:
            SourceError: it is empty.
        """
        if is_no_file(cell):
            raise SourceError(empty_cell(self.name, place))
        return content_of_file(cell) if self.feature is None else _with_contents(cell, self.feature, self.noted)


def _with_contents(cell: Any, feature: Any, noted: Mapping[str, Any]) -> Any:
    """Return a list, or a dict in one, with the content of each file that it holds, or names, as its note wants it."""
    match feature:
        case ListOf(feature=item):
            return [_with_contents(value, item, noted["feature"]) for value in cell or ()]
        case Mapping():
            return cell and {part: _with_contents(value, feature[part], noted[part]) for part, value in cell.items()}
        case Image() | Audio() | Video():
            if is_no_file(cell):
                return None
            found = content_of_file(cell)
            if isinstance(found, np.ndarray):
                return encode_png(found)
            if noted.get("mode") and isinstance(found, bytes):
                return in_mode(found, noted["mode"])
            return resampled(found, feature.sample_rate) if isinstance(feature, Audio) else found
    return cell


def columns_of_schema(schema: Any) -> list[Column]:
    """Return the columns of an Arrow schema, those of keys and splits excepted."""
    noted = json.loads((schema.metadata or {}).get(_HF_NOTE, b"{}")).get("info", {}).get("features") or {}
    columns = [
        column
        for field in schema
        for column in _columns_of(field.name, (field.name,), field.type, noted.get(field.name))
    ]
    names = [column.name for column in columns]
    if twice := [name for name in names if names.count(name) > 1] if len({*names}) < len(names) else []:
        raise SourceError(
            f"the table has two columns {twice[0]!r}, one of which may be a field of a struct; rename one"
        )
    no_fields = OF_ROWS | (OF_TARS if {*schema.names} >= OF_TARS else frozenset())
    return [column for column in columns if column.name not in no_fields]


def dicts_of(columns: Iterable[Column]) -> frozenset[str]:
    """Return the names of the structs that columns are fields of."""
    return frozenset("/".join(column.path[:end]) for column in columns for end in range(1, len(column.path)))


def _columns_of(name: str, path: tuple[str, ...], kind: Any, noted: Any) -> list[Column]:
    """Return the column of a field, or those of the fields of a struct.

    Args:
        name: name of the field.
        path: its names, from the column down.
        kind: its type.
        noted: what Hugging Face's note in the schema says of it; None if there is none.
    """
    import pyarrow as pa

    noted = noted if isinstance(noted, dict) else {}
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name.startswith("datasets."):
        kind = kind.storage_type  # arrays of Hugging Face, whose shape its note has
    if pa.types.is_struct(kind):
        if noted.get("_type") in _HF_FILES_OF and {field.name for field in kind} == HF_FILE:
            mode = noted.get("mode")
            refused = "" if mode in {None, *_CHANNELS} else (
                f"column {name!r} is Image(mode={mode!r}) of Hugging Face, and no feature stores that mode; cast it to "
                f"one of {', '.join(_CHANNELS)}, or leave it out with drop=[{name!r}]"
            )  # fmt: skip
            says_more = mode is not None or noted.get("sampling_rate") is not None
            return [Column(name, path, kind, _noted_file(noted) if says_more else None, refused, True, noted)]
        if noted.get("_type") == "Sequence" and isinstance(noted.get("feature"), dict):  # a dict of lists, then
            noted = {part: {"_type": "Sequence", "feature": item} for part, item in noted["feature"].items()}
        inner = [
            _columns_of(f"{name}/{field.name}", (*path, field.name), field.type, noted.get(field.name))
            for field in kind
        ]
        return [column for some in inner for column in some]
    files = _with_files(noted, kind)
    if files is not None:
        return [Column(name, path, kind, files, is_file=True, noted=noted)]
    feature = _noted_feature(noted) or feature_of_type(kind)
    refused = "" if feature is not None or _is_binary(kind) else _refusal(name, kind)
    return [Column(name, path, kind, feature, refused)]


def _with_files(noted: Any, kind: Any) -> Any:
    """Return the feature of what holds encoded files, by Hugging Face's note: a file, a list or a dict of some.

    Returns:
        A feature, or a dict of them by name; None if it holds no files, or something that no feature stores.
    """
    import pyarrow as pa

    shape, _ = _list_shape(kind)
    if shape and isinstance(noted, Mapping):
        item = None if len(shape) > 1 else _with_files(noted.get("feature"), kind.value_type)
        return None if item is None else ListOf(item)
    if not pa.types.is_struct(kind) or not isinstance(noted, Mapping):
        return None
    if isinstance(noted.get("_type"), str):
        is_file = noted["_type"] in _HF_FILES_OF and {field.name for field in kind} == HF_FILE
        return _noted_file(noted) if is_file else None
    files = {field.name: _with_files(noted.get(field.name), field.type) for field in kind}
    if not any(files.values()):
        return None
    rest = {
        field.name: _noted_feature(noted.get(field.name) or {}) or feature_of_type(field.type)
        for field in kind if not files[field.name]
    }  # fmt: skip
    return None if None in rest.values() else {field.name: files[field.name] or rest[field.name] for field in kind}


def _noted_file(noted: Mapping[str, Any]) -> Feature:
    """Return the feature of the files that Hugging Face decodes as a note says."""
    match noted:
        case {"_type": "Image", "mode": str(mode)} if mode in _CHANNELS:
            return Image((None, None, _CHANNELS[mode]))
        case {"_type": "Audio", "sampling_rate": int(rate)}:
            return Audio(rate)
    return _HF_FILES_OF[noted["_type"]]


def _noted_feature(noted: Mapping[str, Any]) -> Feature | None:
    """Return the feature that Hugging Face's note about a column asks for; None if its Arrow type says enough."""
    match noted:
        case {"_type": "ClassLabel", "names": [*names]}:
            return ClassLabel(tuple(names))
        case {"_type": "Sequence" | "List" | "LargeList", "feature": {"_type": "ClassLabel", "names": [*names]}}:
            return ClassLabel(tuple(names), shape=(None,))
        case {"_type": "Array2D" | "Array3D" | "Array4D" | "Array5D", "shape": [*shape], "dtype": str(dtype)}:
            return _tensor(shape, dtype)
    return None


def readable(table: pa.Table) -> pa.Table:
    """Return a table with its views as the types that they are views of, which `take` and `flatten` know."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for place, field in enumerate(table.schema):
        if isinstance(field.type, pa.Bool8Type):
            chunks = [pc.not_equal(chunk.storage, 0) for chunk in table.column(place).chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, pa.bool_()))
        if pa.types.is_run_end_encoded(field.type):
            chunks = [pc.run_end_decode(chunk) for chunk in table.column(place).chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, field.type.value_type))
    return table.cast(readable_schema(table.schema))


def readable_schema(schema: Any, *, decoded: bool = False) -> Any:
    """Return the schema that `readable` gives a table; `decoded` puts the values of dictionaries in their place."""
    import pyarrow as pa

    kinds = [kind.value_type if decoded and pa.types.is_dictionary(kind) else kind for kind in schema.types]
    fields = [field.with_type(_without_views(kind)) for field, kind in zip(schema, kinds, strict=True)]
    return pa.schema(fields, schema.metadata)


def unified(one: Any, other: Any, first: str, path: str) -> tuple[Any, dict[str, str]]:
    """Return a schema for the rows of two files, and why undeclared columns are refused, by name.

    Numbers become wider, and columns of nulls take the other type; other differences become text, or the type in the
    first file if not even text holds both.
    """
    import pyarrow as pa

    refused = {}
    one, other = (readable_schema(schema, decoded=True) for schema in (one, other))
    for name in dict.fromkeys([*one.names, *other.names]):
        if name not in one.names or name not in other.names:
            refused[name] = lacking(name, *((path, first) if name in one.names else (first, path)))
            continue
        kinds = [schema.field(name).type for schema in (one, other)]
        with contextlib.suppress(pa.ArrowException):
            pa.unify_schemas([pa.schema({name: kind}) for kind in kinds], promote_options="permissive")
            continue
        reason = f"{path}: column {name!r} is {kinds[1]}, but {kinds[0]} in {first}; "
        if any(pa.types.is_nested(kind) or _is_binary(kind) for kind in kinds):
            refused[name] = f"{reason}give all files the same type"
            other = other.set(other.get_field_index(name), one.field(name))
            continue
        refused[name] = f"{reason}declare its feature, as in features={{{name!r}: Text()}}"
        one, other = (schema.set(schema.get_field_index(name), pa.field(name, pa.string())) for schema in (one, other))
    return pa.unify_schemas([one, other], promote_options="permissive"), refused


def lacking(name: str, lacks: str, has: str) -> str:
    """Return the error text for a column that one file of a table has and another lacks."""
    return f"{lacks} has no column {name!r}, which {has} has; declare it with features={{{name!r}: Nullable(...)}}"


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
    if isinstance(kind, pa.Bool8Type):
        return pa.bool_()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    for is_list, list_of in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_list(kind):
            return list_of(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


_scalar = functools.cache(Scalar)  # shared by the columns of a wide table: examining each takes 20 times as long


def feature_of_type(kind: Any) -> Feature | None:  # noqa: PLR0911 -- one for each kind of type
    """Return the feature that holds every value of an Arrow type; None for bytes, or if there is none."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind):
        return feature_of_type(kind.value_type)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return _scalar(np.dtype(kind.to_pandas_dtype()).name)
    if _is_text(kind):
        return Text()
    if types.is_date(kind) or types.is_timestamp(kind):
        return _time(kind)
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation in (None, sorted(kind.permutation or ())):
        return _tensor(kind.shape, np.dtype(kind.value_type.to_pandas_dtype()).name)
    if isinstance(kind, pa.BaseExtensionType):
        return Json() if is_json(kind) else None
    shape, inner = _list_shape(kind)
    if shape == (None,) and _is_text(inner):
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
    """Return the first part of a nested type that JSON cannot hold, and where it is; "" if there is none."""
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind):
        if not _is_text(kind.key_type):
            return f"{kind.key_type} for keys at {place or 'its map'}"
        return _not_in_json(kind.item_type, f"{place}[key]")
    if types.is_struct(kind):
        return next(filter(None, (_not_in_json(field.type, f"{place}.{field.name}") for field in kind)), "")
    if types.is_dictionary(kind) or _list_shape(kind)[0]:
        return _not_in_json(kind.value_type, place if types.is_dictionary(kind) else f"{place}[]")
    plain = (types.is_boolean, types.is_integer, types.is_floating, types.is_null)
    return "" if _is_text(kind) or any(test(kind) for test in plain) else f"{kind} at {place}"


def _refusal(name: str, kind: Any) -> str:
    import pyarrow as pa

    where = f"column {name!r} is {kind}, which no feature stores exactly; "
    drop = f"leave it out with drop=[{name!r}]"
    if pa.types.is_null(kind):
        return f"column {name!r} holds only empty cells; {drop}"
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

    is_file = pa.types.is_struct(kind) and {field.name for field in kind} == HF_FILE
    if is_file or _is_binary(kind):
        return "Image()"
    feature = feature_of_type(kind)
    match feature:
        case None:
            return "..."
        case Scalar(dtype=dtype):
            return f"Scalar({dtype!r})"
    return repr(feature)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


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


def _cells_of(column: Any, feature: Feature | None) -> Any:
    """Return cells without a Python object for each; None if `to_pylist` is just as good."""
    import pyarrow as pa

    match feature:
        case Scalar() | Timestamp() | ClassLabel(shape=()):
            return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
        case Tensor() | ClassLabel():
            return _arrays_of(column, feature)
    return None


def _block_of(column: Any, own: Feature | None, feature: Feature | None) -> Any:
    """Return cells in memory that they share with Arrow, if possible; None if `to_pylist` is just as good."""
    import pyarrow as pa

    is_text = _is_text(column.type) and column.nbytes < _MOST_TEXT_BYTES
    match feature:
        case Text() if own == feature and is_text:
            array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            try:
                array.validate(full=True)
            except pa.ArrowInvalid:
                return None  # Python's error names the byte
            return _texts_of(array)
        case Nullable(feature=Scalar() as inner) if own == inner:
            is_there = column.is_valid().to_numpy(zero_copy_only=False)
            values = np.zeros(len(column), dtype_of(inner.dtype))
            values[is_there] = column.drop_null().to_numpy(zero_copy_only=False)
            return np.ma.masked_array(values, ~is_there)
    return None


def _texts_of(array: Any) -> TextColumn:
    """Return texts without nulls in memory that they share with Arrow."""
    import pyarrow as pa

    _, ends, data = array.buffers()
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    bounds = np.frombuffer(ends, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    values = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return TextColumn(values, np.diff(bounds))


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
    assert lengths is not None, "only lists vary in size"
    return values.reshape(-1, *sizes[1:]), lengths


def is_json(kind: Any) -> bool:
    """Return True if cells of an Arrow type are text of JSON."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _json_cells(column: Any) -> list[Any]:
    """Return nested cells with dicts instead of lists of pairs, as Arrow gives maps."""
    cells: list[Any] = column.to_pylist()
    if is_json(column.type):
        return [None if cell is None else json.loads(cell) for cell in cells]
    return [_as_json(cell, column.type) for cell in cells] if "map<" in str(column.type) else cells


def _as_json(cell: Any, kind: Any) -> Any:
    import pyarrow as pa

    if cell is None:
        return None
    if pa.types.is_map(kind):
        found = {key: _as_json(item, kind.item_type) for key, item in cell}
        if len(found) < len(cell):
            raise SourceError(f"a map holds a key twice ({', '.join(str(key) for key, _ in cell)}); give each key once")
        return found
    if pa.types.is_struct(kind):
        return {field.name: _as_json(cell[field.name], field.type) for field in kind}
    return [_as_json(item, kind.value_type) for item in cell] if _list_shape(kind)[0] else cell


def typed_cell(value: Any, column: Column) -> Any:
    """Return a Python value in the type that its column declares."""
    if value is None or (column.is_file and is_no_file(value)):
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
