"""Episodes of a robot, as LeRobot records them, become shards; a training loop reads a frame and the actions after it.

    pip install 'datamat[video]'
    python examples/robots.py [FOLDER]

Without a folder, it first records a square that is pushed around, in the layout of LeRobot 3.0.
"""

import json
import pathlib
import sys

import av
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from datamat import Materializer, Video, load

FPS, SIZE, CAMERA = 10, 64, "observation.images.top"
LENGTH = 4  # actions that a policy predicts at a time


def record(folder: pathlib.Path, num_episodes: int = 12) -> None:
    """Write what `LeRobotDataset` does: all frames in one table and one video."""
    kinds = {"observation.state": ("float32", 2), "action": ("float32", 2), "timestamp": ("float32", 1)}
    kinds |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), ("int64", 1))
    features = {name: {"dtype": dtype, "shape": [size], "names": None} for name, (dtype, size) in kinds.items()}
    features[CAMERA] = {"dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"]}
    rng, frames, episodes = np.random.default_rng(0), [], []
    for path in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{CAMERA}/chunk-000"):
        (folder / path).mkdir(parents=True)
    with av.open(folder / f"videos/{CAMERA}/chunk-000/file-000.mp4", "w") as file:
        stream = file.add_stream("mpeg4", rate=FPS, options={"g": "2"})
        stream.height, stream.width, stream.pix_fmt = SIZE, SIZE, "yuv420p"
        for number in range(num_episodes):
            start, count, state = len(frames), 2 * int(rng.integers(5, 12)), rng.uniform(8, 40, 2)
            for time in range(count):
                action = rng.uniform(-2, 2, 2)
                row = {"observation.state": state, "action": action, "timestamp": time / FPS, "frame_index": time}
                frames.append(row | {"episode_index": number, "index": len(frames), "task_index": 0})
                pixels, (top, left) = np.zeros((SIZE, SIZE, 3), np.uint8), state.astype(int)
                pixels[top : top + 12, left : left + 12] = 60 + number * 15
                file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                state = np.clip(state + action, 0, SIZE - 12)
            row = {"episode_index": number, "length": count, f"videos/{CAMERA}/from_timestamp": start / FPS}
            for kind in ("data", f"videos/{CAMERA}"):
                row |= {f"{kind}/chunk_index": 0, f"{kind}/file_index": 0}
            episodes.append(row)
        file.mux(stream.encode())
    info = {"codebase_version": "v3.0", "fps": FPS, "chunks_size": 1000, "features": features}
    info["splits"] = {"train": f"0:{num_episodes - 2}", "val": f"{num_episodes - 2}:{num_episodes}"}
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (folder / "meta/info.json").write_text(json.dumps(info))
    types = {name: getattr(pa, dtype)() for name, (dtype, _) in kinds.items()}
    schema = pa.schema(
        {name: pa.list_(types[name], size) if size > 1 else types[name] for name, (_, size) in kinds.items()}
    )
    parquet.write_table(pa.Table.from_pylist(frames, schema), folder / "data/chunk-000/file-000.parquet")
    parquet.write_table(pa.Table.from_pylist(episodes), folder / "meta/episodes/chunk-000/file-000.parquet")
    parquet.write_table(pa.table({"task_index": [0], "task": ["push the square"]}), folder / "meta/tasks.parquet")


def window(sample: dict, rng: np.random.Generator) -> dict:
    """A frame from a random place, and the actions from there on."""
    time = int(rng.integers(len(sample["action"]) - LENGTH))
    return {
        "image": Video().frames(sample[CAMERA], [time])[0],
        "state": sample["observation.state"][time],
        "actions": sample["action"][time : time + LENGTH],
        "task": sample["task"][time],
    }


def main() -> None:
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "pusht")
    if not folder.exists():
        record(folder)
    print(Materializer("lerobot", folder, "episodes").run(progress=False))
    train = load("episodes", "train")
    print(f"{len(train)} episodes, {sum(len(sample['action']) for sample in train)} frames")
    for batch in train.to_numpy(batch_size=4, shuffle=True, seed=1, transform=window):
        print(f"a batch {batch['image'].dtype} {batch['image'].shape}, actions {batch['actions'].shape}")
        break


if __name__ == "__main__":
    main()
