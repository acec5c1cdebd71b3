"""Programs that end in the middle of an epoch: they do end, with their own exit code."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numbered_rows
import pytest

pytestmark = pytest.mark.timeout(400)  # programs import TensorFlow
TF_HELD = """
batches = iter(data.to_tf(2, tf=TfOptions(repeat=True)))
next(batches)
"""
TF_IN_A_FUNCTION = """
import tensorflow as tf
batches = iter(data.to_tf(60, tf=TfOptions(repeat=True)).prefetch(100_000))
step = tf.function(lambda: tf.reduce_sum(next(batches)["image"]))
for _ in range(3):
    step()
"""
TF_FROZEN = """
import gc
batches = iter(data.to_tf(2, tf=TfOptions(repeat=True)))
next(batches)
gc.freeze()
"""
TF_RAISES = """
def train():
    for batch in data.to_tf(2, tf=TfOptions(repeat=True)):
        raise SystemError("in the middle")
train()
"""
TF_ON_TWO_DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
batches = iter(strategy.experimental_distribute_dataset(data.to_tf(2, tf=TfOptions(repeat=True))))
next(batches)
"""
TF_ON_TWO_DEVICES_IN_A_FUNCTION = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
ragged = lambda: tf.RaggedTensor.from_row_lengths([1, 2], [0, 2])
rows = data.to_tf(60, tf=TfOptions(repeat=True)).prefetch(100_000).map(lambda batch: (batch["image"], ragged()))
batches = iter(strategy.experimental_distribute_dataset(rows))
first = lambda images, _: images[0]
step = tf.function(lambda: strategy.run(first, next(batches)))
for _ in range(3):
    step()
"""
TF_OF_ANY_KIND = """
import tensorflow as tf
kinds = {
    "open": tf.numpy_function(lambda: 1, [], tf.int64),
    "ragged": tf.RaggedTensor.from_row_lengths([1, 2], [0, 2]),
    "sparse": tf.sparse.from_dense([[1, 0], [0, 2]]),
    "nested": tf.data.Dataset.range(3),
    "none": None,
}
batches = iter(data.to_tf(60, tf=TfOptions(repeat=True)).prefetch(100_000).map(lambda batch: (batch, kinds)))
step = tf.function(lambda: next(batches))
for _ in range(3):
    step()
"""
TF_CALLS_A_FUNCTION = """
import sys, time
import tensorflow as tf
def slow(sample, rng):
    time.sleep(0.1)  # the work that the end of the program comes into
    return sample
def traced(sample):
    number = tf.numpy_function(lambda number: slow(number, None), [sample["number"]], tf.int64)
    return {{**sample, "number": tf.ensure_shape(number, ())}}
held = [iter({batches}) for repeat in (True, False)]
for batches in held:
    next(batches)
{ending}
"""
READS_ON = """
import threading
started = threading.Event()
def read():
    keys = []
    for epoch in range(20):
        for batch in {batches}:
            keys += [key for key in batch["key"]]
            started.set()
    print(len(keys))
threading.Thread(target=read).start()
started.wait()
"""


def run(code, output, format_name="tfrecord"):
    """Run a program that has loaded a directory; return its exit code, what it printed, and its errors."""
    loaded = f"load({str(output)!r}, 'train', format={format_name!r})"
    imports = "from datamat import load\nfrom datamat.readers.tf import TfOptions\n"
    program = f"{imports}if __name__ == '__main__':\n    data = {loaded}\n"
    program += "".join(f"    {line}\n" for line in code.splitlines())
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    lines = [line for line in found.stderr.splitlines() if line and "0000 00:00:" not in line and "absl::" not in line]
    return found.returncode, found.stdout.strip(), lines


HOLDERS = {
    "held": TF_HELD,
    "two-devices": TF_ON_TWO_DEVICES,
    "function": TF_IN_A_FUNCTION,
    "two-devices-function": TF_ON_TWO_DEVICES_IN_A_FUNCTION,
    "any-kind": TF_OF_ANY_KIND,
    "frozen": TF_FROZEN,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A directory of numbers and text, all of which TensorFlow decodes: nothing but the function calls Python."""
    output = tmp_path_factory.mktemp("rows") / "out"
    numbered_rows.written(output, 0, 60, 2)
    return output


CALLERS = {
    "transform": "data.to_tf(4, transform=slow, tf=TfOptions(repeat=repeat))",
    "map": "data.map(slow).to_tf(4, tf=TfOptions(repeat=repeat))",
    "traced": "data.to_tf(4, transform=traced, tf=TfOptions(repeat=repeat))",
}
ENDINGS = {
    "end": ("", (0, [])),
    "exception": ("raise KeyError('mine')", (1, ["KeyError: 'mine'"])),
    "sys.exit": ("sys.exit(3)", (3, [])),
}


@pytest.mark.parametrize(
    ("by", "ending"),
    [
        ("map", "exception"),
        pytest.param("map", "end", marks=pytest.mark.long),
        pytest.param("transform", "end", marks=pytest.mark.long),
        pytest.param("transform", "sys.exit", marks=pytest.mark.long),
        pytest.param("traced", "end", marks=pytest.mark.long),
    ],
)
def test_program_whose_function_tensorflow_calls_ends(rows, by, ending):
    """Calls that are under way end first; the program has its own exit code, and its own error is the last line."""
    code, (status, last) = ENDINGS[ending]

    found, _, errors = run(TF_CALLS_A_FUNCTION.format(batches=CALLERS[by], ending=code), rows)

    assert found == status
    assert by == "traced" or errors[-1:] == last


@pytest.mark.long
@pytest.mark.parametrize(
    ("shards", "holder"),
    # What the iterator yields and what it is found by do not depend on what feeds it.
    [*itertools.product(["tfrecord"], HOLDERS), *itertools.product(["parquet"], ["held", "function", "two-devices"])],
)
def test_program_that_holds_an_iterator_ends(formats, shards, holder):
    """Left alone, TensorFlow waits for ever for an interpreter that is gone, or aborts."""
    status, printed, errors = run(HOLDERS[holder], formats, shards)

    assert (status, printed) == (0, "")
    assert not [line for line in errors if "datamat" in line]  # TensorFlow may log what it cancels


@pytest.mark.long
@pytest.mark.parametrize("shards", ["tfrecord", "parquet"])
def test_program_that_fails_in_an_epoch_ends(formats, shards):
    """Its traceback holds the iterator."""
    status, _, errors = run(TF_RAISES, formats, shards)

    assert status == 1
    assert errors[-1] == "SystemError: in the middle"


@pytest.mark.parametrize(
    ("shards", "batches"),
    [
        ("tfrecord", "data.to_numpy(7)"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("parquet", "data.to_numpy(7)"),
                ("tfrecord", "data.to_tf(7).as_numpy_iterator()"),
                ("parquet", "data.to_tf(7).as_numpy_iterator()"),
            )
        ),
    ],
)
def test_thread_reads_on_when_the_main_thread_has_ended(formats, shards, batches):
    """Python waits for the thread, but executors accept no further calls."""
    assert run(READS_ON.format(batches=batches), formats, shards) == (0, str(20 * 60), [])
