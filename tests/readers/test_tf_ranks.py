"""`to_tf` of several ranks: batches of `to_numpy`, and checkpoints that fit any number of ranks."""

from __future__ import annotations

import collections
import pathlib

import pytest
from numbered_rows import batched, written

from datamat import OptionError, concat, load, mix

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Two datasets of 29 and 14 rows, each as TFRecord and as Parquet."""
    folder = tmp_path_factory.mktemp("rows")
    return {
        name: (written(folder / f"{name}-a", 0, 29, 3, name), written(folder / f"{name}-b", 100, 14, 2, name))
        for name in ("tfrecord", "parquet")
    }


VIEWS = {
    "whole": lambda a, b: a,
    "select": lambda a, b: b.select(range(13, 0, -1)),
    "filter": lambda a, b: a.filter(lambda sample: sample["number"] % 3),
    "concat": lambda a, b: concat([b, a]),
    "mix": lambda a, b: mix({a: 0.7, b: 0.3}, seed=2),
}


def noisy(sample, rng):
    return {"number": sample["number"], "noise": rng.random()}


def of_ranks(data, world, size, **options):
    """Return the pipeline of each rank."""
    return [data.to_tf(size, rank=rank, world_size=world, **options) for rank in range(world)]


def saved(pipeline, num_steps, tmp_path):
    """Return what a pipeline delivers in its first steps, and a checkpoint of it after these."""
    iterator = iter(pipeline)
    found = batched([next(iterator) for _ in range(num_steps)])
    return found, tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))


def restored(pipeline, checkpoint):
    """Return an iterator that goes on where another one was saved."""
    iterator = iter(pipeline)
    tf.train.Checkpoint(it=iterator).read(checkpoint).assert_consumed()
    return iterator


@pytest.mark.parametrize(
    ("format_name", "shuffle", "world"), [("tfrecord", True, 1), ("tfrecord", False, 2), ("parquet", 9, 3)]
)
def test_batches_of_each_rank_are_those_of_numpy(rows, format_name, shuffle, world):
    """In each epoch, all ranks together have each record once, and equally many batches."""
    data = rows[format_name][0]
    options = {"shuffle": shuffle, "seed": 3, "transform": noisy}
    pipelines = of_ranks(data, world, 4, **options)
    arrays = [data.to_numpy(4, rank=rank, world_size=world, **options) for rank in range(world)]

    for _ in range(2):
        found = [list(pipeline) for pipeline in pipelines]
        wanted = [list(batches) for batches in arrays]
        assert {len(batches) for batches in found} == {len(arrays[0])}
        for field in ("number", "noise"):
            assert [[one[field].numpy().tolist() for one in batches] for batches in found] == [
                [one[field].tolist() for one in batches] for batches in wanted
            ]
        assert sorted(number for batches in found for number in batched(batches)) == list(range(29))


@pytest.mark.parametrize(
    ("view", "format_name", "shuffle", "world"),
    [
        ("whole", "tfrecord", True, 3),
        ("select", "parquet", True, 3),
        ("filter", "tfrecord", False, 1),
        ("concat", "parquet", 8, 1),
        ("mix", "tfrecord", True, 3),
        ("mix", "parquet", False, 1),
    ],
)
def test_checkpoint_of_two_ranks_resumes_any_number(rows, tmp_path, format_name, view, shuffle, world):
    """With exactly what was left: of the second epoch, whose order the third one does not repeat."""
    data = VIEWS[view](*rows[format_name])
    options = {"shuffle": shuffle, "seed": 5}
    alone = data.to_numpy(1, **options)
    wanted = [batched(alone) for _ in range(3)]
    pipelines = of_ranks(data, 2, 3, **options)
    for pipeline in pipelines:
        assert len(list(pipeline)) == -(-len(data) // 6)

    done, checkpoint = saved(pipelines[1], 2, tmp_path)
    done += saved(pipelines[0], 2, tmp_path)[0]
    again = of_ranks(data, world, 2, **options)
    left = [number for pipeline in again for number in batched(restored(pipeline, checkpoint))]

    assert sorted(done) == sorted(wanted[1][: len(done)])
    assert sorted(left) == sorted(wanted[1][len(done) :])
    assert collections.Counter(number for pipeline in again for number in batched(pipeline)) == collections.Counter(
        wanted[2]
    )


@pytest.mark.parametrize("size", [2, None])
def test_state_between_the_last_steps_of_an_epoch(rows, tmp_path, size):
    """Where the last step would have fewer records than ranks, it shares those of the step before."""
    data = rows["tfrecord"][1].take(7)
    walks = [iter(pipeline) for pipeline in of_ranks(data, 3, 2, shuffle=True)]
    done = batched([next(walk) for walk in walks])
    checkpoint = tf.train.Checkpoint(it=walks[2]).write(str(tmp_path / "checkpoint"))

    (again,) = of_ranks(data, 1, size, shuffle=True)
    rest = list(restored(again, checkpoint))
    left = batched(rest) if size else [int(sample["number"]) for sample in rest]

    assert len(done) == 4
    assert sorted([*done, *left]) == sorted(int(sample["number"]) for sample in data)


@pytest.mark.parametrize("steps", ["repeat", "map"])
def test_steps_that_follow_are_resumed_too(rows, tmp_path, steps):
    """Also those that hold batches back: what waits in them belongs to the rank that was saved."""
    data = rows["parquet"][0]

    def made(rank, world):
        if steps == "repeat":
            return data.to_tf(3, shuffle=True, rank=rank, world_size=world, repeat=True)
        found = data.to_tf(3, shuffle=True, rank=rank, world_size=world).repeat(4)
        return found.map(lambda batch: {"number": batch["number"]}, num_parallel_calls=3).prefetch(4)

    alone = data.to_numpy(1, shuffle=True)
    first, second = batched(alone), batched(alone)
    done, checkpoint = saved(made(1, 2), 7, tmp_path)  # of 5 steps in each epoch
    done += saved(made(0, 2), 7, tmp_path)[0]
    walks = [restored(made(rank, 3), checkpoint) for rank in range(3)]
    left = [number for walk in walks for number in batched([next(walk) for _ in range(2)])]

    assert sorted(done) == sorted([*first, *second[:12]])
    assert sorted(left) == sorted(second[12:])


@pytest.mark.parametrize("form", [{"pack": {"tokens": 10}}, {"bucket": {"tokens": 12}}], ids=["pack", "bucket"])
def test_sequences_of_ranks_resume_under_others(rows, tmp_path, form):
    """Their units take the place of records."""
    data = concat(rows["tfrecord"])
    options = {"shuffle": True, "seed": 1, **form}
    size = 2 if "pack" in form else None

    def keys(batches):
        found = [batch["key"].flat_values if size else batch["key"] for batch in batches]
        return [key.decode() for one in found for key in one.numpy().tolist()]

    done = []
    for pipeline in of_ranks(data, 2, size, **options):
        iterator = iter(pipeline)
        done += keys([next(iterator) for _ in range(2)])
    checkpoint = tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))
    left = [key for one in of_ranks(data, 3, size, **options) for key in keys(restored(one, checkpoint))]

    assert sorted([*done, *left]) == sorted(data.keys())


def test_remainder_is_dropped_on_all_ranks(rows):
    """Batches are full, and their size is known."""
    pipelines = of_ranks(rows["parquet"][0], 3, 4, drop_remainder=True)

    assert pipelines[0].element_spec["number"].shape == [4]
    assert [[len(batch["number"]) for batch in pipeline] for pipeline in pipelines] == [[4, 4]] * 3


def test_strategy_tells_each_program_its_rank(rows):
    """By the context that `distribute_datasets_from_function` hands over; a replica gets a batch of its own."""
    data = rows["tfrecord"][0]
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    def batches(context):
        size = context.get_per_replica_batch_size(12)
        return data.to_tf(size, rank=context.input_pipeline_id, world_size=context.num_input_pipelines)

    assert batched(strategy.distribute_datasets_from_function(batches)) == batched(data.to_numpy(12))
    second = batches(tf.distribute.InputContext(3, 1, 3))  # of three programs, with a replica each
    assert batched(second) == batched(data.to_numpy(4, rank=1, world_size=3))


def test_keras_trains_on_the_batches_of_a_rank(rows):
    """`to_numpy` tells their number, which `tf.data` does not know: a checkpoint of other ranks changes it."""
    data, options = rows["tfrecord"][0], {"shuffle": True, "rank": 0, "world_size": 2}
    pipeline = data.to_tf(4, repeat=True, as_supervised=("pair", "number"), **options)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    steps = len(data.to_numpy(4, **options))

    found = model.fit(pipeline, epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False)

    assert steps == 4
    assert len(found.history["loss"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1}, "rank is 1 and world_size is None; give both"),
        ({"rank": 2, "world_size": 2}, "rank is 2 of world_size 2; want 0 to 1"),
        ({"cache": True}, "cache or snapshot together with world_size"),
        ({"static_transform": dict}, "static_transform together with world_size"),
        ({"deterministic": False}, "deterministic=False together with world_size"),
        ({"service": "grpc://localhost:1"}, "no Python, which plans pad, bucket, pack, collate_fn and ranks"),
    ],
)
def test_ranks_refuse_what_contradicts_them(rows, options, message):
    """With the remedy."""
    with pytest.raises(OptionError, match=message):
        rows["tfrecord"][0].to_tf(4, **{"rank": 0, "world_size": 1, **options} if "rank" not in options else options)


def test_batch_that_is_skipped_as_a_whole_is_an_error(tmp_path):
    """The other ranks would wait for it; a single one goes on without."""
    path = pathlib.Path(written(tmp_path, 0, 12, 1).files[0])
    offset, size = map(int, path.with_suffix(".idx").read_text().splitlines()[5].split())
    content = bytearray(path.read_bytes())
    content[offset + size // 2] ^= 1
    path.write_bytes(content)
    data = load(tmp_path, errors="skip")

    assert len(batched(data.to_tf(1, rank=0, world_size=1))) == 11
    with pytest.raises(tf.errors.OpError, match=r"all records of batch .* were damaged and skipped"):
        list(data.to_tf(1, rank=1, world_size=2))
