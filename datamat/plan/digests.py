"""Named digests of everything except rows that decides the bytes of a shard, so that changes can be named.

    writer, features, format, packages, seed   every split: the seed decides the order of rows and the draws of read
    transform, packages for drawing            augmented splits
    copies                                     the one split

The fingerprint of a shard consists of these digests and its rows, and nothing else. So if it differs from the one in
the manifest, one of them does, and can be named. The manifest stores them, and a few digits for each method, global,
attribute and environment variable, which only serve to say which one changed.

Packages are those that decide bytes: those used by the code of writer and transform, those that encode the fields, and
those that write the format. Parts of datamat are among them, by the number of their output format (`OUTPUT_VERSION`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datamat.fingerprint import Examined, Reached, Switches, examine, fingerprint, versions_of
from datamat.fingerprint.code import is_users_object
from datamat.plan.memos import digests_of_memos
from datamat.values import frozen
from datamat.writers.base import DatasetWriter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from datamat.features import Features
    from datamat.fingerprint.code import Home
    from datamat.formats import ShardFormat
    from datamat.plan.pipeline import RecordSource

_DRAWN = "drawn."
_PACKAGE, _VARIABLE, _FILE, _SWITCH, _MEMO = "package.", "environment.", "file.", "switch.", "memo."

_MAKING = frozenset({"read", "read_block", "augment", "setup_worker"})
_BEFORE = ("bind", "index", "features", "name", "file_fields", "url_fields")

_ALWAYS = ("datamat.features", "datamat.plan.pipeline", "datamat.plan.plan", "datamat.transforms.seeding")
_WHERE_DRAWN = ("datamat.transforms", "numpy")  # numpy: its random streams may change
_COMPANIONS = {
    "albumentations": ("albucore", "cv2", "scipy"),
    "keras": ("tensorflow",),
    "torchvision": ("torch",),
}
"""The modules that do the work of packages that only delegate, by name of the distribution."""


@frozen()
class JobDigests:
    """Everything except rows that decides the bytes of shards; digests are 32 hex digits.

    Attributes:
        writer: digest of the writer's class, with all code that it uses, and of its attributes; or of the user's
            version.
        features: digest of the schema.
        format: digest of names and options of the shard formats, in order.
        transform: digest of the transform of the run, or of the user's version.
        seed: base seed, in decimal digits.
        version: the user's version, which replaces the digests of code; None if none is given.
        packages: versions of packages by name, for every split.
        drawn_packages: further versions by name, for augmented splits only.
        environment: digests of the environment variables that the writer reads, by name.
        drawn_environment: digests of the environment variables that the transform reads, by name.
        files: digests of the files that every sample depends on, by name.
        switches: switches of libraries that differ from their defaults, by name.
        places: places of memos of the code of writer and transform.
        given: digests of the filled ones in this process, by name.
        memos: those of them that count.
        pieces: a few digits for each named piece of the writer ("writer.code.read") and the transform. They do not
            count; they only show which of them changed.
        hashing: description of user code that makes sets or hashes values; "" if there is none. It does not count.
        unseen: description of values that user code looks up by names known only at run time. It does not count.
    """

    writer: str
    features: str
    format: str
    transform: str
    seed: str
    version: str | None
    packages: Mapping[str, str]
    drawn_packages: Mapping[str, str]
    environment: Mapping[str, str]
    drawn_environment: Mapping[str, str]
    files: Mapping[str, str]
    switches: Mapping[str, str]
    places: Collection[Home]
    given: Mapping[str, str]
    hashing: str
    unseen: Sequence[str]
    memos: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pieces: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: RecordSource,
        formats: Sequence[ShardFormat],
        seed: int,
        version: str | None = None,
        files: Mapping[str, str] | None = None,
    ) -> JobDigests:
        """Return the ingredients of a run.

        Args:
            records: record source; its writer and transform count.
            formats: shard formats; the first is the one for readers.
            seed: base seed of every random draw.
            version: text that replaces the code of writer and transform; None for the code itself.
            files: digests of the files that every sample depends on, by name; None if there are none.

        Raises:
            FingerprintError: the writer or the transform holds something that cannot be fingerprinted.
        """
        features, pipeline = records.features, records.pipeline
        augmenter = None if pipeline is None else pipeline.augmenter
        transform = None if augmenter is None else augmenter.transform
        if augmenter is not None and augmenter.withheld:
            transform = [transform, augmenter.withheld]
        code = _examined(as_written(records.writer), getattr(records.writer, "_datamat_name", "writer"), version)
        declared, others = _schema_of(features, version)
        drawing = _examined(as_drawn(transform), "transform", version)
        places = {*code.memos, *drawing.memos}
        given, uncompared = digests_of_memos(places)
        written = examine([[type(made), made.options()] for made in formats], where="format")
        encoders = _encoders(features, drawn=False).union(_ALWAYS, *(made.packages for made in formats))
        if pipeline is not None and pipeline.draws_in_read:
            encoders |= {"numpy"}
        return cls(
            writer=code.digest,
            features=declared,
            format=fingerprint([written.digest, [made.name for made in formats]], where="format"),
            transform=drawing.digest,
            seed=str(seed),
            version=version,
            packages=_with_companions(code.packages | others.packages | written.packages | versions_of(encoders)),
            drawn_packages=_with_companions(
                drawing.packages | versions_of(_encoders(features, drawn=True).union(_WHERE_DRAWN))
            ),
            environment={**code.environment, **others.environment},
            drawn_environment=drawing.environment,
            files=files or {},
            switches={}
            if version is not None
            else Switches.of().counting({*code.packages, *others.packages, *drawing.packages}),
            places=places,
            given=given,
            hashing=code.hashing or drawing.hashing,
            pieces={
                f"{prefix}.{name}": digits
                for prefix, found in (("writer", code), ("transform", drawing))
                for name, digits in found.pieces.items()
            },
            unseen=(
                *code.unseen,
                *drawing.unseen,
                *(f"what {name} keeps between calls" for name in uncompared),
            ),
        )

    @property
    def code(self) -> str:
        """Digest of everything that decides how the code fills memos."""
        parts = [self.writer, self.transform, self.packages, self.drawn_packages, self.environment]
        parts += [self.drawn_environment, list(self.files.values()), self.switches]
        return fingerprint(parts, where="options")

    def of_split(self, *, augmented: bool, copies: int) -> str:
        """Return the digest of everything except rows that decides the records of a split."""
        always = [self.writer, self.features, self.format, self.seed, self.packages, self.environment]
        always += [list(self.files.values())] if self.files else []  # not by name: a path may be absolute
        always += [self.switches] if self.switches else []
        always += [{"memos": self.memos}] if self.memos else []
        drawn = [self.transform, self.drawn_packages, self.drawn_environment] if augmented else []
        return fingerprint([always, drawn, copies], where="options")

    def to_json(self) -> dict[str, str]:
        """Return the digests, versions and variables by name."""
        digests = {name: getattr(self, name) for name in ("writer", "features", "format", "transform", "seed")}
        if self.version is not None:
            digests["version"] = self.version
        groups = {
            _FILE: self.files,
            _SWITCH: self.switches,
            # Enough to name a memo or a variable that changed, and too little to reveal its value.
            _MEMO: {name: digest[:4] for name, digest in self.memos.items()},
            _PACKAGE: self.packages,
            _DRAWN + _PACKAGE: self.drawn_packages,
            _VARIABLE: {name: digest[:4] for name, digest in self.environment.items()},
            _DRAWN + _VARIABLE: {name: digest[:4] for name, digest in self.drawn_environment.items()},
        }
        digests |= self.pieces
        return digests | {f"{prefix}{name}": value for prefix, group in groups.items() for name, value in group.items()}


def as_written(writer: Any) -> Any:
    """Return the fingerprinted parts of the object that makes records.

    Of a `DatasetWriter` these are the attributes that its methods read, without those that methods which make samples
    store; of a source of stored records, everything.
    """
    return Reached(writer, _MAKING, _BEFORE, is_whole=True) if isinstance(writer, DatasetWriter) else writer


def as_drawn(transform: Any) -> Any:
    """Return the fingerprinted parts of a transform; of a user's object, the attributes that `__call__` reads."""
    if type(transform) is list:  # with the run's description of it
        return [as_drawn(part) for part in transform]
    if is_users_object(transform) and callable(transform):
        return Reached(transform, frozenset({"__call__"}), is_whole=True)
    return transform


def _examined(value: Any, where: str, version: str | None) -> Examined:
    if version is None or value is None:
        return examine(value, where=where)
    return Examined(fingerprint(["version", version], where="version"), {}, {}, {}, (), "")


def _schema_of(features: Features, version: str | None) -> tuple[str, Examined]:
    """Return the digest of a schema, and the parts of its third-party feature types."""
    declared = features.to_json()
    types = {feature.type_name: type(feature) for feature in features.foreign.values()}
    found = _examined(types or None, "writer.features", version)
    return fingerprint([declared, found.digest] if types else declared, where="writer.features"), found


def _encoders(features: Features, *, drawn: bool) -> frozenset[str]:
    """Return the modules that encode the fields, including datamat's own if there are pictures."""
    modules = features.packages(drawn=drawn)
    # By a module that names no packages: the fields have declared those that they use.
    return modules | {"datamat.codecs.files"} if modules else modules


def _with_companions(packages: Mapping[str, str]) -> dict[str, str]:
    beside = [module for name in packages for module in _COMPANIONS.get(name, ())]
    return {**versions_of(beside), **packages}


def changed_digests(old: Mapping[str, str], new: Mapping[str, str], *, augmented: bool) -> list[str]:
    """Describe the changes between two manifests' ingredients that concern a split.

    Args:
        old: ingredients in the manifest.
        new: present ingredients.
        augmented: whether the transform applies to the split.

    Example:
        >>> old = {"writer": "a", "writer.code.read": "a", "writer.global.GAIN": "a", "transform": "a", "seed": "0"}
        >>> changed_digests(old, {**old, "writer": "b", "writer.code.read": "b"}, augmented=True)
        ['writer code changed (read)']
        >>> changed_digests(old, {**old, "writer": "b", "writer.global.GAIN": "b"}, augmented=True)
        ['global GAIN changed']
        >>> changed_digests(old, {**old, "transform": "b"}, augmented=False)
        []
        >>> changed_digests(old, {**old, "package.pyarrow": "20.0.0"}, augmented=False)
        ['pyarrow changed (none -> 20.0.0)']
    """
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    versions = {name: f"({old.get(name, 'none')} -> {new.get(name, 'none')})" for name in differing}
    changes = [f"version changed {versions['version']}"] if "version" in differing else []
    if "writer" in differing and "version" not in {*old, *new}:
        pieces = [name for name in differing if name != "writer.attribute.features" or "features" not in differing]
        code, values = _changed_pieces(pieces, "writer", old, new)
        found = [f"writer code changed ({', '.join(code)})"] if code else []
        changes += [*found, *(f"{name} changed" for name in values)] or ["writer's attributes changed"]
    changes += [f"{name} changed" for name in ("features", "format") if name in differing]
    if augmented and "transform" in differing and "version" not in differing:
        code, values = _changed_pieces(differing, "transform", old, new)
        changes.append(f"transform changed ({', '.join([*code, *values])})" if code or values else "transform changed")
    if "seed" in differing:  # for every split: it also decides the order of the rows
        changes.append(f"seed changed {versions['seed']}")
    changes += [f"file {name} changed" for name in _named(differing, _FILE, drawn=False)]
    switches = _named(differing, _SWITCH, drawn=False)
    changes += [f"{name} changed {versions[key]}" for name, key in switches.items()]
    changes += [f"{name} changed" for name in _named(differing, _MEMO, drawn=False)]
    # Changed code uses other packages and variables: changes of these are mentioned only if the code is the same.
    counting = [name for name in differing if not changes or (name in old and name in new)]
    changes += [f"environment variable {name} changed" for name in _named(counting, _VARIABLE, drawn=augmented)]
    packages = _named(counting, _PACKAGE, drawn=augmented)
    return changes + [f"{_in_words(name)} changed {versions[key]}" for name, key in packages.items()]


def _changed_pieces(
    differing: Sequence[str], prefix: str, old: Mapping[str, str], new: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the changed pieces of the writer or the transform: code, and values."""
    code = [name.removeprefix(f"{prefix}.code.") for name in differing if name.startswith(f"{prefix}.code.")]
    values = [name for name in differing if name.startswith((f"{prefix}.global.", f"{prefix}.attribute."))]
    # Changed code reads other values: these are mentioned only if they were read before.
    values = [name for name in values if not code or (name in old and name in new)]
    return code, [name.removeprefix(f"{prefix}.").replace(".", " ", 1) for name in values]


def _named(differing: Sequence[str], prefix: str, *, drawn: bool) -> dict[str, str]:
    """Return the packages or variables among the differing ingredients: their keys there, by name."""
    prefixes = [_DRAWN + prefix, prefix] if drawn else [prefix]
    return {key.removeprefix(start): key for start in prefixes for key in differing if key.startswith(start)}


def _in_words(package: str) -> str:
    return f"the output format of {package}" if package.startswith("datamat.") else package
