"""The main job, end to end: nothing is lost, bytes are the same, and a run resumes from anywhere.

Tests of runs use `InlineExecutor` and small data. The spine tests below, and those that other files mark as such, are
the few that run whole jobs in real processes.
"""

import functools
import inspect
import json
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import typing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import albumentations as A
import numpy as np
import pytest
import small_pairs
from prepared import Prepared

import datamat
from datamat import (
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Manifest,
    Materializer,
    OptionError,
    OutputError,
    SampleError,
    Scalar,
    ShardOptions,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.codecs import decode_image
from datamat.formats import get_format
from datamat.options import RunDatasetKeywords, RunKeywords
from datamat.run.convert import convert
from datamat.testing import InlineExecutor

TWO_WORKERS = WorkerOptions(num_workers=2)
NUM_TRAIN, NUM_VAL = 10, 2


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("pairs"), NUM_TRAIN, NUM_VAL)


_job = small_pairs.job


def _augmented(source, output, **options):
    return _job(source, output, copies={"train": 3}, transform=small_pairs.jitter, **options)


@pytest.fixture(scope="session")
def finished(pairs, tmp_path_factory):
    """The report of an undisturbed run, whose output tests only read."""
    return _augmented(pairs, tmp_path_factory.mktemp("reference") / "out").run(progress=False)


@pytest.fixture(scope="session")
def reference(finished):
    """Digests of the files of an undisturbed run."""
    return small_pairs.digests(finished.output)


# ------------------------------------------------------------ spine: whole runs in real processes


@pytest.mark.parametrize(("num_workers", "start_method"), [(1, "fork"), (2, "spawn"), (3, "forkserver"), (7, "fork")])
def test_bytes_do_not_depend_on_the_workers(pairs, tmp_path, reference, num_workers, start_method):
    """Shards, offsets, index and manifest are the same for any number of workers and any start method."""
    options = WorkerOptions(num_workers=num_workers, start_method=start_method)

    _augmented(pairs, tmp_path / "out", workers=options).run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == reference


def test_draws_do_not_depend_on_who_makes_them(pairs, tmp_path):
    """Albumentations' own generators and the global ones are set for each copy; threads share one transform."""
    caller = np.random.get_state()[1].tobytes()
    transform = A.Compose([A.HorizontalFlip(p=0.1), A.GaussNoise(p=0.3), A.Lambda(image=_global_noise, p=0.3)])
    run = functools.partial(_job, pairs, copies=3, transform=transform)

    run(tmp_path / "inline").run(progress=False)
    run(tmp_path / "workers", workers=TWO_WORKERS).run(progress=False)
    for make in (ThreadPoolExecutor, ProcessPoolExecutor):
        with make(3) as executor:
            report = run(tmp_path / make.__name__, executor=executor).run(progress=False)
        assert f"with {make.__name__}" in str(report)

    wanted = small_pairs.digests(tmp_path / "inline")
    assert all(small_pairs.digests(tmp_path / path.name) == wanted for path in tmp_path.iterdir())
    assert np.random.get_state()[1].tobytes() == caller
    train = load(tmp_path / "inline", "train")
    for number in range(
        NUM_TRAIN
    ):  # a copy that equals an earlier one, as here where often nothing is done, is redrawn
        assert len({train[f"train{number:03d}#{copy}"]["image"].tobytes() for copy in range(3)}) == 3


def _global_noise(image, **_):
    return np.clip(image.astype(int) + np.random.randint(-9, 9, image.shape), 0, 255).astype(np.uint8)


def test_bytes_do_not_depend_on_where_or_when(pairs, tmp_path, reference):
    """Another copy of the source, another folder and another hash seed of Python, in a script without a guard."""
    script = (
        "import small_pairs, sys; from datamat import *; "
        "Materializer(small_pairs.Pairs(), sys.argv[1], sys.argv[2], copies={'train': 3}, "
        "transform=small_pairs.jitter, shards=ShardOptions(num_shards=2)).run(progress=False)"
    )
    environment = {**ENVIRONMENT, "PYTHONHASHSEED": "77", "TZ": "Asia/Tokyo"}

    subprocess.run([sys.executable, "-c", script, pairs, "far/out"], check=True, cwd=tmp_path, env=environment)

    assert small_pairs.digests(tmp_path / "far" / "out") == reference


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}


def test_one_shard_is_written_by_all_workers(tmp_path):
    """Parts of the shard come from several processes."""

    class Who(DatasetWriter):
        name = "who"
        features = Features({"pid": Scalar("int64"), "blob": Text()})

        def index(self, source):
            return [IndexRow(f"{n:03d}", fields={"blob": "x" * 200_000}) for n in range(12)]

        def read(self, row):
            (marks / str(os.getpid())).touch()
            while len(os.listdir(marks)) < 2:  # until another worker reads as well
                pass
            return {"pid": os.getpid(), "blob": row.fields["blob"][:10]}

    marks = tmp_path / "marks"
    marks.mkdir()
    job = Prepared(Who, None, tmp_path / "out", workers=TWO_WORKERS)

    assert len(job.plan().shards) == 1
    job.run(progress=False)
    assert len({int(sample["pid"]) for sample in load(tmp_path / "out")}) == 2


def test_worker_that_dies_once_costs_nothing(pairs, tmp_path, reference):
    """A fresh worker makes the part again, with the same bytes."""
    marker = tmp_path / "died"

    class Dying(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train007" and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(row)

    options = {"copies": {"train": 3}, "transform": small_pairs.jitter, "workers": TWO_WORKERS}
    _job(pairs, tmp_path / "out", Dying(), **options).run(progress=False)

    shards = {name: digest for name, digest in small_pairs.digests(tmp_path / "out").items() if "-of-" in name}
    assert marker.exists()
    assert len(shards) >= 4 and shards.items() <= reference.items()


def test_run_leaves_the_process_as_it_was_and_shows_one_line(pairs, tmp_path, capfd):
    """Random state, affinity, environment, signal handlers and threads; nothing is printed without progress."""

    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            os.sched_getaffinity(0),
            dict(os.environ),
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            threading.enumerate(),
            os.getcwd(),
        )

    before = state()

    _augmented(pairs, tmp_path / "quiet", workers=TWO_WORKERS).run(progress=False)
    assert capfd.readouterr() == ("", "")
    _augmented(pairs, tmp_path / "out", workers=TWO_WORKERS).run()

    assert state() == before
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("complete: 32 records") == 1 and len(err.splitlines()) == 1
    assert "2 workers" in err and "% busy)" in err


def test_logger_on_the_writer_reaches_the_parent(pairs, tmp_path, caplog):
    """Log records of workers reach the handlers that the user configured."""

    class Talking(small_pairs.Pairs):
        def __init__(self):
            self.log = logging.getLogger("talking")
            self.lock = threading.RLock()

        def read(self, row):
            with self.lock:
                self.log.warning("read %s", row.key)
            return super().read(row)

    _job(pairs, tmp_path / "out", Talking(), workers=TWO_WORKERS).run(progress=False)

    assert {f"read train{n:03d}" for n in range(NUM_TRAIN)} <= set(caplog.messages)


def test_materialize_asks_a_dataset_for_single_items(tmp_path):
    """The caller's process loads no item; anything that is not a dataset is iterated."""
    numbers = Numbers()
    workers = WorkerOptions(num_workers=1, start_method="fork")

    materialize(squared, numbers, tmp_path / "dataset", workers=workers, progress=False)
    assert not hasattr(numbers, "asked")

    for name, inputs in {"iterator": iter(range(12)), "array": np.arange(12)}.items():
        materialize(squared, inputs, tmp_path / name, executor=InlineExecutor(), progress=False)
        assert [int(sample["square"]) for sample in load(tmp_path / name)] == [
            int(sample["square"]) for sample in load(tmp_path / "dataset")
        ]


class Numbers:
    """A dataset as torch has them: a length, and items by position."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        self.__dict__.setdefault("asked", set()).add(number)
        return number


def squared(number):
    return {"square": int(number) ** 2}


# ------------------------------------------------------------ what a run makes


def test_every_pair_is_there_exactly_copies_times(finished):
    """In the right split, under the right keys; the manifest says how, but nothing of time, host or worker."""
    train, val = load(finished.output, "train"), load(finished.output, "val")

    assert sorted(train.keys()) == sorted(f"train{n:03d}#{copy}" for n in range(NUM_TRAIN) for copy in range(3))
    assert sorted(val.keys()) == [f"val{n:03d}" for n in range(NUM_VAL)]
    assert (finished.num_rows, finished.num_records, finished.is_complete) == (12, 32, True)
    assert verify(finished.output).ok
    manifest = Manifest.read(finished.output)
    assert manifest.features == small_pairs.Pairs.features and manifest.copies == {"train": 3, "val": 1}
    text = pathlib.Path(finished.output, "manifest.json").read_text()
    counts = {"num_shards": 2, "num_rows": NUM_TRAIN, "num_failed": 0, "num_records": 3 * NUM_TRAIN}
    assert json.loads(text)["splits"]["train"] == counts
    assert "hostname" not in text
    assert not re.search(rf'"{os.getpid()}"|: {os.getpid()}\b', text)  # as a value; digits of others may hold it


def test_untransformed_samples_keep_their_original_bytes(pairs, tmp_path):
    """Nothing decodes or encodes them: the record holds the bytes of the file."""
    _job(pairs, tmp_path / "out").run(progress=False)

    files = {path.stem: path.read_bytes() for path in (pairs / "train").iterdir()}
    masks = {path.stem: path.read_bytes() for path in (pairs / "trainannot").iterdir()}
    shards = sorted((tmp_path / "out").glob("*-train-*.tfrecord"))
    records = [record for shard in shards for record in get_format("tfrecord").read(shard)]
    found = {record["key"][0].decode(): record for record in records}

    assert {key: record["image"][0] for key, record in found.items()} == files
    assert {key: record["mask"][0] for key, record in found.items()} == masks


def test_finished_directory_holds_nothing_else_and_stays_as_it_is(pairs, finished):
    """Parts, rows and temporary files are removed; a second run touches no file, and says that it did nothing."""
    output = pathlib.Path(finished.output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}

    report = _augmented(pairs, output).run(progress=False)

    assert report.did_nothing and "nothing to do, 32 records" in str(report)
    assert before == {path: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}
    names = {path.name for path in output.iterdir() if not path.name.startswith("pairs-")}
    documents = {"README.md", "croissant.json", "dataset_info.json", "features.json", "mask.labels.txt"}
    assert names == {".datamat", "_index", "manifest.json"} | documents
    assert {path.name for path in (output / ".datamat").iterdir()} == {
        "inputs",
        "ledger.jsonl",
        "lock",
        "names.json",
        "sidecars.json",
    }


def test_function_needs_no_class(tmp_path):
    """Features are inferred from the first sample, and no sample is lost."""

    def sample(number):
        return {"half": number / 2, "name": f"n{number}", "grid": np.full((2, 3), number, np.uint16)}

    report = materialize(sample, range(20), tmp_path / "out", executor=InlineExecutor(), progress=False)
    found = load(tmp_path / "out")

    assert report.num_records == len(found) == 20
    assert sorted(str(item["name"]) for item in found) == sorted(f"n{n}" for n in range(20))
    assert found["00000007"]["half"] == 3.5 and found["00000007"]["grid"].dtype == np.uint16
    with pytest.raises(OptionError, match="inputs is empty"):
        materialize(sample, [], tmp_path / "none")


def test_key_in_a_sample_must_be_that_of_its_row(tmp_path):
    """Keys come from the index: a sample that holds another one is refused, never silently stored."""
    inline = {"executor": InlineExecutor(), "progress": False}
    with pytest.raises(SampleError, match=r"returned the key 'k0', but keys come from the index, .* '00000000'"):
        materialize(lambda i: {"key": f"k{i}", "value": i}, range(3), tmp_path / "other", **inline)

    materialize(dict, [{"key": i, "value": 10 * i} for i in range(3)], tmp_path / "same", key="key", **inline)

    assert sorted(load(tmp_path / "same").keys()) == ["0", "1", "2"]


@pytest.mark.parametrize("library", ["PIL", "torch"])
def test_pictures_of_pillow_and_tensors_are_arrays(tmp_path, library):
    """As first examples return them; features are inferred from the arrays."""
    module = pytest.importorskip({"PIL": "PIL.Image"}.get(library, library))
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    as_given = module.fromarray if library == "PIL" else module.from_numpy

    def sample(number):
        return {"image": as_given(pixels + np.uint8(number))}

    materialize(sample, range(3), tmp_path / "out", executor=InlineExecutor(), progress=False)

    data = load(tmp_path / "out")
    assert isinstance(data.features["image"], Image)
    assert all(np.array_equal(data[f"{number:08d}"]["image"], pixels + number) for number in range(3))


# ------------------------------------------------------------ runs after a run


def test_shards_with_wildcards_run_separately_and_end_complete(pairs, tmp_path, reference):
    """One call makes one shard, a second call the rest; the manifest appears with the last shard."""
    first = _augmented(pairs, tmp_path / "out", include="train-0000[0]").run(progress=False)

    assert not first.is_complete and not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(OutputError, match="finish its run, which writes it last"):
        load(tmp_path / "out")

    second = _augmented(pairs, tmp_path / "out", exclude=["train-00000"]).run(progress=False)

    assert second.is_complete and second.num_shards_reused == 1
    assert small_pairs.digests(tmp_path / "out") == reference


def test_run_after_a_failure_makes_only_unfinished_parts(pairs, tmp_path):
    """Finished parts are reused; the error of the first run names key, line and file."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train007" and not (tmp_path / "good").exists():
                raise ValueError("cannot make sense of it")
            return super().read(row)

    def job(writer):
        return _job(pairs, tmp_path / "out", writer(), copies={"train": 3}, transform=small_pairs.jitter)

    message = r"'train007': ValueError: cannot make sense of it \(in read, test_materializer.py:\d+\) .*train007.png"
    with pytest.raises(SampleError, match=message) as caught:
        job(Failing).run(progress=False)
    assert caught.value.key == "train007"
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "good").touch()

    report = job(Failing).run(progress=False)

    assert report.num_parts_written == 1 and report.num_parts_resumed >= 3
    assert load(tmp_path / "out", "train")["train007#2"]["key"] == "train007#2"
    assert verify(tmp_path / "out").ok


def test_another_number_of_shards_leaves_no_old_ones(pairs, tmp_path):
    """Files of the old plan are removed before the manifest names the new ones."""
    _job(pairs, tmp_path / "out", shards=ShardOptions(num_shards=4)).run(progress=False)

    _job(pairs, tmp_path / "out", shards=ShardOptions(num_shards=2)).run(progress=False)

    assert sorted(path.name for path in (tmp_path / "out").glob("*.tfrecord")) == [
        f"pairs-{split}-0000{n}-of-00002.tfrecord" for split in ("train", "val") for n in range(2)
    ]
    assert verify(tmp_path / "out").ok


# ------------------------------------------------------------ transforms


class Deep(small_pairs.Pairs):
    """Image, mask, depth that depends on the image's columns, and a code of the sample."""

    name = "deep"
    features = Features(
        {**small_pairs.Pairs.features, "depth": Tensor((None, None), "float32"), "code": Tensor((3,), "float32")}
    )

    def read(self, row):
        columns = np.tile(np.arange(32, dtype=np.float32), (24, 1))
        return {**super().read(row), "depth": columns, "code": np.arange(3, dtype=np.float32)}


def test_array_that_the_transform_would_not_move_is_refused_before_anything_is_touched(pairs, tmp_path):
    """The error gives field, transform and remedy, for a class and for a function; a declaration settles it."""
    flip = A.Compose([A.HorizontalFlip(p=1)])
    message = "'depth' .*HorizontalFlip.*additional_targets={'depth': 'mask'}.*untouched="
    features = Features({"image": Image(), "depth": Tensor((4, 4), "float32")})
    sample = {"image": np.zeros((4, 4, 3), np.uint8), "depth": np.zeros((4, 4), np.float32)}

    with pytest.raises(OptionError, match=message):
        Materializer(Deep(), pairs, tmp_path / "out", transform=flip, untouched=("code",))
    with pytest.raises(OptionError, match=message):
        materialize(lambda n: sample, range(3), tmp_path / "out", features=features, transform=flip)
    with pytest.raises(OptionError, match=r"untouched is 'code'; want a tuple of fields, as in untouched=\('code',\)"):
        Materializer(Deep(), pairs, tmp_path / "out", transform=flip, untouched="code")

    assert not (tmp_path / "out").exists()


def test_image_mask_and_array_move_together(pairs, tmp_path):
    """The pipeline says which arrays move; a field declared untouched does not."""
    pipeline = A.Compose([A.HorizontalFlip(p=0.5)], additional_targets={"depth": "mask"})

    _job(pairs, tmp_path / "out", Deep(), transform=pipeline, copies={"train": 2}, untouched=("code",)).run(
        progress=False
    )

    plain = {path.stem: decode_image(path.read_bytes()) for path in (pairs / "train").iterdir()}
    flips = set()
    for sample in load(tmp_path / "out", "train"):
        is_flipped = bool(sample["depth"][0, 0] == 31)
        image = plain[sample["key"].partition("#")[0]]
        assert np.array_equal(sample["image"], image[:, ::-1] if is_flipped else image)
        assert np.array_equal(sample["image"][..., 0], sample["mask"] * 60)  # as `make_pairs` has drawn them
        assert sample["code"].tolist() == [0, 1, 2]
        flips.add(is_flipped)
    assert flips == {True, False}


def test_untouched_counts_where_it_decides_bytes(pairs, tmp_path):
    """Another mask that stays in place gives another output; a name that changes nothing rebuilds nothing."""
    flip = A.Compose([A.HorizontalFlip(p=1)])
    run = functools.partial(_job, pairs, tmp_path / "out", transform=flip, copies={"train": 2})
    run().run(progress=False)

    assert "transform changed" in str(run(untouched=("mask",)).status())
    assert run().status().is_complete and run(untouched=("key",)).status().changes == ()


def test_nondeterministic_transform_is_refused(pairs, tmp_path):
    """One that draws from a source of its own would give other bytes in every run."""
    private = np.random.default_rng()

    def noisy(sample, rng):
        return {**sample, "image": sample["image"] ^ private.integers(0, 2, sample["image"].shape, np.uint8)}

    with pytest.raises(OptionError, match="noisy"):
        _job(pairs, tmp_path / "out", copies=2, transform=noisy).run(progress=False)


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": 0}, "copies is 0"),
        ({"copies": "3"}, "copies is '3'; want a number of at least 1"),
        ({"splits": 0.8}, "splits is 0.8; want shares by split"),
        ({"splits": ["train", "val"]}, r"splits is \['train', 'val'\]; want shares by split"),
        ({"splits": {"train": "0.8"}}, "splits is {'train': '0.8'}; want shares by split"),
        ({"copies": {"train": True}}, "copies is"),
        ({"copies": {"nowhere": 2}}, "copies names the split 'nowhere'; the index has train, val"),
        ({"splits": {"train": 0.5}}, "add up to 0.5"),
        ({"seed": -1}, "seed is -1"),
        ({"format": "xml"}, "no format 'xml'"),
        ({"include": "nothing*"}, "names no shard"),
        ({"workers": "4"}, r"workers is '4'; want something like 8, or WorkerOptions\(num_workers=8\)"),
        ({"workers": 0}, r"workers is 0; want something like 8"),
        ({"shards": 0.5}, r"shards is 0.5; want something like 8, '256MB', or ShardOptions\(num_shards=8\)"),
        ({"shards": "large"}, "size 'large': want a positive number of bytes, or text as in '20GB'"),
        ({"shards": "4"}, "shards is '4'; want a number, 4, or a size with its unit"),
        ({"follow_links": "False"}, "follow_links is 'False'; want True or False"),
        ({"retry_failed": "no"}, "retry_failed is 'no'; want True or False"),
        ({"include": []}, r"include is \[\]; want shell patterns"),
        ({"exclude": "*"}, "leave no shard to make"),
        ({"errors": 0.1}, "errors is 0.1; want 'raise', 'skip', 'quarantine', or an ErrorPolicy"),
        ({"errors": "ignore"}, "action is 'ignore'; want 'raise', 'skip' or 'quarantine'"),
        ({"existing": "keep"}, "existing is 'keep'; want one of 'update', 'append', 'replace', 'refuse'"),
        ({"logger": "x"}, "logger is 'x'; want a logger"),
        ({"hooks": print}, "hooks is .*; want a list"),
        ({"task_index": 3}, "task_index is 3 and num_tasks None; give both"),
        ({"retry_failed": True, "task_index": 0, "num_tasks": 2}, "retry_failed is for one process"),
    ],
)
def test_options_are_checked(pairs, tmp_path, options, message):
    """Each error gives what was found and what is wanted."""
    with pytest.raises(OptionError, match=message):
        _job(pairs, tmp_path / "out", **options).run(progress=False)


def test_run_warns_where_ranks_do_not_share_evenly(pairs, tmp_path, caplog):
    """At its end, where rows failed; even shares give no warning."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train003":
                raise OSError("gone")
            return super().read(row)

    for writer in (small_pairs.Pairs, Failing):
        output, two = tmp_path / writer.__name__, ShardOptions(ranks=2)
        _job(pairs, output, writer(), shards=two, errors="skip").run(progress=False)
        warned = [message for message in caplog.messages if "ranks" in message]
        assert len(warned) == (writer is Failing)
    assert warned[0].startswith("split 'train' gives its 2 ranks 4 to 5 records: rows failed")


def test_urls_and_odd_outputs_are_refused(pairs, tmp_path):
    """A URL for reading only, the home folder of nobody, a file in the way, and a link at the work folder."""
    with pytest.raises(OptionError, match="can be read, not written"):
        _job(pairs, "https://host/out")
    with pytest.raises(OptionError, match=r"'~nobody-of-that-name/out': there is no such home folder"):
        _job(pairs, "~nobody-of-that-name/out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be made"):
        _job(pairs, tmp_path / "file").run(progress=False)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".datamat").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="is a link"):
        _job(pairs, tmp_path / "linked").run(progress=False)


def test_bad_source_leaves_no_manifest(tmp_path):
    """Missing files are found before any worker starts."""
    source = small_pairs.make_pairs(tmp_path / "source", 4, 1)
    (source / "train" / "train003.png").unlink()

    with pytest.raises(SourceError, match=r"train.txt:4: image 'train/train003.png': no such file"):
        _job(source, tmp_path / "out").run(progress=False)


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_tilde_means_the_home_folder(tmp_path, monkeypatch, kind):
    """Every argument that names a directory expands it; once, a folder called `~` appeared in the current one."""
    home = tmp_path / "home"
    source = small_pairs.make_pairs(home / "source", 2, 1)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    inline = {"executor": InlineExecutor(), "progress": False}

    _job(kind("~/source"), kind("~/out")).run(progress=False)
    convert(kind("~/out"), kind("~/converted"), format="parquet", **inline)
    materialize(lambda n: {"n": n}, range(3), kind("~/numbers"), **inline)

    assert {path.name for path in home.iterdir()} == {"source", "out", "converted", "numbers"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(load(kind("~/out"))) == len(load(home / "converted")) == 3
    assert verify(kind("~/out")).ok and Manifest.read(kind("~/out")).name == "pairs"
    assert _job(source, home / "out").run(progress=False).did_nothing


def test_hints_of_calls_resolve_at_run_time():
    """Editors and callers read them; signatures have each option by its name."""
    for call in (datamat.materialize, datamat.convert):
        assert {"return", "output"} <= typing.get_type_hints(call).keys()
        assert {"workers", "errors", "deadline", "scratch"} <= inspect.signature(call).parameters.keys()
    both = typing.get_type_hints(RunDatasetKeywords)
    assert both.keys() == typing.get_type_hints(RunKeywords).keys() | {
        one.name for one in inspect.signature(Materializer).parameters.values() if one.kind is one.KEYWORD_ONLY
    }


@pytest.mark.parametrize("inputs", ["imgs/*.png", {"train": [1, 2]}, b"bytes", pathlib.Path("imgs"), 7])
def test_inputs_that_are_no_items_are_refused(tmp_path, inputs):
    """Python would go through letters, or through the keys."""
    with pytest.raises(OptionError, match=r"want the items themselves.* Materializer\('image_folder'"):
        datamat.materialize(lambda item: {"x": item}, inputs, tmp_path / "out")


@pytest.mark.parametrize("name", ["storage_options", "source_options"])
def test_options_of_a_store_are_a_dict(tmp_path, name):
    """A text would be taken, and never be looked at."""
    with pytest.raises(OptionError, match=f"{name} is 'anon'; want a dict"):
        datamat.materialize(lambda item: {"x": item}, range(3), tmp_path / "out", features={}, **{name: "anon"})
    with pytest.raises(OptionError, match="storage_options is 'anon'; want a dict"):
        datamat.load("s3://bucket/out", storage_options="anon")


@pytest.mark.parametrize("source", [".", "cat", "cat/*.jpg"])
def test_pictures_without_a_writer_are_answered_with_image_folder(tmp_path, monkeypatch, source):
    """A folder of them is no dataset of a known kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/1.jpg").write_bytes(b"...")
    with pytest.raises(SourceError, match="'image_folder'"):
        Materializer(source=source, output=tmp_path / "out")


def test_output_without_a_name_is_refused(tmp_path, monkeypatch):
    """It would be the current folder: of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="output is missing"):
        datamat.materialize(lambda item: {"x": item}, range(3), "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("num_proc", "run(workers=...)"),  # of Hugging Face's `map`
        ("max_errors", "errors=ErrorPolicy(max_errors=...)"),
        ("deadline", "run(deadline=...)"),
        ("overwrite", "run(existing='replace')"),
        ("workers", "run(workers=...)"),
        ("drop", "ImportWriter(drop=...)"),
    ],
)
def test_option_that_belongs_elsewhere_is_shown_there(tmp_path, name, where):
    """People type the names of other libraries, or forget the object around an option."""
    with pytest.raises(OptionError, match=re.escape(f"Materializer has no option {name!r}; write {where}")):
        Materializer("files", tmp_path, tmp_path / "out", **{name: 2})
    with pytest.raises(OptionError, match=r"materialize has no option 'num_proc'; write workers=\.\.\."):
        datamat.materialize(len, [[1]], tmp_path / "out", num_proc=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Materializer("files", tmp_path, tmp_path / "out", nonsense=2)
    with pytest.raises(TypeError, match=r"argument 'shard'; did you mean 'shards'\?"):
        Materializer("files", tmp_path, tmp_path / "out", shard=2)
    with pytest.raises(OptionError, match=r"call materialize\(len, items, output\)"):
        Materializer(len, [[1]], tmp_path / "out")


class Watched(Materializer):
    """Notes which parts its workers write."""

    written = ()

    def write_part(self, parts, lost=None, reused=None):
        """Write them as ever."""
        receipts = super().write_part(parts, lost, reused)
        Watched.written += tuple(part.shard for part in parts[: len(receipts)])
        return receipts


def test_bound_method_of_the_materializer_is_what_travels(pairs, tmp_path, monkeypatch):
    """A subclass may wrap it; the one that the program holds writes nothing itself."""
    monkeypatch.setattr(Watched, "written", ())
    job = Watched(small_pairs.Pairs(), pairs, tmp_path / "out", shards=ShardOptions(num_shards=2))

    job.run(executor=InlineExecutor(), progress=False)

    assert {shard.name for shard in job.plan().shards} == set(Watched.written)
    with pytest.raises(OptionError, match=r"call run\(\)"):
        job.write_part([])
