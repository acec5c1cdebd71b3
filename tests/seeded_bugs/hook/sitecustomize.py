"""Makes the defect that DATAMAT_SEEDED_BUG names, in whatever process has this folder on its PYTHONPATH."""

import ast
import importlib.machinery
import os
import pathlib
import sys

_REGISTER = pathlib.Path(__file__).parent.parent


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its defect, and leaves no trace of it in the cache of bytecode."""

    def path_stats(self, path):
        raise OSError("not from the cache, nor into it")

    def source_to_code(self, data, path, **options):
        if isinstance(DEFECT.patch, patching.Replace):
            data = ast.parse(data)
            patching.apply_replace(data, DEFECT.function, DEFECT.patch)
        return super().source_to_code(data, path, **options)

    def exec_module(self, module):
        super().exec_module(module)
        if not isinstance(DEFECT.patch, patching.Replace):
            patching.apply_callable(module, DEFECT.function, DEFECT.patch)()


class _Finder:
    """Finds the module that has the defect, and nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name != DEFECT.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(name, spec.origin)
        return spec


if "DATAMAT_SEEDED_BUG" in os.environ:
    sys.path.insert(0, str(_REGISTER))
    import patching
    from defects import DEFECTS

    sys.path.remove(str(_REGISTER))
    DEFECT = DEFECTS[os.environ["DATAMAT_SEEDED_BUG"]]
    sys.meta_path.insert(0, _Finder())
