"""A view of a dataset, written as a dataset of its own: its records as they were stored, and no others."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest
import small_pairs

from datamat import OptionError, OutputError, ShardOptions, WorkerOptions, concat, load, materialize, verify
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
        r"save after map: .* materialize\(lambda key: data\[key\]": data.map(lambda sample: sample),
        "come from 2 directories": concat([data, load(pairs, "val")]),
        "save: there is no record": data.take(0),
        "has the record 'val00.' twice, and a key is that of one": data.select([0, 1, 1]),
    }
    for message, view in refused.items():
        with pytest.raises(OptionError, match=message):
            view.save(tmp_path / "out", **HERE)
    with pytest.raises(OptionError, match="lies in the directory that is converted"):
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
