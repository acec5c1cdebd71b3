"""Lists the kinds of files that need no class, and the module that opens each: a new kind is a module and a line here.

Such a module has `open_files(files, spool)`, given the files with a suffix of the kind, or `open_folder(folder, spool)`
for kinds that are whole folders; both return a `DataSource`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datamat.formats.megatron import MAGIC
from datamat.values import frozen

if TYPE_CHECKING:
    import pathlib

PACKINGS = (".gz", ".bz2", ".xz", ".zst", ".zlib")
"""Extensions of compressed files, which follow those of their content."""


@frozen()
class SourceKind:
    """A kind of files.

    Attributes:
        module: name of the module in `datamat.writers` that opens them.
        suffixes: suffixes of its files, empty for any; None if a folder is opened as a whole.
        marks: patterns of files that no folder of another kind has.
        magic: beginning of the marked files; suffixes alone then do not tell the kind of a folder.
        is_unpacked: whether its files may be compressed with any of `PACKINGS`.
        is_of_objects: whether the kind also names objects.
    """

    module: str
    suffixes: tuple[str, ...] | None = None
    marks: tuple[str, ...] = ()
    magic: bytes = b""
    is_unpacked: bool = False
    is_of_objects: bool = False

    def is_marked(self, folder: pathlib.Path) -> bool:
        """Return True if a folder holds one of the marks."""
        return any(path.is_file() and self._is_begun(path) for mark in self.marks for path in folder.glob(mark))

    def _is_begun(self, path: pathlib.Path) -> bool:
        if not self.magic:
            return True
        with path.open("rb") as file:
            return file.read(len(self.magic)) == self.magic


def _packed(*endings: str) -> tuple[str, ...]:
    return tuple(ending + packing for ending in endings for packing in ("", *PACKINGS))


_INDEX = ("index.json", "*/index.json")

KINDS = {
    "datamat": SourceKind("finished", marks=("manifest.json",)),
    "huggingface": SourceKind("huggingface", marks=("state.json", "dataset_dict.json"), is_of_objects=True),
    "tfds": SourceKind("tfds", marks=("dataset_info.json",), is_of_objects=True),
    "lerobot": SourceKind("lerobot", marks=("meta/info.json",)),
    "files": SourceKind("files", ()),
    "mds": SourceKind("mds", marks=_INDEX, is_of_objects=True),
    "litdata": SourceKind("litdata", marks=_INDEX, is_of_objects=True),
    "megatron": SourceKind("megatron", (".bin", ".idx"), ("*.idx",), MAGIC),
    "webdataset": SourceKind("tar", (*_packed(".tar"), ".tgz"), is_unpacked=True),
    "tfrecord": SourceKind("tfrecord", _packed(".tfrecord", ".tfrecords", ".tfrec"), is_unpacked=True),
    "parquet": SourceKind("parquet", (".parquet", ".pq")),
    "arrow": SourceKind("arrow", (".arrow", ".feather", ".ipc"), is_of_objects=True),
}
"""The kinds by name. "datamat" is found, never named."""

SOURCE_KINDS = (*sorted({*KINDS, "torch"} - {"datamat"}),)
"""Kinds of sources that need no class: each is the name of an `ImportWriter` that reads nothing else."""

_LAYOUTS = {
    "coco": (
        "annotations/instances_*.json",
        "annotations/lvis_v*.json",
        "instances_*.json",
        "*/_annotations.coco.json",
    ),
    "yolo": ("data.yaml", "data.yml"),
    "voc": ("Annotations/*.xml", "VOC*/Annotations/*.xml", "VOCdevkit/*/Annotations/*.xml"),
    "cityscapes": ("leftImg8bit/*/*/*_leftImg8bit.png",),
    "labelme": ("*.json", "*/*.json"),
}
"""Patterns of files that a layout of pictures has, by the name of its writer."""


def layout_of(folder: pathlib.Path) -> str | None:
    """Return the name of the writer for a folder of pictures and annotations; None if its layout is unknown."""
    if any(kind.is_marked(folder) for kind in KINDS.values()):
        return None
    for name, patterns in _LAYOUTS.items():
        found = next((path for pattern in patterns for path in folder.glob(pattern) if path.is_file()), None)
        if found is not None and (name != "labelme" or _has_shapes(found)):
            return name
    return None


def _has_shapes(file: pathlib.Path) -> bool:
    with file.open("rb") as content:
        return b'"shapes"' in content.read(1 << 16)
