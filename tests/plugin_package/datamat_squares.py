"""A writer and a feature type that another package provides: squares of numbers, and waveforms."""

import dataclasses
import zlib

import numpy as np

from datamat import DatasetWriter, Features, IndexRow, Scalar
from datamat.directory.sidecars.croissant import croissant_type
from datamat.errors import InputError, SchemaError
from datamat.features import ArrowType, Feature, Preview


class SquaresWriter(DatasetWriter):
    """Numbers and their squares; the source gives their number."""

    name = "squares"
    features = Features({"square": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{number:03d}", fields={"number": number}) for number in range(int(source))]

    def read(self, row):
        return {"square": row.fields["number"] ** 2}


@dataclasses.dataclass(frozen=True)
class Waveform(Feature, Preview):
    """Samples of a sound, float32 (n, channels), deflated; previews draw the first channel."""

    channels: int = 1

    preview = "image"

    type = {"": ArrowType("binary"), "/frames": ArrowType("int64")}  # noqa: RUF012 -- nobody changes it

    def value_type(self):
        return "float32", (None, self.channels)

    def encode(self, value):
        if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape[1:] != (self.channels,):
            raise SchemaError(f"the field is declared {self.declared()} but the sample holds {value!r}")
        return {"": zlib.compress(value.tobytes()), "/frames": np.array([len(value)])}

    def decode(self, columns):
        data = columns[""]
        try:
            data = zlib.decompress(data[0] if isinstance(data, list) else data)
        except zlib.error as error:
            raise InputError(f"the field is damaged: {error}") from error
        return np.frombuffer(data, np.float32).reshape(int(columns["/frames"][0]), self.channels)

    def display(self, value):
        picture = np.full((32, max(len(value), 1), 3), 255, np.uint8)
        rows = (16 - 15 * np.clip(value[:, 0], -1, 1)).astype(int)
        picture[rows, np.arange(len(value))] = 0
        return picture


croissant_type.register(Waveform)(lambda _: "sc:AudioObject")
