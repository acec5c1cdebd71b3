"""What users rely on: the public names, their documentation, and that the examples in it run."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import typing

import numpy as np
import pytest

import datamat

MODULES = ["datamat", *sorted(found.name for found in pkgutil.walk_packages(datamat.__path__, "datamat."))]

PUBLIC = [
    "",
    "features",
    "formats",
    "writers",
    "events",
    "errors",
    "parallel",
    "readers.tf",
    "directory.sidecars",
    "view",
    "testing",
]


def test_public_names_resolve_and_are_documented():
    """Each name exists, says what it is for, and appears in `dir`."""
    assert not [name for name in datamat.__all__ if not inspect.getdoc(getattr(datamat, name))]
    assert set(datamat.__all__) <= set(dir(datamat))


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_of_a_module_shows_what_users_may_call(name):
    """Not what the module imports for itself, nor what is there for other modules of datamat."""
    module = importlib.import_module(f"datamat.{name}".rstrip("."))
    shown = [name for name in dir(module) if not name.startswith("__")]

    assert shown
    assert {*shown} <= {*module.__all__}
    assert not [name for name in shown if not inspect.getdoc(getattr(module, name))]


def test_dir_of_a_materializer_shows_what_users_may_call(tmp_path):
    """No attribute is among them that a user has no business with."""
    made = datamat.Materializer([{"x": 1}], None, tmp_path)

    assert {"run", "plan", "status"} <= {*dir(made)}
    assert not [name for name in dir(made) if name.startswith("_") and not name.startswith("__")]


def _public_callables():
    for name in PUBLIC:
        module = importlib.import_module(f"datamat.{name}".rstrip("."))
        for found in (getattr(module, shown) for shown in dir(module) if not shown.startswith("_")):
            if inspect.isclass(found):
                own = {name: each for name, each in vars(found).items() if name == "__init__" or name[0] != "_"}
                yield from [found, *(each.fget if isinstance(each, property) else each for each in own.values())]
            else:
                yield found


def test_hints_of_all_that_users_may_call_resolve():
    """Libraries that make command lines, forms and checks of signatures read them as the program runs."""
    found = {each for each in _public_callables() if inspect.isfunction(each) or inspect.isclass(each)}

    unresolved = {}
    for each in found:
        try:
            typing.get_type_hints(each)
        except NameError as error:
            unresolved[each.__qualname__] = str(error)

    assert len(found) > 500 and not unresolved


def test_unknown_name_is_an_attribute_error():
    """A missing name is refused as Python does it, so that `hasattr` works."""
    with pytest.raises(AttributeError, match="module 'datamat' has no attribute 'materialise'"):
        datamat.materialise  # noqa: B018 -- looking is the point


@pytest.mark.parametrize("package", ["datamat", "datamat.parallel"])
def test_type_checkers_and_python_see_the_same_names(package):
    """The imports that type checkers read name the modules that the lazy table loads from."""
    module = importlib.import_module(package)
    blocks = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}

    assert set(homes) == set(module.__all__)
    for name, home in homes.items():
        found, where = getattr(module, name), importlib.import_module(home)
        # `view` is a room, too, which can be called as the function can.
        assert found is getattr(where, name) or (name == "view" and found is where and callable(found))


def test_methods_that_users_may_call_are_documented():
    """Those that implement an interface are documented there."""
    classes = {each for each in _public_callables() if inspect.isclass(each)}
    members = [member for each in classes for name, member in vars(each).items() if name[0] != "_"]
    methods = [member for member in members if inspect.isroutine(member) or isinstance(member, property)]

    assert not [method for method in methods if not inspect.getdoc(method)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_documented_and_their_examples_run(name, tmp_path, monkeypatch):
    """An example prints what it shows, with the names of `from datamat import *`."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    names = {"np": np, **{public: getattr(datamat, public) for public in datamat.__all__}}

    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for found in doctest.DocTestFinder().find(module, extraglobs=names):
        if found.examples:  # to run the thousands that have none takes longer than the others
            runner.run(found)

    assert runner.failures == 0
    assert inspect.getdoc(module)
