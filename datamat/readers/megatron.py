"""Writes token sets for Megatron-LM: the tokens of a dataset as `PREFIX.bin` and `PREFIX.idx`, by several processes.

    workers   records 0 to 8,191 ── tokens and lengths ──> parts in a folder beside the output
    driver    parts, in order ── tokens ──> PREFIX.bin; lengths ──> PREFIX.idx

The parts are joined without gaps, so the bytes do not depend on the number of workers. Both files appear when
they are complete. `datamat.formats.megatron` describes them, `datamat.writers.megatron` reads them.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import commit, disk_errors_explained, temporary_folder
from datamat.errors import OptionError, OutputError, SampleError, count_of
from datamat.features.base import join_names
from datamat.folders.places import local_folder
from datamat.formats.megatron import DTYPES, index_of
from datamat.parallel.executor import PathosExecutor
from datamat.parallel.logs import get_logger
from datamat.values import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PART_RECORDS = 8192
_AT_ONCE = 1024

_logger = get_logger("datamat.readers")


def write_megatron(
    data: Any, prefix: str | os.PathLike[str], num_workers: int | None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write the tokens of a `ShardedDataset`; documented in `ShardedDataset.to_megatron`."""
    if not os.path.basename(os.fspath(prefix)):
        raise OptionError(f"to_megatron({os.fspath(prefix)!r}): want what both paths share, as in 'gpt/train'")
    stem = local_folder(prefix, "to_megatron", "give a path on this machine, and copy both files from there")
    paths = stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")
    for path in paths:
        if os.path.lexists(path):
            raise OutputError(f"{path} already exists, and is not overwritten; remove it, or give another prefix")
    field, dtype = _field_of_tokens(data)
    starts = range(0, len(data), _PART_RECORDS)
    lengths: list[NDArray[np.int32]] = []
    with disk_errors_explained(stem.parent), PathosExecutor(num_workers) as pool:
        stem.parent.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(temporary_folder(pool, os.fspath(stem.parent)))
        worker = _Worker(data, field, dtype, folder)
        # The index appears last, when the tokens are there.
        with commit(paths[1], through=folder) as index, commit(paths[0], through=folder) as file:
            for start, _ in zip(starts, pool.map(worker.write, starts), strict=True):
                with open(f"{worker.part(start)}.bin", "rb") as tokens:
                    shutil.copyfileobj(tokens, file, 1 << 20)
                os.unlink(tokens.name)
                lengths.append(np.fromfile(f"{worker.part(start)}.len", "<i4"))
            index.writelines(index_of(np.concatenate(lengths), dtype))
    if num_skipped := len(data) - sum(map(len, lengths)):
        _logger.warning("%s: left out %s, for damage", paths[0], count_of(num_skipped, "record"))
    return paths


@final
@frozen()
class _Worker:
    """What each worker receives once.

    Attributes:
        data: the records, a `ShardedDataset`.
        field: name of the field that holds tokens.
        dtype: their dtype.
        folder: folder of the parts.
    """

    data: Any
    field: str
    dtype: np.dtype[Any]
    folder: pathlib.Path

    def part(self, start: int) -> str:
        """Return the common beginning of the paths of a part's files, given its first record."""
        return os.fspath(self.folder / f"{start:012d}")

    def write(self, start: int) -> None:
        """Write the tokens of the records of a part, and the number of each, int32."""
        records = self.data.select(slice(start, start + _PART_RECORDS))
        lengths: list[int] = []
        with open(f"{self.part(start)}.bin", "wb") as file:
            for batch in records.to_numpy(_AT_ONCE, num_threads=1):
                found = [self._tokens(*pair) for pair in zip(batch["key"], batch[self.field], strict=True)]
                file.write(np.concatenate(found).astype(self.dtype.newbyteorder("<"), copy=False).data)
                lengths += map(len, found)
        np.array(lengths, "<i4").tofile(f"{self.part(start)}.len")

    def _tokens(self, key: str, value: Any) -> NDArray[Any]:
        found = np.asarray(value) if len(value) else np.empty(0, self.dtype)  # an empty list has no dtype
        if (found.dtype, found.ndim) != (self.dtype, 1):
            raise SampleError(
                key,
                f"its field {self.field!r} is {found.dtype} {found.shape}, and that of the first record is "
                f"{self.dtype} (?,); have map return the same for each",
            )
        return found


def _field_of_tokens(data: Any) -> tuple[str, np.dtype[Any]]:
    """Return the only field of a dataset that holds tokens, and their dtype, as the first record has it."""
    if not len(data):
        raise OptionError("to_megatron: there are no records; give a dataset that has some")
    arrays = {name: np.asarray(value) for name, value in data[0].items() if isinstance(value, (np.ndarray, list))}
    found = {name: array.dtype for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iu"}
    if len(found) != 1:
        which = f"the fields {join_names(found)} may be" if found else "no field is"
        raise OptionError(
            f"to_megatron: {which} the tokens, an array of integers (n,); want one, as columns('tokens') leaves it"
        )
    name, dtype = next(iter(found.items()))
    if dtype.name not in DTYPES.values():
        raise OptionError(
            f"to_megatron: field {name!r} is {dtype}, which Megatron-LM does not read; want "
            f"{', '.join(DTYPES.values())}: convert it by map, as in values.astype('int32')"
        )
    return name, dtype
