"""The dataset that clients open: pictures, masks, labels, boxes and text of made-up streets."""

import numpy as np

from datamat import BBoxes, ClassLabel, DatasetWriter, Features, Image, IndexRow, Mask, Scalar, Tensor, Text

CLASSES = ("car", "bus", "cyclist")
NUM_ROWS = {"train": 40, "val": 8}


class Streets(DatasetWriter):
    name = "streets"
    features = Features(
        {
            "image": Image((24, 32, 3)),
            "mask": Mask((24, 32), names=("road", "sky")),
            "label": ClassLabel(names=CLASSES),
            "objects/bbox": BBoxes(),
            "objects/label": ClassLabel(names=CLASSES, shape=(None,)),
            "caption": Text(),
            "frac": Scalar("float32"),
            "exact": Scalar("float64"),
            "pose": Tensor((2, 3), "float32"),
        }
    )

    def index(self, source):
        return [
            IndexRow(f"{split}.{number:03d}-größe", split=split, fields={"number": number})
            for split, count in NUM_ROWS.items()
            for number in range(count)
        ]

    def read(self, row):
        rng = np.random.default_rng(int(row.fields["number"]))
        count = int(row.fields["number"]) % 3
        corners = np.sort(rng.random((count, 2, 2), np.float32), 1)
        return {
            "image": rng.integers(0, 256, (24, 32, 3), np.uint8),
            "mask": rng.integers(0, 2, (24, 32), np.uint8),
            "label": int(rng.integers(3)),
            "objects/bbox": corners.reshape(count, 4),
            "objects/label": rng.integers(0, 3, count).tolist(),
            "caption": f"Straße {row.key}",
            "frac": np.float32(rng.random()),
            "exact": rng.random(),
            "pose": rng.random((2, 3), np.float32),
        }
