"""Draws the pictures of docs/looking.md, docs/tutorial.md and docs/audio.md: `python docs/pictures.py`.

Needs the extras audio and video, Chromium, and a font with Korean letters for it.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

import albumentations
import cv2
import numpy as np
from datamat import (
    Audio,
    BBoxes,
    ClassLabel,
    Features,
    Image,
    Keypoints,
    ListOf,
    Mask,
    Materializer,
    Polygons,
    Scalar,
    Tensor,
    Text,
    Video,
    load,
    materialize,
    view,
)
from datamat.view import ViewPage

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "examples"))

from street import BICYCLIST, CAR, PEDESTRIAN, SIGN, draw_pair, make_street_set  # noqa: E402 -- of the examples

CLASSES = (
    "하늘",
    "건물",
    "기둥",
    "도로",
    "보도",
    "나무",
    "표지판",
    "울타리",
    "자동차",
    "보행자",
    "자전거",
)
KINDS = {CAR: "자동차", PEDESTRIAN: "보행자", BICYCLIST: "자전거", SIGN: "표지판"}
STREET = Features(
    {
        "image": Image(),
        "mask": Mask(names=CLASSES),
        "boxes": BBoxes(),
        "box_labels": ListOf(ClassLabel(names=tuple(KINDS.values()))),
        "scores": ListOf(Scalar("float32")),
        "caption": Text(),
        "weather": ClassLabel(names=("맑음", "흐림")),
    }
)
FACE = ("left eye", "right eye", "nose", "mouth")


def street(number: int) -> dict[str, object]:
    """Return a picture with its mask and a box around each larger thing."""
    image, mask = draw_pair(3, number, (240, 320))
    boxes, labels, scores = [], [], []
    rng = np.random.default_rng(number)
    for label, kind in enumerate(KINDS):
        _, _, found, _ = cv2.connectedComponentsWithStats(
            (mask == kind).astype(np.uint8)
        )
        for left, top, width, height, area in found[1:].tolist():
            if area > 300:
                boxes.append(
                    [top / 240, left / 320, (top + height) / 240, (left + width) / 320]
                )
                labels.append(label)
                scores.append(rng.uniform(0.6, 1))
    return {
        "image": image,
        "mask": mask.clip(0, 10),
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "box_labels": np.array(labels, np.int64),
        "scores": np.array(scores, np.float32),
        "caption": f"거리 장면 {number}: 자동차와 보행자가 있는 도로",
        "weather": number % 2,
    }


def face(number: int) -> dict[str, object]:
    """Return a drawn face with its points and its outline."""
    rng = np.random.default_rng(number)
    image = np.full((200, 200, 3), rng.integers(150, 220, 3), np.uint8)
    x, y, size = (float(value) for value in rng.uniform([90, 90, 50], [110, 110, 70]))
    points = np.array([[-0.4, -0.3], [0.4, -0.3], [0, 0.15], [0, 0.5]]) * size + (x, y)
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    outline = np.stack([x + size * 0.85 * np.cos(turns), y + size * np.sin(turns)], 1)
    cv2.fillPoly(image, [outline.round().astype(np.int32)], (236, 198, 168))
    for px, py in points[:2]:
        cv2.circle(image, (round(px), round(py)), 6, (60, 40, 30), -1, cv2.LINE_AA)
    cv2.ellipse(
        image,
        (round(x), round(y + size / 2)),
        (round(size / 3), 7),
        0,
        0,
        180,
        (150, 50, 50),
        3,
        cv2.LINE_AA,
    )
    return {
        "image": image,
        "points": points.astype(np.float32),
        "outline": [outline.astype(np.float32)],
    }


def sound(number: int) -> dict[str, object]:
    """Return a rising tone with an echo."""
    times = np.arange(16_000) / 16_000
    tone = np.sin(2 * np.pi * (300 + 1_500 * (number + 1) * times) * times) * np.exp(
        -2 * (times * 4 % 1)
    )
    return {
        "sound": (0.6 * tone).astype(np.float32),
        "text": ["안녕하세요", "도레미파솔라시도"][number % 2],
    }


def clip(number: int) -> dict[str, object]:
    """Return a drive along a street."""
    image, _ = draw_pair(5, number, (120, 360))
    return {
        "video": np.stack([image[:, 8 * step : 160 + 8 * step] for step in range(24)]),
        "view": "left to right",
    }


def volume(number: int) -> dict[str, object]:
    """Return a volume with balls in it."""
    place = np.stack(np.meshgrid(*[np.linspace(-1, 1, 48)] * 3, indexing="ij"))
    rng = np.random.default_rng(number)
    centres, sizes = rng.uniform(-0.6, 0.6, (9, 3)), rng.uniform(0.1, 0.4, 9)
    balls = [
        np.exp(-(((place - c[:, None, None, None]) / s) ** 2).sum(0))
        for c, s in zip(centres, sizes, strict=True)
    ]
    return {"volume": np.sum(balls, 0).astype(np.float32), "organ": "phantom"}


def save(picture: np.ndarray, name: str, quality: int = 80) -> None:
    """Write a picture as a small JPEG file beside this script."""
    cv2.imwrite(
        str(DOCS / name), picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality]
    )


def browse(out: pathlib.Path, page: ViewPage) -> None:
    """Draw a page as a browser shows it."""
    page.save(out / "page.html")
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
    ]
    command += [
        f"--user-data-dir={out / 'profile'}",
        f"--screenshot={out / 'page.png'}",
        "--window-size=1240,640",
    ]
    subprocess.run(  # noqa: S603 -- our own page
        [*command, (out / "page.html").as_uri()],
        check=True,
        capture_output=True,
        timeout=100,
    )
    save(cv2.imread(str(out / "page.png"))[..., ::-1], "look-page.jpg")


def draw_page(folder: pathlib.Path, page: str, saved: str) -> None:
    """Run the code of a page as far as it saves a picture, which becomes that of the page."""
    folder.mkdir()
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    last = next(n for n, block in enumerate(blocks) if f'save("{saved}")' in block)
    script = folder / "page.py"
    script.write_text("\n".join(blocks[: last + 1]))
    subprocess.run([sys.executable, script], cwd=folder, check=True)  # noqa: S603 -- our own page
    save(cv2.imread(str(folder / saved))[..., ::-1], f"{page}.jpg", quality=90)


def main() -> None:
    """Draw them all."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        draw_page(out / "tutorial", "tutorial", "parts.png")
        draw_page(out / "audio", "audio", "sounds.png")
        materialize(street, range(8), out / "street", features=STREET, progress=False)
        browse(out, view(out / "street", count=4))
        save(load(out / "street").preview(3, columns=3).array, "look-street.jpg")

        rows = []
        for name, fn, features in (
            (
                "face",
                face,
                {
                    "image": Image(),
                    "points": Keypoints((4, 2), names=FACE),
                    "outline": Polygons(),
                },
            ),
            ("sound", sound, {"sound": Audio(16_000, 1), "text": Text()}),
            ("clip", clip, {"video": Video(fps=12), "view": Text()}),
            (
                "volume",
                volume,
                {"volume": Tensor((48, 48, 48), "float32"), "organ": Text()},
            ),
        ):
            materialize(
                fn, range(2), out / name, features=Features(features), progress=False
            )
            rows.append(load(out / name).preview(2, columns=2).array)
        for name, pair in (
            ("look-face-sound", rows[:2]),
            ("look-video-volume", rows[2:]),
        ):
            width = max(row.shape[1] for row in pair)
            padded = [
                np.pad(
                    row,
                    ((0, 0), (0, width - row.shape[1]), (0, 0)),
                    constant_values=255,
                )
                for row in pair
            ]
            save(np.concatenate(padded), f"{name}.jpg")

        make_street_set(out / "camvid", 8, size=(240, 320))
        transform = albumentations.Compose(
            [
                albumentations.HorizontalFlip(p=0.5),
                albumentations.RandomCrop(200, 260),
                albumentations.RandomBrightnessContrast(0.3, p=1),
            ]
        )
        job = Materializer(
            "camvid",
            out / "camvid",
            out / "made",
            transform=transform,
            copies={"train": 4},
        )
        save(job.preview(2, copies=3).array, "look-before-after.jpg")


if __name__ == "__main__":
    main()
