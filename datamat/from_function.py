"""`materialize`: shards from a function and its inputs, without a class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datamat.errors import OptionError
from datamat.materializer import Materializer
from datamat.writers.function import FunctionWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeGuard

    from datamat.features import Features
    from datamat.report import RunReport
    from datamat.writer import Sample

__all__ = ["materialize"]


def materialize(
    fn: Callable[[Any], Sample],
    inputs: Iterable[Any],
    output: str | os.PathLike[str],
    *,
    name: str = "data",
    features: Features | None = None,
    progress: bool = True,
    **options: Any,
) -> RunReport:
    """Write `fn(item)` of each input as one record: no class needed.

    Args:
        fn: called in the workers, in any order; returns a dict of values by feature name.
        inputs: the items; each is one sample, with its position as key.
        output: folder of the finished shards.
        name: of the data set.
        features: the schema; None infers it from the first sample, without loss.
        progress: show a bar and a summary.
        options: further arguments of `Materializer`.

    Raises:
        OptionError: there are no inputs, or `Materializer` refuses an option.

    Example:
        >>> materialize(lambda n: {"square": n * n}, range(10), "out/squares")   # doctest: +SKIP
    """
    items = inputs if _is_map_style(inputs) else list(inputs)
    if not len(items):
        raise OptionError("materialize: inputs is empty; give at least one item")
    writer = FunctionWriter(fn, items, name, features)
    return Materializer(writer, None, output, **options).run(progress=progress)


def _is_map_style(inputs: Any) -> TypeGuard[Sequence[Any]]:
    """Tell whether items are found by their position, as in lists, arrays and the data sets of torch."""
    return hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__") and not isinstance(inputs, Mapping)
