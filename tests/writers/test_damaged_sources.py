"""Damaged files of others: what is wrong is said, with the file's name, and no record is lost silently."""

import gzip
import json
import shutil
import struct

import numpy as np
import pyarrow as pa
import pytest
from foreign_files import GOLDEN, tar, tfds_kind, tfrecord, write_megatron, write_tfds
from prepared import Prepared
from pyarrow import parquet

from datamat import Bytes, ImportWriter, Materializer, OptionError, SampleError, SourceError
from datamat.errors import DatamatError
from datamat.testing import InlineExecutor

TABLE = pa.table({"a": [*range(8)], "text": [f"text {n}" for n in range(8)], "list": [[1, 2.5]] * 8})


def write_tar(folder):
    members = {}
    for number in range(6):
        members |= {f"{number}.cls": b"%d" % number, f"{number}.json": b'{"n": [1]}', f"{number}.txt": b"x" * 600}
    (folder / "a.tar").write_bytes(tar(members))
    return "webdataset", "a.tar"


def write_packed_tar(folder):
    write_tar(folder)
    (folder / "a.tar.gz").write_bytes(gzip.compress((folder / "a.tar").read_bytes(), mtime=0))
    (folder / "a.tar").unlink()
    return "webdataset", "a.tar.gz"


def write_tfrecords(folder):
    (folder / "a.tfrecord").write_bytes(tfrecord([{"n": np.arange(30)}] * 5, {"n": "int64"}))
    return "tfrecord", "a.tfrecord"


def write_tfds_shards(folder):
    features = {"a": tfds_kind("tensor_feature.Tensor", tensor={"shape": {}, "dtype": "int64"})}
    write_tfds(folder, features, [{"a": np.array([n])} for n in range(4)], {"a": "int64"})
    return "tfds", "mine-train.tfrecord-00001-of-00002"


def write_parquet(folder):
    parquet.write_table(TABLE, folder / "a.parquet")
    return "parquet", "a.parquet"


def write_arrow_file(folder):
    with pa.ipc.new_file(str(folder / "a.arrow"), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=3)
    return "arrow", "a.arrow"


def write_arrow_stream(folder):
    with pa.ipc.new_stream(str(folder / "a.arrow"), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=3)
    return "arrow", "a.arrow"


def write_megatron_set(folder):
    write_megatron(folder / "a", [[[number] * number, [7]] for number in range(9)], "int32")
    return "megatron", "a.idx"


def write_megatron_tokens(folder):
    return write_megatron_set(folder)[0], "a.bin"


def copied(name, file, kind):
    def write(folder):
        shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
        return kind, file

    return pytest.param(write, id=name)


SETS = [
    write_tar,
    write_packed_tar,
    write_tfrecords,
    write_tfds_shards,
    write_parquet,
    write_arrow_file,
    write_arrow_stream,
    write_megatron_set,
    write_megatron_tokens,
    copied("mds_lists", "shard.00000.mds", "mds"),
    copied("litdata_compressed/batch", "chunk-0-0.bin", "litdata"),
    copied("litdata_compressed/chunk", "chunk-0-0.zstd.bin", "litdata"),
    copied("litdata_compressed/sample", "chunk-0-0.bin", "litdata"),
]


def overwritten(data, place, new):
    return data[:place] + new + data[place + len(new) :]


DAMAGES = {
    "empty": lambda data: b"",
    "cut in the first bytes": lambda data: data[:5],
    "cut in the middle": lambda data: data[: len(data) // 2 + 3],
    "cut at the end": lambda data: data[:-7],
    "zeros first": lambda data: overwritten(data, 0, bytes(16)),
    "ones first": lambda data: overwritten(data, 0, b"\xff" * 16),
    "zeros within": lambda data: overwritten(data, len(data) // 3, bytes(16)),
    "ones within": lambda data: overwritten(data, len(data) // 3, b"\xff" * 16),
    "ones near the end": lambda data: overwritten(data, len(data) - 40, b"\xff" * 16),
    "no bytes of it": lambda data: np.random.default_rng(0).bytes(len(data)),
    "deep JSON": lambda data: b"[" * 100_000,
}


def run(folder, kind, output):
    return Materializer(kind, folder, output).run(executor=InlineExecutor(), progress=False).num_records


def outcome(folder, kind, output):
    try:
        return run(folder, kind, output)
    except Exception as error:
        return error


@pytest.mark.parametrize("write", SETS)
def test_damage_is_named_and_loses_nothing(tmp_path, write):
    folder = tmp_path / "set"
    folder.mkdir()
    kind, name = write(folder)
    whole, data = run(folder, kind, tmp_path / "whole"), (folder / name).read_bytes()

    for number, damage in enumerate(DAMAGES):
        (folder / name).write_bytes(DAMAGES[damage](data))
        found = outcome(folder, kind, tmp_path / f"out-{number}")
        is_named = isinstance(found, SampleError) or name in str(found) or "no samples" in str(found)
        assert found == whole or (isinstance(found, DatamatError) and is_named), damage


@pytest.mark.parametrize("write", [write_arrow_file, write_arrow_stream])
def test_offsets_of_arrow_that_lead_out_of_its_memory_are_refused(tmp_path, write):
    """Arrow itself would follow them."""
    kind, name = write(tmp_path)
    data = (tmp_path / name).read_bytes()
    offsets = struct.pack("<4i", 0, 6, 12, 18)
    assert offsets in data
    (tmp_path / name).write_bytes(data.replace(offsets, struct.pack("<4i", 0, 6, 1 << 30, 18)))

    with pytest.raises(DatamatError, match=name):
        run(tmp_path, kind, tmp_path / "out")


@pytest.mark.parametrize("kind", ["mds", "litdata", "tfds", "dataset"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 100_000, "{}", "[]", "7", '{"chunks": [{}]}', '{"config": 1']
)
def test_index_that_is_none_is_refused(tmp_path, kind, text):
    for name in ("index.json", "dataset_info.json", "features.json"):
        (tmp_path / name).write_text(text)

    with pytest.raises(DatamatError, match=r"index|JSON|json"):
        Materializer(ImportWriter(kind=kind), tmp_path, tmp_path / "out").run(executor=InlineExecutor(), progress=False)


@pytest.mark.parametrize("cut", [1, 512, 513, 1024, 1500, 2048])
def test_archive_without_its_end_is_refused(tmp_path, cut):
    """Python's reader takes whatever is no header for the end."""
    whole = tar({f"{n}.txt": b"x" for n in range(3)})[: 3 * 1024]
    (tmp_path / "a.tar").write_bytes(whole[:-cut])

    with pytest.raises(SourceError, match=r"a\.tar .*(has no end|is damaged after|unexpected end)"):
        run(tmp_path, "webdataset", tmp_path / "out")


def test_archives_that_are_joined_are_refused(tmp_path):
    """The second one's samples would be lost."""
    (tmp_path / "a.tar").write_bytes(2 * tar({"0.txt": b"x"}))

    with pytest.raises(SourceError, match="another archive was appended"):
        run(tmp_path, "webdataset", tmp_path / "out")


def test_archive_of_any_ratio_is_unpacked_only_on_request(tmp_path):
    """A file of a few kilobytes fills no disk."""
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar({"0.bin": bytes(20 << 20), "1.bin": b"1"})))

    def job(**options):
        writer = ImportWriter(kind="webdataset", features={"bin": Bytes()}, **options)
        return Prepared(writer, tmp_path / "a.tar.gz", tmp_path / "out", executor=InlineExecutor())

    with pytest.raises(SourceError, match=r"a\.tar\.gz .*more than 500 times its .*max_unpack_ratio="):
        job()

    assert job(max_unpack_ratio=2000).run(progress=False).num_records == 2
    with pytest.raises(OptionError, match="max_unpack_ratio is 0"):
        job(max_unpack_ratio=0)


def test_spool_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text(json.dumps([]))

    with pytest.raises(OptionError, match="which is a file"):
        ImportWriter(spool=tmp_path / "file")


@pytest.mark.parametrize("line", ['{"key": ' + "[" * 100_000, '{"key": "b", "n": 1', "\xff", '"text"'])
def test_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text('{"key": "a", "n": 0}\n' + line, "latin-1")

    with pytest.raises(SourceError, match=r"rows\.jsonl line 2"):
        run(tmp_path / "rows.jsonl", "table", tmp_path / "out")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"images": 7}'])
def test_annotations_that_are_none_are_named(tmp_path, text):
    (tmp_path / "instances_train.json").write_text(text)

    with pytest.raises(SourceError, match=r"instances_train\.json"):
        run(tmp_path, "coco", tmp_path / "out")
