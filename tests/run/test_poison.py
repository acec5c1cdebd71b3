"""Samples that end their worker: found, retried, and handled by the policy; all other samples are stored.

These are spine tests: only a real worker can die.
"""

import ctypes
import os
import pathlib
import re
import signal

import numpy as np
import pytest
import small_pairs
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    IndexRow,
    Materializer,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    TaskTimeout,
    WorkerDied,
    WorkerOptions,
    load,
    verify,
)
from datamat.directory.ledger import read_ledger
from datamat.features import register_feature
from datamat.testing import InlineExecutor

pytestmark = pytest.mark.timeout(180)  # workers that die are started again and again


class Poisonous(small_pairs.Pairs):
    """Does to its process what the key demands; leaves a mark for each attempt."""

    name = "poisonous"
    crumb = 40

    def __init__(self, marks, deeds):
        self.marks = str(marks)
        self.deeds = deeds

    def read(self, row):
        if row.key in self.deeds:
            with pathlib.Path(self.marks, row.key).open("ab") as file:
                file.write(b"x")
            getattr(self, self.deeds[row.key])()
        return super().read(row)

    def crash(self):
        ctypes.string_at(0)

    def leave(self):
        os._exit(7)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def loop(self):
        while True:
            pass

    def eat(self):
        eaten = []
        while True:
            eaten.append(np.ones(1 << 27, np.uint8))

    def nibble(self):
        eaten = []
        while True:
            eaten.append(bytearray(self.crumb))  # to the last byte; `eaten` lives as long as the error's traceback


NUM_TRAIN, NUM_VAL = 8, 2
DEEDS = {"train003": "crash", "train005": "leave", "train007": "die", "val001": "crash"}


@pytest.fixture
def place(tmp_path):
    small_pairs.make_pairs(tmp_path / "source", NUM_TRAIN, NUM_VAL)
    (tmp_path / "marks").mkdir()
    return tmp_path


def job(place, output, deeds=None, *, policy="skip", copies=1, **workers):
    writer = Poisonous(place / "marks", DEEDS if deeds is None else deeds)
    return Prepared(
        writer,
        place / "source",
        place / output,
        errors=policy,
        shards=ShardOptions(num_shards=2),
        copies=copies,
        transform=None if copies == 1 else small_pairs.jitter,
        workers=WorkerOptions(**{"num_workers": 2, **workers}),
    )


def entries(place, output, *events):
    return [e.values for e in read_ledger(place / output / ".datamat" / "ledger.jsonl") if e.event in events]


def test_row_that_ends_its_worker_is_left_out_after_the_second_attempt(place):
    """The ledger has signal or exit code, and peak memory; the bytes are those of a run whose rows raise an error."""
    report = job(place, "out", copies={"train": 2}).run(progress=False)

    skipped = {values["key"]: values for values in entries(place, "out", "sample_skipped")}
    assert {key: path.stat().st_size for key in DEEDS if (path := place / "marks" / key)} == dict.fromkeys(DEEDS, 2)
    assert skipped.keys() == DEEDS.keys() and report.num_failed == len(DEEDS)
    assert {(values["error"], values["attempts"]) for values in skipped.values()} == {("WorkerDied", 2)}
    assert re.search(r"signal 11 \(SIGSEGV\), peak memory [1-9]\d+ MiB.*in read", skipped["train003"]["message"], re.S)
    assert "exit code 7, peak memory" in skipped["train005"]["message"]
    assert (
        "signal 9 (SIGKILL, as the kernel's out-of-memory killer sends it), peak memory"
        in skipped["train007"]["message"]
    )
    assert len(entries(place, "out", "worker_died")) == 2 * len(DEEDS)
    assert {key.partition("#")[0] for key in load(place / "out").keys()} == {  # noqa: SIM118 -- not a dict
        f"{split}{number:03d}" for split, count in (("train", NUM_TRAIN), ("val", NUM_VAL)) for number in range(count)
    } - DEEDS.keys()
    assert verify(place / "out").ok

    class Failing(small_pairs.Pairs):
        name = "poisonous"

        def read(self, row):
            if row.key in DEEDS:
                raise ValueError("cannot be read")
            return super().read(row)

    options = {"errors": "skip", "copies": {"train": 2}, "transform": small_pairs.jitter}
    small_pairs.job(place / "source", place / "reference", Failing(), **options).run(progress=False)
    shards = {name: digest for name, digest in small_pairs.digests(place / "out").items() if name != "manifest.json"}
    assert shards.items() <= small_pairs.digests(place / "reference").items()


@pytest.mark.long
def test_number_of_attempts_can_be_chosen(place):
    """`max_retries` counts for each row."""
    job(place, "out", {"train003": "die", "train004": "die"}, max_retries=0).run(progress=False)

    assert [(place / "marks" / key).stat().st_size for key in ("train003", "train004")] == [1, 1]


def test_sample_that_never_ends_is_stopped_and_its_stack_kept(place):
    """Its worker is replaced; the quarantine holds its files and the stack."""
    report = job(place, "out", {"train003": "loop"}, policy="quarantine", sample_timeout_s=0.3).run(progress=False)

    (entry,) = entries(place, "out", "sample_quarantined")
    folder = place / "out" / ".datamat" / "quarantine" / "train" / "train003"
    assert (entry["key"], entry["error"], report.num_failed) == ("train003", "TaskTimeout", 1)
    assert "ran longer than sample_timeout_s=0.3, so worker" in entry["message"]
    assert "in loop" in entry["message"] and "in read" in entry["message"] and "worker.py" not in entry["message"]
    assert "in loop" in (folder / "traceback.txt").read_text()
    kept = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert kept["image-train003.png"] == (place / "source" / "train" / "train003.png").read_bytes()
    assert kept["mask-train003.png"] == (place / "source" / "trainannot" / "train003.png").read_bytes()


@pytest.mark.parametrize(
    ("deed", "cause", "message"),
    [
        ("loop", TaskTimeout, "it ran longer than.*in loop"),
        ("die", WorkerDied, r".* signal 9 \(SIGKILL.* peak memory \d+"),
    ],
)
def test_sample_that_ends_its_worker_stops_a_run_under_raise(place, deed, cause, message):
    """The error gives key, stack, signal and memory; that of the worker is its cause."""
    with pytest.raises(SampleError, match=rf"(?s)'train003': {cause.__name__}: {message}") as caught:
        job(place, "out", {"train003": deed}, policy="raise", sample_timeout_s=0.3).run(progress=False)

    assert isinstance(caught.value.__cause__, cause)


def test_sample_that_eats_the_memory_fails_alone_under_a_limit(place):
    """It gets a `MemoryError`: no worker dies, and the machine keeps enough."""
    job(place, "out", {"train003": "eat"}, max_rss=500 << 20).run(progress=False)

    (entry,) = entries(place, "out", "sample_skipped")
    assert (entry["key"], entry["error"], entry["attempts"]) == ("train003", "MemoryError", 1)
    assert not entries(place, "out", "worker_died")


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "crumb"),
    [
        ("fork", 4096),
        pytest.param("fork", 40, marks=pytest.mark.long),
        pytest.param("forkserver", 40, marks=pytest.mark.long),
        pytest.param("spawn", 4096, marks=pytest.mark.long),
    ],
)
def test_sample_that_eats_the_last_byte_is_left_out_too(place, method, crumb, monkeypatch):
    """Where not even its error can be sent, its worker ends, and the crash note names the row."""
    monkeypatch.setattr(Poisonous, "crumb", crumb)

    job(place, "out", {"train003": "nibble"}, max_rss=500 << 20, start_method=method).run(progress=False)

    (entry,) = entries(place, "out", "sample_skipped")
    assert entry["key"] == "train003" and entry["error"] in {"MemoryError", "WorkerDied"}
    assert {died["key"] for died in entries(place, "out", "worker_died")} <= {"train003"}
    assert len(load(place / "out")) == NUM_TRAIN + NUM_VAL - 1 and verify(place / "out").ok


class WhichProcess(DatasetWriter):
    """Stores the process that reads a row."""

    name = "which"
    features = Features({"pid": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{number:02d}") for number in range(6)]

    def read(self, row):
        return {"pid": os.getpid()}


def test_worker_over_its_memory_limit_is_replaced_between_parts(tmp_path):
    """That is no death: nothing is retried."""
    options = WorkerOptions(num_workers=2, max_rss=1)
    report = small_pairs.job(None, tmp_path / "out", WhichProcess(), workers=options).run(progress=False)

    assert len({int(sample["pid"]) for sample in load(tmp_path / "out")}) == report.num_parts_written
    assert not [e for e in read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl") if e.event == "worker_died"]


class Blocks(DatasetWriter):
    """Gives rows in blocks; one row kills or fails, in a block and alone."""

    name = "blocks"
    features = Features({"x": Scalar("int64")})

    def __init__(self, deed, *, only_in_blocks=False):
        self.deed = deed
        self.only_in_blocks = only_in_blocks

    def index(self, source):
        return [IndexRow(f"{number:04d}", fields={"number": number}) for number in range(1000)]

    def read_block(self, keys, fields):
        if 777 in fields["number"]:
            self.do()
        return {"x": np.asarray(fields["number"])}

    def read(self, row):
        if row.fields["number"] == 777 and not self.only_in_blocks:
            self.do()
        return {"x": row.fields["number"]}

    def do(self):
        if self.deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("cannot be read")


@pytest.mark.parametrize("deed", ["fail", "die"])
def test_bad_row_of_a_block_is_found(tmp_path, deed):
    """The rows of its block are then read one at a time, and only that one is left out."""
    where = {"workers": WorkerOptions(num_workers=1)} if deed == "die" else {}
    small_pairs.job(None, tmp_path / "out", Blocks(deed), errors="skip", **where).run(progress=False)

    (entry,) = [e.values for e in read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl") if "skip" in e.event]
    assert entry["key"] == "0777"
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == [n for n in range(1000) if n != 777]


def test_block_that_fails_though_none_of_its_rows_does_ends_the_run(tmp_path):
    """A writer whose blocks differ from its rows is an error under any policy."""
    with pytest.raises(SampleError, match="in a block of"):
        small_pairs.job(None, tmp_path / "out", Blocks("fail", only_in_blocks=True), errors="skip").run(progress=False)


def test_worker_that_dies_before_any_row_ends_the_run(place):
    """No row is to blame: the error is that of the worker."""

    class NeverReady(small_pairs.Pairs):
        def setup_worker(self):
            os._exit(3)

    with pytest.raises(WorkerDied, match="exit code 3"):
        Materializer(NeverReady(), place / "source", place / "out").run(errors="skip", progress=False)


@pytest.mark.parametrize("options", [{"sample_timeout_s": 1.0}, {"max_rss": 1 << 30}])
def test_limits_of_workers_need_datamats_own(place, options):
    """Processes of another executor cannot be replaced."""
    with pytest.raises(OptionError, match="only datamat's own workers"):
        small_pairs.job(
            place / "source", place / "out", executor=InlineExecutor(), workers=WorkerOptions(**options)
        ).run()


@register_feature
class Deadly(Scalar):
    """Ends the process that encodes 100: alone, or among others."""

    def encode(self, value):
        self.live(value)
        return super().encode(value)

    def encode_many(self, values):
        for value in values:
            self.live(value)
        return super().encode_many(values)

    def live(self, value):
        if value == 100:
            os._exit(9)


class Numbers(DatasetWriter):
    name = "numbers"
    features = Features({"n": Deadly("int64")})

    def index(self, source):
        return [IndexRow(f"{number:03d}", "train", {"n": number}) for number in range(640)]

    def read(self, row):
        return {"n": row.fields["n"]}


def test_row_that_ends_its_worker_when_it_is_encoded_with_others_is_found(tmp_path):
    job = Prepared(Numbers(), None, tmp_path / "out", errors="skip", shards=1, workers=1)

    report = job.run(progress=False)

    assert [failure.key for failure in report.failures] == ["100"]
    assert len(load(tmp_path / "out")) == 639
