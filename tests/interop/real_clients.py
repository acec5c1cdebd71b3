"""The marks of tests that run real clients, and the shards that they open."""

import pytest

MARKS = [
    pytest.mark.timeout(300),  # clients take long to import
    pytest.mark.filterwarnings("ignore"),  # these warnings are theirs
]


def shards(folder, ending):
    """Return the paths of the train shards of a format, in order."""
    return sorted(map(str, folder.glob(f"*-train-*.{ending}")))
