"""One contract for transforms: the same object serves for writing and for reading, with the same checks."""

import functools
import random

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    Image,
    IncompleteRunError,
    IndexRow,
    Mask,
    OptionError,
    SampleError,
    Skip,
    Tensor,
    Text,
    load,
)
from datamat.readers.tf import TfOptions
from datamat.testing import InlineExecutor
from datamat.transforms.seeding import sample_rng

NUM_ROWS = 6


class Photos(DatasetWriter):
    """Images whose pixels show which row they belong to, each with a mask and a vector."""

    name = "photos"
    features = Features({"caption": Text(), "image": Image(), "mask": Mask(), "vector": Tensor((4,))})

    def index(self, source):
        return [IndexRow(f"{number}", fields={"number": number}) for number in range(NUM_ROWS)]

    def read(self, row):
        image = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3) + np.uint8(row.fields["number"])
        return {
            "caption": "größer",
            "image": image,
            "mask": image[..., 0] // 2,
            "vector": np.arange(4, dtype=np.float32),
        }


class Noise:
    """A callable object."""

    def __call__(self, sample, rng):
        return {**sample, "image": sample["image"] ^ rng.integers(256, size=(16, 16, 3), dtype=np.uint8)}

    def method(self, sample, rng):
        return self(sample, rng)

    @staticmethod
    def flip(sample):
        return {**sample, "image": sample["image"][:, ::-1], "mask": sample["mask"][:, ::-1]}


def noise(sample, rng):
    return Noise()(sample, rng)


def noise_by_name(sample, *, strength=1, rng=None):
    return Noise()(sample, rng)


def in_place(sample):
    sample["image"] += np.uint8(1)
    sample["vector"] *= 2
    return sample


def generated(sample, rng):
    yield noise(sample, rng)


def from_globals(sample):
    shift = np.uint8(random.randrange(256) ^ np.random.randint(256))
    return {**sample, "image": sample["image"] ^ shift}


PLAIN = {
    "a function of a sample": Noise.flip,
    "a lambda": lambda sample: {**sample, "vector": sample["vector"] + 1},
    "in place": in_place,
    "a scale of its own": lambda sample, scale=3: {**sample, "vector": sample["vector"] * scale},
}
DRAWING = {
    "a function": noise,
    "by name": noise_by_name,
    "an object": Noise(),
    "a method": Noise().method,
    "a partial function": functools.partial(noise_by_name, strength=2),
    "a generator": generated,
    "a lambda that draws": lambda sample, rng: noise(sample, rng),
}


def written(output, transform, **options):
    job = Prepared(Photos(), None, output, transform=transform, executor=InlineExecutor(), **options)
    job.run(progress=False)
    return load(output)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A finished dataset of untransformed samples."""
    return written(tmp_path_factory.mktemp("photos") / "out", None)


def same(one, other):
    """Return whether two samples have equal values; keys have no copy when they are read."""
    return all(np.array_equal(one[name], other[name]) for name in ("image", "mask", "vector"))


@pytest.mark.parametrize("transform", [*PLAIN.values(), *DRAWING.values()], ids=[*PLAIN, *DRAWING])
def test_one_callable_writes_and_reads_the_same(photos, tmp_path, transform):
    """Copy 0 of a row is what its record gives in epoch 0: the streams have the same names."""
    before = written(tmp_path / "out", transform, seed=3)

    found = list(photos.to_numpy(transform=transform, seed=3))

    by_row = {sample["key"].partition("#")[0]: sample for sample in before}
    assert len(by_row) == len(found) == NUM_ROWS
    assert all(same(by_row[sample["key"]], sample) for sample in found)
    assert not all(same(photos[sample["key"]], sample) for sample in found)


def test_one_pipeline_writes_and_reads_the_same(photos, tmp_path):
    """The pipeline has albumentations' flips and colours, and a field that both leave alone on purpose."""
    A = pytest.importorskip("albumentations")
    pipeline = A.Compose([A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.9), A.VerticalFlip(p=0.5)])
    before = written(tmp_path / "out", pipeline, seed=3, untouched=("vector",))

    found = list(photos.to_numpy(transform=pipeline, seed=3, untouched=("vector",)))

    by_row = {sample["key"].partition("#")[0]: sample for sample in before}
    assert all(same(by_row[sample["key"]], sample) for sample in found)


def test_draws_follow_seed_key_and_epoch(photos):
    """As documented, the generator is that of the name, with any number of threads."""
    drawn = {}

    def listen(sample, rng):
        drawn.setdefault(sample["key"], []).append(rng.random())
        return sample

    keys = photos.keys()
    loader = photos.to_numpy(2, transform=listen, seed=9, num_threads=3)
    list(loader), list(loader)

    assert drawn == {key: [sample_rng(9, key, epoch).random() for epoch in range(2)] for key in keys}


def test_global_generators_are_seeded_in_reading_processes(photos, tmp_path):
    """A transform that takes no rng draws the same from them with any number of workers, and as in writing."""
    before = written(tmp_path / "out", from_globals, seed=3)

    one, two = (list(photos.to_numpy(transform=from_globals, seed=3, num_workers=number)) for number in (1, 2))

    by_row = {sample["key"].partition("#")[0]: sample for sample in before}
    assert all(map(same, one, two))
    assert all(same(by_row[sample["key"]], sample) for sample in one)


class Unready:
    pass


WRONG = {
    "nothing": (lambda: 1, "can be called neither"),
    "three": (lambda sample, rng, scale: sample, "'scale'"),
    "no positions": (lambda *, sample: sample, "can be called neither"),
    "a class": (Noise, "the class Noise"),
    "an object": (Unready(), "want an albumentations pipeline"),
    "a number": (3, "transform is 3"),
    "a name": ("flip", "transform is 'flip'"),
}


@pytest.mark.parametrize(("transform", "message"), WRONG.values(), ids=WRONG)
def test_both_refuse_what_cannot_be_called(photos, tmp_path, transform, message):
    """They do so at once, with the same words."""
    with pytest.raises(OptionError, match=message) as writing:
        written(tmp_path / "out", transform)
    with pytest.raises(OptionError, match=message) as reading:
        photos.to_numpy(transform=transform)

    assert str(writing.value) == str(reading.value)


def test_both_refuse_a_pipeline_that_would_not_move_a_field(photos, tmp_path):
    """The words are the same, also for a name that is no field."""
    A = pytest.importorskip("albumentations")
    flip = A.Compose([A.HorizontalFlip(p=1)])

    for untouched, message in [((), "'vector' .* would get out of step"), (("vectr",), "untouched names 'vectr'")]:
        with pytest.raises(OptionError, match=message) as writing:
            written(tmp_path / "out", flip, untouched=untouched)
        with pytest.raises(OptionError, match=message) as reading:
            photos.to_numpy(transform=flip, untouched=untouched)
        assert str(writing.value) == str(reading.value)


RESULTS = {
    "a list of numbers": (lambda sample: [1], "a list that holds an int"),
    "an array": (lambda sample: sample["image"], "a ndarray"),
    "text": (lambda sample: "sample", "a str"),
}


@pytest.mark.parametrize(("transform", "message"), RESULTS.values(), ids=RESULTS)
def test_both_refuse_results_that_are_no_samples(photos, tmp_path, transform, message):
    """The error gives the name of the function, the key, and what is wanted."""
    for use in (lambda: written(tmp_path / "out", transform), lambda: list(photos.to_numpy(transform=transform))):
        with pytest.raises(SampleError, match=rf"sample '\d'.*<lambda> returned {message}"):
            use()


LEFT_OUT = {
    "None": (lambda sample: None, "is a `return` missing"),
    "an empty list": (lambda sample: [], "no samples"),
    "Skip": (lambda sample: Skip("too dark"), "too dark"),
}


@pytest.mark.parametrize(("transform", "message"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_samples_are_left_out_when_written_and_not_when_read(photos, tmp_path, transform, message):
    """A reader must give one sample for each record; a writer that leaves all out has forgotten something."""
    some = lambda sample: transform(sample) if sample["key"] == "1" else sample  # noqa: E731

    with pytest.raises(SampleError, match=rf"sample '\d'.*{message}"):
        list(photos.to_numpy(transform=transform))
    assert len(written(tmp_path / "some", some)) == NUM_ROWS - 1
    with pytest.raises(IncompleteRunError, match=r"all 6 rows were left out or failed.*is a `return` missing"):
        written(tmp_path / "none", transform)


def test_several_samples_are_written_and_not_read(photos, tmp_path):
    """A reader expects one sample in return."""
    twice = lambda sample: [sample, sample]  # noqa: E731

    assert len(written(tmp_path / "out", twice)) == 2 * NUM_ROWS
    with pytest.raises(SampleError, match="<lambda> returned 2 samples, but a reader wants one"):
        list(photos.to_numpy(transform=twice))


def test_torch_reads_through_the_same_transforms(photos):
    """The values are those of `to_numpy`."""
    pytest.importorskip("torch")

    for transform in (noise, Noise.flip):
        arrays = list(photos.to_numpy(4, transform=transform, seed=5))
        tensors = list(photos.to_torch(4, transform=transform, seed=5))
        assert all(np.array_equal(a["image"], t["image"].numpy()) for a, t in zip(arrays, tensors, strict=True))


@pytest.mark.parametrize(
    "transform",
    [noise, pytest.param(Noise(), marks=pytest.mark.long), pytest.param(noise_by_name, marks=pytest.mark.long)],
    ids=["function", "object", "by name"],
)
def test_tf_data_passes_arrays_to_functions_with_a_generator(photos, transform):
    """In each epoch the values are those of `to_numpy`, batched or not, cached or not."""
    pytest.importorskip("tensorflow")
    arrays = photos.to_numpy(2, transform=transform, seed=5)

    for options in ({}, {"tf": TfOptions(cache=True)}):
        dataset = photos.to_tf(2, transform=transform, seed=5, **options)
        for _ in range(2):
            for batch, expected in zip(dataset.as_numpy_iterator(), arrays, strict=True):
                for name in ("caption", "key"):
                    assert [text.decode() for text in batch[name]] == expected[name]
                assert all(np.array_equal(batch[name], expected[name]) for name in ("image", "mask", "vector"))
        arrays = photos.to_numpy(2, transform=transform, seed=5)


def test_tf_data_caches_samples_that_a_transform_writes_to(photos):
    """A cached sample is the same in the next epoch."""
    pytest.importorskip("tensorflow")
    given = {}

    def invert(sample, rng):
        given.setdefault(sample["key"], []).append(sample["image"].copy())
        sample["image"] ^= np.uint8(255)
        return sample

    dataset = photos.to_tf(2, transform=invert, tf=TfOptions(cache=True))
    list(dataset), list(dataset)

    assert all(np.array_equal(image, photos[key]["image"]) for key, images in given.items() for image in images)


@pytest.mark.long
def test_tf_data_takes_a_pipeline_that_crops(photos):
    """Sizes and dtypes may change; layers know the sizes; an endless dataset draws new numbers in each round."""
    A = pytest.importorskip("albumentations")
    pytest.importorskip("tensorflow")
    crop = A.Compose([A.RandomCrop(8, 8), A.HorizontalFlip(p=0.5), A.Normalize()])
    arrays = photos.to_numpy(3, transform=crop, untouched=("vector",), seed=5)

    dataset = photos.to_tf(3, transform=crop, untouched=("vector",), seed=5)

    assert dataset.element_spec["image"].shape.as_list() == [None, 8, 8, 3]
    for batch, expected in zip(dataset.as_numpy_iterator(), arrays, strict=True):
        assert batch["image"].dtype == np.float32
        assert np.array_equal(batch["image"], expected["image"])
        assert np.array_equal(batch["mask"], expected["mask"])
    endless = photos.to_tf(NUM_ROWS, transform=crop, untouched=("vector",), tf=TfOptions(repeat=True))
    assert len(list(endless.take(3))) == 3


def test_tf_data_names_the_sample_that_a_transform_fails_for(photos):
    """It may raise, or return something else than for the first sample."""
    tf = pytest.importorskip("tensorflow")

    def fails(sample, rng):
        if sample["key"] == "4":
            raise ValueError("no four")
        return sample

    def changes(sample, rng):
        return {**sample, "vector": sample["vector"].astype(np.float64) if sample["key"] == "4" else sample["vector"]}

    for transform, message in (
        (fails, "the transform .*no four"),
        (changes, "its field 'vector' is float64.*, but float32"),
    ):
        with pytest.raises((SampleError, tf.errors.OpError), match=f"sample '4': {message}"):
            list(photos.to_tf(2, transform=transform))


def test_static_transform_is_a_function_of_the_sample_alone(photos):
    """Its result is kept for all epochs."""
    with pytest.raises(OptionError, match=r"static_transform is traced by TensorFlow .*as transform"):
        photos.to_tf(tf=TfOptions(static_transform=noise))
