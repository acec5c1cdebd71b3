"""COCO's layout: boxes, labels and splits, and inconsistent JSON."""

import json

import numpy as np
import pytest

from datamat.errors import SchemaError, SourceError
from datamat.writers.coco import CocoWriter

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}]
IMAGES = [
    {"id": 9, "file_name": "000000000009.jpg", "height": 12, "width": 16},
    {"id": 4, "file_name": "sub/b.c.jpg", "height": 12, "width": 16},
]
ANNOTATIONS = [
    {"id": 1, "image_id": 9, "category_id": 18, "bbox": [4, 3, 8, 6], "area": 48, "iscrowd": 0},
    {"id": 2, "image_id": 9, "category_id": 1, "bbox": [12.5, -1, 20, 5], "area": 100, "iscrowd": 1},
]


@pytest.fixture
def coco(tmp_path, picture):
    """Write an instances file and its pictures."""

    def make(tag="train2017", *, folder=None, images=IMAGES, annotations=ANNOTATIONS, categories=CATEGORIES):
        root = tmp_path / "set"
        (root / "annotations").mkdir(parents=True, exist_ok=True)
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{tag}.json").write_text(json.dumps(content))
        for image in images:
            picture(root / (folder or tag) / image["file_name"])
        return root

    return make


def indexed(source):
    writer = CocoWriter()
    writer.bind(source)
    return writer, list(writer.index(source))


def sample_of(writer, source, row):
    return writer.read(row._replace(fields={**row.fields, "image": str(source / row.fields["image"])}))


def test_rows_are_sorted_by_image(coco):
    """The key is the path of the picture; the origin names file and image."""
    _, rows = indexed(coco())

    assert [(row.key, row.split, row.fields["image_id"]) for row in rows] == [
        ("sub-b.c", "train", 4),
        ("000000000009", "train", 9),
    ]
    assert rows[0].origin == "instances_train2017.json image 4"
    assert rows[1].fields["image"] == "train2017/000000000009.jpg"


def test_labels_follow_the_category_ids(coco):
    """The order in the file does not matter."""
    writer, _ = indexed(coco())

    assert writer.features["objects/label"].names == ("person", "dog")


def test_objects_are_fractions_in_the_order_of_the_file(coco):
    """x, y, width, height in pixels become ymin, xmin, ymax, xmax in fractions, clipped to the picture."""
    source = coco()
    writer, rows = indexed(source)

    sample = sample_of(writer, source, rows[1])

    np.testing.assert_allclose(
        sample["objects/bbox"], [[3 / 12, 4 / 16, 9 / 12, 12 / 16], [0, 12.5 / 16, 4 / 12, 1]], rtol=1e-6
    )
    assert sample["objects/label"] == [1, 0]
    assert sample["objects/is_crowd"] == [0, 1]
    assert sample["image"] == (source / "train2017/000000000009.jpg").read_bytes()
    assert writer.features.encode({**sample, "key": "a"})


@pytest.mark.parametrize(
    ("annotations", "wanted"),
    [
        ([], np.zeros((0, 4))),
        ([{"id": 1, "image_id": 9, "category_id": 1, "bbox": [16, 3, 0, 0]}], [[0.25, 1, 0.25, 1]]),
    ],
)
def test_images_without_objects_and_boxes_without_area_are_kept(coco, annotations, wanted):
    """COCO has such boxes; nothing is dropped silently."""
    source = coco(annotations=annotations)
    writer, rows = indexed(source)

    sample = sample_of(writer, source, rows[1])

    np.testing.assert_array_equal(sample["objects/bbox"], np.array(wanted, np.float32))
    assert writer.features.encode({**sample, "key": "a"})["objects/label"].size == len(annotations)


@pytest.mark.parametrize("folder", ["train2017", "train", "images/train2017", "images/train", "images", "."])
def test_pictures_are_found_where_sets_have_them(coco, folder):
    """The folder has the name of the file, of the split, or `images`."""
    source = coco(folder=folder)

    assert all((source / row.fields["image"]).is_file() for row in indexed(source)[1])


def test_each_file_is_a_split(coco):
    """The year is no part of the split's name."""
    coco("val2017", images=[{"id": 1, "file_name": "v.jpg", "height": 12, "width": 16}], annotations=[])
    _, rows = indexed(coco("train2017"))

    assert [row.split for row in rows] == ["train", "train", "val"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"category_id": 7}, "annotation 3 has the category 7, which is not listed"),
        ({"image_id": 5}, "annotation 3 belongs to the image 5, which is not listed"),
        ({"bbox": [1, 2, 3]}, r"annotation 3 has the box \[1, 2, 3\]"),
        ({"bbox": None}, "annotation 3 has the box None"),
        ({"bbox": [1, 2, -3, 4]}, "annotation 3 has the box"),
        ({"bbox": [17, 0, 4, 4]}, "annotation 3 has the box .*touching its image of 16 x 12"),
        ({"bbox": [0, float("nan"), 4, 4]}, "annotation 3 has the box"),
    ],
)
def test_bad_annotation_is_refused(coco, change, message):
    """The message names its id."""
    source = coco(annotations=[{**ANNOTATIONS[0], "id": 3, **change}])

    with pytest.raises(SourceError, match=message):
        indexed(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", ""),
        ("[]", "COCO"),
        ('{"images": [], "annotations": []}', "COCO"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "entry 0 of images"),
        ('{"images": [], "annotations": [], "categories": []}', "0 categories"),
    ],
)
def test_file_of_another_format_is_refused(coco, content, message):
    """The message names the file and what is wrong with it."""
    source = coco()
    (source / "annotations/instances_train2017.json").write_text(content)

    with pytest.raises(SourceError, match=rf"instances_train2017\.json.*{message}"):
        indexed(source)


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        ("train2014", {}, "split 'train'"),
        ("val2017", {"categories": [*CATEGORIES, {"id": 2, "name": "cat"}]}, "categories differ"),
        ("train2017", {"images": [*IMAGES, {**IMAGES[0], "file_name": "other.jpg"}]}, "1 images share an id"),
    ],
)
def test_files_that_contradict_each_other_are_refused(coco, other, options, message):
    """Two of one split, labels that mean something else, and ids of two pictures."""
    source = coco("train2017")
    coco(other, **options)

    with pytest.raises(SourceError, match=message):
        indexed(source)


def test_source_without_annotations_is_refused(tmp_path):
    with pytest.raises(SourceError, match="instances_"):
        indexed(tmp_path)


def test_missing_picture_is_refused(coco, materialized):
    """The message names the image id."""
    source = coco()
    (source / "train2017/000000000009.jpg").unlink()

    with pytest.raises(SourceError, match=r"instances_train2017\.json image 9"):
        materialized("coco", source)


def test_picture_of_another_size_is_refused(coco, picture):
    """Its boxes would be in the wrong place."""
    source = coco()
    picture(source / "train2017/000000000009.jpg", size=(16, 12))
    writer, rows = indexed(source)

    with pytest.raises(SchemaError, match=r"image 9.*\(16, 12\).*\(12, 16\)"):
        sample_of(writer, source, rows[1])


def test_round_trip_holds_every_object(coco, materialized):
    """Boxes, labels and crowd marks come back."""
    found = materialized("coco", coco())["train"]

    sample = found["000000000009"]
    assert sample["objects/label"].tolist() == [1, 0]
    assert sample["objects/is_crowd"].tolist() == [0, 1]
    assert sample["objects/bbox"].shape == (2, 4)
    assert int(sample["image_id"]) == 9


def test_dropped_boxes_take_their_labels_along(coco, materialized, monkeypatch):
    """A crop that leaves one of two boxes leaves one label and one crowd mark."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    albumentations = pytest.importorskip("albumentations")
    params = albumentations.BboxParams("albumentations", label_fields=["objects/label", "objects/is_crowd"])
    left = albumentations.Compose([albumentations.Crop(0, 0, 12, 12)], bbox_params=params)

    found = materialized("coco", coco(), transform=left)["train"]

    sample = found["000000000009#0"]
    assert sample["objects/label"].tolist() == [1]
    assert sample["objects/is_crowd"].tolist() == [0]
    np.testing.assert_allclose(sample["objects/bbox"], [[3 / 12, 4 / 12, 9 / 12, 1]], rtol=1e-6)
