"""Each conformance test can fail: a plug-in with the very defect that it looks for does not pass it."""

import contextlib
import inspect
import itertools
import json
import os
import pathlib
import posixpath
import re
import threading
import urllib.parse
import uuid

import numpy as np
import pytest
from dict_folder import DictFolder
from lines_format import AssembledLines, LinesAssembler, LinesFormat, LinesWriter

from datamat import DatasetWriter, DataSource, Features, IndexRow, Scalar, Text, register_standin, testing
from datamat.directory.sidecars.tfds import tfds_entries
from datamat.errors import CorruptDataError, OutputError, SchemaError
from datamat.events import LimitReached, PartDone, RunEnded, RunStarted, ShardFinished
from datamat.features import ArrowType, Feature
from datamat.folders import AbsentError, Range
from datamat.formats import Offsets
from datamat.readers.tf import TfField, tf_field

# ---------------------------------------------------------------- dataset writers

COUNTER = itertools.count()


class Squares(DatasetWriter):
    """A correct writer."""

    name = "squares"
    features = Features({"square": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(source)]

    def read(self, row):
        return {"square": row.fields["n"] ** 2}


class OtherOrderEachTime(Squares):
    def index(self, source):
        rows = super().index(source)
        return rows[:: -1 if next(COUNTER) % 2 else 1]


class OtherType(Squares):
    def read(self, row):
        return {"square": str(row.fields["n"])}


class DependsOnTheProcess(Squares):
    def read(self, row):
        return {"square": os.getpid()}


class DependsOnTheRowsBefore(Squares):
    def __init__(self):
        self.seen = set()

    def read(self, row):
        self.seen.add(row.key)
        return {"square": len(self.seen)}


class DiffersFromRunToRun(Squares):
    def __init__(self):
        self.run = uuid.uuid4().hex

    def read(self, row):
        return {"square": row.fields["n"] + 0 * len(self.run)}


class BlockDiffersFromRead(Squares):
    def read_block(self, keys, fields):
        return {"square": fields["n"] ** 2 + 1}


class WriterTests(testing.DatasetWriterConformance):
    def __init__(self, writer=Squares):
        self.make_writer = writer

    def make_source(self, folder):
        return 12


# ---------------------------------------------------------------- data sources


class Takes(DataSource):
    """A correct source."""

    identity = "takes"

    def __len__(self):
        return 3

    def __getitem__(self, position):
        return {"number": position}


class OneKeyForAll(Takes):
    def keys_and_splits(self):
        return [("a", None)] * 3


class CountsItsCalls(Takes):
    def __init__(self):
        self.calls = 0

    def __getitem__(self, position):
        self.calls += 1
        return {"number": self.calls}


class DeclaresAnotherType(Takes):
    def __init__(self):
        self.features = {"number": Text()}


class IdentityOfTheMoment(Takes):
    def __init__(self):
        self.identity = uuid.uuid4().hex


class SourceTests(testing.DataSourceConformance):
    def __init__(self, source=Takes):
        self.make_source = source


# ---------------------------------------------------------------- executors


class Inline(testing.InlineExecutor):
    """A correct executor, whose call its defects replace."""

    def call(self, fn, /, *args, **kwargs):
        return fn(*args, **kwargs)

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(self.call, fn, *args, **kwargs)


class ChangesTheSeed(Inline):
    def call(self, fn, /, *args, **kwargs):
        with contextlib.suppress(AttributeError):
            object.__setattr__(fn.function.__self__._job.records, "seed", 7)
        return super().call(fn, *args, **kwargs)


class ResultsAreText(Inline):
    def call(self, fn, /, *args, **kwargs):
        return str(super().call(fn, *args, **kwargs))


class ErrorsAreText(Inline):
    def call(self, fn, /, *args, **kwargs):
        try:
            return super().call(fn, *args, **kwargs)
        except Exception as error:
            raise RuntimeError(str(error)) from None


class NoKeywords(Inline):
    def call(self, fn, /, *args, **kwargs):
        return super().call(fn, *args)


class RaisesInSubmit(Inline):
    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        future.result()
        return future


class OwnFutures(Inline):
    class Future:
        add_done_callback = cancel = lambda *_: None

    def submit(self, fn, /, *args, **kwargs):
        return self.Future()


class MapReverses(Inline):
    def map(self, fn, *iterables, timeout=None, chunksize=1):
        return reversed([*super().map(fn, *iterables)])


class NeverDown(Inline):
    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


class ExecutorTests(testing.ExecutorConformance):
    def __init__(self, executor=Inline):
        self.make_executor = executor


# ---------------------------------------------------------------- stand-ins


class Store:
    """Cannot be pickled: it holds a lock."""

    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()

    def __reduce__(self):
        raise TypeError("a store stays where it is")


class OtherStore(Store):
    pass


class OneWayStore(Store):
    pass


class UnsteadyStore(Store):
    pass


def open_away(path, pid):
    """Open a store in any process but one."""
    if os.getpid() == pid:
        raise RuntimeError("not here")
    return OneWayStore(path)


class StandinTests(testing.StandinConformance):
    def __init__(self, kind=Store):
        self.kind = kind

    def make_object(self):
        register_standin(Store, lambda store: (Store, (store.path,)))
        register_standin(OtherStore, lambda store: (OtherStore, (f"{store.path}/elsewhere",)))
        register_standin(OneWayStore, lambda store: (open_away, (store.path, os.getppid())))
        register_standin(UnsteadyStore, lambda store: (UnsteadyStore, (f"{store.path}{next(COUNTER)}",)))
        return self.kind("here")

    def use(self, thing):
        with thing.lock:
            return thing.path


@pytest.fixture(autouse=True)
def unregistered():
    """Restore the registered types."""
    yield
    for kind in (Store, OtherStore, OneWayStore, UnsteadyStore):
        register_standin(kind, None)


# ---------------------------------------------------------------- feature types


class Seconds(Feature):
    """A correct type: a duration in milliseconds, with an argument."""

    def __init__(self, limit=60.0):
        self.limit = limit

    def __eq__(self, other):
        return type(other) is type(self) and other.limit == self.limit

    def __hash__(self):
        return hash(self.limit)

    @property
    def type(self):
        return ArrowType("int64")

    def value_type(self):
        return "float64", ()

    def encode(self, value):
        if not isinstance(value, float | int) or value > self.limit:
            raise SchemaError(f"the field holds {value!r}; want at most {self.limit} seconds")
        return np.array([round(value * 1000)])

    def decode(self, column):
        return np.float64(column[0] / 1000)

    def arguments(self):
        return {"limit": self.limit}


class OtherColumns(Seconds):
    @property
    def type(self):
        return ArrowType("float32")


class DecodesToOtherType(Seconds):
    def decode(self, column):
        return np.float32(super().decode(column))


class StoredAgainWithinRounding(Seconds):
    def encoded_value(self, column):
        return round(self.decode(column))


class NeverEqual(Seconds):
    def __eq__(self, other):
        return self is other

    __hash__ = Seconds.__hash__


class ForgetsItsArgument(Seconds):
    def arguments(self):
        return {}


class RaisesAnything(Seconds):
    def encode(self, value):
        return np.array([round(value * 1000)])


class DecodesOnce(Seconds):
    def decode_into(self, column, out, *, are_intact=False):
        return super().decode_into(column, out, are_intact=are_intact) + 1


class EncodesBlocksInSeconds(Seconds):
    def encode_many(self, values):
        return np.array([round(value) for value in values])


class OtherInBlocks(Seconds):
    def decode_many(self, column):
        return np.array([row[0] for row in column.rows()]) / 999


class UnknownToTfds(Seconds):
    pass


tfds_entries.register(UnknownToTfds)(lambda feature, name: {})


class OtherInTensorFlow(Seconds):
    pass


def in_thousandths(name, columns):
    import tensorflow as tf

    return tf.cast(columns[name][0], tf.float64)


tf_field.register(OtherInTensorFlow)(lambda _: TfField("float64", (), in_thousandths))


class FeatureTests(testing.FeatureConformance):
    def __init__(self, feature=Seconds):
        self.feature = feature

    def make_feature(self):
        return self.feature(30.0)

    def make_values(self):
        return [0.0, 1.234, 30.0]


# ---------------------------------------------------------------- sidecars


def list_shards(manifest):
    """A correct sidecar."""
    return {"SHARDS": "\n".join(info.file for info in manifest.all_files).encode()}


def for_no_format(manifest):
    return {}


def knows_the_time(manifest):
    return {"SHARDS": uuid.uuid4().bytes}


class RemembersTheFirst:
    def __init__(self):
        self.known = {}

    def __call__(self, manifest):
        return self.known.setdefault(manifest.all_files[0].file.partition(".")[2], list_shards(manifest))


class SidecarTests(testing.SidecarConformance):
    def __init__(self, sidecar=list_shards):
        self.sidecar = sidecar

    def make_sidecar(self):
        return self.sidecar() if isinstance(self.sidecar, type) else self.sidecar


# ---------------------------------------------------------------- folders


class FolderTests(testing.FolderConformance):
    secrets = ("sesame",)

    def __init__(self, folder=DictFolder):
        self.folder = folder

    def make_folder(self, files, tmp_path):
        return self.folder(dict(files))


class CountsOneMore(DictFolder):
    def stat(self, name):
        found = super().stat(name)
        return found and found._replace(num_bytes=found.num_bytes + 1)


class CutsLongFiles(DictFolder):
    def blocks(self, name, max_bytes):
        yield self.content(name)[:max_bytes]


class CutsRanges(DictFolder):
    def read_range(self, name, start, stop):
        return Range(self.content(name)[start:stop], self.stat(name).version)


class RangesOfAnyVersion(DictFolder):
    def read_range(self, name, start, stop):
        return super().read_range(name, start, stop)._replace(version="same")


class CallsAbsentBroken(DictFolder):
    def content(self, name):
        try:
            return super().content(name)
        except AbsentError as error:
            raise OutputError(str(error)) from None


class ListsAllBelow(DictFolder):
    def list(self, below="", *, deep=False):
        return super().list(below, deep=True)


class IsItsOwnChild(DictFolder):
    def child(self, name):
        return self


class TakesAnyName(DictFolder):
    def content(self, name):
        return self.files.get(posixpath.normpath(f"{self.below}{name}"), b"")


class DecodesNames(DictFolder):
    def content(self, name):
        return super().content(urllib.parse.unquote(name))


class HasFilesAlone(DictFolder):
    def local_path(self, name=""):
        return pathlib.Path(__file__) if name else None


class ShowsSecrets(DictFolder):
    def __str__(self):
        return f"dict://me:sesame@{self.below}"


class KeepsItsProcess(DictFolder):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.pid = os.getpid()

    def content(self, name):
        assert os.getpid() == self.pid
        return super().content(name)


class KeepsItsVersion(DictFolder):
    numbers = itertools.repeat(1)


class WritesHalfOfIt(DictFolder):
    def write(self, name, content, mode="overwrite"):
        return super().write(name, content[: len(content) // 2], mode)


class NeverRefuses(DictFolder):
    def write(self, name, content, mode="overwrite"):
        return super().write(name, content)


class CutsLongFilesOfTheDisk(DictFolder):
    def write_file(self, name, path, mode="overwrite"):
        return self.write(name, pathlib.Path(path).read_bytes()[: 1 << 20], mode)


class MovesInPlaceOfCopying(DictFolder):
    def copy(self, name, target):
        super().copy(name, target)
        self.delete(name)


class DeletesFolders(DictFolder):
    def delete(self, name):
        for one in [one for one in self.files if one.startswith(name.rpartition("/")[0])]:
            del self.files[one]


class ClaimsToBeShared(DictFolder):
    is_private = False


# ---------------------------------------------------------------- run hooks


class Counts:
    """A correct hook."""

    num_parts = 0

    def __call__(self, event):
        if isinstance(event, PartDone):
            self.num_parts += 1


class WritesIntoTheOutput(Counts):
    def __call__(self, event):
        if isinstance(event, RunStarted):
            self.output = event.output
        if isinstance(event, ShardFinished):
            (self.output / "log.txt").write_text(str(event))


class HearsOneRun(Counts):
    def __call__(self, event):
        if isinstance(event, RunEnded):
            del self.num_parts
        super().__call__(event)


class WantsAReport(Counts):
    def __call__(self, event):
        if isinstance(event, RunEnded):
            print(event.report.num_rows)


class WantsNoLimit(Counts):
    def __call__(self, event):
        if isinstance(event, LimitReached):
            raise RuntimeError(event.limit)


class HookTests(testing.HookConformance):
    def __init__(self, hook=Counts):
        self.make_hook = hook


# ---------------------------------------------------------------- shard formats


class Lines(LinesFormat):
    """A correct format, in pieces that its defects replace."""

    def decoded(self, record):
        return record

    def read_record(self, buffer, skip=0):
        return self.decoded(super().read_record(buffer, skip))


class WritesAtTheEnd(Lines):
    class Writer(LinesWriter):
        def __init__(self, file, columns):
            super().__init__(file, columns)
            self.held = []

        @property
        def num_records(self):
            return len(self.held) + super().num_records

        def append(self, record):
            self.held.append(record)

        def finish(self):
            for record in self.held:
                super().append(record)
            self.held = []
            return super().finish()

    def writer(self, file, columns):
        return self.Writer(file, columns)


class LosesText(Lines):
    def decoded(self, record):
        return {**record, "value": [value[:100] for value in record["value"]]} if "value" in record else record


class RefusesNothing(Lines):
    def read_file(self, file, *, path):
        records = [*super().read_file(file, path=path)]
        if not records:
            raise CorruptDataError(f"{path}: record 0 at byte 0: no records")
        return iter(records)


class ReadsBackwards(Lines):
    def read_file(self, file, *, path):
        return reversed([*super().read_file(file, path=path)])


class OffsetsBehindTheRecords(Lines):
    class Writer(LinesWriter):
        def finish(self):
            offsets = super().finish()
            return Offsets(offsets.offset + np.uint64(1), offsets.size)

    def writer(self, file, columns):
        return self.Writer(file, columns)


class AlwaysTheFirst(Lines):
    def reader(self, path, spans):
        reader = super().reader(path, spans)
        reader.read = lambda number, read=reader.read: read(0)
        return reader


class KeysArePaths(Lines):
    def decoded(self, record):
        return {**record, "key": [os.path.normpath(record["key"][0].decode()).encode()]}


class PartsAreNumbered(Lines):
    class Writer(LinesWriter):
        def append(self, record):
            super().append({**record, "boxes": record["boxes"] + self.num_records} if "boxes" in record else record)

    def writer(self, file, columns):
        return self.Writer(file, columns)


class BlocksBackwards(Lines):
    class Writer(LinesWriter):
        def append_block(self, columns):
            super().append_block({name: values[::-1] for name, values in columns.items()})

    def writer(self, file, columns):
        return self.Writer(file, columns)


class TornLineIsPassedOver(Lines):
    def read_file(self, file, *, path):
        with contextlib.suppress(CorruptDataError):
            yield from super().read_file(file, path=path)


class ClaimsChecksums(Lines):
    has_checksums = True

    def read_record(self, buffer, skip=0):
        record = json.loads(bytes(buffer)[9:] or "{}")
        return {name: np.frombuffer(repr(value).encode(), np.uint8) for name, value in record.items()}


class ErrorWithoutPlace(Lines):
    def read_file(self, file, *, path):
        try:
            yield from super().read_file(file, path=path)
        except CorruptDataError:
            raise CorruptDataError("bad checksum") from None


class TakesAnything(Lines):
    class Writer(LinesWriter):
        def append(self, record):
            with contextlib.suppress(SchemaError):
                super().append(record)

    def writer(self, file, columns):
        return self.Writer(file, columns)


class RefusesListsOfBytes(Lines):
    class Writer(LinesWriter):
        def append(self, record):
            if isinstance(record["key"], list):
                raise SchemaError("column 'key' holds list")
            super().append(record)

    def writer(self, file, columns):
        return self.Writer(file, columns)


class OptionsAreNoJson(Lines):
    def options(self):
        return {"level": (1, 2)}


class WantsAnEmptyPlace(AssembledLines):
    def assembler(self, path):
        if pathlib.Path(path).exists():
            raise FileExistsError(path)
        return super().assembler(path)


class TakesTornParts(AssembledLines):
    def assembler(self, path):
        return LinesAssembler(path, takes_torn=True)


class FormatTests(testing.ShardFormatConformance):
    shows_missing_tail = False

    def __init__(self, shard_format=Lines):
        self.make_format = shard_format


# ---------------------------------------------------------------- the tests

DEFECTS = {
    WriterTests: {
        "test_index_is_the_same_each_time": (OtherOrderEachTime, "index, called a second time: .*'000'"),
        "test_every_row_is_stored": (OtherType, "field 'square'"),
        "test_records_do_not_depend_on_workers": (DependsOnTheProcess, "files of two workers.*: found '"),
        "test_records_do_not_depend_on_other_rows": (DependsOnTheRowsBefore, "record '.*', read alone: 'square': "),
        "test_second_run_has_nothing_to_do": (DiffersFromRunToRun, "second run: found "),
        "test_read_block_agrees_with_read": (BlockDiffersFromRead, "samples from read_block.* entry 0: 'square'"),
    },
    SourceTests: {
        "test_keys_and_splits_are_the_same_each_time": (OneKeyForAll, "distinct keys: found 1, expected 3"),
        "test_samples_do_not_depend_on_order_or_process": (CountsItsCalls, "samples of a copy, .*'number': found"),
        "test_every_sample_is_stored": (DeclaresAnotherType, "field 'number'"),
        "test_second_run_has_nothing_to_do": (IdentityOfTheMoment, "second run: found "),
    },
    ExecutorTests: {
        "test_run_has_the_same_bytes": (ChangesTheSeed, "files, compared with those of datamat's worker: "),
        "test_row_that_fails_fails_alone": (ResultsAreText, "'str' object"),
        "test_failed_run_names_the_row_and_can_be_continued": (
            ErrorsAreText,
            "found RuntimeError.*expected SampleError",
        ),
        "test_method_and_arguments_arrive": (NoKeywords, "result of a method of an object: "),
        "test_error_is_the_futures_own": (RaisesInSubmit, "division by zero"),
        "test_futures_can_be_waited_for": (OwnFutures, "submit: found .* expected concurrent.futures.Future"),
        "test_map_keeps_the_order": (MapReverses, "results of map: entry 0: found 1, expected 100"),
        "test_shutdown_ends_what_was_submitted": (NeverDown, "submit after shutdown: found no error"),
    },
    StandinTests: {
        "test_object_on_self_works_in_a_worker": (OtherStore, "fork: result of `use` in a worker: found 'here/else"),
        "test_object_travels_as_argument_and_result": (OneWayStore, "not here"),
        "test_reduce_is_the_same_each_time": (UnsteadyStore, "reduce, called twice: found"),
    },
    FeatureTests: {
        "test_columns_are_as_declared": (OtherColumns, "want a 1-D float32 array"),
        "test_value_is_decoded_as_declared": (
            DecodesToOtherType,
            "decoded 0.0: dtype: found 'float32', expected 'float",
        ),
        "test_decoded_value_can_be_stored_again": (
            StoredAgainWithinRounding,
            "columns of 1.234, stored again: 'value'",
        ),
        "test_equal_features_encode_equally": (NeverEqual, "pickled feature: .* expected it to be equal"),
        "test_block_equals_its_values": (EncodesBlocksInSeconds, "columns of 1.234, in a block: 'value'"),
        "test_declaration_survives_the_manifest": (ForgetsItsArgument, "feature from its JSON: .* expected it to be"),
        "test_wrong_value_is_refused": (
            RaisesAnything,
            "encode of <object .*: found TypeError.*, expected SchemaError",
        ),
        "test_value_survives_every_format": (OtherInBlocks, "tfrecord: values, as a block: entry 1: found"),
        "test_value_survives_a_run": (DecodesOnce, "values, one by one: entry 0: found"),
        "test_sidecars_describe_its_columns": (UnknownToTfds, "columns with an entry for TFDS: found set"),
        "test_tf_data_gives_the_same_values": (OtherInTensorFlow, "values of tf.data: entry 1: found"),
    },
    SidecarTests: {
        "test_a_run_writes_its_files": (for_no_format, "found no file for any of tfrecord, .*expected one"),
        "test_files_do_not_depend_on_time_and_place": (knows_the_time, "tfrecord: files of a second directory"),
        "test_files_follow_the_shards": (RemembersTheFirst, "tfrecord: files after a change.*'SHARDS'"),
    },
    HookTests: {
        "test_run_has_the_same_bytes": (WritesIntoTheOutput, "files with the hook.*'log.txt'"),
        "test_good_run_is_heard_without_an_error": (HearsOneRun, "errors of the hook: .*RunEnded.*num_parts"),
        "test_rows_that_fail_are_heard_without_an_error": (WantsAReport, "errors of the hook: .*RunEnded.*NoneType"),
        "test_run_that_is_stopped_is_heard_without_an_error": (WantsNoLimit, "errors of the hook: .*LimitReached"),
    },
    FormatTests: {
        "test_every_feature_type_survives": (LosesText, "text: records of the file: entry 3: 'value'"),
        "test_shard_without_records_is_valid": (RefusesNothing, "no records"),
        "test_records_keep_their_order": (ReadsBackwards, "keys of five parts: entry 0: found 'sample 00199'"),
        "test_offsets_cover_every_record": (OffsetsBehindTheRecords, "offsets: found a record that ends at"),
        "test_records_are_read_in_any_order": (AlwaysTheFirst, "records read in four threads: entry 0: "),
        "test_odd_keys_survive": (KeysArePaths, "keys: entry 4: found 'etc/passwd'|keys: entry .: "),
        "test_cuts_between_parts_do_not_show": (PartsAreNumbered, "shard of 4 parts: records: entry .*'boxes'"),
        "test_blocks_and_single_records_make_the_same_shard": (BlocksBackwards, "bytes of blocks, compared"),
        "test_truncated_file_is_noticed": (TornLineIsPassedOver, "file of .* bytes, cut to .*: found no error"),
        "test_no_record_is_read_wrong": (ClaimsChecksums, "records of a file with a flipped bit in byte|flipped bits"),
        "test_other_files_are_refused": (ErrorWithoutPlace, "found the message 'bad checksum', expected 'other' in it"),
        "test_wrong_record_is_refused_and_leaves_no_trace": (TakesAnything, "append of a wrong record: found no error"),
        "test_arrays_of_a_record_may_be_filled_again": (WritesAtTheEnd, "bytes of a part from reused arrays"),
        "test_records_can_be_written_as_they_were_read": (RefusesListsOfBytes, "column 'key' holds list"),
        "test_equal_formats_write_equal_bytes": (OptionsAreNoJson, "options, through JSON: 'level'"),
        "test_part_can_be_assembled_again": (WantsAnEmptyPlace, "FileExistsError"),
        "test_torn_part_is_refused": (TakesTornParts, "add of a truncated part: found no error"),
    },
    FolderTests: {
        "test_files_are_read": (CountsOneMore, "manifest.json: size"),
        "test_file_that_is_too_long_is_refused": (CutsLongFiles, "a file of 2 bytes that may have 1: found no error"),
        "test_range_is_exactly_what_was_asked_for": (CutsRanges, "found no error"),
        "test_range_says_its_version": (RangesOfAnyVersion, "version of a range: found 'same'"),
        "test_file_that_is_not_there_is_said_to_be_absent": (CallsAbsentBroken, "nothing, which is not there"),
        "test_names_are_listed": (ListsAllBelow, "names: "),
        "test_folder_in_a_folder_holds_its_files": (IsItsOwnChild, "deep/er is not there"),
        "test_names_do_not_leave_the_folder": (TakesAnyName, "the name '../manifest.json': found no error"),
        "test_odd_names_are_names": (DecodesNames, "a b"),
        "test_local_path_leads_to_the_file": (HasFilesAlone, "not of both"),
        "test_copy_reads_and_shows_no_secret": (ShowsSecrets, "sesame"),
        "test_forked_process_reads": (KeepsItsProcess, "exit code 1"),
        "test_written_file_is_there": (KeepsItsVersion, "distinct versions"),
        "test_file_is_whole_whenever_it_is_read": (WritesHalfOfIt, "bytes of a file while it is replaced"),
        "test_file_is_created_once": (NeverRefuses, "a second creation: found no error"),
        "test_version_is_replaced_once": (NeverRefuses, "a replacement of the version .*: found no error"),
        "test_file_of_the_disk_is_written": (CutsLongFilesOfTheDisk, "large: size"),
        "test_file_is_copied": (MovesInPlaceOfCopying, "cannot be copied"),
        "test_file_is_deleted": (DeletesFolders, "names after one was deleted"),
        "test_forked_process_writes": (ClaimsToBeShared, "of a child is not there"),
    },
}


CLASSES = [name for name in testing.__all__ if name.endswith("Conformance")]


def outcome(conformance, name, folder):
    """Return what one test finds wrong with a plug-in, or nothing."""
    test = getattr(conformance, name)
    known = {"tmp_path": folder, "case": "text", "format_name": "tfrecord", "start_method": "fork"}
    try:
        test(**{name: known[name] for name in inspect.signature(test).parameters})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.sample(2)
@pytest.mark.timeout(300)  # some start workers several times
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.long] if "_tf_" in name else [])  # it imports TensorFlow
        for kind, tests in DEFECTS.items()
        for name in tests
    ],
)
def test_plug_in_with_a_defect_fails(tmp_path, request, kind, name):
    """The error says where, what was found and what was expected; in the long tier, the correct plug-in passes."""
    plug_in, message = DEFECTS[kind][name]
    right = [AssembledLines] if AssembledLines in getattr(plug_in, "__mro__", ()) else []
    for folder in ("wrong", "right"):
        (tmp_path / folder).mkdir()

    found = outcome(kind(plug_in), name, tmp_path / "wrong")

    assert re.search(message, found), found
    # the correct format makes no claim about checksums
    if plug_in is not ClaimsChecksums and not request.config.getoption("--commit"):
        assert outcome(kind(*right), name, tmp_path / "right") == ""


@pytest.mark.parametrize("kind", DEFECTS)
def test_each_conformance_test_has_a_defect_that_it_finds(kind):
    """No conformance test is unable to fail."""
    assert {name for name in dir(kind) if name.startswith("test_")} == set(DEFECTS[kind])


def test_each_conformance_class_is_covered_here():
    """So is one that is shipped later."""
    assert {kind.__mro__[1].__name__ for kind in DEFECTS} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_class_says_what_to_define(name):
    """A subclass that defines nothing learns which method is missing."""
    made = next(member for member in dir(getattr(testing, name)) if member.startswith("make_"))
    method = getattr(getattr(testing, name)(), made)

    with pytest.raises(NotImplementedError, match=f"{name}: define {made}"):
        method(*(None for _ in inspect.signature(method).parameters))
