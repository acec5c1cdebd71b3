"""Calls that cannot travel, and calls that a pool or an engine gives up."""

import concurrent.futures
import os
import pickle
import sys
import time

import pytest
from small_rows import job

from datamat import PathosExecutor
from datamat.errors import MissingDependencyError, ParallelError
from datamat.parallel import engines
from datamat.testing import InlineExecutor


def wait_and_die(path):
    """Say that it has begun, and end the process once a file is there."""
    path.with_name("begun").touch()
    wait_for(path)
    os._exit(1)


def wait_for(path):
    """Return once a file is there; the time-out of the test ends it otherwise."""
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["submit", "map"])
def test_worker_that_dies_in_a_pool_that_is_shut_down(tmp_path, way):
    """Its call, or those of its chunk, would be repeated otherwise."""
    pool = PathosExecutor(1, max_retries=1, start_method="fork")
    if way == "submit":
        waited = pool.submit(wait_and_die, tmp_path / "now").result
    else:
        waited = pool.map(wait_and_die, [tmp_path / "now"] * 2, chunksize=2).__next__
    wait_for(tmp_path / "begun")

    pool.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "now").touch()

    with pytest.raises(concurrent.futures.BrokenExecutor, match="shut down"):
        waited()


def test_worker_of_an_engine_without_a_module_of_the_job(tmp_path, monkeypatch):
    """It says which module, and how to bring it there."""
    (tmp_path / "module_of_the_job.py").write_text("def function():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = __import__("module_of_the_job").function
    with engines.open_engine(Elsewhere()) as engine, pytest.raises(MissingDependencyError, match="install it there"):
        engine.submit(function).result()


class Elsewhere(InlineExecutor):
    """Makes each call at once, with what it is sent, where the folders of the caller's modules are not searched."""

    def submit(self, fn, /, *args):
        sent = pickle.dumps(fn)
        sys.modules.pop("module_of_the_job")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", sys.path[1:])
            return super().submit(pickle.loads(sent), *args)


class Cancelling(concurrent.futures.Executor):
    """An engine that gives up."""

    def submit(self, fn, /, *args, **kwargs):
        """Cancel the call."""
        future = concurrent.futures.Future()
        future.cancel()
        return future


def test_call_that_the_engine_cancels(tmp_path):
    """The run says so, after it has tried again."""
    with pytest.raises(ParallelError, match="cancelled"):
        job(tmp_path / "out", executor=Cancelling()).run(progress=False)
