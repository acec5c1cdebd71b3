"""The stage that is an albumentations pipeline: it gets images, masks and boxes under the names it knows.

A field that it would leave out of step with the image is refused before anything is drawn. albumentations is never
imported here: a pipeline is known by its methods.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.errors import OptionError, SchemaError
from datamat.features import BBoxes, ClassLabel, Features, Image, Mask
from datamat.transforms.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from datamat.transforms.stages import Chance, Sample

__all__ = ["Pipeline", "forbid_update_check", "is_pipeline", "pipeline_of"]

_PIXEL_FORMATS = frozenset({"coco", "pascal_voc"})
"""albumentations' box formats that count in pixels; the others are fractions of width and height."""


def forbid_update_check() -> None:
    """Keep `import albumentations` from asking the package registry for a newer version.

    Sets `NO_ALBUMENTATIONS_UPDATE` in this process unless the user did. For processes of datamat's own, before
    anything is unpickled in them: the environment of the caller's process is the caller's.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline(Stage):
    """A stage that is an albumentations pipeline, or one transform of it.

    Attributes:
        transform: the pipeline.
        keywords: under which keyword each field is passed; fields not named here are left as they are.
        features: of the fields.
        boxes: the fields that are boxes, in `box_format`.
        labels: the fields that have one entry for each box.
        options: further keywords of each call.
    """

    transform: Any
    keywords: Mapping[str, str]
    features: Features
    boxes: tuple[str, ...] = ()
    box_format: str = "albumentations"
    labels: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.transform).__qualname__

    def apply(self, sample: Sample, chance: Chance) -> Sample:
        # Not `set_random_seed`: it gives every transform the same seed, so that all of a pipeline's first draws are
        # equal: two flips with p=0.5 would happen both or not at all. This shares one stream among them, and takes
        # 1 us instead of 62 for four transforms.
        self.transform.set_random_state(*chance.of_pipeline)
        missing = [name for name in self.keywords if name not in sample]
        if missing:
            raise SchemaError(f"the sample has no field {missing[0]!r}, which {self.name} needs; return it from read")
        data = {keyword: sample[name] for name, keyword in self.keywords.items()}
        size = data["image"].shape[:2]
        for name in self.boxes:
            data[self.keywords[name]] = _boxes_to(self.box_format, data[self.keywords[name]], size)
        for name in self.labels:
            data[name] = _label_column(name, self.features[name], data[name])
        result = self.transform(**data, **self.options)
        for name in self.boxes:
            keyword = self.keywords[name]
            result[keyword] = _boxes_from(self.box_format, result[keyword], result["image"].shape[:2])
        for name in self.labels:  # a list where no box is left
            result[name] = np.asarray(result[name], data[name].dtype)
        return {**sample, **{name: result[keyword] for name, keyword in self.keywords.items()}}

    def parts(self) -> Iterator[Stage]:
        # Without boxes: a part knows only albumentations' inner form of them.
        boxed = {*self.boxes, *self.labels}
        keywords = {name: keyword for name, keyword in self.keywords.items() if name not in boxed}
        for leaf in _leaves(self.transform):
            yield Pipeline(leaf, keywords, self.features, options={"force_apply": True})


def _leaves(transform: Any) -> Iterator[Any]:
    children = getattr(transform, "transforms", None)
    if children is None:
        yield transform
    else:
        for child in children:
            yield from _leaves(child)


def is_pipeline(transform: Any) -> bool:
    """Return whether a transform is an albumentations pipeline."""
    return hasattr(transform, "set_random_state") and hasattr(transform, "available_keys")


def pipeline_of(transform: Any, features: Features) -> Pipeline:
    """Match the fields of a sample with the keywords of a pipeline; refuse where one would get out of step.

    A field that bears a name the pipeline knows is passed under it, whatever its type. Where none is called `image`,
    `mask` or `bboxes`, the first `Image`, `Mask` or `BBoxes` field stands in.

    Raises:
        OptionError: a field, or the labels of its boxes, would get out of step.
    """
    known = {"image", "mask", *transform.available_keys}
    keywords = {name: name for name in features if name in known}
    for kind, keyword in ((Image, "image"), (Mask, "mask"), (BBoxes, "bboxes")):
        free = [name for name in _fields_of(features, kind) if name not in keywords]
        if free and keyword not in keywords:
            keywords[free[0]] = keyword
    boxes = getattr(getattr(transform, "processors", {}).get("bboxes"), "params", None)
    labels = tuple(boxes.label_fields or ()) if boxes else ()
    refusals = [*_unmatched(features, keywords, transform), *_unlabelled(features, labels)]
    if refusals:
        raise OptionError(f"transform {type(transform).__qualname__}: {refusals[0]}")
    return Pipeline(
        transform,
        keywords,
        features,
        boxes=tuple(_fields_of(features, BBoxes)),
        box_format=boxes.format if boxes else "",
        labels=labels,
    )


def _unmatched(features: Features, keywords: Mapping[str, str], transform: Any) -> Iterator[str]:
    """Yield which fields a pipeline would leave out of step with the image, each with what to do."""
    if "image" not in keywords.values():
        yield f"it transforms images, but the features ({', '.join(features)}) hold no Image; use a callable instead"
    for kind, target in ((Image, "image"), (Mask, "mask"), (BBoxes, "bboxes")):
        for name in _fields_of(features, kind):
            if name not in keywords:
                yield (
                    f"field {name!r} would get out of step with the image, as the pipeline does not know it; "
                    f"pass additional_targets={{{name!r}: {target!r}}} to it"
                )
    processors = getattr(transform, "processors", {})
    for name, keyword in keywords.items():
        option = {"bboxes": "bbox_params", "keypoints": "keypoint_params"}.get(keyword)
        if option and keyword not in processors:
            yield f"field {name!r} would get out of step with the image; pass {option}= to the pipeline"


def _unlabelled(features: Features, labels: Sequence[str]) -> Iterator[str]:
    """Yield which labels of boxes a pipeline would leave out of step with its boxes, each with what to do."""
    for name in labels:
        if name not in features:
            yield f"bbox_params has the label field {name!r}; want one of the features: {', '.join(features)}"
    if not _fields_of(features, BBoxes):
        return
    for name in _fields_of(features, ClassLabel):
        if name not in labels and features[name].to_json()["shape"]:
            yield f"field {name!r} would get out of step when a box is dropped; add it to label_fields of bbox_params"


def _fields_of(features: Features, kind: type) -> list[str]:
    return [name for name, feature in features.items() if isinstance(feature, kind)]


def _label_column(name: str, feature: Any, value: Any) -> np.ndarray:
    """Return labels as one array of a fixed dtype.

    albumentations settles how it carries labels by the first that a process sees: fixed here, nothing depends on which
    sample that is. It carries them as float32.
    """
    column: Any = feature.encode(name, value)[name] if isinstance(feature, ClassLabel) else np.asarray(value)
    if column.dtype.kind in "iuf" and not np.array_equal(
        column.astype(np.float32).astype(column.dtype), column, equal_nan=column.dtype.kind == "f"
    ):
        raise OptionError(
            f"field {name!r} of label_fields holds {column.dtype} values that albumentations, which carries labels "
            "as float32, would change; pass row numbers as labels and look the values up in a callable transform"
        )
    return np.asarray(column)


def _boxes_to(box_format: str, boxes: Any, size: tuple[int, int]) -> np.ndarray:
    """Return boxes float32 (n, 4), (ymin, xmin, ymax, xmax) as fractions, in one of albumentations' formats."""
    corners = np.asarray(boxes, np.float32).reshape(-1, 4)[:, [1, 0, 3, 2]]
    if box_format in _PIXEL_FORMATS:
        corners *= _scale(size)
    low, high = corners[:, :2], corners[:, 2:]
    if box_format == "coco":
        return np.hstack([low, high - low])
    if box_format == "yolo":
        return np.hstack([(low + high) / 2, high - low])
    return corners


def _boxes_from(box_format: str, boxes: Any, size: tuple[int, int]) -> np.ndarray:
    """Return boxes of one of albumentations' formats as `BBoxes` holds them."""
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    first, second = corners[:, :2], corners[:, 2:]
    if box_format == "coco":
        corners = np.hstack([first, first + second])
    if box_format == "yolo":
        corners = np.hstack([first - second / 2, first + second / 2])
    if box_format in _PIXEL_FORMATS:
        corners /= _scale(size)
    # What sticks out is rounding: the pipeline clips boxes itself.
    return np.clip(corners, 0, 1)[:, [1, 0, 3, 2]]


def _scale(size: tuple[int, int]) -> np.ndarray:
    height, width = size
    return np.array([width, height, width, height], np.float32)
