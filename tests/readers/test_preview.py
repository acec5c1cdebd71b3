"""Pictures of samples: what is in the data set is on the picture."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
from every_feature import ONE_WORKER

from datamat import DatasetWriter, Features, Image, IndexRow, Mask, Materializer, OptionError, Scalar, load
from datamat.codecs import decode_image
from datamat.features import Text
from datamat.readers.preview import draw, palette_of

BLACK_TO_WHITE = ((0, 0, 0), (90, 90, 90), (180, 180, 180), (250, 250, 250))


def sample(image, mask=None, key="a"):
    return {"key": key, "image": image, **({} if mask is None else {"mask": mask})}


def features(channels=3, mask=None):
    return Features({"image": Image((None, None, channels)), **({} if mask is None else {"mask": mask})})


def shows(picture, colour):
    """Tell whether a picture has more than a few pixels of a colour."""
    return (picture.array == np.array(colour, np.uint8)).all(2).sum() > 50


def test_picture_is_saved_and_shown_as_png(pairs, tmp_path):
    """The same bytes that a notebook is given; any viewer opens them."""
    picture = load(pairs, "train").preview(5, columns=3)
    picture.save(tmp_path / "preview.png")

    data = (tmp_path / "preview.png").read_bytes()
    assert picture._repr_png_() == data
    assert np.array_equal(decode_image(data), picture.array)
    assert PIL.Image.open(io.BytesIO(data)).size == picture.array.shape[1::-1]
    assert picture.array.dtype == np.uint8


def test_samples_are_spread_over_the_data_set(pairs, monkeypatch):
    """Not the first few, and no more than there are."""
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
    """Grey as grey; alpha left out."""
    colour = (120, 40, 200, 30)[:channels]
    image = np.broadcast_to(np.array(colour, np.uint8), (40, 60, channels))

    picture = draw([sample(image)], features(channels), 1, 0.5)

    assert shows(picture, colour[:3] if channels > 1 else colour * 3)


def test_mask_is_drawn_over_the_image_with_its_legend():
    """As opaque as asked for; its declared colours, and only those classes that are seen."""
    image, mask = np.full((40, 60, 3), 100, np.uint8), np.ones((40, 60), np.uint8)
    schema = features(mask=Mask(names=("a", "b", "c", "d"), palette=BLACK_TO_WHITE))

    assert shows(draw([sample(image, mask)], schema, 1, 0.5), (95, 95, 95))
    assert shows(draw([sample(image, mask)], schema, 1, 1.0), (90, 90, 90))
    clear = draw([sample(image, mask)], schema, 1, 0.0)
    assert shows(clear, (100, 100, 100))
    assert shows(clear, (90, 90, 90))  # in the legend
    assert not shows(clear, (180, 180, 180))


def test_colours_are_made_up_where_none_are_declared():
    """Far apart for neighbours, the same every time; what is not labelled is black unless it has a colour."""
    colours = palette_of(Mask(names=("a", "b", "c"))).astype(int)

    assert colours.shape == (256, 3)
    assert np.array_equal(colours, palette_of(Mask()))
    assert np.abs(np.diff(colours[:60], axis=0)).sum(1).min() > 100
    assert colours[255].tolist() == [0, 0, 0]
    declared = Mask(palette=[(number, 0, 9) for number in range(256)])
    assert palette_of(declared).tolist() == [[number, 0, 9] for number in range(256)]


def test_mask_of_ids_past_the_names_is_drawn():
    """By their numbers: 255 is what is not labelled."""
    mask = np.full((40, 60), 255, np.uint8)

    picture = draw([sample(np.full((40, 60, 3), 100, np.uint8), mask)], features(mask=Mask(names=("a",))), 1, 0.5)

    assert shows(picture, (50, 50, 50))


def test_mask_of_another_size_than_the_image_is_left_out():
    """It belongs to another picture; the image is drawn all the same."""
    image, mask = np.full((40, 60, 3), 100, np.uint8), np.ones((20, 30), np.uint8)

    picture = draw([sample(image, mask)], features(mask=Mask(palette=BLACK_TO_WHITE)), 1, 1.0)

    assert shows(picture, (100, 100, 100))
    assert not shows(picture, (90, 90, 90))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (31, 17)])
def test_odd_sizes_and_keys_are_drawn(shape):
    """Slim pictures, and keys that the font has no letters for."""
    image, mask = np.zeros((*shape, 3), np.uint8), np.zeros(shape, np.uint8)

    picture = draw([sample(image, mask, "größe-写真" * 9)], features(mask=Mask()), 1, 0.5)

    assert picture.array.shape[1] > 300
    assert picture.array.shape[0] < 1000


def test_pictures_of_different_heights_share_a_row():
    """The lower ones are filled up."""
    samples = [sample(np.zeros((height, 40, 3), np.uint8)) for height in (10, 40, 20)]

    heights = [draw(samples[:count], features(), 3, 0.5).array.shape[0] for count in (1, 2, 3)]

    assert heights[0] < heights[1] == heights[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0; want at least 1 sample"),
        ({"count": -2}, "count=-2; want at least 1 sample"),
        ({"columns": 0}, "columns=0, opacity=0.5; want at least 1 column"),
        ({"opacity": 1.5}, "opacity=1.5; want at least 1 column and opacity in"),
        ({"opacity": float("nan")}, "opacity=nan; want"),
    ],
)
def test_wrong_arguments_are_refused(pairs, arguments, message):
    """With what is wanted."""
    with pytest.raises(OptionError, match=f"preview: .*{message}"):
        load(pairs).preview(**arguments)


def test_data_set_without_images_is_refused(tmp_path):
    """With the features that there are."""

    class Numbers(DatasetWriter):
        name = "numbers"
        features = Features({"number": Scalar("int64"), "text": Text()})

        def index(self, source):
            return [IndexRow("a")]

        def read(self, row):
            return {"number": 1, "text": "b"}

    Materializer(Numbers, None, tmp_path / "out", workers=ONE_WORKER).run(progress=False)

    with pytest.raises(OptionError, match="preview needs an Image among the features; there are key, number, text"):
        load(tmp_path / "out").preview()
