"""The interface of feature types, and the checks that they share."""

from __future__ import annotations

import abc
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

Column: TypeAlias = bytes | Sequence[bytes] | np.ndarray
"""One column of one record: one bytes value, a list of them, or a 1-D int64 or float32 array."""

Kind: TypeAlias = Literal["bytes", "bytes_list", "int64", "float32"]
"""The kind of a column in each record: one bytes value, any number of them, int64 numbers or float32 numbers."""
Shape: TypeAlias = tuple[int | None, ...]

_LONG_SPAN_BYTES = 256
"""Average bytes of a span above which copying slices is faster than gathering numbers by index."""
_PACKAGE = __name__.partition(".")[0]
_PILLOW_MODES = {"L", "LA", "RGB", "RGBA", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"}
"""Modes whose arrays are the pixels; palettes, 1-bit modes and other colour spaces become RGB."""
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
    """Return True if values of a dtype, as in `Feature.value_type`, are numbers or arrays of numbers."""
    return dtype not in _NO_NUMBERS


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a name; "bfloat16" is that of the package ml_dtypes.

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


# Storage of each dtype, always exact: int64 holds every smaller integer, float32 every float16; other dtypes are stored
# as little-endian bytes, which `tf.io.decode_raw` reads.
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
"""Types with another name in pyarrow."""
_VALUE_DTYPES = {"binary": "bytes", "json": "object", **dict.fromkeys(_TIMES, "datetime64[us]")}


@frozen()
class ArrowType:
    """The Arrow type of a stored column, from which formats and clients derive their own types.

    It does not need pyarrow: `datamat.formats.arrow` converts it to pyarrow's types.

    Args:
        dtype: name of a numpy dtype, "bfloat16", "binary", "string", "json" (Arrow's extension type of that name),
            "timestamp[us]" or "timestamp[us, tz=UTC]".
        sizes: sizes of the enclosing lists, outermost first; only the first may be None, for lists of any length.
        is_raw: whether a record holds numbers as little-endian bytes, although it could hold them as numbers.
        is_nullable: whether a value may be missing: null in Arrow, an empty list in a record.

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
            raise SchemaError(f"ArrowType: sizes is {self.sizes!r}; want None only in the first place")

    @classmethod
    def of(cls, found: Any) -> ArrowType:
        """Return the equivalent of a pyarrow type: numbers, times, text or bytes, and lists of these.

        Raises:
            SchemaError: the type is not supported.

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
        """Whether its values are numbers, booleans or times, however they are stored."""
        return self.dtype not in _BYTES

    @property
    def kind(self) -> Kind:
        """The kind of the column in each record."""
        if not self.holds_numbers:
            return "bytes_list" if self.sizes or self.is_nullable else "bytes"
        kind = "bytes" if self.is_raw else _ARROW_KINDS[self.dtype]
        # A value that may be missing, and may also be empty, is a list of its bytes.
        return "bytes_list" if self.is_nullable and (kind == "bytes" or None in self.sizes) else kind

    @property
    def raw_dtype(self) -> np.dtype[Any]:
        """The dtype of numbers that are stored as bytes."""
        return dtype_of("int64" if self.dtype in _TIMES else self.dtype).newbyteorder("<")

    @property
    def width(self) -> int:
        """Number of values in the lists of fixed size."""
        return math.prod(size for size in self.sizes if size is not None)

    @property
    def value_type(self) -> tuple[str, Shape]:
        """Dtype and shape of its values, as in `Feature.value_type`."""
        return _VALUE_DTYPES.get(self.dtype, self.dtype), self.sizes


def as_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Return exact float32 values as bfloat16, preserving the bits of NaN, which a cast would not."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(_bfloat16())


def is_number_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True if a dtype is that of numbers, booleans or times; floats of ml_dtypes have kind "V"."""
    return dtype.kind in "biufcmM" or (dtype.kind == "V" and dtype.type is not np.void)


@frozen(slots=False, eq=False)
class RaggedColumn:
    """A column of n records with any number of values each: a sequence of n arrays, stored in one.

    Attributes:
        values: (total,), the numbers of all records, one record after the other, or an object array of bytes;
            (total, ...) in blocks to be encoded.
        lengths: int64 (n,), number of values of each record.

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
        """int64 (n + 1,): start of each record, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def matrix(self, width: int) -> np.ndarray:
        """Return the values as (n, width); raise `SchemaError` if a record has another number of them."""
        wrong = np.flatnonzero(self.lengths != width)
        if len(wrong):
            raise SchemaError(f"a record holds {self.lengths[wrong[0]]} values, not {width}")
        return self.values.reshape(len(self.lengths), width)

    def rows(self) -> list[np.ndarray]:
        """Return the values of each record, as views."""
        return cut(self.values, self.lengths)

    def take(self, order: np.ndarray) -> RaggedColumn:
        """Return the records at some places, in that order."""
        lengths = self.lengths[order]
        starts = (np.cumsum(self.lengths) - self.lengths)[order]
        if len(lengths) and (self.lengths == self.lengths[0]).all():
            width = int(self.lengths[0])
            return type(self)(self.values.reshape(-1, width)[order].reshape(-1) if width else self.values, lengths)
        return type(self)(joined_spans(self.values, starts, lengths), lengths)


class RawColumn(RaggedColumn):
    r"""A column of n bytes values that are little-endian numbers, held as numbers: a sequence of n bytes.

    Example:
        >>> list(RawColumn(np.array([1, 2, 3], "<u2"), np.array([2, 1])))
        [b'\x01\x00\x02\x00', b'\x03\x00']
    """

    def __getitem__(self, place: Any) -> Any:
        found: Any = super().__getitem__(place)
        return RawColumn(found.values, found.lengths) if isinstance(place, slice) else found.tobytes()

    def rows(self) -> list[Any]:
        """Return the bytes of each record."""
        return cut(self.values.tobytes(), self.lengths * self.values.itemsize)


class TextColumn(RaggedColumn):
    """A column of n texts, held as their UTF-8: a sequence of n str.

    Example:
        >>> list(TextColumn(np.frombuffer("déjà".encode(), np.uint8), np.array([3, 3])))
        ['dé', 'jà']
    """

    def __getitem__(self, place: Any) -> Any:
        found: Any = super().__getitem__(place)
        return TextColumn(found.values, found.lengths) if isinstance(place, slice) else found.tobytes().decode()

    def rows(self) -> list[Any]:
        """Return the text of each record."""
        return [text.decode() for text in cut(self.values.tobytes(), self.lengths)]


def joined_spans(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return concatenated spans of values (total,), given the start and length of each."""
    size = values.itemsize
    if len(lengths) and lengths.sum() * size >= _LONG_SPAN_BYTES * len(lengths) and not values.dtype.hasobject:
        data = np.ascontiguousarray(values).view(np.uint8).data
        bounds = zip((starts * size).tolist(), ((starts + lengths) * size).tolist(), strict=True)
        joined = bytearray().join([data[one:other] for one, other in bounds])  # slices of arrays take twice as long
        return np.frombuffer(joined, values.dtype)
    if len(lengths) and (lengths == lengths[0]).all():
        places = (starts[:, None] + np.arange(lengths[0])).reshape(-1)
    else:
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    found: np.ndarray = values[places]
    return found


def cut(data: Any, lengths: np.ndarray) -> list[Any]:
    """Return consecutive slices of bytes or items, given their lengths."""
    return [data[start:stop] for start, stop in itertools.pairwise([0, *np.cumsum(lengths).tolist()])]


ColumnBlock: TypeAlias = RaggedColumn | np.ndarray | Sequence[bytes] | Sequence[str]
"""One encoded column of n records: numbers or lists of bytes, or one bytes value (or its text) for each record.

Numbers are an array (n, k) if all records have k of them."""


def join_blocks(blocks: Sequence[Mapping[str, ColumnBlock]], order: np.ndarray | None = None) -> dict[str, ColumnBlock]:
    """Return the columns of all records of several blocks.

    Args:
        blocks: columns by name; all blocks have the same names.
        order: int64 (n,), the index of each resulting record among those of the blocks; None keeps their order.
    """
    return {name: _join_columns([block[name] for block in blocks], order) for name in blocks[0]}


def _join_columns(pieces: Sequence[ColumnBlock], order: np.ndarray | None) -> ColumnBlock:
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(arrays) == len(pieces) and len({array.shape[1:] for array in arrays}) == 1:
        joined_array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return joined_array if order is None else joined_array[order]
    columns = [piece for piece in map(ragged, pieces) if isinstance(piece, RaggedColumn)]
    if len(columns) == len(pieces):
        found = columns[0]
        if len(columns) > 1:
            values, lengths = ([getattr(column, part) for column in columns] for part in ("values", "lengths"))
            found = type(found)(np.concatenate(values), np.concatenate(lengths))
        return found if order is None else found.take(order)
    joined: Any = (
        values_of(pieces[0]) if len(pieces) == 1 else list(itertools.chain.from_iterable(map(values_of, pieces)))
    )
    return joined if order is None else [joined[place] for place in order.tolist()]


Stored: TypeAlias = Column | dict[str, Column]
"""The stored form of a value: its column, or several by the suffix after the field's name."""


class Feature(abc.ABC):
    """The type of a field: its values, their storage, and their form in each format and reader.

    A feature type defines `type`, `encode` and `decode`. All other methods have defaults that follow from these three;
    override them if you can do better. Methods are called from several threads and processes.

    Most types store one column, which they return and accept: the `Column` of a value, or the `ColumnBlock` of n
    values. A type with several columns uses a dict of them, by the suffix after the field's name: `""` for the column
    with the name itself, or `"/shape"`.

    A feature does not know the name of its field. `Features` adds it to each `SchemaError` and `InputError`: it
    replaces a leading "the field", or precedes the message.

    A feature is an immutable value: equal declarations compare equal, and it is hashable and picklable. A frozen
    dataclass satisfies this, and its fields are stored in `manifest.json`. `load` finds the class by `type_name`,
    through the entry-point group `datamat.features` or `register_feature`.

    Attributes:
        type_name: name of the type in `manifest.json` and of its entry point; by default the name of the class.
        takes_none: whether None is a value, rather than a sign that a file did not decode.
        unsaid: arguments that the manifest omits if they have their defaults: those added in a later version of the
            class, so that older datasets count as unchanged.

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
        # A class with its own `encode` does not inherit `encode_many`.
        for of_block, of_one in (("encode_many", {"encode"}), ("decode_many", {"decode", "decode_into"})):
            nearest = next(kind for kind in cls.__mro__ if vars(kind).keys() & {of_block, *of_one})
            if of_block not in vars(nearest):
                setattr(cls, of_block, getattr(Feature, of_block))

    # ---------------------------------------------------------------- required

    @property
    @abc.abstractmethod
    def type(self) -> Any:
        """The Arrow type of the column, or a dict of several: an `ArrowType`, or a type of pyarrow."""

    @abc.abstractmethod
    def encode(self, value: Any) -> Stored:
        """Return the column of a value: `bytes`, a list of them, or a 1-D int64 or float32 array: `ArrowType.kind`.

        Equal values must give equal columns, in any process and at any time.

        Raises:
            SchemaError: the value does not match the declaration.
        """

    @abc.abstractmethod
    def decode(self, stored: Any) -> Any:
        """Return the value that was passed to `encode`: an array, a numpy number, or a value of the dtype.

        Args:
            stored: result of `encode`; a bytes column may be a list of its one value.

        Raises:
            InputError: the bytes do not decode.
        """

    # ---------------------------------------------------------------- declaration

    @final
    def columns(self, name: str) -> dict[str, ArrowType]:
        """Return the Arrow type of each column of a field, by the name of the column."""
        return {column: ArrowType.of(one) for column, one in by_column(name, self.type).items()}

    def value_type(self) -> tuple[str, Shape]:
        """Return the dtype and shape of decoded values; by default those of the first column.

        The dtype is the name of a numpy dtype, "bfloat16", "string" for str, "bytes" for bytes, or "object" for what
        JSON can hold: dicts, lists, str, numbers, booleans and None. The shape is () for a single value, and holds None
        for each size that varies.
        """
        return next(iter(self.columns("").values())).value_type

    def declared(self) -> str:
        """Return the declaration for messages: `uint8 (360, 480, 3)`."""
        dtype, shape = self.value_type()
        return f"{self.type_name} {dtype}" + (f" {shape_text(shape)}" if shape else "")

    @final
    def to_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values: the name of the type, and its arguments."""
        package = type(self).__module__.partition(".")[0]
        # The module is for the error message if the class is missing.
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
        """Return the feature with these arguments; lists, which replace tuples in JSON, become tuples."""
        return cls(**{name: _tuples(value) for name, value in arguments.items()})

    def packages(self, *, drawn: bool) -> frozenset[str]:
        """Return the top-level modules of the packages that decide the bytes of the columns.

        Shards are rebuilt for a new version of one of them. The package of the class itself always counts.

        Args:
            drawn: whether to answer for transformed copies, which are always decoded and encoded.
        """
        del drawn
        return frozenset()

    def parts(self) -> tuple[Feature, ...]:
        """Return the features that this one contains; () for a simple type."""
        return ()

    # ---------------------------------------------------------------- values

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in order of their ids; () if classes have no names, None if values are not ids."""
        return None

    def prepare(self, value: Any) -> Any:
        """Return `value` for transforms: decoded, if `read` returned encoded bytes."""
        return value

    def encoded_value(self, stored: Any) -> Any:
        """Return a value that `encode` stores as exactly these columns, such as the bytes of an encoded file."""
        return self.decode(stored)

    def encode_many(self, values: Any) -> Any:
        """Return the columns of n values at once.

        The default encodes values one by one. An override is used if it is in the class that defines `encode` or in a
        subclass; it must give the same columns as `encode`.

        Args:
            values: an array (n, ...), a sequence of n values, or a `RaggedColumn` of values (total, ...).

        Returns:
            For a bytes column, a list of n bytes or a `RawColumn`; for others, an array (n,) or (n, k), or a
            `RaggedColumn`.

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
        """Return True if `encode_many` is overridden, and not invalidated by a subclass with another `encode`."""
        return type(self).encode_many is not Feature.encode_many

    def decode_into(self, stored: Any, out: np.ndarray | None, *, are_intact: bool = False) -> Any:
        """Return the value that `decode` returns.

        Args:
            stored: argument of `decode`.
            out: memory to decode into, if that saves a copy; it may be overwritten in any case.
            are_intact: whether a checksum has verified the columns.
        """
        del out, are_intact
        return self.decode(stored)

    def is_ragged(self) -> bool:
        """Return True if a batch holds the values as a list, even if they could be one array."""
        dtype, shape = self.value_type()
        return None in shape or not holds_numbers(dtype)

    def decode_many(self, stored: Any) -> np.ndarray | list[Any] | None:
        """Decode n records at once; return None for a type whose values are decoded one by one.

        Readers use an override for small records if it is in the class that defines `decode` or in a subclass.

        Args:
            stored: the column of n records, or a dict of several: n bytes (or str), or a `RaggedColumn`.

        Returns:
            An array (n, ...) if all values have one declared shape, else a list of n values.
        """
        del stored
        return None

    def decodes_many(self) -> bool:
        """Return True if `decode_many` is overridden, and not invalidated by a subclass with another `decode`."""
        return type(self).decode_many is not Feature.decode_many

    # ---------------------------------------------------------------- statistics

    def observe(self, stored: Any) -> FieldStatistics:
        """Return statistics of n values, from their columns; {} by default.

        A run calls it for the records that it writes, hundreds at a time, and adds the results: so they must depend
        only on single values, not on how values are grouped. It should be cheap: read the header of a file, not its
        content. `manifest.json` contains the result; see `Manifest.statistics`.

        Args:
            stored: argument of `decode_many`.

        Returns:
            By name of each statistic: `Counts` of class ids, `Numbers`, or an int to be added up. Names that differ
            only in a number, `size[0]`, `size[1]`, are shown as one statistic of several numbers.

        Example:
            >>> from datamat.features import Numbers
            >>> class Celsius(Feature):   # doctest: +SKIP
            ...     def observe(self, column):
            ...         return {"degrees": Numbers.of(column.values / 100)}
        """
        del stored
        return {}

    def observe_value(self, value: Any) -> FieldStatistics:
        """Return statistics of one value that its columns do not show, such as those of pixels; {} by default.

        A run calls it with the arrays that it encodes, but not for files that are stored untouched, since decoding
        those would cost more than storing them.

        Args:
            value: argument of `encode`.

        Returns:
            As for `observe`, under other names.
        """
        del value
        return {}


class DictFields(dict[str, Any]):
    """The immutable declarations of a dict's fields; without `key`, which only a whole sample has."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        declared = getattr(fields, "as_declared", fields)  # of `Features`
        super().__init__({name: feature for name, feature in declared.items() if name != "key"})

    def __hash__(self) -> int:  # type: ignore[override]  # dicts have none, since they are mutable
        return hash(tuple(self))


to_json_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode
"""Returns the canonical text of a JSON value: keys in order, no spaces, no NaN."""


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
    """Return a column of a block for `observe`: arrays (n,) and (n, k) as a `RaggedColumn`."""
    if not isinstance(column, np.ndarray) or column.dtype == object:
        found: ColumnBlock = column
        return found
    return RaggedColumn(column.reshape(-1), np.full(len(column), math.prod(column.shape[1:]), np.int64))


def by_column(name: str, stored: Any) -> dict[str, Any]:
    """Return a feature's value for its column, or for several, by column name."""
    return {name + part: one for part, one in stored.items()} if isinstance(stored, dict) else {name: stored}


def by_part(stored: Any) -> dict[str, Any]:
    """Return a feature's value for its column, or for several, by the suffix after the field's name."""
    return stored if isinstance(stored, dict) else {"": stored}


def whole(parts: dict[str, Any]) -> Any:
    """Return the argument of `by_part`."""
    return parts[""] if len(parts) == 1 and "" in parts else parts


def put_name(error: SchemaError | InputError, name: str) -> None:
    """Add the name of a field to an error raised by its feature."""
    text, place = str(error), f"field {name!r}"
    error.args = (text.replace(_FIELD, place, 1) if text.startswith(_FIELD) else f"{place}: {text}",)


def named(name: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a feature; errors get the name of the field."""
    try:
        return call(*args)
    except (InputError, SchemaError) as error:
        put_name(error, name)
        raise


_FIELD = "the field"
"""Placeholder for the field's name at the beginning of messages of features."""


def is_of_kind(value: Any, kind: Kind) -> bool:
    """Return True if a value is a column, of this kind, of one record."""
    if kind == "bytes":
        return isinstance(value, bytes)
    if kind == "bytes_list":
        return isinstance(value, list) and all(isinstance(item, bytes) for item in value)
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == DTYPE_OF_KIND[kind]


def is_block_of_kind(values: Any, kind: Kind) -> bool:
    """Return True if values are a column, of this kind, of n records; numbers may be an array (n,) or (n, k)."""
    if kind == "bytes":
        is_sequence = isinstance(values, Sequence) and set(map(type, values)) <= {bytes}
        return is_sequence or isinstance(values, RawColumn)
    if kind == "bytes_list":
        return isinstance(values, RaggedColumn) and set(map(type, values.values.tolist())) <= {bytes}
    numbers, most = (values.values, 1) if isinstance(values, RaggedColumn) else (values, 2)
    return isinstance(numbers, np.ndarray) and numbers.dtype == DTYPE_OF_KIND[kind] and 0 < numbers.ndim <= most


def rows_of(columns: Mapping[str, Any]) -> Iterator[dict[str, Column]]:
    """Yield each row of a block as a record."""
    for row in zip(*map(values_of, columns.values()), strict=True):
        yield dict(zip(columns, row, strict=True))


def values_of(values: np.ndarray | ColumnBlock) -> Sequence[Any]:
    """Return the value of each row of a block's column, as in a record."""
    if isinstance(values, RaggedColumn):
        return [row.tolist() for row in values.rows()] if values.values.dtype == object else values.rows()
    if isinstance(values, np.ndarray):
        return list(values[:, None] if values.ndim == 1 else values)
    return values


def num_bytes_of(column: Column) -> int:
    """Return the size in bytes of the values of a record's column."""
    if isinstance(column, np.ndarray):
        return column.nbytes
    return len(column) if isinstance(column, bytes) else sum(map(len, column))


def bytes_array(values: Sequence[Any]) -> np.ndarray:
    """Return bytes as an object array (n,), which preserves trailing zeros."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def checked_shape(shape: Any, where: str) -> Shape:
    """Return a declared shape; raise `SchemaError` if it is none."""
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except TypeError as error:
        raise SchemaError(f"{where}: shape is {shape!r}; want a tuple of sizes, None where one varies") from error
    if any(size is not None and size < 0 for size in sizes):
        raise SchemaError(f"{where}: shape is {shape!r}; sizes are not negative")
    return sizes


def checked_names(names: Any, where: str) -> tuple[str, ...]:
    """Return declared class names; raise `SchemaError` if they are not distinct texts."""
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise SchemaError(f"{where}: names is {names!r}; want a sequence of str")
    if len(set(found)) != len(found):
        raise SchemaError(f"{where}: a class name appears twice in {join_names(found)}; give each class its own")
    return found


def checked_dtype(dtype: Any, where: str, dtypes: Iterable[str] = KIND_OF_DTYPE) -> str:
    """Return the name of a declared dtype; raise `SchemaError` if it is not among `dtypes`."""
    try:
        name = (dtype_of(dtype) if isinstance(dtype, str) else np.dtype(dtype)).name
    except TypeError:
        name = ""
    if name not in dtypes:
        raise SchemaError(f"{where}: dtype is {dtype!r}; want one of {join_names(dtypes)}")
    return str(name)


def set_positive(feature: Feature, names: Iterable[str]) -> None:
    """Check that options of a feature are positive integers or None, and store them as int."""
    for name in names:
        value = getattr(feature, name)
        if value is not None:
            object.__setattr__(feature, name, checked_int(value, f"{type(feature).__name__}: {name}"))
            if getattr(feature, name) < 1:
                raise SchemaError(f"{type(feature).__name__}: {name} is {value}; want a positive number, or None")


def checked_int(value: Any, where: str) -> int:
    """Return an option as int; raise `SchemaError` if it is no integer."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise SchemaError(f"{where} is {value!r}; want an int") from error


def as_array(value: Any, *, are_ids: bool = False, name: str = "") -> Any:
    """Return a Pillow image, or a tensor of torch or TensorFlow, as a numpy array, and any other value unchanged.

    Args:
        value: the value.
        are_ids: whether the pixels are class ids: then palette indices and booleans are these ids.
        name: name of the field, for messages.

    Raises:
        SchemaError: it is a Pillow image in CMYK, whose colours depend on a profile, or an array with masked values.
    """
    if type(value) is not np.ndarray and hasattr(value, "filled") and hasattr(value, "mask"):  # from `numpy.ma`
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
    """Return the stored height and width of a picture, and its EXIF orientation, 1 to 8.

    Args:
        value: a file, a Pillow picture, or pixels; None is returned for anything else.
    """
    if isinstance(value, bytes):
        try:
            info = probe(value)
        except InputError:  # reported when the file is encoded
            return None
        return (info.height, info.width), info.orientation
    if isinstance(value, np.ndarray):
        return ((value.shape[0], value.shape[1]), 1) if value.ndim > 1 else None
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        return (value.height, value.width), value.getexif().get(_ORIENTATION, 1)
    return None


def _array_of_pillow(picture: Any, *, are_ids: bool) -> np.ndarray:
    """Return the pixels of a Pillow picture as if read from its file: upright, and with alpha."""
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
    """Return a tensor as an array, even if torch itself does not convert it: bfloat16, sparse, with gradients."""
    tensor = tensor.detach().cpu()
    tensor = (tensor if str(tensor.layout) == "torch.strided" else tensor.to_dense()).resolve_conj().resolve_neg()
    if str(tensor.dtype) == "torch.bfloat16":
        return np.asarray(tensor.view(sys.modules["torch"].int16)).view(_bfloat16())
    return np.asarray(tensor)


def array_of(feature: Feature, value: Any) -> np.ndarray:
    """Return a value that has to be an array; raise `SchemaError` otherwise."""
    if not isinstance(value, np.ndarray):
        raise mismatch(feature, f"a {type(value).__name__}", "give a numpy array")
    return value


def check_array(
    feature: Feature, dtype: Any, shape: tuple[int, ...], wanted: Shape, wanted_dtype: np.dtype[Any]
) -> None:
    """Raise `SchemaError` if an array of this dtype and shape does not match its declaration."""
    # Both byte orders hold the same numbers.
    same_dtype = dtype == wanted_dtype or np.dtype(dtype).newbyteorder("=") == wanted_dtype
    if same_dtype and (shape == wanted or _fits(shape, wanted)):
        return
    found = f"{np.dtype(dtype).name} {shape_text(shape)}"
    raise mismatch(
        feature, found, "cast or reshape it where it is made, in read or a transform, or change the declaration"
    )


@functools.lru_cache(maxsize=1 << 8)  # most samples of a dataset have the same shapes
def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))


def one_bytes(column: Column) -> bytes:
    """Return the only value of a column; raise `SchemaError` if it holds another number of them."""
    if isinstance(column, bytes):
        return column
    if len(column) != 1 or not isinstance(column[0], bytes):
        raise SchemaError(f"its column in the record holds {count_of(len(column), 'value')}; want one bytes value")
    return column[0]


def mismatch(feature: Feature, found: str, remedy: str) -> SchemaError:
    """Return the error of a value that does not match its declaration."""
    return SchemaError(f"{_FIELD} is declared {feature.declared()} but the sample holds {found}; {remedy}")


def shape_text(shape: Sequence[int | None]) -> str:
    """Return a shape in words, with `?` for open sizes."""
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
