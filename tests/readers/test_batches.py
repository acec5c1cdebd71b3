"""Batches of numpy arrays: every record once, the same from threads and processes, resumable anywhere."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import small_pairs
from every_feature import Everything
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_memory import left_behind

from datamat import (
    Features,
    Image,
    OptionError,
    SampleError,
    load,
    materialize,
)
from datamat.testing import InlineExecutor


def keys_of(batches):
    """Return the keys of all batches, in order."""
    return [key for batch in batches for key in batch["key"]]


def same(one, other):
    """Tell whether two batches are equal."""
    return one.keys() == other.keys() and all(
        all(map(np.array_equal, one[name], other[name]))
        if isinstance(one[name], list)
        else np.array_equal(one[name], other[name])
        for name in one
    )


def noisy(sample, rng):
    """Return a sample with random numbers."""
    return {**sample, "noise": rng.random(3), "image": sample["image"][::2]}


def test_batch_holds_the_samples_in_order(pairs):
    """Pictures and masks in one array each, keys in a list; the last batch has what is left."""
    data = load(pairs, "train")

    batches = list(data.to_numpy(16))

    assert [len(batch["key"]) for batch in batches] == [16, 16, 16, 12]
    assert keys_of(batches) == data.keys()
    for place, sample in enumerate(data):
        batch = batches[place // 16]
        assert np.array_equal(batch["image"][place % 16], sample["image"])
        assert np.array_equal(batch["mask"][place % 16], sample["mask"])
    assert (batches[0]["image"].shape, batches[0]["image"].dtype) == ((16, 24, 32, 3), np.uint8)
    assert (batches[0]["mask"].shape, batches[0]["mask"].dtype) == ((16, 24, 32), np.uint8)
    assert batches[0]["image"].flags.writeable


def test_every_feature_has_its_place_in_a_batch(everything):
    """Numbers and tensors of fixed shape are stacked in their dtype; values that may vary in length come as a list."""
    data = load(everything)
    samples = list(data)

    (batch,) = data.to_numpy(100)

    lists = {name for name, value in batch.items() if isinstance(value, list)}
    named = {"key", "caption", "boxes", "points", "polygons", "rotated", "open", "empty"}
    assert lists == {*named, *(name for name in data.features if "raw_" in name)}
    assert batch.keys() == set(Everything.features)
    for name, column in batch.items():
        for value, sample in zip(column, samples, strict=True):
            assert np.array_equal(value, sample[name])
            assert np.asarray(value).dtype == np.asarray(sample[name]).dtype
    assert batch["label"].shape == (7,)
    assert batch["labels"].shape == (7, 2)


def test_pictures_of_several_sizes_are_a_list(tmp_path):
    """Batches that hold several sizes have a list; others are stacked."""
    materialize(
        lambda number: {"image": np.full((4 if number < 8 else number, 5, 3), number, np.uint8)},
        range(12),
        tmp_path / "out",
        features=Features({"image": Image()}),
        executor=InlineExecutor(),
        progress=False,
    )
    data = load(tmp_path / "out")

    (batch,) = data.to_numpy(12)
    singles = list(data.to_numpy(1))

    assert sorted(image.shape[0] for image in batch["image"]) == [4] * 8 + [8, 9, 10, 11]
    assert all((image == int(key)).all() for image, key in zip(batch["image"], batch["key"], strict=True))
    assert all(single["image"].shape[0] == 1 for single in singles)


def test_without_a_batch_size_samples_come_one_at_a_time(pairs):
    """They are those of the dataset itself, but decoded ahead."""
    data = load(pairs, "val")

    found = list(data.to_numpy())

    assert all(map(same, found, data))
    assert len(data.to_numpy()) == len(found) == 4


@pytest.mark.parametrize(
    ("format_name", "shuffle"),
    [("tfrecord", False), ("tfrecord", True), ("tfrecord.gz", True), ("parquet", 16), ("webdataset", 16)],
)
def test_each_epoch_has_every_record_once(formats, format_name, shuffle):
    """This holds in every format; a shuffled epoch has another order each time."""
    check_epochs(load(formats, "train", format=format_name), shuffle)


@pytest.mark.long
def test_each_epoch_of_arrayrecord_has_every_record_once(make_pairs_output, tmp_path):
    pytest.importorskip("array_record", reason="the format needs it")
    check_epochs(load(make_pairs_output(tmp_path / "out", format="arrayrecord"), "train"), shuffle=True)


def check_epochs(data, shuffle):
    """Assert that each epoch has all records, and that the number of an epoch decides its order."""
    batches = data.to_numpy(7, shuffle=shuffle, seed=1)

    first, second = keys_of(batches), keys_of(batches)

    assert sorted(first) == sorted(second) == sorted(data.keys())
    assert (first == data.keys()) == (first == second) == (shuffle is False)
    assert len(batches) == 9
    batches.set_epoch(0)
    assert keys_of(batches) == first == keys_of(data.to_numpy(7, shuffle=shuffle, seed=1))


@pytest.mark.parametrize("num_threads", [1, 5])
def test_batches_are_the_same_from_any_number_of_threads(pairs, num_threads):
    """So are the random numbers of the transform."""
    data = load(pairs, "train")
    options = {"shuffle": True, "seed": 5, "transform": noisy}
    expected = list(data.to_numpy(8, num_threads=3, **options))

    found = list(data.to_numpy(8, num_threads=num_threads, prefetch=4, **options))

    assert all(map(same, found, expected))
    assert len(found) == len(expected)


def test_batches_are_the_same_from_worker_processes(pairs):
    """Arrays travel in shared memory, or through the pipe where they are small or differ in size."""
    data = load(pairs, "train")
    options = {"shuffle": True, "seed": 5, "transform": lambda sample, rng: noisy(sample, rng)}
    expected = list(data.to_numpy(32, **options))

    found = list(data.to_numpy(32, num_workers=2, **options))

    assert all(map(same, found, expected))
    assert found[0]["image"].nbytes > 1 << 15
    assert found[0]["image"].flags.writeable


def test_transform_sees_each_sample_and_may_return_anything(pairs):
    """Arrays and numbers are stacked; all else comes as a list."""
    data = load(pairs, "val")
    transform = lambda sample: {"mean": float(sample["image"].mean()), "tag": (sample["key"], 1), "key": sample["key"]}  # noqa: E731

    (batch,) = data.to_numpy(8, transform=transform)

    assert batch["mean"].tolist() == [sample["image"].mean() for sample in data]
    assert batch["tag"] == [(sample["key"], 1) for sample in data]


@pytest.mark.parametrize(
    ("num_workers", "value"),
    [(0, lambda sample: sample["image"]), (0, lambda sample: "text"), (2, lambda sample: sample["image"])],
)
def test_samples_of_a_batch_that_differ_in_their_fields_are_refused(pairs, num_workers, value):
    """A field that a transform gave only some of them was memory that nothing had written to."""
    train = load(pairs, "train")
    chosen = train[3]["key"]

    def some(sample):
        return {**sample, **({"extra": value(sample)} if sample["key"] == chosen else {})}

    with pytest.raises(SampleError, match=r"compared with another sample of its batch, it (has|lacks) extra; return"):
        list(train.to_numpy(8, transform=some, num_workers=num_workers))
    assert [*{len(sample) for sample in train.to_numpy(transform=some)}] == [3, 4]  # single samples may differ


def test_random_numbers_differ_by_key_and_epoch(pairs):
    """The global generators keep their state."""
    batches = load(pairs, "train").to_numpy(60, transform=noisy)
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)

    (first,), (second,) = batches, batches

    assert np.random.random() == expected
    assert len({row.tobytes() for batch in (first, second) for row in batch["noise"]}) == 120


def test_albumentations_pipeline_serves_as_transform(pairs):
    """Its results are the same from any threads: each has a copy of it."""
    albumentations = pytest.importorskip("albumentations")
    flips = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)])
    data = load(pairs, "train")

    one, many = (list(data.to_numpy(20, transform=flips, num_threads=number)) for number in (1, 4))

    assert all(map(same, one, many))
    assert not np.array_equal(one[0]["image"], next(iter(data.to_numpy(20)))["image"])


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda sample: 1 / 0, "the transform raised ZeroDivisionError: division by zero"),
        (lambda sample: None, ".*<lambda> returned None: is a `return` missing"),
        (lambda sample: [sample] * 2, ".*<lambda> returned 2 samples, but a reader wants one"),
    ],
)
def test_failing_transform_is_reported_with_the_key(pairs, transform, message):
    """It may run in any thread."""
    data = load(pairs, "val")

    with pytest.raises(SampleError, match=f"sample 'val.*': {message}"):
        list(data.to_numpy(2, transform=transform))


def test_ranks_share_an_epoch(pairs):
    """Each rank gets as many batches, and every record comes once."""
    data = load(pairs, "train")
    ranks = [data.to_numpy(7, shuffle=True, seed=2, rank=rank, world_size=4) for rank in range(4)]

    found = [list(rank) for rank in ranks]

    assert {len(batches) for batches in found} == {3} == {len(rank) for rank in ranks}
    assert sorted(key for batches in found for key in keys_of(batches)) == sorted(data.keys())


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_resumed_epoch_has_every_record_once(pairs, data):
    """This holds with other ranks, batch sizes, threads and engines, and after a second stop; the state is JSON."""
    records = load(pairs, "train")
    cuts = [
        (data.draw(st.integers(1, 4)), data.draw(st.integers(2, 3)), data.draw(st.integers(0, 2))) for _ in range(2)
    ]
    state, found = None, []
    for world_size, batch_size, num_steps in [*cuts, (2, 5, 100)]:
        states = []
        for rank in range(world_size):
            loader = records.to_numpy(batch_size, shuffle=True, seed=9, rank=rank, world_size=world_size, num_threads=1)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            walk = iter(loader)
            found += [key for _, batch in zip(range(num_steps), walk, strict=False) for key in batch["key"]]
            walk.close()
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states)
        state = states[0]

    assert sorted(found) == sorted(records.keys())
    loader.load_state_dict(state)
    assert sorted(keys_of(records.to_numpy(60, shuffle=True, seed=9))) == sorted(found)


def test_resumed_batches_are_those_that_would_have_followed(pairs):
    """They are equal bit for bit, transform included; then comes the next epoch."""
    data = load(pairs, "train")
    options = {"shuffle": 16, "seed": 4, "transform": noisy}
    whole = data.to_numpy(8, **options)
    expected = [*whole, *whole]
    stopped, resumed = data.to_numpy(8, **options), data.to_numpy(8, num_threads=1, **options)

    walk = iter(stopped)
    begun = [next(walk) for _ in range(3)]
    resumed.load_state_dict(stopped.state_dict())
    found = [*begun, *resumed, *resumed]

    assert len(found) == len(expected) == 16
    assert all(map(same, found, expected))


@pytest.mark.parametrize(
    ("batch_size", "world_size", "drop_last"), [(2, 1, True), (2, 1, False), (3, 1, False), (1, 3, False)]
)
def test_state_at_an_end_resumes_with_the_next_epoch(pairs, batch_size, world_size, drop_last):
    """The one that would have followed, for any number of ranks and of records in a batch."""
    options = {"shuffle": True, "seed": 1}
    data = load(pairs, "train").take(7)
    loader = data.to_numpy(2, **options, drop_last=True)
    list(loader)
    state = loader.state_dict()

    others = [
        data.to_numpy(batch_size, **options, drop_last=drop_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for other in others:
        other.load_state_dict(state)
    found = [keys_of(other) for other in others]

    next_epoch = data.to_numpy(7, **options)
    next_epoch.set_epoch(1)
    (wanted,) = next_epoch
    if world_size == 1:
        assert found == [wanted["key"][: 6 if drop_last else 7]]
    assert {key for keys in found for key in keys} == {*wanted["key"][: 6 if drop_last else 7]}


@pytest.mark.parametrize(
    ("options", "name"), [({"seed": 2}, "seed"), ({"shuffle": False}, "window"), ({"shuffle": 64}, "window")]
)
def test_state_of_another_order_is_refused(pairs, options, name):
    """The error says what differs."""
    data = load(pairs, "train")
    state = data.to_numpy(8, shuffle=True, seed=1).state_dict()

    with pytest.raises(OptionError, match=f"a loader with {name} .*, this one has .*; make a loader"):
        data.to_numpy(8, **{"shuffle": True, "seed": 1, **options}).load_state_dict(state)
    with pytest.raises(OptionError, match="a loader with num_records 60, this one has 4"):
        load(pairs, "val").to_numpy(8, shuffle=True, seed=1).load_state_dict(state)
    with pytest.raises(OptionError, match="not a state that state_dict"):
        data.to_numpy(8).load_state_dict({"step": 3})
    with pytest.raises(OptionError, match=r"a loader with version 1, .* start a new epoch"):  # in another order
        data.to_numpy(8, shuffle=True, seed=1).load_state_dict({**state, "version": 1})


def test_no_more_is_read_ahead_than_requested(pairs):
    """While a batch is in use, two are made or ready."""
    data, asked = load(pairs, "train"), []
    loader = data.to_numpy(5, transform=lambda sample: asked.append(sample["key"]) or sample, num_threads=3)

    walk = iter(loader)
    assert asked == []
    for number in range(1, 10):
        next(walk)
        assert len(asked) <= 5 * (number + 2)
    walk.close()


def test_threads_end_with_the_iterator(pairs):
    """It may be closed, exhausted, dropped, or fail."""
    data = load(pairs, "train")

    for walk in (iter(data.to_numpy(4)) for _ in range(3)):
        next(walk)
    del walk
    list(data.to_numpy(4))
    with pytest.raises(SampleError):
        list(data.to_numpy(4, transform=lambda sample: 1 / 0))
    gc.collect()

    threads = [thread for thread in threading.enumerate() if thread.name.startswith("datamat-read")]
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"prefetch": 0}, "prefetch"),
        ({"num_workers": -1}, "num_workers"),
        ({"shuffle": 0.5}, "shuffle"),
        ({"transform": 3}, "transform is 3; want an albumentations pipeline"),
        ({"transform": small_pairs.Pairs}, "transform is the class Pairs"),
    ],
)
def test_nonsense_is_refused_at_once(pairs, options, message):
    """The error comes before anything is read."""
    with pytest.raises(OptionError, match=message):
        load(pairs).to_numpy(**options)


@pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(name, marks=pytest.mark.long) for name in ("fork", "forkserver"))]
)
def test_worker_processes_need_no_guard(pairs, tmp_path, method):
    """This holds in a plain script with a transform of its own, by any start method; shared memory is left empty."""
    script = tmp_path / "job.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from datamat import load\n"
        "multiprocessing.set_start_method(sys.argv[2])\n"
        "def half(sample): return {**sample, 'image': sample['image'][::2]}\n"
        "batches = load(sys.argv[1], 'train').to_numpy(60, num_workers=2, transform=half)\n"
        "(batch,) = batches\n"
        "print(batch['image'].shape, len(set(batch['key'])))\n"
    )

    before = left_behind()
    done = subprocess.run(
        [sys.executable, script, pairs, method], capture_output=True, text=True, timeout=50, check=False
    )

    assert done.stdout == "(60, 12, 32, 3) 60\n", done.stderr
    assert left_behind() <= before


def test_transform_gets_memory_of_its_own(pairs):
    """Its result may have another shape than its input."""
    data = load(pairs, "train")

    halves = next(iter(data.to_numpy(16, transform=lambda sample: {**sample, "image": sample["image"][::2]})))

    assert np.array_equal(halves["image"], next(iter(data.to_numpy(16)))["image"][:, ::2])
