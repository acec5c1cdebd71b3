"""What Hugging Face `datasets` needs: `README.md`, the dataset card, whose YAML head lists splits and features.

`datasets` finds the files of each split by the patterns of the head, decodes columns of type `image`, and gives class
labels their names. People read the rest. A card is written for every directory, and its head names what `datasets` can
open: Parquet, or else tar shards, whose features it infers on its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datamat.directory.manifest import formats_of, shard_pattern, shards_of
from datamat.features import ListOf, Nullable
from datamat.features.audio import Audio
from datamat.features.pictures import PictureFile
from datamat.features.values import ClassLabel
from datamat.features.video import Video
from datamat.formats.arrow import ArrowColumn, arrow_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from datamat.directory.manifest import Manifest
    from datamat.features import Feature, Features


__all__ = ["hugging_face_sidecars", "hugging_face_type"]

_OPENED = ("parquet", "webdataset")  # `datasets` (5.2) reads all files of a directory by one reader: the first one here
_STORED = dict.fromkeys(
    ["float16", "bfloat16"], "float32"
)  # how a number stands in Parquet where that is not its own type
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})  # which in YAML are no text
_BREAKS = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")  # what JSON strings may hold as it is, and those of YAML may not
_MARK = "Written by datamat from manifest.json. Change it, and datamat leaves it alone."


def hugging_face_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the dataset card, by the name of its file."""
    head = "\n".join([f"# {_MARK}", *_yaml(_head(manifest))])
    return {"README.md": f"---\n{head}\n---\n\n{_body(manifest)}".encode()}


def _head(manifest: Manifest) -> dict[str, Any]:
    head: dict[str, Any] = {"pretty_name": manifest.name}
    opened = next((name for name in _OPENED if name in formats_of(manifest)), None)
    if opened:
        head["configs"] = [{"config_name": "default", "data_files": _data_files(manifest, opened)}]
    if opened == "parquet":
        # Without numbers of records: in a card that its owner has changed, they would be wrong after the next run, and
        # `datasets` would refuse to load what is right.
        head["dataset_info"] = {"features": _features(manifest.features)}
    return head


def _data_files(manifest: Manifest, format_name: str) -> list[dict[str, str]]:
    return [
        {"split": split, "path": shard_pattern(manifest, split, shards)}
        for split, shards in shards_of(manifest, format_name).items()
    ]


def _features(features: Features) -> list[dict[str, Any]]:
    return [{"name": column.name, **_typed(column, features.get(column.name))} for column in arrow_columns(features)]


def _typed(column: ArrowColumn, feature: Feature | None) -> dict[str, Any]:
    """Return the type of a column as the YAML of `datasets` has it: `dtype`, or `list` of an inner one."""
    special = None if feature is None else hugging_face_type(feature)
    inner: Any = special or _STORED.get(column.stored.dtype, column.stored.dtype)
    if not column.stored.sizes:
        return {"dtype": inner}
    for size in reversed(column.stored.sizes):
        inner = {"list": inner, **({} if size is None else {"length": size})}
    return dict(inner)


@functools.singledispatch
def hugging_face_type(feature: Feature) -> Any:
    """Return the type that a dataset card gives to the column of a field; None for that of the Arrow column.

    A package may register a function for its own feature type: `hugging_face_type.register(Sound)(lambda _: "audio")`.

    Args:
        feature: feature of the field.

    Returns:
        The name of a feature of `datasets`, such as "image", or a dict of one to its arguments.
    """
    del feature
    return None


@hugging_face_type.register(Nullable)
@hugging_face_type.register(ListOf)
def _(feature: Nullable | ListOf) -> Any:
    return hugging_face_type(feature.feature)  # the card says apart what is a list, and everything may be null


@hugging_face_type.register(ClassLabel)
def _(feature: ClassLabel) -> Any:
    names = {str(number): name for number, name in enumerate(feature.names)}
    return {"class_label": {"names": names}} if names else None


@hugging_face_type.register(PictureFile)
def _(feature: PictureFile) -> Any:
    return "image" if feature.fits_pillow else None


@hugging_face_type.register(Audio)
def _(feature: Audio) -> Any:
    return "audio" if feature.sample_rate is None else {"audio": {"sampling_rate": feature.sample_rate}}


@hugging_face_type.register(Video)
def _(feature: Video) -> Any:
    del feature
    return "video"


def _body(manifest: Manifest) -> str:
    splits = {split: sum(shard.num_records for shard in shards) for split, shards in manifest.splits.items()}
    tables = [
        _table(("split", "records"), [(split, f"{count:,}") for split, count in splits.items()]),
        _table(("field", "holds"), [(_code(name), f.declared()) for name, f in manifest.features.items()]),
    ]
    opening = f"# {manifest.name}\n\nShards: {', '.join(formats_of(manifest))}.\n"
    return "\n".join([opening, *tables])


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "".join(f"| {first} | {second} |\n" for first, second in lines)


def _code(name: str) -> str:
    return "`" + name.replace("`", "'").replace("|", "\\|") + "`"


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a block of YAML 1.2; text is written as JSON strings, which YAML takes as they are."""
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        is_nested = isinstance(item, (Mapping, list)) and len(item) > 0
        if isinstance(value, Mapping):
            yield f"{indent}{_scalar(key)}:" + ("" if is_nested else f" {_scalar(item)}")
            if is_nested:
                yield from _yaml(item, f"{indent}  ")
        else:
            first, *rest = _yaml(item, f"{indent}  ") if is_nested else [f"{indent}  {_scalar(item)}"]
            yield f"{indent}- {first.lstrip()}"
            yield from rest


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and value.isascii() and value.isidentifier() and value.lower() not in _WORDS
    if is_plain:
        return str(value)
    return _BREAKS.sub(lambda found: f"\\u{ord(found.group()):04x}", json.dumps(value, ensure_ascii=False))
