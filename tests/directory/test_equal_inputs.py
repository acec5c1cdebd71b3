"""Equal inputs in different splits are named, by `run` and by `describe`."""

import logging

import numpy as np
import pytest
from memory_store import s3
from small_pairs import job, make_pairs

from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, describe
from datamat.testing import InlineExecutor

__all__ = ["s3"]


class Sizes(DatasetWriter):
    """Rows of files, as given; the sizes of the first."""

    name = "sizes"
    features = Features({"x": Scalar("int64")})

    def __init__(self, rows):
        self.rows = rows

    def index(self, source):
        return self.rows

    def read(self, row):
        return {"x": len(row.fields["a"].read_bytes()) if "a" in row.fields else 0}


@pytest.fixture
def made(tmp_path, caplog):
    """Give a function that makes a dataset of rows (key, split, names of files), and returns warnings and description.

    The content of a file is the part of its name before the dash.
    """

    def made(*rows, output=tmp_path / "out", **options):
        def path(name):
            (tmp_path / name).write_text(name.partition("-")[0])
            return tmp_path / name

        listed = [
            IndexRow(key, split, {field: path(name) for field, name in zip("ab", names, strict=False)})
            for key, split, *names in rows
        ]
        with caplog.at_level(logging.WARNING):
            Materializer(Sizes(listed), None, output).run(progress=False, executor=InlineExecutor(), **options)
        said = [record.getMessage() for record in caplog.records if "same input" in record.getMessage()]
        return said, describe(str(output))

    return made


@pytest.mark.parametrize(
    ("rows", "num_rows", "first"),
    [
        ([("k1", "train", "one"), ("k2", "val", "two")], 0, []),
        ([("k1", "train", "one-1"), ("k2", "val", "one-2")], 2, [{"train": "k1", "val": "k2"}]),
        ([("k1", "train", "one"), ("k2", "val", "one")], 2, [{"train": "k1", "val": "k2"}]),
        ([("k1", "train", "one-1"), ("k2", "train", "one-2"), ("k3", "val", "two")], 0, []),
        ([("k1", "train", "box"), ("k2", "train", "box"), ("k3", "val", "box")], 0, []),
        ([("k1", "train", "large1", "none-1"), ("k2", "val", "large2", "none-2")], 0, []),
        ([("k1", "train", "large-1", "m"), ("k2", "val", "large-2", "n")], 2, [{"train": "k1", "val": "k2"}]),
        ([("k1", "train", "-1"), ("k2", "val", "-2")], 0, []),
        ([("k1", "train"), ("k2", "val")], 0, []),
        (
            [("k1", "val", "one-1"), ("k2", "train", "one-2"), ("k3", "train", "one-3"), ("k4", "test", "one-4")],
            4,
            [{"train": "k2", "val": "k1", "test": "k4"}],
        ),
    ],
    ids=["different", "same", "same_file", "one_split", "container", "mask", "picture", "empty", "no_file", "three"],
)
def test_equal_inputs_are_found(made, rows, num_rows, first):
    """Of a row with several files the largest counts; a file of many samples says nothing of them."""
    said, description = made(*rows)

    assert (description.equal_inputs.num_rows, list(description.equal_inputs.first)) == (num_rows, first)
    assert [str(description.equal_inputs) in text for text in said] == [True] * bool(num_rows)
    assert (str(description.equal_inputs) in str(description)) is bool(num_rows)


def test_one_warning_names_the_first_of_many(made):
    """And how many there are."""
    rows = [
        (f"k{number:02d}", split, f"{number // 2}-{number}")
        for number in range(40)
        for split in ["train", "val"][number % 2 :][:1]
    ]

    (said,), description = made(*rows)

    assert "40 rows have the same input file" in said and "train 'k00' = val 'k01'" in said and said.count(" = ") == 3
    assert [keys["train"] for keys in description.equal_inputs.first] == ["k00", "k02", "k04"]


def test_description_of_a_url_names_them(made, s3, tmp_path):
    """It fetches the index for that."""
    said, description = made(
        ("k1", "train", "one-1"), ("k2", "val", "one-2"), output="s3://bucket/set", scratch=tmp_path / "scratch"
    )

    assert said and description.equal_inputs.num_rows == 2


def test_description_of_a_directory_without_its_index_has_none(made, tmp_path):
    """It describes the rest."""
    made(("k1", "train", "one-1"), ("k2", "val", "one-2"))
    (tmp_path / "out/_index/val.index").unlink()

    assert not describe(tmp_path / "out").equal_inputs and describe(tmp_path / "out").ok


def test_pictures_of_a_dataset_that_were_copied(tmp_path, caplog):
    """Of images with masks, as people copy them."""
    source = make_pairs(tmp_path / "pairs", num_train=4, num_val=2)
    copy = source / "val/val000.png"
    copy.write_bytes((source / "train/train002.png").read_bytes())

    job(source, tmp_path / "out").run(progress=False)

    assert np.unique([text for text in caplog.messages if "train 'train002' = val 'val000'" in text]).size == 1
