"""Random access to the records of a finished directory, and the ways to read all of it.

A record is found through the offsets beside its shard, which are mapped; it is read, tested against its checksums, and
decoded. Memory holds half a byte per record, and no shard is read through.
"""

from __future__ import annotations

import functools
import operator
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from datamat.errors import OptionError
from datamat.readers import preview as drawing
from datamat.readers import tf as tf_reader
from datamat.readers import torch as torch_reader
from datamat.readers.batches import Batches, BatchOptions, Numpy
from datamat.readers.collate import ragged_names
from datamat.readers.making import BatchMaker
from datamat.readers.order import Order
from datamat.readers.remote import RemotePath
from datamat.readers.tf_damage import check_size
from datamat.readers.transforms import SampleTransform

if TYPE_CHECKING:
    import os
    import pathlib
    from collections.abc import Callable, Iterator, Mapping

    from datamat.features import Features
    from datamat.manifest import Manifest
    from datamat.readers.batches import Client
    from datamat.readers.preview import Picture
    from datamat.readers.samples import SampleReader

__all__ = ["ShardedDataset"]


class ShardedDataset(Sequence[dict[str, Any]]):
    """The records of a finished directory; each is a dict by feature name, always with `key`.

    Thread-safe and picklable: a copy in another process opens the files anew. It is a random-access data source for
    torch, grain and whoever asks for `len` and items.

    Args:
        path: the directory, or its URL.
        manifest: its manifest.
        split: one split, or None for all.
        samples: the records of the split, by position.
    """

    def __init__(
        self, path: pathlib.Path | RemotePath, manifest: Manifest, split: str | None, samples: SampleReader
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.split = split
        self._shards = manifest.shards if split is None else manifest.splits[split]
        self._samples = samples
        self._place = self._next_place = 0

    @property
    def features(self) -> Features:
        """The schema."""
        return self.manifest.features

    @property
    def files(self) -> list[str]:
        """The paths of the shards, in order: URLs, where the directory was loaded from one."""
        return [str(self.path / info.file) for info in self._shards]

    def __len__(self) -> int:
        return len(self._samples.records)

    def __getitem__(self, item: int | str) -> dict[str, Any]:  # type: ignore[override]  # no slices
        """Return one sample, by position (also from the end) or by key.

        Raises:
            IndexError: no such position.
            KeyError: no such key.
            TypeError: neither a position nor a key; a slice is neither.
            CorruptDataError: the record is damaged; names file, record and place.
        """
        return self._samples.read(self._position(item))

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples: what torch's `DataLoader` and Hugging Face's asks a map-style data set for.

        Damaged records are left out where the data set was loaded so; else as `__getitem__`.
        """
        found = [self._samples.read_or_skip(self._position(item)) for item in items]
        return [sample for sample in found if sample is not None]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples, shard after shard, reading each file from front to back."""
        start, self._next_place = self._next_place, 0
        for position in range(start, len(self)):
            sample = self._samples.read_or_skip(position)
            self._place = position + 1
            if sample is not None:
                yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration that moved last is: numbers and strings only."""
        return {"version": 1, "position": self._place, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration begin behind the sample that came before `state` was taken; at an end, anew.

        Raises:
            OptionError: the state is of other records.
        """
        wanted = {"version": 1, **self._identity}
        differing = [name for name, value in wanted.items() if state.get(name) != value]
        if differing or not isinstance(state.get("position"), int):
            raise OptionError(
                f"{self.path}: the state is not of these records ({', '.join(differing) or 'position'} differs); load "
                "the state of an iteration over the same directory and split"
            )
        self._place = state["position"]
        self._next_place = self._place % max(len(self), 1)

    @property
    def num_skipped(self) -> int:
        """How many damaged records were left out so far, each counted once."""
        return len(self._samples.damages.positions)

    def __contains__(self, key: object) -> bool:
        """Tell whether there is a record with this key."""
        return isinstance(key, str) and self._samples.keys.position_of(key) is not None

    def keys(self) -> list[str]:
        """Return the keys of all records, in order: from the index files, without reading a shard."""
        return self._samples.keys.keys()

    def to_tf(  # noqa: PLR0913 -- what users may choose; all but the first by name
        self,
        batch_size: int | None = None,
        *,
        shuffle: bool | int = False,
        seed: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        static_transform: Callable[[Any], Any] | None = None,
        cache: bool | str | os.PathLike[str] = False,
        snapshot: str | os.PathLike[str] | None = None,
        service: str | None = None,
        job: str | None = None,
        repeat: bool = False,
        drop_remainder: bool = False,
        deterministic: bool = True,
    ) -> Any:
        """Return a `tf.data.Dataset` of dicts by feature name: decoded, batched and prefetched.

        TensorFlow reads TFRecord itself, plain or gzip, shards interleaved; pictures are decoded many at a time by
        datamat's decoders, in threads of TensorFlow and of this process. Other formats, and what is behind a URL, are
        read by `to_numpy` and handed over in batches or blocks.

        Args:
            batch_size: records per batch; None gives single samples.
            shuffle: True shuffles shards, and records in a window of 1,024; a number is the window.
            seed: of the shuffling.
            transform: a function of the dict, traced by TensorFlow, applied to single samples in each epoch anew. After
                `tf.random.set_seed`, TensorFlow gives `tf.random.uniform` and its like the same numbers in every epoch;
                a `tf.random.Generator` made outside of the function goes on.
            static_transform: the same, before the cache: what comes out alike in each epoch, and is kept.
            cache: True caches in memory, a path on disk, for the life of this data set.
            snapshot: a folder where decoded samples, with `static_transform` applied, stay for later programs with the
                same records and the same code. The first epoch that is read to its end writes it; one that is broken
                off leaves nothing to go on from. Old ones are yours to delete.
            service: `grpc://HOST:PORT` of a tf.data service (`datamat serve`) whose workers do all this. Consumers of
                one job share each epoch: a record comes to one of them. The order is never the same.
            job: name of the job; None for one name for all who read these records with the same options and transforms.
                Each epoch of a job is given once: name another for another run. What its first consumer asked for is
                what all get.
            repeat: endlessly.
            drop_remainder: leave out a last batch that is not full.
            deterministic: the same order in every epoch that is not shuffled; False is a little faster.

        Returns:
            images uint8 (height, width, channels), masks uint8 (height, width), labels int64, boxes float32 (n, 4),
            text as bytes. In batches each has a first dimension more; boxes, lists and tensors of open shape are
            ragged.

        Raises:
            MissingDependencyError: TensorFlow is not installed.
            OptionError: an argument makes no sense; or the service does not answer, cannot read the format, or cannot
                run the transform.
            CorruptDataError: a shard is not as long as the manifest says. A record that is found to be damaged in the
                course of reading is a `tf.errors.InvalidArgumentError` that names file, record and key.
            FingerprintError: with `snapshot`, what `static_transform` holds cannot be compared between programs, as of
                functions that `tf.function` has traced.
        """
        options = tf_reader.ReadOptions(
            batch_size,
            shuffle,
            seed,
            transform,
            static_transform,
            cache,
            snapshot,
            service,
            job,
            repeat,
            drop_remainder,
            deterministic,
        )
        once_shuffled = False if options.keeps_samples else shuffle
        seed = secrets.randbits(32) if seed is None else seed

        def read(epoch: int, size: int | None, drop_last: bool) -> Batches:
            apart = ShardedDataset(self.path, self.manifest, self.split, self._samples.with_own_files())
            batches = apart.to_numpy(size, shuffle=once_shuffled, seed=seed, drop_last=drop_last)
            batches.set_epoch(epoch)
            return batches

        shards = dict(zip(self.files, self._shards, strict=True))
        source = tf_reader.TfSource(
            {file: info.num_records for file, info in shards.items()},
            self.features,
            self.manifest.format,
            self._identity["records"],
            isinstance(self.path, RemotePath),
            self._samples.damages.are_skipped,
            self._samples.damage_in,
            read,
        )
        if source.is_native and snapshot is None:  # what a snapshot keeps outlives the shards
            for file, info in shards.items():
                check_size(file, info.num_bytes)
        return tf_reader.make_dataset(source, options)

    def to_numpy(  # noqa: PLR0913 -- what users may choose; all but the first by name
        self,
        batch_size: int | None = None,
        *,
        shuffle: bool | int = False,
        seed: int = 0,
        transform: Any = None,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        num_threads: int | None = None,
        prefetch: int = 2,
    ) -> Batches:
        """Return an iterable of batches of numpy arrays, decoded in threads straight into the memory of the batch.

        Each `iter` is the next epoch, in another order if shuffled. `state_dict` and `load_state_dict` go on in the
        middle of one, with any number of workers and ranks.

        Args:
            batch_size: most records in a batch; None gives single samples.
            shuffle: True mixes all records. A number mixes that many at a time, of blocks of neighbours in random
                order, so that files are read in long runs: for disks that seek and slow file systems. Parquet is
                always read so, four row groups at a time.
            seed: of the shuffling and of the random numbers of `transform`.
            transform: `(sample) -> sample`, `(sample, rng) -> sample`, or an albumentations pipeline. Random numbers
                depend on (seed, key, epoch) alone.
            drop_last: leave out what does not fill a batch on every rank. Else those records are divided evenly, and
                every record comes exactly once (`Schedule` tells of the one exception).
            rank: which share of each step is read here.
            world_size: number of ranks; all get the same number of batches.
            num_workers: processes that decode and transform, for transforms that hold the interpreter's lock; 0
                decodes in threads of this process.
            num_threads: that decode; None takes one per physical core.
            prefetch: batches made ahead.

        Returns:
            Batches by feature name: images uint8 (n, height, width, channels) and masks uint8 (n, height, width),
            or lists of arrays where sizes differ; numbers (n,); tensors of fixed shape (n, ...). Boxes, lists of labels
            and tensors of open shape are lists of n arrays, text and keys lists of n str.

        Raises:
            OptionError: an argument makes no sense.

        Example:
            >>> for batch in train.to_numpy(32, shuffle=True, seed=1):   # doctest: +SKIP
            ...     batch["image"].shape, batch["key"][:2]
            ((32, 360, 480, 3), ['0001TP_006690#2', '0016E5_01530#0'])
        """
        options = BatchOptions(batch_size, drop_last, rank, world_size, num_workers, num_threads, prefetch)
        return self._batches(options, shuffle, seed, transform, Numpy())

    def to_torch(  # noqa: PLR0913, D417 -- what users may choose; most is told of `to_numpy`
        self,
        batch_size: int | None = None,
        *,
        num_workers: int = 0,
        shuffle: bool | int = False,
        seed: int = 0,
        transform: Any = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        num_threads: int | None = None,
        prefetch: int = 2,
    ) -> Batches:
        """Return an iterable of batches of tensors: `to_numpy` for PyTorch, on the same memory.

        It is a loader by itself: no `DataLoader` is needed. It also is an `IterableDataset` for one, with
        `batch_size=None`: its workers share the batches. And the data set as it is serves as a map-style one.

        Args:
            rank: None takes that of the process group of `torch.distributed`, if there is one.
            world_size: likewise.

        All other arguments are those of `to_numpy`.

        Returns:
            Batches as of `to_numpy`, with tensors for arrays.

        Raises:
            MissingDependencyError: torch is not installed.
            OptionError: an argument makes no sense.

        Example:
            >>> loader = train.to_torch(32, shuffle=True)   # doctest: +SKIP
            >>> images = next(iter(loader))["image"].permute(0, 3, 1, 2)   # doctest: +SKIP
        """
        torch_reader.register_iterable(Batches)
        found_rank, found_size = torch_reader.default_rank()
        options = BatchOptions(
            batch_size,
            drop_last,
            found_rank if rank is None else rank,
            found_size if world_size is None else world_size,
            num_workers,
            num_threads,
            prefetch,
        )
        return self._batches(options, shuffle, seed, transform, torch_reader.Torch())

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

    def __repr__(self) -> str:
        return f"ShardedDataset({str(self.path)!r}, split={self.split!r}, {len(self):,} records, {self.features!r})"

    def _position(self, item: int | str) -> int:
        if isinstance(item, str):
            found = self._samples.keys.position_of(item)
            if found is None:
                raise KeyError(item)
            return found
        try:
            position = operator.index(item)
        except TypeError as error:
            raise TypeError(
                f"a sample is found by its position or key, not by {item!r}; "
                "for several: [data[number] for number in range(2, 5)]"
            ) from error
        if not -len(self) <= position < len(self):
            raise IndexError(f"position {item} in a data set of {len(self)} records")
        return position % len(self)

    def _batches(
        self, options: BatchOptions, shuffle: bool | int, seed: int, transform: Any, client: Client
    ) -> Batches:
        order = Order.of(
            [info.num_records for info in self._shards],
            shuffle,
            seed,
            group_records=self._samples.records.group_records,
        )
        maker = BatchMaker(
            self._samples.read_or_skip,
            None if transform is None else SampleTransform(transform, self.features, seed),
            ragged_names(self.features),
            options.batch_size is not None,
        )
        identity = {**self._identity, "seed": order.seed, "window": order.window, "block": order.block}
        return Batches(order, maker, options, client=client, damages=self._samples.damages, identity=identity)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """What a state must be of: the records, by the checksums of their shards."""
        checksums = ",".join(info.checksum for info in self._shards)
        return {"num_records": len(self), "records": xxhash.xxh3_64_hexdigest(checksums.encode())}
