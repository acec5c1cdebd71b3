"""`PathosPool`: the same core behind pathos's interface, for code written for pathos pools."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, ClassVar

from pathos.abstract_launcher import AbstractWorkerPool
from pathos.helpers import mp

from datamat.parallel.affinity import physical_cores
from datamat.parallel.errors import OptionError
from datamat.parallel.executor import PathosExecutor, run_now


class AsyncResult:
    """The result of `amap` and `apipe`, to be fetched later, as in `multiprocessing.pool`.

    Args:
        futures: all must be done for the result to be ready.
        collect: returns the result once they are.
    """

    def __init__(self, futures: list[Future[Any]], collect: Callable[[], Any]) -> None:
        self._futures = futures
        self._collect = collect
        self._outcome: Future[Any] | None = None

    def ready(self) -> bool:
        """Return True if the result is ready."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, for at most `timeout` seconds."""
        wait_for(self._futures, timeout)

    def successful(self) -> bool:
        """Return True if the calls succeeded.

        Raises:
            ValueError: the result is not ready.
        """
        if not self.ready():
            raise ValueError("the result is not ready; call wait() or get() first")
        return self._settled().exception() is None

    def get(self, timeout: float | None = None) -> Any:
        """Return the result, or raise the error of the call.

        Raises:
            multiprocess.TimeoutError: the result is not ready after `timeout` seconds.
        """
        self.wait(timeout)
        if not self.ready():
            raise mp.TimeoutError
        return self._settled().result()

    def _settled(self) -> Future[Any]:
        if self._outcome is None:
            self._outcome = run_now(self._collect, (), {})
        return self._outcome


class PathosPool(AbstractWorkerPool):  # type: ignore[misc]  # pathos ships no types
    """A pathos pool on `PathosExecutor`: bound methods without a guard, and no hang when a worker dies.

    As in `pathos.multiprocessing.ProcessPool`, pools with the same `id` (by default their number of nodes) share one
    set of workers, which stays until `clear`, or `close` and `join`. One thing differs: for a `chunksize` of 0,
    pathos's `map` and `amap` return a list of None; here it is refused.

    Args:
        nodes: worker processes; also as `ncpus` or `processes`. None takes one per physical core.
        id: name of the set of workers.
        options: further arguments of `PathosExecutor`, such as `affinity`, `initializer` or `max_retries`.

    Example:
        >>> pool = PathosPool(2)
        >>> pool.map(pow, [2, 3], [5, 2])
        [32, 9]
        >>> pool.clear()
    """

    __state__: ClassVar[dict[Hashable, PathosExecutor]] = {}
    _configurations: ClassVar[dict[Hashable, tuple[int, dict[str, Any]]]] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        counts = [*args, *(options.pop(name) for name in ("nodes", "ncpus", "processes") if name in options)]
        if len(counts) > 1:
            raise TypeError("got multiple values for the number of nodes; pass one of nodes, ncpus, processes")
        asked_for = counts[0] if counts else None
        self.__nodes: int = len(physical_cores()) if asked_for is None else asked_for
        name = options.pop("id", None)
        self._id: Hashable = self.__nodes if name is None else name
        self._options = options
        self._serve()

    def _serve(self) -> PathosExecutor:
        """Return the executor of this id; create one if there is none or its options differ."""
        configuration = (self.__nodes, self._options)
        if self._id in self.__state__ and self._configurations[self._id] != configuration:
            self.clear()
        if self._id not in self.__state__:
            self.__state__[self._id] = PathosExecutor(self.__nodes, **self._options)
            self._configurations[self._id] = configuration
        return self.__state__[self._id]

    def _running(self) -> PathosExecutor:
        executor = self._serve()
        if executor.is_shut_down:
            raise ValueError("Pool not running; call restart() to use it again, or clear() to forget it")
        return executor

    def map(self, f: Callable[..., Any], *args: Any, chunksize: int | None = None) -> list[Any]:
        """Return the list of results of `f` over the items of the sequences."""
        return list(self.imap(f, *args, chunksize=chunksize))

    def imap(self, f: Callable[..., Any], *args: Any, chunksize: int | None = None) -> Iterator[Any]:
        """Return an iterator over the results, in order."""
        _require_items("imap", args)
        return self._running().map(f, *args, chunksize=chunksize)

    def uimap(self, f: Callable[..., Any], *args: Any, chunksize: int | None = None) -> Iterator[Any]:
        """Return an iterator over the results, in order of completion."""
        _require_items("uimap", args)
        return self._running().map_unordered(f, *args, chunksize=chunksize)

    def amap(self, f: Callable[..., Any], *args: Any, chunksize: int | None = None) -> AsyncResult:
        """Start a map and return an `AsyncResult` of its list of results."""
        _require_items("amap", args)
        futures, results = self._running().map_all(f, list(zip(*args, strict=False)), chunksize)
        return AsyncResult(futures, lambda: list(results))

    def pipe(self, f: Callable[..., Any], *args: Any, **kwds: Any) -> Any:
        """Return `f(*args, **kwds)`, called in a worker."""
        return self._running().submit(f, *args, **kwds).result()

    def apipe(self, f: Callable[..., Any], *args: Any, **kwds: Any) -> AsyncResult:
        """Start a call and return its `AsyncResult`."""
        future = self._running().submit(f, *args, **kwds)
        return AsyncResult([future], future.result)

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Accept no more work; finish running calls."""
        if self._id in self.__state__:
            self.__state__[self._id].shutdown(wait=False)

    def terminate(self) -> None:
        """End the workers immediately."""
        if self._id in self.__state__:
            self.__state__[self._id].terminate()

    def join(self) -> None:
        """Wait for the workers of a closed or terminated pool to end.

        Raises:
            ValueError: the pool was neither closed nor terminated.
        """
        executor = self.__state__.get(self._id)
        if executor is not None:
            if not executor.is_shut_down:
                raise ValueError("Pool is still running; call close() or terminate() before join()")
            executor.shutdown(wait=True)

    def clear(self) -> None:
        """End the workers of this id and forget them; the next call starts new ones."""
        executor = self.__state__.pop(self._id, None)
        self._configurations.pop(self._id, None)
        if executor is not None:
            executor.shutdown(wait=True)

    def restart(self, force: bool = False) -> None:
        """Make a closed pool usable again; with `force`, also a running one.

        Raises:
            OptionError: it runs, and `force` is not given.
        """
        executor = self.__state__.get(self._id)
        if executor is not None and not executor.is_shut_down and not force:
            raise OptionError("the pool is running; close() it first, or pass force=True")
        self.clear()
        self._serve()

    def __repr__(self) -> str:
        return f"<pool {type(self).__name__}(ncpus={self.ncpus})>"

    @property
    def nodes(self) -> int:
        """Number of worker processes; setting it replaces the workers."""
        return self.__nodes

    @nodes.setter
    def nodes(self, number: int) -> None:
        self.__nodes = number
        self._serve()

    ncpus = nodes


def _require_items(name: str, args: tuple[Any, ...]) -> None:
    if not args:
        raise TypeError(f"{name}() requires at least two arguments: a function and a sequence of items")
