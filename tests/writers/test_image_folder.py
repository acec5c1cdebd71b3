"""Pictures in class folders: classes, splits and keys, and folders that do not fit."""

import re

import numpy as np
import PIL.Image
import pytest
from prepared import Prepared

from datamat import Index, Materializer, load
from datamat.codecs.files import PICTURES
from datamat.errors import OptionError, SourceError
from datamat.testing import InlineExecutor
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


# ------------------------------------------------------------ suffixes, and what is left aside


def draw(path, number=0):
    """Write a picture in the format that its suffix says."""
    kinds = {".jpe": "JPEG", ".jfif": "JPEG", ".heic": "PNG"}
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((8, 8, 3), number, np.uint8)
    PIL.Image.fromarray(pixels).save(path, format=kinds.get(path.suffix.lower()))


@pytest.mark.parametrize("suffix", [*PICTURES, ".JPG", ".TIFF"])
def test_every_kind_of_file_that_image_reads_is_taken(tmp_path, suffix):
    for module in ("tifffile", "imagecodecs") if "tif" in suffix.lower() else ():
        pytest.importorskip(module)
    draw(tmp_path / "raw" / "cat" / f"1{suffix}", 9)
    draw(tmp_path / "raw" / "dog" / "1.png")

    Materializer("image_folder", tmp_path / "raw", tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    (cat,) = (sample for sample in load(tmp_path / "out") if sample["key"] == "cat-1")
    assert abs(int(cat["image"].mean()) - 9) < 3


def test_files_that_are_left_aside_are_reported(tmp_path):
    """In plan, report and status: how many, of which kinds, and the first names."""
    raw = tmp_path / "raw"
    for name in ("cat/1.png", "dog/1.png", "cat/2.gif", "cat/3.gif", "dog/4.heic", "dog/notes", "dog/.hidden"):
        draw((raw / name).with_suffix(".png")) if name.endswith("1.png") else (raw / name).write_bytes(b"x")
    job = Prepared("image_folder", raw, tmp_path / "out", executor=InlineExecutor())
    wanted = "left aside: 4 files (.gif 2, .heic 1, no suffix 1): cat/2.gif, cat/3.gif, dog/4.heic, ..."

    assert wanted in str(job.plan())
    report = job.run(progress=False)
    assert report.left_aside == wanted and wanted in str(report)
    assert wanted in str(job.status())
    assert job.run(progress=False).did_nothing


@pytest.mark.parametrize("depth", ["", "train/"])
@pytest.mark.parametrize("files", [(), ("1.heic", "2.heic"), ("1.svg",)])
def test_class_without_a_picture_is_refused(tmp_path, depth, files):
    """By name, and with what is there: else the class would vanish from the names."""
    raw = tmp_path / "raw"
    draw(raw / f"{depth}cat" / "1.png")
    (raw / f"{depth}dog").mkdir()
    for name in files:
        (raw / f"{depth}dog" / name).write_bytes(b"x")

    found = f"{len(files)} files? \\({re.escape(files[0][1:])} {len(files)}" if files else "no file"
    with pytest.raises(SourceError, match=rf"{depth}dog \({found}"):
        Materializer("image_folder", raw, tmp_path / "out")


def test_output_beside_the_classes_is_no_class(tmp_path):
    raw = tmp_path / "raw"
    draw(raw / "cat" / "1.png")
    for _ in range(2):
        report = Materializer("image_folder", raw, raw / "out").run(executor=InlineExecutor(), progress=False)
    assert report.did_nothing


def test_suffixes_given_as_a_text_are_one(tmp_path):
    """Not the letters of it: `README` and `x.j` have no such suffix."""
    for name in ("a.jpg", "b.JPG", "README", "x.j", "c.png"):
        (tmp_path / name).write_bytes(b"x")

    for suffixes in (".jpg", [".jpg"], (".JPG",)):
        assert [row.key for row in Index.from_folder(tmp_path, suffixes=suffixes)] == ["a", "b"]
    joined = Index.join(tmp_path, {"file": ["a", "b"]}, on="file", suffixes=".jpg")
    assert [row.key for row in joined] == ["a", "b"]
    with pytest.raises(OptionError, match=r"'jpg'.*'\.jpg'"):
        list(Index.from_folder(tmp_path, suffixes="jpg"))


@pytest.mark.parametrize("suffix", [".jpe", ".jfif", ".bmp", ".tif"])
def test_pairs_of_folders_take_the_same_kinds(tmp_path, suffix):
    """CamVid's layout: an image of any kind beside its annotation; others are left aside, and named."""
    draw(tmp_path / "raw" / "train" / f"1{suffix}")
    (tmp_path / "raw" / "trainannot").mkdir()
    PIL.Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "raw" / "trainannot" / "1.png")
    (tmp_path / "raw" / "train" / "2.heic").write_bytes(b"x")

    plan = Materializer("camvid", tmp_path / "raw", tmp_path / "out").plan()

    assert plan.num_rows == 1
    assert plan.left_aside == "left aside: 1 file (.heic 1): train/2.heic"
