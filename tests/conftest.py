"""What all tests share: how often the kill loops go round."""

from __future__ import annotations

import pytest

ROUNDS_OF_THE_SUITE = 2
ROUNDS_OF_STRESS = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="run the kill loops in full, as `make stress` does")


@pytest.fixture
def kill_rounds(request: pytest.FixtureRequest) -> int:
    """Give how often a kill loop goes round: a few times in the suite, many times under --stress."""
    return ROUNDS_OF_STRESS if request.config.getoption("--stress") else ROUNDS_OF_THE_SUITE
