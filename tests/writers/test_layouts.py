"""A set of pictures with objects, in every layout that has a name: the same samples; and what is wrong with a file."""

import json

import numpy as np
import pytest

from datamat import Manifest, Materializer, load
from datamat.errors import DatamatError, OptionError, SampleError, SourceError
from datamat.testing import InlineExecutor
from datamat.writers.cityscapes import CityscapesWriter
from datamat.writers.coco import CocoWriter
from datamat.writers.labelme import LabelmeWriter
from datamat.writers.voc import VocWriter
from datamat.writers.yolo import YoloWriter

HEIGHT, WIDTH = 12, 16
CLASSES = ["cat", "dog"]
# split, name, objects: class, (xmin, ymin, xmax, ymax), vertices
PICTURES = [
    ("train", "a", [("dog", (4, 3, 12, 9), [4, 3, 12, 3, 8, 9]), ("cat", (0, 0, 16, 6), [0, 0, 16, 0, 16, 6, 0, 6])]),
    ("train", "b", [("cat", (1, 2, 3, 4), [1, 2, 3, 2, 3, 4])]),
    ("val", "c", []),
]


@pytest.fixture
def drawn(tmp_path, picture):
    """Give a function that draws the pictures at places of a layout, and returns its root."""

    def drawn(place, suffix=".jpg"):
        for number, (split, name, _) in enumerate(PICTURES):
            path = tmp_path / "set" / place.format(split=split, name=name + suffix)
            picture(path, size=(HEIGHT, WIDTH), seed=number)
        return tmp_path / "set"

    return drawn


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def as_yolo(drawn, *, place="{split}/images/{name}", outlines=False, train="../train/images", val="valid/images"):
    root = drawn(place)
    if "valid" in val:
        (root / "val").rename(root / "valid")
    write(root / "data.yaml", f"train: {train}\nval: {val}\nnc: 2\nnames: ['cat', 'dog']\n")
    scale = np.array([WIDTH, HEIGHT])
    for split, name, objects in PICTURES[:2]:
        lines = []
        for label, (xmin, ymin, xmax, ymax), vertices in objects:
            box = [(xmin + xmax) / 2 / WIDTH, (ymin + ymax) / 2 / HEIGHT, (xmax - xmin) / WIDTH, (ymax - ymin) / HEIGHT]
            numbers = (np.array(vertices).reshape(-1, 2) / scale).reshape(-1) if outlines else box
            lines.append(" ".join(map(str, [CLASSES.index(label), *numbers])))
        place_of = place.replace("images", "labels").format(split=split, name=f"{name}.txt")
        write(root / place_of, "\n".join(lines) + "\n")
    return root


def as_voc(drawn):
    root = drawn("JPEGImages/{name}")
    for split in ("train", "val"):
        write(root / f"ImageSets/Main/{split}.txt", "".join(f"{name}\n" for one, name, _ in PICTURES if one == split))
    for _, name, objects in PICTURES:
        found = "".join(
            f"<object><name>{label}</name><difficult>{number}</difficult><bndbox>"
            + "".join(
                f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
            )
            + "</bndbox></object>"
            for number, (label, box, _) in enumerate(objects)
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        write(
            root / f"Annotations/{name}.xml", f"<annotation><filename>{name}.jpg</filename>{size}{found}</annotation>"
        )
    return root


def as_labelme(drawn):
    root = drawn("{split}/{name}")
    for split, name, objects in PICTURES:
        shapes = [
            {"label": label, "points": np.array(vertices).reshape(-1, 2).tolist(), "shape_type": "polygon"}
            for label, _, vertices in objects
        ]
        content = {"version": "5", "shapes": shapes, "imagePath": f"{name}.jpg", "imageData": None}
        write(root / f"{split}/{name}.json", json.dumps({**content, "imageHeight": HEIGHT, "imageWidth": WIDTH}))
    return root


def coco_of(split, **more):
    images, annotations = [], []
    for number, (one, name, objects) in enumerate(PICTURES):
        if one == split:
            images.append({"id": number, "file_name": f"{name}.jpg", "height": HEIGHT, "width": WIDTH})
            for label, (xmin, ymin, xmax, ymax), vertices in objects:
                annotation = {"id": 70 + len(annotations), "image_id": number, "category_id": 1 + CLASSES.index(label)}
                annotation |= {"bbox": [xmin, ymin, xmax - xmin, ymax - ymin], "segmentation": [vertices], **more}
                annotations.append(annotation)
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    return {"images": images, "annotations": annotations, "categories": categories}


def as_roboflow(drawn):
    root = drawn("{split}/{name}")
    for split in ("train", "val"):
        write(root / split / "_annotations.coco.json", json.dumps(coco_of(split)))
    return root


def as_lvis(drawn):
    root = drawn("{split}2017/{name}")
    for split in ("train", "val"):
        content = coco_of(split)
        for image in content["images"]:
            image["coco_url"] = f"http://images.cocodataset.org/{split}2017/{image.pop('file_name')}"
        write(root / f"annotations/lvis_v1_{split}.json", json.dumps(content))
    return root


LAYOUTS = {
    "yolo": as_yolo,
    "yolo outlines": lambda drawn: as_yolo(drawn, outlines=True),
    "yolo ultralytics": lambda drawn: as_yolo(
        drawn, place="images/{split}/{name}", train="images/train", val="/home/ann/set/images/val"
    ),
    "voc": as_voc,
    "labelme": as_labelme,
    "roboflow": as_roboflow,
    "lvis": as_lvis,
}


def made(tmp_path, *arguments, **options):
    job = Materializer(*arguments, output=tmp_path / "out")
    return job.run(executor=InlineExecutor(), progress=False, **options)


def boxes(sample):
    """Return class and box in pixels of each object, sorted."""
    found = np.asarray(sample["objects/bbox"]) * np.array([HEIGHT, WIDTH] * 2)
    rows = zip(sample["objects/label"].tolist(), found.round(3).tolist(), strict=True)
    return sorted((CLASSES[label], (box[1], box[0], box[3], box[2])) for label, box in rows)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_found_and_gives_the_same(drawn, tmp_path, name):
    """In one line, without its name."""
    root = LAYOUTS[name](drawn)

    report = made(tmp_path, root)

    assert report.is_complete
    samples = list(load(tmp_path / "out"))
    assert sorted(map(boxes, samples)) == sorted(sorted((label, box) for label, box, _ in one) for *_, one in PICTURES)
    assert {split.replace("valid", "val") for split in Manifest.read(tmp_path / "out").splits} == {"train", "val"}
    assert all(sample["image"].shape == (HEIGHT, WIDTH, 3) for sample in samples)
    assert {str(sample["key"])[-1] for sample in samples} == set("abc")


@pytest.mark.parametrize(
    ("make", "writer"),
    [
        (lambda drawn: as_yolo(drawn, outlines=True), YoloWriter(segments=True)),
        (as_labelme, LabelmeWriter(segments=True)),
        (as_roboflow, CocoWriter(segments=True)),
    ],
    ids=["yolo", "labelme", "coco"],
)
def test_outlines_name_their_objects(drawn, tmp_path, make, writer):
    root = make(drawn)

    made(tmp_path, writer, root)

    sample = next(one for one in load(tmp_path / "out", "train") if str(one["key"]).endswith("a"))
    ids = sample["objects/id"].tolist()
    assert sample["segments/object"].tolist() == ids and len(set(ids)) == 2
    for outline, (_, _, vertices) in zip(sample["segments/outline"], PICTURES[0][2], strict=True):
        found = outline[~np.isnan(outline[:, 0])].reshape(-1)
        np.testing.assert_allclose(found, vertices, rtol=1e-6)


def test_classes_without_yaml(drawn, tmp_path):
    """As Label Studio exports it; folders in `images` are splits."""
    root = as_yolo(drawn, place="images/{split}/{name}", train="x", val="y")
    (root / "data.yaml").unlink()
    write(root / "classes.txt", "cat\ndog\n")

    made(tmp_path, "yolo", root)

    assert boxes(next(iter(load(tmp_path / "out", "train")))) != []
    assert len(load(tmp_path / "out", "val")) == 1


def test_yolo_lists_of_images(drawn, tmp_path):
    """A split may be a text file that lists its images, as COCO's is."""
    root = as_yolo(drawn, place="images/{split}/{name}", train="train.txt", val="images/val")
    write(root / "train.txt", "./images/train/a.jpg\n")

    made(tmp_path, "yolo", root)

    assert [str(sample["key"]) for sample in load(tmp_path / "out", "train")] == ["train-a"]


def test_yolo_pose(drawn, tmp_path):
    root = as_yolo(drawn)
    with (root / "data.yaml").open("a") as file:
        file.write("kpt_shape: [2, 3]\n")
    write(root / "train/labels/a.txt", "1 0.5 0.5 0.5 0.5 0.25 0.5 2 0.75 0.25 1\n")
    (root / "train/labels/b.txt").unlink()

    made(tmp_path, root)

    sample = next(one for one in load(tmp_path / "out", "train") if str(one["key"]).endswith("a"))
    assert sample["objects/keypoints"].tolist() == [[[4, 6, 2], [12, 3, 1]]]


def test_coco_keypoints(drawn, tmp_path):
    root = drawn("{split}2017/{name}")
    content = coco_of("train", keypoints=[1, 2, 2, 0, 0, 0])
    content["categories"][0]["keypoints"] = ["nose", "tail"]
    write(root / "annotations/person_keypoints_train2017.json", json.dumps(content))

    made(tmp_path, CocoWriter(keypoints=True), root)

    found = load(tmp_path / "out", "train")
    assert found.features["objects/keypoints"].names == ("nose", "tail")
    assert found["a"]["objects/keypoints"].tolist() == [[[1, 2, 2], [0, 0, 0]]] * 2


@pytest.mark.parametrize(
    ("make", "path", "writer"),
    [
        (as_voc, "JPEGImages/a.jpg", VocWriter),
        (as_voc, "Annotations/a.xml", VocWriter),
        (as_labelme, "train/a.jpg", LabelmeWriter),
        (as_roboflow, "train/a.jpg", CocoWriter),
        (as_yolo, "train/labels/a.txt", YoloWriter),
    ],
)
def test_rows_without_a_file_are_left_out_where_asked(drawn, tmp_path, make, path, writer):
    """They are counted, and the ledger names what is missing; without the option most are an error."""
    root = make(drawn)
    (root / path).unlink()
    if writer is not YoloWriter:  # an image without labels has no objects there
        with pytest.raises((SourceError, SampleError), match=path.rpartition("/")[2].replace(".", r"\.")):
            made(tmp_path, writer(), root)

    report = made(tmp_path, writer(missing="skip"), root)

    alone = writer is YoloWriter  # so is the other picture without labels
    assert report.num_dropped == 1 + alone
    found = (tmp_path / "out/.datamat/ledger.jsonl").read_text()
    assert ("train/images/a.jpg" if alone else path) in found and "does not exist" in found
    assert len(load(tmp_path / "out", "train")) == 1


@pytest.mark.parametrize(
    ("make", "path", "change", "message"),
    [
        (
            as_yolo,
            "train/labels/a.txt",
            lambda _: "2 .5 .5 .5 .5",
            r"a\.txt, line 1 is of the class 2; want one from 0 to 1",
        ),
        (
            as_yolo,
            "train/labels/a.txt",
            lambda _: "0 .5 .5 .5",
            r"a\.txt, line 1: '0 \.5 \.5 \.5'; want CLASS x_centre",
        ),
        (
            as_yolo,
            "train/labels/a.txt",
            lambda _: "0 90 60 20 20",
            r"line 1 has the box .* touching its image of 16 x 12",
        ),
        (as_yolo, "train/labels/a.txt", lambda _: "cat .5 .5 .5 .5", r"line 1: 'cat"),
        (as_yolo, "data.yaml", lambda text: text.replace("names", "nams"), "names: None; want a list of the names"),
        (as_yolo, "data.yaml", lambda text: text.replace("../train/images", "gone"), "'gone' is neither a folder"),
        (as_yolo, "data.yaml", lambda _: "a: [", "data.yaml is not YAML"),
        (as_voc, "Annotations/a.xml", lambda text: text.replace("<ymax>9<", "<ymax>nine<"), "object 0 has the box"),
        (as_voc, "Annotations/a.xml", lambda text: text.replace("<ymax>9<", "<ymax>1<"), "no negative size"),
        (as_voc, "Annotations/a.xml", lambda text: text.replace("<width>16", "<width>99"), "its description says"),
        (as_voc, "Annotations/a.xml", lambda text: "<!DOCTYPE a>" + text, "declares a document type"),
        (as_labelme, "train/a.json", lambda text: text.replace("[[4, 3]", "[[4]"), "shape 0 has the points"),
        (as_labelme, "train/a.json", lambda _: "[]", r"a\.json is not a file of LabelMe"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(drawn, tmp_path, make, path, change, message):
    root = make(drawn)
    (root / path).write_text(change((root / path).read_text()))

    with pytest.raises(DatamatError, match=message):
        made(tmp_path, make.__name__.removeprefix("as_"), root)


def test_classes_that_are_named_are_kept_to(drawn, tmp_path):
    root = as_voc(drawn)

    with pytest.raises(SampleError, match="object 0 is of the class 'dog', which is not among the names"):
        made(tmp_path, VocWriter(names=["cat"]), root)
    with pytest.raises(OptionError, match="missing is 'drop'; want 'error' or 'skip'"):
        VocWriter(missing="drop")


def test_circle_of_labelme_has_the_box_around_it(drawn, tmp_path):
    root = as_labelme(drawn)
    content = json.loads((root / "train/b.json").read_text())
    content["shapes"] = [{"label": "cat", "points": [[8, 6], [8, 9]], "shape_type": "circle"}]
    (root / "train/b.json").write_text(json.dumps(content))

    made(tmp_path, root)

    sample = next(one for one in load(tmp_path / "out", "train") if str(one["key"]).endswith("b"))
    assert boxes(sample) == [("cat", (5, 3, 11, 9))]


def test_pascal_files_beside_their_pictures(drawn, tmp_path):
    """As Roboflow exports them."""
    root = as_voc(drawn)
    for split, name, _ in PICTURES:
        (root / split).mkdir(exist_ok=True)
        (root / f"JPEGImages/{name}.jpg").rename(root / split / f"{name}.jpg")
        (root / f"Annotations/{name}.xml").rename(root / split / f"{name}.xml")
    (root / "Annotations").rmdir()

    made(tmp_path, "voc", root)

    assert sorted(map(str, (sample["key"] for sample in load(tmp_path / "out", "train")))) == ["train-a", "train-b"]


@pytest.mark.parametrize(("labels", "ids"), [("labelIds", [7, 33, 255]), ("labelTrainIds", [0, 18, 255])])
def test_cityscapes(tmp_path, picture, mask, labels, ids):
    """Masks keep their bytes, and the licence plate is no class."""
    root = tmp_path / "set"
    for split, city in (("train", "ulm"), ("val", "bonn")):
        frame = f"{split}/{city}/{city}_000000_000019"
        picture(root / f"leftImg8bit/{frame}_leftImg8bit.png")
        mask(root / f"gtFine/{frame}_gtFine_{labels}.png", np.resize(np.array(ids, np.uint8), (12, 16)))

    made(
        tmp_path,
        CityscapesWriter(labels=labels) if labels != "labelIds" else root,
        *([root] if labels != "labelIds" else []),
    )

    found = load(tmp_path / "out", "train")
    assert found["ulm_000000_000019"]["mask"][0, :3].tolist() == ids
    assert [found.features["mask"].names[number] for number in ids[:2]] == ["road", "bicycle"]
