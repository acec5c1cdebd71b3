"""Batches of `to_tf` for ranks and of sequences: those of `to_numpy`, and checkpoints that fit any number of ranks."""

from __future__ import annotations

import collections
import itertools
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from numbered_rows import batched, nested_rows, written
from tf_reader import WAYS, digest, digests, left

from datamat import Materializer, OptionError, concat, load, mix
from datamat.readers.tf import TfOptions
from datamat.testing import InlineExecutor

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("tf")]
READER = pathlib.Path(__file__).with_name("tf_reader.py")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The same 29 rows of 0 to 4 tokens in three shards, as TFRecord and as Parquet. Read only."""
    output = tmp_path_factory.mktemp("rows") / "out"
    written(output, 0, 29, 3, ["tfrecord", "parquet"])
    return {name: load(output, format=name) for name in ("tfrecord", "parquet")}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """14 more rows, in both formats. Read only."""
    output = tmp_path_factory.mktemp("others") / "out"
    written(output, 100, 14, 2, ["tfrecord", "parquet"])
    return {name: load(output, format=name) for name in ("tfrecord", "parquet")}


def plain(value):
    """Return a value of a batch of any of the three readers as lists and numbers."""
    import tensorflow as tf

    if isinstance(value, tf.RaggedTensor):
        value = value.to_list()
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


def lists(batches):
    return [{name: plain(value) for name, value in batch.items()} for batch in batches]


def noisy(sample, rng):
    return {"number": sample["number"], "noise": rng.random()}


def cropped(sample, rng):
    """Another length in each epoch."""
    return {**sample, "tokens": sample["tokens"][: rng.integers(1, 5)], "two": np.arange(2)}


def masked(sample, rng):
    """Other tokens in each epoch, as many as before."""
    return {**sample, "tokens": np.where(rng.random(len(sample["tokens"])) < 0.5, 0, sample["tokens"]).astype("int32")}


# ---------------------------------------------------------------- ranks


def of_ranks(data, world, size, **options):
    """Return the pipeline of each rank."""
    return [data.to_tf(size, rank=rank, world_size=world, **options) for rank in range(world)]


def saved(pipeline, num_steps, tmp_path):
    """Return what a pipeline delivers in its first steps, and a checkpoint of it after these."""
    import tensorflow as tf

    iterator = iter(pipeline)
    found = batched([next(iterator) for _ in range(num_steps)])
    return found, tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))


def restored(pipeline, checkpoint):
    """Return an iterator that goes on where another one was saved."""
    import tensorflow as tf

    iterator = iter(pipeline)
    tf.train.Checkpoint(it=iterator).read(checkpoint).assert_consumed()
    return iterator


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("format_name", "shuffle", "world"),
    [("tfrecord", True, 1), pytest.param("tfrecord", False, 2, marks=pytest.mark.long), ("parquet", 9, 3)],
)
def test_batches_of_each_rank_are_those_of_numpy(rows, format_name, shuffle, world):
    """In each epoch, all ranks together have each record once, and equally many batches."""
    data = rows[format_name]
    options = {"shuffle": shuffle, "seed": 3, "transform": noisy}
    pipelines = of_ranks(data, world, 4, **options)
    arrays = [data.to_numpy(4, rank=rank, world_size=world, **options) for rank in range(world)]

    for _ in range(2):
        found = [lists(pipeline) for pipeline in pipelines]
        assert found == [lists(batches) for batches in arrays]
        assert {len(batches) for batches in found} == {len(arrays[0])}
        assert sorted(number for batches in found for number in batched(batches)) == list(range(29))


VIEWS = {
    "whole": lambda a, b: a,
    "select": lambda a, b: b.select(range(13, 0, -1)),
    "filter": lambda a, b: a.filter(lambda sample: sample["number"] % 3),
    "concat": lambda a, b: concat([b, a]),
    "mix": lambda a, b: mix({a: 0.7, b: 0.3}, seed=2),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("view", "format_name", "shuffle", "world"),
    [
        ("mix", "tfrecord", True, 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("concat", "parquet", 8, 1),
                ("whole", "tfrecord", True, 3),
                ("select", "parquet", True, 3),
                ("filter", "tfrecord", False, 1),
                ("mix", "parquet", False, 1),
            )
        ),
    ],
)
def test_checkpoint_of_two_ranks_resumes_any_number(rows, others, tmp_path, format_name, view, shuffle, world):
    """With exactly what was left: of the second epoch, whose order the third one does not repeat."""
    data = VIEWS[view](rows[format_name], others[format_name]).columns("number")
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
    third = [number for pipeline in again for number in batched(pipeline)]
    assert collections.Counter(third) == collections.Counter(wanted[2])


@pytest.mark.parametrize("size", [2, None])
def test_state_between_the_last_steps_of_an_epoch(tf, others, tmp_path, size):
    """Where the last step would have fewer records than ranks, it shares those of the step before."""
    data = others["tfrecord"].columns("number").take(7)
    walks = [iter(pipeline) for pipeline in of_ranks(data, 3, 2, shuffle=True)]
    done = batched([next(walk) for walk in walks])
    checkpoint = tf.train.Checkpoint(it=walks[2]).write(str(tmp_path / "checkpoint"))

    (again,) = of_ranks(data, 1, size, shuffle=True)
    rest = list(restored(again, checkpoint))
    left = batched(rest) if size else [int(sample["number"]) for sample in rest]

    assert len(done) == 4
    assert sorted([*done, *left]) == sorted(int(sample["number"]) for sample in data)


@pytest.mark.long
@pytest.mark.parametrize("steps", ["repeat", "map"])
def test_steps_that_follow_are_resumed_too(rows, tmp_path, steps):
    """Also those that hold batches back: what waits in them belongs to the rank that was saved."""
    data = rows["parquet"].columns("number")

    def made(rank, world):
        if steps == "repeat":
            return data.to_tf(3, shuffle=True, rank=rank, world_size=world, tf=TfOptions(repeat=True))
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


@pytest.mark.long
def test_strategy_tells_each_program_its_rank(tf, rows):
    """By the context that `distribute_datasets_from_function` hands over; a replica gets a batch of its own."""
    data = rows["tfrecord"].columns("number")
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")

    def batches(context):
        size = context.get_per_replica_batch_size(12)
        return data.to_tf(size, rank=context.input_pipeline_id, world_size=context.num_input_pipelines)

    assert batched(strategy.distribute_datasets_from_function(batches)) == batched(data.to_numpy(12))
    second = batches(tf.distribute.InputContext(3, 1, 3))  # of three programs, with a replica each
    assert batched(second) == batched(data.to_numpy(4, rank=1, world_size=3))


@pytest.mark.long
def test_batch_that_is_skipped_as_a_whole_is_an_error(tf, tmp_path):
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


# ---------------------------------------------------------------- sequences

FORMS = {
    "pad": {"batch_size": 7, "pad": {"tokens": -1}},
    "pad full": {"batch_size": 7, "pad": {"tokens": -1}, "drop": True},
    "bucket": {"bucket": {"tokens": 12}},
    "bucket padded": {"batch_size": 5, "bucket": {"tokens": 12}, "pad": {"tokens": 0}},
    "pack": {"batch_size": 3, "pack": {"tokens": 10}},
    "pack full": {"batch_size": 3, "pack": {"tokens": 10}, "drop": True},
    "pack all": {"batch_size": 3, "pack": {"tokens": 3}, "chunk": "all"},
}


def of(data, kind, *, drop=False, **options):
    """Return the batches of one reader."""
    return getattr(data, f"to_{kind}")(**options, drop_last=drop)


IN_EACH_COMMIT = {
    (True, "pad", "tfrecord"),
    (True, "pack all", "parquet"),
    (False, "bucket padded", "parquet"),
    (20, "pack full", "parquet"),
}


@pytest.mark.parametrize(
    ("shuffle", "form", "format_name"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in IN_EACH_COMMIT else pytest.mark.long)
        for case in itertools.product([False, True, 20], FORMS, ["tfrecord", "parquet"])
    ],
)
def test_batches_are_those_of_numpy(rows, format_name, form, shuffle):
    """In both epochs, and of the shapes and dtypes that were promised before."""
    options = {**FORMS[form], "shuffle": shuffle, "seed": 3}
    data = rows[format_name]
    found, wanted = of(data, "tf", **options), of(data, "numpy", **options)

    for _ in range(2):
        epoch = list(found)
        assert lists(epoch) == lists(wanted)
        for name, spec in found.element_spec.items():
            assert all(spec.is_compatible_with(batch[name]) for batch in epoch)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_are_those_of_torch(rows, form):
    pytest.importorskip("torch")
    options = {**form, "shuffle": True, "seed": 3}

    assert lists(of(rows["tfrecord"], "tf", **options)) == lists(of(rows["tfrecord"], "torch", **options))


def test_spec_says_what_is_known(tf, rows):
    """Rows of packs have a length, batches that are full a number of rows, buckets none."""
    data = rows["tfrecord"]
    spec = {name: of(data, "tf", **FORMS[name]).element_spec for name in ("pad full", "bucket", "pack")}

    assert spec["pad full"]["tokens"] == tf.TensorSpec((7, None), tf.int32)
    assert spec["pad full"]["tokens_length"] == tf.TensorSpec((7,), tf.int64)
    assert spec["bucket"]["tokens"] == tf.RaggedTensorSpec((None, None), tf.int32, 1, tf.int64)
    assert spec["bucket"]["pair"] == tf.TensorSpec((None, 2), tf.float32)
    assert spec["pack"]["tokens"] == tf.TensorSpec((None, 10), tf.int32)
    assert spec["pack"]["key"] == tf.RaggedTensorSpec((None, None), tf.string, 1, tf.int64)
    assert spec["pack"]["pair"] == tf.RaggedTensorSpec((None, None, 2), tf.float32, 1, tf.int64)


WAYS_TO_READ = {
    "map": (lambda data: data.map(masked, seed=4), "pad", {}),
    "transform": (lambda data: data, "pack", {"transform": masked}),
    "mix": (lambda data: mix({data: 0.6, data.take(20): 0.4}, seed=1), "pack", {}),
    "concat": (lambda data: concat([data, data.select([3, 1])]), "pad", {}),
    "shard": (lambda data: data.shard(1, 2), "pack", {}),
    "filter": (lambda data: data.filter(lambda sample: sample["number"] % 3 > 0), "pad", {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("view", "form", "extra"), WAYS_TO_READ.values(), ids=WAYS_TO_READ)
def test_views_have_the_same_batches_too(rows, view, form, extra):
    """Random numbers follow the epoch."""
    data, options = view(rows["tfrecord"]), {**FORMS[form], **extra, "shuffle": True, "seed": 3}
    found, wanted = of(data, "tf", **options), of(data, "numpy", **options)

    for _ in range(2):
        assert lists(found) == lists(wanted)


def test_tuples_and_repeated_epochs(rows):
    """Epochs follow each other, each in its own order, and no batch is made of two."""
    data = rows["parquet"]
    options = {"shuffle": True, "seed": 1, "pack": {"tokens": 10}, "as_supervised": ("tokens", "segment_ids")}
    wanted = data.to_numpy(3, **options)
    three = [plain(batch) for batch in itertools.chain(wanted, wanted, wanted)]

    assert [plain(batch) for batch in data.to_tf(3, **options, tf=TfOptions(repeat=True)).take(len(three))] == three
    assert [plain(batch) for batch in data.to_tf(3, **options).repeat(3)] == three


@pytest.mark.long
def test_steps_of_tf_data_may_follow(tf, rows):
    """A cache of the batches of one epoch, every other batch, interleaving two datasets."""
    data = rows["tfrecord"].to_tf(7, pad={"tokens": 0})
    whole = lists(data)

    cached = data.cache()
    assert lists(cached) == lists(cached) == whole
    assert lists(data.shard(2, 1)) == whole[1::2]
    both = tf.data.Dataset.range(2).interleave(lambda _: data, cycle_length=2)
    assert sorted(map(str, lists(both))) == sorted(map(str, [*whole, *whole]))


def test_function_of_the_user_makes_batches(tf, rows):
    """Of arrays, numbers and text, in dicts and tuples."""

    def collate(samples):
        longest = max(len(sample["tokens"]) for sample in samples)
        tokens = np.stack([np.pad(sample["tokens"], (0, longest - len(sample["tokens"]))) for sample in samples])
        return {"ids": tokens, "mask": tokens > 0}, [sample["word"] for sample in samples]

    data = rows["parquet"]
    found = data.to_tf(8, collate_fn=collate, shuffle=True, seed=2)

    assert [plain([*batch.values(), words]) for batch, words in found] == [
        plain([*batch.values(), words]) for batch, words in data.to_numpy(8, collate_fn=collate, shuffle=True, seed=2)
    ]
    assert found.cardinality() == 4
    assert found.element_spec[0]["mask"] == tf.TensorSpec((None, None), tf.bool)


def test_sizes_that_differ_become_ragged(tf, rows):
    """Of functions that Python or TensorFlow calls, in map or transform; those that agree are stacked, and known."""
    data = rows["tfrecord"]

    def tokenized(sample):
        length = int(sample["number"]) % 4 + 1
        return {**sample, "ids": np.arange(length), "names": ["é"] * length, "pixels": np.ones((length, 2, 3), "uint8")}

    def traced(sample):
        return {**sample, "ids": tf.range(sample["number"] % 4 + 1), "five": tf.range(tf.size(sample["pair"]))}

    ways = [
        data.map(tokenized).to_tf(8, transform=lambda sample: {**sample, "more": sample["pair"] + 1}),
        data.to_tf(8, transform=lambda sample, rng: tokenized(sample)),
    ]
    for way in ways:
        for batch in way:
            lengths = [number % 4 + 1 for number in batch["number"].numpy()]
            assert plain(batch["ids"]) == [list(range(length)) for length in lengths]
            assert plain(batch["names"]) == [["é"] * length for length in lengths]
            assert batch["pixels"].row_lengths().numpy().tolist() == lengths
            assert batch["pixels"].shape[2:] == (2, 3)
        assert way.element_spec["pair"].shape[-1] == 2
    for batch in data.to_tf(8, transform=traced):
        assert plain(batch["ids"]) == [list(range(number % 4 + 1)) for number in batch["number"].numpy()]
        assert batch["five"].shape[1] == 2


@pytest.mark.parametrize("call", ["map", "transform"])
def test_size_that_differs_later_is_named(tf, rows, call):
    """With the key, what was found, what was wanted, and what to do."""
    data = rows["tfrecord"]
    second = data.keys()[2]  # not one of the sixteen that are looked at

    def odd(sample, rng):
        return {**sample, "ids": np.zeros(9 if sample["key"] == second else 5)}

    made = data.map(odd).to_tf(8) if call == "map" else data.to_tf(8, transform=odd)

    with pytest.raises(tf.errors.OpError, match=rf"'{second}'.*'ids' is float64\[9\], but float64\[5\].*pad"):
        list(made)
    padded = data.map(odd).to_tf(8, pad={"ids": 0})
    assert {batch["ids"].shape[1] for batch in padded} == {5, 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tf": TfOptions(static_transform=dict)}, "static_transform together with pad"),
        ({"tf": TfOptions(cache=True)}, "cache or snapshot together with pad"),
        ({"batch_size": None}, "pad is for batches"),
        ({"collate_fn": list}, "collate_fn together with pad"),
        ({"pad": None, "collate_fn": lambda samples: [s["tokens"] for s in samples]}, "'batch' as a list of values"),
        ({"pad": {"colour": 0}}, "pad names 'colour'"),
        ({"pack": {"tokens": 3}}, "has 4 tokens, and the budget is 3"),
    ],
)
def test_nonsense_is_refused(rows, options, message):
    """At once, as by `to_numpy`, and where TensorFlow's own steps do not fit."""
    with pytest.raises(OptionError, match=message):
        rows["tfrecord"].to_tf(**{"batch_size": 4, "pad": {"tokens": 0}, **options})


def test_value_without_a_tensor_is_named(rows):
    with pytest.raises(OptionError, match=r"returns field 'meta' as dict, .*\(JSON as text\)"):
        rows["tfrecord"].map(lambda sample: {**sample, "meta": {"a": 1}}).to_tf(4)


@pytest.mark.long
def test_fields_in_dicts_are_shaped_like_all_others(tmp_path):
    """Those of dicts, of lists of dicts, and what `map` returns; with lengths beside what they are of."""
    data = nested_rows(tmp_path)
    padded = {"pad": {"of/tokens": 0, "words/token": 0, "tokens": 0}}
    packed = {"pack": {"words/token": 10, "words/half": 10}, "pad": {"words/half": -1}}

    for one in (data, data.map(lambda sample: sample)):
        found = one.to_tf(bucket={"of/tokens": 12}, shuffle=True, **padded)
        assert list(found.element_spec["of"]) == ["number", "tokens", "tokens_length"]
        for batch, wanted in zip(found, one.to_numpy(bucket={"of/tokens": 12}, shuffle=True, **padded), strict=True):
            for fields, name in ((batch, "tokens"), (batch["of"], "tokens"), (batch["words"], "token")):
                assert plain(fields[name]) == plain(wanted["tokens"])
                assert plain(fields[f"{name}_length"]) == plain(wanted["tokens_length"])
    found = data.to_tf(3, **packed)
    for batch, wanted in zip(found, data.to_numpy(3, **packed), strict=True):
        assert lists([batch["words"]]) == lists([wanted["words"]])
        assert plain(batch["of"]["tokens"]) == plain(wanted["of"]["tokens"])


def test_lists_beside_packed_fields_are_ragged(tmp_path):
    """In a dict, too; the records of one row may differ in length."""
    samples = [{"x": [n, n], "y": [n] * (n % 3), "of": {"y": [n] * (n % 4)}} for n in range(6)]
    Materializer(source=samples, output=tmp_path / "out").run(executor=InlineExecutor(), progress=False)

    for batch in load(tmp_path / "out").to_tf(2, pack={"x": 4}):
        numbers = [[int(row[start]) for start in range(0, len(row), 2)] for row in batch["x"].numpy()]
        kept = [row[: len(keys)] for row, keys in zip(numbers, batch["key"].to_list(), strict=True)]
        assert batch["y"].to_list() == [[[n] * (n % 3) for n in row] for row in kept]
        assert batch["of"]["y"].to_list() == [[[n] * (n % 4) for n in row] for row in kept]


# ---------------------------------------------------------------- checkpoints


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("format_name", "ways"),
    [
        ("tfrecord.gz", ["cached", "rows"]),
        pytest.param("tfrecord", [*WAYS], marks=pytest.mark.long),
        pytest.param("tfrecord.gz", [*WAYS], marks=pytest.mark.long),
    ],
)
def test_killed_in_mid_epoch_another_process_gets_the_batches_left(tf, make_pairs_output, tmp_path, format_name, ways):
    """Bit for bit and in order: shuffled or not, cached, in later epochs, of pictures, ragged rows and single samples.

    This process has a seed of its own, which must not matter.
    """
    tf.random.set_seed(11)
    folders = {"pairs": make_pairs_output(tmp_path / "pairs", format=format_name), "rows": tmp_path / "rows"}
    written(folders["rows"], 0, 100, 3, format_name)
    wanted = {name: found[WAYS[name][2] :] for name, found in digests(folders, ways).items()}
    checkpoint = str(tmp_path / "checkpoint")

    command = [sys.executable, READER, folders["pairs"], folders["rows"], checkpoint, *ways]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)

    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert all(wanted.values())
    found = left(folders, ways, checkpoint)
    assert {name for name in ways if found[name] != wanted[name]} == set()


@pytest.mark.parametrize(
    ("num_read", "ended"),
    [
        (15, False),
        (13, True),
        pytest.param(13, False, marks=pytest.mark.long),
        pytest.param(15, True, marks=pytest.mark.long),
    ],
)
def test_epochs_after_the_restored_one_have_their_own_orders(tf, pairs, tmp_path, num_read, ended):
    """Also where the iterator had ended, or its shuffles had, whose last batches waited to be taken."""
    options = {"batch_size": 4, "shuffle": True, "seed": 1}
    epochs = load(pairs, "train").to_tf(**options)
    wanted = [[digest(batch) for batch in epochs] for _ in range(4)]
    data = load(pairs, "train").to_tf(**options)
    assert [digest(batch) for batch in data] == wanted[0]
    iterator = iter(data)
    for _ in range(num_read):
        next(iterator)
    if ended:
        list(iterator)
    checkpoint = tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))

    again = load(pairs, "train").to_tf(**options)
    iterator = restored(again, checkpoint)

    assert [digest(batch) for batch in iterator] == ([] if ended else wanted[1][num_read:])
    assert [[digest(batch) for batch in again] for _ in range(2)] == wanted[2:]


SAVED = {
    "pad": ("tfrecord", lambda data: data, FORMS["pad"]),
    "pack": ("tfrecord", lambda data: data, FORMS["pack"]),
    "bucket": ("parquet", lambda data: data, FORMS["bucket padded"]),
    "map": ("tfrecord", lambda data: data.map(cropped), {"batch_size": 4}),
    "samples": ("parquet", lambda data: data.map(cropped), {"shuffle": False}),
    "transform": ("tfrecord", lambda data: data, {"batch_size": 4, "transform": cropped}),
    "cache": ("parquet", lambda data: data, {"batch_size": 4, "transform": cropped, "tf": TfOptions(cache=True)}),
}


def resumed(made, iterator, file):
    """Return the digests of what is left of an iterator, read from a checkpoint by one of another dataset."""
    import tensorflow as tf

    return [digest(batch) for batch in restored(made, tf.train.Checkpoint(it=iterator).write(str(file)))]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("format_name", "view", "options"), SAVED.values(), ids=SAVED)
def test_checkpoints_resume_what_python_reads(rows, tmp_path, format_name, view, options):
    """In mid-epoch, and after an iterator has ended; the epochs that follow are the next ones, also those of a step."""
    data, options = view(rows[format_name]), {"shuffle": True, "seed": 1, **options}
    first, again, third = (of(data, "tf", **options) for _ in range(3))
    wanted = [[digest(batch) for batch in first] for _ in range(4)]
    size = len(wanted[0])

    second = of(data, "tf", **options)
    list(second)
    iterator = iter(second)
    list(itertools.islice(iterator, size // 2))
    assert resumed(again, iterator, tmp_path / "middle") == wanted[1][size // 2 :]
    assert [digest(batch) for batch in again] == wanted[2]
    list(iterator)
    assert resumed(third, iterator, tmp_path / "ended") == []
    assert [digest(batch) for batch in third] == wanted[2]
    flat = iter(of(data, "tf", **options).repeat(3))
    list(itertools.islice(flat, size + 2))
    rest = resumed(of(data, "tf", **options).repeat(3), flat, tmp_path / "flat")
    assert rest == [*wanted[0], *wanted[1], *wanted[2]][size + 2 :]


def test_pipelines_that_cannot_be_saved_say_why(tf, pairs, tmp_path):
    """With the remedy; the iterator continues, and TensorFlow refuses those of steps that follow."""
    data = load(pairs, "val").to_tf(2, tf=TfOptions(snapshot=tmp_path / "snapshot"))
    number = len(list(data))
    iterator, later = iter(data), iter(data.repeat(2))
    next(iterator)

    with pytest.raises(OptionError, match=r"drop snapshot.*state_dict"):
        tf.train.Checkpoint(it=iterator).write(str(tmp_path / "checkpoint"))
    with pytest.raises(tf.errors.FailedPreconditionError, match="stateful"):
        tf.train.Checkpoint(it=later).write(str(tmp_path / "checkpoint"))

    assert len(list(iterator)) == number - 1
