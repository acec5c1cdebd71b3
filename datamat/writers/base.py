"""Defines the classes that users subclass for their own data, and finds registered writers by name.

DatasetWriter    raw data: an index of input samples, and how to read one of them
DataSource       an existing dataset: its samples, by position

A package registers a writer under the entry-point group `datamat.writers`, in its `pyproject.toml`:

    [project.entry-points."datamat.writers"]
    recordings = "mypackage.recordings:Recordings"

`Materializer("recordings", ...)` then loads `Recordings`, on first use, and makes an instance without arguments.
"""

from __future__ import annotations

import abc
import glob
import importlib
import inspect
import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from datamat.errors import MissingDependencyError, OptionError, Skip, SourceError
from datamat.features import Feature, Features
from datamat.folders.local import expand_home
from datamat.sources.rows import IndexRow, RowBlock
from datamat.writers.kinds import SOURCE_KINDS, layout_of

Sample: TypeAlias = dict[str, Any]
"""The values of one sample, by feature name."""

_GROUP = "datamat.writers"

_IMPORT_WRITER = "datamat.writers.dataset:ImportWriter"


class DatasetWriter(abc.ABC):
    """Describes a dataset to datamat: its features, its index, and how to read one sample.

    This is the extension point for raw data. Subclass it, declare `features`, and write `index` and `read`; datamat
    does the rest: splits, shards, worker processes, copies, resuming, manifest. `bind`, `augment`, `read_block` and
    `setup_worker` are optional hooks. A subclass may have methods and attributes of its own.

    One instance is made, bound to its source and indexed in the calling process. Then a copy of it travels to each
    worker process, which calls `setup_worker` once and `read` for many rows.

    What an implementation must guarantee (`datamat.testing` has a test class that checks it):

    - **Picklable**: the instance travels to workers by pickle (dill). Open files, connections and caches belong in
      `setup_worker`. Locks and loggers may stay: they arrive free and ready for use.
    - **Deterministic**: `index` yields equal rows in the same order whenever it is called on the same source, and
      `read` returns an equal sample for equal rows, in any process and order. Both depend on the source, on `self` as
      it was sent, and, in `read`, on the seeded random numbers; never on the clock, on earlier calls or on the number
      of workers.
    - **Declared**: every file that affects a sample is in its row, in `files`, or in what `bind` sets on `self`. A
      warning names any other file that is opened, because its changes would go unnoticed.
    - **Honest**: a sample that cannot be read raises an error, and is never replaced by a placeholder. A sample left
      out on purpose is a `Skip`, or None.

    A writer need not be thread-safe: each process calls it from one thread.

    The code of the class, all functions that it reaches, and its attributes become part of the fingerprint of each
    shard: a change to any of them rebuilds the affected shards. For an attribute that must not count, use a
    `functools.cached_property`, or drop it in `__getstate__`.

    Attributes:
        name: name of the dataset; the names of its shards begin with it. A writer registered under the entry-point
            group `datamat.writers` is found by the name of its entry point, which is the same by convention.
        features: schema of a sample; may be a property, or set by `bind`. A feature `key` is added by datamat.
        file_fields: names of the index fields that hold paths of input files. Those files are checked when the source
            is indexed, become part of the fingerprint, and reach `read` as absolute paths. None lets datamat find the
            fields by their values. Behind a URL, only declared files can be read; if a class declares none here, in
            `url_fields` or in `files`, the whole source is fetched before it is bound.
        url_fields: names of the index fields that hold URLs of input files, or lists and dicts of URLs, from any hosts
            and stores, with or without a signature in the query. Each file is fetched shortly before `read`, which gets
            the path of a local copy; a failure to fetch it fails its row. Paths count as in `file_fields`.
        files: paths of further input files and folders that every sample depends on, such as a label map that
            `setup_worker` opens; relative to the source, or absolute; or a dict of paths by the names to show in the
            manifest. May be a property. A change to any of these files rebuilds all shards.

    Example:
        >>> class Squares(DatasetWriter):
        ...     name = "squares"
        ...     features = Features({"square": Scalar("int64")})
        ...
        ...     def index(self, source):
        ...         return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(int(source))]
        ...
        ...     def read(self, row):
        ...         return {"square": row.fields["n"] ** 2}
        >>> Squares().read(IndexRow("003", fields={"n": 3}))
        {'square': 9}
    """

    _datamat_name = "writer"  # in messages of what it holds
    name: str = ""
    features: Features
    file_fields: ClassVar[Sequence[str] | None] = None
    url_fields: Sequence[str] = ()
    files: Sequence[str | os.PathLike[str]] | Mapping[str, str] = ()

    def bind(self, source: Any) -> None:  # noqa: B027 -- an optional hook: doing nothing is the default
        """Get from the source what `features` needs, such as class names or columns.

        Called once in the calling process, when the `Materializer` is made, before all other methods. What it stores on
        `self` travels to the workers and becomes part of the fingerprint.

        Args:
            source: the source that the caller gave to `Materializer`, unchanged: most often the path of a folder.

        Raises:
            SourceError: the source does not have the layout that the writer reads; the message names what is missing.
        """

    @abc.abstractmethod
    def index(self, source: Any) -> Iterable[IndexRow] | Iterable[RowBlock]:
        """Return one row per input sample, always in the same order, without decoding anything.

        Called in the calling process, once in each `plan()`, `run()` or `status()`. It may be a generator: rows are
        written to disk as they come, so that memory does not grow with their number. `Index` makes rows from folders,
        lists, tables and existing datasets. For millions of rows, yield columns, as a `RowBlock` of some ten thousand
        rows at a time, or use `Index.from_table`: `read_block` gets whole blocks, and only `read` needs single rows.

        Args:
            source: the source that the caller gave to `Materializer`, unchanged: most often the path of a folder.

        Returns:
            Rows with unique keys. Paths in their fields are relative to the source, or absolute.

        Raises:
            SourceError: the raw data cannot be indexed; the message names the line, row or file.
        """

    @abc.abstractmethod
    def read(self, row: IndexRow) -> Sample | Iterable[Sample | Skip] | Skip | None:
        """Return the sample of a row, with a value for every declared feature except `key`; or several, or none.

        Called in a worker process, for any rows in any order; occasionally twice for a row, to compare the results.

        A `read` that draws random numbers declares a second parameter, `read(self, row, rng)`, and receives the
        `numpy.random.Generator` of the row. `random` and `numpy.random` are seeded for each row as well, and so are the
        generators of torch and TensorFlow where they are loaded. All of them depend on the base seed and the row's key
        alone. Any other source of randomness (a generator that lives on from row to row, the clock) is refused.

        Args:
            row: a row of the index; its file fields hold absolute paths that can be opened.

        Returns:
            Values by feature name, of the declared dtypes and shapes. An image or a mask is an array, or the `bytes` of
            its file: bytes that need no change are stored untouched. PIL images and tensors are converted to arrays.

            A list or generator of such dicts gives several samples, whose records have the keys `KEY#0-0`, `KEY#0-1`,
            and so on; all samples of a row are in memory together. `Skip("too dark")` or None leaves the row out; a
            `Skip` among several samples leaves out that sample, and the others keep their keys.

        Raises:
            Skip: the row is left out on purpose; the ledger has the reason, and it is not a failure.
            Exception: any error reports the sample as bad; the run's `ErrorPolicy` decides what happens, and the
                message reaches the caller with the sample's key.
        """

    def augment(self, sample: Sample, rng: np.random.Generator) -> Sample | Iterable[Sample | Skip] | Skip | None:
        """Return a changed sample, or several; by default, return it unchanged.

        Called in a worker process for each copy, before the run's `transform`, in the splits that `copies` names (if it
        is a number, in "train", or in all splits if none has that name). A copy with several samples becomes several
        records, `KEY#COPY-NUMBER`.

        Args:
            sample: decoded values by feature name, with `key`; images uint8 (height, width, channels), masks uint8
                (height, width). The arrays belong to this copy and may be changed in place.
            rng: random stream of this copy, derived from base seed, key and copy number; the only source of
                randomness to use.

        Returns:
            One sample, or an iterable of samples, each with a value for every declared feature except `key`; `Skip` or
            None leaves this copy out.

        Raises:
            Skip: this copy is left out, on purpose.
            Exception: as for `read`.
        """
        del rng
        return sample

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return many samples at once, as columns; by default, return None, so that `read` is called for each row.

        For tables, embeddings, tokens and other small arrays, for which a call per row costs more than the row. Called
        in a worker process, in splits that nothing augments and that have one copy. The columns must hold exactly what
        `read` returns for those rows, and must not use random numbers, which would depend on how rows are grouped into
        blocks.

        Args:
            keys: keys of the n rows.
            fields: columns of the index by field name: int64 or float64 (n,), or a list of n strings.

        Returns:
            A column for every declared feature except `key`; None if this block must be read row by row.

            - Numbers and labels: an array (n,) of the declared dtype; a label may be any integer, or a name.
            - Numbers that may be missing: a masked array (n,), or a list with None.
            - Arrays of one shape: an array (n, ...).
            - Arrays whose first size varies: a tuple (values, lengths) of all values, (total, ...), and int64 (n,), the
              number that each row has.
            - Any other arrays, pictures and text: a list of n values as `read` returns them.

        Raises:
            Exception: as for `read`; the rows of the block are then read one by one.

        Example:
            >>> class Tokens(DatasetWriter):
            ...     name = "tokens"
            ...     features = Features({"tokens": Tensor((None,), "int32"), "vector": Tensor((2,), "float32")})
            ...
            ...     def index(self, source):
            ...         return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(3)]
            ...
            ...     def read(self, row):
            ...         n = row.fields["n"]
            ...         return {"tokens": np.arange(n, dtype=np.int32), "vector": np.full(2, n, np.float32)}
            ...
            ...     def read_block(self, keys, fields):
            ...         lengths = fields["n"]
            ...         values = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
            ...         return {"tokens": (values, lengths), "vector": np.tile(lengths[:, None], 2).astype(np.float32)}
        """
        del keys, fields
        return None

    @property
    def reads_cells(self) -> bool:
        """Whether rows are cells of a table, thousands of which are read in the time that a part takes to begin."""
        return False

    def setup_worker(self) -> None:  # noqa: B027 -- as above
        """Prepare a worker process: open what cannot be sent to it, and load what all samples need.

        Called once in each worker process, before its first `read`. What it stores on `self` stays in that process.

        Raises:
            Exception: any error ends the run and shows its traceback.
        """


class DataSource(abc.ABC):
    """Samples of an existing dataset by position, which `Index.from_dataset` lists and `ImportWriter` reads.

    This is the extension point for existing datasets. Most of them need no subclass: any object with `len()` and items
    by position works, such as a list, a torch `Dataset` or a grain `RandomAccessDataSource`. Subclass `DataSource` if
    samples have their own keys, splits or declared features, or if an object's content should not be fingerprinted.

    What an implementation must guarantee:

    - **Fixed**: its length, order, keys and splits do not change while it is in use.
    - **Deterministic**: the same position gives an equal sample at any time, in any process and order.
    - **Picklable**: a copy travels to each worker process, where it opens its own files on first use.

    It need not be thread-safe: each process reads from one thread.

    Attributes:
        features: features that the dataset itself declares, by field name. A field without one gets the feature that
            fits its value in the first sample.
        identity: value that stands for the content in fingerprints: shards are rebuilt when it changes. None takes the
            object itself, with all of its attributes.
        files: absolute paths of the files that hold the samples, by the names to show in the manifest; their content
            counts as well.
        refused: why a field cannot be stored, and what to write instead, by field name.
        dicts: names of the fields that are dicts in a sample, whose fields are called `DICT/FIELD` here.
        keys_are_places: whether keys say where samples lie, so that `key` is a field like any other.
        has_schema: whether all samples have the fields that `field_names` returns.
        is_of_cells: whether samples are rows of tables, in which any cell may be empty if `declare` allows it.

    The methods after `keys_and_splits` are optional hooks for sources that know more than their samples show.

    Example:
        >>> class Squares(DataSource):
        ...     features = {"square": Scalar("int64")}
        ...     identity = "squares, version 1"
        ...
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __getitem__(self, position):
        ...         return {"square": position**2}
        >>> [row.key for row in Index.from_dataset(Squares())]
        ['00000000', '00000001', '00000002']
    """

    features: Mapping[str, Feature] = {}
    identity: Any = None
    files: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    dicts: Collection[str] = frozenset()
    keys_are_places: bool = False
    has_schema: bool = False
    is_of_cells: bool = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def __getitem__(self, position: int) -> Sample:
        """Return one sample: its values by field name, as `DatasetWriter.read` returns them.

        Args:
            position: position of the sample, from 0 to `len(self) - 1`.

        Raises:
            Exception: any error reports the sample as bad, as for `DatasetWriter.read`.
        """

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        """Yield key and split of each sample, in order; by default its position, `00000000`, and no split.

        Keys are unique and valid for `IndexRow`. A split of None is drawn by the hash of the key.
        """
        for position in range(len(self)):
            yield f"{position:08d}", None

    @property
    def is_empty(self) -> bool:
        """Whether there are no samples."""
        return not len(self)

    def field_names(self) -> Sequence[str] | None:
        """Return the names of the fields; None, the default, if only a sample shows them."""
        return None

    def narrow(self, names: Collection[str]) -> None:  # noqa: B027 -- an optional hook, like those below
        """Read only these fields. Called on sources that know the names of their fields."""

    def declare(self, features: Mapping[str, Feature]) -> None:  # noqa: B027
        """Take the features that the user declares, by field name."""

    def cells(self, name: str) -> Iterator[Any]:
        """Yield the value of a field in each sample, in order.

        Raises:
            SourceError: a sample lacks the field.
        """
        for position in range(len(self)):
            sample = self[position]
            if name not in sample:
                raise SourceError(f"sample {position} has no field {name!r} for its key; it has {', '.join(sample)}")
            yield sample[name]

    def block(self, positions: np.ndarray) -> Mapping[str, Any] | None:
        """Return the columns of some samples, as `DatasetWriter.read_block` does; None if they must be read one by one.

        Args:
            positions: int64 (n,), the positions.
        """
        del positions
        return None

    def contents(self) -> Iterator[int] | None:
        """Return a digest of the content of each sample, 0 if unknown; None if `identity` says everything."""
        return None


def identity_of(source: DataSource) -> Any:
    """Return the value that stands for the content of a source in fingerprints."""
    return source if source.identity is None else source.identity


def writer_names() -> list[str]:
    """Return the names of the registered writers, without importing any."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=_GROUP)})


def writer_and_source(writer: Any, source: Any) -> tuple[Any, Any]:
    """Return a writer and its source; the user may have given data instead of a writer, or no writer at all.

    Args:
        writer: a writer in any form that `resolve_writer` takes, data that needs no class, or None.
        source: the source, as the user gave it.

    Raises:
        OptionError: data is given twice.
    """
    if isinstance(writer, (str, os.PathLike)) and source is None and _is_place(os.fspath(writer)):
        writer, source = None, writer
    if writer is None:
        is_folder = isinstance(source, (str, os.PathLike)) and os.path.isdir(expand_home(source))
        return (is_folder and layout_of(pathlib.Path(expand_home(source)))) or "dataset", source
    if isinstance(writer, (str, DatasetWriter)) or inspect.isclass(writer):
        return writer, source
    if source is not None and inspect.isroutine(writer):
        raise OptionError(
            f"writer is the function {writer.__name__}; to store what it returns, call "
            f"materialize({writer.__name__}, items, output)"
        )
    if source is not None:
        raise OptionError(
            f"writer is a {type(writer).__qualname__}, which is data, and so is the source, {source!r}; give one of "
            "them, as in Materializer(source=..., output=...)"
        )
    return "dataset", writer


def _is_place(name: str) -> bool:
    """Return True if a text names files or a folder rather than a writer; names of writers take precedence."""
    if name in SOURCE_KINDS or name == "dataset" or name in writer_names():
        return False
    path = expand_home(name)
    return os.path.lexists(path) or glob.has_magic(name) or os.path.isfile(f"{path}.idx")  # a pair of Megatron-LM's


def resolve_writer(writer: DatasetWriter | type[DatasetWriter] | str) -> DatasetWriter:
    """Return the writer for an argument.

    Args:
        writer: an instance, a subclass, a registered name ("camvid"), a kind of source ("parquet"), or
            "package.module:Class".

    Raises:
        OptionError: no writer has that name, or it is not a `DatasetWriter`.
        MissingDependencyError: the writer is registered, but a package that it needs is not installed.
    """
    found: Any = _load(writer) if isinstance(writer, str) else writer
    if inspect.isclass(found):
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise OptionError(f"writer {found.__qualname__} has no {' and no '.join(missing)}; define it in the class")
        try:
            found = found()
        except TypeError as error:
            raise OptionError(
                f"writer {found.__qualname__}: {error}; pass an instance: {found.__qualname__}(...)"
            ) from error
    if not isinstance(found, DatasetWriter):
        raise OptionError(
            f"writer is {writer!r}; want a DatasetWriter, a subclass, a registered name or 'module:Class'"
        )
    return found


def bind_writer(writer: DatasetWriter, source: Any) -> None:
    """Bind a writer to its source.

    Raises:
        OptionError: the writer declares no features.
    """
    writer.bind(source)
    is_declared = (
        inspect.getattr_static(writer, "features", None) is not None
    )  # a property's own error passes unchanged
    if not is_declared or not isinstance(writer.features, Features):
        raise OptionError(
            f"{type(writer).__qualname__}.features is not a Features; declare the fields of a sample there"
        )


def always_needed(writer: DatasetWriter) -> tuple[str, ...]:
    """Return names of files and folders below the source that every row needs; "" stands for all.

    These are its `files`, if they are known before it is bound; all if it declares no files whatsoever.
    """
    files = inspect.getattr_static(writer, "files", ())  # not for a property, which may need what `bind` sets
    listed = [*files.values()] if isinstance(files, Mapping) else files
    named = tuple(map(os.fspath, listed)) if isinstance(listed, (list, tuple)) else ()
    return named if named or writer.file_fields or writer.url_fields else ("",)


def _load(name: str) -> Any:
    if name in SOURCE_KINDS:
        return _load(_IMPORT_WRITER)(kind=name)
    if name == "dataset":
        return _load(_IMPORT_WRITER)
    from importlib.metadata import entry_points

    target = name if ":" in name else next((p.value for p in entry_points(group=_GROUP) if p.name == name), None)
    if target is None:
        also = ", nor a file or folder of that name" if {".", os.sep} & set(name) and not os.path.lexists(name) else ""
        raise OptionError(
            f"there is no writer {name!r}{also}; registered writers are {', '.join(writer_names())}, and kinds of "
            "sources "
            f"that need no class are {', '.join(SOURCE_KINDS)}. "
            f"Pass 'package.module:Class' or a subclass of DatasetWriter"
        )
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise OptionError(f"writer {name!r}: want 'package.module:Class'")
    try:
        loaded: Any = importlib.import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"writer {name!r} is {target}, which needs the module {error.name!r}; install the package that has it"
        ) from error
    except AttributeError as error:
        raise OptionError(
            f"writer {name!r} is {target}, but the module has no {attribute!r}; check the name"
        ) from error
    return loaded
