"""Conversion: the same records in other files, whatever happens on the way."""

import contextlib
import shutil
import threading

import numpy as np
import pytest
import small_pairs
from open_files import few_descriptors
from prepared import Prepared

from datamat import (
    BBoxes,
    ClassLabel,
    CorruptDataError,
    DatasetWriter,
    ErrorPolicy,
    Features,
    Image,
    IncompleteRunError,
    IndexRow,
    Manifest,
    OptionError,
    OutputError,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    WorkerOptions,
    failures,
    load,
    verify,
)
from datamat.cli import main
from datamat.codecs import encode_jpeg
from datamat.directory.index_files import read_index
from datamat.events import PartDone, RunEnded
from datamat.formats import get_format
from datamat.run.convert import convert
from datamat.testing import InlineExecutor

FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"]


class Mixed(DatasetWriter):
    """Pictures with their original bytes, text, and numbers in every kind of column."""

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
    """The same rows with other text."""

    def read(self, row):
        return {**super().read(row), "caption": "revised"}


class Many(Mixed):
    """Rows for many shards."""

    def index(self, source):
        return [IndexRow(f"{number:03d}", "train", {"number": number}) for number in range(60)]


class Uneven(Mixed):
    """Every third row fails; a copy is one sample or two."""

    name = "uneven"

    def read(self, row):
        if row.fields["number"] % 3 == 1:
            raise ValueError("a bad row")
        return super().read(row)

    def augment(self, sample, rng):
        return [{**sample, "exact": rng.random()} for _ in range(int(rng.integers(1, 3)))]


def make(output, writer, **options):
    options = {"shards": ShardOptions(num_shards=2), "executor": InlineExecutor(), **options}
    Prepared(writer, None, output, **options).run(progress=False)
    return output


def converted(source, output, **options):
    """Convert a directory in this process, unless `workers` are given."""
    runs_here = {} if "workers" in options else {"executor": InlineExecutor()}
    report = convert(source, output, progress=False, **{**runs_here, **options})
    assert report.is_complete
    assert verify(output, deep=True).ok, str(verify(output, deep=True))
    return output


def records(folder):
    """Return the key and the stored columns of every record, by split, in order."""
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
    return {
        name: digest for name, digest in small_pairs.digests(folder).items() if name.startswith(("mixed-", "uneven-"))
    }


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A finished directory of TFRecord."""
    return make(tmp_path_factory.mktemp("mixed") / "out", Mixed())


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A finished directory with rows that failed, and rows that gave different numbers of records."""
    folder = tmp_path_factory.mktemp("uneven") / "out"
    return make(folder, Uneven(), copies={"train": 2}, errors=ErrorPolicy("skip"))


def test_conversion_that_stops_early_resumes_and_reports_by_exit_code(mixed, tmp_path, capsys):
    """It exits with 1 and prints on standard error what is left; the same command without a limit exits with 0."""
    command = ["convert", str(mixed), "--format", "parquet", "--output", str(tmp_path / "out"), "--workers", "1"]

    assert main([*command, "--deadline", "0.001s"]) == 1
    assert "stopped by its deadline" in capsys.readouterr().err
    assert main([*command, "--max-disk", "1kB"]) == 1
    assert "stopped by its max_disk" in capsys.readouterr().err
    assert main(command) == 0
    assert verify(tmp_path / "out").ok


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMATS[1:])
def test_converted_directory_is_that_of_a_run_in_the_format_and_converts_back(mixed, tmp_path, name):
    """Shards and offsets equal those of a run in the format, byte for byte; converted back, they equal the original.

    In `tfrecord.gz`, Parquet and ArrayRecord the same records may lie in other gzip members, row groups or blocks:
    those end with parts.
    """
    if name == "arrayrecord":
        pytest.importorskip("array_record", reason="the format arrayrecord needs it")

    there = converted(mixed, tmp_path / "there", format=name)
    back = converted(there, tmp_path / "back", format="tfrecord")

    if name not in ("tfrecord.gz", "parquet", "arrayrecord"):
        assert shards(there) == shards(make(tmp_path / "run", Mixed(), format=name))
    assert shards(back) == shards(mixed)
    assert records(there) == records(mixed)


@pytest.mark.parametrize("options", [3, ShardOptions(records_per_shard=8)])
def test_other_shards_hold_the_same_records_in_the_same_order(mixed, tmp_path, options):
    """The stored bytes are the same, too: nothing decodes a lossy picture on the way."""
    output = converted(mixed, tmp_path / "out", shards=options)

    assert len(Manifest.read(output).splits["train"]) == 3
    assert records(output) == records(mixed)
    assert load(output).keys() == load(mixed).keys()


def test_order_of_the_index_and_size_of_records_count(tmp_path):
    """Records in the order of the index are not shuffled; `shard_bytes` counts the bytes of records."""
    source = make(tmp_path / "source", Mixed(), shards=ShardOptions(num_shards=2, shuffle=False))
    size = sum(info.num_bytes for info in Manifest.read(source).splits["train"])

    output = converted(source, tmp_path / "out", shards=ShardOptions(shard_bytes=size // 3))

    assert load(output, "train").keys() == [f"train.{number:02d}é" for number in range(23)]
    assert [len(infos) for infos in Manifest.read(output).splits.values()] == [4, 1]


@pytest.mark.long
def test_copies_keep_their_keys(uneven, tmp_path):
    """Keys hold where a copy is two records; rows that failed are not in the new directory."""
    output = converted(uneven, tmp_path / "out", format="parquet", shards=3)

    keys = load(output).keys()
    assert records(output) == records(uneven)
    assert keys == load(uneven).keys()
    assert any(key.endswith("#1-1") for key in keys)
    assert [load(output)[key]["key"] for key in keys] == keys
    assert sum(info.num_failed for info in Manifest.read(output).shards) == 0
    assert Manifest.read(output).augmented == ("train",)


def test_index_keeps_fields_and_says_where_records_came_from(mixed, tmp_path):
    """In a directory that was itself converted, the last place counts."""
    once = converted(mixed, tmp_path / "once", shards=3)
    twice = converted(once, tmp_path / "twice", format="parquet")

    before, after = (read_index(folder, "_index/train.index") for folder in (mixed, twice))
    assert after["number"].to_pylist() == before["number"].to_pylist()
    assert set(after.column_names) == {*before.column_names, "from_shard", "from_record", "from_records"}
    assert after["from_shard"].to_pylist() == sorted(after["shard"].to_pylist())
    assert Manifest.read(twice).made_by["writer"] == Manifest.read(mixed).made_by["writer"]


def test_output_is_the_same_for_any_number_of_workers_and_any_place(mixed, tmp_path):
    """So are the manifest and the index."""
    elsewhere = shutil.copytree(mixed, tmp_path / "elsewhere")

    one = converted(mixed, tmp_path / "one", format="parquet", shards=3)
    three = converted(elsewhere, tmp_path / "three", format="parquet", shards=3, workers=WorkerOptions(num_workers=3))

    assert small_pairs.digests(one) == small_pairs.digests(three)


@pytest.mark.long
def test_several_formats_are_written_and_read(mixed, tmp_path):
    """A directory in two formats keeps both at another number of shards; readers use its first format."""
    both = converted(mixed, tmp_path / "both", format=["parquet", "tfrecord"])
    again = converted(both, tmp_path / "again", shards=3)

    assert list(Manifest.read(again).by_format) == ["parquet", "tfrecord"]
    assert records(again) == records(mixed)
    assert [sample["key"] for sample in load(again)] == load(mixed).keys()


@pytest.mark.long
def test_few_files_are_open_at_a_time(tmp_path):
    """The number of open files does not grow with the number of shards."""
    source = make(tmp_path / "source", Many(), shards=ShardOptions(records_per_shard=1))

    with few_descriptors(40):
        convert(source, tmp_path / "out", shards=1, executor=InlineExecutor(), progress=False)

    assert records(tmp_path / "out") == records(source)


class Stopping(InlineExecutor):
    """An executor that is interrupted after some tasks."""

    left = 5

    def submit(self, fn, /, *args, **kwargs):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().submit(fn, *args, **kwargs)


def test_stopped_conversion_resumes(mixed, tmp_path):
    """It reuses the finished parts, and its bytes are those of a conversion that never stopped."""
    whole = converted(mixed, tmp_path / "whole", format="webdataset", shards=2)
    with pytest.raises(KeyboardInterrupt):
        converted(mixed, tmp_path / "out", format="webdataset", shards=2, executor=Stopping())

    report = convert(mixed, tmp_path / "out", format="webdataset", shards=2, executor=InlineExecutor(), progress=False)

    assert report.num_parts_resumed > 0
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(whole)


@pytest.mark.parametrize("first", [{}, {"include": "train-*"}, {"executor": Stopping()}])
def test_tasks_convert_one_directory_together(mixed, tmp_path, first):
    """Whatever one has left, all of it, half or an interrupted shard, the other completes, to the same bytes."""
    whole = converted(mixed, tmp_path / "whole", format="parquet", shards=2)
    options = {"format": "parquet", "shards": 2, "num_tasks": 2, "progress": False}
    with contextlib.suppress(KeyboardInterrupt):
        convert(mixed, tmp_path / "out", task_index=0, **{"executor": InlineExecutor(), **options, **first})

    report = convert(mixed, tmp_path / "out", task_index=1, executor=InlineExecutor(), **options)

    assert report.is_complete
    assert (report.num_shards_written == 0) == (not first)
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(whole)


def test_finished_conversion_is_not_repeated_unless_the_source_changed(mixed, tmp_path):
    """A second call does nothing; other content in the source directory is noticed."""
    source = shutil.copytree(mixed, tmp_path / "source")
    converted(source, tmp_path / "out", format="parquet")

    again = convert(source, tmp_path / "out", format="parquet", progress=False)
    make(source, Revised())
    changed = convert(source, tmp_path / "out", format="parquet", executor=InlineExecutor(), progress=False)

    assert again.num_shards_written == 0
    assert changed.num_shards_written == 4
    assert records(tmp_path / "out") == records(source)


@pytest.mark.parametrize("name", ["tfrecord", "webdataset"])
def test_damage_is_named_and_nothing_is_written(mixed, tmp_path, name):
    """Formats whose records carry no checksums are no exception."""
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


class Damaging(InlineExecutor):
    """An executor that flips a bit of a file before it runs its first task."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def submit(self, fn, /, *args, **kwargs):
        if self.path is not None:
            data = bytearray(self.path.read_bytes())
            data[-5] ^= 1
            self.path.write_bytes(data)
            self.path = None
        return super().submit(fn, *args, **kwargs)


def test_damage_that_comes_later_names_file_and_record(mixed, tmp_path):
    """The copy compares the checksum of each record."""
    source = shutil.copytree(mixed, tmp_path / "source")
    shard = source / "mixed-train-00001-of-00002.tfrecord"

    with pytest.raises(SampleError, match=rf"{shard.name}: record \d+ at byte \d+ is damaged"):
        converted(source, tmp_path / "out", format="parquet", executor=Damaging(shard))


@pytest.mark.parametrize("errors", ["skip", "quarantine"])
def test_record_that_is_left_out_is_listed_and_tried_again(mixed, tmp_path, errors):
    """Once the directory is repaired; until then the next conversion says by which call."""
    source = shutil.copytree(mixed, tmp_path / "source")
    shard = source / "mixed-train-00001-of-00002.tfrecord"
    options = {"format": "parquet", "progress": False}
    left_out = convert(source, tmp_path / "out", errors=errors, executor=Damaging(shard), **options)
    listed = failures(tmp_path / "out")
    shutil.copy(mixed / shard.name, shard)
    with pytest.raises(IncompleteRunError, match=r"convert\(..., retry_failed=True\)"):
        convert(source, tmp_path / "out", executor=InlineExecutor(), **options)

    convert(source, tmp_path / "out", executor=InlineExecutor(), retry_failed=True, **options)

    assert (left_out.num_failed, len(listed)) == (1, 1)
    assert shard.name in listed[0].reason
    assert not failures(tmp_path / "out")
    assert records(tmp_path / "out") == records(source)


def test_exchanged_offsets_are_noticed(mixed, tmp_path):
    """A record that does not belong to its row is an error; it never gets another key."""
    source = shutil.copytree(mixed, tmp_path / "source")
    first, second = (source / f"mixed-train-0000{number}-of-00002.idx" for number in range(2))
    lines = first.read_text().splitlines()
    first.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    assert second.exists()

    with pytest.raises(CorruptDataError, match="its offsets are not those of the records"):
        converted(source, tmp_path / "out", shards=1, errors="skip")


class EventsInThisProcess:
    """Notes each event; cannot be pickled, so it stays in its process."""

    def __init__(self):
        self.events = []
        self.stays = threading.current_thread()  # no pickle holds a thread

    def __call__(self, event):
        self.events.append(event)


def checksums(manifest):
    """A sidecar that lists checksums."""
    return {"CHECKSUMS": "".join(f"{info.checksum} {info.file}\n" for info in manifest.all_files).encode()}


@pytest.mark.parametrize(
    "start_method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))]
)
def test_hooks_hear_a_conversion_and_sidecars_describe_it(mixed, tmp_path, start_method):
    """Hooks hear of parts that hold every record; the sidecar's file is written, verified, and repaired."""
    output, heard, again = tmp_path / "out", EventsInThisProcess(), EventsInThisProcess()
    workers = WorkerOptions(num_workers=2, start_method=start_method)

    converted(mixed, output, format="parquet", shards=3, hooks=[heard], sidecars=[checksums], workers=workers)
    (output / "CHECKSUMS").write_text("edited")
    found = verify(output)
    converted(mixed, output, format="parquet", shards=3, hooks=[again], sidecars=[checksums], workers=workers)

    assert sum(event.num_records for event in heard.events if isinstance(event, PartDone)) == 28
    assert isinstance(heard.events[-1], RunEnded)
    assert heard.events[-1].report.num_records == 28
    assert found.files == ("CHECKSUMS",)
    assert not [event for event in again.events if isinstance(event, PartDone)]
    assert (output / "CHECKSUMS").read_bytes() == checksums(Manifest.read(output))["CHECKSUMS"]


def test_senseless_arguments_are_refused(mixed, tmp_path):
    """The error says what to do instead."""
    with pytest.raises(OptionError, match="nothing to change"):
        convert(mixed, tmp_path / "out")
    for output in (mixed, mixed / "inside"):
        with pytest.raises(OptionError, match="is inside the directory to convert; give another output"):
            convert(mixed, output, shards=2)
    for options in (
        {"hooks": EventsInThisProcess()},
        {"hooks": [3]},
        {"sidecars": ["README"]},
        {"workers": "4"},
        {"executor": Stopping(), "workers": WorkerOptions(max_rss=1 << 30)},
    ):
        with pytest.raises(OptionError, match=rf"{next(iter(options))}"):
            convert(mixed, tmp_path / "out", shards=3, **options)
    with pytest.raises(OptionError, match="can be read, not written"):
        convert(mixed, "https://host/out", shards=3)
    with pytest.raises(OptionError, match="there is no format 'zip'"):
        convert(mixed, tmp_path / "out", format="zip")
    with pytest.raises(OutputError, match=r"holds no manifest\.json"):
        convert(tmp_path, tmp_path.with_name("out"), shards=2)


@pytest.mark.long
def test_command_writes_beside_the_directory(mixed, tmp_path, capsys):
    """`--output` names another place; the command prints where it wrote."""
    source = shutil.copytree(mixed, tmp_path / "source")

    codes = [
        main(["convert", str(source), "--format", "tfrecord", "--format", "parquet", "--workers", "1"]),
        main(["convert", str(source), "--shards", "1", "--output", str(tmp_path / "mine")]),
    ]

    folders = [tmp_path / name for name in ("source-tfrecord-parquet", "mine")]
    assert codes == [0] * 2
    assert capsys.readouterr().out.split() == [str(folder) for folder in folders]
    assert all(verify(folder).ok for folder in folders)
    assert list(Manifest.read(folders[0]).by_format) == ["tfrecord", "parquet"]


def test_exit_code_of_the_command_says_what_went_wrong(mixed, tmp_path, capsys):
    """1 for damage; 2 where no finished directory is there or the options make no sense."""
    source = shutil.copytree(mixed, tmp_path / "source")
    codes = [main(["convert", str(tmp_path / "nowhere"), "--shards", "1"])]
    codes += [main(["convert", str(tmp_path), "--shards", "1"]), main(["convert", str(source)])]
    next(source.glob("*train*.tfrecord")).unlink()
    codes += [main(["convert", str(source), "--shards", "1"])]

    assert codes == [2, 2, 2, 1]
    assert "nothing to change in" in (found := capsys.readouterr().err)
    assert "repair the directory" in found
