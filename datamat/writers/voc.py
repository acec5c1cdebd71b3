"""Pictures with labelled boxes, in the layout of Pascal VOC, as LabelImg and CVAT write it.

    VOC2012/                        or the folder that holds VOC2007/ and VOC2012/, or VOCdevkit/ with them
        Annotations/2007_000027.xml
        JPEGImages/2007_000027.jpg
        ImageSets/Main/train.txt    val.txt, test.txt: names, a line each; without them, every file of Annotations

    SET/
        train/0001.xml              files beside their pictures: the split is the folder
        train/0001.jpg

    Materializer("voc", source="VOC2012", output="out/voc").run()

The classes are the sorted names that occur, or those of `VocWriter(names=...)`. Corners are taken as they are, as TFDS
and torchvision do: VOC counts pixels from 1, most tools from 0. `writers/detection.py` says what a sample has.

Source of the format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from datamat.codecs import read_file
from datamat.codecs.files import PICTURES
from datamat.codecs.xml import read_xml
from datamat.errors import SourceError
from datamat.sources.rows import IndexRow
from datamat.writers.detection import DetectionWriter, Objects, Picture, clipped, key_of
from datamat.writers.paths import files_below

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_SPLITS = ("train", "val", "test")


class VocWriter(DetectionWriter):
    """Reads each picture with the box, the label and two flags of each object; pictures keep their files' bytes.

    Args:
        options: `names` and `missing` of `DetectionWriter`.
    """

    name = "voc"
    flags: ClassVar[Mapping[str, tuple[str, str]]] = {
        "difficult": ("plain", "difficult"),
        "truncated": ("whole", "truncated"),
    }

    def class_names(self, root: pathlib.Path) -> list[str]:
        names = {
            found.findtext("name", "").strip()
            for picture in self.pictures(root)
            if picture.labels is not None and (root / picture.labels).is_file()
            for found in _parsed(str(root / picture.labels)).findall("object")
        }
        return sorted(names)

    def pictures(self, root: pathlib.Path) -> Iterator[Picture]:
        """Yield the pictures by split, as its list has them, or sorted.

        Raises:
            SourceError: there are no annotations.
        """
        folders = [root, *sorted(root.glob("VOC*/")), *sorted(root.glob("VOCdevkit/*/"))]
        folders = [folder for folder in folders if (folder / "Annotations").is_dir()]
        for folder in folders:
            inside = folder.relative_to(root)
            before = f"{folder.name}-" if len(folders) > 1 else ""
            for split, name in _names(folder):
                labels = inside / "Annotations" / f"{name}.xml"
                image = _picture(root, labels, inside / "JPEGImages")
                yield Picture(f"{before}{name}".replace("/", "-"), split, image, labels.as_posix())
        if folders:
            return
        files = files_below(root, suffixes=(".xml",))
        if not files:
            raise SourceError(f"{root}: found no Annotations/*.xml, and no *.xml next to pictures; give VOC's folder")
        for file in files:
            split = file.parts[0] if len(file.parts) > 1 else None
            image = _picture(root, pathlib.Path(file), pathlib.Path(file).parent)
            yield Picture(key_of(file), split, image, str(file))

    def objects(self, row: IndexRow, size: tuple[int, int]) -> Objects:
        path = str(row.fields["labels"])
        tree = _parsed(path)
        found = Objects(flags={"difficult": [], "truncated": []})
        found.size = (_number(tree, "size/height", path), _number(tree, "size/width", path))
        for number, each in enumerate(tree.findall("object")):
            place = f"{path}, object {number}"
            texts = [each.findtext(f"bndbox/{corner}", "") for corner in _CORNERS]
            try:
                box = [float(text) for text in texts]
            except ValueError:
                raise SourceError(
                    f"{place} has the box {texts}; want {', '.join(_CORNERS)}; correct it, or drop it"
                ) from None
            found.boxes.append(clipped(box, size, place, texts))
            found.labels.append(self.label(each.findtext("name", "").strip(), place))
            for flag, levels in found.flags.items():
                levels.append(int(_number(each, flag, place) != 0))
        return found


def _names(folder: pathlib.Path) -> Iterator[tuple[str | None, str]]:
    """Yield split and name of each annotated picture."""
    lists = {split: folder / "ImageSets" / "Main" / f"{split}.txt" for split in _SPLITS}
    there = {split: path for split, path in lists.items() if path.is_file()}
    for split, path in there.items():
        for line in read_file(path).decode("utf-8-sig").splitlines():
            if line.strip():
                yield split, line.split()[0]
    if not there:
        for file in files_below(folder / "Annotations", suffixes=(".xml",)):
            yield None, str(file.with_suffix(""))


def _picture(root: pathlib.Path, labels: pathlib.Path, folder: pathlib.Path) -> str:
    """Return the path of the picture of an annotation: of its name, else the one that it says."""
    stem = folder / labels.stem
    found = next((path for end in PICTURES if (root / (path := stem.with_name(stem.name + end))).is_file()), None)
    if found is None and (root / labels).is_file():
        name = pathlib.PurePosixPath(_parsed(str(root / labels)).findtext("filename", "").replace("\\", "/")).name
        found = folder / name if name and (root / folder / name).is_file() else None
    return (found or stem.with_name(stem.name + ".jpg")).as_posix()


def _parsed(path: str) -> Element:
    found = read_xml(path)
    if found.tag != "annotation":
        raise SourceError(f"{path} holds <{found.tag}>; want <annotation>, as VOC has it")
    return found


def _number(tree: Element, name: str, path: str) -> int:
    text: Any = tree.findtext(name) or "0"
    try:
        return round(float(text))
    except ValueError:
        raise SourceError(f"{path}: {name} is {text!r}; want a number") from None
