"""A small dataset of images and masks that tests generate, with its writer and a transform."""

import hashlib
import os
import pathlib

import numpy as np
from prepared import Prepared

from datamat import DatasetWriter, Features, Image, Index, Mask, ShardOptions
from datamat.codecs import encode_png, read_file
from datamat.testing import InlineExecutor

NAMES = ("sky", "road", "car", "tree")


class Pairs(DatasetWriter):
    """Image and mask in CamVid's layout; `read` returns the files."""

    name = "pairs"
    features = Features({"image": Image((24, 32, 3)), "mask": Mask((24, 32), names=NAMES)})

    def index(self, source):
        lists = {path.stem: path.name for path in sorted(pathlib.Path(source).glob("*.txt"))}
        return Index.from_lists(source, lists)

    def read(self, row):
        return {name: read_file(row.fields[name]) for name in ("image", "mask")}


def make_pairs(folder, num_train=20, num_val=4, *, seed=0):
    """Write image and mask files with random blocks, and their lists; the mask decides two channels of the image."""
    rng = np.random.default_rng(seed)
    for split, count in {"train": num_train, "val": num_val}.items():
        lines = []
        for number in range(count):
            mask = np.repeat(np.repeat(rng.integers(0, 4, (3, 4), np.uint8), 8, 0), 8, 1)
            image = np.stack([mask * 60, mask * 20 + 40, rng.integers(0, 255, mask.shape, np.uint8)], 2).astype(
                np.uint8
            )
            paths = [f"{split}/{split}{number:03d}.png", f"{split}annot/{split}{number:03d}.png"]
            for path, array in zip(paths, (image, mask), strict=True):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(encode_png(array))
                os.utime(folder / path, (1, 1))
            lines.append(" ".join(f"/elsewhere/{path}" for path in paths) + "\n")
        (folder / f"{split}.txt").write_text("".join(lines))
    return folder


def jitter(sample, rng):
    """Flip both and change the brightness of the image; a transform."""
    image, mask = sample["image"], sample["mask"]
    if rng.random() < 0.5:
        image, mask = image[:, ::-1], mask[:, ::-1]
    image = np.clip(image.astype(np.int16) + rng.integers(-40, 40), 0, 255).astype(np.uint8)
    return {**sample, "image": np.ascontiguousarray(image), "mask": np.ascontiguousarray(mask)}


def job(source, output, writer=None, **options):
    """Return a job with two shards in each split; it runs in this process unless `workers` are given."""
    runs_here = {} if "workers" in options else {"executor": InlineExecutor()}
    return Prepared(writer or Pairs(), source, output, **{"shards": ShardOptions(num_shards=2), **runs_here, **options})


def digests(folder):
    """Return the digest of each visible file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(pathlib.Path(folder).rglob("*"))
        if path.is_file() and not any(part.startswith(".datamat") for part in path.relative_to(folder).parts)
    }
