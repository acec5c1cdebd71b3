"""Memory or disk flips bits between the worker that wrote a part and the shard that takes it."""

import multiprocessing
import random
from concurrent.futures import Executor, Future, ProcessPoolExecutor

import pytest
import small_pairs

from datamat import OutputError, verify
from datamat.directory.ledger import read_ledger
from datamat.parallel.pickling import loads_data
from datamat.run.receipts import part_folder
from datamat.testing import InlineExecutor

FORMATS = ("tfrecord", "tfrecord.gz", "webdataset", "parquet", "arrayrecord", ["parquet", "tfrecord", "webdataset"])
LATE = ("forkserver", "spawn")


class Flipper(Executor):
    """Flips one bit of a part after its worker has finished it, and before the driver knows.

    Args:
        executor: what makes the calls.
        output: the directory of the job.
        suffix: suffix of the files in which a bit is flipped.
        times: how often each part is hit.
    """

    def __init__(self, executor, output, suffix, times=1):
        self.executor = executor
        self.output, self.suffix, self.times = output, suffix, times
        self.draw, self.hits = random.Random(7), {}

    def submit(self, fn, /, *args, **kwargs):
        """Return the future of a call, which is done once the bit is flipped."""
        outer = Future()
        self.executor.submit(fn, *args, **kwargs).add_done_callback(lambda inner: self.pass_on(inner, outer))
        return outer

    def shutdown(self, wait=True, *, cancel_futures=False):
        """End what makes the calls."""
        self.executor.shutdown(wait, cancel_futures=cancel_futures)

    def pass_on(self, inner, outer):
        """Flip a bit, and hand the result over."""
        if inner.exception() is not None:
            outer.set_exception(inner.exception())
            return
        returned = receipts = inner.result()
        if hasattr(returned, "packed"):  # by a process, which pickles what it returns
            receipts = [] if returned.has_failed else loads_data(returned.packed)
        for receipt in receipts if isinstance(receipts, list) else ():
            part = (receipt.shard, receipt.number)
            folder = part_folder(self.output / ".datamat", receipt.shard)
            names = sorted(folder.glob(f"{receipt.number:05d}*{self.suffix}"))
            paths = [path for path in names if path.stat().st_size]
            if paths and self.hits.get(part, 0) < self.times:
                self.hits[part] = self.hits.get(part, 0) + 1
                flip(self.draw.choice(paths), self.draw)
        outer.set_result(returned)


def flip(path, draw):
    """Flip one bit of a file, in place; of a receipt, one of the offsets."""
    content = bytearray(path.read_bytes())
    start = content.index(b"\n") + 1 if path.suffix == ".receipt" else 0
    content[draw.randrange(start, len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twelve pairs in `train`, four in `val`."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), num_train=12)


def job_of(source, output, formats, **options):
    """Return a job of two shards per split."""
    if "arrayrecord" in formats:
        pytest.importorskip("array_record")
    options = {"format": formats, "copies": {"train": 2}, "transform": small_pairs.jitter, **options}
    return small_pairs.job(source, output, **{"executor": InlineExecutor(), **options})


def check_healed(source, tmp_path, formats, flipper):
    """Run with an executor that flips bits; compare with an undisturbed run."""
    job_of(source, tmp_path / "calm", formats).run(progress=False)

    report = job_of(source, flipper.output, formats, executor=flipper).run(progress=False)

    assert report.is_complete and flipper.hits
    assert small_pairs.digests(flipper.output) == small_pairs.digests(tmp_path / "calm")
    assert verify(flipper.output, deep=True).ok
    entries = [entry.values for entry in read_ledger(flipper.output / ".datamat" / "ledger.jsonl")]
    again = {(values["shard"], number) for values in entries for number in values.get("again", ())}
    assert again >= set(flipper.hits)


@pytest.mark.sample(4)
@pytest.mark.parametrize("suffix", [".part", ".receipt"])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_part_with_a_flipped_bit_is_made_again(source, tmp_path, formats, suffix):
    """Each part is hit once, in its records or its offsets; the directory comes out the same."""
    flipper = Flipper(InlineExecutor(), tmp_path / "out", suffix)

    check_healed(source, tmp_path, formats, flipper)


@pytest.mark.parametrize("method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in LATE)])
def test_flipped_bit_is_found_whatever_the_start_method(source, tmp_path, method):
    """The digest that counts is the one that the worker computed while it wrote."""
    pool = ProcessPoolExecutor(2, multiprocessing.get_context(method))
    with Flipper(pool, tmp_path / "out", ".part") as flipper:
        check_healed(source, tmp_path, "parquet", flipper)


def test_machine_that_flips_bits_again_and_again_ends_the_run(source, tmp_path):
    """The error says so and names the part, and no shard holds wrong bytes."""
    output = tmp_path / "out"
    flipper = Flipper(InlineExecutor(), output, ".part", times=9)
    with pytest.raises(OutputError, match=r"part \d+: .*its receipt says.* Memory or disk of this machine"):
        job_of(source, output, "tfrecord", executor=flipper).run(progress=False)

    assert not list(output.glob("*.tfrecord"))
    job_of(source, output, "tfrecord").run(progress=False)
    assert verify(output, deep=True).ok
