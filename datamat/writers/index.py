"""Lists the samples of a source: one `IndexRow` per input sample, from folders, lists, tables or datasets.

An index is cheap: it lists files or rows and decodes nothing. Its rows are checked when they are written to the row
files (`datamat.sources`): bad keys, duplicates and missing files are errors that name the line they came from.
Tables go there as columns, and become `IndexRow`s only when the index is iterated.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from datamat.errors import OptionError, SourceError, join_problems
from datamat.sources.files import SourceFiles
from datamat.sources.rows import IndexRow, Origin, RowBlock, Rows, Texts, listed
from datamat.writers.arrow import TableFiles
from datamat.writers.base import DataSource
from datamat.writers.parquet import ParquetFiles
from datamat.writers.paths import SourceFile, files_below, listed_files, paths_of
from datamat.writers.sources import open_source
from datamat.writers.tables import is_arrow_dataset, listed_column, table_of
from datamat.writers.text_tables import (
    BATCH_ROWS,
    HEAD_BYTES,
    TEXT_TABLES,
    TextOptions,
    refuse_other_kinds,
    text_batches,
    text_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa

_LARGEST_NUMBER = 8  # bytes: Python has no 16-byte float


class Index(Rows):
    """An iterable of rows that can be iterated any number of times.

    Args:
        rows: function that returns the rows, in a fixed order; called for each iteration.

    Example:
        >>> index = Index.from_rows([IndexRow("a"), IndexRow("b")])
        >>> [row.key for row in index]
        ['a', 'b']
    """

    @classmethod
    def from_rows(cls, rows: Iterable[IndexRow | tuple[Any, ...] | str]) -> Index:
        """Return an index of given rows.

        Args:
            rows: an iterable of `IndexRow`, of tuples (key, split, fields, ...), or of keys; or a pyarrow, pandas or
                polars table, read as in `from_table`.

        Raises:
            SourceError: an item is none of these.
        """
        if table_of(rows) is not None:
            return cls.from_table(rows)
        listed = [_as_row(row, number) for number, row in enumerate(rows)]
        return cls(lambda: listed)

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        pattern: str = "**/*",
        *,
        field: str = "image",
        suffixes: str | Sequence[str] = (),
        fields_of: Callable[[pathlib.PurePosixPath], Mapping[str, str | int | float]] | None = None,
        split_of: Callable[[pathlib.PurePosixPath], str | None] | None = None,
    ) -> Index:
        """Return one row per file below a folder, sorted by path.

        The key is the path relative to `root`, without its suffix and with `-` for `/`. Hidden files are ignored.

        Args:
            root: folder that holds the files.
            pattern: glob pattern, relative to `root`.
            field: name of the field that holds the path, relative to `root`.
            suffixes: suffixes of the files to index (".png"), or a single suffix; empty indexes all. Other files are
                left aside, and the plan says so.
            fields_of: function that returns further fields of a file, given its path relative to `root`.
            split_of: function that returns the split of a file, given its path relative to `root`.

        Raises:
            SourceError: the folder does not exist.
        """

        def rows() -> Iterator[IndexRow]:
            for path in files_below(root, pattern, suffixes):
                more = fields_of(path) if fields_of else {}
                split = split_of(path) if split_of else None
                key = str(path.with_suffix("")).replace("/", "-")
                yield IndexRow(key, split, {field: str(path), **more}, str(path))

        return cls(rows)

    @classmethod
    def from_lists(
        cls,
        root: str | os.PathLike[str],
        lists: Mapping[str, str],
        *,
        fields: Sequence[str] = ("image", "mask"),
        prefix: str | None = None,
    ) -> Index:
        """Return the rows of list files as shipped with CamVid: one `image annotation` pair of paths per line.

        Such lists were written on another machine: a prefix of their paths that does not exist here is replaced by
        `root`. The key is the name of the first file without its suffix. Empty lines and `#` comments are skipped.

        Args:
            root: folder that holds the files.
            lists: path of the list file of each split, relative to `root`.
            fields: names of the fields, in the order of the paths on a line.
            prefix: prefix to remove from each path; None keeps the longest tail of the path that exists below `root`.

        Raises:
            SourceError: a list file cannot be read, or a line has a different number of paths.
        """

        def rows() -> Iterator[IndexRow]:
            local = _PathMap(root, prefix)
            for split, name in lists.items():
                for number, line in enumerate(_lines(root, name), start=1):
                    text = line.strip()
                    if text and not text.startswith("#"):
                        yield _row_of_line(local, text, split, fields, f"{name}:{number}")

        return cls(rows)

    @classmethod
    def from_table(
        cls,
        path: Any,
        *,
        key: str | None = None,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        encoding: str | None = None,
        delimiter: str | None = None,
    ) -> Index:
        """Return the rows of a table, with its columns as fields.

        Columns of numbers and text go to the workers unchanged, a block of rows at a time: returned from a writer's
        `index`, they need no Python object per row.

        Args:
            path: path of a `.parquet`, `.csv`, `.tsv` or `.jsonl` file, or a compressed one such as `.csv.gz` (bz2,
                lz4, zst); a folder or a pattern of such files, which are read in the order of their names; a pyarrow,
                pandas or polars table; columns by name, each a numpy array (n,) or a list of n values; or, for tables
                that do not fit in memory, a function without arguments that returns an iterable of such tables, all
                with the same columns.
            key: name of the column that holds the keys; None takes the column "key" if there is one, otherwise the
                row numbers.
            split: name of the column that holds the splits; None takes the column "split" if there is one.
            columns: names of the columns that become fields, whose cells may be empty (None), or hold lists. None takes
                all columns, whose cells must hold text or a number, except in CSV and JSON Lines.
            encoding: encoding of CSV and JSON Lines; None for UTF-8, or for UTF-16 if the file says so.
            delimiter: character between the cells of CSV; None detects it.

        Raises:
            SourceError: the file cannot be read, a named column is missing, columns differ in length, or a value is not
                text or a number.
            OptionError: there is no such encoding, or the delimiter is not one character.

        Example:
            >>> index = Index.from_table({"key": ["a", "b"], "speed": np.array([1.5, 2.0], np.float32)})
            >>> [(row.key, row.fields) for row in index]
            [('a', {'speed': 1.5}), ('b', {'speed': 2.0})]
        """
        special = frozenset({key or "key", split or "split"})
        wanted = None if columns is None else special | {*columns}
        options = TextOptions(encoding, delimiter, names=special, columns=wanted)
        return cls(lambda: table_blocks(path, key, split, options, columns))

    @classmethod
    def join(  # noqa: PLR0913 -- two sides to join, and how each is read
        cls,
        folder: str | os.PathLike[str],
        table: Any,
        *,
        on: str,
        how: Literal["exact", "rows", "files", "inner"] = "exact",
        suffixes: str | Sequence[str] = (),
        key: str | None = None,
        split: str | None = None,
        root: str | os.PathLike[str] | None = None,
        encoding: str | None = None,
        delimiter: str | None = None,
    ) -> Index:
        """Return the rows of a table, each with the file below a folder that one of its columns names.

        The column may hold paths relative to the folder, names of files, or either without the suffix if that is
        unambiguous. In the rows, it holds the path of the file.

        Args:
            folder: folder that holds the files; hidden files and the table's own file are ignored.
            table: table as for `from_table`, such as the path of a CSV file.
            on: name of the column that names the files.
            how: what must have a partner: "exact", every row and every file; "rows", every row; "files", every file;
                "inner", nothing. Other rows and files without a partner are left out.
            suffixes: suffixes of the files to join, in lower case (".wav"); empty takes all.
            key: name of the column that holds the keys; None takes the column "key" if there is one, otherwise the path
                of the file below the folder, without its suffix and with `-` for `/`.
            split: name of the column that holds the splits; None takes the column "split" if there is one.
            root: folder that the paths in the rows are relative to: in `index` of a writer, the source. None gives
                paths that begin with `folder`, and can be opened.
            encoding: as for `from_table`.
            delimiter: as for `from_table`.

        Raises:
            SourceError: the folder or the table cannot be read, a column is missing, a name fits several files, two
                rows name the same file, or something has no partner; the message names the first and the number.
            OptionError: `how` has another value.

        Example:
            >>> index = Index.join("audio", "audio/labels.csv", on="file")   # doctest: +SKIP
            >>> materialize(read_clip, index, "out/audio", key=lambda row: row.key)   # doctest: +SKIP
        """
        if how not in _HOW:
            raise OptionError(f"how is {how!r}; want one of {', '.join(_HOW)}")
        place = pathlib.Path(folder if root is None else os.path.relpath(folder, root))
        options = TextOptions(encoding, delimiter, names=frozenset({key or "key", split or "split", on}))
        return cls(lambda: _joined(pathlib.Path(folder), place, table, on, how, suffixes, (key, split), options))

    @classmethod
    def from_dataset(cls, dataset: Any, *, key: str | None = None) -> Index:
        """Return the rows of an existing dataset, with the position of each sample in the field `number`.

        Only the dataset's length is read, unless `key` asks for a field of each sample. `ImportWriter` reads the
        samples.

        Args:
            dataset: a folder finished by datamat, prepared by TFDS or saved by Hugging Face `datasets`; a `DataSource`,
                or any object with `len` and items by position (list, torch `Dataset`, `datasets.Dataset`); a pyarrow,
                pandas or polars table; numpy arrays of equal length in a tuple or by name; or a dict of these by split.
            key: name of the field that holds the keys. None takes the keys of a finished directory (with `-` for the
                `#` of copies) or of a `DataSource`, or the column "key" of a table; otherwise the position, after the
                split if there are several.

        Raises:
            SourceError: the dataset is of another kind, or a sample has no key.

        Example:
            >>> [row.key for row in Index.from_dataset(["a", "b"])]
            ['00000000', '00000001']
        """
        samples = open_source(dataset)
        if key is None and type(samples).keys_and_splits is DataSource.keys_and_splits:
            return cls(lambda: _position_blocks(len(samples)))

        def rows() -> Iterator[IndexRow]:
            keys = None if key is None else map(str, samples.cells(key))
            contents = samples.contents()
            for number, (place, split) in enumerate(samples.keys_and_splits()):
                fields = {"number": number} if contents is None else {"number": number, "content": next(contents)}
                yield IndexRow(place if keys is None else next(keys), split, fields, f"sample {number}")

        return cls(rows)


def pair_files(
    images: Iterable[pathlib.PurePosixPath],
    masks: Iterable[pathlib.PurePosixPath],
    *,
    match: Callable[[pathlib.PurePosixPath], str] = lambda path: path.stem,
) -> list[tuple[pathlib.PurePosixPath, pathlib.PurePosixPath]]:
    """Return (image, mask) pairs by file name, in the order of the images.

    Args:
        images: paths of the images, all relative to one folder.
        masks: paths of the masks, relative to one folder as well.
        match: function that returns the name by which an image and its mask are paired.

    Raises:
        SourceError: an annotation has no image, an image has no annotation, or two have the same name; the message
            names them.
    """
    by_name: dict[str, pathlib.PurePosixPath] = {}
    for mask in masks:
        name = _composed(match(mask))
        if name in by_name:
            raise SourceError(f"{by_name[name]} and {mask} both annotate {name!r}; keep one of them")
        by_name[name] = mask
    pairs, lonely = [], []
    for image in images:
        mask_of = by_name.pop(_composed(match(image)), None)
        if mask_of is None:
            lonely.append(f"{image}: image without annotation")
        else:
            pairs.append((image, mask_of))
    lonely += [f"{mask}: annotation without image" for mask in by_name.values()]
    if lonely:
        raise SourceError(f"{join_problems(lonely)}; add the missing files or remove these")
    return pairs


def _as_row(row: Any, number: int) -> IndexRow:
    origin = f"row {number}"
    if isinstance(row, str):
        return IndexRow(row, origin=origin)
    if isinstance(row, IndexRow):
        return row if row.origin else row._replace(origin=origin)
    if isinstance(row, tuple):
        return IndexRow(*row)
    raise SourceError(f"{origin} is a {type(row).__name__}; want an IndexRow, a tuple (key, split, fields) or a key")


def _lines(root: str | os.PathLike[str], name: str) -> list[str]:
    path = pathlib.Path(root) / name
    try:
        SourceFiles(os.fspath(root)).check_file(name)
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise SourceError(f"list file {path}: {error.strerror or error}; give the folder that holds it") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"list file {path} is not UTF-8 text (byte {error.start}); convert it") from error
    except ValueError as error:
        raise SourceError(f"list file {path}: {error}; correct the path") from error


def _row_of_line(local: _PathMap, text: str, split: str, fields: Sequence[str], origin: str) -> IndexRow:
    paths = text.split("\t") if "\t" in text else text.split()
    if len(paths) != len(fields):
        raise SourceError(
            f"{origin}: found {len(paths)} paths, want {len(fields)} ({' '.join(fields)}) separated by a space, "
            f"or by a tab where names hold spaces: {text!r}"
        )
    found = [local.path_of(path) for path in paths]
    return IndexRow(_stem(found[0]), split, dict(zip(fields, found, strict=True)), origin)


def _stem(path: str) -> str:
    """Return the name of a file without its suffix, as `pathlib` does in ten times the time."""
    name = path.rpartition("/")[2]
    dot = name.rfind(".")
    return name[:dot] if 0 < dot < len(name) - 1 else name


class _PathMap:
    """Maps paths that were written on another machine to paths relative to `root`."""

    def __init__(self, root: str | os.PathLike[str], prefix: str | None) -> None:
        self._root = root
        self._prefix = prefix

    def path_of(self, path: str) -> str:
        """Return the path relative to root, without the prefix, which the first existing file reveals.

        A path that is not below root comes back without its leading `/`, and is reported as missing later.
        """
        if self._prefix is not None and path.startswith(self._prefix):
            return path[len(self._prefix) :].lstrip("/")
        starts = [0] if not path.startswith("/") else []
        starts += [place + 1 for place, letter in enumerate(path) if letter == "/"]
        for start in starts:
            if path[start:] and os.path.exists(os.path.join(self._root, path[start:])):
                self._prefix = path[:start] if self._prefix is None else self._prefix
                return path[start:]
        return path.lstrip("/")


def _position_blocks(count: int) -> Iterator[RowBlock]:
    """Yield the rows of samples known by their positions."""
    for start in range(0, count, BATCH_ROWS):
        stop = min(start + BATCH_ROWS, count)
        fields = {"number": np.arange(start, stop, dtype=np.int64)}
        yield RowBlock(Texts.of_positions(start, stop), fields, Origin("sample ", start))


_HOW = ("exact", "rows", "files", "inner")
_MOST_NAMED = 5


def _joined(
    folder: pathlib.Path,
    place: pathlib.Path,
    table: Any,
    on: str,
    how: str,
    suffixes: Sequence[str],
    columns: tuple[str | None, str | None],
    options: TextOptions,
) -> Iterator[IndexRow]:
    """Yield the rows of a table with their files.

    Args:
        folder: folder that holds the files.
        place: the same folder, in the form that paths in the rows begin with.
        table: table as for `Index.from_table`.
        on: name of the column that names the files.
        how: what must have a partner, as for `Index.join`.
        suffixes: suffixes of the files to join; empty takes all.
        columns: names of the columns with keys and splits.
        options: how text tables are read.
    """
    given = os.path.abspath(table) if isinstance(table, (str, os.PathLike)) else ""
    files = [path for path in files_below(folder, suffixes=suffixes) if os.path.abspath(folder / path) != given]
    by_name = _by_name(files)
    rows: dict[pathlib.PurePosixPath, IndexRow] = {}
    lonely: list[str] = []
    has_keys = columns[0] is not None or "key" in table_schema(table, options).names
    for row in (row for block in table_blocks(table, *columns, options) for row in block.rows()):
        if on not in row.fields:
            raise SourceError(f"{row.origin} has no column {on!r}; it has {', '.join(row.fields)}")
        named = _named(row.fields[on], folder)
        found = by_name.get(named) or by_name.get(_composed(named), [])
        if len(found) > 1:
            raise SourceError(
                f"{row.origin}: {on} is {row.fields[on]!r}, which may be {found[0]} or {found[1]} below {folder}; give "
                "the path relative to the folder"
            )
        if not found:
            lonely.append(f"{row.fields[on]!r} ({row.origin})")
            continue
        if found[0] in rows:
            raise SourceError(f"{rows[found[0]].origin} and {row.origin} both name {found[0]}; keep one of them")
        key = row.key if has_keys else str(found[0].with_suffix("")).replace("/", "-")
        rows[found[0]] = row._replace(key=key, fields={**row.fields, on: str(place / found[0])})
    unused = [str(path) for path in files if path not in rows]
    _check_partners(folder, how, lonely, unused, (len(rows) + len(lonely), len(files)))
    yield from rows.values()


def _by_name(files: Iterable[pathlib.PurePosixPath]) -> dict[str, list[pathlib.PurePosixPath]]:
    """Return the files by each name that a table may have for them; a file's path takes precedence over other names."""
    paths = {str(path): [path] for path in files}
    shorter: dict[str, list[pathlib.PurePosixPath]] = {}
    for (path,) in paths.values():
        names = [str(path), str(path.with_suffix("")), path.name, path.stem]
        for name in {*names, *map(_composed, names)} - paths.keys():
            shorter.setdefault(name, []).append(path)
    return paths | shorter


def _composed(name: str) -> str:
    """Return a name with composed accents: macOS stores letters and accents separately, and tables composed."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _named(value: Any, folder: pathlib.Path) -> str:
    """Return the path in a cell, relative to the folder."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else str(value)
    text = os.path.relpath(text, folder.absolute()) if os.path.isabs(text) else os.path.normpath(text)
    return text.replace(os.sep, "/")


def _check_partners(
    folder: pathlib.Path, how: str, rows: Sequence[str], files: Sequence[str], counts: tuple[int, int]
) -> None:
    """Raise `SourceError` if rows have no file, or files no row, but must have one."""
    problems = []
    for what, lonely, count, partner, allowed in (
        ("rows", rows, counts[0], "file", ("files", "inner")),
        ("files", files, counts[1], "row", ("rows", "inner")),
    ):
        if lonely and how not in allowed:
            more = f" and {len(lonely) - _MOST_NAMED} more" if len(lonely) > _MOST_NAMED else ""
            problems.append(
                f"{len(lonely)} of {count} {what} have no {partner}: {', '.join(lonely[:_MOST_NAMED])}{more}"
            )
    if problems:
        raise SourceError(
            f"{folder} and its table do not fit: {'; '.join(problems)}. Correct them, choose files with suffixes=, or "
            "pass how='inner' to leave both out (how='files' leaves out such rows, how='rows' such files)"
        )


def table_blocks(
    given: Any, key: str | None, split: str | None, options: TextOptions, wanted: Sequence[str] | None = None
) -> Iterator[RowBlock]:
    """Yield the rows of a table as in `Index.from_table`; `options` say how text becomes columns."""
    before = 0
    special = {key or "key", split or "split"}
    for table in _tables(given, options):
        for place, count, batch in table.batches(None if wanted is None else {*special, *wanted}):
            for column in (key, split, *(wanted or ())):
                if column is not None and column not in batch:
                    raise SourceError(f"{place} has no column {column!r}; it has {', '.join(batch)}")
            key_column = key or ("key" if "key" in batch else None)
            split_column = split or ("split" if "split" in batch else None)
            columns = {
                name: _cells(
                    place, name, values, before, is_checked=name in special or (wanted is None and not table.may_miss)
                )
                for name, values in batch.items()
                if wanted is None or name in {key_column, split_column, *wanted}
            }
            keys = Texts.of_positions(before, before + count) if key_column is None else _as_keys(columns[key_column])
            splits = None if split_column is None else listed(columns[split_column])
            for name in (key_column, split_column):
                if name is not None and name not in (wanted or ()):
                    columns.pop(name, None)
            short = "table" if place == _IN_MEMORY else os.path.basename(place)
            yield RowBlock(keys, columns, Origin(f"{short} row ", before + 1), splits)
            before += count


def table_schema(given: Any, options: TextOptions) -> pa.Schema:
    """Return the types of the columns of a table, or of the first of several; nullable if a cell is missing."""
    return next(_tables(given, options)).schema()


_IN_MEMORY = "the table"  # its place


class _Table(NamedTuple):
    """A table, in files or in memory.

    Attributes:
        schema: returns the types of the columns.
        batches: yields place, number and columns of a run of rows; a file is never in memory as a whole. Columns that
            were not asked for may be missing.
        may_miss: whether cells may be missing.
    """

    schema: Callable[[], pa.Schema]
    batches: Callable[[Collection[str] | None], Iterator[tuple[str, int, Mapping[str, Any]]]]
    may_miss: bool = False


def _tables(given: Any, options: TextOptions) -> Iterator[_Table]:
    if is_arrow_dataset(given):
        # Arrow would read ahead sixteen batches of four files, and hold their row groups completely.
        for batch in given.to_batches(batch_size=BATCH_ROWS, batch_readahead=1, fragment_readahead=1):
            yield _in_memory(batch)
    elif isinstance(given, (str, os.PathLike)):
        files = _table_files(os.fspath(given))
        yield _of_text(files, options) if files[0].name.lower().endswith(TEXT_TABLES) else _of_parquet(files, options)
    elif callable(given) and table_of(given) is None:
        for one in given():
            yield from _tables(one, options)
    else:
        yield _in_memory(given)


_PARQUET = (".parquet", ".pq")
_KINDS = ".parquet, .csv, .tsv or .jsonl, the last three also packed, as .csv.gz"


def _table_files(given: str) -> list[SourceFile]:
    """Return the files of a table: one, those in a folder, or those that match a pattern, in the order of their names.

    Raises:
        SourceError: there is none, one is of an unknown kind, or there is text next to Parquet.
    """
    paths = paths_of(given, is_named=True) or []
    found = [file for file in listed_files(paths, (*_PARQUET, *TEXT_TABLES)) if os.path.isfile(file.path)]
    if not found:
        raise SourceError(f"{given}: found no table; want one, a folder of them, or a pattern: {_KINDS}")
    are_text = [file.name.lower().endswith(TEXT_TABLES) for file in found]
    for file in itertools.compress(found, (not is_text for is_text in are_text)):
        if not file.name.lower().endswith(_PARQUET):
            with open(file.path, "rb") as opened:
                refuse_other_kinds(pathlib.Path(file.path), opened.read(HEAD_BYTES))
            raise SourceError(f"{file.path}: unknown kind of table; want {_KINDS}")
    if len({*are_text}) > 1:
        text, parquet = (found[are_text.index(is_text)].path for is_text in (True, False))
        raise SourceError(f"{text} is text and {parquet} Parquet; give files of one kind, or one table for each")
    return found


def _of_text(files: Sequence[SourceFile], options: TextOptions) -> _Table:
    """Return CSV or JSON Lines files."""
    paths = [pathlib.Path(file.path) for file in files]

    def schema() -> pa.Schema:
        return text_schema(paths, options)

    def batches(_: Any) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        return ((str(path), *batch) for path in paths for batch in text_batches(path, schema(), options))

    return _Table(schema, batches, may_miss=True)


def _of_parquet(files: Sequence[SourceFile], options: TextOptions) -> _Table:
    """Return Parquet files; raise `SourceError` if they differ and the types of columns are not declared."""
    table = TableFiles(files, ParquetFiles())
    if table.refused and options.columns is None:
        raise SourceError(next(iter(table.refused.values())))

    def batches(wanted: Collection[str] | None) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        columns = {*table.schema.names} & {*(wanted or ())} or None  # all, for the message that a column is missing
        for number, file in enumerate(files):
            yield from _columns_of(table.batches(number, columns), file.path)

    return _Table(lambda: _complete(table.schema), batches)


def _in_memory(given: Any) -> _Table:
    """Return the table that an argument stands for; raise `SourceError` if it is not a table."""
    import pyarrow as pa

    table = table_of(given)
    if table is not None:
        return _Table(
            lambda: _complete(table.schema),
            lambda _: _columns_of(table.to_batches(max_chunksize=BATCH_ROWS), _IN_MEMORY),
        )
    if not isinstance(given, Mapping):
        raise SourceError(
            f"the table is a {type(given).__qualname__}; want the path of a CSV or Parquet file, a table of "
            "pyarrow, pandas or polars, columns by name, or a function that returns several tables"
        )
    columns = _checked_columns(given)
    count = len(next(iter(columns.values())))

    def batches(_: Any) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        for start in range(0, count, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, count)
            yield _IN_MEMORY, stop - start, {name: values[start:stop] for name, values in columns.items()}

    return _Table(lambda: _complete(pa.table({n: v[:1] for n, v in columns.items()}).schema), batches)


def _complete(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a table whose empty cells are refused."""
    import pyarrow as pa

    return pa.schema([field.with_nullable(False) for field in schema])


def _columns_of(batches: Iterable[pa.RecordBatch], place: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    for batch in batches:
        yield place, batch.num_rows, dict(zip(batch.schema.names, batch.columns, strict=True))


def _checked_columns(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return columns by name as arrays or lists of one length."""
    columns: dict[str, Any] = {}
    for name, values in given.items():
        if isinstance(values, np.ndarray) and values.ndim == 1:
            found = values.tolist() if values.dtype.kind in "OU" else values
        else:
            found = values if isinstance(values, (list, tuple)) else listed_column(values)
        if found is None:
            what = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__qualname__
            raise SourceError(
                f"column {name!r} of the table is {what}; want an array (n,) or a list of n numbers or texts. Arrays "
                "with more dimensions belong in read or read_block: give the row its number"
            )
        columns[str(name)] = found
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise SourceError(
            f"the columns of the table differ in length ({listed}); give each one value per row"
            if columns
            else "the table has no columns; give at least one, as in {'number': np.arange(1000)}"
        )
    return columns


def _cells(table: str, name: str, values: Any, before: int, *, is_checked: bool) -> np.ndarray | Texts | list[Any]:
    """Return a column of a batch as a block of rows holds it; raise `SourceError` if a cell is not text or a number."""
    import pyarrow as pa

    if isinstance(values, np.ndarray):
        if values.dtype.kind in "iuf" and values.dtype.itemsize <= _LARGEST_NUMBER:
            return values
        if values.dtype.kind != "b":
            raise SourceError(
                f"{table} row {before + 1}, column {name!r}: found {values.dtype}, want numbers or text; convert it "
                "(times to seconds, bytes to str)"
            )
        values = values.tolist()
    elif not isinstance(values, (list, tuple)):
        if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
            with contextlib.suppress(pa.ArrowInvalid):  # finer times fail their rows
                values = values.cast(pa.timestamp("us", getattr(values.type, "tz", None)))
            values = values.cast(pa.string())  # rows cannot hold times
        found = _arrow_cells(values)
        if found is not None:
            return found
        values = values.to_pylist()
    cells = [value.item() if isinstance(value, np.generic) else value for value in values]
    if not is_checked:
        return cells
    for place, value in enumerate(cells):
        if not isinstance(value, (str, int, float)):
            raise SourceError(
                f"{table} row {before + place + 1}, column {name!r}: found {value!r} ({type(value).__name__}), want "
                "text or a number; fill in empty cells and flatten nested ones, or name the columns to take"
            )
    return cells


def _arrow_cells(values: Any) -> np.ndarray | Texts | list[Any] | None:
    """Return a column of Arrow without a Python object for each cell; None if its cells must be looked at."""
    import pyarrow as pa

    kind = values.type
    if values.null_count:
        return None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers: np.ndarray = values.to_numpy(zero_copy_only=False)
        return numbers
    if pa.types.is_string_view(kind):
        values = values.cast(pa.large_string())
        kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _, ends, data = values.buffers()
        bounds = np.frombuffer(ends, np.int64 if pa.types.is_large_string(kind) else np.int32)
        bounds = bounds[values.offset : values.offset + len(values) + 1]
        text = b"" if data is None else memoryview(data)[bounds[0] : bounds[-1]].tobytes()
        return Texts(text, (bounds[1:] - bounds[0]).astype(np.uint64))
    return None


def _as_keys(values: np.ndarray | Texts | list[Any]) -> Texts | list[str]:
    return values if isinstance(values, Texts) else list(map(str, listed(values)))
