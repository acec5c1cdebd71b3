"""Pools run wherever they are called, without a guard, and the caller's top level runs exactly once.

Each place is a real interpreter in its own process, started as users start it. The program prints "top" when its top
level runs, "user" when the module of its class is imported, and "RESULT ..." with what came back.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("fork", "forkserver", "spawn")

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

def go(method):
    answers = Analyzer(logging.getLogger("analyzer")).train({"a": 1, "b": 2, "c": 3}, method)
    assert all(type(answer) is Answer and answer.colour is Colour.BLUE for answer in answers.values())
    print("RESULT", [answer.value for answer in answers.values()], flush=True)
"""
PROGRAM = 'print("top", flush=True)\n' + ANALYZER + '\ngo("{method}")\n'
EXPECTED = "RESULT [11, 21, 31]"


def run(arguments: list[str], folder: Path, stdin: str | None = None) -> str:
    """Run Python as a user would, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(output: str, word: str = "top") -> None:
    """Assert one run of the top level, and one result."""
    assert output.count(word) == 1, output
    assert output.count(EXPECTED) == 1, output


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return request.param


def test_script_runs_once(method: str, tmp_path: Path) -> None:
    """It has no guard."""
    (tmp_path / "script.py").write_text(PROGRAM.replace("{method}", method))

    check(run(["script.py"], tmp_path))


def test_module_run_by_name_runs_once(method: str, tmp_path: Path) -> None:
    """As by `python -m package.module`."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "module.py").write_text(PROGRAM.replace("{method}", method))

    check(run(["-m", "package.module"], tmp_path))


def test_command_runs_once(method: str, tmp_path: Path) -> None:
    """As by `python -c`."""
    check(run(["-c", PROGRAM.replace("{method}", method)], tmp_path))


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input_runs_once(method: str, arguments: list[str], tmp_path: Path) -> None:
    """The program is piped into the interpreter."""
    check(run(arguments, tmp_path, stdin=PROGRAM.replace("{method}", method)))


def test_interactive_session_runs_once(method: str, tmp_path: Path) -> None:
    """The REPL reads it statement by statement."""
    # The REPL ends a block at an empty line, so there is one after each statement and none inside.
    statements = [ast.unparse(node) for node in ast.parse(PROGRAM.replace("{method}", method)).body]
    source = "".join("\n".join(filter(None, text.splitlines())) + "\n\n" for text in statements)

    check(run(["-i", "-q"], tmp_path, stdin=source))


def test_imported_class_runs_once(method: str, tmp_path: Path) -> None:
    """The script that calls it has no guard; workers may import the module, not the script."""
    (tmp_path / "library.py").write_text(ANALYZER)
    (tmp_path / "script.py").write_text(f'print("top", flush=True)\nimport library\nlibrary.go("{method}")\n')

    check(run(["script.py"], tmp_path))


def test_import_that_runs_a_pool_runs_once(method: str, tmp_path: Path) -> None:
    """The pool is at the top level of a module that is being imported."""
    (tmp_path / "library.py").write_text(PROGRAM.replace("{method}", method))

    check(run(["-c", "import library"], tmp_path))


def test_module_that_runs_a_pool_when_imported_is_not_imported_again(method: str, tmp_path: Path) -> None:
    """A second pool uses the module; its workers must not import it."""
    (tmp_path / "library.py").write_text(PROGRAM.replace("{method}", method))

    output = run(["-c", f'import library\nlibrary.go("{method}")\n'], tmp_path)

    assert output.count("top") == 1, output
    assert output.count(EXPECTED) == 2, output


def test_module_that_a_worker_cannot_import_is_sent_by_value(method: str, tmp_path: Path) -> None:
    """A worker may not find what the caller found, as when a file has been deleted since."""
    (tmp_path / "library.py").write_text(ANALYZER)
    script = (
        "import library, os, shutil\nfrom datamat.parallel import byvalue\n"
        "byvalue.is_by_value('library')\nos.unlink('library.py')\n"
        "shutil.rmtree('__pycache__', ignore_errors=True)\n"
        f"library.go('{method}')\n"
    )

    assert run(["-c", script], tmp_path).count(EXPECTED) == 1


def test_module_object_travels_by_name(method: str, tmp_path: Path) -> None:
    """Dill would send the content of the caller's own modules, and overwrite the worker's with it."""
    (tmp_path / "settings.py").write_text(
        "import contextvars, threading\nVALUE = contextvars.ContextVar('v', default=4)\n"
    )
    script = (
        "import settings\nfrom datamat.parallel import PathosExecutor\n"
        "def read(x):\n    return settings.VALUE.get() + x\n"
        f"with PathosExecutor(1, start_method='{method}') as pool:\n"
        "    pool.submit(abs, 1).result()\n"
        "    print(list(pool.map(read, [1, 2])))\n"
    )

    assert run(["-W", "error", "-c", script], tmp_path) == "[5, 6]\n"


def test_global_set_by_the_initializer_stays_until_it_is_rebound(method: str, tmp_path: Path) -> None:
    """A callable of the main module brings its globals, but does not overwrite what the worker made of them."""
    script = (
        "from datamat.parallel import PathosExecutor\nmodel = None\n"
        "def load():\n    global model\n    model = 'loaded'\n"
        "def use(x):\n    return model, x\n"
        "def use_too(x):\n    return model\n"
        f"with PathosExecutor(1, start_method='{method}', initializer=load) as pool:\n"
        "    pool.submit(abs, 1).result()\n"
        "    print(list(pool.map(use, [1])), list(pool.map(use_too, [1])))\n"
        "    model = 'rebound'\n"
        "    print(list(pool.map(use_too, [2])))\n"
    )

    assert run(["-c", script], tmp_path) == "[('loaded', 1)] ['loaded']\n['rebound']\n"


def test_global_set_by_the_initializer_is_seen_by_code_that_comes_later(method: str, tmp_path: Path) -> None:
    """In a module that no worker could import, which nothing inherited belongs to, and in what is no module."""
    (tmp_path / "code.txt").write_text(
        "model = None\n"
        "def load():\n    global model\n    model = 'loaded'\n"
        "def use():\n    return model\n"
        "def use_too():\n    return use(), model\n"
    )
    script = (
        "import sys, types\nfrom datamat.parallel import PathosExecutor\n"
        "module = types.ModuleType('nowhere')\nmodule.__file__ = 'code.txt'\nsys.modules['nowhere'] = module\n"
        "elsewhere = {'__name__': 'elsewhere'}\n"
        "for code in (vars(module), elsewhere):\n"
        "    exec(open('code.txt').read(), code)\n"
        "load_it = module.load\ndef load_module():\n    load_it()\n"
        "for code, load in ((vars(module), load_module), (elsewhere, elsewhere['load'])):\n"
        f"    with PathosExecutor(1, start_method='{method}', initializer=load) as pool:\n"
        "        pool.submit(abs, 1).result()\n"
        "        print(pool.submit(code['use']).result(), pool.submit(code['use_too']).result())\n"
        "        code['model'] = 'rebound'\n"
        "        print(pool.submit(code['use_too']).result())\n"
    )

    each = "loaded ('loaded', 'loaded')\n('rebound', 'rebound')\n"
    assert run(["-c", script], tmp_path) == each * 2


def test_container_changed_in_place_stays(method: str, tmp_path: Path) -> None:
    """The initializer changes it, and so do calls that send the same function again."""
    script = (
        "from datamat.parallel import PathosExecutor\nstate = {}\n"
        "def load():\n    state['model'] = 10\n"
        "def use(x):\n    state[x] = True\n    return sorted(map(str, state))\n"
        f"with PathosExecutor(1, start_method='{method}', initializer=load) as pool:\n"
        "    print([pool.submit(use, i).result() for i in range(3)])\n"
        "    state = {}\n"
        "    print(pool.submit(use, 3).result())\n"
    )

    assert run(["-c", script], tmp_path) == "[['0', 'model'], ['0', '1', 'model'], ['0', '1', '2', 'model']]\n['3']\n"


def test_workers_see_a_global_that_was_rebound_before_it_was_sent(method: str, tmp_path: Path) -> None:
    """Also where they inherited another one, to which an initializer has bound yet another."""
    script = (
        "from datamat.parallel import PathosExecutor\nmodel = None\n"
        "def load():\n    global model\n    model = 'loaded'\n"
        "def use():\n    return model\n"
        f"with PathosExecutor(1, start_method='{method}', initializer=load) as pool:\n"
        "    pool.submit(abs, 1).result()\n"
        "    model = 'rebound'\n"
        "    print(pool.submit(use).result())\n"
    )

    assert run(["-c", script], tmp_path) == "rebound\n"


def test_global_set_to_none_is_none_in_workers(method: str, tmp_path: Path) -> None:
    """Where what it was bound to is gone for good, in the parent."""
    script = (
        "import gc\nfrom datamat.parallel import PathosExecutor\n"
        "class Model:\n    pass\n"
        "model = Model()\n"
        "def use():\n    return type(model).__name__\n"
        f"with PathosExecutor(1, start_method='{method}') as pool:\n"
        "    print(pool.submit(use).result(), pool.submit(use).result())\n"
        "    model = None\n    gc.collect()\n"
        "    print(pool.submit(use).result())\n"
    )

    assert run(["-c", script], tmp_path) == "Model Model\nNoneType\n"


def test_class_stays_the_same_when_more_code_of_its_module_comes(method: str, tmp_path: Path) -> None:
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
        "for code in (vars(sys.modules['nowhere']), {'__name__': 'elsewhere'}):\n"
        "    exec(open('code.txt').read(), code)\n"
        "    check, job = code['check'], Job(code['Thing']())\n"
        f"    with PathosExecutor(1, start_method='{method}') as pool:\n"
        "        one, made, two = [pool.submit(each) for each in (job.run, code['make'], job.run)]\n"
        "        print(one.result(), isinstance(made.result(), code['Thing']), two.result())\n"
    )

    assert run(["-c", script], tmp_path) == "(True, 1) True (True, 2)\n" * 2


def test_globals_are_not_kept_for_a_pool_that_has_ended(method: str, tmp_path: Path) -> None:
    """A list of the caller's data is freed: no code that was sent uses it."""
    script = (
        "import gc, weakref\nfrom datamat.parallel import PathosExecutor\n"
        "class Thing:\n    pass\n"
        "data = [Thing()]\nthing = weakref.ref(data[0])\n"
        f"with PathosExecutor(1, start_method='{method}') as pool:\n"
        "    pool.submit(abs, 1).result()\n"
        "del data\ngc.collect()\nprint(thing())\n"
    )

    assert run(["-c", script], tmp_path) == "None\n"


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


def test_thread_runs_once(method: str, tmp_path: Path) -> None:
    """A thread creates and uses the pool."""
    script = PROGRAM.replace(
        'go("{method}")', f'thread = threading.Thread(target=go, args=("{method}",))\nthread.start()\nthread.join()'
    )
    (tmp_path / "script.py").write_text(script)

    check(run(["script.py"], tmp_path))


def test_exec_namespace_runs_once(method: str, tmp_path: Path) -> None:
    """The code is in a dictionary that belongs to no module."""
    (tmp_path / "code.txt").write_text(PROGRAM.replace("{method}", method))
    script = 'exec(compile(open("code.txt").read(), "code.txt", "exec"), {"__name__": "elsewhere"})'

    check(run(["-c", script], tmp_path))


@pytest.mark.parametrize("name", ["__main__", "other"])
def test_runpy_runs_once(method: str, name: str, tmp_path: Path) -> None:
    """The `%run` of notebooks and some test tools use `runpy.run_path`."""
    (tmp_path / "script.py").write_text(PROGRAM.replace("{method}", method))

    check(run(["-c", f'import runpy; runpy.run_path("script.py", run_name="{name}")'], tmp_path))


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_pytest_runs_once(method: str, mode: str, tmp_path: Path) -> None:
    """A test function runs it, with pytest's captured streams and rewritten modules."""
    body = ANALYZER + f'\ndef test_it(capfd):\n    go("{method}")\n    assert "{EXPECTED}" in capfd.readouterr().out\n'
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
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": str(ROOT)})
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


def test_package_that_only_the_caller_can_find_travels_by_value(method: str, tmp_path: Path) -> None:
    """Found through a `__path__` that the program has extended, as plug-in systems do; with the modules inside it."""
    for folder in ("app", "plugins/extra"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "plugins/extra/tools.py").write_text(ANALYZER)
    program = (
        f"import app; app.__path__.append('plugins'); from app.extra.tools import go; print('top'); go({method!r})"
    )

    output = run(["-c", program], tmp_path)

    check(output)


def test_module_that_writes_data_when_imported_is_not_imported_again(method: str, tmp_path: Path) -> None:
    """Nor is it on the next day, when its run has nothing to do and starts no pool of its own."""
    (tmp_path / "library.py").write_text(
        'print("top", flush=True)\n'
        "from datamat import materialize\n"
        "def square(n):\n    return {'square': n * n}\n"
        "materialize(square, range(3), 'out', progress=False)\n"
    )
    script = (
        "import library\nfrom datamat import PathosExecutor\n"
        f"with PathosExecutor(1, start_method='{method}') as pool:\n"
        "    print(pool.submit(library.square, 3).result())\n"
    )

    for _ in range(2):
        assert run(["-c", script], tmp_path) == "top\n{'square': 9}\n"


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


def test_modules_are_found_where_a_notebook_has_gone_to(method: str, tmp_path: Path) -> None:
    """The empty entry of the search path is the directory of the moment; modules of an earlier one come along."""
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared.py").write_text(f"def where():\n    return {number}\n")
        (tmp_path / folder / f"only_{folder}.py").write_text(f"def what():\n    return {folder!r}\n")
    script = (
        "import os, sys\nsys.path.insert(0, '')\nfrom datamat.parallel import PathosExecutor\n"
        "def ask(*functions):\n"
        f"    with PathosExecutor(1, start_method='{method}') as pool:\n"
        "        print(*[pool.submit(function).result() for function in functions])\n"
        "os.chdir('one')\nimport only_one, shared\nask(only_one.what, shared.where)\n"
        "os.chdir('../two')\nimport only_two\nask(only_one.what, only_two.what, shared.where)\n"
    )

    assert run(["-c", script], tmp_path) == "one 0\none two 0\n"
