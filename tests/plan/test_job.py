"""Whatever decides a shard, beside its rows, has a digest, and a change of it is named."""

from __future__ import annotations

import pytest
import small_pairs

from datamat import DatasetWriter, Features, IndexRow, Materializer, OptionError, Scalar, ShardOptions
from datamat.formats import get_format
from datamat.plan import job
from datamat.plan.job import JobDigests, changed_digests, method_digests
from datamat.plan.pipeline import Pipeline
from datamat.writers.function import FunctionWriter


class Base(DatasetWriter):
    features = Features({"x": Scalar("int64")})
    scale = 2

    def index(self, source):
        return []

    def read(self, row):
        return {"x": self.scale}


class Derived(Base):
    def read(self, row):
        return {"x": self.helper() * self.scale}

    def helper(self):
        return 3


class Edited(Base):
    def read(self, row):
        return {"x": self.helper() * self.scale}

    def helper(self):
        return 4


def _ingredients(writer=None, transform=None, seed=0, format_name="tfrecord"):
    return JobDigests.of(Pipeline.of(writer or Derived(), transform, seed), [get_format(format_name)], seed)


def test_method_digests_hold_what_the_user_wrote_in_all_bases():
    """They hold nothing of datamat's base class."""
    names = {name.removeprefix("writer.") for name in method_digests(Derived())}

    assert names == {"features", "scale", "index", "read", "helper"}


def test_edited_helper_is_named_and_its_caller_is_not():
    """Two classes that differ in one method show which one was edited."""
    old = {**_ingredients().to_json(), **method_digests(Derived())}
    new = {**_ingredients(Edited()).to_json(), **method_digests(Edited())}

    assert changed_digests(old, new, augmented=False) == ["writer code changed (helper)"]


def test_attribute_of_an_instance_is_distinguished_from_code():
    """The class is the same."""
    writer = Derived()
    writer.scale = 5
    old = {**_ingredients().to_json(), **method_digests(Derived())}
    new = {**_ingredients(writer).to_json(), **method_digests(writer)}

    assert changed_digests(old, new, augmented=False) == ["writer's attributes changed"]


def test_function_of_materialize_is_named():
    """The writer holds it; no class was edited."""

    def made(fn):
        writer = FunctionWriter(fn, range(3), "data", Derived.features)
        return {**_ingredients(writer).to_json(), **method_digests(writer)}

    changes = changed_digests(made(lambda item: {"x": item}), made(lambda item: {"x": item + 1}), augmented=False)

    assert changes == ["writer code changed (fn)"]


@pytest.mark.parametrize(
    ("change", "plain", "drawn"),
    [
        ({"transform": small_pairs.jitter}, [], ["transform changed"]),
        ({"seed": 7}, ["seed changed (0 -> 7)"], ["seed changed (0 -> 7)"]),
        ({"format_name": "tfrecord.gz"}, ["format changed"], ["format changed"]),
    ],
)
def test_each_ingredient_concerns_its_splits(change, plain, drawn):
    """A transform concerns no split without augmentation; the digests of the splits follow."""
    old, new = _ingredients(), _ingredients(**change)

    assert changed_digests(old.to_json(), new.to_json(), augmented=False) == plain
    assert changed_digests(old.to_json(), new.to_json(), augmented=True) == drawn
    same = old.of_split(augmented=False, copies=1) == new.of_split(augmented=False, copies=1)
    assert same is ("transform" in change)
    assert old.of_split(augmented=True, copies=1) != new.of_split(augmented=True, copies=1)


def test_copies_and_augmentation_are_part_of_the_digest_of_a_split():
    """They decide how many records there are, and which."""
    found = {
        _ingredients().of_split(augmented=augmented, copies=copies) for augmented in (True, False) for copies in (1, 2)
    }

    assert len(found) == 4


class Many(Base):
    """Rows of no cost, thirty to a shard."""

    def index(self, source):
        return [IndexRow(f"{number:03d}") for number in range(300)]


def test_plan_whose_manifest_no_reader_takes_is_refused(tmp_path, monkeypatch):
    """Before any work; what is allowed is never less than what the manifest takes."""
    many = Materializer(Many(), None, tmp_path / "out", shards=ShardOptions(num_shards=10))
    many.run(progress=False)
    monkeypatch.setattr(job, "MOST_MANIFEST_BYTES", 6000)

    with pytest.raises(OptionError, match=r"parts in 10 shards, and its manifest \d+,\d+ bytes or more.*among several"):
        many.plan()

    found = (tmp_path / "out/manifest.json").stat().st_size
    monkeypatch.setattr(job, "MOST_MANIFEST_BYTES", found)
    many.plan()
