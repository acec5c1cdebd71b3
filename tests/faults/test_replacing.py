"""While shards are replaced, readers by pattern see old ones or new ones, never both, whatever happens to the run."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import small_pairs
from fault_injection import Fault, left_behind
from job import Job

from datamat import Materializer, OutputError, ShardOptions, WorkerOptions, load, verify

PATTERN_READER = pathlib.Path(__file__).with_name("pattern_reader.py")
KILL = Fault("kill group")
POINTS_OF_THE_SUITE = 4

CHANGES = {
    "seed": {"seed": 1},
    "number of shards": {"num_shards": 1},
    "formats": {"format_name": "parquet,tfrecord"},
}


@pytest.fixture(scope="module")
def former(small_source, tmp_path_factory):
    """The output of an earlier run with two formats, and its digests."""
    output = tmp_path_factory.mktemp("former") / "out"
    Job(str(small_source), str(output), format_name="tfrecord,webdataset").run()
    return output, small_pairs.digests(output)


def shards(digests):
    """Return those of the digests that belong to files a reader by pattern takes."""
    return {
        name: digest for name, digest in digests.items() if "-of-" in name and not name.endswith((".idx", ".offsets"))
    }


@contextlib.contextmanager
def pattern_reader(folder, versions, seen):
    """Run a process beside the block that watches the shards in a folder; put what it saw into `seen`."""
    table = folder.parent / "versions.json"
    table.write_text(json.dumps({name: shards(digests) for name, digests in versions.items()}))
    process = subprocess.Popen(
        [sys.executable, PATTERN_READER, folder, "*-of-*.[!io]*", table],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "looking\n"
        yield
        seen |= json.loads(process.communicate()[0].splitlines()[-1])
    finally:
        process.kill()
        process.communicate()


def put(former, output):
    """Restore the output of the earlier run in one step."""
    fresh = output.with_name("fresh")
    shutil.copytree(former, fresh)
    if output.exists():
        os.rename(output, output.with_name("done"))
        shutil.rmtree(output.with_name("done"))
    os.rename(fresh, output)


@pytest.mark.parametrize("change", CHANGES)
def test_reader_never_sees_old_and_new_shards_together(small_source, former, tmp_path, change):
    """It watches throughout: it sees the old shards, none or some of one kind, and then the new ones."""
    output, seen = tmp_path / "looked-at" / "out", {}
    output.parent.mkdir()
    reference = Job(str(small_source), str(tmp_path / "reference"), **CHANGES[change])
    reference.run()
    put(former[0], output)

    with pattern_reader(output, {"old": former[1], "new": small_pairs.digests(reference.output)}, seen):
        dataclasses.replace(reference, output=str(output)).run()

    assert seen["mixed"] == [] and seen["looks"] > 1
    assert "old" in seen["states"]
    assert small_pairs.digests(output) == small_pairs.digests(reference.output)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", CHANGES)
def test_killed_run_leaves_no_mixture_visible(job_server, small_source, former, tmp_path, request, change):
    """The run is killed at any operation; the next one, too, shows no mixture, and ends with the same bytes."""
    output, seen = tmp_path / "looked-at" / "out", {}
    output.parent.mkdir()
    job = Job(str(small_source), str(output), **CHANGES[change])
    put(former[0], output)
    count = job_server.run(job, Fault()).num_operations
    whole = small_pairs.digests(output)
    few = range(1, count + 1, max(1, count // POINTS_OF_THE_SUITE))
    put(former[0], output)

    with pattern_reader(output, {"old": former[1], "new": whole}, seen):
        for at in range(1, count + 1) if not request.config.getoption("--commit") else few:
            put(former[0], output)
            ended = job_server.run(job, dataclasses.replace(KILL, at=at))
            assert ended.code is not None and ended.num_orphans == 0, ended.said
            ended = job_server.run(job)
            assert (ended.code, ended.num_orphans) == (0, 0), ended.said
            assert small_pairs.digests(output) == whole, f"killed at operation {at}"
            assert left_behind(output) == []

    assert seen["mixed"] == [], "old and new together"
    assert {"old", "new"} <= set(seen["states"])


@pytest.mark.timeout(3600)
def test_plans_that_change_between_kills_are_never_mixed(job_server, small_source, former, tmp_path, request):
    """Each run is killed at another operation, and the next has another plan; the output ends as the last one's."""
    output, seen = tmp_path / "looked-at" / "out", {}
    output.parent.mkdir()
    jobs = {name: Job(str(small_source), str(output), **changes) for name, changes in CHANGES.items()}
    versions, counts = {"old": former[1]}, {}
    for name, job in jobs.items():
        put(former[0], output)
        counts[name] = job_server.run(job, Fault()).num_operations
        versions[name] = small_pairs.digests(output)
    put(former[0], output)

    with pattern_reader(output, versions, seen):
        for number in range(200 if not request.config.getoption("--commit") else 12):
            name = list(jobs)[number % len(jobs)]
            # Names change in the last quarter of a run.
            at = counts[name] * (1 + number * 7 % 8) // 8 + number % 5
            ended = job_server.run(jobs[name], dataclasses.replace(KILL, at=at))
            assert ended.code is not None and ended.num_orphans == 0, ended.said
        ended = job_server.run(jobs["seed"])
        assert (ended.code, ended.num_orphans) == (0, 0), ended.said

    assert seen["mixed"] == [], "shards of two plans together"
    assert small_pairs.digests(output) == versions["seed"]
    assert left_behind(output) == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", CHANGES)
def test_kill_at_every_operation_of_the_swap_leaves_a_whole_dataset_or_one_to_resume(
    job_server, small_source, former, tmp_path, request, change
):
    """While the manifest is there, it is that of the old set or of the new one, and `verify` finds nothing wrong."""
    output = tmp_path / "out"
    job = Job(str(small_source), str(output), **CHANGES[change])
    put(former[0], output)
    count = job_server.run(job, Fault()).num_operations
    whole = small_pairs.digests(output)
    former_shards, new_shards = shards(former[1]).items(), shards(whole).items()

    def killed_at(number):
        put(former[0], output)
        ended = job_server.run(job, dataclasses.replace(KILL, at=number))
        assert ended.code is not None and ended.num_orphans == 0, ended.said

    def is_swapping(number):
        killed_at(number)
        return not (output / "manifest.json").exists()

    first = bisect.bisect_left(range(count + 1), True, lo=1, hi=count, key=is_swapping)
    assert 1 < first < count, "the manifest of the old set is away from the start, or never"
    states = set()
    step = 1 if not request.config.getoption("--commit") else max(1, (count - first) // POINTS_OF_THE_SUITE)
    for number in {*range(first - 2, count + 1, step), count}:
        killed_at(number)
        found = shards(small_pairs.digests(output)).items()
        assert found <= former_shards or found <= new_shards, f"operation {number}: old and new together"
        if (output / "manifest.json").exists():
            assert verify(output).ok, f"operation {number}: {verify(output)}"
            assert len(load(output)) == len(load(output).keys())
        states.add("old" if found == former_shards else "new" if found == new_shards else "between")
        ended = job_server.run(job)
        assert (ended.code, ended.num_orphans) == (0, 0), ended.said
        assert small_pairs.digests(output) == whole, f"operation {number}"
        assert left_behind(output) == []
    assert states >= {"old", "new"}


# ------------------------------------------------------------ parts of a plan


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two shards of both splits."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("pairs"), 8, 8)


def job(source, output, **options):
    options = {"shards": ShardOptions(num_shards=2), "workers": WorkerOptions(num_workers=1), **options}
    return Materializer(small_pairs.Pairs(), source, output, **options)


def test_part_of_a_plan_waits_for_the_rest_of_it(pairs, tmp_path):
    """With `include`, over a finished dataset: the old shards stay visible until the last new one is ready."""
    output = tmp_path / "out"
    job(pairs, output).run(progress=False)
    old = shards(small_pairs.digests(output))
    job(pairs, tmp_path / "reference", seed=1).run(progress=False)

    first = job(pairs, output, seed=1, include="train-*").run(progress=False)
    assert shards(small_pairs.digests(output)) == old
    assert (first.is_complete, first.num_shards_written, first.num_shards_held) == (False, 2, 2)
    assert "2 new shards wait in .datamat" in str(first)
    status = job(pairs, output, seed=1).status()
    assert status.done.num_shards == 2 and {change.shard.split("-")[1] for change in status.changes} == {"val"}
    rest = job(pairs, output, seed=1).run(progress=False)

    assert (rest.is_complete, rest.num_shards_reused, rest.num_shards_held) == (True, 2, 0)
    assert small_pairs.digests(output) == small_pairs.digests(tmp_path / "reference")
    assert left_behind(output) == []


def test_part_of_a_first_run_is_visible_at_once(pairs, tmp_path):
    """It replaces nothing: readers may have finished shards early."""
    report = job(pairs, tmp_path / "out", include="train-*").run(progress=False)

    assert report.num_shards_held == 0
    assert len(shards(small_pairs.digests(tmp_path / "out"))) == 2


def test_shards_that_wait_give_way_to_another_plan(pairs, tmp_path):
    """Ready shards of an abandoned plan are neither shown nor left behind; going back keeps the old dataset."""
    output = tmp_path / "out"
    job(pairs, output).run(progress=False)
    whole = small_pairs.digests(output)

    job(pairs, output, seed=1, include="train-*").run(progress=False)
    job(pairs, output, shards=ShardOptions(num_shards=1), include="train-*").run(progress=False)
    assert shards(small_pairs.digests(output)) == shards(whole)
    back = job(pairs, output).run(progress=False)

    assert (back.is_complete, back.num_parts_written) == (True, 0)
    assert small_pairs.digests(output) == whole
    assert left_behind(output) == []


def test_shard_of_the_same_plan_is_repaired_at_once(pairs, tmp_path):
    """It gets the same bytes as before: there is no mixture, and the others need not wait."""
    output = tmp_path / "out"
    job(pairs, output).run(progress=False)
    whole = small_pairs.digests(output)
    next(output.glob("*-train-*.tfrecord")).unlink()

    report = job(pairs, output, include="train-*").run(progress=False)

    assert report.num_shards_written == 1
    assert small_pairs.digests(output) == whole


def test_failed_rebuild_leaves_the_old_dataset(pairs, tmp_path):
    """A transform that fails at one of the last rows costs no finished shard: all of them still load."""
    output = tmp_path / "out"
    job(pairs, output).run(progress=False)
    old = small_pairs.digests(output)

    def fails(sample, rng):
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        job(pairs, output, copies={"val": 1}, transform=fails, seed=1).run(progress=False)

    assert small_pairs.digests(output) == old and verify(output).ok
    assert len(load(output)) == 16
    assert job(pairs, output).status().state == "unfinished"
    assert job(pairs, output).run(progress=False).num_parts_written == 0
    assert left_behind(output) == []


@pytest.mark.parametrize("seen", ["nothing", "a record", "a key"])
def test_reader_that_was_there_before_never_gets_new_records_for_old_ones(pairs, tmp_path, seen):
    """Shards and index are opened when needed: anything replaced meanwhile is refused, not mixed."""
    output = tmp_path / "out"
    job(pairs, output).run(progress=False)
    before = load(output)
    old = {sample["key"]: sample["image"].tobytes() for sample in load(output)}
    if seen != "nothing":
        before[0] if seen == "a record" else before["train000"]

    job(pairs, output, copies=1, transform=small_pairs.jitter, seed=1).run(progress=False)

    got = []
    for number in range(len(before)):
        with contextlib.suppress(OutputError):
            got.append(before[number])
    assert all(old.get(sample["key"]) == sample["image"].tobytes() for sample in got)
    with pytest.raises(OutputError, match=r"a run has replaced it; load"):
        before[len(before) - 1]
    assert len(list(load(output))) == 16


def test_reader_that_was_there_before_reads_on_where_its_shards_are_the_same(pairs, tmp_path):
    """This holds where the manifest is a new one; shards that were replaced are never read."""
    output = tmp_path / "out"
    job(pairs, output, copies={"train": 1}).run(progress=False)
    before = load(output, "val")

    job(pairs, output, copies={"train": 2}).run(progress=False)

    assert len(list(before)) == 8
