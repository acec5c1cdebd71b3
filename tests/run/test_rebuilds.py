"""What a run may remove of finished work: nothing of another dataset or of the user; it announces the rest."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import small_pairs

from datamat import (
    OptionError,
    OutputError,
    SampleError,
    ShardOptions,
    materialize,
    verify,
)
from datamat.run.convert import convert
from datamat.testing import InlineExecutor

NUM_TRAIN, NUM_VAL = 14, 4
HERE = {"executor": InlineExecutor(), "progress": False}


class Streets(small_pairs.Pairs):
    """Another dataset in the same layout."""

    name = "streets"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A source and its finished dataset, which tests copy."""
    folder = tmp_path_factory.mktemp("kept")
    job(small_pairs.make_pairs(folder / "source", NUM_TRAIN, NUM_VAL), folder / "out").run(progress=False)
    return folder


@pytest.fixture
def source(kept, tmp_path):
    return shutil.copytree(kept / "source", tmp_path / "source")


@pytest.fixture
def output(kept, tmp_path):
    """The finished dataset."""
    return shutil.copytree(kept / "out", tmp_path / "out")


def job(source, output, writer=None, **options):
    return small_pairs.job(source, output, writer, **{"shards": ShardOptions(num_shards=4), **options})


def everything(folder):
    """Return the digest of each file below a folder, hidden ones included, except for the lock and the ledger."""
    found = {path: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}
    return {path: content for path, content in found.items() if path.name not in {"lock", "ledger.jsonl"}}


# ------------------------------------------------------------ another dataset


def test_run_of_another_dataset_is_refused(source, output, tmp_path):
    """The error names both, and nothing is touched; this holds for runs, functions and conversions."""
    before = everything(output)
    made = materialize(lambda n: {"n": n}, range(3), tmp_path / "one", name="one", **HERE).output

    with pytest.raises(OutputError, match=r"holds the dataset 'pairs', and a run of 'streets' would remove it; give"):
        job(source, output, Streets()).run(progress=False)
    with pytest.raises(OutputError, match=r"'pairs'.*'two'"):
        materialize(lambda n: {"n": n}, range(10), output, name="two", **HERE)
    with pytest.raises(OutputError, match=r"holds the dataset 'pairs', and a run of 'one'"):
        convert(made, output, format="parquet", **HERE)

    assert everything(output) == before
    assert verify(output).ok


@pytest.mark.parametrize("content", [None, b"{}", b"[1, 2"])
def test_finished_dataset_without_its_manifest_is_protected(source, output, content):
    """Neither another dataset nor a run that may replace nothing gets its place."""
    (output / "manifest.json").unlink()
    if content is not None:
        (output / "manifest.json").write_bytes(content)
    before = everything(output)

    with pytest.raises(OutputError, match=r"holds the dataset 'pairs', and a run of 'streets' would remove it"):
        job(source, output, Streets()).run(progress=False)
    with pytest.raises(OutputError, match=r"its manifest is missing or damaged, and does not say which"):
        job(source, output, seed=5).run(progress=False, rebuild="refuse")

    assert everything(output) == before
    job(source, output).run(progress=False)
    assert verify(output).ok


@pytest.mark.parametrize("left", ["shard", "part", "damaged manifest"])
def test_unfinished_or_damaged_dataset_is_not_removed(source, tmp_path, left):
    """What is there is finished work of it."""
    output = tmp_path / "out"
    if left == "shard":
        job(source, output, include="val-*").run(progress=False)
    elif left == "damaged manifest":
        job(source, output).run(progress=False)
        content = (output / "manifest.json").read_bytes()
        (output / "manifest.json").write_bytes(content.replace(b'"seed": 0', b'"seed": 1'))
    else:
        (source / "train" / "train013.png").write_bytes(b"")
        with pytest.raises(SampleError):
            job(source, output, shards=ShardOptions(num_shards=1, shuffle=False), include="train-*").run(progress=False)
        assert list(output.glob(".datamat/parts/*/*.json")) and not list(output.glob("*.tfrecord"))

    with pytest.raises(OutputError, match=r"holds the dataset 'pairs'"):
        job(source, output, Streets()).run(progress=False)


# ------------------------------------------------------------ files of the user


def test_files_that_no_entry_lists_stay(source, output):
    """`manifest.csv`, and a table with the name of a removed shard, stay beside the shards."""
    mine = {output / name: f"mine: {name}" for name in ("manifest.csv", "pairs-train-00000-of-00004.csv")}
    for path, content in mine.items():
        path.write_text(content)

    job(source, output, shards=ShardOptions(num_shards=2)).run(progress=False)

    assert {path: path.read_text() for path in mine} == mine
    assert not list(output.glob("*-of-00004.tfrecord")) and not list(output.glob("*-of-00004.idx"))
    assert verify(output).ok


# ------------------------------------------------------------ what is rebuilt


def test_large_rebuild_says_before_it_begins_what_goes_and_why(source, output, tmp_path, caplog):
    """Once, through the logger of the run, with the argument that its caller has; a small rebuild is quiet."""
    shutil.copyfile(source / "val" / "val002.png", source / "val" / "val003.png")
    assert job(source, output).run(progress=False).num_shards_written == 1
    assert caplog.messages == []

    job(source, output, seed=7).run(progress=False)

    (message,) = caplog.messages
    assert f"{output}: 8 of 8 finished shards (100% of the rows) will be made again: seed changed (0 -> 7);" in message
    caplog.clear()
    for number in range(2):
        materialize([lambda n: {"n": n}, lambda n: {"n": n + 1}][number], range(10), tmp_path / "made", **HERE)
    (message,) = caplog.messages
    assert "will be made again: writer code changed (fn)" in message
    assert message.endswith("; materialize(..., rebuild='refuse') raises instead")


@pytest.mark.parametrize("change", ["rows", "number of shards", "split"])
def test_reason_is_that_of_status(source, output, caplog, change):
    """Changes of rows, layout and splits have the words of `status`."""
    options = {}
    if change == "rows":
        (source / "train.txt").write_text("".join((source / "train.txt").read_text().splitlines(keepends=True)[:-1]))
        wanted = "row train013 removed"
    elif change == "split":
        (source / "val.txt").unlink()
        wanted = "split val is no longer in the plan"
    else:
        options, wanted = {"shards": ShardOptions(num_shards=3)}, "has 3 shards now, it had 4"

    job(source, output, **options).run(progress=False)

    assert wanted in caplog.text


@pytest.mark.parametrize("num_bad", [1, 12])
def test_retried_rows_are_all_that_is_made_again(source, tmp_path, caplog, num_bad):
    """Their shards are not: `rerun_failed` copies the records of the other rows."""
    whole = {image: image.read_bytes() for image in sorted((source / "train").iterdir())[:num_bad]}
    for image in whole:
        image.write_bytes(b"")
    job(source, tmp_path / "made", errors="skip").run(progress=False)
    for image, content in whole.items():
        image.write_bytes(content)
    caplog.clear()

    report = job(source, tmp_path / "made", errors="skip").rerun_failed(progress=False)

    assert report.num_failed == 0
    messages = [message for message in caplog.messages if "again" in message]
    assert len(messages) == (num_bad > 1)
    assert all("of which 12 rows are read again) will be made again: row" in message for message in messages)


def test_rebuild_is_refused_where_the_user_says_so(source, output):
    """The error comes before any change, whatever would be replaced or removed; a run with nothing to do is allowed."""
    before = everything(output)

    assert job(source, output).run(rebuild="refuse", progress=False).did_nothing
    for options in ({"seed": 1}, {"shards": ShardOptions(num_shards=2)}, {"format": ["tfrecord", "parquet"]}):
        with pytest.raises(
            OutputError, match=r"8 of 8 finished shards .* rebuild='refuse' forbids: .* changed|shards now"
        ):
            job(source, output, **options).run(rebuild="refuse", progress=False)
        assert everything(output) == before
    with pytest.raises(OutputError, match=r"rebuild='refuse'"):
        job(source, output, seed=1).rerun_failed(rebuild="refuse", progress=False)

    assert verify(output).ok


def test_what_is_missing_is_made_where_rebuilds_are_refused(source, tmp_path):
    """No finished shard is replaced."""
    output = tmp_path / "out"
    job(source, output, include="val-*").run(rebuild="refuse", progress=False)
    assert job(source, output).run(rebuild="refuse", progress=False).is_complete
    next(output.glob("*.tfrecord")).unlink()

    assert job(source, output).run(rebuild="refuse", progress=False).num_shards_written == 1


def test_materialize_takes_the_options_of_a_run(tmp_path):
    """They mean what they mean in `run`; other values of `rebuild` are refused."""
    materialize(lambda n: {"n": n}, range(10), tmp_path / "out", **HERE)

    for rebuild, error, message in (
        ("refuse", OutputError, "rebuild='refuse'"),
        ("no", OptionError, "rebuild is 'no'; want 'allow' or 'refuse'"),
    ):
        with pytest.raises(error, match=message):
            materialize(lambda n: {"n": n + 1}, range(10), tmp_path / "out", rebuild=rebuild, **HERE)
    assert materialize(lambda n: {"n": n}, range(10), tmp_path / "new", deadline=0.001, **HERE).stopped == "deadline"
