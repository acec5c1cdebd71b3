"""Draws samples side by side, so that one sees a dataset before training on it."""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import OptionError
from datamat.parallel.logs import get_logger

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    from datamat.features import Feature, Features


__all__ = ["Picture", "draw"]

_TILE_WIDTH, _TILE_HEIGHT, _MARGIN, _LINE = 320, 640, 8, 22
_LEGEND_WIDTH, _SWATCH_WIDTH, _GAP = 160, 20, 4
_INK, _PAPER = (40, 40, 40), 255
_OUTLINES = ((255, 64, 64), (64, 255, 64), (64, 160, 255), (255, 224, 32), (255, 64, 255), (32, 240, 240))
"""Colours of boxes, keypoints and polygons, one for each field of them."""
_MOST_LINES, _LINE_CELLS = 8, 44  # of the fields in words below a picture; a Korean letter takes two cells
_MOST_ITEMS = 6
_FAR = 1e6  # pixels; OpenCV wraps coordinates that are much larger
_logger = get_logger("datamat.readers")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image that a notebook displays.

    Attributes:
        array: pixels, uint8 (height, width, 3), RGB.
    """

    array: np.ndarray

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image as a PNG file."""
        with open(path, "wb") as file:
            file.write(self._repr_png_())

    def _repr_png_(self) -> bytes:
        return codecs.encode_png(self.array)


def draw(samples: Sequence[Mapping[str, Any]], features: Features, columns: int, opacity: float) -> Picture:
    """Return the samples side by side: masks drawn over images, keys and other fields below, then the classes present.

    The first `Image` (where there is none, the first `Video` as four frames, or `Audio` as its waveform) and the first
    `Mask` of the features are drawn, over them boxes, keypoints and polygons, and below them each `Depth`, near pixels
    bright. A mask whose size differs from its image's is not drawn. Labels, texts, numbers and all else that is not
    drawn stand below in words; a dataset without pictures has these alone.

    Args:
        samples: decoded samples, each with its `key`.
        features: schema of the samples, which says what is a picture, a mask or boxes.
        columns: number of samples in a row, at least 1.
        opacity: opacity of the masks, from 0 (invisible) to 1 (the image is hidden).

    Raises:
        OptionError: an argument is out of range.
    """
    depth_names = [name for name, feature in features.items() if feature.preview == "depth"]
    pictures = [name for name, feature in features.items() if feature.preview == "image"]
    image_name = min(pictures, key=lambda name: features[name].target() != "image", default=None)
    outlined = [name for name, feature in features.items() if feature.preview == "outlines"]
    if image_name is None and depth_names:
        image_name = depth_names.pop(0)
    mask_name = next((name for name, feature in features.items() if feature.preview == "mask"), None)
    if columns < 1 or not 0 <= opacity <= 1:
        raise OptionError(
            f"preview: columns={columns}, opacity={opacity}; want at least 1 column and opacity in [0, 1]"
        )
    mask_feature = features[mask_name] if mask_name is not None else None
    tiles, words, seen = [], list[str](), set[int]()
    shown = {image_name, mask_name, *depth_names, *outlined}
    for sample in map(features.nesting.split, samples):
        mask = None if mask_name is None else _displayed(features[mask_name], sample[mask_name])
        image = _image_of(sample, features, image_name, mask)
        if mask is not None and mask.shape != image.shape[:2]:
            mask = None
        depths = [features[name].display(sample[name]) for name in depth_names if sample[name] is not None]
        picture = _painted(image, mask, mask_feature, opacity)
        for number, name in enumerate(outlined):
            if sample[name] is not None:
                lines = features[name].outlines(sample[name], *image.shape[:2])
                _outline(picture, lines, _OUTLINES[number % len(_OUTLINES)])
        caption = [str(sample["key"]), *_captions(sample, features, shown)]
        tiles.append(_tile([picture, *depths], caption))
        words += caption
        if mask is not None:
            seen.update(np.flatnonzero(np.bincount(mask.reshape(-1), minlength=1)).tolist())
    labels = _labels(mask_feature, sorted(seen)) if mask_feature is not None else []
    _warn_of_lost_letters([*words, *(name for name, _ in labels)])
    width = min(columns, max(len(tiles), 1)) * (_TILE_WIDTH + _MARGIN) + _MARGIN
    sheet = [_row(tiles[start : start + columns], width) for start in range(0, len(tiles), columns)]
    if mask_feature is not None:
        sheet.append(_legend(labels, width))
    return Picture(np.concatenate(sheet) if sheet else np.full((1, width, 3), _PAPER, np.uint8))


def _image_of(sample: Mapping[str, Any], features: Features, name: str | None, mask: np.ndarray | None) -> np.ndarray:
    """Return the picture of a sample; white paper under a mask alone, or where the picture is missing."""
    image = None if name is None else _displayed(features[name], sample[name])
    if image is not None:
        return image
    if name is None:
        return np.full((1, _TILE_WIDTH, 1) if mask is None else (*mask.shape, 1), _PAPER, np.uint8)
    return np.full((_TILE_HEIGHT, _TILE_WIDTH, 1), _PAPER, np.uint8)


def _captions(sample: Mapping[str, Any], features: Features, shown: Collection[str | None]) -> list[str]:
    """Return the fields of a sample that are not drawn, in words, as lines that fit below its picture."""
    lines: list[str] = []
    for name, feature in features.items():
        if name != "key" and name not in shown:
            lines += _lines_of(f"{name}: {_in_words(feature, sample[name])}")
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "..."]


def _in_words(feature: Feature, value: Any) -> str:
    names = feature.class_names() or ()
    if value is None:
        return "missing"
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if np.ndim(value) == 0 and isinstance(value, (np.generic, int, float)):
        return _number_in_words(value, names)
    if np.ndim(value) == 1 and isinstance(value, (np.ndarray, list, tuple)):
        items = [one if isinstance(one, str) else _number_in_words(one, names) for one in list(value)[:_MOST_ITEMS]]
        return ", ".join(items) + (f", ... ({len(value):,})" if len(value) > _MOST_ITEMS else "")
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else str(value)


def _number_in_words(value: Any, names: Sequence[str]) -> str:
    if names and isinstance(value, (np.integer, int)) and 0 <= value < len(names):
        return names[int(value)]
    return f"{value:.4g}" if isinstance(value, (np.floating, float)) else str(value)


def _lines_of(text: str) -> list[str]:
    """Return a text as lines that fit below a picture: broken at blanks where there are any."""
    lines, line, width = [], "", 0
    for letter in " ".join(text.split()):
        wide = 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if width + wide > _LINE_CELLS:
            head, blank, tail = line.rpartition(" ")
            lines.append(head if blank else line)
            line = tail if blank else ""
            width = sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in line)
        line, width = line + letter, width + wide
    return [*lines, line]


def _displayed(feature: Feature, value: Any) -> np.ndarray | None:
    """Return a value as it is drawn; None where it is missing."""
    return None if value is None else feature.display(value)


def palette_of(mask: Feature) -> np.ndarray:
    """Return the RGB colour of each class id, uint8 (ids, 3): the declared palette, else distinct colours."""
    ids = np.arange(np.iinfo(mask.value_type()[0]).max + 1, dtype=np.int64)
    # Hues a golden angle apart: neighbouring ids differ clearly, however many classes there are.
    hue = (ids * 0.61803398875) % 1.0 * 6.0
    up = np.clip(np.abs((hue[:, None] + np.array([0.0, 4.0, 2.0])) % 6.0 - 3.0) - 1.0, 0.0, 1.0)
    colours: np.ndarray = np.rint(64 + 176 * up).astype(np.uint8)
    colours[-1] = 0
    declared = mask.class_colours()
    if declared:
        colours[: len(declared)] = np.array(declared, np.uint8)
    return colours


def _painted(image: np.ndarray, mask: np.ndarray | None, feature: Feature | None, opacity: float) -> np.ndarray:
    import cv2

    picture = _in_colours(image)
    if mask is None or feature is None:
        return picture
    painted: np.ndarray = cv2.addWeighted(palette_of(feature)[mask], opacity, picture, 1 - opacity, 0)
    return painted


def _outline(picture: np.ndarray, outlines: Sequence[np.ndarray], colour: tuple[int, int, int]) -> None:
    """Draw points and closed lines, (k, 2) of (x, y) in pixels, into a picture."""
    import cv2

    width = max(round(max(picture.shape[:2]) / _TILE_WIDTH), 1)  # of lines that are seen when the picture is shrunk
    for outline in outlines:
        vertices = np.rint(np.clip(outline, -_FAR, _FAR)).astype(np.int32)
        if len(vertices) == 1:
            cv2.circle(picture, (int(vertices[0, 0]), int(vertices[0, 1])), 2 * width, colour, -1)
        else:
            cv2.polylines(picture, [vertices.reshape(-1, 1, 2)], True, colour, width)


def _in_colours(image: np.ndarray) -> np.ndarray:
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else np.array(image[..., :3])


def _tile(pictures: Sequence[np.ndarray], lines: Sequence[str]) -> np.ndarray:
    texts = [_text([(line, None)], _TILE_WIDTH, _TILE_WIDTH) for line in lines]
    return np.concatenate([*map(_shrunk, pictures), *texts])


def _shrunk(image: np.ndarray) -> np.ndarray:
    import cv2

    picture = _in_colours(image)
    scale = min(_TILE_WIDTH / picture.shape[1], _TILE_HEIGHT / picture.shape[0])
    height, width = (max(round(size * scale), 1) for size in picture.shape[:2])
    tile = np.full((height, _TILE_WIDTH, 3), _PAPER, np.uint8)
    tile[:, :width] = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
    return tile


def _row(tiles: Sequence[np.ndarray], width: int) -> np.ndarray:
    height = max(tile.shape[0] for tile in tiles) + _MARGIN
    row = np.full((height, width, 3), _PAPER, np.uint8)
    for place, tile in enumerate(tiles):
        left = _MARGIN + place * (_TILE_WIDTH + _MARGIN)
        row[_MARGIN : _MARGIN + tile.shape[0], left : left + _TILE_WIDTH] = tile
    return row


def _labels(feature: Feature, ids: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and colour of each class id; an id past the names is its own name."""
    colours = palette_of(feature)
    names = feature.class_names() or ()
    return [(names[number] if number < len(names) else f"{number}", tuple(colours[number].tolist())) for number in ids]


def _legend(labels: Sequence[tuple[str, tuple[int, ...]]], width: int) -> np.ndarray:
    per_line = max(width // _LEGEND_WIDTH, 1)
    lines = [_text(labels[start : start + per_line], width, _LEGEND_WIDTH) for start in range(0, len(labels), per_line)]
    return np.concatenate(lines) if lines else np.full((1, width, 3), _PAPER, np.uint8)


def _text(words: Sequence[tuple[str, Any]], width: int, cell_width: int) -> np.ndarray:
    """Return one line of words in cells of equal width, each with a swatch of its colour before it if it has one."""
    import cv2

    line = np.full((_LINE, width, 3), _PAPER, np.uint8)
    for place, (word, colour) in enumerate(words):
        left = _MARGIN + place * cell_width
        cell = line[:, left : left + cell_width - _GAP]  # clips a long word, which would run into the next one
        if colour is not None:
            cv2.rectangle(cell, (0, 5), (14, 17), colour, -1)
            cell = cell[:, _SWATCH_WIDTH:]
        cv2.putText(cell, _drawable(word), (0, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.42, _INK, 1, cv2.LINE_AA)
    return line


# OpenCV 5 ships a font with Latin, Cyrillic, Chinese, Japanese and Korean letters and draws a line in 0.1 ms, so text
# needs no other package. The fonts that Pillow (Aileron) and matplotlib (DejaVu) ship have no Hangul: with those,
# datamat would have to find a font of the system, which a container often lacks.


def _can_draw(word: str) -> bool:
    import cv2

    return word.isascii() or hasattr(cv2, "FontFace")


def _drawable(word: str) -> str:
    """Return the text as OpenCV takes it: whole, or from OpenCV 4, which draws ASCII only, with question marks."""
    encoding = "utf-8" if _can_draw(word) else "ascii"
    return word.encode(encoding, "replace").decode()


def _warn_of_lost_letters(words: Sequence[str]) -> None:
    lost = [word for word in words if not _can_draw(word)]
    if lost:
        _logger.warning(
            "preview: %d texts hold letters that this OpenCV draws as question marks, %r for one; to see them: "
            "pip install 'opencv-python-headless>=5'",
            len(lost),
            lost[0],
        )
