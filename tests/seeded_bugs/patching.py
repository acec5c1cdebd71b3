"""Puts a deliberate mistake into one function, class or constant of a module, whatever else its source says.

A patch is either `replace(before, after)` or a callable. `replace` compares syntax trees, so comments, formatting and
the rest of the module do not matter; a callable gets the function and returns the wrong one.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import difflib
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["MisfitError", "Replace", "apply_callable", "apply_replace", "delete", "replace"]

_Bindings = dict[str, Any]
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IRRELEVANT = frozenset({"ctx", "kind", "type_comment"})


class MisfitError(ValueError):
    """The function that a defect names is gone, or does not hold the code that the defect replaces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replace:
    """Statements or one expression, and what stands in their place.

    Names that begin with two underscores are wildcards: `__path` stands for any expression, `self.__path` for any
    attribute, and `__body` as a statement for one or more statements. `after` may use them again.

    Attributes:
        before: the code, which must occur exactly once in the function.
        after: the code in its place; empty deletes the statements.
    """

    before: str
    after: str


def replace(before: str, after: str) -> Replace:
    """Return the patch that puts `after` in the place of `before`."""
    return Replace(before, after)


def delete(statements: str) -> Replace:
    """Return the patch that deletes statements."""
    return Replace(statements, "")


def apply_replace(tree: ast.Module, qualified_name: str, patch: Replace) -> None:
    """Change a function, class or constant of a module's tree in place.

    Raises:
        MisfitError: nothing has that name, it does not hold `patch.before` exactly once, or `patch.after` uses a name
            that the module does not know.
    """
    before, after = (_parse(code) for code in (patch.before, patch.after))
    # The module knows the names of what is replaced. To look through all of it takes longer than the rest does.
    unknown = _names(after) - _names(before) - {*dir(builtins)}
    if unknown and (unknown := unknown - _names([tree])):
        raise MisfitError(f"`{patch.after.strip()}` uses {', '.join(sorted(unknown))}, which the module does not know")
    by_expression = _is_expression(before) and _is_expression(after)
    pattern = [before[0].value] if by_expression else before
    roots = [node for name, node in _definitions(tree) if name == qualified_name]
    if not roots:
        holding = [name for name, node in _definitions(tree) if any(_matches(node, pattern))]
        raise MisfitError(_describe_absence(qualified_name, [name for name, _ in _definitions(tree)], holding))
    found = [match for root in roots for match in _matches(root, pattern)]
    if len(found) != 1:
        raise MisfitError(
            f"{qualified_name} holds `{patch.before.strip()}` {len(found)} times, not once; adapt the defect to what "
            f"it says now:\n\n" + "\n\n".join(ast.unparse(root) for root in roots)
        )
    [(container, start, bindings)] = found
    _put(container, start, pattern, [after[0].value] if by_expression else after, bindings)


def apply_callable(module: types.ModuleType, qualified_name: str, patch: Callable[[Any], Any]) -> Callable[[], None]:
    """Call the patch with the function of a loaded module, and return what puts the wrong one in its place.

    Raises: MisfitError: nothing has that name, or the patch returns the function unchanged.
    """
    owner: Any = module
    *outer, name = qualified_name.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    if name not in getattr(owner, "__dict__", ()):
        candidates = [
            *vars(module),
            *(f"{k}.{n}" for k, v in vars(module).items() if isinstance(v, type) for n in vars(v)),
        ]
        raise MisfitError(_describe_absence(qualified_name, candidates))
    right = vars(owner)[name]
    wraps = type(right) if isinstance(right, staticmethod | classmethod) else None
    wrong = patch(right.__func__ if wraps else right)
    if wrong is right:
        raise MisfitError(f"{qualified_name}: the patch returns the function unchanged")
    return lambda: setattr(owner, name, wraps(wrong) if wraps else wrong)


def _describe_absence(qualified_name: str, names: list[str], holding: Sequence[str] = ()) -> str:
    """Say that a name is gone, and which one may have replaced it: of those that hold the code, if any do."""
    last = qualified_name.rpartition(".")[2]
    for candidates in (holding, names):
        near = [name for name in candidates if name.rpartition(".")[2] == last]
        near = near or difflib.get_close_matches(qualified_name, candidates, cutoff=0.3) or [*holding[-1:]]
        if near:
            return f"no {qualified_name}; was it renamed to {' or '.join(near)}?"
    return f"no {qualified_name}"


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes, and what a module or class assigns, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITIONS):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Module | ast.ClassDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((prefix + target.id, child) for target in targets if isinstance(target, ast.Name))
        elif isinstance(child, ast.stmt):
            yield from _definitions(child, prefix)


def _parse(code: str) -> list[Any]:
    return ast.parse(textwrap.dedent(code)).body


def _names(trees: list[Any]) -> set[str]:
    """Return the names in code but for wildcards, and the attributes that only its own module can have."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name | ast.arg):
            found.add(node.id if isinstance(node, ast.Name) else node.arg)
        elif isinstance(node, ast.Attribute) and node.attr[0] == "_":
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, _DEFINITIONS):
            found.add(node.name)
    return {name for name in found if _wildcard(name) is None}


def _is_expression(statements: list[Any]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def _matches(root: ast.AST, pattern: list[ast.AST]) -> Iterator[tuple[Any, Any, _Bindings]]:
    """Yield each place: a list and a slice of it, or a node and the name of its field."""
    of_statements = isinstance(pattern[0], ast.stmt)
    for node in ast.walk(root):
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt) == of_statements:
                for start in range(len(value)):
                    bindings: _Bindings = {}
                    if _fits(pattern, value[start : start + len(pattern)], bindings):
                        yield value, slice(start, start + len(pattern)), bindings
            elif isinstance(value, ast.expr) and not of_statements:
                bindings = {}
                if _fits(pattern[0], value, bindings):
                    yield node, name, bindings


def _fits(pattern: Any, found: Any, bindings: _Bindings) -> bool:
    """Compare a pattern with a part of a tree, and note what its wildcards stand for."""
    wildcard = _wildcard(pattern)
    if wildcard is not None:
        return _is_same(bindings.setdefault(wildcard, found), found)
    if isinstance(pattern, list):
        return isinstance(found, list) and _lists_fit(pattern, found, bindings)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(found) and all(
            _fits(getattr(pattern, name), getattr(found, name), bindings)
            for name in pattern._fields
            if name not in _IRRELEVANT
        )
    return type(pattern) is type(found) and pattern == found


def _lists_fit(pattern: list[Any], found: list[Any], bindings: _Bindings) -> bool:
    if not pattern or not found:
        return not pattern and not found
    if _is_run(pattern[0]):  # as many statements as leave one for each that follows
        taken = len(found) - len(pattern) + 1
        bindings[pattern[0].value.id] = found[:taken]
        return taken > 0 and _lists_fit(pattern[1:], found[taken:], bindings)
    return _fits(pattern[0], found[0], bindings) and _lists_fit(pattern[1:], found[1:], bindings)


def _wildcard(pattern: Any) -> str | None:
    name = pattern.id if isinstance(pattern, ast.Name) else pattern
    is_wild = isinstance(name, str) and name[:2] == "__" and name[-2:] != "__" and name.isidentifier()
    return name if is_wild else None


def _is_run(pattern: Any) -> bool:
    return isinstance(pattern, ast.Expr) and _wildcard(pattern.value) is not None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, ast.AST) and isinstance(other, ast.AST):
        return ast.dump(one).replace("Store()", "Load()") == ast.dump(other).replace("Store()", "Load()")
    return bool(one == other)


def _put(container: Any, place: Any, pattern: list[Any], after: list[Any], bindings: _Bindings) -> None:
    old = container[place][0] if isinstance(place, slice) else getattr(container, place)
    for node in after:
        for part in ast.walk(node):
            ast.copy_location(part, old)  # tracebacks show the line that was replaced
    new = [_filled(node, bindings) for node in after]
    if isinstance(place, slice):
        flat = [part for node in new for part in (node if isinstance(node, list) else [node])]
        container[place] = flat or ([] if len(container) > len(pattern) else [ast.copy_location(ast.Pass(), old)])
    else:
        setattr(container, place, new[0])


def _filled(pattern: Any, bindings: _Bindings) -> Any:
    """Return code with its wildcards filled in."""
    if _is_run(pattern):
        return copy.deepcopy(bindings[pattern.value.id])
    if (wildcard := _wildcard(pattern)) is not None:
        filled = copy.deepcopy(bindings[wildcard])
        if hasattr(filled, "ctx"):
            filled.ctx = pattern.ctx
        return filled
    if isinstance(pattern, ast.AST):
        for name, value in ast.iter_fields(pattern):
            setattr(pattern, name, _filled(value, bindings))
    elif isinstance(pattern, list):
        filled = [_filled(part, bindings) for part in pattern]
        return [part for entry in filled for part in (entry if isinstance(entry, list) else [entry])]
    return pattern
