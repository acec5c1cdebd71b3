"""Who may import whom: each module imports only from below, so that it can be read and tested without what is above.

Imports that only serve annotations count like all others: whose types one must know to read a module, one depends on.
"""

from __future__ import annotations

import ast
import pathlib
from typing import NamedTuple

import pytest

import datamat

# Layers from the lowest, with an empty line between them. A module may import from every lower layer; where a line
# names a package and an order, also from those of the line that stand left of its `<`. A new module fails the tests
# until it is put here, as low as its imports allow.
LAYERS = """
errors

codecs: files info libraries < bmp jpeg opencv png_chunks webp < png_filters < png < encode pictures < __init__
parallel: affinity blackbox channel chunks contexts logs namespaces role serial shipment slot startmethod < byvalue standins < inherited
fingerprint: origins parts < bytecode < code < objects < graph < __init__
interrupts ledger options seeding source_files storage text

features: base < pictures values < schema < __init__
parallel: pickling servers < payloads < outcomes
limits watch

formats: offsets < __init__ < arrow buffered guards gzip_members ranges wire < example ustar < block < framing
parallel: worker < tasks < failures < handle inquest < progress
findings manifest
transforms: stages < pipeline < augmenter < __init__

formats: parquet webdataset < tfrecord < arrayrecord
parallel: crew < pool < maps
readers: collate damage mapped_offsets memory order preview remote schedule sharing tf_exit tf_features threads torch transforms < cache service tf_damage tf_handed tf_pictures tf_snapshot < keys opening < records tf < samples
messages shard_entries tfds_files
interop: contents < croissant dali huggingface litdata tfds wids < exporting < __init__

parallel: executor < pathos_pool < __init__
samples

index
readers: making < states < batches < dataset < loading < __init__

quarantine rows writer

ingredients pipeline plan row_writer

writers: __init__ camvid coco dataset function image_folder pedestrian table
index_files inspection kept pilot receipts recipe report shard_check snapshot

changes estimate growing provenance retry stored survey verification work

dispatch parts repair replay status

running

launch

materializer

conversion from_function

cli: console < convert export inspect maintenance serve < __init__ < __main__

__init__
"""  # noqa: E501 -- one line for each package of a layer

PACKAGE = pathlib.Path(datamat.__file__).parent


class Place(NamedTuple):
    layer: int
    group: int
    step: int


def _placed() -> list[tuple[str, Place]]:
    found = []
    for layer, lines in enumerate(LAYERS.strip().split("\n\n")):
        groups = [(package, steps) for line in lines.splitlines() for package, steps in _groups_of(line)]
        for group, (package, steps) in enumerate(groups):
            for step, names in enumerate(steps.split("<")):
                found += [(_module(package, name), Place(layer, group, step)) for name in names.split()]
    return found


def _groups_of(line: str) -> list[tuple[str, str]]:
    package, colon, steps = line.partition(":")
    return [(package, steps)] if colon else [("", name) for name in line.split()]


def _module(package: str, name: str) -> str:
    return ".".join(part for part in ("datamat", package, name) if part and part != "__init__")


def _sources() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


PLACES = dict(_placed())
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


def _may_import(importer: Place, imported: Place) -> bool:
    if importer[:2] == imported[:2]:
        return imported.step < importer.step
    return imported.layer < importer.layer


def test_every_module_has_a_place():
    """The list above names the modules that there are, and each of them once."""
    names = [name for name, _ in _placed()]

    assert [name for name in SOURCES if name not in names] == []
    assert [name for name in names if name not in SOURCES] == []
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", SOURCES)
def test_module_imports_only_from_below(module):
    """A module imports nothing from its own level or from above."""
    wrong = [
        name
        for name in _imports(ast.parse(SOURCES[module].read_text()))
        if name not in PLACES or not _may_import(PLACES[module], PLACES[name])
    ]

    assert not wrong, f"{module} {PLACES[module]} imports " + ", ".join(f"{name} {PLACES.get(name)}" for name in wrong)


@pytest.mark.parametrize("module", SOURCES)
def test_no_import_of_datamat_hides_in_a_function(module):
    """Nothing is imported late to dodge a cycle: the shared thing moves down instead."""
    functions = [
        node
        for node in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    hidden = {function.name: _imports(function) for function in functions if _imports(function)}

    assert not hidden


@pytest.mark.parametrize(
    ("package", "known"),
    [
        ("codecs", {"errors"}),
        ("formats", {"errors", "features"}),
        ("parallel", {"errors"}),
        ("features", {"errors", "codecs"}),
    ],
)
def test_package_stands_by_itself(package, known):
    """A package that can be used alone imports only itself and what it says."""
    modules = [name for name in SOURCES if name.startswith(f"datamat.{package}")]

    imported = {name for module in modules for name in _imports(ast.parse(SOURCES[module].read_text()))}

    assert {name.split(".")[1] for name in imported} <= {package, *known}


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("datamat.plan", "datamat.rows", True),
        ("datamat.rows", "datamat.plan", False),
        ("datamat.plan", "datamat.pipeline", False),
        ("datamat.codecs.png", "datamat.codecs.info", True),
        ("datamat.codecs.info", "datamat.codecs.png", False),
        ("datamat.codecs.png", "datamat.codecs.png", False),
        ("datamat.storage", "datamat.codecs.info", False),
    ],
)
def test_rule_refuses_sideways_and_up(importer, imported, allowed):
    """The rule itself: down is allowed, up and sideways are not, and a group has an order of its own."""
    assert _may_import(PLACES[importer], PLACES[imported]) is allowed


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import datamat.plan", ["datamat.plan"]),
        ("from datamat import codecs", ["datamat.codecs"]),
        ("from datamat import load", ["datamat"]),
        ("from datamat.plan import Plan", ["datamat.plan"]),
        ("if TYPE_CHECKING:\n    from datamat.plan import Plan", ["datamat.plan"]),
        ("def f():\n    import datamat.plan", ["datamat.plan"]),
        ("from . import plan", ["."]),
        ("import numpy, datamation", []),
    ],
)
def test_every_form_of_import_is_seen(code, found):
    """No way of writing an import gets past the rule."""
    assert _imports(ast.parse(code)) == found
