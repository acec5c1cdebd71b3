"""The thread that sends tasks to workers and collects their answers, and what it does when a worker dies."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from datamat.parallel import pickling, worker
from datamat.parallel.errors import BrokenPoolError, ParallelError, count_of
from datamat.parallel.frozen import frozen
from datamat.parallel.tasks import PREFETCH_COST_S, FunctionTable, prefetch_depth, split
from datamat.parallel.worker import Reply, Request
from datamat.parallel.workers import (
    PoolOptions,
    PoolProgress,
    UserObjects,
    WorkerGroup,
    death_error,
    describe_start_error,
    result_error,
    timeout_error,
    unpack_error,
    unpack_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from datamat.parallel.crash import WorkerExit
    from datamat.parallel.tasks import RemoteFunction, Task, TaskSource
    from datamat.parallel.workers import WorkerHandle

# ---------------------------------------------------------------- blame for a death
#
# Which task of a dead worker is to blame, and which go to another worker.


# Number of workers that may die just before they begin the same task. After that the task is to blame: its sheer size
# may be what kills them.
MAX_UNBEGUN = 5


@frozen()
class Blame:
    """What happens to the tasks that a dead worker had not answered.

    Attributes:
        again: tasks to repeat on other workers, in this order.
        failed: task that fails, if any.
        error: its error.
        warning: message for the log, if any.
    """

    again: Sequence[Task]
    failed: Task | None = None
    error: ParallelError | None = None
    warning: str | None = None


def blame(
    lost: Sequence[Task],
    worker_exit: WorkerExit,
    functions: FunctionTable,
    *,
    timeout_s: float | None,
    max_retries: int,
) -> Blame:
    """Decide which task is to blame for the death of a worker.

    A worker answers its tasks in order, so the first one without an answer is the only suspect; and it is innocent if
    the worker had not begun it.

    Args:
        lost: unanswered tasks, in order; at least one.
        worker_exit: what is known of the death.
        functions: table that counts the parts of a chunk that is split.
        timeout_s: time limit of the suspect, if the worker was killed because it exceeded that.
        max_retries: number of deaths after which a task is still repeated.
    """
    suspect, *others = lost
    if not suspect.was_begun(worker_exit):
        suspect.unbegun += 1
        if suspect.unbegun < MAX_UNBEGUN:
            return Blame(lost)
    if suspect.count > 1:
        return Blame([*split(suspect, functions), *others])
    suspect.tries += 1
    if timeout_s is not None:
        return Blame(others, suspect, timeout_error(suspect, worker_exit, timeout_s))
    if suspect.tries > max_retries:
        return Blame(others, suspect, death_error(suspect, worker_exit))
    attempts = f"attempt {suspect.tries + 1} of {max_retries + 1}"
    warning = f"{suspect.label}: worker {worker_exit.pid} ended by {worker_exit.cause()}; {attempts} follows"
    return Blame(lost, warning=warning)


# ---------------------------------------------------------------- the dispatcher
#
# The dispatcher: one thread that feeds the workers, collects their answers, and notices when one of them dies.
#
#     callers ── Task ──> waiting ──> [dispatcher] ── frames ──> worker 0 .. n-1      one socket pair per worker
#     callers <── Future ──────────── [dispatcher] <── frames ── worker 0 .. n-1
#                                          ^── pidfd of each worker: readable once it has ended
#
# There is no queue, lock or semaphore that two processes share, so no death can poison another worker. A worker answers
# its tasks in order: when it dies, the first one without an answer is the suspect and the rest go back, unblamed. The
# suspect goes back too if the worker's crash note says that it had not begun it.
#
# Only this thread touches the workers. Callers append to `_waiting` under the lock and wake the thread through a pipe.


# Deaths in a row during start-up: before any worker was ready, retrying is pointless; later, something kills them.
_MAX_STARTUP_DEATHS, _MAX_LATER_STARTUP_DEATHS = 3, 30
_DEEP = 16  # short tasks at each worker
_LARGE_BYTES = 1 << 16  # of arguments, which take longer to pickle than the earlier tasks take to send
_NAP_S = 0.0002
_REPORT_S = 0.1


class Dispatcher:
    """Sends tasks to workers, and resolves their futures.

    Args:
        options: options of the pool: workers, limits, retries, start method.
        user_objects: the caller's initializer and callbacks; the executor keeps them alive.
    """

    def __init__(self, options: PoolOptions, user_objects: UserObjects) -> None:
        self.functions = FunctionTable()
        self.broken: BrokenPoolError | None = None
        self.thread: threading.Thread | None = None
        self._starter: int | None = None
        self._has_started = threading.Event()
        self._options = options
        self._workers = WorkerGroup(options)
        # Guards the queue and each worker's tasks. No user code runs under it, but a finalizer that runs while it is
        # held may re-enter.
        self._lock = threading.RLock()
        self._user_objects = weakref.ref(user_objects)
        self._held: UserObjects | None = None  # while there is work
        self._waiting: deque[Task] = deque()
        self._sources: deque[TaskSource] = deque()
        self._answers: deque[tuple[Task, int, memoryview, int]] = deque()
        self._is_asleep = False
        self._is_saturated = False  # tasks are waiting and every worker has enough: more of them change nothing
        self._is_over = False
        self._is_shutting_down = False
        self._cancels_waiting = False
        self._kills = False
        self._startup_deaths = 0
        self._max_startup_deaths = _MAX_STARTUP_DEATHS
        self._cost: float | None = None
        self._num_done = self._num_failed = 0  # calls
        self._next_report = 0.0

    # ------------------------------------------------------------ called by any thread

    def claim_start(self) -> bool:
        """Return True if the calling thread must call `start`: it is the first to ask."""
        with self._lock:
            is_first = self._starter is None
            if is_first:
                self._starter = threading.get_ident()
        return is_first

    def start(self, first: RemoteFunction) -> None:
        """Prepare the workers and start the thread; forked workers inherit `first`.

        Called once, by the thread that submits the first task, since that thread may have to fork. Tasks of other
        threads wait meanwhile.
        """
        user_objects = self._user_objects()
        assert user_objects is not None  # the executor calls this
        thread = threading.Thread(target=self._run, name="datamat-dispatcher", daemon=False)
        try:
            self._workers.prepare(first, user_objects)
            thread.start()
            self.thread = thread
        except BaseException as exc:  # an interrupt, say: workers would wait for tasks, and the program for the workers
            self._break("no worker could be started", describe_start_error(exc))
            self.shutdown(kill=True)
            if not thread.is_alive():  # else it ends them
                self._workers.give_up()
                self._settle_all()
            raise
        finally:
            self._has_started.set()

    def join(self) -> None:
        """Wait for the thread to end if it was started; a callback or finalizer may call this from that very thread."""
        if self._starter not in (None, threading.get_ident()):
            self._has_started.wait()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def submit(self, *tasks: Task) -> None:
        """Queue tasks; once the thread has ended they fail, with the reason."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._hold_user_objects()
                self._waiting.extend(tasks)
        if is_over:
            self._give_up(tasks)
        elif not self._is_saturated:
            self.wake()

    def open_source(self, stream: TaskSource) -> None:
        """Draw the tasks of a map as the workers need them."""
        with self._lock:
            if not self._is_over:
                self._hold_user_objects()
                self._sources.append(stream)
        self.wake()

    def _hold_user_objects(self) -> None:
        if self._held is None:
            self._held = self._user_objects()

    def recall(self, is_meant: Callable[[Task], bool]) -> None:
        """Take back the tasks that workers have not begun, where a matching task is among them; `wake` resends them."""
        with self._lock:
            for handle in self._workers.handles.copy():
                if any(map(is_meant, itertools.islice(handle.in_flight, 1, None))):
                    self._requeue(handle.take_back())

    def shutdown(self, *, cancel_waiting: bool = False, kill: bool = False) -> None:
        """Ask the thread to end: after all tasks, after the running ones, or immediately."""
        self._is_shutting_down = True
        self._cancels_waiting |= cancel_waiting or kill
        self._kills |= kill
        if kill:
            self._workers.interrupt_start()
        self.wake()

    def wake(self) -> None:
        """Wake the thread if it sleeps."""
        if self._is_asleep:
            self._is_asleep = False
            self._workers.wake()

    def progress(self) -> PoolProgress:
        """Return the progress of the pool."""
        # `copy` is atomic, `tuple` is not; the dispatcher takes tasks without the lock meanwhile.
        in_flight = sum(task.count for handle in list(self._workers.handles) for task in handle.in_flight.copy())
        waiting = sum(task.count for task in self._waiting.copy())
        waiting += sum(source.num_left() for source in self._sources.copy())
        return PoolProgress(self._num_done, self._num_failed, in_flight, waiting, self._workers.stats())

    def processes(self) -> dict[int, Any]:
        """Return the running worker processes by pid."""
        return {handle.pid: handle.process for handle in list(self._workers.handles)}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._has_finished():
                self._feed()
                self._settle_answers()  # after feeding: workers must not wait for what callers do with results
                self._release_user_objects()
                self._wait()
                self._workers.keep_time(now := time.monotonic())
                self._rebalance()
                self._report(now)
                self._send_forgotten()
        except BaseException as exc:  # a defect of ours must not leave callers waiting for ever
            self._options.logger.exception("the dispatcher of the pool failed")
            self._break("the dispatcher failed", f"{type(exc).__name__}: {exc}")
        finally:
            self._settle_answers()
            self._settle_all()
            self._workers.end(self._handle_events, abruptly=self._kills or self.broken is not None)
            self._report()
            self._release_user_objects()
            if (user_objects := self._user_objects()) is not None:
                user_objects.kept.clear()

    def _release_user_objects(self) -> None:
        """While there is no work, hold no reference that may keep the pool alive."""
        if self._held is None or self._waiting or any(handle.in_flight for handle in self._workers.handles):
            return
        with self._lock:
            held = self._held
            if not (self._waiting or self._sources):
                self._held = None
        del held  # not under the lock: it may be the last reference, and run user code

    def _report(self, now: float | None = None) -> None:
        """Report the progress; with `now`, a time of the monotonic clock, at most about ten times a second."""
        user_objects = self._held or self._user_objects()
        if user_objects is None or user_objects.on_progress is None or (now is not None and now < self._next_report):
            return
        self._next_report = (now or 0.0) + _REPORT_S
        try:
            user_objects.on_progress(self.progress())
        except Exception:  # a user's callback must not end the pool
            self._options.logger.exception("the progress callback failed")

    def _has_finished(self) -> bool:
        if self._kills or self.broken is not None:
            return True
        if self._cancels_waiting:
            self.recall(lambda _: True)
            self._cancel_waiting()
        if not self._is_shutting_down or self._waiting or self._sources:
            return False
        return not any(handle.in_flight for handle in self._workers.handles)

    def _take_waiting(self) -> list[Task]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _cancel_waiting(self) -> None:
        while self._sources:
            self._sources.popleft().abandon()
        for task in self._take_waiting():
            self.functions.release(task.remote)
            if task.future.cancel():
                task.begin()  # notifies those who wait
            elif task.is_started:
                self._fail(
                    task,
                    BrokenPoolError(
                        f"{task.label}: the pool was shut down before it could be repeated; submit it to another"
                    ),
                )

    # ------------------------------------------------------------ feeding

    def _feed(self) -> None:
        """Start workers as needed, and give each its tasks."""
        self._draw()
        if not self._waiting:
            return
        self._start_workers()
        ready = [handle for handle in self._workers.handles if handle.takes_tasks]
        if not ready:
            return
        # An earlier call may wait for a single call, so a single call never queues behind a long one.
        is_chunk = self._waiting[0].mode != worker.Mode.CALL
        num_waiting = len(self._waiting) / len(self._workers.handles) if is_chunk else 0
        depth = 1 if self._options.max_tasks else prefetch_depth(self._cost, num_waiting)
        ready.sort(key=lambda handle: len(handle.in_flight))
        share = max(1, min(depth, -(-len(self._waiting) // len(ready))))
        # Deep queues are refilled when half empty: one write for many tasks.
        refilled = [handle for handle in ready if len(handle.in_flight) <= share // 2]
        self._deal([handle for handle in refilled if not handle.is_laden], share)

    def _draw(self) -> None:
        """Draw from the open maps, in turn, enough tasks to keep the workers busy until the next pass."""
        while self._sources:
            # By the map's own cost, not that of earlier tasks. While it is unknown, each worker gets one item: more
            # of these would take an eighth of the time of a map of 2,000 trivial calls.
            cost = self._sources[0].task_cost()
            ahead = 1 if cost is None else prefetch_depth(cost) + 2
            wanted = self._options.max_workers * ahead - len(self._waiting)
            if wanted <= 0:
                return
            tasks = self._sources[0].draw(wanted if len(self._sources) == 1 else 1)
            if tasks:
                self._sources.rotate(-1)
            else:
                self._sources.popleft()
            with self._lock:
                self._waiting.extend(tasks)

    def _deal(self, handles: Sequence[WorkerHandle], depth: int) -> None:
        """Give tasks to each worker in turn; chunks of a map get smaller towards its end."""
        takers = handles
        while takers and self._waiting:
            for handle in takers:
                if self._waiting and not handle.num_taken_back:
                    self._give(handle, self._waiting.popleft())  # only this thread takes from it
            takers = [
                handle
                for handle in takers
                if len(handle.in_flight) < depth and not (handle.is_laden or handle.num_taken_back)
            ]
        for handle in handles:
            self._flush(handle)

    def _flush(self, handle: WorkerHandle) -> None:
        with self._lock:
            handle.grant_claims()
        self._workers.flush(handle)

    def _give(self, handle: WorkerHandle, task: Task) -> None:
        """Send a task unless it is cancelled, after any of its functions that the worker lacks.

        Its arguments are pickled only now: a waiting task costs nothing but references. No lock is held meanwhile,
        since an object may pickle itself under its own lock, under which another thread submits.
        """
        if task.future.cancelled():
            task.begin()  # notifies those who wait
            self.functions.release(task.remote)
            return
        try:
            task.pack(self.functions)
            for remote in (*task.needs, task.remote):
                if not (remote.is_inherited and handle.is_fork) and remote.number not in handle.known_functions:
                    handle.channel.post(Request.FUNCTION, *remote.frame())
                    handle.known_functions.add(remote.number)
        except BaseException as exc:  # noqa: BLE001 -- whatever a user's `__reduce__` raises
            self._fail_unsent(task, exc)
            return
        with self._lock:
            if handle.num_taken_back:  # another thread has done that just now; see `Claims`
                self._waiting.appendleft(task)
                return
            if task.begin():
                handle.post(task)
        if not task.is_started:
            self.functions.release(task.remote)
        elif len(task.payload) > _LARGE_BYTES:
            self._flush(handle)  # before the next one is pickled

    def _fail_unsent(self, task: Task, error: BaseException) -> None:
        if task.begin() and task.count > 1:  # the other items of the chunk may be sendable
            self._requeue(split(task, self.functions))
            return
        self.functions.release(task.remote)
        if task.is_started:
            self._fail(task, error)

    def _start_workers(self) -> None:
        handles, user_objects = self._workers.handles, self._held
        assert user_objects is not None  # something waits
        starting = sum(not handle.is_ready for handle in handles)
        idle = sum(handle.takes_tasks and not handle.in_flight for handle in handles)
        for _ in range(min(len(self._waiting) - idle - starting, self._workers.num_free_slots)):
            try:
                self._workers.start_worker(self._waiting[0].remote, user_objects)
            except (OSError, EOFError) as exc:
                if not handles:
                    self._count_startup_death(describe_start_error(exc))
                elif not self._workers.continues_with_fewer(exc):
                    self._options.logger.warning("a worker could not be started: %s", describe_start_error(exc))
                return

    def _count_startup_death(self, cause: str) -> None:
        self._startup_deaths += 1
        if self._startup_deaths >= self._max_startup_deaths:
            self._break(f"{count_of(self._startup_deaths, 'worker')} in a row ended while they started", cause)

    def _send_forgotten(self) -> None:
        """Tell workers to drop unused callables."""
        while self.functions.forgotten:
            number = self.functions.forgotten.popleft()
            for handle in self._workers.handles:
                if number in handle.known_functions or self._options.start_method == "fork":
                    handle.known_functions.discard(number)
                    handle.channel.post(Request.FORGET, worker.FUNCTION.pack(number))
                    self._workers.flush(handle)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        """Sleep until an event, and handle it."""
        if self._workers.handles and all(len(handle.in_flight) > _DEEP for handle in self._workers.handles):
            time.sleep(_NAP_S)  # many answers then arrive together; no worker runs out of work meanwhile
        self._is_asleep = True
        self._is_saturated = bool(self._waiting) and not self._workers.num_free_slots
        timeout = 0.0 if self._has_work() else self._seconds_to_sleep()
        touched = self._workers.wait(timeout)
        self._is_asleep = False
        for handle in touched:
            self._handle_events(handle)

    def _seconds_to_sleep(self) -> float | None:
        times = [self._workers.seconds_to_next_deadline(), *self._blocked_workers().values()]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _blocked_workers(self) -> dict[WorkerHandle, float]:
        """Return the workers whose tasks wait while others are idle, with the seconds until these are taken back."""
        handles = self._workers.handles
        is_anyone_free = self._workers.num_free_slots or not all(handle.in_flight for handle in handles)
        if self._waiting or self._sources or not is_anyone_free:
            return {}
        due = time.monotonic() - PREFETCH_COST_S
        behind = [handle for handle in handles if len(handle.in_flight) > 1 and not handle.num_taken_back]
        return {handle: max(0.0, handle.head_since - due) for handle in behind}

    def _rebalance(self) -> None:
        """Move tasks that wait behind a long task, or behind one that depends on them, to a free worker."""
        for handle, seconds in self._blocked_workers().items():
            if not seconds:
                with self._lock:
                    self._requeue(handle.take_back())

    def _has_work(self) -> bool:
        """Return True if work has arrived since the last pass: nothing wakes this thread until `_is_asleep` is set."""
        if self.functions.forgotten or (self._is_shutting_down and self._has_finished()):
            return True
        if not self._waiting and not self._sources:
            return False
        if not self._workers.handles:
            return True
        return any(handle.takes_tasks and not handle.in_flight for handle in self._workers.handles)

    def _handle_events(self, handle: WorkerHandle) -> None:
        self._workers.flush(handle)
        # Its end was noticed before this read: everything it wrote has arrived, and fits into one `receive`.
        frames, at_end = handle.channel.receive()
        for kind, data in frames:
            self._handle_message(handle, kind, data)
        if handle.has_ended:
            self._reap(handle)
        elif at_end:  # it closed its socket or is about to end: send no more tasks
            handle.has_hung_up = True
            handle.kill()

    # ------------------------------------------------------------ messages of workers

    def _handle_message(self, handle: WorkerHandle, kind: int, data: bytes) -> None:
        if kind in (Reply.DONE, Reply.FAILED, Reply.UNREAD):
            if handle.in_flight:  # else settled by a shutdown that kills
                self._take_answer(handle, kind, data)
        elif kind == Reply.LOG:
            handle.last_lines.append(self._options.take_record(data))
        elif kind == Reply.READY:
            handle.is_ready = True
            handle.sample_memory()  # it may not live until the next sampling
            self._startup_deaths = 0
            self._max_startup_deaths = _MAX_LATER_STARTUP_DEATHS
        elif kind == Reply.RETURNED:
            with self._lock:
                self._requeue([handle.pop_head()])
        elif kind == Reply.PASSED_OVER:
            with self._lock:
                handle.num_taken_back -= 1
        elif kind in (Reply.RETIRED, Reply.HELD_UP):
            self._note_leaving(handle, kind)
        elif kind == Reply.BY_VALUE:
            self._resend_by_value(handle, data)
        elif kind == Reply.BROKEN:
            handle.is_leaving = True
            self._break("the initializer of a worker failed", data.decode())

    def _note_leaving(self, handle: WorkerHandle, kind: int) -> None:
        if kind == Reply.HELD_UP:
            handle.hold_up()
        else:
            handle.leave()  # what it has not answered is not begun
            with self._lock:
                self._requeue(handle.pop_all())

    def _take_answer(self, handle: WorkerHandle, kind: int, data: bytes) -> None:
        _, busy_s, peak, packed = worker.unpack_outcome(data)
        with self._lock:
            task = handle.pop_head()
        if kind == Reply.UNREAD and task.count > 1:
            self._requeue(split(task, self.functions))
            return
        handle.count(task.count, busy_s, peak)
        # Falls slowly, rises immediately: no task should wait behind one that turns out to be long.
        self._cost = busy_s if self._cost is None else max(busy_s, 0.9 * self._cost + 0.1 * busy_s)
        task.busy_s = busy_s
        if task.stream is not None:
            task.stream.learn(task, busy_s, len(packed))
        self._answers.append((task, kind, packed, handle.pid))

    def _settle_answers(self) -> None:
        """Resolve the futures of the answered tasks."""
        while self._answers:
            task, kind, packed, pid = self._answers.popleft()
            self.functions.release(task.remote)
            try:
                self._settle(task, kind, packed, pid)
            except BaseException as exc:  # noqa: BLE001 -- user code that runs on arrival may raise anything
                self._fail(task, result_error(task, exc))

    def _settle(self, task: Task, kind: int, packed: memoryview, pid: int) -> None:
        if kind != Reply.DONE:
            self._fail(task, unpack_error(packed))
            return
        is_call = task.mode == worker.Mode.CALL
        value = pickling.loads_data(packed) if is_call else unpack_results(task, packed, pid)
        task.drop_arguments()
        self._num_done += task.count
        with suppress(InvalidStateError):
            task.future.set_result(value)

    def _fail(self, task: Task, error: BaseException) -> None:
        self._num_failed += task.count
        task.drop_arguments()
        with suppress(InvalidStateError):
            task.future.set_exception(error)

    def _resend_by_value(self, handle: WorkerHandle, data: bytes) -> None:
        number = worker.FUNCTION.unpack_from(data)[0]
        module = data[worker.FUNCTION.size :].decode()
        handle.known_functions.discard(number)
        functions = (remote for task in handle.in_flight.copy() for remote in (*task.needs, task.remote))
        remote = next((remote for remote in functions if remote.number == number), None)
        if remote is not None:
            self._options.logger.debug(
                "%s: %s travels by value, since a worker could not import it", remote.label, module
            )
            remote.send_by_value(module)

    def _requeue(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            for task in tasks:
                task.take_back()
            self._waiting.extendleft(reversed(tasks))

    # ------------------------------------------------------------ deaths of workers

    def _reap(self, handle: WorkerHandle) -> None:
        """Handle a worker that has ended: blame, requeue, count."""
        with self._lock:
            lost = handle.pop_all()
        worker_exit = self._workers.reap(handle)
        if lost:
            self._apply_blame(lost, worker_exit, has_timed_out=handle.has_timed_out)
        if not handle.is_ready and not handle.is_leaving and not self._kills:
            self._count_startup_death(worker_exit.describe())

    def _apply_blame(self, lost: list[Task], worker_exit: WorkerExit, *, has_timed_out: bool) -> None:
        decision = blame(
            lost,
            worker_exit,
            self.functions,
            timeout_s=self._options.task_timeout_s if has_timed_out else None,
            max_retries=self._options.max_retries,
        )
        if decision.failed is not None and decision.error is not None:
            self.functions.release(decision.failed.remote)
            self._fail(decision.failed, decision.error)
        if decision.warning is not None:
            self._options.logger.warning("%s", decision.warning)
        self._requeue(decision.again)

    def _break(self, what: str, details: str) -> None:
        if self.broken is None:
            self.broken = BrokenPoolError(f"{what}: {details}")

    def _settle_all(self) -> None:
        """Resolve all remaining futures, with the cause if the pool broke."""
        with self._lock:
            self._is_over = True
            self._sources.clear()  # the thread that takes their results submits the rest, and gets the error
            self.recall(lambda _: True)
            under_way = [task for handle in self._workers.handles for task in handle.pop_all()]
        if self.broken is not None:
            under_way += self._take_waiting()
        self._give_up(under_way)
        self._cancel_waiting()

    def _give_up(self, tasks: Sequence[Task]) -> None:
        reason = self.broken or BrokenPoolError(
            "the pool was shut down before the task ended; wait for its future before shutdown"
        )
        for task in tasks:
            self.functions.release(task.remote)
            self._fail(task, reason)
