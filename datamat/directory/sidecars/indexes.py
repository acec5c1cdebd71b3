"""Indexes for other readers of records in shards: NVIDIA DALI and wids for tar shards, litdata for Parquet."""

from __future__ import annotations

import contextlib
import os
from itertools import groupby
from typing import TYPE_CHECKING

from datamat.directory.files import commit, render_json
from datamat.directory.manifest import shards_of
from datamat.directory.sidecars import FromShard
from datamat.errors import CorruptDataError
from datamat.folders.local import open_regular
from datamat.formats.arrow import arrow_columns

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator
    from typing import BinaryIO

    from datamat.directory.manifest import Manifest

# ---------------------------------------------------------------- DALI
#
# For NVIDIA DALI, to find samples in tar shards: `SHARD.tar.idx`, which lists the members of each sample.
#
#     v1.2 NUM_SAMPLES
#     EXTENSION OFFSET SIZE NAME EXTENSION OFFSET SIZE NAME ...      one line per sample; offset and size of the data
#
# The file is byte for byte what DALI's own `wds2idx` writes (https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py),
# unless a name contains a space, which would end it early: such an index has the older form without names, `v1.1`. Of
# TFRecord shards, DALI reads the offsets that datamat writes beside each shard.


def dali_sidecars(manifest: Manifest) -> dict[str, FromShard]:
    """Return the index of each tar shard by file name; none if the directory has no tar shards."""
    shards = (shard for shards in shards_of(manifest, "webdataset").values() for shard in shards)
    return {f"{shard.file}.idx": FromShard(shard, tar_index) for shard in shards}


def index_ahead(folder: pathlib.Path, file: str, checksum: str) -> pathlib.Path:
    """Return the path of the index of a tar shard with this content until the end of the run."""
    return folder / f"{file}.idx.{checksum}"


def prepare_index(path: pathlib.Path, ahead: pathlib.Path) -> None:
    """Write the index of a complete tar shard to `ahead`; it gets its final name at the end of the run.

    The worker that completes the shard does this: members cost 10 us each, too much for a single process at the end.
    """
    with contextlib.suppress(CorruptDataError):  # reported at the end of the run, with the shard's name
        index = tar_index(path)
        with commit(ahead) as file:
            file.write(index)


def tar_index(path: str | os.PathLike[str]) -> bytes:
    """Return DALI's index of a tar shard that datamat wrote; reads its headers, not its data.

    Raises:
        CorruptDataError: the file is not such a shard, or is cut short.
    """
    with open_regular(path) as file:
        listed = _members(file, os.fspath(path))
        samples = [list(members) for _, members in groupby(listed, key=lambda member: _split(member[0])[0])]
    is_named = not any(character.isspace() for members in samples for name, *_ in members for character in name)
    lines = [f"{'v1.2' if is_named else 'v1.1'} {len(samples)}"]
    for members in samples:
        found = (f"{_split(name)[1]} {offset} {size}{f' {name}' if is_named else ''}" for name, offset, size in members)
        lines.append(" ".join(found))
    return "".join(f"{line}\n" for line in lines).encode()


def _split(name: str) -> tuple[str, str]:
    """Split the name of a member into key and extensions, at the first dot of the base name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extensions = base.partition(".")
    return folder + slash + stem, extensions


def _members(file: BinaryIO, path: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset of the data, and size of each member."""
    from datamat.formats.webdataset import BLOCK_BYTES, END_OF_ARCHIVE, parse_header, read_pax_path

    long_name = ""
    while (header := file.read(BLOCK_BYTES)) != END_OF_ARCHIVE[:BLOCK_BYTES]:
        member = parse_header(header)
        offset = file.tell()
        if member.type == b"x":
            long_name = read_pax_path(file.read(member.padded)[: member.size])
            continue
        yield long_name or member.name, offset, member.size
        long_name = ""
        if file.seek(member.padded, os.SEEK_CUR) > os.fstat(file.fileno()).st_size:
            raise CorruptDataError(f"{path}: the archive ends inside the member {member.name!r}; run verify")


# ---------------------------------------------------------------- wids
#
# For wids, for random access to tar shards: `NAME-SPLIT.json`, which lists the shards of a split with their
# numbers of records, in the format of wids 0.1 (`wids-shard-index-v1`). File names are relative to the index.


def wids_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the index of each split by file name; none if the directory has no tar shards."""
    return {
        f"{manifest.name}-{split}.json": render_json(
            {
                "__kind__": "wids-shard-index-v1",
                "wids_version": 1,
                "name": f"{manifest.name}-{split}",
                "shardlist": [{"url": shard.file, "nsamples": shard.num_records} for shard in shards],
            }
        )
        for split, shards in shards_of(manifest, "webdataset").items()
    }


# ---------------------------------------------------------------- litdata
#
# For litdata, to stream Parquet shards: `index.json`, which lists the shards with their rows and bytes.
#
# litdata (0.2.76) has no splits: it reads the shards of the index whose names match a pattern. Chunks are listed in the
# order of the shards; its own indexer takes the order of the file system.


def litdata_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the index by file name; none if the directory has no Parquet shards."""
    splits = shards_of(manifest, "parquet")
    if not splits:
        return {}
    chunks = [
        {"filename": shard.file, "chunk_size": shard.num_records, "chunk_bytes": shard.num_bytes, "dim": None}
        for shards in splits.values()
        for shard in shards
    ]
    config = {
        "chunk_bytes": None,
        "chunk_size": None,
        "compression": None,
        "data_format": [str(column.type) for column in arrow_columns(manifest.features)],
        "data_spec": None,
        "encryption": None,
        "item_loader": "ParquetLoader",
        "types": None,
    }
    return {"index.json": render_json({"chunks": chunks, "config": config})}
