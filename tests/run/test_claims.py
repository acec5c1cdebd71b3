"""What a task takes, by a clock that the test moves: no process, and no waiting."""

from __future__ import annotations

import types

import pytest

from datamat.run import slices
from datamat.run.slices import TaskBucket, TaskClaims, TaskFolder, TaskNumber

LEASE_S = 60.0
SHARDS = [types.SimpleNamespace(name=f"n-{n}", fingerprint=f"f{n}", num_rows=1) for n in range(2)]


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock: a list of one number."""
    now = [1000.0]
    monkeypatch.setattr(slices, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=None))
    return now


class Bucket(dict):
    """An object store in memory, as far as tasks need one; tests/interop/test_shared_bucket.py has real ones."""

    def put(self, name, content):
        self[name] = content

    def create(self, name, content):
        return self.setdefault(name, content) is content

    def delete(self, names):
        for name in names:
            self.pop(name, None)

    def listed(self, folder):
        return {name[len(folder) + 1 :]: content for name, content in self.items() if name.startswith(f"{folder}/")}

    def url_of(self, name):
        return f"s3://bucket/{name}"

    head = dict.get


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    """Return where tasks meet, once for each task."""
    store = Bucket()
    return lambda: TaskFolder(tmp_path) if request.param == "folder" else TaskBucket(store)


@pytest.fixture
def claims(place, tmp_path, clock):
    """Return the claims of a task of two, on the two shards that the output lacks."""
    planned = types.SimpleNamespace(
        job=types.SimpleNamespace(place="out"),
        plan=types.SimpleNamespace(name="n", shards=SHARDS),
        manifest_digests={},
    )
    return lambda index: TaskClaims(planned, TaskNumber(index, 2, LEASE_S), SHARDS, place(), tmp_path)


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

    assert _take_all(second) == []  # sees the number for the first time
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


def test_shards_of_one_that_left_are_free_at_once(claims):
    """No lease needs to expire; and who left can come back to what nobody took."""
    first, second = claims(0), claims(1)
    _take_all(first)
    first.close()

    assert _take_all(second) == ["n-1", "n-0"]


def test_next_process_of_a_task_has_its_shards_at_once(claims):
    """It holds the lock of the task's folder: the process before it is gone."""
    _take_all(claims(0))

    assert _take_all(claims(0)) == ["n-0", "n-1"]


def test_one_of_two_takes_over(claims, clock, monkeypatch):
    """Both see the same dead lease, and one creates the next generation; the other sees it alive from then on."""
    first, second, third = claims(0), claims(1), claims(1)
    _take_all(first)
    assert _take_all(second) == []
    assert _take_all(third) == []
    clock[0] += LEASE_S + 0.1
    seen = third._latest()
    monkeypatch.setattr(third, "_latest", lambda: seen)  # it has looked before the second one took them

    assert _take_all(second) == ["n-1", "n-0"]
    assert _take_all(third) == []


def test_finished_shards_are_nobodys(claims, clock, tmp_path):
    """No expiry gives them to another; the output is done with the last of them, whoever made it."""
    first, second = claims(0), claims(1)
    _take_all(first)
    first.finish("n-0", (), None)
    assert not second.are_all_done
    assert _take_all(second) == []
    clock[0] += LEASE_S + 0.1

    assert _take_all(second) == ["n-1"]
    second.finish("n-1", (), None)
    assert first.are_all_done
    assert second.are_all_done


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
