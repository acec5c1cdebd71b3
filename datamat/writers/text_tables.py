"""Reads CSV and JSON Lines files: every column has the type of all its cells, in all files of a table.

A file is read twice, once for the types and once for the rows, and never held in memory. A column of CSV is a number,
a truth value or a time if all its cells are, and no cell would change if it were written again: 007, +49, 0x10, 1e5,
and integers that 64 bits or a float cannot hold are text. An empty cell is a missing value, or an empty text. Lines of
JSON say what is text; fields that a line lacks are missing. The first bytes of a file, not its name, tell its
compression.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datamat.errors import OptionError, SourceError
from datamat.values import frozen
from datamat.writers.arrow_types import lacking

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 65_536
_PACKED = (
    ("gzip", ".gz", rb"\x1f\x8b"),
    ("bz2", ".bz2", rb"BZh[1-9]1AY&SY"),
    ("lz4", ".lz4", rb"\x04\x22\x4d\x18"),
    ("zstd", ".zst", rb"\x28\xb5\x2f\xfd"),
)
"""What Arrow calls each way of compressing files, their ending, and how they begin."""

_JSON_LINES = (".jsonl", ".ndjson")
TEXT_TABLES = tuple(
    kind + packing for kind in (".csv", ".tsv", *_JSON_LINES) for packing in ("", *(ending for _, ending, _ in _PACKED))
)
HEAD_BYTES = 1 << 16
_BLOCK = 1 << 20
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


@frozen()
class TextOptions:
    """How text becomes columns.

    Attributes:
        encoding: of the files; None for UTF-8, or UTF-16 where a file says so.
        delimiter: what separates the cells of CSV; None finds it.
        names: the columns that name something, such as the row, its split or its file: cells of CSV stay text.
        texts: the columns declared as text: cells of CSV stay text, and JSON has other values refused.
        json: the columns declared as JSON, whose cells of CSV are given as JSON.
        blank: the columns declared with a feature for which an empty cell is missing; cells of CSV stay text.
        columns: names of the columns to read; None for all.
        keeps_json: whether values of JSON that differ in kind, or are nested, are given as JSON.

    Raises:
        OptionError: there is no such encoding, or the delimiter is not one character.
    """

    encoding: str | None = None
    delimiter: str | None = None
    names: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    json: frozenset[str] = frozenset()
    blank: frozenset[str] = frozenset()
    columns: frozenset[str] | None = None
    keeps_json: bool = False

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.encoding or "utf-8")
        except (LookupError, TypeError):
            raise OptionError(
                f"encoding is {self.encoding!r}; want one that Python knows, such as 'cp1252', 'cp949' or 'utf-16'"
            ) from None
        if self.delimiter is not None and not (isinstance(self.delimiter, str) and len(self.delimiter) == 1):
            raise OptionError(f"delimiter is {self.delimiter!r}; want one character, as in delimiter=';'")


def text_schema(paths: Sequence[pathlib.Path], options: TextOptions) -> pa.Schema:
    """Return the types of the columns of CSV or JSON Lines files: nullable fields where a cell is missing.

    Raises:
        SourceError: a file cannot be read.
    """
    return _text_schema(tuple(map(_File.of, paths)), options)


class _File(NamedTuple):
    """A file as it was found: what is known about it holds until it changes."""

    path: pathlib.Path
    size: int
    stamp: int

    @classmethod
    def of(cls, path: pathlib.Path) -> _File:
        found = path.stat()
        return cls(path, found.st_size, found.st_mtime_ns)

    @property
    def is_json(self) -> bool:
        return any(suffix.lower() in _JSON_LINES for suffix in self.path.suffixes[-2:])


@functools.lru_cache(maxsize=8)  # binding a writer is followed by listing its rows
def _text_schema(files: tuple[_File, ...], options: TextOptions) -> pa.Schema:
    import pyarrow as pa

    columns: dict[str, _CsvColumn | _JsonColumn] = {}
    num_rows = 0
    if len({file.is_json for file in files}) > 1:
        one, other = (next(file.path for file in files if file.is_json == is_json) for is_json in (False, True))
        raise SourceError(f"{one} is CSV and {other} JSON Lines; give files of one kind, or one table for each")
    for file in files:
        for count, cells in _json_columns(file, options) if file.is_json else _csv_cells(file, options):
            if not file.is_json and options.columns is None and columns and cells.keys() != columns.keys():
                name = min(cells.keys() ^ columns.keys())
                lacks, has = (files[0], file) if name in cells else (file, files[0])
                raise SourceError(lacking(name, str(lacks.path), str(has.path)))
            num_rows += count
            for name, values in cells.items():
                if name not in columns:
                    columns[name] = _column(name, options, is_json=file.is_json)
                columns[name].add(values)
    return pa.schema([column.field(name, num_rows) for name, column in columns.items()])


def _column(name: str, options: TextOptions, *, is_json: bool) -> _CsvColumn | _JsonColumn:
    if is_json:
        return _JsonColumn(name in options.texts)
    return _CsvColumn(
        "json" if name in options.json else "string" if name in options.names | options.texts | options.blank else ""
    )


def text_batches(
    path: pathlib.Path, schema: pa.Schema, options: TextOptions
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number of rows, and the columns by name, of a run of rows of a CSV or JSON Lines file."""
    import pyarrow as pa

    if not (file := _File.of(path)).is_json:
        yield from _csv_rows(file, schema, options)
        return
    as_json = {field.name for field in schema if options.keeps_json and field.type == pa.json_()} - options.names
    for count, cells in _json_columns(file, options):
        columns = {name: cells.get(name, [None] * count) for name in schema.names}
        yield (
            count,
            columns
            | {name: [None if cell is None else json.dumps(cell) for cell in columns[name]] for name in as_json},
        )


# ---- any text


class _Head(NamedTuple):
    """What the first bytes of a file say about it.

    Attributes:
        codec: what Arrow calls its compression; None if there is none.
        encoding: of its text.
        text: what it begins with.
        is_cut: whether more follows.
    """

    codec: str | None
    encoding: str
    text: str
    is_cut: bool


@functools.lru_cache(maxsize=4)
def _head_of(file: _File, options: TextOptions) -> _Head:
    with file.path.open("rb") as opened:
        start = opened.read(16)
    codec = next((name for name, _, magic in _PACKED if re.match(magic, start)), None)
    with _unpacked(file.path, codec) as unpacked:
        head = unpacked.read(HEAD_BYTES)
    refuse_other_kinds(file.path, head)
    encoding = options.encoding or _encoding_of(file.path, head)
    return _Head(codec, encoding, head.decode(encoding, "ignore").removeprefix("\ufeff"), len(head) == HEAD_BYTES)


def _unpacked(path: pathlib.Path, codec: str | None) -> Any:
    import pyarrow as pa

    return pa.input_stream(str(path), compression=codec)


_OTHERS = {
    rb"PK\x03\x04|\xd0\xcf\x11\xe0": "an Excel workbook, or a ZIP archive; pass its rows, as in "
    "Materializer(pandas.read_excel({0!r}), ...), or unpack it",
    rb"PAR1": "a Parquet file; call it .parquet",
    rb"ARROW1": "an Arrow file; pass it as Materializer('arrow', {0!r}, ...)",
    rb"\xfd7zXZ\x00": "compressed by xz; unpack it with unxz",
    rb"SQLite format 3\x00": "a database of SQLite; pass its rows, as in Materializer(pandas.read_sql(...), ...)",
    rb"version https://git-lfs": "a pointer of Git LFS, not the file itself; run git lfs pull",
    rb"(?i)\s*<(!doctype )?html": "a web page, perhaps of an error or a login; download the file again",
}
"""What files that are not tables begin with, what they are, and what to do."""


def refuse_other_kinds(path: pathlib.Path, head: bytes) -> None:
    """Raise `SourceError` if the first bytes of a file, unpacked, are those of another kind than its name says."""
    for magic, what in _OTHERS.items():
        if re.match(magic, head):
            raise SourceError(f"{path} is {what.format(str(path))}")


def _encoding_of(path: pathlib.Path, head: bytes) -> str:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" not in head:
        return "utf-8"
    pairs = {head[place : place + 2] for place in range(0, len(head), 2)}
    for ending, encoding in ((b"\n\0", "utf-16-le"), (b"\0\n", "utf-16-be")):
        if ending in pairs:
            raise SourceError(
                f"{path} looks like text in {encoding}, which it does not say; pass encoding={encoding!r}"
            )
    raise _with_nul(path, f"byte {head.index(0)}")


def _with_nul(path: pathlib.Path, place: str) -> SourceError:
    return SourceError(
        f"{path}: {place} is NUL, which text cannot hold; the file is damaged, or is not text: copy or write it again"
    )


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Raise `SourceError` if the block cannot read a file."""
    import pyarrow as pa

    try:
        yield
    except (OSError, UnicodeError, pa.ArrowInvalid) as error:
        if isinstance(error, UnicodeError) or "invalid UTF8" in str(error):
            raise _wrong_encoding(path, getattr(error, "encoding", "utf-8")) from error
        remedy = "write the file again"
        if "CSV parse error" in str(error):
            remedy = "correct the file, or say what separates its cells with delimiter="
        raise SourceError(f"{path} cannot be read as a table: {error}; {remedy}") from error


def _wrong_encoding(path: pathlib.Path | str, encoding: str) -> SourceError:
    return SourceError(
        f"{path} is not text in {encoding}; name its encoding with encoding=, as in TableWriter(encoding='cp1252'), "
        "which Excel writes in Western Europe; in Korea it is cp949, in Japan cp932"
    )


# ---- CSV


class _CsvColumn:
    """What a column of CSV holds, by the cells so far: no cell has two types, but integers are floats as well."""

    def __init__(self, kind: str) -> None:
        self._num_filled = 0
        self._kind = kind
        self._are_floats = True  # where they are integers
        self._has_digits = False  # nan alone is a word

    def add(self, cells: pa.Array) -> None:
        import pyarrow.compute as pc

        cells = cells.drop_null()
        self._num_filled += len(cells)
        if not len(cells) or self._kind in {"string", "json"}:
            return
        kinds = (
            _KINDS if not self._kind else _KINDS[:2] if self._kind == "int64" and self._are_floats else (self._kind,)
        )
        self._kind = next((kind for kind in kinds if _are(kind, cells)), "string")
        if self._kind == "int64" and pc.max(pc.binary_length(cells)).as_py() > _EXACT_DIGITS:
            self._are_floats = self._are_floats and _are("float64", cells)
        self._has_digits = self._has_digits or self._kind == "int64" or bool(re.search(rb"[0-9]", _text_of(cells)))

    def field(self, name: str, num_rows: int) -> pa.Field:
        import pyarrow as pa

        if self._kind in {"", "string"} or (self._kind == "float64" and not self._has_digits):
            return pa.field(name, pa.string(), nullable=False)  # whose empty cells are empty texts
        return pa.field(name, _arrow_type(self._kind), nullable=self._num_filled < num_rows)


_EXACT_DIGITS = 15  # of an integer that float64 holds, whichever it is
_KINDS = ("int64", "float64", "bool", "timestamp[us]", "timestamp[us, tz=UTC]")
_TRUTHS = ("true", "True", "TRUE", "false", "False", "FALSE")
_FEW = 16
# An exponent has a sign where Python and C write floats: 1e-05, but an id is 1e5.
_CHANGED = r"^\+|^-?[0-9]+[eE][0-9]|^-?[0-9]{16,}$"


def _are(kind: str, cells: pa.Array) -> bool:
    """Return True if cells of text hold values of a type, none of which would be written in another way."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "bool":
        return not _any(pc.invert(pc.is_in(cells, pa.array(_TRUTHS))))
    for some in (cells[:_FEW], cells):  # Arrow words an error for each cell that is of another type
        try:
            some.cast(_arrow_type(kind))
        except pa.ArrowInvalid:
            return False
    return kind not in {"int64", "float64"} or not _change(kind, cells)


def _change(kind: str, numbers: pa.Array) -> bool:
    """Return True if one of many numbers would be written in another way: 007, -0, 0x10, +1, 1e5."""
    import pyarrow.compute as pc

    _, ends, data = numbers.buffers()
    bounds = np.frombuffer(ends, np.int32)[numbers.offset : numbers.offset + len(numbers) + 1]
    letters = np.frombuffer(data, np.uint8)
    is_negative = letters[bounds[:-1]] == ord("-")
    first = bounds[:-1] + is_negative
    is_zero, has_more = letters[first] == ord("0"), first + 1 < bounds[1:]
    if kind == "int64":
        return bool((is_zero & (has_more | is_negative)).any())
    second = letters[first[is_zero & has_more] + 1]
    if ((second >= ord("0")) & (second <= ord("9"))).any():
        return True
    text = _text_of(numbers)
    is_plain = np.diff(bounds).max() <= _EXACT_DIGITS and not any(letter in text for letter in b"eE+")
    return not is_plain and _any(pc.match_substring_regex(numbers, _CHANGED))


def _text_of(cells: pa.Array) -> bytes:
    """Return the text of all cells without the bounds between them."""
    _, ends, data = cells.buffers()
    bounds = np.frombuffer(ends, np.int32)
    return b"" if data is None else data[bounds[cells.offset] : bounds[cells.offset + len(cells)]].to_pybytes()


def _any(found: pa.Array) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(found, min_count=0).as_py())


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    if kind == "json":
        return pa.json_()
    if kind.startswith("timestamp"):
        return pa.timestamp("us", "UTC" if "UTC" in kind else None)
    return pa.type_for_alias(kind)


class _Csv(NamedTuple):
    """How a CSV file is written.

    Attributes:
        codec: as in a `_Head`, like `encoding`.
        delimiter: what separates its cells.
        num_skipped: lines before the one with the names.
        names: the columns to read.
        last: the last column, which takes in all rows after an unclosed quote.
    """

    codec: str | None
    encoding: str
    delimiter: str
    num_skipped: int
    names: tuple[str, ...] = ()
    last: str = ""


@functools.lru_cache(maxsize=64)
def _csv_form(file: _File, options: TextOptions) -> _Csv:
    head = _head_of(file, options)
    said = _SAID.match(head.text)
    delimiter = options.delimiter or (said[1] if said else _delimiter_of(file.path, head))
    form = _Csv(head.codec, head.encoding, delimiter, 1 if said else 0)
    with _csv_reader(file.path, form, {}) as first:
        names = first.schema.names
    wanted = [name for name in names if options.columns is None or name in options.columns] or names
    for number, name in enumerate(names, 1):
        if name in wanted and (not name or names.count(name) > 1):
            what = f"is called {name!r}, as another is" if name else "has no name"
            raise SourceError(
                f"{file.path}: column {number} of {len(names)} {what}; the first line names each column once, and "
                "pandas writes no index with to_csv(index=False)"
            )
    return form._replace(names=tuple(wanted), last=names[-1])


_SAID = re.compile(r'"?sep=(.)"?\r?\n', re.IGNORECASE)  # as Excel does


def _csv_cells(file: _File, options: TextOptions) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yield the number of rows, and the columns to read, of runs of rows: cells are text, or null."""
    import pyarrow as pa

    with _readable(file.path):
        form = _csv_form(file, options)
        yield 0, {name: pa.array([], pa.string()) for name in form.names}  # which count where no rows follow
        last = ""
        types = dict.fromkeys([*form.names, form.last], pa.string())
        with _csv_reader(file.path, form, types) as reader:
            for batch in reader:
                cells = dict(zip(types, batch.columns, strict=True))
                for name in form.names:
                    if b"\0" in _text_of(cells[name]):
                        raise _with_nul(file.path, f"a letter in column {name!r}")
                if batch.num_rows:
                    last = cells[form.last][-1].as_py() or ""
                yield batch.num_rows, {name: cells[name] for name in form.names}
        if "\n" in last:
            _refuse_open_quote(file.path, form, last)


def _csv_rows(file: _File, schema: pa.Schema, options: TextOptions) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yield what `_csv_cells` yields, with cells of the types of a schema; times and JSON stay text, as written."""
    import pyarrow as pa

    with _readable(file.path):
        form = _csv_form(file, options)
        kinds = {name: schema.field(name).type for name in form.names}
        types = {
            name: pa.string() if pa.types.is_timestamp(kind) or kind == pa.json_() else kind
            for name, kind in kinds.items()
        }
        # Of a column of text, an empty cell is an empty text.
        texts = {name for name, kind in kinds.items() if kind == pa.string()} - options.blank
        with _csv_reader(file.path, form, types) as reader:
            for batch in reader:
                found = {
                    name: cells.fill_null("") if name in texts and cells.null_count else cells
                    for name, cells in zip(form.names, batch.columns, strict=True)
                }
                lacks = {name: [None] * batch.num_rows for name in schema.names if name not in found}
                yield batch.num_rows, found | lacks


def _refuse_open_quote(path: pathlib.Path, form: _Csv, last: str) -> None:
    """Raise an error if the last cell takes in all rows after an unclosed quote."""
    with _unpacked(path, form.codec) as unpacked, io.BufferedReader(unpacked) as file:
        text = io.TextIOWrapper(file, form.encoding, newline="")
        num_quotes, end = 0, ""
        while block := text.read(_BLOCK):
            num_quotes, end = num_quotes + block.count('"'), (end + block)[-3:]
    if num_quotes % 2 and not end.rstrip("\r\n").endswith('"'):  # a quote within a cell is a single quote as well
        raise SourceError(
            f"{path}: the quote before {last[:40]!r} is never closed, so that {last.count(chr(10))} lines "
            "would be one cell; close it, or write a quote that belongs to a cell twice"
        )


def _csv_reader(path: pathlib.Path, form: _Csv, types: Mapping[str, pa.DataType]) -> Any:
    from pyarrow import csv as arrow_csv

    return arrow_csv.open_csv(
        _unpacked(path, form.codec),
        read_options=arrow_csv.ReadOptions(
            encoding=form.encoding,
            skip_rows=form.num_skipped,
            use_threads=bool(types),  # without, no reading ahead
        ),
        parse_options=arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=[*types],
            null_values=[""],
            true_values=_TRUTHS[:3],
            false_values=_TRUTHS[3:],
            strings_can_be_null=True,
        ),
    )


def _delimiter_of(path: pathlib.Path, head: _Head) -> str:
    """Return the delimiter of CSV: the one that its name implies, unless that leaves the names in one cell.

    Otherwise it is the one that gives rows of one length or, if none does, that occurs in the names and in other rows.
    """
    usual = "\t" if any(suffix.lower() == ".tsv" for suffix in path.suffixes[-2:]) else ","
    widths: dict[str, list[int]] = {}
    for delimiter in dict.fromkeys([usual, *_DELIMITERS]):
        rows = [row for row in csv.reader(io.StringIO(head.text, newline=""), delimiter=delimiter) if row]
        if delimiter == usual and (not rows or len(rows[0]) > 1):
            return usual
        if len(rows[0]) > 1:
            widths[delimiter] = [len(row) for row in (rows[:-1] if head.is_cut else rows)]
    fitting = [delimiter for delimiter, found in widths.items() if len({*found}) == 1]
    fitting = fitting or [delimiter for delimiter, found in widths.items() if max(found[1:], default=1) > 1]
    if len(fitting) == 1 or not widths:
        return fitting[0] if fitting else usual
    raise SourceError(
        f"{path}: its cells may end at {' or at '.join(_DELIMITERS[one] for one in fitting or [usual, *widths])}; say "
        f"which with delimiter=, as in TableWriter(delimiter={(fitting or [*widths])[0]!r})"
    )


# ---- JSON Lines


class _JsonColumn:
    """What a column of JSON Lines holds so far."""

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text
        self._num_filled = 0
        self._types: set[type] = set()  # of values, and of those in lists at any depth
        self._largest = 0
        self._found: Any = None

    def add(self, cells: list[Any]) -> None:
        import pyarrow as pa

        filled = [cell for cell in cells if cell is not None]
        self._num_filled += len(filled)
        types = {*map(type, filled)}
        values = [*_flat(filled)] if list in types else filled
        self._types |= {*map(type, values)} if list in types else types
        if int in self._types:
            self._largest = max(self._largest, *(abs(value) for value in values if type(value) is int), 0)
        try:
            found = pa.schema({"": pa.infer_type(filled)})
            self._found = pa.unify_schemas([self._found or found, found], promote_options="permissive")
        except (pa.ArrowException, OverflowError):
            self._types.add(dict)  # only JSON can hold it

    def field(self, name: str, num_rows: int) -> pa.Field:
        import pyarrow as pa

        is_one = len(self._types) == 1 or self._types == {int, float}
        is_exact = self._largest <= (_EXACT if float in self._types else _LONGEST)
        is_plain = is_one and is_exact and not self._types & {dict, type(None)}
        kind = self._found.types[0] if is_plain else pa.json_()
        if self._is_text and kind != pa.string():
            kind = pa.json_()
        return pa.field(name, kind, nullable=self._num_filled < num_rows)


def _flat(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        if type(cell) is list:
            yield from _flat(cell)
        else:
            yield cell


_EXACT, _LONGEST = 2**53, 2**63 - 1  # integers that float64 and int64 hold


def _json_columns(file: _File, options: TextOptions) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield runs of rows; the cell of a column that a row lacks is None."""
    with _readable(file.path):
        head = _head_of(file, options)
        with _unpacked(file.path, head.codec) as unpacked, io.BufferedReader(unpacked) as opened:
            lines: Iterable[Any] = opened if head.encoding == "utf-8" else io.TextIOWrapper(opened, head.encoding)
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            while batch := list(itertools.islice(numbered, BATCH_ROWS)):
                rows = [_object_of_line(file.path, number, line) for number, line in batch]
                names = dict.fromkeys(name for row in rows for name in row)
                if options.columns is not None:
                    names = {name: None for name in names if name in options.columns}
                yield len(rows), {name: [row.get(name) for row in rows] for name in names}


def _object_of_line(path: pathlib.Path, number: int, line: bytes | str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise _wrong_encoding(f"{path} line {number}", "utf-8") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} line {number} is not valid JSON: {error}; want an object on each line") from error
    if "\\ud" in str(line).lower() and not _is_unicode(row):
        raise SourceError(
            f"{path} line {number} holds half of a surrogate pair, which is not a character; write whole characters"
        )
    if not isinstance(row, dict):
        raise SourceError(f"{path} line {number} holds {line[:40]!r}; want an object on each line")
    return row


def _is_unicode(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
