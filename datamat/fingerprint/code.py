"""The parts of functions, classes and modules: the user's count by content, installed ones by name and version."""

from __future__ import annotations

import bisect
import builtins
import contextlib
import dataclasses
import dis
import enum
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import json
import os
import pathlib
import re
import struct
import sys
import sysconfig
import types
import zlib
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution

# ---------------------------------------------------------------- parts
#
# The parts of one object, in the form that the graph walk expects.


Origin: TypeAlias = "tuple[tuple[str, str], ...]"
"""Origin of a module: distributions, or parts of datamat, each with its version; empty for the user's own code."""
Home: TypeAlias = "tuple[str, str]"
"""Where a value can be set: a module name, and an attribute path in it (`Config.size`)."""

ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"",
    type(...): lambda _: b"",
    type(NotImplemented): lambda _: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: b"%x" % value,
    float: lambda value: struct.pack("<d", value) if value == value else b"nan",  # noqa: PLR0124 -- only NaN differs from itself
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: value,
}
"""Content of values that hold no other values, by exact type."""


@frozen()
class Parts:
    """What an object is made of.

    Attributes:
        tag: kind of the object, and whatever content is not itself an object.
        children: objects that the object holds.
        steps: path step to each child; its position if omitted.
        group: 0 if the order of children counts, otherwise the number of children per member of a set.
        origins: installed packages that also decide the object, with versions; not part of its digest.
        homes: module and attribute that the user's code reads a child from, by the child's position.
        memos: locations that the object fills when used (see `fingerprint.memos`); True for those that it also reads.
            A leading dot makes one relative to the object.
    """

    tag: bytes
    children: Sequence[Any] = ()
    steps: Sequence[str] = ()
    group: int = 0
    origins: Origin = ()
    homes: Mapping[int, Home] = dataclasses.field(default_factory=dict)
    memos: Mapping[Home, bool] = dataclasses.field(default_factory=dict)


@frozen()
class Import:
    """A module that code imports when it runs, by name; possibly not imported yet."""

    name: str


@frozen()
class Environment:
    """An environment variable that code reads, by name."""

    name: str


@frozen(eq=False)
class Reached:
    """An object of which only some methods count, with the attributes and methods that they use.

    Attributes:
        value: the object itself.
        entries: names of the methods that make samples, and of other attributes that are read.
        others: names of methods called earlier, which prepare the input of `entries`.
        is_whole: whether the whole class counts, not only the used part.
    """

    value: Any
    entries: frozenset[str]
    others: tuple[str, ...] = ()
    is_whole: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that equal values share while the object lives."""
        return ("reached", id(self.value), self.entries, self.others, self.is_whole)


def named(
    tag: bytes,
    held: list[tuple[str, Any]],
    attributes: dict[Any, Any],
    *,
    step: str = ".",
    homes: Mapping[Any, Home] | None = None,
) -> Parts:
    """Return the parts of an object that holds some objects by position and others by name.

    Args:
        tag: as in `Parts`; the names are appended to it.
        held: objects held by position, each with its path step.
        attributes: objects held by name, in any order.
        step: prefix of a name in a path.
        homes: module and attribute that each attribute is read from, by name.
    """
    names = sorted(attributes, key=str)
    places = {len(held) + number: homes[name] for number, name in enumerate(names) if homes and name in homes}
    return Parts(
        tag + repr([str(name) for name in names]).encode(),
        [*(part for _, part in held), *(attributes[name] for name in names)],
        [*(place for place, _ in held), *(f"{step}{name}" for name in names)],
        homes=places,
    )


# ---------------------------------------------------------------- origins
#
# Who wrote a module: the user, whose code counts by content, or others, whose installed code counts by version.
#
# Nothing is imported to find out; of installed packages, only file names are read.


_PYTHON = (("Python", f"{sys.version_info.major}.{sys.version_info.minor}"),)
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_assumed: dict[str, Origin] = {}  # saves 13 ms when a worker starts
_looked_up: dict[str, Origin] = {}


def is_installed(module: Any) -> bool:
    """Return True if an imported module is not the user's code; accepts any value of `__module__`."""
    # The metatype of Cython has a descriptor for `__module__`; functions made by exec have None.
    return isinstance(module, str) and bool(origin_of_file(module, getattr(sys.modules.get(module), "__file__", None)))


def is_users_module(value: Any) -> bool:
    """Return True if a value is a module that the user wrote."""
    return isinstance(value, types.ModuleType) and not origin_of_file(value.__name__, vars(value).get("__file__"))


def origin_of_module(module: str) -> Origin:
    """Return the origin of a module, imported or not; see `origin_of_file`."""
    spec = find_spec(module)
    if spec is None:
        return origin_of_file(module, None)
    return origin_of_file(module, spec.origin or next(iter(spec.submodule_search_locations or []), None))


@functools.cache
def origin_of_file(module: str, file: str | None) -> Origin:
    """Return the origin of a module: the distributions that installed it; empty for the user's own code.

    A module of datamat has the `OUTPUT_VERSION` of its part as version, if there is one.

    Args:
        module: full name of the module.
        file: path of its code, or None.
    """
    top = module.partition(".")[0]
    if top == "datamat":
        return _part_of_datamat(module)
    if top in {"__main__", "__mp_main__"}:  # in an engine's worker, the file is the engine's own program
        return ()
    if file in {None, "built-in", "frozen"}:
        return _PYTHON if top in sys.stdlib_module_names else ()
    folders = pathlib.PurePath(file).parts
    if "site-packages" in folders or "dist-packages" in folders:
        return _version(top)
    if file.startswith(_STDLIB):
        return _PYTHON
    return _version(top) if _is_beside_distributions(file, top) and _version(top) != _unknown(top) else ()


def _is_beside_distributions(file: str, top: str) -> bool:
    """Return True if packages were installed into the folder of a module, as `pip install --target` does.

    An editable install leaves an `egg-info` beside the project, or a `dist-info` elsewhere.
    """
    path = pathlib.PurePath(file)
    root = next((folder.parent for folder in path.parents if folder.name == top), path.parent)
    return _has_distributions(str(root))


@functools.cache
def _has_distributions(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def origin_of_function(function: types.FunctionType) -> Origin:
    """Return the origin of a function's code; for a decorated function, the decorator's.

    The file recorded in the code decides: a function sent to a worker by value lacks the globals of its module.
    """
    file, held = function.__code__.co_filename, function.__globals__
    folders = pathlib.PurePath(file).parts
    for name in ("site-packages", "dist-packages"):
        if name in folders[:-1]:
            top = folders[folders.index(name) + 1].removesuffix(".py")
            return origin_of_file(top, file) if top != "datamat" else origin_of_file(str(held.get("__name__")), file)
    if file.startswith(_STDLIB):
        return _PYTHON
    return origin_of_file(held.get("__name__") or "", held.get("__file__"))


def versions_of(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution that provides the given modules, by name.

    Args:
        modules: full names of modules; `zlib` means the library that Python is linked with.

    Example:
        >>> list(versions_of(["numpy", "not_installed"]))
        ['numpy']
    """
    found: dict[str, str] = {}
    for module in sorted(modules):
        if module == "zlib":
            found["zlib"] = zlib_version()
        elif find_spec(module) is not None:
            found |= {name: version for name, version in origin_of_module(module) if version}
    return found


@functools.cache
def zlib_version() -> str:
    """Return the version of the zlib that Python is linked with, whatever else this process has loaded.

    `zlib.ZLIB_RUNTIME_VERSION` is the version of the library whose symbols the loader found first: TensorFlow's copy
    if TensorFlow was imported before `zlib`. Workers that never import TensorFlow would report another version.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # zlib is built into the interpreter: there is no other
        ask = ctypes.CDLL(zlib.__file__).zlibVersion  # looked up in the module and the libraries it is linked with
        ask.restype = ctypes.c_char_p
        return str(ask().decode())
    return zlib.ZLIB_RUNTIME_VERSION


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module without importing it or its packages."""
    spec, path, steps = None, None, name.split(".")
    for depth in range(len(steps)):
        if depth and path is None:  # inside a module that is not a package
            return None
        partial = ".".join(steps[: depth + 1])
        specs = (finder.find_spec(partial, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((found for found in specs if found), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _part_of_datamat(module: str) -> Origin:
    """Return the part of datamat that a module belongs to, with its version, and the packages that decide its bytes.

    Each is defined by the innermost enclosing package or module with an `OUTPUT_VERSION`, or `PACKAGES`.
    """
    steps = module.split(".")
    number, packages = None, None
    for depth in range(len(steps), 1, -1):
        name = ".".join(steps[:depth])
        with contextlib.suppress(ImportError):
            part = importlib.import_module(name)
            if packages is None:
                packages = getattr(part, "PACKAGES", None)
            if number is None and hasattr(part, "OUTPUT_VERSION"):
                number = (name, str(part.OUTPUT_VERSION))
    return (number or ("datamat", ""), *versions_of(packages or ()).items())


@functools.cache
def _version(top: str) -> Origin:
    """Return the distributions that provide a top-level module, with their versions."""
    if top in _assumed:
        return _assumed[top]
    _looked_up[top] = found = _look_up(top)
    return found


def known_versions() -> dict[str, Origin]:
    """Return the origins of top-level modules found so far, to share with processes of the same installation."""
    return {**_assumed, **_looked_up}


def assume_versions(known: Mapping[str, Origin]) -> None:
    """Adopt the origins that another process of the same installation found."""
    _assumed.update(known)


def _look_up(top: str) -> Origin:
    installed = _installed(top)
    if installed is not None:
        return installed
    from importlib.metadata import PackageNotFoundError, distribution, distributions

    try:
        found = {top: distribution(top)}
    except PackageNotFoundError:  # the distribution has another name: opencv-python provides cv2
        names = sorted({found.metadata["Name"] for found in distributions() if _provides(found, top)})
        found = {name: distribution(name) for name in names}
    for each in found.values():
        with contextlib.suppress(ValueError):
            origin = json.loads(each.read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):  # the user's own project: edits do not change the version
                return ()
    return tuple((name, each.version) for name, each in found.items()) or _unknown(top)


def _installed(top: str) -> Origin | None:
    """Do what `_look_up` does for an unpacked package whose distribution is named after it, as most are.

    Importing `importlib.metadata`, and with it the e-mail parser, takes a third as long as importing numpy.

    Returns:
        None if a listing of folders does not settle it.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return None
    for folder in sys.path:
        try:
            found = [name for name in os.listdir(folder or ".") if _names_distribution(name.lower(), top.lower())]
        except FileNotFoundError:
            continue
        except OSError:  # an archive
            return None
        if found:
            info = os.path.join(folder, found[0])
            is_plain = len(found) == 1 and found[0].endswith(".dist-info")
            if not is_plain or os.path.exists(os.path.join(info, "direct_url.json")):
                return None
            return _stated_version(top, os.path.join(info, "METADATA"))
    return None


def _names_distribution(folder: str, top: str) -> bool:
    """Return True if a folder may hold the metadata of a distribution; both names are lowercase."""
    name, dot, kind = folder.rpartition(".")
    return dot + kind in {".dist-info", ".egg-info"} and re.sub("[-_.]+", "_", name.partition("-")[0]) == re.sub(
        "[-_.]+", "_", top
    )


def _stated_version(top: str, path: str) -> Origin | None:
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
        for line in itertools.takewhile(str.strip, file):
            if line.lower().startswith("version:"):
                return ((top, line.partition(":")[2].strip()),)
    return None


def _unknown(top: str) -> Origin:
    return ((top, "of no version"),)


def _provides(distribution: Distribution, top: str) -> bool:
    """Return True if a distribution installs a top-level module, by its declaration or else by its files.

    `importlib.metadata.packages_distributions` answers for all modules at once, in 70 ms with 130 distributions; this
    takes 9 ms.
    """
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return top in declared
    files = distribution.read_text("RECORD") or ""
    return re.search(rf"^{re.escape(top)}(/|\.[^/\n]+,)", files, re.MULTILINE) is not None


# ---------------------------------------------------------------- bytecode
#
# The bytecode of a function: what it does, which globals it reads, which modules it imports.
#
# Instructions count by name and operands. Their location does not matter, nor does how Python specializes them at run
# time, or whether the code was compiled together with the imports it uses (a script) or separately (a notebook cell).


DESCRIBING = frozenset(
    {"__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)
"""Names in a class or module that only describe it."""

_OF_THE_PLACE = frozenset({"__name__", "__file__", "__package__", "__spec__", "__loader__", "__cached__", "__doc__"})
"""Globals that say where code is and how it was started."""

_IMPORTERS = frozenset({"import_module", "__import__"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_LOADING = _LOADS | _ATTRIBUTE | {"LOAD_GLOBAL", "LOAD_NAME"}
_CALLS = frozenset({"CALL", "CALL_KW", "PRECALL"})
_IN_PATH = re.compile(r"\$\{?(\w+)")
_ENVIRONMENTS = frozenset({"environ", "environb", "getenv", "getenvb"})
_BY_TEXT = frozenset({"eval", "exec", "globals"})
_BY_PATH = frozenset({"run_module", "run_path", "spec_from_file_location"})
_NAMESPACES = frozenset({"__globals__", "__subclasses__", "f_globals"})
_LOOKING_UP = _BY_TEXT | _BY_PATH | _NAMESPACES | _IMPORTERS | _ENVIRONMENTS | {"expandvars", "modules"}
"""Functions and mappings through which code reaches objects that it does not name."""
_LOCAL_TIMES = {"astimezone": 0, "ctime": 1, "fromtimestamp": 1, "localtime": 1, "mktime": 1, "timestamp": 0}
"""Functions and methods that use the time zone of the process, with the most arguments that such a call has."""

_CALL_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_NAMED_OPERANDS = frozenset([*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare])
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])

# `np.sum(x)` is compiled as an attribute call if the same file or cell imports `np`, and as a method call otherwise.
# The two differ in the instructions below, and so in the distances of jumps across them.
_LIKE_ATTR = "LOAD_METHOD"
_PASSED_OVER = frozenset({"EXTENDED_ARG", "PUSH_NULL"})


@frozen()
class CodeInPackage:
    """Bytecode, the package that its relative imports resolve in, and the globals that may name what it reads."""

    code: types.CodeType
    package: str
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parts_of_code(value: CodeInPackage) -> Parts:
    """Return the parts of code: its instructions, and the constants, modules and environment variables it uses."""
    code, names = value.code, value.names
    text: list[Any] = [
        code.co_name, code.co_flags & _CALL_FLAGS, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_varnames[: code.co_argcount + code.co_kwonlyargcount],
    ]  # fmt: skip
    held: list[Any] = []
    instructions = _instructions(code)
    offsets = [instruction.offset for instruction in instructions]
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]  # since 3.11, not in typeshed
        span = [bisect.bisect_left(offsets, offset) for offset in (entry.start, entry.end, entry.target)]
        text.append((*span, entry.depth, entry.lasti))
    for number, instruction in enumerate(instructions):
        operand = instruction.argval if instruction.opcode in _NAMED_OPERANDS else instruction.arg
        if instruction.opcode in _JUMPS:
            operand = bisect.bisect_left(offsets, instruction.argval)
        if _loads_constant(instruction):
            operand = None
            is_itself = instruction.opname == "LOAD_SMALL_INT"
            constant = instruction.argval if is_itself else code.co_consts[instruction.arg or 0]
            is_code = isinstance(constant, types.CodeType)
            held.append(CodeInPackage(constant, value.package, names) if is_code else constant)
        if instruction.opname == "IMPORT_NAME":
            level, parts = (before.argval for before in instructions[number - 2 : number])
            held += _imports("." * level + instruction.argval, parts or (), value.package)
        elif instruction.opname in _LOADING and instruction.argval in _LOOKING_UP:
            held += _lookups(code, instructions, number, value)
        elif instruction.argval in _LOCAL_TIMES and _goes_by_zone(code, instruction):
            held.append(Environment("TZ"))
        name = "LOAD_ATTR" if instruction.opname == _LIKE_ATTR else instruction.opname
        text.append((name, operand))
    return Parts(b"code" + repr(text).encode(), held)


def read_globals(function: types.FunctionType) -> Iterator[tuple[str, Any, Home | None]]:
    """Yield the globals that a function reads; of the user's modules, only the attributes that it reads.

    A global that the function itself assigns is a memo; see `filled_globals`.

    Yields:
        Path (`cfg.sizes`), value, and where it can be set: None if its namespace belongs to no module.
    """
    reads, writes = set(), set()
    for code in _nested(function.__code__):
        instructions = _instructions(code)
        for number, instruction in enumerate(instructions):
            if instruction.opname in {"STORE_GLOBAL", "DELETE_GLOBAL"}:
                writes.add(instruction.argval)
            if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
                attributes = itertools.takewhile(
                    lambda following: following.opname in {"LOAD_ATTR", "LOAD_METHOD"}, instructions[number + 1 :]
                )
                reads.add((instruction.argval, *(following.argval for following in attributes)))
    held, own = function.__globals__, _namespace_of(function)
    for path in sorted(reads):
        if path[0] in held and path[0] not in writes | _OF_THE_PLACE:
            module: str | None = own
            value: Any = held[path[0]]
            depth = 1
            if _is_of_the_shell(path[0], value):
                continue
            while depth < len(path) and is_users_module(value) and path[depth] in vars(value):
                name = str(vars(value)["__name__"])
                module = name if sys.modules.get(name) is value else None
                value, depth = vars(value)[path[depth]], depth + 1
            yield ".".join(path[:depth]), value, None if module is None else (module, path[depth - 1])


def _namespace_of(function: types.FunctionType) -> str | None:
    """Return the module whose globals a function has; None if there is none."""
    held, name = function.__globals__, str(function.__globals__.get("__name__"))
    # When multiprocessing runs the main program again, runpy gives its functions a dictionary of their own.
    return name if name == "__mp_main__" or getattr(sys.modules.get(name), "__dict__", None) is held else None


def filled_globals(function: types.FunctionType) -> dict[Home, bool]:
    """Return the globals that a function assigns; True for those that it also reads."""
    codes, module = list(_nested(function.__code__)), _namespace_of(function)
    if module is None or all(dis.opmap["STORE_GLOBAL"] not in code.co_code[::2] for code in codes):
        return {}
    steps = [step for code in codes for step in dis.get_instructions(code)]
    read = {step.argval for step in steps if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}}
    return {(module, step.argval): step.argval in read for step in steps if step.opname == "STORE_GLOBAL"}


def read_imported(function: types.FunctionType) -> Iterator[tuple[str, Any, Home]]:
    """Yield what a function reads from the user's modules that it imports itself, if the program has changed it.

    Modules count by source, imported or not. Beyond the source, only values set later count: names to which the source
    assigns a plain constant (`size = 256`) and which now hold another value.

    Yields:
        The same as `read_globals`.
    """
    package = str(function.__globals__.get("__package__") or "")
    found = {read for code in _nested(function.__code__) for read in _reads_of_imported(code, package)}
    for name, attribute in sorted(found):
        module = sys.modules.get(name)
        if is_users_module(module) and attribute in vars(module):
            value = vars(module)[attribute]
            constants = constants_of(name)
            said = constants.get(attribute)
            if attribute in constants and (type(value) is not type(said) or value != said):
                yield f"{name}.{attribute}", value, (name, attribute)


_HASHING = frozenset({"set", "frozenset", "hash"})
_ORDERLESS = frozenset({"all", "any", "len", "max", "min", "sorted"})
_ENDING = ("CALL", "POP", "PRECALL", "RESUME", "RETURN", "STORE")  # prefixes of instructions that end an expression


def hashes(function: types.FunctionType) -> str:
    """Describe how the user's code depends on hashes; "" if it does not, or is not the user's.

    The order of a set of strings, and the `hash` of one, vary with the hash seed of the process. A set used only for
    membership tests (`x in {"a", "b"}`) is a constant, and the order of a set that is sorted at once does not matter.
    """
    if origin_of_function(function):
        return ""
    for code in _nested(function.__code__):
        makes_none = _HASHING.isdisjoint(code.co_names) and dis.opmap["BUILD_SET"] not in code.co_code[::2]
        if makes_none and not any(isinstance(each, (frozenset, types.CodeType)) for each in code.co_consts):
            continue
        if code.co_name == "<setcomp>":  # checked where it is used
            continue
        steps = _instructions(code)
        for number, step in enumerate(steps):
            is_global = step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and step.argval not in function.__globals__
            if is_global and step.argval == "hash":
                return "calls hash()"
            is_set = step.opname == "BUILD_SET" or getattr(step.argval, "co_name", "") == "<setcomp>"
            if (is_set or (is_global and step.argval in _HASHING)) and not _is_orderless(steps, number):
                return "makes a set"
            if isinstance(step.argval, frozenset) and steps[number + 1].opname not in {"CONTAINS_OP", "SET_UPDATE"}:
                return "goes through a set"
    return ""


def _is_orderless(steps: Sequence[dis.Instruction], number: int) -> bool:
    """Return True if a set is the first argument of a function that ignores its order."""
    for step in reversed(steps[:number]):
        if step.opname.startswith(_ENDING):
            return False
        if step.opname == "LOAD_GLOBAL" and step.argval in _ORDERLESS:
            return True
    return False


def unseen_of(code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lookups in the user's code that are resolved only when it runs, so that no digest can count them.

    Args:
        code: code to examine, with the code nested in it.
        names: globals of the code; empty if its module is not imported.

    Yields:
        The lookup and its location: "eval() in load (tools.py:7)".
    """
    for part in _nested(code):
        if _LOOKING_UP.isdisjoint((*part.co_names, *part.co_varnames)):
            continue
        steps, line = list(_singly(_instructions(part))), part.co_firstlineno
        for number, step in enumerate(steps):
            line = (step.positions and step.positions.lineno) or line
            if step.opname in _LOADING and step.argval in _LOOKING_UP and (how := _unseen(part, steps, number, names)):
                yield f"{how} in {part.co_qualname} ({os.path.basename(part.co_filename)}:{line})"


def _unseen(code: types.CodeType, steps: Sequence[dis.Instruction], number: int, names: Mapping[str, Any]) -> str:
    """Describe what an instruction loads if the code does not say what is looked up in it; else ""."""
    step = steps[number]
    name, is_attribute = step.argval, step.opname in _ATTRIBUTE
    if name in _BY_TEXT:
        is_global = step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and name not in names
        return f"{name}()" if is_global or (is_attribute and steps[number - 1].argval == "builtins") else ""
    if name in _NAMESPACES:
        return name if is_attribute else ""
    if name in _BY_PATH:
        return f"{name}()"
    module = "sys" if name == "modules" else "os" if name in _ENVIRONMENTS else ""
    if (module and not _is_of(module, steps, number, names)) or _key(code, steps, number, names) is not None:
        return ""
    if not module or name.startswith("getenv"):
        return f"{name}() of a computed name"
    following = [each.opname if each.argval != "update" else "update" for each in steps[number + 1 : number + 3]]
    is_set = {"STORE_SUBSCR", "DELETE_SUBSCR"}.intersection(following[1:]) or following[:1] == ["update"]
    starts_program = any(isinstance(each, tuple) and "env" in each for each in code.co_consts)
    return "" if is_set or starts_program else f"{module}.{name}"


def _reads_of_imported(code: types.CodeType, package: str) -> Iterator[tuple[str, str]]:
    """Yield module and attribute for `from cfg import size`, and for `cfg.size` after `import cfg`."""
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2]:  # true of most code, whose instructions are slow to list
        return
    instructions = list(_singly(_instructions(code)))
    for number, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME":
            continue
        level, names = (before.argval for before in instructions[number - 2 : number])
        try:
            name = importlib.util.resolve_name("." * level + instruction.argval, package)
        except ImportError:
            continue
        yield from ((name, attribute) for attribute in names or ())
        held = instructions[number + 1 : number + 2]
        if not names and held and held[0].opname in {"STORE_FAST", "STORE_DEREF"}:
            for reading in _nested(code):
                for load, following in itertools.pairwise(_singly(_instructions(reading))):
                    is_read = load.argval == held[0].argval and load.opname in {"LOAD_FAST", "LOAD_DEREF"}
                    if is_read and following.opname in {"LOAD_ATTR", "LOAD_METHOD"}:
                        yield name, following.argval


def constants_of(name: str) -> dict[str, Any]:
    """Return the plain constants that the top level of a module's source assigns, by name."""
    loader: Any = getattr(find_spec(name), "loader", None)
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    steps = [] if code is None else _instructions(code)
    return {
        store.argval: before.argval
        for before, store in itertools.pairwise(steps)
        if store.opname == "STORE_NAME" and _loads_constant(before) and not isinstance(before.argval, types.CodeType)
    }


def _lookups(
    code: types.CodeType, steps: Sequence[dis.Instruction], number: int, value: CodeInPackage
) -> Iterator[Import | Environment]:
    """Yield the modules and environment variables that code looks up by name through what an instruction loads."""
    name, found = steps[number].argval, _key(code, steps, number, value.names)
    if found is None:
        return
    if name in _ENVIRONMENTS:
        yield Environment(found)
    elif name == "expandvars":
        yield from map(Environment, _IN_PATH.findall(found))
    elif name in _IMPORTERS or (name == "modules" and _is_of("sys", steps, number, value.names)):
        yield from _imports(found, (), value.package)


def _key(code: types.CodeType, steps: Sequence[dis.Instruction], number: int, names: Mapping[str, Any]) -> str | None:
    """Return the key that is looked up in the function or mapping that an instruction loads.

    Recognizes `getenv("X")`, `environ["X"]`, `environ.get("X")`, `"X" in environ`, and the same with a global that
    holds the key; returns None if the key is computed, or assigned to.
    """
    if steps[number].argval not in {"environ", "environb", "modules"}:
        return _argument(code, steps, number, names)
    following = steps[number + 1 : number + 3]
    if following and following[0].opname == "CONTAINS_OP":
        return _text(steps[number - 2] if steps[number].opname in _ATTRIBUTE else steps[number - 1], names)
    if following and following[0].argval in {"get", "setdefault", "pop"}:
        return _argument(code, steps, number + 1, names)
    return _text(following[0], names) if len(following) == 2 and _takes_item(following[1]) else None


def _argument(
    code: types.CodeType, steps: Sequence[dis.Instruction], number: int, names: Mapping[str, Any]
) -> str | None:
    """Return the first argument in a call of what an instruction loads if it is a string, else None."""
    first = steps[number + 1] if number + 1 < len(steps) else None
    if first is None or _text(first, names) is None:
        return None
    for step, above in _heights(code, first):
        if above <= 0:  # otherwise it is part of an expression: `"a" + name`
            return _text(first, names) if above < 0 and step.opname in _CALLS else None
    return None


def _text(step: dis.Instruction, names: Mapping[str, Any]) -> str | None:
    """Return the string that an instruction loads, as a constant or from a global."""
    value = step.argval if _loads_constant(step) else None
    if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
        value = names.get(step.argval)
    value = os.fsdecode(value) if isinstance(value, bytes) else value
    return value if isinstance(value, str) else None


def _is_of(module: str, steps: Sequence[dis.Instruction], number: int, names: Mapping[str, Any]) -> bool:
    """Return True if what an instruction loads is the module's attribute of that name."""
    name, held = steps[number].argval, sys.modules[module]
    if steps[number].opname in _ATTRIBUTE:
        owner = steps[number - 1].argval
        return names.get(owner) is held if owner in names else owner == module
    if steps[number].opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
        return name in names and names[name] is getattr(held, name)
    return True  # imported by the code itself


def _goes_by_zone(code: types.CodeType, loaded: dis.Instruction) -> bool:
    """Return True if the function or method that an instruction loads is called without a time zone."""
    for step, above in _heights(code, loaded):
        if above <= 0:
            return step.opname in _CALLS and (step.arg or 0) <= _LOCAL_TIMES[loaded.argval]
    return False


def _heights(code: types.CodeType, start: dis.Instruction) -> Iterator[tuple[dis.Instruction, int]]:
    """Yield the instructions after one, each with the number of values on the stack above that one's."""
    above = 0
    for step in dis.get_instructions(code):
        if step.offset > start.offset and step.opname not in {"CACHE", "EXTENDED_ARG", "KW_NAMES"}:
            argument = step.arg if step.opcode >= dis.HAVE_ARGUMENT else None
            above += dis.stack_effect(step.opcode, argument, jump=False)
            yield step, above


def _is_of_the_shell(name: str, value: Any) -> bool:
    """Return True if a value is IPython's replacement of a builtin: `open`, `exit`, `quit`."""
    held = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else type(value).__module__
    return name in vars(builtins) and str(held).partition(".")[0] == "IPython"


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of code, except those that only describe a class or module."""
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname not in _PASSED_OVER]
    stores = {
        number
        for number, instruction in enumerate(found)
        if instruction.opname == "STORE_NAME"
        and instruction.argval in DESCRIBING
        and _loads_constant(found[number - 1])
    }
    return [part for number, part in enumerate(found) if number not in stores and number + 1 not in stores]


_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}


def _singly(instructions: Iterable[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Yield instructions in their plainest form.

    Python 3.13's instructions for two local variables are split into two, and 3.14's loads of borrowed references
    become ordinary loads.
    """
    for instruction in instructions:
        names = _PAIRS.get(instruction.opname)
        if instruction.opname == "LOAD_FAST_BORROW":
            yield instruction._replace(opname="LOAD_FAST", opcode=dis.opmap["LOAD_FAST"])
        elif names is None:
            yield instruction
        else:
            for name, variable in zip(names, instruction.argval, strict=True):
                yield instruction._replace(opname=name, opcode=dis.opmap[name], argval=variable)


def _loads_constant(instruction: dis.Instruction) -> bool:
    """Return True if an instruction loads a constant."""
    return instruction.opcode in dis.hasconst or instruction.opname in {"KW_NAMES", "LOAD_SMALL_INT"}


def _takes_item(instruction: dis.Instruction) -> bool:
    """Return True if an instruction is a subscript, `x[i]`."""
    return instruction.opname == "BINARY_SUBSCR" or instruction.argrepr == "[]"  # a BINARY_OP since Python 3.14


def _imports(name: str, names: Iterable[str], package: str) -> Iterator[Import]:
    """Yield the modules that `from name import names` loads."""
    try:
        name = importlib.util.resolve_name(name, package)
    except ImportError:  # a relative import outside a package, which fails at run time
        return
    steps = name.split(".")
    yield from (Import(".".join(steps[: depth + 1])) for depth in range(len(steps)))
    if not origin_of_module(name):
        yield from (Import(f"{name}.{part}") for part in names if find_spec(f"{name}.{part}"))


# ---------------------------------------------------------------- attributes that code reads
#
# Which attributes of an object code reads: of two hundred in a training class, those that `make_sample` uses.
#
# The walk follows the bytecode of the entry methods to the methods and properties of the object that they use. An
# attribute counts if it is read. If the object escapes (`helper(self)`, `getattr(self, name)`, `vars(self)`,
# `self.__dict__`), or is passed to a method of an installed base class, everything counts.
#
# An attribute that only the entry code fills is a memo, kept between calls, and does not count. To fill is to assign
# (`self._table = load()`) or to change in place (`self._seen[key] = value`). If other code of the class assigns it
# anything but None, zero or an empty collection, it is an option, and counts.


LRU = type(functools.lru_cache(lambda: None))
_MUTATORS = frozenset(
    {
        "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem",
        "popleft", "remove", "setdefault", "update",
    }
)  # fmt: skip
_OF_CLOSURES = frozenset({"LOAD_CLOSURE", "MAKE_CELL", "COPY_FREE_VARS"})
_EMPTY: tuple[Any, ...] = (None, False, 0, "", b"", (), frozenset())
_COLLECTIONS = frozenset({"dict", "list", "set", "OrderedDict", "Counter", "defaultdict", "deque"})
_BUILDS = frozenset({"BUILD_MAP", "BUILD_LIST", "BUILD_SET"})
_DATAMATS = "datamat.writers.base"  # home of the base of all writers, whose methods do nothing


@dataclasses.dataclass(slots=True, repr=False, eq=False)
class Uses:
    """How code uses the attributes of a variable.

    Attributes:
        reads: names of attributes that it reads.
        fills: names of attributes that it assigns, deletes or changes in place.
        gives: names of attributes to which it assigns anything but None, zero or an empty collection.
        escapes: whether the object itself is passed on.
    """

    reads: set[str] = dataclasses.field(default_factory=set)
    fills: set[str] = dataclasses.field(default_factory=set)
    gives: set[str] = dataclasses.field(default_factory=set)
    escapes: bool = False

    def add(self, other: Uses) -> None:
        """Add the uses of other code."""
        self.reads |= other.reads
        self.fills |= other.fills
        self.gives |= other.gives
        self.escapes |= other.escapes


@dataclasses.dataclass(slots=True, repr=False, eq=False)
class Reach:
    """How methods of an object, and the methods that they use, use it.

    Attributes:
        uses: uses of the object in all of these methods.
        names: names of the methods and properties that were followed.
    """

    uses: Uses
    names: set[str]


@functools.lru_cache(maxsize=4096)
def uses_of(code: types.CodeType, variable: str) -> Uses:
    """Return the uses of a local or closure variable in code, and in code nested in it."""
    found = Uses()
    steps = [step for step in _singly(dis.get_instructions(code)) if step.opname not in {"EXTENDED_ARG", "CACHE"}]
    for number, step in enumerate(steps):
        if step.argval != variable or step.opcode not in _OF_VARIABLES or step.opname in _OF_CLOSURES:
            continue
        if step.opname == "LOAD_FAST" and variable in code.co_cellvars:  # Python 3.13 builds closures this way
            continue
        if step.opname in _LOADS:
            _note_use(found, steps, number)
        else:
            found.escapes = True  # it is bound to another name
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and variable in constant.co_freevars:
            found.add(uses_of(constant, variable))
    return found


_OF_VARIABLES = frozenset([*dis.haslocal, *dis.hasfree])


def _note_use(found: Uses, steps: Sequence[dis.Instruction], number: int) -> None:
    following = steps[number + 1] if number + 1 < len(steps) else None
    name: Any = None if following is None else following.argval
    if following is None:
        found.escapes = True
    elif following.opname in _ATTRIBUTE:
        found.reads.add(name)
        if _is_changed(steps, number + 1):
            found.fills.add(name)
    elif following.opname == "STORE_ATTR":
        found.fills.add(name)
        if not _is_empty(steps, number):
            found.gives.add(name)
    elif following.opname == "DELETE_ATTR":
        found.fills.add(name)
    elif following.opname == "COPY" and following.arg == 1 and steps[number + 2].opname == "LOAD_ATTR":
        name = steps[number + 2].argval  # self.count += 1
        found.reads.add(name)
        found.fills.add(name)
        found.gives.add(name)
    else:
        found.escapes = True


def _is_changed(steps: Sequence[dis.Instruction], number: int) -> bool:
    """Return True if the value that an instruction pushes is changed in place, directly or through a local variable."""
    following = steps[number + 1] if number + 1 < len(steps) else None
    if following is None:
        return False
    if following.opname in _ATTRIBUTE:
        return following.argval in _MUTATORS
    if following.opname == "STORE_FAST":
        loads = [n for n, step in enumerate(steps) if step.opname in _LOADS and step.argval == following.argval]
        return any(_is_changed(steps, load) for load in loads if steps[load + 1].opname != "STORE_FAST")
    above = 0  # number of values above it on the stack
    for step in steps[number + 1 :]:
        if step.opname in {"STORE_SUBSCR", "DELETE_SUBSCR"} and above == 1:
            return True
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs or step.opname == "RETURN_VALUE":
            return False
        above += dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None)
        if above < 0:
            return False
    return False


def _is_empty(steps: Sequence[dis.Instruction], number: int) -> bool:
    """Return True if an attribute of the loaded object is assigned None, zero or an empty collection."""
    before = [step for step in steps[max(number - 6, 0) : number] if step.opname not in {"PRECALL", "PUSH_NULL"}]
    if not before:
        return False
    last = before[-1]
    if last.opname in {"LOAD_CONST", "LOAD_SMALL_INT"}:
        return any(last.argval is value or (last.argval == value and last.argval.__class__ is value.__class__)
                   for value in _EMPTY)  # fmt: skip
    if last.opname in _BUILDS:
        return last.arg == 0
    if last.opname != "CALL" or last.arg not in {0, 1} or len(before) < last.arg + 2:
        return False
    called, arguments = before[-2 - last.arg], before[-1 - last.arg : -1]
    return called.argval in _COLLECTIONS and all(step.opname == "LOAD_GLOBAL" for step in arguments)


def reach(value: Any, entries: Iterable[str]) -> Reach:
    """Return the uses of an object in some of its methods, and in the methods that they use.

    Args:
        value: object whose methods are examined.
        entries: names of the methods, and of other attributes that are read.
    """
    names = list(entries)
    found, calls_super = _reach(value, names, with_overridden=False)
    return _reach(value, names, with_overridden=True)[0] if calls_super else found


def _reach(value: Any, entries: Iterable[str], *, with_overridden: bool) -> tuple[Reach, bool]:
    """Return the result of `reach`, and True if `super()` is used, so that overridden methods must be followed."""
    kind: Any = type(value)
    calls_super = False
    found = Reach(Uses(), set())
    found.uses.escapes = kind.__getattribute__ is not object.__getattribute__
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found.names:
            continue
        found.names.add(name)
        found.uses.reads.add(name)
        found.uses.escapes |= name == "__dict__"
        held = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        if not held and name not in getattr(value, "__dict__", {}) and hasattr(kind, "__getattr__"):
            waiting.append("__getattr__")
        for function in (each for part in held[: None if with_overridden else 1] for each in _functions(part)):
            uses = _uses_of_function(function)
            found.uses.add(uses)
            waiting += uses.reads
            if isinstance(function, types.FunctionType) and "super" in function.__code__.co_names:
                calls_super = True
                waiting += [other for other in function.__code__.co_names if hasattr(kind, other)]
    return found, calls_super


def _uses_of_function(function: Any) -> Uses:
    """Return the uses of its object in a method."""
    if not isinstance(function, types.FunctionType):
        return Uses(escapes=True)
    if function.__globals__.get("__name__") == _DATAMATS:
        return Uses()
    if origin_of_function(function) or not function.__code__.co_argcount:
        return Uses(escapes=True)
    return uses_of(function.__code__, function.__code__.co_varnames[0])


def _functions(part: Any) -> Iterator[Any]:
    """Yield the functions that get the object on use of an attribute of its class; None for an unknown descriptor."""
    if isinstance(part, property):
        yield from (each for each in (part.fget, part.fset) if each is not None)
    elif isinstance(part, (functools.cached_property, functools.partialmethod)):
        yield part.func
    elif isinstance(part, LRU):
        yield part.__wrapped__
    elif isinstance(part, types.FunctionType):
        yield part
    elif isinstance(part, (staticmethod, classmethod, types.MemberDescriptorType, type)):
        return
    elif hasattr(type(part), "__get__"):
        yield None


def memos_of(value: Any, making: Reach, others: Iterable[str] = ()) -> set[str]:
    """Return the attributes of an object that are filled only by the code that makes samples.

    Args:
        value: object whose attributes are examined.
        making: uses of the object in the methods that make samples.
        others: methods called earlier, which prepare the input of these.
    """
    before = reach(value, others)
    given = set(before.uses.gives)
    for base in type(value).__mro__:
        for name, part in vars(base).items():
            if name in making.names and name not in before.names:
                continue
            for function in _functions(part):
                if isinstance(function, types.FunctionType) and function.__code__.co_argcount:
                    given |= uses_of(function.__code__, function.__code__.co_varnames[0]).gives
    return making.uses.fills - given


# ---------------------------------------------------------------- functions, classes and modules


_CODE = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    LRU,
)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_PLAIN = frozenset([*ATOMS, list, tuple, dict, set, frozenset, np.ndarray])
_DECLARED = frozenset({"__slots__", "__match_args__", "__annotations__", "__pydantic_fields__"})
"""Dunder attributes that the author of a class declares."""
_MAKES_ANNOTATIONS = "__annotate_func__"


def parts_of_function(value: types.FunctionType) -> Parts:
    """Return the parts of a function: its bytecode, and the defaults, closure and globals it uses."""
    if is_installed(value.__module__) and "<" not in value.__qualname__:  # neither a lambda nor a local function
        return Parts(f"function {value.__qualname__}".encode(), [Import(value.__module__)], [""])
    # A function made by an installed decorator has the wrapped function's name but its own globals.
    origin = origin_of_function(value)
    read = () if origin else (*read_globals(value), *read_imported(value))
    held: list[tuple[str, Any]] = [
        ("", CodeInPackage(value.__code__, value.__globals__.get("__package__") or "", value.__globals__)),
        (" defaults", value.__defaults__),
        (" defaults", value.__kwdefaults__),
        ("", None if origin else vars(value)),
    ]
    closure = dict(_closure_of(value))
    used = closure | {path: part for path, part, _ in read}
    homes = {path: home for path, _, home in read if home is not None}
    if (home := home_of(value)) is not None and not origin:
        cells = {name: f".__closure__.{cell}.cell_contents" for cell, name in enumerate(value.__code__.co_freevars)}
        homes = {name: (home[0], home[1] + cells[name]) for name in closure} | homes
    parts = counted(named(tag_of(b"function", origin), held, used, step=" -> ", homes=homes), origin)
    if origin:
        return parts
    if home is not None:
        state = {1: "__defaults__", 2: "__kwdefaults__", 3: "__dict__"}
        kept = {place: (home[0], f"{home[1]}.{name}") for place, name in state.items() if held[place][1]}
        parts = dataclasses.replace(parts, homes={**parts.homes, **kept})
    return dataclasses.replace(parts, memos=filled_globals(value))


def home_of(value: Any) -> Home | None:
    """Return the module and path at which the user's function can be looked up; None if it cannot."""
    module, name = value.__module__, value.__qualname__
    found = functools.reduce(lambda holder, step: getattr(holder, step, None), name.split("."), sys.modules.get(module))
    return (module, name) if found is value and not is_installed(module) else None


def _closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            value = cell.cell_contents
            uses = uses_of(function.__code__, name) if is_users_object(value) else None
            if uses is None or uses.escapes or uses.fills:
                yield name, value
            else:
                yield name, Reached(value, frozenset(uses.reads))


def is_users_object(value: Any) -> bool:
    """Return True if a value is an instance of a class that the user wrote, and has attributes."""
    is_code = isinstance(value, (type, types.FunctionType, types.ModuleType, enum.Enum))
    return not is_code and hasattr(value, "__dict__") and not is_installed(type(value).__module__)


def tag_of(kind: bytes, origin: Origin) -> bytes:
    """Return a tag with the names of origins; versions are recorded separately."""
    return kind + repr([name for name, _ in origin]).encode()


def counted(parts: Parts, origin: Origin) -> Parts:
    """Return parts with their origins."""
    return dataclasses.replace(parts, origins=origin) if origin else parts


def parts_of_class(value: type) -> Parts:
    """Return the parts of a class: its bases, and the attributes that its author wrote."""
    if is_installed(value.__module__):
        return Parts(f"class {value.__qualname__}".encode(), [Import(value.__module__)], [""])
    filled = _filled_by_class(value)
    body = {name: part for name, part in written_attributes(dict(vars(value))).items() if name not in filled}
    if _MAKES_ANNOTATIONS in vars(value):
        body["__annotations__"] = _annotations_of(value)
    if isinstance(value, enum.EnumMeta):
        members: dict[str, Any] = {name: value[name].value for name in value.__members__}
        body = {name: part for name, part in body.items() if isinstance(part, _CODE)} | members
    tag = f"class {value.__name__} {len(value.__bases__)} ".encode()
    homes, memos = {}, {}
    if "<locals>" not in value.__qualname__ and value.__module__ in sys.modules:
        homes = {name: (value.__module__, f"{value.__qualname__}.{name}") for name in body if isinstance(name, str)}
        memos = dict.fromkeys(((value.__module__, f"{value.__qualname__}.{name}") for name in filled), True)
    parts = named(tag, [(" class", base) for base in (type(value), *value.__bases__)], body, homes=homes)
    return dataclasses.replace(parts, memos=memos)


def _filled_by_class(value: type) -> set[str]:
    """Return the attributes that a class assigns to itself in class methods and in `__new__`, such as singletons."""
    found: set[str] = set()
    for name, part in vars(value).items():
        function = getattr(part, "__func__", None)  # of a `classmethod`, and of `__new__`, a `staticmethod`
        if isinstance(function, types.FunctionType) and (name == "__new__" or isinstance(part, classmethod)):
            uses = uses_of(function.__code__, function.__code__.co_varnames[0])
            found |= uses.gives & uses.reads
    return found


def _annotations_of(cls: type) -> dict[str, Any]:
    """Return the annotations of a class, which Python 3.14 evaluates on first access.

    The function that evaluates them holds the whole namespace of the class. Annotations that name objects imported for
    type checkers only are returned as text.
    """
    try:
        return dict(cls.__annotations__)
    except Exception:  # noqa: BLE001 -- they are the user's expressions
        annotationlib = importlib.import_module("annotationlib")
        return dict(annotationlib.get_annotations(cls, format=annotationlib.Format.STRING))


def written_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a class that its author wrote."""
    return {
        name: value
        for name, value in attributes.items()
        if name in _DECLARED
        or (isinstance(value, _CODE) and name != _MAKES_ANNOTATIONS)
        or not (
            name in DESCRIBING or (name.startswith("__") and name.endswith("__")) or isinstance(value, _DESCRIPTORS)
        )
    }


def parts_of_module(value: types.ModuleType) -> Parts:
    """Return the parts of a module that code uses as a whole: its version, or the user's definitions."""
    if not is_users_module(value):
        return Parts(b"module", [Import(value.__name__)], [""])
    own = {
        name: part
        for name, part in vars(value).items()
        if not name.startswith("__") and (type(part) in _PLAIN or getattr(part, "__module__", None) == value.__name__)
    }
    return named(b"module", [], own, homes={name: (value.__name__, name) for name in own})


def parts_of_import(value: Import) -> Parts:
    """Return the parts of a module that code imports: its version, or the user's source, compiled but not run."""
    origin, spec = origin_of_module(value.name), find_spec(value.name)
    if origin:
        return counted(Parts(tag_of(f"module {value.name} of ".encode(), origin)), origin)
    if spec is None or spec.origin is None:
        return Parts(b"module without source")
    if spec.origin.endswith((".py", ".pyc")):
        package = value.name if spec.submodule_search_locations is not None else value.name.rpartition(".")[0]
        loader: Any = spec.loader  # of a file, of a file without its source, or of an archive
        if not hasattr(loader, "get_code"):  # pytest's
            loader = importlib.machinery.SourceFileLoader(value.name, spec.origin)
        code = loader.get_code(value.name)
        return Parts(b"module", [] if code is None else [CodeInPackage(code, package)], [f" ({value.name})"])
    with open(spec.origin, "rb") as file:
        return Parts(b"module " + xxhash.xxh3_128_digest(file.read()))
