"""Runs that are killed while they unpack a source: the next one trusts no half of a file, and loses nothing."""

import gzip
import io
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import tempfile

import numpy as np
import pytest
from fault_injection import CHANGES, LIMIT_S, Control, Fault, left_behind

from datamat import Materializer, load, verify
from datamat.directory.files import SPOOL, temporary_folder
from datamat.testing import InlineExecutor
from datamat.writers.dataset import ImportWriter

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "mds_compressed" / "gz"
RUN = """
import sys
from datamat import Materializer, WorkerOptions
from datamat.writers.dataset import ImportWriter
kind, source, output, spool = sys.argv[1:]
writer = ImportWriter(kind=kind, spool=spool or None)
Materializer(writer, source, output).run(workers=1, progress=False)
"""
pytestmark = [pytest.mark.timeout(300)]


def _text(number):
    return np.random.default_rng(number).bytes(200_000).hex()


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two archives, each of more than one piece."""
    folder = tmp_path_factory.mktemp("tars")
    for part in range(2):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            for number in range(part * 5, part * 5 + 5):
                data = _text(number).encode()
                for name, member in ((f"s{number}.cls", b"%d" % number), (f"s{number}.txt", data)):
                    info = tarfile.TarInfo(name)
                    info.size = len(member)
                    archive.addfile(info, io.BytesIO(member))
        (folder / f"p-{part}.tar.gz").write_bytes(gzip.compress(content.getvalue(), 1))
    return folder


@pytest.fixture
def sources(tars):
    """Source and number of its samples, by kind: tars are unpacked by the driver, MDS by workers."""
    return {"webdataset": (tars, 10), "mds": (GOLDEN, 9)}


def _killed(shim, tmp_path, kind, source, *, fault, folder, spool="", temporary=None, may_end_well=False):
    """Run in a process group of its own under a fault to files below `folder`; return the number of operations."""
    control = Control(tmp_path / "control")
    control.set(fault, folder)
    environment = control.environment(shim) | ({"TMPDIR": str(temporary)} if temporary else {})
    ended = subprocess.run(
        [sys.executable, "-c", RUN, kind, source, tmp_path / "out", spool],
        env=environment, timeout=LIMIT_S * 3, check=False, capture_output=True, start_new_session=True,
    )  # fmt: skip
    assert control.fired == bool(fault.at), ended.stderr.decode()
    assert may_end_well or (ended.returncode == 0) == (not fault.at), ended.stderr.decode()
    return control.count


def _check(output, kind, count):
    data = load(output)
    field = "n" if kind == "mds" else "cls"
    assert sorted(int(sample[field]) for sample in data) == list(range(count))
    if kind == "webdataset":
        for sample in data:
            assert sample["txt"] == _text(int(sample["cls"]))
    assert verify(output, deep=True).ok and left_behind(output) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("action", ["kill group", "tear"])
@pytest.mark.parametrize("kind", ["webdataset", "mds"])
def test_run_killed_while_it_unpacks_loses_nothing(shim, sources, tmp_path, request, kind, action):
    """At any operation on the unpacked files, which are kept; a torn write leaves half of its bytes."""
    source, count = sources[kind]
    kinds = ("write",) if action == "tear" else CHANGES
    (tmp_path / "whole").mkdir()
    spool = tmp_path / "whole" / "spool"
    whole = _killed(shim, tmp_path / "whole", kind, source, fault=Fault(kinds=kinds), folder=spool, spool=spool)
    wanted = {path.name: path.read_bytes() for path in spool.iterdir()}
    step = max(1, whole // (1 if request.config.getoption("--commit") else 20))

    assert whole >= 2
    for at in range(1 + (step - 1) // 2, whole + 1, step):
        place = tmp_path / f"{at}"
        place.mkdir()
        spool = place / "spool"
        # A torn write ends its process alone: that of a worker costs a worker, and the run goes on.
        may_end_well = action == "tear" and kind == "mds"
        fault = Fault(action, at=at, kinds=kinds)
        _killed(shim, place, kind, source, fault=fault, folder=spool, spool=spool, may_end_well=may_end_well)

        writer = ImportWriter(kind=kind, spool=spool)
        Materializer(writer, source, place / "out").run(executor=InlineExecutor(), progress=False)

        _check(place / "out", kind, count)
        assert {path.name: path.read_bytes() for path in spool.iterdir()} == wanted


@pytest.mark.long
def test_run_killed_at_random_leaves_no_temporary_folder(shim, sources, tmp_path, request):
    """The next one removes what it finds there, but not what another process uses."""
    source, count = sources["webdataset"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    whole_place = tmp_path / "whole"
    whole_place.mkdir()
    options = {"folder": temporary, "temporary": temporary}
    whole = _killed(shim, whole_place, "webdataset", source, fault=Fault(kinds=CHANGES), **options)
    assert os.listdir(temporary) == []
    draw = random.Random(3)

    for number in range(1 if request.config.getoption("--commit") else 20):
        place = tmp_path / f"{number}"
        place.mkdir()
        at = draw.randrange(7, whole)  # Python has tried TMPDIR; the folder is made, and locked
        _killed(shim, place, "webdataset", source, fault=Fault("kill group", at=at), **options)
        left = os.listdir(temporary)

        _killed(shim, place, "webdataset", source, fault=Fault(kinds=()), **options)

        assert not [name for name in os.listdir(temporary) if name.startswith(SPOOL)], (at, left)
        _check(place / "out", "webdataset", count)


def test_removal_that_is_killed_is_finished_by_the_next(shim, tmp_path, monkeypatch):
    """Whichever files are gone by then: the lock in the folder may be the first."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    control = Control(tmp_path / "control")
    code = (
        "import pathlib, datamat.directory.files as files\n"
        "class Owner: pass\n"
        "owner = Owner(); folder = pathlib.Path(files.temporary_folder(owner))\n"
        "(folder / 'a').touch(); (folder / 'b').touch()"
    )

    def run(fault):
        control.set(fault, temporary)
        environment = {**control.environment(shim), "TMPDIR": str(temporary)}
        return subprocess.run([sys.executable, "-c", code], env=environment, check=False, start_new_session=True)

    kinds = ("unlink",)
    assert run(Fault(kinds=kinds)).returncode == 0
    count = control.count
    for at in (count - 1, count):  # the removal of the last file, and of the folder
        assert run(Fault("kill", at=at, kinds=kinds)).returncode == -signal.SIGKILL and os.listdir(temporary)

        owner = type("Owner", (), {})()
        mine = temporary_folder(owner)

        assert os.listdir(temporary) == [os.path.basename(mine)]
        del owner
        assert os.listdir(temporary) == []


def test_temporary_folder_that_is_in_use_stays(tmp_path, monkeypatch):
    """Also where its process is another; one without a lock may be in the making."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{SPOOL}making").mkdir()
    code = (
        "import sys, datamat.directory.files as files\n"
        "class Owner: pass\n"
        "owner = Owner(); print(files.temporary_folder(owner), flush=True); sys.stdin.read(1)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as other:  # fmt: skip
        theirs = other.stdout.readline().strip()
        owner = type("Owner", (), {})()
        mine = temporary_folder(owner)
        assert os.path.isdir(theirs) and os.path.isdir(mine)
        other.communicate("x")

    second = type("Owner", (), {})()
    again = temporary_folder(second)

    assert not os.path.exists(theirs)
    assert os.path.isdir(mine) and os.path.isdir(again) and (tmp_path / f"{SPOOL}making").is_dir()
    del owner, second
    assert os.listdir(tmp_path) == [f"{SPOOL}making"]
