"""What a directory says of itself."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, OutputError
from datamat.features import Features, Image, Mask
from datamat.manifest import IndexInfo, KeyDigest, Manifest, ShardInfo, file_names
from datamat.shard_entries import put_aside, read_entry, salvaged_shards
from datamat.storage import digest_file


def _manifest(**changes):
    info = ShardInfo("set-train-00000-of-00001.tfrecord", "train", 2, 8, 100, "c" * 32, "k" * 32, "f" * 32)
    values = {
        "name": "set",
        "format": "tfrecord",
        "features": Features({"image": Image(), "mask": Mask()}),
        "shards": (info,),
        "seed": 3,
        "copies": {"train": 4},
        "augmented": ("train",),
        "made_by": {"writer": "x"},
        "index": (IndexInfo("train", 70, "d" * 32),),
        "ingredients": {"writer": "w" * 32, "writer.read": "r" * 32, "seed": "3"},
    }
    return Manifest(**{**values, **changes})


def test_manifest_survives_the_disk(tmp_path):
    """Written and read it is the same, and so are its bytes."""
    _manifest().write(tmp_path)
    first = (tmp_path / "manifest.json").read_bytes()

    found = Manifest.read(tmp_path)
    found.write(tmp_path)

    assert found == _manifest()
    assert (tmp_path / "manifest.json").read_bytes() == first
    assert found.splits["train"][0].index_file == "set-train-00000-of-00001.idx"
    assert found.index[0].file == "index/train.parquet"


@given(st.data())
def test_any_changed_byte_is_refused(tmp_path_factory, data):
    """The manifest holds its own digest, and has one form only."""
    folder = tmp_path_factory.mktemp("set")
    _manifest().write(folder)
    content = bytearray((folder / "manifest.json").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    (folder / "manifest.json").write_bytes(content)

    with pytest.raises(CorruptDataError, match=r"manifest\.json|shard entry|index entry"):
        Manifest.read(folder)


@pytest.mark.parametrize("change", [{"more": 1}, {"seed": 4}, {"splits": {}}, {"ingredients": {}}])
def test_edited_manifest_is_refused_unless_it_is_to_be_looked_at(tmp_path, change):
    """Even where what it says makes sense; `verify` looks at it all the same."""
    _manifest().write(tmp_path)
    value = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**value, **change}))

    with pytest.raises(CorruptDataError, match="was changed since it was written: it does not have its digest"):
        Manifest.read(tmp_path)
    assert Manifest.read(tmp_path, strict=False).shards == _manifest().shards


def test_entries_are_salvaged_from_a_damaged_manifest(tmp_path):
    """All but the one that the damage is in; of a file that is no manifest, none."""
    infos = [
        ShardInfo(f"set-train-{n:05d}-of-00003.tfrecord", "train", 2, 8, 100, "c" * 32, "k" * 32, "f" * 32)
        for n in range(3)
    ]
    _manifest(shards=tuple(infos)).write(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    place = content.index(infos[1].file.encode())

    (tmp_path / "manifest.json").write_bytes(b"\x80" + content[:place] + b"\x00" + content[place + 1 :])
    assert salvaged_shards(tmp_path) == [infos[0], infos[2]]

    for other in (b"\x80\x04N.", b"[{}]", b""):
        (tmp_path / "manifest.json").write_bytes(other)
        assert salvaged_shards(tmp_path) == []
    (tmp_path / "manifest.json").unlink()
    assert salvaged_shards(tmp_path) == []


def test_manifest_is_put_aside_with_its_entries(tmp_path):
    """Nothing of it is lost, and no reader takes the directory for finished."""
    _manifest().write(tmp_path)

    put_aside(tmp_path, tmp_path / "work" / "shards", _manifest().shards)

    assert not (tmp_path / "manifest.json").exists()
    assert Manifest.read(tmp_path / "work" / "shards") == _manifest()
    assert read_entry(tmp_path / "work" / "shards" / "set-train-00000-of-00001.json") == _manifest().shards


def test_index_entry_is_that_of_the_file(tmp_path):
    """Its size and checksum."""
    path = tmp_path / "train.parquet"
    path.write_bytes(b"12345")

    assert IndexInfo.of_file(path) == IndexInfo("train", 5, digest_file(path))


def test_missing_manifest_tells_an_unfinished_run_from_a_foreign_folder(tmp_path):
    """The remedy differs."""
    with pytest.raises(OutputError, match="datamat did not write there"):
        Manifest.read(tmp_path)
    (tmp_path / ".datamat").mkdir()
    with pytest.raises(OutputError, match="run it again to go on"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x80\x04\x95",
        b"[]",
        b"{}",
        b'{"datamat_manifest": 99}',
        b"null",
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, damage):
    """A pickle, other JSON, a later version."""
    (tmp_path / "manifest.json").write_bytes(damage)

    with pytest.raises(CorruptDataError, match=r"manifest.json"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": ".hidden"},
        {"num_bytes": "9"},
        {"more": 1},
    ],
)
def test_shard_entries_cannot_lead_out_of_the_directory(tmp_path, change):
    """File names are plain names, numbers are numbers, and nothing else is there."""
    _manifest().write(tmp_path)
    value = json.loads((tmp_path / "manifest.json").read_text())
    value["shards"][0].update(change)
    (tmp_path / "manifest.json").write_text(json.dumps(value))

    with pytest.raises(CorruptDataError):
        Manifest.read(tmp_path)


@given(st.lists(st.text(max_size=8)), st.lists(st.text(max_size=8)))
def test_key_digests_of_runs_join(first, second):
    """Parts computed apart give the digest of the whole."""
    assert (KeyDigest(first) + KeyDigest(second)).hexdigest() == KeyDigest(first + second).hexdigest()


def test_key_digest_tells_lost_doubled_and_moved_keys():
    """All that can happen to a sequence."""
    keys = [f"k{n}" for n in range(20)]
    changed = [keys[1:], keys[:-1], keys + keys[-1:], [*keys[1::-1], *keys[2:]], ["x", *keys[1:]], [keys[1], *keys[1:]]]

    assert len({KeyDigest(found).hexdigest() for found in [keys, *changed]}) == 7


def test_only_the_first_format_has_the_short_name_for_its_offsets():
    """The others' would be the same, and FILE.idx is what DALI calls its own index of a tar file."""
    assert file_names("s", ["tfrecord"]) == [("s.tfrecord", "s.idx")]
    assert file_names("s", ["tfrecord", "tar", "tfrecord.gz"]) == [
        ("s.tfrecord", "s.idx"),
        ("s.tar", "s.tar.offsets"),
        ("s.tfrecord.gz", "s.tfrecord.gz.offsets"),
    ]
