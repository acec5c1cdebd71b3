"""Indexes that come as columns: the bytes of the same rows one by one, and no object for a row on the way."""

import types

import numpy as np
import pyarrow as pa
import pytest
from prepared import Prepared
from pyarrow import parquet

from datamat import (
    DatasetWriter,
    Features,
    Index,
    IndexRow,
    Materializer,
    Scalar,
    ShardOptions,
    SourceError,
    Text,
    WorkerOptions,
    load,
    materialize,
)
from datamat.sources import rows
from datamat.sources.rows import Origin, RowBlock, Texts
from datamat.sources.writing import write_rows
from datamat.testing import InlineExecutor

NUM_ROWS = 3000
COLUMNS = {
    "key": [f"kö{number}" if number % 5 else f"{number}" for number in range(NUM_ROWS)],
    "split": ["val" if number % 7 == 3 else "train" for number in range(NUM_ROWS)],
    "number": np.arange(NUM_ROWS, dtype=np.int32),
    "share": (np.arange(NUM_ROWS) / 7).astype(np.float32),
    "word": ["", "é", "word"] * (NUM_ROWS // 3),
    "flag": np.arange(NUM_ROWS) % 2 == 0,
    "large": np.full(NUM_ROWS, 2**63, np.uint64),
}


class Rows(DatasetWriter):
    """Reads blocks of what its index holds."""

    name = "rows"
    features = Features({"number": Scalar("int64"), "share": Scalar("float64"), "word": Text()})
    file_fields = ()

    def __init__(self, made):
        self.made = made

    def __getstate__(self):
        return {}

    def index(self, source):
        return self.made()

    def read(self, row):
        return {name: row.fields[name] for name in ("number", "share", "word")}

    def read_block(self, keys, fields):
        assert fields["number"].dtype == np.int64 and fields["share"].dtype == np.float64
        return {name: fields[name] for name in ("number", "share", "word")}


def single_rows():
    names = [name for name in COLUMNS if name not in {"key", "split"}]
    for number in range(NUM_ROWS):
        fields = {name: COLUMNS[name][number] for name in names}
        yield IndexRow(COLUMNS["key"][number], COLUMNS["split"][number], fields, f"table row {number + 1}")


def tables():
    for start in range(0, NUM_ROWS, 700):
        yield {name: values[start : start + 700] for name, values in COLUMNS.items()}


def dataset():
    return pytest.importorskip("pyarrow.dataset").dataset(pa.table(COLUMNS))


KINDS = {
    "arrays": lambda: Index.from_table(COLUMNS),
    "arrow": lambda: Index.from_table(pa.table(COLUMNS)),
    "large": lambda: Index.from_table(pa.table({**COLUMNS, "word": pa.array(COLUMNS["word"], pa.large_string())})),
    "view": lambda: Index.from_table(pa.table({**COLUMNS, "word": pa.array(COLUMNS["word"], pa.string_view())})),
    "sliced": lambda: Index.from_table(pa.concat_tables([pa.table(COLUMNS)[:11], pa.table(COLUMNS)[11:]])),
    "codes": lambda: Index.from_table(
        pa.table({**COLUMNS, "split": pa.array(COLUMNS["split"]).dictionary_encode()})  # val may be the first code
    ),
    "dataset": lambda: Index.from_table(dataset()),
    "tables": lambda: Index.from_table(tables),
}


def _files(folder):
    paths = [path for ending in ("tfrecord", "idx", "index") for path in folder.rglob(f"*.{ending}")]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def _written(made, output, **options):
    options = options or {"executor": InlineExecutor()}
    Prepared(Rows(made), None, output, shards=ShardOptions(num_shards=2), **options).run(progress=False)
    return _files(output)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    return _written(single_rows, tmp_path_factory.mktemp("rows") / "out")


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_give_the_bytes_of_the_same_rows(kind, wanted, tmp_path):
    assert list(KINDS[kind]()) == list(single_rows())
    assert _written(KINDS[kind], tmp_path / "out") == wanted
    assert len(load(tmp_path / "out")) == NUM_ROWS


def blocks():
    """What an index of the user's own may yield: columns of any kind, as they come."""
    for start in range(0, NUM_ROWS, 700):
        few = {name: values[start : start + 700] for name, values in COLUMNS.items()}
        keys, split = few.pop("key"), few.pop("split")
        yield RowBlock(
            keys if start else np.array(keys),
            few | {"word": tuple(few["word"])},
            [f"table row {number + 1}" for number in range(start, start + len(keys))],
            split if start else tuple(split),
        )


def test_blocks_of_an_index_give_the_bytes_of_the_same_rows(wanted, tmp_path):
    assert [row for block in blocks() for row in block.rows()] == list(single_rows())
    assert _written(blocks, tmp_path / "out") == wanted


def test_rows_of_a_block_need_no_more_than_keys(tmp_path):
    found = list(RowBlock(["a", "b"], splits="val").rows())

    assert found == [IndexRow("a", "val"), IndexRow("b", "val")]
    assert list(RowBlock(["a"], {"x": [1]}).rows()) == [IndexRow("a", None, {"x": 1})]


@pytest.mark.parametrize(
    "columns",
    [{"fields": {"n": [1, 2]}}, {"splits": ["val"]}, {"origin": ["a"]}, {"files": [[]] * 4}],
    ids=lambda columns: next(iter(columns)),
)
def test_block_with_values_that_are_missing_is_refused(columns):
    with pytest.raises(SourceError):
        RowBlock(["a", "b", "c"], **columns)


def test_index_of_blocks_and_rows_is_refused(tmp_path):
    with pytest.raises(SourceError):
        _written(lambda: [RowBlock(["a"], {"n": [1]}), IndexRow("b", fields={"n": 2})], tmp_path / "out")


@pytest.mark.parametrize("place", [1, 256, 300, 16_384, 20_000])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (IndexRow("k", fields={"number": 1, "more": 2}), r"the fields are \['more', 'number'\], but \['number'\]"),
        (IndexRow("k", fields={}), r"the fields are \[\], but \['number'\] in the first row"),
        (IndexRow("k", fields={"other": 1}), r"the fields are \['other'\], but \['number'\] in the first row"),
        (IndexRow("k", 5, {"number": 1}), "the split is a int, 5"),
        ("k", "of the index is a str, 'k'; want an IndexRow"),
    ],
)
def test_wrong_row_is_named_however_late_it_comes(wrong, message, place, tmp_path):
    """Single rows are checked some at a time, and stored more at a time: neither shows in the message."""

    def index():
        for number in range(place + 2):
            yield wrong if number == place else IndexRow(f"{number}", fields={"number": number})

    with pytest.raises(SourceError, match=rf"row {place}\b.*{message}"):
        Materializer(Rows(index), None, tmp_path).plan()


@pytest.mark.parametrize("wrapped", [dict, types.MappingProxyType])
@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("value", [int, str, lambda number: [number, {"n": (number,)}]])
def test_index_may_fill_what_it_has_yielded_anew(value, first, wrapped, tmp_path):
    """As a loop over a file does with one dict: each row keeps what it held when it was yielded."""
    wanted = [value(number) if number >= first else None for number in range(1000)]

    def index():
        given, held, files = {}, [None, {}], [""]
        for number, one in enumerate(wanted):
            given["held"] = one
            if isinstance(one, list):
                held[0], held[1]["n"] = one[0], one[1]["n"]
                given["held"] = held
            files[0] = f"{number}.txt"
            yield IndexRow(f"{number:04d}", fields=given if wrapped is dict else wrapped(given), files=files)

    for number in range(1000):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "rows").mkdir()
    found = write_rows(index(), tmp_path / "rows", source=str(tmp_path)).read(np.arange(1000))

    assert [row.fields["held"] for row in found] == wanted
    assert [row.files for row in found] == [[str(tmp_path / f"{number}.txt")] for number in range(1000)]


def test_fields_in_the_place_of_the_split_are_refused_with_their_row(tmp_path):
    with pytest.raises(SourceError, match="row 1"):
        _written(lambda: [IndexRow("a"), IndexRow("b", {"n": 2})], tmp_path / "out")


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))]
)
def test_columns_give_the_same_bytes_with_every_start_method(method, wanted, tmp_path):
    workers = WorkerOptions(num_workers=2, start_method=method)

    assert _written(KINDS["arrow"], tmp_path / "out", workers=workers) == wanted


def test_parquet_file_gives_the_bytes_of_its_table(tmp_path):
    """But for the places that messages name, which no output holds."""
    parquet.write_table(pa.table(COLUMNS), tmp_path / "rows.parquet", row_group_size=999)

    found = _written(lambda: Index.from_table(tmp_path / "rows.parquet"), tmp_path / "found")

    assert found == _written(KINDS["arrays"], tmp_path / "wanted")


@pytest.fixture
def made_rows(monkeypatch):
    """The rows that were made of blocks, and of what lies on the disk."""
    made = []

    def counted(*values):
        made.append(values)
        return IndexRow(*values)

    monkeypatch.setattr(rows, "IndexRow", counted)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_becomes_an_object_from_the_index_to_the_shard(kind, made_rows, tmp_path):
    report = Materializer(Rows(KINDS[kind]), None, tmp_path).run(executor=InlineExecutor(), progress=False)

    assert report.num_records == NUM_ROWS
    assert not made_rows


@pytest.mark.parametrize("inputs", [np.arange(NUM_ROWS), range(NUM_ROWS), list(range(NUM_ROWS))])
def test_inputs_of_materialize_become_no_objects_either(made_rows, tmp_path, inputs):
    materialize(
        lambda number: {"number": int(number)},
        inputs,
        tmp_path,
        block=lambda numbers: {"number": np.asarray(numbers)},
        features=Features({"number": Scalar("int64")}),
        executor=InlineExecutor(),
        progress=False,
    )

    assert not made_rows
    assert int(load(tmp_path)["00000017"]["number"]) == 17


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        (7, "the table is a int"),
        ({}, "no columns"),
        ({"key": ["a", "b"], "x": np.arange(3)}, r"differ in length \(key: 2, x: 3\)"),
        ({"x": np.zeros((2, 3), np.float32)}, "'x' of the table is float32"),
        ({"x": {1, 2}}, "'x' of the table is set"),
        ({"x": np.zeros(2, "M8[s]")}, "row 1, column 'x': found datetime64"),
        ({"x": np.zeros(2, complex)}, "row 1, column 'x': found complex128"),
        ({"x": [1, None]}, "row 2, column 'x': found None"),
        ({"x": pa.table({"x": [1]})}, "'x' of the table is Table"),
        ({"key": ["a", ""]}, "row 2: key ''"),
        (pa.table({"key": ["a", ""]}), "row 2: key ''"),
        ({"key": ["a", "\ud800"]}, "row 2: key .*surrogates"),
        ({"key": ["a", "b", "a"]}, "key 'a' at table row 1 and table row 3"),
        ({"key": ["a", "b"], "split": ["val", "no split"]}, "row 2: split 'no split'"),
    ],
)
def test_columns_that_are_no_index_are_refused(columns, word, tmp_path):
    """With the row and column."""
    with pytest.raises(SourceError, match=word):
        Materializer(Rows(lambda: Index.from_table(columns)), None, tmp_path).plan()


def test_tables_of_an_index_have_the_same_columns(tmp_path):
    """The message counts rows over all of them."""
    index = Index.from_table(lambda: [{"x": [1, 2]}, {"y": [3]}])

    with pytest.raises(SourceError, match=r"table row 3: the fields are \['y'\], but \['x'\] in the first row"):
        Materializer(Rows(lambda: index), None, tmp_path).plan()


def test_relative_paths_in_columns_start_from_the_source(tmp_path, monkeypatch):
    """As in single rows: a path that starts from the working folder is that of a file of the source."""
    (tmp_path / "photos").mkdir()
    for name in ("a", "b"):
        (tmp_path / "photos" / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    block = RowBlock(Texts.of("ab"), {"file": Texts.of(["photos/a", "b"])}, Origin("row ", 0))

    (moved,) = rows.relative_to_source([block], "photos", None)

    assert moved.fields["file"].tolist() == ["a", "b"]


def test_kinds_of_columns_may_differ_from_block_to_block(tmp_path):
    """Integers and floats become floats; the rows are those of single rows."""
    blocks = [
        RowBlock(Texts.of_positions(0, 2), {"x": np.array([1, 2])}, Origin("row ", 0)),
        RowBlock(Texts.of_positions(2, 4), {"x": np.array([0.5, 1.5])}, Origin("row ", 2)),
        RowBlock(Texts.of_positions(4, 5), {"x": [3]}, Origin("row ", 4)),
    ]

    store = write_rows(iter(blocks), tmp_path, source="")

    found = store.read(np.array([4, 0, 3]))
    assert [(row.key, row.fields["x"], row.origin) for row in found] == [
        ("00000004", 3.0, "row 4"),
        ("00000000", 1.0, "row 0"),
        ("00000003", 1.5, "row 3"),
    ]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (99_999_990, 99_999_999), (99_999_995, 100_000_003)])
def test_positions_as_texts(start, stop):
    assert Texts.of_positions(start, stop).tolist() == [f"{number:08d}" for number in range(start, stop)]
