"""Finished TFRecord shards as a `tf.data.Dataset`: the reading side of the features, in TensorFlow's own operations.

files ── interleave (parallel) ── parse and decode (parallel) ── cache ── shuffle ── transform ── batch ── prefetch
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import MissingDependencyError, OptionError
from datamat.features import BBoxes, ClassLabel, Image, Mask, Scalar, Tensor, Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from datamat.features import Feature, Features

__all__ = ["ReadOptions", "make_dataset"]

_SHUFFLE_WINDOW = 1024
_MOST_FILES_AT_ONCE = 16
_SIGNED = {"uint32": "int32", "uint64": "int64"}
"""What stands in for the types that decode_raw does not know."""
_COMPRESSION = {"tfrecord": "", "tfrecord.gz": "GZIP"}


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    """The arguments of `ShardedDataset.to_tf`, checked."""

    batch_size: int | None = None
    shuffle: bool | int = False
    seed: int | None = None
    transform: Callable[[Any], Any] | None = None
    cache: bool | str = False
    repeat: bool = False
    drop_remainder: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is not None and not _is_count(self.batch_size):
            raise OptionError(f"batch_size is {self.batch_size!r}; want 1 or more, or None for single samples")
        if not isinstance(self.shuffle, bool) and not _is_count(self.shuffle):
            raise OptionError(f"shuffle is {self.shuffle!r}; want True, False or the size of the window")

    @property
    def window(self) -> int:
        """Records that are shuffled among each other; 0 for none."""
        return _SHUFFLE_WINDOW * self.shuffle if isinstance(self.shuffle, bool) else self.shuffle


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value >= 1)


def make_dataset(files: Sequence[str], features: Features, format_name: str, count: int, options: ReadOptions) -> Any:
    """Return the records of `files` as a `tf.data.Dataset` of dicts by feature name.

    Args:
        files: paths of the shards.
        features: their schema.
        format_name: of the shards.
        count: number of records in them.
        options: what the user asked for.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        OptionError: tf.data cannot read the format.
    """
    tf = _tensorflow()
    if format_name not in _COMPRESSION:
        raise OptionError(f"tf.data reads {', '.join(_COMPRESSION)}; these shards are {format_name}")
    names = tf.data.Dataset.from_tensor_slices(list(files))
    if options.window:
        names = names.shuffle(len(files), seed=options.seed, reshuffle_each_iteration=True)
    records = names.interleave(
        lambda name: tf.data.TFRecordDataset(name, compression_type=_COMPRESSION[format_name], buffer_size=1 << 20),
        # One file at a time keeps the order of the shards where nothing is shuffled; the next is opened meanwhile.
        cycle_length=min(_MOST_FILES_AT_ONCE, len(files)) if options.window else 1,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=options.deterministic,
    )
    samples = records.map(
        lambda record: _decoded(tf, record, features),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=options.deterministic,
    ).apply(tf.data.experimental.assert_cardinality(count))
    return _finished(tf, samples, options)


def _finished(tf: Any, samples: Any, options: ReadOptions) -> Any:
    if options.cache:
        samples = samples.cache("" if options.cache is True else options.cache)
    if options.window:
        samples = samples.shuffle(options.window, seed=options.seed, reshuffle_each_iteration=True)
    if options.repeat:
        samples = samples.repeat()
    if options.transform is not None:
        samples = samples.map(
            options.transform, num_parallel_calls=tf.data.AUTOTUNE, deterministic=options.deterministic
        )
    if options.batch_size is not None:
        samples = samples.batch(options.batch_size, drop_remainder=options.drop_remainder)
    return samples.prefetch(tf.data.AUTOTUNE)


def _decoded(tf: Any, record: Any, features: Features) -> dict[str, Any]:
    kinds = {"bytes": tf.string, "int64": tf.int64, "float32": tf.float32}
    parsed = tf.io.parse_single_example(
        record,
        {
            name: tf.io.FixedLenSequenceFeature([], kinds[kind], allow_missing=True)
            for name, kind in features.columns.items()
        },
    )
    return {name: _DECODERS[type(feature)](tf, feature, name, parsed) for name, feature in features.items()}


def _image(tf: Any, feature: Image, name: str, parsed: dict[str, Any]) -> Any:
    # decode_jpeg reads PNG as well; the accurate DCT gives the pixels of libjpeg's default, as every other reader has.
    image = tf.io.decode_jpeg(parsed[name][0], channels=feature.channels, dct_method="INTEGER_ACCURATE")
    return tf.ensure_shape(image, feature.shape)


def _mask(tf: Any, feature: Mask, name: str, parsed: dict[str, Any]) -> Any:
    mask = tf.io.decode_png(parsed[name][0], channels=1)
    return tf.ensure_shape(mask[..., 0], feature.shape)


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
    if column.dtype != tf.string:
        return tf.cast(column, dtype)
    if dtype in _SIGNED:
        return tf.bitcast(tf.io.decode_raw(column[0], _SIGNED[dtype]), dtype)
    return tf.io.decode_raw(column[0], dtype)


_DECODERS: dict[type[Feature], Callable[..., Any]] = {
    Image: _image,
    Mask: _mask,
    ClassLabel: _label,
    BBoxes: _boxes,
    Text: _text,
    Scalar: _scalar,
    Tensor: _tensor,
}


def _tensorflow() -> Any:
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "to_tf needs the package tensorflow; install it with: pip install datamat"
        ) from error
    return tf
