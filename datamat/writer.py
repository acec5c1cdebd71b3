"""The plug-in that users subclass for a data set of their own, and how one is found by name."""

from __future__ import annotations

import abc
import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from datamat.errors import MissingDependencyError, OptionError
from datamat.features import Features

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from datamat.index import IndexRow

__all__ = ["DatasetWriter", "Sample", "resolve_writer", "writer_names"]

Sample: TypeAlias = "dict[str, Any]"
"""The values of one sample, by feature name."""

_GROUP = "datamat.writers"


class DatasetWriter(abc.ABC):
    """What a data set is made of: its features, its index, and how one sample is read.

    Subclass it, declare `features`, and write `index` and `read`; the rest is datamat's. An instance is sent to each
    worker once; `read` runs there, in any order, so it depends on its row alone.

    Attributes:
        name: of the data set; begins the names of the shards. Also the entry-point name of a registered writer.
        features: the schema, or a property that returns it.
        file_fields: names of the index fields that hold paths of input files: they are looked at when the data set is
            indexed, become part of the fingerprint, and reach `read` as paths that can be opened. None finds them.

    Example:
        >>> class Squares(DatasetWriter):
        ...     name = "squares"
        ...     features = Features({"square": Scalar("int64")})
        ...
        ...     def index(self, source):
        ...         return [IndexRow(f"{n:03d}", fields={"n": n}) for n in range(int(source))]
        ...
        ...     def read(self, row):
        ...         return {"square": row.fields["n"] ** 2}
        >>> Squares().read(IndexRow("003", fields={"n": 3}))
        {'square': 9}
    """

    name: str = ""
    features: Features
    file_fields: ClassVar[Sequence[str] | None] = None

    def bind(self, source: Any) -> None:  # noqa: B027 -- an optional hook: doing nothing is the default
        """Learn from the source what `features` needs: class names, columns; called before anything else.

        Args:
            source: as it was given to `Materializer`.
        """

    @abc.abstractmethod
    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per input sample, always in the same order; decode nothing.

        Args:
            source: as it was given to `Materializer`.
        """

    @abc.abstractmethod
    def read(self, row: IndexRow) -> Sample:
        """Return the sample of one row: a value for every declared feature but `key`.

        An image or mask may be an array, or the `bytes` of its file: bytes that need no change are stored untouched.
        Raise to report a sample that is bad; the message reaches the caller with the key.
        """

    def augment(self, sample: Sample, rng: np.random.Generator) -> Sample | Iterable[Sample]:
        """Return a changed sample, or several; called for each copy before the transform of the run.

        Args:
            sample: decoded; its arrays are this copy's own.
            rng: the random stream of this record: the only source of chance to draw from.
        """
        del rng
        return sample

    def read_block(self, keys: Sequence[str], fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return many samples at once, by columns, or None to be asked for each with `read`.

        For tables of numbers and strings, where a call per row would cost more than the row. The columns must hold
        what `read` would return.

        Args:
            keys: n keys.
            fields: index fields, by name: int64 or float64 (n,), or n strings.

        Returns:
            A column for every declared feature but `key`: an array (n,) of its dtype, or n strings.
        """
        del keys, fields
        return None

    def setup_worker(self) -> None:  # noqa: B027 -- as above
        """Prepare a worker process before its first sample: open what cannot be sent to it."""


def writer_names() -> list[str]:
    """Return the names of the registered writers; imports none of them."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=_GROUP)})


def resolve_writer(writer: DatasetWriter | type[DatasetWriter] | str, source: Any) -> DatasetWriter:
    """Return the writer that an argument means, bound to its source.

    Args:
        writer: an instance, a subclass, a registered name ("camvid"), or "package.module:Class".
        source: what it is bound to.

    Raises:
        OptionError: there is no such writer, or it is not one.
        MissingDependencyError: it is registered, but a package that it needs is not installed.
    """
    found: Any = _load(writer) if isinstance(writer, str) else writer
    if inspect.isclass(found):
        try:
            found = found()
        except TypeError as error:
            raise OptionError(f"writer {found.__qualname__}: {error}; pass an instance") from error
    if not isinstance(found, DatasetWriter):
        raise OptionError(
            f"writer is {writer!r}; want a DatasetWriter, a subclass, a registered name or 'module:Class'"
        )
    found.bind(source)
    if not isinstance(getattr(found, "features", None), Features):
        raise OptionError(
            f"{type(found).__qualname__}.features is not a Features; declare the fields of a sample there"
        )
    return found


def _load(name: str) -> Any:
    from importlib.metadata import entry_points

    target = name if ":" in name else next((p.value for p in entry_points(group=_GROUP) if p.name == name), None)
    if target is None:
        raise OptionError(
            f"there is no writer {name!r}; registered are {', '.join(writer_names())}. "
            f"Pass 'package.module:Class' or a subclass of DatasetWriter"
        )
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise OptionError(f"writer {name!r}: want 'package.module:Class'")
    try:
        loaded: Any = importlib.import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"writer {name!r} is {target}, which needs the module {error.name!r}; install the package that has it"
        ) from error
    except AttributeError as error:
        raise OptionError(
            f"writer {name!r} is {target}, but the module has no {attribute!r}; check the name"
        ) from error
    return loaded
