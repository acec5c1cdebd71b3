"""`verify` says ok to a good directory, and names every damage with its file and, where one can be told, the record."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
import sets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datamat import (
    CorruptDataError,
    Index,
    Manifest,
    Materializer,
    OutputError,
    ShardOptions,
    WorkerOptions,
    load,
    verify,
)
from datamat.formats import Offsets


@pytest.fixture(scope="module", params=["tfrecord", "tfrecord.gz"])
def good(request, tmp_path_factory):
    """Two shards of ten records each in `train`, two of two in `val`."""
    source = sets.make_pairs(tmp_path_factory.mktemp("source"))
    output = tmp_path_factory.mktemp("good") / "out"
    Materializer(
        sets.Pairs(),
        source,
        output,
        format=request.param,
        shards=ShardOptions(num_shards=2),
        workers=WorkerOptions(num_workers=1),
    ).run(progress=False)
    return output


@pytest.fixture
def copied(good, tmp_path):
    """A directory to damage."""
    return shutil.copytree(good, tmp_path / "out")


def shards(folder, split="train"):
    """Return the paths of the shards of a split."""
    return [folder / info.file for info in Manifest.read(folder).splits[split]]


def index_of(shard):
    """Return the path of the offsets of a shard."""
    return shard.parent / f"{shard.name.partition('.')[0]}.idx"


def flip(path, place, bit=1):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def problems(folder):
    """Return the problems, after looking that the report is not ok, and shows them all."""
    report = verify(folder)
    assert not report.ok
    assert str(report).startswith(f"{folder}: {len(report.problems)} problems:\n")
    assert all(line in str(report) for line in report.problems)
    return list(report.problems)


def test_good_directory_is_ok(good):
    """And says of how much."""
    report = verify(str(good))

    assert report.ok
    assert str(report) == f"{good}: 4 shards, 24 records: all as the manifest says"
    assert (report.num_shards, report.num_records, report.problems) == (4, 24, ())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_shard_is_noticed(copied, place, bit):
    """Lengths, checksums, keys, pixels, padding: with the file, and the others are left alone."""
    shard = shards(copied)[1]
    content = shard.read_bytes()

    flip(shard, int(place * len(content)), 1 << bit)
    found = problems(copied)
    shard.write_bytes(content)

    assert len(found) == 1
    assert found[0].startswith(f"{shard.name}: ")
    assert verify(copied).ok


@pytest.mark.parametrize("region", ["length", "length CRC", "payload", "payload CRC"])
def test_damaged_record_is_named_by_its_number_and_byte(copied, region):
    """Wherever in the record the bit was flipped; in gzip, a record of the member that protects it."""
    shard = shards(copied)[0]
    offsets = Offsets.from_text(index_of(shard).read_text())
    offset, size = int(offsets.offset[6]), int(offsets.size[6])
    flip(shard, offset + {"length": 0, "length CRC": 10, "payload": size // 2, "payload CRC": size - 1}[region])

    (found,) = problems(copied)

    number = 6 if offsets.skip is None else r"\d+"
    assert re.match(rf"{shard.name}: {shard}: record {number} at byte {offset} is damaged: ", found)


def test_every_damaged_file_is_named(copied):
    """Not only the first."""
    for split in ("train", "val"):
        for shard in shards(copied, split):
            flip(shard, 40)

    assert [line.partition(":")[0] for line in problems(copied)] == [
        shard.name for split in ("train", "val") for shard in shards(copied, split)
    ]


def test_shard_cut_inside_a_record_is_named_with_the_record(copied):
    """The last, which is not whole."""
    shard = shards(copied)[0]
    os.truncate(shard, shard.stat().st_size - 3)

    (found,) = problems(copied)

    assert re.match(rf"{shard.name}: .*record \d+ at byte \d+ is damaged", found)


def test_shard_cut_between_records_is_counted(copied):
    """All that is left is whole; only the manifest tells what is missing."""
    shard = shards(copied)[0]
    offsets = Offsets.from_text(index_of(shard).read_text())
    starts = np.unique(offsets.offset)
    if len(starts) == 1:
        pytest.skip("one member holds the whole shard")
    size = shard.stat().st_size
    os.truncate(shard, int(starts[-1]))
    left = int((offsets.offset < starts[-1]).sum())

    found = f"{shard.name}: found {left} records, the manifest says {len(offsets)}; {starts[-1]} bytes for {size}"
    assert problems(copied) == [found]


def test_emptied_shard_is_counted(copied):
    """No bytes are no records."""
    shard = shards(copied)[0]
    os.truncate(shard, 0)

    (found,) = problems(copied)

    assert found.startswith(f"{shard.name}: found 0 records, the manifest says ")


def test_missing_shard_and_missing_offsets_are_both_named(copied):
    """One after the other, and each alone."""
    first, second = shards(copied)
    first.unlink()
    index_of(first).unlink()
    index_of(second).unlink()

    assert problems(copied) == [
        f"{first.name}: No such file or directory",
        f"{index_of(first).name}: No such file or directory",
        f"{index_of(second).name}: No such file or directory",
    ]


@pytest.mark.parametrize("offsets", ["missing", "not text", "no table"])
def test_damage_to_the_offsets_hides_none_of_the_shard(copied, offsets):
    """Both are named."""
    shard = shards(copied)[0]
    flip(shard, 40)
    if offsets == "missing":
        index_of(shard).unlink()
    else:
        index_of(shard).write_bytes(b"\x80" if offsets == "not text" else b"a b\n")

    assert [line.partition(":")[0] for line in problems(copied)] == [shard.name, index_of(shard).name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "its offsets are not those of the records in {shard}"),
        (b"0 16\n", "its offsets are not those of the records in {shard}"),
        (b"0 16 0 0\n", "line 1 of the record index is '0 16 0 0'"),
        (b"\xff\n", "not text (byte 0)"),
    ],
)
def test_damaged_offsets_are_named(copied, text, message):
    """The shard itself is fine."""
    shard = shards(copied)[0]
    index_of(shard).write_bytes(text)

    (found,) = problems(copied)

    assert found.startswith(f"{index_of(shard).name}: {message.format(shard=shard.name)}")


def test_offsets_off_by_one_are_named(copied):
    """As many as there are records, and one of them wrong."""
    shard = shards(copied)[0]
    lines = index_of(shard).read_text().splitlines(keepends=True)
    numbers = lines[-1].split()
    numbers[1] = str(int(numbers[1]) + 1)
    index_of(shard).write_text("".join([*lines[:-1], " ".join(numbers) + "\n"]))

    assert problems(copied) == [f"{index_of(shard).name}: its offsets are not those of the records in {shard.name}"]


def test_swapped_shards_are_named(copied):
    """Whole, readable, and not where they belong."""
    first, second = shards(copied, "val")
    keys = load(copied, "val").keys()
    assert len(keys) == 4
    first.rename(copied / "aside")
    second.rename(first)
    (copied / "aside").rename(second)

    found = problems(copied)

    assert [line.partition(":")[0] for line in found] == [first.name, second.name]
    assert all("not those of the manifest" in line or "the manifest says" in line for line in found)


def test_doubled_shard_is_named(copied):
    """One in the place of another, or beside them under a name of its own."""
    first, second = shards(copied)
    shutil.copy(first, second)
    more = copied / second.name.replace("00001-of", "00002-of")
    shutil.copy(first, more)

    found = problems(copied)

    assert [line.partition(":")[0] for line in found] == [second.name, more.name]
    assert found[1] == f"{more.name}: not in the manifest; remove it"


def test_same_keys_with_other_content_are_told_apart(copied):
    """Of another run: whole records under the right keys."""
    shard = shards(copied)[0]
    info = Manifest.read(copied).shards[0]
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["shards"][0]["checksum"] = "0" * 32
    (copied / "manifest.json").write_text(json.dumps(manifest))

    assert problems(copied) == [
        (
            f"{info.file}: its records are whole and have the right keys, "
            "but their content differs from the manifest's checksum"
        )
    ]
    assert shard.exists()


def test_files_of_others_are_no_concern(copied):
    """Only names that a reader by pattern would take."""
    (copied / "README.md").write_text("about")
    (copied / "other-train-00000-of-00001.tfrecord").write_bytes(b"")

    assert verify(copied).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda features: features.pop("mask"),
            "its records hold image: bytes, key: bytes, mask: bytes, the manifest's",
        ),
        (lambda features: features.update(more={"type": "Text"}), "the manifest's features are .*more: bytes"),
        (lambda features: features["mask"].update(type="Scalar", dtype="int64"), ""),
        (lambda features: features.update(mask={"type": "Scalar", "dtype": "int64"}), "features are .*mask: int64"),
        (
            lambda features: features.update(mask={"type": "Tensor", "shape": [2], "dtype": "float64"}),
            "record 0 is not",
        ),
        (
            lambda features: features["image"].update(shape=[None, None, 1]),
            "record 0 is not as .*'image': png with",
        ),
    ],
)
def test_changed_features_are_named(copied, change, message):
    """The bytes are right, but whoever reads them with this schema gets something else."""
    manifest = json.loads((copied / "manifest.json").read_text())
    change(manifest["features"])
    (copied / "manifest.json").write_text(json.dumps(manifest))

    if not message:  # no such feature at all
        with pytest.raises(CorruptDataError, match=r"manifest.json is not a manifest of datamat .*field 'mask'"):
            verify(copied)
        return
    found = problems(copied)
    assert len(found) == 4
    assert all(re.match(rf"pairs-.*: .*{message}", line) for line in found)


def test_changed_format_is_named(copied):
    """The bytes are right, but not of the format that the manifest tells."""
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["format"] = "tfrecord" if manifest["format"] == "tfrecord.gz" else "tfrecord.gz"
    (copied / "manifest.json").write_text(json.dumps(manifest))

    found = problems(copied)

    assert sum("but they do not read as tfrecord" in line for line in found) == 4


def test_missing_or_damaged_manifest_is_an_error(copied):
    """Without it there is nothing to compare with."""
    path = copied / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptDataError, match=r"manifest.json is not JSON"):
        verify(copied)
    path.unlink()
    with pytest.raises(OutputError, match=r"holds no manifest.json"):
        verify(copied)


def test_folder_in_the_place_of_a_shard_is_named(copied):
    """It cannot be read, and that is said of it."""
    shard = shards(copied)[0]
    shard.unlink()
    shard.mkdir()

    assert problems(copied) == [f"{shard.name}: Is a directory"]


def test_materializer_verifies_its_output(good):
    """The same report."""
    job = Materializer(_Any(), good, good)

    assert job.verify() == verify(good)


class _Any(sets.Pairs):
    def index(self, source):
        return Index.from_rows([])
