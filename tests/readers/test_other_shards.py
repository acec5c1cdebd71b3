"""A file that is not the one that the manifest lists is refused by name, though its size and all its checksums fit."""

from __future__ import annotations

import os
import shutil

import pytest
from prepared import Prepared
from web import serving

from datamat import (
    Bytes,
    DatamatError,
    DatasetWriter,
    Features,
    IndexRow,
    Scalar,
    ShardOptions,
    convert,
    load,
    merge,
    verify,
)
from datamat.testing import InlineExecutor

COUNT = 40
FORMATS = ["tfrecord", "tfrecord.gz", "parquet", "webdataset", "arrayrecord"]


class Rows(DatasetWriter):
    """40 rows of `train` and 20 of `val`; another `add` changes each value, and no size."""

    name = "rows"
    features = Features({"value": Scalar("int64"), "noise": Bytes()})

    def __init__(self, add=0, first=100, noise=300):
        self.add, self.first, self.noise = add, first, noise

    def index(self, source):
        numbers = range(self.first, self.first + COUNT * 3 // 2)
        return [IndexRow(f"k{number}", "train" if number < self.first + COUNT else "val") for number in numbers]

    def read(self, row):
        value = int(row.key[1:]) + self.add
        return {"value": value, "noise": bytes((value * 7 + place) % 251 for place in range(self.noise))}


def job(folder, format_name, **changes):
    """Return the job that writes them in two shards of each split."""
    options = {"format": format_name, "shards": ShardOptions(num_shards=2), "executor": InlineExecutor()}
    return Prepared(Rows(**changes), None, folder, **options)


@pytest.fixture(scope="module", params=FORMATS)
def versions(request, tmp_path_factory):
    """Two datasets of the same keys and sizes."""
    if request.param == "arrayrecord":
        pytest.importorskip("array_record")
    folder = tmp_path_factory.mktemp("versions")
    for name, changes in (("a", {}), ("b", {"add": 251}), ("c", {"first": 500})):
        job(folder / name, request.param, **changes).run(progress=False)
    return folder


def shards_in(folder, split="train"):
    """Return the paths of the shards of a split."""
    return [folder / info.file for info in load(folder).manifest.splits[split]]


def index_of(shard):
    """Return the path of the offsets of a shard."""
    return shard.with_name(f"{shard.name.partition('.')[0]}.idx")


def swap(folder, _, *, with_index):
    one, other = shards_in(folder)
    for first, second in [(one, other)] + [(index_of(one), index_of(other))] * with_index:
        first.rename(folder / "aside")
        second.rename(first)
        (folder / "aside").rename(second)


def copy_over(folder, _):
    one, other = shards_in(folder)
    shutil.copy2(other, one)
    shutil.copy2(index_of(other), index_of(one))


def copy_across_splits(folder, _):
    shutil.copy2(shards_in(folder, "val")[0], shards_in(folder)[0])


def copy_other_version(folder, other):
    shutil.copy2(shards_in(other)[0], shards_in(folder)[0])


def begin_with_other_version(folder, other):
    path = shards_in(folder)[0]
    content, of_other = path.read_bytes(), shards_in(other)[0].read_bytes()
    path.write_bytes(of_other[: len(of_other) * 3 // 4] + content[len(of_other) * 3 // 4 :])


def pad(folder, _):
    path = shards_in(folder)[0]
    size = path.stat().st_size
    os.truncate(path, size * 3 // 4)
    os.truncate(path, size)


def append(folder, _):
    path = shards_in(folder)[0]
    path.write_bytes(path.read_bytes() + shards_in(folder)[1].read_bytes())


def shift_index(folder, _):
    path = index_of(shards_in(folder)[0])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[1:], lines[0]]))


KINDS = {
    "swapped": lambda folder, other: swap(folder, other, with_index=False),
    "swapped with offsets": lambda folder, other: swap(folder, other, with_index=True),
    "copied over another": copy_over,
    "copied across splits": copy_across_splits,
    "of another version": copy_other_version,
    "begun by another version": begin_with_other_version,
    "truncated and padded": pad,
    "longer": append,
    "other offsets": shift_index,
}
WAYS = {
    "position": lambda folder: [load(folder, "train")[number] for number in range(COUNT)],
    "samples": lambda folder: list(load(folder, "train")),
    "batches": lambda folder: list(load(folder, "train").to_numpy(8)),
    "cached": lambda folder: list(load(folder, "train", cache_dir=f"{folder}-cache", cache_bytes=1 << 20)),
    "converted": lambda folder: convert(
        folder, f"{folder}-converted", format="tfrecord", shards=1, executor=InlineExecutor(), progress=False
    ),
    "merged": lambda folder: merge([folder, folder.parent / "c"], f"{folder}-merged"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_other_file_is_refused_by_name(versions, tmp_path, kind):
    """However it is read; the other shards can be read."""
    folder = shutil.copytree(versions / "a", tmp_path / "a")
    wanted = {sample["key"]: sample["value"] for sample in load(folder)}
    shutil.copytree(versions / "c", tmp_path / "c")
    KINDS[kind](folder, versions / "b")
    shard = shards_in(folder)[0]

    for read in WAYS.values():
        with pytest.raises(DatamatError, match=shard.name.partition(".")[0]):
            read(folder)
    assert not verify(folder).ok
    assert {sample["key"]: sample["value"] for sample in load(folder, "val")} == {
        key: value for key, value in wanted.items() if value >= 100 + COUNT
    }
    skipping = load(folder, errors="skip")
    found = {sample["key"]: sample["value"] for sample in skipping}
    assert found.items() <= wanted.items()
    assert skipping.num_skipped == len(wanted) - len(found)
    if kind != "truncated and padded":  # of which the first records are right
        others = shards_in(folder)[: 2 if kind.startswith("swapped") else 1]
        infos = skipping.manifest.splits["train"][: len(others)]
        assert skipping.num_skipped == sum(info.num_records for info in infos)


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_run_makes_it_again(versions, tmp_path, kind):
    """It notices, and `status` says why."""
    folder = shutil.copytree(versions / "a", tmp_path / "a")
    before = {path.name: path.read_bytes() for path in folder.glob("rows-*")}
    again = job(folder, load(folder).manifest.format)
    KINDS[kind](folder, versions / "b")

    status = again.status()
    report = again.run(progress=False)

    num_others = 2 if "swapped" in kind else 1
    assert shards_in(folder)[0].name.partition(".")[0] in str(status)
    assert (report.num_shards_written, report.num_shards_reused) == (num_others, 4 - num_others)
    assert {path.name: path.read_bytes() for path in folder.glob("rows-*")} == before
    assert again.run(progress=False).num_shards_written == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two versions in TFRecord, and shards large enough to be read by ranges."""
    folder = tmp_path_factory.mktemp("plain")
    for name, changes in (("a", {}), ("b", {"add": 251}), ("c", {"first": 500})):
        job(folder / name, "tfrecord", noise=6000, **changes).run(progress=False)
    return folder


def test_sound_shard_of_another_version_is_refused(tmp_path):
    """Each record would be found, and have the right key: all have the same size."""
    folder = tmp_path / "a"
    for path, add in ((folder, 1000), (tmp_path / "b", 2000)):
        job(path, "tfrecord", add=add).run(progress=False)
    copy_other_version(folder, tmp_path / "b")

    with pytest.raises(DatamatError, match="rows-train-00000"):
        load(folder, "train")[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "longer"])  # its ranges are right
def test_other_file_behind_a_url_is_refused(plain, tmp_path, monkeypatch, kind):
    """By ranges, and as a copy."""
    monkeypatch.setattr("datamat.folders.retries._FIRST_WAIT_S", 0.001)  # a shorter file ends early, each time
    folder = shutil.copytree(plain / "a", tmp_path / "a")
    wanted = {sample["key"]: sample["value"] for sample in load(folder)}
    KINDS[kind](folder, plain / "b")
    shard = "rows-train-0000[01]" if kind.startswith("swapped") else shards_in(folder)[0].name.partition(".")[0]
    reads = [
        lambda data: [data[number] for number in range(len(data) - 1, -1, -1)],
        lambda data: list(data),
    ]

    with serving(folder) as web:
        for number, read in enumerate(reads):
            with pytest.raises(DatamatError, match=shard):
                read(load(web.url, "train", cache_dir=tmp_path / f"cache-{number}"))
        found = {sample["key"]: sample["value"] for sample in load(web.url, errors="skip", cache_dir=tmp_path / "c")}
    assert found.items() <= wanted.items()
    assert COUNT // 2 <= len(found) < len(wanted)


def test_copies_in_the_cache_that_were_swapped_are_made_again(plain, tmp_path):
    """Their names say what they hold."""
    with serving(plain / "a") as web:
        data = load(web.url, "train", cache_dir=tmp_path / "cache")
        wanted = list(data)
        one, other = [tmp_path / "cache" / f"{info.checksum}.tfrecord" for info in data.manifest.splits["train"]]
        while not (one.exists() and other.exists()):  # they are made beside reading
            assert list(data) == wanted
        shutil.copy2(one, other)

        assert list(load(web.url, "train", cache_dir=tmp_path / "cache")) == wanted


@pytest.mark.sample(9)
@pytest.mark.parametrize("kind", KINDS)
def test_tensorflow_gets_no_other_file(tf, plain, tmp_path, kind):
    """It opens the files by their names."""
    folder = shutil.copytree(plain / "a", tmp_path / "a")
    KINDS[kind](folder, plain / "b")
    if kind == "other offsets":  # it does not use them
        return

    with pytest.raises((DatamatError, tf.errors.InvalidArgumentError), match=shards_in(folder)[0].name):
        list(load(folder, "train").to_tf(8))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_no_other_file(plain, tmp_path, kind):
    """Of a loader of torch, and of ours."""
    torch = pytest.importorskip("torch")
    folder = shutil.copytree(plain / "a", tmp_path / "a")
    KINDS[kind](folder, plain / "b")
    shard = shards_in(folder)[0].name.partition(".")[0]

    with pytest.raises(DatamatError, match=shard):
        list(load(folder, "train").to_numpy(8, num_workers=2))
    with pytest.raises((DatamatError, RuntimeError), match=shard):
        list(torch.utils.data.DataLoader(load(folder, "train").select(range(30)), num_workers=2, batch_size=None))


@pytest.mark.parametrize("ending", ["index", "keys"])
def test_index_of_another_dataset_is_not_believed(plain, tmp_path, ending):
    """Of as many rows, under its name: a key leads to its own record, or is refused; a run writes it again."""
    folder = shutil.copytree(plain / "a", tmp_path / "a")
    right = (folder / f"_index/train.{ending}").read_bytes()
    shutil.copy2(plain / f"c/_index/train.{ending}", folder / "_index")

    if ending == "index":
        for read in (lambda: load(folder, "train").keys(), lambda: WAYS["converted"](folder)):
            with pytest.raises(DatamatError, match=r"_index/train.index"):
                read()
    assert load(folder, "train")["k110"]["value"] == 110
    assert "k510" not in load(folder, "val")
    job(folder, "tfrecord", noise=6000).run(progress=False)
    assert (folder / f"_index/train.{ending}").read_bytes() == right
    assert "k110" in load(folder, "train").keys()  # noqa: SIM118 -- read from the index
