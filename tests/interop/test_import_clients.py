"""Datasets that the real clients made, used as a source: each sample exactly once, with equal pixels and labels."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
from prepared import Prepared

from datamat import (
    BBoxes,
    ClassLabel,
    Image,
    ListOf,
    Materializer,
    SampleError,
    Scalar,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
)
from datamat.codecs import encode_jpeg, encode_png
from datamat.writers.dataset import ImportWriter
from datamat.writers.spool import RowStream

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 6, 8, 3), np.uint8)
NAMES = ("car", "bus")


def imported(source, output, writer=None, **options):
    options = {"workers": WorkerOptions(num_workers=2), **options}
    Prepared(writer or ImportWriter(), source, output, **options).run(progress=False)
    return load(output)


@pytest.fixture
def table():
    """A `datasets.Dataset` with pictures, labels, text, numbers and lists."""
    datasets = pytest.importorskip("datasets", reason="it makes the dataset")
    pillow = pytest.importorskip("PIL.Image", reason="datasets needs it for pictures")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=list(NAMES)),
            "caption": datasets.Value("string"),
            "small": datasets.Value("int8"),
            "frac": datasets.Value("float32"),
            "list": datasets.List(datasets.Value("float32")),
        }
    )
    return datasets.Dataset.from_dict(
        {
            "image": [pillow.fromarray(picture) for picture in PIXELS],
            "label": [number % 2 for number in range(7)],
            "caption": [f"größer {number}" for number in range(7)],
            "small": list(range(7)),
            "frac": [number / 4 for number in range(7)],
            "list": [[0.5] * number for number in range(7)],
        },
        features=features,
    )


def _check_table(data):
    assert {name: feature for name, feature in data.features.items() if name != "key"} == {
        "image": Image(),
        "label": ClassLabel(names=NAMES),
        "caption": Text(),
        "small": Scalar("int8"),
        "frac": Scalar("float32"),
        "list": Tensor((None,), "float32"),
    }
    samples = sorted(data, key=lambda sample: sample["small"])
    assert [sample["small"] for sample in samples] == list(range(7))
    for number, sample in enumerate(samples):
        assert np.array_equal(sample["image"], PIXELS[number])
        assert (sample["label"], sample["caption"], sample["frac"]) == (number % 2, f"größer {number}", number / 4)
        assert sample["list"].tolist() == [0.5] * number


def test_hugging_face_dataset_is_a_source(table, tmp_path):
    """The object serves as the source, with its own features; the same content is not written again."""
    _check_table(imported(table, tmp_path / "out"))

    again = Materializer(ImportWriter(), table, tmp_path / "out").run(progress=False)
    few = Materializer(ImportWriter(), table.select(range(5)), tmp_path / "out")
    changed = few.run(progress=False, existing="replace")

    assert again.num_shards_written == 0
    assert changed.num_records == 5


def test_saved_hugging_face_datasets_are_sources(table, tmp_path):
    """A single table, and several by split."""
    datasets = pytest.importorskip("datasets")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([6])}).save_to_disk(tmp_path / "two")

    _check_table(imported(tmp_path / "one", tmp_path / "out one"))
    imported(tmp_path / "two", tmp_path / "out two")

    _check_table(load(tmp_path / "out two", "train"))
    assert [sample["small"] for sample in load(tmp_path / "out two", "test")] == [6]


def test_streamed_hugging_face_dataset_is_a_source(table, tmp_path):
    """Its rows are spooled; pictures stay encoded."""
    _check_table(imported(table.to_iterable_dataset(num_shards=2), tmp_path / "out"))


def test_rows_of_hugging_face_are_those_of_the_users_transform(table, tmp_path):
    """The table below it was stored instead."""
    shouting = table.select_columns(["caption"]).with_transform(
        lambda batch: {"caption": [text.upper() for text in batch["caption"]]}
    )

    data = imported(shouting, tmp_path / "out")

    assert sorted(sample["caption"] for sample in data) == [f"GRÖSSER {number}" for number in range(7)]


def test_stream_of_hugging_face_gives_pictures_that_a_step_has_decoded(table, tmp_path):
    """A filter decodes them; empty lists of numbers keep their type, and an empty cell is refused with its row."""
    datasets = pytest.importorskip("datasets")

    _check_table(imported(table.to_iterable_dataset().filter(lambda row: row["small"] >= 0), tmp_path / "out"))

    for cells in ([[1], None], [[0.5], None]):
        with pytest.raises(SampleError, match=r"'00000001'.*None for the field 'a'"):
            imported(datasets.Dataset.from_dict({"a": cells}).to_iterable_dataset(), tmp_path / "none")


def test_stream_of_hugging_face_resumes_where_it_was_interrupted(table, tmp_path, monkeypatch):
    """By its own state; not with a shuffle buffer, whose rows would be lost."""
    monkeypatch.setattr("datamat.writers.spool._SAVE_S", 0)
    given = []

    def stream(fails_at=None):
        def seen(row):
            if row["small"] == fails_at:
                raise ConnectionError("the line is down")
            given.append(row["small"])
            return row

        rows = table.remove_columns("image")
        return rows.to_iterable_dataset(num_shards=3).map(seen, features=rows.features)

    with pytest.raises(ConnectionError):
        Materializer(ImportWriter(spool=tmp_path / "rows"), stream(5), tmp_path / "out").plan()
    assert given == [0, 1, 2, 3, 4]
    writer = ImportWriter(spool=tmp_path / "rows")
    Materializer(writer, stream(), tmp_path / "out").plan()

    assert given[5:] in ([5, 6], [4, 5, 6])  # datasets may ask again for the row at which it stopped
    assert [int(writer.read(row)["small"]) for row in writer.index(None)] == list(range(7))
    assert not RowStream(stream().shuffle(seed=0, buffer_size=3), None)._has_state


@pytest.fixture
def albums():
    """A `datasets.Dataset` with lists of JPEG pictures, of no, one or two each."""
    datasets = pytest.importorskip("datasets", reason="it makes the dataset")
    pytest.importorskip("PIL.Image", reason="datasets needs it for pictures")
    cells = [
        [{"bytes": encode_jpeg(PIXELS[number]), "path": None}, {"bytes": encode_png(PIXELS[0]), "path": None}]
        for number in range(7)
    ]
    features = datasets.Features({"images": datasets.List(datasets.Image()), "n": datasets.Value("int64")})
    table = {"images": [cell[: number % 3] for number, cell in enumerate(cells)], "n": list(range(7))}
    return datasets.Dataset.from_dict(table, features=features)


@pytest.mark.sample(5)
@pytest.mark.parametrize("form", ["map", "stream", "filtered stream", "parquet", "disk"])
def test_lists_of_pictures_of_hugging_face_are_stored_as_they_are(albums, tmp_path, form):
    """Each with the pixels that the client decodes, and without another loss of JPEG; the first row has none."""
    source = albums
    if form == "parquet":
        albums.to_parquet(tmp_path / "rows.parquet")
        source = tmp_path / "rows.parquet"
    elif form == "disk":
        albums.save_to_disk(tmp_path / "disk")
        source = tmp_path / "disk"
    elif form == "stream":
        source = albums.to_iterable_dataset()
    elif form == "filtered stream":
        source = albums.to_iterable_dataset().filter(lambda row: len(row["images"]) < 9)

    data = imported(source, tmp_path / "out")

    assert data.features["images"] == ListOf(Image()) and len(data) == 7
    for sample in data:
        wanted = albums[int(sample["n"])]["images"]
        assert len(sample["images"]) == len(wanted) == int(sample["n"]) % 3
        assert all(np.array_equal(found, np.asarray(one)) for found, one in zip(sample["images"], wanted, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["map", "stream", "filtered stream"])
def test_dicts_with_pictures_in_lists_of_hugging_face_keep_their_bytes(tmp_path, form):
    """The client's own pixels and labels, row by row; the first row has none."""
    datasets = pytest.importorskip("datasets", reason="it makes the dataset")
    pytest.importorskip("PIL.Image", reason="datasets needs it for pictures")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    features = datasets.Features({"crops": datasets.List(kinds), "n": datasets.Value("int64")})
    files = [encode_jpeg(pixels) for pixels in PIXELS]
    rows = [
        {"n": n, "crops": [{"image": {"bytes": files[(n + k) % 7], "path": None}, "label": k} for k in range(n % 3)]}
        for n in range(7)
    ]
    table = datasets.Dataset.from_list(rows, features=features)
    stream = table.to_iterable_dataset()
    source = {"map": table, "stream": stream, "filtered stream": stream.filter(lambda row: row["n"] >= 0)}[form]

    data = imported(source, tmp_path / "out")

    assert len(data) == 7
    for sample in data:
        number = int(sample["n"])
        wanted = table[number]["crops"]
        assert list(sample["crops"]["label"]) == [crop["label"] for crop in wanted] == list(range(number % 3))
        for found, crop in zip(sample["crops"]["image"], wanted, strict=True):
            assert np.array_equal(found, np.asarray(crop["image"]))
    if form == "stream":
        writer = Materializer(ImportWriter(), source, tmp_path / "unused").writer
        found = [[crop["image"] for crop in writer.read(row)["crops"]] for row in writer.index(None)]
        assert found == [[crop["image"]["bytes"] for crop in row["crops"]] for row in rows]


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["map", "stream", "parquet"])
def test_structs_of_hugging_face_are_the_dicts_that_it_gives(tmp_path, form):
    """Every sample compared with the client's own, nested pictures by their pixels."""
    datasets = pytest.importorskip("datasets", reason="it makes the dataset")
    pytest.importorskip("PIL.Image", reason="datasets needs it for pictures")
    features = datasets.Features(
        {
            "n": datasets.Value("int64"),
            "meta": {"id": datasets.Value("int32"), "by": {"name": datasets.Value("string")}},
            "pair": {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))},
            "turns": datasets.List({"role": datasets.Value("string"), "text": datasets.Value("string")}),
        }
    )
    rows = [
        {
            "n": n,
            "meta": {"id": n, "by": {"name": f"größer {n}"}},
            "pair": {"image": {"bytes": encode_png(PIXELS[n]), "path": None}, "label": n % 2},
            "turns": [{"role": "user", "text": "a"}, {"role": "bot", "text": None}][: n % 3],
        }
        for n in range(7)
    ]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    source = {"map": table, "stream": table.to_iterable_dataset(), "parquet": tmp_path / "rows.parquet"}[form]

    data = imported(source, tmp_path / "out")

    assert len(data) == 7
    for sample in data:
        wanted = table[int(sample["n"])]
        assert (sample["meta"], sample["turns"]) == (wanted["meta"], wanted["turns"])
        assert sample["pair"].keys() == wanted["pair"].keys() and sample["pair"]["label"] == wanted["pair"]["label"]
        assert np.array_equal(sample["pair"]["image"], np.asarray(wanted["pair"]["image"]))


def test_list_of_pictures_with_an_empty_item_is_refused(albums, tmp_path):
    """With row and item."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"images": [[{"bytes": encode_png(PIXELS[0]), "path": None}, None]]},
        features=albums.select_columns("images").features,
    )

    for source in (table, table.to_iterable_dataset()):
        with pytest.raises(
            (SourceError, SampleError), match=r"item 1 of the sample is None; give a value, or declare ListOf\(Nullable"
        ):
            imported(source, tmp_path / "out", workers=WorkerOptions(num_workers=1))


def test_parquet_file_of_hugging_face_keeps_its_types(table, tmp_path):
    """Class names and pictures, which only its note in the schema knows."""
    table.to_parquet(tmp_path / "rows.parquet")

    _check_table(imported(tmp_path / "rows.parquet", tmp_path / "out", ImportWriter(kind="huggingface")))


def _numbers(source, output):
    """Import a table; return its numbers by its names."""
    imported(source, output)
    return {str(sample["name"]): int(sample["n"]) for sample in load(output)}


@pytest.mark.long
@pytest.mark.usefixtures("java_ends")
def test_frame_of_spark_is_a_source(tmp_path):
    """Its rows are collected by the driver."""
    sql = pytest.importorskip("pyspark.sql")
    if not shutil.which("java"):
        pytest.skip("Spark needs Java 17, and there is no java on the path")
    session = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        frame = session.createDataFrame([("a", 1), ("b", 2)], ["name", "n"])
        assert _numbers(frame, tmp_path / "out") == {"a": 1, "b": 2}
    finally:
        session.stop()


def test_table_of_delta_is_a_source(tmp_path):
    """Rows that an overwrite has deleted are not in it."""
    deltalake = pytest.importorskip("deltalake")
    for names, mode in ((["old"], "error"), (["a", "b"], "overwrite")):
        rows = pa.table({"name": names, "n": [*range(len(names))]})
        deltalake.write_deltalake(tmp_path / "delta", rows, mode=mode)

    assert _numbers(deltalake.DeltaTable(tmp_path / "delta"), tmp_path / "out") == {"a": 0, "b": 1}


def test_torch_iterable_dataset_is_a_source(tmp_path):
    """Each item once, in its order; a loader, which gives batches, is refused."""
    torch = pytest.importorskip("torch", reason="it makes the dataset")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((torch.tensor(picture), number) for number, picture in enumerate(PIXELS))

    data = imported(Stream(), tmp_path / "out", ImportWriter(kind="torch", names=("image", "label")))

    for number in range(7):
        assert np.array_equal(data[f"{number:08d}"]["image"], PIXELS[number])
        assert data[f"{number:08d}"]["label"] == number
    with pytest.raises(SourceError, match="a DataLoader, which gives batches; give its dataset"):
        Materializer(torch.utils.data.DataLoader(Stream()), output=tmp_path / "loader")


def test_torch_datasets_are_sources(tmp_path):
    """Tensors become arrays; the workers get the object."""
    torch = pytest.importorskip("torch", reason="it makes the dataset")
    dataset = torch.utils.data.TensorDataset(torch.tensor(PIXELS), torch.arange(7))
    subset = torch.utils.data.Subset(dataset, [1, 3])

    data = imported({"train": dataset, "val": subset}, tmp_path / "out", ImportWriter(names=("image", "label")))

    assert sorted(int(sample["label"]) for sample in load(tmp_path / "out", "train")) == list(range(7))
    assert sorted(int(sample["label"]) for sample in load(tmp_path / "out", "val")) == [1, 3]
    for sample in data:
        assert np.array_equal(sample["image"], PIXELS[int(sample["label"])])


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def prepared(request, tmp_path_factory):
    """A directory that TFDS prepared."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="it prepares the directory")
    pytest.importorskip("importlib_resources", reason="tfds prepares with it, and does not ask for it")
    if request.param == "array_record":
        pytest.importorskip("array_record", reason="it writes the shards")

    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=list(NAMES)),
            "caption": tfds.features.Text(),
            "number": np.int32,
            "pose": tfds.features.Tensor(shape=(2, 2), dtype=np.float32),
            "objects": tfds.features.Sequence(
                {"bbox": tfds.features.BBoxFeature(), "label": tfds.features.ClassLabel(names=list(NAMES))}
            ),
            "nested": {"flag": np.bool_},
            "tags": tfds.features.Sequence(tfds.features.Text()),
            "points": tfds.features.Sequence(tfds.features.Tensor(shape=(2,), dtype=np.float32)),
            "lists": tfds.features.Sequence(tfds.features.Sequence(np.int32)),
            "words": tfds.features.Sequence(tfds.features.Sequence(tfds.features.Text())),
            "frames": tfds.features.Sequence(tfds.features.Image(shape=(6, 8, 3), encoding_format="png")),
            "video": tfds.features.Video(shape=(None, 6, 8, 3)),
            "sound": tfds.features.Audio(sample_rate=8000),
            "packed": tfds.features.Tensor(shape=(None, 2), dtype=np.int16, encoding="zlib"),
            "said": tfds.features.Translation(languages=["en", "de"]),
            "variants": tfds.features.TranslationVariableLanguages(languages=["en", "de"]),
        }
    )

    def samples(count):
        for number in range(count):
            box = tfds.features.BBox(0.0, 0.0, 0.5, 1.0)
            yield (
                number,
                {
                    "image": PIXELS[number],
                    "label": NAMES[number % 2],
                    "caption": f"größer {number}",
                    "number": number,
                    "pose": np.full((2, 2), number / 4, np.float32),
                    "objects": [{"bbox": box, "label": NAMES[k % 2]} for k in range(number % 3)],
                    "nested": {"flag": number % 2 == 0},
                    "tags": ["ö"] * number,
                    "points": [[0.5, place] for place in range(number)],
                    "lists": [[place] * place for place in range(number)],
                    "words": [["ö"] * place for place in range(number)],
                    "frames": PIXELS[: number % 3],
                    "video": PIXELS[:2],
                    "sound": np.arange(number),
                    "packed": np.full((number, 2), number, np.int16),
                    "said": {"en": "street", "de": f"Straße {number}"},
                    "variants": {"en": ["road", "street"], "de": "Straße"},
                },
            )

    builder = tfds.dataset_builders.AdhocBuilder(
        name="mine",
        version="1.0.0",
        features=features,
        split_datasets={"train": list(samples(4)), "test": list(samples(1))},
        data_dir=tmp_path_factory.mktemp(request.param),
        file_format=request.param,
    )
    builder.download_and_prepare()
    return builder.data_path


@pytest.mark.sample(2)
@pytest.mark.timeout(
    300
)  # the fixture imports TensorFlow and TFDS, which prepares each feature with a graph of its own
def test_directory_of_tfds_is_a_source(prepared, tmp_path):
    """Read without TFDS: features, class names, splits, every sample."""
    imported(str(prepared), tmp_path / "out", ImportWriter("mine"))

    data = load(tmp_path / "out", "train")
    assert data.features["objects/bbox"] == BBoxes()
    assert data.features["objects/label"] == ClassLabel(names=NAMES, shape=(None,))
    assert data.features["label"] == ClassLabel(names=NAMES)
    assert data.features["image"] == Image()
    assert data.features["number"] == Scalar("int32")
    samples = sorted(data, key=lambda sample: sample["number"])
    assert [sample["number"] for sample in samples] == list(range(4))
    for number, sample in enumerate(samples):
        assert np.array_equal(sample["image"], PIXELS[number])
        assert (sample["label"], sample["caption"]) == (number % 2, f"größer {number}")
        assert sample["pose"].tolist() == [[number / 4] * 2] * 2
        assert sample["objects"]["label"].tolist() == [k % 2 for k in range(number % 3)]
        assert sample["objects"]["bbox"].tolist() == [[0, 0, 0.5, 1]] * (number % 3)
        assert sample["nested"]["flag"] == (number % 2 == 0)
        assert sample["tags"] == ["ö"] * number
        assert np.array_equal(sample["points"], np.array([[0.5, k] for k in range(number)]).reshape(-1, 2))
        assert [one.tolist() for one in sample["lists"]] == [[k] * k for k in range(number)]
        assert sample["words"] == [["ö"] * k for k in range(number)]
        assert np.array_equal(sample["frames"], PIXELS[: number % 3]) or not number % 3
        assert len(sample["frames"]) == number % 3 and np.array_equal(sample["video"], PIXELS[:2])
        assert sample["sound"].tolist() == list(range(number))
        assert sample["packed"].tolist() == [[number] * 2] * number
        assert sample["said"] == {"en": "street", "de": f"Straße {number}"}
        pairs = set(zip(sample["variants"]["language"], sample["variants"]["translation"], strict=True))
        assert pairs == {("en", "road"), ("en", "street"), ("de", "Straße")}
    assert sorted(int(sample["number"]) for sample in load(tmp_path / "out", "test")) == [0]


STEPS = [2, 1, 3]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """Episodes of RLDS, whose steps are a dataset in each, that TFDS prepared."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="it prepares the directory")
    pytest.importorskip("importlib_resources", reason="tfds prepares with it, and does not ask for it")
    own = tfds.features
    observation = {"image": own.Image(shape=(6, 8, 3)), "turn": own.Tensor(shape=(4,), dtype=np.float32)}
    steps = {"observation": own.FeaturesDict(observation), "reward": np.float32, "is_last": np.bool_, "say": own.Text()}

    def step(number, place):
        seen = {"image": PIXELS[number], "turn": np.full(4, place - 7, np.float32)}
        return {"observation": seen, "reward": place / 2, "is_last": place == STEPS[number] - 1, "say": f"ö {place}"}

    builder = tfds.dataset_builders.AdhocBuilder(
        name="robot",
        version="1.0.0",
        features=own.FeaturesDict({"steps": own.Dataset(steps), "episode_metadata": {"number": np.int64}}),
        split_datasets={
            "train": [
                (
                    number,
                    {
                        "steps": [step(number, place) for place in range(count)],
                        "episode_metadata": {"number": number},
                    },
                )
                for number, count in enumerate(STEPS)
            ]
        },
        data_dir=tmp_path_factory.mktemp("episodes"),
    )
    builder.download_and_prepare()
    return builder


@pytest.mark.timeout(300)  # as above
def test_episodes_of_tfds_are_records_or_their_steps_are(episodes, tmp_path):
    """As TFDS itself gives them."""
    tfds = pytest.importorskip("tensorflow_datasets")
    whole = imported(str(episodes.data_path), tmp_path / "whole", ImportWriter("robot"))
    apart = imported(str(episodes.data_path), tmp_path / "apart", ImportWriter("robot", each="steps"))

    found = {int(sample["episode_metadata"]["number"]): sample["steps"] for sample in whole}
    given = {
        int(one["episode_metadata"]["number"]): one["steps"] for one in tfds.as_numpy(episodes.as_dataset("train"))
    }
    keys = {int(sample["episode_metadata"]["number"]): sample["key"] for sample in whole}
    assert sorted(found) == sorted(given) == [0, 1, 2] and len(apart) == sum(STEPS)
    for number, steps in given.items():
        for place, step in enumerate(steps):
            alone = apart[keys[number] if STEPS[number] == 1 else f"{keys[number]}#0-{place}"]
            for name in ("image", "turn"):
                assert np.array_equal(found[number]["observation"][name][place], step["observation"][name])
                assert np.array_equal(alone["observation"][name], step["observation"][name])
            assert found[number]["say"][place] == alone["say"] == step["say"].decode()
            assert found[number]["reward"][place] == alone["reward"] == step["reward"]
            assert found[number]["is_last"][place] == alone["is_last"] == step["is_last"]
