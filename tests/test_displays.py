"""What public objects show: a short line in a console, a table in a notebook."""

import base64
import html.parser
import os
import pathlib

import numpy as np
import pytest
import small_pairs

from datamat import Materializer, Scalar, SourceError, describe, load, materialize
from datamat.codecs import decode_image, encode_png
from datamat.directory.display import Table, render_html
from datamat.directory.manifest import Manifest
from datamat.testing import InlineExecutor

ROOT = pathlib.Path(__file__).parents[1]
VOID = {"br", "img"}


class Balance(html.parser.HTMLParser):
    """Parses a display: raises where tags do not match; keeps text and tags."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.tags, self.styles, self.text, self.pictures = [], set(), [], [], []
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.styles += [value for name, value in attrs if name == "style"]
        if tag == "img":
            self.pictures.append(base64.b64decode(dict(attrs)["src"].removeprefix("data:image/jpeg;base64,")))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """One of each object, of a small run; its output has a name that HTML must not take for a tag."""
    folder = tmp_path_factory.mktemp("displays")
    source = small_pairs.make_pairs(folder / "source", num_train=6, num_val=2)
    output = folder / "<b>out & 한국어"
    job = small_pairs.job(source, output)
    found = {"estimate": job.estimate(2), "materializer": job, "plan": job.plan()}
    found["report"] = job.run(progress=False)
    found["status"] = job.status()
    found["dataset"] = load(output, "train")
    found["manifest"] = Manifest.read(output)
    found["provenance"] = job.provenance("train000")
    found["description"] = describe(output, records=2)
    found["verification"] = job.verify()
    return found


NAMES = (
    *("materializer", "plan", "estimate", "report", "status", "dataset", "manifest", "provenance", "description"),
    "verification",
)


@pytest.mark.parametrize("name", NAMES)
def test_display_is_whole_escaped_and_in_the_colours_of_the_page(objects, name):
    """Tags match; text is escaped; nothing is run, fetched or coloured, so that light and dark pages show it alike."""
    shown = Balance(objects[name]._repr_html_())

    assert shown.tags <= {"div", "b", "table", "tr", "th", "td"}
    assert any("".join(shown.text))
    for style in shown.styles:
        assert "#" not in style and "rgb" not in style and "url" not in style


@pytest.mark.parametrize("name", NAMES)
def test_line_names_the_class_and_is_short(objects, name):
    """The console shows what it is, not every field of it."""
    line = repr(objects[name])

    if name == "verification":
        return
    assert line.lower().startswith({"dataset": "shardeddataset", "report": "runreport"}.get(name, name))
    assert len(line) < 1_000
    assert "object at 0x" not in line


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("materializer", ["small_pairs:Pairs", "<b>out & 한국어", "tfrecord", "mask", "Mask"]),
        ("plan", ["Plan of 'pairs'", "train", "records"]),
        ("estimate", ["Estimate from ", "memory", "ms per row"]),
        ("report", ["complete", "8 of 8"]),
        ("status", ["complete: ", "up to date", "run_finished"]),
        ("dataset", ["6 records", "train", "image", "uint8 (24, 32, 3)"]),
        ("manifest", ["pairs: 8 records", "val", "tfrecord"]),
        ("provenance", ["Provenance of train000", "train000.png", "position"]),
        ("description", ["Description: 8 records", "finished directory", "mask"]),
        ("verification", ["all as the manifest says"]),
    ],
)
def test_display_says_what_one_asks_first(objects, name, texts):
    """Numbers, names and places, as text."""
    shown = "\n".join(Balance(objects[name]._repr_html_()).text)

    for text in texts:
        assert text in shown


def test_materializer_of_a_function_shows_itself_before_its_features_are_known(tmp_path):
    """Nothing is read for a display."""
    options = {"executor": InlineExecutor(), "progress": False}
    report = materialize(lambda number: {"x": number}, range(3), tmp_path / "out", **options)

    assert "3 records" in repr(report)
    assert "3 of 3" in "\n".join(Balance(report._repr_html_()).text)


@pytest.mark.parametrize("errors", ["skip", "quarantine"])
def test_report_shows_failures_with_their_pictures(tmp_path, errors):
    """Ten of them, each with a small picture where one can be read; a file that is gone, or no picture, has none."""
    for number in range(14):
        (tmp_path / f"{number:02d}.png").write_bytes(encode_png(np.full((200, 300, 3), 9 * number, np.uint8)))
    (tmp_path / "02.png").write_bytes(b"no picture")

    report = materialize(
        fails, sorted(tmp_path.glob("*.png")), tmp_path / "out", errors=errors, executor=InlineExecutor(),
        features={"x": Scalar("int64")}, progress=False,
    )  # fmt: skip
    shown = Balance(report._repr_html_())
    for path in tmp_path.glob("*.png"):
        path.unlink()
    without = report._repr_html_()

    assert len(report.failures) == 13
    assert "and 3 more" in "".join(shown.text) and "<i>no 0" in "".join(shown.text)
    count = sum("02" not in failure.reason for failure in report.failures[:10])
    assert [len(decode_image(data)) for data in shown.pictures] == [64] * count
    assert without.count("<img") == (count if errors == "quarantine" else 0)


def fails(path):
    """Fail for all but the last."""
    if not path.stem.startswith("13"):
        raise ValueError(f"<i>no {path.stem}")
    return {"x": 1}


def test_source_of_a_materializer_shows_no_secret(tmp_path):
    """A URL is shown without its password, also where it cannot be listed."""
    with pytest.raises(SourceError, match="host/data") as caught:
        Materializer(small_pairs.Pairs(), "https://me:word@host/data?sig=abcd", tmp_path / "out")

    assert "word" not in str(caught.value)
    assert "abcd" not in str(caught.value)


def test_long_tables_and_texts_are_cut():
    """A display of a hundred thousand rows would stop the notebook."""
    shown = Balance(render_html("t", [("long", "x" * 10_000)], [Table(["n"], [[n] for n in range(1_000)])]))

    assert "and 950 more" in shown.text
    assert max(map(len, shown.text)) <= 200


@pytest.mark.long
@pytest.mark.timeout(180)
def test_kernel_of_jupyter_shows_tables(tmp_path):
    """A real kernel hands the HTML of each object to the notebook, beside its text."""
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    source = small_pairs.make_pairs(tmp_path / "source", num_train=4, num_val=2)
    cell = f"""
import small_pairs, datamat
job = small_pairs.job({str(source)!r}, {str(tmp_path / "out")!r})
display(job, job.plan(), job.estimate(2), job.run(progress=False), job.status(), datamat.load(job.output, "train"))
display(datamat.load(job.output, "train").manifest, job.provenance("train000"), datamat.describe(job.output))
"""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    manager.start_kernel(cwd=str(tmp_path), env={**os.environ, "PYTHONPATH": path})
    client = manager.blocking_client()
    displays = []

    def hear(message):
        if message["msg_type"] == "display_data":
            displays.append(message["content"]["data"])

    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        reply = client.execute_interactive(cell, timeout=120, output_hook=hear)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)

    assert reply["content"]["status"] == "ok"
    assert len(displays) == 9
    for data in displays:
        assert "<table" in data["text/html"] and data["text/plain"]
