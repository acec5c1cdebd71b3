"""Rows of one group land in one split, drawn by the hash of the group."""

import pathlib
import threading

import numpy as np
import pytest
import small_rows

from datamat import IndexRow, Materializer, OptionError, WorkerOptions, load, materialize
from datamat.cli import main
from datamat.testing import InlineExecutor

SHARES = {"train": 0.6, "val": 0.4}


def _rows(patients, *, each=3):
    return [IndexRow(f"{n}-{m}", None, {"patient": n}, f"l:{n}-{m}") for n in patients for m in range(each)]


def _made(folder, rows, groups="patient", **options):
    return small_rows.job(folder, rows=rows, groups=groups, splits=SHARES, progress=False, **options)


def _splits(folder, rows, groups="patient"):
    """Return the split of each row of a finished dataset, by its key."""
    _made(folder, rows, groups).run()
    return _read(folder)


def _read(folder, **options):
    """Return the split of each record of a finished dataset, by its key."""
    splits = {split: load(folder, split, **options).keys() for split in SHARES}
    return {key: split for split, keys in splits.items() for key in keys}


def _item(item):
    return {"x": 1}


def _materialized(folder, items, **options):
    materialize(_item, items, folder, splits=SHARES, executor=InlineExecutor(), progress=False, **options)
    return _read(folder)


def test_rows_of_a_group_share_a_split_and_new_groups_move_none(tmp_path):
    """The shares are those of groups; rows in another order, of more groups, stay where they were."""
    few = _splits(tmp_path / "few", _rows(range(10)))
    more = _splits(tmp_path / "more", _rows(reversed(range(30)), each=4))

    assert set(few.values()) == {"train", "val"}
    assert len({(key.split("-")[0], split) for key, split in more.items()}) == 30
    assert few.items() <= more.items()


@pytest.mark.parametrize(
    "groups",
    [
        lambda row: row.fields["patient"],
        lambda row: str(row.fields["patient"]),
        lambda row: str(row.fields["patient"]).encode(),
        lambda row: np.int64(row.fields["patient"]),
        lambda row: pathlib.PurePath(str(row.fields["patient"])),
    ],
)
def test_text_of_a_group_is_what_counts(tmp_path, groups):
    """7 and "7" are one group: a column that becomes text moves no row."""
    assert _splits(tmp_path / "f", _rows(range(9)), groups) == _splits(tmp_path / "n", _rows(range(9)))


def test_forms_of_a_letter_and_places_of_a_source_are_one_group(tmp_path):
    """File names of macOS are decomposed; a source may lie elsewhere the next time."""
    (tmp_path / "here").mkdir()
    names = ["é", "e\u0301", "here", tmp_path / "here"]
    rows = [[IndexRow(f"{n}-{m}", None, {"at": name}) for m in range(8)] for n, name in enumerate(names)]
    texts = {}
    for n, one in enumerate(rows):
        made = Materializer(small_rows.Rows(one), str(tmp_path), tmp_path / f"o{n}", splits=SHARES, groups="at")
        texts[n] = next(iter(made.plan().splits))

    assert texts[0] == texts[1]
    assert texts[2] == texts[3]


def test_tuples_are_told_apart_by_their_parts():
    """("a", "bc") is another group than ("ab", "c")."""
    rows = [IndexRow(f"{n}", None, {}) for n in range(2)]
    parts = iter([("a", "bc"), ("ab", "c")])
    plan = Materializer(small_rows.Rows(rows), None, "out", splits=SHARES, groups=lambda row: next(parts)).plan()

    assert "2 groups" in repr(plan)


@pytest.mark.parametrize("group", [None, "", (), b"", ("a", None), 1.5, [1], {"a": 1}, object(), np.arange(2)])
def test_what_is_no_group_is_refused_with_its_key(tmp_path, group):
    """Nothing empty, nothing whose text may vary; the first such row is named."""
    with pytest.raises(OptionError, match=r"'0-0' \(l:0-0\)"):
        _made(tmp_path / "out", _rows([0]), lambda row: group).plan()


def test_field_that_no_row_has_names_those_there_are(tmp_path):
    """So does a function that fails, with its key."""
    with pytest.raises(OptionError, match=r"'who' names no field.*patient"):
        _made(tmp_path / "out", _rows([0]), "who").plan()
    with pytest.raises(OptionError, match=r"KeyError for '0-0'.*'who'.*patient") as caught:
        _made(tmp_path / "out", _rows([0]), lambda row: row.fields["who"]).plan()
    assert isinstance(caught.value.__cause__, KeyError)


def test_groups_need_splits_that_are_drawn(tmp_path):
    """Without `splits=` there is nothing to draw; an index that names a split has drawn it."""
    with pytest.raises(OptionError, match="splits="):
        small_rows.job(tmp_path / "out", rows=_rows([0]), groups="patient")
    with pytest.raises(OptionError, match="groups is 3"):
        _made(tmp_path / "out", _rows([0]), 3)
    rows = [*_rows([0]), IndexRow("named", "val", {"patient": 0}, "l:7")]
    with pytest.raises(OptionError, match="l:7 is in 'val'"):
        _made(tmp_path / "out", rows).plan()


def test_status_says_that_rows_changed_their_split(tmp_path):
    """Other groups move rows: that is why shards are made again; an equal function makes nothing."""
    _made(tmp_path / "out", _rows(range(9))).run()
    again = _made(tmp_path / "out", _rows(range(9)), lambda row: row.fields["patient"])
    changed = " ".join(map(str, _made(tmp_path / "out", _rows(range(9)), lambda row: row.key).status().changes))

    assert not again.status().changes
    assert "came from another split" in changed
    assert "moved to another split" in changed
    assert "added" not in changed
    assert "removed" not in changed


def test_split_that_no_group_falls_into_is_said(tmp_path, caplog):
    """One group only is one split; the plan says how many groups there are, and a notebook of which field."""
    made = _made(tmp_path / "out", _rows([0]))
    made.run()

    assert "no row falls into split 'val'" in caplog.text
    assert "1 groups" not in repr(made.plan())
    assert "1 group: patient" in repr(made.plan())
    assert "patient" in made._repr_html_()


def test_blocks_of_a_table_and_rows_draw_alike(tmp_path):
    """A column of a table, text or numbers, is a field."""
    numbers = np.repeat(np.arange(12), 2)
    keys = [f"k{n}" for n in range(24)]
    plans = []
    for column in (numbers, [str(n) for n in numbers]):
        table = {"key": keys, "patient": column, "x": numbers / 2}
        Materializer("table", table, tmp_path / "out", splits=SHARES, groups="patient").run(
            executor=InlineExecutor(), progress=False, existing="replace"
        )
        plans.append({split: [*load(tmp_path / "out", split).keys()] for split in SHARES})
    rows = [IndexRow(key, None, {"patient": n}) for key, n in zip(keys, numbers.tolist(), strict=True)]

    alone = _splits(tmp_path / "rows", rows)
    assert all(alone[key] == split for plan in plans for split, found in plan.items() for key in found)


def test_fields_of_samples_that_are_imported_are_fields(tmp_path):
    """A row of an import holds a position; groups see the fields that are stored."""
    samples = [{"patient": f"p{n // 3}", "x": n} for n in range(18)]

    def plan(groups):
        return repr(Materializer(samples, None, tmp_path / "out", splits=SHARES, groups=groups).plan())

    assert "6 groups: patient" in plan("patient")
    assert plan(lambda row: row.fields["patient"]).rpartition(":")[0] == plan("patient").rpartition(":")[0]
    with pytest.raises(OptionError, match="sample 0: its fields are patient; x"):
        plan("who")


def test_items_of_materialize_are_what_groups_see(tmp_path):
    """A dict gives its fields, as for `key=`; anything else is the field "item"."""
    items = [{"id": f"{n}-{m}", "patient": n} for n in range(9) for m in range(3)]
    expected = _splits(tmp_path / "rows", _rows(range(9)))

    assert _materialized(tmp_path / "field", items, key="id", groups="patient") == expected
    pairs = [(item["id"], item["patient"]) for item in items]
    assert (
        _materialized(tmp_path / "function", pairs, key=lambda pair: pair[0], groups=lambda row: row.fields["item"][1])
        == expected
    )


def test_outputs_in_a_store_and_tasks_draw_alike(tmp_path):
    """Each task draws for itself; a store holds the same files."""
    expected = _splits(tmp_path / "alone", _rows(range(9)))
    for task in range(2):
        _made(tmp_path / "tasks", _rows(range(9))).run(task_index=task, num_tasks=2)
    url = "memory://groups/out"
    _made(url, _rows(range(9)), scratch=tmp_path / "scratch").run()

    for place in (str(tmp_path / "tasks"), url):
        assert _read(place, cache_dir=tmp_path / "cache") == expected


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_function_of_groups_travels_nowhere(tmp_path, start_method):
    """It is called while the source is indexed, and may hold what cannot travel."""
    lock = threading.Lock()

    def group(row):
        with lock:
            return row.fields["patient"]

    _made(tmp_path / "out", _rows(range(9)), group, executor=None).run(
        workers=WorkerOptions(num_workers=2, start_method=start_method)
    )

    assert _read(tmp_path / "out") == _splits(tmp_path / "inline", _rows(range(9)))


@pytest.mark.parametrize("groups", ["patient", "grouping:by_patient"])
def test_toml_file_names_a_field_or_a_function(tmp_path, monkeypatch, capsys, groups):
    """With a colon, it is MODULE:NAME."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grouping.py").write_text("def by_patient(row):\n    return row.fields['patient']\n")
    (tmp_path / "rows.csv").write_text("key,patient\n" + "".join(f"k{n},p{n // 3}\n" for n in range(12)))
    (tmp_path / "job.toml").write_text(
        f'writer = "table"\nsource = "rows.csv"\noutput = "out"\ngroups = "{groups}"\n'
        "splits = {train = 0.5, val = 0.5}"
    )

    assert main(["plan", "job.toml"]) == 0
    assert "4 groups" in capsys.readouterr().out
