"""Images with labelled objects, in the layout of COCO, of LVIS, and of Roboflow's exports.

    COCO/
        annotations/instances_train2017.json        the split is `train`
        annotations/instances_val2017.json          or lvis_v1_train.json
        train2017/000000000009.jpg                  or train/, images/train2017/, images/train/, images/
        val2017/...

    ROBOFLOW/
        train/_annotations.coco.json                beside its images
        valid/_annotations.coco.json

    Materializer("coco", source="COCO", output="out/coco").run()

The JSON files may also lie in COCO/ itself. The key is the file name of the image without its suffix. Every annotation
is kept, crowds included, in the order of the file: a box is clipped to its image and may then have no area (COCO has
such boxes; `augment` can drop them). A box outside its image is an error. `writers/detection.py` says what a sample
has, and `CocoWriter(segments=True)` reads the outlines as well; crowds, which COCO has as runs of pixels, have none.
`CocoWriter(keypoints=True)` reads `person_keypoints_*.json` instead, with the points of each object.

Source of the formats: https://cocodataset.org/#format-data, https://www.lvisdataset.org/dataset.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from datamat.codecs import read_file
from datamat.directory.files import path_inside
from datamat.errors import SourceError
from datamat.features import Feature, Keypoints, Scalar
from datamat.sources.rows import IndexRow
from datamat.writers.detection import DetectionWriter, Objects, Picture, clipped, key_of

OUTPUT_VERSION = 2
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_YEAR = re.compile(r"_?\d{4}\Z")
_MOST_BYTES = 4 << 30  # of a JSON file; COCO's train2017 has 0.45 GB
_OF_IMAGE = {"id", "height", "width"}
_OF_CATEGORY = {"id", "name"}
_ROBOFLOW = "_annotations.coco.json"
_PREFIXES = ("instances_", "lvis_v1_", "lvis_v0.5_")


class CocoWriter(DetectionWriter):
    """Reads each image with its id, and the box, label and crowd flag of each object; images keep their files' bytes.

    Labels count from 0 in the order of the category ids; boxes are (ymin, xmin, ymax, xmax) as fractions.

    Args:
        keypoints: whether to read `person_keypoints_*.json`, with the points of each object.
        options: `segments` and `missing` of `DetectionWriter`.
    """

    name = "coco"
    file_fields = ("image",)
    flags: ClassVar[Mapping[str, tuple[str, str]]] = {"is_crowd": ("one", "crowd")}

    def __init__(self, *, keypoints: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._prefixes = ("person_keypoints_",) if keypoints else _PREFIXES
        self._has_points = keypoints

    def class_names(self, root: pathlib.Path) -> list[str]:
        """Read the categories from the smallest file, as they are the same in every file."""
        file = min(self._files(root).values(), key=lambda path: path.stat().st_size)
        self._instances = _categories(_load(file), file)
        return list(self._instances.values())

    def keypoints(self, root: pathlib.Path) -> Keypoints | None:
        if not self._has_points:
            return None
        file = min(self._files(root).values(), key=lambda path: path.stat().st_size)
        for category in _load(file)["categories"]:
            if names := category.get("keypoints"):
                return Keypoints((None, len(names), 3), tuple(map(str, names)))
        raise SourceError(f"{file}: no category has keypoints; leave out keypoints=True, or give another file")

    def more_features(self) -> dict[str, Feature]:
        return {"image_id": Scalar("int64")}

    def pictures(self, root: pathlib.Path) -> Iterator[Picture]:
        """Yield the images by split and image id.

        Raises:
            SourceError: an annotation has an unknown category or image, or an invalid box; an image id occurs twice; or
                the categories of two files differ.
        """
        for split, file in self._files(root).items():
            instances = _load(file)
            if _categories(instances, file) != self._instances:
                raise SourceError(f"{file}: its categories differ from those of the other splits; make them the same")
            yield from self._pictures(root, split, file, instances)

    def objects(self, row: IndexRow, size: tuple[int, int]) -> Objects:
        found = json.loads(str(row.fields["objects"]))
        return Objects(**{**found, "size": tuple(found["size"])})

    def _files(self, root: pathlib.Path) -> dict[str, pathlib.Path]:
        """Return the JSON files by split, sorted."""
        found = dict[str, pathlib.Path]()
        named = [(prefix, path) for prefix in self._prefixes for path in root.glob(f"annotations/{prefix}*.json")]
        named += [(prefix, path) for prefix in self._prefixes for path in root.glob(f"{prefix}*.json")]
        for prefix, path in sorted(named, key=lambda one: one[1]):
            tag = path.stem.removeprefix(prefix)
            split = _YEAR.sub("", tag) or tag
            if split in found:
                raise SourceError(
                    f"{found[split]} and {path} both belong to the split {split!r}; keep one, or rename it"
                )
            found[split] = path
        found = found or {path.parent.name: path for path in sorted(root.glob(f"*/{_ROBOFLOW}"))}
        if not found:
            first = self._prefixes[0]
            raise SourceError(
                f"{root}: found no annotations/{first}*.json, no {first}*.json and no */{_ROBOFLOW}; give COCO's folder"
            )
        return found

    def _pictures(
        self, root: pathlib.Path, split: str, file: pathlib.Path, instances: Mapping[str, Any]
    ) -> Iterator[Picture]:
        images = {image["id"]: image for image in instances["images"]}
        if len(images) < len(instances["images"]):
            lost = len(instances["images"]) - len(images)
            raise SourceError(f"{file}: {lost} images share an id with another; keep one")
        names = {number: _name_of(image) for number, image in images.items()}
        for name in names.values():
            path_inside(root, name, file)
        objects = self._objects(file, images, instances["annotations"])
        folder = _image_folder(root, file, split, [names[image["id"]] for image in instances["images"][:1]])
        for number in sorted(images):
            fields = {"image_id": number, "objects": json.dumps(objects[number])}
            image = str(folder / names[number])
            yield Picture(key_of(names[number]), split, image, None, fields, f"{file.name} image {number}")

    def _objects(
        self, file: pathlib.Path, images: Mapping[int, Any], annotations: list[dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return the columns of `Objects` for each image."""
        labels = {category: number for number, category in enumerate(self._instances)}
        found: dict[int, dict[str, Any]] = {
            number: {"size": [image["height"], image["width"]], "boxes": [], "labels": [], "flags": {"is_crowd": []}}
            | ({"ids": [], "outlines": []} if self.segments else {})
            | ({"keypoints": []} if self._has_points else {})
            for number, image in images.items()
        }
        for annotation in annotations:
            number = annotation.get("id")
            place = f"{file}: annotation {number}"
            image, category = annotation.get("image_id"), annotation.get("category_id")
            if image not in found:
                raise SourceError(
                    f"{place} belongs to the image {image!r}, which is not listed; add the image, or drop it"
                )
            if category not in labels:
                raise SourceError(
                    f"{place} has the category {category!r}, which is not listed; add it to the categories"
                )
            objects = found[image]
            objects["boxes"].append(_clipped(annotation.get("bbox"), objects["size"], place))
            objects["labels"].append(labels[category])
            objects["flags"]["is_crowd"].append(int(bool(annotation.get("iscrowd"))))
            if self.segments:
                parts = annotation.get("segmentation") or []
                objects["ids"].append(number)
                objects["outlines"] += [(number, part) for part in parts] if isinstance(parts, list) else []
            if self._has_points:
                objects["keypoints"].append(_points(annotation.get("keypoints"), place))
        return found


def _load(file: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    try:
        found = json.loads(read_file(file, max_bytes=_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file} is not JSON: {error}; restore it") from error
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


def _name_of(image: Mapping[str, Any]) -> Any:
    """Return the file name of an image; LVIS only has it in the address."""
    return image["file_name"] if "file_name" in image else "/".join(str(image.get("coco_url", "")).split("/")[-2:])


def _image_folder(root: pathlib.Path, file: pathlib.Path, split: str, names: list[str]) -> pathlib.PurePosixPath:
    """Return the folder, relative to the root, that holds the first of some images."""
    tag = re.sub(r"\A(instances|lvis_v[\d.]+|person_keypoints)_", "", file.stem)
    if file.name == _ROBOFLOW:
        return pathlib.PurePosixPath(file.parent.relative_to(root).as_posix())
    folders = [tag, split, f"images/{tag}", f"images/{split}", "images", "."]
    found = next((folder for folder in folders if all((root / folder / name).is_file() for name in names)), tag)
    return pathlib.PurePosixPath(found)


def _clipped(bbox: Any, size: list[int], place: str) -> list[float]:
    """Return a box (x, y, width, height) as (ymin, xmin, ymax, xmax), clipped to its image."""
    try:
        x, y, w, h = map(float, bbox)
    except (TypeError, ValueError):
        x = y = w = h = math.nan
    wanted = "x, y, width, height in pixels"
    return clipped((x, y, x + w, y + h), (size[0], size[1]), place, bbox, wanted)


def _points(flat: Any, place: str) -> list[list[float]]:
    """Return the points (x, y, visibility) of x, y, visibility, x, ..."""
    if not isinstance(flat, list) or len(flat) % 3:
        raise SourceError(f"{place} has the keypoints {flat!r}; want x, y, visibility of each; correct it, or drop it")
    return [flat[number : number + 3] for number in range(0, len(flat), 3)]
