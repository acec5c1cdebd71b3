"""Options are checked when they are made."""

import pytest

from datamat.errors import OptionError
from datamat.options import ErrorPolicy, WorkerOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"start_method": "thread"}, "start_method is 'thread'"),
        ({"affinity": "all"}, "affinity is 'all'"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"sample_timeout_s": 0}, "sample_timeout_s is 0"),
        ({"max_rss": -1}, "max_rss is -1"),
    ],
)
def test_worker_options_refuse_nonsense(options, message):
    """The error gives the option and its value."""
    with pytest.raises(OptionError, match=message):
        WorkerOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "ignore"}, "action is 'ignore'; want 'raise', 'skip' or 'quarantine'"),
        ({"max_errors": -1}, "max_errors is -1"),
        ({"max_errors": 1.5}, "max_errors is 1.5; a float is a share"),
        ({"max_errors": float("nan")}, "max_errors is nan"),
        ({"max_errors": True}, "max_errors is True"),
        ({"max_errors": "many"}, "max_errors is 'many'"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": 1.0}, "retries is 1.0"),
    ],
)
def test_error_policy_refuses_nonsense(options, message):
    """The error gives the option and its value."""
    with pytest.raises(OptionError, match=message):
        ErrorPolicy(**{"action": "skip", **options})


@pytest.mark.parametrize(("most", "limit"), [(None, None), (0, 0), (7, 7), (0.0, 0), (0.01, 2), (1.0, 200)])
def test_limit_is_a_number_or_a_share(most, limit):
    """A share is one of two hundred rows here."""
    assert ErrorPolicy("skip", max_errors=most).limit(200) == limit
