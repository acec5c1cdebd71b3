"""Pieces of shards that grow: uploaded part by part, taken over on another machine, from wherever a kill came between.

A refused request stands in for a kill: what it leaves in the store is the same, because nobody tidies up.
The runs in `interop/test_upload_by_url.py` are killed in earnest.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json

import pytest
from memory_s3 import s3
from small_shard import builder_of, finished_files, formats_of, growing_of, make_spec, seal, write_part

from datamat import OutputError, OutputLockedError
from datamat.directory.ledger import FailedRow
from datamat.directory.manifest import write_entry
from datamat.directory.stores import ObjectStore
from datamat.plan.plan import Plan
from datamat.run import upload
from datamat.run.receipts import part_folder
from datamat.run.shards import begin_run
from datamat.run.upload import Pieces

__all__ = ["s3"]

JOINED = [("tfrecord",), ("tfrecord", "webdataset"), ("parquet",)]
if importlib.util.find_spec("array_record"):
    JOINED.append(("arrayrecord",))
SIZES = [2, 1, 3, 0, 2, 4, 1]
SPEC = make_spec(SIZES)
PLAN = Plan("data", (SPEC,))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Have pieces of one or two parts, and chunks of less than one."""
    monkeypatch.setattr(upload, "_PIECE_BYTES", 400)
    monkeypatch.setattr(upload, "_CHUNK_BYTES", 300)


@pytest.fixture
def store(s3):
    """A folder with the mark of the run `one`."""
    made = ObjectStore("s3://bucket/out")
    made.put(".datamat/run", json.dumps({"run": "one"}).encode())
    return made


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Give a function that returns the visible files of an undisturbed shard."""

    @functools.cache
    def reference(names):
        place = tmp_path_factory.mktemp("reference")
        (place / ".datamat/shards").mkdir(parents=True)
        make_all(place, formats_of(names))
        return finished_files(place)

    return reference


class Machine:
    """A scratch folder, and what its driver knows of the pieces."""

    def __init__(self, place, store, names):
        self.place = place
        self.work = place / ".datamat"
        (self.work / "shards").mkdir(parents=True, exist_ok=True)
        self.store = store
        self.formats = formats_of(names)
        self.pieces = Pieces(store, self.work, "one", [made.extension for made in self.formats])

    def adopt(self, **more):
        """Take over what the store has; return the numbers of the parts that are then here."""
        self.pieces.adopt(PLAN, [SPEC], more.pop("max_disk", None), **more)
        return sorted(receipt.number for receipt in builder_of(self.place, self.formats, SPEC).resume())

    def make(self, count, **changed):
        """Make parts up to a number; return the tasks that upload the pieces that they fill."""
        run = begin_run(self.work)
        builder = builder_of(self.place, self.formats, SPEC)
        builder.resume()
        tasks = []
        for part in list(builder.missing())[: count - len(builder.taken())]:
            receipt = write_part(self.place, self.formats, SPEC, part.number, SIZES, run=run)
            builder.add(dataclasses.replace(receipt, **changed))
            tasks += self.pieces.cut(SPEC, builder.taken())
        return tasks

    def send(self, tasks):
        """Upload pieces; return what was uploaded."""
        found = []
        for task in tasks:
            found.append(upload.upload(task))
            self.pieces.settle(found[-1])
        return found

    def listed(self):
        """Return the names of what the store has of the shard."""
        return sorted(self.store.listed(".datamat/growing"))


def make_all(place, formats):
    """Continue until the shard is finished, and return the numbers of the parts that were made."""
    builder = builder_of(place, formats, SPEC)
    run = begin_run(place / ".datamat")
    builder.resume()
    made = [part.number for part in builder.missing()]
    for number in made:
        builder.add(write_part(place, formats, SPEC, number, SIZES, run=run))
    builder.publish(seal(place, formats, SPEC))
    return made


@pytest.mark.parametrize("names", JOINED)
def test_another_machine_continues_from_the_pieces(store, tmp_path, references, names):
    """It makes only what no piece holds, and the shard has the bytes that it always has."""
    one = Machine(tmp_path / "one", store, names)
    sent = one.send(one.make(6))
    held = [receipt.number for piece in sent for receipt in piece.task.receipts]
    other = Machine(tmp_path / "other", store, names)

    there = other.adopt()
    made = make_all(other.place, other.formats)

    assert len(sent) >= 2
    assert all(piece.chunks for piece in sent)
    assert there == held == list(range(len(held)))
    assert made == list(range(len(held), len(SIZES)))
    assert finished_files(other.place) == references(names)


def test_kill_at_any_request_leaves_a_beginning(store, s3, tmp_path, references):
    """Whatever is there then can be continued."""
    counts = []
    for at in itertools.count():
        last = len(s3.seen) + at
        machine = Machine(tmp_path / f"killed-{at}", store, ("tfrecord",))
        s3.meet = lambda operation, path, last=last: 403 if len(s3.seen) > last else None
        try:
            machine.send(machine.make(3))
            is_killed = False
        except OutputError:
            is_killed = True
        s3.meet = lambda operation, path: None
        other = Machine(tmp_path / f"other-{at}", store, ("tfrecord",))
        there = other.adopt()
        assert there == list(range(len(there)))
        assert make_all(other.place, other.formats) == list(range(len(there), len(SIZES)))
        assert finished_files(other.place) == references(("tfrecord",))
        counts.append(len(there))
        if not is_killed:
            break
        store.delete([".datamat/growing.json", *(f".datamat/growing/{name}" for name in machine.listed())])

    assert counts == sorted(counts)
    assert sorted(set(counts)) == [0, 1, 3]


def test_part_is_found_wherever_it_is(store, tmp_path):
    """Apart, joined, and in the finished shard; the piece is the same each time."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    receipts = [write_part(machine.place, machine.formats, SPEC, number, SIZES) for number in range(len(SIZES))]
    (task, *_) = machine.pieces.cut(SPEC, receipts)
    folder = part_folder(machine.work, SPEC.name)

    apart = upload.upload(task)
    offsets = {path: path.read_bytes() for path in folder.glob("*.idx")}
    sealed = seal(machine.place, machine.formats, SPEC)
    joined = upload.upload(task)
    builder = builder_of(machine.place, machine.formats, SPEC)
    builder.resume()
    builder.publish(sealed)
    gone = upload.upload(task)
    folder.mkdir()
    for path, content in offsets.items():  # as for a worker that has read them before
        path.write_bytes(content)
    named = upload.upload(task)

    found = [
        {
            extension: [(one.name, one.num_bytes, one.md5) for one in chunks]
            for extension, chunks in piece.chunks.items()
        }
        for piece in (apart, joined, named)
    ]
    assert found[0] == found[1] == found[2] != {}
    assert gone.chunks == {}


def test_damaged_part_is_not_uploaded(store, tmp_path):
    """Without the object that says what it is, what was sent of it does not count."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    (task, *_) = machine.make(6)
    path = growing_of(machine.place, machine.formats)[0]
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)

    found = upload.upload(task)

    assert found.chunks == {}
    assert [name for name in machine.listed() if name.endswith(".json")] == []
    assert Machine(tmp_path / "other", store, ("tfrecord",)).adopt() == []


def test_damaged_object_is_made_again(store, tmp_path, references):
    """A part whose bytes are not what its receipt says is made again, and those behind it stay."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6))
    name = f".datamat/growing/{SPEC.name}/00000-0.tfrecord"
    content = bytearray(store.get(name))
    content[5] ^= 1
    store.put(name, bytes(content))
    other = Machine(tmp_path / "other", store, ("tfrecord",))

    there = other.adopt()
    make_all(other.place, other.formats)

    assert 0 not in there
    assert len(there) >= 3
    assert finished_files(other.place) == references(("tfrecord",))


def test_piece_without_a_chunk_ends_what_is_taken_over(store, tmp_path, references):
    """Its parts, and those behind it, are made again."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6))
    store.delete([f".datamat/growing/{SPEC.name}/00001-0.tfrecord"])
    other = Machine(tmp_path / "other", store, ("tfrecord",))

    assert other.adopt() == [0]
    assert make_all(other.place, other.formats) == list(range(1, len(SIZES)))
    assert finished_files(other.place) == references(("tfrecord",))


@pytest.mark.parametrize("why", ["changed", "finished", "unplanned", "failed", "format"])
def test_pieces_of_no_use_are_deleted(store, tmp_path, why):
    """They are found by what names them: no listing is relied upon."""
    failed = (FailedRow(0, "key0", "ValueError", "no", "skip"),)
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6, **({"failed": failed, "num_done": 1} if why == "failed" else {})))
    other = Machine(tmp_path / "other", store, ("parquet" if why == "format" else "tfrecord",))
    plan, chosen = PLAN, [SPEC]
    if why == "changed":
        chosen = [make_spec(SIZES, fingerprint="f2")]
    elif why == "unplanned":
        plan, chosen = Plan("data", ()), []
    elif why == "finished":
        make_all(machine.place, machine.formats)
        write_entry(other.work / "shards", builder_of(machine.place, machine.formats, SPEC).finished())

    other.pieces.adopt(plan, chosen, None, with_failed=why != "failed")

    left = other.listed()
    assert left == [] if why != "format" else not [name for name in left if name.endswith(".json")]
    assert not part_folder(other.work, SPEC.name).exists()


def test_pieces_of_shards_that_are_not_chosen_stay(store, tmp_path):
    """Another run may choose them."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6))
    before = machine.listed()

    Machine(tmp_path / "other", store, ("tfrecord",)).pieces.adopt(PLAN, [], None)

    assert machine.listed() == before


def test_parts_in_which_a_row_failed_are_taken_over(store, tmp_path):
    """Unless the run is to try these rows again."""
    failed = (FailedRow(0, "key0", "ValueError", "no", "skip"),)
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6, failed=failed, num_done=1))

    assert len(Machine(tmp_path / "other", store, ("tfrecord",)).adopt()) >= 4


def test_small_disk_gets_no_pieces(store, s3, tmp_path):
    """Their parts are made again, but their bytes are not sent again."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    machine.send(machine.make(6))
    other = Machine(tmp_path / "other", store, ("tfrecord",))

    there = other.adopt(max_disk=1000)
    seen = len(s3.seen)
    tasks = other.make(6)

    assert there == []
    assert tasks == []
    assert len(s3.seen) == seen


def test_piece_of_a_run_that_another_follows_is_refused(store, tmp_path):
    """Nothing is written beside the new run."""
    machine = Machine(tmp_path / "one", store, ("tfrecord",))
    tasks = machine.make(6)
    before = machine.listed()
    store.put(".datamat/run", json.dumps({"run": "other", "pid": 7, "host": "there"}).encode())

    with pytest.raises(OutputLockedError, match="written by another run, of process 7 on there"):
        machine.send(tasks)

    assert machine.listed() == before
