"""The tests of a `Feature`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import pickle
import unittest
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from datamat.directory.sidecars.croissant import croissant_type
from datamat.directory.sidecars.huggingface import hugging_face_type
from datamat.directory.sidecars.tfds import tfds_entries
from datamat.directory.verify import verify
from datamat.errors import MissingDependencyError, SchemaError
from datamat.features import Feature, Features
from datamat.features.base import by_column, dtype_of, holds_numbers
from datamat.features.registry import register_feature
from datamat.formats import get_format
from datamat.readers.dataset import load
from datamat.readers.tf.decode import as_read
from datamat.run.materializer import Materializer
from datamat.sources.rows import IndexRow
from datamat.testing.assertions import bits, compare, normal, preview, raises
from datamat.testing.executors import InlineExecutor
from datamat.testing.formats import MadeShard
from datamat.writers.base import DatasetWriter

if TYPE_CHECKING:
    from datamat.writers.base import Sample

FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"]
"""The built-in formats; tests of a format whose package is missing are skipped."""


class _Given(DatasetWriter):
    """Rows with given values of one feature."""

    name = "given"

    def __init__(self, feature: Feature, values: Sequence[Any]) -> None:
        self.features = Features({"value": feature})
        self.values = values

    def index(self, source: Any) -> Iterable[IndexRow]:
        del source
        return [IndexRow(f"{number:04d}", fields={"number": number}) for number in range(len(self.values))]

    def read(self, row: IndexRow) -> Sample:
        return {"value": self.values[row.fields["number"]]}


class FeatureConformance:
    """What every `Feature` does: a value keeps its bits through every format and reader.

    Attributes:
        is_lossy: whether `decode` may return something other than the encoded value. Even then, it must return the
            same everywhere.
    """

    is_lossy: ClassVar[bool] = False

    def make_feature(self) -> Feature:
        """Return the feature; if it takes arguments, not the defaults."""
        raise NotImplementedError(f"{type(self).__name__}: define make_feature(self)")

    def make_values(self) -> Sequence[Any]:
        """Return at least three of its values, including edge cases: the smallest, the largest, the empty."""
        raise NotImplementedError(f"{type(self).__name__}: define make_values(self)")

    def make_wrong_values(self) -> Sequence[Any]:
        """Return values that it rejects."""
        return [object()]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests that take a format name with each built-in format."""
        if "format_name" in metafunc.fixturenames:
            metafunc.parametrize("format_name", FORMATS)

    def test_columns_are_as_declared(self) -> None:
        """`encode` returns the columns that `columns` declares, with their kinds."""
        for value in self.make_values():
            record = self._features().encode({"key": "a", "value": value})
            kinds = {name: _kind_of(part) for name, part in record.items()}
            compare(kinds, dict(self._features().columns), f"columns of {preview(value)}")

    def test_value_is_decoded_as_declared(self) -> None:
        """`decode` returns the value, with the dtype and shape that `value_type` declares."""
        feature = self.make_feature()
        dtype, shape = feature.value_type()
        for value in self.make_values():
            found = feature.decode(feature.encode(value))
            place = f"decoded {preview(value)}"
            if found is None:
                assert feature.takes_none, f"{place}: found None, expected a {dtype}: takes_none is False"
            elif not holds_numbers(dtype):
                kind = list if shape else {"string": str, "bytes": bytes}.get(dtype, object)
                assert isinstance(found, kind), f"{place}: found {preview(found)}, expected {kind.__name__}"
            else:
                compare(np.asarray(found).dtype.name, dtype, f"{place}: dtype")
                sizes = np.shape(found)
                fits = len(sizes) == len(shape) and all(
                    want in (None, size) for want, size in zip(shape, sizes, strict=True)
                )
                assert fits, f"{place}: found shape {sizes}, expected {shape}"
            if not self.is_lossy:
                is_array = holds_numbers(dtype) and value is not None
                expected = np.asarray(value, dtype_of(dtype)) if is_array else value
                compare(bits(found), bits(expected), f"{place} (is_lossy is False)")

    def test_decoded_value_can_be_stored_again(self) -> None:
        """`encoded_value` returns a value that `encode` turns into the same columns: a conversion changes nothing."""
        feature = self.make_feature()
        for value in self.make_values():
            stored = feature.encode(value)
            again = feature.encode(feature.encoded_value(stored))
            found, expected = (normal(by_column("value", one)) for one in (again, stored))
            compare(found, expected, f"columns of {preview(value)}, stored again")

    def test_equal_features_encode_equally(self) -> None:
        """A pickled copy, such as a worker gets, is equal to the original and gives the same columns."""
        feature, pickled = self.make_feature(), pickle.loads(pickle.dumps(self.make_feature()))

        assert pickled == feature, f"pickled feature: found {pickled!r}, expected it to be equal to {feature!r}"
        compare(hash(pickled), hash(feature), "hash of the pickled feature")
        for value in self.make_values():
            found, expected = (normal(by_column("value", one.encode(value))) for one in (pickled, feature))
            compare(found, expected, f"columns of {preview(value)}, from the pickled feature")

    def test_block_equals_its_values(self) -> None:
        """`encode_many` returns the columns that `encode` returns for each value."""
        features, values = self._features(), self.make_values()
        keys = [f"{number:04d}" for number in range(len(values))]

        block = features.encode_block({"key": keys, "value": values})

        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            expected = normal(features.encode({"key": key, "value": value}))
            found = normal({name: _row_of(column, number) for name, column in block.items()})
            compare(found, expected, f"columns of {preview(value)}, in a block")

    def test_declaration_survives_the_manifest(self) -> None:
        """Its arguments survive JSON, and make an equal feature."""
        feature = self.make_feature()

        again = type(feature).from_arguments(json.loads(json.dumps(feature.arguments())))

        assert again == feature, f"feature from its JSON: found {again!r}, expected it to be equal to {feature!r}"

    def test_wrong_value_is_refused(self) -> None:
        """A value that does not fit raises a `SchemaError` that names the field."""
        for value in self.make_wrong_values():
            with raises(SchemaError, "value", f"encode of {preview(value)}"):
                self._features().encode({"key": "a", "value": value})

    def test_value_survives_every_format(self, tmp_path: pathlib.Path, format_name: str) -> None:
        """The records of a shard decode to the values: in order, by number, and as a block."""
        features = self._features()
        try:
            shard_format = get_format(format_name).with_features(features)
        except MissingDependencyError as error:
            raise unittest.SkipTest(str(error)) from error
        samples = [{"key": f"{number:04d}", "value": value} for number, value in enumerate(self.make_values())]
        numbers = np.arange(len(samples))

        shard = MadeShard(tmp_path, shard_format, features, [samples])

        expected = [bits(features.decode(record)["value"]) for record in shard.records]
        found = [bits(features.decode(record)["value"]) for record in shard_format.read(shard.path)]
        compare(found, expected, f"{format_name}: values, in order")
        with contextlib.closing(shard_format.reader(shard.path, shard.offsets)) as reader:
            found = [bits(features.decode(reader.read(number))["value"]) for number in reversed(numbers.tolist())]
            compare(found[::-1], expected, f"{format_name}: values, by number")
            block = shard_format.read_block([reader], np.zeros_like(numbers), numbers, features.columns)
        if features.is_flat and block is not None:
            found = [bits(value) for value in features.decode_block(block)["value"]]
            compare(found, expected, f"{format_name}: values, as a block")

    def test_value_survives_a_run(self, tmp_path: pathlib.Path) -> None:
        """A finished directory verifies, and returns each value, alone and in batches."""
        expected = self._write(tmp_path / "out")

        dataset = load(tmp_path / "out")

        compare([bits(sample["value"]) for sample in dataset], expected, "values, one by one")
        batches = dataset.to_numpy(batch_size=2)
        found = [bits(value) for batch in batches for value in batch["value"]]
        compare(found, expected, "values of batches")
        report = verify(tmp_path / "out", deep=True)
        assert report.ok, f"found {report}, expected the directory to verify"

    def test_sidecars_describe_its_columns(self) -> None:
        """TFDS has an entry for each column; Hugging Face and Croissant have a type, or none for the Arrow type's."""
        feature = self.make_feature()

        compare(set(tfds_entries(feature, "value")), set(feature.columns("value")), "columns with an entry for TFDS")
        card, kind = hugging_face_type(feature), croissant_type(feature)
        assert card is None or isinstance(card, str | dict), f"Hugging Face: found {card!r}, expected str, dict or None"
        assert kind is None or isinstance(kind, str), f"Croissant: found {kind!r}, expected a str or None"

    def test_tf_data_gives_the_same_values(self, tmp_path: pathlib.Path) -> None:
        """`to_tf` decodes as `load` does."""
        if importlib.util.find_spec("tensorflow") is None:
            raise unittest.SkipTest("TensorFlow is not installed")
        expected = self._write(tmp_path / "out")

        found = [sample["value"].numpy() for sample in load(tmp_path / "out").to_tf()]

        values = [as_read({"value": value}, self._features())["value"] for value in found]
        compare([bits(value) for value in values], expected, "values of tf.data")

    def _features(self) -> Features:
        return Features({"value": self.make_feature()})

    def _write(self, output: pathlib.Path) -> list[Any]:
        """Write the values, and return the bits of each decoded value."""
        feature, values = self.make_feature(), self.make_values()
        if type(feature).__module__.partition(".")[0] != __name__.partition(".")[0]:
            register_feature(type(feature))
        Materializer(_Given(feature, values), "", output).run(executor=InlineExecutor(), progress=False)
        order = [int(str(sample["key"])) for sample in load(output)]
        return [bits(feature.decode(feature.encode(values[number]))) for number in order]


def _kind_of(column: Any) -> str:
    return (
        column.dtype.name if isinstance(column, np.ndarray) else "bytes_list" if isinstance(column, list) else "bytes"
    )


def _row_of(column: Any, number: int) -> Any:
    """Return one row of a column of a block, in the form that `encode` returns."""
    found = column[number]
    if isinstance(found, np.ndarray | np.generic):
        found = np.ravel(found)
        return found.tolist() if found.dtype == object else found
    return found
