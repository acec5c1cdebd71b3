"""What `load` returns, in PyTorch's DataLoader."""

from __future__ import annotations

import numpy as np
import pytest

from datamat import load

torch_data = pytest.importorskip("torch.utils.data")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # clients take long to import
    pytest.mark.filterwarnings("ignore"),  # what they warn of is theirs
]


@pytest.mark.parametrize("name", ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_loads_any_format_by_position(directory, samples, name, num_workers):
    """What `load` returns is a map-style data set for torch, whatever the format of the shards."""
    if name == "arrayrecord":
        pytest.importorskip("array_record")
    dataset = load(directory(name), "train")
    loader = torch_data.DataLoader(dataset, batch_size=None, shuffle=True, num_workers=num_workers)
    found = {sample["key"]: sample for sample in loader}

    assert found.keys() == samples.keys()
    for key, sample in found.items():
        assert (np.asarray(sample["image"]) == samples[key]["image"]).all()
        assert int(sample["label"]) == samples[key]["label"]
