"""The surface-masking layout: colours and polygons to class ids, and what does not fit together."""

import numpy as np
import pytest

from datamat.errors import OptionError, SchemaError, SourceError
from datamat.writers.pedestrian import PedestrianWriter

NAMES = ("ground", "sidewalk", "sidewalk_blocks", "roadway")
PALETTE = ((0, 0, 0), (9, 8, 7), (0, 0, 255), (255, 128, 255))
XML = '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version>{}</annotations>'


@pytest.fixture
def writer():
    return PedestrianWriter(NAMES, PALETTE)


@pytest.fixture
def surface(tmp_path, picture, mask):
    """Make a folder of pictures, with masks of random ids for those that are named in `coded`."""

    def make(name, images, *, coded=()):
        folder = tmp_path / "set" / name
        for number, image in enumerate(images):
            picture(folder / f"{image}.jpg", seed=number)
        for image in coded:
            mask(folder / "MASK" / f"{image}.png", np.array(PALETTE, np.uint8)[ids_of(image)])
        return tmp_path / "set"

    return make


def ids_of(name):
    return np.random.default_rng(len(name)).integers(0, len(NAMES), (12, 16), np.uint8)


def annotate(path, *images):
    path.write_text(XML.format("".join(images)), encoding="utf-8")


def image_tag(name, *shapes, size=(12, 16)):
    return f'<image id="0" name="{name}" width="{size[1]}" height="{size[0]}">{"".join(shapes)}</image>'


def polygon(label, points, attribute="", z_order=0):
    inner = f'<attribute name="attribute">{attribute}</attribute>' if attribute else ""
    return f'<polygon label="{label}" points="{points}" z_order="{z_order}">{inner}</polygon>'


def opened(writer, source):
    """Return the samples by key, read as a run does."""
    found = {}
    for row in writer.index(source):
        paths = {name: str(source / row.fields[name]) for name in writer.file_fields}
        found[row.key] = writer.read(row._replace(fields={**row.fields, **paths}))
    return found


def test_keys_are_unique_over_surfaces(writer, surface):
    """The same name in two folders gives two keys, sorted."""
    surface("Surface_002", ["a"], coded=["a"])
    source = surface("Surface_001", ["b", "a.1"], coded=["b", "a.1"])

    rows = list(writer.index(source))

    assert [row.key for row in rows] == ["Surface_001-a.1", "Surface_001-b", "Surface_002-a"]
    assert rows[0].fields == {
        "image": "Surface_001/a.1.jpg",
        "annotation": "Surface_001/MASK/a.1.png",
        "polygons": "",
    }


def test_colours_become_ids(writer, surface):
    """Every pixel of the palette's colours maps to its class; the picture keeps its bytes."""
    source = surface("Surface_001", ["a"], coded=["a"])

    sample = opened(writer, source)["Surface_001-a"]

    np.testing.assert_array_equal(sample["mask"], ids_of("a"))
    assert sample["mask"].dtype == np.uint8
    assert sample["image"] == (source / "Surface_001/a.jpg").read_bytes()


@pytest.mark.parametrize("place", ["Surface_001.xml", "Surface_001/Surface_001.xml"])
def test_polygons_stand_in_for_masks(writer, surface, place):
    """Images without a PNG are drawn: by label and attribute, else by label, in z_order."""
    source = surface("Surface_001", ["a", "b"], coded=["a"])
    shapes = [
        polygon("sidewalk", "0,0;15,0;15,5;0,5", "blocks", z_order=1),
        polygon("roadway", "0,0;15,0;15,8;0,8"),
        polygon("sidewalk", "3.2,10.1;5.4,10;5,11.4;3,11", "damp"),
    ]
    annotate(source / place, image_tag("a.jpg"), image_tag("Surface_001/b.jpg", *shapes))

    found = opened(writer, source)

    wanted = np.zeros((12, 16), np.uint8)
    wanted[:9] = 3
    wanted[:6] = 2
    wanted[10:12, 3:6] = 1
    np.testing.assert_array_equal(found["Surface_001-b"]["mask"], wanted)
    np.testing.assert_array_equal(found["Surface_001-a"]["mask"], ids_of("a"))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (image_tag("c.jpg"), r"image 'c\.jpg' is not in Surface_001/"),
        (image_tag("a.jpg") + image_tag("a.jpg"), r"image 'a\.jpg' occurs twice"),
        (image_tag("a.jpg", polygon("grass", "0,0;1,0;1,1")), r"image 'a\.jpg': label 'grass' is not a class"),
        (image_tag("a.jpg", polygon("roadway", "0,0;1,0")), "want polygons of three"),
        (image_tag("a.jpg", polygon("roadway", "0,0;1,x;1,1")), "want polygons of three"),
        (image_tag("a.jpg", polygon("roadway", "0,0;1,inf;1,1")), "want polygons of three"),
        (image_tag("a.jpg", polygon("roadway", "0,0;1e9,0;1,1")), "want polygons of three"),
        (image_tag("a.jpg", '<box label="roadway" xtl="0" ytl="0" xbr="1" ybr="1"/>'), "found a box"),
        (image_tag("a.jpg", polygon("roadway", "0,0;1,0;1,1", z_order="top")), "z_order='top'; want a whole number"),
        ('<image name="a.jpg"/>', "height=''; want a whole number"),
        ("<image", r"Surface_001\.xml: .*export it again"),
    ],
)
def test_bad_xml_is_refused(writer, surface, image, message):
    """The error names what cannot be drawn, with its file and image."""
    source = surface("Surface_001", ["a"])
    annotate(source / "Surface_001.xml", image)

    with pytest.raises(SourceError, match=message):
        list(writer.index(source))


@pytest.mark.parametrize(
    ("names", "coded", "message"),
    [
        (["a", "b"], ["a"], r"Surface_001: b\.jpg: image without annotation"),
        (["a"], ["a", "b"], r"MASK/b\.png: annotation without image"),
        ([], [], "Surface_"),
    ],
)
def test_folders_that_do_not_fit_are_refused(writer, surface, tmp_path, names, coded, message):
    (tmp_path / "set").mkdir()
    source = surface("Surface_001", names, coded=coded)

    with pytest.raises(SourceError, match=message):
        list(writer.index(source))


@pytest.mark.parametrize(
    ("size", "colour", "message"),
    [((12, 16), (1, 2, 3), r"row 3, column 5.*\(1, 2, 3\)"), ((6, 8), (0, 0, 0), r"\(6, 8\).*\(12, 16\)")],
)
def test_mask_that_does_not_fit_is_refused(writer, surface, mask, size, colour, message):
    """With its first pixel of an undeclared colour, in reading order, or with both sizes."""
    source = surface("Surface_001", ["a"])
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[3, 5] = pixels[4, 0] = colour
    mask(source / "Surface_001/MASK/a.png", pixels)

    with pytest.raises(SchemaError, match=rf"MASK/a\.png.*{message}"):
        opened(writer, source)


def test_document_type_is_refused(writer, surface):
    """Entities could expand without end, or read other files."""
    source = surface("Surface_001", ["a"])
    text = '<!DOCTYPE lolz [<!ENTITY a "x">]><annotations><image name="&a;"/></annotations>'
    (source / "Surface_001.xml").write_text(text)

    with pytest.raises(SourceError, match="declares a document type"):
        list(writer.index(source))


def test_drawing_of_another_size_is_refused_before_it_is_drawn(writer, surface):
    """The size in an XML entry is not trusted: 10**18 pixels are never allocated."""
    source = surface("Surface_001", ["a"])
    annotate(source / "Surface_001.xml", image_tag("a.jpg", size=(10**9, 10**9)))

    with pytest.raises(SchemaError, match="make them agree"):
        opened(writer, source)


@pytest.mark.parametrize("palette", [PALETTE[:3], (*PALETTE[:3], PALETTE[0])])
def test_palette_that_does_not_distinguish_classes_is_refused(palette):
    """One colour for each class, all different."""
    with pytest.raises(OptionError, match="4 names and 3 different colours"):
        PedestrianWriter(NAMES, palette)


def test_default_palette_is_that_of_the_surface_masks():
    """Golden values: the set's own colours."""
    features = PedestrianWriter().features

    assert len(features["mask"].names) == 22
    assert dict(zip(features["mask"].names, features["mask"].palette, strict=True))["roadway_crosswalk"] == (
        255,
        0,
        255,
    )


def test_round_trip_holds_masks_of_both_kinds(writer, surface, materialized):
    """Colour-coded and drawn masks come back as ids."""
    source = surface("Surface_001", ["a", "b"], coded=["a"])
    annotate(source / "Surface_001.xml", image_tag("b.jpg", polygon("roadway", "0,0;15,0;15,11;0,11")))

    found = materialized(writer, source)["train"]

    np.testing.assert_array_equal(found["Surface_001-a"]["mask"], ids_of("a"))
    np.testing.assert_array_equal(found["Surface_001-b"]["mask"], np.full((12, 16), 3, np.uint8))
