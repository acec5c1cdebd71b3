"""What users rely on: the public names, their documentation, and that the examples in it run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import typing

import numpy as np
import pytest

import datamat
from datamat import errors

MODULES = sorted(found.name for found in pkgutil.walk_packages(datamat.__path__, "datamat."))

AGREED = {
    *("BBoxes", "ClassLabel", "DatasetWriter", "ErrorPolicy", "Features", "Image", "Index", "IndexRow", "Manifest"),
    *("Mask", "Materializer", "PathosExecutor", "PathosPool", "RunReport", "Scalar", "ShardOptions", "Tensor", "Text"),
    *("WorkerOptions", "compute_chunksize", "get_logger", "load", "materialize", "physical_cores", "verify"),
    # what public methods return or take, and calls apart from runs
    *("Batches", "ColumnProfile", "DataSource", "Estimate", "ExportReport", "Feature", "ImportWriter", "Inspection"),
    *("LedgerEntry", "Plan", "PoolStats", "PoolProgress", "Provenance", "ShardChange", "ShardedDataset", "Status"),
    *("VerifyReport", "WorkerStats", "convert", "export", "inspect", "original_key", "read_ledger", "register_feature"),
    *("read_status", "register_standin", "retire", "serving", "concat", "merge", "mix"),
    *("FromShard", "Sidecar"),
    *("view", "viewing", "ViewPage", "ViewServer"),
    *("Bytes", "Json", "Timestamp", "Optional", "Sequence"),
    *("Audio", "Tokens", "Video"),
    *("Depth", "Keypoints", "Polygons"),
    *("Offsets", "ShardAssembler", "ShardFormat", "ShardReader", "ShardWriter"),
    # what hooks hear
    *("LimitReached", "PartDamaged", "PartDone", "PlanMade", "RunEnded", "RunEvent", "RunHook", "RunStarted"),
    *("SampleDropped", "SampleFailed", "SampleRecovered", "SampleRetried", "ShardFinished"),
    *("WorkerLost", "WorkersStarted"),
}


def test_package_exports_what_was_agreed():
    """`datamat` has the names of its design, every exception, and no others."""
    exceptions = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }

    assert set(datamat.__all__) == AGREED | exceptions


@pytest.mark.parametrize("name", datamat.__all__)
def test_public_name_resolves_and_is_documented(name):
    """Each name exists, says what it is for, and appears in `dir`."""
    value = getattr(datamat, name)

    assert inspect.getdoc(value)
    assert name in dir(datamat)


def test_unknown_name_is_an_attribute_error():
    """A missing name is refused as Python does it, so that `hasattr` works."""
    with pytest.raises(AttributeError, match="module 'datamat' has no attribute 'materialise'"):
        datamat.materialise  # noqa: B018 -- looking is the point


@pytest.mark.parametrize("package", ["datamat", "datamat.parallel"])
def test_type_checkers_and_python_see_the_same_names(package):
    """The imports that type checkers read name the modules that the lazy table loads from."""
    module = importlib.import_module(package)

    for name, home in _imports_for_types(module).items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
    assert set(_imports_for_types(module)) == set(module.__all__)


@pytest.mark.parametrize("name", ["datamat", *MODULES])
def test_module_lists_its_names_sorted(name):
    """`__all__` is sorted as ruff does it (constants, classes, functions), and each of its names is there, once."""
    module = importlib.import_module(name)
    if not hasattr(module, "__all__"):
        assert module.__file__.endswith("__init__.py"), f"{name} has no __all__"
        return

    assert list(module.__all__) == sorted(set(module.__all__), key=_order_of_ruff)
    assert [missing for missing in module.__all__ if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", ["datamat", *MODULES])
def test_everything_public_is_documented(name):
    """The module, its public functions and classes, and what these add to their interface have docstrings."""
    module = importlib.import_module(name)

    assert inspect.getdoc(module), name
    assert _undocumented(module) == []


@pytest.mark.parametrize("name", ["datamat", *MODULES])
def test_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    """Every example prints what it shows; the public names are there, as after `from datamat import *`."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = {"np": np, **{public: getattr(datamat, public) for public in datamat.__all__}}

    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for found in doctest.DocTestFinder().find(module, extraglobs=names):
        if found.examples:  # to run the thousands that have none takes longer than the others
            runner.run(found)

    assert runner.failures == 0


def _order_of_ruff(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


def _imports_for_types(module) -> dict[str, str]:
    """Return the module that each name comes from, by the imports under `if TYPE_CHECKING`."""
    tree = ast.parse(inspect.getsource(module))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


def _undocumented(module) -> list[str]:
    wrong = []
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if not callable(value) or typing.get_origin(value) is not None or inspect.getmodule(value) is not module:
            continue
        members = vars(value).items() if inspect.isclass(value) else ()
        inherited = {known for base in inspect.getmro(value)[1:] for known in vars(base)} if members else set()
        documented = [(f"{name}.{member}", part) for member, part in members if member not in inherited]
        wrong += [path for path, part in [(name, value), *documented] if _is_told_nowhere(path, part)]
    return wrong


def _is_told_nowhere(path: str, part: object) -> bool:
    public = not path.rpartition(".")[2].startswith("_")
    code = inspect.isroutine(part) or inspect.isclass(part) or isinstance(part, property | classmethod | staticmethod)
    return public and code and not inspect.getdoc(part)
