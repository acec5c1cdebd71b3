"""Each deliberate defect is caught by its test; see tests/README.md."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest
from defects import DEFECTS
from patching import MisfitError, Replace, apply_callable, apply_replace, delete, replace

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.timeout(300)
@pytest.mark.long
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_caught(name):
    """The test fails under the defect; the rest of the suite shows that it passes without."""
    path = os.pathsep.join([str(HERE / "hook"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Of pytest's plugins, the tests need one: to import the others would take a third of the time.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    environment = {**os.environ, **plugins, "PYTHONPATH": path, "DATAMAT_SEEDED_BUG": name}
    options = ["-x", "-p", "no:cacheprovider", "--timeout", "60", "--commit"]

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, DEFECTS[name].caught_by],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "MisfitError" not in ended.stdout + ended.stderr
    # 1: tests ran, and some failed. An import that fails, or a test that is missing, gives another code. A damaged file
    # that is trusted may end the process as well.
    assert ended.returncode in {1, -signal.SIGSEGV}, (
        f"{DEFECTS[name].what}: not caught\n{ended.stdout[-3000:]}{ended.stderr[-1000:]}"
    )


@functools.cache
def _source(module):
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.exists():
        raise MisfitError(f"no {path.relative_to(ROOT)}; was the module renamed?")
    return path.read_text()


@functools.cache
def _parsed(path):
    return ast.parse(path.read_text()).body


def _is_left_out(file, test):
    """Return True if `make test` may leave a test out: it, its class or its file is marked `long` or `sample`."""
    body = _parsed(ROOT / file)
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    marks = [text for text in marks if text.startswith("pytestmark")]
    for name in test.partition("[")[0].split("::"):
        node = next(node for node in body if getattr(node, "name", "") == name)
        body = node.body
        marks += [text for text in map(ast.unparse, node.decorator_list) if "parametrize" not in text]
    return any(mark in text for text in marks for mark in ("mark.long", "mark.sample"))


def _misfit(defect):
    """Return what keeps a defect from being made, or from being caught on each commit, or nothing."""
    file, _, test = defect.caught_by.partition("::")
    if f"def {test.partition('[')[0].rpartition('::')[2]}(" not in (ROOT / file).read_text():
        return f"{defect.name}: {file} has no {test}"
    if "[" not in test and _is_left_out(file, test):
        return f"{defect.name}: {defect.caught_by} is not, or not whole, in the commit tier; name a cheaper test"
    try:
        if isinstance(defect.patch, Replace):
            tree = ast.parse(_source(defect.module))
            apply_replace(tree, defect.function, defect.patch)
            compile(tree, defect.module, "exec")
        else:
            apply_callable(importlib.import_module(defect.module), defect.function, defect.patch)
    except MisfitError as exc:
        return f"{defect.name}: {defect.module}: {exc}"
    return None


def test_defects_fit_the_sources():
    """Each defect can be made where it says, and `make test` has the test that must catch it."""
    misfits = [_misfit(defect) for defect in DEFECTS.values()]

    assert not any(misfits), "\n\n".join(filter(None, misfits))


MODULE = '''
import os

LIMIT = 3

class Box(dict):
    def put(self, key, *, twice=False):
        """Store a value."""
        if twice:  # as it was
            self[key] = LIMIT * 2
        else:
            self[key] = os.getpid()
        return self

    @staticmethod
    def name():
        return "box"
'''


def _patched(place, patch):
    """Return the box of a module that has a defect."""
    tree = ast.parse(MODULE)
    apply_replace(tree, place, patch)
    module = types.ModuleType("boxes")
    exec(compile(tree, "boxes", "exec"), vars(module))
    return module


@pytest.mark.parametrize(
    ("place", "patch", "expected"),
    [
        ("Box.put", replace("LIMIT*2", "LIMIT"), {"a": 3}),
        ("Box.put", replace("self[__key] = LIMIT * __n", "self[__key] = __n, __n"), {"a": (2, 2)}),
        ("Box.put", delete("self[key] = LIMIT * 2"), {}),
        ("Box.put", replace("if __asked:\n __body\nelse:\n __rest", "__body\nself['b'] = 1"), {"a": 6, "b": 1}),
        ("Box.put", replace("LIMIT", "len('seven')"), {"a": 10}),
        ("LIMIT", replace("3", "4"), {"a": 8}),
        ("Box", replace("dict", "__import__('collections').OrderedDict"), {"a": 6}),
    ],
)
def test_patch_replaces_code_whatever_its_form_and_surroundings(place, patch, expected):
    """It replaces statements, expressions, constants and bases; wildcards keep what they matched."""
    module = _patched(place, patch)

    assert module.Box().put("a", twice=True) == expected


@pytest.mark.parametrize(
    ("place", "patch", "message"),
    [
        ("Bag.put", delete("return self"), r"no Bag\.put; was it renamed to Box\.put\?"),
        ("Box.take", delete("return self"), r"no Box\.take; was it renamed to Box\.put"),
        ("Box.put", replace("LIMIT * 3", "0"), r"Box\.put holds `LIMIT \* 3` 0 times, not once;(.|\n)*LIMIT \* 2"),
        ("Box.put", replace("self[key]", "__it"), "2 times, not once"),
        (
            "Box.put",
            replace("os.getpid()", "time.time()"),
            r"`time\.time\(\)` uses time, which the module does not know",
        ),
        ("Box.put", delete("self._put(key)"), "0 times, not once"),
        ("Box.put", replace("os.getpid()", "self._key"), "uses _key, which the module does not know"),
    ],
)
def test_patch_that_does_not_fit_reports_candidates(place, patch, message):
    """Whoever renames something reads where defects name it."""
    with pytest.raises(MisfitError, match=message):
        _patched(place, patch)


def test_patch_may_be_a_callable():
    """It gets the function and returns a wrong one."""
    module = types.ModuleType("boxes")
    exec(MODULE, vars(module))

    apply_callable(module, "Box.put", lambda put: lambda self, key: put(self, key + "!", twice=True))()
    apply_callable(module, "Box.name", lambda name: lambda: name().upper())()

    assert (module.Box().put("a"), module.Box.name()) == ({"a!": 6}, "BOX")
    with pytest.raises(MisfitError, match=r"no Bin\.put; was it renamed to Box\.put"):
        apply_callable(module, "Bin.put", lambda put: None)
    with pytest.raises(MisfitError, match=r"Box\.put: the patch returns the function unchanged"):
        apply_callable(module, "Box.put", lambda put: put)
