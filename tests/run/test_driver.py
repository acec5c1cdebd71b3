"""The driver's work for each part and each shard: it does nothing twice, and nothing for all of them at once."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from prepared import Prepared

from datamat import DatasetWriter, Features, IndexRow, Scalar, ShardOptions, WorkerOptions, load, verify
from datamat.directory.manifest import ShardInfo
from datamat.directory.sidecars.indexes import tar_index
from datamat.run.dispatch import PartQueue
from datamat.run.receipts import Receipt
from datamat.testing import InlineExecutor

FEW, MANY = 8, 40  # shards


class Rows(DatasetWriter):
    """One row for each file of the source."""

    name = "rows"
    features = Features({"label": Scalar("int64")})
    file_fields = ("file",)

    def index(self, source):
        for file in sorted(os.listdir(source)):
            yield IndexRow(file.partition(".")[0], "train", {"label": int(file[1:4]), "file": file})

    def read(self, row):
        return {"label": row.fields["label"]}


_PREFIXES = {"open": "", "os.remove": "removed "}
_opened: list[str] | None = None
_is_hooked = False


def _hear(event, args):
    if _opened is not None and event in _PREFIXES and isinstance(args[0], str):  # a descriptor is open already
        _opened.append(_PREFIXES[event] + os.path.basename(args[0]))


@contextlib.contextmanager
def counted(monkeypatch):
    """Record the names of the files that the block opens, "removed NAME" of those it removes, and its `stat` calls."""
    global _opened, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hear)  # cannot be removed: idle outside of the block
        _is_hooked = True
    looked: collections.Counter[str] = collections.Counter()

    def counting(look):
        def counted_stat(path, *args, **options):
            if not isinstance(path, int):
                looked[os.path.basename(os.fspath(path))] += 1
            return look(path, *args, **options)

        return counted_stat

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat"):
            patch.setattr(os, name, counting(getattr(os, name)))
        _opened = []
        try:
            yield _opened, looked
        finally:
            _opened = None


def _job(folder, num_shards, **options):
    """Return a job that runs in this process unless `workers` are given."""
    options = {"shards": ShardOptions(num_shards=num_shards), **options}
    if "workers" not in options:
        options.setdefault("executor", InlineExecutor())
    return Prepared(Rows(), folder / "raw", folder / "out", **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Finished directories with two rows in each shard, by the number of shards."""
    return {num_shards: _finished(tmp_path_factory.mktemp("driver"), num_shards) for num_shards in (FEW, MANY)}


def _finished(folder, num_shards):
    (folder / "raw").mkdir()
    for number in range(2 * num_shards):
        (folder / "raw" / f"r{number:03d}.txt").write_text(str(number))
    _job(folder, num_shards).run(progress=False)
    return folder


def test_run_with_nothing_to_do_opens_each_shard_twice(folders, monkeypatch):
    """To compare its ends and its offsets with the manifest; the number of other files does not grow with shards."""
    num_opened = {}
    for num_shards, folder in folders.items():
        with counted(monkeypatch) as (opened, _):
            report = _job(folder, num_shards).run(progress=False)

        assert report.did_nothing
        assert report.num_shards_reused == num_shards
        of_shards = collections.Counter(name for name in opened if name.endswith((".tfrecord", ".idx")))
        assert len(of_shards) == 2 * num_shards and set(of_shards.values()) == {2}
        num_opened[num_shards] = len(opened) - sum(of_shards.values())

    assert num_opened[MANY] == num_opened[FEW]


def test_status_opens_each_shard_once_and_load_none(folders, monkeypatch):
    """`status` compares with the source, and the ends of shards with the manifest; `load` opens the manifest alone."""
    folder = folders[MANY]

    with counted(monkeypatch) as (opened, _):
        status = _job(folder, MANY).status()
    with counted(monkeypatch) as (opened_to_load, looked_to_load):
        load(folder / "out", split="train")

    assert (status.is_complete, status.changes) == (True, ())
    assert not [name for name in opened if name.endswith(".txt")]
    assert set(collections.Counter(name for name in opened if name.endswith((".tfrecord", ".idx"))).values()) == {1}
    assert [name for name in opened_to_load if not name.endswith((".py", ".pyc"))] == ["manifest.json"]
    assert not [name for name in looked_to_load if name.endswith((".tfrecord", ".idx"))]


def test_verify_opens_each_file_of_a_shard_once_for_each_pass(folders, monkeypatch):
    """The checksum of the whole, the records and the offsets are one pass each, from front to back."""
    with counted(monkeypatch) as (opened, _):
        assert verify(folders[FEW] / "out").ok

    opens = collections.Counter(name.rpartition(".")[2] for name in opened if name.startswith("rows-train"))
    assert opens["idx"] == FEW
    assert opens["tfrecord"] <= 2 * FEW


@pytest.mark.parametrize("is_touched", [False, True])
def test_run_reads_only_finished_shards_that_were_written_to_since(folders, tmp_path, monkeypatch, is_touched):
    """Where one row changed, sizes and times vouch for the other shards; one with other times is read and compared."""
    folder = shutil.copytree(folders[FEW], tmp_path / "copy")
    (folder / "raw" / "r003.txt").write_text("other")
    shards = sorted(folder.glob("out/*.tfrecord"))
    for path in shards:
        os.utime(path, None if is_touched else (1, 1))

    with counted(monkeypatch) as (opened, _):
        report = _job(folder, FEW).run(progress=False)

    assert report.num_shards_reused == FEW - 1
    assert verify(folder / "out").ok
    assert max(opened.count(path.name) for path in shards) == (3 if is_touched else 0)


def test_unfinished_run_reads_no_shard_that_it_has_finished(folders, tmp_path, monkeypatch):
    """After a kill, the entries of finished shards suffice."""
    folder = shutil.copytree(folders[FEW], tmp_path / "copy")
    shutil.rmtree(folder / "out")
    _job(folder, FEW, include="train-0000[0-4]").run(progress=False)
    finished = [path.name for path in folder.glob("out/*.tfrecord")]

    monkeypatch.setattr(ShardInfo, "is_whole", lambda *_: pytest.fail("a whole shard is read"))
    with counted(monkeypatch) as (opened, _):
        report = _job(folder, FEW).run(progress=False)

    assert (report.num_shards_reused, report.is_complete) == (5, True)
    assert [opened.count(name) for name in finished] == [1] * 5  # for their ends


PARTS = 12


@pytest.fixture
def raw(tmp_path):
    """A folder whose source has as many rows as a run of two shards has parts, and more."""
    (tmp_path / "raw").mkdir()
    for number in range(PARTS):
        (tmp_path / "raw" / f"r{number:03d}.txt").write_text(str(number))
    return tmp_path


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "executor"])
def test_workers_see_to_what_parts_have_left(raw, monkeypatch, is_own):
    """The driver opens nothing of a part that arrives, and removes nothing: receipt, offsets and inputs are theirs."""
    with counted(monkeypatch) as (opened, _), ProcessPoolExecutor(1) as pool:
        options = {"workers": WorkerOptions(num_workers=2)} if is_own else {"executor": pool}
        report = _job(raw, 2, **options).run(progress=False)

    assert report.num_parts_written >= PARTS
    assert not [name for name in opened if name.removeprefix("removed ")[:5].isdigit()]
    assert verify(raw / "out").ok
    assert sorted(os.listdir(raw / "out" / ".datamat")) == [
        "inputs",
        "ledger.jsonl",
        "lock",
        "names.json",
        "sidecars.json",
    ]


def test_driver_opens_no_tar_shard_to_index_its_members(raw, monkeypatch):
    """The worker that completes a shard makes what DALI needs of it; the driver gives it a name."""
    with counted(monkeypatch) as (opened, _):
        _job(raw, 2, format="webdataset", workers=WorkerOptions(num_workers=2)).run(progress=False)

    assert not [name for name in opened if ".tar" in name and not name.endswith(".idx")]
    shards = sorted((raw / "out").glob("*.tar"))
    assert len(shards) == 2
    assert [(raw / "out" / f"{shard.name}.idx").read_bytes() for shard in shards] == [*map(tar_index, shards)]
    assert verify(raw / "out").ok


@pytest.mark.long
def test_benchmark_of_the_driver_runs():
    """It prints a line for each phase."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "driver.py"
    command = [sys.executable, str(script), "--parts", "200", "--shards", "--no-memory"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "take receipts" in done.stdout, done.stderr


def test_parts_of_published_shards_are_gone_though_the_run_goes_on_later(raw):
    """Workers remove them meanwhile; what a kill leaves of them, the next run removes before it begins."""
    parts = raw / "out" / ".datamat" / "parts"
    _job(raw, 2, include="train-00000*").run(progress=False)
    assert not list(parts.glob("*"))
    left = parts / "rows-train-00000-of-00002.0123456789abcdef.done"
    left.mkdir(parents=True)
    (left / "00000.receipt").write_text("{}\n")

    _job(raw, 2, include="train-00000*").run(progress=False)

    assert not left.exists()
    assert _job(raw, 2).run(progress=False).is_complete


def test_shard_is_published_once_every_receipt_has_come(raw, monkeypatch):
    """A worker may seal a shard whose last receipt lies on the disk, while the worker that left it is yet to say so."""
    plain = PartQueue.of

    def held_back(self, parts, reused, feed=None):
        """Yield the first receipt after the one with the sealed shard."""
        held = None
        for result in plain(self, parts, reused, feed):
            if held is None and isinstance(result, Receipt) and result.sealed is None:
                held = result
                continue
            yield result
            if held is not None and isinstance(result, Receipt) and result.sealed is not None:
                yield held
                held = None

    monkeypatch.setattr(PartQueue, "of", held_back)

    report = _job(raw, 1, workers=WorkerOptions(num_workers=2)).run(progress=False)

    assert report.is_complete and report.num_records == PARTS
    assert verify(raw / "out").ok
