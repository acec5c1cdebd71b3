"""Numbers, labels, boxes, text, tokens, times, and everything else: bytes and JSON."""

from __future__ import annotations

import datetime
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from datamat.errors import SchemaError, count_of
from datamat.features.base import (
    DTYPE_OF_KIND,
    KIND_OF_DTYPE,
    ArrowType,
    Column,
    ColumnBlock,
    Feature,
    Kind,
    RaggedColumn,
    RawColumn,
    Shape,
    Stored,
    TextColumn,
    array_of,
    check_array,
    checked_dtype,
    checked_int,
    checked_names,
    checked_shape,
    dtype_of,
    join_names,
    mismatch,
    one_bytes,
    ragged,
    shape_text,
    to_json_text,
)
from datamat.features.protocols import Geometry, Preview, Target
from datamat.features.registry import built_in
from datamat.features.statistics import Counts, FieldStatistics, Numbers
from datamat.values import frozen

_TIME = "datetime64[us]"
_EPOCHS = {
    None: datetime.datetime(1970, 1, 1),
    "UTC": datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
}
"""The epoch of timestamps, by time zone."""
_MOST_LISTED = 64
"""Maximum integers of a tensor that are stored as numbers by default."""
_MOST_ASCII = 127
_ROUNDING = 1e-3
"""Relative error up to which four moved corners still form a rectangle."""
_NOT_IN_ARROW = {"complex64", "complex128"}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "b": (bool,),
    **dict.fromkeys("iu", (int,)),
    **dict.fromkeys("fV", (int, float)),  # bfloat16 has kind "V" in numpy
    "c": (int, float, complex),
}
"""Python's numbers that a scalar accepts, by the kind of its dtype."""


@frozen()
class ClassLabel(Feature):
    """A class id, or a list of them: int64, with the names of the classes.

    A sample holds an id or a name (or a sequence of either, with `shape=(None,)`); it reads back as int64.

    Args:
        names: class names in the order of the ids.
        num_classes: number of classes, for classes without names.
        shape: () for one label, (None,) for a list of any length, (n,) for a list of n.

    Example:
        >>> ClassLabel(names=("cat", "dog")).encode("dog")
        array([1])
    """

    names: tuple[str, ...] = ()
    num_classes: int | None = None
    shape: Shape = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "ClassLabel"))
        object.__setattr__(self, "names", checked_names(self.names, "ClassLabel"))
        if len(self.shape) > 1:
            raise SchemaError(f"ClassLabel: shape is {self.shape}; want at most one size, as in () or (None,)")
        if self.num_classes is None:
            object.__setattr__(self, "num_classes", len(self.names))
        object.__setattr__(self, "num_classes", checked_int(self.num_classes, "ClassLabel: num_classes"))
        if self.names and len(self.names) != self.num_classes:
            raise SchemaError(
                f"ClassLabel: {count_of(len(self.names), 'name')} for num_classes={self.num_classes}; leave "
                "num_classes out"
            )
        if not self.num_classes or self.num_classes < 1:
            raise SchemaError("ClassLabel: no classes; give names=(...) or num_classes=")

    @property
    def type(self) -> ArrowType:
        return ArrowType("int64", self.shape)

    def encode(self, value: Any) -> Column:
        if not self.shape:
            return np.array([self._id(value)], np.int64)
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)) or np.ndim(value) == 0:
            raise mismatch(self, f"a {type(value).__name__}", "give a list of labels")
        ids = np.array([self._id(item) for item in value], np.int64)
        check_array(self, ids.dtype, ids.shape, self.shape, ids.dtype)
        return ids

    def encode_many(self, values: Any) -> Any:
        if not self.shape and isinstance(values, (list, tuple)):
            found = numbers_in(values, np.dtype(np.int64))
        else:
            found = _integers_of(values)
        if found is None or (found.size and not 0 <= found.min() <= found.max() < (self.num_classes or 0)):
            return Feature.encode_many(self, values)  # supports names, and refuses other ids
        numbers, lengths, _ = _stacked(self, values if self.shape else found, self.shape, found.dtype)
        return _block_column(numbers, lengths, "int64")

    def decode(self, column: Column) -> Any:
        ids = np.asarray(column, np.int64)
        return ids if self.shape else _only(ids)

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return _block_of(column, self.shape, "int64")

    def observe(self, column: Any) -> FieldStatistics:
        ids = _numbers_of(column, "int64")
        found: FieldStatistics = {"classes": Counts.of(ids.values)}
        return {**found, "length": Numbers.of(ids.lengths, with_bins=True)} if self.shape == (None,) else found

    def declared(self) -> str:
        size = self.shape[0] if self.shape else None
        many = f"list of {'' if size is None else f'{size} '}" if self.shape else ""
        return f"{many}int64 class id of {self.num_classes} classes"

    def class_names(self) -> tuple[str, ...]:
        return self.names

    def _id(self, value: Any) -> int:
        if type(value) is int and 0 <= value < (self.num_classes or 0):
            return value
        if isinstance(value, str):
            if value not in self.names:
                raise mismatch(self, f"the name {value!r}", f"use one of {join_names(self.names)}")
            return self.names.index(value)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise mismatch(self, f"{value!r} ({type(value).__name__})", "give an int or a class name")
        if not 0 <= value < (self.num_classes or 0):
            raise mismatch(self, f"class id {value}", "declare the class, or map the id in read")
        return int(value)


@frozen()
class BBoxes(Feature, Geometry, Preview):
    """Boxes of one image: float32 (n, 4), each (ymin, xmin, ymax, xmax) as a fraction of height and width.

    This is the layout of `tfds.features.BBoxFeature` (REL_YXYX), in which boxes stay valid when the image is resized.

    Rotated boxes are float32 (n, 5), each (x, y, width, height, angle): its centre and size in pixels, because
    fractions of height and width would shear it, and the angle in degrees, clockwise on the screen from the x axis to
    the side called width, as in OpenCV's `RotatedRect`. They may extend beyond the edge of the image. Transforms move
    their corners as keypoints; if these no longer form a rectangle, the box is the smallest one around them. A box that
    leaves the image is dropped.

    Args:
        rotated: whether boxes have an angle.

    Example:
        >>> BBoxes().encode(np.array([[0, 0, 0.5, 1]], np.float32))
        array([0. , 0. , 0.5, 1. ], dtype=float32)
    """

    rotated: bool = False

    preview = "outlines"
    unsaid: ClassVar[frozenset[str]] = frozenset({"rotated"})

    @property
    def _width(self) -> int:
        return 5 if self.rotated else 4

    @property
    def type(self) -> ArrowType:
        return ArrowType("float32", (None, self._width))

    def encode(self, value: Any) -> Column:
        boxes = array_of(self, self._listed(value) if isinstance(value, (list, tuple)) else value)
        check_array(self, boxes.dtype, boxes.shape, (None, self._width), np.dtype(np.float32))
        good = _are_boxes(boxes)
        if not good.all():
            place = int(np.flatnonzero(~good)[0])
            remedy = (
                "give finite numbers, and sizes of 0 or more"
                if self.rotated
                else "clip it to [0, 1] with min <= max in read"
            )
            raise mismatch(self, f"box {place} = {boxes[place].tolist()}", remedy)
        return _to_column(boxes.reshape(-1), "float32")

    def _listed(self, boxes: Sequence[Any]) -> Any:
        """Convert a list of boxes to an array; return other values unchanged."""
        try:
            return np.array(boxes, np.float32).reshape(len(boxes), -1 if boxes else self._width)
        except (TypeError, ValueError):
            return boxes

    def encode_many(self, values: Any) -> Any:
        if not isinstance(values, (np.ndarray, RaggedColumn)) and not all(isinstance(v, np.ndarray) for v in values):
            return Feature.encode_many(self, values)  # supports lists of boxes
        numbers, lengths, _ = _stacked(self, values, (None, self._width), np.dtype(np.float32))
        if not _are_boxes(numbers.reshape(-1, self._width)).all():
            return Feature.encode_many(self, values)  # names the box in the error
        return _block_column(numbers, lengths, "float32")

    def decode(self, column: Column) -> np.ndarray:
        return np.asarray(column, np.float32).reshape(-1, self._width)

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return _block_of(column, (None, self._width), "float32")

    def observe(self, column: Any) -> FieldStatistics:
        lengths = _numbers_of(column, "float32").lengths
        return {"boxes": Numbers.of(lengths // self._width, with_bins=True)}

    def declared(self) -> str:
        if self.rotated:
            return "float32 (n, 5) of (x, y, width, height, angle in degrees)"
        return "float32 (n, 4) of (ymin, xmin, ymax, xmax) in [0, 1]"

    def target(self) -> Target:
        return "points" if self.rotated else "bboxes"

    def points(self, value: Any) -> np.ndarray:
        turn = np.radians(value[:, 4:])
        across = np.hstack([np.cos(turn), np.sin(turn)]) * value[:, 2:3] / 2
        down = np.hstack([-np.sin(turn), np.cos(turn)]) * value[:, 3:4] / 2
        corners = np.stack([-across - down, across - down, across + down, down - across], axis=1)
        return np.asarray((value[:, None, :2] + corners).reshape(-1, 2), np.float32)

    def with_points(
        self, value: Any, points: np.ndarray, size: tuple[int, int] | None
    ) -> tuple[Any, np.ndarray | None]:
        corners = points.reshape(-1, 4, 2)
        low, high = corners.min(axis=1, initial=np.inf), corners.max(axis=1, initial=-np.inf)
        is_inside = (
            np.ones(len(value), bool) if size is None else (high > 0).all(axis=1) & (low < size[::-1]).all(axis=1)
        )
        rows = np.flatnonzero(is_inside)
        return np.array([_rectangle(four) for four in corners[rows]], np.float32).reshape(-1, 5), rows

    def needs_every_point(self) -> bool:
        return True

    def may_lose_rows(self) -> bool:
        return True

    def outlines(self, value: Any, height: int, width: int) -> list[np.ndarray]:
        if self.rotated:
            return list(self.points(value).reshape(-1, 4, 2))
        boxes = value * np.array([height, width, height, width], np.float32)
        return list(boxes[:, [[1, 0], [3, 0], [3, 2], [1, 2]]])


@frozen()
class Text(Feature):
    """A string, stored as UTF-8."""

    @property
    def type(self) -> ArrowType:
        return ArrowType("string")

    def encode(self, value: Any) -> Column:
        if not isinstance(value, str):
            raise mismatch(self, f"{type(value).__name__}", "give a str; decode bytes in read")
        return _utf8(self, value)

    def encode_many(self, values: Any) -> Any:
        if isinstance(values, TextColumn):
            return RawColumn(values.values, values.lengths)
        if set(map(type, values)) <= {str}:
            try:
                return list(map(str.encode, values))
            except UnicodeEncodeError:
                pass  # the loop below raises, naming the value
        return [self.encode(value) for value in values]

    def decode(self, column: Column) -> str:
        return one_bytes(column).decode()

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        values: Any = column
        return list(values) if len(values) and isinstance(values[0], str) else [value.decode() for value in values]

    def observe(self, column: Any) -> FieldStatistics:
        if not isinstance(column, RawColumn):
            column = [value if isinstance(value, bytes) else value.encode() for value in column]
            column = RawColumn(np.frombuffer(b"".join(column), np.uint8), np.fromiter(map(len, column), np.int64))
        counts = column.lengths
        if column.values.max(initial=0) > _MOST_ASCII:
            begins = np.concatenate([[0], np.cumsum(column.values & 0xC0 != 0x80)])  # all but continuation bytes
            counts = np.diff(begins[np.concatenate([[0], np.cumsum(counts)])])
        return {"characters": Numbers.of(counts, with_bins=True)}

    def declared(self) -> str:
        return "str"


@frozen()
class Bytes(Feature):
    """Any bytes, stored unchanged: a PDF, a mesh, a pickle of another program.

    A sample holds bytes, a bytearray or a memoryview; it reads back as bytes.

    Example:
        >>> Bytes().encode(bytearray(b"ply"))
        b'ply'
    """

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary")

    def encode(self, value: Any) -> Column:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            remedy = "encode text in read" if isinstance(value, str) else "give bytes, such as array.tobytes()"
            raise mismatch(self, f"a {type(value).__name__}", remedy)
        return bytes(value)

    def encode_many(self, values: Any) -> Any:
        if set(map(type, values)) <= {bytes}:
            return list(values)
        return [self.encode(value) for value in values]

    def decode(self, column: Column) -> bytes:
        return one_bytes(column)

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return list(column)  # type: ignore[arg-type]

    def observe(self, column: Any) -> FieldStatistics:
        return {"bytes": _lengths(column)}

    def declared(self) -> str:
        return "bytes"


@frozen()
class Json(Feature):
    """Any JSON value: dicts and lists, however nested, of str, numbers, booleans and None.

    Stored as one line of UTF-8 with the keys of each dict in order, so equal values are equal bytes. Tuples and arrays
    are stored as lists, numpy's numbers as Python's; a dict reads back with its keys in order.

    Example:
        >>> column = Json().encode({"tags": ("sea", "dusk"), "f": 2.8, "by": None})
        >>> column
        b'{"by":null,"f":2.8,"tags":["sea","dusk"]}'
        >>> Json().decode(column)
        {'by': None, 'f': 2.8, 'tags': ['sea', 'dusk']}
    """

    takes_none = True

    @property
    def type(self) -> ArrowType:
        return ArrowType("json")

    def encode(self, value: Any) -> Column:
        try:
            text = to_json_text(value)
            if json.loads(text) == value:  # not if a key is a number, which the encoder converts to text
                return text.encode()
        except (TypeError, ValueError, RecursionError):
            pass  # values unknown to the encoder are converted below, or refused with their place
        try:
            return to_json_text(self._plain(value, "")).encode()
        except RecursionError as error:
            raise mismatch(self, "a value that is nested too deeply or cyclic", "flatten it in read") from error

    def encode_many(self, values: Any) -> Any:
        return [self.encode(value) for value in values]

    def decode(self, column: Column) -> Any:
        return json.loads(one_bytes(column))

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return [json.loads(value) for value in column]  # type: ignore[union-attr]

    def declared(self) -> str:
        return "JSON"

    def _plain(self, value: Any, place: str) -> Any:
        """Convert a part of a value to JSON types; `place` locates it, as in `["boxes"][2]`."""
        where = f" at {place}" if place else ""
        if isinstance(value, (np.ndarray, np.generic)):
            return self._plain(value.tolist(), place)
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    remedy = "use str for keys, the only type in JSON"
                    raise mismatch(self, f"the key {key!r} ({type(key).__name__}){where}", remedy)
            return {str(key): self._plain(item, f"{place}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(item, f"{place}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            raise mismatch(self, f"{value!r}{where}, which JSON does not support", "give None, or a field of its own")
        if isinstance(value, str):
            _utf8(self, value, where)
        elif value is not None and not isinstance(value, (bool, int, float)):
            remedy = (
                "give dicts, lists, str, numbers, booleans and None, or declare what holds it: ListOf(...), or "
                "ListOf({...}) for a list of dicts"
            )
            raise mismatch(self, f"a {type(value).__name__}{where}", remedy)
        return value


@frozen()
class Timestamp(Feature):
    """A point in time, to the microsecond: datetime64[us], stored as int64 microseconds since 1970.

    A sample holds a `datetime.datetime`, a `pandas.Timestamp` or a `numpy.datetime64` of any unit, which is never
    rounded. A `datetime.date` is its first moment, without a time zone, as in Arrow. It reads back as
    `numpy.datetime64`; torch and TensorFlow, which have no time types, get the int64.

    Args:
        tz: "UTC" for absolute times, from datetimes with any time zone; None for local times in an unknown zone, from
            datetimes without one. numpy's times, which have no zones, are accepted for either.

    Example:
        >>> import datetime
        >>> noon = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.timezone.utc)
        >>> column = Timestamp(tz="UTC").encode(noon)
        >>> column
        array([1795435200000000])
        >>> Timestamp(tz="UTC").decode(column)
        np.datetime64('2026-11-23T12:00:00.000000')
    """

    tz: Literal["UTC"] | None = None

    def __post_init__(self) -> None:
        if self.tz not in _EPOCHS:
            raise SchemaError(f"Timestamp: tz is {self.tz!r}; want 'UTC', to which all zones are converted, or None")

    @property
    def type(self) -> ArrowType:
        return ArrowType(self.declared())

    def encode(self, value: Any) -> Column:
        return np.array([self._microseconds(value)], np.int64)

    def encode_many(self, values: Any) -> Any:
        if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind == "M":
            found = values.astype(_TIME)
            if (found.astype(values.dtype) == values).all():  # NaT equals nothing
                return found.view(np.int64)
        return np.array([self._microseconds(value) for value in values], np.int64)

    def decode(self, column: Column) -> Any:
        return _only(np.asarray(column, np.int64)).view(_TIME)

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        found = _block_of(column, (), "int64")
        return np.asarray(found).view(_TIME)

    def observe(self, column: Any) -> FieldStatistics:
        return {"microseconds": Numbers.of(_numbers_of(column, "int64").values)}

    def declared(self) -> str:
        return "timestamp[us]" if self.tz is None else f"timestamp[us, tz={self.tz}]"

    def _microseconds(self, value: Any) -> int:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, np.datetime64):
            found = value.astype(_TIME)
            if found.astype(value.dtype) != value:  # back in its own unit; NaT equals nothing
                raise mismatch(self, f"{value!r}, which is not a whole number of microseconds", "round it in read")
            return int(found.view(np.int64))
        if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
            value = datetime.datetime(value.year, value.month, value.day)
        if not isinstance(value, datetime.datetime):
            raise mismatch(self, f"{value!r} ({type(value).__name__})", "give a datetime or a numpy.datetime64")
        is_missing = value != value  # noqa: PLR0124 -- true of pandas' NaT
        if is_missing or getattr(value, "nanosecond", None):  # which pandas has, too
            raise mismatch(self, f"{value!r}, which is not a whole number of microseconds", "round it in read")
        if (value.utcoffset() is None) != (self.tz is None):
            found, remedy = (
                ("without a time zone", "add it in read, with value.replace(tzinfo=...), or declare Timestamp()")
                if self.tz
                else ("with a time zone", "declare Timestamp(tz='UTC'), which takes any, or remove it in read")
            )
            raise mismatch(self, f"{value!r}, {found}", remedy)
        since = value - _EPOCHS[self.tz]
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


@frozen()
class Scalar(Feature):
    """One number or boolean of a numpy dtype, stored exactly.

    float64, uint64, bfloat16 and complex numbers, which a `tf.train.Example` cannot hold, are stored as little-endian
    bytes.

    Args:
        dtype: name of a numpy dtype: bool, int8 ... int64, uint8 ... uint64, float16, float32, float64, complex64,
            complex128; or bfloat16, which comes with the package ml_dtypes.

    Example:
        >>> Scalar("int32").encode(7)
        array([7])
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "Scalar"))

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary" if self.dtype in _NOT_IN_ARROW else self.dtype)

    def value_type(self) -> tuple[str, Shape]:
        return self.dtype, ()

    def encode(self, value: Any) -> Column:
        found = _scalar_of(self, value, dtype_of(self.dtype))
        return _to_column(found.reshape(1), KIND_OF_DTYPE[self.dtype])

    def encode_many(self, values: Any) -> Any:
        kind = KIND_OF_DTYPE[self.dtype]
        if not isinstance(values, np.ndarray):
            numbers = numbers_in(values, dtype_of(self.dtype))
            if numbers is None:
                return Feature.encode_many(self, values)  # names the value that does not fit
            values = numbers
        check_array(self, values.dtype, values.shape, (None,), dtype_of(self.dtype))
        if kind != "bytes":
            return _to_column(values, kind)
        found = _block_column(values[:, None], None, kind)
        return found.rows() if self.dtype in _NOT_IN_ARROW else found

    def decode(self, column: Column) -> Any:
        return _only(_from_column(column, dtype_of(self.dtype)))

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return _block_of(column, (), self.dtype)

    def declared(self) -> str:
        return f"{self.dtype} scalar"

    def observe(self, column: Any) -> FieldStatistics:
        return self.observe_each([column])[0]

    def observe_each(self, columns: Sequence[ColumnBlock]) -> list[FieldStatistics]:
        """Do what `observe` does, for several columns of as many values: tables may have thousands."""
        numbers = [_numbers_of(column, self.dtype).values for column in columns]
        if numbers[0].dtype.kind == "c":
            return [{} for _ in columns]
        return [{"value": found} for found in Numbers.of_rows(np.stack(numbers))]


@frozen()
class Tensor(Feature, Preview):
    """An array of a numpy dtype, stored exactly.

    If the number of values does not determine the shape (several None, or None beside 0), the shape of each value is
    stored in the column `NAME/shape`. An empty list means an array without values if the first size varies.

    Args:
        shape: size of each dimension; None for one that varies.
        dtype: name of a numpy dtype, or bfloat16, as for `Scalar`.
        encoding: "list" stores numbers as numbers, which `tf.io.parse_example` reads directly; "raw" stores
            little-endian bytes. None chooses "raw" if numbers would not be exact, for float16, and for integers and
            booleans if a value has, or may have, more than 64 of them: if several sizes are open, or one size of 8- or
            16-bit ones. As numbers, these take up to ten bytes each, and ten times as long to read. One open size of
            wider integers stays numbers, because most are small.

    Example:
        >>> Tensor((2,), "float32").encode(np.array([1, 2], np.float32))
        array([1., 2.], dtype=float32)
    """

    shape: Shape = (None,)
    dtype: str = "float32"
    encoding: Literal["list", "raw"] | None = None

    @property
    def preview(self) -> Any:  # type: ignore[override]  # depends on the instance
        """What previews draw: a picture for maps, volumes and frames; nothing for vectors and small matrices."""
        return "image" if not self.dtype.startswith("complex") and _looks_like_pixels(self.shape) else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Tensor"))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "Tensor"))
        if self.encoding not in {None, "list", "raw"}:
            raise SchemaError(f"Tensor: encoding is {self.encoding!r}; want 'list', 'raw' or None")
        if self.encoding == "list" and KIND_OF_DTYPE[self.dtype] == "bytes":
            raise SchemaError(f"Tensor: {self.dtype} cannot be stored exactly as a list; leave encoding out")

    @functools.cached_property
    def _dtype(self) -> np.dtype[Any]:
        return dtype_of(self.dtype)

    @functools.cached_property
    def _kind(self) -> Kind:
        is_raw = self.encoding == "raw" or (self.encoding is None and _is_raw_by_default(self.shape, self.dtype))
        return "bytes" if is_raw else KIND_OF_DTYPE[self.dtype]

    @functools.cached_property
    def keeps_shape(self) -> bool:
        """Whether the shape of each value is stored in a separate column."""
        return self.shape.count(None) > (0 if 0 in self.shape else 1)

    def display(self, value: Any) -> np.ndarray:
        """Return a map in grey, or four slices of a volume side by side, in order of the first index.

        Two dimensions are (height, width), three (slices, height, width), four frames or a volume of several channels,
        of which the first is drawn; a first or last dimension of 1 or 3 is that of channels. The smallest number is
        black, the largest white.

        Returns:
            uint8 (height, width, 1 or 3).
        """
        levels = np.asarray(value).astype(np.float64)
        if not levels.size or levels.ndim < 2:
            return np.full((1, 1, 1), 255, np.uint8)
        shown = levels[np.isfinite(levels)]
        least, most = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 0.0)
        pixels = np.nan_to_num(np.clip((levels - least) / max(most - least, 1e-12), 0, 1) * 255).astype(np.uint8)
        if pixels.ndim == 2:
            return pixels[..., None]
        if pixels.ndim == 3 and pixels.shape[-1] in _CHANNELS:
            return pixels
        if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS:
            return np.moveaxis(pixels, 0, -1)
        while pixels.ndim > 4 or (pixels.ndim == 4 and pixels.shape[-1] not in _CHANNELS):
            pixels = pixels[0]
        if pixels.ndim == 3:
            pixels = pixels[..., None]
        # The centres of four equal parts, since the outermost slices of a volume tend to be empty.
        return side_by_side([pixels[(2 * part + 1) * len(pixels) // (2 * _SLICES)] for part in range(_SLICES)])

    @property
    def type(self) -> ArrowType | dict[str, ArrowType]:
        if self.encoding == "raw" or self.dtype in _NOT_IN_ARROW:
            found = ArrowType("binary")
        else:
            # A size of 0 crashes pyarrow (26.0.1: a division by zero); such tensors hold no numbers anyway.
            is_nested = None not in self.shape[1:] and 0 not in self.shape
            found = ArrowType(self.dtype, self.shape if is_nested else (None,), is_raw=self._kind == "bytes")
        return {"": found, "/shape": ArrowType("int64", (None,))} if self.keeps_shape else found

    def value_type(self) -> tuple[str, Shape]:
        return self.dtype, self.shape

    def encode(self, value: Any) -> Stored:
        array = array_of(self, _without_items(value, self.shape, self.dtype))
        check_array(self, array.dtype, array.shape, self.shape, self._dtype)
        column = _to_column(array.reshape(-1), self._kind)
        return {"": column, "/shape": np.array(array.shape, np.int64)} if self.keeps_shape else column

    def encode_many(self, values: Any) -> Any:
        if isinstance(values, (list, tuple)):
            values = [_without_items(value, self.shape, self.dtype) for value in values]
        numbers, lengths, shapes = _stacked(self, values, self.shape, dtype_of(self.dtype))
        column = _block_column(numbers, lengths, self._kind)
        if self.encoding == "raw" or self.dtype in _NOT_IN_ARROW:
            column = column.rows()
        return {"": column, "/shape": shapes} if self.keeps_shape else column

    def decode(self, stored: Any) -> np.ndarray:
        if self.keeps_shape:
            return _from_column(stored[""], self._dtype).reshape(tuple(int(size) for size in stored["/shape"]))
        flat = _from_column(stored, self._dtype)
        if None not in self.shape:
            return flat.reshape(self.shape)  # type: ignore[arg-type]
        known = math.prod(size for size in self.shape if size is not None)
        return flat.reshape([flat.size // known if size is None else size for size in self.shape])

    def decode_many(self, stored: Any) -> np.ndarray | list[Any] | None:
        if not self.keeps_shape:
            return _block_of(stored, self.shape, self.dtype)
        rows = _numbers_of(stored[""], self.dtype).rows()
        shapes = _numbers_of(stored["/shape"], "int64").matrix(len(self.shape))
        return [row.reshape(shape) for row, shape in zip(rows, shapes.tolist(), strict=True)]

    def observe(self, stored: Any) -> FieldStatistics:
        if self.keeps_shape:
            sizes = _numbers_of(stored["/shape"], "int64").matrix(len(self.shape))
            places = [place for place, size in enumerate(self.shape) if size is None]
            return {f"size[{place}]": Numbers.of(sizes[:, place]) for place in places}
        known = math.prod(size for size in self.shape if size is not None)
        if None not in self.shape or not known:
            return {}
        return {"length": Numbers.of(_item_counts(stored, self.dtype) // known, with_bins=True)}

    def declared(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}"


@frozen()
class Tokens(Feature):
    r"""The token ids of one text: integers (n,), stored as little-endian bytes.

    A sample holds a list of int, or an array (n,) of any integer dtype, as tokenizers return them; ids that the
    declared dtype cannot hold are refused. Reads back as an array (n,) of that dtype. Ids have no position in an image,
    so transforms that move pixels leave them alone.

    Args:
        dtype: name of an integer dtype. None chooses it by `vocab_size`: uint8 for up to 256 tokens, uint16 for up to
            65,536, otherwise int32, which is also the default if neither is given.
        vocab_size: number of tokens; ids must be from 0 to `vocab_size - 1`. None permits all values of the dtype.

    Example:
        >>> Tokens(vocab_size=50_257)
        Tokens(dtype='uint16', vocab_size=50257)
        >>> Tokens(vocab_size=50_257).encode([464, 3797])
        b'\xd0\x01\xd5\x0e'
    """

    dtype: str | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            object.__setattr__(self, "vocab_size", checked_int(self.vocab_size, "Tokens: vocab_size"))
            if not 1 <= self.vocab_size <= np.iinfo(np.int64).max:
                raise SchemaError(
                    f"Tokens: vocab_size is {self.vocab_size}; want the number of tokens, from 1 to 2**63-1"
                )
        dtype = _dtype_of_ids(self.vocab_size) if self.dtype is None else checked_dtype(self.dtype, "Tokens")
        if dtype_of(dtype).kind not in "iu":
            raise SchemaError(f"Tokens: dtype is {self.dtype!r}; want one of int8 to int64, uint8 to uint64")
        object.__setattr__(self, "dtype", dtype)
        if self.vocab_size is not None and self.vocab_size - 1 > np.iinfo(dtype).max:
            raise SchemaError(f"Tokens: {dtype} does not hold the ids of vocab_size={self.vocab_size}; leave dtype out")

    @property
    def type(self) -> ArrowType:
        return ArrowType(str(self.dtype), (None,), is_raw=True)

    def encode(self, value: Any) -> Column:
        ids = self._array(value)
        low, high = self._bounds
        wrong = np.flatnonzero((ids < low) | (ids > high))
        if len(wrong):
            remedy = f"ids run from {low} to {high}: declare a larger vocab_size or another dtype"
            raise mismatch(self, f"token {wrong[0]} = {ids[wrong[0]]}", remedy)
        return _to_column(ids.astype(self.dtype), "bytes")

    def encode_many(self, values: Any) -> Any:
        ids = _integers_of(values)
        if ids is None or not self._holds(ids) or not _are_flat(values):
            return Feature.encode_many(self, values)  # supports lists, and names the token that does not fit
        lengths = values.lengths if isinstance(values, RaggedColumn) else np.fromiter(map(len, values), np.int64)
        return _block_column(ids.reshape(-1).astype(self.dtype), lengths, "bytes")

    def decode(self, column: Column) -> np.ndarray:
        return _from_column(column, np.dtype(self.dtype))

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return _block_of(column, (None,), str(self.dtype))

    def observe(self, column: Any) -> FieldStatistics:
        return {"tokens": Numbers.of(_item_counts(column, str(self.dtype)), with_bins=True)}

    def declared(self) -> str:
        return f"{self.dtype} tokens (?,)" + ("" if self.vocab_size is None else f" of {self.vocab_size}")

    @property
    def _bounds(self) -> tuple[int, int]:
        """The smallest and the largest allowed id."""
        if self.vocab_size is not None:
            return 0, self.vocab_size - 1
        bounds = np.iinfo(str(self.dtype))
        return int(bounds.min), int(bounds.max)

    def _holds(self, ids: np.ndarray) -> bool:
        low, high = self._bounds
        return not ids.size or (int(ids.min()) >= low and int(ids.max()) <= high)

    def _array(self, value: Any) -> np.ndarray:
        """Return the ids as integers (n,) of any dtype."""
        if isinstance(value, (list, tuple)):
            for place, one in enumerate(() if set(map(type, value)) <= {int} else value):
                if not isinstance(one, (int, np.integer)) or isinstance(one, bool):
                    raise mismatch(self, f"{one!r} ({type(one).__name__}) as token {place}", "give ids as int")
            try:
                return np.array(value, np.int64)
            except OverflowError:
                return np.array(value, object)
        found = array_of(self, value)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            remedy = "give integers (n,): a list of int, or an array"
            raise mismatch(self, f"{found.dtype.name} {shape_text(found.shape)}", remedy)
        return found


def _dtype_of_ids(vocab_size: int | None) -> str:
    """Return the smallest dtype that holds all ids; not uint32, which `tf.io.decode_raw` and TFDS lack."""
    if vocab_size is None:
        return "int32"
    return next((dtype for dtype in ("uint8", "uint16", "int32") if vocab_size - 1 <= np.iinfo(dtype).max), "int64")


def _are_flat(values: Any) -> bool:
    """Return True if all arrays of a block's column have one dimension."""
    if isinstance(values, RaggedColumn):
        return values.values.ndim == 1
    return values.ndim == 2 if isinstance(values, np.ndarray) else all(value.ndim == 1 for value in values)


def _is_raw_by_default(shape: Shape, dtype: str) -> bool:
    """Return True if numbers of this shape are stored as bytes by default.

    Lists of wider integers, (None,), stay numbers: most are ids or counts, which varints hold in one to three bytes. As
    bytes, tokens below 50,000 would take 1.3 to 2.1 times the space in int32, 2 to 4.1 times in int64, for a third of
    the time to read (docs/formats.md). float16 would take four bytes as a number.
    """
    if dtype == "float16":
        return True
    if dtype_of(dtype).kind not in "iub":
        return False
    num_open = shape.count(None)
    is_narrow = dtype_of(dtype).itemsize <= 2
    is_many = math.prod(size for size in shape if size is not None) > _MOST_LISTED
    return is_many or num_open > 1 or (num_open == 1 and is_narrow)


_CHANNELS = (1, 3)
_SLICES = 4  # drawn slices of a volume or frames of a clip
_LEAST_PIXELS, _LEAST_MAP = 8, 16  # smaller dimensions are not those of a picture; matrices are drawn from 16 on


def _looks_like_pixels(shape: Shape) -> bool:
    """Return True if arrays of a shape look like maps, volumes or frames rather than plain numbers."""
    if len(shape) == 2:
        return all(size is not None and size >= _LEAST_MAP for size in shape)
    sizes = list(shape)
    if len(sizes) > 2 and sizes[-1] in _CHANNELS:
        sizes.pop()
    elif len(sizes) > 2 and (sizes[0] in _CHANNELS or (len(sizes) == 4 and (sizes[0] or 0) < _LEAST_PIXELS)):
        sizes.pop(0)
    if not 2 <= len(sizes) <= 3 or len(shape) > 4:
        return False
    least = (_SLICES, _LEAST_PIXELS, _LEAST_PIXELS)[-len(sizes) :]
    return all(size is None or size >= few for size, few in zip(sizes, least, strict=True))


def side_by_side(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Join pictures of equal size, uint8 (height, width, channels), side by side, with white gaps."""
    height, width, channels = pictures[0].shape
    gap = np.full((height, max(width // 40, 1), channels), 255, np.uint8)
    row = [part for picture in pictures for part in (gap, picture)]
    return np.concatenate(row[1:], axis=1)


def _utf8(feature: Feature, text: str, where: str = "") -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = f"{text!r}{where}, which UTF-8 cannot hold"
        raise mismatch(feature, found, "replace the lone surrogate") from error


def _scalar_of(feature: Feature, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `value` as a 0-d array of `dtype`; refuse it if it would change by more than rounding to a float32."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise mismatch(feature, f"{value!r} ({value.dtype.name})", "cast it in read")
        return np.asarray(value)
    fits = _PYTHON_TYPES[dtype.kind]
    if not isinstance(value, fits) or (isinstance(value, bool) and dtype.kind != "b"):
        raise mismatch(feature, f"{value!r} ({type(value).__name__})", "cast it in read")
    try:
        if dtype.kind in "biu" or dtype.char == "d":  # nothing overflows to infinity
            found = np.asarray(value, dtype)
        else:
            with np.errstate(over="ignore"):
                found = np.asarray(value, dtype)
    except OverflowError as error:
        raise mismatch(feature, f"{value!r}, which does not fit", "declare a wider dtype") from error
    if _is_changed(value, found):
        raise mismatch(feature, f"{value!r}, which does not fit", "declare a wider dtype")
    return found


def _is_changed(value: Any, found: np.ndarray) -> bool:
    """Return True if conversion changed a number; only rounding of floats is permitted."""
    if isinstance(value, int):
        return bool(found.item() != value)
    return bool(not np.isfinite(found) and np.isfinite(value))


def _without_items(value: Any, shape: Shape, dtype: str) -> Any:
    """Convert a list without items to an array; return other values unchanged."""
    if not isinstance(value, (list, tuple)) or value or shape[:1] != (None,):
        return value
    return np.empty((0, *(size or 0 for size in shape[1:])), dtype_of(dtype))


def _stacked(
    feature: Feature, values: Any, shape: Shape, dtype: np.dtype[Any]
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Concatenate the numbers of n arrays.

    Args:
        feature: feature of the field, for messages.
        values: an array (n, ...), a `RaggedColumn` of values (total, ...), or a sequence of n arrays.
        shape: required shape of each value.
        dtype: required dtype of every value; nothing is converted.

    Returns:
        Numbers (n, k) and None if all values have one shape; otherwise numbers (total,) and the size of each value,
        int64 (n,). Then the shape of each value, int64 (n, number of dimensions).

    Raises:
        SchemaError: a value has another shape or dtype.
    """
    if isinstance(values, np.ndarray) and values.dtype != object:
        check_array(feature, values.dtype, values.shape, (None, *shape), dtype)
        shapes = np.tile(np.array(values.shape[1:], np.int64), (len(values), 1))
        return values.reshape(len(values), math.prod(values.shape[1:])), None, shapes
    if isinstance(values, RaggedColumn):
        inner = values.values.shape[1:]
        for length in np.unique(values.lengths).tolist():
            check_array(feature, values.values.dtype, (length, *inner), shape, dtype)
        sizes = [np.full(len(values), size) for size in inner]
        return values.values.reshape(-1), values.lengths * math.prod(inner), np.stack([values.lengths, *sizes], axis=1)
    for found_dtype, found in dict.fromkeys(
        (array.dtype, array.shape) for array in (array_of(feature, value) for value in values)
    ):
        check_array(feature, found_dtype, found, shape, dtype)
    shapes = np.array([value.shape for value in values], np.int64).reshape(len(values), len(shape))
    numbers = np.concatenate([np.empty(0, dtype), *(value.reshape(-1) for value in values)])
    return numbers, shapes.prod(axis=1), shapes


def _block_column(numbers: np.ndarray, lengths: np.ndarray | None, kind: Kind) -> Any:
    """Return a column of a block from numbers (n, k), or from numbers (total,) and their number per record."""
    data = np.ascontiguousarray(numbers, DTYPE_OF_KIND.get(kind, numbers.dtype.newbyteorder("<")))
    if kind != "bytes":
        return data if lengths is None else RaggedColumn(data, lengths)
    return RawColumn(data.reshape(-1), np.full(len(data), data.shape[1]) if lengths is None else lengths)


def numbers_in(values: Sequence[Any], dtype: np.dtype[Any]) -> np.ndarray | None:
    """Return plain numbers as an array (n,) of a dtype; None if one might not fit."""
    types = set(map(type, values))
    if types == {dtype.type}:
        return np.array(values, dtype)
    if types == {bool} and dtype.kind == "b":
        return np.array(values, dtype)
    if types == {int} and dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return np.array(values, dtype) if bounds.min <= min(values) and max(values) <= bounds.max else None
    if types == {float} and dtype.kind in "fV":
        with np.errstate(over="ignore"):
            found = np.array(values, dtype)
        return found if np.isfinite(found).all() else None
    return None


def _integers_of(values: Any) -> np.ndarray | None:
    """Return all numbers of a column of a block if they are integers in arrays."""
    if isinstance(values, RaggedColumn):
        values = values.values
    elif not isinstance(values, np.ndarray):
        if not all(isinstance(value, np.ndarray) for value in values) or not len(values):
            return None
        if len({value.dtype for value in values}) > 1:
            return None
        values = np.concatenate([value.reshape(-1) for value in values])
    return values if values.dtype.kind in "iu" else None


def _rectangle(corners: np.ndarray) -> list[float]:
    """Return the rotated box of four corners, (4, 2) in order; the smallest enclosing one if they form no rectangle."""
    across, down = corners[1] - corners[0], corners[3] - corners[0]
    width, height = float(np.hypot(*across)), float(np.hypot(*down))
    is_parallel = np.abs(corners[0] + corners[2] - corners[1] - corners[3]).max() <= _ROUNDING * (width + height)
    if is_parallel and abs(float(across @ down)) <= _ROUNDING * max(width * height, 1e-12):
        return [*corners.mean(axis=0).tolist(), width, height, math.degrees(math.atan2(across[1], across[0]))]
    import cv2

    (x, y), (width, height), angle = cv2.minAreaRect(corners.astype(np.float32))
    quarters = round((math.degrees(math.atan2(across[1], across[0])) - angle) / 90)
    if quarters % 2:  # "width" is the side closest to the former width
        width, height = height, width
    angle += 90 * quarters
    return [x, y, width, height, (angle + 180) % 360 - 180]


def _are_boxes(boxes: np.ndarray) -> np.ndarray:
    """Return bool (n,): which boxes are valid: in [0, 1] with min <= max, or rotated with non-negative sizes."""
    if boxes.shape[1] == 5:
        return np.asarray(np.isfinite(boxes).all(1) & (boxes[:, 2:4] >= 0).all(1))
    return np.asarray((boxes >= 0).all(1) & (boxes <= 1).all(1) & (boxes[:, 2:] >= boxes[:, :2]).all(1))


def _to_column(flat: np.ndarray, kind: Kind) -> Column:
    if kind == "bytes":
        return np.ascontiguousarray(flat, flat.dtype.newbyteorder("<")).tobytes()
    return flat.astype(DTYPE_OF_KIND[kind], copy=False)


def _only(numbers: np.ndarray) -> Any:
    if len(numbers) != 1:
        raise ValueError(f"{len(numbers)} values, not one")
    return numbers[0]


def _from_column(column: Column, dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column.astype(dtype)
    data = column if isinstance(column, bytes) else column[0]
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)


def _block_of(column: ColumnBlock, shape: Shape, dtype: str) -> np.ndarray | list[Any]:
    """Return n values of a shape with at most one open size: an array (n, ...), or a list if a size is open."""
    if isinstance(column, np.ndarray) and None not in shape:
        return column.astype(dtype_of(dtype), copy=False).reshape(len(column), *shape)
    found = _numbers_of(column, dtype)
    known = math.prod(size for size in shape if size is not None)
    if None not in shape:
        return found.matrix(known).reshape(len(found), *shape)  # -1 fails where a size is 0
    if (found.lengths % known).any():
        raise SchemaError(f"a record holds a number of values that is not a multiple of {known}")
    sizes = tuple(-1 if size is None else size for size in shape)
    return found.rows() if len(shape) == 1 else [row.reshape(sizes) for row in found.rows()]


def _numbers_of(column: ColumnBlock, dtype: str) -> RaggedColumn:
    column = ragged(column)
    if isinstance(column, RaggedColumn):
        return RaggedColumn(column.values.astype(dtype_of(dtype), copy=False), column.lengths)
    stored = dtype_of(dtype).newbyteorder("<")
    lengths = np.fromiter(map(len, column), np.int64, len(column))
    if (lengths % stored.itemsize).any():
        raise SchemaError(f"a record holds a number of bytes that is not a multiple of {stored.itemsize}")
    values = np.frombuffer(b"".join(column), stored).astype(dtype_of(dtype))  # type: ignore[arg-type]
    return RaggedColumn(values, lengths // stored.itemsize)


def _item_counts(column: ColumnBlock, dtype: str) -> np.ndarray:
    """Return the number of values in each of n records, int64 (n,)."""
    if isinstance(column, RaggedColumn):
        return column.lengths
    return np.fromiter(map(len, column), np.int64, len(column)) // dtype_of(dtype).itemsize


def _lengths(values: Any) -> Numbers:
    """Return the lengths of n values."""
    return Numbers.of(np.fromiter(map(len, values), np.int64, len(values)), with_bins=True)


built_in(BBoxes, Bytes, ClassLabel, Json, Scalar, Tensor, Text, Timestamp, Tokens)
