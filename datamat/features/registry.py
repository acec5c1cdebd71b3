"""Feature types by their names in manifests, and the JSON form of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from datamat.errors import MissingDependencyError, SchemaError
from datamat.features.base import DictFields, Feature, join_names

BUILT_IN: dict[str, type[Feature]] = {}
"""datamat's own types."""

_ENTRY_POINTS = "datamat.features"
_DICT = "Features"  # instead of the name of a type
_registered: dict[str, type[Feature]] = {}
_FeatureType = TypeVar("_FeatureType", bound=type[Feature])


def built_in(*types: type[Feature]) -> None:
    """Add built-in types."""
    BUILT_IN.update({kind.type_name: kind for kind in types})


def register_feature(feature_type: _FeatureType) -> _FeatureType:
    """Register a feature class under its `type_name`, so that `load` finds it; return the class, as a decorator does.

    Installed packages need no call: they list the class in the entry-point group `datamat.features`. A program that
    defines a class must register it before opening a directory with fields of that type.

    Args:
        feature_type: subclass of `Feature`. It replaces a class with the same module and name, such as one from a
            notebook cell that is run again.

    Raises:
        SchemaError: the argument is not a subclass of `Feature`, or another class has its `type_name`.

    Example:
        >>> from datamat import Features, Scalar
        >>> @register_feature
        ... class Celsius(Scalar):
        ...     pass
        >>> Features.from_json({"t": {"type": "Celsius", "dtype": "float32"}})
        Features(key: str, t: float32 scalar)
    """
    if not (isinstance(feature_type, type) and issubclass(feature_type, Feature)):
        raise SchemaError(
            f"register_feature: {feature_type!r} is not a subclass of datamat.features.Feature; pass a class that is"
        )
    name = feature_type.type_name
    known = BUILT_IN.get(name) or _registered.get(name)
    if known is not None and path_of(known) != path_of(feature_type):
        raise SchemaError(
            f"register_feature: the name {name!r} of {path_of(feature_type)} is that of {path_of(known)}; "
            "set type_name in the class"
        )
    _registered[name] = feature_type
    return feature_type


def path_of(feature_type: type) -> str:
    """Return module and name of a class."""
    return f"{feature_type.__module__}.{feature_type.__qualname__}"


def _type_of(name: str) -> type[Feature] | None:
    """Return the feature class with a `type_name`, importing the module of its entry point if necessary."""
    found = BUILT_IN.get(name) or _registered.get(name)
    if found is None:
        # Imported here because importlib.metadata costs more than this whole module, and built-in names do not need it.
        from importlib.metadata import entry_points

        points = {point.value: point for point in entry_points(group=_ENTRY_POINTS, name=name)}
        if len(points) > 1:
            raise SchemaError(
                f"several installed packages have a feature {name!r}: {join_names(sorted(points))}; remove all but one"
            )
        for point in points.values():
            found = register_feature(point.load())
    return found


def feature_of(name: str, declaration: Mapping[str, Any]) -> Feature | dict[str, Any]:
    """Return the declaration of a field, a feature or the fields of a dict, from its JSON; see `declaration_of`.

    Args:
        name: name of the field, for messages.
        declaration: JSON value.

    Raises:
        SchemaError: a type or an argument is unknown.
        MissingDependencyError: the type comes from a package that is not installed.
    """
    arguments = dict(declaration) if isinstance(declaration, Mapping) else {}
    kind, module = arguments.pop("type", None), arguments.pop("module", None)
    if kind == _DICT and isinstance(fields := arguments.get("fields"), Mapping):
        return {part: feature_of(f"{name}/{part}", one) for part, one in fields.items()}
    found = _type_of(kind) if isinstance(kind, str) else None
    if found is None and module is not None:
        raise MissingDependencyError(
            f"field {name!r} has the feature type {kind!r} of the module {module!r}, which is not known here; install "
            f"the package that brings it (its entry points name it under {_ENTRY_POINTS!r}), or call "
            "datamat.features.register_feature with the class first"
        )
    if found is None:
        raise SchemaError(
            f"field {name!r} has the type {kind!r}; want one of {join_names(sorted({**BUILT_IN, **_registered}))}"
        )
    try:
        return found.from_arguments(arguments)
    except TypeError as error:
        raise SchemaError(
            f"field {name!r} of type {kind}: {error}; want the arguments that its to_json gave"
        ) from error


def declaration_of(feature: Any) -> dict[str, Any]:
    """Return the declaration of a field, a feature or the fields of a dict, as a JSON value."""
    if not isinstance(feature, Mapping):
        found: dict[str, Any] = feature.to_json()
        return found
    return {"type": _DICT, "fields": {name: declaration_of(part) for name, part in DictFields(feature).items()}}
