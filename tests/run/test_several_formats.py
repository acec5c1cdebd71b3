"""Every promise of a run holds for each format, alone and beside others in one pass."""

from __future__ import annotations

import functools
import importlib.util
import shutil

import numpy as np
import pytest
import small_pairs
from killed_job import COPIES, job, run_until_killed
from prepared import Prepared

from datamat import (
    ErrorPolicy,
    Manifest,
    OptionError,
    SampleError,
    ShardOptions,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.directory.manifest import by_shard
from datamat.formats.parquet import ParquetFormat
from datamat.testing import InlineExecutor

NAMES = ["tfrecord", "parquet", "webdataset", "tfrecord.gz"]
ENDINGS = {"tfrecord": ".tfrecord", "parquet": ".parquet", "webdataset": ".tar", "tfrecord.gz": ".tfrecord.gz"}
EACH = [
    *NAMES,
    pytest.param(
        "arrayrecord",
        marks=pytest.mark.skipif(importlib.util.find_spec("array_record") is None, reason="needs array-record"),
    ),
]
NUM_TRAIN, NUM_VAL = 18, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), NUM_TRAIN, NUM_VAL)


class Counting(small_pairs.Pairs):
    """Image and mask; each read and each draw of a sample appends a line to a file."""

    def __init__(self, tally):
        self.tally = str(tally)

    def read(self, row):
        self.count("read")
        return super().read(row)

    def augment(self, sample, rng):
        self.count("draw")
        return small_pairs.jitter(sample, rng)

    def count(self, what):
        with open(self.tally, "a") as file:
            file.write(f"{what}\n")


def make(source, output, formats, *, writer=None, **options):
    """Return the job: two shards per split, copies of train."""
    options = {"executor": InlineExecutor(), "shards": ShardOptions(num_shards=2), **options}
    options = {"copies": {"train": 3}, "transform": small_pairs.jitter, **options}
    return Prepared(writer or small_pairs.Pairs(), source, output, format=formats, **options)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """All formats, in one directory."""
    folder = tmp_path_factory.mktemp("finished")
    make(source, folder / "out", NAMES).run(progress=False)
    return folder / "out"


@pytest.fixture
def output(finished, tmp_path):
    """A copy of the finished directory that a test may damage."""
    return shutil.copytree(finished, tmp_path / "out")


def shards_of(folder, name):
    """Return the digests of the shards of one format."""
    return {file: digest for file, digest in small_pairs.digests(folder).items() if name_of(file) == name}


def name_of(file):
    """Return the format of a shard, by its name; None for any other file."""
    stem, _, ending = file.partition(".")
    return next((name for name, known in ENDINGS.items() if known == f".{ending}" and "-of-" in stem), None)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_each_format_has_the_bytes_of_a_run_with_it_alone(source, finished, tmp_path, name):
    """Shard by shard, the bytes are equal."""
    make(source, tmp_path / "out", name).run(progress=False)

    alone = shards_of(tmp_path / "out", name)

    assert len(alone) == 4
    assert shards_of(finished, name) == alone


@pytest.mark.long
def test_each_sample_is_read_and_drawn_once(source, tmp_path):
    """The counts are those of a run in one format."""
    tallies = []
    for names in ("tfrecord", NAMES):
        tally = tmp_path / f"tally{len(names)}"
        options = {"writer": Counting(tally), "transform": None}
        make(source, tmp_path / "+".join(names), names, **options).run(progress=False)
        tallies.append((tally.read_text().count("read"), tally.read_text().count("draw")))

    assert tallies[0] == tallies[1]
    assert tallies[0][0] <= NUM_TRAIN + NUM_VAL + 1  # one more, to check that draws follow from the seed


def test_records_agree_pairwise_by_key(finished):
    """They agree by position, too: shards of one number hold the same rows in the same order in all formats."""
    reference = load(finished)

    for name in NAMES:
        found = load(finished, format=name)
        assert found.manifest.format == name
        assert [info.num_records for info in found.manifest.shards] == [
            info.num_records for info in reference.manifest.shards
        ]
        assert found.keys() == reference.keys() and len(found) == NUM_TRAIN * 3 + NUM_VAL
        for position, key in enumerate(reference.keys()):
            for wanted, sample in zip(reference[key].values(), found[position].values(), strict=True):
                np.testing.assert_array_equal(sample, wanted)


def test_one_manifest_describes_every_file(finished):
    """Readers that ask for no format get the first one."""
    manifest = Manifest.read(finished)

    assert manifest.format == "tfrecord" and list(manifest.by_format) == NAMES
    assert load(finished).manifest.format == "tfrecord"
    for files in by_shard(manifest.all_files).values():
        assert [name_of(info.file) for info in files] == NAMES
        assert len({(info.num_rows, info.num_records, info.key_digest, info.fingerprint) for info in files}) == 1
        assert len({info.index_file for info in files}) == len(NAMES)
        assert all((finished / info.index_file).is_file() for info in files)
    assert manifest.num_records == NUM_TRAIN * 3 + NUM_VAL
    assert manifest.num_bytes == sum((finished / info.file).stat().st_size for info in manifest.all_files)
    with pytest.raises(OptionError, match="not there in the format 'arrayrecord', only in tfrecord, parquet, webd"):
        load(finished, format="arrayrecord")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty list"),
        (["tfrecord", "parquet", "tfrecord"], r"both write files ending in \.tfrecord"),
        (["tfrecord", 3], "format holds 3"),
        (["tfrecord", "xml"], "no format 'xml'"),
    ],
)
def test_formats_that_cannot_be_combined_are_refused(source, tmp_path, given, message):
    """The error comes before any work."""
    with pytest.raises(OptionError, match=message):
        make(source, tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """Give a function that returns the files of one shard per split in some formats, which this process makes."""

    @functools.cache
    def whole(name):
        output = tmp_path_factory.mktemp("whole") / "out"
        job(source, output, name.split("+")).run(progress=False)
        return small_pairs.digests(output)

    return whole


@pytest.mark.long
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EACH)
def test_one_shard_is_the_same_for_any_number_of_workers(source, whole, tmp_path, name):
    """Three workers that share the parts of a shard write the bytes that one writes."""
    report = job(source, tmp_path / "out", name, num_workers=3).run(progress=False)

    assert report.is_complete
    assert report.num_parts_written > 6
    assert len(Manifest.read(tmp_path / "out").shards) == 2
    assert small_pairs.digests(tmp_path / "out") == whole(name)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [*EACH, "tfrecord+parquet", "parquet+webdataset"])
def test_killed_run_resumes_to_the_same_bytes(source, whole, tmp_path, name):
    """SIGKILL to all processes in the middle of a shard, twice; parts finished in all formats are not made again."""
    formats = name.split("+")
    for at in (9, 6):
        run_until_killed(source, tmp_path / "out", formats, at=at)

    report = job(source, tmp_path / "out", formats, num_workers=2).run(progress=False)

    assert report.num_parts_resumed > 2
    assert report.num_records == NUM_TRAIN * COPIES + NUM_VAL
    assert small_pairs.digests(tmp_path / "out") == whole(name)
    assert verify(tmp_path / "out").ok


def test_format_with_options_of_its_own(tmp_path):
    """A format object is used as given, and its options decide when shards are rebuilt."""
    for rows, num_written in ((5, 1), (5, 0), (4, 1)):
        options = {"format": ParquetFormat(rows), "executor": InlineExecutor(), "progress": False}
        report = materialize(lambda number: {"square": number**2}, range(22), tmp_path / "out", **options)

        assert report.num_shards_written == num_written

    assert sorted(sample["square"] for sample in load(tmp_path / "out")) == [number**2 for number in range(22)]


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_damage_in_one_format_is_named_and_repaired(source, finished, output, name):
    """Of a shard and of the offsets of another: verify names both; repair makes one shard, and touches no other."""
    manifest = Manifest.read(output)
    damaged, other = manifest.by_format[name][:2]
    _flip(output / damaged.file)
    (output / other.index_file).write_text("0 1\n")
    others = [info.file for info in manifest.all_files if info.name != damaged.name]
    times = [(output / file).stat().st_mtime_ns for file in others]

    found = verify(output).files
    report = make(source, output, NAMES).repair(progress=False)

    assert set(found) == {damaged.file, other.index_file}
    assert report.num_shards_written == 1
    assert verify(output, deep=True).ok
    assert small_pairs.digests(output) == small_pairs.digests(finished)
    assert [(output / file).stat().st_mtime_ns for file in others] == times


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_missing_in_one_format_is_remade(source, finished, output, name):
    """A run notices it, whichever format it belongs to; `status` reports it."""
    file = Manifest.read(output).by_format[name][3].file
    (output / file).unlink()

    assert f"{file} is missing" in str(make(source, output, NAMES).status())
    report = make(source, output, NAMES).run(progress=False)

    assert report.num_shards_written == 1
    assert small_pairs.digests(output) == small_pairs.digests(finished)


def test_manifest_that_lists_other_records_in_one_format_is_reported(output):
    """As if a shard of another run had slipped in."""
    manifest = Manifest.read(output)
    turned = {**manifest.also, "parquet": manifest.also["parquet"][::-1]}
    type(manifest)(**{**vars(manifest), "also": turned}).write(output)

    assert any("lists other records in parquet than in tfrecord" in line for line in verify(output).problems)


def test_change_of_one_row_remakes_its_shard_in_every_format(tmp_path):
    """No other shard is made again."""
    source = small_pairs.make_pairs(tmp_path)
    make(source, tmp_path / "out", NAMES).run(progress=False)
    files = [tmp_path / "out" / info.file for info in Manifest.read(tmp_path / "out").all_files]
    before = {path: path.stat().st_mtime_ns for path in files}
    shutil.copyfile(source / "train" / "train004.png", source / "train" / "train003.png")

    report = make(source, tmp_path / "out", NAMES).run(progress=False)

    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    stems = {name.partition(".")[0] for name in changed}
    assert (report.num_shards_written, report.num_shards_reused, len(stems)) == (1, 3, 1)
    assert changed == {f"{stem}{ending}" for stem in stems for ending in ENDINGS.values()}


@pytest.mark.long
def test_formats_that_are_added_or_dropped_leave_nothing_behind(source, tmp_path):
    """The directory equals that of a first run with the last formats."""
    for names in (["tfrecord"], ["parquet", "tfrecord"], ["webdataset"]):
        changed = make(source, tmp_path / "out", names).status().changes
        make(source, tmp_path / "out", names).run(progress=False)
        make(source, tmp_path / "+".join(names), names).run(progress=False)

        assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "+".join(names))
        assert {change.reasons for change in changed} in ({("not made yet",)}, {("format changed",)})


def test_row_that_fails_is_in_no_format(source, tmp_path):
    """It is counted, quarantined and reported once."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train005":
                raise SampleError(row.key, "not this one")
            return super().read(row)

    options = {"writer": Failing(), "errors": ErrorPolicy("quarantine")}
    report = make(source, tmp_path / "out", NAMES, **options).run(progress=False)

    assert (report.num_failed, report.num_records) == (1, (NUM_TRAIN - 1) * 3 + NUM_VAL)
    assert verify(tmp_path / "out", deep=True).ok
    for name in NAMES:
        keys = load(tmp_path / "out", format=name).keys()
        assert len(keys) == report.num_records and not any(key.startswith("train005") for key in keys)


@pytest.mark.long
@pytest.mark.parametrize(
    "names", [["tfrecord", "parquet"], pytest.param(["parquet", "tfrecord"], marks=pytest.mark.long)], ids="+".join
)
def test_row_group_sizes_do_not_depend_on_the_workers(source, tmp_path, names):
    """One worker, and three that finish in any order, write one shard of many parts with the same row groups."""
    import pyarrow.parquet as pq

    names = [ParquetFormat(7) if name == "parquet" else name for name in names]
    found = []
    for num_workers in (1, 3):
        output, workers = tmp_path / str(num_workers), WorkerOptions(num_workers=num_workers)
        options = {"executor": None, "shards": ShardOptions(num_shards=1), "workers": workers}
        report = make(source, output, names, **options).run(progress=False)
        assert report.num_parts_written > 8
        metadata = pq.read_metadata(next(output.glob("*-train-*.parquet")))
        found.append([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])

    assert found[0] == found[1] and sum(found[0]) == NUM_TRAIN * COPIES and max(found[0]) <= 7
    assert small_pairs.digests(tmp_path / "1") == small_pairs.digests(tmp_path / "3")
