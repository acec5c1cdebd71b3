"""Pictures sorted into one folder per class, as torchvision's `ImageFolder` and Keras read them.

    ROOT/cat/001.jpg            or, with splits:        ROOT/train/cat/001.jpg
    ROOT/dog/001.jpg                                    ROOT/val/dog/002.jpg

    Materializer("image_folder", source="ROOT", output="out/pets", splits={"train": 0.9, "val": 0.1}).run()

Classes are the folders' names, sorted; in all splits together. The key is the path: `train-cat-001`. Hidden files, and
files whose suffix is none of a picture's, are left out.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from datamat.codecs import read_file
from datamat.errors import SourceError
from datamat.features import ClassLabel, Features, Image
from datamat.index import Index, IndexRow, files_below, named
from datamat.writer import DatasetWriter, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ImageFolderWriter"]

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class ImageFolderWriter(DatasetWriter):
    """Image and label of each file; PNG and JPEG files keep their bytes where nothing changes them.

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
        """Take the names of the class folders.

        Raises:
            SourceError: the source is no folder, or holds no folders of pictures.
        """
        folders = _class_folders(pathlib.Path(source))
        self._depth = len(folders[0].parts)
        names = sorted({folder.name for folder in folders})
        self._ids = {name: number for number, name in enumerate(names)}
        self.features = Features({"image": Image(encoding="jpeg"), "label": ClassLabel(names=tuple(names))})

    def index(self, source: Any) -> Iterable[IndexRow]:
        """Return a row per picture, sorted by path."""
        return Index.from_folder(
            source,
            "*/" * self._depth + "*",
            suffixes=_PICTURES,
            fields_of=lambda path: {"label": self._ids[path.parent.name]},
            split_of=lambda path: path.parts[0] if self._depth == 2 else None,
        )

    def read(self, row: IndexRow) -> Sample:
        return {"image": read_file(str(row.fields["image"])), "label": row.fields["label"]}


def _class_folders(root: pathlib.Path) -> list[pathlib.PurePosixPath]:
    """Return the folders that hold pictures, relative to `root`, all as deep: CLASS or SPLIT/CLASS."""
    folders = sorted({path.parent for path in files_below(root, suffixes=_PICTURES)})
    if not folders:
        raise SourceError(f"{root} holds no pictures ({' '.join(_PICTURES)}); want CLASS/*.jpg or SPLIT/CLASS/*.jpg")
    depth = len(folders[-1].parts)
    odd = [str(folder) for folder in folders if len(folder.parts) != depth or depth not in {1, 2}]
    if odd:
        raise SourceError(
            f"{root} holds pictures in folders of different depth, or too deep: {named([*odd, str(folders[-1])])}; "
            "want CLASS/*.jpg for all, or SPLIT/CLASS/*.jpg for all"
        )
    return folders
