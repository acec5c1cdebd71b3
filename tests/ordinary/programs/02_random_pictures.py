"""A first example of litdata: pictures of random pixels, a class by position.

Prints: 200 pictures, 200 distinct, classes [20, 20, 20, 20, 20, 20, 20, 20, 20, 20]
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import numpy as np
from PIL import Image

from datamat import ShardOptions, WorkerOptions, load, materialize


def random_images(index):
    return {
        "index": index,
        "image": np.array(Image.fromarray(np.random.randint(0, 256, (32, 32, 3), np.uint8))),
        "class": index % 10,
    }


if __name__ == "__main__":
    materialize(
        random_images,
        list(range(200)),
        "out/fast_data",
        shards=ShardOptions(num_shards=4),
        workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
    )

# %% a plain loop
plain = [random_images(index) for index in range(200)]
stored = sorted(load("out/fast_data"), key=lambda sample: sample["index"])
assert [(sample["index"], sample["class"]) for sample in stored] == [(one["index"], one["class"]) for one in plain]
distinct = len({sample["image"].tobytes() for sample in stored})
assert distinct == len({one["image"].tobytes() for one in plain})
counts = np.bincount([sample["class"] for sample in stored])
print(f"{len(stored)} pictures, {distinct} distinct, classes {counts.tolist()}")
