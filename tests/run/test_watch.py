"""Following a run from outside: the rate and the time that is left."""

import pytest

from datamat import OptionError, Status
from datamat.run.status import Done
from datamat.run.watch import watch


def _paces(done, *, num_rows=1_000, every_s=2.0):
    """Return the pace at each look, where rows are done as listed and the run ends after the last."""
    running = [Status("out", "running", done=Done(num_rows=count), num_shards=1, num_rows=num_rows) for count in done]
    looks = iter([*running, Status("out", "complete", done=Done(num_rows=1_000))])
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    return [pace for _, pace in watch(lambda: next(looks), every_s=every_s, clock=lambda: now[0], wait=wait)]


def test_rate_and_time_left_follow_from_what_was_done_since_the_first_look():
    """What earlier runs made does not count; at first, and in the end, there is neither."""
    assert _paces([500, 600, 700]) == ["", "50 rows/s, 0:00:08 left", "50 rows/s, 0:00:06 left", ""]


def test_rate_is_that_of_the_last_minute():
    """A run that has slowed down, or stands still, shows it."""
    paces = _paces([0, 600, 630, 660, 660, 660], every_s=30.0)

    assert paces[1] == "20 rows/s, 0:00:20 left"
    assert paces[3] == "1 rows/s, 0:05:40 left"
    assert paces[5] == paces[6] == ""


def test_slow_run_is_counted_by_the_minute_and_one_without_a_plan_has_no_end():
    """Large samples may take seconds each."""
    assert _paces([0, 1], every_s=10.0)[1] == "6 rows/min, 2:46:30 left"
    assert _paces([0, 40], num_rows=None)[1] == "20 rows/s"


def test_interval_must_be_positive():
    """Or the machine would do nothing but look."""
    with pytest.raises(OptionError, match="interval is 0; want a positive number"):
        next(watch(lambda: Status("out", "running"), every_s=0))
