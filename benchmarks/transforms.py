"""One image through the same transform a thousand times: albumentations, torchvision, kornia, and TensorFlow's own.

    python benchmarks/transforms.py [--runs 1000] [--size 360 480]

A random horizontal flip, a random crop to 7/8 of the size, and a random change of brightness and contrast, of an image
uint8 (height, width, 3) with one thread. Each library gets the image in the form that it wants, and keeps it there:
neither conversion nor collation is in the numbers. Libraries that are not installed are left out and named.

The published wheel of torchvision is built for the torch of CUDA. With torch's build for processors its own compiled
operators cannot be loaded, and its import fails at `torchvision::nms`. Its transforms are made of torch's operators
alone: so here the two that the import asks for are declared, without code, and never called.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import time

import numpy as np
from tf_data import machine

PACKAGES = ("albumentations", "opencv-python-headless", "torch", "torchvision", "kornia", "tensorflow", "numpy")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--size", type=int, nargs=2, default=(360, 480), metavar=("HEIGHT", "WIDTH"))
    options = parser.parse_args()
    image = np.random.default_rng(0).integers(0, 256, (*options.size, 3), np.uint8)
    crop = tuple(size * 7 // 8 for size in options.size)
    jobs = {}
    for make in (albumentations, torchvision, kornia, tensorflow):
        try:
            jobs |= make(image, crop)
        except ImportError as error:
            print(f"left out: {make.__name__} ({error})")
    print(f"{'library':30} {'ms, median':>10} {'s for all':>10}")
    for name, seconds in measure(jobs, options.runs).items():
        print(f"{name:30} {statistics.median(seconds) * 1e3:10.3f} {sum(seconds):10.2f}")
    print(f"\n{machine()}, {options.runs} runs, {versions()}")


def measure(jobs, runs):
    """Return the seconds of each run, the libraries by turns."""
    found = {name: [] for name in jobs}
    for number in range(runs + 3):  # the first ones build things
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            if number >= 3:
                found[name].append(time.perf_counter() - begin)
    return found


def albumentations(image, crop):
    import albumentations as A  # noqa: N812 -- as its users do
    import cv2

    cv2.setNumThreads(1)
    pipeline = A.Compose([A.HorizontalFlip(p=0.5), A.RandomCrop(*crop), A.RandomBrightnessContrast(0.2, 0.2, p=1)])
    return {"albumentations": lambda: pipeline(image=image)}


def torchvision(image, crop):
    import torch

    torch.set_num_threads(1)
    try:
        from torchvision.transforms import v2
    except RuntimeError:  # see above
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision.transforms import v2
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(crop), v2.ColorJitter(0.2, 0.2)])
    tensor = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return {"torchvision v2, uint8 tensor": lambda: pipeline(tensor)}


def kornia(image, crop):
    import torch

    torch.set_num_threads(1)
    import kornia.augmentation as K  # noqa: N812

    pipeline = K.AugmentationSequential(K.RandomHorizontalFlip(), K.RandomCrop(crop), K.ColorJiggle(0.2, 0.2, p=1.0))
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    return {"kornia, float32 batch of one": lambda: pipeline(tensor)}


def tensorflow(image, crop):
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    @tf.function
    def pipeline(image):
        image = tf.image.random_crop(tf.image.random_flip_left_right(image), (*crop, 3))
        return tf.image.random_contrast(tf.image.random_brightness(image, 0.2), 0.8, 1.2)

    tensor = tf.constant(image)
    return {"tf.image, traced": lambda: pipeline(tensor).numpy()}


def versions():
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


if __name__ == "__main__":
    main()
