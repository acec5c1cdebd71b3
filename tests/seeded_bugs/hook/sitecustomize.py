"""Makes the defect that DATAMAT_SEEDED_BUG names, in whatever process has this folder on its PYTHONPATH."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pathlib
import sys

_TABLE = pathlib.Path(__file__).parent.parent / "defects.py"


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with its defect, and leaves no trace of it in the cache of bytecode."""

    def path_stats(self, path):
        raise OSError("not from the cache, nor into it")

    def source_to_code(self, data, path, **options):
        text = data.decode()
        if text.count(DEFECT.before) != 1:
            raise ImportError(
                f"defect {DEFECT.name}: {path} holds its text {text.count(DEFECT.before)} times; renew it"
            )
        return super().source_to_code(text.replace(DEFECT.before, DEFECT.after).encode(), path, **options)


class _Finder:
    """Finds the module that has the defect, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name != DEFECT.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(name, spec.origin)
        return spec


def _chosen(name):
    spec = importlib.util.spec_from_file_location("seeded_bug_defects", _TABLE)
    table = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = table  # dataclasses look there
    spec.loader.exec_module(table)
    return table.DEFECTS[name]


if "DATAMAT_SEEDED_BUG" in os.environ:
    DEFECT = _chosen(os.environ["DATAMAT_SEEDED_BUG"])
    sys.meta_path.insert(0, _Finder())
