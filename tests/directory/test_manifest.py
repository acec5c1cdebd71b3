"""The manifest: what a directory says about itself."""

import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from datamat.directory import manifest
from datamat.directory.keys import KeyDigest
from datamat.directory.manifest import (
    FilePart,
    IndexInfo,
    Manifest,
    ShardInfo,
    file_names,
    part_of,
    salvaged_shards,
)
from datamat.directory.publication import finish_publication
from datamat.errors import CorruptDataError, OutputError
from datamat.features import Features, Image, Mask
from datamat.folders import open_folder

PARTS = (FilePart(70, "c" * 32), FilePart(30, "d" * 32))
ENDS = (FilePart(100, "e" * 32), FilePart(100, "e" * 32), FilePart(12, "a" * 32))


def _manifest(**changes):
    info = ShardInfo("set-train-00000-of-00001.tfrecord", "train", 2, 8, PARTS, "k" * 32, "f" * 32, *ENDS)
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
    """Written and read, it is the same, and so are its bytes."""
    _manifest().write(tmp_path)
    first = (tmp_path / "manifest.json").read_bytes()

    found = Manifest.read(tmp_path)
    found.write(tmp_path)

    assert found == _manifest()
    assert (tmp_path / "manifest.json").read_bytes() == first
    assert found.splits["train"][0].index_file == "set-train-00000-of-00001.idx"
    assert found.index[0].file == "_index/train.index"


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
def test_edited_manifest_is_read_only_for_examination(tmp_path, change):
    """Readers refuse it even where it makes sense; `verify` examines it all the same."""
    _manifest().write(tmp_path)
    value = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**value, **change}))

    with pytest.raises(CorruptDataError, match="was changed since it was written: it does not have its digest"):
        Manifest.read(tmp_path)
    assert Manifest.read(tmp_path, strict=False).shards == _manifest().shards


def test_entries_are_salvaged_from_a_damaged_manifest(tmp_path):
    """All entries but the damaged one are recovered; a file that is no manifest gives none."""
    infos = [
        ShardInfo(f"set-train-{n:05d}-of-00003.tfrecord", "train", 2, 8, PARTS, "k" * 32, "f" * 32, *ENDS)
        for n in range(3)
    ]
    _manifest(shards=tuple(infos)).write(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    place = content.index(infos[1].file.encode())

    (tmp_path / "manifest.json").write_bytes(b"\x80" + content[:place] + b"\x00" + content[place + 1 :])
    assert salvaged_shards(open_folder(tmp_path)) == [infos[0], infos[2]]

    for other in (b"\x80\x04N.", b"[{}]", b""):
        (tmp_path / "manifest.json").write_bytes(other)
        assert salvaged_shards(open_folder(tmp_path)) == []
    (tmp_path / "manifest.json").unlink()
    assert salvaged_shards(open_folder(tmp_path)) == []


NAMES = ("set-train-00000-of-00001.tfrecord", "set-train-00000-of-00001.idx", "_index/train.index")


@pytest.mark.parametrize("there", [(), NAMES[:1], NAMES[:2], NAMES, "old"])
def test_readers_take_the_place_that_fits(tmp_path, there):
    """While files move, each is where it waits, or has its name already, under which that of the set before may be."""
    places = {name: f".datamat/run-00001/{name}" for name in NAMES}
    contents = {name: bytes([number]) * 100 for number, name in enumerate(NAMES)}
    for name, place in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / (name if name in there else place)).write_bytes(contents[name])
        if there == "old":
            (tmp_path / name).write_bytes(b"o" * 100)
    part = part_of(contents[NAMES[0]])
    info = ShardInfo(NAMES[0], "train", 2, 8, (part,), "k" * 32, "f" * 32, part, part, part_of(contents[NAMES[1]]))
    index = IndexInfo("train", *part_of(contents[NAMES[2]]))
    _manifest(shards=(info,), index=(index,), moving=places).write(tmp_path)

    found = Manifest.read(tmp_path)

    wanted = {name: name if name in there else places[name] for name in NAMES}
    assert (found.shards[0].file, found.shards[0].index_file, found.index[0].file) == tuple(wanted.values())
    assert (found.shards[0].name, found.shards[0].extension) == ("set-train-00000-of-00001", "tfrecord")
    assert found.index_infos.keys() == {NAMES[2]}


def test_who_finishes_late_leaves_what_has_a_name_by_now(tmp_path):
    """Of the names that go, only files of the old set are deleted, not one that another has put there since."""
    old, later = "set-train-00000-of-00002.tfrecord", "set-train-00001-of-00002.tfrecord"
    (tmp_path / old).write_bytes(b"old")
    (tmp_path / later).write_bytes(b"later")
    folder = open_folder(tmp_path)
    _manifest(going={old: folder.stat(old).version, later: "of the old file"}).write(tmp_path)

    finish_publication(folder)

    assert not (tmp_path / old).exists()
    assert (tmp_path / later).read_bytes() == b"later"
    assert Manifest.read(tmp_path).going == {}


@pytest.mark.parametrize(
    "change",
    [
        {"moving": {NAMES[0]: "../elsewhere"}},
        {"moving": {NAMES[0]: ".datamat/lock"}},
        {"moving": {"README.md": ".datamat/run-00001/README.md"}},
        {"going": {"README.md": "1"}},
        {"going": {"../set-train-00000-of-00001.idx": "1"}},
    ],
)
def test_places_that_no_run_gives_are_refused(tmp_path, change):
    """Who finishes a publication moves and deletes what the manifest says."""
    _manifest(**change).write(tmp_path)

    with pytest.raises(CorruptDataError, match="moving or going"):
        Manifest.read(tmp_path)


def test_missing_manifest_tells_an_unfinished_run_from_a_foreign_folder(tmp_path):
    """The remedy differs."""
    with pytest.raises(OutputError, match="correct the path or URL"):
        Manifest.read(tmp_path)
    (tmp_path / ".datamat").mkdir()
    (tmp_path / ".datamat/lock").touch()
    with pytest.raises(OutputError, match="run it again to resume"):
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
def test_file_that_is_no_manifest_is_refused(tmp_path, damage):
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
    """File names are plain names, numbers are numbers, and nothing else is allowed."""
    _manifest().write(tmp_path)
    value = json.loads((tmp_path / "manifest.json").read_text())
    value["shards"][0].update(change)
    (tmp_path / "manifest.json").write_text(json.dumps(value))

    with pytest.raises(CorruptDataError):
        Manifest.read(tmp_path)


@given(st.lists(st.text(max_size=8)), st.lists(st.text(max_size=8)))
def test_key_digests_of_runs_join(first, second):
    """Digests of parts, computed separately, give the digest of the whole."""
    assert (KeyDigest(first) + KeyDigest(second)).hexdigest() == KeyDigest(first + second).hexdigest()


def test_key_digest_of_many_keys_is_that_of_one_after_the_other():
    """Many are digested by numpy, in runs of 1,024."""
    keys, each = [f"k{n}" for n in range(2500)], KeyDigest()
    for key in keys:
        each.add(key)

    assert KeyDigest(keys).hexdigest() == each.hexdigest()


def test_key_digest_shows_lost_doubled_and_moved_keys():
    """Every kind of change to a sequence gives another digest."""
    keys = [f"k{n}" for n in range(20)]
    changed = [keys[1:], keys[:-1], keys + keys[-1:], [*keys[1::-1], *keys[2:]], ["x", *keys[1:]], [keys[1], *keys[1:]]]

    assert len({KeyDigest(found).hexdigest() for found in [keys, *changed]}) == 7


def test_only_the_first_format_has_the_short_name_for_its_offsets():
    """The other formats' names would be the same, and DALI calls its own index of a tar file FILE.idx."""
    assert file_names("s", ["tfrecord"]) == [("s.tfrecord", "s.idx")]
    assert file_names("s", ["tfrecord", "tar", "tfrecord.gz"]) == [
        ("s.tfrecord", "s.idx"),
        ("s.tar", "s.tar.offsets"),
        ("s.tfrecord.gz", "s.tfrecord.gz.offsets"),
    ]


def test_threads_find_the_parts_of_a_file_that_one_finds(tmp_path, monkeypatch):
    """Whole, damaged, cut anywhere, or too long; parts of no bytes too."""
    rng = np.random.default_rng(1)
    parts = [rng.bytes(size) for size in (1000, 0, 1, 70_000, 3_000_000, 0)]
    digests = tuple(FilePart(len(part), xxhash.xxh3_128_hexdigest(part)) for part in parts)
    info = ShardInfo("set-train-00000-of-00001.tfrecord", "train", 2, 8, digests, "k" * 32, "f" * 32, *ENDS)
    whole = b"".join(parts)
    contents = [whole, whole[:-1], whole[:1001], b"", whole + b"x", whole[:500] + b"?" + whole[501:], whole[1:] + b"y"]
    for content in contents:
        (tmp_path / "file").write_bytes(content)
        hasher = info.hasher()
        hasher.update(content)
        found = []
        for least in (1 << 40, 0):
            monkeypatch.setattr(manifest, "_LEAST_SHARED_BYTES", least)
            found.append(
                (
                    info.checksum_of(tmp_path / "file"),
                    info.is_whole(tmp_path / "file"),
                    info.damaged_ranges(tmp_path / "file"),
                )
            )
        assert found[0] == found[1]
        assert found[0][1] == (content == whole) == (hasher.hexdigest() == found[0][0] == info.checksum)
    (tmp_path / "file").write_bytes(contents[5])
    assert info.damaged_ranges(tmp_path / "file") == [(0, 1000)]
