"""The options of a run, checked on creation, so that nothing downstream checks them again."""

from __future__ import annotations

import dataclasses
from typing import Literal

from datamat.errors import OptionError

__all__ = ["ErrorPolicy", "Remedies", "ShardOptions", "WorkerOptions"]


def _positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or value <= 0):
            raise OptionError(f"{owner}: {name} is {value!r}; want a positive number, or None for the default")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardOptions:
    """How the samples of a split are laid out in files.

    Args:
        num_shards: number of files per split. None takes as many as `shard_bytes` requires, rounded up to a power of
            two, so that a growing dataset rarely moves samples between shards.
        shard_bytes: target size of a shard in bytes, used when num_shards is None; about 256 MB by default.
        records_per_shard: number of records in each shard except the last; replaces `num_shards` and `shard_bytes`.
        ranks: number of training processes that will share the shards, as `Plan.rank_records` describes. Each gets the
            same number of shards and rows of a split; if the rows do not divide evenly, some get one row more, and the
            plan and a warning from the run say so. Shards differ by one row at most. Added samples may move others to
            different shards.
        shuffle: whether samples are spread over the shards in an order drawn from the seed; False keeps the order of
            the index.
        identity: how to tell whether an input file is unchanged. "stat" compares its size and modification time, and
            its content only if the time alone has changed. "content" always compares its content: each run reads all
            input files, and the index leaves out times, so that the same files give the same directory, byte for byte,
            wherever they are copied to.

    Raises:
        OptionError: a number is not positive, a name is unknown, or two options contradict each other.
    """

    num_shards: int | None = None
    shard_bytes: int = 256_000_000
    records_per_shard: int | None = None
    ranks: int | None = None
    shuffle: bool = True
    identity: Literal["stat", "content"] = "stat"

    def __post_init__(self) -> None:
        _positive(
            "ShardOptions",
            num_shards=self.num_shards,
            shard_bytes=self.shard_bytes,
            records_per_shard=self.records_per_shard,
            ranks=self.ranks,
        )
        if self.identity not in {"stat", "content"}:
            raise OptionError(f"ShardOptions: identity is {self.identity!r}; want 'stat' or 'content'")
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
    """The worker processes of a run; nothing here changes the output.

    Args:
        num_workers: number of worker processes; None takes one per physical core that this process may use.
        start_method: "fork", "forkserver", "spawn", or None for the fastest that is safe when the run starts.
        affinity: "physical" keeps workers on one logical CPU per core, "pinned" gives each worker a core of its own,
            None leaves the mask alone.
        sample_timeout_s: seconds of wall time that one sample may take before its worker is replaced; None for no
            limit.
        max_rss: limit of resident memory in bytes; a worker that exceeds it at the end of a part is replaced. A sample
            that allocates far more than that, and more than 1 GiB, gets a `MemoryError`. None for no limit.
        max_retries: how often a sample is retried after its worker died or ran out of time on it.

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
    """What to do with a sample that fails, or that repeatedly kills its worker or runs out of time.

    Args:
        action: "raise" ends the run with the sample's key; finished work stays, and the next run resumes from it.
            "skip" skips the sample with all its copies and records the reason in the ledger. "quarantine" also keeps
            its input files, traceback and key in `.datamat/quarantine`.
        max_errors: number of samples that may fail (int), or a fraction of all rows (float, 0 to 1); one more ends the
            run. None allows any number, unless all fail.
        retries: how often to retry `read` after a failure that may be transient; not if the sample differs from its
            declaration or its worker died.

    Raises:
        OptionError: the action is unknown, or a number is out of range.

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

    @classmethod
    def of(cls, given: ErrorPolicy | Literal["raise", "skip", "quarantine"] | None) -> ErrorPolicy:
        """Return the policy that an argument stands for.

        Args:
            given: a policy, the action of one, or None for the default.
        """
        return cls() if given is None else cls(given) if isinstance(given, str) else given

    def limit(self, num_rows: int) -> int | None:
        """Return how many rows may fail, or None for any number.

        Args:
            num_rows: number of rows of the run, of which a share is taken.
        """
        return int(self.max_errors * num_rows) if isinstance(self.max_errors, float) else self.max_errors


@dataclasses.dataclass(frozen=True, slots=True)
class Remedies:
    """The calls that messages suggest as a remedy: not every caller of a run holds a `Materializer`.

    Attributes:
        again: call that resumes the run.
        retry: call that retries failed rows.
        existing: call that says what becomes of finished shards, with `{}` in place of the choice.
    """

    again: str = "run()"
    retry: str = "rerun_failed()"
    existing: str = "run(existing='{}')"
