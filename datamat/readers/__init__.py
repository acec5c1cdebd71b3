"""Finished directories, read back: `load` is the way in.

dataset   records by position, key and in order, as dicts of arrays
tf        the same as a `tf.data.Dataset`
preview   pictures of samples, with masks drawn over them
"""

from __future__ import annotations

from datamat.readers.dataset import ShardedDataset, load

__all__ = ["ShardedDataset", "load"]
