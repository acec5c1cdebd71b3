"""What the bytecode of a function says: what it does, which globals it reads, which modules it imports.

Instructions count by names and operands, not by where they were written, nor by what Python makes of them as it
warms up.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib.util
import inspect
import itertools
import types
from typing import TYPE_CHECKING, Any

from datamat.fingerprint.origins import find_spec, is_users_module, origin_of_module
from datamat.fingerprint.parts import Import, Parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["DESCRIBING", "Code", "parts_of_code", "read_globals"]

DESCRIBING = frozenset(
    {"__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)
"""Names of a class or module that only describe it."""

_OF_THE_PLACE = frozenset({"__name__", "__file__", "__package__", "__spec__", "__loader__", "__cached__", "__doc__"})
"""Globals that tell where code lies and how it was started."""

_CALL_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_NAMED_OPERANDS = frozenset([*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare])


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """Bytecode, and the package that its relative imports start from."""

    code: types.CodeType
    package: str


def parts_of_code(value: Code) -> Parts:
    """Return the instructions of code, and the constants and modules that it uses."""
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
            held.append(Code(constant, value.package) if isinstance(constant, types.CodeType) else constant)
        if instruction.opname == "IMPORT_NAME":
            level, names = (before.argval for before in instructions[number - 2 : number])
            held += _imports("." * level + instruction.argval, names or (), value.package)
        text.append((instruction.opname, operand))
    return Parts(b"code" + repr(text).encode(), held)


def read_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
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
            while depth < len(path) and is_users_module(value) and path[depth] in vars(value):
                value, depth = vars(value)[path[depth]], depth + 1
            yield ".".join(path[:depth]), value


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of code without those of a class or module body that describe it."""
    found = [instruction for instruction in dis.get_instructions(code) if instruction.opname != "EXTENDED_ARG"]
    stores = {
        number
        for number, instruction in enumerate(found)
        if instruction.opname == "STORE_NAME"
        and instruction.argval in DESCRIBING
        and _loads_constant(found[number - 1])
    }
    return [part for number, part in enumerate(found) if number not in stores and number + 1 not in stores]


def _loads_constant(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasconst or instruction.opname == "KW_NAMES"


def _imports(name: str, names: Iterable[str], package: str) -> Iterator[Import]:
    """Yield the modules that `from name import names` loads."""
    try:
        name = importlib.util.resolve_name(name, package)
    except ImportError:  # a relative import outside a package: it will fail when it runs
        return
    steps = name.split(".")
    yield from (Import(".".join(steps[: depth + 1])) for depth in range(len(steps)))
    if not origin_of_module(name):
        yield from (Import(f"{name}.{part}") for part in names if find_spec(f"{name}.{part}"))
