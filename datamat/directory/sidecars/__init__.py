"""Sidecars: small files beside the shards of a finished directory, for other readers.

    tfds          features.json, dataset_info.json, FIELD.labels.txt     TensorFlow Datasets: TFRecord, ArrayRecord
    huggingface   README.md                                              Hugging Face `datasets`: Parquet, tar
    wids          NAME-SPLIT.json                                        wids: tar
    litdata       index.json                                             litdata: Parquet
    croissant     croissant.json                                         mlcroissant, search engines
    dali          SHARD.tar.idx                                          NVIDIA DALI: tar

Each is a `Sidecar`: a function that turns a manifest into the content of its files, without importing a client.
`exporting` writes them to disk, with those that users add. datamat itself reads none of them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from datamat.directory.manifest import ShardInfo
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.directory.manifest import Manifest


__all__ = ["FromShard", "Sidecar"]


def __dir__() -> list[str]:
    return __all__


@frozen()
class FromShard:
    """The content of a sidecar file that depends on the bytes of one shard, such as an index of its members.

    A run rebuilds it only if the shard has changed.

    Attributes:
        shard: the entry of the shard in the manifest.
        make: function that takes the path of the shard and returns the content of the file.
    """

    shard: ShardInfo
    make: Callable[[pathlib.Path], bytes]


class Sidecar(Protocol):
    r"""A function, or a callable object, that returns files for other readers of the shards.

    Pass sidecars of your own to `Materializer(..., sidecars=[...])` or `export(path, sidecars=[...])`, beside the six
    built-in ones. A run calls each once, in the calling process, when all shards have their names and before it writes
    the manifest; the result affects no shard.

    Contract:
        * Pure: equal manifests give equal files, without times, hosts or paths.
        * It owns the files that it names, in the directory itself. No other sidecar may name them, and they must not
          have the extension of a shard, because readers that match a pattern would take them for data.
        * If it does not apply, it returns no files: `{}`.
        * The manifest is the one that `Manifest.read` returns, with the features sorted by name.

    Its files are treated like those of the built-in ones: replaced when the shards change, checked by `verify`, and an
    edited file moves to `.datamat/quarantine/edited` before it is written again. In a process without the function,
    `.datamat/sidecars.json` stands in for it: it has the digest of each file, those of a `FromShard` included, and the
    digest of the manifest that they describe. `verify` compares each file with its digest. Any later run or `export`
    removes the file once the manifest has changed, and moves it to `.datamat/quarantine/edited` if it is damaged; the
    next run or `export` with the function writes it again. `load` reads no sidecar.

    Example:
        >>> def counts(manifest):
        ...     lines = [f"{shard.num_records} {shard.file}\n" for shard in manifest.shards]
        ...     return {"COUNTS.txt": "".join(lines).encode()}
        >>> run = materialize(lambda n: {"n": n}, range(3), "out/numbers", sidecars=[counts], progress=False)
        >>> print((run.output / "COUNTS.txt").read_text(), end="")
        3 data-train-00000-of-00001.tfrecord
        >>> export("out/numbers", sidecars=[counts]).written   # nothing is missing
        ()
    """

    def __call__(self, manifest: Manifest, /) -> Mapping[str, bytes | FromShard]:
        """Return the content of each file, by its name in the directory.

        Args:
            manifest: manifest of the finished directory.

        Returns:
            Bytes, or a `FromShard` if they depend on the bytes of a shard.
        """
