"""Pictures damaged in many ways, and the job that reads them.

The kinds of damage are those found in public collections of corrupt files: cut short, bits flipped, bytes lost, doubled
or overwritten, headers that promise what does not follow, sizes that would fill the memory, other kinds of file.
"""

import json
import pathlib
import resource
import struct
import sys
import zlib

import cv2
import numpy as np

from datamat import DatasetWriter, ErrorPolicy, Features, Image, Index, Materializer, ShardOptions, WorkerOptions
from datamat.codecs import encode_png, read_file

SHAPE = (24, 32, 3)


def cut(data, rng):
    """End too soon, anywhere."""
    return data[: rng.integers(0, len(data))]


def flip(data, rng):
    """Flip a few bits."""
    damaged = bytearray(data)
    for _ in range(rng.integers(1, 8)):
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
    return bytes(damaged)


def drop(data, rng):
    """Lose some bytes in the middle."""
    start = rng.integers(len(data))
    return data[:start] + data[start + rng.integers(1, 64) :]


def double(data, rng):
    """Hold one piece twice."""
    start, stop = sorted(rng.integers(0, len(data), 2))
    return data[:stop] + data[start:]


def scribble(data, rng):
    """Be overwritten with noise from some byte on."""
    start = rng.integers(8, len(data))
    return data[:start] + rng.bytes(len(data) - start)


def empty(data, rng):
    """Hold nothing, or blanks only."""
    return bytes(rng.choice([0, 1, 512]))


def noise(data, rng):
    """Be no picture at all."""
    return rng.bytes(rng.integers(1, 4000))


def bomb(data, rng):
    """Claim up to 2**31 by 2**31 pixels, with valid checksums."""
    width, height = (int(2 ** rng.uniform(12, 31)) for _ in range(2))
    header = struct.pack(">II5B", width, height, rng.choice([8, 16]), rng.choice([0, 2, 6]), 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(10_000))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def jpeg_bomb(data, rng):
    """Claim 65,535 by 65,535 pixels in a JPEG."""
    jpeg = bytearray(cv2.imencode(".jpg", rng.integers(0, 255, SHAPE, np.uint8))[1].tobytes())
    start = jpeg.index(b"\xff\xc0") + 5
    jpeg[start : start + 4] = b"\xff" * 4
    return bytes(jpeg)


def other_size(data, rng):
    """Be a good picture of another size."""
    return encode_png(rng.integers(0, 255, (SHAPE[0] + 8, SHAPE[1], 3), np.uint8))


WAYS = (cut, flip, drop, double, scribble, empty, noise, bomb, jpeg_bomb, other_size)


def good_picture(rng):
    """Return a PNG or JPEG file of the right size."""
    pixels = np.kron(rng.integers(0, 255, (3, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    return encode_png(pixels) if rng.random() < 0.5 else cv2.imencode(".jpg", pixels)[1].tobytes()


def make_pictures(folder, num_spoilt, num_good):
    """Write damaged pictures and good neighbours; the names show which is which."""
    rng = np.random.default_rng(11)
    folder.mkdir(parents=True)
    for number in range(num_spoilt):
        way = WAYS[number % len(WAYS)]
        (folder / f"{number:05d}-{way.__name__}.bin").write_bytes(way(good_picture(rng), rng))
    for number in range(num_good):
        (folder / f"{number * num_spoilt // num_good:05d}-good.bin").write_bytes(good_picture(rng))
    return folder


class Pictures(DatasetWriter):
    """Pictures in one folder."""

    name = "pictures"
    features = Features({"image": Image(SHAPE)})

    def index(self, source):
        return Index.from_folder(source, split_of=lambda path: "train" if int(path.stem[:5]) % 3 else "val")

    def read(self, row):
        return {"image": read_file(row.fields["image"])}


def main(source, output):
    """Run the job, leaving out what is damaged; print its report, and the memory of its largest process."""
    report = Materializer(
        Pictures(),
        source,
        output,
        copies={"train": 2},
        transform=mirror,
        shards=ShardOptions(num_shards=4),
    ).run(workers=WorkerOptions(num_workers=2), errors=ErrorPolicy("skip"), progress=False)
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    counts = {"rows": report.num_rows, "failed": report.num_failed, "records": report.num_records, "largest": largest}
    print(json.dumps({**counts, "is_complete": report.is_complete}))


def mirror(sample, rng):
    """Draw whether to flip; the picture is decoded and encoded for it."""
    return {"image": np.ascontiguousarray(sample["image"][:, ::-1])} if rng.random() < 0.5 else sample


def command(source, output):
    """Return the command that runs `main` in a process of its own."""
    here = str(pathlib.Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import damaged_pictures; damaged_pictures.main(*sys.argv[1:])"
    return [sys.executable, "-c", code, str(source), str(output)]
