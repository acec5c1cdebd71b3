"""What users register for a type decides how its objects travel: in both directions, by every start method."""

import functools
import logging
import os
import sqlite3
import threading

import numpy as np
import pytest
from fresh import run

from datamat.errors import OptionError, UnpicklableError
from datamat.parallel import PathosExecutor, register_standin, retire

ON_COMMIT = ("fork", "forkserver")  # one inherits `self`, the other gets it in a message


class Connection:
    """Cannot be pickled, and must not be shared with a fork."""

    def __init__(self, url):
        self.url = url
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.made_by = os.getpid()

    def __del__(self):
        self.database.close()  # Python 3.13 warns of those that are not

    def __reduce__(self):
        raise TypeError("a connection stays where it is")

    def ask(self, number):
        return self.url, self.database.execute("select ? + 1", (number,)).fetchone()[0], self.made_by


class Replica(Connection):
    """A subclass."""


def reconnect(connection):
    return type(connection), (connection.url,)


@pytest.fixture(autouse=True)
def _registered():
    register_standin(Connection, reconnect)
    yield
    for kind in (Connection, Replica, threading.Event):
        register_standin(kind, None)


class Holder:
    def __init__(self, connection):
        self.connection = self.again = connection
        self.listed, self.named, self.row = [connection], {"it": connection}, (1, connection)
        self.asked = functools.partial(connection.ask, 1)

    def ask(self, number):
        held = (self.again, self.listed[0], self.named["it"], self.row[1])
        return all(each is self.connection for each in held), self.connection.ask(number), self.asked()[1]


@pytest.mark.parametrize("kind", [Connection, Replica])
def test_what_self_holds_is_made_in_the_worker(method, kind):
    """An object in several places stays one object; subclasses use the function of their base."""
    here = kind("db://one")

    with PathosExecutor(1, start_method=method) as pool:
        (is_one, (url, answer, made_by), asked) = pool.submit(Holder(here).ask, 1).result(timeout=50)

    assert (is_one, url, answer, asked) == (True, "db://one", 2, 2)
    assert made_by != here.made_by


def ask(connection, number):
    return connection.ask(number)


def make(url):
    return [Connection(url)]


def make_last(url):
    retire()
    return make(url)


KEPT = {}


def keep(connection, values):
    KEPT.update(connection=connection, values=values)


def ask_kept(number):
    return KEPT["connection"].ask(number)


def test_it_is_made_wherever_it_arrives(method):
    """As the callable's own self, among the initargs, as an argument of calls and maps, and here as a result."""
    here, beside = Connection("db://two"), np.ones(300_000)  # too large for a message

    with PathosExecutor(1, start_method=method, initializer=keep, initargs=(here, beside)) as pool:
        for future in (pool.submit(here.ask, 5), pool.submit(ask_kept, 5), pool.submit(ask, here, 5)):
            url, answer, made_by = future.result(timeout=50)
            assert (url, answer) == ("db://two", 6)
            assert made_by != here.made_by
        assert [answer for _, answer, _ in pool.starmap(ask, [(here, number) for number in range(5)])] == [
            1,
            2,
            3,
            4,
            5,
        ]


def test_results_are_made_in_the_caller(method):
    """The worker knows what its parent has registered; so does one that takes its place, which a server forks."""
    with PathosExecutor(1, start_method=method) as pool:
        made = [pool.submit(function, "db://five").result(timeout=50)[0] for function in (make, make_last, make)]

    assert [each.ask(1) for each in made] == [("db://five", 2, os.getpid())] * 3


class Signal:
    def __init__(self):
        self.event = threading.Event()

    def is_set(self):
        return self.event.is_set()


def as_set(event):
    return set_event, ()


def set_event():
    event = threading.Event()
    event.set()
    return event


def test_it_takes_the_place_of_what_datamat_does(method):
    found = []
    for reduce in (as_set, None):
        register_standin(threading.Event, reduce)
        with PathosExecutor(1, start_method=method) as pool:
            found.append(pool.submit(Signal().is_set).result(timeout=50))

    assert found == [True, False]


def test_nearest_class_decides():
    register_standin(Replica, lambda replica: (Connection, (f"{replica.url}?primary",)))

    with PathosExecutor(1, start_method="forkserver") as pool:
        assert pool.submit(ask, Replica("db://eight"), 1).result(timeout=50)[0] == "db://eight?primary"


def fail(connection):
    raise LookupError("no such database")


@pytest.mark.parametrize("reduce", [fail, lambda _: "db://", lambda _: (Connection, "db://")])
def test_function_that_fails_leaves_a_standin_that_says_why(method, reduce):
    """On `self`, with a warning; an argument fails its own call."""
    register_standin(Connection, reduce)
    reason = (
        "raised LookupError: no such database" if reduce is fail else r"returned .*'db://'.*, not \(make, arguments\)"
    )

    with PathosExecutor(1, start_method=method) as pool:
        with pytest.warns(UserWarning, match=rf"self.connection: .*Connection \(.* {reason}"):
            future = pool.submit(Holding(Connection("db://nine")).ask, 1)
        with pytest.raises(UnpicklableError, match=reason):
            future.result(timeout=50)
        with pytest.raises(UnpicklableError, match=reason):
            pool.submit(ask, Connection("db://ten"), 1).result(timeout=50)
        assert pool.submit(abs, -1).result(timeout=50) == 1


class Holding:
    def __init__(self, connection):
        self.connection = connection

    def ask(self, number):
        return self.connection.ask(number)


@pytest.mark.parametrize("kind", [int, dict, tuple, type, type(ask), logging, None, np.ndarray, object])
def test_what_pickle_deals_with_alone_cannot_be_registered(kind):
    with pytest.raises(OptionError, match=r"register a class of its own|takes a class, not"):
        register_standin(kind, reconnect)


PROGRAM = """
    import threading
    from datamat.parallel import PathosExecutor, register_standin

    class Handle:
        def __init__(self, number):
            self.number, self.lock = number, threading.Lock()

    register_standin(Handle, lambda handle: (open_handle, (handle.number,)))

    def open_handle(number):
        return Handle(number + 100)

    class Job:
        def __init__(self):
            self.handle = Handle(1)
        def run(self, other):
            return self.handle.number, other.number, Handle(3)

    for method in ("fork", "forkserver", "spawn"):
        with PathosExecutor(1, start_method=method) as pool:
            mine, other, result = pool.submit(Job().run, Handle(2)).result(timeout=50)
        print(mine, other, type(result) is Handle, result.number)
"""


def test_class_and_function_of_a_script():
    """Both travel by value; the function may use what the script defines further down."""
    assert run(PROGRAM) == "101 102 True 103\n" * 3
