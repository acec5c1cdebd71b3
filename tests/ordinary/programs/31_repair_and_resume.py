"""Bad files are set aside, repaired by hand, and retried: the directory ends as if nothing had been wrong.

Prints: 24 stored, 6 set aside / repaired: 30 stored, 0 failed
Says: rows .* changed on disk
Again: damages its input again.
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import os
import pathlib
import shutil

import cv2
import numpy as np

from datamat import DatasetWriter, Features, Image, Index, Materializer, Scalar, WorkerOptions, load

raw = pathlib.Path("raw")
shutil.rmtree("out", ignore_errors=True)
shutil.rmtree(raw, ignore_errors=True)
raw.mkdir()


def picture(i):
    return np.full((10, 12, 3), i * 8, np.uint8)


def save(i, spoilt):
    data = cv2.imencode(".png", picture(i))[1].tobytes()
    (raw / f"{i:02d}.png").write_bytes(data[: len(data) // 2] if spoilt else data)
    os.utime(raw / f"{i:02d}.png", (1_700_000_000, 1_700_000_000))


for i in range(30):
    save(i, spoilt=i % 5 == 2)


class Pictures(DatasetWriter):
    name = "pictures"
    features = Features({"image": Image((10, 12, 3)), "brightness": Scalar("float64")})

    def index(self, source):
        return Index.from_folder(source, suffixes=[".png"])

    def read(self, row):
        image = cv2.imread(row.fields["image"])
        return {"image": image[..., ::-1], "brightness": float(image.mean())}


workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
job = Materializer(Pictures, raw, "out")
report = job.run(errors="quarantine", workers=workers)
print(f"{len(load('out'))} stored, {report.num_failed} set aside")

# %%
for i in range(2, 30, 5):
    save(i, spoilt=False)
report = job.run(retry_failed=True, errors="quarantine", workers=workers)
stored = {sample["key"]: sample for sample in load("out")}
for i in range(30):
    assert np.array_equal(stored[f"{i:02d}"]["image"], picture(i))
    assert stored[f"{i:02d}"]["brightness"] == picture(i).mean()
print(f"repaired: {len(stored)} stored, {report.num_failed} failed")
