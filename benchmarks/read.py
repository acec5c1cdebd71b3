"""How fast a finished set is read, decoded, in batches of 32: the floor, datamat, and other loaders, run in turn.

    python benchmarks/read.py                              # makes a street set and runs everything that is installed
    python benchmarks/read.py --only floor,floor-own,datamat-numpy --records 2000 --rounds 3
    python benchmarks/read.py --by-number                  # random access instead: one record after the other
    BENCH_DIR=/fast/disk python benchmarks/read.py         # where the sets are written

Every contestant gets the same records (JPEG picture 480 x 360, of `--quality`; PNG mask; label), in the form that is
its own. Pictures are drawn streets, or those of `--source`, a folder in CamVid's layout; `--size 224` makes squares of
them. It runs in a process of its own and gives batches of 32: uint8 (32, 360, 480, 3) and (32, 360, 480). In the
order of the files and shuffled, one epoch warms up and five are timed, from making the loader to the last batch;
imports and the opening of the set are not counted, and every record has to come once in each. The rounds are
interleaved, and ratios are taken within a round, so that a machine whose speed drifts is fair to all. Where peers leave
the decoding to the user, cv2 does it, in two worker processes or threads, whichever they bring.

    floor             two processes decode records that lie in memory with cv2, as peers do: no reading, no batches
    floor-own         the same with datamat's decoders, which take half the time
    datamat-numpy     to_numpy      datamat-torch   to_torch      datamat-parquet    to_torch over Parquet shards
    datamat-cv2       to_numpy with cv2 in place of its own decoders: the reader alone
    datamat-workers   to_numpy with two worker processes                       datamat-tf      to_tf
    torch-files       torch DataLoader over plain files, two workers, which stay from epoch to epoch, as all workers do
    torchdata         torchdata.nodes over plain files: two threads map, then Batcher
    spdl              plain files: two threads decode a batch each with FFmpeg, whose JPEG pixels are others;
                      `-cv2` decodes them one by one with cv2 in two threads
    tf.data           interleave, decode_jpeg (accurate, and as TensorFlow chooses: `-fast`), parallel map, prefetch;
                      `-batched` parses 32 records at once before it decodes them
    dali              a pipeline on the CPU over TFRecord and its .idx, two threads; its pixels are compared with cv2's
    webdataset        batched in its workers, WebLoader          hf    bytes, decoded by cv2 in `with_transform`
    tfds, grain, grain-workers, litdata, mosaic

CPU ms is what a record keeps processors busy for, in the process and in its children. Memory is the
peak of the sum of proportional set sizes (PSS) of the process and its children, imports included; own MB, without what
they were before the first batch was asked for.

With `--by-number`, `data[number]` gives each record once, in a random order, by one process that has opened its set:
milliseconds of processor per record, and of the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BATCH, WORKERS, WINDOW = 32, 2, 1024
MODES = ("sequential", "shuffled")
NEEDS = {
    "floor": (),
    "floor-own": (),
    "datamat-numpy": (),
    "datamat-cv2": (),
    "datamat-workers": (),
    "datamat-torch": ("torch",),
    "datamat-parquet": ("torch",),
    "datamat-tf": ("tensorflow",),
    "torch-files": ("torch",),
    "tf.data": ("tensorflow",),
    "tf.data-fast": ("tensorflow",),
    "tf.data-batched": ("tensorflow",),
    "torchdata": ("torchdata.nodes", "torch"),
    "spdl": ("spdl.io",),
    "spdl-cv2": ("spdl.pipeline",),
    "tfds": ("tensorflow_datasets", "array_record"),
    "grain": ("grain", "array_record"),
    "grain-workers": ("grain", "array_record"),
    "webdataset": ("webdataset", "torch"),
    "litdata": ("litdata", "torch"),
    "mosaic": ("streaming", "torch"),
    "hf": ("datasets", "torch"),
    "dali": ("nvidia.dali",),
}
VERSIONS = (
    "torch",
    "torchdata",
    "spdl",
    "tensorflow",
    "tensorflow-datasets",
    "grain",
    "webdataset",
    "litdata",
    "mosaicml-streaming",
    "datasets",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--quality", default="95", help="of the JPEG pictures")
    parser.add_argument("--source", default="", help="folder in CamVid's layout; none draws a street set")
    parser.add_argument("--size", default="360x480", help="height x width of all pictures, or the edge of squares")
    parser.add_argument("--only", default=",".join(NEEDS))
    parser.add_argument("--by-number", action="store_true")
    parser.add_argument("--contestant", nargs=3, metavar=("NAME", "SETS", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, metavar=("NAME", "SETS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        run_contestant(*options.contestant, options.epochs)
    elif options.make:
        MAKERS[options.make[0]](pathlib.Path(options.make[1]))
    else:
        os.environ |= {"BENCH_QUALITY": options.quality, "BENCH_SOURCE": options.source, "BENCH_SIZE": options.size}
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
            (race_by_number if options.by_number else race)(pathlib.Path(folder), options)


def race_by_number(folder: pathlib.Path, options: argparse.Namespace) -> None:
    names = [name for name in BY_NUMBER if all(map(is_installed, NEEDS.get(name, ())))]
    print_machine()
    make_sets(folder, options.records, names)
    results: dict[str, list[dict]] = {name: [] for name in names}
    for round_number in range(options.rounds + 1):
        for name in names:
            result = timed(name, folder, "by number", options.epochs, watch=not round_number)
            results[name].append(result)
    print(
        f"{options.records} records, {options.rounds} rounds; ratios to the first are medians of those within a round"
    )
    print(f"{'contestant':17}{'CPU ms':>8}{'ratio':>8}{'ms':>8}{'own MB':>8}")
    for name in names:
        rounds = results[name][min(1, options.rounds) :]
        cpus = [one["cpu"] for one in rounds]
        row = f"{name:17}{statistics.median(cpus):8.2f}"
        row += ratio(cpus, [one["cpu"] for one in results[names[0]][min(1, options.rounds) :]], 8)
        row += f"{statistics.median(1000 / one['rate'] for one in rounds):8.2f}"
        print(f"{row}{results[name][0]['mb'] - results[name][0]['before']:8.0f}")


def race(folder: pathlib.Path, options: argparse.Namespace) -> None:
    asked = options.only.split(",")
    names = [name for name in asked if all(map(is_installed, NEEDS[name]))]
    print_machine()
    if len(names) < len(asked):
        print("not installed:", ", ".join(name for name in asked if name not in names))
    make_sets(folder, options.records, names)
    results: dict[tuple[str, str], list[dict]] = {(name, mode): [] for name in names for mode in MODES}
    for round_number in range(options.rounds + 1):
        for name in names:
            for mode in MODES:
                result = timed(name, folder, mode, options.epochs, watch=not round_number)
                assert result["labels"] == options.records, (name, mode, result)
                results[name, mode].append(result)
    report(names, results, options)


def report(names: list[str], results: dict, options: argparse.Namespace) -> None:
    print(f"{options.records} records, {options.rounds} rounds; ratios are medians of those within a round")
    ratios = f"{'/ floor':>9}{'/ floor-own':>13}{'/ best peer':>13}"
    heads = f"{'samples/s':>10}{ratios}{'first s':>9}{'CPU ms':>8}{'MB':>7}{'own MB':>8}"
    print(f"{'contestant':17}{'mode':12}{heads}")
    peers = [name for name in names if not name.startswith(("floor", "datamat"))]
    for mode in MODES:
        # The first round warms the page cache and the .pyc files, and is the one whose memory is watched.
        timed_rounds = {name: results[name, mode][min(1, options.rounds) :] for name in names}
        rates = {name: [one["rate"] for one in timed_rounds[name]] for name in names}
        rounds = range(len(next(iter(rates.values()))))
        for name in names:
            row = f"{name:17}{mode:12}{statistics.median(rates[name]):10.0f}"
            row += ratio(rates[name], rates.get("floor"), 9) + ratio(rates[name], rates.get("floor-own"), 13)
            others = [peer for peer in peers if peer != name]
            best = [max(rates[peer][number] for peer in others) for number in rounds] if others else None
            row += ratio(rates[name], best, 13)
            first, cpu = (statistics.median(one[key] for one in timed_rounds[name]) for key in ("first", "cpu"))
            watched = results[name, mode][0]
            print(f"{row}{first:9.3f}{cpu:8.2f}{watched['mb']:7.0f}{watched['mb'] - watched['before']:8.0f}")


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # nor is the package around it
        return False


def ratio(mine: list[float], others: list[float] | None, width: int) -> str:
    if others is None:
        return " " * width
    return f"{statistics.median(one / other for one, other in zip(mine, others, strict=True)):{width}.3f}"


def print_machine() -> None:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.processor() or platform.machine()}, {cores} cores, Python {platform.python_version()}, {found}")


def timed(name: str, folder: pathlib.Path, mode: str, epochs: int, *, watch: bool) -> dict:
    """Run a contestant; watching the memory of its process tree slows its page faults, so that round does not count."""
    import psutil

    command = [sys.executable, "-W", "ignore", __file__, "--epochs", str(epochs)]
    command += ["--contestant", name, str(folder), mode]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "DO_NOT_TRACK": "1"}
    peak = 0
    with tempfile.TemporaryFile("w+") as noise:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment)
        tree = psutil.Process(process.pid)
        while watch and process.poll() is None:
            try:
                found = sum(member.memory_full_info().pss for member in [tree, *tree.children(recursive=True)])
            except psutil.Error:
                continue  # one of them has just ended
            peak = max(peak, found)
            time.sleep(0.05)
        lines = process.stdout.read().splitlines()
        if process.wait():
            noise.seek(0)
            sys.exit(f"{name} {mode} failed:\n{noise.read()[-3000:]}")
    result = json.loads(lines[-1])
    return {**result, "mb": peak / 1e6}


def run_contestant(name: str, sets: str, mode: str, epochs: int) -> None:
    import psutil

    if mode == "by number":
        data = BY_NUMBER[name](pathlib.Path(sets))
        open_set = lambda _: one_by_one(data)  # noqa: E731
    else:
        open_set = CONTESTANTS[name](pathlib.Path(sets))  # imports, and opens
    before = psutil.Process().memory_full_info().pss / 1e6
    first, _ = run_epoch(open_set, name, mode)  # warms page cache, memory and threads
    started, cpu, count = time.perf_counter(), cpu_seconds(), 0
    for _ in range(epochs):
        count += run_epoch(open_set, name, mode)[1]
    elapsed, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    counts = {"labels": count // epochs, "rate": count / elapsed, "cpu": 1000 * cpu / count}
    print(json.dumps({**counts, "first": first, "before": before}))


def run_epoch(open_set, name: str, mode: str) -> tuple[float, int]:
    """Return after how many seconds the first batch was there, and the number of records."""
    started, first, labels = time.perf_counter(), 0.0, []
    for batch in open_set(mode == "shuffled"):
        first = first or time.perf_counter() - started
        labels += [int(label) for label in batch["label"]]
        if not name.startswith("floor"):
            assert tuple(batch["image"].shape) == (len(batch["label"]), *picture_size(), 3), batch["image"].shape
            assert tuple(batch["mask"].shape)[:3] == (len(batch["label"]), *picture_size()), batch["mask"].shape
    assert sorted(labels) == list(range(len(labels))), f"{name}: not every record once"
    return first, len(labels)


def one_by_one(data: Sequence[dict]) -> Iterator[dict]:
    """Yield each record in a random order, as a batch of one."""
    import numpy as np

    for number in np.random.default_rng(0).permutation(len(data)).tolist():
        sample = data[number]
        yield {name: np.asarray(sample[name])[None] for name in ("image", "mask", "label")}


def cpu_seconds() -> float:
    """Return the time that this process and its children have kept processors busy."""
    import psutil

    ended = os.times()
    busy = time.process_time() + ended.children_user + ended.children_system  # its own not in ticks of 10 ms
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended, and is counted above the next time
            busy += sum(child.cpu_times()[:2])
    return busy


# ---------------------------------------------------------------- the sets


def make_sets(folder: pathlib.Path, num_records: int, names: list[str]) -> None:
    """Write the records in every form that is asked for; each in a process of its own, to keep this one small."""
    (folder / "records").write_text(str(num_records))
    wanted = {"files", "datamat"}
    wanted |= {"datamat-parquet"} & set(names) | {"litdata", "mosaic"} & set(names)
    if {"grain", "grain-workers"} & set(names):
        wanted.add("grain")
    wanted |= {"arrayrecord"} if "tfds" in names else set()
    wanted |= {"parquet"} if {"hf", "datamat-parquet"} & set(names) else set()
    wanted |= {"webdataset"} if "webdataset" in names else set()
    for name in MAKERS:
        if name in wanted:
            subprocess.run([sys.executable, "-W", "ignore", __file__, "--make", name, str(folder)], check=True)


def picture_size() -> tuple[int, int]:
    """Return height and width of all pictures."""
    height, _, width = os.environ["BENCH_SIZE"].partition("x")
    return int(height), int(width or height)


def make_files(folder: pathlib.Path) -> None:
    """Resize the pictures of the source, or of a street set of 200, and shift each for more."""
    import cv2
    import numpy as np

    num_records, quality = int((folder / "records").read_text()), int(os.environ["BENCH_QUALITY"])
    source = pathlib.Path(os.environ["BENCH_SOURCE"] or folder / "street")
    if not os.environ["BENCH_SOURCE"]:
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
        from street import make_street_set

        make_street_set(source, num_pairs=min(num_records, 200))
    images = sorted(
        path for path in source.rglob("*.png") if path.parent.with_name(f"{path.parent.name}annot").exists()
    )
    shape = picture_size()
    (folder / "files").mkdir()
    for number in range(num_records):
        path = images[number % len(images)]
        shift = 2 * (number // len(images))
        mask_path = path.parent.with_name(f"{path.parent.name}annot") / path.name
        image, mask = (
            np.roll(cv2.imread(str(path)), shift, axis=1),
            np.roll(cv2.imread(str(mask_path), 0), shift, axis=1),
        )
        if image.shape[:2] != shape:
            image = cv2.resize(image, shape[::-1], interpolation=cv2.INTER_AREA)
            mask = cv2.resize(mask, shape[::-1], interpolation=cv2.INTER_NEAREST)
        cv2.imwrite(str(folder / "files" / f"{number:06d}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        cv2.imwrite(str(folder / "files" / f"{number:06d}.png"), mask)


def files_of(folder: pathlib.Path) -> list[tuple[bytes, bytes, int]]:
    """Yield every record: JPEG, PNG, label."""
    for path in sorted((folder / "files").glob("*.jpg")):
        yield path.read_bytes(), path.with_suffix(".png").read_bytes(), int(path.stem)


def make_datamat(folder: pathlib.Path, format_name: str = "tfrecord") -> None:
    from datamat import DatasetWriter, Features, Image, IndexRow, Mask, Materializer, Scalar, ShardOptions

    shape = picture_size()

    class Records(DatasetWriter):
        name = "streets"
        features = Features({"image": Image((*shape, 3)), "mask": Mask(shape), "label": Scalar("int64")})

        def index(self, source):
            return [IndexRow(path.stem, "train", {"path": str(path)}) for path in sorted(source.glob("*.jpg"))]

        def read(self, row):
            path = pathlib.Path(row.fields["path"])
            return {"image": path.read_bytes(), "mask": path.with_suffix(".png").read_bytes(), "label": int(path.stem)}

    shards = ShardOptions(num_shards=8)
    Materializer(Records(), folder / "files", folder / format_name, format=format_name, shards=shards).run(
        progress=False
    )


def make_grain(folder: pathlib.Path) -> None:
    """ArrayRecord with the simplest of contents: lengths, and the files."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "grain.array_record"), "group_size:1,uncompressed")
    for jpeg, png, label in files_of(folder):
        writer.write(struct.pack("<QQ", label, len(jpeg)) + jpeg + png)
    writer.close()


def _litdata_item(record):
    return {"image": record[0], "mask": record[1], "label": record[2]}


def make_litdata(folder: pathlib.Path) -> None:
    import litdata

    records = list(files_of(folder))
    litdata.optimize(_litdata_item, records, str(folder / "litdata"), chunk_bytes="64MB", num_workers=1)


def make_mosaic(folder: pathlib.Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "mosaic"), columns={"image": "bytes", "mask": "bytes", "label": "int"}) as writer:
        for record in files_of(folder):
            writer.write(_litdata_item(record))


MAKERS = {
    "files": make_files,
    "datamat": make_datamat,
    "parquet": lambda folder: make_datamat(folder, "parquet"),
    "webdataset": lambda folder: make_datamat(folder, "webdataset"),
    "arrayrecord": lambda folder: make_datamat(folder, "arrayrecord"),
    "grain": make_grain,
    "litdata": make_litdata,
    "mosaic": make_mosaic,
}


# ---------------------------------------------------------------- the contestants: folder -> (shuffled -> batches)


def decoded(jpeg, png, label) -> dict:
    """What those do that leave the decoding to the user."""
    import cv2
    import numpy as np

    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
    return {"image": image, "mask": cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_UNCHANGED), "label": label}


def torch_loader(dataset, **options):
    import torch

    torch.set_num_threads(1)
    options = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True, **options}
    return torch.utils.data.DataLoader(dataset, **options)


def decoded_by_datamat(jpeg, png, _label) -> None:
    """One at a time: memory for both would be taken from the system anew for each record."""
    from datamat.codecs import decode_image, decode_mask

    decode_image(jpeg)
    decode_mask(png)


def floor(folder, decode=decoded):
    records = list(files_of(folder))

    def work(numbers):
        for number in numbers:
            decode(*records[number])

    work(range(2))

    def run(shuffled):
        child = os.fork()
        work(range(bool(child), len(records), 2))
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        yield {"label": [label for _, _, label in records]}

    return run


def datamat_numpy(folder, **options):
    from datamat import load

    data = load(folder / "tfrecord", "train")
    data[0]  # imports the decoders before the clock starts
    return lambda shuffled: data.to_numpy(BATCH, shuffle=shuffled, **options)


def datamat_by_number(folder, format_name="tfrecord"):
    from datamat import load

    return load(folder / format_name, "train")


def datamat_cv2(folder):
    """The decoder of the floor in place of its own. cv2 decodes into memory of its own."""
    import cv2
    import numpy as np

    import datamat.codecs

    def into(out, pixels):
        if out is None:
            return pixels
        out[...] = pixels
        return out

    def decode_image(data, *, out=None, **_):
        return into(out, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB))

    def decode_mask(data, *, out=None, **_):
        return into(out, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED))

    datamat.codecs.decode_image, datamat.codecs.decode_mask = decode_image, decode_mask
    return datamat_numpy(folder)


def datamat_torch(folder, format_name="tfrecord"):
    import torch  # noqa: F401 -- before the clock starts

    from datamat import load

    data = load(folder / format_name, "train")
    data[0]
    return lambda shuffled: data.to_torch(BATCH, shuffle=shuffled)


def datamat_tf(folder):
    import tensorflow  # noqa: F401 -- before the clock starts

    from datamat import load

    data = load(folder / "tfrecord", "train")
    return lambda shuffled: data.to_tf(BATCH, shuffle=shuffled).as_numpy_iterator()


class _Files:
    def __init__(self, folder):
        self.paths = sorted(map(str, (folder / "files").glob("*.jpg")))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        import cv2

        path = self.paths[number]
        mask = cv2.imread(f"{path[:-4]}.png", cv2.IMREAD_UNCHANGED)
        return {"image": cv2.imread(path, cv2.IMREAD_COLOR_RGB), "mask": mask, "label": int(path[-10:-4])}


def torch_files(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import torch  # noqa: F401

    data = _Files(folder)
    return functools.cache(lambda shuffled: torch_loader(data, shuffle=shuffled))


def torchdata_nodes(folder):
    import cv2
    import torch
    from torchdata import nodes

    cv2.setNumThreads(1)
    data = _Files(folder)

    @functools.cache
    def run(shuffled):
        order = torch.utils.data.RandomSampler(data) if shuffled else torch.utils.data.SequentialSampler(data)
        found = nodes.ParallelMapper(nodes.SamplerWrapper(order), data.__getitem__, WORKERS, method="thread")
        batches = nodes.Batcher(found, batch_size=BATCH, drop_last=False)
        return nodes.Loader(nodes.Prefetcher(nodes.Mapper(batches, torch.utils.data.default_collate), 2))

    return run


def spdl(folder, *, by_cv2=False):
    import random

    import cv2
    import numpy as np
    import spdl.io
    import spdl.pipeline

    cv2.setNumThreads(1)
    data = _Files(folder)

    def pixels(paths, pix_fmt):
        return spdl.io.to_numpy(spdl.io.load_image_batch(paths, width=None, height=None, pix_fmt=pix_fmt))

    def decoded_batch(numbers):
        paths = [data.paths[number] for number in numbers]
        return {
            "image": pixels(paths, "rgb24"),
            "mask": pixels([f"{path[:-4]}.png" for path in paths], "gray")[..., 0],
            "label": np.array([int(path[-10:-4]) for path in paths]),
        }

    def stacked(samples):
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def run(shuffled):
        order = list(range(len(data)))
        if shuffled:
            random.shuffle(order)
        steps = spdl.pipeline.PipelineBuilder().add_source(order)
        if by_cv2:
            steps = steps.pipe(data.__getitem__, concurrency=WORKERS).aggregate(BATCH).pipe(stacked)
        else:
            steps = steps.aggregate(BATCH).pipe(decoded_batch, concurrency=WORKERS)
        pipeline = steps.add_sink(2).build(num_threads=WORKERS)
        with pipeline.auto_stop():
            yield from pipeline

    return run


def tf_data(folder, dct="INTEGER_ACCURATE", *, is_batched=False):
    import tensorflow as tf

    files = sorted(map(str, (folder / "tfrecord").glob("*.tfrecord")))
    columns = {name: tf.io.FixedLenFeature([], tf.string) for name in ("image", "mask")}
    columns["label"] = tf.io.FixedLenFeature([], tf.int64)

    def parse(record):
        return decode(tf.io.parse_single_example(record, columns))

    def decode(found):
        image = tf.ensure_shape(tf.io.decode_jpeg(found["image"], channels=3, dct_method=dct), (*picture_size(), 3))
        return {"image": image, "mask": tf.io.decode_png(found["mask"], channels=1), "label": found["label"]}

    def run(shuffled):
        data = tf.data.Dataset.from_tensor_slices(files)
        data = data.shuffle(len(files)) if shuffled else data
        data = data.interleave(
            lambda name: tf.data.TFRecordDataset(name, buffer_size=1 << 20),
            cycle_length=4 if shuffled else 1,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        data = data.shuffle(WINDOW) if shuffled else data
        if is_batched:
            data = data.batch(BATCH).map(lambda some: tf.io.parse_example(some, columns), tf.data.AUTOTUNE).unbatch()
        data = data.map(decode if is_batched else parse, tf.data.AUTOTUNE, deterministic=not shuffled)
        return data.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return run


def tfds_by_number(folder):
    import tensorflow_datasets

    return tensorflow_datasets.builder_from_directory(str(folder / "arrayrecord")).as_data_source("train")


def tfds(folder):
    import torch  # noqa: F401 -- tfds' random access leaves the loading to torch or grain

    data = tfds_by_number(folder)
    return functools.cache(lambda shuffled: torch_loader(data, shuffle=shuffled))


def grain_by_number(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import grain

    def parse(payload):
        label, size = struct.unpack_from("<QQ", payload)
        return decoded(payload[16 : 16 + size], payload[16 + size :], label)

    source = grain.sources.ArrayRecordDataSource([str(folder / "grain.array_record")])
    return grain.MapDataset.source(source).map(parse)


def grain_threads(folder, num_workers=0):
    import grain

    decoding = grain_by_number(folder)

    def run(shuffled):
        data = decoding.seed(1).shuffle() if shuffled else decoding
        threads = grain.ReadOptions(num_threads=1 if num_workers else WORKERS, prefetch_buffer_size=2 * BATCH)
        data = data.to_iter_dataset(threads).batch(BATCH)
        return data.mp_prefetch(grain.MultiprocessingOptions(num_workers)) if num_workers else data

    return run


def webdataset(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import torch
    import webdataset

    torch.set_num_threads(1)
    files = sorted(map(str, (folder / "webdataset").glob("*.tar")))

    def parse(sample):
        image = next(value for name, value in sample.items() if name.endswith("jpg"))
        mask = next(value for name, value in sample.items() if name.endswith("png"))
        return decoded(image, mask, json.loads(sample["json"])["label"])

    @functools.cache
    def run(shuffled):
        data = webdataset.WebDataset(files, shardshuffle=len(files) if shuffled else False)
        data = (data.shuffle(WINDOW) if shuffled else data).map(parse)
        data = data.batched(BATCH, collation_fn=torch.utils.data.default_collate)
        return webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)

    return run


class _Streamed:
    """Decodes what litdata or mosaic give by number."""

    def __getitem__(self, number):
        found = super().__getitem__(number)
        return decoded(found["image"], found["mask"], found["label"])


def litdata(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import torch  # noqa: F401
    from litdata import StreamingDataLoader, StreamingDataset

    kind = type("Streamed", (_Streamed, StreamingDataset), {})
    globals()["Streamed"] = kind

    @functools.cache
    def run(shuffled):
        data = kind(str(folder / "litdata"), shuffle=shuffled)
        return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)

    return run


def mosaic(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import torch  # noqa: F401
    from streaming import StreamingDataset

    kind = type("Streamed", (_Streamed, StreamingDataset), {})
    globals()["Streamed"] = kind
    data = kind(local=str(folder / "mosaic"), shuffle=False, batch_size=BATCH)
    mixed = kind(local=str(folder / "mosaic"), shuffle=True, batch_size=BATCH)
    return functools.cache(lambda shuffled: torch_loader(mixed if shuffled else data))


def hf_by_number(folder):
    import cv2  # noqa: F401 -- before the clock starts
    import datasets

    files = sorted(map(str, (folder / "parquet").glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / "hf"))
    for name in ("image", "mask"):
        data = data.cast_column(name, datasets.Image(decode=False))

    def decode(some):
        pairs = zip(some["image"], some["mask"], some["label"], strict=True)
        found = [decoded(image["bytes"], mask["bytes"], label) for image, mask, label in pairs]
        return {name: [one[name] for one in found] for name in found[0]}

    return data.with_transform(decode)


def hf(folder):
    import torch  # noqa: F401

    data = hf_by_number(folder)
    return functools.cache(lambda shuffled: torch_loader(data, shuffle=shuffled))


def dali(folder):
    import cv2
    import numpy as np
    from nvidia.dali import fn, pipeline_def, tfrecord, types

    files = sorted(map(str, (folder / "tfrecord").glob("*.tfrecord")))
    columns = {name: tfrecord.FixedLenFeature((), tfrecord.string, "") for name in ("image", "mask")}
    columns["label"] = tfrecord.FixedLenFeature([1], tfrecord.int64, -1)

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def pipeline(*, shuffled):
        record = fn.readers.tfrecord(
            path=files,
            index_path=[f"{path.removesuffix('tfrecord')}idx" for path in files],
            features=columns,
            random_shuffle=shuffled,
            initial_fill=WINDOW,
            name="records",
        )
        image = fn.decoders.image(record["image"], output_type=types.RGB)
        return image, fn.decoders.image(record["mask"], output_type=types.GRAY), record["label"]

    def batches(pipe, count):
        for _ in range(count):
            image, mask, label = (found.as_array() for found in pipe.run())
            yield {"image": image, "mask": mask, "label": label[:, 0]}

    first = next(batches(pipeline(shuffled=False), 1))
    for image, mask, label in zip(first["image"], first["mask"], first["label"], strict=True):
        path = folder / "files" / f"{label:06d}"
        assert np.array_equal(image, cv2.imread(f"{path}.jpg", cv2.IMREAD_COLOR_RGB)), path
        assert np.array_equal(mask[..., 0], cv2.imread(f"{path}.png", cv2.IMREAD_UNCHANGED)), path
    made = {}

    def run(shuffled):
        pipe = made[shuffled] = made.get(shuffled) or pipeline(shuffled=shuffled)  # continues with the next epoch
        num_records = int((folder / "records").read_text())
        assert not num_records % BATCH, "its last batch would hold records of the next epoch"
        return batches(pipe, num_records // BATCH)

    return run


CONTESTANTS = {
    "floor": floor,
    "floor-own": lambda folder: floor(folder, decoded_by_datamat),
    "datamat-numpy": datamat_numpy,
    "datamat-cv2": datamat_cv2,
    "datamat-workers": lambda folder: datamat_numpy(folder, num_workers=WORKERS),
    "datamat-torch": datamat_torch,
    "datamat-parquet": lambda folder: datamat_torch(folder, "parquet"),
    "datamat-tf": datamat_tf,
    "torch-files": torch_files,
    "tf.data": tf_data,
    "tf.data-fast": lambda folder: tf_data(folder, ""),
    "tf.data-batched": lambda folder: tf_data(folder, "", is_batched=True),
    "torchdata": torchdata_nodes,
    "spdl": spdl,
    "spdl-cv2": lambda folder: spdl(folder, by_cv2=True),
    "tfds": tfds,
    "grain": grain_threads,
    "grain-workers": lambda folder: grain_threads(folder, WORKERS),
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaic": mosaic,
    "hf": hf,
    "dali": dali,
}
BY_NUMBER = {
    "torch-files": _Files,
    "datamat": datamat_by_number,
    "datamat-parquet": lambda folder: datamat_by_number(folder, "parquet"),
    "grain": grain_by_number,
    "tfds": tfds_by_number,
    "hf": hf_by_number,
}


if __name__ == "__main__":
    main()
