"""Deliberate defects of datamat, each with the test that must catch it: a check of the suite itself.

A defect is one change of the text of one module. `hook/sitecustomize.py` makes it as the module is imported, in every
process of a test run whose environment names the defect: nothing of it can get into a run that does not.
"""

from __future__ import annotations

import dataclasses

__all__ = ["DEFECTS", "Defect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Defect:
    """One deliberate mistake.

    Attributes:
        name: of the defect.
        what: what is wrong, in a few words, and what it costs a user.
        module: the module that has it.
        before: the text that it takes the place of, which the module holds just once.
        after: the text.
        caught_by: the test that must fail under it.
    """

    name: str
    what: str
    module: str
    before: str
    after: str
    caught_by: str


DEFECTS = {
    defect.name: defect
    for defect in (
        Defect(
            "file-not-flushed",
            "a file gets its final name before its bytes are on the disk: empty after a power cut",
            "datamat.storage",
            "            os.fsync(file.fileno())\n",
            "",
            "tests/test_storage.py::test_commit_flushes_the_file_before_its_name_and_the_folder_after",
        ),
        Defect(
            "folder-not-flushed",
            "a name is not on the disk when the next step relies on it",
            "datamat.storage",
            "    os.replace(temporary, final)\n    fsync_folder(pathlib.Path(final).parent)\n",
            "    os.replace(temporary, final)\n",
            "tests/test_storage.py::test_commit_flushes_the_file_before_its_name_and_the_folder_after",
        ),
        Defect(
            "shard-not-flushed",
            "shards are renamed, and never flushed",
            "datamat.growing",
            "            os.fsync(file.fileno())\n",
            "            file.flush()\n",
            "tests/faults/test_order.py::test_nothing_has_a_final_name_before_it_is_flushed",
        ),
        Defect(
            "written-in-place",
            "a file is written under its final name: a kill leaves half of it in sight",
            "datamat.storage",
            '    temporary = (through or path.parent) / f".{path.name}.{os.getpid()}.tmp"\n',
            "    temporary = path\n",
            "tests/test_storage.py::test_commit_names_the_file_only_at_the_end",
        ),
        Defect(
            "append-by-default",
            "what a killed process left of a part is written behind",
            "datamat.receipts",
            'open(self._path.with_suffix(f".{os.getpid()}.tmp"), "wb", buffering=0)',
            'open(self._path.with_suffix(".tmp"), "ab", buffering=0)',
            "tests/faults/test_order.py::test_part_begun_by_a_killed_process_is_begun_anew",
        ),
        Defect(
            "short-write",
            "a write that takes a part of the bytes is taken for all of them",
            "datamat.receipts",
            "        while view:\n            view = view[self._file.write(view) :]\n",
            "        self._file.write(view)\n",
            "tests/faults/test_disk.py::test_disk_that_takes_and_gives_half_of_everything_changes_nothing",
        ),
        Defect(
            "marker-without-digest",
            "a part counts as done because its receipt is there, whatever a power cut left of its bytes",
            "datamat.growing",
            "            return path.stat().st_size == part.num_bytes and digest_file(path) == part.digest\n",
            "            return path.exists()\n",
            "tests/test_parts.py::test_what_a_power_cut_tears_is_made_again",
        ),
        Defect(
            "shard-without-digest",
            "a finished shard is taken over because its name is there",
            "datamat.growing",
            "        return path.stat().st_size == info.num_bytes and digest_file(path) == info.checksum\n",
            "        return path.exists()\n",
            "tests/test_parts.py::test_finished_shard_counts_while_it_is_whole_and_of_this_plan",
        ),
        Defect(
            "stale-shard",
            "a shard made from other rows or options is taken for the present one",
            "datamat.parts",
            "        if any(info.fingerprint != self.spec.fingerprint for info in files):\n            return None\n",
            "",
            "tests/test_parts.py::test_finished_shard_counts_while_it_is_whole_and_of_this_plan",
        ),
        Defect(
            "foreign-receipt",
            "receipts are not matched with the plan: parts of another one get in",
            "datamat.receipts",
            "        return mine == (spec.shard, spec.number, spec.start, spec.stop, spec.fingerprint)\n",
            "        return mine[:2] == (spec.shard, spec.number)\n",
            "tests/test_parts.py::test_parts_of_another_plan_are_not_taken",
        ),
        Defect(
            "offsets-off-by-one",
            "the offsets of a joined shard begin a byte late from its second part on",
            "datamat.formats.offsets",
            "            base += num_bytes\n",
            "            base += num_bytes + 1\n",
            "tests/test_parts.py::test_shard_holds_the_records_of_its_parts_in_their_order",
        ),
        Defect(
            "parts-in-order-of-arrival",
            "parts are joined as they come in: the bytes depend on the workers",
            "datamat.parts",
            "        self._receipts[receipt.number] = receipt\n        self._join()\n",
            "        self._receipts[len(self._receipts)] = receipt\n        self._join()\n",
            "tests/test_parts.py::test_parts_may_come_in_any_order",
        ),
        Defect(
            "row-lost",
            "the last row of a shard is in no part",
            "datamat.plan",
            "        cuts.append((here, end))\n",
            "        cuts.append((here, min(end, max(here + 1, stop - 1))))\n",
            "tests/test_plan.py::test_every_row_is_in_exactly_one_part",
        ),
        Defect(
            "row-doubled",
            "parts overlap by a row",
            "datamat.plan",
            "        cuts.append((here, end))\n",
            "        cuts.append((here, min(end + 1, stop)))\n",
            "tests/test_plan.py::test_every_row_is_in_exactly_one_part",
        ),
        Defect(
            "record-lost",
            "of two rows that a worker writes, one is dropped in silence",
            "datamat.work",
            "            self._writer.append(record)\n",
            "            self._writer.append(record) if len(key) % 2 else None\n",
            "tests/test_materializer.py::test_every_pair_is_there_exactly_copies_times",
        ),
        Defect(
            "skipped-row-not-counted",
            "a bad row is left out, and nothing tells of it",
            "datamat.work",
            "        self._outcome.failed.append(failed)\n",
            "        self._outcome.num_done += 1\n",
            "tests/test_bad_samples.py::test_each_bad_sample_has_its_named_error_and_no_other_is_lost",
        ),
        Defect(
            "shared-random-state",
            "random numbers are drawn from the state that a worker happens to be in",
            "datamat.seeding",
            '    return np.random.SeedSequence(np.frombuffer(words, "<u4").astype(np.uint32))\n',
            "    return np.random.SeedSequence(random.getrandbits(64))\n",
            "tests/test_materializer.py::test_bytes_do_not_depend_on_the_workers",
        ),
        Defect(
            "same-draw-for-every-copy",
            "all copies of a row are drawn alike",
            "datamat.seeding",
            'struct.pack("<II", copy, attempt)',
            'struct.pack("<II", 0, 0)',
            "tests/test_seeding.py::test_every_part_of_the_name_of_a_stream_counts",
        ),
        Defect(
            "order-of-the-index",
            "files are indexed in another order than by name",
            "datamat.index",
            "    return sorted(found)\n",
            "    return sorted(found, reverse=True)\n",
            "tests/test_index.py::test_folder_gives_sorted_rows_with_flat_keys",
        ),
        Defect(
            "manifest-before-shards",
            "the manifest of an earlier run stays in sight while its shards are replaced",
            "datamat.shard_entries",
            "    publish(folder / MANIFEST_FILE, entries / MANIFEST_FILE)\n",
            "",
            "tests/faults/test_crash_points.py::test_kill_while_rebuilding_leaves_no_manifest_that_lies",
        ),
        Defect(
            "stale-files-left",
            "shards of an earlier plan stay beside those of this one, where a reader by pattern takes them",
            "datamat.running",
            "            self._remove_stale(set(self._finished))\n",
            "",
            "tests/test_materializer.py::test_another_number_of_shards_leaves_no_old_ones",
        ),
        Defect(
            "no-lock",
            "two runs write to one output at once",
            "datamat.storage",
            "        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "        pass\n",
            "tests/faults/test_signals.py::test_second_run_on_an_output_is_refused_and_harms_nothing",
        ),
        Defect(
            "checksum-not-tested",
            "records are read without a look at their checksum",
            "datamat.formats.framing",
            "    found, stored = _mask(crc), _CRC.unpack(trailer)[0]\n    if found != stored:\n",
            "    found, stored = _mask(crc), _CRC.unpack(trailer)[0]\n    if found != stored and not payload:\n",
            "tests/formats/test_formats_tfrecord.py::test_every_flipped_bit_of_a_plain_file_is_noticed",
        ),
        Defect(
            "link-followed",
            "links that somebody planted are written through",
            "datamat.storage",
            "    if os.path.islink(folder):\n",
            "    if False:\n",
            "tests/faults/test_places.py::test_planted_link_is_never_written_through[folder-index]",
        ),
        Defect(
            "ledger-torn",
            "a line is written behind one that a kill cut off, and both are lost",
            "datamat.ledger",
            '        self._append(b"\\n" + data if self._is_torn else data)\n',
            "        self._append(data)\n",
            "tests/test_ledger.py::test_torn_last_line_is_passed_over_and_stays_apart",
        ),
    )
}
