"""Random access to the records of a finished directory.

A record is found through the offsets beside its shard, read, its checksums tested, and decoded: memory holds 16 bytes
per record and no file is read through.
"""

from __future__ import annotations

import bisect
import functools
import operator
import os
import pathlib
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from datamat.errors import CorruptDataError, OptionError
from datamat.formats import Offsets, get_format
from datamat.manifest import Manifest
from datamat.readers import preview as drawing
from datamat.readers import tf as tf_reader
from datamat.readers.keys import KeyIndex, stored_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from datamat.features import Features
    from datamat.formats import ShardReader
    from datamat.manifest import ShardInfo
    from datamat.readers.preview import Picture

__all__ = ["ShardedDataset", "load"]


def load(path: str | os.PathLike[str], split: str | None = None) -> ShardedDataset:
    """Open a finished directory.

    Args:
        path: the directory that a run wrote.
        split: one split, or None for all, one after the other.

    Returns:
        The records: by position, by key, or in order.

    Raises:
        OutputError: there is no manifest: the run is not finished.
        OptionError: there is no such split.
        CorruptDataError: the manifest cannot be read.

    Example:
        >>> train = load("out/camvid", "train")   # doctest: +SKIP
        >>> train[0]["image"].shape, train["0001TP_006690#2"]["mask"].dtype   # doctest: +SKIP
        ((360, 480, 3), dtype('uint8'))
    """
    manifest = Manifest.read(path)
    if split is not None and split not in manifest.splits:
        raise OptionError(f"{os.fspath(path)} has no split {split!r}; it has {', '.join(manifest.splits) or 'none'}")
    return ShardedDataset(pathlib.Path(path), manifest, split)


class ShardedDataset(Sequence[dict[str, Any]]):
    """The records of a finished directory; each is a dict by feature name, always with `key`.

    Thread-safe and picklable: a copy in another process opens the files anew. It is a random-access data source for
    torch, grain and whoever asks for `len` and items.

    Args:
        path: the directory.
        manifest: its manifest.
        split: one split, or None for all.
    """

    def __init__(self, path: pathlib.Path, manifest: Manifest, split: str | None) -> None:
        self.path = path
        self.manifest = manifest
        self.split = split
        self._shards = manifest.shards if split is None else manifest.splits[split]
        self._ends = list(accumulate(info.num_records for info in self._shards))
        self._format = get_format(manifest.format).with_features(manifest.features)
        self._files: dict[int, ShardReader] = {}

    @property
    def features(self) -> Features:
        """The schema."""
        return self.manifest.features

    @property
    def files(self) -> list[str]:
        """The paths of the shards, in order."""
        return [str(self.path / info.file) for info in self._shards]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, item: int | str) -> dict[str, Any]:  # type: ignore[override]  # no slices
        """Return one sample, by position (also from the end) or by key.

        Raises:
            IndexError: no such position.
            KeyError: no such key.
            TypeError: neither a position nor a key; a slice is neither.
            CorruptDataError: the record is damaged; names file, record and place.
        """
        if isinstance(item, str):
            found = self._key_index.position_of(item)
            if found is None:
                raise KeyError(item)
            return self._sample(found)
        try:
            position = operator.index(item)
        except TypeError as error:
            raise TypeError(
                f"a sample is found by its position or key, not by {item!r}; "
                "for several: [data[number] for number in range(2, 5)]"
            ) from error
        if not -len(self) <= position < len(self):
            raise IndexError(f"position {item} in a data set of {len(self)} records")
        return self._sample(position % len(self))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples, shard after shard, reading each file from front to back."""
        for position in range(len(self)):
            yield self._sample(position)

    def __contains__(self, key: object) -> bool:
        """Tell whether there is a record with this key."""
        return isinstance(key, str) and self._key_index.position_of(key) is not None

    def keys(self) -> list[str]:
        """Return the keys of all records, in order: from the index files, without reading a shard."""
        return self._key_index.keys()

    def to_tf(
        self,
        batch_size: int | None = None,
        *,
        shuffle: bool | int = False,
        seed: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        cache: bool | str = False,
        repeat: bool = False,
        drop_remainder: bool = False,
        deterministic: bool = True,
    ) -> Any:
        """Return a `tf.data.Dataset` of dicts by feature name: decoded, batched and prefetched.

        Shards are read interleaved and records parsed and decoded in parallel; the cache holds what is before
        `transform`, so that random augmentation stays random.

        Args:
            batch_size: records per batch; None gives single samples.
            shuffle: True shuffles shards, and records in a window of 1,024; a number is the window.
            seed: of the shuffling.
            transform: a function of the dict, traced by TensorFlow, applied to single samples. After
                `tf.random.set_seed`, TensorFlow gives `tf.random.uniform` and its like the same numbers in every epoch;
                a `tf.random.Generator` made outside of the function goes on.
            cache: True caches in memory, a path on disk.
            repeat: endlessly.
            drop_remainder: leave out a last batch that is not full.
            deterministic: the same order in every epoch that is not shuffled; False is a little faster.

        Returns:
            images uint8 (height, width, channels), masks uint8 (height, width), labels int64, boxes float32 (n, 4),
            text as bytes.

        Raises:
            MissingDependencyError: TensorFlow is not installed.
        """
        options = tf_reader.ReadOptions(
            batch_size, shuffle, seed, transform, cache, repeat, drop_remainder, deterministic
        )
        return tf_reader.make_dataset(self.files, self.features, self._format.name, len(self), options)

    def preview(self, count: int = 8, *, columns: int = 4, opacity: float = 0.5) -> Picture:
        """Return a picture of samples: images with their mask drawn over, a legend of classes, and the keys.

        Args:
            count: how many samples, at least 1, spread evenly over the data set.
            columns: pictures in a row.
            opacity: of the mask, 0 to 1.

        Returns:
            A picture that shows itself in a notebook; `.save(path)` writes a PNG, `.array` is uint8
            (height, width, 3).

        Raises:
            OptionError: the features hold no image, or an argument makes no sense.
        """
        if count < 1:
            raise OptionError(f"preview: count={count}; want at least 1 sample")
        count = min(count, len(self))
        positions = [place * len(self) // count for place in range(count)]
        return drawing.draw([self[position] for position in positions], self.features, columns, opacity)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_files", "_key_index"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files={})

    def __del__(self) -> None:
        for opened in self.__dict__.get("_files", {}).values():
            opened.close()

    def __repr__(self) -> str:
        return f"ShardedDataset({str(self.path)!r}, split={self.split!r}, {len(self):,} records, {self.features!r})"

    def _sample(self, position: int) -> dict[str, Any]:
        shard = bisect.bisect_right(self._ends, position)
        return self.features.decode(self._record(shard, position - (self._ends[shard - 1] if shard else 0)))

    def _record(self, shard: int, number: int) -> dict[str, Any]:
        return self._opened(shard).read(number)

    def _opened(self, shard: int) -> ShardReader:
        found = self._files.get(shard)
        if found is None:
            # No lock, which a process forked meanwhile would find taken: of two that open a shard, one closes it again.
            opened = self._open(self._shards[shard])
            found = self._files.setdefault(shard, opened)
            if found is not opened:
                opened.close()
        return found

    def _open(self, info: ShardInfo) -> ShardReader:
        offsets = self._offsets(info)
        path = self.path / info.file
        try:
            return self._format.reader(path, offsets)
        except OSError as error:
            raise CorruptDataError(f"{path}: {error.strerror}; run the job again to write it anew") from error

    def _offsets(self, info: ShardInfo) -> Offsets:
        path = self.path / info.index_file
        try:
            offsets = Offsets.from_text(path.read_text("ascii"))
        except (OSError, UnicodeDecodeError, CorruptDataError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CorruptDataError(f"{path}: {reason}; run the job again to write it anew") from error
        if len(offsets) != info.num_records:
            raise CorruptDataError(
                f"{path} holds {len(offsets)} offsets, the manifest says {info.num_records} records; run the job again"
            )
        end = np.uint64(info.num_bytes)
        outside = np.flatnonzero((offsets.offset > end) | (offsets.size > end - np.minimum(offsets.offset, end)))
        if len(outside):
            raise CorruptDataError(
                f"{path}: record {outside[0]} would lie outside of {info.file}, which has {info.num_bytes} bytes; "
                "run the job again to write it anew"
            )
        return offsets

    def _stored_keys(self, shard: int) -> list[str]:
        """Return the keys that the records of a shard hold, by reading them."""
        return [stored_key(self._record(shard, number)) for number in range(self._shards[shard].num_records)]

    @functools.cached_property
    def _key_index(self) -> KeyIndex:
        return KeyIndex(self.path / "index", self.manifest, self.split, self._stored_keys)
