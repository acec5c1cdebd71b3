"""Switches: process-wide settings of libraries that decide what the user's code computes.

`numpy.seterr`, the precision of `decimal`, torch's default dtype: a worker that was not forked from the program starts
with the library's defaults. So the caller's values are read by one table, sent with the job, and set in each worker;
those that differ from the default count in the fingerprint. Only libraries that the caller has loaded are examined.

Other state of installed packages (patched functions, filled registries) is not sent to workers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import locale
import os
import re
import sys
import threading
import time
import uuid
import warnings
from typing import TYPE_CHECKING, Any

from datamat.errors import FingerprintError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping


@frozen()
class _Switch:
    """One switch.

    Attributes:
        module: module that has it.
        get: function of the module that returns the value, which can be pickled.
        set: function of the module and of a value from `get` that sets it.
        default: function of the module that returns the library's default.
        counts: True if it decides bytes wherever the library is loaded, "used" if only where the code itself uses the
            library; False if it only decides whether a row fails, or depends on the host.
    """

    module: str
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], object]
    default: Callable[[Any], Any]
    counts: bool | str = True


def _attribute(module: str, name: str, default: Any) -> _Switch:
    def put(loaded: Any, value: Any) -> None:
        setattr(loaded, name, value)

    return _Switch(module, lambda loaded: getattr(loaded, name, default), put, lambda _: default)


def _functions(module: str, getter: str, setter: str, default: Any, counts: bool | str = True) -> _Switch:
    def call(loaded: Any, value: Any) -> None:
        _at(loaded, setter)(value)

    return _Switch(module, lambda loaded: _at(loaded, getter)(), call, lambda _: default, counts)


def _at(loaded: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), loaded)


_PRINTED = {
    "edgeitems": 3, "threshold": 1000, "floatmode": "maxprec", "precision": 8, "suppress": False, "linewidth": 75,
    "nanstr": "nan", "infstr": "inf", "sign": "-", "legacy": False,
}  # fmt: skip


def _printed(numpy: Any) -> dict[str, Any]:
    found = numpy.get_printoptions()
    return {name: found[name] for name in _PRINTED if name in found}


def _context(context: Any) -> tuple[Any, ...]:
    traps = sorted(signal.__name__ for signal, is_on in context.traps.items() if is_on)
    return context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, tuple(traps)


def _set_context(decimal: Any, value: tuple[Any, ...]) -> None:
    prec, rounding, emin, emax, capitals, clamp, traps = value
    signals = [getattr(decimal, name) for name in traps]
    decimal.setcontext(decimal.Context(prec, rounding, emin, emax, capitals, clamp, [], signals))


_PANDAS = re.compile(r"\[default: (.*)\] \[currently: (.*)\]", re.DOTALL)


def _pandas_options(pandas: Any) -> dict[str, Any]:
    """Return the pandas options that differ from their defaults, which only their descriptions tell."""
    found = {}
    for name in _names_of_options(pandas.options, ""):
        said = _PANDAS.search(pandas.describe_option(name, _print_desc=False) or "")
        if said is not None and said.group(1) != said.group(2):
            found[name] = pandas.get_option(name)
    return found


def _names_of_options(options: Any, prefix: str) -> Iterator[str]:
    for name in dir(options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated options warn
            inner = getattr(options, name)
        if type(inner) is type(options):
            yield from _names_of_options(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def _set_pandas_options(pandas: Any, values: Mapping[str, Any]) -> None:
    for name in _pandas_options(pandas).keys() - values.keys():
        pandas.reset_option(name)
    for name, value in values.items():
        pandas.set_option(name, value)


def _strict_filters(_: Any) -> list[Any]:
    """Return the warning filters if one of them turns warnings into errors, else none: the others decide nothing."""
    return list(warnings.filters) if any(kind == "error" for kind, *_ in warnings.filters) else []


def _set_filters(_: Any, filters: list[Any]) -> None:
    warnings.filters[:] = filters or [one for one in warnings.filters if one[0] != "error"]  # type: ignore[index]
    getattr(warnings, "_filters_mutated", getattr(warnings, "_filters_mutated_lock_held", lambda: None))()


def _set_zone(_: Any, zone: str | None) -> None:
    if zone is None:
        os.environ.pop("TZ", None)
    else:
        os.environ["TZ"] = zone
    time.tzset()


def _locale(category: int) -> _Switch:
    return _Switch(
        "locale", lambda _: locale.setlocale(category), lambda _, name: locale.setlocale(category, name), lambda _: "C"
    )


_SWITCHES: dict[str, _Switch] = {
    "PIL.Image.MAX_IMAGE_PIXELS": _attribute("PIL.Image", "MAX_IMAGE_PIXELS", 1024 * 1024 * 1024 // 4 // 3),
    "PIL.ImageFile.LOAD_TRUNCATED_IMAGES": _attribute("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
    "csv.field_size_limit": _Switch(
        "csv", lambda csv: csv.field_size_limit(), lambda csv, size: csv.field_size_limit(size), lambda _: 131072
    ),
    "cv2.setUseOptimized": _functions("cv2", "useOptimized", "setUseOptimized", True),
    "decimal.getcontext": _Switch(
        "decimal",
        lambda decimal: _context(decimal.getcontext()),
        _set_context,
        lambda _: (28, "ROUND_HALF_EVEN", -999999, 999999, 1, 0, ("DivisionByZero", "InvalidOperation", "Overflow")),
    ),
    "jax.config.jax_enable_x64": _Switch(
        "jax",
        lambda jax: bool(jax.config.jax_enable_x64),
        lambda jax, value: jax.config.update("jax_enable_x64", value),
        lambda _: False,
    ),
    "locale.LC_COLLATE": _locale(locale.LC_COLLATE),
    "locale.LC_MONETARY": _locale(locale.LC_MONETARY),
    "locale.LC_NUMERIC": _locale(locale.LC_NUMERIC),
    "locale.LC_TIME": _locale(locale.LC_TIME),
    "numpy.set_printoptions": _Switch(
        "numpy", _printed, lambda numpy, found: numpy.set_printoptions(**found), lambda _: _PRINTED, "used"
    ),
    "numpy.seterr": _Switch(
        "numpy",
        lambda numpy: numpy.geterr(),
        lambda numpy, found: numpy.seterr(**found),
        lambda _: {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    "pandas.options": _Switch("pandas", _pandas_options, _set_pandas_options, lambda _: {}, "used"),
    "sys.set_int_max_str_digits": _functions("sys", "get_int_max_str_digits", "set_int_max_str_digits", 4300),
    "sys.setrecursionlimit": _functions("sys", "getrecursionlimit", "setrecursionlimit", 1000, counts=False),
    "time.tzset": _Switch("time", lambda _: os.environ.get("TZ"), _set_zone, lambda _: None, counts=False),
    "torch.set_default_dtype": _Switch(
        "torch",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
        lambda _: "float32",
    ),
    "torch.set_float32_matmul_precision": _functions(
        "torch", "get_float32_matmul_precision", "set_float32_matmul_precision", "highest"
    ),
    "torch.use_deterministic_algorithms": _functions(
        "torch", "are_deterministic_algorithms_enabled", "use_deterministic_algorithms", False
    ),
    "warnings.filters": _Switch("warnings", _strict_filters, _set_filters, lambda _: [], counts=False),
}
"""By the name that users know; docs/determinism.md lists them."""


_thread = threading.local()
"""`token`: that of the switches last set in this thread."""


@frozen()
class Switches:
    """The switches of the libraries that a process has loaded.

    Attributes:
        values: value of each, by its name in the table.
        token: unique id of this snapshot.
    """

    values: Mapping[str, Any]
    token: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls) -> Switches:
        """Return the switches of this process; for a library that keeps them per thread, of this thread."""
        return cls(dict(_found()))

    def set(self) -> None:
        """Set these switches in this process and thread, unless they were the last ones set.

        Raises:
            FingerprintError: one cannot be set here, such as a locale that is not installed.
        """
        if getattr(_thread, "token", None) == self.token:
            return
        for name, wanted in self.values.items():
            switch = _SWITCHES[name]
            loaded = sys.modules.get(switch.module)
            if loaded is None and wanted == switch.default(None):
                continue
            try:
                loaded = loaded or importlib.import_module(switch.module)
                if switch.get(loaded) == wanted:
                    continue
                switch.set(loaded, wanted)
            except Exception as error:
                raise FingerprintError(
                    f"{name} is {wanted!r} in the program that called run, and cannot be set in this worker: {error}; "
                    "set it in setup_worker, or keep the library's default"
                ) from error
        _thread.token = self.token

    def counting(self, packages: Collection[str]) -> dict[str, str]:
        """Return the switches that decide bytes and differ from their defaults, as text by name."""
        found = {}
        for name, value in self.values.items():
            switch = _SWITCHES[name]
            is_counted = switch.counts is True or (switch.counts == "used" and switch.module in packages)
            default = switch.default(None)
            if is_counted and value != default:
                if isinstance(value, dict):
                    value = {key: item for key, item in value.items() if item != default.get(key)}  # noqa: PLW2901
                found[name] = repr(value)
        return found


def _found() -> Iterator[tuple[str, Any]]:
    for name, switch in _SWITCHES.items():
        loaded = sys.modules.get(switch.module)
        if loaded is not None:
            yield name, switch.get(loaded)
