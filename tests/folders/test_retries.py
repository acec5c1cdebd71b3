"""Which errors of a place pass, and how often it is asked."""

from __future__ import annotations

import fsspec
import pytest

from datamat.folders.retries import is_transient, retried


class Answer(Exception):
    """An error as clients raise it."""

    def __init__(self, status):
        self.status = status


def absent_in_memory():
    """Return the error of a file that `memory://` does not have."""
    with pytest.raises(FileNotFoundError) as caught:
        fsspec.filesystem("memory").cat_file("/nowhere/at/all")
    return caught.value


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([Answer(500), Answer(503), Answer(429)], True),
        ([TimeoutError(), ConnectionResetError()], True),
        ([Answer(400), Answer(403), Answer(404), Answer(412)], False),
        ([PermissionError(), ValueError(), absent_in_memory()], False),
    ],
)
def test_which_errors_pass(errors, expected):
    """What a later try may mend, and what it will not."""
    assert {is_transient(error) for error in errors} == {expected}


def test_retry_ends(monkeypatch):
    """The last error is raised; one that lasts is raised at once."""
    pauses = []
    monkeypatch.setattr("datamat.folders.retries.time.sleep", pauses.append)
    errors = [Answer(503), Answer(500), Answer(403)]

    with pytest.raises(Answer) as caught:
        retried(lambda: (_ for _ in ()).throw(errors[len(pauses)]))

    assert caught.value is errors[2]
    assert len(pauses) == 2
    assert all(0 <= pause <= 8 for pause in pauses)
