"""Hooks: what they hear, in which order, and that no hook can lose the work of a run."""

import logging
import os
import threading
import traceback

import pytest
import small_pairs
from prepared import Prepared

from datamat import (
    ErrorPolicy,
    OptionError,
    SampleError,
    WorkerOptions,
    materialize,
    verify,
)
from datamat.directory.ledger import Ledger, read_ledger
from datamat.events import (
    PartDamaged,
    PartDone,
    PlanMade,
    RunEnded,
    RunStarted,
    SampleFailed,
    SampleRecovered,
    SampleRetried,
    ShardFinished,
    WorkerLost,
    WorkersStarted,
)
from datamat.testing import InlineExecutor


class Listener:
    """Keeps every event; cannot be pickled."""

    def __init__(self):
        self.events = []
        self.lock = threading.Lock()

    def __call__(self, event):
        assert os.getpid() == self.process and threading.current_thread() is self.thread
        self.events.append(event)

    process = property(lambda _: PROCESS)
    thread = property(lambda _: threading.main_thread())

    def of(self, kind):
        return [event for event in self.events if type(event) is kind]

    def kinds(self):
        """Return the kinds of the events, with one for each series of equal ones."""
        return [
            type(event)
            for event, before in zip(self.events, [None, *self.events], strict=False)
            if type(event) is not type(before)
        ]


PROCESS = os.getpid()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), num_train=8, num_val=2)


def job(source, output, *hooks, writer=None, **options):
    return small_pairs.job(source, output, writer, hooks=hooks, **options)


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """The digests of a run without hooks."""
    output = tmp_path_factory.mktemp("plain") / "out"
    job(source, output).run(progress=False)
    return small_pairs.digests(output)


def ledger(output):
    return [entry.event for entry in read_ledger(output / ".datamat" / "ledger.jsonl")]


def test_run_is_heard_from_its_start_to_its_end(source, tmp_path):
    """Events arrive in the thread that called `run`, and add up to what the report says."""
    heard = Listener()

    report = job(source, tmp_path / "out", heard, workers=WorkerOptions(num_workers=2)).run(progress=False)

    started, plan, *_, end = heard.events
    assert (type(started), type(plan), type(end)) == (RunStarted, PlanMade, RunEnded)
    assert set(heard.kinds()) == {RunStarted, PlanMade, WorkersStarted, PartDone, ShardFinished, RunEnded}
    assert (started.output, started.name, started.formats) == (tmp_path / "out", "pairs", ("tfrecord",))
    assert (plan.num_rows, plan.num_records, len(plan.shards)) == (10, 10, 4)
    assert end.report is report and end.error is None
    assert heard.of(WorkersStarted)[0].start_method == report.start_method
    parts, shards = heard.of(PartDone), heard.of(ShardFinished)
    assert sum(part.num_records for part in parts) == sum(shard.num_records for shard in shards) == 10
    assert sum(part.busy_s for part in parts) == pytest.approx(report.busy_s)
    assert len({(part.shard, part.part) for part in parts}) == len(parts) == report.num_parts_written
    assert {file for shard in shards for file in shard.files} == {
        path.name for path in (tmp_path / "out").glob("*.tfrecord")
    }
    assert not any(shard.is_reused or shard.is_held for shard in shards)


def test_function_is_a_hook(source, tmp_path):
    """It hears of everything; of a run with nothing to do come finished shards and no parts."""
    counts, heard = [], Listener()

    def count(event):
        if isinstance(event, PartDone):
            counts.append(event.num_records)

    job(source, tmp_path / "out", count).run(progress=False)
    job(source, tmp_path / "out", count, heard).run(progress=False)

    assert sum(counts) == 10
    assert heard.kinds() == [RunStarted, PlanMade, ShardFinished, RunEnded]
    assert all(shard.is_reused for shard in heard.of(ShardFinished))


class Failing(small_pairs.Pairs):
    """Fails at some rows: until a file says that they are good, or the first time."""

    def __init__(self, marks):
        self.marks = marks
        marks.mkdir()

    def read(self, row):
        if row.key == "train003" and not (self.marks / "good").exists():
            raise ValueError("it is bad")
        if row.key == "train005" and not (self.marks / row.key).exists():
            (self.marks / row.key).touch()
            raise OSError("it is slow")
        return super().read(row)


def test_samples_that_fail_and_recover_are_heard(source, tmp_path):
    """They follow the part that holds them, and say how each was handled; so does one that ends the run."""
    writer, first, second, third = Failing(tmp_path / "marks"), Listener(), Listener(), Listener()
    errors = ErrorPolicy("quarantine", retries=1)
    job(source, tmp_path / "out", first, writer=writer, errors=errors).run(progress=False)
    with pytest.raises(SampleError) as raised:
        job(source, tmp_path / "raised", second, writer=writer).run(progress=False)
    (writer.marks / "good").touch()
    job(source, tmp_path / "out", third, writer=writer, errors=errors).run(retry_failed=True, progress=False)

    (failed,), (retried,) = first.of(SampleFailed), first.of(SampleRetried)
    assert (failed.key, failed.error, failed.action, failed.attempts) == ("train003", "ValueError", "quarantine", 2)
    assert (retried.key, retried.error, retried.attempts) == ("train005", "OSError", 2)
    for event in (failed, retried):
        part = next(other for other in first.of(PartDone) if other.shard == event.shard)
        assert first.events.index(part) < first.events.index(event)
    *_, failed, end = second.events
    assert (type(failed), failed.action, failed.key) == (SampleFailed, "raise", raised.value.key)
    assert (end.report, end.error) == (None, raised.value)
    assert ledger(tmp_path / "raised")[-2:] == ["sample_failed", "run_failed"]
    assert [event.key for event in third.of(SampleRecovered)] == ["train003"] and not third.of(SampleFailed)
    assert ledger(tmp_path / "out").count("sample_quarantined") == 1


class Deadly(small_pairs.Pairs):
    """Kills its worker at one row."""

    def read(self, row):
        if row.key.endswith("7"):
            os.kill(os.getpid(), 9)
        return super().read(row)


def test_deaths_of_workers_are_heard(source, tmp_path):
    """Each death names the key of its row; the last one makes the row a failed sample."""
    heard = Listener()

    workers = WorkerOptions(num_workers=2)
    job(source, tmp_path / "out", heard, writer=Deadly(), errors="skip", workers=workers).run(progress=False)

    lost, (failed,) = heard.of(WorkerLost), heard.of(SampleFailed)
    assert [event.key[-3:] for event in lost] == ["007", "007"]
    assert (failed.error, failed.action, failed.key) == ("WorkerDied", "skip", lost[0].key)
    assert "SIGKILL" in lost[0].message and not lost[0].timed_out
    assert ledger(tmp_path / "out").count("worker_died") == 2


def test_deadline_is_heard_before_the_end(source, tmp_path):
    """The event says how much is done."""
    heard = Listener()

    report = job(source, tmp_path / "out", heard).run(progress=False, deadline=1e-9)

    assert report.stopped == "deadline"
    reached = heard.events[-2]
    assert (reached.limit, reached.num_rows, reached.num_rows_planned) == ("deadline", 0, 10)


class Damaging(Listener):
    """Damages the first part that it hears of, whose records lie apart until the shard is sealed."""

    def __call__(self, event):
        super().__call__(event)
        if isinstance(event, PartDone) and len(self.of(PartDone)) == 1:
            (path,) = self.parts.glob(f"{event.shard}/{event.part:05d}.*.part")
            with open(path, "r+b") as file:
                file.write(b"\xff")


def test_damaged_part_is_heard_and_made_again(source, tmp_path):
    """The event `again` names parts that come a second time; the report counts each once."""
    heard = Damaging()
    heard.parts = tmp_path / "out" / ".datamat" / "parts"

    report = job(source, tmp_path / "out", heard).run(progress=False)

    (event,) = heard.of(PartDamaged)
    again = [part for part in heard.of(PartDone) if part.shard == event.shard and part.part in event.again]
    assert len(again) == 2 * len(event.again)
    assert (report.num_rows, report.num_records) == (10, 10)
    assert verify(tmp_path / "out", deep=True).ok


class Raising:
    """Raises at one kind of event."""

    def __init__(self, kind, error):
        self.kind, self.error = kind, error
        self.calls = 0

    def __call__(self, event):
        if isinstance(event, self.kind):
            self.calls += 1
            raise self.error


@pytest.mark.parametrize("kind", [PlanMade, PartDone, RunEnded])
def test_hook_that_raises_is_switched_off_and_loses_nothing(source, plain, tmp_path, kind, caplog):
    """It is logged once, with its traceback; other hooks and the run continue, with the same bytes."""
    raising, heard = Raising(kind, ValueError("full of bugs")), Listener()

    with caplog.at_level(logging.WARNING):
        report = job(source, tmp_path / "out", raising, heard).run(progress=False)

    assert report.is_complete
    assert raising.calls == 1
    assert type(heard.events[-1]) is RunEnded
    (record,) = [record for record in caplog.records if "Raising" in record.getMessage()]
    assert kind.__name__ in record.getMessage() and "full of bugs" in record.exc_text
    assert small_pairs.digests(tmp_path / "out") == plain
    raising.error = ValueError("and again")
    job(source, tmp_path / "out", raising).run(progress=False, existing="refuse")
    assert raising.calls == (1 if kind is PartDone else 2)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (PlanMade, SystemExit(3)),
        (PartDone, KeyboardInterrupt()),
        (ShardFinished, SystemExit(3)),
        (RunEnded, KeyboardInterrupt()),
    ],
)
def test_hook_can_end_the_run_and_the_next_one_resumes(source, plain, tmp_path, kind, error):
    """As with Ctrl-C, the state is good, finished work stays, and every other hook hears the end, once."""
    raising, heard = Raising(kind, error), Listener()

    with pytest.raises(type(error)):
        job(source, tmp_path / "out", heard, raising).run(progress=False)
    num_parts = len(heard.of(PartDone))
    report = job(source, tmp_path / "out").run(progress=False)

    assert [type(event) for event in heard.events].count(RunEnded) == 1
    if kind is not RunEnded:
        assert heard.events[-1].error is error
        assert "interrupted" in ledger(tmp_path / "out")
    total = sum(len(shard.parts) for shard in heard.of(PlanMade)[0].plan.shards)
    assert report.num_parts_written <= total - num_parts  # the next run makes no part again that a hook has heard of
    assert small_pairs.digests(tmp_path / "out") == plain


def test_stop_button_says_in_one_line_what_is_kept_and_how_to_go_on(source, tmp_path):
    """Also in a notebook, which would show the frames of datamat."""
    with pytest.raises(KeyboardInterrupt) as raised:
        job(source, tmp_path / "out", Raising(PartDone, KeyboardInterrupt())).run(progress=False)

    (line,) = raised.value._render_traceback_()
    assert line == str(raised.value) and "\n" not in line
    assert f"{tmp_path / 'out'} is kept" in line and "run() continues" in line
    assert len(list(traceback.walk_tb(raised.tb))) < 8 and raised.value.__suppress_context__


def test_ledger_and_disk_have_what_a_hook_hears(source, tmp_path):
    """A process that is killed in a hook loses nothing: receipt and ledger line are written before the event."""
    output, missing = tmp_path / "out", []

    def look(event):
        if isinstance(event, PartDone):
            if not (output / ".datamat" / "parts" / event.shard / f"{event.part:05d}.receipt").exists():
                missing.append(event)
            *_, last = read_ledger(output / ".datamat" / "ledger.jsonl")
            if (last.event, last.values.get("part")) != ("part_committed", event.part):
                missing.append(event)
        is_end = isinstance(event, RunEnded)
        if is_end and (ledger(output)[-1] != "run_finished" or not (output / "manifest.json").exists()):
            missing.append(event)

    heard = Listener()
    job(source, output, look, heard).run(progress=False)

    assert heard.of(PartDone) and not missing


def test_ledger_that_cannot_be_written_ends_the_run(source, tmp_path, monkeypatch):
    """What is not recorded has not happened: hooks hear of the end of the run alone."""
    heard = Listener()
    write = Ledger.write

    def full(self, event, **values):
        if event == "part_committed":
            raise OSError(28, "No space left on device")
        write(self, event, **values)

    monkeypatch.setattr(Ledger, "write", full)
    with pytest.raises(OSError, match="No space left"):
        job(source, tmp_path / "out", heard).run(progress=False)

    assert heard.kinds() == [RunStarted, PlanMade, WorkersStarted, RunEnded]


def test_bar_and_summary_are_hooks_that_may_fail(source, tmp_path, monkeypatch, caplog):
    """A terminal that is gone ends no run."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    def hang_up(event):  # before the bar hears of it, and with the one worker at work
        if isinstance(event, PartDone):
            monkeypatch.setattr("sys.stderr", Gone())

    with caplog.at_level(logging.WARNING):
        report = job(source, tmp_path / "out", hang_up).run()

    assert report.is_complete
    assert "ProgressBar" in caplog.text


def test_repair_and_materialize_take_hooks(source, tmp_path):
    """Both are runs, and hooks hear the same events."""
    heard = Listener()
    made = job(source, tmp_path / "out", heard)
    made.run(progress=False)
    next((tmp_path / "out").glob("*.tfrecord")).unlink()

    made.repair(progress=False)
    options = {"hooks": [heard], "executor": InlineExecutor(), "progress": False}
    materialize(lambda number: {"x": number}, range(3), tmp_path / "squares", **options)

    assert [event.name for event in heard.of(RunStarted)][-1] == "data"
    assert len(heard.of(RunStarted)) == len(heard.of(RunEnded)) >= 3


@pytest.mark.parametrize("hooks", [Listener(), [Listener], ["RunEnded"], "RunEnded"])
def test_hooks_that_are_no_list_of_callables_are_refused(source, tmp_path, hooks):
    """The error says what is wanted."""
    with pytest.raises(OptionError, match=r"hooks (is|holds) .*; want"):
        Prepared(small_pairs.Pairs(), source, tmp_path / "out", hooks=hooks).run()
