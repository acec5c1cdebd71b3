"""The base class of all writers of the project."""

import dataclasses
import logging

from datamat import DatasetWriter, IndexRow

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Settings:
    rate: int = 16_000
    seconds: float = 1.0

    @property
    def length(self):
        return int(self.rate * self.seconds)


class Base(DatasetWriter):
    prefix = "item"

    def __init__(self, settings):
        self.settings = settings
        self.seen = 0

    def index(self, source):
        return [IndexRow(f"{self.prefix}{n}", "train", {"n": n}) for n in range(source)]

    def augment(self, sample, rng):
        self.seen += 1
        logger.debug("sample %d", self.seen)
        return {**sample, "signal": sample["signal"] + rng.uniform(-0.5, 0.5, sample["signal"].shape)}
