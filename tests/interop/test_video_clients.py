"""Videos, opened by the clients of each format: the very files that were given."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
from real_clients import MARKS, shards

from datamat import Features, Materializer, Scalar, Video, load, materialize

av = pytest.importorskip("av")
pytestmark = MARKS


@functools.cache
def file_of(number):
    """A video of NUMBER + 1 frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for level in range(number + 1):
            pixels = np.full((32, 48, 3), 40 * level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One directory with the same four videos in each format."""
    folder = tmp_path_factory.mktemp("videos") / "out"
    materialize(
        lambda number: {"video": file_of(number), "number": number},
        range(4),
        folder,
        features=Features({"video": Video((32, 48), fps=25), "number": Scalar("int64")}),
        format=["tfrecord", "parquet", "webdataset"],
        progress=False,
    )
    return folder


def check(rows):
    """Compare pairs of number and file."""
    assert dict(rows) == {number: file_of(number) for number in range(4)}


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_knows_that_they_are_videos(directory, tmp_path, streaming):
    """The card says so; without its decoder, it gives the bytes."""
    datasets = pytest.importorskip("datasets")

    found = datasets.load_dataset(str(directory), split="train", streaming=streaming, cache_dir=str(tmp_path))

    assert isinstance(found.features["video"], datasets.Video)
    files = found.cast_column("video", datasets.Video(decode=False))
    check((row["number"], row["video"]["bytes"]) for row in files)


def test_tfds_gives_the_files(directory):
    """Its own type of video is one of many pictures; that of text is bytes."""
    tfds = pytest.importorskip("tensorflow_datasets")

    rows = tfds.builder_from_directory(directory).as_dataset(split="train").as_numpy_iterator()

    check((int(row["number"]), row["video"]) for row in rows)


def test_croissant_knows_that_they_are_videos(directory):
    mlcroissant = pytest.importorskip("mlcroissant")

    dataset = mlcroissant.Dataset(str(directory / "croissant.json"))

    fields = {field.name: field.data_types for one in dataset.metadata.record_sets for field in one.fields}
    assert "VideoObject" in str(fields["train/video"])
    check((row["train/number"], row["train/video"]) for row in dataset.records("train"))


def test_webdataset_gives_files_with_their_extension(directory):
    webdataset = pytest.importorskip("webdataset")

    rows = list(webdataset.WebDataset(shards(directory, "tar"), shardshuffle=False).decode())

    check((row["json"]["number"], row["video.mp4" if "video.mp4" in row else "mp4"]) for row in rows)


def test_tables_give_the_files(directory):
    """pyarrow, DuckDB and polars have binary columns."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    import pyarrow.parquet as pq

    files = shards(directory, "parquet")
    check((row["number"], row["video"]) for file in files for row in pq.read_table(file).to_pylist())
    check(duckdb.read_parquet(files).project("number, video").fetchall())
    check(polars.read_parquet(files).select("number", "video").rows())


def test_videos_of_hugging_face_are_a_source(tmp_path):
    """A column of its type becomes a `Video`, with the files as they are."""
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict(
        {"video": [{"bytes": file_of(number), "path": None} for number in range(4)], "number": range(4)}
    ).cast_column("video", datasets.Video(decode=False))

    Materializer("huggingface", source=given, output=tmp_path / "again").run(progress=False)

    found = load(tmp_path / "again")
    assert found.features["video"] == Video()
    for sample in found:
        assert np.array_equal(sample["video"], Video().frames(file_of(int(sample["number"]))))
