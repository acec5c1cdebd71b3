"""The one task of the comparison: pictures in folders of classes, made smaller, as shards with their labels.

Two environment variables let `compare.py` look on and interfere: `COMPARISON_LOG` names a file that gets a line for
each picture that is worked on, and `COMPARISON_KILL` a picture whose first reader is killed.
"""

import os
import pathlib
import signal

import cv2
import numpy as np

CLASSES = ("disc", "square")


def draw(folder: pathlib.Path, count: int) -> None:
    """Write `count` PNG files of 640 × 480 below `folder/CLASS/`."""
    for label in CLASSES:
        (folder / label).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = np.random.default_rng(number)
        image = cv2.resize(rng.integers(0, 120, (30, 40, 3)).astype(np.uint8), (640, 480))
        image += rng.integers(0, 30, image.shape).astype(np.uint8)
        label, (left, top), colour = CLASSES[number % 2], rng.integers(100, 380, 2).tolist(), (250, 200, 80)
        if label == "disc":
            cv2.circle(image, (left, top), 60, colour, -1)
        else:
            cv2.rectangle(image, (left - 50, top - 50), (left + 50, top + 50), colour, -1)
        cv2.imwrite(str(folder / label / f"{number:05d}.png"), image)


def files(source: str) -> list[str]:
    """Return the pictures in order."""
    return sorted(str(path) for path in pathlib.Path(source).glob("*/*.png"))


def sample(path: str) -> dict:
    """Return the picture, 256 × 192 as JPEG, and the number of its class."""
    if log := os.environ.get("COMPARISON_LOG"):
        with open(log, "a") as file:
            file.write(f"{path}\n")
    if (wanted := os.environ.get("COMPARISON_KILL")) and path.endswith(wanted):
        mark = pathlib.Path(os.environ["COMPARISON_LOG"] + ".killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    small = cv2.resize(cv2.imread(path), (256, 192), interpolation=cv2.INTER_AREA)
    return {"image": cv2.imencode(".jpg", small)[1].tobytes(), "label": CLASSES.index(path.split("/")[-2])}
