"""Tar shards, opened by tarfile, and decoded by webdataset."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image
from real_clients import MARKS, shards

pytestmark = MARKS


def key_of(sample):
    return json.loads(sample["json"])["key"]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def check_sample(found, samples):
    """Compare a sample of members with the one of its key."""
    plain = json.loads(found["json"])
    sample = samples[plain["key"]]
    assert (pixels(found["image.png"]) == sample["image"]).all()
    assert (pixels(found["mask.png"]) == sample["mask"]).all()
    assert np.array_equal(np.load(io.BytesIO(found["pose.npy"])), sample["pose"])
    assert (plain["label"], plain["caption"], plain["exact"]) == (sample["label"], sample["caption"], sample["exact"])
    assert np.array_equal(np.array(plain["objects/bbox"], np.float32).reshape(-1, 4), sample["objects/bbox"])


def test_tarfile_lists_members(directory, samples):
    """By the rules of Python's tarfile and GNU tar: plain files, fixed times and owners, an end to the archive."""
    names = []
    for path in shards(directory("webdataset"), "tar"):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            assert {(m.mtime, m.uid, m.gid, m.uname, m.mode, m.type) for m in members} == {(0, 0, 0, "", 0o644, b"0")}
            names += [member.name for member in members]

    assert len(names) == 4 * len(samples)
    assert names[0] == next(iter(samples)).replace(".", "%2E") + ".image.png"


def test_webdataset_decodes_by_extension(directory, samples):
    """Its own decoders give pictures, arrays and the JSON."""
    wds = pytest.importorskip("webdataset")

    dataset = wds.WebDataset(shards(directory("webdataset"), "tar"), shardshuffle=False).decode("pil")
    found = list(dataset.to_tuple("image.png", "mask.png", "pose.npy", "json"))

    assert [plain["key"] for *_, plain in found] == list(samples)
    for image, mask, pose, plain in found:
        sample = samples[plain["key"]]
        assert (np.asarray(image) == sample["image"]).all()
        assert (np.asarray(mask)[..., 0] == sample["mask"]).all()  # "pil" makes three equal channels of one
        assert (pose == sample["pose"]).all()
