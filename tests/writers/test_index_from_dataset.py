"""`Index.from_dataset`: rows of existing datasets."""

import collections
import sys

import numpy as np
import pytest
import small_pairs
from prepared import Prepared

from datamat import Index, IndexRow, MissingDependencyError, SourceError, load
from datamat.testing import InlineExecutor


class Counting:
    """A map-style dataset that remembers which samples were asked for."""

    def __init__(self, count):
        self.count = count
        self.asked = []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.asked.append(number)
        return {"name": f"n{number}", "value": number}


def rows(*arguments, **options):
    return [(row.key, row.split, dict(row.fields)) for row in Index.from_dataset(*arguments, **options)]


def test_rows_of_an_object_are_its_positions_and_no_sample_is_read():
    """They are the same each time."""
    dataset = Counting(3)

    index = Index.from_dataset(dataset)

    assert [row.key for row in index] == [row.key for row in index] == ["00000000", "00000001", "00000002"]
    assert next(iter(index)) == IndexRow("00000000", None, {"number": 0}, "sample 0")
    assert dataset.asked == []


def test_key_may_be_a_field_of_the_samples():
    """Each sample is then read as its row is listed."""
    dataset = Counting(3)

    index = Index.from_dataset(dataset, key="name")

    assert dataset.asked == []
    assert [row.key for row in index] == ["n0", "n1", "n2"]
    with pytest.raises(SourceError, match=r"sample 0 has no field 'id' for its key; it has name, value"):
        rows(dataset, key="id")


@pytest.mark.parametrize(
    "dataset",
    [
        ["a", "b"],
        range(2),
        np.zeros((2, 5)),
        (np.zeros((2, 5)), np.zeros(2)),
        {"image": np.zeros((2, 5)), "label": np.zeros(2)},
        collections.deque([1, 2]),
    ],
)
def test_any_object_with_a_length_and_items_is_a_dataset(dataset):
    """Lists, arrays, and arrays by column are."""
    assert rows(dataset) == [(f"{number:08d}", None, {"number": number}) for number in range(2)]


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_finished_directory_brings_its_keys_and_splits(tmp_path, kind):
    """Rows come in the order of its records; a copy is a row of its own."""
    source = small_pairs.make_pairs(tmp_path / "source", 5, 2)
    options = {"copies": {"train": 2}, "transform": small_pairs.jitter, "executor": InlineExecutor()}
    Prepared(small_pairs.Pairs(), source, tmp_path / "out", **options).run(progress=False)

    found = rows(kind(tmp_path / "out"))

    assert [key for key, _, _ in found] == [key.replace("#", "-") for key in load(tmp_path / "out").keys()]  # noqa: SIM118
    assert [split for _, split, _ in found] == ["train"] * 10 + ["val"] * 2
    assert [fields["number"] for _, _, fields in found] == list(range(12))


def test_what_is_no_dataset_is_refused(tmp_path):
    """The error says what is accepted."""
    for dataset in (iter([1]), 7, None, b"abc", {1, 2}, {}):
        with pytest.raises(SourceError, match="want a folder finished by datamat"):
            Index.from_dataset(dataset)
    with pytest.raises(SourceError, match=r"manifest\.json"):
        Index.from_dataset(tmp_path)
    for name in ("a.tar", "b.parquet"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=r"several kinds \(\.parquet, \.tar\)"):
        Index.from_dataset(tmp_path)
    with pytest.raises(SourceError, match="differ in length"):
        Index.from_dataset((np.zeros(2), np.zeros(3)))


def test_package_that_is_missing_is_named(tmp_path, monkeypatch):
    """The error has the line that installs it."""
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(MissingDependencyError, match="not installed; install it with: pip install datasets"):
        Index.from_dataset(tmp_path)
