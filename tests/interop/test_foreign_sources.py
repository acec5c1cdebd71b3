"""Sets that other libraries wrote, used as sources: every sample compared with what they were given."""

import gc
import io
import json
import pathlib
import shutil
import tarfile

import dill
import numpy as np
import pytest
from prepared import Prepared

from datamat import (
    Bytes,
    ClassLabel,
    CorruptDataError,
    Image,
    Json,
    ListOf,
    Materializer,
    Nullable,
    SampleError,
    Scalar,
    SchemaError,
    SourceError,
    Tensor,
    Text,
    WorkerOptions,
    load,
)
from datamat.codecs import encode_png
from datamat.formats.example import encode_example
from datamat.formats.tfrecord import frame
from datamat.writers import tfrecord
from datamat.writers.dataset import ImportWriter

MDS = pathlib.Path(__file__).parents[1] / "golden" / "mds"
PIXELS = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)


def read(*arguments, folder, **options):
    """Return the samples of a source by key, each read by a copy of the writer as workers get it."""
    job = Prepared(*arguments, output=folder / "unused", **options)
    rows = list(job.writer.index(job._job.source))
    writer = dill.loads(dill.dumps(job.writer))
    found = {}
    for row in rows:
        columns = writer.features.encode({**writer.read(row), "key": row.key})
        found[row.key] = {**writer.features.decode(columns), "split": row.split}
    assert len(found) == len(rows)
    return found, {name: feature for name, feature in writer.features.items() if name != "key"}


# ---------------------------------------------------------------- MosaicML: tests/golden/mds, written by streaming 0.13


MDS_FEATURES = {
    "arr": Tensor((None, None), "float64"),
    "big": Scalar("int64"),
    "blob": Bytes(),
    "fixed": Tensor((2, 3), "float32"),
    "frac": Scalar("float64"),
    "half": Tensor((None,), "int16"),
    "image": Image(),
    "info": Json(),
    "n": Scalar("int64"),
    "raw": Image(),
    "small": Scalar("uint8"),
    "text": Text(),
}


def test_mds_of_streaming_is_a_source(tmp_path):
    """Every encoding but pickles; shards of several sizes."""
    found, features = read(ImportWriter(features={"blob": Bytes()}), MDS, folder=tmp_path)

    assert features == MDS_FEATURES
    assert list(found)[:2] == ["shard.00000-00000000", "shard.00000-00000001"]
    for number, sample in enumerate(found.values()):
        assert np.array_equal(sample["arr"], np.arange((number + 1) * 2.0).reshape(2, number + 1))
        assert (sample["fixed"] == number).all() and sample["half"].tolist() == list(range(number + 1))
        assert (sample["image"] == number).all() and sample["image"].shape == (4, 5, 3)
        assert np.array_equal(sample["raw"], sample["image"])
        assert (sample["n"], sample["small"], sample["frac"], sample["big"]) == (-number, number, number / 4, number)
        assert (sample["text"], sample["info"]) == (f"größer {number}", {"a": [number, None]})
        assert sample["blob"] == b"\0%d" % number


def test_mds_by_split_and_what_it_cannot_give(tmp_path):
    """Folders of splits; a column that would have to be unpickled; a shard that is not there."""
    for split in ("train", "val"):
        shutil.copytree(MDS, tmp_path / "mds" / split)

    found, _ = read("mds", tmp_path / "mds", folder=tmp_path, columns=["n"])

    assert len(found) == 14 and {sample["split"] for sample in found.values()} == {"train", "val"}
    index = json.loads((MDS / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"][-1] = "pkl"
    (tmp_path / "mds" / "val" / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"column 'text' is pkl of MDS, which is never unpickled; .*drop=\['text'\]"):
        Materializer("mds", tmp_path / "mds" / "val", tmp_path / "out")
    (tmp_path / "mds" / "train" / "shard.00001.mds").unlink()
    with pytest.raises(SourceError, match=r"shard.00001.mds does not exist; copy the shard to the folder"):
        Materializer("mds", tmp_path / "mds" / "train", tmp_path / "out")


def test_shards_of_mds_with_other_columns_are_refused(tmp_path):
    """As where two sets were written into one folder."""
    shutil.copytree(MDS, tmp_path / "mds")
    index = json.loads((tmp_path / "mds/index.json").read_text())
    index["shards"][1]["column_names"].reverse()
    (tmp_path / "mds/index.json").write_text(json.dumps(index))

    with pytest.raises(SourceError, match=r"shard.00001.mds has other columns than shard.00000.mds; write them to two"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")
    (tmp_path / "mds/index.json").write_text("{")
    with pytest.raises(SourceError, match=r"index.json cannot be read as JSON \(.*\); copy or write the dataset again"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")


def test_lists_of_pictures_of_mds_are_sequences(tmp_path):
    """tests/golden/mds_lists, written by streaming 0.13: pixels of one colour, 0, 1, 2."""
    found, features = read("mds", MDS.with_name("mds_lists"), folder=tmp_path)

    assert features == dict.fromkeys(["array", "jpegs", "pils", "pngs"], ListOf(Image()))
    for number, sample in enumerate(found.values()):
        for name in ("jpegs", "pils", "pngs"):
            assert [picture.tolist() for picture in sample[name]] == [
                [[[value] * 3] * 5] * 4 for value in range(number)
            ]
        assert [int(picture[0, 0, 0]) for picture in sample["array"]] == list(range(number + 1))


def test_mds_without_samples_is_refused(tmp_path):
    """As MDSWriter leaves it where its first sample fails."""
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds" / "index.json").write_text(json.dumps({"shards": [], "version": 2}))

    with pytest.raises(SourceError, match="mds has no samples; pass a folder that has some"):
        Materializer("mds", tmp_path / "mds", tmp_path / "out")


# ---------------------------------------------------------------- litdata


@pytest.mark.long
def test_chunks_of_litdata_are_a_source(tmp_path):
    """Arrays of numpy and torch, pictures, text, nested dicts."""
    writers = pytest.importorskip("litdata.streaming.writer", reason="it writes the chunks")
    torch = pytest.importorskip("torch")
    pillow = pytest.importorskip("PIL.Image")
    writer = writers.BinaryWriter(str(tmp_path / "chunks"), chunk_size=3)
    for number in range(7):
        writer[number] = {
            "image": pillow.fromarray(PIXELS[number]),
            "n": number,
            "frac": number / 2,
            "text": f"größer {number}",
            "blob": b"\0%d" % number,
            "arr": np.full((2, number + 1), number, np.int16),
            "vector": np.arange(number + 1, dtype=np.float32),
            "tensor": torch.full((2, 2), number),
            "ids": torch.arange(number + 1),
            "brain": torch.full((2, 3), number / 2, dtype=torch.float32),
            "flag": number % 2 == 0,
            "nested": {"a": number, "list": [number, number + 1]},
        }
    writer.done()
    writer.merge()

    with pytest.raises(SourceError, match=r"field 'nested/list' is json of litdata, .*drop=\['nested/list'\], or pass"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")
    writer = ImportWriter(features={"blob": Bytes()}, drop=["nested/list"])
    found, features = read(writer, tmp_path / "chunks", folder=tmp_path)

    assert features["ids"] == Tensor((None,), "int64") and features["arr"] == Tensor((None, None), "int16")
    assert features["vector"] == Tensor((None,), "float32") and features["flag"] == Scalar("bool")
    assert len(found) == 7
    for number, sample in enumerate(found.values()):
        assert np.array_equal(sample["image"], PIXELS[number])
        assert (sample["n"], sample["frac"], sample["text"]) == (number, number / 2, f"größer {number}")
        assert sample["blob"] == b"\0%d" % number and sample["flag"] == (number % 2 == 0)
        assert np.array_equal(sample["arr"], np.full((2, number + 1), number))
        assert np.array_equal(sample["vector"], np.arange(number + 1)) and sample["ids"].tolist() == [
            *range(number + 1)
        ]
        assert (sample["tensor"] == number).all() and (sample["brain"] == number / 2).all()
        assert sample["nested"] == {"a": number}
    index = json.loads((tmp_path / "chunks" / "index.json").read_text())
    index["config"]["compression"] = "lz4"
    (tmp_path / "chunks" / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"packed by lz4, which are not read here; pass .*litdata\.StreamingDataset"):
        Materializer(source=tmp_path / "chunks", output=tmp_path / "out")


def _write_chunks(folder, rows):
    writers = pytest.importorskip("litdata.streaming.writer", reason="it writes the chunks")
    writer = writers.BinaryWriter(str(folder), chunk_size=3)
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge()


@pytest.mark.long
def test_chunks_of_litdata_that_are_tables_are_a_source(tmp_path):
    """Rows without pictures and arrays: litdata writes them as Arrow, behind offsets that are all the same."""
    rows = [
        {
            "text": f"größer {number}",
            "n": number,
            "frac": number / 4,
            "flag": number % 2 == 0,
            "blob": b"\0%d" % number,
            "ids": list(range(number)),
            "tags": ["a"] * (number % 3),
            "nested": {"a": number, "b": {"c": "x"}},
            "boxes": [{"left": place} for place in range(number % 3)],
        }
        for number in range(7)
    ]
    _write_chunks(tmp_path / "chunks", rows)

    found, features = read("litdata", tmp_path / "chunks", folder=tmp_path)

    assert features["ids"] == Tensor((None,), "int64") and features["frac"] == Scalar("float64")
    assert features["tags"] == ListOf(Text()) and features["blob"] == Bytes()
    assert [key.rpartition("-")[0] for key in found] == ["chunk-0-0"] * 3 + ["chunk-0-1"] * 3 + ["chunk-0-2"]
    for sample, row in zip(found.values(), rows, strict=True):
        assert {**sample, "ids": sample["ids"].tolist()} == {**row, "key": sample["key"], "split": None}


@pytest.mark.long
def test_tables_of_litdata_may_lack_a_field(tmp_path):
    """Each chunk has the columns and types of its own rows."""
    rows = [{"n": number, "ids": [], **({"note": "x", "ids": [number]} if number > 4 else {})} for number in range(7)]
    _write_chunks(tmp_path / "chunks", rows)

    found, features = read(ImportWriter(features={"note": Nullable(Text())}), tmp_path / "chunks", folder=tmp_path)

    assert features["ids"] == Tensor((None,), "int64")
    for sample, row in zip(found.values(), rows, strict=True):
        assert (sample["n"], sample["ids"].tolist(), sample["note"]) == (row["n"], row["ids"], row.get("note"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # litdata's own
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_tokens_of_litdata_are_a_source_by_item(tmp_path, kind):
    """Its loader reads blocks of all tokens; the chunks still say where each item ends."""
    writers = pytest.importorskip("litdata.streaming.writer", reason="it writes the chunks")
    litdata, torch = pytest.importorskip("litdata"), pytest.importorskip("torch")
    items = [np.arange(1000 * number, 1000 * number + 3 + number, dtype=np.int32) for number in range(7)]
    writer = writers.BinaryWriter(str(tmp_path / "chunks"), chunk_size=20, item_loader=litdata.TokensLoader())
    for number, item in enumerate(items):
        writer[number] = torch.from_numpy(item) if kind == "torch" else item
    writer.done()
    writer.merge()

    Materializer("litdata", tmp_path / "chunks", tmp_path / "out").run(progress=False)

    found = load(tmp_path / "out")
    samples = [found[key]["x"] for key in sorted(found.keys())]
    assert found.features["x"] == Tensor((None,), "int32")
    assert all(np.array_equal(sample, item) for sample, item in zip(samples, items, strict=True))
    blocks = litdata.StreamingDataset(str(tmp_path / "chunks"), item_loader=litdata.TokensLoader(block_size=1))
    assert sorted(int(block[0]) for block in blocks) == sorted(np.concatenate(items).tolist())


@pytest.mark.long
def test_chunks_of_litdata_of_two_forms_are_refused(tmp_path):
    """An odd chunk is written another way, where its rows fit no table."""
    _write_chunks(tmp_path / "chunks", [{"n": number} for number in range(7)])
    chunk = tmp_path / "chunks" / "chunk-0-1.bin"
    chunk.write_bytes(chunk.read_bytes()[:-1])

    with pytest.raises(SourceError, match=r"chunk-0-1.bin has no table of Arrow, others have; pass .*StreamingDataset"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")


@pytest.mark.long
def test_tables_of_litdata_that_do_not_fit_are_refused(tmp_path):
    """Each chunk has the types of its own rows: numbers in one, texts in the other."""
    _write_chunks(tmp_path / "chunks", [{"n": number} for number in range(6)])
    _write_chunks(tmp_path / "texts", [{"n": "x"}] * 3)
    (tmp_path / "texts/chunk-0-0.bin").replace(tmp_path / "chunks/chunk-0-1.bin")

    with pytest.raises(SourceError, match=r"1.bin: column 'n' is string, but int64 in .*0.bin; declare"):
        Materializer("litdata", tmp_path / "chunks", tmp_path / "out")


# ---------------------------------------------------------------- WebDataset


def _tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _members(number, key):
    return {
        f"{key}.png": encode_png(PIXELS[number]),
        f"{key}.cls": str(number % 2).encode(),
        f"{key}.json": json.dumps({"id": number, "tags": ["a"] * number}).encode(),
        f"{key}.txt": f"größer {number}".encode(),
        f"{key}.seg.png": encode_png(PIXELS[number, ..., 0]),
    }


def _check_tar(found):
    for number, sample in enumerate(found.values()):
        assert np.array_equal(sample["png"], PIXELS[number])
        assert (sample["cls"], sample["txt"]) == (number % 2, f"größer {number}")
        assert sample["json"] == {"id": number, "tags": ["a"] * number}


def test_tars_are_a_source_by_the_names_of_their_members(tmp_path):
    """Keys are those of the samples, safe where they hold a slash; hidden files and folders are passed over."""
    for part in range(2):
        members = {}
        for number in range(part * 4, min(part * 4 + 4, 7)):
            members |= _members(number, f"./a/sample{number}")
        _tar(tmp_path / f"shard-{part}.tar", {".hidden": b"", "__MACOSX/x.png": b"", **members})

    found, features = read("webdataset", tmp_path, folder=tmp_path, drop=["seg.png"], rename={"png": "image"})

    assert list(found) == [f"a-sample{number}" for number in range(7)]
    assert features == {"image": Image(), "cls": Scalar("int64"), "json": Json(), "txt": Text()}
    _check_tar({key: {**sample, "png": sample["image"]} for key, sample in found.items()})


@pytest.mark.parametrize(("name", "data"), [("a.json", b"{"), ("a.cls", b"x"), ("a.npy", b"x"), ("a.txt", b"\xff")])
def test_member_that_its_extension_belies_is_named(tmp_path, name, data):
    """As the first sample is read, which shows the features."""
    _tar(tmp_path / "a.tar", {name: data})

    with pytest.raises(CorruptDataError, match=f"member '{name[2:]}' does not hold what its extension says: "):
        read("webdataset", tmp_path / "a.tar", folder=tmp_path)


def test_tar_that_is_none_is_named(tmp_path):
    """As where a page of an error was downloaded in its place."""
    (tmp_path / "a.tar").write_bytes(b"<html>" * 200)

    with pytest.raises(SourceError, match=r"a\.tar cannot be read as a tar archive: .*; copy or write it again"):
        Materializer("webdataset", tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_tars_of_webdataset_are_a_source(tmp_path, ending):
    """As its own writer makes them, compressed or not, read in two workers."""
    webdataset = pytest.importorskip("webdataset", reason="it writes the tars")
    with webdataset.ShardWriter(str(tmp_path / f"train-%04d{ending}"), maxcount=3, verbose=0) as writer:
        for number in range(7):
            writer.write(
                {
                    "__key__": f"s{number}",
                    "png": encode_png(PIXELS[number]),
                    "cls": number % 2,
                    "json": {"id": number, "tags": ["a"] * number},
                    "txt": f"größer {number}",
                    "npy": np.full((2, number), number, np.float32),
                }
            )
    writer = ImportWriter(kind="webdataset", features={"cls": ClassLabel(names=("car", "bus"))})

    Materializer(writer, tmp_path, tmp_path / "out").run(workers=WorkerOptions(num_workers=2), progress=False)

    data = load(tmp_path / "out", "train")
    assert data.features["cls"] == ClassLabel(names=("car", "bus")) and len(data) == 7
    _check_tar({number: data[f"s{number}"] for number in range(7)})
    assert all(np.array_equal(data[f"s{number}"]["npy"], np.full((2, number), number)) for number in range(7))


@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore:.*Exception ignored in. <_io")  # it leaves tars open
def test_objects_of_webdataset_are_a_source_as_their_tars_are(tmp_path):
    """Decoded or not, through a loader or a pipeline, or listed: the same keys, features and values."""
    wds = pytest.importorskip("webdataset", reason="it reads the tars")
    for part in range(2):
        members = {}
        for number in range(part * 4, min(part * 4 + 4, 7)):
            members |= {name: data for name, data in _members(number, f"s{number}").items() if "seg" not in name}
            members[f"s{number}.bin"] = b"\0%d" % number
        _tar(tmp_path / f"shard-{part}.tar", members)
    tars = sorted(map(str, tmp_path.glob("*.tar")))
    wanted, features = read("webdataset", tmp_path, folder=tmp_path)
    dataset = wds.WebDataset(tars, shardshuffle=False)

    for source in (
        dataset,
        dataset.decode("rgb8"),
        dataset.decode("pil"),
        wds.WebLoader(dataset, batch_size=None),
        wds.DataPipeline(wds.SimpleShardList(tars), wds.tarfile_to_samples()),
        list(dataset),
    ):
        found, same = read(source, folder=tmp_path)
        assert same == features and features["bin"] == Bytes()
        assert found.keys() == wanted.keys()
        for key, sample in found.items():
            assert sample.keys() == wanted[key].keys()
            assert all(np.array_equal(value, wanted[key][name]) for name, value in sample.items())
    gc.collect()  # here, where the warnings are expected


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"a.txt": b"x", "b.cls": b"1"},
            r"1 samples have no member 'txt', the first is 'b'; add it, declare it .*drop=\['txt'\]",
        ),
        ({"a.xyz": b"x"}, r"the extension of the members 'xyz' is unknown.*features={'xyz': Bytes\(\)}.*drop="),
        ({"a.pyd": b"x"}, r"never unpickled; pass features={'pyd': Bytes\(\)}"),
        ({"README": b"x"}, "member 'README' has no extension, which would name its field"),
        ({"a.txt": b"x", "a.TXT": b"y"}, "sample 'a' has two members 'txt'"),
    ],
)
def test_tar_that_no_field_fits_is_refused(tmp_path, members, message):
    """With the member, and what to write."""
    _tar(tmp_path / "a.tar", members)

    with pytest.raises(SourceError, match=message):
        Materializer("webdataset", tmp_path, tmp_path / "out")


def test_unknown_members_are_bytes_where_they_are_declared_so(tmp_path):
    """JSON, too, keeps its text."""
    _tar(tmp_path / "a.tar", {"a.xyz": b"\0x", "a.json": b'{"b": 1,\n"a": 2}'})
    features = {"xyz": Bytes(), "json": Bytes()}

    found, _ = read(ImportWriter(features=features), tmp_path / "a.tar", folder=tmp_path)

    assert (found["a"]["xyz"], found["a"]["json"]) == (b"\0x", b'{"b": 1,\n"a": 2}')


def test_member_that_may_be_missing_is_none(tmp_path):
    """In tars, folders and TFRecords; a sample without it is refused otherwise."""
    members = {"a.txt": b"1", "b.txt": b"2", "b.cls": b"7"}
    _tar(tmp_path / "a.tar", members)
    (tmp_path / "files").mkdir()
    for name, data in members.items():
        (tmp_path / "files" / name).write_bytes(data)
    records = [
        encode_example({"txt": b"1"}, {"txt": "bytes"}),
        encode_example({"txt": b"2", "cls": np.array([7])}, {"txt": "bytes", "cls": "int64"}),
    ]
    framed = [piece for record in records for piece in frame([record], len(record))]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(framed))

    for kind, source in (("webdataset", "a.tar"), ("files", "files"), ("tfrecord", "a.tfrecord")):
        writer = ImportWriter(kind=kind, features={"cls": Nullable(Scalar("int64"))})
        found, _ = read(writer, tmp_path / source, folder=tmp_path)

        assert [(sample["txt"], sample["cls"]) for sample in found.values()] == [("1", None), ("2", 7)]
        with pytest.raises(SchemaError, match=r"field 'cls'.*declare it .*Nullable.*drop=\['cls'"):
            read(ImportWriter(kind=kind, features={"cls": Scalar("int64")}), tmp_path / source, folder=tmp_path)


def test_tars_may_be_named_by_braces(tmp_path):
    """As the guides of WebDataset name them."""
    for part in range(12):
        _tar(tmp_path / f"shard-{part:03d}.tar", {f"{part}.txt": b"%d" % part})

    found, _ = read("webdataset", str(tmp_path / "shard-{003..010}.tar"), folder=tmp_path)

    assert sorted(int(sample["txt"]) for sample in found.values()) == list(range(3, 11))
    with pytest.raises(SourceError, match=r"shard-012.tar does not exist"):
        Materializer("webdataset", str(tmp_path / "shard-{010..012}.tar"), tmp_path / "out")


def test_files_may_have_the_number_of_their_shard_last(tmp_path):
    """As Beam and TFDS call TFRecords; each has keys of its own."""
    for part in range(2):
        payload = encode_example({"x": np.array([part])}, {"x": "int64"})
        (tmp_path / f"train.tfrecord-{part:05d}-of-00002").write_bytes(b"".join(frame([payload], len(payload))))

    for arguments in (("tfrecord", tmp_path), (tmp_path,), ("tfrecord", tmp_path / "*")):
        found, _ = read(*arguments, folder=tmp_path)

        assert {key: int(sample["x"]) for key, sample in found.items()} == {
            "train-00000-of-00002-00000000": 0,
            "train-00001-of-00002-00000000": 1,
        }


def test_tfrecord_with_several_values_where_one_is_wanted_is_named(tmp_path, monkeypatch):
    """Behind the records that show the fields."""
    monkeypatch.setattr(tfrecord, "_MOST_PROFILED", 2)
    payloads = [encode_example({"n": np.arange(count)}, {"n": "int64"}) for count in (1, 1, 2)]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(b"".join(frame([one], len(one))) for one in payloads))

    with pytest.raises(
        CorruptDataError, match=r"a\.tfrecord: record 2 has 2 values of field 'n', .*; write one in eac"
    ):
        read(tmp_path / "a.tfrecord", folder=tmp_path)


def test_list_of_no_texts_in_a_tfrecord_is_a_list(tmp_path):
    """It is none of the fields that may be missing."""
    kinds = {"names": "bytes_list", "n": "int64"}
    payloads = [encode_example({"names": [b"a"] * count, "n": np.array([count])}, kinds) for count in range(3)]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(b"".join(frame([one], len(one))) for one in payloads))

    found, _ = read(tmp_path / "a.tfrecord", folder=tmp_path)

    assert [sample["names"] for sample in found.values()] == [[], ["a"], ["a", "a"]]


def test_files_of_rows_are_refused_with_what_reads_them(tmp_path):
    """CSV and JSON lines have a writer; the arrays of numpy can be passed; pickles are not opened."""
    for name, remedy in (
        ("a.csv", r"Materializer\('table', .*a.csv'"),
        ("a.jsonl", r"Materializer\('table', .*a.jsonl'"),
        ("a.ndjson.gz", r"Materializer\('table', .*a.ndjson.gz'"),
        ("a.npy", r"source=numpy.load\('.*a.npy', mmap_mode='r'\)"),
        ("a.npz", r"source=dict\(numpy.load\('.*a.npz'\)\)"),
        ("a.pkl", "never unpickled here; pass its rows"),
    ):
        (tmp_path / name).write_text("x")
        with pytest.raises(SourceError, match=remedy):
            Materializer(tmp_path / name, output=tmp_path / "out")


def test_equal_keys_of_several_tars_get_their_names(tmp_path):
    """As img2dataset and others number the samples of each shard."""
    for part in range(2):
        _tar(tmp_path / f"{part:05d}.tar", {"0.txt": b"a", "1.txt": b"b"})

    found, _ = read("webdataset", tmp_path, folder=tmp_path)

    assert list(found) == ["00000-0", "00000-1", "00001-0", "00001-1"]


# ---------------------------------------------------------------- files


def test_files_are_a_source_by_their_extensions(tmp_path):
    """Those that share a name are a sample; hidden ones are passed over; a pattern takes some of them."""
    for number in range(7):
        for name, data in _members(number, f"a/sample{number}").items():
            path = tmp_path / "raw" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (tmp_path / "raw" / ".hidden").write_bytes(b"")

    found, _ = read("files", tmp_path / "raw", folder=tmp_path)
    texts, features = read("files", str(tmp_path / "raw" / "a" / "*e[1-3].txt"), folder=tmp_path)

    assert list(found) == [f"a-sample{number}" for number in range(7)]
    _check_tar(found)
    assert features == {"txt": Text()} and list(texts) == ["sample1", "sample2", "sample3"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.txt", "b.md"],
            r"1 samples have no member 'txt', the first is 'b'; .*drop=\['txt'\], or give a patt",
        ),
        (["a.txt", "a.TXT"], r"a\.(txt|TXT) and .*a\.(txt|TXT) are the same field of one sample; rename one"),
        (["a.xyz"], r"the extension of the members 'xyz' is unknown.*features={'xyz': Bytes\(\)}"),
        (["README"], r"README has no extension, which would name its field and say what it holds; rename it"),
    ],
)
def test_files_that_no_field_fits_are_refused(tmp_path, names, message):
    """With what to write."""
    for name in names:
        (tmp_path / name).write_bytes(b"x")

    with pytest.raises(SourceError, match=message):
        Materializer("files", tmp_path, tmp_path / "out")


# ---------------------------------------------------------------- TFRecord


def _example(number):
    return {
        "image/encoded": encode_png(PIXELS[number]),
        "label": np.array([number % 2]),
        "ids": np.arange(number),
        "box": np.array([0, 0.5, 1, number], np.float32),
        "text": f"größer {number}".encode(),
        "raw": b"\xff\0%d" % number,
    }


KINDS = {"image/encoded": "bytes", "label": "int64", "ids": "int64", "box": "float32", "text": "bytes", "raw": "bytes"}
RECORD_FEATURES = {
    "image/encoded": Image((4, 5, 3)),
    "label": Scalar("int64"),
    "ids": Tensor((None,), "int64"),
    "box": Tensor((4,), "float32"),
    "text": Text(),
    "raw": Bytes(),
}


def _check_records(found, features):
    assert features == RECORD_FEATURES
    assert len(found) == 7
    for number, sample in enumerate(found.values()):
        wanted = _example(number)
        assert np.array_equal(sample["image/encoded"], PIXELS[number])
        assert (sample["label"], sample["text"], sample["raw"]) == (number % 2, f"größer {number}", wanted["raw"])
        assert np.array_equal(sample["ids"], wanted["ids"]) and np.array_equal(sample["box"], wanted["box"])


@pytest.mark.parametrize("maker", ["framing", "tensorflow"])
def test_foreign_tfrecords_are_a_source(tmp_path, maker):
    """Their fields are found by looking into the first records."""
    if maker == "framing":
        for part in range(2):
            payloads = [encode_example(_example(number), KINDS) for number in range(part * 4, min(part * 4 + 4, 7))]
            data = b"".join(b"".join(frame([payload], len(payload))) for payload in payloads)
            (tmp_path / f"part-{part}.tfrecord").write_bytes(data)
    else:
        tf = pytest.importorskip("tensorflow", reason="it writes the records")
        for part in range(2):
            with tf.io.TFRecordWriter(str(tmp_path / f"part-{part}.tfrecord")) as writer:
                for number in range(part * 4, min(part * 4 + 4, 7)):
                    values = {
                        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                        if isinstance(value, bytes)
                        else tf.train.Feature(float_list=tf.train.FloatList(value=value))
                        if value.dtype == np.float32
                        else tf.train.Feature(int64_list=tf.train.Int64List(value=value))
                        for name, value in _example(number).items()
                    }
                    example = tf.train.Example(features=tf.train.Features(feature=values))
                    writer.write(example.SerializeToString())

    found, features = read("tfrecord", tmp_path, folder=tmp_path)

    assert list(found)[:2] == ["part-0-00000000", "part-0-00000001"]
    _check_records(found, {name: features[name] for name in RECORD_FEATURES})


def test_tfrecord_that_is_cut_off_or_damaged_is_reported(tmp_path):
    """By record: the lengths are seen at once, the checksums when it is read."""
    payloads = [encode_example({"x": np.array([number])}, {"x": "int64"}) for number in range(3)]
    data = b"".join(b"".join(frame([payload], len(payload))) for payload in payloads)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data[:-5])
    with pytest.raises(SourceError, match=r"was cut off: record 2 would end at byte"):
        Materializer("tfrecord", path, tmp_path / "out")
    path.write_bytes(data)
    job = Prepared("tfrecord", path, tmp_path / "out", workers=WorkerOptions(num_workers=1))
    damaged = bytearray(data)
    damaged[-7] ^= 1
    path.write_bytes(damaged)

    with pytest.raises(
        SampleError,
        match=r"record 2 is damaged: the checksum of the data is .*, but 0x.* is stored; copy or write the file",
    ):
        job.run(progress=False)
