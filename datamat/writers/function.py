"""Provides the writer behind `materialize`, which calls a function for each input."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import os
import re
import reprlib
import stat
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from datamat.directory.keys import original_key
from datamat.directory.row_values import typed_paths
from datamat.errors import OptionError, SourceError
from datamat.features import Features, Nullable
from datamat.fingerprint import fingerprint
from datamat.folders.local import expand_home
from datamat.folders.urls import is_url, lasting
from datamat.sources.rows import Origin, RowBlock, Rows, Texts, copied
from datamat.transforms.seeding import row_rng, with_rng
from datamat.writers.base import DatasetWriter, DataSource, Sample, identity_of
from datamat.writers.tables import TableRows, listed_column, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator
    from concurrent.futures import Future
    from typing import TypeGuard

    from datamat.sources.rows import IndexRow

OUTPUT_VERSION = 2
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

ITEM = "item"
"""The field of a row that stands for its item: a number, a short text, or the digest of anything else."""

_LONGEST_KEY, _LONGEST_TEXT = 120, 1024
_KEY = re.compile(r"(?!.*\.\.)[^/\\#\x00-\x1f\x7f\ud800-\udfff]+\Z", re.DOTALL)  # as `directory.keys` has it
_UNFIT = re.compile(r"[/\\#\x00-\x1f\x7f\ud800-\udfff]+|\.\.+")
_NO_PATHS = frozenset({int, float, bool, type(None)})
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_INT64 = range(-(1 << 63), 1 << 63)
_BLOCK_ROWS = 65_536
_CONCURRENCY = 16  # simultaneous calls of an async function by default

MOST_CONCURRENCY = 64
"""Most calls of an async function at once in a worker: parts have as many rows, if their shard does."""


def function_writer(  # noqa: PLR0913 -- options of `materialize`, passed by name
    fn: Callable[..., Sample],
    inputs: Iterable[Any],
    *,
    name: str,
    features: Features | None = None,
    key: Callable[[Any], str] | str | None = None,
    split: Callable[[Any], str | None] | str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    block: Callable[[Any], Mapping[str, Any] | None] | None = None,
    concurrency: int | None = None,
) -> FunctionWriter:
    """Return the writer that calls a function for each input.

    Args:
        fn: function of (item), or of (item, rng) if it asks for a generator, that returns a sample.
        inputs: items, each the input of a sample; or the path of a dataset, whose samples are the items.
        name: name of the dataset; the names of its shards begin with it.
        features: schema of the samples; None if it is not known yet.
        key: function that returns the key of an item, or the name of the field that holds it; None derives the keys as
            `keys_of` describes.
        split: function that returns the split of an item, or the name of the field that holds it; None if the items
            name no splits.
        files: paths of input files that every sample depends on.
        block: function of many items at once that returns the columns of their samples, or None.
        concurrency: number of calls of an async function that run at once; None for 16.

    Raises:
        OptionError: `fn` is not a function, there are no inputs, or `block` or `concurrency` does not fit the function.
        SourceError: an item has no valid key or split, or two items have the same key.
    """
    if isinstance(inputs, (bytes, Mapping)):
        raise _no_items(inputs)
    if isinstance(files, (str, os.PathLike)):
        raise OptionError(f"materialize: files is {files!r}; want a list of paths, as in files=[{str(files)!r}]")
    if not callable(fn):
        raise OptionError(
            f"materialize: fn is a {type(fn).__name__}, {reprlib.repr(fn)}; want a function of one item that returns a "
            "dict. A source that holds whole samples needs none: Materializer(samples, None, output)"
        )
    if not name:
        raise OptionError('materialize: name is ""; want what the names of the shards begin with, as in name="data"')
    kind = _kind_of(fn, block, concurrency)
    items = _opened(inputs) if isinstance(inputs, (str, os.PathLike)) else _items_of(inputs)
    if not len(items):
        raise OptionError("materialize: inputs is empty; give at least one item")
    splits = None if split is None else [_given_split(item, split, n) for n, item in _asked_items(items, split)]
    writer = kind(fn, items, name, features, keys_of(items, key), splits or _own_splits(items))
    own = items.source.files if isinstance(items, DatasetRows) else {}
    if files or own:
        paths = [os.path.abspath(expand_home(path)) for path in files]
        writer.__dict__["files"] = {**own, **{path: path for path in paths}} if own else paths
    if block is not None:
        writer.block = block
    if isinstance(writer, AsyncFunctionWriter):
        writer.__dict__["concurrency"] = concurrency or _CONCURRENCY
    return writer


def _kind_of(fn: Callable[..., Any], block: object, concurrency: int | None) -> type[FunctionWriter]:
    """Return the class of the writer of a function; the arguments are those of `function_writer`."""
    draws = with_rng(fn) is not None
    called = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else type(fn).__call__
    if inspect.isasyncgenfunction(called):
        raise OptionError("materialize: fn is an async generator; let it return a list of its samples")
    is_async = inspect.iscoroutinefunction(called)
    if block is not None and (draws or is_async):
        what = "a function that asks for a generator: its random numbers would depend on how items form blocks"
        raise OptionError(f"materialize: block= cannot be used with {'an async function' if is_async else what}")
    if concurrency is not None and not is_async:
        raise OptionError(
            f"materialize: concurrency={concurrency!r} needs an async function, and fn is none: each worker calls it "
            "for one item at a time; workers= says how many workers there are"
        )
    if concurrency is not None and (type(concurrency) is not int or not 1 <= concurrency <= MOST_CONCURRENCY):
        raise OptionError(
            f"materialize: concurrency is {concurrency!r}; want a number of calls in each worker, from 1 to "
            f"{MOST_CONCURRENCY}; more workers make more of them"
        )
    if is_async:
        return _DrawingAsyncWriter if draws else AsyncFunctionWriter
    return _DrawingFunctionWriter if draws else FunctionWriter if block is None else _BlockFunctionWriter


def keys_of(items: Sequence[Any], key: Callable[[Any], str] | str | None) -> list[str] | None:
    """Return the key of each item; None if the keys are the positions.

    A path or string is its own key if it can be one, and so are bytes that name a file. Otherwise (it has a `/`, is
    long, or occurs twice), the key is its end, with a hash of the whole and of the number of equal items before it.
    The key of an item thus depends on no other items than equal ones.

    Args:
        items: list of items, or another sequence, whose items are read only if `key` needs them.
        key: function that returns the key of an item, or the name of the field that holds it.

    Raises:
        SourceError: an item has no valid key, or two items have the same key.

    Example:
        >>> keys_of(["a", "cats/1.png", "a"], None)
        ['a', 'cats-1-0ce6ad340ab8c7bd', 'a-29b3045018b14778']
    """
    if key is not None:
        return _given_keys(items, key)
    if isinstance(items, DatasetRows):
        return list(items.cells("key"))
    if (
        not _is_listed(items)
        or isinstance(items, TableRows)
        or not any(isinstance(item, (str, os.PathLike, bytes)) for item in items)
    ):
        return None
    seen: collections.Counter[str] = collections.Counter()
    keys = []
    for number, item in enumerate(items):
        if isinstance(item, (str, os.PathLike)) or (isinstance(item, bytes) and _paths_of(item)):
            text = _text_of(item)
            seen[text] += 1
            keys.append(_key_of_text(text, seen[text]))
        else:
            keys.append(f"{number:08d}")
    if len(set(keys)) < len(keys):
        raise SourceError(
            "inputs hold both text and other items, and one of the texts is the position of another item; pass key="
        )
    return keys


def _given_keys(items: Sequence[Any], key: Callable[[Any], str] | str) -> list[str]:
    numbers: dict[str, int] = {}
    for number, item in _asked_items(items, key):
        found = _given_key(item, key, number)
        if found in numbers:
            raise SourceError(
                f"inputs[{numbers[found]}] and inputs[{number}] have the same key, {found!r}; want unique keys: "
                "make key= distinguish all items"
            )
        numbers[found] = number
    return list(numbers)


def _asked_items(items: Sequence[Any], asked: Callable[[Any], Any] | str) -> Iterator[tuple[int, Any]]:
    """Yield number and item of all items; for samples of a dataset, only the field that is asked for."""
    if isinstance(items, DatasetRows) and isinstance(asked, str):
        return ((number, {asked: cell}) for number, cell in enumerate(items.cells(asked)))
    return ((number, items[number]) for number in range(len(items)))


def _own_splits(items: Sequence[Any]) -> list[str | None] | None:
    """Return the splits that a dataset gives its samples; None if it gives none."""
    found = list(items.cells("split")) if isinstance(items, DatasetRows) else []
    return found if any(found) else None


def _given_key(item: Any, key: Callable[[Any], str] | str, number: int) -> str:
    value = _of_item(item, key, "key", number)
    if isinstance(value, (str, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SourceError(f"key= gave {value!r} for inputs[{number}]; want a str or an integer")
    return str(value.__index__())


def _given_split(item: Any, split: Callable[[Any], str | None] | str, number: int) -> str | None:
    value = _of_item(item, split, "split", number)
    if value is not None and not isinstance(value, str):
        raise SourceError(
            f"split= gave {value!r} for inputs[{number}]; want the name of a split, or None for one that splits= draws"
        )
    return value


def _of_item(item: Any, asked: Callable[[Any], Any] | str, option: str, number: int) -> Any:
    """Return the result of a function for an item, or the value of its field."""
    if not isinstance(asked, str):
        return asked(item)
    if isinstance(item, Mapping) and asked in item:
        return item[asked]
    found = f"the fields {', '.join(map(str, item))}" if isinstance(item, Mapping) else "no fields"
    raise SourceError(
        f"inputs[{number}] is a {type(item).__name__} with {found}; {option}={asked!r} needs a dict that has it"
    )


def _key_of_text(text: str, ordinal: int) -> str:
    if ordinal == 1 and len(text) <= _LONGEST_KEY and _KEY.match(text):
        return text
    parent, _, last = text.rstrip("/").rpartition("/")
    stem = os.path.splitext(last)[0] if parent else last
    readable = _UNFIT.sub("-", "-".join(filter(None, [parent.rpartition("/")[2], stem])))[-_LONGEST_KEY // 2 :].strip(
        "-."
    )
    digest = xxhash.xxh3_64_hexdigest(f"{ordinal} {text}".encode("utf-8", "surrogateescape"))
    return f"{readable}-{digest}" if readable else digest


def _text_of(item: Any) -> str:
    """Return a path, string or bytes path as text; a URL without its signature, which changes each time."""
    return lasting(str(os.fsdecode(item))) if isinstance(item, str) and is_url(item) else str(os.fsdecode(item))


def _items_of(inputs: Any) -> Sequence[Any]:
    """Return the inputs as items by position: the rows of a table, the values of a column or of an array of text."""
    table = table_of(inputs)
    if table is not None:
        return TableRows(table)
    column = listed_column(inputs)
    if column is not None:
        return column
    if not hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__"):
        raise _no_items(inputs)
    is_text = isinstance(inputs, np.ndarray) and inputs.ndim > 0 and inputs.dtype.kind in "OSU"
    # An iterator may fill the same dict anew for each item.
    return inputs if _is_map_style(inputs) and not is_text else [copied(item) for item in inputs]


def _opened(path: str | os.PathLike[str]) -> DatasetRows:
    """Return the samples of the dataset at a path, as `Materializer(source=...)` reads it."""
    from datamat.writers.sources import open_source  # not needed by most jobs

    try:
        return DatasetRows(open_source(path))
    except SourceError as error:
        raise _no_items(path, f", nor a dataset: {error}") from error


class DatasetRows(Sequence[dict[str, Any]]):
    """The samples of a dataset by position, as dicts that hold dicts; an empty cell of a table is None."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        for part in getattr(source, "parts", [source]):
            if part.is_of_cells:
                part.declare({name: one if one.takes_none else Nullable(one) for name, one in part.features.items()})

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> dict[str, Any]:  # type: ignore[override]  # never called with a slice
        found = self.source[place]
        for path in sorted(self.source.dicts, key=len, reverse=True):  # the innermost first
            names = [name for name in found if name.startswith(f"{path}/")]
            found[path] = {name.removeprefix(f"{path}/"): found.pop(name) for name in names}
        return found

    def cells(self, name: str) -> Iterator[Any]:
        """Yield a field of each sample without reading the others; fields of keys and splits have no other names."""
        if name in {"key", "split"} and name not in (self.source.field_names() or ()):
            return (pair[name == "split"] for pair in self.source.keys_and_splits())
        return self.source.cells(name)


def _no_items(inputs: Any, why: str = "") -> OptionError:
    return OptionError(
        f"materialize: inputs is a {type(inputs).__name__}, {reprlib.repr(inputs)}; want the items themselves: a "
        "list, such as sorted(glob.glob(pattern)) or list(mapping.items()). A folder of pictures by class needs no "
        f"function: Materializer('image_folder', FOLDER, output){why}"
    )


def _is_map_style(inputs: Any) -> TypeGuard[Sequence[Any]]:
    """Return True if items have positions, as in lists, arrays and the datasets of torch."""
    return hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__") and not isinstance(inputs, Mapping)


def _is_listed(items: Any) -> bool:
    """Return True if the items are in memory; reading the items of other sequences may mean loading them."""
    return type(items) in {list, tuple, range, TableRows}


class FunctionWriter(DatasetWriter):
    """Calls a function for each of a sequence of inputs.

    Args:
        fn: function that returns the sample of an item, a dict of values by feature name.
        inputs: items, each the input of one sample.
        name: name of the dataset; the names of its shards begin with it.
        features: schema of the samples; None if it is not known yet.
        keys: keys of the items; None takes their positions.
        splits: split of each item; None if the items name no splits.

    Attributes:
        fn: function that the writer calls for each item.
        block: function that it calls for many items at once, or None.
    """

    _datamat_name = ""  # its user knows `fn` and `inputs`
    file_fields = ()
    block: Callable[[Any], Mapping[str, Any] | None] | None = None

    def __init__(
        self,
        fn: Callable[..., Sample],
        inputs: Sequence[Any],
        name: str,
        features: Features | None = None,
        keys: Sequence[str] | None = None,
        splits: Sequence[str | None] | None = None,
    ) -> None:
        self.name = name
        self.fn = fn
        # The rows of listed items hold their items, so that a new item affects only the shard that it goes to.
        whole = identity_of(inputs.source) if isinstance(inputs, DatasetRows) else inputs
        self._whole = None if _is_listed(inputs) else whole
        self.__dict__["_inputs"] = inputs
        self.__dict__["_numbers"] = None if keys is None else {key: number for number, key in enumerate(keys)}
        self.__dict__["_splits"] = splits
        if features is not None:
            self.__dict__["features"] = Features(features)

    # Fingerprints ignore attributes with the name of a `cached_property`.

    @functools.cached_property
    def features(self) -> Features:  # type: ignore[override]  # known when the function has been called
        """Schema of the samples, as declared or inferred from the first sample."""
        raise OptionError("materialize: the features are not known yet; pass features=")

    @functools.cached_property
    def files(self) -> Sequence[str] | Mapping[str, str]:  # type: ignore[override]  # their content counts, not their place
        """The files that all samples depend on, and those of a dataset, by the names in it."""
        return ()

    @functools.cached_property
    def _inputs(self) -> Sequence[Any]:
        raise AssertionError("given to __init__")

    @functools.cached_property
    def _numbers(self) -> Mapping[str, int] | None:
        raise AssertionError("given to __init__")

    @functools.cached_property
    def _splits(self) -> Sequence[str | None] | None:
        raise AssertionError("given to __init__")

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def keys_are_positions(self) -> bool:
        """Whether the key of an item is its position, and says nothing about the item itself."""
        return self._numbers is None

    def index(self, source: Any) -> Rows:
        del source
        return Rows(lambda: _blocks_of(self._inputs, self._numbers, self._splits, has_content=self._whole is None))

    def contents_of(self, groups: Any) -> Iterator[Mapping[str, Any]]:
        """Return what `groups=` sees of each item: the item if it is a dict, otherwise a dict with the field "item"."""
        del groups
        return (item if isinstance(item, Mapping) else {ITEM: item} for item in self._inputs)

    def read(self, row: IndexRow) -> Sample:
        return self.fn(self.item(row.key))

    def item(self, key: str) -> Any:
        """Return the input that has a key."""
        return self._inputs[self._number_of(key)]

    def _number_of(self, key: str) -> int:
        return int(key) if self._numbers is None else self._numbers[original_key(key)]


class _BlockFunctionWriter(FunctionWriter):
    """Like `FunctionWriter`, with a second function for many items at once."""

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        del fields
        assert self.block is not None, "`function_writer` has set it"
        if self._numbers is None:
            numbers = np.fromstring(" ".join(keys), np.int64, sep=" ")
        else:
            numbers = np.array([*map(self._number_of, keys)])
        inputs = self._inputs
        return self.block(inputs[numbers] if isinstance(inputs, np.ndarray) else [inputs[n] for n in numbers.tolist()])


class _DrawingFunctionWriter(FunctionWriter):
    """Like `FunctionWriter`, with a function that asks for the generator of its item."""

    def read(self, row: IndexRow, rng: np.random.Generator) -> Sample:  # type: ignore[override]  # which `with_rng` detects
        return self._draw(self.item(row.key), rng)

    @functools.cached_property
    def _draw(self) -> Callable[[Any, np.random.Generator], Sample]:
        draw = with_rng(self.fn)
        assert draw is not None  # otherwise it would be a `FunctionWriter`
        return draw


class AsyncFunctionWriter(FunctionWriter):
    """Like `FunctionWriter`, with an async function, of which some calls run at once in each worker."""

    @functools.cached_property
    def concurrency(self) -> int:
        """Number of calls that run at once; it does not affect the output."""
        raise AssertionError("set by `function_writer`")

    @functools.cached_property
    def _calls(self) -> _Calls:
        return _Calls(self.concurrency)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the calls of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def expect(self, rows: Sequence[IndexRow], seed: int) -> None:
        """Start the calls of some rows before these are read, and end the calls of other rows.

        Args:
            rows: rows to be read next, in this order.
            seed: base seed of what the function draws.
        """
        if self._calls.pid != os.getpid():  # forked: the thread of the calls is not here
            del self._calls
        self._calls.expect((row.key, functools.partial(self._called, row, seed)) for row in rows)

    def read(self, row: IndexRow) -> Any:
        return self._calls.result(row.key, functools.partial(self._called, row, 0))

    async def _called(self, row: IndexRow, seed: int) -> Any:
        del seed
        coming: Any = self.fn(self.item(row.key))
        return await coming


class _DrawingAsyncWriter(AsyncFunctionWriter):
    """Like `AsyncFunctionWriter`, with a function that asks for the generator of its item."""

    def read(self, row: IndexRow, rng: np.random.Generator) -> Any:  # type: ignore[override]  # which `with_rng` detects
        return self._calls.result(row.key, lambda: self._draw(row, rng))

    async def _called(self, row: IndexRow, seed: int) -> Any:
        return await self._draw(row, row_rng(seed, row.key))

    async def _draw(self, row: IndexRow, rng: np.random.Generator) -> Any:
        draw = with_rng(self.fn)
        assert draw is not None  # otherwise it would be an `AsyncFunctionWriter`
        return await draw(self.item(row.key), rng)


class _Calls:
    """Runs calls of an async function in a thread of this process, some of them before their results are wanted.

    Args:
        most: how many run at once.

    Attributes:
        pid: the process.
    """

    def __init__(self, most: int) -> None:
        import asyncio  # here: it costs 30 ms, and few functions are async

        self.pid = os.getpid()
        self._most = most
        self._begun: dict[str, Future[Any]] = {}
        self._coming: Iterator[tuple[str, Callable[[], Coroutine[Any, Any, Any]]]] = iter(())
        self._free = asyncio.Semaphore(most)  # also for unexpected calls
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="datamat-async", daemon=True).start()

    def expect(self, calls: Iterable[tuple[str, Callable[[], Coroutine[Any, Any, Any]]]]) -> None:
        """Note calls, by the keys of their rows, in the order in which their results will be wanted."""
        for future in self._begun.values():
            future.cancel()
        self._begun, self._coming = {}, iter(calls)

    def result(self, key: str, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the result of a row's call, or raise its error; an unexpected call begins now."""
        for one, coming in itertools.islice(self._coming, self._most - len(self._begun)):
            self._begun[one] = self._begin(coming)
        future = self._begun.pop(key, None) or self._begin(call)
        found = future.result()
        if isinstance(found, _Ended):
            raise found.error
        return found

    def _begin(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        from asyncio import run_coroutine_threadsafe

        return run_coroutine_threadsafe(self._whole(call()), self._loop)

    async def _whole(self, call: Coroutine[Any, Any, Any]) -> Any:
        async with self._free:
            try:
                return await call
            except (SystemExit, KeyboardInterrupt) as error:
                return _Ended(error)


class _Ended(NamedTuple):
    """Wraps an exception that would end the thread instead of the worker."""

    error: BaseException


def _blocks_of(
    items: Sequence[Any],
    numbers: Mapping[str, int] | None,
    splits: Sequence[str | None] | None,
    *,
    has_content: bool,
) -> Iterator[RowBlock]:
    """Yield the rows of items.

    Args:
        items: input of each sample.
        numbers: position of each item by its key, in order; None if the keys are the positions.
        splits: split of each item; None if the items name no splits.
        has_content: whether each row holds a value that stands for its item.
    """
    count, keys = len(items), iter(numbers or ())
    contents = _contents(items) if has_content else None
    files = _files_of(items)
    for start in range(0, count, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, count)
        named = Texts.of_positions(start, stop) if numbers is None else list(itertools.islice(keys, stop - start))
        fields = {} if contents is None else {ITEM: contents(start, stop)}
        paths = None if files is None else files[start:stop]
        of_rows = None if splits is None else splits[start:stop]
        yield RowBlock(named, fields, Origin("inputs[", start, "]"), splits=of_rows, files=paths)


def _files_of(items: Sequence[Any]) -> list[Sequence[str]] | None:
    """Return the input files that each item names, at any depth, as absolute paths; None if no item can name any.

    A folder stands for the files in it, unless other items name it as well, or the item names a file below it: it is
    then a place for samples, not a sample. Items that would have to be loaded are not examined.
    """
    is_numeric = isinstance(items, np.ndarray) and items.dtype.kind not in "OSUV"
    is_plain = type(items) in {list, tuple} and set(map(type, items)) <= _NO_PATHS
    if not (_is_listed(items) or isinstance(items, np.ndarray)) or isinstance(items, range) or is_numeric or is_plain:
        return None
    found = [_paths_of(item) for item in items]
    folders = collections.Counter(path for paths in found for path, is_folder in paths if is_folder)
    listed: list[Sequence[str]] = []
    for paths in found:
        files = [path for path, is_folder in paths if not is_folder]
        listed.append(
            files
            + [
                path
                for path in dict.fromkeys(path for path, is_folder in paths if is_folder)
                if folders[path] == 1 and not any(file.startswith(os.path.join(path, "")) for file in files)
            ]
        )
    return listed


def _paths_of(item: Any) -> Sequence[tuple[str, bool]]:
    """Return the existing files and folders that an item names, as absolute paths, each with whether it is a folder.

    A text never names a folder: "train" is a split, and "/" a page, although there are folders of these names.
    """
    if type(item) in _NO_PATHS:
        return ()
    found = []
    for path, is_path in typed_paths(item):
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # it does not exist, or is not a path
            continue
        is_folder = stat.S_ISDIR(mode)
        if stat.S_ISREG(mode) or (is_folder and is_path):
            found.append((os.path.abspath(path), is_folder))
    return found


def _contents(items: Sequence[Any]) -> Callable[[int, int], np.ndarray | list[Any]]:
    """Return a function of (start, stop) that returns the values that stand for these items in their rows.

    The value is the item itself if it is a number or a short text, otherwise its digest.
    """
    if isinstance(items, range):
        are_numbers = bool(items) and items[0] in _INT64 and items[-1] in _INT64
    else:
        are_numbers = (
            not isinstance(items, TableRows)
            and set(map(type, items)) == {int}
            and min(items) in _INT64
            and max(items) in _INT64
        )
    if are_numbers:
        return lambda start, stop: np.array(items[start:stop], np.int64)
    rest = iter(items)  # of a table, a batch of rows at a time

    def content(item: Any, number: int) -> str:
        text = _text_of(item) if isinstance(item, (str, os.PathLike)) else None
        return text if text is not None and len(text) <= _LONGEST_TEXT else _digest_of(item, number)

    return lambda start, stop: [
        content(item, number) for number, item in enumerate(itertools.islice(rest, stop - start), start)
    ]


def _digest_of(item: Any, number: int) -> str:
    if _is_plain(item):
        return xxhash.xxh3_128_hexdigest(repr(item).encode("utf-8", "surrogatepass"))
    return fingerprint(item, where=f"inputs[{number}]")


def _is_plain(item: Any) -> bool:
    """Return True if `repr` describes an item fully; it takes a tenth of the time of a fingerprint."""
    kind = type(item)
    if kind in {tuple, list}:
        return all(map(_is_plain, item))
    if kind is dict:
        return all(map(_is_plain, item)) and all(map(_is_plain, item.values()))
    return kind in _PLAIN
