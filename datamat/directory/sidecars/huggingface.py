"""The sidecar of Hugging Face `datasets`: `README.md`, the dataset card, whose YAML head lists splits and features.

`datasets` finds the files of each split by the patterns in the head, decodes columns of type `image`, and names class
labels. The rest is for people. Every directory gets a card, whose head lists what `datasets` can open: Parquet, or else
tar shards, whose features it infers.
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

_OPENED = ("parquet", "webdataset")  # `datasets` (5.2) uses one reader: the first here
_STORED = dict.fromkeys(["float16", "bfloat16"], "float32")  # numbers whose type in Parquet differs from their own
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})  # not texts in YAML
_BREAKS = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")  # allowed unescaped in JSON strings, but not in YAML
_MARK = "Written by datamat from manifest.json. Change it, and datamat leaves it alone."


def hugging_face_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the dataset card, by file name."""
    head = "\n".join([f"# {_MARK}", *_yaml(_head(manifest))])
    return {"README.md": f"---\n{head}\n---\n\n{_body(manifest)}".encode()}


def _head(manifest: Manifest) -> dict[str, Any]:
    head: dict[str, Any] = {"pretty_name": manifest.name}
    opened = next((name for name in _OPENED if name in formats_of(manifest)), None)
    if opened:
        head["configs"] = [{"config_name": "default", "data_files": _data_files(manifest, opened)}]
    if opened == "parquet":
        # Without numbers of records: in an edited card they would be wrong after the next run, and `datasets` would
        # refuse to load correct data.
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
    """Return the type of a column for the YAML of `datasets`: `dtype`, or `list` of an inner one."""
    special = None if feature is None else hugging_face_type(feature)
    inner: Any = special or _STORED.get(column.stored.dtype, column.stored.dtype)
    if not column.stored.sizes:
        return {"dtype": inner}
    for size in reversed(column.stored.sizes):
        inner = {"list": inner, **({} if size is None else {"length": size})}
    return dict(inner)


@functools.singledispatch
def hugging_face_type(feature: Feature) -> Any:
    """Return the type of a field's column in a dataset card; None for that of the Arrow column.

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
    return hugging_face_type(feature.feature)  # the card marks lists separately, and everything may be null


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
    """Yield the lines of a block of YAML 1.2; texts are JSON strings, which are valid YAML."""
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
