"""The bar of a run: in a terminal, in a notebook, and in a log file; and the summary, once."""

import contextlib
import io
import logging
import sys
import types

import pytest
import small_pairs
import small_rows

from datamat import SampleError
from datamat.events import PartDone, PartTrace, PlanMade, RunEnded, ShardFinished, WorkersStarted
from datamat.plan.plan import Plan
from datamat.run import progress
from datamat.run.progress import ProgressBar
from datamat.run.report import RunReport


class Terminal(io.StringIO):
    """A text stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The time that the bar sees, in seconds; set `.now`."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    return clock


def part(number, *, num_records=10, num_failed=0, is_resumed=False, stages=None):
    """Return the event of a part."""
    trace = PartTrace(
        shard="s",
        part=number,
        worker="h:1",
        began_at=float(number),
        elapsed_s=1.0,
        busy_s=1.0,
        num_records=num_records,
        num_bytes=1,
        peak_bytes=1,
        stages=stages or {"read": 0.1, "transform": 0.9},
    )
    return PartDone(
        shard="s",
        part=number,
        num_rows=num_records,
        num_failed=num_failed,
        num_dropped=0,
        num_dropped_records=0,
        num_records=num_records,
        num_bytes=1,
        busy_s=1.0,
        is_resumed=is_resumed,
        trace=None if is_resumed else trace,
    )


@pytest.fixture
def begun(clock, monkeypatch):
    """Give a function that returns a bar on a stream, after the start of a run of so many records."""

    def begun(stream, total, columns=100):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        bar = ProgressBar()
        bar(PlanMade(plan=Plan("set", ()), shards=(), num_rows=total, num_records=total))
        bar(WorkersStarted(num_workers=1, start_method="fork"))
        return bar

    return begun


def ended():
    """Return the event of a run that is complete."""
    report = RunReport("out", True, 100, 100, 5, 1, 0, 1, 0, 1.0, 1.0, 1)
    return RunEnded(report=report, error=None)


def test_line_says_how_far_how_fast_how_long_and_why(clock, begun):
    """Whole numbers: share, samples, rate, time that is left, failures, and the stage that limits the run."""
    screen = Terminal()
    bar = begun(screen, 1_000)
    clock.now += 10
    bar(part(0, num_records=250, num_failed=3))

    shown = screen.getvalue()
    assert "set  25% ██░" in shown and "250/1,000 samples  25/s  0:30 left" in shown.replace("░", "").replace("█", "")
    assert "3 failed  limit: transform" in shown


def test_what_was_there_counts_as_done_and_not_as_speed(clock, begun):
    """Shards and parts of an earlier run move the bar, and leave the rate alone."""
    screen = Terminal()
    bar = begun(screen, 1_000)

    names = ("shard", "split", "files")
    numbers = {"num_rows": 500, "num_failed": 0, "num_dropped": 0, "num_dropped_records": 0, "num_bytes": 1}
    reused = ShardFinished(**dict.fromkeys(names, "s"), **numbers, num_records=500, is_reused=True, is_held=False)
    bar(reused)
    bar(part(0, num_records=200, is_resumed=True))
    clock.now += 10
    bar(part(1, num_records=100))

    assert "800/1,000 samples  10/s  0:20 left" in screen.getvalue()


def test_terminal_draws_over_one_line_and_cuts_it(clock, begun):
    """However many parts there are, the screen has one line of the bar, no wider than the window, and the summary."""
    screen = Terminal()
    bar = begun(screen, 100, columns=40)

    for number in range(10):
        clock.now += 1
        bar(part(number))
    bar(ended())

    lines = screen.getvalue().splitlines()
    assert screen.getvalue().count("\n") == 2
    assert all(len(line.rpartition("\x1b[2K")[2]) < 40 for line in lines[:-1])
    assert "complete" in lines[-1]


def test_without_a_terminal_there_is_a_line_every_half_minute(clock, begun):
    """A log file gets no control characters, and two lines a minute however many parts are done."""
    log = io.StringIO()
    bar = begun(log, 1_000)

    for number in range(100):
        clock.now += 1
        bar(part(number))
    bar(ended())

    *lines, summary = log.getvalue().splitlines()
    assert len(lines) == 3 and all("samples" in line for line in lines)
    assert "\r" not in log.getvalue() and "\x1b" not in log.getvalue()
    assert "complete" in summary


def test_notebook_gets_one_display_and_nothing_on_the_pink_stream(clock, begun, monkeypatch):
    """The display is replaced each time, and by the summary in the end."""
    shown = []

    class Handle:
        def update(self, bundle, *, raw):
            assert raw
            shown[-1] = bundle

    def display(bundle, *, raw, display_id):
        assert raw and display_id
        shown.append(bundle)
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    pink = io.StringIO()
    bar = begun(pink, 20)

    bar(part(0))
    clock.now += 1
    bar(part(1))
    between = dict(shown[0])
    bar(ended())

    assert len(shown) == 1
    assert "20/20 samples" in between["text/plain"]
    assert "complete" in shown[0]["text/plain"] and shown[0]["text/html"].startswith("<pre>")
    assert pink.getvalue() == ""


def test_summary_is_shown_once_where_the_logger_shows_it_too(tmp_path, capfd):
    """A program that logs to the console gets the summary from its logger, and from nowhere else."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=2, num_val=1)
    logger = logging.getLogger("shop.of.a.user")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        small_pairs.job(source, tmp_path / "out", logger=logger).run()
    finally:
        logger.removeHandler(handler)

    assert capfd.readouterr().err.count("complete: 3 records") == 1


def test_terminal_says_what_a_run_does_before_its_first_part(tmp_path, monkeypatch):
    """On one line, which the bar or the summary takes; so does a run that has nothing to do, and one that fails."""
    screens = []
    for writer in (small_rows.Rows(), small_rows.Rows(), small_rows.FailingRows()):
        screens.append(screen := Terminal())
        monkeypatch.setattr(sys, "stderr", screen)
        with contextlib.suppress(SampleError):
            small_rows.job(tmp_path / writer.__class__.__name__, writer).run()

    first, again, failed = (screen.getvalue().split("\r\x1b[2K") for screen in screens)
    steps = ["rows: indexing the source", "rows: 4 samples; looking at what is there"]
    assert first[1:3] == steps and "at the first parts" in first[3] and "complete" in first[-1]
    assert again[1:3] == steps and "nothing to do" in again[-1] and len(again) == 4
    assert failed[1:3] == steps and failed[-1] == ""
