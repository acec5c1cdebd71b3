"""What a run may remove of finished work: nothing of another dataset or of the user; it announces the rest."""

from __future__ import annotations

import logging
import pathlib

import pytest
import small_pairs

from datamat import (
    Materializer,
    OptionError,
    OutputError,
    SampleError,
    ShardOptions,
    WorkerOptions,
    materialize,
    verify,
)
from datamat.run.convert import convert

ONE_WORKER = WorkerOptions(num_workers=1)


class Streets(small_pairs.Pairs):
    """Another dataset in the same layout."""

    name = "streets"


@pytest.fixture
def source(tmp_path):
    return small_pairs.make_pairs(tmp_path / "source")


def job(source, output, writer=None, **options):
    options = {"shards": ShardOptions(num_shards=4), "workers": ONE_WORKER, **options}
    return Materializer(writer or small_pairs.Pairs(), source, output, **options)


def everything(folder):
    """Return the digest of each file below a folder, hidden ones included, except for the lock and the ledger."""
    found = {path: path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}
    return {path: content for path, content in found.items() if path.name not in {"lock", "ledger.jsonl"}}


# ------------------------------------------------------------ another dataset


def test_run_of_another_dataset_is_refused(source, tmp_path):
    """The error names both, and nothing is touched."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
    before = everything(output)

    with pytest.raises(OutputError, match=r"holds the dataset 'pairs', and a run of 'streets' would remove it; give"):
        job(source, output, Streets()).run(progress=False)

    assert everything(output) == before
    assert verify(output).ok


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1, 2"])
def test_finished_dataset_without_its_manifest_is_protected(source, tmp_path, content):
    """Neither another dataset nor a run that may replace nothing gets its place."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
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


def test_functions_under_two_names_do_not_share_an_output(tmp_path):
    """As in a notebook whose second cell has the output of the first."""
    materialize(lambda n: {"n": n}, range(10), tmp_path / "out", name="one", workers=ONE_WORKER, progress=False)

    with pytest.raises(OutputError, match=r"'one'.*'two'"):
        materialize(lambda n: {"n": n}, range(10), tmp_path / "out", name="two", workers=ONE_WORKER, progress=False)


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
        (source / "train" / "train019.png").write_bytes(b"")
        with pytest.raises(SampleError):
            job(source, output, shards=ShardOptions(num_shards=1, shuffle=False), include="train-*").run(progress=False)
        assert list(output.glob(".datamat/parts/*/*.json")) and not list(output.glob("*.tfrecord"))

    with pytest.raises(OutputError, match=r"holds the dataset 'pairs'"):
        job(source, output, Streets()).run(progress=False)


def test_failed_run_that_left_nothing_keeps_no_name(source, tmp_path):
    """The error after a wrong name and an early stop does not advise to delete anything."""
    with pytest.raises(OptionError):
        job(source, tmp_path / "out", include="test-*").run(progress=False)

    assert job(source, tmp_path / "out", Streets()).run(progress=False).is_complete


# ------------------------------------------------------------ files of the user


def test_files_that_no_entry_lists_stay(source, tmp_path):
    """`manifest.csv`, and a table with the name of a removed shard, stay beside the shards."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
    mine = {output / name: f"mine: {name}" for name in ("manifest.csv", "pairs-train-00000-of-00004.csv")}
    for path, content in mine.items():
        path.write_text(content)

    job(source, output, shards=ShardOptions(num_shards=2)).run(progress=False)

    assert {path: path.read_text() for path in mine} == mine
    assert not list(output.glob("*-of-00004.tfrecord")) and not list(output.glob("*-of-00004.idx"))
    assert verify(output).ok


# ------------------------------------------------------------ what is rebuilt


def test_large_rebuild_says_before_it_begins_what_goes_and_why(source, tmp_path, caplog):
    """It says so once, through the logger of the run."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        job(source, output, seed=7).run(progress=False)

    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{output}: 8 of 8 finished shards (100% of the rows) will be made again: seed changed (0 -> 7);" in message


@pytest.mark.parametrize("change", ["rows", "number of shards", "split"])
def test_reason_is_that_of_status(source, tmp_path, caplog, change):
    """Changes of rows, layout and splits have the words of `status`."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
    options = {}
    if change == "rows":
        (source / "train.txt").write_text("".join((source / "train.txt").read_text().splitlines(keepends=True)[:-1]))
        wanted = "row train019 removed"
    elif change == "split":
        (source / "val.txt").unlink()
        wanted = "split val is no longer in the plan"
    else:
        options, wanted = {"shards": ShardOptions(num_shards=3)}, "has 3 shards now, it had 4"
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        job(source, output, **options).run(progress=False)

    assert any(wanted in record.getMessage() for record in caplog.records), caplog.text


@pytest.mark.parametrize("num_bad", [1, 12])
def test_retried_rows_are_all_that_is_made_again(source, tmp_path, caplog, num_bad):
    """Their shards are not: `rerun_failed` copies the records of the other rows."""
    output, images = tmp_path / "out", sorted((source / "train").iterdir())[:num_bad]
    whole = {image: image.read_bytes() for image in images}
    for image in images:
        image.write_bytes(b"")
    job(source, output, errors="skip").run(progress=False)
    for image, content in whole.items():
        image.write_bytes(content)
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        report = job(source, output, errors="skip").rerun_failed(progress=False)

    assert report.num_failed == 0
    messages = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    if num_bad == 1:
        assert messages == []
    else:
        assert len(messages) == 1
        assert "of which 12 rows are read again) will be made again: row" in messages[0]


def test_warning_names_arguments_that_its_reader_has(tmp_path, caplog):
    """The caller of `materialize` has no `run`; the caller of `convert` has no argument that refuses rebuilds."""
    for number in range(2):
        materialize(lambda n, k=number: {"n": n + k}, range(10), tmp_path / "out", workers=ONE_WORKER, progress=False)
        convert(tmp_path / "out", tmp_path / "converted", format="parquet", workers=ONE_WORKER, progress=False)

    messages = [record.getMessage() for record in caplog.records if "will be made again" in record.getMessage()]
    assert len(messages) == 2
    assert messages[0].endswith("; materialize(..., rebuild='refuse') raises instead")
    assert "refuse" not in messages[1]


def test_small_rebuild_is_done_without_a_warning(tmp_path, caplog):
    """One shard of twelve is rebuilt quietly."""
    source = small_pairs.make_pairs(tmp_path / "source", 24, 1)
    layout = {"shards": ShardOptions(num_shards=12, shuffle=False)}
    job(source, tmp_path / "out", **layout).run(progress=False)
    image = source / "train" / "train003.png"
    image.write_bytes((source / "train" / "train004.png").read_bytes())
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        report = job(source, tmp_path / "out", **layout).run(progress=False)

    assert (report.num_shards_written, caplog.records) == (1, [])


def test_rebuild_is_refused_where_the_user_says_so(source, tmp_path):
    """The error comes before any change, whatever would be replaced or removed; a run with nothing to do is allowed."""
    output = tmp_path / "out"
    job(source, output).run(progress=False)
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
    options = {"workers": ONE_WORKER, "progress": False}
    materialize(lambda n: {"n": n}, range(10), tmp_path / "out", **options)

    with pytest.raises(OutputError, match=r"rebuild='refuse'"):
        materialize(lambda n: {"n": n + 1}, range(10), tmp_path / "out", rebuild="refuse", **options)
    with pytest.raises(OptionError, match=r"rebuild is 'no'; want 'allow' or 'refuse'"):
        materialize(lambda n: {"n": n + 1}, range(10), tmp_path / "out", rebuild="no", **options)

    stopped = materialize(lambda n: {"n": n}, range(10), tmp_path / "new", deadline=0.001, **options)
    assert stopped.stopped == "deadline"


def test_conversion_into_the_output_of_another_dataset_is_refused(source, tmp_path):
    """A conversion is a run like any other."""
    job(source, tmp_path / "pairs").run(progress=False)
    job(source, tmp_path / "streets", Streets()).run(progress=False)

    with pytest.raises(OutputError, match=r"holds the dataset 'streets', and a run of 'pairs'"):
        convert(tmp_path / "pairs", tmp_path / "streets", format="parquet", workers=ONE_WORKER, progress=False)
