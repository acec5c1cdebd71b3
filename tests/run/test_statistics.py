"""Statistics are those that NumPy finds in the finished records, and the same however they were made."""

from __future__ import annotations

import fractions
import importlib.util
import io
import json
import math
import os
from typing import ClassVar

import hypothesis.extra.numpy
import numpy as np
import pytest
import small_pairs
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from datamat import (
    Audio,
    BBoxes,
    Bytes,
    ClassLabel,
    CorruptDataError,
    DatasetWriter,
    Depth,
    Features,
    Image,
    IndexRow,
    ListOf,
    Manifest,
    Mask,
    Materializer,
    Nullable,
    Scalar,
    ShardOptions,
    Skip,
    Tensor,
    Text,
    Tokens,
    WorkerOptions,
    convert,
    describe,
    load,
    materialize,
    merge,
)
from datamat.features.statistics import Counts, Numbers, Statistics, summarized_in_words
from datamat.testing import InlineExecutor

NUM_ROWS = 48
HAS_SOUND = importlib.util.find_spec("soundfile") is not None
LOW, HIGH = -(2**63), 2**63 - 1


def jpeg(side: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", (side, 40)).save(file, "JPEG")
    return file.getvalue()


class Rows(DatasetWriter):
    name = "rows"
    features = Features(
        {
            "image": Image(),
            "deep": Image((35, 64, 1), dtype="uint16"),
            "file": Image(),
            "mask": Mask(names=("sky", "road", "car")),
            "label": ClassLabel(names=("cat", "dog", "cow")),
            "tags": ClassLabel(num_classes=5, shape=(None,)),
            "boxes": BBoxes(),
            "text": Text(),
            "tokens": Tokens(),
            **({"sound": Audio(sample_rate=8000)} if HAS_SOUND else {}),
            "depth": Depth(dtype="float32"),
            "share": Scalar("float64"),
            "big": Scalar("int64"),
            "vector": Tensor((None, 2)),
            "maybe": Nullable(Scalar("float32")),
            "maybe_mask": Nullable(Mask(names=("no", "yes"))),
            "many": ListOf(Text()),
        }
    )
    file_fields = ()
    numbers: ClassVar = range(NUM_ROWS)

    def index(self, source):
        return [IndexRow(f"{n:04d}", "train" if n % 4 else "test", {"number": n}) for n in self.numbers]

    def read(self, row):
        n = row.fields["number"]
        rng = np.random.default_rng(n)
        size = (40 + n, 50)
        return {
            "image": rng.integers(0, 256, (*size, 3), np.uint8),
            "deep": rng.integers(0, 65_536, (35, 64), np.uint16),
            "file": jpeg(33 + n),
            "mask": np.sort(rng.integers(0, 2, size).astype(np.uint8), axis=1),
            "label": n % 2,
            "tags": rng.integers(0, 4, n % 3),
            "boxes": np.sort(rng.random((n % 4, 4), np.float32), axis=1)[:, [0, 1, 2, 3]],
            "text": "한ß" * (n % 7),
            "tokens": np.arange(n % 9),
            **({"sound": np.zeros((100 * (n + 1), 1), np.float32)} if HAS_SOUND else {}),
            "depth": rng.random((33, 40)).astype(np.float32),
            "share": [math.nan, math.inf, -math.inf, 1e308, 1e-320, -0.0, 0.1][n % 7] if n < 24 else rng.normal() * 1e9,
            "big": [LOW, HIGH, 0, 2**31, 3_000_000_019, -7][n % 6],
            "vector": rng.random((n % 5, 2), np.float32),
            "maybe": None if n % 3 else n / 7,
            "maybe_mask": None if n % 2 else np.eye(20, dtype=np.uint8),
            "many": ["a"] * (n % 3),
        }


def make(folder, *, writer=Rows, shards=4, **options):
    job = small_pairs.job(folder.parent, folder, writer(), shards=ShardOptions(num_shards=shards), **options)
    assert job.run(progress=False).is_complete
    return Manifest.read(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "out"
    make(folder)
    return folder


def check_numbers(found, values):
    values = np.asarray(values, np.float64).reshape(-1)
    values = values[np.abs(values) <= 1e150]
    assert found["count"] == len(values)
    assert (found["min"], found["max"]) == (values.min(), values.max())
    assert found["mean"] == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-300)
    assert found["std"] == pytest.approx(values.std(), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("split", ["train", "test"])
def test_they_are_those_of_the_finished_records(made, split):
    dataset = load(made, split)
    found, records = dataset.statistics, list(dataset)
    assert found == Manifest.read(made).statistics[split]
    assert found.keys() == Rows.features.keys() - {"key"}

    def of(name, function=lambda value: value):
        return [function(record[name]) for record in records]

    for name in ("image", "deep", "file", "mask", "depth"):
        check_numbers(found[name]["height"], of(name, lambda value: value.shape[0]))
        check_numbers(found[name]["width"], of(name, lambda value: value.shape[1]))
    for name in ("image", "deep"):
        steps = [max(1, min(image.shape[:2]) // 32) for image in of(name)]
        grids = [
            image[::step, ::step].reshape(-1, image.shape[2] if image.ndim == 3 else 1)
            for image, step in zip(of(name), steps, strict=True)
        ]
        pixels = np.concatenate(grids).astype(np.float64)
        assert found[name]["channels"]["mean"] == pytest.approx(pixels.mean(axis=0))
        assert found[name]["channels"]["std"] == pytest.approx(pixels.std(axis=0))
        assert found[name]["measured"] == len(records)
    assert "channels" not in found["file"]  # stored as it came, and not decoded
    pixels = np.bincount(np.concatenate(of("mask", np.ravel)), minlength=3)
    assert list(found["mask"]["pixels"].values()) == pixels.tolist()
    assert found["label"]["classes"] == dict(
        zip(("cat", "dog", "cow"), np.bincount(of("label"), minlength=3).tolist(), strict=True)
    )
    tags, times = np.unique(np.concatenate(of("tags")), return_counts=True)
    assert found["tags"]["classes"] == dict(zip(map(str, tags), times.tolist(), strict=True))
    check_numbers(found["tags"]["length"], of("tags", len))
    check_numbers(found["boxes"]["boxes"], of("boxes", len))
    check_numbers(found["text"]["characters"], of("text", len))
    check_numbers(found["tokens"]["tokens"], of("tokens", len))
    histogram = np.bincount([int(number).bit_length() for number in of("tokens", len)]).tolist()
    assert list(found["tokens"]["tokens"]["histogram"].values()) == [number for number in histogram if number]
    if HAS_SOUND:
        check_numbers(found["sound"]["seconds"], of("sound", lambda value: len(value) / 8000))
    check_numbers(found["depth"]["depth"], np.concatenate(of("depth", np.ravel)))
    share = np.array(of("share"))
    check_numbers(found["share"]["value"], share)
    assert found["share"]["value"].get("not_finite", 0) == np.count_nonzero(~(np.abs(share) <= 1e150))
    big = of("big", int)
    assert (found["big"]["value"]["min"], found["big"]["value"]["max"]) == (min(big), max(big))
    assert found["big"]["value"]["mean"] == pytest.approx(sum(big) / len(big), rel=1e-15)
    assert found["big"]["value"]["std"] == pytest.approx(np.std(np.array(big, np.float64)), rel=1e-9)
    check_numbers(found["vector"]["length"], of("vector", len))
    there = [value for value in of("maybe") if value is not None]
    check_numbers(found["maybe"]["value"], there)
    assert found["maybe"]["missing"] == len(records) - len(there)
    masks = [value for value in of("maybe_mask") if value is not None]
    assert found["maybe_mask"]["missing"] == len(records) - len(masks)
    if masks:
        assert list(found["maybe_mask"]["pixels"].values()) == np.bincount(np.ravel(masks), minlength=2).tolist()
    check_numbers(found["many"]["items"], of("many", len))


@pytest.mark.long
def test_statistics_do_not_depend_on_workers_and_shards(made, tmp_path):
    make(tmp_path / "out", workers=WorkerOptions(num_workers=3))

    assert (tmp_path / "out/manifest.json").read_bytes() == (made / "manifest.json").read_bytes()
    assert make(tmp_path / "one", shards=1).statistics == Manifest.read(made).statistics


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options", [{"shards": 1}, {"format": "parquet"}, {"format": "webdataset", "shards": 3}], ids=str
)
def test_conversion_keeps_them(made, tmp_path, options):
    convert(made, tmp_path / "out", executor=InlineExecutor(), progress=False, **options)

    assert Manifest.read(tmp_path / "out").statistics == Manifest.read(made).statistics


def test_repair_of_a_part_restores_them(tmp_path):
    before = make(tmp_path / "out", shards=1)
    written = (tmp_path / "out/manifest.json").read_bytes()
    shard = tmp_path / "out" / before.splits["train"][0].file
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    job = small_pairs.job(tmp_path, tmp_path / "out", Rows(), shards=ShardOptions(num_shards=1))
    assert job.repair(progress=False).is_complete
    assert (tmp_path / "out/manifest.json").read_bytes() == written


class First(Rows):
    numbers = range(NUM_ROWS // 2)


class Second(Rows):
    numbers = range(NUM_ROWS // 2, NUM_ROWS)


@pytest.mark.long
def test_merged_they_are_those_of_all(made, tmp_path):
    make(tmp_path / "a", writer=First)
    make(tmp_path / "b", writer=Second)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both", name="rows")
    assert Manifest.read(tmp_path / "both").statistics == Manifest.read(made).statistics


def test_they_are_shown(made):
    manifest, found = Manifest.read(made), describe(made)
    assert "train: label: classes: dog" in str(found)
    assert found.statistics == manifest.statistics
    for one in (manifest, found, load(made, "train")):
        assert "classes: dog" in one._repr_html_()
    written = json.loads((made / "manifest.json").read_text())
    assert written["statistics"]["train"]["label"] == manifest.statistics["train"]["label"]


@pytest.mark.parametrize("value", [2**64 - 1, LOW, 0.1, -1e149])
def test_equal_numbers_do_not_deviate(value):
    dtype = np.uint64 if value == 2**64 - 1 else np.array(value).dtype
    found = Numbers.of(np.full(3, value, dtype))
    assert (found.mean, found.std) == (float(value), 0)


def test_more_classes_than_are_counted_are_said_so_in_any_order():
    many, few = np.arange(900), np.arange(800, 1100)
    one, two = Counts.of(many), Counts.of(few)
    one.add(Counts.of(few))
    two.add(Counts.of(many))
    one.add(Counts.of(few))
    assert one.is_full
    assert two.is_full
    assert one == two == Counts.from_text([one.to_text()])
    assert "more than 1,024" in summarized_in_words({"classes": one.summary()})


def test_sums_are_exact_in_any_order():
    rng = np.random.default_rng(0)
    values = rng.normal(size=100_000) * 10.0 ** rng.integers(-200, 149, 100_000)
    whole = Numbers.of(values)
    parts = Numbers()
    for part in np.array_split(rng.permutation(values), 77):
        parts.add(Numbers.from_text(Numbers.of(part).to_text().split()))
    assert parts == whole
    assert whole.total == sum(map(fractions.Fraction, values.tolist())) * 2**1074


@settings(deadline=None, max_examples=300)
@given(
    hypothesis.extra.numpy.arrays(
        st.sampled_from(["float64", "float32", "int64", "uint64", "int8", "bool"]),
        st.tuples(st.integers(1, 4), st.integers(0, 40)),
    )
)
def test_columns_together_are_as_each_alone(rows):
    """Sums are exact, however far the numbers of one column lie from those of another."""
    found = Numbers.of_rows(rows)

    assert found == [Numbers.of(row) for row in rows]
    for numbers, row in zip(found, rows, strict=True):
        finite = [fractions.Fraction(one) for one in row.tolist() if abs(one) <= 1e150]
        assert (numbers.count, numbers.total) == (len(finite), sum(finite) * 2**1074)
        squares = [fractions.Fraction(float(one) ** 2 if row.dtype.kind == "f" else one * one) for one in finite]
        assert numbers.squares == sum(squares) * 2**1074


@pytest.mark.parametrize(
    "line",
    ["counts a b", "records x", "numbers f v 1 0 0 1e999999999 0 - 0", "numbers f v 1 0 0 1/0 0 - 0", "other f v 1",
     "numbers f v 1 0 0 1 0 99999999999:1 0"],
)  # fmt: skip
def test_foreign_lines_are_refused(line):
    digest = xxhash.xxh3_64_hexdigest(f"1\n{line}".encode())
    lines = [line] if line.startswith("records") else [f"records 1 {digest}", line]
    with pytest.raises(CorruptDataError, match="statistics"):
        Statistics.from_lines(lines)


@pytest.mark.parametrize("change", [("records 2", "records 3"), ("0:2", "0:3"), ("counts", "numbers")])
def test_changed_lines_are_refused(change):
    """A digit that a bad disk has changed would otherwise be another number."""
    known = Statistics()
    known.num_records = 2
    known.observe("label", {"classes": Counts.of(np.array([0, 0]))})
    lines = known.to_lines()
    changed = [line.replace(*change) for line in lines]

    assert Statistics.from_lines(lines).to_lines() == lines != tuple(changed)
    with pytest.raises(CorruptDataError, match="do not have this digest"):
        Statistics.from_lines(changed)


class Half(DatasetWriter):
    name = "half"
    features = Features({"value": Scalar("float32"), "kind": ClassLabel(names=("a", "b"))})

    def index(self, source):
        return [IndexRow("0", "train"), IndexRow("1", "test")]

    def read(self, row):
        return Skip("dark") if row.split == "test" else {"value": 0.5, "kind": 1}


def test_split_without_records_is_known_to_have_none(tmp_path):
    """It has its place in the manifest, and neither a mean nor a deviation, which would divide by zero."""
    make(tmp_path / "out", writer=Half, shards=1)

    known = Manifest.read(tmp_path / "out").statistics
    assert known["train"]["kind"]["classes"] == {"a": 0, "b": 1}
    assert not any(summary.get("mean") for summary in known.get("test", {}).get("value", {}).values())
    assert "train: kind: classes: b 1" in str(describe(tmp_path / "out"))


def test_large_values_are_not_held_until_there_are_many(tmp_path, monkeypatch):
    """Else a worker would need memory for two thousand of them."""
    sizes = []

    def observe(self, column, *, original=Bytes.observe):
        sizes.append(sum(map(len, column)))
        return original(self, column)

    monkeypatch.setattr(Bytes, "observe", observe)
    samples, options = [{"x": bytes(300_000)}] * 20, {"executor": InlineExecutor(), "progress": False}
    materialize(lambda number: samples, range(1), tmp_path / "out", features=Features({"x": Bytes()}), **options)

    assert sum(sizes) >= 6_000_000 > 2_000_000 > max(sizes)


class Noise(DatasetWriter):
    """Noisy pictures; the third cannot be read until there is a file of its name."""

    name = "noise"
    features = Features({"image": Image((8, 8, 3), encoding="jpeg")})
    file_fields = ()

    def index(self, source):
        return [IndexRow(str(number), fields={"mended": f"{source}/mended"}) for number in range(6)]

    def read(self, row):
        if row.key == "3" and not os.path.exists(row.fields["mended"]):
            raise ValueError("not there yet")
        return {"image": np.random.default_rng(int(row.key)).integers(0, 256, (8, 8, 3), np.uint8)}


def test_pictures_that_encoding_changed_are_measured_anew_where_a_row_is_retried(tmp_path):
    """Records of the other rows could be kept, but no longer show the pixels that statistics are of."""

    def run(folder, **options):
        job = Materializer(Noise(), tmp_path, tmp_path / folder, shards=ShardOptions(num_shards=1))
        job.run(executor=InlineExecutor(), progress=False, errors="skip", **options)
        return Manifest.read(tmp_path / folder).statistics["train"]["image"]

    assert run("out")["measured"] == 5
    (tmp_path / "mended").touch()
    assert run("out", retry_failed=True) == run("fresh")
    assert run("fresh")["measured"] == 6
