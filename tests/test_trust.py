"""What others may have planted: in the source, in the output, in files that are read back.

Each promise is a check that takes what is to be tested as an argument. It passes for datamat, and it must fail for a
stub that is vulnerable on purpose: otherwise it would show nothing.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
import zlib

import numpy as np
import pyarrow as pa
import pytest
import sets
import xxhash
from pyarrow import parquet

import datamat
from datamat import (
    CorruptDataError,
    DatamatError,
    Index,
    IndexRow,
    Manifest,
    Materializer,
    ShardOptions,
    SourceError,
    WorkerOptions,
    load,
    verify,
)
from datamat.formats import Offsets, get_format
from datamat.formats.framing import frame
from datamat.formats.gzip_members import deflate_member
from datamat.index_files import read_index_file
from datamat.ledger import read_ledger
from datamat.receipts import Receipt
from datamat.row_writer import write_rows
from datamat.status import read_status
from datamat.storage import read_json, render_json
from datamat.writers.camvid import CamVidWriter

PACKAGE = pathlib.Path(datamat.__file__).parent


def holds(check, *, of, but_not_of):
    """Assert that a check passes for what is tested, and fails for a vulnerable stub."""
    check(of)
    with pytest.raises(AssertionError):
        check(but_not_of)


def is_refused(call, *arguments):
    """Tell whether a call ends in an error that datamat raises on purpose."""
    try:
        call(*arguments)
    except DatamatError:
        return True
    except (OSError, ValueError):
        return False
    return False


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twenty pairs in `train`, four in `val`."""
    return sets.make_pairs(tmp_path_factory.mktemp("source"))


def _job(source, output, writer=None, **options):
    options = {"shards": ShardOptions(num_shards=2), "workers": WorkerOptions(num_workers=1), **options}
    return Materializer(writer or sets.Pairs(), source, output, **options)


@pytest.fixture(scope="module")
def template(source, tmp_path_factory):
    """A finished directory."""
    output = tmp_path_factory.mktemp("template") / "out"
    _job(source, output).run(progress=False)
    return output


@pytest.fixture
def output(template, tmp_path):
    """A finished directory to plant things in."""
    return shutil.copytree(template, tmp_path / "out")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


@pytest.mark.slow
def test_pickle_in_the_place_of_any_file_is_never_run(source, output, tmp_path):
    """Manifest, index, offsets, ledger, shards, leftovers of a run: everything that is read back, by every reader."""

    def look(path):
        for call in (
            lambda: verify(output, deep=True),
            lambda: read_status(output),
            lambda: load(output).keys(),
            lambda: list(load(output)),
            lambda: _job(source, output).status(),
            lambda: list(read_ledger(path)),
            lambda: Receipt.from_json(read_json(path)),
            lambda: read_index_file(path),
            lambda: _job(source, output).run(progress=False),
        ):
            with contextlib.suppress(DatamatError, ValueError, OSError):
                call()

    def check(look):
        for number, name in enumerate(files):
            marker = tmp_path / f"marker-{number}"
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (output / name).write_bytes(pickle.dumps(Bomb(marker)))
            look(output / name)
            assert not marker.exists(), name

    files = [str(path.relative_to(output)) for path in output.rglob("*") if path.is_file() and path.name != "lock"]
    leftovers = ["shards/manifest.json", "shards/pairs-train-00000-of-00002.json", "rows/plan.json", "rows/rows.json"]
    leftovers += ["parts/pairs-train-00000-of-00002/00000.json", "parts/pairs-train-00000-of-00002/00000.tfrecord.idx"]
    files = [*(f".datamat/{name}" for name in leftovers), *files]
    assert {"manifest.json", "index/train.parquet", ".datamat/ledger.jsonl"} <= set(files)

    holds(check, of=look, but_not_of=lambda path: pickle.loads(path.read_bytes()))


def test_pickle_in_the_place_of_the_manifest_is_a_clean_error(output):
    """Named, with a remedy."""
    (output / "manifest.json").write_bytes(pickle.dumps({"datamat_manifest": 1}))

    holds(
        lambda read: _assert(is_refused(read, output)),
        of=Manifest.read,
        but_not_of=lambda folder: pickle.loads((folder / "manifest.json").read_bytes()),
    )
    assert not verify(output).ok


def _assert(value):
    assert value


def test_extension_types_of_parquet_run_nothing(tmp_path):
    """Old readers unpickled the metadata of Python extension types (CVE-2023-47248)."""
    marker, path = tmp_path / "marker", tmp_path / "index.parquet"
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(marker)),
    }
    schema = pa.schema([pa.field("key", pa.string(), metadata=metadata), pa.field("shard", pa.int32())])
    parquet.write_table(pa.table([["a"], pa.array([0], pa.int32())], schema=schema), path)

    def check(read):
        with contextlib.suppress(DatamatError):
            read(path)
        assert not marker.exists()

    def vulnerable(path):
        stored = pa.ipc.read_schema(pa.py_buffer(schema.serialize())).field("key").metadata
        pickle.loads(stored[b"ARROW:extension:metadata"])

    holds(check, of=read_index_file, but_not_of=vulnerable)


_DANGEROUS = {
    **dict.fromkeys(["pickle", "dill", "marshal", "joblib", "cloudpickle", "shelve"], ("load", "loads", "open")),
    "yaml": ("load", "unsafe_load", "full_load"),
    "os": ("system", "popen"),
}


def _dangerous_calls(text):
    """Return the calls in a source that would run what they read."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in {"eval", "exec", "__import__"}:
            found.append(called.id)
        if isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if called.attr in _DANGEROUS.get(owner, ()) or called.attr in {"extractall", "extract", "Unpickler"}:
                found.append(f"{owner}.{called.attr}")
        flags = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        found += [name for name in ("shell", "allow_pickle") if flags.get(name)]
    return found


def test_nothing_unpickles_but_the_pipes_between_processes():
    """Nor is anything evaluated, handed to a shell or extracted from an archive."""
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.parent.name != "parallel"}

    def check(texts):
        assert not [(name, calls) for name, text in texts.items() if (calls := _dangerous_calls(text))]

    assert len(sources) > 50
    for stub in ("pickle.loads(data)", "eval(text)", "np.load(path, allow_pickle=True)", "tar.extractall(folder)"):
        holds(check, of=sources, but_not_of={"stub": stub})


_FILES = [
    "../x.tfrecord",
    "/etc/passwd",
    "a/b.tfrecord",
    ".hidden",
    "..",
    "",
    "a\0b",
    "x\n-00000-of-00001.t",
    "\x1b[2J",
]


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("where", ["file", "split", "checksum", "index split", "index checksum", "name"])
def test_manifest_leads_nowhere_else(output, name, where):
    """Not by the file of a shard, a split (which names an index file), a checksum (a copy) or the data set's name."""
    values = json.loads((output / "manifest.json").read_text())
    if where == "name":
        values["name"] = name
    elif where.startswith("index "):
        values["index"][0][where.removeprefix("index ")] = name
    else:
        values["shards"][0][where] = name
    del values["digest"]
    digest = xxhash.xxh3_128_hexdigest(render_json(values))
    (output / "manifest.json").write_bytes(render_json({**values, "digest": digest}))

    def naive(folder):
        return json.loads((folder / "manifest.json").read_text())

    for read in (Manifest.read, load):
        holds(lambda read: _assert(is_refused(read, output)), of=read, but_not_of=naive)
    assert [problem.file for problem in verify(output).found] == ["manifest.json"]


@pytest.mark.parametrize("number", [-1, 1 << 63, 10**400, 1.5, True, "7", None])
@pytest.mark.parametrize("field", ["num_bytes", "num_records", "num_rows"])
def test_numbers_of_a_manifest_are_sane(output, number, field):
    """No others than files can have: those would overflow, or ask for memory that no machine has."""
    text = (output / "manifest.json").read_text()
    values = json.loads(text)
    values["shards"][0][field] = number
    with contextlib.suppress(ValueError):  # Python refuses to write numbers of so many digits
        (output / "manifest.json").write_text(json.dumps(values))
    if number == 10**400:
        (output / "manifest.json").write_text(text.replace('"num_bytes": ', '"num_bytes": ' + "1" * 400, 1))

    holds(
        lambda read: _assert(is_refused(read, output)),
        of=lambda folder: Manifest.read(folder, strict=False),
        but_not_of=lambda folder: json.loads((folder / "manifest.json").read_text()),
    )


def _peak_of(call, *arguments):
    """Return the most memory that a call takes, in MB."""
    tracemalloc.start()
    with contextlib.suppress(DatamatError, ValueError):
        call(*arguments)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return peak


def test_header_that_claims_gigabytes_takes_no_memory(tmp_path):
    """A record of 2 GiB in a file of 30 bytes, with the right checksum of its length."""
    path = tmp_path / "x.tfrecord"
    header = frame([b""], 0)[0][:0] + frame([b"x"], (1 << 31) - 1)[0][:12]
    path.write_bytes(header + b"not so much")

    def naive(path):
        with open(path, "rb") as file:
            return file.read(12) and file.read((1 << 31) - 1)

    def check(read):
        assert _peak_of(read, path) < 64

    holds(check, of=lambda path: list(get_format("tfrecord").read(path)), but_not_of=naive)


@pytest.mark.parametrize("begins", [b"", frame([b"x" * 100], 100)[0]])
def test_gzip_member_that_inflates_to_gigabytes_takes_no_memory(tmp_path, begins):
    """A megabyte of file and one member of a gigabyte, in the place of a shard and of one record."""
    path = tmp_path / "x.tfrecord.gz"
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    pieces = [deflate.compress(begins), *(deflate.compress(bytes(1 << 20)) for _ in range(1 << 10)), deflate.flush()]
    # The constant header of members, from one that was written.
    path.write_bytes(deflate_member(b"", level=6)[:10] + b"".join(pieces) + bytes(8))
    size = path.stat().st_size
    shard_format = get_format("tfrecord.gz")

    def check(read):
        assert _peak_of(_refused, read) < 64

    def naive():
        gzip.decompress(path.read_bytes())

    def one_record():
        numbers = (np.array([number], np.uint64) for number in (0, size, 0))
        shard_format.reader(path, Offsets(*numbers)).read(0)

    holds(check, of=lambda: list(shard_format.read(path)), but_not_of=naive)
    holds(check, of=one_record, but_not_of=naive)
    with pytest.raises(CorruptDataError, match=r"x\.tfrecord\.gz.*(checksum of the length|more than its records)"):
        one_record()


def _refused(call):
    with contextlib.suppress(CorruptDataError, EOFError, gzip.BadGzipFile):
        call()


def test_offsets_that_claim_gigabytes_take_no_memory(output):
    """Nor does a manifest that agrees with them."""
    shard = sorted(output.glob("*-train-*.tfrecord"))[0]
    offsets = shard.with_suffix(".idx").read_text().splitlines()
    offsets[3] = f"{offsets[3].split()[0]} {1 << 31}"
    shard.with_suffix(".idx").write_text("\n".join(offsets) + "\n")
    values = json.loads((output / "manifest.json").read_text())
    values["shards"][0]["num_bytes"] = 1 << 33
    del values["digest"]
    digest = xxhash.xxh3_128_hexdigest(render_json(values))
    (output / "manifest.json").write_bytes(render_json({**values, "digest": digest}))

    def naive(folder):
        with open(folder / shard.name, "rb") as file:
            return os.pread(file.fileno(), 1 << 31, 0)

    def check(read):
        assert _peak_of(read, output) < 64

    holds(check, of=lambda folder: load(folder)[3], but_not_of=naive)
    holds(check, of=verify, but_not_of=naive)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "shard", "idx", "index/train.parquet"])
def test_what_is_no_file_is_named_and_not_waited_for(output, kind, name):
    """A FIFO would block its reader for ever, `/dev/zero` never ends."""
    shard = sorted(output.glob("*-train-*.tfrecord"))[0]
    path = {"shard": shard, "idx": shard.with_suffix(".idx")}.get(name, output / name)
    path.unlink()
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "fifo" else os.mkdir)(path)

    found = verify(output)

    assert found.files[0] == str(path.relative_to(output))
    assert read_status(output).state == ("damaged" if name == "manifest.json" else "complete")


def _write(rows, folder, source):
    return write_rows(rows, folder, source=str(source), file_fields=["file"])


def _naive_write(rows, folder, source):
    """Vulnerable: believes keys and paths."""
    for row in rows:
        for path in row.fields.values():
            (folder / row.key.replace("/", "_").replace("\0", "")).write_bytes(
                (source / path.lstrip("/")).read_bytes()[:9]
            )


@pytest.mark.parametrize(
    "hostile", ["..", "absolute", "NUL", "newline", "FIFO", "device", "folder", "link", "link above"]
)
def test_hostile_input_paths_are_refused(tmp_path, hostile):
    """In an index: nothing of them is read, and the message names the row."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir(), outside.mkdir(), (tmp_path / "rows").mkdir(), (tmp_path / "naive").mkdir()
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
        "folder": ".",
        "link above": "linked/secret",
    }.get(hostile, hostile)
    rows = [IndexRow("row7", "train", {"file": path}, "list.txt:7")]

    with pytest.raises(SourceError, match=r"list\.txt:7: file '") as raised:
        _write(rows, tmp_path / "rows", source)

    assert raised.value.args[0].isprintable()
    if hostile in {"..", "link", "link above"}:  # those that lead a naive reader to something
        _naive_write(rows, tmp_path / "naive", source)
        assert (tmp_path / "naive" / "row7").read_text() == "secret"


def test_links_inside_the_source_are_followed(tmp_path):
    """So are absolute paths, which only the writer's own code can give, and a source that is a link itself."""
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


_KEYS = ["../../evil", "a/b", "/etc/passwd", "..", "a\\b", "a\0b", "a\nb", "a\x1b[2J", "a#1", "", "\ud800"]


@pytest.mark.parametrize("key", _KEYS)
def test_keys_name_nothing_outside(tmp_path, key):
    """They become parts of names of files and of members of archives."""

    def check(write):
        with contextlib.suppress(ValueError, OSError):
            write([IndexRow("good"), IndexRow(key)], folder)
            raise AssertionError(f"{key!r} is accepted")

    folder = tmp_path / "rows"
    folder.mkdir()

    holds(check, of=lambda rows, folder: write_rows(rows, folder, source=""), but_not_of=lambda rows, folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]


def test_list_files_lead_nowhere_outside(tmp_path):
    """Whatever their lines say, and whoever wrote them."""
    source = tmp_path / "source"
    source.mkdir(), (tmp_path / "rows").mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (source / "train.txt").write_text(f"{tmp_path}/secret.png ../secret.png\n")

    index = Index.from_lists(source, {"train": "train.txt"})

    with pytest.raises(SourceError, match=r"train\.txt:1"):
        write_rows(index, tmp_path / "rows", source=str(source), file_fields=["image", "mask"])


@pytest.mark.parametrize("kind", ["link", "FIFO", "device"])
def test_list_file_that_is_no_file_of_the_source_is_refused(tmp_path, kind):
    """Nothing of what it leads to is read, nor waited for."""
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


_PLANTED = ["index", ".datamat", ".datamat/parts", ".datamat/shards", ".datamat/rows", ".datamat/ledger.jsonl"]
_PLANTED += [".datamat/lock", "manifest.json", "pairs-train-00000-of-00002.tfrecord", "pairs-train-00000-of-00002.idx"]
_PLANTED += ["index/train.parquet", ".datamat/parts/pairs-train-00000-of-00002", ".datamat/quarantine"]


@pytest.mark.parametrize("name", _PLANTED)
def test_planted_links_are_not_written_through(source, tmp_path, name):
    """At every name that a run writes to: refused, or replaced; what they lead to stays as it is."""

    def check(run):
        output, victim = pathlib.Path(tempfile.mkdtemp(dir=tmp_path)), pathlib.Path(tempfile.mkdtemp(dir=tmp_path))
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        is_file = "." in name.rpartition("/")[2][1:] or name.endswith("lock")
        if is_file:
            victim = victim / "file"
            victim.write_text("precious")
        (output / name).symlink_to(victim)
        with contextlib.suppress(DatamatError):
            run(output)
        assert victim.read_text() == "precious" if is_file else not list(victim.iterdir())

    def naive(output):
        target = output / name
        (target if target.is_file() else target / "new").write_text("data")

    holds(check, of=lambda output: _job(source, output).run(progress=False), but_not_of=naive)


_UNDER_UMASK = """
import os, pathlib, sys
os.umask(0o077)
import sets
from datamat import *
output = pathlib.Path(sys.argv[2])
Materializer(sets.Pairs(), sys.argv[1], output, workers=WorkerOptions(num_workers=1)).run(progress=False)
"""


@pytest.mark.slow
def test_umask_is_honoured(source, tmp_path):
    """Of every file and folder that a run makes, its workers' too."""

    def check(more):
        output = pathlib.Path(tempfile.mkdtemp(dir=tmp_path)) / "out"
        _run_script(_UNDER_UMASK + more, source, output)
        assert [str(path) for path in (output, *output.rglob("*")) if path.stat().st_mode & 0o077] == []

    holds(check, of="", but_not_of="output.chmod(0o755)")


def _run_script(script, *arguments):
    """Run a script in a process of its own, beside the modules of the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_temporary_places_are_private(source, tmp_path, monkeypatch):
    """What `plan`, `status` and `replay` write meanwhile can be read and changed by nobody else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []

    class Looking(sets.Pairs):
        def index(self, source):
            seen.extend(path.stat().st_mode & 0o777 for path in tmp_path.iterdir())
            return super().index(source)

    def check(plan):
        seen.clear()
        plan()
        assert seen and not any(mode & 0o077 for mode in seen)

    def naive():
        (tmp_path / "datamat").mkdir()
        (tmp_path / "datamat").chmod(0o777)
        Looking().index(source)

    holds(check, of=_job(source, tmp_path / "x" / "out", Looking()).plan, but_not_of=naive)


class Private(sets.Pairs):
    """Holds a token, and fails at one sample if it is told to."""

    def __init__(self, fails):
        self.token = "hunter2-token"
        self.fails = fails

    def read(self, row):
        if self.fails and row.key == "train003":
            raise ValueError("no access")
        return super().read(row)


@pytest.mark.parametrize("fails", [True, False])
def test_secrets_of_a_writer_are_written_nowhere(source, tmp_path, fails):
    """A token that it holds is in no manifest, ledger, index or leftover, whether the run ends well or not."""

    def check(folder):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files and not [path for path in files if b"hunter2-token" in path.read_bytes()]

    with contextlib.suppress(DatamatError):
        _job(source, tmp_path / "out", Private(fails)).run(progress=False)
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "ledger.jsonl").write_text(json.dumps({"writer": vars(Private(fails))}))

    holds(check, of=tmp_path / "out", but_not_of=tmp_path / "stub")


_OFFLINE = """
import sys
def refuse(event, arguments):
    is_internet = event in ("socket.connect", "socket.bind") and isinstance(arguments[1], tuple)
    if event == "socket.getaddrinfo" or is_internet:
        print("network", event, arguments, flush=True)
        sys.exit(7)
sys.addaudithook(refuse)
import sets
from datamat import *
job = Materializer(sets.Pairs(), sys.argv[1], sys.argv[2], workers=WorkerOptions(num_workers=2, start_method="fork"))
job.run(progress=False); job.verify(); load(sys.argv[2])[0]
"""


@pytest.mark.slow
def test_local_runs_use_no_network(source, tmp_path):
    """No look-up, no connection, no listening socket: not on import, not in a worker, not in a reader."""

    def check(more):
        found = _run_script(_OFFLINE + more, source, tempfile.mkdtemp(dir=tmp_path))
        assert (found.returncode, found.stdout) == (0, ""), found.stderr

    holds(check, of="", but_not_of="import socket; socket.create_connection(('127.0.0.1', 9))")


def test_deep_json_ends_in_no_recursion(output):
    """Nested a hundred thousand deep, in the manifest, an entry and a plan."""
    for name in ("manifest.json", ".datamat/shards/x.json", ".datamat/rows/plan.json"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("[" * 100_000)

    assert read_status(output).state == "damaged"
    assert not verify(output).ok
