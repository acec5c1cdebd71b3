"""Reading a finished directory from a server: samples a second, the first batch, and the bytes that were fetched.

    python benchmarks/remote.py
    python benchmarks/remote.py --latency 50 --rounds 5 --rate 200

A server on this machine answers each request after 5, 50 or 200 ms, and sends no more than so many megabytes a second
to all connections together. Contestants read the same records once, in the order of the files, from empty caches, each
in a process of its own; rounds are interleaved, and the ratio is the median of those within a round.

    datamat        `load(url, cache_dir=...).to_numpy(32)` over TFRecord, every checksum tested
    datamat-mixed  the same with `shuffle=256`
    webdataset     `WebDataset(["pipe:curl ..."])` over the tar files of the same run
    hf-webdataset  `load_dataset("webdataset", data_files=..., streaming=True)` over the same tar files

Those that are not installed are left out, and named. Imports and `load` come before the clock.
"""

from __future__ import annotations

import argparse
import http.server
import importlib.metadata
import importlib.util
import json
import multiprocessing
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import numpy as np
from read import print_machine

from datamat import DatasetWriter, Features, IndexRow, Materializer, ShardOptions, Tensor, load

NUM_RECORDS, RECORD_BYTES, NUM_SHARDS, BATCH = 512, 65_536, 16, 32
NEEDS = {"datamat": "numpy", "datamat-mixed": "numpy", "webdataset": "webdataset", "hf-webdataset": "datasets"}
_PIECE = 64 << 10


class Blobs(DatasetWriter):
    """Records of random bytes."""

    name = "blobs"
    features = Features({"blob": Tensor((RECORD_BYTES,), "uint8")})

    def index(self, source):
        return [IndexRow(f"key{number:05d}", "train", {"number": number}) for number in range(NUM_RECORDS)]

    def read(self, row):
        number = int(row.fields["number"])
        return {"blob": np.random.default_rng(number).integers(0, 256, RECORD_BYTES, np.uint8)}


# ---------------------------------------------------------------- the server


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files slowly: each answer after a while, and all of them together at a rate."""

    protocol_version = "HTTP/1.1"
    folder = pathlib.Path()
    latency_s = 0.0
    rate = 0.0
    num_bytes = 0
    free_at = 0.0
    lock = threading.Lock()

    def do_HEAD(self):
        self._answer(with_content=False)

    def do_GET(self):
        self._answer(with_content=True)

    def log_message(self, *arguments):
        """Nothing to standard error."""

    def _answer(self, *, with_content):
        kind = type(self)
        if self.path.startswith("/latency="):  # the benchmark itself: start again
            kind.latency_s, content = float(self.path.partition("=")[2]), str(kind.num_bytes).encode()
            kind.num_bytes = 0
        else:
            time.sleep(kind.latency_s)
            try:
                content = (kind.folder / self.path.lstrip("/")).read_bytes()
            except OSError:
                self.send_error(404)
                return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        size = len(content)
        if wanted:
            last = min(int(wanted[2] or size), size - 1)
            content = content[int(wanted[1]) : last + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{last}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            for first in range(0, len(content), _PIECE):
                piece = content[first : first + _PIECE]
                with self.lock:
                    now = time.monotonic()
                    kind.free_at = max(kind.free_at, now) + len(piece) / kind.rate
                    wait = kind.free_at - now
                    kind.num_bytes += len(piece)
                time.sleep(wait)
                try:
                    self.wfile.write(piece)
                except OSError:  # the client wants no more
                    self.close_connection = True
                    return


def serve(folder, rate, port):
    """Run the server, and say at which port."""
    Handler.folder, Handler.rate = folder, rate
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port.put(server.server_port)
    server.serve_forever()


def restart(url, latency_s):
    """Set the latency, and return the bytes that were served since the last call."""
    with urllib.request.urlopen(f"{url}/latency={latency_s}") as answer:
        return int(answer.read())


# ---------------------------------------------------------------- contestants


def read_datamat(url, files, shuffle=False):
    """Return a function that begins an epoch."""
    cache = tempfile.mkdtemp()
    data = load(url, "train", format="tfrecord", cache_dir=cache)
    return lambda: (len(batch["key"]) for batch in data.to_numpy(BATCH, shuffle=shuffle))


def read_mixed(url, files):
    return read_datamat(url, files, 256)


def read_webdataset(url, files):
    import webdataset

    urls = [f"pipe:curl -s {url}/{file}" for file in files]
    data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    return lambda: grouped(iter(data))


def read_hf(url, files):
    from datasets import load_dataset

    urls = [f"{url}/{file}" for file in files]
    return lambda: grouped(iter(load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True)))


def grouped(samples):
    """Yield the number of samples in each batch."""
    count = 0
    for _ in samples:
        count += 1
        if count == BATCH:
            yield count
            count = 0
    if count:
        yield count


READ = {
    "datamat": read_datamat,
    "datamat-mixed": read_mixed,
    "webdataset": read_webdataset,
    "hf-webdataset": read_hf,
}


def contest(name, url, files):
    """Read everything once, and print how long that took."""
    begin = READ[name](url, files)
    start = time.perf_counter()
    total, first = 0, 0.0
    for count in begin():
        first = first or time.perf_counter() - start
        total += count
    seconds = time.perf_counter() - start
    assert total == NUM_RECORDS, f"{name}: {total} of {NUM_RECORDS} records"
    print(json.dumps({"first": first, "rate": total / seconds}))


def measure(name, url, files, latency_s):
    """Run a contestant in a process of its own."""
    restart(url, latency_s)
    command = [sys.executable, __file__, "--contest", name, "--url", url, "--files", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "bytes": restart(url, latency_s)}


def main():
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency", type=float, nargs="*", default=[5, 50, 200], help="milliseconds")
    parser.add_argument("--rate", type=float, default=100, help="megabytes a second, of all connections")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contest")
    parser.add_argument("--url")
    parser.add_argument("--files", nargs="*")
    options = parser.parse_args()
    if options.contest:
        contest(options.contest, options.url, options.files)
        return
    print_machine()
    names = [name for name, package in NEEDS.items() if importlib.util.find_spec(package)]
    for name in NEEDS.keys() - {*names}:
        print(f"{name}: not installed")
    versions = {NEEDS[name] for name in names} | {"datamat", "aiohttp", "fsspec"}
    print(", ".join(f"{one} {importlib.metadata.version(one)}" for one in sorted(versions)))
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "blobs"
        shards = ShardOptions(num_shards=NUM_SHARDS)
        Materializer(Blobs(), None, output, shards=shards, format=["tfrecord", "webdataset"]).run(progress=False)
        tars = [info.file for info in load(output, "train", format="webdataset").manifest.splits["train"]]
        size = sum(info.num_bytes for info in load(output, "train").manifest.splits["train"])
        port = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(output, options.rate * 1e6, port), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{port.get()}"
        print(f"{NUM_RECORDS} records, {size / 1e6:.1f} MB in {NUM_SHARDS} shards, at {options.rate:g} MB/s at most")
        for latency in options.latency:
            found = {name: [] for name in names}
            for _ in range(options.rounds):
                for name in names:
                    found[name].append(measure(name, url, tars, latency / 1000))
            print(
                f"\nlatency {latency:g} ms {'samples/s':>14} {'first batch s':>14} {'MB fetched':>11} {'datamat =':>10}"
            )
            for name, runs in found.items():
                ratio = statistics.median(
                    one["rate"] / base["rate"] for one, base in zip(runs, found["datamat"], strict=True)
                )
                middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                print(
                    f"{name:16} {middle['rate']:>15.0f} {middle['first']:>14.2f} {middle['bytes'] / 1e6:>11.1f} "
                    f"{ratio:>9.2f}x"
                )
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
