"""Five thousand objects under one prefix, which no store lists in one answer: a source, whose set is replaced whole."""

import hashlib
import os

import pytest
from store_servers import KINDS

from datamat import DatasetWriter, Features, IndexRow, Materializer, ShardOptions, Text, load, verify

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

COUNT = 5_000
NUM_SHARDS = 120


class Notes(DatasetWriter):
    """A text for each file of a folder."""

    name = "notes"
    features = Features({"text": Text()})
    file_fields = ("path",)

    def index(self, source):
        """Return a row for each name that the folder has."""
        return [IndexRow(name, "train", {"path": f"{source}/{name}"}) for name in sorted(os.listdir(source))]

    def read(self, row):
        """Return the text."""
        with open(row.fields["path"]) as file:
            return {"text": file.read()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_read_written_and_replaced(server, tmp_path):
    """The set verifies and reads back; one of half as many shards takes its place, and nothing else is left."""
    files, bucket = server.files(), f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}"
    files.mkdir(bucket)
    wanted = {f"{number:04d}": f"note {number}" for number in range(COUNT)}
    files.pipe({f"{bucket}/raw/{name}": text.encode() for name, text in wanted.items()})
    url, places = f"{server.kind}://{bucket}", {"storage_options": server.options()}

    for num_shards in (NUM_SHARDS, NUM_SHARDS // 2):
        job = Materializer(Notes(), f"{url}/raw", f"{url}/set", shards=ShardOptions(num_shards=num_shards), **places)
        job.run(progress=False, scratch=tmp_path / "scratch", existing="replace")

        assert verify(f"{url}/set", **places).ok
        assert {sample["key"]: sample["text"] for sample in load(f"{url}/set", "train", **places)} == wanted
        files.invalidate_cache()
        there = [name for name in files.find(f"{bucket}/set") if ".datamat" not in name]
        assert sum(name.endswith(".tfrecord") for name in there) == num_shards
