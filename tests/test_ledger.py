"""The ledger: whole lines, told strictly, whatever tears its end."""

from __future__ import annotations

import contextlib
import datetime
import json
import os

import pytest

from datamat import CorruptDataError, OutputError, SampleError
from datamat.ledger import FailedRow, Ledger, read_ledger, recorded

FAILED = FailedRow(7, "0007", "InputError", "InputError: it is empty", "skip", 2)


def written(path, *events):
    ledger = Ledger(path)
    for event in events:
        ledger.write(event)
    ledger.close()
    return path


def test_lines_are_read_as_they_were_written(tmp_path):
    """Time in UTC, run, event, and whatever else was told."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    before = datetime.datetime.now(datetime.UTC)
    ledger.write("run_started", host="here", copies={"train": 3})
    ledger.write_all(FAILED.event, [{"shard": "a", **FAILED.told()}, {"shard": "b"}])
    ledger.close()

    first, second, third = read_ledger(tmp_path / "ledger.jsonl")

    assert (first.event, first.values) == ("run_started", {"host": "here", "copies": {"train": 3}})
    assert (second.event, second.values["key"], second.values["attempts"]) == ("sample_skipped", "0007", 2)
    assert third.values == {"shard": "b"}
    assert {entry.run for entry in (first, second, third)} == {ledger.run}
    assert abs(first.time - before) < datetime.timedelta(seconds=60) and first.time.tzinfo == datetime.UTC


def test_later_runs_append(tmp_path):
    """Each under a number of its own."""
    for _ in range(2):
        written(tmp_path / "ledger.jsonl", "run_started", "run_finished")

    entries = list(read_ledger(tmp_path / "ledger.jsonl"))

    assert [entry.event for entry in entries] == ["run_started", "run_finished"] * 2
    assert len({entry.run for entry in entries}) == 2


def test_reader_sees_lines_while_the_writer_is_open(tmp_path):
    """Each line as soon as it is told."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write("run_started")

    assert [entry.event for entry in read_ledger(tmp_path / "ledger.jsonl")] == ["run_started"]
    ledger.close()


@pytest.mark.parametrize("cut", [2, 5, 40])
def test_torn_last_line_is_passed_over_and_stays_apart(tmp_path, cut):
    """By readers at once; the next run begins on a line of its own."""
    path = written(tmp_path / "ledger.jsonl", "run_started", "part_committed")
    os.truncate(path, path.stat().st_size - cut)

    assert [entry.event for entry in read_ledger(path)] == ["run_started"]
    written(path, "run_started", "run_finished")
    assert [entry.event for entry in read_ledger(path)] == ["run_started", "run_started", "run_finished"]


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"time": "now", "run": "a", "event": "b"}', "\0" * 30])
def test_line_that_is_not_ours_is_refused(tmp_path, line):
    """With its number."""
    path = written(tmp_path / "ledger.jsonl", "run_started", "part_committed")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[1]]) + "\n")

    with pytest.raises(CorruptDataError, match=r"ledger.jsonl, line 2: .*want a line that datamat wrote"):
        list(read_ledger(path))


def test_what_is_told_cannot_break_lines_or_terminals(tmp_path):
    """Control characters are escaped, also those that only terminals obey; long text is cut."""
    nasty = "a\nb\r\x1b[31m\x7f\x9b\u2028\u202e\udcff" + "x" * 10_000
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write("sample_failed", key=nasty)
    ledger.close()

    data = (tmp_path / "ledger.jsonl").read_bytes()
    assert data.count(b"\n") == 1 and all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert len(data) < 6000
    assert json.loads(data)["key"].startswith(nasty[:20])


def test_ledger_writes_through_no_link(tmp_path):
    """One that leads elsewhere is refused, and so is what is no file."""
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(OutputError, match="link cannot be written"):
        Ledger(tmp_path / "link")
    with pytest.raises(OutputError, match="fifo is not a regular file"):
        Ledger(tmp_path / "fifo")
    assert not (tmp_path / "target").stat().st_size


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_told(tmp_path, monkeypatch):
    """With the file, and what to do."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    monkeypatch.setattr(ledger, "_descriptor", os.open("/dev/full", os.O_WRONLY))

    with pytest.raises(OutputError, match=r"ledger.jsonl cannot be written: No space left on device; make room"):
        ledger.write("run_started")


@pytest.mark.parametrize(
    ("error", "events"),
    [
        (None, ["run_started"]),
        (SampleError("a", "it is bad"), ["run_started", "sample_failed", "run_failed"]),
        (ValueError("no"), ["run_started", "run_failed"]),
        (KeyboardInterrupt(), ["run_started", "interrupted"]),
        (SystemExit(143), ["run_started", "interrupted"]),
    ],
)
def test_end_by_an_error_is_recorded(tmp_path, error, events):
    """And the error goes on."""
    path = tmp_path / "ledger.jsonl"
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)), recorded(path, pid=1):
        if error is not None:
            raise error

    entries = list(read_ledger(path))
    assert [entry.event for entry in entries] == events
    assert error is None or entries[-1].values["error"] == type(error).__name__
