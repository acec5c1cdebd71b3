"""Runs whose output is in a store: what a later run makes of what an earlier one, or another beside it, has left there.

The store is an S3 in memory, and a run is ended, or another begun, when a request arrives: nothing waits. In
`interop/test_upload_by_url.py`, programs write to servers, and are killed.
"""

import contextlib
import itertools
import json
import os
import re

import pyarrow as pa
import pytest
from memory_store import denied, s3

from datamat import Materializer, OptionError, OutputError, ShardOptions, load, materialize
from datamat.testing import InlineExecutor

__all__ = ["s3"]

URL = "s3://bucket/sets/one"
ROOT = "bucket/sets/one/"
KEPT = {"ledger.jsonl", "names.json", "sidecars.json", "inputs"}


def row_of(number):
    """Return a row; one of them fails where errors may be left out."""
    if number == 3:
        raise ValueError("three")
    return {"number": number}


@pytest.fixture
def make(s3, tmp_path):
    """Give a function that makes the output with the scratch folder of a machine."""

    def make(num_rows, machine, num_shards=2, url=URL, **options):
        options = {"scratch": tmp_path / machine, "errors": "skip", "executor": InlineExecutor(), **options}
        options |= {"shards": ShardOptions(num_shards=num_shards), "progress": False}
        if not url.startswith("s3:"):
            del options["scratch"]
        return materialize(row_of, list(range(num_rows)), url, **options)

    return make


class _Stopped(BaseException):
    """Ends a run at one place, as a kill would."""


@pytest.fixture
def stopped(s3, make):
    """Give a function that ends a run when a request arrives, as a kill would."""

    def stopped(verb, path, *args, times=1):
        number = itertools.count(1)

        def meet(found, where):
            if found == verb and re.fullmatch(ROOT + path, where) and next(number) >= times:
                raise _Stopped

        s3.meet = meet
        with pytest.raises(_Stopped):
            make(*args)
        s3.meet = lambda verb, path: None

    return stopped


@pytest.fixture
def numbers(tmp_path):
    """Give a function that returns what readers find now, on a machine that has nothing of it."""
    looks = itertools.count()

    def numbers():
        data = load(URL, "train", cache_dir=tmp_path / f"cache-{next(looks)}")
        return sorted(int(sample["number"]) for sample in data)

    return numbers


def rows(count):
    """Return the numbers of the rows that give records."""
    return [number for number in range(count) if number != 3]


def there(s3):
    """Return the visible objects, and the names of what is in `.datamat`."""
    found = {path[len(ROOT) :]: one.content for path, one in s3.objects.items() if path.startswith(ROOT)}
    inner = {name.removeprefix(".datamat/") for name in found if name.startswith(".datamat/")}
    return {name: content for name, content in found.items() if not name.startswith(".datamat/")}, inner


def check(s3, make, tmp_path, num_rows, num_shards=2, **options):
    """Assert that the store holds what a local run gives, and nothing is left over."""
    make(num_rows, "", num_shards, url=str(tmp_path / "local"), **options)
    found, inner = there(s3)
    local = {path.relative_to(tmp_path / "local"): path for path in (tmp_path / "local").rglob("*") if path.is_file()}
    assert found == {str(name): path.read_bytes() for name, path in local.items() if ".datamat" not in name.parts}
    assert inner <= KEPT


@pytest.mark.parametrize("name", ["tfrecord", "parquet", ["tfrecord.gz", "webdataset"]], ids=str)
def test_bucket_holds_the_bytes_of_a_local_run(s3, make, tmp_path, name):
    """A second run, also on another machine, finds all of it, and sends no shard; the samples are those of the job."""
    make(8, "one", format=name)
    check(s3, make, tmp_path, 8, format=name)

    for machine in ("one", "other"):
        first = len(s3.seen)
        assert make(8, machine, format=name).did_nothing
        assert not [path for what, path in s3.seen[first:] if what == "write" and "data-train" in str(path)]
    data = load(URL, "train", cache_dir=tmp_path / "cache")
    assert sorted(int(sample["number"]) for sample in data) == [*range(3), *range(4, 8)]


@pytest.mark.timeout(300)  # a request at a time is killed
@pytest.mark.parametrize("kind", ["new", "replaced", "renamed", "edited"])
def test_kill_at_any_request_loses_nothing(s3, make, numbers, request, kind, tmp_path):
    """Readers find the old dataset or the new one; the next run, on whatever machine, makes the new one."""
    halves = {"train": 0.5, "val": 0.5}
    options = {"splits": halves} if kind == "renamed" else {}
    outcomes = []
    if kind == "replaced":
        make(8, "old")
    elif kind == "renamed":
        make(12, "old", splits=dict(reversed(halves.items())))
    elif kind == "edited":
        make(12, "old")
        gone = load(URL, cache_dir=tmp_path / "cache").keys()[:2]

    def act(machine):
        if kind != "edited":
            make(12, machine, **options)
            return
        view = load(URL, cache_dir=tmp_path / "cache").drop(gone)
        view.save(executor=InlineExecutor(), progress=False, scratch=tmp_path / machine)

    if kind != "new":
        outcomes.append(numbers())
    before = dict(s3.objects)
    first = len(s3.seen)
    act("whole")
    new, count = there(s3)[0], len(s3.seen) - first
    outcomes.append(numbers())
    step = 20 if request.config.getoption("--commit") else 2
    found = []

    for at in range(1 + request.config.option.sample_seed % step, count, step):
        s3.objects = dict(before)
        begun = len(s3.seen)

        def meet(verb, path, last=begun + at):
            if len(s3.seen) > last:
                raise _Stopped

        s3.meet = meet
        with pytest.raises((_Stopped, OutputError)):
            act(f"killed-{at}")
        s3.meet = lambda verb, path: None
        if "manifest.json" in there(s3)[0]:
            found.append(numbers())
            assert found[-1] in outcomes, f"killed at request {at}"
        act(f"after-{at}" if at % 4 < 2 else f"killed-{at}")
        assert there(s3)[0] == new, f"killed at request {at}"
        assert there(s3)[1] <= KEPT
    assert all(outcome in found for outcome in outcomes) or kind == "new"


@pytest.mark.timeout(300)  # a request at a time is killed
@pytest.mark.parametrize("damage", [r"data-train-0000[01].*tfrecord", r"_index/train.keys", "manifest.json"])
def test_repair_that_is_killed_at_any_request_loses_nothing(s3, tmp_path, request, damage):
    """What is damaged stays until it is replaced; the next repair, or run, on whatever machine, brings back all."""
    job = Materializer(pa.table({"number": range(8)}), output=URL, shards=ShardOptions(num_shards=3))

    def do(work, machine):
        work(scratch=tmp_path / machine, executor=InlineExecutor(), progress=False)

    do(job.run, "old")
    whole = there(s3)[0]
    for path in [path for path in s3.objects if re.fullmatch(ROOT + damage, path)]:
        s3.put(path, s3.objects[path].content[:-9] + b"damaged")
    before, damaged = dict(s3.objects), {one.content for one in s3.objects.values() if b"damaged" in one.content[-7:]}
    first = len(s3.seen)
    do(job.repair, "whole")
    assert there(s3)[0] == whole
    count = len(s3.seen) - first
    step = 20 if request.config.getoption("--commit") else 2

    for at in range(1 + request.config.option.sample_seed % step, count, step):
        s3.objects = dict(before)
        begun = len(s3.seen)

        def meet(verb, path, last=begun + at):
            if len(s3.seen) > last:
                raise _Stopped

        s3.meet = meet
        with pytest.raises((_Stopped, OutputError)):
            do(job.repair, f"killed-{at}")
        s3.meet = lambda verb, path: None
        left = {one.content for one in s3.objects.values()}
        assert damaged <= left or there(s3)[0].keys() >= whole.keys(), f"killed at request {at}"
        work = job.repair if at % 3 or damage == "manifest.json" else job.run
        do(work, f"after-{at}" if at % 4 < 2 else f"killed-{at}")
        assert there(s3)[0] == whole, f"killed at request {at}"
        inner = {name for name in there(s3)[1] if not name.startswith("quarantine/foreign/")}
        assert inner <= KEPT, f"killed at request {at}"


def test_lost_object_is_made_again(s3, make):
    """So is one that somebody has replaced by as many other bytes; nothing else is."""
    make(8, "one", 3)
    expected = there(s3)[0]
    first, second, _ = sorted(name for name in expected if name.endswith(".tfrecord"))
    del s3.objects[f"{ROOT}{first}"]
    s3.put(f"{ROOT}{second}", bytes(len(expected[second])))

    report = make(8, "one", 3)

    assert there(s3)[0] == expected
    assert report.num_shards_written == 2


@pytest.mark.parametrize("machine", ["old", "new"])
@pytest.mark.parametrize(
    ("verb", "path", "is_published"),
    [
        ("write", "manifest.json", False),
        ("delete", r"data-train-00001-of-00003.tfrecord", True),
        ("copy", r"data-train-.*idx", True),
        ("copy", r"_index/train.keys", True),
        ("write", "README.md", True),
    ],
)
def test_work_of_a_lost_machine_is_taken_over(s3, make, stopped, numbers, tmp_path, verb, path, is_published, machine):
    """By one that has the dataset before, or nothing: shards that wait, and those that were being moved."""
    make(8, "old", 3)
    stopped(verb, path, 12, "lost")

    assert numbers() == rows(12 if is_published else 8)
    report = make(12, machine)
    assert (report.is_complete, report.num_shards_written) == (True, 0)
    check(s3, make, tmp_path, 12)


def test_shard_that_vanishes_while_it_waits_ends_the_run(s3, make, numbers):
    """No manifest names what is not there; the next run makes it again."""
    make(8, "one")

    def meet(verb, path):
        if verb == "write" and path.endswith("_index/train.keys"):
            for waiting in [one for one in s3.objects if "/run-" in one and one.endswith("2.tfrecord")][:1]:
                del s3.objects[waiting]

    s3.meet = meet

    with pytest.raises(OutputError, match=r"run-00001/.*2\.tfrecord was uploaded, and is gone or another one now; "):
        make(12, "one")
    s3.meet = lambda verb, path: None
    assert numbers() == rows(8)
    assert make(12, "one").num_shards_written == 1


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize(
    ("verb", "path", "is_told"),
    [
        ("write", r"manifest\.json", True),
        ("stat", r"manifest\.json", True),
        ("write", r"\.datamat/run-.*\.(tfrecord|json)", True),
        ("copy", r"data-train-.*\.tfrecord", True),
        ("stat", r"data-train-.*-of-00002\.idx", True),
        ("write", r"README\.md", False),
    ],
)
def test_of_two_that_publish_at_once_one_is_told(s3, make, numbers, tmp_path, verb, path, is_told, has_old):
    """Wherever one is late, and the other has done all in between: its set is there, and the late one changes nothing.

    It says so unless its own set was whole before.
    """
    if has_old:
        make(8, "one")
    others, begun = [], len(s3.seen)

    def meet(found, where):
        # The other begins once this one has: in the middle of its work, or at its end.
        if found == verb and re.fullmatch(ROOT + path, where) and len(s3.seen) > begun + 20:
            s3.meet = lambda verb, path: None
            others.append(make(16, "two"))

    s3.meet = meet
    told = "another has published meanwhile|is gone or another one now|is not what this run has seen or sent"
    refused = pytest.raises(OutputError, match=told) if is_told else contextlib.suppress(OutputError)
    if not has_old and verb in {"copy", "stat"} and "data" in path:
        refused = contextlib.nullcontext()  # nothing moves, and nothing goes: the other never comes
    with refused:
        make(12, "one", 3)
    s3.meet = lambda verb, path: None

    assert numbers() == rows(16 if others else 12)
    make(16, "one")
    check(s3, make, tmp_path, 16)


def test_another_machine_makes_what_is_not_finished(s3, make, stopped, tmp_path):
    """The shards that a lost one has finished count."""
    stopped("write", r".*/run-.*/data-.*\.json", 8, "lost", 4, times=3)

    assert make(8, "other", 4).num_shards_written == 2
    check(s3, make, tmp_path, 8, 4)


@pytest.mark.parametrize("times", [1, 2])
def test_shards_of_another_plan_go(s3, make, stopped, tmp_path, times):
    """Of a machine that was lost: whole shards that no manifest names."""
    stopped("write", r".*/run-.*/data-.*\.json", 8, "lost", 4, times=times)

    make(8, "other", 3)

    check(s3, make, tmp_path, 8, 3)


def test_run_with_nothing_to_do_leaves_what_another_makes(s3, make, tmp_path):
    """The other may be alive, and publishes after it."""
    make(8, "one")
    begun, others = len(s3.seen), []

    def meet(verb, path):
        if verb == "write" and re.fullmatch(ROOT + r".*/run-.*/data-.*\.json", path) and len(s3.seen) > begun + 20:
            s3.meet = lambda verb, path: None
            others.append(make(8, "idle"))

    s3.meet = meet
    make(12, "other", 3)

    assert others[0].did_nothing
    check(s3, make, tmp_path, 12, 3)


def test_small_objects_are_put_back(s3, make):
    """Offsets, index files and sidecars that somebody has deleted; nothing else is sent."""
    make(8, "one")
    expected = there(s3)[0]
    gone = [name for name in expected if name.endswith(".idx") or "index/" in name]
    assert len(gone) >= 3
    for name in gone:
        del s3.objects[f"{ROOT}{name}"]

    make(8, "one")

    assert there(s3)[0] == expected


@pytest.mark.parametrize("machine", ["one", "other"])
@pytest.mark.parametrize("name", ["README.md", "croissant.json"])
def test_document_of_somebody_else_stays(s3, make, machine, name):
    """One that was there before the first run is never replaced, nor is one of datamat's that somebody has changed."""
    own = b'{"mine": true}'
    s3.put(f"{ROOT}{name}", own)
    make(8, "one", format="parquet")
    assert there(s3)[0][name] == own

    del s3.objects[f"{ROOT}{name}"]
    make(8, "one", format="parquet")
    assert there(s3)[0][name] != own
    s3.put(f"{ROOT}{name}", own)
    for num_rows in (8, 12):
        make(num_rows, machine, format="parquet")
        assert there(s3)[0][name] == own


@pytest.mark.parametrize("machine", ["one", "new"])
def test_index_of_another_dataset_is_replaced(s3, make, machine):
    """Whoever runs next."""
    make(8, "one")
    expected = there(s3)[0]
    s3.put(f"{ROOT}_index/train.index", b"of another dataset")

    make(8, machine)

    assert there(s3)[0] == expected


def test_ledger_goes_on_from_another_machine(s3, make):
    """It says why rows failed, whoever runs last."""
    make(8, "one")
    make(8, "two")

    ledger = s3.objects[f"{ROOT}.datamat/ledger.jsonl"].content.decode()
    assert [json.loads(line)["event"] for line in ledger.splitlines()].count("sample_skipped") == 1


def test_refusals_come_before_any_work(s3, make):
    """They name place and remedy."""
    with pytest.raises(OutputError, match=r"s3://nowhere/out/.* cannot be (read|written): .* make the bucket"):
        make(3, "one", url="s3://nowhere/out")
    s3.meet = lambda verb, path: denied if verb == "write" else None
    with pytest.raises(OutputError, match=rf"{URL}/.datamat/names.json cannot be written: .* credentials"):
        make(3, "one")
    assert not s3.objects


def test_object_that_changes_meanwhile_is_not_replaced(s3, make):
    """Not even where it was looked at a moment ago; the run says so."""
    make(8, "one")
    name = f"{ROOT}data-train-00000-of-00002.tfrecord"
    del s3.objects[name]

    def meet(verb, path):
        if (verb, path) == ("write", name):
            s3.put(name, b"of another")

    s3.meet = meet

    with pytest.raises(OutputError, match=r"00000-of-00002\.tfrecord is not what this run has seen or sent; .* bytes"):
        make(8, "one")
    assert s3.objects[name].content == b"of another"


def test_answer_that_is_lost_is_no_other_writer(s3, make, tmp_path):
    """The object is then there, and what is in it decides."""

    def meet(verb, path):
        if verb == "write" and path.endswith(".tfrecord"):
            shard = next((tmp_path / "one").rglob(path.rpartition("/")[2]))
            s3.put(path, shard.read_bytes())

    s3.meet = meet

    assert make(8, "one").is_complete
    s3.meet = lambda verb, path: None
    check(s3, make, tmp_path, 8)


def test_store_without_conditions_is_written_without_them(s3, make, tmp_path):
    """But tasks share no output there."""
    s3.has_conditions = False

    make(8, "one")

    check(s3, make, tmp_path, 8)


def test_memory_is_a_store_of_this_process(tmp_path):
    """The driver itself writes there, whatever workers make the shards."""
    url = f"memory://{tmp_path.name}/out"

    report = materialize(lambda n: {"n": n}, range(8), url, scratch=tmp_path, shards=ShardOptions(num_shards=2))

    assert (report.is_complete, report.output) == (True, url)
    assert len(load(url, cache_dir=tmp_path / "cache")) == 8


def test_what_a_url_cannot_do_is_refused(tmp_path):
    """The message says what to do instead."""
    table = pa.table({"number": [1, 2]})
    job = Materializer(table, output="memory://x/out")

    for work in (job.repair, job.verify):
        with pytest.raises(OutputError, match=r"memory://x/out holds no manifest.json; .* finish its run"):
            work()
    with pytest.raises(OptionError, match="scratch is given, but output"):
        Materializer(table, output=tmp_path / "out").run(scratch=tmp_path)
    with pytest.raises(OptionError, match="can be read, not written"):
        Materializer(table, output="https://host/out")


def test_file_url_is_a_folder(make, tmp_path):
    """It is written as any local output."""
    make(5, "", url=f"file://{tmp_path}/out")

    assert os.path.isfile(tmp_path / "out/manifest.json")
