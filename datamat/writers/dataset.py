"""Data sets that exist already, in any of the forms that `Index.from_dataset` takes: made into finished shards.

    Materializer(ImportWriter(), source=torch_dataset, output="out/mine", transform=augment, copies=4).run()
    Materializer(ImportWriter("mnist"), source="tensorflow_datasets/mnist/3.0.1", output="out/mnist").run()

Features are those that the data set declares; the first sample tells the others. Pictures that it holds as files
(finished directories, TFDS, Hugging Face `datasets`) keep their bytes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from datamat.errors import FingerprintError, OptionError, SourceError
from datamat.features import Features
from datamat.fingerprint import fingerprint
from datamat.index import Index, IndexRow
from datamat.samples import Samples, open_samples
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.features import Feature

__all__ = ["ImportWriter"]


class ImportWriter(DatasetWriter):
    """The samples of a data set by their position.

    Args:
        name: of the data set; begins the names of the shards.
        key: field that holds the keys, which is not stored once more; None: as `Index.from_dataset` has it.
        names: of the fields, where samples are tuples or arrays without names; None: "x" and "y" for two.
        features: instead of those that the data set and its first sample tell.
        version: stands for the content of the data set in fingerprints: change it when the samples change. None: the
            content itself, as far as the object holds it; for folders, what their JSON files say and their sizes.

    Example:
        >>> writer = ImportWriter(names=("image", "label"))
        >>> writer.bind([(np.zeros((4, 4, 3), np.uint8), 1)])
        >>> writer.features
        Features(key: str, image: uint8 (?, ?, 3), label: int64 scalar)
    """

    name = "data"
    file_fields = ()

    def __init__(
        self,
        name: str = "data",
        *,
        key: str | None = None,
        names: Sequence[str] | None = None,
        features: Mapping[str, Feature] | None = None,
        version: str | None = None,
    ) -> None:
        self.name = name
        self._key = key
        self._names = names
        self._declared = None if features is None else Features(features)
        self._version = version

    @functools.cached_property
    def _samples(self) -> Samples:
        """The data set; it does not count in fingerprints, where `content` stands for it."""
        raise OptionError("ImportWriter has no data set yet; pass it as source= to Materializer")

    def bind(self, source: Any) -> None:
        """Open the data set, and learn its features.

        Raises:
            SourceError: it cannot be read, or has no samples.
            FingerprintError: its content cannot be told, and no version stands for it.
        """
        samples = open_samples(source, names=self._names)
        if not len(samples):
            raise SourceError(f"the data set {type(source).__qualname__} has no samples; give one that has")
        self.__dict__["_samples"] = samples
        self.content = self._version or _content_of(samples)
        self.features = self._declared or self._found(samples)

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return a row per sample, in order."""
        return Index.from_dataset(source, key=self._key)

    def read(self, row: IndexRow) -> Sample:
        """Return the sample of a row."""
        return self._without_key(self._samples.read(int(row.fields["number"])))

    def _found(self, samples: Samples) -> Features:
        """Return the features that the data set declares, and for other fields those of the first sample."""
        first = self._without_key(samples.read(0))
        others = Features.infer({name: value for name, value in first.items() if name not in samples.declared})
        return Features({name: samples.declared.get(name) or others[name] for name in first})

    def _without_key(self, sample: Sample) -> Sample:
        return {name: value for name, value in sample.items() if name not in {"key", self._key}}


def _content_of(samples: Samples) -> str:
    try:
        return fingerprint(samples.identity, where="source")
    except FingerprintError as error:
        raise FingerprintError(
            f"{error}. Or pass ImportWriter(version='1'), which then stands for the content of the data set"
        ) from error
