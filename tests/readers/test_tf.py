"""`to_tf`: the values of the numpy reader, in an order that is known; damage, caches, snapshots and options."""

from __future__ import annotations

import datetime
import gc
import os
import pathlib
import re
import shutil
import sys
import threading

import numpy as np
import pytest
import small_pairs
from numbered_rows import numbers_of, written
from open_files import open_files
from shard_offsets import first_byte
from web import serving

from datamat import (
    BBoxes,
    Bytes,
    ClassLabel,
    CorruptDataError,
    Image,
    Json,
    MissingDependencyError,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    Timestamp,
    Tokens,
    concat,
    load,
    materialize,
    mix,
)
from datamat.readers.tf import TfOptions
from datamat.testing import InlineExecutor

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("tf")]  # a busy machine imports TensorFlow slowly
DTYPES = ["bool", "int8", "int64", "uint16", "float16", "float64", "complex64"]


def keys_of(dataset):
    """Return the keys of single samples, or of batches one after the other."""
    return [key.decode() for sample in dataset.as_numpy_iterator() for key in np.ravel(sample["key"])]


def stored(function, count, folder, **options):
    """Write the samples that a function makes of numbers; return the directory."""
    materialize(function, range(count), folder, executor=InlineExecutor(), progress=False, **options)
    return folder


def flip(path, place):
    """Change one bit of a file."""
    content = bytearray(pathlib.Path(path).read_bytes())
    content[place] ^= 1
    pathlib.Path(path).write_bytes(content)


# ---------------------------------------------------------------- values


def test_every_feature_has_the_numpy_readers_value(tf, everything):
    """Same dtype, shape and bits, JPEG included; text is bytes. Shapes are known as far as they are declared."""
    data = load(everything)
    dataset = data.to_tf()

    for sample, wanted in zip(dataset.as_numpy_iterator(), data, strict=True):
        assert sample.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, str):
                assert sample[name] == value.encode()
            else:
                assert sample[name].dtype == value.dtype, name
                assert np.array_equal(sample[name], value), name
    shapes = {"png": (8, 6, 3), "boxes": (None, 4), "labels": (2,), "open": (None, 2, None), "caption": ()}
    assert {name: tuple(dataset.element_spec[name].shape) for name in shapes} == shapes
    assert dataset.element_spec["raw_uint64"].dtype == tf.uint64


def test_batches_of_open_shapes_are_ragged(tf, everything):
    """Boxes, lists and tensors may have any length in each sample; pictures of one size stay dense."""
    data = load(everything).columns("boxes", "open", "raw_float16", "empty", "png", "labels")
    batch = next(iter(data.to_tf(4)))

    for name in ("boxes", "open", "raw_float16", "empty"):
        assert isinstance(batch[name], tf.RaggedTensor), name
        for row, sample in zip(batch[name], [data[number] for number in range(4)], strict=True):
            dense = row.to_tensor() if isinstance(row, tf.RaggedTensor) else row
            assert np.array_equal(dense, sample[name]), name
    assert batch["png"].shape == (4, 8, 6, 3) and isinstance(batch["labels"], tf.Tensor)


def row_of(number):
    """Return a row of numbers of several types, and text: all shapes are declared."""
    array = (np.arange(6).reshape(2, 3) + number) % 100
    values = {dtype: array.astype(dtype) for dtype in DTYPES}
    return {
        "caption": f"größer als {number}",
        "label": number,
        **{f"scalar_{dtype}": value[1, 2] for dtype, value in values.items()},
        **{f"list_{dtype}": value for dtype, value in values.items()},
        **{f"raw_{dtype}": value for dtype, value in values.items()},
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """300 such rows in three shards. Read only."""
    features = {
        "caption": Text(),
        "label": ClassLabel(num_classes=300),
        **{f"scalar_{dtype}": Scalar(dtype) for dtype in DTYPES},
        **{f"list_{dtype}": Tensor((2, 3), dtype) for dtype in DTYPES},
        **{f"raw_{dtype}": Tensor((2, 3), dtype, "raw") for dtype in DTYPES},
    }
    folder = tmp_path_factory.mktemp("table") / "out"
    return stored(row_of, 300, folder, features=features, shards=ShardOptions(num_shards=3))


@pytest.mark.long
def test_rows_decoded_in_blocks_equal_those_decoded_alone(table):
    """Values, types, shapes and order are the same, also where they are repeated, shuffled, or without the rest."""
    data = load(table)
    blocks = data.to_tf(7)
    singles = data.to_tf(7, transform=lambda sample: sample)

    assert blocks.element_spec == singles.element_spec
    assert int(blocks.cardinality()) == 43
    for block, single in zip(blocks.as_numpy_iterator(), singles.as_numpy_iterator(), strict=True):
        assert all(np.array_equal(block[name], single[name]) for name in data.features), block["key"]
    narrow = data.columns("caption")
    shuffled = keys_of(narrow.to_tf(7, shuffle=True, seed=1))
    assert sorted(shuffled) == sorted(data.keys()) and shuffled != data.keys()
    assert keys_of(narrow.to_tf(200, tf=TfOptions(repeat=True)).take(3))[:600] == [*data.keys(), *data.keys()]
    assert len(keys_of(narrow.to_tf(7, drop_last=True))) == 294


def lists_of(number):
    """Return lists of several types of number, stored as numbers and as bytes, some of them empty; boxes, a picture."""
    rng = np.random.default_rng(number)
    sizes = iter(rng.integers(0, 4, 2 + 2 * len(DTYPES)))
    corners = np.sort(rng.random((next(sizes), 2, 2), np.float32), 1)
    return {
        "picture": rng.integers(0, 256, (4, 5, 3), np.uint8),
        "boxes": corners.reshape(-1, 4),
        "labels": rng.integers(0, 9, next(sizes)),
        **{f"list_{dtype}": rng.integers(0, 2, next(sizes)).astype(dtype) for dtype in DTYPES},
        **{f"raw_{dtype}": rng.integers(0, 2, (next(sizes), 2, 3)).astype(dtype) for dtype in DTYPES},
    }


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """40 such rows in three formats. Read only."""
    features = {
        "picture": Image((4, 5, 3)),
        "boxes": BBoxes(),
        "labels": ClassLabel(num_classes=9, shape=(None,)),
        **{f"list_{dtype}": Tensor((None,), dtype) for dtype in DTYPES},
        **{f"raw_{dtype}": Tensor((None, 2, 3), dtype, "raw") for dtype in DTYPES},
    }
    options = {"features": features, "shards": ShardOptions(num_shards=3)}
    return stored(
        lists_of, 40, tmp_path_factory.mktemp("lists") / "out", format=["tfrecord", "tfrecord.gz", "parquet"], **options
    )


def rows_of(value):
    """Return the rows of a dense tensor, or of one that is ragged in its first dimension, as arrays."""
    if hasattr(value, "row_splits"):
        assert value.ragged_rank == 1
        return np.split(value.values.numpy(), value.row_splits.numpy()[1:-1])
    return list(value.numpy())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tfrecord", {}),
        pytest.param("tfrecord", {"shuffle": 5}, marks=pytest.mark.long),
        pytest.param("tfrecord.gz", {"drop_last": True}, marks=pytest.mark.long),
        pytest.param("parquet", {"tf": TfOptions(repeat=True)}, marks=pytest.mark.long),
    ],
)
def test_lists_decoded_in_blocks_are_those_of_single_samples(lists, name, options):
    """They are ragged tensors of the same types, which a transform of single samples gives as well."""
    data = load(lists, format=name)

    batches = data.to_tf(7, **options)
    singles = data.to_tf(7, transform=lambda sample: sample, **options)

    for field, spec in singles.element_spec.items():
        assert spec.is_compatible_with(batches.element_spec[field]), field
    found = {}
    for batch in batches.take(6):
        columns = {field: rows_of(batch[field]) for field in data.features if field != "key"}
        for row, key in enumerate(batch["key"].numpy()):
            found[key.decode()] = {field: column[row] for field, column in columns.items()}
    assert sorted(found) == (sorted(data.keys()) if "drop_last" not in options else sorted(data.keys()[:35]))
    for key, values in found.items():
        expected = data[key]
        for field, value in values.items():
            assert value.dtype == expected[field].dtype and np.array_equal(value, expected[field]), field


NOON = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
MICROSECONDS = int(NOON.timestamp()) * 1_000_000


def odd_sample(number):
    """Return a sample with bytes, JSON, a time and tokens; the JSON of the first two could be taken for numbers."""
    info = number if number < 2 else {"b": [number, None], "a": {"text": "größe"}}
    taken = NOON + datetime.timedelta(microseconds=number)
    return {"n": number, "blob": b"\xff\0" * number, "info": info, "taken": taken, "x": np.arange(number)}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Twenty such samples in two formats. Read only."""
    features = {
        "n": Scalar("int64"),
        "blob": Bytes(),
        "info": Json(),
        "taken": Timestamp(tz="UTC"),
        "x": Tokens(vocab_size=50_257),
    }
    return stored(
        odd_sample, 20, tmp_path_factory.mktemp("odd") / "out", features=features, format=["tfrecord", "parquet"]
    )


@pytest.mark.parametrize(
    ("name", "batch_size", "transform"),
    [
        ("tfrecord", None, None),
        ("tfrecord", 4, lambda sample: sample),
        ("parquet", 4, None),
        ("parquet", None, lambda sample, rng: sample),
        pytest.param("tfrecord", 4, None, marks=pytest.mark.long),
        pytest.param("tfrecord", 4, lambda sample, rng: sample, marks=pytest.mark.long),
    ],
)
def test_bytes_json_times_and_tokens_have_tensors(tf, odd, name, batch_size, transform):
    """JSON is its text, a time a number of microseconds; tokens are ragged and keep their dtype."""
    found = list(load(odd, format=name).to_tf(batch_size, transform=transform))

    rows = [[row[field] for field in ("n", "blob", "info", "taken", "x")] for row in found]
    if batch_size:
        rows = [row for batch in rows for row in zip(*batch, strict=True)]
    rows = sorted(([value.numpy() for value in row] for row in rows), key=lambda row: row[0])
    assert [row[1] for row in rows] == [b"\xff\0" * number for number in range(20)]
    assert [row[2] for row in rows][1:3] == [b"1", '{"a":{"text":"größe"},"b":[2,null]}'.encode()]
    assert [row[3] for row in rows] == [MICROSECONDS + number for number in range(20)]
    assert [row[4].tolist() for row in rows] == [[*range(number)] for number in range(20)]
    assert {row[4].dtype for row in rows} == {np.dtype("uint16")}


def test_python_transforms_see_the_values_of_load(odd):
    """They may look into JSON and count with times, and put arrays in their places."""

    def measured(sample, rng):
        assert sample["taken"].dtype == "datetime64[us]"
        assert type(sample["blob"]) is bytes
        info = sample["info"] if isinstance(sample["info"], int) else sample["info"]["b"][0]
        return {"key": sample["key"], "info": np.int64(info), "taken": sample["taken"] + np.timedelta64(1, "s")}

    found = list(load(odd).to_tf(transform=measured).as_numpy_iterator())

    rows = sorted((int(row["info"]), int(row["taken"])) for row in found)
    assert rows == [(number, MICROSECONDS + 1_000_000 + number) for number in range(20)]


@pytest.mark.long
def test_views_are_read(tmp_path):
    """Each record of the view once in each epoch; functions of `map` may change fields and dtypes."""
    a, b = written(tmp_path / "a", 0, 23, 3), written(tmp_path / "b", 100, 11, 2, "parquet")
    changed = concat([a.take(3), b]).map(lambda s: {"number": float(s["number"]), "word": s["word"] + "!"})
    views = [a.select([5, 3, 3, 1]), mix({a: 0.7, b: 0.3}, seed=1).columns("number"), changed]
    for view, size in zip(views, (4, None, 4), strict=True):
        found = [number for one in view.to_tf(size) for number in np.atleast_1d(one["number"].numpy())]
        assert found == [sample["number"] for sample in view]
    shuffled = [number for batch in changed.to_tf(4, shuffle=True, seed=1) for number in batch["number"].numpy()]
    assert sorted(shuffled) == sorted(numbers_of(changed)) and shuffled != numbers_of(changed)


def test_directory_behind_a_url_is_read(pairs, tmp_path):
    """TensorFlow does not read URLs on its own; the workers of a service would have to."""
    pytest.importorskip("aiohttp")
    with serving(pairs) as web:
        data = load(web.url, "val", cache_dir=tmp_path)
        found = list(data.to_tf().as_numpy_iterator())

        with pytest.raises(OptionError, match=f"{web.url}/.* has no path on this machine; copy"):
            data.to_tf(4, tf=TfOptions(service="grpc://127.0.0.1:1"))

    for sample, wanted in zip(found, load(pairs, "val"), strict=True):
        assert sample["key"].decode() == wanted["key"]
        assert np.array_equal(sample["image"], wanted["image"])


# ---------------------------------------------------------------- order and batches


def test_order_is_that_of_the_positions(pairs):
    """Without shuffling, this holds in every epoch, over shards and splits."""
    data = load(pairs)
    dataset = data.to_tf(batch_size=5)

    assert keys_of(dataset) == keys_of(dataset) == data.keys()
    assert sorted(keys_of(data.to_tf(tf=TfOptions(deterministic=False)))) == sorted(data.keys())


def test_batches_are_as_requested_and_their_number_is_known(tf, pairs):
    """Keras shows a bar of the right length; a repeated dataset is endless."""
    train, val = load(pairs, "train"), load(pairs, "val")
    for options, sizes in (
        ({"batch_size": 8}, [*[8] * 7, 4]),
        ({"batch_size": 8, "drop_last": True}, [8] * 7),
        ({"batch_size": 100, "drop_last": True}, []),
    ):
        dataset = train.to_tf(**options)
        assert [len(batch["key"]) for batch in dataset.as_numpy_iterator()] == sizes
        assert int(dataset.cardinality()) == len(sizes)
    keys = val.to_tf(shuffle=True, tf=TfOptions(cache=True), transform=lambda sample: sample["key"])
    assert int(keys.cardinality()) == 4
    endless = val.to_tf(tf=TfOptions(repeat=True))
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert keys_of(endless.take(10)) == [*val.keys(), *val.keys(), *val.keys()[:2]]


def test_shuffle_is_known_by_its_seed_and_new_in_every_epoch(pairs):
    """An epoch has all records, in another order each time; the same seed gives the same orders."""
    train = load(pairs, "train")

    def epochs(**options):
        dataset = train.to_tf(batch_size=7, shuffle=True, **options)
        return [keys_of(dataset) for _ in range(3)]

    one, again, other = epochs(seed=3), epochs(seed=3), epochs(seed=4)

    assert one == again
    assert len({tuple(keys) for keys in [*one, *other, train.keys()]}) == 7
    assert {tuple(sorted(keys)) for keys in one} == {tuple(sorted(train.keys()))}


@pytest.mark.long
def test_window_bounds_how_far_records_move(tmp_path):
    """A number is the size of the window: a record comes at most that many places early."""
    data = written(tmp_path, 0, 60, 1)
    keys = data.keys()

    assert keys_of(data.to_tf(shuffle=1)) == keys
    moved = [keys.index(key) - place for place, key in enumerate(keys_of(data.to_tf(shuffle=5, seed=1)))]
    assert 0 < max(moved) < 5
    assert max(keys.index(key) - place for place, key in enumerate(keys_of(data.to_tf(shuffle=True, seed=1)))) > 20


def test_models_train_on_it(tf, pairs):
    """Keras' own loop runs over two epochs; for ranks, which do not know their number of steps, `to_numpy` does."""
    train, options = load(pairs, "train"), {"batch_size": 10, "shuffle": True, "as_supervised": ("image", "mask")}
    layers = [tf.keras.layers.Rescaling(1 / 255), tf.keras.layers.Conv2D(len(small_pairs.NAMES), 1)]
    model = tf.keras.Sequential([tf.keras.Input((24, 32, 3)), *layers])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps = len(train.to_numpy(10, rank=0, world_size=2))

    whole = model.fit(train.to_tf(**options, tf=TfOptions(cache=True)), epochs=2, verbose=0, shuffle=False)
    ranked = train.to_tf(**options, rank=0, world_size=2, tf=TfOptions(repeat=True))
    part = model.fit(ranked, epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False)

    assert steps == 3
    assert np.isfinite([*whole.history["loss"], *part.history["loss"]]).all()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"shuffle": 0}, "shuffle"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"tf": TfOptions(snapshot="")}, "snapshot"),
        ({"tf": TfOptions(snapshot=True)}, "snapshot"),
        ({"rank": 1}, "rank is 1 and world_size is None"),
        ({"tf": {"cache": True}}, "want something like TfOptions"),
        ({"drop_last": "False"}, "drop_last is 'False'; want True or False"),
        ({"rank": 2, "world_size": 2}, "rank is 2 of world_size 2"),
        ({"rank": 0, "world_size": 1, "tf": TfOptions(cache=True)}, "cache or snapshot together with world_size"),
        (
            {"rank": 0, "world_size": 1, "tf": TfOptions(static_transform=dict)},
            "static_transform together with world_size",
        ),
        (
            {"rank": 0, "world_size": 1, "tf": TfOptions(deterministic=False)},
            "deterministic=False together with world_size",
        ),
        ({"rank": 0, "world_size": 1, "tf": TfOptions(service="grpc://localhost:1")}, "have no Python"),
        ({"collate_fn": list, "tf": TfOptions(service="grpc://localhost:1")}, "have no Python"),
        ({"tf": TfOptions(service="localhost:5000")}, "grpc://HOST:PORT"),
        ({"tf": TfOptions(service="grpc://h:70000")}, "grpc://HOST:PORT"),
        ({"tf": TfOptions(service=5)}, "grpc://HOST:PORT"),
        ({"tf": TfOptions(service="grpc://h:1", cache=True)}, "service together with cache"),
        ({"tf": TfOptions(service="grpc://h:1", snapshot="folder")}, "service together with cache or snapshot"),
        ({"tf": TfOptions(service="grpc://h:1", job="")}, "job is ''"),
        ({"tf": TfOptions(job="night")}, "there is no service"),
    ],
)
def test_options_are_checked(pairs, options, word):
    """The error comes when the dataset is made, not in the middle of training."""
    with pytest.raises(OptionError, match=word):
        load(pairs).to_tf(**{"batch_size": 4, **options})


def test_epoch_does_not_wait_for_the_autotuner(pairs):
    """Every other epoch did, for up to as long as it had taken."""
    assert load(pairs, "train").to_tf().options().autotune.enabled is False


@pytest.mark.long
def test_no_file_stays_open_behind_an_epoch(formats):
    """TensorFlow keeps the function that a generator came from, and with it the dataset, until the process ends."""
    for _ in range(3):
        assert len(keys_of(load(formats, "train", format="parquet").to_tf(batch_size=7))) == 60
        next(load(formats, "train", format="parquet").to_tf(batch_size=7).as_numpy_iterator())
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("datamat-read"):
            thread.join()

    assert not open_files(formats)


def test_missing_tensorflow_is_named(pairs, monkeypatch):
    """The error has the line that installs it."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)

    with pytest.raises(MissingDependencyError, match="tensorflow; install it with"):
        load(pairs).to_tf()


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("format_name", "options"),
    [
        ("tfrecord", {}),
        ("tfrecord", {"tf": TfOptions(cache=True)}),
        ("tfrecord.gz", {"batch_size": 8, "shuffle": True}),
    ],
)
def test_damaged_record_is_an_error_that_names_it(tf, formats, tmp_path, format_name, options):
    """The error gives file, record and key, which TensorFlow's own error lacks."""
    data = load(shutil.copytree(formats, tmp_path / "out"), "train", format=format_name)
    flip(data.files[0], 200)
    name, key = pathlib.Path(data.files[0]).name, re.escape(data.keys()[0])

    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{name}: record 0 [^\n]*\(key '{key}'\)"):
        list(data.to_tf(**options))


def test_damaged_row_of_a_block_is_named(tf, table, tmp_path):
    data = load(shutil.copytree(table, tmp_path / "out"))
    flip(data.files[1], first_byte(data.files[1], 7) + 20)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tfrecord: record 7 .*damaged"):
        list(data.to_tf(16))


def test_damaged_record_is_skipped_and_counted(copied):
    """Where the dataset was loaded so; the workers of a service never skip one."""
    data = load(copied, "train", errors="skip")
    flip(data.files[0], 200)

    assert keys_of(data.to_tf(batch_size=8)) == data.keys()[1:]
    assert data.num_skipped == 1
    with pytest.raises(OptionError, match="a service cannot skip damaged records"):
        data.to_tf(tf=TfOptions(service="grpc://localhost:5000"))


def test_shard_of_another_length_is_refused(pairs, tmp_path):
    """It may be cut off between two records, which TensorFlow does not notice, or have more behind its end."""
    cut = load(shutil.copytree(pairs, tmp_path / "cut"), "train")
    os.truncate(cut.files[-1], 0)
    longer = load(shutil.copytree(pairs, tmp_path / "longer"), "train")
    with open(longer.files[0], "ab") as file:
        file.write(pathlib.Path(longer.files[1]).read_bytes())

    for data, file in ((cut, cut.files[-1]), (longer, longer.files[0])):
        with pytest.raises(CorruptDataError, match=f"{re.escape(file)} has [0-9]+ bytes, the manifest says"):
            data.to_tf(8)


@pytest.mark.parametrize("shuffle", [False, 64])
def test_rows_that_are_gone_later_are_an_error(tf, table, tmp_path, shuffle):
    """The shard is cut at the boundary of two records; the error comes at its end, not at that of the epoch."""
    data = load(shutil.copytree(table, tmp_path / "out"))
    dataset = data.to_tf(16, shuffle=shuffle)
    os.truncate(data.files[0], first_byte(data.files[0], 71))
    found = []

    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(pathlib.Path(data.files[0]).name)):
        found.extend(batch["key"] for batch in dataset.as_numpy_iterator())

    assert sum(map(len, found)) == 64 or shuffle


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda sample: {**sample, "more": 1}, "lacks more; return the same fields for every sample"),
        (lambda sample: {**sample, "image": sample["image"].ravel()}, "one number of dimensions: return the same"),
    ],
    ids=["fields", "shape"],
)
def test_samples_that_differ_are_refused(pairs, changed, told):
    """Those that are looked at first are enough to know it."""
    data = load(pairs, "train")
    last = data[len(data) - 1]["key"]

    with pytest.raises(SampleError, match=told):
        data.map(lambda sample: sample if sample["key"] == last else changed(sample)).to_tf(4)


# ---------------------------------------------------------------- caches and snapshots


@pytest.mark.long
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_cache_holds_samples_but_no_random_draws(tf, copied, tmp_path, where):
    """A second epoch needs no shard; its augmentation and order are drawn again, in a seeded program, too."""
    tf.random.set_seed(1)
    generator = tf.random.Generator.from_seed(5)
    data = load(copied, "val")
    cache = True if where == "memory" else str(tmp_path / "cache")
    transform = lambda sample: {**sample, "draw": generator.uniform(())}  # noqa: E731

    dataset = data.to_tf(shuffle=True, tf=TfOptions(cache=cache), transform=transform)
    first = list(dataset.as_numpy_iterator())
    for path in data.files:
        os.truncate(path, 0)
    later = [list(dataset.as_numpy_iterator()) for _ in range(6)]

    assert all(sorted(sample["key"] for sample in epoch) == sorted(s["key"] for s in first) for epoch in later)
    assert len({sample["draw"].item() for epoch in [first, *later] for sample in epoch}) == 28
    assert len({tuple(sample["key"] for sample in epoch) for epoch in later}) > 1
    assert bool(list(tmp_path.glob("cache*"))) == (where == "disk")


def test_snapshot_serves_later_programs_without_the_shards(pairs, copied, tmp_path):
    """It holds decoded samples with the static transform applied; order and dynamic transform are as without it."""
    data = load(copied, "train")
    halved = lambda sample: {**sample, "image": sample["image"] // 2}  # noqa: E731
    options = {"tf": TfOptions(snapshot=tmp_path / "kept", static_transform=halved)}
    first = list(data.to_tf(**options).as_numpy_iterator())
    for path in data.files:
        os.truncate(path, 0)

    again = load(copied, "train").to_tf(**options)

    assert [sample["key"] for sample in again.as_numpy_iterator()] == [sample["key"] for sample in first]
    for sample, wanted in zip(again.as_numpy_iterator(), load(pairs, "train"), strict=True):
        assert np.array_equal(sample["image"], wanted["image"] // 2)


@pytest.mark.long
def test_snapshot_of_something_else_is_not_used(pairs, make_pairs_output, tmp_path):
    """Any difference in records, order or code, or in what it holds, makes another snapshot."""
    data, kept = load(pairs, "val"), tmp_path / "kept"

    for number in (2, 3):
        divided = lambda sample, number=number: {**sample, "image": sample["image"] // number}  # noqa: E731
        found = list(data.to_tf(tf=TfOptions(snapshot=kept, static_transform=divided)).as_numpy_iterator())
        assert np.array_equal(found[3]["image"], data[3]["image"] // number)
    assert sorted(keys_of(data.to_tf(tf=TfOptions(snapshot=kept), shuffle=1))) == sorted(data.keys())
    assert keys_of(data.to_tf(tf=TfOptions(snapshot=kept))) == data.keys()
    assert len(list(kept.iterdir())) == 4

    # TensorFlow finds a snapshot by the names of the files, which stay when records change.
    output = shutil.copytree(pairs, tmp_path / "out")
    (before,) = load(output, "train").to_tf(tf=TfOptions(snapshot=kept), batch_size=60).as_numpy_iterator()
    make_pairs_output(output, seed=2)
    (after,) = load(output, "train").to_tf(tf=TfOptions(snapshot=kept), batch_size=60).as_numpy_iterator()
    assert np.array_equal(after["image"][7], load(output, "train")[7]["image"])
    assert not np.array_equal(after["image"], before["image"])


def test_snapshot_holds_samples_over_256_kib(tmp_path):
    """With TensorFlow's default compression the second epoch fails."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 19, np.uint8)
    features = {"array": Tensor((1 << 19,), "uint8", "raw")}
    data = load(stored(lambda number: {"array": noise}, 2, tmp_path / "out", features=features))
    dataset = data.to_tf(tf=TfOptions(snapshot=tmp_path / "kept"))

    epochs = [[sample["array"] for sample in dataset.as_numpy_iterator()] for _ in range(2)]

    assert [len(epoch) for epoch in epochs] == [2, 2]
    assert all(np.array_equal(array, noise) for epoch in epochs for array in epoch)


@pytest.mark.long
def test_incomplete_snapshot_is_written_again(pairs, tmp_path):
    """TensorFlow does not resume it; all records still come."""
    data = load(pairs, "val")
    half = data.to_tf(tf=TfOptions(snapshot=tmp_path / "kept")).as_numpy_iterator()
    next(half)
    del half

    for _ in range(2):
        assert keys_of(data.to_tf(tf=TfOptions(snapshot=tmp_path / "kept"))) == data.keys()
