"""Parts on disk: shards grow out of them in any order, from any point where a run was killed, to the same bytes."""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import pathlib
import shutil

import pytest
from growth import FORMATS, SIZES, assembly_of, finished_files, formats_of, keys_of, make, make_spec, write_part

from datamat import CorruptDataError
from datamat.formats import Offsets
from datamat.growing import GrowingFile
from datamat.manifest import KeyDigest
from datamat.receipts import part_folder
from datamat.storage import digest_file


@pytest.fixture
def place(tmp_path):
    """The output folder, with its `.datamat`."""
    (tmp_path / "out" / ".datamat" / "shards").mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture(params=FORMATS, ids="+".join)
def names(request):
    """The formats that the shard is written in."""
    return request.param


@pytest.fixture
def formats(names):
    return formats_of(names)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Give a function that returns the visible files of an undisturbed shard, and what its entry lists."""
    made = {}

    def reference(names):
        if names not in made:
            place = tmp_path_factory.mktemp("reference")
            (place / ".datamat" / "shards").mkdir(parents=True)
            _, infos = make(place, formats_of(names))
            made[names] = finished_files(place), infos
        return made[names]

    return reference


@pytest.fixture
def reference(references, names):
    return references(names)


def test_shard_holds_the_records_of_its_parts_in_their_order(reference, formats, tmp_path):
    """Its entry tells rows, records, bytes, checksum and keys of each file; the offsets lead to every record."""
    files, infos = reference
    keys = [key for number in range(len(SIZES)) for key in keys_of(number)]

    assert set(files) == {name for info in infos for name in (info.file, info.index_file)}
    for info, shard_format in zip(infos, formats, strict=True):
        shard = tmp_path / info.file
        shard.write_bytes(files[info.file])
        assert [bytes(r["key"][0]).decode() for r in shard_format.read(shard)] == keys
        assert (info.num_rows, info.num_records, info.num_bytes) == (10, 8, shard.stat().st_size)
        assert (info.checksum, info.key_digest) == (digest_file(shard), KeyDigest(keys).hexdigest())
        with open(shard, "rb") as file:
            offsets = Offsets.from_text(files[info.index_file].decode())
            assert shard_format.find_offsets(file, path="") == offsets


def test_each_format_has_the_bytes_that_it_has_alone(references):
    """Whatever formats stand beside it."""
    alone = references(("tfrecord",))[0]

    for names in FORMATS[1:]:
        together = references(names)[0]
        assert together["data-train-00000-of-00001.tfrecord"] == alone["data-train-00000-of-00001.tfrecord"]


@pytest.mark.parametrize("order", [*[*itertools.permutations(range(4))][::5], (3, 2, 1, 0)])
def test_parts_may_come_in_any_order(place, formats, order, reference):
    """The shard is the same, and is published once the last is there."""
    spec = make_spec()
    assembly = assembly_of(place, formats)
    for number in (4, *order):
        assert not assembly.is_complete
        assert number in [part.number for part in assembly.missing()]
        assembly.add(write_part(place, formats, spec, number))

    assert assembly.is_complete
    assert list(assembly.missing()) == []
    assert assembly.publish() == reference[1]
    assert finished_files(place) == reference[0]
    assert not part_folder(place / ".datamat", spec.name).exists()


@pytest.mark.parametrize("done", [c for n in range(6) for c in itertools.combinations(range(5), n)])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_work_goes_on_from_any_parts_that_are_done(place, formats, done, joined, reference):
    """Whether or not they were joined to the shard before; only the others are made."""
    spec, assembly = make_spec(), assembly_of(place, formats)
    for number in done:
        receipt = write_part(place, formats, spec, number)
        if joined:
            assembly.add(receipt)
    assembly.close()

    made, infos = make(place, formats)

    assert made == [number for number in range(5) if number not in done]
    assert (finished_files(place), infos) == reference


class Killed(BaseException):
    """What stands for SIGKILL: nothing catches it by name, and nothing goes on after it."""


class Disk:
    """Stands before every call that changes files, and kills at the n-th: before it, or half-way where it writes."""

    def __init__(self, monkeypatch, at):
        self.calls, self.at = 0, at
        for owner, names in {
            os: ("open", "replace", "rename", "unlink", "truncate", "fsync", "mkdir", "rmdir"),
            pathlib.Path: ("unlink", "write_bytes", "mkdir"),
            shutil: ("rmtree",),
            builtins: ("open",),
            GrowingFile: ("_append",),
        }.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name, real):
        def call(*arguments, **options):
            if self.calls >= self.at:
                if self.calls == self.at:
                    self.calls += 1
                    self._half(name, real, arguments)
                raise Killed  # after a kill nothing more is done, whoever cleans up
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
        elif name == "_append":
            growing, part = arguments
            target = self.real_open(growing._growing, os.O_WRONLY | os.O_APPEND)
            source = self.real_open(part, os.O_RDONLY)
            os.write(target, os.read(source, part.stat().st_size // 2))
            os.close(target)
            os.close(source)

    real_open = staticmethod(os.open)


def killed_at(place, formats, at):
    """Make the shard and be killed at the n-th change to files; tell whether it came to that."""
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
    return {int(path.stem) for path in part_folder(place / ".datamat", make_spec().name).glob("?????.json")}


@pytest.mark.slow
def test_kill_at_any_change_to_files_loses_no_finished_part(tmp_path, formats, reference):
    """Killed at the n-th change, for every n, and gone on with: the same bytes, and nothing that was done is redone."""
    for at in itertools.count():
        place = tmp_path / str(at)
        (place / ".datamat" / "shards").mkdir(parents=True)
        was_killed = killed_at(place, formats, at)
        done = whole_parts(place)
        started = (place / ".datamat" / "shards" / f"{make_spec().name}.json").exists()

        made, infos = make(place, formats)

        assert (finished_files(place), infos) == reference, f"killed at change {at}"
        assert not done & set(made), f"killed at change {at}: parts {done & set(made)} were made again"
        assert not (started and made), f"killed at change {at}: a shard with its entry was made again"
        if not was_killed:
            break
    assert at > 60


def test_kill_after_kill_ends_with_the_same_bytes(tmp_path, formats, reference):
    """Each run is killed in turn, a little later than the one before."""
    for step in (3, 7, 11):
        place = tmp_path / str(step)
        (place / ".datamat" / "shards").mkdir(parents=True)
        kills = 0
        while killed_at(place, formats, step + kills):
            kills += 1

        assert kills >= 2
        assert (finished_files(place), make(place, formats)[1]) == reference


def replace(place, formats):
    """Make a shard anew whose rows are the same but gave more records this time, as `rerun_failed` does."""
    with contextlib.closing(assembly_of(place, formats)) as assembly:
        assembly.resume(with_failed=False)
        for part in list(assembly.missing()):
            assembly.add(write_part(place, formats, assembly.spec, part.number))
        return assembly.publish()


@pytest.mark.slow
def test_kill_while_a_shard_is_replaced_by_its_like_leaves_one_of_them_whole(tmp_path, formats, reference):
    """Both have the same fingerprint; never does one stand with the offsets or the entry of the other."""
    old = tmp_path / "old"
    (old / ".datamat" / "shards").mkdir(parents=True)
    assembly = assembly_of(old, formats)
    for part in list(assembly.missing()):
        assembly.add(write_part(old, formats, assembly.spec, part.number, [2, 0, 3, 0, 2]))
    before = assembly.publish()
    outcomes = set()
    for at in itertools.count():
        place = tmp_path / str(at)
        shutil.copytree(old, place)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, at)
            was_killed = False
            try:
                replace(place, formats)
            except Killed:
                was_killed = True

        infos = assembly_of(place, formats).finished()
        if infos is None:
            infos = replace(place, formats)
        outcomes.add(infos[0].num_records)

        assert (finished_files(place), infos) in (reference, (finished_files(old), before)), f"killed at change {at}"
        if not was_killed:
            break
    assert disk.calls > 20 and outcomes == {7, 8}


@pytest.mark.parametrize("damage", ["cut", "flip", "lengthen", "remove"])
@pytest.mark.parametrize("suffix", [".part", ".idx", ".json", ".tfrecord"])
def test_what_a_power_cut_tears_is_made_again(place, formats, damage, suffix, reference):
    """Of parts, offsets, receipts and the growing shard: whatever is not as it was is not believed."""
    spec, assembly = make_spec(), assembly_of(place, formats)
    for number in (0, 1, 2):
        receipt = write_part(place, formats, spec, number)
        if suffix == ".tfrecord":
            assembly.add(receipt)
    assembly.close()
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


@pytest.mark.parametrize("torn", range(5))
def test_part_that_one_format_has_lost_is_made_again_in_all(place, torn, references):
    """The other may have joined it, and parts behind it, to the shard; what it joined before the torn one counts."""
    names = FORMATS[-1]
    formats, spec = formats_of(names), make_spec()
    assembly = assembly_of(place, formats)
    for number in range(4):
        assembly.add(write_part(place, formats, spec, number))
    write_part(place, formats, spec, 4)
    assembly.close()
    path = part_folder(place / ".datamat", spec.name) / f"{torn:05d}.parquet.part"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")

    made, infos = make(place, formats)

    assert made == [number for number in range(4) if number >= torn] + [4] * (torn == 4)
    assert (finished_files(place), infos) == references(names)


def test_parts_of_another_plan_are_not_taken(place, formats, reference):
    """Another fingerprint means other bytes."""
    other = make_spec(fingerprint="f2")
    for number in (0, 1, 4):
        write_part(place, formats, other, number)

    made, infos = make(place, formats)

    assert made == [0, 1, 2, 3, 4]
    assert (finished_files(place), infos) == reference


def test_receipt_of_other_formats_is_not_taken(place, references):
    """One more format, or one less: the part is made again."""
    spec = make_spec()
    write_part(place, formats_of(("tfrecord",)), spec, 0)
    write_part(place, formats_of(("tfrecord", "webdataset", "parquet")), spec, 1)

    made, infos = make(place, formats_of(("tfrecord", "webdataset")))

    assert made == [0, 1, 2, 3, 4]
    assert (finished_files(place), infos) == references(("tfrecord", "webdataset"))


def test_finished_shard_counts_while_it_is_whole_and_of_this_plan(place, formats, reference):
    """Its entry, and the bytes and the offsets of each of its files."""
    make(place, formats)
    infos = reference[1]

    assert assembly_of(place, formats).finished() == infos
    assert assembly_of(place, formats, make_spec(fingerprint="f2")).finished() is None
    for info in infos:
        shard, offsets = place / info.file, place / info.index_file
        content, lines = shard.read_bytes(), offsets.read_bytes()
        shard.write_bytes(content[:-1] + b"\1")
        assert assembly_of(place, formats).finished() is None
        shard.write_bytes(content)
        offsets.unlink()
        assert assembly_of(place, formats).finished() is None
        offsets.write_bytes(lines)
    assert assembly_of(place, formats).finished() == infos


def test_shard_of_other_formats_is_replaced(place, references):
    """No file of a format that is not wanted any more stays, nor its offsets."""
    make(place, formats_of(("tfrecord", "webdataset")))
    for names in (("parquet", "tfrecord"), ("tfrecord",)):
        spec = make_spec(fingerprint="+".join(names))

        made, _ = make(place, formats_of(names), spec)

        assert made == [0, 1, 2, 3, 4]
        assert finished_files(place) == references(names)[0]


def test_shard_that_its_receipts_do_not_describe_is_refused(place):
    """Something else wrote into it: it never gets its name."""
    formats = formats_of(("tfrecord",))
    spec, assembly = make_spec(), assembly_of(place, formats)
    for number in range(5):
        assembly.add(write_part(place, formats, spec, number))
    growing = place / ".datamat" / "shards" / f"{spec.name}.tfrecord"
    with open(growing, "ab") as file:
        file.write(b"more")

    with pytest.raises(CorruptDataError, match=rf"{growing} holds \d+ bytes and 8 offsets, its receipts say \d+ and 8"):
        assembly.publish()
    assert finished_files(place) == {}


def test_shard_without_records_is_published(place, formats):
    """A transform that gives nothing for any of its rows."""
    sizes = [0, 0]
    spec = make_spec(sizes)
    assembly = assembly_of(place, formats, spec)
    for number in range(2):
        assembly.add(write_part(place, formats, spec, number, sizes))

    infos = assembly.publish()

    assert [(info.num_rows, info.num_records) for info in infos] == [(4, 0)] * len(formats)
    assert {finished_files(place)[info.index_file] for info in infos} == {b""}
