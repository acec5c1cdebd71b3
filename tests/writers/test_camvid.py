"""CamVid's layout: which pairs are found, what is refused, and what is stored."""

import numpy as np
import pytest

from datamat.directory.rows import IndexRow, write_rows
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


def checked(source, folder) -> None:
    """Index a source as a run does, and check its files."""
    folder.mkdir()
    write_rows(CamVidWriter().index(source), folder, source=str(source), file_fields=CamVidWriter.file_fields)


def test_features_are_camvids_classes():
    """Image, mask of the twelve classes, and key; nothing else."""
    features = CamVidWriter().features

    assert sorted(features) == ["image", "key", "mask"]
    assert features["mask"].names == (
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign_symbol", "fence", "car", "pedestrian", "bicyclist", "unlabelled"),
    )
    assert features["mask"].palette[3] == (128, 64, 128)
    assert (features["image"].encoding, features["image"].quality) == ("jpeg", 95)


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


def test_empty_source_is_refused(tmp_path):
    """A folder with neither lists nor pairs is named."""
    with pytest.raises(SourceError, match=r"neither list files .* nor folders"):
        rows_of(tmp_path)


def test_empty_list_is_refused(pairs):
    """A list without pairs is a mistake, not a split without samples."""
    root = pairs("train", ["a"], listed=True)
    (root / "val.txt").write_text("\n# none yet\n")

    with pytest.raises(SourceError, match=r"val\.txt lists no pairs"):
        rows_of(root)


def test_line_with_one_path_is_refused(pairs):
    """The message names the line."""
    root = pairs("train", ["a"], listed=True)
    with (root / "train.txt").open("a") as lines:
        lines.write("train/b.png\n")

    with pytest.raises(SourceError, match=r"train\.txt:2: found 1 paths, want 2"):
        rows_of(root)


@pytest.mark.parametrize(("side", "field"), [("train", "image"), ("trainannot", "mask")])
def test_missing_file_is_refused(pairs, tmp_path, side, field):
    """A listed file that is not there is named with its line."""
    root = pairs("train", ["a", "b"], listed=True)
    (root / side / "b.png").unlink()

    with pytest.raises(
        SourceError,
        match=rf"train\.txt:2: {field} .*{side}/b\.png.*no such file.*; looked below .*: add the files or drop",
    ):
        checked(root, tmp_path / "rows")


def test_duplicate_key_is_refused(pairs, tmp_path):
    """A name in two splits is named with both lines."""
    pairs("train", ["a", "b"], listed=True)
    root = pairs("val", ["b"], listed=True)

    with pytest.raises(SourceError, match=r"duplicated keys: key 'b' at train\.txt:2 and val\.txt:1"):
        checked(root, tmp_path / "rows")


def test_image_without_annotation_is_refused(pairs, picture):
    """Also where the whole folder of annotations is missing."""
    root = pairs("train", ["a"])
    picture(root / "val" / "b.png")

    with pytest.raises(SourceError, match=r"val/b\.png: image without annotation"):
        rows_of(root)


def test_annotation_without_image_is_refused(pairs):
    """The message names the annotation."""
    root = pairs("train", ["a", "b"])
    (root / "train" / "b.png").unlink()

    with pytest.raises(SourceError, match=r"trainannot/b\.png: annotation without image"):
        rows_of(root)


def test_round_trip_keeps_the_files(pairs, materialized):
    """Each pair comes back: the pixels of its files, in its split."""
    pairs("train", ["a", "b"], listed=True)
    root = pairs("val", ["c"], listed=True)

    found = materialized("camvid", root)

    assert {split: sorted(samples) for split, samples in found.items()} == {"train": ["a", "b"], "val": ["c"]}
    assert found["train"]["b"]["image"].shape == (12, 16, 3)
    np.testing.assert_array_equal(found["train"]["b"]["mask"], np.full((12, 16), 1, np.uint8))


def opened(root) -> IndexRow:
    """Return the only row of a source, with paths that can be opened."""
    (row,) = rows_of(root)
    return row._replace(fields={name: str(root / path) for name, path in row.fields.items()})


def test_mask_of_another_size_is_refused(pairs, mask):
    """Image and mask would not match."""
    root = pairs("train", ["a"])
    mask(root / "trainannot" / "a.png", np.zeros((16, 12), np.uint8))

    with pytest.raises(SchemaError, match=r"a\.png': the mask has 12 x 16 pixels, its image has 16 x 12"):
        CamVidWriter().read(opened(root))


def test_read_returns_untouched_bytes(pairs):
    """Unchanged samples are stored as the bytes of their files."""
    root = pairs("train", ["a"])
    row = opened(root)

    sample = CamVidWriter().read(row)

    columns = CamVidWriter().features.encode({**sample, "key": row.key})
    assert columns["image"] == (root / "train" / "a.png").read_bytes()
    assert columns["mask"] == (root / "trainannot" / "a.png").read_bytes()
