"""Shared by all tests: the two tiers, and a run that ends whatever one test does."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import multiprocessing.util
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time
from typing import TYPE_CHECKING

import hypothesis
import pytest
from leftovers import no_process_left

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["no_process_left"]

STUCK_S = 120.0
"""How long after its limit a test is ended by force: it is stuck where Python cannot interrupt it."""

# A busy machine makes examples slowly, which says nothing about the code.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

SKIPPED = "datamat/skipped"
"""Key in pytest's cache: for each test file, the ids of the tests that its last run skipped."""

_stderr = pytest.StashKey[int]()
_skipped = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--commit", action="store_true", help="leave out the long tier, as `make test` does")
    parser.addoption("--sample-seed", type=int, help="with --commit: which cases of sampled tests run")
    parser.addoption("--skipped", action="store_true", help="run only tests/interop and what the last run skipped")
    parser.addini("stuck_s", "seconds after its limit at which a test that cannot be interrupted ends its process")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the true standard error, for the stacks of a test that is stuck.

    A shell starts what it runs in the background with SIGINT ignored, and programs that tests interrupt inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.sample_seed is None:
        drawn = random.SystemRandom().randrange(1000)
        config.option.sample_seed = getattr(config, "workerinput", {}).get("sample_seed", drawn)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[_stderr] = os.dup(2)
    config.stash[_skipped] = {}
    if config.getoption("--skipped"):
        config.stash[_skipped] = config.cache.get(SKIPPED, {})
    if config.getoption("--commit"):
        # Only a power cut shows the difference: tests/faults makes its own, and the long tier waits for the disk.
        os.fsync = lambda descriptor: None
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Account(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Have the workers of xdist sample the same cases."""
    node.workerinput["sample_seed"] = node.config.option.sample_seed


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"sampled cases: --sample-seed {config.option.sample_seed}" if config.getoption("--commit") else None


class _Account:
    """Adds up how long each part of the suite took, and what it skipped, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.begun = time.monotonic()
        self.seconds: collections.Counter[str] = collections.Counter()
        self.outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.skipped: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        part = _part_of(report.nodeid)
        self.seconds[part] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[part][report.outcome] += 1
        self._note_skipped(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.outcomes[_part_of(report.nodeid)]["skipped"] += 1
        self._note_skipped(report)

    def pytest_sessionfinish(self) -> None:
        if self.config.pluginmanager.hasplugin("cacheprovider") and not self.config.getoption("--skipped"):
            self.config.cache.set(SKIPPED, {**self.config.cache.get(SKIPPED, {}), **self.skipped})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a table of parts, slowest first, after a run of more than one."""
        if len(self.seconds) < 2:
            return
        terminalreporter.section(f"time by part: {time.monotonic() - self.begun:.0f} s in all")
        terminalreporter.write_line(f"{'':20}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
        for part, seconds in self.seconds.most_common():
            counts = "".join(f"{self.outcomes[part][outcome]:8}" for outcome in ("passed", "failed", "skipped"))
            terminalreporter.write_line(f"{part:20}{seconds:8.1f}{counts}")

    def _note_skipped(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        names = self.skipped.setdefault(report.nodeid.partition("::")[0], [])
        if report.skipped and not hasattr(report, "wasxfail") and report.nodeid not in names:
            names.append(report.nodeid)


def _part_of(nodeid: str) -> str:
    """Return the folder of tests/ that a test is in, "." for tests/ itself."""
    parts = pathlib.PurePath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else "."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """End this process where a test is stuck in native code; xdist then reports the test and starts another worker."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else float(item.config.getini("timeout"))
    stuck = float(item.config.getini("stuck_s") or STUCK_S)
    faulthandler.dump_traceback_later(limit + stuck, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Let the run continue where a test ends its worker."""
    from crash_scheduler import CrashScheduler

    return CrashScheduler(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not wanted; put files that take long first, so that no process waits for the last one.

    Those of parallel/ go before all others: many of their tests fork, which a process can no longer do safely once
    another file's test has put TensorFlow to use in it.
    """
    skipped = config.stash[_skipped]
    wanted = [item for item in items if _is_wanted(item.nodeid, skipped)]
    if config.getoption("--commit"):
        wanted = _commit_tier(wanted, config.option.sample_seed)
    if len(wanted) < len(items):
        kept = {*wanted}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = wanted
    cost: collections.Counter[object] = collections.Counter()
    for item in items:
        cost[item.path] += _expected_s(item)
    if len(cost) > 1 and hasattr(config, "workerinput"):
        items.sort(key=lambda item: ("/parallel/" not in item.nodeid, -cost[item.path]))


def _commit_tier(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests that are not marked `long`, and of each test that is marked `sample(n)` one case in `n`."""
    cases: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for name, found in cases.items():
        marker = found[0].get_closest_marker("sample")
        step = min(marker.args[0], len(found)) if marker else 1
        chosen.update(found[random.Random(f"{seed} {name}").randrange(step) :: step])
    return [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """Leave what the test files have imported out of later collections of garbage.

    Where TensorFlow is part of it, each takes a third of a second, and copies what a fork shares with its parent.
    """
    gc.collect()
    gc.freeze()


def _is_wanted(nodeid: str, skipped: dict[str, list[str]]) -> bool:
    """With --skipped: whether the last run skipped a test, or did not run its file; all of interop/ is wanted."""
    path = nodeid.partition("::")[0]
    return path not in skipped or path in skipped[path] or nodeid in skipped[path] or "/interop/" in path


def _expected_s(item: pytest.Item) -> float:
    """Return roughly how many seconds a test takes, by its marks."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else 0.0
    return max(limit / 30, 4.0 if item.get_closest_marker("long") else 0.1)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have scratch folders, which are named by URLs alone, in a folder that no other run of these tests uses."""
    tmp_path_factory.getbasetemp()  # outside of it: paths of sockets are short
    folder = tempfile.mkdtemp(prefix="t-")
    # After multiprocessing has removed its own folder in it, which it does at the end of the process (at -100).
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)  # known, so that no test sees how it is looked for
        yield


@pytest.fixture
def damage_rounds(request: pytest.FixtureRequest) -> int:
    """Give how many rounds a test of damage runs for each of its six formats."""
    return 7 if request.config.getoption("--commit") else 84
