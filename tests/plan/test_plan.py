"""Plans: pure, stable, and the same for any workers."""

import numpy as np
import pyarrow as pa
import pytest
import small_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from datamat import DatasetWriter, Features, IndexRow, Materializer, OptionError, Scalar, ShardOptions
from datamat.plan import job
from datamat.plan.plan import SplitTerms, make_plan
from datamat.sources.writing import write_rows

GOLDEN = ["6", "5", "4", "1", "0", "2", "7", "3"]


def _plan(tmp_path, keys, options=None, *, seed=0, copies=1, split=None, fields=None, group_records=1):
    folder = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    splits = split if isinstance(split, list) else [split] * len(keys)
    rows = [IndexRow(key, name, fields or {}) for key, name in zip(keys, splits, strict=True)]
    store = write_rows(rows, folder, source=str(tmp_path))
    names = store.splits
    plan = make_plan(
        store,
        name="set",
        options=options or ShardOptions(),
        splits=dict.fromkeys(names, SplitTerms(copies, copies > 1, "f")),
        seed=seed,
        costs=store.input_bytes(),
        group_records=group_records,
    )
    return plan, store


def _keys_by_shard(plan, store):
    return {shard.name: set(store.keys(store.order[shard.start : shard.stop])) for shard in plan.shards}


def test_every_row_is_in_exactly_one_part(tmp_path):
    """Parts cover the shards, shards the rows, without gap or overlap."""
    plan, store = _plan(tmp_path, [f"{n}" for n in range(5000)], ShardOptions(num_shards=7))

    spans = [(part.start, part.stop) for shard in plan.shards for part in shard.parts]

    assert [start for start, _ in spans] == [0] + [stop for _, stop in spans[:-1]]
    assert spans[-1][1] == 5000
    assert sorted(store.order.tolist()) == list(range(5000))
    assert [shard.name for shard in plan.shards[:2]] == ["set-train-00000-of-00007", "set-train-00001-of-00007"]


@pytest.mark.parametrize("options", [ShardOptions(num_shards=7), ShardOptions(), ShardOptions(shuffle=False)])
def test_pieces_that_rows_are_ordered_by_do_not_show(tmp_path, monkeypatch, options):
    """Rows are ordered in one step, or, where there are more, by the first byte of their places, and then within it."""
    keys = [f"{n}" for n in range(3000)]
    splits = ["train", "val"] * 1500
    found = []
    for rows_at_once in (1 << 20, 100):
        monkeypatch.setattr("datamat.directory.keys._PIECE_ROWS", rows_at_once)
        plan, store = _plan(tmp_path, keys, options, split=splits)
        found.append((plan, store.order.tolist()))

    assert found[0] == found[1]
    assert len(found[0][0].splits) == 2


@pytest.mark.parametrize(("copies", "step"), [(1, 64), (3, 64), (20, 16), (128, 1)])
def test_parts_end_where_groups_do(tmp_path, copies, step):
    """Parts are whole groups of records unless they are much smaller; the last one of a shard has the rest."""
    plan, _ = _plan(
        tmp_path, [f"{n}" for n in range(9000)], ShardOptions(num_shards=3), copies=copies, group_records=64
    )

    for shard in plan.shards:
        sizes = [part.stop - part.start for part in shard.parts]
        assert len(sizes) > 10
        assert all(size % step == 0 for size in sizes[:-1])


def test_parts_that_are_much_smaller_than_a_group_stay_small(tmp_path):
    """A few slow rows still occupy many cores; many tiny rows are a handful of parts."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(100)], ShardOptions(num_shards=1), group_records=64)
    large, _ = _plan(tmp_path, [f"{n}" for n in range(30_000)])

    assert len(plan.shards[0].parts) > 30
    assert sum(len(shard.parts) for shard in large.shards) < 100


def test_order_is_pinned(tmp_path):
    """A golden order: it must never change between versions, hosts or Python builds."""
    plan, store = _plan(tmp_path, [f"{n}" for n in range(8)], seed=7)
    _, other = _plan(tmp_path, [f"{n}" for n in range(8)], seed=8)

    assert store.keys(store.order) == GOLDEN
    assert other.keys(other.order) != GOLDEN
    assert "8 records" in repr(plan) and "<table" in plan._repr_html_()


@pytest.mark.parametrize("num_rows", [46, 1000])
def test_added_samples_do_not_move_the_others(tmp_path, num_rows):
    """With a fixed number of shards, an added row changes its shard and the fingerprint of that, and no other."""
    options = ShardOptions(num_shards=4)
    before, old = _plan(tmp_path, [f"0001TP_{n:06}" for n in range(num_rows)], options)
    after, new = _plan(tmp_path, [f"0001TP_{n:06}" for n in range(num_rows + 1)], options)

    was, now = _keys_by_shard(before, old), _keys_by_shard(after, new)
    changed = {b.name for b, a in zip(before.shards, after.shards, strict=True) if b.fingerprint != a.fingerprint}

    assert changed == {name for name, keys in now.items() if keys != was[name]}
    assert {key for name in changed for key in now[name] - was[name]} == {f"0001TP_{num_rows:06}"}
    assert len(changed) == 1


def test_small_splits_leave_no_shard_empty(tmp_path):
    """A few rows are divided evenly, and never into more shards than rows."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(10)], ShardOptions(num_shards=4))
    tiny, _ = _plan(tmp_path, ["a", "b"], ShardOptions(num_shards=4))

    assert [shard.num_rows for shard in plan.shards] == [2, 3, 2, 3]
    assert [shard.num_rows for shard in tiny.shards] == [1, 1]


def test_records_per_shard_is_exact(tmp_path):
    """Every shard has them but the last; copies count as records."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(25)], ShardOptions(records_per_shard=20), copies=2)

    assert [shard.num_rows * shard.copies for shard in plan.shards] == [20, 20, 10]


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 400),
    ranks=st.integers(1, 9),
    layers=st.none() | st.integers(1, 6),
    copies=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_ranks_share_shards_and_records_evenly(tmp_path_factory, num_rows, ranks, layers, copies, shuffle):
    """Each gets as many shards and records, or those of one row more where the rows do not divide evenly."""
    options = ShardOptions(num_shards=layers and layers * ranks, ranks=ranks, shuffle=shuffle)
    folder, keys = tmp_path_factory.mktemp("plan"), [f"{n}" for n in range(num_rows)]
    if num_rows < ranks:
        with pytest.raises(OptionError, match=f"too few for {ranks} shards, one for each rank"):
            _plan(folder, keys, options)
        return

    plan, _ = _plan(folder, keys, options, copies=copies)

    sizes = [shard.num_rows for shard in plan.shards]
    shares = [sum(sizes[rank::ranks]) for rank in range(ranks)]
    assert len(sizes) % ranks == 0 and len(sizes) == min(layers or 1, num_rows // ranks) * ranks
    assert sum(sizes) == num_rows and max(sizes) - min(sizes) <= 1
    assert max(shares) - min(shares) == (num_rows % ranks > 0)
    assert plan.rank_records("train") == [share * copies for share in shares]
    assert bool(plan.uneven()) is (num_rows % ranks > 0)
    if num_rows % len(sizes) == 0:  # then it is the same however the shards are dealt out
        assert len(set(sizes)) == 1


def test_plan_shows_what_ranks_get_and_what_does_not_divide(tmp_path):
    """Its table shows it; its text names the split and the remedy."""
    uneven, _ = _plan(tmp_path, [f"{n}" for n in range(1003)], ShardOptions(num_shards=16, ranks=8), copies=2)
    even, _ = _plan(tmp_path, [f"{n}" for n in range(1000)], ShardOptions(ranks=8))
    plain, _ = _plan(tmp_path, [f"{n}" for n in range(1000)])

    assert uneven.uneven() == {
        "train": "split 'train' gives its 8 ranks 250 to 252 records: 1,003 rows cannot be divided by 8, and all "
        "copies of a row are in one shard; have every rank end its epoch after 250"
    }
    assert "records per rank" in repr(uneven) and "250 or 252" in repr(uneven)
    assert (even.uneven(), even.rank_records("train")) == ({}, [125] * 8)
    assert plain.uneven() == {} and "rank" not in repr(plain)


def test_warning_where_ranks_got_different_numbers_of_records(tmp_path):
    """Rows that failed leave some ranks with fewer."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(40)], ShardOptions(ranks=4))
    made = {shard.name: shard.num_rows - (shard.number == 2) for shard in plan.shards}

    assert plan.rank_records("train", made) == [10, 10, 9, 10]
    assert "4 ranks 9 to 10 records: rows failed or were left out" in plan.uneven(made)["train"]


def test_no_shuffle_keeps_the_order_of_the_index(tmp_path):
    """Records follow the rows one by one."""
    plan, store = _plan(tmp_path, [f"{n}" for n in range(100)], ShardOptions(num_shards=3, shuffle=False))

    assert store.order.tolist() == list(range(100))
    assert len(plan.shards) == 3


def test_parts_follow_cost_and_end_in_small_ones(tmp_path):
    """Large parts come first and small ones last, on any machine."""
    (tmp_path / "big.bin").write_bytes(b"\0" * 1_000_000)
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(300)], copies=4, fields={"file": "big.bin"})

    costs = [part.cost for part in plan.shards[0].parts]

    assert len(plan.shards) == 8 or len(plan.shards) == 4
    assert max(costs[:2]) > 2 * costs[-1]


def test_select_takes_wildcards(tmp_path):
    """They match SPLIT-NUMBER or the whole name; a pattern that matches nothing is an error."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(400)], ShardOptions(num_shards=12))

    assert [shard.number for shard in plan.select("train-0000?", "train-0000[1-9]")] == [0]
    assert [shard.number for shard in plan.select(["*-of-00012"], ["train-*[0-8]"])] == [9]
    assert len(plan.select(None, None)) == 12
    with pytest.raises(OptionError, match=r"include='val-.' names no shard of the plan; its shards are train-00000"):
        plan.select("val-*", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards is 0"),
        ({"shard_bytes": -1}, "shard_bytes is -1"),
        ({"records_per_shard": 5, "num_shards": 2}, "leave out num_shards"),
        ({"num_shards": 6, "ranks": 4}, "take num_shards=8"),
        ({"identity": "md5"}, "identity is 'md5'; want 'stat' or 'content'"),
    ],
)
def test_options_refuse_nonsense(options, message):
    """They are checked when they are made."""
    with pytest.raises(OptionError, match=message):
        ShardOptions(**options)


class Many(DatasetWriter):
    """Rows of no cost, thirty to a shard."""

    name = "many"
    features = Features({"x": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{number:03d}") for number in range(300)]

    def read(self, row):
        return {"x": 2}


def test_plan_whose_manifest_no_reader_takes_is_refused(tmp_path, monkeypatch):
    """Before any work; what is allowed is never less than what the manifest takes."""
    many = small_pairs.job(None, tmp_path / "out", Many(), shards=ShardOptions(num_shards=10))
    many.run(progress=False)
    monkeypatch.setattr(job, "MOST_MANIFEST_BYTES", 6000)

    with pytest.raises(OptionError, match=r"parts in 10 shards, and its manifest \d+,\d+ bytes or more.*among several"):
        many.plan()

    found = (tmp_path / "out/manifest.json").stat().st_size
    monkeypatch.setattr(job, "MOST_MANIFEST_BYTES", found)
    many.plan()


class Wide(DatasetWriter):
    """Rows of two thousand numbers."""

    name = "wide"
    features = Features({f"c{number}": Scalar("int64") for number in range(2000)})

    def index(self, source):
        return [IndexRow(f"k{number}") for number in range(200)]

    def read(self, row):
        return dict.fromkeys(self.features, int(row.key[1:]))


def test_parts_of_a_wide_table_have_many_rows(tmp_path):
    """Each costs some time per column, whatever its rows are."""
    plan = Materializer(Wide, None, tmp_path / "out").plan()

    assert sum(len(shard.parts) for shard in plan.shards) <= 4


def test_parts_of_a_table_have_as_many_rows_as_are_read_at_once(tmp_path):
    """Its rows are read in blocks, in less time than a part takes to begin; those of a transform one by one."""
    table = pa.table({f"c{number}": np.arange(2000.0) for number in range(40)})

    options = ({}, {"transform": lambda sample: sample})
    plans = [Materializer(table, output=tmp_path / "out", **one).plan() for one in options]

    assert [shard.num_rows for shard in plans[0].shards] == [shard.num_rows for shard in plans[1].shards]
    whole, cut = (sum(len(shard.parts) for shard in plan.shards) for plan in plans)
    assert whole == len(plans[0].shards) and cut > 10
