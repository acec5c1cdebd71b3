"""CSV and JSON Lines files: every column has the type of all its cells, in all files of a table.

A file is read twice, and never held: once for the types, once for the rows. A column of CSV is a number, a truth value
or a time if all its cells are, and no cell would change if it were written again: 007, +49, 0x10, 1e5, and integers
that 64 bits or a float cannot hold are text. An empty cell is a missing value, or text without letters. Lines of JSON
say what is text; what a line lacks is missing.
"""

from __future__ import annotations

import codecs
import csv
import functools
import io
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError, SourceError
from datamat.values import frozen

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 65_536
UNPACKED_BY_ARROW = (".gz", ".bz2", ".lz4", ".zst")  # which it knows by these names
TEXT_TABLES = tuple(kind + packing for kind in (".csv", ".tsv", ".jsonl") for packing in ("", *UNPACKED_BY_ARROW))
_HEAD = 1 << 16
_BLOCK = 1 << 20
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar"}


@frozen()
class TextOptions:
    """How text becomes columns.

    Attributes:
        encoding: of the files; None for UTF-8, or UTF-16 where a file says so.
        delimiter: what separates the cells of CSV; None finds it.
        as_text: names of the columns whose cells stay text.
        blank: those among them whose empty cells are missing, rather than empty texts.
        columns: names of the columns to read; None for all.

    Raises:
        OptionError: there is no such encoding, or the delimiter is not one character.
    """

    encoding: str | None = None
    delimiter: str | None = None
    as_text: frozenset[str] = frozenset()
    blank: frozenset[str] = frozenset()
    columns: frozenset[str] | None = None

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

    Args:
        paths: the files of one table.
        options: how they are read.

    Raises:
        SourceError: a file cannot be read.
    """
    files = [(path, path.stat()) for path in paths]
    return _text_schema(tuple((path, found.st_size, found.st_mtime_ns) for path, found in files), options)


@functools.lru_cache(maxsize=8)  # who binds a writer lists its rows next
def _text_schema(files: tuple[tuple[pathlib.Path, int, int], ...], options: TextOptions) -> pa.Schema:
    import pyarrow as pa

    columns: dict[str, _CsvColumn | _JsonColumn] = {}
    num_rows = 0
    if len({_is_json(path) for path, _, _ in files}) > 1:
        one, other = (next(path for path, _, _ in files if _is_json(path) == is_json) for is_json in (False, True))
        raise SourceError(f"{one} is CSV and {other} JSON Lines; give files of one kind, or one table for each")
    for path, _, _ in files:
        for count, cells in _json_columns(path, options) if _is_json(path) else _csv_columns(path, None, options):
            num_rows += count
            for name, values in cells.items():
                if name not in columns:
                    columns[name] = _JsonColumn() if isinstance(values, list) else _CsvColumn(name in options.as_text)
                columns[name].add(values)
    return pa.schema([column.field(name, num_rows) for name, column in columns.items()])


def text_batches(
    path: pathlib.Path, schema: pa.Schema, options: TextOptions
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number of rows, and all columns by name, of a run of rows of a CSV or JSON Lines file.

    Args:
        path: the file.
        schema: what `text_schema` returned for it; times are text, as they were written.
        options: how it is read.
    """
    if not _is_json(path):
        yield from _csv_columns(path, schema, options)
        return
    for count, cells in _json_columns(path, options):
        yield count, {name: cells.get(name, [None] * count) for name in schema.names}


def _is_json(path: pathlib.Path) -> bool:
    return ".jsonl" in path.suffixes[-2:]


# ---- CSV


class _CsvColumn:
    """What a column of CSV holds, by the cells so far: no cell is of two types, but integers are floats, too."""

    def __init__(self, is_text: bool) -> None:
        self._num_filled = 0
        self._kind = "string" if is_text else ""
        self._are_floats = True  # where they are integers
        self._has_digits = False  # nan alone is a word

    def add(self, cells: pa.Array) -> None:
        import pyarrow.compute as pc

        cells = cells.drop_null()
        self._num_filled += len(cells)
        if not len(cells) or self._kind == "string":
            return
        kinds = (
            _KINDS if not self._kind else _KINDS[:2] if self._kind == "int64" and self._are_floats else (self._kind,)
        )
        self._kind = next((kind for kind in kinds if _are(kind, cells)), "string")
        if self._kind == "int64" and pc.max(pc.binary_length(cells)).as_py() > _EXACT_DIGITS:
            self._are_floats = self._are_floats and _are("float64", cells)
        if not self._has_digits:
            self._has_digits = _any(pc.match_substring_regex(cells, "[0-9]"))

    def field(self, name: str, num_rows: int) -> pa.Field:
        import pyarrow as pa

        if self._kind in {"", "string"} or (self._kind == "float64" and not self._has_digits):
            return pa.field(name, pa.string(), nullable=False)  # whose empty cells are empty texts
        return pa.field(name, _arrow_type(self._kind), nullable=self._num_filled < num_rows)


_EXACT_DIGITS = 15  # of an integer that float64 holds, whichever it is
_KINDS = ("int64", "float64", "bool", "timestamp[us]", "timestamp[us, tz=UTC]")
_CHANGED = {
    "int64": r"^-?0[0-9xX]|^-0$",
    # An exponent has a sign where Python and C write floats: 1e-05, but an id is 1e5.
    "float64": r"^\+|^-?0[0-9]|^-?[0-9]+[eE][0-9]|^-?[0-9]{16,}$",
}
"""Cells that would not be written again as they are, were they taken for numbers."""

_TRUTHS = ("true", "True", "TRUE", "false", "False", "FALSE")


def _are(kind: str, cells: pa.Array) -> bool:
    """Return whether text holds values of a type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == "bool":
        return not _any(pc.invert(pc.is_in(cells, pa.array(_TRUTHS))))
    try:
        cells.cast(_arrow_type(kind))
    except pa.ArrowInvalid:
        return False
    if kind == "int64":  # few cells of which need a closer look
        cells = cells.filter(pc.or_(pc.starts_with(cells, "0"), pc.starts_with(cells, "-0")))
    return kind not in _CHANGED or not _any(pc.match_substring_regex(cells, _CHANGED[kind]))


def _any(found: pa.Array) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(found, min_count=0).as_py())


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    if kind.startswith("timestamp"):
        return pa.timestamp("us", "UTC" if "UTC" in kind else None)
    return pa.type_for_alias(kind)


def _csv_columns(
    path: pathlib.Path, schema: pa.Schema | None, options: TextOptions
) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """Yield runs of rows; the cells of a column are of its type in the schema, without one all text, or null."""
    import pyarrow as pa

    encoding = ""
    try:
        with pa.input_stream(str(path), compression="detect") as file:
            head = file.read(_HEAD)
        encoding = options.encoding or _encoding_of(head)
        if encoding == "utf-8" and b"\0" in head:
            raise _wrong_encoding(path, encoding)
        delimiter = options.delimiter or _delimiter_of(path, head.decode(encoding, "ignore"), is_cut=len(head) == _HEAD)
        with _csv_reader(path, encoding, delimiter, {}) as first:
            names = first.schema.names
        if len({*names}) < len(names):
            raise SourceError(f"{path} has two columns with the same name ({', '.join(names)}); rename one")
        names = [name for name in names if options.columns is None or name in options.columns] or names
        if schema is None:  # the names count where no rows follow
            yield 0, {name: pa.array([], pa.string()) for name in names}
        types = {name: pa.string() if schema is None else _parsed_type(schema.field(name).type) for name in names}
        # Of a column of text, an empty cell is an empty text.
        texts = {name for name in names if schema is not None and schema.field(name).type == pa.string()}
        texts -= options.blank
        with _csv_reader(path, encoding, delimiter, types) as reader:
            for batch in reader:
                yield batch.num_rows, {
                    name: cells.fill_null("") if name in texts and cells.null_count else cells
                    for name, cells in zip(names, batch.columns, strict=True)
                }  # fmt: skip
        if schema is None:
            _refuse_open_quote(path, encoding, delimiter)
    except (OSError, UnicodeError, pa.ArrowInvalid) as error:
        if isinstance(error, UnicodeError) or "invalid UTF8" in str(error):
            raise _wrong_encoding(path, encoding) from error
        raise SourceError(
            f"{path} cannot be read as a table: {error}; correct the file, or say what separates its cells with "
            "delimiter="
        ) from error


def _refuse_open_quote(path: pathlib.Path, encoding: str, delimiter: str) -> None:
    """Raise where the last cell takes in all rows that follow a quote, since nothing closes it."""
    import pyarrow as pa

    with pa.input_stream(str(path), compression="detect") as packed, io.BufferedReader(packed) as file:
        text = io.TextIOWrapper(file, encoding, newline="")
        num_quotes, end = 0, ""
        while block := text.read(_BLOCK):
            num_quotes, end = num_quotes + block.count('"'), (end + block)[-3:]
        if not num_quotes % 2 or end.rstrip("\r\n").endswith('"'):  # a quote within a cell is one alone, too
            return
    with _csv_reader(path, encoding, delimiter, {}) as first:
        types = dict.fromkeys(first.schema.names, pa.string())
    with _csv_reader(path, encoding, delimiter, types) as reader:
        last = ""
        for batch in reader:
            last = batch.columns[-1][-1].as_py() or "" if batch.num_rows else last
    if "\n" in last:
        raise SourceError(
            f"{path}: the quote before {last[:40]!r} is never closed, so that {last.count(chr(10))} lines "
            "would be one cell; close it, or write a quote that belongs to a cell twice"
        )


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    """Return the type to parse a column of a type as: rows hold times as they are written."""
    import pyarrow as pa

    return pa.string() if pa.types.is_timestamp(kind) else kind


def _csv_reader(path: pathlib.Path, encoding: str, delimiter: str, types: Mapping[str, pa.DataType]) -> Any:
    from pyarrow import csv as arrow_csv

    return arrow_csv.open_csv(
        str(path),
        read_options=arrow_csv.ReadOptions(encoding=encoding, use_threads=bool(types)),  # without, no reading ahead
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=arrow_csv.ConvertOptions(
            column_types=types,
            include_columns=[*types],
            null_values=[""],
            true_values=_TRUTHS[:3],
            false_values=_TRUTHS[3:],
            strings_can_be_null=True,
        ),
    )


def _encoding_of(head: bytes) -> str:
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"


def _wrong_encoding(path: pathlib.Path | str, encoding: str) -> SourceError:
    return SourceError(
        f"{path} is not text in {encoding}; name its encoding with encoding=, as in TableWriter(encoding='cp1252'), "
        "which Excel writes in Western Europe; in Korea it is cp949, in Japan cp932"
    )


def _delimiter_of(path: pathlib.Path, head: str, *, is_cut: bool) -> str:
    """Return what separates the cells of CSV: what its name says, unless only another one gives rows of one length.

    Args:
        path: the file.
        head: text that it begins with.
        is_cut: whether more follows.
    """
    usual = "\t" if ".tsv" in path.suffixes[-2:] else ","
    fitting = []
    for delimiter in dict.fromkeys([usual, *_DELIMITERS]):
        rows = [row for row in csv.reader(io.StringIO(head, newline=""), delimiter=delimiter) if row]
        if delimiter == usual and (not rows or len(rows[0]) > 1):
            return usual
        widths = {len(row) for row in (rows[:-1] if is_cut else rows)}
        if len(widths) == 1 and widths != {1}:
            fitting.append(delimiter)
    if len(fitting) > 1:
        raise SourceError(
            f"{path}: its cells may end at {' or at '.join(_DELIMITERS[one] for one in fitting)}; say which with "
            f"delimiter=, as in TableWriter(delimiter={fitting[0]!r})"
        )
    return fitting[0] if fitting else usual


# ---- JSON Lines


class _JsonColumn:
    """What a column of JSON Lines holds so far."""

    def __init__(self) -> None:
        self._num_filled = 0
        self._types: set[type] = set()
        self._largest = 0
        self._lists: Any = None
        self._items: set[type] = set()  # types in the lists, at any depth

    def add(self, cells: list[Any]) -> None:
        import pyarrow as pa

        self._num_filled += sum(cell is not None for cell in cells)
        self._types |= {*map(type, cells)} - {type(None)}
        if int in self._types:
            self._largest = max(self._largest, *(abs(cell) for cell in cells if type(cell) is int), 0)
        if self._types == {list}:
            items = [*_flat(cell for cell in cells if cell is not None)]
            self._items |= {*map(type, items)}
            self._largest = max(self._largest, *(abs(item) for item in items if type(item) is int), 0)
            try:
                found = pa.schema({"": pa.infer_type(cells)})
                self._lists = pa.unify_schemas([self._lists or found, found], promote_options="permissive")
            except (pa.ArrowException, OverflowError):
                self._types.add(dict)  # then JSON holds it, and nothing else

    def field(self, name: str, num_rows: int) -> pa.Field:
        import pyarrow as pa

        return pa.field(name, self._type(), nullable=self._num_filled < num_rows)

    def _type(self) -> pa.DataType:
        import pyarrow as pa

        if not self._types:
            return pa.json_()
        if self._types == {list}:
            is_one = len(self._items) <= 1 and type(None) not in self._items
            is_exact = self._largest <= (_EXACT if float in self._items else _LONGEST)
            return self._lists.types[0] if (is_one or self._items == {int, float}) and is_exact else pa.json_()
        plain: dict[str, set[type]] = {
            "bool": {bool},
            "string": {str},
            "int64": {int},
            "float64": {int, float},
        }
        kind = next((kind for kind, types in plain.items() if self._types <= types), "json")
        if self._largest > (_EXACT if kind == "float64" else _LONGEST):
            kind = "json"
        return pa.json_() if kind == "json" else pa.type_for_alias(kind)


def _flat(cells: Iterable[Any]) -> Iterator[Any]:
    for cell in cells:
        if type(cell) is list:
            yield from _flat(cell)
        else:
            yield cell


_EXACT, _LONGEST = 2**53, 2**63 - 1  # integers that float64 and int64 hold


def _json_columns(path: pathlib.Path, options: TextOptions) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Yield runs of rows; of a column that a row lacks, its cell is None."""
    import pyarrow as pa

    encoding = ""
    try:
        with pa.input_stream(str(path), compression="detect") as packed, io.BufferedReader(packed) as file:
            encoding = options.encoding or _encoding_of(file.peek())
            lines: Iterable[Any] = file if encoding == "utf-8" else io.TextIOWrapper(file, encoding)
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            while batch := list(itertools.islice(numbered, BATCH_ROWS)):
                rows = [_object_of_line(path, number, line) for number, line in batch]
                names = dict.fromkeys(name for row in rows for name in row)
                if options.columns is not None:
                    names = {name: None for name in names if name in options.columns}
                yield len(rows), {name: [row.get(name) for row in rows] for name in names}
    except UnicodeError as error:
        raise _wrong_encoding(path, encoding) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read as a table: {error}; write the file again") from error


def _object_of_line(path: pathlib.Path, number: int, line: bytes | str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise _wrong_encoding(f"{path} line {number}", "utf-8") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} line {number} is not valid JSON: {error}; want an object on each line") from error
    if "\\ud" in str(line).lower() and not _is_unicode(row):
        raise SourceError(
            f"{path} line {number} holds half of a surrogate pair, which is no character; write whole characters"
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
