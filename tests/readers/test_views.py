"""Views of datasets: each reads what a plain loop over the same records gives, by any reader, and resumes anywhere."""

from __future__ import annotations

import collections
import importlib.util
import json
import pathlib
import pickle

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_rows import batched, numbers_of, written

from datamat import OptionError, SampleError, concat, load, mix
from datamat.formats import parquet


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Two datasets of 23 and 11 rows."""
    folder = tmp_path_factory.mktemp("rows")
    return written(folder / "a", 0, 23, 3), written(folder / "b", 100, 11, 2, "parquet")


def doubled(sample):
    return {**sample, "number": sample["number"] * 2}


def noisy(sample, rng):
    return {**sample, "noise": rng.random()}


# ---------------------------------------------------------------- each view against a list


def part_of(found, rank, world):
    return found[len(found) * rank // world : len(found) * (rank + 1) // world]


def steps(size):
    """Draw what to do to a dataset, with the same done to a list of numbers."""
    return st.one_of(
        st.lists(st.integers(-size, size - 1), max_size=8).map(
            lambda items: (lambda data: data.select([i for i in items if -len(data) <= i < len(data)]),
                           lambda found: [found[i] for i in items if -len(found) <= i < len(found)])
        ),
        st.builds(
            slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 30), st.sampled_from([None, 2, -1, -3])
        ).map(
            lambda cut: (lambda data: data.select(cut), lambda found: found[cut])
        ),
        st.integers(0, 30).map(lambda count: (lambda data: data.take(count), lambda found: found[:count])),
        st.tuples(st.integers(1, 4), st.integers(0, 3)).map(
            lambda pair: (lambda data: data.shard(pair[1] % pair[0], pair[0]),
                          lambda found: part_of(found, pair[1] % pair[0], pair[0]))
        ),
        st.integers(1, 4).map(
            lambda step: (lambda data: data.filter(lambda sample: sample["number"] % step == 0),
                          lambda found: [number for number in found if number % step == 0])
        ),
        st.integers(0, 110).map(
            lambda least: (lambda data: data.filter(pc.field("number") >= least),
                           lambda found: [number for number in found if number >= least])
        ),
        st.sampled_from(["sun", "rain"]).map(
            lambda kind: (lambda data: data.filter(pc.field("weather") == kind),
                          lambda found: [number for number in found if ("sun", "rain", "snow")[number % 3] == kind])
        ),
    )  # fmt: skip


@settings(max_examples=30)
@given(st.lists(steps(20), max_size=3), st.booleans(), st.sampled_from([False, True, 5]))
def test_views_of_views_are_those_of_a_list(rows, chain, joined, shuffle):
    """By position, by key, in order, in batches, in shuffled batches: in each epoch, every selected record once."""
    data = concat(rows) if joined else rows[1]
    wanted = numbers_of(data)
    for of_data, of_list in chain:
        data, wanted = of_data(data), of_list(wanted)

    assert numbers_of(data) == wanted
    assert len(data) == len(wanted)
    assert [int(data[place]["number"]) for place in range(len(data))] == wanted
    assert data.keys() == [f"k{number}" for number in wanted]
    assert all(int(data[f"k{number}"]["number"]) == number for number in wanted)
    assert "k1000" not in data
    assert batched(data.to_numpy(4)) == wanted
    batches = data.to_numpy(4, shuffle=shuffle, seed=1)
    for _ in range(2):
        assert sorted(batched(batches)) == sorted(wanted)


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("select", 8), ("concat", True), ("mix", False), ("mix", True), ("filter", False)]
)
def test_view_resumes_at_every_step_under_other_ranks(rows, kind, shuffle):
    """What was delivered and what is left are the epoch, each record as often as in the epoch itself."""
    a, b = rows
    data = {
        "select": lambda: concat([a, b]).select(range(30, 0, -2)),
        "concat": lambda: concat([b, a]),
        "mix": lambda: mix({a: 0.7, b: 0.3}, seed=2),
        "filter": lambda: a.filter(lambda sample: sample["number"] % 3),
    }[kind]()
    whole = batched(data.to_numpy(1, shuffle=shuffle, seed=5))
    loaders = [data.to_numpy(2, shuffle=shuffle, seed=5, rank=rank, world_size=2) for rank in range(2)]
    walks = [iter(loader) for loader in loaders]

    done = []
    for _ in range(len(loaders[0])):
        done += batched([next(walk) for walk in walks])
        state = json.loads(json.dumps(loaders[0].state_dict()))
        assert state == json.loads(json.dumps(loaders[1].state_dict()))
        rest = []
        if len(done) < len(whole):
            for rank in range(3):
                other = data.to_numpy(1, shuffle=shuffle, seed=5, rank=rank, world_size=3)
                other.load_state_dict(state)
                rest += set(batched(other))
        assert sorted(whole) == sorted([*done, *set(rest)])


def test_order_is_the_same_for_any_number_of_threads_and_workers(rows):
    """Worker processes get the selection, and the functions of `map`, with the random numbers of the epoch."""
    data = concat(rows).filter(lambda sample: sample["number"] % 2).map(noisy, seed=3).map(doubled)
    options = {"shuffle": True, "seed": 4}
    wanted = list(data.to_numpy(4, **options))

    for changed in ({"num_threads": 1}, {"num_threads": 3}, {"num_workers": 2}):
        found = list(data.to_numpy(4, **options, **changed))
        assert batched(found) == batched(wanted)
        assert [list(batch["noise"]) for batch in found] == [list(batch["noise"]) for batch in wanted]


def test_pickled_view_is_the_same(rows):
    """A copy does not evaluate the filter again."""
    data = rows[0].filter(lambda sample: sample["number"] > 9).take(5)

    assert numbers_of(pickle.loads(pickle.dumps(data))) == numbers_of(data)


def test_states_belong_to_what_was_selected(rows):
    """A state of other records is refused; equal selections are the same, however they were made."""
    a, b = rows
    batches, walk = a.take(10).to_numpy(2), iter(a.take(10))
    next(iter(batches))
    state, place = batches.state_dict(), None

    for other in (a, a.take(9), a.select(range(1, 11)), b.take(10), concat([a, b]), concat([b, a]), mix({a: 1, b: 1})):
        with pytest.raises(OptionError, match="the state belongs to a loader with"):
            other.to_numpy(2).load_state_dict(state)
    a.select([*range(10)]).to_numpy(2).load_state_dict(state)
    data = concat([b, a]).select(range(5, 20))
    walk = iter(data)
    begun = [int(next(walk)["number"]) for _ in range(7)]
    place = data.state_dict()
    again = concat([b, a]).select(range(5, 20))
    again.load_state_dict(place)
    assert begun + numbers_of(again) == numbers_of(data)
    with pytest.raises(OptionError, match="the state belongs to other records"):
        concat([a, b]).select(range(5, 20)).load_state_dict(place)


# ---------------------------------------------------------------- filters


def test_filter_asks_the_index_where_it_can(rows, tmp_path):
    """Shards may be gone; a name that samples have stands for the sample's value unless `on` says otherwise."""
    data = written(tmp_path / "out", 0, 23, 3)
    sound = numbers_of(data)
    for file in data.files:
        pathlib.Path(file).write_bytes(b"")

    rainy = data.filter(pc.field("weather") == "rain")
    by_key = data.filter(pc.field("key").isin(["k3", "k5"]))
    by_field = data.filter(pc.field("number") <= -20, on="index")
    by_row = data.filter(
        lambda row: row["weather"] == "sun" and row["number"] < -10 and row["key"] != "k15", on="index"
    )

    assert rainy.keys() == [f"k{number}" for number in sound if number % 3 == 1]
    assert sorted(by_key.keys()) == ["k3", "k5"]
    assert sorted(by_field.keys()) == ["k20", "k21", "k22"]
    assert sorted(by_row.keys()) == ["k12", "k18", "k21"]
    assert numbers_of(rows[0].filter((pc.field("number") > 9) & (pc.field("weather") == "snow"))) == [
        number for number in numbers_of(rows[0]) if number > 9 and number % 3 == 2
    ]


def test_filter_on_the_index_counts_copies(tmp_path):
    """Each copy of a row has the fields of that row."""
    data = written(tmp_path / "out", 0, 7, 2, copies=3, transform=lambda sample, rng: sample)

    found = data.filter(pc.field("weather") == "rain")

    assert found.keys() == [key for key in data.keys() if int(key[1:].split("#")[0]) % 3 == 1]  # noqa: SIM118
    assert len(found) == 6


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (pc.field("colour") == 1, "neither samples nor index have a field 'colour'; want some of key, number, pair"),
        (pc.field("number") == "x", "does not fit the fields"),
        ("number > 3", "want a function of the sample, or an expression"),
    ],
)
def test_nonsense_of_filters_is_refused(rows, condition, message):
    """The error says what is accepted."""
    with pytest.raises(OptionError, match=message):
        len(rows[0].filter(condition))


def test_filter_leaves_out_damaged_records_that_are_skipped(tmp_path):
    """They are counted and logged as everywhere."""
    data = written(tmp_path / "out", 0, 23, 1)
    content = bytearray(pathlib.Path(data.files[0]).read_bytes())
    content[len(content) // 2] ^= 1
    pathlib.Path(data.files[0]).write_bytes(content)

    tolerant = load(tmp_path / "out", errors="skip")

    assert len(tolerant.filter(lambda sample: True)) == len(tolerant.filter(pc.field("number") >= 0)) == 22
    assert tolerant.num_skipped == 1
    twice = concat([tolerant, tolerant.select(slice(None, None, -1))])
    assert len(list(twice)) == len([*twice.to_numpy()]) == 44
    assert twice.num_skipped == tolerant.num_skipped == 1


# ---------------------------------------------------------------- map and columns


def test_map_draws_for_each_epoch_and_columns_decode_no_others(rows):
    """Two functions of one sample draw different numbers; `transform` follows them."""
    data = rows[0].columns("number").map(noisy, seed=1).map(lambda s, rng: {**s, "other": rng.random()}, seed=1)
    batches = data.to_numpy(23, shuffle=True, transform=lambda sample: {**sample, "sum": sample["noise"] + 1})

    first, second = next(iter(batches)), next(iter(batches))
    single = {int(sample["number"]): sample["noise"] for sample in data}

    assert set(first) == {"key", "number", "noise", "other", "sum"}
    assert np.allclose(first["sum"], first["noise"] + 1)
    assert not set(first["noise"]) & {*second["noise"], *first["other"]}
    assert single == dict(zip(first["number"].tolist(), first["noise"], strict=True))
    assert list(rows[0].columns("word").features) == ["key", "word"]
    for wrong, message in (
        (lambda: rows[0].columns("colour"), "have no field 'colour'; want some of key, number"),
        (lambda: rows[0].map(doubled).columns("number"), "call columns first"),
        (lambda: concat([rows[0], rows[1].columns("word")]), "field 'number' is int64 scalar in .* and missing in"),
    ):
        with pytest.raises(OptionError, match=message):
            wrong()


def test_each_member_of_concat_keeps_its_own_functions(rows):
    """What follows applies to all."""
    a, b = rows
    data = concat([a.map(doubled), b]).map(doubled)

    assert numbers_of(data) == [4 * n for n in numbers_of(a)] + [2 * n for n in numbers_of(b)]
    assert batched(data.to_numpy(5)) == numbers_of(data)


# ---------------------------------------------------------------- mixes


@pytest.mark.parametrize(
    ("weights", "shuffle"),
    [
        *[((0.7, 0.3), False), ((0.7, 0.3), True), ((0.9, 0.1), 4), ((2, 1), True), ((0.33, 0.67), 4)],
        *[((1, 1e-4), False), ((0.5, 0.5), False), ((0.5, 0.5), True)],
    ],
)
def test_mix_keeps_proportions_and_walks_through_each_dataset(rows, weights, shuffle):
    """At each place both datasets have come as often as their weights say; across epochs no record comes too often."""
    a, b = rows
    data = mix(dict(zip(rows, weights, strict=True)), seed=3)
    batches = data.to_numpy(4, shuffle=shuffle, seed=1)
    share = weights[0] / sum(weights)

    epochs = [batched(batches) for _ in range(4)]

    everything = [number for epoch in epochs for number in epoch]
    assert all(len(epoch) == len(data) for epoch in epochs)
    for epoch in epochs:
        for count in range(10, len(epoch)):
            assert abs(sum(number < 100 for number in epoch[:count]) - share * count) <= 5
    for dataset in (a, b):
        own, drawn = numbers_of(dataset), [n for n in everything if n in set(numbers_of(dataset))]
        for first in range(0, len(drawn) - len(own) + 1, len(own)):
            assert sorted(drawn[first : first + len(own)]) == sorted(own)
    if shuffle is False:
        assert epochs[0] == numbers_of(data)
        assert [n for n in everything if n >= 100][:11] == numbers_of(b)[: len([n for n in everything if n >= 100])]


def test_mix_ends_before_a_record_repeats_or_once_all_have_come(rows):
    """Counted against a loop that draws one by one."""
    a, b = rows

    short = numbers_of(mix({a: 0.5, b: 0.5}))
    long = numbers_of(mix({a: 0.5, b: 0.5}, stop="all_exhausted"))

    assert len(set(short)) == len(short) >= 21
    assert sum(n >= 100 for n in short) == 11
    assert set(long) == {*numbers_of(a), *numbers_of(b)}
    assert len([n for n in long if n < 100]) == 23
    assert mix({a: 0.5, b: 0.5}, seed=1).keys() != mix({a: 0.5, b: 0.5}, seed=2).keys()


def test_whatever_is_selected_from_a_mix_is_of_its_first_epoch(rows):
    """So it can be mixed and put together again."""
    a, b = rows
    both = mix({a: 0.7, b: 0.3}, seed=1)

    assert numbers_of(both.take(9)) == numbers_of(both)[:9]
    assert numbers_of(concat([both, b])) == numbers_of(both) + numbers_of(b)
    nested = mix({both: 1, b: 1}, stop="all_exhausted")
    assert set(numbers_of(nested)) == {*numbers_of(both), *numbers_of(b)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: mix({a: 0.7, b: 0}), "weight 0; want a positive number"),
        (lambda a, b: mix([a, b]), "mix: weights is a list; want a dict of dataset"),
        (lambda a, b: len(mix({a: 1, b.take(0): 1})), "dataset 1 has no records"),
        (lambda a, b: mix({a: 1}, stop="never"), "stop is 'never'"),
        (lambda a, b: concat([a, [1]]), r"\[1\] is not a dataset"),
        (lambda a, b: a.take(-1), r"take\(-1\)"),
        (lambda a, b: a.shard(2, 2), "rank is 2 of world 2; want 0 to 1"),
        (lambda a, b: a.filter(len, on="files"), "on is 'files'"),
        (lambda a, b: a.filter([True] * 1000), r"condition is \[True, True, .{0,40}\.\.\.\]; .* for a mask: select"),
        (lambda a, b: len(a.filter(pc.field("word") > 3)), "'word' is str$"),
        (lambda a, b: a.to_numpy(4).set_epoch(1.0), r"set_epoch\(1\.0\); want the number"),
        (lambda a, b: a.load_state_dict(None), "the state belongs to other records"),
        (lambda a, b: a.to_numpy(4, shuffle=None), "shuffle is None; want True, False, or the number"),
        (lambda a, b: concat([a, b]).path, "come from 2 directories"),
    ],
)
def test_nonsense_is_refused(rows, call, message):
    """The error says what is accepted."""
    with pytest.raises(OptionError, match=message):
        call(*rows)


def test_masks_and_sets_are_refused(rows):
    """A mask selected records 0 and 1, again and again; the order of a set of keys differs in each process."""
    mask = [number % 3 == 0 for number in range(len(rows[0]))]

    for form in (list, np.array, lambda mask: iter([np.bool_(one) for one in mask])):
        with pytest.raises(TypeError, match=r"for a mask: select\(np\.flatnonzero\(mask\)\)"):
            rows[0].select(form(mask))
    with pytest.raises(TypeError, match="for a mask"):
        rows[0][True]
    for items, message in ((3, r"write select\(\[3\]\)"), (None, "NoneType"), ({"k1", "k2"}, "set")):
        with pytest.raises(TypeError, match=message):
            rows[0].select(items)


def test_array_of_positions_selects_what_a_list_does(rows):
    """Negative ones count from the end, and those out of range are refused with their number."""
    for dtype in (np.int64, np.int8, np.uint64):
        wanted = [5, 0, 22, 5] if dtype is np.uint64 else [5, -1, 0, -23]
        assert rows[0].select(np.array(wanted, dtype)).keys() == rows[0].select(wanted).keys()
        with pytest.raises(IndexError, match="position 99 in a dataset of 23 records"):
            rows[0].select(np.array([1, 99], dtype))


def test_record_may_be_selected_more_often_than_its_row_group_has_rows(tmp_path):
    """Beside those of another row group, whose columns are put behind its own."""
    data = written(tmp_path / "out", 100, 11, 2, parquet.ParquetFormat(row_group_rows=1))
    chosen = data.select([0, -1, 0, 0, -1, 3])

    batch = next(iter(chosen.to_numpy(6)))

    for place, sample in enumerate(chosen):
        assert all(np.array_equal(batch[name][place], value) for name, value in sample.items())


@pytest.mark.parametrize("on", ["samples", "index"])
def test_condition_that_raises_names_the_record(rows, on):
    """As a transform that raises does."""
    with pytest.raises(SampleError, match=r"sample 'k.*': filter: the condition raised KeyError: 'colour'"):
        len(rows[0].filter(lambda sample: sample["colour"] == 3, on=on))


# ---------------------------------------------------------------- windows over selections


def test_window_on_parquet_mixes_as_many_records_as_it_says(tmp_path, monkeypatch):
    """Row groups stay in memory as long as windows need them: each is read once, twice where threads race."""
    data = written(tmp_path / "out", 0, 1200, 1, parquet.ParquetFormat(row_group_rows=8))
    place = {number: place for place, number in enumerate(numbers_of(data))}
    reads = collections.Counter()
    read_groups = parquet._ParquetReader.read_groups

    def counted(self, groups):
        reads.update(groups)
        return read_groups(self, groups)

    monkeypatch.setattr(parquet._ParquetReader, "read_groups", counted)
    monkeypatch.setattr(parquet, "_MOST_KEPT_BYTES", 0)
    parquet._kept.clear()

    found = [place[number] for number in batched(data.to_numpy(40, shuffle=400, seed=1, num_threads=1))]

    assert sorted(found) == list(range(1200))
    for first in range(0, 1200, 400):
        assert len({number // 8 for number in found[first : first + 400]}) >= 50
    for first in range(0, 1200, 40):  # small groups are taken 64 records at a time; a window is 7 times as many
        assert len({number // 64 for number in found[first : first + 40]}) > 4
    assert max(reads.values()) <= 2
    assert sum(reads.values()) < 200


# ---------------------------------------------------------------- torch


def test_views_as_tensors_of_torch(rows):
    """A `DataLoader` shares the batches of a view among its workers."""
    torch = pytest.importorskip("torch")
    a, b = rows
    data = mix({a: 0.7, b: 0.3}, seed=1).map(doubled)
    wanted = batched(data.to_numpy(4, shuffle=True, seed=2))

    batches = data.to_torch(4, shuffle=True, seed=2)
    assert batched(batches) == wanted
    batches.set_epoch(0)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert batched(loader) == wanted


# ---------------------------------------------------------------- tuples of inputs and targets


def readers_of(data):
    """Return the methods that read a dataset into arrays or tensors of torch, where that is installed."""
    return [data.to_numpy, *([data.to_torch] if importlib.util.find_spec("torch") else [])]


@pytest.mark.parametrize("batch_size", [None, 4])
def test_tuples_hold_the_fields_that_are_asked_for(rows, batch_size):
    """In the order in which they are named, and for what a function has made."""
    data = rows[0].map(doubled)
    names = ("word", "number")

    for read in readers_of(data):
        wanted = [tuple(batch[name] for name in names) for batch in read(batch_size)]
        found = list(read(batch_size, as_supervised=names))
        assert all(type(batch) is tuple for batch in found)
        assert repr(found) == repr(wanted)


def test_tuples_of_other_fields_are_refused(rows):
    """At once, unless a function decides which fields there are; a single one is no pair."""
    for read in readers_of(rows[0]):
        for fields in ("number", ("number",), ("number", "number"), ("a", "b", "c", "d"), 2, [["a"], "b"]):
            with pytest.raises(OptionError, match="want the fields of inputs and targets"):
                read(4, as_supervised=fields)
        with pytest.raises(OptionError, match="names 'label'; the fields are key, number, pair, tokens, word"):
            read(4, as_supervised=("number", "label"))
    with pytest.raises(OptionError, match="names 'word'; batches have the fields key, number"):
        next(
            iter(rows[0].map(lambda sample: {"number": sample["number"]}).to_numpy(4, as_supervised=("word", "number")))
        )
    with pytest.raises(OptionError, match="collate_fn together with as_supervised"):
        rows[0].to_numpy(4, collate_fn=list, as_supervised=("word", "number"))
