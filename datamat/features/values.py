"""Numbers, labels, boxes and text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from datamat.errors import SchemaError
from datamat.features.base import (
    Column,
    Feature,
    Kind,
    Shape,
    array_of,
    check_array,
    checked_int,
    checked_names,
    checked_shape,
    mismatch,
    one_bytes,
    shape_text,
    some,
)

__all__ = ["BBoxes", "ClassLabel", "Scalar", "Tensor", "Text"]

# How each dtype travels. Exact always: int64 holds every smaller integer, float32 every float16; what neither
# holds goes as little-endian bytes (`tf.io.decode_raw` reads them).
_KIND_OF_DTYPE: dict[str, Kind] = {
    **dict.fromkeys(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"], "int64"),
    **dict.fromkeys(["float16", "float32"], "float32"),
    **dict.fromkeys(["float64", "uint64", "complex64", "complex128"], "bytes"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ClassLabel(Feature):
    """A class id, or a list of them: int64, with the names of the classes.

    A sample holds an id or a name (or a sequence of either, with `shape=(None,)`); it reads back as int64.

    Args:
        names: class names in the order of the ids.
        num_classes: instead of names, where classes have none.
        shape: () for one label, (None,) for a list of any length.

    Example:
        >>> ClassLabel(names=("cat", "dog")).encode("label", "dog")
        {'label': array([1])}
    """

    names: tuple[str, ...] = ()
    num_classes: int | None = None
    shape: Shape = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "ClassLabel"))
        object.__setattr__(self, "names", checked_names(self.names, "ClassLabel"))
        if len(self.shape) > 1:
            raise SchemaError(f"ClassLabel: shape is {self.shape}; want () or (None,)")
        if self.num_classes is None:
            object.__setattr__(self, "num_classes", len(self.names))
        object.__setattr__(self, "num_classes", checked_int(self.num_classes, "ClassLabel: num_classes"))
        if self.names and len(self.names) != self.num_classes:
            raise SchemaError(f"ClassLabel: {len(self.names)} names for num_classes={self.num_classes}")
        if not self.num_classes or self.num_classes < 1:
            raise SchemaError("ClassLabel: no classes; give names=(...) or num_classes=")

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "int64"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if not self.shape:
            return {name: np.array([self._id(name, value)], np.int64)}
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)) or np.ndim(value) == 0:
            raise mismatch(name, self, f"a {type(value).__name__}", "give a list of labels")
        ids = np.array([self._id(name, item) for item in value], np.int64)
        check_array(name, self, ids.dtype, ids.shape, self.shape, ids.dtype)
        return {name: ids}

    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        ids = np.asarray(columns[name], np.int64)
        return ids if self.shape else _only(ids)

    def declared(self) -> str:
        size = self.shape[0] if self.shape else None
        many = f"list of {'' if size is None else f'{size} '}" if self.shape else ""
        return f"{many}int64 class id of {self.num_classes} classes"

    def _id(self, name: str, value: Any) -> int:
        if isinstance(value, str):
            if value not in self.names:
                raise mismatch(name, self, f"the name {value!r}", f"use one of {some(self.names)}")
            return self.names.index(value)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise mismatch(name, self, f"{value!r} ({type(value).__name__})", "give an int or a class name")
        if not 0 <= value < (self.num_classes or 0):
            raise mismatch(name, self, f"class id {value}", "declare the class, or map the id in read")
        return int(value)


@dataclasses.dataclass(frozen=True, slots=True)
class BBoxes(Feature):
    """Boxes of one image: float32 (n, 4), each (ymin, xmin, ymax, xmax) as a fraction of height and width.

    The layout of `tfds.features.BBoxFeature` (REL_YXYX), so that the boxes stay right when the image is resized.

    Example:
        >>> BBoxes().encode("boxes", np.array([[0, 0, 0.5, 1]], np.float32))
        {'boxes': array([0. , 0. , 0.5, 1. ], dtype=float32)}
    """

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "float32"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        boxes = np.zeros((0, 4), np.float32) if isinstance(value, (list, tuple)) and not value else value
        boxes = array_of(name, self, boxes)
        check_array(name, self, boxes.dtype, boxes.shape, (None, 4), np.dtype(np.float32))
        good = (boxes >= 0).all(1) & (boxes <= 1).all(1) & (boxes[:, 2:] >= boxes[:, :2]).all(1)
        if not good.all():
            place = int(np.flatnonzero(~good)[0])
            raise mismatch(
                name,
                self,
                f"box {place} = {boxes[place].tolist()}",
                "clip it to [0, 1] with min <= max in read",
            )
        return {name: _to_column(boxes.reshape(-1), "float32")}

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        return np.asarray(columns[name], np.float32).reshape(-1, 4)

    def declared(self) -> str:
        return "float32 (n, 4) of (ymin, xmin, ymax, xmax) in [0, 1]"


@dataclasses.dataclass(frozen=True, slots=True)
class Text(Feature):
    """A string, stored as UTF-8."""

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "bytes"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if not isinstance(value, str):
            raise mismatch(name, self, f"{type(value).__name__}", "give a str; decode bytes in read")
        try:
            return {name: value.encode()}
        except UnicodeEncodeError as error:
            raise mismatch(name, self, f"{value!r}, which UTF-8 cannot hold", "replace the lone surrogate") from error

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        if set(map(type, values)) <= {str}:
            try:
                return {name: list(map(str.encode, values))}
            except UnicodeEncodeError:
                pass  # found again below, with its value
        return {name: [self.encode(name, value)[name] for value in values]}

    def decode(self, name: str, columns: Mapping[str, Column]) -> str:
        return one_bytes(name, columns).decode()

    def declared(self) -> str:
        return "str"


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar(Feature):
    """One number or truth value of a numpy dtype, stored exactly.

    float64 and uint64, which a `tf.train.Example` cannot hold as numbers, go as eight little-endian bytes.

    Args:
        dtype: name of a numpy dtype: bool, int8 ... int64, uint8 ... uint64, float16, float32, float64.

    Example:
        >>> Scalar("int32").encode("id", 7)
        {'id': array([7])}
    """

    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype, "Scalar"))

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: _KIND_OF_DTYPE[self.dtype]}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        found = _scalar_of(name, self, value, np.dtype(self.dtype))
        return {name: _to_column(found.reshape(1), _KIND_OF_DTYPE[self.dtype])}

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        kind = _KIND_OF_DTYPE[self.dtype]
        values = array_of(name, self, values)
        check_array(name, self, values.dtype, values.shape, (None,), np.dtype(self.dtype))
        if kind == "bytes":
            return {name: [value.tobytes() for value in values.astype(values.dtype.newbyteorder("<"))]}
        return {name: _to_column(values, kind)}

    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        return _only(_from_column(columns[name], self.dtype))

    def declared(self) -> str:
        return f"{self.dtype} scalar"


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor(Feature):
    """An array of a numpy dtype, stored exactly.

    Where the number of values does not give the shape (several None, or a None beside a 0), the shape of each value is
    stored beside it in the column `NAME/shape`.

    Args:
        shape: None where a dimension varies.
        dtype: name of a numpy dtype.
        encoding: "list" stores numbers as numbers (readable by `tf.io.parse_example` as they are), "raw" as
            little-endian bytes, smaller and faster for large arrays of small integers. None: "list" where exact.

    Example:
        >>> Tensor((2,), "float32").encode("point", np.array([1, 2], np.float32))
        {'point': array([1., 2.], dtype=float32)}
    """

    shape: Shape = (None,)
    dtype: str = "float32"
    encoding: Literal["list", "raw"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Tensor"))
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype, "Tensor"))
        if self.encoding not in {None, "list", "raw"}:
            raise SchemaError(f"Tensor: encoding is {self.encoding!r}; want 'list', 'raw' or None")
        if self.encoding == "list" and _KIND_OF_DTYPE[self.dtype] == "bytes":
            raise SchemaError(f"Tensor: {self.dtype} cannot be stored exactly as a list; leave encoding out")

    @property
    def _kind(self) -> Kind:
        return "bytes" if self.encoding == "raw" else _KIND_OF_DTYPE[self.dtype]

    @property
    def keeps_shape(self) -> bool:
        """Whether the shape of each value is stored beside it."""
        return self.shape.count(None) > (0 if 0 in self.shape else 1)

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: self._kind, **({f"{name}/shape": "int64"} if self.keeps_shape else {})}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        array = array_of(name, self, value)
        check_array(name, self, array.dtype, array.shape, self.shape, np.dtype(self.dtype))
        columns = {name: _to_column(array.reshape(-1), self._kind)}
        if self.keeps_shape:
            columns[f"{name}/shape"] = np.array(array.shape, np.int64)
        return columns

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        flat = _from_column(columns[name], self.dtype)
        if self.keeps_shape:
            return flat.reshape(tuple(int(size) for size in columns[f"{name}/shape"]))
        if None not in self.shape:
            return flat.reshape(self.shape)  # type: ignore[arg-type]
        known = int(np.prod([size for size in self.shape if size is not None]))
        return flat.reshape([flat.size // known if size is None else size for size in self.shape])

    def declared(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}"


def _checked_dtype(dtype: Any, where: str) -> str:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in _KIND_OF_DTYPE:
        raise SchemaError(f"{where}: dtype is {dtype!r}; want one of {some(_KIND_OF_DTYPE)}")
    return str(name)


def _scalar_of(name: str, feature: Feature, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `value` as a 0-d array of `dtype`, refusing what would change it (a float32 of a float excepted)."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise mismatch(name, feature, f"{value!r} ({value.dtype.name})", "cast it in read")
        return np.asarray(value)
    fits = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "c": (int, float, complex)}[dtype.kind]
    if not isinstance(value, fits) or (isinstance(value, bool) and dtype.kind != "b"):
        raise mismatch(name, feature, f"{value!r} ({type(value).__name__})", "cast it in read")
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(value, dtype)
    except OverflowError as error:
        raise mismatch(name, feature, f"{value!r}, which does not fit", "declare a wider dtype") from error
    if _is_changed(value, found):
        raise mismatch(name, feature, f"{value!r}, which does not fit", "declare a wider dtype")
    return found


def _is_changed(value: Any, found: np.ndarray) -> bool:
    """Tell whether a number is another one now: rounding a float is what its declaration asks for, no more."""
    if isinstance(value, int):
        return bool(found.item() != value)
    return bool(np.isfinite(value) and not np.isfinite(found))


def _to_column(flat: np.ndarray, kind: Kind) -> Column:
    if kind == "bytes":
        return np.ascontiguousarray(flat, flat.dtype.newbyteorder("<")).tobytes()
    return flat.astype(np.int64 if kind == "int64" else np.float32, copy=False)


def _only(numbers: np.ndarray) -> Any:
    if len(numbers) != 1:
        raise ValueError(f"{len(numbers)} values, not one")
    return numbers[0]


def _from_column(column: Column, dtype: str) -> np.ndarray:
    if isinstance(column, bytes):
        return np.frombuffer(column, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    if isinstance(column, np.ndarray):
        return column.astype(dtype)
    return np.frombuffer(column[0], np.dtype(dtype).newbyteorder("<")).astype(dtype)
