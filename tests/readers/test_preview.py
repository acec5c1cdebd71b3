"""Previews: what is in the dataset is in the picture."""

from __future__ import annotations

import io

import cv2
import numpy as np
import PIL.Image
import pytest
import small_pairs

from datamat import (
    BBoxes,
    Bytes,
    ClassLabel,
    Depth,
    Features,
    Image,
    Json,
    Keypoints,
    ListOf,
    Mask,
    Nullable,
    OptionError,
    Polygons,
    Scalar,
    Tensor,
    load,
    materialize,
)
from datamat.codecs import decode_image
from datamat.features import Text
from datamat.readers.preview import _captions, draw, look_at, palette_of
from datamat.testing import InlineExecutor

BLACK_TO_WHITE = ((0, 0, 0), (90, 90, 90), (180, 180, 180), (250, 250, 250))


def sample(image, mask=None, key="a"):
    return {"key": key, "image": image, **({} if mask is None else {"mask": mask})}


def features(channels=3, mask=None):
    return Features({"image": Image((None, None, channels)), **({} if mask is None else {"mask": mask})})


def shows(picture, colour):
    """Return whether a picture has more than a few pixels of a colour."""
    return (picture.array == np.array(colour, np.uint8)).all(2).sum() > 50


def test_picture_is_saved_and_shown_as_png(pairs, tmp_path):
    """The same bytes that a notebook shows; any viewer opens them."""
    picture = load(pairs, "train").preview(5, columns=3)
    picture.save(tmp_path / "preview.png")

    data = (tmp_path / "preview.png").read_bytes()
    assert picture._repr_png_() == data
    assert repr(picture) == "<Picture of {1} x {0} pixels; save(path) writes it>".format(*picture.array.shape)
    assert np.array_equal(decode_image(data), picture.array)
    assert PIL.Image.open(io.BytesIO(data)).size == picture.array.shape[1::-1]
    assert picture.array.dtype == np.uint8


def test_samples_are_spread_over_the_dataset(pairs, monkeypatch):
    """Not just the first few, and no more than there are."""
    asked = []
    data = load(pairs, "train")
    item = type(data).__getitem__
    monkeypatch.setattr(type(data), "__getitem__", lambda self, place: asked.append(place) or item(self, place))

    data.preview(6)
    load(pairs, "val").preview(100)

    assert asked == [0, 10, 20, 30, 40, 50, 0, 1, 2, 3]


def test_columns_bound_the_width(pairs):
    """Fewer samples than columns make a narrower picture."""
    data = load(pairs, "val")

    one, two, many = (data.preview(4, columns=columns).array.shape for columns in (1, 2, 9))

    assert one[1] < two[1] < many[1]
    assert one[0] > two[0] > many[0]
    assert data.preview(1, columns=9).array.shape[1] == one[1]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_of_any_channels_are_drawn(channels):
    """Grey is drawn as grey, and alpha is left out."""
    colour = (120, 40, 200, 30)[:channels]
    image = np.broadcast_to(np.array(colour, np.uint8), (40, 60, channels))

    picture = draw([sample(image)], features(channels), 1, 0.5)

    assert shows(picture, colour[:3] if channels > 1 else colour * 3)


def test_mask_is_drawn_over_the_image_with_its_legend():
    """It has the given opacity and its declared colours; the legend has only classes that occur."""
    image, mask = np.full((40, 60, 3), 100, np.uint8), np.ones((40, 60), np.uint8)
    schema = features(mask=Mask(names=("a", "b", "c", "d"), palette=BLACK_TO_WHITE))

    assert shows(draw([sample(image, mask)], schema, 1, 0.5), (95, 95, 95))
    assert shows(draw([sample(image, mask)], schema, 1, 1.0), (90, 90, 90))
    clear = draw([sample(image, mask)], schema, 1, 0.0)
    assert shows(clear, (100, 100, 100))
    assert shows(clear, (90, 90, 90))  # in the legend
    assert not shows(clear, (180, 180, 180))


def test_colours_are_chosen_where_none_are_declared():
    """Neighbours get distant colours, the same every time; unlabelled pixels are black unless they have a colour."""
    colours = palette_of(Mask(names=("a", "b", "c"))).astype(int)

    assert np.array_equal(colours, palette_of(Mask()))
    assert np.abs(np.diff(colours[:60], axis=0)).sum(1).min() > 100
    assert colours[255].tolist() == [0, 0, 0]


def test_mask_of_another_size_than_the_image_has_a_panel_of_its_own():
    """It belongs to another picture, as does a second mask: nothing is drawn over what it does not fit."""
    image, mask = np.full((40, 60, 3), 100, np.uint8), np.ones((20, 30), np.uint8)
    schema = features(mask=Mask(palette=BLACK_TO_WHITE))

    scene = look_at(sample(image, mask), schema, width=320, height=640, opacity=1.0)

    assert [panel.fields for panel in scene.panels] == [("image",), ("mask",)]
    assert (scene.panels[0].pixels == 100).all() and (scene.panels[1].pixels == 90).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1)])
def test_odd_sizes_and_keys_are_drawn(shape):
    """Very narrow pictures, and keys with letters that the font lacks."""
    image, mask = np.zeros((*shape, 3), np.uint8), np.zeros(shape, np.uint8)

    picture = draw([sample(image, mask, "größe-写真" * 9)], features(mask=Mask()), 1, 0.5)

    assert picture.array.shape[1] > 300
    assert picture.array.shape[0] < 1000


def drawn(name, key="a"):
    """Return what is drawn for a sample whose one class has this name."""
    image, mask = np.zeros((40, 60, 3), np.uint8), np.zeros((40, 60), np.uint8)
    return draw([sample(image, mask, key)], features(mask=Mask(names=(name,))), 1, 0.5).array


@pytest.mark.skipif(not hasattr(cv2, "FontFace"), reason="OpenCV 4 draws ASCII only")
def test_korean_keys_and_labels_are_drawn_in_their_letters():
    """Two words of equal length differ, and neither is a row of question marks."""
    labels = [drawn(name) for name in ("도로", "차도", "??")]
    keys = [drawn("a", key) for key in ("보도-001", "도보-001", "??-001")]

    for first, second, marks in (labels, keys):
        assert not np.array_equal(first, second)
        assert not np.array_equal(first, marks)


def test_letters_that_opencv_4_cannot_draw_are_reported(monkeypatch, caplog):
    """The log names the text and the remedy; ASCII text logs nothing."""
    monkeypatch.delattr(cv2, "FontFace", raising=False)

    assert np.array_equal(drawn("도로"), drawn("??"))
    drawn("road")

    assert [record.levelname for record in caplog.records] == ["WARNING"]  # one for all texts of a preview
    assert "'도로'" in caplog.text
    assert "opencv-python-headless>=5" in caplog.text


@pytest.mark.parametrize("arguments", [{"count": 0}, {"columns": 0}, {"opacity": 1.5}, {"opacity": float("nan")}])
def test_wrong_arguments_are_refused(pairs, arguments):
    (name, value), *_ = arguments.items()
    with pytest.raises(OptionError, match=f"preview: .*{name}={value}"):
        load(pairs).preview(**arguments)


def test_dataset_without_images_shows_its_fields_in_words(tmp_path):
    """Numbers and texts alone are worth a look, too; each sample has lines of its own."""
    values = {"number": 1, "text": "a word"}
    materialize(lambda key: values, ["a", "b"], tmp_path / "out", executor=InlineExecutor(), progress=False)

    picture = load(tmp_path / "out").preview().array

    assert picture.shape[1] > 2 * 320 and 3 * 22 <= picture.shape[0] < 5 * 22
    assert (picture[:, :320] < 128).any() and (picture[:, 330:] < 128).any()


def captions(fields, values):
    """Return the lines below a sample."""
    return _captions(look_at({"key": "a", **values}, Features(fields), width=320, height=320, opacity=0.5))


@pytest.mark.parametrize(
    ("feature", "value", "line"),
    [
        (ClassLabel(names=("cat", "개")), np.int64(1), "x: 개"),
        (Text(), "a caption,\n한국어", "x: a caption, 한국어"),
        (Scalar("float32"), np.float32(0.12345678), "x: 0.1235"),
        (Scalar("int64"), np.int64(7), "x: 7"),
        (Tensor((3,), "float32"), np.array([1, 0.5, 2], np.float32), "x: 1, 0.5, 2"),
        (Tensor((9,), "int64"), np.arange(9), "x: 0, 1, 2, 3, 4, 5, ... (9)"),
        (Tensor((2, 3), "float32"), np.zeros((2, 3), np.float32), "x: float32 (2, 3)"),
        (ListOf(ClassLabel(names=("car", "tree"))), np.array([1, 0]), "x: tree, car"),
        (Bytes(), b"123", "x: 3 bytes"),
        (Json(), {"a": [1]}, "x: {'a': [1]}"),
        (Nullable(Scalar("int64")), None, "x: missing"),
    ],
)
def test_field_is_put_into_words(feature, value, line):
    """Labels by their names, texts as they are, numbers with the digits that matter, arrays by their shape."""
    assert captions({"x": feature}, {"x": value}) == [line]


def test_long_texts_are_broken_and_cut():
    """A line fits below the picture, also of Korean, whose letters are twice as wide; a novel has a few lines."""
    english, korean, novel = (
        captions({"x": Text()}, {"x": text}) for text in ("word " * 20, "한국어문장" * 12, "word " * 1_000)
    )

    assert len(english) == 3 and all(len(line) <= 44 for line in english)
    assert "".join(korean).replace(" ", "") == "x:" + "한국어문장" * 12
    assert all(len(line) <= 24 for line in korean)
    assert len(novel) == 8 and novel[-1] == "..."


def test_depth_and_pictures_of_16_bits_are_drawn():
    """A depth map stands below its image, or in its place; 16 bits are spread over those of a screen."""
    deep = np.full((40, 40, 3), 1000, np.uint16)
    deep[:20] = 3000
    near = np.ones((40, 40), np.float32)
    near[:, :20] = 3
    both = Features({"image": Image(dtype="uint16"), "depth": Depth(dtype="float32")})

    alone = draw([{"key": "a", "depth": near}], Features({"depth": Depth(dtype="float32")}), 1, 0.5)
    drawn = draw([{"key": "a", "image": deep, "depth": near}], both, 1, 0.5)

    assert drawn.array.shape[0] > 1.5 * alone.array.shape[0]
    for picture in (alone, drawn):
        assert shows(picture, (0, 0, 0))
        assert shows(picture, (255, 255, 255))
    wide = Mask(names=("a", "b"), dtype="uint16")
    assert palette_of(wide).shape == (65536, 3)
    assert draw([sample(np.zeros((9, 9, 3), np.uint8), near[:9, :9].astype(np.uint16))], features(mask=wide), 1, 1.0)


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (Keypoints(), np.array([[20, 20]], np.float32)),
        (Keypoints((2, 3)), np.array([[20, 20, 2], [0, 0, 0]], np.float32)),
        (Polygons(), Polygons().prepare([[[5, 5], [30, 5], [5, 30]], []])),
        (BBoxes(), np.array([[0.25, 0.25, 0.75, 0.75]], np.float32)),
        (BBoxes(rotated=True), np.array([[20, 20, 20, 10, 30], [1e20, 0, 1, 1, 0]], np.float32)),
    ],
)
def test_points_and_outlines_are_drawn_over_the_image(feature, value):
    """In the first colour, and only into the picture of the preview."""
    image = np.zeros((40, 40, 3), np.uint8)

    picture = draw(
        [{"key": "a", "image": image, "marks": value}], Features({"image": Image(), "marks": feature}), 1, 0.5
    )

    assert shows(picture, (255, 64, 64))
    assert not image.any()


def pixels_of(panel, colour):
    """Return rows and columns of the pixels of a colour in a panel."""
    return np.nonzero((panel.pixels == np.array(colour, np.uint8)).all(2))


def boxed(**others):
    """Return a scene of a black image of 100 by 100 with two boxes, and other fields with their values."""
    schema = Features({"image": Image(), "boxes": BBoxes(), **{name: feature for name, (feature, _) in others.items()}})
    values = {name: value for name, (_, value) in others.items()}
    boxes = np.array([[0.2, 0.1, 0.5, 0.4], [0.5, 0.6, 0.9, 0.95]], np.float32)
    given = {"key": "a", "image": np.zeros((100, 100, 3), np.uint8), "boxes": boxes, **values}
    return look_at(given, schema, width=400, height=400, opacity=0.5)


KINDS = ListOf(ClassLabel(names=("cat", "개", "bird")))


def test_boxes_are_drawn_at_their_places_in_the_colours_of_their_classes():
    """Pixels under each edge have the colour that the legend gives the class; the legend has no other class."""
    scene = boxed(kinds=(KINDS, np.array([2, 0])))

    (panel,) = scene.panels
    legend = panel.legend["kinds"]
    assert [swatch.name for swatch in legend] == ["cat", "bird"]
    colours = {swatch.name: swatch.colour for swatch in legend}
    for name, (top, left, bottom, right) in {"bird": (80, 40, 200, 160), "cat": (200, 240, 360, 380)}.items():
        rows, columns = pixels_of(panel, colours[name])
        assert (abs(rows.max() - bottom), abs(columns.min() - left), abs(columns.max() - right)) < (3, 3, 3)
        for row, column in ((bottom, (left + right) // 2), ((top + bottom) // 2, left), ((top + bottom) // 2, right)):
            near = panel.pixels[row - 1 : row + 2, column - 1 : column + 2].reshape(-1, 3)
            assert (near == colours[name]).all(1).any(), f"{name}: no edge at {row}, {column}"


@pytest.mark.parametrize("name", ["label", "kind_class", "Category"])
def test_boxes_have_the_field_named_as_one_of_classes(name):
    """And not a flag that comes first, is named after the boxes, and has names of classes, too."""
    flags = {"box_crowd": (ListOf(ClassLabel(names=("one", "crowd"))), np.array([1, 0]))}

    (panel,) = boxed(**flags, **{name: (KINDS, np.array([2, 0]))}).panels

    assert [swatch.name for swatch in panel.legend[name]] == ["cat", "bird"] and "box_crowd" not in panel.legend


@pytest.mark.parametrize(("kinds", "scores"), [([1, 0], [0.25, 0.5]), ([2, 0], [0.75, 0.5])])
def test_class_and_score_of_a_box_are_written_at_its_corner(kinds, scores):
    """Another score, and another class, are other letters above the corner of that box, and not of the other one."""

    def drawn_with(kinds, scores):
        fields = {"kinds": (KINDS, np.array(kinds)), "scores": (ListOf(Scalar("float32")), np.float32(scores))}
        return boxed(**fields).panels[0].pixels

    rows, columns = np.nonzero((drawn_with([1, 0], [0.75, 0.5]) != drawn_with(kinds, scores)).any(2))

    assert rows.min() > 80 - 20 and columns.min() >= 35 and columns.max() < 170
    assert rows.max() < (85 if kinds == [1, 0] else 205)


def test_every_picture_and_mask_is_drawn():
    """Two cameras and two masks: the second ones have panels of their own, each with its legend."""
    mask = np.ones((40, 60), np.uint8)
    schema = Features(
        {
            "left": Image(),
            "right": Image(),
            "parts": Mask(names=("a", "b"), palette=BLACK_TO_WHITE[:2]),
            "kinds": Mask(names=("c", "d"), palette=BLACK_TO_WHITE[2:]),
        }
    )

    scene = look_at(
        {"key": "a", "left": np.full((40, 60, 3), 9, np.uint8), "right": np.full((40, 60, 3), 33, np.uint8),
         "parts": mask, "kinds": mask}, schema, width=60, height=60, opacity=1.0,
    )  # fmt: skip

    assert [panel.fields for panel in scene.panels] == [("left", "parts"), ("right",), ("kinds",)]
    assert [int(panel.pixels.mean()) for panel in scene.panels] == [90, 33, 250]
    assert [swatch.name for swatch in scene.panels[2].legend["kinds"]] == ["d"]


@pytest.mark.parametrize(
    ("shape", "drawn_shape"),
    [
        ((16, 20), (16, 20, 1)),
        ((24, 16, 20), (16, 83, 1)),
        ((3, 16, 20), (16, 20, 3)),
        ((24, 16, 20, 3), (16, 83, 3)),
        ((2, 24, 16, 20), (16, 83, 1)),
    ],
)
def test_maps_volumes_and_frames_are_drawn(shape, drawn_shape):
    """A volume is four slices, from a low to a high index, each brighter here; a map is one picture."""
    axis = 1 if shape[0] == 2 else 0
    value = np.zeros(shape, np.float32) + np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - 1 - axis))
    feature = Tensor(shape, "float32")

    picture = feature.display(value)

    assert feature.preview == "image"
    assert (picture.shape, picture.dtype) == (drawn_shape, np.uint8)
    if drawn_shape[1] == 83:
        slices = [int(picture[0, 21 * part, 0]) for part in range(4)]
        assert slices == sorted(set(slices)) and slices[0] < 60 and slices[-1] > 180
        assert (picture[:, 20] == 255).all()


def test_rows_are_shown_before_and_after_the_transform(tmp_path):
    """Left is the picture as it was read, beside it the copies that a run stores; nothing is written."""
    source = small_pairs.make_pairs(tmp_path / "source", num_train=6, num_val=2)
    options = {"transform": small_pairs.jitter, "copies": {"train": 3}, "executor": InlineExecutor()}
    job = small_pairs.job(source, tmp_path / "out", **options)

    picture = job.preview(2, copies=2, opacity=0.0).array
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]

    job.run(progress=False)
    plain = small_pairs.job(source, tmp_path / "plain", executor=InlineExecutor())
    plain.run(progress=False)
    after, before = load(tmp_path / "out", "train"), load(tmp_path / "plain", "train")
    tiles = [picture[8:248, 8 + 328 * column : 328 + 328 * column] for column in range(3)]
    (key,) = [name for name in sorted(before.keys()) if (tiles[0] == enlarged(before[name]["image"])).all()]
    assert np.array_equal(tiles[1], enlarged(after[f"{key}#0"]["image"]))
    assert np.array_equal(tiles[2], enlarged(after[f"{key}#1"]["image"]))


def enlarged(image):
    """Return a picture of 24 by 32 at ten times its size."""
    return np.repeat(np.repeat(image, 10, 0), 10, 1)


def test_transform_that_crops_is_shown_beside_the_whole_picture(tmp_path):
    """What was read need not be as declared, where the transform makes it so."""

    class Whole(small_pairs.Pairs):
        features = Features({"image": Image((12, 16, 3)), "mask": Mask((12, 16), names=small_pairs.NAMES)})

    def crop(sample, rng):
        return {**sample, "image": sample["image"][:12, :16], "mask": sample["mask"][:12, :16]}

    source = small_pairs.make_pairs(tmp_path / "source", num_train=2, num_val=1)
    job = small_pairs.job(source, tmp_path / "out", Whole(), transform=crop, copies=1)

    assert job.preview(1).array.shape[1] == 2 * 328 + 8
    for name, value in {"count": 0, "copies": 0, "opacity": 2}.items():
        with pytest.raises(OptionError, match=f"preview: .*{name}={value}"):
            job.preview(**{name: value})
