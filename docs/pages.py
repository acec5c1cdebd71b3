"""Makes the pages that come from the code: `python docs/pages.py` writes them, and tests compare them with it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
from typing import TYPE_CHECKING

from datamat import errors
from datamat.cli import COMMANDS, Command, build_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(errors.__file__).parent

# ---------------------------------------------------------------- docs/command-line.md

_MADE = "<!-- From here on: made by"
_ERRORS_OF_JOBS = """
If a job raises an error of its own, such as `ImportError`, the command prints its traceback and ends with 1.
"""


def _prose(name: str) -> str:
    """Return what is written by hand in a page, with the line that ends it."""
    before, mark, after = (FOLDER / name).read_text(encoding="utf-8").partition(_MADE)
    return before + mark + after.partition("\n")[0] + "\n"


def command_line() -> str:
    """Return the page about the commands."""
    parser = build_parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    codes = re.split(
        r"\s*^ {4}(?=\d)", (parser.epilog or "").partition("\n")[2], flags=re.MULTILINE
    )[1:]
    rows = [
        f"| {code.split(None, 1)[0]} | {_line(code.split(None, 1)[1])} |"
        for code in codes
    ]
    sections = [
        _section(command, commands.choices[command.name]) for command in COMMANDS
    ]
    table = "\n".join(["| code | meaning |", "| --- | --- |", *rows, _ERRORS_OF_JOBS])
    return "\n".join(
        [
            _prose("command-line.md"),
            "## Exit codes\n",
            table,
            "## Commands\n",
            "\n\n".join(sections),
            "",
        ]
    )


def _section(command: Command, parser: argparse.ArgumentParser) -> str:
    usage = _line(
        " ".join(
            [
                action.metavar or action.dest
                for action in parser._actions
                if not action.option_strings
            ]
        )
    )
    lines = [
        f"### datamat {command.name} {usage}".rstrip().replace("\\|", "|"),
        "",
        _line(parser.description or ""),
        "",
    ]
    if names := [f"`{_public_name(call)}`" for call in command.python]:
        lines += [f"In Python: {', '.join(names)}.", ""]
    lines += ["| argument | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if "-h" not in action.option_strings:
            lines.append(f"| {_argument(action)} | {_line(action.help or '')} |")
    lines += ["", "| key of `--json` | meaning |", "| --- | --- |"]
    return "\n".join(
        [*lines, *(f"| `{key}` | {meaning} |" for key, meaning in command.keys.items())]
    )


def _argument(action: argparse.Action) -> str:
    names = action.option_strings or [
        action.metavar or "|".join(action.choices or ()) or action.dest
    ]
    value = ""
    if action.option_strings and action.nargs != 0:
        value = " " + (
            action.metavar
            or "|".join(map(str, action.choices or ()))
            or action.dest.upper()
        )
    return "`" + ", ".join(f"{name}{value}" for name in names).replace("|", "\\|") + "`"


def _public_name(call: Callable[..., object]) -> str:
    return call.__qualname__


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------- docs/errors.md

_KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.DatamatError)
    and kind is not errors.DatamatError
]
_SPLIT = re.compile(
    r"; |(?<=[^.])\. (?=[A-Z])|[,:] (?=want )|: (?=repair|run |remove |use |add )"
)
"""What comes between what was found and the remedy, in the messages of this project."""
_NAMELESS = "…"
_CODE = re.compile(r"`[^`]*`")


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One text that an error of datamat may have, with the name of each value in braces."""

    kind: str
    """Name of the exception in the tree of `datamat.errors`."""

    module: str
    """Path of the module below the package."""

    text: str

    @property
    def place(self) -> str:
        """The part of datamat that says it: a folder of the package, or a module that is in none."""
        return self.module.partition("/")[0].removesuffix(".py")

    @property
    def cause(self) -> str:
        """What was found."""
        return _SPLIT.split(self.text, maxsplit=1)[0]

    @property
    def remedy(self) -> str:
        """What is wanted and what to do; "" where the text does not say."""
        return self.text[len(self.cause) :].lstrip(";.: ")

    @property
    def words(self) -> list[str]:
        """The words that stand in the code."""
        return re.findall(r"\w+", re.sub(r"\{.*?\}", " ", self.text))


def messages() -> list[Message]:
    """Return every text that the code gives an error of datamat, in the order of the code, each once."""
    modules = {
        path.relative_to(PACKAGE).as_posix(): _Module(path)
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    functions = {
        name: (module, function)
        for module in modules.values()
        for name, function in module.functions.items()
    }
    bases = {kind.__name__: kind.__name__ for kind in _KINDS}
    found = [
        Message(kind, name, text)
        for name, module in modules.items()
        for kind, text in module.texts(bases, functions)
    ]
    return [
        message
        for message in dict.fromkeys(found)
        if (message.words and not message.text.startswith("{"))
        or len(message.words) > 1
    ]


class _Module:
    """The syntax tree of a module, and what its names stand for."""

    def __init__(self, path: pathlib.Path) -> None:
        self.functions: dict[str, ast.FunctionDef] = {}
        self.bases: dict[str, str] = {}
        self.calls: dict[ast.Call, ast.FunctionDef | None] = {}
        """Each call, with the function that it is in."""
        self._assigned: dict[tuple[ast.FunctionDef | None, str], list[ast.expr]] = {}
        self._walk(ast.parse(path.read_text(encoding="utf-8")), None)

    def _walk(self, node: ast.AST, function: ast.FunctionDef | None) -> None:
        is_class = isinstance(node, ast.ClassDef)
        for child in ast.iter_child_nodes(node):
            inner = function
            match child:
                case ast.FunctionDef(name):
                    self.functions[name] = inner = child
                case ast.ClassDef(name, [base, *_]):
                    self.bases[name] = _name(base)
                case ast.Call():
                    self.calls[child] = function
                case ast.Assign([ast.Name(name)], value) if not is_class:
                    self._assigned.setdefault((function, name), []).append(value)
            self._walk(child, inner)

    def value_of(self, name: str, function: ast.FunctionDef | None) -> ast.expr | None:
        """Return what a name is set to there, once; None for a parameter, and for what is set twice."""
        place = (
            None if function and (function, name) not in self._assigned else function
        )
        values = self._assigned.get((place, name), [])
        is_given = function is not None and name in _parameters(function)
        return values[0] if len(values) == 1 and not is_given else None

    def texts(
        self,
        bases: dict[str, str],
        functions: dict[str, tuple[_Module, ast.FunctionDef]],
    ) -> Iterator[tuple[str, str]]:
        own = {name: bases[base] for name, base in self.bases.items() if base in bases}
        for call, function in self.calls.items():
            kind = {**bases, **own}.get(_name(call.func))
            if kind is not None and call.args:
                for text in _Reader(self, functions).read(call.args[-1], function, 3):
                    yield kind, " ".join(text.split())


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Reads an expression as the texts that it may give."""

    module: _Module
    functions: dict[str, tuple[_Module, ast.FunctionDef]]

    def read(
        self, node: ast.expr, function: ast.FunctionDef | None, depth: int
    ) -> list[str]:
        match node:
            case ast.Constant(value):
                return [str(value)]
            case ast.JoinedStr(pieces):
                return self._joined(pieces, function, depth)
            case ast.FormattedValue(value):
                return self._inner(value, function, depth)
            case ast.BinOp(left, ast.Add(), right):
                return self._joined([left, right], function, depth)
            case ast.IfExp(_, one, other):
                return [
                    *self.read(one, function, depth),
                    *self.read(other, function, depth),
                ]
            case ast.Name(name):
                return self._named(node, name, function, depth)
            case ast.Call() if depth and (found := self._returned(node, depth)):
                return found
        return ["{" + _place(node) + "}"]

    def _joined(
        self, pieces: list[ast.expr], function: ast.FunctionDef | None, depth: int
    ) -> list[str]:
        read = [self.read(piece, function, depth) for piece in pieces]
        return ["".join(choice) for choice in itertools.product(*read)]

    def _inner(
        self, node: ast.expr, function: ast.FunctionDef | None, depth: int
    ) -> list[str]:
        """Return one text for a value inside of a message: its words where the code has them."""
        if not isinstance(node, ast.IfExp | ast.Name):
            return ["{" + _place(node) + "}"]
        found = self.read(node, function, depth)
        return found if len(found) <= 2 else ["{" + _place(node) + "}"]

    def _named(
        self, node: ast.expr, name: str, function: ast.FunctionDef | None, depth: int
    ) -> list[str]:
        value = self.module.value_of(name, function)
        if depth and isinstance(
            value, ast.Constant | ast.JoinedStr | ast.IfExp | ast.BinOp
        ):
            return self.read(value, function, depth - 1)
        if depth and function and name in _parameters(function):
            return self._passed(name, function, depth) or ["{" + name + "}"]
        return ["{" + _place(node) + "}"]

    def _passed(self, name: str, function: ast.FunctionDef, depth: int) -> list[str]:
        """Return the texts that the calls in this module give a parameter."""
        found = []
        for call, caller in self.module.calls.items():
            if _name(call.func) == function.name:
                value = _argument_of(call, name, function)
                if isinstance(value, ast.Constant | ast.JoinedStr | ast.IfExp):
                    found += self.read(value, caller, depth - 1)
        return [text for text in found if re.search(r"\w \w", text)]

    def _returned(self, call: ast.Call, depth: int) -> list[str]:
        """Return the texts of a function of the package that makes messages."""
        name = _name(call.func)
        own = self.module.functions.get(name)
        module, function = (
            (self.module, own) if own else self.functions.get(name, (None, None))
        )
        if module is None or function is None or not isinstance(call.func, ast.Name):
            return []
        reader = _Reader(module, self.functions)
        found = [
            text
            for node in ast.walk(function)
            if isinstance(node, ast.Return)
            and isinstance(
                node.value, ast.Constant | ast.JoinedStr | ast.IfExp | ast.BinOp
            )
            for text in reader.read(node.value, function, depth - 1)
        ]
        return [text for text in found if re.search(r"\w \w", text)]


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _argument_of(
    call: ast.Call, name: str, function: ast.FunctionDef
) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = [one for one in _parameters(function) if one != "self"]
    place = names.index(name) if name in names else len(call.args)
    return call.args[place] if place < len(call.args) else None


def _name(node: ast.expr) -> str:
    """Return the last name of `a.b.c`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _place(node: ast.AST) -> str:
    """Return a name for what an expression gives."""
    match node:
        case ast.Attribute(_, "__name__" | "__qualname__") | ast.Call(ast.Name("type")):
            found = "type"
        case (
            ast.Name(name)
            | ast.Attribute(_, name)
            | ast.Call(ast.Attribute(ast.Name("os"), name), [])
        ):
            found = name.strip("_").lower()
        case ast.Call(ast.Name("len"), [value]):
            found = f"number of {_place(value)}"
        case ast.Call(ast.Attribute(value), [inner]):
            found = _place(inner) if _place(inner) != _NAMELESS else _place(value)
        case (
            ast.Call(_, [value])
            | ast.Subscript(value)
            | ast.Starred(value)
            | ast.Call(ast.Attribute(value))
        ):
            found = _place(value)
        case (
            ast.FormattedValue(value)
            | ast.ListComp(value)
            | ast.GeneratorExp(value)
            | ast.BoolOp(_, [value, *_])
        ):
            found = _place(value)
        case _:
            found = _NAMELESS
    return found


def errors_page(found: list[Message] | None = None) -> str:
    """Return the page about the messages, which are collected unless they are given."""
    found = messages() if found is None else found
    sections = [
        _of_kind(kind, [message for message in found if message.kind == kind.__name__])
        for kind in _KINDS
    ]
    return "\n".join([_prose("errors.md"), *sections])


def _of_kind(kind: type, found: list[Message]) -> str:
    about = inspect.cleandoc(kind.__doc__ or "").partition("\nAttributes:")[0]
    lines = [f"## {kind.__name__}\n", _CODE.sub(r"`\g<0>`", about).strip() + "\n"]
    places = itertools.groupby(found, lambda message: message.place)
    for place, group in sorted((place, list(group)) for place, group in places):
        lines += [
            f"### {place}\n",
            "| message | what is expected, and the remedy |",
            "| --- | --- |",
        ]
        lines += [
            f"| {_cell(message.cause)} | {_cell(message.remedy)} |" for message in group
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    text = text.replace("|", "\\|")
    return f"{ticks} {text} {ticks}" if ticks == "``" else f"`{text}`" if text else ""


PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": command_line,
    "errors.md": errors_page,
}


if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
