"""`ImportWriter`: existing datasets written as shards."""

import collections
import json

import numpy as np
import pytest
from foreign_files import tfds_kind, write_tfds
from prepared import Prepared

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
    load,
    verify,
)
from datamat.codecs import encode_jpeg, encode_png
from datamat.testing import DataSourceConformance, InlineExecutor
from datamat.writers.dataset import ImportWriter

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 8, 3), np.uint8)
LABELS = np.arange(6) % 3


def imported(source, output, writer=None, **options):
    job = Prepared(writer or ImportWriter(), source, output, executor=InlineExecutor(), **options)
    job.run(progress=False)
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
        job = Prepared(ImportWriter(), source, output, executor=InlineExecutor())
        return job.run(progress=False, existing="replace").did_nothing

    assert not did_nothing(Signals([3, 1]), tmp_path / "named")
    assert did_nothing(Signals((3, 1)), tmp_path / "named")
    assert not did_nothing(Signals([3, 1], "signals-2"), tmp_path / "named")

    assert not did_nothing(Signals([3, 1], None), tmp_path / "whole")
    assert did_nothing(Signals([3, 1], None), tmp_path / "whole")
    assert not did_nothing(Signals([3, 2], None), tmp_path / "whole")


class TestSignals(DataSourceConformance):
    """A source with keys, splits and a declared feature."""

    def make_source(self):
        return Signals([3, 1, 2, 4, 1])


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


def test_splits_come_from_a_dict(tmp_path):
    """They may be datasets of any kind; the split of the dict wins, and prefixes the key."""
    imported({"train": (PIXELS, LABELS), "test": [(PIXELS[0], 2)]}, tmp_path / "out")
    signals = imported({"a": Signals([3], None), "b": Signals([2, 1], None)}, tmp_path / "signals")

    assert load(tmp_path / "out", "test").keys() == ["test-00000000"]
    assert len(load(tmp_path / "out", "train")) == 6
    assert sorted(signals.keys()) == ["a-take-0-of-3", "b-take-0-of-2", "b-take-1-of-1"]


def test_finished_directory_keeps_the_bytes_of_its_pictures(tmp_path):
    """JPEG bytes would change if they were decoded; features are those of the directory."""
    features = {"image": Image(encoding="jpeg"), "label": ClassLabel(names=("a", "b", "c")), "boxes": BBoxes()}
    boxes = np.array([[0, 0, 0.5, 1]], np.float32)
    source = [{"image": encode_jpeg(picture), "label": 1, "boxes": boxes} for picture in PIXELS]
    first = imported(source, tmp_path / "first", ImportWriter(features=features))

    second = imported(tmp_path / "first", tmp_path / "second")

    assert second.features == first.features
    shard = "data-train-00000-of-00001.tfrecord"
    assert (tmp_path / "second" / shard).read_bytes() == (tmp_path / "first" / shard).read_bytes()


def test_key_of_the_samples_is_not_stored_twice(tmp_path):
    """The field becomes the key."""
    source = [{"id": f"row {number}", "x": number} for number in range(3)]

    data = imported(source, tmp_path / "out", ImportWriter(key="id"))

    assert set(data.features) == {"key", "x"}
    assert data["row 2"]["x"] == 2


def test_changed_content_is_rebuilt_and_equal_content_is_not(tmp_path):
    """The content of the object decides, or the version that stands for it."""

    def written(source, **options):
        writer = ImportWriter(**options)
        return Materializer(writer, source, tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    first, same, other = written([1, 2]), written([1, 2]), written([1, 3])
    named, renamed = written([1, 3], version="1"), written([1, 4], version="1")

    assert [run.num_shards_written for run in (first, same, other, named, renamed)] == [1, 0, 1, 1, 0]


def test_content_without_an_identity_is_an_error_with_a_remedy(tmp_path):
    """The remedy is a version; an attribute that has no content is named."""

    class Locked(Pictures):
        def __init__(self, file):
            self.file = file

    with open(tmp_path / "x", "wb") as file:
        with pytest.raises(FingerprintError, match=r"file.*pass ImportWriter\(version='1'\)"):
            imported(Locked(file), tmp_path / "out")
        ImportWriter(version="1").bind(Locked(file))


def test_malformed_datasets_are_refused(tmp_path):
    with pytest.raises(SourceError, match="no samples"):
        imported([], tmp_path / "out")
    with pytest.raises(OptionError, match="source="):
        ImportWriter().read(next(iter(ImportWriter().index([1]))))
    for samples in ([{"x": 1}, {"x": 1, "y": 2}], [{"x": 1, "y": 2}, {"x": 1}]):
        with pytest.raises(SampleError, match="field 'y'"):
            imported(samples, tmp_path / "out")


FEATURES = {
    "image": tfds_kind(
        "image_feature.Image", image={"shape": {"dimensions": ["-1", "-1", "3"]}, "encodingFormat": "png"}
    ),
    "mask": tfds_kind(
        "labeled_image.LabeledImage", image={"shape": {"dimensions": ["-1", "-1", "1"]}, "dtype": "uint8"}
    ),
    "name": tfds_kind("text_feature.Text", text={}),
    "frac": tfds_kind("scalar.Scalar", tensor={"shape": {}, "dtype": "float32", "encoding": "none"}),
    "pose": tfds_kind("tensor_feature.Tensor", tensor={"shape": {"dimensions": ["2"]}, "dtype": "int32"}),
    "raw": tfds_kind(
        "tensor_feature.Tensor", tensor={"shape": {"dimensions": ["2"]}, "dtype": "int16", "encoding": "bytes"}
    ),
    "objects": tfds_kind(
        "sequence_feature.Sequence",
        sequence={
            "length": "-1",
            "feature": tfds_kind(
                "features_dict.FeaturesDict",
                featuresDict={
                    "features": {
                        "bbox": tfds_kind("bounding_boxes.BBoxFeature", boundingBox={"dtype": "float32"}),
                        "label": tfds_kind("class_label_feature.ClassLabel", classLabel={"numClasses": "2"}),
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
    source = write_tfds(tmp_path / "tfds", FEATURES, [_record(number) for number in range(3)], KINDS)
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


def test_directory_of_tfds_that_is_not_whole_is_refused(tmp_path):
    """A shard with other records than the folder says, and one that is missing."""
    source = write_tfds(tmp_path / "tfds", FEATURES, [_record(number) for number in range(3)], KINDS)
    shard = source / "mine-train.tfrecord-00001-of-00002"
    data = shard.read_bytes()

    shard.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(SampleError, match=f"{shard.name}: record 1 is damaged"):
        imported(source, tmp_path / "out")
    shard.write_bytes(data + data)
    with pytest.raises((SampleError, CorruptDataError), match="4 records"):
        imported(source, tmp_path / "out")
    shard.unlink()
    with pytest.raises(SourceError, match=shard.name):
        imported(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("features", "info", "word"),
    [
        ({"clip": tfds_kind("video_feature.Video")}, {}, "'clip' is Video"),
        ({"clip": tfds_kind("audio_feature.Audio", audio={})}, {}, "'clip' is Audio"),
        (FEATURES, {"fileFormat": "riegeli"}, "riegeli"),
    ],
)
def test_directory_of_tfds_that_is_not_supported_is_refused(tmp_path, features, info, word):
    source = write_tfds(tmp_path / "tfds", features, [_record(0), _record(1)], KINDS, **info)

    with pytest.raises(SourceError, match=word):
        imported(source, tmp_path / "out")
