"""Pictures and masks: what is stored is an encoded file, and a file that needs no change is stored as it is."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from datamat import codecs
from datamat.errors import OptionError, SchemaError
from datamat.features.base import (
    Column,
    Feature,
    Kind,
    Shape,
    array_of,
    check_array,
    checked_int,
    checked_names,
    checked_shape,
    mismatch,
    one_bytes,
    shape_text,
    some,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Image", "Mask"]

_IGNORED_CLASS = 255
"""The class id that segmentation sets use for `not labelled`, and that transforms fill borders with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Feature):
    """A picture: uint8 (height, width, channels), channels in RGB or RGBA order.

    A sample holds it as an array (grey also as (height, width)), or as the `bytes` of a PNG or JPEG file. Bytes that
    every decoder reads alike are stored untouched; others (EXIF-rotated, palette, ...) are decoded and encoded again.

    Args:
        shape: (height, width, channels); None where it varies. channels is 1, 3 or 4.
        encoding: how arrays are stored: "png" (exact) or "jpeg" (smaller; the pixels change a little).
        quality: of JPEG, 1 to 100.

    Example:
        >>> Image(shape=(360, 480, 3), encoding="jpeg").declared()
        'uint8 (360, 480, 3)'
    """

    shape: Shape = (None, None, 3)
    encoding: Literal["png", "jpeg"] = "png"
    quality: int = 95

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Image"))
        if len(self.shape) != 3 or self.shape[2] not in {1, 3, 4}:
            raise SchemaError(f"Image: shape is {self.shape}; want (height, width, channels) with 1, 3 or 4 channels")
        if self.encoding not in {"png", "jpeg"}:
            raise SchemaError(f"Image: encoding is {self.encoding!r}; want 'png' or 'jpeg'")
        if self.encoding == "jpeg" and self.shape[2] == 4:
            raise SchemaError("Image: JPEG holds no alpha channel; declare encoding='png' or three channels")
        object.__setattr__(self, "quality", checked_int(self.quality, "Image: quality"))
        if not 1 <= self.quality <= 100:
            raise SchemaError(f"Image: quality is {self.quality}; want 1 to 100")

    @property
    def channels(self) -> int:
        """Number of channels: 1, 3 or 4."""
        return int(self.shape[2] or 3)

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "bytes"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if isinstance(value, bytes):
            info = codecs.probe(value, whole=True, name=name)
            if codecs.can_keep_image(info, channels=self.channels):
                shape = (info.height, info.width, self.channels)
                check_array(name, self, np.uint8, shape, self.shape, np.dtype(np.uint8))
                return {name: value}
            value = self.prepare(name, value)
        value = array_of(name, self, value)
        if value.ndim == 2 and self.channels == 1:
            value = value[..., None]
        check_array(name, self, value.dtype, value.shape, self.shape, np.dtype(np.uint8))
        if self.encoding == "jpeg":
            return _encoded(name, self, value, functools.partial(codecs.encode_jpeg, quality=self.quality))
        return _encoded(name, self, value, codecs.encode_png)

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        return self.decode_into(name, columns, None)

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> np.ndarray:
        return codecs.decode_image(
            one_bytes(name, columns), channels=self.channels, name=name, out=out, is_whole=are_intact
        )

    def prepare(self, name: str, value: Any) -> Any:
        if isinstance(value, bytes):
            return codecs.decode_image(value, channels=self.channels, name=name)
        return value

    def declared(self) -> str:
        return f"uint8 {shape_text(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Mask(Feature):
    """Class ids per pixel: uint8 (height, width), stored as PNG, always exact.

    A sample holds it as an array, or as the `bytes` of a PNG file: 8-bit grey bytes are stored untouched, palette
    and 1, 2 or 4 bit files are stored as what they mean, the ids.

    Args:
        shape: (height, width); None where it varies.
        names: class names in the order of the ids; an array with an id past them is refused, except 255, which
            segmentation sets keep for `not labelled`. Empty: every id is fine.
        palette: one (red, green, blue) per class, for drawing.

    Example:
        >>> Mask(names=("road", "car")).declared()
        'uint8 (height, width) of 2 classes'
    """

    shape: Shape = (None, None)
    names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Mask"))
        object.__setattr__(self, "names", checked_names(self.names, "Mask"))
        object.__setattr__(self, "palette", _checked_palette(self.palette))
        if len(self.shape) != 2:
            raise SchemaError(f"Mask: shape is {self.shape}; want (height, width)")
        if len(self.names) > 256:
            raise SchemaError(f"Mask: {len(self.names)} class names; uint8 ids go to 255")
        if self.palette and self.names and len(self.palette) < len(self.names):
            raise SchemaError(f"Mask: {len(self.palette)} palette colours for {len(self.names)} class names")

    def columns(self, name: str) -> dict[str, Kind]:
        return {name: "bytes"}

    def encode(self, name: str, value: Any) -> dict[str, Column]:
        if isinstance(value, bytes):
            info = codecs.probe(value, whole=True, name=name)
            if codecs.can_keep_mask(info):
                check_array(name, self, np.uint8, (info.height, info.width), self.shape, np.dtype(np.uint8))
                return {name: value}
            value = self.prepare(name, value)
        value = array_of(name, self, value)
        check_array(name, self, value.dtype, value.shape, self.shape, np.dtype(np.uint8))
        self._check_ids(name, value)
        return _encoded(name, self, value, codecs.encode_png)

    def decode(self, name: str, columns: Mapping[str, Column]) -> np.ndarray:
        return self.decode_into(name, columns, None)

    def decode_into(
        self, name: str, columns: Mapping[str, Column], out: np.ndarray | None, *, are_intact: bool = False
    ) -> np.ndarray:
        return codecs.decode_mask(one_bytes(name, columns), name=name, out=out, is_whole=are_intact)

    def prepare(self, name: str, value: Any) -> Any:
        return codecs.decode_mask(value, name=name) if isinstance(value, bytes) else value

    def declared(self) -> str:
        shape = "(height, width)" if self.shape == (None, None) else shape_text(self.shape)
        return f"uint8 {shape}" + (f" of {len(self.names)} classes" if self.names else "")

    def _check_ids(self, name: str, mask: np.ndarray) -> None:
        if not self.names or mask.size == 0 or int(mask.max()) < len(self.names):
            return
        wrong = (mask >= len(self.names)) & (mask != _IGNORED_CLASS)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise SchemaError(
                f"field {name!r} is declared {self.declared()} but pixel (row {row}, column {column}) holds class id "
                f"{int(mask[row, column])}; declare the class, or map the id in read (255 is free for `not labelled`)"
            )


def _encoded(
    name: str, feature: Feature, pixels: np.ndarray, encode: Callable[[np.ndarray], bytes]
) -> dict[str, Column]:
    """Return the column of an array; refuse what cannot be stored, or could not be read again."""
    found = f"uint8 {shape_text(pixels.shape)}"
    if pixels.shape[0] * pixels.shape[1] > codecs.MAX_PIXELS:
        remedy = f"readers take {codecs.MAX_PIXELS} pixels at most: tile it or shrink it in read"
        raise mismatch(name, feature, found, remedy)
    try:
        return {name: encode(pixels)}
    except OptionError as error:
        raise mismatch(name, feature, found, str(error)) from error


def _checked_palette(palette: Any) -> tuple[tuple[int, int, int], ...]:
    try:
        colours = tuple((operator.index(r), operator.index(g), operator.index(b)) for r, g, b in palette)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"Mask: palette is {palette!r}; want one (red, green, blue) per class") from error
    if len(colours) > 256 or any(not 0 <= level <= 255 for colour in colours for level in colour):
        raise SchemaError(f"Mask: palette is {some(colours)}; want levels from 0 to 255, and at most 256 colours")
    return colours
