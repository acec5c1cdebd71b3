"""How fast a segmentation set is written: the floor, common ways by hand, and datamat, run in turn.

    python benchmarks/write.py                        # makes a street set and runs everything, five rounds
    python benchmarks/write.py --source CamVid        # on real pairs in CamVid's layout, repeated up to --pairs
    python benchmarks/write.py --only floor,datamat --rounds 9

Each contestant is a cold interpreter that ends with finished files; the wall time is of the whole process. The rounds
are interleaved, so that a machine whose speed drifts is fair to all. What they do per pair is the same: decode the
PNG image and mask, and COPIES times flip, rotate, change brightness and contrast, encode as JPEG (quality 95) and PNG.
Floor and datamat-own draw the very same copies, from the same seeds: a percent more or fewer rotations would show.

    floor          two forked processes, half of the pairs each: only that work, written raw to one file per process.
                   No framing, no checksum, no flush, no receipts. With cv2 as codec.
    datamat-own    everything on (checksums, flush, manifest, index, progress), with codecs of the user's own: cv2 in
                   `read` and in the transform, just as the floor
    floor-codecs   the floor again, with the codecs behind datamat's Image and Mask in place of cv2
    datamat        everything on, with those codecs
    pathos-tf      pathos' pool over pairs, one tf.io.TFRecordWriter per chunk
    tf             one process, TensorFlow's decoders and writer

Memory is that of the whole process tree at its peak, sampled in a run of its own: the sum of resident sizes (RSS), and
of proportional ones, which count shared pages once (PSS). `--rows N` times N tiny numeric rows in whole blocks instead.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

COPIES = 4
CONTESTANTS = ("floor", "datamat-own", "floor-codecs", "datamat", "pathos-tf", "tf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="folder in CamVid's layout; none draws a street set")
    parser.add_argument("--pairs", type=int, default=701)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    parser.add_argument("--rows", type=int, help="time tiny numeric rows instead")
    parser.add_argument("--memory", action="store_true", help="also sample the peak memory of each process tree")
    parser.add_argument("--contestant", nargs=3, metavar=("NAME", "SOURCE", "OUTPUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        run_contestant(*options.contestant)
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        if options.rows:
            race_rows(pathlib.Path(folder), options.rows, options.rounds)
        else:
            race_pairs(pathlib.Path(folder), options)


def race_pairs(folder: pathlib.Path, options: argparse.Namespace) -> None:
    source = folder / "source"
    make_source(source, options.source, options.pairs)
    names = options.only.split(",")
    times: dict[str, list[float]] = {name: [] for name in names}
    print_machine()
    for round_number in range(options.rounds + 1):
        for name in names:
            elapsed = timed(name, source, folder / "out")
            if round_number:  # the first round warms the page cache and the .pyc files
                times[name].append(elapsed)
    memory = {name: peak_memory(name, source, folder / "out") for name in names} if options.memory else {}
    print(f"{options.pairs} pairs x {COPIES} copies, {options.rounds} rounds; ratio = median of the rounds' ratios")
    print(f"{'contestant':14}{'median s':>10}{'min s':>8}{'x floor':>9}{'RSS MB':>9}{'PSS MB':>9}")
    for name in names:
        ratios = [mine / floor for mine, floor in zip(times[name], times.get("floor", times[name]), strict=True)]
        row = f"{name:14}{statistics.median(times[name]):10.2f}{min(times[name]):8.2f}{statistics.median(ratios):9.3f}"
        print(row + ("".join(f"{megabytes:9.0f}" for megabytes in memory[name]) if memory else ""))


def command(name: str, source: pathlib.Path, output: pathlib.Path) -> list[str]:
    return [sys.executable, __file__, "--contestant", name, str(source), str(output)]


def timed(name: str, source: pathlib.Path, output: pathlib.Path) -> float:
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    # Modules are compiled once, in the round that does not count, as on any machine that keeps its .pyc files.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.perf_counter()
    subprocess.run(command(name, source, output), check=True, stderr=subprocess.DEVNULL, env=environment)
    elapsed = time.perf_counter() - started
    shutil.rmtree(output)
    return elapsed


def peak_memory(name: str, source: pathlib.Path, output: pathlib.Path) -> tuple[float, float]:
    import psutil

    output.mkdir()
    process = subprocess.Popen(command(name, source, output), stderr=subprocess.DEVNULL)
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


def run_contestant(name: str, source: str, output: str) -> None:
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    contestants = {
        "floor": floor,
        "floor-codecs": floor_codecs,
        "datamat": datamat,
        "datamat-own": datamat_own,
        "pathos-tf": pathos_tf,
        "tf": tensorflow,
    }
    contestants[name](source, output)


def augmentation():
    import albumentations as A  # noqa: N812

    return A.Compose([A.HorizontalFlip(p=0.5), A.Rotate(limit=10, p=0.7), A.RandomBrightnessContrast(p=0.5)], seed=7)


def reseed(transform, rng) -> None:
    """The quickest way: one stream for all transforms of the pipeline."""
    import random

    transform.set_random_state(rng, random.Random(int(rng.integers(1 << 32))))


def distinct_copies(key: str, draw):
    """Yield `draw(rng)` of every copy, each unlike the others, from the seeds of datamat."""
    import numpy as np

    from datamat.seeding import sample_seed

    earlier = []
    for copy in range(COPIES):
        for attempt in range(8):
            drawn = draw(np.random.Generator(np.random.PCG64(sample_seed(0, key, copy, attempt))))
            if drawn not in earlier:
                break
        earlier.append(drawn)
        yield drawn


def pairs_of(source: str) -> list[tuple[str, str]]:
    found = []
    for path in sorted(pathlib.Path(source).glob("*.txt")):
        for line in path.read_text().splitlines():
            found.append(tuple(os.path.join(source, *name.split("/")[-2:]) for name in line.split()))
    return found


def augmented(transform, image_path: str, mask_path: str):
    """The work that everybody does, with cv2: yields (JPEG bytes, PNG bytes) of each copy."""
    import cv2

    image = cv2.imread(image_path, cv2.IMREAD_COLOR_RGB)
    mask = cv2.imread(mask_path, cv2.IMREAD_UNCHANGED)

    def draw(rng):
        reseed(transform, rng)
        return encoded(transform(image=image, mask=mask))

    yield from distinct_copies(pathlib.Path(image_path).stem, draw)


def augmented_with_codecs(transform, image_path: str, mask_path: str):
    """The same work with datamat's codecs."""
    from datamat import codecs

    image = codecs.decode_image(pathlib.Path(image_path).read_bytes())
    mask = codecs.decode_mask(pathlib.Path(mask_path).read_bytes())

    def draw(rng):
        reseed(transform, rng)
        drawn = transform(image=image, mask=mask)
        return codecs.encode_jpeg(drawn["image"], quality=95), codecs.encode_png(drawn["mask"])

    yield from distinct_copies(pathlib.Path(image_path).stem, draw)


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


def _write_chunk(job):
    import cv2
    import tensorflow as tf

    cv2.setNumThreads(1)
    path, numbered = job
    transform = augmentation()
    with tf.io.TFRecordWriter(path) as writer:
        for number, (image, mask) in numbered:
            for copy, (jpeg, png) in enumerate(augmented(transform, image, mask)):
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
        for number, (image_path, mask_path) in enumerate(pairs_of(source)):
            image = tf.io.decode_png(tf.io.read_file(image_path), channels=3).numpy()
            mask = tf.io.decode_png(tf.io.read_file(mask_path), channels=1).numpy()

            def draw(rng, image=image, mask=mask):
                reseed(transform, rng)
                drawn = transform(image=image, mask=mask)
                jpeg = tf.io.encode_jpeg(drawn["image"], quality=95).numpy()
                return jpeg, tf.io.encode_png(drawn["mask"]).numpy()

            for copy, (jpeg, png) in enumerate(distinct_copies(pathlib.Path(image_path).stem, draw)):
                writer.write(_example(tf, f"{number}#{copy}", jpeg, png))


def race_rows(folder: pathlib.Path, num_rows: int, rounds: int) -> None:
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


def print_machine() -> None:
    from importlib.metadata import version

    packages = ("datamat", "numpy", "opencv-python-headless", "albumentations", "tensorflow", "pathos")
    print(f"{platform.platform()}, {os.cpu_count()} logical CPUs, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in packages))


if __name__ == "__main__":
    main()
