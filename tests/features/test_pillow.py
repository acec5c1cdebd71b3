"""Pictures of Pillow mean what their files mean: palettes, truth values, alpha, inks, EXIF."""

import io

import numpy as np
import pytest

from datamat import Image, ImportWriter, Mask, Materializer, Nullable, SampleError, load, materialize
from datamat.testing import InlineExecutor

pillow = pytest.importorskip("PIL.Image")
IDS = np.array([[0, 1, 2], [2, 1, 0]], np.uint8)
COLOURS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], np.uint8)


def palette(**info):
    picture = pillow.fromarray(IDS)
    picture.putpalette(COLOURS.ravel().tolist())
    picture.info.update(info)
    return picture


def turned():
    """Return a picture whose file says how to turn it."""
    picture, file = pillow.fromarray(COLOURS[IDS]), io.BytesIO()
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(file, "PNG", exif=exif)
    return pillow.open(file)


CASES = {
    "palette as ids": (palette, Mask(), IDS),
    "ids that may be missing": (palette, Nullable(Mask()), IDS),
    "truths as ids": (lambda: pillow.fromarray(IDS == 1), Mask(), (IDS == 1).astype(np.uint8)),
    "palette as colours": (palette, Image(), COLOURS[IDS]),
    "palette with alpha": (
        lambda: palette(transparency=1),
        Image((None, None, 4)),
        np.dstack([COLOURS[IDS], np.where(IDS == 1, 0, 255).astype(np.uint8)]),
    ),
    "turned": (turned, Image(), np.rot90(COLOURS[IDS], -1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["function", "import"])
def test_picture_is_stored_as_its_file_would_be(tmp_path, case, way):
    made, feature, wanted = CASES[case]

    if way == "function":
        materialize(
            lambda _: {"x": made()},
            range(2),
            tmp_path,
            features={"x": feature},
            executor=InlineExecutor(),
            progress=False,
        )
    else:
        writer = ImportWriter(features={"x": feature})
        Materializer(writer, [{"x": made()}] * 2, tmp_path).run(executor=InlineExecutor(), progress=False)

    assert [sample["x"].tolist() for sample in load(tmp_path)] == [wanted.tolist()] * 2


@pytest.mark.parametrize(
    "made", [lambda: palette(transparency=1), lambda: pillow.new("CMYK", (3, 2), (9, 8, 7, 6))], ids=["alpha", "inks"]
)
def test_picture_that_would_be_changed_is_refused(tmp_path, made):
    with pytest.raises(SampleError):
        materialize(
            lambda _: {"x": made()},
            range(2),
            tmp_path,
            features={"x": Image()},
            executor=InlineExecutor(),
            progress=False,
        )
