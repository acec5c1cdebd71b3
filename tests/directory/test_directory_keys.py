"""Keys of records and names of shards: formatted, parsed, and looked up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamat import OptionError
from datamat.directory.keys import (
    KeyLookup,
    RecordKey,
    RecordNames,
    bad_key,
    key_hash,
    ordered_by,
    original_key,
    safe_key,
    safe_keys,
    sorted_hashes,
)

ROW_KEYS = st.text(st.characters(blacklist_characters="#", blacklist_categories=("Cs",)), min_size=1)
NUMBERS = st.integers(0, 10**17)


@given(ROW_KEYS, st.none() | NUMBERS, st.none() | NUMBERS)
def test_key_of_a_record_is_parsed_as_it_was_written(row_key, copy, number):
    """This holds for any name of a row."""
    key = RecordKey(row_key, copy, None if copy is None else number)

    assert RecordKey.parse(str(key)) == key
    assert RecordKey.row_of(str(key)) == row_key


@pytest.mark.parametrize(
    "key", ["a#", "a#-1", "a#01", "a#1-", "a#1-01", "a#+1", "a#1#2", "a#x", "a#\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_key_with_another_ending_is_refused(key):
    """It would name a record a second time, or none."""
    with pytest.raises(OptionError, match="want KEY, KEY#COPY or KEY#COPY-NUMBER"):
        RecordKey.parse(key)


@pytest.mark.parametrize(("copies", "augmented"), [(1, False), (1, True), (3, False), (3, True)])
def test_records_of_a_row_are_found_by_the_keys_that_they_get(copies, augmented):
    """No other key finds one."""
    names = RecordNames(copies, augmented)

    keys = [RecordKey.parse(key) for key in names.of("a")]

    assert [names.place_of(key) for key in keys] == list(range(copies))
    others = {RecordKey("a"), RecordKey("a", 0), RecordKey("a", copies), RecordKey("a", 0, 0)} - set(keys)
    assert {names.place_of(key) for key in others} == {None}


@given(st.lists(ROW_KEYS, unique=True, max_size=50), st.lists(ROW_KEYS, max_size=10))
def test_rows_are_found_by_key(keys, others):
    """One at a time and all together."""
    lookup = KeyLookup.of(keys)
    asked = [*keys, *others]

    expected = [keys.index(key) if key in keys else None for key in asked]

    assert [lookup.find(key) for key in asked] == expected
    assert lookup.find_all(asked).tolist() == [-1 if row is None else row for row in expected]


def test_look_up_of_a_key_reads_no_other_row():
    """Of a thousand rows it reads the one key with the right hash, and none where no row has that hash."""
    keys = [f"row-{number}" for number in range(1000)]
    read: list[int] = []

    def keys_at(rows):
        read.extend(rows)
        return [keys[row] for row in rows]

    lookup = KeyLookup.of(keys, keys_at)

    assert [lookup.find(key) for key in keys[::100]] == list(range(0, 1000, 100))
    assert lookup.find("other") is None
    assert lookup.find_all([*keys[:10], "other"]).tolist() == [*range(10), -1]
    assert read == [*range(0, 1000, 100), *range(10)]


def test_rows_with_equal_hashes_are_distinguished_by_their_keys():
    """A hash says where to look, the key what is there."""
    keys = ["a", "b", "c"]
    lookup = KeyLookup(np.full(3, key_hash("b"), np.uint64), lambda rows: [keys[row] for row in rows])

    assert lookup.find("b") == 1
    assert lookup.find("a") is None  # whose own hash differs
    assert lookup.find_all(["b", "c"]).tolist() == [1, -1]
    assert lookup.find("\ud800") is None  # which no key holds


@given(st.lists(st.text(st.sampled_from("ab./\\#%02F5C3EA\n\x7fé"), min_size=1, max_size=9), unique=True))
def test_every_key_has_a_safe_form_of_its_own(keys):
    """It can be stored and turned back; keys that are safe already stay as they are."""
    safe = safe_keys(keys)

    assert bad_key(safe) is None
    assert [original_key(key) for key in safe] == keys and len({*safe}) == len(keys)
    for key in keys:
        if bad_key([key]) is None and "%" not in key:
            assert safe_key(key) == key
        elif bad_key([key]) is not None and "#" not in key:
            assert RecordKey(safe_key(key), 3, 1) in RecordKey.meant_by(f"{key}#3-1")


@pytest.mark.parametrize("count", [1000, 300_000])  # at once, and in pieces
def test_rows_with_equal_values_stay_in_order(count):
    """Hashes are hardly ever equal, so their order is found by a sort that is not stable."""
    values = (np.arange(count) * 7919 % 1009).astype(np.uint64) << np.uint64(54)
    rows = np.arange(count, dtype=np.uint32)
    wanted = np.argsort(values, kind="stable")

    np.testing.assert_array_equal(ordered_by(lambda some: values[some], rows), wanted)
    np.testing.assert_array_equal(sorted_hashes(values)[1], wanted)
