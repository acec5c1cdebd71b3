"""Draws samples, to look at a dataset before training on it.

    sample ──look_at──> Scene: panels of pixels with their legends, and all else in words ──> a sheet (`draw`),
                                                                                              a page (`datamat.view`)

A sheet writes in the font that OpenCV 5 ships: Latin, Greek, Cyrillic, Chinese, Japanese and Korean, but no emoji,
which become question marks. A page leaves text to the browser.
"""

from __future__ import annotations

import dataclasses
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datamat import codecs
from datamat.errors import OptionError, count_of
from datamat.features import Nullable, Preview
from datamat.parallel.logs import get_logger
from datamat.transforms.targets import target_of
from datamat.values import frozen

if TYPE_CHECKING:
    from datamat.features import Feature, Features


_TILE_WIDTH, _TILE_HEIGHT, _MARGIN, _LINE = 320, 640, 8, 22
_WIDE = 2.5  # width / height of pictures that get tiles of twice the width, such as strips of frames and slices
_LEGEND_WIDTH, _SWATCH_WIDTH, _GAP = 160, 20, 4
_INK, _FAINT, _CASING, _PAPER = (30, 30, 30), (95, 95, 95), (16, 16, 16), 255
_OUTLINES = ((255, 64, 64), (64, 255, 64), (64, 160, 255), (255, 224, 32), (255, 64, 255), (32, 240, 240))
"""Colours of boxes, keypoints and polygons without classes, one for each field of them."""
_MOST_LINES, _LINE_CELLS = 8, 44  # of the fields in words below a picture; a Korean letter takes two cells
_MOST_ITEMS, _MOST_IN_FULL = 6, 64  # of a list in words
_MOST_LEGEND = 40
_MOST_TAGS = 60  # labels next to boxes and points of a picture; more would hide it
_TEXT, _TAG = 0.42, 0.38  # scales of OpenCV's font
_FAR = 1e6  # pixels; OpenCV wraps coordinates that are much larger
_SCORES = ("score", "confidence", "probability")
_LABELS = ("label", "class", "category", "name")
_logger = get_logger("datamat.readers")


class Swatch(NamedTuple):
    """An entry of a legend.

    Attributes:
        name: name of the class, or its number if it has no name.
        colour: red, green and blue, from 0 to 255.
        number: number of the class, by which legends are sorted.
    """

    name: str
    colour: tuple[int, int, int]
    number: int = -1


@frozen(eq=False)
class Panel:
    """A picture of one field of a sample, or of several fields on top of each other.

    Attributes:
        fields: names of the fields that it shows.
        pixels: uint8 (height, width, 3), RGB.
        legend: what its colours mean: the classes in it, by the name of their field.
        mask: the mask to lay over the pixels, uint8 (height, width, 4), RGBA, transparent where outlines are; None if
            there is none, or if the pixels include it.
    """

    fields: tuple[str, ...]
    pixels: np.ndarray
    legend: Mapping[str, tuple[Swatch, ...]]
    mask: np.ndarray | None = None


@frozen()
class Scene:
    """A sample as pictures and words.

    Attributes:
        key: key of the sample.
        panels: its pictures, the main one first.
        words: name and text of each field that no picture shows.
    """

    key: str
    panels: tuple[Panel, ...]
    words: tuple[tuple[str, str], ...]


@frozen(eq=False)
class Picture:
    """An image that notebooks display.

    Attributes:
        array: pixels, uint8 (height, width, 3), RGB.
    """

    array: np.ndarray

    def __repr__(self) -> str:
        height, width = self.array.shape[:2]
        return f"<Picture of {width} x {height} pixels; save(path) writes it>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image as a PNG file."""
        with open(path, "wb") as file:
            file.write(self._repr_png_())

    def _repr_png_(self) -> bytes:
        return codecs.encode_png(self.array)


# ---------------------------------------------------------------- a sample as pictures and words


def look_at(
    sample: Mapping[str, Any],
    features: Features,
    *,
    width: int,
    height: int,
    opacity: float | None,
    in_full: bool = False,
) -> Scene:
    """Return a sample as pictures, with everything drawn into them, and words.

    Masks, boxes, keypoints and polygons are drawn over the first `Image`; a second mask, or a mask whose size differs
    from that of the image, has a panel of its own, like every further picture. Boxes, polygons and points are tagged
    with what another field says about them: a class, from a list of as many labels, and a score, from as many numbers.

    Args:
        sample: the decoded sample, with its `key`; missing fields count as None.
        features: schema of the sample.
        width: most pixels from left to right in a picture.
        height: most pixels from top to bottom.
        opacity: opacity of the masks, from 0 (invisible) to 1 (the image is hidden); None keeps the mask of a picture
            apart from it, as `Panel.mask`.
        in_full: whether words are complete; otherwise long lists end after a few values.
    """
    values = features.flatten(sample)
    easel = _Easel(values, features, width, height, opacity)
    easel.draw_images()
    easel.draw_masks()
    easel.draw_outlines()
    shown = {name for panel in easel.panels for name in panel.fields} | {"key"}
    words = [(name, in_words(one, values.get(name), in_full)) for name, one in features.items() if name not in shown]
    return Scene(str(sample["key"]), tuple(map(_Canvas.panel, easel.panels)), tuple(words))


@dataclasses.dataclass(slots=True)
class _Canvas:
    """An unfinished panel: a picture at its final size."""

    fields: list[str]
    size: tuple[int, int]  # height and width of its content, in pixels of the sample
    pixels: np.ndarray
    legend: dict[str, list[Swatch]]
    mask: np.ndarray | None = None

    def panel(self) -> Panel:
        legend = {name: tuple(swatches) for name, swatches in self.legend.items()}
        return Panel(tuple(self.fields), self.pixels, legend, self.mask)


class _Easel:
    """Draws the panels of a sample."""

    def __init__(
        self, values: Mapping[str, Any], features: Features, width: int, height: int, opacity: float | None
    ) -> None:
        self.panels: list[_Canvas] = []
        self._values, self._features = values, features
        self._width, self._height, self._opacity = width, height, opacity
        self._main: np.ndarray | None = None  # the main picture, before it is shrunk
        self._of_kind = {
            kind: {
                name: drawn
                for name, feature in features.items()
                if (drawn := preview_of(feature)) and drawn.preview == kind
            }
            for kind in ("image", "mask", "depth", "outlines")
        }

    def draw_images(self) -> None:
        """Make a panel for each picture: those of cameras first, distances last."""
        pictures = sorted(self._of_kind["image"], key=lambda name: target_of(self._features[name]) != "image")
        drawn = {name: self._of_kind["image"][name] for name in pictures} | self._of_kind["depth"]
        for name, preview in drawn.items():
            value = self._values.get(name)
            if value is None:
                continue
            picture = _in_colours(preview.display(value))
            if not picture.size:
                continue
            self._main = picture if self._main is None else self._main
            self._add([name], picture)

    def draw_masks(self) -> None:
        """Draw the first mask of the main picture's size over it, and each other mask in a panel of its own."""
        is_free = True
        for name, preview in self._of_kind["mask"].items():
            value = self._values.get(name)
            if value is None:
                continue
            feature = self._features[name]
            ids = preview.display(value)
            if not ids.size:
                continue
            fits = self._main is not None and self._main.shape[:2] == ids.shape
            under = self._main if fits and self._main is not None else np.full((*ids.shape, 3), _PAPER, np.uint8)
            painted = _painted(under, ids, feature, 1.0 if self._opacity is None else self._opacity)
            if fits and is_free:
                panel, is_free = self.panels[0], False
                panel.fields.append(name)
                if self._opacity is None:
                    opaque = np.full((*ids.shape, 1), 255, np.uint8)
                    panel.mask = self._scaled(np.concatenate([painted, opaque], axis=2))
                else:
                    panel.pixels = self._scaled(painted)
            else:
                panel = self._add([name], painted)
            seen = np.flatnonzero(np.bincount(ids.reshape(-1), minlength=1)).tolist()
            panel.legend[name] = _labels(feature, seen)

    def draw_outlines(self) -> None:
        """Draw boxes, points and polygons over the main picture, or over white paper if there is none."""
        names = [name for name in self._of_kind["outlines"] if self._values.get(name) is not None]
        if not names:
            return
        panel = self.panels[0] if self.panels else self._add([], self._paper_for(names))
        before = panel.pixels.copy()
        for number, name in enumerate(names):
            preview = self._of_kind["outlines"][name]
            outlines = preview.outlines(self._values[name], *panel.size)
            said = _Said.of(name, preview, len(outlines), self._values, self._features, self._mask_colours())
            _draw_outlines(panel, outlines, said, _OUTLINES[number % len(_OUTLINES)])
            panel.fields += [name, *(field for field in said.fields if field not in panel.fields)]
            swatches = said.swatches([number for number, outline in enumerate(outlines) if len(outline)])
            if swatches:
                panel.legend[said.fields[0] if said.classes_are_given else name] = swatches
        if panel.mask is not None:
            panel.mask[(before != panel.pixels).any(2)] = 0

    def _mask_colours(self) -> dict[str, tuple[int, int, int]]:
        """Return the colour of each class of the drawn masks, which boxes of the same classes share."""
        return {
            swatch.name: swatch.colour for panel in self.panels for part in panel.legend.values() for swatch in part
        }

    def _paper_for(self, names: Sequence[str]) -> np.ndarray:
        """Return paper large enough for everything to be drawn."""
        height, width = 240, _TILE_WIDTH
        for name in names:
            for outline in self._of_kind["outlines"][name].outlines(self._values[name], height, width):
                if len(outline):
                    width = max(width, round(min(float(outline[:, 0].max()), 4096.0)) + 8)
                    height = max(height, round(min(float(outline[:, 1].max()), 4096.0)) + 8)
        return np.full((height, width, 3), _PAPER, np.uint8)

    def _add(self, fields: list[str], picture: np.ndarray) -> _Canvas:
        height, width = picture.shape[:2]
        self.panels.append(_Canvas(fields, (height, width), self._scaled(picture), {}))
        return self.panels[-1]

    def _scaled(self, picture: np.ndarray) -> np.ndarray:
        import cv2

        scale = min(self._width / picture.shape[1], self._height / picture.shape[0])
        height, width = (max(round(size * scale), 1) for size in picture.shape[:2])
        how = cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST if scale >= 2 else cv2.INTER_LINEAR
        scaled: np.ndarray = cv2.resize(np.ascontiguousarray(picture), (width, height), interpolation=how)
        return scaled


class _Said(NamedTuple):
    """What other fields say about the boxes, polygons or points of a field.

    Attributes:
        fields: names of these fields, that of the classes first.
        classes: number of the class of each; [] without classes.
        names: name of the class of each; [] without classes.
        scores: score of each; [] without scores.
        colours: colours of classes by name; the colours of others follow from their numbers.
        classes_are_given: whether a field gives the classes.
    """

    fields: list[str]
    classes: list[int]
    names: list[str]
    scores: list[float]
    colours: Mapping[str, tuple[int, int, int]]
    classes_are_given: bool

    @classmethod
    def of(
        cls,
        name: str,
        preview: Preview,
        count: int,
        values: Mapping[str, Any],
        features: Features,
        colours: Mapping[str, tuple[int, int, int]],
    ) -> _Said:
        """Return what is said about `count` outlines of a field, by a field in the same dict or else next to it."""
        prefix = name.rpartition("/")[0]
        others = [other for other in features if other not in {name, "key"} and values.get(other) is not None]
        others.sort(
            key=lambda other: (
                other.rpartition("/")[0] != prefix,
                not any(
                    word in other.rpartition("/")[2].lower() for word in _LABELS
                ),  # before flags such as `is_crowd`
                not _is_of(other, name),
            )
        )
        fields, classes, names, scores = list[str](), list[int](), list[str](), list[float]()
        for other in others:
            value, feature = values[other], features[other]
            if preview_of(feature) or not _is_row(value) or len(value) != len(values[name]):
                continue
            times = count // len(value)  # points of several people: one label each
            plain = [one for one in np.asarray(value).tolist() for _ in range(times)]
            last = other.rpartition("/")[2].lower()
            known = feature.class_names()
            if not names and known is not None:
                classes, names = plain, [_name_of(known, number) for number in plain]
                fields.insert(0, other)
            elif not names and isinstance(plain[0], str) and any(word in last for word in _LABELS):
                every = sorted(set(plain))
                classes, names = [every.index(text) for text in plain], plain
                fields.insert(0, other)
            elif not scores and isinstance(plain[0], float) and any(word in last for word in _SCORES):
                scores = plain
                fields.append(other)
        own = preview.outline_names()
        is_given = bool(names)
        if not names and own and count % len(own) == 0:
            classes, names = [*range(len(own))] * (count // len(own)), [*own] * (count // len(own))
        return cls(fields, classes, names, scores, colours, is_given)

    def colour(self, number: int, default: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the colour of an outline."""
        if not self.names:
            return default
        return self.colours.get(self.names[number]) or _class_colour(self.classes[number])

    def tag(self, number: int) -> str:
        """Return the text next to an outline: its class and score."""
        score = [f"{self.scores[number]:.2f}"] if self.scores else []
        return " ".join([*self.names[number : number + 1], *score])

    def swatches(self, numbers: Iterable[int]) -> list[Swatch]:
        """Return the legend of these outlines."""
        if not self.names:
            return []
        found = {self.classes[number]: number for number in numbers}
        return [Swatch(self.names[one], self.colour(one, (0, 0, 0)), number) for number, one in sorted(found.items())]


def _is_of(other: str, name: str) -> bool:
    """Return True if a field is named after another, as `box_labels` is after `boxes`."""
    stem = name.rpartition("/")[2].rstrip("s").removesuffix("e")
    return stem in other.rpartition("/")[2]


def _is_row(value: Any) -> bool:
    """Return True if a value is a non-empty list whose items are not lists."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and bool(len(value))
    return isinstance(value, list) and bool(value) and not any(isinstance(one, (list, np.ndarray)) for one in value)


def _name_of(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


def _draw_outlines(panel: _Canvas, outlines: Sequence[np.ndarray], said: _Said, colour: tuple[int, int, int]) -> None:
    """Draw points and closed lines, (k, 2) of (x, y) in pixels of the sample, with their tags on top."""
    import cv2

    scale = np.array(panel.pixels.shape[1::-1], np.float64) / panel.size[::-1]
    tags = []
    for number, outline in enumerate(outlines):
        if not len(outline):
            continue
        vertices = np.rint(np.clip(outline * scale, -_FAR, _FAR)).astype(np.int32)
        ink = said.colour(number, colour)
        first = (int(vertices[:, 0].min()), int(vertices[:, 1].min()))
        if len(vertices) == 1:
            cv2.circle(panel.pixels, first, 6, _CASING, -1, cv2.LINE_AA)
            cv2.circle(panel.pixels, first, 5, ink, -1)
        else:
            line = [vertices.reshape(-1, 1, 2)]
            cv2.polylines(panel.pixels, line, True, _CASING, 4, cv2.LINE_AA)  # so that it is visible on its own colour
            cv2.polylines(panel.pixels, line, True, ink, 2)
        if text := said.tag(number):
            tags.append((text, first, ink, len(vertices) == 1))
    for text, place, ink, is_point in tags[:_MOST_TAGS]:
        _draw_tag(panel.pixels, text, place, ink, is_point=is_point)


def _draw_tag(
    picture: np.ndarray, text: str, place: tuple[int, int], colour: tuple[int, int, int], *, is_point: bool
) -> None:
    """Write on a coloured background: next to a point, above the left corner of a box, or inside for lack of room."""
    import cv2

    text = _drawable(text)
    (wide, _), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, _TAG, 1)
    wide, high = wide + 6, 15
    left, top = (place[0] + 8, place[1] - high // 2) if is_point else (place[0] - 1, place[1] - high)
    left = max(min(left, picture.shape[1] - wide), 0)
    top = max(min(top, picture.shape[0] - high), 0)
    cv2.rectangle(picture, (left, top), (left + wide, top + high), colour, -1)
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    ink = (0, 0, 0) if light > 130 else (255, 255, 255)
    cv2.putText(picture, text, (left + 3, top + 12), cv2.FONT_HERSHEY_SIMPLEX, _TAG, ink, 1, cv2.LINE_AA)


# ---------------------------------------------------------------- words


def in_words(feature: Feature, value: Any, in_full: bool = False) -> str:
    """Return a value as text: labels by their names, the first numbers of an array, or its shape.

    Args:
        feature: feature of the value.
        value: the decoded value; None if it is missing.
        in_full: whether to show more of a list.
    """
    names = feature.class_names() or ()
    if value is None:
        return "missing"
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return count_of(len(value), "byte")
    if isinstance(value, (np.generic, int, float)):
        return _number_in_words(value, names)
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1):
        most = _MOST_IN_FULL if in_full else _MOST_ITEMS
        items = [
            in_words(feature, one) if isinstance(one, (str, np.ndarray)) else _number_in_words(one, names)
            for one in value[:most]
        ]
        return ", ".join(items) + (f", ... ({len(value):,})" if len(value) > most else "")
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}" if value.size > _MOST_ITEMS or not in_full else str(value.tolist())
    return str(value)


def _number_in_words(value: Any, names: Sequence[str]) -> str:
    if names and isinstance(value, (np.integer, int)) and 0 <= value < len(names):
        return names[int(value)]
    return f"{value:.4g}" if isinstance(value, (np.floating, float)) else str(value)


# ---------------------------------------------------------------- colours


def preview_of(feature: Feature) -> Preview | None:
    """Return the feature that draws the values of a field, that inside it if it is `Nullable`; None for nothing."""
    if isinstance(feature, Nullable):
        return preview_of(feature.feature)
    return feature if isinstance(feature, Preview) and feature.preview else None


def palette_of(mask: Feature) -> np.ndarray:
    """Return the RGB colour of each class id, uint8 (ids, 3): the declared palette, otherwise distinct colours."""
    colours = _hues(np.arange(np.iinfo(mask.value_type()[0]).max + 1, dtype=np.int64))
    colours[-1] = 0
    preview = preview_of(mask)
    declared = preview.class_colours() if preview else ()
    if declared:
        colours[: len(declared)] = np.array(declared, np.uint8)
    return colours


def _hues(ids: np.ndarray) -> np.ndarray:
    """Return colours, uint8 (n, 3), in which neighbouring numbers differ clearly: hues a golden angle apart."""
    hue = (ids * 0.61803398875) % 1.0 * 6.0
    up = np.clip(np.abs((hue[:, None] + np.array([0.0, 4.0, 2.0])) % 6.0 - 3.0) - 1.0, 0.0, 1.0)
    colours: np.ndarray = np.rint(64 + 176 * up).astype(np.uint8)
    return colours


def _class_colour(number: int) -> tuple[int, int, int]:
    """Return the colour of a class of boxes, whose colours are not declared."""
    red, green, blue = _hues(np.array([number]))[0].tolist()
    return red, green, blue


def _painted(image: np.ndarray, mask: np.ndarray, feature: Feature, opacity: float) -> np.ndarray:
    import cv2

    painted: np.ndarray = cv2.addWeighted(palette_of(feature)[mask], opacity, image, 1 - opacity, 0)
    return painted


def _in_colours(image: np.ndarray) -> np.ndarray:
    image = image[..., None] if image.ndim == 2 else image
    return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else np.array(image[..., :3])


def _labels(feature: Feature, ids: Sequence[int]) -> list[Swatch]:
    """Return name and colour of each class id; an id without a name is its own name."""
    colours = palette_of(feature)
    names = feature.class_names() or ()
    last = len(colours) - 1  # segmentation datasets use it for pixels without a label
    words = {number: "not labelled" if names and number == last else _name_of(names, number) for number in ids}
    return [Swatch(words[number], tuple(colours[number].tolist()), number) for number in ids]


# ---------------------------------------------------------------- a sheet of samples


def draw(samples: Sequence[Mapping[str, Any]], features: Features, columns: int, opacity: float) -> Picture:
    """Return samples side by side: pictures, with keys and everything that is not drawn below, then the legends.

    Raises:
        OptionError: an argument is out of range.
    """
    if columns < 1 or not 0 <= opacity <= 1:
        raise OptionError(
            f"preview: columns={columns}, opacity={opacity}; want at least 1 column and opacity in [0, 1]"
        )
    scenes = _looked_at(samples, features, opacity)
    return _sheet([(scene.key, scene) for scene in scenes], columns)


def draw_drawn(rows: Sequence[Sequence[tuple[str, Mapping[str, Any]]]], features: Features, opacity: float) -> Picture:
    """Return titled samples before and after a transform, in rows: each sample as it was read, then its copies.

    Raises:
        OptionError: the opacity is out of range.
    """
    if not 0 <= opacity <= 1:
        raise OptionError(f"preview: opacity={opacity}; want a number in [0, 1]")
    columns = max(map(len, rows), default=1)
    tiles: list[tuple[str, Scene | None]] = []
    for row in rows:
        scenes = _looked_at([sample for _, sample in row], features, opacity)
        tiles += [(title, scene) for (title, _), scene in zip(row, scenes, strict=True)]
        tiles += [("", None)] * (columns - len(row))
    return _sheet(tiles, columns)


def _looked_at(samples: Iterable[Mapping[str, Any]], features: Features, opacity: float) -> list[Scene]:
    def looked(sample: Mapping[str, Any], width: int) -> Scene:
        return look_at(sample, features, width=width, height=_TILE_HEIGHT, opacity=opacity)

    return [looked(sample, _TILE_WIDTH if not _is_wide(sample, features) else 2 * _TILE_WIDTH) for sample in samples]


def _is_wide(sample: Mapping[str, Any], features: Features) -> bool:
    """Return True if the main picture of a sample is a strip."""
    values = features.flatten(sample)
    drawn = {name: preview_of(feature) for name, feature in features.items() if values.get(name) is not None}
    pictures = {name: preview for name, preview in drawn.items() if preview and preview.preview == "image"}
    if not pictures or any(target_of(features[name]) == "image" for name in pictures):
        return False
    name, preview = next(iter(pictures.items()))
    height, width = preview.display(values[name]).shape[:2]
    return bool(width > _WIDE * height)


def _sheet(tiles: Sequence[tuple[str, Scene | None]], columns: int) -> Picture:
    """Return titled scenes in rows, with all legends at the bottom."""
    scenes = [scene for _, scene in tiles if scene is not None]
    widest = max((panel.pixels.shape[1] for scene in scenes for panel in scene.panels), default=0)
    tile_width = 2 * _TILE_WIDTH if widest > _TILE_WIDTH else _TILE_WIDTH
    texts = [(title, [] if scene is None else _captions(scene, 2 if tile_width > _TILE_WIDTH else 1))
             for title, scene in tiles]  # fmt: skip
    drawn = [
        _tile([] if scene is None else scene.panels, title, lines, tile_width)
        for (_, scene), (title, lines) in zip(tiles, texts, strict=True)
    ]
    legends = _merged(panel.legend for scene in scenes for panel in scene.panels)
    names = [swatch.name for swatches in legends.values() for swatch in swatches]
    _warn_of_lost_letters([text for title, lines in texts for text in (title, *lines)] + names)
    width = min(columns, max(len(drawn), 1)) * (tile_width + _MARGIN) + _MARGIN
    rows = [_row(drawn[start : start + columns], width, tile_width) for start in range(0, len(drawn), columns)]
    for name, swatches in legends.items():
        titled = [Swatch(f"{name}:", (_PAPER,) * 3), *swatches] if len(legends) > 1 else swatches
        rows.append(_legend(titled, width))
    return Picture(np.concatenate(rows) if rows else np.full((1, width, 3), _PAPER, np.uint8))


def _merged(legends: Iterable[Mapping[str, Sequence[Swatch]]]) -> dict[str, list[Swatch]]:
    """Return all entries of several legends, each once, in the order of the classes."""
    found: dict[str, dict[Swatch, None]] = {}
    for legend in legends:
        for name, swatches in legend.items():
            found.setdefault(name, {}).update(dict.fromkeys(swatches))
    return {name: sorted(swatches, key=lambda swatch: swatch.number) for name, swatches in found.items()}


def _captions(scene: Scene, tiles: int = 1) -> list[str]:
    """Return the fields of a sample that are not drawn, in words, in lines that fit below its picture."""
    lines = [line for name, text in scene.words for line in _lines_of(f"{name}: {text}", tiles * _LINE_CELLS)]
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], "..."]


def _lines_of(text: str, cells: int) -> list[str]:
    """Return a text as lines that fit below a picture, broken at blanks if there are any."""
    lines, line, width = [], "", 0
    for letter in " ".join(text.split()):
        wide = _cells_of(letter)
        if width + wide > cells:
            head, blank, tail = line.rpartition(" ")
            lines.append(head if blank else line)
            line = tail if blank else ""
            width = sum(map(_cells_of, line))
        line, width = line + letter, width + wide
    return [*lines, line]


def _cells_of(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _tile(panels: Iterable[Panel], title: str, lines: Sequence[str], width: int) -> np.ndarray:
    parts: list[np.ndarray] = []
    for panel in panels:
        part = np.full((panel.pixels.shape[0] + (_GAP if parts else 0), width, 3), _PAPER, np.uint8)
        part[-panel.pixels.shape[0] :, : panel.pixels.shape[1]] = panel.pixels
        parts.append(part)
    return np.concatenate([*parts, _text(title, width, _INK), *(_text(line, width, _FAINT) for line in lines)])


def _row(tiles: Sequence[np.ndarray], width: int, tile_width: int) -> np.ndarray:
    height = max(tile.shape[0] for tile in tiles) + _MARGIN
    row = np.full((height, width, 3), _PAPER, np.uint8)
    for place, tile in enumerate(tiles):
        left = _MARGIN + place * (tile_width + _MARGIN)
        row[_MARGIN : _MARGIN + tile.shape[0], left : left + tile_width] = tile
    return row


def _legend(swatches: Sequence[Swatch], width: int) -> np.ndarray:
    """Return a legend in cells of equal width, each a swatch of its colour and a name."""
    import cv2

    if len(swatches) > _MOST_LEGEND:
        more = f"and {len(swatches) - _MOST_LEGEND + 1:,} more"
        swatches = [*swatches[: _MOST_LEGEND - 1], Swatch(more, (_PAPER,) * 3)]
    per_line = max(width // _LEGEND_WIDTH, 1)
    legend = np.full((max(-(-len(swatches) // per_line), 1) * _LINE, width, 3), _PAPER, np.uint8)
    for number, (word, colour, _) in enumerate(swatches):
        top, left = number // per_line * _LINE, _MARGIN + number % per_line * _LEGEND_WIDTH
        cell = legend[top : top + _LINE, left : left + _LEGEND_WIDTH - _GAP]  # clips a long word
        cv2.rectangle(cell, (0, 5), (14, 17), colour, -1)
        cell[:, _SWATCH_WIDTH:] = _text(word, cell.shape[1] - _SWATCH_WIDTH, _INK)
    return legend


def _text(word: str, width: int, colour: tuple[int, int, int]) -> np.ndarray:
    """Return one line of words, clipped if it is long."""
    import cv2

    line = np.full((_LINE, width, 3), _PAPER, np.uint8)
    cv2.putText(line, _drawable(word), (0, 16), cv2.FONT_HERSHEY_SIMPLEX, _TEXT, colour, 1, cv2.LINE_AA)
    return line


# OpenCV 5 ships a font with Latin, Cyrillic, Chinese, Japanese and Korean letters, and draws a line in 0.1 ms, so text
# needs no other package. The fonts that Pillow (Aileron) and matplotlib (DejaVu) ship have no Hangul: with those,
# datamat would have to find a font of the system, which a container often lacks.


def _can_draw(word: str) -> bool:
    import cv2

    return word.isascii() or hasattr(cv2, "FontFace")


def _drawable(word: str) -> str:
    """Return the text as OpenCV can draw it: unchanged, or with question marks for OpenCV 4, which only draws ASCII."""
    encoding = "utf-8" if _can_draw(word) else "ascii"
    return word.encode(encoding, "replace").decode()


def _warn_of_lost_letters(words: Sequence[str]) -> None:
    lost = [word for word in words if not _can_draw(word)]
    if lost:
        _logger.warning(
            "preview: %d texts, such as %r, have letters that this OpenCV draws as question marks; to see them: "
            "pip install 'opencv-python-headless>=5'",
            len(lost),
            lost[0],
        )
