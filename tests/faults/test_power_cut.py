"""Power cuts on real journalling file systems: whatever has its final name is complete, and the run resumes from it.

The output lies on a file system in an image. At a random moment an ioctl shuts the file system down, as in xfstests:
the journal is kept, and data that was never flushed is lost. Everything is killed, the image is mounted again, which
replays the journal, and the files are checked. The same test must find wrong files where the shim turns every fsync
into nothing: otherwise it would prove nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import time

import pytest
import small_pairs
from fault_injection import Control, Fault, Process
from job import Job

CUTS_ON_COMMIT = 1
CUTS = 15
_GOING_DOWN = 0x8004587D  # FS_IOC_SHUTDOWN of linux/fs.h, and
_LOG_FLUSHED = 1  # FS_SHUTDOWN_FLAGS_LOGFLUSH: the journal reaches the disk, data does not
MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}


class Image:
    """A file system in a file.

    Args:
        folder: for the image and the place where it is mounted.
        kind: kind of the file system.
    """

    def __init__(self, folder: pathlib.Path, kind: str) -> None:
        self._image, self.place = folder / "image", folder / "mounted"
        self.place.mkdir()
        os.truncate(os.open(self._image, os.O_CREAT | os.O_WRONLY), 320 << 20)
        subprocess.run([*MAKE[kind], self._image], check=True, capture_output=True)

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.place], check=True, capture_output=True)

    def unmount(self) -> None:
        """Unmount; a killed process may take a moment to close its files."""
        deadline = time.monotonic() + 20
        while subprocess.run(["umount", self.place], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"{self.place} stays busy"
            time.sleep(0.02)

    def cut(self) -> None:
        """Cut the power."""
        descriptor = os.open(self.place, os.O_RDONLY)
        fcntl.ioctl(descriptor, _GOING_DOWN, struct.pack("I", _LOG_FLUSHED))
        os.close(descriptor)


@pytest.fixture
def image(request, tmp_path):
    """Make and mount an image; skips where that cannot be done."""
    if shutil.which(MAKE[request.param][0]) is None:
        pytest.skip(f"{MAKE[request.param][0]} is not installed")
    image = Image(tmp_path, request.param)
    try:
        image.mount()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this user cannot mount an image of {request.param}: {error.stderr.decode().strip()}")
    yield image
    if image.place.is_mount():
        image.unmount()


@pytest.fixture(scope="session")
def larger_source(tmp_path_factory):
    """Enough pairs for a run to be cut in all its stages."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("larger"), num_train=60, num_val=6)


@pytest.fixture(scope="session")
def larger_whole(larger_source, tmp_path_factory):
    """The digests of the job's output from them, and how long that takes."""
    folder = tmp_path_factory.mktemp("larger-whole")
    started = time.monotonic()
    with Process(Job(str(larger_source), str(folder / "out")), folder) as process:
        assert process.ended().code == 0
    return small_pairs.digests(folder / "out"), time.monotonic() - started


@pytest.fixture
def num_cuts(request):
    return CUTS_ON_COMMIT if request.config.getoption("--commit") else CUTS


def wrong_files(output, whole):
    """Return the files with a final name whose content is wrong."""
    return [name for name, digest in small_pairs.digests(output).items() if whole.get(name) != digest]


def cut_again_and_again(image, job, folder, whole, num_cuts, **options):
    """Cut the power under the job this many times; yield the files that are wrong then; start over after each."""
    digests, duration_s = whole
    rng = random.Random(3)
    for _ in range(num_cuts):
        with Process(job, folder, **options) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(rng.uniform(0.2, 1.1) * duration_s)
            image.cut()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.ended()
        image.unmount()
        image.mount()
        found = wrong_files(pathlib.Path(job.output), digests) if os.path.isdir(job.output) else []
        yield found
        if found or "manifest.json" in small_pairs.digests(job.output):
            shutil.rmtree(job.output)


@pytest.mark.sample(2)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("image", MAKE, indirect=True)
def test_power_cut_leaves_no_wrong_file_visible(image, larger_source, larger_whole, tmp_path, num_cuts):
    """The next run makes the same bytes, which the next cut does not take away."""
    job = Job(str(larger_source), str(image.place / "out"))

    assert not any(cut_again_and_again(image, job, tmp_path, larger_whole, num_cuts))

    with Process(job, tmp_path) as process:
        ended = process.ended()
    assert ended.code == 0, ended.said
    image.cut()
    image.unmount()
    image.mount()
    assert small_pairs.digests(job.output) == larger_whole[0]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("image", MAKE, indirect=True)
def test_power_cut_damages_files_where_nothing_is_flushed(image, larger_source, larger_whole, tmp_path, shim):
    """With an fsync that does nothing, the same cuts leave files that are wrong."""
    job = Job(str(larger_source), str(image.place / "out"))
    control = Control(tmp_path / "control")
    control.set(Fault("lie", at=1, persists=True, kinds=("fsync",)), image.place)

    assert any(cut_again_and_again(image, job, tmp_path, larger_whole, 40, env=control.environment(shim)))
