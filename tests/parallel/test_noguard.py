"""Pools run wherever they are called, without a guard, and the caller's top level runs exactly once.

Each place is a real interpreter in its own process, started as users start it. The program prints "top" when its top
level runs, "user" when the module of its class is imported, and "RESULT ..." with what came back.
"""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING

import pytest
from fresh import ROOT, environment, python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)  # a busy machine may take a minute for three start methods

ANALYZER = """
import dataclasses, enum, logging, threading
from datamat.parallel import PathosExecutor

FACTOR = 10

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass
class Answer:
    target: str
    value: int
    colour: Colour

def helper(x):
    return x * FACTOR

class Analyzer:
    def __init__(self, logger):
        self.logger, self.lock = logger, threading.RLock()
        self.handler = logging.StreamHandler()
        logger.addHandler(self.handler)
        self.scale = lambda x: helper(x) + 1

    def fit(self, target, frame):
        with self.lock:
            self.logger.info("fitting %s", target)
        assert isinstance(self, Analyzer) and Colour.RED is Colour(1)
        return Answer(target, self.scale(frame), Colour.BLUE)

    def train(self, frames, method):
        with PathosExecutor(2, start_method=method) as pool:
            return dict(zip(frames, pool.starmap(self.fit, frames.items())))

def go(*methods):
    for method in methods or ("spawn", "forkserver", "fork"):
        answers = Analyzer(logging.getLogger("analyzer")).train({"a": 1, "b": 2, "c": 3}, method)
        assert all(type(answer) is Answer and answer.colour is Colour.BLUE for answer in answers.values())
        print("RESULT", [answer.value for answer in answers.values()], flush=True)
"""
PROGRAM = 'print("top", flush=True)\n' + ANALYZER + "\ngo()\n"
EXPECTED = "RESULT [11, 21, 31]"


def run(arguments: list[str], folder: Path, stdin: str | None = None) -> str:
    done = python(*arguments, cwd=folder, env=environment(PYTHONWARNINGS="default"), input=stdin, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str, results: int = 3) -> None:
    """Assert one run of the top level, and one result for each start method."""
    assert output.count("top") == 1, output
    assert output.count(EXPECTED) == results, output


def statements() -> str:
    """Return the program as somebody types it: an empty line after each statement and none inside."""
    parts = [ast.unparse(node) for node in ast.parse(PROGRAM).body]
    return "".join("\n".join(filter(None, text.splitlines())) + "\n\n" for text in parts)


FILES = {
    "script.py": PROGRAM,
    "code.txt": PROGRAM,
    "in_a_thread.py": PROGRAM.replace(
        "\ngo()", "\nthread = threading.Thread(target=go)\nthread.start()\nthread.join()"
    ),
    "package/__init__.py": "",
    "package/module.py": PROGRAM,
    "library.py": ANALYZER,
    "running.py": PROGRAM,
    "caller.py": 'print("top", flush=True)\nimport library\nlibrary.go()\n',
    "app/__init__.py": "",
    "plugins/extra/__init__.py": "",
    "plugins/extra/tools.py": ANALYZER,
}
PLACES = {
    "script": (["script.py"], None),
    "module run by name": (["-m", "package.module"], None),
    "command": (["-c", PROGRAM], None),
    "standard input": ([], PROGRAM),
    "standard input by name": (["-"], PROGRAM),
    "interactive session": (["-i", "-q"], statements()),
    "class of an imported module": (["caller.py"], None),
    "module that runs it when it is imported": (["-c", "import running"], None),
    "thread": (["in_a_thread.py"], None),
    "exec": (["-c", 'exec(compile(open("code.txt").read(), "code.txt", "exec"), {"__name__": "elsewhere"})'], None),
    "runpy": (["-c", 'import runpy; runpy.run_path("script.py", run_name="__main__")'], None),
    "runpy by another name": (["-c", 'import runpy; runpy.run_path("script.py", run_name="other")'], None),
    # Found through a `__path__` that the program has extended, as plug-in systems do.
    "package that only the caller finds": (
        ["-c", "import app; app.__path__.append('plugins'); from app.extra.tools import go; print('top'); go()"], None,
    ),
}  # fmt: skip


RARE = ("standard input by name", "runpy by another name")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "place", [pytest.param(each, marks=pytest.mark.long if each in RARE else ()) for each in PLACES]
)
def test_program_runs_once(place: str, tmp_path: Path) -> None:
    """By every start method, without a guard."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    arguments, stdin = PLACES[place]

    check(run(arguments, tmp_path, stdin))


@pytest.mark.long
def test_module_that_runs_a_pool_when_imported_is_not_imported_again(tmp_path: Path) -> None:
    """A second pool uses the module; its workers must not import it."""
    (tmp_path / "library.py").write_text(PROGRAM)

    check(run(["-c", "import library\nlibrary.go()\n"], tmp_path), 6)


def test_module_that_a_worker_cannot_import_is_sent_by_value(tmp_path: Path) -> None:
    """A worker may not find what the caller found, as when a file has been deleted since."""
    (tmp_path / "library.py").write_text(ANALYZER)
    script = (
        "import library, os, shutil\nfrom datamat.parallel import byvalue\n"
        "byvalue.is_by_value('library')\nos.unlink('library.py')\n"
        "shutil.rmtree('__pycache__', ignore_errors=True)\nprint('top')\nlibrary.go()\n"
    )

    check(run(["-c", script], tmp_path))


CODE = """
model = None
def load():
    global model
    model = "loaded"
def use(x):
    return model, x
def use_too(x):
    return model
"""
GLOBALS = {
    "stays as the initializer has set it until it is rebound": (
        """
        model = None
        with pool(initializer=load) as workers:
            workers.submit(abs, 1).result()
            print(*workers.map(use, [1]), *workers.map(use_too, [1]), end=" ")
            model = "rebound"
            print(*workers.map(use_too, [2]))
        """,
        "('loaded', 1) loaded rebound",
    ),
    "was rebound before it was sent": (
        """
        model = None
        with pool(initializer=load) as workers:
            workers.submit(abs, 1).result()
            model = "rebound"
            print(workers.submit(use, 1).result())
        """,
        "('rebound', 1)",
    ),
    "container that is changed in place stays": (
        """
        model = {}
        def fill():
            model["model"] = 10
        def add(x):
            model[x] = True
            return sorted(map(str, model))
        with pool(initializer=fill) as workers:
            print(*[len(workers.submit(add, i).result()) for i in range(3)], end=" ")
            model = {}
            print(workers.submit(add, 3).result())
        """,
        "2 3 4 ['3']",
    ),
    "is None although what it was bound to is gone": (
        """
        class Model:
            pass
        model = Model()
        def name(_):
            return type(model).__name__
        with pool() as workers:
            print(*workers.map(name, [1]), *workers.map(name, [1]), end=" ")
            model = None
            gc.collect()
            print(*workers.map(name, [1]))
        """,
        "Model Model NoneType",
    ),
    "in a module that no worker can import, or in none": (
        """
        module = types.ModuleType("nowhere")
        module.__file__ = "code.txt"
        sys.modules["nowhere"] = module
        elsewhere = {"__name__": "elsewhere"}
        for code in (vars(module), elsewhere):
            exec(open("code.txt").read(), code)
        load_it = module.load
        def load_module():
            load_it()
        for code, load_code in ((vars(module), load_module), (elsewhere, elsewhere["load"])):
            with pool(initializer=load_code) as workers:
                workers.submit(abs, 1).result()
                print(*workers.map(code["use"], [1]), *workers.map(code["use_too"], [1]), end=" ")
                code["model"] = "rebound"
                print(*workers.map(code["use_too"], [1]), end=" ")
        print()
        """,
        "('loaded', 1) loaded rebound ('loaded', 1) loaded rebound ",
    ),
    "is not kept for a pool that has ended": (
        """
        data = [Thing()]
        thing = weakref.ref(data[0])
        with pool() as workers:
            workers.submit(abs, 1).result()
        del data
        gc.collect()
        print(thing())
        """,
        "None",
    ),
    "namespace of a module goes by name, not as a copy": (
        """
        class KeepsNamespace:
            def __init__(self):
                self.names = globals()
            def look(self):
                return use(4), self.names["use"] is use, self.names is globals()
        with pool() as workers:
            print(workers.submit(KeepsNamespace().look).result())
        """,
        "((None, 4), True, True)",
    ),
    "module object travels by name": (
        """
        with pool() as workers:
            workers.submit(abs, 1).result()
            print(list(workers.map(lambda x: settings.VALUE.get() + x, [1, 2])))
        """,
        "[5, 6]",
    ),
}
HEAD = """
import gc, sys, types, weakref
import settings
from datamat.parallel import PathosExecutor
class Thing:
    pass
def pool(**options):
    return PathosExecutor(1, start_method=method, **options)
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", GLOBALS)
def test_globals_of_the_program(what: str, tmp_path: Path) -> None:
    """Callables of the main module bring their globals, but do not overwrite what the worker has made of them."""
    (tmp_path / "settings.py").write_text("import contextvars\nVALUE = contextvars.ContextVar('v', default=4)\n")
    (tmp_path / "code.txt").write_text(CODE)
    body, expected = GLOBALS[what]
    loop = "for method in ('fork', 'forkserver', 'spawn'):\n" + textwrap.indent(textwrap.dedent(body), "    ")

    assert run(["-W", "error", "-c", HEAD + CODE + loop], tmp_path) == f"{expected}\n" * 3


def test_class_stays_the_same_when_more_code_of_its_module_comes(tmp_path: Path) -> None:
    """Workers have inherited it, and hold instances already."""
    (tmp_path / "code.txt").write_text(
        "class Thing:\n    pass\n"
        "seen = []\n"
        "def check(thing):\n    seen.append(thing)\n    return isinstance(thing, Thing), len(seen)\n"
        "def make():\n    return Thing()\n"
    )
    script = (
        "import sys, types\nfrom datamat.parallel import PathosExecutor\n"
        "sys.modules['nowhere'] = types.ModuleType('nowhere')\n"
        "class Job:\n    def __init__(self, thing):\n        self.thing = thing\n"
        "    def run(self):\n        return check(self.thing)\n"
        "codes = vars(sys.modules['nowhere']), {'__name__': 'elsewhere'}\n"
        "for method, code in [(method, code) for method in ('fork', 'forkserver', 'spawn') for code in codes]:\n"
        "    exec(open('code.txt').read(), code)\n"
        "    check, job = code['check'], Job(code['Thing']())\n"
        "    with PathosExecutor(1, start_method=method) as pool:\n"
        "        one, made, two = [pool.submit(each) for each in (job.run, code['make'], job.run)]\n"
        "        print(one.result(), isinstance(made.result(), code['Thing']), two.result())\n"
    )

    assert run(["-c", script], tmp_path) == "(True, 1) True (True, 2)\n" * 6


@pytest.mark.long
def test_pools_that_fork_at_the_same_time_keep_their_initializers(tmp_path: Path) -> None:
    """One pool starts completely while another is about to fork its worker."""
    script = (
        "import os\nfrom datamat.parallel import PathosExecutor\nnames, inner = [], []\n"
        "def pool(*names_of_it):\n"
        "    return PathosExecutor(1, start_method='fork', initializer=names.append, initargs=names_of_it)\n"
        "def told():\n    return list(names)\n"
        "def meanwhile():\n"
        "    if not inner:\n"
        "        inner.append(pool('inner'))\n"
        "        print(inner[0].submit(told).result(), flush=True)\n"
        "os.register_at_fork(before=meanwhile)\n"
        "with pool('outer') as outer:\n"
        "    print(outer.submit(told).result())\n"
        "inner[0].shutdown()\n"
    )

    assert run(["-c", script], tmp_path) == "['inner']\n['outer']\n"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["prepend", pytest.param("importlib", marks=pytest.mark.long)])
def test_pytest_runs_once(mode: str, tmp_path: Path) -> None:
    """A test function runs it, with pytest's captured streams and rewritten modules."""
    body = ANALYZER + f'\ndef test_it(capfd):\n    go()\n    assert capfd.readouterr().out.count("{EXPECTED}") == 3\n'
    (tmp_path / "test_user.py").write_text(body)

    output = run(["-m", "pytest", "-p", "no:cacheprovider", f"--import-mode={mode}", "test_user.py"], tmp_path)

    assert "1 passed" in output


def test_notebook_runs_once(method: str, tmp_path: Path) -> None:
    """The cells run in a real kernel; after a class is redefined, the next call uses the new one."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        'print("top")\n' + ANALYZER,
        f'go("{method}")',
        "FACTOR = 100\ndef helper(x):\n    return x * FACTOR + 5",
        (
            "class Analyzer(Analyzer):\n"
            "    def fit(self, target, frame):\n        return Answer(target, helper(frame), Colour.BLUE)"
        ),
        f'go("{method}")',
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    nbclient.NotebookClient(
        book, timeout=40, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    text = "".join(out.get("text", "") for cell in book.cells for out in cell.outputs if out.get("name") == "stdout")
    assert text.count("top") == 1, text
    assert text.count(EXPECTED) == 1, text
    assert "RESULT [105, 205, 305]" in text, text


INTERRUPTED_CELL = """
import time
from datamat.parallel import PathosExecutor
def rest(seconds):
    time.sleep(seconds)
    return seconds
with PathosExecutor(2, start_method={method!r}) as pool:
    print(pool.submit(rest, 0).result(), flush=True)
    list(pool.map(rest, [600] * 4))
"""


@pytest.mark.timeout(300)
def test_stop_button_of_a_notebook_leaves_it_usable(method: str, tmp_path: Path) -> None:
    """The cell ends with KeyboardInterrupt, and the next one can run a pool of the same function."""
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=environment())
    client = manager.blocking_client()
    printed = []

    def hear(message):
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])
            if "".join(printed) == "0\n":  # it may come in two pieces
                manager.interrupt_kernel()

    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        stopped = client.execute_interactive(
            INTERRUPTED_CELL.format(method=method), timeout=120, output_hook=hear, store_history=False
        )
        after = f"with PathosExecutor(2, start_method={method!r}) as pool: print(list(pool.map(rest, [0, 0])))"
        usable = client.execute_interactive(after, timeout=120, output_hook=hear)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)

    assert stopped["content"]["ename"] == "KeyboardInterrupt"
    assert usable["content"]["status"] == "ok"
    assert "".join(printed) == "0\n[0, 0]\n"


@pytest.mark.long
def test_module_that_writes_data_when_imported_is_not_imported_again(tmp_path: Path) -> None:
    """Nor is it on the next day, when its run has nothing to do and starts no pool of its own."""
    (tmp_path / "library.py").write_text(
        'print("top", flush=True)\n'
        "from datamat import materialize\n"
        "def square(n):\n    return {'square': n * n}\n"
        "materialize(square, range(3), 'out', progress=False)\n"
    )
    script = (
        "import library\nfrom datamat import PathosExecutor\n"
        "for method in ('fork', 'forkserver', 'spawn'):\n"
        "    with PathosExecutor(1, start_method=method) as pool:\n"
        "        print(pool.submit(library.square, 3).result())\n"
    )

    for _ in range(2):
        assert run(["-c", script], tmp_path) == "top\n" + "{'square': 9}\n" * 3


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_is_written_by_a_method_of_a_test(method: str, tmp_path: Path) -> None:
    """Pytest rewrites the assertions of a test module, so its code differs in a process without pytest."""
    (tmp_path / "test_user.py").write_text(
        "from datamat import WorkerOptions, load, materialize\n"
        "class TestUser:\n"
        "    def sample(self, number):\n"
        "        assert number >= 0\n"
        "        return {'number': number}\n"
        "    def test_it(self, tmp_path):\n"
        f"        options = WorkerOptions(num_workers=2, start_method='{method}')\n"
        "        materialize(self.sample, range(20), tmp_path / 'out', workers=options, progress=False)\n"
        "        assert len(load(tmp_path / 'out')) == 20\n"
    )

    assert "1 passed" in run(["-m", "pytest", "-p", "no:cacheprovider", "test_user.py"], tmp_path)


def test_modules_are_found_where_a_notebook_has_gone_to(tmp_path: Path) -> None:
    """The empty entry of the search path is the directory of the moment; modules of an earlier one come along."""
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.py").write_text(f"def where():\n    return {number}\n")
        (tmp_path / folder / f"only_{folder}.py").write_text(f"def what():\n    return {folder!r}\n")
    script = (
        "import os, sys\nsys.path.insert(0, '')\nfrom datamat.parallel import PathosExecutor\n"
        "def ask(*functions):\n"
        "    for method in ('fork', 'forkserver', 'spawn'):\n"
        "        with PathosExecutor(1, start_method=method) as pool:\n"
        "            print(*[pool.submit(function).result() for function in functions])\n"
        "os.chdir('one')\nimport only_one, shared\nask(only_one.what, shared.where)\n"
        "os.chdir('../two')\nimport only_two\nask(only_one.what, only_two.what, shared.where)\n"
    )

    assert run(["-c", script], tmp_path) == "one 0\n" * 3 + "one two 0\n" * 3
