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
    datamat-s3     as datamat, by `s3://`: the server answers S3's requests for objects, too
    litdata        `StreamingDataset("s3://...")` over the same records in as many chunks
    mosaicml       `StreamingDataset(remote="s3://...")` of mosaicml-streaming over the same records in as many shards
    NAME-4         the same by a DataLoader of torch with four workers, each with shards of its own

Those that are not installed are left out, and named. Imports and `load` come before the clock.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
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
NEEDS = {
    "datamat": "numpy",
    "datamat-mixed": "numpy",
    "webdataset": "webdataset",
    "hf-webdataset": "datasets",
    "datamat-s3": "obstore",
    "litdata": "litdata",
    "mosaicml": "streaming",
    "webdataset-4": "webdataset",
    "hf-webdataset-4": "datasets",
    "litdata-4": "litdata",
    "mosaicml-4": "streaming",
}
DISTRIBUTIONS = {"streaming": "mosaicml-streaming"}
BUCKET = "sets"
KEYS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "thing", "AWS_REGION": "us-east-1"}
_PIECE = 64 << 10


class Blobs(DatasetWriter):
    """Records of random bytes."""

    name = "blobs"
    features = Features({"blob": Tensor((RECORD_BYTES,), "uint8")})

    def index(self, source):
        return [IndexRow(f"key{number:05d}", "train", {"number": number}) for number in range(NUM_RECORDS)]

    def read(self, row):
        number = int(row.fields["number"])
        return {"blob": blob(number)}


def blob(number):
    """Return the bytes of a record."""
    return np.random.default_rng(number).integers(0, 256, RECORD_BYTES, np.uint8)


def bytes_of(number):
    """Return a record for the writers of others."""
    return {"blob": blob(number).tobytes()}


def write_litdata(folder):
    from litdata import optimize

    size = NUM_RECORDS // NUM_SHARDS
    optimize(bytes_of, list(range(NUM_RECORDS)), str(folder), chunk_size=size, num_workers=1, verbose=False)


def write_mosaicml(folder):
    from streaming import MDSWriter

    size = NUM_RECORDS // NUM_SHARDS * (RECORD_BYTES + 16) + 1024
    with MDSWriter(out=str(folder), columns={"blob": "bytes"}, size_limit=size) as writer:
        for number in range(NUM_RECORDS):
            writer.write(bytes_of(number))


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
        self.send_header("ETag", f'"{hashlib.md5(self.path.encode(), usedforsecurity=False).hexdigest()}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
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


def server_of(url):
    """Return the address of the server."""
    return url.removesuffix(f"/{BUCKET}/blobs")


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


def read_webdataset(url, files, num_workers=0):
    import webdataset

    urls = [f"pipe:curl -s {url}/{file}" for file in files]
    data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    return begin_of(lambda: data, num_workers)


def read_hf(url, files, num_workers=0):
    from datasets import load_dataset

    urls = [f"{url}/{file}" for file in files]
    return begin_of(
        lambda: load_dataset("webdataset", data_files={"train": urls}, split="train", streaming=True), num_workers
    )


def read_s3(url, files):
    cache = tempfile.mkdtemp()
    options = {"endpoint_url": server_of(url)}
    data = load(f"s3://{BUCKET}/blobs", "train", format="tfrecord", cache_dir=cache, storage_options=options)
    return lambda: (len(batch["key"]) for batch in data.to_numpy(BATCH))


def read_litdata(url, files, num_workers=0):
    from litdata import StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
    place = {"endpoint_url": server_of(url)}
    data = StreamingDataset(
        f"s3://{BUCKET}/litdata", cache_dir=tempfile.mkdtemp(), storage_options=place, max_pre_download=8
    )
    if not num_workers:
        return lambda: grouped(iter(data))
    from litdata import StreamingDataLoader

    return lambda: map(len, StreamingDataLoader(data, batch_size=BATCH, num_workers=num_workers, collate_fn=list))


def read_mosaicml(url, files, num_workers=0):
    from streaming import StreamingDataset

    os.environ["S3_ENDPOINT_URL"] = server_of(url)
    data = StreamingDataset(remote=f"s3://{BUCKET}/mosaicml", local=tempfile.mkdtemp(), batch_size=BATCH, shuffle=False)
    return begin_of(lambda: data, num_workers)


def begin_of(dataset, num_workers):
    """Return a function that begins an epoch of a dataset, which is made then, here or in workers."""
    if not num_workers:
        return lambda: grouped(iter(dataset()))
    from torch.utils.data import DataLoader

    return lambda: map(len, DataLoader(dataset(), batch_size=BATCH, num_workers=num_workers, collate_fn=list))


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
    "datamat-s3": read_s3,
    "litdata": read_litdata,
    "mosaicml": read_mosaicml,
    "webdataset-4": functools.partial(read_webdataset, num_workers=4),
    "hf-webdataset-4": functools.partial(read_hf, num_workers=4),
    "litdata-4": functools.partial(read_litdata, num_workers=4),
    "mosaicml-4": functools.partial(read_mosaicml, num_workers=4),
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
    restart(server_of(url), latency_s)
    command = [sys.executable, __file__, "--contest", name, "--url", url, "--files", *files]
    environment = {**os.environ, **KEYS}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "bytes": restart(server_of(url), latency_s)}


def main():
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--latency", type=float, nargs="*", default=[5, 50, 200], help="milliseconds")
    parser.add_argument("--rate", type=float, default=100, help="megabytes a second, of all connections")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(NEEDS), help="contestants")
    parser.add_argument("--contest")
    parser.add_argument("--url")
    parser.add_argument("--files", nargs="*")
    options = parser.parse_args()
    if options.contest:
        contest(options.contest, options.url, options.files)
        return
    print_machine()
    wanted = {name: package for name, package in NEEDS.items() if name in {"datamat", *options.only}}
    needed = {name: [package, *(["torch"] if name.endswith("-4") else [])] for name, package in wanted.items()}
    names = [name for name, packages in needed.items() if all(map(importlib.util.find_spec, packages))]
    for name in wanted.keys() - {*names}:
        print(f"{name}: not installed")
    versions = {DISTRIBUTIONS.get(NEEDS[name], NEEDS[name]) for name in names} | {"datamat", "aiohttp", "fsspec"}
    print(", ".join(f"{one} {importlib.metadata.version(one)}" for one in sorted(versions)))
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / BUCKET / "blobs"
        output.parent.mkdir()
        shards = ShardOptions(num_shards=NUM_SHARDS)
        Materializer(Blobs(), None, output, shards=shards, format=["tfrecord", "webdataset"]).run(progress=False)
        for name, write in {"litdata": write_litdata, "mosaicml": write_mosaicml}.items():
            if {name, f"{name}-4"} & {*names}:
                write(output.parent / name)
        tars = [info.file for info in load(output, "train", format="webdataset").manifest.splits["train"]]
        size = sum(info.num_bytes for info in load(output, "train").manifest.splits["train"])
        port = multiprocessing.Queue()
        server = multiprocessing.Process(
            target=serve, args=(pathlib.Path(folder), options.rate * 1e6, port), daemon=True
        )
        server.start()
        url = f"http://127.0.0.1:{port.get()}/{BUCKET}/blobs"
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
