"""The small source, what an undisturbed run makes of it, and processes to cause faults to."""

from __future__ import annotations

import pytest
import sets
from injury import Nursery, compiled
from job import Job


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The library that makes operations fail."""
    return compiled(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def small_source(tmp_path_factory):
    """Four pairs for training, one for validation."""
    return sets.make_pairs(tmp_path_factory.mktemp("small"), num_train=4, num_val=1)


@pytest.fixture(scope="session")
def whole(small_source, tmp_path_factory):
    """The digests of what the small job makes."""
    output = tmp_path_factory.mktemp("whole") / "out"
    Job(str(small_source), str(output)).run()
    return sets.digests(output)


@pytest.fixture(scope="module")
def nursery(shim, tmp_path_factory):
    """A process that runs jobs under faults."""
    nursery = Nursery(shim, tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()
