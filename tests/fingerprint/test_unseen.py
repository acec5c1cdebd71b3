"""Whatever the user's code can depend on counts in its digest, or is named as what cannot be seen."""

from __future__ import annotations

import importlib
import logging
import os
import py_compile
import sys
import textwrap
import time
import zipfile

import pytest

from datamat import DatasetWriter, Features, IndexRow, Scalar, materialize
from datamat.fingerprint import examine
from datamat.plan.digests import as_written
from datamat.testing import InlineExecutor

HELPERS = "def f():\n    return {}\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a folder that modules are imported from, afresh each time that `look` is called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SETTING", "1")
    monkeypatch.setenv("TZ", "UTC")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) is None or str(tmp_path) in sys.modules[name].__file__:
            del sys.modules[name]
    monkeypatch.undo()
    time.tzset()


def write_helpers(project, number):
    path = project / "helpers.py"
    path.write_text(HELPERS.format(number))
    os.utime(path, (1e9 + number, 1e9 + number))  # not the time of the bytecode that is cached


def look(project, source, name="f"):
    """Return everything that decides a function of a user's module, and what cannot be seen."""
    (project / "users.py").write_text(textwrap.dedent(source))
    os.utime(project / "users.py", (1, 1))
    importlib.invalidate_caches()
    for module in ("users", "helpers"):
        sys.modules.pop(module, None)
    found = examine(getattr(importlib.import_module("users"), name), where="fn")
    return (found.digest, found.environment), found.unseen


def change(project, monkeypatch):
    """Change all that the functions of the table may depend on."""
    write_helpers(project, 22)
    monkeypatch.setenv("SETTING", "2")
    monkeypatch.setenv("TZ", "Asia/Seoul")
    time.tzset()


COUNTED = {
    "a variable by its name": "import os\ndef f(): return os.environ['SETTING']",
    "by the name that a global holds": "import os\nNAME = 'SETTING'\ndef f(): return os.environ[NAME]",
    "an imported mapping": "from os import environ\ndef f(): return environ['SETTING']",
    "an imported function": "from os import getenv\nNAME = 'SETTING'\ndef f(): return getenv(NAME, 'x')",
    "bytes": "import os\ndef f(): return os.environb[b'SETTING']",
    "in a path": "import os\ndef f(): return os.path.expandvars('data/${SETTING}/$OTHER')",
    "a module in sys.modules": "import sys\ndef f(): return sys.modules['helpers'].f()",
    "a module by a global": "import importlib\nNAME = 'helpers'\ndef f(): return importlib.import_module(NAME).f()",
    "vars of a module": "import helpers\ndef f(name): return vars(helpers)[name]()",
    "getattr of a module": "import helpers\ndef f(name): return getattr(helpers, name)()",
    "locals": "import helpers\ndef f():\n    g = helpers.f\n    return locals()['g']()",
    "a partial": "import functools, helpers\nf = functools.partial(map, helpers.f)",
    "an attrgetter": "import operator, helpers\nget = operator.attrgetter('f')\ndef f(): return get(helpers)()",
    "what a context variable is set to": "import contextvars, helpers\nVAR = contextvars.ContextVar('v')\n"
    "VAR.set(helpers.f)\ndef f(): return VAR.get()()",
    "a callable": "import helpers\nclass K:\n    def __call__(self): return helpers.f()\nf = K()",
    "the zone, by fromtimestamp": "import datetime\ndef f(n): return datetime.datetime.fromtimestamp(int(n) / 2)",
    "the zone, by localtime": "import time\ndef f(n): return time.strftime('%H', time.localtime(n))",
    "the zone, by mktime": "from time import mktime\ndef f(n): return mktime(n)",
    "the zone, by astimezone": "def f(time): return time.astimezone().isoformat()",
    "the zone, by timestamp": "def f(time): return max(time.timestamp(), 0)",
}
NAMED = {
    "items of the environment": "import os\ndef f(): return [v for k, v in os.environ.items() if k == 'SETTING']",
    "a copy of the environment": "import os\ndef f(): return dict(os.environ)['SETTING']",
    "the environment unpacked": "import os\ndef f(): return {**os.environ}['SETTING']",
    "the environment passed on": "import os\ndef g(e): return e['SETTING']\ndef f(): return g(os.environ)",
    "the environment under another name": "import os\nenv = os.environ\ndef f(): return env['SETTING']",
    "the environment as a default": "import os\ndef f(env=os.environ): return env['SETTING']",
    "the environment in a local variable": "def f():\n    from os import environ\n    return [*environ]",
    "the environment of another os": "import os as system\ndef f(): return list(system.environ)",
    "a computed variable": "import os\ndef f(a): return os.environ['SETT' + a]",
    "a computed variable, by get": "import os\ndef f(a): return os.environ.get(f'SETT{a}', '')",
    "a computed variable, by getenv": "import os\ndef f(a): return os.getenv('SETT' + str(a), '')",
    "a computed path": "import os\ndef f(a): return os.path.expandvars(a)",
    "globals": "from helpers import f as g\ndef f(): return globals()['g']()",
    "globals of a function": "from helpers import f as g\ndef f(): return f.__globals__['g']()",
    "globals of a frame": "import sys\nfrom helpers import f as g\ndef f(): return sys._getframe().f_globals['g']()",
    "eval": "from helpers import f as g\ndef f(): return eval('g()')",
    "eval of builtins": "import builtins\nfrom helpers import f as g\ndef f(): return builtins.eval('g()')",
    "eval as a value": "from helpers import f as g\ntools = {'e': eval}\ndef f(): return tools['e']('g()')",
    "exec": "from helpers import f as g\ndef f(): return exec('x = g()')",
    "inside a lambda": "from helpers import f as g\ndef f(): return (lambda: eval('g()'))()",
    "in a function that it calls": "from helpers import f as g\ndef h(): return eval('g()')\ndef f(): return h()",
    "a computed import": "import importlib\ndef f(a): return importlib.import_module('help' + a).f()",
    "a relative, computed import": "from importlib import import_module\ndef f(a): return import_module(a, 'p')",
    "a computed __import__": "def f(a): return __import__(a).f()",
    "a computed module": "import sys\ndef f(a): return sys.modules[a].f()",
    "modules of no name": "import sys\ndef f(): return [m for m in sys.modules.values() if hasattr(m, 'f')]",
    "a module by its path": "import runpy\ndef f(): return runpy.run_path('helpers.py')['f']()",
    "a spec by its path": "from importlib.util import spec_from_file_location as spec\nimport importlib.util\n"
    "def f(): return importlib.util.spec_from_file_location('h', 'helpers.py')",
    "subclasses": "class Base: pass\ndef f(): return [each().f() for each in Base.__subclasses__()]",
    "what __getstate__ leaves out": "class K:\n    def __init__(self): self.n, self.unused = 3, 4\n"
    "    def __getstate__(self): return {}\n    def f(self): return self.n\nf = K().f",
    "what a thread has": "import threading\nHELD = {'a': threading.local()}\nHELD['a'].n = 3\n"
    "def f(): return HELD['a'].n",
    "what dies with its key": "import threading, weakref\nKEY = threading.Thread()\n"
    "KEPT = weakref.WeakKeyDictionary({KEY: 3})\ndef f(): return sum(KEPT.values())",
    "what __reduce__ leaves out": "class K:\n    def __init__(self): self.n, self.m = [3], [4]\n"
    "    def __reduce__(self): return K, (self.m,)\n    def f(self): return self.n, self.m\nf = K().f",
}
NEITHER = {
    "variables that are set": "import os\ndef f(a):\n    os.environ['A'] = os.environ[a] = a\n"
    "    del os.environ[a]\n    os.environ.update(A=a)",
    "variables of a program that is started": "import os, subprocess\n"
    "def f(): return subprocess.run(['x'], env={**os.environ, 'A': '1'})",
    "another's environ": "class K:\n    environ = {}\n    def f(self, a): return self.environ[a]\nf = K().f",
    "eval of an object": "def f(table): return table.eval('a + b')",
    "an eval of one's own": "def eval(text): return len(text)\ndef f(): return eval('a')",
    "a thread-local without content": "import threading\nclass L(threading.local):\n"
    "    def __init__(self): self.depth, self.stack = 0, []\nLOCAL = L()\ndef f(): return LOCAL.stack",
    "a weak set without content": "import weakref\nKEPT = weakref.WeakSet()\ndef f(): return len(KEPT)",
    "the cache of a dispatch": "import functools\n@functools.singledispatch\ndef f(x): return x\nf(1)",
    "the word alone": "def f(): return 'eval', 'environ', 'globals', 'timestamp'",
    "modules of a network": "def f(net): return list(net.modules()), net.import_module('os'), net.globals()",
    "a time with a zone": "import datetime as d\ndef f(n): return d.datetime.fromtimestamp(int(n), d.timezone.utc)",
    "a column of times": "def f(row): return row.timestamp, row.astimezone(row.zone)",
    "a lock that __getstate__ leaves out": "import threading\nclass K:\n    def __init__(self):\n"
    "        self.lock, self.seen, self.memo = threading.Lock(), {}, None\n"
    "    def __getstate__(self): return {'n': 1}\n    def __setstate__(self, state): self.__init__()\n"
    "    def f(self):\n        self.memo = self.memo or 7\n        with self.lock:\n"
    "            return self.seen, self.memo\nf = K().f",
}


@pytest.mark.parametrize(
    ("source", "is_counted", "is_named"),
    [pytest.param(source, True, False, id=name) for name, source in COUNTED.items()]
    + [pytest.param(source, False, True, id=name) for name, source in NAMED.items()]
    + [pytest.param(source, False, False, id=name) for name, source in NEITHER.items()],
)
def test_what_code_depends_on_counts_or_is_named(project, monkeypatch, source, is_counted, is_named):
    """What is written in the code counts; what is known only when it runs is named, with its place."""
    write_helpers(project, 1)
    time.tzset()
    before, named = look(project, source)
    change(project, monkeypatch)
    after, _ = look(project, source)

    assert (after != before) is is_counted
    assert bool(named) is is_named, named
    assert all("users.py:" in each or "fn" in each or "K." in each for each in named)


def _bare(project):
    py_compile.compile(str(project / "helpers.py"), str(project / "helpers.pyc"), doraise=True)
    (project / "helpers.py").unlink()


def _zipped(project):
    with zipfile.ZipFile(project / "all.zip", "w") as archive:
        archive.write(project / "helpers.py", "helpers.py")
    (project / "helpers.py").unlink()


@pytest.mark.parametrize("packed", [_bare, _zipped])
@pytest.mark.parametrize("source", ["import helpers\ndef f(): return helpers.f()", "def f():\n    import helpers\n"])
def test_modules_without_a_source_file_count(project, monkeypatch, packed, source):
    """Bytecode alone, and an archive, have the same code as their source."""
    monkeypatch.syspath_prepend(str(project / "all.zip"))
    found = []
    for number in (1, 22, 1):
        write_helpers(project, number)
        packed(project)
        sys.path_importer_cache.clear()
        found.append(look(project, source))

    assert found[0] == found[2] != found[1]
    assert found[0][1] == ()


@pytest.mark.parametrize("editable", [True, False])
def test_a_project_installed_as_a_link_counts_by_its_code(project, monkeypatch, editable):
    """`flit install --symlink` puts a link into site-packages, and every edit has the same version."""
    site = project / "site-packages"
    (site / "linked-1.0.dist-info").mkdir(parents=True)
    (site / "linked-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: linked\nVersion: 1.0\n")
    url = f'{{"url": "file:///src", "dir_info": {{"editable": {str(editable).lower()}}}}}'
    (site / "linked-1.0.dist-info" / "direct_url.json").write_text(url)
    monkeypatch.syspath_prepend(str(site))
    from datamat.fingerprint import code

    found = []
    for number in (1, 22):
        code.origin_of_file.cache_clear()
        code._version.cache_clear()
        (site / "linked.py").write_text(HELPERS.format(number))
        os.utime(site / "linked.py", (number, number))
        sys.modules.pop("linked", None)
        found.append(look(project, "import linked\ndef f(): return linked.f()")[0])

    assert (found[0] != found[1]) is editable


class Evaluated(DatasetWriter):
    """`index` looks up what its rows hold then, which count; `read` looks up what nothing shows."""

    name = "evaluated"
    features = Features({"n": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{n}", fields={"n": eval("n")}) for n in range(source)]

    def read(self, row):
        return {"n": row.fields["n"]}


class Looking(Evaluated):
    def read(self, row):
        return {"n": len(globals()) * row.fields["n"], "x": os.environ[row.key]}


def test_only_code_that_makes_samples_is_named():
    """What `index` looks up is in its rows."""
    assert examine(as_written(Evaluated()), where="writer").unseen == ()
    named = examine(as_written(Looking()), where="writer").unseen

    assert [each.partition(" in ")[0] for each in named] == ["globals()", "os.environ"]
    assert all("Looking.read (test_unseen.py:" in each for each in named)


def test_one_warning_names_all_of_it(tmp_path, caplog):
    """The next run, which has nothing to do, says nothing; nor does one with a version."""

    def look_up(number):
        return {"n": number * eval("1"), "text": os.environ.get(f"S{number}", "none"), "all": str(len(globals()) > 0)}

    def said(**options):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            materialize(look_up, range(3), executor=InlineExecutor(), progress=False, **options)
        return [record.getMessage() for record in caplog.records]

    (warning,) = said(output=tmp_path / "out")

    assert all(
        word in warning for word in ("eval() in", "os.environ in", "globals() in", "test_unseen.py:", "version=")
    )
    assert said(output=tmp_path / "out") == []
    assert said(output=tmp_path / "other", version="1") == []
