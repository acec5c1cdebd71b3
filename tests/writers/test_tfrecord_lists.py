"""TFRecord files whose records hold none, one or several values of a field, and steps of such lists."""

import numpy as np
import pytest
from foreign_files import tfrecord

from datamat import BBoxes, ListOf, Materializer, Nullable, Scalar, Tensor, Text, load
from datamat.formats.example import encode_example
from datamat.formats.tfrecord import frame
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter


def framed(payload):
    return b"".join(frame([payload], len(payload)))


def field(number, data):
    """Return a field of a message of protocol buffers, of less than 128 bytes."""
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def feature(values, kind):
    """Return a `tf.train.Feature` of numbers below 128, or of bytes."""
    if kind == "bytes_list":
        return field(1, b"".join(field(1, value) for value in values))
    data = bytes(values) if kind == "int64" else np.array(values, "<f4").tobytes()
    return field(3 if kind == "int64" else 2, field(1, data))


def sequence(steps, kind):
    """Return a `tf.train.SequenceExample` with the number 7 and a feature list `x`."""
    lists = field(1, b"x") + field(2, b"".join(field(1, feature(step, kind)) for step in steps))
    return encode_example({"n": np.array([7])}, {"n": "int64"}) + field(2, field(1, lists))


def numbers(*lists):
    return tfrecord(
        [{"x": np.array(values, np.int64), "n": np.array([1])} for values in lists], {"x": "int64", "n": "int64"}
    )


def floats(*lists):
    return tfrecord([{"x": np.array(values, np.float32)} for values in lists], {"x": "float32"})


def texts(*lists):
    return tfrecord([{"x": list(values)} for values in lists], {"x": "bytes_list"})


def steps(kind, *rows):
    return b"".join(framed(sequence(row, kind)) for row in rows)


def without(*lists):
    """Return records that lack the field where there is no list."""
    kinds = {"x": "int64", "n": "int64"}
    rows = [{"n": np.array([1]), **({} if values is None else {"x": np.array(values)})} for values in lists]
    return b"".join(tfrecord([row], {name: kinds[name] for name in row}) for row in rows)


OBJECTS = [[], [5], [1, 2, 3]]
BOX = [0.0, 0.25, 0.5, 1.0]


def plain(value):
    return [plain(item) for item in value] if isinstance(value, (list, np.ndarray)) else value


@pytest.mark.parametrize(
    ("name", "data", "declared", "wanted"),
    [
        ("x", numbers(*OBJECTS), None, OBJECTS),
        ("x", numbers(*OBJECTS), ListOf(Scalar("int32")), OBJECTS),
        ("x", numbers(*OBJECTS), Tensor((None,), "int64"), OBJECTS),
        ("x", numbers(*reversed(OBJECTS)), Nullable(ListOf(Scalar("int64"))), [[1, 2, 3], [5], None]),
        ("x", numbers([5], []), Nullable(Scalar("int64")), [5, None]),
        ("x", floats(*OBJECTS), None, OBJECTS),
        ("x", floats([], BOX, BOX + BOX), BBoxes(), [[], [BOX], [BOX, BOX]]),
        ("x", floats(BOX, BOX), Tensor((2, 2), "float32"), [[BOX[:2], BOX[2:]]] * 2),
        ("x", texts([], [b"a"], [b"b", b"c"]), None, [[], ["a"], ["b", "c"]]),
        ("x", texts([], [b"a"], [b"b", b"c"]), ListOf(Text()), [[], ["a"], ["b", "c"]]),
        ("x", texts([], [b"\xff"], [b"\xfe", b"\x00"]), None, [[], [b"\xff"], [b"\xfe", b"\x00"]]),
        ("x", without(None, [5], [1, 2]), None, [[], [5], [1, 2]]),
        ("x", without(None, [5], [1, 2]), ListOf(Scalar("int64")), [[], [5], [1, 2]]),
        ("x[]", steps("int64", [[1, 2], [3]], [[4]], [[]], []), None, [[[1, 2], [3]], [[4]], [[]], []]),
        ("x[]", steps("int64", [[1, 2], [3]], [[4]]), ListOf(ListOf(Scalar("int64"))), [[[1, 2], [3]], [[4]]]),
        ("x[]", steps("float32", [[1, 2], [3, 4]], [[5, 6]]), None, [[[1, 2], [3, 4]], [[5, 6]]]),
        ("x[]", steps("int64", [[1], [2]], [[3]]), None, [[1, 2], [3]]),
        ("x[]", steps("bytes_list", [[b"a", b"b"], [b"c"]], [[b"d"]]), None, [[["a", "b"], ["c"]], [["d"]]]),
        ("x[]", steps("bytes_list", [[b"a"], [b"c"]], [[b"d"]]), None, [["a", "c"], ["d"]]),
    ],
)
def test_lists_and_steps_of_tfrecords_keep_their_borders(tmp_path, name, data, declared, wanted):
    (tmp_path / "a.tfrecord").write_bytes(data)
    writer = ImportWriter(features=None if declared is None else {name: declared})

    Materializer(writer, tmp_path / "a.tfrecord", tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    found = {sample["key"]: sample[name] for sample in load(tmp_path / "out")}
    assert [plain(found[key]) for key in sorted(found)] == wanted
