"""One directory with the records in several formats: each client finds its own format, and all of it once."""

import json

import pytest
import streets

from datamat import Materializer, ShardOptions, load

RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory, planned for four ranks."""
    folder = tmp_path_factory.mktemp("several") / "streets"
    shards = ShardOptions(ranks=RANKS)
    formats = ["tfrecord", "parquet", "webdataset"]
    Materializer(streets.Streets(), None, folder, format=formats, shards=shards).run(progress=False)
    return folder


@pytest.fixture(scope="module")
def keys(folder):
    return sorted(load(folder, "train").keys())


@pytest.mark.long
def test_tfds_reads_the_tfrecord_shards(folder, keys):
    """The sidecars that stand beside all of them name these shards."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="the package tensorflow-datasets is not installed")

    found = tfds.builder_from_directory(str(folder)).as_dataset(split="train")

    assert sorted(sample["key"].numpy().decode() for sample in found) == keys


def test_hugging_face_reads_one_format_and_shares_it_among_ranks(folder, keys, tmp_path):
    """Each record comes once, though three formats hold it; all ranks get equally many."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    from datasets.distributed import split_dataset_by_node

    found = datasets.load_dataset(str(folder), cache_dir=str(tmp_path))
    stream = datasets.load_dataset(str(folder), split="train", streaming=True)
    shares = [[row["key"] for row in split_dataset_by_node(stream, rank, RANKS)] for rank in range(RANKS)]

    assert {split: len(rows) for split, rows in found.items()} == streets.NUM_ROWS
    assert sorted(found["train"]["key"]) == keys
    assert [len(share) for share in shares] == [10] * RANKS
    assert sorted(key for share in shares for key in share) == keys


@pytest.mark.filterwarnings("ignore")  # of files that webdataset leaves open
def test_webdataset_shares_tar_shards_among_ranks(folder, keys, monkeypatch):
    """`split_by_node` takes every fourth shard."""
    webdataset = pytest.importorskip("webdataset", reason="the package webdataset is not installed")
    shards = sorted(map(str, folder.glob("streets-train-*.tar")))
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))

    shares = []
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        found = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=webdataset.split_by_node)
        shares.append([json.loads(sample["json"])["key"] for sample in found])

    assert [len(share) for share in shares] == [10] * RANKS
    assert sorted(key for share in shares for key in share) == keys


def test_duckdb_reads_the_parquet_shards(folder, keys):
    """The pattern of their names finds them."""
    duckdb = pytest.importorskip("duckdb", reason="the package duckdb is not installed")

    found = duckdb.sql(f"select key from '{folder}/streets-train-*.parquet'").fetchall()

    assert sorted(key for (key,) in found) == keys
