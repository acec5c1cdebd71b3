"""Provides tests for plug-ins: subclass the class for your kind of plug-in in a test module; pytest collects it.

    from datamat.testing import ShardFormatConformance

    class TestLines(ShardFormatConformance):
        def make_format(self):
            return LinesFormat()

| plug-in | class | the subclass defines |
| --- | --- | --- |
| `DatasetWriter` | `DatasetWriterConformance` | `make_writer`, `make_source` |
| `DataSource`, or any object with `len` and items | `DataSourceConformance` | `make_source` |
| `Feature` | `FeatureConformance` | `make_feature`, `make_values` |
| `ShardFormat` | `ShardFormatConformance` | `make_format` |
| `Folder` | `FolderConformance` | `make_folder` |
| `Sidecar` | `SidecarConformance` | `make_sidecar` |
| a hook | `HookConformance` | `make_hook` |
| a type for `register_standin` | `StandinConformance` | `make_object`, `use` |
| `concurrent.futures.Executor` | `ExecutorConformance` | `make_executor` |

`InlineExecutor` runs every call in the calling thread: tests of a writer or a whole run then take milliseconds, and a
debugger stops in `read`.

datamat's own plug-ins pass the same tests. A failed assertion names the case, what was found and what was expected. To
skip a test, set it to None in the subclass and say why. This module does not import pytest.
"""

from __future__ import annotations

from datamat.testing.executors import ExecutorConformance, InlineExecutor
from datamat.testing.features import FeatureConformance
from datamat.testing.folders import FolderConformance
from datamat.testing.formats import ShardFormatConformance
from datamat.testing.hooks import HookConformance
from datamat.testing.sidecars import SidecarConformance
from datamat.testing.sources import DataSourceConformance
from datamat.testing.standins import StandinConformance
from datamat.testing.writers import DatasetWriterConformance

__all__ = [
    "DataSourceConformance",
    "DatasetWriterConformance",
    "ExecutorConformance",
    "FeatureConformance",
    "FolderConformance",
    "HookConformance",
    "InlineExecutor",
    "ShardFormatConformance",
    "SidecarConformance",
    "StandinConformance",
]


def __dir__() -> list[str]:
    return __all__
