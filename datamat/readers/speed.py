"""How fast a finished directory is read on this machine, by reader and number of workers, beside its files alone."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import random
import time
from typing import TYPE_CHECKING, Any

from datamat.directory.remote import RemotePath, location
from datamat.errors import DatamatError, OptionError
from datamat.parallel.affinity import physical_cores
from datamat.readers.dataset import load

if TYPE_CHECKING:
    import os
    import pathlib
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from datamat.directory.manifest import ShardInfo
    from datamat.readers.dataset import ShardedDataset


__all__ = ["READERS", "ReadingSpeed", "SpeedRow", "measure_reading"]

READERS = ("numpy", "torch", "tf", "records")
"""The ways to read: `to_numpy`, `to_torch`, `to_tf`, and single records at random positions."""

_FILES, _FILES_AGAIN = "files", "files again"
_PACKAGES = {"torch": "torch", "tf": "tensorflow"}
_READ_BYTES = 1 << 20
_MOST_BYTES = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class SpeedRow:
    """One measurement.

    Attributes:
        reader: "files", which reads the shards and does nothing with their bytes, "files again", or one of `READERS`.
        num_workers: worker processes; 0 where the reader takes threads.
        num_records: records that were read, after the first batch.
        num_bytes: bytes of the shards that hold them, by the mean size of a record.
        seconds: time that this took.
        start_s: time until the first batch was there.
        problem: why the reader cannot read the directory; "" where it can.
    """

    reader: str
    num_workers: int
    num_records: float
    num_bytes: float
    seconds: float
    start_s: float = 0.0
    problem: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The measurement as words."""
        workers = str(self.num_workers or "")
        if self.problem:
            return self.reader, workers, self.problem
        rates = (self.num_records / self.seconds, self.num_bytes / self.seconds / 1e6)
        return self.reader, workers, f"{rates[0]:,.0f}", f"{rates[1]:,.1f}", f"{self.start_s:.2f}"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingSpeed:
    """What `measure_reading` found. `str` gives a table.

    Attributes:
        path: the directory.
        split: the split that was read; None for all.
        format: format of the shards.
        num_records: records in them.
        num_bytes: their size.
        rows: the measurements.
    """

    path: str
    split: str | None
    format: str
    num_records: int
    num_bytes: int
    rows: tuple[SpeedRow, ...]

    def __str__(self) -> str:
        head = ("reader", "workers", "records/s", "MB/s", "start s")
        lines = [head, *(row.cells for row in self.rows)]
        widths = [max(len(line[place]) for line in lines if len(line) == len(head)) for place in range(len(head))]
        widths[0] = max(len(line[0]) for line in lines)
        drawn = [
            "  ".join(
                cell.ljust(width) if place == 0 or len(line) < len(head) else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=False))
            )
            for line in lines
        ]
        size = f"{self.num_records:,} records, {self.num_bytes / 1e6:,.1f} MB as {self.format}"
        return "\n".join([f"{self.path}: {size}", *(f"  {line.rstrip()}" for line in drawn)])


def measure_reading(  # noqa: PLR0913 -- what is read, and how
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    format: str | None = None,  # noqa: A002 -- as for `load`
    batch_size: int = 32,
    readers: Sequence[str] | None = None,
    num_workers: Sequence[int] | None = None,
    seconds: float = 2.0,
    cache_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReadingSpeed:
    """Measure how fast a finished directory is read: each reader in turn, in file order, for some seconds.

    The files alone come first. They are the limit of what any reader can do: the first time as far as they are not in
    memory yet, the second time from memory, as the readers then find what fits into it.

    Args:
        path: the directory that a run wrote, or its URL.
        split: split to read, or None for all.
        format: which of the formats to read; None takes the first.
        batch_size: records in a batch.
        readers: which of `READERS` to measure; None takes those whose packages are installed.
        num_workers: numbers of worker processes to measure `to_numpy` and `to_torch` with; None takes 0, which reads by
            threads, and one per core.
        seconds: time for each measurement.
        cache_dir: where the copies of the shards of a URL go; as for `load`. Readers share them, so that only the
            first of them waits for shards.
        storage_options: options that fsspec gets with a URL.

    Returns:
        The measurements. A reader that cannot read these records has the reason in its row.

    Raises:
        OptionError: an argument is out of range, or there is no such split or format.
        OutputError: the directory is not finished.
        MissingDependencyError: the package of a reader is not installed.

    Example:
        >>> print(measure_reading("out/camvid", "train"))   # doctest: +SKIP
    """
    if batch_size < 1 or not seconds > 0:
        raise OptionError(f"bench: batch_size={batch_size} and seconds={seconds:g}; want positive numbers")
    unknown = sorted({*(readers or ())} - {*READERS})
    if unknown:
        raise OptionError(f"bench: there is no reader {unknown[0]!r}; want {', '.join(READERS)}")
    workers = sorted(set(num_workers if num_workers is not None else (0, len(physical_cores()))))
    if workers[:1] < [0]:
        raise OptionError(f"bench: num_workers is {workers[0] if workers else 'empty'}; want 0 or more")
    data = load(path, split, format=format, cache_dir=cache_dir, storage_options=storage_options)
    manifest = data.manifest
    shards = manifest.shards if split is None else manifest.splits[split]
    folder = location(path, storage_options)
    found = _Directory(data, [folder / shard.file for shard in shards], shards, batch_size, seconds)
    rows = [found.files(_FILES)] + ([] if isinstance(folder, RemotePath) else [found.files(_FILES_AGAIN)])
    chosen = readers if readers is not None else [name for name in READERS if _is_installed(name)]
    for reader in chosen:
        rows += [found.read(reader, count) for count in (workers if reader in ("numpy", "torch") else [0])]
    return ReadingSpeed(str(folder), split, manifest.format, len(data), found.num_bytes, tuple(rows))


def _counts(file: pathlib.Path | RemotePath) -> Generator[int, None, None]:
    """Read a file; yield the sizes of what comes."""
    if isinstance(file, RemotePath):
        yield from map(len, file.blocks(_MOST_BYTES))
        return
    buffer = bytearray(_READ_BYTES)
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            yield count


def _is_installed(reader: str) -> bool:
    return reader not in _PACKAGES or importlib.util.find_spec(_PACKAGES[reader]) is not None


class _Directory:
    """Takes measurements of a directory."""

    def __init__(
        self,
        data: ShardedDataset,
        files: Sequence[pathlib.Path | RemotePath],
        shards: Sequence[ShardInfo],
        batch_size: int,
        seconds: float,
    ) -> None:
        self._data = data
        self._files = files
        self._batch_size = batch_size
        self._seconds = seconds
        self.num_bytes = sum(shard.num_bytes for shard in shards)
        self._record_bytes = self.num_bytes / max(len(data), 1)

    def files(self, name: str) -> SpeedRow:
        """Read the shards, and do nothing with their bytes; once, or for as long as a measurement takes."""
        began, num_bytes = time.perf_counter(), 0
        for file in self._files:
            with contextlib.closing(_counts(file)) as counts:
                for count in counts:
                    num_bytes += count
                    if time.perf_counter() - began >= self._seconds:
                        break
        elapsed_s = max(time.perf_counter() - began, 1e-9)
        return SpeedRow(name, 0, num_bytes / max(self._record_bytes, 1), num_bytes, elapsed_s)

    def read(self, reader: str, num_workers: int) -> SpeedRow:
        """Read batches, epoch after epoch, until the time is over."""
        began = time.perf_counter()
        try:
            counts = self._counts(reader, num_workers)
            first = next(counts, 0)
            first_s = time.perf_counter()
            num_records = 0
            while num_records == 0 or time.perf_counter() - first_s < self._seconds:
                for count in counts:
                    num_records += count
                    if time.perf_counter() - first_s >= self._seconds:
                        break
                else:
                    counts = self._counts(reader, num_workers)
                if not first:
                    break  # the split is empty
            ended = time.perf_counter()
            del counts  # ends the workers
        except (DatamatError, ImportError) as error:
            return SpeedRow(reader, num_workers, 0, 0, 0.0, problem=str(error))
        num_bytes = num_records * self._record_bytes
        return SpeedRow(reader, num_workers, num_records, num_bytes, ended - first_s, first_s - began)

    def _counts(self, reader: str, num_workers: int) -> Iterator[int]:
        """Yield the number of records of each batch of an epoch."""
        batches: dict[str, Callable[[], Any]] = {
            "numpy": lambda: self._data.to_numpy(self._batch_size, num_workers=num_workers),
            "torch": lambda: self._data.to_torch(self._batch_size, num_workers=num_workers),
            "tf": lambda: self._data.to_tf(self._batch_size),
        }
        if reader in batches:
            return (len(batch["key"]) for batch in batches[reader]())
        draw = random.Random(0)  # noqa: S311 -- positions, not secrets
        positions = itertools.repeat(len(self._data), len(self._data))
        return (len([self._data[draw.randrange(count)]]) for count in positions)
