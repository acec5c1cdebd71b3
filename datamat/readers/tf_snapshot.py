"""Decoded samples on disk for later programs, in the form of `tf.data.Dataset.snapshot`.

    FOLDER/KEY/GRAPH_HASH/snapshot.metadata    finished once the first epoch was read to its end
                         /RUN/...              the samples

TensorFlow writes it while an epoch is read, and finds it again by a hash of the graph. That does not do from one
program to the next: equal graphs have unequal hashes now and then (half the time with TensorFlow 2.21), and the graph
knows shards by their names, not by what is in them. So KEY tells what the samples are made of, and a finished snapshot
below it is loaded as such.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from datamat.readers.tf_features import tensorflow

if TYPE_CHECKING:
    import os

__all__ = ["snapshotted"]

_NUM_SHARDS = 8  # written and read by as many threads


def snapshotted(samples: Any, folder: str | os.PathLike[str], key: str) -> Any:
    """Return `samples`, from disk where they are, else as they are, to be written when an epoch is read to its end.

    Args:
        samples: a `tf.data.Dataset`.
        folder: where snapshots are.
        key: tells these samples from others.
    """
    tf = tensorflow()
    numbered = samples.enumerate()
    place = pathlib.Path(folder, key)
    finished = [path.parent for path in sorted(place.glob("*/snapshot.metadata")) if _is_finished(path)]
    if finished:
        spec = numbered.element_spec
        found = tf.data.Dataset.load(str(finished[0]), element_spec=spec, compression=None, reader_func=_in_order)
    else:
        # The default compression fails on elements over 256 KiB (https://github.com/tensorflow/tensorflow/issues/47056).
        found = numbered.snapshot(str(place), compression=None, reader_func=_in_order, shard_func=_shard_of)
    return found.map(_without_number)


def _is_finished(metadata: pathlib.Path) -> bool:
    from tensorflow.core.protobuf.snapshot_pb2 import SnapshotMetadataRecord

    return bool(SnapshotMetadataRecord.FromString(metadata.read_bytes()).finalized)


def _shard_of(number: Any, _sample: Any) -> Any:
    return number % _NUM_SHARDS


def _in_order(shards: Any) -> Any:
    """Return the samples as they were written: to each shard one by turns."""
    tf = tensorflow()
    return shards.interleave(_itself, cycle_length=_NUM_SHARDS, num_parallel_calls=tf.data.AUTOTUNE)


def _itself(shard: Any) -> Any:
    return shard


def _without_number(_number: Any, sample: Any) -> Any:
    return sample
