"""The options of a run, checked when they are made, so that nothing downstream checks again."""

from __future__ import annotations

import dataclasses
from typing import Literal

from datamat.errors import OptionError

__all__ = ["ErrorPolicy", "ShardOptions", "WorkerOptions"]


def _positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or value <= 0):
            raise OptionError(f"{owner}: {name} is {value!r}; want a positive number, or None for the default")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardOptions:
    """How the samples of a split are laid out in files.

    Args:
        num_shards: files per split. None: as many as `shard_bytes` asks for, rounded up to a power of two, so that a
            growing data set seldom moves samples between shards.
        shard_bytes: size that a shard should have, in bytes, where num_shards is None (about 256 MB).
        records_per_shard: instead, exactly so many records in each shard but the last.
        ranks: number of training processes that will share the shards, as `Plan.rank_records` says. Each gets as many
            shards of a split, and as many rows; where the rows do not divide, some get one row more, and the plan, and
            a warning of the run, say so. Shards differ by one row at most. Samples that are added may move others to
            other shards.
        shuffle: whether samples are spread over the shards in an order drawn from the seed. False keeps the order
            of the index.

    Raises:
        OptionError: a number is not positive, or two options contradict each other.
    """

    num_shards: int | None = None
    shard_bytes: int = 256_000_000
    records_per_shard: int | None = None
    ranks: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        _positive(
            "ShardOptions",
            num_shards=self.num_shards,
            shard_bytes=self.shard_bytes,
            records_per_shard=self.records_per_shard,
            ranks=self.ranks,
        )
        if self.records_per_shard is not None and (self.num_shards is not None or self.ranks is not None):
            raise OptionError(
                "ShardOptions: records_per_shard decides the number of shards; leave out num_shards and ranks"
            )
        if self.num_shards is not None and self.ranks is not None and self.num_shards % self.ranks:
            raise OptionError(
                f"ShardOptions: {self.num_shards} shards do not divide evenly among {self.ranks} ranks; "
                f"take num_shards={-(-self.num_shards // self.ranks) * self.ranks}"
            )
        if self.num_shards is not None and self.num_shards > 99_999:
            raise OptionError(f"ShardOptions: num_shards is {self.num_shards}; file names count to 99,999")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The processes that do the work; nothing here changes the output.

    Args:
        num_workers: None: one per physical core that this process may use.
        start_method: "fork", "forkserver", "spawn", or None for the fastest that is safe here and now.
        affinity: "physical" keeps workers on one logical CPU per core, "pinned" gives each its own core, None
            leaves the mask alone.
        sample_timeout_s: seconds that one sample may take, in wall time, before its worker is replaced; None for no
            limit.
        max_rss: bytes of resident memory; a worker that holds more when it has done a part is replaced. A sample that
            asks for much more than that, and for more than 1 GiB, gets a `MemoryError`. None for no limit.
        max_retries: how often a sample is tried again under which its worker died or ran out of time.

    Raises:
        OptionError: a number is not positive, or a name is unknown.
    """

    num_workers: int | None = None
    start_method: Literal["fork", "forkserver", "spawn"] | None = None
    affinity: Literal["physical", "pinned"] | None = "physical"
    sample_timeout_s: float | None = None
    max_rss: int | None = None
    max_retries: int = 1

    def __post_init__(self) -> None:
        _positive(
            "WorkerOptions",
            num_workers=self.num_workers,
            sample_timeout_s=self.sample_timeout_s,
            max_rss=self.max_rss,
        )
        if self.start_method not in {None, "fork", "forkserver", "spawn"}:
            raise OptionError(
                f"WorkerOptions: start_method is {self.start_method!r}; want 'fork', 'forkserver', 'spawn' or None"
            )
        if self.affinity not in {None, "physical", "pinned"}:
            raise OptionError(f"WorkerOptions: affinity is {self.affinity!r}; want 'physical', 'pinned' or None")
        if self.max_retries < 0:
            raise OptionError(f"WorkerOptions: max_retries is {self.max_retries}; want 0 or more")


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What to do with a sample that fails, or that ends its worker or runs out of time again and again.

    Args:
        action: "raise" ends the run with the sample's key; what is finished stays, and the next run goes on there.
            "skip" leaves the sample out, with all its copies, and tells the ledger why. "quarantine" also keeps its
            input files, traceback and key in `.datamat/quarantine`.
        max_errors: samples that may fail, as a number (int) or a share of all rows (float, 0 to 1); one more ends the
            run. None: any number, unless all fail.
        retries: how often `read` is tried again where the failure may pass: not where the sample differs from its
            declaration, nor where its worker died.

    Raises:
        OptionError: the action is unknown, or a number makes no sense.

    Example:
        >>> ErrorPolicy("skip", max_errors=0.01).limit(2_000)
        20
    """

    action: Literal["raise", "skip", "quarantine"] = "raise"
    max_errors: int | float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if self.action not in {"raise", "skip", "quarantine"}:
            raise OptionError(f"ErrorPolicy: action is {self.action!r}; want 'raise', 'skip' or 'quarantine'")
        most = self.max_errors
        if most is not None:
            if isinstance(most, bool) or not isinstance(most, int | float) or not most >= 0:
                raise OptionError(f"ErrorPolicy: max_errors is {most!r}; want a number of samples, a share, or None")
            if isinstance(most, float) and most > 1:
                raise OptionError(f"ErrorPolicy: max_errors is {most!r}; a float is a share, from 0.0 to 1.0")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise OptionError(f"ErrorPolicy: retries is {self.retries!r}; want an int, 0 or more")

    def limit(self, num_rows: int) -> int | None:
        """Return how many of so many rows may fail; None for any number."""
        return int(self.max_errors * num_rows) if isinstance(self.max_errors, float) else self.max_errors
