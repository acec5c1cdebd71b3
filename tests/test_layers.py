"""The plan of the house: a folder is one idea and imports only folders below it; nowhere is there a cycle.

Imports that only serve annotations count like all others: whose types one must know to read a module, one depends on.
"""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import pathlib

import pytest

import datamat
import datamat.features

# From the bottom up: each may import those before it.
ROOMS = (
    "errors",
    "options",
    "fingerprint",
    "parallel",
    "codecs",
    "features",
    "formats",
    "transforms",
    "directory",
    "readers",
    "writers",
    "plan",
    "run",
    "cli",
    "testing",
)
MOST_FILES = 132
LONGEST_CHAIN = 20

PACKAGE = pathlib.Path(datamat.__file__).parent


def _sources() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()


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
    return _imports(ast.parse(SOURCES[module].read_text()))


def _room(module: str) -> str:
    return module.split(".")[1]


def _may_import(importer: str, imported: str) -> bool:
    """A room may import itself and whatever is below it; nothing imports the façade above."""
    if imported == "datamat":
        return importer == "datamat.parallel"  # whose names load as the façade's do
    if imported not in SOURCES:
        return False
    return ROOMS.index(_room(imported)) <= ROOMS.index(_room(importer))


def test_the_package_has_these_rooms_and_no_more_files_than_it_needs():
    """Whoever adds a room gives it a place; a file ends where its idea ends, and not before."""
    entries = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[:2] != "__"}

    assert entries - {"py.typed"} == set(ROOMS)
    assert len(SOURCES) <= MOST_FILES


def test_no_two_classes_have_one_name():
    """Neither public nor private ones: who reads a name knows what it is."""
    names = [
        node.name for path in SOURCES.values() for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]  # fmt: skip

    assert [name for name, count in collections.Counter(names).items() if count > 1] == []


def test_few_places_outside_of_features_ask_for_the_type_of_one():
    """What a type means is said by its methods, which types of other packages have, too."""
    types = {name for name, value in vars(datamat.features).items() if isinstance(value, type)}
    types = {name for name in types if issubclass(vars(datamat.features)[name], datamat.features.Feature)}
    asked = [
        f"{module}:{node.lineno}"
        for module, path in SOURCES.items()
        if not module.startswith("datamat.features")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "isinstance"
        and any(getattr(name, "id", "") in (types | {"ListOf"}) - {"Sequence"} for name in ast.walk(node.args[1]))
    ]

    assert len(asked) <= 10, asked


@pytest.mark.parametrize("module", [module for module in SOURCES if module != "datamat"])
def test_room_imports_only_what_is_below_it(module):
    """No import leads upward."""
    wrong = [name for name in _imported_by(module) if not _may_import(module, name)]

    assert not wrong, f"{module} imports {', '.join(wrong)}"


def test_no_import_is_part_of_a_cycle():
    """This holds within a room, too; and no chain of imports is too long."""
    depths: dict[str, int] = {}
    below = {module: set(_imported_by(module)) - {"datamat"} for module in SOURCES}
    for module in graphlib.TopologicalSorter(below).static_order():
        depths[module] = 1 + max((depths[name] for name in below[module]), default=0)

    assert max(depths.values()) <= LONGEST_CHAIN


@pytest.mark.parametrize("module", SOURCES)
def test_no_import_of_datamat_hides_in_a_function(module):
    """A late import would dodge a cycle: the shared thing moves down instead."""
    functions = [
        node
        for node in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert not {function.name: _imports(function) for function in functions if _imports(function)}


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_room_says_its_idea(room):
    """The first sentence of its `__init__` does."""
    assert ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))


@pytest.mark.parametrize(
    ("room", "known"),
    [
        ("codecs", {"errors"}),
        ("formats", {"errors", "features", "codecs"}),
        ("parallel", {"errors"}),
        ("features", {"errors", "codecs"}),
    ],
)
def test_room_stands_alone(room, known):
    """A room that can be used alone imports only itself and what it lists."""
    modules = [name for name in SOURCES if name.startswith(f"datamat.{room}")]

    imported = {name for module in modules for name in _imported_by(module)} - {"datamat"}

    assert {_room(name) for name in imported} <= {room, *known}


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("datamat.plan.plan", "datamat.directory.rows", True),
        ("datamat.directory.rows", "datamat.plan.plan", False),
        ("datamat.codecs.png", "datamat.codecs.headers", True),
        ("datamat.codecs.png", "datamat.features", False),
        ("datamat.run.run", "datamat", False),
    ],
)
def test_rule_refuses_what_is_above(importer, imported, allowed):
    """The rule refuses imports of each forbidden kind."""
    assert _may_import(importer, imported) is allowed


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import datamat.plan", ["datamat.plan"]),
        ("from datamat import codecs", ["datamat.codecs"]),
        ("from datamat import load", ["datamat"]),
        ("from datamat.plan.plan import Plan", ["datamat.plan.plan"]),
        ("if TYPE_CHECKING:\n    from datamat.plan.plan import Plan", ["datamat.plan.plan"]),
        ("def f():\n    import datamat.plan", ["datamat.plan"]),
        ("from . import plan", ["."]),
        ("import numpy, datamation", []),
    ],
)
def test_every_form_of_import_is_seen(code, found):
    """No way of writing an import gets past the rule."""
    assert _imports(ast.parse(code)) == found
