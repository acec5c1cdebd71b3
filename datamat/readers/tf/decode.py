"""Decodes records into values of features within `tf.data`: one record at a time, or many at once."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, InputError, MissingDependencyError, SchemaError
from datamat.features import Text
from datamat.features.base import dtype_of, holds_numbers, put_name
from datamat.parallel.affinity import physical_cores
from datamat.readers.loader import MemoryPool, keep_freed_pages, shared_threads
from datamat.readers.tf.fields import TfField, decode_raw, tf_dtype, tf_field, tf_fields, tf_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from datamat.features import Feature, Features
    from datamat.features.base import Kind, Shape


# ---------------------------------------------------------------- features
#
# Feature values from encoded records: one record at a time, or many at once.
#
# decode_one     any schema                  one record            TensorFlow's own operations only, also for pictures
# decode_many    `decodes_in_blocks` only    a block of records    one call of `tf.io.parse_example` for all
# signature      any schema                  (no records)          the tensor specs of the values, for tf.data


def tensorflow() -> Any:
    """Return the module `tensorflow`.

    Raises:
        MissingDependencyError: it is not installed, or cannot be imported.
    """
    try:
        import tensorflow as tf
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "tensorflow":
            raise MissingDependencyError(
                "to_tf needs the package tensorflow; install it with: pip install tensorflow, or, where that has no "
                "wheels for this Python, read with to_numpy or to_torch"
            ) from error
        raise MissingDependencyError(
            f"to_tf needs the package tensorflow, whose import fails with {type(error).__name__}: {error}; repair its "
            "installation, or read with to_numpy or to_torch"
        ) from error
    return tf


def decodes_in_blocks(features: Features) -> bool:
    """Return True if many records can be decoded at once: values vary in size only along their first dimension."""
    return all(_is_fixed(field) or _is_list(field) for field in tf_fields(features).values())


def is_fixed(features: Features) -> bool:
    """Return True if the schema fixes the shape of every value, so that splitting a block is cheap.

    Extracting a row from a ragged block costs as much as decoding it.
    """
    return all(map(_is_fixed, tf_fields(features).values()))


def signature(features: Features) -> dict[str, Any]:
    """Return the `tf.TensorSpec` of each field that `decode_one` returns."""
    tf = tensorflow()
    return {name: tf.TensorSpec(field.shape, tf_dtype(field.dtype)) for name, field in tf_fields(features).items()}


@functools.lru_cache(maxsize=16)
def converted(features: Features) -> Mapping[str, TfField]:
    """Return the fields whose values are represented differently in TensorFlow: bytes, JSON, times, lists, None."""
    return {name: field for name, field in tf_fields(features).items() if _is_converted(features[name], field)}


def _is_converted(feature: Feature, field: TfField) -> bool:
    dtype, shape = feature.value_type()
    if (field.dtype, field.shape) != (dtype, shape) or (shape and not holds_numbers(dtype)):
        return True
    return dtype != "string" and tf_dtype(dtype) != dtype


def as_column(name: str, values: Any, features: Features, *, is_packed: bool = False) -> Any:
    """Return a column of a batch from `to_numpy`, or of its packed rows, with values that convert to tensors."""
    field = converted(features).get(name)
    if field is None:
        return values
    if is_packed and isinstance(values, list):
        return [[_as_tf(one, features[name], field) for one in row] for row in values]
    if isinstance(values, list):
        return [_as_tf(one, features[name], field) for one in values]
    return tf_value(values, features[name].value_type()[0])


def as_one(values: Mapping[str, Any], features: Features) -> dict[str, Any]:
    """Return a sample with values that convert to tensors, and the fields of dicts at the top level."""
    changed, flat = converted(features), features.flatten(values)
    return {
        name: _as_tf(value, features[name], changed[name]) if name in changed else value for name, value in flat.items()
    }


def as_read(values: Mapping[str, Any], features: Features) -> dict[str, Any]:
    """Return tensors as values of `load`: text as str, JSON decoded, writable arrays.

    Args:
        values: values from TensorFlow's numpy conversion: arrays, numbers and bytes by name, the fields of dicts at the
            top level.
        features: schema of the samples; bytes in fields that it lacks are text.
    """
    changed = converted(features)
    return features.unflatten({name: changed.get(name, _TEXT).as_value(value) for name, value in values.items()})


_TEXT = tf_field(Text())


def _as_tf(value: Any, feature: Feature, field: TfField) -> Any:
    """Return a value in TensorFlow's representation, unless a transform has turned it into numbers."""
    has_same_shape = (field.dtype, field.shape) == feature.value_type()
    if has_same_shape and isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "MO":
        return value
    return field.as_tensor(value)


def decode_one(record: Any, features: Features) -> dict[str, Any]:
    """Return the decoded sample of one record.

    Args:
        record: a string tensor (), a `tf.train.Example`.
        features: schema of the record, without `key`.
    """
    tf = tensorflow()
    columns = {
        name: tf.io.FixedLenSequenceFeature([], _kinds(tf)[kind], allow_missing=True)
        for name, kind in features.columns.items()
    }
    parsed = tf.io.parse_single_example(record, columns)
    return features.unflatten({name: one.decode(name, parsed) for name, one in tf_fields(features).items()})


def decode_many(
    records: Any, features: Features, decode_pictures: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return a block of decoded samples: what `decode_one` returns, with a leading dimension.

    Values that vary in size become ragged tensors, whose row splits are int64.

    Args:
        records: a string tensor (n,) of `tf.train.Example`s.
        features: their schema, for which `decodes_in_blocks` is true.
        decode_pictures: function of all columns that returns the pixels of the picture fields.
    """
    tf, fields = tensorflow(), tf_fields(features)
    columns = {name: _parsed_as(tf, field, features.columns[name]) for name, field in fields.items()}
    parsed = tf.io.parse_example(records, columns)
    pixels = decode_pictures(parsed) if decode_pictures else {}
    return features.unflatten(
        {name: pixels[name] if name in pixels else _block(tf, field, parsed[name]) for name, field in fields.items()}
    )


def _is_fixed(field: TfField) -> bool:
    fits = field.block == "tensor" or (field.block == "python" and holds_numbers(field.dtype))
    return fits and None not in field.shape and 0 not in field.shape


def _is_list(field: TfField) -> bool:
    """Return True if values are lists of any length with items of one shape."""
    is_open = field.shape[:1] == (None,) and None not in field.shape[1:] and 0 not in field.shape[1:]
    return is_open and field.block == "tensor"


def _kinds(tf: Any) -> dict[str, Any]:
    return {"bytes": tf.string, "bytes_list": tf.string, "int64": tf.int64, "float32": tf.float32}


def _parsed_as(tf: Any, field: TfField, kind: Kind) -> Any:
    """Return the result of `tf.io.parse_example` for the column of a field."""
    if kind == "bytes":
        return tf.io.FixedLenFeature([], tf.string)
    if _is_list(field):
        return tf.io.RaggedFeature(_kinds(tf)[kind], row_splits_dtype=tf.int64)
    return tf.io.FixedLenFeature(field.shape, _kinds(tf)[kind])


def _block(tf: Any, field: TfField, column: Any) -> Any:
    dtype, shape = field.dtype, field.shape
    if not holds_numbers(dtype):
        return column
    if isinstance(column, tf.RaggedTensor) and column.dtype == tf.string:
        return column.with_flat_values(tf.reshape(decode_raw(dtype, column.flat_values), [-1, *shape[1:]]))
    if _is_list(field):
        return _lists(tf, dtype, shape[1:], column)
    if column.dtype == tf.string:
        return tf.reshape(decode_raw(dtype, column), [-1 if column.shape[0] is None else column.shape[0], *shape])
    return tf.cast(column, tf_dtype(dtype))


def _lists(tf: Any, dtype: str, shape: Shape, column: Any) -> Any:
    """Return n lists of items of a shape as a ragged tensor, from n encoded strings or from n lists of numbers."""
    per_item = math.prod(size or 1 for size in shape)
    if column.dtype == tf.string:
        per_item *= dtype_of(dtype).itemsize
        values, num_rows = decode_raw(dtype, tf.strings.reduce_join(column)), column.shape[0]
        splits = tf.concat([[0], tf.cumsum(tf.cast(tf.strings.length(column), tf.int64))], 0)
    else:
        values, splits, num_rows = tf.cast(column.values, dtype), column.row_splits, column.shape[0]
    if per_item > 1:
        whole = tf.debugging.Assert(
            tf.reduce_all(splits % per_item == 0), ["a record holds a part of an item of shape", list(shape)]
        )
        with tf.control_dependencies([whole]):
            splits = splits // per_item
    splits = tf.ensure_shape(splits, [None if num_rows is None else num_rows + 1])
    # The lengths were computed above; validating them would take longer than computing them.
    return tf.RaggedTensor.from_row_splits(tf.reshape(values, [-1, *shape]), splits, validate=False)


# ---------------------------------------------------------------- pictures
#
# Images of many records at once, with datamat's decoders: the same pixels as from TensorFlow, in less time.
#
# TensorFlow's calling thread decodes rows together with threads of this process. So two calls keep all cores busy, with
# only two batches in memory, whatever the number of cores. The decoders release the GIL.


def pictures_of(features: Features) -> dict[str, Feature]:
    """Return the fields whose blocks Python decodes: pictures, masks, and similar features of other packages."""
    return {name: features[name] for name, field in tf_fields(features).items() if field.block == "python"}


@final
class PictureDecoder:
    """Decodes the pictures of blocks of records.

    Args:
        features: the schema of the records; all pictures have a declared shape.
    """

    def __init__(self, features: Features) -> None:
        self._features = {name: (feature, *_declared(feature)) for name, feature in pictures_of(features).items()}
        self._memory = MemoryPool()

    def keep_memory_with(self, dataset: Any) -> None:
        """Release the memory once a `tf.data.Dataset` is gone, as TensorFlow never frees the function that it calls."""
        weakref.finalize(dataset, self._memory.close).atexit = False

    def decode(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pixels of a block of n records.

        Args:
            columns: string tensors (n,) by field name: the encoded images, and `key`.

        Returns:
            Tensors (n, *shape) by field name, of the dtypes of the fields: uint8 for pictures.
        """
        tf = tensorflow()
        names = list(self._features)
        inputs = [columns["key"], *(columns[name] for name in names)]
        found = tf.numpy_function(self._decode, inputs, [self._features[name][2] for name in names], stateful=False)
        return {
            name: tf.ensure_shape(pixels, (columns["key"].shape[0], *self._features[name][1]))
            for name, pixels in zip(names, found, strict=True)
        }

    def _decode(self, keys: np.ndarray, *files: np.ndarray) -> list[np.ndarray]:
        keep_freed_pages()
        num_rows = len(keys)
        fields = [
            (name, feature, column, self._memory.allocate((num_rows, *shape), np.dtype(dtype)))
            for (name, (feature, shape, dtype)), column in zip(self._features.items(), files, strict=True)
        ]
        rows = itertools.count()  # `next` is atomic, so each row goes to one thread

        def work() -> None:
            while (row := next(rows)) < num_rows:
                for name, feature, column, pixels in fields:
                    _decode_into(pixels[row], name, feature, column[row], keys[row])

        threads = shared_threads()
        helping = [threads.submit(work) for _ in range(min(num_rows, len(physical_cores())) - 1)]
        work()
        for helper in helping:
            helper.result()
        return [pixels for _, _, _, pixels in fields]


def _declared(feature: Feature) -> tuple[tuple[int, ...], str]:
    dtype, shape = feature.value_type()
    return tuple(size for size in shape if size is not None), dtype


def _decode_into(out: np.ndarray, name: str, feature: Feature, file: bytes, key: bytes) -> None:
    try:
        # TensorFlow has checked the record's checksum.
        pixels = feature.decode_into(file, out, are_intact=True)
        if pixels.shape != out.shape:
            raise SchemaError(f"the field is declared {feature.declared()} but is {pixels.shape}; want that shape")
    except (InputError, SchemaError) as error:
        put_name(error, name)
        remedy = "datamat verify names its shard; remove it and run the job again"
        raise CorruptDataError(f"the record of key {key.decode()!r} is damaged: {error}; {remedy}") from error
    if pixels is not out:
        out[...] = pixels
