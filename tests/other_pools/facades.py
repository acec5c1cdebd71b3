"""The pool of `multiprocessing` on `PathosExecutor`: as much of its interface as its own tests need."""

import threading

from multiprocess import TimeoutError as PoolTimeoutError

from datamat.parallel import PathosExecutor


class AsyncResult:
    """`multiprocessing.pool.AsyncResult`."""

    def __init__(self, collect, futures, callback=None, error_callback=None):
        self._collect, self._futures = collect, futures
        self._callback, self._error_callback = callback, error_callback
        self._done = threading.Event()
        self._value = self._error = None
        self._left = len(futures)
        for future in futures:
            future.add_done_callback(self._note)
        if not futures:
            self._settle()

    def _note(self, _):
        self._left -= 1
        if not self._left:
            self._settle()

    def _settle(self):
        try:
            self._value = self._collect()
        except BaseException as exc:
            self._error = exc
        call = self._callback if self._error is None else self._error_callback
        if call is not None:
            call(self._value if self._error is None else self._error)
        self._futures = self._collect = None
        self._done.set()

    def ready(self):
        return self._done.is_set()

    def wait(self, timeout=None):
        self._done.wait(timeout)

    def successful(self):
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._error is None

    def get(self, timeout=None):
        self.wait(timeout)
        if not self.ready():
            raise PoolTimeoutError
        if self._error is not None:
            raise self._error
        return self._value


class Pool:
    """`multiprocessing.Pool`."""

    start_method = None

    def __init__(self, processes=None, initializer=None, initargs=(), maxtasksperchild=None):
        if maxtasksperchild is not None and (not isinstance(maxtasksperchild, int) or maxtasksperchild <= 0):
            raise ValueError("maxtasksperchild must be a positive int or None")
        self._executor = PathosExecutor(
            processes, start_method=self.start_method, initializer=initializer, initargs=initargs
        )
        self._executor._max_tasks_per_child = maxtasksperchild

    @property
    def _pool(self):
        self._executor.submit(int).result()
        return list(self._executor._dispatcher.processes().values())

    def _repopulate_pool(self):
        """The dispatcher does that on its own."""

    def _running(self):
        if self._executor.is_shut_down:
            raise ValueError("Pool not running")
        return self._executor

    def apply(self, func, args=(), kwds=None):
        return self.apply_async(func, args, kwds).get()

    def apply_async(self, func, args=(), kwds=None, callback=None, error_callback=None):
        future = self._running().submit(func, *args, **(kwds or {}))
        return AsyncResult(future.result, [future], callback, error_callback)

    def map(self, func, iterable, chunksize=None):
        return list(self._running().map(func, iterable, chunksize=chunksize))

    def starmap(self, func, iterable, chunksize=None):
        return list(self._running().starmap(func, iterable, chunksize=chunksize))

    def map_async(self, func, iterable, chunksize=None, callback=None, error_callback=None):
        return self._all_async(func, [(item,) for item in iterable], chunksize, callback, error_callback)

    def starmap_async(self, func, iterable, chunksize=None, callback=None, error_callback=None):
        return self._all_async(func, list(iterable), chunksize, callback, error_callback)

    def _all_async(self, func, items, chunksize, callback, error_callback):
        futures, results = self._running().map_all(func, items, chunksize)
        return AsyncResult(lambda: list(results), futures, callback, error_callback)

    def imap(self, func, iterable, chunksize=1):
        return self._running().map(func, iterable, chunksize=chunksize)

    def imap_unordered(self, func, iterable, chunksize=1):
        return self._running().map_unordered(func, iterable, chunksize=chunksize)

    def close(self):
        self._executor.shutdown(wait=False)

    def terminate(self):
        self._executor.terminate()

    def join(self):
        if not self._executor.is_shut_down:
            raise ValueError("Pool is still running")
        self._executor.shutdown(wait=True)

    def __enter__(self):
        self._running()
        return self

    def __exit__(self, *_):
        self.terminate()
