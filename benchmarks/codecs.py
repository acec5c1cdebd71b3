"""Time datamat's codecs against cv2 alone, on pictures and masks of your own or on synthetic ones.

    python benchmarks/codecs.py                                    # synthetic street scenes, 360 x 480
    python benchmarks/codecs.py --images CamVid/train --masks CamVid/trainannot
    python benchmarks/codecs.py --keep-memory                      # as in a worker that keeps freed memory

Every round runs all jobs once over all pictures, so that a slow moment of the machine hits them alike; the best round
counts. Pixels are compared before anything is timed. Two things to know when reading the numbers:

- A picture decoded again and again is up to 40 % faster than different pictures in turn, because the processor learns
  its bytes: use 30 pictures or more.
- glibc gives freed memory of more than a megabyte back to the system at once, and gets it back page by page: on a
  virtual machine that is a third of the decoding time. `--keep-memory` frees one large block first, which makes glibc
  keep what follows (mallopt(3), M_MMAP_THRESHOLD).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import resource
import time
import zlib

import cv2
import numpy as np

from datamat import codecs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=pathlib.Path, help="folder of RGB PNG files")
    parser.add_argument("--masks", type=pathlib.Path, help="folder of grey PNG files")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    if options.keep_memory:
        np.empty((32 << 20) - (64 << 10), np.uint8)  # just under glibc's limit for the threshold, freed at once
    cv2.setNumThreads(1)
    images = files_of(options.images, options.count) or synthetic_images(options.count)
    masks = files_of(options.masks, options.count) or synthetic_masks(options.count)
    jobs = jobs_for(images, masks)
    best, faults = measure(jobs, options.rounds)
    print(f"{'job':28} {'us':>8} {'faults':>8} {'KB':>8}")
    for name, (function, inputs) in jobs.items():
        size = np.mean([len(result) for result in map(function, inputs) if isinstance(result, bytes)] or [0]) / 1000
        print(f"{name:28} {best[name] * 1e6:8.0f} {faults[name]:8.0f} {size or '':8.5}")
    packages = ("opencv-python-headless", "isal", "pyspng-seunglab", "simplejpeg")
    print({name: importlib.metadata.version(name) for name in packages}, "zlib", zlib.ZLIB_RUNTIME_VERSION)


def jobs_for(images, masks):
    pixels = [codecs.decode_image(data) for data in images]
    ids = [codecs.decode_mask(data) for data in masks]
    mixed = [cv2.imencode(".png", mask, [cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_ALL_FILTERS])[1].tobytes()
             for mask in ids]  # a filter for each row, as Pillow writes grey  # fmt: skip
    jpegs = [codecs.encode_jpeg(image) for image in pixels]
    for data, image in zip(images + jpegs, pixels + list(map(codecs.decode_image, jpegs)), strict=True):
        assert np.array_equal(cv2_decode(data, cv2.IMREAD_COLOR_RGB), image)
    for data, mask in zip(masks + mixed, ids + ids, strict=True):
        assert np.array_equal(cv2_decode(data, cv2.IMREAD_UNCHANGED), mask)
    return {
        "decode RGB PNG": (codecs.decode_image, images),
        "decode RGB PNG, cv2": (lambda data: cv2_decode(data, cv2.IMREAD_COLOR_RGB), images),
        "decode mask": (codecs.decode_mask, masks),
        "decode mask, cv2": (lambda data: cv2_decode(data, cv2.IMREAD_UNCHANGED), masks),
        "decode mask, mixed": (codecs.decode_mask, mixed),
        "decode mask, mixed, cv2": (lambda data: cv2_decode(data, cv2.IMREAD_UNCHANGED), mixed),
        "encode RGB PNG": (codecs.encode_png, pixels),
        "encode RGB PNG, cv2": (lambda image: cv2.imencode(".png", image)[1].tobytes(), pixels),
        "encode mask": (codecs.encode_png, ids),
        "encode mask, cv2": (lambda mask: cv2.imencode(".png", mask)[1].tobytes(), ids),
        "decode JPEG": (codecs.decode_image, jpegs),
        "decode JPEG, cv2": (lambda data: cv2_decode(data, cv2.IMREAD_COLOR_RGB), jpegs),
        "encode JPEG q95": (codecs.encode_jpeg, pixels),
        "probe PNG": (codecs.probe, images),
        "check PNG": (lambda data: codecs.probe(data, whole=True), images),
        "check mask": (lambda data: codecs.probe(data, whole=True), masks),
        "check JPEG": (lambda data: codecs.probe(data, whole=True), jpegs),
    }


def measure(jobs, rounds):
    best, faults = dict.fromkeys(jobs, float("inf")), {}
    for _ in range(rounds):
        for name, (function, inputs) in jobs.items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            for value in inputs:
                function(value)
            best[name] = min(best[name], (time.perf_counter() - start) / len(inputs))
            faults[name] = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(inputs)
    return best, faults


def cv2_decode(data, flag):
    return cv2.imdecode(np.frombuffer(data, np.uint8), flag)


def files_of(folder, count):
    return [codecs.read_file(path) for path in sorted(folder.glob("*.png"))[:count]] if folder else []


def synthetic_images(count):
    """Smooth shapes with camera noise, written by cv2 with libpng's own choice of filters, as datasets are."""
    files = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        noise = rng.normal(0, 3, (360, 480, 3))
        image = np.clip(cv2.resize(coarse, (480, 360), interpolation=cv2.INTER_CUBIC) + noise, 0, 255).astype(np.uint8)
        files.append(cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 6])[1].tobytes())
    return files


def synthetic_masks(count):
    """Regions of twelve classes with ragged borders."""
    files = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        field = cv2.GaussianBlur(rng.normal(size=(360, 480)), (0, 0), 12)
        ranks = np.searchsorted(np.quantile(field, np.linspace(0, 1, 13)[1:-1]), field)
        files.append(cv2.imencode(".png", ranks.astype(np.uint8), [cv2.IMWRITE_PNG_COMPRESSION, 6])[1].tobytes())
    return files


if __name__ == "__main__":
    main()
