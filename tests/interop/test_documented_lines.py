"""The clients run the code of `docs/interop.md`: all records once, with their pixels, labels, splits and names."""

import io
import json
import os
import shutil
import sys

import numpy as np
import pytest
import streets
from documented import LINES, SECTIONS
from PIL import Image
from real_clients import MARKS

pytestmark = MARKS


def pixels(data):
    """Return the array of a picture file, or of what a client made of one."""
    return np.asarray(Image.open(io.BytesIO(data)) if isinstance(data, bytes) else data)


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def check(rows, samples):
    """Compare rows, with the fields `key`, `image`, `mask` and `label`, with the samples, each exactly once."""
    found = {text(row["key"]): row for row in rows}
    assert len(rows) == len(samples) and found.keys() == samples.keys()
    for key, row in found.items():
        assert (pixels(row["image"]) == samples[key]["image"]).all()
        assert (pixels(row["mask"]).reshape(24, 32) == samples[key]["mask"]).all()
        assert int(row["label"]) == samples[key]["label"]


def check_boxes(rows, samples):
    for row in rows:
        sample = samples[text(row["key"])]
        boxes = np.array([list(box) for box in row["objects/bbox"]], np.float32).reshape(-1, 4)
        assert np.array_equal(boxes, sample["objects/bbox"])
        assert np.array_equal(np.array(row["objects/label"], np.int64), sample["objects/label"])


def plain(member_row):
    """Return the row of a sample of members."""
    members = {name.removeprefix("."): data for name, data in member_row.items()}
    fields = members["json"]
    fields = fields if isinstance(fields, dict) else json.loads(fields.read() if hasattr(fields, "read") else fields)
    mask = pixels(members["mask.png"])
    return {**fields, "image": members["image.png"], "mask": mask[..., 0] if mask.ndim == 3 else mask}


def test_page_has_code_for_every_client():
    """Each heading of the third level has a code block, and a test below runs it."""
    with open(__file__) as file:
        source = file.read()

    assert len(LINES) == len(SECTIONS) == 17
    assert [heading for heading in LINES if f'"{heading}"' not in source] == []


def test_tf_data(opened, samples):
    """Samples come in the order of the shards."""
    tf = pytest.importorskip("tensorflow")

    rows = list(opened("tf.data", "tfrecord")["dataset"].as_numpy_iterator())

    assert [text(row["key"]) for row in rows] == list(samples)
    decoded = [{**row, **{name: tf.io.decode_png(row[name]).numpy() for name in ("image", "mask")}} for row in rows]
    check(decoded, samples)


def check_tfds(info):
    assert {split: found.num_examples for split, found in info.splits.items()} == streets.NUM_ROWS
    assert tuple(info.features["label"].names) == streets.CLASSES
    assert tuple(info.features["objects/label"].feature.names) == streets.CLASSES
    assert info.features["mask"].names == ["road", "sky"]


@pytest.mark.long
def test_tfds(opened, samples):
    """Samples come decoded, with splits and their slices, boxes and names."""
    pytest.importorskip("tensorflow_datasets")

    found = opened("TFDS", "tfrecord")
    rows = list(found["dataset"].as_numpy_iterator())

    check_tfds(found["builder"].info)
    check(rows, samples)
    check_boxes(rows, samples)
    assert all(row["exact"] == samples[text(row["key"])]["exact"] for row in rows)
    assert len(found["builder"].as_dataset(split="train[25%:50%]")) == 10


def test_tfds_random_access(opened, samples):
    """From ArrayRecord, any record comes by its number."""
    pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("array_record")

    found = opened("TFDS with random access", "arrayrecord")
    rows = [found["source"][number] for number in range(len(found["source"]))]

    check_tfds(found["builder"].info)
    check(rows, samples)
    check_boxes(rows, samples)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with its cache in the test's folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets


@pytest.mark.sample(2)
@pytest.mark.parametrize("variable", ["dataset", "stream"])
def test_hugging_face(datasets, opened, samples, variable):
    """Mapped and streamed, it gives splits, decoded pictures and names of classes."""
    found = opened("datasets", "parquet")[variable]

    rows = list(found["train"])

    assert {split: len(list(rows)) for split, rows in found.items()} == streets.NUM_ROWS
    assert all(isinstance(row[name], Image.Image) for row in rows for name in ("image", "mask"))
    check(rows, samples)
    check_boxes(rows, samples)
    assert tuple(found["train"].features["label"].names) == streets.CLASSES
    assert tuple(found["train"].features["objects/label"].feature.names) == streets.CLASSES


@pytest.mark.long
@pytest.mark.parametrize("variable", ["dataset", "stream"])
def test_hugging_face_tars(datasets, opened, samples, variable):
    """Mapped and streamed, it gives splits and decoded pictures."""
    found = opened("datasets with tar shards", "webdataset")[variable]

    assert {split: len(list(rows)) for split, rows in found.items()} == streets.NUM_ROWS
    check([plain(row) for row in found["train"]], samples)


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_webdataset(opened, samples, num_workers):
    """The workers of a loader share the shards."""
    pytest.importorskip("webdataset")
    pytest.importorskip("torch")

    found = opened("webdataset", "webdataset", num_workers=num_workers)

    check([plain(row) for row in found["loader"]], samples)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_wids(opened, samples, num_workers):
    """Any number of workers get samples by number."""
    pytest.importorskip("wids")
    data = pytest.importorskip("torch.utils.data")

    dataset = opened("wids", "webdataset")["dataset"]
    rows = list(data.DataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=plain))

    assert [row["key"] for row in rows] == list(samples)
    check(rows, samples)


@pytest.mark.sample(5)
@pytest.mark.parametrize("num_workers", [0, 2, 3])
@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"])
def test_torch(opened, samples, name, num_workers):
    """A loader runs over what `load` returns, whatever the format."""
    pytest.importorskip("torch")
    if name == "arrayrecord":
        pytest.importorskip("array_record")

    rows = list(opened("DataLoader", name, num_workers=num_workers)["loader"])

    check(rows, samples)
    check_boxes(rows, samples)


@pytest.mark.long
def test_litdata(opened, samples):
    """In this process, samples come in the order of the shards; spawned workers share them."""
    pytest.importorskip("litdata")

    found = opened("litdata", "parquet")
    rows = list(found["dataset"])

    assert [row["key"] for row in rows] == list(samples)
    check(rows, samples)
    check_boxes(rows, samples)
    check([row for batch in found["loader"] for row in batch], samples)


def read_grain(grain, dataset, num_workers):
    dataset = dataset.to_iter_dataset()
    if num_workers:
        dataset = dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=num_workers))
    return list(dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_grain(opened, samples, num_workers):
    """A seed decides the order."""
    grain = pytest.importorskip("grain")
    pytest.importorskip("array_record")

    rows = read_grain(grain, opened("grain", "arrayrecord")["dataset"], num_workers)

    assert [row["key"] for row in rows] != list(samples)
    check(rows, samples)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["tfrecord", "parquet", "webdataset"])
def test_grain_with_any_format(opened, samples, name):
    """A seed decides the order."""
    grain = pytest.importorskip("grain")

    rows = read_grain(grain, opened("grain with any format", name)["dataset"], 0)

    assert [row["key"] for row in rows] != list(samples)
    check(rows, samples)


def run_dali(pipeline, num_samples):
    """Return two outputs of a pipeline for each sample of one epoch."""
    pipe = pipeline()
    pipe.build()
    found = []
    while len(found) < num_samples:
        first, second = pipe.run()
        found += [(np.asarray(first.at(i)), np.asarray(second.at(i))) for i in range(len(first))]
    return found


@pytest.mark.long
def test_dali_tfrecord(opened, samples):
    """It runs on the CPU alone, through our offsets."""
    pytest.importorskip("nvidia.dali")

    found = run_dali(opened("DALI with TFRecord", "tfrecord")["pipeline"], len(samples))

    assert len(found) == len(samples)
    for (image, label), sample in zip(found, samples.values(), strict=True):
        assert (image == sample["image"]).all() and label.tolist() == [sample["label"]]


@pytest.mark.long
def test_dali_tars(opened, samples):
    """It runs on the CPU alone, through our index of members."""
    pytest.importorskip("nvidia.dali")

    found = run_dali(opened("DALI with tar shards", "webdataset")["pipeline"], len(samples))

    assert len(found) == len(samples)
    for (image, fields), (key, sample) in zip(found, samples.items(), strict=True):
        assert (image == sample["image"]).all() and json.loads(bytes(fields))["key"] == key


@pytest.mark.long
def test_index_of_members_is_that_of_dali(directory, tmp_path, monkeypatch):
    """Byte for byte, it is what DALI's own tool writes."""
    wds2idx = pytest.importorskip("wds2idx")
    shard = next(directory("webdataset").glob("*-train-00001-*.tar"))

    monkeypatch.setattr(sys, "argv", ["wds2idx", str(shard), str(tmp_path / "idx")])
    wds2idx.main()

    assert (tmp_path / "idx").read_bytes() == shard.with_name(f"{shard.name}.idx").read_bytes()


def test_duckdb(opened, samples):
    """A query runs over the shards of a split."""
    pytest.importorskip("duckdb")

    rows = opened("DuckDB", "parquet")["table"].fetchall()

    assert sorted((key, label) for key, label, _ in rows) == sorted((k, s["label"]) for k, s in samples.items())
    assert all(size > 0 for *_, size in rows)


def test_polars(opened, samples):
    """A lazy scan has types with the sizes of fixed lists."""
    polars = pytest.importorskip("polars")

    frame = opened("polars", "parquet")["frame"].collect()

    assert frame.schema["pose"] == polars.Array(polars.Float32, (2, 3))
    check(list(frame.iter_rows(named=True)), samples)
    check_boxes(list(frame.iter_rows(named=True)), samples)


@pytest.mark.long
@pytest.mark.usefixtures("java_ends")
def test_spark(opened, samples, monkeypatch):
    """A frame has typed columns."""
    pytest.importorskip("pyspark")
    if not shutil.which("java"):
        pytest.skip("Spark needs Java 17, and there is no java on the path")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)

    found = opened("Spark", "parquet")
    try:
        rows = [row.asDict() for row in found["frame"].collect()]
    finally:
        found["spark"].stop()

    check([{**row, "image": bytes(row["image"]), "mask": bytes(row["mask"])} for row in rows], samples)
    check_boxes(rows, samples)


@pytest.mark.long
def test_croissant(opened, samples):
    """The file is valid, and its reader gives the records of a split and the names of classes."""
    pytest.importorskip("mlcroissant")

    found = opened("mlcroissant", "parquet")
    rows = [{name.removeprefix("train/"): value for name, value in row.items()} for row in found["records"]]
    names = [row["label:classes/name"] for row in found["dataset"].records("label:classes")]

    assert not found["dataset"].metadata.ctx.issues.errors
    assert all(isinstance(row[name], Image.Image) for row in rows for name in ("image", "mask"))
    assert tuple(map(text, names)) == streets.CLASSES
    check(rows, samples)
    check_boxes(rows, samples)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "webdataset", "arrayrecord"])
def test_croissant_is_valid_without_fields(directory, name):
    """It describes the files alone where the vocabulary does not know the format of the records."""
    mlcroissant = pytest.importorskip("mlcroissant")
    if name == "arrayrecord":
        pytest.importorskip("array_record")

    dataset = mlcroissant.Dataset(os.fspath(directory(name) / "croissant.json"))

    assert not dataset.metadata.ctx.issues.errors
    assert {files.name.partition("-")[0] for files in dataset.metadata.distribution} == set(streets.NUM_ROWS)
