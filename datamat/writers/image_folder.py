"""Images sorted into one folder per class, as torchvision's `ImageFolder` and Keras read them.

    ROOT/cat/001.jpg            or, with splits:        ROOT/train/cat/001.jpg
    ROOT/dog/001.jpg                                    ROOT/val/dog/002.jpg

    Materializer("image_folder", source="ROOT", output="out/pets", splits={"train": 0.9, "val": 0.1}).run()

The classes are the sorted names of the folders in all splits. The key is the path: `train-cat-001`. Hidden files are
ignored. Files without the suffix of an image that `Image` reads are left aside, and the plan says so; a class folder
without any image is refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import Any

from datamat.codecs import read_file
from datamat.codecs.files import PICTURES
from datamat.directory.files import WORK
from datamat.errors import SourceError, join_problems
from datamat.features import ClassLabel, Features, Image
from datamat.sources.files import describe_files
from datamat.sources.rows import IndexRow
from datamat.writers.base import DatasetWriter, Sample
from datamat.writers.index import Index
from datamat.writers.paths import files_below

OUTPUT_VERSION = 1
"""Incremented when the same source gives other samples, so that shards of this writer are rebuilt."""


class ImageFolderWriter(DatasetWriter):
    """Reads image and label of each file; PNG and JPEG files keep their bytes where nothing changes them.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("cat", "dog"):
        ...         (pathlib.Path(folder) / name).mkdir()
        ...         _ = (pathlib.Path(folder) / name / "1.jpg").write_bytes(b"")
        ...     writer = ImageFolderWriter()
        ...     writer.bind(folder)
        ...     [(row.key, writer.features["label"].names[row.fields["label"]]) for row in writer.index(folder)]
        [('cat-1', 'cat'), ('dog-1', 'dog')]
    """

    name = "image_folder"
    file_fields = ("image",)

    def bind(self, source: Any) -> None:
        """Read the names of the class folders.

        Raises:
            SourceError: the source is not a folder, or holds no folders of images.
        """
        folders = _class_folders(pathlib.Path(source))
        self._depth = len(folders[0].parts)
        names = sorted({folder.name for folder in folders})
        self._ids = {name: number for number, name in enumerate(names)}
        self.features = Features({"image": Image(encoding="jpeg"), "label": ClassLabel(names=tuple(names))})

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return one row per image, sorted by path."""
        return Index.from_folder(
            source,
            "*/" * self._depth + "*",
            suffixes=PICTURES,
            fields_of=lambda path: {"label": self._ids[path.parent.name]},
            split_of=lambda path: path.parts[0] if self._depth == 2 else None,
        )

    def read(self, row: IndexRow) -> Sample:
        return {"image": read_file(str(row.fields["image"])), "label": row.fields["label"]}


def _class_folders(root: pathlib.Path) -> list[pathlib.PurePosixPath]:
    """Return the folders that hold images, relative to `root`, all of one depth: CLASS or SPLIT/CLASS."""
    folders = sorted({path.parent for path in files_below(root, suffixes=PICTURES)})
    if not folders:
        raise SourceError(
            f"{root} holds no images ({' '.join(PICTURES)}; it holds {_files_in(root)}); want CLASS/*.jpg or "
            "SPLIT/CLASS/*.jpg"
        )
    depth = len(folders[-1].parts)
    odd = [str(folder) for folder in folders if len(folder.parts) != depth or depth not in {1, 2}]
    if odd:
        raise SourceError(
            f"{root} holds images in folders of different depth, or too deep: "
            f"{join_problems([*odd, str(folders[-1])])}; want CLASS/*.jpg for all, or SPLIT/CLASS/*.jpg for all"
        )
    taken = {*folders, *(folder.parent for folder in folders)}
    empty = [folder for folder in _folders(root, depth) if folder not in taken]
    if empty:
        found = [f"{folder} ({_files_in(root / folder)})" for folder in empty]
        raise SourceError(
            f"{root} has folders without an image that can be read: {join_problems(found)}; add images to them, "
            f"convert those that are there ({' '.join(PICTURES)}), or move the folders away"
        )
    return folders


def _folders(root: pathlib.Path, depth: int) -> list[pathlib.PurePosixPath]:
    """Return the folders down to a depth, relative to `root`; not links, what is hidden, or outputs of datamat."""
    level, found = [root], list[pathlib.Path]()
    for _ in range(depth):
        inner = [path for folder in level for path in folder.iterdir() if path.name[0] != "." and not path.is_symlink()]
        level = [path for path in inner if path.is_dir() and not (path / WORK).is_dir()]
        found += level
    return sorted(pathlib.PurePosixPath(path.relative_to(root).as_posix()) for path in found)


def _files_in(folder: pathlib.Path) -> str:
    return describe_files([path.name for path in files_below(folder)])
