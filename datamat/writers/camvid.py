"""CamVid: street scenes with a mask of 12 classes, in the layout of the SegNet tutorial.

    CamVid/
        train.txt               /SegNet/CamVid/train/0001TP_006690.png /SegNet/CamVid/trainannot/0001TP_006690.png
        train/0001TP_006690.png
        trainannot/0001TP_006690.png
        val.txt  val/  valannot/  test.txt  test/  testannot/

    Materializer("camvid", source="CamVid", output="out/camvid").run()

The list files decide which pairs are used; the prefix of their paths need not exist here. Without any list, every
folder `SPLIT/` is paired with `SPLITannot/` by file name. The source may also be the folder that holds `CamVid/`.

The layout, names and ids come from the SegNet tutorial of Badrinarayanan, Kendall and Cipolla; the colours from CamVid,
Brostow, Fauqueur and Cipolla, 2009.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from datamat.codecs import probe, read_file
from datamat.codecs.files import PICTURES
from datamat.errors import SchemaError, SourceError
from datamat.features import Features, Image, Mask
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import Index, pair_files
from datamat.writers.paths import files_below

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_ANNOTATIONS = "annot"

_CLASSES = {
    "sky": (128, 128, 128),
    "building": (128, 0, 0),
    "pole": (192, 192, 128),
    "road": (128, 64, 128),
    "pavement": (60, 40, 222),
    "tree": (128, 128, 0),
    "sign_symbol": (192, 128, 128),
    "fence": (64, 64, 128),
    "car": (64, 0, 128),
    "pedestrian": (64, 64, 0),
    "bicyclist": (0, 128, 192),
    "unlabelled": (0, 0, 0),
}


class CamVidWriter(DatasetWriter):
    """Reads image and mask of each pair; both keep the bytes of their files where nothing changes them.

    Example:
        >>> CamVidWriter().features["mask"].names[:3]
        ('sky', 'building', 'pole')
    """

    name = "camvid"
    features = Features(
        {
            "image": Image(encoding="jpeg", quality=95),
            "mask": Mask(names=tuple(_CLASSES), palette=tuple(_CLASSES.values())),
        }
    )
    file_fields = ("image", "mask")

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per pair, in the order of the lists or of the file names.

        Raises:
            SourceError: the source has neither lists nor pairs of folders; a list is empty or has a line that is not a
                pair; or a folder holds an image without an annotation, or an annotation without an image.
        """
        root = pathlib.Path(source)
        folder = _data_folder(root)
        lists = _lists(folder)
        rows = list(_listed(folder, lists) if lists else _paired(folder))
        if folder == root:
            return rows
        inside = str(folder.relative_to(root))
        return [
            row._replace(fields={name: os.path.join(inside, str(path)) for name, path in row.fields.items()})
            for row in rows
        ]

    def read(self, row: IndexRow) -> Sample:
        sample = {name: read_file(str(row.fields[name])) for name in ("image", "mask")}
        (image, mask) = (probe(data, whole=True, name=str(row.fields[name])) for name, data in sample.items())
        if (image.width, image.height, image.orientation) != (mask.width, mask.height, mask.orientation):
            raise SchemaError(
                f"{row.fields['mask']!r}: the mask has {mask.width} x {mask.height} pixels, its image has "
                f"{image.width} x {image.height}, or only one of them is rotated by EXIF; make them agree"
            )
        return sample


def _data_folder(root: pathlib.Path) -> pathlib.Path:
    """Return the folder that holds the lists or the pairs of folders: the source, or `CamVid/` in it."""
    for folder in (root, root / "CamVid"):
        if folder.is_dir() and (_lists(folder) or any(folder.glob(f"*{_ANNOTATIONS}/"))):
            return folder
    raise SourceError(
        f"{root}: found neither list files (train.txt) nor folders (train/ with train{_ANNOTATIONS}/), here or in "
        "CamVid/; give the folder that holds them as source"
    )


def _lists(folder: pathlib.Path) -> dict[str, str]:
    """Return the list files by split: text files that are named like a split, or that begin with an image path."""
    known = {"train": 0, "val": 1, "test": 2}
    found = [path for path in folder.glob("*.txt") if path.stem in known or _begins_with_picture(path)]
    return {path.stem: path.name for path in sorted(found, key=lambda path: (known.get(path.stem, 3), path.name))}


def _begins_with_picture(path: pathlib.Path) -> bool:
    if not path.is_file():  # opening a pipe would wait forever
        return False
    with path.open(encoding="utf-8", errors="replace") as lines:
        line = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    first = line.split("\t" if "\t" in line else None)[:1]
    return bool(first) and first[0].strip().lower().endswith(PICTURES)


def _listed(folder: pathlib.Path, lists: Mapping[str, str]) -> Iterator[IndexRow]:
    for split, name in lists.items():
        rows = list(Index.from_lists(folder, {split: name}))
        if not rows:
            raise SourceError(f"{folder / name} lists no pairs; fill it in, or remove it")
        yield from rows


def _paired(folder: pathlib.Path) -> Iterator[IndexRow]:
    pictures: dict[str, list[pathlib.PurePosixPath]] = {}
    for path in files_below(folder, "*/*", PICTURES):
        pictures.setdefault(path.parts[0], []).append(path)
    for split in sorted({name.removesuffix(_ANNOTATIONS) for name in pictures}):
        for image, mask in pair_files(pictures.get(split, []), pictures.get(split + _ANNOTATIONS, [])):
            yield IndexRow(image.stem, split, {"image": str(image), "mask": str(mask)}, str(image))
