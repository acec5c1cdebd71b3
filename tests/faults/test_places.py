"""Outputs in odd places, removed under a run, or behind links; and a clock that is set back."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil

import pytest
import small_pairs
from fault_injection import Fault, Process, check_visible, left_behind
from job import Job

DAY_S = 86_400


def run(job, folder):
    with Process(job, folder) as process:
        return process.ended()


def check_whole(job, ended, whole):
    assert (ended.code, ended.num_orphans) == (0, 0), ended.said
    assert small_pairs.digests(job.output) == whole
    assert left_behind(pathlib.Path(job.output)) == []


@pytest.mark.parametrize("at", [1, 100, 400])
@pytest.mark.parametrize("shift_s", [DAY_S, 40 * 365 * DAY_S])
def test_clock_that_is_set_back_changes_nothing(job_server, small_source, tmp_path, whole, at, shift_s):
    """By a day, or so far that every file comes from the future: neither this run nor the next one minds."""
    job = Job(str(small_source), str(tmp_path / "out"))

    ended = job_server.run(job, Fault("clock", at, shift_s=shift_s))

    check_whole(job, ended, whole)
    before = {path: path.stat().st_mtime_ns for path in pathlib.Path(job.output).iterdir() if path.is_file()}
    check_whole(job, job_server.run(job, Fault("clock", 1, shift_s=2 * shift_s)), whole)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_clock_that_is_set_back_between_runs_loses_no_part(job_server, small_source, tmp_path, whole):
    """Parts that were finished "tomorrow" count."""
    job = Job(str(small_source), str(tmp_path / "out"))
    job_server.run(job, Fault("kill group", at=250))
    done = [path for path in (tmp_path / "out" / ".datamat").rglob("*.json") if path.parent.name != "rows"]

    ended = job_server.run(job, Fault("clock", 1, shift_s=DAY_S))

    assert done
    check_whole(job, ended, whole)


def remove_at_once(folder):
    """Remove a folder that a run writes to in one step: otherwise the run would put files into it meanwhile."""
    away = f"{folder}.away"
    os.rename(folder, away)
    shutil.rmtree(away)


def test_output_removed_under_a_run_is_reported(small_source, tmp_path, whole):
    """The run does not succeed with half of its files; the next one makes all of them."""
    job = Job(str(small_source), str(tmp_path / "out"))

    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        remove_at_once(job.output)
        process.open_gate()
        ended = process.ended()

    assert ended.code not in {0, None}, ended.said
    assert ended.num_orphans == 0
    assert os.strerror(errno.ENOENT) in ended.error
    assert job.output in ended.error
    check_visible(pathlib.Path(job.output), whole)
    check_whole(job, run(job, tmp_path), whole)


def test_work_folder_removed_under_a_run_is_reported_or_survived(small_source, tmp_path, whole):
    """Somebody who tidies up removes `.datamat`."""
    job = Job(str(small_source), str(tmp_path / "out"))

    with Process(job, tmp_path, is_gated=True) as process:
        process.wait_at_gate()
        remove_at_once(os.path.join(job.output, ".datamat"))
        process.open_gate()
        ended = process.ended()

    assert ended.code not in {0, None}, ended.said
    check_visible(pathlib.Path(job.output), whole)
    check_whole(job, run(job, tmp_path), whole)


def test_output_may_be_a_link_to_a_folder(small_source, tmp_path, whole):
    """The run writes to the folder that it leads to; the link stays."""
    (tmp_path / "far").mkdir()
    (tmp_path / "out").symlink_to("far")
    job = Job(str(small_source), str(tmp_path / "out"))

    check_whole(job, run(job, tmp_path), whole)

    assert (tmp_path / "out").is_symlink()
    assert small_pairs.digests(tmp_path / "far") == whole


def test_dangling_link_as_output_is_refused(small_source, tmp_path):
    """Nothing is made where it leads."""
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    job = Job(str(small_source), str(tmp_path / "out"))

    ended = run(job, tmp_path)

    assert ended.code == 1
    assert ended.error.startswith("datamat.errors.OutputError: ")
    assert job.output in ended.error
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
    ".datamat/parts",
    ".datamat/parts/pairs-train-00000-of-00002",
    ".datamat/shards",
    ".datamat/shards/pairs-train-00000-of-00002.tfrecord",
)


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("leads_to", ["file", "folder"])
def test_planted_link_is_never_written_through(job_server, small_source, tmp_path, whole, name, leads_to):
    """The link is replaced, or the run is refused: what it leads to does not change."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_bytes(b"mine")
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / "kept" if leads_to == "file" else victim)
    job = Job(str(small_source), str(tmp_path / "out"))

    ended = job_server.run(job)

    assert [path.name for path in victim.rglob("*")] == ["kept"]
    assert (victim / "kept").read_bytes() == b"mine"
    if ended.code == 0:
        assert small_pairs.digests(job.output) == whole
    else:
        assert ended.code == 1
        assert name.split("/")[0] in ended.error
    if link.is_symlink():
        link.unlink()
    check_whole(job, job_server.run(job), whole)


@pytest.mark.parametrize(
    "name", ["données ✓ 数据集 🗂", " leading and trailing ", "-rf", "x" * 255, "new\nline", "%s{0}*?[a]"]
)
def test_output_may_have_any_name(job_server, small_source, tmp_path, whole, name):
    """Letters of any script, blanks, patterns and dashes work, up to the longest name that the system allows."""
    job = Job(str(small_source), str(tmp_path / name / "out"))

    check_whole(job, job_server.run(job), whole)


def test_name_that_is_not_text_is_used_unchanged(job_server, small_source, tmp_path, whole):
    """File names are bytes to the system."""
    name = os.fsdecode(b"caf\xe9")
    job = Job(str(small_source), str(tmp_path / name))

    check_whole(job, job_server.run(job), whole)


@pytest.mark.parametrize("length", [3000, 3990, 4080])
def test_long_path_works_or_is_refused(job_server, small_source, tmp_path, whole, length):
    """Where the system's limit for paths leaves no room for the files in it, the error says so."""
    folder = str(tmp_path)
    while len(folder) + 201 < length:
        folder = f"{folder}/{'d' * 200}"
    job = Job(str(small_source), f"{folder}/{'d' * (length - len(folder) - 1)}")

    ended = job_server.run(job)

    if ended.code == 0:
        check_whole(job, ended, whole)
    else:
        assert length > 3800
        assert os.strerror(errno.ENAMETOOLONG) in ended.error
        check_visible(pathlib.Path(job.output), whole)
