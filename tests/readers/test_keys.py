"""Records by key: every key finds its record, and nothing else does."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from datamat import CorruptDataError, ShardOptions, load, materialize
from datamat.directory.keys import packed_hashes, row_type
from datamat.directory.manifest import IndexInfo, Manifest
from datamat.readers.records import RecordFiles
from datamat.testing import InlineExecutor


def crops(sample, rng):
    """Return one to three samples."""
    for _ in range(1 + int(rng.integers(3))):
        yield {**sample, "image": np.roll(sample["image"], int(rng.integers(9)), 1)}


def turned(sample, rng):
    """Return just one sample."""
    return {**sample, "image": np.ascontiguousarray(sample["image"][:, ::-1])}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"transform": None, "copies": 1},
        {"transform": None, "copies": 2},
        {"transform": turned, "copies": {"train": 3}},
        {"transform": crops, "copies": {"train": 2}, "shards": ShardOptions(num_shards=3)},
    ],
    ids=["plain", "copies", "augmented", "several"],
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


def test_wrong_keys_find_nothing(pairs):
    """`train` holds KEY#0 to KEY#2, `val` is untransformed and holds the bare keys; positions are no keys."""
    data = load(pairs)

    for key in WRONG:
        assert key not in data
        with pytest.raises(KeyError) as caught:
            data[key]
        assert caught.value.args == (key,)
    assert "train000#0" in data
    assert not [other for other in (0, None, b"train000#0") if other in data]


def test_split_that_is_asked_for_as_a_key_is_explained(pairs):
    """As is the habit with libraries whose datasets are dicts of splits; not where a split was loaded."""
    with pytest.raises(KeyError) as caught:
        load(pairs)["val"]
    with pytest.raises(KeyError) as of_split:
        load(pairs, "train")["val"]

    assert caught.value.args == ("val",)
    assert caught.value.__notes__ == [f"'val' is a split, not a key: load({str(pairs)!r}, 'val') reads it"]
    with pytest.raises(KeyError) as caught:
        load(pairs)["image"]
    assert "columns('image')" in caught.value.__notes__[0]
    assert not hasattr(of_split.value, "__notes__")


def test_keys_of_several_records_are_read_once_per_shard(make_pairs_output, tmp_path, monkeypatch):
    """There the records themselves hold their keys."""
    keys, asked = load(make_pairs_output(tmp_path / "out", transform=crops), "train").keys(), []
    stored = RecordFiles.stored_keys
    monkeypatch.setattr(RecordFiles, "stored_keys", lambda self, shard: asked.append(shard) or stored(self, shard))
    fresh = load(tmp_path / "out", "train")

    assert [fresh[key]["key"] for key in keys] == keys
    assert sorted(asked) == [0, 1]
    for wrong in ("train000", "train000#0-9", "train000#7", "nothing"):
        assert wrong not in fresh


def test_keys_in_any_alphabet_are_found(tmp_path):
    """Their hashes are those of their UTF-8 bytes."""
    names = ["größe", "写真", "a b", "a.b", "🚗", "a"]
    materialize(lambda name: {"x": 1}, names, tmp_path / "out", key=str, executor=InlineExecutor(), progress=False)

    data = load(tmp_path / "out")
    assert sorted(data.keys()) == sorted(names)
    assert all(data[name]["key"] == name for name in names)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "No such file or directory; run the job again"),
        ("cut", "run the job again"),
        ("foreign", "not the file that the manifest lists: .*; run the job again"),
        ("short", "not the file that the manifest lists: .*; run the job again"),
    ],
)
def test_damaged_index_is_named(copied, damage, message):
    """The error says what to do; positions, single keys and other splits can still be read."""
    path = copied / "_index" / "val.index"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "foreign":
        parquet.write_table(pa.table({"key": [f"val00{number}" for number in range(4)]}), path)
    else:
        parquet.write_table(parquet.read_table(path).slice(1), path)
    data = load(copied, "val")

    with pytest.raises(CorruptDataError, match=rf"index file {path}:? .*{message}"):
        data.keys()
    assert data["val000"]["key"] == "val000"
    assert "nothing" not in data
    assert data[0]["key"].startswith("val")
    assert "train000#0" in load(copied, "train")


# ---------------------------------------------------------------- the file of hashes


def _with_hashes(folder, split, hashes):
    """Write the file of hashes of a split anew, and the manifest as if a run had done so."""
    path = folder / "_index" / f"{split}.keys"
    path.write_bytes(b"".join(packed_hashes(len(hashes), hashes.__getitem__)))
    manifest = Manifest.read(folder)
    index = tuple(IndexInfo.of_file(path) if info.file == f"_index/{split}.keys" else info for info in manifest.index)
    dataclasses.replace(manifest, index=index).write(folder, through=folder)


@pytest.mark.parametrize("transform", [turned, crops])
def test_hashes_take_twelve_bytes_a_row_and_lead_to_records(make_pairs_output, tmp_path, transform):
    """No other file of the index is read for a key, whether it is there or not."""
    folder = make_pairs_output(tmp_path / "out", transform=transform)
    keys = {split: load(folder, split).keys() for split in ("train", "val")}
    rows = {split: sum(info.num_rows for info in infos) for split, infos in Manifest.read(folder).splits.items()}
    for split in rows:
        (folder / "_index" / f"{split}.index").unlink()

    for split, names in keys.items():
        data = pickle.loads(pickle.dumps(load(folder, split)))
        assert (folder / "_index" / f"{split}.keys").stat().st_size == 12 * rows[split]
        assert [data[key]["key"] for key in names] == names
        assert all(key in data for key in names[:50])
        assert "nothing" not in data


def test_keys_of_equal_hashes_are_told_apart(copied, monkeypatch):
    """Their records say which is which: also for a key that no record has."""
    keys = load(copied).keys()
    for split, infos in Manifest.read(copied).splits.items():
        _with_hashes(copied, split, np.full(sum(info.num_rows for info in infos), 7, np.uint64))
    monkeypatch.setattr("datamat.directory.index_files.key_hash", lambda key: 7)

    data = load(copied)
    assert [data[key]["key"] for key in keys] == keys
    assert "nothing" not in data
    assert "train000#9" not in data


def test_numbers_of_many_rows_take_eight_bytes(make_pairs_output, tmp_path, monkeypatch):
    """There they count beyond 2**32; that is lowered here."""
    monkeypatch.setattr("datamat.directory.keys._MOST_NARROW", 2)
    folder = make_pairs_output(tmp_path / "out")
    (folder / "_index" / "val.index").unlink()
    data = load(folder, "val")

    assert (folder / "_index" / "val.keys").stat().st_size == 16 * len(data)
    assert {data[f"val{number:03d}"]["key"] for number in range(len(data))} == {sample["key"] for sample in data}
    assert row_type(1 << 33).itemsize == 8


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "zeros", "link"])
def test_damaged_hashes_are_said_and_left_aside(copied, tmp_path, damage, caplog):
    """The index has the keys, too; the message says how to get the file back."""
    path = copied / "_index" / "val.keys"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-12])
    elif damage == "flipped":
        path.write_bytes(bytes(byte ^ 64 for byte in content))
    elif damage == "zeros":
        path.write_bytes(bytes(len(content)))
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    data = load(copied, "val")

    assert [data[key]["key"] for key in data.keys()] == data.keys()  # noqa: SIM118 -- iterating gives samples
    assert "nothing" not in data
    (message,) = {record.getMessage() for record in caplog.records if "val.keys" in record.getMessage()}
    assert str(path) in message
    assert message.endswith("run repair() to write it again")


def test_file_that_is_cut_while_it_is_mapped_is_left_aside(copied, caplog):
    """Pages that are gone would end the process."""
    data = load(copied, "val")
    assert data["val000"]["key"] == "val000"
    (copied / "_index" / "val.keys").write_bytes(b"")

    assert data["val001"]["key"] == "val001"
    assert "it was changed while it was open" in caplog.text


def test_damaged_record_is_found_by_its_key(copied):
    """The error names the damage, not the key."""
    data = load(copied, "val")
    shard = copied / Manifest.read(copied).splits["val"][0].file
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    assert len([key for key in data.keys() if _is_damaged(data, key)]) == 1  # noqa: SIM118 -- as above


def _is_damaged(data, key):
    try:
        return data[key]["key"] != key
    except CorruptDataError as error:
        return f"(key {key!r})" in str(error)
