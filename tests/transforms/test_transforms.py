"""Copies depend on (seed, key, copy) alone, whatever the transform draws from; fields stay in step."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
import warnings

import dill
import numpy as np
import pytest

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A

from datamat.errors import InputError, OptionError, SchemaError
from datamat.features import (
    BBoxes,
    ClassLabel,
    Depth,
    Features,
    Image,
    Keypoints,
    Mask,
    Nullable,
    Polygons,
    Scalar,
    Tensor,
    Text,
)
from datamat.fingerprint import fingerprint
from datamat.transforms import Augmenter
from datamat.transforms.seeding import RandomStreams, sample_rng

FEATURES = Features({"image": Image(), "mask": Mask()})


def picture(height=64, width=80):
    """Return uint8 (height, width, 3) with every pixel unlike its neighbours."""
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def sample_of(image=None):
    image = picture() if image is None else image
    return {"key": "a", "image": image, "mask": image[..., 0] // 128}


def digest(samples):
    return fingerprint(samples, where="samples")


def drawn_by(augmenter, sample, *, key, copy, seed):
    return list(augmenter.stream(sample, augmenter.seeded_streams(key, copy, seed)))


def drawn(transform, features=FEATURES, sample=None, *, copy=0, seed=0, augment=None):
    (result,) = drawn_by(Augmenter(features, transform, augment), sample or sample_of(), key="a", copy=copy, seed=seed)
    return result


# ---- chance


def test_rng_of_a_callable_is_that_of_the_record():
    """Hook and callable draw from `sample_rng(seed, key, copy)`, one after the other."""
    augmenter = Augmenter(
        Features({"x": Scalar("int64"), "y": Scalar("int64")}),
        lambda sample, rng: {**sample, "y": int(rng.integers(1000))},
        lambda sample, rng: {**sample, "x": int(rng.integers(1000))},
    )

    (result,) = drawn_by(augmenter, {"key": "k"}, key="k", copy=3, seed=9)

    rng = sample_rng(9, "k", 3)
    assert result == {"key": "k", "x": int(rng.integers(1000)), "y": int(rng.integers(1000))}


def test_sources_of_chance_are_independent():
    """The rng, the pipeline's two generators and the two global ones give five different streams."""
    seen = []

    class Listen(A.ImageOnlyTransform):
        def apply(self, img, **params):
            seen.append(self.random_generator.random())
            seen.append(self.py_random.random())
            return img

    def hook(sample, rng):
        seen.extend([rng.random(), np.random.random(), random.random()])
        return sample

    drawn(A.Compose([Listen(p=1)]), augment=hook)

    assert len(set(seen)) == 5


def test_transforms_of_a_pipeline_draw_independently():
    """Two flips with p=0.5 happen in all four combinations: `set_random_seed` would give them the same draws."""
    image = np.arange(4, dtype=np.uint8).reshape(2, 2, 1).repeat(3, 2)
    augmenter = Augmenter(Features({"image": Image()}), A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]))

    corners = [
        drawn_by(augmenter, {"key": "a", "image": image}, key="a", copy=copy, seed=0)[0]["image"][0, 0, 0]
        for copy in range(200)
    ]

    assert all(35 < corners.count(corner) < 65 for corner in range(4))


class DrawsFromItsGenerators(A.ImageOnlyTransform):
    def apply(self, img, **params):
        return img ^ np.uint8(self.random_generator.integers(256) ^ self.py_random.randrange(256))


class DrawsFromGlobals(A.ImageOnlyTransform):
    def apply(self, img, **params):
        return img ^ np.uint8(np.random.randint(256) ^ random.randrange(256))


class DrawsFromItsOwn(A.ImageOnlyTransform):
    def __init__(self, p=1.0):
        super().__init__(p=p)
        self.own = np.random.default_rng(1)

    def apply(self, img, **params):
        return img + np.uint8(self.own.integers(1, 256))


def counted(sample, rng, calls=[]):  # noqa: B006 -- the state that it keeps is the point
    calls.append(1)
    return {**sample, "image": sample["image"] + np.uint8(len(calls))}


NESTED = A.Compose(
    [
        A.OneOf([A.HorizontalFlip(p=1), A.Sequential([A.VerticalFlip(p=0.5), A.GaussNoise(p=0.5)], p=1)], p=0.9),
        A.SomeOf([A.RandomBrightnessContrast(p=1), A.HueSaturationValue(p=1), A.Rotate(p=1)], n=2),
        A.RandomOrder([A.Blur(p=0.5), A.Posterize(p=0.5)], n=2),
        DrawsFromItsGenerators(p=0.5),
        DrawsFromGlobals(p=0.5),
    ]
)


@pytest.mark.parametrize("transform", [NESTED, DrawsFromItsGenerators(p=1), DrawsFromGlobals(p=1)])
def test_draws_depend_on_seed_key_and_copy_alone(transform):
    """Order of drawing, what was drawn before, and the state of every generator make no difference."""
    augmenter = Augmenter(FEATURES, transform)

    def draw_all(order):
        return {copy: digest(drawn_by(augmenter, sample_of(), key="a", copy=copy, seed=5)) for copy in order}

    forward = draw_all(range(12))
    random.random(), np.random.random()
    backward = draw_all(reversed(range(12)))
    elsewhere = drawn_by(dill.loads(dill.dumps(augmenter)), sample_of(), key="a", copy=7, seed=5)

    assert forward == backward
    assert digest(elsewhere) == forward[7]
    assert len(set(forward.values())) > 6
    assert digest(drawn_by(augmenter, sample_of(), key="a", copy=7, seed=6)) != forward[7]
    assert digest(drawn_by(augmenter, sample_of(), key="b", copy=7, seed=5)) != forward[7]


# ---- every transform of albumentations

NEED = {  # arguments, and fields beside image and mask, of those that cannot do without
    "AtLeastOneBBoxRandomCrop": {"height": 32, "width": 32},
    "BBoxSafeRandomCrop": {},
    "CenterCrop": {"height": 32, "width": 32},
    "Crop": {"x_max": 32, "y_max": 32},
    "CropAndPad": {"percent": (-0.1, 0.1)},
    "CropNonEmptyMaskIfExists": {"height": 32, "width": 32},
    "GridElasticDeform": {"num_grid_xy": (4, 4), "magnitude": 5},
    "LongestMaxSize": {"max_size": 40},
    "RandomCrop": {"height": 32, "width": 32},
    "RandomResizedCrop": {"size": (32, 32)},
    "RandomSizedBBoxSafeCrop": {"height": 32, "width": 32},
    "RandomSizedCrop": {"min_max_height": (20, 40), "size": (32, 32)},
    "Resize": {"height": 32, "width": 32},
    "SmallestMaxSize": {"max_size": 40},
}
FIELDS = {
    "FDA": {"fda_metadata": [picture()[::-1].copy()]},
    "HistogramMatching": {"hm_metadata": [picture()[::-1].copy()]},
    "Mosaic": {"mosaic_metadata": [{"image": picture()[::-1].copy(), "mask": picture()[::-1, :, 0].copy()}]},
    "OverlayElements": {"overlay_metadata": {"image": picture(20, 20), "bbox": (0.1, 0.1, 0.4, 0.4)}},
    "PixelDistributionAdaptation": {"pda_metadata": [picture()[::-1].copy()]},
    "RandomCropNearBBox": {"cropping_bbox": [10, 10, 40, 40]},
}
NEEDS_A_FONT = {"TextImage"}
BASES = {A.BasicTransform, A.DualTransform, A.ImageOnlyTransform, A.Transform3D}
PUBLIC = [
    name
    for name, kind in sorted(vars(A).items())
    if isinstance(kind, type) and issubclass(kind, A.BasicTransform) and kind not in BASES
    if not issubclass(kind, A.Transform3D) and name not in NEEDS_A_FONT
]


def every_transform():
    """Return an augmenter and a sample for each public 2-D transform, by name."""
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among them
        for name in PUBLIC:
            transform = getattr(A, name)(**NEED.get(name, {}), p=1)
            boxes = {"boxes": BBoxes()} if "BBox" in name else {}
            params = A.BboxParams("albumentations") if boxes else None
            extra = FIELDS.get(name, {})
            features = Features({**FEATURES, **boxes, **{field: Tensor((None,)) for field in extra}})
            sample = {
                **sample_of(),
                **{field: np.array([[0.2, 0.2, 0.7, 0.6]], np.float32) for field in boxes},
                **extra,
            }
            made[name] = Augmenter(features, A.Compose([transform], bbox_params=params)), sample
    return made


def draw_everything(names):
    """Return the digests of three copies of each transform, drawn in the given order."""
    made = every_transform()
    digests = {}
    before = {name: fingerprint(made[name][0].transform, where="transform") for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for copy in range(3):
            for name in names:
                augmenter, sample = made[name]
                digests[name, copy] = digest(drawn_by(augmenter, sample, key="a", copy=copy, seed=2))
    for name in names:
        assert fingerprint(made[name][0].transform, where="transform") == before[name], name
    return digests


def in_child(connection, names):
    import cv2

    cv2.setNumThreads(0)  # its threads did not survive the fork
    connection.send(draw_everything(names))
    connection.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_transform_is_determined_by_its_seed():
    """Each public transform gives the same bytes in forked processes, in any order, and keeps its fingerprint."""
    context = multiprocessing.get_context("fork")
    orders = [PUBLIC, random.Random(1).sample(PUBLIC, len(PUBLIC))]
    answers = []
    for order in orders:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=in_child, args=(there, order), daemon=True)
        child.start()
        there.close()
        answers.append((child, here))

    expected = draw_everything(PUBLIC[::-1])

    assert len(PUBLIC) > 95
    for child, here in answers:
        assert here.poll(250)
        assert here.recv() == expected
        child.join()


def compose(*, limit=10, p=0.5, order=1, k=3, bbox="coco", min_area=0.0, targets=None, size=2):
    class Own(A.ImageOnlyTransform):
        def __init__(self, size):
            super().__init__(p=1)
            self._size = size

        def apply(self, img, **params):
            return img + np.uint8(self._size)

    steps = [A.Rotate(limit=limit, p=p), A.OneOf([A.HorizontalFlip(), A.VerticalFlip()]), Own(size)][::order]
    return A.Compose(
        [*steps, A.Lambda(image=functools.partial(shift, k=k), name="shift")],
        bbox_params=A.BboxParams(bbox, min_area=min_area, label_fields=["labels"], filter_invalid_bboxes=bool(targets)),
        keypoint_params=A.KeypointParams("xy"),
        additional_targets=targets,
    )


def shift(image, *, k, **params):
    return image + np.uint8(k)


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 11}, {"p": 0.6}, {"order": -1}, {"k": 4}, {"bbox": "yolo"}, {"min_area": 1.0}, {"size": 3},
        {"targets": {"other": "image"}},
    ],
)  # fmt: skip
def test_fingerprint_of_a_pipeline_distinguishes_parameters(change):
    """Parameters, probabilities, order, boxes, targets, functions and the user's own state count."""
    same = fingerprint(compose(), where="transform")

    assert fingerprint(compose(), where="transform") == same
    assert fingerprint(compose(**change), where="transform") != same


def test_fingerprint_of_a_users_transform_follows_its_code():
    """An edited `apply` is another transform; an edited docstring is not."""

    def made(text):
        space = {"A": A, "np": np, "__name__": "users"}
        exec(text, space)
        return fingerprint(A.Compose([space["Own"](p=1)]), where="transform")

    source = (
        "class Own(A.ImageOnlyTransform):\n    '''One.'''\n"
        "    class InitSchema(A.ImageOnlyTransform.InitSchema):\n        size: int\n"
        "    def __init__(self, size=1, p=1.0):\n        super().__init__(p=p)\n        self.size = size\n"
        "    def apply(self, img, **params):\n        return img + np.uint8(1)\n"
    )
    assert made(source) == made(source.replace("One", "Another"))
    assert made(source) != made(source.replace("uint8(1)", "uint8(2)"))
    assert made(source) != made(source.replace("size: int", "size: float"))
    assert made(source) != made(source.replace("size=1", "size=2"))


# ---- fields


@pytest.mark.parametrize(
    "transform",
    [A.Rotate(limit=40, interpolation=0, p=1), A.Affine(scale=(0.7, 1.3), interpolation=0, p=1), A.RandomCrop(40, 40),
     A.ElasticTransform(interpolation=0, p=1), A.HorizontalFlip(p=0.5), A.D4(p=1),
     A.CoarseDropout(p=1, fill=0, fill_mask=0)],
)  # fmt: skip
def test_image_and_mask_stay_in_step(transform):
    """A mask that equals the image's first channel still does after any geometric transform."""
    image = picture()
    sample = {"key": "a", "image": image, "mask": image[..., 0].copy()}

    for copy in range(5):
        result = drawn(A.Compose([transform]), sample=sample, copy=copy)
        assert np.array_equal(result["image"][..., 0], result["mask"])


def test_fields_are_matched_by_type_where_names_differ():
    """The first image and the first mask are the pipeline's, and come back under their own names."""
    features = Features({"photo": Image(), "classes": Mask(), "n": Scalar("int64")})
    sample = {"key": "a", "photo": picture(), "classes": picture()[..., 1].copy(), "n": 4}

    result = drawn(A.Compose([A.HorizontalFlip(p=1)]), features, sample)

    assert result.keys() == sample.keys()
    assert np.array_equal(result["photo"], sample["photo"][:, ::-1])
    assert np.array_equal(result["classes"], sample["classes"][:, ::-1])
    assert result["n"] == 4


def test_field_with_the_name_of_the_target_wins():
    """`image` is the image, wherever it stands; others need to be declared to the pipeline."""
    features = Features({"depth": Image(), "image": Image(), "parts": Mask(), "mask": Mask()})
    image = picture()
    sample = {"key": "a", "depth": image, "image": image, "parts": image[..., 0], "mask": image[..., 1]}
    pipeline = A.Compose([A.VerticalFlip(p=1)], additional_targets={"depth": "image", "parts": "mask"})

    result = drawn(pipeline, features, sample)

    assert all(np.array_equal(result[name], sample[name][::-1]) for name in ("depth", "image", "parts", "mask"))


def test_float_image_of_a_tensor_field_passes():
    """A field called `image` is the image whatever its type: a pipeline may end in Normalize."""
    features = Features({"image": Tensor((None, None, 3), "float32")})

    result = drawn(A.Compose([A.Normalize()]), features, {"key": "a", "image": picture()})

    assert result["image"].dtype == np.float32


def test_grey_images_pass():
    """A channel axis of one is kept or dropped as the transform does it; `Image` takes both."""
    features = Features({"image": Image((None, None, 1))})

    result = drawn(A.Compose([A.HorizontalFlip(p=1)]), features, {"key": "a", "image": picture()[..., :1]})

    assert features.decode(features.encode(result))["image"].shape[:2] == (64, 80)


def test_encoded_images_are_decoded_first():
    """Bytes of a file reach the transform as an array."""
    encoded = Image().encode(picture())

    result = drawn(
        lambda sample, rng: {**sample, "image": sample["image"][:8]}, sample={**sample_of(), "image": encoded}
    )

    assert np.array_equal(result["image"], picture()[:8])


def test_damaged_image_is_an_input_error():
    """Bytes that do not decode are reported as such."""
    with pytest.raises(InputError, match="image"):
        drawn(lambda sample, rng: sample, sample={**sample_of(), "image": b"no picture"})


def test_writing_in_place_does_not_reach_the_other_copies():
    """Each stage of each copy has arrays and lists of its own."""

    def scribble(sample, rng):
        sample["image"][:] = 0
        sample["labels"].append(1)
        sample["new"] = 1
        return sample

    sample = {**sample_of(), "labels": [0]}
    before = digest([sample])

    drawn(
        scribble, Features({**FEATURES, "labels": ClassLabel(num_classes=2, shape=(None,))}), sample, augment=scribble
    )

    assert digest([sample]) == before


# ---- boxes

BOXES = np.array([[0.1, 0.2, 0.5, 0.6], [0.0, 0.0, 1.0, 1.0], [0.75, 0.5, 1.0, 0.625]], np.float32)
BOXED = Features(
    {"image": Image(), "objects/bbox": BBoxes(), "labels": ClassLabel(names=("a", "b", "c"), shape=(None,))}
)
FORMATS = ["albumentations", "pascal_voc", "coco", "yolo"]


def boxed(labels=(0, 1, 2)):
    return {"key": "a", "image": picture(), "objects/bbox": BOXES.copy(), "labels": list(labels)}


@pytest.mark.parametrize("box_format", FORMATS)
def test_boxes_are_converted_to_every_format_and_back(box_format):
    """A flip mirrors the boxes, whichever format the pipeline counts in."""
    pipeline = A.Compose([A.HorizontalFlip(p=1)], bbox_params=A.BboxParams(box_format, label_fields=["labels"]))

    result = drawn(pipeline, BOXED, boxed())

    mirrored = np.stack([BOXES[:, 0], 1 - BOXES[:, 3], BOXES[:, 2], 1 - BOXES[:, 1]], 1)
    np.testing.assert_allclose(result["objects/bbox"], mirrored, atol=1e-6)
    assert result["objects/bbox"].dtype == np.float32
    assert result["labels"].tolist() == [0, 1, 2]
    BOXED.encode(result)


@pytest.mark.parametrize("box_format", FORMATS)
def test_labels_stay_with_their_boxes_when_some_are_dropped(box_format):
    """A crop keeps the boxes inside it, clipped, with their labels."""
    pipeline = A.Compose(
        [A.Crop(x_min=0, y_min=0, x_max=20, y_max=20)], bbox_params=A.BboxParams(box_format, label_fields=["labels"])
    )

    result = drawn(pipeline, BOXED, boxed(["b", "c", "a"]))

    assert result["labels"].tolist() == [1, 2]
    np.testing.assert_allclose(result["objects/bbox"][1], [0, 0, 1, 1], atol=1e-6)
    BOXED.encode(result)


def test_box_of_no_width_is_refused_unless_the_pipeline_drops_it():
    """The message says how to have it dropped, and that does it, with its label."""
    sample = {**boxed(), "objects/bbox": BOXES.copy()}
    sample["objects/bbox"][1, 3] = sample["objects/bbox"][1, 1]
    flip = [A.HorizontalFlip(p=1)]

    with pytest.raises(SchemaError, match=r"'objects/bbox' holds a box of no width .*filter_invalid_bboxes=True"):
        drawn(A.Compose(flip, bbox_params=A.BboxParams("coco", label_fields=["labels"])), BOXED, sample)

    params = A.BboxParams("coco", label_fields=["labels"], filter_invalid_bboxes=True)
    assert drawn(A.Compose(flip, bbox_params=params), BOXED, sample)["labels"].tolist() == [0, 2]


def test_all_boxes_may_be_dropped():
    """Whether three boxes are dropped or there were none, the result has empty arrays of the right types."""
    pipeline = A.Compose(
        [A.Crop(x_min=0, y_min=0, x_max=4, y_max=4)],
        bbox_params=A.BboxParams("coco", label_fields=["labels"], min_visibility=0.9),
    )

    for sample in (boxed(), {**boxed([]), "objects/bbox": np.zeros((0, 4), np.float32)}):
        result = drawn(pipeline, BOXED, sample)
        assert result["objects/bbox"].shape == (0, 4)
        assert result["labels"].dtype == np.int64
        BOXED.encode(result)


def test_labels_do_not_depend_on_the_first_that_a_pipeline_saw():
    """The library settles the kind of a label field by its first value: here every value is the same kind."""
    pipeline = A.Compose([A.NoOp()], bbox_params=A.BboxParams("coco", label_fields=["labels"]))
    fresh = drawn(pipeline, BOXED, boxed())

    for labels in (["c", "b", "a"], np.array([2, 1, 0]), [0, "b", 2]):
        drawn(pipeline, BOXED, boxed(labels))

    assert digest([drawn(pipeline, BOXED, boxed())]) == digest([fresh])


def test_labels_that_would_change_on_the_way_are_refused():
    """The library carries labels as float32, which no large int survives."""
    features = Features({"image": Image(), "bboxes": BBoxes(), "track": Tensor((None,), "int64")})
    pipeline = A.Compose([A.NoOp()], bbox_params=A.BboxParams("coco", label_fields=["track"]))
    sample = {"key": "a", "image": picture(), "bboxes": BOXES}

    kept = drawn(pipeline, features, {**sample, "track": np.array([1, 2, 2**24])})
    assert kept["track"].tolist() == [1, 2, 2**24]
    assert kept["track"].dtype == np.int64
    with pytest.raises(
        OptionError, match=r"field 'track' of label_fields holds int64 values .* would change, because .*float32"
    ):
        drawn(pipeline, features, {**sample, "track": np.array([1, 2, 2**24 + 1])})


# ---- refusals

FLIP = A.HorizontalFlip(p=1)


@pytest.mark.parametrize(
    ("fields", "transform", "message"),
    [
        ({"image": Image(), "right": Image()}, A.Compose([FLIP]), "{'right': 'image'}"),
        ({"image": Image(), "mask": Mask(), "parts": Mask()}, A.Compose([FLIP]), "{'parts': 'mask'}"),
        ({"mask": Mask()}, A.Compose([FLIP]), "have no Image"),
        ({"image": Image(), "boxes": BBoxes()}, A.Compose([FLIP]), "'boxes' .* bbox_params="),
        ({"image": Image(), "keypoints": Tensor((None, 2))}, A.Compose([FLIP]), "keypoint_params="),
        (BOXED, A.Compose([FLIP], bbox_params=A.BboxParams("coco")), "'labels' .* label_fields"),
        (
            {"image": Image(), "bboxes": BBoxes()},
            A.Compose([FLIP], bbox_params=A.BboxParams("coco", label_fields=["kind"])),
            "label field 'kind'",
        ),
        ({"image": Image()}, A.HorizontalFlip, "the class HorizontalFlip"),
    ],
)
def test_pipelines_that_would_lose_step_are_refused(fields, transform, message):
    """The error comes when the augmenter is made, before any work, and says what to pass."""
    with pytest.raises(OptionError, match=message):
        Augmenter(Features(fields), transform)


DEPTH = {"image": Image(), "depth": Tensor((None, None))}
TURN = A.OneOf([A.Sequential([A.Rotate(30)]), A.RandomGamma()])


@pytest.mark.parametrize(
    ("fields", "transform", "message"),
    [
        (DEPTH, A.Compose([FLIP]), "'depth' .* HorizontalFlip .*'mask'.*untouched="),
        (DEPTH, FLIP, r"'depth' .*untouched=\('depth',\)"),
        (DEPTH, A.Compose([A.RandomGamma(), A.SomeOf([TURN], n=1)]), "'depth' .* Rotate"),
        (DEPTH, A.Compose([A.OneOf([FLIP, A.NoOp(), TURN])]), "'depth' .* HorizontalFlip, Rotate"),
        ({"image": Image(), "polygon": Tensor((None, 2))}, A.Compose([FLIP]), "{'polygon': 'keypoints'}"),
        ({"image": Image(), "joints": Tensor((17, 3))}, A.Compose([FLIP]), "{'joints': 'keypoints'}"),
        ({"image": Image(), "vector": Tensor((512,))}, A.Compose([FLIP]), "'vector'"),
        (
            {"image": Image(), "joints": Tensor((17, 2))},
            A.Compose([FLIP], additional_targets={"joints": "keypoints"}),
            "'joints' .* keypoint_params=",
        ),
        (
            {"image": Image(), "bboxes": BBoxes(), "more": BBoxes()},
            A.Compose([FLIP], bbox_params=A.BboxParams("coco")),
            "{'more': 'bboxes'}",
        ),
        (
            {"image": Image(), "bboxes": BBoxes(), "labels": Tensor((None,), "int32")},
            A.Compose([FLIP], bbox_params=A.BboxParams("coco")),
            "'labels' .* label_fields",
        ),
    ],
)
def test_array_that_a_geometric_transform_does_not_take_is_refused(fields, transform, message):
    """However deep the transform is nested; scalars and text are no arrays."""
    fields = {"n": Scalar(), "text": Text(), **fields}

    with pytest.raises(OptionError, match=message):
        Augmenter(Features(fields), transform)
    strays = [name for name in fields if name not in ("image", "bboxes", "n", "text")]
    Augmenter(Features(fields), transform, untouched=tuple(strays))


def test_array_that_follows_its_image_is_moved_with_it():
    """As mask, as points and as another picture; what is named untouched stays."""
    features = Features(
        {
            "image": Image(),
            "depth": Tensor((None, None), "float32"),
            "joints": Tensor((None, 2), "float32"),
            "near": Tensor((None, None, 3), "uint8"),
            "vector": Tensor((4,), "float32"),
        }
    )
    image = picture()
    depth = np.random.default_rng(1).random(image.shape[:2], np.float32)
    sample = {
        "key": "a",
        "image": image,
        "depth": depth,
        "joints": np.array([[20, 5], [70, 9]], np.float32),
        "near": image,
        "vector": np.arange(4, dtype=np.float32),
    }
    targets = {"depth": "mask", "joints": "keypoints", "near": "image"}
    pipeline = A.Compose(
        [A.HorizontalFlip(p=1), A.Crop(8, 0, 72, 64)],
        keypoint_params=A.KeypointParams("xy"),
        additional_targets=targets,
    )

    (result,) = drawn_by(Augmenter(features, pipeline, untouched=("vector",)), sample, key="a", copy=0, seed=0)

    features.encode(result)
    assert np.array_equal(result["image"], image[:, ::-1][:64, 8:72])
    assert np.array_equal(result["near"], result["image"])
    assert np.array_equal(result["depth"], depth[:, ::-1][:64, 8:72])
    assert result["joints"].tolist() == [[51, 5], [1, 9]]
    assert np.array_equal(result["vector"], sample["vector"])


def test_transforms_of_pixel_values_leave_every_field_in_step():
    """Brightness needs no depth, no boxes and no second mask; such fields come back as they were."""
    fields = {"image": Image(), "depth": Tensor((None, None)), "mask": Mask(), "parts": Mask(), "boxes": BBoxes()}
    pipeline = A.Compose([A.OneOf([A.RandomBrightnessContrast(p=1), A.RandomGamma(p=1)], p=1)])
    image = picture()
    sample = {"key": "a", "image": image, "depth": np.ones((4, 4), np.float32), "boxes": BOXES[:1]}
    sample |= {"mask": image[..., 0], "parts": image[..., 1]}

    result = drawn(pipeline, Features(fields), sample)

    assert not np.array_equal(result["image"], image)
    assert all(np.array_equal(result[name], sample[name]) for name in ("depth", "mask", "parts", "boxes"))


@pytest.mark.parametrize("targets", [{"left": "image", "right": "image"}, {"right": "image"}, {"left": "image"}])
def test_two_images_with_right_targets_are_taken(targets):
    """Neither is called `image`: one of them stands in for it, whichever of them the pipeline names."""
    features = Features({"left": Image(), "right": Image()})
    image = picture()

    result = drawn(
        A.Compose([FLIP], additional_targets=targets), features, {"key": "a", "left": image, "right": image[::-1]}
    )

    assert np.array_equal(result["left"], image[:, ::-1])
    assert np.array_equal(result["right"], image[::-1, ::-1])


def test_untouched_field_is_left_alone_although_the_pipeline_knows_it():
    """The user asked for it; the next field of its kind takes its place in the pipeline."""
    features = Features({"image": Image(), "mask": Mask(), "parts": Mask()})
    image = picture()
    sample = {"key": "a", "image": image, "mask": image[..., 0], "parts": image[..., 1]}

    augmenter = Augmenter(features, A.Compose([FLIP]), untouched=("mask",))
    (result,) = drawn_by(augmenter, sample, key="a", copy=0, seed=0)

    assert np.array_equal(result["mask"], sample["mask"])
    assert np.array_equal(result["parts"], sample["parts"][:, ::-1])
    assert augmenter.withheld == (("image", "image"), ("parts", "mask"))
    assert Augmenter(Features(DEPTH), A.Compose([FLIP]), untouched=("depth",)).withheld == ()


@pytest.mark.parametrize(
    ("untouched", "message"),
    [
        (("dept",), r"untouched names 'dept'; want fields of the features: key, image, depth"),
        (("depth", "image"), r"have no Image, apart from untouched=\('depth', 'image'\)"),
    ],
)
def test_untouched_must_be_fields_and_leave_an_image(untouched, message):
    """A misspelt name would protect nothing."""
    with pytest.raises(OptionError, match=message):
        Augmenter(Features(DEPTH), A.Compose([FLIP]), untouched=untouched)


def test_sample_without_a_field_of_the_pipeline_is_refused():
    """The error for a sample without the mask names the field."""
    with pytest.raises(SchemaError, match="no field 'mask', which Compose needs"):
        drawn(A.Compose([FLIP]), sample={"key": "a", "image": picture()})


# ---- the check


@pytest.mark.parametrize(
    "transform", [None, NESTED, lambda sample, rng: {**sample, "x": rng.random()}, A.RandomCrop(8, 8)]
)
def test_deterministic_transforms_pass_the_check(transform):
    """Whatever draws from the seeded sources passes."""
    Augmenter(FEATURES, transform).check_determined(sample_of(), key="a", seed=0)


@pytest.mark.parametrize(
    ("transform", "augment", "names"),
    [
        (A.Compose([FLIP, A.OneOf([DrawsFromItsOwn(), DrawsFromItsOwn()], p=1), A.Blur()]), None, "DrawsFromItsOwn"),
        (DrawsFromItsOwn(p=1), None, "DrawsFromItsOwn"),
        (counted, None, "counted"),
        (A.Compose([FLIP]), counted, "counted"),
    ],
)
def test_transform_with_chance_of_its_own_is_caught(transform, augment, names):
    """The error names the transforms, and those alone, and where to draw from instead."""
    with pytest.raises(
        OptionError, match=f"^{names}: drawing the same copy of sample 'a' twice.*self.random_generator"
    ):
        Augmenter(FEATURES, transform, augment).check_determined(sample_of(), key="a", seed=0)


# ---- the network

IMPORT = """
import socket, sys, urllib.request
asked = []
def record(*arguments, **options):
    asked.append(arguments)
    raise OSError("no network here")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = record
urllib.request.OpenerDirector.open = record
import datamat.transforms
assert "albumentations" not in sys.modules
if sys.argv[1] == "forbidden":
    datamat.transforms.forbid_update_check()
import albumentations
print(len(asked))
"""


@pytest.mark.parametrize(("way", "asked"), [("forbidden", "0"), pytest.param("as it is", "1", marks=pytest.mark.long)])
def test_import_of_albumentations_uses_no_network(way, asked):
    """With the update check forbidden nothing touches the network; without, the probe sees it."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_ALBUMENTATIONS_UPDATE"}

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT, way], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == asked


def test_bytes_of_a_copy_are_pinned():
    """The same record comes out of every release: a change here changes everybody's datasets."""
    pipeline = A.Compose([A.HorizontalFlip(p=0.5), A.CoarseDropout(p=1), A.RandomCrop(32, 32)])

    result = drawn(pipeline, copy=3, seed=11)

    pixels = result["image"].tobytes() + result["mask"].tobytes()
    assert hashlib.sha256(pixels).hexdigest()[:16] == "b9b8d2fd21efff4b"


# ---- depth maps and pictures of 16 bits


def moving(**options):
    """Return a pipeline of crops, flips, rotations and scales."""
    steps = [A.RandomCrop(40, 40), A.HorizontalFlip(), A.RandomRotate90(), A.Rotate(limit=30), A.RandomScale(0.2)]
    return A.Compose(steps, **options)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_depth_moves_as_albumentations_moves_a_mask(dtype):
    """Beside a mask or without one, the same pixels as by hand from the same generators; the user's pipeline stays."""
    rng = np.random.default_rng(1)
    limit = np.iinfo(dtype).max + 1
    values = {
        "image": rng.integers(0, limit, (64, 80, 3)).astype(dtype),
        "mask": rng.integers(0, limit, (64, 80)).astype(dtype),
        "depth": rng.integers(0, 65536, (64, 80), np.uint16),
        "metres": rng.random((64, 80), np.float32),
    }
    features = {
        "image": Image(dtype=dtype),
        "mask": Mask(dtype=dtype),
        "depth": Depth(),
        "metres": Depth(dtype="float32"),
    }
    pipeline, by_hand = moving(), moving(additional_targets={"depth": "mask", "metres": "mask"})

    for names in ({*values}, {"image", "depth", "metres"}, {"image", "mask", "metres"}):
        augmenter = Augmenter(Features({name: features[name] for name in features if name in names}), pipeline)
        sample = {name: values[name] for name in names}
        for copy in range(8):
            (found,) = drawn_by(augmenter, {"key": "a", **sample}, key="a", copy=copy, seed=5)
            by_hand.set_random_state(*RandomStreams(5, "a", copy).of_pipeline)
            expected = by_hand(**sample)
            for name in names:
                assert found[name].dtype == sample[name].dtype
                assert np.array_equal(found[name], expected[name]), name
            augmenter.features.encode(found)
    assert not pipeline.additional_targets


def test_float_images_of_a_pipeline_are_refused():
    """Nothing is scaled back to the declared dtype."""
    features = Features({"image": Image()})

    found = drawn(A.Compose([A.ToFloat()]), features, {"key": "a", "image": picture()})

    with pytest.raises(
        SchemaError,
        match=r"'image' .* float32",
    ):
        features.encode(found)


# ---- keypoints, polygons and rotated boxes


POINTS = (np.random.default_rng(2).random((30, 2)) * [80, 64]).astype(np.float32)
ALL_STAY = A.KeypointParams("xy", remove_invisible=False)


def by_hand(pipeline, copy, **data):
    """Return what a pipeline makes of data with the generators of a copy."""
    pipeline.set_random_state(*RandomStreams(5, "a", copy).of_pipeline)
    return pipeline(**data)


@pytest.mark.parametrize("removes", [True, False])
@pytest.mark.parametrize("form", ["xy", "yx", "xyas"])
def test_keypoints_move_as_by_hand(removes, form):
    """The same picture, points and labels as albumentations gives: those that leave are removed, or stay."""
    features = Features(
        {"image": Image(), "keypoints": Keypoints(), "labels": ClassLabel(num_classes=9, shape=(None,))}
    )
    labels = np.arange(30) % 9
    params = A.KeypointParams(form, remove_invisible=removes, label_fields=["labels"])
    augmenter, hand = Augmenter(features, moving(keypoint_params=params)), moving(keypoint_params=params)
    given = np.zeros((30, len(form)), np.float32)
    given[:, [form.index("x"), form.index("y")]] = POINTS
    num_left = []

    for copy in range(10):
        sample = {"key": "a", "image": picture(), "keypoints": POINTS, "labels": labels}
        (found,) = drawn_by(augmenter, sample, key="a", copy=copy, seed=5)
        expected = by_hand(hand, copy, image=picture(), keypoints=given, labels=labels)
        assert np.array_equal(found["image"], expected["image"])
        points = expected["keypoints"][:, [form.index("x"), form.index("y")]].astype(np.float32)
        assert np.array_equal(found["keypoints"], points)
        assert np.array_equal(found["labels"], expected["labels"])
        features.encode(found)
        num_left.append(len(points))

    assert (min(num_left) < 30) == removes


def test_points_of_people_keep_their_rows():
    """A point that leaves becomes (0, 0, 0); one without a place stays so; others keep their visibility."""
    people = np.concatenate([POINTS, np.arange(30)[:, None] % 3], axis=1).astype(np.float32).reshape(3, 10, 3)
    people[people[..., 2] == 0] = 0
    features = Features({"image": Image(), "people": Keypoints((None, 10, 3))})
    crop = A.Compose([A.Crop(10, 0, 60, 50)], keypoint_params=A.KeypointParams("xy"))

    found = drawn(crop, features, {"key": "a", "image": picture(), "people": people})["people"]

    x, y, visibility = np.moveaxis(people, 2, 0)
    stays = (visibility > 0) & (x >= 10) & (x < 60) & (y < 50)
    assert 0 < stays.sum() < 30
    assert np.array_equal(found, np.where(stays[..., None], people - np.float32([10, 0, 0]), 0))
    empty = drawn(crop, features, {"key": "a", "image": picture(), "people": people[:0]})["people"]
    assert empty.shape == (0, 10, 3)


def test_polygons_and_rotated_boxes_move_with_other_points():
    """Each field gets its own points back; what lies outside is emptied or dropped, with its labels."""
    polygons = [
        POINTS[:4].tolist(),
        POINTS[4:11],
        POINTS[11:14].reshape(-1).tolist(),
        np.array([[0, 0], [2, 0], [0, 2]]),
    ]
    rotated = np.array([[40, 32, 20, 6, 30], [60, 40, 8, 20, -100], [2, 2, 3, 3, 0]], np.float32)
    features = Features(
        {
            "image": Image(),
            "outlines": Polygons(),
            "points": Keypoints((30, 2)),
            "rotated": BBoxes(rotated=True),
            "kinds": ClassLabel(num_classes=3, shape=(None,)),
        }
    )
    params = A.KeypointParams("xy", remove_invisible=False, label_fields=["kinds"])
    augmenter, hand = Augmenter(features, moving(keypoint_params=params)), moving(keypoint_params=ALL_STAY)
    sample = {"image": picture(), "outlines": polygons, "points": POINTS, "rotated": rotated, "kinds": [0, 1, 2]}
    emptied, dropped = 0, 0

    for copy in range(20):
        (found,) = drawn_by(augmenter, {"key": "a", **sample}, key="a", copy=copy, seed=5)
        expected = by_hand(hand, copy, image=picture(), keypoints=np.concatenate([POINTS, rotated[:, :2]]))
        points = expected["keypoints"].astype(np.float32)
        assert np.array_equal(found["image"], expected["image"])
        assert np.array_equal(found["points"], points[:30])
        for number, span in enumerate([slice(0, 4), slice(4, 11), slice(11, 14)]):
            row = found["outlines"][number]
            row = row[~np.isnan(row[:, 0])]
            assert len(row) == 0 or np.array_equal(row, points[span])
        assert len(found["outlines"]) == 4
        assert np.abs(found["rotated"][:, :2] - points[30:][found["kinds"]]).max(initial=0) < 1e-3
        scale = np.sqrt(np.prod(found["rotated"][:, 2:4], axis=1) / np.prod(rotated[found["kinds"], 2:4], axis=1))
        assert np.allclose(found["rotated"][:, 2:4], rotated[found["kinds"], 2:4] * scale[:, None], rtol=1e-2)
        emptied += np.isnan(found["outlines"][3]).all()
        dropped += 2 not in found["kinds"]
        features.encode(found)

    assert emptied
    assert dropped


def test_rotated_boxes_turn_and_mirror_exactly():
    """The side called width stays the same side; a shear gives the smallest box around the corners."""
    features = Features({"image": Image(), "rotated": BBoxes(rotated=True)})
    sample = {"key": "a", "image": picture(), "rotated": np.array([[20, 30, 10, 6, 30]], np.float32)}

    def moved(step):
        return drawn(A.Compose([step], keypoint_params=ALL_STAY), features, sample)["rotated"][0]

    assert np.allclose(moved(A.HorizontalFlip(p=1)), [59, 30, 10, 6, 150], atol=1e-3)
    assert np.allclose(moved(A.VerticalFlip(p=1)), [20, 33, 10, 6, -30], atol=1e-3)
    assert np.allclose(moved(A.Transpose(p=1)), [30, 20, 10, 6, 60], atol=1e-3)
    sheared = moved(A.Affine(shear={"x": (30, 30), "y": (0, 0)}, p=1))
    corners = features["rotated"].points(sheared[None])
    assert corners.shape == (4, 2)
    assert sheared[2] * sheared[3] > 60


def test_polygons_are_dropped_with_their_boxes():
    """A field named in label_fields of bbox_params loses the rows that the boxes lose."""
    boxes = np.array([[0, 0, 0.2, 0.2], [0.6, 0.6, 0.9, 0.9]], np.float32)
    outlines = [[[0, 0], [16, 0], [0, 12]], [[48, 38], [72, 38], [72, 57], [48, 57]]]
    features = Features({"image": Image(), "boxes": BBoxes(), "outlines": Polygons(), "rotated": BBoxes(rotated=True)})
    rotated = np.array([[8, 6, 4, 4, 10], [60, 48, 4, 4, 20]], np.float32)
    pipeline = A.Compose(
        [A.Crop(40, 32, 80, 64)],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["outlines", "rotated"]),
        keypoint_params=ALL_STAY,
    )
    sample = {"key": "a", "image": picture(), "boxes": boxes, "outlines": outlines, "rotated": rotated}

    found = drawn(pipeline, features, sample)

    assert found["outlines"].tolist() == [[[8, 6], [32, 6], [32, 25], [8, 25]]]
    assert np.allclose(found["rotated"], [[20, 16, 4, 4, 20]], atol=1e-4)
    assert len(found["boxes"]) == 1


LABELS = ClassLabel(num_classes=3, shape=(None,))


@pytest.mark.parametrize(
    ("fields", "keypoint_params", "message"),
    [
        ({"p": Polygons()}, None, "'p' .* keypoint_params="),
        ({"p": Polygons()}, A.KeypointParams("xy"), "remove_invisible=False"),
        ({"p": BBoxes(rotated=True)}, A.KeypointParams("xy"), "lose points"),
        ({"p": Keypoints((17, 2))}, A.KeypointParams("xy"), "lose points"),
        ({"p": Keypoints(), "l": LABELS}, A.KeypointParams("xy"), "'l' .* 'p'"),
        ({"p": BBoxes(rotated=True), "l": LABELS}, ALL_STAY, "label_fields of keypoint_"),
        ({"p": Keypoints()}, A.KeypointParams("xy", label_fields=["l"]), "label field 'l'"),
        ({"p": Keypoints(), "keypoints": Tensor((None, 2))}, ALL_STAY, "both keypoints"),
        (
            {"p": Polygons(), "l": LABELS},
            A.KeypointParams("xy", remove_invisible=False, label_fields=["l"]),
            "leave out label_fields",
        ),
    ],
)
def test_points_that_would_get_out_of_step_are_refused(fields, keypoint_params, message):
    """The message says which option to pass; transforms that move nothing need none."""
    features = Features({"image": Image(), **fields})
    options = {"keypoint_params": keypoint_params} if keypoint_params else {}

    with pytest.raises(OptionError, match=message):
        Augmenter(features, A.Compose([A.HorizontalFlip()], **options))
    Augmenter(features, A.Compose([A.RandomBrightnessContrast()]))


def test_labels_of_points_have_one_entry_for_each():
    """A sample where they differ is refused by name."""
    features = Features({"image": Image(), "p": Keypoints(), "l": LABELS})
    pipeline = A.Compose([A.HorizontalFlip()], keypoint_params=A.KeypointParams("xy", label_fields=["l"]))

    with pytest.raises(SchemaError, match="'l' of label_fields holds 1 entries for 30 points"):
        drawn(pipeline, features, {"key": "a", "image": picture(), "p": POINTS, "l": [1]})


def test_points_that_are_none_stay_none():
    """An optional field without a value moves nothing, and its labels stay."""
    features = Features({"image": Image(), "p": Nullable(Keypoints()), "q": Nullable(Polygons()), "l": LABELS})
    params = A.KeypointParams("xy", remove_invisible=False, label_fields=["l"])
    sample = {"key": "a", "image": picture(), "p": None, "q": None, "l": np.array([1])}

    found = drawn(A.Compose([A.HorizontalFlip(p=1)], keypoint_params=params), features, sample)

    assert found["p"] is None
    assert found["q"] is None
    assert list(found["l"]) == [1]
    there = drawn(A.Compose([A.HorizontalFlip(p=1)], keypoint_params=params), features, {**sample, "p": POINTS[:1]})
    assert np.allclose(there["p"], [79, 0] + POINTS[:1] * [-1, 1])
