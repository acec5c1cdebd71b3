"""`to_tf`: the same values as the numpy reader's, in an order that is known where it should be."""

from __future__ import annotations

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
from every_feature import DTYPES, ONE_WORKER, Everything
from open_files import open_files
from shard_offsets import first_byte

from datamat import (
    BBoxes,
    ClassLabel,
    CorruptDataError,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Mask,
    Materializer,
    MissingDependencyError,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    load,
)
from datamat.readers.tf.decode import decodes_in_blocks, is_fixed


def keys_of(dataset):
    """Return the keys of single samples, or of batches one after the other."""
    return [key.decode() for sample in dataset.as_numpy_iterator() for key in np.ravel(sample["key"])]


def test_every_feature_has_the_numpy_readers_value(everything):
    """Its dtype, shape and bits are the same; images are equal to the pixel, JPEG included; text and keys are bytes."""
    data = load(everything)

    found = list(data.to_tf().as_numpy_iterator())

    assert len(found) == len(data)
    for sample, wanted in zip(found, data, strict=True):
        assert sample.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, str):
                assert sample[name] == value.encode()
            else:
                assert sample[name].dtype == value.dtype, name
                assert np.array_equal(sample[name], value), name


def test_shapes_are_known_as_far_as_they_are_declared(everything):
    """Later steps need not guess."""
    spec = load(everything).to_tf().element_spec

    shapes = {name: tuple(spec[name].shape) for name in ("png", "mask", "boxes", "labels", "open", "empty", "caption")}
    assert shapes == {
        "png": (8, 6, 3),
        "mask": (8, 6),
        "boxes": (None, 4),
        "labels": (2,),
        "open": (None, 2, None),
        "empty": (None, 0),
        "caption": (),
    }
    assert spec["raw_uint64"].dtype.name == "uint64"


def test_order_is_that_of_the_positions(pairs):
    """Without shuffling, this holds in every epoch, over shards and splits."""
    data = load(pairs)
    dataset = data.to_tf(batch_size=5)

    assert keys_of(dataset) == keys_of(dataset) == data.keys()
    assert sorted(keys_of(data.to_tf(deterministic=False))) == sorted(data.keys())


@pytest.mark.parametrize(
    ("options", "batches", "last"),
    [
        ({"batch_size": 8}, 8, 4),
        ({"batch_size": 8, "drop_remainder": True}, 7, 8),
        ({"batch_size": 60}, 1, 60),
        ({"batch_size": 1}, 60, 1),
        ({"batch_size": 100, "drop_remainder": True}, 0, 0),
    ],
)
def test_batches_are_as_requested_and_their_number_is_known(pairs, options, batches, last):
    """Keras shows a bar of the right length."""
    dataset = load(pairs, "train").to_tf(**options)

    sizes = [len(batch["key"]) for batch in dataset.as_numpy_iterator()]

    assert int(dataset.cardinality()) == len(sizes) == batches
    assert all(size == options["batch_size"] for size in sizes[:-1])
    assert sizes[-1:] == [last] * bool(sizes)


def test_single_samples_have_a_known_number(pairs):
    """This holds for a shuffled, cached and transformed one; a repeated one is endless."""
    import tensorflow as tf

    val = load(pairs, "val")

    assert int(val.to_tf(shuffle=True, cache=True, transform=lambda sample: sample["key"]).cardinality()) == 4
    endless = val.to_tf(repeat=True)
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert keys_of(endless.take(10)) == [*val.keys(), *val.keys(), *val.keys()[:2]]


def test_shuffle_decodes_in_blocks_by_its_seed_and_new_in_every_epoch(pairs):
    """An epoch has all records, in another order each time; the same seed gives the same orders."""
    train = load(pairs, "train")

    def epochs(**options):
        dataset = train.to_tf(batch_size=7, shuffle=True, **options)
        return [keys_of(dataset) for _ in range(3)]

    one, again, other = epochs(seed=3), epochs(seed=3), epochs(seed=4)

    assert one == again
    assert len({tuple(keys) for keys in [*one, *other, train.keys()]}) == 7
    assert {tuple(sorted(keys)) for keys in one} == {tuple(sorted(train.keys()))}
    assert epochs() == epochs(seed=0)


def test_window_bounds_how_far_records_move(make_pairs_output, tmp_path):
    """A number is the size of the window: a record comes at most that many places early."""
    train = load(make_pairs_output(tmp_path / "out", shards=ShardOptions(num_shards=1)), "train")
    keys = train.keys()

    assert keys_of(train.to_tf(shuffle=1)) == keys
    moved = [keys.index(key) - place for place, key in enumerate(keys_of(train.to_tf(shuffle=5, seed=1)))]
    assert 0 < max(moved) < 5
    assert max(keys.index(key) - place for place, key in enumerate(keys_of(train.to_tf(shuffle=True, seed=1)))) > 20


@pytest.mark.parametrize("options", [{"shuffle": 7}, {"shuffle": 7, "cache": True}, {"shuffle": True}])
def test_seeds_of_the_program_leave_the_order_alone(pairs, options):
    """`tf.random.set_seed` decides what the program draws, not the order of `seed=`: another process gets the same."""
    import tensorflow as tf

    def order():
        return [keys_of(epoch) for epoch in [load(pairs, "train").to_tf(seed=3, **options)] * 2]

    tf.random.set_seed(1)
    wanted = order()
    tf.random.set_seed(2)

    assert order() == wanted


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_cache_holds_samples_but_no_random_draws(pairs, tmp_path, where):
    """A second epoch needs no shard; its augmentation and order are drawn again, in a seeded program, too."""
    import tensorflow as tf

    tf.random.set_seed(1)
    generator = tf.random.Generator.from_seed(5)

    output = tmp_path / "out"
    output.mkdir()
    for path in pairs.iterdir():
        if path.is_file():
            (output / path.name).write_bytes(path.read_bytes())
    data = load(output, "val")
    cache = True if where == "memory" else str(tmp_path / "cache")
    transform = lambda sample: {**sample, "draw": generator.uniform(())}  # noqa: E731

    dataset = data.to_tf(shuffle=True, cache=cache, transform=transform)
    first = list(dataset.as_numpy_iterator())
    for path in data.files:
        with open(path, "wb"):
            pass  # emptied
    later = [list(dataset.as_numpy_iterator()) for _ in range(6)]

    assert all(sorted(sample["key"] for sample in epoch) == sorted(s["key"] for s in first) for epoch in later)
    assert len({sample["draw"].item() for epoch in [first, *later] for sample in epoch}) == 28
    assert len({tuple(sample["key"] for sample in epoch) for epoch in later}) > 1
    assert bool(list(tmp_path.glob("cache*"))) == (where == "disk")


def test_transform_sees_single_samples(pairs):
    """They reach it before they are batched; it may return any sample."""
    batch = next(
        load(pairs, "train")
        .to_tf(batch_size=6, transform=lambda sample: (sample["image"][:12], sample["mask"][..., None]))
        .as_numpy_iterator()
    )

    assert [part.shape for part in batch] == [(6, 12, 32, 3), (6, 24, 32, 1)]
    assert np.array_equal(batch[0][4], load(pairs, "train")[4]["image"][:12])


def test_gzip_shards_are_read(make_pairs_output, pairs, tmp_path):
    """They give the same records in the same order."""
    packed = load(make_pairs_output(tmp_path / "out", format="tfrecord.gz"))

    assert keys_of(packed.to_tf()) == load(pairs).keys()
    assert np.array_equal(next(packed.to_tf().as_numpy_iterator())["image"], packed[0]["image"])


def test_models_train_on_it(pairs):
    """Keras' own loop runs over two epochs."""
    import tensorflow as tf

    pick = lambda sample: (tf.cast(sample["image"], tf.float32) / 255, sample["mask"])  # noqa: E731
    dataset = load(pairs, "train").to_tf(batch_size=20, shuffle=True, seed=1, cache=True, transform=pick)
    model = tf.keras.Sequential([tf.keras.Input((24, 32, 3)), tf.keras.layers.Conv2D(len(small_pairs.NAMES), 1)])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    history = model.fit(dataset, epochs=2, verbose=0, shuffle=False)

    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; want 1 or more, or None"),
        ({"batch_size": -3}, "batch_size is -3; want 1 or more"),
        ({"batch_size": 2.5}, "batch_size is 2.5; want 1 or more"),
        ({"shuffle": 0}, "shuffle is 0; want True, False or the size of the window"),
        ({"shuffle": -1}, "shuffle is -1; want True"),
        ({"shuffle": "yes"}, "shuffle is 'yes'; want True"),
        ({"snapshot": ""}, "snapshot is ''; want the path of a folder"),
        ({"snapshot": True}, "snapshot is True; want the path of a folder"),
    ],
)
def test_options_are_checked(pairs, options, message):
    """The error comes when the dataset is made, not in the middle of training."""
    with pytest.raises(OptionError, match=message):
        load(pairs).to_tf(**options)


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "cache": True, "shuffle": True}])
def test_next_batches_are_prefetched(pairs, options):
    """After all that takes time. What it hides shows only on a clock, so the test looks for the step itself."""
    step = load(pairs, "train").to_tf(**options)
    while type(step).__name__ in ("_OptionsDataset", "_VariantDataset", "_AssertCardinalityDataset"):
        step = step.made_of[0] if hasattr(step, "made_of") else step._input_dataset
    if type(step).__name__ == "_DirectedInterleaveDataset":  # of what holds the state of the shuffles
        step = step._data_inputs[0]
    assert type(step).__name__ == "_PrefetchDataset"


def test_epoch_does_not_wait_for_the_autotuner(pairs):
    """Every other one did, for up to as long as it had taken; what does not run need not be waited for."""
    assert load(pairs, "train").to_tf().options().autotune.enabled is False


def test_formats_that_tensorflow_does_not_read_come_through_python(make_pairs_output, pairs, tmp_path):
    """Values, types and shapes are the same; order, cache and shuffle are as for TFRecord."""
    other = load(make_pairs_output(tmp_path / "out", format="parquet"), "train")
    native = load(pairs, "train")

    assert other.to_tf().element_spec == native.to_tf().element_spec
    assert keys_of(other.to_tf(batch_size=7)) == native.keys()
    first = next(other.to_tf(batch_size=4).as_numpy_iterator())
    assert np.array_equal(first["image"][3], native[3]["image"])
    for options in ({}, {"cache": True}):
        shuffled = other.to_tf(shuffle=True, **options)
        epochs = [keys_of(shuffled) for _ in range(3)]
        assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(native.keys()))}
        assert len({tuple(epoch) for epoch in [*epochs, native.keys()]}) == 4
    assert keys_of(other.to_tf(shuffle=True, seed=2)) == keys_of(other.to_tf(shuffle=True, seed=2))


def test_no_file_stays_open_behind_an_epoch(make_pairs_output, tmp_path):
    """TensorFlow keeps the function that a generator came from, and with it the dataset, until the process ends."""
    output = make_pairs_output(tmp_path / "out", format="parquet")

    for _ in range(3):
        assert len(keys_of(load(output, "train").to_tf(batch_size=7))) == 60
        next(load(output, "train").to_tf(batch_size=7).as_numpy_iterator())
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("datamat-read"):
            thread.join()

    assert not open_files(output)


def damaged(pairs, folder):
    """Return a copy of a directory with one bit of the first record changed."""
    output = shutil.copytree(pairs, folder)
    with open(load(output, "train").files[0], "r+b") as file:
        file.seek(200)
        value = file.read(1)[0]
        file.seek(200)
        file.write(bytes([value ^ 1]))
    return output


@pytest.mark.parametrize("format_name", ["tfrecord", "tfrecord.gz"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 8, "shuffle": True}, {"cache": True}])
def test_damaged_record_is_an_error_that_names_it(make_pairs_output, tmp_path, format_name, options):
    """The error gives file, record and key, which TensorFlow's own error lacks."""
    import tensorflow as tf

    whole = make_pairs_output(tmp_path / "whole", format=format_name)
    data = load(damaged(whole, tmp_path / "damaged"), "train")
    name, key = pathlib.Path(data.files[0]).name, re.escape(data.keys()[0])

    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{name}: record 0 [^\n]*\(key '{key}'\)"):
        list(data.to_tf(**options))


def test_table_that_is_damaged_is_an_error_that_names_the_record(tmp_path):
    """This holds where rows are decoded a batch at a time."""
    import tensorflow as tf

    data = table(tmp_path / "out")
    offset = first_byte(data.files[1], 7)
    with open(data.files[1], "r+b") as file:
        file.seek(offset + 20)
        value = file.read(1)[0]
        file.seek(offset + 20)
        file.write(bytes([value ^ 1]))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"tfrecord: record 7 .*damaged"):
        list(data.to_tf(16))


def test_shard_of_another_length_is_refused(pairs, tmp_path):
    """It may be cut off between two records, which TensorFlow does not notice, or have more behind its end."""
    cut = load(shutil.copytree(pairs, tmp_path / "cut"), "train")
    os.truncate(cut.files[-1], 0)
    longer = load(shutil.copytree(pairs, tmp_path / "longer"), "train")
    with open(longer.files[0], "ab") as file:
        file.write(pathlib.Path(longer.files[1]).read_bytes())

    for data, file in ((cut, cut.files[-1]), (longer, longer.files[0])):
        with pytest.raises(
            CorruptDataError, match=f"{re.escape(file)} has [0-9]+ bytes, the manifest says [^;]+; remove"
        ):
            data.to_tf(8)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            lambda sample: {**sample, "more": 1},
            "beside the samples that were looked at first, it lacks more; return the same fields for every sample",
        ),
        (
            lambda sample: {**sample, "image": sample["image"].ravel()},
            "in another sample; tf.data wants one dtype and one number of dimensions: return the same for every",
        ),
    ],
    ids=["fields", "shape"],
)
def test_samples_that_differ_are_refused(pairs, changed, told):
    """Those that are looked at first are enough to know it."""
    data = load(pairs, "train")
    last = data[len(data) - 1]["key"]

    with pytest.raises(SampleError, match=told):
        data.map(lambda sample: sample if sample["key"] == last else changed(sample)).to_tf(4)


def test_service_that_would_need_python_is_refused(pairs):
    """Its workers have none."""
    with pytest.raises(
        OptionError, match="have no Python, which plans pad, bucket, pack, collate_fn and ranks; read these"
    ):
        load(pairs, "train").to_tf(4, service="grpc://localhost:1", collate_fn=lambda samples: samples)


def test_shard_that_is_cut_off_later_is_an_error(pairs, tmp_path):
    """It is cut between the creation of the dataset and its reading, at the boundary of two records."""
    import tensorflow as tf

    data = load(shutil.copytree(pairs, tmp_path / "cut"), "train")
    dataset = data.to_tf(1)
    os.truncate(data.files[0], first_byte(data.files[0], 3))

    records = dataset.as_numpy_iterator()

    assert [next(records)["key"].item().decode() for _ in range(3)] == data.keys()[:3]
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(pathlib.Path(data.files[0]).name)):
        next(records)


@pytest.mark.parametrize("shuffle", [False, 64])
def test_rows_that_are_gone_from_the_end_of_a_shard_are_an_error(tmp_path, shuffle):
    """Where many travel together, the error comes at the end of their shard, not of the epoch."""
    import tensorflow as tf

    data = table(tmp_path / "out")
    dataset = data.to_tf(16, shuffle=shuffle)
    os.truncate(data.files[0], first_byte(data.files[0], 71))
    found = []

    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(pathlib.Path(data.files[0]).name)):
        found.extend(batch["key"] for batch in dataset.as_numpy_iterator())

    assert sum(map(len, found)) == 64 or shuffle


def test_damaged_record_is_skipped_and_counted(pairs, tmp_path):
    """It is where the dataset was loaded so; the workers of a service never skip one."""
    data = load(damaged(pairs, tmp_path / "out"), "train", errors="skip")

    assert keys_of(data.to_tf(batch_size=8)) == data.keys()[1:]
    assert data.num_skipped == 1
    assert [len(batch["key"]) for batch in data.to_tf(batch_size=8).as_numpy_iterator()] == [*[8] * 7, 3]
    with pytest.raises(OptionError, match="a service cannot skip damaged records"):
        data.to_tf(service="grpc://localhost:5000")


def test_missing_tensorflow_is_named(pairs, monkeypatch):
    """The error has the line that installs it."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)

    with pytest.raises(MissingDependencyError, match="to_tf needs the package tensorflow; install it with"):
        load(pairs).to_tf()


def table(folder, **options):
    """Write 300 rows of numbers, text and small arrays: nothing whose shape is not declared."""
    Materializer(Table(), None, folder, shards=ShardOptions(num_shards=3), workers=ONE_WORKER, **options).run(
        progress=False
    )
    return load(folder)


class Table(DatasetWriter):
    """Rows with every type of number."""

    name = "table"
    features = Features(
        {
            "caption": Text(),
            "label": ClassLabel(num_classes=300),
            "labels": ClassLabel(num_classes=9, shape=(2,)),
            **{f"scalar_{dtype}": Scalar(dtype) for dtype in DTYPES},
            **{f"list_{dtype}": Tensor((2, 3), dtype) for dtype in DTYPES},
            **{f"raw_{dtype}": Tensor((2, 3), dtype, "raw") for dtype in DTYPES},
        }
    )

    def index(self, source):
        return [IndexRow(f"row{number:03d}", fields={"number": number}) for number in range(300)]

    def read(self, row):
        number = int(row.fields["number"])
        array = (np.arange(6).reshape(2, 3) + number) % 100
        values = {dtype: array.astype(dtype) for dtype in DTYPES}
        return {
            "caption": f"größer als {number}",
            "label": number,
            "labels": [number % 9, 1],
            **{f"scalar_{dtype}": value[1, 2] for dtype, value in values.items()},
            **{f"list_{dtype}": value for dtype, value in values.items()},
            **{f"raw_{dtype}": value for dtype, value in values.items()},
        }


def test_rows_decoded_in_blocks_equal_those_decoded_alone(tmp_path):
    """Values, types, shapes and order are the same, also where they are repeated, shuffled, or without the rest."""
    data = table(tmp_path / "out")
    assert decodes_in_blocks(data.features)

    blocks = data.to_tf(7)
    singles = data.to_tf(7, transform=lambda sample: sample)

    assert blocks.element_spec == singles.element_spec
    assert int(blocks.cardinality()) == 43
    for block, single in zip(blocks.as_numpy_iterator(), singles.as_numpy_iterator(), strict=True):
        assert all(np.array_equal(block[name], single[name]) for name in data.features), block["key"]
    shuffled = keys_of(data.to_tf(7, shuffle=True, seed=1))
    assert sorted(shuffled) == sorted(data.keys()) and shuffled != data.keys()
    assert keys_of(data.to_tf(200, repeat=True).take(3))[:600] == [*data.keys(), *data.keys()]
    assert len(keys_of(data.to_tf(7, drop_remainder=True))) == 294


@pytest.mark.parametrize(
    "feature",
    [*(Everything.features[name] for name in ("open", "empty")), Tensor((2, None)), Mask(), Image((8, None, 3))],
)
def test_values_that_vary_beyond_their_length_are_not_decoded_in_blocks(feature):
    """One such field is enough."""
    assert not decodes_in_blocks(Features({"key": Text(), "field": feature}))


class Lists(DatasetWriter):
    """Lists of every type of number, stored as numbers and as bytes, some of them empty; boxes, labels, a picture."""

    name = "lists"
    features = Features(
        {
            "picture": Image((4, 5, 3)),
            "boxes": BBoxes(),
            "labels": ClassLabel(num_classes=9, shape=(None,)),
            **{f"list_{dtype}": Tensor((None,), dtype) for dtype in DTYPES},
            **{f"raw_{dtype}": Tensor((None, 2, 3), dtype, "raw") for dtype in DTYPES},
        }
    )

    def index(self, source):
        return [IndexRow(f"row{number:02d}", fields={"number": number}) for number in range(40)]

    def read(self, row):
        rng = np.random.default_rng(int(row.fields["number"]))
        sizes = iter(rng.integers(0, 4, 2 + 2 * len(DTYPES)))
        corners = np.sort(rng.random((next(sizes), 2, 2), np.float32), 1)
        return {
            "picture": rng.integers(0, 256, (4, 5, 3), np.uint8),
            "boxes": corners.reshape(-1, 4),
            "labels": rng.integers(0, 9, next(sizes)),
            **{f"list_{dtype}": rng.integers(0, 2, next(sizes)).astype(dtype) for dtype in DTYPES},
            **{f"raw_{dtype}": rng.integers(0, 2, (next(sizes), 2, 3)).astype(dtype) for dtype in DTYPES},
        }


def rows_of(value):
    """Return the rows of a dense tensor, or of one that is ragged in its first dimension, as arrays."""
    if hasattr(value, "row_splits"):
        assert value.ragged_rank == 1
        return np.split(value.values.numpy(), value.row_splits.numpy()[1:-1])
    return list(value.numpy())


@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "parquet"])
@pytest.mark.parametrize("options", [{}, {"drop_remainder": True}, {"repeat": True}, {"shuffle": 5}])
def test_lists_decoded_in_blocks_are_those_of_single_samples(tmp_path, name, options):
    """They are ragged tensors of the same types, which a transform of single samples gives as well."""
    shards = ShardOptions(num_shards=3)
    Materializer(Lists(), None, tmp_path, shards=shards, workers=ONE_WORKER, format=name).run(progress=False)
    data = load(tmp_path)
    assert decodes_in_blocks(data.features) and not is_fixed(data.features)

    batches = data.to_tf(7, **options)
    singles = data.to_tf(7, transform=lambda sample: sample, **options)

    for field, spec in singles.element_spec.items():
        assert spec.is_compatible_with(batches.element_spec[field]), field
    found = {}
    for batch in batches.take(6):
        columns = {field: rows_of(batch[field]) for field in data.features if field != "key"}
        for row, key in enumerate(batch["key"].numpy()):
            found[key.decode()] = {field: column[row] for field, column in columns.items()}
    assert sorted(found) == (sorted(data.keys()) if "drop_remainder" not in options else sorted(data.keys()[:35]))
    for key, values in found.items():
        expected = data[key]
        for field, value in values.items():
            assert value.dtype == expected[field].dtype and np.array_equal(value, expected[field]), field


def test_batches_of_open_shapes_are_ragged(everything):
    """Boxes, lists and tensors may have any length in each sample; pictures of one size stay dense."""
    import tensorflow as tf

    data = load(everything)
    batch = next(iter(data.to_tf(4)))

    for name in ("boxes", "open", "raw_float16", "empty"):
        assert isinstance(batch[name], tf.RaggedTensor), name
        for row, sample in zip(batch[name], [data[number] for number in range(4)], strict=True):
            dense = row.to_tensor() if isinstance(row, tf.RaggedTensor) else row
            assert np.array_equal(dense, sample[name]), name
    assert batch["png"].shape == (4, 8, 6, 3) and isinstance(batch["labels"], tf.Tensor)


def test_snapshot_serves_later_programs_without_the_shards(pairs, tmp_path):
    """It holds decoded samples with the static transform applied; order and dynamic transform are as without it."""
    data = load(shutil.copytree(pairs, tmp_path / "out"), "train")
    halved = lambda sample: {**sample, "image": sample["image"] // 2}  # noqa: E731
    options = {"snapshot": tmp_path / "kept", "static_transform": halved}
    first = list(data.to_tf(**options).as_numpy_iterator())
    for path in data.files:
        os.truncate(path, 0)

    again = load(tmp_path / "out", "train").to_tf(**options)

    assert [sample["key"] for sample in again.as_numpy_iterator()] == [sample["key"] for sample in first]
    for sample, wanted in zip(again.as_numpy_iterator(), load(pairs, "train"), strict=True):
        assert np.array_equal(sample["image"], wanted["image"] // 2)


def test_snapshot_of_another_transform_is_not_used(pairs, tmp_path):
    """Neither is one of another order: any difference in code, or in what it holds, makes another snapshot."""
    train = load(pairs, "train")
    wanted = train[5]["image"]

    for number in (2, 3):
        divided = lambda sample, number=number: {**sample, "image": sample["image"] // number}  # noqa: E731
        found = list(train.to_tf(snapshot=tmp_path, static_transform=divided).as_numpy_iterator())
        assert np.array_equal(found[5]["image"], wanted // number)
    assert sorted(keys_of(train.to_tf(snapshot=tmp_path, shuffle=1))) == sorted(train.keys())
    assert keys_of(train.to_tf(snapshot=tmp_path)) == train.keys()
    assert len(list(tmp_path.iterdir())) == 4


def test_snapshot_of_other_records_is_not_used(make_pairs_output, tmp_path):
    """TensorFlow finds it by the names of the files, which stay when records change."""
    output = make_pairs_output(tmp_path / "out", seed=1)
    (before,) = load(output, "train").to_tf(snapshot=tmp_path / "kept", batch_size=60).as_numpy_iterator()
    make_pairs_output(tmp_path / "out", seed=2)

    (after,) = load(output, "train").to_tf(snapshot=tmp_path / "kept", batch_size=60).as_numpy_iterator()

    assert np.array_equal(after["image"][7], load(output, "train")[7]["image"])
    assert not np.array_equal(after["image"], before["image"])


def test_snapshot_holds_samples_over_256_kib(tmp_path):
    """With TensorFlow's default compression the second epoch fails."""
    writer = Big()
    Materializer(writer, None, tmp_path / "out", workers=ONE_WORKER).run(progress=False)
    dataset = load(tmp_path / "out").to_tf(snapshot=tmp_path / "kept")

    epochs = [[sample["array"] for sample in dataset.as_numpy_iterator()] for _ in range(2)]

    assert all(np.array_equal(array, writer.read(None)["array"]) for epoch in epochs for array in epoch)
    assert [len(epoch) for epoch in epochs] == [2, 2]


class Big(DatasetWriter):
    """Arrays of 512 KiB of noise."""

    name = "big"
    features = Features({"array": Tensor((1 << 19,), "uint8", "raw")})

    def index(self, source):
        return [IndexRow("a"), IndexRow("b")]

    def read(self, row):
        return {"array": np.random.default_rng(0).integers(0, 256, 1 << 19, np.uint8)}


def test_incomplete_snapshot_is_written_again(pairs, tmp_path):
    """TensorFlow does not resume it; all records still come."""
    data = load(pairs, "train")
    half = data.to_tf(snapshot=tmp_path / "kept").as_numpy_iterator()
    next(half)
    del half

    for _ in range(2):
        assert keys_of(data.to_tf(snapshot=tmp_path / "kept")) == data.keys()
