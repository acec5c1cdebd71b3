"""Values of features from encoded records: one record at a time, or many at once.

decode_one     any schema         one record            TensorFlow's own operations only, also for pictures
decode_many    `is_fixed` only    a block of records    one call of `tf.io.parse_example` for all
signature      any schema         (nothing)             what the values are, for tf.data
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datamat.errors import MissingDependencyError
from datamat.features import BBoxes, ClassLabel, Image, Mask, Scalar, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from datamat.features import Feature, Features

__all__ = ["decode_many", "decode_one", "is_fixed", "signature", "tensorflow"]

_SIGNED = {"uint32": "int32", "uint64": "int64"}
"""What stands in for the types that decode_raw does not know."""


def tensorflow() -> Any:
    """Return the module `tensorflow`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "to_tf needs the package tensorflow; install it with: pip install datamat"
        ) from error
    return tf


def is_fixed(features: Features) -> bool:
    """Tell whether the schema gives the shape of every value: then many decode at once."""
    return all(_is_fixed(feature) for feature in features.values())


def signature(features: Features) -> dict[str, Any]:
    """Return the `tf.TensorSpec` of each field: what `decode_one` returns."""
    tf = tensorflow()
    return {name: tf.TensorSpec(*_dtype_and_shape(feature)) for name, feature in features.items()}


def decode_one(record: Any, features: Features) -> dict[str, Any]:
    """Return the sample of one record.

    Args:
        record: a string tensor (), a `tf.train.Example`.
        features: its schema.
    """
    tf = tensorflow()
    columns = {
        name: tf.io.FixedLenSequenceFeature([], _kinds(tf)[kind], allow_missing=True)
        for name, kind in features.columns.items()
    }
    parsed = tf.io.parse_single_example(record, columns)
    return {name: _DECODERS[type(feature)](tf, feature, name, parsed) for name, feature in features.items()}


def decode_many(
    records: Any, features: Features, decode_pictures: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return a block of samples: what `decode_one` returns, each with a first dimension.

    Args:
        records: a string tensor (n,) of `tf.train.Example`s.
        features: their schema; `is_fixed` is true of it.
        decode_pictures: returns the pixels of those fields that are pictures, from all columns.
    """
    tf = tensorflow()
    kinds = _kinds(tf)
    columns = {}
    for name, feature in features.items():
        kind = features.columns[name]
        columns[name] = tf.io.FixedLenFeature([] if kind == "bytes" else _shape(feature), kinds[kind])
    parsed = tf.io.parse_example(records, columns)
    pixels = decode_pictures(parsed) if decode_pictures else {}
    return {
        name: pixels[name] if name in pixels else _block(tf, feature, parsed[name])
        for name, feature in features.items()
    }


def _is_fixed(feature: Feature) -> bool:
    if isinstance(feature, BBoxes):
        return False
    shape = _shape(feature)
    return None not in shape and 0 not in shape


def _shape(feature: Any) -> tuple[int | None, ...]:
    return getattr(feature, "shape", ())


def _dtype_and_shape(feature: Feature) -> tuple[tuple[int | None, ...], str]:
    if isinstance(feature, BBoxes):
        return (None, 4), "float32"
    kinds: dict[type[Feature], str] = {Image: "uint8", Mask: "uint8", ClassLabel: "int64", Text: "string"}
    return _shape(feature), kinds.get(type(feature)) or getattr(feature, "dtype")  # noqa: B009


def _kinds(tf: Any) -> dict[str, Any]:
    return {"bytes": tf.string, "int64": tf.int64, "float32": tf.float32}


def _block(tf: Any, feature: Feature, column: Any) -> Any:
    if isinstance(feature, (Text, ClassLabel)):
        return column
    dtype, shape = getattr(feature, "dtype"), _shape(feature)  # noqa: B009
    if column.dtype == tf.string:
        flat = _raw(tf, dtype, column)
        return tf.reshape(flat, [-1 if column.shape[0] is None else column.shape[0], *shape])
    return tf.cast(column, dtype)


def _image(tf: Any, feature: Image, name: str, parsed: dict[str, Any]) -> Any:
    # decode_jpeg reads PNG as well; the accurate DCT gives the pixels of libjpeg's default, as every other reader has.
    image = tf.io.decode_jpeg(parsed[name][0], channels=feature.channels, dct_method="INTEGER_ACCURATE")
    return tf.ensure_shape(image, feature.shape)


def _mask(tf: Any, feature: Mask, name: str, parsed: dict[str, Any]) -> Any:
    mask = tf.io.decode_png(parsed[name][0], channels=1)
    return tf.ensure_shape(tf.squeeze(mask, -1), feature.shape)  # not mask[..., 0], which copies the pixels


def _label(tf: Any, feature: ClassLabel, name: str, parsed: dict[str, Any]) -> Any:
    return tf.ensure_shape(parsed[name], feature.shape) if feature.shape else parsed[name][0]


def _boxes(tf: Any, feature: BBoxes, name: str, parsed: dict[str, Any]) -> Any:
    del feature
    return tf.reshape(parsed[name], [-1, 4])


def _text(tf: Any, feature: Text, name: str, parsed: dict[str, Any]) -> Any:
    del tf, feature
    return parsed[name][0]


def _scalar(tf: Any, feature: Scalar, name: str, parsed: dict[str, Any]) -> Any:
    return _numbers(tf, feature.dtype, parsed[name])[0]


def _tensor(tf: Any, feature: Tensor, name: str, parsed: dict[str, Any]) -> Any:
    flat = _numbers(tf, feature.dtype, parsed[name])
    if feature.keeps_shape:
        return tf.ensure_shape(tf.reshape(flat, parsed[f"{name}/shape"]), feature.shape)
    return tf.reshape(flat, [-1 if size is None else size for size in feature.shape])


def _numbers(tf: Any, dtype: str, column: Any) -> Any:
    return _raw(tf, dtype, column[0]) if column.dtype == tf.string else tf.cast(column, dtype)


def _raw(tf: Any, dtype: str, values: Any) -> Any:
    """Return numbers from their little-endian bytes; the last dimension is theirs."""
    if dtype in _SIGNED:
        return tf.bitcast(tf.io.decode_raw(values, _SIGNED[dtype]), dtype)
    return tf.io.decode_raw(values, dtype)


_DECODERS: dict[type[Feature], Callable[..., Any]] = {
    Image: _image,
    Mask: _mask,
    ClassLabel: _label,
    BBoxes: _boxes,
    Text: _text,
    Scalar: _scalar,
    Tensor: _tensor,
}
