"""Types that are made of others: values that may be missing, and lists."""

from __future__ import annotations

import datetime

import numpy as np
import pytest
from prepared import Prepared
from round_trip import materialize

from datamat import (
    BBoxes,
    Bytes,
    ClassLabel,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    InputError,
    Json,
    ListOf,
    Mask,
    Nullable,
    SampleError,
    Scalar,
    SchemaError,
    Tensor,
    Text,
    Timestamp,
    load,
)
from datamat.readers.preview import preview_of
from datamat.testing import InlineExecutor

FORMATS = ["tfrecord", "parquet", "webdataset"]
NOON = datetime.datetime(2026, 11, 23, 12)


@pytest.mark.parametrize(
    ("feature", "value", "column"),
    [
        (Nullable(Scalar("int64")), 7, [7]),
        (Nullable(Scalar("int64")), None, []),
        (Nullable(Scalar("float64")), 0.5, [np.float64(0.5).tobytes()]),
        (Nullable(Text()), "", [b""]),
        (Nullable(Text()), None, []),
        (Nullable(Tensor((2, 2), "int32")), np.ones((2, 2), np.int32), [1, 1, 1, 1]),
        (Nullable(Tensor((None,), "int32")), np.empty(0, np.int32), [b""]),
        (Nullable(Tensor((None,), "int32")), np.array([258], np.int32), [b"\x02\x01\0\0"]),
        (Nullable(BBoxes()), None, []),
        (ListOf(Text()), ["sea", ""], [b"sea", b""]),
        (ListOf(Text()), [], []),
        (ListOf(Scalar("int32")), (1, np.int32(2)), [1, 2]),
        (ListOf(Scalar("uint8")), [1, 255], b"\x01\xff"),
        (ListOf(Scalar("float64")), [1, 0.5], np.array([1, 0.5]).tobytes()),
        (ListOf(ClassLabel(names=("cat", "dog"))), ["dog", 0], [1, 0]),
        (ListOf(Timestamp()), [NOON], [int(np.datetime64(NOON, "us").view(np.int64))]),
    ],
)
def test_columns_hold_the_values_there_are(feature, value, column):
    """None is an empty column; what could be taken for it is stored as bytes."""
    found = feature.encode(value)

    assert (found if isinstance(found, bytes) else list(found)) == column


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Nullable(Nullable(Text())), "declare it once"),
        (lambda: Nullable(5), "5 is not a feature"),
        (lambda: ListOf(Text), "is not a feature"),
        (lambda: ListOf(ListOf(ListOf(Text()))), "declare Json"),
        (lambda: ListOf(Nullable(ListOf(Nullable(Text())))), "give an empty"),
        (lambda: Nullable(ListOf({"a": Text()})), "cannot be in another"),
        (lambda: ListOf(ListOf({"a": Text()})), "declare Json"),
        (lambda: ListOf(Nullable({"a": Text()})), "declare Json"),
        (lambda: ListOf(ListOf(BBoxes())), "declare Json"),
        (lambda: Features({"a": {}}), "field 'a'"),
        (lambda: Features({"a": {"b": 5}}), "field 'a/b' is declared as 5"),
        (lambda: Features({"a": ListOf({"b": ListOf({"c": Text()})})}), "cannot be in another"),
        (lambda: Features({"a": {"b": Text()}, "a/b": Text()}), "field 'a/b' is declared twice"),
    ],
    ids=range(13),
)
def test_declarations_that_have_no_storage_are_refused(declare, message):
    """With what to declare."""
    with pytest.raises(SchemaError, match=message):
        declare()


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (Nullable(Scalar("int64")), "7", "holds '7'"),
        (ListOf(Text()), ["a", 5], "item 1 of the sample is int; give a str"),
        (ListOf(Text()), "abc", "a str; give a list"),
        (ListOf(Text()), ["a", None], "item 1 of the sample is None; .* declare ListOf"),
        (ListOf(Scalar("int8")), [None], "item 0 of the sample is None; .* declare ListOf"),
        (ListOf(Scalar("int8")), [1, 300], "item 1 of the sample is 300, which does not fit"),
        (ListOf(Scalar("int8")), np.zeros(2, np.int16), "holds int16"),
        (ListOf(ListOf(Text())), [["a"], "b"], "item 1 of the sample is a str; give a list"),
        (ListOf(ListOf(Text())), [[], ["b", 5]], "item 1, item 1 of the sample is int"),
        (ListOf(Nullable(Scalar("int8"))), [1, None, "a"], "item 2 of the sample is 'a'"),
        (Nullable(ListOf(Text())), "a", "a str; give a list"),
        (ListOf(Tensor((None, 2), "int8")), [np.zeros((1, 3), np.int8)], r"item 0 of the sample is int8 \(1, 3\)"),
        (ListOf(Tensor((2,), "int8")), [np.zeros(3, np.int8)], r"item 0 of the sample is int8 \(3,\)"),
    ],
    ids=range(13),
)
def test_wrong_values_are_named_with_their_place(feature, value, message):
    """The field, what is declared, and the item."""
    with pytest.raises(SchemaError, match=f"the field is declared .*{message}"):
        feature.encode(value)


class _Rows(DatasetWriter):
    """Forty rows, by blocks or one by one."""

    name = "rows"
    features = Features(
        {
            "age": Nullable(Scalar("int32")),
            "x": Nullable(Scalar("float64")),
            "note": Nullable(Text()),
            "points": Nullable(Tensor((None, 2), "float32")),
            "tags": ListOf(Text()),
            "ids": ListOf(Scalar("int64")),
            "labels": ListOf(ClassLabel(num_classes=5)),
            "times": ListOf(Timestamp()),
            "parts": ListOf(Json()),
        }
    )

    def __init__(self, by_block):
        self.by_block = by_block

    def index(self, source):
        return [IndexRow(f"{number:02d}", fields={"number": number}) for number in range(40)]

    def read(self, row):
        return sample_of(row.fields["number"])

    def read_block(self, keys, fields):
        if not self.by_block:
            return None
        rows = [sample_of(number) for number in fields["number"].tolist()]
        return {name: [row[name] for row in rows] for name in rows[0]}


def write_rows(output, by_block=False, **options):
    """Write the rows in the process of the test."""
    Prepared(_Rows(by_block), None, output, executor=InlineExecutor(), **options).run(progress=False)


def sample_of(number):
    """Return a sample in which every third value is missing, at other places in each field."""
    return {
        "age": None if number % 3 == 0 else number,
        "x": None if number % 3 == 1 else number / 3,
        "note": None if number % 3 == 2 else "größe" * (number % 4),
        "points": None if number % 3 == 0 else np.ones((number % 4, 2), np.float32),
        "tags": [f"tag {place}" for place in range(number % 4)],
        "ids": list(range(number % 3)),
        "labels": [number % 5] * (number % 2),
        "times": [np.datetime64(number, "us")] * (number % 3),
        "parts": [{"n": number}, None][: number % 3],
    }


def plain(value):
    """Return a value in a form that compares."""
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.mark.parametrize("format_name", FORMATS)
def test_missing_values_and_lists_survive(tmp_path, format_name):
    """Rows and blocks give the same files; samples, and batches that are read in blocks, the same values."""
    for by_block in (False, True):
        output = tmp_path / str(by_block)
        write_rows(output, format=format_name, by_block=by_block)
    files = [sorted((tmp_path / str(by_block)).glob("rows*")) for by_block in (False, True)]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]

    dataset = load(tmp_path / "True")
    batch = next(iter(dataset.to_numpy(batch_size=40)))  # first: row groups in memory would be read one by one
    one_by_one = list(dataset)

    for number, sample in enumerate(one_by_one):
        expected = {name: plain(value) for name, value in sample_of(int(sample["key"])).items()}
        expected["times"] = plain(np.array(expected["times"], "datetime64[us]"))
        assert {name: plain(sample[name]) for name in expected} == expected
        assert {name: plain(batch[name][number]) for name in expected} == expected
    assert dataset.features == _Rows.features


def test_batches_of_torch_hold_lists_with_none(tmp_path):
    """Numbers as tensors, beside None and text."""
    torch = pytest.importorskip("torch")
    write_rows(tmp_path / "out")

    batch = next(iter(load(tmp_path / "out").to_torch(batch_size=40)))

    rows = dict(zip(batch["key"], batch["age"], strict=True))
    assert rows["03"] is None
    assert torch.equal(rows["04"], torch.tensor(4, dtype=torch.int32))
    assert all(ids.dtype == torch.int64 for ids in batch["ids"])
    assert dict(zip(batch["key"], batch["tags"], strict=True))["02"] == ["tag 0", "tag 1"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("format_name", "batch_size"), [("tfrecord", None), ("parquet", 4)])
def test_tf_data_gets_one_value_or_none(tmp_path, format_name, batch_size):
    """None has a first dimension of size 0; batches are ragged."""
    pytest.importorskip("tensorflow")
    write_rows(tmp_path / "out", format=format_name)

    found = list(load(tmp_path / "out").to_tf(batch_size=batch_size))

    if batch_size:
        assert found[0]["points"].shape.as_list() == [batch_size, None, None, 2]
        rows = [{name: value[row] for name, value in batch.items()} for batch in found for row in range(batch_size)]
    else:
        rows = found
    assert len(rows) == 40
    for row in rows:
        number = int(row["key"].numpy())
        expected = sample_of(number)
        for name in ("age", "x"):
            assert row[name].numpy().tolist() == [expected[name]] * (expected[name] is not None)
        assert [text.decode() for text in row["note"].numpy()] == [expected["note"]] * (expected["note"] is not None)
        assert [text.decode() for text in row["tags"].numpy()] == expected["tags"]
        assert row["ids"].numpy().tolist() == expected["ids"]
        assert row["times"].numpy().tolist() == [number] * len(expected["times"])
        points = row["points"].numpy()
        assert len(points) == (expected["points"] is not None)
        if len(points):
            assert np.array_equal(points[0], expected["points"])


def test_python_transforms_of_tf_data_see_none_and_lists(tmp_path):
    """They get what `load` gives."""
    pytest.importorskip("tensorflow")
    write_rows(tmp_path / "out")

    def filled(sample, rng):
        assert sample["tags"] == sample_of(int(sample["key"]))["tags"]
        age = np.int64(-1 if sample["age"] is None else sample["age"])
        return {"key": sample["key"], "filled": age, "note": sample["note"], "tags": sample["tags"]}

    found = list(load(tmp_path / "out").to_tf(transform=filled, batch_size=8))

    ages = {
        int(key): int(age) for batch in found for key, age in zip(batch["key"].numpy(), batch["filled"], strict=True)
    }
    assert ages == {number: -1 if number % 3 == 0 else number for number in range(40)}


def test_none_of_a_field_that_is_not_optional_is_refused_with_the_remedy(tmp_path):
    """The message says what to declare."""
    with pytest.raises(SampleError, match=r"None for the field 'x'; want a value.*'x': Nullable\(...\)"):
        materialize(lambda n: {"x": None if n else 1}, range(2), tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "feature"),
    [
        (["a", "b"], ListOf(Text())),
        (("a",), ListOf(Text())),
        (np.array(["a", "b"]), ListOf(Text())),
        ([1, 2], ListOf(Scalar("int64"))),
        ([1, 2.5], ListOf(Scalar("float64"))),
        ([True, False], ListOf(Scalar("bool"))),
        ([np.float32(1)], ListOf(Scalar("float32"))),
        ([b"a"], ListOf(Bytes())),
        ([NOON], ListOf(Timestamp())),
        ([], Json()),
        ([1, "a"], Json()),
        ([1, None], Json()),
        ([2**70], Json()),
        ([2**60, 0.5], Json()),
        ([[1], [2]], ListOf(ListOf(Scalar("int64")))),
        ([[0.0, 0.0, 1.0, 1.0]], ListOf(ListOf(Scalar("float64")))),
        (((1, 2.5), []), ListOf(ListOf(Scalar("float64")))),
        ([[]], Json()),
        ([[1, None]], Json()),
        ([["a"]], Json()),
        ([[[1]]], Json()),
        ([{"a": 1}], Json()),
        ([{"a": NOON, "b": 1}, {"a": NOON, "b": 2.5}], ListOf({"a": Timestamp(), "b": Scalar("float64")})),
        (
            [{"a": np.zeros(2), "b": 1}, {"a": np.zeros(3), "b": "c"}],
            ListOf({"a": Tensor((None,), "float64"), "b": Json()}),
        ),
        ([{"a": np.zeros(2), "b": np.array(1.5)}], ListOf({"a": Tensor((None,), "float64"), "b": Scalar("float64")})),
        ([{"a": np.zeros(2)}, {"a": np.zeros(2), "b": 1}], Json()),
        ([{"a": np.zeros(2)}, {"a": None}], Json()),
        ([{"a": NOON, "b": [{"c": np.zeros(2)}]}], Json()),
        ({"a": [{"b": NOON}]}, Features({"a": ListOf({"b": Timestamp()})})),
    ],
)
def test_lists_of_one_type_are_inferred(value, feature):
    """All others are JSON."""
    assert Features.infer({"x": value}) == Features({"x": feature})


def test_bytes_in_dicts_of_a_list_are_to_be_declared():
    """As bytes alone are, with the declaration that takes them."""
    with pytest.raises(InputError, match=r"pass features= with 'x': ListOf\(\{'a': Bytes\(\), \.\.\.\}\)"):
        Features.infer({"x": [{"a": b"ply"}]})


def test_pictures_may_be_missing_in_augmented_copies(tmp_path):
    """A pipeline moves what there is; previews leave the others blank."""
    albumentations = pytest.importorskip("albumentations")
    features = Features(
        {
            "image": Nullable(Image((4, 6, 3))),
            "mask": Nullable(Mask((4, 6), names=("a", "b"))),
            "boxes": Nullable(BBoxes()),
        }
    )
    pixels = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    box = np.array([[0, 0, 0.5, 0.25]], np.float32)

    def scene(number):
        return {
            "image": None if number == 1 else pixels,
            "mask": None if number == 2 else pixels[..., 0] % 2,
            "boxes": None if number == 3 else box,
        }

    flip = albumentations.Compose(
        [albumentations.HorizontalFlip(p=1)], bbox_params=albumentations.BboxParams("albumentations")
    )
    materialize(scene, range(4), tmp_path / "out", features=features, transform=flip)

    dataset = load(tmp_path / "out")
    found = {int(sample["key"].partition("#")[0]): sample for sample in dataset}
    assert found[1]["image"] is None and found[2]["mask"] is None and found[3]["boxes"] is None
    assert np.array_equal(found[0]["image"], pixels[:, ::-1])
    assert np.array_equal(found[3]["mask"], (pixels[..., 0] % 2)[:, ::-1])
    assert np.allclose(found[2]["boxes"], [[0, 0.75, 0.5, 1]])
    assert dataset.preview(4) is not None


def test_previews_leave_lists_of_pictures_out():
    """A tile shows one picture."""
    assert preview_of(ListOf(Image((8, 6, 3)))) is None
    assert preview_of(Nullable(Image((8, 6, 3)))) == Image((8, 6, 3))


NESTED = Features(
    {
        "camera": Features({"iso": Scalar("int32"), "lens": Nullable(Text())}),
        "objects": ListOf(
            {
                "box": Tensor((4,), "float32"),
                "label": ClassLabel(names=("cat", "dog")),
                "name": Text(),
                "at": {"t": Scalar("uint8")},
            }
        ),
        "gps": Nullable({"lat": Scalar("float64"), "note": Text(), "deep": {"x": Scalar("int64")}}),
        "n": Scalar("int64"),
    }
)


def nested(number):
    """Return a sample of `NESTED`."""
    objects = [
        {"box": np.full(4, place, np.float32), "label": ["cat", "dog"][place], "name": f"o{place}", "at": {"t": place}}
        for place in range(number % 3)
    ]
    gps = {"lat": number / 2, "note": "x" * number, "deep": {"x": number}}
    return {
        "camera": {"iso": number, "lens": None if number % 2 else "50mm"},
        "objects": objects,
        "gps": gps if number % 3 else None,
        "n": number,
    }


def as_read(number):
    """Return what a sample of `NESTED` reads back as."""
    sample = nested(number)
    objects = sample["objects"]
    return {
        **sample,
        "objects": {
            "box": np.array([one["box"] for one in objects]).reshape(-1, 4).tolist(),
            "label": [int(one["label"] == "dog") for one in objects],
            "name": [one["name"] for one in objects],
            "at": {"t": [one["at"]["t"] for one in objects]},
        },
    }


def deep_plain(value):
    """Return a value in a form that compares."""
    if isinstance(value, dict):
        return {name: deep_plain(item) for name, item in value.items() if name != "key"}
    return plain(value)


def row_of(batch, row):
    """Return one row of a batch."""
    return {name: row_of(value, row) if isinstance(value, dict) else value[row] for name, value in batch.items()}


def without_gps(value):
    """Return a sample without the dict that may be missing, which a batch holds as a dict of columns."""
    return {name: item for name, item in value.items() if name != "gps"}


@pytest.mark.parametrize("format_name", ["tfrecord", "parquet"])
def test_dicts_of_fields_survive(tmp_path, format_name):
    """In samples, in batches, and in what a transform gets."""
    materialize(nested, range(40), tmp_path / "out", features=NESTED, format=format_name)

    dataset = load(tmp_path / "out")
    seen = []
    batches = [
        next(iter(dataset.to_numpy(batch_size=40))),
        next(iter(dataset.to_numpy(batch_size=40, transform=lambda sample: [seen.append(sample), sample][1]))),
    ]

    assert dataset.features == NESTED
    for sample in [*dataset, *seen]:
        assert deep_plain(sample) == as_read(int(sample["n"]))
    for batch in batches:
        assert batch["camera"]["iso"].dtype == np.int32
        for row in range(40):
            number = int(batch["n"][row])
            assert without_gps(deep_plain(row_of(batch, row))) == without_gps(as_read(number))
            assert batch["gps"]["lat"][row] == (number / 2 if number % 3 else None)


def test_dicts_read_by_blocks_are_the_same():
    """As a dict of columns, or a list of dicts."""
    rows = [nested(number) for number in range(7)]
    keys = [str(number) for number in range(7)]
    by_rows = {name: [row[name] for row in rows] for name in rows[0]}
    by_columns = {**by_rows, "camera": {name: [row["camera"][name] for row in rows] for name in ("iso", "lens")}}

    blocks = [NESTED.encode_block({"key": keys, **columns}) for columns in (by_rows, by_columns)]

    for number, row in enumerate(rows):
        for column, value in NESTED.encode({"key": keys[number], **row}).items():
            for block in blocks:
                assert (
                    np.ravel(np.asarray(block[column][number], object)).tolist()
                    == np.ravel(np.asarray(value, object)).tolist()
                )


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_array_of_lists_counts_as_the_lists_beside_it(dtype):
    """In a block, lists of numbers of one length may be an array (n, k)."""
    features = Features({"parts": ListOf({"n": Scalar(dtype), "name": Text()})})
    numbers = np.arange(6).astype(dtype).reshape(3, 2)

    block = features.encode_block({"key": list("abc"), "parts": {"n": numbers, "name": [["x", "y"]] * 3}})

    for number, row in enumerate(numbers):
        parts = [{"n": one, "name": name} for one, name in zip(row, "xy", strict=True)]
        alone = features.encode({"key": "a", "parts": parts})
        assert np.array_equal(block["parts/n"][number], alone["parts/n"])
    with pytest.raises(SchemaError, match=r"lists in field 'parts' differ in length .*parts/n: \[2, 2, 2\]"):
        features.encode_block({"key": list("abc"), "parts": {"n": numbers, "name": [["x", "y"], ["x"], []]}})


def test_dict_of_lists_is_taken_for_a_list_of_dicts():
    """As it reads back; lists of different lengths are refused."""
    sample = {"key": "a", **nested(2)}
    again = NESTED.decode(NESTED.encode(sample))

    assert deep_plain(NESTED.encode(again)) == deep_plain(NESTED.encode(sample))
    again["objects"]["name"] = ["one"]
    with pytest.raises(SchemaError, match=r"lists in field 'objects' differ in length .*objects/name: 1"):
        NESTED.encode(again)


@pytest.mark.parametrize(
    ("feature", "value"),
    [(Scalar("complex64"), np.complex64(1 + 2j)), (Tensor((3,), "int16", "raw"), np.arange(3, dtype=np.int16))],
    ids=["complex", "raw"],
)
def test_dicts_of_a_list_hold_numbers_that_are_stored_as_bytes(feature, value):
    """Their columns say how many items there are, too."""
    features = Features({"parts": ListOf({"value": feature, "n": Scalar("int8")})})

    found = features.decode(features.encode({"key": "a", "parts": [{"value": value, "n": n} for n in range(2)]}))

    assert np.array_equal(found["parts"]["value"], [value, value])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera": 5}, "field 'camera' is declared a dict"),
        ({"camera": None}, "field 'camera' is declared a dict"),
        ({"camera": {"iso": 1, "lens": None, "f": 2}}, "without 'f' .*declare Json"),
        ({"camera": {"iso": "1", "lens": None}}, "field 'camera/iso'"),
        ({"objects": [{"box": 1}]}, "field 'objects', item 0"),
        ({"objects": "cat"}, "field 'objects' is declared a list of dicts"),
        ({"more": {"a": 1}}, "field 'more' is not declared"),
    ],
    ids=range(7),
)
def test_dicts_that_are_not_as_declared_are_refused(change, message):
    """With the path of what differs."""
    with pytest.raises(SchemaError, match=message):
        NESTED.encode({"key": "a", **nested(1), **change})


def test_dicts_with_arrays_are_inferred_as_fields():
    """Others are JSON, which keeps them as they are."""
    found = Features.infer(
        {"a": {"x": np.zeros(3, np.int16), "b": {"y": b"\x89PNG"[:0] or np.zeros(2)}}, "j": {"x": [1]}}
    )

    assert found == Features(
        {"a": {"x": Tensor((None,), "int16"), "b": {"y": Tensor((None,), "float64")}}, "j": Json()}
    )


def test_batches_of_torch_hold_dicts_of_tensors(tmp_path):
    """As `default_collate` gives them."""
    torch = pytest.importorskip("torch")
    materialize(nested, range(4), tmp_path / "out", features=NESTED)

    batch = next(iter(load(tmp_path / "out").to_torch(batch_size=4)))

    assert torch.equal(batch["camera"]["iso"].long(), batch["n"])
    assert [len(boxes) for boxes in batch["objects"]["box"]] == [int(n) % 3 for n in batch["n"]]


@pytest.mark.parametrize(
    ("format_name", "transform", "batch_size"),
    [
        ("tfrecord", None, 8),
        ("tfrecord", lambda sample, rng: sample, None),
        ("parquet", lambda sample: sample, 8),
        ("parquet", None, None),
    ],
    ids=["batches", "seeded transform", "transform", "samples"],
)
@pytest.mark.sample(4)
def test_tf_data_has_dicts_of_tensors(tmp_path, format_name, transform, batch_size):
    """Ragged where they vary in length."""
    pytest.importorskip("tensorflow")
    materialize(nested, range(16), tmp_path / "out", features=NESTED, format=format_name)

    found = list(load(tmp_path / "out").to_tf(batch_size=batch_size, transform=transform))

    rows = [row_of(batch, row) for batch in found for row in range(batch_size)] if batch_size else found
    assert len(rows) == 16
    for row in rows:
        number = int(row["n"])
        expected = as_read(number)
        assert int(row["camera"]["iso"]) == number
        assert row["objects"]["box"].numpy().tolist() == expected["objects"]["box"]
        assert [name.decode() for name in row["objects"]["name"].numpy()] == expected["objects"]["name"]
        assert row["gps"]["deep"]["x"].numpy().tolist() == ([number] if number % 3 else [])


def test_pipelines_move_what_is_in_dicts(tmp_path):
    """By its path."""
    albumentations = pytest.importorskip("albumentations")
    pixels = np.arange(72, dtype=np.uint8).reshape(4, 6, 3)
    features = Features({"view": {"image": Image((4, 6, 3)), "mask": Mask((4, 6))}, "n": Scalar("int64")})
    flip = albumentations.Compose([albumentations.HorizontalFlip(p=1)])

    materialize(
        lambda n: {"view": {"image": pixels, "mask": pixels[..., 0]}, "n": n},
        range(2),
        tmp_path / "out",
        features=features,
        transform=flip,
    )

    for sample in load(tmp_path / "out"):
        assert np.array_equal(sample["view"]["image"], pixels[:, ::-1])
        assert np.array_equal(sample["view"]["mask"], pixels[:, ::-1, 0])
