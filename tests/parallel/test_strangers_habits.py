"""What users of `concurrent.futures`, loky and multiprocessing do without thinking."""

import asyncio
import contextlib
import functools
import multiprocessing.queues
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import types
import unittest.mock
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from datamat import (
    BrokenPoolError,
    OptionError,
    PathosExecutor,
    UnpicklableError,
    WorkerDied,
    load,
    materialize,
)
from datamat.errors import ParallelError
from datamat.testing import InlineExecutor


def in_fork(action):
    """Return what a function returns, or the error that it raises, in a fork of this process."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            found = action()
        except Exception as exc:
            found = exc
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(said)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks") / "out"
    materialize(
        lambda n: {"n": n, "x": np.full(4, n, np.float32)}, range(64), folder, executor=InlineExecutor(), progress=False
    )
    return load(folder)


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 4}, {"batch_size": 4, "transform": lambda sample: sample, "num_threads": 2}]
)
def test_epoch_begun_before_a_fork_is_refused_in_it(dataset, options):
    """Its threads stay in the parent, which goes on; a new epoch in the fork is fine."""
    batches = dataset.to_numpy(**options)
    epoch = iter(batches)
    next(epoch)

    found = in_fork(lambda: [*epoch])
    anew = in_fork(lambda: len([*batches]))

    assert isinstance(found, ParallelError)
    assert "call iter()" in str(found)
    assert anew == len(batches)
    assert len([*epoch]) == len(batches) - 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_map_begun_before_a_fork_is_refused_in_it():
    with PathosExecutor(1, start_method="fork") as pool:
        results = pool.map(abs, range(-8, 0), chunksize=1)
        next(results)

        found = in_fork(lambda: [*results])

        assert isinstance(found, ParallelError)
        assert [*results] == [7, 6, 5, 4, 3, 2, 1]


class Wrapper:
    """Passes on whatever it does not have, as clients of boto3 do."""

    def __init__(self):
        self._inner = {"a": 1}

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self):
        self.inner = [1, 2]

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Listed(list):
    def __getattr__(self, name):
        return getattr(self.inner, name)


class Stateful(Wrapper):
    def __getstate__(self):
        return {"kept": sorted(self._inner)}

    def __setstate__(self, state):
        self._inner = dict.fromkeys(state["kept"], 2)


class Job:
    def __init__(self):
        self.wrapper, self.slotted, self.listed, self.stateful = Wrapper(), Slotted(), Listed([1, 2, 3]), Stateful()
        self.listed.inner = ""

    def look(self, other):
        return [*self.wrapper.items(), self.slotted.count(1), len(self.listed), *self.stateful.items(), *other.keys()]


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_objects_that_answer_to_any_name_travel(method):
    """On `self`, as argument and as result."""
    with PathosExecutor(1, start_method=method) as pool:
        found = pool.submit(Job().look, Wrapper()).result()
        back = pool.submit(Job).result()

    expected = [("a", 1), 1, 3, ("a", 1 if method == "fork" else 2), "a"]
    assert found == expected
    assert back.look({}) == [("a", 1), 1, 3, ("a", 2)]


@pytest.mark.parametrize("error", [GeneratorExit, SystemExit, pytest.skip.Exception])
def test_submitted_calls_run_whatever_ends_the_block(error):
    """As in `concurrent.futures`; only Ctrl-C drops them."""
    with contextlib.suppress(error), PathosExecutor(1, start_method="fork") as pool:
        futures = [pool.submit(abs, -n) for n in range(20)]
        raise error("leaving")

    assert [future.result() for future in futures] == [*range(20)]


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_exit_handlers_of_tasks_run_and_those_of_the_parent_do_not(tmp_path, method):
    """As at the end of any program, in the worker that registered them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, pathlib, sys\n"
        "from datamat import PathosExecutor\n"
        "here = pathlib.Path(sys.argv[2])\n"
        "def note(name): (here / f'{name}-{os.getpid()}').touch()\n"
        "def task(n): atexit.register(note, 'worker')\n"
        "atexit.register(note, 'parent')\n"
        "with PathosExecutor(1, start_method=sys.argv[1]) as pool: list(pool.map(task, range(2)))\n"
        "print(os.getpid())\n"
    )

    done = subprocess.run(
        [sys.executable, script, method, tmp_path], check=True, capture_output=True, text=True, env={**os.environ}
    )

    found = sorted(path.name.partition("-")[::2] for path in tmp_path.glob("*-*"))
    assert [name for name, _ in found] == ["parent", "worker"]
    assert found[0][1] == done.stdout.strip()


def in_thread(x):
    in_thread.pool = getattr(in_thread, "pool", None) or ThreadPoolExecutor(1)
    return in_thread.pool.submit(abs, x).result()


def test_worker_whose_task_keeps_a_thread_pool_ends_by_itself(method, caplog):
    """As any program does. A forked one waited for its threads, and was killed for queues that it did not have."""
    assert multiprocessing.queues, "is imported"
    with PathosExecutor(1, start_method=method) as pool:
        assert list(pool.map(in_thread, range(-3, 0))) == [3, 2, 1]

    assert caplog.messages == []


@pytest.mark.parametrize("ending", ["of the parent", "of the worker"])
@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_what_a_task_has_started_ends_with_a_kill(tmp_path, method, ending):
    """Also what that has started in turn, and whose own parent has ended since."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, subprocess, sys\n"
        "from datamat import PathosExecutor, WorkerDied\n"
        "def task():\n"
        "    started = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; sleep 600'], stdout=subprocess.PIPE)\n"
        "    deep = subprocess.run(['sh', '-c', 'sleep 600 >&- & echo $!'], stdout=subprocess.PIPE).stdout\n"
        "    found = [os.getpid(), started.pid, int(started.stdout.readline()), int(deep)]\n"
        "    pathlib.Path('pids.tmp').write_text(' '.join(map(str, found)))\n"
        "    os.rename('pids.tmp', 'pids')\n"
        "    if sys.argv[2] == 'of the worker': os.kill(os.getpid(), 9)\n"
        "    started.wait()\n"
        "with PathosExecutor(1, start_method=sys.argv[1]) as pool:\n"
        "    try: pool.submit(task).result()\n"
        "    except WorkerDied: pass\n"
    )

    with subprocess.Popen([sys.executable, script, method, ending], cwd=tmp_path) as program:
        try:
            while not (tmp_path / "pids").exists():
                assert program.poll() is None
                time.sleep(0.01)
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            if ending == "of the parent":
                program.kill()
            alive = [process for pid in pids if (process := process_of(pid))]
            assert not psutil.wait_procs(alive, timeout=10)[1]
        finally:
            program.kill()


def process_of(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)


def test_joblib_in_a_task_leaves_nothing_behind(tmp_path):
    """`subprocess.run` around the program returns at once: nobody holds its output open."""
    pytest.importorskip("joblib")
    script = tmp_path / "script.py"
    script.write_text(
        "import joblib\n"
        "from datamat import PathosExecutor\n"
        "def task(n): return sum(joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(-i) for i in range(n)))\n"
        "with PathosExecutor(2) as pool: print(list(pool.map(task, range(4))))\n"
    )

    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[0, 0, 1, 3]\n", "")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("spec", [dict, list, types.MethodType, functools.partial, types.FunctionType, Wrapper])
@pytest.mark.filterwarnings("ignore:self.client. unittest.mock.Mock cannot be sent:UserWarning")
def test_mock_on_self_is_taken_for_what_it_is(method, spec):
    """Its `__class__` says that it is what it stands for."""

    class Service:
        def __init__(self):
            self.client = unittest.mock.Mock(spec=spec)

        def call(self, n):
            return n + 1

    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(Service().call, 1).result() == 2


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_future_as_an_argument_is_refused_by_name(method):
    """A copy of it would never be done."""
    with PathosExecutor(1, start_method=method) as pool:
        future = pool.submit(abs, -1)
        with pytest.raises(UnpicklableError, match="Future"):
            pool.submit(repr, future).result()
        with pytest.raises(UnpicklableError, match="Future"):
            list(pool.map(repr, [[future]]))


LOCAL = [
    queue.Queue, queue.LifoQueue, queue.PriorityQueue, queue.SimpleQueue,
    asyncio.Queue, asyncio.PriorityQueue, asyncio.Event, asyncio.Lock, asyncio.Semaphore,
]  # fmt: skip
WAYS = {
    "argument": lambda pool, it: pool.submit(repr, it).result(),
    "keyword": lambda pool, it: pool.submit(dict, key=it).result(),
    "in a dict": lambda pool, it: pool.submit(repr, {"key": [(it,)]}).result(),
    "item": lambda pool, it: list(pool.map(repr, [it])),
    "in an item": lambda pool, it: list(pool.starmap(print, [([it],)])),
    "partial": lambda pool, it: pool.submit(functools.partial(repr, it)).result(),
}


@pytest.mark.parametrize("kind", LOCAL)
def test_what_threads_wait_for_is_refused_as_an_argument(kind):
    """What the call puts into a copy would be lost, and who waits for it would wait for ever."""
    with PathosExecutor(1, start_method="fork") as pool:
        assert pool.submit(abs, -1).result() == 1
        for use in WAYS.values():
            with pytest.raises(UnpicklableError, match=kind.__name__):
                use(pool, kind())


def test_what_threads_wait_for_is_refused_for_initializers():
    with pytest.raises(UnpicklableError, match=r"queue.Queue.*Manager\(\).Queue\(\)"):
        PathosExecutor(1, initializer=repr, initargs=([queue.Queue()],))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_threads_wait_for_travels_as_an_attribute(method):
    """Each worker has its own, in `self` as in an argument."""

    class Holds:
        def __init__(self):
            self.queue, self.event, self.condition = queue.Queue(), threading.Event(), threading.Condition()

        def use(self, other):
            with self.condition, other.condition:
                other.queue.put(1)
                return self.queue.qsize() + other.queue.get() + self.event.is_set()

    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(Holds().use, Holds()).result() == 1


class Part:
    def __init__(self, held=None):
        self.held = held


class Slot:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


SHAPES = {
    "list": lambda n, held: [*map(Part, range(n - 1)), Part(held)],
    "dict": lambda n, held: {**{k: Part(k) for k in range(n - 1)}, "last": [Part({"it": held})]},
    "slots": lambda n, held: [*map(Slot, range(n - 1)), Slot((held,))],
    "nested": lambda n, held: functools.reduce(lambda inner, _: [Part(inner)], range(n), held),
    "rows": lambda n, held: [[[k, [k]]] for k in range(n - 1)] + [[[held]]],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("method", "size"),
    [
        ("fork", 1_500),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("fork", 10), ("fork", 120_000), ("spawn", 1_500))),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot be sent to a worker:UserWarning")
def test_file_that_is_being_written_is_not_written_twice(tmp_path, method, shape, size):
    """Its buffer was inherited, however many objects `self` holds, and however deep it is among them."""
    if shape == "nested":
        size = min(size, 800)
    path = tmp_path / "file"

    class Writes:
        def __init__(self, file):
            self.parts, self.find = SHAPES[shape](size, file), FINDS[shape]

        def write(self):
            self.find(self.parts).write("worker")

    with open(path, "w") as file:
        file.write("parent")
        with PathosExecutor(1, start_method=method) as pool, pytest.raises(UnpicklableError, match="TextIOWrapper"):
            pool.submit(Writes(file).write).result()

    assert path.read_text() == "parent"


def innermost(parts):
    while isinstance(parts, list):
        parts = parts[0].held
    return parts


FINDS = {
    "list": lambda parts: parts[-1].held,
    "dict": lambda parts: parts["last"][0].held["it"],
    "slots": lambda parts: parts[-1].held[0],
    "nested": innermost,
    "rows": lambda parts: parts[-1][0][0],
}


def test_frozen_program_never_runs_itself_again(monkeypatch):
    """Its executable is the program, not an interpreter: workers are forks, or there are none."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/nowhere/program")

    with PathosExecutor(1) as pool:
        assert pool.submit(abs, -1).result() == 1
        assert pool.stats().start_method == "fork"
        with pytest.raises(WorkerDied):
            pool.submit(os._exit, 3).result()
        with pytest.raises(BrokenPoolError, match="frozen"):
            pool.submit(abs, -1).result()
    for method in ("forkserver", "spawn"):
        with pytest.raises(OptionError, match="frozen"):
            PathosExecutor(1, start_method=method)
