"""Deliberate defects of datamat, each with the test that must catch it: a check of the suite itself.

A defect is one mistake in one function. `hook/sitecustomize.py` makes it as the module is imported, in every process
of a test run whose environment names the defect: nothing of it can get into a run that does not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from patching import Replace, delete, replace

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DEFECTS", "Defect"]


@dataclasses.dataclass(frozen=True, slots=True)
class Defect:
    """One deliberate mistake.

    Attributes:
        name: what DATAMAT_SEEDED_BUG holds to choose it.
        what: the mistake in a few words, with its cost to a user.
        place: the module and the qualified name of the function, class or constant: "package.module:Class.method".
        patch: `replace(before, after)`, `delete(statements)`, or a callable that gets the function and returns a
            wrong one.
        caught_by: the test that must fail under it.
    """

    name: str
    what: str
    place: str
    patch: Replace | Callable[[Any], Any]
    caught_by: str

    @property
    def module(self) -> str:
        """The module in which the mistake is made."""
        return self.place.partition(":")[0]

    @property
    def function(self) -> str:
        """The qualified name of the faulty object in it."""
        return self.place.partition(":")[2]


DEFECTS = {
    defect.name: defect
    for defect in (
        Defect(
            "tasks-make-equal-shards",
            "tasks make shards again that have only got another name",
            "datamat.plan.changes:lacking_shards",
            replace(
                "{change.shard for change in find_changes(planned)} - equal.keys()",
                "{change.shard for change in find_changes(planned)}",
            ),
            "tests/run/test_other_names.py::test_tasks_take_shards_over",
        ),
        Defect(
            "store-repair-fetches-nothing",
            "a repair of a store makes all rows of a damaged shard again",
            "datamat.run.upload:RemoteOutput.at_hand",
            replace("pathlib.Path(folder, info.file)", "pathlib.Path(folder, str(info.num_bytes))"),
            "tests/run/test_repair.py::test_repair_of_a_store_reads_only_the_rows_of_the_damaged_part",
        ),
        Defect(
            "lease-taken-from-the-living",
            "a task takes a shard whose holder it has seen twice without a new number, however soon: made twice",
            "datamat.run.slices:TaskClaims._is_free",
            replace("now - self._seen[lease][1] > self._task.lease_s", "True"),
            "tests/run/test_claims.py::test_silent_holder_loses_its_shards_after_the_lease",
        ),
        Defect(
            "file-not-flushed",
            "a file gets its final name before its bytes are on the disk: empty after a power cut",
            "datamat.directory.files:commit",
            delete("os.fsync(__file.fileno())"),
            "tests/directory/test_files.py::test_commit_flushes_the_file_before_its_name_and_the_folder_after",
        ),
        Defect(
            "folder-not-flushed",
            "a name is not on the disk when the next step relies on it",
            "datamat.directory.files:publish",
            delete("fsync_folder(pathlib.Path(__final).parent)"),
            "tests/directory/test_files.py::test_commit_flushes_the_file_before_its_name_and_the_folder_after",
        ),
        Defect(
            "shard-not-flushed",
            "shards are renamed, and never flushed",
            "datamat.run.growing:GrowingShard._sealed",
            replace("os.fsync(__file.fileno())", "__file.flush()"),
            "tests/faults/test_order.py::test_nothing_has_a_final_name_before_it_is_flushed",
        ),
        Defect(
            "written-in-place",
            "a file is written under its final name: a kill leaves half of it in sight",
            "datamat.directory.files:commit",
            replace('(__through or __path.parent) / f".{__path.name}.{os.getpid()}.tmp"', "__path"),
            "tests/directory/test_files.py::test_commit_names_the_file_only_at_the_end",
        ),
        Defect(
            "append-behind-the-dead",
            "what a worker that died left behind the last receipt stays in the shard",
            "datamat.run.growing:open_at",
            delete("os.ftruncate(__descriptor, __end)"),
            "tests/run/test_shards.py::test_bytes_behind_the_last_receipt_do_not_count",
        ),
        Defect(
            "two-append-at-once",
            "a worker appends to a shard's file while another one does",
            "datamat.run.growing:_lock",
            replace("fcntl.flock(__descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)", "return True"),
            "tests/run/test_shards.py::test_only_one_process_appends_at_a_time",
        ),
        Defect(
            "row-groups-not-moved",
            "the footer of a Parquet shard leads to the row groups of its first part, whatever the part",
            "datamat.formats.parquet:_move",
            replace("_add(__chunk[_CHUNK_METADATA][1], _PAGE_OFFSETS, __by)", "pass"),
            "tests/formats/test_formats_parquet.py::test_footer_leads_to_the_row_groups_of_all_parts",
        ),
        Defect(
            "no-gap-for-the-next",
            "a worker that ends a part behind a gap begins the next one behind it: most bytes are written twice",
            "datamat.run.dispatch:PartOrder._note",
            replace("all(__a > __waiting[0].number for __a in __under_way)", "True"),
            "tests/run/test_dispatch.py::test_workers_at_one_shard_append_every_second_part",
        ),
        Defect(
            "named-beside-another-plan",
            "a finished shard gets the names that a kill prevented while shards of another plan are visible",
            "datamat.run.run:Run._found",
            replace("builder.unname()", "pass"),
            "tests/run/test_swap.py::test_shard_that_a_kill_left_unnamed_waits_for_shards_of_another_plan_to_go",
        ),
        Defect(
            "finished-shards-read-again",
            "a run reads every finished shard again, though nothing has written to it since",
            "datamat.run.shards:_holds",
            replace(
                "is_stand_in(__path) or version_of(__path) == __version or __info.is_whole(__path)",
                "__info.is_whole(__path)",
            ),
            "tests/run/test_driver.py::test_unfinished_run_reads_no_shard_that_it_has_finished",
        ),
        Defect(
            "published-too-early",
            "a shard is published while the receipt of one of its parts is on its way: the run ends in a KeyError",
            "datamat.run.run:Run._take",
            replace("not builder.is_complete", "receipt.sealed is None and not builder.is_complete"),
            "tests/run/test_driver.py::test_shard_is_published_once_every_receipt_has_come",
        ),
        Defect(
            "inputs-read-by-the-driver",
            "the driver reads and hashes again what the input files of every part held",
            "datamat.run.shards:ShardBuilder._put_inputs_together",
            replace("digest is not None and not self._resumed", "False"),
            "tests/run/test_driver.py::test_workers_see_to_what_parts_have_left",
        ),
        Defect(
            "parts-removed-by-the-driver",
            "the driver removes the files of every part, while workers wait for it",
            "datamat.run.dispatch:PartQueue.remove",
            replace("self._disk.is_set", "True"),
            "tests/run/test_driver.py::test_workers_see_to_what_parts_have_left",
        ),
        Defect(
            "removed-parts-left-behind",
            "what a kill leaves of the parts of published shards stays until the whole dataset is finished",
            "datamat.run.shards:begin_run",
            replace("remove_folder(folder)", "pass"),
            "tests/run/test_driver.py::test_parts_of_published_shards_are_gone_though_the_run_goes_on_later",
        ),
        Defect(
            "orphan-appends",
            "a worker that outlives its killed driver writes behind the parts of the next run",
            "datamat.run.growing:GrowingShard.check_run",
            replace("__found != self._run", "False"),
            "tests/run/test_shards.py::test_worker_of_an_earlier_run_does_not_append",
        ),
        Defect(
            "orphan-keeps-the-file",
            "a process that hangs in the middle of an append still has the file of the next run open",
            "datamat.run.growing:GrowingShard.disown",
            replace("os.replace(__copy, __path)", "__copy.unlink()"),
            "tests/run/test_shards.py::test_process_that_never_lets_go_of_the_files_writes_to_copies",
        ),
        Defect(
            "made-twice-joined-twice",
            "the receipt of a call that an executor repeats takes the place of that of the joined part",
            "datamat.run.parts:PartWriter.finish",
            replace("not self._appends and (first := self.first())", "False"),
            "tests/run/test_shards.py::test_part_that_is_made_twice_at_once_is_there_once",
        ),
        Defect(
            "short-write",
            "a write that takes a part of the bytes is taken for all of them",
            "datamat.formats.io:write_all",
            replace("while data:\n    __body", "file.write(data)"),
            "tests/faults/test_disk.py::test_disk_that_transfers_half_of_everything_changes_nothing",
        ),
        Defect(
            "marker-without-digest",
            "a part counts as done because its receipt is there, whatever a power cut left of its bytes",
            "datamat.run.growing:_has_digest",
            replace(
                "digest_file(__path, start=__part.start or 0, num_bytes=__part.num_bytes) == __part.digest", "True"
            ),
            "tests/run/test_shards.py::test_what_a_power_cut_tears_is_made_again",
        ),
        Defect(
            "part-joined-unseen",
            "parts are joined, and the digests of their workers are not compared: a flipped bit gets into the shard",
            "datamat.run.growing:_compare",
            replace("__digest != __told", "not __told"),
            "tests/run/test_shards.py::test_part_that_changed_since_its_worker_ended_is_never_appended",
        ),
        Defect(
            "shard-without-digest",
            "a finished shard is reused because its name is there",
            "datamat.run.shards:_holds",
            replace(
                "is_stand_in(__path) or version_of(__path) == __version or __info.is_whole(__path)", "__path.exists()"
            ),
            "tests/run/test_shards.py::test_finished_shard_counts_while_it_is_whole_and_of_this_plan",
        ),
        Defect(
            "stale-shard",
            "a shard made from other rows or options passes for the planned one",
            "datamat.run.shards:ShardBuilder._is_mine",
            delete("""
                if any(__info.fingerprint != self.spec.fingerprint for __info in __files):
                    return False
                """),
            "tests/run/test_shards.py::test_finished_shard_counts_while_it_is_whole_and_of_this_plan",
        ),
        Defect(
            "foreign-receipt",
            "receipts are not matched with the plan: parts of another one get in",
            "datamat.run.growing:GrowingShard.receipt",
            replace("(__found.number, __found.fingerprint) != (__number, self._fingerprint)", "False"),
            "tests/run/test_shards.py::test_part_does_not_follow_one_of_another_plan",
        ),
        Defect(
            "offsets-off-by-one",
            "the offsets of a joined shard begin a byte late from its second part on",
            "datamat.formats.offsets:Offsets.joined",
            replace("__base += __num_bytes", "__base += __num_bytes + 1"),
            "tests/formats/test_formats_base.py::test_joined_offsets_are_those_of_the_joined_file",
        ),
        Defect(
            "parts-in-order-of-arrival",
            "parts are joined as they come in: the bytes depend on the workers",
            "datamat.run.shards:ShardBuilder.add",
            replace("__receipt.number", "len(self._receipts)"),
            "tests/run/test_shards.py::test_parts_may_come_in_any_order",
        ),
        Defect(
            "grey-for-damaged",
            "a JPEG that libjpeg warns about is accepted, filled with grey where it is damaged",
            "datamat.codecs.images:_decode_jpeg",
            replace(
                """
                if _UNSUPPORTED not in str(__complaint):
                    raise
                return _decode_with_judge(__plain, __channels)
                """,
                "return decode_with_cv2(__plain, __channels)",
            ),
            "tests/run/test_bad_samples.py::test_damaged_picture_is_not_kept_as_it_is",
        ),
        Defect(
            "row-lost",
            "the last row of a shard is in no part",
            "datamat.plan.plan:_cut",
            replace("(here, __end)", "(here, min(__end, max(here + 1, len(work) - 1)))"),
            "tests/plan/test_plan.py::test_every_row_is_in_exactly_one_part",
        ),
        Defect(
            "row-doubled",
            "parts overlap by a row",
            "datamat.plan.plan:_cut",
            replace("(here, __end)", "(here, min(__end + 1, len(work)))"),
            "tests/plan/test_plan.py::test_every_row_is_in_exactly_one_part",
        ),
        Defect(
            "record-lost",
            "of two rows that a worker writes, one is silently dropped",
            "datamat.run.part_task:PartTask._append",
            replace("self.__writer.append(__record)", "self.__writer.append(__record) if len(key) % 2 else None"),
            "tests/run/test_materializer.py::test_every_pair_is_there_exactly_copies_times",
        ),
        Defect(
            "skipped-row-not-counted",
            "a bad row is left out, and nothing reports it",
            "datamat.run.part_task:PartTask._leave_out",
            replace("self.__outcome.failed.append(__failed)", "self.__outcome.num_done += 1"),
            "tests/run/test_bad_samples.py::test_each_bad_sample_has_its_named_error_and_no_other_is_lost",
        ),
        Defect(
            "shared-random-state",
            "random numbers are drawn from the state that a worker happens to be in",
            "datamat.transforms.seeding:sample_seed",
            replace('np.frombuffer(__words, "<u4").astype(np.uint32)', "random.getrandbits(64)"),
            "tests/run/test_materializer.py::test_bytes_do_not_depend_on_the_workers",
        ),
        Defect(
            "pool-in-a-cycle-stays",
            "a pool in a reference cycle is collected, and its workers stay until the program ends",
            "datamat.parallel.executor:PathosExecutor._prepare",
            replace(
                "weakref.finalize(self, __dispatcher.shutdown).atexit = False",
                "self.end = weakref.ref(self, lambda _: __dispatcher.shutdown())",
            ),
            "tests/parallel/test_collection.py::test_pool_in_a_cycle_ends_its_workers[fork-attribute]",
        ),
        Defect(
            "pool-kept-by-its-initializer",
            "the thread of a pool keeps the initializer, and an object whose method that is keeps the pool for ever",
            "datamat.parallel.dispatcher:Dispatcher.__init__",
            replace("weakref.ref(__belongings)", "lambda: __belongings"),
            "tests/parallel/test_collection.py::test_pool_in_a_cycle_ends_its_workers[fork-initializer]",
        ),
        Defect(
            "ended-pools-kept",
            "every pool that has ended is kept, with what it was given",
            "datamat.parallel.executor:_executors",
            replace("weakref.WeakSet()", "set()"),
            "tests/parallel/test_collection.py::test_nothing_of_the_callers_is_kept[fork-shut down]",
        ),
        Defect(
            "program-frozen",
            "models of the program that are in a cycle are not collected while a pool lives",
            "datamat.parallel.workers:WorkerGroup._fork_workers",
            replace(
                """
                with interrupts_held(), at_rest():
                    __body
                """,
                """
                __import__("gc").freeze()
                with interrupts_held(), at_rest():
                    __body
                """,
            ),
            "tests/parallel/test_collection.py::test_collector_of_the_program_is_left_alone[fork]",
        ),
        Defect(
            "inherited-pages-copied",
            "collections in a worker copy all pages that it shares with the program",
            "datamat.parallel.worker:main",
            delete("gc.freeze()"),
            "tests/parallel/test_collection.py::test_worker_leaves_what_it_inherits_out_of_collections[fork]",
        ),
        Defect(
            "number-closed-before-it-is-forgotten",
            "a fork closes a descriptor number of a pool that is another file by then",
            "datamat.parallel.channel:Descriptor.close",
            replace(
                """
                number, self.__number = self.__number, -1
                if number >= 0:
                    os.close(number)
                """,
                """
                if self.__number >= 0:
                    os.close(self.__number)
                self.__number = -1
                """,
            ),
            "tests/parallel/test_descriptors.py::test_fork_closes_no_number_that_is_another_file_by_now[fork]",
        ),
        Defect(
            "fork-amid-an-end",
            "a fork keeps an end that another thread is closing: the worker at its other side outlives its program",
            "datamat.parallel.channel:Descriptor.close",
            replace("with no_forks: __body", "if True: __body"),
            "tests/parallel/test_descriptors.py::test_no_fork_comes_between_the_forgetting_of_a_number_and_its_end",
        ),
        Defect(
            "fork-stops-at-an-error",
            "a fork keeps all ends of pools behind the first that cannot be closed: workers outlive their program",
            "datamat.parallel.channel:_close_ends",
            replace("__stack.callback(__end.close)", "__end.close()"),
            "tests/parallel/test_descriptors.py::test_fork_closes_every_end_although_some_fail[fork]",
        ),
        Defect(
            "fork-amid-a-start",
            "a fork keeps ends of a worker that another thread is starting: it outlives its program",
            "datamat.parallel.workers:WorkerHandle.__init__",
            replace(
                """
                with no_forks:
                    __end, __their_end = __pair
                    __body
                """,
                """
                if True:
                    __end, __their_end = __pair
                    __body
                """,
            ),
            "tests/parallel/test_descriptors.py::test_fork_beside_threads_that_make_pools_has_no_end_of_theirs",
        ),
        Defect(
            "servers-pile-up",
            "each new set of modules starts another server, of up to 590 MB, that stays",
            "datamat.parallel.processes:_Servers._find",
            replace("_MAX_SERVERS", "99"),
            "tests/parallel/test_servers.py::test_pools_with_other_needs_in_turn_have_two_servers",
        ),
        Defect(
            "idle-server-stays",
            "a server that nobody needs any more stays until the program ends",
            "datamat.parallel.processes:_ServerWatch._look",
            replace("time.monotonic() - self.__last_use >= self.__idle_s", "self.__last_use < 0"),
            "tests/parallel/test_servers.py::test_idle_server_ends",
        ),
        Defect(
            "dying-server-asked-again",
            "a pool breaks where its server was killed a moment ago: it asks the same server three times",
            "datamat.parallel.processes:Server.connect",
            replace("os.unlink(address)", "os.stat(address)"),
            "tests/parallel/test_servers.py::test_server_that_was_killed_is_replaced[False]",
        ),
        Defect(
            "server-with-all-modules-passed-by",
            "a server that has already imported the modules is not used, because it was not started for them",
            "datamat.parallel.processes:Server.missing",
            replace("__missing.difference_update(__names.read().split())", "__names.close()"),
            "tests/parallel/test_servers.py::test_server_that_has_all_modules_is_used",
        ),
        Defect(
            "collected-map-blocks",
            "a map that is garbage, collected while the pool holds a lock, waits for that lock for ever",
            "datamat.parallel.tasks:FunctionTable.__init__",
            replace("threading.RLock", "threading.Lock"),
            "tests/parallel/test_collection.py::test_map_may_be_collected_at_any_moment[list]",
        ),
        Defect(
            "failed-start-leaves-its-descriptors",
            "a pool that could not start, and tries again with each call, leaves descriptors and workers each time",
            "datamat.parallel.dispatcher:Dispatcher.start",
            delete("self.__crew.give_up()"),
            "tests/parallel/test_life.py::test_pool_that_cannot_start_leaves_nothing_behind[fork]",
        ),
        Defect(
            "same-draw-for-every-copy",
            "all copies of a row draw the same numbers",
            "datamat.transforms.seeding:sample_seed",
            replace('struct.pack("<II", __copy, __attempt)', 'struct.pack("<II", 0, 0)'),
            "tests/transforms/test_seeding.py::test_every_part_of_the_name_of_a_stream_counts",
        ),
        Defect(
            "array-out-of-step",
            "an array that a geometric transform does not take passes unnoticed: the image flips, the depth stays",
            "datamat.transforms.albumentations:_unmatched",
            replace("target is None", 'target in (None, "array")'),
            "tests/run/test_materializer.py::test_array_that_the_transform_would_not_move_is_refused_before_anything_is_touched",
        ),
        Defect(
            "point-of-another",
            "points that a crop removes shift those behind them: an ear is where the eye was",
            "datamat.transforms.albumentations:_Points.moved",
            replace("found[:, -1].astype(np.int64)", "np.arange(len(found))"),
            "tests/transforms/test_transforms.py::test_points_of_people_keep_their_rows",
        ),
        Defect(
            "tiff-pages",
            "of a TIFF file of several pages, such as the slices of a scan, the first alone is stored",
            "datamat.codecs.headers:_has_pages",
            replace("return True", "return False"),
            "tests/codecs/test_tiff.py::test_pages_are_refused_and_smaller_versions_are_not",
        ),
        Defect(
            "epoch-not-drawn",
            "a reader draws the same numbers in every epoch: each image has one augmentation for good",
            "datamat.transforms.augmenter:SampleTransform.__call__",
            replace("RandomStreams(self._seed, key, epoch, self._number)", "RandomStreams(self._seed, key, 0)"),
            "tests/transforms/test_contract.py::test_draws_follow_seed_key_and_epoch",
        ),
        Defect(
            "rng-by-name-not-passed",
            "a callable that asks for rng by name never gets it, and draws from something else",
            "datamat.transforms.seeding:with_rng",
            replace("not is_named or _is_given_rng(function)", "True"),
            "tests/transforms/test_contract.py::test_one_callable_writes_and_reads_the_same",
        ),
        Defect(
            "cached-sample-written-to",
            "a transform that writes in place changes what tf.data caches: each epoch augments the one before",
            "datamat.readers.tf.fields:TfField.as_value",
            replace("tensor.copy()", "tensor"),
            "tests/transforms/test_contract.py::test_tf_data_caches_samples_that_a_transform_writes_to",
        ),
        Defect(
            "unverified-index-of-a-shard",
            "a damaged file that a user's sidecar made from a shard passes verify where the function is absent",
            "datamat.directory.sidecars.exporting:_write",
            replace("now[name]._replace(digest=_digest(text))", "now[name]"),
            "tests/directory/test_sidecars.py::test_file_made_from_a_shard_is_verified_without_its_sidecar",
        ),
        Defect(
            "deaf-conversion",
            "the hooks that a conversion takes hear nothing",
            "datamat.run.convert:convert",
            replace('RunOptions.of(run, "convert")', 'dataclasses.replace(RunOptions.of(run, "convert"), hooks=())'),
            "tests/run/test_convert.py::test_hooks_hear_a_conversion_and_sidecars_describe_it",
        ),
        Defect(
            "stale-conversion",
            "a directory that was rebuilt is not converted again: stale records stay",
            "datamat.run.convert:StoredRecords.__init__",
            replace("xxhash.xxh3_128_hexdigest(manifest.render() + wanted.encode())", "''"),
            "tests/run/test_convert.py::test_finished_conversion_is_not_repeated_unless_the_source_changed",
        ),
        Defect(
            "other-view-not-saved",
            "a view with other records is taken for the one that was saved before",
            "datamat.run.convert:StoredRecords.__init__",
            replace("manifest.render() + wanted.encode()", "manifest.render()"),
            "tests/run/test_save.py::test_view_without_a_copy_or_a_field_is_another",
        ),
        Defect(
            "taken-over-and-gone",
            "a shard of another name is moved before the set that has it is published: a kill loses the old set",
            "datamat.run.shards:take_over",
            replace("folder.copy(f'{below}{old.file}', __name)", "folder.move(f'{below}{old.file}', __name)"),
            "tests/run/test_other_names.py::test_run_that_ends_before_the_set_is_published_loses_nothing",
        ),
        Defect(
            "appended-twice",
            "rows that are there are made again, and appended once more: two records of one key",
            "datamat.plan.generations:Generations.turns",
            replace("found[rows] = -1", "pass"),
            "tests/run/test_append.py::test_rows_that_are_new_become_new_shards[disk-tfrecord]",
        ),
        Defect(
            "append-forgets-why",
            "shards get other names, and the ledger says under the old ones which samples they lack",
            "datamat.run.append:_joined",
            delete("take_samples(sets, ledger, moved)"),
            "tests/run/test_append.py::test_samples_that_fail_are_listed_with_their_shards[disk]",
        ),
        Defect(
            "append-over-another",
            "a set that another has published meanwhile is replaced by one without its rows",
            "datamat.run.stage:alone",
            replace("raise ChangedError(__said)", "pass"),
            "tests/run/test_append.py::test_another_that_is_killed_once_it_has_published",
        ),
        Defect(
            "grown-set-planned-anew",
            "an ordinary run deals the rows of a set that has grown out again, and makes all of its shards again",
            "datamat.plan.job:Job._generations",
            replace("before.generations", "False"),
            "tests/run/test_append.py::test_ordinary_run_of_a_set_that_has_grown[disk]",
        ),
        Defect(
            "dropped-come-back",
            "shards that are made again have the rows that were dropped from the finished set",
            "datamat.plan.plan:plan_without",
            replace("if not removed:\n    __body", "return plan"),
            "tests/run/test_edit.py::test_no_later_run_brings_dropped_rows_back[disk]",
        ),
        Defect(
            "edit-undone",
            "an ordinary run makes fields that were changed in place from the source again, without a word",
            "datamat.plan.changes:find_loss",
            replace("manifest.edited", "False"),
            "tests/run/test_edit.py::test_run_does_not_undo_what_was_edited[disk]",
        ),
        Defect(
            "edit-forgets-why",
            "a shard that is edited has another checksum, under which the ledger does not say which samples it lacks",
            "datamat.run.edit:_published",
            replace("old.num_failed", "False"),
            "tests/run/test_edit.py::test_samples_that_failed_are_still_listed[disk]",
        ),
        Defect(
            "edit-cuts-anew",
            "an edited shard has other parts than a run gives it, and can no longer be repaired from its source",
            "datamat.run.convert:StoredRecords._old_bounds",
            replace("self._only is None", "True"),
            "tests/run/test_edit.py::test_shard_has_the_bytes_that_a_run_gives_it[tfrecord]",
        ),
        Defect(
            "async-calls-share-chance",
            "calls that run at once draw from one generator: records differ from run to run",
            "datamat.plan.pipeline:Pipeline._called",
            replace("isinstance(self.writer, AsyncFunctionWriter)", "False"),
            "tests/run/test_async_functions.py::test_function_that_draws_from_what_calls_share_is_refused",
        ),
        Defect(
            "chance-of-read-not-seeded",
            "read draws from the state that a worker happens to be in: rows hold each other's numbers",
            "datamat.plan.pipeline:Pipeline._called",
            replace("seed_row(self.seed, __row.key, uses_globals=is_seeded)", "loaded_libraries()"),
            "tests/transforms/test_chance.py::test_pictures_of_a_readme_are_all_different",
        ),
        Defect(
            "chance-of-read-not-compared",
            "what read draws from a generator of its own is stored, although no other run would draw it",
            "datamat.run.part_task:PartTask._records",
            replace("read is not None", "read is not None and spec.augmented"),
            "tests/transforms/test_chance.py::test_chance_in_a_read_that_refills_one_buffer_is_refused",
        ),
        Defect(
            "keys-by-position",
            "paths and strings get their position as key: one more of them rebuilds every shard",
            "datamat.writers.function:keys_of",
            replace("_key_of_text(__text, __seen[__text])", 'f"{number:08d}"'),
            "tests/run/test_function.py::test_one_item_more_concerns_one_shard",
        ),
        Defect(
            "first-item-in-the-caller",
            "the caller's own process makes the first sample, and dies where that crashes",
            "datamat.run.function:infer_features",
            replace(
                "__stack.enter_context(open_executor(__executor, __workers, 1, __logger))",
                """__stack.enter_context(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))""",
            ),
            "tests/run/test_function.py::test_caller_does_none_of_the_items",
        ),
        Defect(
            "table-by-columns",
            "a table is taken for a sequence of columns",
            "datamat.writers.function:_items_of",
            replace("TableRows(__table)", "[{name: column} for name, column in __table.to_pydict().items()]"),
            "tests/writers/test_tables.py::test_function_gets_each_row_as_a_dict",
        ),
        Defect(
            "order-of-row-groups",
            "rows of several row groups come in the order of the groups: samples under the keys of others",
            "datamat.writers.arrow:TableFiles.take",
            replace("__found.take(np.argsort(__here))", "__found"),
            "tests/writers/test_sources.py::test_rows_one_by_one_are_those_of_blocks",
        ),
        Defect(
            "torn-row-kept",
            "what an interrupted spool wrote behind its last save stays there: offsets lead into half a row",
            "datamat.writers.spool:SpooledSource._write",
            delete("__file.truncate(__num_bytes)"),
            "tests/writers/test_sources.py::test_interrupted_source_continues_where_it_says_how",
        ),
        Defect(
            "order-of-the-index",
            "files are indexed in another order than by name",
            "datamat.writers.paths:visible_files",
            replace("sorted(__found)", "sorted(__found, reverse=True)"),
            "tests/writers/test_index.py::test_folder_gives_sorted_rows_with_flat_keys",
        ),
        Defect(
            "published-without-a-look",
            "a run replaces the manifest of another that has published since: its rows are lost without a word",
            "datamat.directory.publication:_written",
            replace('ReplaceIf(seen) if seen else "create"', '"overwrite"'),
            "tests/run/test_upload.py::test_of_two_that_publish_at_once_one_is_told",
        ),
        Defect(
            "late-deletion",
            "who finishes a publication late deletes files of the set that another has published since",
            "datamat.directory.publication:_settled",
            replace("version_there(__folder, __name) == __manifest.going[__name]", "True"),
            "tests/directory/test_manifest.py::test_who_finishes_late_leaves_what_has_a_name_by_now",
        ),
        Defect(
            "place-not-looked-for",
            "a set is not found whose run was killed while its files got their names",
            "datamat.directory.manifest:Manifest.placed",
            lambda placed: lambda self, folder: self,
            "tests/directory/test_manifest.py::test_readers_take_the_place_that_fits",
        ),
        Defect(
            "stale-files-left",
            "shards of an earlier plan stay beside those of this one, where a reader by pattern takes them",
            "datamat.run.run:Run._publish_set",
            replace("sorted(__visible - (__manifest.file_names - __waiting))", "[]"),
            "tests/run/test_materializer.py::test_another_number_of_shards_leaves_no_old_ones",
        ),
        Defect(
            "lost-lock-unseen",
            "a run continues although its lock file is gone: two runs finish one output",
            "datamat.directory.files:_check_held",
            replace("_is_at(__held.descriptor, __held.path)", "__held.descriptor"),
            "tests/directory/test_files.py::test_nothing_is_published_under_a_lock_that_is_gone",
        ),
        Defect(
            "garbage-collected-at-exit",
            "an interrupted program searches all of TensorFlow's objects for garbage before it exits",
            "datamat.run.limits:_leave_garbage",
            delete("gc.freeze()"),
            "tests/faults/test_signals.py::test_interrupted_program_leaves_its_garbage_to_the_system",
        ),
        Defect(
            "cache-of-somebody-else",
            "what is read from a bucket goes through a folder that another user has put in the place of the cache",
            "datamat.directory.files:private_folder",
            replace("not stat.S_ISDIR(found.st_mode)", "False"),
            "tests/readers/test_remote.py::test_url_is_all_that_load_needs",
        ),
        Defect(
            "link-read",
            "links out of a directory are followed: whoever made it gets its readers to disclose other files",
            "datamat.folders.local:regular_path",
            replace("__real.is_relative_to(__root)", "__real.is_absolute()"),
            "tests/run/test_trust.py::test_links_are_followed_as_far_as_they_stay_in_the_directory",
        ),
        Defect(
            "repair-takes-any-bytes",
            "repair replaces what was damaged by whatever the source gives now, and reports success",
            "datamat.run.wanted:Wanted.judge",
            replace(
                "__fingerprint == __info.fingerprint and __checksums and __info.checksum not in __checksums",
                "__fingerprint == __info.fingerprint and not __checksums and __info.checksum not in __checksums",
            ),
            "tests/run/test_repair.py::test_source_that_gives_other_bytes_is_reported_and_its_old_entry_stays",
        ),
        Defect(
            "no-lock",
            "two runs write to one output at once",
            "datamat.directory.files:_take",
            delete("fcntl.lockf(__descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
            "tests/faults/test_signals.py::test_second_run_on_an_output_is_refused_and_harms_nothing",
        ),
        Defect(
            "checksum-not-tested",
            "records are read, and their checksums are not compared",
            "datamat.formats.tfrecord:_check_payload",
            replace("__found != __stored", "__found != __stored and not payload"),
            "tests/formats/test_formats_tfrecord.py::test_every_flipped_bit_of_a_plain_file_is_noticed",
        ),
        Defect(
            "positions-in-part",
            "the positions in an ArrayRecord file are those in its parts",
            "datamat.formats.arrayrecord:ArrayRecordFormat.trailer",
            replace("__chunk.begin", "__chunk.begin - start"),
            "tests/formats/test_formats_arrayrecord.py::test_offsets_are_those_of_the_file",
        ),
        Defect(
            "link-followed",
            "writes go through links that somebody planted",
            "datamat.directory.files:refuse_links",
            replace("os.path.islink(__folder)", "False"),
            "tests/faults/test_places.py::test_planted_link_is_never_written_through[folder-_index]",
        ),
        Defect(
            "opened-unnoticed",
            "files that read opens beside those of its row are not named: who edits one gets old shards",
            "datamat.plan.inputs:_hear",
            replace("_listener is None or __event not in _EVENTS or len(_listener) >= _MOST_PATHS", "True"),
            "tests/plan/test_opened.py::test_warning_covers_files_that_a_function_opens[fork]",
        ),
        Defect(
            "ledger-torn",
            "a line is written behind one that a kill cut off, and both are lost",
            "datamat.directory.ledger:Ledger.write",
            replace("__newline + __data if self.__is_torn else __data", "__data"),
            "tests/directory/test_ledger.py::test_torn_last_line_is_skipped_and_stays_apart",
        ),
        Defect(
            "other-dataset-removed",
            "a run into the output of another dataset removes that one",
            "datamat.run.existing:refuse_other_dataset",
            replace("sorted(_datasets(__output, job.work, __finished) - {__name})", "[]"),
            "tests/run/test_rebuilds.py::test_run_of_another_dataset_is_refused",
        ),
        Defect(
            "file-of-the-user-overwritten",
            "a features.json that the user wrote is replaced by datamat's",
            "datamat.directory.sidecars.exporting:_is_foreign",
            replace("__name in __record and __rest", "__rest"),
            "tests/directory/test_sidecars.py::test_files_of_the_user_are_left_alone",
        ),
        Defect(
            "rebuild-without-warning",
            "a finished dataset is rebuilt, for hours, and no warning said so",
            "datamat.run.existing:_SILENT_SHARE",
            replace("0.1", "1.0"),
            "tests/run/test_rebuilds.py::test_large_rebuild_says_before_it_begins_what_goes_and_why",
        ),
        Defect(
            "library-version-ignored",
            "parts and shards of two versions of an encoder are mixed",
            "datamat.plan.digests:JobDigests.of_split",
            replace(
                "[self.writer, self.features, self.format, self.seed, self.packages, self.environment]",
                "[self.writer, self.features, self.format, self.environment]",
            ),
            "tests/fingerprint/test_library_versions.py::test_parts_made_with_another_version_are_not_reused",
        ),
        Defect(
            "other-target-not-seen",
            "a link that leads to another file of equal size and time is taken for the same input",
            "datamat.sources.inputs:InputFinder._targets",
            replace('"".join(__found)', '""'),
            "tests/run/test_links.py::test_changed_target_makes_its_shard_again[another target]",
        ),
        Defect(
            "hash-taken-for-a-key",
            "a key that no record has gives the record of a key with the same hash",
            "datamat.directory.index_files:SplitIndex._has_key",
            replace("self._hashed.key_of(place.shard, place.record) == str(key)", "True"),
            "tests/readers/test_keys.py::test_keys_of_equal_hashes_are_told_apart",
        ),
        Defect(
            "damaged-hashes-believed",
            "where the file of hashes is damaged, keys of the dataset are said not to be there",
            "datamat.readers.records:_KeysFile.is_whole",
            replace("self._info.is_whole(self._file.path)", "True"),
            "tests/readers/test_keys.py::test_damaged_hashes_are_said_and_left_aside[flipped]",
        ),
        Defect(
            "index-taken-for-data",
            "the index has the name of a Parquet file: readers of tables give its rows for samples",
            "datamat.directory.manifest:index_file",
            replace('".index"', '".parquet"'),
            "tests/directory/test_index_files.py::test_readers_of_tables_do_not_take_the_index_for_data",
        ),
        Defect(
            "old-and-new-together",
            "a shard takes the place of an old one while others are still to do: readers by pattern get a mixture",
            "datamat.run.run:Run._may_have_names",
            lambda may: lambda self, files: True,
            "tests/faults/test_replacing.py::test_reader_never_sees_old_and_new_shards_together[seed]",
        ),
        Defect(
            "replaced-shard-read",
            "a dataset that was loaded before a rebuild gives records of the new shards under the old keys",
            "datamat.readers.remote:Loaded._is_here",
            replace("__path is not None and __info.is_whole(__path)", "__path is not None"),
            "tests/faults/test_replacing.py::"
            "test_reader_that_was_there_before_never_gets_new_records_for_old_ones[nothing]",
        ),
        Defect(
            "replaced-behind-a-url",
            "what is read by ranges after a rebuild comes from the new shards, and passes for the old records",
            "datamat.readers.remote:Loaded.check",
            replace("self._head == self._first or (self._head and is_listed) or self._is_here(info)", "True"),
            "tests/readers/test_remote.py::test_replaced_directory_of_the_same_sizes_is_refused[order-nothing]",
        ),
        Defect(
            "hook-ends-the-run",
            "a progress bar whose terminal is gone, or a bug in a hook, ends a run of hours",
            "datamat.run.reporting:RunEvents._call",
            replace("Exception", "()"),
            "tests/run/test_hooks.py::test_hook_that_raises_is_switched_off_and_loses_nothing[PlanMade]",
        ),
        Defect(
            "display-unescaped",
            "a notebook runs what a key, a path or a class name says",
            "datamat.directory.display:_cell",
            replace("html.escape(text)", "text"),
            "tests/test_displays.py::test_display_is_whole_escaped_and_in_the_colours_of_the_page[materializer]",
        ),
        Defect(
            "old-parts-are-speed",
            "what an earlier run made counts as speed: the time that is left is far too short",
            "datamat.run.progress:ProgressBar._line",
            replace("self._num_new / elapsed_s", "self._num_records / elapsed_s"),
            "tests/run/test_progress.py::test_what_was_there_counts_as_done_and_not_as_speed",
        ),
        Defect(
            "failures-of-other-shards",
            "samples that failed in an earlier version of a shard are listed as missing from the present one",
            "datamat.directory.failures:failures_in",
            replace(
                'infos.get((values["shard"], values["checksum"]))',
                'next((info for info in infos.values() if info.name == values["shard"]), None)',
            ),
            "tests/run/test_failures.py::test_failures_of_earlier_versions_of_a_shard_are_gone[local]",
        ),
        Defect(
            "equal-masks-are-equal-inputs",
            "two samples of which only the masks are equal are called the same picture",
            "datamat.directory.equal_inputs:_largest_inputs",
            replace('size > found["size"]', "size > 0"),
            "tests/directory/test_equal_inputs.py::test_equal_inputs_are_found[mask]",
        ),
        Defect(
            "hook-before-the-ledger",
            "a hook hears of a part before the ledger has it, and loses the part if it ends the process",
            "datamat.run.reporting:RunEvents.emit",
            replace(
                "self.ledger(event)",
                "self._hooks = [hook for hook in self._hooks if hook is not self.ledger] + [self.ledger]",
            ),
            "tests/run/test_hooks.py::test_ledger_and_disk_have_what_a_hook_hears",
        ),
        Defect(
            "row-left-out-not-named",
            "rows of a part that is taken over from a killed run are missing from the ledger",
            "datamat.run.run:Run._resume",
            delete("self.__events.emit_part(receipt, is_resumed=True)"),
            "tests/faults/test_left_out.py::test_rows_of_a_reused_part_are_named",
        ),
        Defect(
            "policy-passed-by",
            "a dataset without the rows that an earlier run skipped counts as complete under errors='raise'",
            "datamat.run.run:Run._refuse_left_out",
            replace("not self.__wants_all or not __num_failed", "__num_failed >= 0"),
            "tests/run/test_bad_samples.py::test_rows_that_were_left_out_are_an_error_where_all_are_wanted",
        ),
        Defect(
            "stopped-run-passes-for-complete",
            "a script whose run stopped by its deadline ends with exit code 0",
            "datamat.run.report:RunReport.raise_if_incomplete",
            replace("not self.is_complete", "self.num_rows > self.num_rows_planned"),
            "tests/run/test_stops.py::test_script_of_a_stopped_run_exits_with_an_error",
        ),
        Defect(
            "native-threads-not-asked",
            "the caller is forked whatever threads its libraries run: workers of a program with polars hang",
            "datamat.parallel.processes:choose_start_method",
            replace("library_against_fork()", "None"),
            "tests/parallel/test_native_threads.py::test_thread_of_any_library_rules_out_fork",
        ),
        Defect(
            "fork-asked-for-in-silence",
            "a fork that the user asked for beside TensorFlow or polars hangs, and no warning says why",
            "datamat.parallel.executor:PathosExecutor._ready_dispatcher",
            replace("(danger := danger_of_fork()) is not None", "(danger := None) is not None"),
            "tests/parallel/test_native_threads.py::test_fork_that_was_asked_for_says_what_may_hang",
        ),
        Defect(
            "threads-of-openblas-spin",
            "every forked worker burns 40 ms of a core as it starts, in threads that nobody needs",
            "datamat.parallel.affinity:limit_loaded_libraries",
            delete("pause()"),
            "tests/parallel/test_native_threads.py::test_forked_worker_begins_with_no_thread_of_openblas",
        ),
        Defect(
            "directory-of-a-killed-server-stays",
            "a server that was killed with its program leaves a folder in /tmp: hundreds in a day of tests",
            "datamat.parallel.processes:Server._start",
            delete("_remove_leftovers(parent)"),
            "tests/parallel/test_servers.py::"
            "test_directory_of_a_server_that_was_killed_with_its_program_is_removed_by_the_next",
        ),
        Defect(
            "directory-of-a-terminated-start-stays",
            "a pool that is terminated while its server imports leaves a folder in /tmp",
            "datamat.parallel.processes:Server.remove_directory",
            replace("self._directory is not None", "False"),
            "tests/parallel/test_servers.py::test_pool_that_is_terminated_as_its_server_imports_leaves_no_directory",
        ),
        Defect(
            "chunk-fails-with-one-result",
            "one result that cannot be pickled fails hundreds of calls that travelled with it",
            "datamat.parallel.worker:_pack_outcomes",
            replace("errors[position] = pack_error(exc)", "raise"),
            "tests/parallel/test_streams.py::test_result_that_cannot_be_pickled_fails_its_own_item[fork-raises-100]",
        ),
        Defect(
            "chunk-fails-with-one-unreadable-result",
            "one result that cannot be unpickled in the parent fails hundreds of calls that travelled with it",
            "datamat.parallel.pickling:loads_results",
            replace("values = _load_each(file, len(content), failures)", "raise"),
            "tests/parallel/test_streams.py::test_result_that_cannot_be_unpickled_fails_its_own_item[fork-raises-100]",
        ),
        Defect(
            "result-loses-what-it-shares",
            "results behind one that cannot be unpickled get what another one holds",
            "datamat.parallel.pickling:_load_each",
            delete("unpickler.memo.update(dict.fromkeys(own))"),
            "tests/parallel/test_pickling.py::test_what_a_lost_result_shares_is_lost_with_it",
        ),
        Defect(
            "hook-asked-of-the-object",
            "an object that knows no attribute setup_worker, and raises KeyError, ends every worker that is forked",
            "datamat.parallel.worker:_set_up",
            replace('getattr(type(owner), "setup_worker", None)', 'getattr(owner, "setup_worker", None)'),
            "tests/parallel/test_objects.py::test_object_without_the_hook_needs_none[fork]",
        ),
        Defect(
            "chunk-fails-with-one-item",
            "one item that cannot be unpickled in the worker fails hundreds of calls that travel with it",
            "datamat.parallel.dispatcher:Dispatcher._take_answer",
            replace("kind == Reply.UNREAD and task.count > 1", "False"),
            "tests/parallel/test_promises.py::"
            "test_item_that_cannot_be_unpickled_fails_its_own_result[fork-raises-LookupError-map-7]",
        ),
        Defect(
            "items-unpickled-in-the-parent",
            "the chunk of a worker that died is unpickled in the parent, where it may kill again",
            "datamat.parallel.tasks:Task.parts",
            replace("self.arguments", "pickling.loads_data(self.payload)"),
            "tests/parallel/test_promises.py::"
            "test_item_that_cannot_be_unpickled_fails_its_own_result[fork-kills-WorkerDied-map-7]",
        ),
        Defect(
            "map-finds-leavings",
            "a map finds what an earlier map has left in the worker's copy of `self`",
            "datamat.parallel.tasks:_keeps_nothing",
            lambda keeps_nothing: lambda function: True,
            "tests/parallel/test_state.py::test_map_finds_nothing_of_an_earlier_map[forkserver-self]",
        ),
        Defect(
            "code-in-containers-not-searched",
            "a global that a function in a table uses is bound again, and calls see it or not depending on timing",
            "datamat.parallel.pickling:_use_of",
            replace("pickler.dump(value)", "type(value) is dict or pickler.dump(value)"),
            "tests/parallel/test_state.py::"
            "test_rebound_global_is_seen_wherever_the_code_is_that_uses_it[forkserver-by_table]",
        ),
        Defect(
            "idle-pool-keeps-globals",
            "a pool that has nothing to do keeps what the globals of its last function held",
            "datamat.parallel.tasks:FunctionTable.release",
            delete("remote.function = None"),
            "tests/parallel/test_state.py::test_function_of_a_map_is_freed_with_what_its_globals_held[forkserver-rate]",
        ),
        Defect(
            "ends-go-to-programs",
            "a program that a task starts keeps the sockets of the pool open",
            "datamat.parallel.worker:_hide_descriptors",
            lambda hide: lambda: None,
            "tests/parallel/test_descriptors.py::test_program_that_a_task_starts_has_no_end_of_the_pool[spawn]",
        ),
        Defect(
            "sub-interpreter-forks",
            "a pool in a sub-interpreter is forked, and ends with a ValueError",
            "datamat.parallel.processes:_is_in_subinterpreter",
            lambda is_in_subinterpreter: lambda: False,
            "tests/parallel/test_hosts.py::test_pool_in_a_sub_interpreter",
        ),
        Defect(
            "unread-queue-lost",
            "items that workers have put into a queue are lost if the pool ends before they are read",
            "datamat.parallel.workers:WorkerHandle.hold_up",
            replace("_HELD_UP_S", "0.0"),
            "tests/parallel/test_shared.py::test_queue_that_is_read_late_loses_nothing[fork]",
        ),
        Defect(
            "processes-of-modules-keep-a-server",
            "a server whose modules started a process of their own stays until the program ends",
            "datamat.parallel.processes:_ServerWatch._look",
            replace("_children() - self._others", "_children()"),
            "tests/parallel/test_servers.py::test_server_whose_modules_started_processes_ends_when_it_is_idle",
        ),
        Defect(
            "openmp-not-at-rest",
            "workers inherit the records of OpenMP's threads without the threads: they hang",
            "datamat.parallel.affinity:at_rest",
            delete("__pause(_OMP_PAUSE_SOFT)"),
            "tests/parallel/test_native_threads.py::test_libraries_that_survive_a_fork_are_forked[simsimd]",
        ),
        Defect(
            "step-of-another-task",
            "a task that kills its worker is blamed on the row that the task before it was at",
            "datamat.parallel.crash:CrashNote.step",
            replace("number == last", "True"),
            "tests/parallel/test_crash.py::test_number_step_and_stacks_outlive_the_worker[earlier task]",
        ),
        Defect(
            "registrations-left-behind",
            "workers that are not forked do not know which types users have registered: their results fail",
            "datamat.parallel.workers:WorkerGroup._prepare_launcher",
            replace("standins.registrations().items()", "()"),
            "tests/parallel/test_registered.py::test_results_are_made_in_the_caller[forkserver]",
        ),
        Defect(
            "one-for-each-place",
            "a connection that self has in two places is two connections in a forked worker",
            "datamat.parallel.unforkable:_put",
            replace("holder[key] = new[id(value)]", "holder[key] = type(value)(value.url)"),
            "tests/parallel/test_registered.py::test_what_self_holds_is_made_in_the_worker[fork-Connection]",
        ),
        Defect(
            "server-outlives-its-program",
            "a server whose program was killed stays, with all that it has imported, beside what a task has left",
            "datamat.parallel.processes:_ServerWatch._look",
            replace("os.getppid() != self._caller", "False"),
            "tests/parallel/test_servers.py::test_server_of_a_killed_program_ends[detaching_a_fork-None]",
        ),
        Defect(
            "unstarted-workers-hang",
            "a pool that gets no worker sleeps: callers wait for ever",
            "datamat.parallel.dispatcher:Dispatcher._has_work",
            replace(
                """
                if not self.__crew.handles:
                    return True
                """,
                """
                if not self.__crew.handles:
                    return self.broken is None
                """,
            ),
            "tests/parallel/test_scarcity.py::test_pool_that_gets_no_worker_says_why[forkserver]",
        ),
        Defect(
            "all-workers-or-none",
            "where the system has room for three workers of sixteen, there are none",
            "datamat.parallel.workers:WorkerGroup._fork_workers",
            replace(
                """
                if not self.continues_with_fewer(__exc):
                    raise
                """,
                "raise",
            ),
            "tests/parallel/test_scarcity.py::test_pool_continues_with_the_workers_that_could_be_started[fork]",
        ),
        Defect(
            "workers-of-another-process-joined",
            "a fork of a program with a live pool complains at exit about children that it does not have",
            "datamat.parallel.processes:start_process",
            delete("process.__children.discard(__child)"),
            "tests/parallel/test_hosts.py::test_server_that_forks_with_a_live_pool[fork]",
        ),
        Defect(
            "module-state-left-behind",
            "workers take what the file of a module says, not what the program has set",
            "datamat.fingerprint.memos:set_memo",
            replace("namespace[last] = value", "namespace.setdefault(last, value)"),
            "tests/run/test_module_state.py::test_what_code_reads_of_modules_is_set_in_a_worker[settings.K]",
        ),
        Defect(
            "module-state-not-compared",
            "a worker that has other code or values than the program goes to work",
            "datamat.run.module_state:ModuleState.settle",
            replace(
                """
                if __differing:
                    raise __error from cause
                """,
                """
                if False:
                    raise __error from cause
                """,
            ),
            "tests/run/test_module_state.py::test_what_differs_and_cannot_be_sent_is_named",
        ),
        Defect(
            "times-decide",
            "input files of which only the times changed count as changed: a fresh clone rebuilds everything",
            "datamat.plan.inputs:InputFiles.are_same",
            replace("__is_untouched or __content == content_digest(self.records(__start, __stop))", "__is_untouched"),
            "tests/plan/test_inputs.py::test_new_times_alone_rebuild_nothing",
        ),
        Defect(
            "version-of-what-is-loaded",
            "a program that has imported TensorFlow gets the version of its copy of zlib: all shards are rebuilt",
            "datamat.fingerprint.code:versions_of",
            replace("zlib_version()", "zlib.ZLIB_RUNTIME_VERSION"),
            "tests/fingerprint/test_library_versions.py::test_version_of_zlib_does_not_depend_on_what_else_is_loaded",
        ),
        Defect(
            "dataclass-not-looked-into",
            "items that are dataclasses with paths: an edit of such a file goes unnoticed",
            "datamat.directory.row_values:_parts_of",
            replace("[getattr(__item, __field.name, None) for __field in dataclasses.fields(__item)]", "()"),
            "tests/plan/test_inputs.py::test_an_edited_input_of_materialize_is_noticed[dataclass]",
        ),
        Defect(
            "array-by-position",
            "elements of an array of paths get their position as key: one more path rebuilds every shard",
            "datamat.writers.function:_items_of",
            replace("_is_map_style(__inputs) and not __is_text", "_is_map_style(__inputs)"),
            "tests/run/test_function.py::test_array_of_paths_has_the_keys_of_its_elements[str]",
        ),
        Defect(
            "unlisted-file-taken-for-datamats",
            "without .datamat, a features.json that the user wrote is moved away and replaced",
            "datamat.directory.sidecars.exporting:withdraw_sidecars",
            replace(
                "{__key: __value for __name, __text in __texts.items() if _content(output / __name) == __text}",
                "{__key: __value for __name, __text in __texts.items()}",
            ),
            "tests/directory/test_sidecars.py::"
            "test_file_of_the_user_is_left_alone_where_nothing_records_its_owner[{'seed': 1}]",
        ),
        Defect(
            "sidecar-outlives-shards",
            "a file of a user's sidecar describes shards that are gone, where its function is absent",
            "datamat.directory.sidecars.exporting:withdraw_sidecars",
            delete("_warn_of_edits(__output, _remove(__output, __a, __b), __logger)"),
            "tests/directory/test_sidecars.py::test_sidecars_are_gone_while_shards_are_replaced",
        ),
        Defect(
            "absent-sidecar-removed",
            "export takes away the files of every sidecar that it was not given",
            "datamat.directory.sidecars.exporting:_of_absent_sidecars",
            replace("__told.manifest == __described", "False"),
            "tests/directory/test_sidecars.py::test_whole_files_of_an_absent_sidecar_stay",
        ),
        Defect(
            "lost-rows-removed",
            "a file was deleted by mistake, and the next run removes its record",
            "datamat.plan.changes:find_loss",
            replace("_lost_rows(__planned, __manifest)", "[]"),
            "tests/run/test_rebuilds.py::test_update_refuses_to_remove_finished_rows[fewer]",
        ),
        Defect(
            "positions-taken-for-items",
            "other inputs take the place of the finished ones, whose keys are the same numbers",
            "datamat.plan.changes:find_loss",
            replace("not __same and _has_other_items(__planned, __manifest)", "False"),
            "tests/run/test_rebuilds.py::test_update_refuses_to_remove_finished_rows[other positions]",
        ),
        Defect(
            "all-rows-told",
            "a run that retries warns about all rows of a shard, although it makes only one of them again",
            "datamat.run.existing:judge_existing",
            replace("job.how.retry_failed", "False"),
            "tests/run/test_rebuilds.py::test_retried_rows_are_all_that_is_made_again[12]",
        ),
        Defect(
            "folder-called-tilde",
            "an output of ~/out makes a folder called ~ beside the program",
            "datamat.folders.local:expand_home",
            replace("os.path.expanduser(__text)", "__text"),
            "tests/run/test_materializer.py::test_tilde_means_the_home_folder[str]",
        ),
        Defect(
            "others-of-a-call-forgotten",
            "a worker dies, and the parts that it was to make in the same call are never made",
            "datamat.run.dispatch:PartQueue._lose",
            replace("self.add(task)", "self.add(task[:1])"),
            "tests/run/test_function.py::test_row_that_ends_the_worker_of_many_is_found",
        ),
        Defect(
            "remedy-of-another",
            "an error of materialize recommends run(retry_failed=True), which its caller does not have",
            "datamat.run.function:materialize",
            delete(
                '__made._job = dataclasses.replace(__made._job, remedies=Remedies("materialize(..., {})"), row_s=row_s)'
            ),
            "tests/run/test_function.py::test_items_that_failed_are_retried",
        ),
        Defect(
            "pandas-for-the-index",
            "arrays of Arrow are made by a call that imports pandas: half a second and 40 MB in each worker",
            "datamat.formats.arrays:binary_array",
            replace("lengths.sum() > MOST_ITEMS", "True"),
            "tests/test_imports.py::test_worker_that_writes_parquet_loads_no_pandas",
        ),
        Defect(
            "times-in-the-index",
            "the index holds the times of input files: a repair from a copy of the source gives other bytes",
            "datamat.run.publish:_input_columns",
            replace('"size"', '"stamp"'),
            "tests/run/test_repair.py::"
            "test_files_whose_times_alone_have_changed_are_repaired_to_the_same_bytes[False-index]",
        ),
        Defect(
            "renamed-file-is-a-dataset",
            "a single renamed file passes for a dataset of another name: a damaged directory is never repaired",
            "datamat.run.existing:_datasets_by_their_files",
            replace("__count == int(__number)", "__count"),
            "tests/run/test_repair.py::test_renamed_file_is_no_other_dataset",
        ),
        Defect(
            "blank-first-rows",
            "a field of paths is not found where the first rows have none: edits of its files go unnoticed",
            "datamat.sources.inputs:InputFinder._given",
            replace("ends[start : start + _PIECE_ROWS]", "ends[start : start + _LOOKED_AT]"),
            "tests/plan/test_inputs.py::test_a_field_whose_first_rows_are_blank_holds_files",
        ),
        Defect(
            "unread-attributes-count",
            "a training step that changes self.w rebuilds every shard",
            "datamat.fingerprint.objects:_method",
            replace("Reached(__owner, frozenset({__name}))", "__owner"),
            "tests/fingerprint/test_what_counts_of_self.py::test_of_self_only_what_is_read_counts",
        ),
        Defect(
            "bare-object-counts-whole",
            "an edit of the training loop rebuilds everything where the object has no attributes of its own",
            "datamat.fingerprint.objects:_reached",
            replace("__is_none and __kind.__getstate__ is _USUAL_STATE", "False"),
            "tests/fingerprint/test_what_counts_of_self.py::"
            "test_unused_methods_of_an_object_without_attributes_do_not_count[none]",
        ),
        Defect(
            "self-handed-on-unseen",
            "what a helper reads of self does not count: stale records stay",
            "datamat.fingerprint.code:_note_use",
            replace(
                """
                if __is_copy and __is_first and __is_read:
                    __body
                else:
                    __found.escapes = True
                """,
                """
                if __is_copy and __is_first and __is_read:
                    __body
                else:
                    __found.escapes = False
                """,
            ),
            "tests/fingerprint/test_what_counts_of_self.py::test_everything_counts_where_self_is_passed_on",
        ),
        Defect(
            "half-of-a-shared-thing",
            "a `Value` is put together in a worker where its lock has not arrived: all calls fail",
            "datamat.parallel.shared:rebuild",
            delete("""
                if any(type(__part) is type(__otherwise) for __part in __held):
                    return __otherwise
                """),
            "tests/parallel/test_shared.py::test_object_of_the_fork_context_names_the_context_to_make_it_in",
        ),
        Defect(
            "drawn-by-another-map",
            "a map begins with the chunks of another one: many items are sent before the cost of one is known",
            "datamat.parallel.dispatcher:Dispatcher._draw",
            replace("self.__sources[0].task_cost()", "self._cost"),
            "tests/parallel/test_streams.py::test_map_begins_with_one_item_whatever_ran_before_it",
        ),
        Defect(
            "closed-map-goes-on",
            "a map whose iterator was closed still yields the rest of a chunk that had arrived",
            "datamat.parallel.streams:ResultStream._chunks",
            delete("__results.clear()"),
            "tests/parallel/test_streams.py::test_closed_iterator_gives_nothing_more",
        ),
        Defect(
            "large-results-held",
            "a result stays in memory until the last one of its chunk is taken, however large it is",
            "datamat.parallel.streams:ResultStream._chunks",
            replace("_drain(__results) if __is_large else __results", "__results"),
            "tests/parallel/test_streams.py::test_result_that_was_taken_is_held_by_nobody_else",
        ),
        Defect(
            "pool-held-by-its-map",
            "a pool that nobody holds any more lives on, with its workers, while somebody holds the iterator of a map",
            "datamat.parallel.streams:ResultStream.__init__",
            replace("None if self.__is_drawn else __owner", "__owner"),
            "tests/parallel/test_collection.py::test_pool_may_go_before_the_results_of_its_map",
        ),
        Defect(
            "no-pickling-error",
            "a program that catches PicklingError, as other pools raise it, does not catch ours",
            "datamat.parallel.errors:UnpicklableError",
            replace("PicklingError", "ValueError"),
            "tests/parallel/test_objects.py::test_unpicklable_argument_is_caught_as_from_other_pools",
        ),
        Defect(
            "place-of-each-object",
            "the path of each object of self is worked out as it is pickled: 50,000 objects take for ever",
            "datamat.parallel.pickling:_TracingPickler.save",
            replace(
                "self.__stack.append(__obj)",
                """
                self.__stack.append(__obj)
                describe_path(self.__stack)
                """,
            ),
            "tests/parallel/test_pickling.py::test_work_grows_with_the_number_of_objects[True]",
        ),
        Defect(
            "dill-not-asked",
            "what dill can send, or a user has registered with it, cannot travel",
            "datamat.parallel.pickling:_rule_of",
            replace("__kind in dill.Pickler.dispatch or _is_array(__kind)", "_is_array(__kind)"),
            "tests/parallel/test_pickling.py::test_what_dill_sends_arrives[registered]",
        ),
        Defect(
            "first-submit-decides",
            "a change of `self` between two calls arrives or not, by chance: only while no call is under way",
            "datamat.parallel.tasks:FunctionTable.acquire",
            replace("__remote.digest != __digest", "not __remote.unfinished and __remote.digest != __digest"),
            "tests/parallel/test_state.py::test_call_is_made_with_self_as_it_was_when_submitted",
        ),
        Defect(
            "forks-draw-alike",
            "all forked workers draw the same numbers: every image gets the same augmentation",
            "datamat.parallel.worker:_renew_random_state",
            delete("numpy_random.seed()"),
            "tests/parallel/test_random.py::test_workers_draw_different_numbers",
        ),
        Defect(
            "metaclass-run-again",
            "a worker runs the user's metaclass on an empty body: KeyError",
            "datamat.parallel.byvalue:_library_part",
            replace("next(__base for __base in __metaclass.__mro__ if __base not in _ids)", "__metaclass"),
            "tests/parallel/test_byvalue.py::test_what_main_defines_is_the_same_in_workers[spawn]",
        ),
        Defect(
            "sent-home-by-a-name-of-its-own",
            "an instance of a class that the task has made a global comes home as one of None",
            "datamat.parallel.pickling:_Rules.goes_by_name",
            delete("""
                if self.to_parent and byvalue.is_new(__module, __name):
                    return False
                """),
            "tests/parallel/test_byvalue.py::test_what_main_defines_is_the_same_in_workers[spawn]",
        ),
        Defect(
            "another-file-mapped",
            "a worker maps the file that has taken the place of the one that the program has mapped",
            "datamat.parallel.arrays:_is_mapped",
            replace("__mapping is not None and __mapping.path == __expected", "__mapping is not None"),
            "tests/parallel/test_arrays.py::test_array_whose_file_has_other_content_is_copied[replaced]",
        ),
        Defect(
            "class-with-each-item",
            "the class of each item is pickled with it: 0.4 ms of the caller for a task, not 0.02",
            "datamat.parallel.pickling:_dumps",
            replace("None if __homewards else []", "None"),
            "tests/parallel/test_items.py::test_class_of_items_is_pickled_once",
        ),
        Defect(
            "interrupted-submit-held",
            "a Ctrl-C while the callable is pickled: it and its self are kept for the life of the pool",
            "datamat.parallel.executor:PathosExecutor.submit",
            replace(
                """
                __dispatcher.functions.release(__remote)
                raise
                """,
                "raise",
            ),
            "tests/parallel/test_promises.py::test_interrupt_while_the_callable_is_pickled_releases_it",
        ),
        Defect(
            "queue-copied",
            "what a call puts into a queue that it got as an argument is lost, silently",
            "datamat.parallel.pickling:dumps_items",
            delete("refuse_local(obj)"),
            "tests/parallel/test_strangers_habits.py::test_what_threads_wait_for_is_refused_as_an_argument[Queue0]",
        ),
        Defect(
            "threads-preloaded",
            "calls of a library that starts a thread when it is imported wait for ever under forkserver",
            "datamat.parallel.processes:serve",
            replace("library_against_fork(known=threads) is not None", "False"),
            "tests/parallel/test_servers.py::test_module_that_starts_a_thread_is_not_preloaded[thread]",
        ),
        Defect(
            "pickled-at-once",
            "each pending call holds a copy of its arguments: sixty calls with one array of 32 MB take 2 GB",
            "datamat.parallel.dispatcher:Dispatcher.submit",
            replace(
                "self.__waiting.extend(tasks)",
                "[task.pack(self.functions) for task in tasks]; self.__waiting.extend(tasks)",
            ),
            "tests/parallel/test_pending.py::test_pending_calls_are_not_pickled[fork-submit]",
        ),
        Defect(
            "large-arguments-ahead",
            "a hundred copies of a large argument wait at each worker",
            "datamat.parallel.workers:WorkerHandle.is_laden",
            lambda is_laden: property(lambda self: False),
            "tests/parallel/test_pending.py::test_large_arguments_are_not_sent_ahead[fork]",
        ),
        Defect(
            "pickled-under-the-lock",
            "two threads wait for each other: one pickles an object, the other submits under that object's lock",
            "datamat.parallel.tasks:FunctionTable.acquire",
            replace("digest = _digest(function, rows)", "with self._lock:\n    digest = _digest(function, rows)"),
            "tests/parallel/test_pending.py::"
            "test_no_lock_is_held_while_an_object_pickles_itself[later_call-forkserver]",
        ),
        Defect(
            "sent-is-running",
            "`shutdown(cancel_futures=True)` waits for all calls that were sent ahead",
            "datamat.parallel.dispatcher:Dispatcher._has_finished",
            delete("self.recall(lambda _: True)"),
            "tests/parallel/test_pending.py::test_shutdown_cancels_what_waits_at_a_worker[fork]",
        ),
        Defect(
            "foreign-feature-not-compared",
            "an edit of a feature type of the user's own goes unnoticed: shards keep what the old code encoded",
            "datamat.plan.digests:_schema_of",
            replace("[declared, found.digest] if types else declared", "declared"),
            "tests/features/test_foreign_features.py::test_edit_of_a_foreign_class_rebuilds",
        ),
        Defect(
            "block-without-checksum",
            "small records that are decoded together are not held to their checksums: a flipped bit is read as data",
            "datamat.formats.tfrecord:_decode_frames",
            replace("(_mask(found) == stored).all()", "True"),
            "tests/readers/test_blocks.py::test_no_flipped_bit_of_a_tfrecord_passes_a_block",
        ),
        Defect(
            "boxes-by-number",
            "a batch of `to_tf` cuts its boxes where a list of single numbers would end: records get those of others",
            "datamat.readers.tf.decode:_lists",
            replace("__per_item > 1", "False"),
            "tests/readers/test_tf.py::test_lists_decoded_in_blocks_are_those_of_single_samples",
        ),
        Defect(
            "orders-of-earlier-epochs",
            "an iterator of `to_tf` that is restored at the end of an epoch repeats orders that training has had",
            "datamat.readers.tf.shuffling:Seeds.saved_with",
            replace("self.shuffled(self.saved_beside(dataset), 1)", "dataset"),
            "tests/readers/test_tf_batches.py::test_epochs_after_the_restored_one_have_their_own_orders",
        ),
        Defect(
            "epoch-of-the-draw",
            "what Python reads for `to_tf` takes the number of a draw for that of the epoch: not NumPy's batches",
            "datamat.readers.tf.shuffling:Seeds.epoch",
            replace("draws.number(int(__drawn)) // self._num_users", "draws.number(int(__drawn))"),
            "tests/readers/test_tf_batches.py::test_batches_are_those_of_numpy[True-pad-tfrecord]",
        ),
        Defect(
            "batches-of-another-rank",
            "a checkpoint of `to_tf` holds batches that wait: restored by other ranks, records come twice",
            "datamat.readers.tf.graph:symbolic",
            replace("dataset.with_options(positions_only)", "dataset"),
            "tests/readers/test_tf_batches.py::test_state_between_the_last_steps_of_an_epoch",
        ),
        Defect(
            "member-for-each-block",
            "shuffled gzip shards inflate a member for each block that holds one of its records: ten times the work",
            "datamat.formats.tfrecord:GzipTFRecordFormat.read_block",
            replace("weakref.ref(__reader)", "(lambda: __reader)"),
            "tests/readers/test_blocks.py::test_each_gzip_member_is_inflated_once_an_epoch",
        ),
        Defect(
            "shards-closed-early",
            "random access opens a shard again for nearly every record, although there are descriptors for all",
            "datamat.readers.records:_most_open",
            replace("max(__limit // 8, 1)", "1"),
            "tests/readers/test_many_shards.py::test_no_shard_is_opened_twice_while_descriptors_last",
        ),
        Defect(
            "row-groups-one-by-one",
            "Parquet of large rows is read a row group at a time, which takes longer than decoding it",
            "datamat.formats.parquet:_ParquetReader._units",
            replace("self._group_bytes[group] <= room", "False"),
            "tests/readers/test_blocks.py::test_whole_row_groups_are_read_together",
        ),
        Defect(
            "block-lends-its-row-group",
            "arrays of a batch are the memory of a row group that is kept: who writes into one changes the next epoch",
            "datamat.formats.parquet:_of_its_own",
            replace("column.values.copy()", "column.values"),
            "tests/readers/test_blocks.py::test_values_belong_to_the_user",
        ),
        Defect(
            "block-in-order-of-shards",
            "records that were drawn from several shards come in the order of the shards, each under another's place",
            "datamat.formats.parquet:ParquetFormat.read_block",
            replace("join_blocks([piece for _, piece in found], back)", "join_blocks([piece for _, piece in found])"),
            "tests/readers/test_blocks.py::test_records_come_in_the_order_of_the_epoch",
        ),
        Defect(
            "head-of-an-entry-not-compared",
            "a list that claims to be longer than its feature is read from what follows it",
            "datamat.formats.example:_short_entry",
            replace(
                """kind is None or head[:begin] != _entry_heads(
                    b"\\n" + head[3:key_end] + b"\\x12", head[key_end + 2 : key_end + 3], size
                )""",
                "kind is None",
            ),
            "tests/formats/test_formats_example.py::test_decode_refuses_what_is_no_example",
        ),
        Defect(
            "sums-rounded",
            "statistics of floats depend on how records were divided into parts",
            "datamat.features.statistics:_exact_sums",
            replace("np.frexp(most)[1] + 14", "np.frexp(most)[1]"),
            "tests/run/test_statistics.py::test_sums_are_exact_in_any_order",
        ),
        Defect(
            "ragged-block-of-another-form",
            "a list without values gets a head in a block and none in a row: how rows were read shows in the bytes",
            "datamat.formats.example:_ragged_fields",
            replace("lengths > 0", "lengths >= 0"),
            "tests/formats/test_formats_block.py::test_encode_block_equals_single_records",
        ),
        Defect(
            "block-encodes-past-the-class",
            "a feature type with an encode of its own is stored in blocks by the method that it inherits",
            "datamat.features.base:Feature.__init_subclass__",
            replace("of_block not in vars(nearest)", "False"),
            "tests/writers/test_read_block.py::test_blocks_give_the_bytes_of_rows",
        ),
        Defect(
            "failed-block-loses-a-row",
            "a block fails, and its first row is not read again: a sample is missing, and nothing reports it",
            "datamat.run.part_task:PartTask._write",
            replace(
                "self._write_rows(self._spec.start + first, positions, None)",
                "self._write_rows(self._spec.start + first, positions[1:], None)",
            ),
            "tests/writers/test_read_block.py::test_blocks_that_fail_are_read_row_by_row",
        ),
        Defect(
            "gathered-sample-lent",
            "a read that fills the same array again for each row changes the samples that wait to be encoded",
            "datamat.plan.gather:SampleColumns._array",
            replace("value.tobytes()", "value"),
            "tests/run/test_small_rows.py::test_read_may_use_its_arrays_again",
        ),
        Defect(
            "json-in-the-order-given",
            "equal dicts are stored as other bytes: a shard that is made again is another file",
            "datamat.features.values:Json.encode",
            replace("to_json_text(value)", "json.dumps(value)"),
            "tests/features/test_features_values.py::test_equal_dicts_are_equal_bytes",
        ),
        Defect(
            "json-keys-turned-into-text",
            "a key that is a number reads back as text",
            "datamat.features.values:Json.encode",
            replace("json.loads(text) == value", "True"),
            "tests/features/test_features_values.py::test_what_json_cannot_hold_is_refused_with_its_place",
        ),
        Defect(
            "tokens-beyond-their-vocabulary",
            "an id that the vocabulary does not have wraps around and is stored as another token",
            "datamat.features.values:Tokens.encode",
            replace("(ids < low) | (ids > high)", "ids < low"),
            "tests/features/test_features_values.py::test_ids_that_are_no_tokens_are_refused_with_their_place",
        ),
        Defect(
            "generators-not-put-back",
            "a transform of torchvision seeds the generators of the training program, which then repeats itself",
            "datamat.transforms.seeding:RandomStreams.as_globals",
            replace("before.put_back()", "pass"),
            "tests/transforms/test_adapters.py::test_global_generators_follow_one_thread_at_a_time",
        ),
        Defect(
            "times-rounded",
            "nanoseconds of a time are dropped and nobody hears of it",
            "datamat.features.values:Timestamp._microseconds",
            replace("found.astype(value.dtype) != value", "False"),
            "tests/features/test_features_values.py::test_times_that_would_change_are_refused",
        ),
        Defect(
            "none-for-no-numbers",
            "an empty tensor that may be missing reads back as None",
            "datamat.features.nullable:Maybe.of_type",
            replace('one.kind in {"int64", "float32"} and None in one.sizes', "False"),
            "tests/features/test_features_of_others.py::test_columns_hold_the_values_there_are",
        ),
        Defect(
            "null-takes-the-next-value",
            "the values of a Parquet column with nulls move up into the rows that have none",
            "datamat.formats.arrow:ArrowColumn._taker_of_nullable",
            replace("places[rows][found]", "np.minimum(np.arange(len(is_there))[rows][found], len(there) - 1)"),
            "tests/features/test_features_of_others.py::test_missing_values_and_lists_survive[parquet]",
        ),
        Defect(
            "lists-out-of-step",
            "a list of dicts is stored with more boxes than labels",
            "datamat.features.schema:Features._check_lists",
            replace("len({str(count) for count in counts.values()}) > 1", "False"),
            "tests/features/test_features_of_others.py::test_dict_of_lists_is_taken_for_a_list_of_dicts",
        ),
        Defect(
            "bfloat16-cast",
            "NaN of a bfloat16 tensor comes back with other bits from Parquet and tar shards",
            "datamat.features.base:as_bfloat16",
            lambda found: lambda numbers: numbers.astype(found(numbers).dtype),
            "tests/features/test_features_values.py::test_bfloat16_comes_back_bit_for_bit",
        ),
        Defect(
            "columns-become-rows",
            "each row of a table becomes a Python object on its way to the workers: seconds for a million",
            "datamat.sources.rows:stored_rows",
            replace("isinstance(found, Rows)", "False"),
            "tests/writers/test_index_blocks.py::test_no_row_becomes_an_object_from_the_index_to_the_shard",
        ),
        Defect(
            "block-without-its-number",
            "messages about rows of a table name the row of its first block",
            "datamat.sources.store:RowStore._origins",
            replace("starts[places]", "np.asarray(positions, np.int64)"),
            "tests/writers/test_index_blocks.py::test_kinds_of_columns_may_differ_from_block_to_block",
        ),
        Defect(
            "generators-do-not-rest",
            "a row that looks at the state of random finds what the rows before it left",
            "datamat.transforms.seeding:GlobalDraws.rest",
            replace("self._resting != (seed, mark)", "self._resting is None"),
            "tests/run/test_small_rows.py::test_generators_that_rest_are_the_same_for_every_row",
        ),
        Defect(
            "late-draw-unseeded",
            "rows that draw from numpy.random after others that do not get other numbers than they would alone",
            "datamat.plan.pipeline:Pipeline.gather",
            replace("global_draws.mark() != mark", "False"),
            "tests/run/test_small_rows.py::test_rows_that_draw_now_and_then_get_their_own_numbers",
        ),
        Defect(
            "manifest-digest-unseen",
            "a manifest that somebody edited is accepted",
            "datamat.directory.manifest:_has_its_digest",
            lambda found: lambda content: True,
            "tests/directory/test_manifest.py::test_edited_manifest_is_read_only_for_examination",
        ),
        Defect(
            "digests-forgotten",
            "a run with nothing to do reads every input file again to compare it",
            "datamat.plan.inputs:InputFiles._recall",
            lambda found: lambda self: None,
            "tests/run/test_driver.py::test_run_with_nothing_to_do_opens_each_shard_twice",
        ),
        Defect(
            "flat-json-nested",
            "a dict in a dict is written on one line: equal values no longer give the bytes of earlier versions",
            "datamat.directory.files:_rendered",
            replace("isinstance(__part, (dict, list, tuple))", "isinstance(__part, (list, tuple))"),
            "tests/directory/test_files.py::test_json_is_rendered_as_by_the_standard_library",
        ),
        Defect(
            "chance-taken-for-none",
            "a copy that a transform left unchanged by chance is not drawn again: a shard holds the same record twice",
            "datamat.transforms.seeding:RandomStreams.decided_nothing",
            lambda found: lambda self, num_coins: True,
            "tests/transforms/test_copies.py::test_transform_that_draws_is_drawn_again",
        ),
        Defect(
            "copies-pile-up",
            "all copies of a row wait in memory for the last: a row with hundreds of them ends the worker",
            "datamat.run.part_task:_RowRecords.add",
            replace("self._num_bytes > _MOST_HELD_BYTES", "False"),
            "tests/transforms/test_copies.py::test_copies_do_not_pile_up_in_memory",
        ),
        Defect(
            "sample-lent-by-a-generator",
            "an augment that fills one array for all of its samples gets the last one's values into earlier records",
            "datamat.plan.pipeline:Pipeline._encoded",
            replace("value.copy() if isinstance(value, np.ndarray) else value", "value"),
            "tests/transforms/test_copies.py::test_samples_of_a_generator_are_stored_one_after_the_other",
        ),
        Defect(
            "statistics-lost-with-a-repair",
            "a run that takes over what a failed repair has prepared loses the statistics of a shard",
            "datamat.run.run:Run._judge",
            replace("info.statistics or known.statistics", "info.statistics"),
            "tests/run/test_repair.py::test_run_after_a_repair_that_failed_leaves_the_same_manifest",
        ),
        Defect(
            "repair-of-whole-shards",
            "one flipped bit has all rows of its shard made again, whatever parts of it are intact",
            "datamat.run.repair:_keep_intact_parts",
            lambda keep: lambda *_: None,
            "tests/run/test_repair.py::test_repair_reads_only_the_rows_of_the_damaged_part[tfrecord-flipped bit]",
        ),
        Defect(
            "left-out-unread",
            "a file that changes while it is read leaves its sample out by what it said before",
            "datamat.run.part_task:PartTask._made",
            replace("self._inputs is None or __settled", "self._inputs is None or not len(records) or __settled"),
            "tests/run/test_dropped.py::test_file_that_changes_while_it_leaves_a_sample_out_is_read_again",
        ),
        Defect(
            "left-out-copies-reused",
            "rows tried again beside copies that were left out: the manifest forgets how many there were",
            "datamat.plan.changes:find_reusable",
            replace("info.num_dropped_records", "False"),
            "tests/run/test_dropped.py::test_failures_beside_samples_that_are_left_out",
        ),
        Defect(
            "row-groups-forgotten",
            "load takes the default for the rows of a row group: larger ones are read again for every window",
            "datamat.readers.records:RecordFiles.groups",
            replace("max(found, __opened.group_records or 0)", "found"),
            "tests/readers/test_blocks.py::test_row_groups_of_another_size_are_shuffled_as_such",
        ),
        Defect(
            "large-value-untested",
            "the checksum of a picture's page is not compared: damaged ones are returned",
            "datamat.formats.parquet:_LargeValues._tested",
            replace("found != crc & 0xFFFF_FFFF", "False"),
            "tests/formats/test_formats_parquet.py::test_large_value_that_changes_later_is_noticed",
        ),
        Defect(
            "large-page-of-another-row",
            "a picture is looked up by the number of its page, though small ones share a page: it is another row's",
            "datamat.formats.parquet:_LargeValues.take",
            replace("row - (self._ends[page - 1] if page else 0)", "-1"),
            "tests/formats/test_formats_parquet.py::test_large_values_are_those_that_pyarrow_reads[noise]",
        ),
        Defect(
            "large-values-not-counted",
            "the footer of Parquet gives row groups the size of their small columns: offsets end before the pictures",
            "datamat.formats.parquet:_with_chunks",
            replace("_add(__group, (_GROUP_SIZE,), sum(__chunk[_CHUNK_SIZE][1] for __chunk in __chunks))", "pass"),
            "tests/formats/test_formats_parquet.py::test_offsets_cover_large_values",
        ),
        Defect(
            "row-groups-in-memory-last",
            "records in any order drop the row groups that the next ones are in: each is read for every block",
            "datamat.formats.parquet:ParquetFormat.read_block",
            replace("reader.kept(groups)", "[]"),
            "tests/formats/test_formats_parquet.py::test_row_groups_in_memory_come_first",
        ),
        Defect(
            "state-of-another-selection",
            "a state is taken for that of any selection of the same records: it resumes among others",
            "datamat.readers.views:Selection.digest",
            lambda digest: property(lambda self: ""),
            "tests/readers/test_views.py::test_states_belong_to_what_was_selected",
        ),
        Defect(
            "mix-begins-again",
            "each epoch of a mix begins with the same records: what one leaves over never comes",
            "datamat.readers.batches:Mixed.positions",
            replace("epoch * per_epoch + counts[mine]", "epoch * order.num_records + counts[mine]"),
            "tests/readers/test_views.py::test_mix_keeps_proportions_and_walks_through_each_dataset",
        ),
        Defect(
            "window-smaller-than-asked",
            "shuffle=N mixes four row groups of Parquet, however large N is",
            "datamat.readers.batches:Order.of",
            replace("several if window is None else window", "several if window is None else min(window, several)"),
            "tests/readers/test_views.py::test_window_on_parquet_mixes_as_many_records_as_it_says",
        ),
        Defect(
            "field-of-some-samples",
            "a field that a transform returns for some samples of a batch is uninitialised memory in the others",
            "datamat.readers.loader:BatchBuffer.put",
            replace("values.keys() != names", "False"),
            "tests/readers/test_batches.py::test_samples_of_a_batch_that_differ_in_their_fields_are_refused",
        ),
        Defect(
            "packed-rows-share-a-segment",
            "all records of a packed row have one segment id: attention crosses from each to the others",
            "datamat.readers.sequences:Packing.__call__",
            delete("count[row] += 1"),
            "tests/readers/test_sequences.py::test_packed_rows_hold_every_token_with_its_segment_and_position",
        ),
        Defect(
            "places-of-megatron-believed",
            "an index of Megatron-LM that does not fit its tokens is believed: documents begin inside others",
            "datamat.writers.megatron:_Pair._check_places",
            replace("(lengths < 0) | (starts != wanted)", "lengths < 0"),
            "tests/writers/test_megatron.py::test_file_that_does_not_fit_is_refused",
        ),
        Defect(
            "end-of-a-document-cut-off",
            "of records that are cut at the ends of rows, the last piece is never read: their last tokens are lost",
            "datamat.readers.sequences:_cut",
            replace("np.maximum(1, -(-(places + lengths) // size))", "np.maximum(1, (places + lengths) // size)"),
            "tests/readers/test_sequences.py::test_pieces_hold_every_token_once",
        ),
        Defect(
            "units-come-twice",
            "where fewer units than ranks are left, each of the ranks that share one has all of its records",
            "datamat.readers.batches:Position._job_of_units",
            replace("mine if mine.size else found[0][:, -1:]", "found[0]"),
            "tests/readers/test_sequences.py::test_units_resume_at_every_step_under_other_ranks",
        ),
        Defect(
            "sound-taken-for-a-video",
            "sound in MP4 and HEIC pictures are inferred to be videos, and refused",
            "datamat.features.video:video_extension",
            replace("data[8:12].startswith(brand)", "data[8:12] == brand == b'qt  '"),
            "tests/features/test_features_pictures.py::test_videos_are_known_by_their_first_bytes",
        ),
        Defect(
            "empty-list-taken-for-none",
            "an empty list of texts that may be missing reads back as None",
            "datamat.features.nullable:Nullable.encode",
            replace("np.ones(1, np.int64)", "np.ones(1 if value else 0, np.int64)"),
            "tests/features/test_compositions.py::test_columns_hold_every_composition",
        ),
        Defect(
            "later-task-counts",
            "of two tasks that uploaded a shard, the later one counts: it may lack rows of which the other has all",
            "datamat.run.slices:TaskSession.finish",
            replace('self._output.write(__name, __note, "create")', "self._output.write(__name, __note)"),
            "tests/run/test_claims.py::test_first_of_two_that_made_a_shard_counts",
        ),
        Defect(
            "tasks-upload-to-one-name",
            "a task that was stopped in an upload replaces a shard after the manifest that names another one",
            "datamat.run.upload:RemoteOutput.task",
            replace('self._mine if waits else ""', '""'),
            "tests/run/test_task_bucket.py::test_later_of_two_that_made_a_shard_does_not_count",
        ),
        Defect(
            "upload-without-condition",
            "an upload replaces an object that somebody has written since it was looked at",
            "datamat.run.upload:_sent",
            replace('ReplaceIf(before) if before else "create"', '"overwrite"'),
            "tests/run/test_upload.py::test_object_that_changes_meanwhile_is_not_replaced",
        ),
        Defect(
            "other-object-counts",
            "an object of somebody else, who was faster, counts as uploaded, and the local file is freed",
            "datamat.run.upload:_sent",
            replace("_holds(store, name, path)", "True"),
            "tests/run/test_upload.py::test_object_that_changes_meanwhile_is_not_replaced",
        ),
        Defect(
            "late-run-goes-on",
            "a run that another has published after goes on writing beside it",
            "datamat.directory.publication:check_published",
            lambda check: lambda folder, version: None,
            "tests/run/test_upload.py::test_of_two_that_publish_at_once_one_is_told",
        ),
        Defect(
            "live-run-swept",
            "a run with nothing to do deletes what another, which is alive, has uploaded",
            "datamat.run.upload:RemoteOutput.sweep",
            replace("self._left", "self._of_runs()"),
            "tests/run/test_upload.py::test_run_with_nothing_to_do_leaves_what_another_makes",
        ),
        Defect(
            "store-not-asked",
            "a shard that is gone from the store counts as uploaded: the manifest names what is not there",
            "datamat.run.upload:RemoteOutput._has_listed",
            lambda has: lambda self, info: True,
            "tests/run/test_upload.py::test_lost_object_is_made_again",
        ),
        Defect(
            "iterator-goes-on-in-a-fork",
            "an epoch that was begun before a fork waits in the child for threads that only the parent has",
            "datamat.parallel.process_role:refuse_in_fork",
            lambda refuse: lambda *_: None,
            "tests/parallel/test_strangers_habits.py::test_epoch_begun_before_a_fork_is_refused_in_it",
        ),
        Defect(
            "wrappers-are-asked-for-anything",
            "pickle asks a half-made wrapper for special methods, which asks itself without end",
            "datamat.parallel.pickling:_answers_to_any_name",
            lambda answers: lambda kind: False,
            "tests/parallel/test_strangers_habits.py::test_objects_that_answer_to_any_name_travel",
        ),
        Defect(
            "exit-handlers-of-tasks-dropped",
            "what a task has registered for the end of its process never runs",
            "datamat.parallel.worker:_run_exit_handlers",
            lambda run: lambda: None,
            "tests/parallel/test_strangers_habits.py::test_exit_handlers_of_tasks_run_and_those_of_the_parent_do_not",
        ),
        Defect(
            "started-processes-outlive-the-worker",
            "a worker that is killed leaves behind what its task has started",
            "datamat.parallel.worker:_lead_group",
            lambda lead: lambda *_: None,
            "tests/parallel/test_strangers_habits.py::test_what_a_task_has_started_ends_with_a_kill",
        ),
        Defect(
            "index-names-any-file",
            "an index file opens files outside of its own folder",
            "datamat.directory.files:path_inside",
            replace('".." in path.parts', "False"),
            "tests/writers/test_names_from_data.py::test_index_that_names_a_file_elsewhere_is_refused",
        ),
        Defect(
            "tables-may-chain-filesystems",
            "a table of URLs reads files of this machine by a chain of fsspec's",
            "datamat.folders.urls:url_of_table",
            replace('"::" in url', "False"),
            "tests/writers/test_names_from_data.py::test_table_uses_no_scheme_of_this_machine_and_no_chain",
        ),
        Defect(
            "archive-need-not-end",
            "a tar archive that was cut off, or damaged, loses the samples behind that place",
            "datamat.writers.tar:_after_the_end",
            lambda after: lambda path, end: None,
            "tests/writers/test_damaged_sources.py::test_archive_without_its_end_is_refused",
        ),
        Defect(
            "any-ratio-is-unpacked",
            "a small file fills the disk with what it unpacks to",
            "datamat.writers.unpacking:SpoolOptions.limited",
            replace("found > most", "False"),
            "tests/writers/test_damaged_sources.py::test_archive_of_any_ratio_is_unpacked_only_on_request",
        ),
        Defect(
            "arrow-is-trusted",
            "a damaged Arrow file makes Arrow read outside of its memory",
            "datamat.writers.arrow:ArrowFiles.read",
            delete("found.validate(full=True)"),
            "tests/writers/test_damaged_sources.py::test_offsets_of_arrow_that_lead_out_of_its_memory_are_refused",
        ),
        Defect(
            "broken-json-is-an-edit",
            "a damaged croissant.json counts as edited by its owner, and stays",
            "datamat.directory.sidecars.exporting:_is_broken",
            lambda broken: lambda name, content: False,
            "tests/directory/test_verify.py::test_edited_document_is_noted_and_a_broken_one_is_damage",
        ),
        Defect(
            "switches-not-set",
            "a worker computes with its own precision of decimal, and not with the caller's",
            "datamat.fingerprint.switches:Switches.set",
            lambda set_: lambda self: None,
            "tests/run/test_switches.py::test_switches_by_thread_are_those_of_the_caller",
        ),
        Defect(
            "memos-left-behind",
            "a worker fills the memos that the program has changed anew",
            "datamat.run.module_state:ModuleState._set_memos",
            delete("set_memo(__memo, __values[__memo], __main)"),
            "tests/run/test_memos.py::test_workers_have_what_the_program_has_put_into_memos[forkserver]",
        ),
        Defect(
            "memos-do-not-count",
            "what the program has put into a memo is no change for the next run",
            "datamat.plan.memos:KnownMemos.counting",
            lambda _: lambda self, given: {},
            "tests/run/test_memos.py::test_what_the_program_puts_there_is_a_change[global]",
        ),
        Defect(
            "filled-memos-forgotten",
            "a memo that the code has filled counts as a change: looking at a sample remakes everything",
            "datamat.plan.memos:KnownMemos.add",
            lambda _: lambda self, given, seen: None,
            "tests/run/test_memos.py::test_memo_that_the_code_fills_is_no_change[cache]",
        ),
        Defect(
            "caches-read-unseen",
            "results of another call are put into a worker's cache, by a Python that keeps them in another order",
            "datamat.fingerprint.memos:_are_told",
            lambda _: lambda: True,
            "tests/run/test_memos.py::test_cache_that_another_python_lays_out_differently_is_not_read[cache-none]",
        ),
        Defect(
            "memos-of-any-size",
            "a table of ten million entries in a global costs minutes in each process",
            "datamat.fingerprint.graph:content_of",
            replace("graph.grow(value, most=_MOST_VALUES)", "graph.grow(value)"),
            "tests/run/test_memos.py::test_memo_that_is_too_large_to_compare_is_named",
        ),
        Defect(
            "threads-state-unsaid",
            "what a threading.local holds is left behind without a word",
            "datamat.fingerprint.objects:held_here",
            lambda _: lambda value: "",
            "tests/fingerprint/test_unseen.py::test_what_code_depends_on_counts_or_is_named[what a thread has]",
        ),
        Defect(
            "estimate-pickles-the-writer-plainly",
            "estimate fails for a writer with a lock on an executor of the standard library",
            "datamat.run.estimate:estimate",
            replace(
                "executor.submit(functools.partial(measure_rows, __worker), samples)",
                "executor.submit(measure_rows, __worker, samples)",
            ),
            "tests/run/test_estimate.py::test_estimate_of_a_writer_with_a_lock_on_an_executor",
        ),
        Defect(
            "switches-do-not-count",
            "records that were made with another precision of decimal stay",
            "datamat.fingerprint.switches:Switches.counting",
            lambda counting: lambda self, packages: {},
            "tests/run/test_switches.py::test_switch_counts",
        ),
        Defect(
            "started-processes-outlive-the-program",
            "what a task has started goes on when the program is killed",
            "datamat.parallel.worker:_lead_group",
            replace("fcntl.fcntl(descriptor, fcntl.F_SETOWN, -pid)", "None"),
            "tests/parallel/test_strangers_habits.py::test_what_a_task_has_started_ends_with_a_kill",
        ),
        Defect(
            "hash-seed-by-chance",
            "each worker orders a set of texts in its own way: labels that are positions in it differ",
            "datamat.parallel.processes:_environment",
            lambda environment: lambda: dict(__import__("os").environ),
            "tests/run/test_hash_seed.py::test_hash_seed_is_the_same_in_all_workers",
        ),
        Defect(
            "call-in-the-worker-of-the-engine",
            "parts are made among the threads of an engine's worker, which draw from the generators of a sample",
            "datamat.parallel.engines:ArrivedFunction.__call__",
            replace("is_worker()", "True"),
            "tests/run/test_executors.py::test_other_threads_of_a_worker_change_nothing[threads]",
        ),
        Defect(
            "child-of-another-job",
            "a job has the process of the one before, with what that has left in libraries and modules",
            "datamat.parallel.engines:_Child.take",
            replace("child._job == function.job", "True"),
            "tests/parallel/test_engine_children.py::test_jobs_one_after_the_other_leave_few_children",
        ),
        Defect(
            "sets-by-fork",
            "workers are forked although records depend on the order of a set: a resumed run mixes two orders",
            "datamat.fingerprint.code:hashes",
            lambda hashes: lambda function: "",
            "tests/run/test_hash_seed.py::test_code_that_depends_on_hashes_is_not_forked",
        ),
        Defect(
            "unseen-lookups-unnamed",
            "records depend on `eval` or all of the environment, and nobody says that a change goes unnoticed",
            "datamat.fingerprint.code:unseen_of",
            lambda unseen_of: lambda code, names: iter(()),
            "tests/fingerprint/test_unseen.py::test_one_warning_names_all_of_it",
        ),
        Defect(
            "zone-does-not-count",
            "local times that were made in another time zone stay",
            "datamat.fingerprint.code:_goes_by_zone",
            lambda goes_by_zone: lambda code, loaded: False,
            "tests/fingerprint/test_unseen.py::test_what_code_depends_on_counts_or_is_named",
        ),
        Defect(
            "hidden-attributes-unnamed",
            "an attribute that pickling leaves out decides records of forked workers, and no run says so",
            "datamat.fingerprint.objects:hidden_in",
            lambda hidden_in: lambda found: iter(()),
            "tests/fingerprint/test_unseen.py::test_what_code_depends_on_counts_or_is_named",
        ),
        Defect(
            "opened-for-both-is-not-read",
            "`np.memmap(path)` opens for reading and writing: its file is not named",
            "datamat.plan.inputs:_WRITES",
            replace("os.O_WRONLY | os.O_CREAT", "os.O_WRONLY | os.O_RDWR | os.O_CREAT"),
            "tests/plan/test_opened.py::test_warning_covers_files_that_a_function_opens",
        ),
        Defect(
            "handler-lost-on-the-way-back",
            "a model that `fit` returns logs to nobody from then on",
            "datamat.parallel.logs:remote_handler",
            replace("isinstance(own, logging.Handler)", "False"),
            "tests/parallel/test_logs.py::test_result_has_the_loggers_and_handlers_of_the_caller[fork]",
        ),
        Defect(
            "descriptors-by-path",
            "a server that has given up the rights of root cannot send arrays that `self` holds",
            "datamat.parallel.channel:_shows_descriptors",
            lambda shows: lambda: True,
            "tests/parallel/test_hosts.py::test_process_that_nobody_may_look_into[fork]",
        ),
        Defect(
            "long-collections-passed-over",
            "a file that is being written, in a list of 1,500 objects that `self` holds, is written twice",
            "datamat.parallel.unforkable:_levels",
            replace(
                "gc.get_referents(*[each for each in holders if id(each) not in closed])",
                "gc.get_referents(*[each for each in holders if id(each) not in closed][-1000:])",
            ),
            "tests/parallel/test_strangers_habits.py::"
            "test_file_that_is_being_written_is_not_written_twice[fork-1500-list]",
        ),
        Defect(
            "swapped-shards",
            "two shards that were exchanged are read, one for the other",
            "datamat.readers.records:ShardOpener._refuse_other",
            lambda refuse: lambda *_, **__: None,
            "tests/readers/test_other_shards.py::test_sound_shard_of_another_version_is_refused",
        ),
        Defect(
            "offsets-of-another",
            "offsets of another shard lead to records that were never checked against the manifest",
            "datamat.readers.records:_tested",
            replace("part_of(content) != info.offsets", "False"),
            "tests/readers/test_dataset.py::test_offsets_that_lead_astray_are_noticed",
        ),
        Defect(
            "index-of-another",
            "the index of another dataset gives records the keys of others",
            "datamat.directory.index_files:read_index",
            replace("info is not None and not info.is_whole(path)", "False"),
            "tests/readers/test_other_shards.py::test_index_of_another_dataset_is_not_believed",
        ),
        Defect(
            "cache-waits-for-a-fifo",
            "a FIFO or folder with the name of a cached shard stops every reader",
            "datamat.readers.cache:_clear",
            lambda clear: lambda path: None,
            "tests/readers/test_cache.py::test_what_is_no_file_in_the_cache_is_replaced",
        ),
        Defect(
            "wide-tables-in-crumbs",
            "a table of 5,000 columns is cut into parts of three rows, and takes minutes",
            "datamat.plan.plan:make_plan",
            replace("num_columns // _COLUMNS_PER_ROW", "1"),
            "tests/plan/test_plan.py::test_parts_of_a_wide_table_have_many_rows",
        ),
        Defect(
            "foreign-shard-overwritten",
            "a file that somebody made by hand has the name of a shard, and a run replaces it",
            "datamat.run.targets:claim_names",
            replace("wanted - ours", "()"),
            "tests/run/test_targets.py::test_file_of_somebody_else_is_refused_by_name[shard]",
        ),
        Defect(
            "source-replaced-by-its-output",
            "a table is read from the folder that the run writes to, and is gone afterwards",
            "datamat.run.targets:refuse_own_source",
            replace("is_inside = _is_below(__a, __b)", "is_inside = False"),
            "tests/run/test_targets.py::test_output_is_never_its_own_source[output holds the source]",
        ),
        Defect(
            "validation-data-drawn",
            "validation and test data are flipped and cropped, too, unless copies names the splits",
            "datamat.plan.job:Job._drawn_splits",
            replace("[_TRAIN] if _TRAIN in splits else splits", "splits"),
            "tests/transforms/test_copies.py::test_splits_that_are_drawn[splits0-None-drawn0-transform]",
        ),
        Defect(
            "patients-in-both-splits",
            "rows of one patient are in the training and in the test data",
            "datamat.sources.writing:_RowWriter._split_codes",
            replace("self._groups is None", "True"),
            "tests/sources/test_groups.py::test_rows_of_a_group_share_a_split_and_new_groups_move_none",
        ),
        Defect(
            "left-aside-in-silence",
            "pictures of a kind that nothing reads are not in the dataset, and nothing says so",
            "datamat.writers.paths:files_below",
            replace("len(__found) == len(__visible)", "True"),
            "tests/writers/test_image_folder.py::test_files_that_are_left_aside_are_reported",
        ),
        Defect(
            "copies-without-partner",
            "the copies of a row find no partner, because tables hold the keys of rows",
            "datamat.readers.joining:_place_of",
            replace("RecordKey.row_of(__key)", "__key"),
            "tests/readers/test_joins.py::test_copies_of_a_row_have_one_partner[tfrecord]",
        ),
        Defect(
            "partners-of-blocks-mixed",
            "where partners are missing in a block, the records behind get the fields of others",
            "datamat.readers.records:Partner.block_at",
            replace("np.cumsum(__there) - 1", "np.arange(len(__there)) % np.count_nonzero(__there)"),
            "tests/readers/test_joins.py::test_records_without_partner[tfrecord]",
        ),
        Defect(
            "state-of-another-join",
            "a loader resumes in the records of another join, in whose order its state was not taken",
            "datamat.readers.views:Part.digest",
            replace("(__partner.digest for __partner in self.partners)", "()"),
            "tests/readers/test_joins.py::test_state_belongs_to_what_was_joined[tfrecord]",
        ),
        Defect(
            "pictures-compressed-again",
            "saved after map, a JPEG that no function has touched is decoded and compressed again",
            "datamat.run.convert:StoredView._mapped",
            replace("_is_same(__one, __other)", "False"),
            "tests/run/test_save.py::test_what_functions_make_is_saved",
        ),
        Defect(
            "headers-for-every-host",
            "a token for one server is sent to each host that a table of somebody else names",
            "datamat.folders.urls:options_for",
            replace("_origin_of(__url) == _origin_of(__trusted)", "True"),
            "tests/run/test_headers.py::test_headers_go_to_hosts_that_the_user_names[scheme]",
        ),
        Defect(
            "headers-follow-redirects",
            "a server that redirects hands the user's token to another",
            "datamat.folders.other:_with_timeout",
            replace("[_without_headers_elsewhere()]", "[]"),
            "tests/run/test_headers.py::test_redirects_to_another_host_carry_no_headers",
        ),
        Defect(
            "videos-cut-between-key-frames",
            "the video of an episode that does not begin with a key frame shows grey frames, or those before it",
            "datamat.features.video:stretch_of_video",
            replace("__packets[0].is_keyframe", "True"),
            "tests/writers/test_lerobot.py::test_video_that_begins_between_key_frames_is_decoded",
        ),
        Defect(
            "hidden-frames-counted",
            "frames of VP8 are those of other times: packets that hold none count",
            "datamat.features.video:_outline",
            replace("stream.codec.canonical_name in _SOUGHT", "True"),
            "tests/features/test_video.py::test_frames_that_are_sought_are_those_of_a_plain_loop[vp8, not sought]",
        ),
        Defect(
            "frames-of-another-episode",
            "files of two downloads lie in one folder, and an episode holds the frames of another",
            "datamat.writers.lerobot:EpisodesSource.__getitem__",
            replace("__numbers != {self._numbers[position]}", "False"),
            "tests/writers/test_lerobot.py::test_frames_of_another_episode_are_refused",
        ),
        Defect(
            "quaternions-taken-for-boxes",
            "four numbers in each step of an episode of TFDS are refused, for no box is beyond the edges",
            "datamat.writers.tfds:_feature_of",
            replace("kind == 'BBoxFeature' and not __depth", "isinstance(found, Tensor) and found.shape == (4,)"),
            "tests/writers/test_each.py::test_episode_is_a_record",
        ),
    )
}
