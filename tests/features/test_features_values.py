"""Numbers, labels, boxes and text: they survive exactly, and what does not fit is refused with its field."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from round_trip import through_a_record

from datamat import BBoxes, Bytes, ClassLabel, Features, Json, Scalar, Tensor, Text, Timestamp, Tokens
from datamat.errors import SchemaError
from datamat.features import as_bfloat16
from datamat.features.base import as_array

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
DTYPES = ["bool", *INTS, *FLOATS, "complex64", "complex128"]


def same(found, expected):
    """Return whether two arrays are equal in dtype, shape and every bit."""
    expected = np.asarray(expected)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@settings(deadline=None)
@given(st.data())
def test_scalars_of_every_dtype_come_back_bit_for_bit(data):
    """Every bit pattern survives: largest integers, signed zeros, subnormals."""
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    value = data.draw(st_numpy.from_dtype(dtype, allow_nan=dtype.kind != "c"))

    found = through_a_record(Scalar(dtype.name), value)

    assert isinstance(found, np.generic)
    assert found.dtype == dtype
    assert found.tobytes() == value.tobytes() or (np.isnan(value) and np.isnan(found))


@pytest.mark.parametrize("dtype", INTS)
def test_integers_fit_up_to_their_bounds_and_no_further(dtype):
    """Python integers are accepted where they are exact."""
    bounds = np.iinfo(dtype)

    assert [int(through_a_record(Scalar(dtype), value)) for value in (bounds.min, bounds.max)] == [
        bounds.min,
        bounds.max,
    ]
    for value in (bounds.min - 1, bounds.max + 1):
        with pytest.raises(SchemaError, match=rf"field 'x' is declared {dtype} scalar .* {value}, which does not fit"):
            Scalar(dtype).encode("x", value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 1e10),
        ("float16", 2049),
        ("float32", 1e300),
        ("float32", -(2**24) - 1),
        ("float32", 2**200),
        ("float64", 2**53 + 1),
        ("float64", 10**400),
        ("complex64", 1e300j),
    ],
)
def test_numbers_that_a_float_cannot_hold_are_refused(dtype, value):
    """A finite number never becomes infinite, and an integer never changes."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared {dtype} scalar .* does not fit; declare a wider"):
        Scalar(dtype).encode("x", value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_the_declared_dtype(dtype):
    """Python has one float type: a float32 field rounds it, as declared."""
    assert through_a_record(Scalar(dtype), 0.1) == np.dtype(dtype).type(0.1)
    assert through_a_record(Scalar(dtype), -math.inf) == -np.inf
    assert np.isnan(through_a_record(Scalar(dtype), math.nan))
    assert through_a_record(Scalar(dtype), 7) == 7


@pytest.mark.parametrize(
    ("dtype", "value", "found"),
    [
        ("int64", np.int32(3), r"np.int32\(3\) \(int32\)"),
        ("int32", np.int64(3), r"np.int64\(3\) \(int64\)"),
        ("float32", np.float64(0.5), r"np.float64\(0.5\) \(float64\)"),
        ("bool", np.int64(1), r"np.int64\(1\) \(int64\)"),
        ("bool", 1, r"1 \(int\)"),
        ("int64", True, r"True \(bool\)"),
        ("float32", True, r"True \(bool\)"),
        ("int64", 1.0, r"1.0 \(float\)"),
        ("int64", "3", r"'3' \(str\)"),
        ("float64", 1j, r"1j \(complex\)"),
        ("int64", np.array([3]), r"array\(\[3\]\) \(ndarray\)"),
        ("int64", None, r"None \(NoneType\)"),
    ],
)
def test_scalars_of_another_type_are_refused(dtype, value, found):
    """The message names field, declaration, what was found and the remedy."""
    message = rf"field 'x' is declared {dtype} scalar but the sample holds {found}; cast it in read"
    with pytest.raises(SchemaError, match=message):
        Scalar(dtype).encode("x", value)


def test_array_of_no_dimensions_is_a_scalar():
    """In either byte order: `array.max()` and `array[()]` give such values."""
    for value in (np.array(3, "<i4"), np.array(3, ">i4")):
        assert same(np.asarray(through_a_record(Scalar("int32"), value)), np.int32(3))


@pytest.mark.parametrize("kind", [Scalar, lambda dtype: Tensor((2,), dtype)])
@pytest.mark.parametrize("dtype", ["datetime64[s]", "str", "float128", "object", "nothing", 7])
def test_other_dtypes_are_refused(kind, dtype):
    """The message lists the dtypes."""
    with pytest.raises(SchemaError, match=r"dtype is .*; want one of bool, int8"):
        kind(dtype)


def test_dtypes_may_be_given_as_types():
    """`np.float32` and `np.dtype(">f4")` mean the dtype "float32"."""
    assert Scalar(np.float32) == Scalar(np.dtype(">f4")) == Scalar("float32")


@st.composite
def tensors(draw):
    """Draw a declaration and an array that it permits: any dtype, layout, byte order and shape, empty ones included."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    order = draw(st.sampled_from("<>")) if dtype.itemsize > 1 else "="
    shape = draw(st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
    array = draw(st_numpy.arrays(dtype.newbyteorder(order), shape))
    if draw(st.booleans()):
        array = array.T
    if array.ndim and draw(st.booleans()):
        array = array[::-1]
    declared = tuple(draw(st.sampled_from([size, None])) for size in array.shape)
    return Tensor(declared, dtype.name, draw(st.sampled_from([None, "raw"]))), array


@settings(deadline=None, max_examples=400)
@given(tensors())
def test_tensors_come_back_bit_for_bit(case):
    """Values, dtype and shape survive; the result is contiguous, native and writable."""
    feature, array = case

    found = through_a_record(feature, array)

    assert same(found, array) or np.isnan(array).any()
    assert np.array_equal(found, array, equal_nan=array.dtype.kind in "fc")
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert found.dtype.isnative


@pytest.mark.parametrize("encoding", [None, "raw"])
@pytest.mark.parametrize("declared", [(None, 0), (0, None), (None, 0, 2), (None, None, 0)])
def test_sizes_beside_a_zero_are_kept(declared, encoding):
    """Without values, their number does not determine the shape."""
    array = np.zeros([5 if size is None else size for size in declared], np.int16)

    assert through_a_record(Tensor(declared, "int16", encoding), array).shape == array.shape


def test_shape_is_stored_only_where_the_values_do_not_determine_it():
    """The number of values determines one open dimension."""
    assert list(Tensor((None, 3)).columns("x")) == list(Tensor(()).columns("x")) == ["x"]
    assert Tensor((None, None), "float64").columns("x") == {"x": "bytes", "x/shape": "int64"}


def test_raw_bytes_are_little_endian():
    """`tf.io.decode_raw` reads them."""
    assert Tensor((2,), "uint16", "raw").encode("x", np.array([1, 2], ">u2")) == {"x": b"\1\0\2\0"}
    assert Scalar("uint64").encode("x", 2**63 + 1) == {"x": b"\1\0\0\0\0\0\0\x80"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros((2, 3), np.float64), r"float64 \(2, 3\)"),
        (np.zeros((3, 2), np.float32), r"float32 \(3, 2\)"),
        (np.zeros((2, 3, 1), np.float32), r"float32 \(2, 3, 1\)"),
        (np.zeros(2, np.float32), r"float32 \(2,\)"),
        (np.float32(2), "a float32"),
        ([[0.0, 0.0, 0.0]], "a list"),
    ],
)
def test_tensors_of_another_kind_are_refused(value, found):
    """The message names field, declaration, what was found and the remedy."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared float32 \(\?, 3\) but the sample holds {found}; "):
        Tensor((None, 3)).encode("x", value)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((None,), (0,)), ((None, 4), (0, 4)), ((None, 4, None), (0, 4, 0)), ((3,), None), ((0,), None)],
)
def test_list_without_items_is_an_array_without_values(shape, wanted):
    """What code gives that gathers objects, where there are none; where the first size is fixed, it is refused."""
    feature = Tensor(shape, "int16")
    if wanted is None:
        with pytest.raises(SchemaError, match="the sample holds a list; give a numpy array"):
            feature.encode("x", [])
        return

    found = through_a_record(feature, [])
    blocks = [feature.encode_block("x", values) for values in ([[], ()], [np.zeros(wanted, np.int16)] * 2)]

    assert (found.shape, found.dtype) == (wanted, np.int16)
    assert repr(blocks[0]) == repr(blocks[1])


def test_a_dimension_of_one_is_not_invented():
    """(3,) is not (3, 1): it would read back in another shape."""
    with pytest.raises(SchemaError, match=r"holds float32 \(3,\)"):
        Tensor((3, 1)).encode("x", np.zeros(3, np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (-1,)}, r"shape is \(-1,\); sizes are not negative"),
        ({"shape": "abc"}, "shape is 'abc'; want a tuple of sizes"),
        ({"shape": (2.5,)}, r"shape is \(2.5,\); want a tuple of sizes"),
        ({"shape": 3}, "shape is 3; want a tuple of sizes"),
        ({"encoding": "zip"}, "encoding is 'zip'; want 'list', 'raw' or None"),
        ({"dtype": "float64", "encoding": "list"}, "float64 cannot be stored exactly as a list"),
    ],
)
def test_wrong_tensors_are_refused_when_declared(arguments, message):
    """The constructor refuses them, before any sample is seen."""
    with pytest.raises(SchemaError, match=f"Tensor: {message}"):
        Tensor(**arguments)


LABEL = ClassLabel(names=("cat", "dog", "eel"))
LABELS = ClassLabel(names=("cat", "dog", "eel"), shape=(None,))


@pytest.mark.parametrize("value", [2, "eel", np.int64(2), np.uint8(2)])
def test_labels_may_be_ids_or_names(value):
    """They read back as int64."""
    assert same(np.asarray(through_a_record(LABEL, value)), np.int64(2))


@pytest.mark.parametrize(
    "value", [["eel", 0, np.int8(1)], ("eel", "cat", "dog"), np.array([2, 0, 1], np.uint8), np.array([2, 0, 1], ">i4")]
)
def test_lists_of_labels_may_mix_ids_and_names(value):
    """Lists, tuples and arrays of any integer type are accepted."""
    assert same(through_a_record(LABELS, value), np.array([2, 0, 1], np.int64))


def test_list_of_labels_may_be_empty():
    """An image may have no objects."""
    assert same(through_a_record(LABELS, []), np.array([], np.int64))


@pytest.mark.parametrize(
    ("feature", "value", "found"),
    [
        (LABEL, 3, "class id 3; declare the class"),
        (LABEL, -1, "class id -1; declare the class"),
        (LABEL, "cow", "the name 'cow'; use one of cat, dog, eel"),
        (LABEL, True, r"True \(bool\); give an int or a class name"),
        (LABEL, 1.0, r"1.0 \(float\); give an int or a class name"),
        (LABEL, [1], r"\[1\] \(list\); give an int or a class name"),
        (LABELS, [0, 3], "class id 3; declare the class"),
        (LABELS, "cat", "a str; give a list of labels"),
        (LABELS, 1, "a int; give a list of labels"),
        (LABELS, np.array(1), "a ndarray; give a list of labels"),
        (LABELS, {1, 2}, "a set; give a list of labels"),
        (LABELS, np.zeros((1, 2), int), r"array\(\[0, 0\]\) \(ndarray\); give an int or a class name"),
    ],
)
def test_wrong_labels_are_refused(feature, value, found):
    """The message names field, declaration, what was found and the remedy."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared .*int64 class id of 3 classes but .* holds {found}"):
        feature.encode("x", value)


def test_lists_of_a_declared_length_are_held_to_it():
    """The message names the length."""
    feature = ClassLabel(num_classes=5, shape=(2,))

    assert through_a_record(feature, [4, 0]).tolist() == [4, 0]
    with pytest.raises(SchemaError, match=r"declared list of 2 int64 class id of 5 classes .* holds int64 \(3,\)"):
        feature.encode("x", [1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no classes; give names="),
        ({"num_classes": 0}, "no classes; give names="),
        ({"num_classes": 2.5}, "num_classes is 2.5; want an int"),
        ({"names": ("a", "b"), "num_classes": 3}, "2 names for num_classes=3"),
        ({"names": ("a", "a")}, "a class name appears twice in a, a"),
        ({"names": "ab"}, "names is 'ab'; want a sequence of str"),
        ({"names": 5}, "names is 5; want a sequence of str"),
        ({"names": ("a", 1)}, r"names is \('a', 1\); want a sequence of str"),
        ({"num_classes": 2, "shape": (None, None)}, r"shape is \(None, None\); want"),
    ],
)
def test_wrong_class_labels_are_refused_when_declared(arguments, message):
    """The constructor refuses them, before any sample is seen."""
    with pytest.raises(SchemaError, match=f"ClassLabel: {message}"):
        ClassLabel(**arguments)


def test_names_may_come_from_a_generator():
    """It is consumed once."""
    assert ClassLabel(names=(name for name in "ab")) == ClassLabel(names=["a", "b"])


sides = st_numpy.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(4)), elements=st.floats(0, 1, width=32))


@given(sides, st.sampled_from("<>"))
def test_boxes_come_back_bit_for_bit(array, order):
    """Empty arrays, and boxes in the byte order of another machine, are among them."""
    boxes = np.concatenate([np.sort(array[:, :2], 1), np.sort(array[:, 2:], 1)], 1)[:, [0, 2, 1, 3]]

    assert same(through_a_record(BBoxes(), boxes.astype(f"{order}f4")), boxes)


def test_no_boxes_may_be_an_empty_list():
    """An image may have no objects."""
    assert same(through_a_record(BBoxes(), []), np.zeros((0, 4), np.float32))


@pytest.mark.parametrize(
    ("box", "found"),
    [
        ([0.5, 0, 0.2, 1], r"box 1 = \[0.5, 0.0, .*\]; clip it"),
        ([0, 0.5, 1, 0.2], "box 1 = "),
        ([-0.1, 0, 1, 1], "box 1 = "),
        ([0, 0, 1, 1.5], "box 1 = "),
        ([0, 0, math.nan, 1], "box 1 = "),
    ],
)
def test_wrong_boxes_are_refused_with_their_place(box, found):
    """Pixels in place of fractions, swapped x and y, and NaN are refused."""
    boxes = np.array([[0, 0, 1, 1], box], np.float32)

    with pytest.raises(SchemaError, match=rf"field 'x' is declared float32 \(n, 4\) .* but the sample holds {found}"):
        BBoxes().encode("x", boxes)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.zeros((1, 4)), r"float64 \(1, 4\)"),
        (np.zeros((2, 5), np.float32), r"float32 \(2, 5\)"),
        (np.zeros(4, np.float32), r"float32 \(4,\)"),
        ([[0, 0, 1, 1]], "a list"),
    ],
)
def test_boxes_of_another_kind_are_refused(value, found):
    """The message names field, declaration and what was found."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared float32 \(n, 4\) .* but the sample holds {found}; "):
        BBoxes().encode("x", value)


@given(st.text())
def test_text_comes_back(value):
    """Any text that UTF-8 can encode survives, NULs included."""
    assert through_a_record(Text(), value) == value


@pytest.mark.parametrize(
    ("value", "found"), [(b"abc", "bytes; give a str"), (3, "int; give a str"), ("\ud800", "which UTF-8 cannot hold")]
)
def test_values_that_are_no_text_are_refused(value, found):
    """The message names field, declaration, what was found and the remedy."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared str but the sample holds .*{found}"):
        Text().encode("x", value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(JSON)
def test_json_comes_back_equal_and_of_the_same_types(value):
    """Numbers stay integers or floats; the order of keys is no part of the value."""
    if "\\ud" in repr(value):  # a lone surrogate, which has a test of its own
        return

    found = through_a_record(Json(), value)

    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


def test_equal_dicts_are_equal_bytes():
    """The order in which keys were put into a dict, or a set gave them, decides nothing."""
    assert Json().encode("x", {"b": {"d": 1, "c": 2}, "a": 0}) == Json().encode("x", {"a": 0, "b": {"c": 2, "d": 1}})


def test_json_takes_tuples_and_numpy():
    """As they come from other libraries: they read back as lists and Python's numbers."""
    value = {"a": (1, np.int64(2)), "b": np.eye(2, dtype=np.float32), "c": np.float32(0.5), "d": np.bool_(True)}

    assert through_a_record(Json(), value) == {"a": [1, 2], "b": [[1.0, 0.0], [0.0, 1.0]], "c": 0.5, "d": True}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {3: 1}]}, r"holds the key 3 \(int\) at \['a'\]\[1\]; use str for keys, which is all that JSON has"),
        ({"a": [0, math.nan]}, r"holds nan at \['a'\]\[1\], which JSON has not; give None, or a field of its own"),
        ({"a": np.array([0, np.inf])}, r"holds inf at \['a'\]\[1\], which JSON has not"),
        ({"a": b"raw"}, r"holds a bytes at \['a'\]; give dicts, lists, str, numbers, booleans and None"),
        ({"a": {1, 2}}, r"holds a set at \['a'\]; give dicts, lists"),
        (object(), "holds a object; give dicts, lists"),
        (["\ud800"], r"holds '\\ud800' at \[0\], which UTF-8 cannot hold; replace the lone surrogate"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value, message):
    """Nothing turns into something else: 3 into "3", or NaN into what other readers refuse."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared JSON but the sample {message}"):
        Json().encode("x", value)


def test_json_that_holds_itself_is_refused():
    """The message says so, in place of a `RecursionError`."""
    circle = []
    circle.append(circle)

    with pytest.raises(SchemaError, match="a value that is nested too deep, or holds itself; flatten it in read"):
        Json().encode("x", circle)


@pytest.mark.parametrize("value", [bytearray(b"a\0"), memoryview(b"a\0"), np.bytes_(b"a")])
def test_bytes_of_every_kind_are_bytes(value):
    """They read back as `bytes`."""
    found = through_a_record(Bytes(), value)

    assert type(found) is bytes
    assert found == bytes(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [("text", "a str; encode text in read"), (np.zeros(2), r"a ndarray; give bytes, such as array.tobytes\(\)")],
)
def test_what_is_no_bytes_is_refused(value, message):
    """The message names the remedy."""
    with pytest.raises(SchemaError, match=f"field 'x' is declared bytes but the sample holds {message}"):
        Bytes().encode("x", value)


@settings(deadline=None)
@given(st.datetimes(timezones=st.timezones()))
def test_moments_are_the_same_in_every_zone(value):
    """A datetime with any zone reads back as that moment in UTC."""
    found = through_a_record(Timestamp(tz="UTC"), value)

    assert found.dtype == "datetime64[us]"
    assert found == np.datetime64(value.astimezone(datetime.UTC).replace(tzinfo=None), "us")


@settings(deadline=None)
@given(st.datetimes())
def test_times_without_a_zone_come_back(value):
    """To the microsecond, in any year that Python knows."""
    assert through_a_record(Timestamp(), value) == np.datetime64(value, "us")


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (Timestamp(), datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "with a time zone; declare Timestamp"),
        (Timestamp(tz="UTC"), datetime.datetime(2026, 1, 1), "without a time zone; add it in read, with value.replace"),
        (Timestamp(), np.datetime64(1, "ns"), "which is no time in whole microseconds; round it in read"),
        (Timestamp(), np.datetime64("NaT", "us"), "which is no time in whole microseconds; round it in read"),
        (Timestamp(), np.datetime64(10**9, "Y"), "which is no time in whole microseconds; round it in read"),
        (Timestamp(tz="UTC"), datetime.date(2026, 1, 1), "without a time zone; add it in read"),
        (Timestamp(), datetime.time(1), r"\(time\); give a datetime or a numpy.datetime64"),
        (Timestamp(), 5, r"5 \(int\); give a datetime or a numpy.datetime64"),
    ],
)
def test_times_that_would_change_are_refused(feature, value, message):
    """None is rounded, moved to another zone, or guessed."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared timestamp\[us.* but the sample holds .*{message}"):
        feature.encode("x", value)


def test_date_is_its_first_moment():
    """As Arrow and numpy have it."""
    day = datetime.date(2026, 11, 23)

    assert through_a_record(Timestamp(), day) == np.datetime64(day) == np.datetime64("2026-11-23T00:00")


def test_pandas_times_are_times():
    """Unless they have nanoseconds, or are missing."""
    pandas = pytest.importorskip("pandas")

    assert through_a_record(Timestamp(), pandas.Timestamp("2026-11-23 12:00")) == np.datetime64("2026-11-23T12:00")
    for value in (pandas.Timestamp(1), pandas.NaT):
        with pytest.raises(SchemaError, match="which is no time in whole microseconds"):
            Timestamp().encode("x", value)


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        (Bytes(), [b"", b"a\0"]),
        (Bytes(), [bytearray(b"a"), b""]),
        (Json(), [None, {"b": 1, "a": (1, 2)}, []]),
        (Timestamp(), np.array(["2026-11-23", "1969-07-20"], "datetime64[D]")),
        (Timestamp(), [datetime.datetime(2026, 1, 1), np.datetime64("2026-11-23")]),
        (Tokens("uint16"), [[1, 2], np.array([65_535], np.int64), [], (3,)]),
        (Tokens("uint16"), [np.array([1, 2], np.uint8), np.array([3], np.uint8)]),
        (Tokens("uint16"), [np.array([1, 2]), np.array([3], np.uint8)]),
        (Tokens("int8"), np.arange(-6, 6).reshape(3, 4)),
    ],
)
def test_blocks_of_values_equal_their_rows(feature, values):
    """However they come: as an array, or as a list."""
    features = Features({"x": feature})

    block = features.encode_block({"key": [str(number) for number in range(len(values))], "x": values})["x"]

    assert list(block) == [feature.encode("x", value)["x"] for value in values]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(None, "int32"), (1, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "int32"),
     (1 << 31, "int32"), ((1 << 31) + 1, "int64")],
)  # fmt: skip
def test_tokens_take_the_smallest_dtype_of_their_vocabulary(vocab_size, dtype):
    """It is stored raw, and read back."""
    feature = Tokens(vocab_size=vocab_size)
    last = (vocab_size or 9) - 1

    assert feature.value_type() == (dtype, (None,))
    assert len(feature.encode("x", [last])["x"]) == np.dtype(dtype).itemsize
    assert same(through_a_record(feature, [0, last]), np.array([0, last], dtype))
    assert Tokens(dtype, vocab_size) == feature
    assert Features.from_json(Features({"x": feature}).to_json())["x"] == feature


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (Tokens(vocab_size=300), [1, 300], r"uint16 tokens \(\?,\) of 300 but .* token 1 = 300; ids run from 0 to 299"),
        (Tokens(), np.array([1, 2**31]), r"token 1 = 2147483648; ids run from -2147483648 to 2147483647: declare"),
        (Tokens(), [1, 2**70], r"token 1 = 1180591620717411303424; ids run"),
        (Tokens(), [1, 0.5], r"0.5 \(float\) as token 1; give ids as int"),
        (Tokens(), [True], r"True \(bool\) as token 0; give ids as int"),
        (Tokens(), np.zeros((2, 3), int), r"int64 \(2, 3\); give integers \(n,\): a list of int, or an array"),
        (Tokens(), np.zeros(2), r"float64 \(2,\); give integers"),
        (Tokens(), "abc", r"a str; give a numpy array"),
    ],
)  # fmt: skip
def test_ids_that_are_no_tokens_are_refused_with_their_place(feature, value, message):
    """One by one, and in a block."""
    with pytest.raises(SchemaError, match=message):
        feature.encode("x", value)
    with pytest.raises(SchemaError, match=message):
        feature.encode_block("x", [np.array([1]), value])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float32"}, "Tokens: dtype is 'float32'; want one of int8 to int64, uint8 to uint64"),
        ({"dtype": "uint8", "vocab_size": 257}, "Tokens: uint8 does not hold the ids of vocab_size=257"),
        ({"vocab_size": 0}, "Tokens: vocab_size is 0; want the number of tokens"),
        ({"vocab_size": "9"}, "Tokens: vocab_size is '9'; want an int"),
    ],
)
def test_declarations_of_tokens_are_checked(arguments, message):
    with pytest.raises(SchemaError, match=message):
        Tokens(**arguments)


@pytest.mark.parametrize("bits", range(0, 1 << 16, 257))
def test_bfloat16_comes_back_bit_for_bit(bits):
    """Every sign, exponent and NaN, as a scalar and in a tensor."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([bits], np.uint16).view(ml_dtypes.bfloat16)

    assert same(through_a_record(Tensor((None,), "bfloat16"), array), array)
    assert same(np.asarray(through_a_record(Scalar("bfloat16"), array[0])), array[0])
    assert same(as_bfloat16(array.astype(np.float32)), array)


def test_bfloat16_of_torch_is_taken():
    """Its tensors do not turn into arrays by themselves."""
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")

    found = as_array(torch.tensor([1.5, -0.0], dtype=torch.bfloat16))

    assert same(found, np.array([1.5, -0.0], ml_dtypes.bfloat16))


def test_missing_ml_dtypes_is_named(tmp_path):
    """The message says what needs it, and how to get it; nothing else of datamat does."""
    program = (
        "import sys; sys.modules['ml_dtypes'] = None\nfrom datamat import Scalar\nScalar('float16')\nScalar('bfloat16')"
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)

    assert (
        "MissingDependencyError: the dtype bfloat16 needs the package ml_dtypes; install it with: pip" in found.stderr
    )
