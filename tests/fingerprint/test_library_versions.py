"""Versions of packages that decide bytes count for the shards that use them, and for no others."""

import importlib.util
import random
import subprocess
import sys
import textwrap
import zlib

import albumentations
import numpy as np
import pytest
import small_pairs
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Manifest,
    Mask,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    Text,
)
from datamat.fingerprint import code
from datamat.plan.digests import JobDigests
from datamat.plan.pipeline import Pipeline
from datamat.testing import InlineExecutor


class Pictures(DatasetWriter):
    name = "pictures"
    features = Features({"image": Image((8, 8, 3), encoding="jpeg")})
    bad = -1

    def index(self, source):
        return [IndexRow(f"{n:03d}", "val" if n % 4 == 0 else "train", {"n": n}) for n in range(40)]

    def read(self, row):
        if row.fields["n"] == self.bad:
            raise ValueError("bad")
        return {"image": np.full((8, 8, 3), row.fields["n"], np.uint8)}


class Masks(Pictures):
    features = Features({"mask": Mask((8, 8))})

    def read(self, row):
        return {"mask": bytes(row.fields["n"])}


class Lines(Pictures):
    features = Features({"text": Text(), "n": Scalar("int64")})

    def read(self, row):
        return {"text": str(row.fields["n"]), "n": row.fields["n"]}


def brighten(sample, rng):
    return {**sample, "image": sample["image"] + np.uint8(rng.integers(9))}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that gives this process another version of a distribution."""

    def install(name, version, module):
        described = tmp_path / "site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (described / "top_level.txt").write_text(f"{module}\n")
        monkeypatch.syspath_prepend(str(described.parent))
        forget()

    def forget():
        code._version.cache_clear()
        code.origin_of_file.cache_clear()

    forget()
    yield install
    monkeypatch.undo()
    forget()


def job(tmp_path, writer, **options):
    given = {"shards": ShardOptions(num_shards=2), "executor": InlineExecutor()}
    return Prepared(writer, None, tmp_path / type(writer).__name__, **{**given, **options})


def changes_by_split(status):
    return {str(change).partition("-")[2].partition("-")[0]: list(change.reasons) for change in status.changes}


def version_of(module):
    ((_, version),) = code.origin_of_module(module)
    return version


def test_another_opencv_rebuilds_the_shards_of_encoded_pictures(tmp_path, installed):
    """Only shards that used the package are rebuilt, and `status` says why."""
    before = version_of("cv2")
    for writer in (Pictures(), Lines()):
        job(tmp_path, writer).run(progress=False)
    installed("opencv-python-headless", "99.1", "cv2")

    reason = [f"opencv-python-headless changed ({before} -> 99.1)"]
    assert changes_by_split(job(tmp_path, Pictures()).status()) == {"train": reason, "val": reason}
    assert job(tmp_path, Lines()).status().changes == ()
    assert job(tmp_path, Lines()).run(progress=False).num_shards_written == 0
    assert job(tmp_path, Pictures()).run(progress=False).num_shards_written == 4
    assert job(tmp_path, Pictures()).status().changes == ()


def test_library_of_a_transform_concerns_the_splits_that_are_augmented(tmp_path, installed):
    """The packages that albumentations uses count, and numpy's generators."""
    options = {"copies": {"train": 2}, "transform": albumentations.Compose([albumentations.HorizontalFlip()])}
    job(tmp_path, Pictures(), **options).run(progress=False)
    old = version_of("albucore")
    installed("albucore", "99.2", "albucore")

    assert changes_by_split(job(tmp_path, Pictures(), **options).status()) == {
        "train": [f"albucore changed ({old} -> 99.2)"]
    }


def test_parts_made_with_another_version_are_not_reused(tmp_path, installed):
    """No shard mixes images of two encoders."""
    options = {"shards": ShardOptions(num_shards=1)}
    for upgraded in (False, True):
        writer = Pictures()
        last = job(tmp_path / str(upgraded), writer, **options)
        writer.bad = 21
        with pytest.raises(SampleError):
            job(tmp_path / str(upgraded), writer, **options, version=1).run(progress=False)
        writer.bad = -1
        if upgraded:
            installed("opencv-python-headless", "99.3", "cv2")

        report = job(tmp_path / str(upgraded), writer, **options, version=1).run(progress=False)

        assert last.output.is_dir() and report.is_complete
        assert (report.num_parts_resumed == 0) is upgraded


@pytest.mark.parametrize(
    ("writer", "format_name", "plain", "drawn"),
    [
        (Lines(), "tfrecord", set(), {"numpy"}),
        (Lines(), "webdataset", set(), {"numpy"}),
        (Lines(), "parquet", {"pyarrow"}, {"numpy"}),
        (Lines(), "tfrecord.gz", {"zlib"}, {"numpy"}),
        (Masks(), "tfrecord", {"zlib"}, {"numpy", "zlib"}),
        (
            Pictures(),
            "tfrecord",
            {"opencv-python-headless"},
            {"numpy", "opencv-python-headless", "simplejpeg"},
        ),
    ],
)
def test_packages_are_those_of_fields_format_and_drawing(writer, format_name, plain, drawn):
    """A table of text depends on no image library."""
    from datamat.formats import get_format

    found = JobDigests.of(Pipeline.of(writer, None, 0), [get_format(format_name).with_features(writer.features)], 0)

    assert {name for name in found.packages if not name.startswith("datamat.")} - {"Python", "numpy"} == plain
    assert {name for name in found.drawn_packages if not name.startswith("datamat.")} == drawn
    assert ("datamat.codecs" in found.packages) is not isinstance(writer, Lines)


def test_another_version_of_datamat_rebuilds_nothing(tmp_path, monkeypatch):
    """The version of datamat does not count; the OUTPUT_VERSION of each part in use does."""
    from datamat import transforms
    from datamat.formats import tfrecord

    options = {"copies": {"train": 2}, "transform": brighten}
    job(tmp_path, Pictures(), **options).run(progress=False)
    monkeypatch.setattr("datamat.__version__", "99.0")
    assert job(tmp_path, Pictures(), **options).status().changes == ()

    for module, splits in ((transforms, {"train"}), (tfrecord, {"train", "val"})):
        with monkeypatch.context() as patch:
            patch.setattr(module, "OUTPUT_VERSION", 2)
            code.origin_of_file.cache_clear()
            reasons = changes_by_split(job(tmp_path, Pictures(), **options).status())
        code.origin_of_file.cache_clear()
        name = module.__name__
        assert reasons == {key: [f"the output format of {name} changed (1 -> 2)"] for key in splits}


# ---- version=


class Learner(Lines):
    """A writer whose code and attributes change."""

    def __init__(self, weight):
        self.weight = weight

    def read(self, row):
        return {**super().read(row), "n": row.fields["n"] + self.weight}


def test_version_stands_for_code_and_attributes(tmp_path):
    """Where a version is given, only another version rebuilds shards, and `status` says so."""
    first = Learner(1)
    first.stream = iter([1, 2])  # what no fingerprint can count
    job(tmp_path, first, version="1").run(progress=False)

    assert job(tmp_path, Learner(2), version="1").status().changes == ()
    assert job(tmp_path, Learner(2), version=1, copies=2, transform=None).status().changes != ()
    reasons = changes_by_split(job(tmp_path, Learner(1), version=2).status())
    assert reasons == {key: ["version changed (1 -> 2)"] for key in ["train", "val"]}
    reasons = changes_by_split(job(tmp_path, Learner(1)).status())
    assert reasons == {key: ["version changed (1 -> none)"] for key in ["train", "val"]}


def test_version_stands_for_a_transform(tmp_path):
    """Its closure may hold anything."""

    def made(amount):
        return lambda sample, rng: {**sample, "n": sample["n"] + amount + rng.integers(2)}

    job(tmp_path, Lines(), transform=made(1), version="a").run(progress=False)

    assert job(tmp_path, Lines(), transform=made(2), version="a").status().changes == ()
    assert job(tmp_path, Lines(), transform=made(1), version="b").status().changes != ()


@pytest.mark.parametrize("version", [True, 1.5, b"1", ["1"]])
def test_version_is_text_or_a_number(tmp_path, version):
    """Otherwise, two values that print alike could mean different things."""
    with pytest.raises(OptionError, match=r"version is .*; want a str or an int"):
        job(tmp_path, Lines(), version=version)


# ---- environment


def test_environment_variable_is_named_and_its_value_written_nowhere(tmp_path, monkeypatch):
    """The value may be a secret."""
    secret = f"{random.SystemRandom().getrandbits(64):x}"
    (tmp_path / "reads_setting.py").write_text(
        textwrap.dedent("""
        import os
        from test_library_versions import Lines
        class Writer(Lines):
            def read(self, row):
                return {"text": str(len(os.environ["SETTING"])), "n": row.fields["n"]}
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SETTING", secret)
    from reads_setting import Writer

    first = job(tmp_path, Writer())
    first.run(progress=False)
    monkeypatch.setenv("SETTING", "other")

    reasons = changes_by_split(job(tmp_path, Writer()).status())
    assert reasons == {key: ["environment variable SETTING changed"] for key in ["train", "val"]}
    written = b"".join(path.read_bytes() for path in first.output.rglob("*") if path.is_file())
    assert secret.encode() not in written


def test_codecs_that_a_writer_calls_count_with_their_libraries():
    """A job that only reads files depends on no decoder; one that draws or decodes does."""
    from datamat import codecs
    from datamat.codecs import decode_image, read_file
    from datamat.fingerprint import examine
    from datamat.writers.pedestrian import PedestrianWriter

    pictures = {"opencv-python-headless", "simplejpeg", "zlib"}
    cases = [
        (lambda path: read_file(path), set()),
        (lambda data: decode_image(data), pictures),
        (lambda data: codecs.decode_image(data), pictures),
        (PedestrianWriter, {"opencv-python-headless"}),
    ]

    for decodes, wanted in cases:
        packages = set(examine(decodes, where="read").packages)
        assert {name for name in packages if not name.startswith("datamat.")} == wanted


def test_version_of_zlib_does_not_depend_on_what_else_is_loaded(monkeypatch):
    """TensorFlow bundles another zlib, which reports its own version through Python's module."""
    wanted = code.versions_of(["zlib"])
    monkeypatch.setattr(zlib, "ZLIB_RUNTIME_VERSION", "0.0")

    assert code.versions_of(["zlib"]) == wanted


PROGRAM = """
import sys
import numpy as np
from datamat import Features, Mask, Scalar, Text, WorkerOptions, materialize

mode, output, method = sys.argv[1:]
workers = WorkerOptions(num_workers=2, start_method=method)
if mode == "text":
    fn, features = (lambda i: {"text": str(i), "n": i}), {"text": Text(), "n": Scalar("int64")}
else:
    fn, features = (lambda i: {"mask": np.full((8, 8), i, np.uint8)}), {"mask": Mask((8, 8))}
materialize(fn, range(20), output, features=Features(features), format=["tfrecord.gz"], workers=workers, progress=False)
print("cv2" in sys.modules)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "method"), [("text", "fork"), ("mask", "spawn")])
def test_manifest_does_not_depend_on_what_else_is_imported(tmp_path, mode, method):
    """TensorFlow bundles another zlib, whose version must not count; text does not load OpenCV."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    others = [name for name in ("zlib", "pandas", "scipy", "pyarrow") if importlib.util.find_spec(name)]
    imports = {"plain": "", "tensorflow": f"import tensorflow, {', '.join(others)}\n"}
    said = {}
    for name, first in imports.items():
        (tmp_path / "program.py").write_text(first + PROGRAM)
        arguments = [sys.executable, "program.py", mode, tmp_path / name, method]
        said[name] = subprocess.run(arguments, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert small_pairs.digests(tmp_path / "plain") == small_pairs.digests(tmp_path / "tensorflow")
    assert said["plain"] == "False\n"
    manifest = Manifest.read(tmp_path / "plain")
    assert "zlib" in {name.removeprefix("package.") for name in manifest.ingredients}
    assert set(manifest.made_by) == {"writer", "transform"}
