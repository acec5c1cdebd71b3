"""Turn raw samples into finished, verified dataset shards on all cores, and read them back.

>>> from datamat import Materializer                                     # doctest: +SKIP
>>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP

Each name below is loaded from its module when it is first used, so that `import datamat` costs milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamat.errors import (
        BrokenPoolError,
        CorruptDataError,
        DatamatError,
        FingerprintError,
        IncompleteRunError,
        InputError,
        MissingDependencyError,
        OptionError,
        OutputError,
        OutputLockedError,
        ParallelError,
        SampleError,
        SchemaError,
        SourceError,
        TaskTimeout,
        UnpicklableError,
        WorkerDied,
    )
    from datamat.features import BBoxes, ClassLabel, Features, Image, Mask, Scalar, Tensor, Text
    from datamat.from_function import materialize
    from datamat.index import Index, IndexRow
    from datamat.manifest import Manifest
    from datamat.materializer import Materializer
    from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
    from datamat.parallel import PathosExecutor, PathosPool, compute_chunksize, get_logger, physical_cores
    from datamat.readers import load
    from datamat.report import RunReport
    from datamat.verification import verify
    from datamat.writer import DatasetWriter

__all__ = [
    "BBoxes",
    "BrokenPoolError",
    "ClassLabel",
    "CorruptDataError",
    "DatamatError",
    "DatasetWriter",
    "ErrorPolicy",
    "Features",
    "FingerprintError",
    "Image",
    "IncompleteRunError",
    "Index",
    "IndexRow",
    "InputError",
    "Manifest",
    "Mask",
    "Materializer",
    "MissingDependencyError",
    "OptionError",
    "OutputError",
    "OutputLockedError",
    "ParallelError",
    "PathosExecutor",
    "PathosPool",
    "RunReport",
    "SampleError",
    "Scalar",
    "SchemaError",
    "ShardOptions",
    "SourceError",
    "TaskTimeout",
    "Tensor",
    "Text",
    "UnpicklableError",
    "WorkerDied",
    "WorkerOptions",
    "compute_chunksize",
    "get_logger",
    "load",
    "materialize",
    "physical_cores",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "datamat.errors": (
        *("BrokenPoolError", "CorruptDataError", "DatamatError", "FingerprintError", "IncompleteRunError"),
        *("InputError", "MissingDependencyError", "OptionError", "OutputError", "OutputLockedError", "ParallelError"),
        *("SampleError", "SchemaError", "SourceError", "TaskTimeout", "UnpicklableError", "WorkerDied"),
    ),
    "datamat.features": ("BBoxes", "ClassLabel", "Features", "Image", "Mask", "Scalar", "Tensor", "Text"),
    "datamat.from_function": ("materialize",),
    "datamat.index": ("Index", "IndexRow"),
    "datamat.manifest": ("Manifest",),
    "datamat.materializer": ("Materializer",),
    "datamat.options": ("ErrorPolicy", "ShardOptions", "WorkerOptions"),
    "datamat.parallel": ("PathosExecutor", "PathosPool", "compute_chunksize", "get_logger", "physical_cores"),
    "datamat.readers": ("load",),
    "datamat.report": ("RunReport",),
    "datamat.verification": ("verify",),
    "datamat.writer": ("DatasetWriter",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
