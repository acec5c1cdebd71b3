"""Sidewalks from a pedestrian's view, with colour-coded masks of the ground surface: the surface-masking layout.

    ROOT/
        Surface_001/
            a.jpg  b.jpg ...
            MASK/a.png              colours of the palette
        Surface_001.xml             optional, or in Surface_001/: CVAT for images 1.1, for those without MASK/*.png

    Materializer("pedestrian", source="ROOT", output="out/surface", splits={"train": 0.9, "val": 0.1}).run()

The key is FOLDER-NAME: `Surface_001-a`. A polygon in the XML has the class `LABEL_ATTRIBUTE` where such a class is
declared (`sidewalk_blocks`), else `LABEL`; a higher `z_order` lies on top, and pixels that no polygon covers are class
0.

The default classes and colours are those of the surface masks in AI Hub's "sidewalk walking video" dataset.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.codecs import decode_image, probe, read_file
from datamat.codecs.files import PICTURES
from datamat.codecs.xml import read_xml
from datamat.errors import InputError, OptionError, SchemaError, SourceError
from datamat.features import Features, Image, Mask
from datamat.sources.files import note_files
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import pair_files
from datamat.writers.paths import files_below

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""
PACKAGES = ("cv2",)  # draws the polygons

_UNDECLARED = 255
_FARTHEST = 1 << 20  # pixels: far outside any image, and still exact in cv2's fixed-point coordinates

_SURFACES = {
    "background": (0, 0, 0),
    "sidewalk_blocks": (0, 0, 255),
    "sidewalk_cement": (217, 217, 217),
    "sidewalk_urethane": (198, 89, 17),
    "sidewalk_asphalt": (128, 128, 128),
    "sidewalk_soil_stone": (255, 230, 153),
    "sidewalk_damaged": (55, 86, 35),
    "sidewalk_other": (110, 168, 70),
    "braille_guide_blocks_normal": (255, 255, 0),
    "braille_guide_blocks_damaged": (128, 96, 0),
    "roadway_normal": (255, 128, 255),
    "roadway_crosswalk": (255, 0, 255),
    "alley_normal": (230, 170, 255),
    "alley_crosswalk": (208, 88, 255),
    "alley_speed_bump": (138, 60, 200),
    "alley_damaged": (88, 38, 128),
    "bike_lane_normal": (255, 155, 155),
    "caution_zone_stairs": (255, 192, 0),
    "caution_zone_manhole": (255, 0, 0),
    "caution_zone_tree_zone": (0, 255, 0),
    "caution_zone_grating": (255, 128, 0),
    "caution_zone_repair_zone": (105, 105, 255),
}


class PedestrianWriter(DatasetWriter):
    """Reads each image with its mask; images keep the bytes of their files where nothing changes them.

    Args:
        names: class names in the order of the ids, at most 255; the first is the class of pixels that no polygon
            covers.
        palette: colour of each class in the masks, as (red, green, blue).

    Raises:
        OptionError: names and colours differ in number, or two classes share a colour.

    Example:
        >>> writer = PedestrianWriter(names=("ground", "road"), palette=((0, 0, 0), (255, 0, 0)))
        >>> writer.features["mask"].declared()
        'uint8 (height, width) of 2 classes'
    """

    name = "pedestrian"
    file_fields = ("image", "annotation")

    def __init__(
        self,
        names: Sequence[str] = tuple(_SURFACES),
        palette: Sequence[tuple[int, int, int]] = tuple(_SURFACES.values()),
    ) -> None:
        if len(set(palette)) != len(names) or not 1 <= len(names) <= _UNDECLARED:
            raise OptionError(
                f"pedestrian: {len(names)} names and {len(set(palette))} different colours in palette; want one colour "
                f"for each of 1 to {_UNDECLARED} names"
            )
        self._names = tuple(names)
        mask = Mask(names=self._names, palette=tuple((int(r), int(g), int(b)) for r, g, b in palette))
        self.features = Features({"image": Image(encoding="jpeg"), "mask": mask})

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per image, sorted by folder and name.

        Raises:
            SourceError: the source holds no folders `Surface_*`; an image has neither mask nor polygons, or one of
                these has no image; an XML file cannot be read, or has a label that is not a class.
        """
        root = pathlib.Path(source)
        folders = sorted(path for path in root.glob("Surface_*") if path.is_dir())
        if not folders:
            raise SourceError(f"{root} holds no folders Surface_*; give the folder that holds them as source")
        for folder in folders:
            yield from _rows(root, folder.name, self._names)

    def read(self, row: IndexRow) -> Sample:
        image, annotation = str(row.fields["image"]), str(row.fields["annotation"])
        data = read_file(image)
        info = probe(data, whole=True, name=image)
        size = (info.height, info.width) if info.orientation < 5 else (info.width, info.height)
        if row.fields["polygons"]:
            drawing = json.loads(str(row.fields["polygons"]))
            _check_size(tuple(drawing["size"]), size, annotation)
            mask = _draw(drawing["polygons"], size)
        else:
            colours = decode_image(read_file(annotation), name=annotation)
            try:
                mask = self.features["mask"].prepare(colours)
            except SchemaError as error:
                raise SchemaError(f"{annotation!r}: {error}") from error
            _check_size(mask.shape, size, annotation)
        return {"image": data, "mask": mask}


def _rows(root: pathlib.Path, surface: str, names: Sequence[str]) -> Iterator[IndexRow]:
    images = files_below(root / surface, "*", PICTURES)
    masks = files_below(root / surface, "MASK/*", (".png",))
    xml = next((name for name in (f"{surface}/{surface}.xml", f"{surface}.xml") if (root / name).is_file()), "")
    drawings = _drawings(root / xml, names) if xml else {}
    note_files(root, [pathlib.PurePath(xml)] if xml else [])
    coded = {mask.stem for mask in masks}
    drawn = {image for image in images if image.name in drawings and image.stem not in coded}
    lost = sorted(drawings.keys() - {image.name for image in images})
    if lost:
        raise SourceError(f"{root / xml}: image {lost[0]!r} is not in {surface}/; add the file, or drop the entry")
    try:
        mask_of = dict(pair_files([image for image in images if image not in drawn], masks))
    except SourceError as error:
        raise SourceError(f"{surface}: {error}") from error
    for image in images:
        path = f"{surface}/{image}"
        annotation, polygons = (xml, drawings[image.name]) if image in drawn else (f"{surface}/{mask_of[image]}", "")
        fields = {"image": path, "annotation": annotation, "polygons": polygons}
        yield IndexRow(f"{surface}-{image.stem}", None, fields, path)


def _check_size(found: tuple[int, ...], size: tuple[int, int], path: str) -> None:
    if found != size:
        raise SchemaError(
            f"{path!r}: annotates {found} pixels (height, width), but the image has {size}; make them agree"
        )


# ---- polygons of CVAT for images 1.1


def _drawings(xml: pathlib.Path, names: Sequence[str]) -> dict[str, str]:
    """Return what to draw for each image, as JSON: {"size": [height, width], "polygons": [[id, [[x, y], ...]]]}."""
    try:
        root = read_xml(xml)
    except InputError as error:
        raise SourceError(f"{error}; export it again as CVAT for images 1.1") from error
    found: dict[str, str] = {}
    for image in root.iter("image"):
        name = pathlib.PurePosixPath(image.get("name", "")).name
        place = f"{xml}: image {name!r}"
        if name in found:
            raise SourceError(f"{place} occurs twice; keep one of them")
        shapes = sorted(
            (shape for shape in image if shape.tag != "tag"), key=lambda shape: _number(shape, "z_order", place)
        )
        found[name] = json.dumps(
            {
                "size": [_number(image, "height", place), _number(image, "width", place)],
                "polygons": [[_class_id(shape, names, place), _points(shape, place)] for shape in shapes],
            }
        )
    return found


def _number(element: Element, attribute: str, place: str) -> int:
    text = element.get(attribute, "0" if attribute == "z_order" else "")
    try:
        return int(text)
    except ValueError as error:
        raise SourceError(f"{place}: {element.tag} has {attribute}={text!r}; want a whole number") from error


def _class_id(shape: Element, names: Sequence[str], place: str) -> int:
    label = shape.get("label", "")
    for name in (*(f"{label}_{attribute.text}" for attribute in shape.iter("attribute")), label):
        if name in names:
            return names.index(name)
    raise SourceError(f"{place}: label {label!r} is not a class; declare it with names= and palette=")


def _points(shape: Element, place: str) -> list[list[int]]:
    """Return the corners of a polygon, rounded to whole pixels for `cv2.fillPoly`."""
    text = shape.get("points", "")
    try:
        points = [[round(float(number)) for number in point.split(",")] for point in text.split(";")]
    except (ValueError, OverflowError):
        points = []
    if shape.tag != "polygon" or len(points) < 3 or any(len(p) != 2 or max(map(abs, p)) > _FARTHEST for p in points):
        raise SourceError(
            f"{place}: found a {shape.tag} with points {text[:60]!r}; want polygons of three or more points 'x,y;x,y'"
        )
    return points


def _draw(polygons: Sequence[tuple[int, list[list[int]]]], size: tuple[int, int]) -> np.ndarray:
    import cv2

    mask = np.zeros(size, np.uint8)
    for number, points in polygons:
        cv2.fillPoly(mask, [np.array(points, np.int32)], number)
    return mask
