"""Pictures of many records at once in `tf.data`, by datamat's decoders: the same pixels as TensorFlow's, in less time.

The thread of TensorFlow that makes the call decodes, and threads of this process help it, row by row. So two calls keep
all cores busy, with two batches in memory however many cores there are. Decoders let go of the interpreter's lock.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import CorruptDataError, InputError, SchemaError
from datamat.features import Image, Mask
from datamat.parallel.affinity import physical_cores
from datamat.readers.memory import MemoryPool, keep_freed_pages
from datamat.readers.tf_exit import free_iterators_at_exit
from datamat.readers.tf_features import tensorflow
from datamat.readers.threads import DecodingThreads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datamat.features import Features

__all__ = ["PictureDecoder", "pictures_of"]


def pictures_of(features: Features) -> dict[str, Image | Mask]:
    """Return the fields that are pictures or masks."""
    return {name: feature for name, feature in features.items() if isinstance(feature, (Image, Mask))}


@final
class PictureDecoder:
    """Decodes the pictures of blocks of records.

    Args:
        features: the schema of the records; all pictures are of a declared shape.
    """

    def __init__(self, features: Features) -> None:
        self._features = {name: (feature, _declared(feature)) for name, feature in pictures_of(features).items()}
        self._memory = MemoryPool()

    def keep_memory_with(self, dataset: Any) -> None:
        """Let go of the memory when a `tf.data.Dataset` is gone; what it calls stays until the process ends."""
        weakref.finalize(dataset, self._memory.close).atexit = False

    def decode(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pixels of a block of n records.

        Args:
            columns: string tensors (n,) by field name: the files, and `key`.

        Returns:
            uint8 tensors (n, *shape) by field name.
        """
        tf = tensorflow()
        free_iterators_at_exit()
        names = list(self._features)
        inputs = [columns["key"], *(columns[name] for name in names)]
        found = tf.numpy_function(self._decode, inputs, [tf.uint8] * len(names), stateful=False)
        return {
            name: tf.ensure_shape(pixels, (columns["key"].shape[0], *self._features[name][1]))
            for name, pixels in zip(names, found, strict=True)
        }

    def _decode(self, keys: np.ndarray, *files: np.ndarray) -> list[np.ndarray]:
        keep_freed_pages()
        num_rows = len(keys)
        fields = [
            (name, feature, column, self._memory.allocate((num_rows, *shape), np.dtype(np.uint8)))
            for (name, (feature, shape)), column in zip(self._features.items(), files, strict=True)
        ]
        rows = itertools.count()  # its steps are atomic: each row goes to one thread

        def work() -> None:
            while (row := next(rows)) < num_rows:
                for name, feature, column, pixels in fields:
                    _decode_into(pixels[row], name, feature, column[row], keys[row])

        threads = _helpers()
        helping = [threads.submit(work) for _ in range(min(num_rows, len(physical_cores())) - 1)]
        work()
        for helper in helping:
            helper.result()
        return [pixels for _, _, _, pixels in fields]


def _declared(feature: Image | Mask) -> tuple[int, ...]:
    return tuple(size for size in feature.shape if size is not None)


@functools.cache
def _helpers() -> DecodingThreads:
    """Return the threads that help, the same for all data sets of the process."""
    return DecodingThreads(max(1, len(physical_cores()) - 1), "datamat-help")


def _decode_into(out: np.ndarray, name: str, feature: Image | Mask, file: bytes, key: bytes) -> None:
    try:
        # TensorFlow has compared the checksum of the record.
        pixels = feature.decode_into(name, {name: file}, out, are_intact=True)
        if pixels.shape != out.shape:
            raise SchemaError(f"field {name!r} is declared {feature.declared()} but is {pixels.shape}")
    except (InputError, SchemaError) as error:
        remedy = "datamat verify of its directory names the shard; remove that and run the job again"
        raise CorruptDataError(f"the record of key {key.decode()!r} is damaged: {error}; {remedy}") from error
    if pixels is not out:
        out[...] = pixels
