"""Runs whose output is in a bucket: the bytes of a local run, whatever server, driver and workers go through.

The server is moto's, or the emulator of Google's or Azure's store, behind a proxy that answers wrongly, cuts
connections, or kills a process of the run when a request arrives: so a kill comes at an exact point, and no test waits
for a time to pass.
"""

import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse

import psutil
import pyarrow as pa
import pytest
from breaking_proxy import Proxy
from prepared import Prepared
from store_servers import Server

from datamat import OptionError, load

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys
import numpy as np
from datamat import ShardOptions, WorkerOptions, materialize

def sample(number):
    noise = np.random.default_rng(number)
    return {"number": np.int64(number), "noise": noise.integers(0, 255, 1 << 17, dtype=np.uint8)}

def make(output, num_rows=150, num_shards=2, num_workers=None, **options):
    options |= {"shards": ShardOptions(num_shards=num_shards), "workers": WorkerOptions(num_workers=num_workers)}
    return materialize(sample, list(range(num_rows)), output, progress=False, **options)

if __name__ == "__main__":
    print(make(sys.argv[1], **json.loads(sys.argv[2])))
"""


class Place:
    """A bucket, an output in it, and the script that writes to it."""

    def __init__(self, server, proxy, tmp_path):
        self.tmp_path = tmp_path
        self.proxy = proxy
        self.secret = server.secret
        self.bucket = f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}"
        self.root = f"{self.bucket}/sets/one"
        self.url = f"{server.kind}://{self.root}"
        self.options = server.options(proxy.server_port)
        self.files = server.files()
        self.files.mkdir(self.bucket)
        self.script = tmp_path / "job.py"
        self.script.write_text(SCRIPT)

    def start(self, scratch="scratch", **more):
        """Start the job in a process of its own."""
        values = {"storage_options": self.options, "scratch": str(self.tmp_path / scratch), **more}
        command = [sys.executable, str(self.script), self.url, json.dumps(values)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, **more):
        """Run the job; return its output."""
        job = self.start(**more)
        out = job.communicate()[0]
        assert job.returncode == 0, out
        return out

    def run_killed(self, at, **more):
        """Run the job, and kill it when the request of this number arrives; return its exit status and output."""
        job = self.start(**more)

        def meet(number, _):
            if number == at:
                job.send_signal(signal.SIGKILL)
            return "cut" if number >= at and job.poll() is None else None

        self.proxy.meet = meet
        out = job.communicate()[0]
        self.proxy.meet = lambda number, handler: None
        return job.returncode, out

    def local(self, **more):
        """Return the digests of what a local run gives."""
        folder = self.tmp_path / "local"
        subprocess.run([sys.executable, str(self.script), str(folder), json.dumps(more)], check=True)
        return {
            str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file() and ".datamat" not in path.parts
        }

    def there(self):
        """Return the digests of what is in the bucket, and the names of what is in its `.datamat`."""
        self.files.invalidate_cache()  # adlfs keeps listings, whatever it is told
        names = [path[len(self.root) + 1 :] for path in self.files.find(self.root)]
        seen = {name: hashlib.md5(self.files.cat_file(f"{self.root}/{name}")).hexdigest() for name in names}
        return {name: seen[name] for name in names if ".datamat" not in name}, {
            name.removeprefix(".datamat/") for name in names if ".datamat" in name
        }

    def uploads(self):
        """Return the uploads that are open; other stores than S3 list none."""
        if not self.url.startswith("s3:"):
            return []
        return self.files.call_s3("list_multipart_uploads", Bucket=self.bucket).get("Uploads") or []

    def check(self, expected):
        """Assert that the bucket holds the dataset, and nothing is left over but uploads that a kill left open."""
        found, work = self.there()
        assert found == expected
        assert work <= {"ledger.jsonl", "names.json", "sidecars.json", "inputs"}


@pytest.fixture
def place(server, proxy, tmp_path):
    """A bucket, an output in it, and the script that writes to it."""
    return Place(server, proxy, tmp_path)


FORMATS = [
    ("s3", ["tfrecord.gz", "webdataset"]),
    ("gs", ["parquet", "webdataset"]),
    ("az", ["tfrecord.gz", "webdataset"]),
]


@pytest.mark.parametrize(("kind", "name"), FORMATS)
def test_bucket_holds_the_bytes_of_a_local_run(place, name):
    """So does one that was made on a second machine from the start; a run that finds all of it does nothing."""
    expected = place.local(format=name)

    place.run(format=name)

    place.check(expected)
    scratch = sum(path.stat().st_blocks * 512 for path in (place.tmp_path / "scratch").rglob("*") if path.is_file())
    assert scratch < 1 << 20
    for machine in ("scratch", "other"):
        before = len(place.proxy.seen)
        assert "nothing to do" in place.run(format=name, scratch=machine)
        sent = [line for line in place.proxy.seen[before:] if line.startswith("P")]
        assert not [line for line in sent if "data-train" in urllib.parse.unquote(line) or "manifest" in line]
    place.check(expected)


@pytest.mark.parametrize("is_kept", [True, False])
def test_kills_of_the_driver_lose_nothing(place, is_kept):
    """Each run dies a few requests later than the one before; the last is whole, on this or on a new machine."""
    expected = place.local()
    killed = 0
    step = 9 if is_kept else 12
    while True:
        at = len(place.proxy.seen) + 6 + step * killed
        returncode, out = place.run_killed(at, scratch="scratch" if is_kept else f"scratch-{killed}")
        if returncode != -signal.SIGKILL:
            break
        killed += 1
        assert ("manifest.json" in place.there()[0]) <= (place.there()[0] == expected)

    assert returncode == 0, out
    assert killed >= 3
    assert place.secret not in out
    place.run(scratch="scratch" if is_kept else f"scratch-{killed}")
    place.check(expected)


def test_kills_while_shards_are_replaced(place, tmp_path):
    """Readers find the old dataset or the new one; in the end the new one alone."""
    place.run(num_rows=120)
    expected = place.local(num_rows=150)
    killed = 0
    while True:
        at = len(place.proxy.seen) + 12 + 10 * killed
        returncode, out = place.run_killed(at, num_rows=150)
        if returncode != -signal.SIGKILL:
            break
        killed += 1
        read = load(place.url, storage_options=place.options, cache_dir=tmp_path / f"cache{killed}")
        assert sorted(sample["number"] for sample in read) in ([*range(120)], [*range(150)])

    assert returncode == 0, out
    assert killed >= 3
    place.run(num_rows=150)
    place.check(expected)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [*(("s3", fault) for fault in (500, 503, "cut", "lose")), ("gs", 503), ("gs", "lose"), ("az", 500), ("az", "lose")],
)
def test_faults_that_pass_are_met_by_trying_again(place, fault):
    """Each seventh request fails, and the run is as if none had."""
    expected = place.local()
    place.proxy.meet = lambda number, handler: fault if number % 7 == 0 else None

    out = place.run()

    place.proxy.meet = lambda number, handler: None
    assert place.secret not in out
    place.check(expected)
    if fault != "lose":  # which may be the answer that says the number of an upload
        assert place.uploads() == []


def test_death_of_a_worker_in_an_upload(place):
    """Another one does it again."""
    expected = place.local()
    job = place.start()
    dead = []

    def meet(_, handler):
        if not dead and handler.command == "PUT" and ".tfrecord" in handler.path:
            port = handler.client_address[1]
            for child in psutil.Process(job.pid).children(recursive=True):
                if any(connection.laddr and connection.laddr.port == port for connection in child.net_connections()):
                    dead.append(child.pid)
                    child.kill()
                    return "cut"
        return None

    place.proxy.meet = meet
    out = job.communicate()[0]

    assert job.returncode == 0, out
    assert len(dead) == 1
    place.check(expected)


def test_another_server_gives_the_same(tmp_path):
    """One without conditions, without lists of uploads, and with other ETags, written in another language."""
    program = shutil.which("s3rver")
    if program is None:
        pytest.skip("needs s3rver on the path: npm install --global s3rver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        behind = free.getsockname()[:2]
    command = [program, "-d", str(tmp_path / "server"), "-a", behind[0], "-p", str(behind[1])]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running,
        Proxy(behind) as proxy,
    ):
        try:
            for line in running.stdout:
                if "listening" in line:
                    break
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            place = Place(Server("s3", behind, ("S3RVER", "S3RVER")), proxy, tmp_path)
            expected = place.local(num_shards=1)
            proxy.meet = lambda number, handler: "cut" if number % 9 == 0 else None

            place.run(num_shards=1)

            assert place.there()[0] == expected
            tasks = Prepared(
                pa.table({"number": [1]}),
                output=f"{place.url}-2",
                storage_options=place.options,
                scratch=tmp_path / "two",
            )
            with pytest.raises(OptionError, match="in a store that is not known to support conditional writes"):
                tasks.run(task_index=0, num_tasks=2, progress=False)
        finally:
            proxy.shutdown()
            running.kill()
