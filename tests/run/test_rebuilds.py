"""What a run may remove of finished work: nothing of another dataset or of the user; it announces the rest."""

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
    with pytest.raises(OutputError, match=r"its manifest is missing or damaged, so that it is unknown which"):
        job(source, output, seed=5).run(progress=False, existing="refuse")

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
        assert list(output.glob(".datamat/parts/*/*.receipt")) and not list(output.glob("*.tfrecord"))

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
    assert f"{output}: 8 of 8 finished shards (100% of the rows) will be rebuilt: seed changed (0 -> 7);" in message
    caplog.clear()
    for number in range(2):
        materialize([lambda n: {"n": n}, lambda n: {"n": n + 1}][number], range(10), tmp_path / "made", **HERE)
    (message,) = caplog.messages
    assert "will be rebuilt: writer code changed (fn)" in message
    assert message.endswith("; materialize(..., existing='refuse') stops instead")


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

    job(source, output, **options).run(progress=False, existing="replace")

    assert wanted in caplog.text


@pytest.mark.parametrize("num_bad", [1, 12])
def test_retried_rows_are_all_that_is_made_again(source, tmp_path, caplog, num_bad):
    """Their shards are not: `run(retry_failed=True)` copies the records of the other rows."""
    whole = {image: image.read_bytes() for image in sorted((source / "train").iterdir())[:num_bad]}
    for image in whole:
        image.write_bytes(b"")
    job(source, tmp_path / "made", errors="skip").run(progress=False)
    for image, content in whole.items():
        image.write_bytes(content)
    caplog.clear()

    report = job(source, tmp_path / "made", errors="skip").run(retry_failed=True, progress=False)

    assert report.num_failed == 0
    messages = [message for message in caplog.messages if "again" in message]
    assert len(messages) == (num_bad > 1)
    assert all("of which 12 rows are read again) will be rebuilt: row" in message for message in messages)


def test_rebuild_is_refused_where_the_user_says_so(source, output):
    """The error comes before any change, whatever would be replaced or removed; a run with nothing to do is allowed."""
    before = everything(output)

    assert job(source, output).run(existing="refuse", progress=False).did_nothing
    for options in ({"seed": 1}, {"shards": ShardOptions(num_shards=2)}, {"format": ["tfrecord", "parquet"]}):
        with pytest.raises(
            OutputError, match=r"8 of 8 finished shards .* existing='refuse' forbids: .* changed|shards now"
        ):
            job(source, output, **options).run(existing="refuse", progress=False)
        assert everything(output) == before
    with pytest.raises(OutputError, match=r"existing='refuse'"):
        job(source, output, seed=1).run(retry_failed=True, existing="refuse", progress=False)

    assert verify(output).ok


def test_what_is_missing_is_made_where_rebuilds_are_refused(source, tmp_path):
    """No finished shard is replaced."""
    output = tmp_path / "out"
    job(source, output, include="val-*").run(existing="refuse", progress=False)
    assert job(source, output).run(existing="refuse", progress=False).is_complete
    next(output.glob("*.tfrecord")).unlink()

    assert job(source, output).run(existing="refuse", progress=False).num_shards_written == 1


def test_materialize_takes_the_options_of_a_run(tmp_path):
    """They mean what they mean in `run`; other values of `existing` are refused."""
    materialize(lambda n: {"n": n}, range(10), tmp_path / "out", **HERE)

    for existing, error, message in (
        ("refuse", OutputError, "existing='refuse'"),
        ("keep", OptionError, "existing is 'keep'; want one of 'update', 'append', 'replace', 'refuse'"),
    ):
        with pytest.raises(error, match=message):
            materialize(lambda n: {"n": n + 1}, range(10), tmp_path / "out", existing=existing, **HERE)
    assert materialize(lambda n: {"n": n}, range(10), tmp_path / "new", deadline=0.001, **HERE).stopped == "deadline"


# ------------------------------------------------------------ finished rows that the source no longer has


def number(n):
    return {"n": n}


def key_of(n):
    return f"n{n}"


# By name: inputs and options of a first call, those of the next, and what the error of the latter names.
LOSING = {
    "other keys": (range(20), {"key": key_of}, range(20, 40), {"key": key_of}, "20 of the 20 rows .*n"),
    "fewer": (range(20), {"key": key_of}, range(18), {"key": key_of}, "2 of the 20 rows .*n1[89]; n1[89]"),
    "one gone, many new": (range(20), {"key": key_of}, range(1, 60), {"key": key_of}, r"1 of the 20 rows .*\(n0\)"),
    "fewer positions": (range(20), {}, range(15), {}, "5 of the 20 rows .*000000"),
    "other positions": (range(20), {}, range(20, 40), {}, "none of the inputs.*key="),
    "other dicts": ([{"a": n} for n in range(5)], {}, [{"a": -n} for n in range(1, 9)], {}, "none of the inputs.*key="),
    "keys where positions were": (range(20), {}, range(20), {"key": key_of}, "20 of the 20 rows .*000000"),
    "other names": ([f"a{n}" for n in range(5)], {}, [f"b{n}" for n in range(5)], {}, "5 of the 5 rows .*a0"),
    "another split": (range(20), {"splits": {"a": 0.5, "b": 0.5}}, range(15), {"splits": {"a": 0.5, "b": 0.5}}, "5 of"),
    "part of the shards": (
        range(20),
        {"key": key_of},
        range(10),
        {"key": key_of, "include": "*-00000-*"},
        "10 of the 20",
    ),
}


@pytest.mark.parametrize("losing", LOSING)
def test_update_refuses_to_remove_finished_rows(tmp_path, losing):
    """It names them and the ways out, touches nothing, and `replace` takes the source alone."""
    first, options, then, others, message = LOSING[losing]
    shards = {"shards": ShardOptions(num_shards=2)}
    materialize(number, first, tmp_path / "out", **shards, **options, **HERE)
    before = everything(tmp_path / "out")

    with pytest.raises(OutputError, match=rf"{message}.*existing='replace'"):
        materialize(number, then, tmp_path / "out", **shards, **others, **HERE)

    assert everything(tmp_path / "out") == before
    others = {name: value for name, value in others.items() if name != "include"}
    report = materialize(number, then, tmp_path / "out", existing="replace", **shards, **others, **HERE)
    assert report.num_rows == len(then)
    assert verify(tmp_path / "out").ok
    assert materialize(number, then, tmp_path / "out", **shards, **others, **HERE).did_nothing


def test_update_rebuilds_changed_rows_and_adds_new_ones(tmp_path):
    """No row is lost where the source has all keys: it grows, its order or its values change, or the function."""
    out = tmp_path / "out"
    for inputs, function in (
        (range(20), number),
        (range(30), number),
        ([*range(29, -1, -1)], number),
        (range(30), lambda n: {"n": n + 1}),
    ):
        report = materialize(function, inputs, out, key=key_of, **HERE)
        assert report.num_rows == len(inputs)
    # Of positions, some items are there still.
    materialize(number, range(20), tmp_path / "positions", **HERE)
    assert materialize(number, range(1, 25), tmp_path / "positions", **HERE).num_rows == 24


@pytest.mark.parametrize("num_bad", [1, 3])
def test_rows_without_records_may_go(tmp_path, num_bad):
    """One that failed, or was left out, is no finished row: to take it out of the source is how one mends that."""

    def picky(n):
        if n < num_bad:
            raise ValueError(n)
        return None if n == 10 else {"n": n}

    with_bad = materialize(picky, range(20), tmp_path / "out", key=key_of, errors="skip", **HERE)
    assert (with_bad.num_failed, with_bad.num_dropped) == (num_bad, 1)

    left = [n for n in range(num_bad, 20) if n != 10]
    assert materialize(picky, left, tmp_path / "out", key=key_of, **HERE).num_rows == len(left)
    with pytest.raises(OutputError, match="1 of the"):
        materialize(picky, left[:-1], tmp_path / "out", key=key_of, **HERE)


@pytest.mark.parametrize("damage", ["keys", "index", "folder"])
def test_damaged_index_hides_no_finished_rows(tmp_path, damage):
    """The records themselves have the keys."""
    out = tmp_path / "out"
    materialize(number, range(20), out, key=key_of, **HERE)
    if damage == "folder":
        shutil.rmtree(out / "_index")
    else:
        (out / "_index" / f"train.{damage}").write_bytes(b"x")

    with pytest.raises(OutputError, match=r"2 of the 20 rows .*n18; n19"):
        materialize(number, range(18), out, key=key_of, **HERE)
    assert materialize(number, range(20), out, key=key_of, **HERE).num_rows == 20


def test_deleted_picture_is_no_order_to_remove_its_record(source, output):
    """The run says how to remove it; one task of several does, too."""
    (source / "train.txt").write_text("".join((source / "train.txt").read_text().splitlines(keepends=True)[:-2]))
    before = everything(output)

    for options in ({}, {"task_index": 0, "num_tasks": 2}):
        with pytest.raises(OutputError, match=r"2 of the 18 rows .*\(train012; train013\).*run\(existing='replace'\)"):
            job(source, output).run(progress=False, **options)
    with pytest.raises(OutputError, match="train012; train013"):
        job(source, output).run(retry_failed=True, progress=False)
    assert "run() raises: the source no longer has 2 of the 18 rows" in str(job(source, output).status())

    assert {path: content for path, content in everything(output).items() if "slices" not in path.parts} == before
    assert job(source, output).run(progress=False, existing="replace").num_rows == NUM_TRAIN + NUM_VAL - 2


def test_conversion_removes_no_records_of_others(tmp_path):
    """Neither those of a dataset that no conversion made, nor rows that its source no longer has."""
    materialize(number, range(9), tmp_path / "one", key=key_of, **HERE)
    materialize(number, range(9), tmp_path / "made", key=key_of, **HERE)
    with pytest.raises(OutputError, match=r"was not made by a conversion.*convert\(..., existing='replace'\)"):
        convert(tmp_path / "one", tmp_path / "made", format="parquet", **HERE)

    convert(tmp_path / "one", tmp_path / "copy", format="parquet", **HERE)
    materialize(number, range(7), tmp_path / "one", key=key_of, existing="replace", **HERE)
    with pytest.raises(OutputError, match=r"2 of the 9 rows .*convert\(..., existing='replace'\)"):
        convert(tmp_path / "one", tmp_path / "copy", format="parquet", **HERE)
    assert convert(tmp_path / "one", tmp_path / "copy", format="parquet", existing="replace", **HERE).num_rows == 7
