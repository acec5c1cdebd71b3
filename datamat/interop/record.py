"""Which of the files beside the shards datamat wrote, in `.datamat/sidecars/record.json`: a digest or two for each.

What people read and complete (`README.md`, `croissant.json`) is datamat's as long as it is what was written. What
programs read is datamat's by its name, once the record has that. Anything else under one of these names is somebody's
own, and is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from datamat.storage import commit, read_json, render_json

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

__all__ = ["DOCUMENTS", "Record", "work_folder"]

DOCUMENTS = frozenset({"README.md", "croissant.json"})
"""What people complete, and then own."""
_ENDINGS = (".json", ".labels.txt", ".md", ".tar.idx")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What datamat wrote.

    Attributes:
        made_from: by name of the file, digests: of the content for what comes from the manifest alone, of the shard for
            what comes from a shard. Several while one is replaced by another; none while that is unknown.
    """

    made_from: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, output: pathlib.Path) -> Record | None:
        """Return the record of a directory, None where there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            value = read_json(work_folder(output) / "record.json")
            found = {name: tuple(map(str, digests)) for name, digests in value["sidecars"].items()}
            return cls({name: digests for name, digests in found.items() if _is_plain(name)})
        return None

    def write(self, output: pathlib.Path) -> None:
        """Write the record of a directory, in one step."""
        value: Any = {"sidecars": {name: list(digests) for name, digests in self.made_from.items()}}
        with commit(work_folder(output) / "record.json") as file:
            file.write(render_json(value))

    def owns(self, name: str, digest: str) -> bool:
        """Tell whether a file with that content is datamat's."""
        return name in self.made_from and (name not in DOCUMENTS or digest in self.made_from[name])


def _is_plain(name: str) -> bool:
    """Tell whether a name can only be that of a sidecar: a record may come from anywhere, and files go by it."""
    return "/" not in name and name != "manifest.json" and name.endswith(_ENDINGS)


def work_folder(output: pathlib.Path) -> pathlib.Path:
    """Return the folder of the record, and of files that have no name yet."""
    return output / ".datamat" / "sidecars"
