"""The dispatcher: one thread that feeds the workers, collects their answers, and notices when one of them dies.

    callers ── Task ──> waiting ──> [dispatcher] ── frames ──> worker 0 .. n-1      one socket pair per worker
    callers <── Future ──────────── [dispatcher] <── frames ── worker 0 .. n-1
                                         ^── pidfd of each worker: readable once it has ended

There is no queue, lock or semaphore that two processes share, so no death can poison another worker. A worker answers
its tasks in order: when it dies, the first one without an answer is the suspect and the rest go back, unblamed. The
suspect goes back too if the worker's black box says that it had not begun it.

Only this thread touches the workers. Callers append to `_waiting` under the lock and wake the thread through a pipe.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from datamat.errors import BrokenPoolError, ParallelError, UnpicklableError
from datamat.parallel import logs, payloads, worker
from datamat.parallel.chunks import prefetch_depth
from datamat.parallel.crew import Crew, PoolOptions
from datamat.parallel.failures import with_remote_traceback
from datamat.parallel.inquest import hold_inquest
from datamat.parallel.progress import Progress, Tally
from datamat.parallel.tasks import CodeBook
from datamat.parallel.worker import Reply, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.parallel.failures import Autopsy
    from datamat.parallel.handle import Handle
    from datamat.parallel.tasks import Code, Task

__all__ = ["Dispatcher"]

# Deaths in a row while starting: before any worker was ready it will not get better; later something kills them.
_MAX_STARTUP_DEATHS, _MAX_LATER_STARTUP_DEATHS = 3, 30
_DEEP = 16  # tasks at each worker, all of them short
_NAP_S = 0.0002


class Dispatcher:
    """Feeds tasks to workers."""

    def __init__(self, options: PoolOptions) -> None:
        self.codes = CodeBook()
        self.tally = Tally(self.progress, options.logger)
        self.broken: BrokenPoolError | None = None
        self.thread: threading.Thread | None = None
        self._options = options
        self._crew = Crew(options)
        self._lock = threading.Lock()
        self._waiting: deque[Task] = deque()
        self._answers: deque[tuple[Task, int, memoryview]] = deque()
        self._is_asleep = False
        self._is_sated = False  # more tasks change nothing: some wait already, for workers that all have enough
        self._is_over = False
        self._is_shutting_down = False
        self._cancels_waiting = False
        self._kills = False
        self._startup_deaths = 0
        self._max_startup_deaths = _MAX_STARTUP_DEATHS
        self._cost: float | None = None

    # ------------------------------------------------------------ called by any thread

    def start(self, first: Code) -> threading.Thread:
        """Prepare the workers and start the thread; `first` is inherited where workers are forked.

        Called once, by the thread that submits the first task: it may have to be the one that is forked.
        """
        self._crew.prepare(first)
        self.thread = threading.Thread(target=self._run, name="datamat-dispatcher", daemon=False)
        self.thread.start()
        return self.thread

    def submit(self, *tasks: Task) -> None:
        """Queue tasks; those that come when the thread has ended fail with the reason."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._waiting.extend(tasks)
        if is_over:
            self._give_up(tasks)
        elif not self._is_sated:
            self._wake()

    def shutdown(self, *, cancel_waiting: bool = False, kill: bool = False) -> None:
        """Ask the thread to end: after all tasks, after those under way, or at once."""
        self._is_shutting_down = True
        self._cancels_waiting |= cancel_waiting or kill
        self._kills |= kill
        if kill:
            self._crew.interrupt_start()
        self._wake()

    def _wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self._crew.wake()

    def progress(self) -> Progress:
        """Return how far the pool is."""
        # `copy` is one step for other threads, `tuple` is not; the dispatcher takes tasks meanwhile without the lock.
        in_flight = sum(task.count for handle in list(self._crew.handles) for task in handle.in_flight.copy())
        waiting = sum(task.count for task in self._waiting.copy())
        return Progress(self.tally.done, self.tally.failed, in_flight, waiting, self._crew.stats())

    def processes(self) -> dict[int, Any]:
        """Return the running worker processes by pid."""
        return {handle.pid: handle.process for handle in list(self._crew.handles)}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._has_finished():
                self._feed()
                self._deliver()  # after feeding: a worker is not to wait for what a caller does with its result
                self._wait()
                self._crew.keep_time(now := time.monotonic())
                self.tally.report_if_due(now)
                self._tell_forgotten()
        except BaseException as exc:  # an error of ours must not leave callers waiting for ever
            self._options.logger.exception("the dispatcher of the pool failed")
            self._break("the dispatcher failed", f"{type(exc).__name__}: {exc}")
        finally:
            self._deliver()
            self._settle_all()
            self._crew.end(self._attend, abruptly=self._kills or self.broken is not None)
            self.tally.report()

    def _has_finished(self) -> bool:
        if self._kills or self.broken is not None:
            return True
        if self._cancels_waiting:
            self._cancel_waiting()
        if not self._is_shutting_down or self._waiting:
            return False
        return not any(handle.in_flight for handle in self._crew.handles)

    def _take_waiting(self) -> list[Task]:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        return waiting

    def _cancel_waiting(self) -> None:
        for task in self._take_waiting():
            self.codes.give_back(task.code)
            if task.future.cancel():
                task.begin()  # tells those who wait
            elif task.is_started:
                self._fail(task, BrokenPoolError(f"{task.label}: the pool was shut down before it could be repeated"))

    # ------------------------------------------------------------ feeding

    def _feed(self) -> None:
        """Start workers as needed and give each what it should have."""
        if not self._waiting:
            return
        self._start_workers()
        ready = [handle for handle in self._crew.handles if handle.takes_tasks]
        if not ready:
            return
        # What is submitted by itself may be what the call before it waits for: it never waits behind a long one.
        is_chunk = self._waiting[0].mode == worker.Mode.CHUNK
        num_waiting = len(self._waiting) / len(self._crew.handles) if is_chunk else 0
        depth = 1 if self._options.max_tasks else prefetch_depth(self._cost, num_waiting)
        ready.sort(key=lambda handle: len(handle.in_flight))
        share = max(1, min(depth, -(-len(self._waiting) // len(ready))))
        for handle in ready:
            # Deep queues are refilled when half empty: one write for many tasks.
            if len(handle.in_flight) <= share // 2:
                self._top_up(handle, share)

    def _top_up(self, handle: Handle, depth: int) -> None:
        waiting = self._waiting
        while len(handle.in_flight) < depth and waiting:
            task = waiting.popleft()  # only this thread takes from it
            if task.begin():
                self._post(handle, task)
            else:
                self.codes.give_back(task.code)
        self._crew.flush(handle)

    def _post(self, handle: Handle, task: Task) -> None:
        """Put a task, preceded by its code if need be, on its way."""
        code = task.code
        if not (code.is_inherited and handle.is_fork) and code.number not in handle.known_codes:
            try:
                frame = code.frame()
            except UnpicklableError as exc:  # of a code that other workers inherited: it was not pickled before
                self.codes.give_back(code)
                self._fail(task, exc)
                return
            handle.channel.post(Request.CODE, *frame)
            handle.known_codes.add(code.number)
        if not handle.in_flight:
            handle.head_since = time.monotonic()
        handle.in_flight.append(task)
        handle.channel.post(Request.TASK, task.header(), task.payload)

    def _start_workers(self) -> None:
        handles = self._crew.handles
        starting = sum(not handle.is_ready for handle in handles)
        idle = sum(handle.takes_tasks and not handle.in_flight for handle in handles)
        for _ in range(min(len(self._waiting) - idle - starting, self._crew.num_free_slots)):
            try:
                self._crew.start_worker(self._waiting[0].code)
            except (OSError, EOFError) as exc:
                cause = f"{type(exc).__name__}: {exc}"
                self._options.logger.warning("a worker could not be started: %s", cause)
                if not handles:
                    self._count_startup_death(cause)
                return

    def _count_startup_death(self, cause: str) -> None:
        self._startup_deaths += 1
        if self._startup_deaths >= self._max_startup_deaths:
            self._break(f"{self._startup_deaths} workers in a row ended while they started", cause)

    def _tell_forgotten(self) -> None:
        """Have the workers drop callables that nobody can call any more."""
        while self.codes.forgotten:
            number = self.codes.forgotten.popleft()
            for handle in self._crew.handles:
                if number in handle.known_codes or self._options.start_method == "fork":
                    handle.known_codes.discard(number)
                    handle.channel.post(Request.FORGET, worker.CODE.pack(number))
                    self._crew.flush(handle)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Sleep until something happens, and deal with it."""
        if self._crew.handles and all(len(handle.in_flight) > _DEEP for handle in self._crew.handles):
            time.sleep(_NAP_S)  # many answers then come at once; nobody runs out of work meanwhile
        self._is_asleep = True
        self._is_sated = bool(self._waiting) and not self._crew.num_free_slots
        timeout = 0.0 if self._has_work() else self._crew.seconds_to_next_deadline()
        touched = self._crew.wait(timeout)
        self._is_asleep = False
        for handle in touched:
            self._attend(handle)

    def _has_work(self) -> bool:
        """Has something come in since the last look? Who came before `_is_asleep` was set did not wake us."""
        if self.codes.forgotten or (self._is_shutting_down and self._has_finished()):
            return True
        if not self._waiting:
            return False
        if not self._crew.handles:
            return self.broken is None
        return any(handle.takes_tasks and not handle.in_flight for handle in self._crew.handles)

    def _attend(self, handle: Handle) -> None:
        self._crew.flush(handle)
        # It was seen to have ended before this: what it has written is all there, and less than one `receive` takes.
        frames, at_end = handle.channel.receive()
        for kind, data in frames:
            self._hear(handle, kind, data)
        if handle.has_ended:
            self._bury(handle)
        elif at_end:  # it closed its socket, or is about to end: nothing more is given to it
            handle.has_hung_up = True
            handle.kill()

    # ------------------------------------------------------------ hearing

    def _hear(self, handle: Handle, kind: int, data: bytes) -> None:
        if kind in (Reply.DONE, Reply.FAILED):
            if handle.in_flight:  # else settled by a shutdown that kills
                self._take_answer(handle, kind, data)
        elif kind == Reply.LOG:
            handle.last_lines.append(logs.replay(data))
        elif kind == Reply.READY:
            handle.is_ready = True
            handle.sample_memory()  # it may not live to the next time
            self._startup_deaths = 0
            self._max_startup_deaths = _MAX_LATER_STARTUP_DEATHS
        elif kind == Reply.RETURNED:
            self._requeue([handle.in_flight.popleft()])
            handle.head_since = time.monotonic()
        elif kind == Reply.RETIRED:
            handle.leave()
            self._take_back(handle)
        elif kind == Reply.BY_VALUE:
            self._ship_by_value(handle, data)
        elif kind == Reply.BROKEN:
            handle.is_leaving = True
            self._break("the initializer of a worker failed", data.decode())

    def _take_answer(self, handle: Handle, kind: int, data: bytes) -> None:
        _, busy_s, peak, packed = worker.unpack_outcome(data)
        task = handle.in_flight.popleft()
        handle.count(task.count, busy_s, peak)
        # Falls slowly and rises at once: a task is not to wait behind one that turns out to be long.
        self._cost = busy_s if self._cost is None else max(busy_s, 0.9 * self._cost + 0.1 * busy_s)
        task.busy_s = busy_s
        self._answers.append((task, kind, packed))

    def _deliver(self) -> None:
        """Settle the futures of the tasks that were answered."""
        while self._answers:
            self._settle(*self._answers.popleft())

    def _settle(self, task: Task, kind: int, packed: memoryview) -> None:
        self.codes.give_back(task.code)
        try:
            value = payloads.loads_data(packed)
        except BaseException as exc:  # noqa: BLE001 -- the user's own __setstate__ may raise anything
            error = ParallelError(f"{task.label}: its result cannot be unpickled: {type(exc).__name__}: {exc}")
            error.__cause__ = exc
            self._fail(task, error)
            return
        if kind == Reply.FAILED:
            self._fail(task, with_remote_traceback(*value))
            return
        self.tally.done += task.count
        with suppress(InvalidStateError):
            task.future.set_result(value)

    def _fail(self, task: Task, error: BaseException) -> None:
        self.tally.failed += task.count
        with suppress(InvalidStateError):
            task.future.set_exception(error)

    def _ship_by_value(self, handle: Handle, data: bytes) -> None:
        number = worker.CODE.unpack_from(data)[0]
        module = data[worker.CODE.size :].decode()
        handle.known_codes.discard(number)
        code = next((task.code for task in handle.in_flight if task.code.number == number), None)
        if code is not None:
            self._options.logger.debug("%s: %s travels by value, a worker could not import it", code.label, module)
            code.send_by_value(module)

    def _take_back(self, handle: Handle) -> None:
        """Give to others what a worker that ends has not begun."""
        unbegun = list(handle.in_flight)
        handle.in_flight.clear()
        self._requeue(unbegun)

    def _requeue(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(tasks))

    # ------------------------------------------------------------ dying

    def _bury(self, handle: Handle) -> None:
        """Deal with a worker that has ended: blame, requeue, count."""
        autopsy = self._crew.bury(handle)
        lost = list(handle.in_flight)
        handle.in_flight.clear()
        if lost:
            self._judge(lost, autopsy, has_timed_out=handle.has_timed_out)
        if not handle.is_ready and not handle.is_leaving and not self._kills:
            self._count_startup_death(f"{autopsy.cause()}; {autopsy.report()}")

    def _judge(self, lost: list[Task], autopsy: Autopsy, *, has_timed_out: bool) -> None:
        verdict = hold_inquest(
            lost,
            autopsy,
            self.codes,
            timeout_s=self._options.task_timeout_s if has_timed_out else None,
            max_retries=self._options.max_retries,
        )
        if verdict.failed is not None and verdict.error is not None:
            self.codes.give_back(verdict.failed.code)
            self._fail(verdict.failed, verdict.error)
        if verdict.warning is not None:
            self._options.logger.warning("%s", verdict.warning)
        self._requeue(verdict.again)

    def _break(self, what: str, details: str) -> None:
        if self.broken is None:
            self.broken = BrokenPoolError(f"{what}: {details}")

    def _settle_all(self) -> None:
        """Settle every future that is left: with the cause if the pool broke, else it is being killed."""
        with self._lock:
            self._is_over = True
        under_way = [task for handle in self._crew.handles for task in handle.in_flight]
        for handle in self._crew.handles:
            handle.in_flight.clear()
        if self.broken is not None:
            under_way += self._take_waiting()
        self._give_up(under_way)
        self._cancel_waiting()

    def _give_up(self, tasks: Sequence[Task]) -> None:
        reason = self.broken or BrokenPoolError("the pool was shut down before the task ended")
        for task in tasks:
            self.codes.give_back(task.code)
            self._fail(task, reason)
