"""A consumer of a tf.data service, for the tests: prints the keys that it gets in each epoch, as JSON lines.

    python service_consumer.py DIR ADDRESS JOB EPOCHS

In each epoch it prints its first key, then waits for a line before it continues: so a test can make sure that several
consumers have begun.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from datamat import load


def main():
    directory, address, job, epochs = sys.argv[1:]
    dataset = load(directory, "train").to_tf(1, shuffle=True, seed=1, service=address, job=job)
    for _ in range(int(epochs)):
        keys = []
        for batch in dataset.as_numpy_iterator():
            keys += [key.decode() for key in np.ravel(batch["key"])]
            if len(keys) == len(batch["key"]):
                print(json.dumps(keys[0]), flush=True)
                sys.stdin.readline()
        print(json.dumps(keys), flush=True)


if __name__ == "__main__":
    main()
