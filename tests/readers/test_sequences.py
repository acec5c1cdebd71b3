"""Sequences in batches: padded, bucketed, packed and cut; every token once, under any ranks, and resumed anywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_rows import batched, nested_rows, written

from datamat import OptionError, SampleError, concat, mix
from datamat.readers.batches import Order
from datamat.readers.sequences import Planner


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Two datasets of 61 and 20 rows, of 0 to 4 tokens each."""
    folder = tmp_path_factory.mktemp("rows")
    return written(folder / "a", 0, 61, 3), written(folder / "b", 100, 20, 2, "parquet")


def tokens_of(number):
    return list(range(number, number + number % 5))


def numbers_in(batch):
    """Return the numbers of a batch of records, or of packed rows."""
    return [int(number) for row in batch["number"] for number in np.atleast_1d(row)]


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(12, 40), st.sampled_from([None, 1, 3]), st.booleans())
def test_plan_has_every_record_once_within_the_budget(lengths, budget, most, packs):
    """A batch is padded to its longest record, a row holds the sum."""
    order = Order((len(lengths),), 1, None)
    planner = Planner(order, np.array(lengths, np.int64), budget, most, 1, packs=packs, shuffles=True)
    units = [planner.unit(2, number)[0].tolist() for number in range(planner.num_units(2))]

    assert sorted(position for unit in units for position in unit) == list(range(len(lengths)))
    for unit in units:
        own = [lengths[position] for position in unit]
        assert (sum(own) if packs else len(own) * max(own)) <= budget
        assert packs or most is None or len(own) <= most
    if packs:
        assert len(units) <= 2 * sum(lengths) / budget + 1  # two rows that are half empty would have been one


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 15), st.sampled_from(["long", "all"]), st.booleans())
def test_pieces_hold_every_token_once(lengths, tokens, chunk, shuffles):
    """Whatever is cut: no row is too long, and of one stream each row but the last is full."""
    order = Order((len(lengths),), 1, None)
    planner = Planner(order, np.array(lengths, np.int64), tokens, None, 1, packs=True, shuffles=shuffles, chunk=chunk)
    rows = [
        [(position, token) for position, *piece in planner.unit(2, number).T.tolist() for token in
         range(lengths[position])[slice(*piece)]]
        for number in range(planner.num_units(2))
    ]  # fmt: skip

    assert sorted(token for row in rows for token in row) == [
        (position, token) for position, length in enumerate(lengths) for token in range(length)
    ]
    assert {position for number in range(len(rows)) for position in planner.unit(2, number)[0]} == {
        *range(len(lengths))
    }
    assert all(len(row) <= tokens for row in rows)
    if chunk == "all":
        assert len(rows) == max(-(-sum(lengths) // tokens), bool(lengths))


def test_padding_fills_up_and_says_how_long_each_was(rows):
    """One array, and the lengths."""
    for batch in rows[0].to_numpy(7, pad={"tokens": -1}, shuffle=True, seed=1):
        assert batch["tokens"].dtype == np.int32
        for number, row, length in zip(batch["number"], batch["tokens"], batch["tokens_length"], strict=True):
            assert row[:length].tolist() == tokens_of(number)
            assert (row[length:] == -1).all()


@pytest.mark.parametrize("changed", [{}, {"num_workers": 2}, {"transform": lambda sample: {**sample, "two": 2}}])
def test_packed_rows_hold_every_token_with_its_segment_and_position(rows, changed):
    """Other fields come as a list for each row; several fields are packed side by side."""
    data = concat(rows).map(lambda sample: {**sample, "labels": sample["tokens"] + 1})
    seen = []
    for batch in data.to_numpy(3, pack={"tokens": 10, "labels": 10}, pad={"labels": -100}, shuffle=True, **changed):
        assert batch["tokens"].shape == batch["segment_ids"].shape == batch["positions"].shape
        assert batch["tokens"].shape[1] == 10
        for row, numbers in enumerate(batch["number"]):
            segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
            for segment, number in enumerate(numbers, 1):
                mine = segments == segment
                assert tokens[mine].tolist() == tokens_of(number)
                assert (batch["labels"][row][mine] == tokens[mine] + 1).all()
                assert batch["positions"][row][mine].tolist() == list(range(number % 5))
            assert (batch["labels"][row][segments == 0] == -100).all()
            seen += [int(number) for number in numbers]
    assert sorted(seen) == sorted(sample["number"] for sample in data)


@pytest.mark.parametrize("chunk", ["long", "all"])
@pytest.mark.parametrize("changed", [{}, {"num_workers": 2}, {"transform": lambda sample: {**sample, "two": 2}}])
def test_pieces_have_a_segment_each_and_the_fields_of_their_record(rows, changed, chunk):
    """Positions begin at 0 in each; put behind one another, the pieces of a record are the record."""
    data = rows[0].map(lambda sample: {**sample, "labels": sample["tokens"] + 1})
    found = {int(sample["number"]): set() for sample in data}
    options = {"pack": {"tokens": 3, "labels": 3}, "chunk": chunk, "pad": {"labels": -100}, **changed}
    for batch in data.to_numpy(4, shuffle=True, seed=1, **options):
        for row, numbers in enumerate(batch["number"]):
            tokens, segments = batch["tokens"][row], batch["segment_ids"][row]
            for segment, number in enumerate(numbers, 1):
                mine = segments == segment
                assert batch["positions"][row][mine].tolist() == list(range(mine.sum()))
                assert (batch["labels"][row][mine] == tokens[mine] + 1).all()
                assert found[int(number)].isdisjoint(tokens[mine].tolist())
                found[int(number)] |= {*tokens[mine].tolist()}
            assert (batch["labels"][row][segments == 0] == -100).all()
    assert {number: sorted(tokens) for number, tokens in found.items()} == {n: tokens_of(n) for n in found}


def test_records_follow_each_other_in_rows_of_one_length(rows):
    """In their order, and in that of each epoch where they are shuffled; windows of the plan leave no gap."""
    stream = [token for sample in rows[0] for token in sample["tokens"].tolist()]
    made = np.concatenate([batch["tokens"] for batch in rows[0].to_numpy(4, pack={"tokens": 7}, chunk="all")])

    assert made.ravel()[: len(stream)].tolist() == stream
    assert len(made) == -(-len(stream) // 7)
    many = Planner(Order((9000,), 1, None), np.full(9000, 3), 7, None, 1, packs=True, shuffles=True, chunk="all")
    sizes = [sum(min(3, stop) - start for _, start, stop in many.unit(0, n).T) for n in range(many.num_units(0))]
    assert sorted(sizes) == [9000 * 3 % 7] + [7] * (9000 * 3 // 7)


@pytest.mark.parametrize("chunk", ["long", "all"])
def test_pieces_resume_at_every_step_under_other_ranks(rows, chunk):
    """Each token comes once, before the state or after it."""
    options = {"pack": {"tokens": 3}, "chunk": chunk, "shuffle": True, "seed": 3, "pad": {"tokens": -1}}

    def tokens_in(batches):
        return [token for batch in batches for token in batch["tokens"].ravel().tolist() if token >= 0]

    whole = sorted(token for sample in rows[0] for token in sample["tokens"].tolist())
    loaders = [rows[0].to_numpy(2, rank=rank, world_size=2, **options) for rank in range(2)]
    walks, done = [iter(loader) for loader in loaders], []
    for _ in range(len(loaders[0]) - 2):  # at the end, ranks may share a row
        done += [token for walk in walks for token in tokens_in([next(walk)])]
        other = rows[0].to_numpy(5, **options)
        other.load_state_dict(json.loads(json.dumps(loaders[0].state_dict())))
        assert sorted(done + tokens_in(other)) == whole
    other = "long" if chunk == "all" else "all"
    with pytest.raises(OptionError, match="the state belongs to a loader with units"):
        rows[0].to_numpy(2, **{**options, "chunk": other}).load_state_dict(loaders[0].state_dict())


def test_tokens_that_a_transform_adds_are_not_lost(rows):
    """The last piece goes to the end of its record; where that no longer fits, the record is named."""
    longer = {"chunk": "long", "transform": lambda sample: {**sample, "tokens": np.append(sample["tokens"], -1)}}

    one = next(iter(rows[0].select(["k4"]).to_numpy(2, pack={"tokens": 3}, **longer)))
    assert sorted(one["tokens"].ravel()) == [-1, 0, 4, 5, 6, 7]
    with pytest.raises(SampleError, match=r"its fields have tokens: 5 tokens, and 2 are left in the row"):
        list(rows[0].select(["k4"]).to_numpy(2, pack={"tokens": 2}, **longer))


@pytest.mark.parametrize(
    ("form", "shuffle"),
    [({"bucket": {"tokens": 12}}, True), ({"pack": {"tokens": 9}}, False), ({"bucket": {"tokens": 4}}, False)],
)
def test_units_resume_at_every_step_under_other_ranks(rows, form, shuffle):
    """Ranks get the same number of batches; no record is lost or comes twice, unless a rank would have none."""
    a, b = rows
    data = mix({a: 0.7, b: 0.3}, seed=2) if shuffle else a
    size = 2 if "pack" in form else None
    options = {"shuffle": shuffle, "seed": 3, **form}
    whole = {n for batch in data.to_numpy(size, **options) for n in numbers_in(batch)}
    loaders = [data.to_numpy(size, rank=rank, world_size=2, **options) for rank in range(2)]
    walks, done = [iter(loader) for loader in loaders], []
    num_repeated = []

    for _ in range(len(loaders[0])):
        done += [n for walk in walks for n in numbers_in(next(walk))]
        state = json.loads(json.dumps(loaders[0].state_dict()))
        rest = []
        if set(done) < whole:
            others = [data.to_numpy(size, rank=rank, world_size=3, **options) for rank in range(3)]
            for other in others:
                other.load_state_dict(state)
            assert len({len(list(other)) for other in others}) == 1
            for other in others:
                other.load_state_dict(state)
                rest += [n for batch in other for n in numbers_in(batch)]
        assert set(done) | set(rest) == whole
        assert not set(done) & set(rest)
        num_repeated.append(len(done) + len(rest) - len(whole))

    assert len(whole) == len(data)
    assert len({len(loader) for loader in loaders}) == 1
    assert max(num_repeated) <= 2  # a unit of one record, for three ranks


def test_buckets_stay_within_the_budget_and_differ_in_each_epoch(rows):
    """`batch_size` is a limit, too."""
    batches = rows[0].to_numpy(5, bucket={"tokens": 12}, pad={"tokens": 0}, shuffle=True, seed=1)
    epochs = [list(batches) for _ in range(2)]

    for epoch in epochs:
        assert sorted(batched(epoch)) == sorted(int(sample["number"]) for sample in rows[0])
        assert all(batch["tokens"].size <= 12 and len(batch["key"]) <= 5 for batch in epoch)
    alone = rows[0].to_numpy(bucket={"tokens": 12}, pad={"tokens": 0})
    assert all(batch["tokens"].size <= 12 for batch in alone)
    assert batched(epochs[0]) != batched(epochs[1])


def test_state_of_another_budget_is_refused(rows):
    """Its units are others."""
    one = rows[0].to_numpy(None, bucket={"tokens": 12})
    next(iter(one))

    for other in (rows[0].to_numpy(None, bucket={"tokens": 13}), rows[0].to_numpy(2, pack={"tokens": 12})):
        with pytest.raises(OptionError, match="the state belongs to a loader with units"):
            other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_function_of_the_user_makes_batches(rows, num_workers):
    """It gets the samples of a batch, in order, and may return anything."""
    batches = rows[0].to_numpy(
        9, collate_fn=lambda samples: ([int(s["number"]) for s in samples], len(samples)), num_workers=num_workers
    )

    found = list(batches)

    assert [n for numbers, _ in found for n in numbers] == [int(sample["number"]) for sample in rows[0]]
    assert [count for _, count in found] == [9] * 6 + [7]


def test_function_of_the_user_gets_tensors(rows):
    """With `to_torch`, as from the `DataLoader` of torch."""
    torch = pytest.importorskip("torch")

    for batch in rows[0].to_torch(8, collate_fn=lambda samples: torch.cat([s["tokens"] for s in samples])):
        assert batch.dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket": {"tokens": 3}}, "has 4 tokens, and the budget is 3"),
        ({"bucket": {"tokens": 9, "pair": 9}}, "want one field and its most tokens"),
        ({"bucket": {"number": 9}}, "'number' is not one"),
        ({"pack": {"tokens": 0}}, "'tokens' has 0 tokens"),
        ({"pack": {"tokens": 9}, "bucket": {"tokens": 9}}, "choose one"),
        ({"pack": {"tokens": 9}, "pad": {"pair": 0}}, "names packed fields only"),
        ({"pack": {"tokens": 3}}, "has 4 tokens, and the budget is 3; cut them with chunk='long'"),
        ({"pack": {"tokens": 3}, "chunk": True}, "chunk is True; want 'long', 'all' or None"),
        ({"chunk": "all"}, "chunk is 'all', which is for pack"),
        ({"pad": {"tokens": 0}, "collate_fn": list}, "collate_fn together with pad"),
    ],
)
def test_nonsense_is_refused(rows, options, message):
    """The error says what is accepted."""
    with pytest.raises(OptionError, match=message):
        rows[0].to_numpy(4, **options)


def test_transform_that_changes_a_planned_length_is_refused(rows):
    """The row was planned without it; `map` comes before the plan."""
    longer = {"pack": {"tokens": 8}, "transform": lambda sample: {**sample, "tokens": np.zeros(9, np.int32)}}

    with pytest.raises(SampleError, match="9 tokens, and 8 are left in the row that was planned for it"):
        list(rows[0].to_numpy(2, **longer))


@pytest.mark.parametrize(
    ("form", "value", "dtype"),
    [("pad", -100, "uint16"), ("pack", 0.5, "int32"), ("pad", float("nan"), "int64"), ("pack", None, "float32")],
)
def test_filler_that_the_values_cannot_hold_is_refused(rows, form, value, dtype):
    """Labels of uint16 have no -100: numpy raised without a place, or stored another number."""
    data = rows[0].map(lambda sample: {**sample, "labels": sample["tokens"].astype(dtype)})
    options = {"pack": {"labels": 8}} if form == "pack" else {}

    with pytest.raises(OptionError, match=rf"pad: .* is not {dtype}, as the values of 'labels' are; convert"):
        list(data.to_numpy(4, pad={"labels": value}, **options))


def test_padding_of_a_field_that_is_not_there_is_refused_at_once(rows):
    """As for bucket and pack, unless a function may add it."""
    with pytest.raises(OptionError, match="pad names 'colour'; want a field of the samples: key, "):
        rows[0].to_numpy(4, pad={"colour": 0})
    longer = rows[0].to_numpy(4, pad={"colour": 0}, transform=lambda sample: {"colour": sample["tokens"]})
    assert "colour_length" in next(iter(longer))


@pytest.mark.parametrize("options", [{}, {"pad": {"tokens": 0}}, {"collate_fn": list}])
def test_bucket_whose_lengths_were_changed_keeps_its_budget(rows, options):
    """A random crop has other lengths in each epoch than those of the plan: batches grew beyond any budget."""
    cropped = rows[0].map(lambda sample, rng: {**sample, "tokens": np.zeros(rng.integers(1, 10), np.int32)})
    batches = cropped.to_numpy(bucket={"tokens": 12}, **options)
    assert len(list(batches)) > 10  # the epoch in which they were measured

    with pytest.raises(SampleError, match=r"sample 'k\d+': its field 'tokens' has \d tokens now, .* more than 12"):
        list(batches)


@pytest.mark.parametrize("form", [{"pad": {"ids": 0}}, {"pack": {"ids": 8}}], ids=["pad", "pack"])
def test_lists_of_numbers_keep_their_dtype_beside_an_empty_one(rows, form):
    """NumPy makes float64 of an empty list: a row that began with one was packed as float64."""
    data = rows[0].map(lambda sample: {**sample, "ids": sample["tokens"].tolist()})

    assert {batch["ids"].dtype for batch in data.to_numpy(9, **form)} == {np.dtype("int64")}


def test_lists_of_words_are_padded_with_text(rows):
    """As numbers are, also beside an empty list; a number is no word."""
    data = rows[0].map(lambda sample: {**sample, "words": ["w" * (1 + n) for n in range(sample["number"] % 3)]})

    for batch in data.to_numpy(7, pad={"words": ""}):
        for number, row, length in zip(batch["number"], batch["words"], batch["words_length"], strict=True):
            assert length == number % 3
            assert row.tolist() == [*["w", "ww"][:length], *[""] * (len(row) - length)]
    with pytest.raises(OptionError, match="pad: 0 is not <U2"):
        list(data.to_numpy(7, pad={"words": 0}))
    empty = next(iter(data.map(lambda sample: {**sample, "words": []}).to_numpy(7, pad={"words": ""})))
    assert (empty["words"].shape, empty["words"].dtype.kind) == ((7, 0), "U")


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """24 rows with the same tokens beside all other fields, in a dict, and in a list of dicts."""
    return nested_rows(tmp_path_factory.mktemp("nested"))


@pytest.mark.parametrize(
    ("kind", "size", "form", "value"),
    [("numpy", 7, "pad", -1), ("numpy", None, "bucket", 12), ("numpy", 3, "pack", 10), ("torch", 3, "pack", 10)],
)
def test_fields_in_dicts_are_shaped_like_all_others(nested, kind, size, form, value):
    """Also those in lists of dicts, and after a function; lengths stand beside what they are of."""
    pytest.importorskip(kind)
    places = {"tokens": "tokens", "of/tokens": "tokens", "words/token": "token"}

    def batches(name, changed):
        pad = {"pad": {name: 0}} if form == "bucket" else {}
        found = getattr(changed, f"to_{kind}")(size, shuffle=True, seed=1, **{form: {name: value}}, **pad)
        head, _, rest = name.partition("/")
        for batch in found:
            fields = batch[head] if rest else batch
            shaped = [fields[places[name]], fields.get(f"{places[name]}_length"), batch.get("segment_ids")]
            yield [None if one is None else np.asarray(one).tolist() for one in shaped]

    wanted = list(batches("tokens", nested))

    assert wanted
    assert list(batches("of/tokens", nested)) == wanted
    assert list(batches("words/token", nested)) == wanted
    assert list(batches("of/tokens", nested.map(lambda sample: sample))) == wanted


def test_field_that_no_dict_has_is_named(nested):
    """Before anything is read, unless a function decides the fields."""
    for form in ("pad", "bucket", "pack"):
        with pytest.raises(OptionError, match=rf"{form} names 'of/text'; want a field of the samples: key, of/number"):
            nested.to_numpy(2, **{form: {"of/text": 9}})
    with pytest.raises(OptionError, match="pad: the batch has no field 'of/text'; it has"):
        list(nested.map(lambda sample: sample).to_numpy(2, pad={"of/text": 9}))


def test_bucket_of_a_field_in_a_dict_keeps_its_budget(nested):
    """Where a transform has changed the lengths that were planned with."""

    def longer(sample):
        return {**sample, "of": {**sample["of"], "tokens": np.repeat(sample["of"]["tokens"], 2)}}

    with pytest.raises(SampleError, match="its field 'of/tokens' has 2 tokens now"):
        list(nested.to_numpy(bucket={"of/tokens": 12}, transform=longer))
