"""Transforms of torchvision, kornia and audiomentations: all fields in step, draws that the sample alone decides."""

import concurrent.futures
import functools
import importlib
import os
import pathlib
import random
import runpy

import albumentations as A
import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    Audio,
    BBoxes,
    ClassLabel,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Mask,
    OptionError,
    SampleError,
    Scalar,
    SchemaError,
    ShardOptions,
    Tensor,
    Text,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.fingerprint import fingerprint
from datamat.testing import InlineExecutor
from datamat.transforms import Augmenter
from datamat.transforms.seeding import RandomStreams

FEATURES = Features(
    {
        "image": Image(),
        "mask": Mask(),
        "boxes": BBoxes(),
        "labels": ClassLabel(num_classes=9, shape=(None,)),
        "caption": Text(),
    }
)


def sample(number=0):
    rng = np.random.default_rng(number)
    return {
        "key": f"row{number}",
        "image": rng.integers(0, 256, (16, 20, 3), np.uint8),
        "mask": rng.integers(0, 5, (16, 20), np.uint8),
        "boxes": np.array([[0.125, 0.1, 0.5, 0.75], [0, 0, 1, 1], [0.5, 0.5, 0.5, 0.5]], np.float32),
        "labels": [3, 4, number % 9],
        "caption": "größe",
    }


@pytest.fixture(scope="module", autouse=True)
def importable_torchvision():
    """Let torchvision be imported beside any torch, in this process and in workers."""
    folder = pathlib.Path(__file__).parents[1] / "cpu_torchvision"
    runpy.run_path(str(folder / "sitecustomize.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


def library(name):
    """Return a module of a library, or skip where it is not installed; one that is broken is an error."""
    pytest.importorskip(name.partition(".")[0], exc_type=ModuleNotFoundError)
    return importlib.import_module(name)


def torchvision():
    return library("torchvision.transforms.v2")


def kornia():
    return library("kornia.augmentation")


def torchvision_flip():
    return torchvision().RandomHorizontalFlip(p=1)


def torchvision_turns():
    v2 = torchvision()
    return v2.Compose(
        [v2.RandomResizedCrop((16, 20)), v2.ColorJitter(0.3, 0.3), v2.RandomApply([v2.RandomRotation(90)])]
    )


def kornia_flip():
    return kornia().RandomHorizontalFlip(p=1.0)


def kornia_sequence():
    return kornia().AugmentationSequential(kornia_flip(), data_keys=["input", "mask"])


def torch_sequence(flip):
    torch = pytest.importorskip("torch")
    return torch.nn.Sequential(flip(), flip(), flip())


def kornia_turns():
    K = kornia()
    return K.AugmentationSequential(K.RandomAffine(30.0, p=0.8), K.ColorJiggle(0.2, 0.2, p=0.8), random_apply=1)


FLIPS = {
    "torchvision": torchvision_flip,
    "torchvision, sequence": functools.partial(torch_sequence, torchvision_flip),
    "kornia": kornia_flip,
    "kornia, sequence": kornia_sequence,
    "kornia, torch's sequence": functools.partial(torch_sequence, kornia_flip),
}
TURNS = {"torchvision": torchvision_turns, "kornia": kornia_turns}
each_flip = pytest.mark.parametrize("make", FLIPS.values(), ids=FLIPS)
each_turn = pytest.mark.parametrize("make", TURNS.values(), ids=TURNS)


def draw(transform, given=None, *, features=FEATURES, copy=0, **options):
    augmenter = Augmenter(features, transform, **options)
    return next(augmenter.stream(given or sample(), augmenter.seeded_streams("row0", copy, 3)))


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in FEATURES)


# ---------------------------------------------------------------- fields


@each_flip
def test_image_mask_and_boxes_move_together(make):
    """To the pixel; what the library does not know stays."""
    before = sample()

    after = draw(make())

    assert after["image"].dtype == after["mask"].dtype == np.uint8
    assert np.array_equal(after["image"], before["image"][:, ::-1])
    assert np.array_equal(after["mask"], before["mask"][:, ::-1])
    assert np.allclose(after["boxes"][:, [1, 3]], 1 - before["boxes"][:, [3, 1]], atol=1e-6)
    assert np.allclose(after["boxes"][:, [0, 2]], before["boxes"][:, [0, 2]], atol=1e-6)
    assert (list(after["labels"]), after["caption"]) == ([3, 4, 0], "größe")
    assert FEATURES.encode({**after, "key": "x"})


@each_flip
def test_boxes_may_be_none(make):
    """A picture without objects is moved like others."""
    after = draw(make(), {**sample(), "boxes": np.zeros((0, 4), np.float32), "labels": []})

    assert after["boxes"].shape == (0, 4)
    assert np.array_equal(after["image"], sample()["image"][:, ::-1])


@each_flip
def test_grey_pictures_keep_their_form(make):
    features = Features({"image": Image((None, None, 1))})
    picture = sample()["image"][..., :1]

    assert np.array_equal(draw(make(), {"key": "a", "image": picture}, features=features)["image"], picture[:, ::-1])


@each_flip
def test_field_that_would_get_out_of_step_is_refused(make):
    """As with albumentations: before anything is drawn, and `untouched` permits it."""
    features = Features({**FEATURES, "depth": Tensor((None, None), "float32")})
    given = {**sample(), "depth": np.ones((16, 20), np.float32)}

    with pytest.raises(
        OptionError, match=r"field 'depth' .* with the image, which [^;]+ (changes|change); pass untouched="
    ):
        draw(make(), given, features=features)
    after = draw(make(), given, features=features, untouched=("depth", "mask"))
    assert np.array_equal(after["mask"], given["mask"])
    assert Augmenter(features, make(), untouched=("depth", "mask")).withheld


def test_transform_that_moves_nothing_needs_no_leave():
    """Colours may change beside any array."""
    features = Features({**FEATURES, "depth": Tensor((None, None), "float32")})
    given = {**sample(), "depth": np.ones((16, 20), np.float32)}

    for transform in (torchvision().ColorJitter(0.5), kornia().RandomBrightness((0.5, 0.6), p=1.0)):
        after = draw(transform, given, features=features)
        assert not np.array_equal(after["image"], given["image"])
        assert np.array_equal(after["mask"], given["mask"])


def test_labels_follow_boxes_that_are_dropped():
    """Torchvision drops them where it is asked to; labels that it does not know are refused."""
    v2 = torchvision()
    features = Features({**FEATURES, "areas": Tensor((None,), "float64")})
    given = {**sample(), "areas": np.arange(3.0)}

    both = v2.SanitizeBoundingBoxes(min_size=3, labels_getter=lambda one: (one["labels"], one["areas"]))
    after = draw(both, given, features=features)

    assert (after["labels"].tolist(), after["areas"].tolist(), len(after["boxes"])) == ([3, 4], [0.0, 1.0], 2)
    with pytest.raises(SchemaError, match="kept 2 of the 3 boxes 'boxes' but all entries of 'areas'; name it in the"):
        draw(v2.SanitizeBoundingBoxes(min_size=3), given, features=features)
    assert draw(v2.SanitizeBoundingBoxes(min_size=3), given, features=features, untouched=("areas",))


REFUSED = {
    "pure tensors": (lambda: torchvision().Compose([torchvision().ToPureTensor()]), "leave out ToPureTensor"),
    "several pictures": (lambda: torchvision().FiveCrop(4), "returned a tuple for field 'image'"),
    "a batch": (lambda: torchvision().MixUp(num_classes=2), "mixes the samples of a batch; call it on batches"),
    "a batch, kornia": (lambda: kornia().RandomMixUpV2(), "mixes the samples of a batch"),
    "fractions": (lambda: kornia().Normalize(mean=0.5, std=0.5), "does not fit in 8 bits"),
    "the first torchvision": (
        lambda: (torchvision(), library("torchvision.transforms").RandomHorizontalFlip())[1],
        "handles single pictures only; use torchvision.transforms.v2",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_with_the_remedy(make, message):
    features = Features({"image": Image(), "boxes": BBoxes()})
    given = {name: sample()[name] for name in ("key", "image", "boxes")}
    if message.startswith("returned"):
        features, given = Features({"image": Image()}), {name: sample()[name] for name in ("key", "image")}

    with pytest.raises((OptionError, SchemaError), match=message):
        draw(make(), given, features=features)


def test_features_without_an_image_are_refused():
    with pytest.raises(OptionError, match="have no image to transform, only key, caption"):
        draw(torchvision_flip(), {"key": "a", "caption": "b"}, features=Features({"caption": Text()}))


# ---------------------------------------------------------------- chance


@each_turn
def test_draws_depend_on_seed_key_and_copy_alone(make):
    """Not on order, threads or what was drawn before; threads leave the generators of the process as they were."""
    torch = pytest.importorskip("torch")
    augmenter = Augmenter(FEATURES, make())

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    alone = {copy: draw(make(), copy=copy) for copy in range(12)}
    before = states()  # `draw` has seeded them, in this thread and before the others

    def in_thread(copy):
        found = Augmenter(FEATURES, augmenter.transform).stream(sample(), RandomStreams(3, "row0", copy))
        return next(found)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        threads = dict(zip(range(11, -1, -1), pool.map(in_thread, range(11, -1, -1)), strict=True))

    assert all(equal(alone[copy], threads[copy]) for copy in alone)
    assert len({one["image"].tobytes() for one in alone.values()}) > 6
    assert states() == before


@each_turn
def test_use_does_not_change_the_fingerprint(make):
    """Otherwise the next run would make all shards again."""
    transform = make()
    before = fingerprint(transform, where="transform")

    draw(transform)

    assert fingerprint(transform, where="transform") == before == fingerprint(make(), where="transform")


def test_global_generators_follow_one_thread_at_a_time():
    """Whatever the others draw, each thread gets the numbers of its own sample, and the caller its own."""
    random.seed(5)
    wanted_after = random.Random(5).random()

    def numbers(copy):
        with RandomStreams(1, "a", copy).as_globals():
            return random.random(), np.random.random(), random.random()

    alone = [numbers(copy) for copy in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(numbers, range(40)))

    assert together == alone
    assert len(set(alone)) == 40
    assert random.random() == wanted_after


class Photos(DatasetWriter):
    """Pictures with all that moves with them."""

    name = "photos"
    features = FEATURES

    def index(self, source):
        return [IndexRow(f"row{number}", fields={"number": number}) for number in range(12)]

    def read(self, row):
        found = sample(row.fields["number"])
        del found["key"]
        return found


def written(output, transform, copies=2, **options):
    options = options or {"executor": InlineExecutor()}
    shards = ShardOptions(num_shards=3)
    job = Prepared(Photos(), None, output, transform=transform, copies=copies, seed=3, shards=shards, **options)
    job.run(progress=False)
    return {path.name: path.read_bytes() for path in output.glob("*.tfrecord")}


def albumentations_turns():
    boxes = A.BboxParams("albumentations", ["labels"], filter_invalid_bboxes=True)
    return A.Compose([A.RandomResizedCrop((16, 20)), A.Rotate(90), A.ColorJitter()], boxes)


def flipped_by_global_draws(sample):
    if random.random() < 0.5:
        sample = {**sample, "image": sample["image"][:, ::-1]}
    return {**sample, "image": sample["image"] + np.random.randint(0, 9, sample["image"].shape, np.uint8)}


def brightened_by_rng(sample, rng):
    return {**sample, "image": sample["image"] + rng.integers(0, 9, sample["image"].shape, np.uint8)}


EVERY = {
    **TURNS,
    "albumentations": albumentations_turns,
    "function": lambda: flipped_by_global_draws,
    "function of rng": lambda: brightened_by_rng,
}


@pytest.mark.sample(3)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
def test_same_pictures_for_any_number_of_workers_and_start_method(tmp_path, make, request):
    """Byte for byte, and again on a deep verify."""
    one = written(tmp_path / "one", make())

    methods = ["fork"] if request.config.getoption("--commit") else ["fork", "forkserver", "spawn"]
    for method in methods:
        workers = WorkerOptions(num_workers=3, start_method=method)
        assert written(tmp_path / method, make(), workers=workers) == one
    assert len({sample["image"].tobytes() for sample in load(tmp_path / "one")}) == 24
    assert not verify(tmp_path / "one", deep=True).found


@pytest.mark.timeout(300)
@each_turn
def test_readers_draw_what_was_written(tmp_path, make):
    """In threads and in processes: epoch 0 of a record is copy 0 of its row. tf.data refuses what needs torch."""
    written(tmp_path / "plain", None, copies=1)
    written(tmp_path / "drawn", make(), copies=1)
    wanted = {sample["key"].partition("#")[0]: sample for sample in load(tmp_path / "drawn")}
    plain = load(tmp_path / "plain")

    found = [
        list(plain.to_numpy(transform=make(), seed=3)),
        list(plain.to_numpy(transform=make(), seed=3, shuffle=True)),
        list(plain.to_numpy(transform=make(), seed=3, num_workers=2)),
    ]

    for samples in found:
        assert len(samples) == 12
        for one in samples:
            one["labels"] = np.asarray(one["labels"])
            other = wanted[one["key"]]
            assert all(np.array_equal(one[name], other[name]) for name in ("image", "mask", "boxes", "labels"))


@pytest.mark.long
@pytest.mark.timeout(180)  # the first one imports TensorFlow beside torch
@pytest.mark.parametrize("make", [torchvision_turns, kornia_turns], ids=["torchvision", "kornia"])
@pytest.mark.parametrize("is_mapped", [False, True], ids=["transform", "map"])
def test_tensorflow_gets_what_a_library_draws_in_every_epoch(tmp_path, make, is_mapped):
    """The samples of `to_numpy`; what torch keeps for a thread outlives the calls, without which the process died."""
    pytest.importorskip("tensorflow")
    written(tmp_path / "out", None, copies=1)
    data, transform = load(tmp_path / "out"), make()
    options = {} if is_mapped else {"transform": transform}
    data = data.map(transform, seed=3) if is_mapped else data
    arrays, tensors = data.to_numpy(seed=3, **options), data.to_tf(seed=3, **options)

    for _ in range(2):
        for wanted, found in zip(arrays, tensors, strict=True):
            assert found["key"].numpy().decode() == wanted["key"]
            assert all(np.array_equal(found[name], wanted[name]) for name in ("image", "mask", "boxes", "labels"))


def test_error_of_a_library_names_the_sample(tmp_path):
    """What the library raises comes with the key of the sample."""
    crop = torchvision().RandomCrop((400, 400))
    written(tmp_path / "out", None, copies=1)

    with pytest.raises(SampleError, match=r"row\d+.*the transform raised"):
        list(load(tmp_path / "out").to_numpy(transform=crop, seed=3))


# ---------------------------------------------------------------- audiomentations


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_audiomentations_draw_by_the_sample_alone(tmp_path):
    """The same sound for any number of workers, and from readers what was written."""
    audiomentations, _ = library("audiomentations"), library("soundfile")
    waves = (np.sin(np.arange(3000) / 7) / 2).astype(np.float32)
    sounds = np.stack([waves, waves[::-1]], axis=1)
    noise = audiomentations.Compose([audiomentations.AddGaussianNoise(p=1.0), audiomentations.Gain(p=0.7)])
    features = Features({"sound": Audio(16_000), "number": Scalar("int64")})

    def written(output, transform, **workers):
        materialize(
            lambda number: {"sound": sounds[: 400 + number, : 1 + number % 2], "number": number},
            range(8),
            tmp_path / output,
            features=features,
            transform=transform,
            seed=3,
            progress=False,
            **(workers or {"executor": InlineExecutor()}),
        )
        return {path.name: path.read_bytes() for path in (tmp_path / output).glob("*.tfrecord")}

    one = written("one", noise)
    for method in ("forkserver", "spawn"):
        assert written(method, noise, workers=WorkerOptions(num_workers=2, start_method=method)) == one
    written("plain", None)
    wanted = {int(sample["number"]): sample["sound"] for sample in load(tmp_path / "one")}
    plain = load(tmp_path / "plain")
    for found in (
        list(plain.to_numpy(transform=noise, seed=3)),
        list(plain.to_numpy(transform=noise, seed=3, num_workers=2)),
    ):
        assert len(found) == 8
        assert all(np.array_equal(row["sound"], wanted[int(row["number"])]) for row in found)
    assert len({sound.tobytes() for sound in wanted.values()}) == 8
    assert not np.array_equal(wanted[3], sounds[:403])
