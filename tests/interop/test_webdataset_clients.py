"""Tar shards, opened by the clients of WebDataset."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # clients take long to import
    pytest.mark.filterwarnings("ignore"),  # what they warn of is theirs
]


def shards(folder):
    return sorted(map(str, folder.glob("*-train-*.tar")))


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
    """Python's tarfile and GNU tar's rules: plain files, fixed times and owners, an end to the archive."""
    names = []
    for path in shards(directory("webdataset")):
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            assert {(m.mtime, m.uid, m.gid, m.uname, m.mode, m.type) for m in members} == {(0, 0, 0, "", 0o644, b"0")}
            names += [member.name for member in members]

    assert len(names) == 4 * len(samples)
    assert names[0] == next(iter(samples)).replace(".", "%2E") + ".image.png"


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_webdataset_gives_every_sample_once(directory, samples, num_workers):
    """Shared out by shard among the workers of a loader, decoded or not."""
    wds = pytest.importorskip("webdataset")
    pytest.importorskip("torch")

    dataset = wds.WebDataset(shards(directory("webdataset")), shardshuffle=False)
    found = list(wds.WebLoader(dataset, batch_size=None, num_workers=num_workers))

    assert sorted(map(key_of, found)) == sorted(samples)
    for sample in found:
        check_sample(sample, samples)


def test_webdataset_decodes_by_extension(directory, samples):
    """Its own decoders give pictures, arrays and the JSON."""
    wds = pytest.importorskip("webdataset")

    dataset = wds.WebDataset(shards(directory("webdataset")), shardshuffle=False).decode("pil")
    found = list(dataset.to_tuple("image.png", "mask.png", "pose.npy", "json"))

    assert [plain["key"] for *_, plain in found] == list(samples)
    for image, mask, pose, plain in found:
        sample = samples[plain["key"]]
        assert (np.asarray(image) == sample["image"]).all()
        assert (np.asarray(mask)[..., 0] == sample["mask"]).all()  # "pil" makes three equal channels of one
        assert (pose == sample["pose"]).all()


def test_wids_reads_by_number(directory, samples, tmp_path):
    """Random access through an index that names each shard and its count."""
    wids = pytest.importorskip("wids")
    from datamat import Manifest

    folder = directory("webdataset")
    shardlist = [
        {"url": str(folder / info.file), "nsamples": info.num_records} for info in Manifest.read(folder).splits["train"]
    ]
    (tmp_path / "train.json").write_text(json.dumps({"wids_version": 1, "shardlist": shardlist}))

    dataset = wids.ShardListDataset(str(tmp_path / "train.json"), cache_dir=str(tmp_path), transformations=[])

    assert len(dataset) == len(samples)
    found = [{name.removeprefix("."): data for name, data in dataset[number].items()} for number in range(len(dataset))]
    found = [{name: data.read() if hasattr(data, "read") else data for name, data in item.items()} for item in found]
    assert [key_of(item) for item in found] == list(samples)
    for item in found:
        check_sample(item, samples)


@pytest.mark.parametrize("streaming", [False, True])
def test_hugging_face_loads_tars(directory, samples, tmp_path, streaming):
    """Each member is a column, pictures decoded."""
    datasets = pytest.importorskip("datasets")

    files = {"train": shards(directory("webdataset"))}
    loaded = datasets.load_dataset("webdataset", data_files=files, streaming=streaming, cache_dir=str(tmp_path))

    rows = list(loaded["train"])
    assert [row["json"]["key"] for row in rows] == list(samples)
    for row in rows:
        assert (np.asarray(row["image.png"]) == samples[row["json"]["key"]]["image"]).all()


def test_dali_reads_tars(directory, samples):
    """A pipeline on the processor alone gives each sample once."""
    pytest.importorskip("nvidia.dali")
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        image, plain = fn.readers.webdataset(
            paths=shards(directory("webdataset")), ext=["image.png", "json"], missing_component_behavior="error"
        )
        return fn.decoders.image(image, device="cpu"), plain

    pipe = pipeline()
    pipe.build()
    for key, sample in samples.items():
        image, plain = (np.asarray(output.at(0)) for output in pipe.run())
        assert json.loads(bytes(plain))["key"] == key
        assert (image == sample["image"]).all()
