"""The small source, the output of an undisturbed run over it, and processes that run jobs under faults."""

import random

import pytest
import small_pairs
from fault_injection import JobServer, compiled
from job import Job

from datamat.testing import InlineExecutor

EVERY = 20
"""On commit, one operation in so many is hit, by one of the kinds of faults."""
EVERY_LONG = 10
"""In the long tier, all operations of a first run are hit by all kinds, and one in so many of other runs."""
NUM_KINDS = 8


@pytest.fixture
def points(request):
    """Give a function that chooses operations by the sample seed; `kind` is the number of the fault in a first run."""

    def choose(count, kind=None):
        step = EVERY * NUM_KINDS
        if not request.config.getoption("--commit"):
            step = EVERY_LONG if kind is None else 1
        step = min(step, count)
        first = random.Random(request.config.option.sample_seed).randrange(step)
        return range(1 + (first + EVERY * (kind or 0)) % step, count + 1, step)

    return choose


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """The library that makes operations fail."""
    return compiled(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def small_source(tmp_path_factory):
    """Four pairs for training, one for validation."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("small"), num_train=4, num_val=1)


@pytest.fixture(scope="session")
def whole(small_source, tmp_path_factory):
    """The digests of the small job's output."""
    output = tmp_path_factory.mktemp("whole") / "out"
    Job(str(small_source), str(output)).run(InlineExecutor())
    return small_pairs.digests(output)


@pytest.fixture(scope="module")
def job_server(shim, tmp_path_factory):
    """A process that runs jobs under faults."""
    job_server = JobServer(shim, tmp_path_factory.mktemp("job_server"))
    yield job_server
    job_server.close()
