"""Small pictures on disk, and a run from writer to loaded samples."""

import pathlib

import numpy as np
import pytest
from prepared import Prepared

from datamat import load
from datamat.codecs import encode_jpeg, encode_png
from datamat.testing import InlineExecutor


@pytest.fixture
def picture():
    """Write a picture of noise, by suffix PNG or JPEG, and return its bytes."""

    def write(path: pathlib.Path, *, size: tuple[int, int] = (12, 16), seed: int = 0) -> bytes:
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        data = encode_png(pixels) if path.suffix == ".png" else encode_jpeg(pixels, quality=95)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data

    return write


@pytest.fixture
def mask():
    """Write an array as PNG, and return its bytes."""

    def write(path: pathlib.Path, pixels: np.ndarray) -> bytes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_png(pixels))
        return path.read_bytes()

    return write


@pytest.fixture
def materialized(tmp_path):
    """Run a writer over a source and return its samples by split and key."""

    def run(writer, source, **options) -> dict[str, dict[str, dict]]:
        output = tmp_path / "materialized"
        job = Prepared(writer, source, output, executor=InlineExecutor(), **options)
        report = job.run(progress=False)
        assert report.is_complete
        splits = list(job.plan().splits)
        return {split: {sample["key"]: sample for sample in load(output, split)} for split in splits}

    return run
