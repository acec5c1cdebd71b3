"""A picture that its EXIF orientation turns, beside others of the same sample."""

import io
import logging

import numpy as np
import pytest

from datamat import BBoxes, Depth, Image, Mask, Nullable, SampleError, load, materialize
from datamat.codecs import encode_png
from datamat.testing import InlineExecutor

PIL = pytest.importorskip("PIL.Image")
HEIGHT, WIDTH = 4, 6


def photo(orientation, *, height=HEIGHT):
    exif = PIL.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    PIL.fromarray(np.zeros((height, WIDTH, 3), np.uint8)).save(file, "JPEG", exif=exif)
    return file.getvalue()


def opened(data):
    return PIL.open(io.BytesIO(data))


IDS = np.zeros((HEIGHT, WIDTH), np.uint8)
UPRIGHT = encode_png(np.zeros((WIDTH, HEIGHT), np.uint8))
BOX = np.array([[0, 0, 1, 1]], np.float32)
OPEN = {"image": Image(), "mask": Mask()}


def made(tmp_path, sample, features):
    materialize(
        lambda number: sample, range(3), tmp_path / "out", features=features, executor=InlineExecutor(), progress=False
    )
    return load(tmp_path / "out")[0]


@pytest.mark.parametrize(
    ("image", "other", "features"),
    [
        (photo(6), IDS, OPEN),
        (photo(8), encode_png(IDS), OPEN),
        (photo(5), opened(encode_png(IDS)), OPEN),
        (opened(photo(6)), IDS, OPEN),
        (photo(6), IDS, {"image": Nullable(Image()), "mask": Nullable(Mask())}),
        (photo(6), np.ones((HEIGHT, WIDTH), np.uint16), {"image": Image(), "mask": Depth()}),
        (photo(6), photo(1), {"image": Image(), "mask": Image()}),
        (photo(6), IDS, {"image": Image((WIDTH, HEIGHT, 3)), "mask": Mask()}),
    ],
)
def test_picture_that_is_turned_alone_is_refused(tmp_path, image, other, features):
    with pytest.raises(
        SampleError, match=r"'0000000\d'.*'image' is 4 x 6 as stored, as is 'mask', .* turns it to 6 x 4"
    ):
        made(tmp_path, {"image": image, "mask": other}, features)


@pytest.mark.parametrize(
    ("image", "other", "features"),
    [
        (photo(6), UPRIGHT, OPEN),
        (photo(6), opened(UPRIGHT), OPEN),
        (photo(3), IDS, OPEN),
        (photo(6), photo(8), {"image": Image(), "mask": Image()}),
        (photo(6), IDS[:2, :2], OPEN),
        (photo(6, height=WIDTH), np.zeros((WIDTH, WIDTH), np.uint8), OPEN),
        (photo(6), IDS, {"image": Image((WIDTH, HEIGHT, 3)), "mask": Mask((HEIGHT, WIDTH))}),
        (photo(6), BOX, {"image": Image(), "mask": BBoxes()}),
    ],
)
def test_pictures_that_fit_or_are_declared_are_stored_and_said_once(tmp_path, caplog, image, other, features):
    with caplog.at_level(logging.WARNING):
        sample = made(tmp_path, {"image": image, "mask": other}, features)

    assert sample["image"].shape[1] == (WIDTH if image == photo(3) else min(sample["image"].shape[:2]))
    assert sum("turned upright" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("sample", [{"image": photo(6)}, {"image": photo(1), "mask": IDS}])
def test_nothing_is_said_where_nothing_lies_beside(tmp_path, caplog, sample):
    with caplog.at_level(logging.WARNING):
        made(tmp_path, sample, {name: OPEN[name] for name in sample})

    assert not caplog.records
