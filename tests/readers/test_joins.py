"""`join`: records with the fields of their partners, which another dataset or a table holds."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numbered_rows import written
from pyarrow import csv, parquet

from datamat import (
    CorruptDataError,
    Features,
    Image,
    ListOf,
    OptionError,
    Scalar,
    ShardOptions,
    SourceError,
    concat,
    load,
    materialize,
    mix,
)
from datamat.testing import InlineExecutor

HERE = {"executor": InlineExecutor(), "progress": False}


def caption_of(number):
    """What the other dataset says of a row."""
    return {"caption": f"caption {number * 7 % 100}", "scores": np.arange(number % 4, dtype=np.float32), "id": number}


def picture_of(number):
    return {"image": np.full((6, 5, 3), number, np.uint8)}


def made(folder, numbers, sample, **options):
    """Return a dataset of what a function makes of numbers, whose keys are those of rows."""
    options = {"key": lambda number: f"k{number}", "shards": ShardOptions(num_shards=3), **HERE, **options}
    materialize(sample, list(numbers), folder, **options)
    return load(folder)


@pytest.fixture(scope="module", params=["tfrecord", "tfrecord.gz", "parquet", "webdataset"])
def form(request):
    """Format of all datasets."""
    return request.param


@pytest.fixture(scope="module")
def rows(tmp_path_factory, form):
    """Small rows 0 to 99."""
    return written(tmp_path_factory.mktemp("rows") / "out", 0, 100, 4, form)


@pytest.fixture(scope="module")
def captions(tmp_path_factory, form):
    """Small rows 20 to 119, stored in another order."""
    return made(tmp_path_factory.mktemp("captions") / "out", range(119, 19, -1), caption_of, format=form)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, form):
    """Pictures of rows 0 to 59, which are read one by one."""
    features = Features({"image": Image((6, 5, 3))})
    return made(tmp_path_factory.mktemp("pictures") / "out", range(60), picture_of, features=features, format=form)


def number_of(key):
    return int(key.partition("#")[0][1:])


def check(sample, prefix=""):
    """Assert that a sample has the fields that captions say of its row."""
    wanted = caption_of(number_of(sample["key"]))
    assert {name: np.asarray(sample[prefix + name]).tolist() for name in wanted} == {
        name: np.asarray(value).tolist() for name, value in wanted.items()
    }


def samples_of(batches):
    for batch in batches:
        for row in range(len(batch["key"])):
            yield {name: values[row] for name, values in batch.items()}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", ["rows", "pictures"])
def test_each_record_has_the_fields_of_its_partner(rows, pictures, captions, name, shuffle):
    """Read one by one, by key and in batches small and large, of a copy and a selection, too."""
    own = {"rows": rows, "pictures": pictures}[name]
    data = own.join(captions, how="inner")

    assert data.keys() == [key for key in own.keys() if number_of(key) >= 20]  # noqa: SIM118 -- not a dict
    assert {*data.features} == {*own.features, *captions.features}
    for sample in [data[3], data["k57"], *pickle.loads(pickle.dumps(data))[::9]]:
        check(sample)
    for batch_size in (1, 7, 40):
        found = [*samples_of(data.to_numpy(batch_size, shuffle=shuffle, seed=3))]
        assert sorted(sample["key"] for sample in found) == sorted(data.keys())
        for sample in found:
            check(sample)
            assert name == "rows" or (sample["image"] == number_of(sample["key"]) % 256).all()
            assert name == "pictures" or int(sample["number"]) == number_of(sample["key"])


def test_partner_of_every_feature_is_read_as_it_was(everything):
    """Also where it may be missing, and is read in another order: to the bit."""
    data = load(everything)
    exact = data.join(data[::-1], prefix="other_")
    left = data.join(data[::2], how="left", prefix="other_")

    assert {*exact.features} == {*data.features} | {f"other_{name}" for name in data.features if name != "key"}
    for joined, there in ((exact, {*data.keys()}), (left, {*data[::2].keys()})):
        for sample, of_batch, own in zip(joined, samples_of(joined.to_numpy(3)), data, strict=True):
            for name, value in own.items():
                if name == "key":
                    continue
                for found in (sample[f"other_{name}"], of_batch[f"other_{name}"]):
                    if own["key"] in there:
                        assert np.array_equal(np.asarray(found), np.asarray(value)) and type(found) is type(value)
                    else:
                        assert found is None


def test_records_without_partner(rows, captions):
    """They are refused, left out, or get None."""
    with pytest.raises(OptionError, match=r"20 of 100 records have no partner; the first .* 'k\d+'; how='inner'"):
        rows.join(captions)
    left = rows.join(captions.columns("caption"), how="left")

    assert len(left) == len(rows) and "or None" in left.features["caption"].declared()
    for found in (left, samples_of(left.to_numpy(16)), samples_of(left.to_numpy(64, shuffle=True))):
        for sample in found:
            number = number_of(sample["key"])
            assert sample["caption"] == (caption_of(number)["caption"] if number >= 20 else None)
    few = rows.select(["k30", "k20"]).join(captions)  # only those that are read need one
    assert [sample["id"] for sample in few] == [30, 20]


def test_views_of_joined_records(rows, captions, form):
    """They are views like any other; what was joined can be joined, and joined to."""
    data = rows.join(captions, how="inner", prefix="their_")
    twice = captions.join(data, how="inner")

    for view in (data.take(5), data.shard(1, 3), data.drop([data.keys()[0]]), data[::-2]):
        for sample in view:
            check(sample, "their_")
    assert [int(sample["their_id"]) for sample in data.filter(pc.field("their_id") == 42)] == [42]
    assert data.filter(lambda sample: sample["their_id"] == 42).keys() == ["k42"]
    assert {*data.columns("their_caption")[0]} == {"key", "their_caption"} == {*data.columns("their_caption").features}
    assert {*data.columns("word")[0]} == {"key", "word"}
    changed = data.map(lambda sample: {"id": sample["their_id"] + 1})
    assert [one["id"] for one in changed.take(2)] == [number_of(key) + 1 for key in data.keys()[:2]]
    for sample in twice:
        check(sample)
        check(sample, "their_")
    assert data.statistics["their_id"]["value"]["max"] == 119 and "number" in data.statistics
    assert f"{data.features['their_caption'].declared()}" in repr(data)


def test_state_belongs_to_what_was_joined(rows, captions):
    data = rows.join(captions, how="inner")
    batches = data.to_numpy(8, shuffle=True, seed=1)
    reading = iter(batches)
    next(reading)
    state = batches.state_dict()
    rest = [batch["id"].tolist() for batch in reading]

    again = rows.join(captions, how="inner").to_numpy(8, shuffle=True, seed=1)
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == rest
    for other in (rows.join(captions.columns("id"), how="inner"), rows.join(captions, how="left"), rows[20:]):
        with pytest.raises(OptionError, match="the state belongs to"):
            other.to_numpy(8, shuffle=True, seed=1).load_state_dict(state)


def test_several_datasets_are_joined_and_joined_to(rows, captions):
    halves = concat([captions.filter(pc.field("id") < 60), captions.filter(pc.field("id") >= 60)])
    for data in (rows.join(halves, how="inner"), concat([rows[:50], rows[50:]]).join(captions, how="inner")):
        assert len(data) == 80
        for sample in [*data, *samples_of(data.to_numpy(32, shuffle=True))]:
            check(sample)
    mixed = mix({rows.select(["k20", "k21", "k22"]): 1, rows.select([f"k{n}" for n in range(50, 80)]): 1})
    for sample in samples_of(mixed.join(captions).to_numpy(2, shuffle=True)):
        check(sample)


def test_copies_of_a_row_have_one_partner(tmp_path, captions):
    """A key is matched as it is, then as that of a row; in tables also as it was in the source."""
    folder = tmp_path / "out"
    materialize(
        lambda number: {"x": number},
        range(20, 24),
        folder,
        key=lambda number: f"a/k{number}" if number == 23 else f"k{number}",
        copies=3,
        transform=lambda sample, rng: {**sample, "x": int(rng.integers(99))},
        **HERE,
    )
    data = load(folder)
    table = pa.table({"key": ["k20", "k21", "k21#1", "k22", "a/k23"], "caption": ["a", "b", "c", "d", "e"]})

    found = {sample["key"]: sample["caption"] for sample in data.join(table)}
    assert found == {
        **{f"{key}#{copy}": text for key, text in zip(["k20", "k21", "k22"], "abd", strict=True) for copy in range(3)},
        **{f"a%2Fk23#{copy}": "e" for copy in range(3)},
        "k21#1": "c",
    }
    assert len(data.join(captions, how="inner")) == 9


@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "polars", "parquet", "csv", "jsonl"])
def test_tables_are_joined(tmp_path, kind):
    """Their columns get the types that a run would give them; an empty cell is None, but for text in CSV."""
    rows = written(tmp_path / "rows", 0, 30, 2)
    table = pa.table(
        {
            "key": [f"k{number}" for number in range(29, -1, -1)],
            "weight": pa.array(range(29, -1, -1), pa.int64()),
            "remark": [None if number % 3 else f"r{number}" for number in range(29, -1, -1)],
            "split": ["a", "b"] * 15,
        }
    )
    path, source, empty = tmp_path / f"table.{kind}", table, None
    if kind in ("pandas", "polars"):
        package = pytest.importorskip(kind)
        source = table.to_pandas() if kind == "pandas" else package.from_arrow(table)
    elif kind == "parquet":
        parquet.write_table(table, source := path)
    elif kind == "csv":
        csv.write_csv(table, source := path)
        empty = ""
    elif kind == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        source = str(path)

    data = rows.join(source)

    assert {name: data.features[name].declared() for name in ("weight", "remark", "split")} == {
        "weight": "int64 scalar",
        "remark": "str" if kind == "csv" else "str, or None",
        "split": "str",
    }
    for sample in [*data, *samples_of(data.to_numpy(8, shuffle=True))]:
        number = number_of(sample["key"])
        assert int(sample["number"]) == int(sample["weight"]) == number
        assert sample["remark"] == (empty if number % 3 else f"r{number}")
        assert sample["split"] == ("b" if number % 2 == 0 else "a")
    assert data.statistics["weight"]["value"]["max"] == 29


def test_tables_of_lists_and_structs(tmp_path):
    rows = written(tmp_path / "rows", 0, 4, 1)
    table = pa.table(
        {
            "key": ["k0", "k1", "k2", "k3"],
            "boxes": [[1.5, 2.5], [], [0.5], [3.5]],
            "size": [{"h": number, "w": 2} for number in range(4)],
            "half": pa.array([1, 2, None, 4], pa.float16()),
        }
    )

    data = rows.join(table)

    assert data["k0"]["boxes"].tolist() == [1.5, 2.5] and data["k1"]["size"] == {"h": 1, "w": 2}
    assert data.features["half"].declared() == "float16 scalar, or None" and data["k2"]["half"] is None


def test_join_by_a_field(tmp_path):
    """Of text or integers, with the field of that name or, where a dataset has none, with its keys."""
    rows = written(tmp_path / "rows", 0, 30, 2)
    numbers = made(tmp_path / "numbers", range(30), lambda number: {"number": 29 - number, "root": number**0.5})
    words = made(tmp_path / "words", range(7), lambda number: {"length": number}, key=lambda number: f"w{number}")

    for sample in rows.join(numbers, on="number"):
        assert sample["root"] == (29 - int(sample["number"])) ** 0.5
    for sample in rows.join(words, on="word"):
        assert int(sample["length"]) == int(sample["number"]) % 7
    table = pa.table({"word": [f"w{number}" for number in range(5)], "key": ["x"] * 5, "text": [*"abcde"]})
    found = rows.join(table, on="word", how="inner")
    assert {int(sample["number"]) % 7: sample["text"] for sample in found} == dict(enumerate("abcde"))
    assert len(found) == sum(number % 7 < 5 for number in range(30))


def test_what_cannot_be_joined_is_refused_with_a_remedy(tmp_path):
    rows = written(tmp_path / "rows", 0, 6, 1)
    lists = made(
        tmp_path / "lists",
        range(3),
        lambda number: {"parts": [{"n": number}]},
        features=Features({"parts": ListOf({"n": Scalar("int64")})}),
    )
    keys = [f"k{number}" for number in range(6)]
    refused = {
        r"both have a field 'number'; pass prefix=": lambda: rows.join(rows),
        r"has 'k1' twice, as its records 1 and 6": lambda: rows.join(pa.table({"key": [*keys, "k1"], "x": range(7)})),
        r"has no column 'key'.* it has id; x: rename": lambda: rows.join(pa.table({"id": keys, "x": keys})),
        r"1 cell of the column 'key' is empty": lambda: rows.join(pa.table({"key": [*keys[1:], None], "x": keys})),
        r"column 'x' of the table is empty": lambda: rows.join(pa.table({"key": keys, "x": pa.nulls(6)})),
        r"how is 'outer'; want 'exact', 'inner' or 'left'": lambda: rows.join(rows, how="outer"),
        r"join after map": lambda: rows.map(lambda sample: sample).join(rows, prefix="x"),
        r"join after map.* save the result of map": lambda: rows.join(rows.map(lambda sample: sample), prefix="x"),
        r"on is 'nowhere'; want 'key' or a field: key, ": lambda: rows.join(rows, on="nowhere"),
        r"field 'pair' is .*; records are matched by text": lambda: rows.join(rows, on="pair"),
        r"other is a list; want .* pyarrow.Table.from_pylist": lambda: rows.join([{"key": "k1", "x": 1}]),
        r"two columns of the table have one name": lambda: rows.join(
            pa.Table.from_arrays([pa.array(keys)] * 3, names=["key", "x", "x"])
        ),
        r"field 'parts' cannot be None": lambda: rows.join(lists, how="left"),
        r"3 of 6 records have no partner; the first is the one with the key 'k\d'": lambda: rows.join(lists),
    }
    for message, call in refused.items():
        with pytest.raises(OptionError, match=message):
            call()
    with pytest.raises(SourceError, match=r"column 'x' is decimal.* join what load returns"):
        rows.join(pa.table({"key": keys, "x": pa.array(range(6), pa.decimal128(3, 1))}))
    with pytest.raises(SourceError, match="cannot be read as Parquet"):
        rows.join(tmp_path / "missing.parquet")
    assert len(rows.join(lists, how="inner")) == 3
    assert len(rows.join(tmp_path / "lists", how="inner")) == 3  # the path of a dataset


def test_damage_of_a_partner_is_that_of_the_record(tmp_path):
    """It is named with the file that it is in; where damaged records are skipped, so is this one."""
    rows, folder = written(tmp_path / "rows", 0, 40, 1), tmp_path / "pictures"
    made(folder, range(40), lambda number: {**picture_of(number), "seed": number}, shards=1)
    content = bytearray(next(folder.glob("*.tfrecord")).read_bytes())
    content[len(content) // 2] ^= 255
    next(folder.glob("*.tfrecord")).write_bytes(content)

    with pytest.raises(CorruptDataError, match=r"pictures.*tfrecord: record"):
        [*rows.join(load(folder)).to_numpy(8)]
    skipping = load(folder, errors="skip")
    for data in (skipping.join(rows), skipping.join(pa.table({"seed": range(40), "x": range(40)}), on="seed")):
        assert sum(len(batch["key"]) for batch in data.to_numpy(40)) == 39
    data = load(tmp_path / "rows", errors="skip").join(load(folder))
    assert len([*data]) == 39 and data.num_skipped == 1
    assert sum(len(batch["key"]) for batch in data.to_numpy(8)) == 39


def test_clients_read_joined_records(tmp_path, tf):
    pytest.importorskip("torch")
    rows = written(tmp_path / "rows", 0, 40, 2)
    data = rows.join(made(tmp_path / "captions", range(40), caption_of))

    for batch in data.to_tf(8):
        assert batch["caption"].numpy().tolist() == [
            caption_of(number_of(key.decode()))["caption"].encode() for key in batch["key"].numpy()
        ]
    for batch in data.to_torch(8, shuffle=True, num_workers=2):
        assert batch["id"].tolist() == [number_of(key) for key in batch["key"]]
    assert data.preview(2).array.ndim == 3


def test_joined_datasets_behind_urls(tmp_path):
    url = f"memory://{tmp_path.name}"
    for name, sample in (("captions", caption_of), ("pictures", picture_of)):
        materialize(sample, range(40), f"{url}/{name}", key=lambda n: f"k{n}", shards=4, **HERE)
    captions, pictures = (load(f"{url}/{name}", cache_dir=tmp_path / "cache") for name in ("captions", "pictures"))

    for data in (captions.join(pictures), pictures.join(captions)):
        for sample in [*data, *samples_of(data.to_numpy(8, shuffle=True))]:
            check(sample)
            assert (sample["image"] == number_of(sample["key"])).all()
