"""The main job, end to end: nothing is lost, bytes are the same, and a run resumes from anywhere."""

import contextlib
import functools
import glob
import inspect
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import albumentations as A
import numpy as np
import pytest
import small_pairs

from datamat import (
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Manifest,
    Materializer,
    OptionError,
    OutputError,
    OutputLockedError,
    SampleError,
    Scalar,
    ShardOptions,
    SourceError,
    Tensor,
    Text,
    WorkerDied,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.codecs import decode_image
from datamat.directory.files import locked
from datamat.run.convert import convert


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return small_pairs.make_pairs(tmp_path_factory.mktemp("pairs"))


def _job(source, output, **options):
    options.setdefault("workers", WorkerOptions(num_workers=2))
    return Materializer(small_pairs.Pairs(), source, output, **options)


def _augmented(source, output, **options):
    return _job(
        source, output, copies={"train": 3}, transform=small_pairs.jitter, shards=ShardOptions(num_shards=2), **options
    )


@pytest.fixture(scope="session")
def reference(pairs, tmp_path_factory):
    """The digests of an undisturbed run with one worker."""
    output = tmp_path_factory.mktemp("reference") / "out"
    _augmented(pairs, output, workers=WorkerOptions(num_workers=1)).run(progress=False)
    return small_pairs.digests(output)


def test_every_pair_is_there_exactly_copies_times(pairs, tmp_path):
    """In the right split, under the right keys."""
    report = _augmented(pairs, tmp_path / "out").run(progress=False)

    train, val = load(tmp_path / "out", "train"), load(tmp_path / "out", "val")

    assert sorted(train.keys()) == sorted(f"train{n:03d}#{copy}" for n in range(20) for copy in range(3))
    assert sorted(val.keys()) == [f"val{n:03d}" for n in range(4)]
    assert (report.num_rows, report.num_records, report.is_complete) == (24, 64, True)
    assert verify(tmp_path / "out").ok


def test_untransformed_samples_keep_their_original_bytes(pairs, tmp_path):
    """Nothing decodes or encodes them: the record holds the bytes of the file."""
    _job(pairs, tmp_path / "out").run(progress=False)

    files = {path.stem: path.read_bytes() for path in (pairs / "train").iterdir()}
    masks = {path.stem: path.read_bytes() for path in (pairs / "trainannot").iterdir()}
    found = {record["key"][0].decode(): record for record in _plain_records(tmp_path / "out", "train")}

    assert {key: record["image"][0] for key, record in found.items()} == files
    assert {key: record["mask"][0] for key, record in found.items()} == masks


def test_plain_tensorflow_reads_every_record(pairs, tmp_path):
    """The reading code imports nothing of datamat."""
    _augmented(pairs, tmp_path / "out").run(progress=False)
    code = """
import glob, sys, tensorflow as tf
spec = {name: tf.io.FixedLenFeature([], tf.string) for name in ("image", "mask", "key")}
keys = []
for record in tf.data.TFRecordDataset(sorted(glob.glob(sys.argv[1] + "/*.tfrecord"))):
    found = tf.io.parse_single_example(record, spec)
    assert tf.io.decode_image(found["image"]).shape == (24, 32, 3)
    assert tf.io.decode_png(found["mask"]).shape == (24, 32, 1)
    keys.append(found["key"].numpy().decode())
print(len(keys), len(set(keys)), "datamat" in sys.modules)
"""

    found = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], capture_output=True, text=True, check=True)

    assert found.stdout.split() == ["64", "64", "False"]


@pytest.mark.parametrize("num_workers", [2, 3, 7])
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_bytes_do_not_depend_on_the_workers(pairs, tmp_path, reference, num_workers, start_method):
    """Shards, offsets, index and manifest are the same for any number of workers and any start method."""
    options = WorkerOptions(num_workers=num_workers, start_method=start_method)

    _augmented(pairs, tmp_path / "out", workers=options).run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == reference


@pytest.mark.parametrize("make", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_any_executor_gives_the_same_bytes(pairs, tmp_path, reference, make):
    """Threads take turns with the one transform; the caller's random state does not change."""
    np.random.seed(3)
    before = np.random.get_state()[1].tobytes()
    transform = A.Compose([A.HorizontalFlip(p=0.5), A.GaussNoise(p=0.5), A.Lambda(image=_global_noise, p=1)])
    _job(pairs, tmp_path / "wanted", copies=3, transform=transform).run(progress=False)

    with make(3) as executor:
        report = _augmented(pairs, tmp_path / "out", executor=executor).run(progress=False)
        _job(pairs, tmp_path / "drawn", copies=3, transform=transform, executor=executor).run(progress=False)

    assert f"with {make.__name__}" in str(report)
    assert small_pairs.digests(tmp_path / "out") == reference
    assert small_pairs.digests(tmp_path / "drawn") == small_pairs.digests(tmp_path / "wanted")
    assert np.random.get_state()[1].tobytes() == before


def test_bytes_do_not_depend_on_where_or_when(pairs, tmp_path, reference):
    """Another copy of the source, another folder and another hash seed of Python change nothing."""
    script = (
        "import small_pairs, sys; from datamat import *; "
        "Materializer(small_pairs.Pairs(), sys.argv[1], sys.argv[2], copies={'train': 3}, "
        "transform=small_pairs.jitter, shards=ShardOptions(num_shards=2)).run(progress=False)"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[1]),
        "TZ": "Asia/Tokyo",
    }

    subprocess.run([sys.executable, "-c", script, pairs, "far/out"], check=True, cwd=tmp_path, env=environment)

    assert small_pairs.digests(tmp_path / "far" / "out") == reference


def test_one_shard_is_written_by_all_workers(tmp_path):
    """Parts of the shard come from several processes."""

    class Who(DatasetWriter):
        name = "who"
        features = Features({"pid": Scalar("int64"), "blob": Text()})

        def index(self, source):
            return [IndexRow(f"{n:03d}", fields={"blob": "x" * 200_000}) for n in range(60)]

        def read(self, row):
            (marks / str(os.getpid())).touch()
            while len(os.listdir(marks)) < 2:  # until another worker reads as well
                pass
            return {"pid": os.getpid(), "blob": row.fields["blob"][:10]}

    marks = tmp_path / "marks"
    marks.mkdir()
    source = tmp_path / "x"
    source.mkdir()
    plan = Materializer(Who, source, tmp_path / "out").plan()
    assert len(plan.shards) == 1
    Materializer(Who, source, tmp_path / "out", workers=WorkerOptions(num_workers=2)).run(progress=False)
    assert len({int(sample["pid"]) for sample in load(tmp_path / "out")}) == 2


def test_second_run_does_nothing_and_says_so(pairs, tmp_path):
    """It starts no worker and touches no file."""
    _augmented(pairs, tmp_path / "out").run(progress=False)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.is_file()}

    report = _augmented(pairs, tmp_path / "out").run(progress=False)

    assert report.did_nothing and report.num_workers == 0
    assert "nothing to do, 64 records" in str(report)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.is_file()}


def test_finished_directory_holds_nothing_else(pairs, tmp_path):
    """Parts, rows and temporary files are removed."""
    _augmented(pairs, tmp_path / "out").run(progress=False)

    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    left = sorted(path.name for path in (tmp_path / "out" / ".datamat").iterdir())

    assert left == ["inputs", "ledger.jsonl", "lock", "sidecars.json"]
    documents = {"README.md", "croissant.json", "dataset_info.json", "features.json", "mask.labels.txt"}
    assert {name for name in names if not name.startswith("pairs-")} == {
        ".datamat",
        "_index",
        "manifest.json",
    } | documents


def test_shards_with_wildcards_run_separately_and_end_complete(pairs, tmp_path, reference):
    """One call makes one shard, a second call the rest; the manifest appears with the last shard."""
    first = _augmented(pairs, tmp_path / "out", include="train-0000[0]").run(progress=False)

    assert not first.is_complete and not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(OutputError, match="run is not finished"):
        load(tmp_path / "out")

    second = _augmented(pairs, tmp_path / "out", exclude=["train-00000"]).run(progress=False)

    assert second.is_complete and second.num_shards_reused == 1
    assert small_pairs.digests(tmp_path / "out") == reference


KILLED = """
import small_pairs, sys
from datamat import Materializer, ShardOptions, WorkerOptions
job = Materializer(small_pairs.Pairs(), sys.argv[1], sys.argv[2], copies={"train": 3}, transform=small_pairs.jitter,
                   shards=ShardOptions(num_shards=2), workers=WorkerOptions(num_workers=int(sys.argv[3])))
job.run(progress=False)
"""


@pytest.mark.timeout(300)
def test_run_killed_at_random_moments_ends_with_the_same_bytes(tmp_path_factory, tmp_path, kill_rounds):
    """SIGKILL to all processes, again and again, with another number of workers each time."""
    source = small_pairs.make_pairs(tmp_path_factory.mktemp("more"), num_train=120, num_val=10)
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    command = [sys.executable, "-c", KILLED, source]
    subprocess.run([*command, tmp_path / "reference", "2"], check=True, env=environment)
    rng = np.random.default_rng(5)

    for round_number in range(kill_rounds):
        output = tmp_path / f"out{round_number}"
        kills = 0
        while not (output / "manifest.json").exists():
            process = subprocess.Popen(
                [*command, output, str(rng.integers(1, 4))], env=environment, start_new_session=True
            )
            wanted = int(rng.integers(1, 90)) if kills < 10 else 10**6
            while process.poll() is None and _num_receipts(output) < wanted:
                pass  # killed after so many parts, whatever the other workers are doing
            kills += process.returncode is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert small_pairs.digests(output) == small_pairs.digests(tmp_path / "reference")
        assert kills


def _num_receipts(output):
    # glob.glob, since Path.glob fails on folders that disappear while it lists
    return len(glob.glob(f"{output}/.datamat/parts/*/*.json")) + 30 * len(glob.glob(f"{output}/*.tfrecord"))


def test_rerun_after_a_kill_makes_only_unfinished_parts(pairs, tmp_path, reference):
    """Finished parts are reused: nothing writes their receipts again."""
    job = _augmented(pairs, tmp_path / "out")
    real = Materializer.write_part

    with pytest.raises(SampleError, match="stopped on purpose"):
        _stopping(pairs, tmp_path / "out", after=15).run(progress=False)
    assert not (tmp_path / "out" / "manifest.json").exists()
    report = job.run(progress=False)

    assert Materializer.write_part is real
    total = sum(len(shard.parts) for shard in job.plan().shards)
    assert report.num_parts_resumed >= 5
    assert report.num_parts_written == total - report.num_parts_resumed
    assert small_pairs.digests(tmp_path / "out") == reference


class _Stopping(small_pairs.Pairs):
    """Reads as Pairs does, and fails after so many samples."""

    stop_at: pathlib.Path | None = None


def _stopping(source, output, *, after):
    """The same job, but it fails at a late sample, when much is finished."""
    job = _augmented(source, output, workers=WorkerOptions(num_workers=1))
    read, done = job.writer.read, []

    def stop(row):
        done.append(row)
        if len(done) > after:
            raise RuntimeError("stopped on purpose")
        return read(row)

    job.writer.__dict__["read"] = stop
    small_pairs.count_as(job, _augmented(source, output))
    return job


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_torn_parts_are_made_again(pairs, tmp_path, reference, damage):
    """No torn part, receipt or growing shard, as a power cut leaves them, gets into the output."""
    with pytest.raises(SampleError):
        _stopping(pairs, tmp_path / "out", after=15).run(progress=False)
    files = sorted(path for path in (tmp_path / "out" / ".datamat").rglob("*") if path.is_file())
    for path in files:
        data = path.read_bytes()
        if damage == "truncate":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "flip" and data:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif damage == "remove" and path.suffix != ".json":
            path.unlink()

    _augmented(pairs, tmp_path / "out").run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == reference


def test_changed_file_rebuilds_its_shard_alone(tmp_path):
    """The files of the others are the same ones, not copies."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=100)
    options = {"shards": ShardOptions(num_shards=4)}
    _job(source, tmp_path / "out", **options).run(progress=False)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tfrecord")}
    shutil.copyfile(source / "train" / "train008.png", source / "train" / "train007.png")

    report = _job(source, tmp_path / "out", **options).run(progress=False)

    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tfrecord")}
    assert report.num_shards_written == 1
    assert len([name for name in after if after[name] != before[name]]) == 1


def test_another_number_of_shards_leaves_no_old_ones(pairs, tmp_path):
    """Files of the old plan are removed before the manifest names the new ones."""
    _job(pairs, tmp_path / "out", shards=ShardOptions(num_shards=4)).run(progress=False)

    _job(pairs, tmp_path / "out", shards=ShardOptions(num_shards=2)).run(progress=False)

    assert sorted(path.name for path in (tmp_path / "out").glob("*.tfrecord")) == [
        f"pairs-{split}-0000{n}-of-00002.tfrecord" for split in ("train", "val") for n in range(2)
    ]
    assert verify(tmp_path / "out").ok


def test_failing_sample_is_named_with_its_file(pairs, tmp_path):
    """The error gives key, line and file; the original exception is its cause."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train007":
                raise ValueError("cannot make sense of it")
            return super().read(row)

    with pytest.raises(
        SampleError,
        match=r"'train007': ValueError: cannot make sense of it \(in read, test_materializer.py:\d+\) .*train007.png",
    ) as caught:
        Materializer(Failing(), pairs, tmp_path / "out").run(progress=False)

    assert caught.value.key == "train007"
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_row_that_kills_its_worker_twice_ends_the_run(pairs, tmp_path):
    """The error gives key, signal and peak memory; the run never hangs."""

    class Deadly(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train007":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(row)

    with pytest.raises(SampleError, match=r"'train007': WorkerDied: .* signal 9 \(SIGKILL.* peak memory \d+") as caught:
        Materializer(Deadly(), pairs, tmp_path / "out").run(progress=False)

    assert isinstance(caught.value.__cause__, WorkerDied)


def test_worker_that_dies_once_costs_nothing(pairs, tmp_path, reference):
    """A fresh worker makes the part again, with the same bytes."""
    marker = tmp_path / "died"

    job = _augmented(pairs, tmp_path / "out")
    read = job.writer.read

    def once(row):
        if row.key == "train007" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return read(row)

    job.writer.__dict__["read"] = once
    small_pairs.count_as(job, _augmented(pairs, tmp_path))
    job.run(progress=False)

    assert marker.exists()
    assert small_pairs.digests(tmp_path / "out") == reference


def test_schema_mismatch_names_field_declared_and_found(pairs, tmp_path):
    """As in the first five minutes of anybody's own writer."""

    class Wrong(small_pairs.Pairs):
        def read(self, row):
            return {"image": np.zeros((24, 32, 3), np.float32), "mask": np.zeros((24, 32), np.uint8)}

    with pytest.raises(
        SampleError, match=r"field 'image' is declared uint8 \(24, 32, 3\) but the sample holds float32 "
    ):
        Materializer(Wrong(), pairs, tmp_path / "out").run(progress=False)


def test_key_in_a_sample_must_be_that_of_its_row(tmp_path):
    """Keys come from the index: a sample that holds another one is refused, never silently stored."""
    with pytest.raises(SampleError, match=r"returned the key 'k0', but keys come from the index, .* '00000000'"):
        materialize(lambda i: {"key": f"k{i}", "value": i}, range(3), tmp_path / "other", progress=False)

    rows = [{"key": i, "value": 10 * i} for i in range(3)]
    materialize(dict, rows, tmp_path / "same", key="key", progress=False)

    assert sorted(load(tmp_path / "same").keys()) == ["0", "1", "2"]


def test_pictures_of_pillow_and_tensors_are_arrays(tmp_path):
    """As first examples return them; features are inferred from the arrays."""
    pillow, torch = pytest.importorskip("PIL.Image"), pytest.importorskip("torch")
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)

    def sample(number):
        return {
            "image": pillow.fromarray(pixels + number),
            "x": torch.full((2,), number / 2),
            "y": torch.tensor(number),
        }

    materialize(sample, range(3), tmp_path / "out", progress=False)

    data = load(tmp_path / "out")
    assert isinstance(data.features["image"], Image)
    for number in range(3):
        found = data[f"{number:08d}"]
        assert np.array_equal(found["image"], pixels + number)
        assert (found["x"].tolist(), int(found["y"])) == ([number / 2] * 2, number)


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

    with pytest.raises(OptionError, match=message):
        Materializer(Deep(), pairs, tmp_path / "out", transform=flip, untouched=("code",))
    with pytest.raises(OptionError, match=message):
        materialize(
            lambda n: {"image": np.zeros((4, 4, 3), np.uint8), "depth": np.zeros((4, 4), np.float32)},
            range(3),
            tmp_path / "out",
            features=Features({"image": Image(), "depth": Tensor((4, 4), "float32")}),
            transform=flip,
            progress=False,
        )
    with pytest.raises(OptionError, match=r"untouched is 'code'; want a tuple of fields, as in untouched=\('code',\)"):
        Materializer(Deep(), pairs, tmp_path / "out", transform=flip, untouched="code")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_array_moves_with_its_image_in_every_worker(pairs, tmp_path, start_method):
    """The pipeline says which ones move; a field declared untouched does not."""
    pipeline = A.Compose([A.HorizontalFlip(p=0.5)], additional_targets={"depth": "mask"})
    workers = WorkerOptions(num_workers=2, start_method=start_method)

    Materializer(
        Deep(), pairs, tmp_path / "out", transform=pipeline, copies={"train": 2}, untouched=("code",), workers=workers
    ).run(progress=False)

    plain = {path.stem: decode_image(path.read_bytes()) for path in (pairs / "train").iterdir()}
    flips = set()
    for sample in load(tmp_path / "out", "train"):
        is_flipped = bool(sample["depth"][0, 0] == 31)
        image = plain[sample["key"].partition("#")[0]]
        assert np.array_equal(sample["image"], image[:, ::-1] if is_flipped else image)
        assert sample["code"].tolist() == [0, 1, 2]
        flips.add(is_flipped)
    assert flips == {True, False}


def test_untouched_counts_where_it_decides_bytes(pairs, tmp_path):
    """Another mask that stays in place gives another output; a name that changes nothing rebuilds nothing."""
    flip = A.Compose([A.HorizontalFlip(p=1)])
    run = functools.partial(_job, pairs, tmp_path / "out", transform=flip, copies={"train": 2})
    run().run(progress=False)

    status = run(untouched=("mask",)).status()
    known = A.Compose([A.HorizontalFlip(p=1)], additional_targets={"depth": "mask"})
    deep = functools.partial(Materializer, Deep(), pairs, tmp_path / "deep", transform=known)

    assert "transform changed" in str(status)
    assert run().status().is_complete
    digests = {deep(untouched=names).job.digests().transform for names in (("code",), ("code", "key"))}
    assert len(digests) == 1
    assert deep(untouched=("code", "mask")).job.digests().transform not in digests


def test_copies_are_distinct_and_image_and_mask_stay_together(pairs, tmp_path):
    """This holds for albumentations' geometric and colour transforms."""
    transform = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), A.RandomBrightnessContrast(p=1)])
    _job(pairs, tmp_path / "out", copies={"train": 4}, transform=transform).run(progress=False)

    train = load(tmp_path / "out", "train")
    flips = {}
    for n in range(20):
        copies = [train[f"train{n:03d}#{copy}"] for copy in range(4)]
        assert len({sample["image"].tobytes() for sample in copies}) == 4
        for sample in copies:
            # red was 60 x class id: whatever the brightness, pixels of one id have one red
            reds = [set(sample["image"][..., 0][sample["mask"] == number].tolist()) for number in range(4)]
            assert all(len(found) <= 1 for found in reds)
            flips.setdefault(n, set()).add(sample["mask"].tobytes())
    assert max(map(len, flips.values())) > 1


def test_copies_are_distinct_though_the_transform_may_do_nothing(pairs, tmp_path):
    """A copy that equals an earlier one is drawn again, from a stream of its own."""
    transform = A.Compose([A.HorizontalFlip(p=0.1), A.RandomBrightnessContrast(p=0.3)])
    for workers in (1, 2):
        options = WorkerOptions(num_workers=workers)
        _job(pairs, tmp_path / f"out{workers}", copies=3, transform=transform, workers=options).run(progress=False)

    train = load(tmp_path / "out1", "train")
    drawn = {n: {train[f"train{n:03d}#{copy}"]["image"].tobytes() for copy in range(3)} for n in range(20)}

    assert all(len(copies) == 3 for copies in drawn.values())
    assert small_pairs.digests(tmp_path / "out1") == small_pairs.digests(tmp_path / "out2")


def test_albumentations_gives_the_same_bytes_for_any_workers(pairs, tmp_path):
    """Each copy sets albumentations' own generators and the global ones of numpy and random."""
    for workers in (1, 3):
        transform = A.Compose([A.Rotate(limit=20, p=0.7), A.GaussNoise(p=0.5), A.Lambda(image=_global_noise, p=1)])
        _job(
            pairs, tmp_path / f"out{workers}", copies=2, transform=transform, workers=WorkerOptions(num_workers=workers)
        ).run(progress=False)

    assert small_pairs.digests(tmp_path / "out1") == small_pairs.digests(tmp_path / "out3")


def _global_noise(image, **_):
    return np.clip(image.astype(int) + np.random.randint(-9, 9, image.shape), 0, 255).astype(np.uint8)


def test_transform_that_gives_several_samples_is_readable_by_key(pairs, tmp_path):
    """Keys are KEY#COPY-NUMBER; the index knows where rows of different length begin."""

    def crops(sample, rng):
        for _ in range(1 + int(rng.integers(2))):
            yield {**sample, "image": np.roll(sample["image"], int(rng.integers(9)), 1)}

    report = _job(pairs, tmp_path / "out", copies=2, transform=crops).run(progress=False)
    everything = load(tmp_path / "out")

    keys = everything.keys()
    assert len(keys) == len(set(keys)) == report.num_records > 48
    assert any("-" in key for key in keys)
    assert [everything[key]["key"] for key in keys[::7]] == keys[::7]


def test_nondeterministic_transform_is_refused(pairs, tmp_path):
    """One that draws from a source of its own would give other bytes in every run."""
    private = np.random.default_rng()

    def noisy(sample, rng):
        return {**sample, "image": sample["image"] ^ private.integers(0, 2, sample["image"].shape, np.uint8)}

    with pytest.raises(OptionError, match="noisy"):
        _job(pairs, tmp_path / "out", copies=2, transform=noisy).run(progress=False)


def test_parent_keeps_its_state(pairs, tmp_path):
    """Random state, affinity, environment, signal handlers and threads are the same after a run."""
    import random

    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            os.sched_getaffinity(0),
            dict(os.environ),
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            threading.active_count(),
            os.getcwd(),
        )

    before = state()
    _augmented(pairs, tmp_path / "out").run(progress=False)

    assert state() == before


def test_nothing_is_printed_without_progress(pairs, tmp_path, capfd):
    """All messages are log records."""
    _augmented(pairs, tmp_path / "out").run(progress=False)

    assert capfd.readouterr() == ("", "")


def test_progress_leaves_no_thread(pairs, tmp_path):
    """A thread that outlived its run would keep later ones from starting by fork."""
    before = threading.enumerate()

    Materializer(small_pairs.Pairs(), pairs, tmp_path / "out").run()

    assert threading.enumerate() == before


def test_run_shows_one_summary_on_stderr(pairs, tmp_path, capfd):
    """At the end one line: records, bytes, time, workers and how busy they were."""
    _augmented(pairs, tmp_path / "out").run()

    out, err = capfd.readouterr()

    assert out == ""
    assert err.count("complete: 64 records") == 1 and len(err.splitlines()) == 1
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

    Materializer(Talking(), pairs, tmp_path / "out").run(progress=False)

    assert {f"read train{n:03d}" for n in range(20)} <= set(caplog.messages)


def test_second_run_on_one_output_is_refused(pairs, tmp_path):
    """The error names the process of the first."""
    (tmp_path / "out" / ".datamat").mkdir(parents=True)
    with locked(tmp_path / "out" / ".datamat" / "lock"), pytest.raises(OutputLockedError, match=f"{os.getpid()}"):
        _job(pairs, tmp_path / "out").run(progress=False)


def test_gzip_shards_read_back(pairs, tmp_path):
    """The same calls read `tfrecord.gz`."""
    _augmented(pairs, tmp_path / "gz", format="tfrecord.gz").run(progress=False)

    found = load(tmp_path / "gz", "train")

    assert verify(tmp_path / "gz").ok
    assert len(found) == 60 and found["train003#1"]["key"] == "train003#1"


def test_function_needs_no_class(tmp_path):
    """Features are inferred from the first sample, and no sample is lost."""

    def sample(number):
        return {
            "square": number * number,
            "half": number / 2,
            "name": f"n{number}",
            "grid": np.full((2, 3), number, np.uint16),
        }

    report = materialize(sample, range(50), tmp_path / "out", progress=False)
    found = load(tmp_path / "out")

    assert report.num_records == len(found) == 50
    assert sorted(int(item["square"]) for item in found) == sorted(n * n for n in range(50))
    assert found["00000007"]["half"] == 3.5 and found["00000007"]["grid"].dtype == np.uint16
    with pytest.raises(OptionError, match="inputs is empty"):
        materialize(sample, [], tmp_path / "none")


class Numbers:
    """A dataset as torch has them: a length, and items by position."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        self.__dict__.setdefault("asked", set()).add(number)
        return number


def test_materialize_asks_a_dataset_for_single_items(tmp_path):
    """The caller's process loads no item; anything that is no dataset is iterated."""
    numbers = Numbers()
    options = {"progress": False, "workers": WorkerOptions(num_workers=1, start_method="fork")}

    materialize(squared, numbers, tmp_path / "out", **options)
    materialize(squared, iter(range(50)), tmp_path / "same", **options)
    materialize(squared, np.arange(50), tmp_path / "array", **options)

    assert not hasattr(numbers, "asked")
    assert [int(sample["square"]) for sample in load(tmp_path / "out")] == [
        int(sample["square"]) for sample in load(tmp_path / "same")
    ]
    assert len(load(tmp_path / "array")) == 50


def squared(number):
    return {"square": int(number) ** 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": 0}, "copies is 0"),
        ({"copies": {"train": True}}, "copies is"),
        ({"copies": {"nowhere": 2}}, "copies names the split 'nowhere'; the index has train, val"),
        ({"splits": {"train": 0.5}}, "add up to 0.5"),
        ({"seed": -1}, "seed is -1"),
        ({"format": "xml"}, "no format 'xml'"),
        ({"include": "nothing*"}, "names no shard"),
        ({"workers": 4}, r"workers is 4; want something like WorkerOptions\(num_workers=4\)"),
        ({"shards": 8}, r"shards is 8; want something like ShardOptions\(num_shards=8\)"),
        ({"errors": 0.1}, r"errors is 0.1; want something like ErrorPolicy"),
    ],
)
def test_options_are_checked(pairs, tmp_path, options, message):
    """Each error gives what was found and what is wanted."""
    with pytest.raises(OptionError, match=message):
        _job(pairs, tmp_path / "out", **options).run(progress=False)


def test_run_warns_where_ranks_do_not_share_evenly(pairs, tmp_path, caplog):
    """Before the work where the plan shows it, at the end where rows failed. Even shares give no warning."""

    class Failing(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train003":
                raise OSError("gone")
            return super().read(row)

    def warned(writer, ranks):
        caplog.clear()
        output, options = tmp_path / f"{writer.__name__}{ranks}", ShardOptions(ranks=ranks)
        Materializer(writer(), pairs, output, shards=options, errors="skip").run(progress=False)
        return [record.getMessage() for record in caplog.records if "ranks" in record.getMessage()]

    assert warned(small_pairs.Pairs, 4) == []
    train, val = warned(small_pairs.Pairs, 3)
    assert train.startswith("split 'train' gives its 3 ranks 6 to 7 records: 20 rows do not divide by 3")
    assert val.startswith("split 'val' gives its 3 ranks 1 to 2 records: 4 rows")
    (message,) = warned(Failing, 4)
    assert message.startswith("split 'train' gives its 4 ranks 4 to 5 records: rows failed")


def test_urls_and_odd_outputs_are_refused(pairs, tmp_path):
    """A URL that is for reading only, a file in the way, and a link planted at the work folder are refused."""
    with pytest.raises(OptionError, match="can be read, not written"):
        _job(pairs, "https://host/out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be made"):
        _job(pairs, tmp_path / "file").run(progress=False)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".datamat").symlink_to(tmp_path)
    with pytest.raises(OutputError, match="is a link"):
        _job(pairs, tmp_path / "linked").run(progress=False)


def test_bad_source_leaves_no_manifest(tmp_path):
    """Missing files are found before any worker starts."""
    source = small_pairs.make_pairs(tmp_path / "source")
    (source / "train" / "train003.png").unlink()

    with pytest.raises(SourceError, match=r"train.txt:4: image 'train/train003.png': no such file"):
        _job(source, tmp_path / "out").run(progress=False)


def test_manifest_describes_what_made_it(pairs, tmp_path):
    """It has features, splits, copies, checksums and codecs, but no time, host or worker."""
    _augmented(pairs, tmp_path / "out").run(progress=False)

    text = (tmp_path / "out" / "manifest.json").read_text()
    manifest = Manifest.read(tmp_path / "out")

    assert manifest.features == small_pairs.Pairs.features and manifest.copies == {"train": 3, "val": 1}
    assert json.loads(text)["splits"]["train"] == {
        "num_shards": 2,
        "num_rows": 20,
        "num_failed": 0,
        "num_records": 60,
    }
    assert "hostname" not in text and str(os.getpid()) not in text


def _plain_records(folder, split):
    from datamat.formats import get_format

    for path in sorted(folder.glob(f"*-{split}-*.tfrecord")):
        yield from get_format("tfrecord").read(path)


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_tilde_means_the_home_folder(tmp_path, monkeypatch, kind):
    """Every argument that names a directory expands it; once, a folder called `~` appeared in the current one."""
    home = tmp_path / "home"
    source = small_pairs.make_pairs(home / "source", 2, 1)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    workers = WorkerOptions(num_workers=1)

    Materializer(small_pairs.Pairs(), kind("~/source"), kind("~/out"), workers=workers).run(progress=False)
    convert(kind("~/out"), kind("~/converted"), format="parquet", workers=workers, progress=False)
    materialize(lambda n: {"n": n}, range(3), kind("~/numbers"), workers=workers, progress=False)

    assert {path.name for path in home.iterdir()} == {"source", "out", "converted", "numbers"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(load(kind("~/out"))) == len(load(home / "converted")) == 3
    assert verify(kind("~/out")).ok and Manifest.read(kind("~/out")).name == "pairs"
    assert Materializer(small_pairs.Pairs(), source, home / "out", workers=workers).run(progress=False).did_nothing


def test_home_folder_of_nobody_is_refused(tmp_path, monkeypatch):
    """No folder of that name is made."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match=r"'~nobody-of-that-name/out': there is no such home folder; give the whole"):
        Materializer(small_pairs.Pairs(), tmp_path, "~nobody-of-that-name/out")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("num_workers", "workers=WorkerOptions(num_workers=...)"),
        ("num_proc", "workers=WorkerOptions(num_workers=...)"),  # of Hugging Face's `map`
        ("chunk_bytes", "shards=ShardOptions(shard_bytes=...)"),  # of litdata's `optimize`
        ("max_errors", "errors=ErrorPolicy(max_errors=...)"),
        ("deadline", "run(deadline=...)"),
    ],
)
def test_option_that_belongs_elsewhere_is_shown_there(tmp_path, name, where):
    """People type the names of other libraries, or forget the object around an option."""
    with pytest.raises(OptionError, match=re.escape(f"Materializer has no option {name!r}; write {where}")):
        Materializer("files", tmp_path, tmp_path / "out", **{name: 2})


def test_option_that_is_nowhere_is_pythons_error(tmp_path):
    """And help, completion and pages show the options by name."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        Materializer("files", tmp_path, tmp_path / "out", nonsense=2)
    assert {"format", "workers", "copies"} <= inspect.signature(Materializer).parameters.keys()
