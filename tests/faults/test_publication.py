"""A run or a repair that ends at any step of its publication: readers find one set, and the next run does the rest.

Steps are names that files get or lose, in this process: so each is met, also on a file system without hard links.
`test_crash_points*` and `test_replacing` kill real processes at any operation, `run/test_upload` runs at any request.
"""

import contextlib
import errno
import os
import shutil

import pytest
import small_pairs
import small_rows
from fault_injection import left_behind

from datamat import IndexRow, load, verify
from datamat.testing import InlineExecutor


class _Ended(BaseException):
    """Ends a run at a step, as a kill would: nothing that follows has an effect."""


@contextlib.contextmanager
def steps(has_links, last=1 << 62):
    """Yield a list that gets each step of the block; end it before the step of this number, from 1."""
    taken = []

    def observed(name, call):
        def step(*args, **more):
            if name == "link" and not has_links:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            if len(taken) + 1 >= last:
                raise _Ended
            taken.append(name)
            call(*args, **more)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("link", "rename", "replace", "unlink"):
            patch.setattr(os, name, observed(name, getattr(os, name)))
        yield taken


ROWS = [IndexRow(f"r{number}", None, {}) for number in range(8)]
OLD = {"value": 1, "splits": ("a", "b")}
MORE = [IndexRow(f"r{number}", None, {}) for number in range(4, 12)]
NEW = {
    "first": OLD,
    "changed": {**OLD, "value": 2},
    "renamed": {**OLD, "splits": ("b", "a")},
    "appended": {"value": 2, "splits": ("a", "b"), "rows": MORE, "existing": "append"},
    "dropped": OLD,
    "edited": OLD,
    "repair": OLD,
}
HERE = {"executor": InlineExecutor(), "progress": False}


def job(output, value, splits, rows=ROWS, **options):
    """Return a job of which each record has this value, and each split half of the records."""
    halves = dict.fromkeys(splits, 0.5)
    return small_rows.job(output, rows=rows, made={"x": value}, version=str(value), splits=halves, **options)


def damage(output):
    """Change a byte of a shard, and remove another one, offsets and a file of the index."""
    first, second, *_ = sorted(output.glob("*.tfrecord"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    for path in (second, output / f"{first.stem}.idx", output / "_index" / "a.keys"):
        path.unlink()


def records(output):
    """Return split, key and value of each record that readers find in a directory with which nothing is wrong."""
    report = verify(output)
    assert report.ok, str(report)
    sets = {split: load(output, split) for split in OLD["splits"]}
    return {
        (split, key, int(sample["x"]))
        for split, found in sets.items()
        for key, sample in zip(found.keys(), found, strict=True)
    }


@pytest.mark.timeout(900)  # some two hundred steps, each followed by two runs
@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("kind", ["first", "changed", "renamed", "appended", "dropped", "edited", "repair"])
def test_publication_that_ends_at_any_step_leaves_one_set(tmp_path, request, kind, has_links):
    """Before the manifest is replaced, that is the old set, and the new one after it."""
    output, old = tmp_path / "out", tmp_path / "old"
    if kind != "first":
        job(old, **OLD).run(progress=False)

    def begin():
        shutil.rmtree(output, ignore_errors=True)
        if kind != "first":
            shutil.copytree(old, output)
        if kind == "repair":
            damage(output)

    def act():
        if kind == "repair":
            job(output, **OLD).repair(progress=False)
        elif kind == "dropped":
            load(output).drop(["r1", "r2", "r5"]).save(**HERE)
        elif kind == "edited" and not load(output).manifest.edited:
            load(output).map(lambda sample: {"x": sample["x"] + 1}).save(**HERE)
        elif kind == "edited":
            load(output).save(**HERE)
        else:
            job(output, **NEW[kind]).run(progress=False)

    begin()
    with steps(has_links) as taken:
        act()
    whole, count = small_pairs.digests(output), len(taken)
    seen = []

    for number in sorted({*range(1, count, 12 if request.config.getoption("--commit") else 1), count}):
        begin()
        with steps(has_links, number), pytest.raises(_Ended):
            act()
        if kind != "repair" and (output / "manifest.json").exists():
            seen.append(records(output))
        act()
        assert small_pairs.digests(output) == whole, f"ended before step {number}, {taken[number - 1]}"
        assert left_behind(output) == [], f"ended before step {number}"

    before, after = [] if kind == "first" else records(old), records(output)
    assert all(one in (before, after) for one in seen)
    if kind in {"changed", "renamed", "appended", "dropped", "edited"}:
        assert before != after and before in seen
        assert seen[seen.index(after) :] == [after] * seen.count(after)
    if kind == "repair":
        assert whole == small_pairs.digests(old)
