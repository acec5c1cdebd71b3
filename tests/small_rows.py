"""A dataset of four numbers that needs no source, with its writer and a job that runs in this process."""

from prepared import Prepared

from datamat import DatasetWriter, Features, IndexRow, Scalar, ShardOptions
from datamat.testing import InlineExecutor


class Rows(DatasetWriter):
    """A writer of given rows, each with the same sample."""

    name = "rows"

    def __init__(self, rows=None, features=None, made=None):
        self.rows = [IndexRow(f"r{number}", "train", {}) for number in range(4)] if rows is None else rows
        self.features = Features(features or {"x": Scalar("int64")})
        self.made = made or {"x": 1}

    def index(self, source):
        """Return the rows."""
        return self.rows

    def read(self, row):
        """Return the sample."""
        return self.made


class FailingRows(Rows):
    """A writer of which every row fails."""

    def read(self, row):
        """Fail."""
        raise ValueError(row.key)


def job(output, writer=None, *, rows=None, features=None, made=None, **options):
    """Return a job of two shards."""
    options = {"shards": ShardOptions(num_shards=2), "executor": InlineExecutor()} | options
    return Prepared(writer or Rows(rows, features, made), None, output, **options)


def shard_of(folder):
    """Return the first shard."""
    return min(folder.glob("rows-*.tfrecord"))


def damage(folder):
    """Flip a bit of the first shard."""
    content = bytearray(shard_of(folder).read_bytes())
    content[14] ^= 1
    shard_of(folder).write_bytes(content)
