"""The example runs as users run it, and its benchmark companions start."""

import pytest
from fresh import ROOT, python


@pytest.mark.long
def test_training_of_many_models_prints_its_table():
    """It compares one process with two, which give the same result."""
    done = python(str(ROOT / "examples/many_models.py"), "--targets", "60")

    assert done.returncode == 0, done.stderr
    head, _, *rows = done.stdout.splitlines()
    assert head == "60 targets"
    assert [row.split()[0] for row in rows[:2]] == ["1", "2"]


@pytest.mark.long
def test_dispatch_benchmark_compares_what_is_installed():
    """At least our pool, the standard library's and that of pathos."""
    options = "--rounds 1 --tasks 200 --cheap 5000 --sleeps 50 --ideal 0.1"

    done = python(str(ROOT / "benchmarks/dispatch.py"), *options.split())

    assert done.returncode == 0, done.stderr
    for name in ("datamat", "multiprocessing.Pool", "pathos ProcessPool", "concurrent.futures"):
        assert name in done.stdout
