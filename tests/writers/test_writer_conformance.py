"""Every built-in writer passes the conformance tests that datamat ships for users' writers."""

import json

import numpy as np
import pytest

from datamat import ImportWriter, Materializer, testing
from datamat.codecs import encode_jpeg, encode_png
from datamat.writers.camvid import CamVidWriter
from datamat.writers.cityscapes import CityscapesWriter
from datamat.writers.coco import CocoWriter
from datamat.writers.image_folder import ImageFolderWriter
from datamat.writers.labelme import LabelmeWriter
from datamat.writers.pedestrian import PedestrianWriter
from datamat.writers.table import TableWriter
from datamat.writers.voc import VocWriter
from datamat.writers.yolo import YoloWriter

NAMES = ("ground", "sidewalk")
PALETTE = ((0, 0, 0), (9, 8, 7))


def write_picture(path, seed, encode=encode_jpeg):
    """Write a picture of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(np.random.default_rng(seed).integers(0, 256, (12, 16, 3), np.uint8)))


def write_mask(path, pixels):
    """Write an array as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(pixels))


class TestCamVid(testing.DatasetWriterConformance):
    def make_writer(self):
        return CamVidWriter()

    def make_source(self, folder):
        for number in range(8):
            split = "val" if number % 4 == 0 else "train"
            write_picture(folder / split / f"{number}.png", number, encode_png)
            write_mask(folder / f"{split}annot/{number}.png", np.full((12, 16), number, np.uint8))
        return folder


class TestCoco(testing.DatasetWriterConformance):
    def make_writer(self):
        return CocoWriter()

    def make_source(self, folder):
        images = [{"id": n, "file_name": f"{n:012d}.jpg", "height": 12, "width": 16} for n in range(6)]
        boxes = [
            {"id": n, "image_id": n // 2, "category_id": 1, "bbox": [4, 3, 8, n], "iscrowd": 0} for n in range(1, 9)
        ]
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "dog"}]}
        (folder / "annotations").mkdir()
        (folder / "annotations/instances_train2017.json").write_text(json.dumps(content))
        for image in images:
            write_picture(folder / "train2017" / image["file_name"], image["id"])
        return folder


class TestYolo(testing.DatasetWriterConformance):
    def make_writer(self):
        return YoloWriter(segments=True)

    def make_source(self, folder):
        (folder / "labels/train").mkdir(parents=True)
        (folder / "data.yaml").write_text("train: images/train\nnames: {0: dog}\n")
        for number in range(6):
            write_picture(folder / f"images/train/{number}.jpg", number)
            (folder / f"labels/train/{number}.txt").write_text("0 .1 .1 .5 .1 .5 .5\n0 .5 .5 .2 .2\n" * number)
        return folder


@pytest.mark.long
class TestVoc(testing.DatasetWriterConformance):
    def make_writer(self):
        return VocWriter()

    def make_source(self, folder):
        box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9</xmax><ymax>8</ymax></bndbox>"
        (folder / "Annotations").mkdir()
        for number in range(6):
            write_picture(folder / f"JPEGImages/{number}.jpg", number)
            found = f"<object><name>dog</name>{box}</object>" * number
            (folder / f"Annotations/{number}.xml").write_text(f"<annotation>{found}</annotation>")
        return folder


@pytest.mark.long
class TestLabelme(testing.DatasetWriterConformance):
    def make_writer(self):
        return LabelmeWriter(segments=True)

    def make_source(self, folder):
        for number in range(6):
            write_picture(folder / f"{number}.jpg", number)
            shapes = [{"label": "dog", "points": [[1, 2], [9, 2], [9, number]], "shape_type": "polygon"}]
            content = {"shapes": shapes, "imagePath": f"{number}.jpg", "imageHeight": 12, "imageWidth": 16}
            (folder / f"{number}.json").write_text(json.dumps(content))
        return folder


@pytest.mark.long
class TestCityscapes(testing.DatasetWriterConformance):
    def make_writer(self):
        return CityscapesWriter()

    def make_source(self, folder):
        for number in range(6):
            frame = f"train/ulm/ulm_{number:06d}_000019"
            write_picture(folder / f"leftImg8bit/{frame}_leftImg8bit.png", number, encode_png)
            write_mask(folder / f"gtFine/{frame}_gtFine_labelIds.png", np.full((12, 16), number, np.uint8))
        return folder


class TestImageFolder(testing.DatasetWriterConformance):
    def make_writer(self):
        return ImageFolderWriter()

    def make_source(self, folder):
        for number in range(8):
            write_picture(folder / ("cat", "dog")[number % 2] / f"{number}.jpg", number)
        return folder


@pytest.mark.long
class TestPedestrian(testing.DatasetWriterConformance):
    def make_writer(self):
        return PedestrianWriter(NAMES, PALETTE)

    def make_source(self, folder):
        for number in range(6):
            ids = np.random.default_rng(number).integers(0, len(NAMES), (12, 16))
            write_picture(folder / f"Surface_1/{number}.jpg", number)
            write_mask(folder / f"Surface_1/MASK/{number}.png", np.array(PALETTE, np.uint8)[ids])
        return folder


class TestTable(testing.DatasetWriterConformance):
    def make_writer(self):
        return TableWriter()

    def make_source(self, folder):
        lines = [f"{number:03d},{number / 7},{number},kind {number % 3}\n" for number in range(20)]
        (folder / "rows.csv").write_text("key,speed,lane,kind\n" + "".join(lines))
        return folder / "rows.csv"


@pytest.mark.long
class TestImportOfAFinishedDirectory(testing.DatasetWriterConformance):
    def make_writer(self):
        return ImportWriter()

    def make_source(self, folder):
        pictures = TestImageFolder().make_source(folder / "raw")
        Materializer(ImageFolderWriter(), pictures, folder / "out").run(progress=False)
        return folder / "out"


class TestImportOfAList(testing.DatasetWriterConformance):
    def make_writer(self):
        return ImportWriter("samples", key="name")

    def make_source(self, folder):
        noise = np.random.default_rng(0)
        return [
            {"name": f"n{n}", "picture": noise.integers(0, 256, (4, 5, 3), np.uint8), "score": n / 7, "text": "ä" * n}
            for n in range(9)
        ]


@pytest.mark.long
class TestImportOfPairs(testing.DatasetWriterConformance):
    def make_writer(self):
        return ImportWriter(names=("values", "label"), version="1")

    def make_source(self, folder):
        return [(np.arange(n % 4, dtype=np.float32), n) for n in range(9)]
