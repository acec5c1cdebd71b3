"""Outputs in odd places, removed under a run, or behind links; and a clock that is set back."""

import errno
import os
import pathlib
import shutil

import pytest
import small_pairs
from fault_injection import Fault, Process, check_visible, left_behind
from job import Job

from datamat import DatamatError, OutputError
from datamat.testing import InlineExecutor

DAY_S = 86_400


def run(job):
    """Run the job in this process."""
    job.run(InlineExecutor())


def check_ended(job, ended, whole):
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    check_whole(job, whole)


def check_whole(job, whole):
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("at", [1, 100, 400])
@pytest.mark.parametrize("shift_s", [DAY_S, 40 * 365 * DAY_S])
def test_clock_that_is_set_back_changes_nothing(job_server, small_source, tmp_path, whole, at, shift_s):
    """By a day, or so far that every file comes from the future: neither this run nor the next one minds."""
    job = Job(str(small_source), str(tmp_path / "out"))

    ended = job_server.run(job, Fault("clock", at, shift_s=shift_s))

    check_ended(job, ended, whole)
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path(job.output).iterdir() if path.is_file()}
    check_ended(job, job_server.run(job, Fault("clock", 1, shift_s=2 * shift_s)), whole)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_clock_that_is_set_back_between_runs_loses_no_part(job_server, small_source, tmp_path, whole):
    """Parts that were finished "tomorrow" count."""
    job = Job(str(small_source), str(tmp_path / "out"))
    job_server.run(job, Fault("kill group", at=250))
    done = list((tmp_path / "out" / ".datamat").glob("parts/*/*.receipt"))

    ended = job_server.run(job, Fault("clock", 1, shift_s=DAY_S))

    assert done
    check_ended(job, ended, whole)


def remove_at_once(folder):
    """Remove a folder that a run writes to in one step: otherwise the run would put files into it meanwhile."""
    away = f"{folder}.away"
    os.rename(folder, away)
    shutil.rmtree(away)


@pytest.mark.sample(2)
@pytest.mark.parametrize("what", ["", ".datamat"])
def test_output_removed_under_a_run_is_reported(job_server, small_source, tmp_path, whole, what):
    """Or its work folder, by somebody who tidies up: the run fails, and the next one makes all files.

    Shards that were in place already then have nothing that tells they are datamat's: they are never overwritten.
    """
    job = Job(str(small_source), str(tmp_path / "out"))

    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        remove_at_once(os.path.join(job.output, what).rstrip("/"))
        process.open_gate()
        ended = process.ended()

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    assert what or os.strerror(errno.ENOENT) in ended.error
    assert job.output in ended.error
    check_visible(pathlib.Path(job.output), whole)
    if finished := sorted(pathlib.Path(job.output).glob("pairs-*")):
        with pytest.raises(OutputError, match=finished[0].name):
            run(job)
        for file in finished:
            file.unlink()
    check_ended(job, job_server.run(job), whole)


def test_output_may_be_a_link_to_a_folder(small_source, tmp_path, whole):
    """The run writes to the folder that it leads to; the link stays."""
    (tmp_path / "far").mkdir()
    (tmp_path / "out").symlink_to("far")
    job = Job(str(small_source), str(tmp_path / "out"))

    run(job)

    check_whole(job, whole)
    assert (tmp_path / "out").is_symlink()
    assert small_pairs.digests(tmp_path / "far") == whole


def test_dangling_link_as_output_is_refused(small_source, tmp_path):
    """Nothing is made where it leads."""
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")

    with pytest.raises(OutputError, match=str(tmp_path / "out")):
        run(Job(str(small_source), str(tmp_path / "out")))
    assert not (tmp_path / "nowhere").exists()


LINKS = (
    "manifest.json",
    "pairs-train-00000-of-00002.tfrecord",
    "pairs-train-00000-of-00002.idx",
    "_index",
    "_index/train.index",
    "_index/train.keys",
    ".datamat",
    ".datamat/lock",
    ".datamat/ledger.jsonl",
    ".datamat/rows",
    ".datamat/quarantine",
    ".datamat/parts",
    ".datamat/parts/pairs-train-00000-of-00002",
    ".datamat/shards",
    ".datamat/shards/pairs-train-00000-of-00002.tfrecord",
)


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("leads_to", ["file", "folder"])
def test_planted_link_is_never_written_through(small_source, tmp_path, whole, name, leads_to):
    """The link is replaced, or the run is refused: what it leads to does not change."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_bytes(b"mine")
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / "kept" if leads_to == "file" else victim)
    job = Job(str(small_source), str(tmp_path / "out"))

    refused = None
    try:
        run(job)
    except DatamatError as error:
        refused = str(error)

    assert small_pairs.digests(job.output) == whole if refused is None else name.split("/")[0] in refused

    assert [path.name for path in victim.rglob("*")] == ["kept"]
    assert (victim / "kept").read_bytes() == b"mine"
    if link.is_symlink():
        link.unlink()
    run(job)
    check_whole(job, whole)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    ["données ✓ 数据集 🗂", " leading and trailing ", "-rf", "x" * 255, "new\nline", "%s{0}*?[a]", "caf\udce9"],
)
def test_output_may_have_any_name(small_source, tmp_path, whole, name):
    """Any script, blanks, patterns, dashes, bytes that are not text; up to the longest name of the system."""
    job = Job(str(small_source), str(tmp_path / name / "out"))

    run(job)

    check_whole(job, whole)


@pytest.mark.parametrize("length", [3000, 4040, 4080])
def test_long_path_works_or_is_refused(small_source, tmp_path, whole, length):
    """Where the system's limit for paths leaves no room for the files in it, the error says so."""
    folder = str(tmp_path)
    while len(folder) + 201 < length:
        folder = f"{folder}/{'d' * 200}"
    job = Job(str(small_source), f"{folder}/{'d' * (length - len(folder) - 1)}")

    if length < 3800:
        run(job)
        check_whole(job, whole)
    else:
        with pytest.raises((OSError, DatamatError), match=os.strerror(errno.ENAMETOOLONG)):
            run(job)
        check_visible(pathlib.Path(job.output), whole)
