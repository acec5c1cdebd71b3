"""The examples run as they are, from anywhere, and do what they say."""

import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

from datamat import load, verify

pytestmark = pytest.mark.timeout(600)

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def street():
    """The module `examples/street.py`."""
    spec = importlib.util.spec_from_file_location("street", EXAMPLES / "street.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["street"] = module  # dataclasses look their module up
    yield module if spec.loader.exec_module(module) is None else None
    del sys.modules["street"]


def run(name, *arguments, folder, timeout_s=550) -> str:
    """Run an example as a user would, in a folder of its own; return its output."""
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "NO_ALBUMENTATIONS_UPDATE": "1",
        "PYTHONPATH": str(pathlib.Path(__file__).parent / "cpu_torchvision"),  # Lightning imports torchvision
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_street_depends_on_seed_and_number_alone(street):
    """The same call draws the same pair, whatever was drawn before; another seed or number draws another."""
    first = street.draw_pair(3, 1, (72, 96))
    other = street.draw_pair(3, 2, (72, 96))
    again = street.draw_pair(3, 1, (72, 96))

    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_street_holds_the_classes_of_a_street(street):
    """Every pixel has a class, and a few streets have all of them."""
    masks = np.stack([street.draw_pair(0, number)[1] for number in range(8)])

    assert sorted(np.unique(masks)) == list(range(11))
    assert (masks == street.ROAD).mean() > 0.15


@pytest.mark.long
def test_camvid_example_writes_and_reads_back(tmp_path):
    """Without CamVid it draws its own, in the layout of CamVid; train samples come fourfold."""
    said = run("camvid.py", "raw", "out", "--pairs", 10, folder=tmp_path)

    assert "24 samples" in said
    assert "'image': (8, 320, 320, 3)" in said
    assert len(load(tmp_path / "out", "train")) == 24


def test_demo_kills_its_job_half_way(street, tmp_path, capsys):
    """When twenty parts are finished, and long before the last."""
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    program = (
        "import time; from datamat import materialize; "
        f"materialize(lambda n: time.sleep(0.01) or {{'n': n}}, range(2000), {str(tmp_path / 'out')!r}, progress=False)"
    )

    demo["kill_half_way"]([sys.executable, "-c", program], tmp_path / "out")

    said = capsys.readouterr().out
    assert int(re.search(r"after (\d+) finished parts", said)[1]) >= 20
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_custom_writer_runs_without_a_guard(tmp_path):
    """The script defines a writer, augmented by its own hook."""
    said = run("custom_writer.py", "leaves", 20, folder=tmp_path)

    keys = list(load(tmp_path / "leaves" / "out", "train").keys())
    rows = {key.split("#")[0] for key in keys}
    assert len(keys) == 2 * len(rows)
    assert len(rows) + len(load(tmp_path / "leaves" / "out", "val")) == 20
    assert "(64, 64, 3)" in said


# Script, the package that it needs, what it says, and a directory that it writes.
SCRIPTS = [
    ("pedestrian.py", "", "braille_guide_blocks_normal: ", "out/sidewalk"),
    ("detection.py", "", "72 pictures, ", "out/coco"),
    ("train_in_a_class.py", "", r"^wrote .*\nnothing to do\n(.*\n)*.* (1\.0|0\.9)\d*$", ""),
    ("from_torch_dataset.py", "torch", r"a batch torch\.float32 \(32, 32, 2\)", "out/spirals"),
    ("torch_training.py", "torch", r"160 records before, \d+ after: (\d+) of \1\n(.*\n)*.* (1\.0|0\.9)\d*$", "out"),
    ("tokens.py", "", r"\d+ texts, \d+ tokens\n(.*\n)*.*a batch uint16 \(8, ", ""),
    ("audio.py", "soundfile", r"\d+ recordings, \d+ samples\n(.*\n)*.*a batch float32 4 x ", "sounds"),
    ("video.py", "av", r"\d+ videos, \d+ frames\n(.*\n)*.*a batch uint8 \(4, 8, 48, 64, 3\)", "videos"),
    ("robots.py", "av", r"10 episodes, \d+ frames\na batch uint8 \(4, 64, 64, 3\), actions \(4, 4, 2\)", "episodes"),
    ("train_lightning.py", "lightning", r"320 records before, the epoch's other \d+ after: \d+ in all", "out"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "needed", "says", "output"), SCRIPTS, ids=[name for name, *_ in SCRIPTS])
def test_example_does_what_it_says(tmp_path, name, needed, says, output):
    """It compares what it reads with what it wrote; what it learns in training is right nine times in ten."""
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"the package {needed} is not installed")

    said = run(name, folder=tmp_path)

    assert re.search(says, said.strip()), said
    assert not output or verify(tmp_path / output).ok
