"""How each field must change when a transform moves the image."""

from __future__ import annotations

import functools

from datamat.features import Audio, Feature, Geometry, ListOf, Nullable, Tokens
from datamat.features.protocols import Target


@functools.singledispatch
def target_of(feature: Feature) -> Target | None:
    """Return the way in which a value must follow the image, as in `Geometry.target`; None if it need not."""
    if isinstance(feature, Geometry):
        return feature.target()
    return "array" if feature.value_type()[1] and feature.class_names() is None else None


@target_of.register(Audio)
@target_of.register(Tokens)
def _(feature: Feature) -> None:
    del feature  # arrays that are not positioned in an image


@target_of.register(Nullable)
def _(feature: Nullable) -> Target | None:
    return target_of(feature.feature)


@target_of.register(ListOf)
def _(feature: ListOf) -> Target | None:
    if feature.array and not feature.has_gaps:
        return target_of(feature.array)
    return None if target_of(feature.item) is None else "array"


def geometry_of(feature: Feature) -> Geometry:
    """Return the `Geometry` that moves the points of a field whose target is "points"."""
    found = feature.feature if isinstance(feature, Nullable) else feature
    assert isinstance(found, Geometry), "nothing else has that target"
    return found
