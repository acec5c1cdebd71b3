"""A view of a dataset, written as a dataset of its own: its records as they were stored, and no others."""

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import small_pairs

from datamat import (
    Features,
    Image,
    OptionError,
    OutputError,
    SampleError,
    Scalar,
    ShardOptions,
    WorkerOptions,
    concat,
    convert,
    load,
    materialize,
    verify,
)
from datamat.formats import get_format
from datamat.testing import InlineExecutor

HERE = {"executor": InlineExecutor(), "progress": False}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A finished dataset of images and masks, three copies of each in training; which tests only read."""
    folder = tmp_path_factory.mktemp("pairs")
    source = small_pairs.make_pairs(folder / "source", 12, 4)
    options = {"copies": {"train": 3}, "transform": small_pairs.jitter, "shards": ShardOptions(num_shards=3)}
    small_pairs.job(source, folder / "out", **options).run(progress=False)
    return folder / "out"


def same(found, wanted):
    """Assert that two datasets have the same samples in the same order."""
    assert found.keys() == wanted.keys()
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def by_rows(keys):
    """Return keys of records in the order of the first of each row: the copies of a row stay together."""
    rows = list(dict.fromkeys(key.partition("#")[0] for key in keys))
    return sorted(keys, key=lambda key: (rows.index(key.partition("#")[0]), key))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pictures that JPEG has changed, in two splits; which tests only read."""

    def photo(number):
        noise = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        return {"image": noise, "label": number, "gain": number / 2}

    features = {"image": Image(encoding="jpeg"), "label": Scalar("int32"), "gain": Scalar("float32")}
    output = tmp_path_factory.mktemp("photos") / "out"
    options = {"key": lambda number: f"k{number}", "splits": {"train": 0.7, "val": 0.3}, **HERE}
    materialize(photo, range(30), output, features=Features(features), **options)
    return output


def stored(data, column):
    """Return what the shards of a dataset hold in a column, by key."""
    records = (record for file in data.files for record in get_format("tfrecord").read(file))
    return {bytes(record["key"][0]): list(record[column]) for record in records}


VIEWS = {
    "drop a row": lambda data: data.drop([data.keys()[2].partition("#")[0]]),
    "drop a record": lambda data: data.drop([data.keys()[2]]),
    "filter": lambda data: data.filter(lambda sample: int(sample["image"][0, 0, 0]) % 120 == 0),
    "take": lambda data: data.take(7),
    "part": lambda data: data.shard(1, 3),
    "slice": lambda data: data[::-2],
    "order": lambda data: data.select(np.random.default_rng(0).permutation(len(data))[:20]),
    "columns": lambda data: data.columns("mask"),
    "all": lambda data: data,
}


@pytest.mark.parametrize("split", ["train", "val", None])
@pytest.mark.parametrize("name", VIEWS)
def test_view_is_saved_as_it_reads(pairs, tmp_path, name, split):
    """Keys, values and splits; a repetition does nothing."""
    view = VIEWS[name](load(pairs, split))

    report = view.save(tmp_path / "out", **HERE)

    assert report.is_complete and report.num_records == len(view) and verify(tmp_path / "out").ok
    saved, keys = load(tmp_path / "out"), view.keys()
    assert set(saved.keys()) == set(keys) and set(saved.features) == set(view.features)
    for one in saved.manifest.splits:
        of_split = load(tmp_path / "out", one)
        there = set(load(pairs, one).keys())
        same(of_split, view.select(by_rows([key for key in keys if key in there])))
    assert view.save(tmp_path / "out", **HERE).did_nothing


def test_statistics_are_those_of_what_is_left(pairs, tmp_path):
    """Those of images and masks that a run has decoded, too; of others, there is what the dataset has of them."""
    view = load(pairs).filter(lambda sample: sample["key"] < "train004" or sample["key"] > "val001")

    view.save(tmp_path / "out", **HERE)

    found = load(tmp_path / "out", "train").statistics
    drawn = [sample for sample in view if sample["key"].startswith("train")]
    images = np.stack([sample["image"] for sample in drawn]).reshape(-1, 3)
    masks = np.stack([sample["mask"] for sample in drawn])
    assert 0 < len(drawn) < len(load(pairs, "train"))
    assert np.allclose(found["image"]["channels"]["mean"], images.mean(0))
    assert list(found["mask"]["pixels"].values()) == [int((masks == value).sum()) for value in range(4)]
    for name, known in load(pairs, "val").statistics.items():
        assert load(tmp_path / "out", "val").statistics[name].keys() == known.keys()


def test_directory_that_has_changed_is_loaded_again(pairs, tmp_path):
    source = small_pairs.make_pairs(tmp_path / "source", 4, 2)
    small_pairs.job(source, tmp_path / "out").run(progress=False)
    view = load(tmp_path / "out").take(3)
    small_pairs.job(source, tmp_path / "out", seed=1).run(progress=False)

    with pytest.raises(OutputError, match="has changed since it was loaded; load it again"):
        view.save(tmp_path / "saved", **HERE)


@pytest.mark.parametrize("form", ["tfrecord", "parquet", "webdataset", "arrayrecord"])
def test_view_is_saved_in_another_format(pairs, tmp_path, form):
    if form == "arrayrecord":
        pytest.importorskip("array_record")
    view = load(pairs, "train").filter(pc.field("key") >= "train006")

    view.save(tmp_path / "out", format=form, shards=1, **HERE)

    saved = load(tmp_path / "out", "train")
    assert saved.manifest.format.startswith(form) and len(saved.files) == 1
    same(saved, view)


def test_view_of_a_bucket_is_saved_into_another(tmp_path):
    url = f"memory://{tmp_path.name}"
    materialize(lambda n: {"n": n, "text": str(n)}, range(20), f"{url}/all", key=str, **HERE)

    load(f"{url}/all", cache_dir=tmp_path / "cache").filter(pc.field("n") < 5).save(f"{url}/few", **HERE)

    saved = load(f"{url}/few", cache_dir=tmp_path / "cache")
    assert sorted(int(sample["n"]) for sample in saved) == [*range(5)]
    assert verify(f"{url}/few").ok


def test_another_view_replaces_the_first_only_if_asked(pairs, tmp_path):
    data = load(pairs, "val")
    data.take(3).save(tmp_path / "out", **HERE)

    data.take(4).save(tmp_path / "out", **HERE)
    with pytest.raises(OutputError, match="no longer has 1 of the 4 rows"):
        data.take(3).save(tmp_path / "out", **HERE)
    assert len(load(tmp_path / "out")) == 4

    data.take(3).save(tmp_path / "out", existing="replace", **HERE)
    assert len(load(tmp_path / "out")) == 3


def test_view_without_a_copy_or_a_field_is_another(pairs, tmp_path):
    """Its rows are the same."""
    data = load(pairs, "train")
    data.save(tmp_path / "out", **HERE)

    for view in (data.drop(data.keys()[:1]), data.columns("mask"), data):
        view.save(tmp_path / "out", **HERE)
        same(load(tmp_path / "out", "train"), view)


def test_saved_view_can_be_viewed_and_saved_again(pairs, tmp_path):
    load(pairs, "train").take(20).save(tmp_path / "one", **HERE)
    first = load(tmp_path / "one", "train").drop(load(tmp_path / "one", "train").keys()[:5])

    first.save(tmp_path / "two", **HERE)

    same(load(tmp_path / "two", "train"), first)


def test_what_cannot_be_saved_is_refused_with_a_remedy(pairs, tmp_path):
    data = load(pairs, "val")
    refused = {
        "come from 2 directories": concat([data, load(pairs, "val")]),
        "save: no records are left": data.take(0),
        "has the record 'val00.' twice, but keys are unique": data.select([0, 1, 1]),
    }
    for message, view in refused.items():
        with pytest.raises(OptionError, match=message):
            view.save(tmp_path / "out", **HERE)
    with pytest.raises(OptionError, match="is inside the directory to convert"):
        data.take(2).save(pairs, **HERE)
    with pytest.raises(TypeError, match=r"write drop\(\['a'\]\)"):
        data.drop("a")
    with pytest.raises(KeyError, match="nowhere"):
        data.drop(["val000", "nowhere"])
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").glob("*.tfrecord"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_save_a_view(pairs, tmp_path, method):
    """What is wanted travels to them."""
    view = load(pairs, "train").select(np.arange(35, 0, -3)).columns("image")

    view.save(tmp_path / "out", progress=False, workers=WorkerOptions(num_workers=2, start_method=method))

    same(load(tmp_path / "out", "train"), view.select(by_rows(view.keys())))


# ---------------------------------------------------------------- after map and join


def brighter(sample, rng):
    """Change a picture in place, a number's type, and add fields; the label stays."""
    if sample["label"] % 2:
        sample["image"][:4] = rng.integers(256)
    return {
        "image": sample["image"],
        "label": sample["label"],
        "gain": f"{sample['gain']}",
        "words": ["w"] * (int(sample["label"]) % 3),
        "where": {"row": np.arange(2) + sample["label"]},
    }


def test_what_functions_make_is_saved(photos, tmp_path):
    """What they leave as it was keeps its bytes, though JPEG would change it again; other fields get features."""
    data = load(photos)
    view = data.map(brighter, seed=3)

    report = view.save(tmp_path / "out", **HERE)

    saved = load(tmp_path / "out")
    assert report.is_complete and verify(tmp_path / "out").ok and saved.keys() == view.keys()
    assert {name: saved.features[name].declared() for name in saved.features if name != "key"} == {
        "image": data.features["image"].declared(),
        "label": "int32 scalar",
        "gain": "str",
        "words": "list of str",
        "where/row": "int64 (?,)",
    }
    before, after = stored(data, "image"), stored(saved, "image")
    for one, other, original in zip(saved, view, data, strict=True):
        assert all(one[name] == other[name] for name in ("label", "gain", "words"))
        assert one["where"]["row"].tolist() == other["where"]["row"].tolist()
        is_same = np.array_equal(other["image"], original["image"])
        assert is_same == (int(original["label"]) % 2 == 0)
        assert (after[one["key"].encode()] == before[one["key"].encode()]) == is_same
    assert view.save(tmp_path / "out", **HERE).did_nothing
    known = load(tmp_path / "out", "train").statistics
    assert known["label"]["value"]["count"] == len(load(photos, "train")) and "where/row" in known


def test_functions_run_in_workers_and_give_the_same_bytes(photos, tmp_path):
    """Also pipelines of others, and functions that draw from global generators."""
    albumentations = pytest.importorskip("albumentations")
    flip = albumentations.HorizontalFlip(p=0.5)
    view = load(photos, "train").map(flip).map(lambda sample: {**sample, "noise": np.random.random(2)})

    for name, options in (("one", HERE), ("two", {"progress": False, "workers": 2})):
        view.save(tmp_path / name, **options)

    one, two = (stored(load(tmp_path / name), column) for name in ("one", "two") for column in ("image",))
    assert one == two
    first, second = (load(tmp_path / name) for name in ("one", "two"))
    same(first, second)
    assert len({float(sample["noise"][0]) for sample in first}) == len(first)
    images = load(photos, "train").map(flip)
    assert all(np.array_equal(images[one["key"]]["image"].shape, one["image"].shape) for one in first)


def test_another_function_makes_the_records_again(photos, tmp_path):
    data = load(photos, "val")
    for gain in (1, 2, 2):
        report = data.map(lambda sample, gain=gain: {"label": int(sample["label"]) * gain}).save(
            tmp_path / "out", **HERE
        )
        assert [int(sample["label"]) for sample in load(tmp_path / "out")] == [
            int(sample["label"]) * gain for sample in data
        ]
    assert report.did_nothing


def test_joined_records_are_saved_as_they_are_stored(photos, pairs, tmp_path):
    """Those of a dataset, of a table with empty cells, and of records whose partner is missing."""
    data, table = load(photos), pa.table({"key": ["k1", "k2", "k3"], "text": ["a", None, "c"]})
    other = tmp_path / "other"
    materialize(lambda n: {"note": f"n{n}"}, range(20), other, key=lambda n: f"k{n}", **HERE)
    view = data.join(data.columns("image"), prefix="again_").join(load(other), how="left").join(table, how="left")

    view.save(tmp_path / "out", **HERE)

    saved = load(tmp_path / "out")
    assert saved.features == view.features and verify(tmp_path / "out").ok
    same(saved, view)
    assert stored(saved, "again_image") == stored(data, "image")
    assert saved.statistics["note"]["missing"] == 10
    assert view.save(tmp_path / "out", **HERE).did_nothing
    mapped = view.select(["k1", "k5"]).map(lambda sample: {"note": sample["note"] * 2, "text": sample["text"]})
    mapped.save(tmp_path / "few", format="parquet", progress=False, workers=1)
    same(load(tmp_path / "few"), mapped)
    copies = load(pairs, "train").join(pa.table({"key": [f"train{n:03d}" for n in range(12)], "n": range(12)}))
    copies.save(tmp_path / "copies", **HERE)
    same(load(tmp_path / "copies"), copies)


def test_splits_are_drawn_anew(photos, tmp_path):
    """As a run draws them, by the key: also of what was saved so before, and of a directory that is converted."""
    data, splits = load(photos), {"a": 0.5, "b": 0.3, "c": 0.2}
    materialize(lambda n: {"n": n}, range(30), tmp_path / "run", key=lambda n: f"k{n}", splits=splits, **HERE)

    data.save(tmp_path / "one", splits=splits, **HERE)
    load(tmp_path / "one").drop(["k3"]).save(tmp_path / "two", splits={"all": 1.0}, shards=2, **HERE)
    convert(tmp_path / "two", tmp_path / "three", splits=splits, **HERE)

    for split in splits:
        wanted = {*load(tmp_path / "run", split).keys()}
        assert {*load(tmp_path / "one", split).keys()} == wanted
        assert {*load(tmp_path / "three", split).keys()} == wanted - {"k3"}
    assert [*load(tmp_path / "two").manifest.splits] == ["all"] and len(load(tmp_path / "two").files) == 2
    for name in ("one", "two", "three"):
        assert verify(tmp_path / name).ok
        saved = load(tmp_path / name)
        same(saved, data.select(saved.keys()))
        assert stored(saved, "image").items() <= stored(data, "image").items()
    assert data.save(tmp_path / "one", splits=splits, **HERE).did_nothing


@pytest.mark.parametrize("splits", [["a", "b"], {"a": 0.5, "b": 0.6}, {"a": "half", "b": 0.5}])
def test_splits_that_are_no_shares_are_refused(photos, tmp_path, splits):
    with pytest.raises(OptionError, match="splits is"):
        load(photos).save(tmp_path / "out", splits=splits, **HERE)


def test_copies_of_a_row_stay_in_one_split(pairs, tmp_path):
    data = load(pairs, "train")

    data.save(tmp_path / "out", splits={"fit": 0.5, "test": 0.5}, **HERE)

    found = {split: load(tmp_path / "out", split).keys() for split in ("fit", "test")}
    rows = {split: {key.partition("#")[0] for key in keys} for split, keys in found.items()}
    assert not rows["fit"] & rows["test"] and sorted(found["fit"] + found["test"]) == sorted(data.keys())
    assert np.array_equal(load(tmp_path / "out")["train003#2"]["image"], data["train003#2"]["image"])
    with pytest.raises(OptionError, match=r"different copies \(train: 3, val: 1\); load one split"):
        load(pairs).save(tmp_path / "both", splits={"fit": 0.5, "test": 0.5}, **HERE)


def test_functions_that_fail_are_named_with_their_sample(photos, tmp_path):
    data = load(photos, "train")
    third = data.keys()[2]

    def fails(sample):
        if sample["key"] == third:
            raise ValueError("no such thing")
        return {"label": "text" if sample["key"] == data_keys[4] else sample["label"]}

    data_keys = data.keys()
    with pytest.raises(SampleError, match=f"{third}.*no such thing"):
        data.map(fails).save(tmp_path / "out", **HERE)
    data.map(fails).save(tmp_path / "out", errors="skip", **HERE)
    assert [*load(tmp_path / "out").keys()] == [key for key in data_keys if key not in (third, data_keys[4])]
    with pytest.raises(OptionError, match="two different results for sample"):
        data.map(lambda sample: {"label": time.perf_counter_ns()}).save(tmp_path / "chance", **HERE)
