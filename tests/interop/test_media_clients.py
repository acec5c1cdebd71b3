"""Recordings and videos, opened by the clients of each format: the very files that were given."""

from __future__ import annotations

import functools
import io
from typing import Any, NamedTuple

import numpy as np
import pytest
from real_clients import MARKS, shards

from datamat import Audio, Features, Materializer, Scalar, Video, load, materialize

pytestmark = [*MARKS, pytest.mark.long]

KINDS = ("WAV", "FLAC", "MP3", "OGG")


@functools.cache
def sound(number):
    """A recording of one of the kinds, as long as no other."""
    import soundfile

    file = io.BytesIO()
    tone = np.sin(np.arange(4000 + 50 * number) / (5 + number)).astype(np.float32) / 2
    soundfile.write(file, np.stack([tone, -tone], axis=1), 16_000, format=KINDS[number])
    return file.getvalue()


def samples_of(file):
    import soundfile

    return soundfile.read(io.BytesIO(file), dtype="float32")[0]


@functools.cache
def video(number):
    """A video of NUMBER + 1 frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for level in range(number + 1):
            pixels = np.full((32, 48, 3), 40 * level, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


class Medium(NamedTuple):
    """A kind of files: four of them, what they are declared as, and what the clients call them."""

    package: str
    file_of: Any
    feature: Any
    of_hugging_face: str
    of_croissant: str
    plain: Any
    decoded: Any
    endings: tuple[str, ...]

    @property
    def files(self):
        return {number: self.file_of(number) for number in range(4)}


MEDIA = [
    Medium(
        "soundfile", sound, Audio(16_000, 2), "Audio", "AudioObject", Audio(), samples_of, tuple(map(str.lower, KINDS))
    ),
    Medium("av", video, Video((32, 48), fps=25), "Video", "VideoObject", Video(), Video().frames, ("mp4",) * 4),
]


@pytest.fixture(scope="module", params=MEDIA, ids=["sound", "video"])
def medium(request):
    pytest.importorskip(request.param.package)
    return request.param


@pytest.fixture(scope="module")
def directory(medium, tmp_path_factory):
    """One directory with the same files in each format."""
    folder = tmp_path_factory.mktemp("media") / "out"
    materialize(
        lambda item: {"file": item[1], "number": item[0]},
        [*medium.files.items()],  # made here: Ogg has a random number of its stream
        folder,
        features=Features({"file": medium.feature, "number": Scalar("int64")}),
        format=["tfrecord", "parquet", "webdataset"],
        progress=False,
    )
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_knows_what_they_are(medium, directory, tmp_path, streaming):
    """The card says so, with the rate of sounds; without its decoder, it gives the bytes."""
    datasets = pytest.importorskip("datasets")
    kind = getattr(datasets, medium.of_hugging_face)

    found = datasets.load_dataset(str(directory), split="train", streaming=streaming, cache_dir=str(tmp_path))

    assert isinstance(found.features["file"], kind)
    assert getattr(found.features["file"], "sampling_rate", 16_000) == 16_000
    files = found.cast_column("file", kind(decode=False))
    assert {row["number"]: row["file"]["bytes"] for row in files} == medium.files


def test_tfds_gives_the_files(medium, directory):
    """Its own types are of decoded integers, and of many pictures; that of text is bytes."""
    tfds = pytest.importorskip("tensorflow_datasets")

    rows = tfds.builder_from_directory(directory).as_dataset(split="train").as_numpy_iterator()

    assert {int(row["number"]): row["file"] for row in rows} == medium.files


def test_croissant_knows_what_they_are(medium, directory):
    mlcroissant = pytest.importorskip("mlcroissant")

    dataset = mlcroissant.Dataset(str(directory / "croissant.json"))

    fields = {field.name: field.data_types for one in dataset.metadata.record_sets for field in one.fields}
    assert medium.of_croissant in str(fields["train/file"])
    assert {row["train/number"]: row["train/file"] for row in dataset.records("train")} == medium.files


def test_webdataset_gives_files_with_their_extension(medium, directory):
    webdataset = pytest.importorskip("webdataset")

    rows = webdataset.WebDataset(shards(directory, "tar"), shardshuffle=False).decode()

    found = {row["json"]["number"]: row for row in rows}
    assert sorted(found) == [0, 1, 2, 3]
    for number, file in medium.files.items():
        assert found[number][f"file.{medium.endings[number]}"] == file


def test_tables_give_the_files(medium, directory):
    """pyarrow, DuckDB and polars have binary columns."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    import pyarrow.parquet as pq

    files = shards(directory, "parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert {row["number"]: row["file"] for row in rows} == medium.files
    assert dict(duckdb.read_parquet(files).project("number, file").fetchall()) == medium.files
    assert dict(polars.read_parquet(files).select("number", "file").rows()) == medium.files


def test_columns_of_hugging_face_are_a_source(medium, tmp_path):
    """A column of its type becomes the feature, with the files as they are."""
    datasets = pytest.importorskip("datasets")
    files = [{"bytes": file, "path": None} for file in medium.files.values()]
    given = datasets.Dataset.from_dict({"file": files, "number": range(4)})
    given = given.cast_column("file", getattr(datasets, medium.of_hugging_face)(decode=False))

    Materializer("huggingface", source=given, output=tmp_path / "again").run(progress=False)

    found = load(tmp_path / "again")
    assert found.features["file"] == medium.plain
    assert len(found) == 4
    for sample in found:
        assert np.array_equal(sample["file"], medium.decoded(medium.files[int(sample["number"])]))
