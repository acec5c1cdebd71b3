"""Beeps of a given height."""

import numpy as np

from datamat import Features, Tensor

from .base import Base


class Beeps(Base):
    name = "beeps"
    prefix = "beep"

    @property
    def features(self):
        return Features({"signal": Tensor((self.settings.length,), "float64")})

    def tone(self, n):
        return np.sin(np.arange(self.settings.length) * 2 * np.pi * (n + 1) / self.settings.rate)

    def read(self, row):
        return {"signal": self.tone(row.fields["n"])}
