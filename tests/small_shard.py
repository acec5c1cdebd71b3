"""A small shard and its parts, written as workers do: shared by tests of parts and of shards."""

import dataclasses
import importlib.util

from lines_format import AssembledLines

from datamat import Features, Text
from datamat.formats import get_format
from datamat.plan.plan import PartSpec, ShardSpec
from datamat.run.growing import GrowingShard
from datamat.run.parts import PartWriter, ShardEnd
from datamat.run.receipts import Outcome
from datamat.run.shards import ShardBuilder, begin_run

SIZES = [2, 1, 3, 0, 2]
"""Records of each part; a transform may give none for a row."""
FEATURES = Features({"text": Text()})
FORMATS = [("tfrecord",), ("tfrecord", "webdataset"), ("parquet",), ("assembled", "tfrecord")]
"""One format; several that join their parts; one with a footer; and one whose parts stay apart, beside another."""
if importlib.util.find_spec("array_record"):
    FORMATS.insert(1, ("arrayrecord",))  # whose parts end with padding


def make_spec(sizes=SIZES, fingerprint="f1"):
    """Return a shard of parts of two rows each."""
    parts = tuple(
        PartSpec(
            "data-train-00000-of-00001", number, 2 * number, 2 * number + 2, 100, 1, False, fingerprint, len(sizes)
        )
        for number in range(len(sizes))
    )
    return ShardSpec("data-train-00000-of-00001", "train", 0, fingerprint, parts)


def formats_of(names):
    made = [AssembledLines() if name == "assembled" else get_format(name) for name in names]
    return tuple(shard_format.with_features(FEATURES) for shard_format in made)


def builder_of(place, formats, spec=None):
    return ShardBuilder(place / ".datamat", place, spec or make_spec(), formats)


def keys_of(number, sizes=SIZES):
    return [f"key{number}-{record}" for record in range(sizes[number])]


def growing_of(place, formats):
    """Return the unfinished files that parts are written to, of formats that join their parts."""
    files = GrowingShard(place / ".datamat", make_spec().name, "f1", formats, len(SIZES)).files
    return [files[made.extension] for made in formats if made.joins_parts]


def seal(place, formats, spec):
    """Seal the shard as a worker does; return its files."""
    return unfinished(place, formats, spec).seal()


def unfinished(place, formats, spec, run=""):
    """Return the unfinished shard, as a worker has it during a call."""
    return GrowingShard(place / ".datamat", spec.name, spec.fingerprint, formats, len(spec.parts), run)


def write_part(place, formats, spec, number, sizes=SIZES, run="", growing=None):
    """Write a part as a worker does, apart unless `run` is given; return its receipt.

    Without `growing`, it is the only part of its call.
    """
    growing = growing or unfinished(place, formats, spec, run)
    part = spec.parts[number]
    with ShardEnd(growing, appends=bool(run)) as end:
        with PartWriter(end, part, formats, FEATURES.columns) as writer:
            outcome = Outcome(num_done=2)
            for key in keys_of(number, sizes):
                writer.append({"key": key.encode(), "text": key.encode() * 40})
                outcome.keys.add(key)
            receipt = writer.finish(outcome, lambda: 0.5)
        return dataclasses.replace(receipt, sealed=end.leave(part))


def make(place, formats, spec=None):
    """Continue as a run does from whatever is there until the shard is finished; return what was made and its files."""
    builder = builder_of(place, formats, spec)
    if files := builder.finished():
        return [], files
    run = begin_run(place / ".datamat")
    builder.resume()
    made, sealed = [], ()
    for part in list(builder.missing()):
        receipt = write_part(place, formats, builder.spec, part.number, run=run)
        builder.add(receipt)
        sealed = sealed or receipt.sealed
        made.append(part.number)
    assert builder.is_complete
    return made, finish(builder, sealed or seal(place, formats, builder.spec))


def finish(builder, sealed):
    """Give a sealed shard its names, as a driver does; return its files."""
    files = builder.complete(sealed)
    builder.publish(files, waits=False)
    return files


def finished_files(place):
    """Return the visible files by name, with their bytes."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
