"""Options are checked when they are made."""

import pytest

from datamat.errors import OptionError
from datamat.options import ErrorPolicy, WorkerOptions


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (WorkerOptions, "num_workers", 0),
        (WorkerOptions, "start_method", "thread"),
        (WorkerOptions, "affinity", "all"),
        (WorkerOptions, "max_retries", -1),
        (WorkerOptions, "sample_timeout_s", 0),
        (WorkerOptions, "max_rss", -1),
        (ErrorPolicy, "action", "ignore"),
        *((ErrorPolicy, "max_errors", value) for value in (-1, 1.5, float("nan"), True, "many")),
        *((ErrorPolicy, "retries", value) for value in (-1, 1.0)),
    ],
)
def test_nonsense_is_refused(kind, name, value):
    """The error gives the option and its value."""
    with pytest.raises(OptionError, match=f"{name} is {value!r}"):
        kind(**{"action": "skip", name: value} if kind is ErrorPolicy else {name: value})


@pytest.mark.parametrize(("most", "limit"), [(None, None), (0, 0), (7, 7), (0.0, 0), (0.01, 2), (1.0, 200)])
def test_limit_is_a_number_or_a_share(most, limit):
    """A share is one of two hundred rows here."""
    assert ErrorPolicy("skip", max_errors=most).limit(200) == limit
