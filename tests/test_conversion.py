"""Conversion: the same records in other files, whatever happens on the way."""

from __future__ import annotations

import concurrent.futures
import shutil

import numpy as np
import pytest
import sets
from descriptors import few_descriptors

import datamat.conversion
from datamat import (
    BBoxes,
    ClassLabel,
    CorruptDataError,
    DatasetWriter,
    ErrorPolicy,
    Features,
    Image,
    IndexRow,
    Manifest,
    Materializer,
    OptionError,
    OutputError,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    WorkerOptions,
    load,
    verify,
)
from datamat.cli import main
from datamat.codecs import encode_jpeg
from datamat.conversion import convert
from datamat.formats import get_format
from datamat.index_files import read_index_file

ONE_WORKER = WorkerOptions(num_workers=1)
FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"]


class Mixed(DatasetWriter):
    """Pictures whose bytes are their own, text, and numbers of every kind of column."""

    name = "mixed"
    features = Features(
        {
            "boxes": BBoxes(),
            "caption": Text(),
            "exact": Scalar("float64"),
            "image": Image((6, 8, 3), encoding="jpeg"),
            "label": ClassLabel(names=("a", "b")),
            "open": Tensor((None, None), "int16"),
        }
    )

    def index(self, source):
        rows = [("train", number) for number in range(23)] + [("val", number) for number in range(5)]
        return [IndexRow(f"{split}.{number:02d}é", split, {"number": number}) for split, number in rows]

    def read(self, row):
        rng = np.random.default_rng(row.fields["number"])
        return {
            "image": encode_jpeg(rng.integers(0, 256, (6, 8, 3), np.uint8), quality=71) + b"what follows a picture",
            "label": int(rng.integers(2)),
            "boxes": np.sort(rng.random((int(rng.integers(3)), 2, 2), np.float32), 1).reshape(-1, 4),
            "caption": f"größer als {rng.integers(9)}",
            "exact": rng.random(),
            "open": rng.integers(-9, 9, tuple(rng.integers(0, 4, 2)), np.int16),
        }


class Revised(Mixed):
    """The same rows, and another text in each."""

    def read(self, row):
        return {**super().read(row), "caption": "revised"}


class Many(Mixed):
    """Rows for many shards."""

    def index(self, source):
        return [IndexRow(f"{number:03d}", "train", {"number": number}) for number in range(90)]


class Uneven(Mixed):
    """Every third row fails, and copies are one sample or two."""

    name = "uneven"

    def read(self, row):
        if row.fields["number"] % 3 == 1:
            raise ValueError("a bad row")
        return super().read(row)

    def augment(self, sample, rng):
        return [{**sample, "exact": rng.random()} for _ in range(int(rng.integers(1, 3)))]


def make(output, writer, **options):
    options = {"shards": ShardOptions(num_shards=2), "workers": ONE_WORKER, **options}
    Materializer(writer, None, output, **options).run(progress=False)
    return output


def converted(source, output, **options):
    report = convert(source, output, workers=options.pop("workers", ONE_WORKER), progress=False, **options)
    assert report.is_complete
    assert verify(output, deep=True).ok, str(verify(output, deep=True))
    return output


def records(folder):
    """Return key and stored columns of every record, by split, in order."""
    manifest = Manifest.read(folder)
    shard_format = get_format(manifest.format).with_features(manifest.features)
    return {
        split: [
            {name: [bytes(v) if isinstance(v, bytes) else v for v in value] for name, value in record.items()}
            for info in infos
            for record in shard_format.read(folder / info.file)
        ]
        for split, infos in manifest.splits.items()
    }


def shards(folder):
    return {name: digest for name, digest in sets.digests(folder).items() if name.startswith(("mixed-", "uneven-"))}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A finished directory of TFRecord."""
    return make(tmp_path_factory.mktemp("mixed") / "out", Mixed())


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A finished directory with rows that failed, and rows that gave different numbers of records."""
    folder = tmp_path_factory.mktemp("uneven") / "out"
    return make(folder, Uneven(), copies={"train": 2}, errors=ErrorPolicy("skip"))


@pytest.mark.parametrize("name", FORMATS[1:])
def test_converted_directory_is_that_of_a_run_in_the_format_and_converts_back(mixed, tmp_path, name):
    """Shards and offsets are byte for byte those of a run, and those of the first directory once converted back.

    In `tfrecord.gz` the same records may lie in other gzip members: those end where parts end.
    """
    if name == "arrayrecord":
        pytest.importorskip("array_record", reason="the format arrayrecord needs it")

    there = converted(mixed, tmp_path / "there", format=name)
    back = converted(there, tmp_path / "back", format="tfrecord")

    if name != "tfrecord.gz":
        assert shards(there) == shards(make(tmp_path / "run", Mixed(), format=name))
    assert shards(back) == shards(mixed)
    assert records(there) == records(mixed)


@pytest.mark.parametrize("options", [3, ShardOptions(num_shards=3), ShardOptions(records_per_shard=8)])
def test_other_shards_hold_the_same_records_in_the_same_order(mixed, tmp_path, options):
    """The stored bytes too, which for a lossy picture say that nothing was decoded."""
    output = converted(mixed, tmp_path / "out", shards=options)

    assert len(Manifest.read(output).splits["train"]) == 3
    assert records(output) == records(mixed)
    assert load(output).keys() == load(mixed).keys()


def test_order_of_the_index_stays_where_it_was_kept(tmp_path):
    """What is converted is not shuffled."""
    source = make(tmp_path / "source", Mixed(), shards=ShardOptions(num_shards=2, shuffle=False))

    output = converted(source, tmp_path / "out", shards=ShardOptions(num_shards=3))

    assert load(output, "train").keys() == [f"train.{number:02d}é" for number in range(23)]


def test_size_of_shards_is_that_of_the_records(mixed, tmp_path):
    """`shard_bytes` counts what records take, though no input file says so."""
    size = sum(info.num_bytes for info in Manifest.read(mixed).splits["train"])

    output = converted(mixed, tmp_path / "out", shards=ShardOptions(shard_bytes=size // 3))

    assert [len(infos) for infos in Manifest.read(output).splits.values()] == [4, 1]


@pytest.mark.parametrize("shards", [None, 3])
def test_copies_keep_their_keys(uneven, tmp_path, shards):
    """Also where a copy is two records; rows that failed are not in the new directory."""
    output = converted(uneven, tmp_path / "out", format="parquet", shards=shards)

    keys = load(output).keys()
    assert records(output) == records(uneven)
    assert keys == load(uneven).keys()
    assert any(key.endswith("#1-1") for key in keys)
    assert [load(output)[key]["key"] for key in keys] == keys
    assert sum(info.num_failed for info in Manifest.read(output).shards) == 0
    assert Manifest.read(output).augmented == ("train",)


def test_index_keeps_fields_and_says_where_records_came_from(mixed, tmp_path):
    """Also of a directory that was converted itself: the last place counts."""
    once = converted(mixed, tmp_path / "once", shards=3)
    twice = converted(once, tmp_path / "twice", format="parquet")

    before, after = (read_index_file(folder / "index/train.parquet") for folder in (mixed, twice))
    assert after["number"].to_pylist() == before["number"].to_pylist()
    assert set(after.column_names) == {*before.column_names, "from_shard", "from_record", "from_records"}
    assert after["from_shard"].to_pylist() == sorted(after["shard"].to_pylist())
    assert Manifest.read(twice).made_by["writer"] == Manifest.read(mixed).made_by["writer"]


def test_output_is_the_same_for_any_number_of_workers_and_any_place(mixed, tmp_path):
    """Manifest and index included."""
    elsewhere = shutil.copytree(mixed, tmp_path / "elsewhere")

    one = converted(mixed, tmp_path / "one", format="parquet", shards=3)
    three = converted(elsewhere, tmp_path / "three", format="parquet", shards=3, workers=WorkerOptions(num_workers=3))

    assert sets.digests(one) == sets.digests(three)


def test_several_formats_are_written_and_read(mixed, tmp_path):
    """One directory in two formats, which stays so when it is cut anew; its first format is read."""
    both = converted(mixed, tmp_path / "both", format=["parquet", "tfrecord"])
    again = converted(both, tmp_path / "again", shards=3)

    assert list(Manifest.read(again).by_format) == ["parquet", "tfrecord"]
    assert records(again) == records(mixed)
    assert [sample["key"] for sample in load(again)] == load(mixed).keys()


def test_few_files_are_open_at_a_time(tmp_path):
    """However many shards there are."""
    source = make(tmp_path / "source", Many(), shards=ShardOptions(records_per_shard=1))

    with few_descriptors(50), concurrent.futures.ThreadPoolExecutor(1) as executor:
        convert(source, tmp_path / "out", shards=1, executor=executor, progress=False)

    assert records(tmp_path / "out") == records(source)


class Stopping(concurrent.futures.ThreadPoolExecutor):
    """An executor that gives out after some tasks."""

    left = 5

    def submit(self, fn, /, *args, **kwargs):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().submit(fn, *args, **kwargs)


def test_stopped_conversion_goes_on(mixed, tmp_path):
    """The parts that were finished are taken over, and the result is that of one that was never stopped."""
    whole = converted(mixed, tmp_path / "whole", format="webdataset", shards=2)
    with Stopping(1) as executor, pytest.raises(KeyboardInterrupt):
        convert(mixed, tmp_path / "out", format="webdataset", shards=2, executor=executor, progress=False)

    report = convert(mixed, tmp_path / "out", format="webdataset", shards=2, workers=ONE_WORKER, progress=False)

    assert report.num_parts_resumed > 0
    assert sets.digests(tmp_path / "out") == sets.digests(whole)


def test_what_is_there_is_not_made_again_unless_the_directory_changed(mixed, tmp_path):
    """A second call does nothing; another content of the source is seen."""
    source = shutil.copytree(mixed, tmp_path / "source")
    converted(source, tmp_path / "out", format="parquet")

    again = convert(source, tmp_path / "out", format="parquet", progress=False)
    make(source, Revised())
    changed = convert(source, tmp_path / "out", format="parquet", progress=False)

    assert again.num_shards_written == 0
    assert changed.num_shards_written == 4
    assert records(tmp_path / "out") == records(source)


@pytest.mark.parametrize("name", ["tfrecord", "webdataset"])
def test_damage_is_named_and_nothing_is_written(mixed, tmp_path, name):
    """Also in a format whose records have no checksums."""
    source = shutil.copytree(mixed, tmp_path / "source") if name == "tfrecord" else tmp_path / "source"
    if name != "tfrecord":
        make(source, Mixed(), format=name)
    shard = sorted(source.glob("mixed-train-00001*"))[1]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)

    with pytest.raises(CorruptDataError, match=rf"{shard.name}.*\n.*repair the directory"):
        convert(source, tmp_path / "out", format="parquet", progress=False)

    assert not (tmp_path / "out").exists()


def test_damage_that_comes_later_names_file_and_record(mixed, tmp_path, monkeypatch):
    """The checksums of the records are tested while they are taken over."""
    source = shutil.copytree(mixed, tmp_path / "source")
    shard = source / "mixed-train-00001-of-00002.tfrecord"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    monkeypatch.setattr(datamat.conversion, "_check_whole", lambda *_: None)

    with pytest.raises(SampleError, match=rf"{shard.name}: record \d+ at byte \d+ is damaged"):
        convert(source, tmp_path / "out", format="parquet", workers=ONE_WORKER, progress=False)


def test_missing_shard_is_named(mixed, tmp_path):
    """Before anything is made."""
    source = shutil.copytree(mixed, tmp_path / "source")
    (source / "mixed-val-00001-of-00002.tfrecord").unlink()

    with pytest.raises(CorruptDataError, match=r"mixed-val-00001-of-00002\.tfrecord"):
        convert(source, tmp_path / "out", format="parquet", progress=False)


def test_exchanged_offsets_are_noticed(mixed, tmp_path):
    """A record that is not that of its row is an error, never a record under another key."""
    source = shutil.copytree(mixed, tmp_path / "source")
    first, second = (source / f"mixed-train-0000{number}-of-00002.idx" for number in range(2))
    lines = first.read_text().splitlines()
    first.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    assert second.exists()

    with pytest.raises(SampleError, match="the index says"):
        convert(source, tmp_path / "out", shards=1, workers=ONE_WORKER, progress=False)


def test_senseless_arguments_are_refused(mixed, tmp_path):
    """With what to do instead."""
    with pytest.raises(OptionError, match="give format= or shards="):
        convert(mixed, tmp_path / "out")
    for output in (mixed, mixed / "inside"):
        with pytest.raises(OptionError, match="lies in the directory that is converted"):
            convert(mixed, output, shards=2)
    with pytest.raises(OptionError, match="there is no format 'zip'"):
        convert(mixed, tmp_path / "out", format="zip")
    with pytest.raises(OutputError, match=r"holds no manifest\.json"):
        convert(tmp_path, tmp_path.with_name("out"), shards=2)


def test_command_writes_beside_the_directory(mixed, tmp_path, capsys):
    """Unless it is told where; the place is what it prints."""
    source = shutil.copytree(mixed, tmp_path / "source")

    codes = [
        main(["convert", str(source), "--format", "parquet", "--num-shards", "3", "--num-workers", "1"]),
        main(["convert", str(source), "--num-shards", "3", "--num-workers", "1"]),
        main(["convert", str(source), "--format", "tfrecord", "--format", "parquet", "--num-workers", "1"]),
        main(["convert", str(source), "--num-shards", "1", "--output", str(tmp_path / "mine")]),
    ]

    folders = [tmp_path / name for name in ("source-parquet", "source-3-shards", "source-tfrecord-parquet", "mine")]
    assert codes == [0] * 4
    assert capsys.readouterr().out.split() == [str(folder) for folder in folders]
    assert all(verify(folder).ok for folder in folders)
    assert Manifest.read(folders[0]).format == "parquet"


def test_command_tells_by_its_code_what_went_wrong(mixed, tmp_path, capsys):
    """1 where something is damaged or makes no sense, 2 where nothing finished is there."""
    source = shutil.copytree(mixed, tmp_path / "source")
    codes = [main(["convert", str(tmp_path / "nowhere"), "--num-shards", "1"])]
    codes += [main(["convert", str(tmp_path), "--num-shards", "1"]), main(["convert", str(source)])]
    next(source.glob("*train*.tfrecord")).unlink()
    codes += [main(["convert", str(source), "--num-shards", "1"])]

    assert codes == [2, 2, 1, 1]
    assert "give format= or shards=" in (found := capsys.readouterr().err)
    assert "repair the directory, and convert again" in found
