"""Damaged records: an error that names file, record and key; or skipped, counted and logged. Never silently dropped."""

from __future__ import annotations

import logging
import pathlib
import shutil

import pytest
from numbered_rows import batched, numbers_of, written

from datamat import CorruptDataError, ErrorPolicy, OptionError, load
from datamat.formats import get_format


def damage(data, *positions):
    """Flip a bit in the middle of the given records of the first shard."""
    path = pathlib.Path(data.files[0])
    lines = path.with_suffix(".idx").read_text().splitlines()
    content = bytearray(path.read_bytes())
    for position in positions:
        offset, size = map(int, lines[position].split())
        content[offset + size // 2] ^= 1
    path.write_bytes(content)


def replace_picture(data, position):
    """Write the first shard again, sound except for a field whose bytes are no picture, as many as before."""
    file = data.files[0]
    records = list(get_format("tfrecord").read(file))
    records[position]["image"] = [b"\x89PNG but no more".ljust(len(records[position]["image"][0]))]
    with open(file, "wb") as target:
        writer = get_format("tfrecord").writer(target, data.features.columns)
        for record in records:
            writer.append({name: value[0] if isinstance(value, list) else value for name, value in record.items()})
        writer.finish()


def test_archives_without_checksums_rely_on_those_of_the_pictures(formats, tmp_path):
    """Pictures in a record with a checksum are not checked again; those in a tar archive are."""
    data = load(shutil.copytree(formats, tmp_path / "out"), "train", format="webdataset")
    path = pathlib.Path(data.files[0])
    content = bytearray(path.read_bytes())
    offset, size = map(int, pathlib.Path(f"{path}.offsets").read_text().splitlines()[9].split())
    content[content.index(b"IEND", offset, offset + size) + 5] ^= 1  # of the chunk's CRC: the pixels are the same
    path.write_bytes(content)

    with pytest.raises(CorruptDataError, match=rf"{path}: record 9 is damaged: .*'IEND'.* wrong CRC"):
        data[9]


def test_damaged_record_is_named_with_its_key(copied):
    """Every way of reading names it."""
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
    """All checksums of the record are right."""
    data = load(copied, "train")
    key = data.keys()[5]
    replace_picture(data, 5)

    named = rf"{data.files[0]}: record 5 is damaged: field 'image': .* \(key '{key}'\)"
    with pytest.raises(CorruptDataError, match=named):
        load(copied, "train")[5]


def test_key_is_left_out_where_nothing_reveals_it(copied):
    """The record is still named."""
    data = load(copied, "train")
    damage(data, 7)
    shutil.rmtree(copied / "_index")

    with pytest.raises(CorruptDataError, match=r"record 7 at byte \d+ is damaged: .* to rebuild it$"):
        data[7]


def test_skipped_records_are_counted_and_reported(copied, caplog):
    """Each counts once, however often it is read."""
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


@pytest.mark.parametrize("format_name", ["parquet", "tfrecord.gz", "tfrecord"])
def test_one_flipped_bit_loses_what_is_stored_with_it_and_is_logged_once(tmp_path, caplog, format_name):
    """A page of Parquet, the rest of a gzip member, one record of TFRecord; in any way of reading."""
    sound = numbers_of(written(tmp_path / "out", 0, 600, 1, format_name))
    path = pathlib.Path(load(tmp_path / "out").files[0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    data = load(tmp_path / "out", errors="skip")

    with caplog.at_level(logging.WARNING, "datamat"):
        left = [batched(data.to_numpy(32)), sorted(batched(data.to_numpy(7, shuffle=True))), numbers_of(data)]

    assert left[0] == left[2]
    assert left[1] == sorted(left[0])
    assert set(left[0]) < set(sound)
    assert data.num_skipped == len(sound) - len(left[0])
    assert len(caplog.records) == 1
    if format_name == "tfrecord":
        assert data.num_skipped == 1
    if format_name == "tfrecord.gz":
        assert left[0][:100] == sound[:100]  # what was inflated before it


def test_batch_of_damaged_records_alone_is_left_out(copied):
    """With several ranks it is an error: one of them would wait for ever."""
    data = load(copied, "train", errors="skip")
    damage(data, 2, 3)

    assert [len(batch["key"]) for batch in data.to_numpy(2)] == [2] * 29
    with pytest.raises(CorruptDataError, match="this rank would have one batch less"):
        list(load(copied, "train", errors="skip").to_numpy(2, rank=1, world_size=2))


def test_single_record_raises_in_any_case(copied):
    """There is nothing else to return; of several records, the others are returned."""
    data = load(copied, "train", errors="skip")
    damage(data, 3)

    with pytest.raises(CorruptDataError):
        data[3]
    assert [sample["key"] for sample in data.__getitems__([2, 3, 4])] == [data.keys()[2], data.keys()[4]]


def test_limit_stops_the_skipping(copied):
    """It is a number or a share; without one, skipping stops when all records fail."""
    damage(load(copied, "train"), 1, 2, 3)

    for limit in (2, 0.04):
        with pytest.raises(CorruptDataError, match=r"skipped 3 damaged records, .* 2; the last"):
            list(load(copied, "train", errors=ErrorPolicy("skip", max_errors=limit)))
    assert len(list(load(copied, "train", errors=ErrorPolicy("skip", max_errors=3)))) == 57
    for info in load(copied, "val").manifest.splits["val"]:
        (copied / info.file).write_bytes(b"")
    with pytest.raises(CorruptDataError, match=r"skipped 4 damaged records, .* 3"):
        list(load(copied, "val", errors="skip"))


def test_records_that_workers_skip_are_counted_and_reported(copied, caplog):
    """The process that reads counts and logs them."""
    data = load(copied, "train", errors="skip")
    damage(data, 3, 7)

    with caplog.at_level(logging.WARNING, "datamat"):
        found = sum(len(batch["key"]) for batch in data.to_numpy(8, num_workers=2))

    assert found == 58
    assert data.num_skipped == 2
    assert caplog.text.count("skipped") == 2


@pytest.mark.parametrize("errors", ["ignore", None, ErrorPolicy("quarantine"), ErrorPolicy("skip", retries=2)])
def test_other_policies_are_refused(pairs, errors):
    """The error lists those that exist."""
    with pytest.raises(OptionError, match=r"want 'raise', 'skip' or ErrorPolicy\('skip', max_errors=...\)"):
        load(pairs, errors=errors)
