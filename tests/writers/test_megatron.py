"""Token sets of Megatron-LM: whatever names them, whole documents come out, and what does not fit is named."""

import numpy as np
import pytest
from foreign_files import write_megatron

from datamat import Materializer, SourceError, Tensor, Tokens, load
from datamat.testing import InlineExecutor
from datamat.writers.sources import open_source

DOCUMENTS = [[[*range(number, number + number % 4)]] for number in range(20)]
SENTENCES = [[[1, 2], [3]], [], [[4]], [[], [5, 6]]]


def stored(output, *args, source=None):
    """Run a job, and return the samples in the order of their keys."""
    job = Materializer(*args, output=output) if source is None else Materializer(*args, source=source, output=output)
    job.run(executor=InlineExecutor(), progress=False)
    return sorted(load(output), key=lambda sample: sample["key"])


def tokens_of(samples):
    return [sample["tokens"].tolist() for sample in samples]


@pytest.mark.parametrize("name", ["gpt_text_document", "gpt_text_document.bin", "gpt_text_document.idx", "", "*.bin"])
@pytest.mark.parametrize("is_named", [True, False])
def test_prefix_either_file_or_the_folder_names_the_set(tmp_path, name, is_named):
    (tmp_path / "set").mkdir()
    write_megatron(tmp_path / "set" / "gpt_text_document", DOCUMENTS)

    found = stored(tmp_path / "out", *(["megatron"] if is_named else []), source=tmp_path / "set" / name)

    assert tokens_of(found) == [sequence for (sequence,) in DOCUMENTS]
    assert load(tmp_path / "out").features["tokens"] == Tokens("uint16")


def test_prefix_alone_is_a_source(tmp_path):
    """As the path of a folder is, in the place of a writer."""
    write_megatron(tmp_path / "gpt", DOCUMENTS)

    assert len(stored(tmp_path / "out", str(tmp_path / "gpt"))) == 20


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"])
def test_every_dtype_is_stored_as_it_is(tmp_path, dtype):
    """Floats are no tokens, but an array of any length."""
    write_megatron(tmp_path / "a", DOCUMENTS, dtype)

    found = stored(tmp_path / "out", "megatron", tmp_path / "a")

    assert tokens_of(found) == [sequence for (sequence,) in DOCUMENTS]
    is_float = dtype.startswith("float")
    assert load(tmp_path / "out").features["tokens"] == (Tensor((None,), dtype) if is_float else Tokens(dtype))


def test_documents_of_several_sequences_keep_their_lengths(tmp_path):
    """As those of BERT, which are split into sentences; also beside a file that has none such."""
    (tmp_path / "set").mkdir()
    write_megatron(tmp_path / "set" / "train_a", SENTENCES, "int32")
    write_megatron(tmp_path / "set" / "val_b", DOCUMENTS, "int32")

    found = stored(tmp_path / "out", "megatron", tmp_path / "set")

    assert tokens_of(found[:4]) == [[1, 2, 3], [], [4], [5, 6]]
    assert [sample["lengths"].tolist() for sample in found[:5]] == [[2, 1], [], [1], [0, 2], [0]]
    assert (len(load(tmp_path / "out", "train")), len(load(tmp_path / "out", "val"))) == (4, 20)


def test_index_alone_decides_where_documents_begin(tmp_path):
    """The same tokens, divided elsewhere, are another set."""
    for documents in ([[1, 2], [3]], [[1], [2, 3]]):
        write_megatron(tmp_path / "a", [[document] for document in documents])

        assert tokens_of(stored(tmp_path / "out", "megatron", tmp_path / "a")) == documents


def test_sequences_are_documents_where_none_was_ended(tmp_path):
    """Megatron-LM trains GPT on such a set all the same."""
    write_megatron(tmp_path / "a", DOCUMENTS)
    index = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(index[:26] + (1).to_bytes(8, "little") + index[34 : 34 + 12 * 20] + bytes(8))

    assert tokens_of(stored(tmp_path / "out", "megatron", tmp_path / "a")) == [sequence for (sequence,) in DOCUMENTS]


def written_over(name, place, new):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:place] + new + data[place + len(new) :])

    return damage


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def grown(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + bytes(size))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (written_over("a.idx", 0, b"TNTIDX\0\0"), r"a\.idx begins with b'TNTIDX.*want b'MMIDIDX"),
        (cut("a.idx", 20), r"a\.idx begins with b'MMIDIDX.*34 bytes or more"),
        (written_over("a.idx", 9, b"\2"), r"a\.idx has version 2 and dtype code 8; want version 1"),
        (written_over("a.idx", 17, b"\t"), r"dtype code 9; want version 1 and a code of 1 to 8"),
        (written_over("a.idx", 17, b"\4"), r"sequence 2 has 2 tokens from byte 2 on; want 0 or more, from byte 4 on"),
        (written_over("a.idx", 18, b"\xff" * 8), r"a\.idx has 442 bytes; want [\d,]{20,}"),
        (cut("a.idx", -8), r"a\.idx has 434 bytes; want 442 for 20 sequences and 21 bounds of documents"),
        (grown("a.idx", 20), r"datasets with modes are not read here"),
        (written_over("a.idx", 34, b"\xff" * 4), r"sequence 0 has -1 tokens from byte 0 on"),
        (written_over("a.idx", 34 + 12 * 20 + 8, b"\xff" * 8), r"a\.idx: its documents begin at sequence 0"),
        (cut("a.bin", -2), r"a\.bin has 58 bytes; want the 60 of the tokens of uint16 that a\.idx divides"),
        (grown("a.bin", 2), r"a\.bin has 62 bytes; want the 60"),
        (lambda folder: (folder / "a.bin").unlink(), r"a\.idx has no a\.bin next to it"),
        (lambda folder: (folder / "a.idx").unlink(), r"a\.bin has no a\.idx next to it"),
    ],
)
def test_file_that_does_not_fit_is_refused(tmp_path, damage, message):
    """Before anything is written."""
    write_megatron(tmp_path / "a", DOCUMENTS)
    damage(tmp_path)

    with pytest.raises(SourceError, match=message):
        Materializer("megatron", tmp_path, tmp_path / "out")


def test_sets_of_two_dtypes_are_refused(tmp_path):
    write_megatron(tmp_path / "a", DOCUMENTS, "int32")
    write_megatron(tmp_path / "b", DOCUMENTS)

    with pytest.raises(SourceError, match=r"b\.bin has tokens of uint16, .*a\.bin of int32"):
        Materializer("megatron", tmp_path, tmp_path / "out")


def test_offsets_of_other_formats_are_not_taken_for_one(tmp_path):
    """TFRecords have files of the same ending beside them, and weights of models end in .bin, too."""
    (tmp_path / "set").mkdir()
    stored(tmp_path / "records", source=[{"n": number} for number in range(9)])
    for path in (tmp_path / "records").glob("data-*"):
        path.rename(tmp_path / "set" / path.name)
    (tmp_path / "set" / "weights.bin").write_bytes(b"x")

    assert open_source(tmp_path / "set").field_names() == ["key", "n"]


@pytest.mark.parametrize("kind", ["megatron", None])
def test_path_of_nothing_is_refused(tmp_path, kind):
    with pytest.raises(SourceError, match="gpt does not exist"):
        Materializer(kind, tmp_path / "gpt", tmp_path / "out")


def test_blocks_are_the_records_one_by_one(tmp_path):
    """In any order, of several files."""
    write_megatron(tmp_path / "a", SENTENCES)
    write_megatron(tmp_path / "b", DOCUMENTS)
    source = open_source(tmp_path, kind="megatron")
    order = np.random.default_rng(0).permutation(len(source))

    block = source.block(order)

    for name, (values, lengths) in block.items():
        assert [one.tolist() for one in np.split(values, np.cumsum(lengths)[:-1])] == [
            source[int(number)][name].tolist() for number in order
        ]
