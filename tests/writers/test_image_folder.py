"""Pictures in class folders: classes, splits and keys, and folders that do not fit."""

import pytest

from datamat.errors import SourceError
from datamat.writers.image_folder import ImageFolderWriter


@pytest.fixture
def folder(tmp_path, picture):
    """Make pictures at paths below a folder."""

    def make(*paths):
        for number, path in enumerate(paths):
            picture(tmp_path / "set" / path, seed=number)
        return tmp_path / "set"

    return make


def indexed(source):
    writer = ImageFolderWriter()
    writer.bind(source)
    return writer, list(writer.index(source))


def test_class_folders_become_labels(folder):
    """Classes are sorted by name, rows by path; rows name no split."""
    source = folder("dog/2.jpg", "cat/b.v2.PNG", "cat/a.jpeg", "Ñandú/1.jpg")

    writer, rows = indexed(source)

    assert writer.features["label"].names == ("cat", "dog", "Ñandú")
    assert [(row.key, row.split, row.fields["label"]) for row in rows] == [
        ("cat-a", None, 0),
        ("cat-b.v2", None, 0),
        ("dog-2", None, 1),
        ("Ñandú-1", None, 2),
    ]


def test_split_folders_share_their_classes(folder):
    """A class that one split lacks keeps its id in the other."""
    writer, rows = indexed(folder("train/cat/1.jpg", "train/dog/1.jpg", "val/dog/1.jpg"))

    assert writer.features["label"].names == ("cat", "dog")
    assert [(row.key, row.split, row.fields["label"]) for row in rows] == [
        ("train-cat-1", "train", 0),
        ("train-dog-1", "train", 1),
        ("val-dog-1", "val", 1),
    ]


def test_other_files_are_left_out(folder):
    """Hidden files and other types are not samples."""
    source = folder("cat/1.jpg")
    for name in (".DS_Store", "notes.txt", ".hidden.jpg"):
        (source / "cat" / name).write_bytes(b"")

    assert [row.key for row in indexed(source)[1]] == ["cat-1"]


def test_folder_without_pictures_is_refused(tmp_path):
    """The message says what was looked for."""
    with pytest.raises(SourceError, match=r"holds no images .*want CLASS/\*\.jpg or SPLIT/CLASS/\*\.jpg"):
        indexed(tmp_path)


@pytest.mark.parametrize("odd", ["stray.jpg", "cat/1.jpg", "train/a/b/1.jpg"])
def test_mixed_depth_is_refused(folder, odd):
    """A picture at another depth would get a wrong class, or none."""
    with pytest.raises(SourceError, match="folders of different depth, or too deep"):
        indexed(folder("train/dog/1.jpg", "val/dog/1.jpg", odd))


def test_round_trip_keeps_labels_and_bytes(folder, materialized):
    """Original bytes are stored, and labels read back as ids."""
    source = folder("train/cat/1.jpg", "train/dog/1.jpg", "val/dog/2.jpg")
    writer, rows = indexed(source)

    found = materialized("image_folder", source)

    assert {key: int(sample["label"]) for key, sample in found["train"].items()} == {"train-cat-1": 0, "train-dog-1": 1}
    assert found["val"]["val-dog-2"]["image"].shape == (12, 16, 3)
    row = rows[0]._replace(fields={**rows[0].fields, "image": str(source / "train/cat/1.jpg")})
    columns = writer.features.encode({**writer.read(row), "key": row.key})
    assert columns["image"] == (source / "train/cat/1.jpg").read_bytes()


def test_link_to_nowhere_is_refused(folder, materialized):
    """A picture that is listed but cannot be opened is not silently dropped."""
    source = folder("cat/1.jpg")
    (source / "cat" / "2.jpg").symlink_to(source / "gone.jpg")

    with pytest.raises(SourceError, match=r"cat/2\.jpg.*no such file"):
        materialized("image_folder", source)
