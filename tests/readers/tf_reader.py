"""Reads `to_tf` in many ways at once, for the tests: saves all iterators in mid-epoch, reads on, and kills itself.

    python tf_reader.py PAIRS ROWS CHECKPOINT WAY...

`left` restores them in another process.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import numpy as np

from datamat import load
from datamat.readers.tf import TfOptions

EPOCHS = 3


def halve(sample):
    """Traced by TensorFlow: a transform without random numbers."""
    return {**sample, "image": sample["image"][::2]}


# name: (set, arguments of to_tf, batches read before the save). Epochs have 15 batches of four pairs, or 25 of rows.
WAYS = {
    "in order": ("pairs", {"batch_size": 4}, 19),
    "shuffled": ("pairs", {"batch_size": 4, "shuffle": True, "seed": 1}, 19),
    "window": ("pairs", {"batch_size": 4, "shuffle": 7, "seed": 2}, 35),
    "first epoch": ("pairs", {"batch_size": 4, "shuffle": 7}, 3),
    "end of an epoch": ("pairs", {"batch_size": 4, "shuffle": True}, 15),
    "samples": ("pairs", {"shuffle": 7}, 70),
    "samples in order": ("pairs", {}, 70),
    "repeated": ("pairs", {"batch_size": 7, "shuffle": 7, "tf": TfOptions(repeat=True)}, 12),
    "repeated in order": ("pairs", {"batch_size": 7, "tf": TfOptions(repeat=True)}, 12),
    "transformed": ("pairs", {"batch_size": 4, "shuffle": 7, "transform": halve, "drop_last": True}, 19),
    "cached": ("pairs", {"batch_size": 4, "shuffle": 7, "tf": TfOptions(cache=True, static_transform=halve)}, 19),
    "cached in part": ("pairs", {"batch_size": 4, "shuffle": 7, "tf": TfOptions(cache=True)}, 3),
    "tuples": ("pairs", {"batch_size": 4, "shuffle": 7, "as_supervised": ("image", "mask")}, 19),
    "rows": ("rows", {"batch_size": 4, "shuffle": True}, 40),
    "rows in order": ("rows", {"batch_size": 4}, 40),
    "samples of rows": ("rows", {"shuffle": 7}, 110),
}


def datasets(folders, names):
    """Return the dataset of each way, of several epochs."""
    found = {}
    for name in names:
        kind, options, _ = WAYS[name]
        made = load(folders[kind], "train").to_tf(**options)
        found[name] = made.take(45) if name.startswith("repeated") else made.repeat(EPOCHS)
    return found


def digest(batch):
    """Return a digest of all bytes of a batch, which is made of tensors, ragged ones and bytes."""
    import tensorflow as tf

    found = hashlib.sha256()
    for value in tf.nest.flatten(batch, expand_composites=True):
        array = np.asarray(value.numpy())
        found.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return found.hexdigest()


def digests(folders, names):
    """Return the digests of all batches of each way."""
    return {name: [digest(batch) for batch in dataset] for name, dataset in datasets(folders, names).items()}


def saved_with(iterators):
    """Return a checkpoint of iterators."""
    import tensorflow as tf

    return tf.train.Checkpoint(**{name.replace(" ", "_"): one for name, one in iterators.items()})


def left(folders, names, checkpoint):
    """Restore the iterators of each way, and return the digests of what is left."""
    iterators = {name: iter(dataset) for name, dataset in datasets(folders, names).items()}
    saved_with(iterators).read(checkpoint).assert_consumed()
    return {name: [digest(batch) for batch in iterator] for name, iterator in iterators.items()}


def main():
    pairs, rows, checkpoint, *names = sys.argv[1:]
    iterators = {name: iter(dataset) for name, dataset in datasets({"pairs": pairs, "rows": rows}, names).items()}
    for name, iterator in iterators.items():
        for _ in range(WAYS[name][2]):
            next(iterator)
    saved_with(iterators).write(checkpoint)
    for iterator in iterators.values():
        next(iterator)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
