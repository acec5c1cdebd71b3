"""Cityscapes: street scenes with a mask of 34 classes, or of the 19 that are evaluated.

    CITYSCAPES/
        leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png       val/, test/
        gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png        or ..._labelTrainIds.png

    Materializer("cityscapes", source="CITYSCAPES", output="out/cityscapes").run()

The key is the name of the image without `_leftImg8bit`. Images of the split `test` have masks without classes, as
published. The licence plate, which has the id -1, is 255 in the files, and stays so.

Names, ids and colours: https://github.com/mcordts/cityscapesScripts, cityscapesscripts/helpers/labels.py.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any, Literal

from datamat.codecs import read_file
from datamat.errors import OptionError, SourceError
from datamat.features import Features, Image, Mask
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import pair_files
from datamat.writers.paths import files_below

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_CLASSES = {
    "unlabeled": (0, 0, 0),
    "ego vehicle": (0, 0, 0),
    "rectification border": (0, 0, 0),
    "out of roi": (0, 0, 0),
    "static": (0, 0, 0),
    "dynamic": (111, 74, 0),
    "ground": (81, 0, 81),
    "road": (128, 64, 128),
    "sidewalk": (244, 35, 232),
    "parking": (250, 170, 160),
    "rail track": (230, 150, 140),
    "building": (70, 70, 70),
    "wall": (102, 102, 156),
    "fence": (190, 153, 153),
    "guard rail": (180, 165, 180),
    "bridge": (150, 100, 100),
    "tunnel": (150, 120, 90),
    "pole": (153, 153, 153),
    "polegroup": (153, 153, 153),
    "traffic light": (250, 170, 30),
    "traffic sign": (220, 220, 0),
    "vegetation": (107, 142, 35),
    "terrain": (152, 251, 152),
    "sky": (70, 130, 180),
    "person": (220, 20, 60),
    "rider": (255, 0, 0),
    "car": (0, 0, 142),
    "truck": (0, 0, 70),
    "bus": (0, 60, 100),
    "caravan": (0, 0, 90),
    "trailer": (0, 0, 110),
    "train": (0, 80, 100),
    "motorcycle": (0, 0, 230),
    "bicycle": (119, 11, 32),
}
_NOT_EVALUATED = {"parking", "rail track", "guard rail", "bridge", "tunnel", "polegroup", "caravan", "trailer"}
_EVALUATED = [name for name in [*_CLASSES][7:] if name not in _NOT_EVALUATED]


class CityscapesWriter(DatasetWriter):
    """Reads image and mask of each pair; both keep the bytes of their files where nothing changes them.

    Args:
        labels: "labelIds" for the 34 classes as annotated, "labelTrainIds" for the 19 that are evaluated.

    Example:
        >>> CityscapesWriter(labels="labelTrainIds").features["mask"].names[:3]
        ('road', 'sidewalk', 'building')
    """

    name = "cityscapes"
    file_fields = ("image", "mask")

    def __init__(self, *, labels: Literal["labelIds", "labelTrainIds"] = "labelIds") -> None:
        if labels not in {"labelIds", "labelTrainIds"}:
            raise OptionError(f"CityscapesWriter: labels is {labels!r}; want 'labelIds' or 'labelTrainIds'")
        self.labels = labels
        names = tuple(_CLASSES) if labels == "labelIds" else tuple(_EVALUATED)
        mask = Mask(names=names, palette=tuple(_CLASSES[name] for name in names))
        self.features = Features({"image": Image(), "mask": mask})

    def index(self, source: Any) -> Iterator[IndexRow]:
        """Return one row for each pair, by split, city and frame.

        Raises:
            SourceError: the source has no such folders, or an image or a mask has no partner.
        """
        root = pathlib.Path(source)
        if not (root / "leftImg8bit").is_dir() or not (root / "gtFine").is_dir():
            raise SourceError(f"{root}: found no leftImg8bit/ with gtFine/; give the folder that holds both")
        images = files_below(root, "leftImg8bit/*/*/*_leftImg8bit.png")
        masks = files_below(root, f"gtFine/*/*/*_gtFine_{self.labels}.png")
        if not images:
            raise SourceError(f"{root}/leftImg8bit holds no SPLIT/CITY/*_leftImg8bit.png; unpack them there")
        for image, mask in pair_files(
            images, masks, match=lambda path: path.stem.rpartition("_")[0].removesuffix("_gtFine")
        ):
            key = image.stem.removesuffix("_leftImg8bit")
            yield IndexRow(key, image.parts[1], {"image": str(image), "mask": str(mask)}, str(image))

    def read(self, row: IndexRow) -> Sample:
        return {name: read_file(str(row.fields[name])) for name in ("image", "mask")}
