"""What the files for other readers say, field by field: also of odd names, and of what a client cannot hold."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
import small_pairs

from datamat import (
    BBoxes,
    ClassLabel,
    CorruptDataError,
    DatasetWriter,
    Features,
    Image,
    IndexRow,
    Manifest,
    Mask,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
)
from datamat.directory.manifest import ShardInfo, part_of
from datamat.directory.sidecars.exporting import export, sidecar_names
from datamat.directory.sidecars.huggingface import hugging_face_sidecars
from datamat.directory.sidecars.indexes import tar_index
from datamat.directory.sidecars.tfds import tfds_sidecars
from datamat.formats.webdataset import WebDatasetFormat


@pytest.mark.parametrize(
    ("feature", "described"),
    [
        (Scalar("float64"), {"dtype": "float64", "encoding": "bytes", "shape": {}}),
        (Scalar("bool"), {"dtype": "bool", "encoding": "none", "shape": {}}),
        (Tensor((2, None), "int16"), {"dtype": "int16", "encoding": "bytes", "shape": {"dimensions": ["2", "-1"]}}),
        (Tensor((None, None), "uint8"), {"dtype": "uint8", "encoding": "bytes", "shape": {"dimensions": ["-1"]}}),
        (Tensor((3,), "uint8", "raw"), {"dtype": "uint8", "encoding": "bytes", "shape": {"dimensions": ["3"]}}),
        (Tensor((3,), "uint32", "raw"), None),
        (Text(), None),
    ],
)
def test_numbers_are_described_as_they_are_stored(feature, described):
    """As numbers or raw bytes, with type and shape; as text, that is bytes, where TFDS cannot decode them."""
    features = json.loads(tfds_sidecars(_manifest({"field": feature}))["features.json"])["content"]["features"]

    assert features["field"].get("tensor") == described
    assert ("text" in features["field"]) == (described is None)
    assert ("field/shape" in features) == (feature == Tensor((None, None), "uint8"))


@pytest.mark.parametrize("names", [("a", " b"), ("a", "b\nc"), ("a", ""), ("a", "b\x85")])
def test_names_that_lines_cannot_hold_are_omitted(names):
    """A client would count them differently, and give labels the names of others."""
    assert "label.labels.txt" not in tfds_sidecars(_manifest({"label": ClassLabel(names=names)}))


def test_names_of_fields_that_share_a_file_are_omitted():
    """TFDS would give one of them the names of the other."""
    fields = {"a/b": ClassLabel(names=("x", "y")), "a.b": ClassLabel(names=("p", "q")), "c": Mask(names=("road",))}

    assert {name for name in tfds_sidecars(_manifest(fields)) if name.endswith(".txt")} == {"c.labels.txt"}


def _manifest(fields, *, name="set", format_name="tfrecord"):
    shard = ShardInfo(f"{name}-train-00000-of-00001.x", "train", 1, 1, (), "0" * 32, "0" * 32, *[part_of(b"")] * 3)
    return Manifest(name, format_name, Features(fields), (shard,))


class Odd(DatasetWriter):
    """Names and keys that YAML, tables and lists of members could stumble over."""

    name = "odd"
    features = Features(
        {
            "a: b | `c`": ClassLabel(
                names=("yes", "null", "1", "'", '"', "#", "größe: x", "-", "a\x85\u2028\x00b", "😀")
            ),
            "n": Scalar("float16"),
            "boxes": BBoxes(),
            "image": Image((None, None, 1)),
            "mask": Mask(),
        }
    )

    def index(self, source):
        return [IndexRow(f"{'long' * 30} b.{number}", split="train") for number in range(3)]

    def read(self, row):
        pixels = np.zeros((2, 3, 1), np.uint8)
        boxes = np.zeros((0, 4), np.float32)
        return {"a: b | `c`": "null", "n": np.float16(1), "boxes": boxes, "image": pixels, "mask": pixels[..., 0]}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A finished directory of odd names, as tar shards."""
    output = tmp_path_factory.mktemp("odd") / "out"
    small_pairs.job(None, output, Odd(), format="webdataset", shards=ShardOptions(num_shards=1)).run(progress=False)
    return output


def test_order_of_declaration_does_not_show(odd, tmp_path):
    """A run knows it; an export, which has the manifest alone, does not."""
    output = shutil.copytree(odd, tmp_path / "out")
    for name in sidecar_names(Manifest.read(output)):
        (output / name).unlink()

    export(output)

    assert small_pairs.digests(output) == small_pairs.digests(odd)


def test_index_of_members_finds_each_member(odd):
    """It finds those behind long names; names with spaces are left out, because a space ends a name for DALI."""
    (shard,) = odd.glob("*.tar")
    data = shard.read_bytes()
    head, *lines = shard.with_name(f"{shard.name}.idx").read_text().splitlines()

    assert head == "v1.1 3"
    with tarfile.open(shard) as archive:
        members = [(m.name.partition(".")[2], str(m.offset_data), str(m.size)) for m in archive.getmembers()]
    found = [tuple(line.split()[at : at + 3]) for line in lines for at in range(0, len(line.split()), 3)]
    assert found == members
    assert all(data[int(offset) :][: int(size)] for _, offset, size in found)


def test_empty_archive_has_an_empty_index(tmp_path):
    """A split whose rows all failed has such an archive."""
    (tmp_path / "empty.tar").write_bytes(WebDatasetFormat().trailer(io.BytesIO(), [(0, 0)]))

    assert tar_index(tmp_path / "empty.tar") == b"v1.2 0\n"


def test_truncated_archive_has_no_index(odd, tmp_path):
    """It would list a member that nobody can read."""
    (shard,) = odd.glob("*.tar")
    (tmp_path / "cut.tar").write_bytes(shard.read_bytes()[:1800])

    with pytest.raises(CorruptDataError, match="ends inside"):
        tar_index(tmp_path / "cut.tar")


def test_card_is_yaml_whatever_the_names():
    """A YAML reader returns what went in."""
    yaml = pytest.importorskip("yaml", reason="the package pyyaml is not installed")
    card = hugging_face_sidecars(_manifest(dict(Odd.features), format_name="parquet"))["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])

    fields = {field["name"]: field for field in head["dataset_info"]["features"]}
    names = fields["a: b | `c`"]["dtype"]["class_label"]["names"]
    assert names == {str(number): name for number, name in enumerate(Odd.features["a: b | `c`"].names)}
    assert fields["n"]["dtype"] == "float32"
    assert fields["boxes"]["list"] == {"list": "float32", "length": 4} or fields["boxes"]["list"] == "float32"
    assert head["configs"][0]["data_files"] == [{"split": "train", "path": "set-train-*.x"}]
