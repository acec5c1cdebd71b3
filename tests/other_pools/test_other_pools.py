"""The tests that others wrote for their pools pass with ours in their place, but for what is listed with its reason.

On commit these are the tests of `multiprocessing.Pool` by fork; tests/parallel has what all of them rely on.

They are taken from where the packages are installed, loky's from the source that `make test-all` downloads, whose
wheel has none. `facades` has the little that their interfaces need beside ours.
"""

import os
import pathlib
import subprocess
import sys
import tarfile
import unittest
import xml.etree.ElementTree as ET

import pytest
from facades import Pool

pytest.importorskip("test.support", reason="this Python has no `test` package, which multiprocess' tests need")
theirs = pytest.importorskip("multiprocess.tests")

HERE = pathlib.Path(__file__).parent
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

MULTIPROCESS = {
    "test_imap_handle_iterable_exception": "expects that the items of a chunk are lost whose successor the iterable "
    "fails to give; here they run, and their results come before the error",
    "test_make_pool": "counts processes before there is a call: only forked workers are started all at once",
    "test_resource_warning": "sets a private attribute; a pool that nobody shuts down ends without a warning",
}
NOT_OURS = {
    "test_worker_finalization_via_atexit_handler_of_multiprocessing": "starts multiprocess' own pool in a new program",
}
PATHOS = {
    "test_mp.test_chunksize": "a chunksize of 0 gives a list of None in pathos, and is refused here",
}
PATHOS_FILES = ("test_map", "test_star", "test_join", "test_with", "test_mp", "test_random")
_OTHER_BACKEND = "asks for joblib's own class of backends"
_MEMMAPS = "expects that joblib puts arrays into files for its workers; here they are sent as they are"
JOBLIB = {
    "test_nested_parallel_warnings[multiprocessing-multiprocessing-True]": "the warning is from joblib's own backend",
    "test_nested_loop[multiprocessing-back_compat_backend]": "names a backend in a worker that the parent registered",
    "test_backend_context_manager[parallel_backend-multiprocessing]": _OTHER_BACKEND,
    "test_backend_context_manager[parallel_config-multiprocessing]": _OTHER_BACKEND,
    "test_auto_memmap_on_arrays_from_generator[multiprocessing]": _MEMMAPS,
    "test_memmapping_leaks[multiprocessing]": _MEMMAPS,
}
_BROKEN = "expects a broken pool; here the call alone fails, and another worker takes the place of the dead one"
_CLOSED = "joins the Process objects after the pool, which has closed them"
_OTHER_ERRORS = "breaks a part of loky's executor that ours does not have"
_NESTED = "expects an error where pools nest too deeply; here a pool in a worker makes its calls itself"
LOKY = {
    "test_killed_child": _BROKEN,
    "test_exited_child": _BROKEN,
    "test_processes_crash_handling_after_executor_gc": _BROKEN,
    "test_manager_thread_crash_breaks_executor": _OTHER_ERRORS,
    "test_feeder_error_hook_crash_breaks_executor": _OTHER_ERRORS,
    "test_processes_terminate": _CLOSED,
    "test_del_shutdown": _CLOSED,
    "test_shutdown_no_wait": "looks at private attributes, and joins the Process objects that the pool has closed",
    "test_max_workers_negative": "expects the message to end before the number that was passed",
    "test_shutdown_with_sys_exit_at_pickle": "expects a PicklingError where `__reduce__` exits; here `submit`, which "
    "pickles, lets SystemExit through",
    "test_max_depth[True]": _NESTED,
    "test_max_depth[False]": _NESTED,
    "test_serialization": "passes reducers; here copyreg and `__reduce__` are what says how an object is pickled",
    "test_worker_timeout": "expects idle workers to end after a time; here they stay as long as the pool",
    "test_memory_leak_protection": "expects workers that grow to be replaced; here stats() tells their memory",
}
NOT_RUN = {
    "test_killed_child_with_cancelled_work_items": "looks at private attributes; waits minutes for the calls it leaves",
    "test_no_failure_on_large_data_send": "passes; takes half a minute, and memory for 2.2 GB several times",
    "test_no_deprecation_warning_is_raised_on_fork": "asks for workers that are not forked; the facade's are",
}
# Not run: test_maps, which is no test but lines that run on import; and what fails or hangs in pathos without us, too:
# test_pp and test_decorate, for their pool on servers.


def _cases(base, method):
    """Return a class of test cases over our pool."""

    class Ours(Pool):
        start_method = method

    class Cases(base, theirs.ProcessesMixin, unittest.TestCase):
        Pool = Ours

        @pytest.fixture(autouse=True)
        def _replaced(self, monkeypatch):
            monkeypatch.setattr(theirs.multiprocessing, "Pool", Ours)

    for name in [name for name in dir(Cases) if name.startswith("test_")]:
        if name in NOT_OURS:
            setattr(Cases, name, None)
        elif name in MULTIPROCESS and not (name == "test_make_pool" and method == "fork"):
            setattr(Cases, name, pytest.mark.xfail(reason=MULTIPROCESS[name])(_copied(getattr(base, name))))
    return Cases


def _copied(test):
    def copy(self):
        test(self)

    return copy


TestPoolByFork = _cases(theirs._TestPool, "fork")
TestPoolByForkserver = pytest.mark.long(_cases(theirs._TestPool, "forkserver"))
TestPoolBySpawn = pytest.mark.long(_cases(theirs._TestPool, "spawn"))
TestErrors = pytest.mark.long(_cases(theirs._TestPoolWorkerErrors, "spawn"))
TestLifetime = pytest.mark.long(_cases(theirs._TestPoolWorkerLifetime, "fork"))


@pytest.mark.long
@pytest.mark.parametrize("name", PATHOS_FILES)
def test_suite_of_pathos(tmp_path, name):
    """Each file runs in a process of its own, as in pathos; thrice at most, since some of theirs measure time."""
    import pathos.tests

    file = pathlib.Path(pathos.tests.__file__).parent / f"{name}.py"
    expected = {known.partition(".")[2] for known in PATHOS if known.startswith(f"{name}.")}

    for _ in range(3):
        passed, failed = _run(tmp_path, "facade_of_pathos", [file], "not test_pp")
        if failed == expected:
            break

    assert failed == expected
    assert passed


@pytest.mark.long
def test_suite_of_joblib(tmp_path):
    """All tests that a backend of processes goes through, with ours as that backend."""
    joblib = pytest.importorskip("joblib", reason="joblib comes with the extra `interop`")
    file = pathlib.Path(joblib.__file__).parent / "test" / "test_parallel.py"

    selected = "multiprocessing and not loky and not threading and not spawn"
    passed, failed = _run(tmp_path, "facade_of_joblib", [file], selected)

    assert failed == set(JOBLIB)
    assert len(passed) >= 50


@pytest.mark.long
def test_suite_of_loky(tmp_path):
    """All tests of its executor run; twice at most, since some of theirs measure time."""
    folder = pathlib.Path(sys.prefix) / "sdists"
    source = next(folder.glob("loky-*.tar.gz"), None)
    if source is None:
        pytest.skip(f"{folder} lacks the source of loky, whose wheel has no tests: make test-all downloads it")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / source.name.removesuffix(".tar.gz")
    file = root / "tests" / "test_process_executor_spawn.py"

    for _ in range(2):
        passed, failed = _run(root, "facade_of_loky", [file], " and ".join(f"not {name}" for name in NOT_RUN))
        if failed == set(LOKY):
            break

    assert failed == set(LOKY)
    assert len(passed) >= 33


def _run(tmp_path, plugin, files, selected):
    """Return the names of the tests that passed, and of those that failed."""
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "-q", "-c", os.devnull,
         "--rootdir", tmp_path, "--timeout", "100", f"--junitxml={report}", "-k", selected, *files],
        cwd=tmp_path, check=False, timeout=800, capture_output=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])},
    )  # fmt: skip
    cases = list(ET.parse(report).iter("testcase"))
    failed = {case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None}
    return {case.get("name") for case in cases if case.find("skipped") is None} - failed, failed
