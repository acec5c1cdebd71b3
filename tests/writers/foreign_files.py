"""Files as other libraries write them, for tests of sources."""

from __future__ import annotations

import io
import json
import pathlib
import struct
import tarfile

import numpy as np

from datamat.formats.example import encode_example
from datamat.formats.tfrecord import frame

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def tar(members):
    """Return a tar archive of members by name."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def tfrecord(records, kinds):
    """Return a TFRecord file of examples, whose columns have the given kinds."""
    payloads = [encode_example(record, kinds) for record in records]
    return b"".join(b"".join(frame([payload], len(payload))) for payload in payloads)


def tfds_kind(kind, **content):
    """Return the description of a feature in `features.json`."""
    return {"pythonClassName": f"tensorflow_datasets.core.features.{kind}", **content}


def write_tfds(folder, features, records, kinds, **info):
    """Write a directory as TFDS 4.9 prepares it: two shards, the first of one record."""
    folder.mkdir(exist_ok=True)
    split = {"name": "train", "shardLengths": ["1", str(len(records) - 1)], "numBytes": "1"}
    (folder / "dataset_info.json").write_text(
        json.dumps({"name": "mine", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split], **info})
    )
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": features}}))
    for number, some in enumerate((records[:1], records[1:])):
        (folder / f"mine-train.tfrecord-0000{number}-of-00002").write_bytes(tfrecord(some, kinds))
    return folder


def write_megatron(prefix, documents, dtype="uint16"):
    """Write the pair of files that Megatron-LM's `IndexedDatasetBuilder` writes.

    Args:
        prefix: what their paths share.
        documents: the sequences of each document.
        dtype: dtype of the tokens.
    """
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}[dtype]
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    starts = np.cumsum([0, *(sequence.nbytes for sequence in sequences)])[:-1].astype("<i8")
    bounds = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(bounds))
    pathlib.Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    pathlib.Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
