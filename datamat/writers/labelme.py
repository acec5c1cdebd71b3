"""Pictures with labelled shapes, as LabelMe writes them.

    SET/
        0001.jpg                    or in folders; a folder that is called like a split, such as `train`, is one
        0001.json                   shapes with label, shape_type and points in pixels

    Materializer("labelme", source="SET", output="out/set").run()

Each JSON file is a picture; pictures without one were not labelled, and are left aside. The box of a shape is its
extent; a circle has its centre and a point on its edge. The classes are the sorted labels that occur, or those of
`LabelmeWriter(names=...)`. `writers/detection.py` says what a sample has; `LabelmeWriter(segments=True)` reads the
outlines of polygons and rectangles as well.

Source of the format: https://github.com/wkentaro/labelme, labelme/label_file.py.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from datamat.codecs import read_file
from datamat.errors import SourceError
from datamat.sources.rows import IndexRow
from datamat.writers.detection import DetectionWriter, Objects, Picture, clipped, extent, key_of
from datamat.writers.paths import SPLITS, files_below

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""


class LabelmeWriter(DetectionWriter):
    """Reads each picture with the box and label of each shape; pictures keep their files' bytes.

    Args:
        options: `names`, `segments` and `missing` of `DetectionWriter`.
    """

    name = "labelme"

    def class_names(self, root: pathlib.Path) -> list[str]:
        names = {str(shape.get("label")) for labels in _files(root) for shape in _parsed(str(root / labels))["shapes"]}
        return sorted(names)

    def pictures(self, root: pathlib.Path) -> Iterator[Picture]:
        """Yield the pictures by path.

        Raises:
            SourceError: there are no JSON files, or one is not from LabelMe.
        """
        for labels in _files(root):
            name = str(_parsed(str(root / labels)).get("imagePath") or "").replace("\\", "/")
            image = labels.parent / (pathlib.PurePosixPath(name).name or labels.with_suffix(".jpg").name)
            split = labels.parts[0] if labels.parts[0] in SPLITS else None
            yield Picture(key_of(labels), split, str(image), str(labels))

    def objects(self, row: IndexRow, size: tuple[int, int]) -> Objects:
        path = str(row.fields["labels"])
        content, found = _parsed(path), Objects()
        found.size = (content.get("imageHeight") or 0, content.get("imageWidth") or 0)
        for number, shape in enumerate(content["shapes"]):
            place = f"{path}, shape {number}"
            kind = shape.get("shape_type") or "polygon"
            points = _points(shape, kind, place)
            box = extent(points)
            if kind in {"polygon", "rectangle"}:
                corners = [box[0], box[1], box[2], box[1], box[2], box[3], box[0], box[3]]
                found.outlines.append((number, points if kind == "polygon" else corners))
            found.boxes.append(clipped(box, size, place, shape.get("points"), "points in pixels"))
            found.labels.append(self.label(str(shape.get("label")), place))
        return found


def _points(shape: Mapping[str, Any], kind: str, place: str) -> list[float]:
    """Return the vertices x, y, x, y, ... of a shape; of a circle, those of the square around it."""
    try:
        points = [float(value) for x, y in shape["points"] for value in (x, y)]
        if kind == "circle":
            x, y, *edge = points
            radius = math.dist((x, y), edge)
            points = [x - radius, y - radius, x + radius, y + radius]
        if points:
            return points
    except (KeyError, TypeError, ValueError):
        pass
    raise SourceError(
        f"{place} has the points {shape.get('points')!r:.80}; want [x, y] of each; correct it, or drop it"
    )


def _files(root: pathlib.Path) -> list[pathlib.PurePosixPath]:
    files = files_below(root, suffixes=(".json",))
    if not files:
        raise SourceError(f"{root}: found no *.json; give the folder that LabelMe wrote to")
    return files


def _parsed(path: str) -> dict[str, Any]:
    try:
        found = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON: {error}; restore it") from error
    if not isinstance(found, dict) or not isinstance(found.get("shapes"), list):
        raise SourceError(f"{path} is not a file of LabelMe; want an object with the list shapes; move it away")
    return found
