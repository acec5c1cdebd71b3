"""Optional protocols of features: moving values with their image, and drawing them in previews."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

Target: TypeAlias = Literal["image", "mask", "depth", "bboxes", "keypoints", "points", "array"]


class Geometry(abc.ABC):
    """Values with a position in the image, which must follow it in geometric transforms.

    A feature derives from `Feature` and `Geometry`. For other features, arrays except class ids count as "array".
    """

    __slots__ = ()

    @abc.abstractmethod
    def target(self) -> Target | None:
        """Return how a value must follow the image in geometric transforms.

        "image", "mask", "bboxes" (laid out as in `BBoxes`) and "keypoints" are albumentations' targets, and "depth" is
        transformed as an additional mask. With "points", the results of `points` are moved as keypoints, all fields
        together, and passed to `with_points`. "array" leaves it to the user: the run is refused until the pipeline has
        a target for the field, or `untouched=` names it. None means that the value need not follow.
        """

    def points(self, value: Any) -> np.ndarray:
        """Return the points of a value that move with the image, if `target` is "points".

        Returns:
            float32 (n, 2), each (x, y) in pixels; NaN for a point without a position, which is not moved.
        """
        raise NotImplementedError(f"{type(self).__name__} has the target 'points', but does not define points")

    def with_points(
        self, value: Any, points: np.ndarray, size: tuple[int, int] | None
    ) -> tuple[Any, np.ndarray | None]:
        """Return a value with its points moved.

        Args:
            value: the value before.
            points: float32 (n, 2), the moved points; NaN for a point that had no position or was removed.
            size: height and width of the transformed image, in pixels; None to keep every row.

        Returns:
            The value, and the numbers of the remaining rows, int64 (k,), or None if all remain.
        """
        raise NotImplementedError(f"{type(self).__name__} has the target 'points', but does not define with_points")

    def needs_every_point(self) -> bool:
        """Return True if `with_points` also needs points that left the image."""
        return False

    def may_lose_rows(self) -> bool:
        """Return True if `with_points` may drop rows of a value."""
        return False


class Preview:
    """Values drawn in previews. A feature derives from `Feature` and `Preview`.

    Attributes:
        preview: what previews draw: "image" for a picture returned by `display`, "mask" for class ids overlaid on it,
            "depth" for a picture below it, "outlines" for points and lines drawn on it, None for nothing.
    """

    __slots__ = ()

    preview: ClassVar[Literal["image", "mask", "depth", "outlines"] | None] = None

    def display(self, value: Any) -> np.ndarray:
        """Return a decoded value for drawing.

        Returns:
            uint8 (height, width, 1, 3 or 4) if `preview` is "image" or "depth"; class ids, uint8 or uint16 (height,
            width), if it is "mask".
        """
        picture: np.ndarray = value
        return picture

    def outlines(self, value: Any, height: int, width: int) -> list[np.ndarray]:
        """Return the outlines to draw on the image, if `preview` is "outlines".

        Args:
            value: a decoded value.
            height: height of the image in pixels.
            width: width of the image in pixels.

        Returns:
            float32 (k, 2) of (x, y) in pixels for each: nothing for k = 0, a point for k = 1, else the vertices of a
            closed outline. Labels and scores of the sample are drawn beside them if their numbers match.
        """
        del value, height, width
        return []

    def outline_names(self) -> tuple[str, ...]:
        """Return the names of the outlines, such as the points of a face, in order; () if there are none.

        If `outlines` returns a multiple of their number, the names repeat.
        """
        return ()

    def class_colours(self) -> tuple[tuple[int, int, int], ...]:
        """Return a colour (red, green, blue) for each class id in previews; () to choose them automatically."""
        return ()
