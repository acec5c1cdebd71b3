"""img2dataset's table of urls and captions: some files are gone, some are no pictures; those are skipped and listed.

Prints: 50 rows, 41 stored, 9 failed / captions and pictures agree
Place: the index names the files of items by their absolute paths.
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import csv
import pathlib

import cv2
import numpy as np

from datamat import ErrorPolicy, WorkerOptions, load, materialize

root = pathlib.Path("raw")
if not root.exists():
    root.mkdir()
    with open(root / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["url", "caption"])
        for i in range(50):
            path = root / f"{i}.jpg"
            writer.writerow([str(path), f'picture "{i}", with, commas' if i % 7 else ""])
            picture = cv2.imencode(".jpg", np.full((8 + i % 3, 8, 3), i * 5, np.uint8))[1].tobytes()
            if i % 10 == 3:
                picture = b"<html>404 Not Found</html>"
            if i % 25 == 7:
                picture = picture[:100]
            if i % 25 != 9:
                path.write_bytes(picture)

with open(root / "table.csv", newline="") as file:
    rows = list(csv.DictReader(file))


# %%
def download(row):
    with open(row["url"], "rb") as file:
        jpg = file.read()
    picture = cv2.imdecode(np.frombuffer(jpg, np.uint8), cv2.IMREAD_COLOR)
    if picture is None or len(jpg) == 100:
        raise ValueError("this is no picture")
    return {"jpg": jpg, "caption": row["caption"], "url": row["url"], "width": picture.shape[1]}


report = materialize(
    download,
    rows,
    "out",
    errors=ErrorPolicy("skip", max_errors=0.5),
    workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
)

# %% a plain loop
expected, failed = {}, 0
for row in rows:
    try:
        expected[row["url"]] = download(row)
    except (OSError, ValueError):
        failed += 1
assert report.num_failed == failed
stored = {sample["url"]: sample for sample in load("out")}
assert stored.keys() == expected.keys()
print(f"{len(rows)} rows, {len(stored)} stored, {failed} failed")
assert all(stored[url]["caption"] == expected[url]["caption"] for url in expected)
for url, sample in stored.items():
    assert np.array_equal(sample["jpg"], cv2.imread(url)[..., ::-1])
print("captions and pictures agree")
