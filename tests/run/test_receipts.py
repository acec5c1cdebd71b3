"""Parts: a file for each format, and a receipt that describes them."""

from __future__ import annotations

import pytest
from small_shard import FEATURES, builder_of, formats_of, growing_of, make_spec, write_part

from datamat.directory.files import digest_file
from datamat.run.receipts import Receipt, part_folder
from datamat.run.shards import PartFile, PartWriter, begin_run


def test_part_and_receipt_are_on_the_disk(place, formats):
    """The receipt on disk equals the returned one and describes the files."""
    receipt = write_part(place, formats, make_spec(), 2)

    folder = part_folder(place / ".datamat", make_spec().name)
    endings = [f"{made.extension}.{what}" for made in formats for what in ("idx", "part")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"00002.{end}" for end in ["json", *endings])
    assert (receipt.number, receipt.start, receipt.stop, receipt.num_records, receipt.busy_s) == (2, 4, 6, 3, 0.5)
    for made, part in zip(formats, receipt.files, strict=True):
        path = folder / f"00002.{made.extension}.part"
        assert (part.num_bytes, part.digest) == (path.stat().st_size, digest_file(path))
    assert receipt.num_bytes == sum(part.num_bytes for part in receipt.files)
    assert builder_of(place, formats).resume() == [receipt]


def test_part_is_appended_to_the_shards_file(place, formats):
    """Where the file holds the parts before it, its bytes are written once, and its receipt says where they are."""
    spec, run = make_spec(), begin_run(place / ".datamat")
    receipts = [write_part(place, formats, spec, number, run=run) for number in range(4)]

    folder = part_folder(place / ".datamat", spec.name)
    apart = [made.extension for made in formats if not made.joins_parts]
    assert sorted(path.name for path in folder.glob("*.part")) == sorted(
        f"{number:05d}.{extension}.part" for number in range(4) for extension in apart
    )
    joined = [made for made in formats if made.joins_parts]
    for path, made in zip(growing_of(place, formats), joined, strict=True):
        files = [receipt.file_of(made.extension) for receipt in receipts]
        assert [file.start for file in files] == [sum(f.num_bytes for f in files[:number]) for number in range(4)]
        assert path.stat().st_size == sum(file.num_bytes for file in files)
        for file in files:
            assert file.digest == digest_file(path, start=file.start, num_bytes=file.num_bytes)


def test_part_that_fails_leaves_nothing(place, formats):
    """The caller gets the error that was raised."""

    def fail():
        with PartWriter(place / ".datamat", make_spec().parts[0], formats, FEATURES.columns) as writer:
            writer.append({"key": b"k", "text": b"half of it"})
            raise RuntimeError("a sample failed")

    with pytest.raises(RuntimeError, match="a sample failed"):
        fail()

    assert [path for path in (place / ".datamat" / "parts").rglob("*") if path.is_file()] == []


def test_part_takes_any_buffer(tmp_path):
    """It reports the bytes that it took."""
    with PartFile(tmp_path / "00000.tar.part") as file:
        taken = [file.write(data) for data in (b"ab", bytearray(b"c"), memoryview(b"def")[::1], b"")]
        file.finish()

    assert taken == [2, 1, 3, 0]
    assert (file.num_bytes, file.hexdigest()) == (6, digest_file(tmp_path / "00000.tar.part"))
    assert (tmp_path / "00000.tar.part").read_bytes() == b"abcdef"


@pytest.mark.parametrize("change", ["shard", "number", "start", "stop", "fingerprint"])
def test_receipt_counts_only_for_its_own_part(place, change):
    """It counts for the same rows under the same options alone."""
    spec = make_spec()
    receipt = write_part(place, formats_of(("tfrecord",)), spec, 1)

    assert receipt.is_for(spec.parts[1])
    changed = {name: getattr(receipt, name) for name in Receipt.__slots__}
    changed[change] = "other" if isinstance(changed[change], str) else changed[change] + 1
    assert not Receipt(**changed).is_for(spec.parts[1])
