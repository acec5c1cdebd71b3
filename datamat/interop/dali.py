r"""What NVIDIA DALI needs to find samples in tar shards: `SHARD.tar.idx`, which lists the members of each sample.

    v1.2 NUM_SAMPLES
    EXTENSION OFFSET SIZE NAME EXTENSION OFFSET SIZE NAME ...      a line for each sample; of each member, its data

Byte for byte what DALI's own `wds2idx` writes (https://github.com/NVIDIA/DALI/blob/main/tools/wds2idx.py), except where
a name holds a space, which would be read as the end of it: then the older form without names, `v1.1`. For TFRecord the
offsets that stand beside each shard are what DALI reads.
"""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING

from datamat.errors import CorruptDataError
from datamat.formats.ustar import BLOCK_BYTES, END_OF_ARCHIVE, parse_header, read_pax_path
from datamat.interop.contents import shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from datamat.manifest import Manifest, ShardInfo

__all__ = ["dali_sidecars", "tar_index"]


def dali_sidecars(manifest: Manifest) -> dict[str, ShardInfo]:
    """Return the tar shard behind each index file, by its name; the content is `tar_index` of the shard."""
    return {f"{shard.file}.idx": shard for shards in shards_of(manifest, "webdataset").values() for shard in shards}


def tar_index(path: str | os.PathLike[str]) -> bytes:
    """Return DALI's index of a tar shard of ours; reads its headers, not its data.

    Raises:
        CorruptDataError: it is not such a shard.
    """
    with open(path, "rb") as file:
        samples = [list(members) for _, members in groupby(_members(file), key=lambda member: _split(member[0])[0])]
    is_named = not any(character.isspace() for members in samples for name, *_ in members for character in name)
    lines = [f"{'v1.2' if is_named else 'v1.1'} {len(samples)}"]
    for members in samples:
        found = (f"{_split(name)[1]} {offset} {size}{f' {name}' if is_named else ''}" for name, offset, size in members)
        lines.append(" ".join(found))
    return "".join(f"{line}\n" for line in lines).encode()


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member's name, and its extensions: what stands behind the first dot of the base name."""
    folder, slash, base = name.rpartition("/")
    stem, _, extensions = base.partition(".")
    return folder + slash + stem, extensions


def _members(file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset of the data, and size of each member."""
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
            raise CorruptDataError(f"{file.name}: the archive ends inside the member {member.name!r}; run verify")
