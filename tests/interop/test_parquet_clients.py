"""Parquet shards, opened by the clients of tables."""

import io

import numpy as np
import pytest
from PIL import Image
from real_clients import MARKS

pytestmark = MARKS


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_pyarrow_reads_typed_columns(directory, samples):
    """A table has a type for each column, a row for each record, and the pictures as files."""
    import pyarrow.parquet as pq

    tables = [pq.read_table(path) for path in sorted(directory("parquet").glob("*-train-*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]

    types = {field.name: str(field.type) for field in tables[0].schema}
    assert (types["image"], types["key"], types["label"], types["exact"]) == ("binary", "string", "int64", "double")
    assert [row["key"] for row in rows] == list(samples)
    for row in rows:
        check_row(row, samples[row["key"]])


def check_row(row, sample):
    assert (pixels(row["image"]) == sample["image"]).all()
    assert (pixels(row["mask"]) == sample["mask"]).all()
    for name in ("label", "caption", "exact"):
        assert row[name] == sample[name]
    assert np.float32(row["frac"]) == sample["frac"]
    assert np.array_equal(nested(row["objects/bbox"]).reshape(-1, 4), sample["objects/bbox"])
    assert list(row["objects/label"]) == sample["objects/label"].tolist()
    assert np.array_equal(nested(row["pose"]), sample["pose"])


def nested(rows):
    return np.array([list(row) for row in rows], np.float32)


def test_duckdb_queries_columns(directory, samples):
    """SQL counts, averages and unnests without any help."""
    duckdb = pytest.importorskip("duckdb")

    shards = directory("parquet") / "streets-train-*.parquet"
    count, mean, size = duckdb.sql(f"select count(*), avg(exact), sum(octet_length(image)) from '{shards}'").fetchall()[
        0
    ]
    classes = duckdb.sql(
        f"select label, count(*) from (select unnest(\"objects/label\") as label from '{shards}') group by 1 order by 1"
    ).fetchall()

    labels = np.concatenate([sample["objects/label"] for sample in samples.values()])
    assert count == len(samples)
    assert mean == pytest.approx(np.mean([sample["exact"] for sample in samples.values()]))
    assert size > 0
    assert classes == [(int(label), int((labels == label).sum())) for label in np.unique(labels)]


def test_pandas_reads_a_shard(directory, samples):
    """A frame of pandas holds the same rows."""
    pandas = pytest.importorskip("pandas")

    frame = pandas.read_parquet(directory("parquet") / "streets-train-00000-of-00004.parquet")

    assert len(frame) > 0
    for row in frame.to_dict("records"):
        check_row(row, samples[row["key"]])


def test_grain_iterates_over_parquet(directory, samples):
    """Grain's own reader of Parquet gives each row once."""
    grain = pytest.importorskip("grain")

    files = sorted(map(str, directory("parquet").glob("*-train-*.parquet")))
    rows = [row for path in files for row in grain.experimental.ParquetIterDataset(path)]

    assert [row["key"] for row in rows] == list(samples)


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_torch_loads_row_groups(directory, samples, num_workers):
    """The workers of a DataLoader share the row groups, and read each once."""
    torch_data = pytest.importorskip("torch.utils.data")
    files = sorted(map(str, directory("parquet").glob("*-train-*.parquet")))

    class Keys(RowGroups, torch_data.IterableDataset):
        pass

    loader = torch_data.DataLoader(Keys(files), batch_size=None, num_workers=num_workers)

    assert sorted(loader) == sorted(samples)


class RowGroups:
    """The units of work are (file, row group)."""

    def __init__(self, files):
        self.files = files

    def __iter__(self):
        import pyarrow.parquet as pq
        import torch.utils.data

        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        units = [(path, group) for path in self.files for group in range(pq.ParquetFile(path).num_row_groups)]
        for path, group in units[first::step]:
            table = pq.ParquetFile(path).read_row_group(group, use_threads=False)
            yield from table["key"].to_pylist()
