"""`ImportWriter`: existing datasets written as shards."""

from __future__ import annotations

import collections
import json
import threading

import numpy as np
import pytest
import small_pairs

from datamat import (
    BBoxes,
    ClassLabel,
    CorruptDataError,
    DataSource,
    FingerprintError,
    Image,
    Manifest,
    Mask,
    Materializer,
    OptionError,
    SampleError,
    Scalar,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
    verify,
)
from datamat.codecs import encode_jpeg, encode_png
from datamat.formats.example import encode_example
from datamat.formats.tfrecord import frame
from datamat.testing import DataSourceConformance
from datamat.writers.dataset import ImportWriter

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 8, 3), np.uint8)
LABELS = np.arange(6) % 3


def imported(source, output, writer=None, **options):
    options = {"workers": WorkerOptions(num_workers=1), **options}
    Materializer(writer or ImportWriter(), source, output, **options).run(progress=False)
    assert verify(output, deep=True).ok
    return load(output)


class Pictures:
    """A map-style dataset as torch has them."""

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, number):
        return PIXELS[number], int(LABELS[number])


class Signals(DataSource):
    """Has keys, splits, a declared feature, and an identity that stands for its content."""

    def __init__(self, lengths, identity="signals-1"):
        self.features = {"signal": Tensor((None,), "float32")}
        self.lengths = lengths
        self.identity = identity

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, position):
        return {"signal": np.full(self.lengths[position], position, np.float32), "loud": position > 1}

    def keys_and_splits(self):
        for position, length in enumerate(self.lengths):
            yield f"take-{position}-of-{length}", "val" if position == 0 else "train"


Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "source",
    [
        Pictures(),
        list(zip(PIXELS, LABELS, strict=True)),
        (PIXELS, LABELS),
        {"x": PIXELS, "y": LABELS},
        [{"x": picture, "y": label} for picture, label in zip(PIXELS, LABELS, strict=True)],
        [Pair(picture, label) for picture, label in zip(PIXELS, LABELS, strict=True)],
    ],
)
def test_samples_of_every_kind_of_dataset_are_stored(tmp_path, source):
    """Each is stored exactly once, under its position."""
    data = imported(source, tmp_path / "out")

    assert sorted(data.keys()) == [f"{number:08d}" for number in range(6)]
    assert data.features["x"] == Image((None, None, 3))
    for number in range(6):
        sample = data[f"{number:08d}"]
        assert np.array_equal(sample["x"], PIXELS[number])
        assert sample["y"] == LABELS[number]


def test_arrays_of_single_values_and_nested_dicts_have_names(tmp_path):
    """`x` for one value; a dict in a dict stays one; or the user's own names."""
    one = imported(np.arange(4.0), tmp_path / "one")
    nested = imported([{"a": {"b": 1, "c": [1.5, 2.5]}}], tmp_path / "nested")
    named = imported((PIXELS, LABELS), tmp_path / "named", ImportWriter("mine", names=("image", "label")))

    assert one["00000003"]["x"] == 3
    assert (nested[0]["a"]["b"], nested[0]["a"]["c"].tolist()) == (1, [1.5, 2.5])
    assert set(named.features) == {"key", "image", "label"}
    assert Manifest.read(tmp_path / "named").name == "mine"
    with pytest.raises(SourceError, match="names are a, but a sample has 2 values"):
        imported((PIXELS, LABELS), tmp_path / "wrong", ImportWriter(names=("a",)))


def test_data_source_brings_its_keys_splits_and_features(tmp_path):
    """Fields that it declares have that feature; the first sample decides the others."""
    imported(Signals([3, 1, 2]), tmp_path / "out")

    train, val = (load(tmp_path / "out", split) for split in ("train", "val"))

    assert sorted(train.keys()) == ["take-1-of-1", "take-2-of-2"]
    assert val.keys() == ["take-0-of-3"]
    assert (train.features["signal"], train.features["loud"]) == (Tensor((None,), "float32"), Scalar("bool"))
    assert train["take-2-of-2"]["signal"].tolist() == [2, 2]


def test_identity_of_a_data_source_decides_what_is_rebuilt(tmp_path):
    """Equal identities stand for equal content; None stands for the object with its attributes."""

    def did_nothing(source, output):
        return (
            Materializer(ImportWriter(), source, output, workers=WorkerOptions(num_workers=1))
            .run(progress=False)
            .did_nothing
        )

    assert not did_nothing(Signals([3, 1]), tmp_path / "named")
    assert did_nothing(Signals((3, 1)), tmp_path / "named")
    assert not did_nothing(Signals([3, 1], "signals-2"), tmp_path / "named")

    assert not did_nothing(Signals([3, 1], None), tmp_path / "whole")
    assert did_nothing(Signals([3, 1], None), tmp_path / "whole")
    assert not did_nothing(Signals([3, 2], None), tmp_path / "whole")


def test_data_sources_may_be_given_by_split(tmp_path):
    """The split of the dict wins, and prefixes the key."""
    data = imported({"a": Signals([3], None), "b": Signals([2, 1], None)}, tmp_path / "out")

    assert sorted(data.keys()) == ["a-take-0-of-3", "b-take-0-of-2", "b-take-1-of-1"]


class TestSignals(DataSourceConformance):
    """A source with keys, splits and a declared feature."""

    def make_source(self):
        return Signals([3, 1, 2, 4, 1])


class TestMapStyle(DataSourceConformance):
    """An object with a length and items."""

    def make_source(self):
        return Pictures()


class Tensorlike:
    """What torch and TensorFlow have in common."""

    def __array__(self, dtype=None, copy=None):
        return np.array([97, 98], dtype)


def test_pillow_pictures_and_tensors_are_stored(tmp_path):
    """So is whatever numpy can convert to an array."""
    pillow = pytest.importorskip("PIL.Image", reason="it makes the pictures")
    pictures = [pillow.fromarray(PIXELS[0]), pillow.fromarray(PIXELS[1]).convert("P").convert("RGB")]

    data = imported([{"image": picture, "alpha": Tensorlike()} for picture in pictures], tmp_path / "out")

    assert np.array_equal(data["00000000"]["image"], PIXELS[0])
    assert data["00000000"]["alpha"].tolist() == [97, 98]


def test_key_of_the_samples_is_not_stored_twice(tmp_path):
    """The field becomes the key."""
    source = [{"id": f"row {number}", "x": number} for number in range(3)]

    data = imported(source, tmp_path / "out", ImportWriter(key="id"))

    assert set(data.features) == {"key", "x"}
    assert data["row 2"]["x"] == 2


def test_splits_come_from_a_dict(tmp_path):
    """They may be datasets of any kind."""
    imported({"train": (PIXELS, LABELS), "test": [(PIXELS[0], 2)]}, tmp_path / "out")

    assert load(tmp_path / "out", "test").keys() == ["test-00000000"]
    assert len(load(tmp_path / "out", "train")) == 6


def test_declared_features_and_copies_apply(tmp_path):
    """They apply as with any writer."""

    def flip(sample, rng):
        return {**sample, "x": np.ascontiguousarray(sample["x"][:, :: int(rng.choice([-1, 1]))])}

    features = {"x": Image((5, 8, 3)), "y": ClassLabel(names=("a", "b", "c"))}

    data = imported((PIXELS, LABELS), tmp_path / "out", ImportWriter(features=features), transform=flip, copies=2)

    assert len(data) == 12
    assert data.features["y"] == features["y"]


def test_finished_directory_keeps_the_bytes_of_its_pictures(tmp_path):
    """JPEG bytes, too, which would change if they were decoded; features are those of the directory."""
    files = [encode_jpeg(picture) for picture in PIXELS]
    features = {"image": Image(encoding="jpeg"), "label": ClassLabel(names=("a", "b", "c")), "boxes": BBoxes()}
    boxes = np.array([[0, 0, 0.5, 1]], np.float32)
    source = [{"image": file, "label": 1, "boxes": boxes} for file in files]
    first = imported(source, tmp_path / "first", ImportWriter(features=features))

    second = imported(tmp_path / "first", tmp_path / "second")

    assert second.features == first.features
    assert (
        small_pairs.digests(tmp_path / "second")["data-train-00000-of-00001.tfrecord"]
        == (small_pairs.digests(tmp_path / "first")["data-train-00000-of-00001.tfrecord"])
    )


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_output_is_the_same_for_any_number_of_workers(tmp_path, start_method):
    """The dataset travels to them."""
    one = tmp_path / "one"
    imported(Pictures(), one)
    imported(Pictures(), tmp_path / "two", workers=WorkerOptions(num_workers=2, start_method=start_method))

    assert small_pairs.digests(tmp_path / "two") == small_pairs.digests(one)


def test_changed_content_is_rebuilt_and_equal_content_is_not(tmp_path):
    """The content of the object decides, or the version that stands for it."""

    def written(source, **options):
        writer = ImportWriter(**options)
        return Materializer(writer, source, tmp_path / "out", workers=WorkerOptions(num_workers=1)).run(progress=False)

    first, same, other = written([1, 2]), written([1, 2]), written([1, 3])
    named, renamed = written([1, 3], version="1"), written([1, 4], version="1")

    assert [run.num_shards_written for run in (first, same, other, named, renamed)] == [1, 0, 1, 1, 0]


class Locked(Pictures):
    """A dataset that holds an open file."""

    def __init__(self, path):
        self.file = open(path, "wb")  # noqa: SIM115 -- the test closes it
        self.lock = threading.Lock()


def test_content_without_an_identity_is_an_error_with_a_remedy(tmp_path):
    """The remedy is a version; an object that cannot be sent to a worker is named."""
    dataset = Locked(tmp_path / "x")

    with dataset.file:
        with pytest.raises(FingerprintError, match=r"file.*pass ImportWriter\(version='1'\)"):
            imported(dataset, tmp_path / "out")
        ImportWriter(version="1").bind(dataset)


def test_malformed_datasets_are_refused(tmp_path):
    """The error comes before anything is written."""
    with pytest.raises(SourceError, match="has no samples"):
        imported([], tmp_path / "out")
    with pytest.raises(OptionError, match="pass it as source="):
        ImportWriter().read(next(iter(ImportWriter().index([1]))))
    with pytest.raises(SampleError, match="field 'y'"):
        imported([{"x": 1}, {"x": 1, "y": 2}], tmp_path / "out")


def _tfds(folder, features, records, kinds, **info):
    """Write a directory as TFDS 4.9 prepares it."""
    folder.mkdir()
    split = {"name": "train", "shardLengths": ["1", str(len(records) - 1)], "numBytes": "1"}
    (folder / "dataset_info.json").write_text(
        json.dumps({"name": "mine", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split], **info})
    )
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    payloads = [encode_example(record, kinds) for record in records]
    for number, some in enumerate((payloads[:1], payloads[1:])):
        data = b"".join(b"".join(frame([payload], len(payload))) for payload in some)
        (folder / f"mine-train.tfrecord-0000{number}-of-00002").write_bytes(data)
    return folder


def _kind(kind, **content):
    return {"pythonClassName": f"tensorflow_datasets.core.features.{kind}", **content}


FEATURES = {
    "image": _kind("image_feature.Image", image={"shape": {"dimensions": ["-1", "-1", "3"]}, "encodingFormat": "png"}),
    "mask": _kind("labeled_image.LabeledImage", image={"shape": {"dimensions": ["-1", "-1", "1"]}, "dtype": "uint8"}),
    "name": _kind("text_feature.Text", text={}),
    "frac": _kind("scalar.Scalar", tensor={"shape": {}, "dtype": "float32", "encoding": "none"}),
    "pose": _kind("tensor_feature.Tensor", tensor={"shape": {"dimensions": ["2"]}, "dtype": "int32"}),
    "raw": _kind(
        "tensor_feature.Tensor", tensor={"shape": {"dimensions": ["2"]}, "dtype": "int16", "encoding": "bytes"}
    ),
    "objects": _kind(
        "sequence_feature.Sequence",
        sequence={
            "length": "-1",
            "feature": _kind(
                "features_dict.FeaturesDict",
                featuresDict={
                    "features": {
                        "bbox": _kind("bounding_boxes.BBoxFeature", boundingBox={"dtype": "float32"}),
                        "label": _kind("class_label_feature.ClassLabel", classLabel={"numClasses": "2"}),
                    }
                },
            ),
        },
    ),
}
KINDS = {"image": "bytes", "mask": "bytes", "name": "bytes", "frac": "float32", "pose": "int64", "raw": "bytes"}
KINDS |= {"objects/bbox": "float32", "objects/label": "int64"}


def _record(number):
    return {
        "image": encode_png(PIXELS[number]),
        "mask": encode_png(PIXELS[number, ..., 0] % 2),
        "name": f"größer {number}".encode(),
        "frac": np.array([number / 4], np.float32),
        "pose": np.array([number, -1]),
        "raw": np.array([number, -2], "<i2").tobytes(),
        "objects/bbox": np.tile(np.array([0, 0, 0.5, 1], np.float32), number),
        "objects/label": np.arange(number) % 2,
    }


@pytest.mark.parametrize("form", ["featuresDict", "content"])
def test_directory_of_tfds_is_read_without_it(tmp_path, form):
    """Every kind of feature, class names from the file beside it, samples from every shard."""
    source = _tfds(tmp_path / "tfds", FEATURES, [_record(number) for number in range(3)], KINDS)
    (source / "objects-label.labels.txt").write_text("car\nbus\n")
    if form == "content":  # as the sidecars of datamat have it
        (source / "features.json").write_text(json.dumps({"content": {"features": FEATURES}}))

    data = imported(source, tmp_path / "out")

    assert {name: feature for name, feature in data.features.items() if name != "key"} == {
        "image": Image(),
        "mask": Mask(),
        "name": Text(),
        "frac": Scalar("float32"),
        "pose": Tensor((2,), "int32"),
        "raw": Tensor((2,), "int16"),
        "objects/bbox": BBoxes(),
        "objects/label": ClassLabel(names=("car", "bus"), shape=(None,)),
    }
    for number in range(3):
        sample = data[f"train-{number:08d}"]
        assert np.array_equal(sample["image"], PIXELS[number])
        assert (sample["name"], sample["frac"]) == (f"größer {number}", number / 4)
        assert (sample["pose"].tolist(), sample["raw"].tolist()) == ([number, -1], [number, -2])
        assert (len(sample["objects"]["bbox"]), sample["objects"]["label"].tolist()) == (number, [0, 1][:number])


def test_damaged_directory_of_tfds_is_reported(tmp_path):
    """A damaged record with its file; a wrong count; and a kind that is not supported."""
    source = _tfds(tmp_path / "tfds", FEATURES, [_record(number) for number in range(3)], KINDS)
    shard = source / "mine-train.tfrecord-00001-of-00002"
    data = bytearray(shard.read_bytes())
    flipped = bytearray(data)
    flipped[-9] ^= 1

    shard.write_bytes(flipped)
    with pytest.raises(SampleError, match=f"{shard.name}: record 1 is damaged: [^;]+; prepare it again"):
        imported(source, tmp_path / "out")
    shard.write_bytes(data + data)
    with pytest.raises((SampleError, CorruptDataError), match=r"holds 4 records, dataset_info\.json says 2"):
        imported(source, tmp_path / "out")
    shard.unlink()
    with pytest.raises(
        SourceError, match=f"{shard.name}: No such file or directory; copy the shard, or prepare the dataset again"
    ):
        imported(source, tmp_path / "out")


def test_record_of_tfds_without_a_field_is_named(tmp_path):
    """It was prepared with other features than the folder says."""
    kinds = {name: kind for name, kind in KINDS.items() if name != "frac"}
    records = [{name: value for name, value in _record(number).items() if name in kinds} for number in range(2)]
    source = _tfds(tmp_path / "tfds", FEATURES, records, kinds)

    with pytest.raises(CorruptDataError, match=r"record 0 is damaged: it has no 'frac'.*; prepare it again"):
        imported(source, tmp_path / "out")


def test_tfds_feature_without_a_counterpart_is_refused(tmp_path):
    """The error has the name of the feature, and the remedy."""
    for number, spec in enumerate([_kind("video_feature.Video"), _kind("audio_feature.Audio", audio={})]):
        source = _tfds(tmp_path / f"tfds{number}", {"clip": spec}, [_record(0), _record(1)], KINDS)
        with pytest.raises(SourceError, match=r"feature 'clip' is (Video|Audio), which is not read here; open"):
            imported(source, tmp_path / "out")
    source = _tfds(tmp_path / "riegeli", FEATURES, [_record(0), _record(1)], KINDS, fileFormat="riegeli")
    with pytest.raises(SourceError, match="its shards are riegeli; want tfrecord or array_record"):
        imported(source, tmp_path / "out")
