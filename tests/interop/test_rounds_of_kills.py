"""Forty kills of a run, and of tasks, at random moments, on a disk and on each store: nothing lost, doubled or mixed.

Runs on a disk are killed in `tests/faults/test_kill_loop.py`.
"""

import hashlib
import random
import signal

import fsspec
import pytest
import sliced_job
from store_servers import KINDS
from test_upload_by_url import Place

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

NUM_KILLS = 40
LEFT = {"ledger.jsonl", "names.json", "sidecars.json", "inputs", "lock"}  # the lock on a disk only


@pytest.mark.parametrize("kind", KINDS)
def test_runs(server, proxy, tmp_path):
    """A manifest is there only with all that it lists; the run after a kill needs its scratch folder, or has none."""
    place, rng, killed = Place(server, proxy, tmp_path), random.Random(5), 0
    expected = place.local()
    while killed < NUM_KILLS:
        scratch = f"scratch-{killed if rng.random() < 0.3 else 0}"
        code, out = place.run_killed(len(proxy.seen) + rng.randrange(3, 60), scratch=scratch)
        if code == -signal.SIGKILL:
            killed += 1
            there = place.there()[0]
            assert ("manifest.json" in there) <= (there == expected), f"kill {killed}"
            continue
        assert code == 0, out
        place.run(scratch=scratch)
        place.check(expected)
        for path in place.files.find(place.root):
            place.files.rm_file(path)
    place.run(scratch="last")
    place.check(expected)


@pytest.mark.parametrize("kind", ["disk", *KINDS])
def test_tasks(kind, request, tmp_path):
    """Two of three are killed with their workers, and the third makes what these had, once their leases expire."""
    source, rng, killed = sliced_job.make_source(tmp_path / "source"), random.Random(7), 0
    sliced_job.job(source, tmp_path / "wanted").run(progress=False)
    wanted = sliced_job.content(tmp_path / "wanted")
    if kind == "disk":
        files, base, options = fsspec.filesystem("file"), str(tmp_path / "sets"), None
    else:
        server = request.getfixturevalue("server")
        files, bucket = server.files(), f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}"
        files.mkdir(bucket)
        base, options = f"{kind}://{bucket}", server.options()
    while killed < NUM_KILLS:
        name = f"{rng.randrange(1 << 60):x}"
        output = f"{base}/{name}"

        def start(index, last_read=0, name=name, output=output):
            own = tmp_path / f"{name}-{index}"
            act = f"read,{last_read},9,{own}-tally" if last_read else ""
            more = f", storage_options={options!r}, scratch={str(own)!r}" if options else ""
            return sliced_job.start_task(source, output, index, 3, lease_s=2, act=act, options=more)

        tasks = [start(index, rng.randrange(1, 40)) for index in range(2)]
        for task in tasks:
            task.communicate()
        killed += sum(task.returncode == -signal.SIGKILL for task in tasks)
        out, err = start(2).communicate()
        assert out == "True\n", err
        files.invalidate_cache()
        root = output.partition("://")[2] or output
        names = [path[len(root) + 1 :] for path in files.find(root)]
        found = {name: files.cat_file(f"{root}/{name}") for name in names if ".datamat" not in name}
        assert found == wanted, output
        assert {name.removeprefix(".datamat/") for name in names if ".datamat" in name} <= LEFT
