"""Shards are assembled from parts made in any order, from any point where a run was killed, to the same bytes."""

import builtins
import contextlib
import errno
import fcntl
import functools
import itertools
import os
import pathlib
import re
import shutil

import pytest
from small_shard import (
    FORMATS,
    SIZES,
    builder_of,
    finish,
    finished_files,
    formats_of,
    growing_of,
    keys_of,
    make,
    make_spec,
    seal,
    unfinished,
    write_part,
)

from datamat import CorruptDataError, IncompleteRunError, OutputLockedError
from datamat.directory.keys import KeyDigest
from datamat.formats import Offsets
from datamat.run import growing, parts, shards
from datamat.run.growing import GrowingShard
from datamat.run.receipts import DamagedPartError, part_folder
from datamat.run.shards import begin_run


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Give a function that returns the visible files of an undisturbed shard, and what its entry lists."""

    @functools.cache
    def reference(names):
        place = tmp_path_factory.mktemp("reference")
        (place / ".datamat" / "shards").mkdir(parents=True)
        _, infos = make(place, formats_of(names))
        return finished_files(place), infos

    return reference


@pytest.fixture
def reference(references, names):
    return references(names)


def check_published(place, formats, builder, reference):
    """Complete and publish a shard; compare it with an undisturbed one."""
    infos = finish(builder, seal(place, formats, builder.spec))
    assert (finished_files(place), infos) == reference


def test_shard_holds_the_records_of_its_parts_in_their_order(reference, formats, tmp_path):
    """Its entry lists rows, records, bytes, checksum and keys of each file; the offsets lead to every record."""
    files, infos = reference
    keys = [key for number in range(len(SIZES)) for key in keys_of(number)]

    assert set(files) == {name for info in infos for name in (info.file, info.index_file)}
    for info, shard_format in zip(infos, formats, strict=True):
        shard = tmp_path / info.file
        shard.write_bytes(files[info.file])
        assert [bytes(r["key"][0]).decode() for r in shard_format.read(shard)] == keys
        assert (info.num_rows, info.num_records, info.num_bytes) == (10, 8, shard.stat().st_size)
        assert (info.checksum, info.key_digest) == (info.checksum_of(shard), KeyDigest(keys).hexdigest())
        with open(shard, "rb") as file:
            offsets = Offsets.from_text(files[info.index_file].decode())
            assert shard_format.find_offsets(file, path="") == offsets


@pytest.mark.parametrize("is_own", [True, False], ids=["appended", "apart"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 3, 0, 4, 2), (0, 4, 2, 1, 3)])
def test_parts_may_come_in_any_order(place, formats, order, is_own, reference):
    """The shard is the same and is published with its last part; whoever closes a gap appends what lies apart."""
    spec = make_spec()
    builder = builder_of(place, formats)
    run = begin_run(place / ".datamat") if is_own else ""
    sealed = ()
    for number in order:
        assert not builder.is_complete and not sealed
        assert number in [part.number for part in builder.missing()]
        receipt = write_part(place, formats, spec, number, run=run)
        builder.add(receipt)
        sealed = receipt.sealed

    assert builder.is_complete
    assert list(builder.missing()) == []
    assert bool(sealed) == is_own
    assert finish(builder, sealed or seal(place, formats, spec)) == reference[1]
    assert finished_files(place) == reference[0]
    assert not part_folder(place / ".datamat", spec.name).exists()


@pytest.mark.sample(4)
@pytest.mark.sample(7)
@pytest.mark.parametrize("done", [c for n in range(6) for c in itertools.combinations(range(5), n)])
@pytest.mark.parametrize("is_own", [True, False], ids=["appended", "apart"])
def test_work_resumes_from_any_finished_parts(place, formats, done, is_own, reference):
    """Whether or not they are in the shard's file, only the others are made."""
    run = begin_run(place / ".datamat") if is_own else ""
    for number in done:
        write_part(place, formats, make_spec(), number, run=run)

    made, infos = make(place, formats)

    assert made == [number for number in range(5) if number not in done]
    assert (finished_files(place), infos) == reference


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` catches it, and nothing runs after it."""


class Disk:
    """Wraps every call that changes files, and kills at the n-th: before it, or half-way through a write."""

    def __init__(self, monkeypatch, at):
        self.calls, self.at = 0, at
        for owner, names in {
            os: ("open", "replace", "rename", "unlink", "ftruncate", "link", "fsync", "mkdir", "rmdir"),
            pathlib.Path: ("unlink", "write_bytes", "mkdir"),
            shutil: ("rmtree",),
            builtins: ("open",),
            growing: ("write_all",),
            parts: ("write_all",),
        }.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name, real):
        def call(*arguments, **options):
            if self.calls >= self.at:
                if self.calls == self.at:
                    self.calls += 1
                    self._half(name, real, arguments)
                raise Killed  # after a kill nothing changes files, whatever cleans up
            self.calls += 1
            return real(*arguments, **options)

        return call

    def _half(self, name, real, arguments):
        """Leave what a kill in the middle of a write leaves: a file cut short."""
        if name == "write_bytes":
            path, data = arguments
            descriptor = self.real_open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, data[: len(data) // 2])
            os.close(descriptor)
        elif name == "write_all":
            file, data = arguments
            file.write(data[: len(data) // 2])

    real_open = staticmethod(os.open)


def killed_at(place, formats, at):
    """Make the shard and be killed at the n-th change to files; return whether there was an n-th."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, at)
        try:
            make(place, formats)
        except Killed:
            return True
    assert disk.calls <= at
    return False


def whole_parts(place):
    """Return the numbers of the parts whose receipt is on the disk."""
    return {int(path.stem) for path in part_folder(place / ".datamat", make_spec().name).glob("?????.receipt")}


@pytest.fixture
def changes(request, names):
    """The numbers of the changes to be killed at: all of them, or on commit one in ten, from a random one."""
    if not request.config.getoption("--commit"):
        return itertools.count()
    return itertools.count((request.config.option.sample_seed + FORMATS.index(names)) % 10, 10)


@pytest.mark.sample(3)
@pytest.mark.timeout(600)
def test_kill_at_any_change_to_files_loses_no_finished_part(tmp_path, formats, changes, reference):
    """Killed at the n-th change, for every n, and resumed: the same bytes, and no finished part is made again."""
    found = set()
    for at in changes:
        place = tmp_path / str(at)
        (place / ".datamat" / "shards").mkdir(parents=True)
        was_killed = killed_at(place, formats, at)
        done = whole_parts(place)
        found |= done
        started = (place / ".datamat" / "shards" / f"{make_spec().name}.json").exists()

        made, infos = make(place, formats)

        assert (finished_files(place), infos) == reference, f"killed at change {at}"
        assert not done & set(made), f"killed at change {at}: parts {done & set(made)} were made again"
        assert not (started and made), f"killed at change {at}: a shard with its entry was made again"
        if not was_killed:
            break
    assert at > 60 and found


def replace(place, formats):
    """Make a shard again whose rows are the same but now give more records, as `run(retry_failed=True)` does."""
    builder = builder_of(place, formats)
    run = begin_run(place / ".datamat")
    builder.resume(with_failed=False)
    for part in list(builder.missing()):
        builder.add(write_part(place, formats, builder.spec, part.number, run=run))
    return finish(builder, seal(place, formats, builder.spec))


@pytest.mark.sample(3)
@pytest.mark.timeout(600)
def test_kill_while_a_shard_is_replaced_by_its_like_leaves_one_of_them_whole(tmp_path, formats, changes, reference):
    """Both have the same fingerprint; neither ever stands with the offsets or the entry of the other."""
    old = tmp_path / "old"
    (old / ".datamat" / "shards").mkdir(parents=True)
    builder = builder_of(old, formats)
    for part in list(builder.missing()):
        builder.add(write_part(old, formats, builder.spec, part.number, [2, 0, 3, 0, 2]))
    before = finish(builder, seal(old, formats, builder.spec))
    outcomes = set()
    for at in changes:
        place = tmp_path / str(at)
        shutil.copytree(old, place)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, at)
            was_killed = False
            try:
                replace(place, formats)
            except Killed:
                was_killed = True

        infos = builder_of(place, formats).finished()
        if infos is None:
            infos = replace(place, formats)
        outcomes.add(infos[0].num_records)

        assert (finished_files(place), infos) in (reference, (finished_files(old), before)), f"killed at change {at}"
        if not was_killed:
            break
    assert disk.calls > 20 and 8 in outcomes


@pytest.mark.parametrize("damage", ["cut", "flip", "lengthen", "remove"])
@pytest.mark.parametrize("suffix", [".part", ".receipt", ".tfrecord.growing"])
def test_what_a_power_cut_tears_is_made_again(place, formats, damage, suffix, reference):
    """Parts, offsets, receipts and the growing shard: none counts unless it is unchanged."""
    run = begin_run(place / ".datamat") if suffix == ".tfrecord.growing" else ""
    for number in (0, 1, 2):
        write_part(place, formats, make_spec(), number, run=run)
    for path in list((place / ".datamat").rglob(f"*{suffix}")):
        data = path.read_bytes()
        if damage == "remove":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "lengthen":
            path.write_bytes(data + data[-20:])
        else:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 0x11]))

    _, infos = make(place, formats)

    assert (finished_files(place), infos) == reference


def flip_last(path):
    """Flip a bit of the last byte of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0x11]))


@pytest.mark.parametrize("damaged", ["records", "offsets"])
@pytest.mark.parametrize("torn", [0, 1, 2, 4])  # the other has no records
def test_part_that_changed_since_its_worker_ended_is_never_appended(place, formats, torn, damaged, reference):
    """It is named and made again; no other part is."""
    spec, builder = make_spec(), builder_of(place, formats)
    for number in range(5):
        builder.add(write_part(place, formats, spec, number))
        if number == torn:
            folder, extension = part_folder(place / ".datamat", spec.name), formats[-1].extension
            path = folder / f"{number:05d}{f'.{extension}.part' if damaged == 'records' else '.receipt'}"
            flip_last(path)
    with pytest.raises(DamagedPartError) as raised:
        seal(place, formats, spec)
    again = [part.number for part in builder.forget(raised.value)]
    for number in again:
        builder.add(write_part(place, formats, spec, number))

    assert again[:1] == [torn]
    told = "has the digest .*, its receipt says|does not have the offsets"
    assert re.match(rf"part {torn}: .*{path.name} ({told})", str(raised.value))
    check_published(place, formats, builder, reference)


def test_part_does_not_follow_one_of_another_plan(place, formats):
    """A worker of a killed run may still leave a receipt after the next run has begun."""
    run = begin_run(place / ".datamat")
    write_part(place, formats, make_spec(fingerprint="f2"), 0, run=run)

    receipt = write_part(place, formats, make_spec(), 1, run=run)

    assert [file.start for file in receipt.files] == [None] * len(formats)


def test_finished_shard_counts_while_it_is_whole_and_of_this_plan(place, formats, reference):
    """Its entry, and the bytes and offsets of each of its files, must match."""
    make(place, formats)
    infos = reference[1]

    assert builder_of(place, formats).finished() == infos
    assert builder_of(place, formats, make_spec(fingerprint="f2")).finished() is None
    for info in infos:
        shard, offsets = place / info.file, place / info.index_file
        content, lines = shard.read_bytes(), offsets.read_bytes()
        shard.write_bytes(content[:-1] + b"\1")
        assert builder_of(place, formats).finished() is None
        shard.write_bytes(content)
        offsets.unlink()
        assert builder_of(place, formats).finished() is None
        offsets.write_bytes(lines)
    assert builder_of(place, formats).finished() == infos


def test_shard_that_its_receipts_do_not_describe_is_refused(place):
    """Something else wrote into it: it never gets its name."""
    formats = formats_of(("tfrecord",))
    spec, builder = make_spec(), builder_of(place, formats)
    for number in range(5):
        builder.add(write_part(place, formats, spec, number))
    sealed = seal(place, formats, spec)
    growing = place / ".datamat" / "shards" / f"{spec.name}.tfrecord.growing"
    with open(growing, "ab") as file:
        file.write(b"more")

    with pytest.raises(CorruptDataError, match=rf"{growing} holds \d+ bytes, its receipts say \d+"):
        finish(builder, sealed)
    assert finished_files(place) == {}


def test_shard_that_lacks_a_part_is_refused(place):
    """A worker believed it complete too soon: no shard gets its name without records that receipts promise."""
    formats = formats_of(("tfrecord",))
    spec, builder = make_spec(), builder_of(place, formats)
    for number in range(5):
        builder.add(write_part(place, formats, spec, number))
    sealed = GrowingShard(place / ".datamat", spec.name, "f1", formats, 4).seal()

    with pytest.raises(IncompleteRunError):
        finish(builder, sealed)
    assert finished_files(place) == {}


def test_bytes_behind_the_last_receipt_do_not_count(place, formats, reference):
    """A worker died in the middle of an append: the next one overwrites what it left."""
    spec, builder = make_spec(), builder_of(place, formats)
    run = begin_run(place / ".datamat")
    for number in range(5):
        builder.add(write_part(place, formats, spec, number, run=run))
        for path in growing_of(place, formats):
            with open(path, "ab") as file:
                file.write(b"half of a part")

    check_published(place, formats, builder, reference)


@pytest.mark.parametrize("at", range(5))
def test_only_one_process_appends_at_a_time(place, formats, at, reference):
    """While another process holds the files, a part lies apart; whoever comes next appends it."""
    spec, builder = make_spec(), builder_of(place, formats)
    run = begin_run(place / ".datamat")
    for number in range(5):
        part_folder(place / ".datamat", spec.name).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if number == at:
                assert stack.enter_context(GrowingShard(place / ".datamat", spec.name, "f1", formats, 5).held())
            receipt = write_part(place, formats, spec, number, run=run)
        joins = any(made.joins_parts for made in formats)
        assert any(file.start is not None for file in receipt.files) == (joins and number != at)
        builder.add(receipt)

    check_published(place, formats, builder, reference)


def test_parts_of_a_call_follow_those_that_another_worker_joins_meanwhile(place, formats, reference):
    """What a worker knows of its last part may be out of date: others join a part that lies apart."""
    spec, builder = make_spec(), builder_of(place, formats)
    run = begin_run(place / ".datamat")
    call = unfinished(place, formats, spec, run)
    builder.add(write_part(place, formats, spec, 1, run=run, growing=call))
    builder.add(write_part(place, formats, spec, 0, run=run))

    for number in range(2, 5):
        receipt = write_part(place, formats, spec, number, run=run, growing=call)
        assert any(file.start is not None for file in receipt.files) == any(made.joins_parts for made in formats)
        builder.add(receipt)

    check_published(place, formats, builder, reference)


def test_worker_of_an_earlier_run_does_not_append(place, formats, reference):
    """Its driver was killed, but it lives on, or two runs hold one output on a disk without locks: it stops."""
    spec, builder = make_spec(), builder_of(place, formats)
    (place / ".datamat" / "lock").touch()
    old = begin_run(place / ".datamat")
    builder.add(write_part(place, formats, spec, 0, run=old))
    run = begin_run(place / ".datamat")
    builder.add(write_part(place, formats, spec, 1, run=run))

    with pytest.raises(OutputLockedError, match="names another run than the one that this worker"):
        write_part(place, formats, spec, 2, run=old)

    for number in (2, 3, 4):
        builder.add(write_part(place, formats, spec, number, run=run))
    check_published(place, formats, builder, reference)


def test_process_that_never_lets_go_of_the_files_writes_to_copies(place, formats, reference, monkeypatch):
    """A worker may outlive its killed driver in the middle of an append."""
    monkeypatch.setattr(shards, "WAIT_S", 0.1)
    spec = make_spec()
    run = begin_run(place / ".datamat")
    write_part(place, formats, spec, 0, run=run)
    with contextlib.ExitStack() as stack:
        stack.enter_context(GrowingShard(place / ".datamat", spec.name, "f1", formats, 5).held())
        old = [stack.enter_context(open(path, "r+b")) for path in growing_of(place, formats)]
        builder = builder_of(place, formats)
        begin_run(place / ".datamat")

        assert [receipt.number for receipt in builder.resume()] == [0]

        for file in old:
            file.truncate(0)
            file.write(b"late")
    made, infos = make(place, formats)
    assert made == [1, 2, 3, 4]
    assert (finished_files(place), infos) == reference


def test_shard_that_another_process_seals_is_left_alone(place, formats, reference, monkeypatch):
    """An executor may run that call twice, too. Datamat's own workers need not wait for a child that has the lock."""
    monkeypatch.setattr(growing, "WAIT_S", 0.1)
    monkeypatch.setattr(growing, "SEAL_WAIT_S", 0.1)
    spec, builder = make_spec(), builder_of(place, formats)
    for number in range(5):
        builder.add(write_part(place, formats, spec, number))
    other, mine = (GrowingShard(place / ".datamat", spec.name, "f1", formats, 5) for _ in range(2))

    with other.held():
        with pytest.raises(OutputLockedError, match=r"another process has been at .*data-train-00000-of-00001 for 0 s"):
            mine.seal(is_alone=False)
        assert finish(builder, mine.seal()) == reference[1]
    assert finished_files(place) == reference[0]


def test_parts_lie_apart_on_a_file_system_without_locks(place, formats, reference, monkeypatch):
    """No process could know whether another one appends; the parts are joined at the end."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    spec, builder = make_spec(), builder_of(place, formats)
    run = begin_run(place / ".datamat")
    for number in range(5):
        receipt = write_part(place, formats, spec, number, run=run)
        assert not any(file.start for file in receipt.files) and not receipt.sealed
        builder.add(receipt)

    check_published(place, formats, builder, reference)


def test_part_that_is_made_twice_at_once_is_there_once(place, formats, reference):
    """Another executor may repeat a call while the first one still runs, even after the shard is sealed."""
    spec, builder = make_spec(), builder_of(place, formats)
    for number in range(5):
        builder.add(write_part(place, formats, spec, number))
        builder.add(write_part(place, formats, spec, number))
    for number in range(5):
        sealed = seal(place, formats, spec)
        again = write_part(place, formats, spec, number)
        assert again.keys == builder.taken()[number].keys
    assert seal(place, formats, spec) == sealed

    assert finish(builder, sealed) == reference[1]
    assert finished_files(place) == reference[0]


def test_shard_without_records_is_published(place, formats):
    """A transform may give nothing for any of its rows."""
    sizes = [0, 0]
    spec = make_spec(sizes)
    builder = builder_of(place, formats, spec)
    for number in range(2):
        builder.add(write_part(place, formats, spec, number, sizes))

    infos = finish(builder, seal(place, formats, spec))

    assert [(info.num_rows, info.num_records) for info in infos] == [(4, 0)] * len(formats)
    assert {finished_files(place)[info.index_file] for info in infos} == {b""}
