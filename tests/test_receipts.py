"""Parts: a file for each format, and a receipt that says what is in them."""

from __future__ import annotations

import numpy as np
import pytest
from growth import FEATURES, FORMATS, assembly_of, formats_of, make_spec, write_part

from datamat.formats import Offsets
from datamat.receipts import PartFile, PartWriter, Receipt, part_folder
from datamat.storage import digest_file


@pytest.fixture
def place(tmp_path):
    """The output folder, with its `.datamat`."""
    (tmp_path / "out" / ".datamat" / "shards").mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture(params=FORMATS, ids="+".join)
def names(request):
    """The formats that the shard is written in."""
    return request.param


@pytest.fixture
def formats(names):
    return formats_of(names)


def test_part_and_receipt_are_on_the_disk(place, formats):
    """The receipt is what was returned, and says what the files hold."""
    receipt = write_part(place, formats, make_spec(), 2)

    folder = part_folder(place / ".datamat", make_spec().name)
    endings = [f"{made.extension}.{what}" for made in formats for what in ("idx", "part")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"00002.{end}" for end in ["json", *endings])
    assert (receipt.number, receipt.start, receipt.stop, receipt.num_records, receipt.busy_s) == (2, 4, 6, 3, 0.5)
    for made, part in zip(formats, receipt.files, strict=True):
        path = folder / f"00002.{made.extension}.part"
        assert (part.num_bytes, part.digest) == (path.stat().st_size, digest_file(path))
    assert receipt.num_bytes == sum(part.num_bytes for part in receipt.files)
    assert assembly_of(place, formats).resume() == [receipt]


def test_part_that_fails_leaves_nothing(place, formats):
    """The error is the one that was raised."""

    def fail():
        with PartWriter(place / ".datamat", make_spec().parts[0], formats, FEATURES.columns) as writer:
            writer.append({"key": b"k", "text": b"half of it"})
            raise RuntimeError("a sample failed")

    with pytest.raises(RuntimeError, match="a sample failed"):
        fail()

    assert [path for path in (place / ".datamat" / "parts").rglob("*") if path.is_file()] == []


def test_part_takes_any_buffer(tmp_path):
    """And tells how much it took, in bytes."""
    with PartFile(tmp_path / "00000.tar.part") as file:
        taken = [file.write(data) for data in (b"ab", bytearray(b"c"), memoryview(b"def")[::1], b"")]
        told = file.finish(Offsets(np.empty(0, np.uint64), np.empty(0, np.uint64)))

    assert taken == [2, 1, 3, 0]
    assert told == (6, digest_file(tmp_path / "00000.tar.part"))
    assert (tmp_path / "00000.tar.part").read_bytes() == b"abcdef"


@pytest.mark.parametrize("change", ["shard", "number", "start", "stop", "fingerprint"])
def test_receipt_counts_only_for_its_own_part(place, change):
    """Of the same rows, under the same options."""
    spec = make_spec()
    receipt = write_part(place, formats_of(("tfrecord",)), spec, 1)

    assert receipt.is_for(spec.parts[1])
    changed = {name: getattr(receipt, name) for name in Receipt.__slots__}
    changed[change] = "other" if isinstance(changed[change], str) else changed[change] + 1
    assert not Receipt(**changed).is_for(spec.parts[1])
