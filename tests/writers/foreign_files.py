"""Files as other libraries write them, for tests of sources."""

import io
import itertools
import json
import pathlib
import struct
import tarfile

import numpy as np
import pyarrow as pa
from pyarrow import parquet

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


def lerobot_kind(dtype, *shape, names=None):
    """Return the description of a field in `info.json`."""
    return {"dtype": dtype, "shape": list(shape or (1,)), "names": names}


_LEROBOT = {
    "v3.0": ("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
             "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"),
    "v2.1": ("data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
             "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"),
}  # fmt: skip


def write_lerobot(folder, features, episodes, *, version="v3.0", encode=None, types=None, **info):
    """Write a dataset as LeRobot does: files of two episodes in version 3, and of one in version 2.1.

    Args:
        folder: folder to write to.
        features: descriptions of the fields.
        episodes: for each episode, its frames, which have the fields and `task`; those of cameras are arrays.
        version: "v3.0" or "v2.1".
        encode: function that returns an MP4 of the frames of several episodes.
        types: types of Arrow, where they are not to be found by the values.
        info: what else `info.json` says.
    """
    patterns, fps, shared = _LEROBOT[version], 10, 2 if version == "v3.0" else 1
    own = dict.fromkeys(["frame_index", "episode_index", "index", "task_index"], lerobot_kind("int64"))
    features = {**features, "timestamp": lerobot_kind("float32"), **own}
    cameras = [name for name, kind in features.items() if kind["dtype"] == "video"]
    tasks = list(dict.fromkeys(frame["task"] for frames in episodes for frame in frames))
    starts = [0, *itertools.accumulate(map(len, episodes))]
    listed = []
    for first in range(0, len(episodes), shared):
        numbers = range(first, min(first + shared, len(episodes)))
        place = {"chunk_index": first // shared // 2, "file_index": first // shared % 2}  # two files in a folder
        names = {**place, "episode_chunk": 0, "episode_index": first}
        rows = [
            {name: frame.get(name) for name in features if name not in cameras}
            | {"timestamp": time / fps, "frame_index": time, "episode_index": number, "index": starts[number] + time}
            | {"task_index": tasks.index(frame["task"])}
            for number in numbers
            for time, frame in enumerate(episodes[number])
        ]
        schema = {"timestamp": pa.float32(), **(types or {})}
        table = {name: pa.array([row[name] for row in rows], schema.get(name)) for name in rows[0]}
        path = folder / patterns[0].format(**names)
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(table), path)
        for name in cameras:
            path = folder / patterns[1].format(**names, video_key=name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode([[frame[name] for frame in episodes[number]] for number in numbers]))
        for number in numbers:
            row = {"episode_index": number, "length": len(episodes[number]), "stats/index/min": [0]}
            for kind in ("data", *(f"videos/{name}" for name in cameras)):
                row |= {f"{kind}/{name}": value for name, value in place.items()}
                row[f"{kind}/from_timestamp"] = (starts[number] - starts[first]) / fps
            listed.append(row)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True, exist_ok=True)
    document = {"codebase_version": version, "fps": fps, "chunks_size": 1000, "features": features, **info}
    document |= {"data_path": patterns[0], "video_path": patterns[1]}
    (folder / "meta/info.json").write_text(json.dumps(document))
    numbered = [{"task_index": number, "task": task} for number, task in enumerate(tasks)]
    for name, rows in {"tasks": numbered, "episodes": listed}.items():
        if version == "v2.1":
            lines = [{part: row[part] for part in row if "/" not in part} for row in rows]
            (folder / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            path = f"meta/{name}.parquet" if name == "tasks" else f"meta/{name}/chunk-000/file-000.parquet"
            parquet.write_table(pa.Table.from_pylist(rows), folder / path)
    return folder
