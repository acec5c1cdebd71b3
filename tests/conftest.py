"""Shared by all tests: how many rounds the kill loops run, and that the run ends whatever one test does."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal

import hypothesis
import pytest
from leftovers import no_process_left

__all__ = ["no_process_left"]

ROUNDS_OF_THE_SUITE = 2
ROUNDS_OF_STRESS = 50

STUCK_S = 120.0
"""How long after its limit a test is ended by force: it is stuck where Python cannot interrupt it."""

# A busy machine makes examples slowly, which says nothing about the code.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

SKIPPED = "datamat/skipped"
"""Where the cache of pytest keeps, for each test file, the ids of what was skipped there, as for want of a package."""

_stderr = pytest.StashKey[int]()
_skipped = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="run the kill loops in full, as `make stress` does")
    parser.addoption(
        "--skipped",
        action="store_true",
        help="outside of interop/, run only what the last run of the same files skipped, as for want of a package",
    )
    parser.addini("stuck_s", "seconds after its limit at which a test that cannot be interrupted ends its process")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the true standard error, for the stacks of a test that is stuck.

    A shell starts what it runs in the background with SIGINT ignored, and programs that tests interrupt inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[_stderr] = os.dup(2)
    config.stash[_skipped] = {}
    if config.getoption("--skipped"):
        config.stash[_skipped] = config.cache.get(SKIPPED, {})
    elif not hasattr(config, "workerinput") and config.pluginmanager.hasplugin("cacheprovider"):
        config.pluginmanager.register(_NoteOfSkipped())


class _NoteOfSkipped:
    """Notes in the process that reports what is skipped."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        cache = session.config.cache
        cache.set(SKIPPED, {**cache.get(SKIPPED, {}), **self.found})

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        names = self.found.setdefault(report.nodeid.partition("::")[0], [])
        if report.skipped and not hasattr(report, "wasxfail") and report.nodeid not in names:
            names.append(report.nodeid)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


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
    """Let `pytest -m stress` find the kill loops by the fixture that counts their rounds; bound the whole suite.

    Of the seeded bugs, it tries every eighth one; `pytest tests/seeded_bugs` and `make stress` try all. It runs every
    third of the ordinary programs by a start method from nothing; all of them by one once they were killed. Long files
    come first: one that begins last would have one process of xdist wait for the other.
    """
    skipped = config.stash[_skipped]
    wanted = [item for item in items if _is_wanted(item.nodeid, skipped)]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in {*wanted}])
        items[:] = wanted
    cost: dict[object, float] = {}
    for item in items:
        if {"kill_rounds", "damage_rounds"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.stress)
        cost[item.path] = cost.get(item.path, 0.0) + _expected_s(item)
    if len(cost) > 1 and not config.getoption("--stress"):
        left_out = {*_all_but_every(8, "test_defect_is_caught", items), *_all_but_every(3, "test_start_methods", items)}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    if len(cost) > 1 and hasattr(config, "workerinput"):
        items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish() -> None:
    """Leave what the test files have imported out of later collections of garbage.

    Where TensorFlow is part of it, each takes a third of a second, and copies what a fork shares with its parent.
    """
    gc.collect()
    gc.freeze()


def _all_but_every(step: int, name: str, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of one function but for the first of each `step`."""
    found = [item for item in items if item.name.startswith(f"{name}[")]
    return {*found} - {*found[::step]}


def _is_wanted(nodeid: str, skipped: dict[str, list[str]]) -> bool:
    """Return whether a test is to run where only what was skipped is wanted: files that were not run are, whole."""
    path = nodeid.partition("::")[0]
    return path not in skipped or path in skipped[path] or nodeid in skipped[path] or "/interop/" in path


def _expected_s(item: pytest.Item) -> float:
    """Return roughly how long a test takes, by its marks, in seconds."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else 0.0
    return max(limit / 30, 4.0 if item.get_closest_marker("slow") else 0.1)


@pytest.fixture
def kill_rounds(request: pytest.FixtureRequest) -> int:
    """Give how many rounds a kill loop runs: a few in the suite, many under --stress."""
    return ROUNDS_OF_STRESS if request.config.getoption("--stress") else ROUNDS_OF_THE_SUITE


@pytest.fixture
def damage_rounds(request: pytest.FixtureRequest) -> int:
    """Give how many rounds a test of damage runs for each of its six formats."""
    return 84 if request.config.getoption("--stress") else 7
