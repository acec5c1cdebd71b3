"""What a feature may add: how its values follow the image when it moves, and how previews draw them."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

__all__ = ["Geometry", "Preview", "Target"]

Target: TypeAlias = Literal["image", "mask", "depth", "bboxes", "keypoints", "points", "array"]


class Geometry(abc.ABC):
    """Values that have a place in the image, and must follow it when a geometric transform moves it.

    A feature derives from `Feature` and `Geometry`. Of others, arrays that are no class ids count as "array".
    """

    __slots__ = ()

    @abc.abstractmethod
    def target(self) -> Target | None:
        """Return how a value must follow the image when a geometric transform moves it.

        "image", "mask", "bboxes" (laid out as in `BBoxes`) and "keypoints" are albumentations' targets, and "depth" is
        what it transforms as another mask. "points" has `points` moved as its keypoints, all fields together, and given
        to `with_points`. "array" leaves it to the user: the run is refused until the pipeline has a target for the
        field, or `untouched=` names it. None means that the value need not follow.
        """

    def points(self, value: Any) -> np.ndarray:
        """Return the points of a value that move with the image, where `target` is "points".

        Returns:
            float32 (n, 2), each (x, y) in pixels; NaN for one that has no place, which is not moved.
        """
        raise NotImplementedError(f"{type(self).__name__} has the target 'points', and does not define points")

    def with_points(
        self, value: Any, points: np.ndarray, size: tuple[int, int] | None
    ) -> tuple[Any, np.ndarray | None]:
        """Return a value whose points were moved.

        Args:
            value: the value before.
            points: float32 (n, 2), the points of `points`, moved; NaN for one that had no place or was removed.
            size: height and width of the image afterwards, in pixels; None to keep every row.

        Returns:
            The value, and the numbers of the rows that it kept, int64 (k,), or None if it keeps all.
        """
        raise NotImplementedError(f"{type(self).__name__} has the target 'points', and does not define with_points")

    def needs_every_point(self) -> bool:
        """Return True if `with_points` cannot do without a point that left the image."""
        return False

    def may_lose_rows(self) -> bool:
        """Return True if `with_points` may drop rows of a value."""
        return False


class Preview:
    """Values that previews draw. A feature derives from `Feature` and `Preview`.

    Attributes:
        preview: what previews draw: "image" for a picture that `display` returns, "mask" for class ids laid over it,
            "depth" for a picture below it, "outlines" for points and lines drawn over it, None for nothing.
    """

    __slots__ = ()

    preview: ClassVar[Literal["image", "mask", "depth", "outlines"] | None] = None

    def display(self, value: Any) -> np.ndarray:
        """Return a decoded value as previews draw it.

        Returns:
            uint8 (height, width, 1, 3 or 4) if `preview` is "image" or "depth"; class ids, uint8 or uint16 (height,
            width), if it is "mask".
        """
        picture: np.ndarray = value
        return picture

    def outlines(self, value: Any, height: int, width: int) -> list[np.ndarray]:
        """Return what previews draw over the image where `preview` is "outlines".

        Args:
            value: a decoded value.
            height: height of the image in pixels.
            width: width of the image in pixels.

        Returns:
            float32 (k, 2) of (x, y) in pixels for each: nothing for k = 0, a point for k = 1, else the vertices of a
            closed outline. Labels and scores of the sample are drawn beside them where there are as many.
        """
        del value, height, width
        return []

    def outline_names(self) -> tuple[str, ...]:
        """Return the names of what `outlines` returns, as of the points of a face, in order; () where it has none.

        Where `outlines` returns several times as many, the names repeat.
        """
        return ()

    def class_colours(self) -> tuple[tuple[int, int, int], ...]:
        """Return a colour (red, green, blue) for each class id in previews; () has them chosen."""
        return ()
