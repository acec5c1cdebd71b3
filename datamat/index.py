"""Which samples there are: one `IndexRow` per input sample, and the ways to get them from what people have.

An index is cheap: it lists files or rows and decodes nothing. What it lists is checked when it is written to the
row files (`datamat.rows`): keys, duplicates and missing files are errors that name the line they came from.
"""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

from datamat.errors import SourceError
from datamat.samples import open_samples
from datamat.source_files import SourceFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Index", "IndexRow", "files_below", "named", "pair_files"]

_BATCH_ROWS = 65_536
_MOST_NAMED = 10


class IndexRow(NamedTuple):
    """One input sample: where it is, not what it holds.

    Attributes:
        key: unique id; no path separator, `..`, `#` or control character.
        split: "train", "val", ..., or None where the split is drawn by hash of the key.
        fields: what `read` needs, by name: paths of files (relative to the source, or absolute), numbers, strings.
        origin: where the row came from ("train.txt:17"), for messages.

    Example:
        >>> IndexRow("0001", "train", {"image": "train/0001.png", "speed": 3.5}).fields["speed"]
        3.5
    """

    key: str
    split: str | None = None
    fields: Mapping[str, str | int | float] = {}
    origin: str = ""


class Index:
    """An iterable of rows that can be gone through any number of times.

    Args:
        rows: called for each pass; returns the rows in a fixed order.

    Example:
        >>> index = Index.from_rows([IndexRow("a"), IndexRow("b")])
        >>> [row.key for row in index]
        ['a', 'b']
    """

    def __init__(self, rows: Callable[[], Iterable[IndexRow]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[IndexRow]:
        return iter(self._rows())

    @classmethod
    def from_rows(cls, rows: Iterable[IndexRow | tuple[Any, ...] | str]) -> Index:
        """Return an index of rows that are at hand: each an `IndexRow`, a tuple of its fields, or a mere key."""
        listed = [_as_row(row, number) for number, row in enumerate(rows)]
        return cls(lambda: listed)

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        pattern: str = "**/*",
        *,
        field: str = "image",
        suffixes: Sequence[str] = (),
        fields_of: Callable[[pathlib.PurePosixPath], Mapping[str, str | int | float]] | None = None,
        split_of: Callable[[pathlib.PurePosixPath], str | None] | None = None,
    ) -> Index:
        """Return one row per file under a folder, sorted by path.

        The key is the path below `root` without its suffix, `/` replaced by `-`. Hidden files are left out.

        Args:
            root: the folder.
            pattern: shell pattern below it.
            field: name of the field that holds the path, relative to `root`.
            suffixes: of the files to take (".png"), in lower case; empty takes all.
            fields_of: further fields of a file, from its path below `root`.
            split_of: split of a file, from its path below `root`.

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
        """Return the rows of list files as CamVid ships them: one `image annot` pair of paths per line.

        The lists were written on another machine: a prefix of their paths that does not exist here is mapped to
        `root`. The key is the name of the first file without its suffix. Empty lines and `#` comments are skipped.

        Args:
            root: the folder that the files are in.
            lists: list file (below `root`) by split.
            fields: names of the fields, in the order of the paths of a line.
            prefix: what to take off each path; None finds it: the longest tail of the path that exists below root.

        Raises:
            SourceError: a list file cannot be read, or a line has another number of paths.
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
    def from_table(cls, path: str | os.PathLike[str], *, key: str | None = None, split: str | None = None) -> Index:
        """Return the rows of a CSV or Parquet file, its columns as fields.

        Args:
            path: the file, `.csv`, `.tsv` or `.parquet`.
            key: column that holds the keys; None: "key" where there is such a column, else the row number.
            split: column that holds the split; None: "split" where there is such a column.

        Raises:
            SourceError: the file cannot be read, a named column is missing, or a value is not text or a number.
        """
        return cls(lambda: _table_rows(pathlib.Path(path), key, split))

    @classmethod
    def from_dataset(cls, dataset: Any, *, key: str | None = None) -> Index:
        """Return the rows of a data set that exists already: each has the field `number`, the position of its sample.

        Nothing but its length is read, unless `key` asks for a field of each sample. `datamat.writers.dataset` has the
        writer that reads the samples.

        Args:
            dataset: a folder finished by datamat, prepared by TFDS or saved by Hugging Face `datasets`; an object with
                `len` and items by position (list, torch `Dataset`, `datasets.Dataset`); equally long numpy arrays in a
                tuple or by name; or a dict of these by split.
            key: field that holds the keys. None: those that a finished directory has (with `-` for the `#` of copies),
                elsewhere the position, with the split before it where there are several.

        Raises:
            SourceError: the data set is none of these, or a sample lacks the key.

        Example:
            >>> [row.key for row in Index.from_dataset(["a", "b"])]
            ['00000000', '00000001']
        """
        samples = open_samples(dataset)

        def rows() -> Iterator[IndexRow]:
            for number, (place, split) in enumerate(samples.places()):
                row_key = place if key is None else _key_of(samples.read(number), key, number)
                yield IndexRow(row_key, split, {"number": number}, f"sample {number}")

        return cls(rows)


def files_below(
    root: str | os.PathLike[str], pattern: str = "**/*", suffixes: Sequence[str] = ()
) -> list[pathlib.PurePosixPath]:
    """Return the visible files below `root` that match, as sorted paths relative to it."""
    folder = pathlib.Path(root)
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; give the folder that holds the samples as source")
    found = []
    for path in folder.glob(pattern):
        below = pathlib.PurePosixPath(path.relative_to(folder).as_posix())
        visible = not any(part.startswith(".") for part in below.parts)
        # Not `is_file`: a link to nowhere is a sample that is missing, and is said to be when the file is looked at.
        if visible and (not suffixes or below.suffix.lower() in suffixes) and not path.is_dir():
            found.append(below)
    return sorted(found)


def pair_files(
    images: Iterable[pathlib.PurePosixPath],
    masks: Iterable[pathlib.PurePosixPath],
    *,
    match: Callable[[pathlib.PurePosixPath], str] = lambda path: path.stem,
) -> list[tuple[pathlib.PurePosixPath, pathlib.PurePosixPath]]:
    """Return (image, mask) pairs by file name, in the order of the images.

    Raises:
        SourceError: an annotation has no image, an image no annotation, or two share a name; names them.
    """
    by_name: dict[str, pathlib.PurePosixPath] = {}
    for mask in masks:
        if match(mask) in by_name:
            raise SourceError(f"{by_name[match(mask)]} and {mask} both annotate {match(mask)!r}; keep one of them")
        by_name[match(mask)] = mask
    pairs, lonely = [], []
    for image in images:
        mask_of = by_name.pop(match(image), None)
        if mask_of is None:
            lonely.append(f"{image}: image without annotation")
        else:
            pairs.append((image, mask_of))
    lonely += [f"{mask}: annotation without image" for mask in by_name.values()]
    if lonely:
        raise SourceError(f"{named(lonely)}; add the missing files or remove these")
    return pairs


def named(problems: Sequence[str]) -> str:
    """Return the first problems for a message, and how many there are in all."""
    shown = "; ".join(problems[:_MOST_NAMED])
    more = len(problems) - _MOST_NAMED
    return f"{shown}; and {more} more" if more > 0 else shown


def _as_row(row: Any, number: int) -> IndexRow:
    origin = f"row {number}"
    if isinstance(row, str):
        return IndexRow(row, origin=origin)
    if isinstance(row, IndexRow):
        return row if row.origin else row._replace(origin=origin)
    if isinstance(row, tuple):
        return IndexRow(*row)
    raise SourceError(f"{origin} is a {type(row).__name__}; want an IndexRow, a tuple (key, split, fields) or a key")


def _key_of(sample: Mapping[str, Any], name: str, number: int) -> str:
    if name not in sample:
        raise SourceError(f"sample {number} has no field {name!r}, which is to be its key; it has {', '.join(sample)}")
    return str(sample[name])


def _lines(root: str | os.PathLike[str], name: str) -> list[str]:
    path = pathlib.Path(root) / name
    try:
        SourceFiles(os.fspath(root)).look_at(name)
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise SourceError(f"list file {path}: {error.strerror or error}; give the folder that holds it") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"list file {path} is not UTF-8 text (byte {error.start}); convert it") from error
    except ValueError as error:
        raise SourceError(f"list file {path}: {error}") from error


def _row_of_line(local: _PathMap, text: str, split: str, fields: Sequence[str], origin: str) -> IndexRow:
    paths = text.split("\t") if "\t" in text else text.split()
    if len(paths) != len(fields):
        raise SourceError(
            f"{origin}: found {len(paths)} paths, want {len(fields)} ({' '.join(fields)}) separated by a space, "
            f"or by a tab where names hold spaces: {text!r}"
        )
    found = [local.path_of(path) for path in paths]
    return IndexRow(pathlib.PurePosixPath(found[0]).stem, split, dict(zip(fields, found, strict=True)), origin)


class _PathMap:
    """Where paths that were written on another machine are below `root`, relative to it."""

    def __init__(self, root: str | os.PathLike[str], prefix: str | None) -> None:
        self._root = root
        self._prefix = prefix

    def path_of(self, path: str) -> str:
        """Return the path below root: without the prefix, which is found with the first file that exists here.

        A path that is nowhere below root comes back without its leading `/`, and is reported as missing then.
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


def _table_rows(path: pathlib.Path, key: str | None, split: str | None) -> Iterator[IndexRow]:
    number = 0
    for batch in _table_batches(path, text=(key or "key", split or "split")):
        names = batch.schema.names
        for column in (key, split):
            if column is not None and column not in names:
                raise SourceError(f"{path} has no column {column!r}; it has {', '.join(names)}")
        key_column = key or ("key" if "key" in names else None)
        split_column = split or ("split" if "split" in names else None)
        columns = {name: _cells(path, batch, name, number) for name in names}
        count = batch.num_rows
        keys = [str(value) for value in columns.pop(key_column)] if key_column else None
        splits = columns.pop(split_column) if split_column else [None] * count
        for place, (row_split, *values) in enumerate(zip(splits, *columns.values(), strict=True)):
            row_key = keys[place] if keys else f"{number + place:08d}"
            fields = dict(zip(columns, values, strict=True))
            yield IndexRow(row_key, row_split, fields, f"{path.name} row {number + place + 1}")
        number += count


def _table_batches(path: pathlib.Path, text: Sequence[str]) -> Iterator[Any]:
    """Yield the record batches of a table file: memory stays at one batch.

    Columns of CSV that `text` names are not taken for numbers: the key 007 is not 7.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_BATCH_ROWS)
        elif path.suffix in {".csv", ".tsv"}:
            options = csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
            convert = csv.ConvertOptions(column_types=dict.fromkeys(text, pa.string()))
            with csv.open_csv(path, parse_options=options, convert_options=convert) as file:
                yield from file
        else:
            raise SourceError(f"{path}: unknown kind of table; want .csv, .tsv or .parquet")
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"{path} cannot be read as a table: {error}") from error


def _cells(path: pathlib.Path, batch: Any, name: str, number: int) -> list[Any]:
    values: list[Any] = batch.column(name).to_pylist()
    for place, value in enumerate(values):
        if not isinstance(value, (str, int, float)):
            raise SourceError(
                f"{path} row {number + place + 1}, column {name!r}: found {value!r} ({type(value).__name__}), want "
                "text or a number; fill in empty cells and flatten nested ones"
            )
    return values
