"""A finished directory of the small dataset, and the output folder of a small shard, which several modules share."""

import shutil

import clusters
import engine_job
import pytest
import small_pairs
import small_shard

from datamat.testing import InlineExecutor


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Twenty pairs in `train`, four in `val`."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def template(source, tmp_path_factory):
    """A finished directory that tests only read."""
    output = tmp_path_factory.mktemp("template") / "out"
    small_pairs.job(source, output).run(progress=False)
    return output


@pytest.fixture
def output(template, tmp_path):
    """A copy of the finished directory that a test may change."""
    return shutil.copytree(template, tmp_path / "out")


@pytest.fixture
def place(tmp_path):
    """The output folder of a shard, with its `.datamat`."""
    (tmp_path / "out" / ".datamat" / "shards").mkdir(parents=True)
    return tmp_path / "out"


@pytest.fixture(params=small_shard.FORMATS, ids="+".join)
def names(request):
    """The formats that the shard is written in."""
    return request.param


@pytest.fixture
def formats(names):
    return small_shard.formats_of(names)


@pytest.fixture
def programs(tmp_path):
    """Start programs, and end them with the test."""
    (tmp_path / "programs").mkdir()
    found = clusters.Programs(tmp_path / "programs")
    yield found
    found.close()


@pytest.fixture
def flags(tmp_path):
    """The folder of the file that one row of `engine_job` waits for."""
    (tmp_path / "flags").mkdir()
    return tmp_path / "flags"


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """The digests of `engine_job` with a row that waits, made here."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "go").touch()
    engine_job.job(folder / "out", folder, executor=InlineExecutor()).run(progress=False)
    return engine_job.digests(folder / "out")
