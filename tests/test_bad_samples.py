"""Samples that are bad in every way that files and code can be: each has its named error, and no other is lost."""

from __future__ import annotations

import io
import os
import pathlib
import re
import struct
import sys
import zlib

import numpy as np
import PIL.Image
import pytest
import sets

from datamat import (
    ErrorPolicy,
    IncompleteRunError,
    Materializer,
    SampleError,
    ShardOptions,
    WorkerOptions,
    load,
    verify,
)
from datamat.codecs import encode_png
from datamat.ledger import read_ledger

PIXELS = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)


def picture(shape=(24, 32), mode="RGB", encoding="png", **options):
    """Return the bytes of a picture that Pillow writes."""
    pixels = np.resize(PIXELS, (*shape, 3))
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).convert(mode).save(file, encoding, **options)
    return file.getvalue()


def sixteen_bit():
    file = io.BytesIO()
    PIL.Image.fromarray(np.resize(PIXELS.astype(np.uint16) * 257, (24, 32))).save(file, "png")
    return file.getvalue()


def animated(encoding):
    frames = [PIL.Image.fromarray(np.roll(PIXELS, shift, 0)) for shift in range(3)]
    file = io.BytesIO()
    frames[0].save(file, encoding, save_all=True, append_images=frames[1:])
    return file.getvalue()


def bomb():
    """Return a PNG of 100 bytes that says it has 900 million pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(40))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def flipped(data, place=-20):
    found = bytearray(data)
    found[place] ^= 4
    return bytes(found)


def rotated(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return picture(encoding="jpeg", exif=exif)


FILES = {
    "empty": (b"", "InputError", "an empty file"),
    "text": (b"Not Found", "InputError", "want a PNG, JPEG, WebP or BMP"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "InputError", "Git LFS pointer"),
    "cut": (picture()[:900], "InputError", "ends before its IEND chunk"),
    "cut_by_one": (picture()[:-1], "InputError", "ends before|IEND"),
    "cut_jpeg": (picture(encoding="jpeg")[:-200], "InputError", "JPEG"),
    "flipped": (flipped(picture()), "InputError", "CRC|checksum|damaged"),
    "cmyk": (picture(mode="CMYK", encoding="jpeg"), "InputError", "CMYK"),
    "sixteen": (sixteen_bit(), "InputError", "16"),
    "grey_alpha": (picture(mode="LA"), "InputError", "alpha"),
    "animated_png": (animated("png"), "InputError", "animat"),
    "animated_webp": (animated("webp"), "InputError", "animat"),
    "gif": (animated("gif"), "InputError", "GIF"),
    "bomb": (bomb(), "InputError", "30000 x 30000"),
    "lying_down": (rotated(6), "SchemaError", r"\(24, 32, 3\).*\(32, 24, 3\)"),
    "other_size": (picture((48, 64)), "SchemaError", r"\(24, 32, 3\).*\(48, 64, 3\)"),
}
"""By key: what the image file holds, the class of the error, and what its message tells."""

CODE = {
    "vanished": ("InputError", "No such file"),
    "directory": ("InputError", "is a directory"),
    "fifo": ("InputError", "is a FIFO"),
    "wrong_mask": ("SchemaError", r"mask.*\(12, 32\)"),
    "raising": ("ZeroDivisionError", "modulo by zero"),
    "leaving": ("SystemExit", "read or augment called sys.exit"),
    "recursing": ("RecursionError", "maximum recursion"),
    "nothing": ("SchemaError", "read returned a tuple"),
    "undecoded": ("SchemaError", "read returned None for the field 'image'"),
    "half": ("SchemaError", r"\(12, 32, 3\)"),
    "drifted": ("SchemaError", "depth"),
    "unaugmented": ("IndexError", "no such angle"),
    "huge": ("MemoryError", ""),
}
"""By key: what goes wrong when the sample is read or augmented."""


class Bad(sets.Pairs):
    """Does what the key says."""

    name = "bad"

    def read(self, row):
        if row.key in ("vanished", "directory", "fifo"):
            row = row._replace(fields={**row.fields, "image": self.something_else(row.key, row.fields["image"])})
        if row.key == "recursing":
            return self.read(row)
        made = self.answers().get(row.key)
        return super().read(row) if made is None else made(super().read(row))

    def something_else(self, key, image):
        """Put beside the regular file of the index what stands in its place by now."""
        other = pathlib.Path(f"{image}.{key}")
        if key == "directory":
            other.mkdir(exist_ok=True)
        elif key == "fifo" and not other.exists():
            os.mkfifo(other)
        return str(other)

    def answers(self):
        return {
            "wrong_mask": lambda sample: {**sample, "mask": np.zeros((12, 32), np.uint8)},
            "raising": lambda sample: 1 // 0,
            "leaving": lambda sample: sys.exit("it is too late"),
            "nothing": lambda sample: (),
            "undecoded": lambda sample: {**sample, "image": None},
            "half": lambda sample: {**sample, "image": PIXELS[:12]},
            "drifted": lambda sample: {**sample, "depth": 3},
            "huge": lambda sample: {**sample, "image": bytearray(1 << 62)},
        }

    def augment(self, sample, rng):
        if sample["key"] == "unaugmented":
            raise IndexError("no such angle")
        return sets.jitter(sample, rng)


@pytest.fixture
def source(tmp_path):
    """Good pairs, and among them one for each way to be bad."""
    folder = sets.make_pairs(tmp_path / "source", num_train=12, num_val=3)
    lines = (folder / "train.txt").read_text().splitlines()
    for number, key in enumerate([*FILES, *CODE]):
        image, mask = folder / "train" / f"{key}.png", folder / "trainannot" / f"{key}.png"
        image.write_bytes(FILES[key][0] if key in FILES else picture())
        mask.write_bytes(encode_png(np.zeros((24, 32), np.uint8)))
        lines.insert(number * 2 % len(lines), f"/elsewhere/train/{key}.png /elsewhere/trainannot/{key}.png")
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    for path in folder.rglob("*.png"):
        os.utime(path, (1, 1))
    return folder


class BadAsItIs(sets.Pairs):
    """Reads what must not be stored as it is."""

    name = "bad"

    def read(self, row):
        sample = super().read(row)
        if row.key == "train003":
            del sample["mask"]
        if row.key == "train005":
            sample["image"] = PIXELS / 255
        return sample


def job(source, output, **options):
    options = {"errors": ErrorPolicy("skip"), "shards": ShardOptions(num_shards=3), **options}
    return Materializer(Bad(), source, output, **{"workers": WorkerOptions(num_workers=2), **options})


def failures(output):
    """Return (error, message) of each sample that was left out, by key."""
    entries = read_ledger(output / ".datamat" / "ledger.jsonl")
    return {
        e.values["key"]: (e.values["error"], e.values["message"])
        for e in entries
        if e.event in ("sample_skipped", "sample_quarantined")
    }


@pytest.mark.parametrize("copies", [{"train": 2}, {"train": 1}])
def test_each_bad_sample_has_its_named_error_and_no_other_is_lost(source, tmp_path, copies):
    """One run over all of them; names, counts and checksums of the shards are right after it."""
    report = job(source, tmp_path / "out", copies=copies).run(progress=False)

    found = failures(tmp_path / "out")
    wanted = {key: rest for key, (_, *rest) in FILES.items()} | CODE
    assert {key: error for key, (error, _) in found.items()} == {key: error for key, (error, _) in wanted.items()}
    assert [key for key, (_, message) in wanted.items() if not re.search(message, found[key][1], re.DOTALL)] == []
    good = {f"train{number:03d}#{copy}" for number in range(12) for copy in range(copies["train"])}
    assert set(load(tmp_path / "out", "train").keys()) == good
    assert len(load(tmp_path / "out", "val")) == 3
    assert (report.num_rows, report.num_failed, report.is_complete) == (15 + len(wanted), len(wanted), True)
    assert verify(tmp_path / "out").ok
    assert len(list((tmp_path / "out").glob("bad-train-*-of-00003.tfrecord"))) == 3


def test_untransformed_samples_must_be_as_declared(tmp_path):
    """A transform may make them good; where there is none, they are refused."""
    source = sets.make_pairs(tmp_path / "source", num_train=8, num_val=1)

    Materializer(BadAsItIs(), source, tmp_path / "out", errors="skip").run(progress=False)

    found = failures(tmp_path / "out")
    assert {key: error for key, (error, _) in found.items()} == {"train003": "SchemaError", "train005": "SchemaError"}
    assert "'mask' is declared" in found["train003"][1] and "float64" in found["train005"][1]
    assert len(load(tmp_path / "out", "train")) == 6


def test_bytes_with_samples_left_out_do_not_depend_on_the_workers(source, tmp_path):
    """Nor on whether they are skipped or kept in quarantine."""
    for output, number, action in [("one", 1, "skip"), ("three", 3, "quarantine")]:
        options = {"errors": action, "workers": WorkerOptions(num_workers=number), "copies": {"train": 2}}
        job(source, tmp_path / output, **options).run(progress=False)

    assert sets.digests(tmp_path / "one") == sets.digests(tmp_path / "three")


def test_kept_files_that_are_odd_but_whole_stay(tmp_path):
    """Palettes, and pictures that lie on their head, are neither an error nor changed."""
    source = sets.make_pairs(tmp_path / "source", num_train=2, num_val=1)
    (source / "train" / "train000.png").write_bytes(picture(mode="P"))
    (source / "train" / "train001.png").write_bytes(rotated(3))

    report = Materializer(sets.Pairs(), source, tmp_path / "out", errors="skip").run(progress=False)

    train = load(tmp_path / "out", "train")
    assert report.num_failed == 0
    upright = np.asarray(PIL.Image.open(io.BytesIO(rotated(3))))[::-1, ::-1]
    assert np.abs(train["train001"]["image"].astype(int) - upright).max() <= 4  # two decoders of JPEG


def test_first_bad_sample_ends_a_run_that_is_to_raise(source, tmp_path):
    """The ledger tells of it, too; a run with another policy goes on with what is done."""
    with pytest.raises(SampleError) as caught:
        job(source, tmp_path / "out", errors=ErrorPolicy()).run(progress=False)

    last = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))[-2:]
    assert [entry.event for entry in last] == ["sample_failed", "run_failed"]
    assert last[0].values["key"] == caught.value.key
    assert job(source, tmp_path / "out").run(progress=False).is_complete


def test_first_samples_may_be_the_bad_ones(tmp_path):
    """The transform is checked with the first good one; sys.exit in a worker does not end the run's own process."""

    class Leaving(sets.Pairs):
        def read(self, row):
            if row.key != "train003":
                sys.exit("not yet")
            return super().read(row)

    source = sets.make_pairs(tmp_path / "source", num_train=5, num_val=1)
    options = {"errors": "skip", "copies": 2, "transform": sets.jitter}
    report = Materializer(Leaving(), source, tmp_path / "out", **options).run(progress=False)

    assert (report.num_failed, report.num_records) == (5, 2)


class Flaky(sets.Pairs):
    """Reads as `Pairs` does, at the third attempt."""

    def __init__(self, marks, error):
        self.marks = str(marks)
        self.error = error

    def read(self, row):
        mark = pathlib.Path(self.marks, row.key)
        with mark.open("ab") as file:
            file.write(b"x")
        if mark.stat().st_size < 3:
            raise self.error
        return super().read(row)


def flaky_job(tmp_path, error, policy):
    (tmp_path / "marks").mkdir()
    source = sets.make_pairs(tmp_path / "source", num_train=4, num_val=1)
    return Materializer(Flaky(tmp_path / "marks", error), source, tmp_path / "out", errors=policy)


@pytest.mark.parametrize("error", [ConnectionResetError("try later"), ValueError("odd")])
def test_failure_that_passes_is_tried_again(tmp_path, error):
    """The ledger tells how often."""
    report = flaky_job(tmp_path, error, ErrorPolicy("raise", retries=2)).run(progress=False)

    retried = [e for e in read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl") if e.event == "sample_retried"]
    assert report.num_failed == 0 and len(retried) == 5
    assert {(e.values["attempts"], e.values["error"]) for e in retried} == {(3, type(error).__name__)}


def test_retries_are_limited(tmp_path):
    """Two attempts do not reach the third."""
    with pytest.raises(SampleError, match="try later"):
        flaky_job(tmp_path, OSError("try later"), ErrorPolicy("raise", retries=1)).run(progress=False)


def test_sample_that_is_not_as_declared_is_not_tried_again(tmp_path):
    """It would be the same."""
    policy = ErrorPolicy("skip", retries=5)
    source = sets.make_pairs(tmp_path / "source", num_train=4, num_val=1)
    (source / "train" / "train001.png").write_bytes(picture((48, 64)))

    Materializer(sets.Pairs(), source, tmp_path / "out", errors=policy).run(progress=False)

    ledger = read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl")
    assert [e.values["attempts"] for e in ledger if e.event == "sample_skipped"] == [1]


@pytest.mark.parametrize(("most", "stops"), [(2, True), (3, False), (0.1, True), (0.125, False), (None, False)])
def test_limit_ends_a_run_with_too_many_failures(tmp_path, most, stops):
    """As a number, and as a share; the message names them."""
    source = sets.make_pairs(tmp_path / "source", num_train=20, num_val=4)
    for number in (3, 9, 15):
        (source / "train" / f"train{number:03d}.png").write_bytes(b"not a picture")
    run = Materializer(sets.Pairs(), source, tmp_path / "out", errors=ErrorPolicy("skip", max_errors=most))

    if not stops:
        assert run.run(progress=False).num_failed == 3
        return
    with pytest.raises(IncompleteRunError, match=r"3 of 24 rows failed, more than the 2") as caught:
        run.run(progress=False)
    assert all(f"train{number:03d}: InputError" in str(caught.value) for number in (3, 9, 15))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("count", [6, 300])
def test_run_in_which_everything_fails_is_not_complete(tmp_path, count):
    """Whatever the limit; a long one is stopped half-way."""
    source = sets.make_pairs(tmp_path / "source", num_train=count, num_val=0)
    for path in (source / "train").iterdir():
        path.write_bytes(b"not a picture")

    with pytest.raises(IncompleteRunError, match=rf"\d+ of {count} rows failed, (all of them|every one so far)"):
        Materializer(sets.Pairs(), source, tmp_path / "out", errors="skip").run(progress=False)

    assert not (tmp_path / "out" / "manifest.json").exists()


def test_shard_without_a_single_good_sample_is_read_back(tmp_path):
    """It is there, and empty."""
    source = sets.make_pairs(tmp_path / "source", num_train=8, num_val=2)
    for path in (source / "val").iterdir():
        path.write_bytes(b"not a picture")

    report = Materializer(sets.Pairs(), source, tmp_path / "out", errors="skip").run(progress=False)

    assert (report.num_failed, report.num_records) == (2, 8)
    assert len(load(tmp_path / "out", "val")) == 0 and len(load(tmp_path / "out", "train")) == 8
    assert verify(tmp_path / "out").ok
