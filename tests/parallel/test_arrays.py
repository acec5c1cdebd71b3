"""Mapped files and tensors travel without a copy in the stream."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat.parallel import PathosExecutor, pickling


def sent(obj):
    """Return what arrives of an object, the size of the stream and those of the buffers beside it."""
    pickled = pickling.dumps_code(obj)
    assert not pickled.standins
    arrived = pickling.load_code(pickled.stream, [bytearray(buffer) for buffer in pickled.buffers])
    return arrived, len(pickled.stream), [buffer.raw().nbytes for buffer in pickled.buffers]


@pytest.fixture
def mapped(tmp_path):
    """Return a mapped file of 2 MB."""
    array = np.memmap(tmp_path / "a file.bin", np.float32, "w+", shape=(1000, 500))
    array[:] = np.arange(500_000).reshape(1000, 500)
    return array


class Table:
    """A `self` with a mapped file."""

    def __init__(self, rows):
        self.rows = rows

    def mark(self, number):
        self.rows[number, 0] = -1
        return type(self.rows) is np.memmap, float(self.rows[number, 1])


def mean_of(rows):
    return type(rows).__name__, float(rows.mean())


def same(rows):
    return rows


def test_workers_map_the_file(method, mapped):
    """On `self`, as an argument and as a result, in which a slice is an offset into the file."""
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(Table(mapped).mark, 2).result(30) == (True, 1001)
        assert pool.submit(mean_of, mapped[10:12]).result(30) == ("memmap", float(mapped[10:12].mean()))
        back = pool.submit(same, mapped[10:12]).result(30)

    back[0, 0] = -5
    assert (mapped[2, 0], mapped[10, 0]) == (-1, -5)


SLICES = st.builds(slice, st.integers(-12, 12), st.integers(-12, 12), st.sampled_from([1, 2, 3, -1, -2]))


@settings(max_examples=60, deadline=None)
@given(first=SLICES, second=SLICES, is_turned=st.booleans(), offset=st.sampled_from([0, 8, 4096 + 16]))
def test_every_view_of_a_mapped_file_arrives(tmp_path_factory, first, second, is_turned, offset):
    """None of its content is in the stream."""
    path = tmp_path_factory.getbasetemp() / "views.bin"
    path.write_bytes(np.arange(1000, dtype=np.int64).tobytes())
    array = np.memmap(path, np.int64, "r", offset=offset, shape=(10, 9))[first, second]
    array = array.T if is_turned else array

    arrived, _, beside = sent(array)

    assert np.array_equal(arrived, array)
    assert arrived.dtype == array.dtype
    assert not beside


def test_mapped_file_is_not_in_the_stream(mapped):
    arrived, size, beside = sent({"all": mapped, "part": np.memmap(mapped.filename, np.float32, "r")[7:]})

    assert size < 1000
    assert not beside
    assert arrived["all"].flags.writeable and not arrived["part"].flags.writeable
    assert arrived["part"][0] == 7


@pytest.mark.parametrize("what", ["replaced", "removed", "private", "computed"])
def test_array_whose_file_has_other_content_is_copied(mapped, what):
    """The copy travels beside the stream, as other arrays do."""
    if what == "replaced":
        os.replace(mapped.filename, f"{mapped.filename}.old")
        mapped.filename.write_bytes(bytes(mapped.nbytes))
    elif what == "removed":
        mapped.filename.unlink()
    elif what == "private":
        mapped.flush()
        mapped = np.memmap(mapped.filename, np.float32, "c", shape=mapped.shape)
        mapped[0] = 3
    else:
        mapped = np.add(mapped, 1, out=mapped.copy())

    arrived, size, beside = sent(mapped)

    assert np.array_equal(arrived, mapped)
    assert (size < 1000, beside) == (True, [mapped.nbytes])
    arrived[:] = 0
    assert mapped.any()


# ---------------------------------------------------------------- torch


def test_tensors_go_beside_the_stream():
    """Tensors that share memory here share it in the worker."""
    torch = pytest.importorskip("torch")
    weights = torch.arange(100_000, dtype=torch.float32)
    layer, tied = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    tied.weight = layer.weight

    (arrived, part, model), _, beside = sent([weights, weights[10:20], torch.nn.Sequential(layer, tied)])

    assert sorted(beside) == [4 * 300 * 300, 4 * 100_000]
    arrived[10] = -1
    assert part[0] == -1
    assert weights[10] == 10
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight, layer.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.tensor([]),
        lambda torch: torch.tensor(3),
        lambda torch: torch.ones(5000, dtype=torch.bfloat16),
        lambda torch: torch.ones(5000, requires_grad=True),
        lambda torch: torch.eye(100).T[::2],
        lambda torch: torch.nn.Parameter(torch.ones(3)),
        lambda torch: torch.complex(torch.ones(2), torch.ones(2)).conj(),
    ],
)
def test_tensor_of_every_kind_arrives(make):
    """It keeps its type, its layout and whether it has a gradient."""
    torch = pytest.importorskip("torch")
    tensor = make(torch)

    arrived = sent(tensor)[0]

    assert (type(arrived), arrived.dtype, arrived.stride()) == (type(tensor), tensor.dtype, tensor.stride())
    assert arrived.requires_grad == tensor.requires_grad
    assert torch.equal(arrived, tensor)
