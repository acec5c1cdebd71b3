"""Samples that are bad in every way that files and code can be: each gives its named error, and no other is lost."""

import io
import os
import pathlib
import re
import shutil
import struct
import sys
import zlib

import numpy as np
import PIL.Image
import pytest
import small_pairs

from datamat import (
    ErrorPolicy,
    IncompleteRunError,
    SampleError,
    ShardOptions,
    WorkerOptions,
    load,
    verify,
)
from datamat.codecs import encode_png
from datamat.directory.ledger import read_ledger

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


def lost_inside(encoding):
    """Return a file that has lost some of its compressed data: cv2 fills the gap with grey and reports nothing."""
    whole = picture(encoding=encoding, quality=95)
    return whole[: len(whole) * 2 // 3] + whole[-60:]


def rotated(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return picture(encoding="jpeg", exif=exif)


FILES = {
    "empty": (b"", "InputError", "an empty file"),
    "text": (b"Not Found", "InputError", "want a PNG, JPEG, WebP, BMP or TIFF"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "InputError", "Git LFS pointer"),
    "cut": (picture()[:900], "InputError", "ends before its IEND chunk"),
    "cut_by_one": (picture()[:-1], "InputError", "ends before|IEND"),
    "cut_jpeg": (picture(encoding="jpeg")[:-200], "InputError", "JPEG"),
    "damaged_jpeg": (lost_inside("jpeg"), "InputError", "jpeg that does not decode .Corrupt JPEG data"),
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
"""By key: what the image file holds, the class of the error, and its message."""

CODE = {
    "vanished": ("InputError", "No such file"),
    "directory": ("InputError", "is a directory"),
    "fifo": ("InputError", "is a FIFO"),
    "wrong_mask": ("SchemaError", r"mask.*\(12, 32\)"),
    "raising": ("ZeroDivisionError", "modulo by zero"),
    "leaving": ("SystemExit", "read or augment called sys.exit"),
    "recursing": ("RecursionError", "maximum recursion"),
    "unnamed": ("SchemaError", "read returned a tuple that holds a"),
    "undecoded": ("SchemaError", "read returned None for the field 'image'"),
    "half": ("SchemaError", r"\(12, 32, 3\)"),
    "drifted": ("SchemaError", "depth"),
    "unaugmented": ("IndexError", "no such angle"),
    "huge": ("MemoryError", ""),
}
"""By key: what goes wrong when the sample is read or augmented."""

NUM_TRAIN, NUM_VAL = 8, 2


class Bad(small_pairs.Pairs):
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
        """Replace a regular file of the index by what now stands in its place."""
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
            "unnamed": lambda sample: (sample["image"], sample["mask"]),
            "undecoded": lambda sample: {**sample, "image": None},
            "half": lambda sample: {**sample, "image": PIXELS[:12]},
            "drifted": lambda sample: {**sample, "depth": 3},
            "huge": lambda sample: {**sample, "image": bytearray(1 << 62)},
        }

    def augment(self, sample, rng):
        if sample["key"] == "unaugmented":
            raise IndexError("no such angle")
        return small_pairs.jitter(sample, rng)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Good pairs, and among them one for each way to be bad."""
    folder = small_pairs.make_pairs(tmp_path_factory.mktemp("bad"), NUM_TRAIN, NUM_VAL)
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


@pytest.fixture(scope="module")
def template(source, tmp_path_factory):
    """The finished run without the bad samples, and its report."""
    output = tmp_path_factory.mktemp("template") / "out"
    return output, job(source, output).run(progress=False)


@pytest.fixture
def output(template, tmp_path):
    """A copy of that, which a test may change."""
    return shutil.copytree(template[0], tmp_path / "finished")


def job(source, output, **options):
    return small_pairs.job(source, output, Bad(), **{"errors": "skip", "shards": ShardOptions(num_shards=3), **options})


def failures(output):
    """Return (error, message) of each sample that was left out, by key."""
    entries = read_ledger(output / ".datamat" / "ledger.jsonl")
    return {
        e.values["key"]: (e.values["error"], e.values["message"])
        for e in entries
        if e.event in ("sample_skipped", "sample_quarantined")
    }


@pytest.mark.parametrize("copies", [1, 2])
def test_each_bad_sample_has_its_named_error_and_no_other_is_lost(source, template, tmp_path, copies):
    """One run meets all of them; the names, counts and checksums of its shards are right."""
    output, report = template
    if copies > 1:
        output = tmp_path / "out"
        report = job(source, output, copies={"train": copies}).run(progress=False)

    found = failures(output)
    wanted = {key: rest for key, (_, *rest) in FILES.items()} | CODE
    assert {key: error for key, (error, _) in found.items()} == {key: error for key, (error, _) in wanted.items()}
    assert [key for key, (_, message) in wanted.items() if not re.search(message, found[key][1], re.DOTALL)] == []
    good = {f"train{number:03d}#{copy}" for number in range(NUM_TRAIN) for copy in range(copies)}
    assert set(load(output, "train").keys()) == good
    assert len(load(output, "val")) == NUM_VAL
    assert (report.num_failed, report.is_complete) == (len(wanted), True)
    assert report.num_rows == NUM_TRAIN + NUM_VAL + len(wanted)
    assert verify(output).ok
    assert len(list(output.glob("bad-train-*-of-00003.tfrecord"))) == 3


def test_untransformed_samples_must_be_as_declared(tmp_path):
    """A transform may make a sample good; without one, what does not match the declaration is refused."""

    class BadAsItIs(small_pairs.Pairs):
        def read(self, row):
            sample = super().read(row)
            if row.key == "train000":
                del sample["mask"]
            if row.key == "train001":
                sample["image"] = PIXELS / 255
            return sample

    source = small_pairs.make_pairs(tmp_path / "source", num_train=3, num_val=1)

    small_pairs.job(source, tmp_path / "out", BadAsItIs(), errors="skip").run(progress=False)

    found = failures(tmp_path / "out")
    assert {key: error for key, (error, _) in found.items()} == {"train000": "SchemaError", "train001": "SchemaError"}
    assert "'mask' is declared" in found["train000"][1] and "float64" in found["train001"][1]


def test_bytes_with_samples_left_out_do_not_depend_on_the_workers(source, output, tmp_path):
    """The bytes are the same whether bad samples are skipped or quarantined."""
    workers = WorkerOptions(num_workers=2)
    job(source, tmp_path / "out", errors="quarantine", workers=workers).run(progress=False)

    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(output)


def test_kept_files_that_are_odd_but_whole_stay(tmp_path):
    """Palettes and rotated pictures are no errors, and their bytes do not change."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=2, num_val=1)
    (source / "train" / "train000.png").write_bytes(picture(mode="P"))
    (source / "train" / "train001.png").write_bytes(rotated(3))

    report = small_pairs.job(source, tmp_path / "out", errors="skip").run(progress=False)

    train = load(tmp_path / "out", "train")
    assert report.num_failed == 0
    upright = np.asarray(PIL.Image.open(io.BytesIO(rotated(3))))[::-1, ::-1]
    assert np.abs(train["train001"]["image"].astype(int) - upright).max() <= 4  # two decoders of JPEG


def test_damaged_picture_is_not_kept_as_it_is(tmp_path):
    """A JPEG that needs no change is stored as it is and never decoded to pixels, but its codes are checked."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=3, num_val=0)
    (source / "train" / "train000.png").write_bytes(lost_inside("jpeg"))
    (source / "train" / "train001.png").write_bytes(picture(encoding="jpeg"))

    small_pairs.job(source, tmp_path / "out", errors="skip").run(progress=False)

    ((key, (error, message)),) = failures(tmp_path / "out").items()
    assert (key, error) == ("train000", "InputError") and "Corrupt JPEG data" in message
    samples = load(tmp_path / "out")
    assert sorted(sample["key"] for sample in samples) == ["train001", "train002"]


@pytest.mark.parametrize(
    ("spoilt", "are_all_found"),
    [(lambda data: data[:-40], True), (lambda data: data[: len(data) * 2 // 3] + data[-60:], False)],
)
def test_pictures_that_a_transform_encodes_are_sampled(tmp_path, spoilt, are_all_found):
    """One that is cut off is always refused. Of others, one in 16 is decoded: which ones, their bytes alone decide."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=100, num_val=0)

    def encode(sample, rng):
        data = picture(encoding="jpeg", quality=int(rng.integers(30, 95)))
        return {**sample, "image": data if sample["key"].endswith("0") else spoilt(data)}

    found = []
    for num_shards in (1, 4):
        output = tmp_path / str(num_shards)
        errors = ErrorPolicy("skip", max_errors=None)
        small_pairs.job(source, output, errors=errors, transform=encode, shards=num_shards).run(progress=False)
        found.append(sorted(failures(output)))

    assert found[0] == found[1]
    assert len(found[0]) == 90 if are_all_found else 0 < len(found[0]) < 45


def test_first_bad_sample_ends_a_run_that_is_to_raise(source, tmp_path):
    """The ledger records the sample; a run under another policy reuses the finished parts."""
    with pytest.raises(SampleError) as caught:
        job(source, tmp_path / "out", errors="raise").run(progress=False)

    last = list(read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl"))[-2:]
    assert [entry.event for entry in last] == ["sample_failed", "run_failed"]
    assert last[0].values["key"] == caught.value.key
    assert job(source, tmp_path / "out").run(progress=False).is_complete


class Flaky(small_pairs.Pairs):
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
    source = small_pairs.make_pairs(tmp_path / "source", num_train=2, num_val=1)
    return small_pairs.job(source, tmp_path / "out", Flaky(tmp_path / "marks", error), errors=policy)


@pytest.mark.parametrize("error", [ConnectionResetError("try later"), ValueError("odd")])
def test_transient_failure_is_retried(tmp_path, error):
    """A sample that fails twice and then reads is stored, and the ledger counts the retries."""
    report = flaky_job(tmp_path, error, ErrorPolicy("raise", retries=2)).run(progress=False)

    retried = [e for e in read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl") if e.event == "sample_retried"]
    assert report.num_failed == 0 and len(retried) == 3
    assert {(e.values["attempts"], e.values["error"]) for e in retried} == {(3, type(error).__name__)}


def test_retries_are_limited(tmp_path):
    """With two attempts, a sample that reads only at the third one fails; one that is not as declared gets only one."""
    job = flaky_job(tmp_path, OSError("try later"), ErrorPolicy("skip", retries=1))
    (tmp_path / "source" / "train" / "train001.png").write_bytes(picture((48, 64)))
    for key in ("train001", "val000"):  # as if they had been read before
        (tmp_path / "marks" / key).write_bytes(b"xxx")

    job.run(progress=False)

    ledger = read_ledger(tmp_path / "out" / ".datamat" / "ledger.jsonl")
    attempts = {e.values["key"]: e.values["attempts"] for e in ledger if e.event == "sample_skipped"}
    assert attempts["train001"] == 1 and attempts["train000"] == 2


@pytest.mark.parametrize(("most", "stops"), [(2, True), (3, False), (0.25, True), (0.3, False)])
def test_limit_ends_a_run_with_too_many_failures(tmp_path, most, stops):
    """The limit is a number or a share of the rows; the message names the first failures."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=9, num_val=1)
    for number in (3, 5, 8):
        (source / "train" / f"train{number:03d}.png").write_bytes(b"not a picture")
    run = small_pairs.job(source, tmp_path / "out", errors=ErrorPolicy("skip", max_errors=most))

    if not stops:
        assert run.run(progress=False).num_failed == 3
        return
    with pytest.raises(IncompleteRunError, match=r"3 of 10 rows failed, more than the 2") as caught:
        run.run(progress=False)
    assert all(f"train{number:03d}: InputError" in str(caught.value) for number in (3, 5, 8))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_run_in_which_everything_fails_is_not_complete(tmp_path):
    """No limit makes it a success."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=6, num_val=0)
    for path in (source / "train").iterdir():
        path.write_bytes(b"not a picture")

    with pytest.raises(IncompleteRunError, match=r"\d+ of 6 rows failed, (all of them|every one so far)"):
        small_pairs.job(source, tmp_path / "out", errors="skip").run(progress=False)

    assert not (tmp_path / "out" / "manifest.json").exists()


def test_shard_without_a_single_good_sample_is_readable(tmp_path):
    """It exists and holds no records."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=8, num_val=2)
    for path in (source / "val").iterdir():
        path.write_bytes(b"not a picture")

    report = small_pairs.job(source, tmp_path / "out", errors="skip").run(progress=False)

    assert (report.num_failed, report.num_records) == (2, 8)
    assert len(load(tmp_path / "out", "val")) == 0 and len(load(tmp_path / "out", "train")) == 8
    assert verify(tmp_path / "out").ok


# ------------------------------------------------------------ work of a run under another policy


def test_rows_that_were_left_out_are_an_error_where_all_are_wanted(source, output):
    """A finished dataset stays as it is, and so under a narrower limit; the error names the rows and the remedy."""
    num_failed = len(FILES) + len(CODE)
    before = small_pairs.digests(output)

    for options in ({}, {"exclude": "val-*"}):
        message = rf"is without {num_failed} rows .*run\(retry_failed=True\)"
        with pytest.raises(IncompleteRunError, match=message) as caught:
            job(source, output, errors="raise", **options).run(progress=False)
        assert any(key in str(caught.value) for key in failures(output))
        assert f"and {num_failed - 10} more)" in str(caught.value)

    with pytest.raises(IncompleteRunError, match="more than the 1 that max_errors allows"):
        job(source, output, errors=ErrorPolicy("skip", max_errors=1)).run(progress=False)
    assert small_pairs.digests(output) == before
    assert job(source, output).run(progress=False).did_nothing

    next(output.glob("*-val-*.tfrecord")).unlink()
    job(source, output, errors="raise").repair(progress=False)  # which refuses nothing, whatever the policy
    assert small_pairs.digests(output) == before


def test_rows_of_unfinished_shards_that_were_left_out_are_an_error_where_all_are_wanted(tmp_path):
    """The receipts of their parts list them."""
    folder = small_pairs.make_pairs(tmp_path / "source", num_train=6, num_val=1)
    (folder / "train" / "train000.png").write_bytes(b"no picture" * 1000)  # the largest file: the first part
    one_shard = {"shards": ShardOptions(num_shards=1, shuffle=False)}

    class Stopping(small_pairs.Pairs):
        def read(self, row):
            if row.key == "train005" and not (tmp_path / "go").exists():
                raise KeyboardInterrupt
            return super().read(row)

    with pytest.raises(KeyboardInterrupt):
        small_pairs.job(folder, tmp_path / "out", Stopping(), errors="skip", **one_shard).run(progress=False)
    (tmp_path / "go").touch()

    with pytest.raises(IncompleteRunError, match=r"is without 1 row .*train000"):
        small_pairs.job(folder, tmp_path / "out", Stopping(), **one_shard).run(progress=False)
