"""`PathosPool` behaves as pathos documents its pools."""

import os
import threading
import time

import pytest
from pathos.abstract_launcher import AbstractWorkerPool
from pathos.helpers import mp

from datamat.errors import OptionError
from datamat.parallel import PathosPool


@pytest.fixture
def pool(method):
    """Return a pool of two workers, which is cleared afterwards."""
    pool = PathosPool(2, start_method=method)
    yield pool
    pool.clear()


class Model:
    def __init__(self):
        self.lock = threading.RLock()

    def fit(self, x, y=1):
        with self.lock:
            return x * y


def test_it_is_a_pathos_pool(pool):
    """It fits wherever a program expects one."""
    assert isinstance(pool, AbstractWorkerPool)
    assert repr(pool) == "<pool PathosPool(ncpus=2)>"
    assert (pool.nodes, pool.ncpus) == (2, 2)


def test_maps_take_several_sequences(pool):
    """All four kinds do: blocking, lazy, unordered and asynchronous."""
    fit = Model().fit

    assert pool.map(fit, [1, 2, 3], [4, 5, 6]) == [4, 10, 18]
    assert list(pool.imap(fit, [1, 2, 3])) == [1, 2, 3]
    assert sorted(pool.uimap(fit, [1, 2, 3], chunksize=2)) == [1, 2, 3]
    assert pool.amap(fit, [1, 2, 3], [2, 2, 2]).get(timeout=20) == [2, 4, 6]


def test_pipes_run_one_call(pool):
    """Keyword arguments are passed on."""
    fit = Model().fit

    assert pool.pipe(fit, 3, y=5) == 15
    result = pool.apipe(fit, 4)
    result.wait(20)
    assert result.ready()
    assert result.successful()
    assert result.get() == result.get() == 4


def wait_for(gate):
    gate.wait(30)


def fail(x):
    raise ValueError(x)


def test_asynchronous_result_can_be_asked_early(pool):
    """It reports that it is not ready."""
    gate = mp.get_context("spawn").Event()
    result = pool.apipe(wait_for, gate)

    assert not result.ready()
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    with pytest.raises(mp.TimeoutError):
        result.get(timeout=0.01)
    gate.set()
    assert result.get() is None


@pytest.mark.parametrize("start", [lambda pool: pool.apipe(fail, 3), lambda pool: pool.amap(fail, [3, 4])])
def test_asynchronous_error_is_raised_by_get(pool, start):
    """Every `get` raises it."""
    result = start(pool)

    for _ in range(2):
        with pytest.raises(ValueError, match="3"):
            result.get(timeout=20)
    assert not result.successful()


def test_closed_pool_refuses_work_until_restart(pool):
    """`restart` of a running pool requires `force`."""
    pool.close()
    pool.join()
    with pytest.raises(ValueError, match="Pool not running"):
        pool.map(abs, [1])

    pool.restart()

    assert pool.map(abs, [-1]) == [1]
    with pytest.raises(OptionError, match="pool is running"):
        pool.restart()
    pool.restart(force=True)
    assert pool.map(abs, [-2]) == [2]


def test_join_requires_a_closed_pool(pool):
    """As in multiprocessing."""
    with pytest.raises(ValueError, match="still running"):
        pool.join()


def test_terminate_is_abrupt(pool):
    """It does not wait for running calls."""
    result = pool.apipe(time.sleep, 600)
    pool.terminate()
    pool.join()

    assert result.ready()
    assert not result.successful()


def test_pools_of_one_id_share_their_workers(pool, method):
    """By default the id is the number of nodes."""
    twin = PathosPool(2, start_method=method)

    assert set(pool.map(pid, range(20))) & set(twin.map(pid, range(20)))
    other = PathosPool(2, start_method=method, id="other")
    assert not set(other.map(pid, range(4))) & set(pool.map(pid, range(20)))
    other.clear()
    assert os.getpid() not in pool.map(pid, range(4))


def pid(_):
    return os.getpid()


def test_number_of_nodes_can_be_set(pool):
    """New workers replace the old ones."""
    pool.ncpus = 3

    assert pool.nodes == 3
    assert pool.map(abs, [-1]) == [1]
