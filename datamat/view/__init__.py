"""Show a finished directory in a browser; `datamat.view` is both this module and the function of that name.

>>> import datamat
>>> datamat.view("out/camvid")                   # doctest: +SKIP
>>> from datamat.view import ViewPage, viewing   # its result, and a server as a context manager
"""

from __future__ import annotations

import sys
import types
from typing import Any

from datamat.view.page import ViewPage, view
from datamat.view.server import ViewServer, viewing

__all__ = ["ViewPage", "ViewServer", "view", "viewing"]


def __dir__() -> list[str]:
    return __all__


class _Verb(types.ModuleType):
    """A callable module: importing it sets `datamat.view`, which is a function, to the module."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return view(*arguments, **options)


sys.modules[__name__].__class__ = _Verb
