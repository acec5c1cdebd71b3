"""Episodes of TFDS (RLDS): a record each, or one for each of their steps."""

import numpy as np
import pytest
from foreign_files import tfds_kind, write_tfds

from datamat import ClassLabel, ListOf, Materializer, OptionError, SampleError, Scalar, Tensor, Text, load
from datamat.testing import InlineExecutor
from datamat.writers import ImportWriter

LENGTHS = [3, 1, 4, 2, 2, 3]


def numbers(dtype, *sizes):
    shape = {"dimensions": [str(size) for size in sizes]} if sizes else {}
    return tfds_kind("tensor_feature.Tensor", tensor={"shape": shape, "dtype": dtype, "encoding": "none"})


def dict_of(features):
    return {"featuresDict": {"features": features}}


def quaternions(number):
    """Four numbers in each step: no boxes."""
    return np.arange(4.0 * LENGTHS[number], dtype=np.float32).reshape(-1, 4) * -number


@pytest.fixture
def episodes(tmp_path):
    """As `tfds.features.Dataset` of steps is written."""
    steps = {
        "action": numbers("float32", 2),
        "is_last": numbers("bool"),
        "words": tfds_kind("text_feature.Text", text={}),
        "label": tfds_kind("class_label_feature.ClassLabel", classLabel={"numClasses": "3"}),
        "observation": dict_of({"turn": numbers("float32", 4)}),
    }
    features = {
        "steps": tfds_kind("dataset_feature.Dataset", sequence={"feature": dict_of(steps), "length": "-1"}),
        "about": dict_of({"number": numbers("int64")}),
    }
    records = [
        {
            "steps/action": np.repeat(np.arange(count, dtype=np.float32), 2),
            "steps/is_last": (np.arange(count) == count - 1).astype(np.int64),
            "steps/words": [b"step %d" % place for place in range(count)],
            "steps/label": np.arange(count) % 3,
            "steps/observation/turn": quaternions(number).reshape(-1),
            "about/number": np.array([number]),
        }
        for number, count in enumerate(LENGTHS)
    ]
    kinds = dict.fromkeys(["steps/is_last", "steps/label", "about/number"], "int64")
    kinds |= {"steps/action": "float32", "steps/observation/turn": "float32", "steps/words": "bytes_list"}
    return write_tfds(tmp_path / "episodes", features, records, kinds)


def ran(writer, source, output, **options):
    Materializer(writer, source, output, **options).run(executor=InlineExecutor(), progress=False)
    return load(output)


def test_episode_is_a_record(episodes, tmp_path):
    found = ran("tfds", episodes, tmp_path / "out")

    assert found.features["steps/observation/turn"] == Tensor((None, 4), "float32")
    assert found.features["steps/words"] == ListOf(Text())
    assert len(found) == len(LENGTHS)
    for sample in found:
        number, steps = int(sample["about"]["number"]), sample["steps"]
        assert steps["words"] == [f"step {place}" for place in range(LENGTHS[number])]
        assert np.array_equal(steps["observation"]["turn"], quaternions(number))


def test_step_is_a_record(episodes, tmp_path):
    """With what is said of its episode, in the shard of all its steps."""
    found = ran(ImportWriter(each="steps"), episodes, tmp_path / "out", shards=3)

    assert {name: feature for name, feature in found.features.items() if name != "key"} == {
        "about/number": Scalar("int64"),
        "action": Tensor((2,), "float32"),
        "is_last": Scalar("bool"),
        "label": ClassLabel(num_classes=3),
        "observation/turn": Tensor((4,), "float32"),
        "words": Text(),
    }
    assert len(found) == sum(LENGTHS)
    for number, count in enumerate(LENGTHS):
        for place in range(count):
            sample = found[f"train-{number:08d}#0-{place}" if count > 1 else f"train-{number:08d}"]
            assert sample["action"].tolist() == [place, place]
            assert (sample["words"], int(sample["label"])) == (f"step {place}", place % 3)
            assert np.array_equal(sample["observation"]["turn"], quaternions(number)[place])
            assert (int(sample["about"]["number"]), bool(sample["is_last"])) == (number, place == count - 1)
    keys, start = found.keys(), 0
    for shard in found.manifest.shards:
        start += shard.num_records
        assert len({key.partition("#")[0] for key in keys[start - 1 : start + 1]}) == len(keys[start - 1 : start + 1])


def test_each_names_a_dict_of_lists(episodes, tmp_path):
    wrong = {"stages": "want a dict of lists, and the dicts are about, steps", "about": "about/number.* not a list"}
    for each, message in wrong.items():
        with pytest.raises(OptionError, match=message):
            Materializer(ImportWriter(each=each), episodes, tmp_path / "out")
    with pytest.raises(OptionError, match="there is a field 'label' next to it and in it"):
        Materializer(ImportWriter(each="steps", rename={"about/number": "label"}), episodes, tmp_path / "out")


def test_lists_of_different_lengths_are_refused(tmp_path):
    source = [{"steps": {"a": [1, 2], "b": [1.0, 2.0]}}, {"steps": {"a": [1, 2], "b": [3.0]}}]

    with pytest.raises(SampleError, match=r"the lists in 'steps' differ in length: .*'steps/a': 2, 'steps/b': 1"):
        ran(ImportWriter(each="steps"), source, tmp_path / "out")
