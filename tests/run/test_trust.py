"""What others may have planted: in the source, in the output, in files that are read back."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import zlib

import numpy as np
import pyarrow as pa
import pytest
import small_pairs
import xxhash
from pyarrow import parquet

from datamat import (
    CorruptDataError,
    DatamatError,
    Index,
    IndexRow,
    Manifest,
    SourceError,
    load,
    verify,
)
from datamat.directory.describe import describe
from datamat.directory.files import render_json
from datamat.directory.index_files import read_index
from datamat.directory.ledger import read_ledger
from datamat.directory.manifest import IndexInfo
from datamat.directory.sidecars.exporting import export
from datamat.formats import Offsets, get_format
from datamat.formats.tfrecord import frame
from datamat.formats.webdataset import member, parse_header
from datamat.run.convert import convert
from datamat.run.status import status as read_status
from datamat.sources.writing import write_rows
from datamat.testing import InlineExecutor
from datamat.writers.camvid import CamVidWriter


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


def test_pickle_in_the_place_of_any_file_is_never_run(source, output, tmp_path, request):
    """Manifest, index, offsets, ledger, shards, leftovers of a run: no reader unpickles what it reads back."""
    files = [str(path.relative_to(output)) for path in output.rglob("*") if path.is_file() and path.name != "lock"]
    leftovers = ["shards/manifest.json", "shards/pairs-train-00000-of-00002.json", "rows/plan.json", "rows/rows.json"]
    leftovers += ["parts/pairs-train-00000-of-00002/00000.receipt"]
    files = [*(f".datamat/{name}" for name in leftovers), *files]
    assert {"manifest.json", "_index/train.index", ".datamat/ledger.jsonl"} <= set(files)
    if request.config.getoption("--commit"):
        files = files[request.config.option.sample_seed % 3 :: 3]
    marker = tmp_path / "marker"

    for name in files:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(pickle.dumps(Bomb(marker)))
        for look in (
            lambda: verify(output),
            lambda: read_status(output),
            lambda: load(output).keys(),
            lambda: list(load(output)),
            lambda name=name: list(read_ledger(output / name)),
            lambda: small_pairs.job(source, output).status(),
            lambda: small_pairs.job(source, output).run(progress=False),
        ):
            with contextlib.suppress(DatamatError, ValueError, OSError):
                look()
        assert not marker.exists(), name

    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()


def test_pickle_in_the_place_of_the_manifest_is_a_clean_error(output):
    """It names the file."""
    (output / "manifest.json").write_bytes(pickle.dumps({"datamat_manifest": 1}))

    with pytest.raises(DatamatError, match=r"manifest\.json"):
        Manifest.read(output)
    assert not verify(output).ok


def test_extension_types_of_parquet_run_nothing(tmp_path):
    """Old readers unpickled the metadata of Python extension types (CVE-2023-47248)."""
    marker, path = tmp_path / "marker", tmp_path / "index.parquet"
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(marker)),
    }
    schema = pa.schema([pa.field("key", pa.string(), metadata=metadata), pa.field("shard", pa.int32())])
    parquet.write_table(pa.table([["a"], pa.array([0], pa.int32())], schema=schema), path)

    with contextlib.suppress(DatamatError):
        read_index(path.parent, path.name)

    assert not marker.exists()


_FILES = [
    "../x.tfrecord", "/etc/passwd", "a/b.tfrecord", ".hidden", "..", "", "a\0b", "x\n-00000-of-00001.t", "\x1b[2J",
]  # fmt: skip


def _rewrite_manifest(output, change):
    """Change the manifest as somebody does who can make digests."""
    values = json.loads((output / "manifest.json").read_text())
    change(values)
    del values["digest"]
    digest = xxhash.xxh3_128_hexdigest(render_json(values))
    (output / "manifest.json").write_bytes(render_json({**values, "digest": digest}))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("where", ["file", "split", "checksum", "index split", "index checksum", "name"])
def test_manifest_leads_nowhere_else(output, name, where):
    """No name in it may leave the directory: a shard's file, a split (index file), a checksum (copy), the dataset."""

    def change(values):
        place, _, field = where.rpartition(" ")
        entry = values if where == "name" else values[place or "shards"][0]
        entry[field] = name

    _rewrite_manifest(output, change)

    for read in (Manifest.read, load):
        with pytest.raises(DatamatError):
            read(output)
    assert [problem.file for problem in verify(output).found] == ["manifest.json"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", [-1, 1 << 63, 10**400, 1.5, True, "7", None])
@pytest.mark.parametrize("field", ["num_bytes", "num_records", "num_rows"])
def test_impossible_numbers_in_a_manifest_are_refused(output, number, field):
    """Numbers that no file can have would overflow, or ask for memory that no machine has."""
    text = (output / "manifest.json").read_text()
    values = json.loads(text)
    values["shards"][0][field] = number
    with contextlib.suppress(ValueError):  # Python refuses to write numbers of so many digits
        (output / "manifest.json").write_text(json.dumps(values))
    if number == 10**400:
        (output / "manifest.json").write_text(text.replace('"num_bytes": ', '"num_bytes": ' + "1" * 400, 1))

    with pytest.raises(DatamatError):
        Manifest.read(output, strict=False)


def _peak_of(call, *arguments):
    """Return the most memory that a call takes, in MB."""
    tracemalloc.start()
    with contextlib.suppress(DatamatError, ValueError):
        call(*arguments)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return peak


def test_header_that_claims_gigabytes_takes_no_memory(tmp_path):
    """A file of 30 bytes claims a record of 2 GiB, with the right checksum of its length."""
    path = tmp_path / "x.tfrecord"
    header = frame([b""], 0)[0][:0] + frame([b"x"], (1 << 31) - 1)[0][:12]
    path.write_bytes(header + b"not so much")

    assert _peak_of(lambda: list(get_format("tfrecord").read(path))) < 64


@pytest.mark.parametrize("begins", [b"", frame([b"x" * 100], 100)[0]])
def test_gzip_member_that_inflates_a_thousandfold_takes_no_memory(tmp_path, begins):
    """A small file holds one member of 96 MiB, in the place of a shard and of one record."""
    path = tmp_path / "x.tfrecord.gz"
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    pieces = [deflate.compress(begins), *(deflate.compress(bytes(1 << 20)) for _ in range(96)), deflate.flush()]
    header = b"\x1f\x8b\x08" + bytes(6) + b"\xff"  # of every member
    path.write_bytes(header + b"".join(pieces) + bytes(8))
    size = path.stat().st_size
    shard_format = get_format("tfrecord.gz")

    def one_record():
        numbers = (np.array([number], np.uint64) for number in (0, size, 0))
        shard_format.reader(path, Offsets(*numbers)).read(0)

    assert _peak_of(lambda: list(shard_format.read(path))) < 48
    assert _peak_of(one_record) < 48
    with pytest.raises(CorruptDataError, match=r"x\.tfrecord\.gz"):
        one_record()


def test_offsets_that_claim_gigabytes_take_no_memory(output):
    """A manifest that agrees with them makes no difference."""
    shard = sorted(output.glob("*-train-*.tfrecord"))[0]
    offsets = shard.with_suffix(".idx").read_text().splitlines()
    offsets[3] = f"{offsets[3].split()[0]} {1 << 31}"
    shard.with_suffix(".idx").write_text("\n".join(offsets) + "\n")
    _rewrite_manifest(output, lambda values: values["shards"][0].update(num_bytes=1 << 33))

    assert _peak_of(lambda: load(output)[3]) < 64
    assert _peak_of(verify, output) < 64


def _plant(path, kind, outside):
    """Put something else in the place of a file."""
    outside.mkdir()
    if kind == "link out":
        path.rename(outside / "moved")
        path.symlink_to(outside / "moved")
        return
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)


def _damage_of(report):
    assert report.files


_HERE = {"executor": InlineExecutor(), "progress": False}
READERS = {
    "by number": lambda output, source: load(output)[0],
    "by key": lambda output, source: load(output)["train003"],
    "in order": lambda output, source: list(load(output)),
    "to_numpy": lambda output, source: list(load(output).to_numpy(4)),
    "to_tf": lambda output, source: list(load(output).to_tf(batch_size=4)),
    "verify": lambda output, source: _damage_of(verify(output, deep=True)),
    "describe": lambda output, source: describe(output),
    "status": lambda output, source: small_pairs.job(source, output).status(),
    "provenance": lambda output, source: small_pairs.job(source, output).provenance("train003"),
    "export": lambda output, source: export(output),
    "convert": lambda output, source: convert(output, f"{output}-2", shards=1, **_HERE),
}
_RECORDS = ("manifest.json", "shard", "idx")
_NEEDED = {
    **dict.fromkeys(("by number", "in order", "to_numpy"), _RECORDS),
    "by key": ("manifest.json",),
    "provenance": ("manifest.json", "_index/train.index"),
    **dict.fromkeys(("to_tf", "describe"), ("manifest.json", "shard")),
    **dict.fromkeys(("verify", "status"), ()),  # which report what they find, and raise nothing
    "export": ("manifest.json",),
    "convert": (*_RECORDS, "_index/train.index"),
}


@pytest.mark.sample(9)  # each pair of kind and name, and each reader twice
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "link out"])
@pytest.mark.parametrize("name", ["manifest.json", "shard", "idx", "_index/train.index", "_index/train.keys"])
@pytest.mark.parametrize(
    "reader", [pytest.param(name, marks=pytest.mark.long if name == "to_tf" else ()) for name in READERS]
)
def test_no_reader_waits_for_or_follows_what_is_no_file_there(source, output, tmp_path, name, kind, reader):
    """A FIFO, an endless device, a folder, a file elsewhere: an error at once, or a reader that needs no such file."""
    if reader == "to_tf":
        pytest.importorskip("tensorflow")
    shard = sorted(output.glob("*-train-*.tfrecord"))[0]
    path = {"shard": shard, "idx": shard.with_suffix(".idx")}.get(name, output / name)
    _plant(path, kind, tmp_path / "outside")

    message = ""
    try:
        READERS[reader](output, source)
    except (DatamatError, OSError) as error:
        message = str(error)

    assert path.name in message if name in _NEEDED[reader] else not message or path.name in message


def test_links_are_followed_as_far_as_they_stay_in_the_directory(output, tmp_path):
    """The error for a link that leads out says how to bring the file in; a directory may itself be a link."""
    shard = sorted(output.glob("*-train-*.tfrecord"))[0]
    (output / "store").mkdir()
    shard.rename(output / "store" / shard.name)
    shard.symlink_to(f"store/{shard.name}")
    (tmp_path / "link").symlink_to(output)

    assert load(tmp_path / "link")[0]["key"] == load(output)[0]["key"]
    assert verify(tmp_path / "link", deep=True).ok
    (output / "store").rename(tmp_path / "store")
    (output / "store").symlink_to(tmp_path / "store")
    message = rf"{shard.name} is a link to .*, outside its directory, and is not followed; copy .* \(cp -rL\)"
    with pytest.raises(CorruptDataError, match=message):
        load(output)[0]
    assert re.search(message.partition(" ")[2], str(verify(output)))


def test_snapshot_in_the_cache_of_the_hub_is_read(output, tmp_path):
    """There each file is a link to a blob named after its content; other links out of the directory are refused."""
    root = tmp_path / "datasets--user--pairs"
    snapshot = root / "snapshots" / ("c0ffee00" * 5)
    (root / "blobs").mkdir(parents=True)
    for number, path in enumerate(path for path in sorted(output.rglob("*")) if path.is_file()):
        if ".datamat" not in path.parts:
            link = snapshot / path.relative_to(output)
            link.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / "blobs" / f"{number:040x}")
            link.symlink_to(os.path.relpath(root / "blobs" / f"{number:040x}", link.parent))

    assert len(list(load(snapshot))) == len(load(output)) and verify(snapshot).ok
    shard = sorted(snapshot.glob("*-train-*.tfrecord"))[0]
    (root / "secret").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(root / "secret")
    with pytest.raises(CorruptDataError, match="is not followed"):
        load(snapshot)[0]


def test_small_index_that_expands_to_gigabytes_costs_nothing(output, tmp_path):
    """One key with a huge count, or one text of megabytes for every row, is refused before memory is allocated."""
    path = output / "_index" / "train.index"
    num_rows = parquet.read_metadata(path).num_rows
    numbers = pa.array(np.zeros(4_000_000, np.int32))
    many = pa.table({"key": pa.DictionaryArray.from_arrays(numbers, ["k"]), "shard": numbers, "record": numbers})
    numbers = numbers.slice(0, num_rows)
    long = {"key": pa.DictionaryArray.from_arrays(numbers, ["k" * (8 << 20)]), "shard": numbers, "record": numbers}

    for table, message in (
        (many, "4,000,000 rows, the manifest says"),
        (pa.table(long), "take more than 67108864 bytes"),
    ):
        parquet.write_table(table, path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 100_000
        manifest = Manifest.read(output)  # of whoever forged both
        index = [
            IndexInfo.of_file(path) if info.kind == "index" and info.split == "train" else info
            for info in manifest.index
        ]
        dataclasses.replace(manifest, index=tuple(index)).write(output)
        with pytest.raises(CorruptDataError, match=message):
            load(output).keys()
        assert message in str(verify(output))
        with pytest.raises(CorruptDataError, match="rows"):
            read_index(path.parent, path.name)


@pytest.mark.parametrize("size", [b"-0000000001", b"+0000000001", b"0000000_001", b"0x00000001 "])
def test_tar_member_of_an_impossible_size_is_damage(size):
    """`int` would accept signs and underscores."""
    header = bytearray(member("a.json", b"x")[0])
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * ord(" "))

    with pytest.raises(CorruptDataError, match=re.escape(f"the size is {size.strip()!r}")):
        parse_header(bytes(header))


def _write(rows, folder, source):
    return write_rows(rows, folder, source=str(source), file_fields=["file"])


@pytest.mark.parametrize("hostile", ["..", "absolute", "NUL", "newline", "FIFO", "device", "link", "link above"])
def test_hostile_input_paths_are_refused(tmp_path, hostile):
    """A hostile path in an index is never read, and the message names the row."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir(), outside.mkdir(), (tmp_path / "rows").mkdir()
    (outside / "secret").write_text("secret")
    (source / "link").symlink_to(outside / "secret")
    (source / "linked").symlink_to(outside)
    os.mkfifo(source / "FIFO")
    (source / "device").symlink_to("/dev/zero")
    path = {
        "..": "../outside/secret",
        "absolute": "/outside/secret",
        "NUL": "a\0b",
        "newline": "a\nb",
        "link above": "linked/secret",
    }.get(hostile, hostile)
    rows = [IndexRow("row7", "train", {"file": path}, "list.txt:7")]

    with pytest.raises(SourceError, match=r"list\.txt:7: file '") as raised:
        _write(rows, tmp_path / "rows", source)

    assert raised.value.args[0].isprintable()


def test_links_inside_the_source_are_followed(tmp_path):
    """So are absolute paths, which only the writer's own code can give, and a source that is itself a link."""
    real = tmp_path / "real"
    (real / "a").mkdir(parents=True), (tmp_path / "rows").mkdir()
    (real / "a" / "x").write_text("12345")
    (real / "b").symlink_to("a")
    (real / "y").symlink_to("a/x")
    (tmp_path / "source").symlink_to(real)
    outside = tmp_path / "outside"
    outside.write_text("123")
    paths = ["a/x", "b/x", "y", str(outside)]
    rows = [IndexRow(f"row{number}", "train", {"file": path}) for number, path in enumerate(paths)]

    store = _write(rows, tmp_path / "rows", tmp_path / "source")

    assert store.input_bytes().tolist() == [5, 5, 5, 3]


_KEYS = ["../../evil", "a/b", "/etc/passwd", "..", "a\\b", "a\0b", "a\nb", "a\x1b[2J", "a#1"]


@pytest.mark.parametrize("key", _KEYS)
def test_keys_name_nothing_outside(tmp_path, key):
    """They become parts of the names of files and of archive members: what would lead elsewhere is escaped."""
    folder = tmp_path / "rows"
    folder.mkdir()

    (stored,) = write_rows([IndexRow(key)], folder, source="").keys(np.arange(1))

    assert stored.isprintable()
    assert not {"/", "\\", "#"} & set(stored)
    assert ".." not in stored
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]


@pytest.mark.parametrize("key", ["", "\ud800"])
def test_key_that_has_no_safe_form_is_refused(tmp_path, key):
    """Nothing can be named by it."""
    with pytest.raises(SourceError, match="want a non-empty str"):
        write_rows([IndexRow("good"), IndexRow(key)], tmp_path, source="")


def test_list_files_lead_nowhere_outside(tmp_path):
    """Nothing that their lines say, whoever wrote them, leads out of the source."""
    source = tmp_path / "source"
    source.mkdir(), (tmp_path / "rows").mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (source / "train.txt").write_text(f"{tmp_path}/secret.png ../secret.png\n")

    index = Index.from_lists(source, {"train": "train.txt"})

    with pytest.raises(SourceError, match=r"train\.txt:1"):
        write_rows(index, tmp_path / "rows", source=str(source), file_fields=["image", "mask"])


@pytest.mark.parametrize("kind", ["link", "FIFO", "device"])
def test_list_file_that_is_no_file_of_the_source_is_refused(tmp_path, kind):
    """Nothing reads what it leads to, or waits for it."""
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "secret.txt").write_text("secret.png secret.png\n")
    if kind == "FIFO":
        os.mkfifo(source / "train.txt")
    else:
        (source / "train.txt").symlink_to(tmp_path / "secret.txt" if kind == "link" else "/dev/zero")
    os.mkfifo(source / "other.txt")

    with pytest.raises(SourceError, match=r"train\.txt: (a link leads out of the source|not a regular file)"):
        list(CamVidWriter().index(source))


_GUARDED = """
import os, pathlib, sys
def refuse(event, arguments):
    is_internet = event in ("socket.connect", "socket.bind") and isinstance(arguments[1], tuple)
    if event == "socket.getaddrinfo" or is_internet:
        print("network", event, arguments, flush=True)
        sys.exit(7)
sys.addaudithook(refuse)
os.umask(0o077)
"""
_RUN = """
import small_pairs
from datamat import WorkerOptions, load
job = small_pairs.job(sys.argv[1], sys.argv[2], workers=WorkerOptions(num_workers=2, start_method="fork"))
job.run(progress=False); job.verify(); load(sys.argv[2])[0]
"""


def test_run_honours_the_umask_and_uses_no_network(source, tmp_path):
    """No file or folder, of its workers either, is open to others; no look-up, no connection, no listening socket."""

    def run(script):
        path = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), *sys.path])
        command = [sys.executable, "-c", _GUARDED + script, str(source), str(tmp_path / "out")]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        return done.returncode, done.stdout, done.stderr

    assert run(_RUN)[:2] == (0, "")
    made = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert run("import socket; socket.create_connection(('127.0.0.1', 9))")[0] == 7


def test_temporary_places_are_private(source, tmp_path, monkeypatch):
    """Nobody else can read or change what `plan`, `status` and `replay` write while they work."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    class Looking(small_pairs.Pairs):
        def index(self, source):
            seen.extend(path.stat().st_mode & 0o777 for path in tmp_path.iterdir())
            return super().index(source)

    small_pairs.job(source, tmp_path / "x" / "out", Looking()).plan()

    assert seen
    assert not any(mode & 0o077 for mode in seen)


class Private(small_pairs.Pairs):
    """Holds a token, and fails at one sample on demand."""

    def __init__(self, fails):
        self.token = "hunter2-token"
        self.fails = fails

    def read(self, row):
        if self.fails and row.key == "train003":
            raise ValueError("no access")
        return super().read(row)


@pytest.mark.parametrize("fails", [True, False])
def test_secrets_of_a_writer_are_written_nowhere(source, tmp_path, fails):
    """A token that it holds is in no manifest, ledger, index or leftover, whether the run succeeds or fails."""
    with contextlib.suppress(DatamatError):
        small_pairs.job(source, tmp_path / "out", Private(fails)).run(progress=False)

    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hunter2-token" in path.read_bytes()]


def test_deep_json_ends_in_no_recursion(output):
    """JSON nested a hundred thousand deep, in the manifest, an entry or a plan, is an error like any other."""
    for name in ("manifest.json", ".datamat/shards/x.json", ".datamat/rows/plan.json"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("[" * 100_000)

    assert read_status(output).state == "damaged"
    assert not verify(output).ok
