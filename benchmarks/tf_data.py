"""The experiment of TensorFlow's guide "Better performance with the tf.data API", with a drawn timeline of each step.

    python benchmarks/tf_data.py
    python benchmarks/tf_data.py --svg docs/tf-data.svg --rounds 9

An artificial dataset sleeps where a real one works: 30 ms to open a file, 15 ms for each of its 3 samples; mapping
takes 30 ms and a training step 10 ms a sample. So the numbers are those of the order of things, not of a processor, and
what is over them is TensorFlow's own time. Each arrangement is run for two epochs (the cache for five); rounds go over
all of them by turns, the median counts, and its round is drawn.

The guide: https://www.tensorflow.org/guide/data_performance
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
import time

from charts import STYLE

SECONDS = {"open": 0.030, "read": 0.015, "map": 0.030, "train": 0.010}
NUM_SAMPLES = 3
COLOURS = {"open": "#d55e00", "read": "#0072b2", "map": "#009e73", "train": "#cc79a7"}
PIXELS_PER_SECOND, LANE, LEFT = 900, 9, 52
GUIDE = {  # what users of the guide reported, on another machine
    "naive": 0.235,
    "prefetch": 0.190,
    "interleave, sequential": 0.196,
    "map, sequential": 0.418,
    "map, parallel": 0.252,
    "cache": 0.364,
    "map of single elements": 0.880,
    "map of batches": 0.027,
}


class Clock:
    """Sleeps for the steps, and keeps when each began and ended."""

    def __init__(self):
        self.spans = []

    def spend(self, step):
        begin = time.perf_counter()
        time.sleep(SECONDS[step])
        self.spans.append((step, begin, time.perf_counter()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--svg", type=pathlib.Path, help="draw the timelines into this file")
    options = parser.parse_args()
    import tensorflow as tf

    runs, fast = measure(tf, options.rounds)
    middle = {name: sorted(found)[len(found) // 2] for name, found in runs.items()}
    print(f"{'arrangement':24} {'s':>7} {'guide':>7}")
    for name, seconds in {**{name: run[0] for name, run in middle.items()}, **fast}.items():
        print(f"{name:24} {seconds:7.3f} {GUIDE.get(name, ''):>7}")
    print(f"\n{machine()}, TensorFlow {tf.__version__}, Python {platform.python_version()}, {options.rounds} rounds")
    if options.svg:
        options.svg.write_text(drawing(middle))


def measure(tf, rounds):
    """Return (seconds, spans) of each round of each arrangement, and the median seconds of the vectorized map."""
    arrangements = slow_arrangements(tf)
    for make, _ in arrangements.values():
        run(make, 1)  # TensorFlow's first calls of all take longer
    runs = {name: [] for name in arrangements}
    fast = {name: [] for name in fast_arrangements(tf)}
    for _ in range(rounds):
        for name, (make, epochs) in arrangements.items():
            runs[name].append(run(make, epochs))
        for name, dataset in fast_arrangements(tf).items():
            begin = time.perf_counter()
            for _ in range(2):
                for _ in dataset:
                    pass
            fast[name].append(time.perf_counter() - begin)
    return runs, {name: statistics.median(found) for name, found in fast.items()}


def slow_arrangements(tf):
    """Return what makes each dataset, given a clock, and its number of epochs."""
    auto = tf.data.AUTOTUNE

    def files(clock):
        def samples():
            clock.spend("open")
            for number in range(NUM_SAMPLES):
                clock.spend("read")
                yield (number,)

        return tf.data.Dataset.from_generator(samples, output_signature=tf.TensorSpec((1,), tf.int64))

    def mapped(clock, parallel=None):
        def step(sample):
            tf.py_function(lambda: clock.spend("map"), [], ())
            return sample

        return files(clock).map(step, num_parallel_calls=parallel)

    def interleaved(clock, parallel=None):
        one = tf.autograph.experimental.do_not_convert(lambda _: files(clock))  # generators are beyond autograph
        return tf.data.Dataset.range(2).interleave(one, num_parallel_calls=parallel)

    return {
        "naive": (files, 2),
        "prefetch": (lambda clock: files(clock).prefetch(auto), 2),
        "interleave, sequential": (interleaved, 2),
        "interleave, parallel": (lambda clock: interleaved(clock, auto), 2),
        "map, sequential": (mapped, 2),
        "map, parallel": (lambda clock: mapped(clock, auto), 2),
        "cache": (lambda clock: mapped(clock).cache(), 5),
    }


def fast_arrangements(tf):
    """Return two datasets of 10,000 numbers, each made one larger: where calls cost more than the work."""
    numbers = tf.data.Dataset.range(10_000)
    return {
        "map of single elements": numbers.map(lambda number: number + 1).batch(256),
        "map of batches": numbers.batch(256).map(lambda number: number + 1),
    }


def run(make, epochs):
    clock = Clock()
    dataset = make(clock)
    begin = time.perf_counter()
    for _ in range(epochs):
        for _ in dataset:
            clock.spend("train")
    seconds = time.perf_counter() - begin
    return seconds, [(step, start - begin, end - begin) for step, start, end in clock.spans]


def drawing(runs):
    """Return an SVG picture: for each arrangement one lane for each kind of step, time from left to right."""
    height_of_one = LANE * (len(SECONDS) + 3)
    width = LEFT + round(PIXELS_PER_SECOND * max(seconds for seconds, _ in runs.values())) + 10
    height = height_of_one * len(runs) + 4
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    lines = [
        f'{opening} font-family="sans-serif" font-size="9">',
        STYLE,
        f'<rect class="ground" width="{width}" height="{height}" rx="4"/>',
    ]
    for place, (name, (seconds, spans)) in enumerate(runs.items()):
        top = height_of_one * place + 12
        lines.append(f'<text x="{LEFT}" y="{top}" font-weight="bold">{name}: {seconds:.3f} s</text>')
        for lane, step in enumerate(SECONDS):
            y = top + 4 + LANE * lane
            lines.append(f'<text x="4" y="{y + LANE - 2}">{step}</text>')
            lines += [bar(y, begin, end, COLOURS[step]) for kind, begin, end in sorted(spans) if kind == step]
    return "\n".join([*lines, "</svg>", ""])


def bar(y, begin, end, colour):
    x, width = LEFT + PIXELS_PER_SECOND * begin, PIXELS_PER_SECOND * (end - begin)
    return f'<rect x="{x:.0f}" y="{y}" width="{width:.1f}" height="{LANE - 2}" fill="{colour}"/>'


def machine():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
