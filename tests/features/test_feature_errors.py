"""Blocks, declarations and feature types that cannot be right are refused."""

from __future__ import annotations

import dataclasses
import io
import sys

import numpy as np
import pytest
import xxhash
from small_rows import job

import datamat
from datamat import Features, ListOf, Nullable, SampleError, Scalar, Tensor
from datamat.errors import CorruptDataError, InputError, MissingDependencyError, SchemaError
from datamat.features import ArrowType, Feature, RaggedColumn, register_feature
from datamat.features.statistics import Statistics


class Odd(Feature):
    """A feature of somebody else: it is no dataclass, and encodes numbers of another type than it says."""

    type_name = "feature_errors_odd"

    @property
    def type(self):
        return ArrowType("int64")

    def encode(self, value):
        return np.zeros(1, np.float32)

    def encode_many(self, values):
        return np.zeros(len(values), np.float32)

    def decode(self, column):
        return column[0]


@register_feature
@dataclasses.dataclass(frozen=True)
class Refusing(Odd):
    """A feature of somebody else, whose columns do not always decode."""

    type_name = "feature_errors_refusing"

    def encode(self, value):
        return np.array([value])

    def decode(self, column):
        raise InputError("it does not decode")


def ragged(values, lengths):
    """Return the column of a block of records."""
    return RaggedColumn(np.asarray(values), np.asarray(lengths, np.int64))


@pytest.mark.parametrize(
    ("feature", "columns"),
    [
        (Scalar("int64"), {"y": np.zeros(2, np.int64)}),
        (Tensor((None, 2), "int64"), {"x": ragged([1, 2, 3], [3])}),
        (Tensor((None,), "float16"), {"x": [b"abc"]}),
        (Nullable(Tensor((2,), "int64")), {"x": ragged([1, 2, 3], [3])}),
        (Nullable(Scalar("int64")), {"x": ragged([1, 2], [2])}),
    ],
    ids=["name", "values", "bytes", "items", "several"],
)
def test_block_of_records_that_is_not_as_declared(feature, columns):
    """It was written with other features, or damaged where no checksum is."""
    with pytest.raises(SchemaError):
        Features({"x": feature}).decode_block({"key": [b"a"], **columns})


def test_feature_type_that_breaks_its_contract():
    """It has neither fields nor arguments, and encodes what only some formats could store."""
    features = Features({"x": Odd()})

    with pytest.raises(SchemaError, match="from_arguments"):
        Odd().to_json()
    with pytest.raises(SchemaError, match=r"'x'.*encode of "):
        features.encode({"key": "a", "x": 1})
    with pytest.raises(SchemaError, match=r"'x'.*encode_many of "):
        features.encode_block({"key": ["a", "b"], "x": [1, 2]})


def test_record_that_a_feature_type_refuses(tmp_path):
    """Its checksums are right all the same."""
    job(tmp_path / "out", features={"x": Refusing()}).run(progress=False)

    with pytest.raises(CorruptDataError, match="it does not decode"):
        datamat.load(tmp_path / "out")[0]


def test_dict_with_other_fields_than_declared(tmp_path):
    """Such dicts differ from sample to sample, or are misspelt."""
    with pytest.raises(SampleError, match=r"Json\(\)") as caught:
        job(tmp_path / "out", features={"x": {"a": Scalar("int64")}}, made={"x": {"b": 1}}).run(progress=False)

    assert caught.value.key in {"r0", "r1", "r2", "r3"}


def test_feature_of_two_packages(tmp_path, monkeypatch):
    """Which one is meant cannot be known."""
    for name in ("one", "other"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (tmp_path / f"{name}-1.dist-info/entry_points.txt").write_text(f"[datamat.features]\ntwice = {name}:Twice\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(SchemaError, match="one:Twice"):
        Features.from_json({"x": {"type": "twice"}})


def test_list_that_marks_what_is_missing_twice():
    """Both would have the column `present`."""
    with pytest.raises(SchemaError, match=r"Json\(\)"):
        ListOf(Nullable(ListOf(Nullable(Scalar("int64")))))


def test_statistics_that_datamat_did_not_write():
    """Somebody has put a line into the manifest."""
    digest = xxhash.xxh3_64_hexdigest(b"0\nnumbers x y 1")

    with pytest.raises(CorruptDataError, match="numbers x y 1"):
        Statistics.from_lines([f"records 0 {digest}", "numbers x y 1"])


def test_sound_without_its_package(monkeypatch):
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "soundfile", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'datamat\[audio\]'"):
        Features({"x": datamat.Audio()}).encode({"key": "a", "x": b"RIFF"})


def test_sound_that_is_cut_short():
    """The players of others would play what is there."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1000, np.float32), 8000, format="WAV")

    with pytest.raises(InputError, match=r"'x'.*cut short"):
        Features({"x": datamat.Audio()}).encode({"key": "a", "x": file.getvalue()[:-1000]})
