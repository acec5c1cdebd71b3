"""Each part of datamat that decides bytes gives those that its `OUTPUT_VERSION` stands for.

Shards are made again where that number is raised, and only there: it stands for the code of the part in fingerprints.
So where a test fails here, raise the number in the part, and renew what it stands for:

    python tests/fingerprint/test_output_versions.py

`tests/golden/output_versions.json` holds for each part the number, a digest of what it gave, and the versions of the
packages that had a hand in it. With other versions of these the bytes prove nothing, and the test is skipped.
"""

import importlib
import io
import itertools
import json
import pathlib
import shutil
import sys
import tempfile
import types

import numpy as np
import pytest

from datamat import BBoxes, ClassLabel, Features, Image, IndexRow, Mask, Scalar, ShardOptions, Tensor, Text
from datamat.features.base import dtype_of
from datamat.fingerprint import examine, versions_of
from datamat.formats import Offsets, get_format
from datamat.plan.pipeline import Pipeline
from datamat.plan.plan import SplitTerms, make_plan
from datamat.sources.writing import write_rows
from datamat.transforms import Augmenter
from datamat.writers.base import DatasetWriter

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FILE = GOLDEN / "output_versions.json"
RENEW = "raise its OUTPUT_VERSION, and renew tests/golden with: python tests/fingerprint/test_output_versions.py"

PIXELS = (np.arange(12 * 16 * 3).reshape(12, 16, 3) * 7 % 256).astype(np.uint8)
SAMPLE = {
    "key": "a",
    "image": PIXELS,
    "photo": PIXELS,
    "mask": PIXELS[..., 0] % 3,
    "label": "cat",
    "boxes": np.array([[0.25, 0.5, 0.5, 1]], np.float32),
    "caption": "né",
    "count": 5,
    "share": 0.25,
    "table": np.arange(6, dtype=np.int16).reshape(2, 3),
    "volume": np.arange(-60, 60, dtype=np.int16).reshape(4, 5, 6),
}
FEATURES = Features(
    {
        "image": Image((12, 16, 3)),
        "photo": Image((12, 16, 3), encoding="jpeg"),
        "mask": Mask((12, 16)),
        "label": ClassLabel(names=("dog", "cat")),
        "boxes": BBoxes(),
        "caption": Text(),
        "count": Scalar("int64"),
        "share": Scalar("float32"),
        "table": Tensor((2, 3), "int16"),
        "volume": Tensor((4, 5, 6), "int16"),
    }
)
PLAIN = Features({"caption": Text(), "count": Scalar("int64"), "share": Scalar("float32")})

pytest.importorskip("ml_dtypes")  # which comes with TensorFlow
NARROW = {name: Tensor((None,), name) for name in ("uint8", "int16", "float16", "bfloat16")}


class Numbers(DatasetWriter):
    features = Features({"n": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{n:03d}", "train" if n % 3 else "val", {"n": n}) for n in range(source)]

    def read(self, row):
        return {"n": row.fields["n"]}

    def augment(self, sample, rng):
        return {**sample, "n": sample["n"] + int(rng.integers(1 << 40))}


def add_noise(sample, rng):
    return [{**sample, "n": sample["n"] + int(rng.integers(1 << 40))} for _ in range(2)]


def codecs(folder):
    from datamat import codecs as part

    files = [(GOLDEN / name).read_bytes() for name in ("picture.png", "picture.jpg")]
    return [
        *(part.encode_png(PIXELS[..., :channels]) for channels in (1, 3)),
        *(part.encode_jpeg(PIXELS, quality=quality) for quality in (50, 95)),
        *map(part.decode_image, files),
        part.decode_mask((GOLDEN / "mask.png").read_bytes()),
    ]


def features(folder):
    return FEATURES.encode(SAMPLE)


def seeding(folder):
    from datamat.directory import keys
    from datamat.transforms import seeding

    drawn = [seeding.sample_seed(3, "a", copy, attempt).generate_state(4) for copy in (0, 1) for attempt in (0, 1)]
    return [keys.key_hash("a"), keys.mix64(np.arange(3, dtype=np.uint64)), drawn]


def transforms(folder):
    writer = Numbers()
    augmenter = Augmenter(writer.features, add_noise, writer.augment)
    return [list(augmenter.stream({"key": "a", "n": 1}, augmenter.seeded_streams("a", copy, 7))) for copy in range(2)]


def pipeline(folder):
    writer = Numbers()
    made = Pipeline(writer, Augmenter(writer.features, add_noise, writer.augment), 7)
    row = IndexRow("a", "train", {"n": 4})
    cases = ((1, False), (2, False), (2, True))
    return [
        [(key, dict(columns)) for key, columns in made.records(row, copies=copies, augmented=augmented)]
        for copies, augmented in cases
    ]


def plan(folder):
    store = write_rows(Numbers().index(300), folder, source="")
    names = store.splits
    made = make_plan(
        store,
        name="set",
        options=ShardOptions(num_shards=3),
        splits=dict.fromkeys(names, SplitTerms(1, False, "f")),
        seed=1,
        costs=store.input_bytes(),
    )
    parts = [[(shard.name, part.start, part.stop) for part in shard.parts] for shard in made.shards]
    return [parts, store.keys(store.order[:])]


def shard(name, more=types.MappingProxyType({})):
    def made(folder):
        features = Features({**PLAIN, **more})
        shard_format = get_format(name).with_features(features)
        samples = [{"key": f"{n}", "caption": "ab" * n, "count": n, "share": n / 4} for n in range(50)]
        numbers = {name: np.arange(9).astype(dtype_of(feature.dtype)) for name, feature in more.items()}
        records = [features.encode({**sample, **numbers}) for sample in samples]
        parts = []
        for number, some in enumerate((records[:30], records[30:])):
            file = io.BytesIO()
            writer = shard_format.writer(file, features.columns)
            for record in some:
                writer.append(record)
            offsets = writer.finish()
            path = folder / f"{number}.part"
            path.write_bytes(file.getvalue())
            parts.append((path, offsets))
        if shard_format.joins_parts:
            joined = Offsets.joined([(offsets, path.stat().st_size) for path, offsets in parts])
            content = b"".join(path.read_bytes() for path, _ in parts)
            sizes = [path.stat().st_size for path, _ in parts]
            starts = itertools.accumulate(sizes, initial=0)
            trailer = shard_format.trailer(io.BytesIO(content), list(zip(starts, sizes, strict=False)))
            return [content + trailer, joined.to_text()]
        assembler = shard_format.assembler(folder / f"shard.{shard_format.extension}")
        for path, _ in parts:
            assembler.add(path)
        offsets = assembler.finish()
        assembler.close()
        return [(folder / f"shard.{shard_format.extension}").read_bytes(), offsets.to_text()]

    return made


def put(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDEN / name, path)


def samples(writer, source):
    """Return rows and samples of a source, and the writer's declarations."""
    writer.bind(source)
    found = []
    for row in writer.index(source):
        paths = {}
        for name, value in row.fields.items():
            if isinstance(value, str) and value and (pathlib.Path(source) / value).is_file():
                paths[name] = str(pathlib.Path(source) / value)
        sample = writer.read(row._replace(fields={**row.fields, **paths}))
        found.append((row.key, row.split, dict(row.fields), {name: as_plain(value) for name, value in sample.items()}))
    return [found, writer.features.to_json()]


def as_plain(value):
    return np.asarray(value) if hasattr(value, "__array__") else value


def camvid(folder):
    from datamat.writers.camvid import CamVidWriter

    for split in ("train", "val"):
        put(folder / split / "a.png", "picture.png")
        put(folder / f"{split}annot" / "a.png", "mask.png")
    return samples(CamVidWriter(), folder)


def coco(folder):
    from datamat.writers.coco import CocoWriter

    put(folder / "train2017" / "a.jpg", "picture.jpg")
    content = {
        "images": [{"id": 9, "file_name": "a.jpg", "height": 12, "width": 16}],
        "annotations": [
            {"id": 1, "image_id": 9, "category_id": 18, "bbox": [4, 3, 8, 6], "area": 48, "iscrowd": 0},
            {"id": 2, "image_id": 9, "category_id": 1, "bbox": [12.5, -1, 20, 5], "area": 100, "iscrowd": 1},
        ],
        "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}],
    }
    (folder / "annotations").mkdir()
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    return samples(CocoWriter(), folder)


def yolo(folder):
    from datamat.writers.yolo import YoloWriter

    put(folder / "images/train/a.jpg", "picture.jpg")
    put(folder / "images/train/b.jpg", "picture.jpg")
    (folder / "labels/train").mkdir(parents=True)
    (folder / "labels/train/a.txt").write_text("1 .5 .5 .25 .125\n0 0 0 .5 0 .5 1.5\n")
    (folder / "data.yaml").write_text("train: images/train\nnames: [person, dog]\n")
    return samples(YoloWriter(segments=True), folder)


def voc(folder):
    from datamat.writers.voc import VocWriter

    put(folder / "JPEGImages/a.jpg", "picture.jpg")
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>9.5</xmax><ymax>8</ymax></bndbox>"
    found = f"<object><name>dog</name><difficult>1</difficult>{box}</object><object><name>cat</name>{box}</object>"
    (folder / "Annotations").mkdir()
    (folder / "Annotations/a.xml").write_text(f"<annotation>{found}</annotation>")
    return samples(VocWriter(), folder)


def labelme(folder):
    from datamat.writers.labelme import LabelmeWriter

    put(folder / "a.jpg", "picture.jpg")
    shapes = [
        {"label": "dog", "points": [[1, 2], [9, 2], [9, 5]], "shape_type": "polygon"},
        {"label": "cat", "points": [[4, 4], [4, 6]], "shape_type": "circle"},
    ]
    content = {"shapes": shapes, "imagePath": "a.jpg", "imageHeight": 12, "imageWidth": 16}
    (folder / "a.json").write_text(json.dumps(content))
    return samples(LabelmeWriter(segments=True), folder)


def cityscapes(folder):
    from datamat.writers.cityscapes import CityscapesWriter

    put(folder / "leftImg8bit/train/ulm/ulm_000000_000019_leftImg8bit.png", "picture.png")
    put(folder / "gtFine/train/ulm/ulm_000000_000019_gtFine_labelIds.png", "mask.png")
    return samples(CityscapesWriter(), folder)


def image_folder(folder):
    from datamat.writers.image_folder import ImageFolderWriter

    for name in ("train/cat/a.jpg", "train/dog/b.jpg", "val/cat/c.jpg"):
        put(folder / name, "picture.jpg")
    return samples(ImageFolderWriter(), folder)


def pedestrian(folder):
    from datamat.writers.pedestrian import PedestrianWriter

    put(folder / "Surface_001" / "a.jpg", "picture.jpg")
    shapes = '<polygon label="sidewalk" points="1,1;14,2;9,11" z_order="0"></polygon>'
    image = f'<image id="0" name="a.jpg" width="16" height="12">{shapes}</image>'
    text = f'<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version>{image}</annotations>'
    (folder / "Surface_001.xml").write_text(text)
    return samples(PedestrianWriter(("ground", "sidewalk"), ((0, 0, 0), (9, 8, 7))), folder)


def table(folder):
    from datamat.writers.table import TableWriter

    path = folder / "rows.csv"
    path.write_text("key,speed,lane,kind,split\n007,13.5,2,car,train\nb.ü,-0.25,3,van,val\n", encoding="utf-8")
    writer = TableWriter()
    found = samples(writer, path)
    rows = list(writer.index(path))
    columns = {name: [row.fields[name] for row in rows] for name in rows[0].fields}
    arrays = {name: np.asarray(values) for name, values in columns.items() if not isinstance(values[0], str)}
    block = writer.read_block([row.key for row in rows], {**columns, **arrays})
    return [found, {name: list(values) for name, values in (block or {}).items()}]


def function(folder):
    from datamat.writers.function import function_writer

    items = [3, "a/b", {"x": 1}]
    return samples(
        function_writer(lambda item: {"n": len(str(item))}, items, name="data", features=Numbers.features), ""
    )


def dataset(folder):
    from datamat.writers.dataset import ImportWriter

    return samples(ImportWriter(), [{"x": PIXELS + n, "y": n} for n in range(3)])


PARTS = {
    "datamat.codecs": (codecs, ("cv2", "simplejpeg", "zlib")),
    "datamat.features": (features, ("cv2", "zlib")),
    "datamat.formats.arrayrecord": (shard("arrayrecord"), ("array_record",)),
    "datamat.formats.parquet": (shard("parquet", NARROW), ("pyarrow",)),
    "datamat.formats.tfrecord": (lambda folder: shard("tfrecord")(folder) + shard("tfrecord.gz")(folder), ("zlib",)),
    "datamat.formats.webdataset": (shard("webdataset"), ()),
    "datamat.plan.pipeline": (pipeline, ("numpy",)),
    "datamat.plan.plan": (plan, ()),
    "datamat.transforms.seeding": (seeding, ("numpy",)),
    "datamat.transforms": (transforms, ("numpy",)),
    "datamat.writers.camvid": (camvid, ()),
    "datamat.writers.cityscapes": (cityscapes, ()),
    "datamat.writers.coco": (coco, ()),
    "datamat.writers.dataset": (dataset, ()),
    "datamat.writers.detection": (yolo, ()),
    "datamat.writers.function": (function, ()),
    "datamat.writers.image_folder": (image_folder, ()),
    "datamat.writers.labelme": (labelme, ()),
    "datamat.writers.pedestrian": (pedestrian, ("cv2",)),
    "datamat.writers.table": (table, ("pyarrow",)),
    "datamat.writers.voc": (voc, ()),
    "datamat.writers.yolo": (yolo, ()),
}


def made(part, folder):
    make, packages = PARTS[part]
    return {
        "output_version": importlib.import_module(part).OUTPUT_VERSION,
        "digest": examine(make(folder), where=part).digest,
        "packages": versions_of(packages),
    }


@pytest.mark.parametrize("part", PARTS)
def test_part_gives_the_bytes_that_its_number_stands_for(tmp_path, part):
    """Otherwise a run would mix different bytes under one number with old shards."""
    if part == "datamat.formats.arrayrecord":
        pytest.importorskip("array_record")
    wanted = json.loads(FILE.read_text())[part]

    found = made(part, tmp_path)

    if found["packages"] != wanted["packages"]:
        pytest.skip(f"made with {wanted['packages']}, here are {found['packages']}")
    assert found["output_version"] == wanted["output_version"], f"{part}: the number was raised; {RENEW}"
    assert found["digest"] == wanted["digest"], f"{part} gives other bytes than it did; {RENEW}"


def test_every_part_with_a_number_has_a_golden_value():
    """Without one, nobody would ever raise the number."""
    import datamat

    root = pathlib.Path(datamat.__file__).parent
    numbered = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in root.rglob("*.py")
        if "\nOUTPUT_VERSION = " in path.read_text()
    }

    assert numbered == set(PARTS)


def renew():
    """Write the golden values; refuse a part that produces different bytes under its old number."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    after = {}
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            after[part] = made(part, pathlib.Path(folder))
        old = before.get(part, after[part])
        same = all(old[name] == after[part][name] for name in ("packages", "output_version"))
        if same and old["digest"] != after[part]["digest"]:
            sys.exit(f"{part} gives other bytes than before: raise its OUTPUT_VERSION first")
    FILE.write_text(json.dumps(after, indent=1) + "\n")


if __name__ == "__main__":
    renew()
