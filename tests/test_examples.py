"""The examples run as they are, from anywhere, and do what they say."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from datamat import load
from datamat.codecs import decode_image, decode_mask

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def street():
    """The module `examples/street.py`."""
    spec = importlib.util.spec_from_file_location("street", EXAMPLES / "street.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["street"] = module  # dataclasses look their module up
    yield module if spec.loader.exec_module(module) is None else None
    del sys.modules["street"]


def run(name, *arguments, folder) -> str:
    """Run an example as a user would, in a folder of its own; return what it says."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "NO_ALBUMENTATIONS_UPDATE": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_street_draws_pairs_in_camvids_layout(tmp_path):
    """Three splits, each with pictures, masks and a list whose prefix is not here."""
    run("street.py", "set", "--pairs", 8, "--size", 72, 96, folder=tmp_path)

    lines = [
        line for name in ("train", "val", "test") for line in (tmp_path / f"set/{name}.txt").read_text().split("\n")
    ]
    pairs = [line.split() for line in lines if line]
    assert len(pairs) == 8
    for image, mask in pairs:
        assert image.startswith("/SegNet/CamVid/")
        below = [tmp_path / "set" / path.removeprefix("/SegNet/CamVid/") for path in (image, mask)]
        assert decode_image(below[0].read_bytes()).shape == (72, 96, 3)
        assert decode_mask(below[1].read_bytes()).shape == (72, 96)


def test_street_depends_on_seed_and_number_alone(street):
    """The same pair again, whatever was drawn before; another one otherwise."""
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


@pytest.mark.slow
def test_quickstart_writes_and_reads_back(tmp_path):
    """Without CamVid at hand it draws its own; train samples come fourfold."""
    said = run("quickstart.py", "raw", "out", "--pairs", 10, folder=tmp_path)

    assert "24 samples" in said
    assert "'image': (8, 320, 320, 3)" in said
    assert len(load(tmp_path / "out", "train")) == 24


def test_own_writer_runs_without_a_guard(tmp_path):
    """A writer defined in a script, augmented by its own hook."""
    said = run("own_writer.py", "leaves", 20, folder=tmp_path)

    keys = list(load(tmp_path / "leaves" / "out", "train").keys())
    rows = {key.split("#")[0] for key in keys}
    assert len(keys) == 2 * len(rows)
    assert len(rows) + len(load(tmp_path / "leaves" / "out", "val")) == 20
    assert "(64, 64, 3)" in said
