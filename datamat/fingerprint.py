"""A digest of whatever decides the output: writers, transforms, callables, features, options.

A `fingerprint` is equal wherever the meaning is equal (another process, host, hash seed or folder) and differs
wherever the output may. How objects count:

    values              by content; dicts and sets without their order
    the user's code     functions by bytecode, constants, defaults, closure and the globals they use; classes by bases
                        and attributes. Comments, docstrings, annotations of functions, line numbers and file names
                        do not count. `datamat.writers` is treated like it
    installed code      by module, name and version of its distribution
    instances           by class and by what pickle would keep: `__getstate__`, `__dict__`, slots, `__reduce__`
    albumentations      without what a transform remembers of the last image
    random generators,  by type alone: what they hold never reaches the output, or is set per record
    loggers, locks, threads
    open files, connections, iterators    not at all: a `FingerprintError` names their place

The work is done on a graph, without recursion, so that depth and cycles do not matter: `_TABLE` and `_KINDS` say
what one object is made of, `_Graph.grow` follows that, and `_Graph.digest` folds the graph up, one strongly
connected component after the other. Inside a component (a class and the methods that name it) nodes are told apart
by colour refinement: the digest depends neither on where the walk came in nor on which equal parts are one object.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copyreg
import dataclasses
import dis
import enum
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import itertools
import logging
import pathlib
import pickle
import random
import struct
import sys
import sysconfig
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from datamat.errors import FingerprintError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["fingerprint"]


def fingerprint(value: Any, *, where: str) -> str:
    """Return the digest of a value as 32 hex digits (XXH3-128 over a prefix-free form).

    Not for adversaries: XXH3 is no cryptographic hash.

    Args:
        value: whatever decides the output.
        where: what messages call it: `writer`.

    Raises:
        FingerprintError: something in it cannot count; the message names its place.

    Example:
        >>> fingerprint({"a": 1, "b": {2, 3}}, where="options") == fingerprint({"b": {3, 2}, "a": 1}, where="options")
        True
    """
    graph = _Graph(where)
    return graph.digest(graph.grow(value)).hex()


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """What an object is made of.

    Attributes:
        tag: its kind, and whatever of it is no object of its own.
        children: the objects it holds.
        steps: how the path goes on to each child; by position where left out.
        group: 0 where the order of the children counts, else how many make one member of a set.
    """

    tag: bytes
    children: Sequence[Any] = ()
    steps: Sequence[str] = ()
    group: int = 0


# ---- the graph


@dataclasses.dataclass(slots=True)
class _Node:
    """One object of the graph; `links` are its children: the number of a node, or the digest of an atom."""

    value: Any  # kept: its id names the node
    parent: int
    position: int
    parts: _Parts = _Parts(b"")
    links: list[int | bytes] = dataclasses.field(default_factory=list)
    digest: bytes = b""


class _Graph:
    """The objects that a value is made of, as nodes in the order of a breadth-first walk."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._nodes: list[_Node] = []
        self._numbers: dict[Any, int] = {}

    def grow(self, value: Any) -> int | bytes:
        """Follow a value to everything it is made of, and return its link."""
        root = self._link(value, -1, 0)
        for number, node in enumerate(self._nodes):  # grows as it goes
            try:
                node.parts = _parts_of(node.value)
            except _UNREADABLE as error:
                raise self._refusal(number, error) from error
            node.links = [self._link(child, number, position) for position, child in enumerate(node.parts.children)]
        return root

    def digest(self, root: int | bytes) -> bytes:
        """Return the digest of a link, 16 bytes."""
        if isinstance(root, bytes):
            return root
        for component in _components([node.links for node in self._nodes]):
            self._fold(component)
        return self._nodes[root].digest

    def _link(self, value: Any, parent: int, position: int) -> int | bytes:
        atom = _ATOMS.get(type(value))
        if atom is not None:
            return _hash(b"atom " + type(value).__name__.encode(), atom(value))
        key = value if isinstance(value, _Import) else id(value)
        number = self._numbers.setdefault(key, len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(_Node(value, parent, position))
        return number

    def _fold(self, component: list[int]) -> None:
        """Set the digests of nodes that reach each other; whatever else they reach has its digest."""
        nodes = self._nodes
        colours = dict.fromkeys(component, bytes(16))
        classes = 0
        while len(set(colours.values())) > classes:
            classes = len(set(colours.values()))
            colours = {
                number: _combine(
                    nodes[number].parts,
                    [
                        link if isinstance(link, bytes) else colours.get(link, nodes[link].digest)
                        for link in nodes[number].links
                    ],
                )
                for number in component
            }
        everyone = b"".join(sorted(set(colours.values())))
        for number in component:
            nodes[number].digest = _hash(colours[number], everyone)

    def _refusal(self, number: int, error: BaseException) -> FingerprintError:
        kind = type(self._nodes[number].value)
        steps = []
        while (node := self._nodes[number]).parent >= 0:
            steps.append(_step(self._nodes[node.parent].parts, node.position))
            number = node.parent
        path = self._where + "".join(reversed(steps))
        return FingerprintError(
            f"{path}: {kind.__module__}.{kind.__qualname__} has no content that a fingerprint could count ({error}); "
            "drop it in __getstate__, or make it in setup_worker"
        )


def _components(links: Sequence[Sequence[int | bytes]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph, each after those it leads to.

    Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1 (1972), without its recursion.
    """
    edges = [[link for link in each if isinstance(link, int)] for each in links]
    order: dict[int, int] = {}
    low: dict[int, int] = {}  # of the nodes of no component yet: the earliest node known to be in theirs
    unassigned: list[int] = []
    for start in range(len(edges)):
        walk = [] if start in order else [(start, iter(edges[start]))]
        while walk:
            node, ahead = walk[-1]
            if node not in order:
                order[node] = low[node] = len(order)
                unassigned.append(node)
            new = next((link for link in ahead if link not in order), None)
            if new is not None:
                walk.append((new, iter(edges[new])))
                continue
            walk.pop()
            low[node] = min(low[link] for link in [node, *edges[node]] if link in low)
            if low[node] == order[node]:
                component = [unassigned.pop()]
                while component[-1] != node:
                    component.append(unassigned.pop())
                for member in component:
                    del low[member]
                yield component


def _combine(parts: _Parts, digests: Sequence[bytes]) -> bytes:
    """Return the digest of a node from those of its children."""
    size = parts.group
    members = sorted(b"".join(digests[i : i + size]) for i in range(0, len(digests), size)) if size else digests
    return _hash(parts.tag, b"%d,%d;" % (size, len(digests)), *members)


def _hash(*pieces: bytes) -> bytes:
    """Return the XXH3-128 of pieces whose borders count where the first one's does: it alone varies in length."""
    digest = xxhash.xxh3_128(b"%d:" % len(pieces[0]))
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _step(parts: _Parts, position: int) -> str:
    """Return how a path goes on to a child."""
    if parts.steps:
        return parts.steps[position]
    if parts.group == 2:  # a dict: keys and values in turn
        key = parts.children[position - position % 2]
        return f"[{key!r}]" if isinstance(key, (str, int)) else f"[{type(key).__name__}]"
    return f"[{position}]"


# ---- what objects are made of

_UNREADABLE = (
    TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, OSError, ReferenceError,
    pickle.PickleError,
)  # fmt: skip
"""What `__getstate__` and `__reduce__` raise where an object has no content to give."""

_ATOMS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"",
    type(...): lambda _: b"",
    type(NotImplemented): lambda _: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: b"%x" % value,
    float: lambda value: struct.pack("<d", value) if value == value else b"nan",  # noqa: PLR0124 -- NaN alone differs
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: value,
}


def _parts_of(value: Any) -> _Parts:
    kind = type(value)
    if kind in _TABLE:
        return _TABLE[kind](value)
    for base in kind.__mro__[:-1]:
        if base in _KINDS:
            return _KINDS[base](value)
    if kind.__module__ in _ALONE_MODULES:
        return _alone(value)
    if isinstance(value, collections.abc.Iterator) and _installed(kind.__module__):
        raise TypeError("what it yields depends on what was read from it before")
    return _instance(value)


def _sequence(value: Sequence[Any]) -> _Parts:
    return _Parts(type(value).__name__.encode(), value)


def _set(value: Iterable[Any]) -> _Parts:
    return _Parts(type(value).__name__.encode(), tuple(value), group=1)


def _dict(value: Any) -> _Parts:
    if "__module__" in value and "__qualname__" in value:  # the body of a class, as metaclasses keep it
        value = _body(value)
    return _Parts(b"dict", [part for item in value.items() for part in item], group=2)


def _alone(value: Any) -> _Parts:
    return _Parts(b"any", [type(value)], [" type"])


def _array(value: np.ndarray) -> _Parts:
    if type(value) not in {np.ndarray, np.memmap}:
        return _instance(value)
    tag = repr(("array", value.dtype, value.shape)).encode()
    if value.dtype.hasobject:
        return _Parts(tag, value.ravel().tolist())
    if value.dtype.names:  # field by field: the padding between them is whatever memory held
        return _Parts(tag, [np.asarray(value[name]) for name in value.dtype.names], value.dtype.names)
    flat = np.ascontiguousarray(value).reshape(-1)  # a copy only of what is not contiguous
    return _Parts(tag + xxhash.xxh3_128_digest(flat.view(np.uint8).data if flat.nbytes else b""))


def _instance(value: Any) -> _Parts:
    """Take an object apart as pickle does, without what it computes anew."""
    kind = type(value)
    reduce = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a global, as pickle finds it
        module = getattr(value, "__module__", None) or kind.__module__
        return _Parts(f"global {reduced}".encode(), [kind, _Import(module)], ["", ""])
    build, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    pairs = None if pairs is None else list(pairs)
    held = [
        ("", kind),
        ("", arguments),
        ("", build),
        ("", None if items is None else list(items)),
        ("", dict(pairs) if pairs and not isinstance(value, collections.OrderedDict) else pairs),
    ]
    usual = build in {copyreg.__newobj__, copyreg.__newobj_ex__} and kind.__getstate__ is _USUAL_STATE  # type: ignore[attr-defined]
    if usual and isinstance(state, tuple):
        state = {**(state[0] or {}), **state[1]}  # `__dict__` and slots
    if not isinstance(state, dict):
        return _named(b"instance", [*held, (" state", state)], {})
    return _named(b"instance", held, _lasting(kind, state))


def _lasting(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an instance without those that using it sets."""
    computed = {name for base in kind.__mro__ for name, part in vars(base).items() if isinstance(part, _CACHED)}
    if not _is_albumentations(kind):
        return {name: value for name, value in state.items() if name not in computed and name != "__doc__"}
    lasting = {name: value for name, value in state.items() if name not in computed | _LAST_IMAGE}
    # Processors remember the labels that they saw; their parameters decide.
    lasting["processors"] = {name: vars(processor.params) for name, processor in state.get("processors", {}).items()}
    return lasting


def _is_albumentations(kind: type) -> bool:
    modules = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return "albumentations" in modules and hasattr(kind, "set_random_state")


def _named(tag: bytes, held: list[tuple[str, Any]], attributes: dict[Any, Any], *, step: str = ".") -> _Parts:
    """Return an object that holds attributes by name beside what it holds by place."""
    names = sorted(attributes, key=str)
    return _Parts(
        tag + repr([str(name) for name in names]).encode(),
        [*(part for _, part in held), *(attributes[name] for name in names)],
        [*(place for place, _ in held), *(f"{step}{name}" for name in names)],
    )


def _method(value: types.MethodType) -> _Parts:
    return _Parts(b"method", [value.__func__, value.__self__], ["", ".__self__"])


def _builtin(value: Any) -> _Parts:
    """Return a function or method written in C: by name, and by the object it is bound to."""
    owner = getattr(value, "__self__", None)
    if owner is None or isinstance(owner, types.ModuleType):
        return _Parts(f"builtin {value.__qualname__}".encode(), [_Import(value.__module__ or "builtins")], [""])
    return _Parts(f"builtin {value.__name__}".encode(), [owner], [".__self__"])


def _descriptor(value: Any) -> _Parts:
    return _Parts(f"descriptor {value.__name__}".encode(), [value.__objclass__], [""])


def _property(value: Any) -> _Parts:
    return _Parts(b"property", [value.fget, value.fset, value.fdel], ["", ".setter", ".deleter"])


def _wrapped(value: Any) -> _Parts:
    return _Parts(type(value).__name__.encode(), [value.__wrapped__], [""])


def _enum(value: enum.Enum) -> _Parts:
    return _Parts(b"enum", [type(value), value.value], ["", ".value"])


# ---- code


def _class(value: type) -> _Parts:
    if _installed(value.__module__):
        return _Parts(f"class {value.__qualname__}".encode(), [_Import(value.__module__)], [""])
    body = _body(dict(vars(value)))
    if isinstance(value, enum.EnumMeta):
        members: dict[str, Any] = {name: value[name].value for name in value.__members__}
        body = {name: part for name, part in body.items() if isinstance(part, _CODE)} | members
    tag = f"class {value.__name__} {len(value.__bases__)} ".encode()
    return _named(tag, [(" class", base) for base in (type(value), *value.__bases__)], body)


def _body(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a class that its author wrote."""
    return {
        name: value
        for name, value in attributes.items()
        if name in _KEPT_ATTRIBUTES
        or isinstance(value, _CODE)
        or not (name in _NOISE or (name.startswith("__") and name.endswith("__")) or isinstance(value, _DESCRIPTORS))
    }


def _function(value: types.FunctionType) -> _Parts:
    if _installed(value.__module__) and "<" not in value.__qualname__:  # no lambda, nor local to another function
        return _Parts(f"function {value.__qualname__}".encode(), [_Import(value.__module__)], [""])
    # A function that an installed decorator made has the name of what it wraps, but its own globals.
    origin = _origin(value.__globals__.get("__name__") or "", value.__globals__.get("__file__"))
    held: list[tuple[str, Any]] = [
        ("", _Code(value.__code__, value.__globals__.get("__package__") or "")),
        (" defaults", value.__defaults__),
        (" defaults", value.__kwdefaults__),
        ("", None if origin else vars(value)),
    ]
    used = dict(_closure_of(value)) | ({} if origin else dict(_globals_of(value)))
    return _named(f"function {origin}".encode(), held, used, step=" -> ")


def _closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function reads, by name; of the user's modules only the attributes that it takes.

    A global that the function itself assigns is what it keeps between calls, not what it was given.
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
    for path in sorted(reads):
        if path[0] in function.__globals__ and path[0] not in writes | _OF_THE_PLACE:
            value, depth = function.__globals__[path[0]], 1
            while depth < len(path) and _is_users_module(value) and path[depth] in vars(value):
                value, depth = vars(value)[path[depth]], depth + 1
            yield ".".join(path[:depth]), value


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


@dataclasses.dataclass(frozen=True, slots=True)
class _Code:
    """Bytecode, and the package that its relative imports start from."""

    code: types.CodeType
    package: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Import:
    """A module that code imports when it runs, by name: it need not be imported now."""

    name: str


def _bytecode(value: _Code) -> _Parts:
    """Return the instructions of code: their names and operands, without what only tells where they were written."""
    code = value.code
    text: list[Any] = [
        code.co_name, code.co_flags & _CALL_FLAGS, code.co_posonlyargcount, code.co_kwonlyargcount,
        code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_exceptiontable,
    ]  # fmt: skip
    held: list[Any] = []
    instructions = _instructions(code)
    for number, instruction in enumerate(instructions):
        operand = instruction.argval if instruction.opcode in _NAMED_OPERANDS else instruction.arg
        if _loads_constant(instruction):
            operand = None
            constant = code.co_consts[instruction.arg or 0]
            held.append(_Code(constant, value.package) if isinstance(constant, types.CodeType) else constant)
        if instruction.opname == "IMPORT_NAME":
            level, names = (before.argval for before in instructions[number - 2 : number])
            held += _imports("." * level + instruction.argval, names or (), value.package)
        text.append((instruction.opname, operand))
    return _Parts(b"code" + repr(text).encode(), held)


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of code without those of a class or module body that describe it."""
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname != "EXTENDED_ARG"]
    stores = {
        number
        for number, instruction in enumerate(found)
        if instruction.opname == "STORE_NAME" and instruction.argval in _NOISE and _loads_constant(found[number - 1])
    }
    return [part for number, part in enumerate(found) if number not in stores and number + 1 not in stores]


def _loads_constant(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasconst or instruction.opname == "KW_NAMES"


def _imports(name: str, names: Iterable[str], package: str) -> Iterator[_Import]:
    """Yield the modules that `from name import names` loads."""
    try:
        name = importlib.util.resolve_name(name, package)
    except ImportError:  # a relative import outside a package: it will fail when it runs
        return
    steps = name.split(".")
    yield from (_Import(".".join(steps[: depth + 1])) for depth in range(len(steps)))
    if not _origin_of(name):
        yield from (_Import(f"{name}.{part}") for part in names if _spec(f"{name}.{part}"))


# ---- modules


def _module(value: types.ModuleType) -> _Parts:
    """Return a module that code uses as a whole: by version, or by what the user defined in it."""
    if not _is_users_module(value):
        return _Parts(b"module", [_Import(value.__name__)], [""])
    own = {
        name: part
        for name, part in vars(value).items()
        if not name.startswith("__") and (type(part) in _PLAIN or getattr(part, "__module__", None) == value.__name__)
    }
    return _named(b"module", [], own)


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _origin(value.__name__, vars(value).get("__file__"))


def _imported(value: _Import) -> _Parts:
    origin, spec = _origin_of(value.name), _spec(value.name)
    if origin:
        return _Parts(f"module {value.name} of {origin}".encode())
    if spec is None or spec.origin is None:
        return _Parts(b"module without source")
    if spec.origin.endswith((".py", ".pyc")):
        package = value.name if spec.submodule_search_locations is not None else value.name.rpartition(".")[0]
        code = importlib.machinery.SourceFileLoader(value.name, spec.origin).get_code(value.name)
        return _Parts(b"module", [] if code is None else [_Code(code, package)], [f" ({value.name})"])
    with open(spec.origin, "rb") as file:
        return _Parts(b"module " + xxhash.xxh3_128_digest(file.read()))


def _installed(module: Any) -> bool:
    """Return whether a module is no code of the user's, by its name: it has been imported."""
    # The metatype of Cython has a descriptor for `__module__`; functions made by exec have None.
    return isinstance(module, str) and bool(_origin(module, getattr(sys.modules.get(module), "__file__", None)))


def _origin_of(module: str) -> str:
    spec = _spec(module)
    if spec is None:
        return _origin(module, None)
    return _origin(module, spec.origin or next(iter(spec.submodule_search_locations or []), None))


@functools.cache
def _origin(module: str, file: str | None) -> str:
    """Return what installed a module, with its version; nothing for the user's own code."""
    top = module.partition(".")[0]
    if top == "datamat":
        return "" if module.startswith("datamat.writers") else _version("datamat")
    if file in {None, "built-in", "frozen"}:
        return _PYTHON if top in sys.stdlib_module_names else ""
    folders = pathlib.PurePath(file).parts
    if "site-packages" in folders or "dist-packages" in folders:
        return _version(top)
    return _PYTHON if file.startswith(_STDLIB) else ""


@functools.cache
def _version(top: str) -> str:
    """Return the distributions that a top-level module comes from, with their versions."""
    try:
        return f"{top} {importlib.metadata.version(top)}"
    except importlib.metadata.PackageNotFoundError:  # named unlike its module; looking through all takes 0.1 s, once
        names = sorted(set(_distributions().get(top, [])))
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or f"{top} of no version"


_distributions = functools.cache(importlib.metadata.packages_distributions)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module without importing it, nor the packages it is in."""
    spec, path, steps = None, None, name.split(".")
    for depth in range(len(steps)):
        if depth and path is None:  # below a module that is no package
            return None
        partial = ".".join(steps[: depth + 1])
        specs = (finder.find_spec(partial, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((found for found in specs if found), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


# ---- tables

_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
_STDLIB = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_CALL_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_NAMED_OPERANDS = frozenset([*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare])

_OF_THE_PLACE = frozenset({"__name__", "__file__", "__package__", "__spec__", "__loader__", "__cached__", "__doc__"})
"""Globals that tell where code lies and how it was started."""

_NOISE = frozenset({"__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__", "_abc_impl"})
"""Attributes that describe a class."""

_KEPT_ATTRIBUTES = frozenset({"__slots__", "__match_args__", "__annotations__", "__pydantic_fields__"})
"""Those with names between double underscores that its author declares."""

_LAST_IMAGE = frozenset(
    {
        "params", "seed", "random_generator", "py_random", "_key2func", "processors", "check_each_transform",
        "_images_was_list", "_masks_was_list",
    }
)  # fmt: skip
"""Attributes of albumentations transforms that they set anew for each image, or derive from the others."""

_USUAL_STATE: Any = object.__getstate__
_CACHED = functools.cached_property
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_LRU = type(functools.lru_cache(lambda: None))
_CODE = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    _LRU,
)
_PLAIN = frozenset([*_ATOMS, list, tuple, dict, set, frozenset, np.ndarray])
_ALONE_MODULES = frozenset({"multiprocess.synchronize", "multiprocessing.synchronize"})

_TABLE: dict[type, Callable[[Any], _Parts]] = {
    list: _sequence,
    tuple: _sequence,
    set: _set,
    frozenset: _set,
    dict: _dict,
    types.MappingProxyType: _dict,
    bytearray: lambda value: _Parts(b"bytearray", [bytes(value)]),
    memoryview: lambda value: _Parts(b"memoryview", [np.asarray(value)]),
    property: _property,
    classmethod: _wrapped,
    staticmethod: _wrapped,
    _LRU: _wrapped,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    types.WrapperDescriptorType: _descriptor,
    types.MethodDescriptorType: _descriptor,
    types.ClassMethodDescriptorType: _descriptor,
    types.GetSetDescriptorType: _descriptor,
    types.MemberDescriptorType: _descriptor,
    types.CodeType: lambda value: _Parts(b"", [_Code(value, "")], [""]),
    weakref.ref: lambda value: _Parts(b"weakref", [value()], [""]),
    _Code: _bytecode,
    _Import: _imported,
}
"""What objects of exactly these types are made of."""

_KINDS: dict[type, Callable[[Any], _Parts]] = {
    type: _class,
    types.ModuleType: _module,
    enum.Enum: _enum,
    np.ndarray: _array,
    np.generic: lambda value: _Parts(b"scalar", [np.asarray(value)], [""]),
    np.dtype: lambda value: _Parts(b"dtype " + repr(value).encode()),
    set: lambda value: _Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    frozenset: lambda value: _Parts(b"", [type(value), frozenset(value), getattr(value, "__dict__", {})]),
    **dict.fromkeys(
        [
            np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random,
            logging.Logger, logging.Handler,
            type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Semaphore,
            threading.Barrier, threading.Thread, threading.local, concurrent.futures.Executor,
            weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
        ],
        _alone,
    ),
}  # fmt: skip
"""What objects of these types, and of types derived from them, are made of."""
