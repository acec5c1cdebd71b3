"""Limits: how they are written, and when they are reached."""

import datetime

import pytest

from datamat import ErrorPolicy, IncompleteRunError, OptionError
from datamat.directory.counts import Counts
from datamat.options import Deadline, parse_bytes, parse_duration, seconds_until
from datamat.run.limits import DiskLimit, ErrorLimit, tree_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("23h30m", 84_600),
        ("1d2h3m4s", 93_784),
        ("1.5h", 5_400),
        (" 2H 15M ", 8_100),
        ("0.5s", 0.5),
        ("2 hours 30 min", 9_000),
        ("1 day, 2 hours", 93_600),
        ("1 day and 2 hours", 93_600),
        ("1 hr 20 secs", 3_620),
    ],
)
def test_duration_is_parsed(text, seconds):
    """Days, hours, minutes and seconds, in this order."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "h", "10", "10m5h", "-5s", "1w", "5 months", "1 dayly", "1h30", "1e3s"])
def test_duration_that_is_none_is_refused(text):
    """The error shows the form that is wanted."""
    with pytest.raises(OptionError, match="want days, hours, minutes and seconds"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("20GB", 20 * 10**9), ("512MiB", 512 << 20), ("1.5 kb", 1500), ("7", 7), ("7B", 7), (12, 12), (1e3, 1000)],
)
def test_size_is_parsed(size, num_bytes):
    """Units are decimal or binary."""
    assert parse_bytes(size) == num_bytes


@pytest.mark.parametrize("size", ["", "many", "-1GB", "1XB", "GB", 0, -1, True, float("nan"), float("inf"), "1 G B"])
def test_size_that_is_none_is_refused(size):
    """The error shows the form that is wanted."""
    with pytest.raises(OptionError, match="want a positive number of bytes"):
        parse_bytes(size)


def test_moment_may_be_given_in_any_zone():
    """Without a zone, it is local time."""
    for zone in (None, datetime.UTC, datetime.timezone(datetime.timedelta(hours=-9))):
        assert 3590 < seconds_until(datetime.datetime.now(zone) + datetime.timedelta(hours=1)) <= 3600


def test_deadline_keeps_time_for_the_parts_under_way():
    """It reserves as long as the longest part took, within a few seconds at most."""
    deadline = Deadline(100)
    before = deadline.left_s
    deadline.add(2.0)
    with_short = deadline.left_s
    deadline.add(1000.0)

    assert 99 < before < 100
    assert 1.9 < before - with_short < 2.1
    assert 3.9 < before - deadline.left_s < 4.1
    assert not deadline.has_come and Deadline(0.1).has_come
    assert Deadline(None).left_s is None and not Deadline(None).has_come


def test_disk_limit_counts_what_lies_there_and_what_may_come(tmp_path):
    """A part counts as large as its input, and then as large as parts have turned out."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(60_000))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    limit = DiskLimit(tmp_path, 100_000)

    assert tree_bytes(tmp_path / "a") == 60_000 and 60_000 < tree_bytes(tmp_path) < 61_000
    assert limit.allows([5_000]) and not limit.allows([15_000, 10_000])
    limit.add(cost=10_000, num_bytes=1_000)
    assert limit.allows([50_000, 40_000])
    assert DiskLimit(tmp_path, None).allows([10**12])
    assert DiskLimit(tmp_path, 100_000, num_formats=2).allows([5_000])
    assert not DiskLimit(tmp_path, 100_000, num_formats=3).allows([6_000])


@pytest.mark.parametrize(("num_failed", "stops"), [(99, False), (499, False), (500, True)])
def test_run_whose_rows_all_fail_ends_half_way(num_failed, stops):
    """A single good record lets it continue."""
    hopeful = ErrorLimit(ErrorPolicy("skip"), 1000)
    hopeful.add(Counts(num_rows=1))
    failing = Counts(num_rows=num_failed, num_failed=num_failed)
    hopeful.add(failing)
    limit = ErrorLimit(ErrorPolicy("skip"), 1000)

    if stops:
        with pytest.raises(IncompleteRunError, match="every one so far"):
            limit.add(failing)
    else:
        limit.add(failing)
        with pytest.raises(IncompleteRunError, match="all of them"):
            limit.check_end()
