"""Defines the options of a dataset and of a run, checked on creation, so that no other code checks them again."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import inspect
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, TypedDict, TypeVar, get_args

from datamat.errors import OptionError, count_of
from datamat.values import frozen

# ---------------------------------------------------------------- durations and sizes


_UNIT_S = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(
    r"(?:(\d+(?:\.\d+)?)\s*d(?:ays?)?)?\s*(?:(\d+(?:\.\d+)?)\s*h(?:(?:ou)?rs?)?)?\s*"
    r"(?:(\d+(?:\.\d+)?)\s*m(?:in(?:ute)?s?)?)?\s*(?:(\d+(?:\.\d+)?)\s*s(?:ec(?:ond)?s?)?)?\Z"
)
_BETWEEN = re.compile(r"\s*,\s*|\s+and\s+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\Z", re.IGNORECASE)
_MOMENT_S = 0.5  # until a call of `come` is noticed
_WIND_DOWN_S = 0.5  # from the last receipt until `run` returns
LONGEST_GRACE_S = 4.0
"""Seconds that running parts get to end when a run stops."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as "23h30m", "90m", "1d", "45s" or "2h 15m".

    Raises:
        OptionError: it is not one.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    found = _DURATION.match(_BETWEEN.sub(" ", text.strip().lower()))
    if not found or not any(found.groups()):
        raise OptionError(
            f"duration {text!r}: want days, hours, minutes and seconds, as in '23h30m', '1 day, 2 hours' or '45s'"
        )
    return sum(float(number) * unit for number, unit in zip(found.groups(), _UNIT_S.values(), strict=True) if number)


def seconds_until(deadline: str | float | datetime.timedelta | datetime.datetime) -> float:
    """Return how many seconds from now a deadline is.

    Args:
        deadline: duration as text, in seconds or as a `timedelta`; or a `datetime`, in local time if it has no time
            zone.

    Raises:
        OptionError: `deadline` is none of these, or has passed.
    """
    if isinstance(deadline, str):
        left = parse_duration(deadline)
    elif isinstance(deadline, datetime.timedelta):
        left = deadline.total_seconds()
    elif isinstance(deadline, datetime.datetime):
        left = deadline.timestamp() - time.time()
    elif isinstance(deadline, int | float) and not isinstance(deadline, bool):
        left = float(deadline)
    else:
        raise OptionError(f"deadline is {deadline!r}; want '23h30m', seconds, a timedelta or a datetime")
    if not 0 < left < math.inf:
        raise OptionError(f"deadline {deadline!r} is {left:g} s from now; want a moment in the future")
    return left


def parse_bytes(size: str | float) -> int:
    """Return the bytes of a size such as "20GB", "512MiB" or a number.

    Raises:
        OptionError: it is not one, or not positive.

    Example:
        >>> parse_bytes("1.5 GB"), parse_bytes("1KiB")
        (1500000000, 1024)
    """
    number: float = 0
    if isinstance(size, str) and (found := _SIZE.match(size.strip())):
        digits, letter, binary = found.groups()
        number = float(digits) * (1024 if binary else 1000) ** " kmgtp".index(letter.lower() or " ")
    elif isinstance(size, int | float) and not isinstance(size, bool):
        number = size
    if not 0 < number < math.inf:
        raise OptionError(f"size {size!r}: want a positive number of bytes, or text as in '20GB' or '512MiB'")
    return int(number)


class Deadline:
    """The time by which a run must return.

    Attributes:
        wait_s: seconds to wait for something else before looking again; None for as long as it takes.

    Args:
        left_s: seconds from now; None for no deadline.
        may_be_called: whether `come` may be called while the run waits for workers.
    """

    def __init__(self, left_s: float | None, *, may_be_called: bool = False) -> None:
        self.wait_s = _MOMENT_S if may_be_called else None
        self._is_called = False
        self._at = math.inf if left_s is None else time.monotonic() + left_s
        self._longest_part_s = 0.0

    def come(self) -> None:
        """Make it come now, for a signal handler: running parts may still end."""
        self._is_called = True
        self._at = min(self._at, time.monotonic() + _WIND_DOWN_S + LONGEST_GRACE_S)

    def add(self, part_s: float) -> None:
        """Note how long a part took, in seconds."""
        self._longest_part_s = max(self._longest_part_s, part_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until no more parts start, so that running ones can end; None without a deadline."""
        if self._is_called:
            return 0.0
        if self._at == math.inf:
            return None
        return max(0.0, self._at - time.monotonic() - _WIND_DOWN_S - min(self._longest_part_s, LONGEST_GRACE_S))

    @property
    def has_come(self) -> bool:
        """Whether no more parts may start."""
        return self.left_s == 0

    @property
    def grace_s(self) -> float:
        """Seconds that running parts may still take."""
        return min(max(0.0, self._at - time.monotonic() - _WIND_DOWN_S), LONGEST_GRACE_S)


# ---------------------------------------------------------------- options


def _positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool | str) or value <= 0):
            raise OptionError(f"{owner}: {name} is {value!r}; want a positive number, or None for the default")


_Options = TypeVar("_Options")


def _options_of(kind: type[_Options], name: str, given: Any, number: str, *others: str) -> _Options:
    """Return the options for an argument: None, options, or the number of something."""
    if given is None or isinstance(given, kind):
        return given or kind()
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return kind(**{number: given})
    wanted = "".join(f", {other!r}" for other in others)
    raise OptionError(f"{name} is {given!r}; want something like 8{wanted}, or {kind.__name__}({number}=8)")


def check_flags(**flags: Any) -> None:
    """Raise `OptionError` if a flag is neither True nor False, such as "no", which Python takes for true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name} is {value!r}; want True or False")


def check_mappings(**given: Any) -> None:
    """Raise `OptionError` if options for a store are not a dict."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            raise OptionError(f"{name} is {value!r}; want a dict of options for fsspec, as in {{'anon': True}}")


@frozen()
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
            its content only if just the time has changed. "content" always compares its content: each run reads all
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
        check_flags(shuffle=self.shuffle)
        if self.identity not in {"stat", "content"}:
            raise OptionError(f"ShardOptions: identity is {self.identity!r}; want 'stat' or 'content'")
        if self.records_per_shard is not None and (self.num_shards is not None or self.ranks is not None):
            raise OptionError(
                "ShardOptions: records_per_shard decides the number of shards; leave out num_shards and ranks"
            )
        if self.num_shards is not None and self.ranks is not None and self.num_shards % self.ranks:
            raise OptionError(
                f"ShardOptions: num_shards={self.num_shards} does not divide evenly among "
                f"{count_of(self.ranks, 'rank')}; "
                f"take num_shards={-(-self.num_shards // self.ranks) * self.ranks}"
            )
        if self.num_shards is not None and self.num_shards > 99_999:
            raise OptionError(f"ShardOptions: num_shards is {self.num_shards}; file names count to 99,999")

    @classmethod
    def of(cls, given: ShardOptions | int | str | None) -> ShardOptions:
        """Return the options for an argument: options, a number of shards, or a size such as "256MB".

        Raises:
            OptionError: it is none of these.
        """
        if isinstance(given, str):
            if given.strip().isdecimal():  # as programs get it from the command line
                raise OptionError(f"shards is {given!r}; want a number, {int(given)}, or a size with its unit, '256MB'")
            return cls(shard_bytes=parse_bytes(given))
        return _options_of(cls, "shards", given, "num_shards", "256MB")


@frozen()
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

    @classmethod
    def of(cls, given: WorkerOptions | int | None) -> WorkerOptions:
        """Return the options for an argument: options, or a number of workers.

        Raises:
            OptionError: it is neither.
        """
        return _options_of(cls, "workers", given, "num_workers")


@frozen()
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
        """Return the policy for an argument: a policy, or the action of one.

        Raises:
            OptionError: it is neither.
        """
        if isinstance(given, str):
            return cls(given)
        if given is None or isinstance(given, cls):
            return given or cls()
        raise OptionError(f"errors is {given!r}; want 'raise', 'skip', 'quarantine', or an ErrorPolicy")

    def limit(self, num_rows: int) -> int | None:
        """Return how many rows may fail, or None for any number.

        Args:
            num_rows: number of rows of the run, of which a share is taken.
        """
        return int(self.max_errors * num_rows) if isinstance(self.max_errors, float) else self.max_errors


FOR_COMMANDS: contextvars.ContextVar[bool] = contextvars.ContextVar("for_commands", default=False)
"""Whether messages are for a user of the command line, who passes flags instead of Python objects."""


def option(name: str, value: Any) -> str:
    """Return an option as users write it: "existing='replace'", or "--existing replace"."""
    if FOR_COMMANDS.get():
        return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
    return f"{name}={value!r}"


@frozen()
class Remedies:
    """The remedies that messages suggest, as users write them: a call with an option, or a flag.

    Args:
        call: the call that makes the dataset, with `{}` for its options.
    """

    call: str = "run({})"

    @property
    def again(self) -> str:
        """The call or command that resumes the run."""
        return "the same command" if FOR_COMMANDS.get() else self.call.format("").replace("..., ", "...")

    @property
    def failures(self) -> str:
        """The call or command that lists the rows that failed."""
        return "`datamat status --failed`" if FOR_COMMANDS.get() else "`datamat.status(output).failures`"

    def passing(self, name: str, value: Any) -> str:
        """Return the call with an option: "run(existing='replace')"; for a command, the flag alone."""
        return option(name, value) if FOR_COMMANDS.get() else self.call.format(option(name, value))


Existing: TypeAlias = Literal["update", "append", "replace", "refuse"]
Hook: TypeAlias = Callable[[Any], object]
"""Hears the events of a run; their classes are in `datamat.events`."""


class DatasetKeywords(TypedDict, total=False):
    """The keyword arguments of `Materializer`, which describes each; `materialize` takes them too."""

    format: Any
    splits: Mapping[str, float] | None
    groups: str | Callable[[Any], Any] | None
    shards: int | str | ShardOptions | None
    transform: Any
    copies: int | Mapping[str, int]
    seed: int
    version: str | int | None
    untouched: Collection[str]
    sidecars: Sequence[Callable[..., Any]]
    follow_links: bool
    storage_options: Mapping[str, Any] | None
    source_options: Mapping[str, Any] | None


class WorkKeywords(TypedDict, total=False):
    """The arguments of all work on a dataset: `run`, `repair`, `estimate`; `RunOptions` describes each."""

    workers: int | WorkerOptions | None
    executor: Any
    errors: Literal["raise", "skip", "quarantine"] | ErrorPolicy | None
    progress: bool
    hooks: Sequence[Hook]
    logger: logging.Logger | None
    scratch: str | os.PathLike[str] | None


class RunKeywords(WorkKeywords, total=False):
    """The arguments of `Materializer.run`, which `materialize` and `convert` take too; `RunOptions` describes each."""

    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    task_index: int | None
    num_tasks: int | None
    existing: Existing
    retry_failed: bool
    deadline: str | float | datetime.timedelta | datetime.datetime | Deadline | None
    max_disk: str | float | None


class RunDatasetKeywords(DatasetKeywords, RunKeywords, total=False):
    """The arguments of `Materializer` and of its `run`, for functions that do both in one call."""


@frozen(kw_only=True)
class RunOptions:
    """How a dataset is made, which part of it now, and what happens to finished work; nothing here decides its bytes.

    Args:
        workers: the processes that do the work: their number, or `WorkerOptions`.
        executor: engine that does the work instead of datamat's own workers: a `dask.distributed.Client` or its address
            ("tcp://host:8786"), "ray" or a Ray address ("ray://host:10001"), or any `concurrent.futures.Executor`, such
            as that of mpi4py. None takes datamat's own workers on this machine.
        errors: what to do with bad samples: "raise", "skip", "quarantine", or an `ErrorPolicy`.
        include: shell patterns of the shards to make ("train-0000?"); None makes all.
        exclude: shell patterns of the shards to leave out.
        task_index: number of this task, from 0, if several processes make one output together on a shared file system
            or in a bucket, each with its own call. Each takes shards that no other task has. See the guide on Slurm.
        num_tasks: number of tasks. It only decides where each begins: tasks may come and go.
        existing: what happens to finished work. "update" rebuilds shards whose inputs changed and adds new rows; it
            raises, before anything is touched, if finished rows are no longer in the source. "append" puts rows with
            new keys into new shards, and leaves all others alone, even if their source is gone. With "replace", the
            source alone decides, and records of rows that it no longer has are removed. "refuse" raises if a finished
            shard would be replaced or removed.
        retry_failed: also retry the rows that failed in earlier runs, which the ledger lists, and complete their
            shards. Other rows of these shards are not read again if nothing that decides them has changed: their
            records are taken from the existing shard.
        deadline: when to return, finished or not: "23h30m", seconds, a `timedelta`, or a `datetime`. With an
            `executor`, running parts end first.
        max_disk: maximum size of the output folder, as "20GB" or in bytes.
        progress: whether to show a bar and a summary on standard error.
        hooks: callables of one event, which hear what happens; see `datamat.events`.
        logger: where messages go; the writer can use it too, even in workers. None takes the logger "datamat".
        scratch: local folder in which shards for a store are made, and files of a source behind a URL wait for their
            rows; None takes a folder in `TMPDIR`. A killed run resumes from it.

    Raises:
        OptionError: an argument makes no sense.
    """

    workers: WorkerOptions = dataclasses.field(default_factory=WorkerOptions)
    executor: Any = None
    errors: ErrorPolicy = dataclasses.field(default_factory=ErrorPolicy)
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    task_index: int | None = None
    num_tasks: int | None = None
    existing: Existing = "update"
    retry_failed: bool = False
    deadline: Deadline = dataclasses.field(default_factory=lambda: Deadline(None))
    max_disk: int | None = None
    progress: bool = True
    hooks: tuple[Hook, ...] = ()
    logger: logging.Logger = dataclasses.field(default_factory=lambda: logging.getLogger("datamat"))
    scratch: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.existing not in get_args(Existing):
            raise OptionError(f"existing is {self.existing!r}; want one of {', '.join(map(repr, get_args(Existing)))}")
        if self.existing == "append" and (self.retry_failed or self.include is not None or self.exclude is not None):
            raise OptionError(
                f"{option('existing', 'append')} makes every row that is new, and no other; leave out retry_failed, "
                "include and exclude"
            )
        if (self.task_index is None) != (self.num_tasks is None):
            raise OptionError(
                f"task_index is {self.task_index!r} and num_tasks {self.num_tasks!r}; give both, as in "
                f"{option('task_index', 3)} and {option('num_tasks', 16)}"
            )
        check_flags(progress=self.progress, retry_failed=self.retry_failed)
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if patterns is not None and not patterns:
                raise OptionError(f"{name} is {patterns!r}; want shell patterns of shards, or None")
        if self.retry_failed and self.task_index is not None:
            raise OptionError("retry_failed is for one process; leave out task_index and num_tasks")
        if not callable(getattr(self.logger, "warning", None)):
            raise OptionError(f"logger is {self.logger!r}; want a logger, as in logger=logging.getLogger('datamat')")

    @classmethod
    def of(cls, given: WorkKeywords | RunKeywords, called: str = "run", known: Collection[str] | None = None) -> Self:
        """Return the options for the arguments of a call; `RunKeywords` has their types.

        Args:
            given: the arguments by name.
            called: the function that the user has called.
            known: names of the arguments that it takes; None for all.

        Example:
            >>> RunOptions.of({"workers": 2, "errors": "skip", "max_disk": "20GB"}).max_disk
            20000000000
        """
        refuse_others(called, given, RunKeywords.__annotations__ if known is None else known)
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, made in _MADE_OF.items():
            if name in options:
                options[name] = made(options[name])
        return cls(**options)


def _deadline_of(given: str | float | datetime.timedelta | datetime.datetime | Deadline) -> Deadline:
    return given if isinstance(given, Deadline) else Deadline(seconds_until(given))


def _hooks_of(hooks: Sequence[Hook]) -> tuple[Hook, ...]:
    if callable(hooks) or isinstance(hooks, str):
        raise OptionError(f"hooks is {hooks!r}; want a list of callables of one event, as in hooks=[print]")
    for hook in hooks:
        if isinstance(hook, type) or not callable(hook):
            made = f"; pass an instance, {hook.__qualname__}()" if isinstance(hook, type) else ""
            raise OptionError(f"hooks holds {hook!r}; want callables of one event of datamat.events{made}")
    return tuple(hooks)


_MADE_OF: Mapping[str, Callable[[Any], Any]] = {
    "workers": WorkerOptions.of,
    "errors": ErrorPolicy.of,
    "deadline": _deadline_of,
    "max_disk": parse_bytes,
    "hooks": _hooks_of,
}


# ---------------------------------------------------------------- where an option belongs


def _shown(field: dataclasses.Field[Any]) -> inspect.Parameter:
    default = None if field.default is dataclasses.MISSING else field.default
    annotation = RunKeywords.__annotations__[field.name].__forward_arg__
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


RUN_PARAMETERS = tuple(_shown(field) for field in dataclasses.fields(RunOptions))
"""The parameters of `Materializer.run`, for the signatures of functions that take them as `**options`."""
WORK_PARAMETERS = tuple(one for one in RUN_PARAMETERS if one.name in WorkKeywords.__annotations__)
"""Those of `WorkKeywords`."""

_WORKERS, _SHARD_BYTES = "run(workers=...)", "Materializer(..., shards='256MB')"
_SHORT = {
    **dict.fromkeys(("num_workers", "max_workers", "n_jobs", "num_proc", "num_processes", "processes"), _WORKERS),
    **dict.fromkeys(("shard_bytes", "chunk_bytes", "max_shard_size", "maxsize", "size_limit"), _SHARD_BYTES),
    "num_shards": "Materializer(..., shards=...)",
    "overwrite": "run(existing='replace')",
    "on_error": "run(errors='skip')",
    "compression": "Materializer(..., format='tfrecord.gz')",
    "disable_tqdm": "run(progress=False)",
    "output_dir": "output=...",
    **{name: f"ImportWriter({name}=...) as the writer" for name in ("columns", "rename", "drop", "features", "key")},
}
"""How to write options of these names: options inside others, and options of other libraries."""


def _where_option_is(name: str) -> str | None:
    """Return how to write an option that exists elsewhere or under another name."""
    if name in _SHORT:
        return _SHORT[name]
    for keyword, kind in (("workers", WorkerOptions), ("shards", ShardOptions), ("errors", ErrorPolicy)):
        if name in kind.__dataclass_fields__:
            return f"{keyword}={kind.__name__}({name}=...)"
    if name in RunKeywords.__annotations__:
        return f"run({name}=...)"
    if name in DatasetKeywords.__annotations__:
        return f"Materializer(..., {name}=...)"
    return None


_Function = TypeVar("_Function", bound=Callable[..., Any])


def refuse_others(
    called: str, given: Iterable[str], known: Collection[str], elsewhere: Callable[[str], str | None] = _where_option_is
) -> None:
    """Raise an error for options that a function does not have, and say where they belong.

    Args:
        called: the function that the user has called.
        given: names of the options.
        known: names of its own options.
        elsewhere: returns how to write an option that it does not have, or None.

    Raises:
        OptionError: an option belongs elsewhere.
        TypeError: there is no such option; the message is that of Python.
    """
    for name in [name for name in given if name not in known]:
        if where := elsewhere(name):
            inner = re.sub(r"^\w+\((?:\.\.\., )?(\w+=.*)\)$", r"\1", where)
            where = inner if inner.partition("=")[0] in known else where  # for the same call
            raise OptionError(f"{called} has no option {name!r}; write {where}")
        import difflib

        close = difflib.get_close_matches(name, known, 1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{meant}")


def takes(*options: inspect.Parameter) -> Callable[[_Function], _Function]:
    """Make a function show the options that it takes as `**options` in its signature."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {one.name for one in own}
        shown = [*own, *(one for one in options if one.name not in names)]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


def refusing_others(function: _Function) -> _Function:
    """Make a function with named options say where other options belong."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        refuse_others(function.__qualname__.removesuffix(".__init__"), given, known)
        return function(*args, **given)

    return checked  # type: ignore[return-value]
