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


def run(name, *arguments, folder, timeout_s=50) -> str:
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


def test_street_draws_pairs_in_camvids_layout(tmp_path):
    """It draws three splits, each with pictures, masks and a list whose path prefix does not exist here."""
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


def test_camvid_example_writes_and_reads_back(tmp_path):
    """Without CamVid it draws its own; train samples come fourfold."""
    said = run("camvid.py", "raw", "out", "--pairs", 10, folder=tmp_path)

    assert "24 samples" in said
    assert "'image': (8, 320, 320, 3)" in said
    assert len(load(tmp_path / "out", "train")) == 24


def test_pedestrian_example_keeps_classes_of_colours(tmp_path):
    """Each training picture comes thrice, and the tactile strip is a class of its own."""
    said = run("pedestrian.py", folder=tmp_path)

    rows = {key.split("#")[0] for key in load(tmp_path / "out/sidewalk").keys()}  # noqa: SIM118
    assert len(rows) == 24
    assert len(load(tmp_path / "out/sidewalk", "train")) == 3 * (24 - len(load(tmp_path / "out/sidewalk", "val")))
    assert "braille_guide_blocks_normal: " in said
    assert (tmp_path / "out/sidewalk.png").stat().st_size > 1000


def test_detection_example_moves_boxes_with_pictures(tmp_path):
    """The brightest thing of a picture with one box lies in that box, wherever the copy has moved it."""
    said = run("detection.py", folder=tmp_path)

    train = load(tmp_path / "out/coco", "train")
    alone = [sample for sample in train if len(sample["objects/bbox"]) == 1]
    height, width = train[0]["image"].shape[:2]
    inside = []
    for sample in alone:
        lit = sample["image"].astype(int).max(axis=2)
        top, left, bottom, right = (sample["objects/bbox"][0] * [height, width, height, width]).round().astype(int)
        inside.append(lit[top:bottom, left:right].mean() > lit.mean())
    assert "72 pictures, " in said
    assert len(alone) > 10
    assert np.mean(inside) > 0.9


def test_class_makes_its_own_shards(tmp_path):
    """The method of the class augments in workers; the second call has nothing to do, and the model learns."""
    said = run("train_in_a_class.py", folder=tmp_path)

    assert said.splitlines()[0].startswith("wrote ")
    assert said.splitlines()[1] == "nothing to do"
    assert float(said.split()[-1]) > 0.9


@pytest.mark.timeout(120)
def test_dataset_of_torch_becomes_shards(tmp_path):
    """The script itself compares a record with the item of the dataset that it came from."""
    pytest.importorskip("torch")

    said = run("from_torch_dataset.py", folder=tmp_path, timeout_s=110)

    assert len(load(tmp_path / "out/spirals")) == 600
    assert "a batch torch.float32 (32, 32, 2)" in said


@pytest.mark.timeout(120)
def test_torch_example_resumes_in_mid_epoch(tmp_path):
    """The interrupted epoch has every record once."""
    pytest.importorskip("torch")

    said = run("torch_training.py", folder=tmp_path, timeout_s=110)

    num_train = len(load(tmp_path / "out", "train"))
    assert f"160 records before, {num_train - 160} after: {num_train} of {num_train}" in said
    assert float(said.split()[-1]) > 0.9


def test_custom_writer_runs_without_a_guard(tmp_path):
    """The script defines a writer, augmented by its own hook."""
    said = run("custom_writer.py", "leaves", 20, folder=tmp_path)

    keys = list(load(tmp_path / "leaves" / "out", "train").keys())
    rows = {key.split("#")[0] for key in keys}
    assert len(keys) == 2 * len(rows)
    assert len(rows) + len(load(tmp_path / "leaves" / "out", "val")) == 20
    assert "(64, 64, 3)" in said


def test_tokens_example_counts_what_it_wrote(tmp_path):
    """Each text is a sample, with a token for each of its bytes and one for its end."""
    found = run("tokens.py", folder=tmp_path)

    sizes = [path.stat().st_size for path in (tmp_path / "texts").iterdir()]
    assert f"{len(sizes)} texts, {sum(sizes) + len(sizes)} tokens" in found
    assert "a batch uint16 (8, " in found


def test_audio_example_keeps_the_files(tmp_path):
    """Each recording is a sample, as long as its file."""
    soundfile = pytest.importorskip("soundfile")

    found = run("audio.py", folder=tmp_path)

    files = sorted((tmp_path / "tones").iterdir())
    assert f"{len(files)} recordings, {sum(soundfile.info(file).frames for file in files)} samples" in found
    assert "a batch float32 4 x " in found
    assert (tmp_path / "waves.png").stat().st_size > 1000
    kept = (next((tmp_path / "sounds").glob("*.tfrecord"))).read_bytes()
    assert all(file.read_bytes() in kept for file in files)


def test_video_example_keeps_the_files(tmp_path):
    """Each video is a sample, with all its frames."""
    av = pytest.importorskip("av")

    found = run("video.py", folder=tmp_path)

    files = sorted((tmp_path / "films").iterdir())
    num_frames = 0
    for file in files:
        with av.open(file) as container:
            num_frames += sum(1 for _ in container.decode(video=0))
    assert f"{len(files)} videos, {num_frames} frames" in found
    assert "a batch uint8 (4, 8, 48, 64, 3)" in found
    assert (tmp_path / "films.png").stat().st_size > 1000
    kept = (next((tmp_path / "videos").glob("*.tfrecord"))).read_bytes()
    assert all(file.read_bytes() in kept for file in files)


@pytest.mark.timeout(300)
def test_lightning_example_resumes_in_mid_epoch(tmp_path):
    """The epoch that was interrupted has every record once."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("the package lightning is not installed")

    found = run("train_lightning.py", folder=tmp_path, timeout_s=250)

    num_train = len(load(tmp_path / "out", "train")) // 32 * 32
    assert f"320 records before, the epoch's other {num_train - 320} after: {num_train} in all" in found
    assert float(found.split()[-1]) > 0.9
