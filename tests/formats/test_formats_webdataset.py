"""Tar shards: names that all readers group alike, readable JSON, and refusals."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat.errors import CorruptDataError, SchemaError
from datamat.features import BBoxes, Features, Image, Scalar, Tensor
from datamat.formats import Offsets, get_format
from datamat.formats.webdataset import BLOCK_BYTES, END_OF_ARCHIVE, member
from datamat.testing.cases import IMAGES, MIXED, ODD_KEYS, mixed

WEBDATASETS_RULE = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")


def archive_of(features, samples):
    """Return the bytes of a shard."""
    shard_format, file = get_format("webdataset").with_features(features), io.BytesIO()
    writer = shard_format.writer(file, features.columns)
    for sample in samples:
        writer.append(features.encode(sample))
    writer.finish()
    return file.getvalue() + END_OF_ARCHIVE


def names_of(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getnames()


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_webdataset_groups_members_by_key(keys):
    """By webdataset's own rule each sample is one group, and no name leads out of the folder it is unpacked to."""
    features = Features({"n": Scalar("int64"), "array": Tensor((2,))})
    samples = [{"key": key, "n": 1, "array": np.zeros(2, np.float32)} for key in sorted(keys)]

    found = [WEBDATASETS_RULE.match(name).groups() for name in names_of(archive_of(features, samples))]

    assert [suffix for _, suffix in found] == ["array.npy", "json"] * len(keys)
    assert len({stem for stem, _ in found}) == len(keys)
    for stem, _ in found:
        assert not {"", ".", ".."} & set(stem.split("/"))
        assert not re.match(r"__[^/]*__($|/)", stem)


def test_keys_are_escaped_readably():
    """Characters that need no escape stay as they are."""
    features = Features({"n": Scalar("int64")})

    names = names_of(archive_of(features, [{"key": key, "n": 1} for key in ODD_KEYS[:10]]))

    assert names == [
        *("plain.json", "größe/日本語.json", "a%2Eb%2Ec.json", "%252E.json", "%2E%2E/%2E%2E/etc/passwd.json"),
        *("%2Fabs.json", "end%2F.json", "two/%2Fslashes.json", "%5F_meta__/x.json", "name#0.json"),
    ]


def test_members_say_what_they_hold():
    """Images have the extension of their encoding, and names of fields cannot break the rule of dots and slashes."""
    features = Features({"a/b.c": Image((8, 6, 3)), "x/y": Tensor((1,)), "boxes": BBoxes(), "f": Scalar("float64")})
    boxes = np.array([[0, 0.1, 0.5, 1]], np.float32)
    sample = {"key": "k", "a/b.c": IMAGES[0], "x/y": np.ones(1, np.float32), "boxes": boxes, "f": 0.1}

    data = archive_of(features, [sample])

    assert names_of(data) == ["k.a%2Fb%2Ec.png", "k.x%2Fy.npy", "k.json"]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.extractfile("k.a%2Fb%2Ec.png").read() == IMAGES[0]
        assert json.load(archive.extractfile("k.json")) == {"boxes": boxes.tolist(), "f": 0.1, "key": "k"}


def test_archive_never_changes():
    """The bytes of a shard are pinned: they hold no time, no owner and no order of the host."""
    numbers = Features({"n": Scalar("int64"), "points": Tensor((None, 2)), "boxes": BBoxes()})
    samples = [
        {"key": f"ß{n}", "n": n, "points": np.full((n, 2), 0.5, np.float32), "boxes": np.zeros((n, 4), np.float32)}
        for n in range(5)
    ]

    digest = hashlib.sha256(archive_of(numbers, samples)).hexdigest()

    assert digest == "76a3fd521a979b8f3ce46971e88c9a45d95214d209c64c89614d6545ee15f425"


def test_fields_that_differ_by_case_are_refused():
    """WebDataset lowers the case of extensions, and would lose one of the two fields."""
    with pytest.raises(SchemaError, match=r"fields 'A' and 'a' are the same to webdataset.*rename one"):
        get_format("webdataset").with_features(Features({"A": Scalar(), "a": Scalar()}))


def test_empty_key_is_refused():
    """A member needs a name."""
    with pytest.raises(SchemaError, match="the key is empty"):
        archive_of(MIXED, [{**mixed(0), "key": ""}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1024], "record 2 at byte .* ends inside a tar header"),
        (lambda data: data[:-512], "0 bytes follow the first zero block"),
        (lambda data: data[:700], r"the data ends inside the member 'sample 0.*', after 188 of 512 bytes"),
        (lambda data: data + b"more", "516 bytes follow the first zero block"),
        (lambda data: b"".join(member("k.json", b"{}")) + data, "record 0 .* members json does not match the features"),
        (lambda data: b"".join(member("k.json", b"{")) + data, "record 0 .* members json does not match the features"),
        (
            lambda data: b"".join(member("k.image.png", b"x")) + data,
            "the sample 'k' has no .json before '.*' of another",
        ),
        (lambda data: data[:-1024] + b"".join(member("k.image.png", b"x")) + bytes(1024), "ends inside the sample 'k'"),
    ],
)
def test_damage_is_named(change, message):
    """Anything that datamat does not write is refused with record and position."""
    shard_format = get_format("webdataset").with_features(MIXED)

    with pytest.raises(CorruptDataError, match=message):
        list(shard_format.read_file(io.BytesIO(change(archive_of(MIXED, [mixed(0), mixed(1)]))), path="s"))


def test_sizes_that_members_claim_take_no_memory():
    """An array file and a header that claim a terabyte are damage, not memory."""
    features = Features({"x": Tensor((None,))})
    shard_format = get_format("webdataset").with_features(features)
    npy = b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % 2**40
    claims = bytearray(b"".join(member("k.json", b"")))
    claims[124:136], claims[148:156] = b"77777777777\0", b" " * 8
    claims[148:156] = b"%06o\0 " % sum(claims[:BLOCK_BYTES])
    arrays = b"".join([*member("k.x.npy", npy.ljust(127) + b"\n"), *member("k.json", b'{"key":"k"}')])

    for data, message in ((arrays, "not match the features"), (bytes(claims), "ends inside the member 'k.json'")):
        with pytest.raises(CorruptDataError, match=message):
            list(shard_format.read_file(io.BytesIO(data), path="s"))


def test_wrong_offsets_are_noticed(tmp_path):
    """A range that is not one sample is refused."""
    shard_format = get_format("webdataset").with_features(MIXED)
    data = archive_of(MIXED, [mixed(0), mixed(1)])[:-1024]
    path, offsets = tmp_path / "two.tar", Offsets(np.zeros(1, np.uint64), np.array([len(data)], np.uint64))
    path.write_bytes(data)

    with (
        contextlib.closing(shard_format.reader(path, offsets)) as reader,
        pytest.raises(CorruptDataError, match=r"the sample has [\d,]+ bytes, but the index says"),
    ):
        reader.read(0)
