"""Reads pictures with labelled objects: the part that all layouts share.

A layout is a subclass that lists the classes and pictures of a source, and what is in each picture: `writers/coco.py`,
`yolo.py`, `voc.py` and `labelme.py`. All give the same sample:

    image               the file's bytes, unless something changes them
    objects/bbox        float32 (n, 4), (ymin, xmin, ymax, xmax) as fractions, clipped to the picture
    objects/label       the class of each
    objects/FLAG        what else the layout says about each: COCO's `is_crowd`, VOC's `difficult`
    objects/keypoints   its points, if they are asked for, or the source declares them

and with `segments=True` the outlines. An object may have several or none; each names its object by the id:

    objects/id          int64 (n,), COCO's id of the annotation; elsewhere its number in the file, from 0
    segments/outline    polygons of (x, y) in pixels
    segments/object     int64 (m,), the id of the object that each outline belongs to

A transform that drops boxes drops labels, flags and ids with them, if it knows them:

    A.BboxParams("albumentations", label_fields=["objects/label", "objects/id"])
"""

from __future__ import annotations

import abc
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from datamat.codecs import probe, read_file
from datamat.errors import OptionError, SchemaError, Skip, SourceError
from datamat.features import BBoxes, ClassLabel, Feature, Features, Image, Keypoints, Polygons, Tensor
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of these writers are rebuilt."""


class Picture(NamedTuple):
    """A picture of a source, and where its objects are described.

    Attributes:
        key: its key.
        split: its split; None leaves it to the run.
        image: path below the source.
        labels: path of the file that describes its objects; None if there is none.
        fields: further fields of its row.
        origin: what messages call it.
    """

    key: str
    split: str | None
    image: str
    labels: str | None = None
    fields: Mapping[str, Any] = {}
    origin: str = ""


@dataclasses.dataclass
class Objects:
    """What is in one picture, by columns.

    Attributes:
        boxes: (ymin, xmin, ymax, xmax) of each in pixels.
        labels: number of the class of each.
        flags: for each flag of the layout, whether it holds for each object.
        ids: id of each.
        outlines: id of an object, and the vertices x, y, x, y, ... of one of its outlines, in pixels.
        keypoints: points of each, in pixels.
        size: height and width from the description; None if it has none.
    """

    boxes: list[Sequence[float]] = dataclasses.field(default_factory=list)
    labels: list[int] = dataclasses.field(default_factory=list)
    flags: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    ids: list[int] = dataclasses.field(default_factory=list)
    outlines: list[tuple[int, list[float]]] = dataclasses.field(default_factory=list)
    keypoints: list[Any] = dataclasses.field(default_factory=list)
    size: tuple[int, int] | None = None


class DetectionWriter(DatasetWriter):
    """Reads each picture with its boxes and their labels; pictures keep their files' bytes.

    Args:
        names: names of the classes, in order; if empty, those of the source.
        segments: whether to read outlines.
        missing: "error", or "skip" to leave out rows whose picture or description is missing. They are counted, and
            named in the ledger.
    """

    file_fields: ClassVar[Sequence[str]] = ("image", "labels")
    flags: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """The flags of the layout, each with its names for no and yes."""

    def __init__(
        self, *, names: Sequence[str] = (), segments: bool = False, missing: Literal["error", "skip"] = "error"
    ) -> None:
        if missing not in {"error", "skip"}:
            raise OptionError(f"{type(self).__name__}: missing is {missing!r}; want 'error' or 'skip'")
        self._names = tuple(names)
        self.segments = segments
        self.missing = missing

    @abc.abstractmethod
    def class_names(self, root: pathlib.Path) -> Sequence[str]:
        """Return the names of the classes that a source has, in order."""

    @abc.abstractmethod
    def pictures(self, root: pathlib.Path) -> Iterable[Picture]:
        """Yield the pictures of a source."""

    @abc.abstractmethod
    def objects(self, row: IndexRow, size: tuple[int, int]) -> Objects:
        """Return what is in a picture, given its row, height and width."""

    def keypoints(self, root: pathlib.Path) -> Keypoints | None:
        """Return the feature of the points of an object; None if it has none."""
        del root
        return None

    def bind(self, source: Any) -> None:
        """Read the names of the classes.

        Raises:
            SourceError: the source is not in the layout.
        """
        root = pathlib.Path(source)
        self.classes = tuple(self._names or self.class_names(root))
        self.number_of = {name: number for number, name in enumerate(self.classes)}
        points = self.keypoints(root)
        each: dict[str, Feature] = {"bbox": BBoxes(), "label": ClassLabel(names=self.classes, shape=(None,))}
        each |= {flag: ClassLabel(names=levels, shape=(None,)) for flag, levels in self.flags.items()}
        each |= {} if points is None else {"keypoints": points}
        each |= {"id": Tensor((None,), "int64")} if self.segments else {}
        fields = {"image": Image(encoding="jpeg"), **self.more_features()}
        fields |= {f"objects/{name}": feature for name, feature in each.items()}
        if self.segments:
            fields |= {"segments/outline": Polygons(), "segments/object": Tensor((None,), "int64")}
        self.features = Features(fields)

    def more_features(self) -> dict[str, Feature]:
        """Return features of a whole picture, whose values are the fields of that name in its row."""
        return {}

    def index(self, source: Any) -> Iterator[IndexRow]:
        """Return one row for each picture.

        Raises:
            SourceError: the source contradicts itself.
        """
        root = pathlib.Path(source)
        for one in self.pictures(root):
            found = {"image": one.image, **({"labels": one.labels} if "labels" in self.file_fields else {})}
            gone = [path for path in found.values() if path is not None and not (root / path).is_file()]
            if self.missing == "skip":
                gone += [f"a description of {one.image}"] if None in found.values() else []
                found = {name: None if path in gone else path for name, path in found.items()}
                found["missing"] = gone[0] if gone else ""
            yield IndexRow(one.key, one.split, {**found, **one.fields}, one.origin or one.image)

    def read(self, row: IndexRow) -> Sample | Skip:
        if row.fields.get("missing"):
            return Skip(f"{row.fields['missing']} does not exist")
        path = str(row.fields["image"])
        data = read_file(path)
        info = probe(data, whole=True, name=path)
        size = (info.height, info.width) if info.orientation < 5 else (info.width, info.height)
        found = self.objects(row, size)
        if found.size not in {None, (0, 0), size}:
            raise SchemaError(
                f"{path!r}: {row.origin} has {size} pixels (height, width), its description says {found.size}; "
                "correct the description, or restore the image"
            )
        ids = found.ids or range(len(found.boxes))
        values = {
            "image": data,
            **{name: row.fields[name] for name in self.more_features()},
            "objects/bbox": (np.array(found.boxes).reshape(-1, 4) / np.array(size * 2)).astype(np.float32),
            "objects/label": found.labels,
            **{f"objects/{flag}": found.flags[flag] for flag in self.flags},
            "objects/keypoints": found.keypoints,
            "objects/id": np.array(ids, np.int64),
            "segments/outline": [points for _, points in found.outlines],
            "segments/object": np.array([number for number, _ in found.outlines], np.int64),
        }
        return {name: value for name, value in values.items() if name in self.features}

    def label(self, name: str, place: str) -> int:
        """Return the number of a class; raise `SourceError` if it is unknown."""
        if name not in self.number_of:
            raise SourceError(f"{place} is of the class {name!r}, which is not among the names; correct one of them")
        return self.number_of[name]


def clipped(
    box: Sequence[float], size: tuple[int, int], place: str, given: Any, wanted: str = "xmin, ymin, xmax, ymax"
) -> list[float]:
    """Return a box (ymin, xmin, ymax, xmax) in pixels, clipped to its picture.

    Raises:
        SourceError: it has a negative size, or lies outside the picture.
    """
    xmin, ymin, xmax, ymax = box
    height, width = size
    inside = xmin <= width and ymin <= height and xmax >= 0 and ymax >= 0 and xmin <= xmax and ymin <= ymax
    if not inside or not math.isfinite(sum(box)):
        raise SourceError(
            f"{place} has the box {given!r}; want {wanted}, with no negative size, touching its image of "
            f"{width} x {height}; correct it, or drop it"
        )
    return [max(ymin, 0.0), max(xmin, 0.0), min(ymax, height), min(xmax, width)]


def extent(points: Sequence[float]) -> list[float]:
    """Return (xmin, ymin, xmax, ymax) of vertices x, y, x, y, ..."""
    return [min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])]


def key_of(path: str | os.PathLike[str], *, without: str = "") -> str:
    """Return a path as a key, without its suffix and with `-` for `/`; `without` names a folder to leave out."""
    parts = list(pathlib.PurePosixPath(path).with_suffix("").parts)
    if without in parts:
        del parts[len(parts) - 1 - parts[::-1].index(without)]
    return "-".join(parts)
