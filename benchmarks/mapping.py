"""What it costs to fetch a record from a shard in the page cache, its checksum tested: read, or mapped into memory.

    python benchmarks/mapping.py [--rounds 5]

"read" is one `pread`, as datamat does it. "map" asks the system for the pages of the record first (MADV_POPULATE_READ,
which gives an error where touching them would end the process), and "map, given back" returns them afterwards, without
which the resident memory grows to the size of the dataset. The contenders take turns; the median of each is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

FILE_BYTES = 200 << 20
RECORD_BYTES = (50_000, 500_000, 3_000_000)
MADV_DONTNEED, MADV_POPULATE_READ = 4, 22  # madvise(2); Python 3.11 does not name the second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{platform.machine()}, {os.cpu_count()} logical cores, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, google-crc32c {google_crc32c.implementation}")
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.random.default_rng(0).bytes(FILE_BYTES))
        file.flush()
        fetchers = contenders(file.fileno())
        for num_bytes in RECORD_BYTES:
            for num_threads in (1, 2):
                report(fetchers, num_bytes, num_threads, rounds)


def report(fetchers: dict[str, Callable[[int, int], bytes]], num_bytes: int, num_threads: int, rounds: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in fetchers}
    for _ in range(rounds):
        for name, fetch in fetchers.items():
            taken[name].append(cost(fetch, num_bytes, num_threads))
    print(f"\nrecords of {num_bytes:,} bytes, {num_threads} threads\n{'us per record':20} {'median':>8} {'x read':>8}")
    for name, costs in taken.items():
        ratio = statistics.median(map(float.__truediv__, costs, taken["read"]))
        print(f"{name:20} {statistics.median(costs):8.1f} {ratio:8.2f}")


def cost(fetch: Callable[[int, int], bytes], num_bytes: int, num_threads: int) -> float:
    """Return the microseconds per record of fetching all of them, with the threads side by side."""
    count = FILE_BYTES // num_bytes

    def work(first: int) -> None:
        for number in range(first, count, num_threads):
            fetch(number * num_bytes, num_bytes)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / count * 1e6


def contenders(descriptor: int) -> dict[str, Callable[[int, int], bytes]]:
    """Return functions from the offset and size of a record to its value, by name."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # called without the interpreter's lock, unlike mmap's
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)

    def advise(offset: int, num_bytes: int, advice: int) -> None:
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if madvise(pages.ctypes.data + begin, offset + num_bytes - begin, advice):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(offset: int, num_bytes: int) -> bytes:
        return tested(np.frombuffer(os.pread(descriptor, num_bytes, offset), np.uint8))

    def mapped(offset: int, num_bytes: int) -> bytes:
        advise(offset, num_bytes, MADV_POPULATE_READ)
        return tested(pages[offset : offset + num_bytes])

    def given_back(offset: int, num_bytes: int) -> bytes:
        found = mapped(offset, num_bytes)
        advise(offset, num_bytes, MADV_DONTNEED)
        return found

    return {"read": read, "map": mapped, "map, given back": given_back}


def tested(record: np.ndarray) -> bytes:
    """Return the value in a record after a look at its checksum, as a reader of TFRecords does."""
    google_crc32c.value(record)
    return record[12:].tobytes()


if __name__ == "__main__":
    main()
