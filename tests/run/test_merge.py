"""Directories that were made apart become one, and no record is written again."""

import errno
import os
import shutil

import pytest
from prepared import Prepared

from datamat import (
    CorruptDataError,
    DatasetWriter,
    ErrorPolicy,
    Features,
    IndexRow,
    Manifest,
    OptionError,
    OutputError,
    Scalar,
    ShardOptions,
    Text,
    load,
    merge,
    verify,
)
from datamat.cli import main
from datamat.directory.ledger import read_ledger
from datamat.run import merge as merging
from datamat.run.status import status as read_status
from datamat.testing import InlineExecutor


class Lines(DatasetWriter):
    """Rows of a text each; those of the keys in `bad` fail."""

    name = "lines"
    features = Features({"text": Text(), "n": Scalar("int64")})

    def __init__(self, bad=()):
        self.bad = tuple(bad)

    def index(self, source):
        return (IndexRow(key, split, {"n": len(key)}) for key, split in source)

    def read(self, row):
        if row.key in self.bad:
            raise ValueError("it is bad")
        return {"text": f"text of {row.key}", "n": row.fields["n"]}


class OtherLines(Lines):
    """The same with another schema."""

    features = Features({"text": Text(), "n": Scalar("float32")})


def _made(folder, keys, *, writer=None, split="train", num_shards=2, **options):
    Prepared(
        writer or Lines(),
        [(key, split) for key in keys] + [(f"{keys[0]}-val", "val")],
        folder,
        shards=ShardOptions(num_shards=num_shards),
        executor=InlineExecutor(),
        **{"copies": {"train": 2}, **options},
    ).run(progress=False)
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two finished directories; a row of the second failed."""
    folder = tmp_path_factory.mktemp("sets")
    options = {"format": ["tfrecord", "parquet"], "errors": ErrorPolicy("skip")}
    first = _made(folder / "a", [f"a{number}" for number in range(9)], **options)
    second = _made(
        folder / "b", [f"b{number}" for number in range(5)], writer=Lines(bad=["b3"]), num_shards=3, **options
    )
    return [first, second]


def test_directories_are_a_list(tmp_path):
    """The letters of a text would be taken for them."""
    with pytest.raises(OptionError, match="want a list of directories"):
        merge("out/monday", tmp_path / "out")


def test_merged_directory_reads_as_both(sets, tmp_path):
    """Every record of both is in it, by key and by position, in every format; `verify` and `status` agree."""
    manifest = merge(sets, tmp_path / "c")

    both, first, second = (load(folder) for folder in (tmp_path / "c", *sets))
    assert list(both.keys()) == [
        *load(sets[0], "train").keys(), *load(sets[1], "train").keys(),
        *load(sets[0], "val").keys(), *load(sets[1], "val").keys(),
    ]  # fmt: skip
    assert [sample["text"] for sample in both] == [
        *(sample["text"] for folder in sets for sample in load(folder, "train")),
        *(sample["text"] for folder in sets for sample in load(folder, "val")),
    ]
    assert both["b4#1"]["text"] == second["b4#1"]["text"] == "text of b4"
    assert len(load(tmp_path / "c", format="parquet")) == len(first) + len(second)
    assert verify(tmp_path / "c", deep=True).ok
    assert manifest == Manifest.read(tmp_path / "c")
    assert {split: len(shards) for split, shards in manifest.splits.items()} == {"train": 5, "val": 2}
    assert read_status(tmp_path / "c").is_complete


def test_shards_are_links_where_the_disk_has_them(sets, tmp_path, monkeypatch):
    """Else copies, with the same bytes."""
    merge(sets, tmp_path / "linked")

    def refused(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    merge(sets, tmp_path / "copied")

    linked, copied = (sorted((tmp_path / name).glob("lines-*.tfrecord")) for name in ("linked", "copied"))
    assert min(path.stat().st_nlink for path in linked) > 1
    assert {path.stat().st_nlink for path in copied} == {1}
    assert [path.read_bytes() for path in linked] == [path.read_bytes() for path in copied]
    assert (tmp_path / "linked/manifest.json").read_bytes() == (tmp_path / "copied/manifest.json").read_bytes()


def test_ledger_takes_over_what_failed(sets, tmp_path):
    """With the new name of the shard, which holds the other rows."""
    merge(sets, tmp_path / "c")

    lines = list(read_ledger(tmp_path / "c/.datamat/ledger.jsonl"))
    (failed,) = [line for line in lines if line.event == "sample_skipped"]
    assert failed.values["key"] == "b3"
    (shard,) = [info for info in Manifest.read(tmp_path / "c").shards if info.name == failed.values["shard"]]
    assert shard.num_failed == 1
    assert [lines[0].event, lines[-1].event] == ["run_started", "run_finished"]


def test_manifest_that_no_reader_would_take_is_refused(sets, tmp_path, monkeypatch):
    """Before anything is made; what is allowed is what the manifest takes."""
    merge(sets, tmp_path / "c", name="longer")
    found = (tmp_path / "c/manifest.json").stat().st_size

    monkeypatch.setattr(merging, "MOST_MANIFEST_BYTES", found - 20)
    with pytest.raises(OptionError, match=rf"would have {found // 1000},\d+ bytes.* keep the directories apart"):
        merge(sets, tmp_path / "d", name="longer")
    monkeypatch.setattr(merging, "MOST_MANIFEST_BYTES", found + 20)
    merge(sets, tmp_path / "e", name="longer")

    assert not (tmp_path / "d").exists()


def test_keys_that_are_in_both_are_named(sets, tmp_path):
    """Also where they are in another split; nothing is written."""
    third = _made(tmp_path / "third", ["a3", "x1"], split="test", copies=1, format=["tfrecord", "parquet"])

    with pytest.raises(OptionError, match=r"1 keys are in more than one of .*: a3; a key names one sample"):
        merge([sets[0], third], tmp_path / "c")

    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"writer": OtherLines()}, r"features differ \(n: .*int64.*float32"),
        ({"format": "parquet"}, r"formats differ \(tfrecord, parquet; parquet\)"),
        ({"copies": 1}, r"copies of train differ \(2; 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(sets, tmp_path, change, message):
    """The error says what differs."""
    other = _made(tmp_path / "other", ["x1", "x2"], **{"format": ["tfrecord", "parquet"], **change})

    with pytest.raises(OptionError, match=message):
        merge([sets[0], other], tmp_path / "c")


def test_output_must_be_empty_and_apart(sets, tmp_path):
    """What is there stays."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")

    with pytest.raises(OutputError, match=r"holds notes.txt"):
        merge(sets, tmp_path / "full")
    for output in (sets[0], sets[0].parent, sets[0] / "inside"):
        with pytest.raises(OptionError, match="which is to be merged"):
            merge(sets, output)
    with pytest.raises(OptionError, match="want at least two"):
        merge(sets[:1], tmp_path / "c")
    assert (tmp_path / "full/notes.txt").read_text() == "mine"


def test_damaged_shard_is_not_merged(sets, tmp_path):
    """It is named, and so is one that is gone; once it is repaired, the same call completes."""
    sets = [shutil.copytree(folder, tmp_path / folder.name) for folder in sets]
    path = next(sets[1].glob("*.parquet"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")

    with pytest.raises(CorruptDataError, match=path.name):
        merge(sets, tmp_path / "c")
    path.unlink()
    with pytest.raises(CorruptDataError, match=path.name):
        merge(sets, tmp_path / "c")
    path.write_bytes(good)
    merge(sets, tmp_path / "c")

    assert verify(tmp_path / "c", deep=True).ok


def test_command_merges(sets, tmp_path, capsys):
    """The folder is its output; what does not fit gives code 2."""
    folders = [str(folder) for folder in sets]

    codes = [main(["merge", *folders, "--output", str(tmp_path / "c")]), main(["verify", str(tmp_path / "c")])]
    refused = main(["merge", folders[0], folders[0], "--output", str(tmp_path / "d")])

    assert [*codes, refused] == [0, 0, 2]
    found = capsys.readouterr()
    assert found.out.startswith(f"{tmp_path / 'c'}: 7 shards, 28 records")
    assert "are in more than one of" in found.err
