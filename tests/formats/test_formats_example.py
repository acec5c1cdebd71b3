"""The wire format of tf.train.Example, compared byte for byte with protobuf."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from datamat.errors import CorruptDataError, SchemaError
from datamat.formats.example import ExampleEncoder, decode_example, encode_example

tf = pytest.importorskip("tensorflow")  # which has no wheels for the newest Python

int64s = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, 0, 1, 127, 128, 2**14, 2**35, 2**63 - 1, -(2**63)])
int64_lists = st.lists(int64s, max_size=6) | st.lists(int64s, min_size=3, max_size=6).map(lambda values: values * 20)
float32_arrays = st_numpy.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))
bytes_lists = st.binary(max_size=300) | st.lists(st.binary(max_size=40), max_size=5)
names = st.text(st.sampled_from("ab/_é\x00\uffff𐀀"), max_size=4) | st.text(st.characters(codec="utf-8"), max_size=6)
columns_and_values = st.dictionaries(
    names,
    st.tuples(st.just("bytes"), bytes_lists)
    | st.tuples(st.just("int64"), int64_lists.map(lambda values: np.array(values, np.int64)))
    | st.tuples(st.just("float32"), float32_arrays),
    max_size=6,
)

PINNED = (
    "0a420a1b 0a06612f 73697a65 12111a0f 0a0d03ff ffffffff ffffffff 01ac020a "
    "0b0a0161 12060a04 0a028950 0a070a01 6e12020a 000a0d0a 01781208 12060a04 0000003f"
)


def feature(kind, value):
    if kind == "bytes":
        values = [value] if isinstance(value, bytes) else value
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if kind == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value.tolist()))
    return tf.train.Feature(float_list=tf.train.FloatList(value=value.tolist()))


def protobuf_example(columns):
    features = {name: feature(kind, value) for name, (kind, value) in columns.items()}
    return tf.train.Example(features=tf.train.Features(feature=features))


def encoded(columns):
    kinds = {name: kind for name, (kind, _) in columns.items()}
    return encode_example({name: value for name, (_, value) in columns.items()}, kinds)


def comparable(record):
    """Return each column with its type, and numbers as raw bytes: NaNs count by their bits."""
    return {
        name: value if isinstance(value, list) else (value.dtype.str, value.tobytes()) for name, value in record.items()
    }


@settings(max_examples=80, deadline=None)
@given(columns_and_values)
def test_encode_equals_protobuf(columns):
    """Any record has the bytes of SerializeToString(deterministic=True)."""
    assert encoded(columns) == protobuf_example(columns).SerializeToString(deterministic=True)


@settings(max_examples=80, deadline=None)
@given(columns_and_values)
def test_decode_inverts_encode(columns):
    """A decoded record has the values and types that were encoded, bit for bit."""
    decoded = decode_example(encoded(columns))

    expected = {name: [value] if isinstance(value, bytes) else value for name, (_, value) in columns.items()}
    assert comparable(decoded) == comparable(expected)
    assert all(value.flags.writeable for value in decoded.values() if isinstance(value, np.ndarray))


@settings(max_examples=30, deadline=None)
@given(columns_and_values, st.sampled_from([bytearray, memoryview]))
def test_decode_takes_any_buffer(columns, buffer_type):
    """Bytes from a memory map or a larger buffer decode as bytes do."""
    data = encoded(columns)

    assert comparable(decode_example(buffer_type(data))) == comparable(decode_example(data))


def test_encoding_is_pinned():
    """The bytes are the same on every machine and in every version; a key follows longer keys that start with it."""
    record = {"n": [], "a": b"\x89P", "a/size": np.array([3, -1, 300]), "x": np.array([0.5], np.float32)}
    kinds = {"x": "float32", "n": "bytes", "a": "bytes", "a/size": "int64"}

    data = encode_example(record, kinds)

    assert data.hex(" ", -4) == PINNED


@pytest.mark.parametrize("kind", ["bytes", "int64", "float32"])
def test_empty_list_keeps_the_kind_of_its_column(kind):
    """TensorFlow refuses an empty list of another kind than requested."""
    empty = [] if kind == "bytes" else np.empty(0, kind)
    dtype = tf.string if kind == "bytes" else tf.as_dtype(kind)

    data = encode_example({"a": empty}, {"a": kind})

    assert tf.train.Example.FromString(data).features.feature["a"].WhichOneof("kind") is not None
    parsed = tf.io.parse_single_example(data, {"a": tf.io.VarLenFeature(dtype)})
    assert parsed["a"].shape[0] == 0


def test_nan_keeps_its_payload():
    """Every bit pattern of a float survives, signalling NaNs too."""
    bits = np.array([0x7F800001, 0x7FC12345, 0xFFC00000, 0x80000000, 1], np.uint32)

    decoded = decode_example(encode_example({"a": bits.view(np.float32)}, {"a": "float32"}))

    assert decoded["a"].view(np.uint32).tolist() == bits.tolist()


def test_large_values_are_not_copied():
    """The encoder passes a large value on as the object it is."""
    value = bytes(5000)

    pieces, size = ExampleEncoder({"a": "bytes", "b": "bytes"}).encode({"a": value, "b": [b"x", value]})

    assert sum(piece is value for piece in pieces) == 2
    assert size == sum(map(len, pieces))


def test_value_of_megabytes_equals_protobuf():
    """Lengths of four varint bytes are right."""
    columns = {"a": ("bytes", bytes(3_000_000)), "b": ("float32", np.zeros(1_000_000, np.float32))}

    data = encoded(columns)

    assert data == protobuf_example(columns).SerializeToString(deterministic=True)
    assert decode_example(data)["a"] == [columns["a"][1]]


def test_record_over_two_gib_is_refused():
    """Protobuf could not read it, so it is not written."""
    value = bytes(1 << 24)

    with pytest.raises(SchemaError, match=r"Example of 21474\d{5} bytes, .*2147483647"):
        ExampleEncoder({"a": "bytes"}).encode({"a": [value] * 128})


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        ("bytes", "text", "str"),
        ("bytes", ["text"], "list of str"),
        ("bytes", [b"a", None], "list of NoneType, bytes"),
        ("bytes", np.array([b"a"]), "|S1 (1,)"),
        ("bytes", 3, "int"),
        ("int64", [1], "list"),
        ("int64", np.array([1], np.int32), "int32 (1,)"),
        ("int64", np.array([[1]]), "int64 (1, 1)"),
        ("int64", np.array([1], ">i8"), ">i8 (1,)"),
        ("float32", np.array([1.0]), "float64 (1,)"),
        ("float32", np.float32(1), "float32"),
    ],
)
def test_value_of_another_type_names_the_column(kind, value, found):
    """The message has column, found and wanted."""
    with pytest.raises(SchemaError, match=rf"column 'a/b' holds {re.escape(found)}; want .*convert it"):
        encode_example({"a/b": value}, {"a/b": kind})


def test_record_with_other_columns_names_them():
    """A missing and an unknown column are both named."""
    with pytest.raises(SchemaError, match=r"missing \['b'\], unknown \['c'\]"):
        encode_example({"a": b"", "c": b""}, {"a": "bytes", "b": "bytes"})


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def one_column(feature_bytes, name=b"a"):
    return field(1, field(1, field(1, name) + field(2, feature_bytes)))


def two_columns(feature_bytes):
    """Return an Example in which an entry follows the one of this feature."""
    first = field(1, field(1, b"a") + field(2, feature_bytes))
    return field(1, first + field(1, field(1, b"b") + field(2, field(1, b""))))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", {}),
        (b"\x0a\x00", {}),
        (one_column(b""), {"a": []}),
        (field(1, field(1, field(1, b"a"))), {"a": []}),
        (field(1, field(1, field(2, field(1, field(1, b"x"))))), {"": [b"x"]}),
        (field(1, field(1, field(2, field(1, field(1, b"x"))) + field(1, b"a"))), {"a": [b"x"]}),
        (one_column(field(3, b"\x08\x05\x08\x07")), {"a": [5, 7]}),
        (one_column(field(3, b"\x08\x05" + field(1, b"\x07\x08") + b"\x08\x09")), {"a": [5, 7, 8, 9]}),
        (one_column(field(3, field(1, b"\x85\x80\x80\x00"))), {"a": [5]}),
        (one_column(field(2, b"\x0d\x00\x00\x80\x3f" + field(1, b"\x00\x00\x00\x40"))), {"a": [1.0, 2.0]}),
        (one_column(field(1, field(1, b"x")) + field(1, field(1, b"y"))), {"a": [b"x", b"y"]}),
        (one_column(field(1, field(1, b"x")) + field(3, field(1, b"\x01"))), {"a": [1]}),
        (one_column(field(3, field(1, b"\x01"))) * 2, {"a": [1]}),
        (one_column(field(3, field(1, b"\x01"))) + one_column(field(3, field(1, b"\x02"))), {"a": [2]}),
        (one_column(field(9, b"zz") + field(1, field(1, b"x") + b"\x10\x01")), {"a": [b"x"]}),
        (one_column(field(1, field(1, b"x"))) + b"\x13\x08\x01\x1a\x01z\x14", {"a": [b"x"]}),
        (b"\x11" + bytes(8) + b"\x1d" + bytes(4) + one_column(field(1, field(1, b"x"))), {"a": [b"x"]}),
    ],
)
def test_decode_reads_what_other_writers_may_write(data, expected):
    """Unset kinds, other orders, unpacked numbers, repeated and unknown fields read as protobuf reads them."""
    decoded = decode_example(data)

    assert {name: list(value) for name, value in decoded.items()} == expected
    reference = tf.train.Example.FromString(data).features.feature
    for name, value in expected.items():
        kind = reference[name].WhichOneof("kind")
        assert (list(getattr(reference[name], kind).value) if kind else []) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0a", "number at byte 1 does not end"),
        (b"\x0a\x05abc", "byte 0 needs 5 bytes but its message has 3 left"),
        (b"\x0a" + b"\xff" * 9 + b"\x01", "needs 18446744073709551615 bytes"),
        (b"\x0a" + b"\xff" * 12, "number at byte 1 does not end"),
        (b"\x02\x00", "field with number 0"),
        (b"\x0e\x00", "wire type 6"),
        (b"\x0c", "wire type 4"),
        (b"\x0b\x08\x01", "group with field number 1 has no end"),
        (b"\x0b" * 200, "wire type 3"),
        (b"\x15\x00\x00", "needs 4 bytes"),
        (one_column(field(1, b""), name=b"\xff"), "column name .* is not UTF-8"),
        (one_column(field(2, field(1, b"\x00\x00\x00"))), "float list .* not a multiple of 4"),
        (one_column(field(3, field(1, b"\x80"))), "does not end"),
        # A value that is longer than its list, but not than the file; a list that is longer than its feature.
        (two_columns(field(1, b"\x0a\x05x")), "needs 5 bytes but its message has 1 left"),
        (two_columns(field(2, b"\x0a\x08abcd")), "needs 8 bytes but its message has 4 left"),
        (field(1, field(1, field(1, b"a") + b"\x12\x02\x0a\x03\x0a\x01x")), "needs 3 bytes but its message has 0 left"),
        (one_column(field(3, field(1, b"\x01" * 40 + b"\x80"))), "holds a number without an end"),
        (one_column(field(3, field(1, b"\x01" * 40 + b"\x80" * 12 + b"\x01"))), "holds a number without an end"),
    ],
)
def test_decode_refuses_what_is_no_example(data, reason):
    """Malformed bytes raise CorruptDataError with the position, and nothing else."""
    with pytest.raises(CorruptDataError, match=reason):
        decode_example(data)


@settings(max_examples=80, deadline=None)
@given(columns_and_values, st.data())
def test_decode_of_damaged_bytes_is_an_error_or_what_protobuf_reads(columns, data):
    """No damage makes the decoder crash, read past the end, or accept what protobuf refuses."""
    damaged = bytearray(encoded(columns))
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    try:
        decoded = comparable(decode_example(bytes(damaged)))
    except CorruptDataError:
        with pytest.raises(Exception, match="rror parsing"):
            tf.train.Example.FromString(bytes(damaged))
        return

    try:
        message = tf.train.Example.FromString(bytes(damaged))
    except Exception:
        return  # protobuf also checks the encoding of a key that a later field replaces
    for name, value in message.features.feature.items():
        kind = value.WhichOneof("kind")
        expected = {
            None: list,
            "bytes_list": lambda value=value: list(value.bytes_list.value),
            "int64_list": lambda value=value: np.array(value.int64_list.value, np.int64),
            "float_list": lambda value=value: np.array(value.float_list.value, np.float32),
        }[kind]()
        # Python's floats may set the quiet bit of a NaN: compare those as numbers.
        assert name in decoded
        if kind != "float_list":
            assert comparable({name: expected}) == {name: decoded[name]}
