"""Nothing is lost and nothing grows while pools of all start methods are under mixed load; see `load`."""

import json
from pathlib import Path

import pytest
from fresh import environment, python

PROGRAM = Path(__file__).with_name("load.py")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nothing_is_lost_and_nothing_grows_under_load():
    # One arena: with one for each thread, glibc keeps up to 70 MB more in pieces, which looks like a leak.
    done = python(str(PROGRAM), "--seconds", "120", "--round", "4", timeout=380, env=environment(MALLOC_ARENA_MAX="1"))

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["grown"] == {}
    assert {"kill", "suicide", "failing task", "array back", "terminated", "log records"} <= report["outcomes"].keys()
    assert not done.stderr
