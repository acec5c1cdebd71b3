"""Run calls on other engines instead of our own workers: Dask, Ray, any `concurrent.futures.Executor`.

    driver   EngineExecutor.submit ── SentFunction, arguments ──> engine ──> worker ──> child: compare, rebuild, call
                      <── ReturnedCall: result or error, log records ──────────┴──────────┘

The engine decides where and when a call runs, and repeats it if a worker is lost. The rest is the same for all engines:
the function is pickled by the rules of `pickling` and rebuilt once in each child; its log records come back with the
result; errors of the engine become `CallLost`. Each engine is a class of some thirty lines below, which imports its
package on first use.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib
import os
import pathlib
import platform
import socket
import sys
import threading
import uuid
import weakref
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from datamat.parallel import logs, pickling
from datamat.parallel.errors import OWN, MissingDependencyError, OptionError, ParallelError, WorkerDied
from datamat.parallel.executor import PathosExecutor
from datamat.parallel.frozen import frozen
from datamat.parallel.process_role import is_worker
from datamat.parallel.processes import is_frozen
from datamat.parallel.tasks import SLICE_S, CallLost, identity_of
from datamat.parallel.worker import pack_error
from datamat.parallel.workers import unpack_error

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from datamat.parallel.workers import PoolOptions

_IDLE_S = 60.0  # without a call, until a child process ends
_MOST_OTHERS = 2  # idle children that a worker keeps for jobs other than that of its last call
_LARGE = 64 << 10  # bytes of a function from which Dask sends it once per worker instead of with each call
_WANTED = (
    "a dask.distributed.Client or the address of a Dask scheduler ('tcp://host:8786'), 'ray' or a Ray address "
    "('ray://host:10001'), a concurrent.futures.Executor, or None for datamat's own workers"
)
_DASK_SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")


# ---------------------------------------------------------------- a call in a worker of an engine


@functools.cache
def _here() -> tuple[str, str]:
    """Return the versions of Python and datamat here: code by value needs the same minor version of Python."""
    source = hashlib.blake2b(digest_size=4)
    package = sys.modules[__name__.partition(".")[0]]  # datamat: all of its code decides the content of records
    for path in sorted(pathlib.Path(OWN).rglob("*.py")):
        source.update(path.read_bytes())
    python = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    return python, f"{package.__name__} {getattr(package, '__version__', '')} (source {source.hexdigest()})"


@functools.cache
def _this_process(_: int) -> str:
    """Return a name of this process (its id is the argument) that is unique across hosts."""
    return uuid.uuid4().hex


class SentFunction:
    """A function on its way to the workers of an engine; it may be forked together with its contents.

    Args:
        function: the function to call.
        job: unique name of what its calls belong to.
        preload: modules that processes for its calls import once.

    Attributes:
        is_called_here: whether an executor has called it immediately, in the submitting thread.
    """

    def __init__(self, function: Callable[..., Any], job: str, preload: Sequence[str] = ()) -> None:
        self.function = function
        self.is_called_here = False
        self._job = job
        self._preload = tuple(preload)
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()

    def __call__(self, *args: Any) -> Any:
        """Make the call here if this is the submitting thread, which then waits for it; otherwise in a child."""
        if threading.get_ident() != self._thread:
            return self.arrival(*args)
        self.is_called_here = True
        return self.function(*args)

    @property
    def arrival(self) -> ArrivedFunction:
        """What a worker gets, with the context variables of the submitting thread: pools pickle in another one."""
        with _pickling:
            found: ArrivedFunction = self._context.run(getattr, self, "_arrival")
            return found

    @functools.cached_property
    def _arrival(self) -> ArrivedFunction:
        return ArrivedFunction(self.function, self._job, self._preload)

    def __reduce__(self) -> Any:
        return _as_it_is, (self.arrival,)


_pickling = threading.Lock()  # several threads of a pool may ask for one arrival


def _as_it_is(value: Any) -> Any:
    return value


@frozen()
class ReturnedCall:
    """The reply of a worker of an engine.

    Attributes:
        has_failed: whether `packed` is an error.
        packed: result or error.
        log_records: log records of the call.
    """

    has_failed: bool
    packed: bytes
    log_records: tuple[bytes, ...] = ()

    def open(self) -> Any:
        """Replay the log records of the call, and return its result or raise its error."""
        for record in self.log_records:
            logs.replay(record)
        if self.has_failed:
            raise unpack_error(self.packed)
        return pickling.loads_data(self.packed)


class ArrivedFunction:
    """A function in a worker of an engine; its calls run in a child process, which rebuilds it at the first call.

    Args:
        function: the function, in the sending process.
        job: unique name of what its calls belong to.
        preload: modules that processes for its calls import once.

    Attributes:
        token: unique name of the function.
        job: unique name of the job that it belongs to; a child makes the calls of one job.
        levels: log levels of the sending process.
        preload: modules that a server of children imports once.
    """

    def __init__(self, function: Callable[..., Any], job: str, preload: Sequence[str]) -> None:
        pickled = pickling.dumps_code(function)
        self.__qualname__ = logs.label_of(function)  # of an object: its name in messages and log records
        self.token, self.job = uuid.uuid4().hex, job
        self.levels = logs.capture_state()
        self.preload = (__name__, *preload, *pickled.modules)
        self.size = len(pickled.stream) + sum(buffer.raw().nbytes for buffer in pickled.buffers)
        self._stream = pickled.stream
        self._buffers = tuple(bytes(buffer.raw()) for buffer in pickled.buffers)
        self._there = _here()
        self._home = _this_process(os.getpid())

    @property
    def is_at_home(self) -> bool:
        """Whether this is the sending process."""
        return self._home == _this_process(os.getpid())

    def __call__(self, *args: Any) -> ReturnedCall:
        """Make a call: hand it to a child, or run it if this is that child."""
        if is_worker():  # one of datamat's own workers that passes an executor to a run has no children either
            return self._returned(args)
        child = _Child.take(self)
        try:
            return child.call(self, args)
        except BaseException:  # the engine interrupts it
            child.terminate()
            raise
        finally:
            child.rest()

    def _returned(self, args: tuple[Any, ...]) -> ReturnedCall:
        place = f"{socket.gethostname()}, process {os.getpid()}"
        try:
            return ReturnedCall(has_failed=False, packed=pickling.dumps_data(self._function(place)(*args)))
        except BaseException as exc:  # noqa: BLE001 -- raised again by the future of the call
            with contextlib.suppress(Exception):  # a user's exception class may refuse notes
                exc.add_note(f"in a worker on {place}")
            return ReturnedCall(has_failed=True, packed=pack_error(exc))

    def _function(self, place: str) -> Callable[..., Any]:
        function = _rebuilt.get(self.token)
        if function is None:
            self._compare(place)
            try:
                function = pickling.load_code(self._stream, [bytearray(buffer) for buffer in self._buffers])
            except ImportError as exc:
                raise MissingDependencyError(
                    f"the worker on {place} cannot import what the job needs: {exc}; install it there, or have the "
                    "engine send it (Dask: client.upload_file; Ray: runtime_env={'py_modules': [...]})"
                ) from exc
            _rebuilt[self.token] = function
        return function

    def _compare(self, place: str) -> None:
        wrong = [(here, there) for here, there in zip(_here(), self._there, strict=True) if here != there]
        if wrong:
            here, there = (", ".join(side) for side in zip(*wrong, strict=True))
            raise ParallelError(
                f"the worker on {place} has {here}, and the program that called run has {there}; install the same "
                "there, or the shards would mix records of both"
            )


_rebuilt: dict[str, Callable[..., Any]] = {}  # in a child, by token


class _Child(PathosExecutor):
    """A process in which a worker of an engine makes calls of one job, one at a time.

    In the worker itself, other threads (an event loop, further calls) draw from the random generators that samples use,
    and each worker has another hash seed.
    """

    _idle: ClassVar[list[_Child]] = []  # of this process, and those that a fork inherits from its parent

    def __init__(self, first: ArrivedFunction) -> None:
        method = None if is_frozen() else "forkserver"
        super().__init__(1, start_method=method, affinity=None, preload=first.preload)
        self._num_threads = 1  # an engine has a worker for each processor
        self._job = first.job
        self._levels = first.levels
        self._is_at_home = first.is_at_home
        self._known: dict[str, ArrivedFunction] = {}  # with each call comes another copy
        self._records: list[bytes] = []
        _children.add(self)

    @classmethod
    def take(cls, function: ArrivedFunction) -> _Child:
        """Return an unused child."""
        for child in cls._of_this_process():
            if child._job == function.job:
                with contextlib.suppress(ValueError):  # another thread has taken it
                    cls._idle.remove(child)
                    return child
        return cls(function)

    @classmethod
    def _of_this_process(cls) -> list[_Child]:
        return [child for child in cls._idle if child._pid == os.getpid()]

    @classmethod
    def end_job(cls, job: str) -> None:
        """End the children of a job that has no calls left."""
        for child in cls._of_this_process():
            if child._job == job:
                cls._idle.remove(child)
                child.shutdown()

    def rest(self) -> None:
        """Keep the child for the next call; of other jobs, keep only the few used most recently."""
        if not self.is_shut_down:
            self._idle.append(self)
        for child in [child for child in self._of_this_process() if child._job != self._job][:-_MOST_OTHERS]:
            with contextlib.suppress(ValueError):
                self._idle.remove(child)
                child.shutdown(wait=False)

    def call(self, function: ArrivedFunction, args: tuple[Any, ...]) -> ReturnedCall:
        """Make a call."""
        function = self._known.setdefault(function.token, function)
        try:
            future: Future[ReturnedCall] = self.submit(function, *args)
            while not wait([future], SLICE_S).done:  # an interrupt that is not a signal, such as Ray's, wakes no thread
                pass
            returned = future.result()
        except Exception as exc:  # noqa: BLE001 -- raised again by the future of the call
            if not isinstance(exc, WorkerDied):  # after which the next call starts another process
                self.terminate()
            returned = ReturnedCall(has_failed=True, packed=pack_error(exc))
        records, self._records = tuple(self._records), []
        return dataclasses.replace(returned, log_records=records)

    def _options(self) -> PoolOptions:
        return dataclasses.replace(
            super()._options(),
            worker_name=f"{socket.gethostname()}, process {os.getpid()}",
            levels=self._levels,
            take_record=self._take_record,
            idle_s=_IDLE_S,
        )

    def _take_record(self, packed: bytes) -> str:
        if not self._is_at_home:
            self._records.append(packed)
        return logs.replay(packed)  # for the worker's own log


_children: weakref.WeakSet[_Child] = weakref.WeakSet()


def _end_children() -> None:
    """At interpreter exit: an engine does not wait for the calls of a worker that it ends."""
    for child in list(_children):
        if child._pid == os.getpid():
            child.terminate()


threading._register_atexit(_end_children)  # type: ignore[attr-defined]  # before the pools', which wait


# ---------------------------------------------------------------- the driver's side


class Engine(Protocol):
    """The operations that differ between engines.

    Attributes:
        name: its name in messages.
    """

    name: str

    def send(self, call: SentFunction, args: tuple[Any, ...], end: Callable[[Callable[[], Any]], object]) -> Any:
        """Submit a call.

        Args:
            call: the function.
            args: its arguments.
            end: called when the call has ended in any way, with a function that returns its result or raises its
                error; a cancelled call raises `CancelledError`.

        Returns:
            A handle for `cancel`.

        Raises:
            BrokenExecutor, ConnectionError: the engine accepts no more calls.
        """

    def cancel(self, sent: Sequence[Any]) -> None:
        """Cancel, all at once, the calls that have not begun as far as the engine knows; may be repeated."""

    def lacks_workers(self) -> bool:
        """Return True if the engine has no workers, as far as it can tell."""

    def close(self) -> None:
        """Release what `open_engine` has opened."""


class EngineExecutor(Executor):
    """An executor that makes its calls on an engine, and replays their log records here.

    Args:
        engine: the engine.
        preload: modules that processes for its calls import once.
        calls_here: called once if the engine turns out to make calls in this very thread.

    Attributes:
        job: unique name of the job that its calls belong to.
    """

    def __init__(
        self, engine: Engine, preload: Sequence[str] = (), calls_here: Callable[[], object] | None = None
    ) -> None:
        self.job = uuid.uuid4().hex
        self._engine = engine
        self._preload = tuple(preload)
        self._calls_here = calls_here
        self._sent: dict[tuple[int, int], SentFunction] = {}
        self._has_warned = False

    @property
    def name(self) -> str:
        """Name of the engine in messages."""
        return self._engine.name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call, with arguments by position.

        Raises:
            CallLost: the engine accepts no more calls.
        """
        assert not kwargs, "arguments go by position"
        # It holds `fn`, so that the id is not reused.
        call = self._sent.setdefault(identity_of(fn), SentFunction(fn, self.job, self._preload))
        future = _EngineFuture(self)
        try:
            future.sent = self._engine.send(call, args, future.end)
        except (BrokenExecutor, ConnectionError) as exc:
            raise CallLost(f"{self.name} takes no more calls: {exc}", may_repeat=False) from exc
        if call.is_called_here and self._calls_here is not None:
            self._calls_here()
            self._calls_here = None
        return future

    def cancel(self, futures: Iterable[Future[Any]]) -> None:
        """Cancel the calls of these futures that have not begun as far as the engine knows."""
        asked = [future for future in futures if isinstance(future, _EngineFuture)]
        for future in asked:
            future.is_unwanted = True
        self._engine.cancel([future.sent for future in asked])

    def warn_without_workers(self, logger: logging.Logger) -> None:
        """Warn once if the engine has no workers, as far as it can tell."""
        if not self._has_warned and self._engine.lacks_workers():
            self._has_warned = True
            logger.warning("%s has no workers: start some, or stop with Ctrl-C", self.name)


class _EngineFuture(Future[Any]):
    """A call on an engine.

    Attributes:
        sent: handle for the engine's `cancel`.
        is_unwanted: whether its cancellation was requested.
    """

    def __init__(self, executor: EngineExecutor) -> None:
        super().__init__()
        self.sent: Any = None
        self.is_unwanted = False
        self._executor = executor

    def cancel(self) -> bool:
        """Cancel the call if it has not begun as far as the engine knows."""
        self._executor.cancel([self])
        return self.done()

    def end(self, result: Callable[[], Any]) -> None:
        """Resolve the future with the outcome of the call, unless it was cancelled."""
        try:
            value = result()
            self.set_result(value.open() if isinstance(value, ReturnedCall) else value)
        except CancelledError as exc:
            why = f": {exc}" if str(exc) else ""  # the standard library's has no text
            self._lose(CallLost(f"the engine has cancelled it{why}", may_repeat=True), exc)
        except CallLost as exc:
            self._lose(exc, exc.__cause__)
        except BaseException as exc:  # noqa: BLE001 -- whatever the call raised
            self.set_exception(exc)

    def _lose(self, lost: CallLost, cause: BaseException | None) -> None:
        if self.is_unwanted:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            lost.__cause__ = cause
            self.set_exception(lost)


class _Futures:
    """Any `concurrent.futures.Executor`: of the standard library, mpi4py, loky, ..."""

    def __init__(self, executor: Executor) -> None:
        self.name = type(executor).__qualname__
        self._executor = executor

    def send(self, call: SentFunction, args: tuple[Any, ...], end: Callable[[Callable[[], Any]], object]) -> Any:
        try:
            future = self._executor.submit(call, *args)
        except RuntimeError as exc:
            if isinstance(exc, BrokenExecutor):
                raise
            raise OptionError(
                f"executor is a {self.name} that takes no calls: {exc}; pass one that is open, within its with block"
            ) from exc
        future.add_done_callback(lambda done: end(functools.partial(self._result, done)))
        return future

    def cancel(self, sent: Sequence[Any]) -> None:
        for future in sent:
            future.cancel()

    def _result(self, done: Future[Any]) -> Any:
        try:
            return done.result()
        except BrokenExecutor as exc:  # raised by all calls of the pool, whichever of them ended its process
            why = str(exc).rstrip(".")
            raise CallLost(f"the {self.name} broke, at this call or at another one: {why}", may_repeat=False) from exc

    def lacks_workers(self) -> bool:
        return False  # it cannot be asked

    def close(self) -> None:
        """Do nothing: the executor belongs to the caller."""


class _Dask:
    """A cluster of Dask."""

    def __init__(self, client: Any) -> None:
        self._is_mine = isinstance(client, str)
        if isinstance(client, str):
            distributed = _imported("distributed", "dask", f"executor={client!r}")
            with _reached(client):
                client = distributed.Client(client, set_as_default=False)
        self._client = client
        self._large: dict[str, Any] = {}  # functions that the workers have
        self.name = f"Dask at {client.scheduler.address}"

    def send(self, call: SentFunction, args: tuple[Any, ...], end: Callable[[Callable[[], Any]], object]) -> Any:
        arrival = call.arrival
        name = f"datamat-{getattr(call.function, '__name__', 'call')}-{uuid.uuid4().hex}"
        try:
            sent = self._held(arrival) if arrival.size > _LARGE else arrival
            future = self._client.submit(_call, sent, *args, key=name, pure=False)
        except Exception as exc:
            if self._is_open():
                raise
            raise ConnectionError(str(exc)) from exc
        if not self._is_open():  # a client that is closing accepts calls and never reports on them
            raise ConnectionError("its client is closed")
        future.add_done_callback(lambda done: end(functools.partial(self._result, done)))
        return future

    def _is_open(self) -> bool:
        return self._client.status in ("running", "connecting")

    def _held(self, arrival: ArrivedFunction) -> Any:
        """Return a large function as the result of a call: Dask computes it on a worker, and again if it is lost."""
        known = self._large.get(arrival.token)
        if known is None or known.status not in ("pending", "finished"):
            key = f"datamat-function-{uuid.uuid4().hex}"
            known = self._large[arrival.token] = self._client.submit(_as_it_is, arrival, key=key, pure=False)
        return known

    def _result(self, future: Any) -> Any:
        if future.status == "error":
            error = future.exception()
            if type(error).__name__ == "KilledWorker":
                raise CallLost(f"{self.name}: {error}", may_repeat=False) from error
            raise error
        try:
            if future.status == "finished":
                return future.result()
        except OSError as exc:  # the worker that holds the result, or the scheduler, is gone
            raise CallLost(f"{self.name} has lost its result: {exc}", may_repeat=True) from exc
        raise CallLost(f"{self.name} was restarted, or has lost it", may_repeat=True)

    def cancel(self, sent: Sequence[Any]) -> None:
        """Cancel calls, except those that workers have begun: Dask cannot stop these, and would only forget them."""
        at_work: set[str] = set()
        with contextlib.suppress(Exception):  # a scheduler that is gone runs nothing
            at_work.update(*self._client.processing().values())
        with contextlib.suppress(Exception):  # a closed client has released all calls
            self._client.cancel([future for future in sent if future.key not in at_work])

    def lacks_workers(self) -> bool:
        with contextlib.suppress(OSError):  # a scheduler that does not answer
            return not self._client.nthreads()
        return False

    def close(self) -> None:
        self._large.clear()
        if self._is_mine:
            self._client.close()


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _Ray:
    """A cluster of Ray.

    Args:
        address: address of the cluster; None takes the one that this process is connected to, or else the one that
            `ray.init` finds or starts.
    """

    def __init__(self, address: str | None) -> None:
        ray = self._ray = _imported("ray", "ray", f"executor={address or 'ray'!r}")
        self._is_mine = not ray.is_initialized()
        if self._is_mine:
            with _reached(address or "ray"):
                ray.init(address, log_to_driver=False)
        elif address is not None:
            raise OptionError(
                f"executor is {address!r}, and this process is connected to a Ray already; pass executor='ray' to take "
                "that one, or call ray.shutdown() before"
            )
        self._remote = ray.remote(_call).options(name="datamat", num_cpus=1)
        self._stored: dict[str, Any] = {}
        self.name = f"Ray at {address or ray.get_runtime_context().gcs_address}"

    def send(self, call: SentFunction, args: tuple[Any, ...], end: Callable[[Callable[[], Any]], object]) -> Any:
        arrival = call.arrival
        if arrival.token not in self._stored:
            self._stored[arrival.token] = self._ray.put(arrival)
        reference = self._remote.remote(self._stored[arrival.token], *args)
        reference.future().add_done_callback(lambda done: end(functools.partial(self._result, done)))
        return functools.cache(functools.partial(self._ray.cancel, reference))  # a second one would disturb its end

    def _result(self, done: Future[Any]) -> Any:
        errors = self._ray.exceptions
        try:
            return done.result()
        except errors.TaskCancelledError as exc:
            raise CancelledError(str(exc)) from exc
        except errors.RayTaskError:  # raised by the called function
            raise
        except (errors.RayError, ConnectionError) as exc:  # a worker, a node or the server for clients is gone, ...
            raise CallLost(f"{self.name}: {exc}", may_repeat=False) from exc

    def cancel(self, sent: Sequence[Any]) -> None:
        """Cancel calls: a running one ends by KeyboardInterrupt, and so does its future."""
        with contextlib.suppress(ConnectionError):  # a cluster that is gone runs nothing
            for cancel in sent:
                cancel()

    def lacks_workers(self) -> bool:
        with contextlib.suppress(ConnectionError):
            return not self._ray.cluster_resources().get("CPU")
        return False

    def close(self) -> None:
        self._stored.clear()
        if self._is_mine:
            self._ray.shutdown()


@contextlib.contextmanager
def _reached(address: str) -> Iterator[None]:
    """Name the cluster in the error if it does not answer."""
    try:
        yield
    except OSError as exc:
        raise OptionError(
            f"executor is {address!r}, where no cluster answers: {exc}; start it, or correct the address"
        ) from exc


def _imported(name: str, extra: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise MissingDependencyError(
            f"{what} needs the package {name}; install it with: pip install 'datamat[{extra}]'"
        ) from exc


# ---------------------------------------------------------------- which one


def _is_client(given: Any) -> bool:
    distributed = sys.modules.get("distributed")  # the user of a client has imported it
    return distributed is not None and isinstance(given, distributed.Client)


def _is_ray(given: Any) -> bool:
    return given == "ray" or (given is not None and given is sys.modules.get("ray"))


def _refuse_interpreters(given: Any) -> None:
    if any(base.__name__ == "InterpreterPoolExecutor" for base in type(given).__mro__):
        raise OptionError(
            f"executor is a {type(given).__qualname__}: numpy cannot be imported in subinterpreters; pass a "
            "ProcessPoolExecutor, or leave executor out"
        )


def _check_client(client: Any) -> None:
    if client.asynchronous:
        raise OptionError(
            "executor is a Client that was made with asynchronous=True, whose event loop a run would block; pass the "
            "address of its scheduler, and call run in a thread (asyncio.to_thread)"
        )
    if client.scheduler is None or client.status == "closed":
        raise OptionError("executor is a Client that was closed; pass one that is open, within its with block")


def _opener(given: Any) -> Callable[[], Engine]:
    """Return a function that opens an engine; nothing is imported or connected to before it is called.

    Raises:
        OptionError: it is not an engine.
    """
    if _is_ray(given):
        return functools.partial(_Ray, None)
    if _is_client(given):
        _check_client(given)
        return functools.partial(_Dask, given)
    if isinstance(given, Executor):
        _refuse_interpreters(given)
        return functools.partial(_Futures, given)
    if isinstance(given, str) and given.startswith(("ray://", *_DASK_SCHEMES)):
        return functools.partial(_Ray if given.startswith("ray://") else _Dask, given)
    if isinstance(given, type) and issubclass(given, Executor):
        raise OptionError(f"executor is the class {given.__qualname__}; pass one of its objects, which you close")
    raise OptionError(f"executor is {given!r}; want {_WANTED}")


def check_engine(given: Any) -> None:
    """Raise `OptionError` unless it is None or an engine; nothing is imported or connected to."""
    if given is not None:
        _opener(given)


@contextlib.contextmanager
def open_engine(
    given: Any, preload: Sequence[str] = (), calls_here: Callable[[], object] | None = None
) -> Iterator[Executor]:
    """Yield an executor for a user's `executor=`; whatever this opens is closed after the block.

    Args:
        given: a `dask.distributed.Client` or its scheduler's address, "ray" or a Ray address, or any
            `concurrent.futures.Executor`.
        preload: modules that processes for the calls import once.
        calls_here: called once if the executor turns out to make calls in this very thread.

    Raises:
        OptionError: it is none of these.
        MissingDependencyError: the package of the engine is not installed.
    """
    if isinstance(given, PathosExecutor):
        yield given
        return
    engine = _opener(given)()
    executor = EngineExecutor(engine, preload, calls_here)
    try:
        yield executor
    finally:
        engine.close()
        _Child.end_job(executor.job)
