"""The files of Megatron-LM, written from any dataset: read here by the definition of their format alone."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from datamat import (
    CorruptDataError,
    Features,
    Materializer,
    OptionError,
    OutputError,
    SampleError,
    Text,
    Tokens,
    concat,
    load,
    mix,
)
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter

DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def documents_of(prefix):
    """Return the tokens of each document, as Megatron-LM's `IndexedDataset(prefix)` has them."""
    with open(f"{prefix}.idx", "rb") as file:
        magic, version, code, num_sequences, num_bounds = struct.unpack("<9sQBQQ", file.read(34))
        assert (magic, version) == (b"MMIDIDX\0\0", 1)
        lengths = np.frombuffer(file.read(4 * num_sequences), "<i4")
        starts = np.frombuffer(file.read(8 * num_sequences), "<i8")
        bounds = np.frombuffer(file.read(8 * num_bounds), "<i8")
        assert not file.read()
    assert bounds.tolist() == [*range(num_sequences + 1)]
    with open(f"{prefix}.bin", "rb") as file:
        data = file.read()
    # Several sets are merged by their lengths: each document begins where the one before it ends.
    assert sum(lengths.tolist()) * np.dtype(DTYPES[code]).itemsize == len(data)
    return [np.frombuffer(data, DTYPES[code], size, start) for start, size in zip(starts, lengths, strict=True)]


def tokens_of(data):
    return [sample["tokens"].tolist() for sample in data]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """9,000 texts, of 0 to 6 tokens each, in two splits and several parts."""
    folder = tmp_path_factory.mktemp("rows") / "out"
    samples = [{"tokens": [*range(n, n + n % 7)], "text": f"text {n}"} for n in range(9000)]
    features = {"tokens": Tokens(vocab_size=10_000), "text": Text()}
    job = Materializer(ImportWriter(features=features), samples, folder, splits={"train": 0.95, "val": 0.05})
    job.run(executor=InlineExecutor(), progress=False)
    return folder


@pytest.mark.parametrize("split", ["train", "val", None])
def test_documents_are_the_records(rows, tmp_path, split):
    """In their order, and of the dtype in which they are stored."""
    data = load(rows, split)

    paths = data.to_megatron(tmp_path / "gpt" / "text_document", num_workers=1)

    found = documents_of(tmp_path / "gpt" / "text_document")
    assert [tokens.tolist() for tokens in found] == tokens_of(data)
    assert {tokens.dtype.name for tokens in found} == {"uint16"}
    assert sorted(os.listdir(tmp_path / "gpt")) == sorted(path.name for path in paths)


def test_bytes_do_not_depend_on_workers(rows, tmp_path):
    made = [load(rows).to_megatron(tmp_path / f"{count}", num_workers=count) for count in (1, 3)]

    assert [path.read_bytes() for path in made[0]] == [path.read_bytes() for path in made[1]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_what_is_written_is_read_back(tmp_path, dtype):
    samples = [{"tokens": np.arange(n % 5, dtype=dtype)} for n in range(40)]
    Materializer(source=samples, output=tmp_path / "out").run(executor=InlineExecutor(), progress=False)
    load(tmp_path / "out").to_megatron(tmp_path / "set", num_workers=1)

    Materializer("megatron", tmp_path / "set", tmp_path / "back").run(executor=InlineExecutor(), progress=False)

    back = sorted(load(tmp_path / "back"), key=lambda sample: sample["key"])
    assert tokens_of(back) == tokens_of(load(tmp_path / "out"))
    assert load(tmp_path / "back").features == Features({"tokens": Tokens(dtype)})


VIEWS = {
    "filter": lambda data: data.filter(lambda sample: len(sample["tokens"]) > 3),
    "select": lambda data: data.select([5, 3, 5]),
    "map": lambda data: data.map(lambda sample: {"tokens": sample["tokens"].astype("int32") * 2}),
    "concat": lambda data: concat([data.take(20), data.take(30)]),
    "mix": lambda data: mix({data: 0.7, data.take(50): 0.3}, seed=1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_written_as_they_are_read(rows, tmp_path, view):
    data = view(load(rows, "val"))

    data.to_megatron(tmp_path / "set", num_workers=1)

    assert [tokens.tolist() for tokens in documents_of(tmp_path / "set")] == tokens_of(data)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda data: data.take(0), "there are no records"),
        (lambda data: data.columns("text"), "no field is the tokens"),
        (lambda data: data.map(lambda one: {"a": one["tokens"], "b": one["tokens"]}), "the fields a, b may be"),
        (lambda data: data.map(lambda one: {"a": one["tokens"].astype("uint32")}), "'a' is uint32, .*; want uint8, "),
    ],
)
def test_datasets_without_tokens_are_refused(rows, tmp_path, view, message):
    with pytest.raises(OptionError, match=message):
        view(load(rows)).to_megatron(tmp_path / "set")
    assert not os.listdir(tmp_path)


def test_record_of_another_dtype_is_named(rows, tmp_path):
    """No number may become another one."""
    data = load(rows)
    other = data.keys()[7000]
    mapped = data.map(lambda one: {"tokens": one["tokens"].astype("int64" if one["key"] == other else "int16")})

    with pytest.raises(SampleError, match=r"is int64 \(\d,\), and that of the first record is int16") as caught:
        mapped.to_megatron(tmp_path / "set")
    assert caught.value.key == other
    assert not [name for name in os.listdir(tmp_path) if name.startswith("set")]


def test_damaged_record_is_named_or_left_out_and_counted(tmp_path, caplog):
    """As the dataset was loaded."""
    samples = [{"tokens": [number] * 20} for number in range(30)]
    Materializer(source=samples, output=tmp_path / "out").run(executor=InlineExecutor(), progress=False)
    (shard,) = (tmp_path / "out").glob("*.tfrecord")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    with pytest.raises(CorruptDataError, match=shard.name):
        load(tmp_path / "out").to_megatron(tmp_path / "set", num_workers=1)
    load(tmp_path / "out", errors="skip").to_megatron(tmp_path / "set", num_workers=1)

    assert len(documents_of(tmp_path / "set")) == 29
    assert "set.bin: left out 1 record, for damage" in caplog.text


@pytest.mark.parametrize("name", ["set.bin", "set.idx"])
def test_file_that_is_there_stays(rows, tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")

    with pytest.raises(OutputError, match=f"{name} already exists"):
        load(rows).to_megatron(tmp_path / "set")
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("prefix", ["", "folder/", "s3://bucket/set"])
def test_prefix_of_no_file_is_refused(rows, prefix):
    with pytest.raises(OptionError, match="to_megatron"):
        load(rows).to_megatron(prefix)


def test_format_of_shards_is_refused_with_what_to_write(tmp_path):
    """The files have no room for keys."""
    with pytest.raises(OptionError, match=r"no format 'megatron'.*load\(OUTPUT, SPLIT\)\.to_megatron\(PREFIX\)"):
        Materializer(source=[{"tokens": [1]}], output=tmp_path / "out", format="megatron")


def test_killed_writer_leaves_nothing_in_the_way(rows, tmp_path):
    """The next one starts anew."""
    program = textwrap.dedent(f"""
        from datamat import load

        def wait(sample):
            if sample["text"] == "text 8000":
                print("there", flush=True)
                import time; time.sleep(100)
            return {{"tokens": sample["tokens"]}}

        load({str(rows)!r}).map(wait).to_megatron({str(tmp_path / "set")!r}, num_workers=1)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline() == b"there\n"
        killed.send_signal(signal.SIGKILL)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("set")]

    load(rows).to_megatron(tmp_path / "set", num_workers=1)

    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("set")) == ["set.bin", "set.idx"]
    assert len(documents_of(tmp_path / "set")) == 9000
