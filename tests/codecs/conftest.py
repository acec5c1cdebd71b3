import pytest
from missing_libraries import COMBINATIONS, without


@pytest.fixture(params=COMBINATIONS, ids=lambda missing: "without-" + "-".join(missing) if missing else "all")
def missing(request):
    """Each combination of missing fast libraries, in force during the test."""
    with without(request.param):
        yield request.param
