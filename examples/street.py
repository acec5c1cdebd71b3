"""Draws a street dataset in the layout of CamVid, so that the examples run without a download.

    python examples/street.py OUT --pairs 300

A scene is built in metres (x to the right, y up, z ahead of the camera) and drawn from far to near through a pinhole
camera, picture and mask at once, so that they agree. Each pair depends on the seed and its number alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
from typing import TYPE_CHECKING

import cv2
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SKY, BUILDING, POLE, ROAD, PAVEMENT, TREE, SIGN, FENCE, CAR, PEDESTRIAN, BICYCLIST, UNLABELLED = range(12)

_EYE = 1.5  # metres above the road
_NEAR, _FAR = 1.2, 120.0
_SHARES = {"train": 0.6, "val": 0.15, "test": 0.25}
_BRICKS = [
    (150, 96, 78),
    (176, 150, 118),
    (128, 118, 108),
    (196, 182, 158),
    (110, 84, 74),
    (158, 164, 166),
    (92, 96, 104),
]
_PAINTS = [(168, 28, 30), (32, 60, 120), (34, 36, 40), (196, 198, 202), (236, 236, 232), (96, 104, 110), (30, 84, 64)]
_CLOTHES = [(40, 44, 60), (120, 40, 44), (60, 92, 140), (200, 190, 170), (70, 110, 70), (30, 30, 32), (180, 120, 50)]
_SKINS = [(224, 178, 150), (190, 138, 106), (126, 84, 62), (242, 204, 180)]

Point = tuple[float, float, float]  # x to the right, y up, z ahead, in metres


def make_street_set(
    folder: str | pathlib.Path, num_pairs: int = 300, seed: int = 0, size: tuple[int, int] = (360, 480)
) -> pathlib.Path:
    """Write a street set: `train/`, `trainannot/`, `train.txt` and the same for `val` and `test`.

    Args:
        folder: made if missing; files of the same names are replaced.
        num_pairs: of pictures and masks, over all splits.
        seed: another one gives other streets.
        size: (height, width) in pixels.

    Returns:
        The folder.
    """
    root = pathlib.Path(folder)
    bounds = np.round(np.cumsum([0, *_SHARES.values()]) * num_pairs).astype(int)
    for split, start, stop in zip(_SHARES, bounds[:-1], bounds[1:], strict=True):
        for side in (split, f"{split}annot"):
            (root / side).mkdir(parents=True, exist_ok=True)
        lines = []
        for number in range(start, stop):
            name = f"{number // 60 + 1:04d}ST_{number % 60 * 30:06d}.png"
            image, mask = draw_pair(seed, number, size)
            _save(root / split / name, image[..., ::-1])
            _save(root / f"{split}annot" / name, mask)
            lines.append(f"/SegNet/CamVid/{split}/{name} /SegNet/CamVid/{split}annot/{name}\n")
        (root / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
    return root


def draw_pair(seed: int, number: int, size: tuple[int, int] = (360, 480)) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture, uint8 (height, width, 3) RGB, and its mask of CamVid's class ids, uint8 (height, width)."""
    scene = _Scene.of(np.random.default_rng([seed, number]), size)
    _draw_sky(scene)
    _draw_ground(scene)
    for _, draw in sorted(_things(scene), key=lambda thing: -thing[0]):
        draw()
    return _developed(scene), scene.mask


def _save(path: pathlib.Path, pixels: np.ndarray) -> None:
    done, data = cv2.imencode(".png", pixels, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    if not done:
        raise ValueError(f"{path}: cv2 cannot encode {pixels.dtype} {pixels.shape}")
    path.write_bytes(data.tobytes())


@dataclasses.dataclass
class _Scene:
    """A street, its light, and the two canvases it is drawn on."""

    rng: np.random.Generator
    image: np.ndarray
    mask: np.ndarray
    centre: float
    horizon: float
    focal: float
    road: float  # half its width, in metres
    pavement: float  # its width, in metres
    sky: np.ndarray
    haze: np.ndarray
    sun: int  # the side that is in the light: -1 left, 1 right

    @classmethod
    def of(cls, rng: np.random.Generator, size: tuple[int, int]) -> _Scene:
        height, width = size
        blue = rng.random()
        return cls(
            rng=rng,
            image=np.zeros((height, width, 3), np.uint8),
            mask=np.full((height, width), UNLABELLED, np.uint8),
            centre=width * rng.uniform(0.42, 0.58),
            horizon=height * rng.uniform(0.42, 0.5),
            focal=width * rng.uniform(0.72, 0.9),
            road=rng.uniform(3.6, 5.2),
            pavement=rng.uniform(2.2, 3.8),
            sky=np.array([150, 170, 190]) * (1 - blue) + np.array([84, 138, 204]) * blue,
            haze=np.array([212, 216, 218]) * (1 - blue) + np.array([200, 214, 228]) * blue,
            sun=int(rng.choice([-1, 1])),
        )

    def one_of(self, colours: list[tuple[int, int, int]]) -> np.ndarray:
        """Return one of some colours, by chance."""
        return np.array(colours[self.rng.integers(len(colours))])

    def pixels(self, points: list[Point]) -> np.ndarray:
        """Return int32 (n, 2), x and y in sixteenths of a pixel, of points in metres."""
        focal, x0, y0 = 16 * self.focal, 16 * self.centre, 16 * self.horizon
        return np.array([(x0 + focal * x / z, y0 + focal * (_EYE - y) / z) for x, y, z in points]).astype(np.int32)

    def fill(self, polygons: list[list[Point]], colour: object, kind: int | None = None, light: float = 1.0) -> None:
        """Fill polygons, given in metres, in one colour; `kind` None leaves the mask alone."""
        if not polygons:
            return
        corners = [self.pixels(polygon) for polygon in polygons]
        depth = math.sqrt(polygons[0][0][2] * polygons[-1][2][2])  # in the middle, as it is seen
        cv2.fillPoly(self.image, corners, self.faded(colour, depth, light), cv2.LINE_AA, 4)
        if kind is not None:
            cv2.fillPoly(self.mask, corners, kind, cv2.LINE_8, 4)

    def shape(self, x: float, z: float, outline: list[float], colour: object, kind: int | None = None) -> None:
        """Fill a shape that faces the camera, given by [x, y, x, y, ...] from the point (x, 0, z)."""
        self.fill([[(x + dx, y, z) for dx, y in zip(outline[::2], outline[1::2], strict=True)]], colour, kind)

    def disc(self, x: float, y: float, z: float, radius: tuple[float, float], colour: object, kind: int) -> None:
        """Fill an ellipse that faces the camera; radius across and upwards, in metres."""
        centre = self.pixels([(x, y, z)])[0].tolist()
        axes = [max(round(16 * part * self.focal / z), 8) for part in radius]
        cv2.ellipse(self.image, centre, axes, 0, 0, 360, self.faded(colour, z), -1, cv2.LINE_AA, 4)
        cv2.ellipse(self.mask, centre, axes, 0, 0, 360, kind, -1, cv2.LINE_8, 4)

    def faded(self, colour: object, z: float, light: float = 1.0) -> tuple[float, ...]:
        """Return a colour as it is seen through z metres of air."""
        air = 1 - math.exp(-z / 140)
        mixed = (light * part * (1 - air) + haze * air for part, haze in zip(colour, self.haze, strict=True))
        return tuple(min(max(part, 0.0), 255.0) for part in mixed)

    def wall_light(self, side: int) -> float:
        """Return how bright the walls on a side are (-1 left, 1 right): lit are those across from the sun."""
        return 0.72 if side == self.sun else 1.12


def _upright(x0: float, x1: float, y0: float, y1: float, z: float) -> list[Point]:
    return [(x0, y0, z), (x1, y0, z), (x1, y1, z), (x0, y1, z)]


def _along(x: float, y0: float, y1: float, z0: float, z1: float) -> list[Point]:
    return [(x, y0, z0), (x, y0, z1), (x, y1, z1), (x, y1, z0)]


def _flat(x0: float, x1: float, z0: float, z1: float) -> list[Point]:
    return [(x0, 0, z0), (x1, 0, z0), (x1, 0, z1), (x0, 0, z1)]


# ---- sky and ground


def _draw_sky(scene: _Scene) -> None:
    width, rows = scene.mask.shape[1], round(scene.horizon) + 1
    share = (np.linspace(0, 1, rows, dtype=np.float32) ** 1.4)[:, None, None]
    sky = np.broadcast_to(scene.sky * (1 - share) + scene.haze * share, (rows, width, 3))
    if scene.rng.random() < 0.7:
        cloud = _noise(scene.rng, (rows, width), cells=5) + 0.5 * _noise(scene.rng, (rows, width), cells=14)
        cover = np.clip(cloud - 0.15, 0, 0.8)[..., None] * (1 - share)
        sky = sky + (244 - sky) * cover
    scene.image[:rows] = sky
    scene.mask[:rows] = SKY


def _draw_ground(scene: _Scene) -> None:
    rng, edge, kerb = scene.rng, scene.road, scene.road + 0.18
    grey, out = rng.uniform(84, 124), scene.road + scene.pavement
    scene.fill([_flat(-160, 160, _NEAR, 9 * _FAR)], (128, 126, 116), PAVEMENT)
    for side in (-1, 1):
        scene.fill([_flat(side * edge, side * out, _NEAR, _FAR)], (168, 162, 154))
        joints = [_flat(side * kerb, side * out, z, z + 0.03 + z / 150) for z in np.arange(1.5, 26, 1.2)]
        scene.fill(joints, (136, 132, 126))
        scene.fill([_flat(side * edge, side * kerb, _NEAR, _FAR)], (196, 192, 186))
    scene.fill([_flat(-edge, edge, _NEAR, 9 * _FAR)], (grey, grey, grey + 4), ROAD)
    for x, width in ((-edge * 0.5, 0.5), (edge * 0.5, 0.5), (-edge + 0.4, 0.3), (edge - 0.4, 0.3)):  # worn by wheels
        scene.fill([_flat(x - width, x + width, _NEAR, 9 * _FAR)], (grey - 7, grey - 7, grey - 4))
    paint = np.array([226, 224, 214]) * rng.uniform(0.85, 1)
    scene.fill([_flat(-0.07, 0.07, z, z + 2.4) for z in np.arange(_NEAR + rng.uniform(0, 5), 70, 5)], paint)
    if rng.random() < 0.6:
        yellow = (214, 196, 96) if rng.random() < 0.5 else paint
        scene.fill([_flat(side * (edge - 0.55), side * (edge - 0.42), _NEAR, _FAR) for side in (-1, 1)], yellow)
    if rng.random() < 0.3:
        z = rng.uniform(7, 20)
        scene.fill([_flat(x, x + 0.5, z, z + 2.6) for x in np.arange(-edge + 0.3, edge - 0.4, 1.0)], paint)
    if rng.random() < 0.75:
        _cast_shadow(scene)


def _cast_shadow(scene: _Scene) -> None:
    """Darken the ground beside the walls that stand in the sun's way."""
    reach, wall = scene.rng.uniform(0.2, 1.7) * scene.road, scene.road + scene.pavement
    corners: list[Point] = [(wall, 0, _NEAR), (wall, 0, _FAR)]
    for z, share in zip(np.linspace(70, _NEAR, 8), scene.rng.uniform(0.5, 1, 8), strict=True):
        corners += [(wall - reach * share, 0, z + 6), (wall - reach * share, 0, z)]
    cover = np.zeros_like(scene.mask)
    cv2.fillPoly(cover, [scene.pixels([(scene.sun * x, y, z) for x, y, z in corners])], 255, cv2.LINE_8, 4)
    cv2.copyTo(cv2.convertScaleAbs(scene.image, alpha=0.66, beta=8), cover, scene.image)


# ---- houses and trees


def _things(scene: _Scene) -> Iterator[tuple[float, Callable[[], None]]]:
    """Yield (how far back it is drawn, how to draw it); walls lie behind all that stands before them."""
    yield 4 * _FAR, lambda: _draw_backdrop(scene)
    for side in (-1, 1):
        yield from _block(scene, side)
        yield from _furniture(scene, side)
        yield from _traffic(scene, side)
    yield from _people(scene)


def _draw_backdrop(scene: _Scene) -> None:
    for x in np.arange(-60, 60, 8):
        height = scene.rng.uniform(4, 13)
        if scene.rng.random() < 0.5:
            _crown(scene, x, height * 0.5, _FAR, height * 0.6)
        else:
            scene.fill([_upright(x, x + 9, 0, height, _FAR)], scene.one_of(_BRICKS), BUILDING)


def _block(scene: _Scene, side: int) -> Iterator[tuple[float, Callable[[], None]]]:
    """Yield the houses of one side, and the trees and fences in the gaps between them."""
    rng, wall, z = scene.rng, side * (scene.road + scene.pavement), scene.rng.uniform(-6, 2)
    while z < _FAR - 10:
        start, end = max(z, _NEAR * 0.6), z + rng.uniform(7, 16)
        if rng.random() < 0.78:
            height = rng.uniform(6.5, 15)
            yield 2 * _FAR + z, functools.partial(_draw_house, scene, side, wall, start, end, height)
        else:
            yield 2 * _FAR + z, functools.partial(_draw_fence, scene, wall, start, end)
            for at in np.arange(max(z, 5) + 1, end, 4.5):
                spot = wall + side * rng.uniform(1.5, 4)
                yield 2 * _FAR + at, functools.partial(_draw_tree, scene, spot, at, rng.uniform(5, 9))
        z = end + (0.02 if rng.random() < 0.7 else rng.uniform(1, 4))


def _draw_house(scene: _Scene, side: int, wall: float, z0: float, z1: float, height: float) -> None:
    rng, light = scene.rng, scene.wall_light(side)
    tone = scene.one_of(_BRICKS) * rng.uniform(0.85, 1.15)
    glass = np.array([58, 70, 84]) + rng.uniform(-10, 24)
    scene.fill([_upright(wall, wall + side * 12, 0, height, z0)], tone, BUILDING, 0.82)
    scene.fill([_along(wall, 0, height, z0, z1)], tone, BUILDING, light)
    scene.fill([_along(wall, height - 0.5, height, z0, z1)], tone * 0.8 + 30, light=light)
    has_shop = rng.random() < 0.45
    columns = np.arange(z0 // 2.6 * 2.6 + 3.4, z1 - 1.6, 2.6 if rng.random() < 0.6 else 3.4)
    places = [(z, y) for y in np.arange(3.9 if has_shop else 1.1, height - 1.8, 3.0) for z in columns]
    panes = [_along(wall, y, y + 1.6, z, z + 1.1) for z, y in places]
    if z0 < 40:
        frames = [_along(wall, y - 0.12, y + 1.72, z - 0.12, z + 1.22) for z, y in places]
        scene.fill(frames, tone * 0.6 + 88, light=light)
    scene.fill(panes, glass, light=light)
    scene.fill([pane for pane in panes if rng.random() < 0.25], glass * 0.5 + 92, light=light)
    paint = scene.one_of(_PAINTS)
    if has_shop:
        scene.fill([_along(wall, 0.5, 2.7, z0 + 0.4, z1 - 0.4)], glass * 0.9, light=light)
        pillars = [_along(wall, 0, 2.8, z, z + 0.3) for z in np.arange(z0 + 0.4, z1 - 0.4, 2.5)]
        scene.fill(pillars, tone * 0.7, light=light)
        scene.fill([_along(wall, 2.7, 3.4, z0 + 0.2, z1 - 0.2)], paint, light=light)
    else:
        scene.fill([_along(wall, 0, 2.3, z, z + 1.1) for z in columns[1:2]], paint, light=light)


def _draw_fence(scene: _Scene, wall: float, z0: float, z1: float) -> None:
    tone = np.array([104, 92, 80]) * scene.rng.uniform(0.7, 1.2)
    scene.fill([_along(wall, 0, 1.3, z0, z1)], tone, FENCE)
    scene.fill([_along(wall, 0.05, 1.35, z, z + 0.1) for z in np.arange(z0, min(z1, 40), 0.5)], tone * 0.75)
    scene.fill([_along(wall, 1.25, 1.4, z0, z1)], tone * 1.25, FENCE)


def _draw_tree(scene: _Scene, x: float, z: float, height: float) -> None:
    thick, bark = 0.03 * height, np.array([86, 70, 56]) * scene.rng.uniform(0.7, 1.1)
    scene.shape(x, z, [-thick, 0, thick, 0, thick * 0.6, height * 0.6, -thick * 0.6, height * 0.6], bark, TREE)
    _crown(scene, x, height * 0.68, z, height * 0.34)


def _crown(scene: _Scene, x: float, y: float, z: float, radius: float) -> None:
    """Fill a crown with leaves, from large dark clumps inside to small ones that are brighter towards the sun."""
    rng, reach = scene.rng, 16 * radius * scene.focal / z
    green = np.array([58, 86, 40]) * rng.uniform(0.8, 1.25) + (rng.uniform(0, 30), 0, 0)
    count = int(np.clip(reach / 4, 6, 360))
    order, angle = np.linspace(0, 1, count), rng.uniform(0, 2 * np.pi, count)
    distance = np.sqrt(rng.random(count)) * (0.7 + 0.24 * order) * (1 + 0.14 * np.sin(3 * angle + rng.uniform(0, 6)))
    dx, dy = distance * np.cos(angle), 0.88 * distance * np.sin(angle)
    bright = 0.55 + 0.5 * order + 0.3 * (scene.sun * dx + dy) + rng.uniform(-0.16, 0.16, count)
    air = 1 - math.exp(-z / 140)
    shades = (bright[:, None] * green * (1 - air) + scene.haze * air).clip(0, 255).tolist()
    places = (scene.pixels([(x, y, z)]) + np.stack([reach * dx, -reach * dy], -1)).astype(int).tolist()
    sizes = reach * np.maximum(0.36 * (1 - order) ** 3, rng.uniform(0.03, 0.08, count)) + 8
    for place, size, shade in zip(places, sizes.astype(int).tolist(), shades, strict=True):
        cv2.circle(scene.image, place, size, shade, -1, cv2.LINE_8, 4)
        cv2.circle(scene.mask, place, size, TREE, -1, cv2.LINE_8, 4)


# ---- what stands at the kerb


def _furniture(scene: _Scene, side: int) -> Iterator[tuple[float, Callable[[], None]]]:
    rng, kerb = scene.rng, side * (scene.road + 0.5)
    for z in np.arange(rng.uniform(6, 20), 90, 24):
        yield z, functools.partial(_draw_lamp, scene, kerb, z)
    if rng.random() < 0.55:
        for z in np.arange(rng.uniform(9, 17), 70, rng.uniform(9, 15)):
            yield z, functools.partial(_draw_tree, scene, kerb * 1.08, z, rng.uniform(4.5, 7))
    for z in rng.uniform(6, 45, rng.integers(0, 4)):
        yield z, functools.partial(_draw_light if rng.random() < 0.35 else _draw_sign, scene, kerb, z)


def _draw_lamp(scene: _Scene, x: float, z: float) -> None:
    tone, reach = (92, 96, 98), -np.sign(x) * 1.6
    scene.shape(x, z, [-0.09, 0, 0.09, 0, 0.09, 7.2, -0.09, 7.2], tone, POLE)
    scene.shape(x, z, [0, 7.05, reach, 7.35, reach, 7.5, 0, 7.2], tone, POLE)
    scene.shape(x + reach, z, [-0.35, 7.3, 0.35, 7.3, 0.35, 7.5, -0.35, 7.5], (214, 212, 196), POLE)


def _draw_sign(scene: _Scene, x: float, z: float) -> None:
    top, kind = scene.rng.uniform(2.3, 2.9), scene.rng.integers(4)
    scene.fill([_upright(x - 0.045, x + 0.045, 0, top, z)], (136, 138, 140), POLE)
    if kind == 0:
        scene.disc(x, top, z, (0.36, 0.36), (196, 30, 36), SIGN)
        scene.disc(x, top, z, (0.26, 0.26), (236, 236, 232), SIGN)
    elif kind == 1:
        scene.shape(x, z, [-0.42, top - 0.3, 0.42, top - 0.3, 0, top + 0.42], (200, 34, 38), SIGN)
        scene.shape(x, z, [-0.25, top - 0.2, 0.25, top - 0.2, 0, top + 0.22], (238, 236, 226))
    elif kind == 2:
        scene.disc(x, top, z, (0.36, 0.36), (34, 74, 168), SIGN)
        scene.fill([_upright(x - 0.05, x + 0.05, top - 0.2, top + 0.2, z)], (236, 238, 240))
    else:
        scene.fill([_upright(x - 0.6, x + 0.6, top - 0.35, top + 0.35, z)], (28, 96, 70), SIGN)
        scene.fill([_upright(x - 0.45, x + 0.3, top + y, top + y + 0.1, z) for y in (-0.2, 0.08)], (226, 232, 228))


def _draw_light(scene: _Scene, x: float, z: float) -> None:
    scene.fill([_upright(x - 0.06, x + 0.06, 0, 2.5, z)], (70, 74, 76), POLE)
    scene.fill([_upright(x - 0.19, x + 0.19, 2.4, 3.4, z)], (30, 32, 34), SIGN)
    lit = scene.rng.integers(3)
    for number, colour in enumerate([(240, 60, 44), (250, 190, 60), (70, 220, 130)]):
        share = 1 if number == lit else 0.28
        scene.disc(x, 3.2 - 0.32 * number, z, (0.11, 0.11), np.array(colour) * share, SIGN)


# ---- cars and people


def _traffic(scene: _Scene, side: int) -> Iterator[tuple[float, Callable[[], None]]]:
    rng, z = scene.rng, scene.rng.uniform(4.5, 11)
    while z < 70:  # parked; on the left they look at the camera
        if rng.random() < 0.5:
            yield z, functools.partial(_draw_car, scene, side * (scene.road - 1.15), z, towards=side < 0)
        z += rng.uniform(5.4, 7)
    for z in rng.uniform(12, 60, rng.integers(0, 3)):
        yield z, functools.partial(_draw_car, scene, side * scene.road * 0.36, z, towards=side < 0)


def _draw_car(scene: _Scene, x: float, z: float, *, towards: bool) -> None:
    """Draw a car as a profile, extruded: the side that faces the middle of the street, then the end that is near."""
    rng = scene.rng
    paint, glass, dark = scene.one_of(_PAINTS) * rng.uniform(0.85, 1.1), (44, 54, 64), (26, 26, 28)
    long, tall, left, right = rng.uniform(3.7, 4.6), rng.uniform(1.38, 1.62), x - 0.88, x + 0.88
    near = [(0, 0.3), (0, 0.78), (1.1, 0.95), (1.9, tall)] if towards else [(0, 0.3), (0.05, 0.95), (0.55, tall)]
    far = [(long - 1.5, tall), (long - 0.6, 0.95), (long, 0.82), (long, 0.3)]
    side, light = (left, scene.wall_light(1)) if x > 0 else (right, scene.wall_light(-1))
    scene.fill([_flat(left - 0.25, right + 0.25, z - 0.2, z + long + 0.2)], (38, 38, 42))
    scene.fill([_along(side, 0, 0.5, z + 0.4, z + long - 0.4)], dark, CAR)
    scene.fill([[(side, y, z + dz) for dz, y in near + far]], paint, CAR, light)
    corners = [near[-2][0] + 0.25, near[-1][0] + 0.12, long - 1.6, long - 0.9]
    heights = [0.97, tall - 0.1, tall - 0.1, 0.97]
    scene.fill([[(side, y, z + dz) for dz, y in zip(corners, heights, strict=True)]], glass, light=light)
    turn = np.linspace(0, 2 * np.pi, 12)
    for radius, tone in ((0.33, dark), (0.17, (138, 140, 142))):
        ring = [(0.33 + radius * math.sin(a), radius * math.cos(a)) for a in turn]
        scene.fill([[(side, y, z + hub + dz) for y, dz in ring] for hub in (0.75, long - 0.8)], tone, CAR)
    scene.fill([_upright(a, a + 0.24, 0, 0.36, z + 0.05) for a in (left + 0.06, right - 0.3)], dark, CAR)
    for (dz0, y0), (dz1, y1) in zip(near[-2::-1], near[:0:-1], strict=True):
        panel = [(left, y0, z + dz0), (right, y0, z + dz0), (right, y1, z + dz1), (left, y1, z + dz1)]
        scene.fill([panel], paint, CAR, 0.92 + 0.1 * (dz1 - dz0))
    (dz0, y0), (dz1, y1) = near[-2:]
    low, high = z + dz0 + 0.04, z + dz1 - 0.04
    window = [(left + 0.14, y0, low), (right - 0.14, y0, low), (right - 0.2, y1, high), (left + 0.2, y1, high)]
    scene.fill([[(a, y + 0.05 - 0.12 * (y > 1), b) for a, y, b in window]], glass)
    lamp = (236, 236, 220) if towards else (176, 22, 26)
    scene.fill([_upright(a, a + 0.31, 0.58, 0.76, z) for a in (left + 0.05, right - 0.36)], lamp)
    scene.fill([_upright(x - 0.26, x + 0.26, 0.45, 0.57, z)], (226, 224, 206))
    scene.fill([_upright(left, right, 0.3, 0.38, z)], dark)


def _people(scene: _Scene) -> Iterator[tuple[float, Callable[[], None]]]:
    rng, road = scene.rng, scene.road
    for _ in range(rng.integers(1, 8)):
        x, z = rng.choice([-1, 1]) * (road + rng.uniform(0.7, scene.pavement - 0.3)), rng.uniform(5, 40)
        yield z, functools.partial(_draw_walker, scene, x, z)
    if rng.random() < 0.3:  # crossing
        x, z = rng.uniform(-0.8, 0.8) * road, rng.uniform(9, 24)
        yield z, functools.partial(_draw_walker, scene, x, z)
    if rng.random() < 0.35:
        x, z = rng.uniform(0.3, 0.62) * road * rng.choice([-1, 1]), rng.uniform(6, 18)
        yield z, functools.partial(_draw_cyclist, scene, x, z)


def _draw_walker(scene: _Scene, x: float, z: float) -> None:
    tall, step = scene.rng.uniform(1.5, 1.88), scene.rng.uniform(0.04, 0.2)
    legs, hip = scene.one_of(_CLOTHES) * 0.8, tall * 0.5
    scene.fill([_flat(x - 0.35, x + 0.35, z - 0.1, z + 0.25)], (60, 60, 62))
    for side in (-1, 1):
        foot, knee = side * step, side * 0.09
        scene.shape(x, z, [foot - 0.07, 0, foot + 0.09, 0, knee + 0.09, hip, knee - 0.09, hip], legs, PEDESTRIAN)
        scene.fill([_upright(x + foot - 0.08, x + foot + 0.11, 0, 0.08, z)], (32, 30, 30), PEDESTRIAN)
    _draw_upper(scene, x, z, tall * 0.47, tall, PEDESTRIAN)


def _draw_cyclist(scene: _Scene, x: float, z: float) -> None:
    dark, legs = (28, 28, 30), (50, 56, 72)
    scene.fill([_flat(x - 0.3, x + 0.3, z - 0.2, z + 1.2)], (52, 52, 54))
    scene.disc(x, 0.34, z, (0.045, 0.34), dark, BICYCLIST)
    scene.fill([_upright(x - 0.03, x + 0.03, 0.5, 0.95, z), _upright(x - 0.3, x + 0.3, 1.0, 1.05, z)], dark, BICYCLIST)
    for side, foot in ((-1, 0.22), (1, 0.5)):
        outline = [side * 0.1, foot, side * 0.2, foot, side * 0.18, 0.98, side * 0.02, 0.98]
        scene.shape(x, z, outline, legs, BICYCLIST)
    _draw_upper(scene, x, z, 0.95, 1.72, BICYCLIST)


def _draw_upper(scene: _Scene, x: float, z: float, hip: float, top: float, kind: int) -> None:
    """Draw arms, trunk and head, from the hip to the top of the head."""
    rng, neck, arm = scene.rng, top - 0.27, top - 0.36
    coat, skin = scene.one_of(_CLOTHES), scene.one_of(_SKINS)
    for side in (-1, 1):
        hand = side * rng.uniform(0.18, 0.28)
        outline = [side * 0.17, neck - 0.03, side * 0.26, arm, hand + side * 0.09, hip, hand, hip]
        scene.shape(x, z, outline, coat * 0.85, kind)
    trunk = [-0.17, hip - 0.05, 0.17, hip - 0.05, 0.19, arm, 0.15, neck, -0.15, neck, -0.19, arm]
    scene.shape(x, z, trunk, coat, kind)
    scene.disc(x, top - 0.13, z, (0.1, 0.135), skin, kind)
    scene.disc(x, top - 0.08, z, (0.11, 0.09), np.array([50, 38, 30]) * rng.uniform(0.5, 2.4), kind)


# ---- what the camera does to it


def _noise(rng: np.random.Generator, size: tuple[int, int], cells: int) -> np.ndarray:
    """Return smooth noise, float32 (height, width), about -1 to 1."""
    grid = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
    return cv2.resize(grid, size[::-1], interpolation=cv2.INTER_CUBIC)


def _developed(scene: _Scene) -> np.ndarray:
    """Return the picture with the texture of surfaces, the light of the day, vignette and sensor noise."""
    rng, (height, width) = scene.rng, scene.mask.shape
    grain = rng.standard_normal((height // 2, width // 2), np.float32)
    rough = np.array([0, 5, 3, 5, 5, 7, 2, 6, 1, 3, 3, 0], np.float32).take(scene.mask)
    rough *= cv2.resize(grain, (width, height))
    y, x = np.ogrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    gain = (rng.uniform(0.92, 1.28) * (1 - 0.15 * (x * x + y * y))).astype(np.float32)
    gain *= 1 + 0.06 * _noise(rng, (height, width), 4)
    warm = rng.uniform(-0.05, 0.05)
    noise = np.frombuffer(rng.bytes(3 * height * width), np.uint8).reshape(height, width, 3)
    planes = []
    for plane, tint, dust in zip(cv2.split(scene.image), (1 + warm, 1, 1 - warm), cv2.split(noise), strict=True):
        planes.append((plane + rough) * (gain * tint) + (dust * np.float32(0.04) - 5))
    return cv2.convertScaleAbs(cv2.GaussianBlur(cv2.merge(planes).clip(0, 255), (3, 3), 0.55))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a street dataset in the layout of CamVid.")
    parser.add_argument("folder", help="where to write it")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, nargs=2, default=(360, 480), metavar=("HEIGHT", "WIDTH"))
    options = parser.parse_args()
    make_street_set(options.folder, options.pairs, options.seed, tuple(options.size))


if __name__ == "__main__":
    main()
