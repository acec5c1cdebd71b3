"""Pictures of samples, to look at a data set before training on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat import codecs
from datamat.errors import OptionError
from datamat.features import Image, Mask

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from datamat.features import Features

__all__ = ["Picture", "draw"]

_TILE_WIDTH, _TILE_HEIGHT, _MARGIN, _LINE = 320, 640, 8, 22
_INK, _PAPER = (40, 40, 40), 255


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture that shows itself in a notebook.

    Attributes:
        array: uint8 (height, width, 3), RGB.
    """

    array: np.ndarray

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a PNG file."""
        with open(path, "wb") as file:
            file.write(self._repr_png_())

    def _repr_png_(self) -> bytes:
        return codecs.encode_png(self.array)


def draw(samples: Sequence[Mapping[str, Any]], features: Features, columns: int, opacity: float) -> Picture:
    """Return the samples side by side, masks drawn over images, keys below, and a legend of the classes seen.

    The first image and the first mask of the features are drawn; a mask of another size than its image is left out.

    Args:
        samples: decoded.
        features: their schema.
        columns: pictures in a row.
        opacity: of the masks, 0 to 1.

    Raises:
        OptionError: the features hold no image, or an argument makes no sense.
    """
    image_name = next((name for name, feature in features.items() if isinstance(feature, Image)), None)
    mask_name = next((name for name, feature in features.items() if isinstance(feature, Mask)), None)
    if image_name is None:
        raise OptionError(f"preview needs an Image among the features; there are {', '.join(features)}")
    if columns < 1 or not 0 <= opacity <= 1:
        raise OptionError(
            f"preview: columns={columns}, opacity={opacity}; want at least 1 column and opacity in [0, 1]"
        )
    feature = features[mask_name] if mask_name is not None else None
    mask_feature = feature if isinstance(feature, Mask) else None
    tiles, seen = [], set[int]()
    for sample in samples:
        mask = sample[mask_name] if mask_name is not None else None
        if mask is not None and mask.shape != sample[image_name].shape[:2]:
            mask = None
        tiles.append(_tile(sample[image_name], mask, mask_feature, str(sample["key"]), opacity))
        if mask is not None:
            seen.update(np.flatnonzero(np.bincount(mask.reshape(-1), minlength=1)).tolist())
    width = min(columns, max(len(tiles), 1)) * (_TILE_WIDTH + _MARGIN) + _MARGIN
    sheet = [_row(tiles[start : start + columns], width) for start in range(0, len(tiles), columns)]
    if mask_feature is not None:
        sheet.append(_legend(mask_feature, sorted(seen), width))
    return Picture(np.concatenate(sheet) if sheet else np.full((1, width, 3), _PAPER, np.uint8))


def palette_of(mask: Mask) -> np.ndarray:
    """Return uint8 (256, 3): the colour of each class id, made up where the feature declares none."""
    ids = np.arange(256, dtype=np.int64)
    # Hues a golden angle apart are far from their neighbours, however many there are.
    hue = (ids * 0.61803398875) % 1.0 * 6.0
    up = np.clip(np.abs((hue[:, None] + np.array([0.0, 4.0, 2.0])) % 6.0 - 3.0) - 1.0, 0.0, 1.0)
    colours: np.ndarray = np.rint(64 + 176 * up).astype(np.uint8)
    colours[255] = 0
    if mask.palette:
        colours[: len(mask.palette)] = np.array(mask.palette, np.uint8)
    return colours


def _tile(image: np.ndarray, mask: np.ndarray | None, feature: Mask | None, key: str, opacity: float) -> np.ndarray:
    import cv2

    picture = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else np.ascontiguousarray(image[..., :3])
    if mask is not None and feature is not None:
        picture = cv2.addWeighted(palette_of(feature)[mask], opacity, picture, 1 - opacity, 0)
    scale = min(_TILE_WIDTH / picture.shape[1], _TILE_HEIGHT / picture.shape[0])
    height, width = (max(round(size * scale), 1) for size in picture.shape[:2])
    tile = np.full((height, _TILE_WIDTH, 3), _PAPER, np.uint8)
    tile[:, :width] = cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)
    return np.concatenate([tile, _text([(key, None)], _TILE_WIDTH)])


def _row(tiles: Sequence[np.ndarray], width: int) -> np.ndarray:
    height = max(tile.shape[0] for tile in tiles) + _MARGIN
    row = np.full((height, width, 3), _PAPER, np.uint8)
    for place, tile in enumerate(tiles):
        left = _MARGIN + place * (_TILE_WIDTH + _MARGIN)
        row[_MARGIN : _MARGIN + tile.shape[0], left : left + _TILE_WIDTH] = tile
    return row


def _legend(feature: Mask, ids: Sequence[int], width: int) -> np.ndarray:
    colours = palette_of(feature)
    named = [
        (feature.names[number] if number < len(feature.names) else f"{number}", tuple(colours[number].tolist()))
        for number in ids
    ]
    per_line = max(width // 160, 1)
    lines = [_text(named[start : start + per_line], width, step=160) for start in range(0, len(named), per_line)]
    return np.concatenate(lines) if lines else np.full((1, width, 3), _PAPER, np.uint8)


def _text(words: Sequence[tuple[str, Any]], width: int, *, step: int = 160) -> np.ndarray:
    """Return one line of words, each with a swatch of its colour before it if it has one."""
    import cv2

    line = np.full((_LINE, width, 3), _PAPER, np.uint8)
    for place, (word, colour) in enumerate(words):
        left = _MARGIN + place * step
        if colour is not None:
            cv2.rectangle(line, (left, 5), (left + 14, 17), colour, -1)
            left += 20
        # cv2's fonts draw ASCII only
        plain = word.encode("ascii", "replace").decode()
        cv2.putText(line, plain, (left, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.42, _INK, 1, cv2.LINE_AA)
    return line
