"""What a directory says of itself."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, OutputError
from datamat.features import Features, Image, Mask
from datamat.manifest import KeyDigest, Manifest, ShardInfo


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
