"""Stages for albumentations pipelines and for plain functions."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from datamat.errors import OptionError, SchemaError
from datamat.features.base import named
from datamat.transforms.seeding import RandomStreams, Sample, Stage, signature_of, with_rng
from datamat.transforms.targets import geometry_of, target_of
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from datamat.features import Feature, Features

# ---------------------------------------------------------------- functions
#
# The stage that calls a function.


Hook: TypeAlias = Callable[..., Any]
"""A function of (sample) or (sample, rng) that returns a sample or an iterable of samples."""


@final
@frozen()
class FunctionStage(Stage):
    """A stage that calls a function with (sample), or with (sample, rng) if its signature asks for a generator.

    Attributes:
        function: the user's function; `with_rng` decides how it is called.

    Raises:
        OptionError: the function is a class or not callable, or takes other arguments.
    """

    function: Hook
    _drawing: Hook | None = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            what = f"the class {self.function.__qualname__}" if isinstance(self.function, type) else repr(self.function)
            raise OptionError(
                f"transform is {what}; want an albumentations pipeline (an instance), or a callable (sample) -> sample "
                "or (sample, rng) -> sample"
            )
        object.__setattr__(self, "_drawing", with_rng(self.function))
        self._check_signature()

    @property
    def name(self) -> str:
        function = self.function.func if isinstance(self.function, functools.partial) else self.function
        return getattr(function, "__qualname__", type(function).__qualname__)

    def apply(self, sample: Sample, streams: RandomStreams) -> Any:
        return self.function(sample) if self._drawing is None else self._drawing(sample, streams.rng)

    def parts(self) -> Iterator[Stage]:
        yield self

    def for_thread(self) -> Stage:
        return self

    def _check_signature(self) -> None:
        try:
            bind = signature_of(self.function).bind
        except (TypeError, ValueError):  # some callables written in C
            return
        try:
            if self._drawing is None:
                bind(None)
            elif self._drawing is self.function:
                bind(None, None)
            else:
                bind(None, rng=None)
        except TypeError as error:
            raise OptionError(
                f"transform {self.name} can be called neither with (sample) nor with (sample, rng): {error}; give it "
                "one of these signatures"
            ) from error


# ---------------------------------------------------------------- pipelines of albumentations
#
# The stage for an albumentations pipeline, which gets images, masks and boxes by the keywords it knows.
#
# A field that would get out of step with the image is rejected before anything is drawn. albumentations is never
# imported here: a pipeline is recognised by its methods.


_PIXEL_FORMATS = frozenset({"coco", "pascal_voc"})
"""The box formats of albumentations that are in pixels; the others are fractions of width and height."""

_KINDS = ("image", "images", "mask", "masks", "mask3d", "masks3d", "volume", "volumes", "bboxes", "keypoints")
"""The target types of albumentations; it passes other keywords through unchanged."""

_OPTIONS = {"bboxes": "bbox_params", "keypoints": "keypoint_params"}
"""The option without which a pipeline does not transform a target type."""


def forbid_update_check() -> None:
    """Keep `import albumentations` from asking the package registry for a newer version.

    Sets `NO_ALBUMENTATIONS_UPDATE` in this process unless the user did. Called in datamat's own processes before they
    unpickle anything, and never in the caller's process, whose environment is left alone.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


@final
@frozen()
class AlbumentationsStage(Stage):
    """A stage that runs an albumentations pipeline, or one transform of it.

    Attributes:
        transform: the pipeline.
        keywords: keyword of each field passed to the pipeline; other fields stay unchanged.
        features: schema of the samples.
        boxes: names of the fields that hold boxes.
        points: names of the fields whose points are passed, all together, as keypoints.
        point_labels: names of the fields with one entry per row of the first of `points` that may lose rows.
        box_format: albumentations' name for the pipeline's box format.
        labels: names of the fields with one entry per box.
        options: further keyword arguments of each call.
    """

    transform: Any
    keywords: Mapping[str, str]
    features: Features
    boxes: tuple[str, ...] = ()
    box_format: str = "albumentations"
    labels: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    point_labels: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.transform).__qualname__

    def apply(self, sample: Sample, streams: RandomStreams) -> Sample:
        # Not `set_random_seed`, which gives every transform the same seed: their first draws would be equal, and two
        # flips with p=0.5 would both happen or neither. This shares one stream among them, and takes 1 us instead of
        # 62 us for four transforms.
        self.transform.set_random_state(*streams.of_pipeline)
        sample = dict(self.features.flatten(sample))
        missing = [name for name in (*self.keywords, *self.points) if name not in sample]
        if missing:
            raise SchemaError(
                f"the sample has no field {missing[0]!r}, which {self.name} needs; every sample must hold it"
            )
        # Fields that are None stay None, but the pipeline needs boxes and their labels in any case.
        present = {name: keyword for name, keyword in self.keywords.items() if sample[name] is not None}
        data = {keyword: sample[name] for name, keyword in present.items()}
        if "image" not in data:  # pipelines need an image
            return self.features.unflatten(sample)
        size = data["image"].shape[:2]
        has_boxes = all(name in present for name in self.boxes)
        for name in self.boxes:
            data[self.keywords[name]] = _boxes_to(self.box_format, data.get(self.keywords[name], ()), size)
        followers = [name for name in self.labels if name in self.points]
        data |= {name: self._labels_of(name, sample, data, has_boxes=has_boxes) for name in self.labels}
        points = _Points.of(sample, self, size) if self.points else None
        if points is not None:
            data["keypoints"] = points.as_keypoints()
            data |= dict.fromkeys(self.point_labels, np.zeros(len(data["keypoints"])))
        try:
            result = self.transform(**data, **self.options)
        except ValueError as error:
            found = {name: np.reshape(sample[name], (-1, 4)) for name in self.boxes if has_boxes}
            flat = [name for name, boxes in found.items() if (boxes[:, 2:] <= boxes[:, :2]).any()]
            if not flat:
                raise
            raise SchemaError(
                f"field {flat[0]!r} holds a box of no width or height, which {self.name} refuses ({error}); pass "
                "filter_invalid_bboxes=True to BboxParams, which drops such boxes, or leave them out in read"
            ) from error
        for name in self.boxes:
            keyword = self.keywords[name]
            result[keyword] = _boxes_from(self.box_format, result[keyword], result["image"].shape[:2])
        for name in self.labels:  # a list where no box is left
            result[name] = np.asarray(result[name], data[name].dtype)
        kept = () if has_boxes else self.labels
        found = {name: result[keyword] for name, keyword in present.items() if name not in kept}
        moved = points.moved(result["keypoints"], result["image"].shape[:2]) if points is not None else {}
        if has_boxes:
            moved |= {name: moved[name][result[name]] for name in followers if name in moved}
        return self.features.unflatten({**sample, **found, **moved})

    def _labels_of(self, name: str, sample: Sample, data: Mapping[str, Any], *, has_boxes: bool) -> np.ndarray:
        """Return the labels to pass for a field; for a field of points, row numbers."""
        if not has_boxes:
            return np.empty(0, np.int64)
        if name not in self.points:
            return _label_column(name, self.features[name], data[name])
        if sample[name] is not None:
            return np.arange(len(sample[name]))
        return np.zeros(len(data[self.keywords[self.boxes[0]]]) if self.boxes else 0)

    @property
    def num_coins(self) -> int:
        # A container tosses one for itself, `random() < p`, even if p is 1; a single transform does not (2.0.8).
        return _num_sure(self.transform)

    def parts(self) -> Iterator[Stage]:
        # Without boxes: the parts expect albumentations' internal form of them.
        boxed = {*self.boxes, *self.labels, *self.point_labels}
        keywords = {name: keyword for name, keyword in self.keywords.items() if name not in boxed}
        for leaf in _leaves(self.transform):
            yield AlbumentationsStage(leaf, keywords, self.features, options={"force_apply": True})

    def for_thread(self) -> Stage:
        # A pipeline holds the generators of its current draw.
        return dataclasses.replace(self, transform=copy.deepcopy(self.transform))


@final
@frozen()
class _Points:
    """The points of all fields of one sample, passed through a pipeline.

    Attributes:
        sample: the sample before the pipeline.
        stage: the stage, which names the fields.
        positions: float32 (n, 2), the points of all fields, one field after the other; NaN for absent points.
        counts: number of points of each field that is not None.
    """

    sample: Sample
    stage: AlbumentationsStage
    positions: np.ndarray
    counts: Mapping[str, int]

    @classmethod
    def of(cls, sample: Sample, stage: AlbumentationsStage, size: tuple[int, int]) -> _Points:
        """Return the points of a sample, given the (height, width) of its image."""
        features = stage.features
        found = {
            name: geometry_of(features[name]).points(sample[name]) for name in stage.points if sample[name] is not None
        }
        positions = np.concatenate([np.zeros((0, 2), np.float32), *found.values()])
        if _removes_points(stage.transform):  # albumentations raises if one is outside before the first transform
            with np.errstate(invalid="ignore"):
                is_outside = ((positions < 0) | (positions >= [size[1], size[0]])).any(axis=1)
            positions[is_outside] = np.nan
        return cls(sample, stage, positions, {name: len(points) for name, points in found.items()})

    def as_keypoints(self) -> np.ndarray:
        """Return the points in the pipeline's format, with their numbers in an extra column, which it keeps."""
        form = _processors(self.stage.transform)["keypoints"].params.format
        numbers = np.flatnonzero(~np.isnan(self.positions).any(axis=1))
        found = np.zeros((len(numbers), len(form) + 1), np.float32)  # as users pass them: float64 rounds differently
        found[:, form.index("x")], found[:, form.index("y")] = self.positions[numbers].T
        found[:, -1] = numbers
        return found

    def moved(self, keypoints: Any, size: tuple[int, int]) -> dict[str, Any]:
        """Return the fields with their moved points, and the labels of the remaining ones.

        Args:
            keypoints: the pipeline's result for `as_keypoints`.
            size: height and width of the resulting image.
        """
        form = _processors(self.stage.transform)["keypoints"].params.format
        positions = np.full(self.positions.shape, np.nan, np.float32)
        if len(keypoints):
            found = np.asarray(keypoints)
            positions[found[:, -1].astype(np.int64)] = found[:, [form.index("x"), form.index("y")]]
        values: dict[str, Any] = {}
        owner_rows, num_rows = None, None
        pieces = np.split(positions, np.cumsum([*self.counts.values()]))  # with an empty piece at the end
        for name, piece in zip(self.counts, pieces, strict=False):
            geometry, before = geometry_of(self.stage.features[name]), self.sample[name]
            value, rows = geometry.with_points(before, piece, None if name in self.stage.labels else size)
            if name not in self.stage.labels and num_rows is None and geometry.may_lose_rows():
                owner_rows, num_rows = rows, len(before)
            values[name] = value
        for name in self.stage.point_labels:
            entries = self.sample[name]
            values[name] = entries
            if num_rows is None or entries is None:  # there are no points to lose
                continue
            if len(entries) != num_rows:
                raise SchemaError(
                    f"field {name!r} of label_fields holds {len(entries)} entries for {num_rows} points or boxes; want "
                    "one for each"
                )
            column = _label_array(name, self.stage.features[name], entries)
            values[name] = column if owner_rows is None else column[owner_rows]
        return values


def _removes_points(transform: Any) -> bool:
    """Return True if a pipeline removes points that leave the image."""
    params = getattr(_processors(transform).get("keypoints"), "params", None)
    return bool(getattr(params, "remove_invisible", False))


def _num_sure(transform: Any) -> int:
    """Return the number of containers in a tree that applies each transform always or never; 0 if it is random."""
    children = getattr(transform, "transforms", ())
    probability = getattr(transform, "p", 0.5)
    if not all(is_pipeline(child) for child in children) or not (
        probability >= 1 or (probability <= 0 and not children)
    ):
        return 0
    counts = [_num_sure(child) for child in children if hasattr(child, "transforms")]
    are_sure = all(counts) and all(
        child.p >= 1 or child.p <= 0 for child in children if not hasattr(child, "transforms")
    )
    return 1 + sum(counts) if children and are_sure else 0


def _leaves(transform: Any) -> Iterator[Any]:
    children = getattr(transform, "transforms", None)
    if children is None or not all(is_pipeline(child) for child in children):  # may list functions
        yield transform
    else:
        for child in children:
            yield from _leaves(child)


def is_pipeline(transform: Any) -> bool:
    """Return True if a transform is an albumentations pipeline."""
    return hasattr(transform, "set_random_state") and hasattr(transform, "available_keys")


def albumentations_stage(transform: Any, features: Features, untouched: Collection[str] = ()) -> AlbumentationsStage:
    """Match the fields of a sample with the keywords of a pipeline; reject a field that would get out of step.

    A field whose name the pipeline knows is passed under that name, whatever its type. If none is called `image`,
    `mask` or `bboxes`, the first `Image`, `Mask` or `BBoxes` field is passed instead. A `Depth` field is passed as an
    additional mask under its own name, as a target of a copy of the pipeline. Only transforms that move pixels bring
    fields out of step: all but the `ImageOnlyTransform`s of albumentations.

    Args:
        transform: an `albumentations.Compose`, or another pipeline of that library.
        features: schema of the samples, whose fields are matched.
        untouched: names of the fields that the pipeline deliberately does not change.

    Raises:
        OptionError: a field, or the labels of its boxes, would get out of step.
    """
    keywords = matched_fields(transform, features, untouched)
    boxes = getattr(_processors(transform).get("bboxes"), "params", None)
    labels = tuple(boxes.label_fields or ()) if boxes else ()
    if "image" not in keywords.values():
        left = f", apart from untouched={tuple(untouched)}" if untouched else ""
        problem = f"it transforms images, but the features ({', '.join(features)}) have no Image{left}"
        raise _refusal(transform, f"{problem}; use a callable instead")
    refusals = [*_unmatched(features, keywords, transform, untouched)]
    points = _fields_of(features, "points") if _moves_pixels(transform) else []
    points = [name for name in points if name not in untouched]
    of_points = getattr(_processors(transform).get("keypoints"), "params", None)
    point_labels = tuple(of_points.label_fields or ()) if of_points and points else ()
    refusals += _unfit_points(features, points, keywords, transform)
    if boxes is not None or _moves_pixels(transform):  # otherwise no box is dropped
        refusals += _unlabelled(features, [*labels, *point_labels, *untouched], labels)
        refusals += _unlabelled_points(features, points, [*labels, *point_labels, *untouched], point_labels, transform)
    if refusals:
        raise _refusal(transform, refusals[0])
    return AlbumentationsStage(
        _knowing(transform, [name for name in _fields_of(features, "depth") if keywords.get(name) == name]),
        keywords,
        features,
        boxes=tuple(name for name in _fields_of(features, "bboxes") if name in keywords),
        box_format=boxes.format if boxes else "",
        labels=labels,
        points=tuple(points),
        point_labels=point_labels,
    )


def _knowing(transform: Any, names: Sequence[str]) -> Any:
    """Return a pipeline that transforms fields of these names as masks: a copy if any name is new to it."""
    new = [name for name in names if name not in _targets(transform)]
    if not new:
        return transform
    found = copy.deepcopy(transform)
    found.add_targets(dict.fromkeys(new, "mask"))
    return found


def matched_fields(transform: Any, features: Features, untouched: Collection[str]) -> dict[str, str]:
    """Return the keyword of each field passed to a pipeline."""
    targets = _targets(transform)
    known = {*targets, *_taken_as_they_are(transform)}
    keywords = {name: name for name in features if name in known and not (name in untouched and name in targets)}
    for keyword in ("image", "mask", "bboxes"):
        if keyword in keywords:
            continue
        candidates = [name for name in _fields_of(features, keyword) if name not in untouched]
        free = [name for name in candidates if name not in keywords]
        if keyword == "image":  # pipelines need one; another target of this type will do
            free += [name for name in candidates if targets.get(name) == "image"]
        if free:
            keywords[free[0]] = keyword
    keywords = {name: word for name, word in keywords.items() if target_of(features[name]) != "points"}
    keywords |= {name: name for name in _fields_of(features, "depth") if name not in {*keywords, *untouched}}
    if not _moves_pixels(transform):  # then boxes and points do not move, and need no format
        keywords = {name: keyword for name, keyword in keywords.items() if not _lacks_option(transform, keyword)}
    return keywords


def _refusal(transform: Any, problem: str) -> OptionError:
    return OptionError(f"transform {type(transform).__qualname__}: {problem}")


def _processors(transform: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(transform, "processors", {})
    return found


def _targets(transform: Any) -> dict[str, str]:
    """Return the target type of each keyword that a pipeline transforms: every type's own, and the user's additions.

    `available_keys` would also include targets of another pipeline that shares a transform.
    """
    return {**{kind: kind for kind in _KINDS}, **getattr(transform, "additional_targets", {})}


def _taken_as_they_are(transform: Any) -> set[str]:
    """Return the keywords that a pipeline accepts without transforming them: labels, and inputs of its transforms."""
    labels = {label for found in _processors(transform).values() for label in found.params.label_fields or ()}
    return labels.union(*(leaf.targets_as_params for leaf in _leaves(transform)))


def _lacks_option(transform: Any, keyword: str) -> str:
    """Return the option without which a pipeline does not transform a keyword; "" if it needs none."""
    kind = _targets(transform).get(keyword, keyword)
    return "" if kind in _processors(transform) else _OPTIONS.get(kind, "")


def _movers(transform: Any) -> list[Any]:
    """Return the transforms of a pipeline that move or crop pixels, including all transforms of unknown classes."""
    package = sys.modules.get("albumentations")
    pixel_only, nothing = getattr(package, "ImageOnlyTransform", ()), getattr(package, "NoOp", None)
    return [leaf for leaf in _leaves(transform) if not isinstance(leaf, pixel_only) and type(leaf) is not nothing]


def _moves_pixels(transform: Any) -> bool:
    return bool(_movers(transform))


def _unmatched(
    features: Features,
    keywords: Mapping[str, str],
    transform: Any,
    untouched: Collection[str],
) -> Iterator[str]:
    """Yield, for each field that a pipeline would leave out of step with the image, what is wrong and what to do."""
    movers = _movers(transform)
    if not movers:
        return
    targets = _targets(transform)
    taken = _taken_as_they_are(transform)
    names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in movers))
    for name, feature in features.items():
        kind = targets.get(keywords.get(name, ""), "")
        target = target_of(feature)
        if name in untouched or name in taken or target is None:
            continue
        if target in {"depth", "points"}:  # depth becomes a target of a copy; `_unfit_points` checks points
            continue
        if not kind:
            if target != "array":
                yield (
                    f"field {name!r} would get out of step with the image because the pipeline does not know it; pass "
                    f"additional_targets={{{name!r}: {target!r}}} to it, or untouched=({name!r},) to leave it alone"
                )
            else:
                yield _tensor_problem(name, feature, names, has_boxes=bool(_fields_of(features, "bboxes")))
        elif option := _lacks_option(transform, keywords[name]):
            yield (
                f"field {name!r} would get out of step with the image; pass {option}= to the pipeline, or "
                f"untouched=({name!r},) to leave it alone"
            )


def _tensor_problem(name: str, feature: Feature, movers: str, *, has_boxes: bool) -> str:
    verb = "change" if ", " in movers else "changes"
    per_box = "; if it has one entry for each box, add it to label_fields of bbox_params" if has_boxes else ""
    return (
        f"field {name!r} ({feature.declared()}) would get out of step with the image, which {movers} {verb}; pass "
        f"additional_targets={{{name!r}: {_kind_of(feature)!r}}} to the pipeline if it holds pixels or points of the "
        f"image{per_box}; pass untouched=({name!r},) if it need not follow"
    )


def _kind_of(feature: Feature) -> str:
    """Return the most likely target type of an array."""
    _, shape = feature.value_type()
    return "keypoints" if len(shape) == 2 and shape[1] in {2, 3} else "mask"


def _unfit_points(
    features: Features, points: Sequence[str], keywords: Mapping[str, str], transform: Any
) -> Iterator[str]:
    """Yield, for each field of points that a pipeline cannot move, what is wrong and what to do."""
    taken = [name for name, keyword in keywords.items() if keyword == "keypoints"]
    for name in points:
        wanted = "A.KeypointParams(format='xy', remove_invisible=False)"
        if "keypoints" not in _processors(transform):
            yield (
                f"field {name!r} would get out of step with the image; pass keypoint_params={wanted} to the pipeline, "
                f"or untouched=({name!r},) to leave it alone"
            )
        elif taken:
            yield f"fields {taken[0]!r} and {name!r} are both keypoints; declare {taken[0]!r} as Keypoints"
        elif geometry_of(features[name]).needs_every_point() and _removes_points(transform):
            yield (
                f"field {name!r} ({features[name].declared()}) would lose points that leave the image, and needs all "
                f"of them; pass keypoint_params={wanted} to the pipeline"
            )


def _unlabelled_points(
    features: Features, points: Sequence[str], named: Collection[str], labels: Sequence[str], transform: Any
) -> Iterator[str]:
    """Yield, for each field of labels that would get out of step with points, what is wrong and what to do."""
    for name in labels:
        if name not in features or name in points:
            wanted = ", ".join(other for other in features if other not in points)
            yield f"keypoint_params has the label field {name!r}; want one of the other features: {wanted}"
    moved = {name: geometry_of(features[name]) for name in points}
    losing = [
        name
        for name in points
        if moved[name].may_lose_rows() and (moved[name].needs_every_point() or _removes_points(transform))
    ]
    if labels and not any(geometry.may_lose_rows() for geometry in moved.values()):
        yield (
            f"keypoint_params has the label field {labels[0]!r}, but none of {', '.join(points)} has a row for each "
            "label; leave out label_fields: no rows are removed"
        )
    if not losing or _fields_of(features, "bboxes"):  # `_unlabelled` checks labels of boxes
        return
    for name in _fields_of(features, None):
        if name not in named and features[name].value_type()[1]:
            yield (
                f"field {name!r} would get out of step when a row of {losing[0]!r} is dropped; add it to label_fields "
                f"of keypoint_params, or pass untouched=({name!r},) if its entries are not those of {losing[0]!r}"
            )


def _unlabelled(features: Features, named: Collection[str], labels: Sequence[str]) -> Iterator[str]:
    """Yield, for each field of labels that would get out of step with the boxes, what is wrong and what to do."""
    for name in labels:
        if name not in features:
            yield f"bbox_params has the label field {name!r}; want one of the features: {', '.join(features)}"
    if not _fields_of(features, "bboxes"):
        return
    for name in _fields_of(features, None):
        if name not in named and features[name].value_type()[1]:
            yield f"field {name!r} would get out of step when a box is dropped; add it to label_fields of bbox_params"


def _fields_of(features: Features, target: str | None) -> list[str]:
    return [name for name, feature in features.items() if target_of(feature) == target]


def _label_column(name: str, feature: Any, value: Any) -> np.ndarray:
    """Return labels as one array of a fixed dtype.

    albumentations encodes labels by the type of the first that a process sees; a fixed dtype makes that independent of
    the sample. It passes them as float32.
    """
    column = _label_array(name, feature, value)
    if column.dtype.kind in "iuf" and not np.array_equal(
        column.astype(np.float32).astype(column.dtype), column, equal_nan=column.dtype.kind == "f"
    ):
        raise OptionError(
            f"field {name!r} of label_fields holds {column.dtype} values that albumentations would change, because it "
            "converts labels to float32; pass row numbers as labels and look up the values in a callable transform"
        )
    return np.asarray(column)


def _label_array(name: str, feature: Any, value: Any) -> Any:
    return np.asarray(value) if feature.class_names() is None else named(name, feature.encode, value)


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
    """Convert boxes from one of albumentations' formats to that of `BBoxes`."""
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    first, second = corners[:, :2], corners[:, 2:]
    if box_format == "coco":
        corners = np.hstack([first, first + second])
    if box_format == "yolo":
        corners = np.hstack([first - second / 2, first + second / 2])
    if box_format in _PIXEL_FORMATS:
        corners /= _scale(size)
    # The pipeline clips boxes itself; this removes rounding errors.
    return np.clip(corners, 0, 1)[:, [1, 0, 3, 2]]


def _scale(size: tuple[int, int]) -> np.ndarray:
    height, width = size
    return np.array([width, height, width, height], np.float32)
