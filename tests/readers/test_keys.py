"""Records by key: every key finds its record, and nothing else does."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import small_pairs
from every_feature import ONE_WORKER

from datamat import CorruptDataError, Index, Materializer, ShardOptions, load
from datamat.readers.records import RecordFiles


def crops(sample, rng):
    """A transform that gives one to three samples."""
    for _ in range(1 + int(rng.integers(3))):
        yield {**sample, "image": np.roll(sample["image"], int(rng.integers(9)), 1)}


def turned(sample, rng):
    """A transform that gives just one sample."""
    return {**sample, "image": np.ascontiguousarray(sample["image"][:, ::-1])}


@pytest.mark.parametrize(
    "options",
    [
        {"transform": None, "copies": 1},
        {"transform": None, "copies": 2},
        {"transform": turned, "copies": 1},
        {"transform": turned, "copies": {"train": 3}},
        {"transform": crops, "copies": {"train": 2}},
        {"transform": crops, "copies": 1, "shards": ShardOptions(num_shards=3)},
    ],
    ids=["plain", "copies", "one-copy", "augmented", "several", "several-shards"],
)
def test_every_key_finds_its_record(make_pairs_output, tmp_path, options):
    """This holds with and without copies, and where rows give different numbers of records."""
    make_pairs_output(tmp_path / "out", **options)

    for split in (None, "train", "val"):
        data = load(tmp_path / "out", split)
        keys = data.keys()
        assert keys == [sample["key"] for sample in data]
        assert len(set(keys)) == len(keys) == len(data)
        assert [load(tmp_path / "out", split)[key]["key"] for key in keys[::9]] == keys[::9]
        assert [data[key]["key"] for key in reversed(keys)] == keys[::-1]
        assert all(key in data for key in keys)


WRONG = ["", "#", "#0", "nothing", "val", "val0000", "VAL000", "val000\0", "val000#", "val000#0", "é", chr(0xD800)]
WRONG += [f"train000{end}" for end in ("", "#", "#3", "#99", "#0#0", "#-1", "#0-0", "#00", "#0 ", "#zero")]


@pytest.mark.parametrize("key", WRONG)
def test_wrong_keys_find_nothing(pairs, key):
    """`train` holds KEY#0 to KEY#2, `val` is untransformed and holds the bare keys."""
    data = load(pairs)

    assert key not in data
    with pytest.raises(KeyError) as caught:
        data[key]
    assert caught.value.args == (key,)


@pytest.mark.parametrize("key", ["train000", "train000#0-9", "train000#7", "nothing"])
def test_wrong_keys_find_nothing_among_rows_of_several_records(make_pairs_output, tmp_path, key):
    """There the records themselves hold their keys."""
    make_pairs_output(tmp_path / "out", transform=crops)

    assert key not in load(tmp_path / "out")


def test_only_keys_are_in_a_dataset(pairs):
    """A position is in none, nor is anything else."""
    data = load(pairs)

    assert "train000#0" in data
    assert 0 not in data
    assert None not in data
    assert b"train000#0" not in data


def test_keys_of_several_records_are_read_once_per_shard(make_pairs_output, tmp_path, monkeypatch):
    """Not again for each key."""
    data = load(make_pairs_output(tmp_path / "out", transform=crops), "train")
    keys, asked = data.keys(), []
    stored = RecordFiles.stored_keys
    monkeypatch.setattr(RecordFiles, "stored_keys", lambda self, shard: asked.append(shard) or stored(self, shard))
    fresh = load(tmp_path / "out", "train")

    assert [fresh[key]["key"] for key in keys] == keys
    assert sorted(asked) == [0, 1]


def test_keys_in_any_alphabet_are_found(tmp_path):
    """Their hashes are those of their UTF-8 bytes."""

    class Named(small_pairs.Pairs):
        def index(self, source):
            return Index.from_rows(["größe", "写真", "a b", "a.b", "🚗", "a"])

        def read(self, row):
            return {"image": np.zeros((24, 32, 3), np.uint8), "mask": np.zeros((24, 32), np.uint8)}

    Materializer(Named, None, tmp_path / "out", workers=ONE_WORKER).run(progress=False)

    data = load(tmp_path / "out")
    assert sorted(data.keys()) == sorted(["größe", "写真", "a b", "a.b", "🚗", "a"])
    assert all(data[key]["key"] == key for key in data.keys())  # noqa: SIM118 -- iterating gives samples


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "No such file or directory; run the job again"),
        ("cut", "run the job again"),
        ("foreign", "shard.*; run the job again"),
        ("short", "has 3 rows, the manifest says 4; run the job again"),
    ],
)
def test_damaged_index_is_named(pairs, tmp_path, damage, message):
    """The error says what to do; positions and other splits can still be read."""
    import pyarrow as pa
    from pyarrow import parquet

    folder = shutil.copytree(pairs, tmp_path / "out")
    path = folder / "_index" / "val.index"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "foreign":
        parquet.write_table(pa.table({"key": [f"val00{number}" for number in range(4)]}), path)
    else:
        parquet.write_table(parquet.read_table(path).slice(1), path)
    data = load(folder, "val")

    for ask in (data.keys, lambda: data["val000"], lambda: "val000" in data):
        with pytest.raises(CorruptDataError, match=rf"index file {path}:? .*{message}"):
            ask()
    assert data[0]["key"].startswith("val")
    assert "train000#0" in load(folder, "train")
