"""Compressed files as sources: unpacked once, by whoever needs them first, and read like plain ones."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import tarfile
import threading
import types
import zlib

import dill
import numpy as np
import pyarrow as pa
import pytest

from datamat import (
    CorruptDataError,
    ErrorPolicy,
    Materializer,
    MissingDependencyError,
    OutputError,
    SampleError,
    ShardOptions,
    SourceError,
    WorkerOptions,
    load,
)
from datamat.formats.example import encode_example
from datamat.formats.tfrecord import frame
from datamat.writers import foreign
from datamat.writers.dataset import ImportWriter

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
MDS = GOLDEN / "mds_compressed"  # written by streaming 0.13
LITDATA = GOLDEN / "litdata_compressed"  # by litdata 0.2.76
ONE = WorkerOptions(num_workers=1)
PACKED = {
    "gz": lambda data: gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]),  # two members
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    "zlib": zlib.compress,
}


def _tar(numbers):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in numbers:
            for name, data in ((f"s{number}.cls", b"%d" % number), (f"s{number}.json", b'{"n": [%d]}' % number)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _records(numbers, pad=0):
    payloads = [
        encode_example({"n": np.array([number]), "pad": b"x" * pad}, {"n": "int64", "pad": "bytes"})
        for number in numbers
    ]
    return b"".join(b"".join(frame([payload], len(payload))) for payload in payloads)


def _numbers(data, field):
    return sorted(int(sample[field]) for sample in data)


@pytest.fixture
def unpacked(monkeypatch):
    """The compressed files that were unpacked by this process."""
    found = []
    pieces = foreign._pieces

    def counted(path, codec):
        found.append(os.path.basename(path))
        return pieces(path, codec)

    monkeypatch.setattr(foreign, "_pieces", counted)
    return found


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("kind", ["webdataset", "tfrecord"])
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
        Materializer(tmp_path / source, output=tmp_path / "out" / source, workers=WorkerOptions(num_workers=2)).run(
            progress=False
        )

    plain, packed = (load(tmp_path / "out" / source) for source in ("plain", "packed"))
    assert list(plain.keys()) == list(packed.keys())
    assert _numbers(packed, "cls" if kind == "webdataset" else "n") == list(range(30))
    for key in plain.keys():  # noqa: SIM118 -- a dataset, whose items are samples
        assert repr(plain[key]) == repr(packed[key])


def test_compression_is_found_by_content_whatever_the_file_is_called(tmp_path):
    """TensorFlow gives compressed records any name; a record of 40,056 bytes begins like a zlib stream."""
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(_records([0])))
    (tmp_path / "b.tfrecord").write_bytes(zlib.compress(_records([1])))
    plain = next(data for pad in range(40_000, 40_057) if (data := _records([2], pad))[:2] == b"\x78\x9c")
    (tmp_path / "c.tfrecord").write_bytes(plain)

    Materializer("tfrecord", tmp_path, tmp_path / "out", workers=ONE).run(progress=False)

    assert _numbers(load(tmp_path / "out"), "n") == [0, 1, 2]


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tfrecord.gz", "x.tfrecords.zlib"])
def test_path_as_text_in_the_place_of_a_writer_is_a_source(tmp_path, monkeypatch, name):
    """As a stranger writes it; the name of a writer or a kind goes before that of a file."""
    data = _records(range(4)) if "tfrecord" in name else _tar(range(4))
    (tmp_path / name).write_bytes(zlib.compress(data) if "zlib" in name else gzip.compress(data))
    (tmp_path / "table").mkdir()
    monkeypatch.chdir(tmp_path)

    Materializer(name, output="out", workers=ONE).run(progress=False)

    assert len(load("out")) == 4
    assert type(Materializer("table", {"a": np.arange(3)}, "other").writer).__name__ == "TableWriter"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.gz", r"x.gz is compressed, and its name does not say what it holds; name the kind .*'webdataset', 'x.gz'"),
        ("x.foo.gz", r"x.foo.gz is no dataset .*; unpack it first, with gunzip .*x.foo.gz, and pass what comes out"),
        ("x.zip", r"unpack it first, with shutil.unpack_archive\('.*x.zip', 'unpacked', 'zip'\), and pass what"),
        ("x.tar.lz4", r"unpack it first, with lz4 -d .*x.tar.lz4, and pass what comes out"),
        ("x.csv.gz", r"the writer 'table' reads it, as in Materializer\('table', '.*x.csv.gz', ...\)"),
        ("x.jsonl.gz", r"pass its rows, as in Materializer\(map\(json.loads, gzip.open\('.*x.jsonl.gz'\)\), ...\)"),
        ("x.jsonl.zst", r"unpack it first, with unzstd .*x.jsonl.zst"),
        ("x.tar.gz", r"x.tar.gz does not unpack \([^)]+\): [^;]+; copy or write it again"),
        ("x.tfrecord.gz", r"x.tfrecord.gz does not unpack \(gz\)"),
    ],
)
def test_compressed_file_that_is_not_understood_is_named(tmp_path, name, message):
    """Its name says nothing, or it is cut off."""
    (tmp_path / name).write_bytes(gzip.compress(os.urandom(1000))[:500])

    with pytest.raises(SourceError, match=message):
        Materializer(source=tmp_path / name, output=tmp_path / "out")


@pytest.mark.parametrize(("kind", "name"), [("webdataset", "x.tar.lz4"), ("parquet", "x.parquet.gz")])
def test_compressed_file_that_its_kind_does_not_unpack_is_named(tmp_path, kind, name):
    """It was taken for a damaged one."""
    (tmp_path / name).write_bytes(b"packed")

    with pytest.raises(
        SourceError, match=rf"{name} is compressed; unpack it first, with (lz4 -d|gunzip) .*{name}, and"
    ):
        Materializer(kind, tmp_path / name, tmp_path / "out")


def test_lines_that_a_refusal_gives_work(tmp_path):
    """For rows in a compressed file of JSON, and for texts, arrays and lists of rows."""
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"x": 1}\n{"x": 2}\n'))
    (tmp_path / "x.json").write_text('[{"x": 1}, {"x": 2}]')
    (tmp_path / "x.txt").write_text("a\nb\n")
    for name, field in (("x.jsonl.gz", "x"), ("x.json", "x"), ("x.txt", "x")):
        with pytest.raises(SourceError) as refused:
            Materializer(source=tmp_path / name, output=tmp_path / "out")
        line = re.search(r"as in Materializer\((?:source=)?(.*), \.\.\.\)", str(refused.value))[1]

        rows = eval(line, {"json": json, "gzip": gzip, "pathlib": pathlib})
        Materializer(source=rows, output=tmp_path / f"out-{name}", workers=ONE).run(progress=False)

        assert [sample[field] for sample in load(tmp_path / f"out-{name}")] in ([1, 2], ["a", "b"])


@pytest.mark.parametrize("codec", [*PACKED, "br", "snappy"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "more"])
def test_damage_of_a_compressed_file_is_found(tmp_path, codec, damage):
    """Cut off, or with a flipped byte where the codec has a checksum; what follows the end is no record."""
    whole = _records(range(200), 50)
    of_arrow = {"br": "brotli", "snappy": "snappy"}.get(codec)
    data = bytearray(pa.compress(whole, of_arrow, asbytes=True) if of_arrow else PACKED[codec](whole))
    if damage == "flipped":
        data[len(data) // 2] ^= 4
    path = tmp_path / "a"
    path.write_bytes({"cut": data[:-9], "flipped": data, "more": data + b"junk"}[damage])

    try:
        found = b"".join(foreign._pieces(str(path), codec))
    except CorruptDataError as error:
        assert str(path) in str(error)  # noqa: PT017 -- codecs without a checksum may give other bytes
    else:
        assert damage != "cut"
        assert found == whole or (codec in {"zst", "br", "snappy"} and damage == "flipped")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xff\x0f\x00", "6 bytes cannot hold the 4,294,967,295 that they say they do"),
        (b"\xff\xff\xff\xff\xff\xff", "does not begin with its size"),
        (b"", "does not begin with its size"),
    ],
)
def test_snappy_block_that_lies_about_its_size_is_refused(tmp_path, data, message):
    """Before the memory for it is asked for."""
    (tmp_path / "a").write_bytes(data)

    with pytest.raises(CorruptDataError, match=rf"a does not unpack \(snappy\): .*{message}"):
        list(foreign._pieces(str(tmp_path / "a"), "snappy"))


def test_bomb_is_unpacked_in_pieces(tmp_path):
    """A thousand times its size is never held at once."""
    for codec in ("zlib", "gz", "zst", "xz", "bz2"):
        path = tmp_path / codec
        path.write_bytes(PACKED[codec](bytes(20_000_000)))
        assert max(map(len, foreign._pieces(str(path), codec))) <= 1 << 20


@pytest.mark.parametrize("codec", ["zstd", "gz", "br", "bz2", "snappy"])
def test_compressed_mds_of_streaming_is_a_source(tmp_path, codec):
    """The index counts its samples; workers unpack the shards that they need."""
    Materializer("mds", MDS / codec, tmp_path / "out", workers=WorkerOptions(num_workers=2)).run(progress=False)

    data = load(tmp_path / "out")
    assert len(data) == 9 and _numbers(data, "n") == list(range(9))
    for sample in data:
        assert sample["text"] == f"größer {sample['n']}" and (sample["arr"] == sample["n"]).all()
    assert all("shard.0000" in key and "mds" not in key for key in data.keys())  # noqa: SIM118 -- as above


@pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
def test_compressed_chunks_of_litdata_are_a_source(tmp_path, level):
    """Whole chunks, frames of several items, and each item on its own."""
    Materializer(LITDATA / level, output=tmp_path / "out", workers=WorkerOptions(num_workers=2)).run(progress=False)

    data = load(tmp_path / "out")
    assert len(data) == 9 and _numbers(data, "n") == list(range(9))
    for sample in data:
        number = int(sample["n"])
        assert sample["text"] == f"größer {number}" * 5
        assert sample["arr"].shape == (3, number % 5) and (sample["arr"] == number).all()


@pytest.mark.parametrize("level", ["chunk", "batch", "sample"])
def test_damaged_chunk_of_litdata_is_named(tmp_path, level):
    """Cut off within its last frame."""
    shutil.copytree(LITDATA / level, tmp_path / "chunks")
    (path,) = (tmp_path / "chunks").glob("chunk-0-1*")
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(
        SampleError,
        match=rf"{path.name}( does not unpack .*; copy or write it again|: item 2 is cut off: 4. of 5. bytes)",
    ):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out", workers=ONE).run(progress=False)


def test_damaged_item_of_litdata_is_named(tmp_path):
    """Zeros within its frame."""
    shutil.copytree(LITDATA / "sample", tmp_path / "chunks")
    (path,) = (tmp_path / "chunks").glob("chunk-0-1*")
    path.write_bytes(path.read_bytes()[:-30] + bytes(30))

    with pytest.raises(SampleError, match=r"chunk-0-1.bin: item 2 is damaged: it does not unpack: .*copy the chunk"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out", workers=ONE).run(progress=False)
    path.unlink()
    with pytest.raises(SourceError, match=r"0-1.bin: No such file or directory; copy the chunk to the folder"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")
    (tmp_path / "chunks/index.json").write_text('{"chunks": []}')
    with pytest.raises(SourceError, match=r"is none of litdata \(KeyError\('config'\)\); restore it, or write the set"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")


def test_codec_that_arrow_lacks_is_named(tmp_path, monkeypatch):
    """As builds of conda and Debian may; the wheel has all."""
    monkeypatch.setattr(pa, "Codec", types.SimpleNamespace(is_available=lambda _: False))
    (tmp_path / "a.tar.zst").write_bytes(PACKED["zst"](_tar([1])))

    with pytest.raises(
        MissingDependencyError, match=r"by zstd, which this build of pyarrow .* lacks; install the wheel"
    ):
        Materializer("webdataset", tmp_path / "a.tar.zst", tmp_path / "out")


def test_chunks_of_litdata_for_another_loader_are_refused(tmp_path):
    """One of the user's own may lay items out in any way."""
    shutil.copytree(LITDATA / "chunk", tmp_path / "chunks")
    index = json.loads((tmp_path / "chunks/index.json").read_text())
    index["config"]["item_loader"] = "OwnLoader"
    (tmp_path / "chunks/index.json").write_text(json.dumps(index))

    with pytest.raises(SourceError, match="chunks of the item loader OwnLoader, which are not read here; pass the"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")


@pytest.mark.parametrize("codec", ["GZIP", "ZLIB"])
def test_compressed_records_of_tensorflow_are_a_source(tmp_path, codec):
    """As its own writer compresses them."""
    tf = pytest.importorskip("tensorflow", reason="it writes the records")
    for part in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"{part}.tfrecord"), codec) as writer:
            for number in range(part * 500, part * 500 + 500):
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                example = tf.train.Example(features=tf.train.Features(feature={"n": value}))
                writer.write(example.SerializeToString())

    Materializer("tfrecord", tmp_path, tmp_path / "out", workers=WorkerOptions(num_workers=2)).run(progress=False)

    assert _numbers(load(tmp_path / "out"), "n") == list(range(1000))


def test_spool_below_the_working_folder_is_no_undeclared_file(tmp_path, monkeypatch, caplog):
    """Nor is the temporary folder, wherever it lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, spool in (("one", None), ("two", "rows")):
        Materializer(ImportWriter(kind="mds", spool=spool), MDS / "gz", name, workers=ONE).run(progress=False)

    assert not caplog.text


def test_mds_by_another_codec_is_refused(tmp_path):
    """With the object to pass; a shard that is nowhere is named."""
    shutil.copytree(MDS / "zstd", tmp_path / "mds")
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    for shard in index["shards"]:
        shard["compression"] = "lz4"
    (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"compressed by lz4, which is not read here .*StreamingDataset"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")
    for path in (tmp_path / "mds").glob("*.zstd"):
        path.unlink()
    with pytest.raises(SourceError, match=r"mds does not exist, nor does shard.0000\d.mds.zstd; copy the shard"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")


def test_files_are_unpacked_once(tmp_path, unpacked):
    """Not for each row, each part, or each call of the same source; again where one has changed."""
    (tmp_path / "in").mkdir()
    for part in range(3):
        (tmp_path / "in" / f"{part}.tfrecord.gz").write_bytes(gzip.compress(_records(range(part * 9, part * 9 + 9))))
    job = Materializer("tfrecord", tmp_path / "in", tmp_path / "out", shards=ShardOptions(num_shards=5))

    job.plan()
    job.status()
    for row in job.writer.index(tmp_path / "in"):
        dill.loads(dill.dumps(job.writer)).read(row)
    Materializer("tfrecord", tmp_path / "in", tmp_path / "other").plan()

    assert sorted(unpacked) == ["0.tfrecord.gz", "1.tfrecord.gz", "2.tfrecord.gz"]
    (tmp_path / "in" / "1.tfrecord.gz").write_bytes(gzip.compress(_records(range(100, 105))))
    job.plan()
    assert sorted(unpacked) == ["0.tfrecord.gz", "1.tfrecord.gz", "1.tfrecord.gz", "2.tfrecord.gz"]


def test_temporary_folder_goes_with_its_last_source(tmp_path, monkeypatch):
    """And not before; a run leaves nothing in `TMPDIR`."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(3))))
    first, second = (Materializer(tmp_path / "a.tar.gz", output=tmp_path / name) for name in ("one", "two"))
    assert len(list(tmp_path.glob("datamat-rows-*"))) == 1

    del first
    second.run(progress=False)

    assert len(load(tmp_path / "two")) == 3
    del second
    assert not list(tmp_path.glob("datamat-rows-*"))


def test_folder_that_is_named_serves_the_next_run(tmp_path, unpacked):
    """Without unpacking; what a kill left goes, and so does a file as it was before it changed."""
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(3))))

    def run(output):
        writer = ImportWriter(spool=tmp_path / "rows")
        return Materializer(writer, tmp_path / "a.tar.gz", tmp_path / output, workers=ONE).run(progress=False)

    run("one")
    run("two")
    assert unpacked == ["a.tar.gz"]
    (kept,) = [path for path in (tmp_path / "rows").iterdir() if path.suffix != ".lock"]
    kept.rename(f"{kept}-half.tmp")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(_tar(range(5))))

    assert run("one").num_records == 5
    assert unpacked == ["a.tar.gz", "a.tar.gz"]
    assert len([path for path in (tmp_path / "rows").iterdir() if path.suffix != ".lock"]) == 1


def test_threads_and_processes_wait_for_the_one_that_unpacks(tmp_path, unpacked):
    """Eight that want one file at once."""
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(os.urandom(3_000_000)))
    barrier, found = threading.Barrier(8), []

    def want():
        files = foreign.UnpackedFiles([str(path)], ["gz"], str(tmp_path / "rows"))
        barrier.wait()
        found.append(files.path(0))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert unpacked == ["a.gz"] and len(set(found)) == 1 and len(found) == 8


def test_shard_that_does_not_unpack_concerns_its_rows_alone(tmp_path, unpacked):
    """It is tried once, not for each of them."""
    shutil.copytree(MDS / "gz", tmp_path / "mds")
    path = sorted((tmp_path / "mds").glob("*.gz"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SampleError, match=rf"{path.name} does not unpack \(gz\)"):
        Materializer("mds", tmp_path / "mds", tmp_path / "strict", workers=ONE).run(progress=False)
    job = Materializer("mds", tmp_path / "mds", tmp_path / "out", workers=ONE, errors=ErrorPolicy("skip"))

    job.run(progress=False)

    rows = list(job.writer.index(None))
    bad = [row.key for row in rows if row.key.startswith(path.name.removesuffix(".mds.gz"))]
    assert bad and {row.key for row in rows} - set(load(tmp_path / "out").keys()) == {*bad}
    for row in rows:
        if row.key in bad:
            with pytest.raises(CorruptDataError, match="does not unpack"):
                job.writer.read(row)
    assert unpacked.count(path.name) == 1


def test_no_room_to_unpack_ends_the_run(tmp_path, monkeypatch):
    """Also where samples that fail are skipped: it is no fault of theirs, and the next run has them all."""

    def job():
        writer = ImportWriter(kind="mds", spool=tmp_path / "rows")
        workers = WorkerOptions(num_workers=1, start_method="fork")  # whose worker inherits what is patched
        return Materializer(writer, MDS / "zstd", tmp_path / "out", workers=workers, errors=ErrorPolicy("skip"))

    monkeypatch.setattr(foreign.UnpackedFiles, "_unpack", _full)
    with pytest.raises(OutputError, match="No space left on device; make room there"):
        job().run(progress=False)
    monkeypatch.undo()

    assert job().run(progress=False).num_records == 9


def _full(self, path, codec, name):
    del self, codec, name
    raise OutputError(f"{path} cannot be unpacked: No space left on device; make room there")
