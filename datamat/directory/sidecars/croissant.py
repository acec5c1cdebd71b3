"""`croissant.json`: the dataset for search engines and loaders, in MLCommons' Croissant, version 1.0 (JSON-LD).

Vocabulary: https://docs.mlcommons.org/croissant/docs/croissant-spec.html. The files of each split and format are a
`FileSet`, found by pattern beside `croissant.json`. Records in Parquet have fields, since the vocabulary can refer to
columns, so that mlcroissant reads them; for other formats only the files are listed.

The URLs in it are names of vocabularies. The publisher of the data adds license, authors and address; from then on
datamat leaves the file alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from datamat.directory.files import render_json
from datamat.directory.manifest import formats_of, shard_pattern, shards_of
from datamat.features import ListOf, Nullable
from datamat.features.audio import Audio
from datamat.features.pictures import PictureFile
from datamat.features.video import Video
from datamat.formats.arrow import ArrowColumn, arrow_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.directory.manifest import Manifest, ShardInfo
    from datamat.features import Feature

# The context of the specification, verbatim, since consumers compare it.
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_ENCODINGS = {"parquet": "application/x-parquet", "webdataset": "application/x-tar"}
_OTHER_ENCODING = "application/octet-stream"  # the other formats have no registered name
_TYPES = {
    **dict.fromkeys(["string", "binary", "json"], "sc:Text"),
    **dict.fromkeys(["timestamp[us]", "timestamp[us, tz=UTC]"], "sc:DateTime"),
    **dict.fromkeys(["float16", "bfloat16", "float32", "float64"], "sc:Float"),
    "bool": "sc:Boolean",
}


def croissant_sidecars(manifest: Manifest) -> dict[str, bytes]:
    """Return the description, by file name."""
    files = [
        _file_set(manifest, format_name, split, shards)
        for format_name in formats_of(manifest)
        for split, shards in shards_of(manifest, format_name).items()
    ]
    described = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "name": manifest.name,
        "description": f"{manifest.num_records} records with the fields {', '.join(manifest.features)}.",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "version": "1.0.0",
        "distribution": files,
        "recordSet": _record_sets(manifest),
    }
    return {"croissant.json": render_json(described)}


def _file_set(manifest: Manifest, format_name: str, split: str, shards: tuple[ShardInfo, ...]) -> dict[str, Any]:
    identifier = _files_of(format_name, split)
    return {
        "@type": "cr:FileSet",
        "@id": identifier,
        "name": identifier,
        "description": f"{sum(shard.num_records for shard in shards)} records in {len(shards)} files.",
        "encodingFormat": _ENCODINGS.get(format_name, _OTHER_ENCODING),
        "includes": shard_pattern(manifest, split, shards),
    }


def _files_of(format_name: str, split: str) -> str:
    return f"{split}-{format_name.replace('.', '-')}"


def _record_sets(manifest: Manifest) -> list[dict[str, Any]]:
    columns = arrow_columns(manifest.features)
    sets = [
        _classes(f"{name}:classes", class_names)
        for name, feature in manifest.features.items()
        if (class_names := feature.class_names())
    ]
    for split in shards_of(manifest, "parquet"):
        fields = [_field(split, column, manifest.features.get(column.name)) for column in columns]
        sets.append({"@type": "cr:RecordSet", "@id": split, "name": split, "field": fields})
    return sets


def _classes(identifier: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the names of classes as a record set."""
    return {
        "@type": "cr:RecordSet",
        "@id": identifier,
        "name": identifier,
        "dataType": "sc:Enumeration",
        "key": {"@id": f"{identifier}/id"},
        "field": [
            {"@type": "cr:Field", "@id": f"{identifier}/id", "name": f"{identifier}/id", "dataType": "sc:Integer"},
            {"@type": "cr:Field", "@id": f"{identifier}/name", "name": f"{identifier}/name", "dataType": "sc:Text"},
        ],
        "data": [{f"{identifier}/id": number, f"{identifier}/name": name} for number, name in enumerate(names)],
    }


def _field(split: str, column: ArrowColumn, feature: Feature | None) -> dict[str, Any]:
    identifier = f"{split}/{column.name}"
    return {
        "@type": "cr:Field",
        "@id": identifier,
        "name": identifier,
        "dataType": _data_type(column, feature),
        **({"description": feature.declared()} if feature else {}),
        **({"repeated": True} if column.stored.sizes else {}),
        "source": {"fileSet": {"@id": _files_of("parquet", split)}, "extract": {"column": column.name}},
    }


def _data_type(column: ArrowColumn, feature: Feature | None) -> str:
    special = None if feature is None else croissant_type(feature)
    return special or _TYPES.get(column.stored.dtype, "sc:Integer")


@functools.singledispatch
def croissant_type(feature: Feature) -> str | None:
    """Return the `dataType` of the column of a field; None for that of the Arrow column.

    A package may register a function for its own feature type: `croissant_type.register(Scan)(lambda _: "sc:3DModel")`.

    Args:
        feature: feature of the field.
    """
    del feature
    return None


@croissant_type.register(Nullable)
@croissant_type.register(ListOf)
def _(feature: Nullable | ListOf) -> str | None:
    return croissant_type(feature.feature)


@croissant_type.register(PictureFile)
def _(feature: PictureFile) -> str | None:
    return "sc:ImageObject" if feature.fits_pillow else None


@croissant_type.register(Audio)
def _(feature: Audio) -> str:
    del feature
    return "sc:AudioObject"


@croissant_type.register(Video)
def _(feature: Video) -> str:
    del feature
    return "sc:VideoObject"
