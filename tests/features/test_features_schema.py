"""The schema as a whole: it encodes samples one by one or by columns, and refuses all others."""

from __future__ import annotations

import datetime
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from datamat import BBoxes, ClassLabel, Features, Image, Json, ListOf, Mask, Scalar, Tensor, Text, Timestamp
from datamat.codecs import encode_png
from datamat.errors import InputError, SchemaError

EVERY_TYPE = Features(
    {
        "image": Image((360, None, 3), encoding="jpeg", quality=80),
        "mask": Mask((360, 480), names=("sky", "road"), palette=((1, 2, 3), (4, 5, 6))),
        "label": ClassLabel(names=("cat", "dog")),
        "ids": ClassLabel(num_classes=7, shape=(None,)),
        "objects/bbox": BBoxes(),
        "caption": Text(),
        "time": Scalar("uint64"),
        "grid": Tensor((None, 3, None), "int16", "raw"),
    }
)
BLOCK_DTYPES = ["bool", "int8", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64"]


def test_every_declaration_survives_json_and_pickle():
    """A copy through pickle or JSON is equal and has the same hash."""
    for features in (
        Features.from_json(json.loads(json.dumps(EVERY_TYPE.to_json()))),
        pickle.loads(pickle.dumps(EVERY_TYPE)),
    ):
        assert features == EVERY_TYPE
        assert hash(features) == hash(EVERY_TYPE)
        assert list(features) == list(EVERY_TYPE)
        assert features.columns == EVERY_TYPE.columns


@pytest.mark.parametrize(
    "other",
    [
        {"x": Tensor((2,), "int32")},
        {"x": Tensor((2,), "int64", "raw")},
        {"x": Tensor((None,), "int64")},
        {"y": Tensor((2,), "int64")},
        {"x": Tensor((2,), "int64"), "y": Text()},
        {},
    ],
)
def test_features_compare_by_their_declarations(other):
    """The order of keys, and lists in place of tuples, make no difference."""
    features = Features({"x": Tensor([2], np.int64)})

    assert features != Features(other)
    assert features == Features({"key": Text(), "x": Tensor((2,), "int64")})
    assert features != {"x": Tensor((2,), "int64"), "key": Text()}


def test_schema_always_has_a_key():
    """`key` is a str, whatever else is declared."""
    assert list(Features({})) == ["key"]
    assert Features({"key": Text()}) == Features({})
    with pytest.raises(SchemaError, match=r"field 'key' is declared int64 scalar; it must be Text\(\)"):
        Features({"key": Scalar("int64")})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": Tensor((None, None)), "x/shape": Scalar("int64")}, "field 'x/shape' needs the column 'x/shape', which"),
        ({"x/shape": Text(), "x": Tensor((None, 0))}, "field 'x' needs the column 'x/shape', which another field has"),
        ({"": Text()}, "field name '': want a printable"),
        ({"a\nb": Text()}, r"field name 'a\\nb': want a printable"),
        ({3: Text()}, "field name 3: want a printable"),
        ({"x": Text}, "field 'x' is declared as <class .*Text'>; want a feature such as"),
        ({"x": "int64"}, "field 'x' is declared as 'int64'; want a feature such as"),
        ([("x", Text())], "features is a list; want a dict"),
    ],
)
def test_wrong_fields_are_refused(fields, message):
    """Clashing, unprintable and empty names are refused, and values that are not features."""
    with pytest.raises(SchemaError, match=message):
        Features(fields)


def test_names_may_share_a_beginning():
    """`x` and `x/y` may stand side by side, or `x/shape` beside an `x` of known shape."""
    features = Features({"x": Tensor((2, None)), "x/y": Text(), "x/shape": Text()})

    sample = {"key": "a", "x": np.ones((2, 3), np.float32), "x/y": "y", "x/shape": "round"}
    assert features.decode(features.encode(sample))["x/shape"] == "round"


@pytest.mark.parametrize(
    ("declarations", "message"),
    [
        ({"x": {"type": "Sound"}}, "field 'x' has the type 'Sound'; want one of Audio, BBoxes"),
        ({"x": {}}, "field 'x' has the type None; want one of"),
        ({"x": 3}, "field 'x' has the type None; want one of"),
        ({"x": {"type": ["Text"]}}, r"field 'x' has the type \['Text'\]; want one of"),
        ({"x": {"type": "Text", "size": 3}}, "field 'x' of type Text: .*size"),
        ({"x": {"type": "Scalar", "dtype": "int65"}}, "Scalar: dtype is 'int65'"),
    ],
)
def test_malformed_schema_is_refused(declarations, message):
    """The message names the field."""
    with pytest.raises(SchemaError, match=message):
        Features.from_json(declarations)


def test_missing_and_unknown_fields_are_all_named():
    """One message lists them all, so that one edit of read fixes them."""
    features = Features({"x": Scalar("int64"), "y": Text()})

    with pytest.raises(SchemaError, match=r"field 'x' is declared int64 scalar but the sample has none; .*'y'.*'z' is"):
        features.encode({"key": "a", "z": 1})
    with pytest.raises(SchemaError, match="field 'key' is declared str but the sample has none"):
        features.encode({"x": 1, "y": "b"})
    with pytest.raises(SchemaError, match="field 'z' is not declared but the sample holds it; make read return"):
        features.encode_block({"key": ["a"], "x": np.array([1]), "y": ["b"], "z": ["c"]})


@pytest.mark.parametrize(
    ("feature", "column", "message"),
    [
        (Scalar("int64"), np.array([], np.int64), "0 values, not one"),
        (Scalar("int64"), np.array([1, 2]), "2 values, not one"),
        (Scalar("uint64"), [b"1234"], "buffer size"),
        (ClassLabel(num_classes=3), np.array([], np.int64), "0 values, not one"),
        (Tensor((2,)), np.zeros(3, np.float32), "cannot reshape"),
        (Tensor((None, 2)), np.zeros(3, np.float32), "cannot reshape"),
        (BBoxes(), np.zeros(3, np.float32), "cannot reshape"),
        (Text(), [b"\xff"], "can't decode"),
    ],
)
def test_records_of_other_features_are_named(feature, column, message):
    """An intact record, read with a schema that is not its own, is refused."""
    with pytest.raises(SchemaError, match=f"field 'x' .*{message}.*written with other"):
        Features({"x": feature}).decode({"key": [b"a"], "x": column})


def test_columns_that_are_missing_are_named():
    """The message lists the columns that the record has."""
    with pytest.raises(SchemaError, match="the record has no column 'x'; it holds key, y: was it written with other"):
        Features({"x": Text()}).decode({"key": [b"a"], "y": [b"b"]})
    with pytest.raises(SchemaError, match="field 'x': its column in the record holds 2 values; want one bytes value"):
        Features({"x": Text()}).decode({"key": [b"a"], "x": [b"b", b"c"]})
    with pytest.raises(InputError, match="'x': unknown data"):
        Features({"x": Image()}).decode({"key": [b"a"], "x": [b"\0\1\2"]})


@st.composite
def blocks(draw):
    """Draw a schema of numbers and strings with n values of each."""
    count = draw(st.integers(0, 6))
    fields, columns = {}, {"key": [f"k{number}" for number in range(count)]}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from([*BLOCK_DTYPES, None]))
        fields[f"f{number}"] = Text() if dtype is None else Scalar(dtype)
        if dtype is None:
            values = draw(st.lists(st.text(max_size=4), min_size=count, max_size=count))
            columns[f"f{number}"] = draw(st.sampled_from([list, tuple]))(values)
        else:
            order = draw(st.sampled_from("<>"))
            values = draw(st_numpy.arrays(np.dtype(dtype).newbyteorder(order), 2 * count))
            columns[f"f{number}"] = values[::2]
    return Features(fields), columns


@settings(deadline=None)
@given(blocks())
def test_block_equals_its_rows(case):
    """A block equals its rows, value by value, in any byte order and stride."""
    features, columns = case

    block = features.encode_block(columns)

    assert block.keys() == features.columns.keys()
    for row in range(len(columns["key"])):
        alone = features.encode({name: values[row] for name, values in columns.items()})
        for name, value in alone.items():
            found = block[name][row]
            assert found == value if isinstance(value, bytes) else found.tobytes() == value.tobytes()
    kinds = {name: getattr(values, "dtype", "bytes") for name, values in block.items()}
    assert kinds == features.columns


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1, 2], np.int32), r"declared int64 scalar but the sample holds int32 \(2,\)"),
        (np.array([[1, 2]]), r"differ in length \(key: 2, x: 1\)"),
        (np.zeros((2, 1), np.int64), r"holds int64 \(2, 1\)"),
        ([1, 2.5], r"holds 2.5 \(float\)"),
        ([1, 1 << 63], "holds 9223372036854775808, which does not fit"),
        (np.array([1]), r"differ in length \(key: 2, x: 1\); give one value per row"),
        (7, "holds an int; give one value per row of the block"),
        (np.array(7), "holds a ndarray; give one value per row of the block"),
    ],
)
def test_wrong_blocks_are_refused(values, message):
    """Columns of another dtype, shape or length are refused."""
    with pytest.raises(SchemaError, match=message):
        Features({"x": Scalar("int64")}).encode_block({"key": ["a", "b"], "x": values})


def test_text_in_a_block_is_checked_value_by_value():
    """A bad value in a column is reported with its field."""
    features = Features({"x": Text()})

    for values, message in [(["a", 3], "holds int; give a str"), (["a", "\ud800"], "UTF-8 cannot hold")]:
        with pytest.raises(SchemaError, match=f"field 'x' is declared str .*{message}"):
            features.encode_block({"key": ["a", "b"], "x": values})


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        ("text", Text()),
        (np.str_("text"), Text()),
        (True, Scalar("bool")),
        (np.True_, Scalar("bool")),
        (7, Scalar("int64")),
        (-(2**63), Scalar("int64")),
        (2**63, Scalar("uint64")),
        (0.1, Scalar("float64")),
        (np.float64(0.1), Scalar("float64")),
        (np.float32(0.1), Scalar("float32")),
        (np.uint8(7), Scalar("uint8")),
        (np.zeros((4, 5, 3), np.uint8), Image()),
        (np.zeros((4, 5, 4), np.uint8), Image((None, None, 4))),
        (np.zeros((0, 5, 3), np.uint8), Tensor((None, None, None), "uint8")),
        (np.zeros((4, 5), np.uint8), Tensor((None, None), "uint8")),
        (np.zeros((4, 5, 3), ">f4"), Tensor((None, None, None), "float32")),
        (np.array(7), Tensor((), "int64")),
        (encode_png(np.zeros((4, 5, 3), np.uint8)), Image()),
        (encode_png(np.zeros((4, 5, 4), np.uint8)), Image((None, None, 4))),
    ],
)
def test_inferred_features_hold_the_sample_exactly(value, feature):
    """Inferred features lose no pixel and no digit."""
    features = Features.infer({"x": value, "key": "ignored"})

    assert features == Features({"x": feature})
    found = features.decode(features.encode({"x": value, "key": "a"}))["x"]
    expected = features.prepare({"x": value})["x"]
    assert np.array_equal(found, expected)
    assert np.shape(found) == np.shape(expected)


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        ({"b": [1, None], "a": {"c": "text"}}, Json()),
        ([{"box": [0.5, 1]}, {}], Json()),
        ([], Json()),
        (datetime.datetime(2026, 11, 23), Timestamp()),
        (datetime.datetime(2026, 11, 23, tzinfo=datetime.UTC), Timestamp(tz="UTC")),
        (np.datetime64("2026-11-23"), Timestamp()),
        (datetime.date(2026, 11, 23), Timestamp()),
        ([datetime.date(2026, 11, 23)] * 2, ListOf(Timestamp())),
        (np.array(["2026-11-23", "1969-07-20"], "datetime64[D]"), ListOf(Timestamp())),
        ([{"day": datetime.date(2026, 11, 23)}], ListOf({"day": Timestamp()})),
    ],
)
def test_nested_values_and_times_are_inferred(value, feature):
    """JSON stands for what has no other type."""
    assert Features.infer({"x": value}) == Features({"x": feature})


def test_bytes_that_are_no_image_are_to_be_declared():
    """A broken image is not taken for other bytes; the message names what takes these."""
    with pytest.raises(InputError, match=r"pass features= with 'x': Bytes\(\)"):
        Features.infer({"x": b"ply"})


@pytest.mark.parametrize("value", [1j, object(), {1}])
def test_values_without_a_feature_are_named(value):
    """The message says which values have features."""
    with pytest.raises(
        SchemaError, match=r"field 'x' holds an? .*, for which no feature can be inferred; return a numpy"
    ):
        Features.infer({"x": value})
