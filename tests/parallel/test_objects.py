"""`self` as users have it: what it holds arrives usable, or as a stand-in that names itself."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import pickle
import socket
import sqlite3
import threading
import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from datamat.errors import ParallelError, UnpicklableError
from datamat.parallel import PathosExecutor

if TYPE_CHECKING:
    from pathlib import Path


ON_COMMIT = ("fork", "forkserver")  # one inherits `self`, the other gets it in a message


class Holder:
    """Holds anything, and reports in a worker what became of it."""

    def __init__(self, **held):
        vars(self).update(held)

    def wait_and_notify(self):
        with self.condition:
            self.condition.notify_all()
        return self.condition._lock is self.lock

    def look(self, name):
        return getattr(self, name)

    def use(self, name, method, *args):
        return getattr(getattr(self, name), method)(*args)

    def log(self, name, text):
        getattr(self, name).warning(text)

    def run_in_pool(self, x):
        return self.pool.submit(abs, x).result(timeout=5)

    def fill(self, name):
        getattr(self, name)[:] = 7
        return float(getattr(self, name).sum())


def call(method, holder, name, *args):
    with PathosExecutor(1, start_method=method) as pool:
        return pool.submit(getattr(holder, name), *args).result(timeout=20)


def test_condition_keeps_its_lock(method):
    """Two attributes that share a lock share one in the worker."""
    lock = threading.RLock()
    holder = Holder(lock=lock, condition=threading.Condition(lock))

    assert call(method, holder, "wait_and_notify")


def test_logger_reaches_the_handlers_of_the_parent(method, caplog):
    """Also one that is not registered under its name."""
    stream = io.StringIO()
    detached = logging.Logger("detached")
    detached.addHandler(logging.StreamHandler(stream))
    holder = Holder(logger=logging.getLogger("user.model"), detached=detached, handler=logging.StreamHandler())

    call(method, holder, "log", "logger", "hello from a worker")
    call(method, holder, "log", "detached", "from afar")

    assert "hello from a worker" in caplog.messages
    assert stream.getvalue() == "from afar\n"


def test_file_for_writing_is_not_touched(method, tmp_path: Path):
    """Dill would open it in its mode, and so truncate it."""
    path = tmp_path / "log.txt"
    with path.open("w") as file:
        file.write("precious\n")
        file.flush()
        holder = Holder(file=file)

        warned = pytest.warns(UserWarning, match=r"self\.file: _io\.TextIOWrapper")
        with warned, pytest.raises(UnpicklableError, match="open for writing"):
            call(method, holder, "use", "file", "write", "x")

    assert path.read_text() == "precious\n"


class Reader:
    """Holds what cannot travel, and can create it again."""

    def __init__(self, connection):
        self._conn = connection

    def read(self):
        return self._conn.execute("select 1").fetchone()[0]


class Model:
    def __init__(self, reader):
        self.reader = reader

    def fit(self):
        return self.reader.read()


class SettingModel(Model):
    def setup_worker(self):
        self.reader = Reader(sqlite3.connect(":memory:"))


def test_standin_names_the_attribute_and_the_remedy(method):
    """One warning appears at dispatch; using the stand-in raises an error in the same words."""
    connection = sqlite3.connect(":memory:")
    model = Model(Reader(connection))
    words = r"self\.reader\._conn: sqlite3\.Connection.*setup_worker"

    with pytest.warns(UserWarning, match=words) as caught, PathosExecutor(1, start_method=method) as pool:  # noqa: PT031
        futures = [pool.submit(model.fit) for _ in range(3)]
        for future in futures:
            with pytest.raises(UnpicklableError, match=words):
                future.result(timeout=20)

    connection.close()
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1  # 3.12 also warns of the fork


def test_setup_worker_replaces_what_stayed_behind(method):
    """The warning names it as the remedy."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection, pytest.warns(UserWarning, match="sqlite3"):
        assert call(method, SettingModel(Reader(connection)), "fit") == 1


def counting():
    yield from range(3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (socket.socket, "socket.socket"),
        (counting, "generator"),
        (lambda: threading.Thread(target=print), "threading.Thread"),
    ],
)
def test_standin_is_never_a_silent_none(method, make, name):
    """Whatever stays behind raises an error when it is used."""
    holder = Holder(thing=make())

    with pytest.warns(UserWarning, match=rf"self\.thing: .*{name}"), pytest.raises(UnpicklableError, match=name):
        call(method, holder, "use", "thing", "run")

    if name == "socket.socket":
        holder.thing.close()


@dataclasses.dataclass(slots=True)
class Slotted:
    """Keeps its attributes without a dictionary."""

    thing: object


class Pair(NamedTuple):
    first: int
    second: object


class Registry(dict):
    """Is a dictionary with attributes of its own."""


def registry(thing):
    made = Registry(a=1)
    made.thing = thing
    return made


HOMES = {
    "attribute of a dictionary": (registry, lambda home: home.thing),
    "slots": (Slotted, lambda home: home.thing),
    "tuple": (lambda thing: (1, (2, thing)), lambda home: home[1][1]),
    "named tuple": (lambda thing: Pair(1, thing), lambda home: home.second),
    "list of many": (lambda thing: [*range(5000), thing], lambda home: home[-1]),
    "deque": (lambda thing: collections.deque([thing]), lambda home: home[0]),
    "set": (lambda thing: {thing}, lambda home: next(iter(home))),
    "frozenset": (lambda thing: frozenset({thing}), lambda home: next(iter(home))),
    "partial": (lambda thing: functools.partial(print, 1, thing), lambda home: home.args[1]),
    "keyword of a partial": (lambda thing: functools.partial(print, end=thing), lambda home: home.keywords["end"]),
    "bound method": (lambda thing: Slotted(thing).__init__, lambda home: home.__self__.thing),
    "closure": (lambda thing: lambda: thing, lambda home: home()),
}


class Keeper:
    """Keeps an object somewhere, and uses it in a worker."""

    def __init__(self, where, thing):
        self.where = where
        self.home = HOMES[where][0](thing)

    def use(self, method, *args):
        return getattr(HOMES[self.where][1](self.home), method)(*args)


@pytest.mark.parametrize("where", HOMES)
def test_standins_and_locks_are_found_wherever_self_keeps_them(method, where):
    """No worker uses its parent's connection, or waits for ever for a lock that its parent holds."""
    connection, lock = sqlite3.connect(":memory:"), threading.RLock()
    keeper = Keeper(where, connection)
    parent = connection.execute("select 1").fetchone

    warned = pytest.warns(UserWarning, match=r"self\.home.*: sqlite3\.Connection")
    with warned, pytest.raises(UnpicklableError, match=r"self\.home.*setup_worker"):
        call(method, keeper, "use", "execute", "select 1")
    with lock:
        assert call(method, Keeper(where, lock), "use", "acquire", True, 2)

    assert parent() == (1,)
    connection.close()


def test_connection_of_a_closure_or_partial_stays_behind(method):
    """The callable itself holds it."""

    def count(held):
        return held.execute("select 1").fetchone()

    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for function in (functools.partial(count, connection), lambda: count(connection)):
            with PathosExecutor(1, start_method=method) as pool:
                with pytest.warns(UserWarning, match=r"sqlite3\.Connection"):
                    future = pool.submit(function)
                with pytest.raises(UnpicklableError, match="setup_worker"):
                    future.result(timeout=20)


class Hostile:
    """Cannot be pickled, for a reason of its own."""

    def __reduce__(self):
        raise RuntimeError("I stay here")


def test_unknown_object_that_cannot_be_pickled_becomes_a_standin():
    """No list of types is complete; but not even a stand-in helps where the callable itself refuses."""
    holder = Holder(parts=[1, Hostile()], n=3)

    with PathosExecutor(1, start_method="forkserver") as pool:
        with pytest.warns(UserWarning, match=r"self\.parts\[1\]: .*Hostile"):
            assert pool.submit(holder.look, "n").result(timeout=20) == 3
        with pytest.raises(UnpicklableError, match="Hostile cannot be sent to a worker"):
            pool.submit(Hostile().__reduce_ex__, 2).result(timeout=20)


@pytest.mark.parametrize("held", [Hostile(), (1, Hostile()), {"it": Hostile()}])
def test_global_that_cannot_be_pickled_becomes_a_standin(held):
    """The code that uses it travels, and names it."""
    cell = {"__name__": "cell_of_a_notebook", "HELD": held}
    exec("def use(is_used):\n    return HELD['it'].data if is_used else 1", cell)

    with PathosExecutor(1, start_method="forkserver") as pool:
        with pytest.warns(UserWarning, match=r"global HELD.*: .* cannot be sent"):
            assert pool.submit(cell["use"], False).result(timeout=20) == 1
        with pytest.raises(UnpicklableError, match="global HELD"):
            pool.submit(cell["use"], True).result(timeout=20)


def test_array_arrives_writable_and_apart(method):
    """A worker may write to its copy; the caller's does not change."""
    holder = Holder(array=np.zeros(1_000_000))

    assert call(method, holder, "fill", "array") == 7_000_000
    assert holder.array.sum() == 0


def test_closures_partials_and_caches_travel(method):
    """These callables are created here and no name leads to them."""
    step = 3

    @functools.lru_cache
    def triple(x):
        return x * step

    with PathosExecutor(1, start_method=method) as pool:
        assert list(pool.map(functools.partial(lambda a, b: triple(a) + b, b=1), [1, 2])) == [4, 7]


class Counting:
    """Counts how often it is unpickled in a process."""

    loads = 0

    def __init__(self):
        self.data = bytes(1000)

    def __setstate__(self, state):
        type(self).loads += 1
        vars(self).update(state)

    def count(self, _):
        return type(self).loads


@pytest.mark.parametrize("how", ["submit", "map", "submit and wait"])
def test_self_travels_once_per_worker(method, how):
    """The number of calls does not matter; with fork, it does not travel at all."""
    counting_object = Counting()

    with PathosExecutor(1, start_method=method) as pool:
        if how == "submit":
            futures = [pool.submit(counting_object.count, i) for i in range(50)]
            loads = [future.result(timeout=20) for future in futures]
        elif how == "map":
            loads = list(pool.map(counting_object.count, range(50)))
        else:
            loads = [pool.submit(counting_object.count, i).result(timeout=20) for i in range(5)]

    expected = {0} if method == "fork" else {1}
    assert set(loads) == expected


def nested(x):
    with PathosExecutor(4) as pool:
        assert pool.stats().start_method == "serial"
        return list(pool.map(abs, [x, -x]))


def test_nested_pool_is_serial_and_says_so(method, caplog):
    """Whether a task creates it, or the object holds it: no workers of workers start."""
    with caplog.at_level(logging.INFO), PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(nested, 3).result(timeout=20) == [3, 3]
        assert pool.submit(Holder(pool=pool).run_in_pool, -4).result(timeout=20) == 4

    assert any("nested pool" in message for message in caplog.messages)


@pytest.mark.parametrize("kind", [pickle.PicklingError, TypeError])
def test_unpicklable_argument_is_caught_as_from_other_pools(kind):
    """Programs written for `concurrent.futures`, loky or pickle catch the error.

    An argument does not become a stand-in: the call depends on it. A result does not either.
    """
    with PathosExecutor(1) as pool:
        for future in (pool.submit(len, {"rows": counting()}), pool.submit(counting)):
            with pytest.raises(kind, match="generator cannot be sent"):
                future.result(timeout=20)


def test_no_warning_where_nothing_stays_behind(method):
    """An ordinary object causes none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Some test before this one has used such libraries.
        warnings.filterwarnings("ignore", "start_method='fork' was asked for", RuntimeWarning)
        assert call(method, Holder(n=1, lock=threading.Lock()), "look", "n") == 1


class Settings:
    """Raises KeyError, not AttributeError, for an attribute that it does not have."""

    def __init__(self, **settings):
        vars(self)["settings"] = settings

    def __getattr__(self, name):
        return vars(self)["settings"][name]

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)

    def scaled(self, number):
        return self.scale * number

    __call__ = scaled


class WithHook:
    def setup_worker(self):
        self.is_set_up = True

    @classmethod
    def name(cls, number):
        return cls.__name__, number


def test_object_without_the_hook_needs_none(method):
    """Its `__getattr__` may raise any error, and a class may define the hook for its instances."""
    with PathosExecutor(1, start_method=method) as pool:
        assert list(pool.map(Settings(scale=2), range(3))) == [0, 2, 4]
        assert list(pool.map(Settings(scale=3).scaled, range(3))) == [0, 3, 6]
        assert pool.submit(Settings(scale=4).scaled, 2).result(timeout=20) == 8
        assert pool.submit(WithHook.name, 2).result(timeout=20) == ("WithHook", 2)


def test_setup_worker_that_fails_is_the_error_of_its_tasks(method):
    """Its traceback reaches the caller."""

    class Broken:
        def setup_worker(self):
            raise OSError("no database")

        def run(self):
            return 1

    with PathosExecutor(1, start_method=method) as pool:
        future = pool.submit(Broken().run)
        with pytest.raises(ParallelError, match="setup_worker failed: OSError: no database"):
            future.result(timeout=20)
