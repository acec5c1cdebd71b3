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
        ranks: number of training processes that will share the shards: their number becomes a multiple of it, and
            shards differ by one record at most.
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
        sample_timeout_s: seconds that one sample may take; only None, no limit, in this version.
        max_rss: bytes of memory that a worker may use before it is replaced; only None, no limit, in this version.
        max_retries: how often a part is tried again after its worker died.

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
        for name in ("sample_timeout_s", "max_rss"):
            if getattr(self, name) is not None:
                raise OptionError(f"WorkerOptions: this version does not keep {name} yet; leave it out")
        if self.max_retries < 0:
            raise OptionError(f"WorkerOptions: max_retries is {self.max_retries}; want 0 or more")


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What to do with a sample that fails.

    Args:
        action: "raise" ends the run with the sample's key; what is finished stays, and the next run goes on there.

    Raises:
        OptionError: the action is unknown.
    """

    action: Literal["raise"] = "raise"

    def __post_init__(self) -> None:
        if self.action != "raise":
            raise OptionError(f"ErrorPolicy: action is {self.action!r}; this version knows 'raise'")
