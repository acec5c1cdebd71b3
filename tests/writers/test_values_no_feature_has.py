"""Values that numpy, pandas, polars and Arrow have and no feature does are stored exactly, or refused by name."""

import numpy as np
import pyarrow as pa
import pytest

from datamat import BBoxes, DatamatError, ListOf, Materializer, Tensor, load, materialize
from datamat.testing import InlineExecutor

GAPS = np.ma.masked_array([1, -9999, 3], [0, 1, 0])
FULL = np.ma.masked_array([1, 2, 3])


def tensors(permutation):
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3), permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, pa.array([list(range(6))], pa.list_(pa.int32(), 6)))


def from_pandas(make):
    return lambda: make(pytest.importorskip("pandas"))


def from_polars(make):
    return lambda: make(pytest.importorskip("polars"))


BOOLS = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 5], pa.int8()))
TWICE = pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int32()))
REFUSED = {
    "masked array": lambda: [{"x": GAPS}],
    "masked column": lambda: {"x": GAPS},
    "masked number": lambda: [{"x": GAPS[1]}],
    "masked array in a dict": lambda: [{"d": {"x": GAPS}}],
    "permuted tensor": lambda: pa.table({"x": tensors([1, 0])}),
    "permuted tensor in a list": lambda: pa.table({"x": pa.ListArray.from_arrays([0, 1], tensors([1, 0]))}),
    "key twice": lambda: pa.table({"x": TWICE}),
    "key twice in a struct": lambda: pa.table({"d": pa.StructArray.from_arrays([TWICE], ["x"])}),
    "field of a struct": lambda: pa.table({"a": pa.array([{"x": 1}]), "a/x": pa.array([2])}),
    "field of a dict": lambda: [{"a": {"x": 1}, "a/x": 2}],
    "period": from_pandas(lambda pd: pd.DataFrame({"x": pd.period_range("2020-01", periods=2, freq="M")})),
    "interval": from_pandas(lambda pd: pd.DataFrame({"x": pd.interval_range(0, 2)})),
    "category of periods": from_pandas(
        lambda pd: pd.DataFrame({"x": pd.Categorical(pd.period_range("2020-01", periods=2, freq="M"))})
    ),
    "object": from_polars(lambda pl: pl.DataFrame({"x": pl.Series([object()], dtype=pl.Object)})),
}
STORED = {
    "full array": (lambda: [{"x": FULL}], [[1, 2, 3]]),
    "bool8": (lambda: pa.table({"x": BOOLS}), [True, False, True]),
    "bool8 in a list": (lambda: pa.table({"x": pa.ListArray.from_arrays([0, 2, 3], BOOLS)}), [[True, False], [True]]),
    "tensor": (lambda: pa.table({"x": tensors(None)}), [[[0, 1, 2], [3, 4, 5]]]),
    "same order": (lambda: pa.table({"x": tensors([0, 1])}), [[[0, 1, 2], [3, 4, 5]]]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path, name):
    source = REFUSED[name]()

    with pytest.raises(DatamatError, match=r"x'|map holds a key twice"):
        Materializer(source=source, output=tmp_path / "out").run(executor=InlineExecutor(), progress=False)


@pytest.mark.parametrize("name", STORED)
def test_stored_exactly(tmp_path, name):
    make, wanted = STORED[name]

    Materializer(source=make(), output=tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    found = sorted(load(tmp_path / "out"), key=lambda sample: sample["key"])
    assert [np.asarray(sample["x"]).tolist() for sample in found] == wanted


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        (GAPS, None),
        (np.ma.masked_array(np.zeros((4, 4, 3), np.uint8), np.ones((4, 4, 3))), None),
        (GAPS, Tensor((3,), "int64")),
        ([GAPS], ListOf(Tensor((3,), "int64"))),
        (np.ma.masked_array(np.zeros((1, 4), np.float32), [[0, 1, 0, 0]]), BBoxes()),
    ],
)
def test_functions_give_no_masked_values(tmp_path, value, feature):
    features = None if feature is None else {"x": feature}

    with pytest.raises(DatamatError, match="values of an array are masked"):
        materialize(
            lambda number: {"x": value},
            range(2),
            tmp_path / "out",
            features=features,
            executor=InlineExecutor(),
            progress=False,
        )
