"""Programs as strangers write them on their first day, each run as a script, in a notebook, and by every start method.

What lies in `programs/` is all there is to add: a program that uses the public names alone, makes its own input (in
`raw`, unless it is there), writes below `out`, and compares what it reads back with what a plain loop gives. Its
docstring says what it prints. Where it needs modules of its own, they lie in the folder of its name.

    # %% parameters                              the cell that a run replaces, as papermill does
    START_METHOD, NUM_WORKERS = None, None

Every program is run like this, and nothing but its directory is looked at from outside:

    a script, as it stands ────> out    the bytes that all the others must give
     ├─ again                           there is nothing to do, and no file is touched
     ├─ fork, forkserver, spawn         with other numbers of workers, on copies of the same input
     ├─ killed, all processes at once   at a file operation of its own; run again by one of the start methods, in turn
     └─ in a notebook                   in a kernel that other programs have used before it

On commit, it is a script that a process forks which has imported everything, by a start method that the sample seed
chooses, twice; and a few programs are notebooks.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import uuid
import zlib
from typing import TYPE_CHECKING

import psutil
import pytest
import small_pairs
from faults.fault_injection import Control, Fault, JobServer, compiled, left_behind

from datamat import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = sorted((pathlib.Path(__file__).parent / "programs").glob("*.py"))
METHODS = {"fork": 1, "forkserver": 3, "spawn": 2}
"""The start methods, each with another number of workers."""
CHEAPLY = (*("fork",) * 10, "forkserver", "spawn")
"""Those of the programs on commit, in turn: the others start interpreters."""

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "NO_ALBUMENTATIONS_UPDATE": "1"}
LIMIT_S = 100
PARAMETERS = "START_METHOD, NUM_WORKERS = None, None"
MARK = "DATAMAT_ORDINARY"
BAR = re.compile(r"[\w. -]+: +\d+%\|[^|]*\|[^\]]*\]|[\w. -]+ +\d+% [█░]+ .*")
"""A bar of tqdm, or datamat's own, which a slow machine shows once in half a minute."""
SUMMARY = re.compile(r"\S.*: (complete|nothing to do|stopped by|finished as far).* records, .*")

_OF_THE_PLACE = re.compile(r"(^|/)(_index/.*|manifest\.json|croissant\.json)$")

pytestmark = [pytest.mark.timeout(4 * LIMIT_S)]


@dataclasses.dataclass(frozen=True)
class Program:
    """One of `programs/`.

    Attributes:
        path: file of the program.
        text: source of the program.
    """

    path: pathlib.Path
    text: str

    @property
    def turn(self) -> int:
        """Its number among all programs, for what they do in turn."""
        return PROGRAMS.index(self.path)

    @functools.cached_property
    def promises(self) -> dict[str, str]:
        """What the last lines of its docstring say: what it `Prints`, `Says` on standard error, does `Again`.

        `Place` says why the manifest and the index differ from folder to folder.
        """
        lines = (ast.get_docstring(ast.parse(self.text)) or "").splitlines()
        return dict(line.split(": ", 1) for line in lines if re.match(r"(Prints|Says|Again|Place): ", line))

    def with_parameters(self, method: str | None, num_workers: int | None) -> str:
        """Return its text with the parameters of a run."""
        assert self.text.count(PARAMETERS) == 1, f"{self.path.name}: want the line {PARAMETERS!r}"
        return self.text.replace(PARAMETERS, f"START_METHOD, NUM_WORKERS = {method!r}, {num_workers!r}")

    def lay_out(self, folder: pathlib.Path, method: str | None = None, num_workers: int | None = None) -> None:
        """Write it into a folder, with its modules beside it, as a user has them."""
        modules = self.path.with_suffix("")
        if modules.is_dir():
            shutil.copytree(modules, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        folder.mkdir(exist_ok=True)
        (folder / self.path.name).write_text(self.with_parameters(method, num_workers))

    def cells(self, method: str | None = None) -> list[str]:
        """Return it as the cells of a notebook, which `# %%` begins."""
        return re.split(r"^# %%.*\n", self.with_parameters(method, None), flags=re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of a program ended.

    Attributes:
        code: exit code, negative for a signal.
        printed: what it wrote to standard output.
        said: what it wrote to standard error.
        num_left: processes that it left behind.
    """

    code: int
    printed: str
    said: str
    num_left: int

    @property
    def other_errors(self) -> list[str]:
        """The lines on standard error that are neither bars nor summaries, whose further lines are indented."""
        lines = re.split(r"[\r\n]", BAR.sub("\n", self.said))
        return [line for line in lines if line.strip() and not line.startswith("  ") and not SUMMARY.fullmatch(line)]

    @property
    def summaries(self) -> list[str]:
        """The summaries of the runs in it."""
        return [line for line in re.split(r"[\r\n]", self.said) if SUMMARY.fullmatch(line)]


def run(folder: pathlib.Path, *arguments: str, stdin: str | None = None, **environment: str) -> Ended:
    """Run Python in a folder as a user would; end what it leaves behind."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), MARK: mark, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, said = process.communicate(stdin, timeout=LIMIT_S)
        finally:
            num_left = reap(mark)
            process.kill()
    return Ended(process.returncode, printed, said, num_left)


def reap(mark: str) -> int:
    """Wait for the processes whose environment bears the mark; kill those that stay, and return their number."""
    _, alive = psutil.wait_procs(marked(mark), timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(alive)


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes whose environment bears the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def check(program: Program, ended: Ended) -> None:
    """Check that a program succeeded and printed what its docstring says, and nothing else."""
    assert ended.code == 0, ended.printed + ended.said
    assert ended.printed.splitlines() == program.promises["Prints"].split(" / ")
    pattern = re.compile(program.promises.get("Says", "(?!)"))
    assert [line for line in ended.other_errors if not pattern.search(line)] == []
    assert ended.num_left == 0, "it left processes behind"


def outputs(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the finished directories that a program wrote."""
    return sorted(path.parent for path in (folder / "out").rglob("manifest.json") if ".datamat" not in path.parts)


def check_outputs(folder: pathlib.Path, reference: dict[str, str]) -> None:
    """Check that the directories hold the right bytes, as their manifests say, and nothing unfinished."""
    assert small_pairs.digests(folder / "out") == reference
    for output in outputs(folder):
        assert verify(output).ok
        assert left_behind(output) == []


def check_elsewhere(story: Story, folder: pathlib.Path) -> None:
    """Check the program's output in another folder: the same bytes, or the same records where the place counts."""
    wanted, found = story.digests, small_pairs.digests(folder / "out")
    if "Place" in story.program.promises:
        wanted, found = ({name: by[name] for name in by if not _OF_THE_PLACE.search(name)} for by in (wanted, found))
    assert found == wanted
    check_outputs(folder, small_pairs.digests(folder / "out"))


def touched(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of change of each visible file below `out`."""
    found = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file() and ".datamat" not in path.parts:
            status = path.stat()
            found[str(path)] = (status.st_ino, status.st_mtime_ns)
    return found


@dataclasses.dataclass
class Story:
    """A program, run once as it stands, and what may be done with it from there.

    Attributes:
        program: the program.
        folder: where it was run.
        start: runs it there.
        first: result of that run.
        num_operations: number of operations on files below `out`; 0 without the shim.
        digests: digests of the files that it wrote.
    """

    program: Program
    folder: pathlib.Path
    start: Callable[[], Ended]
    first: Ended
    num_operations: int
    digests: dict[str, str]

    def beside(self, name: str) -> pathlib.Path:
        """Return a new folder with the same input files."""
        folder = self.folder.parent / name
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("out", "__pycache__"), symlinks=True)
        return folder

    def by_method(self, method: str) -> tuple[Ended, pathlib.Path]:
        """Run it on the same input by a start method."""
        folder = self.beside(method)
        self.program.lay_out(folder, method, METHODS[method])
        return run(folder, self.program.path.name), folder


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path | None:
    """The library that counts operations on files and kills at one of them; None where it cannot be compiled."""
    with contextlib.suppress(pytest.skip.Exception):
        return compiled(tmp_path_factory.mktemp("shim"))
    return None


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    """A process that forks scripts."""
    server = JobServer(None, tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


SLOW = {"11_tf_example": [pytest.mark.long]}  # each of its processes imports TensorFlow


@pytest.fixture(
    scope="module", params=[pytest.param(path, id=path.stem, marks=SLOW.get(path.stem, ())) for path in PROGRAMS]
)
def program(request: pytest.FixtureRequest) -> Program:
    text = request.param.read_text()
    for package in _packages_missing(text, request.param.with_suffix("")):
        pytest.skip(f"{package} is not installed: make test-clients runs this program")
    return Program(request.param, text)


def _packages_missing(text: str, own: pathlib.Path) -> list[str]:
    """Return the packages that a program imports, and that are neither installed nor beside it."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    tops = sorted({name.partition(".")[0] for name in names})
    return [top for top in tops if not list(own.glob(f"{top}*")) and importlib.util.find_spec(top) is None]


@pytest.fixture(scope="module")
def story(
    request: pytest.FixtureRequest, program: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """The program, run once in a folder of its own."""
    base = tmp_path_factory.mktemp(program.path.stem)
    folder = base / "first"
    if request.config.getoption("--commit"):
        method = CHEAPLY[(program.turn + request.config.option.sample_seed) % len(CHEAPLY)]
        program.lay_out(folder, method, METHODS[method])
        script, forks = folder / program.path.name, request.getfixturevalue("forks")

        def start() -> Ended:
            return Ended(*forks.run_script(script, LIMIT_S, PYTHONPATH=str(ROOT), **QUIET))

        first = start()
        yield Story(program, folder, start, first, 0, small_pairs.digests(folder / "out"))
        shutil.rmtree(base)
        return
    program.lay_out(folder)
    shim = request.getfixturevalue("shim")
    environment, count = {}, 0
    if shim:
        control = Control(base / "control")
        control.set(Fault(), folder / "out")
        environment = control.environment(shim)
        environment = {name: environment[name] for name in ("LD_PRELOAD", "FAULT_CONTROL")}
    first = run(folder, program.path.name, **environment)
    if shim:
        count = control.count
    start = functools.partial(run, folder, program.path.name)
    yield Story(program, folder, start, first, count, small_pairs.digests(folder / "out"))
    shutil.rmtree(base)


@pytest.mark.sample(2)
def test_script(story: Story) -> None:
    """As it stands, its numbers are those of a plain loop, and each directory is whole."""
    check(story.program, story.first)
    assert bool(story.first.other_errors) == ("Says" in story.program.promises), story.first.said
    assert outputs(story.folder)
    check_outputs(story.folder, story.digests)


@pytest.mark.sample(3)
def test_again(story: Story) -> None:
    """The same script in the same place has nothing to do and touches nothing, unless it makes its input again."""
    before = touched(story.folder)

    ended = story.start()

    check(story.program, ended)
    if "Again" not in story.program.promises:
        assert [line for line in ended.summaries if "nothing to do" not in line] == []
        assert touched(story.folder) == before
    check_outputs(story.folder, small_pairs.digests(story.folder / "out"))


@pytest.mark.long
def test_start_methods(story: Story) -> None:
    """Each start method, with its own number of workers, gives the same bytes."""
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(story.by_method, METHODS))

    for ended, folder in found:
        check(story.program, ended)
        check_elsewhere(story, folder)


@pytest.mark.long
def test_killed(story: Story, shim: pathlib.Path | None) -> None:
    """All processes are killed at once, somewhere; run again by a start method, it ends with the same bytes."""
    if not shim:
        pytest.skip("the shim needs Linux and a C compiler")
    at = max(1, story.num_operations * (1 + zlib.crc32(story.program.path.stem.encode()) % 8) // 10)
    for attempt in range(4):  # a run that a busy machine slows down has more operations than one that it does not
        folder = story.beside(f"killed {attempt}")
        control = Control(folder.parent / f"control of the killed {attempt}")
        control.set(Fault("kill group", at=max(1, at >> attempt)), folder / "out")
        environment = control.environment(shim)
        environment = {name: environment[name] for name in ("LD_PRELOAD", "FAULT_CONTROL")}
        killed = run(folder, story.program.path.name, **environment)
        if killed.code:
            break
    method = [*METHODS][story.program.turn % len(METHODS)]
    story.program.lay_out(folder, method, METHODS[method])
    ended = run(folder, story.program.path.name)

    assert (killed.code, killed.num_left) == (-9, 0), killed.said
    check(story.program, ended)
    check_elsewhere(story, folder)


@pytest.mark.long
@pytest.mark.parametrize("way", ["module", "input"])
def test_other_ways_to_start(tmp_path: pathlib.Path, way: str) -> None:
    """`python -m package.module` and standard input give what the script gives."""
    path = next(path for path in PROGRAMS if path.stem == "14_blank_cells")
    program = Program(path, path.read_text())
    program.lay_out(tmp_path)
    program.lay_out(tmp_path / "package")
    check(program, run(tmp_path, path.name))
    reference = small_pairs.digests(tmp_path / "out")

    (tmp_path / "out").rename(tmp_path / "out of the script")
    arguments = ["-m", f"package.{path.stem}"] if way == "module" else ["-"]
    ended = run(tmp_path, *arguments, stdin=program.text)

    check(program, ended)
    check_outputs(tmp_path, reference)


class Kernel:
    """A kernel of Jupyter in which one program is run after another, cell by cell.

    Args:
        folder: where it starts.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        from jupyter_client import KernelManager

        quiet = {**QUIET, "PYTHONWARNINGS": "ignore:IProgress not found"}  # as tqdm says without ipywidgets
        self._mark = uuid.uuid4().hex
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(
            cwd=str(folder), env={**os.environ, **quiet, "PYTHONPATH": str(ROOT), MARK: self._mark}
        )
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LIMIT_S)

    def run(self, folder: pathlib.Path, cells: list[str]) -> Ended:
        """Run cells in a folder, once everything that earlier ones left in the namespace is gone."""
        streams: dict[str, list[str]] = {"stdout": [], "stderr": []}

        def hear(message: dict) -> None:
            if message["msg_type"] == "stream":
                streams[message["content"]["name"]].append(message["content"]["text"])

        code = 0
        for cell in [f"%cd -q {folder}", "%reset -f", *cells]:
            reply = self._client.execute_interactive(cell, timeout=LIMIT_S, output_hook=hear)
            if reply["content"]["status"] != "ok":
                streams["stderr"] += ["\n", *(f"{line}\n" for line in reply["content"]["traceback"])]
                code = 1
                break
        return Ended(code, "".join(streams["stdout"]), "".join(streams["stderr"]), 0)

    def close(self) -> int:
        """End the kernel; return how many processes it left."""
        self._client.stop_channels()
        self._manager.shutdown_kernel()
        return reap(self._mark)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that runs all programs, like a notebook that has grown for weeks."""
    pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    yield kernel
    assert kernel.close() == 0, "the kernel left processes behind"


@pytest.mark.sample(9)
def test_notebook(story: Story, kernel: Kernel) -> None:
    """The cells of a notebook give the same bytes, by the start method that suits it."""
    folder = story.beside("notebook")

    ended = kernel.run(folder, story.program.cells())

    check(story.program, ended)
    check_elsewhere(story, folder)
