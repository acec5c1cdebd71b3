"""The timeline of a run and its trace: what they say."""

import itertools
import json

import numpy as np
import pytest
import small_pairs

from datamat import WorkerOptions
from datamat.codecs import encode_png
from datamat.events import PartTrace
from datamat.run.timeline import TimelineBuilder, Totals


def trace(number=0, *, began_at=0.0, elapsed_s=1.0, busy_s=None, worker="h:1", stages=None, slowest=()):
    """Return the trace of a part."""
    return PartTrace(
        shard="set-train-00000-of-00001",
        part=number,
        worker=worker,
        began_at=began_at,
        elapsed_s=elapsed_s,
        busy_s=elapsed_s if busy_s is None else busy_s,
        num_records=10,
        num_bytes=1_000,
        peak_bytes=50_000_000,
        stages=stages or {"read": elapsed_s},
        slowest=slowest,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of pictures, two of which do not fit, with its report."""
    folder = tmp_path_factory.mktemp("timeline")
    source = small_pairs.make_pairs(folder / "source", num_train=20, num_val=4)
    for number in (3, 5):
        (source / f"train/train{number:03d}.png").write_bytes(encode_png(np.full((8, 8, 3), 200, np.uint8)))
    options = {"copies": {"train": 2}, "transform": small_pairs.jitter, "errors": "skip"}
    job = small_pairs.job(source, folder / "out", workers=WorkerOptions(num_workers=2), **options)
    return job, job.run(progress=False)


def test_every_part_has_its_place_and_its_stages_add_up(run):
    """At a time within the run, on a worker that makes no other then; stages take its whole time. A rerun has none."""
    job, report = run
    timeline = report.timeline

    assert len(timeline.parts) == report.num_parts_written
    assert sum(part.num_records for part in timeline.parts) == report.num_records
    assert len(timeline.workers) <= report.num_workers
    for part in timeline.parts:
        assert sum(part.stages.values()) == pytest.approx(part.elapsed_s, rel=1e-6)
        assert timeline.began_at - 0.1 <= part.began_at and part.ended_at <= timeline.began_at + report.elapsed_s + 0.1
        assert part.peak_bytes > 1_000_000 and part.busy_s > 0
    for parts in timeline.workers.values():
        assert all(before.ended_at <= after.began_at + 1e-3 for before, after in itertools.pairwise(parts))
    train = [part for part in timeline.parts if "-train-" in part.shard and part.num_records]
    assert all({"read", "decode", "transform", "encode", "write"} <= part.stages.keys() for part in train)
    assert {key for key, _ in timeline.slowest} <= {f"{split}{n:03d}" for split in ("train", "val") for n in range(20)}
    again = job.run(progress=False)
    assert again.did_nothing and again.timeline.parts == () and again.limit == "" and again.busy_share == 0


@pytest.mark.parametrize(
    ("parts", "num_workers", "word", "advice"),
    [
        ([], 2, "", ""),
        ([trace(stages={"read": 0.2, "transform": 0.8})], 1, "transform", "80% of the work is the transform"),
        ([trace(stages={"write": 1.0})], 1, "write", "writing shards"),
        ([trace(busy_s=0.2)], 1, "waiting", "faster disk"),
        ([trace(), trace(1, began_at=1.0)], 4, "too few parts", "at work 25% of the time"),
        ([trace(), trace(1, worker="h:2")], 2, "read", "100% of the work is reading"),
        ([trace()], 0, "read", "reading"),
    ],
)
def test_limit_is_named_with_what_to_change(parts, num_workers, word, advice):
    """First whether workers had work, then whether they computed, then the stage that takes most."""
    totals = Totals()
    for part in parts:
        totals.add(part)

    found = totals.limit(num_workers)

    assert found[0] == word and advice in found[1]


@pytest.mark.parametrize(("elapsed_s", "word"), [(1.9, "read"), (2.1, "start and end")])
def test_short_run_is_limited_by_its_start_and_end(elapsed_s, word):
    """What its workers did in less than half of its time is no reason to change anything."""
    builder = TimelineBuilder(0.0)
    builder.add(trace())

    found = builder.timeline(elapsed_s=elapsed_s, num_workers=1)

    assert found.limit == word
    assert ("took 1.0 of 2.1 s" in found.advice) == (word == "start and end")


def test_chrome_trace_has_parts_and_stages_within_them(run, tmp_path):
    """Complete events, in microseconds, as the format has them; stages lie within their part."""
    _, report = run

    report.to_chrome_trace(tmp_path / "run.json")

    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    parts = [event for event in events if event.get("cat") == "part"]
    assert len(parts) == report.num_parts_written
    for event in events:
        assert event["ph"] in "MXC" and event["pid"] == 1
    for stage in (event for event in events if event.get("cat") == "stage"):
        assert any(
            part["tid"] == stage["tid"]
            and part["ts"] - 0.01 <= stage["ts"]
            and stage["ts"] + stage["dur"] <= part["ts"] + part["dur"] + 0.01
            for part in parts
        )
