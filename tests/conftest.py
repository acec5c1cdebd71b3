"""What all tests share: how often the kill loops go round."""

from __future__ import annotations

import pytest

ROUNDS_OF_THE_SUITE = 2
ROUNDS_OF_STRESS = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="run the kill loops in full, as `make stress` does")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `pytest -m stress` find the kill loops by the fixture that they go round with."""
    for item in items:
        if "kill_rounds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.stress)


@pytest.fixture
def kill_rounds(request: pytest.FixtureRequest) -> int:
    """Give how often a kill loop goes round: a few times in the suite, many times under --stress."""
    return ROUNDS_OF_STRESS if request.config.getoption("--stress") else ROUNDS_OF_THE_SUITE
