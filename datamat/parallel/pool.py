"""The dispatcher: one thread that feeds the workers, collects their answers, and notices when one of them dies.

    callers ── Task ──> waiting ──> [dispatcher] ── frames ──> worker 0 .. n-1      one socket pair per worker
    callers <── Future ──────────── [dispatcher] <── frames ── worker 0 .. n-1
                                         ^── pidfd of each worker: readable once it has ended

There is no queue, lock or semaphore that two processes share, so no death can poison another worker. A worker answers
its tasks in order: when it dies, the first one without an answer is the suspect and the rest go back, unblamed.

Only this thread touches the workers. Callers append to `_waiting` under the lock and wake the thread through a pipe.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datamat.errors import BrokenPoolError, ParallelError, TaskTimeout, WorkerDied
from datamat.parallel import affinity, logs, pickling, worker
from datamat.parallel.channel import close_in_forks
from datamat.parallel.chunks import prefetch_depth
from datamat.parallel.contexts import SpawnPopen, Zygote, shared_server
from datamat.parallel.handle import Autopsy, Handle, WorkerStats
from datamat.parallel.tasks import Code, CodeBook, Task
from datamat.parallel.worker import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Dispatcher", "PoolOptions", "Progress"]

_MAX_STARTUP_DEATHS = 3
_LAST_WORDS_S = 1.0  # between QUIT and SIGKILL
_SAMPLE_S = 0.5
_PROGRESS_S = 0.1


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool runs; see `PathosExecutor` for the meaning of each.

    Attributes:
        max_workers: most workers at a time.
        start_method: "fork", "forkserver" or "spawn".
        masks: CPUs of each worker.
        num_threads: threads of libraries in a worker.
        initializer: (function, arguments) to run in each worker, or None.
        preload: modules that a forkserver imports.
        task_timeout_s: seconds that one call may take.
        max_retries: deaths that a task survives.
        max_tasks: tasks after which a worker is replaced.
        logger: where the pool itself logs.
    """

    max_workers: int
    start_method: str
    masks: tuple[frozenset[int] | None, ...]
    num_threads: int
    initializer: tuple[Callable[..., Any], tuple[Any, ...]] | None
    preload: tuple[str, ...]
    task_timeout_s: float | None
    max_retries: int
    max_tasks: int | None
    logger: logging.Logger


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pool is.

    Attributes:
        done: tasks that ended with a result.
        failed: tasks that ended with an error.
        in_flight: tasks at workers.
        waiting: tasks not yet sent.
        workers: every worker so far.
    """

    done: int
    failed: int
    in_flight: int
    waiting: int
    workers: tuple[WorkerStats, ...]


class Dispatcher:
    """Feeds tasks to workers; `start` forks or prepares them, `submit` may be called from any thread."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self.codes = CodeBook()
        self._waiting: deque[Task] = deque()
        self._handles: list[Handle] = []
        self._past: list[WorkerStats] = []
        self._slots = list(range(options.max_workers))[::-1]
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._is_asleep = False
        self._is_shutting_down = False
        self._cancels_waiting = False
        self._kills = False
        self._is_closed = False
        self._broken: BrokenPoolError | None = None
        self._startup_deaths = 0
        self._cost: float | None = None
        self._done = self._failed = 0
        self._next_sample = self._next_progress = 0.0
        self._zygote: Zygote | None = None
        self._initializer: bytes | None = None
        self._thread: threading.Thread | None = None
        self.on_progress: Callable[[Progress], object] | None = None
        close_in_forks(self)

    # ------------------------------------------------------------ called by any thread

    @property
    def broken(self) -> BrokenPoolError | None:
        """Why the pool can run nothing any more, None if it can."""
        return self._broken

    @property
    def thread(self) -> threading.Thread | None:
        """The dispatcher's thread, None before the first task."""
        return self._thread

    @property
    def cost(self) -> float | None:
        """Recent seconds per task, None before the first answer."""
        return self._cost

    def processes(self) -> dict[int, Any]:
        """Return the running worker processes by pid."""
        return {handle.pid: handle.process for handle in list(self._handles)}

    def start(self, first: Code) -> None:
        """Prepare the workers and start the thread; `first` is inherited where workers are forked.

        Called once, by the thread that submits the first task: it may have to be the one that is forked.
        """
        options = self._options
        if options.start_method == "fork":
            undo = [first.inherit()]
            if options.initializer is not None:
                undo.append(worker.bequeath(0, options.initializer, []))
            self._zygote = Zygote()
            try:
                self._zygote.ensure_running()
            finally:
                for end in undo:
                    end()
        elif options.initializer is not None:
            self._initializer = pickling.dumps_code(options.initializer).stream
        self._thread = threading.Thread(target=self._run, name="datamat-dispatcher", daemon=False)
        self._thread.start()

    def submit(self, *tasks: Task) -> None:
        """Queue tasks."""
        with self._lock:
            self._waiting.extend(tasks)
        self.wake()

    def shutdown(self, *, cancel_waiting: bool = False, kill: bool = False) -> None:
        """Ask the thread to end: after all tasks, after those under way, or at once."""
        self._is_shutting_down = True
        self._cancels_waiting |= cancel_waiting or kill
        self._kills |= kill
        self.wake()

    def wake(self) -> None:
        """Wake the thread if it sleeps."""
        if self._is_asleep:
            self._is_asleep = False
            with suppress(OSError):  # full: it wakes anyway; closed: it has ended
                os.write(self._wake_w, b"x")

    def progress(self) -> Progress:
        """Return how far the pool is."""
        handles = list(self._handles)
        return Progress(
            self._done,
            self._failed,
            sum(len(handle.in_flight) for handle in handles),
            len(self._waiting),
            (*self._past, *(handle.stats() for handle in handles)),
        )

    def abandon(self) -> None:
        """In a fork of the caller: let go of the descriptors."""
        if not self._is_closed:
            self._is_closed = True
            self._selector.close()
            os.close(self._wake_r)
            os.close(self._wake_w)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._has_finished():
                self._feed()
                self._wait()
                self._tell_forgotten()
        except BaseException as exc:  # an error of ours must not leave callers waiting for ever
            self._options.logger.exception("the dispatcher of the pool failed")
            self._break(f"the dispatcher failed: {type(exc).__name__}: {exc}", "")
        finally:
            self._close()

    def _has_finished(self) -> bool:
        if self._kills or self._broken is not None:
            return True
        if self._cancels_waiting:
            self._cancel_waiting()
        busy = any(handle.in_flight for handle in self._handles)
        return self._is_shutting_down and not self._waiting and not busy

    def _cancel_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for task in waiting:
            self._release(task)
            if task.tries:  # it has run: its future cannot be cancelled any more
                _settle(task.future, error=BrokenPoolError(f"{task.label}: the pool was shut down before its retry"))
            else:
                task.future.cancel()
                task.future.set_running_or_notify_cancel()

    # ------------------------------------------------------------ feeding

    def _feed(self) -> None:
        """Start workers as needed and give each what it should have."""
        if not self._waiting:
            return
        self._start_workers()
        ready = [handle for handle in self._handles if handle.is_ready and not handle.is_leaving]
        if not ready:
            return
        depth = 1 if self._options.max_tasks else prefetch_depth(self._cost)
        ready.sort(key=lambda handle: len(handle.in_flight))
        share = max(1, min(depth, -(-len(self._waiting) // len(ready))))
        for handle in ready:
            if handle.condemned is None:
                self._top_up(handle, share)

    def _top_up(self, handle: Handle, depth: int) -> None:
        if len(handle.in_flight) > depth // 2 and depth > 1:
            return  # refilled in batches
        while len(handle.in_flight) < depth:
            with self._lock:
                if not self._waiting:
                    break
                task = self._waiting.popleft()
            if task.tries or task.future.set_running_or_notify_cancel():
                self._post(handle, task)
            else:
                self._release(task)
        handle.channel.flush()
        self._watch_writes(handle)

    def _post(self, handle: Handle, task: Task) -> None:
        """Put a task, preceded by its code if need be, on its way."""
        code = task.code
        if not code.is_inherited and code.number not in handle.known_codes:
            handle.channel.post(Request.CODE, *code.frame())
            handle.known_codes.add(code.number)
        if not handle.in_flight:
            handle.head_since = time.monotonic()
        handle.in_flight.append(task)
        handle.channel.post(Request.TASK, task.header(), task.payload)

    def _watch_writes(self, handle: Handle) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if handle.channel.is_backed_up else 0)
        if self._selector.get_key(handle.channel).events != events:
            self._selector.modify(handle.channel, events, handle)

    def _start_workers(self) -> None:
        starting = sum(not handle.is_ready for handle in self._handles)
        idle = sum(handle.is_ready and not handle.in_flight for handle in self._handles)
        wanted = min(len(self._waiting) - idle - starting, len(self._slots))
        for _ in range(wanted):
            if not self._start_worker():
                return

    def _start_worker(self) -> bool:
        slot = self._slots.pop()
        try:
            handle = Handle(self._worker_config(slot), slot, self._launcher())
        except (OSError, EOFError) as exc:
            self._slots.append(slot)
            self._options.logger.warning("a worker could not be started: %s: %s", type(exc).__name__, exc)
            self._startup_deaths += 1
            if not self._handles and self._startup_deaths >= _MAX_STARTUP_DEATHS:
                self._break("workers cannot be started", f"{type(exc).__name__}: {exc}")
            return False
        self._handles.append(handle)
        self._selector.register(handle.channel, selectors.EVENT_READ, handle)
        self._selector.register(handle.sentinel, selectors.EVENT_READ, handle)
        return True

    def _launcher(self) -> Callable[[Any], Any]:
        options = self._options
        if self._zygote is not None:
            return self._zygote.launch
        if options.start_method == "spawn":
            return SpawnPopen
        return shared_server(options.preload, options.num_threads).launch

    def _worker_config(self, slot: int) -> worker.WorkerConfig:
        options = self._options
        return worker.WorkerConfig(
            name=f"datamat-worker-{slot}",
            mask=options.masks[slot],
            num_threads=options.num_threads,
            logging=logs.capture_state(),
            initializer=self._initializer,
            environment=dict(os.environ) if options.start_method == "forkserver" else None,
            max_tasks=options.max_tasks,
        )

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Sleep until something happens, and deal with it."""
        self._is_asleep = True
        timeout = 0.0 if self._waiting_for_nothing() else self._next_deadline()
        events = self._selector.select(timeout)
        self._is_asleep = False
        # All descriptors are resolved to workers before any of them is closed: a number may be used again.
        touched: dict[int, Handle] = {}
        for key, _ in events:
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            else:
                touched[id(key.data)] = key.data
        for handle in touched.values():
            self._attend(handle)
        self._keep_time()

    def _waiting_for_nothing(self) -> bool:
        """Has something come in since the last look?"""
        if self._is_shutting_down and self._has_finished():
            return True
        return bool(self._waiting) and any(h.is_ready and not h.in_flight for h in self._handles)

    def _attend(self, handle: Handle) -> None:
        handle.channel.flush()
        self._watch_writes(handle)
        # Asked before reading: what an ended process has written is all there.
        ended = handle.has_ended()
        frames, at_end = handle.channel.receive()
        for kind, data in frames:
            self._hear(handle, kind, data)
        while ended and frames and not at_end:
            frames, at_end = handle.channel.receive()
            for kind, data in frames:
                self._hear(handle, kind, data)
        if ended:
            self._bury(handle)
        elif at_end and handle.condemned is None:
            handle.condemned = "closed its socket"
            handle.kill()

    def _next_deadline(self) -> float | None:
        now = time.monotonic()
        times = [handle.kill_at for handle in self._handles if handle.kill_at is not None]
        if self._options.task_timeout_s is not None:
            times += [self._deadline(handle) for handle in self._handles if handle.in_flight and handle.kill_at is None]
        if any(handle.in_flight for handle in self._handles):
            times.append(self._next_sample)
        return max(0.0, min(times) - now) if times else None

    def _deadline(self, handle: Handle) -> float:
        assert self._options.task_timeout_s is not None
        return handle.head_since + self._options.task_timeout_s * handle.in_flight[0].count

    def _keep_time(self) -> None:
        """Do what is due: kill tasks that run too long, sample memory, report progress."""
        now = time.monotonic()
        for handle in list(self._handles):
            if handle.kill_at is not None and now >= handle.kill_at:
                handle.kill_at = None
                handle.kill()
            elif self._options.task_timeout_s is not None and handle.in_flight and handle.condemned is None:
                if now >= self._deadline(handle):
                    handle.condemned = "timeout"
                    handle.kill_with_stack()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_S
            for handle in self._handles:
                handle.sample_memory()
        if self.on_progress is not None and now >= self._next_progress:
            self._report_progress(now)

    def _report_progress(self, now: float) -> None:
        self._next_progress = now + _PROGRESS_S
        if self.on_progress is not None:
            try:
                self.on_progress(self.progress())
            except Exception:  # noqa: BLE001 -- a user's callback must not end the pool
                self._options.logger.exception("the progress callback failed")

    # ------------------------------------------------------------ hearing

    def _hear(self, handle: Handle, kind: int, data: bytes) -> None:
        if kind in (Reply.DONE, Reply.FAILED):
            if handle.in_flight:  # else settled by a shutdown that kills
                self._finish(handle, kind, data)
        elif kind == Reply.LOG:
            handle.last_lines.append(logs.replay(data))
        elif kind == Reply.READY:
            handle.is_ready = True
            self._startup_deaths = 0
        elif kind == Reply.RETURNED:
            self._take_back(handle)
        elif kind == Reply.BY_VALUE:
            self._ship_by_value(handle, data)
        elif kind == Reply.BROKEN:
            handle.is_leaving = True
            self._break("the initializer of a worker failed", data.decode())
        elif kind == Reply.LEAVING:
            handle.is_leaving = True

    def _finish(self, handle: Handle, kind: int, data: bytes) -> None:
        _, busy_s, peak, packed = worker.unpack_outcome(data)
        task = handle.in_flight.popleft()
        handle.head_since = time.monotonic()
        handle.tasks += task.count
        handle.busy_s += busy_s
        handle.peak_rss_bytes = max(handle.peak_rss_bytes, peak)
        # Falls slowly and rises at once: a task is not to wait behind one that turns out to be long.
        self._cost = busy_s if self._cost is None else max(busy_s, 0.9 * self._cost + 0.1 * busy_s)
        task.busy_s = busy_s
        self._release(task)
        try:
            value = pickling.loads_data(packed)
        except BaseException as exc:  # noqa: BLE001 -- the user's own __setstate__ may raise anything
            error = ParallelError(f"{task.label}: its result cannot be unpickled: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._fail(task, error)
            return
        if kind == Reply.DONE:
            self._done += task.count
            _settle(task.future, value)
        else:
            self._fail(task, with_remote_traceback(*value))

    def _fail(self, task: Task, error: BaseException) -> None:
        self._failed += task.count
        _settle(task.future, error=error)

    def _take_back(self, handle: Handle) -> None:
        task = handle.in_flight.popleft()
        handle.head_since = time.monotonic()
        self._requeue([task])

    def _ship_by_value(self, handle: Handle, data: bytes) -> None:
        number = worker.CODE.unpack_from(data)[0]
        module = data[worker.CODE.size :].decode()
        code = next((task.code for task in handle.in_flight if task.code.number == number), None)
        handle.known_codes.discard(number)
        if code is not None:
            self._options.logger.debug("%s: %s travels by value, a worker could not import it", code.label, module)
            code.send_by_value(module)

    def _release(self, task: Task) -> None:
        self.codes.give_back(task.code)

    def _tell_forgotten(self) -> None:
        """Have the workers drop callables that nobody can call any more."""
        while self.codes.forgotten:
            number = self.codes.forgotten.popleft()
            for handle in self._handles:
                handle.known_codes.discard(number)
                handle.channel.send(Request.FORGET, worker.CODE.pack(number, 0))

    def _requeue(self, tasks: list[Task]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(tasks))

    # ------------------------------------------------------------ dying

    def _bury(self, handle: Handle) -> None:
        """Deal with a worker that has ended: blame, requeue, replace."""
        self._selector.unregister(handle.channel)
        self._selector.unregister(handle.sentinel)
        autopsy = handle.bury()
        self._handles.remove(handle)
        self._slots.append(handle.slot)
        self._past.append(handle.stats())
        lost = list(handle.in_flight)
        handle.in_flight.clear()
        if lost:
            self._blame(lost, autopsy, handle.condemned)
        if not handle.is_ready and not handle.is_leaving and self._broken is None and not self._kills:
            self._startup_deaths += 1
            if self._startup_deaths >= _MAX_STARTUP_DEATHS:
                self._break(f"{self._startup_deaths} workers in a row ended while they started", autopsy.cause() + "\n" + autopsy.report())

    def _blame(self, lost: list[Task], autopsy: Autopsy, condemned: str | None) -> None:
        suspect, *rest = lost
        if condemned == "timeout":
            self._release(suspect)
            self._fail(suspect, _timeout_error(suspect, autopsy, self._options.task_timeout_s or 0.0))
        else:
            suspect.tries += 1
            if suspect.tries > self._options.max_retries:
                self._release(suspect)
                self._fail(suspect, _death_error(suspect, autopsy))
            else:
                self._options.logger.warning(
                    "%s: its worker %d ended by %s; attempt %d of %d follows",
                    suspect.label, autopsy.pid, autopsy.cause(), suspect.tries + 1, self._options.max_retries + 1,
                )  # fmt: skip
                rest.insert(0, suspect)
        self._requeue(rest)

    def _break(self, what: str, details: str) -> None:
        self._broken = BrokenPoolError(f"{what}: {details}" if details else what)

    def _close(self) -> None:
        """End the workers, settle what is left, and free everything."""
        self._cancel_or_fail_all()
        abrupt = self._kills or self._broken is not None
        for handle in self._handles:
            if abrupt:
                handle.kill()
            else:
                handle.channel.send(Request.QUIT)
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._handles:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                for handle in self._handles:
                    handle.kill()
                deadline = time.monotonic() + _LAST_WORDS_S
            events = self._selector.select(max(0.0, remaining))
            touched = {id(key.data): key.data for key, _ in events if key.data is not None}
            for handle in touched.values():
                self._attend(handle)
        if self._zygote is not None:
            self._zygote.stop()
        self._report_progress(0.0)
        with self._lock:
            self.abandon()

    def _cancel_or_fail_all(self) -> None:
        """Settle every future: with the cause if the pool broke, by cancelling if it is being killed."""
        reason = self._broken or BrokenPoolError("the pool was shut down before the task ended")
        for handle in self._handles:
            for task in handle.in_flight:
                self._release(task)
                self._fail(task, reason)
            handle.in_flight.clear()
        if self._broken is None:
            self._cancel_waiting()
            return
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for task in waiting:
            self._release(task)
            self._fail(task, self._broken)


def _settle(future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    with suppress(InvalidStateError):  # cancelled by its owner a moment ago
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


class RemoteTraceback(Exception):  # noqa: N818 -- shown as the cause of an error; the name says what it is
    """The traceback of an error in a worker, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def with_remote_traceback(error: BaseException, text: str) -> BaseException:
    """Return a worker's error with its traceback as the cause."""
    error.__cause__ = RemoteTraceback(text)
    return error


def _death_error(task: Task, autopsy: Autopsy) -> WorkerDied:
    times = "" if task.tries == 1 else f" for the {task.tries}th time" if task.tries > 3 else f", {task.tries} times"
    error = WorkerDied(
        f"{task.label}: worker {autopsy.pid} ended while it ran this task{times}: {autopsy.cause()}; "
        f"{autopsy.report()}"
    )
    _attach(error, task, autopsy)
    return error


def _timeout_error(task: Task, autopsy: Autopsy, timeout_s: float) -> TaskTimeout:
    error = TaskTimeout(
        f"{task.label}: it ran longer than task_timeout_s={timeout_s:g}; worker {autopsy.pid} was killed. "
        f"It was here; {autopsy.report()}"
    )
    _attach(error, task, autopsy)
    return error


def _attach(error: ParallelError, task: Task, autopsy: Autopsy) -> None:
    vars(error).update(
        task=task.label,
        exitcode=autopsy.exitcode,
        signal=autopsy.signal,
        peak_rss_bytes=autopsy.peak_rss_bytes,
        stack=autopsy.stack,
        log_lines=autopsy.log_lines,
    )
