"""Keeps the index on disk in columns, so that a worker reads its own rows and no process holds them all.

`RowStore` maps the files that `write_rows` wrote into memory: row i of any column is two offsets away. The driver
holds a few integers per row while it plans.

    rows.json                   number of rows, source, splits, fields, where blocks of rows came from, what decides
                                whether a file is the same
    key.text key.ends           UTF-8 of all keys; where each ends (uint64)
    FIELD.text FIELD.ends       a field of strings, of paths, or of other values as JSON (`encode_value`)
    FIELD.numbers               a field of int64 or float64
    FIELD.inputs                of input files: path, size, time of change and digest, see `INPUT`
    FIELD.signed                of URLs: the signed one, where FIELD has it without its signature; several as JSON
    split.codes hash.codes      uint16 number of the split; uint64 hash of the key
    digest.codes                uint64 digest of everything in the row, and of sizes and times of its files
    identity.codes              the same without the times, for fingerprints; only where rows have files
    order.codes                 row numbers in the order of the plan (written by `RowStore.set_order`)
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import xxhash

from datamat.directory.files import read_json
from datamat.directory.keys import KeyLookup, mix64
from datamat.directory.row_values import FILES, decode_value, files_of_text
from datamat.folders.urls import is_url
from datamat.sources.files import LARGEST_HASHED, SourceFiles, links_followed
from datamat.sources.rows import _MANY_BYTES, IndexRow, Origin, Texts
from datamat.sources.url_files import LIKELY_BYTES, url_path
from datamat.values import frozen

FieldKind = Literal["text", "path", "json", "int64", "float64"]

NO_TEXT = b"\xff\x00\xff"
"""Stands for None among texts and paths; neither UTF-8 nor a path."""

INPUT = np.dtype([("path", "<u8"), ("size", "<i8"), ("stamp", "<i8"), ("digest", "V16")])
"""An input file of a row, or several of one field together.

path: hash of its path as the index has it, and of the target of a link that is followed out of the source; 0 if the row
has no such file. size: in bytes. stamp: time of change in nanoseconds since 1970; of several files, a digest of their
names, sizes and times. digest: of the content, XXH3-128; 0 if it is not known.
"""

_NO_TEXT = NO_TEXT.decode("utf-8", "surrogateescape")


@frozen()
class RowField:
    """One field of the rows.

    Attributes:
        name: name of the field in the index.
        number: position of the field among those of a row, from 0.
        kind: how its values are stored; some texts and paths may be None.
        holds_file: whether input files are among its values.
        types: sorted names of the Python types of its values, if the kind is "json".
        holds_urls: whether they may be URLs.
    """

    name: str
    number: int
    kind: FieldKind
    holds_file: bool
    types: tuple[str, ...] = ()
    holds_urls: bool = False

    @property
    def stem(self) -> str:
        """Prefix of the names of its files; not the field's own name, which could be anything."""
        return f"field{self.number}"


class RowStore:
    """Reads the rows that `write_rows` wrote; any number of processes may open them.

    Args:
        folder: folder that `write_rows` wrote to.

    Attributes:
        left_aside: which files of its source the index has skipped, in words; "" if nothing is known.
        groups: which groups draw the splits, in words; "" if keys do, or nothing is known.
        fields: all fields, with the field of listed files last.
        file_fields: those that hold input files.
    """

    left_aside = ""
    groups = ""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        found = read_json(folder / "rows.json")
        self.num_rows: int = found["num_rows"]
        self.source: str = found["source"]
        self.identity: str = found["identity"]
        self.splits: list[str] = found["splits"]
        self.fields = [RowField(**{**field, "types": tuple(field["types"])}) for field in found["fields"]]
        self.file_fields = [field for field in self.fields if field.holds_file]
        self.url_folder: str = found.get("url_folder", "")
        self._follows_links: bool = found.get("follows_links", False)
        self._blocks = [(start, stop, Origin(*origin)) for start, stop, origin in found["origins"]]

    def __len__(self) -> int:
        return self.num_rows

    @functools.cached_property
    def hashes(self) -> np.ndarray:
        """uint64 (num_rows,): hash of each key."""
        return self._codes("hash.codes", np.uint64)

    @functools.cached_property
    def split_codes(self) -> np.ndarray:
        """uint16 (num_rows,): position of each row's split in `splits`."""
        return self._codes("split.codes", np.uint16)

    @functools.cached_property
    def digests(self) -> np.ndarray:
        """uint64 (num_rows,): digest of key, fields, and size and time of the input files."""
        return self._codes("digest.codes", np.uint64)

    @functools.cached_property
    def identities(self) -> np.ndarray:
        """uint64 (num_rows,): digest of key, fields, and sizes (not times) of the input files."""
        return self._codes("identity.codes" if self.file_fields else "digest.codes", np.uint64)

    @functools.cached_property
    def order(self) -> np.ndarray:
        """uint32 (num_rows,): row numbers in the order of the plan."""
        return self._codes("order.codes", np.uint32)

    def set_order(self, order: np.ndarray) -> None:
        """Write the order of the plan."""
        with open(self.folder / "order.codes", "wb") as file:
            file.write(np.ascontiguousarray(order, np.uint32).data)
        for name in ("order", "_places"):
            self.__dict__.pop(name, None)

    @property
    def largest_hashed(self) -> int:
        """Size in bytes of the largest input file that is hashed."""
        return LARGEST_HASHED if self.identity == "stat" else 1 << 62

    def input_bytes(self) -> np.ndarray:
        """Return int64 (num_rows,): bytes of the input files of each row; a guess if they are behind URLs."""
        total = np.zeros(self.num_rows, np.int64)
        for field in self.file_fields:
            inputs = self._inputs(field)
            total += inputs["size"]
            if field.holds_urls:
                total[(inputs["path"] != 0) & (inputs["size"] == 0)] += LIKELY_BYTES
        return total

    @property
    def holds_urls(self) -> bool:
        """Whether rows name files by URL."""
        return any(field.holds_urls for field in self.file_fields)

    def times(self, start: int, stop: int) -> str:
        """Return the digest of rows start to stop, in the order of the plan, with sizes and times of their files.

        It is "" if rows have no files, or if times do not count.
        """
        if not self.file_fields or self.identity == "content":
            return ""
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(self.digests[self.order[start:stop]]).data)

    def inputs(self, positions: np.ndarray) -> np.ndarray:
        """Return `INPUT` (n, number of file fields): the input files of rows by number, as the index saw them."""
        columns = [self._inputs(field)[positions] for field in self.file_fields]
        return np.stack(columns, axis=1) if columns else np.zeros((len(positions), 0), INPUT)

    def input_paths(self, positions: np.ndarray) -> list[list[list[str]]]:
        """Return the paths, as they can be opened, of the files of rows by number: row, file field, files."""
        columns = [self._paths(field, positions) for field in self.file_fields]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in positions]

    def set_digests(self, positions: np.ndarray, digests: np.ndarray) -> None:
        """Write the digests of input files, V16 (n, number of file fields), to the store."""
        for number, field in enumerate(self.file_fields):
            column = np.memmap(self.folder / f"{field.stem}.inputs", INPUT, "r+")
            column["digest"][positions] = digests[:, number]
            column.flush()

    def read(self, positions: np.ndarray) -> list[IndexRow]:
        """Return rows by number, the paths of their input files joined to the source.

        Args:
            positions: row numbers, any integer dtype, (n,).
        """
        keys = self._text("key", positions)
        origins = self._origins(positions)
        splits = map(self.splits.__getitem__, self.split_codes[positions].tolist())
        fields = [field for field in self.fields if field.name != FILES]
        names = tuple(field.name for field in fields)
        columns = [self._values(field, positions) for field in fields]
        values: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else [()] * len(keys)
        files: Sequence[tuple[str, ...]] = [()] * len(keys)
        if len(fields) < len(self.fields):
            files = self._values(self.fields[-1], positions)
        # Takes half the time without a loop in Python: a row of a table costs little more than this.
        dicts = map(dict, map(zip, itertools.repeat(names), values))
        rows = zip(keys, splits, dicts, origins, files, strict=True)
        return list(map(tuple.__new__, itertools.repeat(IndexRow), rows))

    def keys(self, positions: np.ndarray) -> list[str]:
        """Return the keys of rows by number."""
        return self._text("key", positions)

    def find(self, key: str) -> int | None:
        """Return the number of the row with a key, or None."""
        return self._lookup.find(key)

    def find_all(self, keys: Sequence[str]) -> np.ndarray:
        """Return int64 (n,): the number of the row with each key, -1 if there is none."""
        return self._lookup.find_all(keys)

    def place_in_order(self, row: int) -> int:
        """Return the position of a row in the order of the plan."""
        return int(self._places[row])

    @functools.cached_property
    def _lookup(self) -> KeyLookup:
        return KeyLookup(np.asarray(self.hashes), lambda rows: self.keys(np.asarray(rows)))

    @functools.cached_property
    def _places(self) -> np.ndarray:
        places = np.empty(self.num_rows, np.uint32)
        places[self.order] = np.arange(self.num_rows, dtype=np.uint32)
        return places

    def columns(self, positions: np.ndarray) -> Iterator[tuple[str, Any]]:
        """Yield each field of rows by number: int64 or float64 (n,), or n values as the index gave them."""
        for field in self.fields:
            if field.name != FILES:
                yield field.name, self.column(field, positions)

    def column(self, field: RowField, positions: np.ndarray) -> Any:
        """Return one field of rows by number: int64 or float64 (n,), or n values as the index gave them."""
        if field.kind in {"int64", "float64"}:
            return np.asarray(self._codes(f"{field.stem}.numbers", np.dtype(field.kind))[positions])
        if field.kind == "json":
            return [decode_value(text, "") for text in self._text(field.stem, positions)]
        values = self._nullable(field.stem, positions)
        return [value and pathlib.Path(value) for value in values] if field.kind == "path" else values

    def _values(self, field: RowField, positions: np.ndarray) -> list[Any]:
        if field.kind in {"int64", "float64"}:
            numbers: list[Any] = self.column(field, positions).tolist()
            return numbers
        if field.kind == "json":
            texts = self._text(field.stem, positions)
            places = self._url_places(field, positions) if field.holds_urls else [{}] * len(texts)
            return [
                decode_value(text, lambda name, urls=urls: urls.get(name) or os.path.join(self.source, name))  # type: ignore[misc]
                for text, urls in zip(texts, places, strict=True)
            ]
        values = self._nullable(field.stem, positions)
        if field.holds_urls:
            places = self._url_places(field, positions)
            values = [value and urls.get(value, value) for value, urls in zip(values, places, strict=True)]
        if field.holds_file:
            paths = self._inputs(field)["path"][positions].tolist()
            values = [
                os.path.join(self.source, value) if value and path else value
                for value, path in zip(values, paths, strict=True)
            ]
        return [value and pathlib.Path(value) for value in values] if field.kind == "path" else values

    def _paths(self, field: RowField, positions: np.ndarray) -> list[list[str]]:
        texts = self._text(field.stem, positions)
        paths = self._inputs(field)["path"][positions].tolist()
        found = map(files_of_text, texts) if field.kind == "json" else ([text] for text in texts)
        places = self._url_places(field, positions) if field.holds_urls else [{}] * len(paths)
        return [
            [urls.get(name) or os.path.join(self.source, name) for name in names] if path else []
            for names, path, urls in zip(found, paths, places, strict=True)
        ]

    def _url_places(self, field: RowField, positions: np.ndarray) -> list[dict[str, str]]:
        """Return the path of each URL of rows by number, by the URL as the row has it.

        So do local files outside the source: their rows fail when they are read.
        """
        found, files = [], SourceFiles(self.source)
        texts, each = self._text(field.stem, positions), self.input_urls(field, positions)
        for row, text, urls in zip(np.asarray(positions).tolist(), texts, each, strict=True):
            place = f"{row}-{field.number}"
            paths = {name: url_path(self.url_folder, url, f"{place}-{n}") for n, (name, url) in enumerate(urls.items())}
            for number, (name, problem) in enumerate(self._refused(files, names_in(field, text)).items(), len(urls)):
                paths[name] = url_path(self.url_folder, name, f"{place}-{number}", f"{name!r}: {problem}")
            found.append(paths)
        return found

    def _refused(self, files: SourceFiles, names: Sequence[str]) -> dict[str, str]:
        """Return what is wrong with local files among URLs, by their names."""
        with links_followed(self._follows_links):
            problems = {
                # The table may come from someone else, and name any file of this machine.
                name: "is an absolute path; make it relative, or pass follow_links=True if the table is yours"
                if os.path.isabs(name) and not self._follows_links
                else files.problem(name)
                for name in names
                if self._is_file(name)
            }
        return {name: problem for name, problem in problems.items() if problem}

    def input_urls(self, field: RowField, positions: np.ndarray) -> list[dict[str, str]]:
        """Return the signed URLs of rows by number, each by its name in the row."""
        texts, signed = self._text(field.stem, positions), self._text(f"{field.stem}.signed", positions)
        found = []
        for text, whole in zip(texts, signed, strict=True):
            names = names_in(field, text)
            urls = names if not whole else json.loads(whole) if field.kind == "json" else [whole]
            found.append({name: url for name, url in zip(names, urls, strict=True) if name and not self._is_file(name)})
        return found

    def _is_file(self, name: str) -> bool:
        return not is_url(name) and os.path.lexists(os.path.join(self.source, name))

    def _inputs(self, field: RowField) -> np.ndarray:
        return self._codes(f"{field.stem}.inputs", INPUT)

    def _nullable(self, stem: str, positions: np.ndarray) -> list[Any]:
        return [None if value == _NO_TEXT else value for value in self._text(stem, positions)]

    def gathered(self, stem: str, positions: np.ndarray) -> Texts:
        """Return a column of texts of rows by number.

        Args:
            stem: name of the column's files.
            positions: row numbers, any integer dtype, (n,).
        """
        text, ends = self._codes(f"{stem}.text", np.uint8), self._codes(f"{stem}.ends", np.uint64)
        positions = np.asarray(positions, np.int64)
        stops = ends[positions].astype(np.int64)
        starts = np.where(positions > 0, ends[positions - 1], 0).astype(np.int64)
        lengths = stops - starts
        bounds = np.cumsum(lengths)
        if not len(bounds) or bounds[-1] > _MANY_BYTES * len(bounds):
            whole = memoryview(text.data)
            return Texts.of_bytes([bytes(whole[a:b]) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])
        width = int(lengths[0])
        if width and (lengths == width).all() and not (starts % width).any():  # as if all of the column had this length
            found = text[: len(text) // width * width].view(f"V{width}")[starts // width]
        else:
            found = text[np.arange(bounds[-1]) + np.repeat(starts - bounds + lengths, lengths)]
        return Texts(found.tobytes(), bounds.astype(np.uint64))

    def rows_naming(self, *parts: str) -> np.ndarray:
        """Return the numbers of the rows with an input file whose path, as the index has it, contains one of `parts`.

        All paths are searched at once: a million rows take some milliseconds if none is found.
        """
        wanted = [re.compile(re.escape(part.encode("utf-8", "surrogateescape"))) for part in {*parts}]
        found = np.zeros(len(self), bool)
        for field in self.file_fields:
            text, ends = self._codes(f"{field.stem}.text", np.uint8), self._codes(f"{field.stem}.ends", np.uint64)
            places = np.array([match.start() for each in wanted for match in each.finditer(text.data)], np.uint64)
            found[np.searchsorted(ends, places, side="right")] = True
        return np.flatnonzero(found)

    def _text(self, stem: str, positions: np.ndarray) -> list[str]:
        return self.gathered(stem, positions).tolist()

    def _origins(self, positions: np.ndarray) -> list[str]:
        """Return where rows came from, by number."""
        if not self._blocks:
            return self._text("origin", positions)
        starts = np.array([start for start, _, _ in self._blocks])
        places = np.searchsorted(starts, positions, side="right") - 1
        numbers = zip(places.tolist(), (np.asarray(positions, np.int64) - starts[places]).tolist(), strict=True)
        origins = [origin for _, _, origin in self._blocks]
        return [origins[place].of(number) for place, number in numbers]

    def _codes(self, name: str, dtype: Any) -> np.ndarray:
        if name not in self.__dict__:
            path = self.folder / name
            empty = not path.stat().st_size  # an empty file cannot be mapped
            # A plain array: indexing a `memmap` makes another one, in Python, ten times as slowly.
            self.__dict__[name] = np.zeros(0, dtype) if empty else np.asarray(np.memmap(path, dtype, "r"))
        mapped: np.ndarray = self.__dict__[name]
        return mapped


def names_in(field: RowField, text: str) -> list[str]:
    """Return the URLs and paths that a row has in a field of URLs."""
    if field.kind == "json":
        return files_of_text(text)
    return [text] if text and text != _NO_TEXT else []


def mixed(digests: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fold a uint64 column into the digests of its rows; the order of columns matters."""
    with np.errstate(over="ignore"):
        return mix64(digests * np.uint64(0x9E3779B97F4A7C15) + values)
