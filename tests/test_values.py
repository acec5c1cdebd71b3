"""`frozen` makes the dataclass that `dataclasses.dataclass(frozen=True)` makes: whoever uses one sees no difference."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from datamat.values import frozen


def _class(decorate):
    class Row:
        key: str
        size: int = 3
        paths: list[str] = dataclasses.field(default_factory=list)
        hidden: Any = dataclasses.field(default=None, repr=False, compare=False)
        made: int = dataclasses.field(init=False)
        only: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "made", self.size + 1)

    return decorate(Row)


Ours, Theirs = _class(frozen()), _class(dataclasses.dataclass(frozen=True, slots=True))


@frozen(eq=False)
class Same:
    """Compared by identity."""

    x: int


@frozen()
class Sent:
    """Can be pickled by its name."""

    x: int
    nan: float = float("nan")


USES = {
    "repr": lambda cls: repr(cls("a", 4, ["b"], only=(1,))),
    "arguments": lambda cls: dataclasses.astuple(cls(size=1, key="a", hidden=2)),
    "own defaults": lambda cls: cls("a").paths is cls("b").paths,
    "equal": lambda cls: (cls("a", hidden=1) == cls("a"), cls("a") == cls("a", 4), cls("a") == ("a", 3)),
    "hash": lambda cls: len({hash(cls("a", paths=())), hash(cls("a", paths=(), hidden=1))}),
    "no hash of a list": lambda cls: hash(cls("a")),
    "replace": lambda cls: repr(dataclasses.replace(cls("a"), size=8)),
    "fields": lambda cls: [(field.name, field.type, field.kw_only) for field in dataclasses.fields(cls)],
    "names": lambda cls: (list(inspect.signature(cls).parameters), cls.__match_args__, cls.__slots__),
    "copy": lambda cls: repr(copy.deepcopy(cls("a", 5, ["b"]))),
    "set": lambda cls: setattr(cls("a"), "key", "b"),
    "set another": lambda cls: setattr(cls("a"), "other", "b"),
    "delete": lambda cls: delattr(cls("a"), "key"),
    "too few": lambda cls: cls(),
    "unknown": lambda cls: cls("a", unknown=1),
    "by position": lambda cls: cls("a", 1, [], None, (1,)),
}


def _outcome(use, cls):
    try:
        return use(cls)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("use", USES)
def test_is_a_frozen_dataclass(use):
    """Each use gives what it gives of a dataclass of the standard library."""
    if use == "set another":  # where a slotted dataclass of the library fails with a TypeError of its own
        assert _outcome(USES[use], Ours) is dataclasses.FrozenInstanceError
    else:
        assert _outcome(USES[use], Ours) == _outcome(USES[use], Theirs)


def test_is_compared_by_identity_if_asked():
    """`eq=False` does so."""
    assert Same(1) != Same(1) and len({Same(1), Same(1)}) == 2


def test_travels_and_matches():
    """It can be pickled, equals its copy, fits a pattern, and a dataclass may be derived from it."""
    match pickle.loads(pickle.dumps(sent := Sent(4))):
        case Sent(x, nan):
            assert x == 4 and nan != nan
    assert copy.copy(sent) == sent

    @dataclasses.dataclass(frozen=True)
    class More(Sent):
        y: int = 2

    assert More(1, 0.5, 3) == More(1, 0.5, 3) != More(1, 0.5, 4)
