"""Memos: what the user's code keeps between calls, in globals, attributes and caches filled on first use.

    _settings = None                     @functools.lru_cache            @functools.cached_property
    def settings():                      def settings():                 def table(self):
        global _settings                     return load()                   return load()
        if _settings is None:
            _settings = load()
        return _settings

The walk over the code records their locations in `Parts.memos`; this module reads and sets their contents.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from datamat.fingerprint.code import ATOMS, LRU, constants_of
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from datamat.fingerprint.code import Home

_MOST_CALLS = 16  # caches with more results are filled row by row
_COLLECTIONS = frozenset(
    {dict, list, set, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque}
)
_CALL = "()"


@frozen()
class Memo:
    """A location where code keeps a value between calls.

    Attributes:
        home: module and path: `_settings`, `Config._instance`, or `settings()` for the results of a cached function.
        arguments, keywords: the call whose result it holds, if it belongs to a cache.
    """

    home: Home
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        module, path = self.home
        call = ", ".join([*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.keywords)])
        path = path.removesuffix(_CALL) + (f"({call})" if path.endswith(_CALL) else "")
        return path if module == "__main__" else f"{module}.{path}"


def read_memos(places: Iterable[Home], main: Sequence[dict[str, Any]] = ()) -> tuple[dict[Memo, Any], list[Home]]:
    """Return the current contents of memos, and the locations of the caches whose results cannot be read.

    Args:
        places: locations of memos.
        main: namespaces of the main program; if empty, the module `__main__`.
    """
    found: dict[Memo, Any] = {}
    untold: list[Home] = []
    for place in places:
        holder, name = _holder(place, main)
        if name not in holder:
            continue
        value = holder[name]
        if not place[1].endswith(_CALL):
            found[Memo(place)] = value
        elif isinstance(value, LRU) and (size := value.cache_info().currsize):
            calls = _calls_of(value) if _are_told() else None
            if calls is None or len(calls) != size:
                untold.append(place)
            elif size <= _MOST_CALLS and all(_is_sendable(value, memo) for memo, _ in calls):
                found |= {dataclasses.replace(memo, home=place): result for memo, result in calls}
            elif not all(_is_plain(result) for _, result in calls):
                untold.append(place)
    return found, untold


def is_filled(memo: Memo, value: Any) -> bool:
    """Return True if a memo no longer holds its initial value: None, an empty collection, or its module's constant."""
    module, path = memo.home
    if path.endswith(_CALL):
        return True
    if value is None or (type(value) in _COLLECTIONS and not value):
        return False
    first = constants_of(module).get(path) if type(value) in ATOMS else None
    return first is None or type(first) is not type(value) or first != value


def clear_caches(places: Iterable[Home], main: Sequence[dict[str, Any]] = ()) -> None:
    """Empty the caches among memos; arguments are those of `read_memos`."""
    for place in places:
        holder, name = _holder(place, main)
        if place[1].endswith(_CALL) and isinstance(holder.get(name), LRU):
            holder[name].cache_clear()


def set_memo(memo: Memo, value: Any, main: Sequence[dict[str, Any]] = ()) -> None:
    """Set a memo, or another value that code reads from a module."""
    module, path = memo.home
    if path.endswith(_CALL):
        holder, name = _holder(memo.home, main)
        _remember(holder[name], memo, value)
        return
    *steps, last = path.split(".")
    for namespace in _namespaces(module, main):
        if not steps:
            namespace[last] = value
        elif steps[0] in namespace:
            holder = functools.reduce(_step, steps[1:], namespace[steps[0]])
            # As `cached_property` does: a frozen class rejects assignments.
            (setattr if isinstance(holder, type) else object.__setattr__)(holder, last, value)


def _step(value: Any, step: str) -> Any:
    return value[int(step)] if step.isdigit() else getattr(value, step)  # closure cells have numbers


def _namespaces(module: str, main: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    if module == "__main__" and main:
        return main
    try:
        return [vars(sys.modules.get(module) or importlib.import_module(module))]
    except ImportError:  # the code travels by value
        return []


def _holder(place: Home, main: Sequence[dict[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """Return the object that holds a memo, as a mapping, and the memo's name in it."""
    module, path = place
    *steps, last = path.removesuffix(_CALL).split(".")
    for namespace in _namespaces(module, main):
        try:
            if not steps:
                holder: Mapping[str, Any] = namespace
            else:
                holder = vars(functools.reduce(getattr, steps[1:], namespace[steps[0]]))
        except (KeyError, AttributeError, TypeError):
            continue
        if last in holder:
            return holder, last
    return {}, last


# ---------------------------------------------------------------- caches
#
# `functools.lru_cache` has no API for its results, but the garbage collector can list them: for a bounded cache, the
# key, result and a type of each, then its table; an unbounded cache has them in its table. To add a result, the cached
# function is given code that returns it, and called.
#
# This is undocumented, and another Python may list them in another order. So two caches with known results are read
# first; if that fails, no cache is read, and every cache with results is reported as unreadable.


def _are_told() -> bool:
    """Return True if the garbage collector of this Python lists results as expected."""
    for size in (2, None):
        cache = functools.lru_cache(size)(lambda *_, **__: object())
        known = {Memo(("", ""), (1,)): cache(1), Memo(("", ""), ("a", 2), (("b", 3),)): cache("a", 2, b=3)}
        try:
            found = dict(_calls_of(cache))
        except Exception:  # noqa: BLE001 -- any error means another layout
            return False
        if found != known:
            return False
    return True


def _calls_of(cache: Any) -> list[tuple[Memo, Any]]:
    """Return the calls in a cache, with their results."""
    held = gc.get_referents(cache)
    table = next(part for part in held if type(part) is dict and part is not vars(cache))
    if cache.cache_parameters()["maxsize"] is None:
        pairs = list(table.items())
    else:
        pairs = list(zip(held[1::3], held[2::3], strict=False))[: len(table)]
    mark = next(
        (part for part in reversed(held) if type(part) is object), None
    )  # between arguments and keywords in a key
    return [(_call_of(key, mark), result) for key, result in pairs]


def _call_of(key: Any, mark: object) -> Memo:
    parts = key if type(key) is tuple else (key,)  # a single string or number is its own key
    middle = next((number for number, part in enumerate(parts) if part is mark), len(parts))
    keywords = parts[middle + 1 :]
    return Memo(("", ""), parts[:middle], tuple(zip(keywords[::2], keywords[1::2], strict=False)))


def _is_sendable(cache: Any, memo: Memo) -> bool:
    is_plain = all(_is_plain(part) for part in (*memo.arguments, *(value for _, value in memo.keywords)))
    return is_plain and type(cache.__wrapped__) is types.FunctionType and not cache.cache_parameters()["typed"]


def _is_plain(value: Any) -> bool:
    return type(value) in ATOMS or (type(value) is tuple and all(map(_is_plain, value)))


def _remember(cache: Any, memo: Memo, value: Any) -> None:
    function = cache.__wrapped__
    code, defaults = function.__code__, function.__kwdefaults__
    function.__code__ = _GIVE.replace(co_freevars=code.co_freevars)
    function.__kwdefaults__ = {"__datamat_value": value}
    try:
        cache(*memo.arguments, **dict(memo.keywords))
    finally:
        function.__code__, function.__kwdefaults__ = code, defaults


def _give(*_: Any, __datamat_value: Any, **__: Any) -> Any:
    return __datamat_value


_GIVE = _give.__code__
