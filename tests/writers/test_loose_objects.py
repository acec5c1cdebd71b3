"""What objects leave out or do late: keys of dicts, files that are opened with the first item, names of their own."""

import numpy as np
import pytest
from foreign_files import tar, tfrecord, write_tfds

from datamat import Bytes, ListOf, Materializer, Nullable, Scalar, SourceError, WorkerOptions, load, materialize
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter

PART = {"a": Scalar("int64"), "b": Nullable(Scalar("int64"))}


def plain(value):
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return list(value) if isinstance(value, (list, np.ndarray)) else value


@pytest.mark.parametrize(
    ("value", "feature", "wanted"),
    [
        ({"a": 1}, PART, {"a": 1, "b": None}),
        ({"a": 1, "b": 2}, PART, {"a": 1, "b": 2}),
        ({"in": {"a": 1}}, {"in": PART}, {"in": {"a": 1, "b": None}}),
        ([{"a": 1}, {"a": 3, "b": 4}], ListOf(PART), {"a": [1, 3], "b": [None, 4]}),
    ],
)
def test_dicts_may_lack_what_may_be_missing(tmp_path, value, feature, wanted):
    materialize(
        lambda number: {"x": value},
        range(2),
        tmp_path / "out",
        features={"x": feature},
        executor=InlineExecutor(),
        progress=False,
    )

    assert all(plain(sample["x"]) == wanted for sample in load(tmp_path / "out"))


class Lazy:
    """A map-style dataset that opens its file with the first item, as those of HDF5 and LMDB do."""

    def __init__(self, path):
        self.path = path
        self.file = None

    def __len__(self):
        return 8

    def __getitem__(self, number):
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 -- as such datasets do
        self.file.seek(number)
        return {"x": self.file.read(1)[0]}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", ["inline", 2])
def test_datasets_may_open_their_file_late(tmp_path, workers):
    (tmp_path / "data.bin").write_bytes(bytes(range(8)))
    source = Lazy(tmp_path / "data.bin")
    how = {"executor": InlineExecutor()} if workers == "inline" else {"workers": WorkerOptions(num_workers=workers)}

    Materializer(source=source, output=tmp_path / "out").run(progress=False, **how)

    assert {sample["key"]: int(sample["x"]) for sample in load(tmp_path / "out")} == {f"{n:08d}": n for n in range(8)}
    assert source.file is None


def in_tfrecord(folder):
    (folder / "a.tfrecord").write_bytes(tfrecord([{"key": b"k", "x": np.array([1])}], {"key": "bytes", "x": "int64"}))
    return folder / "a.tfrecord"


def in_tar(folder):
    (folder / "a.tar").write_bytes(tar({"a.key": b"k", "a.x.txt": b"1"}))
    return folder / "a.tar"


def in_tfds(folder):
    number = {"pythonClassName": "tensorflow_datasets.core.features.Scalar", "tensor": {"dtype": "int64", "shape": {}}}
    rows = [{"key": np.array([5]), "x": np.array([1])}] * 2
    return write_tfds(folder / "mine", {"key": number, "x": number}, rows, {"key": "int64", "x": "int64"})


@pytest.mark.parametrize(
    ("write", "declared"),
    [(in_tfrecord, {}), (in_tfds, {}), (in_tar, {"id": Bytes()})],
    ids=["tfrecord", "tfds", "tar"],
)
def test_field_called_key_never_vanishes(tmp_path, write, declared):
    """It is refused with the ways to keep it, of which one gives it another name."""
    source = write(tmp_path)

    with pytest.raises(SourceError, match=r"'key'.*(rename|features)="):
        Materializer(source=source, output=tmp_path / "out")

    Materializer(ImportWriter(rename={"key": "id"}, features=declared), source, tmp_path / "out").run(
        executor=InlineExecutor(), progress=False
    )
    assert {"key", "id"} <= load(tmp_path / "out")[0].keys()
