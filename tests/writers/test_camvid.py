"""CamVid's layout: which pairs are found, what is refused, and what is stored."""

import shutil

import numpy as np
import pytest

from datamat import IndexRow, Materializer
from datamat.errors import SchemaError, SourceError
from datamat.writers.camvid import CamVidWriter

PREFIX = "/SegNet/CamVid"


@pytest.fixture
def pairs(tmp_path, picture, mask):
    """Make `SPLIT/NAME.png` and `SPLITannot/NAME.png`, and list them where asked."""

    def make(split, names, *, root=tmp_path / "set", listed=False):
        for number, name in enumerate(names):
            picture(root / split / f"{name}.png", seed=number)
            mask(root / f"{split}annot" / f"{name}.png", np.full((12, 16), number % 12, np.uint8))
        if listed:
            lines = [f"{PREFIX}/{split}/{name}.png {PREFIX}/{split}annot/{name}.png\n" for name in names]
            (root / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
        return root

    return make


def rows_of(source) -> list[IndexRow]:
    return list(CamVidWriter().index(source))


def test_lists_decide_splits_and_order(pairs):
    """Rows follow the lists, train before val before test; the foreign prefix is removed."""
    pairs("test", ["c"], listed=True)
    pairs("val", ["d"], listed=True)
    root = pairs("train", ["b", "a"], listed=True)

    rows = rows_of(root)

    assert [(row.key, row.split) for row in rows] == [("b", "train"), ("a", "train"), ("d", "val"), ("c", "test")]
    assert rows[0].fields == {"image": "train/b.png", "mask": "trainannot/b.png"}
    assert rows[1].origin == "train.txt:2"


def test_list_of_another_name_is_a_split(pairs):
    """A list is recognized by its first line; other text files beside it are ignored."""
    pairs("night", ["b"])  # not listed
    root = pairs("night", ["a"], listed=True)
    (root / "README.txt").write_text("64 pairs\n")
    (root / "label_colors.txt").write_text("64 128 64\tAnimal\n")

    assert [(row.key, row.split) for row in rows_of(root)] == [("a", "night")]


def test_source_may_hold_the_folder(pairs, tmp_path):
    """The folder that CamVid was unpacked into is accepted; paths start from there."""
    pairs("train", ["a"], root=tmp_path / "set" / "CamVid", listed=True)

    (row,) = rows_of(tmp_path / "set")

    assert row.fields == {"image": "CamVid/train/a.png", "mask": "CamVid/trainannot/a.png"}


def test_folders_are_paired_without_lists(pairs):
    """Each SPLIT/ goes with SPLITannot/, sorted by split and name; odd names are kept."""
    pairs("train", ["ü.1", "a b", "0001TP_006690"])
    root = pairs("val", ["z"])

    rows = rows_of(root)

    assert [(row.key, row.split) for row in rows] == [
        *((name, "train") for name in ("0001TP_006690", "a b", "ü.1")),
        ("z", "val"),
    ]
    assert rows[2].fields["mask"] == "trainannot/ü.1.png"


def test_list_of_a_windows_editor_is_read(pairs):
    """A byte order mark is not part of the first path, nor a carriage return part of the last."""
    root = pairs("train", ["a"], listed=True)
    text = (root / "train.txt").read_text()
    (root / "train.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())

    (row,) = rows_of(root)

    assert row.fields == {"image": "train/a.png", "mask": "trainannot/a.png"}


def _add(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: _add(root / "val.txt", "\n# none yet\n"), r"val\.txt lists no pairs"),
        (lambda root: _add(root / "train.txt", "train/b.png\n"), r"train\.txt:3: found 1 paths"),
        (lambda root: _add(root / "val.txt", (root / "train.txt").read_text()), r"'a' at train\.txt:1 and val\.txt:1"),
        (lambda root: (root / "train/b.png").unlink(), r"train\.txt:2: image .*train/b\.png"),
        (lambda root: (root / "trainannot/b.png").unlink(), r"train\.txt:2: mask .*trainannot/b\.png"),
    ],
)
def test_lists_that_do_not_fit_are_refused(pairs, tmp_path, change, message):
    """With the line; one without pairs is a mistake, not a split without samples."""
    root = pairs("train", ["a", "b"], listed=True)
    change(root)

    with pytest.raises(SourceError, match=message):
        Materializer("camvid", root, tmp_path / "out").plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: _add(root / "val/b.png", ""), r"val/b\.png: image without annotation"),  # nor a folder of them
        (lambda root: (root / "trainannot/b.png").unlink(), r"train/b\.png: image without annotation"),
        (lambda root: (root / "train/b.png").unlink(), r"trainannot/b\.png: annotation without image"),
        (lambda root: [shutil.rmtree(root / name) for name in ("train", "trainannot")], "list files"),
    ],
)
def test_folders_that_do_not_fit_are_refused(pairs, change, message):
    root = pairs("train", ["a", "b"])
    change(root)

    with pytest.raises(SourceError, match=message):
        rows_of(root)


def test_pairs_come_back_with_the_pixels_of_their_files(pairs, materialized):
    """Masks hold the ids of CamVid's twelve classes."""
    pairs("train", ["a", "b"], listed=True)
    root = pairs("val", ["c"], listed=True)

    found = materialized("camvid", root)

    assert {split: sorted(samples) for split, samples in found.items()} == {"train": ["a", "b"], "val": ["c"]}
    assert found["train"]["b"]["image"].shape == (12, 16, 3)
    np.testing.assert_array_equal(found["train"]["b"]["mask"], np.full((12, 16), 1, np.uint8))
    mask = CamVidWriter().features["mask"]
    assert (mask.names[0], mask.names[11], mask.palette[3]) == ("sky", "unlabelled", (128, 64, 128))


def opened(root) -> IndexRow:
    """Return the only row of a source, with paths that can be opened."""
    (row,) = rows_of(root)
    return row._replace(fields={name: str(root / path) for name, path in row.fields.items()})


def test_mask_of_another_size_is_refused(pairs, mask):
    """Image and mask would not match."""
    root = pairs("train", ["a"])
    mask(root / "trainannot" / "a.png", np.zeros((16, 12), np.uint8))

    with pytest.raises(SchemaError, match=r"a\.png.*12 x 16.*16 x 12"):
        CamVidWriter().read(opened(root))


def test_read_returns_untouched_bytes(pairs):
    """Unchanged samples are stored as the bytes of their files."""
    root = pairs("train", ["a"])
    row = opened(root)

    sample = CamVidWriter().read(row)

    columns = CamVidWriter().features.encode({**sample, "key": row.key})
    assert columns["image"] == (root / "train" / "a.png").read_bytes()
    assert columns["mask"] == (root / "trainannot" / "a.png").read_bytes()
