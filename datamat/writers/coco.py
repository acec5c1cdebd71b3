"""Images with labelled boxes, in the layout of COCO.

    COCO/
        annotations/instances_train2017.json        the split is `train`
        annotations/instances_val2017.json
        train2017/000000000009.jpg                  or train/, images/train2017/, images/train/, images/
        val2017/...

    Materializer("coco", source="COCO", output="out/coco").run()

The JSON files may also lie in COCO/ itself. The key is the file name of the image without its suffix. Every annotation
is kept, crowds included, in the order of the file: a box is clipped to its image and may then have no area (COCO has
such boxes; `augment` can drop them). A box outside its image is an error. Segmentations are not read. An albumentations
pipeline drops labels together with their boxes if it knows the label fields:

    A.BboxParams("albumentations", label_fields=["objects/label", "objects/is_crowd"])

Source of the format: https://cocodataset.org/#format-data.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from datamat.codecs import probe, read_file
from datamat.directory.files import path_inside
from datamat.errors import SchemaError, SourceError
from datamat.features import BBoxes, ClassLabel, Features, Image, Scalar
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample

__all__ = ["CocoWriter"]

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_YEAR = re.compile(r"_?\d{4}\Z")
_MOST_BYTES = 4 << 30  # of a JSON file; COCO's train2017 has 0.45 GB
_OF_IMAGE = {"id", "file_name", "height", "width"}
_OF_CATEGORY = {"id", "name"}


class CocoWriter(DatasetWriter):
    """Reads each image with its id, and the box, label and crowd flag of each object; images keep their files' bytes.

    Labels count from 0 in the order of the category ids; boxes are (ymin, xmin, ymax, xmax) as fractions.
    """

    name = "coco"
    file_fields = ("image",)

    def bind(self, source: Any) -> None:
        """Read the categories; they are the same in every file, so the smallest will do.

        Raises:
            SourceError: the source has no `instances_*.json`, or the file is not in the COCO format.
        """
        file = min(_files(source).values(), key=lambda path: path.stat().st_size)
        self._categories = _categories(_load(file), file)
        self.features = Features(
            {
                "image": Image(encoding="jpeg"),
                "image_id": Scalar("int64"),
                "objects/bbox": BBoxes(),
                "objects/label": ClassLabel(names=tuple(self._categories.values()), shape=(None,)),
                "objects/is_crowd": ClassLabel(names=("one", "crowd"), shape=(None,)),
            }
        )

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per image, by split and image id.

        Raises:
            SourceError: an annotation has an unknown category or image, or an invalid box; an image id occurs twice; or
                the categories of two files differ.
        """
        for split, file in _files(source).items():
            instances = _load(file)
            if _categories(instances, file) != self._categories:
                raise SourceError(f"{file}: its categories differ from those of the other splits; make them the same")
            yield from _rows(pathlib.Path(source), split, file, instances, list(self._categories))

    def read(self, row: IndexRow) -> Sample:
        path = str(row.fields["image"])
        data = read_file(path)
        info = probe(data, whole=True, name=path)
        objects = json.loads(str(row.fields["objects"]))
        found = (info.height, info.width) if info.orientation < 5 else (info.width, info.height)
        if found != tuple(objects["size"]):
            raise SchemaError(
                f"{path!r}: image {row.fields['image_id']} has {found} pixels (height, width), its entry says "
                f"{tuple(objects['size'])}; correct the JSON, or restore the image"
            )
        return {
            "image": data,
            "image_id": row.fields["image_id"],
            "objects/bbox": (np.array(objects["boxes"]).reshape(-1, 4) / np.array(found * 2)).astype(np.float32),
            "objects/label": objects["labels"],
            "objects/is_crowd": objects["crowds"],
        }


def _files(source: Any) -> dict[str, pathlib.Path]:
    """Return the JSON files by split, sorted."""
    root, found = pathlib.Path(source), dict[str, pathlib.Path]()
    for path in sorted([*root.glob("annotations/instances_*.json"), *root.glob("instances_*.json")]):
        tag = path.stem.removeprefix("instances_")
        split = _YEAR.sub("", tag) or tag
        if split in found:
            raise SourceError(f"{found[split]} and {path} both belong to the split {split!r}; keep one, or rename it")
        found[split] = path
    if not found:
        raise SourceError(f"{root}: found no annotations/instances_*.json and no instances_*.json; give COCO's folder")
    return found


def _load(file: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    try:
        found = json.loads(read_file(file, max_bytes=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file} is no JSON: {error}; restore it") from error
    parts = ("images", "annotations", "categories")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), list) for part in parts):
        raise SourceError(f"{file} is not in the COCO format; want an object with the lists {', '.join(parts)}")
    for part, wanted in (("images", _OF_IMAGE), ("categories", _OF_CATEGORY)):
        for number, entry in enumerate(found[part]):
            if not isinstance(entry, dict) or wanted - entry.keys():
                raise SourceError(f"{file}: entry {number} of {part} lacks one of {', '.join(sorted(wanted))}; add it")
    return found


def _categories(instances: Mapping[str, Any], file: pathlib.Path) -> dict[int, str]:
    """Return the names by category id, sorted by id."""
    named = sorted((int(category["id"]), str(category["name"])) for category in instances["categories"])
    if len({number for number, _ in named}) < len(named) or not named:
        raise SourceError(f"{file}: {len(named)} categories, or two with one id; want each id once")
    return dict(named)


def _rows(
    root: pathlib.Path, split: str, file: pathlib.Path, instances: Mapping[str, Any], categories: list[int]
) -> Iterator[IndexRow]:
    images = {image["id"]: image for image in instances["images"]}
    if len(images) < len(instances["images"]):
        raise SourceError(f"{file}: {len(instances['images']) - len(images)} images share an id with another; keep one")
    for image in instances["images"]:
        path_inside(root, image["file_name"], file)
    objects = _objects(file, images, instances["annotations"], categories)
    folder = _image_folder(root, file, split, [image["file_name"] for image in instances["images"][:1]])
    for number in sorted(images):
        name = pathlib.PurePosixPath(images[number]["file_name"])
        fields = {"image": str(folder / name), "image_id": number, "objects": json.dumps(objects[number])}
        yield IndexRow(str(name.with_suffix("")).replace("/", "-"), split, fields, f"{file.name} image {number}")


def _image_folder(root: pathlib.Path, file: pathlib.Path, split: str, names: list[str]) -> pathlib.PurePosixPath:
    """Return the folder, relative to the root, that holds the first of some images."""
    tag = file.stem.removeprefix("instances_")
    folders = [tag, split, f"images/{tag}", f"images/{split}", "images", "."]
    found = next((folder for folder in folders if all((root / folder / name).is_file() for name in names)), tag)
    return pathlib.PurePosixPath(found)


def _objects(
    file: pathlib.Path, images: Mapping[int, Any], annotations: list[dict[str, Any]], categories: list[int]
) -> dict[int, dict[str, list[Any]]]:
    """Return the objects of each image, by columns: boxes as (ymin, xmin, ymax, xmax) in pixels."""
    labels = {category: number for number, category in enumerate(categories)}
    found: dict[int, dict[str, list[Any]]] = {
        number: {"size": [image["height"], image["width"]], "boxes": [], "labels": [], "crowds": []}
        for number, image in images.items()
    }
    for annotation in annotations:
        place = f"{file}: annotation {annotation.get('id')}"
        image, category = annotation.get("image_id"), annotation.get("category_id")
        if image not in found:
            raise SourceError(f"{place} belongs to the image {image!r}, which is not listed; add the image, or drop it")
        if category not in labels:
            raise SourceError(f"{place} has the category {category!r}, which is not listed; add it to the categories")
        objects = found[image]
        objects["boxes"].append(_clipped(annotation.get("bbox"), objects["size"], place))
        objects["labels"].append(labels[category])
        objects["crowds"].append(int(bool(annotation.get("iscrowd"))))
    return found


def _clipped(bbox: Any, size: list[int], place: str) -> list[float]:
    """Return a box (x, y, width, height) as (ymin, xmin, ymax, xmax), clipped to its image."""
    height, width = size
    try:
        x, y, w, h = map(float, bbox)
    except (TypeError, ValueError):
        x = y = w = h = math.nan
    inside = x <= width and y <= height and x + w >= 0 and y + h >= 0 and w >= 0 and h >= 0
    if not inside or not math.isfinite(x + y + w + h):
        raise SourceError(
            f"{place} has the box {bbox!r}; want x, y, width, height in pixels, with no negative size, touching its "
            f"image of {width} x {height}; correct it, or drop it"
        )
    return [max(y, 0.0), max(x, 0.0), min(y + h, height), min(x + w, width)]
