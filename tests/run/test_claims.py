"""What a task takes, by a clock that the test moves: no process, and no waiting; on a disk, and where there is none."""

import types

import pytest
from dict_folder import DictFolder

from datamat.folders import LocalFolder
from datamat.run import slices
from datamat.run.outputs import StoredShard
from datamat.run.slices import TaskClaims, TaskNumber, TaskSession

LEASE_S = 60.0
SHARDS = [types.SimpleNamespace(name=f"n-{n}", fingerprint=f"f{n}", num_rows=1) for n in range(2)]


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock: a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(slices, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=None))
    return now


class Store(DictFolder):
    """A place without files of this machine, which keeps conditions."""

    keeps = frozenset({"create"})


@pytest.fixture(params=["disk", "elsewhere"])
def output(request, tmp_path):
    """Return a folder of the output, a new one for each task."""
    files, versions = {}, {}
    if request.param == "disk":
        return lambda: LocalFolder(tmp_path / "out")
    return lambda: Store(files, versions=versions)


@pytest.fixture
def claims(output, tmp_path, clock):
    """Return the claims of a task of two, on the two shards that the output lacks."""
    planned = types.SimpleNamespace(
        job=types.SimpleNamespace(place="out"),
        plan=types.SimpleNamespace(name="n", shards=SHARDS),
        manifest_digests={},
    )

    def claims(index, host="", folder=None):
        work = tmp_path / f"{host}{index}"
        work.mkdir(exist_ok=True)
        return TaskClaims(planned, TaskNumber(index, 2, LEASE_S), SHARDS, TaskSession(folder or output()), work)

    return claims


def _take_all(claims):
    return [shard.name for shard in iter(claims.take, None)]


def test_each_shard_is_taken_once(claims):
    """Tasks begin apart; what one has, the other does not get, nor the holder again."""
    first, second = claims(0), claims(1)

    assert [first.take().name, second.take().name] == ["n-0", "n-1"]
    assert _take_all(first) == []
    assert _take_all(second) == []


def test_silent_holder_loses_its_shards_after_the_lease(claims, clock):
    """Neither before, nor by the age of the lease: the silence counts from when the waiting task sees it."""
    first, second = claims(0), claims(1)
    assert _take_all(first) == ["n-0", "n-1"]
    clock[0] += 10 * LEASE_S

    assert _take_all(second) == []  # sees the heartbeat for the first time
    clock[0] += LEASE_S
    assert _take_all(second) == []
    clock[0] += 0.1
    assert _take_all(second) == ["n-1", "n-0"]


def test_beating_holder_keeps_its_shards(claims, clock):
    """For as long as its number rises."""
    first, second = claims(0), claims(1)
    _take_all(first)

    for _ in range(20):
        clock[0] += LEASE_S / 2
        first.beat()
        assert _take_all(second) == []


def test_beating_holder_keeps_its_shards_where_a_listing_has_no_versions(claims, output, clock):
    """Then the heartbeats are read."""
    first, folder = claims(0), output()
    listed = folder.list
    folder.list = lambda *names: {name: stat._replace(version="") for name, stat in listed(*names).items()}
    second = claims(1, folder=folder)
    _take_all(first)

    for _ in range(3):
        assert _take_all(second) == []
        clock[0] += LEASE_S
        first.beat()
    assert _take_all(second) == []
    clock[0] += LEASE_S + 0.1
    assert _take_all(second) == ["n-1", "n-0"]


def test_shards_of_one_that_left_are_free_at_once(claims):
    """No lease needs to expire; and who left can come back to what nobody took."""
    first, second = claims(0), claims(1)
    _take_all(first)
    first.close()

    assert _take_all(second) == ["n-1", "n-0"]


def test_next_process_of_a_task_has_its_shards_at_once(claims):
    """It holds the lock of the task's folder: the process before it is gone. Elsewhere, it may be at work."""
    _take_all(claims(0))

    assert _take_all(claims(0, "another-host")) == []
    assert _take_all(claims(0)) == ["n-0", "n-1"]


def test_one_of_two_takes_over(claims, output, clock):
    """Both see the same dead holder; while one is about to take over, the other does."""
    folder = output()
    first, second, third = claims(0), claims(1), claims(1, "another-host", folder)
    _take_all(first)
    assert _take_all(second) == _take_all(third) == []
    clock[0] += LEASE_S + 0.1
    write, taken = folder.write, []

    def meet(name, *args):
        if "/leases/" in name and not taken:
            taken.extend(_take_all(second))
        return write(name, *args)

    folder.write = meet

    assert _take_all(third) == []
    assert taken == ["n-1", "n-0"]


def test_finished_shards_are_nobodys(claims, clock):
    """No expiry gives them to another; the output is done with the last of them, whoever made it."""
    first, second = claims(0), claims(1)
    _take_all(first)
    first.finish("n-0", StoredShard((), "", {}))
    assert not second.are_all_done
    assert _take_all(second) == []
    clock[0] += LEASE_S + 0.1

    assert _take_all(second) == ["n-1"]
    second.finish("n-1", StoredShard((), "", {}))
    assert first.are_all_done
    assert second.are_all_done


def test_first_of_two_that_made_a_shard_counts(claims, output):
    """Rows may have failed in the other; what it has made is in a folder of its own."""
    first, second = claims(0), claims(1)
    made = [StoredShard((), folder, {}) for folder in ("made/first", "made/second")]

    first.finish("n-0", made[0])
    second.finish("n-0", made[1])

    assert TaskSession(output()).made() == {"n-0": made[0]}


def test_one_task_writes_the_manifest(claims, clock):
    """The one that has the lease of it, until it seems dead."""
    first, second = claims(0), claims(1)

    assert first.takes_end()
    assert first.takes_end()
    assert not second.takes_end()
    clock[0] += LEASE_S + 0.1
    first.beat()
    assert not second.takes_end()
    clock[0] += LEASE_S + 0.1
    assert second.takes_end()
    first.beat()
    assert not first.takes_end()


def test_task_that_wakes_after_the_end_takes_nothing(claims, output):
    """Nor does it write anything down where a session that has begun since would see it."""
    first = claims(0)
    TaskSession(output()).remove()
    assert first.is_over
    second = claims(1)
    before = [*output().list(".datamat/slices", deep=True)]

    first.close()
    first.beat()

    assert [*output().list(".datamat/slices", deep=True)] == before
    assert first.is_over
    assert first.take() is None
    assert _take_all(second) == ["n-1", "n-0"]


@pytest.mark.parametrize("output", ["elsewhere"], indirect=True)
def test_process_counts_as_at_work_until_it_leaves_or_is_taken_over(claims, output, clock):
    """Where no lock tells; by name, and how many shards each has finished."""
    first, second = claims(0), claims(1)
    _take_all(first)
    first.finish("n-0", StoredShard((), "", {}))
    rows, made = TaskSession(output()).tasks()
    assert [(name, holder.partition(" ")[0], number) for name, holder, number in rows] == [
        ("task-00000", "process", 1),
        ("task-00001", "process", 0),
    ]
    assert list(made) == ["n-0"]
    _take_all(second)
    clock[0] += LEASE_S + 0.1

    assert _take_all(second) == ["n-1"]
    assert [(name, bool(holder)) for name, holder, _ in TaskSession(output()).tasks()[0]] == [
        ("task-00000", False),
        ("task-00001", True),
    ]
    second.close()
    assert [name for name, holder, _ in TaskSession(output()).tasks()[0] if holder] == []
