"""Decoded samples kept on disk for later programs, in the format of `tf.data.Dataset.snapshot`.

    FOLDER/KEY/GRAPH_HASH/snapshot.metadata    complete once the first epoch has been read to its end
                         /RUN/...              the samples

TensorFlow writes a snapshot while an epoch is read, and finds it again by a hash of the graph. Across programs that is
unreliable: equal graphs sometimes have different hashes (half the time with TensorFlow 2.21), and the graph identifies
shards by name, not by content. So KEY identifies the content of the samples, and a complete snapshot below it is loaded
directly.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from datamat.readers.tf.decode import (
    tensorflow,
)

_NUM_SHARDS = 8  # written and read by as many threads


def snapshotted(samples: Any, folder: str | os.PathLike[str], key: str) -> Any:
    """Return `samples`, loaded from a snapshot if there is one; otherwise the first complete epoch writes it.

    Args:
        samples: `tf.data.Dataset` of decoded samples; the snapshot keeps their order.
        folder: folder of the snapshots, created if missing; each has its own subfolder.
        key: name that identifies these samples.
    """
    tf = tensorflow()
    numbered = samples.enumerate()
    place = pathlib.Path(folder, key)
    finished = [path.parent for path in sorted(place.glob("*/snapshot.metadata")) if _is_finished(path)]
    if finished:
        spec = numbered.element_spec
        found = tf.data.Dataset.load(str(finished[0]), element_spec=spec, compression=None, reader_func=_in_order)
    else:
        # The default compression fails on elements over 256 KiB
        # (https://github.com/tensorflow/tensorflow/issues/47056).
        found = numbered.snapshot(str(place), compression=None, reader_func=_in_order, shard_func=_shard_of)
    return found.map(_without_number)


def _is_finished(metadata: pathlib.Path) -> bool:
    from tensorflow.core.protobuf.snapshot_pb2 import SnapshotMetadataRecord

    return bool(SnapshotMetadataRecord.FromString(metadata.read_bytes()).finalized)


def _shard_of(number: Any, _sample: Any) -> Any:
    return number % _NUM_SHARDS


def _in_order(shards: Any) -> Any:
    """Return the samples in the order in which they were written, which was to each shard in turn."""
    tf = tensorflow()
    return shards.interleave(_itself, cycle_length=_NUM_SHARDS, num_parallel_calls=tf.data.AUTOTUNE)


def _itself(shard: Any) -> Any:
    return shard


def _without_number(_number: Any, sample: Any) -> Any:
    return sample
