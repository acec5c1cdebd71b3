"""Images, masks and depth maps, stored as encoded files, untouched if they fit; and points in images."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from datamat import codecs
from datamat.errors import OptionError, SchemaError, count_of
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
    shape_text,
)
from datamat.features.protocols import Geometry, Preview, Target
from datamat.features.registry import built_in
from datamat.features.statistics import Counts, FieldStatistics, Numbers
from datamat.features.values import Tensor
from datamat.values import frozen

_JPEG = b"\xff\xd8"
_MOST_IDS = {"uint8": 256, "uint16": 65536}
"""Number of class ids of each dtype of masks; segmentation datasets use the last for `not labelled`."""


class PictureFile(Feature, Geometry, Preview):
    """Common code of all pictures: one file each, decoded in Python."""

    dtype: str
    shape: Shape

    @property
    def fits_pillow(self) -> bool:
        """Whether Pillow keeps all bits of the file: it keeps the upper eight of 16-bit colours, and no floats."""
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
            sizes = np.array([one if isinstance(one, tuple) else _size_of(one) for one in column], np.int64)
            sizes = sizes.reshape(-1, 2)
        else:
            sizes = np.full((len(column), 2), (height, width), np.int64)
        return {"height": Numbers.of(sizes[:, 0]), "width": Numbers.of(sizes[:, 1])}

    def observed_size(self, data: bytes) -> tuple[int, int]:
        """Return what `observe` takes in place of a stored file: a run holds it until it has enough records."""
        height, width = self.shape[:2]
        return _size_of(data) if height is None or width is None else (height, width)

    def is_ragged(self) -> bool:
        return False  # most datasets have pictures of equal size, which form one array


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
        palette: colour (red, green, blue) of each class, for drawing and for colour-coded masks.
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
        return PictureFile.prepare(self, value)  # `super()` does not know the class that `frozen` has recreated

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
    transforms move it with the image like a mask, without interpolation.

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
    list is a polygon without vertices. It reads back as one array, float32 (n, most, 2), in which polygons with fewer
    vertices end in NaN: `value[i][~np.isnan(value[i, :, 0])]` gives the vertices of polygon i. The stored columns are
    the vertices, and their number in each polygon.

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
            remedy = "give finite numbers, and NaN only after the last vertex of a polygon"
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


def _size_of(data: bytes) -> tuple[int, int]:
    info = codecs.probe(data)
    return info.height, info.width


@functools.cache
def _floats(shape: Shape) -> Tensor:
    """Return the feature that stores numbers of a shape."""
    return Tensor(shape, "float32")


def _numbers_of(feature: Feature, value: Any, shape: Shape) -> np.ndarray:
    """Convert nested lists of numbers to an array; an empty list has no rows."""
    try:
        found = np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        remedy = "give an array, or nested lists of numbers"
        raise mismatch(feature, f"a {type(value).__name__} that is not an array ({error})", remedy) from error
    if not found.size:
        return found.reshape([size or 0 for size in shape])
    if found.ndim == 1 and len(found) % 2 == 0 and shape == (None, 2) and isinstance(feature, Polygons):
        return found.reshape(-1, 2)  # COCO's flat lists
    if found.ndim != len(shape) or found.shape[-1] != shape[-1]:
        remedy = "give (x, y) for each vertex or a flat list of them" if shape == (None, 2) else "reshape it in read"
        raise mismatch(feature, f"numbers of shape {shape_text(found.shape)}", remedy)
    return found


def _spread(values: np.ndarray, is_shown: np.ndarray) -> np.ndarray:
    """Scale numbers (height, width, channels) to uint8, from the smallest, 0, to the largest, 255."""
    shown = values[is_shown]
    least, most = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 0.0)
    with np.errstate(invalid="ignore"):
        levels = np.clip((values.astype(np.float64) - least) / max(most - least, 1e-9), 0, 1) * 255
    return np.nan_to_num(levels).astype(np.uint8)


def _encoded(feature: Feature, pixels: np.ndarray, encode: Callable[[np.ndarray], bytes]) -> bytes:
    """Encode an array to its column; refuse one that cannot be stored or read back."""
    found = f"{pixels.dtype} {shape_text(pixels.shape)}"
    if pixels.shape[0] * pixels.shape[1] > codecs.MAX_PIXELS:
        remedy = f"readers accept at most {codecs.MAX_PIXELS} pixels: tile it or shrink it in read"
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
    """Pack 8-bit colours (..., 3) into 24 bits, uint32 (...)."""
    red, green, blue = (colours[..., channel].astype(np.uint32) for channel in range(3))
    found: np.ndarray = red << 16 | green << 8 | blue
    return found


@functools.lru_cache(maxsize=4)
def _ids_by_colour(palette: tuple[tuple[int, int, int], ...], dtype: str) -> np.ndarray:
    """Return the first class of each packed 24-bit colour, (2**24,); the largest number for colours without one."""
    table = np.full(1 << 24, _MOST_IDS[dtype] - 1, dtype)
    for number, code in reversed([*enumerate(_packed(np.array(palette, np.uint8)).tolist())]):
        table[code] = number
    return table


_GRID = 32
"""Minimum rows and columns of the pixel grid for statistics; smaller pictures are used whole."""


def _grid(pixels: np.ndarray) -> np.ndarray:
    """Return every k-th row and column of a picture, with approximately the same mean and deviation."""
    step = max(1, min(pixels.shape[:2]) // _GRID)
    return pixels[::step, ::step]


built_in(Depth, Image, Keypoints, Mask, Polygons)
