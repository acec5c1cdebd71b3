"""By hand: a pool, and a `TFRecordWriter` for each process."""

import multiprocessing
import os
import sys

import tensorflow as tf
from task import files, sample

source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])


def convert(job):
    number, paths = job
    with tf.io.TFRecordWriter(os.path.join(output, f"train-{number:05d}.tfrecord")) as writer:
        for path in paths:
            made = sample(path)
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[made["image"]])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[made["label"]])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


os.makedirs(output, exist_ok=True)
paths = files(source)
with multiprocessing.Pool(workers) as pool:
    pool.map(convert, [(number, paths[number::workers]) for number in range(workers)])
