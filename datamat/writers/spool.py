"""Reads rows that come one after another: the driver reads an iterator once, and writes each row to disk as it comes.

    iterator ── sample ──> rows.arrow    a stream of Arrow, one batch per second or 16 MiB: name, digest and values of
                                         each row, the latter as JSON and the bytes that JSON cannot hold
                           state.json    how many rows are complete, their fields, and the state of the source

Workers map the rows into memory. `state.json` is replaced every second or so, after the rows that it counts; anything
after these is cut off. A folder that the user names is kept: a finished folder is not read again, and an unfinished
one continues where it ended, if the source supports this:

    state_dict() and load_state_dict(state)    Hugging Face, torchdata, and others with their protocol
    rows(start=...)                            a function that returns the rows from there on

Otherwise it begins again.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import xxhash

from datamat.directory.files import commit_json, read_json, temporary_folder
from datamat.errors import CorruptDataError, InputError, SchemaError, SourceError, kind_of
from datamat.features import Features
from datamat.features.base import as_array, dtype_of, is_number_dtype
from datamat.folders.local import expand_home
from datamat.transforms.seeding import signature_of
from datamat.writers.arrow_types import OF_ROWS, OF_TARS, columns_of_schema, dicts_of, readable, typed_cell
from datamat.writers.base import DataSource
from datamat.writers.samples import Items, PlainItems, fill_lists, fit_key
from datamat.writers.tables import TableRows, is_of_package, table_of
from datamat.writers.tar import TarItems, archive_of, is_of_tar, keys_of_tars
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    from typing import BinaryIO

    import pyarrow as pa

    from datamat.features import Feature

_ROWS, _STATE = "rows.arrow", "state.json"
_BATCH_ROWS = 4096
_BATCH_BYTES = 16 << 20
_SAVE_S = 1.0
_END: Any = object()
_NOT_EXACT = "BufferShuffled"  # of Hugging Face: the rows in its buffer are lost when a state is loaded


@final
class RowStream:
    """The rows of an iterator, of what has one, or of a function that returns one."""

    def __init__(self, rows: Any, names: Sequence[str] | None) -> None:
        if type(rows).__name__ == "DataLoader":
            raise SourceError(
                "the dataset is a DataLoader, which gives batches; give its dataset, as in loader.dataset"
            )
        if is_of_package(rows, "datasets") and rows.features is None and hasattr(rows, "_resolve_features"):
            rows = rows._resolve_features()
        schema = rows.features.arrow_schema if is_of_package(rows, "datasets") and rows.features else None
        self.items: Items = PlainItems(names)
        self._is_first = True
        self._gives_tables = False
        if schema is not None:
            import datasets

            self.items = ArrowItems(schema)
            for column in self.items.columns:
                if column.is_file and len(column.path) == 1:
                    rows = rows.cast_column(column.name, _undecoded(rows.features[column.name]))
            assert datasets
        self._rows = rows
        self.declared: Mapping[str, Feature] = {}  # by the user
        self._first: tuple[Any, Any] | None = None  # archive and key of the first sample of WebDataset

    def declare(self, features: Mapping[str, Feature]) -> None:
        """Take the features that the user declares for fields."""
        self.declared = features
        self.items.declare(features)

    def sample(self, row: Any) -> dict[str, Any]:
        """Return a row as a sample; the first one shows what `items` says of the fields."""
        if self._is_first:
            self._is_first = False
            if isinstance(self.items, PlainItems) and is_of_tar(row):
                self.items = TarItems(row)
                self.items.declare(self.declared)
        return self.items.sample(row)

    def start(self, count: int, state: Any) -> Iterator[Any] | None:
        """Return the rows from a number on; None if the source cannot begin there.

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
        # Not `for item in items`: an iterator of litdata starts again on each `iter`.
        while (item := self._next(items, number)) is not _END:
            table = table_of(item) if not number or schema is not None else None
            if table is None:
                yield item
            else:
                table = readable(table)
                if schema is None:
                    schema, self._gives_tables = table.schema, True
                    self.items = ArrowItems(schema)
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
            error.add_note(f"datamat: the source raised this instead of item {number} (counted from 0)")
            raise

    def state(self) -> Any:
        """Return the state that the source needs to continue after its last row; None if it has no such state."""
        return self._rows.state_dict() if self._has_state and not self._gives_tables else None

    def archive(self, row: Any) -> str | None:
        """Return the archive of a WebDataset sample, to tell its keys from those of others; None for other rows.

        Raises:
            SourceError: the first sample comes again, as it does endlessly if shards are drawn at random.
        """
        if not is_of_tar(row) or "key" in row:
            return None
        place = row.get("__url__"), row["__key__"]
        if place == self._first:
            raise SourceError(
                f"the first sample, {row['__key__']!r}, comes again; give each sample once: leave resampled=True, "
                ".repeat() and .with_epoch() out"
            )
        self._first = self._first or place
        return archive_of(place[0])

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


@final
class ArrowItems(Items):
    """Rows of a table, each a dict of Python values."""

    def __init__(self, schema: Any) -> None:
        self.columns = columns_of_schema(schema)
        self.features = {column.name: column.feature for column in self.columns if column.feature is not None}
        self.refused = {column.name: column.refused for column in self.columns if column.refused}

    def sample(self, item: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: item[name] for name in OF_ROWS if name in item}
        if item.keys() >= OF_TARS:
            found = {"key": fit_key(item["__key__"]), **found}
        for column in self.columns:
            value: Any = item
            for name in column.path:
                value = None if value is None else value[name]
            found[column.name] = typed_cell(value, column)
        return found

    def dicts(self, item: Mapping[str, Any]) -> frozenset[str]:
        del item
        return dicts_of(self.columns)


def _undecoded(kind: Any) -> Any:
    """Return a type of Hugging Face whose encoded files, if any, are left as they are."""
    if isinstance(kind, dict):
        return {name: _undecoded(inner) for name, inner in kind.items()}
    if hasattr(kind, "decode"):
        return dataclasses.replace(kind, decode=False)
    inner = getattr(kind, "feature", None)
    return kind if inner is None else dataclasses.replace(kind, feature=_undecoded(inner))


def _described(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


@final
class SpooledSource(DataSource):
    """The rows of an iterator by position, from a folder to which they are written as they come."""

    identity = "rows of an iterator"  # each with its digest

    def __init__(self, stream: RowStream, options: SpoolOptions) -> None:
        self._stream: RowStream | None = stream
        self.features, self.refused = dict(stream.items.features), stream.items.refused
        self._fields: list[str] = []
        self._left_out: list[str] = []
        self._first: dict[str, Any] | None = None  # the first row, with lists of later ones for those without items
        self._ahead: list[tuple[Any, Any]] = []  # rows that came to show what lists hold, each with the state after it
        self._iterator: Iterator[Any] | None = None
        self._num_bytes = -1  # of all rows, once they have come
        self._opened: tuple[list[pa.RecordBatch], np.ndarray] | None = None
        if options.folder is None:
            self._folder = temporary_folder(self)
        else:
            self._folder = os.path.abspath(expand_home(options.folder))
            os.makedirs(self._folder, exist_ok=True)
        self._found = self._former_state()

    def __getstate__(self) -> dict[str, Any]:
        self._fill()
        unsent: dict[str, Any] = {"_stream": None, "_iterator": None, "_first": None, "_ahead": [], "_opened": None}
        return {**self.__dict__, **unsent}

    def __len__(self) -> int:
        self._fill()
        return int(self._batches[1][-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        if not number and self._num_bytes < 0 and self._first is not None:
            return dict(self._first)
        self._fill()
        return self._row(number)

    def field_names(self) -> list[str]:
        """Return the names of the fields, by the first row."""
        self._begin()
        return self._fields

    def narrow(self, names: Collection[str]) -> None:
        """Store only these fields of the first row."""
        self._left_out = [name for name in self.field_names() if name not in names]
        self._first = self._first and {name: self._first[name] for name in self._fields if name in names}
        self._check_former("left_out", self._left_out)

    def declare(self, features: Mapping[str, Feature]) -> None:
        if self._stream is not None:
            self._stream.declare(features)
        self.features = {**self.features, **features}
        self._check_former("declared", _as_json(features))

    @property
    def has_columns(self) -> bool:
        """Whether the source says what its fields hold, so that bytes that are not pictures are there on purpose."""
        return self._found is not None or (self._stream is not None and isinstance(self._stream.items, ArrowItems))

    @property
    def is_empty(self) -> bool:
        """Whether there is no first row."""
        return not self.field_names()

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        first = next(self._names(), None)
        keys: Iterable[str | None] = (key for key, _, _ in self._names())
        if first is not None and first[2] is not None:
            keys = keys_of_tars([(str(key), archive) for key, _, archive in self._names()])
        for number, (key, (_, split, _)) in enumerate(zip(keys, self._names(), strict=True)):
            yield f"{number:08d}" if key is None else key, split

    def contents(self) -> Iterator[int]:
        self._fill()
        return itertools.chain.from_iterable(batch.column("digest").to_pylist() for batch in self._batches[0])

    def _names(self) -> Iterator[tuple[str | None, str | None, str | None]]:
        """Yield key, split and archive of each row."""
        self._fill()
        for batch in self._batches[0]:
            yield from map(json.loads, batch.column("name").to_pylist())

    @property
    def _batches(self) -> tuple[list[pa.RecordBatch], np.ndarray]:
        """The rows, and the number of rows up to the end of each batch after a zero, int64 (n + 1,)."""
        if self._opened is None:
            import pyarrow as pa

            path = os.path.join(self._folder, _ROWS)
            num_bytes = self._found["num_bytes"] if self._num_bytes < 0 and self._found else self._num_bytes
            try:
                data = pa.memory_map(path).read_buffer(num_bytes) if num_bytes else b""
                batches = list(pa.ipc.open_stream(data)) if num_bytes else []
            except (pa.ArrowException, OSError) as error:
                raise CorruptDataError(f"{path} is damaged: {error}; remove the folder {self._folder}") from error
            self._opened = batches, np.cumsum([0, *(batch.num_rows for batch in batches)])
        return self._opened

    def _row(self, number: int) -> dict[str, Any]:
        batches, ends = self._batches
        place = int(np.searchsorted(ends, number, side="right")) - 1
        batch, row = batches[place], number - int(ends[place])
        text, data = batch.column("values")[row].as_py(), batch.column("data")[row].as_buffer()
        if _digest(text, data) != batch.column("digest")[row].as_py():
            raise CorruptDataError(f"{self._folder}: row {number} is damaged; remove the folder")
        return unpacked(text, data)

    def _begin(self) -> None:
        """Read the first row, which shows the fields."""
        if self._iterator is not None or self._stream is None or self._found is not None:
            return
        self._iterator = self._stream.start(0, None)
        assert self._iterator is not None, "every source begins at its beginning"
        row = next(self._iterator, _END)
        if row is not _END:
            self._ahead.append((row, self._stream.state()))
            sample, items = self._stream.sample(row), self._stream.items
            self._first = {name: value for name, value in sample.items() if name not in OF_ROWS}
            self._fields = list(self._first)
            self.features = {**items.features, **self.features}
            self.refused = items.refused
            self.dicts = items.dicts(row)
            fill_lists(self._first, self.features, self._look_ahead())

    def _look_ahead(self) -> Iterator[dict[str, Any]]:
        """Yield the rows after the first, and keep them to be written."""
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
            self._found = found = dict(read_json(path))
            self._fields, self.dicts = list(found["fields"]), frozenset(found["dicts"])
            self.features = {**Features.from_json(found["features"]), **self.features}
            self._first = self._row(0)
            fill_lists(self._first, self.features, map(self._row, range(1, found["count"])))
        except (OSError, ValueError, LookupError, TypeError, CorruptDataError) as error:
            raise SourceError(f"{path} is damaged: {error}; remove the folder {self._folder}") from error
        return found

    def _check_former(self, what: str, wanted: Any) -> None:
        if self._found is not None and self._found[what] != wanted:
            raise SourceError(
                f"{self._folder} holds rows with the fields {', '.join(self._fields)}, written for other columns= or "
                "features=; remove the folder, or name another"
            )

    def _fill(self) -> None:
        """Write all rows that are not there yet."""
        if self._num_bytes >= 0:
            return
        found = self._found
        if found is None or not found["is_complete"]:
            self._opened = None
            if found is not None and self._stream is not None:
                self._iterator = self._stream.start(found["count"], found["state"])
            if self._iterator is None:
                self._found = found = None  # it begins again
                self._begin()
            self._num_bytes = self._write(*(0, 0) if found is None else (found["count"], found["num_bytes"]))
        else:
            self._num_bytes = found["num_bytes"]

    def _write(self, count: int, num_bytes: int) -> int:
        """Write rows after those that are there, and return the bytes of all rows.

        Args:
            count: rows that are complete.
            num_bytes: their bytes.
        """
        stream = self._stream
        assert stream is not None
        with open(os.path.join(self._folder, _ROWS), "ab") as file:
            file.truncate(num_bytes)
            num_bytes += 0 if num_bytes else file.write(_schema().serialize())
            rows: list[tuple[bytes, bytes, bytes]] = []
            size, saved = 0, time.monotonic()
            for row, state in self._rows_with_state():
                rows.append(self._packed(row, count))
                size += len(rows[-1][1]) + len(rows[-1][2])
                count += 1
                is_time = time.monotonic() - saved > _SAVE_S
                if is_time or size > _BATCH_BYTES or len(rows) == _BATCH_ROWS:
                    num_bytes += file.write(_batch(rows).serialize())
                    rows, size = [], 0
                if is_time:
                    self._save(file, count, num_bytes, state)
                    saved = time.monotonic()
            if rows:
                num_bytes += file.write(_batch(rows).serialize())
            if count:
                self._save(file, count, num_bytes, None)
        self._iterator, self._stream = None, None
        return num_bytes

    def _rows_with_state(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Yield each row, and a function that returns the state of the source after it."""
        stream, iterator = self._stream, self._iterator
        assert stream is not None
        assert iterator is not None
        for row, state in self._ahead:
            yield row, lambda state=state: state  # type: ignore[misc]
        self._ahead = []
        # Not `for row in iterator`: that of litdata starts again on each `iter`.
        while (row := next(iterator, _END)) is not _END:
            yield row, stream.state

    def _save(self, file: BinaryIO, count: int, num_bytes: int, state: Callable[[], Any] | None) -> None:
        """Count the rows written so far; `state` returns the state of the source, and is None after the last."""
        file.flush()
        os.fsync(file.fileno())
        found = None if state is None else state()
        try:
            json.dumps(found)
        except (TypeError, ValueError):  # it cannot be stored, so the source cannot continue
            found = None
        stream = self._stream
        assert stream is not None, "it gives the rows"
        commit_json(
            os.path.join(self._folder, _STATE),
            {
                "count": count,
                "num_bytes": num_bytes,
                "fields": self._fields,
                "dicts": sorted(self.dicts),
                "features": _as_json(stream.items.features),
                "left_out": self._left_out,
                "declared": _as_json(stream.declared),
                "state": found,
                "is_complete": state is None,
            },
        )

    def _packed(self, row: Any, number: int) -> tuple[bytes, bytes, bytes]:
        """Return name, values and data of a row; raise `SourceError` if it cannot be stored."""
        assert self._stream is not None
        try:
            sample = self._stream.sample(row)
            key, split = (sample.pop(name, None) for name in ("key", "split"))
            values = packed({name: value for name, value in sample.items() if name not in self._left_out})
            archive = self._stream.archive(row)
        except (SchemaError, InputError, SourceError) as error:
            raise SourceError(f"row {number}: {error}") from error
        name = [None if key is None else str(key), None if split is None else str(split), archive]
        return json.dumps(name).encode(), *values


def _as_json(features: Mapping[str, Feature]) -> dict[str, Any]:
    return {name: feature.to_json() for name, feature in features.items()}


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([("digest", pa.int64()), *((name, pa.large_binary()) for name in ("name", "values", "data"))])


def _batch(rows: Sequence[tuple[bytes, bytes, bytes]]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [list(column) for column in zip(*rows, strict=True)]
    digests = np.fromiter((_digest(text, data) for _, text, data in rows), np.int64, len(rows))
    # Not `pa.array`, which imports pandas where it is installed.
    arrays = [pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(digests)])]
    for column in columns:
        ends = np.cumsum([0, *map(len, column)], dtype=np.int64)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(column))]
        arrays.append(pa.Array.from_buffers(pa.large_binary(), len(rows), buffers))
    return pa.RecordBatch.from_arrays(arrays, schema=_schema())


def _digest(text: bytes, data: Any) -> int:
    digest = xxhash.xxh3_64(text)
    digest.update(data)
    return digest.intdigest() >> 1


# ---------------------------------------------------------------- values as they are
#
# A sample is JSON, and the bytes of what JSON cannot hold, one after another. What JSON cannot hold is an object with
# the name of its kind there:
#
#     {"dict": [[key, value], ...]}    {"tuple": [...]}    {"bytes": length}    {"array": [dtype, shape, length]}
#     {"scalar": [dtype, length]}      {"objects": [shape, [...]]}              {"datetime": text}, and so on


_PLAIN = frozenset({type(None), bool, int, float, str})


def packed(sample: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the JSON and bytes from which `unpacked` makes an equal sample, with arrays for pictures and tensors.

    Args:
        sample: dicts, lists and tuples of str, numbers, None, bytes, arrays, pictures, tensors, times, decimals and
            paths, by field name.

    Raises:
        SchemaError: something else is in it.

    Example:
        >>> unpacked(*packed({"boxes": [{"data": b"a", "size": (1, 2.5)}]}))
        {'boxes': [{'data': b'a', 'size': (1, 2.5)}]}
    """
    parts: list[bytes] = []
    trees = []
    for name, value in sample.items():
        try:
            trees.append(value if type(value) in _PLAIN else _tree_of(name, value, "", parts))
        except RecursionError as error:
            raise SchemaError(f"field {name!r} is nested too deeply or cyclic; flatten it in the source") from error
    return json.dumps([list(sample), trees], separators=(",", ":")).encode(), b"".join(parts)


def unpacked(text: bytes, data: Any) -> dict[str, Any]:
    """Return the sample that `packed` was given.

    Args:
        text: its JSON.
        data: its bytes, in any buffer.
    """
    left = memoryview(data)

    def read(length: int) -> memoryview:
        nonlocal left
        found, left = left[:length], left[length:]
        return found

    def value_of(tree: dict[str, Any]) -> Any:  # called in the order of the text, for what is inside before the outside
        ((kind, held),) = tree.items()
        match kind:
            case "dict":
                return dict(held)
            case "tuple":
                return tuple(held)
            case "bytes":
                return bytes(read(held))
            case "array":
                dtype, shape, length = held
                return np.ndarray(shape, dtype_of(dtype), bytearray(read(length)))  # which may be written to
            case "scalar":
                dtype, length = held
                return np.ndarray((), dtype_of(dtype), bytes(read(length)))[()]
            case "objects":
                shape, items = held
                found = np.empty(len(items), object)
                found[:] = items
                return found.reshape(shape)
        return _WRITTEN_OUT[kind][2](held)

    names, values = json.loads(text, object_hook=value_of) if b"{" in text else json.loads(text)
    return dict(zip(names, values, strict=True))


def _tree_of(name: str, value: Any, place: str, parts: list[bytes]) -> Any:
    """Return a value as JSON, and add the bytes that JSON cannot hold to `parts`."""
    if type(value) in _PLAIN:
        return value
    value = as_array(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return _tree_of_array(name, value, place, parts)
    if isinstance(value, (int, float, str)):  # of a class of its own
        return value
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
        items = [
            item if type(item) in _PLAIN else _tree_of(name, item, f"{place}[{number}]", parts)
            for number, item in enumerate(value)
        ]
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


_WRITTEN_OUT: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "path": (pathlib.PurePath, str, pathlib.Path),
}
"""Types whose values are written as text, by kind: how, and how they are read."""
