"""What a run may write: names that are free or its own, and never what it reads."""

import pathlib
import shutil

import pyarrow as pa
import pytest
from memory_store import MemoryStore, s3
from prepared import Prepared
from pyarrow import parquet

from datamat import Features, ImportWriter, OutputError, Scalar, ShardOptions, load, materialize, verify
from datamat.run.convert import convert
from datamat.testing import InlineExecutor

__all__ = ["s3"]

HERE = {"executor": InlineExecutor(), "progress": False}
FEATURES = Features({"n": Scalar("int64")})
ALONE = {"executor": InlineExecutor()}


def number(n):
    return {"n": n}


def contents(folder):
    found = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in found if path.name not in {"lock", "ledger.jsonl"}}


# ------------------------------------------------------------ files of others


FOREIGN = {
    "shard": ("cats-train-00000-of-00001.tfrecord", {}),
    "offsets": ("cats-train-00000-of-00001.idx", {}),
    "offsets of a second format": ("cats-train-00000-of-00001.parquet.offsets", {"format": ["tfrecord", "parquet"]}),
    "second format": ("cats-train-00000-of-00001.parquet", {"format": ["tfrecord", "parquet"]}),
    "later shard": ("cats-train-00002-of-00003.tar", {"format": "webdataset", "shards": 3}),
    "one split": ("cats-b-00000-of-00001.tfrecord", {"splits": {"a": 0.5, "b": 0.5}}),
    "manifest": ("manifest.json", {}),
    "index": ("_index/train.index", {}),
    "keys": ("_index/train.keys", {}),
    "file called _index": ("_index", {}),
}


def options_of(name):
    path, options = FOREIGN[name]
    return path, {**options, **({"shards": ShardOptions(num_shards=3)} if "shards" in options else {})}


@pytest.mark.parametrize("name", FOREIGN)
def test_file_of_somebody_else_is_refused_by_name(tmp_path, name):
    """Before any work; beside a finished dataset, too. Once it is away, the run is done."""
    path, options = options_of(name)
    foreign = tmp_path / "out" / path
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text('{"name": "mine"}')
    called = []

    def fn(n):
        called.append(n)
        return {"n": n}

    for _ in range(2):  # the refused run leaves nothing that makes the file pass for its own
        with pytest.raises(OutputError, match=rf"{path.split('/')[-1]}.*no run of datamat has made"):
            materialize(
                fn,
                range(9),
                tmp_path / "out",
                name="cats",
                features=Features({"n": Scalar("int64")}),
                **options,
                **HERE,
            )
    assert not called
    assert foreign.read_text() == '{"name": "mine"}'

    foreign.unlink()
    materialize(fn, range(9), tmp_path / "out", name="cats", **options, **HERE)
    assert verify(tmp_path / "out").ok


def test_shard_that_a_new_plan_would_name_is_refused(tmp_path):
    """The manifest lists one shard; a file by hand has the name of one of two."""
    materialize(number, range(9), tmp_path / "out", **HERE)
    (tmp_path / "out" / "data-train-00001-of-00002.tfrecord").write_text("mine")
    before = contents(tmp_path / "out")

    with pytest.raises(OutputError, match=r"data-train-00001-of-00002.tfrecord"):
        materialize(number, range(9), tmp_path / "out", shards=ShardOptions(num_shards=2), **HERE)
    assert contents(tmp_path / "out") == before
    assert materialize(number, range(9), tmp_path / "out", **HERE).did_nothing


def test_conversion_and_tasks_refuse_files_of_others(tmp_path):
    """Whoever writes shards does."""
    materialize(number, range(9), tmp_path / "out", **HERE)
    for folder, name in (("copy", "data-train-00000-of-00001.parquet"), ("shared", "data-train-00000-of-00001.idx")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("mine")

    with pytest.raises(OutputError, match=r"data-train-00000-of-00001.parquet"):
        convert(tmp_path / "out", tmp_path / "copy", format="parquet", **HERE)
    job = Prepared([{"n": n} for n in range(9)], None, tmp_path / "shared", **ALONE)
    (tmp_path / "shared" / "data-train-00000-of-00001.idx").rename(
        tmp_path / "shared" / f"{job._job.name}-train-00000-of-00001.idx"
    )
    with pytest.raises(OutputError, match=r"-train-00000-of-00001.idx"):
        job.run(progress=False, task_index=0, num_tasks=2)


@pytest.mark.parametrize("name", ["shard", "offsets", "manifest", "index"])
def test_store_refuses_objects_of_others(s3, tmp_path, monkeypatch, name):
    """They stay, in a bucket as on a disk."""
    monkeypatch.setattr(MemoryStore, "is_private", False)  # tasks share it
    place, url = f"bucket/sets/one/{FOREIGN[name][0]}", "s3://bucket/sets/one"
    s3.put(place, b"mine")
    options = {"name": "cats", "scratch": tmp_path / "scratch", **HERE}

    for _ in range(2):
        with pytest.raises(OutputError, match=rf"{FOREIGN[name][0]}.*datamat"):
            materialize(number, range(9), url, **options)
    assert s3.objects[place].content == b"mine"
    job = Prepared(ImportWriter("cats"), [{"n": n} for n in range(9)], url, scratch=tmp_path / "other", **ALONE)
    with pytest.raises(OutputError, match=r"cats-|manifest.json|_index"):
        job.run(progress=False, task_index=0, num_tasks=2)
    assert s3.objects[place].content == b"mine"

    del s3.objects[place]
    materialize(number, range(9), url, **options)
    assert materialize(number, range(9), url, **options).did_nothing


def test_store_that_is_the_source_is_refused(tmp_path):
    """As a folder is: finished shards would take the place of its files."""
    source = f"memory://{tmp_path.name}/sets"
    materialize(number, range(9), f"{source}/one", scratch=tmp_path / "scratch", **HERE)

    with pytest.raises(OutputError, match="outside the source"):
        Prepared(None, f"{source}/one", source, scratch=tmp_path / "third", **ALONE).run(progress=False)


def test_names_of_a_killed_first_run_are_its_own(tmp_path):
    """Its record lists them before they are there: whatever a kill leaves, the next run ends."""
    out = tmp_path / "out"
    materialize(number, range(9), out, **HERE)
    (out / "manifest.json").unlink()  # as between the index and the manifest
    shutil.rmtree(out / ".datamat" / "shards", ignore_errors=True)

    materialize(number, range(9), out, **HERE)
    assert verify(out).ok


def test_derived_files_of_others_stay(tmp_path, caplog):
    """One line says so."""
    (tmp_path / "out").mkdir()
    for name in ("README.md", "dataset_info.json"):
        (tmp_path / "out" / name).write_text("mine")
    with caplog.at_level("INFO"):
        materialize(number, range(9), tmp_path / "out", **HERE)

    for name in ("README.md", "dataset_info.json"):
        assert (tmp_path / "out" / name).read_text() == "mine"
        assert sum(f"{name}: left alone" in message for message in caplog.messages) == 1


# ------------------------------------------------------------ the output and its own source


@pytest.fixture
def table(tmp_path):
    """A folder with a Parquet file, which a job could take for its output."""
    (tmp_path / "same").mkdir()
    path = tmp_path / "same" / "same-train-00000-of-00001.parquet"
    parquet.write_table(pa.table({"a": [1, 2, 3], "b": [4, 5, 6]}), path)
    return path


# By name: source and output, relative to a folder with `same/…parquet`, and `link`, which leads to `same`.
OWN = {
    "same folder": ("same", "same"),
    "through a link": ("same", "link"),
    "source through a link": ("link", "same"),
    "by ..": ("same", "same/../same"),
    "single file": ("same/same-train-00000-of-00001.parquet", "same"),
    "output holds the source": ("same", "."),
    "output in the source": ("same", "same/out"),
    "output in the source, by a link": ("same", "link/out"),
    "output where a pattern looks": ("same/**/*.parquet", "same/out"),
    "list of files": (["same/same-train-00000-of-00001.parquet"], "same"),
}


@pytest.mark.parametrize("name", OWN)
def test_output_is_never_its_own_source(table, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("link").symlink_to("same")
    before = table.read_bytes()
    source, output = OWN[name]

    with pytest.raises(OutputError, match="outside the source"):
        Prepared("parquet", source, output, format="parquet", drop=["b"], **ALONE).run(progress=False)

    assert table.read_bytes() == before


def test_output_in_a_source_that_does_not_list_it(table, tmp_path):
    """The source takes Parquet files, and the output holds TFRecords."""
    job = Prepared("parquet", table.parent, table.parent / "out", **ALONE)
    assert job.run(progress=False).num_records == 3
    assert job.run(progress=False).did_nothing


def test_rows_that_name_files_in_the_output_are_refused(tmp_path):
    """By absolute path or by `..`, also through a link."""
    (tmp_path / "out" / "raw").mkdir(parents=True)
    (tmp_path / "out" / "raw" / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to("out")
    for path in ("out/raw/a.txt", "out/raw/../raw/a.txt", "link/raw/a.txt"):
        with pytest.raises(OutputError, match="holds input files of 1 row "):
            materialize(lambda p: {"t": p.read_text()}, [tmp_path / path], tmp_path / "out", key=lambda _: "a", **HERE)


def test_loaded_dataset_is_not_written_over_itself(tmp_path):
    materialize(number, range(9), tmp_path / "out", **HERE)
    before = contents(tmp_path / "out")
    loaded = load(tmp_path / "out")
    for source, options in ((loaded, {"drop": ["key"]}), ({"train": loaded}, {})):
        with pytest.raises(OutputError, match="outside the source"):
            Prepared(source, None, tmp_path / "out", **options, **ALONE).run(progress=False)
    assert {path: content for path, content in contents(tmp_path / "out").items() if path in before} == before
