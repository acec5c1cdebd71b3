"""Finished directories, read back: `load` is the way in.

loading      `load`
dataset      records by position, key and in order, as dicts of arrays
batches      the same in batches of numpy arrays or torch tensors; `order`, `schedule` and `states` say which and when,
             `making`, `collate`, `transforms`, `memory` and `sharing` how they are put together
samples      one record, read and decoded; `records`, `keys`, `cache` and `damage` are below it
tf, service  the same as a `tf.data.Dataset`, alone or shared
preview      pictures of samples, with masks drawn over them
"""

from __future__ import annotations

from datamat.readers.dataset import ShardedDataset
from datamat.readers.loading import load

__all__ = ["ShardedDataset", "load"]
