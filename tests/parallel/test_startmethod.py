"""The start method is the fastest that is safe, and the reason is said."""

import logging
import sys
import threading
import types

import pytest
from fresh import METHODS

from datamat.errors import OptionError
from datamat.parallel import PathosExecutor, processes
from datamat.parallel.processes import choose_start_method

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is always spawn")


@pytest.fixture
def one_thread(monkeypatch):
    """Hide the threads of the test runner, and what other tests left in use."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(processes, "library_against_fork", lambda: None)
    for name in ("tensorflow.python.eager.context", "torch", "jax._src.xla_bridge", "ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@linux
def test_fork_where_nothing_speaks_against_it(one_thread):
    """It starts in milliseconds and sends nothing."""
    assert choose_start_method()[0] == "fork"


@linux
def test_forkserver_where_there_are_threads(monkeypatch):
    """A lock that another thread holds would stay locked in the child."""
    monkeypatch.setattr(threading, "active_count", lambda: 2)

    assert choose_start_method() == ("forkserver", "fork is unsafe: this process has other Python threads")


@linux
def test_forkserver_in_a_thread(one_thread):
    """The child's only thread would not be the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(choose_start_method()[0]))
    thread.start()
    thread.join()

    assert found == ["forkserver"]


@linux
@pytest.mark.parametrize(
    ("context", "chosen"),
    [(None, "fork"), (types.SimpleNamespace(_initialized=False), "fork"),
     (types.SimpleNamespace(_initialized=True), "forkserver")],
)  # fmt: skip
def test_tensorflow_counts_once_it_is_in_use(one_thread, monkeypatch, context, chosen):
    """Its import starts no threads; its first tensor does."""
    module = types.ModuleType("tensorflow.python.eager.context")
    module._context = context
    monkeypatch.setitem(sys.modules, module.__name__, module)

    assert choose_start_method()[0] == chosen


@linux
def test_cuda_and_ray_rule_out_fork(one_thread, monkeypatch):
    torch, ray = types.ModuleType("torch"), types.ModuleType("ray")
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
    ray.is_initialized = lambda: True
    for module, reason in ((torch, "CUDA is initialised by torch"), (ray, "ray is running")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert choose_start_method() == ("forkserver", f"fork is unsafe: {reason}")
        monkeypatch.delitem(sys.modules, module.__name__)


def test_spawn_elsewhere(monkeypatch):
    """System libraries of macOS do not survive a fork."""
    monkeypatch.setattr(sys, "platform", "darwin")

    assert choose_start_method()[0] == "spawn"


@pytest.mark.parametrize("name", METHODS)
def test_what_is_asked_for_is_used(name):
    assert choose_start_method(name) == (name, "asked for")


def test_unknown_name_is_refused():
    with pytest.raises(OptionError, match="pass one of fork, forkserver, spawn, or None"):
        choose_start_method("threads")


def test_choice_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.DEBUG, "datamat.parallel"), PathosExecutor(1, start_method="fork") as pool:
        pool.submit(abs, 1).result(timeout=20)

    assert "workers start by fork: asked for" in caplog.messages
