"""Decide which code travels by value, and rebuild it, its classes and its globals in the worker."""

from __future__ import annotations

import abc
import collections
import contextvars
import dis
import enum
import functools
import importlib
import itertools
import os
import sys
import threading
import types
import typing
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from datamat.parallel import process_role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# ---------------------------------------------------------------- namespaces
#
# The globals of code that travels by value, and who may change them.
#
# Functions of one module share one dictionary in the worker, as they do in the parent. A worker keeps what its own code
# has put into a global (an initializer that loads a model, a cache that fills) until the parent binds the name to
# another object, as a notebook cell does that redefines a function.


_namespace_guard = threading.Lock()
_namespaces: dict[str, dict[str, Any]] = {}
_modules: list[types.ModuleType] = []  # keeps the stand-in modules alive whose dictionaries are in use
_versions: dict[
    tuple[str, str], tuple[weakref.ref[Any], int]
] = {}  # in the parent: the object sent last, and its number
_strong_references: dict[
    tuple[str, str], _StrongReference
] = {}  # in the parent: objects of `_versions` that nothing else keeps alive
_installed: dict[tuple[str, str], tuple[int, Any]] = {}  # in a worker: number and object that came last
_first_values: dict[str, dict[str, Any]] = {}  # in a worker: the values at its start
_counter = itertools.count(1)


def version_of(key: str, name: str, value: Any, keeper: list[Any] | None = None) -> int:
    """Return a number that changes when the name is bound to another object.

    Args:
        key: key of the namespace that has the global.
        name: name of the global in that namespace.
        value: object that the name is bound to now.
        keeper: list that receives the object to keep alive while the number is in use; None keeps it until the name
            is bound to another object.
    """
    reference, version = _versions.get((key, name), (None, 0))
    held = None if reference is None else reference()  # None: collected; a value of None has a strong reference
    if held is None or (held.value if isinstance(held, _StrongReference) else held) is not value:
        _strong_references.pop((key, name), None)
        version = next(_counter)
        try:
            held, reference = value, weakref.ref(value)
        except TypeError:  # numbers, strings, lists, ...: kept alive, since an id alone may come back as another object
            held = _StrongReference(value)
            reference = weakref.ref(held)
        _versions[key, name] = reference, version
    if isinstance(held, _StrongReference):
        if keeper is None:
            _strong_references[key, name] = held
        else:
            keeper.append(held)
    return version


class _StrongReference:
    """Keeps an object alive that cannot be weakly referenced."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def inherit_globals(namespaces: Mapping[str, dict[str, Any]]) -> tuple[Callable[[], None], list[Any]]:
    """In the parent: let workers that are forked from now on treat these globals as if they had been sent.

    A forked worker has the functions that it inherited, and those that come later by value: all are to see one
    namespace, and what an initializer has put there.

    Args:
        namespaces: the globals of code that travels by value, by their keys.

    Returns:
        A function that ends this, to be called after the fork, and objects to keep alive as long as these workers.
    """
    keeper: list[Any] = []
    for key, held in namespaces.items():
        _namespaces.setdefault(key, held)
    inherited = {
        (key, name): (version_of(key, name, value, keeper), value)
        for key, held in namespaces.items()
        for name, value in list(held.items())
    }
    _installed.update(inherited)

    def end() -> None:
        for place in inherited:
            _installed.pop(place, None)

    return end, keeper


def remember_globals(key: str) -> None:
    """In a worker: record the globals before its own code can change them."""
    _first_values[key] = dict(namespace(key))


def is_new(module_name: str, name: str) -> bool:
    """In a worker: return True if its own code has bound this global, and the parent has not, or to something else."""
    module = sys.modules[module_name]
    if module_name not in _first_values and module not in _modules:  # an importable one, or inherited by a fork
        return False
    first = name.partition(".")[0]
    value = vars(module)[first]
    known = (_first_values.get(module_name, {}).get(first), _installed.get((module_name, first), (0, None))[1])
    return not any(value is each for each in known)


def install_globals(
    versions: dict[tuple[str, str], int], values: dict[tuple[str, str], Any], *, override: bool
) -> None:
    """In a worker: bind the globals that came with some code.

    Args:
        versions: version of each, by namespace and name.
        values: what they are bound to.
        override: replace older values; otherwise only add missing ones.
    """
    for (key, name), value in values.items():
        held, version = namespace(key), versions[key, name]
        known = _installed.get((key, name))
        if known is None:
            first = _first_values.get(key, {})
            is_own = name in held and held[name] is not first.get(name, held[name])
        else:
            is_own = known[0] == version
        if name not in held or (override and not is_own):
            held[name] = value
        _installed[key, name] = version, value


def namespace_key(function: types.FunctionType) -> str:
    """Return the name under which sender and receiver hold the globals of a function."""
    held = function.__globals__
    name = function.__module__ or held.get("__name__") or "?"
    if held is sys.modules["__main__"].__dict__:
        return "__main__"
    for key, known in _namespaces.items():
        if known is held:
            return key
    module = sys.modules.get(name)
    key = name if module is not None and module.__dict__ is held else f"{name}#{id(held):x}"
    _namespaces[key] = held
    return key


def module_of(held: dict[Any, Any]) -> str | None:
    """Return the name of the module whose globals this dictionary is; None if it belongs to no module."""
    name = held.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return name if module is not None and getattr(module, "__dict__", None) is held else None


def namespace(key: str) -> dict[str, Any]:
    """Return the globals that stand for those of a module that travels by value."""
    if key == "__main__":
        return sys.modules["__main__"].__dict__
    with _namespace_guard:
        if key not in _namespaces:
            module = types.ModuleType(key.partition("#")[0])
            module.__dict__["__builtins__"] = __builtins__
            _modules.append(module)
            _namespaces[key] = module.__dict__
            if "#" not in key:
                sys.modules.setdefault(key, module)
        return _namespaces[key]


# ---------------------------------------------------------------- code by value
#
# Which code travels by value, and how a worker rebuilds it.
#
# Code that a fresh interpreter can import travels by reference: module and name. Code of `__main__`, of a notebook
# cell, of a module that is still being imported, of an exec'd namespace and of `<locals>` travels by value.
#
# The key is identity. A class gets an id when it is first sent, which both sides know: the worker builds the class
# once, results come back as instances of the caller's own class, and a class that is redefined (a notebook cell run
# again) is another class. Functions of one module share one namespace in the worker, as they do at home. Classes are
# made in two steps, an empty skeleton and then its content, so that they may refer to themselves.


_guard = threading.RLock()
_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_known: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_filled: set[str] = set()
_given_here: set[str] = set()  # in a worker: ids of classes that its own code has created
_singletons: dict[
    str, Any
] = {}  # by id: type variables and the like, few and made once; not all can be weakly referenced
_singleton_ids: dict[int, str] = {}
_forced: set[str] = set()
_importable: dict[tuple[str, str], bool] = {}  # by name, and by the directory that an empty entry of the path means


# ---------------------------------------------------------------- the choice


def is_by_value(module_name: str | None) -> bool:
    """Return True if code of this module must travel by value."""
    if module_name is None or module_name in ("__main__", "__mp_main__") or is_forced(module_name):
        return True
    module = sys.modules.get(module_name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return True
    return not _is_importable(module_name)


def force_by_value(module_name: str) -> None:
    """From now on, send code of this module and its submodules by value: a worker could not import it."""
    _forced.add(module_name)


def run_top_level_once() -> None:
    """From now on, send code of modules whose top level is running by value: it must not run in a worker, too.

    Raises:
        NestedRunError: it does run in a worker, which imports it for code of the caller.
    """
    process_role.refuse_while_importing()
    for name in process_role.modules_being_run():
        force_by_value(name)


def is_forced(module_name: str) -> bool:
    """Return True if `force_by_value` was called for this module or a package that contains it."""
    return any(module_name == name or module_name.startswith(f"{name}.") for name in _forced)


def _is_importable(name: str) -> bool:
    """Return True if a fresh interpreter with our search path would find this module in the same file."""
    place = ""
    if "" in sys.path:
        with suppress(FileNotFoundError):  # it may have been removed
            place = os.getcwd()
    if (name, place) not in _importable:
        _importable[name, place] = _find_again(name)
    return _importable[name, place]


def _find_again(name: str) -> bool:
    module = sys.modules[name]
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and (path is None or not _is_importable(parent)):
        return False
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError):  # finders of other packages; they are not asked at import
            continue
        if spec is not None:
            if type(spec.loader).__module__.startswith("_pytest."):  # rewrites assertions, in its own process alone
                return False
            origin = spec.origin
            return origin in (None, "built-in", "frozen") or origin == getattr(module, "__file__", origin)
    return False


def is_installed(module_name: str) -> bool:
    """Return True if it is a module of an installed package, which is not edited during the session."""
    path = getattr(sys.modules.get(module_name), "__file__", None) or ""
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


def namespaces_around(functions: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the globals of code that travels by value, by key: of `__main__`, of functions and of what they use.

    Args:
        functions: where to begin; anything but functions, methods and partials is skipped. A second step adds
            the functions and modules that are named in their globals.
    """
    found = {"__main__": vars(sys.modules["__main__"])}

    def take(value: Any) -> None:
        if type(value) is types.FunctionType and is_by_value(value.__module__):
            found[namespace_key(value)] = value.__globals__
        elif type(value) is types.ModuleType:  # a subclass may load itself when it is accessed
            name = vars(value).get("__name__")
            if isinstance(name, str) and name != "__main__" and sys.modules.get(name) is value and is_by_value(name):
                found[name] = vars(value)

    for each in functions:
        function = each
        while isinstance(function, (functools.partial, types.MethodType)):
            function = function.func if isinstance(function, functools.partial) else function.__func__
        take(function)
    for value in [value for held in found.values() for value in list(held.values())]:
        take(value)
    return found


def lookup(module_name: str | None, qualified_name: str) -> Any:
    """Return the object that this process finds under a name; None if there is none."""
    try:
        return functools.reduce(getattr, qualified_name.split("."), sys.modules.get(module_name or ""))
    except AttributeError:
        return None


def is_imported(function: types.FunctionType) -> bool:
    """Return True for functions of an importable module, which a fresh interpreter finds under their names."""
    module = function.__module__
    return not is_by_value(module) and lookup(module, function.__qualname__) is function


def lost_its_name(cls: type) -> bool:
    """Return True if it is a class whose module now has something else under its name.

    The module was loaded twice, as pytest's conftest files are, or the class was redefined.
    """
    path = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    return path.endswith(".py") and lookup(cls.__module__, cls.__qualname__) is not cls


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that this code and the code nested in it read.

    `co_names` would not do: it also holds attribute names, and so would ship a notebook's large `data` because some
    method reads `self.data`.
    """
    operations = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")
    names = {step.argval for step in dis.get_instructions(code) if step.opname in operations}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return frozenset(names)


# ---------------------------------------------------------------- identities


def class_id(cls: type) -> str:
    """Return the id of a class, giving it one if it has none."""
    with _guard:
        if (found := _ids.get(cls)) is None:
            found = os.urandom(16).hex()
            _ids[cls], _known[found] = found, cls
            _filled.add(found)
            if process_role.is_worker():
                _given_here.add(found)
        return found


def id_at_home(cls: type) -> str | None:
    """In a worker: return the id of a class that the parent also has, or None."""
    found = _ids.get(cls)
    return None if found in _given_here else found


class UnknownClassError(LookupError):
    """This process has no class with the id that arrived."""


def class_by_id(identity: str) -> type:
    """Return the class with this id.

    Raises:
        UnknownClassError: the process has none (any more).
    """
    found = _known.get(identity)
    if found is None or identity not in _filled:  # what its content holds may have failed to arrive
        raise UnknownClassError(
            "a class that travelled by value is gone; keep a reference to it while its pool is used"
        )
    return found


def register_inherited(values: Iterable[Any]) -> None:
    """Before a fork, give ids to those of `values` that travel by value, so that forked workers recognise them."""
    for value in values:
        if isinstance(value, type):
            if is_by_value(value.__module__) or "<locals>" in value.__qualname__:
                class_id(value)
        elif type(value) in _MAKERS:
            singleton_parts(value, to_parent=False)


# ---------------------------------------------------------------- functions


def make_function(code: types.CodeType, key: str, name: str, closure: Any) -> types.FunctionType:
    """Return a function whose globals are those of `namespace(key)`."""
    return types.FunctionType(code, namespace(key), name, None, closure)


def make_function_in(code: types.CodeType, module_name: str, name: str, closure: Any) -> types.FunctionType:
    """Return a function whose globals are those of an importable module."""
    __import__(module_name)
    return types.FunctionType(code, sys.modules[module_name].__dict__, name, None, closure)


def fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Set the attributes that may refer back to the function itself."""
    (function.__defaults__, function.__kwdefaults__, function.__annotations__, function.__doc__,
     function.__qualname__, function.__module__, attributes) = state  # fmt: skip
    function.__dict__.update(attributes)


def annotations_of(value: Any) -> dict[str, Any]:
    """Return the annotations of a function or class: values, or texts if they use undefined names.

    Python 3.14 makes them when they are asked for; a name may be there for type checkers only. What makes those of a
    class holds its whole namespace, and is not sent.
    """
    try:
        return dict(value.__annotations__)
    except Exception:  # noqa: BLE001 -- they are the user's expressions
        annotationlib = importlib.import_module("annotationlib")
        return dict(annotationlib.get_annotations(value, format=annotationlib.Format.STRING))


def set_cell(cell: types.CellType, state: tuple[Any]) -> None:
    """Fill a cell."""
    cell.cell_contents = state[0]


def single_dispatch_of(implementations: tuple[tuple[type, Any], ...]) -> Any:
    """Return a generic function with these implementations."""
    by_type = dict(implementations)
    generic = functools.singledispatch(by_type.pop(object))
    for kind, function in by_type.items():
        generic.register(kind, function)
    return generic


# ---------------------------------------------------------------- classes

_NOT_COPIED = ("__dict__", "__weakref__", "__module__", "__qualname__", "_abc_impl", "__static_attributes__",
               "__firstlineno__")  # fmt: skip
_OF_ANNOTATIONS = ("__annotate_func__", "__annotations_cache__")
_ENUM_MADE = frozenset({
    "_member_names_", "_member_map_", "_value2member_map_", "_member_type_", "_unhashable_values_",
    "_hashable_values_", "_unhashable_values_map_", "_flag_mask_", "_all_bits_", "_singles_mask_", "_inverted_",
    "_boundary_", "_iter_member_", *_NOT_COPIED,
})  # fmt: skip
_MEMBER_MADE = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def class_parts(cls: type) -> tuple[Any, ...]:
    """Return the function that makes the empty class, its arguments, the state, and the function that sets it."""
    identity = class_id(cls)
    names = (cls.__name__, cls.__qualname__, cls.__module__)
    if isinstance(cls, enum.EnumMeta):
        return _enum_parts(cls, names, identity)
    if cls.__bases__ == (tuple,) and hasattr(cls, "_field_defaults"):
        fields, defaults = tuple(cls._fields), tuple(cls._field_defaults.values())  # type: ignore[attr-defined]
        state = (identity, _beside_namedtuple(cls), ())
        return make_once, (identity, make_namedtuple, *names, fields, defaults), state, None, None, fill_class
    content = _attributes_of(cls)
    skeleton: dict[str, Any] = {}
    if "__slots__" in content:
        skeleton["__slots__"] = slots = content.pop("__slots__")
        for slot in [slots] if isinstance(slots, str) else slots:
            content.pop(slot, None)
    if "__orig_bases__" in content:
        skeleton["__orig_bases__"] = content.pop("__orig_bases__")
    descriptors = (types.GetSetDescriptorType, types.MemberDescriptorType)
    content = {k: v for k, v in content.items() if k not in _NOT_COPIED and not isinstance(v, descriptors)}
    skeleton |= {k: v for k, v in content.items() if type(v) in _PLAIN}  # for hooks of libraries that look for them
    registered: tuple[type, ...] = ()
    if isinstance(cls, abc.ABCMeta):
        references = abc._get_dump(cls)[0]  # type: ignore[attr-defined]  # undocumented, as the registry is
        registered = tuple(subclass for reference in references if (subclass := reference()) is not None)
    is_typed_dict = type(cls).__name__ == "_TypedDictMeta"  # whose metaclass adds this base, and refuses it
    bases = tuple(base for base in cls.__bases__ if not (is_typed_dict and base is dict))
    arguments = (identity, make_class, type(cls), *names, bases, skeleton)
    return make_once, arguments, (identity, content, registered), None, None, fill_class


def _attributes_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, with the annotations that Python 3.14 makes when they are asked for."""
    content = dict(cls.__dict__)
    if "__annotate_func__" not in content:
        return content
    return {k: v for k, v in content.items() if k not in _OF_ANNOTATIONS} | {"__annotations__": annotations_of(cls)}


def make_once(identity: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the class, or other object known by identity, with this id; create it if the process has none."""
    with _guard:
        found = _singletons.get(identity, _known.get(identity))
        if found is None:
            found = make(*arguments)
            if isinstance(found, type):
                _ids[found], _known[identity] = identity, found
            else:
                _singletons[identity], _singleton_ids[id(found)] = found, identity
        return found


def make_class(metaclass: type, name: str, qualified_name: str, module: str, bases: Any, content: Any) -> type:
    """Return a new class that is empty.

    The author's metaclass and `__init_subclass__` have run in the parent: their result comes with the content.
    """
    home = _library_part(metaclass)
    body = home.__prepare__(name, bases)
    body.update(content, __module__=module, __qualname__=qualified_name)
    with _hooks_at_rest(bases):
        made: Any = home.__new__(metaclass, name, bases, body)
        home.__init__(made, name, bases, body)
    return cast("type", made)


def _library_part(metaclass: type) -> Any:
    """Return the metaclass, or its first base that did not travel by value."""
    return next(base for base in metaclass.__mro__ if base not in _ids)


@contextmanager
def _hooks_at_rest(bases: tuple[type, ...]) -> Iterator[None]:
    """Disable `__init_subclass__` of classes that travelled by value, for the block."""
    held = {
        base: vars(base)["__init_subclass__"]
        for each in bases
        for base in each.__mro__
        if base in _ids and "__init_subclass__" in vars(base)
    }
    try:
        for base in held:
            type.__setattr__(base, "__init_subclass__", classmethod(lambda _, **__: None))
        yield
    finally:
        for base, hook in held.items():
            type.__setattr__(base, "__init_subclass__", hook)


def _enum_parts(cls: Any, names: tuple[Any, ...], identity: str) -> tuple[Any, ...]:
    kind = cls._member_type_
    arguments_of = getattr(kind, "__getnewargs__", lambda _: ())
    members = [(name, arguments_of(member), member._value_) for name, member in cls.__members__.items()]
    content = {k: v for k, v in _attributes_of(cls).items() if k not in _ENUM_MADE and k not in cls.__members__}
    attributes = {
        name: own
        for name, member in cls.__members__.items()
        if (own := {k: v for k, v in vars(member).items() if k not in _MEMBER_MADE})
    }
    made = (names, type(cls), cls.__bases__, kind, members, getattr(cls, "_boundary_", None))
    return make_once, (identity, make_enum, *made), (identity, content, attributes), None, None, fill_enum


def make_enum(names: tuple[str, str, str], metaclass: type, bases: Any, kind: Any, members: Any, boundary: Any) -> type:
    """Return a new enumeration with its members.

    Its own `__new__` and `__init__` have run in the parent, with arguments that are no longer known.
    """

    def new(cls: Any, arguments: tuple[Any, ...], value: Any) -> Any:
        member = kind.__new__(cls, *arguments)
        member._value_ = value
        return member

    def new_of_tuple(cls: Any, packed: Any) -> Any:  # Enum hands one tuple on, where members are tuples
        return new(cls, *packed)

    home = _library_part(metaclass)
    content = home.__prepare__(names[0], bases)
    _, content["__qualname__"], content["__module__"] = names
    content["__new__"] = new_of_tuple if kind is tuple else new
    content["__init__"] = lambda *_: None
    for member, arguments, value in members:
        content[member] = (arguments, value)
    with _hooks_at_rest(bases):
        made = home.__new__(metaclass, names[0], bases, content, **({"boundary": boundary} if boundary else {}))
    for own in ("__init__", "__new_member__"):
        type.__delattr__(made, own)
    return cast("type", made)


def fill_enum(cls: Any, state: tuple[str, dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    """Give an enumeration its methods, and its members their attributes, once."""
    identity, content, attributes = state
    if identity not in _filled:
        for name, own in attributes.items():
            vars(cls.__members__[name]).update(own)
    fill_class(cls, (identity, content, ()))


def _beside_namedtuple(cls: type) -> dict[str, Any]:
    """Return the attributes of a class beyond those that every named tuple has."""
    made = {"collections", f"namedtuple_{cls.__name__}"}  # where the functions of every named tuple are defined
    own = {}
    for name, value in _attributes_of(cls).items():
        function = getattr(value, "__func__", value)
        is_made = isinstance(function, types.FunctionType) and function.__globals__.get("__name__") in made
        is_fixed = name in {*_NOT_COPIED, "__slots__", "__match_args__", "_fields", "_field_defaults"}
        if not (is_made or is_fixed or name in cls._fields):  # type: ignore[attr-defined]
            own[name] = value
    return own


def make_namedtuple(name: str, qualified_name: str, module: str, fields: Any, defaults: Any) -> type:
    """Return a new named tuple, made by the standard library: the globals of its `__new__` belong to no module."""
    made: Any = collections.namedtuple(name, fields, rename=True, defaults=defaults, module=module)  # type: ignore[misc]
    made.__qualname__ = qualified_name
    return cast("type", made)


def fill_class(cls: type, state: tuple[str, dict[str, Any], tuple[type, ...]]) -> None:
    """Give a class that was made empty its attributes, once."""
    identity, content, registered = state
    with _guard:
        if identity in _filled:
            return
        _filled.add(identity)
    for name, value in content.items():
        try:
            setattr(cls, name, value)
        except (AttributeError, TypeError):  # read-only on this kind of class, and set by its metaclass
            continue
    for subclass in registered:
        cls.register(subclass)  # type: ignore[attr-defined]  # only an ABC has any


# ---------------------------------------------------------------- type variables, context variables


def singleton_parts(thing: Any, *, to_parent: bool) -> tuple[Any, ...]:
    """Return the reduction of a type variable, a `NewType` or a `ContextVar`: by a global name, or by value."""
    if (identity := _singleton_ids.get(id(thing))) is None:
        for module_name, name in _homes_of(thing):
            if to_parent or not is_by_value(module_name):
                return getattr, (sys.modules[module_name], name)
        identity = os.urandom(16).hex()
        _singletons[identity], _singleton_ids[id(thing)] = thing, identity
    made = (identity, *_MAKERS[type(thing)](thing))
    if to_parent or type(thing) is not contextvars.ContextVar or thing not in contextvars.copy_context():
        return make_once, made
    return make_once, made, (thing.get(),), None, None, set_context_variable


def _homes_of(thing: Any) -> Iterator[tuple[str, str]]:
    """Find the modules and globals that hold an object; a context variable does not know its own."""
    for module_name in list(sys.modules) if isinstance(thing, contextvars.ContextVar) else [thing.__module__]:
        held = getattr(sys.modules.get(module_name), "__dict__", {})
        yield from ((module_name, name) for name, value in list(held.items()) if value is thing)


def make_type_variable(kind: Any, name: str, module: str, constraints: Any, options: dict[str, Any]) -> Any:
    """Return a new type variable, or another object of `typing` that is made from its name."""
    made = kind(name, *constraints, **options)
    made.__module__ = module
    return made


def set_context_variable(variable: contextvars.ContextVar[Any], state: tuple[Any]) -> None:
    """Set a context variable to its value in the caller."""
    variable.set(state[0])


def make_context(values: list[tuple[contextvars.ContextVar[Any], Any]]) -> contextvars.Context:
    """Return a context in which these variables are set."""
    made = contextvars.Context()
    for variable, value in values:
        made.run(variable.set, value)
    return made


def _parts_of_type_variable(variable: Any) -> tuple[Any, ...]:
    options = {"bound": variable.__bound__, "covariant": variable.__covariant__,
               "contravariant": variable.__contravariant__}  # fmt: skip
    constraints = getattr(variable, "__constraints__", ())
    return make_type_variable, type(variable), variable.__name__, variable.__module__, constraints, options


def _parts_of_named(thing: Any) -> tuple[Any, ...]:
    supertype = (thing.__supertype__,) if isinstance(thing, typing.NewType) else ()
    return make_type_variable, type(thing), thing.__name__, thing.__module__, supertype, {}


def _parts_of_context_variable(variable: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    options = {}
    with suppress(LookupError):
        options["default"] = contextvars.Context().run(variable.get)
    return (functools.partial(contextvars.ContextVar, variable.name, **options),)


_MAKERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    typing.TypeVar: _parts_of_type_variable,
    typing.ParamSpec: _parts_of_type_variable,
    typing.TypeVarTuple: _parts_of_named,
    typing.NewType: _parts_of_named,
    contextvars.ContextVar: _parts_of_context_variable,
}
SINGLETON_TYPES = tuple(_MAKERS)
