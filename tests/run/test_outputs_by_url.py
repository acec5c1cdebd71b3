"""What is done with a directory on a disk, done with one in a bucket by its URL: the answers are the same.

The store is in the memory of this process.
"""

import hashlib
import json
import os
import pathlib
import shutil

import fsspec
import numpy as np
import pytest
import small_pairs
from memory_store import denied, s3

from datamat import (
    CorruptDataError,
    OptionError,
    OutputError,
    SampleError,
    convert,
    describe,
    export,
    load,
    merge,
    verify,
    view,
)
from datamat import (
    status as read_status,
)
from datamat.cli import main
from datamat.codecs import encode_png
from datamat.directory.verify import ShardCheck
from datamat.events import RunEnded
from datamat.testing import InlineExecutor

__all__ = ["s3"]

SECRET = "wJalrXUtnFEMI"
SHARD, OTHER = "pairs-train-00000-of-00002", "pairs-train-00001-of-00002"
FORMATS = {"tfrecord": "tfrecord", "parquet": "parquet", "webdataset": "tar", "arrayrecord": "arrayrecord"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images and masks."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Give a function that returns a finished directory in a format, made once, which tests only read."""
    found = {}

    def made(name="tfrecord"):
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name) / "out"
            small_pairs.job(source, found[name], format=name).run(progress=False)
        return found[name]

    return made


class Bucket:
    """A bucket, and an output in it."""

    def __init__(self, store, tmp_path):
        self.store, self.tmp_path = store, tmp_path
        self.options = {"secret": SECRET}
        self.root = "bucket/sets/one"
        self.url = f"s3://{self.root}"

    def put(self, folder):
        """Upload a directory."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(path.relative_to(folder), path.read_bytes())

    def write(self, name, content):
        """Write an object as somebody else would."""
        self.store.put(f"{self.root}/{name}", content)

    def read(self, name):
        """Return the content of an object."""
        return self.store.objects[f"{self.root}/{name}"].content

    def job(self, source, scratch="scratch", writer=None, **options):
        """Return a job that writes there."""
        place = {"storage_options": self.options, "scratch": self.tmp_path / scratch}
        return small_pairs.job(source, self.url, writer, **place, **options)

    def flip(self, name):
        """Change one bit of an object, and keep its size."""
        content = bytearray(self.read(name))
        content[len(content) // 2] ^= 1
        self.write(name, content)

    def content(self):
        """Return the digests of all objects but those of `.datamat`, and the names of those."""
        names = [path[len(self.root) + 1 :] for path in self.store.objects if path.startswith(f"{self.root}/")]
        inner = {name.removeprefix(".datamat/") for name in names if name.startswith(".datamat/")}
        seen = {name: hashlib.sha256(self.read(name)).hexdigest() for name in names if name[:9] != ".datamat/"}
        return seen, inner


@pytest.fixture
def bucket(s3, tmp_path):
    """A bucket, and an output in it."""
    return Bucket(s3, tmp_path)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files of this process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


# ---------------------------------------------------------------- verify


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


SIDECARS = {"tfrecord": "features.json", "tar": "pairs-train.json"}
DAMAGES = {
    "none": lambda folder, end: None,
    "a bit of a shard": lambda folder, end: flip(folder / f"{SHARD}.{end}"),
    "a shard cut off": lambda folder, end: os.truncate(folder / f"{SHARD}.{end}", 700),
    "a shard that is gone": lambda folder, end: (folder / f"{SHARD}.{end}").unlink(),
    "offsets that are gone": lambda folder, end: (folder / f"{SHARD}.idx").unlink(),
    "a bit of offsets": lambda folder, end: flip(folder / f"{SHARD}.idx"),
    "shards exchanged": lambda folder, end: swap(folder / f"{SHARD}.{end}", folder / f"{OTHER}.{end}"),
    "a shard too many": lambda folder, end: shutil.copy(
        folder / f"{SHARD}.{end}", folder / f"pairs-train-00002-of-00003.{end}"
    ),
    "a bit of the index": lambda folder, end: flip(folder / "_index/train.index"),
    "an index too many": lambda folder, end: (folder / "_index/more.index").write_bytes(b"more"),
    "a bit of the keys": lambda folder, end: flip(folder / "_index/val.keys"),
    "keys that are gone": lambda folder, end: (folder / "_index/val.keys").unlink(),
    "a bit of the manifest": lambda folder, end: flip(folder / "manifest.json"),
    "no manifest": lambda folder, end: (folder / "manifest.json").write_bytes(b"{}"),
    "a sidecar": lambda folder, end: (folder / SIDECARS[end]).write_text("{}"),
    "an index of a shard": lambda folder, end: (folder / f"{SHARD}.{end}.idx").write_text("1"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["tfrecord", "webdataset"])
def test_verify_finds_the_same_as_on_a_disk(made, tmp_path, temporary, name, damage):
    """Line by line; nothing is left of what was fetched."""
    folder = shutil.copytree(made(name), tmp_path / "out")
    DAMAGES[damage](folder, FORMATS[name])
    url = f"memory://{tmp_path.name}/sets/{name}"
    fsspec.filesystem("memory").put(f"{folder}/", f"{url}/", recursive=True)
    here, there = verify(folder), verify(url)

    assert [line.replace(str(folder), url) for line in here.problems] == list(there.problems)
    assert (here.ok, here.num_shards, here.num_records) == (there.ok, there.num_shards, there.num_records)
    assert here.ok == (damage == "none")
    assert there.path == url
    del there
    assert not [*temporary.glob("datamat-rows-*")]


@pytest.mark.parametrize("name", ["tfrecord", "parquet", "webdataset"])
def test_verify_reads_a_bucket(made, bucket, name):
    """It decodes every record there, too."""
    bucket.put(made(name))

    report = verify(bucket.url, deep=True, storage_options=bucket.options)

    assert str(report) == f"{bucket.url}: 4 shards, 24 records: all as the manifest says"


def test_few_shards_are_here_at_a_time(made, bucket, temporary, monkeypatch):
    """No more than are examined at once."""
    bucket.put(made())
    monkeypatch.setattr("datamat.directory.verify._MOST_SHARDS", 1)
    held, problems = [], ShardCheck.problems

    def counted(check, info):
        held.append(sum(path.stat().st_blocks > 0 for path in temporary.rglob("*.tfrecord")))
        return problems(check, info)

    monkeypatch.setattr(ShardCheck, "problems", counted)

    assert verify(bucket.url, storage_options=bucket.options).ok
    assert held == [1] * 4


def test_object_that_may_not_be_read_is_a_problem_of_its_own(made, bucket, s3):
    """Where nothing may be read, that is said once, without a secret."""
    bucket.put(made())
    s3.meet = lambda verb, path: denied if f"{SHARD}.tfrecord" in path else None
    assert verify(bucket.url, storage_options=bucket.options).problems == (f"{SHARD}.tfrecord: Permission denied",)

    s3.meet = lambda verb, path: denied
    with pytest.raises(OutputError, match=r"manifest\.json cannot be read: ") as caught:
        verify(bucket.url, storage_options=bucket.options)
    assert SECRET not in str(caught.value)


def test_object_longer_than_any_shard_is_not_fetched(made, tmp_path):
    """Anybody may put it there."""
    url = f"memory://{tmp_path.name}/long"
    store = fsspec.filesystem("memory")
    store.put(f"{made()}/", f"{url}/", recursive=True)
    store.pipe_file(f"{url}/{SHARD}.tfrecord", bytes(1 << 20))

    (problem,) = verify(url).problems

    assert (
        problem.startswith(f"{SHARD}.tfrecord: it has more than ") and "as no shard has; the manifest says" in problem
    )


def test_sample_is_made_again(source, bucket):
    """As for a folder."""
    job = bucket.job(source)
    job.run(progress=False)

    assert job.verify(sample=1.0).ok


# ---------------------------------------------------------------- status


class Failing(small_pairs.Pairs):
    """Fails at a row of the second shard, unless a file is there."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def read(self, row):
        if row.key == "val003" and not os.path.exists(self.path):
            raise ValueError("no such luck")
        return super().read(row)

    def __getstate__(self):
        return {"path": self.path}


def test_status_of_a_finished_output(source, bucket):
    """It is read from the store alone; a JOB is compared on a machine that never made it."""
    bucket.job(source).run(progress=False)

    status = read_status(bucket.url, storage_options=bucket.options)
    compared = bucket.job(source, "another").status()

    assert (status.state, status.output, status.note) == ("complete", bucket.url, "")
    assert (status.done.num_shards, status.done.num_records) == (4, 24)
    assert "run_finished" in str(status)
    assert (compared.changes, compared.obsolete) == ((), ())
    assert "up to date with source, writer and options" in str(compared)
    bucket.flip("manifest.json")
    assert read_status(bucket.url, storage_options=bucket.options).state == "damaged"
    assert bucket.job(source, "third").status().state == "damaged"


def test_status_of_an_output_that_failed(source, bucket):
    """What is done, of how much, who made it, and what failed; then it is finished, and nothing is left of the plan."""
    luck = bucket.tmp_path / "luck"
    with pytest.raises(SampleError):
        bucket.job(source, writer=Failing(str(luck))).run(progress=False)

    status = read_status(bucket.url, storage_options=bucket.options)
    compared = bucket.job(source, "another", writer=Failing(str(luck))).status()

    assert (status.state, status.num_shards, status.num_rows) == ("unfinished", 4, 24)
    assert (
        status.done.num_shards
        == sum(name.startswith("run-") and name.endswith(".json") for name in bucket.content()[1]) - 1
    )  # its plan
    assert "no such luck" in str(status) and f"process {os.getpid()}" in str(status)
    assert {change.shard for change in compared.changes} <= {
        f"pairs-{split}-0000{number}-of-00002" for split in ("train", "val") for number in (0, 1)
    }
    luck.touch()
    bucket.job(source, "another", writer=Failing(str(luck))).run(progress=False)
    assert read_status(bucket.url, storage_options=bucket.options).is_complete
    assert not [name for name in bucket.content()[1] if name.startswith("run-")]


def test_status_of_a_store_that_is_being_written(source, bucket):
    """A run that vanished is told by its plan: its ledger came with no end. Shards that replace others count."""
    bucket.job(source).run(progress=False)
    other = {"pid": 7, "host": "elsewhere", "shards": []}
    bucket.write(".datamat/run-00001/plan.json", json.dumps(other).encode())
    manifest = json.loads(bucket.read("manifest.json"))
    entry = {"files": [{**manifest["shards"][0], "fingerprint": "0" * 32}], "objects": {}}
    bucket.write(f".datamat/run-00001/{SHARD}.json", json.dumps(entry).encode())

    status = read_status(bucket.url, storage_options=bucket.options)
    assert status.state == "unfinished"
    assert "process 7 on elsewhere began to write there last; a store does not show" in status.note


def test_status_of_anything_else(bucket):
    """Nothing is there, or something that is not datamat's, or not even a bucket."""
    bucket.store.put("bucket/else/a.txt", b"a")

    found = [read_status(f"s3://bucket{path}", storage_options=bucket.options) for path in ("/sets", "/else", "")]

    assert [status.state for status in found] == ["empty"] * 3
    assert "there is nothing: correct the path or URL, or run the job" in str(found[0])
    assert "it holds a.txt" in str(found[1])
    assert "it holds else/" in str(found[2])
    with pytest.raises(OutputError, match=r"s3://nowhere/out/.* no such bucket"):
        read_status("s3://nowhere/out", storage_options=bucket.options)


# ---------------------------------------------------------------- repair


@pytest.mark.parametrize("scratch", ["scratch", "another"])
def test_repair_brings_back_every_byte(source, bucket, scratch):
    """Of objects that changed, also with all that is said of them kept, were replaced, or are gone: on any machine."""
    job = bucket.job(source)
    job.run(progress=False)
    before, inner = bucket.content()
    for name in (f"{SHARD}.tfrecord", f"{OTHER}.idx", "_index/train.index", "_index/val.keys", "features.json"):
        bucket.flip(name)
    bucket.write("pairs-val-00000-of-00002.tfrecord", b"something else")
    del bucket.store.objects[f"{bucket.root}/pairs-val-00001-of-00002.tfrecord"]
    bucket.write("pairs-val-00002-of-00003.tfrecord", b"of no shard")
    assert not job.verify().ok

    bucket.job(source, scratch).repair(progress=False)

    assert bucket.job(source, scratch).verify().ok
    aside = {"pairs-val-00002-of-00003.tfrecord", "_index-train.index", "_index-val.keys", "features.json"}
    assert bucket.content() == (before, inner | {f"quarantine/foreign/{name}" for name in aside})


@pytest.mark.parametrize("scratch", ["scratch", "another"])
def test_repair_brings_back_a_manifest(source, bucket, scratch):
    """From what it still says; a run refuses, and says so."""
    bucket.job(source).run(progress=False)
    before, inner = bucket.content()
    bucket.flip("manifest.json")
    with pytest.raises(OutputError, match=r"manifest\.json is damaged; call repair\(\)"):
        bucket.job(source, "third").run(progress=False)

    report = bucket.job(source, scratch).repair(progress=False)

    assert report.num_shards_written <= 1  # whose entry cannot be read
    assert bucket.content() == (before, inner)


def test_manifest_that_somebody_deletes_comes_back(source, bucket):
    """From what the machine that wrote it remembers, without a row made again."""
    bucket.job(source).run(progress=False)
    before = bucket.content()
    del bucket.store.objects[f"{bucket.root}/manifest.json"]

    report = bucket.job(source).run(progress=False)

    assert report.num_shards_written == 0
    assert bucket.content() == before


def test_failed_repair_loses_nothing(source, bucket, tmp_path):
    """The source gives other bytes now: the damaged object stays, and so does the manifest."""
    copied = shutil.copytree(source, tmp_path / "copied")
    job = bucket.job(copied, version="1")
    job.run(progress=False)
    bucket.flip(f"{SHARD}.tfrecord")
    before, _ = bucket.content()
    data = load(bucket.url, "train", cache_dir=tmp_path / "cache", storage_options=bucket.options)
    for row in data.keys():  # noqa: SIM118 -- not a dict
        path = copied / f"train/{row}.png"
        times = path.stat().st_mtime_ns
        size = path.stat().st_size
        image = np.zeros((24, 32, 3), np.uint8)
        path.write_bytes(encode_png(image).ljust(size, b"\0"))
        os.utime(path, ns=(times, times))

    with pytest.raises(OutputError, match="cannot be repaired, because the source no longer gives the bytes"):
        job.repair(progress=False)

    found, inner = bucket.content()
    assert found == before
    assert not [name for name in inner if name.startswith("quarantine/")]


def test_repair_leaves_samples_in_quarantine(source, bucket):
    """Also those of a split of any name."""
    bucket.job(source).run(progress=False)
    bucket.write(".datamat/quarantine/damaged/row/image.png", b"broken")
    before, _ = bucket.content()

    bucket.job(source).repair(progress=False)

    found, inner = bucket.content()
    assert found == before
    assert "quarantine/damaged/row/image.png" in inner


class Damaging:
    """Something that changes a bit of a shard after each run: a broken store."""

    def __init__(self, bucket):
        self.bucket = bucket

    def __call__(self, event):
        """Change a bit."""
        if isinstance(event, RunEnded):
            self.bucket.flip(f"{SHARD}.tfrecord")


def test_store_that_no_repair_mends(source, bucket):
    """What it gives back is not what it was given."""
    job = bucket.job(source, hooks=[Damaging(bucket)])
    job.run(progress=False)

    with pytest.raises(OutputError, match="still so after 4 repairs; test memory, disk and network"):
        job.repair(progress=False)


def test_repair_of_a_changed_job_is_refused(source, bucket):
    """Before anything is touched."""
    bucket.job(source).run(progress=False)
    bucket.flip(f"{SHARD}.tfrecord")
    before, _ = bucket.content()

    with pytest.raises(OutputError, match=f"{bucket.url} cannot be repaired: source or options are not those"):
        bucket.job(source, seed=5, transform=small_pairs.jitter).repair(progress=False)

    assert bucket.content()[0] == before


# ---------------------------------------------------------------- convert, and what only reads


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "to"), [("tfrecord", "parquet"), ("parquet", "tfrecord"), ("webdataset", None)])
def test_conversion_of_a_url_gives_the_bytes_of_a_folder(made, bucket, tmp_path, temporary, name, to):
    """To a folder, and to another URL."""
    bucket.put(made(name))
    options = {"format": to, "shards": None if to else 3, "progress": False, "executor": InlineExecutor()}
    convert(made(name), tmp_path / "wanted", **options)

    convert(bucket.url, tmp_path / "here", storage_options=bucket.options, **options)
    there = "s3://bucket/sets/two"
    convert(bucket.url, there, storage_options=bucket.options, scratch=tmp_path / "scratch", **options)
    for path, stored in bucket.store.objects.items():
        if path.startswith("bucket/sets/two/"):
            fetched = tmp_path / "fetched" / path.removeprefix("bucket/sets/two/")
            fetched.parent.mkdir(parents=True, exist_ok=True)
            fetched.write_bytes(stored.content)

    wanted = small_pairs.digests(tmp_path / "wanted")
    assert small_pairs.digests(tmp_path / "here") == wanted
    assert small_pairs.digests(tmp_path / "fetched") == wanted
    assert not [*temporary.glob("datamat-rows-*")]


def test_damaged_shard_is_not_converted(made, bucket, tmp_path):
    """Whether its format would notice or not."""
    bucket.put(made("parquet"))
    bucket.flip(f"{SHARD}.parquet")

    with pytest.raises((CorruptDataError, SampleError), match=f"{SHARD}.parquet is not what the manifest says"):
        convert(
            bucket.url,
            tmp_path / "here",
            shards=3,
            storage_options=bucket.options,
            progress=False,
            executor=InlineExecutor(),
        )
    assert not (tmp_path / "here/manifest.json").exists()


def test_readers_take_urls(made, bucket, tmp_path):
    """They give what they give of a folder."""
    bucket.put(made())
    more = {"storage_options": bucket.options}

    page = view(bucket.url, count=5, cache_dir=tmp_path / "cache", **more)
    shown, local = describe(bucket.url, **more), describe(made())
    file, local_file = describe(f"{bucket.url}/{SHARD}.tfrecord", **more), describe(made() / f"{SHARD}.tfrecord")

    assert page.num_samples == view(made(), count=5).num_samples
    assert "where the input came from" in page.html or f"{SHARD}.tfrecord" in page.html
    assert (shown.num_records, shown.fields, shown.path) == (local.num_records, local.fields, bucket.url)
    assert (file.num_records, file.records) == (local_file.num_records, local_file.records)


# ---------------------------------------------------------------- the command line


@pytest.fixture
def stored(bucket, made, monkeypatch):
    """The URL of a finished output."""
    bucket.put(made())
    monkeypatch.chdir(bucket.tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(bucket.tmp_path / "caches"))
    return bucket.url


def test_commands_that_read_take_a_url(stored, capsys):
    """Each works with nothing but the URL, and what it writes is called by its last name, here."""
    lines = [
        ["status"],
        ["verify"],
        ["verify", "--deep"],
        ["describe"],
        ["preview", "--count", "2"],
        ["view", "--count", "2"],
    ]

    assert [main([*line, stored]) for line in lines] == [0] * len(lines)
    assert "Traceback" not in (found := capsys.readouterr()).err + found.out
    assert {path.name for path in pathlib.Path().glob("one*")} == {"one-preview.png", "one.html"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["repair", "URL"], "name its JOB instead of the URL"),
        (["export", "URL"], "have no paths on this machine; its run has written them there"),
        (["merge", "URL", "URL", "--output", "out"], "have no paths on this machine; copy the directories to a disk"),
        (["run", "URL"], "is a URL, not a JOB; want MODULE:JOB"),
        (["verify", "URL/nothing"], "holds no manifest.json; correct the path or URL, or finish its run"),
        (["convert", "URL/nothing", "--format", "parquet"], "holds no manifest.json; correct the path or URL"),
        (["convert", "URL", "--shards", "3", "--output", "URL/inside"], "give another output"),
        (["describe", "URL/nothing"], "is not a file of records, and has no manifest.json; correct the path"),
        (["preview", "URL/nothing"], "holds no manifest.json; correct the path or URL"),
        (["verify", "s3://nowhere/out"], "no such bucket"),
        (["verify", "URL", "--sample", "0.5"], "name the JOB instead of the directory"),
        (["verify", "job.toml", "--storage-options", "{}"], "URL; a JOB has its own: give its Materializer"),
    ],
)
def test_what_cannot_be_done_with_a_url_is_said(stored, capsys, source, line, message):
    """In one sentence, with the code of a command that has done nothing."""
    pathlib.Path("job.toml").write_text(f'writer = "camvid"\nsource = "{source}"\noutput = "{stored}"\n')
    line = [word.replace("URL", stored) for word in line]

    assert main(line) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and SECRET not in err


def test_options_come_from_a_file(stored, bucket, capsys):
    """So no secret stands on the command line; wrong ones are reported without it."""
    pathlib.Path("options.json").write_text(json.dumps(bucket.options))

    assert main(["verify", stored, "--storage-options", "options.json"]) == 0
    bucket.flip(f"{SHARD}.tfrecord")
    assert main(["verify", stored, "--storage-options", json.dumps(bucket.options)]) == 1
    out = capsys.readouterr().out
    assert "`datamat repair JOB`" in out and SECRET not in out


def test_python_refuses_the_same(stored, tmp_path):
    """With the remedy."""
    with pytest.raises(OptionError, match=r"export: .* is a URL"):
        export(stored)
    with pytest.raises(OptionError, match=r"merge: .* is a URL"):
        merge([tmp_path, tmp_path], stored)
    with pytest.raises(OptionError, match="storage_options are for URLs"):
        verify(tmp_path, storage_options={})
