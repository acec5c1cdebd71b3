"""Blocks of rows, held byte for byte to the same rows appended one by one."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from datamat.errors import SchemaError
from datamat.features.base import RaggedColumn
from datamat.formats import get_format
from datamat.formats.example import decode_block, decode_example, encode_example
from datamat.formats.tfrecord import encode_block, frame

FORMATS = ["tfrecord", "tfrecord.gz"]


def column(num_rows):
    """Draw one column of that many rows with its kind."""
    shapes = st.sampled_from([(num_rows,), (num_rows, 0), (num_rows, 1), (num_rows, 3)])
    ints = st.sampled_from([0, 1, 127, 128, 2**20, 2**63 - 1, -1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
    texts = st.binary(max_size=20) | st.sampled_from([b"", b"\0", b"a\0\0", bytes(200)])
    return (
        st.tuples(st.just("bytes"), st.lists(texts, min_size=num_rows, max_size=num_rows))
        | st.tuples(st.just("int64"), st_numpy.arrays(np.int64, shapes, elements=ints))
        | st.tuples(st.just("float32"), st_numpy.arrays(np.float32, shapes, elements=st.floats(width=32)))
        | st.tuples(
            st.just("int64"), st.lists(st.lists(ints, max_size=3), min_size=num_rows, max_size=num_rows).map(ragged_of)
        )
    )


def ragged_of(lists):
    return RaggedColumn(np.array([*itertools.chain(*lists)], np.int64), np.array([*map(len, lists)], np.int64))


names = st.text(st.sampled_from("ab/é"), max_size=3)
blocks = st.integers(1, 6).flatmap(lambda num_rows: st.dictionaries(names, column(num_rows), min_size=1, max_size=5))


def row(columns, index):
    return {
        name: np.ravel(values[index]) if isinstance(values, np.ndarray) else values[index]
        for name, values in columns.items()
    }


def by_rows(shard_format, columns, kinds, num_rows):
    file = io.BytesIO()
    writer = shard_format.writer(file, kinds)
    for index in range(num_rows):
        writer.append(row(columns, index))
    return writer.finish(), file.getvalue()


def by_block(shard_format, columns, kinds):
    file = io.BytesIO()
    writer = shard_format.writer(file, kinds)
    writer.append_block(columns)
    return writer.finish(), file.getvalue()


@settings(max_examples=80, deadline=None)
@given(blocks)
def test_encode_block_equals_single_records(drawn):
    """The matrix form gives the bytes of encode_example and frame for each row."""
    kinds = {name: kind for name, (kind, _) in drawn.items()}
    columns = {name: values for name, (_, values) in drawn.items()}

    packed, sizes = encode_block(columns, kinds)

    payloads = [encode_example(row(columns, index), kinds) for index in range(len(sizes))]
    records = [b"".join(frame([payload], len(payload))) for payload in payloads]
    assert packed.tobytes() == b"".join(records)
    assert sizes.tolist() == [len(record) for record in records]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("sizes", [[3000, 2999], [2**17, 0], [0, 1, 2, 2**20, 3], [2**21]])
def test_append_block_of_large_or_uneven_rows_equals_append(format_name, sizes):
    """Rows that would waste memory in a matrix take the other path, to the same bytes."""
    columns = {"key": [bytes(size) for size in sizes], "n": np.arange(len(sizes))}
    kinds = {"key": "bytes", "n": "int64"}
    shard_format = get_format(format_name)

    assert by_block(shard_format, columns, kinds) == by_rows(shard_format, columns, kinds, len(sizes))


@pytest.mark.parametrize("format_name", FORMATS)
def test_blocks_and_records_mix(format_name):
    """How records are handed over never shows in the file."""
    columns = {"key": [b"row-%d" % index for index in range(4000)], "n": np.arange(4000)}
    kinds = {"key": "bytes", "n": "int64"}
    shard_format = get_format(format_name)
    file = io.BytesIO()

    writer = shard_format.writer(file, kinds)
    for start in range(0, 4000, 1000):
        writer.append_block({name: values[start : start + 700] for name, values in columns.items()})
        for index in range(start + 700, start + 1000):
            writer.append(row(columns, index))
    offsets = writer.finish()

    assert (offsets, file.getvalue()) == by_rows(shard_format, columns, kinds, 4000)
    assert writer.num_records == 4000
    assert writer.num_bytes == len(file.getvalue())


def test_empty_block_appends_nothing():
    """No rows are fine, with columns of any kind."""
    offsets, data = by_block(
        get_format("tfrecord"), {"a": [], "b": np.empty((0, 3), np.int64)}, {"a": "bytes", "b": "int64"}
    )

    assert (len(offsets), data) == (0, b"")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [b"x"]}, r"missing \['n'\]"),
        ({"a": [b"x"], "n": np.array([1, 2])}, r"differ in length: \{'a': 1, 'n': 2\}"),
        ({"a": ["x"], "n": np.array([1])}, "column 'a' holds list of str; want one bytes value per row"),
        ({"a": [[b"x"]], "n": np.array([1])}, "column 'a' holds list of list"),
        ({"a": np.array([b"x\0"]), "n": np.array([1])}, r"column 'a' holds \|S2 \(1,\)"),
        ({"a": [b"x"], "n": [1]}, r"column 'n' holds list; want a numpy array of int64, \(n,\) or \(n, k\)"),
        ({"a": [b"x"], "n": np.zeros((1, 2, 3), np.int64)}, r"column 'n' holds int64 \(1, 2, 3\)"),
        ({"a": [b"x"], "n": np.array([1.0])}, r"column 'n' holds float64 \(1,\)"),
    ],
)
def test_block_of_another_form_is_refused_whole(columns, message):
    """The message names the column, and nothing of the block is written."""
    writer = get_format("tfrecord").writer(io.BytesIO(), {"a": "bytes", "n": "int64"})

    with pytest.raises(SchemaError, match=message):
        writer.append_block(columns)

    assert (writer.num_records, writer.num_bytes) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(blocks, st.data())
def test_decoded_block_is_what_decode_example_returns(columns, data):
    """In messages with a changed byte, too: a block is refused, or holds what that message says; of some columns."""
    kinds = {name: kind for name, (kind, _) in columns.items()}
    num_rows = len(next(iter(columns.values()))[1])
    messages = [
        encode_example(row({name: values for name, (_, values) in columns.items()}, i), kinds) for i in range(num_rows)
    ]
    is_changed = data.draw(st.booleans())
    if is_changed:
        victim = data.draw(st.integers(0, num_rows - 1))
        changed = bytearray(messages[victim])
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        messages[victim] = bytes(changed)
    else:
        wanted = data.draw(st.sets(st.sampled_from(sorted(kinds)), min_size=1))
        kinds = {name: kinds[name] for name in wanted}
    sizes = np.array([len(message) for message in messages])
    stops = 3 + np.cumsum(sizes)

    found = decode_block(b"abc" + b"".join(messages) + b"xyz", stops - sizes, stops, kinds)

    if found is None:
        assert is_changed
        return
    assert found.keys() == kinds.keys()
    for index, message in enumerate(messages):
        record = decode_example(message)
        for name, values in found.items():
            value = [values[index]] if isinstance(values, list) else values.rows()[index]
            assert np.array_equal(value, record[name], equal_nan=kinds[name] == "float32")
            assert isinstance(value, list) or value.dtype == record[name].dtype


_DRAWN = np.random.default_rng(0)
_BITS = (7, 8, 14, 21, 28, 29, 35, 49, 56, 57, 63)  # of the largest number: its bytes fit into words of four or eight


@pytest.mark.parametrize(
    "wanted",
    [
        [_DRAWN.integers(-(1 << bits), 1 << bits, size) for bits in (1, 20, 62) for size in (0, 30_000, 1, 20_000)],
        *([_DRAWN.integers(0, 1 << bits, size) for size in (300, 0, 200)] for bits in _BITS),
        *([np.array([1] * ((1 << 16) - size) + [(1 << 21) - 1])] for size in range(4)),
    ],
    ids=[
        "many",
        *(f"{bits} bits" for bits in _BITS),
        *(f"last number begins {size} bytes before a piece" for size in range(4)),
    ],
)
def test_long_lists_of_integers_are_decoded_in_pieces(wanted):
    """Numbers are unpacked 64 KiB at a time; those of a record may lie in two pieces, and so may the last of all."""
    messages = [encode_example({"key": b"k", "n": numbers}, {"key": "bytes", "n": "int64"}) for numbers in wanted]
    ends = np.cumsum([len(message) for message in messages])

    found = decode_block(b"".join(messages), np.concatenate([[0], ends[:-1]]), ends, {"key": "bytes", "n": "int64"})

    assert found is not None
    for numbers, other in zip(wanted, found["n"], strict=True):
        np.testing.assert_array_equal(other, numbers)
