"""Turn raw samples into finished, verified dataset shards on all cores, and read them back.

>>> from datamat import Materializer                                     # doctest: +SKIP
>>> Materializer("camvid", source="CamVid", output="out/camvid").run()   # doctest: +SKIP

Each name below is loaded from its module on first use, so that `import datamat` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.2.0"


_MODULES = ("errors", "events", "features", "formats", "parallel", "testing", "writers")  # reached by `datamat.NAME`


def _lazy(module: str) -> bool:
    """Load the names that a package imports for type checkers on first use; return True if that works.

    The imports are read from the source of the package, so that each name is written once, in the form that a type
    checker needs: one to a line, `from HOME import NAME as NAME`. Without source (a frozen program), the package
    imports them at once.
    """
    import gc
    import importlib
    import sys
    from typing import Any

    namespace = vars(sys.modules[module])
    try:
        source = namespace["__loader__"].get_source(module)
    except (AttributeError, OSError):
        source = None
    if source is None:
        return False
    lines = (line.split() for line in source.splitlines() if line.startswith("    from "))
    homes = {words[3]: words[1] for words in lines if words[4:] == ["as", words[3]]}

    def load_name(name: str) -> Any:
        if module == "datamat" and name in _MODULES:
            return importlib.import_module(f"datamat.{name}")
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # Module contents stay: collections during imports would go through them a hundred times, and free nothing.
        collects = gc.isenabled()
        gc.disable()
        try:
            value = namespace[name] = getattr(importlib.import_module(homes[name]), name)
        finally:
            if collects:
                if not gc.get_freeze_count():
                    gc.freeze()
                    gc.unfreeze()  # now they are old, and only full collections go through them
                gc.enable()
        return value

    namespace["__all__"] = sorted(homes)
    namespace["__getattr__"] = load_name
    namespace["__dir__"] = lambda: sorted([*homes, *(name for name in namespace if name.startswith("__"))])
    return True


if TYPE_CHECKING or not _lazy(__name__):
    from datamat.directory.describe import describe as describe
    from datamat.directory.failures import failures as failures
    from datamat.directory.manifest import Manifest as Manifest
    from datamat.directory.provenance import Provenance as Provenance
    from datamat.directory.sidecars.exporting import export as export
    from datamat.directory.verify import VerifyReport as VerifyReport
    from datamat.directory.verify import verify as verify
    from datamat.errors import BrokenPoolError as BrokenPoolError
    from datamat.errors import CorruptDataError as CorruptDataError
    from datamat.errors import DatamatError as DatamatError
    from datamat.errors import FingerprintError as FingerprintError
    from datamat.errors import IncompleteRunError as IncompleteRunError
    from datamat.errors import InputError as InputError
    from datamat.errors import MissingDependencyError as MissingDependencyError
    from datamat.errors import OptionError as OptionError
    from datamat.errors import OutputError as OutputError
    from datamat.errors import OutputLockedError as OutputLockedError
    from datamat.errors import ParallelError as ParallelError
    from datamat.errors import SampleError as SampleError
    from datamat.errors import SchemaError as SchemaError
    from datamat.errors import Skip as Skip
    from datamat.errors import SourceError as SourceError
    from datamat.errors import TaskTimeout as TaskTimeout
    from datamat.errors import UnpicklableError as UnpicklableError
    from datamat.errors import WorkerDied as WorkerDied
    from datamat.features import Audio as Audio
    from datamat.features import BBoxes as BBoxes
    from datamat.features import Bytes as Bytes
    from datamat.features import ClassLabel as ClassLabel
    from datamat.features import Depth as Depth
    from datamat.features import Features as Features
    from datamat.features import Image as Image
    from datamat.features import Json as Json
    from datamat.features import Keypoints as Keypoints
    from datamat.features import ListOf as ListOf
    from datamat.features import Mask as Mask
    from datamat.features import Nullable as Nullable
    from datamat.features import Polygons as Polygons
    from datamat.features import Scalar as Scalar
    from datamat.features import Tensor as Tensor
    from datamat.features import Text as Text
    from datamat.features import Timestamp as Timestamp
    from datamat.features import Tokens as Tokens
    from datamat.features import Video as Video
    from datamat.options import ErrorPolicy as ErrorPolicy
    from datamat.options import ShardOptions as ShardOptions
    from datamat.options import WorkerOptions as WorkerOptions
    from datamat.parallel import PathosExecutor as PathosExecutor
    from datamat.parallel import PathosPool as PathosPool
    from datamat.parallel import compute_chunksize as compute_chunksize
    from datamat.parallel import get_logger as get_logger
    from datamat.parallel import physical_cores as physical_cores
    from datamat.parallel import register_standin as register_standin
    from datamat.plan.plan import Plan as Plan
    from datamat.readers.dataset import ShardedDataset as ShardedDataset
    from datamat.readers.dataset import concat as concat
    from datamat.readers.dataset import load as load
    from datamat.readers.dataset import mix as mix
    from datamat.readers.preview import Picture as Picture
    from datamat.run.convert import convert as convert
    from datamat.run.estimate import Estimate as Estimate
    from datamat.run.function import materialize as materialize
    from datamat.run.materializer import Materializer as Materializer
    from datamat.run.merge import merge as merge
    from datamat.run.report import RunReport as RunReport
    from datamat.run.status import Status as Status
    from datamat.run.status import status as status
    from datamat.sources.rows import IndexRow as IndexRow
    from datamat.view import view as view
    from datamat.writers.base import DatasetWriter as DatasetWriter
    from datamat.writers.base import DataSource as DataSource
    from datamat.writers.dataset import ImportWriter as ImportWriter
    from datamat.writers.index import Index as Index
