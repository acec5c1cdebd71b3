"""MosaicML's writer takes columns of every kind: int, float, str, bytes of a picture, arrays, truth values.

Prints: 60 samples, 60 equal to those of the loop
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import io

import numpy as np
from PIL import Image

from datamat import WorkerOptions, load, materialize


def make_sample(i):
    pixels = np.full((20, 30, 3), i, np.uint8)
    pixels[: i % 20] = 255 - i
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return {
        "number": i,
        "weight": i / 7,
        "small": np.float32(i) / 3,
        "caption": f"the picture № {i}, {'☃' * (i % 3)}",
        "jpeg_or_png": buffer.getvalue(),
        "pixels": pixels,
        "embedding": np.arange(i, i + 8, dtype=np.float16),
        "tokens": np.arange(i % 5, dtype=np.int64),
        "flag": i % 2 == 0,
    }


# %%
materialize(
    make_sample,
    range(60),
    "out",
    format=["tfrecord", "parquet"],
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %%
equal = 0
by_number = {int(sample["number"]): sample for sample in load("out")}
for i in range(60):
    wanted, found = make_sample(i), by_number[i]
    wanted["jpeg_or_png"] = wanted["pixels"]  # a file reads back as its picture
    assert all(np.array_equal(found[name], value) for name, value in wanted.items()), i
    assert all(found[name].dtype == wanted[name].dtype for name in ("small", "embedding", "tokens", "pixels"))
    equal += 1
print(f"{len(by_number)} samples, {equal} equal to those of the loop")
