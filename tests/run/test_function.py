"""`materialize`: the keys of its items, and features inferred from what its function returns."""

import contextlib
import ctypes
import datetime
import importlib
import os
import pathlib
import signal
import socket
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import datamat
from datamat import (
    ErrorPolicy,
    Features,
    FingerprintError,
    IncompleteRunError,
    Json,
    ListOf,
    OptionError,
    SampleError,
    Scalar,
    ShardOptions,
    Skip,
    SourceError,
    Tensor,
    Text,
    Timestamp,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.directory.keys import original_key
from datamat.directory.ledger import read_ledger
from datamat.events import WorkersStarted
from datamat.testing import InlineExecutor
from datamat.writers.function import keys_of


def _made(fn, inputs, output, *, workers=None, **options):
    """Call `materialize`, in this process unless it is given workers."""
    where = {"workers": workers} if workers else {"executor": InlineExecutor()}
    return materialize(fn, inputs, output, progress=False, **where, **options)


TWO_WORKERS = WorkerOptions(num_workers=2, start_method="fork")


# ------------------------------------------------------------ small jobs


def _workers_of(fn, output, **options):
    """Return how many workers started for ten numbers, one time after the other, and the processes of their rows."""
    started = []

    def hook(event):
        if isinstance(event, WorkersStarted):
            started.append(event.num_workers)

    def with_process(number):
        return {"x": number, "process": os.getpid(), **fn(number)}

    _made(with_process, range(10), output, workers=TWO_WORKERS, hooks=[hook], **options)
    return started, {int(sample["process"]) for sample in load(output)}


def test_small_job_has_one_worker(tmp_path):
    """Rows of no time are not worth a second one; on a machine that is too busy to see that, others follow."""
    started, _ = _workers_of(lambda number: {}, tmp_path)

    assert started[0] == 1


def test_rows_that_take_long_have_all_workers(tmp_path):
    """Also where the first row, from which the features are inferred, is quick."""

    def slow_but_first(number):
        until = time.monotonic() + 0.15 * bool(number)
        while time.monotonic() < until:
            pass
        return {}

    started, processes = _workers_of(slow_but_first, tmp_path)

    assert started[-1] == 2
    assert len(processes) > 1


def test_row_that_ends_the_worker_of_many_is_found(tmp_path):
    """The parts that one call was to make are made again, without that row."""

    def deadly(number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": number}

    report = _made(deadly, range(10), tmp_path, workers=TWO_WORKERS, errors="skip")

    assert [failure.key for failure in report.failures] == ["00000007"]
    assert sorted(int(sample["x"]) for sample in load(tmp_path)) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert verify(tmp_path).ok


def test_deadline_counts_from_the_call(tmp_path):
    """The first item, from which the features are inferred, has taken all there is."""
    made = []

    def slow_at_first(number):
        begun = time.monotonic()
        while not made and time.monotonic() < begun + 1:
            pass
        made.append(number)
        return {"x": number}

    report = materialize(
        slow_at_first, range(3), tmp_path / "out", deadline=0.9, executor=InlineExecutor(), progress=False
    )

    assert report.stopped == "deadline" and made == [0]


def test_items_that_failed_are_retried(tmp_path):
    """Every message names the argument: the caller has no job to call `run` of."""
    bad = tmp_path / "bad"
    bad.touch()

    def make_sample(item):
        if item == 7 and os.path.exists(bad):
            raise OSError("not now")
        return {"x": item}

    report = _made(make_sample, range(10), tmp_path / "out", errors="skip")
    assert "materialize(..., retry_failed=True) tries them again" in str(report)
    with pytest.raises(IncompleteRunError, match=r"fix them and use materialize\(\.\.\., retry_failed=True\), which"):
        _made(make_sample, range(10), tmp_path / "out")
    with pytest.raises(IncompleteRunError, match=r"raise max_errors, or fix them and use materialize\(\.\.\., retry"):
        _made(make_sample, range(10), tmp_path / "other", errors=ErrorPolicy("skip", max_errors=0))
    bad.unlink()

    assert _made(make_sample, range(10), tmp_path / "out", errors="skip").num_failed == 1
    assert _made(make_sample, range(10), tmp_path / "out", retry_failed=True).num_failed == 0
    assert sorted(sample["x"] for sample in load(tmp_path / "out")) == list(range(10))


# ---- keys


def test_key_of_text_depends_on_the_text_alone():
    """The text itself where it can be a key; else its end with a hash. Equal items are numbered."""
    items = ["a", "cats/1.png", "dogs/1.png", "a", pathlib.Path("b.png"), "", "x" * 300, "a..b#\n", "é"]

    keys = keys_of(items, None)

    assert keys == [
        *("a", "cats-1-0ce6ad340ab8c7bd", "dogs-1-ec4632888e188a54", "a-29b3045018b14778", "b.png", "d76d90ffb495ae42"),
        *(f"{'x' * 60}-0b19883e6e77de9d", "a-b-31c718164f8ab21e", "é"),
    ]
    assert set(keys_of(items[::-1], None)) == set(keys)


def test_other_items_have_their_positions_as_keys_or_what_key_gives():
    """Objects that give items by position are not iterated; `key` is a function or a field."""
    assert keys_of([1, 2], None) is None
    assert keys_of([("a.png", 1)], None) is None
    assert keys_of(np.array(["a", "b"]), None) is None
    assert keys_of([1, "a"], None) == ["00000000", "a"]
    with pytest.raises(SourceError, match="one of the texts is the position of another item; pass key="):
        keys_of([7, "00000000"], None)

    items = [{"id": 7, "x": 1}, {"id": np.int64(8), "x": 2}]
    assert keys_of(items, "id") == ["7", "8"]
    assert keys_of(items, lambda item: f"row{item['x']}") == ["row1", "row2"]


@pytest.mark.parametrize(
    ("items", "key", "message"),
    [
        ([{"id": 1}, {"id": 1}], "id", r"inputs\[0\] and inputs\[1\] have the same key, '1'"),
        ([{"id": 1}, {"no": 1}], "id", r"inputs\[1\] is a dict with the fields no.*key='id'"),
        ([1], "id", r"inputs\[0\] is a int with no fields"),
        ([1], lambda item: None, r"key= gave None for inputs\[0\]; want a str"),
        (["a"], lambda item: "", r"inputs\[0\]: key ''; want a non-empty str"),
    ],
)
def test_bad_keys_are_refused_with_their_position(items, key, message, tmp_path):
    """The error comes before any work."""
    with pytest.raises(SourceError, match=message):
        _made(lambda item: {"x": 1}, items, tmp_path / "out", key=key, features={"x": Scalar("int64")})


@pytest.mark.parametrize("shard_format", ["tfrecord", "parquet", "webdataset"])
def test_keys_that_no_file_can_have_are_stored_in_a_safe_form(shard_format, tmp_path):
    """Records are found by either form, with copies too; `original_key` and samples that hold the key agree."""
    keys = [
        "cats/1.png",
        "cats-1.png",
        "cats%2F1.png",
        "a#1",
        "a..b",
        "dots.in.it",
        "back\\slash",
        "line\nbreak",
        "50%",
    ]
    items = [{"id": key, "x": number} for number, key in enumerate(keys)]

    _made(lambda item: {"key": item["id"], "x": item["x"]}, items, tmp_path / "a", key="id", format=shard_format)
    _made(lambda item: {"x": item["x"]}, items, tmp_path / "b", key="id", copies=2, format=shard_format)

    found = load(tmp_path / "a")
    assert {original_key(sample["key"]): int(sample["x"]) for sample in found} == {key: n for n, key in enumerate(keys)}
    assert all(found[key]["x"] == n for n, key in enumerate(keys) if key != "cats%2F1.png")
    assert found["cats%2F1.png"]["x"] == 0 and found["cats%252F1.png"]["x"] == 2
    assert load(tmp_path / "b")["cats/1.png#1"]["key"] == "cats%2F1.png#1"
    assert verify(tmp_path / "a", deep=True).ok and verify(tmp_path / "b").ok


@pytest.mark.parametrize(
    ("make", "options", "place"),
    [
        (lambda number: f"texts/{number:02d}.txt", {}, 0),
        (lambda number: pathlib.Path(f"{number:02d}.txt"), {}, 10),
        (lambda number: {"id": number, "of": f"{number}"}, {"key": "id"}, 5),
        (lambda number: np.str_(f"texts/{number:02d}.txt"), {}, 20),
    ],
    ids=["text", "path", "key", "numpy text"],
)
def test_one_item_more_concerns_one_shard(make, options, place, tmp_path):
    """Wherever the new item stands."""
    items = [make(number) for number in range(20)]

    def make_sample(item):
        return {"text": str(item)}

    _made(make_sample, items, tmp_path / "out", shards=ShardOptions(num_shards=4), **options)
    items.insert(place, make(99))
    report = _made(make_sample, items, tmp_path / "out", shards=ShardOptions(num_shards=4), **options)

    assert (report.num_shards_reused, report.num_shards_written, report.num_records) == (3, 1, 21)
    assert sorted(sample["text"] for sample in load(tmp_path / "out")) == sorted(map(str, items))


@pytest.mark.parametrize("kind", [str, object, bytes])
def test_array_of_paths_has_the_keys_of_its_elements(kind, tmp_path, monkeypatch):
    """As for a list of them, one more path concerns one shard: of these paths, which are the same in every folder."""
    monkeypatch.chdir(tmp_path)
    for number in range(21):
        (tmp_path / f"{number:02d}.txt").write_text("x")
    paths = [f"{number:02d}.txt" for number in range(21)]
    items = np.array([os.fsencode(path) for path in paths] if kind is bytes else paths, None if kind is bytes else kind)

    def make_sample(item):
        return {"text": os.path.basename(os.fsdecode(item))}

    _made(make_sample, items[1:], tmp_path / "out", shards=ShardOptions(num_shards=4))
    report = _made(make_sample, items, tmp_path / "out", shards=ShardOptions(num_shards=4))

    assert (report.num_shards_reused, report.num_shards_written) == (3, 1)
    assert set(load(tmp_path / "out").keys()) == set(keys_of(paths, None))


@pytest.mark.parametrize("held", [{}, {"inner": {"list": [0]}}, {"array": np.zeros(3, np.int64)}], ids=str)
def test_iterator_may_fill_what_it_has_yielded_anew(held, tmp_path):
    """As a loop over a file does with one dict, or a reader with one array: each item is what it was then."""

    def items():
        for number in range(50):
            held["number"] = number
            if "inner" in held:
                held["inner"]["list"][0] = number
            if "array" in held:
                held["array"][:] = number
            yield held

    def numbers(item):
        found = [item["number"], *item.get("inner", {}).get("list", []), *item.get("array", [])]
        return {"numbers": np.array(found, np.int64)}

    _made(numbers, items(), tmp_path / "out")

    found = [
        set(sample["numbers"].tolist())
        for sample in load(tmp_path / "out", "train").select(f"{n:08d}" for n in range(50))
    ]
    assert found == [{number} for number in range(50)]


def test_changed_item_is_noticed_under_the_key_that_it_had(tmp_path):
    """The content of each item counts in the fingerprint of its shard: a tuple, a dict, an array, a long text."""
    items = [{"id": 1, "x": [1, (2, "a")]}, {"id": 2, "x": np.zeros(3)}, {"id": 3, "x": "long" * 1000}]

    def make():
        return _made(make_sample, items, tmp_path / "out", key="id", shards=ShardOptions(num_shards=3))

    def make_sample(item):
        return {"x": repr(item["x"])}

    make()
    assert make().did_nothing
    for item, value in zip(items, ([1, (2, "b")], np.ones(3), "long" * 999 + "Long"), strict=True):
        item["x"] = value
        assert make().num_shards_written == 1
    found = {sample["key"]: sample["x"] for sample in load(tmp_path / "out")}
    assert found == {str(item["id"]): repr(item["x"]) for item in items}


# ---- features


def _fail(item):
    raise ValueError("bad item")


FATES = {
    "segfault": (lambda: ctypes.string_at(0), "fork", r"SIGSEGV"),
    "exit": (lambda: os._exit(3), "forkserver", r"exit code 3"),
    "leave": (lambda: sys.exit(3), "fork", r"SystemExit: 3"),
    "loop": (lambda: time.sleep(600), "fork", r"TaskTimeout: it ran longer than sample_timeout_s=1"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("deed", "method", "message"), FATES.values(), ids=FATES)
def test_first_item_that_fails_is_an_error_with_its_key(deed, method, message, tmp_path):
    """A worker makes the sample from which features are inferred: the caller's process survives. A spine test."""

    def first_fails(item):
        return deed() if item == "first" else {"x": len(item)}

    workers = WorkerOptions(num_workers=1, start_method=method, sample_timeout_s=1)
    with pytest.raises(SampleError, match=f"sample 'first': .*{message}") as caught:
        _made(first_fails, ["first", "second"], tmp_path / "out", workers=workers)
    assert caught.value.key == "first"


def test_caller_does_none_of_the_items(tmp_path):
    """The first one is no exception."""
    done_here = []

    _made(lambda item: done_here.append(item) or {"x": item}, range(5), tmp_path / "out", workers=TWO_WORKERS)

    assert done_here == []


def test_first_sample_sees_modules_as_the_program_has_set_them(tmp_path, monkeypatch):
    """As in the run, values that argparse has put into a module decide the schema."""
    (tmp_path / "sizes.py").write_text(
        "import numpy as np\nSIZE = None\ndef make(item):\n    return {'x': np.zeros((SIZE, 1))}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("sizes")
    module.SIZE = 3

    _made(module.make, range(3), tmp_path / "out", workers=WorkerOptions(num_workers=1, start_method="forkserver"))

    assert load(tmp_path / "out")[0]["x"].shape == (3, 1)


def test_error_of_the_last_item_is_given_where_none_works(tmp_path):
    """The run ends after all items, or after more failures than the policy allows; `fn` must be a function."""
    with pytest.raises(
        IncompleteRunError, match=r"all 3 inputs failed.* the last: sample '00000002': ValueError: bad item"
    ):
        _made(_fail, range(3), tmp_path / "out", errors="skip")
    with pytest.raises(SampleError, match="sample '00000000': SchemaError: field 'x' holds an object"):
        _made(lambda item: {"x": object()}, range(3), tmp_path / "out")
    with pytest.raises(OptionError, match=r"fn is a dict, .*; want a function of one item.*Materializer"):
        _made({"x": 1}, range(3), tmp_path / "out")
    with pytest.raises(OptionError, match='name is ""; want what the names of the shards begin with'):
        _made(_fail, range(3), tmp_path / "out", name="")


def _end_all_but_one(item):
    if item == 0:
        raise ValueError("bad item")
    if item < 3:
        os._exit(3)
    return {"x": np.float32(item)}


@pytest.mark.timeout(180)
def test_items_that_end_their_workers_are_counted_once_and_beside_others(tmp_path):
    """However often each is tried, each counts once; features come from the first that works, and it is stored."""
    policy = ErrorPolicy("skip", max_errors=1)
    with pytest.raises(IncompleteRunError, match=r"2 inputs failed, more than max_errors=1 allows; the last: .*00001'"):
        _made(_end_all_but_one, range(3), tmp_path / "two", errors=policy, workers=TWO_WORKERS)

    report = _made(_end_all_but_one, range(5), tmp_path / "out", errors="skip", workers=TWO_WORKERS)

    assert (report.num_failed, report.num_records) == (3, 2)
    assert load(tmp_path / "out").features["x"] == Scalar("float32")
    failed = [entry for entry in read_ledger(tmp_path / "out/.datamat/ledger.jsonl") if entry.event == "sample_skipped"]
    assert {entry.values["key"] for entry in failed} == {"00000000", "00000001", "00000002"}


def test_features_are_inferred_of_whatever_json_and_numpy_hold(tmp_path):
    """Nested values, times and numpy's numbers need no `features=`; None is a file that did not decode."""

    def annotated(number):
        when = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return {"boxes": [{"label": number}], "meta": {"size": (4, None)}, "when": when, "level": np.float32(number)}

    _made(annotated, range(3), tmp_path / "out")

    dataset = load(tmp_path / "out")
    assert dataset.features == Features(
        {"boxes": Json(), "meta": Json(), "when": Timestamp(tz="UTC"), "level": Scalar("float32")}
    )
    found = {int(sample["level"]): (sample["boxes"], sample["meta"]) for sample in dataset}
    assert found == {number: ([{"label": number}], {"size": [4, None]}) for number in range(3)}
    with pytest.raises(SampleError, match="the function returned None for the field 'x'; want a value"):
        _made(lambda number: {"x": None}, range(3), tmp_path / "none")


FIRST_LISTS = {
    "numbers": ([], [1, 2], ListOf(Scalar("int64"))),
    "texts": ((), ["a"], ListOf(Text())),
    "an array": ([], np.ones((2, 4), np.float32), Tensor((None, None), "float32")),
    "an array without values": ([], np.ones((0, 4), np.float32), Tensor((None, None), "float32")),
    "dicts of arrays": ([], [{"box": np.ones(4)}], ListOf({"box": Tensor((None,), "float64")})),
    "in a dict": (
        {"pixels": np.ones(2), "tags": []},
        {"pixels": np.ones(2), "tags": ["a"]},
        {"pixels": Tensor((None,), "float64"), "tags": ListOf(Text())},
    ),
    "of anything": ([], [1, "a"], Json()),
}


@pytest.mark.parametrize(("first", "later", "feature"), FIRST_LISTS.values(), ids=FIRST_LISTS)
def test_list_that_is_empty_at_first_gets_the_type_of_the_first_with_items(tmp_path, first, later, feature):
    """Not JSON, in which numbers are text; items that fail or are left out in between do not matter."""

    def make(number):
        if number == 3:
            return Skip("none")
        return {"x": later if number in {6, 8} else first}

    _made(make, range(10), tmp_path / "out")

    found = load(tmp_path / "out")
    assert found.features == Features({"x": feature})
    values = [sample["x"] for sample in found.select(["00000000", "00000006"])]
    kept = Features({"x": feature})
    for value, wanted in zip(values, (first, later), strict=True):
        again = kept.decode(kept.encode({"key": "a", "x": wanted}))["x"]
        assert repr(value) == repr(again)


@pytest.mark.long
def test_items_that_end_their_workers_are_passed_over_in_the_search_for_a_list(tmp_path):
    """They count once, as failed items of the run, not as those before the first sample."""

    def make(number):
        if number in {2, 4}:
            os._exit(3)
        if number == 5:
            raise ValueError("bad item")
        return {"x": [number] if number == 7 else []}

    report = _made(make, range(9), tmp_path / "out", errors=ErrorPolicy("skip", max_errors=3), workers=TWO_WORKERS)

    assert (report.num_failed, report.num_records) == (3, 6)
    assert load(tmp_path / "out").features["x"] == ListOf(Scalar("int64"))


def test_lists_that_stay_empty_are_json_and_the_log_says_so(tmp_path, caplog):
    """Where items are left that were not looked at; then the type may matter."""
    calls = []

    def make(number):
        calls.append(number)
        return {"x": [] if number < 100 else [number]}

    _made(make, range(102), tmp_path / "out")
    assert "lists in field 'x' of the first 100 samples are empty, so lists of this field are" in caplog.text
    assert load(tmp_path / "out").features["x"] == Json()
    assert calls[:101] == [0, *range(100)]
    caplog.clear()
    _made(make, range(50), tmp_path / "few")
    assert "empty" not in caplog.text


def test_none_in_the_first_sample_shows_no_type(tmp_path):
    """In a dict as beside others; the message says what a field that may be missing is declared as."""
    with pytest.raises(SampleError, match=r"field 'm/x' is None, which shows no type; fill it in, or pass .*Nullable"):
        _made(lambda number: {"m": {"a": np.ones(2), "x": None}}, range(2), tmp_path / "out")


@pytest.mark.parametrize(
    "value",
    [{"x": 0.5}, {"x": 1, "y": 2}, {"x": "one"}, {"x": None}, 5],
    ids=["float", "field", "text", "none", "no dict"],
)
@pytest.mark.parametrize("name", ["make", "<lambda>"])
def test_messages_name_the_function_and_no_method(tmp_path, value, name):
    """Whoever passes a function has written no `read`."""

    def make(n):
        return value

    make.__name__ = name
    features = {"x": Scalar("int64")}

    with pytest.raises(SampleError) as raised:
        materialize(make, range(3), tmp_path / "out", features=features, executor=InlineExecutor(), progress=False)

    assert " read" not in raised.value.reason
    assert ("the function" if name != "make" else "make") in raised.value.reason


def test_run_is_seen_from_its_first_sample_on(tmp_path):
    """Also while the features are inferred, which calls the function."""
    output, seen = tmp_path / "out", tmp_path / "seen"

    def make(item):
        with seen.open("a") as file:
            file.write(f"{datamat.status(output).state}\n")
        return {"x": item}

    materialize(make, range(3), output, executor=InlineExecutor(), progress=False)

    assert {*seen.read_text().split()} == {"running"}


class _Source:
    def __init__(self):
        self.connection = socket.socket()

    def make(self, item):
        return {"x": item}


def test_what_cannot_be_sent_is_named_as_its_user_reaches_it(tmp_path):
    """By no path through objects of datamat; so is what has no fingerprint."""
    features = {"x": Scalar("int64")}
    with (
        contextlib.closing(socket.socket()) as connection,
        pytest.raises(FingerprintError, match=r"^fn -> connection: "),
    ):
        _made(lambda item: {"x": item, "at": connection.family}, range(3), tmp_path / "out", features=features)
    source = _Source()
    with contextlib.closing(source.connection), pytest.warns(UserWarning, match=r"^fn's self\.connection: socket"):
        _made(source.make, range(3), tmp_path / "out", workers=1, features=features, version="1")


class HoldsGenerator:
    """Holds what cannot travel."""

    def __init__(self):
        self.generator = (number for number in range(3))

    def sample(self, number):
        return {"n": number}


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_what_cannot_travel_is_named_once(method, tmp_path):
    """Not by the pool that reads the first sample, and again by each pool of the run."""
    options = WorkerOptions(num_workers=2, start_method=method)
    with pytest.warns(UserWarning, match="self.generator") as given:
        materialize(HoldsGenerator().sample, range(20), tmp_path / "out", workers=options, progress=False)

    assert len([one for one in given if "self.generator" in str(one.message)]) == 1


# ------------------------------------------------------------ splits that items name


@pytest.mark.parametrize("split", ["part", lambda item: item["part"]], ids=["field", "function"])
def test_items_name_their_splits(tmp_path, split):
    """Those that name none are divided by `splits`; shards do not depend on how the split was named."""
    items = [{"n": n, "part": (None, "test", "train")[n % 3]} for n in range(30)]

    _made(lambda item: {"n": item["n"]}, items, tmp_path, split=split, splits={"train": 0.5, "val": 0.5})

    found = {name: {int(sample["n"]) for sample in load(tmp_path, name)} for name in ("train", "val", "test")}
    assert found["test"] == set(range(1, 30, 3))
    assert found["train"] >= set(range(2, 30, 3)) and found["val"]
    assert found["train"] | found["val"] == set(range(30)) - found["test"]


def test_an_item_that_moves_to_another_split_makes_two_shards_anew(tmp_path):
    """No other shard is touched."""
    options = {"shards": ShardOptions(records_per_shard=5, shuffle=False), "key": str}
    _made(lambda n: {"n": n}, range(20), tmp_path, split=lambda n: "a" if n < 10 else "b", **options)

    report = _made(lambda n: {"n": n}, range(20), tmp_path, split=lambda n: "a" if n < 11 else "b", **options)

    assert [len(load(tmp_path, name)) for name in "ab"] == [11, 9]
    assert report.num_shards_reused == 2
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda n: n, r"split= gave 0 for inputs\[0\]; want the name of a split, or None"),
        ("part", r"inputs\[0\] is a int with no fields; split='part' needs a dict that has it"),
        (lambda n: "a/b", r"a/b"),
    ],
)
def test_what_names_no_split_is_refused(tmp_path, split, message):
    with pytest.raises(SourceError, match=message):
        _made(lambda n: {"n": n}, range(3), tmp_path, split=split)


# ------------------------------------------------------------ datasets


@pytest.fixture
def crawl(tmp_path):
    """Forty texts in two Parquet files, as FineWeb has them: row groups, and columns that nobody wants."""
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for part in range(2):
        numbers = range(20 * part, 20 * part + 20)
        columns = {
            "text": [f"text {n}" for n in numbers],
            "id": [f"<urn:uuid:{n}>" for n in numbers],
            "score": [0.5] * 20,
        }
        parquet.write_table(pa.table(columns), folder / f"00{part}_00000.parquet", row_group_size=6)
    return folder


def tokenize(row):
    return {"tokens": np.frombuffer(row["text"].encode(), np.uint8)}


def texts_of(folder):
    return {sample["key"]: bytes(sample["tokens"]).decode() for sample in load(folder)}


@pytest.mark.parametrize("given", [str, pathlib.Path, lambda folder: f"{folder}/*.parquet"])
def test_samples_of_a_dataset_are_items(crawl, tmp_path, given):
    """Whatever `Materializer` reads is named by its path; the keys are those that it gives."""
    _made(tokenize, given(crawl), tmp_path / "out")
    assert texts_of(tmp_path / "out") == {f"00{n // 20}_00000-{n % 20:08d}": f"text {n}" for n in range(40)}

    _made(tokenize, given(crawl), tmp_path / "by-id", key="id")
    assert texts_of(tmp_path / "by-id") == {f"<urn:uuid:{n}>": f"text {n}" for n in range(40)}


def test_content_of_a_dataset_counts(crawl, tmp_path):
    """Where the files lie does not."""
    _made(tokenize, crawl, tmp_path / "out")
    moved = crawl.rename(tmp_path / "moved")
    assert _made(tokenize, moved, tmp_path / "out").did_nothing

    changed = parquet.read_table(moved / "001_00000.parquet").set_column(0, "text", pa.array(["new"] * 20))
    parquet.write_table(changed, moved / "001_00000.parquet")
    _made(tokenize, moved, tmp_path / "out")

    assert sorted(texts_of(tmp_path / "out").values()) == sorted([f"text {n}" for n in range(20)] + ["new"] * 20)


def test_splits_of_a_dataset_stay(crawl, tmp_path):
    """Unless the call says something else."""
    for part, split in enumerate(("train", "val")):
        (crawl / f"00{part}_00000.parquet").rename(crawl / f"{split}-0.parquet")

    _made(tokenize, crawl, tmp_path / "out")
    _made(tokenize, crawl, tmp_path / "other", split=lambda row: "test" if row["text"] == "text 7" else "train")

    assert [len(load(tmp_path / "out", split)) for split in ("train", "val")] == [20, 20]
    assert [len(load(tmp_path / "other", split)) for split in ("train", "test")] == [39, 1]


def test_rows_of_files_are_those_of_the_table_in_memory(tmp_path):
    """Empty cells are None, structs dicts; the columns of keys and splits are both."""
    table = pa.table(
        {
            "key": [f"k{n}" for n in range(20)],
            "split": ["train", "val"] * 10,
            "n": [None, *range(19)],
            "tags": [None, ["a"], [], ["b", "c"]] * 5,
            "meta": [{"lang": "en", "in": {"score": 0.5}}] * 20,
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=6)

    def shown(row):
        return {"row": repr({name: row[name] for name in ("n", "tags", "meta")})}

    _made(shown, tmp_path / "a.parquet", tmp_path / "files")
    _made(shown, tmp_path / "a.parquet", tmp_path / "by-name", key="key", split="split")
    _made(shown, table, tmp_path / "memory", key="key", split="split")

    found, by_name, wanted = (
        [(sample["key"], sample["row"]) for split in ("train", "val") for sample in load(tmp_path / name, split)]
        for name in ("files", "by-name", "memory")
    )
    assert found == by_name == wanted


def test_field_that_no_sample_has_is_named(crawl, tmp_path):
    with pytest.raises(SourceError, match=r"no field 'uuid'.* text, id, score"):
        _made(tokenize, crawl, tmp_path / "out", key="uuid")
