"""What a sample holds: the schema of a dataset, declared once.

A `Features` maps each field to a feature type. A type checks a value, encodes it into columns of one of three
kinds (`bytes`, `int64`, `float32`: what a `tf.train.Example` can hold) and decodes it again. Formats see columns
only; users see arrays only.

    sample value  --encode-->  columns  --format-->  record bytes  --format-->  columns  --decode-->  sample value

Every mismatch between a sample and its declaration is a `SchemaError` that names the field, what is declared and
what was found.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from datamat import codecs
from datamat.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BBoxes",
    "ClassLabel",
    "Column",
    "Feature",
    "Features",
    "Image",
    "Mask",
    "Scalar",
    "Tensor",
    "Text",
]

Column: TypeAlias = bytes | Sequence[bytes] | np.ndarray
"""One encoded column of one record: one bytes value, several, or a 1-D int64 or float32 array."""

Kind: TypeAlias = Literal["bytes", "int64", "float32"]
Shape: TypeAlias = tuple[int | None, ...]

_IGNORED_CLASS = 255
"""The class id that segmentation sets use for `not labelled`, and that transforms fill borders with."""

# How each dtype travels. Exact always: int64 holds every smaller integer, float32 every float16; what neither
# holds goes as little-endian bytes (`tf.io.decode_raw` reads them).
_KIND_OF_DTYPE: dict[str, Kind] = {
    **dict.fromkeys(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"], "int64"),
    **dict.fromkeys(["float16", "float32"], "float32"),
    **dict.fromkeys(["float64", "uint64", "complex64", "complex128"], "bytes"),
}


class Feature(abc.ABC):
    """One field of a sample: its declaration, check, encoding and decoding.

    Implementations are immutable values: they compare by their declaration, pickle, and are safe to share.
    """

    @abc.abstractmethod
    def columns(self, name: str) -> dict[str, Kind]:
        """Return the columns that field `name` is stored in, with their kinds."""

    @abc.abstractmethod
    def encode(self, name: str, value: Any) -> dict[str, Column]:
        """Return the columns of one value; raise `SchemaError` where it is not as declared."""

    @abc.abstractmethod
    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        """Return the value that `encode` was given, from its columns."""

    def prepare(self, name: str, value: Any) -> Any:
        """Return `value` as a transform wants it: decoded, if it came as encoded bytes."""
        del name
        return value

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        """Return the columns of n values at once; only numbers and strings go in blocks.

        Args:
            name: of the field.
            values: an array (n,) of the declared dtype, or n strings.
        """
        raise SchemaError(f"field {name!r} is declared {self.declared()}, which does not go in blocks; use read")

    @abc.abstractmethod
    def declared(self) -> str:
        """Return the declaration as messages show it: `uint8 (360, 480, 3)`."""

    def to_json(self) -> dict[str, Any]:
        """Return the declaration as JSON values, with its type's name under `type`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"type": type(self).__name__, **{name: _plain(value) for name, value in fields.items()}}


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Feature):
    """A picture: uint8 (height, width, channels), channels in RGB or RGBA order.

    A sample holds it as an array, or as the `bytes` of a PNG or JPEG file. Bytes that every decoder reads alike
    are stored untouched; others (EXIF-rotated, palette, ...) are decoded and encoded again.

    Args:
        shape: (height, width, channels); None where it varies. channels is 1, 3 or 4.
        encoding: how arrays are stored: "png" (exact) or "jpeg" (smaller; the pixels change a little).
        quality: of JPEG, 1 to 100.

    Example:
        >>> Image(shape=(360, 480, 3), encoding="jpeg").declared()
        'uint8 (360, 480, 3)'
    """

    shape: Shape = (None, None, 3)
    encoding: Literal["png", "jpeg"] = "png"
    quality: int = 95

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.shape, "Image"))
        if len(self.shape) != 3 or self.shape[2] not in {1, 3, 4}:
            raise SchemaError(f"Image: shape is {self.shape}; want (height, width, channels) with 1, 3 or 4 channels")
        if self.encoding not in {"png", "jpeg"}:
            raise SchemaError(f"Image: encoding is {self.encoding!r}; want 'png' or 'jpeg'")
        if self.encoding == "jpeg" and self.shape[2] == 4:
            raise SchemaError("Image: JPEG holds no alpha channel; declare encoding='png' or three channels")
        if not 1 <= self.quality <= 100:
            raise SchemaError(f"Image: quality is {self.quality}; want 1 to 100")

    @property
    def channels(self) -> int:
        """Number of channels: 1, 3 or 4."""
        return int(self.shape[2] or 3)

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "bytes"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if isinstance(value, bytes):
            info = codecs.probe(value, name=name)
            upright = (info.height, info.width) if info.orientation < 5 else (info.width, info.height)
            if codecs.can_keep_image(info, channels=self.channels):
                _check_array(name, self, np.uint8, (*upright, self.channels), self.shape, np.dtype(np.uint8))
                codecs.check_complete(value, info, name=name)
                return {name: value}
            value = self.prepare(name, value)
        value = _array_of(name, self, value)
        _check_array(name, self, value.dtype, value.shape, self.shape, np.dtype(np.uint8))
        if self.encoding == "jpeg":
            return {name: codecs.encode_jpeg(value, quality=self.quality)}
        return {name: codecs.encode_png(value)}

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        return codecs.decode_image(_one_bytes(name, columns), channels=self.channels, name=name)

    def prepare(self, name: str, value: Any) -> Any:
        if isinstance(value, bytes):
            return codecs.decode_image(value, channels=self.channels, name=name)
        return value

    def declared(self) -> str:
        return f"uint8 {_shape_text(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Mask(Feature):
    """Class ids per pixel: uint8 (height, width), stored as PNG, always exact.

    A sample holds it as an array, or as the `bytes` of a PNG file: 8-bit grey bytes are stored untouched, palette
    and 1, 2 or 4 bit files are stored as what they mean, the ids.

    Args:
        shape: (height, width); None where it varies.
        names: class names in the order of the ids; an array with an id past them is refused, except 255, which
            segmentation sets keep for `not labelled`. Empty: every id is fine.
        palette: one (red, green, blue) per class, for drawing.

    Example:
        >>> Mask(names=("road", "car")).declared()
        'uint8 (height, width) of 2 classes'
    """

    shape: Shape = (None, None)
    names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _checked_shape(self.shape, "Mask"))
        object.__setattr__(self, "names", _checked_names(self.names, "Mask"))
        object.__setattr__(self, "palette", tuple((int(r), int(g), int(b)) for r, g, b in self.palette))
        if len(self.shape) != 2:
            raise SchemaError(f"Mask: shape is {self.shape}; want (height, width)")
        if len(self.names) > 256:
            raise SchemaError(f"Mask: {len(self.names)} class names; uint8 ids go to 255")
        if self.palette and self.names and len(self.palette) < len(self.names):
            raise SchemaError(f"Mask: {len(self.palette)} palette colours for {len(self.names)} class names")

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "bytes"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if isinstance(value, bytes):
            info = codecs.probe(value, name=name)
            if codecs.can_keep_mask(info):
                _check_array(name, self, np.uint8, (info.height, info.width), self.shape, np.dtype(np.uint8))
                codecs.check_complete(value, info, name=name)
                return {name: value}
            value = self.prepare(name, value)
        value = _array_of(name, self, value)
        _check_array(name, self, value.dtype, value.shape, self.shape, np.dtype(np.uint8))
        self._check_ids(name, value)
        return {name: codecs.encode_png(value)}

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        return codecs.decode_mask(_one_bytes(name, columns), name=name)

    def prepare(self, name: str, value: Any) -> Any:
        return codecs.decode_mask(value, name=name) if isinstance(value, bytes) else value

    def declared(self) -> str:
        shape = "(height, width)" if self.shape == (None, None) else _shape_text(self.shape)
        return f"uint8 {shape}" + (f" of {len(self.names)} classes" if self.names else "")

    def _check_ids(self, name: str, mask: np.ndarray) -> None:
        if not self.names or mask.size == 0 or int(mask.max()) < len(self.names):
            return
        wrong = (mask >= len(self.names)) & (mask != _IGNORED_CLASS)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise SchemaError(
                f"field {name!r} is declared {self.declared()} but pixel (row {row}, column {column}) holds class id "
                f"{int(mask[row, column])}; declare the class, or map the id in read (255 is free for `not labelled`)"
            )


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
        object.__setattr__(self, "shape", _checked_shape(self.shape, "ClassLabel"))
        object.__setattr__(self, "names", _checked_names(self.names, "ClassLabel"))
        if len(self.shape) > 1:
            raise SchemaError(f"ClassLabel: shape is {self.shape}; want () or (None,)")
        if self.num_classes is None:
            object.__setattr__(self, "num_classes", len(self.names))
        elif self.names and len(self.names) != self.num_classes:
            raise SchemaError(f"ClassLabel: {len(self.names)} names for num_classes={self.num_classes}")
        if not self.num_classes or self.num_classes < 1:
            raise SchemaError("ClassLabel: no classes; give names=(...) or num_classes=")

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "int64"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if not self.shape:
            return {name: np.array([self._id(name, value)], np.int64)}
        if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
            raise _mismatch(name, self, f"a {type(value).__name__}", "give a list of labels")
        ids = np.array([self._id(name, item) for item in value], np.int64)
        _check_array(name, self, ids.dtype, ids.shape, self.shape, ids.dtype)
        return {name: ids}

    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        ids = np.asarray(columns[name], np.int64)
        return ids if self.shape else ids[0]

    def declared(self) -> str:
        return f"{'list of ' if self.shape else ''}int64 class id of {self.num_classes} classes"

    def _id(self, name: str, value: Any) -> int:
        if isinstance(value, str):
            if value not in self.names:
                raise _mismatch(name, self, f"the name {value!r}", f"use one of {_some(self.names)}")
            return self.names.index(value)
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise _mismatch(name, self, f"{value!r} ({type(value).__name__})", "give an int or a class name")
        if not 0 <= value < (self.num_classes or 0):
            raise _mismatch(name, self, f"class id {value}", "declare the class, or map the id in read")
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
        boxes = _array_of(name, self, boxes)
        _check_array(name, self, boxes.dtype, boxes.shape, (None, 4), np.dtype(np.float32))
        good = (boxes >= 0).all(1) & (boxes <= 1).all(1) & (boxes[:, 2:] >= boxes[:, :2]).all(1)
        if not good.all():
            place = int(np.flatnonzero(~good)[0])
            raise _mismatch(
                name,
                self,
                f"box {place} = {boxes[place].tolist()}",
                "clip it to [0, 1] with min <= max in read",
            )
        return {name: np.ascontiguousarray(boxes).reshape(-1)}

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
            raise _mismatch(name, self, f"{type(value).__name__}", "give a str; decode bytes in read")
        try:
            return {name: value.encode()}
        except UnicodeEncodeError as error:
            raise _mismatch(name, self, f"{value!r}, which UTF-8 cannot hold", "replace the lone surrogate") from error

    def encode_block(self, name: str, values: Any) -> dict[str, Any]:
        return {name: [self.encode(name, value)[name] for value in values]}

    def decode(self, name: str, columns: Mapping[str, Column]) -> str:
        return _one_bytes(name, columns).decode()

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
        values = _array_of(name, self, values)
        _check_array(name, self, values.dtype, values.shape, (None,), np.dtype(self.dtype))
        if kind == "bytes":
            return {name: [value.tobytes() for value in values.astype(values.dtype.newbyteorder("<"))]}
        return {name: _to_column(values, kind)}

    def decode(self, name: str, columns: Mapping[str, Column]) -> Any:
        return _from_column(columns[name], self.dtype)[0]

    def declared(self) -> str:
        return f"{self.dtype} scalar"


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor(Feature):
    """An array of a numpy dtype, stored exactly.

    With more than one None in its shape, the shape of each value is stored beside it in the column `NAME/shape`.

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
        object.__setattr__(self, "shape", _checked_shape(self.shape, "Tensor"))
        object.__setattr__(self, "dtype", _checked_dtype(self.dtype, "Tensor"))
        if self.encoding not in {None, "list", "raw"}:
            raise SchemaError(f"Tensor: encoding is {self.encoding!r}; want 'list', 'raw' or None")
        if self.encoding == "list" and _KIND_OF_DTYPE[self.dtype] == "bytes":
            raise SchemaError(f"Tensor: {self.dtype} cannot be stored exactly as a list; leave encoding out")

    @property
    def _kind(self) -> Kind:
        return "bytes" if self.encoding == "raw" else _KIND_OF_DTYPE[self.dtype]

    @property
    def _keeps_shape(self) -> bool:
        return self.shape.count(None) > 1

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: self._kind, **({f"{name}/shape": "int64"} if self._keeps_shape else {})}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        array = _array_of(name, self, value)
        _check_array(name, self, array.dtype, array.shape, self.shape, np.dtype(self.dtype))
        columns = {name: _to_column(array.reshape(-1), self._kind)}
        if self._keeps_shape:
            columns[f"{name}/shape"] = np.array(array.shape, np.int64)
        return columns

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        flat = _from_column(columns[name], self.dtype)
        if self._keeps_shape:
            return flat.reshape(tuple(int(size) for size in columns[f"{name}/shape"]))
        if None not in self.shape:
            return flat.reshape(self.shape)  # type: ignore[arg-type]
        known = int(np.prod([size for size in self.shape if size is not None]))
        return flat.reshape([flat.size // max(known, 1) if size is None else size for size in self.shape])

    def declared(self) -> str:
        return f"{self.dtype} {_shape_text(self.shape)}"


class Features(Mapping[str, Feature]):
    """The schema of a dataset: field name to feature type, always with the field `key`.

    A value: immutable, compares by content, goes to and from JSON. Names may hold `/` (`objects/bbox`).

    Args:
        fields: feature by name; `key` (a `Text`) is added where it is missing.

    Raises:
        SchemaError: a name is empty or odd, a value is not a feature, or two fields would share a column.

    Example:
        >>> features = Features({"image": Image(), "label": ClassLabel(names=("cat", "dog"))})
        >>> sorted(features)
        ['image', 'key', 'label']
        >>> Features.from_json(features.to_json()) == features
        True
    """

    __slots__ = ("_columns", "_fields")

    def __init__(self, fields: Mapping[str, Feature]) -> None:
        if not isinstance(fields, Mapping):
            raise SchemaError(f"features is a {type(fields).__name__}; want a dict of name to feature type")
        self._fields: dict[str, Feature] = {"key": Text(), **fields}
        self._columns: dict[str, Kind] = {}
        for name, feature in self._fields.items():
            _check_name(name, feature)
            for column, kind in feature.columns(name).items():
                if column in self._columns:
                    raise SchemaError(
                        f"field {name!r} needs the column {column!r}, which another field has; rename one"
                    )
                self._columns[column] = kind
        if not isinstance(self._fields["key"], Text):
            raise SchemaError(f"field 'key' is declared {self._fields['key'].declared()}; it must be Text()")

    def __getitem__(self, name: str) -> Feature:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self._fields == other._fields

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._columns)))

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{name}: {feature.declared()}' for name, feature in self._fields.items())})"

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The stored columns, by name, with their kinds."""
        return self._columns

    def encode(self, sample: Mapping[str, Any]) -> dict[str, Column]:
        """Return the columns of one sample.

        Args:
            sample: a value for every field, and nothing else.

        Raises:
            SchemaError: a field is missing, unknown, or not as declared.
            InputError: bytes of an image do not decode.
        """
        if sample.keys() != self._fields.keys():
            raise self._wrong_fields(sample)
        columns: dict[str, Column] = {}
        for name, feature in self._fields.items():
            columns.update(feature.encode(name, sample[name]))
        return columns

    def encode_block(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored columns of n samples given by columns: arrays (n,) and sequences of n bytes.

        Args:
            columns: for every field, an array (n,) of its dtype or n strings.

        Raises:
            SchemaError: a field is missing, unknown, not as declared, or of a kind that does not go in blocks.
        """
        if columns.keys() != self._fields.keys():
            raise self._wrong_fields(columns)
        if len({len(values) for values in columns.values()}) > 1:
            found = ", ".join(f"{name}: {len(values)}" for name, values in columns.items())
            raise SchemaError(f"the columns of a block differ in length ({found}); give one value per row in each")
        block: dict[str, Any] = {}
        for name, feature in self._fields.items():
            block.update(feature.encode_block(name, columns[name]))
        return block

    def decode(self, columns: Mapping[str, Column]) -> dict[str, Any]:
        """Return the sample whose columns these are.

        Raises:
            SchemaError: a declared column is missing.
            InputError: bytes of an image do not decode.
        """
        try:
            return {name: feature.decode(name, columns) for name, feature in self._fields.items()}
        except KeyError as error:
            raise SchemaError(
                f"the record has no column {error.args[0]!r}; it holds {_some(columns)}: was it written with other features?"
            ) from error

    def prepare(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sample with every encoded image and mask decoded, as transforms want it."""
        return {
            name: self._fields[name].prepare(name, value) if name in self._fields else value
            for name, value in sample.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {name: feature.to_json() for name, feature in self._fields.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Features:
        """Return the schema that `to_json` wrote.

        Raises:
            SchemaError: a type or an argument is unknown.
        """
        return cls({name: _feature_from_json(name, declaration) for name, declaration in value.items()})

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Features:
        """Return a schema that holds `sample` exactly: for functions that declare none.

        Arrays of uint8 (height, width, 3 or 4) become lossless images; dimensions other than the number of
        channels are left open. `bytes` must be a PNG or JPEG file.
        """
        return cls({name: _inferred(name, value) for name, value in sample.items() if name != "key"})

    def _wrong_fields(self, sample: Mapping[str, Any]) -> SchemaError:
        missing = sorted(self._fields.keys() - sample.keys())
        unknown = sorted(str(name) for name in sample.keys() - self._fields.keys())
        parts = [f"field {name!r} is declared {self[name].declared()} but the sample has none" for name in missing]
        parts += [f"field {name!r} is not declared but the sample holds it" for name in unknown]
        return SchemaError("; ".join(parts) + "; make read return exactly the declared fields")


def _feature_from_json(name: str, declaration: Mapping[str, Any]) -> Feature:
    arguments = dict(declaration)
    kind = arguments.pop("type", None)
    if kind not in _TYPES:
        raise SchemaError(f"field {name!r} has the type {kind!r}; want one of {_some(_TYPES)}")
    try:
        return _TYPES[kind](**{key: _tuples(value) for key, value in arguments.items()})
    except TypeError as error:
        raise SchemaError(f"field {name!r} of type {kind}: {error}") from error


def _inferred(name: str, value: Any) -> Feature:
    if isinstance(value, str):
        return Text()
    if isinstance(value, bytes):
        info = codecs.probe(value, name=name)
        return Image((None, None, 4 if info.alpha else 3))
    if isinstance(value, (bool, np.bool_)):
        return Scalar("bool")
    if isinstance(value, np.generic):
        return Scalar(value.dtype.name)
    if isinstance(value, int):
        return Scalar("int64")
    if isinstance(value, float):
        return Scalar("float64")
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in {3, 4}:
            return Image((None, None, value.shape[2]))
        return Tensor((None,) * value.ndim, value.dtype.name)
    raise SchemaError(
        f"field {name!r} holds a {type(value).__name__}, for which no feature can be inferred; "
        "return a numpy array, number, str, bool or encoded image bytes, or pass features="
    )


def _checked_shape(shape: Any, where: str) -> Shape:
    try:
        sizes = tuple(None if size is None else int(size) for size in shape)
    except TypeError as error:
        raise SchemaError(f"{where}: shape is {shape!r}; want a tuple of sizes, None where one varies") from error
    if any(size is not None and size < 0 for size in sizes):
        raise SchemaError(f"{where}: shape is {shape!r}; sizes are not negative")
    return sizes


def _checked_names(names: Any, where: str) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{where}: names is {names!r}; want a sequence of str")
    if len(set(names)) != len(tuple(names)):
        raise SchemaError(f"{where}: a class name appears twice in {_some(names)}")
    return tuple(names)


def _checked_dtype(dtype: Any, where: str) -> str:
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in _KIND_OF_DTYPE:
        raise SchemaError(f"{where}: dtype is {dtype!r}; want one of {_some(_KIND_OF_DTYPE)}")
    return name


def _check_name(name: Any, feature: Any) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise SchemaError(f"field name {name!r}: want a printable, non-empty str")
    if not isinstance(feature, Feature):
        raise SchemaError(
            f"field {name!r} is declared as {feature!r}; want a feature such as Image() or Scalar('int64')"
        )


def _array_of(name: str, feature: Feature, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise _mismatch(name, feature, f"a {type(value).__name__}", "give a numpy array")
    return value


def _check_array(
    name: str,
    feature: Feature,
    dtype: Any,
    shape: tuple[int, ...],
    wanted: Shape,
    wanted_dtype: np.dtype[Any],
) -> None:
    same_shape = len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))
    if dtype == wanted_dtype and same_shape:
        return
    if dtype == wanted_dtype and (*shape, 1) == tuple(wanted) and wanted[-1:] == (1,):
        return
    found = f"{np.dtype(dtype).name} {_shape_text(shape)}"
    raise _mismatch(name, feature, found, "cast or reshape it in read, or change the declaration")


def _scalar_of(name: str, feature: Feature, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `value` as a 0-d array of `dtype`, refusing what would change it (a float32 of a float excepted)."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise _mismatch(name, feature, f"{value!r} ({value.dtype.name})", "cast it in read")
        return np.asarray(value)
    fits = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float), "c": (int, float, complex)}[dtype.kind]
    if not isinstance(value, fits) or (isinstance(value, bool) and dtype.kind != "b"):
        raise _mismatch(name, feature, f"{value!r} ({type(value).__name__})", "cast it in read")
    try:
        return np.asarray(value, dtype)
    except OverflowError as error:
        raise _mismatch(name, feature, f"{value!r}, which does not fit", "declare a wider dtype") from error


def _to_column(flat: np.ndarray, kind: Kind) -> Column:
    if kind == "bytes":
        return np.ascontiguousarray(flat, flat.dtype.newbyteorder("<")).tobytes()
    return flat.astype(np.int64 if kind == "int64" else np.float32, copy=False)


def _from_column(column: Column, dtype: str) -> np.ndarray:
    if isinstance(column, bytes):
        return np.frombuffer(column, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    if isinstance(column, np.ndarray):
        return column.astype(dtype)
    return np.frombuffer(column[0], np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _one_bytes(name: str, columns: Mapping[str, Column]) -> bytes:
    column = columns[name]
    if isinstance(column, bytes):
        return column
    if len(column) != 1 or not isinstance(column[0], bytes):
        raise SchemaError(f"column {name!r} of the record holds {len(column)} values; want one bytes value")
    return column[0]


def _mismatch(name: str, feature: Feature, found: str, remedy: str) -> SchemaError:
    return SchemaError(f"field {name!r} is declared {feature.declared()} but the sample holds {found}; {remedy}")


def _shape_text(shape: Sequence[int | None]) -> str:
    return (
        "(" + ", ".join("?" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
    )


def _some(values: Any, most: int = 12) -> str:
    """Return a list of names for a message, cut where it grows long."""
    names = [str(value) for value in values]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (Image, Mask, ClassLabel, BBoxes, Text, Scalar, Tensor)}
