"""A dataset of your own: say what a sample holds, which samples there are, and how one is read.

    python examples/custom_writer.py [FOLDER [NUMBER]]

The folder holds pictures of leaves, each with a JSON file beside it. It may all stand in a notebook or, as here, in a
script without `if __name__ == "__main__":`.
"""

import json
import pathlib
import sys

import cv2
import numpy as np

from datamat import ClassLabel, DatasetWriter, Features, Image, Index, IndexRow, Materializer, Scalar, load

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "leaves")
number = int(sys.argv[2]) if len(sys.argv) > 2 else 200
SPECIES = ("oak", "beech", "maple")


def draw_leaves(folder: pathlib.Path, number: int) -> None:
    """Write what a camera and a balance would: NAME.png and NAME.json."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(number):
        kind, length = int(rng.integers(3)), float(rng.uniform(12, 28))
        picture = np.full((64, 64, 3), 235, np.uint8)
        cv2.ellipse(picture, (32, 32), (int(length), 6 + 4 * kind), int(rng.integers(180)), 0, 360, (40, 120, 60), -1)
        cv2.imwrite(str(folder / f"leaf{place:04d}.png"), picture)
        facts = {"species": SPECIES[kind], "grams": round(length / 9, 3)}
        (folder / f"leaf{place:04d}.json").write_text(json.dumps(facts))


class LeafWriter(DatasetWriter):
    """Pictures of leaves with their species and weight."""

    name = "leaves"
    features = Features(
        {"image": Image(shape=(64, 64, 3)), "species": ClassLabel(names=SPECIES), "grams": Scalar("float64")}
    )

    def index(self, source: str) -> Index:
        return Index.from_folder(source, suffixes=[".png"], fields_of=lambda path: {"facts": f"{path.stem}.json"})

    def read(self, row: IndexRow) -> dict:
        facts = json.loads(pathlib.Path(row.fields["facts"]).read_bytes())
        return {"image": pathlib.Path(row.fields["image"]).read_bytes(), **facts}

    def augment(self, sample: dict, rng: np.random.Generator) -> dict:
        return {**sample, "image": np.rot90(sample["image"], rng.integers(4)).copy()}


draw_leaves(folder / "raw", number)
Materializer(LeafWriter, folder / "raw", folder / "out", splits={"train": 0.8, "val": 0.2}, copies={"train": 2}).run()

leaves = load(folder / "out", "train")
leaf = leaves[0]
print(f"{len(leaves)} samples; {leaf['key']}: {SPECIES[leaf['species']]}, {leaf['grams']} g, {leaf['image'].shape}")
