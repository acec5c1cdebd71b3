"""What the CPU mask, pinning and thread limits bring, each against doing nothing.

    python benchmarks/affinity.py [--rounds 3] [--workers N]

The work is what a dataset worker does to an image (decode, flip, scale, encode, with OpenCV), and products of matrices
by BLAS. Variants are run in turn in each round; the best round counts. Needs cores to show a difference in masks: on a
machine without hyper-threads all variants of the mask are the same CPUs.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from datamat.parallel import PathosExecutor, physical_cores

VARIANTS = {  # name: (affinity, are library threads limited?)
    "nothing": (None, False),
    "mask": ("physical", False),
    "pinned": ("pinned", False),
    "thread limits": (None, True),
    "mask and limits": ("physical", True),
}


class Work:
    """Two kinds of work, with the thread pools as they are or as the pool has limited them."""

    def __init__(self, is_limited: bool, num_cpus: int):
        self.is_limited = is_limited
        self.num_cpus = num_cpus

    def setup_worker(self):
        if not self.is_limited:
            from datamat.parallel.affinity import limit_loaded_libraries

            limit_loaded_libraries(self.num_cpus)

    def images(self, seed: int) -> int:
        import cv2

        image = np.random.default_rng(seed).integers(0, 255, (360, 480, 3), np.uint8)
        encoded = cv2.imencode(".png", image)[1]
        for _ in range(3):
            decoded = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
            flipped = cv2.resize(cv2.flip(decoded, 1), (480, 360))
            encoded = cv2.imencode(".png", cv2.GaussianBlur(flipped, (5, 5), 1))[1]
        return len(encoded)

    def matrices(self, seed: int) -> float:
        matrix = np.random.default_rng(seed).random((300, 300))
        for _ in range(30):
            matrix = matrix @ matrix
            matrix /= matrix.max()
        return float(matrix[0, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(physical_cores()))
    options = parser.parse_args()
    import os

    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.rounds):
        for name, (affinity, is_limited) in VARIANTS.items():
            work = Work(is_limited, len(os.sched_getaffinity(0)))
            with PathosExecutor(options.workers, affinity=affinity) as pool:
                for kind in (work.images, work.matrices):
                    list(pool.map(kind, range(2 * options.workers)))
                    begin = time.perf_counter()
                    list(pool.map(kind, range(16)))
                    seconds.setdefault((name, kind.__name__), []).append(time.perf_counter() - begin)
    print(f"{options.workers} workers      images      matrices   (seconds)")
    for name in VARIANTS:
        print(f"{name:18} {min(seconds[name, 'images']):6.2f} {min(seconds[name, 'matrices']):12.2f}")


if __name__ == "__main__":
    main()
