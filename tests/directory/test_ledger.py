"""The ledger: complete lines, strictly parsed, however its end is torn."""

import datetime
import json
import os

import pytest

from datamat import CorruptDataError, OutputError
from datamat.directory.ledger import FailedRow, Ledger, read_ledger

FAILED = FailedRow(7, "0007", "InputError", "InputError: it is empty", "skip", 2)


def written(path, *events):
    ledger = Ledger(path)
    for event in events:
        ledger.write(event)
    ledger.close()
    return path


def test_lines_are_read_as_they_were_written(tmp_path):
    """Each line has its time in UTC, run, event, and all further values."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    before = datetime.datetime.now(datetime.UTC)
    ledger.write("run_started", host="here", copies={"train": 3})
    ledger.write("sample_skipped", shard="a", **FAILED.to_json())
    ledger.write("sample_skipped", shard="b")
    ledger.close()

    first, second, third = read_ledger(tmp_path / "ledger.jsonl")

    assert (first.event, first.values) == ("run_started", {"host": "here", "copies": {"train": 3}})
    assert (second.event, second.values["key"], second.values["attempts"]) == ("sample_skipped", "0007", 2)
    assert third.values == {"shard": "b"}
    assert {entry.run for entry in (first, second, third)} == {ledger.run}
    assert abs(first.time - before) < datetime.timedelta(seconds=60) and first.time.tzinfo == datetime.UTC


def test_reader_sees_lines_while_the_writer_is_open(tmp_path):
    """A line is visible as soon as it is written."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write("run_started")

    assert [entry.event for entry in read_ledger(tmp_path / "ledger.jsonl")] == ["run_started"]
    ledger.close()


@pytest.mark.parametrize("cut", [2, 5, 40])
def test_torn_last_line_is_skipped_and_stays_apart(tmp_path, cut):
    """Readers skip it at once; the next run begins on a line of its own."""
    path = written(tmp_path / "ledger.jsonl", "run_started", "part_committed")
    os.truncate(path, path.stat().st_size - cut)

    assert [entry.event for entry in read_ledger(path)] == ["run_started"]
    written(path, "run_started", "run_finished")
    assert [entry.event for entry in read_ledger(path)] == ["run_started", "run_started", "run_finished"]


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"time": "now", "run": "a", "event": "b"}', "\0" * 30])
def test_foreign_line_is_refused(tmp_path, line):
    """The error gives its number."""
    path = written(tmp_path / "ledger.jsonl", "run_started", "part_committed")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[1]]) + "\n")

    with pytest.raises(CorruptDataError, match=r"ledger.jsonl, line 2: .*want a line that datamat wrote"):
        list(read_ledger(path))


def test_file_without_line_ends_does_not_fill_the_memory(tmp_path):
    """A sparse file of a terabyte is refused at its first line."""
    path = tmp_path / "ledger.jsonl"
    with open(path, "wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(CorruptDataError, match="line 1: it is longer than any line"):
        list(read_ledger(path))


def test_values_cannot_break_lines_or_terminals(tmp_path):
    """Control characters are escaped, those that only terminals obey included; long text is cut."""
    nasty = "a\nb\r\x1b[31m\x7f\x9b\u2028\u202e\udcff" + "x" * 10_000
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.write("sample_failed", key=nasty)
    ledger.close()

    data = (tmp_path / "ledger.jsonl").read_bytes()
    assert data.count(b"\n") == 1 and all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert len(data) < 6000
    assert json.loads(data)["key"].startswith(nasty[:20])


def test_ledger_writes_through_no_link(tmp_path):
    """A link that leads elsewhere is refused, and so is anything that is no regular file."""
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")

    with pytest.raises(OutputError, match="link cannot be written"):
        Ledger(tmp_path / "link")
    with pytest.raises(OutputError, match="fifo is not a regular file"):
        Ledger(tmp_path / "fifo")
    assert not (tmp_path / "target").stat().st_size


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_reported(tmp_path):
    """The error names the file and the remedy."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    folder = "/proc/self/fd"
    (opened,) = [number for number in os.listdir(folder) if os.path.realpath(f"{folder}/{number}") == str(path)]
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), int(opened))

    with pytest.raises(OutputError, match=r"ledger.jsonl cannot be written: No space left on device; make room"):
        ledger.write("run_started")
