"""The workers of one pool: started, waited for, buried, all by the dispatcher's thread except where it says so."""

from __future__ import annotations

import gc
import multiprocessing
import os
import selectors
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datamat.errors import UnpicklableError
from datamat.parallel import byvalue, logs, namespaces, pickling, worker
from datamat.parallel.channel import close_in_forks
from datamat.parallel.contexts import ForkPopen, SpawnPopen, current_umask, interrupts_held
from datamat.parallel.handle import LAST_WORDS_S, Handle, WorkerStats
from datamat.parallel.servers import Server, shared_server
from datamat.parallel.worker import Request

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence

    from datamat.parallel.failures import Autopsy
    from datamat.parallel.tasks import Code

__all__ = ["Crew", "PoolOptions"]

_SAMPLE_S = 0.5


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


class Crew:
    """Starts workers, waits for any of them, and knows what each has done."""

    def __init__(self, options: PoolOptions) -> None:
        self.handles: list[Handle] = []
        self._options = options
        self._past: list[WorkerStats] = []
        self._slots = list(range(options.max_workers))[::-1]
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._server: Server | None = None
        self._launcher: Callable[[Any], Any] | None = None
        self._initializer: bytes | int | None = None
        self._kept: list[Any] = []
        self._next_sample = 0.0
        self._is_starting = False
        self._is_closed = False
        self._has_frozen = False
        close_in_forks(self)

    # ------------------------------------------------------------ for any thread

    def prepare(self, first: Code) -> None:
        """Make the source of the workers; where that is a fork, it is of the calling thread, and inherits `first`."""
        if self._options.start_method == "fork":
            self._fork_workers(first)
        else:
            self._prepare_launcher(first.modules() if self._options.start_method == "forkserver" else ())

    def _fork_workers(self, first: Code) -> None:
        initializer = self._options.initializer
        around = byvalue.namespaces_around([first.function, initializer and initializer[0]])
        for held in around.values():
            byvalue.adopt_classes(list(held.values()))
        endings = [first.inherit()]
        if initializer is not None:
            self._initializer = -first.number  # no number of a code, and no other pool's
            endings.append(worker.bequeath(self._initializer, initializer, []))
        end_bequest, self._kept = namespaces.bequeath_globals(around)
        endings.append(end_bequest)
        try:
            # A collection writes into the header of every object it looks at: here and in the workers, it would copy
            # all pages that they share. What is there now is left out of collections while the pool lives.
            if not gc.get_freeze_count():
                gc.freeze()
                self._has_frozen = True
            with interrupts_held():
                while self._slots:
                    self._start(ForkPopen)
        except BaseException:  # an interrupt: workers would wait for tasks, and the program's end for the workers
            self.end(self._bury_ended, abruptly=True)
            raise
        finally:
            for end in endings:
                end()

    def _prepare_launcher(self, modules: Sequence[str]) -> None:
        options = self._options
        if options.initializer is not None:
            self._initializer = pickling.dumps_code(options.initializer).stream
        if options.start_method == "spawn":
            self._launcher = SpawnPopen
        else:
            self._server = shared_server((worker.__name__, *options.preload, *modules), options.num_threads)
            self._launcher = self._server.launch

    def wake(self) -> None:
        """End `wait` at once."""
        with suppress(OSError):  # full: it ends anyway; closed: nobody waits
            os.write(self._wake_w, b"x")

    def interrupt_start(self) -> None:
        """Do not wait for a server that is still importing."""
        if self._is_starting and self._server is not None:
            self._server.kill()

    def stats(self) -> tuple[WorkerStats, ...]:
        """Return what every worker so far has done."""
        return (*self._past, *(handle.stats() for handle in list(self.handles)))

    # ------------------------------------------------------------ life

    @property
    def num_free_slots(self) -> int:
        """How many more workers there may be."""
        return len(self._slots)

    def start_worker(self, first: Code) -> None:
        """Start one worker; where the first ones were forked, one that takes the place of another comes from a server.

        Args:
            first: what it will be asked to do first.

        Raises:
            OSError, EOFError: the system, or the server, did not give one.
        """
        if self._launcher is None:
            modules: Sequence[str] = ()
            with suppress(UnpicklableError):  # told to the one who waits for it, when it is to be sent
                modules = first.modules()
            self._prepare_launcher(modules)
        assert self._launcher is not None
        self._start(self._launcher)

    def _start(self, launcher: Callable[[Any], Any]) -> None:
        slot = self._slots.pop()
        self._is_starting = True
        try:
            handle = Handle(self._worker_config(slot, launcher), slot, launcher)
        except BaseException:
            self._slots.append(slot)
            raise
        finally:
            self._is_starting = False
        self.handles.append(handle)
        self._selector.register(handle.channel, selectors.EVENT_READ, handle)
        self._selector.register(handle.sentinel, selectors.EVENT_READ, handle)

    def _worker_config(self, slot: int, launcher: Callable[[Any], Any]) -> worker.WorkerConfig:
        options = self._options
        inherits = launcher in {ForkPopen, SpawnPopen}
        return worker.WorkerConfig(
            name=f"datamat-worker-{slot}",
            mask=options.masks[slot],
            num_threads=options.num_threads,
            logging=logs.capture_state(),
            initializer=self._initializer,
            environment=None if inherits else dict(os.environ),
            umask=None if inherits else current_umask(),
            max_tasks=options.max_tasks,
            authkey=bytes(multiprocessing.current_process().authkey),
        )

    def wait(self, timeout: float | None) -> Sequence[Handle]:
        """Wait until a worker has something to say, takes data again or ends, or until `wake`; return those workers."""
        # All descriptors are resolved to workers before any of them is closed: a number may be used again.
        touched: dict[int, Handle] = {}
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._wake_r, 4096)
            else:
                touched[id(key.data)] = key.data
                key.data.has_ended |= key.fd == key.data.sentinel
        return list(touched.values())

    def seconds_to_next_deadline(self) -> float | None:
        """Return when `keep_time` has something to do next; None if only an event can bring that about."""
        times = [handle.kill_at for handle in self.handles if handle.kill_at is not None]
        busy = [handle for handle in self.handles if handle.in_flight]
        times += [deadline for handle in busy if (deadline := self._deadline(handle)) is not None]
        if busy:
            times.append(self._next_sample)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _deadline(self, handle: Handle) -> float | None:
        """Return when the task under way has run too long, None if it may run for ever or has been dealt with."""
        if self._options.task_timeout_s is None or not handle.in_flight or handle.has_timed_out:
            return None
        return handle.head_since + self._options.task_timeout_s * handle.in_flight[0].count

    def keep_time(self, now: float) -> None:
        """Do what is due: kill tasks that run too long, sample memory."""
        for handle in self.handles:
            deadline = self._deadline(handle)
            if handle.kill_at is not None and now >= handle.kill_at:
                handle.kill_at = None
                handle.kill()
            elif deadline is not None and now >= deadline:
                handle.has_timed_out = True
                handle.kill_with_stack()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_S
            for handle in self.handles:
                handle.sample_memory()

    def flush(self, handle: Handle) -> None:
        """Send what waits for a worker; come back when its socket takes the rest."""
        handle.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if handle.channel.is_backed_up else 0)
        if self._selector.get_key(handle.channel).events != events:
            self._selector.modify(handle.channel, events, handle)

    def bury(self, handle: Handle) -> Autopsy:
        """Remove a worker that has ended."""
        self._selector.unregister(handle.channel)
        self._selector.unregister(handle.sentinel)
        autopsy = handle.bury()
        self.handles.remove(handle)
        self._slots.append(handle.slot)
        self._past.append(handle.stats())
        return autopsy

    def _bury_ended(self, handle: Handle) -> None:
        if handle.has_ended:
            self.bury(handle)

    def end(self, attend: Callable[[Handle], None], *, abruptly: bool) -> None:
        """End all workers: on request, or by SIGKILL where that is asked for or the request is not heard."""
        for handle in self.handles:
            if abruptly:
                handle.kill()
            else:
                handle.channel.send(Request.QUIT)
        deadline = time.monotonic() + LAST_WORDS_S
        while self.handles:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                for handle in self.handles:
                    handle.kill()
                remaining = deadline = LAST_WORDS_S
                deadline += time.monotonic()
            for handle in self.wait(remaining):
                attend(handle)
        if self._has_frozen:
            gc.unfreeze()
        self._kept.clear()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors; also called in a fork of the caller, where they belong to nobody."""
        if not self._is_closed:
            self._is_closed = True
            self._selector.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
