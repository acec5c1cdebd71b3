"""Workers as seen by their parent: single workers, how they end, and the group of a pool."""

from __future__ import annotations

import dataclasses
import errno
import linecache
import multiprocessing
import os
import re
import selectors
import signal
import socket
import time
from collections import deque
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from datamat.parallel import byvalue, logs, pickling, standins, unforkable, worker
from datamat.parallel.affinity import at_rest
from datamat.parallel.channel import Claims, Descriptor, PackedFunction, ParentChannel, close_in_forks, no_forks
from datamat.parallel.crash import CrashNote, WorkerExit
from datamat.parallel.errors import ParallelError, TaskTimeout, UnpicklableError, WorkerDied
from datamat.parallel.frozen import frozen
from datamat.parallel.processes import (
    ForkPopen,
    ServerLauncher,
    SpawnPopen,
    current_umask,
    interrupts_held,
    is_frozen,
    start_process,
)
from datamat.parallel.worker import Request

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from datamat.parallel.tasks import RemoteFunction, Task

# ---------------------------------------------------------------- errors of a death
#
# Errors of tasks as callers see them: with the worker's traceback, or the description of its death.


_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in .+\n')


class RemoteTraceback(Exception):  # noqa: N818 -- shown as the cause of an error
    """The traceback of an error in a worker, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tb = text  # the name used by concurrent.futures

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


def unpack_error(packed: bytes | memoryview | BaseException) -> BaseException:
    """Return the error packed by `worker.pack_error`, with the worker's traceback as its cause.

    Args:
        packed: result of `pack_error`, or the error itself if it arose in the parent.
    """
    if isinstance(packed, BaseException):
        return packed
    packed_error, text = pickling.loads_data(packed)
    try:
        error: object = pickling.loads_data(packed_error)
    except BaseException as exc:  # noqa: BLE001 -- whatever its class raises while it is rebuilt, or the parent lacks it
        error = ParallelError(f"a call failed with an exception that cannot be unpickled: {_describe(exc)}")
    if not isinstance(error, BaseException):  # the result of a user's `__reduce__`
        error = ParallelError(
            f"a call failed with an exception that was unpickled as {error!r}; correct its __reduce__"
        )
    error.__cause__ = RemoteTraceback(_with_sources(text))
    return error


def _with_sources(text: str) -> str:
    """Return a traceback with source lines that only this process has, such as those of notebook cells."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        found = _FRAME.fullmatch(line)
        if found and not "".join(lines[number + 1 : number + 2]).startswith("    "):
            code = linecache.getline(found["file"], int(found["line"])).strip()
            lines[number] += f"    {code}\n" if code else ""
    return "".join(lines)


def result_error(task: Task, exc: BaseException) -> ParallelError:
    """Return the error of a call whose result cannot be unpickled because of `exc`."""
    error = ParallelError(f"{task.label}: its result cannot be unpickled: {_describe(exc)}")
    error.__cause__ = exc
    return error


def unpack_results(task: Task, packed: memoryview, pid: int) -> tuple[list[Any], dict[int, bytes | BaseException]]:
    """Return the results of a chunk, and its errors for `unpack_error` by position."""
    results, errors, failures = pickling.loads_results(packed)
    for position, exc in failures.items():
        errors[position] = error = result_error(task, exc)
        _note_item(error, task, position, pid)
    return results, errors


def _describe(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {worker.text_of(exc)}"


def _note_item(error: BaseException, task: Task, position: int, pid: int) -> None:
    """Add a note to an error that names its item in the chunk."""
    item = task.arguments[position]
    worker.note_item(error, item if task.mode == worker.Mode.CHUNK else (item,), {}, pid)


def death_error(task: Task, worker_exit: WorkerExit) -> WorkerDied:
    """Return the error of a task whose workers died too often."""
    attempts = "" if task.tries == 1 else f" ({task.tries} attempts)"
    if task.was_begun(worker_exit):
        when = f"while it ran this task{attempts}"
    else:
        when = f"before it began this task, as {task.unbegun - 1} others did; the task may be too large to be received"
    error = WorkerDied(f"{task.label}: worker {worker_exit.pid} ended {when}: {worker_exit.describe()}")
    _attach(error, task, worker_exit)
    return error


def timeout_error(task: Task, worker_exit: WorkerExit, timeout_s: float) -> TaskTimeout:
    """Return the error of a task that ran too long."""
    error = TaskTimeout(f"{task.label}: {worker_exit.describe_timeout('task_timeout_s', timeout_s)}")
    _attach(error, task, worker_exit)
    return error


def _attach(error: ParallelError, task: Task, worker_exit: WorkerExit) -> None:
    """Set the details of an error as attributes, which survive pickling, and name the item of a map."""
    if task.mode != worker.Mode.CALL:
        _note_item(error, task, 0, worker_exit.pid)
    known = dataclasses.asdict(worker_exit)
    vars(error).update(known, task=task.label, signal=worker_exit.signal, worker_exit=worker_exit)


# ---------------------------------------------------------------- one worker
#
# One worker as seen by its parent: its start, its tasks, and what is known after its end.


LAST_WORDS_S = 1.0  # from the request to end until SIGKILL
_HELD_UP_S = 10.0  # the same, if a queue of the worker may still be read
_LAST_LINES = 20
_AHEAD_BYTES = 1 << 23
_EXIT_CODE_S = 1.0  # a server writes an exit code within microseconds, unless it was killed, too


@frozen()
class WorkerStats:
    """Statistics of one worker so far.

    Attributes:
        pid: process id of the worker.
        tasks: number of finished tasks.
        busy_s: seconds spent in tasks.
        started: start time, as `time.time()`.
        ended: end time; None while it runs.
        peak_rss_bytes: highest resident memory seen.
    """

    pid: int
    tasks: int
    busy_s: float
    started: float
    ended: float | None
    peak_rss_bytes: int


class WorkerHandle:
    """A running worker."""

    def __init__(self, config: worker.WorkerConfig, slot: int, launcher: Callable[[Any], Any]) -> None:
        self.slot = slot
        with ExitStack() as ours, ExitStack() as theirs:
            with no_forks:
                end, their_end = _socket_pair(ours, theirs)
                self.channel = ParentChannel(end)
                lifeline, their_lifeline = _socket_pair(ours, theirs)
                close_in_forks(lifeline)
                self._note = ours.enter_context(closing(CrashNote.create()))
                self._claims = ours.enter_context(closing(Claims.create()))
            their_note = theirs.enter_context(closing(self._note.share()))
            their_claims = theirs.enter_context(closing(self._claims.share()))
            arguments = (config, their_end, their_lifeline, their_note, their_claims)
            self.process = start_process(launcher, worker.main, arguments, config.name)
            self._ends = ours.pop_all()
        self.pid = int(self.process.pid)
        with no_forks:
            self._pidfd = self._ends.enter_context(closing(Descriptor(_open_pidfd(self.pid))))
            close_in_forks(self._pidfd)
        self.in_flight: deque[Task] = deque()  # changed, like the numbers below, under the dispatcher's lock
        self.num_bytes = 0  # of their arguments
        # Tasks that it must still skip, and tasks posted behind others without a claim yet.
        self.num_taken_back = self._num_unclaimed = 0
        self.known_functions: set[int] = set()
        self.is_fork = launcher is ForkPopen  # then it has the inherited functions
        self.is_ready = False
        self.is_leaving = False
        self.has_hung_up = False
        self.has_ended = False
        self.has_timed_out = False
        self.is_held_up = False
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.head_since = time.monotonic()  # when the task at the head of in_flight began, or the last one ended
        self.kill_at: float | None = None
        self._started = time.time()
        self._ended: float | None = None
        self._tasks = 0
        self._busy_s = 0.0
        self.peak_rss_bytes = 0

    @property
    def sentinel(self) -> int:
        """Descriptor that becomes readable when the process ends."""
        pidfd = self._pidfd.fileno()
        return pidfd if pidfd >= 0 else int(self.process.sentinel)

    @property
    def takes_tasks(self) -> bool:
        """Whether it may be sent tasks."""
        return self.is_ready and not (self.is_leaving or self.has_hung_up or self.has_timed_out or self.num_taken_back)

    @property
    def is_laden(self) -> bool:
        """Whether it has all the bytes of arguments that may be sent ahead, since they are copies."""
        return self.num_bytes >= _AHEAD_BYTES

    def post(self, task: Task) -> None:
        """Queue a task for sending; call `grant_claims` and flush the channel afterwards."""
        is_claimed = bool(self.in_flight)
        if is_claimed:
            self._num_unclaimed += 1
        else:
            self.head_since = time.monotonic()
        task.future.is_ahead = is_claimed
        self.in_flight.append(task)
        self.num_bytes += len(task.payload)
        self.channel.post(worker.Request.TASK, task.header(is_claimed=is_claimed), task.payload)

    def pop_head(self) -> Task:
        """Remove and return the task that the worker has finished: it begins the next one, if any."""
        task = self.in_flight.popleft()
        self.num_bytes -= len(task.payload)
        self.head_since = time.monotonic()
        if self.in_flight:
            self.in_flight[0].future.is_ahead = False
        return task

    def pop_all(self) -> list[Task]:
        """Remove and return all tasks, in order."""
        tasks = list(self.in_flight)
        self.in_flight.clear()
        self.num_bytes = 0
        for task in tasks:
            task.future.is_ahead = False
        return tasks

    def grant_claims(self) -> None:
        """Let the worker begin the posted tasks."""
        if self._num_unclaimed:
            self._claims.grant(self._num_unclaimed)
            self._num_unclaimed = 0

    def take_back(self) -> list[Task]:
        """Take back and return, in order, the tasks that the worker has not begun; it can no longer begin them.

        The first task is never among them: it counts as begun, even if the worker has yet to read its claim.
        """
        num_behind = len(self.in_flight) - 1 - self._num_unclaimed
        num_tasks = self._num_unclaimed + (self._claims.take_back(num_behind) if num_behind > 0 else 0)
        self._num_unclaimed = 0
        self.num_taken_back += num_tasks
        tasks = [self.in_flight.pop() for _ in range(num_tasks)][::-1]
        self.num_bytes -= sum(len(task.payload) for task in tasks)
        return tasks

    def count(self, num_calls: int, busy_s: float, peak_rss_bytes: int) -> None:
        """Count a finished task."""
        self._tasks += num_calls
        self._busy_s += busy_s
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)

    def call_since(self) -> float:
        """Return when the current call (of a chunk, too) began, in seconds of the monotonic clock."""
        if self.in_flight[0].count == 1:
            return self.head_since
        return max(self.head_since, self._note.call_since())

    def leave(self) -> None:
        """Ask it to end; send no more tasks, and SIGKILL if it does not end on its own."""
        self.is_leaving = True
        self.kill_at = time.monotonic() + LAST_WORDS_S

    def hold_up(self) -> None:
        """Wait longer for it to end: one of its threads is writing into a `multiprocessing` queue."""
        self.is_held_up = True
        self.kill_at = time.monotonic() + _HELD_UP_S

    def kill(self) -> None:
        """Send SIGKILL to the worker; processes started by its tasks are killed next, as after any other death."""
        self._end_by(signal.SIGKILL)

    def kill_with_stack(self) -> None:
        """Make the worker write its Python stack and end; SIGKILL follows if it cannot."""
        self.kill_at = time.monotonic() + LAST_WORDS_S
        self._end_by(worker.TRACE_SIGNAL)

    def _end_by(self, number: int) -> None:
        with suppress(OSError):  # it has already ended
            if self._pidfd.fileno() >= 0:
                signal.pidfd_send_signal(self._pidfd.fileno(), number)
            else:
                os.kill(self.pid, number)

    def sample_memory(self) -> None:
        """Record the peak memory so far; it is not available after the process has ended."""
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{self.pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    self.peak_rss_bytes = max(self.peak_rss_bytes, int(line.split()[1]) * 1024)
                    return

    def stats(self) -> WorkerStats:
        """Return the statistics of the worker."""
        return WorkerStats(self.pid, self._tasks, self._busy_s, self._started, self._ended, self.peak_rss_bytes)

    def reap(self) -> WorkerExit:
        """Reap the ended process, close everything, and return what is known of its end."""
        self.process.join(_EXIT_CODE_S)
        exitcode = self.process.exitcode
        if exitcode:  # processes that it has started end with it, even if the system has killed it
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        self._ended = time.time()
        note, log_lines = self._note, tuple(self.last_lines)
        found = WorkerExit(
            self.pid, exitcode, self.peak_rss_bytes, note.last_begun(), note.step(), note.stacks(), log_lines
        )
        self.channel.close()
        with no_forks:
            self._ends.close()
        with suppress(ValueError):  # it did not end after all: its server lost track of it
            self.process.close()
        return found


def _socket_pair(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; each process closes the other's."""
    one, other = socket.socketpair()
    return ours.enter_context(one), theirs.enter_context(other)


def _open_pidfd(pid: int) -> int:
    """Return a pidfd of the process, which siblings or grandchildren cannot keep open as they can a pipe; else -1."""
    if not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # it has ended already: its sentinel is readable
        return -1


# ---------------------------------------------------------------- progress and statistics
#
# Progress of a pool, from which a callback can draw a bar and a timeline.


@frozen()
class PoolProgress:
    """Progress of a pool, counted in calls.

    Attributes:
        done: number of calls that ended with a result.
        failed: number of calls that ended with an error.
        in_flight: number of calls at workers.
        waiting: number of calls not sent yet.
        workers: statistics of every worker so far.
    """

    done: int
    failed: int
    in_flight: int
    waiting: int
    workers: tuple[WorkerStats, ...]


# ---------------------------------------------------------------- all workers of a pool
#
# The workers of one pool are started, waited for and reaped by the dispatcher's thread, except where noted.


_SAMPLE_S = 0.5
_MORE_FILES = "; raise the limit of open files (`ulimit -n`), or ask for fewer workers: each takes eight"
_MORE_ROOM = "; raise the limit of processes (`ulimit -u`) or of memory, or ask for fewer workers"
_USED_UP = {errno.EMFILE: _MORE_FILES, errno.ENFILE: _MORE_FILES, errno.EAGAIN: _MORE_ROOM, errno.ENOMEM: _MORE_ROOM}


@frozen()
class PoolOptions:
    """How a pool runs; see `PathosExecutor` for the meaning of each.

    Attributes:
        max_workers: maximum number of workers at a time.
        start_method: how workers start: "fork", "forkserver" or "spawn".
        masks: CPUs of each worker; None leaves its affinity alone.
        num_threads: number of threads that a library may use in a worker.
        preload: names of modules that a forkserver imports.
        task_timeout_s: seconds that one call may take; None for no limit.
        max_retries: number of deaths after which a task is still repeated.
        max_tasks: number of tasks after which a worker is replaced; None for no limit.
        logger: logger for messages of the pool itself.
        worker_name: process name of a worker in log records; "" for its number in the pool.
        levels: levels of loggers in workers; None for those of this process.
        take_record: called with each packed log record of a worker; returns its message.
        idle_s: seconds without a task after which a worker ends; None for no limit.
    """

    max_workers: int
    start_method: str
    masks: tuple[frozenset[int] | None, ...]
    num_threads: int
    preload: tuple[str, ...]
    task_timeout_s: float | None
    max_retries: int
    max_tasks: int | None
    logger: logging.Logger
    worker_name: str = ""
    levels: logs.LoggingState | None = None
    take_record: Callable[[bytes], str] = logs.replay
    idle_s: float | None = None


@dataclass(slots=True, weakref_slot=True, repr=False, eq=False)
class UserObjects:
    """Objects of the caller that a pool keeps alive, and that may refer to the pool.

    The executor keeps them; the dispatcher does so only while there is work. Otherwise its thread would keep the
    executor alive, which could never be collected.

    Attributes:
        initializer: (function, arguments) to run in each worker, or None.
        on_progress: callback that gets the progress, or None.
        kept: objects whose identity forked workers rely on.
    """

    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    on_progress: Callable[[PoolProgress], object] | None = None
    kept: list[Any] = field(default_factory=list)


def describe_start_error(error: BaseException) -> str:
    """Describe why a worker could not start, and the remedy."""
    remedy = _USED_UP.get(error.errno or 0, "") if isinstance(error, OSError) else ""
    return f"{type(error).__name__}: {error}{remedy}"


class WorkerGroup:
    """Starts workers, waits for any of them, and records their statistics."""

    def __init__(self, options: PoolOptions) -> None:
        self.handles: list[WorkerHandle] = []
        self._options = options
        self._past: list[WorkerStats] = []
        self._slots = list(range(options.max_workers))[::-1]
        with no_forks:
            self._selector = selectors.DefaultSelector()
            self._wake_r, self._wake_w = map(Descriptor, os.pipe())
            close_in_forks(self._selector, self._wake_r, self._wake_w)
        os.set_blocking(self._wake_r.fileno(), False)
        os.set_blocking(self._wake_w.fileno(), False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._launcher: Callable[[Any], Any] | None = None
        self._initializer: bytes | int | None = None
        self._registered: dict[str, bytes] = {}
        self._kept: list[PackedFunction] = []
        self._next_sample = 0.0

    # ------------------------------------------------------------ for any thread

    def prepare(self, first: RemoteFunction, user_objects: UserObjects) -> None:
        """Fork all workers from the calling thread, so that they inherit `first`; or prepare to start them later."""
        if self._options.start_method == "fork":
            self._fork_workers(first, user_objects)
        else:
            self._prepare_launcher(first.modules() if self._options.start_method == "forkserver" else (), user_objects)

    def _fork_workers(self, first: RemoteFunction, user_objects: UserObjects) -> None:
        initializer = user_objects.initializer
        around = byvalue.namespaces_around([first.function, initializer and initializer[0]])
        for held in around.values():
            byvalue.register_inherited(list(held.values()))
        endings = [first.inherit()]
        if initializer is not None:
            endings.append(self._inherit_initializer(*initializer, number=-first.number))  # belongs to this pool only
        end_inheritance, user_objects.kept = byvalue.inherit_globals(around)
        endings.append(end_inheritance)
        try:
            with interrupts_held(), at_rest():
                while self._slots:
                    try:
                        self._start(ForkPopen)
                    except OSError as exc:
                        if not self.continues_with_fewer(exc):
                            raise
        finally:
            for end in endings:
                end()

    def _inherit_initializer(
        self, initializer: Callable[..., Any], initargs: tuple[Any, ...], *, number: int
    ) -> Callable[[], None]:
        arguments = list(initargs)
        roots = unforkable.roots_of(initializer)
        if any(standins.is_registered(type(root)) for root in roots.values()):
            self._initializer = self._pack((initializer, initargs))
            return lambda: None
        unforkables = unforkable.Unforkables(roots | {"initargs": arguments}, only_registered=True)
        self._initializer = number
        return worker.inherit(number, (initializer, arguments), unforkables)

    def _pack(self, obj: Any) -> bytes:
        """Pickle an object that workers get at their start."""
        pickled = pickling.dumps_code(obj)
        packed = PackedFunction(pickled.stream, pickled.buffers)
        self._kept.append(packed)  # as long as a worker may start
        return packed.packed

    def _prepare_launcher(self, modules: Sequence[str], user_objects: UserObjects) -> None:
        options = self._options
        if user_objects.initializer is not None:
            self._initializer = self._pack(user_objects.initializer)
        self._registered = {name: self._pack(reduce) for name, reduce in standins.registrations().items()}
        if options.start_method == "spawn":
            self._launcher = SpawnPopen
        else:
            self._launcher = ServerLauncher((worker.__name__, *options.preload, *modules), options.num_threads)

    def wake(self) -> None:
        """End `wait` immediately."""
        with suppress(OSError):  # full: it wakes anyway; closed: nothing waits
            os.write(self._wake_w.fileno(), b"x")

    def interrupt_start(self) -> None:
        """Stop waiting for a server that is still importing."""
        if isinstance(self._launcher, ServerLauncher):
            self._launcher.interrupt()

    def stats(self) -> tuple[WorkerStats, ...]:
        """Return the statistics of every worker so far."""
        return (*self._past, *(handle.stats() for handle in list(self.handles)))

    # ------------------------------------------------------------ life

    @property
    def num_free_slots(self) -> int:
        """Return the number of workers that may still be started."""
        return len(self._slots)

    def start_worker(self, first: RemoteFunction, user_objects: UserObjects) -> None:
        """Start one worker; if the first ones were forked, it comes from a server.

        Raises:
            OSError, EOFError: the system, or the server, did not start one.
        """
        if self._launcher is None and is_frozen():
            raise OSError("a frozen program starts its workers once, by fork, and cannot replace them")
        if self._launcher is None:
            modules: Sequence[str] = ()
            with suppress(UnpicklableError):  # raised again when the function is sent
                modules = first.modules()
            self._prepare_launcher(modules, user_objects)
        assert self._launcher is not None
        self._start(self._launcher)

    def _start(self, launcher: Callable[[Any], Any]) -> None:
        slot = self._slots.pop()
        try:
            handle = WorkerHandle(self._worker_config(slot, launcher), slot, launcher)
        except BaseException:
            self._slots.append(slot)
            raise
        self.handles.append(handle)
        self._selector.register(handle.channel, selectors.EVENT_READ, handle)
        self._selector.register(handle.sentinel, selectors.EVENT_READ, handle)

    def continues_with_fewer(self, error: OSError | EOFError) -> bool:
        """Return True if the pool can continue with the present workers because the system has no room for more."""
        if not self.handles or getattr(error, "errno", None) not in _USED_UP:
            return False
        self._slots.clear()  # the slot of a worker that ends is returned
        self._options.logger.warning(
            "only %d of %d workers could be started: %s",
            len(self.handles),
            self._options.max_workers,
            describe_start_error(error),
        )
        return True

    def _worker_config(self, slot: int, launcher: Callable[[Any], Any]) -> worker.WorkerConfig:
        options = self._options
        inherits = launcher in {ForkPopen, SpawnPopen}
        return worker.WorkerConfig(
            name=options.worker_name or f"datamat-worker-{slot}",
            mask=options.masks[slot],
            num_threads=options.num_threads,
            logging=options.levels or logs.capture_state(),
            initializer=self._initializer,
            registered=self._registered,
            environment=None if launcher is ForkPopen else dict(os.environ),
            umask=None if inherits else current_umask(),
            max_tasks=options.max_tasks,
            notes_times=options.task_timeout_s is not None,
            is_fork=launcher is ForkPopen,
            authkey=bytes(multiprocessing.current_process().authkey),
        )

    def wait(self, timeout: float | None) -> Sequence[WorkerHandle]:
        """Wait until workers send, become writable or end, or until `wake`; return those workers."""
        # All descriptors are mapped to workers before any of them is closed, since numbers are reused.
        touched: dict[int, WorkerHandle] = {}
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._wake_r.fileno(), 4096)
            else:
                touched[id(key.data)] = key.data
                key.data.has_ended |= key.fd == key.data.sentinel
        return list(touched.values())

    def seconds_to_next_deadline(self) -> float | None:
        """Return the seconds until `keep_time` has something to do; None if only an event can cause that."""
        times = [handle.kill_at for handle in self.handles if handle.kill_at is not None]
        busy = [handle for handle in self.handles if handle.in_flight]
        deadlines = (self._deadline(handle) for handle in self.handles)
        times += [deadline for deadline in deadlines if deadline is not None]
        if busy:
            times.append(self._next_sample)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _deadline(self, handle: WorkerHandle) -> float | None:
        """Return when the running task exceeds its limit, or when an idle worker has waited long enough.

        None if there is no limit, or the worker has already been killed or asked to end.
        """
        options = self._options
        if handle.in_flight:
            limit = None if handle.has_timed_out else options.task_timeout_s
            return None if limit is None else handle.call_since() + limit
        return None if options.idle_s is None or not handle.takes_tasks else handle.head_since + options.idle_s

    def keep_time(self, now: float) -> None:
        """Kill workers whose tasks run too long, and sample memory, when due."""
        for handle in self.handles:
            deadline = self._deadline(handle)
            if handle.kill_at is not None and now >= handle.kill_at:
                self._kill_late(handle)
            elif deadline is not None and now >= deadline and handle.in_flight:
                handle.has_timed_out = True
                handle.kill_with_stack()
            elif deadline is not None and now >= deadline:
                handle.channel.send(Request.QUIT)
                handle.leave()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_S
            for handle in self.handles:
                handle.sample_memory()

    def flush(self, handle: WorkerHandle) -> None:
        """Send pending data to a worker; the selector reports when its socket accepts the rest."""
        handle.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if handle.channel.is_backed_up else 0)
        if self._selector.get_key(handle.channel).events != events:
            self._selector.modify(handle.channel, events, handle)

    def reap(self, handle: WorkerHandle) -> WorkerExit:
        """Remove an ended worker; return what is known of its end."""
        self._selector.unregister(handle.channel)
        self._selector.unregister(handle.sentinel)
        worker_exit = handle.reap()
        self.handles.remove(handle)
        self._slots.append(handle.slot)
        self._past.append(handle.stats())
        return worker_exit

    def _kill_late(self, handle: WorkerHandle) -> None:
        handle.kill_at = None
        handle.kill()
        if handle.is_held_up:
            handle.is_held_up = False
            self._options.logger.warning(
                "worker %d was killed: for %g s nothing has read what its tasks put into a queue of multiprocessing, "
                "and the rest of that is lost; read it before the pool ends, or return it",
                handle.pid,
                _HELD_UP_S,
            )

    def give_up(self) -> None:
        """Undo `prepare` if the pool does not start."""
        self.end(lambda handle: self.reap(handle) if handle.has_ended else None, abruptly=True)

    def end(self, attend: Callable[[WorkerHandle], object], *, abruptly: bool) -> None:
        """End all workers: on request, or by SIGKILL if `abruptly` or if they do not react."""
        for handle in self.handles:
            if abruptly:
                handle.kill()
            else:
                handle.channel.send(Request.QUIT)
            handle.kill_at = time.monotonic() + LAST_WORDS_S
        while self.handles:
            now = time.monotonic()
            for handle in self.handles:
                if now >= (handle.kill_at or 0.0):
                    self._kill_late(handle)
                    handle.kill_at = now + LAST_WORDS_S
            for handle in self.wait(min(handle.kill_at or 0.0 for handle in self.handles) - now):
                attend(handle)
        with no_forks:
            for end in (self._selector, self._wake_r, self._wake_w):
                end.close()
