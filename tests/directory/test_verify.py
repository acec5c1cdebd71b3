"""`verify` passes a good directory, and names every damage with its file and, where possible, the record."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import small_pairs
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from datamat import (
    CorruptDataError,
    Manifest,
    OptionError,
    ShardOptions,
    load,
    verify,
)
from datamat.directory.files import digest_file, render_json
from datamat.directory.keys import packed_hashes
from datamat.directory.manifest import FilePart, tree_checksum
from datamat.directory.sidecars.exporting import export
from datamat.formats import Offsets, get_format


@pytest.fixture(scope="module", params=["tfrecord", "tfrecord.gz"])
def good(request, tmp_path_factory):
    """Two shards of ten records each in `train`, two of two in `val`."""
    source = small_pairs.make_pairs(tmp_path_factory.mktemp("source"))
    output = tmp_path_factory.mktemp("good") / "out"
    small_pairs.job(source, output, format=request.param).run(progress=False)
    return output


@pytest.fixture
def copied(good, tmp_path):
    """A copy of the directory that a test may damage."""
    return shutil.copytree(good, tmp_path / "out")


def written(folder, name):
    """Write a finished directory in a format, and return it."""
    small_pairs.job(small_pairs.make_pairs(folder / "source"), folder / "out", format=name).run(progress=False)
    return folder / "out"


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
    """Return the problems, after a check that the report is not ok, and shows them all."""
    report = verify(folder)
    assert not report.ok
    assert str(report).startswith(f"{folder}: {len(report.problems)} problem")
    assert all(line in str(report) for line in report.problems)
    return list(report.problems)


def change_manifest(folder, change):
    """Let `change` edit the manifest, and give it the digest that fits, as somebody who knows the format would."""
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    del values["digest"]
    digest = xxhash.xxh3_128_hexdigest(render_json(values))
    (folder / "manifest.json").write_bytes(render_json({**values, "digest": digest}))


def described(pieces, digest=None):
    """Return an entry's values for a file of these parts; with another digest for the first if one is given."""
    parts = [FilePart(len(piece), xxhash.xxh3_128_hexdigest(piece)) for piece in pieces]
    parts[0] = FilePart(parts[0].num_bytes, digest or parts[0].digest)
    lines = [f"{part.num_bytes} {part.digest}" for part in parts]
    return {"num_bytes": sum(map(len, pieces)), "checksum": tree_checksum(parts), "parts": lines}


@pytest.mark.parametrize("deep", [False, True])
def test_good_directory_is_ok(good, deep):
    """The report says how much it checked."""
    report = verify(str(good), deep)

    assert report.ok
    assert str(report) == f"{good}: 4 shards, 24 records: all as the manifest says"
    assert (report.num_shards, report.num_records, report.problems, report.files) == (4, 24, (), ())


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_shard_is_noticed(copied, place, bit):
    """Lengths, checksums, keys, pixels, padding: the report names this file and no other."""
    shard = shards(copied)[1]
    content = shard.read_bytes()

    flip(shard, int(place * len(content)), 1 << bit)
    found = problems(copied)
    shard.write_bytes(content)

    assert all(line.startswith(f"{shard.name}: ") for line in found)
    assert verify(copied).ok


@pytest.mark.sample(3)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@pytest.mark.parametrize("name", ["manifest.json", "_index/train.index", "_index/train.keys", "idx"])
def test_any_flipped_bit_beside_the_shards_is_noticed(copied, name, place, bit):
    """In the manifest, an index file or a file of offsets, the report names that file first."""
    path = index_of(shards(copied)[1]) if name == "idx" else copied / name
    content = path.read_bytes()

    flip(path, int(place * len(content)), 1 << bit)
    found = problems(copied)
    path.write_bytes(content)

    assert found[0].startswith(f"{path.relative_to(copied)}: ")
    assert verify(copied).ok


@pytest.mark.parametrize("region", ["length", "length CRC", "payload", "payload CRC"])
def test_damaged_record_is_named_by_its_number_and_byte(copied, region):
    """Wherever in the record the bit was flipped; in gzip, a record of the member that protects it is named."""
    shard = shards(copied)[0]
    offsets = Offsets.from_text(index_of(shard).read_text())
    offset, size = int(offsets.offset[6]), int(offsets.size[6])
    flip(shard, offset + {"length": 0, "length CRC": 10, "payload": size // 2, "payload CRC": size - 1}[region])

    found = problems(copied)

    assert len(found) == 1 and found[0].startswith(f"{shard.name}: record 6 at byte {offset} is damaged: ")


def test_records_damaged_together_are_named_in_one_line(tmp_path):
    """One bit of a page of Parquet damages all records in it."""
    shard = shards(written(tmp_path, "parquet"))[0]
    group = parquet.read_metadata(shard).row_group(1)
    flip(shard, group.column(1).data_page_offset + group.column(1).total_compressed_size // 2)

    (found,) = problems(tmp_path / "out")

    if group.num_rows > 1:
        assert found.startswith(f"{shard.name}: records {group.num_rows} to ") and " are damaged: " in found
    assert found.startswith(f"{shard.name}: record") and " damaged: " in found


def test_record_is_named_where_its_format_has_no_checksum(tmp_path):
    """Nothing protects a member of a tar, but a picture that no longer decodes shows the damage."""
    shard = shards(written(tmp_path, "webdataset"))[0]
    flip(shard, shard.read_bytes().index(b"\x89PNG"))

    found = problems(tmp_path / "out")

    assert "their content differs from the manifest's checksum" in found[0]
    named = rf"{shard.name}: record 0 \('train\d+'\) does not match the manifest's features: field 'image'"
    assert re.match(named, found[1])


def test_every_damaged_record_is_named(copied):
    """Offsets lead to the records behind the first damaged one of a shard. Of very many, the first are named."""
    shard = shards(copied)[0]
    offsets = Offsets.from_text(index_of(shard).read_text())
    for number in (2, 5, 9):
        flip(shard, int(offsets.offset[number]))

    found = problems(copied)

    assert [re.search(r"record (\d+) ", line).group(1) for line in found] == ["2", "5", "9"]


def test_shard_cut_between_records_is_counted(copied):
    """All that is left is whole; only the manifest shows what is missing."""
    shard = shards(copied)[0]
    offsets = Offsets.from_text(index_of(shard).read_text())
    starts = np.unique(offsets.offset)
    if len(starts) == 1:
        pytest.skip("one member holds the whole shard")
    size = shard.stat().st_size
    os.truncate(shard, int(starts[-1]))
    left = int((offsets.offset < starts[-1]).sum())

    found = problems(copied)

    assert found[0] == (
        f"{shard.name}: found {left} records, the manifest says {len(offsets)}; {starts[-1]} bytes for {size}"
    )
    os.truncate(shard, 0)
    assert problems(copied)[0].startswith(f"{shard.name}: found 0 records, the manifest says ")


def swap(one, other):
    """Give each of two files the name of the other."""
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def double(first, second):
    """Put a shard in the place of another, and beside them under a name of its own."""
    shutil.copy(first, second)
    for path in (first, index_of(first)):
        shutil.copy(path, path.with_name(path.name.replace("00000-of", "00002-of")))


def shift_last_offset(shard):
    """Make the last record one byte longer."""
    *lines, last = index_of(shard).read_text().splitlines()
    start, size, *rest = last.split()
    index_of(shard).write_text("\n".join([*lines, " ".join([start, str(int(size) + 1), *rest])]) + "\n")


def shorten_index(path):
    """Leave the last rows out of an index."""
    parquet.write_table(parquet.read_table(path).slice(0, 7), path)


# What happens to two shards, with A and B for their names below, and A.idx and B.idx for those of their offsets; which
# files are named, and what is said.
DAMAGES = {
    "cut": (lambda a, b: os.truncate(a, a.stat().st_size - 3), "A", r"A: record \d+ is cut off: it lies at bytes"),
    "missing": (
        lambda a, b: [path.unlink() for path in (a, index_of(a), index_of(b))],
        "A A.idx B.idx",
        "B.idx: No such file",
    ),
    "folder": (lambda a, b: (a.unlink(), a.mkdir()), "A", "A: Is a directory"),
    "swapped": (swap, "A B A.idx B.idx _index/train.index", "A: its content is that of B"),
    "doubled": (double, "B B.idx C C.idx _index/train.index", "C.idx: not in the manifest; remove it"),
    "flipped, no offsets": (lambda a, b: (flip(a, 40), index_of(a).unlink()), "A A.idx", "A: record 0"),
    "flipped, wrong offsets": (lambda a, b: (flip(a, 40), index_of(a).write_text("a b\n")), "A A.idx", "A: record 0"),
    "no offsets": (lambda a, b: index_of(a).write_bytes(b""), "A.idx", "it has 0 offsets, A holds "),
    "few offsets": (lambda a, b: index_of(a).write_bytes(b"0 16\n"), "A.idx", "it has 1 offsets, A holds "),
    "no table": (lambda a, b: index_of(a).write_bytes(b"0 16 0 0\n"), "A.idx", "line 1 of the record index"),
    "no text": (lambda a, b: index_of(a).write_bytes(b"\xff\n"), "A.idx", r"not text \(byte 0\)"),
    "many offsets": (lambda a, b: index_of(a).write_bytes(b"0 16\n" * 100_000), "A.idx", "has 500000 bytes"),
    "other offsets": (lambda a, b: shift_last_offset(a), "A.idx", r"not those of the records in A, from record \d+ on"),
    "no index": (lambda a, b: train_index(a).unlink(), "_index/train.index", ""),
    "foreign index": (lambda a, b: shutil.copy(train_index(a), train_index(a, "test")), "_index/test.index", ""),
    "short index": (lambda a, b: shorten_index(train_index(a)), "_index/train.index", ""),
    "no Parquet": (lambda a, b: train_index(a).write_bytes(b"PAR1 or so"), "_index/train.index", ""),
    "other index": (lambda a, b: shutil.copy(train_index(a), train_index(a, "val")), "_index/val.index", ""),
}


def train_index(shard, split="train"):
    """Return the path of the index of a split."""
    return shard.parent / "_index" / f"{split}.index"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_its_files_and_no_others(copied, name):
    """Whatever happens to shards, offsets and indexes; damage to one hides none to another."""
    damage, files, said = DAMAGES[name]
    first, second = shards(copied)
    third = first.name.replace("00000-of", "00002-of")
    names = {"A": first.name, "B": second.name, "C": third}
    names |= {f"{letter}.idx": f"{shard.partition('.')[0]}.idx" for letter, shard in names.items()}

    damage(first, second)
    found = problems(copied)

    assert {line.partition(":")[0] for line in found} == {names.get(file, file) for file in files.split()}
    said = re.sub(r"\b[ABC](\.idx)?\b", lambda match: re.escape(names[match[0]]), said)
    assert any(re.search(said, line) for line in found), found


def test_other_records_under_the_right_name_are_named(copied):
    """Whole records of another run have other keys, or the right keys with other content."""
    first = shards(copied)[0]
    keys = Manifest.read(copied).splits["train"][0].key_digest
    change_manifest(copied, lambda values: values["shards"][0].update(key_digest="0" * 32))
    assert problems(copied) == [f"{first.name}: the keys of its records are not those of the manifest"]
    change_manifest(copied, lambda values: values["shards"][0].update(key_digest=keys))
    change_manifest(copied, lambda values: values["shards"][0].update(described([first.read_bytes(), b""], "0" * 32)))
    problem = "its records are intact and have the right keys, but their content differs from the manifest's checksum"
    assert problems(copied) == [f"{first.name}: {problem}, in the bytes 0 to {first.stat().st_size}"]
    change_manifest(copied, lambda values: values["shards"][0].update(key_digest="0" * 32))
    assert problems(copied) == [
        f"{first.name}: its records are intact, but differ from those in the manifest, or are in another order"
    ]


@pytest.mark.parametrize("name", ["seed", "made_by", "shards"])
def test_edited_manifest_is_named(copied, name):
    """Whatever was changed in it, its digest no longer fits, and readers refuse it."""
    values = json.loads((copied / "manifest.json").read_text())
    values.update({"seed": {"seed": 5}, "made_by": {"made_by": {}}, "shards": {"shards": values["shards"][:-1]}}[name])
    (copied / "manifest.json").write_bytes(render_json(values))

    assert problems(copied)[0] == "manifest.json: changed since it was written: it does not have its digest"
    with pytest.raises(CorruptDataError, match="changed since it was written"):
        load(copied)


def test_shard_that_the_manifest_lists_twice_is_named(copied):
    """A reader would give its records twice."""
    name = shards(copied, "val")[-1].name

    change_manifest(copied, lambda values: values["shards"].append(values["shards"][-1]))

    assert f"manifest.json: lists {name} twice" in problems(copied)


def test_index_of_other_rows_is_named_with_the_row(copied):
    """Its checksum may fit: somebody rewrote it, and gave the manifest the matching values."""
    path = copied / "_index" / "train.index"
    table = parquet.read_table(path)
    keys = table["key"].to_pylist()
    parquet.write_table(table.set_column(0, "key", [[*keys[:3], "other", *keys[4:]]]), path)
    problem = f"_index/train.index: row 3 of {shards(copied)[0].name} is 'other', the shard holds '{keys[3]}' there"

    assert problems(copied) == ["_index/train.index: its content differs from the manifest's checksum", problem]
    info = {"num_bytes": path.stat().st_size, "checksum": xxhash.xxh3_128_hexdigest(path.read_bytes())}
    change_manifest(copied, lambda values: values["index"][0].update(info))
    assert problems(copied) == [problem]


def test_hashes_of_other_keys_are_named(copied):
    """Their checksum may fit, as above."""
    path = copied / "_index" / "train.keys"
    count = path.stat().st_size // 12
    path.write_bytes(b"".join(packed_hashes(count, lambda rows: rows.astype(np.uint64))))
    change_manifest(copied, lambda values: values["index"][1].update(checksum=digest_file(path)))

    assert problems(copied) == ["_index/train.keys: it leads to other rows than those of _index/train.index"]


def test_deep_looks_into_every_record(copied):
    """Only decoding finds a picture that does not decode in a record whose checksums are all right."""
    manifest = Manifest.read(copied)
    shard, shard_format = shards(copied)[0], get_format(manifest.format)
    records = list(shard_format.read(shard))
    records[5]["image"] = [b"no picture"]
    with open(shard, "wb") as file:
        writer = shard_format.writer(file, manifest.features.columns)
        for record in records:
            writer.append(record)
        index_of(shard).write_text(writer.finish().to_text())
    content = shard.read_bytes()
    changed_entry = described([content])
    change_manifest(copied, lambda values: values["shards"][0].update(changed_entry))
    export(copied)

    (found,) = verify(copied, deep=True).problems

    assert verify(copied).ok
    assert re.match(rf"{shard.name}: record 5 \('train\d+'\) does not match the manifest's features: .*'image'", found)


def test_edited_document_is_noted_and_a_broken_one_is_damage(copied):
    """People edit README.md; JSON that is none was damaged."""
    (copied / "README.md").write_text("about")
    assert verify(copied).ok
    assert verify(copied).notes and verify(copied).notes[0].startswith("README.md: edited")
    assert "README.md: edited" in str(verify(copied))

    values = json.loads((copied / "croissant.json").read_text())
    (copied / "croissant.json").write_text(json.dumps({**values, "license": "mine"}))
    assert verify(copied).ok
    assert [note.partition(":")[0] for note in verify(copied).notes] == ["README.md", "croissant.json"]

    for content in (b"", b"{", b"[" * 100_000, b"\xff"):
        (copied / "croissant.json").write_bytes(content)
        assert verify(copied).files == ("croissant.json",)

    assert "croissant.json" in export(copied).written
    assert verify(copied).ok


def test_files_of_others_are_ignored(copied):
    """Only names that a reader by pattern would take count."""
    (copied / "README.md").write_text("about")
    (copied / "other-train-00000-of-00001.tfrecord").write_bytes(b"")

    assert verify(copied).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda features: features.pop("mask"),
            "holds image: bytes, key: bytes, mask: bytes, the manifest's",
        ),
        (lambda features: features.update(more={"type": "Text"}), "the manifest's features are .*more: bytes"),
        (lambda features: features.update(mask={"type": "Scalar", "dtype": "int64"}), "features are .*mask: int64"),
        (
            lambda features: features.update(mask={"type": "Tensor", "shape": [2], "dtype": "float64"}),
            "does not match the manifest's features",
        ),
        (
            lambda features: features["image"].update(shape=[None, None, 1]),
            "does not match .*'image': png with",
        ),
    ],
)
def test_changed_features_are_named(copied, change, message):
    """The bytes are right, but whoever reads them with this schema gets something else."""
    change_manifest(copied, lambda values: change(values["features"]))

    found = [line for line in problems(copied) if not line.startswith(("manifest.json: ", "features.json: "))]

    assert len(found) == 4
    assert all(re.match(rf"pairs-.*: record 0 \('.*'\) .*{message}", line) for line in found)


def test_changed_format_is_named(copied):
    """The bytes are right, but the manifest names another format."""
    changed = {"tfrecord": "tfrecord.gz", "tfrecord.gz": "tfrecord"}
    change_manifest(copied, lambda values: values.update(format=changed[values["format"]]))

    found = problems(copied)

    assert sum("but do not read as tfrecord" in line for line in found) == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda values: values.update(format="tar"), "there is no format 'tar'"),
        (lambda values: values["features"]["mask"].update(type="Scalar", dtype="int64"), "field 'mask'"),
        (lambda values: values["shards"][0].update(num_bytes=-1), "num_bytes or checksum is not that of its parts"),
        (lambda values: values.pop("shards"), "is not a manifest of datamat"),
        (None, "is not JSON"),
    ],
)
def test_damaged_manifest_is_named(copied, damage, message):
    """Nothing can be compared with it, and the report says so."""
    if damage:
        change_manifest(copied, damage)
    else:
        os.truncate(copied / "manifest.json", 1000)

    (found,) = problems(copied)

    assert found.startswith("manifest.json: ") and message in found


def test_place_that_may_not_be_read_is_no_damage(monkeypatch):
    """Nobody knows what is in a container of Azure without its account."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)

    with pytest.raises(OptionError, match=r"az://container/out: .*want a URL and storage_options"):
        verify("az://container/out")


def test_threads_that_decode_name_every_record_in_its_order(tmp_path):
    """An archive has no checksums of its records: of forty pictures, decoding names those that are damaged."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=40)
    shards, output = ShardOptions(num_shards=1), tmp_path / "out"
    small_pairs.job(source, output, format="webdataset", shards=shards).run(progress=False)
    path = output / Manifest.read(output).shards[0].file
    content = bytearray(path.read_bytes())
    pictures = [match.start() for match in re.finditer(rb"\x89PNG", content)][::2]
    damaged = [3, 4, 17, 39]
    for number in damaged:
        content[pictures[number] + 60] ^= 8
    path.write_bytes(content)

    found = verify(output, deep=True).problems

    named = [int(match[1]) for line in found if (match := re.search(r": record (\d+) ", line))]
    assert named == damaged
