"""Describes fields for TensorFlow: their tensors, and how stored columns become tensors and values.

`tf_field` is called once per schema for each feature. Features without a registered function are decoded by Python, as
in `load`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from datamat.features import (
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Feature,
    Features,
    Image,
    Json,
    Keypoints,
    ListOf,
    Mask,
    Nullable,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
)
from datamat.features.base import (
    ArrowType,
    Shape,
    by_column,
    bytes_array,
    dtype_of,
    holds_numbers,
    named,
    to_json_text,
    whole,
)
from datamat.features.list_of import Packed
from datamat.values import frozen

_TF_DTYPES = {"string": "string", "bytes": "string", "object": "string", "datetime64[us]": "int64"}
_SIGNED = {"uint32": "int32", "uint64": "int64"}
"""Types of the same size in place of types that `tf.io.decode_raw` does not support."""


@frozen()
class TfField:
    """The tensors of a field.

    Attributes:
        dtype: dtype of a tensor, named as in `Feature.value_type`.
        shape: its shape.
        decode: function of the field's name and of a 1-D tensor of strings, int64 or float32 for each column of one
            record, which returns the tensor, using TensorFlow operations.
        block: how many records at a time are decoded, if every field varies in size at most along its first dimension.
            "tensor": the only column holds the value itself, as numbers, little-endian bytes or text, or as a list of
            the bytes or texts of its items. "python": threads call `Feature.decode_into` with the only column, which
            holds bytes. None: `decode` decodes one record at a time.
        needs_python: whether `decode` calls Python, which takes the GIL and is not available in the workers of a
            `tf.data` service.
        to_tensor: function of a decoded value that returns the result of `decode` as an array, number or bytes; None
            if the dtype determines it.
        to_value: its inverse.
    """

    dtype: str
    shape: Shape
    decode: Callable[[str, Mapping[str, Any]], Any]
    block: Literal["tensor", "python"] | None = None
    needs_python: bool = False
    to_tensor: Callable[[Any], Any] | None = None
    to_value: Callable[[Any], Any] | None = None

    def as_tensor(self, value: Any) -> Any:
        """Return a decoded value in TensorFlow's representation: an array, number or bytes."""
        return tf_value(value, self.dtype) if self.to_tensor is None else self.to_tensor(value)

    def as_value(self, tensor: Any) -> Any:
        """Return the result of `Feature.decode`, given TensorFlow's representation: an array, number or bytes."""
        if self.to_value is not None:
            return self.to_value(tensor)
        if isinstance(tensor, bytes):
            return (
                tensor if self.dtype == "bytes" else json.loads(tensor) if self.dtype == "object" else tensor.decode()
            )
        if self.dtype == "datetime64[us]" and tensor.dtype == np.int64:
            return tensor.astype(self.dtype)
        return tensor.copy() if isinstance(tensor, np.ndarray) else tensor  # TensorFlow owns the original's memory


@functools.lru_cache(maxsize=16)
def tf_fields(features: Features) -> Mapping[str, TfField]:
    """Return the `TfField` of each field."""
    return {name: tf_field(feature) for name, feature in features.items()}


@functools.singledispatch
def tf_field(feature: Feature) -> TfField:
    """Return the `TfField` of a feature.

    The default calls `Feature.decode` from the graph. For its own feature type, a package can register a function that
    decodes with TensorFlow operations, without Python: `tf_field.register(Waveform)`.

    Args:
        feature: feature of the field.
    """
    return in_python(feature)


def in_python(feature: Feature, block: Literal["python"] | None = None) -> TfField:
    """Return the `TfField` of a feature that Python decodes.

    Args:
        feature: feature of the field.
        block: "python" if `decode_into` can fill memory for many values, each of the feature's declared shape.
    """
    dtype, shape = feature.value_type()

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        parts = feature.columns("")

        def decoded(*values: Any) -> Any:
            found = {
                part: value.tolist() if value.dtype == object else value
                for part, value in zip(parts, values, strict=True)
            }
            return tf_value(named(name, feature.decode, whole(found)), dtype)

        value = tf.numpy_function(decoded, [columns[name + part] for part in parts], tf_dtype(dtype), stateful=False)
        return tf.ensure_shape(value, shape)

    return TfField(dtype, shape, decode, block, needs_python=True)


# ---------------------------------------------------------------- values


@tf_field.register(Text)
@tf_field.register(Bytes)
@tf_field.register(Json)
@tf_field.register(Timestamp)
def _(feature: Feature) -> TfField:
    return TfField(*feature.value_type(), _only, "tensor")


@tf_field.register(ClassLabel)
def _(feature: ClassLabel) -> TfField:
    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        return tf.ensure_shape(columns[name], feature.shape)

    return TfField("int64", feature.shape, decode if feature.shape else _only, "tensor")


@tf_field.register(Scalar)
@tf_field.register(Tensor)
@tf_field.register(Tokens)
@tf_field.register(BBoxes)
@tf_field.register(Keypoints)
def _(feature: Feature) -> TfField:
    dtype, shape = feature.value_type()

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        column = columns[name]
        flat = decode_raw(dtype, column[0]) if column.dtype == tf.string else tf.cast(column, dtype)
        if isinstance(feature, Tensor) and feature.keeps_shape:
            return tf.ensure_shape(tf.reshape(flat, columns[f"{name}/shape"]), shape)
        return tf.reshape(flat, [-1 if size is None else size for size in shape]) if shape else flat[0]

    return TfField(dtype, shape, decode, "tensor")


@tf_field.register(Polygons)
def _(feature: Polygons) -> TfField:
    dtype, shape = feature.value_type()

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        vertices = tf.reshape(columns[name], [-1, 2])
        ragged = tf.RaggedTensor.from_row_lengths(vertices, columns[f"{name}/sizes"])
        return tf.ensure_shape(ragged.to_tensor(float("nan")), shape)

    return TfField(dtype, shape, decode)


@tf_field.register(Image)
def _(feature: Image) -> TfField:
    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        if feature.dtype == "uint16" or feature.channels == 2:  # 0 means the channels of the file, which are these
            channels = 0 if feature.channels == 2 else feature.channels
            return tf.ensure_shape(tf.io.decode_png(columns[name][0], channels, feature.dtype), feature.shape)
        # decode_jpeg reads PNG as well; the accurate DCT gives the same pixels as libjpeg's default in other readers.
        image = tf.io.decode_jpeg(columns[name][0], channels=feature.channels, dct_method="INTEGER_ACCURATE")
        return tf.ensure_shape(image, feature.shape)

    return TfField(*feature.value_type(), decode, "python")


@tf_field.register(Mask)
@tf_field.register(Depth)
def _(feature: Mask | Depth) -> TfField:
    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        if feature.dtype == "float32":
            return tf.ensure_shape(tf.bitcast(tf.io.decode_png(columns[name][0], 4), "float32"), feature.shape)
        pixels = tf.io.decode_png(columns[name][0], 1, feature.dtype)
        return tf.ensure_shape(tf.squeeze(pixels, -1), feature.shape)  # not pixels[..., 0], which copies them

    return TfField(*feature.value_type(), decode, "python")


@tf_field.register(Video)
def _(feature: Video) -> TfField:
    return in_python(feature) if feature.decoded else TfField(*feature.value_type(), _only, "tensor")


def _only(name: str, columns: Mapping[str, Any]) -> Any:
    return columns[name][0]


# ---------------------------------------------------------------- none, one or many values


@tf_field.register(Nullable)
def _(feature: Nullable) -> TfField:
    one = tf_field(feature.feature)

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        mark = next(reversed(feature.columns(name)))  # this column is empty if there is no value

        def there() -> Any:
            first = {column: _numbers_in(columns[column], stored)
                     for column, stored in feature.feature.columns(name).items()}  # fmt: skip
            return one.decode(name, first)[None]

        def none() -> Any:
            return tf.zeros([0, *(size or 0 for size in one.shape)], tf_dtype(one.dtype))

        return tf.ensure_shape(tf.cond(tf.size(columns[mark]) > 0, there, none), (None, *one.shape))

    return TfField(
        one.dtype,
        (None, *one.shape),
        decode,
        _block_of_many(feature.feature, one),
        one.needs_python,
        lambda value: _stacked(one, [] if value is None else [value]),
        lambda tensor: one.as_value(tensor[0]) if len(tensor) else None,
    )


@tf_field.register(ListOf)
def _(feature: ListOf) -> TfField:
    if feature.has_gaps:
        return _with_gaps(tf_field(feature.item), tf_field(ListOf(feature.item)))
    if feature.array:
        return tf_field(feature.array)
    one = tf_field(feature.item)
    is_serialized = None in one.shape  # items of different shapes cannot be stacked, so each becomes a string
    dtype, shape = ("bytes", (None,)) if is_serialized else (one.dtype, (None, *one.shape))
    has_lengths = any(how.has_lengths for how in feature.packed.values())
    block = None if has_lengths else _block_of_many(feature.item, one)

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        if block and not holds_numbers(dtype):
            return columns[name]
        packed = by_column(name, feature.packed)
        items = {
            column: _items(columns[column], how, columns.get(f"{column}/lengths")) for column, how in packed.items()
        }

        def decoded(places: Mapping[str, Any]) -> Any:
            item = {
                column: tf.strings.substr(columns[column][:1], value[:1], value[1:])
                if packed[column].kind == "bytes"
                else tf.reshape(value, [-1])
                for column, value in places.items()
            }
            found = one.decode(name, item)
            return tf.io.serialize_tensor(found) if is_serialized else found

        found = tf.map_fn(decoded, items, fn_output_signature=tf.TensorSpec(shape[1:], tf_dtype(dtype)))
        return tf.ensure_shape(found, shape)

    def to_tensor(value: Any) -> Any:
        if is_serialized:
            return bytes_array([_serialized(one.as_tensor(item)) for item in value])
        return _stacked(one, value)

    def to_value(tensor: Any) -> Any:
        items = map(_parsed, tensor) if is_serialized else tensor
        return feature.layout.together([one.as_value(item) for item in items])

    return TfField(dtype, shape, decode, block, one.needs_python, to_tensor, to_value)


def _items(leaves: Any, how: Packed, lengths: Any) -> Any:
    """Return the items of a list in a column as rows of one tensor; for bytes, their positions."""
    import tensorflow as tf

    if not how.has_lengths:
        return leaves if how.kind == "bytes_list" else tf.reshape(leaves, [-1, how.unit])
    sizes = lengths * how.unit
    if how.kind == "bytes":
        return tf.stack([tf.cumsum(sizes, exclusive=True), sizes], axis=1)
    return tf.RaggedTensor.from_row_lengths(leaves, sizes)


def _with_gaps(one: TfField, there: TfField) -> TfField:
    """Return the `TfField` of a list with missing items, given those of an item and of the list of present items."""

    def decode(name: str, columns: Mapping[str, Any]) -> Any:
        import tensorflow as tf

        found, present = there.decode(name, columns), columns[f"{name}/present"]
        if None not in one.shape:  # items of different shapes are strings already
            found = tf.map_fn(tf.io.serialize_tensor, found, fn_output_signature=tf.TensorSpec((), tf.string))
        return tf.gather(tf.concat([[""], found], 0), tf.cumsum(present) * present)

    return TfField(
        "bytes",
        (None,),
        decode,
        needs_python=one.needs_python,
        to_tensor=lambda value: bytes_array(
            [b"" if item is None else _serialized(one.as_tensor(item)) for item in value]
        ),
        to_value=lambda tensor: [one.as_value(_parsed(item)) if item else None for item in tensor],
    )


def _block_of_many(feature: Feature, one: TfField) -> Literal["tensor"] | None:
    """Return the `block` of a `Nullable` or `ListOf` feature."""
    is_fixed = None not in one.shape and 0 not in one.shape
    return "tensor" if is_fixed and one.block == "tensor" and len(feature.columns("")) == 1 else None


def _numbers_in(column: Any, stored: ArrowType) -> Any:
    """Return the column of a feature, given that of a `Nullable` of it with a value."""
    import tensorflow as tf

    if stored.kind in {"bytes", "bytes_list"} or column.dtype != tf.string:
        return column
    return tf.cast(decode_raw(stored.raw_dtype.name, column[0]), stored.kind)


def _stacked(one: TfField, values: Sequence[Any]) -> np.ndarray:
    """Stack values in TensorFlow's representation along a new first dimension."""
    found = [one.as_tensor(value) for value in values]
    if not holds_numbers(one.dtype) and not one.shape:
        return bytes_array(found)
    if found:
        return np.stack(found)
    kind = tf_dtype(one.dtype)
    return np.empty((0, *(size or 0 for size in one.shape)), object if kind == "string" else dtype_of(kind))


def _serialized(value: Any) -> bytes:
    """Serialize a value as `tf.io.serialize_tensor` does."""
    import tensorflow as tf

    found: bytes = tf.make_tensor_proto(value).SerializeToString()
    return found


def _parsed(data: bytes) -> Any:
    """Invert `_serialized`: return an array, a numpy number or bytes."""
    import tensorflow as tf

    kind = type(tf.make_tensor_proto(0))  # not exported by TensorFlow's API
    return tf.make_ndarray(kind.FromString(data))[()]


# ---------------------------------------------------------------- dtypes


def tf_dtype(dtype: str) -> str:
    """Return the name of TensorFlow's dtype for a dtype."""
    return _TF_DTYPES.get(dtype, dtype)


def tf_value(value: Any, dtype: str) -> Any:
    """Return a decoded value in TensorFlow's representation: bytes for text and JSON, microseconds for times."""
    match dtype:
        case "string":
            return value.encode()
        case "bytes":
            return value
        case "object":
            return to_json_text(value).encode()
        case "datetime64[us]":
            return np.asarray(value, dtype).view(np.int64)
    return np.asarray(value, dtype_of(dtype))


def decode_raw(dtype: str, values: Any) -> Any:
    """Decode a tensor of little-endian bytes into numbers along a new last dimension, in a `tf.data` pipeline."""
    import tensorflow as tf

    if dtype in _SIGNED:
        return tf.bitcast(tf.io.decode_raw(values, _SIGNED[dtype]), dtype)
    return tf.io.decode_raw(values, dtype)
