"""Recordings, opened by the clients of each format: the very files that were given, and the same samples."""

from __future__ import annotations

import functools
import io
import json

import numpy as np
import pytest
from real_clients import MARKS, shards

from datamat import Audio, Features, Materializer, Scalar, load, materialize

soundfile = pytest.importorskip("soundfile")
pytestmark = MARKS

KINDS = ("WAV", "FLAC", "MP3", "OGG")


@functools.cache
def file_of(number):
    """A recording of one of the kinds, as long as no other."""
    file = io.BytesIO()
    tone = np.sin(np.arange(4000 + 50 * number) / (5 + number)).astype(np.float32) / 2
    soundfile.write(file, np.stack([tone, -tone], axis=1), 16_000, format=KINDS[number])
    return file.getvalue()


def samples_of(file):
    return soundfile.read(io.BytesIO(file), dtype="float32")[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One directory with the same recordings in each format."""
    folder = tmp_path_factory.mktemp("sounds") / "out"
    materialize(
        lambda item: {"sound": item[1], "number": item[0]},
        [(number, file_of(number)) for number in range(len(KINDS))],  # Ogg has a random number of its stream
        folder,
        features=Features({"sound": Audio(16_000, 2), "number": Scalar("int64")}),
        format=["tfrecord", "parquet", "webdataset"],
        progress=False,
    )
    return folder


def check(rows):
    """Compare pairs of number and file."""
    assert dict(rows) == {number: file_of(number) for number in range(len(KINDS))}


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_knows_that_they_are_sounds(directory, tmp_path, streaming):
    """The card says so, with the rate; without its decoder, it gives the bytes."""
    datasets = pytest.importorskip("datasets")

    found = datasets.load_dataset(str(directory), split="train", streaming=streaming, cache_dir=str(tmp_path))

    assert isinstance(found.features["sound"], datasets.Audio)
    assert found.features["sound"].sampling_rate == 16_000
    files = found.cast_column("sound", datasets.Audio(decode=False))
    check((row["number"], row["sound"]["bytes"]) for row in files)


def test_tfds_gives_the_files(directory):
    """Its own type of sound is one of decoded integers; that of text is bytes, which soundfile reads."""
    tfds = pytest.importorskip("tensorflow_datasets")

    rows = tfds.builder_from_directory(directory).as_dataset(split="train").as_numpy_iterator()

    check((int(row["number"]), row["sound"]) for row in rows)


def test_croissant_knows_that_they_are_sounds(directory):
    mlcroissant = pytest.importorskip("mlcroissant")

    dataset = mlcroissant.Dataset(str(directory / "croissant.json"))

    fields = {field.name: field.data_types for one in dataset.metadata.record_sets for field in one.fields}
    assert "AudioObject" in str(fields["train/sound"])
    check((row["train/number"], row["train/sound"]) for row in dataset.records("train"))


def test_webdataset_gives_files_with_their_extension(directory):
    webdataset = pytest.importorskip("webdataset")

    rows = webdataset.WebDataset(shards(directory, "tar"), shardshuffle=False)

    endings = [f"sound.{kind.lower()}" for kind in KINDS]
    check((json.loads(row["json"])["number"], row[endings[json.loads(row["json"])["number"]]]) for row in rows)


def test_tables_give_the_files(directory):
    """pyarrow, DuckDB and polars have binary columns."""
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    import pyarrow.parquet as pq

    files = shards(directory, "parquet")
    check((row["number"], row["sound"]) for file in files for row in pq.read_table(file).to_pylist())
    check(duckdb.read_parquet(files).project("number, sound").fetchall())
    check(polars.read_parquet(files).select("number", "sound").rows())


def test_sounds_of_hugging_face_are_a_source(tmp_path):
    """A column of its type becomes an `Audio`, with the files as they are."""
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict(
        {
            "sound": [{"bytes": file_of(number), "path": None} for number in range(len(KINDS))],
            "number": range(len(KINDS)),
        }
    ).cast_column("sound", datasets.Audio(decode=False))

    Materializer("huggingface", source=given, output=tmp_path / "again").run(progress=False)

    found = load(tmp_path / "again")
    assert found.features["sound"] == Audio()
    for sample in found:
        assert np.array_equal(sample["sound"], samples_of(file_of(int(sample["number"]))))
