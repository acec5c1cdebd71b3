"""The main job on data that it draws itself: `make demo`, or `python examples/demo.py [FOLDER] [--pairs N]`.

1. draws a street set of a few hundred pairs in CamVid's layout
2. begins to materialize it, with four augmented copies of each training pair, and is killed half-way (SIGKILL)
3. runs again: takes over every finished part, and ends complete
4. verifies each byte, reads everything back through tf.data, draws a preview, and says what to open
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from street import make_street_set

COPIES = {"train": 4}
UNLABELLED = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="demo", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--materialize", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    source, output = options.folder / "street", options.folder / "shards"
    if options.materialize:
        materialize_street(source, output)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    print(f"drawing {options.pairs} street scenes, to have raw data like CamVid's", flush=True)
    started = time.perf_counter()
    make_street_set(source, num_pairs=options.pairs)
    print(f"drew {options.pairs} street scenes with masks in {time.perf_counter() - started:.1f} s: {source}")
    kill_half_way([sys.executable, __file__, str(options.folder), "--materialize"], output)
    materialize_street(source, output)
    show_result(output, options.folder / "preview.png")


def materialize_street(source: pathlib.Path, output: pathlib.Path) -> None:
    """The job itself: what users write."""
    print("loading albumentations, which draws the copies", flush=True)
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations as A  # noqa: N812 -- the name that its users know

    from datamat import Materializer

    augment = A.Compose(
        [
            A.HorizontalFlip(p=0.5),
            A.Affine(scale=(0.9, 1.2), rotate=(-8, 8), fill_mask=UNLABELLED, p=0.8),
            A.RandomBrightnessContrast(p=0.6),
            A.HueSaturationValue(p=0.4),
            A.GaussNoise(std_range=(0.02, 0.06), p=0.2),
        ]
    )
    job = Materializer("camvid", source, output, copies=COPIES, transform=augment, shards=4, seed=7)
    job.run()  # shows the bar, and a summary at its end


def kill_half_way(command: list[str], output: pathlib.Path) -> None:
    """Run the job in a process of its own, and kill it when some of its parts are finished."""
    process = subprocess.Popen(command, start_new_session=True)
    parts = output / ".datamat" / "parts"
    while process.poll() is None and sum(1 for _ in parts.glob("*/*.receipt")) < 20:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(
        f"\nkilled it with SIGKILL after {sum(1 for _ in parts.glob('*/*.receipt'))} finished parts; running it again:"
    )


def import_tensorflow_quietly() -> None:
    """TensorFlow greets on standard error with a page that is not the demo's."""
    print("loading TensorFlow, to read everything back through tf.data", flush=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        import tensorflow as tf

        tf.constant(0)
    finally:
        os.dup2(kept, 2)


def show_result(output: pathlib.Path, preview: pathlib.Path) -> None:
    from datamat import load, verify

    print(verify(output))
    import_tensorflow_quietly()
    total = 0
    for split in ("train", "val", "test"):
        records = load(output, split)
        num_read, labelled = 0, 0.0
        for batch in records.to_tf(batch_size=32):
            num_read += len(batch["key"])
            labelled += float((batch["mask"].numpy() != UNLABELLED).mean()) * len(batch["key"])
        assert num_read == len(records), f"{split}: read {num_read} of {len(records)} records"
        print(f"tf.data read {num_read:5} records of {split:5} ({labelled / num_read:.0%} of the pixels labelled)")
        total += num_read
    load(output, "train").preview(12, columns=4).save(preview)
    command = pathlib.Path(sys.executable).with_name("datamat")
    print(f"{total} records in all, each exactly once\n\nOpen {preview}, or look at any sample, and at the shards:")
    print(f"  {command} view {output} --serve\n  {command} describe {output}")


if __name__ == "__main__":
    main()
