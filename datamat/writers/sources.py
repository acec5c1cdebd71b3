"""Opens existing datasets as `DataSource`s: samples by position, which an index lists and a writer reads.

    a folder, a file   by its kind, named or found: `datamat.writers.kinds` says which module opens it
    an object          with `len` and items: a list, a torch `Dataset`, a `datasets.Dataset`; or arrays, by column
    a table            of pyarrow, pandas or polars: each row is a sample
    an iterator        a generator, a function that returns one, a torch `IterableDataset`, a streamed dataset
    a DataSource       unchanged
    {split: ...}       several of these

One contract holds for all. The driver reads whatever lists the samples: footers, headers, lengths; iterators, which
only the driver can read, it writes to disk. Workers get paths and positions, and each reads the samples of its rows: a
row group, or a record by its offset. The files that hold the samples count by their content.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datamat.codecs.files import PICTURES
from datamat.directory.files import read_json
from datamat.errors import DatamatError, SourceError, join_problems
from datamat.sources.rows import Rows
from datamat.writers.base import DataSource
from datamat.writers.kinds import KINDS, PACKINGS, SOURCE_KINDS
from datamat.writers.objects import are_arrays, is_stream, source_of
from datamat.writers.paths import SPLITS, ending_of, listed_files, paths_of, refuse_table_logs, visible_files
from datamat.writers.records import DAMAGES
from datamat.writers.splits import SplitSource
from datamat.writers.text_tables import TEXT_TABLES
from datamat.writers.unpacking import SpoolOptions

_WANTED = (
    "a folder finished by datamat, prepared by TFDS or saved by Hugging Face datasets; Parquet or Arrow files, or a "
    "folder of them; an object with len() and items by position (list, torch Dataset, datasets.Dataset); an iterator, "
    "or a function that returns one; a table of pyarrow, pandas, polars, DuckDB, Spark or Delta; equally long numpy "
    "arrays in a tuple or by name; or a dict of these by split"
)


def open_source(
    dataset: Any, *, names: Sequence[str] | None = None, kind: str | None = None, spool: SpoolOptions | None = None
) -> DataSource:
    """Return the samples of an existing dataset.

    Args:
        dataset: any of the kinds that this module lists.
        names: names of the fields, for samples that are tuples or arrays without names; None takes "x" and "y" for two
            fields, "x" for one, "field_0" and so on for more.
        kind: kind of the dataset, one of `SOURCE_KINDS`; None finds out.
        spool: how rows of iterators are written to disk; None refuses iterators.

    Raises:
        SourceError: the dataset is of an unknown kind, or a folder is incomplete.
        MissingDependencyError: the package that reads the dataset is not installed.
    """
    if isinstance(dataset, Mapping) and dataset and not are_arrays(dataset.values()):
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
        return SplitSource(parts)
    if isinstance(dataset, Rows):
        raise SourceError(
            "the source is an Index: its rows name inputs, which a function or a writer reads; pass it to "
            "materialize(function, index, ...), or return it from the index of a writer"
        )
    paths = paths_of(dataset, is_named=kind is not None)
    if paths is not None:
        with _damage_named(paths[0]):
            return _of_paths(paths, kind, SpoolOptions() if spool is None else spool)
    if kind in KINDS and not KINDS[kind].is_of_objects:
        raise SourceError(f"the source is a {type(dataset).__qualname__}, and {kind!r} reads files; give their path")
    found = dataset if isinstance(dataset, DataSource) else source_of(dataset, names, spool)
    if found is None:
        which = ", which ImportWriter alone reads" if spool is None and is_stream(dataset) else ""
        raise SourceError(f"the dataset is a {type(dataset).__qualname__}{which}; want {_WANTED}")
    return found


def _are_columns(dataset: Mapping[Any, Any]) -> bool:
    """Return True if a dict holds equally long lists of plain values under names that are not those of splits."""
    columns = list(dataset.values())
    are_plain = all(
        isinstance(column, (list, tuple)) and column and isinstance(column[0], (str, int, float)) for column in columns
    )
    return are_plain and len({len(column) for column in columns}) == 1 and not {*map(str, dataset)} & {*SPLITS}


@contextlib.contextmanager
def _damage_named(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except DAMAGES as error:
        if isinstance(error, DatamatError):
            raise
        raise SourceError(
            f"{path} is damaged, or is not a dataset of its kind: {type(error).__name__}: {error}; copy or write it "
            "again"
        ) from error


def _of_paths(paths: Sequence[pathlib.Path], kind: str | None, spool: SpoolOptions) -> DataSource:
    paths = [path if path.exists() else _pair_of(path) for path in paths]
    is_of_parquet = kind == "huggingface" and not KINDS[kind].is_marked(paths[0])  # whose schema has its notes
    name = _kind_of(paths) if kind in {None, "dataset"} or is_of_parquet else kind
    if name not in KINDS:
        raise SourceError(f"{name!r} reads objects, and {paths[0]} is a path; want {_WANTED}")
    chosen = KINDS[name]
    module: Any = importlib.import_module(f"datamat.writers.{chosen.module}")
    if chosen.suffixes is None:
        return module.open_folder(paths[0], spool)  # type: ignore[no-any-return]
    for path in paths:
        ending = ending_of(path.name)
        is_unpacked_here = chosen.is_unpacked and ending.endswith(PACKINGS)  # whatever it is called
        is_other = path.is_file() and chosen.suffixes and ending not in chosen.suffixes
        if is_other and not is_unpacked_here and (hint := _hint_of_packed(ending)):
            raise SourceError(f"{path} is compressed; {hint.format(str(path))}")
    files = listed_files(paths, chosen.suffixes)
    if not files:
        raise SourceError(
            f"{paths[0]} holds no files that end in {' or '.join(chosen.suffixes)}; give the folder that does, or a "
            f"pattern of files that are called otherwise, as in {str(paths[0] / '*')!r}"
            if chosen.suffixes
            else f"{paths[0]} holds no files; give the folder that does"
        )
    return module.open_files(files, spool)  # type: ignore[no-any-return]


def _pair_of(path: pathlib.Path) -> pathlib.Path:
    """Return the index of a pair of Megatron-LM's files, given the common part of their names."""
    index = path.with_name(f"{path.name}.idx")
    if not index.is_file():
        raise SourceError(f"{path} does not exist; correct the path of the source")
    return index


def _kind_of(paths: Sequence[pathlib.Path]) -> str:
    """Return the kind of files or of a folder by their names; raise `SourceError` if nothing tells it."""
    first = paths[0]
    if first.is_dir():
        if len(paths) == 1:
            marked = next((name for name, kind in KINDS.items() if kind.is_marked(first)), None)
            if marked == "mds":  # the index of litdata has the same name
                index = next(path for mark in KINDS[marked].marks for path in sorted(first.glob(mark)))
                return "litdata" if "chunks" in read_json(index) else "mds"
            if marked is not None:
                return marked
        endings = {ending_of(path.name) for path in visible_files(first)}
    else:
        endings = {ending_of(path.name) for path in paths}
    are_files = not first.is_dir()
    kinds = {n for n, kind in KINDS.items() if endings & set(kind.suffixes or ()) and (are_files or not kind.magic)}
    if len(kinds) == 1:
        return kinds.pop()
    if first.is_dir() and not endings & set(PICTURES):
        refuse_table_logs(first)
        marks = [mark for kind in KINDS.values() for mark in kind.marks if mark[:1] != "*"]
        raise SourceError(
            f"{first} holds none of {', '.join(marks)}, which identify datasets, and "
            f"{'files of several kinds' if kinds else 'no files of a known kind'} "
            f"({', '.join(sorted(filter(None, endings))[:6]) or 'none has an extension'}); want {_WANTED}; or name the "
            "kind, as in Materializer('parquet', ...)"
        )
    ending = min(endings & set(PICTURES), default=ending_of(first.name))
    raise _unknown_kind(first, ending)


def _unknown_kind(first: pathlib.Path, ending: str) -> SourceError:
    hint = _OTHERS.get(ending) or _hint_of_packed(ending)
    if hint:
        return SourceError(f"{first} is not a dataset of a known kind; {hint.format(str(first))}")
    if ending in PACKINGS:
        why = f"{first} is compressed, and its name does not say what it holds"
    else:
        why = (
            f"{first}: the extension {ending!r} is unknown"
            if ending
            else f"{first} has no extension that would say what it is"
        )
    return SourceError(
        f"{why}; name the kind of the file, as in Materializer('{'webdataset' if ending in PACKINGS else 'parquet'}', "
        f"{first.name!r}, ...), which may be {', '.join(SOURCE_KINDS)}"
    )


def _hint_of_packed(ending: str) -> str | None:
    """Return what to write for a compressed file, given its extension; None if only its kind is missing."""
    inner, packing = os.path.splitext(ending) if ending.count(".") > 1 else ("", ending)
    unpack = _UNPACKERS.get(packing)
    if unpack is None or (packing in PACKINGS and not inner):
        return None
    return f"unpack it first, with {unpack}, and pass what comes out"


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
    **dict.fromkeys(TEXT_TABLES, "the writer 'table' reads it, as in Materializer('table', {0!r}, ...)"),
    ".json": "pass its rows, as in Materializer(source=json.loads(pathlib.Path({0!r}).read_text()), ...)",
    ".txt": "pass its lines, as in Materializer(source=pathlib.Path({0!r}).read_text().splitlines(), ...)",
    ".xlsx": "pass its rows, as in Materializer(source=pandas.read_excel({0!r}), ...)",
    **dict.fromkeys([".h5", ".hdf5"], _OF_HDF5),
    ".npy": "pass its array, as in Materializer(source=numpy.load({0!r}, mmap_mode='r'), ...)",
    ".npz": "pass its arrays, as in Materializer(source=dict(numpy.load({0!r})), ...)",
    ".pkl": "it is never unpickled here; pass its rows, as in Materializer(source=rows, ...)",
}
"""What to write for files that hold rows, by extension."""
