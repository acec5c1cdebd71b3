"""A small shard and its parts, written as workers do: what tests of parts and of shards share."""

from __future__ import annotations

import contextlib

from datamat import Features, Text
from datamat.formats import get_format
from datamat.parts import ShardAssembly
from datamat.plan import PartSpec, ShardSpec
from datamat.receipts import Outcome, PartWriter

SIZES = [2, 1, 3, 0, 2]
"""Records of each part; a transform may give none for a row."""
FEATURES = Features({"text": Text()})
FORMATS = [("tfrecord",), ("tfrecord", "webdataset"), ("parquet", "tfrecord")]
"""One format; several that join their parts; and one whose parts stay until the shard is assembled, beside another."""


def make_spec(sizes=SIZES, fingerprint="f1"):
    """Return a shard of parts of two rows each."""
    parts = tuple(
        PartSpec("data-train-00000-of-00001", number, 2 * number, 2 * number + 2, 100, 1, False, fingerprint)
        for number in range(len(sizes))
    )
    return ShardSpec("data-train-00000-of-00001", "train", 0, fingerprint, parts)


def formats_of(names):
    return tuple(get_format(name).with_features(FEATURES) for name in names)


def assembly_of(place, formats, spec=None):
    return ShardAssembly(place / ".datamat", place, spec or make_spec(), formats)


def keys_of(number, sizes=SIZES):
    return [f"key{number}-{record}" for record in range(sizes[number])]


def write_part(place, formats, spec, number, sizes=SIZES):
    """Write a part as a worker does; return its receipt."""
    with PartWriter(place / ".datamat", spec.parts[number], formats, FEATURES.columns) as writer:
        outcome = Outcome(num_done=2)
        for key in keys_of(number, sizes):
            writer.append({"key": key.encode(), "text": key.encode() * 40})
            outcome.keys.add(key)
        return writer.finish(outcome, lambda: 0.5)


def make(place, formats, spec=None):
    """Go on from whatever is there until the shard is finished, as a run does; return what was made and its files."""
    with contextlib.closing(assembly_of(place, formats, spec)) as assembly:
        if files := assembly.finished():
            return [], files
        assembly.resume()
        made = []
        for part in [] if assembly.is_complete else list(assembly.missing()):
            assembly.add(write_part(place, formats, assembly.spec, part.number))
            made.append(part.number)
        assert assembly.is_complete
        return made, assembly.publish()


def finished_files(place):
    """Return the visible files by name, with their bytes."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
