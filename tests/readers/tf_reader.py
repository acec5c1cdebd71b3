"""Reads `to_tf` in many ways at once, for the tests: is killed in the middle of all of them, or continues there.

    python tf_reader.py save PAIRS ROWS CHECKPOINTS WAY...  saves the iterators in mid-epoch, reads on, and kills itself
    python tf_reader.py rest PAIRS ROWS CHECKPOINTS WAY...  restores them, and writes down what is left

`digests` without a checkpoint gives those of all batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys

import numpy as np

from datamat import load

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
    "repeated": ("pairs", {"batch_size": 7, "shuffle": 7, "repeat": True}, 12),
    "repeated in order": ("pairs", {"batch_size": 7, "repeat": True}, 12),
    "transformed": ("pairs", {"batch_size": 4, "shuffle": 7, "transform": halve, "drop_remainder": True}, 19),
    "cached": ("pairs", {"batch_size": 4, "shuffle": 7, "cache": True, "static_transform": halve}, 19),
    "cached in part": ("pairs", {"batch_size": 4, "shuffle": 7, "cache": True}, 3),
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
        found[name] = made.take(45) if options.get("repeat") else made.repeat(EPOCHS)
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


def main():
    import tensorflow as tf

    mode, pairs, rows, checkpoints, *names = sys.argv[1:]
    iterators = {name: iter(dataset) for name, dataset in datasets({"pairs": pairs, "rows": rows}, names).items()}
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=step, **{name.replace(" ", "_"): one for name, one in iterators.items()})
    manager = tf.train.CheckpointManager(checkpoint, checkpoints, max_to_keep=2)
    if mode == "save":
        for name, iterator in iterators.items():
            for _ in range(WAYS[name][2]):
                next(iterator)
        step.assign_add(1)
        manager.save()
        for iterator in iterators.values():
            next(iterator)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.restore(manager.latest_checkpoint).assert_consumed()
    assert step.numpy() == 1
    left = {name: [digest(batch) for batch in iterator] for name, iterator in iterators.items()}
    pathlib.Path(checkpoints, "left.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
