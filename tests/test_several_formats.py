"""Several formats in one pass: every promise of a run holds for all of them, and each sample is read once."""

from __future__ import annotations

import concurrent.futures
import os
import shutil

import numpy as np
import pytest
import sets
from deadly import COPIES, job, run_until_killed

from datamat import (
    ErrorPolicy,
    Manifest,
    Materializer,
    OptionError,
    SampleError,
    ShardOptions,
    WorkerOptions,
    load,
    verify,
)
from datamat.conversion import convert
from datamat.formats.parquet import ParquetFormat
from datamat.manifest import by_shard

NAMES = ["tfrecord", "parquet", "webdataset", "tfrecord.gz"]
ENDINGS = {"tfrecord": ".tfrecord", "parquet": ".parquet", "webdataset": ".tar", "tfrecord.gz": ".tfrecord.gz"}
NUM_TRAIN, NUM_VAL = 18, 4


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sets.make_pairs(tmp_path_factory.mktemp("source"), NUM_TRAIN, NUM_VAL)


class Counting(sets.Pairs):
    """Image and mask; each read and each draw of a sample appends a line to a file."""

    def __init__(self, tally):
        self.tally = str(tally)

    def read(self, row):
        self.count("read")
        return super().read(row)

    def augment(self, sample, rng):
        self.count("draw")
        return sets.jitter(sample, rng)

    def count(self, what):
        with open(self.tally, "a") as file:
            file.write(f"{what}\n")


THREADS = concurrent.futures.ThreadPoolExecutor(2)  # at work at once, where processes are not what is tested


def make(source, output, formats, *, writer=None, **options):
    """Return the job: two shards per split, copies of train."""
    options = {"executor": THREADS, "shards": ShardOptions(num_shards=2), **options}
    options = {"copies": {"train": 3}, "transform": sets.jitter, **options}
    return Materializer(writer or sets.Pairs(), source, output, format=formats, **options)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    """All formats, in one directory."""
    folder = tmp_path_factory.mktemp("finished")
    make(source, folder / "out", NAMES).run(progress=False)
    return folder / "out"


@pytest.fixture
def output(finished, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "out")


def shards_of(folder, name):
    """Return the digests of the shards of one format."""
    return {file: digest for file, digest in sets.digests(folder).items() if name_of(file) == name}


def name_of(file):
    """Return the format of a shard, by its name; None for a file of another kind."""
    stem, _, ending = file.partition(".")
    return next((name for name, known in ENDINGS.items() if known == f".{ending}" and "-of-" in stem), None)


@pytest.mark.parametrize("name", NAMES)
def test_each_format_has_the_bytes_of_a_run_with_it_alone(source, finished, tmp_path, name):
    """Shard by shard."""
    make(source, tmp_path / "out", name).run(progress=False)

    alone = shards_of(tmp_path / "out", name)

    assert len(alone) == 4
    assert shards_of(finished, name) == alone


def test_each_sample_is_read_and_drawn_once(source, tmp_path):
    """As often as for one format."""
    told = []
    for names in ("tfrecord", NAMES):
        tally = tmp_path / f"tally{len(names)}"
        options = {"writer": Counting(tally), "transform": None}
        make(source, tmp_path / "+".join(names), names, **options).run(progress=False)
        told.append((tally.read_text().count("read"), tally.read_text().count("draw")))

    assert told[0] == told[1]
    assert told[0][0] <= NUM_TRAIN + NUM_VAL + 1  # one more to see that the draws follow from the seed


def test_records_agree_pairwise_by_key(finished):
    """And by position: a shard of one format has the rows of the shard of that number of another, in their order."""
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


def test_one_manifest_tells_of_every_file(finished):
    """The first format is the one that readers take who do not ask for another."""
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


def test_a_list_of_one_is_that_one(source, tmp_path):
    """Every file is the same, the manifest and the offsets too."""
    make(source, tmp_path / "one", "parquet").run(progress=False)
    make(source, tmp_path / "list", ("parquet",)).run(progress=False)

    assert sets.digests(tmp_path / "one") == sets.digests(tmp_path / "list")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "format is an empty list"),
        (["tfrecord", "parquet", "tfrecord"], "'tfrecord' and 'tfrecord', which both write files ending in .tfrecord"),
        (["parquet", ParquetFormat(7)], "both write files ending in .parquet; leave one out"),
        (["tfrecord", 3], "format holds 3; want a name"),
        (["tfrecord", "xml"], "no format 'xml'"),
        (None, "format holds None"),
    ],
)
def test_formats_that_cannot_stand_together_are_refused(source, tmp_path, given, message):
    """Before anything is done."""
    with pytest.raises(OptionError, match=message):
        make(source, tmp_path / "out", given)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tfrecord", "parquet"], ["parquet", "webdataset"]], ids="+".join)
def test_killed_run_goes_on_to_the_same_bytes(source, tmp_path, names):
    """SIGKILL to all processes in the middle of a shard, twice; parts that are done in all formats are not redone."""
    job(source, tmp_path / "whole", names).run(progress=False)
    for at in (9, 6):
        run_until_killed(source, tmp_path / "out", names, at=at)

    report = job(source, tmp_path / "out", names, num_workers=2).run(progress=False)

    assert report.num_parts_resumed > 5
    assert report.num_records == NUM_TRAIN * COPIES + NUM_VAL
    assert sets.digests(tmp_path / "out") == sets.digests(tmp_path / "whole")
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_one_format_is_named_and_repaired(source, finished, output, name):
    """Verify names the file; repair brings it back and leaves the other shards alone."""
    shard = output / Manifest.read(output).by_format[name][1].file
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    others = [info.file for info in Manifest.read(output).all_files if info.name not in shard.name]
    times = [(output / file).stat().st_mtime_ns for file in others]

    assert verify(output).files == (shard.name,)
    make(source, output, NAMES).repair(progress=False)

    assert verify(output, deep=True).ok
    assert sets.digests(output) == sets.digests(finished)
    assert [(output / file).stat().st_mtime_ns for file in others] == times


@pytest.mark.parametrize("ending", [".idx", ".parquet.offsets", ".tar.offsets", ".tfrecord.gz.offsets"])
def test_offsets_of_each_format_are_found_again_in_its_shards(source, finished, output, ending):
    """No shard is made for that."""
    path = output / f"pairs-train-00001-of-00002{ending}"
    path.write_text("0 1\n")

    assert verify(output).files == (path.name,)
    report = make(source, output, NAMES).repair(progress=False)

    assert report.did_nothing
    assert path.read_bytes() == (finished / path.name).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_file_that_is_missing_in_one_format_is_made_anew(source, finished, output, name):
    """A run notices it, whichever format it is of; status tells."""
    file = Manifest.read(output).by_format[name][3].file
    (output / file).unlink()

    assert f"{file} is missing" in str(make(source, output, NAMES).status())
    report = make(source, output, NAMES).run(progress=False)

    assert report.num_shards_written == 1
    assert sets.digests(output) == sets.digests(finished)


def test_stray_files_of_each_format_are_told(output):
    """Under the name of the data set: a reader by pattern would take them."""
    for ending in (".parquet", ".tar", ".tfrecord", ".tfrecord.gz", ".idx", ".parquet.offsets"):
        (output / f"pairs-train-00007-of-00008{ending}").write_bytes(b"")

    assert len(verify(output).files) == 6


def test_manifest_that_tells_of_other_records_in_one_format_is_told(source, output):
    """As if a shard of another run had come between."""
    manifest = Manifest.read(output)
    turned = {**manifest.also, "parquet": manifest.also["parquet"][::-1]}
    type(manifest)(**{**vars(manifest), "also": turned}).write(output)

    assert any("tells of other records in parquet than in tfrecord" in line for line in verify(output).problems)


def test_change_of_one_row_remakes_its_shard_in_every_format(tmp_path):
    """And no other."""
    source = sets.make_pairs(tmp_path)
    make(source, tmp_path / "out", NAMES).run(progress=False)
    files = [tmp_path / "out" / info.file for info in Manifest.read(tmp_path / "out").all_files]
    before = {path: path.stat().st_mtime_ns for path in files}
    os.utime(source / "train" / "train003.png", (5, 5))

    report = make(source, tmp_path / "out", NAMES).run(progress=False)

    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    stems = {name.partition(".")[0] for name in changed}
    assert (report.num_shards_written, report.num_shards_reused, len(stems)) == (1, 3, 1)
    assert changed == {f"{stem}{ending}" for stem in stems for ending in ENDINGS.values()}


@pytest.mark.slow
def test_formats_that_are_added_or_dropped_leave_nothing_behind(source, tmp_path):
    """The directory is that of a first run with the formats of the last one."""
    for names in (["tfrecord"], ["parquet", "tfrecord"], ["tfrecord", "webdataset"], ["webdataset"]):
        changed = make(source, tmp_path / "out", names).status().changes
        make(source, tmp_path / "out", names).run(progress=False)
        make(source, tmp_path / "+".join(names), names).run(progress=False)

        assert sets.digests(tmp_path / "out") == sets.digests(tmp_path / "+".join(names))
        assert {change.reasons for change in changed} in ({("not made yet",)}, {("format changed",)})


def test_conversion_keeps_the_formats_or_writes_several(source, finished, tmp_path):
    """To other shards in all formats; from one format to two."""
    convert(finished, tmp_path / "fewer", shards=1, executor=THREADS, progress=False)
    make(source, tmp_path / "one", "tfrecord").run(progress=False)
    convert(tmp_path / "one", tmp_path / "two", format=NAMES[:2], executor=THREADS, progress=False)

    assert list(Manifest.read(tmp_path / "fewer").by_format) == NAMES
    assert [len(load(tmp_path / "fewer", format=name)) for name in NAMES] == [len(load(finished))] * 4
    for name in NAMES[:2]:
        assert shards_of(tmp_path / "two", name) == shards_of(finished, name)


def test_row_that_fails_is_in_no_format(source, tmp_path):
    """It is counted, quarantined and told once."""

    class Failing(sets.Pairs):
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


def test_estimate_counts_the_bytes_of_every_format(source, tmp_path):
    """About as many as all of them take alone."""
    alone = [make(source, tmp_path / "out", name).estimate(8).num_bytes for name in NAMES]

    together = make(source, tmp_path / "out", NAMES).estimate(8).num_bytes

    assert together == pytest.approx(sum(alone), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tfrecord", "parquet"], ["parquet", "tfrecord"]], ids="+".join)
def test_row_group_sizes_do_not_depend_on_the_workers(source, tmp_path, names):
    """Nor on where parts end: one shard of many parts, by one worker and by three."""
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

    assert found == [[7] * 7 + [5]] * 2
    assert sets.digests(tmp_path / "1") == sets.digests(tmp_path / "3")
