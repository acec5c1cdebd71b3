"""Feature types of other packages: through every format and reader, or refused before a run begins."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pytest
from round_trip import materialize

import datamat
from datamat import DatasetWriter, Features, Image, IndexRow, ListOf, Materializer, Nullable, Scalar, WorkerOptions
from datamat.directory.sidecars.tfds import tfds_entries
from datamat.errors import MissingDependencyError, OptionError, SchemaError
from datamat.features import ArrowType, Feature, Geometry, register_feature, registry
from datamat.readers.tf import TfOptions, in_python, tf_field
from datamat.testing import FeatureConformance

PACKAGE = pathlib.Path(__file__).parents[1] / "plugin_package"
FORMATS = ["tfrecord", "webdataset", "parquet"]
SOUNDS = [np.linspace(-1, 1, 2 * number + 2, dtype=np.float32).reshape(-1, 2) for number in range(6)]


@dataclasses.dataclass(frozen=True)
class Celsius(Feature):
    """A feature with only the required methods, stored in hundredths of a degree."""

    type = ArrowType("int64")

    def value_type(self):
        return "float64", ()

    def encode(self, value):
        return np.array([round(value * 100)])

    def decode(self, column):
        return np.float64(column[0] / 100)


@dataclasses.dataclass(frozen=True)
class Pairs(Feature):
    """A feature of an Arrow type, `encode` and `decode` alone."""

    type = pa.list_(pa.list_(pa.int16(), 2))

    def encode(self, value):
        if not isinstance(value, np.ndarray) or value.dtype != np.int16 or value.shape[1:] != (2,):
            raise SchemaError(f"the field is declared {self.declared()} but the sample holds {value!r}")
        return value.reshape(-1).astype(np.int64)

    def decode(self, column):
        return np.asarray(column).astype(np.int16).reshape(-1, 2)


PAIRS = [np.arange(4, dtype=np.int16).reshape(2, 2), np.empty((0, 2), np.int16), np.full((1, 2), -9, np.int16)]


class TestPairs(FeatureConformance):
    """Every format, reader and client derives what it needs from the Arrow type."""

    def make_feature(self):
        return Pairs()

    def make_values(self):
        return PAIRS

    def make_wrong_values(self):
        return [np.zeros((1, 3), np.int16), "text"]


class TestPairsThatMayBeMissing(FeatureConformance):
    """A value without numbers is not missing."""

    def make_feature(self):
        return Nullable(register_feature(Pairs)())

    def make_values(self):
        return [*PAIRS, None]


class TestListsOfCelsius(FeatureConformance):
    """Items that are stored as integers, and read back as one array."""

    def make_feature(self):
        return ListOf(register_feature(Celsius)())

    def make_values(self):
        return [[36.5, -1.25], [], [0.0]]

    def make_wrong_values(self):
        return ["text", 5]


@pytest.fixture(autouse=True)
def no_other_types(monkeypatch):
    """Leave the registered classes as they were."""
    monkeypatch.setattr(registry, "_registered", {})


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put the files of an installed package on the path, and return its module."""
    site = tmp_path / "site"
    info = site / "datamat_squares-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(PACKAGE / "datamat_squares.py", site)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: datamat-squares\nVersion: 1.0\n")
    (info / "RECORD").write_text("datamat_squares.py,,\n")
    (info / "entry_points.txt").write_text("[datamat.features]\nWaveform = datamat_squares:Waveform\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(__import__("sys").modules, "datamat_squares", raising=False)
    return importlib.import_module("datamat_squares")


def sound(number):
    """Return the sample of a number."""
    return {"sound": SOUNDS[number], "degrees": number / 4, "maybe": number / 4 if number % 2 else None}


def write(folder, module, format_name):
    """Write six sounds and temperatures."""
    register_feature(Celsius)
    features = Features({"sound": module.Waveform(channels=2), "degrees": Celsius(), "maybe": Nullable(Celsius())})
    materialize(sound, range(6), folder, features=features, format=format_name)
    return folder


def check(sample, number):
    """Compare a sample with what was written."""
    np.testing.assert_array_equal(np.asarray(sample["sound"]), SOUNDS[number])
    assert float(sample["degrees"]) == number / 4


def numbered(sample):
    """Return the number of a sample, by its length."""
    return len(sample["sound"]) - 1


@pytest.mark.parametrize("format_name", FORMATS)
def test_foreign_feature_goes_through_every_format_and_reader(tmp_path, installed, format_name):
    """It is written, read by record and in batches, verified, drawn, exported and inspected."""
    folder = write(tmp_path / "out", installed, format_name)
    registry._registered.clear()
    register_feature(Celsius)

    dataset = datamat.load(folder, "train")

    assert dataset.features["sound"] == installed.Waveform(channels=2)
    for sample in dataset:
        check(sample, numbered(sample))
    assert {numbered(sample): sample["maybe"] for sample in dataset} == {n: sound(n)["maybe"] for n in range(6)}
    (batch,) = dataset.to_numpy(batch_size=6)
    assert batch["degrees"].tolist() == [(len(one) - 1) / 4 for one in batch["sound"]]
    assert datamat.verify(folder).ok
    assert (dataset.preview(2).array != 255).any()
    datamat.export(folder)
    assert "sound" in str(datamat.describe(folder))


@pytest.mark.parametrize("format_name", ["tfrecord", "parquet"])
def test_foreign_feature_is_read_by_frameworks(tmp_path, installed, format_name):
    """Decoded values reach torch and `tf.data`, one by one and in batches."""
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    dataset = datamat.load(write(tmp_path / "out", installed, format_name), "train")

    (batch,) = dataset.to_torch(batch_size=6)
    for one, degrees in zip(batch["sound"], batch["degrees"], strict=True):
        check({"sound": one, "degrees": degrees}, len(one) - 1)
    seen = []
    for sample in dataset.to_tf():
        sample = {name: value.numpy() for name, value in sample.items()}
        check(sample, numbered(sample))
        seen.append(sample["key"])
    assert len({*seen}) == 6
    (batch,) = dataset.to_tf(batch_size=6)
    assert batch["sound"].shape.as_list() == [6, None, 2]
    assert dataset.to_tf().element_spec["sound"].shape.as_list() == [None, 2]


def test_clients_know_a_foreign_feature_by_its_arrow_type(tmp_path, installed):
    """Unless its package says more, as this one says to Croissant."""
    folder = write(tmp_path / "out", installed, ["tfrecord", "parquet"])

    entries = json.loads((folder / "features.json").read_text())["content"]["features"]
    pairs = tfds_entries(Pairs(), "pairs")["pairs"]["tensor"]
    fields = {
        field["source"]["extract"]["column"]: field["dataType"]
        for field in json.loads((folder / "croissant.json").read_text())["recordSet"][0]["field"]
    }

    assert "text" in entries["sound"] and entries["degrees"]["tensor"]["dtype"] == "int64"
    assert entries["maybe"]["sequence"]["feature"]["tensor"]["dtype"] == "int64"
    assert pairs["dtype"] == "int16" and pairs["shape"]["dimensions"] == ["-1", "2"]
    assert "- name: sound\n      dtype: binary\n" in (folder / "README.md").read_text()
    assert fields["sound"] == "sc:AudioObject" and fields["degrees"] == "sc:Integer"


def test_foreign_feature_is_converted(tmp_path, installed):
    """A conversion copies columns to every format, in a worker that registered no class."""
    source = write(tmp_path / "source", installed, "parquet")
    workers = WorkerOptions(num_workers=1, start_method="spawn")

    datamat.convert(source, tmp_path / "out", format=FORMATS, workers=workers, progress=False)

    for other in FORMATS:
        for sample in datamat.load(tmp_path / "out", "train", format=other):
            check(sample, numbered(sample))


def test_class_is_found_only_where_it_is_known(tmp_path, installed):
    """Without an entry point or registration, the error names the module of the class."""
    folder = write(tmp_path / "out", installed, "tfrecord")
    declared = json.loads((folder / "manifest.json").read_text())["features"]
    assert declared["sound"] == {"type": "Waveform", "module": "datamat_squares", "channels": 2}
    registry._registered.clear()

    with pytest.raises(MissingDependencyError, match=r"'degrees'.*'Celsius'.*test_foreign_features.*register_feature"):
        datamat.load(folder)
    register_feature(Celsius)
    shutil.rmtree(tmp_path / "site")
    registry._registered.pop("Waveform", None)
    with pytest.raises(MissingDependencyError, match=r"'sound'.*'Waveform'.*'datamat_squares'.*install"):
        datamat.load(folder)


@dataclasses.dataclass(frozen=True)
class Unregistered(Celsius):
    pass


class Incomparable(Celsius):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class OfBytes(Celsius):
    @property
    def type(self):
        return "int64"


class Elsewhere(Celsius):
    @property
    def type(self):
        return {"other": ArrowType("int64")}


class Oddly(Celsius):
    def value_type(self):
        return "str", ()


@dataclasses.dataclass(frozen=True)
class Unwritable(Celsius):
    limit: complex = 1j


class Unread(DatasetWriter):
    """A writer whose rows are never read."""

    name = "unread"

    def __init__(self, feature):
        self.features = Features({"degrees": feature})

    def index(self, source):
        return [IndexRow("a")]

    def read(self, row):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("feature", "error", "message"),
    [
        (Unregistered(), MissingDependencyError, "'degrees' .*register_feature"),
        (Incomparable(), SchemaError, "frozen dataclass"),
        (OfBytes(), SchemaError, "want an ArrowType"),
        (Elsewhere(), SchemaError, "type"),
        (Oddly(), SchemaError, "value_type"),
        (Unwritable(), SchemaError, "write arguments"),
    ],
)
def test_feature_that_lacks_something_is_refused_by_plan(tmp_path, feature, error, message):
    """`plan()` names what is missing before a row is read."""
    if error is SchemaError:
        register_feature(type(feature))

    with pytest.raises(error, match=message):
        Materializer(Unread(feature), "x", tmp_path / "out").plan()


class Listed(Celsius):
    def encode(self, value):
        return [value]


def test_columns_that_only_some_formats_hold_are_refused():
    """A bytes column holds one value and a column of numbers is an array, in every format."""
    with pytest.raises(
        SchemaError, match=r"'t': encode of .*Listed gives list for the column 't'; want a 1-D int64 array"
    ):
        Features({"t": Listed()}).encode({"key": "a", "t": 1.0})


def test_names_are_given_once():
    """A second class with the same name is refused; the same class may be defined again."""
    register_feature(Celsius)
    register_feature(Celsius)

    class Other(Celsius):
        type_name = "Celsius"

    class Image(Celsius):
        pass

    for taken in (Other, Image):
        with pytest.raises(SchemaError, match="set type_name"):
            register_feature(taken)
    with pytest.raises(SchemaError, match=r"not a subclass of datamat\.features\.Feature"):
        register_feature(int)


def test_edit_of_a_foreign_class_rebuilds(tmp_path, monkeypatch):
    """The code of the class counts, like that of the writer, because it decides bytes."""
    register_feature(Celsius)
    features = Features({"degrees": Celsius()})

    def run():
        return materialize(lambda n: {"degrees": n / 4}, range(6), tmp_path / "out", features=features)

    run()
    assert run().did_nothing
    monkeypatch.setattr(Celsius, "encode", lambda self, value: np.array([round(value * 1000)]))
    assert run().num_shards_written == 1


def test_foreign_field_follows_the_image(tmp_path):
    """A field with a `target` is transformed with the image."""
    albumentations = pytest.importorskip("albumentations")
    register_feature(Disparity)
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=1.0)])
    features = Features({"image": Image((4, 4, 3)), "disparity": Disparity()})
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)

    def fn(number):
        return {"image": image, "disparity": image[..., 0]}

    materialize(fn, range(2), tmp_path / "out", features=features, transform=flip)

    (sample, _) = datamat.load(tmp_path / "out")
    np.testing.assert_array_equal(sample["disparity"], image[:, ::-1, 0])


@dataclasses.dataclass(frozen=True)
class Disparity(Feature, Geometry):
    """A disparity map of fixed shape, stored raw, moved like a mask and decoded in blocks."""

    @property
    def type(self):
        return ArrowType("uint8", (4, 4), is_raw=True)

    def encode(self, value):
        return value.tobytes()

    def decode(self, column):
        return np.frombuffer(column if isinstance(column, bytes) else column[0], np.uint8).reshape(4, 4)

    def target(self):
        return "mask"


tf_field.register(Disparity)(lambda feature: in_python(feature, block="python"))


def test_foreign_feature_of_fixed_shape_is_decoded_in_blocks(tmp_path):
    """Threads decode it through `decode_into`; a service, whose workers run no Python, is refused."""
    pytest.importorskip("tensorflow")
    register_feature(Disparity)
    maps = np.random.default_rng(0).integers(0, 256, (6, 4, 4), np.uint8)
    features = Features({"disparity": Disparity(), "number": Scalar("int64")})
    materialize(lambda n: {"disparity": maps[n], "number": n}, range(6), tmp_path / "out", features=features)
    dataset = datamat.load(tmp_path / "out")

    (batch,) = dataset.to_tf(batch_size=6)

    np.testing.assert_array_equal(batch["disparity"].numpy(), maps[batch["number"].numpy()])
    with pytest.raises(OptionError, match=r"field 'disparity'.*register a function for Disparity"):
        dataset.to_tf(tf=TfOptions(service="grpc://localhost:1"))


SCALED = """
import dataclasses
import numpy as np
from datamat.features import ArrowType, Feature

SCALE = 10


@dataclasses.dataclass(frozen=True)
class Scaled(Feature):
    @property
    def type(self):
        return ArrowType("int64")

    def value_type(self):
        return "float64", ()

    def encode(self, value):
        return np.array([round(value * SCALE)])

    def decode(self, column):
        return column[0] / SCALE
"""


def test_module_state_that_a_feature_reads_reaches_workers(tmp_path, monkeypatch):
    """Workers encode with the value that the program has set, not with that in the source."""
    (tmp_path / "scaled_feature.py").write_text(SCALED)
    monkeypatch.syspath_prepend(str(tmp_path))
    scaled_feature = importlib.import_module("scaled_feature")
    scaled_feature.SCALE = 1000
    features = Features({"x": register_feature(scaled_feature.Scaled)()})
    workers = WorkerOptions(num_workers=1, start_method="spawn")

    datamat.materialize(
        lambda number: {"x": number + 0.125},
        range(2),
        tmp_path / "out",
        features=features,
        workers=workers,
        progress=False,
    )

    assert sorted(float(sample["x"]) for sample in datamat.load(tmp_path / "out")) == [0.125, 1.125]
