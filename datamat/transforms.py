"""How the copies of a sample are drawn: the writer's `augment`, then the transform of the run.

    sample ── augment(sample, rng) ──> samples ── transform ──> samples        seeded by (seed, key, copy) alone

A transform is a callable `(sample, rng) -> sample | iterable of samples`, or an albumentations pipeline. A pipeline
is recognised by its methods (albumentations is never imported here) and gets images, masks and boxes under the
names it knows. Every source of chance that code may draw from is set anew for each copy: the `rng` that is handed
over, the generators of the pipeline, and the global ones of `random` and `numpy.random`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import numpy as np

from datamat.errors import OptionError, SchemaError
from datamat.features import BBoxes, ClassLabel, Features, Image, Mask
from datamat.fingerprint import fingerprint
from datamat.seeding import sample_seed, seed_globals

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Augmenter", "forbid_update_check"]

Sample: TypeAlias = dict[str, Any]
Hook: TypeAlias = Callable[[Sample, np.random.Generator], Any]

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
class Augmenter:
    """Draws the copies of a sample; equal arguments of `draw` give equal samples in any process and order.

    Picklable by dill. Not thread-safe where the transform is not: a pipeline holds the generators of one draw.

    Args:
        features: of the samples.
        transform: an albumentations pipeline, a callable `(sample, rng) -> sample | iterable of samples`, or None.
        augment: the writer's hook, of the same form, or None.

    Raises:
        OptionError: the transform is neither, or a pipeline would leave a field out of step with the image.

    Example:
        >>> from datamat.features import Scalar
        >>> def shift(sample, rng):
        ...     return {**sample, "x": sample["x"] + int(rng.integers(100))}
        >>> augmenter = Augmenter(Features({"x": Scalar("int64")}), shift)
        >>> augmenter.draw({"key": "a", "x": 0}, key="a", copy=1, seed=7)
        [{'key': 'a', 'x': 57}]
    """

    features: Features
    transform: Any = None
    augment: Hook | None = None
    _stages: tuple[_Stage, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages: list[_Stage] = [] if self.augment is None else [_Call(self.augment)]
        if self.transform is not None:
            stages.append(_stage_of(self.transform, self.features))
        object.__setattr__(self, "_stages", tuple(stages))

    def draw(self, sample: Mapping[str, Any], *, key: str, copy: int, seed: int) -> list[Sample]:
        """Return one copy of a sample: as many samples as the hook and the transform make of it, mostly one.

        Sets the global random states of `random` and `numpy.random`.

        Args:
            sample: a value for each field; it is not written to, whatever hook and transform do.
            key: of the input row.
            copy: number of the copy, from 0.
            seed: of the run, not negative.

        Raises:
            SchemaError: the hook or the transform returned no sample, or the sample lacks a field.
            InputError: an encoded image of the sample does not decode.
            OptionError: a label cannot pass through albumentations unchanged.
        """
        return _drawn(self._stages, self.features, sample, _chance(seed, key, copy))

    def check_determined(self, sample: Mapping[str, Any], *, key: str, seed: int) -> None:
        """Draw a copy twice and compare: chance of a transform's own would give other bytes in every run.

        Raises:
            OptionError: the two differ; the message names the transforms that do it.
        """

        def differs(stages: Sequence[_Stage]) -> bool:
            first, again = (
                fingerprint(_drawn(stages, self.features, sample, _chance(seed, key, 0)), where="sample")
                for _ in range(2)
            )
            return first != again

        if not differs(self._stages):
            return
        wrong = []
        for part in [part for stage in self._stages for part in stage.parts()]:
            # A part taken alone may miss what those before it make, and fail: then it is not named.
            with contextlib.suppress(Exception):
                wrong += [part.name] if differs([part]) else []
        names = ", ".join(dict.fromkeys(wrong or [stage.name for stage in self._stages]))
        raise OptionError(
            f"{names}: drawing the same copy of sample {key!r} twice gave two results; want one that depends on "
            "(seed, key, copy) alone: draw from the rng that is handed over, from self.random_generator or "
            "self.py_random of the transform, or from random and numpy.random, which are seeded for each copy"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Chance:
    """The generators of one copy: for the hook and callables, and the two that a pipeline draws from."""

    rng: np.random.Generator
    pipeline_rng: np.random.Generator
    pipeline_random: random.Random


def _chance(seed: int, key: str, copy: int) -> _Chance:
    """Return the generators of one copy and seed the global ones: independent streams of one `SeedSequence`."""
    sequence = sample_seed(seed, key, copy)
    # PCG64 takes the first 8 of these words: `rng` is `seeding.sample_rng`, and the others share none with it.
    *_, numpy_word, random_word, global_word = (int(word) for word in sequence.generate_state(11))
    seed_globals(global_word)
    return _Chance(
        rng=np.random.Generator(np.random.PCG64(sequence)),
        pipeline_rng=np.random.Generator(np.random.PCG64(numpy_word)),
        pipeline_random=random.Random(random_word),  # noqa: S311 -- not for secrets
    )


def _drawn(stages: Sequence[_Stage], features: Features, sample: Mapping[str, Any], chance: _Chance) -> list[Sample]:
    samples = [dict(sample)]
    for stage in stages:
        inputs = [_owned(features.prepare(before)) for before in samples]
        samples = [after for before in inputs for after in _samples_of(stage.apply(before, chance), stage.name)]
    return samples


def _owned(sample: Sample) -> Sample:
    """Return the sample with arrays of its own: transforms write in place, and the copies share what was decoded.

    A copy is 11 us for uint8 (360, 480, 3). Read-only arrays would cost less, but cv2 and C extensions refuse them in
    so many ways that a second attempt with a copy cannot be told from an error of the user's.
    """
    return {name: value.copy() if isinstance(value, (np.ndarray, list)) else value for name, value in sample.items()}


def _samples_of(result: Any, name: str) -> list[Sample]:
    """Return what a hook or a transform made as a list of samples, with the random states still set."""
    if isinstance(result, Mapping):
        return [dict(result)]
    found = f"a {type(result).__name__}" if result is not None else "None: is a `return` missing?"
    if isinstance(result, Iterable) and not isinstance(result, (str, bytes, np.ndarray)):
        samples = list(result)
        strangers = [sample for sample in samples if not isinstance(sample, Mapping)]
        if samples and not strangers:
            return [dict(sample) for sample in samples]
        found += f" that holds a {type(strangers[0]).__name__}" if strangers else " with no samples"
    raise SchemaError(
        f"{name} returned {found}; want a sample (a dict of values by feature name) or an iterable of them"
    )


class _Stage(Protocol):
    """One step of the drawing."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def apply(self, sample: Sample, chance: _Chance) -> Any:
        """Return a sample or an iterable of samples; may write to `sample`."""

    def parts(self) -> Iterator[_Stage]:
        """Yield the steps it is made of, to find out which of them misbehaves."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A stage that is a function of (sample, rng)."""

    function: Hook

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def apply(self, sample: Sample, chance: _Chance) -> Any:
        return self.function(sample, chance.rng)

    def parts(self) -> Iterator[_Stage]:
        yield self


@dataclasses.dataclass(frozen=True, slots=True)
class _Pipeline:
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

    def apply(self, sample: Sample, chance: _Chance) -> Sample:
        # Not `set_random_seed`: it gives every transform the same seed, so that all of a pipeline's first draws are
        # equal: two flips with p=0.5 would happen both or not at all. This shares one stream among them, and takes
        # 1 us instead of 62 for four transforms.
        self.transform.set_random_state(chance.pipeline_rng, chance.pipeline_random)
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

    def parts(self) -> Iterator[_Stage]:
        # Without boxes: a part knows only albumentations' inner form of them.
        boxed = {*self.boxes, *self.labels}
        keywords = {name: keyword for name, keyword in self.keywords.items() if name not in boxed}
        for leaf in _leaves(self.transform):
            yield _Pipeline(leaf, keywords, self.features, options={"force_apply": True})


def _leaves(transform: Any) -> Iterator[Any]:
    children = getattr(transform, "transforms", None)
    if children is None:
        yield transform
    else:
        for child in children:
            yield from _leaves(child)


def _stage_of(transform: Any, features: Features) -> _Stage:
    if isinstance(transform, type) or not callable(transform):
        found = (
            f"the class {transform.__qualname__}" if isinstance(transform, type) else f"a {type(transform).__name__}"
        )
        raise OptionError(
            f"transform is {found}; want an albumentations pipeline (an instance) or a callable (sample, rng) -> sample"
        )
    if hasattr(transform, "set_random_state") and hasattr(transform, "available_keys"):
        return _pipeline_of(transform, features)
    call = _Call(transform)
    try:
        signature = inspect.signature(transform)
    except ValueError:  # some callables written in C have none
        return call
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise OptionError(
            f"transform {call.name} cannot be called with (sample, rng): {error}; give it these two parameters"
        ) from error
    return call


def _pipeline_of(transform: Any, features: Features) -> _Pipeline:
    """Match the fields of a sample with the keywords of a pipeline; refuse where one would get out of step.

    A field that bears a name the pipeline knows is passed under it, whatever its type. Where none is called `image`,
    `mask` or `bboxes`, the first `Image`, `Mask` or `BBoxes` field stands in.
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
    return _Pipeline(
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
