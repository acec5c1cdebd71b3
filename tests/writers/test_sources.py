"""Sources that need no class: every row exactly once, as it was, or a refusal that says what to write."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys

import cv2
import dill
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow
from prepared import Prepared
from pyarrow import parquet

from datamat import (
    Bytes,
    ClassLabel,
    CorruptDataError,
    Image,
    Index,
    IndexRow,
    Json,
    ListOf,
    Materializer,
    Nullable,
    OptionError,
    SampleError,
    Scalar,
    SchemaError,
    ShardOptions,
    SourceError,
    Tensor,
    Text,
    Timestamp,
    WorkerOptions,
    load,
    verify,
)
from datamat.codecs import encode_png
from datamat.features import RaggedColumn
from datamat.testing import InlineExecutor
from datamat.writers import TableWriter
from datamat.writers.dataset import ImportWriter
from datamat.writers.spool import packed, unpacked

NUM_ROWS = 60
PICTURES = [
    encode_png(np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)) for number in range(NUM_ROWS)
]
NOON = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)

COLUMNS = {
    "image": (pa.binary(), lambda n: PICTURES[n], Image()),
    "raw": (pa.binary(), lambda n: b"\0%d" % n, Bytes()),
    "small": (pa.int16(), lambda n: n - 30, Scalar("int16")),
    "large": (pa.uint64(), lambda n: 2**63 + n, Scalar("uint64")),
    "frac": (pa.float32(), lambda n: n / 4, Scalar("float32")),
    "flag": (pa.bool_(), lambda n: n % 2 == 0, Scalar("bool")),
    "text": (pa.large_string(), lambda n: f"größer {n}", Text()),
    "kind": (pa.dictionary(pa.int8(), pa.string()), lambda n: f"kind {n % 3}", Text()),
    "when": (pa.timestamp("ms", "UTC"), lambda n: NOON + datetime.timedelta(hours=n), Timestamp("UTC")),
    "tokens": (pa.list_(pa.int32()), lambda n: list(range(n % 4)), Tensor((None,), "int32")),
    "pair": (pa.list_(pa.float64(), 2), lambda n: [n, n / 2], Tensor((2,), "float64")),
    "boxes": (pa.list_(pa.list_(pa.float32(), 4)), lambda n: [[0, 0, 0.5, 1]] * (n % 3), Tensor((None, 4), "float32")),
    "parts": (pa.list_(pa.binary()), lambda n: [b"\0%d" % n, b""][: n % 3], ListOf(Bytes())),
    "tags": (pa.list_(pa.string()), lambda n: ["a", "b"][: n % 3], ListOf(Text())),
    "ragged": (pa.list_(pa.list_(pa.int64())), lambda n: [[n], [n, n]], Json()),
    "objects": (
        pa.list_(pa.struct([("label", pa.string()), ("area", pa.int64())])),
        lambda n: [{"label": "x", "area": n}] * (n % 2),
        Json(),
    ),
    "counts": (pa.map_(pa.string(), pa.int64()), lambda n: {"a": n} if n % 2 else {}, Json()),
    "meta": (pa.struct([("id", pa.int64()), ("by", pa.struct([("name", pa.string())]))]), None, None),
}
MORE = {"meta/id": Scalar("int64"), "meta/by/name": Text()}


def _row(number):
    values = {name: make(number) for name, (_, make, _) in COLUMNS.items() if make is not None}
    return {**values, "meta": {"id": number, "by": {"name": f"n{number}"}}}


def _table(numbers=range(NUM_ROWS)):
    rows = [_row(number) for number in numbers]
    arrays = {name: [row[name] for row in rows] for name in COLUMNS}
    arrays["counts"] = [list(cell.items()) for cell in arrays["counts"]]
    return pa.table({name: pa.array(arrays[name], kind) for name, (kind, _, _) in COLUMNS.items()})


def _check(data, key):
    """Compare each sample with a plain loop."""
    assert len(data) == NUM_ROWS
    assert {name: feature for name, feature in data.features.items() if name != "key"} == {
        **{name: feature for name, (_, _, feature) in COLUMNS.items() if feature is not None},
        **MORE,
    }
    for number in range(NUM_ROWS):
        sample, row = data[key(number)], _row(number)
        meta = row.pop("meta")
        assert sample["meta"] == meta
        assert encode_png(sample["image"]) == row.pop("image")
        assert sample["when"] == np.datetime64(row.pop("when").replace(tzinfo=None))
        for name, value in row.items():
            found = sample[name].tolist() if isinstance(sample[name], np.ndarray) else sample[name]
            assert found == value, (number, name)


@pytest.fixture
def files(tmp_path):
    """Three Parquet files with row groups of several rows, and a hidden one beside them."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for part in range(3):
        parquet.write_table(_table(range(part * 20, part * 20 + 20)), folder / f"part-{part}.parquet", row_group_size=7)
    (folder / ".part-3.parquet.tmp").write_bytes(b"half of a file")
    return folder


def _read(*arguments, folder, **options):
    """Return the samples of a source by key, each read by a copy of the writer as workers get it."""
    job = Prepared(*arguments, output=folder / "unused", **options)
    rows = list(job.writer.index(job._job.source))
    writer = dill.loads(dill.dumps(job.writer))
    found = {}
    for row in rows:
        columns = writer.features.encode({**writer.read(row), "key": row.key})
        found[row.key] = writer.features.decode(columns)
    assert len(found) == len(rows)
    return Samples(found, writer.features)


class Samples(dict):
    """Samples by key, with their features."""

    def __init__(self, samples, features):
        super().__init__(samples)
        self.features = features


def _ran(*arguments, output, **options):
    report = Prepared(*arguments, output=output, executor=InlineExecutor(), **options).run(progress=False)
    assert verify(output, deep=True).ok
    return report


def test_parquet_files_are_read_row_by_row_group(files, tmp_path):
    """Columns of every type; each row once, under a key that other files do not change."""
    workers = WorkerOptions(num_workers=2)
    Materializer("parquet", files, tmp_path / "out").run(workers=workers, progress=False)

    _check(load(tmp_path / "out"), lambda number: f"part-{number // 20}-{number % 20:08d}")


def test_rows_one_by_one_are_those_of_blocks(files, tmp_path):
    """Encoded to the same bytes."""
    job = Materializer("parquet", files, tmp_path / "out")
    rows = list(job.writer.index(files))
    keys, numbers = [row.key for row in rows], np.arange(NUM_ROWS)[::-1]

    block = job.writer.read_block(keys[::-1], {"number": numbers})

    many = job.writer.features.encode_block({**block, "key": keys[::-1]})
    for place, row in enumerate(rows[::-1]):
        one = job.writer.features.encode({**job.writer.read(row), "key": row.key})
        for name, value in one.items():
            column = many[name]
            found = column.rows()[place] if isinstance(column, RaggedColumn) else column[place]
            assert np.array_equal(np.atleast_1d(np.asarray(found)), np.atleast_1d(np.asarray(value))), name


def _in_file(table, path, new):
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    return path


FORMS = {
    "path": lambda table, path: path,
    "glob": lambda table, path: str(path.parent / "ro*.parquet"),
    "list": lambda table, path: [path],
    "arrow": lambda table, path: _in_file(table, path.with_suffix(".arrow"), pa.ipc.new_file),
    "stream": lambda table, path: _in_file(table, path.with_suffix(".arrow"), pa.ipc.new_stream),
    "views": lambda table, path: _in_file(_with_views(table), path.with_suffix(".arrow"), pa.ipc.new_file),
    "table": lambda table, path: table,
    "reader": lambda table, path: table.to_reader(7),
    "batches": lambda table, path: iter(table.to_batches(max_chunksize=7)),
    "list of batches": lambda table, path: table.to_batches(max_chunksize=7),
    "dataset": lambda table, path: pytest.importorskip("pyarrow.dataset").dataset(path),
    "pandas": lambda table, path: table.to_pandas(types_mapper=pytest.importorskip("pandas").ArrowDtype),
    "polars": lambda table, path: pytest.importorskip("polars").from_arrow(table.drop_columns(["counts"])),
    "lazy": lambda table, path: pytest.importorskip("polars").from_arrow(table.drop_columns(["counts"])).lazy(),
}


def _with_views(table):
    """Return a table whose texts and bytes are views, for which Arrow has no `take`, as those of polars."""
    for name, kind in (("text", pa.string_view()), ("raw", pa.binary_view()), ("tags", pa.list_(pa.string_view()))):
        cells = pa.array(table[name].to_pylist(), kind)
        table = table.set_column(table.column_names.index(name), name, cells)
    return table


@pytest.mark.parametrize("form", FORMS)
def test_table_in_any_form_gives_the_same_rows(form, tmp_path):
    """In files, by pattern, mapped, in memory, lazy, or batch by batch; every column keeps its type."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(_table(), path)

    data = _read("parquet" if form == "list" else None, FORMS[form](_table(), path), folder=tmp_path)

    if "counts" in data.features:
        _check(data, lambda number: f"{number:08d}")
    else:  # polars has no maps
        assert len(data) == NUM_ROWS
        assert [data[f"{n:08d}"]["objects"] for n in range(9)] == [_row(n)["objects"] for n in range(9)]
        assert data.features["pair"] == Tensor((2,), "float64")


def test_only_a_changed_file_has_its_rows_made_again(files, tmp_path):
    """Not one that was touched, or copied elsewhere."""

    def report():
        return _ran("parquet", files, output=tmp_path / "out")

    assert report().num_shards_written == 1
    os.utime(files / "part-1.parquet")
    assert "would rebuild" not in str(Materializer("parquet", files, tmp_path / "out").status())
    table = parquet.read_table(files / "part-1.parquet")
    small = table.column("small").combine_chunks().take(np.arange(20)[::-1])
    parquet.write_table(table.set_column(2, "small", small), files / "part-1.parquet", row_group_size=7)
    assert "file part-1.parquet changed" in str(Materializer("parquet", files, tmp_path / "out").status())
    assert report().num_shards_written == 1
    assert int(load(tmp_path / "out")["part-1-00000000"]["small"]) == 9


def test_columns_are_chosen_renamed_and_dropped(files, tmp_path):
    """A struct means all of its fields."""
    options = {"columns": ["meta", "small"], "rename": {"meta": "info", "small": "n"}, "drop": ["meta/by"]}

    _ran("parquet", files, output=tmp_path / "out", **options)

    data = load(tmp_path / "out")
    assert set(data.features) == {"key", "info/id", "n"}
    assert (int(data["part-2-00000003"]["n"]), int(data["part-2-00000003"]["info"]["id"])) == (13, 43)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"columns": ["smal"]}, "'smal'"),
        ({"drop": "small"}, r"drop=\['small'\]"),
        ({"rename": {"small": "large"}}, "two fields 'large'"),
        ({"columns": ["small"], "drop": ["small"]}, "leave no field"),
        ({"writer": ImportWriter(features={"smal": Text()})}, "features= names 'smal'"),
    ],
)
def test_choice_that_makes_no_sense_is_refused(files, tmp_path, options, word):
    """Before anything is written."""
    with pytest.raises(OptionError, match=word):
        Prepared(options.pop("writer", "parquet"), files, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("column", "word"),
    [
        (pa.array([decimal.Decimal("1.5")] * 2), "'x' is decimal128"),
        (pa.array([datetime.time(12)] * 2), "'x' is time64"),
        (pa.nulls(2), "'x' holds only empty cells"),
        (pa.array([[datetime.time(12)]] * 2), "'x' is list"),
    ],
)
def test_column_that_no_feature_stores_is_refused_at_once(tmp_path, column, word):
    """With its type, and what to write; another declaration or `drop` accepts the rest."""
    table = pa.table({"x": column, "y": [1, 2]})

    with pytest.raises(SourceError, match=word):
        Materializer(table, output=tmp_path / "out")
    assert [int(sample["y"]) for sample in _read(table, folder=tmp_path, drop=["x"]).values()] == [1, 2]


def test_declared_feature_stores_what_the_source_types_otherwise(tmp_path):
    """A decimal as a number or as text; a text as an id; lists of float64 as float32."""
    table = pa.table({"price": [decimal.Decimal("1.50")], "label": ["b"], "vector": [[0.5, 1.0]]})
    features = {"price": Text(), "vector": Tensor((2,), "float32")}

    sample = _read(ImportWriter(features=features), table, folder=tmp_path)["00000000"]
    number = _read(ImportWriter(features={"price": Scalar("float64")}), table, folder=tmp_path)["00000000"]

    assert sample["price"] == "1.50" and sample["vector"].tolist() == [0.5, 1.0]
    assert number["price"] == 1.5


def test_empty_cells_are_stored_where_they_are_declared(tmp_path):
    """Numbers, texts, times, lists; of rows of an iterator, too."""
    table = pa.table(
        {
            "n": pa.array([None, 7], pa.int16()),
            "text": ["a", None],
            "when": pa.array([None, NOON], pa.timestamp("us", "UTC")),
            "vector": pa.array([[0.5, 1.0], None], pa.list_(pa.float32())),
        }
    )
    features = {
        "n": Nullable(Scalar("int16")),
        "text": Nullable(Text()),
        "when": Nullable(Timestamp("UTC")),
        "vector": Nullable(Tensor((None,), "float32")),
    }

    for source in (table, iter(table.to_pylist())):
        first, second = _read(ImportWriter(features=features), source, folder=tmp_path).values()
        assert first["n"] is None and second["n"] == 7
        assert (first["text"], second["text"]) == ("a", None)
        assert first["when"] is None and second["when"] == np.datetime64(NOON.replace(tzinfo=None))
        assert first["vector"].tolist() == [0.5, 1.0] and second["vector"] is None


def test_list_of_paths_without_a_kind_is_refused(tmp_path):
    """Nobody wants the paths as texts; a list of texts is a dataset of texts."""
    paths = [tmp_path / f"{number}.txt" for number in range(5)]
    for path in paths:
        path.write_text("one")

    for listed in (paths, list(map(str, paths))):
        with pytest.raises(OptionError, match="paths of files"):
            Materializer(listed, None, tmp_path / "out")
    assert _ran(["0.txt", "is missing"], output=tmp_path / "out").num_records == 2


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    """By the names of the column and of both files."""
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"x": ["1"]}), tmp_path / "b.parquet")

    with pytest.raises(SourceError, match=r"b\.parquet: column 'x' is string, but int64 in .*a\.parquet"):
        Materializer("parquet", tmp_path, tmp_path / "out")


def test_columns_that_nothing_holds_in_all_files_can_be_left_out(tmp_path):
    """Numbers in one file and structs in another: refused by name, unless they are dropped or not declared."""
    for number, value in enumerate([1, {"a": 1}]):
        parquet.write_table(pa.table({"n": [number], "x": [value]}), tmp_path / f"{number}.parquet")

    with pytest.raises(SourceError, match=r"1\.parquet: column 'x' is struct.*drop=\['x'\]"):
        Materializer("parquet", tmp_path, tmp_path / "out")
    with pytest.raises(SourceError, match=r"1\.parquet: column 'x' is struct.*give all files the same type"):
        Materializer("table", tmp_path, tmp_path / "out")
    for writer in (ImportWriter(drop=["x"]), TableWriter(features={"n": Scalar("int64")})):
        writer.bind(tmp_path)
        assert [writer.read(row) for row in writer.index(tmp_path)] == [{"n": 0}, {"n": 1}]
    writer = TableWriter(features={"x": Json()})
    writer.bind(tmp_path)
    with pytest.raises(SourceError, match=r"1\.parquet: column 'x' is struct.*cannot become int64"):
        list(writer.index(tmp_path))


@pytest.mark.parametrize("name", ["rows.xyz", "rows"])
def test_file_whose_name_does_not_say_what_it_holds_needs_a_kind(tmp_path, name):
    parquet.write_table(pa.table({"x": [1]}), tmp_path / name)

    with pytest.raises(SourceError, match="name the kind"):
        Materializer(source=tmp_path / name, output=tmp_path / "out")
    assert len(_read("parquet", tmp_path / name, folder=tmp_path)) == 1


@pytest.mark.parametrize(
    ("kind", "source", "word"),
    [
        ("webdataset", "*.tar", "no file matches"),
        ("parquet", "none.parquet", r"none\.parquet does not exist"),
        ("torch", "a.parquet", "'torch' reads objects"),
        ("files", "empty", "empty holds no files"),
        ("webdataset", "texts", r"\.tar"),
        ("parquet", pa.table({"x": [1]}), "'parquet' reads files"),
    ],
)
def test_source_that_is_not_of_its_kind_is_refused(tmp_path, kind, source, word):
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()

    with pytest.raises(SourceError, match=word):
        Materializer(kind, str(tmp_path / source) if isinstance(source, str) else source, tmp_path / "out")


def test_output_is_asked_for():
    with pytest.raises(OptionError, match="output"):
        Materializer(pa.table({"x": [1]}))


def test_row_without_a_key_is_named(tmp_path):
    """It would get the key of its place, which may be that of another."""
    table = pa.table({"key": ["a", None], "x": [1, 2]})

    with pytest.raises(SourceError, match="row 1, column 'key' of the table is empty; fill it in, or drop the row"):
        Materializer(table, output=tmp_path / "out").plan()


def test_index_is_no_source():
    """Its rows would be taken for samples."""
    with pytest.raises(SourceError, match=r"the source is an Index: .* materialize\(function, index, \.\.\.\)"):
        ImportWriter().bind(Index.from_rows([IndexRow("a"), IndexRow("b")]))


def test_splits_come_from_the_names_of_files(tmp_path):
    """Of folders, too; where some files have none, none has."""
    for name in ("train-00000", "train-00001", "test-00000"):
        parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / f"{name}-of-00002.parquet")

    _ran(source=tmp_path, output=tmp_path / "out")

    assert len(load(tmp_path / "out", "train")) == 4 and len(load(tmp_path / "out", "test")) == 2


# ---------------------------------------------------------------- iterators


def _rows(count, start=0):
    for number in range(start, count):
        yield {
            "image": np.full((3, 4, 3), number, np.uint8),
            "n": number,
            "words": ["a"] * number,
            "half": np.float16(number),
        }


class Resumable:
    """An iterable that says how to continue, and counts what it was asked for."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at, self.place, self.given = count, fails_at, 0, 0

    def __iter__(self):
        for number in range(self.place, self.count):
            if number == self.fails_at:
                raise ConnectionError("the line is down")
            self.place, self.given = number + 1, self.given + 1
            yield {"n": number}

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("make", [lambda: _rows(20), lambda: lambda: _rows(20)], ids=["generator", "function"])
def test_rows_of_an_iterator_wait_in_a_temporary_folder(tmp_path, make, monkeypatch):
    """Workers read them there; the folder is gone afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = Prepared(make(), output=tmp_path / "out", workers=WorkerOptions(num_workers=2))

    report = job.run(progress=False)

    data = load(tmp_path / "out")
    assert report.num_records == len(data) == 20
    assert data.features["image"] == Image() and data.features["half"] == Scalar("float16")
    for number in range(20):
        sample = data[f"{number:08d}"]
        assert (sample["image"] == number).all() and (sample["n"], sample["half"]) == (number, number)
        assert sample["words"] == ["a"] * number
    assert list(tmp_path.glob("datamat-rows-*"))
    del job
    assert not list(tmp_path.glob("datamat-rows-*"))


def test_iterator_that_begins_again_when_it_is_asked_for_gives_each_row_once(tmp_path):
    """As the streaming dataset of litdata does: it is its own iterator."""

    class Restarting:
        def __iter__(self):
            self.rows = iter(range(5))
            return self

        def __next__(self):
            return {"n": next(self.rows)}

    found = _read(Restarting(), folder=tmp_path)

    assert [int(sample["n"]) for sample in found.values()] == list(range(5))


def _of_tars(*, is_decoded, count=5):
    """Yield samples as objects of WebDataset give them, whose archives repeat keys from the fourth on."""
    for number in range(count):
        info = {"id": number, f"only_{number}": [number]}
        yield {
            "__key__": f"a/{number % 4}",
            "__url__": f"/data/{number // 4:03d}.tar",
            "__local_path__": f"/scratch/{number // 4:03d}.tar",
            "png": PICTURES[number],
            "cls": number if is_decoded else b"%d" % number,
            "json": info if is_decoded else json.dumps(info).encode(),
            "txt": f"größer {number}" if is_decoded else f"größer {number}".encode(),
            "bin": b"\0%d" % number,
        }


@pytest.mark.parametrize(("form", "is_decoded"), [(list, False), (iter, True), (iter, False)])
def test_samples_of_webdataset_are_those_of_their_tars(tmp_path, form, is_decoded):
    """Their keys are those of the samples; where they lie is no field; JSON may differ from sample to sample."""
    samples = _read(form(list(_of_tars(is_decoded=is_decoded, count=4))), folder=tmp_path)

    assert list(samples) == ["a-0", "a-1", "a-2", "a-3"]
    for number, sample in enumerate(samples.values()):
        assert sample.keys() - {"key", "split"} == {"png", "cls", "json", "txt", "bin"}
        assert sample["json"] == {"id": number, f"only_{number}": [number]}
        assert (sample["cls"], sample["txt"], sample["bin"]) == (number, f"größer {number}", b"\0%d" % number)


def test_keys_of_webdataset_that_archives_repeat_get_their_names(tmp_path):
    """As where the tars themselves are the source."""
    samples = _read(_of_tars(is_decoded=True), folder=tmp_path)

    assert list(samples) == ["000-a-0", "000-a-1", "000-a-2", "000-a-3", "001-a-0"]


def test_declared_features_decide_what_a_sample_of_webdataset_may_lack(tmp_path):
    """And which members keep their bytes."""
    rows = list(_of_tars(is_decoded=False, count=3))
    del rows[1]["txt"]
    writer = ImportWriter(features={"txt": Nullable(Text()), "json": Bytes()}, drop=["png"])

    samples = list(_read(writer, iter(rows), folder=tmp_path).values())

    assert [sample["txt"] for sample in samples] == ["größer 0", None, "größer 2"]
    assert samples[2]["json"] == rows[2]["json"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            lambda: itertools.cycle(_of_tars(is_decoded=True)),
            "resampled=True",
        ),
        (lambda: iter([{"__key__": ["a", "b"], "txt": ["x", "y"]}]), "a batch of 2 samples"),
        (lambda: iter([{"__key__": "a", "xyz": b"x"}]), "'xyz'"),
    ],
)
def test_samples_of_webdataset_that_are_no_set_are_refused(tmp_path, rows, message):
    """Also one without end, which would fill the disk."""
    with pytest.raises(SourceError, match=message):
        _read(rows(), folder=tmp_path)


def test_table_that_was_made_of_tars_has_their_keys(tmp_path):
    """As Hugging Face's builder `webdataset` makes it."""
    rows = [{name: row[name] for name in ("__key__", "__url__", "txt")} for row in _of_tars(is_decoded=True)]
    whole, some = pa.Table.from_pylist(rows), pa.Table.from_pylist(rows[:4])

    assert list(_read(whole, folder=tmp_path)) == ["000-a-0", "000-a-1", "000-a-2", "000-a-3", "001-a-0"]
    assert list(_read(some, folder=tmp_path, columns=["txt"])) == ["a-0", "a-1", "a-2", "a-3"]
    assert all(sample.keys() == {"key", "txt"} for sample in _read(some, folder=tmp_path).values())


def test_dicts_in_tuples_of_an_iterator_stay_dicts(tmp_path):
    """As data sets of detection give targets: a picture, and a dict of arrays."""
    rows = [
        (np.full((4, 5, 3), number, np.uint8), {"boxes": np.ones((number, 4), np.float32), "id": number})
        for number in range(3)
    ]

    samples = _read(ImportWriter(names=("image", "target")), iter(rows), folder=tmp_path)

    for number, sample in enumerate(samples.values()):
        assert sample["image"].max() == number and sample["target"]["id"] == number
        assert sample["target"]["boxes"].shape == (number, 4)


def test_one_more_row_concerns_its_shard_alone(tmp_path):
    """Each row has a digest of its own."""
    options = {"output": tmp_path / "out", "shards": ShardOptions(num_shards=4)}

    assert _ran(_rows(40), **options).num_shards_written == 4
    assert _ran(_rows(41), **options).num_shards_reused == 3


def test_samples_of_webdataset_are_the_same_after_an_interruption(tmp_path, monkeypatch):
    """A source that goes on from row 2 shows its fields no more: dicts of JSON stay whole."""
    monkeypatch.setattr("datamat.writers.spool._SAVE_S", 0)  # saves after each row

    def rows(start=0, fails_at=None):
        for number in range(start, 4):
            if number == fails_at:
                raise ConnectionError("the line is down")
            yield {"__key__": f"{number}", "json": {"n": {"is": number}}}

    with pytest.raises(ConnectionError):
        Materializer(ImportWriter(spool=tmp_path / "rows"), lambda start=0: rows(start, 2), tmp_path / "out").plan()

    _ran(ImportWriter(spool=tmp_path / "rows"), rows, output=tmp_path / "out")

    found = load(tmp_path / "out")
    assert [found[str(number)]["json"] for number in range(4)] == [{"n": {"is": number}} for number in range(4)]


@pytest.mark.parametrize("kind", ["state", "start"])
def test_interrupted_source_continues_where_it_says_how(tmp_path, kind, monkeypatch):
    """Rows that lie in the named folder are not asked for again, and none is lost or doubled."""
    monkeypatch.setattr("datamat.writers.spool._SAVE_S", 0)  # saves after each row
    asked = []

    def rows(start=0, fails_at=10):
        for number in range(start, 15):
            if number == fails_at:
                raise ConnectionError("the line is down")
            asked.append(number)
            yield {"n": number}

    first = Resumable(15, fails_at=10) if kind == "state" else rows
    again = Resumable(15) if kind == "state" else lambda start: rows(start, None)
    with pytest.raises(ConnectionError):
        Materializer(ImportWriter(spool=tmp_path / "rows"), first, tmp_path / "out").plan()
    with open(tmp_path / "rows" / "rows.arrow", "ab") as file:
        file.write(b"half of a row")
    assert len(asked) == (10 if kind == "start" else 0)

    _ran(ImportWriter(spool=tmp_path / "rows"), again, output=tmp_path / "out")

    assert sorted(int(sample["n"]) for sample in load(tmp_path / "out")) == list(range(15))
    assert asked == list(range(15)) if kind == "start" else again.given == 5
    finished = Resumable(15, fails_at=0)
    _ran(ImportWriter(spool=tmp_path / "rows"), finished, output=tmp_path / "out")
    assert finished.given == 0
    with pytest.raises(SourceError, match="remove the folder"):
        Materializer(ImportWriter(spool=tmp_path / "rows", features={"n": Scalar("int32")}), finished, "out").plan()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}, {"x": object()}], "row 1: field 'x' holds an object"),
        ([{"x": object()}], "first sample: field 'x' holds an object"),
    ],
)
def test_row_that_cannot_be_kept_is_refused_by_the_plan(tmp_path, rows, message):
    """With its number and field."""
    with pytest.raises(SourceError, match=message):
        Materializer(iter(rows), output=tmp_path / "out").plan()


@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize("odd", [{"x": "a"}, {"x": None}, {"y": 1}, {"x": 1, "y": 1}])
def test_row_that_does_not_fit_fails_alone(tmp_path, form, odd):
    """One of an iterator as one of a list: under its own key, as `errors=` says."""
    report = _ran(form([{"x": 1}, odd, {"x": 3}]), output=tmp_path / "out", errors="skip")

    assert [failure.key for failure in report.failures] == ["00000001"]
    assert sorted(int(sample["x"]) for sample in load(tmp_path / "out")) == [1, 3]


def test_damage_of_spooled_rows_is_found(tmp_path):
    """Each has a checksum."""
    writer = ImportWriter(spool=tmp_path / "rows")
    job = Prepared(writer, _rows(3), tmp_path / "out", executor=InlineExecutor())
    job.plan()
    path = tmp_path / "rows" / "rows.arrow"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)

    with pytest.raises(SampleError, match=r"row 2 is damaged.*remove the folder"):
        job.run(progress=False)
    (tmp_path / "rows" / "state.json").write_text("{")
    with pytest.raises(SourceError, match=r"state\.json is damaged"):
        Materializer(ImportWriter(spool=tmp_path / "rows"), _rows(3), tmp_path / "out")


def test_damaged_row_group_is_reported_with_its_file(files, tmp_path):
    """The samples of other row groups are intact."""
    path = files / "part-1.parquet"
    data = bytearray(path.read_bytes())
    data[200:260] = bytes(60)
    path.write_bytes(data)

    with pytest.raises((SampleError, CorruptDataError), match=r"part-1\.parquet: row group \d cannot be read"):
        _ran("parquet", files, output=tmp_path / "out")


# ---------------------------------------------------------------- as strangers have them


@pytest.mark.parametrize("form", ["parquet", "table", "list", "generator"])
def test_dicts_stay_dicts(tmp_path, form):
    """At any depth, with lists in them, in each form of the same rows; a rerun has nothing to do."""
    rows = [
        {
            "n": n,
            "a": {"b": {"c": f"c{n}", "d": [0.5] * (n % 3)}, "e": n / 2},
            "objects": [{"x": n, "y": None}] * (n % 2),
        }
        for n in range(9)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")

    def source():
        return {
            "parquet": tmp_path / "rows.parquet",
            "table": pa.Table.from_pylist(rows),
            "list": rows,
            "generator": (row for row in rows),
        }[form]

    _ran(ImportWriter(), source(), output=tmp_path / "out")

    data = load(tmp_path / "out")
    assert data.features.dicts.keys() == {"a", "a/b"}
    for number, row in enumerate(rows):
        sample = data[f"{number:08d}"]
        assert (sample["n"], sample["objects"]) == (number, row["objects"])
        assert {**sample["a"], "b": {**sample["a"]["b"], "d": list(map(float, sample["a"]["b"]["d"]))}} == row["a"]
    assert _ran(ImportWriter(), source(), output=tmp_path / "out").num_shards_written == 0


def test_dicts_are_chosen_and_renamed_as_a_whole_or_by_field(tmp_path):
    """A field that is renamed leaves its dict; one called `key` would be the sample's, so that its dict is flat."""
    rows = [{"a": {"b": n, "c": {"d": n}}, "k": {"key": f"k{n}", "z": n}, "x/y": n} for n in range(3)]

    def sample(**options):
        return _read(rows, folder=tmp_path, **options)["00000002"]

    assert sample() == {"key": "00000002", "a": {"b": 2, "c": {"d": 2}}, "k/key": "k2", "k/z": 2, "x/y": 2}
    assert sample(columns=["a"], rename={"a": "new"}) == {"key": "00000002", "new": {"b": 2, "c": {"d": 2}}}
    assert sample(columns=["a"], rename={"a/c": "new"}) == {"key": "00000002", "a": {"b": 2}, "new": {"d": 2}}
    assert sample(columns=["a/c/d", "a/b"], rename={"a/c/d": "e"}) == {"key": "00000002", "e": 2, "a": {"b": 2}}
    assert sample(drop=["a/b", "k"], rename={"x/y": "x"}) == {"key": "00000002", "a": {"c": {"d": 2}}, "x": 2}


def test_spool_that_is_kept_knows_its_dicts(tmp_path):
    """Where its rows are not asked for again."""
    for _ in range(2):
        found = _read(ImportWriter(spool=tmp_path / "rows"), ({"a": {"b": n}} for n in range(3)), folder=tmp_path)
        assert [int(sample["a"]["b"]) for sample in found.values()] == [0, 1, 2]


def test_dicts_of_a_finished_data_set_stay_dicts(tmp_path):
    """Also lists of dicts, which samples have as dicts of lists."""
    rows = [{"a": {"b": n}, "objects": [{"x": n}] * n} for n in range(3)]
    _ran(ImportWriter(features={"objects": ListOf({"x": Scalar("int64")})}), rows, output=tmp_path / "one")

    _ran(tmp_path / "one", output=tmp_path / "two")

    for sample in load(tmp_path / "two"):
        number = int(sample["a"]["b"])
        assert sample["objects"]["x"].tolist() == [number] * number


def _noted(table, **features):
    """Return a table with Hugging Face's note about its columns."""
    note = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": note})


@pytest.mark.parametrize("depth", [8, 16])
def test_list_of_encoded_files_is_a_sequence(tmp_path, depth):
    """By Hugging Face's note; the first pictures show how deep they are."""
    pixels = [np.full((2, 3, 3), number, f"uint{depth}") for number in range(3)]
    cell = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    (tmp_path / "file.png").write_bytes(encode_png(pixels[2]))
    rows = [
        [{"bytes": encode_png(pixels[0]), "path": None}, {"bytes": None, "path": str(tmp_path / "file.png")}],
        [],
    ]
    table = _noted(
        pa.table({"pictures": pa.array(rows, cell)}), pictures={"_type": "List", "feature": {"_type": "Image"}}
    )
    parquet.write_table(table, tmp_path / "rows.parquet")

    _ran("parquet", tmp_path / "rows.parquet", output=tmp_path / "out")

    data = load(tmp_path / "out")
    assert data.features["pictures"] == ListOf(Image(dtype=f"uint{depth}"))
    first, second = (data[f"{number:08d}"]["pictures"] for number in range(2))
    assert [found.tolist() for found in first] == [pixels[0].tolist(), pixels[2].tolist()] and not len(second)


def _crops(form, depth=8):
    """A table of lists of dicts that hold pictures, as Hugging Face stores them, and as it did before 4.0."""
    file = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    crops = [
        [
            {"image": {"bytes": encode_png(np.full((2, 3 + k, 3), n, f"uint{depth}")), "path": None}, "label": k % 2}
            for k in range(1 + n % 3)
        ]
        for n in range(6)
    ]
    crops[3] = []
    noted = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["car", "bus"]}}
    kind = pa.list_(pa.struct([("image", file), ("label", pa.int64())]))
    if form == "Sequence":
        kind = pa.struct([("image", pa.list_(file)), ("label", pa.list_(pa.int64()))])
        crops = [{name: [crop[name] for crop in row] for name in noted} for row in crops]
    table = pa.table({"crops": pa.array(crops, kind), "n": range(6)})
    return _noted(table, crops={"_type": form, "feature": noted}, n={"_type": "Value", "dtype": "int64"})


def _check_crops(folder, names, depth=8):
    data = load(folder)
    assert len(data) == 6 and verify(folder).ok
    assert data.features["crops/image"] == ListOf(Image(dtype=f"uint{depth}"))
    kinds = [ListOf(ClassLabel(names)), ClassLabel(names, shape=(None,))] if names else [ListOf(Scalar("int64"))]
    assert data.features["crops/label"] in kinds
    for sample in data:
        number, crops = int(sample["n"]), sample["crops"]
        count = 0 if number == 3 else 1 + number % 3
        assert [(crop.shape, int(crop.min()), int(crop.max())) for crop in crops["image"]] == [
            ((2, 3 + k, 3), number, number) for k in range(count)
        ]
        assert list(crops["label"]) == [k % 2 for k in range(count)]


@pytest.mark.parametrize(("form", "depth"), [("List", 8), ("Sequence", 8), ("List", 16)])
def test_lists_of_dicts_with_pictures_are_sequences(tmp_path, form, depth):
    """By Hugging Face's note, beside labels; a row may have none; the first pictures show how deep they are."""
    parquet.write_table(_crops(form, depth), tmp_path / "rows.parquet")

    _ran("parquet", tmp_path / "rows.parquet", output=tmp_path / "out")

    _check_crops(tmp_path / "out", ("car", "bus"), depth)


def test_lists_of_dicts_with_files_that_nobody_noted_are_refused_with_what_declares_them(tmp_path):
    """The declaration that the message gives is one that works."""
    table = _crops("List").replace_schema_metadata(None)
    declared = r"ListOf\(\{'image': Image\(\), 'label': Scalar\('int64'\)\}\)"

    with pytest.raises(SourceError, match=declared):
        Materializer(table, output=tmp_path / "out")

    writer = ImportWriter(features={"crops": ListOf({"image": Image(), "label": Scalar("int64")})})
    _ran(writer, table, output=tmp_path / "out")
    _check_crops(tmp_path / "out", ())


def test_lists_of_files_that_nobody_noted_may_be_declared(tmp_path):
    """Files of Hugging Face's form, content or path."""
    (tmp_path / "a.png").write_bytes(PICTURES[1])
    rows = [[{"bytes": PICTURES[0], "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}], []]
    cell = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))

    _ran(
        ImportWriter(features={"pictures": ListOf(Image())}),
        pa.table({"pictures": pa.array(rows, cell)}),
        output=tmp_path / "out",
    )

    assert [len(sample["pictures"]) for sample in load(tmp_path / "out")] in ([2, 0], [0, 2])


def test_empty_file_in_a_list_of_dicts_is_named(tmp_path):
    """With its row and place."""
    table = _crops("List")
    rows = table.to_pylist()
    rows[2]["crops"][1]["image"] = None
    table = pa.Table.from_pylist(rows, schema=table.schema)

    with pytest.raises(SampleError, match=r"'00000002'.* 'crops/image' .* item 1 of the sample is None"):
        _ran(table, output=tmp_path / "out")


def _jpeg(number):
    return cv2.imencode(".jpg", _pixels(number))[1].tobytes()


def _pillow(number):
    return Pillow.fromarray(np.full((3 + number % 2, 5, 3), number, np.uint8))


def _pixels(number, dtype=np.uint8):
    return np.full((2, 3 + number % 3, 3), number, dtype)


LISTS = {
    "pillow": (
        lambda n: [{"image": _pillow(n + k), "at": {"x": k, "y": n / 2}} for k in range((1, 0, 2)[n % 3])],
        ListOf({"image": Image(), "at": {"x": Scalar("int64"), "y": Scalar("float64")}}),
    ),
    "encoded": (
        lambda n: [{"image": (_jpeg, PICTURES.__getitem__)[k % 2](n), "label": "ab"[k]} for k in range(2 - n % 2)],
        ListOf({"image": Image(), "label": ClassLabel(("a", "b"))}),
    ),
    "arrays": (
        lambda n: [{"image": _pixels(n), "half": np.full(n, np.nan, np.float16)} for _ in range(1 + n % 2)],
        ListOf({"image": Image(), "half": Tensor((None,), "float16")}),
    ),
    "bytes": (lambda n: [{"raw": b"\0%d" % n, "when": NOON}], ListOf({"raw": Bytes(), "when": Timestamp("UTC")})),
    "pictures": (lambda n: [_pillow(n + k) for k in range(1 + n % 3)], ListOf(Image())),
    "lists": (lambda n: [_pixels(n + k) for k in range(1 + n % 3)], ListOf(Image())),
}


def _lists(name, count=12):
    return [{"x": LISTS[name][0](number), "n": number} for number in range(count)]


def _plain_value(value):
    """Return a value in types that `==` compares, arrays with their dtype."""
    if isinstance(value, dict):
        return {name: _plain_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.mark.parametrize(
    ("name", "declared"),
    [*((name, True) for name in LISTS), *((name, False) for name in ("pillow", "arrays", "pictures"))],
)
def test_lists_with_files_come_from_streams_as_from_lists(tmp_path, name, declared):
    """Each value of each row: dicts with Pillow's pictures, encoded ones, arrays, bytes, times, and plain lists."""
    features = {"x": LISTS[name][1]} if declared else {}
    rows = _lists(name)

    found = [_read(ImportWriter(features=features), source, folder=tmp_path) for source in (rows, iter(rows))]

    assert found[0].features == found[1].features and found[0].keys() == found[1].keys()
    assert _plain_value(found[0]) == _plain_value(found[1])
    assert [int(sample["n"]) for sample in found[1].values()] == list(range(len(rows)))


@pytest.mark.parametrize(("form", "declared"), [("list", True), ("iterator", False)])
def test_list_of_dicts_with_pictures_lies_in_a_dict(tmp_path, form, declared):
    """Which is no field of its own; each value comes back in its place."""
    rows = [{"page": {"crops": {"all": [{"image": _pillow(n), "at": {"x": n}}] * (n + 1)}, "n": n}} for n in range(4)]
    listed = ListOf({"image": Image(), "at": {"x": Scalar("int64")}} if declared else {"image": Image()})
    features = {"page": {"crops": {"all": listed}, "n": Scalar("int64")}} if declared else {}

    _ran(ImportWriter(features=features), iter(rows) if form == "iterator" else rows, output=tmp_path / "out")

    for number, key in enumerate(f"{number:08d}" for number in range(4)):
        crops = load(tmp_path / "out")[key]["page"]["crops"]["all"]
        assert all(np.array_equal(found, np.asarray(_pillow(number))) for found in crops["image"])
        assert len(crops["image"]) == number + 1
        assert list(crops["at"]["x"] if declared else (at["x"] for at in crops["at"])) == [number] * (number + 1)


def test_streamed_encoded_pictures_in_dicts_keep_their_bytes(tmp_path):
    """They are not decoded and encoded again on their way."""
    writer = ImportWriter(features={"x": LISTS["encoded"][1]})
    job = Materializer(writer, iter(_lists("encoded")), tmp_path / "out")

    found = [job.writer.read(row)["x"] for row in job.writer.index(None)]

    assert found == [row["x"] for row in _lists("encoded")]


def test_values_are_kept_as_they_are():
    """Of every type, however nested; arrays may be written to."""
    value = {
        "tuple": (1, -(2**70), True, None, "größer \ud800", b"\0\xff", 0.1, float("inf"), -0.0),
        3: [np.float32(0.1), np.bool_(True), np.int64(-5), np.str_("é"), np.datetime64("2026-11-24T05", "us")],
        "arrays": [
            np.array(5), np.zeros((0, 3), ">f4"), np.array(["ab", "c"]), np.array([1 + 2j]),
            np.asfortranarray(np.arange(6, dtype=np.uint16).reshape(2, 3)), np.array(["2026"], "M8[D]"),
            np.array([b"a", "b", None], object),
        ],
        "times": [NOON, NOON.date(), decimal.Decimal("1.10"), pathlib.PurePosixPath("a/b")],
        "float": float("nan"), "empty": [[], (), {}, "", b""],
    }  # fmt: skip

    found = unpacked(*packed({"x": value}))["x"]

    assert repr(found.pop("float")) == "nan"
    assert [str(item) for item in found["times"]] == [str(item) for item in value["times"]]
    assert found["times"][:3] == value["times"][:3]
    assert all(type(one) is type(two) for one, two in zip(found[3], value[3], strict=True)) and found[3] == value[3]
    assert isinstance(found["tuple"], tuple) and repr(found["tuple"]) == repr(value["tuple"])
    for one, two in zip(found["arrays"], value["arrays"], strict=True):
        assert one.dtype == two.dtype and one.shape == two.shape and one.tolist() == two.tolist()
    found["arrays"][4][0, 0] = 9
    assert found["empty"] == [[], (), {}, "", b""]


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, "'x' holds a set"),
        ([{"a": (0, {1})}], r"a set at \[0\]\['a'\]\[1\]"),
        (np.zeros(1, [("a", "u1")]), "'x' holds an array of"),
        (CIRCLE, "'x' is nested too deep"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_place(value, message):
    """Nothing is pickled."""
    with pytest.raises(SchemaError, match=message):
        packed({"x": value})


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import datamat.writers.spool
from datamat import Materializer
from datamat.writers.dataset import ImportWriter
from writers.test_sources import LISTS, _lists
datamat.writers.spool._SAVE_S = 0

def rows(start=0):
    for row in _lists("encoded")[start:]:
        if row["n"] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        yield row

Materializer(ImportWriter(features={{"x": LISTS["encoded"][1]}}, spool={spool!r}), rows, {out!r}).run(progress=False)
"""


@pytest.mark.long  # an interpreter of its own; interrupted sources go on in the test above as well
def test_killed_stream_of_pictures_in_dicts_goes_on(tmp_path):
    """Rows that lie on the disk are not asked for again; all are there, as they were."""
    script = KILLED.format(
        tests=str(pathlib.Path(__file__).parents[1]), spool=str(tmp_path / "rows"), out=str(tmp_path / "out")
    )
    process = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    asked = []

    def rows(start):
        for row in _lists("encoded")[start:]:
            asked.append(row["n"])
            yield row

    writer = ImportWriter(features={"x": LISTS["encoded"][1]}, spool=tmp_path / "rows")
    _ran(writer, rows, output=tmp_path / "out")
    _ran(ImportWriter(features={"x": LISTS["encoded"][1]}), _lists("encoded"), output=tmp_path / "whole")

    assert asked == [7, 8, 9, 10, 11]
    found, wanted = load(tmp_path / "out"), load(tmp_path / "whole")
    assert _plain_value(list(found)) == _plain_value(list(wanted)) and len(found) == 12


def test_folders_of_hive_give_their_columns(tmp_path):
    """As `pyarrow.dataset`, Spark and polars lay tables out: integers, text with escapes, empty cells."""
    table = pa.table(
        {
            "n": range(30),
            "year": [2025 + number % 2 for number in range(30)],
            "city": [["Köln/Rh", "a b", None][number % 3] for number in range(30)],
        }
    )
    parquet.write_to_dataset(table, tmp_path / "hive", partition_cols=["year", "city"])
    writer = ImportWriter(kind="parquet", features={"city": Nullable(Text())})

    for source in (tmp_path / "hive", tmp_path / "hive" / "*" / "*" / "*.parquet"):
        samples = _read(writer, source, folder=tmp_path)

        found = sorted((int(one["n"]), int(one["year"]), one["city"]) for one in samples.values())
        assert found == [tuple(row.values()) for row in table.to_pylist()]
    assert samples.features["year"] == Scalar("int64")
    chosen = _read("parquet", tmp_path / "hive", folder=tmp_path, columns=["year"])
    assert sorted(one["year"] for one in chosen.values()) == sorted(table["year"].to_pylist())


def test_folders_of_hive_that_do_not_fit_together_are_refused(tmp_path):
    """A file beside the folders would have no value in their columns."""
    for name in ("year=2026/a.parquet", "b.parquet"):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"n": [1]}), tmp_path / "rows" / name)

    with pytest.raises(SourceError, match=r"year=2026/a.parquet lies in folders .*\(year\).*lay all files out alike"):
        Materializer("parquet", tmp_path / "rows", tmp_path / "out")


@pytest.mark.parametrize("form", ["list", "columns", "stream"])
def test_keys_and_splits_of_items_count(tmp_path, form):
    """As those of tables do; keys with slashes are made safe."""
    rows = [{"key": f"a/{number}", "split": "val" if number % 3 else "train", "v": number} for number in range(9)]
    source = {
        "list": rows,
        "columns": {name: np.array([row[name] for row in rows]) for name in rows[0]},
        "stream": iter(rows),
    }[form]

    _ran(source, output=tmp_path / "out")

    data = load(tmp_path / "out")
    assert {sample["key"]: int(sample["v"]) for sample in data} == {f"a%2F{number}": number for number in range(9)}
    assert len(load(tmp_path / "out", "train")) == 3 and sorted(data.features) == ["key", "v"]


def test_field_named_key_of_a_dataset_is_not_lost(tmp_path):
    """Keys of a map-style dataset are its positions, so a field of that name needs a word of its user."""

    class Numbers:
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return {"key": f"n{number}", "v": number}

    with pytest.raises(SourceError, match=r"ImportWriter\(key="):
        Materializer(Numbers(), output=tmp_path / "out")

    assert sorted(_read(ImportWriter(key="key"), Numbers(), folder=tmp_path)) == ["n0", "n1", "n2", "n3"]
    renamed = _read(Numbers(), folder=tmp_path, rename={"key": "id"})
    assert renamed["00000002"] == {"key": "00000002", "id": "n2", "v": 2}
    assert _read(Numbers(), folder=tmp_path, drop=["key"])["00000002"] == {"key": "00000002", "v": 2}


@pytest.mark.parametrize("form", ["table", "list", "stream"])
def test_field_renamed_to_key_holds_the_keys(tmp_path, form):
    """The values were dropped, and positions became the keys."""
    rows = [{"id": f"n{number}", "v": number} for number in range(5)]
    source = {"table": pa.Table.from_pylist(rows), "list": rows, "stream": iter(rows)}[form]

    samples = _read(source, folder=tmp_path, rename={"id": "key"})

    assert {key: dict(sample) for key, sample in samples.items()} == {
        f"n{number}": {"key": f"n{number}", "v": number} for number in range(5)
    }


def test_columns_may_name_the_key(tmp_path):
    """It is always there; leaving it out or calling it otherwise is refused with the reason."""
    table = pa.table({"key": ["a", "b"], "v": [1, 2], "w": [3, 4]})

    assert _read(table, folder=tmp_path, columns=["key", "v"])["b"] == {"key": "b", "v": 2}
    with pytest.raises(OptionError, match="drop= names 'key'"):
        Prepared(table, output=tmp_path / "out", drop=["key"])
    with pytest.raises(OptionError, match="no field"):
        Materializer(pa.table({"key": ["a"]}), output=tmp_path / "out")


def test_dict_of_lists_is_not_taken_for_splits(tmp_path):
    """Two columns became two splits."""
    with pytest.raises(SourceError, match=r"dict of lists \(height; width\).*pass pyarrow.table\(source\)"):
        Materializer({"height": [1, 2], "width": [3, 4]}, output=tmp_path / "out")


@pytest.mark.parametrize("form", ["list", "stream"])
def test_list_without_items_does_not_decide_what_the_others_hold(tmp_path, form):
    """Boxes of a street without any: the arrays of the next row were written as JSON, or refused."""
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    rows = [
        {"n": number, "ids": [number] * number, "objects": [{"crop": picture, "label": "car"}] * number, "none": []}
        for number in range(4)
    ]

    samples = _read(iter(rows) if form == "stream" else rows, folder=tmp_path)

    assert samples.features["ids"] == Tensor((None,), "int64") and samples.features["none"] == Json()
    assert samples.features["objects/crop"] == ListOf(Image())
    for number, sample in enumerate(samples.values()):
        assert (sample["n"], sample["ids"].tolist(), sample["none"]) == (number, [number] * number, [])
        assert sample["objects"]["label"] == ["car"] * number
        assert np.array_equal(sample["objects"]["crop"], [picture] * number)


@pytest.mark.parametrize(("later", "make"), [([1, 2], list), ([0], iter), ([[1, 2], [3, 4]], iter)])
def test_lists_that_begin_empty_get_the_type_of_later_ones(tmp_path, later, make):
    """One number, several, or rows of them, in a list of samples as from an iterator."""
    rows = [{"x": value} for value in ([], [], later, [])]

    _ran(source=make(rows), output=tmp_path / "out")

    found = load(tmp_path / "out")
    assert found.features["x"] == Tensor((None,) * np.ndim(later), "int64")
    assert [sample["x"].tolist() for sample in found.select([0, 1, 2, 3])].count(later) == 1


def test_row_that_cannot_be_looked_at_is_named_by_the_run(tmp_path):
    """The row behind one with an empty list: nothing fails before its turn."""

    class Rows:
        def __len__(self):
            return 3

        def __getitem__(self, number):
            if number == 1:
                raise ValueError("broken")
            return {"ids": [number] * number}

    report = _ran(source=Rows(), output=tmp_path / "out", errors="skip")

    assert (report.num_records, report.num_failed) == (2, 1)


@pytest.mark.parametrize("form", ["table", "list", "stream"])
def test_dates_and_lists_of_times_are_timestamps(tmp_path, form):
    """From tables, and from rows of Python."""
    day, moment = datetime.date(2026, 11, 23), datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
    rows = [{"day": day, "days": [day] * number, "moments": [moment] * number} for number in (2, 1, 0)]

    samples = _read(
        pa.Table.from_pylist(rows) if form == "table" else iter(rows) if form == "stream" else rows, folder=tmp_path
    )

    assert samples.features["day"] == Timestamp() and samples.features["days"] == ListOf(Timestamp())
    assert samples.features["moments"] == ListOf(Timestamp("UTC"))
    for sample, number in zip(samples.values(), (2, 1, 0), strict=True):
        assert sample["day"] == np.datetime64(day)
        assert sample["days"].tolist() == [datetime.datetime(2026, 11, 23)] * number
        assert sample["moments"].tolist() == [moment.replace(tzinfo=None)] * number


def test_tables_of_other_columns_are_refused(tmp_path):
    """The second table of a stream has text where the first has numbers."""
    tables = [pa.table({"a": [1]}), pa.table({"a": ["x"]})]

    with pytest.raises(SourceError, match=r"table 1 of the source has other columns .*a: string; want a: int64"):
        Materializer(iter(tables), output=tmp_path / "out").plan()
    with pytest.raises(SourceError, match="the tables of the list do not fit together"):
        Materializer(tables, output=tmp_path / "out")


@pytest.mark.parametrize("form", ["table", "list", "stream"])
def test_lists_of_dicts_may_be_declared(tmp_path, form):
    """The fields of each dict get their types, too."""
    rows = [{"objects": [{"box": [1.0, number], "name": "x"}] * (number % 3)} for number in range(5)]
    source = {"table": pa.Table.from_pylist(rows), "list": rows, "stream": iter(rows)}[form]
    features = {"objects": ListOf({"box": Tensor((2,), "float32"), "name": Text()})}

    _ran(ImportWriter(features=features), source, output=tmp_path / "out")

    data = load(tmp_path / "out")
    for number in range(5):
        objects = data[f"{number:08d}"]["objects"]
        assert objects["name"] == ["x"] * (number % 3)
        assert np.array_equal(objects["box"], np.array([[1, number]] * (number % 3), np.float32).reshape(-1, 2))


def test_error_of_a_source_says_where_it_came(tmp_path):
    """The user's own exception passes, with the number of the item."""

    def rows():
        yield {"a": 1}
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone") as caught:
        Materializer(rows, output=tmp_path / "out").plan()

    assert "instead of item 1" in caught.value.__notes__[0]


def test_empty_source_is_named(tmp_path):
    """By its path, where it has one."""
    parquet.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "none.parquet")

    with pytest.raises(SourceError, match=r"none.parquet has no samples; pass a source that has some"):
        Materializer("parquet", tmp_path / "none.parquet", tmp_path / "out")
