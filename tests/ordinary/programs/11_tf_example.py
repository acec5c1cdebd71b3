"""TensorFlow's TFRecord tutorial: 1000 observations of four kinds of feature, read back with `tf.io` alone.

Prints: 1000 examples, 1000 equal
Says: absl|oneDNN|cuda
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import glob

import numpy as np
import tensorflow as tf

from datamat import Features, Scalar, Text, WorkerOptions, materialize

n_observations = 1000
rng = np.random.default_rng(0)
feature0 = rng.choice([False, True], n_observations)
feature1 = rng.integers(0, 5, n_observations)
strings = np.array(["cat", "dog", "chicken", "horse", "goat"])
feature2 = strings[feature1]
feature3 = rng.standard_normal(n_observations).astype(np.float32)

# %%
materialize(
    lambda i: {"feature0": feature0[i], "feature1": feature1[i], "feature2": str(feature2[i]), "feature3": feature3[i]},
    range(n_observations),
    "out",
    features=Features(
        {"feature0": Scalar("bool"), "feature1": Scalar("int64"), "feature2": Text(), "feature3": Scalar("float32")}
    ),
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
description = {
    "feature0": tf.io.FixedLenFeature([], tf.int64),
    "feature1": tf.io.FixedLenFeature([], tf.int64),
    "feature2": tf.io.FixedLenFeature([], tf.string),
    "feature3": tf.io.FixedLenFeature([], tf.float32),
}
parsed = tf.data.TFRecordDataset(sorted(glob.glob("out/*.tfrecord"))).map(
    lambda record: tf.io.parse_single_example(record, description)
)
plain = sorted(zip(feature0.tolist(), feature1.tolist(), feature2.tolist(), feature3.tolist()))
found = sorted(
    (bool(one["feature0"]), int(one["feature1"]), one["feature2"].decode(), float(one["feature3"]))
    for one in parsed.as_numpy_iterator()
)
print(f"{len(found)} examples, {sum(a == b for a, b in zip(plain, found))} equal")
