"""Reads datasets of LeRobot: each episode is a sample, with arrays for its frames, and a video for each camera.

    meta/info.json                            version, frames per second, features, patterns of the other paths
    meta/episodes/chunk-000/file-000.parquet  length of each episode, and where its frames and videos lie
    meta/tasks.parquet                        the texts of the tasks, by number
    data/chunk-000/file-000.parquet           frames of several episodes, a row each
    videos/KEY/chunk-000/file-000.mp4         frames of a camera, episode after episode

That is version 3. In version 2, each episode has files of its own, and the tables in `meta` are JSON Lines. Fields are
those of src/lerobot/datasets in lerobot 0.4.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from datamat.directory.files import path_inside
from datamat.errors import CorruptDataError, SchemaError, SourceError, count_of
from datamat.features import Image, Json, ListOf, Scalar, Tensor, Text, Video
from datamat.features.video import stretch_of_video
from datamat.values import frozen
from datamat.writers.arrow import ArrowSource, TableFiles
from datamat.writers.base import DataSource
from datamat.writers.parquet import ParquetFiles
from datamat.writers.paths import SourceFile
from datamat.writers.records import read_document
from datamat.writers.unpacking import SpoolOptions

if TYPE_CHECKING:
    from datamat.features import Feature


INFO_FILE = "meta/info.json"
_AGAIN = "copy or download the dataset again"


@frozen()
class Layout:
    """Where the frames of a dataset lie.

    Attributes:
        folder: the dataset.
        info: what its `meta/info.json` holds.
        episodes: a row of `meta/episodes` for each episode, in their order.
        tasks: the texts of the tasks, by number.
    """

    folder: pathlib.Path
    info: Mapping[str, Any]
    episodes: Sequence[Mapping[str, Any]]
    tasks: Mapping[int, str]

    def tables(self) -> list[pathlib.Path]:
        """Return the files of the frames, in the order of the episodes."""
        return list(dict.fromkeys(self._path("data_path", episode, "data") for episode in self.episodes))

    def videos(self, key: str) -> list[tuple[pathlib.Path, float]]:
        """Return the file of a camera for each episode, and when the episode begins in it, in seconds."""
        place = f"videos/{key}"
        return [
            (self._path("video_path", episode, place, key), float(episode.get(f"{place}/from_timestamp", 0)))
            for episode in self.episodes
        ]

    def _path(self, pattern: str, episode: Mapping[str, Any], place: str, video_key: str = "") -> pathlib.Path:
        """Return the path of the file that holds an episode, given what the columns of its place begin with."""
        name = self.info[pattern].format(
            video_key=video_key,
            chunk_index=episode.get(f"{place}/chunk_index"),
            file_index=episode.get(f"{place}/file_index"),
            episode_chunk=episode["episode_index"] // self.info["chunks_size"],
            episode_index=episode["episode_index"],
        )
        return path_inside(self.folder, name, self.folder / INFO_FILE)

    def splits(self) -> list[str | None]:
        """Return the split of each episode, as `"splits": {"train": "0:180", "val": "180:200"}` says it."""
        numbers = range(len(self.episodes))
        found: dict[int, str] = {}
        for split, text in (self.info.get("splits") or {}).items():
            start, _, stop = str(text).partition(":")
            for number in numbers[int(start or 0) : int(stop) if stop else None]:
                if found.setdefault(number, split) != split:
                    raise SourceError(
                        f"{self.folder / INFO_FILE}: episode {number} is in the splits {found[number]!r} and "
                        f"{split!r}; correct its splits"
                    )
        if found and len(found) < len(numbers):
            without = next(number for number in numbers if number not in found)
            raise SourceError(f"{self.folder / INFO_FILE}: episode {without} is in no split; correct its splits")
        return [found.get(number) for number in numbers]


@final
class EpisodesSource(DataSource):
    """The episodes of a dataset of LeRobot."""

    keys_are_places = True
    has_schema = True
    identity = "episodes of LeRobot"  # in files whose content counts

    def __init__(self, layout: Layout, described: Sequence[pathlib.Path]) -> None:
        specs = layout.info["features"]
        self._fps = float(layout.info["fps"])
        self._tasks = layout.tasks
        self._splits = layout.splits()
        self._numbers = [int(episode["episode_index"]) for episode in layout.episodes]
        self._ends = [0, *itertools.accumulate(int(episode["length"]) for episode in layout.episodes)]
        self._videos = {name: layout.videos(name) for name, spec in specs.items() if spec["dtype"] == "video"}
        tables = [_file(layout.folder, path) for path in layout.tables()]
        self._folder = layout.folder
        self._listed = [*tables, *(_file(layout.folder, path) for path in described)]
        self.files = {file.name: file.path for file in self._listed}
        self._frames = ArrowSource(TableFiles(tables, ParquetFiles()))
        if len(self._frames) != self._ends[-1]:
            raise SourceError(
                f"{layout.folder}: its tables hold {count_of(len(self._frames), 'frame')}, and its episodes have "
                f"{self._ends[-1]}; {_AGAIN}, or call finalize() where it is recorded"
            )
        found = {name: self._feature_of(name, spec) for name, spec in specs.items()}
        found |= {"episode_index": Scalar("int64"), "task": ListOf(Text())}  # of each frame
        self.features = {name: feature for name, feature in found.items() if feature is not None}
        self.refused = {
            name: f"field {name!r} is {specs[name]['dtype']} of LeRobot, which is not read here; leave it out with "
            f"drop=[{name!r}]"
            for name in found.keys() - self.features.keys()
        }  # fmt: skip
        self._names = list(found)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> dict[str, Any]:
        start, end = self._ends[position : position + 2]
        frames = self._frames.rows(np.arange(start, end))
        numbers = {*np.asarray(frames["episode_index"]).tolist()}
        if numbers != {self._numbers[position]}:
            raise CorruptDataError(
                f"frames {start} to {end} are those of the episodes {sorted(numbers)}, where {self._numbers[position]} "
                f"should be; {_AGAIN}"
            )
        return {name: self._value(name, position, end - start, frames) for name in self._names}

    def field_names(self) -> list[str]:
        return self._names

    def narrow(self, names: Collection[str]) -> None:
        self._names = [name for name in self._names if name in names]
        self._frames.narrow({*names, "episode_index", "task_index"})
        paths = dict.fromkeys(path for name in self._videos if name in names for path, _ in self._videos[name])
        videos = [_file(self._folder, path) for path in paths]
        self.files = {file.name: file.path for file in (*self._listed, *videos)}

    def keys_and_splits(self) -> Iterator[tuple[str, str | None]]:
        return ((f"episode-{number:06d}", split) for number, split in zip(self._numbers, self._splits, strict=True))

    def _feature_of(self, name: str, spec: Mapping[str, Any]) -> Feature | None:
        kind, shape = spec["dtype"], tuple(map(int, spec["shape"]))
        if kind == "video":
            sizes = dict(zip(spec.get("names") or (), shape, strict=False))
            return Video((sizes.get("height"), sizes.get("width")), fps=self._fps, decoded=False)
        if kind in {"image", "string"}:
            return ListOf(Image() if kind == "image" else Text())
        with contextlib.suppress(SchemaError):
            return Tensor((None, *(() if shape == (1,) else shape)), kind)  # LeRobot stores shape (1,) as a number
        return Json() if isinstance(self._frames.features.get(name), Json) else None

    def _value(self, name: str, position: int, count: int, frames: Mapping[str, Any]) -> Any:
        if name in self._videos:
            path, start_s = self._videos[name][position]
            return stretch_of_video(str(path), start_s, count, self._fps)
        if name == "episode_index":
            return self._numbers[position]
        if name == "task":
            return [self._tasks[number] for number in np.asarray(frames["task_index"]).tolist()]
        found, feature = frames[name], self.features.get(name)
        if not isinstance(feature, Tensor):
            return found
        values = np.asarray(found[0] if isinstance(found, tuple) else found, feature.dtype)
        return values.reshape(count, *feature.shape[1:])  # lists of lists come with any sizes


def _file(folder: pathlib.Path, path: pathlib.Path) -> SourceFile:
    if not path.is_file():
        raise SourceError(f"{path} does not exist; {_AGAIN}, with all of its episodes")
    return SourceFile(path.relative_to(folder).as_posix(), str(path))


def _rows(folder: pathlib.Path, path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the rows of a table about episodes or tasks, without the statistics of episodes."""
    _file(folder, path)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    from pyarrow import parquet

    with parquet.ParquetFile(path) as opened:
        names = [name for name in opened.schema_arrow.names if not name.startswith("stats/")]
        rows: list[dict[str, Any]] = opened.read(names, use_threads=False).to_pylist()
        return rows


def open_folder(folder: pathlib.Path, spool: SpoolOptions) -> DataSource:
    """Return the episodes of a folder that LeRobot recorded or downloaded.

    Raises:
        SourceError: it has another version, or is incomplete or damaged.
    """
    del spool
    info = read_document(folder / INFO_FILE)
    version = str(info.get("codebase_version") if isinstance(info, dict) else None)
    if version[:3] not in {"v2.", "v3."}:
        raise SourceError(
            f"{folder / INFO_FILE}: codebase_version is {version}; want v3.0 or v2.1: convert the dataset with the "
            "script of lerobot (convert_dataset_...), or name the kind of other files: Materializer('parquet', ...)"
        )
    is_old = version.startswith("v2.")
    of_episodes = [folder / "meta/episodes.jsonl"] if is_old else sorted(folder.glob("meta/episodes/*/*.parquet"))
    of_tasks = folder / f"meta/tasks.{'jsonl' if is_old else 'parquet'}"
    rows = [row for path in of_episodes for row in _rows(folder, path)]
    if not rows:
        raise SourceError(f"{folder / 'meta'} lists no episodes; {_AGAIN}, or call finalize() where it is recorded")
    # In version 3, the text of a task is the index of a table of pandas, whatever its name.
    tasks = {row.pop("task_index"): next(iter(row.values())) for row in _rows(folder, of_tasks)}
    layout = Layout(folder, info, sorted(rows, key=lambda row: row["episode_index"]), tasks)
    return EpisodesSource(layout, [folder / INFO_FILE, of_tasks, *of_episodes])
