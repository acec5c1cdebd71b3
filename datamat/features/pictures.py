"""Images, masks, depth maps and videos, stored as encoded files, untouched where they fit; and points in them."""

from __future__ import annotations

import bisect
import contextlib
import fractions
import functools
import importlib.util
import io
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from datamat import codecs
from datamat.errors import InputError, MissingDependencyError, OptionError, SchemaError, count_of
from datamat.features.base import (
    ArrowType,
    Column,
    ColumnBlock,
    Feature,
    RaggedColumn,
    Shape,
    array_of,
    check_array,
    checked_dtype,
    checked_int,
    checked_names,
    checked_shape,
    join_names,
    mismatch,
    one_bytes,
    set_positive,
    shape_text,
)
from datamat.features.protocols import Geometry, Preview, Target
from datamat.features.registry import built_in
from datamat.features.statistics import Counts, FieldStatistics, Numbers
from datamat.features.values import Tensor, side_by_side
from datamat.values import frozen

__all__ = [
    "Depth",
    "Image",
    "Keypoints",
    "Mask",
    "PictureFile",
    "Polygons",
    "Video",
    "picture_extension",
    "stretch_of_video",
    "video_extension",
]

_JPEG = b"\xff\xd8"
_PNG = b"\x89PNG"
_PNG_HEAD_BYTES = 33  # signature and IHDR, which has the size
_MOST_IDS = {"uint8": 256, "uint16": 65536}
"""Number of class ids of each dtype of masks; segmentation datasets use the last for `not labelled`."""


class PictureFile(Feature, Geometry, Preview):
    """What pictures of all kinds have in common: one file each, decoded in Python."""

    __slots__ = ()

    dtype: str
    shape: Shape

    @property
    def fits_pillow(self) -> bool:
        """Whether Pillow keeps all bits of the file: of 16-bit colours it keeps the higher eight, and no floats."""
        return self.dtype == "uint8" or (self.dtype == "uint16" and self.shape[2:] in {(), (1,)})

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary")

    def value_type(self) -> tuple[str, Shape]:
        return self.dtype, self.shape

    def decode(self, column: Column) -> np.ndarray:
        found: np.ndarray = self.decode_into(column, None)
        return found

    def prepare(self, value: Any) -> Any:
        return self.decode(value) if isinstance(value, bytes) else value

    def encoded_value(self, column: Column) -> Any:
        return bytes(one_bytes(column))

    def packages(self, *, drawn: bool) -> frozenset[str]:
        del drawn  # every library decodes a PNG to the same numbers
        return codecs.PNG_ENCODER

    def observe(self, column: Any) -> FieldStatistics:
        height, width = self.shape[:2]
        if height is None or width is None:
            infos = [codecs.probe(data) for data in column]
            sizes = np.array([(info.height, info.width) for info in infos], np.int64).reshape(-1, 2)
        else:
            sizes = np.full((len(column), 2), (height, width), np.int64)
        return {"height": Numbers.of(sizes[:, 0]), "width": Numbers.of(sizes[:, 1])}

    def observed_bytes(self, data: bytes) -> bytes:
        """Return as much of a stored file as `observe` needs, which a run holds until it has enough records."""
        if None not in self.shape[:2]:
            return b""
        return data[:_PNG_HEAD_BYTES] if data.startswith(_PNG) else data

    def is_ragged(self) -> bool:
        return False  # most datasets have pictures of one size, which are one array


@frozen()
class Image(PictureFile):
    """An image: uint8 or uint16 (height, width, channels), channels in RGB or RGBA order.

    A sample holds it as an array (greyscale also as (height, width)), or as the `bytes` of a PNG, JPEG, WebP, BMP or
    TIFF file. PNG and JPEG files that all decoders read alike are stored untouched; others (EXIF-rotated, palette,
    TIFF, ...) are decoded and re-encoded. Files with more channels or bits than declared are refused: nothing is
    dropped or scaled. TIFF needs the extra `tiff`.

    Args:
        shape: (height, width, channels) with 1 channel (greyscale), 2 (greyscale and alpha, or any two), 3 or 4; None
            for a size that varies.
        encoding: encoding of arrays: "png" (exact) or "jpeg" (smaller; pixels change slightly), which holds 8 bits and
            1 or 3 channels.
        quality: JPEG quality, 1 to 100.
        dtype: "uint8", or "uint16" for 16-bit files: microscopes, X-rays, satellites.

    Example:
        >>> Image(shape=(360, 480, 3), encoding="jpeg").declared()
        'uint8 (360, 480, 3)'
        >>> Image(shape=(None, None, 1), dtype="uint16").declared()
        'uint16 (?, ?, 1)'
    """

    shape: Shape = (None, None, 3)
    encoding: Literal["png", "jpeg"] = "png"
    quality: int = 95
    dtype: Literal["uint8", "uint16"] = "uint8"

    preview = "image"
    unsaid: ClassVar[frozenset[str]] = frozenset({"dtype"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Image"))
        if len(self.shape) != 3 or self.shape[2] not in {1, 2, 3, 4}:
            raise SchemaError(f"Image: shape is {self.shape}; want (height, width, channels) with 1 to 4 channels")
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "Image", ("uint8", "uint16")))
        if self.encoding not in {"png", "jpeg"}:
            raise SchemaError(f"Image: encoding is {self.encoding!r}; want 'png' or 'jpeg'")
        if self.encoding == "jpeg" and self.shape[2] in {2, 4}:
            raise SchemaError("Image: JPEG holds no alpha channel; declare encoding='png' or three channels")
        if self.encoding == "jpeg" and self.dtype != "uint8":
            raise SchemaError("Image: JPEG holds 8 bits per sample; declare encoding='png' or dtype='uint8'")
        object.__setattr__(self, "quality", checked_int(self.quality, "Image: quality"))
        if not 1 <= self.quality <= 100:
            raise SchemaError(f"Image: quality is {self.quality}; want 1 to 100")

    @property
    def channels(self) -> int:
        """Number of channels, 1 to 4."""
        return int(self.shape[2] or 3)

    def encode(self, value: Any) -> Column:
        if isinstance(value, bytes):
            info = codecs.probe(value, whole=True)
            if codecs.can_keep_image(info, channels=self.channels, dtype=self.dtype):
                shape = (info.height, info.width, self.channels)
                check_array(self, self.dtype, shape, self.shape, np.dtype(self.dtype))
                codecs.check_pixels(value)
                return value
            value = self.prepare(value)
        value = array_of(self, value)
        if value.ndim == 2 and self.channels == 1:
            value = value[..., None]
        if value.dtype.kind == "f":
            raise mismatch(
                self,
                f"{value.dtype.name} {shape_text(value.shape)}",
                "pictures are stored as whole numbers: normalize when they are read, by transform= of to_tf, to_torch "
                f"or to_numpy; or round and cast to {self.dtype} in read or the transform",
            )
        check_array(self, value.dtype, value.shape, self.shape, np.dtype(self.dtype))
        if self.encoding == "jpeg":
            return _encoded(self, value, functools.partial(codecs.encode_jpeg, quality=self.quality))
        return _encoded(self, value, codecs.encode_png)

    def decode_into(self, column: Column, out: np.ndarray | None, *, are_intact: bool = False) -> np.ndarray:
        return codecs.decode_image(
            one_bytes(column), channels=self.channels, dtype=self.dtype, out=out, is_whole=are_intact
        )

    def packages(self, *, drawn: bool) -> frozenset[str]:
        encoder = codecs.JPEG_ENCODER if self.encoding == "jpeg" else codecs.PNG_ENCODER
        return encoder | codecs.LOSSY_DECODERS if drawn else encoder

    def observe_value(self, value: Any) -> FieldStatistics:
        if not isinstance(value, np.ndarray):
            return {}
        grid = np.ascontiguousarray(_grid(value).reshape(-1, self.channels).T)
        if not grid.size:
            return {"measured": 1}
        return {"measured": 1, **{f"channels[{number}]": one for number, one in enumerate(Numbers.of_rows(grid))}}

    def declared(self) -> str:
        return f"{self.dtype} {shape_text(self.shape)}"

    def target(self) -> Target:
        return "image"

    def display(self, value: Any) -> np.ndarray:
        picture: np.ndarray = value if self.dtype == "uint8" else _spread(value, np.ones(value.shape[:2], bool))
        return picture[..., :1] if self.channels == 2 else picture


@frozen()
class Mask(PictureFile):
    """Class ids per pixel: uint8 or uint16 (height, width), stored as PNG, always exact.

    A sample holds it as an array, or as the `bytes` of a PNG or TIFF file: 8-bit greyscale PNG files (16-bit for
    uint16) are stored untouched; the ids of TIFF and palette files, and of files with fewer bits, are stored as
    greyscale PNG. With a palette it may also hold colours, as an array (height, width, 3) or an RGB file: each pixel is
    the first class of its colour, and one of no class is refused.

    Args:
        shape: (height, width); None for a size that varies.
        names: class names in the order of the ids. An array with an id beyond them is refused, except 255 (65535 for
            uint16), which segmentation datasets use for `not labelled`. Empty accepts every id.
        palette: colour (red, green, blue) of each class, for drawing, and for masks of colours.
        dtype: "uint8", or "uint16" for more than 256 ids: instances, panoptic segmentation.

    Example:
        >>> Mask(names=("road", "car")).declared()
        'uint8 (height, width) of 2 classes'
    """

    shape: Shape = (None, None)
    names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()
    dtype: Literal["uint8", "uint16"] = "uint8"

    preview = "mask"
    unsaid: ClassVar[frozenset[str]] = frozenset({"dtype"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Mask"))
        object.__setattr__(self, "names", checked_names(self.names, "Mask"))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "Mask", ("uint8", "uint16")))
        object.__setattr__(self, "palette", _checked_palette(self.palette, _MOST_IDS[self.dtype]))
        if len(self.shape) != 2:
            raise SchemaError(f"Mask: shape is {self.shape}; want (height, width)")
        if len(self.names) > _MOST_IDS[self.dtype]:
            raise SchemaError(
                f"Mask: {count_of(len(self.names), 'class name')}; {self.dtype} ids go to {_MOST_IDS[self.dtype] - 1}"
            )
        if self.palette and self.names and len(self.palette) < len(self.names):
            raise SchemaError(
                f"Mask: {len(self.palette)} palette colours for {count_of(len(self.names), 'class name')}; give each "
                "class one"
            )

    def encode(self, value: Any) -> Column:
        if isinstance(value, bytes):
            info = codecs.probe(value, whole=True)
            if codecs.can_keep_mask(info, dtype=self.dtype):
                check_array(self, self.dtype, (info.height, info.width), self.shape, np.dtype(self.dtype))
                return value
        value = self.prepare(value if isinstance(value, bytes) else array_of(self, value))
        check_array(self, value.dtype, value.shape, self.shape, np.dtype(self.dtype))
        self._check_ids(value)
        return _encoded(self, value, codecs.encode_png)

    def decode_into(self, column: Column, out: np.ndarray | None, *, are_intact: bool = False) -> np.ndarray:
        data = one_bytes(column)
        return codecs.decode_mask(data, dtype=self.dtype, out=out, is_whole=are_intact)

    def observe_value(self, value: Any) -> FieldStatistics:
        if not isinstance(value, np.ndarray) or (self.dtype == "uint16" and not self.names):  # ids of instances
            return {}
        return {"measured": 1, "pixels": Counts.of(value)}

    def declared(self) -> str:
        shape = "(height, width)" if self.shape == (None, None) else shape_text(self.shape)
        return f"{self.dtype} {shape}" + (f" of {len(self.names)} classes" if self.names else "")

    def class_names(self) -> tuple[str, ...]:
        return self.names

    def class_colours(self) -> tuple[tuple[int, int, int], ...]:
        return self.palette

    def target(self) -> Target:
        return "mask"

    def prepare(self, value: Any) -> Any:
        if self.palette and isinstance(value, bytes):
            info = codecs.probe(value, whole=True)
            if info.channels == 3 and info.encoding != "jpeg":
                value = codecs.decode_image(value)
        if self.palette and isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] == (3,):
            return self._ids_of(value)
        return PictureFile.prepare(self, value)  # `super()` knows no class that `frozen` has made anew

    def _ids_of(self, pixels: np.ndarray) -> np.ndarray:
        """Return the class ids (height, width) of colours (height, width, 3)."""
        codes = _packed(pixels)
        ids: np.ndarray = _ids_by_colour(self.palette, self.dtype).take(codes)
        if ids.size and ids.max() == _MOST_IDS[self.dtype] - 1:
            unknown = ~np.isin(codes, _packed(np.array(self.palette, np.uint8)))
            if unknown.any():
                row, column = (int(place) for place in np.argwhere(unknown)[0])
                raise SchemaError(
                    f"pixel (row {row}, column {column}) has the colour {tuple(pixels[row, column].tolist())}, which "
                    "the palette does not declare; add it to names and palette, or save the mask without smoothing"
                )
        return ids

    def _check_ids(self, mask: np.ndarray) -> None:
        if not self.names or mask.size == 0 or int(mask.max()) < len(self.names):
            return
        ignored = _MOST_IDS[self.dtype] - 1
        wrong = (mask >= len(self.names)) & (mask != ignored)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            raise SchemaError(
                f"the field is declared {self.declared()} but pixel (row {row}, column {column}) holds class id "
                f"{int(mask[row, column])}; declare the class, or map the id in read ({ignored} is free for `not "
                "labelled`)"
            )


@frozen()
class Depth(PictureFile):
    """A depth map: the distance of each pixel from the camera, (height, width).

    By default, uint16 millimetres, up to 65.535 m, with 0 where nothing was measured: the unit and the 16-bit greyscale
    PNG of Kinect, RealSense, ScanNet and most RGB-D datasets, half as large as floats and finer than their sensors.
    float32 metres, with 0 or NaN where nothing was measured, are for data that needs more: rendered scenes,
    predictions, long-range LiDAR. Either is stored exactly, as PNG. The PNG of float32 holds the four bytes of each
    number, little-endian, as red, green, blue and alpha, which is how TFDS stores and reads float32 images.

    A sample holds an array of that dtype, or the `bytes` of a file: for uint16 a 16-bit greyscale PNG (stored
    untouched) or TIFF, for float32 a TIFF of 32-bit floats. Units are not converted: do that in `read`. Geometric
    transforms move it with the image like a mask, without mixing neighbouring pixels.

    Args:
        shape: (height, width); None for a size that varies.
        dtype: "uint16" for millimetres, "float32" for metres.

    Example:
        >>> Depth().declared()
        'uint16 (height, width) of millimetres'
        >>> metres = np.array([[0.5, np.nan]], np.float32)
        >>> depth = Depth(dtype="float32")
        >>> depth.decode(depth.encode(metres))
        array([[0.5, nan]], dtype=float32)
    """

    shape: Shape = (None, None)
    dtype: Literal["uint16", "float32"] = "uint16"

    preview = "depth"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Depth"))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype, "Depth", ("uint16", "float32")))
        if len(self.shape) != 2:
            raise SchemaError(f"Depth: shape is {self.shape}; want (height, width)")

    def encode(self, value: Any) -> Column:
        if isinstance(value, bytes):
            info = codecs.probe(value, whole=True)
            if self.dtype == "uint16" and codecs.can_keep_mask(info, dtype="uint16"):
                check_array(self, np.uint16, (info.height, info.width), self.shape, np.dtype(np.uint16))
                return value
            value = self.prepare(value)
        value = array_of(self, value)
        if value.dtype != self.dtype and value.dtype.kind in "fiu" and value.ndim == 2:
            remedy = "np.rint(metres * 1000).astype(np.uint16)" if self.dtype == "uint16" else "metres as float32"
            found = f"{value.dtype.name} {shape_text(value.shape)}"
            raise mismatch(self, found, f"convert it in read ({remedy}), or change the declaration")
        check_array(self, value.dtype, value.shape, self.shape, np.dtype(self.dtype))
        if self.dtype == "float32":
            value = np.ascontiguousarray(value, "<f4").view(np.uint8).reshape(*value.shape, 4)
        return _encoded(self, value, codecs.encode_png)

    def decode_into(self, column: Column, out: np.ndarray | None, *, are_intact: bool = False) -> np.ndarray:
        data = one_bytes(column)
        if self.dtype == "uint16":
            return codecs.decode_mask(data, dtype="uint16", out=out, is_whole=are_intact)
        is_free = out is not None and out.dtype == np.float32 and out.flags.c_contiguous
        levels = out.view(np.uint8).reshape(*out.shape, 4) if is_free and out is not None else None
        found = codecs.decode_image(data, channels=4, out=levels, is_whole=are_intact)
        return out if out is not None and found is levels else found.view("<f4")[..., 0]

    def prepare(self, value: Any) -> Any:
        if not isinstance(value, bytes):
            return value
        if self.dtype == "float32":
            return codecs.decode_floats(value)
        info = codecs.probe(value)
        if info.bit_depth < 16:
            found = f"a {info.encoding} file of {info.bit_depth} bits per sample"
            raise mismatch(self, found, "decode it in read, and convert it to millimetres")
        return codecs.decode_mask(value, dtype="uint16")

    def observe_value(self, value: Any) -> FieldStatistics:
        if not isinstance(value, np.ndarray):
            return {}
        grid = _grid(value)
        return {"measured": 1, "depth": Numbers.of(grid[np.isfinite(grid) & (grid > 0)])}

    def declared(self) -> str:
        shape = "(height, width)" if self.shape == (None, None) else shape_text(self.shape)
        return f"{self.dtype} {shape} of {'millimetres' if self.dtype == 'uint16' else 'metres'}"

    def encoded_value(self, column: Column) -> Any:
        return bytes(one_bytes(column)) if self.dtype == "uint16" else self.decode(column)

    def target(self) -> Target:
        return "depth"

    def display(self, value: Any) -> np.ndarray:
        distances = value[..., None]
        is_measured = np.isfinite(value) & (value > 0)
        return np.where(is_measured[..., None], 255 - _spread(distances, is_measured), 0).astype(np.uint8)


@frozen()
class Keypoints(Feature, Geometry, Preview):
    """Points in one image: float32, each (x, y) in pixels, or (x, y, visibility).

    x counts from the left and y from the top, as in COCO, torchvision and albumentations; a point may lie outside the
    image. Visibility is COCO's: 0 not labelled, without a position, 1 hidden, 2 visible. A sample holds an array or
    nested lists of numbers.

    Geometric transforms move them with the image. The `keypoint_params` of an albumentations pipeline decide whether
    points that leave the image are removed (`remove_invisible`, its default): those in a list of any length disappear,
    with their entries in `label_fields`; those with a visibility become (0, 0, 0), and keep their row. Other lists
    cannot lose a point, and need `remove_invisible=False`. A mirrored face keeps its points in order: nothing swaps
    left and right.

    Args:
        shape: (None, 2) for any number of points; (17, 3) for 17 with visibility; (None, 17, 3) for those of each
            person in the image. The last size is 2, or 3 with visibility; only the first may be None.
        names: names of the points, in order, for shapes with a fixed number of them.

    Example:
        >>> Keypoints().encode([[10, 20.5]])
        array([10. , 20.5], dtype=float32)
        >>> Keypoints((None, 17, 3)).declared()
        'float32 (?, 17, 3) of (x, y, visibility)'
    """

    shape: Shape = (None, 2)
    names: tuple[str, ...] = ()

    preview = "outlines"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Keypoints"))
        object.__setattr__(self, "names", checked_names(self.names, "Keypoints"))
        if not 2 <= len(self.shape) <= 3 or self.shape[-1] not in {2, 3} or None in self.shape[1:]:
            raise SchemaError(
                f"Keypoints: shape is {self.shape}; want (points, 2), (points, 3) with visibility, or (instances, "
                "points, 2 or 3), of which the first may be None"
            )
        if self.names and len(self.names) != self.shape[-2]:
            raise SchemaError(f"Keypoints: {len(self.names)} names for the shape {self.shape}; want one for each point")

    @property
    def type(self) -> ArrowType | dict[str, ArrowType]:
        return _floats(self.shape).type

    def value_type(self) -> tuple[str, Shape]:
        return "float32", self.shape

    def encode(self, value: Any) -> Column:
        value = array_of(self, self.prepare(value))
        check_array(self, value.dtype, value.shape, self.shape, np.dtype(np.float32))
        levels = value[..., 2] if self.shape[-1] == 3 else np.zeros(0, np.float32)
        if not np.isfinite(value).all() or not np.isin(levels, (0, 1, 2)).all():
            good = np.isfinite(value).all(-1) & (np.isin(levels, (0, 1, 2)) if levels.size else True)
            place = tuple(np.argwhere(~good)[0].tolist())
            remedy = "give finite numbers, and a visibility of 0 (not labelled), 1 (hidden) or 2 (visible)"
            raise mismatch(self, f"point {place} = {value[place].tolist()}", remedy)
        numbers: np.ndarray = value.reshape(-1).astype(np.float32, copy=False)
        return numbers

    def decode(self, column: Column) -> Any:
        return _floats(self.shape).decode(column)

    def decode_many(self, column: ColumnBlock) -> np.ndarray | list[Any] | None:
        return _floats(self.shape).decode_many(column)

    def prepare(self, value: Any) -> Any:
        return _numbers_of(self, value, self.shape) if isinstance(value, (list, tuple)) else value

    def observe(self, column: Any) -> FieldStatistics:
        numbers = _floats(self.shape).observe(column)
        values = column.values.reshape(-1, self.shape[-1])
        if self.shape[-1] == 3:
            return {**numbers, "visibility": Counts.of(values[:, 2].astype(np.int64))}
        return numbers

    def declared(self) -> str:
        return f"float32 {shape_text(self.shape)} of (x, y{', visibility' if self.shape[-1] == 3 else ''})"

    def target(self) -> Target:
        return "points"

    def points(self, value: Any) -> np.ndarray:
        found = np.array(value[..., :2].reshape(-1, 2), np.float32)
        if self.shape[-1] == 3:
            found[value[..., 2].reshape(-1) == 0] = np.nan
        return found

    def with_points(
        self, value: Any, points: np.ndarray, size: tuple[int, int] | None
    ) -> tuple[Any, np.ndarray | None]:
        is_gone = np.isnan(points).any(axis=1)
        if self.may_lose_rows() and size is not None:
            rows = np.flatnonzero(~is_gone)
            return points[rows], rows
        moved = np.array(value, np.float32).reshape(-1, value.shape[-1])
        moved[:, :2] = points
        moved[is_gone] = 0
        return moved.reshape(value.shape), None

    def needs_every_point(self) -> bool:
        return self.shape[-1] == 2 and not self.may_lose_rows()

    def may_lose_rows(self) -> bool:
        return self.shape == (None, 2)

    def outlines(self, value: Any, height: int, width: int) -> list[np.ndarray]:
        del height, width
        return [point[~np.isnan(point).any(axis=1)] for point in self.points(value)[:, None]]

    def outline_names(self) -> tuple[str, ...]:
        return self.names


@frozen()
class Polygons(Feature, Geometry, Preview):
    """Outlines of objects in one image: a list of polygons, each float32 (k, 2) of (x, y) in pixels.

    A sample holds a list of arrays (k, 2), of nested lists, or of COCO's flat lists [x0, y0, x1, y1, ...]; an empty
    list is a polygon without vertices. It reads back as one array, float32 (n, most, 2), where polygons with fewer
    vertices end in NaN: `value[i][~np.isnan(value[i, :, 0])]` gives those of polygon i. What is stored is the vertices,
    and the number of them in each polygon.

    Geometric transforms move the vertices with the image, like keypoints; those outside it stay, and are clipped when
    the polygon is drawn. A polygon that lies entirely outside loses its vertices but keeps its place, so that labels
    stay in step; name the field in `label_fields` of `bbox_params` to drop polygons with their boxes.

    Example:
        >>> triangle, square = [[0, 0], [4, 0], [0, 4]], [5, 5, 9, 5, 9, 9, 5, 9]
        >>> polygons = Polygons()
        >>> columns = polygons.encode([triangle, square])
        >>> columns["/sizes"]
        array([3, 4])
        >>> polygons.decode(columns)[0]
        array([[ 0.,  0.],
               [ 4.,  0.],
               [ 0.,  4.],
               [nan, nan]], dtype=float32)
    """

    preview = "outlines"

    @property
    def type(self) -> dict[str, ArrowType]:
        return {"": ArrowType("float32", (None, 2)), "/sizes": ArrowType("int64", (None,))}

    def value_type(self) -> tuple[str, Shape]:
        return "float32", (None, None, 2)

    def encode(self, value: Any) -> dict[str, Column]:
        value = array_of(self, self.prepare(value))
        check_array(self, value.dtype, value.shape, (None, None, 2), np.dtype(np.float32))
        is_there = ~np.isnan(value).any(-1)
        sizes = is_there.sum(axis=1)
        is_padded = is_there == (np.arange(value.shape[1]) < sizes[:, None])
        wrong = np.argwhere(~is_padded | (is_there & ~np.isfinite(value).all(-1)))
        if len(wrong):
            place = tuple(wrong[0].tolist())
            remedy = "give finite numbers, and NaN only behind the last vertex of a polygon"
            raise mismatch(self, f"vertex {place} = {value[place].tolist()}", remedy)
        return {"": value[is_there].reshape(-1), "/sizes": sizes.astype(np.int64)}

    def decode(self, columns: Mapping[str, Column]) -> Any:
        sizes = np.asarray(columns["/sizes"], np.int64)
        value = np.full((len(sizes), max(sizes.tolist(), default=0), 2), np.nan, np.float32)
        value[np.arange(value.shape[1]) < sizes[:, None]] = np.asarray(columns[""], np.float32).reshape(-1, 2)
        return value

    def prepare(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        polygons = [_numbers_of(self, polygon, (None, 2)).reshape(-1, 2) for polygon in value]
        padded = np.full((len(polygons), max(map(len, polygons), default=0), 2), np.nan, np.float32)
        for row, polygon in zip(padded, polygons, strict=True):
            row[: len(polygon)] = polygon
        return padded

    def observe(self, columns: Any) -> FieldStatistics:
        sizes = columns["/sizes"]
        assert isinstance(sizes, RaggedColumn)
        return {"polygons": Numbers.of(sizes.lengths, with_bins=True), "vertices": Numbers.of(sizes.values)}

    def declared(self) -> str:
        return "float32 polygons (n, vertices, 2) of (x, y)"

    def target(self) -> Target:
        return "points"

    def points(self, value: Any) -> np.ndarray:
        return np.array(value.reshape(-1, 2), np.float32)

    def with_points(
        self, value: Any, points: np.ndarray, size: tuple[int, int] | None
    ) -> tuple[Any, np.ndarray | None]:
        moved = points.reshape(value.shape)
        if moved.size and size is not None:
            low = np.where(np.isnan(moved), np.inf, moved).min(axis=1)
            high = np.where(np.isnan(moved), -np.inf, moved).max(axis=1)
            is_out = (high <= 0).any(axis=1) | (low >= size[::-1]).any(axis=1)
            moved = np.where(is_out[:, None, None], np.float32(np.nan), moved)
        return moved, None

    def needs_every_point(self) -> bool:
        return True

    def outlines(self, value: Any, height: int, width: int) -> list[np.ndarray]:
        del height, width
        return [row[~np.isnan(row[:, 0])] for row in value]


@functools.cache
def _floats(shape: Shape) -> Tensor:
    """Return how numbers of a shape are stored."""
    return Tensor(shape, "float32")


def _numbers_of(feature: Feature, value: Any, shape: Shape) -> np.ndarray:
    """Return nested lists of numbers as an array; an empty list has no rows."""
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        remedy = "give an array, or nested lists of numbers"
        raise mismatch(feature, f"a {type(value).__name__} that is no array ({error})", remedy) from error
    if not found.size:
        return found.reshape([size or 0 for size in shape])
    if found.ndim == 1 and len(found) % 2 == 0 and shape == (None, 2) and isinstance(feature, Polygons):
        return found.reshape(-1, 2)  # COCO's flat lists
    if found.ndim != len(shape) or found.shape[-1] != shape[-1]:
        remedy = "give (x, y) for each vertex or a flat list of them" if shape == (None, 2) else "reshape it in read"
        raise mismatch(feature, f"numbers of shape {shape_text(found.shape)}", remedy)
    return found


def _spread(values: np.ndarray, is_shown: np.ndarray) -> np.ndarray:
    """Return numbers (height, width, channels) as uint8, spread from the least shown, 0, to the largest, 255."""
    shown = values[is_shown]
    least, most = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 0.0)
    with np.errstate(invalid="ignore"):
        levels = np.clip((values.astype(np.float64) - least) / max(most - least, 1e-9), 0, 1) * 255
    return np.nan_to_num(levels).astype(np.uint8)


def _encoded(feature: Feature, pixels: np.ndarray, encode: Callable[[np.ndarray], bytes]) -> bytes:
    """Return the column of an array; refuse one that cannot be stored or read back."""
    found = f"{pixels.dtype} {shape_text(pixels.shape)}"
    if pixels.shape[0] * pixels.shape[1] > codecs.MAX_PIXELS:
        remedy = f"readers take {codecs.MAX_PIXELS} pixels at most: tile it or shrink it in read"
        raise mismatch(feature, found, remedy)
    try:
        return encode(pixels)
    except OptionError as error:
        raise mismatch(feature, found, str(error)) from error


def picture_extension(data: bytes) -> str:
    """Return the extension of a stored picture by its first bytes."""
    return "jpg" if data.startswith(_JPEG) else "png"


def _checked_palette(palette: Any, most: int) -> tuple[tuple[int, int, int], ...]:
    try:
        colours = tuple((operator.index(r), operator.index(g), operator.index(b)) for r, g, b in palette)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"Mask: palette is {palette!r}; want one (red, green, blue) per class") from error
    if len(colours) > most or any(not 0 <= level <= 255 for colour in colours for level in colour):
        raise SchemaError(
            f"Mask: palette is {join_names(colours)}; want levels from 0 to 255, and at most {most} colours"
        )
    return colours


def _packed(colours: np.ndarray) -> np.ndarray:
    """Return colours (..., 3) of 8 bits as numbers of 24, uint32 (...)."""
    red, green, blue = (colours[..., channel].astype(np.uint32) for channel in range(3))
    found: np.ndarray = red << 16 | green << 8 | blue
    return found


@functools.lru_cache(maxsize=4)
def _ids_by_colour(palette: tuple[tuple[int, int, int], ...], dtype: str) -> np.ndarray:
    """Return the first class of each colour packed in 24 bits, (2**24,); the largest number where there is none."""
    table = np.full(1 << 24, _MOST_IDS[dtype] - 1, dtype)
    for number, code in reversed([*enumerate(_packed(np.array(palette, np.uint8)).tolist())]):
        table[code] = number
    return table


_GRID = 32
"""Fewest rows, and columns, of the grid of pixels that statistics are made of; smaller pictures count whole."""


def _grid(pixels: np.ndarray) -> np.ndarray:
    """Return every k-th row and column of a picture, which has the same mean and deviation but for noise."""
    step = max(1, min(pixels.shape[:2]) // _GRID)
    return pixels[::step, ::step]


# ---------------------------------------------------------------- video


_DEMUXERS = {
    **dict.fromkeys(["mp4", "mov", "3gp"], "mov"),
    **dict.fromkeys(["mkv", "webm"], "matroska"),
    "avi": "avi",
    "ts": "mpegts",
    "mpg": "mpeg",
    "flv": "flv",
    "wmv": "asf",
}
"""FFmpeg's demuxer of each extension. Each is named to FFmpeg, which would otherwise follow a playlist anywhere."""
_BRANDS = {b"qt  ": "mov", b"3gp": "3gp", **dict.fromkeys([b"hei", b"hev", b"avi", b"mif", b"msf", b"M4A", b"M4B"], "")}
"""Extensions by how the brand of an ISO file begins, if not "mp4"; "" for pictures and sound."""
_BOXES = {b"moov", b"mdat", b"free", b"skip", b"wide"}
_MAGIC = {b"FLV\x01": "flv", b"\x00\x00\x01\xba": "mpg", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "wmv"}
_TS_PACKET = 188
_WHOLE = "want a whole MP4, MOV, WebM, MKV, AVI, MPEG, FLV or WMV file"
_RATE_TOLERANCE = 1e-3
"""Relative: containers round durations, and 29.97 is short for 30000/1001."""
_SHEET = 4  # frames that a preview shows


@frozen()
class Video(Feature, Preview):
    """A video: uint8 (num_frames, height, width, 3) in RGB, stored as an encoded file.

    A sample holds the `bytes` of an MP4, MOV, WebM, MKV, AVI, MPEG, FLV or WMV file, which are stored untouched, or an
    array of uint8 (num_frames, height, width, 3), stored as FFV1 in MKV, without loss. A file is decoded when it is
    written: one with a damaged frame, without frames, or cut short is refused. Frames are turned as the file says, and
    converted by the colour space and range that it names. Sound in the file is kept, and not read. Needs the package
    av, which the extra `video` installs.

    `num_frames` and `stride` choose frames when a sample is read; the whole file is stored. For a transform that
    chooses different frames in each epoch, declare `decoded=False` and call `frames` in it.

    Args:
        shape: (height, width) of a frame; None for a size that varies.
        fps: frames per second; a file with another rate is refused. None takes files of any rate, and no arrays.
        num_frames: how many frames to read from each video: spread evenly from the first to the last, or `stride` apart
            in its middle. The frames of a shorter video repeat. None for all.
        stride: distance between the frames to read; None for 1, or as far apart as `num_frames` permits.
        decoded: whether a sample holds frames; False gives transforms and readers the bytes of the file.

    Example:
        >>> Video((240, 320), num_frames=16).declared()
        'video uint8 (16, 240, 320, 3)'
        >>> Video(fps=25, decoded=False).declared()
        'video file (?, ?, ?, 3) at 25 fps'
    """

    shape: Shape = (None, None)
    fps: float | None = None
    num_frames: int | None = None
    stride: int | None = None
    decoded: bool = True

    preview = "image"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape, "Video"))
        if len(self.shape) != 2 or 0 in self.shape:
            raise SchemaError(f"Video: shape is {self.shape}; want (height, width) of a frame, None where one varies")
        if self.fps is not None and not (isinstance(self.fps, (int, float)) and 0 < self.fps < float("inf")):
            raise SchemaError(f"Video: fps is {self.fps!r}; want a positive number, or None")
        set_positive(self, ("num_frames", "stride"))
        if not isinstance(self.decoded, bool):
            raise SchemaError(f"Video: decoded is {self.decoded!r}; want True or False")
        if not self.decoded and (self.num_frames or self.stride):
            raise SchemaError("Video: num_frames and stride choose frames, and decoded=False gives files; drop one")

    @property
    def type(self) -> ArrowType:
        return ArrowType("binary")

    def value_type(self) -> tuple[str, Shape]:
        return ("uint8", (self.num_frames, *self.shape, 3)) if self.decoded else ("bytes", ())

    def encode(self, value: Any) -> Column:
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            self._check(data)
            return data
        frames = array_of(self, value)
        if self.fps is None:
            found = f"an array, {frames.dtype.name} {shape_text(frames.shape)}"
            remedy = "give the bytes of a file, declare fps= to store arrays"
            raise mismatch(self, found, f"{remedy}, or decoded=False where a transform need not see frames")
        check_array(self, frames.dtype, frames.shape, (None, *self.shape, 3), np.dtype(np.uint8))
        if not frames.size:
            raise mismatch(self, "no pixels", "leave the sample out: raise Skip(...)")
        return _ffv1(frames, self.fps)

    def decode(self, column: Column) -> Any:
        data = one_bytes(column)
        return _frames(data, self._numbers) if self.decoded else data

    def prepare(self, value: Any) -> Any:
        # All frames: what a transform makes of them is stored, and `decode` chooses among what is stored.
        return _frames(value, range) if self.decoded and isinstance(value, bytes) else value

    def frames(self, data: bytes, numbers: Sequence[int] | Callable[[int], Iterable[int]] | None = None) -> np.ndarray:
        """Return frames of a file, uint8 (n, height, width, 3): what a transform reads where `decoded` is False.

        Of H.264, HEVC, AV1, VP9, MJPEG and FFV1 in MP4, MOV, MKV and WebM, only those are decoded, and what lies
        between each and the key frame before it. The frame at `t` seconds has the number `round(t * fps)`.

        Args:
            data: the file.
            numbers: which frames, from 0, in any order, or a function of their number that says so; None for those
                that `num_frames` and `stride` choose.

        Raises:
            IndexError: there is no frame of such a number.
            InputError: the file does not decode.
            MissingDependencyError: av is not installed.

        Example:
            >>> def clip(sample, rng):   # 16 frames in a row, others in each epoch
            ...     def numbers(num_frames):
            ...         start = rng.integers(max(num_frames - 16, 0) + 1)
            ...         return range(start, min(start + 16, num_frames))
            ...
            ...     return {**sample, "video": Video().frames(sample["video"], numbers)}
        """
        if numbers is None:
            return _frames(data, self._numbers)
        return _frames(data, numbers if callable(numbers) else lambda _: numbers)

    def encoded_value(self, column: Column) -> bytes:
        return one_bytes(column)

    def packages(self, *, drawn: bool) -> frozenset[str]:
        del drawn  # files are kept, whatever decodes them
        return frozenset() if self.fps is None else frozenset({"av"})

    def observe(self, column: Any) -> FieldStatistics:
        if importlib.util.find_spec("av") is None:
            return {}
        microseconds = [_asked(data, lambda _, file: file.duration) for data in column]
        known = np.array([one for one in microseconds if one is not None], np.float64)
        return {"seconds": Numbers.of(known / 1_000_000)}

    def declared(self) -> str:
        rate = "" if self.fps is None else f" at {self.fps:g} fps"
        return f"video {'uint8' if self.decoded else 'file'} {shape_text((self.num_frames, *self.shape, 3))}{rate}"

    def display(self, value: Any) -> np.ndarray:
        """Return a strip of four frames, from the first to the last, with gaps: uint8 (height, width of all, 3)."""

        def numbers(num_frames: int) -> list[int]:
            return _spread_over(num_frames, _SHEET)

        frames = value[numbers(len(value))] if self.decoded else self.frames(value, numbers)
        return side_by_side([*frames])

    def _numbers(self, num_frames: int) -> Sequence[int]:
        """Return which frames are read of a video with so many."""
        if self.num_frames is None:
            return range(0, num_frames, self.stride or 1)
        if self.stride is None:
            return _spread_over(num_frames, self.num_frames)
        start = max(num_frames - 1 - (self.num_frames - 1) * self.stride, 0) // 2
        return [min(start + place * self.stride, num_frames - 1) for place in range(self.num_frames)]

    def _check(self, data: bytes) -> None:
        """Refuse a file that is not as declared, or does not decode to its end."""
        num_frames, size, rate = 0, (0, 0), None
        for frame, average_rate in _decoded_video(data):
            shown = _size_of(frame)
            if num_frames and shown != size:
                found = f"a video of {size} in which frame {num_frames} is {shown}"
                raise mismatch(self, found, "scale it in read")
            num_frames, size, rate = num_frames + 1, shown, average_rate
        if missing := _missing_bytes(data):
            raise InputError(
                f"the field holds a {video_extension(data)} file that is cut short: {missing} bytes are missing; "
                f"{_WHOLE}"
            )
        fits = all(want in (None, found) for want, found in zip(self.shape, size, strict=True))
        if self.fps is not None:
            fits &= rate is not None and abs(float(rate) - self.fps) <= _RATE_TOLERANCE * self.fps
        if not fits:
            at = "" if rate is None else f" at {float(rate):g} fps"
            remedy = "scale or convert it in read, or change the declaration"
            raise mismatch(self, f"a video of {shape_text((num_frames, *size, 3))}{at}", remedy)


def video_extension(data: bytes) -> str:
    """Return the extension of the format of a video file by its first bytes; "" if they are no video's."""
    if data[4:8] == b"ftyp":
        return next((kind for brand, kind in _BRANDS.items() if data[8:12].startswith(brand)), "mp4")
    if data[:4] == b"\x1a\x45\xdf\xa3":  # EBML, whose header names the kind of document
        return "webm" if b"webm" in data[:64] else "mkv" if b"matroska" in data[:64] else ""
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:1] == b"G" and data[_TS_PACKET : _TS_PACKET + 1] == b"G" == data[2 * _TS_PACKET : 2 * _TS_PACKET + 1]:
        return "ts"
    if data[4:8] in _BOXES:  # QuickTime before it had brands
        return "mov"
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "")


def _missing_bytes(data: bytes) -> int:
    """Return how many bytes a video file lacks at its end, where its container says how long it is."""
    kind = video_extension(data)
    if kind == "avi":
        return max(8 + int.from_bytes(data[4:8], "little") - len(data), 0)
    if _DEMUXERS.get(kind) == "matroska":
        return max(_end_of_segment(data) - len(data), 0)
    place = 0
    while _DEMUXERS.get(kind) == "mov" and place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if size == 1:
            size = int.from_bytes(data[place + 8 : place + 16], "big")
        if size < 8:  # 0: to the end of the file
            return 0
        place += size
    return max(place - len(data), 0)


def _end_of_segment(data: bytes) -> int:
    """Return where the first segment of a Matroska file ends; 0 if it does not say."""
    place = 4  # behind the ID of the header
    for id_size in (4, 0):
        if place >= len(data) or not data[place]:
            return 0
        width = 9 - data[place].bit_length()
        size = int.from_bytes(data[place : place + width], "big") & ((1 << 7 * width) - 1)
        is_open = size == (1 << 7 * width) - 1  # of a program that streams
        place += width + size + id_size
        if is_open:
            return 0
    return place


def _spread_over(num_frames: int, count: int) -> list[int]:
    """Return the numbers of so many frames, as far apart as possible; the first for one."""
    return [place * (num_frames - 1) // max(count - 1, 1) for place in range(count)]


def _av() -> Any:
    try:
        import av
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            "Video needs the package av; install it with: pip install 'datamat[video]'"
        ) from error
    return av


def _decoded_video(data: bytes) -> Iterator[tuple[Any, fractions.Fraction | None]]:
    """Yield each frame of a file as an `av.VideoFrame`, in the order in which they are shown, with the rate.

    Raises:
        InputError: it is none of the formats, holds no frames, or one that is damaged.
        MissingDependencyError: av is not installed.
    """
    av = _av()
    kind = video_extension(data)
    if not kind:
        raise InputError(f"the field: {len(data)} bytes are no video; {_WHOLE}")
    number = 0
    try:
        with _opened(av, io.BytesIO(data), kind) as file:
            stream = _stream(av, file)
            if stream is None:
                raise InputError(f"the field holds a {kind} file without a video that FFmpeg decodes; {_WHOLE}")
            stream.codec_context.thread_count = 1  # the others are taken by other samples
            for frame in file.decode(stream):
                if frame.is_corrupt:
                    raise InputError(f"the field holds a {kind} file whose frame {number} is damaged; {_WHOLE}")
                yield frame, stream.average_rate
                number += 1
    except (av.FFmpegError, EOFError) as error:
        where = f"fails at frame {number}" if number else "does not decode"
        raise InputError(f"the field holds a {kind} file that {where} ({error}); {_WHOLE}") from error
    if not number:
        raise InputError(f"the field holds a {kind} file without a frame; {_WHOLE}")


def _opened(av: Any, source: Any, kind: str) -> Any:
    # Until version 19, tags that are no UTF-8 raise an error unless they are replaced; from then on there is no choice.
    tags = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    return av.open(source, format=_DEMUXERS[kind], **tags)


def _stream(av: Any, file: Any) -> Any:
    """Return the first video of a file that is no picture of its cover, and whose codec is known; None for none."""
    cover = av.stream.Disposition.attached_pic
    found = [one for one in file.streams.video if one.codec_context is not None and not one.disposition & cover]
    return found[0] if found else None


def _frames(data: bytes, choose: Callable[[int], Iterable[int]]) -> np.ndarray:
    """Return frames of a file, uint8 (n, height, width, 3).

    Args:
        data: the file.
        choose: returns which frames are wanted, given how many there are.
    """
    reformatter = _av().video.reformatter.VideoReformatter()
    outline = _asked(data, _outline) or _Outline(0)
    count = outline.count  # mostly one for each frame
    while True:
        wanted = [operator.index(number) for number in choose(count)]
        places: dict[int, list[int]] = {}
        for place, number in enumerate(wanted):
            places.setdefault(number, []).append(place)
        is_sought = bool(outline.keys and places) and 0 <= min(places) <= max(places) < count
        numbered = (
            _sought(data, sorted(places), outline)
            if is_sought
            else enumerate(frame for frame, _ in _decoded_video(data))
        )
        found, total, missing = None, 0, len(places)
        for number, frame in numbered:
            if found is None:
                found = np.empty((len(wanted), *_size_of(frame), 3), np.uint8)
            if number in places:
                found[places[number]] = _pixels(reformatter, frame)
                missing -= 1
            total = number + 1
        if is_sought and missing:
            outline = _Outline(count)
        elif is_sought or total == count:
            break
        else:
            count, outline = total, _Outline(total)  # a packet may hold no frame, or two
    wrong = [] if is_sought else [number for number in places if not 0 <= number < total]
    if wrong:
        raise IndexError(f"frame {wrong[0]} of a video with {total}; frames are numbered from 0")
    assert found is not None, "a video without frames is refused"
    return found


@frozen()
class _Outline:
    """What the packets of a file say of its frames.

    Attributes:
        count: number of packets that hold frames.
        times: when each frame is shown, ascending, in the unit of the stream.
        keys: numbers of frames at which decoding may begin; empty where that may give other frames, or unknown ones.
    """

    count: int
    times: Sequence[int] = ()
    keys: Sequence[int] = ()


_SOUGHT = {"h264", "hevc", "av1", "vp9", "mjpeg", "ffv1"}
"""Codecs of which each packet is one frame that is shown; some of VP8 and of MPEG-4 are none."""


def _outline(av: Any, file: Any) -> _Outline:
    stream = _stream(av, file)
    if stream is None:
        return _Outline(0)
    packets = [(one.pts, one.is_keyframe, one.is_discard) for one in file.demux(stream) if one.size]
    times = sorted({time for time, *_ in packets if time is not None})
    is_sought = (
        file.format.name.partition(",")[0] in {"mov", "matroska"}
        and stream.codec.canonical_name in _SOUGHT
        and len(times) == len(packets) > 0
        and packets[0][0] == times[0]  # else the first frames may need what is not there
        and not any(is_discarded for *_, is_discarded in packets)
    )
    keys = [bisect.bisect_left(times, time) for time, is_key, _ in packets if is_key] if is_sought else []
    return _Outline(len(packets), times, sorted(keys))


def _sought(data: bytes, numbers: Sequence[int], outline: _Outline) -> Iterator[tuple[int, Any]]:
    """Yield frames with their numbers, decoded from the key frame before each; none where one does not come.

    Args:
        data: the file.
        numbers: which frames, ascending.
        outline: what its packets say, with keys.
    """
    av, place = _av(), 0

    def key_of(number: int) -> int:
        return outline.keys[bisect.bisect_right(outline.keys, number) - 1]

    with contextlib.suppress(av.FFmpegError, EOFError), _opened(av, io.BytesIO(data), video_extension(data)) as file:
        stream = _stream(av, file)
        stream.codec_context.thread_count = 1
        while place < len(numbers):
            file.seek(outline.times[key_of(numbers[place])], stream=stream)
            for frame in file.decode(stream):
                number = bisect.bisect_left(outline.times, frame.pts)
                if number > numbers[place] or frame.is_corrupt:
                    return
                if number == numbers[place] and frame.pts == outline.times[number]:
                    yield number, frame
                    place += 1
                    if place == len(numbers) or key_of(numbers[place]) > number + 1:
                        break
            else:
                return


def _pixels(reformatter: Any, frame: Any) -> np.ndarray:
    """Return a frame as it is shown, uint8 (height, width, 3)."""
    pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    return np.rot90(pixels, _turns(frame))


def stretch_of_video(path: str, start_s: float, num_frames: int, fps: float) -> bytes:
    """Return some frames of a longer video as a file of their own.

    Its packets are copied to an MP4. Where these do not begin with a key frame, or need others behind them, the frames
    are decoded, and stored without loss.

    Args:
        path: path of an MP4 file.
        start_s: when the first frame is shown, in seconds.
        num_frames: how many frames.
        fps: frames per second.

    Raises:
        InputError: the file is damaged, or has not that many frames there.
        MissingDependencyError: av is not installed.
    """
    av = _av()
    try:
        with _opened(av, path, "mp4") as file:
            stream = _stream(av, file)
            if stream is None:
                raise InputError(f"{path} holds no video that FFmpeg decodes; copy it again")
            first, last = ((start_s + (number - 0.5) / fps) / stream.time_base for number in (0, num_frames))
            key = round(start_s / stream.time_base)
            file.seek(key, stream=stream)
            packets = [*_packets_until(file, stream, last)]
            within = [place for place, packet in enumerate(packets) if first <= packet.pts < last]
            if len(within) == num_frames:
                packets = packets[within[0] : within[-1] + 1]
                if len(packets) == num_frames and packets[0].is_keyframe:
                    return _remuxed(av, stream, packets)
            file.seek(key, stream=stream)
            shown = itertools.takewhile(lambda frame: frame.pts < last, file.decode(stream))
            frames = [frame for frame in shown if frame.pts >= first and not frame.is_corrupt]
    except (av.FFmpegError, EOFError) as error:
        raise InputError(f"{path} does not decode at {start_s:g} s ({error}); copy it again") from error
    if len(frames) != num_frames:
        raise InputError(
            f"{path} has {count_of(len(frames), 'whole frame')} from {start_s:g} s on, where {num_frames} should be; "
            "copy it again"
        )
    reformatter = av.video.reformatter.VideoReformatter()
    return _ffv1(np.stack([_pixels(reformatter, frame) for frame in frames]), fps)


def _packets_until(file: Any, stream: Any, last: float) -> Iterator[Any]:
    """Yield the packets of a stream up to those of which none is shown before a time."""
    for packet in file.demux(stream):
        if packet.dts is None or packet.dts >= last:
            return
        yield packet


def _remuxed(av: Any, stream: Any, packets: Sequence[Any]) -> bytes:
    """Return packets of a stream as an MP4 file that begins with the first: the same bytes each time."""
    file, start = io.BytesIO(), packets[0].pts
    with av.open(file, "w", format="mp4", options={"fflags": "bitexact"}) as container:
        copy = container.add_stream_from_template(stream, opaque=True)  # there may be no encoder for it
        for packet in packets:
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, copy
            container.mux(packet)
    return file.getvalue()


def _turns(frame: Any) -> int:
    """Return how many quarter turns, counterclockwise, a frame is to be shown with."""
    degrees: int = frame.rotation
    return round(degrees / 90)


def _size_of(frame: Any) -> tuple[int, int]:
    """Return height and width of a frame as it is shown."""
    return (frame.width, frame.height) if _turns(frame) % 2 else (frame.height, frame.width)


def _asked(data: bytes, ask: Callable[[Any, Any], Any]) -> Any:
    """Return what a function says of an opened file; None where it does not open, which decoding it explains."""
    av, kind = _av(), video_extension(data)
    if not kind:
        return None
    try:
        with _opened(av, io.BytesIO(data), kind) as file:
            return ask(av, file)
    except (av.FFmpegError, EOFError):
        return None


def _ffv1(frames: np.ndarray, fps: float) -> bytes:
    """Return frames as FFV1 in MKV: the same bytes each time, without the time of day or random numbers."""
    av = _av()
    file = io.BytesIO()
    with av.open(file, "w", format="matroska", options={"fflags": "bitexact"}) as container:
        stream = container.add_stream("ffv1", rate=fractions.Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "bgr0"
        stream.codec_context.thread_count = 1  # the number of threads would show in the bytes
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


built_in(Depth, Image, Keypoints, Mask, Polygons, Video)
