"""Compressed files as sources: unpacked once, by whoever needs them first, and read like plain ones."""

import bz2
import errno
import gc
import gzip
import json
import lzma
import os
import pathlib
import re
import shutil
import tracemalloc
import types
import zlib
from concurrent.futures import ThreadPoolExecutor

import dill
import numpy as np
import pyarrow as pa
import pytest
from foreign_files import GOLDEN, tar, tfrecord
from prepared import Prepared

from datamat import (
    CorruptDataError,
    ErrorPolicy,
    Materializer,
    MissingDependencyError,
    OutputError,
    SampleError,
    SourceError,
    WorkerOptions,
    load,
)
from datamat.testing import InlineExecutor
from datamat.writers.dataset import ImportWriter

MDS = GOLDEN / "mds_compressed"  # written by streaming 0.13
LITDATA = GOLDEN / "litdata_compressed"  # by litdata 0.2.76
PACKED = {
    "gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),  # two members
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    "zlib": zlib.compress,
}


def _tar(numbers):
    members = {}
    for number in numbers:
        members |= {f"s{number}.cls": b"%d" % number, f"s{number}.json": b'{"n": [%d]}' % number}
    return tar(members)


def _records(numbers, pad=0):
    records = [{"n": np.array([number]), "pad": b"x" * pad} for number in numbers]
    return tfrecord(records, {"n": "int64", "pad": "bytes"})


def _run(*arguments, **options):
    return Prepared(*arguments, executor=InlineExecutor(), **options).run(progress=False)


def _numbers(output, field="n"):
    return sorted(int(sample[field]) for sample in load(output))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "codec"),
    [("webdataset", "gz"), ("webdataset", "xz"), ("tfrecord", "bz2"), ("tfrecord", "zst"), ("tfrecord", "zlib")],
)
def test_files_that_are_compressed_give_the_rows_of_plain_ones(tmp_path, kind, codec):
    """By any of the codecs; keys are those of the plain files, and the kind is found by the name."""
    make, ending = {"webdataset": (_tar, ".tar"), "tfrecord": (_records, ".tfrecord")}[kind]
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    for part in range(3):
        data = make(range(part * 10, part * 10 + 10))
        (tmp_path / "plain" / f"p-{part}{ending}").write_bytes(data)
        name = f"p-{part}{ending}" + (f".{codec}" if part else "")  # one plain beside the others
        (tmp_path / "packed" / name).write_bytes(PACKED[codec](data) if part else data)

    for source in ("plain", "packed"):
        _run(None, tmp_path / source, tmp_path / "out" / source)

    plain, packed = (load(tmp_path / "out" / source) for source in ("plain", "packed"))
    assert list(plain.keys()) == list(packed.keys())
    assert _numbers(tmp_path / "out" / "packed", "cls" if kind == "webdataset" else "n") == list(range(30))
    assert [repr(sample) for sample in plain] == [repr(sample) for sample in packed]


def test_compression_is_found_by_content_whatever_the_file_is_called(tmp_path):
    """TensorFlow gives compressed records any name; a record of 40,056 bytes begins like a zlib stream."""
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.tfrecord").write_bytes(gzip.compress(_records([0])))
    (raw / "b.tfrecord").write_bytes(zlib.compress(_records([1])))
    plain = next(data for pad in range(40_000, 40_057) if (data := _records([2], pad))[:2] == b"\x78\x9c")
    (raw / "c.tfrecord").write_bytes(plain)

    _run("tfrecord", raw, tmp_path / "out")

    assert _numbers(tmp_path / "out") == [0, 1, 2]


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tfrecord.gz", "x.tfrecords.zlib"])
def test_path_as_text_in_the_place_of_a_writer_is_a_source(tmp_path, monkeypatch, name):
    """As a stranger writes it; the name of a writer or a kind goes before that of a file."""
    data = _records(range(4)) if "tfrecord" in name else _tar(range(4))
    (tmp_path / name).write_bytes(zlib.compress(data) if "zlib" in name else gzip.compress(data))
    (tmp_path / "table").mkdir()
    monkeypatch.chdir(tmp_path)

    _run(name, output="out")

    assert len(load("out")) == 4
    assert type(Materializer("table", {"a": np.arange(3)}, "other").writer).__name__ == "TableWriter"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("x.gz", "name the kind"),
        ("x.foo.gz", "gunzip .*x.foo.gz"),
        ("x.zip", r"shutil.unpack_archive\('.*x.zip'"),
        ("x.tar.lz4", "lz4 -d .*x.tar.lz4"),
        ("x.csv.gz", r"Materializer\('table', '.*x.csv.gz'"),
        ("x.jsonl.zst", r"Materializer\('table', '.*x.jsonl.zst'"),
        ("x.tar.gz", "x.tar.gz does not unpack"),
        ("x.tfrecord.gz", "x.tfrecord.gz does not unpack"),
    ],
)
def test_compressed_file_that_is_not_understood_is_named(tmp_path, name, remedy):
    """Its name says nothing, or it is cut off."""
    (tmp_path / name).write_bytes(gzip.compress(os.urandom(1000))[:500])

    with pytest.raises(SourceError, match=remedy):
        Materializer(source=tmp_path / name, output=tmp_path / "out")


@pytest.mark.parametrize(("kind", "name"), [("webdataset", "x.tar.lz4"), ("parquet", "x.parquet.gz")])
def test_compressed_file_that_its_kind_does_not_unpack_is_named(tmp_path, kind, name):
    """It was taken for a damaged one."""
    (tmp_path / name).write_bytes(b"packed")

    with pytest.raises(SourceError, match=f"unpack it first, with (lz4 -d|gunzip) .*{name}"):
        Materializer(kind, tmp_path / name, tmp_path / "out")


def test_lines_that_a_refusal_gives_work(tmp_path):
    """For rows in a compressed file of JSON, and for texts and lists of rows."""
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    (tmp_path / "x.json").write_text('[{"x": 1}, {"x": 2}]')
    (tmp_path / "x.txt").write_text("a\nb\n")
    for name in ("x.jsonl.gz", "x.json", "x.txt"):
        with pytest.raises(SourceError) as refused:
            Materializer(source=tmp_path / name, output=tmp_path / "out")
        line = re.search(r"as in Materializer\((.*), \.\.\.\)", str(refused.value))[1]

        names = {"json": json, "pathlib": pathlib, "Materializer": Materializer, "output": tmp_path / f"out-{name}"}
        eval(f"Materializer({line}, output=output)", names).run(executor=InlineExecutor(), progress=False)

        assert [sample["x"] for sample in load(tmp_path / f"out-{name}")] in ([1, 2], ["a", "b"])


@pytest.mark.parametrize(
    ("codec", "damage"), [*((codec, "cut") for codec in PACKED), ("zst", "flipped"), ("gz", "flipped"), ("gz", "more")]
)
def test_damage_of_a_compressed_file_is_found(tmp_path, codec, damage):
    """Cut off, or with a flipped byte; what follows the end is no record."""
    data = bytearray(PACKED[codec](_records(range(200), 50)))
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    path = tmp_path / f"a.tfrecord.{codec}"
    path.write_bytes({"cut": data[:-9], "flipped": data, "more": data + b"junk"}[damage])

    try:
        _run("tfrecord", path, tmp_path / "out")
    except (SourceError, SampleError, CorruptDataError) as error:
        assert str(path) in str(error)  # noqa: PT017 -- bytes behind the end may be passed over
    else:
        assert damage != "cut" and _numbers(tmp_path / "out") == list(range(200))


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("snappy", b"\xff\xff\xff\xff\x0f\x00"),
        ("snappy", b"\xff\xff\xff\xff\xff\xff"),
        ("snappy", b""),
        ("snappy", None),
        ("br", None),
    ],
)
def test_damaged_shard_of_streaming_is_named(tmp_path, codec, data):
    """Cut off (None), or a block that lies about its size, for which no memory is asked."""
    shutil.copytree(MDS / codec, tmp_path / "mds")
    path = sorted((tmp_path / "mds").glob("shard*"))[-1]
    path.write_bytes(path.read_bytes()[:-10] if data is None else data)

    with pytest.raises((SampleError, SourceError), match=path.name):
        _run("mds", tmp_path / "mds", tmp_path / "out")


@pytest.mark.parametrize(
    "codec", ["gz", *(pytest.param(name, marks=pytest.mark.long) for name in PACKED if name != "gz")]
)
def test_bomb_is_unpacked_in_pieces(tmp_path, codec):
    """Whatever a file grows to, a few megabytes of it are held at once."""
    path = tmp_path / f"a.tfrecord.{codec}"
    path.write_bytes(PACKED[codec](_records([1], pad=100_000) * 400))  # 40 MB in few bytes
    tracemalloc.start()
    try:
        Materializer(
            ImportWriter(kind="tfrecord", spool=tmp_path / "rows", max_unpack_ratio=1e6), path, tmp_path / "out"
        )
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", ["zstd", "br", "bz2", "snappy"])  # gz with the other kinds of sources
def test_compressed_mds_of_streaming_is_a_source(tmp_path, codec):
    """The index counts its samples."""
    _run("mds", MDS / codec, tmp_path / "out")

    data = load(tmp_path / "out")
    assert _numbers(tmp_path / "out") == list(range(9))
    for sample in data:
        assert sample["text"] == f"größer {sample['n']}" and (sample["arr"] == sample["n"]).all()
    assert all("shard.0000" in key and "mds" not in key for key in data.keys())  # noqa: SIM118 -- items are samples


def test_workers_unpack_what_they_need(tmp_path):
    """Shards of MDS, of which the driver reads the index alone."""
    Materializer("mds", MDS / "gz", tmp_path / "out").run(workers=WorkerOptions(num_workers=2), progress=False)

    assert _numbers(tmp_path / "out") == list(range(9))


@pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
def test_compressed_chunks_of_litdata_are_a_source(tmp_path, level):
    """Whole chunks, frames of several items, and each item on its own; one that is cut off is named."""
    shutil.copytree(LITDATA / level, tmp_path / "chunks")
    _run(None, tmp_path / "chunks", tmp_path / "out")

    assert _numbers(tmp_path / "out") == list(range(9))
    for sample in load(tmp_path / "out"):
        number = int(sample["n"])
        assert sample["text"] == f"größer {number}" * 5
        assert sample["arr"].shape == (3, number % 5) and (sample["arr"] == number).all()
    (path,) = (tmp_path / "chunks").glob("chunk-0-1*")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SampleError, match=path.name):
        _run("litdata", tmp_path / "chunks", tmp_path / "cut")


def test_chunks_of_litdata_that_cannot_be_read_are_refused(tmp_path):
    """Zeros within a frame, a chunk or an index that is lost, and chunks for a loader of the user's own."""
    shutil.copytree(LITDATA / "sample", tmp_path / "chunks")
    index = tmp_path / "chunks/index.json"
    (path,) = (tmp_path / "chunks").glob("chunk-0-1*")
    path.write_bytes(path.read_bytes()[:-30] + bytes(30))

    with pytest.raises(SampleError, match=r"chunk-0-1\.bin: item 2 is damaged"):
        _run("litdata", tmp_path / "chunks", tmp_path / "out")
    path.unlink()
    with pytest.raises(SourceError, match=r"chunk-0-1\.bin"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "config": {**content["config"], "item_loader": "OwnLoader"}}))
    with pytest.raises(SourceError, match="OwnLoader"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")
    index.write_text('{"chunks": []}')
    with pytest.raises(SourceError, match=r"index\.json"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")


def test_codec_that_arrow_lacks_is_named(tmp_path, monkeypatch):
    """As builds of conda and Debian may; the wheel has all."""
    monkeypatch.setattr(pa, "Codec", types.SimpleNamespace(is_available=lambda _: False))
    (tmp_path / "a.tar.zst").write_bytes(PACKED["zst"](_tar([1])))

    with pytest.raises(MissingDependencyError, match=r"zstd.*install"):
        Materializer("webdataset", tmp_path / "a.tar.zst", tmp_path / "out")


@pytest.mark.long  # imports TensorFlow
@pytest.mark.parametrize("codec", ["GZIP", "ZLIB"])
def test_compressed_records_of_tensorflow_are_a_source(tmp_path, codec):
    """As its own writer compresses them."""
    tf = pytest.importorskip("tensorflow", reason="it writes the records")
    (tmp_path / "in").mkdir()
    for part in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / "in" / f"{part}.tfrecord"), codec) as writer:
            for number in range(part * 500, part * 500 + 500):
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                example = tf.train.Example(features=tf.train.Features(feature={"n": value}))
                writer.write(example.SerializeToString())

    _run("tfrecord", tmp_path / "in", tmp_path / "out")

    assert _numbers(tmp_path / "out") == list(range(1000))


def test_mds_by_another_codec_is_refused(tmp_path):
    """With the object to pass; a shard that is nowhere is named."""
    shutil.copytree(MDS / "zstd", tmp_path / "mds")
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        shard["compression"] = "lz4"
    (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"lz4.*StreamingDataset"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")
    for path in (tmp_path / "mds").glob("*.zstd"):
        path.unlink()
    with pytest.raises(SourceError, match=r"shard.0000\d.mds.zstd"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")


# ---------------------------------------------------------------- where files are unpacked


def _unpacked(folder):
    """Return the files that lie in a folder, by what tells one that was written again from the first."""
    return {path.name: path.stat().st_ino for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_files_are_unpacked_once(tmp_path):
    """Not for each row, each part, or each call of the same source; again where one has changed."""
    (tmp_path / "in").mkdir()
    for part in range(3):
        (tmp_path / "in" / f"{part}.tfrecord.gz").write_bytes(gzip.compress(_records(range(part * 9, part * 9 + 9))))
    writer = ImportWriter(kind="tfrecord", spool=tmp_path / "rows")
    job = Materializer(writer, tmp_path / "in", tmp_path / "out")
    first = _unpacked(tmp_path / "rows")

    job.plan()
    job.status()
    for row in job.writer.index(tmp_path / "in"):
        dill.loads(dill.dumps(job.writer)).read(row)
    Materializer(ImportWriter(kind="tfrecord", spool=tmp_path / "rows"), tmp_path / "in", tmp_path / "other").plan()

    assert len(first) == 3 and _unpacked(tmp_path / "rows") == first
    (tmp_path / "in" / "1.tfrecord.gz").write_bytes(gzip.compress(_records(range(100, 105))))
    job.plan()
    assert len(_unpacked(tmp_path / "rows").items() & first.items()) == 2


@pytest.mark.long  # sources that other tests of the process still hold share the folder
def test_temporary_folder_goes_with_its_last_source(tmp_path, monkeypatch):
    """And not before; a run leaves nothing in `TMPDIR`."""
    gc.collect()  # sources of earlier tests, whose folder this process would share
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(3))))
    first, second = (
        Prepared(tmp_path / "a.tar.gz", output=tmp_path / name, executor=InlineExecutor()) for name in ("one", "two")
    )
    assert len(list(tmp_path.glob("datamat-rows-*"))) == 1

    del first
    second.run(progress=False)

    assert len(load(tmp_path / "two")) == 3
    del second
    assert not list(tmp_path.glob("datamat-rows-*"))


def test_folder_that_is_named_serves_the_next_run(tmp_path):
    """What a kill left goes, and so does a file as it was before it changed."""
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(3))))

    def run(output):
        return _run(ImportWriter(spool=tmp_path / "rows"), tmp_path / "a.tar.gz", tmp_path / output)

    run("one")
    first = _unpacked(tmp_path / "rows")
    run("two")
    assert _unpacked(tmp_path / "rows") == first
    (kept,) = (tmp_path / "rows" / name for name in first)
    kept.rename(f"{kept}-half.tmp")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(5))))

    assert run("one").num_records == 5
    (name,) = _unpacked(tmp_path / "rows")
    assert not name.endswith(".tmp")


def test_threads_wait_for_the_one_that_unpacks(tmp_path):
    """Eight that want one file at once."""
    (tmp_path / "a.tfrecord.gz").write_bytes(gzip.compress(_records(range(9), pad=100_000)))

    def run(number):
        writer = ImportWriter(spool=tmp_path / "rows")
        return _run(writer, tmp_path / "a.tfrecord.gz", tmp_path / f"{number}").num_records

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == [9] * 8
    assert len(_unpacked(tmp_path / "rows")) == 1


def test_spool_below_the_working_folder_is_no_undeclared_file(tmp_path, monkeypatch, caplog):
    """Nor is the temporary folder, wherever it lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, spool in (("one", None), ("two", "rows")):
        _run(ImportWriter(kind="mds", spool=spool), MDS / "gz", name)

    assert not caplog.text


def test_shard_that_does_not_unpack_concerns_its_rows_alone(tmp_path):
    """The run skips them, and has all others."""
    shutil.copytree(MDS / "gz", tmp_path / "mds")
    path = sorted((tmp_path / "mds").glob("*.gz"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    job = Prepared("mds", tmp_path / "mds", tmp_path / "out", executor=InlineExecutor(), errors=ErrorPolicy("skip"))

    job.run(progress=False)

    rows = list(job.writer.index(None))
    bad = [row.key for row in rows if row.key.startswith(path.name.removesuffix(".mds.gz"))]
    assert bad and {row.key for row in rows} - set(load(tmp_path / "out").keys()) == {*bad}


def test_no_room_to_unpack_ends_the_run(tmp_path, monkeypatch):
    """Also where samples that fail are skipped: it is no fault of theirs, and the next run has them all."""
    real = os.fsync

    def job():
        writer = ImportWriter(kind="mds", spool=tmp_path / "rows")
        errors = ErrorPolicy("skip")
        return Prepared(writer, MDS / "zstd", tmp_path / "out", executor=InlineExecutor(), errors=errors)

    def full(descriptor):
        if str(tmp_path / "rows") in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        job().run(progress=False)
    monkeypatch.undo()

    assert job().run(progress=False).num_records == 9
