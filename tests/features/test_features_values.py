"""Numbers, labels, boxes and text: what goes in comes out, exactly, and what does not fit is refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from round_trip import through_a_record

from datamat import BBoxes, ClassLabel, Scalar, Tensor, Text
from datamat.errors import SchemaError

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
DTYPES = ["bool", *INTS, *FLOATS, "complex64", "complex128"]


def same(found, expected):
    """Tell whether two arrays are equal in dtype, shape and every bit."""
    expected = np.asarray(expected)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@settings(deadline=None)
@given(st.data())
def test_scalars_of_every_dtype_come_back_bit_for_bit(data):
    """Every bit pattern: largest integers, signed zeros, subnormals."""
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    value = data.draw(st_numpy.from_dtype(dtype, allow_nan=dtype.kind != "c"))

    found = through_a_record(Scalar(dtype.name), value)

    assert isinstance(found, np.generic)
    assert found.dtype == dtype
    assert found.tobytes() == value.tobytes() or (np.isnan(value) and np.isnan(found))


@pytest.mark.parametrize("dtype", INTS)
def test_integers_fit_up_to_their_bounds_and_no_further(dtype):
    """Python's integers are taken where they are exact."""
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
    """A finite number never becomes infinite, an integer never another one."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared {dtype} scalar .* does not fit; declare a wider"):
        Scalar(dtype).encode("x", value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_the_declared_dtype(dtype):
    """Python has one float: that float32 rounds it is what its declaration asks for."""
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
    """Field, declared, found, remedy."""
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
    """The message lists those that there are."""
    with pytest.raises(SchemaError, match=r"dtype is .*; want one of bool, int8"):
        kind(dtype)


def test_dtypes_may_be_given_as_types():
    """`np.float32` and `np.dtype(">f4")` mean the dtype "float32"."""
    assert Scalar(np.float32) == Scalar(np.dtype(">f4")) == Scalar("float32")


@st.composite
def tensors(draw):
    """Draw a declaration and an array that it allows: any dtype, layout, byte order, and shape, also without values."""
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
    """Values, dtype and shape; what comes back is contiguous, native and writable."""
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
    """There are no values to tell them from."""
    array = np.zeros([5 if size is None else size for size in declared], np.int16)

    assert through_a_record(Tensor(declared, "int16", encoding), array).shape == array.shape


def test_shape_is_stored_only_where_the_values_do_not_tell_it():
    """One open dimension follows from their number."""
    assert list(Tensor((None, 3)).columns("x")) == list(Tensor(()).columns("x")) == ["x"]
    assert Tensor((None, None), "float64").columns("x") == {"x": "bytes", "x/shape": "int64"}


def test_raw_bytes_are_little_endian():
    """As `tf.io.decode_raw` reads them."""
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
    """Field, declared, found, remedy."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared float32 \(\?, 3\) but the sample holds {found}; "):
        Tensor((None, 3)).encode("x", value)


def test_a_dimension_of_one_is_not_invented():
    """(3,) is not (3, 1): it would come back in another shape than it went in."""
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
    """Not first by a sample."""
    with pytest.raises(SchemaError, match=f"Tensor: {message}"):
        Tensor(**arguments)


LABEL = ClassLabel(names=("cat", "dog", "eel"))
LABELS = ClassLabel(names=("cat", "dog", "eel"), shape=(None,))


@pytest.mark.parametrize("value", [2, "eel", np.int64(2), np.uint8(2)])
def test_labels_may_be_ids_or_names(value):
    """They come back as int64."""
    assert same(np.asarray(through_a_record(LABEL, value)), np.int64(2))


@pytest.mark.parametrize(
    "value", [["eel", 0, np.int8(1)], ("eel", "cat", "dog"), np.array([2, 0, 1], np.uint8), np.array([2, 0, 1], ">i4")]
)
def test_lists_of_labels_may_mix_ids_and_names(value):
    """Lists, tuples and arrays of any integers."""
    assert same(through_a_record(LABELS, value), np.array([2, 0, 1], np.int64))


def test_list_of_labels_may_be_empty():
    """An image without objects."""
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
    """Field, declared, found, remedy."""
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
    """Not first by a sample."""
    with pytest.raises(SchemaError, match=f"ClassLabel: {message}"):
        ClassLabel(**arguments)


def test_names_may_come_from_a_generator():
    """It is gone through once."""
    assert ClassLabel(names=(name for name in "ab")) == ClassLabel(names=["a", "b"])


sides = st_numpy.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(4)), elements=st.floats(0, 1, width=32))


@given(sides, st.sampled_from("<>"))
def test_boxes_come_back_bit_for_bit(array, order):
    """Also none, and in the byte order of another machine."""
    boxes = np.concatenate([np.sort(array[:, :2], 1), np.sort(array[:, 2:], 1)], 1)[:, [0, 2, 1, 3]]

    assert same(through_a_record(BBoxes(), boxes.astype(f"{order}f4")), boxes)


def test_no_boxes_may_be_an_empty_list():
    """An image without objects."""
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
    """Pixels in place of fractions, x and y mixed up, not a number."""
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
    """Field, declared, found."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared float32 \(n, 4\) .* but the sample holds {found}; "):
        BBoxes().encode("x", value)


@given(st.text())
def test_text_comes_back(value):
    """Any that UTF-8 holds, also with zeros in it."""
    assert through_a_record(Text(), value) == value


@pytest.mark.parametrize(
    ("value", "found"), [(b"abc", "bytes; give a str"), (3, "int; give a str"), ("\ud800", "which UTF-8 cannot hold")]
)
def test_what_is_no_text_is_refused(value, found):
    """Field, declared, found, remedy."""
    with pytest.raises(SchemaError, match=rf"field 'x' is declared str but the sample holds .*{found}"):
        Text().encode("x", value)
