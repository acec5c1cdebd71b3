"""Pictures with labelled objects, in the layout of YOLO: Ultralytics, Roboflow's exports, Darknet, Label Studio.

    SET/
        data.yaml                   train: images/train, val: ..., names: [person, dog]     any name that ends in .yaml
        images/train/0001.jpg       or train/images/0001.jpg; or a text file that lists the images of a split
        labels/train/0001.txt       a line for each object, in fractions of width and height:
                                        CLASS x_centre y_centre width height
                                        CLASS x1 y1 x2 y2 x3 y3 ...                 its outline, for segmentation
                                        CLASS x_centre y_centre width height x1 y1 [visibility] ...     with `kpt_shape`

    Materializer("yolo", source="SET", output="out/set").run()

Without a YAML file, `classes.txt` (or `obj.names`) names the classes, a line each, and each folder in `images/` is a
split. An image without a file of labels has no objects, as YOLO reads it. Images lie in the source, wherever the YAML
file believes it to be. `writers/detection.py` says what a sample has; `YoloWriter(segments=True)` reads the outlines as
well. The box of an outline is its extent.

Source of the format: https://docs.ultralytics.com/datasets/detect/, .../segment/, .../pose/.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datamat.codecs import read_file
from datamat.codecs.files import PICTURES
from datamat.errors import SourceError
from datamat.features import Keypoints
from datamat.sources.rows import IndexRow
from datamat.writers.detection import DetectionWriter, Objects, Picture, clipped, extent, key_of
from datamat.writers.paths import files_below

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""

_SPLITS = ("train", "val", "valid", "test", "minival")
_NAMES = ("classes.txt", "obj.names")
_WANTED = "want CLASS x_centre y_centre width height, or CLASS x1 y1 x2 y2 x3 y3 ..., in fractions of the image"


class YoloWriter(DetectionWriter):
    """Reads each image with the box and label of each object; images keep their files' bytes.

    Args:
        options: `names`, `segments` and `missing` of `DetectionWriter`. With missing="skip", images without a file of
            labels are left out.
    """

    name = "yolo"

    def bind(self, source: Any) -> None:
        """Read the YAML file.

        Raises:
            SourceError: there is none, and no list of classes; or it does not say what is needed.
        """
        self._described = _described(pathlib.Path(source))
        super().bind(source)

    def class_names(self, root: pathlib.Path) -> list[str]:
        names = self._described.get("names")
        if isinstance(names, Mapping):
            names = [names[number] for number in sorted(names)] if sorted(names) == [*range(len(names))] else None
        if not isinstance(names, list) or not names:
            raise SourceError(
                f"{root}: its YAML file has names: {self._described.get('names')!r}; want a list of the names of the "
                "classes, or a name for each number from 0; or pass them, as in YoloWriter(names=['person', 'dog'])"
            )
        return [str(name) for name in names]

    def keypoints(self, root: pathlib.Path) -> Keypoints | None:
        shape = self._described.get("kpt_shape")
        if shape is None:
            return None
        if not isinstance(shape, list) or len(shape) != 2 or shape[1] not in {2, 3}:
            raise SourceError(f"{root}: its YAML file has kpt_shape: {shape!r}; want [points, 2 or 3]")
        self._num_points = shape[0] * shape[1]
        return Keypoints((None, shape[0], shape[1]))

    def pictures(self, root: pathlib.Path) -> Iterator[Picture]:
        """Yield the images of each split, sorted, or in the order of its list.

        Raises:
            SourceError: there is no such folder or list, or it has no images.
        """
        for split, entries in self._splits(root).items():
            found = [image for entry in entries for image in self._images(root, entry, split)]
            if not found:
                raise SourceError(f"{root}: the split {split!r} ({', '.join(entries)}) holds no images; correct it")
            for image in found:
                labels = _labels_of(image)
                is_there = (root / labels).is_file()
                key = key_of(image, without="images")
                key = key if split in {None, *key.split("-")} else f"{split}-{key}"
                yield Picture(key, split, image, labels if is_there else None)

    def objects(self, row: IndexRow, size: tuple[int, int]) -> Objects:
        found, path = Objects(), row.fields["labels"]
        lines = [] if path is None else read_file(str(path)).decode("utf-8-sig", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._add(found, line, f"{path}, line {number}", size)
        return found

    def _add(self, found: Objects, line: str, place: str, size: tuple[int, int]) -> None:
        height, width = size
        try:
            label, *numbers = map(float, line.split())
        except ValueError:
            label, numbers = -1.0, []
        rest = numbers[4:] if "objects/keypoints" in self.features else []
        numbers = numbers[: len(numbers) - len(rest)]
        is_box, is_outline = len(numbers) == 4, len(numbers) >= 6 and len(numbers) % 2 == 0
        if not (is_box or is_outline) or ("objects/keypoints" in self.features and len(rest) != self._num_points):
            raise SourceError(f"{place}: {line.strip()[:80]!r}; {_WANTED}; correct the line, or drop it")
        if label not in range(len(self.classes)):
            raise SourceError(
                f"{place} is of the class {label:g}; want one from 0 to {len(self.classes) - 1}; correct the names, "
                "or the line"
            )
        points = [value * size[1 - at % 2] for at, value in enumerate(numbers)]
        if is_outline:
            found.outlines.append((len(found.boxes), points))
            box = extent(points)
        else:
            x, y, w, h = points
            box = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        found.boxes.append(clipped(box, size, place, line.strip()[:80], _WANTED.removeprefix("want ")))
        found.labels.append(int(label))
        if rest:
            each = len(rest) // self._described["kpt_shape"][0]
            found.keypoints.append(
                [
                    [rest[at] * width, rest[at + 1] * height, *rest[at + 2 : at + each]]
                    for at in range(0, len(rest), each)
                ]
            )

    def _splits(self, root: pathlib.Path) -> dict[str | None, list[str]]:
        """Return the folders and lists of each split."""
        if "is_listed" in self._described:
            folders = sorted(path.name for path in (root / "images").glob("*/"))
            return {name: [f"images/{name}"] for name in folders} or {None: ["images"]}
        named = {split: self._described[split] for split in _SPLITS if self._described.get(split)}
        if not named:
            raise SourceError(f"{root}: its YAML file names no train, val or test; add the folder of each")
        return {split: list(map(str, one if isinstance(one, list) else [one])) for split, one in named.items()}

    def _images(self, root: pathlib.Path, entry: str, split: str | None) -> Iterator[str]:
        place = _place(root, str(self._described.get("path") or ""), entry)
        if place is None:
            raise SourceError(
                f"{root}: {split}: {entry!r} is neither a folder nor a list in it; correct the YAML file, or give the "
                "folder "
                "that its paths begin from"
            )
        if (root / place).is_dir():
            for path in files_below(root / place, suffixes=PICTURES):
                yield str(place / path)
            return
        for line in read_file(root / place).decode("utf-8-sig").splitlines():
            if line.strip():
                found = _place(root, str(place.parent), line.strip()) or _place(root, "", line.strip())
                yield str(found or pathlib.PurePosixPath(line.strip().removeprefix("./")))


def _described(root: pathlib.Path) -> dict[str, Any]:
    """Return what the YAML file of a source says, or the list of classes where there is none."""
    files = [path for path in (root / "data.yaml", root / "data.yml") if path.is_file()]
    files = files or sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    if len(files) == 1:
        return _parsed(files[0])
    lists = [root / name for name in _NAMES if (root / name).is_file()]
    if files or not lists:
        found = f"several YAML files ({', '.join(path.name for path in files)})" if files else "no data.yaml"
        raise SourceError(f"{root}: found {found}, and no classes.txt; want one that names folders and classes")
    names = [line.strip() for line in read_file(lists[0]).decode("utf-8-sig").splitlines() if line.strip()]
    return {"names": names, "is_listed": True}


def _parsed(path: pathlib.Path) -> dict[str, Any]:
    import yaml  # Albumentations needs it

    try:
        found = yaml.safe_load(read_file(path))
    except yaml.YAMLError as error:
        raise SourceError(f"{path} is not YAML: {error}; restore it") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds a {type(found).__name__}; want names: and train:, val: or test:")
    return found


def _place(root: pathlib.Path, base: str, entry: str) -> pathlib.PurePosixPath | None:
    """Return the path below the source that an entry means, wherever its writer believed the source to be.

    Roboflow writes `../train/images` for what lies beside the YAML file, and others the path on their own machine.
    """
    parts = [part for part in pathlib.PurePosixPath(entry.replace("\\", "/")).parts if part not in {".", "..", "/"}]
    inner = [part for part in pathlib.PurePosixPath(base).parts if part not in {".", "..", "/"}]
    tries: list[Sequence[str]] = [[*inner, *parts], *(parts[number:] for number in range(len(parts)))]
    found = (pathlib.PurePosixPath(*one) for one in tries)
    return next((one for one in found if os.path.exists(root / one)), None)


def _labels_of(image: str) -> str:
    """Return the path of the labels of an image: `labels` instead of the last `images` in its path."""
    parts = [*pathlib.PurePosixPath(image).with_suffix(".txt").parts]
    if "images" in parts[:-1]:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return "/".join(parts)
