"""No client pointed at a directory takes datamat's index for data: it gives the records, or an error."""

import pathlib
import shutil

import pytest
from real_clients import MARKS

pytestmark = MARKS

FORMATS = ("tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord")
NUM_RECORDS = 48


def with_datasets(folder, cache):
    """As `load_dataset(dir)` of Hugging Face."""
    datasets = pytest.importorskip("datasets")
    splits = datasets.load_dataset(str(folder), cache_dir=str(cache))
    return sum(split.num_rows for split in splits.values()), {
        n for split in splits.values() for n in split.column_names
    }


def with_pyarrow(folder, _):
    """As a dataset of the directory."""
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(folder, format="parquet").to_table()
    return table.num_rows, set(table.column_names)


def with_pyarrow_by_content(folder, _):
    """As a dataset of every Parquet file, whatever its name."""
    import pyarrow.dataset

    table = pyarrow.dataset.dataset(folder, format="parquet", exclude_invalid_files=True).to_table()
    return table.num_rows, set(table.column_names)


def with_pandas(folder, _):
    """As `read_parquet(dir)`."""
    pandas = pytest.importorskip("pandas")
    table = pandas.read_parquet(folder)
    return len(table), set(table.columns)


def with_polars(folder, _):
    """As `read_parquet(dir)`."""
    polars = pytest.importorskip("polars")
    table = polars.read_parquet(folder)
    return table.height, set(table.columns)


def with_polars_below(folder, _):
    """By the pattern of all Parquet files below the directory."""
    polars = pytest.importorskip("polars")
    table = polars.scan_parquet(f"{folder}/**/*.parquet").collect()
    return table.height, set(table.columns)


def with_duckdb(folder, _):
    """As `read_parquet('dir')`."""
    found = pytest.importorskip("duckdb").sql(f"select * from read_parquet('{folder}')")
    return len(found.fetchall()), set(found.columns)


def with_duckdb_below(folder, _):
    """By the pattern of all Parquet files below the directory."""
    duckdb = pytest.importorskip("duckdb")
    found = duckdb.sql(f"select * from read_parquet('{folder}/**/*.parquet', union_by_name=true)")
    return len(found.fetchall()), set(found.columns)


CLIENTS = (
    with_datasets,
    with_pyarrow,
    with_pyarrow_by_content,
    with_pandas,
    with_polars,
    with_polars_below,
    with_duckdb,
    with_duckdb_below,
)


def check(read):
    """Check that it raises, finds nothing, or gives the columns of the records, each record once."""
    try:
        num_rows, columns = read()
    except Exception:
        return
    if num_rows:
        assert num_rows == NUM_RECORDS and not {"shard", "record"} & columns, (num_rows, columns)
        assert any(name.partition(".")[0] == "image" for name in columns)


@pytest.mark.sample(5)
@pytest.mark.parametrize("read", CLIENTS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("name", FORMATS)
def test_directory_holds_no_data_but_its_records(directory, tmp_path, name, read):
    """In TFRecord, a client of tables finds nothing."""
    if name == "arrayrecord":
        pytest.importorskip("array_record")

    check(lambda: read(directory(name), tmp_path))


@pytest.mark.long
@pytest.mark.usefixtures("java_ends")
def test_spark_takes_no_index(directory):
    """It reads the records alone, by `spark.read.parquet(dir)` and by a pattern of all Parquet files below it."""
    pyspark = pytest.importorskip("pyspark.sql")
    if not shutil.which("java"):
        pytest.skip("Spark needs Java 17, and there is no java on the path")
    session = pyspark.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()

    def read(folder, **options):
        table = session.read.options(**options).parquet(str(folder))
        return table.count(), set(table.columns)

    try:
        for name in ("tfrecord", "parquet", "webdataset"):
            folder = directory(name)
            check(lambda folder=folder: read(folder))
            check(lambda folder=folder: read(folder, recursiveFileLookup="true"))
            check(lambda folder=folder: read(folder, recursiveFileLookup="true", pathGlobFilter="*.parquet"))
    finally:
        session.stop()


def test_index_is_read_where_it_is_named(directory):
    """It is Parquet: whoever names the file gets its rows."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(pathlib.Path(directory("tfrecord"), "_index", "train.index"))

    assert {"key", "shard", "record"} <= set(table.column_names)
