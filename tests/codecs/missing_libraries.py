"""Codecs without some of the fast libraries, as on a machine where these are not installed."""

import contextlib
import sys

import pytest

from datamat.codecs import libraries

COMBINATIONS = [(), ("isal",), ("pyspng",), ("isal", "pyspng", "simplejpeg")]


@contextlib.contextmanager
def without(modules):
    """Simulate a machine where these modules are not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module, None)
        clear = (libraries.load_zlib, libraries.load_pyspng, libraries.load_simplejpeg)
        for load in clear:
            load.cache_clear()
        try:
            yield
        finally:
            for load in clear:
                load.cache_clear()
