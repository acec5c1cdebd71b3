"""PyTorch, torchdata and grain over what `load` returns; run where they are installed."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import numpy as np
import pytest
from web import serving

from datamat import MissingDependencyError, load

pytestmark = pytest.mark.filterwarnings("ignore")  # these warnings are theirs


@pytest.fixture(scope="session")
def torch():
    """The package, which the suite passes without."""
    return pytest.importorskip("torch", reason="the extra `torch` is not installed")


@pytest.fixture(scope="session")
def stateful():
    """The module of torchdata's StatefulDataLoader."""
    return pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


def keys_of(batches):
    return [key for batch in batches for key in batch["key"]]


def test_torch_is_asked_for_where_it_is_missing(pairs, monkeypatch):
    """The error says how to install it."""
    for name in ("torch", "torch.utils", "torch.utils.data"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'datamat\[torch\]'"):
        load(pairs).to_torch(4)


@pytest.mark.parametrize("format_name", ["tfrecord", "parquet", "webdataset"])
def test_tensors_are_the_arrays_of_numpy(torch, formats, format_name):
    """From every format, they share memory with the arrays."""
    data = load(formats, "train", format=format_name)

    for tensors, arrays in zip(data.to_torch(16, shuffle=True), data.to_numpy(16, shuffle=True), strict=True):
        assert tensors["key"] == arrays["key"]
        assert tensors["image"].dtype == torch.uint8
        assert np.array_equal(tensors["image"].numpy(), arrays["image"])
        assert np.array_equal(tensors["mask"].numpy(), arrays["mask"])


def test_workers_read_from_a_url(torch, pairs, tmp_path):
    """They are forked from a process that has connections to the server, for one split after another."""
    pytest.importorskip("aiohttp")
    with serving(pairs) as web:
        data = load(web.url, "val", cache_dir=tmp_path)
        data[0]
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=2, multiprocessing_context="fork", collate_fn=list
        )

        found = [sample["key"] for batch in loader for sample in batch]
        batches = torch.utils.data.DataLoader(data.to_torch(2), batch_size=None, num_workers=2)
        shared = keys_of(batches)

    assert found == load(pairs, "val").keys()
    assert shared == found


def test_every_feature_becomes_tensors(torch, everything):
    """Lists of them where the length varies, and text stays text."""
    data = load(everything)

    (batch,), (arrays,) = data.to_torch(9), data.to_numpy(9)

    for name, value in batch.items():
        if name in ("key", "caption"):
            assert value == arrays[name]
        elif isinstance(value, list):
            assert all(isinstance(one, torch.Tensor) for one in value)
        else:
            assert np.array_equal(value.numpy(), arrays[name])
    sample = next(iter(data.to_torch()))
    assert sample["label"].shape == ()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_that_torch_does_not_turn_into_arrays_are_stacked(torch, pairs, num_workers):
    """Of bfloat16, with gradients, sparse, conjugated, without dimensions: as torch itself stacks them."""
    data = load(pairs, "train")

    batch = next(iter(data.to_torch(5, transform=tensors_of_all_sorts, num_workers=num_workers)))

    singles = [tensors_of_all_sorts(data[number]) for number in range(5)]
    for name in ("half", "scaled", "sparse", "conjugated", "mean"):
        wanted = torch.stack([sample[name].detach() for sample in singles])
        wanted = wanted.to_dense() if wanted.is_sparse else wanted.resolve_conj()
        assert batch[name].dtype == wanted.dtype
        assert torch.equal(batch[name], wanted)
    assert batch["half"].dtype == torch.bfloat16
    (first, *_) = data.to_numpy(transform=tensors_of_all_sorts)
    assert first["half"].dtype == torch.bfloat16  # a single sample is what the transform returned


def tensors_of_all_sorts(sample):
    """Return what only torch can stack."""
    import torch

    pixels = torch.from_numpy(np.array(sample["image"])).permute(2, 0, 1).float() / 255
    return {
        "half": pixels.bfloat16(),
        "scaled": pixels * torch.ones(1, requires_grad=True),
        "sparse": (pixels[0] * (pixels[0] > 0.8)).to_sparse(),
        "conjugated": torch.complex(pixels[0], pixels[1]).conj(),
        "mean": pixels.mean().bfloat16(),
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "images"),
    [({}, lambda batch: [batch["image"]]), ({"batch_size": 4}, lambda batch: batch["image"]),
     ({"batch_size": 4, "collate_fn": list}, lambda samples: [sample["image"] for sample in samples])],
)  # fmt: skip
def test_arrays_that_torch_cannot_share_are_copied(torch, pairs, options, images):
    """Flipped, read-only, of other byte order or of varying size: as the most ordinary transforms return them."""

    def flipped(sample):
        image = sample["image"][: 5 + len(sample["key"]) % 2, ::-1]
        image.flags.writeable = False
        return {"image": image, "order": np.arange(3, dtype=">i2"), "key": sample["key"]}

    train = load(pairs, "train")
    found = [image for batch in train.to_torch(transform=flipped, **options) for image in images(batch)]

    assert all(np.array_equal(one.numpy(), flipped(sample)["image"]) for one, sample in zip(found, train, strict=True))
    assert next(iter(train.to_torch(transform=flipped)))["order"].tolist() == [0, 1, 2]


def test_what_is_no_number_stays_what_it_is(torch, pairs):
    """Texts of numpy are those of Python, and times of any unit are microseconds."""
    odd = {"word": np.str_("a"), "words": np.array(["a", "b"]), "any": np.array([None], object),
           "day": np.datetime64("1970-01-02"), "took": np.timedelta64(3, "s")}  # fmt: skip

    batch = next(iter(load(pairs, "train").to_torch(2, transform=lambda sample: odd)))

    assert (batch["word"], batch["words"], batch["any"]) == (["a"] * 2, [["a", "b"]] * 2, [[None]] * 2)
    assert batch["day"].tolist() == [86_400_000_000] * 2 and batch["took"].tolist() == [3_000_000] * 2


def test_dataset_is_a_map_style_one(torch, pairs):
    """A loader reads it in batches, by `__getitems__`."""
    data = load(pairs, "train")

    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    batches = list(loader)

    assert sorted(keys_of(batches)) == sorted(data.keys())
    assert batches[0]["image"].shape == (8, 24, 32, 3)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_of_a_data_loader_share_the_batches(torch, pairs, num_workers):
    """The order is that of one process."""
    data = load(pairs, "train")
    expected = keys_of(data.to_torch(7, shuffle=True, seed=1))

    loader = torch.utils.data.DataLoader(
        data.to_torch(7, shuffle=True, seed=1), batch_size=None, num_workers=num_workers, multiprocessing_context="fork"
    )

    assert keys_of(loader) == expected
    assert len(loader) == 9


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("before", "after", "num_steps"),
    [(0, 0, 0), (0, 0, 4), (2, 2, 1), (2, 2, 9), (2, 3, 4), (3, 0, 8), (0, 2, 1)],
)
def test_stateful_data_loader_resumes_exactly(stateful, pairs, before, after, num_steps):
    """This holds in the middle of an epoch and with another number of workers: the state goes to what it wraps."""
    data = load(pairs, "train")
    make = lambda: data.to_torch(7, shuffle=True, seed=1)  # noqa: E731
    expected = [*(loader := make()), *loader]
    stopped = stateful.StatefulDataLoader(make(), batch_size=None, num_workers=before)
    walk = iter(stopped)
    found = keys_of(batch for _, batch in zip(range(num_steps), walk, strict=False))
    state = json.loads(json.dumps(stopped.state_dict()))
    del walk

    inner = make()
    if before != after:
        inner.load_state_dict(state)
    resumed = stateful.StatefulDataLoader(inner, batch_size=None, num_workers=after)
    if before == after:
        resumed.load_state_dict(state)
    rest = keys_of(resumed)

    assert (found + rest)[:60] == keys_of(expected)[:60]
    if num_steps < 9:
        assert len(found + rest) == 60


def test_state_dict_survives_torch_save(torch, pairs, tmp_path):
    """It loads with `weights_only`, torch's default."""
    data = load(pairs, "train")
    loader, other = (data.to_torch(7, shuffle=True, seed=1) for _ in range(2))
    walk = iter(loader)
    found = keys_of(next(walk) for _ in range(3))

    torch.save(loader.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))

    assert sorted(found + keys_of(other)) == sorted(data.keys())


@pytest.mark.timeout(300)
def test_documented_lines_run(torch, stateful, pairs):
    """They are the code blocks of `docs/reading.md` that need torch, torchdata or grain, one after the other."""
    pytest.importorskip("grain", reason="grain is not installed")
    page = pathlib.Path(__file__).parents[2] / "docs" / "reading.md"
    pieces = re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    names = {"train": load(pairs, "train")}

    exec("\n".join(pieces), names)

    assert len(pieces) == 6
    assert sum(len(batch["key"]) for batch in names["rest"]) == 58


@pytest.mark.timeout(300)
def test_ranks_are_those_of_the_process_group(torch, pairs, tmp_path):
    """Other ranks can be given."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert len(load(pairs, "train").to_torch(10)) == 6
        assert len(load(pairs, "train").to_torch(10, rank=1, world_size=3)) == 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_grain_reads_it_as_a_random_access_source(pairs, num_workers):
    """It needs only `len`, items and pickling; its own state resumes."""
    grain = pytest.importorskip("grain", reason="grain is not installed")
    data = load(pairs, "train")
    assert isinstance(data, grain.sources.RandomAccessDataSource)

    source = (
        grain.MapDataset.source(data).seed(7).shuffle().map(lambda sample: {"key": sample["key"]}).to_iter_dataset()
    )
    if num_workers:
        source = source.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
    walk = iter(source)
    found = [next(walk)["key"] for _ in range(11)]
    again = iter(source)
    again.set_state(walk.get_state())

    assert sorted(found + [sample["key"] for sample in again]) == sorted(data.keys())
