"""Stages for transforms of torchvision (v2), kornia and audiomentations: one adapter per library.

An adapter passes the fields of a sample in the form that its library expects, and converts them back to their
declaration. This module imports no library until a stage runs: the caller who passes a transform has imported it.

    field                torchvision               kornia
    image                Image, uint8 (c, h, w)    "input", float32 (1, c, h, w) from 0 to 1
    mask                 Mask (h, w)               "mask", float32 (1, 1, h, w)
    boxes                BoundingBoxes, XYXY       "keypoints", float32 (1, 4 n, 2): their corners
    one entry per box    plain tensor              not passed: kornia drops no boxes

audiomentations gets one recording at a time: float32 (n,), or (channels, n), with its sample rate.

These libraries draw from the global generators of torch, `random` and `numpy.random`. `RandomStreams.as_globals` seeds
them during a call and restores them afterwards, so the draws depend on the sample alone, even with several threads.
"""

from __future__ import annotations

import abc
import copy
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from datamat.errors import OptionError, SchemaError, kind_of
from datamat.features import Audio
from datamat.features.base import as_array
from datamat.transforms.seeding import RandomStreams, Sample, Stage
from datamat.transforms.targets import target_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from datamat.features import Feature, Features


class LibraryStage(Stage):
    """A stage that runs a library's transform on the fields that the library knows.

    Attributes:
        transform: the transform.
        kinds: "image", "mask", "bboxes", "labels" or "audio" for each field passed to it; other fields stay unchanged.
        features: schema of the samples.
    """

    __slots__ = ("features", "kinds", "transform")

    package: ClassVar[str]
    """Package in which the library defines its transforms."""
    wanted: ClassVar[str] = "image"
    """Kind of field without which the stage does nothing."""

    def __init__(self, transform: Any, kinds: Mapping[str, str], features: Features) -> None:
        self.transform = copy.deepcopy(transform)  # some store their last draw, which would change fingerprints
        self.kinds = dict(kinds)
        self.features = features

    @property
    @final
    def name(self) -> str:
        return type(self.transform).__qualname__

    @final
    def apply(self, sample: Sample, streams: RandomStreams) -> Sample:
        sample = dict(self.features.flatten(sample))
        missing = [name for name, kind in self.kinds.items() if name not in sample and kind != "labels"]
        if missing:
            raise SchemaError(
                f"the sample has no field {missing[0]!r}, which {self.name} needs; every sample must hold it"
            )
        # Fields that are None stay None, and so do the labels of boxes that are None.
        given = {name: sample[name] for name in self.kinds if sample.get(name) is not None}
        kinds = {self.kinds[name] for name in given}
        if "bboxes" not in kinds and "bboxes" in self.kinds.values():
            given = {name: value for name, value in given.items() if self.kinds[name] != "labels"}
        if self.wanted not in kinds:  # without an image, the size of masks and boxes is unknown
            return self.features.unflatten(sample)
        with streams.as_globals():
            found = self.call(given)
        return self.features.unflatten({**sample, **found})

    @final
    def parts(self) -> Iterator[Stage]:
        yield self

    @final
    def for_thread(self) -> Stage:
        return type(self)(self.transform, self.kinds, self.features)

    @abc.abstractmethod
    def call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Transform fields, given by name as `decode` returns them, and return them in the same form."""

    @classmethod
    @abc.abstractmethod
    def moves_pixels(cls, leaf: Any) -> bool:
        """Return True if a transform moves or crops pixels."""

    @classmethod
    @abc.abstractmethod
    def leaves(cls, transform: Any) -> Iterator[Any]:
        """Yield the transforms that a composition consists of; any other transform itself."""

    @classmethod
    def check(cls, leaf: Any) -> str:
        """Return why a transform cannot be used, with a remedy; "" if it can."""
        del leaf
        return ""


# ---------------------------------------------------------------- torchvision


_KEEP_PIXELS = tuple(
    f"torchvision.transforms.v2.{name}" for name in ("_color", "_misc", "_meta", "_type_conversion", "_augment")
)
"""Modules whose transforms do not move pixels."""


@final
class TorchvisionStage(LibraryStage):
    """A stage that runs a transform of torchvision.transforms.v2 on a dict of all fields."""

    __slots__ = ()

    package = "torchvision.transforms.v2"

    def call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch
        from torchvision import tv_tensors

        size = next(value.shape[:2] for name, value in given.items() if self.kinds[name] == "image")
        wrapped: dict[str, Any] = {}
        for name, value in given.items():
            array = np.ascontiguousarray(value)
            match self.kinds[name]:
                case "image":
                    pixels = array if array.ndim == 3 else array[..., None]
                    wrapped[name] = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
                case "mask":
                    wrapped[name] = tv_tensors.Mask(torch.from_numpy(array))
                case "bboxes":
                    corners = torch.from_numpy(_to_corners(array, size))
                    wrapped[name] = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
                case _:
                    wrapped[name] = torch.from_numpy(array)
        found = self.transform(wrapped)
        if not isinstance(found, dict) or found.keys() != wrapped.keys():
            raise SchemaError(f"{self.name} returned {kind_of(found)}; want the fields that it was given")
        result = {name: self._array(name, found[name]) for name in given if self.kinds[name] != "bboxes"}
        after = next(value.shape[:2] for name, value in result.items() if self.kinds[name] == "image")
        for name in given:
            if self.kinds[name] == "bboxes":
                result[name] = self._boxes(name, found[name], after)
        self._check_labels(given, result)
        return result

    def _array(self, name: str, value: Any) -> Any:
        """Return a field other than boxes as an array, an image as (height, width, channels)."""
        is_picture = hasattr(value, "__array__") or hasattr(value, "getbands")
        array = np.asarray(as_array(value)) if is_picture else value
        if not isinstance(array, np.ndarray):
            raise SchemaError(f"{self.name} returned {kind_of(value)} for field {name!r}; want one tensor or picture")
        if self.kinds[name] == "image" and hasattr(value, "permute"):
            array = array.transpose(1, 2, 0)
        return np.ascontiguousarray(array)

    def _boxes(self, name: str, value: Any, size: tuple[int, int]) -> np.ndarray:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        if not isinstance(value, tv_tensors.BoundingBoxes):
            raise SchemaError(
                f"{self.name} returned {kind_of(value)} for the boxes {name!r}, whose format is unknown; "
                "leave out ToPureTensor: readers return plain arrays and tensors in any case"
            )
        corners = functional.convert_bounding_box_format(value, new_format=tv_tensors.BoundingBoxFormat.XYXY)
        return _from_corners(np.asarray(corners), size)

    def _check_labels(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Raise `SchemaError` if boxes were dropped but their labels were not."""
        for boxes in (name for name in before if self.kinds[name] == "bboxes"):
            num_before, num_after = len(before[boxes]), len(after[boxes])
            for name in (name for name in before if self.kinds[name] == "labels" and num_before != num_after):
                if len(before[name]) == num_before and len(after[name]) != num_after:
                    raise SchemaError(
                        f"{self.name} kept {num_after} of the {num_before} boxes {boxes!r} but all entries of {name!r};"
                        f" name it in the labels_getter of SanitizeBoundingBoxes, or pass untouched=({name!r},) if its "
                        "entries do not belong to boxes"
                    )

    @classmethod
    def moves_pixels(cls, leaf: Any) -> bool:
        return not type(leaf).__module__.startswith(_KEEP_PIXELS)

    @classmethod
    def leaves(cls, transform: Any) -> Iterator[Any]:
        children = getattr(transform, "transforms", None)
        if type(transform).__module__ == _SEQUENTIAL:
            children = transform.children()
        if children is None:
            yield transform
        else:
            for child in children:
                yield from cls.leaves(child)

    @classmethod
    def check(cls, leaf: Any) -> str:
        if type(leaf).__name__ in {"CutMix", "MixUp"}:
            return f"{type(leaf).__name__} mixes the samples of a batch; call it on batches, in the training loop"
        return ""


# ---------------------------------------------------------------- kornia


@final
class KorniaStage(LibraryStage):
    """A stage that runs an augmentation of kornia on a batch of one sample.

    8-bit pixels become fractions and are rounded back, so an image that is only moved keeps its values.
    """

    __slots__ = ()

    package = "kornia.augmentation"

    def call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch
        from kornia.augmentation import AugmentationSequential
        from kornia.constants import DataKey
        from torch.nn import Sequential

        size = next(value.shape[:2] for name, value in given.items() if self.kinds[name] == "image")
        keys = {"image": DataKey.INPUT, "mask": DataKey.MASK, "bboxes": DataKey.KEYPOINTS}
        # The image must come first, and kornia cannot move empty boxes.
        names = sorted(given, key=lambda name: self.kinds[name] != "image")
        names = [name for name in names if self.kinds[name] != "bboxes" or len(given[name])]
        tensors = [torch.from_numpy(_batch_of_one(self.kinds[name], given[name], size)) for name in names]
        data_keys = [keys[self.kinds[name]] for name in names]
        whole = self.transform
        if not isinstance(whole, AugmentationSequential):
            steps = whole.children() if type(whole) is Sequential else [whole]
            whole = AugmentationSequential(*steps, data_keys=data_keys)
        with torch.no_grad():
            found = whole(*tensors, data_keys=data_keys)
        found = [found] if len(names) == 1 and not isinstance(found, (list, tuple)) else found
        arrays = {name: np.asarray(value) for name, value in zip(names, found, strict=True)}
        after = next(array.shape[-2:] for name, array in arrays.items() if self.kinds[name] == "image")
        return {name: self._restored(name, array, given[name], after) for name, array in arrays.items()}

    def _restored(self, name: str, array: np.ndarray, before: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Return kornia's result for a field, in the original form and dtype of the field."""
        kind = self.kinds[name]
        if kind == "bboxes":
            corners = array.reshape(-1, 4, 2) + 0.5
            return _from_corners(np.hstack([corners.min(axis=1), corners.max(axis=1)]), size)
        pixels = array.reshape(array.shape[-3:]).transpose(1, 2, 0)  # drop the batch dimension
        if before.dtype.kind in "iu":
            bounds = np.iinfo(before.dtype)
            pixels = np.rint(pixels * (bounds.max if kind == "image" else 1)).clip(bounds.min, bounds.max)
        pixels = pixels.astype(before.dtype)
        return np.ascontiguousarray(pixels if before.ndim == 3 else pixels[..., 0])

    @classmethod
    def moves_pixels(cls, leaf: Any) -> bool:
        return not any(kind.__name__.startswith("IntensityAugmentationBase") for kind in type(leaf).__mro__)

    @classmethod
    def leaves(cls, transform: Any) -> Iterator[Any]:
        if not type(transform).__module__.startswith(("kornia.augmentation.container", _SEQUENTIAL)):
            yield transform
        else:
            for child in transform.children():
                yield from cls.leaves(child)

    @classmethod
    def check(cls, leaf: Any) -> str:
        kind = type(leaf).__name__
        if kind in {"Normalize", "Denormalize"}:
            return f"{kind} makes an image that does not fit in 8 bits; leave it out, and call it on batches"
        if any("MixAugmentation" in base.__name__ for base in type(leaf).__mro__):
            return f"{kind} mixes the samples of a batch; call it on batches, in the training loop"
        return ""


def _batch_of_one(kind: str, value: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return a field as kornia expects it: float32 (1, channels, height, width), or the corners of boxes (1, 4 n, 2).

    Boxes are passed as points, because kornia rejects boxes of no area. In kornia, the point (0, 0) is the centre of
    the first pixel, not its corner; without a correction, flipped boxes would be one pixel off.
    """
    if kind == "bboxes":
        return _to_corners(value, size)[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(1, -1, 2) - np.float32(0.5)
    pixels = value if value.ndim == 3 else value[..., None]
    scale = np.iinfo(value.dtype).max if kind == "image" and value.dtype.kind in "iu" else 1
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32) / np.float32(scale)


# ---------------------------------------------------------------- audiomentations


@final
class AudiomentationsStage(LibraryStage):
    """A stage that runs a transform of audiomentations on each recording of known sample rate in turn."""

    __slots__ = ()

    package = "audiomentations"
    wanted = "audio"

    def call(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._called(name, samples) for name, samples in given.items()}

    def _called(self, name: str, samples: np.ndarray) -> np.ndarray:
        if samples.ndim == 1:
            samples = samples[:, None]
        is_mono = samples.shape[1] == 1
        rate = self.features[name].sample_rate  # type: ignore[attr-defined]  # `_has_rate` holds
        found = self.transform(np.ascontiguousarray(samples[:, 0] if is_mono else samples.T), sample_rate=rate)
        return np.ascontiguousarray(found[:, None] if found.ndim == 1 else found.T, np.float32)

    @classmethod
    def moves_pixels(cls, leaf: Any) -> bool:
        del leaf
        return False

    @classmethod
    def leaves(cls, transform: Any) -> Iterator[Any]:
        yield transform


def _has_rate(feature: Feature) -> bool:
    return isinstance(feature, Audio) and feature.sample_rate is not None


# ---------------------------------------------------------------- fields


_SEQUENTIAL = "torch.nn.modules.container"
"""Module of `torch.nn.Sequential`, which composes transforms of torchvision or kornia."""
_FIRST_TORCHVISION = "torchvision.transforms.transforms"
_STAGES: tuple[type[LibraryStage], ...] = (TorchvisionStage, KorniaStage, AudiomentationsStage)


def of_a_library(transform: Any) -> bool:
    """Return True if a transform belongs to a library with an adapter."""
    return _stage_type(transform) is not None or type(transform).__module__ == _FIRST_TORCHVISION


def library_stage(transform: Any, features: Features, untouched: Collection[str] = ()) -> LibraryStage:
    """Return the stage for a transform that satisfies `of_a_library`; it does not change `untouched` fields.

    Raises:
        OptionError: there is no image, the transform cannot be used, or it would leave a field out of step with the
            image.
    """
    stage_type = _stage_type(transform)
    where = f"transform {type(transform).__qualname__}"
    if stage_type is None:
        raise OptionError(
            f"{where}: torchvision.transforms handles single pictures only; use torchvision.transforms.v2, which has "
            "the same transforms, and moves masks and boxes with the image"
        )
    leaves = list(stage_type.leaves(transform))
    for leaf in leaves:
        if problem := stage_type.check(leaf):
            raise OptionError(f"{where}: {problem}")
    kinds = fields_passed(transform, features, untouched)
    if stage_type.wanted not in kinds.values():
        what = "image" if stage_type.wanted == "image" else "Audio(sample_rate=...)"
        raise OptionError(f"{where}: the features have no {what} to transform, only {', '.join(features)}")
    movers = dict.fromkeys(type(leaf).__name__ for leaf in leaves if stage_type.moves_pixels(leaf))
    for name, feature in features.items() if movers else ():
        if target_of(feature) is not None and name not in kinds and name not in untouched:
            raise OptionError(
                f"{where}: field {name!r} ({feature.declared()}) would get out of step with the image, which "
                f"{', '.join(movers)} {'change' if len(movers) > 1 else 'changes'}; pass untouched=({name!r},) if it "
                "need not follow, or move it in a function that calls the transform"
            )
    return stage_type(transform, kinds, features)


def fields_passed(transform: Any, features: Features, untouched: Collection[str] = ()) -> dict[str, str]:
    """Return the kind of each field passed to a library's transform, as in `LibraryStage.kinds`."""
    if _stage_type(transform) is AudiomentationsStage:
        return {name: "audio" for name, feature in features.items() if _has_rate(feature) and name not in untouched}
    found = {name: _kind_of(name, feature) for name, feature in features.items() if name not in untouched}
    kinds = {name: kind for name, kind in found.items() if kind}
    drops_boxes = _stage_type(transform) is TorchvisionStage and "bboxes" in kinds.values()
    return {name: kind for name, kind in kinds.items() if kind != "labels" or drops_boxes}


def _stage_type(transform: Any) -> type[LibraryStage] | None:
    if type(transform).__module__ == _SEQUENTIAL and type(transform).__name__ == "Sequential":
        kinds = {_stage_type(child) for child in transform.children()}
        return kinds.pop() if len(kinds) == 1 else None
    modules = [kind.__module__ for kind in type(transform).__mro__]
    for stage_type in _STAGES:
        if any(f"{module}.".startswith(f"{stage_type.package}.") for module in modules):
            return stage_type
    return None


def _kind_of(name: str, feature: Feature) -> str:
    """Return the kind under which a field is passed; "" if it is not."""
    target, (dtype, shape) = target_of(feature), feature.value_type()
    if target == "image" or (target == "array" and name == "image" and len(shape) == 3):
        return "image"
    if target == "mask" and len(shape) == 2:
        return "mask"
    if target == "bboxes" and shape == (None, 4):
        return "bboxes"
    is_listed = shape == (None,) and dtype.rstrip("0123456789") in {"bool", "int", "uint", "float"}
    return "labels" if is_listed and (target == "array" or feature.class_names() is not None) else ""


def _to_corners(boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return boxes of `BBoxes` in pixels, float32 (n, 4): left, top, right, bottom."""
    corners: np.ndarray = boxes[:, [1, 0, 3, 2]] * _scale(size)
    return corners.astype(np.float32)


def _from_corners(corners: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return boxes in pixels, (n, 4), in the form of `BBoxes`, clipped to the image."""
    found: np.ndarray = np.clip(corners / _scale(size), 0, 1)[:, [1, 0, 3, 2]].astype(np.float32)
    return found + np.float32(0)  # turns -0 into 0


def _scale(size: Sequence[int]) -> np.ndarray:
    height, width = size
    return np.array([width, height, width, height], np.float64)
