"""A pytest plug-in: with it, the backend `multiprocessing` of joblib's own tests runs on `PathosExecutor`."""

import joblib.parallel
from joblib._parallel_backends import AutoBatchingMixin, ParallelBackendBase, SequentialBackend, ThreadingBackend

from datamat.parallel import PathosExecutor


class DatamatBackend(AutoBatchingMixin, ParallelBackendBase):
    """`joblib.parallel.ParallelBackendBase`."""

    supports_retrieve_callback = True
    _workers = None

    def effective_n_jobs(self, n_jobs):
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        return max(joblib.cpu_count() + 1 + n_jobs, 1) if (n_jobs or 1) < 0 else n_jobs or 1

    def configure(self, n_jobs=1, parallel=None, initializer=None, initargs=(), **_):
        self.parallel = parallel
        options = {"initializer": initializer, "initargs": initargs, **self.backend_kwargs}
        self._made_with = {name: options[name] for name in ("initializer", "initargs")}
        self._workers = PathosExecutor(self.effective_n_jobs(n_jobs), **self._made_with)
        return self.effective_n_jobs(n_jobs)

    def submit(self, func, callback=None):
        future = self._workers.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, future):
        return future.result()

    def terminate(self):
        if self._workers is not None:
            self._workers.shutdown()
            self._workers = None
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready=True):
        self._workers.terminate()
        self._workers = None
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel, **self._made_with)

    def get_nested_backend(self):
        level = (self.nesting_level or 0) + 1
        return (SequentialBackend if level > 1 else ThreadingBackend)(nesting_level=level), None

    def __reduce__(self):
        return type(self), (self.nesting_level,)


joblib.parallel.BACKENDS["multiprocessing"] = DatamatBackend
