"""Random access: the right record under every position and key, from threads and processes, or an error."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import json
import multiprocessing
import os
import pathlib
import pickle
import shutil

import numpy as np
import pytest
import small_pairs
from every_feature import Everything
from hypothesis import given
from hypothesis import strategies as st
from open_files import open_files

from datamat import CorruptDataError, OptionError, OutputError, Scalar, load, materialize
from datamat.formats import Offsets, get_format
from datamat.readers.records import LineMarks, MappedOffsets
from datamat.testing import InlineExecutor


def same(one, other):
    """Return True if two samples are equal, array for array."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name]) and np.asarray(one[name]).dtype == np.asarray(other[name]).dtype
        for name in one
    )


def flip(path, place):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def offsets_of(data):
    """Return the file with the offsets of the first shard."""
    return pathlib.Path(data.files[0]).with_suffix(".idx")


def test_every_feature_reads_back_as_it_was_written(everything):
    """It keeps its dtype and shape, bit for bit except for JPEG."""
    writer, data = Everything(), load(everything)

    for row in writer.index(None):
        found, wanted = data[row.key], writer.read(row)
        assert found.keys() == {*wanted, "key"} == set(data.features)
        assert found.pop("key") == row.key
        assert found.pop("jpeg").shape == wanted.pop("jpeg").shape
        assert np.array_equal(found.pop("grey"), wanted.pop("grey")[..., None])
        assert found.pop("grey_jpeg").shape == (8, 6, 3)
        wanted.pop("grey_jpeg")
        wanted["label"] = np.int64(wanted["label"])
        assert same(found, wanted)


# ---------------------------------------------------------------- positions, keys, splits


def test_positions_keys_and_order_agree(pairs, formats):
    """Position n is the n-th sample of an iteration, of keys(), and of a plain pass over the files; in any format."""
    data = load(pairs)
    in_order = list(data)
    plain = [record["key"][0].decode() for file in data.files for record in get_format("tfrecord").read(file)]

    assert [sample["key"] for sample in in_order] == data.keys() == plain
    assert len(data) == 64 == len(set(plain))
    assert all(same(data[place], sample) for place, sample in enumerate(in_order))
    assert all(same(data[key], sample) for key, sample in zip(plain, in_order, strict=True))
    assert [sample["key"] for sample in reversed(data)] == plain[::-1]
    for name in ("tfrecord.gz", "parquet", "webdataset"):
        other = load(formats, format=name)
        assert other.keys() == plain
        assert all(same(other[place], in_order[place]) for place in (63, 0, -20, 31))


def test_positions_count_from_the_end_too(pairs):
    """As in a list; any integer type is accepted, and nothing else: the error says what gives several."""
    data = load(pairs)

    assert same(data[-1], data[63])
    assert same(data[-64], data[0])
    assert same(data[np.int64(5)], data[5])
    assert all(map(same, data.__getitems__([5, -1, np.int64(7), 5]), [data[5], data[63], data[7], data[5]]))
    for position in (64, -65, 10**30):
        with pytest.raises(IndexError, match=rf"position {position} in a dataset of 64 records"):
            data[position]
    with pytest.raises(IndexError, match="position 64"):
        data.__getitems__([1, 64])
    for item in (2.0, None, b"val000", (1, 2), [0]):
        with pytest.raises(TypeError, match=r"select\(\[2, 5\]\) or \[2:5\]"):
            data[item]


def test_slice_is_the_dataset_of_these_records(pairs):
    """As of a list; it reads like any view."""
    data = load(pairs)
    for item in (slice(10), slice(-3, None), slice(None, None, -7), slice(50, 200, 3), slice(9, 2)):
        found = data[item]

        assert found.keys() == data.keys()[item]
        assert [sample["key"] for sample in found.to_numpy()] == data.keys()[item]
        assert found[1:].keys() == data.keys()[item][1:]


def test_methods_of_other_libraries_are_said_in_words_of_this_one(pairs):
    """Code that asks whether there are such methods is told the truth, and copies are made as ever."""
    data = load(pairs, "train")

    for name, message in {"shuffle": r"to_torch\(32, shuffle=True", "num_rows": r"len\(data\)"}.items():
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; .*{message}"):
            getattr(data, name)
        assert not hasattr(data, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'colums'$"):
        data.colums  # noqa: B018
    with pytest.raises(TypeError, match=r"argument 'batchsize'; did you mean 'batch_size'\?"):
        data.to_numpy(batchsize=2)
    for again in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert again.keys() == data.keys()


def test_splits_are_parts_of_the_whole(pairs):
    """They follow one another; the error for an unknown split lists those that exist."""
    train, val, everything = load(pairs, "train"), load(pairs, "val"), load(str(pairs))

    assert (len(train), len(val), len(everything)) == (60, 4, 64)
    assert train.keys() + val.keys() == everything.keys()
    assert train.files + val.files == everything.files == sorted(map(str, pairs.glob("*.tfrecord")))
    assert same(val[1], everything[61])
    assert same(val[1], everything[val.keys()[1]])
    assert "val000" not in train
    with pytest.raises(OptionError, match="has no split 'test'; it has train, val"):
        load(pairs, "test")


def test_features_and_repr_describe_the_dataset(pairs):
    """They show split, number of records and schema."""
    data = load(pairs, "train")

    assert data.features == small_pairs.Pairs.features
    assert "split='train', 60 records, Features(key" in repr(data)


def test_samples_are_the_readers_own(pairs):
    """Changing one changes no other."""
    data = load(pairs)
    before = data[3]["image"].copy()

    data[3]["image"][:] = 0

    assert np.array_equal(data[3]["image"], before)


def test_order_of_features_does_not_matter_to_parquet(tmp_path):
    """A manifest sorts them, the file keeps them as declared."""
    features = {"zebra": Scalar("int64"), "ant": Scalar("float32")}
    options = {"features": features, "format": "parquet", "executor": InlineExecutor(), "progress": False}
    materialize(lambda number: {"zebra": 7, "ant": 0.5}, range(2), tmp_path / "out", **options)

    assert [(int(sample["zebra"]), float(sample["ant"])) for sample in load(tmp_path / "out")] == [(7, 0.5)] * 2


# ---------------------------------------------------------------- threads, processes, states


def test_eight_threads_read_at_once(copied):
    """Each shard is opened once, although no thread has opened it before."""
    expected = list(load(copied))
    for _ in range(2):
        data = load(copied)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(data.__getitem__, [*range(64), *reversed(range(64))], chunksize=4))
        assert all(map(same, found, [*expected, *reversed(expected)]))
        assert num_open(copied) == 8
        del data


@pytest.mark.long
def test_files_are_closed_with_the_dataset(copied):
    """Shards and maps of offsets are open from the first read until the last reference is gone."""
    data = load(copied)
    assert num_open(copied) == 0
    list(data)
    assert num_open(copied) == 8

    other = pickle.loads(pickle.dumps(data))
    assert num_open(copied) == 8
    other[0]
    assert num_open(copied) == 10
    del other
    assert num_open(copied) == 8
    del data
    assert num_open(copied) == 0


def num_open(folder):
    gc.collect()
    return len(open_files(folder))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_other_processes_read_the_same(pairs, method):
    """They read from a pickled copy, and after a fork from one whose files are open."""
    data = load(pairs)
    expected = [data[place] for place in (0, 40, -1)]
    data.keys()
    context = multiprocessing.get_context(method)

    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        sent = list(pool.map(data.__getitem__, [0, 40, "val000", -1]))
    if method == "fork":
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sender.send([data[place] for place in (0, 40, -1)]))
        child.start()
        inherited = receiver.recv()
        child.join()
        assert all(map(same, inherited, expected))

    assert all(map(same, [sent[0], sent[1], sent[3]], expected))
    assert sent[2]["key"] == "val000"
    assert all(map(same, [data[place] for place in (0, 40, -1)], expected))


def test_iteration_resumes_from_its_state(pairs):
    """It resumes with the sample after the last one; at the end of an epoch, from the start."""
    data, other = load(pairs), load(pairs)
    walk = iter(data)
    begun = [next(walk)["key"] for _ in range(10)]

    other.load_state_dict(json.loads(json.dumps(data.state_dict())))
    rest = [sample["key"] for sample in other]

    assert begun + rest == data.keys()
    assert [sample["key"] for sample in other] == data.keys()
    data.load_state_dict(other.state_dict())
    assert [sample["key"] for sample in data] == data.keys()


def test_state_of_other_records_is_refused(pairs):
    """The checksums of the shards differ."""
    state = load(pairs, "val").state_dict()

    for wrong in (state, {}, {**load(pairs).state_dict(), "position": "3"}):
        with pytest.raises(OptionError, match="the state belongs to other records"):
            load(pairs).load_state_dict(wrong)


# ---------------------------------------------------------------- damage


def test_unfinished_directory_is_refused(tmp_path):
    """Before there is a manifest, there is nothing to read."""
    with pytest.raises(OutputError, match=r"holds no manifest.json"):
        load(tmp_path)
    with pytest.raises(OutputError, match=r"nowhere holds no manifest.json; correct the path"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("region", ["length", "length CRC", "payload", "payload CRC"])
def test_damaged_record_is_named_and_its_neighbours_are_read(copied, region):
    """The error gives file, record and byte, wherever the flipped bit is."""
    data = load(copied, "train")
    offset, size = (int(n) for n in offsets_of(data).read_text().splitlines()[7].split())
    place = {"length": 3, "length CRC": 9, "payload": size // 2, "payload CRC": size - 2}[region]
    flip(pathlib.Path(data.files[0]), offset + place)

    with pytest.raises(CorruptDataError, match=rf"{data.files[0]}: record 7 at byte {offset} is damaged: "):
        data[7]
    with pytest.raises(CorruptDataError, match="record 7 at byte"):
        data[data.keys()[7]]
    assert [data[place]["key"] for place in (6, 8)] == [data.keys()[6], data.keys()[8]]


def test_cut_and_missing_shards_are_named(copied):
    """The records before the cut, and those of other shards, are read."""
    data = load(copied, "train")
    path = pathlib.Path(data.files[0])
    path.write_bytes(path.read_bytes()[:-10])
    os.unlink(data.files[1])
    last = data.manifest.splits["train"][0].num_records - 1

    with pytest.raises(CorruptDataError, match=rf"{path}: record {last} at byte .* is damaged"):
        data[last]
    with pytest.raises(CorruptDataError, match=f"{data.files[1]}: No such file or directory; run the job again"):
        data[-1]
    assert data[0]["key"] == data.keys()[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory; run the job again"),
        ("0 20\n", "holds 1 offsets, the manifest says {count} records; run the job again"),
        ("0 2x\n", "line 1 of the record index is '0 2x'"),
        ("\x80", "can't decode byte"),
        ("0 99999999999999999\n" * 99, "record 0 would lie outside of {file}, which has {size} bytes"),
        ("9999999999999999999 20\n" * 99, "record 0 would lie outside of {file}, which has {size} bytes"),
        ("0 18446744073709551616\n", "line 1 of the record index"),
    ],
)
def test_damaged_offsets_are_named(copied, text, message):
    """The error comes before anything is read at the place that they give."""
    data = load(copied, "train")
    info = data.manifest.splits["train"][0]
    path = copied / info.index_file
    path.unlink()
    if text is not None:
        path.write_bytes("".join(text.splitlines(keepends=True)[: info.num_records]).encode("latin-1"))

    wanted = message.format(count=info.num_records, file=info.file, size=info.num_bytes)
    with pytest.raises(CorruptDataError, match=rf"{path}:? .*{wanted}"):
        data[0]
    assert data[-1]["key"] == data.keys()[-1]


def test_offsets_that_lead_astray_are_noticed(copied):
    """They point into the file, but not to the start of a record."""
    data = load(copied, "train")
    path = offsets_of(data)
    lines = path.read_text().splitlines(keepends=True)
    offset, size = map(int, lines[2].split())
    path.write_text("".join([*lines[:2], f"{offset + 1} {size}\n", *lines[3:]]))

    with pytest.raises(CorruptDataError, match=rf"{path} does not hold the offsets .*; run repair\(\)"):
        data[2]


@pytest.mark.parametrize("change", ["emptied", "longer", "other text"])
def test_offsets_that_change_while_they_are_mapped_are_an_error(copied, change):
    """Pages behind the end of the file would end the process with SIGBUS."""
    data = load(copied, "train")
    last = data.manifest.splits["train"][0].num_records - 1
    assert data[0]["key"] == data.keys()[0]
    content = offsets_of(data).read_text()
    changed = {"emptied": "", "longer": f"{content}14000 7\n", "other text": "-" * len(content)}[change]
    with offsets_of(data).open("r+") as file:
        file.truncate(file.write(changed))

    with pytest.raises(CorruptDataError, match=r"\.idx was changed while it was open"):
        data[last]


@given(sizes=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=70), has_skip=st.booleans())
def test_mapped_offsets_are_those_of_the_table(tmp_path_factory, sizes, has_skip):
    """This holds for every line, however wide the lines before it are."""
    path = tmp_path_factory.mktemp("offsets") / "shard.idx"
    size = np.array(sizes, np.uint64)
    offsets = Offsets(np.cumsum(size) - size, size, size[::-1].copy() if has_skip else None)
    path.write_text(offsets.to_text())
    with open(path, "rb") as file:
        found = MappedOffsets(str(path), file, LineMarks.of(path.read_bytes(), None))

    assert [found.span(number) for number in range(len(sizes))] == [offsets.span(n) for n in range(len(sizes))]


def test_rows_of_the_index_are_not_read_for_positions(copied):
    """Only look-ups by key need them."""
    shutil.rmtree(copied / "_index")

    assert load(copied)[5]["key"] == list(load(copied))[5]["key"]
