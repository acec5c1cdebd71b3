"""Plans: pure, stable, and the same whoever works."""

import pytest

from datamat.errors import OptionError
from datamat.index import IndexRow
from datamat.options import ShardOptions
from datamat.plan import make_plan
from datamat.rows import write_rows

GOLDEN = ["6", "5", "4", "1", "0", "2", "7", "3"]


def _plan(tmp_path, keys, options=None, *, seed=0, copies=1, split=None, fields=None):
    folder = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    store = write_rows([IndexRow(key, split, fields or {}) for key in keys], folder, source=str(tmp_path))
    names = store.splits
    plan = make_plan(
        store,
        name="set",
        options=options or ShardOptions(),
        copies=dict.fromkeys(names, copies),
        augmented=dict.fromkeys(names, copies > 1),
        fingerprint=dict.fromkeys(names, "f"),
        seed=seed,
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


def test_order_is_pinned(tmp_path):
    """A golden order: it must never change between versions, hosts or Python builds."""
    _, store = _plan(tmp_path, [f"{n}" for n in range(8)], seed=7)
    _, other = _plan(tmp_path, [f"{n}" for n in range(8)], seed=8)

    assert store.keys(store.order) == GOLDEN
    assert other.keys(other.order) != GOLDEN


def test_added_samples_do_not_move_the_others(tmp_path):
    """With the number of shards fixed, each old row stays in its shard, and in the same order."""
    options = ShardOptions(num_shards=8)
    before, old = _plan(tmp_path, [f"{n}" for n in range(1000)], options)
    after, new = _plan(tmp_path, [f"{n}" for n in range(1100)], options)

    was, now = _keys_by_shard(before, old), _keys_by_shard(after, new)

    assert all(was[name] == {key for key in keys if int(key) < 1000} for name, keys in now.items())


@pytest.mark.parametrize("num_rows", [46, 64])
def test_samples_that_are_added_to_a_small_set_do_not_move_the_others(tmp_path, num_rows):
    """The train split of a sample of CamVid, in four shards."""
    options = ShardOptions(num_shards=4)
    before, old = _plan(tmp_path, [f"0001TP_{n:06}" for n in range(num_rows)], options)
    after, new = _plan(tmp_path, [f"0001TP_{n:06}" for n in range(num_rows + 1)], options)

    was, now = _keys_by_shard(before, old), _keys_by_shard(after, new)

    assert sum(was[name] != keys for name, keys in now.items()) == 1


def test_small_splits_leave_no_shard_empty(tmp_path):
    """Few rows are cut evenly, and never into more shards than rows."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(10)], ShardOptions(num_shards=4))
    tiny, _ = _plan(tmp_path, ["a", "b"], ShardOptions(num_shards=4))

    assert [shard.num_rows for shard in plan.shards] == [2, 3, 2, 3]
    assert [shard.num_rows for shard in tiny.shards] == [1, 1]


def test_records_per_shard_is_exact(tmp_path):
    """Every shard but the last; copies count as records."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(25)], ShardOptions(records_per_shard=20), copies=2)

    assert [shard.num_rows * shard.copies for shard in plan.shards] == [20, 20, 10]


def test_ranks_get_equal_shards(tmp_path):
    """The number of shards is a multiple, their sizes differ by one at most."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(1001)], ShardOptions(num_shards=16, ranks=8))

    sizes = [shard.num_rows for shard in plan.shards]

    assert len(sizes) == 16 and max(sizes) - min(sizes) <= 1
    with pytest.raises(OptionError, match="too few for one in each of 8 shards"):
        _plan(tmp_path, ["a"], ShardOptions(ranks=8))


def test_no_shuffle_keeps_the_order_of_the_index(tmp_path):
    """Row by row."""
    plan, store = _plan(tmp_path, [f"{n}" for n in range(100)], ShardOptions(num_shards=3, shuffle=False))

    assert store.order.tolist() == list(range(100))
    assert len(plan.shards) == 3


def test_fingerprint_of_a_shard_follows_its_own_rows(tmp_path):
    """A new row changes its shard alone."""
    options = ShardOptions(num_shards=8)
    before, _ = _plan(tmp_path, [f"{n}" for n in range(1000)], options)
    after, new = _plan(tmp_path, [f"{n}" for n in range(1001)], options)

    changed = {b.name for b, a in zip(before.shards, after.shards, strict=True) if b.fingerprint != a.fingerprint}

    assert changed == {name for name, keys in _keys_by_shard(after, new).items() if "1000" in keys}


def test_parts_follow_cost_and_end_in_small_ones(tmp_path):
    """Large parts first, small ones at the end, whatever the machine."""
    (tmp_path / "big.bin").write_bytes(b"\0" * 1_000_000)
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(300)], copies=4, fields={"file": "big.bin"})

    costs = [part.cost for part in plan.shards[0].parts]

    assert len(plan.shards) == 8 or len(plan.shards) == 4
    assert max(costs[:2]) > 2 * costs[-1]


def test_select_takes_wildcards(tmp_path):
    """By SPLIT-NUMBER or by the whole name; a pattern that names nothing is an error."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(400)], ShardOptions(num_shards=12))

    assert [shard.number for shard in plan.select("train-0000?", "train-0000[1-9]")] == [0]
    assert [shard.number for shard in plan.select(["*-of-00012"], ["train-*[0-8]"])] == [9]
    assert len(plan.select(None, None)) == 12
    with pytest.raises(OptionError, match=r"include='val-.' names no shard of the plan; its shards are train-00000"):
        plan.select("val-*", None)


def test_plan_prints_as_a_table(tmp_path):
    """In the terminal and in a notebook."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(40)], ShardOptions(num_shards=2))

    assert "train" in repr(plan) and "40 records" in repr(plan)
    assert plan._repr_html_().startswith("<table>")


def test_more_rows_take_no_more_shards_of_memory(tmp_path):
    """The plan grows with parts: a hundred thousand tiny rows are a handful."""
    plan, _ = _plan(tmp_path, [f"{n}" for n in range(100_000)])

    assert sum(len(shard.parts) for shard in plan.shards) < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 0}, "num_shards is 0"),
        ({"shard_bytes": -1}, "shard_bytes is -1"),
        ({"records_per_shard": 5, "num_shards": 2}, "leave out num_shards"),
        ({"num_shards": 6, "ranks": 4}, "take num_shards=8"),
    ],
)
def test_options_refuse_nonsense(options, message):
    """When they are made."""
    with pytest.raises(OptionError, match=message):
        ShardOptions(**options)


def test_name_must_fit_into_file_names(tmp_path):
    """No dots, no separators."""
    folder = tmp_path / "r"
    folder.mkdir()
    store = write_rows([IndexRow("a")], folder, source="")
    with pytest.raises(OptionError, match=r"data set name 'a.b'"):
        make_plan(
            store,
            name="a.b",
            options=ShardOptions(),
            copies={"train": 1},
            augmented={"train": False},
            fingerprint={"train": ""},
            seed=0,
        )
