"""The function that makes a sample of an item."""

import config


def make(i):
    return {"value": i * config.K, "scaled": i * config.options["scale"], "names": len(config.NAMES)}
