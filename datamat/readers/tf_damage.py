"""Damaged TFRecord shards in tf.data: an error that names file, record and key.

TensorFlow's own names neither, and a shard that is cut off between two records it takes for a shorter one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from datamat.errors import CorruptDataError
from datamat.readers.tf_features import tensorflow

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_size", "guarded"]


def check_size(path: str, num_bytes: int) -> None:
    """Refuse a shard that is not as long as the manifest says: records behind its last one are never asked for.

    Raises:
        CorruptDataError: it has another size, or is not there.
    """
    try:
        found = f"has {size} bytes" if (size := os.stat(path).st_size) != num_bytes else ""
    except OSError as error:
        found = f"cannot be read ({error.strerror})"
    if found:
        raise CorruptDataError(
            f"{path} {found}, the manifest says {num_bytes}; remove the file and run the job again, which makes it anew"
        )


def guarded(records: Any, name: Any, num_records: Any, explain: Callable[[str], Exception] | None) -> Any:
    """Return the records of one shard, then, if they are fewer than they should be, an error that says why.

    Args:
        records: a `tf.data.Dataset` of the records.
        name: string tensor (), the path of the shard.
        num_records: int64 tensor (), how many there should be.
        explain: returns what is wrong with the shard of a path; None where no Python runs, as in a service: the error
            then names the file alone.
    """
    tf = tensorflow()

    def fail(path: Any) -> Any:
        if explain is not None:
            return tf.py_function(lambda found: _raise(explain(os.fsdecode(found.numpy()))), [path], tf.string)
        told = [path, "is damaged; to see which record: datamat verify of its directory"]
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(path, ""), told)]):
            return tf.identity(path)

    # Asked for only when the shard had too few records: those come first, though not out of a block that is not full.
    error = tf.data.Dataset.from_tensors(name).map(fail).map(lambda text: tf.ensure_shape(text, ()))
    return records.ignore_errors().concatenate(error).take(num_records)


def _raise(error: Exception) -> None:
    raise error
