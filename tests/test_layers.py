"""The plan of the house: a folder is one idea and imports only folders below it; nowhere is there a cycle.

Imports that only serve annotations count like all others: whose types one must know to read a module, one depends on.
So do those inside functions, which would dodge a cycle.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib

import pytest

import datamat

# From the bottom up: each may import those before it.
ROOMS = (
    "parallel",
    "values",
    "errors",
    "options",
    "fingerprint",
    "folders",
    "codecs",
    "features",
    "formats",
    "transforms",
    "directory",
    "sources",
    "readers",
    "writers",
    "plan",
    "events",
    "run",
    "view",
    "cli",
    "__main__",
    "testing",
)
# Rooms that can be used alone, and what they import.
ALONE = {
    "codecs": {"errors", "values"},
    "formats": {"errors", "values", "features", "codecs"},
    "parallel": set(),
    "folders": {"errors", "options", "values"},
    "features": {"errors", "values", "codecs"},
}
HEAVY = {"albumentations", "av", "cv2", "imagecodecs", "keras", "pandas", "pyarrow", "scipy", "soundfile", "tensorflow",
         "tifffile", "torch"}  # fmt: skip

PACKAGE = pathlib.Path(datamat.__file__).parent

pytestmark = pytest.mark.timeout(300)  # all modules are parsed


def _sources() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def _imports(tree: ast.AST) -> list[str]:
    """Return the modules of datamat that code imports anywhere: `.` for a relative import."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append(".")
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name in SOURCES else str(node.module) for name in inner]
    return sorted({name for name in found if name.partition(".")[0] in {"datamat", ""}})


@functools.cache
def _imported_by(module: str) -> list[str]:
    return _imports(_tree(module))


def _room(module: str) -> str:
    return module.split(".")[1]


def _may_import(importer: str, imported: str) -> bool:
    """A room may import itself and whatever is below it; nothing imports the façade above."""
    if imported == "datamat":
        # Their names load as the façade's do; the command line says its version; a view is saved, and
        # a table is read, as their users would.
        lazy = {
            "datamat.readers.tf",
            "datamat.writers",
            "datamat.readers.dataset",
            "datamat.readers.joining",
            "datamat.events",
            "datamat.run.materializer",
        }
        return importer in {*lazy, "datamat.cli"}
    if imported not in SOURCES:
        return False
    return ROOMS.index(_room(imported)) <= ROOMS.index(_room(importer))


def test_every_room_has_its_place():
    """Whoever adds a room gives it one."""
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}

    assert entries - {"__init__", "__pycache__", "py.typed"} == set(ROOMS)


def test_rooms_import_only_what_is_below_them():
    """No import leads upward."""
    wrong = [
        f"{module} imports {name}"
        for module in SOURCES
        if module != "datamat"
        for name in _imported_by(module)
        if not _may_import(module, name)
    ]

    assert not wrong


def test_no_import_is_part_of_a_cycle():
    """This holds within a room, too."""
    below = {module: set(_imported_by(module)) - {"datamat"} for module in SOURCES}

    graphlib.TopologicalSorter(below).prepare()


@pytest.mark.parametrize("room", ALONE)
def test_room_stands_alone(room):
    """A room that can be used alone imports only itself and what it lists."""
    modules = [name for name in SOURCES if name.startswith(f"datamat.{room}")]

    imported = {name for module in modules for name in _imported_by(module)} - {"datamat"}

    assert {_room(name) for name in imported} <= {room, *ALONE[room]}


def test_no_heavy_package_is_imported_at_the_top():
    """It is imported where it is used: else it costs seconds and hundreds of megabytes in every process."""
    wrong = [
        f"{module} imports {name}"
        for module in SOURCES
        for node in _tree(module).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
        if name.partition(".")[0] in HEAVY
    ]

    assert not wrong


@pytest.mark.parametrize("package", ["obstore", "botocore"])
def test_clients_of_stores_are_used_in_one_room(package):
    """Each version of them may change, and they hang in forked processes that do not know."""
    users = {
        module
        for module in SOURCES
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
        if name.partition(".")[0] == package
    }

    assert users == {"datamat.folders.objects"}


@pytest.mark.parametrize(
    ("importer", "code", "allowed"),
    [
        ("datamat.plan.plan", "import datamat.sources.store", True),
        ("datamat.sources.store", "from datamat.plan.plan import Plan", False),
        ("datamat.sources.store", "def f():\n    from datamat import plan", False),
        ("datamat.sources.store", "if TYPE_CHECKING:\n    import datamat.plan", False),
        ("datamat.codecs.png", "from datamat.codecs import headers", True),
        ("datamat.codecs.png", "from . import headers", False),
        ("datamat.run.run", "from datamat import load", False),
        ("datamat.run.run", "import numpy, datamation", True),
    ],
)
def test_rule_refuses_what_is_above(importer, code, allowed):
    """No way of writing an import gets past it."""
    assert all(_may_import(importer, name) for name in _imports(ast.parse(code))) is allowed
