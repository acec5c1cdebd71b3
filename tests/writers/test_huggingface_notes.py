"""What Hugging Face's note in a schema says of files is honoured: the mode of pictures, the rate of sound, None."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest

from datamat import Audio, Image, ListOf, Materializer, Nullable, SourceError, load
from datamat.codecs import encode_png
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLOURS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 9
GREY = COLOURS[..., 0]
COLOUR_FILE, GREY_FILE = ({"bytes": encode_png(pixels), "path": None} for pixels in (COLOURS, GREY))
NO_FILE = {"bytes": None, "path": None}
LUMA = np.rint(COLOURS @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
LIST = {"_type": "List", "feature": {"_type": "Image"}}


def imported(tmp_path, cells, kind, noted, declared=None):
    """Return the field `x` of each row, and its feature."""
    note = json.dumps({"info": {"features": {"x": noted}}})
    table = pa.table({"x": pa.array(cells, kind)}).replace_schema_metadata({"huggingface": note})
    writer = ImportWriter(features=None if declared is None else {"x": declared})
    Materializer(writer, table, tmp_path / "out").run(executor=InlineExecutor(), progress=False)
    data = load(tmp_path / "out")
    return [sample["x"] for sample in sorted(data, key=lambda sample: sample["key"])], data.features["x"]


def same(found, wanted):
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found is None if wanted is None else np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("cells", "kind", "noted", "declared", "wanted", "feature"),
    [
        ([COLOUR_FILE], FILE, {"_type": "Image", "mode": "L"}, None, [LUMA[..., None]], Image((None, None, 1))),
        ([GREY_FILE], FILE, {"_type": "Image", "mode": "L"}, None, [GREY[..., None]], Image((None, None, 1))),
        ([GREY_FILE], FILE, {"_type": "Image", "mode": "RGB"}, None, [np.dstack([GREY] * 3)], Image()),
        ([COLOUR_FILE], FILE, {"_type": "Image"}, None, [COLOURS], Image()),
        ([COLOUR_FILE, None, NO_FILE], FILE, {"_type": "Image"}, Nullable(Image()), [COLOURS, None, None], None),
        (
            [None, COLOUR_FILE], FILE, {"_type": "Image", "mode": "L"}, Nullable(Image((None, None, 1))),
            [None, LUMA[..., None]], None,
        ),
        (
            [[COLOUR_FILE], []], pa.list_(FILE), {**LIST, "feature": {"_type": "Image", "mode": "L"}}, None,
            [[LUMA[..., None]], []], ListOf(Image((None, None, 1))),
        ),
        ([[COLOUR_FILE, None]], pa.list_(FILE), LIST, ListOf(Nullable(Image())), [[COLOURS, None]], None),
        ([None, [COLOUR_FILE]], pa.list_(FILE), LIST, Nullable(ListOf(Image())), [None, [COLOURS]], None),
    ],
)  # fmt: skip
def test_modes_and_missing_pictures(tmp_path, cells, kind, noted, declared, wanted, feature):
    pytest.importorskip("PIL")

    found, stored = imported(tmp_path, cells, kind, noted, declared)

    assert all(map(same, found, wanted))
    assert stored == (declared if feature is None else feature)


def test_rate_of_sound(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    file = io.BytesIO()
    soundfile.write(file, np.full(1600, 0.25, np.float32), 16_000, format="WAV")
    cell = {"bytes": file.getvalue(), "path": None}

    found, stored = imported(tmp_path, [cell], FILE, {"_type": "Audio", "sampling_rate": 8000})

    assert (found[0].shape, stored) == ((800, 1), Audio(8000))


def test_other_modes_are_refused_by_name(tmp_path):
    with pytest.raises(SourceError, match=r"'x' is Image\(mode='P'\)"):
        imported(tmp_path, [COLOUR_FILE], FILE, {"_type": "Image", "mode": "P"})
