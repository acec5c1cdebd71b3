"""The run that killloop.py kills: `python killloop_job.py SOURCE OUTPUT FORMAT NUM_WORKERS START_METHOD`."""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

import numpy as np

from datamat import (
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Mask,
    Materializer,
    MissingDependencyError,
    OptionError,
    ShardOptions,
    WorkerOptions,
)
from datamat.codecs import encode_png, read_file
from datamat.formats import format_names

COPIES = 3


class Blocks(DatasetWriter):
    """Images of random blocks and their masks."""

    name = "blocks"
    features = Features({"image": Image((120, 160, 3)), "mask": Mask((120, 160))})

    def index(self, source):
        for path in sorted(pathlib.Path(source).glob("*-image.png")):
            key = path.name.removesuffix("-image.png")
            files = {"image": path.name, "mask": f"{key}-mask.png"}
            yield IndexRow(key, "val" if key.endswith("7") else "train", files)

    def read(self, row):
        return {name: read_file(row.fields[name]) for name in ("image", "mask")}


def draw(sample, rng):
    """Flip and jitter, and count the call in a file, which outlives every kill."""
    with open(_value_of("KILLLOOP_TALLY"), "ab", buffering=0) as tally:
        tally.write(b".")
    image, mask = sample["image"], sample["mask"]
    if rng.random() < 0.5:
        image, mask = image[:, ::-1], mask[:, ::-1]
    noisy = np.clip(image + rng.normal(0, 6, image.shape), 0, 255).astype(np.uint8)
    return {"image": noisy, "mask": np.ascontiguousarray(mask)}


def _value_of(variable: str) -> str:
    """Return a variable by a computed name, which is no part of the fingerprint: each round has its own tally."""
    return os.environ[variable]


def make_source(folder: pathlib.Path, num_rows: int) -> None:
    """Write so many images and masks."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    for number in range(num_rows):
        mask = np.kron(rng.integers(0, 4, (6, 8)), np.ones((20, 20))).astype(np.uint8)
        image = np.stack([mask * 60, mask * 20, rng.integers(0, 255, mask.shape, np.uint8)], 2).astype(np.uint8)
        (folder / f"{number:05d}-image.png").write_bytes(encode_png(image))
        (folder / f"{number:05d}-mask.png").write_bytes(encode_png(mask))


def run_job(source: str, output: str, format_name: str, num_workers: int, start_method: str | None) -> None:
    """Make the output, or go on with it."""
    Materializer(
        Blocks(),
        source,
        output,
        format=format_name,
        copies={"train": COPIES, "val": COPIES},
        transform=draw,
        shards=ShardOptions(num_shards=2),
    ).run(workers=WorkerOptions(num_workers=num_workers, start_method=start_method), progress=False)


def usable_formats() -> dict[str, str]:
    """Return the formats that a run can write here and now; for each other the reason why not, else ""."""
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        make_source(pathlib.Path(folder, "source"), 10)
        os.environ["KILLLOOP_TALLY"] = f"{folder}/tally"
        for name in format_names():
            try:
                run_job(f"{folder}/source", f"{folder}/{name}", name, 1, None)
            except (MissingDependencyError, OptionError) as error:
                told[name] = str(error)
            else:
                told[name] = ""
    return told


if __name__ == "__main__":
    source, output, format_name, num_workers, start_method = sys.argv[1:]
    run_job(source, output, format_name, int(num_workers), start_method)
