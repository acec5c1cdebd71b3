"""Damaged records: named with file, record and key; or left out, counted and told. Never silently."""

from __future__ import annotations

import logging
import pathlib
import pickle
import shutil

import numpy as np
import pytest

from datamat import CorruptDataError, ErrorPolicy, OptionError, load
from datamat.formats import get_format


@pytest.fixture
def copied(pairs, tmp_path):
    """A directory to damage."""
    return shutil.copytree(pairs, tmp_path / "out")


def damage(data, *positions):
    """Flip a bit in the middle of records of the first shard."""
    path = pathlib.Path(data.files[0])
    lines = path.with_suffix(".idx").read_text().splitlines()
    content = bytearray(path.read_bytes())
    for position in positions:
        offset, size = map(int, lines[position].split())
        content[offset + size // 2] ^= 1
    path.write_bytes(content)


def replace_picture(data, position):
    """Write the first shard anew, sound but for a picture that is none."""
    file = data.files[0]
    records = list(get_format("tfrecord").read(file))
    records[position]["image"] = [b"\x89PNG but no more"]
    with open(file, "wb") as target:
        writer = get_format("tfrecord").writer(target, data.features.columns)
        for record in records:
            writer.append({name: value[0] if isinstance(value, list) else value for name, value in record.items()})
        offsets = writer.finish()
    pathlib.Path(file).with_suffix(".idx").write_text(offsets.to_text())


def test_archives_without_checksums_rely_on_those_of_the_pictures(make_pairs_output, tmp_path):
    """Files behind a checksum of the record are not looked through once more; those in a tar archive are."""
    data = load(make_pairs_output(tmp_path / "out", format="webdataset"), "train")
    path = pathlib.Path(data.files[0])
    content = bytearray(path.read_bytes())
    content[content.index(b"IEND") + 5] ^= 1  # of the chunk's CRC: the pixels are the same
    path.write_bytes(content)

    with pytest.raises(CorruptDataError, match=rf"{path}: record 0 is damaged: .*'IEND'.* wrong CRC"):
        data[0]


def test_damaged_record_is_named_with_its_key(copied):
    """Wherever it is met."""
    data = load(copied, "train")
    key = data.keys()[7]
    damage(data, 7)
    wanted = rf"{data.files[0]}: record 7 at byte \d+ is damaged: .* \(key '{key}'\)"

    for read in (
        lambda: data[7],
        lambda: data.__getitems__([6, 7]),
        lambda: list(data),
        lambda: list(data.to_numpy(4)),
    ):
        with pytest.raises(CorruptDataError, match=wanted):
            read()


def test_picture_that_does_not_decode_is_named_with_file_record_and_key(copied):
    """Though all checksums of the record are right."""
    data = load(copied, "train")
    key = data.keys()[5]
    replace_picture(data, 5)

    with pytest.raises(CorruptDataError, match=rf"{data.files[0]}: record 5 is damaged: 'image': .* \(key '{key}'\)"):
        load(copied, "train")[5]


def test_key_is_left_out_where_nothing_tells_it(copied):
    """The record is named all the same."""
    data = load(copied, "train")
    damage(data, 7)
    shutil.rmtree(copied / "index")

    with pytest.raises(CorruptDataError, match=r"record 7 at byte \d+ is damaged: .* anew$"):
        data[7]


def test_skipped_records_are_counted_and_told(copied, caplog):
    """Once each, however often they are met."""
    data = load(copied, "train", errors="skip")
    keys = data.keys()
    damage(data, 3, 7)

    with caplog.at_level(logging.WARNING, "datamat"):
        walked = [sample["key"] for sample in data]
        batches = [list(data.to_numpy(8, shuffle=True)) for _ in range(2)]

    left = [key for place, key in enumerate(keys) if place not in (3, 7)]
    assert walked == left
    assert all(sorted(key for batch in epoch for key in batch["key"]) == sorted(left) for epoch in batches)
    assert data.num_skipped == 2
    assert len(caplog.records) == 2
    assert f"(key {keys[3]!r})" in caplog.text
    assert f"(key {keys[7]!r})" in caplog.text


def test_batch_closes_over_what_was_skipped(copied):
    """Rows of all columns still belong together."""
    sound = list(load(copied, "train"))
    data = load(copied, "train", errors="skip")
    damage(data, 1)

    batch = next(iter(data.to_numpy(4)))

    assert batch["key"] == [sound[place]["key"] for place in (0, 2, 3)]
    assert np.array_equal(batch["image"], np.stack([sound[place]["image"] for place in (0, 2, 3)]))


def test_batch_of_damaged_records_alone_does_not_come(copied):
    """For several ranks it is an error: one of them would wait for ever."""
    data = load(copied, "train", errors="skip")
    damage(data, 2, 3)

    assert [len(batch["key"]) for batch in data.to_numpy(2)] == [2] * 29
    with pytest.raises(CorruptDataError, match="this rank would have a batch less"):
        list(load(copied, "train", errors="skip").to_numpy(2, rank=1, world_size=2))


def test_single_record_raises_in_any_case(copied):
    """There is nothing to return; of several, the others are returned."""
    data = load(copied, "train", errors="skip")
    damage(data, 3)

    with pytest.raises(CorruptDataError):
        data[3]
    assert [sample["key"] for sample in data.__getitems__([2, 3, 4])] == [data.keys()[2], data.keys()[4]]


def test_limit_stops_the_skipping(copied):
    """As a number or a share; without one, when all fail."""
    damage(load(copied, "train"), 1, 2, 3)

    for limit in (2, 0.04):
        with pytest.raises(CorruptDataError, match="3 damaged records were skipped, 2 at most are allowed; the last"):
            list(load(copied, "train", errors=ErrorPolicy("skip", max_errors=limit)))
    assert len(list(load(copied, "train", errors=ErrorPolicy("skip", max_errors=3)))) == 57
    for info in load(copied, "val").manifest.splits["val"]:
        (copied / info.file).write_bytes(b"")
    with pytest.raises(CorruptDataError, match="4 damaged records were skipped, 3 at most"):
        list(load(copied, "val", errors="skip"))


@pytest.mark.slow
def test_records_that_workers_skip_are_counted_and_told(copied, caplog):
    """In the process that reads."""
    data = load(copied, "train", errors="skip")
    damage(data, 3, 7)

    with caplog.at_level(logging.WARNING, "datamat"):
        found = sum(len(batch["key"]) for batch in data.to_numpy(8, num_workers=2))

    assert found == 58
    assert data.num_skipped == 2
    assert caplog.text.count("skipped") == 2


def test_policy_travels(copied):
    """To workers of others, who leave out the same."""
    data = pickle.loads(pickle.dumps(load(copied, "train", errors="skip")))
    damage(data, 3)

    assert len(list(data)) == 59
    assert data.num_skipped == 1


@pytest.mark.parametrize("errors", ["ignore", None, ErrorPolicy("quarantine"), ErrorPolicy("skip", retries=2)])
def test_other_policies_are_refused(pairs, errors):
    """With those that there are."""
    with pytest.raises(OptionError, match=r"want 'raise', 'skip' or ErrorPolicy\('skip', max_errors=...\)"):
        load(pairs, errors=errors)
