"""Messages that no other test expects, by the folder that says them; each is provoked as a user would meet it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import gzip
import importlib
import io
import itertools
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import threading
import time
import types

import numpy as np
import pytest
import xxhash
from pyarrow.compute import field

import datamat
from datamat import (
    DatasetWriter,
    ErrorPolicy,
    Feature,
    Features,
    IndexRow,
    Manifest,
    Materializer,
    Optional,
    PathosExecutor,
    Scalar,
    Sequence,
    ShardOptions,
    Tensor,
    Text,
    WorkerOptions,
    load,
    register_feature,
)
from datamat.cli import main
from datamat.codecs import files
from datamat.directory import index_files
from datamat.directory.files import check_lock, locked
from datamat.directory.ledger import Ledger, read_ledger
from datamat.directory.provenance import find_provenance
from datamat.directory.sidecars.indexes import tar_index
from datamat.directory.stores import ObjectStore, StoredObject, _ranges
from datamat.errors import (
    CorruptDataError,
    FingerprintError,
    IncompleteRunError,
    InputError,
    MissingDependencyError,
    OptionError,
    OutputError,
    OutputLockedError,
    ParallelError,
    SchemaError,
    SourceError,
    UnpicklableError,
)
from datamat.features import RaggedColumn
from datamat.features.statistics import Statistics
from datamat.formats import Offsets, get_format
from datamat.formats.io import RangeReader, read_spans
from datamat.formats.webdataset import member
from datamat.parallel import engines
from datamat.run import module_state, run, slices

ONE = WorkerOptions(num_workers=1)


class Rows(DatasetWriter):
    """A writer of the rows that it is given; a job of two shards."""

    name = "rows"

    def __init__(self, rows=None, features=None, made=None):
        self.rows = [IndexRow(f"r{number}", "train", {}) for number in range(4)] if rows is None else rows
        self.features = features or Features({"x": Scalar("int64")})
        self.made = made or {"x": 1}

    def index(self, source):
        """Return the rows."""
        del source
        return self.rows

    def read(self, row):
        """Return what is to be stored."""
        del row
        return self.made


def job(output, *, rows=None, features=None, made=None, **options):
    """Return a job for one process."""
    options = {"shards": ShardOptions(num_shards=2), "workers": ONE} | options
    return Materializer(Rows(rows, features, made), None, output, **options)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished directory."""
    folder = tmp_path_factory.mktemp("template") / "out"
    job(folder).run(progress=False)
    return folder


@pytest.fixture
def output(template, tmp_path):
    """A copy of it that a test may damage."""
    return shutil.copytree(template, tmp_path / "out")


def raises(kind, *words):
    """Expect an error whose message holds the words."""
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


def shard_of(folder):
    """Return the first shard."""
    return min(folder.glob("rows-*.tfrecord"))


# ---------------------------------------------------------------- the command line


def test_interval_of_status(output, capsys):
    """Zero would keep a core busy."""
    assert main(["status", str(output), "--watch", "--interval", "0"]) == 2

    assert "--interval is 0; want a positive number of seconds" in capsys.readouterr().err


def test_file_of_arguments_that_cannot_be_read(tmp_path, capsys):
    """A folder, here."""
    (tmp_path / "job.toml").mkdir()

    assert main(["plan", str(tmp_path / "job.toml")]) == 2

    assert "cannot be read (Is a directory); want a TOML file of arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("gone", r"--storage-options: gone cannot be read \([^;]+\); want a JSON object, such as"),
        ("{", r"--storage-options is no JSON \([^;]+\); want a JSON object, such as"),
        ("list", r"--storage-options holds a list; want a JSON object, such as"),
    ],
)
def test_options_of_a_url_that_are_no_object(tmp_path, monkeypatch, capsys, given, told):
    """Before any request."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("list").write_text("[]")

    assert main(["verify", "s3://nowhere/out", "--storage-options", given]) == 2

    assert re.search(told, capsys.readouterr().err)


# ---------------------------------------------------------------- codecs


def test_file_that_is_written_to_while_it_is_read(tmp_path, monkeypatch):
    """It has as many bytes as before, but perhaps others."""
    (tmp_path / "a.png").write_bytes(b"data")
    read_to = files._read_to

    def touched(descriptor, size):
        os.utime(tmp_path / "a.png", ns=(1, 1))
        return read_to(descriptor, size)

    monkeypatch.setattr(files, "_read_to", touched)

    with raises(InputError, "it was written to while it was read; want a finished file; run again when nothing"):
        files.read_file(tmp_path / "a.png")


# ---------------------------------------------------------------- directory


def test_work_folder_that_is_a_link(tmp_path):
    """What is written there would land elsewhere."""
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/.datamat").symlink_to(tmp_path / "elsewhere")

    with raises(OutputError, "is a link, which datamat does not write through: remove it"):
        job(tmp_path / "out").run(progress=False)


def test_shard_that_is_a_pipe(output):
    """It would never end."""
    shard_of(output).unlink()
    os.mkfifo(min([output / info.file for info in Manifest.read(output).shards]))

    with raises(CorruptDataError, "is a pipe, socket or device, not a regular file; run repair() to rebuild it"):
        datamat.load(output)[0]


def test_output_that_vanishes_during_a_run(tmp_path):
    """Someone else removes it."""

    def remove(item):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return {"x": item}

    options = {"features": {"x": Scalar("int64")}, "workers": ONE, "progress": False}
    with raises(OutputError, "out was removed while this run wrote to it: No such file", "; run again to make it from"):
        datamat.materialize(remove, range(3), tmp_path / "out", **options)


def test_output_that_vanishes_between_parts(tmp_path):
    """The process that leads the run notices it by its lock."""
    (tmp_path / "out/.datamat").mkdir(parents=True)

    with locked(tmp_path / "out/.datamat/lock"):
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(OutputError, match=r"was removed while this run \(process [^)]+\) wrote to it: "):
            check_lock(tmp_path / "out/manifest.json")


def test_ledger_that_is_a_pipe(tmp_path):
    """Neither written nor read."""
    os.mkfifo(tmp_path / "ledger.jsonl")

    with raises(OutputError, "is not a regular file; datamat keeps its ledger there: remove it"):
        Ledger(tmp_path / "ledger.jsonl")
    with raises(CorruptDataError, "ledger.jsonl is not a regular file; want a ledger that datamat wrote"):
        list(read_ledger(tmp_path / "ledger.jsonl"))


def test_ledger_that_is_a_folder(tmp_path):
    """No run can say there what it does."""
    (tmp_path / "out/.datamat/ledger.jsonl").mkdir(parents=True)

    with raises(OutputError, "ledger.jsonl cannot be written: Is a directory; make room or give a folder that can be"):
        job(tmp_path / "out").run(progress=False)


def test_manifest_that_cannot_be_read():
    """The disk refuses its name."""
    with raises(OutputError, "cannot be read: File name too long; let this process read it"):
        Manifest.read("x" * 300)


def test_shard_in_place_of_its_directory(tmp_path):
    """Other libraries open single files."""
    (tmp_path / "one.tfrecord").touch()

    with raises(OutputError, "one.tfrecord is a file; give the directory that holds manifest.json; `datamat inspect`"):
        load(tmp_path / "one.tfrecord")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda value: value["shards"][0].update(num_rows=-1),
            r"shard entry [^:]+: [^ ]+ is not as datamat writes it",
        ),
        (lambda value: value.update(datamat_manifest=2), r"has version 2; this datamat reads 1"),
    ],
)
def test_manifest_of_another_hand(output, change, told):
    """A digest of its own does not make it right."""
    value = json.loads((output / "manifest.json").read_text())
    change(value)
    (output / "manifest.json").write_text(json.dumps(value))

    with pytest.raises(CorruptDataError, match=told):
        Manifest.read(output, strict=False)


def test_manifest_that_is_no_json(output):
    """A disk that was full has cut it off."""
    (output / "manifest.json").write_text('{"datamat_manifest": 1,')

    with raises(CorruptDataError, "restore it, or run the job again to rebuild it"):
        Manifest.read(output)


def test_copy_that_a_row_does_not_have(tmp_path):
    """Copies count from 0."""
    job(tmp_path / "out", copies=2, transform=keep).run(progress=False)

    with raises(OptionError, "has no record 'r1#7'; row 'r1' has 2, from 0"):
        find_provenance(tmp_path / "out", None, "r1#7")


def keep(sample, rng):
    """Return the sample."""
    del rng
    return sample


def test_url_that_fsspec_does_not_know(tmp_path):
    """It says so itself."""
    with raises(OptionError, "nowhere://x", "; want a URL and storage_options that fsspec takes"):
        datamat.load("nowhere://x/y", cache_dir=tmp_path)


ROWS = [
    ([], "is empty; check the path, and that the writer's index finds files there"),
    ([IndexRow("a", "tr/in", {})], "split 'tr/in'; want letters, digits and _, as in 'train'"),
    ([IndexRow("a", "train", {"f": object()})], "of one kind in every row, or None where a row has none"),
]


@pytest.mark.parametrize(("rows", "told"), ROWS, ids=["empty", "split", "field"])
def test_index_that_no_run_can_use(tmp_path, rows, told):
    """Before anything is read."""
    with raises(SourceError, told):
        job(tmp_path / "out", rows=rows).run(progress=False)


def test_index_file_that_says_it_is_too_large(output, monkeypatch):
    """Nothing of it is read."""
    monkeypatch.setattr(index_files, "_LEAST_BUDGET", 20)
    monkeypatch.setattr(index_files, "_MOST_BYTES_PER_ROW", 1)

    with raises(CorruptDataError, "its 4 rows take more than 20 bytes of memory"):
        index_files.read_index(output, "_index/train.index")


def test_index_file_that_unfolds_to_more_than_it_says(tmp_path, monkeypatch):
    """One long text, and that every row has it."""
    rows = [IndexRow(f"r{number}", "train", {"text": "long " * 200}) for number in range(100)]
    job(tmp_path / "out", rows=rows).run(progress=False)
    monkeypatch.setattr(index_files, "_LEAST_BUDGET", 50_000)
    monkeypatch.setattr(index_files, "_MOST_BYTES_PER_ROW", 1)

    with raises(CorruptDataError, "its rows take more than 50000 bytes of memory"):
        index_files.read_index(tmp_path / "out", "_index/train.index")


def test_inspected_file_that_is_damaged_inside_a_compression(tmp_path):
    """The place is one in what it inflates to."""
    job(tmp_path / "out").run(progress=False)
    damaged = bytearray(shard_of(tmp_path / "out").read_bytes())
    damaged[20] ^= 1
    (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(bytes(damaged)))

    assert "at byte 0 once inflated: " in str(datamat.inspect(tmp_path / "a.tfrecord.gz"))


def test_archive_that_is_cut_off_has_no_index_for_wids(tmp_path):
    """It would list a member that nobody can read."""
    (tmp_path / "a.tar").write_bytes(b"".join(member("one.txt", bytes(3000)))[:1000])

    with raises(CorruptDataError, "a.tar: the archive ends inside the member 'one.txt'; run verify"):
        tar_index(tmp_path / "a.tar")


class Precondition(OSError):
    """The answer of a store whose object is another than it was."""

    status = 412


def test_object_that_somebody_else_has_written(tmp_path):
    """The store refuses ours, and has another."""
    (tmp_path / "a").write_bytes(b"abc")

    def refuse(call, condition):
        raise Precondition

    store = types.SimpleNamespace(
        _conditional=refuse,
        _other_there=lambda *found: ObjectStore._other_there(store, *found),
        head=lambda _: StoredObject(5, "identity", "other"),
        url_of=lambda name: f"s3://bucket/{name}",
    )

    told = "where 3 bytes with the checksum sum belong; something else writes there: end that, and run again"
    with raises(OutputError, "s3://bucket/a holds ", told):
        ObjectStore._upload_s3(store, tmp_path / "a", "a", _ranges(3, ()), "sum", None, None)


# ---------------------------------------------------------------- features


class Odd(Feature):
    """A feature of somebody else: it is no dataclass, and encodes numbers of another type than it says."""

    type_name = "rare_errors_odd"

    def columns(self, name):
        """Store numbers."""
        return {name: "int64"}

    def encode(self, name, value):
        """Give numbers of another type."""
        return {name: np.zeros(1, np.float32)}

    def encode_block(self, name, values):
        """Give numbers of another type."""
        return {name: np.zeros(len(values), np.float32)}

    def decode(self, name, columns):
        """Return the number."""
        return columns[name][0]

    def value_type(self):
        """Return what it is."""
        return "int64", ()


def ragged(values, lengths):
    """Return the column of a block of records."""
    return RaggedColumn(np.asarray(values), np.asarray(lengths, np.int64))


BLOCKS = [
    ({"x": Scalar("int64")}, {"y": np.zeros(2, np.int64)}, "the columns of a block do not hold what is declared: 'x'"),
    ({"x": Tensor((None, 2), "int64")}, {"x": ragged([1, 2, 3], [3])}, "number of values that is no multiple of 2"),
    ({"x": Tensor((None,), "float16")}, {"x": [b"abc"]}, "a record holds a number of bytes that is no multiple of 2"),
    ({"x": Optional(Tensor((2,), "int64"))}, {"x": ragged([1, 2, 3], [3])}, "of values that is no multiple of 2"),
    ({"x": Optional(Scalar("int64"))}, {"x": ragged([1, 2], [2])}, "a record holds several values, where one may be"),
]


@pytest.mark.parametrize(("features", "columns", "told"), BLOCKS, ids=["name", "values", "bytes", "items", "several"])
def test_block_of_records_that_is_not_as_declared(features, columns, told):
    """Written with other features, or damaged where no checksum is."""
    with raises(SchemaError, told):
        Features(features).decode_block({"key": [b"a"], **columns})


def test_feature_of_others_that_cannot_be_declared():
    """It has neither fields nor arguments."""
    with raises(SchemaError, "Odd is not a dataclass; make it one, or write arguments and from_arguments"):
        Odd().to_json()


def test_dict_with_other_fields_than_declared(tmp_path):
    """Such dicts differ from sample to sample, or are misspelt."""
    with raises(datamat.SampleError, "make read return exactly the declared fields, or declare Json() for dicts that"):
        job(tmp_path / "out", features=Features({"x": {"a": Scalar("int64")}}), made={"x": {"b": 1}}).run(
            progress=False
        )


def test_feature_that_encodes_something_else():
    """Only some formats could store it."""
    features = Features({"x": Odd()})

    with raises(SchemaError, "field 'x': encode of ", "gives float32 (1,) for the column 'x'; want a 1-D int64 array"):
        features.encode({"key": "a", "x": 1})
    with raises(SchemaError, "field 'x': encode_block of ", "gives float32 (2,) for the column 'x'; want int64 (n,)"):
        features.encode_block({"key": ["a", "b"], "x": [1, 2]})


def test_feature_of_two_packages(tmp_path, monkeypatch):
    """Which one is meant cannot be known."""
    for name in ("one", "other"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (tmp_path / f"{name}-1.dist-info/entry_points.txt").write_text(
            f"[datamat.features]\nrare_errors_twice = {name}:Twice\n"
        )
    monkeypatch.syspath_prepend(tmp_path)

    with raises(
        SchemaError, "several installed packages have a feature 'rare_errors_twice': one:Twice", "remove all but"
    ):
        Features.from_json({"x": {"type": "rare_errors_twice"}})


def test_list_that_marks_what_is_missing_twice():
    """Both would have the column `present`."""
    with raises(SchemaError, "Sequence: ", "marks what is missing in itself; declare Json()"):
        Sequence(Optional(Sequence(Optional(Scalar("int64")))))


def test_statistics_that_datamat_did_not_write():
    """Somebody has put a line into the manifest."""
    digest = xxhash.xxh3_64_hexdigest(b"0\nnumbers x y 1")

    with raises(CorruptDataError, "statistics 'numbers x y 1'", "; datamat did not write them"):
        Statistics.from_lines([f"records 0 {digest}", "numbers x y 1"])


def test_sound_without_its_package(monkeypatch):
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "soundfile", None)

    with raises(
        MissingDependencyError, "Audio needs the package soundfile; install it with: pip install 'datamat[audio]'"
    ):
        Features({"x": datamat.Audio()}).encode({"key": "a", "x": b"RIFF"})


def test_sound_that_is_cut_short():
    """The players of others would play what is there."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1000, np.float32), 8000, format="WAV")
    features = Features({"x": datamat.Audio()})

    with pytest.raises(
        InputError, match=r"holds a WAV file that is cut short: [^;]+; want a whole WAV, FLAC, MP3 or Ogg"
    ):
        features.encode({"key": "a", "x": file.getvalue()[:-1000]})


# ---------------------------------------------------------------- fingerprint


class Counting(Rows):
    """A writer that counts what it reads."""

    def read(self, row):
        """Count."""
        return {"x": next(self.count)}


def test_writer_with_an_iterator(tmp_path):
    """What it gives depends on how far it has come."""
    writer = Counting()
    writer.count = itertools.count()

    with raises(
        FingerprintError, "itertools.count has no content to fingerprint", "; drop it in __getstate__, or create"
    ):
        Materializer(writer, None, tmp_path / "out", workers=ONE).run(progress=False)


# ---------------------------------------------------------------- formats


def test_archive_that_ends_inside_a_member(tmp_path):
    """What follows is lost, and that is no end of the archive."""
    (tmp_path / "a.tar").write_bytes(b"".join(member("one.txt", bytes(3000)))[:1000])

    with pytest.raises(CorruptDataError, match=r"ends inside the member [^,]+, after 488 of 3072 bytes"):
        list(get_format("webdataset").with_features(Features({"txt": Text()})).read(tmp_path / "a.tar"))


@pytest.mark.parametrize(
    ("span", "told"),
    [((90, 10_000, 0), "is shorter than its index says"), ((80, 40, 0), "a file became shorter while it was read")],
)
def test_shard_that_becomes_shorter_while_it_is_open(output, span, told):
    """Whoever reads many records at once gets none of them."""
    path, offsets = shard_of(output), Offsets(*np.array([span], np.uint64).T)
    os.truncate(path, 120)
    with contextlib.closing(RangeReader(path, offsets, None)) as reader:
        os.truncate(path, 100)

        with raises(CorruptDataError, told):
            read_spans([reader], np.zeros(1, np.int64), np.zeros(1, np.int64))


# ---------------------------------------------------------------- parallel


class Stubborn:
    """A value that no pickle takes."""

    def __reduce__(self):
        raise ZeroDivisionError("it stays here")


def test_argument_that_cannot_travel():
    """The error of its own pickling is named."""
    with PathosExecutor(1) as pool:
        told = r"^test_rare_errors.Stubborn cannot be sent to a worker \([^)]+\); .*, or pass what it is made from"
        with pytest.raises(UnpicklableError, match=told):
            pool.submit(len, Stubborn()).result(timeout=60)
        with raises(UnpicklableError, " cannot be sent between processes as an argument or result; send what it is"):
            pool.submit(len, [threading.Thread()]).result(timeout=60)


def wait_and_die(path):
    """Say that it has begun, and end the process once a file is there."""
    path.with_name("begun").touch()
    wait_for(path)
    os._exit(1)


def wait_for(path):
    """Return once a file is there; the time-out of the test ends it otherwise."""
    while not path.exists():
        time.sleep(0.01)


def test_call_whose_worker_dies_in_a_pool_that_is_shut_down(tmp_path):
    """It would be repeated otherwise."""
    pool = PathosExecutor(1, max_retries=1)
    future = pool.submit(wait_and_die, tmp_path / "now")
    wait_for(tmp_path / "begun")

    pool.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "now").touch()

    with raises(
        concurrent.futures.BrokenExecutor, ": the pool was shut down before it could be repeated; submit it to another"
    ):
        future.result(timeout=60)


def test_chunk_whose_worker_dies_in_a_pool_that_is_shut_down(tmp_path):
    """Its calls would be repeated one by one."""
    pool = PathosExecutor(1, max_retries=1)
    results = pool.map(wait_and_die, [tmp_path / "now"] * 2, chunksize=2)
    wait_for(tmp_path / "begun")

    pool.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "now").touch()

    with raises(concurrent.futures.BrokenExecutor, "the pool was shut down; wait for results before"):
        list(results)


def test_worker_of_an_engine_without_a_module_of_the_job(tmp_path, monkeypatch):
    """It says how to bring it there."""
    (tmp_path / "rare_errors_module.py").write_text("def function():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    arrived = engines.SentFunction(importlib.import_module("rare_errors_module").function).arrival
    sys.modules.pop("rare_errors_module")
    monkeypatch.setattr(sys, "path", sys.path[1:])

    with raises(
        MissingDependencyError, " cannot import what the job needs: ", "; install it there, or have the engine"
    ):
        arrived().open()


class Cancelling(concurrent.futures.Executor):
    """An engine that gives up."""

    def submit(self, fn, /, *args, **kwargs):
        """Cancel the call."""
        future = concurrent.futures.Future()
        future.cancel()
        return future


def test_call_that_the_engine_cancels(tmp_path):
    """The run says so, after it has tried again."""
    with raises(ParallelError, "the engine has cancelled it. Finished parts stay"):
        Materializer(Rows(), None, tmp_path / "out", executor=Cancelling()).run(progress=False)


def test_result_that_the_worker_of_dask_loses():
    """Its connection broke; the call may be repeated."""

    def result():
        raise OSError("connection closed")

    engine, future = types.SimpleNamespace(name="Dask"), types.SimpleNamespace(status="finished", result=result)

    with raises(ParallelError, "Dask has lost its result: connection closed"):
        engines._Dask._result(engine, future)


# ---------------------------------------------------------------- readers


def test_index_that_the_manifest_of_a_url_does_not_list(output):
    """Nobody knows its checksum."""
    Manifest.write(dataclasses.replace(Manifest.read(output), index=()), output)
    data = datamat.load(output.as_uri(), cache_dir=output.parent / "cache")

    with raises(CorruptDataError, "the manifest does not list ", "index; run the job again to rebuild it"):
        data.keys()


def test_cache_that_cannot_be_made(output, tmp_path):
    """A file is where its folder should be."""
    (tmp_path / "file").touch()

    with raises(OptionError, "cache_dir ", "file/cache: Not a directory; name a writable folder"):
        datamat.load(output, cache_dir=tmp_path / "file/cache")[0]


def test_cache_that_a_file_replaces(output, tmp_path):
    """Somebody tidies up."""
    data = datamat.load(output, cache_dir=tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()

    with raises(OutputError, "cache_dir ", "; name a writable folder"):
        data[0]


def test_offsets_that_change_while_they_are_open(output):
    """Whoever reads many records looks many up."""
    data = datamat.load(output)
    data[0]
    for path in output.glob("*.idx"):
        os.truncate(path, 1)

    with raises(CorruptDataError, ".idx was changed while it was open; verify its directory"):
        data._records.parts[0].reader.records._opened(0)._spans.spans(np.arange(2))


def test_offsets_that_cannot_be_read(output):
    """A folder has their name."""
    for path in output.glob("*.idx"):
        path.unlink()
        path.mkdir()

    with raises(CorruptDataError, ".idx: Is a directory; run the job again to rewrite it"):
        datamat.load(output)[0]


def test_offsets_that_are_none(output):
    """Text of somebody else."""
    for path in output.glob("*.idx"):
        path.write_text("hello\n")

    with raises(CorruptDataError, ".idx: ", "; run the job again to rewrite it"):
        datamat.load(output)[0]


@register_feature
@dataclasses.dataclass(frozen=True)
class Refusing(Odd):
    """A feature of somebody else, whose files do not always decode."""

    type_name = "rare_errors_refusing"

    def encode(self, name, value):
        """Give a number."""
        return {name: np.array([value])}

    def decode(self, name, columns):
        """Refuse it."""
        raise InputError("it does not decode")


def test_record_that_a_feature_refuses(tmp_path):
    """Its checksums are right all the same."""
    job(tmp_path / "out", features=Features({"x": Refusing()})).run(progress=False)

    with raises(
        CorruptDataError, "is damaged: it does not decode; remove the file and run the job again, which rebuilds"
    ):
        datamat.load(tmp_path / "out")[0]


def test_damage_that_is_gone_when_it_is_looked_for(output):
    """TensorFlow could not read it a moment ago."""
    data = datamat.load(output)

    found = data._records.damage_in(str(shard_of(output)))

    assert "changed while it was read; run datamat verify on its directory" in str(found)


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """A directory of lists, dicts and complex numbers."""
    folder = tmp_path_factory.mktemp("lists") / "out"
    features = Features(
        {"x": Tensor((None,), "int64"), "d": {"a": Scalar("int64")}, "c": Scalar("complex64"), "n": Scalar("int64")}
    )
    job(folder, features=features, made={"x": np.array([1]), "d": {"a": 1}, "c": 1j, "n": 1}).run(progress=False)
    return datamat.load(folder)


READS = [
    (lambda data: next(iter(data.map(without_x).to_numpy(2, pad={"x": 0}))), "pad: the batch has no field 'x'; it has"),
    (
        lambda data: next(iter(data.to_numpy(2, pack={"x": 8}, transform=without_x))),
        "pack: the batch has no field 'x'; it has",
    ),
    (
        lambda data: data.map(without_x).filter(field("n") == 1)[0],
        "filter: the expression names 'n', which a function of map may change; filter before map, or by a function of",
    ),
    (lambda data: data.filter(field("d") == 1)[0], "filter: 'd' is a dict; name a field in it, as in field('d/a')"),
    (lambda data: data.filter(field("c") == 1)[0], "which Arrow lacks; filter by a function of the sample"),
]


def without_x(sample, rng=None):
    """Return a sample with fewer fields."""
    return {"n": sample["n"]}


@pytest.mark.parametrize(("read", "told"), READS, ids=["pad", "pack", "mapped", "dict", "complex"])
def test_field_that_cannot_be_used(lists, read, told):
    """It is not there, or not of a kind for this."""
    with raises(OptionError, told):
        read(lists)


# ---------------------------------------------------------------- run


def test_function_that_always_fails(tmp_path):
    """No features can be inferred from nothing."""
    with raises(
        IncompleteRunError, "materialize: the first 1,000 inputs failed, so there is no sample to infer the feat"
    ):
        datamat.materialize(
            fail, range(1100), tmp_path / "out", errors=ErrorPolicy("skip"), workers=ONE, progress=False
        )


def fail(item):
    """Fail."""
    raise ValueError(item)


class Failing(Rows):
    """A writer of which every row fails."""

    def read(self, row):
        """Fail."""
        raise ValueError(row.key)


def test_rows_that_fail_more_often_than_allowed(tmp_path):
    """What to do about it depends on how the run was called; the first of them are named."""
    rows = [IndexRow(f"r{number:02d}", "train", {}) for number in range(20)]
    failing = Materializer(
        Failing(rows), None, tmp_path / "out", workers=ONE, errors=ErrorPolicy("skip", max_errors=12)
    )
    told = (
        r" rows failed, [^;]+; .*rerun_failed\(\), which tries them again. What is finished stays[^!]+ and [^ ]+ more"
    )
    with pytest.raises(IncompleteRunError, match=told):
        failing.run(progress=False)


def test_run_that_lost_a_shard(tmp_path, monkeypatch):
    """Nothing may be called complete that is not there, whatever goes wrong in the program itself."""
    monkeypatch.setattr(run.Run, "_make", lambda _: None)

    with raises(IncompleteRunError, "2 of 2 shards are not finished (rows-train-00000-of-00002, ...); run again"):
        job(tmp_path / "out").run(progress=False)


def test_worker_that_differs_in_many_values():
    """The first of them are named."""
    error = module_state._refusal([f"settings.K{number}" for number in range(9)])

    assert re.search(r"settings.K0, .* and [^ ]+ more: not the same in this worker as in the program", str(error))


class Damaging(datamat.RunHook):
    """Something that damages each shard as it is written: a broken disk."""

    def __init__(self, folder):
        self.folder = folder

    def on_run_end(self, event):
        """Flip a bit."""
        damage(self.folder)


def damage(folder):
    """Flip a bit of a shard."""
    with open(shard_of(folder), "r+b") as file:
        file.seek(14)
        byte = file.read(1)[0]
        file.seek(14)
        file.write(bytes([byte ^ 1]))


def test_directory_that_no_repair_mends(tmp_path):
    """Memory or disk are at fault."""
    hooked = job(tmp_path / "out", hooks=[Damaging(tmp_path / "out")])
    hooked.run(progress=False)

    with raises(OutputError, "still so after 4 repairs; test memory and disk"):
        hooked.repair(progress=False)


def test_merge_of_a_damaged_directory(output, tmp_path):
    """Nothing is merged."""
    rows = [IndexRow(f"s{number}", "train", {}) for number in range(4)]
    job(tmp_path / "other", rows=rows).run(progress=False)
    damage(tmp_path / "other")

    with raises(CorruptDataError, "nothing was merged: repair ", ", and merge again"):
        datamat.merge([output, tmp_path / "other"], tmp_path / "both")


def test_merge_that_another_process_finishes(output, tmp_path, monkeypatch):
    """This one has waited for its lock."""
    rows = [IndexRow(f"s{number}", "train", {}) for number in range(4)]
    job(tmp_path / "other", rows=rows).run(progress=False)

    @contextlib.contextmanager
    def waiting(path):
        shutil.rmtree(path.parent)
        yield

    monkeypatch.setattr("datamat.run.merge.locked", waiting)

    with raises(OutputError, "merge: another process has just finished ", "; give another folder"):
        datamat.merge([output, tmp_path / "other"], tmp_path / "both")


def test_bad_samples_that_cannot_be_kept(tmp_path):
    """A file is where the folder of one should be."""
    work = tmp_path / "out/.datamat"
    (work / "quarantine/train").mkdir(parents=True)
    (work / "quarantine/train/r0").touch()
    failing = Materializer(Failing(), None, tmp_path / "out", workers=ONE, errors=ErrorPolicy("quarantine"))

    with raises(OutputError, "cannot be kept: ", "; make room, or skip bad samples with ErrorPolicy('skip')"):
        failing.run(progress=False)


class Linking(Rows):
    """A writer that puts a link where its bad samples go."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def read(self, row):
        """Fail."""
        (self.output / ".datamat/quarantine").symlink_to(self.output.parent)
        raise ValueError(row.key)


def test_link_in_place_of_the_bad_samples(tmp_path):
    """What is written there would land elsewhere."""
    failing = Materializer(
        Linking(tmp_path / "out"), None, tmp_path / "out", workers=ONE, errors=ErrorPolicy("quarantine")
    )

    with raises(OutputError, "quarantine is a link; datamat writes only below its output: remove it"):
        failing.run(progress=False)


def test_task_beside_a_run_that_shares_nothing(tmp_path):
    """It would wait for ever."""
    (tmp_path / "out/.datamat").mkdir(parents=True)

    with (
        locked(tmp_path / "out/.datamat/lock"),
        raises(OutputLockedError, "which shares it with nobody; wait for it, or give another output"),
    ):
        job(tmp_path / "out").run(task_index=0, num_tasks=2, progress=False)


def test_plan_of_tasks_that_is_damaged(tmp_path, monkeypatch):
    """All tasks need it."""
    (tmp_path / "plan.json").write_text("{")
    monkeypatch.setattr(slices.time, "sleep", lambda _: None)

    with raises(OutputError, "plan.json is damaged: ", "; end all tasks, and remove "):
        slices._read_plan(tmp_path / "plan.json")


class Elsewhere(concurrent.futures.ThreadPoolExecutor):
    """An engine whose workers do not have the source."""

    def submit(self, fn, /, *args, **kwargs):
        """Remove the source before a worker looks; it gets a copy of the function, as elsewhere."""
        pathlib.Path("source").unlink(missing_ok=True)
        return super().submit(pickle.loads(pickle.dumps(fn)), *args, **kwargs)


def test_worker_that_does_not_see_the_source(tmp_path, monkeypatch):
    """It is mounted at the caller's only."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("source").touch()

    with Elsewhere(1) as engine, raises(SourceError, " does not see ", "source; mount it at this path on every host"):
        Materializer(Rows(), "source", tmp_path / "out", executor=engine).run(progress=False)


class Blocking(Rows):
    """A writer of rows whose disk breaks while they are read."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def read(self, row):
        """Put a file where a part should be."""
        for folder in (self.output / ".datamat/parts").iterdir():
            if folder.is_dir():
                folder.rmdir()
                folder.touch()
        return {"x": 1}


def test_part_that_cannot_be_written(tmp_path):
    """The run goes on from there once that is mended."""
    with raises(
        OutputError, "part 0 of ", " cannot be written below ", "; make room or repair the disk, and run again"
    ):
        Materializer(Blocking(tmp_path / "out"), None, tmp_path / "out", format="parquet", workers=ONE).run(
            progress=False
        )


# ---------------------------------------------------------------- sources

SOURCES = [
    (
        "data.gz",
        gzip.compress(b"x"),
        r"name the kind of the file, as in Materializer\('webdataset', [^,]+, \.\.\.\), which",
    ),
    ("data.xyz", b"x", r"name the kind of the file, as in Materializer\('parquet', [^,]+, \.\.\.\), which may be "),
]


@pytest.mark.parametrize(("name", "content", "told"), SOURCES, ids=[name for name, *_ in SOURCES])
def test_file_that_is_no_source(tmp_path, name, content, told):
    """Before anything is written."""
    (tmp_path / name).write_bytes(content)

    with pytest.raises(datamat.DatamatError, match=told):
        Materializer(tmp_path / name, output=tmp_path / "out").plan()


def test_list_with_a_name_that_no_disk_has(tmp_path):
    """A null byte in it."""
    with pytest.raises(SourceError, match=r"list file [^:]+: [^;]+; correct the path"):
        list(datamat.Index.from_lists(tmp_path, {"train": "a\0b"}, fields=["image"]))
