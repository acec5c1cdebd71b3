"""Numbers, labels, boxes, text and times: they survive exactly, and what does not fit is refused with its field."""

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

from datamat import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Features,
    Image,
    Json,
    Mask,
    Scalar,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    Video,
)
from datamat.errors import SchemaError
from datamat.features.base import as_array, as_bfloat16

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
DTYPES = ["bool", *INTS, *FLOATS, "complex64", "complex128"]
LABEL = ClassLabel(names=("cat", "dog", "eel"))
LABELS = ClassLabel(names=("cat", "dog", "eel"), shape=(None,))
UTC = datetime.UTC


def same(found, expected):
    """Return whether two arrays are equal in dtype, shape and every bit."""
    expected = np.asarray(expected)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


# ---------------------------------------------------------------- numbers


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

    for value in (bounds.min, bounds.max):
        assert int(through_a_record(Scalar(dtype), value)) == value
    for value in (bounds.min - 1, bounds.max + 1):
        with pytest.raises(SchemaError, match=f"the field .* {value}, which does not fit"):
            Scalar(dtype).encode(value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_the_declared_dtype(dtype):
    """Python has one float type: a float32 field rounds it, as declared."""
    assert through_a_record(Scalar(dtype), 0.1) == np.dtype(dtype).type(0.1)
    assert through_a_record(Scalar(dtype), -math.inf) == -np.inf
    assert np.isnan(through_a_record(Scalar(dtype), math.nan))
    assert through_a_record(Scalar(dtype), 7) == 7


def test_array_of_no_dimensions_is_a_scalar():
    """In either byte order: `array.max()` and `array[()]` give such values."""
    for value in (np.array(3, "<i4"), np.array(3, ">i4")):
        assert same(np.asarray(through_a_record(Scalar("int32"), value)), np.int32(3))


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


@settings(deadline=None, max_examples=100)
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
    columns = Tensor((None, None), "float64").columns("x")
    assert {name: column.kind for name, column in columns.items()} == {"x": "bytes", "x/shape": "int64"}


def test_raw_bytes_are_little_endian():
    """`tf.io.decode_raw` reads them."""
    assert Tensor((2,), "uint16", "raw").encode(np.array([1, 2], ">u2")) == b"\1\0\2\0"
    assert Scalar("uint64").encode(2**63 + 1) == b"\1\0\0\0\0\0\0\x80"


@pytest.mark.parametrize(("shape", "wanted"), [((None,), (0,)), ((None, 4), (0, 4)), ((None, 4, None), (0, 4, 0))])
def test_list_without_items_is_an_array_without_values(shape, wanted):
    """Code that gathers objects gives it where there are none."""
    feature = Tensor(shape, "int16")

    found = through_a_record(feature, [])
    blocks = [feature.encode_many(values) for values in ([[], ()], [np.zeros(wanted, np.int16)] * 2)]

    assert (found.shape, found.dtype) == (wanted, np.int16)
    assert repr(blocks[0]) == repr(blocks[1])


def test_bfloat16_comes_back_bit_for_bit():
    """Every sign, exponent and NaN, as a scalar and in a tensor."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)

    assert same(through_a_record(Tensor((None,), "bfloat16"), array), array)
    assert same(as_bfloat16(array.astype(np.float32))[::257], array[::257])
    for value in array[::257]:
        assert same(np.asarray(through_a_record(Scalar("bfloat16"), value)), value)


def test_bfloat16_of_torch_is_taken():
    """Its tensors do not turn into arrays by themselves."""
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")

    found = as_array(torch.tensor([1.5, -0.0], dtype=torch.bfloat16))

    assert same(found, np.array([1.5, -0.0], ml_dtypes.bfloat16))


def test_missing_ml_dtypes_is_named():
    """Only bfloat16 needs it."""
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\nfrom datamat import Scalar\nScalar('float16')\nScalar('bfloat16')"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "MissingDependencyError: the dtype bfloat16 needs the package ml_dtypes; install it" in found.stderr


# ---------------------------------------------------------------- labels, boxes and tokens


@pytest.mark.parametrize(
    ("feature", "value", "wanted"),
    [
        *((LABEL, value, 2) for value in (2, "eel", np.int64(2), np.uint8(2))),
        (LABELS, ["eel", 0, np.int8(1)], [2, 0, 1]),
        (LABELS, ("eel", "cat", "dog"), [2, 0, 1]),
        (LABELS, np.array([2, 0, 1], np.uint8), [2, 0, 1]),
        (LABELS, np.array([2, 0, 1], ">i4"), [2, 0, 1]),
        (LABELS, [], []),
        (ClassLabel(num_classes=5, shape=(2,)), [4, 0], [4, 0]),
    ],
)
def test_labels_may_be_ids_or_names(feature, value, wanted):
    """They read back as int64."""
    assert same(np.asarray(through_a_record(feature, value)), np.array(wanted, np.int64))


def test_names_may_come_from_a_generator():
    """It is consumed once."""
    assert ClassLabel(names=(name for name in "ab")) == ClassLabel(names=["a", "b"])


sides = st_numpy.arrays(np.float32, st.tuples(st.integers(0, 5), st.just(4)), elements=st.floats(0, 1, width=32))


@given(sides, st.sampled_from("<>"))
def test_boxes_come_back_bit_for_bit(array, order):
    """Empty arrays, and boxes in the byte order of another machine, are among them."""
    boxes = np.concatenate([np.sort(array[:, :2], 1), np.sort(array[:, 2:], 1)], 1)[:, [0, 2, 1, 3]]

    assert same(through_a_record(BBoxes(), boxes.astype(f"{order}f4")), boxes)
    assert same(through_a_record(BBoxes(), []), np.zeros((0, 4), np.float32))


@pytest.mark.parametrize(
    "box", [[0.5, 0, 0.2, 1], [0, 0.5, 1, 0.2], [-0.1, 0, 1, 1], [0, 0, 1, 1.5], [0, 0, math.nan, 1]]
)
def test_wrong_boxes_are_refused_with_their_place(box):
    """Pixels in place of fractions, swapped x and y, and NaN are refused."""
    with pytest.raises(SchemaError, match=r"the field .* box 1 = .*clip it"):
        BBoxes().encode(np.array([[0, 0, 1, 1], box], np.float32))


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
    assert len(feature.encode([last])) == np.dtype(dtype).itemsize
    assert same(through_a_record(feature, [0, last]), np.array([0, last], dtype))
    assert Tokens(dtype, vocab_size) == feature
    assert Features.from_json(Features({"x": feature}).to_json())["x"] == feature


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (Tokens(vocab_size=300), [1, 300], "token 1 = 300; ids run from 0 to 299"),
        (Tokens(), np.array([1, 2**31]), "token 1 = 2147483648"),
        (Tokens(), [1, 2**70], "token 1 = 1180591620717411303424"),
        (Tokens(), [1, 0.5], "0.5 .* as token 1"),
        (Tokens(), [True], "True .* as token 0"),
        (Tokens(), np.zeros((2, 3), int), "int64"),
        (Tokens(), np.zeros(2), "float64"),
        (Tokens(), "abc", "a str"),
    ],
)
def test_ids_that_are_no_tokens_are_refused_with_their_place(feature, value, message):
    """One by one, and in a block."""
    with pytest.raises(SchemaError, match=message):
        feature.encode(value)
    with pytest.raises(SchemaError, match=message):
        feature.encode_many([np.array([1]), value])


# ---------------------------------------------------------------- text, bytes and JSON


@given(st.text())
def test_text_comes_back(value):
    """Any text that UTF-8 can encode survives, NULs included."""
    assert through_a_record(Text(), value) == value


@pytest.mark.parametrize("value", [bytearray(b"a\0"), memoryview(b"a\0"), np.bytes_(b"a")])
def test_bytes_of_every_kind_are_bytes(value):
    """They read back as `bytes`."""
    found = through_a_record(Bytes(), value)

    assert type(found) is bytes
    assert found == bytes(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None, max_examples=50)
@given(JSON)
def test_json_comes_back_equal_and_of_the_same_types(value):
    """Numbers stay integers or floats; the order of keys is no part of the value."""
    if "\\ud" in repr(value):  # a lone surrogate, which is refused
        return

    found = through_a_record(Json(), value)

    assert json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


def test_equal_dicts_are_equal_bytes():
    """The order in which keys were put into a dict, or a set gave them, decides nothing."""
    assert Json().encode({"b": {"d": 1, "c": 2}, "a": 0}) == Json().encode({"a": 0, "b": {"c": 2, "d": 1}})


def test_json_takes_tuples_and_numpy():
    """As they come from other libraries: they read back as lists and Python's numbers."""
    value = {"a": (1, np.int64(2)), "b": np.eye(2, dtype=np.float32), "c": np.float32(0.5), "d": np.bool_(True)}

    assert through_a_record(Json(), value) == {"a": [1, 2], "b": [[1.0, 0.0], [0.0, 1.0]], "c": 0.5, "d": True}


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {3: 1}]}, r"3 \(int\) at \['a'\]\[1\]; use str"),
        ({"a": [0, math.nan]}, r"nan at \['a'\]\[1\].*give None"),
        ({"a": np.array([0, np.inf])}, r"inf at \['a'\]\[1\]"),
        ({"a": b"raw"}, r"bytes at \['a'\]"),
        ({"a": {1, 2}}, r"set at \['a'\]"),
        (object(), "a object"),
        (["\ud800"], r"'\\ud800' at \[0\]"),
        (CIRCLE, "nested too deeply or cyclic"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value, message):
    """Nothing turns into something else: 3 into "3", or NaN into what other readers refuse."""
    with pytest.raises(SchemaError, match=f"the field .*{message}"):
        Json().encode(value)


# ---------------------------------------------------------------- times


@settings(deadline=None)
@given(st.datetimes(timezones=st.timezones()))
def test_moments_are_the_same_in_every_zone(value):
    """A datetime with any zone reads back as that moment in UTC."""
    found = through_a_record(Timestamp(tz="UTC"), value)

    assert found.dtype == "datetime64[us]"
    assert found == np.datetime64(value.astimezone(UTC).replace(tzinfo=None), "us")


@settings(deadline=None)
@given(st.datetimes())
def test_times_without_a_zone_come_back(value):
    """To the microsecond, in any year that Python knows; a date is its first moment."""
    assert through_a_record(Timestamp(), value) == np.datetime64(value, "us")
    assert through_a_record(Timestamp(), value.date()) == np.datetime64(value.date())


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (Timestamp(), datetime.datetime(2026, 1, 1, tzinfo=UTC), "with a time zone; declare"),
        (Timestamp(tz="UTC"), datetime.datetime(2026, 1, 1), "without a time zone; add it"),
        (Timestamp(tz="UTC"), datetime.date(2026, 1, 1), "without a time zone; add it"),
        (Timestamp(), np.datetime64(1, "ns"), "microseconds; round it"),
        (Timestamp(), np.datetime64("NaT", "us"), "microseconds"),
        (Timestamp(), np.datetime64(10**9, "Y"), "microseconds"),
        (Timestamp(), datetime.time(1), "time"),
        (Timestamp(), 5, "int"),
    ],
)
def test_times_that_would_change_are_refused(feature, value, message):
    """None is rounded, moved to another zone, or guessed."""
    with pytest.raises(SchemaError, match=f"the field .*{message}"):
        feature.encode(value)


def test_pandas_times_are_times():
    """Unless they have nanoseconds, or are missing."""
    pandas = pytest.importorskip("pandas")

    assert through_a_record(Timestamp(), pandas.Timestamp("2026-11-23 12:00")) == np.datetime64("2026-11-23T12:00")
    for value in (pandas.Timestamp(1), pandas.NaT):
        with pytest.raises(SchemaError, match="microseconds"):
            Timestamp().encode(value)


# ---------------------------------------------------------------- all of them


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

    assert list(block) == [feature.encode(value) for value in values]


WRONG = {
    Scalar("int64"): [np.int32(3), True, 1.0, "3", np.array([3]), None],
    Scalar("int32"): [np.int64(3)],
    Scalar("bool"): [np.int64(1), 1],
    Scalar("float16"): [1e10, 2049],
    Scalar("float32"): [np.float64(0.5), True, 1e300, -(2**24) - 1, 2**200],
    Scalar("float64"): [1j, 2**53 + 1, 10**400],
    Scalar("complex64"): [1e300j],
    Tensor((None, 3)): [np.zeros((2, 3)), np.float32(2), [[0.0] * 3]]
    + [np.zeros(shape, np.float32) for shape in ((3, 2), (2, 3, 1), (2,))],
    Tensor((3, 1)): [np.zeros(3, np.float32)],
    Tensor((3,)): [[]],
    Tensor((0,)): [[]],
    LABEL: [3, -1, "cow", True, 1.0, [1]],
    LABELS: [[0, 3], "cat", 1, np.array(1), {1, 2}, np.zeros((1, 2), int)],
    ClassLabel(num_classes=5, shape=(2,)): [[1, 2, 3]],
    BBoxes(): [np.zeros((1, 4)), np.zeros((2, 5), np.float32), np.zeros(4, np.float32), [[0, 0, 1]]],
    Text(): [b"abc", 3, "\ud800"],
    Bytes(): ["text", np.zeros(2)],
}


@pytest.mark.parametrize(("feature", "values"), WRONG.items(), ids=range(len(WRONG)))
def test_values_that_do_not_fit_are_refused(feature, values):
    """The message names the field, its declaration and what was found, and ends with the remedy."""
    for value in values:
        with pytest.raises(SchemaError, match=r"the field is declared .* but the sample holds .*(; |, which)"):
            feature.encode(value)


WRONG_DECLARATIONS = [
    *((kind, {"dtype": dtype}) for kind in (Scalar, Tensor) for dtype in ("datetime64[s]", "str", "object", "no", 7)),
    *((Tensor, {"shape": shape}) for shape in ((-1,), "abc", (2.5,), 3)),
    *((Tensor, arguments) for arguments in ({"encoding": "zip"}, {"dtype": "float64", "encoding": "list"})),
    *((ClassLabel, {"names": names}) for names in (("a", "a"), "ab", 5, ("a", 1))),
    *((ClassLabel, {"num_classes": number}) for number in (0, 2.5)),
    (ClassLabel, {}),
    (ClassLabel, {"names": ("a", "b"), "num_classes": 3}),
    (ClassLabel, {"num_classes": 2, "shape": (None, None)}),
    (Tokens, {"dtype": "float32"}),
    (Tokens, {"dtype": "uint8", "vocab_size": 257}),
    *((Tokens, {"vocab_size": size}) for size in (0, "9")),
    *((Image, {"shape": shape}) for shape in ((6, 9), (6, 9, 5), (6, 9, None))),
    *((Image, {"quality": quality}) for quality in (0, 95.5)),
    *((Image, {"encoding": "jpeg", "shape": (6, 9, channels)}) for channels in (2, 4)),
    (Image, {"encoding": "webp"}),
    (Image, {"dtype": "uint16", "encoding": "jpeg"}),
    *((kind, {"dtype": dtype}) for kind, dtype in ((Image, "float32"), (Mask, "int32"), (Depth, "float64"))),
    *((kind, {"shape": (6, 9, 1)}) for kind in (Mask, Depth)),
    *((Mask, {"palette": palette}) for palette in (((1, 2),), ((1, 2, 256),), ((1, 2, -1),), ((1, 2, 3),) * 257, 5)),
    (Mask, {"names": [str(number) for number in range(257)]}),
    (Mask, {"names": [str(number) for number in range(65537)], "dtype": "uint16"}),
    (Mask, {"names": ("a", "b"), "palette": ((1, 2, 3),)}),
    *((Video, arguments) for arguments in ({"shape": (1, 2, 3)}, {"fps": 0}, {"num_frames": 0}, {"stride": "two"})),
    *((Video, arguments) for arguments in ({"stride": 2, "decoded": False}, {"decoded": 2})),
    *((Audio, arguments) for arguments in ({"sample_rate": 0}, {"num_channels": "two"}, {"encoding": "mp3"})),
]


@pytest.mark.parametrize(("kind", "arguments"), WRONG_DECLARATIONS, ids=range(len(WRONG_DECLARATIONS)))
def test_wrong_declarations_are_refused(kind, arguments):
    """The constructor refuses them, before any sample is seen."""
    with pytest.raises(SchemaError, match=f"^{kind.__name__}: "):
        kind(**arguments)
