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
        ({"sample_timeout_s": 5.0}, "does not keep sample_timeout_s yet"),
        ({"max_rss": 1 << 30}, "does not keep max_rss yet"),
    ],
)
def test_worker_options_refuse_what_they_do_not_keep(options, message):
    """Rather than take it silently."""
    with pytest.raises(OptionError, match=message):
        WorkerOptions(**options)


def test_error_policy_knows_raise_only():
    """The others come with the ledger."""
    with pytest.raises(OptionError, match="this version knows 'raise'"):
        ErrorPolicy("skip")
