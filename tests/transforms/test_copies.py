"""Copies: of which splits, drawn again only where chance decides, and made one at a time, however many there are."""

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Scalar,
    ShardOptions,
    Tensor,
    WorkerOptions,
    load,
)
from datamat.plan.pipeline import Pipeline
from datamat.testing import InlineExecutor
from datamat.transforms import Augmenter

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


class One(DatasetWriter):
    features = Features({"x": Scalar("float64")})

    def index(self, source):
        return []

    def read(self, row):
        return {"x": 1.0}


@pytest.fixture
def no_tensorflow(monkeypatch):
    """Hide TensorFlow, which an earlier test may have loaded: with it, nobody can tell whether chance decided."""
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)


def drawn(transform, copies, writer=None, augment=None):
    """Return the records of a row, and how often the transform was called."""
    calls = []

    def counted(sample, rng):
        calls.append(sample)
        return transform(sample, rng)

    writer = writer or One()
    made = Pipeline(writer, Augmenter(writer.features, counted, augment), 3)
    return dict(made.records(IndexRow("a"), copies=copies, augmented=True)), len(calls)


@pytest.mark.usefixtures("no_tensorflow")
@pytest.mark.parametrize(
    "transform",
    [lambda sample, rng: sample, lambda sample, rng: {**sample, "x": sample["x"] + 1}],
    ids=["unchanged", "the same change"],
)
def test_transform_without_chance_is_called_once_for_each_copy(transform):
    found, num_calls = drawn(transform, 5)

    assert list(found) == [f"a#{copy}" for copy in range(5)]
    assert len({columns["x"] for columns in found.values()}) == 1
    assert num_calls == 5


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.random(),
        lambda rng: random.random(),
        lambda rng: np.random.random(),
        lambda rng: rng.spawn(1)[0].random(),
    ],
    ids=["rng", "random", "numpy.random", "spawned"],
)
def test_transform_that_draws_is_drawn_again(draw):
    """It gets seven tries to find a copy unlike the first, where drawn numbers had no effect."""

    def transform(sample, rng):
        draw(rng)
        return sample

    assert drawn(transform, 2)[1] == 1 + 8


def test_tries_get_fewer_where_they_come_out_equal():
    """What changes nothing costs 8, 4, 2 and then one draw for a copy; what changes is drawn once for each."""
    assert drawn(lambda sample, rng: {**sample, "x": float(rng.random() < 2)}, 7)[1] == 1 + 8 + 4 + 2 + 1 + 1 + 1
    assert drawn(lambda sample, rng: {**sample, "x": rng.random()}, 7)[1] == 7


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "transform",
    [lambda sample, rng: sample, lambda sample, rng: {**sample, "x": float(rng.random() < 2)}],
    ids=["no draws", "draws without effect"],
)
def test_equal_copies_are_said_once(transform, method, tmp_path, caplog):
    """Whoever asks for copies that cannot differ learns of it; not once for each of them, nor for each worker."""

    class Ten(One):
        def index(self, source):
            return [IndexRow(f"{number}") for number in range(10)]

    job = Prepared(
        Ten(),
        None,
        tmp_path,
        transform=transform,
        copies={"train": 4},
        shards=ShardOptions(num_shards=4),
        workers=WorkerOptions(num_workers=3, start_method=method),
    )
    with caplog.at_level("WARNING", logger="datamat"):
        assert job.run(progress=False).num_records == 40

    assert len(caplog.records) == 1, caplog.text
    assert "gives equal copies of some samples" in caplog.text


@pytest.mark.long
def test_draws_that_tensorflow_hides_count():
    """An op with a seed of its own draws by the global seed, and changes no state that Python sees."""
    tf = pytest.importorskip("tensorflow")

    def transform(sample, rng):
        tf.random.uniform([], seed=5)
        return sample

    assert drawn(transform, 2)[1] == 1 + 8


def test_whether_it_is_drawn_again_depends_on_the_row_alone():
    """A transform that rarely draws gets other copies where it did, whatever rows came before."""

    def transform(sample, rng):
        return {**sample, "x": rng.integers(2)} if sample["key"] == "b" else sample

    writer = One()
    writer.features = Features({"x": Scalar("int64")})
    writer.read = lambda row: {"x": 0}

    def records(*keys):
        made = Pipeline(writer, Augmenter(writer.features, transform), 3)
        rows = {key: dict(made.records(IndexRow(key), copies=2, augmented=True)) for key in keys}
        return [columns["x"].tolist() for columns in rows["b"].values()]

    assert records("b") == records(*"acdefgb")
    assert records("b")[0] != records("b")[1]


@pytest.mark.usefixtures("no_tensorflow")
@pytest.mark.parametrize(("probability", "num_calls"), [(1, 3), (0.5, None)])
def test_deterministic_pipeline_is_drawn_once(monkeypatch, probability, num_calls):
    albumentations = pytest.importorskip("albumentations")
    calls = []

    class Grey(albumentations.ToGray):
        def apply(self, image, **params):
            calls.append(1)
            return super().apply(image, **params)

    class Picture(One):
        features = Features({"image": Image((8, 8, 3))})

        def read(self, row):
            return {"image": PIXELS}

    writer = Picture()
    compose = albumentations.Compose([Grey(p=probability)])
    made = Pipeline(writer, Augmenter(writer.features, compose), 3)

    found = dict(made.records(IndexRow("a"), copies=3, augmented=True))

    assert len(found) == 3
    assert num_calls in {None, len(calls)}
    assert len({columns["image"] for columns in found.values()}) == (1 if num_calls else 2)


def test_samples_of_a_generator_are_stored_one_after_the_other():
    """An array that is filled again for the next sample is stored as it was."""

    def transform(sample, rng):
        held = np.zeros(2, np.float32)
        for number in range(4):
            held[:] = number
            yield {"x": held}

    writer = One()
    writer.features = Features({"x": Tensor((2,))})
    writer.read = lambda row: {"x": np.ones(2, np.float32)}

    found, _ = drawn(transform, 2, writer)

    assert {key: columns["x"].tolist() for key, columns in found.items()} == {
        f"a#{copy}-{number}": [number] * 2 for copy in range(2) for number in range(4)
    }


def test_two_functions_share_a_generator_in_order():
    """The second begins once the first has made all samples."""
    order = []

    def augment(sample, rng):
        for _ in range(2):
            order.append("augment")
            yield {"x": float(rng.random())}

    def transform(sample, rng):
        order.append("transform")
        return {"x": sample["x"] + float(rng.random())}

    drawn(transform, 1, augment=augment)

    assert order == ["augment", "augment", "transform", "transform"]


PROGRAM = """
import resource
import numpy as np
from datamat import DatasetWriter, Features, IndexRow, Materializer, ShardOptions, Tensor, WorkerOptions

COPIES, SAMPLES, SIZE, DTYPE = {copies}, {samples}, {size}, {dtype!r}

class Large(DatasetWriter):
    name = "large"
    features = Features({{"x": Tensor((SIZE,), DTYPE)}})

    def index(self, source):
        return [IndexRow("a"), IndexRow("b")]

    def read(self, row):
        return {{"x": np.zeros(SIZE, DTYPE)}}

    def augment(self, sample, rng):
        for number in range(SAMPLES):
            yield {{"x": rng.integers(0, 256, SIZE).astype(DTYPE)}}

options = {{"format": {shard_format!r}, "shards": 1}}
if __name__ == "__main__":
    report = Materializer(Large(), None, "out", copies=COPIES, **options).run(workers=1, progress=False)
    print(report.num_records, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)
"""


@pytest.mark.parametrize(
    ("copies", "samples", "shard_format", "dtype", "size"),
    [
        (2, 75, "tfrecord", "float32", 1 << 18),
        pytest.param(300, 1, "tfrecord", "float32", 1 << 18, marks=pytest.mark.long),
        pytest.param(1, 300, "tfrecord", "float32", 1 << 18, marks=pytest.mark.long),
        # Each number takes 16 bytes until it is in the file.
        pytest.param(60, 1, "parquet", "uint8", 1 << 20, marks=pytest.mark.long),
    ],
)
def test_copies_do_not_pile_up_in_memory(tmp_path, copies, samples, shard_format, dtype, size):
    """Hundreds of copies of a megabyte take no more memory than a few of them; a row group takes 64 MiB."""

    def peak(copies, samples):
        folder = tmp_path / f"{copies}-{samples}"
        folder.mkdir()
        options = {"shard_format": shard_format, "dtype": dtype, "size": size}
        program = textwrap.dedent(PROGRAM.format(copies=copies, samples=samples, **options))
        (folder / "program.py").write_text(program)
        ended = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=True)
        num_records, megabytes = map(int, ended.stdout.split())
        assert num_records == 2 * copies * samples
        return megabytes

    assert peak(copies, samples) < peak(2, 1) + 100


def test_row_that_fails_late_leaves_no_record(tmp_path):
    """Copies made before the one that fails are not in the shard, though they did not wait in memory."""

    class Late(One):
        name = "late"
        features = Features({"x": Tensor((1 << 20,))})

        def index(self, source):
            return [IndexRow("a"), IndexRow("b")]

        def read(self, row):
            return {"x": np.zeros(1 << 20, np.float32), "key": row.key}

        def augment(self, sample, rng):
            for number in range(10):
                if sample["key"] == "a" and number == 9:
                    raise ValueError("the last one is missing")
                yield {"x": rng.random(1 << 20, np.float32)}

    options = {"shards": ShardOptions(num_shards=1), "executor": InlineExecutor(), "errors": "skip"}
    report = Prepared(Late(), None, tmp_path, copies={"train": 1}, **options).run(progress=False)

    assert report.num_records == 10
    assert not list(tmp_path.rglob("tmp*"))


# ------------------------------------------------------------ which splits are drawn


class Drawing(DatasetWriter):
    """Numbers in some splits; `augment` draws another one."""

    name = "numbers"
    features = Features({"n": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{split}-{n}", split, {"n": n}) for split in source for n in range(3)]

    def read(self, row):
        return {"n": row.fields["n"]}


class Augmenting(Drawing):
    def augment(self, sample, rng):
        return {**sample, "n": sample["n"] + 100}


def plus_hundred(sample):
    return {**sample, "n": sample["n"] + 100}


@pytest.mark.parametrize("by", ["transform", "augment"])
@pytest.mark.parametrize(
    ("splits", "copies", "drawn"),
    [
        (("train", "val", "test"), None, {"train": 1}),
        (("train", "val", "test"), 3, {"train": 3}),
        (("a", "b"), None, {"a": 1, "b": 1}),
        (("a", "b"), 2, {"a": 2, "b": 2}),
        (("train", "val"), {"train": 2, "val": 1}, {"train": 2, "val": 1}),
        (("train", "val"), {"val": 2}, {"val": 2}),
        (("train", "val"), {}, {}),
    ],
)
def test_splits_that_are_drawn(tmp_path, by, splits, copies, drawn):
    """Training data alone, unless `copies` names others; the rest is stored once, as it is. The plan says which."""
    options = {} if copies is None else {"copies": copies}
    writer = Augmenting() if by == "augment" else Drawing()
    if by == "transform":
        options["transform"] = plus_hundred
    job = Prepared(writer, splits, tmp_path / "out", executor=InlineExecutor(), **options)

    lines = str(job.plan()).splitlines()
    job.run(progress=False)

    for split in splits:
        keys = [f"{split}-{n}" for n in range(3)]
        stored = sorted((sample["key"], int(sample["n"])) for sample in load(tmp_path / "out", split))
        if split in drawn:
            wanted = [(f"{key}#{copy}", n + 100) for n, key in enumerate(keys) for copy in range(drawn[split])]
        else:
            wanted = [(key, n) for n, key in enumerate(keys)]
        assert stored == sorted(wanted)
    others = [split for split in splits if split not in drawn]
    assert any(line.startswith("drawn: ") for line in lines) == bool(drawn)
    if drawn:
        assert lines[-1] == f"drawn: {', '.join(drawn)}" + (f"; as they are: {', '.join(others)}" if others else "")
