"""While shards are replaced, readers by pattern see old ones or new ones, never both, whatever happens to the run."""

import bisect
import contextlib
import dataclasses
import os
import shutil

import pytest
import small_pairs
from fault_injection import Fault, left_behind, records
from job import Job

from datamat import OutputError, ShardOptions, load, verify
from datamat.testing import InlineExecutor

KILL = Fault("kill group")

CHANGES = {
    "seed": {"seed": 1},
    "number of shards": {"num_shards": 1},
    "formats": {"format_name": "parquet,tfrecord"},
}


@pytest.fixture(scope="module")
def former(small_source, tmp_path_factory):
    """The output of an earlier run with two formats, and its digests."""
    output = tmp_path_factory.mktemp("former") / "out"
    Job(str(small_source), str(output), format_name="tfrecord,webdataset").run(InlineExecutor())
    return output, small_pairs.digests(output)


def shards(digests):
    """Return those of the digests that belong to files a reader by pattern takes."""
    return {
        name: digest for name, digest in digests.items() if "-of-" in name and not name.endswith((".idx", ".offsets"))
    }


def put(former, output):
    """Copy the output of the earlier run."""
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(former, output)


@pytest.mark.parametrize("change", CHANGES)
def test_reader_never_sees_old_and_new_shards_together(small_source, former, tmp_path, monkeypatch, change):
    """After each name that the run gives or takes there are old shards, none or some new ones, and no mixture."""
    output, seen = tmp_path / "out", []
    reference = Job(str(small_source), str(tmp_path / "reference"), **CHANGES[change])
    reference.run(InlineExecutor())
    new = small_pairs.digests(reference.output)
    put(former[0], output)

    def looking(call):
        def called(*args, **more):
            call(*args, **more)
            found = shards(small_pairs.digests(output)).items()
            seen.append([name for name, all_of_it in (("old", former[1]), ("new", new)) if found <= all_of_it.items()])

        return called

    with monkeypatch.context() as patch:  # in this process, where every name is seen
        for name in ("replace", "rename", "unlink", "remove"):
            patch.setattr(os, name, looking(getattr(os, name)))
        dataclasses.replace(reference, output=str(output)).run(InlineExecutor())

    assert [] not in seen, "old and new together"
    assert seen[0] == ["old"] and seen[-1] == ["new"]
    assert small_pairs.digests(output) == new


@pytest.mark.timeout(600)
def test_plans_that_change_between_kills_are_never_mixed(job_server, small_source, former, tmp_path, request):
    """Each run is killed at another operation, and the next has another plan; the output ends as the last one's."""
    output = tmp_path / "out"
    jobs = {name: Job(str(small_source), str(output), **changes) for name, changes in CHANGES.items()}
    versions, counts = {"old": former[1]}, {}
    for name, job in jobs.items():
        put(former[0], output)
        counts[name] = job_server.run(job, Fault()).num_operations
        versions[name] = small_pairs.digests(output)
    put(former[0], output)

    for number in range(6 if request.config.getoption("--commit") else 120):
        name = list(jobs)[number % len(jobs)]
        # Names change in the last quarter of a run.
        at = counts[name] * (1 + number * 7 % 8) // 8 + number % 5
        ended = job_server.run(jobs[name], dataclasses.replace(KILL, at=at))
        assert ended.code is not None and ended.num_orphans == 0, ended.said
        found = shards(small_pairs.digests(output)).items()
        assert any(found <= whole.items() for whole in versions.values()), "shards of two plans together"
    ended = job_server.run(jobs["seed"])

    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(output) == versions["seed"]
    assert left_behind(output) == []


@pytest.mark.sample(3)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", CHANGES)
def test_kill_at_every_operation_of_the_swap_leaves_the_old_set_or_the_new_one(
    job_server, small_source, former, tmp_path, request, change
):
    """By the manifest; and whoever lists names finds files of one of both only."""
    output = tmp_path / "out"
    job = Job(str(small_source), str(output), **CHANGES[change])
    put(former[0], output)
    sets = [records(output)]
    count = job_server.run(job, Fault()).num_operations
    whole = small_pairs.digests(output)
    sets.append(records(output))
    former_shards, new_shards = shards(former[1]).items(), shards(whole).items()

    def killed_at(number):
        put(former[0], output)
        ended = job_server.run(job, dataclasses.replace(KILL, at=number))
        assert ended.code is not None and ended.num_orphans == 0, ended.said

    def has_new_manifest():
        return small_pairs.digests(output)["manifest.json"] != former[1]["manifest.json"]

    def is_published(number):
        killed_at(number)
        return has_new_manifest()

    first = bisect.bisect_left(range(count + 1), True, lo=1, hi=count, key=is_published)
    assert 1 < first < count, "the new set is published from the start, or never"
    states = set()
    step = max(1, (count - first) // 3) if request.config.getoption("--commit") else 2
    # From run to run, how many operations come first differs by some: what is old for sure is far before them.
    for number in {first // 2, *range(first - 2, count + 1, step), count}:
        killed_at(number)
        found = shards(small_pairs.digests(output)).items()
        assert found <= former_shards or found <= new_shards, f"operation {number}: old and new together"
        assert records(output) == sets[has_new_manifest()], f"operation {number}"
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


job = small_pairs.job


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


@pytest.mark.long
def test_reader_that_was_there_before_reads_on_where_its_shards_are_the_same(pairs, tmp_path):
    """This holds where the manifest is a new one; shards that were replaced are never read."""
    output = tmp_path / "out"
    job(pairs, output, copies={"train": 1}).run(progress=False)
    before = load(output, "val")

    job(pairs, output, copies={"train": 2}).run(progress=False)

    assert len(list(before)) == 8
