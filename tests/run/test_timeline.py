"""The timeline of a run, its page and its trace: what they say, and that a browser shows them."""

from __future__ import annotations

import html.parser
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import small_pairs

from datamat import WorkerOptions
from datamat.codecs import decode_image, encode_png
from datamat.run.timeline import PartTrace, Timeline, TimelineBuilder, Totals, render_page


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
        ([trace(), trace(1, began_at=1.0)], 4, "too few parts", "at a part 25% of the time"),
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


class Page(html.parser.HTMLParser):
    """Text, tags and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data):
        self.text.append(data)


def test_page_needs_nothing_else_and_says_everything(run, tmp_path):
    """One file, no script, no address; the sentence, the lanes, the stages, the slow and the failed samples."""
    _, report = run

    report.to_html(tmp_path / "run.html")

    page = Page((tmp_path / "run.html").read_text(encoding="utf-8"))
    text = "\n".join(page.text)
    assert "script" not in page.tags and "link" not in page.tags
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert len(page.links) == 2, "the two samples that do not fit are pictures all the same"
    assert page.tags.count("svg") >= 5
    assert report.limit.replace("`", "") in "".join(page.text)
    for wanted in ("worker 1: ", "transform", "Slowest samples", "train003", "train005", "(skip)"):
        assert wanted in text
    assert re.search(r"\d+% busy", text)


BAD = "<script>alert(1)</script>"


def test_page_shows_code_as_code_and_memory_without_gaps():
    """A worker keeps its memory between two parts, as at 2 s here; what keys and others say is escaped."""
    parts = (trace(began_at=0.0), trace(1, began_at=3.0, slowest=((BAD, 1.0),)))
    advice = f"take `WorkerOptions(num_workers=...)` & wait{BAD}"

    page = render_page(BAD, [(BAD, BAD)], Timeline(parts=parts, advice=advice, elapsed_s=4.0, num_workers=1), (), {})

    assert "take <code>WorkerOptions(num_workers=...)</code> &amp; wait" in page and "<script" not in page
    chart = page.split("Peak memory", 1)[1].split("</svg>", 1)[0]
    heights = set(re.findall(r"L\S+ (\S+)H", chart))
    assert len(heights) == 1, heights


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


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_browser_shows_the_page_light_and_dark(run, tmp_path):
    """Headless Chromium draws it: dark ink on light paper, light ink on dark paper, and the stages in colours."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    run[1].to_html(tmp_path / "run.html")
    means = {}
    for scheme, options in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
        picture = tmp_path / f"{scheme}.png"
        subprocess.run(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={tmp_path / scheme}", f"--screenshot={picture}", "--window-size=1000,1600"),
                *options,
                (tmp_path / "run.html").as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=200,
        )
        pixels = decode_image(picture.read_bytes(), channels=3).astype(int)
        means[scheme] = pixels.mean()
        for colour in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)):
            assert (np.abs(pixels - colour).max(axis=2) < 3).sum() > 50, f"{scheme}: a stage is not drawn"

    assert means["light"] > 200 and means["dark"] < 80
