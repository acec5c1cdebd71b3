"""One large picture cut into tiles: the items are tuples of a path and two numbers.

Prints: 16 tiles, together the picture: True / other picture: True
Says: will be rebuilt: .*changed on disk
Again: draws its picture again.
Place: the index names the files of items by their absolute paths.
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import itertools
import os
from pathlib import Path

import cv2
import numpy as np

from datamat import WorkerOptions, load, materialize

path = Path("raw/scan über alles.png")
path.parent.mkdir(exist_ok=True)
places = list(itertools.product(range(0, 64, 16), range(0, 64, 16)))


def draw(seed):
    picture = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    path.write_bytes(cv2.imencode(".png", picture)[1])
    os.utime(path, (1_700_000_000 + seed, 1_700_000_000 + seed))
    return picture[..., ::-1]


def tile(item):
    file, (row, column) = item
    whole = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    return {"tile": np.ascontiguousarray(whole[row : row + 16, column : column + 16]), "row": row, "column": column}


def put_together():
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    materialize(tile, [(path, place) for place in places], "out", workers=workers)
    together, found = np.zeros((64, 64, 3), np.uint8), list(load("out"))
    for sample in found:
        row, column = int(sample["row"]), int(sample["column"])
        together[row : row + 16, column : column + 16] = sample["tile"]
    return len(found), together


# %%
picture = draw(1)
count, together = put_together()
print(f"{count} tiles, together the picture: {np.array_equal(together, picture)}")

# %%
picture = draw(2)
count, together = put_together()
print(f"other picture: {np.array_equal(together, picture)}")
