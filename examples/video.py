"""A folder of videos becomes shards that keep the files, and a training loop reads another clip of each in each epoch.

    pip install 'datamat[video]'
    python examples/video.py [FOLDER]

Without a folder, it films a few moving squares first, as MP4 files of 25 frames per second.
"""

import pathlib
import sys

import av
import numpy as np

from datamat import Text, Video, load, materialize

LENGTH = 8  # frames of a clip


def film(path: pathlib.Path, rng: np.random.Generator) -> None:
    """Write what a camera would: a square that moves to one side."""
    height, width, size = 48, 64, 12
    with av.open(path, "w") as file:
        stream = file.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        top, speed, colour = int(rng.integers(height - size)), int(rng.integers(1, 4)), rng.integers(80, 255, 3)
        for number in range(int(rng.integers(12, 30))):
            pixels = np.zeros((height, width, 3), np.uint8)
            left = number * speed % (width - size)
            pixels[top : top + size, left : left + size] = colour
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())


def read(path: pathlib.Path) -> dict[str, object]:
    return {"video": path.read_bytes(), "name": path.stem}


def clip(sample: dict, rng: np.random.Generator) -> dict:
    """Frames in a row from a random place."""

    def numbers(num_frames: int) -> range:
        start = int(rng.integers(max(num_frames - LENGTH, 0) + 1))
        return range(start, min(start + LENGTH, num_frames))

    return {**sample, "video": Video().frames(sample["video"], numbers)}


folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "films")
if not folder.exists():
    folder.mkdir()
    for place in range(12):
        film(folder / f"film-{place:02d}.mp4", np.random.default_rng(place))
features = {"video": Video(decoded=False), "name": Text()}
print(materialize(read, sorted(folder.glob("*.mp4")), "videos", features=features, progress=False))

dataset = load("videos")
dataset.preview(4).save("films.png")
print(f"{len(dataset)} videos, {sum(len(Video().frames(sample['video'])) for sample in dataset)} frames")
for batch in dataset.to_numpy(batch_size=4, shuffle=True, seed=1, transform=clip):
    videos = np.stack(batch["video"])
    print(f"a batch {videos.dtype} {videos.shape}")
    break
