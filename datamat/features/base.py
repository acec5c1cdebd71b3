"""The interface of feature types, and the checks that they share."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, final, overload

import numpy as np

from datamat.codecs import probe
from datamat.errors import InputError, MissingDependencyError, SchemaError, count_of
from datamat.features.statistics import FieldStatistics
from datamat.values import frozen

__all__ = [
    "DTYPE_OF_KIND",
    "KIND_OF_DTYPE",
    "ArrowType",
    "Column",
    "ColumnBlock",
    "Feature",
    "Kind",
    "RaggedColumn",
    "Shape",
    "as_bfloat16",
    "bytes_array",
    "cut",
    "dtype_of",
    "holds_numbers",
    "is_block_of_kind",
    "is_number_dtype",
    "is_of_kind",
    "join_blocks",
    "joined_spans",
    "num_bytes_of",
    "ragged",
    "rows_of",
    "values_of",
]

Column: TypeAlias = bytes | Sequence[bytes] | np.ndarray
"""One column of one record: one bytes value, a list of them, or a 1-D int64 or float32 array."""

Kind: TypeAlias = Literal["bytes", "bytes_list", "int64", "float32"]
"""What a column holds in each record: one bytes value, any number of them, int64 numbers or float32 numbers."""
Shape: TypeAlias = tuple[int | None, ...]

_LONG_SPAN_BYTES = 256
"""Bytes of a span on average from which on copying slices is faster than gathering numbers by their places."""
_PACKAGE = __name__.partition(".")[0]
_PILLOW_MODES = {"L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
"""Modes whose arrays hold the pixels; palettes, truth values and other colour spaces become RGB."""
_ORIENTATION = 0x0112  # the tag of EXIF

# ---------------------------------------------------------------- dtypes of values
#
# dtype             a value is             NumPy batch        torch batch         TensorFlow
# numpy's name      an array or number     that dtype         that dtype          that dtype
# bfloat16          of `ml_dtypes`         ml_dtypes'         torch.bfloat16      tf.bfloat16
# datetime64[us]    numpy.datetime64       that dtype         int64               int64
# string            str                    list               list                string
# bytes             bytes                  list               list                string
# object            what JSON can hold     list               list                string: its JSON

_NO_NUMBERS = {"string", "bytes", "object"}


def holds_numbers(dtype: str) -> bool:
    """Return True if values of a dtype, as `Feature.value_type` names it, are numbers or arrays of them."""
    return dtype not in _NO_NUMBERS


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the numpy dtype with a name; "bfloat16" is that of the package ml_dtypes, which has to be imported.

    Raises:
        MissingDependencyError: `ml_dtypes` is not installed.
        TypeError: numpy has no such dtype.

    Example:
        >>> dtype_of("uint16").itemsize
        2
    """
    return _bfloat16() if name == "bfloat16" else np.dtype(name)


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "the dtype bfloat16 needs the package ml_dtypes; install it with: pip install ml_dtypes"
        ) from error
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


# How each dtype is stored, always exactly: int64 holds every smaller integer, float32 every float16; dtypes that
# neither holds are stored as little-endian bytes, which `tf.io.decode_raw` reads.
_REAL_KINDS: dict[str, Kind] = {
    **dict.fromkeys(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"], "int64"),
    **dict.fromkeys(["float16", "float32"], "float32"),
    **dict.fromkeys(["float64", "uint64", "bfloat16"], "bytes"),
}
KIND_OF_DTYPE: dict[str, Kind] = {**_REAL_KINDS, "complex64": "bytes", "complex128": "bytes"}
DTYPE_OF_KIND: dict[Kind, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
_TIMES: dict[str, Kind] = {"timestamp[us]": "int64", "timestamp[us, tz=UTC]": "int64"}
_BYTES: dict[str, Kind] = {"binary": "bytes", "string": "bytes", "json": "bytes"}
_ARROW_KINDS: dict[str, Kind] = {**_REAL_KINDS, **_TIMES, **_BYTES}
_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64", "extension<arrow.json>": "json"}
"""Types that pyarrow calls by another name."""
_VALUE_DTYPES = {"binary": "bytes", "json": "object", **dict.fromkeys(_TIMES, "datetime64[us]")}


@frozen()
class ArrowType:
    """The Arrow type of a stored column, from which every format and client derives what the column is to it.

    pyarrow itself is not needed to know it: `datamat.formats.arrow` makes its types of these.

    Args:
        dtype: name of a numpy dtype, "bfloat16", "binary", "string", "json" (Arrow's extension type of that name),
            "timestamp[us]" or "timestamp[us, tz=UTC]".
        sizes: sizes of the lists around it, outermost first; only that one may be None, for lists of any length.
        is_raw: whether a record holds the numbers as little-endian bytes, where it could hold them as numbers.
        is_nullable: whether a record may hold no value: null in Arrow, an empty list in a record.

    Raises:
        SchemaError: there is no such type.

    Example:
        >>> ArrowType("float32", (None, 4)).kind
        'float32'
        >>> ArrowType("string").value_type
        ('string', ())
    """

    dtype: str
    sizes: Shape = ()
    is_raw: bool = False
    is_nullable: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _ARROW_KINDS:
            known = join_names(_ARROW_KINDS, len(_ARROW_KINDS))
            raise SchemaError(f"ArrowType: dtype is {self.dtype!r}; want one of {known}")
        if None in self.sizes[1:]:
            raise SchemaError(f"ArrowType: sizes is {self.sizes!r}; want None in the first place alone")

    @classmethod
    def of(cls, found: Any) -> ArrowType:
        """Return a type that pyarrow has as well: of numbers, times, text or bytes, and of lists of these.

        Raises:
            SchemaError: it is another type.

        Example:
            >>> import pyarrow as pa
            >>> ArrowType.of(pa.list_(pa.float32(), 4))
            ArrowType(dtype='float32', sizes=(4,), is_raw=False, is_nullable=False)
        """
        if isinstance(found, cls):
            return found
        if not type(found).__module__.startswith("pyarrow"):
            raise SchemaError(f"its type is {found!r}; want an ArrowType, or a type of pyarrow")
        sizes: list[int | None] = []
        while hasattr(found, "value_field"):
            sizes.append(getattr(found, "list_size", None))
            found = found.value_type
        name = str(found).removeprefix("large_")
        return cls(_ARROW_NAMES.get(name, name), tuple(sizes))

    @property
    def holds_numbers(self) -> bool:
        """Whether it is one of numbers, truth values or times, however a record holds them."""
        return self.dtype not in _BYTES

    @property
    def kind(self) -> Kind:
        """What the column holds in each record."""
        if not self.holds_numbers:
            return "bytes_list" if self.sizes or self.is_nullable else "bytes"
        kind = "bytes" if self.is_raw else _ARROW_KINDS[self.dtype]
        # What may be missing, and may be empty as well, is a list of its bytes.
        return "bytes_list" if self.is_nullable and (kind == "bytes" or None in self.sizes) else kind

    @property
    def raw_dtype(self) -> np.dtype[Any]:
        """The dtype of its numbers where they are bytes."""
        return dtype_of("int64" if self.dtype in _TIMES else self.dtype).newbyteorder("<")

    @property
    def width(self) -> int:
        """How many numbers the lists of fixed size hold."""
        return math.prod(size for size in self.sizes if size is not None)

    @property
    def value_type(self) -> tuple[str, Shape]:
        """Dtype and shape of its values, as `Feature.value_type` has them."""
        return _VALUE_DTYPES.get(self.dtype, self.dtype), self.sizes


def as_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers of which a float32 array holds each exactly: a cast would change the bits of some NaN."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(_bfloat16())


def is_number_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if an array of a dtype holds numbers, truth values or times; ml_dtypes' floats are of kind "V"."""
    return dtype.kind in "biufcmM" or (dtype.kind == "V" and dtype.type is not np.void)


@frozen(slots=False, eq=False)
class RaggedColumn:
    """One column of n records that hold any number of values each: a sequence of n arrays, all in one.

    Attributes:
        values: (total,), the numbers of all records, one record after the other, or an object array of bytes;
            (total, ...) in blocks to be encoded.
        lengths: int64 (n,), how many of the values each record holds.

    Example:
        >>> column = RaggedColumn(np.array([1, 2, 3]), np.array([2, 0, 1]))
        >>> len(column), column[0], column[1:].lengths
        (3, array([1, 2]), array([0, 1]))
    """

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, place: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, place: slice) -> RaggedColumn: ...

    def __getitem__(self, place: int | slice) -> np.ndarray | RaggedColumn:
        """Return the values of one record, or of the records of a slice with step 1, as a view."""
        if isinstance(place, slice):
            start, stop, _ = place.indices(len(self))
            stop = max(start, stop)
            return RaggedColumn(self.values[self._bounds[start] : self._bounds[stop]], self.lengths[start:stop])
        place = range(len(self))[place]
        found: np.ndarray = self.values[self._bounds[place] : self._bounds[place + 1]]
        return found

    @functools.cached_property
    def _bounds(self) -> np.ndarray:
        """int64 (n + 1,): where each record begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def matrix(self, width: int) -> np.ndarray:
        """Return the values (n, width); raise `SchemaError` where a record holds another number of them."""
        wrong = np.flatnonzero(self.lengths != width)
        if len(wrong):
            raise SchemaError(f"a record holds {self.lengths[wrong[0]]} values, not {width}")
        return self.values.reshape(len(self.lengths), width)

    def rows(self) -> list[np.ndarray]:
        """Return the values of each record, as views."""
        return cut(self.values, self.lengths)

    def take(self, order: np.ndarray) -> RaggedColumn:
        """Return the records at some places, in their order."""
        lengths = self.lengths[order]
        starts = (np.cumsum(self.lengths) - self.lengths)[order]
        if len(lengths) and (self.lengths == self.lengths[0]).all():
            width = int(self.lengths[0])
            return RaggedColumn(self.values.reshape(-1, width)[order].reshape(-1) if width else self.values, lengths)
        return RaggedColumn(joined_spans(self.values, starts, lengths), lengths)


def joined_spans(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return spans of values (total,), one after the other, given where each begins and how many it holds."""
    if len(lengths) and lengths.sum() * values.itemsize >= _LONG_SPAN_BYTES * len(lengths):
        bounds = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return np.concatenate([values[one:other] for one, other in bounds])
    if len(lengths) and (lengths == lengths[0]).all():
        places = (starts[:, None] + np.arange(lengths[0])).reshape(-1)
    else:
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    found: np.ndarray = values[places]
    return found


def cut(data: Any, lengths: np.ndarray) -> list[Any]:
    """Return slices of bytes or items, one after the other, given how many each holds."""
    return [data[start:stop] for start, stop in itertools.pairwise([0, *np.cumsum(lengths).tolist()])]


ColumnBlock: TypeAlias = RaggedColumn | Sequence[bytes] | Sequence[str]
"""One encoded column of n records: numbers or lists of bytes, or one bytes value (or its text) for each record."""


def join_blocks(blocks: Sequence[Mapping[str, ColumnBlock]], order: np.ndarray | None = None) -> dict[str, ColumnBlock]:
    """Return the columns of all records of several blocks.

    Args:
        blocks: columns by name; all blocks have the same names.
        order: int64 (n,), the place of each record of the result among those of the blocks; None for their own order.
    """
    return {name: _join_columns([block[name] for block in blocks], order) for name in blocks[0]}


def _join_columns(pieces: Sequence[ColumnBlock], order: np.ndarray | None) -> ColumnBlock:
    columns = [piece for piece in pieces if isinstance(piece, RaggedColumn)]
    if columns:
        found = columns[0]
        if len(columns) > 1:
            values, lengths = ([getattr(column, part) for column in columns] for part in ("values", "lengths"))
            found = RaggedColumn(np.concatenate(values), np.concatenate(lengths))
        return found if order is None else found.take(order)
    joined: list[Any] = [value for piece in pieces for value in piece]  # type: ignore[union-attr]
    return joined if order is None else [joined[place] for place in order.tolist()]


Stored: TypeAlias = Column | dict[str, Column]
"""What a feature stores of a value: its column, or several by what follows the name of the field."""


class Feature(abc.ABC):
    """One field of a sample: what it is, how it is stored, and how each format and reader sees it.

    A feature type has a `type`, `encode` and `decode`. Every other method has a default that follows from those three;
    override it if there is a better answer. Methods are called from several threads and processes.

    Most types store one column, and give and take that: the `Column` of a value, or the `ColumnBlock` of n values. A
    type that stores several gives and takes a dict of them, by what follows the name of the field in theirs: `""` for
    the column with that very name, `"/shape"`.

    A feature does not know the name of its field. `Features` puts it into each `SchemaError` and `InputError`: in the
    place of a leading "the field", or before the message.

    A feature is an immutable value: it equals others with the same declaration, and can be hashed and pickled. A frozen
    dataclass does all that, and `manifest.json` keeps its fields. `load` finds the class by `type_name`, through the
    entry-point group `datamat.features` or `register_feature`.

    Attributes:
        type_name: name of the type in `manifest.json` and of its entry point; by default the name of the class.
        takes_none: whether None is a value, rather than a sign that a file did not decode.
        unsaid: arguments that the manifest omits if they have their default: those that a later version of the class
            added, so that datasets written before count as unchanged.

    Example:
        >>> import dataclasses
        >>> @frozen(slots=False)
        ... class Celsius(Feature):
        ...     type = ArrowType("int64")
        ...
        ...     def value_type(self):
        ...         return "float64", ()
        ...
        ...     def encode(self, value):
        ...         return np.array([round(value * 100)])
        ...
        ...     def decode(self, column):
        ...         return column[0] / 100
        >>> Celsius().encode(36.6)
        array([3660])
        >>> Celsius().declared()
        'Celsius float64'
    """

    type_name: ClassVar[str] = ""
    takes_none: ClassVar[bool] = False
    unsaid: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "type_name" not in vars(cls):
            cls.type_name = cls.__name__
        # A class with an `encode` of its own leaves behind how that which it is derived from encodes blocks.
        for of_block, of_one in (("encode_many", {"encode"}), ("decode_many", {"decode", "decode_into"})):
            nearest = next(kind for kind in cls.__mro__ if vars(kind).keys() & {of_block, *of_one})
            if of_block not in vars(nearest):
                setattr(cls, of_block, getattr(Feature, of_block))

    # ---------------------------------------------------------------- required

    @property
    @abc.abstractmethod
    def type(self) -> Any:
        """The Arrow type of the column, or a dict with that of each: an `ArrowType`, or one of pyarrow."""

    @abc.abstractmethod
    def encode(self, value: Any) -> Stored:
        """Return the column of a value: `bytes`, a list of them, or a 1-D int64 or float32 array: `ArrowType.kind`.

        Equal values must give equal columns, in any process and at any time.

        Raises:
            SchemaError: the value does not match the declaration.
        """

    @abc.abstractmethod
    def decode(self, stored: Any) -> Any:
        """Return the value that `encode` was given: an array, a numpy number, or what the dtype stands for.

        Args:
            stored: what `encode` returned; but a bytes column may be a list of its one value.

        Raises:
            InputError: the bytes do not decode.
        """

    # ---------------------------------------------------------------- declaration

    @final
    def columns(self, name: str) -> dict[str, ArrowType]:
        """Return the Arrow type of each column of a field, by the name of the column."""
        return {column: ArrowType.of(one) for column, one in by_column(name, self.type).items()}

    def value_type(self) -> tuple[str, Shape]:
        """Return dtype and shape of decoded values; by default those of the first column.

        The dtype is the name of a numpy dtype, "bfloat16", "string" for str, "bytes" for bytes, or "object" for what
        JSON can hold: dicts, lists, str, numbers, booleans and None. The shape is () for a single value, and holds None
        for each size that varies.
        """
        return next(iter(self.columns("").values())).value_type

    def declared(self) -> str:
        """Return the declaration as messages show it: `uint8 (360, 480, 3)`."""
        dtype, shape = self.value_type()
        return f"{self.type_name} {dtype}" + (f" {shape_text(shape)}" if shape else "")

    @final
    def to_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values: the name of the type, and its arguments."""
        package = type(self).__module__.partition(".")[0]
        # The module is for the error where the class is missing.
        origin = {} if package == _PACKAGE else {"module": type(self).__module__}
        return {"type": self.type_name, **origin, **self.arguments()}

    def arguments(self) -> dict[str, Any]:
        """Return JSON values from which `from_arguments` builds an equal feature; by default the dataclass's fields."""
        if not dataclasses.is_dataclass(self):
            raise SchemaError(
                f"{type(self).__qualname__} is not a dataclass; make it one, or write arguments and from_arguments"
            )
        found = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {
            name: _plain(value)
            for name, (value, default) in found.items()
            if name not in self.unsaid or value != default
        }

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Feature:
        """Return the feature with these arguments; lists, which JSON has in place of tuples, become tuples."""
        return cls(**{name: _tuples(value) for name, value in arguments.items()})

    def packages(self, *, drawn: bool) -> frozenset[str]:
        """Return the top-level modules of the packages that decide the bytes of the columns.

        A new version of one of them has shards rebuilt. The package that the class comes from counts in any case.

        Args:
            drawn: whether to answer for copies that went through a transform, which are always decoded and encoded.
        """
        del drawn
        return frozenset()

    def parts(self) -> tuple[Feature, ...]:
        """Return the features that this one is made of; () for a type that stands alone."""
        return ()

    # ---------------------------------------------------------------- values

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in the order of their ids; () if classes have no names, None if values are not ids."""
        return None

    def prepare(self, value: Any) -> Any:
        """Return `value` as transforms expect it: decoded, if `read` returned encoded bytes."""
        return value

    def encoded_value(self, stored: Any) -> Any:
        """Return a value that `encode` stores as these very columns, such as the bytes of an encoded file."""
        return self.decode(stored)

    def encode_many(self, values: Any) -> Any:
        """Return the columns of n values at once.

        The default encodes one value after the other. An override is called where a class has it at or below the class
        that defines `encode`, and gives the same columns as `encode`.

        Args:
            values: an array (n, ...), a sequence of n values, or a `RaggedColumn` of values (total, ...).

        Returns:
            For a bytes column a list of n bytes; for others an array (n,) or (n, k), or a `RaggedColumn`.

        Raises:
            SchemaError: a value does not match the declaration.
        """
        rows: list[Any] = [
            self.encode(value) for value in (values.rows() if isinstance(values, RaggedColumn) else values)
        ]
        types = self.columns("")
        if not isinstance(self.type, dict):
            return gathered(rows, types[""].kind)
        return {part: gathered([row[part] for row in rows], one.kind) for part, one in types.items()}

    def encodes_many(self) -> bool:
        """Return True if `encode_many` was overridden, and not left behind by a subclass with another `encode`."""
        return type(self).encode_many is not Feature.encode_many

    def decode_into(self, stored: Any, out: np.ndarray | None, *, are_intact: bool = False) -> Any:
        """Return the value that `decode` returns.

        Args:
            stored: what `decode` takes.
            out: memory to decode into, if that saves a copy; it may be overwritten in any case.
            are_intact: whether a checksum has shown that the columns are what `encode` returned.
        """
        del out, are_intact
        return self.decode(stored)

    def is_ragged(self) -> bool:
        """Return True if a batch holds the values as a list, even where they could be one array."""
        dtype, shape = self.value_type()
        return None in shape or not holds_numbers(dtype)

    def decode_many(self, stored: Any) -> np.ndarray | list[Any] | None:
        """Return what `decode` does, for n records at once; None for a type whose values are decoded one by one.

        Readers call it for small records where a class overrides it at or below the class that defines `decode`.

        Args:
            stored: the column of n records, or each of several: n bytes (or str), or a `RaggedColumn`.

        Returns:
            An array (n, ...) where all values have one shape by declaration, else a list of n values.
        """
        del stored
        return None

    def decodes_many(self) -> bool:
        """Return True if `decode_many` was overridden, and not left behind by a subclass with another `decode`."""
        return type(self).decode_many is not Feature.decode_many

    # ---------------------------------------------------------------- statistics

    def observe(self, stored: Any) -> FieldStatistics:
        """Return what statistics keep of n values, from their columns; {} by default.

        A run calls it for the records that it writes, some hundred at a time, and adds up what it returns: so each
        number must depend on single values, and not on how many come at once. It should be cheap: the header of a file,
        not its content. `manifest.json` has the result; see `Manifest.statistics`.

        Args:
            stored: what `decode_many` takes.

        Returns:
            By the name of each statistic: `Counts` of class ids, `Numbers`, or an int that is added up. Names that
            differ in a number alone, `size[0]`, `size[1]`, are shown as one statistic of several numbers.

        Example:
            >>> from datamat.features import Numbers
            >>> class Celsius(Feature):   # doctest: +SKIP
            ...     def observe(self, column):
            ...         return {"degrees": Numbers.of(column.values / 100)}
        """
        del stored
        return {}

    def observe_value(self, value: Any) -> FieldStatistics:
        """Return what statistics keep of one value whose columns show it only when decoded, as pixels; {} by default.

        A run calls it with the arrays that it encodes, and not for a file that is stored as it was read: to decode that
        would cost more than to store it.

        Args:
            value: what `encode` was given.

        Returns:
            As `observe` does, under other names.
        """
        del value
        return {}


class DictFields(dict[str, Any]):
    """What is declared of the fields of a dict, which nobody changes: all but `key`, which only a whole sample has."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        declared = getattr(fields, "as_declared", fields)  # of `Features`
        super().__init__({name: feature for name, feature in declared.items() if name != "key"})

    def __hash__(self) -> int:  # type: ignore[override]  # which a dict has not, as others change
        return hash(tuple(self))


to_json_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode
"""Returns the one text that stands for a JSON value: keys in order, no spaces, no NaN."""


def gathered(values: Sequence[Column], kind: Kind) -> RaggedColumn | list[Any]:
    """Return the values of one column of n records as a column of a block."""
    if kind == "bytes":
        return list(values)
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    if kind == "bytes_list":
        return RaggedColumn(bytes_array([item for value in values for item in value]), lengths)
    empty = np.empty(0, np.int64 if kind == "int64" else np.float32)
    return RaggedColumn(np.concatenate([empty, *values]), lengths)


def ragged(column: Any) -> ColumnBlock:
    """Return a column of a block as `observe` has it: arrays (n,) and (n, k) as a `RaggedColumn`."""
    if not isinstance(column, np.ndarray) or column.dtype == object:
        found: ColumnBlock = column
        return found
    return RaggedColumn(column.reshape(-1), np.full(len(column), math.prod(column.shape[1:]), np.int64))


def by_column(name: str, stored: Any) -> dict[str, Any]:
    """Return what a feature has of its column, or of each of several, by the names of these."""
    return {name + part: one for part, one in stored.items()} if isinstance(stored, dict) else {name: stored}


def by_part(stored: Any) -> dict[str, Any]:
    """Return what a feature has of its column, or of each of several, by what follows the name of the field."""
    return stored if isinstance(stored, dict) else {"": stored}


def whole(parts: dict[str, Any]) -> Any:
    """Return what `by_part` was given."""
    return parts[""] if len(parts) == 1 and "" in parts else parts


def put_name(error: SchemaError | InputError, name: str) -> None:
    """Put the name of a field into the message of an error that its feature has raised."""
    text, place = str(error), f"field {name!r}"
    error.args = (text.replace(_FIELD, place, 1) if text.startswith(_FIELD) else f"{place}: {text}",)


def named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of a feature returns; its errors have the name of the field."""
    try:
        return call(*args)
    except (InputError, SchemaError) as error:
        put_name(error, name)
        raise


_FIELD = "the field"
"""Stands for the name of the field where messages of features begin with it."""


def is_of_kind(value: Any, kind: Kind) -> bool:
    """Return True if a value is a column of one record of some kind."""
    if kind == "bytes":
        return isinstance(value, bytes)
    if kind == "bytes_list":
        return isinstance(value, list) and all(isinstance(item, bytes) for item in value)
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == DTYPE_OF_KIND[kind]


def is_block_of_kind(values: Any, kind: Kind) -> bool:
    """Return True if values are a column of n records of some kind: of numbers also an array (n,) or (n, k)."""
    if kind == "bytes":
        return isinstance(values, Sequence) and set(map(type, values)) <= {bytes}
    if kind == "bytes_list":
        return isinstance(values, RaggedColumn) and set(map(type, values.values.tolist())) <= {bytes}
    numbers, most = (values.values, 1) if isinstance(values, RaggedColumn) else (values, 2)
    return isinstance(numbers, np.ndarray) and numbers.dtype == DTYPE_OF_KIND[kind] and 0 < numbers.ndim <= most


def rows_of(columns: Mapping[str, Any]) -> Iterator[dict[str, Column]]:
    """Yield each row of a block as a record."""
    for row in zip(*map(values_of, columns.values()), strict=True):
        yield dict(zip(columns, row, strict=True))


def values_of(values: np.ndarray | ColumnBlock) -> Sequence[Any]:
    """Return the value of each row in a column of a block, as records hold it."""
    if isinstance(values, RaggedColumn):
        return [row.tolist() for row in values.rows()] if values.values.dtype == object else values.rows()
    if isinstance(values, np.ndarray):
        return list(values[:, None] if values.ndim == 1 else values)
    return values


def num_bytes_of(column: Column) -> int:
    """Return the bytes that the values of a column of one record take."""
    if isinstance(column, np.ndarray):
        return column.nbytes
    return len(column) if isinstance(column, bytes) else sum(map(len, column))


def bytes_array(values: Sequence[Any]) -> np.ndarray:
    """Return bytes as an object array (n,), which keeps the zeros at their ends."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def checked_shape(shape: Any, where: str) -> Shape:
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except TypeError as error:
        raise SchemaError(f"{where}: shape is {shape!r}; want a tuple of sizes, None where one varies") from error
    if any(size is not None and size < 0 for size in sizes):
        raise SchemaError(f"{where}: shape is {shape!r}; sizes are not negative")
    return sizes


def checked_names(names: Any, where: str) -> tuple[str, ...]:
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise SchemaError(f"{where}: names is {names!r}; want a sequence of str")
    if len(set(found)) != len(found):
        raise SchemaError(f"{where}: a class name appears twice in {join_names(found)}; give each class its own")
    return found


def checked_dtype(dtype: Any, where: str, dtypes: Iterable[str] = KIND_OF_DTYPE) -> str:
    try:
        name = (dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)).name
    except TypeError:
        name = ""
    if name not in dtypes:
        raise SchemaError(f"{where}: dtype is {dtype!r}; want one of {join_names(dtypes)}")
    return str(name)


def set_positive(feature: Feature, names: Iterable[str]) -> None:
    """Check options of a feature that are positive integers, or None, and store them as int."""
    for name in names:
        value = getattr(feature, name)
        if value is not None:
            object.__setattr__(feature, name, checked_int(value, f"{type(feature).__name__}: {name}"))
            if getattr(feature, name) < 1:
                raise SchemaError(f"{type(feature).__name__}: {name} is {value}; want a positive number, or None")


def checked_int(value: Any, where: str) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise SchemaError(f"{where} is {value!r}; want an int") from error


def as_array(value: Any, *, are_ids: bool = False, name: str = "") -> Any:
    """Return a Pillow image, or a tensor of torch or TensorFlow, as a numpy array, and any other value unchanged.

    Args:
        value: the value.
        are_ids: whether the pixels are ids of classes: then those of a palette, or truth values, are these ids.
        name: name of the field, for messages.

    Raises:
        SchemaError: it is a Pillow image of inks, whose colours depend on a profile, or an array with masked values.
    """
    if type(value) is not np.ndarray and hasattr(value, "filled") and hasattr(value, "mask"):  # of `numpy.ma`
        if count := int(np.sum(value.mask)):
            raise SchemaError(
                f"{f'field {name!r}: ' if name else ''}{count} of {np.size(value)} values of an array are masked; fill "
                "them, as in array.filled(0)"
            )
        return np.asarray(value)
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        return _array_of_pillow(value, are_ids=are_ids)
    if hasattr(value, "__array__") and not isinstance(value, (np.ndarray, np.generic)):
        array = _array_of_torch(value) if hasattr(value, "resolve_conj") else np.asarray(value)
        return array[()]  # a tensor without dimensions is a scalar
    return value


def stored_size(value: Any) -> tuple[tuple[int, int], int] | None:
    """Return height and width of a picture as its file has it, and its EXIF orientation, 1 to 8.

    Args:
        value: a file, a picture of Pillow, or pixels; None is returned for anything else.
    """
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        return (value.height, value.width), value.getexif().get(_ORIENTATION, 1)
    if isinstance(value, bytes):
        with contextlib.suppress(InputError):  # which names itself when the file is encoded
            info = probe(value)
            return (info.height, info.width), info.orientation
    elif isinstance(value, np.ndarray) and value.ndim > 1:
        return (value.shape[0], value.shape[1]), 1
    return None


def _array_of_pillow(picture: Any, *, are_ids: bool) -> np.ndarray:
    """Return the pixels that the file of a picture would have: upright, and with its alpha."""
    if picture.mode == "CMYK":
        raise SchemaError(
            "a picture of Pillow is of CMYK inks, whose colours depend on a profile; convert it, as in "
            "picture.convert('RGB')"
        )
    if picture.getexif().get(_ORIENTATION, 1) != 1:
        picture = importlib.import_module("PIL.ImageOps").exif_transpose(picture)
    if are_ids and picture.mode in {"P", "1"}:
        return np.asarray(picture, np.uint8)
    if picture.mode in _PILLOW_MODES:
        return np.asarray(picture)
    return np.asarray(picture.convert("RGBA" if picture.mode == "PA" or "transparency" in picture.info else "RGB"))


def _array_of_torch(tensor: Any) -> np.ndarray:
    """Return a tensor as an array, also one that torch does not turn into one: of bfloat16, sparse, with gradients."""
    tensor = tensor.detach().cpu()
    tensor = (tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()).resolve_conj().resolve_neg()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.view(sys.modules["torch"].int16)).view(_bfloat16())
    return np.asarray(tensor)


def array_of(feature: Feature, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise mismatch(feature, f"a {type(value).__name__}", "give a numpy array")
    return value


def check_array(
    feature: Feature, dtype: Any, shape: tuple[int, ...], wanted: Shape, wanted_dtype: np.dtype[Any]
) -> None:
    same_dtype = np.dtype(dtype).newbyteorder("=") == wanted_dtype  # either byte order holds the same numbers
    same_shape = len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))
    if same_dtype and same_shape:
        return
    found = f"{np.dtype(dtype).name} {shape_text(shape)}"
    raise mismatch(
        feature, found, "cast or reshape it where it is made, in read or a transform, or change the declaration"
    )


def one_bytes(column: Column) -> bytes:
    if isinstance(column, bytes):
        return column
    if len(column) != 1 or not isinstance(column[0], bytes):
        raise SchemaError(f"its column in the record holds {count_of(len(column), 'value')}; want one bytes value")
    return column[0]


def mismatch(feature: Feature, found: str, remedy: str) -> SchemaError:
    return SchemaError(f"{_FIELD} is declared {feature.declared()} but the sample holds {found}; {remedy}")


def shape_text(shape: Sequence[int | None]) -> str:
    return (
        "(" + ", ".join("?" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
    )


def join_names(values: Any, most: int = 12) -> str:
    """Return a list of names for a message, with the first few if there are many."""
    names = [str(value) for value in values]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
