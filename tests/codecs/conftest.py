from __future__ import annotations

import contextlib
import sys

import pytest

from datamat.codecs import libraries

COMBINATIONS = [(), ("isal",), ("pyspng",), ("isal", "pyspng")]


@contextlib.contextmanager
def without(modules):
    """Run as on a machine where these modules are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module, None)
        libraries.load_zlib.cache_clear()
        libraries.load_pyspng.cache_clear()
        try:
            yield
        finally:
            libraries.load_zlib.cache_clear()
            libraries.load_pyspng.cache_clear()


@pytest.fixture(params=COMBINATIONS, ids=lambda missing: "without-" + "-".join(missing) if missing else "all")
def missing(request):
    """Each combination of missing quick libraries, in force while the test runs."""
    with without(request.param):
        yield request.param
