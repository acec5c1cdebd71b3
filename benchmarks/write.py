"""How fast datasets are written: the floor, common ways by hand, and datamat, run in turn.

    python benchmarks/write.py                             # pairs, on a street set that it draws; five rounds
    python benchmarks/write.py --source CamVid --copies 20 # on real pairs in CamVid's layout, repeated up to --pairs
    python benchmarks/write.py --only floor,datamat --rounds 9 --memory

Each contestant is a cold interpreter that ends with finished files. The rounds are interleaved, so that a machine whose
speed drifts is fair to all, and ratios are taken within a round. Both the clock and the processor seconds of the whole
process tree (user and system) are compared: beside other load, only the latter mean something. `driver` is the share of
them that the process which called datamat spends. Memory, of a run of its own, is that of the tree at its peak: the sum
of resident sizes (RSS), and of proportional ones, which count shared pages once (PSS).

**Pairs.** What all do per pair is the same: decode the PNG image and mask, and `--copies` times flip, rotate, change
brightness and contrast, encode as JPEG (quality 95) and PNG. Floor and datamat-own draw the very same copies, from the
same seeds: a percent more or fewer rotations would show. With `--skewed`, as many draws are spread unevenly: most pairs
are drawn twice, and the few of a second split, which come last, 200 times.

    floor          two forked processes, every other pair each: only that work, written raw to one file per process.
                   No framing, no checksum, no flush, no receipts. With cv2 as codec.
    datamat-own    everything on (checksums, flush, manifest, index, progress), with codecs of the user's own: cv2 in
                   `read` and in the transform, just as the floor
    floor-codecs   the floor again, with the codecs behind datamat's Image and Mask in place of cv2
    datamat        everything on, with those codecs
    hand           a pool of two processes, one pair at a time, the most copies first: the same work with cv2, framed as
                   Examples without TensorFlow, with CRC32C, one file per process, flushed
    pathos-tf      pathos' pool over pairs, one tf.io.TFRecordWriter per chunk
    starmap-tf     the list of pairs split into eight files, `starmap_async` over them, one tf.io.TFRecordWriter each
    tf             one process, TensorFlow's decoders and writer

    python benchmarks/write.py --vectors 200000       # rows of ten float32 and a label, by block and by row

    floor          two forked processes, half of the rows each: the least that gives the same TFRecords. All rows at
                   once as a matrix around the bytes that never change, CRC32C, flushed to disk; no plan, no shuffle,
                   no manifest. Every record has the same length here, which no library may assume.
    floor-row      the same with a Python loop over the rows, as one writes it by hand
    hand           a pool of two processes and a loop over the rows that puts together an Example of any fields, as one
                   writes it without TensorFlow
    raw            one process: a plain loop over the rows, key and bytes written raw to one file
    block          datamat, everything on, `materialize(..., block=...)`
    block-parquet  the same, as Parquet
    row            datamat, everything on, a call of the function for each row
    class          datamat, everything on, a class whose `index` yields rows, and `read` of each
    class-blocks   the same with an `index` that yields blocks of rows
    arrayrecord    one process, hand-made payloads, `ArrayRecordWriter` with one record per group
    pyarrow        one process, one table, `pyarrow.parquet.write_table` with page checksums, flushed
    pyarrow-pool   a pool of two processes, half of the rows each
    tf-pool        a pool of two processes, `tf.train.Example` and `tf.io.TFRecordWriter`
    tar-pool       a pool of two processes, `webdataset.TarWriter`
    litdata        `litdata.optimize` with two workers

    python benchmarks/write.py --columns 5000         # of float32, 2,000 rows, from Arrow in memory to Parquet

    pyarrow        one process, `pyarrow.parquet.write_table` with page checksums, flushed
    datamat        everything on, `Materializer(table, output=..., format="parquet")`

    python benchmarks/write.py --copy 3700 --source CamVid    # megabytes of pairs, stored as they are

    floor          two processes: each concatenates half of the files to one raw file, and flushes it
    hand           a pool of two processes, each with half of the files: Examples without TensorFlow, CRC32C, flushed
    tfrecord       datamat, everything on, which checks every picture
    webdataset     the same, as tar
    parquet        the same, as Parquet
    one-shard      the same as `tfrecord`, to a single file, which two workers share
    arrayrecord    a pool of two processes, `tf.train.Example`s in `ArrayRecordWriter`s
    pyarrow        a pool of two processes, each writing a Parquet file by hand, row groups of 64, and flushing it
    tf-pool        a pool of two processes, `tf.train.Example` and `tf.io.TFRecordWriter`
    tar-pool       a pool of two processes, `webdataset.TarWriter`
    litdata        `litdata.optimize` with two workers

    python benchmarks/write.py --safety 1000          # megabytes of pairs, stored as they are, by one worker

    all            datamat, everything on
    no-...         one safety switched off, which is done here and nowhere else: the CRC32C of the records, the digests
                   of the files, those of the inputs, the flush to disk, the receipts on disk

    python benchmarks/write.py --growth                         # 10^3 to 10^6 rows: seconds, and memory of the tree

`--framing N` times the encoding and framing of N tiny numeric rows in whole blocks, in one process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

SKEWED = {"train": 2, "val": 200}
COPIES = SKEWED if "BENCH_SKEWED" in os.environ else int(os.environ.get("BENCH_COPIES", "4"))  # of each pair
NEEDS = {
    "arrayrecord": "array_record",
    "litdata": "litdata",
    "pyarrow": "pyarrow",
    "tar-pool": "webdataset",
    "tf-pool": "tensorflow",
}
PACKAGES = (
    "datamat",
    "numpy",
    "opencv-python-headless",
    "albumentations",
    "tensorflow",
    "pathos",
    "pyarrow",
    "array-record",
    "webdataset",
    "litdata",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="folder in CamVid's layout; none draws a street set")
    parser.add_argument("--pairs", type=int, default=701)
    parser.add_argument("--copies", type=int, default=4, help="draws of each pair")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="names of contestants, separated by commas")
    parser.add_argument("--memory", action="store_true", help="also sample the peak memory of each process tree")
    jobs = parser.add_mutually_exclusive_group()
    jobs.add_argument("--skewed", action="store_true", help="race pairs of which few are drawn often")
    jobs.add_argument("--vectors", type=int, metavar="N", help="race rows of ten float32 and a label")
    jobs.add_argument("--columns", type=int, metavar="N", help="race a table of so many columns and 2,000 rows")
    jobs.add_argument("--copy", type=int, metavar="MB", help="race pairs that are stored as they are")
    jobs.add_argument("--safety", type=int, metavar="MB", help="store pairs with one safety after the other off")
    jobs.add_argument("--growth", action="store_true", help="time datamat alone on 10^3 to 10^6 rows")
    jobs.add_argument("--framing", type=int, metavar="N", help="time blocks of tiny numeric rows in one process")
    jobs.add_argument("--contestant", nargs=3, metavar=("NAME", "SOURCE", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        run_contestant(*options.contestant)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        folder = pathlib.Path(name)
        source, output = folder / "source", folder / "out"
        if options.framing:
            time_framing(folder, options.framing, options.rounds)
        elif options.growth:
            options.memory = True
            race("growth", GROWTH, "", output, options)
        elif options.vectors:
            print(f"{options.vectors:,} rows of 10 float32, a label and a key")
            race("vectors", VECTORS, str(options.vectors), output, options)
        elif options.columns:
            print(f"{options.columns:,} columns of float32, {_COLUMN_ROWS:,} rows")
            race("columns", COLUMNS, str(options.columns), output, options)
        elif size := options.copy or options.safety:
            make_megabytes(source, options.source, size)
            print(f"{size} MB of pairs, stored as they are")
            race(*(("copy", COPY) if options.copy else ("safety", SAFETY)), str(source), output, options)
        elif options.skewed:
            make_source(source, options.source, options.pairs)
            os.environ["BENCH_SKEWED"] = "yes"
            few = make_second_split(source)
            print(f"{options.pairs - few} pairs x {SKEWED['train']} copies, then {few} x {SKEWED['val']}")
            race("skewed", {name: PAIRS[name] for name in PAIRS if "tf" not in name}, str(source), output, options)
        else:
            os.environ["BENCH_COPIES"] = str(options.copies)
            make_source(source, options.source, options.pairs)
            print(f"{options.pairs} pairs x {options.copies} copies")
            race("pairs", PAIRS, str(source), output, options)


def race(kind: str, contestants, source: str, output: pathlib.Path, options: argparse.Namespace) -> None:
    """Run contestants in turn: seconds of processor and of the clock, cold interpreter to finished files."""
    names = options.only.split(",") if options.only else [
        name for name in contestants if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
    ]  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    sizes = {}
    print_machine()
    for round_number in range(options.rounds + 1):
        for name in names:
            before = os.times()
            sizes[name], own = run_one(f"{kind}-{name}", source, output)
            after = os.times()
            if round_number:  # the first round warms the page cache and the .pyc files
                busy = sum(after[2:4]) - sum(before[2:4])  # user and system time of children
                found[name].append((busy, after.elapsed - before.elapsed, own))
    shutil.rmtree(output, ignore_errors=True)
    memory = {name: peak_memory(f"{kind}-{name}", source, output) for name in names} if options.memory else {}
    print(f"{options.rounds} rounds; medians, and the medians of ratios to the first contestant within a round")
    heads = f"{'processor s':>12}{'ratio':>9}{'wall s':>9}{'ratio':>9}{'driver':>9}{'MB':>9}"
    print(f"{'contestant':16}{heads}" + (f"{'RSS MB':>9}{'PSS MB':>9}" if memory else ""))
    for name in names:
        pairs = list(zip(found[name], found[names[0]], strict=True))
        busy, wall, own = (statistics.median(mine[place] for mine, _ in pairs) for place in range(3))
        ratios = [statistics.median(mine[place] / first[place] for mine, first in pairs) for place in (0, 1)]
        row = f"{name:16}{busy:12.2f}{ratios[0]:9.2f}{wall:9.2f}{ratios[1]:9.2f}{own / busy:9.0%}"
        row += f"{sizes[name] / 1e6:9.1f}"
        print(row + ("".join(f"{megabytes:9.0f}" for megabytes in memory[name]) if memory else ""))


def command(name: str, source: str, output: pathlib.Path) -> list[str]:
    return [sys.executable, __file__, "--contestant", name, source, str(output)]


def environment() -> dict[str, str]:
    """Modules are compiled once, in the round that does not count, as on any machine that keeps its .pyc files."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_one(name: str, source: str, output: pathlib.Path) -> tuple[int, float]:
    """Run a contestant in a cold interpreter; return the bytes of its files, and its own processor seconds."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    done = subprocess.run(command(name, source, output), check=False, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr}")
    size = sum(path.stat().st_size for path in output.iterdir() if path.is_file())
    return size, float(done.stdout.split()[-1])


def peak_memory(name: str, source: str, output: pathlib.Path) -> tuple[float, float]:
    """Run a contestant once more, and look at its process tree all the time."""
    import psutil

    output.mkdir()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(name, source, output), env=environment(), **quiet)
    tree = psutil.Process(process.pid)
    peak_pss = peak_rss = 0
    while process.poll() is None:
        try:
            found = [member.memory_full_info() for member in [tree, *tree.children(recursive=True)]]
        except psutil.Error:
            continue  # one of them has just ended
        peak_pss = max(peak_pss, sum(memory.pss for memory in found))
        peak_rss = max(peak_rss, sum(memory.rss for memory in found))
        time.sleep(0.02)
    assert process.returncode == 0
    shutil.rmtree(output)
    return peak_rss / 1e6, peak_pss / 1e6


def make_source(folder: pathlib.Path, real: str | None, pairs: int) -> None:
    """Lay out `pairs` pairs as CamVid does; real ones are linked under new names as often as needed."""
    if real is None:
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
        from street import make_street_set

        make_street_set(folder, num_pairs=pairs)
        return
    images = sorted(path for path in pathlib.Path(real).rglob("*.png") if not path.parent.name.endswith("annot"))
    (folder / "train").mkdir(parents=True)
    (folder / "trainannot").mkdir()
    lines = []
    for number in range(pairs):
        image = images[number % len(images)].resolve()
        name = f"{number:05d}_{image.name}"
        shutil.copyfile(image, folder / "train" / name)
        shutil.copyfile(image.parent.with_name(f"{image.parent.name}annot") / image.name, folder / "trainannot" / name)
        lines.append(f"/SegNet/CamVid/train/{name} /SegNet/CamVid/trainannot/{name}\n")
    (folder / "train.txt").write_text("".join(lines))


def make_megabytes(folder: pathlib.Path, real: str | None, megabytes: int) -> None:
    """Lay out so many megabytes of pairs."""
    make_source(folder, real, 100)
    size = sum(path.stat().st_size for path in folder.rglob("*.png"))
    shutil.rmtree(folder)
    make_source(folder, real, 100 * megabytes * 10**6 // size)


def make_second_split(folder: pathlib.Path) -> int:
    """Put the last pairs into a split of their own, as many as take half of the draws; return how many."""
    lists = sorted(folder.glob("*.txt"))
    lines = [line for path in lists for line in path.read_text().splitlines(keepends=True)]
    few = round(len(lines) * SKEWED["train"] / SKEWED["val"])
    for path in lists:
        path.unlink()
    (folder / "train.txt").write_text("".join(lines[:-few]))
    (folder / "val.txt").write_text("".join(lines[-few:]))
    return few


def run_contestant(name: str, source: str, output: str) -> None:
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    kind, _, name = name.partition("-")
    kinds = {
        "pairs": PAIRS,
        "skewed": PAIRS,
        "vectors": VECTORS,
        "columns": COLUMNS,
        "copy": COPY,
        "safety": SAFETY,
        "growth": GROWTH,
    }
    kinds[kind][name](source, output)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime)


def augmentation():
    import albumentations as A  # noqa: N812

    return A.Compose([A.HorizontalFlip(p=0.5), A.Rotate(limit=10, p=0.7), A.RandomBrightnessContrast(p=0.5)], seed=7)


def reseed(transform, rng) -> None:
    """The quickest way: one stream for all transforms of the pipeline."""
    import random

    transform.set_random_state(rng, random.Random(int(rng.integers(1 << 32))))


def distinct_copies(key: str, copies: int, draw):
    """Yield `draw(rng)` of every copy, each unlike the others, from the seeds of datamat."""
    import numpy as np

    from datamat.transforms.seeding import sample_seed

    earlier = []
    for copy in range(copies):
        for attempt in range(8):
            drawn = draw(np.random.Generator(np.random.PCG64(sample_seed(0, key, copy, attempt))))
            if drawn not in earlier:
                break
        earlier.append(drawn)
        yield drawn


def pairs_of(source: str) -> list[tuple[str, str, int]]:
    """Return image, mask and number of copies of each pair."""
    found = []
    for path in sorted(pathlib.Path(source).glob("*.txt")):
        copies = COPIES if isinstance(COPIES, int) else COPIES[path.stem]
        for line in path.read_text().splitlines():
            found.append((*(os.path.join(source, *name.split("/")[-2:]) for name in line.split()), copies))
    return found


def augmented(transform, image_path: str, mask_path: str, copies: int):
    """The work that everybody does, with cv2: yields (JPEG bytes, PNG bytes) of each copy."""
    import cv2

    image = cv2.imread(image_path, cv2.IMREAD_COLOR_RGB)
    mask = cv2.imread(mask_path, cv2.IMREAD_UNCHANGED)

    def draw(rng):
        reseed(transform, rng)
        return encoded(transform(image=image, mask=mask))

    yield from distinct_copies(pathlib.Path(image_path).stem, copies, draw)


def augmented_with_codecs(transform, image_path: str, mask_path: str, copies: int):
    """The same work with datamat's codecs."""
    from datamat import codecs

    image = codecs.decode_image(pathlib.Path(image_path).read_bytes())
    mask = codecs.decode_mask(pathlib.Path(mask_path).read_bytes())

    def draw(rng):
        reseed(transform, rng)
        drawn = transform(image=image, mask=mask)
        return codecs.encode_jpeg(drawn["image"], quality=95), codecs.encode_png(drawn["mask"])

    yield from distinct_copies(pathlib.Path(image_path).stem, copies, draw)


def encoded(drawn) -> tuple[bytes, bytes]:
    import cv2

    picture = cv2.cvtColor(drawn["image"], cv2.COLOR_RGB2BGR)
    jpeg = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 95])[1].tobytes()
    return jpeg, cv2.imencode(".png", drawn["mask"])[1].tobytes()


def floor(source: str, output: str, work=augmented) -> None:
    import cv2

    transform, pairs = augmentation(), pairs_of(source)
    children = []
    for half in range(2):
        child = os.fork()
        if not child:
            cv2.setNumThreads(1)
            with open(os.path.join(output, f"{half}.raw"), "wb", buffering=1 << 20) as file:
                for number in range(half, len(pairs), 2):
                    for record in work(transform, *pairs[number]):
                        file.writelines(record)
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def floor_codecs(source: str, output: str) -> None:
    floor(source, output, augmented_with_codecs)


def datamat(source: str, output: str) -> None:
    from datamat import Materializer

    Materializer("camvid", source, output, copies=COPIES, transform=augmentation()).run()


def datamat_own(source: str, output: str) -> None:
    import cv2

    from datamat import Materializer
    from datamat.writers.camvid import CamVidWriter

    pipeline = augmentation()

    class OwnCodecs(CamVidWriter):
        def read(self, row):
            paths = row.fields
            return {
                "image": cv2.imread(paths["image"], cv2.IMREAD_COLOR_RGB),
                "mask": cv2.imread(paths["mask"], cv2.IMREAD_UNCHANGED),
            }

    def draw(sample, rng):
        reseed(pipeline, rng)
        image, mask = encoded(pipeline(image=sample["image"], mask=sample["mask"]))
        return {**sample, "image": image, "mask": mask}

    Materializer(OwnCodecs, source, output, copies=COPIES, transform=draw).run()


def _open_own_file(output: str) -> None:
    import cv2

    cv2.setNumThreads(1)
    _own.update(file=open(os.path.join(output, f"{os.getpid()}.tfrecord"), "wb", buffering=1 << 20))  # noqa: SIM115


_own: dict = {}


def _write_by_hand(pair) -> None:
    for copy, (jpeg, png) in enumerate(augmented(_own["transform"], *pair)):
        key = f"{pathlib.Path(pair[0]).stem}#{copy}".encode()
        _own["file"].writelines(_framed_bytes({b"image": jpeg, b"key": key, b"mask": png}))


def _flush_own_file(_) -> None:
    _own["file"].flush()
    os.fsync(_own["file"].fileno())
    _own["barrier"].wait()


def hand(source: str, output: str) -> None:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    _own.update(barrier=context.Barrier(2), transform=augmentation())
    pairs = sorted(pairs_of(source), key=lambda pair: -pair[2])
    with context.Pool(2, _open_own_file, [output]) as pool:
        pool.map(_write_by_hand, pairs, chunksize=1)
        pool.map(_flush_own_file, range(2), chunksize=1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _framed_bytes(columns: dict[bytes, bytes]) -> list[bytes]:
    """Return the pieces of a TFRecord of a `tf.train.Example` of fields of bytes, none of which is copied."""
    import struct

    import google_crc32c

    pieces, size = [], 0
    for name, value in columns.items():
        listed = b"\x0a" + _varint(len(value))
        inner = len(listed) + len(value)
        feature = b"\x0a" + _varint(inner) + listed
        entry = b"\x0a" + _varint(len(name)) + name + b"\x12" + _varint(len(feature) + len(value)) + feature
        entry = b"\x0a" + _varint(len(entry) + len(value)) + entry
        pieces += [entry, value]
        size += len(entry) + len(value)
    pieces.insert(0, b"\x0a" + _varint(size))
    header, crc = struct.pack("<Q", size + len(pieces[0])), 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    checked = struct.pack("<I", _masked(google_crc32c.value(header)))
    return [header, checked, *pieces, struct.pack("<I", _masked(crc))]


def _write_split_file(path: str, number: int):
    import cv2
    import tensorflow as tf

    cv2.setNumThreads(1)
    transform = augmentation()
    with tf.io.TFRecordWriter(path.replace(".index", ".tfrecord")) as writer:
        for line in pathlib.Path(path).read_text().splitlines():
            image, mask, copies = line.split("\t")
            for copy, (jpeg, png) in enumerate(augmented(transform, image, mask, int(copies))):
                writer.write(_example(tf, f"{pathlib.Path(image).stem}#{copy}", jpeg, png))
    return number


def starmap_tf(source: str, output: str) -> None:
    import multiprocessing

    pairs = pairs_of(source)
    size, jobs = -(-len(pairs) // 8), []
    for start in range(0, len(pairs), size):
        path = os.path.join(output, f"{start}.index")
        pathlib.Path(path).write_text("".join("\t".join(map(str, pair)) + "\n" for pair in pairs[start : start + size]))
        jobs.append((path, start))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap_async(_write_split_file, jobs).get()


def _write_chunk(job):
    import cv2
    import tensorflow as tf

    cv2.setNumThreads(1)
    path, numbered = job
    transform = augmentation()
    with tf.io.TFRecordWriter(path) as writer:
        for number, pair in numbered:
            for copy, (jpeg, png) in enumerate(augmented(transform, *pair)):
                writer.write(_example(tf, f"{number}#{copy}", jpeg, png))


def _example(tf, key: str, jpeg: bytes, png: bytes) -> bytes:
    columns = {"image": jpeg, "mask": png, "key": key.encode()}
    features = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])) for name, value in columns.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def pathos_tf(source: str, output: str) -> None:
    from pathos.multiprocessing import ProcessPool

    numbered = list(enumerate(pairs_of(source)))
    size = -(-len(numbered) // 8)
    jobs = [
        (os.path.join(output, f"{start}.tfrecord"), numbered[start : start + size])
        for start in range(0, len(numbered), size)
    ]
    pool = ProcessPool(2)
    pool.map(_write_chunk, jobs)
    pool.close()
    pool.join()


def tensorflow(source: str, output: str) -> None:
    import tensorflow as tf

    transform = augmentation()
    with tf.io.TFRecordWriter(os.path.join(output, "all.tfrecord")) as writer:
        for number, (image_path, mask_path, copies) in enumerate(pairs_of(source)):
            image = tf.io.decode_png(tf.io.read_file(image_path), channels=3).numpy()
            mask = tf.io.decode_png(tf.io.read_file(mask_path), channels=1).numpy()

            def draw(rng, image=image, mask=mask):
                reseed(transform, rng)
                drawn = transform(image=image, mask=mask)
                jpeg = tf.io.encode_jpeg(drawn["image"], quality=95).numpy()
                return jpeg, tf.io.encode_png(drawn["mask"]).numpy()

            for copy, (jpeg, png) in enumerate(distinct_copies(pathlib.Path(image_path).stem, copies, draw)):
                writer.write(_example(tf, f"{number}#{copy}", jpeg, png))


PAIRS = {
    "floor": floor,
    "datamat-own": datamat_own,
    "floor-codecs": floor_codecs,
    "datamat": datamat,
    "hand": hand,
    "pathos-tf": pathos_tf,
    "starmap-tf": starmap_tf,
    "tf": tensorflow,
}


def time_framing(folder: pathlib.Path, num_rows: int, rounds: int) -> None:
    """Tiny rows in whole blocks, as `write_part` writes them: microseconds per record of one process."""
    import numpy as np

    from datamat import Features, Scalar
    from datamat.formats import get_format

    rng = np.random.default_rng(0)
    features = Features({"x": Scalar(), "y": Scalar(), "label": Scalar("int64"), "id": Scalar("int64")})
    columns = {
        "key": [f"row-{number:07d}" for number in range(num_rows)],
        "x": rng.random(num_rows, np.float32),
        "y": rng.random(num_rows, np.float32),
        "label": rng.integers(0, 10, num_rows),
        "id": np.arange(num_rows),
    }
    print_machine()
    found = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        with open(folder / "rows.tfrecord", "wb") as file:
            writer = get_format("tfrecord").writer(file, features.columns)
            for start in range(0, num_rows, 65_536):
                block = {name: values[start : start + 65_536] for name, values in columns.items()}
                writer.append_block(features.encode_block(block))
            offsets = writer.finish()
        found.append((time.perf_counter() - started) / num_rows * 1e6)
    assert len(offsets) == num_rows
    print(f"{num_rows:,} rows of 2 float32, 2 int64 and a key: median {statistics.median(found[1:]):.3f} us per record")


def vectors(num_rows: str):
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.random((int(num_rows), 10), np.float32), rng.integers(0, 10, int(num_rows))


def _example_around(key: bytes, row: bytes, label: bytes) -> bytes:
    """Return a `tf.train.Example`; none of its lengths takes more than a byte."""

    def entry(name: bytes, tag: bytes, value: bytes) -> bytes:
        body = b"\x0a" + bytes([len(value)]) + value
        feature = tag + bytes([len(body)]) + body
        pair = b"\x0a" + bytes([len(name)]) + name + b"\x12" + bytes([len(feature)]) + feature
        return b"\x0a" + bytes([len(pair)]) + pair

    features = entry(b"key", b"\x0a", key) + entry(b"label", b"\x1a", label) + entry(b"x", b"\x12", row)
    return b"\x0a" + bytes([len(features)]) + features


def _masked(crc):
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF


def _framed(payload: bytes) -> bytes:
    import struct

    import google_crc32c

    header = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", _masked(google_crc32c.value(part))) for part in (header, payload)]
    return header + crcs[0] + payload + crcs[1]


def _vectors_at_once(file, start: int, values, labels) -> None:
    import google_crc32c
    import numpy as np

    # The places of what differs, from a record with letters that occur nowhere else.
    marked = _framed(_example_around(b"K" * 8, b"X" * 40, b"L"))
    places = [slice(begin, begin + size) for begin, size in ((marked.index(b"KKKK"), 8), (marked.index(b"XXXX"), 40))]
    label = marked.index(b"\x0a\x01L") + 2
    for begin in range(0, len(values), 2000):
        some = values[begin : begin + 2000]
        block = np.tile(np.frombuffer(marked, np.uint8), (len(some), 1))
        numbers = np.arange(start + begin, start + begin + len(some))[:, None]
        block[:, places[0]] = numbers // 10 ** np.arange(7, -1, -1) % 10 + ord("0")
        block[:, places[1]] = some.view(np.uint8)
        block[:, label] = labels[begin : begin + 2000]
        raw, width = block.tobytes(), len(marked)
        crcs = [google_crc32c.value(raw[at + 12 : at + width - 4]) for at in range(0, len(raw), width)]
        block[:, -4:] = _masked(np.array(crcs, np.uint64)).astype("<u4").view(np.uint8).reshape(-1, 4)
        file.write(block.tobytes())


def _vectors_one_by_one(file, start: int, values, labels) -> None:
    import struct

    import google_crc32c

    marked = _framed(_example_around(b"K" * 8, b"X" * 40, b"L"))
    label, row = marked.index(b"\x0a\x01L") + 2, marked.index(b"XXXX")
    header, front = marked[:12], marked[12 : marked.index(b"KKKK")]
    middle, back = marked[marked.index(b"KKKK") + 8 : label], marked[label + 1 : row]
    for number, (value, klass) in enumerate(zip(values, labels.tolist(), strict=True), start):
        payload = b"%b%08d%b%c%b%b" % (front, number, middle, klass, back, value.tobytes())
        file.write(header + payload + struct.pack("<I", _masked(google_crc32c.value(payload))))


def vectors_floor(num_rows: str, output: str, work=_vectors_at_once) -> None:
    values, labels = vectors(num_rows)
    step, children = -(-len(values) // 2), []
    for start in range(0, len(values), step):
        child = os.fork()
        if not child:
            with open(os.path.join(output, f"{start}.tfrecord"), "wb", buffering=1 << 20) as file:
                work(file, start, values[start : start + step], labels[start : start + step])
                file.flush()
                os.fsync(file.fileno())
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def vectors_floor_row(num_rows: str, output: str) -> None:
    vectors_floor(num_rows, output, _vectors_one_by_one)


def vectors_raw(num_rows: str, output: str) -> None:
    values, labels = vectors(num_rows)
    with open(os.path.join(output, "rows.raw"), "wb", buffering=1 << 20) as file:
        for number in range(len(values)):
            file.write(b"%08d" % number + values[number].tobytes() + bytes([int(labels[number])]))


def vectors_datamat(num_rows: str, output: str, *, by_block: bool, kind: str = "tfrecord") -> None:
    import numpy as np

    from datamat import Features, Scalar, Tensor, materialize

    values, labels = vectors(num_rows)

    def one(number):
        return {"x": values[number], "label": int(labels[number])}

    def many(numbers):
        return {"x": values[numbers], "label": labels[numbers]}

    features = Features({"x": Tensor((10,), "float32"), "label": Scalar("int64")})
    block = many if by_block else None
    materialize(one, np.arange(len(values)), output, features=features, block=block, format=kind)


def vectors_block(num_rows: str, output: str) -> None:
    vectors_datamat(num_rows, output, by_block=True)


def vectors_block_parquet(num_rows: str, output: str) -> None:
    vectors_datamat(num_rows, output, by_block=True, kind="parquet")


def vectors_row(num_rows: str, output: str) -> None:
    vectors_datamat(num_rows, output, by_block=False)


def vectors_class(num_rows: str, output: str, *, by_block: bool = False) -> None:
    import numpy as np

    from datamat import DatasetWriter, Features, IndexRow, Materializer, Scalar, Tensor
    from datamat.writers import RowBlock

    values, labels = vectors(num_rows)

    class Vectors(DatasetWriter):
        name = "vectors"
        features = Features({"x": Tensor((10,), "float32"), "label": Scalar("int64")})

        def index(self, source):
            if not by_block:
                for number in range(len(values)):
                    yield IndexRow(f"{number:08d}", fields={"number": number})
                return
            for start in range(0, len(values), 10_000):
                numbers = np.arange(start, min(start + 10_000, len(values)))
                yield RowBlock([f"{number:08d}" for number in numbers.tolist()], {"number": numbers})

        def read(self, row):
            number = row.fields["number"]
            return {"x": values[number], "label": int(labels[number])}

    Materializer(Vectors(), None, output).run()


def vectors_class_blocks(num_rows: str, output: str) -> None:
    vectors_class(num_rows, output, by_block=True)


def _write_vectors_by_hand(job) -> None:
    import struct

    import google_crc32c

    def varint(value: int) -> bytes:
        found = bytearray()
        while value > 127:
            found.append(value & 127 | 128)
            value >>= 7
        found.append(value)
        return bytes(found)

    def field(tag: int, data: bytes) -> bytes:
        return bytes((tag,)) + varint(len(data)) + data

    def entry(key: bytes, tag: int, data: bytes) -> bytes:
        return field(0x0A, field(0x0A, key) + field(0x12, field(tag, field(0x0A, data))))

    path, start, values, labels = job
    with open(path, "wb", buffering=1 << 20) as file:
        for number, (row, label) in enumerate(zip(values, labels.tolist(), strict=True), start):
            entries = (
                entry(b"key", 0x0A, b"%08d" % number),
                entry(b"label", 0x1A, varint(label)),
                entry(b"x", 0x12, row.tobytes()),
            )
            payload = field(0x0A, b"".join(entries))
            header = struct.pack("<Q", len(payload))
            crcs = [struct.pack("<I", _masked(google_crc32c.value(part))) for part in (header, payload)]
            file.write(b"".join((header, crcs[0], payload, crcs[1])))
        file.flush()
        os.fsync(file.fileno())


def vectors_hand(num_rows: str, output: str) -> None:
    vectors_by_pool(_write_vectors_by_hand, "tfrecord", num_rows, output, method="fork")


def vectors_arrayrecord(num_rows: str, output: str) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    values, labels = vectors(num_rows)
    writer = ArrayRecordWriter(os.path.join(output, "rows.array_record"), "group_size:1")
    for number in range(len(values)):
        writer.write(b"%08d" % number + values[number].tobytes() + bytes([int(labels[number])]))
    writer.close()


def vectors_pyarrow(num_rows: str, output: str) -> None:
    _write_vectors_by_pyarrow((os.path.join(output, "rows.parquet"), 0, *vectors(num_rows)))


def _write_vectors_by_pyarrow(job) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path, start, values, labels = job
    rows = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 10)
    keys = pa.array([f"{number:08d}" for number in range(start, start + len(values))])
    with open(path, "wb") as file:
        parquet.write_table(pa.table({"key": keys, "x": rows, "label": labels}), file, write_page_checksum=True)
        file.flush()
        os.fsync(file.fileno())


def vectors_pyarrow_pool(num_rows: str, output: str) -> None:
    vectors_by_pool(_write_vectors_by_pyarrow, "parquet", num_rows, output, method="fork")


def _write_vectors(job) -> None:
    import tensorflow as tf

    path, start, values, labels = job
    with tf.io.TFRecordWriter(path) as writer:
        for number, (row, label) in enumerate(zip(values, labels, strict=True), start):
            fields = {
                "key": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"%08d" % number])),
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=fields)).SerializeToString())


def _write_vector_tars(job) -> None:
    import webdataset

    path, start, values, labels = job
    with webdataset.TarWriter(path) as writer:
        for number, (row, label) in enumerate(zip(values, labels, strict=True), start):
            writer.write({"__key__": f"{number:08d}", "x.npy": row, "label.cls": int(label)})


def vectors_by_pool(work, extension: str, num_rows: str, output: str, method: str = "spawn") -> None:
    import multiprocessing

    values, labels = vectors(num_rows)
    step = -(-len(values) // 2)
    jobs = [
        (
            os.path.join(output, f"{start}.{extension}"),
            start,
            values[start : start + step],
            labels[start : start + step],
        )
        for start in range(0, len(values), step)
    ]
    with multiprocessing.get_context(method).Pool(2) as pool:
        pool.map(work, jobs)


def vectors_tf_pool(num_rows: str, output: str) -> None:
    vectors_by_pool(_write_vectors, "tfrecord", num_rows, output)


def vectors_tar_pool(num_rows: str, output: str) -> None:
    vectors_by_pool(_write_vector_tars, "tar", num_rows, output)


def _vector(number: int):
    if not _held:
        _held.append(vectors(os.environ["BENCH_ROWS"]))
    values, labels = _held[0]
    return {"key": f"{number:08d}", "x": values[number], "label": int(labels[number])}


_held: list = []


def vectors_litdata(num_rows: str, output: str) -> None:
    os.environ["BENCH_ROWS"] = num_rows
    optimize_by_litdata(_vector, list(range(int(num_rows))), output)


def optimize_by_litdata(function, items: list, output: str) -> None:
    import litdata

    litdata.optimize(function, items, output, chunk_bytes="64MB", num_workers=2, start_method="fork")


VECTORS = {
    "floor": vectors_floor,
    "floor-row": vectors_floor_row,
    "hand": vectors_hand,
    "raw": vectors_raw,
    "block": vectors_block,
    "block-parquet": vectors_block_parquet,
    "row": vectors_row,
    "class": vectors_class,
    "class-blocks": vectors_class_blocks,
    "arrayrecord": vectors_arrayrecord,
    "pyarrow": vectors_pyarrow,
    "pyarrow-pool": vectors_pyarrow_pool,
    "tf-pool": vectors_tf_pool,
    "tar-pool": vectors_tar_pool,
    "litdata": vectors_litdata,
}


_COLUMN_ROWS = 2000


def _table_of(num_columns: str):
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(0)
    return pa.table({f"c{number:05d}": rng.random(_COLUMN_ROWS, np.float32) for number in range(int(num_columns))})


def columns_pyarrow(num_columns: str, output: str) -> None:
    from pyarrow import parquet

    with open(os.path.join(output, "rows.parquet"), "wb") as file:
        parquet.write_table(_table_of(num_columns), file, compression="zstd", write_page_checksum=True)
        file.flush()
        os.fsync(file.fileno())


def columns_datamat(num_columns: str, output: str) -> None:
    from datamat import Materializer

    Materializer(_table_of(num_columns), output=output, format="parquet").run()


COLUMNS = {"pyarrow": columns_pyarrow, "datamat": columns_datamat}


def copy_floor(source: str, output: str) -> None:
    pairs = pairs_of(source)
    children = []
    for half in range(2):
        child = os.fork()
        if not child:
            with open(os.path.join(output, f"{half}.raw"), "wb", buffering=0) as file:
                for number in range(half, len(pairs), 2):
                    for path in pairs[number][:2]:
                        file.write(pathlib.Path(path).read_bytes())
                os.fsync(file.fileno())
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def _copy_by_hand(job) -> None:
    path, pairs = job
    with open(path, "wb", buffering=0) as file:
        for image, mask, _ in pairs:
            key = pathlib.Path(image).stem.encode()
            files = [pathlib.Path(path).read_bytes() for path in (image, mask)]
            os.writev(file.fileno(), _framed_bytes({b"image": files[0], b"key": key, b"mask": files[1]}))
        os.fsync(file.fileno())


def copy_hand(source: str, output: str) -> None:
    copy_by_pool(_copy_by_hand, "tfrecord", source, output)


def copy_datamat(source: str, output: str, **options) -> None:
    from datamat import Materializer

    Materializer("camvid", source, output, **options).run(workers=2)


def copy_tfrecord(source: str, output: str) -> None:
    copy_datamat(source, output)


def copy_webdataset(source: str, output: str) -> None:
    copy_datamat(source, output, format="webdataset")


def copy_parquet(source: str, output: str) -> None:
    copy_datamat(source, output, format="parquet")


def copy_one_shard(source: str, output: str) -> None:
    from datamat import ShardOptions

    copy_datamat(source, output, shards=ShardOptions(num_shards=1))


def _copy_by_pyarrow(job) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path, pairs = job
    schema = pa.schema({"key": pa.string(), "image": pa.binary(), "mask": pa.binary()})
    with open(path, "wb") as file:
        with parquet.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=False, write_statistics=["key"], write_page_checksum=True
        ) as writer:
            for start in range(0, len(pairs), 64):
                rows = [
                    {"key": image, "image": pathlib.Path(image).read_bytes(), "mask": pathlib.Path(mask).read_bytes()}
                    for image, mask, _ in pairs[start : start + 64]
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema))
        file.flush()
        os.fsync(file.fileno())


def _copy_by_tensorflow(job) -> None:
    import tensorflow as tf

    path, pairs = job
    with tf.io.TFRecordWriter(path) as writer:
        for image, mask, _ in pairs:
            writer.write(_example(tf, image, pathlib.Path(image).read_bytes(), pathlib.Path(mask).read_bytes()))
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def copy_by_pool(work, extension: str, source: str, output: str) -> None:
    import multiprocessing

    pairs = pairs_of(source)
    jobs = [(os.path.join(output, f"{half}.{extension}"), pairs[half::2]) for half in range(2)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(work, jobs)


def copy_pyarrow(source: str, output: str) -> None:
    copy_by_pool(_copy_by_pyarrow, "parquet", source, output)


def copy_tf_pool(source: str, output: str) -> None:
    copy_by_pool(_copy_by_tensorflow, "tfrecord", source, output)


def _copy_by_arrayrecord(job) -> None:
    import tensorflow as tf
    from array_record.python.array_record_module import ArrayRecordWriter

    path, pairs = job
    writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
    for image, mask, _ in pairs:
        writer.write(_example(tf, image, pathlib.Path(image).read_bytes(), pathlib.Path(mask).read_bytes()))
    writer.close()
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def copy_arrayrecord(source: str, output: str) -> None:
    copy_by_pool(_copy_by_arrayrecord, "array_record", source, output)


def _copy_by_webdataset(job) -> None:
    import webdataset

    path, pairs = job
    with webdataset.TarWriter(path) as writer:
        for image, mask, _ in pairs:
            found = {"image.png": pathlib.Path(image).read_bytes(), "mask.png": pathlib.Path(mask).read_bytes()}
            writer.write({"__key__": pathlib.Path(image).stem, **found})
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def copy_tar_pool(source: str, output: str) -> None:
    copy_by_pool(_copy_by_webdataset, "tar", source, output)


def _pair(pair):
    image, mask, _ = pair
    return {"key": image, "image": pathlib.Path(image).read_bytes(), "mask": pathlib.Path(mask).read_bytes()}


def copy_litdata(source: str, output: str) -> None:
    optimize_by_litdata(_pair, pairs_of(source), output)


COPY = {
    "floor": copy_floor,
    "hand": copy_hand,
    "tfrecord": copy_tfrecord,
    "webdataset": copy_webdataset,
    "parquet": copy_parquet,
    "one-shard": copy_one_shard,
    "arrayrecord": copy_arrayrecord,
    "pyarrow": copy_pyarrow,
    "tf-pool": copy_tf_pool,
    "tar-pool": copy_tar_pool,
    "litdata": copy_litdata,
}


def safety(source: str, output: str, name: str) -> None:
    """Run with one safety switched off: what it is made of is replaced here, in the process that forks the worker."""
    from datamat import Materializer, WorkerOptions

    SWITCHES[name]()
    workers = WorkerOptions(num_workers=1, start_method="fork")
    Materializer("camvid", source, output).run(workers=workers)


def no_switch() -> None:
    """Leave everything on."""


def no_crc() -> None:
    import google_crc32c

    google_crc32c.value = lambda data: 0
    google_crc32c.extend = lambda crc, data: 0


def no_file_digests() -> None:
    import datamat.run.receipts as receipts
    import datamat.run.shards as shards

    receipts.xxhash = shards.xxhash = _NoHash


def no_input_digests() -> None:
    import datamat.codecs.files as module

    module.xxhash = _NoHash


class _NoHash:
    def update(self, data) -> None:
        """Take nothing in."""

    def hexdigest(self) -> str:
        return "0" * 32

    @staticmethod
    def xxh3_128() -> _NoHash:
        return _NoHash()

    @staticmethod
    def xxh3_128_digest(data) -> bytes:
        return bytes(16)

    @staticmethod
    def xxh3_128_hexdigest(data) -> str:
        return "0" * 32


def no_flush() -> None:
    os.fsync = os.fdatasync = lambda descriptor: None


def no_receipts() -> None:
    import datamat.run.receipts as receipts
    import datamat.run.shards as shards

    kept = {}
    for module in (receipts, shards):
        module.write_receipt = lambda folder, receipt, offsets: kept.update({(folder, receipt.number): receipt})
        module.read_receipt = lambda folder, number: kept.get((folder, number))


SWITCHES = {
    "all": no_switch,
    "no-crc": no_crc,
    "no-file-digests": no_file_digests,
    "no-input-digests": no_input_digests,
    "no-flush": no_flush,
    "no-receipts": no_receipts,
}
SAFETY = {name: functools.partial(safety, name=name) for name in SWITCHES}


def many_rows(source: str, output: str, num_rows: int) -> None:
    vectors_datamat(str(num_rows), output, by_block=False)


GROWTH = {f"{number:,}": functools.partial(many_rows, num_rows=number) for number in (10**3, 10**4, 10**5, 10**6)}


def print_machine() -> None:
    print(f"{platform.platform()}, {os.cpu_count()} logical CPUs, Python {platform.python_version()}")
    found = {found.name.replace("_", "-"): found.version for found in importlib.metadata.distributions()}
    print(", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found))


if __name__ == "__main__":
    main()
