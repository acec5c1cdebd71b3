"""Sequences in batches of `to_tf`: those of `to_numpy` and `to_torch`, resumed in mid-epoch; sizes that vary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numbered_rows import nested_rows, written

from datamat import OptionError, concat, mix

tf = pytest.importorskip("tensorflow")
from tf_reader import digest  # noqa: E402 -- imports TensorFlow

pytestmark = pytest.mark.timeout(180)
FORMS = {
    "pad": {"batch_size": 7, "pad": {"tokens": -1}},
    "pad full": {"batch_size": 7, "pad": {"tokens": -1}, "drop": True},
    "bucket": {"bucket": {"tokens": 12}},
    "bucket padded": {"batch_size": 5, "bucket": {"tokens": 12}, "pad": {"tokens": 0}},
    "pack": {"batch_size": 3, "pack": {"tokens": 10}},
    "pack full": {"batch_size": 3, "pack": {"tokens": 10}, "drop": True},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The same 61 rows of 0 to 4 tokens in three shards, as TFRecord and as Parquet."""
    folder = tmp_path_factory.mktemp("rows")
    return {name: written(folder / name, 0, 61, 3, name) for name in ("tfrecord", "parquet")}


def of(data, kind, *, drop=False, **options):
    """Return the batches of one reader."""
    return getattr(data, f"to_{kind}")(**options, **{"drop_remainder" if kind == "tf" else "drop_last": drop})


def plain(value):
    """Return a value of a batch of any of the three as lists and numbers."""
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


@pytest.mark.parametrize("format_name", ["tfrecord", "parquet"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shuffle", [False, True, 20])
def test_batches_are_those_of_numpy(rows, format_name, form, shuffle):
    """In both epochs, and of the shapes and dtypes that were promised before."""
    options = {**form, "shuffle": shuffle, "seed": 3}
    data = rows[format_name]
    found, wanted = of(data, "tf", **options), of(data, "numpy", **options)

    for _ in range(2):
        epoch = list(found)
        assert lists(epoch) == lists(wanted)
        for name, spec in found.element_spec.items():
            assert all(spec.is_compatible_with(batch[name]) for batch in epoch)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_are_those_of_torch(rows, form):
    """As of NumPy."""
    pytest.importorskip("torch")
    options = {**form, "shuffle": True, "seed": 3}

    assert lists(of(rows["tfrecord"], "tf", **options)) == lists(of(rows["tfrecord"], "torch", **options))


def test_spec_says_what_is_known(rows):
    """Rows of packs have a length, batches that are full a number of rows, buckets none."""
    data = rows["tfrecord"]
    spec = {name: of(data, "tf", **form).element_spec for name, form in FORMS.items()}

    assert spec["pad"]["tokens"] == tf.TensorSpec((None, None), tf.int32)
    assert spec["pad"]["tokens_length"] == tf.TensorSpec((None,), tf.int64)
    assert spec["pad full"]["tokens"] == tf.TensorSpec((7, None), tf.int32)
    assert spec["bucket"]["tokens"] == tf.RaggedTensorSpec((None, None), tf.int32, 1, tf.int64)
    assert spec["bucket"]["pair"] == tf.TensorSpec((None, 2), tf.float32)
    assert spec["pack"]["tokens"] == tf.TensorSpec((None, 10), tf.int32)
    assert spec["pack full"]["segment_ids"] == tf.TensorSpec((3, 10), tf.int32)
    assert spec["pack"]["key"] == tf.RaggedTensorSpec((None, None), tf.string, 1, tf.int64)
    assert spec["pack"]["pair"] == tf.RaggedTensorSpec((None, None, 2), tf.float32, 1, tf.int64)


def cropped(sample, rng):
    """Another length in each epoch."""
    return {**sample, "tokens": sample["tokens"][: rng.integers(1, 5)], "two": np.arange(2)}


def masked(sample, rng):
    """Others tokens in each epoch, as many as before."""
    return {**sample, "tokens": np.where(rng.random(len(sample["tokens"])) < 0.5, 0, sample["tokens"]).astype("int32")}


VIEWS = {
    "map": (lambda data: data.map(masked, seed=4), {}),
    "transform": (lambda data: data, {"transform": masked}),
    "mix": (lambda data: mix({data: 0.6, data.take(20): 0.4}, seed=1), {}),
    "concat": (lambda data: concat([data, data.select([3, 1])]), {}),
    "shard": (lambda data: data.shard(1, 2), {}),
    "filter": (lambda data: data.filter(lambda sample: sample["number"] % 3 > 0), {}),
}


@pytest.mark.parametrize(("view", "extra"), VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("form", ["pad", "pack"])
def test_views_have_the_same_batches_too(rows, view, extra, form):
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

    assert [plain(batch) for batch in data.to_tf(3, **options, repeat=True).take(len(three))] == three
    assert [plain(batch) for batch in data.to_tf(3, **options).repeat(3)] == three


def test_steps_of_tf_data_may_follow(rows):
    """A cache of the batches of one epoch, every other batch, interleaving two datasets."""
    data = rows["tfrecord"].to_tf(7, pad={"tokens": 0})
    whole = lists(data)

    cached = data.cache()
    assert lists(cached) == lists(cached) == whole
    assert lists(data.shard(2, 1)) == whole[1::2]
    both = tf.data.Dataset.range(2).interleave(lambda _: data, cycle_length=2)
    assert sorted(map(str, lists(both))) == sorted(map(str, [*whole, *whole]))


SAVED = {
    "pad": ("tfrecord", lambda data: data, FORMS["pad"]),
    "bucket": ("parquet", lambda data: data, FORMS["bucket padded"]),
    "pack": ("tfrecord", lambda data: data, FORMS["pack"]),
    "map": ("tfrecord", lambda data: data.map(cropped), {"batch_size": 4}),
    "samples": ("parquet", lambda data: data.map(cropped), {"shuffle": False}),
    "transform": ("tfrecord", lambda data: data, {"batch_size": 4, "transform": cropped}),
    "cache": ("parquet", lambda data: data, {"batch_size": 4, "transform": cropped, "cache": True}),
}


def resumed(made, iterator, file):
    """Return the digests of what is left of an iterator, read from a checkpoint by one of another dataset."""
    saved = tf.train.Checkpoint(it=iterator).write(str(file))
    restored = iter(made)
    tf.train.Checkpoint(it=restored).read(saved).assert_consumed()
    return [digest(batch) for batch in restored]


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


@pytest.mark.parametrize(
    ("format_name", "options"), [("parquet", FORMS["pack"]), ("tfrecord", {"batch_size": 4, "transform": cropped})]
)
def test_checkpoints_resume_what_repeats(rows, tmp_path, format_name, options):
    """In the third epoch of a pipeline without an end."""
    made = [rows[format_name].to_tf(**options, shuffle=True, repeat=True).take(44) for _ in range(3)]
    wanted, iterator = [digest(batch) for batch in made[0]], iter(made[1])
    list(itertools.islice(iterator, 35))

    assert resumed(made[2], iterator, tmp_path / "saved") == wanted[35:]


def test_function_of_the_user_makes_batches(rows):
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
    assert found.cardinality() == 8
    assert found.element_spec[0]["mask"] == tf.TensorSpec((None, None), tf.bool)


def test_sizes_that_differ_become_ragged(rows):
    """Of functions that Python or TensorFlow calls, in map or transform; those that agree are stacked, and known."""
    data = rows["tfrecord"]

    def tokenized(sample):
        length = int(sample["number"]) % 4 + 1
        return {**sample, "ids": np.arange(length), "names": ["é"] * length, "pixels": np.ones((length, 2, 3), "uint8")}

    def traced(sample):
        return {**sample, "ids": tf.range(sample["number"] % 4 + 1), "five": tf.range(tf.size(sample["pair"]))}

    ways = [
        data.map(tokenized).to_tf(8),
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
def test_size_that_differs_later_is_named(rows, call):
    """With the key, what was found, what was wanted, and what to do."""
    data = rows["tfrecord"]
    second = data.keys()[1]  # of 61, not one of the sixteen that are looked at

    def odd(sample, rng):
        return {**sample, "ids": np.zeros(9 if sample["key"] == second else 5)}

    made = data.map(odd).to_tf(8) if call == "map" else data.to_tf(8, transform=odd)

    with pytest.raises(tf.errors.OpError, match=rf"'{second}'.*'ids' is float64\[9\], and float64\[5\].*pad"):
        list(made)
    padded = data.map(odd).to_tf(8, pad={"ids": 0})
    assert {batch["ids"].shape[1] for batch in padded} == {5, 9}


def test_size_of_a_traced_field_that_differs_later_is_named(rows):
    """TensorFlow said that a number of elements does not match, and nothing of the transform or the field."""
    data = rows["tfrecord"]
    late = data.keys()[40]  # not one of the first sixteen

    def traced(sample):
        return {"ids": tf.zeros(tf.where(sample["key"] == late, 9, 5)), "number": sample["number"]}

    found = data.to_tf(8, transform=traced)

    with pytest.raises(tf.errors.OpError, match=r"transform returned .*'ids.* in sizes that differ within .*pad"):
        list(found)
    assert found.element_spec["ids"] == tf.TensorSpec((None, None), tf.float32)
    assert {batch["ids"].shape[1] for batch in data.to_tf(1, transform=traced)} == {5, 9}


def test_value_without_a_tensor_is_named(rows):
    """A dict of a function."""
    with pytest.raises(OptionError, match=r"returns the field 'meta' as dict, .*\(JSON as text\)"):
        rows["tfrecord"].map(lambda sample: {**sample, "meta": {"a": 1}}).to_tf(4)


def test_words_are_padded(rows):
    """Lists of text, one of them empty."""
    data = rows["tfrecord"].map(
        lambda sample: {**sample, "words": ["ä" * (1 + n) for n in range(sample["number"] % 3)]}
    )
    found = data.to_tf(7, pad={"words": ""})

    assert lists(found) == lists(data.to_numpy(7, pad={"words": ""}))
    assert found.element_spec["words"] == tf.TensorSpec((None, None), tf.string)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_transform": dict}, "static_transform together with pad.*give the function to map"),
        ({"cache": True}, r"cache or snapshot together with pad.*to_tf\(...\)\.cache\(\)"),
        ({"batch_size": None}, "pad is for batches"),
        ({"collate_fn": list}, "collate_fn together with pad"),
        (
            {"pad": None, "collate_fn": lambda samples: [s["tokens"] for s in samples]},
            "'batch' as a list of values that",
        ),
        ({"pad": {"colour": 0}}, "pad names 'colour'; want a field"),
        ({"pack": {"tokens": 3}}, "has 4 tokens, and the budget is 3"),
    ],
)
def test_nonsense_is_refused(rows, options, message):
    """At once, as by `to_numpy`, and where TensorFlow's own steps do not fit."""
    with pytest.raises(OptionError, match=message):
        rows["tfrecord"].to_tf(**{"batch_size": 4, "pad": {"tokens": 0}, **options})


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
        assert {name: plain(value) for name, value in batch["words"].items()} == {
            name: plain(value) for name, value in wanted["words"].items()
        }
        assert plain(batch["of"]["tokens"]) == plain(wanted["of"]["tokens"])
