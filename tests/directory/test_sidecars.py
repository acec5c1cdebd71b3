"""Files beside the shards for other readers: their bytes, who owns them, and when they are written and removed."""

import errno
import functools
import json
import os
import shutil

import pytest
import small_pairs
from naming import observe_names

from datamat import Manifest, OptionError, OutputError, OutputLockedError, ShardOptions, verify
from datamat.cli import main
from datamat.directory.files import locked
from datamat.directory.sidecars import FromShard
from datamat.directory.sidecars.exporting import export, sidecar_names

TABLES = {
    "tfrecord": {"dataset_info.json", "features.json", "mask.labels.txt"},
    "tfrecord.gz": set(),
    "parquet": {"index.json"},
    "webdataset": {
        "pairs-train.json",
        "pairs-val.json",
        *(f"pairs-{split}-0000{number}-of-00002.tar.idx" for split in ("train", "val") for number in (0, 1)),
    },
}
DOCUMENTS = {"README.md", "croissant.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small set of pairs."""
    return small_pairs.make_pairs(tmp_path_factory.mktemp("source"), 8, 4)


def job(source, output, *, name="tfrecord", num_shards=2, **options):
    """Return a job over the pairs."""
    return small_pairs.job(source, output, format=name, shards=ShardOptions(num_shards=num_shards), **options)


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Give a function that returns the finished directory of a format, made once."""

    @functools.cache
    def made(name):
        output = tmp_path_factory.mktemp("made") / "out"
        job(source, output, name=name).run(progress=False)
        return output

    return made


@pytest.fixture
def output(made, tmp_path):
    """A TFRecord directory that a test may change."""
    return shutil.copytree(made("tfrecord"), tmp_path / "out")


def sidecar_files(folder):
    """Return name and content of each file beside shards, offsets and manifest."""
    manifest = Manifest.read(folder)
    own = {"manifest.json", *(name for shard in manifest.shards for name in (shard.file, shard.index_file))}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in own}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TABLES)
def test_run_writes_what_the_readers_of_its_format_need(made, name):
    """It writes no other file, and `verify` knows them all."""
    assert set(sidecar_files(made(name))) == TABLES[name] | DOCUMENTS
    assert verify(made(name)).ok


@pytest.mark.parametrize("name", TABLES)
def test_export_restores_what_was_deleted(made, tmp_path, name):
    """Files come back byte for byte, without the work folder of the run."""
    whole = small_pairs.digests(made(name))
    output = shutil.copytree(made(name), tmp_path / "out", ignore=shutil.ignore_patterns(".datamat"))
    for file in sidecar_files(output):
        (output / file).unlink()

    report = export(output)

    assert set(report.written) == TABLES[name] | DOCUMENTS and not report.unchanged
    assert small_pairs.digests(output) == whole
    assert export(output).written == () and set(export(output).unchanged) == TABLES[name] | DOCUMENTS
    assert sorted(path.name for path in (output / ".datamat").iterdir()) == ["lock", "sidecars.json"]


@pytest.mark.parametrize("name", ["tfrecord", "webdataset"])
def test_sidecars_reveal_neither_machine_nor_time(made, name):
    """They hold no path, host or year of this run."""
    content = b"".join(sidecar_files(made(name)).values())

    for private in (os.fspath(made(name).parent), os.uname().nodename, "2026"):
        assert private.encode() not in content


@pytest.mark.long
def test_run_that_is_killed_before_the_manifest_is_completed_by_the_next(source, made, tmp_path, monkeypatch):
    """The run is killed at every file between the first sidecar and the manifest."""
    whole = small_pairs.digests(made("tfrecord"))
    names = [*sidecar_names(Manifest.read(made("tfrecord"))), "manifest.json"]

    for at in sorted(names):
        output = tmp_path / at
        _fail_at(monkeypatch, output / at)
        with pytest.raises(KeyboardInterrupt):
            job(source, output).run(progress=False)
        monkeypatch.undo()
        assert not (output / at).exists() and not (output / "manifest.json").exists()

        job(source, output).run(progress=False)

        assert small_pairs.digests(output) == whole


def _fail_at(monkeypatch, path):
    """Interrupt the process as it gives a file its name."""

    def interrupted(_, target):
        if target == path:
            raise KeyboardInterrupt

    observe_names(monkeypatch, interrupted)


def test_files_of_a_run_that_was_killed_do_not_outlive_other_options(source, output, monkeypatch):
    """Killed among its sidecars, a run in another format leaves files that the next one removes."""
    _fail_at(monkeypatch, output / "pairs-val.json")
    with pytest.raises(KeyboardInterrupt):
        job(source, output, name="webdataset").run(progress=False)
    monkeypatch.undo()
    assert (output / "pairs-train.json").exists()

    job(source, output, name="parquet").run(progress=False)

    assert set(sidecar_files(output)) == TABLES["parquet"] | DOCUMENTS
    assert b"parquet" in (output / "README.md").read_bytes()
    assert verify(output).ok


@pytest.mark.parametrize("name", ["parquet", "webdataset", "tfrecord.gz"])
def test_other_options_replace_sidecars(source, made, output, name):
    """Files for readers of the earlier format are gone, and the card describes the present one."""
    job(source, output, name=name).run(progress=False)

    assert sidecar_files(output) == sidecar_files(made(name))


def test_sidecars_are_gone_while_shards_are_replaced(source, output, monkeypatch):
    """No reader finds counts of shards that no longer exist."""
    _fail_at(monkeypatch, output / "pairs-val-00000-of-00001.tfrecord")

    with pytest.raises(KeyboardInterrupt):
        job(source, output, num_shards=1).run(progress=False)

    assert [path.name for path in output.iterdir() if path.suffix in {".json", ".md", ".txt"}] == ["manifest.json"]


def test_run_with_nothing_to_do_writes_what_is_missing(source, made, output):
    """It touches no other file."""
    (output / "features.json").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in output.iterdir() if path.is_file()}

    job(source, output).run(progress=False)

    assert small_pairs.digests(output) == small_pairs.digests(made("tfrecord"))
    assert {name: (output / name).stat().st_mtime_ns for name in before} == before


MINE = TABLES["tfrecord"] | DOCUMENTS


def put_mine(output):
    """Write files of the user under all names that datamat gives its own."""
    output.mkdir(exist_ok=True)
    for name in MINE:
        (output / name).write_text("mine")


def test_files_of_the_user_are_left_alone(source, tmp_path, caplog):
    """First and later runs in any format, export and repair leave them; `verify` has no complaint."""
    output = tmp_path / "out"
    put_mine(output)

    job(source, output).run(progress=False)
    assert all(f"{output / name}: left alone" in caplog.text for name in TABLES["tfrecord"])
    for options in ({"seed": 1}, {"name": "parquet"}, {"num_shards": 1}):
        job(source, output, **options).run(progress=False)
    report = export(output)
    job(source, output, num_shards=1).repair(progress=False)

    assert {name: (output / name).read_text() for name in MINE} == dict.fromkeys(MINE, "mine")
    assert set(report.kept) == MINE and "README.md: left alone" in str(report)
    assert verify(output).ok
    (output / "features.json").unlink()
    assert export(output).written == ("features.json",)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_shards": 1}, {"name": "parquet"}], ids=str)
def test_file_of_the_user_is_left_alone_where_nothing_records_its_owner(source, output, options):
    """Somebody deleted `.datamat`: such a file was once moved away, and datamat's own written in its place."""
    shutil.rmtree(output / ".datamat")
    put_mine(output)

    job(source, output, **options).run(progress=False)

    assert {name: (output / name).read_text() for name in MINE} == dict.fromkeys(MINE, "mine")
    assert verify(output).ok and not (output / ".datamat" / "quarantine").exists()


def test_sidecar_of_unknown_origin_is_set_aside(made, tmp_path, capsys):
    """Export of an output that was copied without `.datamat` deletes nothing that somebody may have written."""
    output = shutil.copytree(made("tfrecord"), tmp_path / "out", ignore=shutil.ignore_patterns(".datamat"))
    (output / "features.json").write_text("mine")

    assert main(["export", str(output)]) == 0

    assert (output / ".datamat" / "quarantine" / "edited" / "features.json").read_text() == "mine"
    assert "features.json: had been changed; the changed file is in" in capsys.readouterr().out


def test_changed_file_for_programs_is_set_aside(source, output, caplog):
    """The next run that replaces it says where it is: readers would fail on its old counts."""
    edited = (output / "dataset_info.json").read_text().replace('"1.0.0"', '"1.0.1"')
    (output / "dataset_info.json").write_text(edited)

    job(source, output, num_shards=1).run(progress=False)

    aside = output / ".datamat" / "quarantine" / "edited" / "dataset_info.json"
    assert aside.read_text() == edited
    assert f"the changed file is {aside}" in caplog.text
    assert verify(output).ok


def test_document_that_the_user_changed_is_left_alone(source, output):
    """A license that was added survives another run; once the file is removed, datamat writes its own again."""
    card = output / "README.md"
    card.write_text(card.read_text().replace("---\n", "---\nlicense: mit\n", 1))

    job(source, output, num_shards=1).run(progress=False)

    assert "license: mit" in card.read_text()
    card.unlink()
    assert export(output).written == ("README.md",)
    assert "license" not in card.read_text()


def test_read_error_is_not_taken_for_a_document_of_the_user(source, made, tmp_path, monkeypatch):
    """The run would succeed without its own document; it fails instead, and the next run writes it."""
    output = tmp_path / "out"
    open_file = os.open

    def failing(path, *args, **options):
        if path == output / "README.md":
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return open_file(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OutputError, match=r"README\.md"):
        job(source, output).run(progress=False)
    monkeypatch.undo()
    job(source, output).run(progress=False)

    assert small_pairs.digests(output) == small_pairs.digests(made("tfrecord"))


def test_damage_to_files_for_programs_is_named_and_repaired(made, output, capsys):
    """`verify` names it; `datamat export` and `datamat repair` restore the file."""
    (output / "mask.labels.txt").write_text("road\nsky\n")

    assert verify(output).files == ("mask.labels.txt",)
    assert main(["export", str(output)]) == 0
    assert "mask.labels.txt: written" in capsys.readouterr().out
    assert small_pairs.digests(output) == small_pairs.digests(made("tfrecord"))

    (output / "features.json").write_text("{}")
    assert main(["repair", str(output)]) == 0
    assert small_pairs.digests(output) == small_pairs.digests(made("tfrecord"))


def test_damaged_index_of_members_is_named_and_repaired(made, tmp_path):
    """It is compared with the shard."""
    output = shutil.copytree(made("webdataset"), tmp_path / "out")
    index = output / "pairs-train-00000-of-00002.tar.idx"
    whole = index.read_bytes()
    index.write_bytes(whole.replace(b"512", b"513", 1))

    assert verify(output).files == (index.name,)
    assert export(output).written == (index.name,)
    assert index.read_bytes() == whole


def test_repair_touches_only_damaged_sidecars(source, made, output):
    """The others are right once a shard is back."""
    before = {name: (output / name).stat().st_mtime_ns for name in sidecar_files(output)}
    (output / "pairs-train-00000-of-00002.tfrecord").write_bytes(b"")

    job(source, output).repair(progress=False)

    assert {name: (output / name).stat().st_mtime_ns for name in sidecar_files(output)} == before
    (output / "dataset_info.json").write_text("{}")
    job(source, output).repair(progress=False)
    assert small_pairs.digests(output) == small_pairs.digests(made("tfrecord"))


def checksums(manifest):
    """List the shards, as a sidecar of a user does."""
    return {"CHECKSUMS": "".join(f"{info.checksum}  {info.file}\n" for info in manifest.all_files).encode()}


def test_sidecar_of_the_user_is_written_by_a_run_and_by_export(source, output):
    """The run has nothing else to do; workers never see the function, which cannot be pickled."""
    alive = (number for number in range(1))

    def unpicklable(manifest):
        return checksums(manifest) if alive else {}

    job(source, output, sidecars=[unpicklable]).run(progress=False)

    wanted = checksums(Manifest.read(output))["CHECKSUMS"]
    assert (output / "CHECKSUMS").read_bytes() == wanted
    assert verify(output).ok
    (output / "CHECKSUMS").unlink()
    assert export(output, sidecars=[checksums]).written == ("CHECKSUMS",)
    assert (output / "CHECKSUMS").read_bytes() == wanted


def test_whole_files_of_an_absent_sidecar_stay(source, output):
    """Export and a run without the function keep files that match the manifest, and change no byte of other files."""
    export(output, sidecars=[checksums])
    before = small_pairs.digests(output)

    assert "CHECKSUMS" not in export(output).unchanged
    job(source, output).run(progress=False)

    assert small_pairs.digests(output) == before and "CHECKSUMS" in before
    assert verify(output).ok


def test_edited_file_of_an_absent_sidecar_is_found_and_set_aside(output, capsys):
    """Verify compares it with the recorded digest; export cannot write it again, and says where the edited one is."""
    export(output, sidecars=[checksums])
    (output / "CHECKSUMS").write_text("edited")

    assert verify(output).files == ("CHECKSUMS",)
    assert main(["repair", str(output)]) == 0
    assert "CHECKSUMS: had been changed" in capsys.readouterr().out

    assert not (output / "CHECKSUMS").exists()
    assert (output / ".datamat" / "quarantine" / "edited" / "CHECKSUMS").read_text() == "edited"
    assert export(output, sidecars=[checksums]).written == ("CHECKSUMS",)


@pytest.mark.parametrize("at_hand", [True, False])
def test_files_of_a_sidecar_go_with_the_shards_that_they_describe(source, output, at_hand):
    """Another seed gives other shards; without the function, nothing outdated stays visible."""
    export(output, sidecars=[checksums])

    job(source, output, seed=1, sidecars=[checksums] if at_hand else []).run(progress=False)

    now = {path.name: path.read_bytes() for path in output.glob("CHECKSUMS")}
    assert now == (checksums(Manifest.read(output)) if at_hand else {})
    assert verify(output).ok


def sizes(manifest):
    """Note the size of each shard, from the file itself."""
    return {f"{info.file}.size": FromShard(info, lambda path: b"%d" % path.stat().st_size) for info in manifest.shards}


def test_file_made_from_a_shard_is_verified_without_its_sidecar(source, output):
    """The digest suffices, in a process that has never seen the function: after an export, and after a run."""
    export(output, sidecars=[sizes])
    name = "pairs-train-00001-of-00002.tfrecord.size"
    shards = Manifest.read(output).shards
    assert {info.file: (output / f"{info.file}.size").read_text() for info in shards} == {
        info.file: str(info.num_bytes) for info in shards
    }
    assert verify(output).ok
    (output / name).write_text("1")

    assert verify(output).files == (name,)
    job(source, output, sidecars=[sizes]).run(progress=False)

    assert verify(output).ok
    assert (output / ".datamat" / "quarantine" / "edited" / name).read_text() == "1"
    (output / name).write_text("2")
    assert verify(output).files == (name,)
    assert export(output).edited == (name,)
    assert verify(output).ok


@pytest.mark.parametrize("before", [False, True])
def test_interrupted_writing_of_files_made_from_shards_raises_no_false_alarm(output, before):
    """Right files without a recorded digest are neither damaged nor set aside; the next export records them."""

    def failing(manifest):
        """Another version of `sizes`, which fails at its second file."""

        def fail(path):
            raise OSError("the disk is full")

        files = [FromShard(info, lambda path: b"bytes") for info in manifest.shards]
        files[1] = FromShard(files[1].shard, fail)
        return dict(zip(sizes(manifest), files, strict=True))

    if before:
        export(output, sidecars=[sizes])
    with pytest.raises(OSError, match="the disk is full"):
        export(output, sidecars=[failing])

    assert verify(output).ok
    assert export(output).edited == ()
    assert export(output, sidecars=[sizes]).edited == ()
    assert verify(output).ok
    assert export(output, sidecars=[sizes]).written == ()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a/b": b""}, "plain name"),
        ({"..": b""}, "plain name"),
        ({".hidden": b""}, "plain name"),
        ({7: b""}, "plain name"),
        ({"manifest.json": b""}, "belongs to datamat"),
        ({"README.md": b""}, "belongs to datamat"),
        ({"pairs-train-00000-of-00002.idx": b""}, "belongs to datamat"),
        ({"more.tfrecord": b""}, "extension of a shard"),
        ({"a.txt": "text"}, "want bytes"),
    ],
)
def test_sidecar_with_a_file_that_it_cannot_own_is_refused(output, files, reason):
    """The error comes before anything is written, and names the function."""
    before = small_pairs.digests(output)

    def mine(manifest):
        return files

    with pytest.raises(OptionError, match=rf"sidecar .*mine.*{reason}"):
        export(output, sidecars=[mine])
    assert small_pairs.digests(output) == before


def test_sidecar_that_fails_costs_no_shard(source, tmp_path):
    """The error names the sidecar; the next run has only the small files left to write."""
    output = tmp_path / "out"

    def broken(manifest):
        raise ZeroDivisionError("in my code")

    with pytest.raises(ZeroDivisionError) as caught:
        job(source, output, sidecars=[broken]).run(progress=False)
    assert "broken" in caught.value.__notes__[0]

    report = job(source, output, sidecars=[checksums]).run(progress=False)

    assert report.num_shards_written == 0 and report.is_complete
    assert verify(output).ok and (output / "CHECKSUMS").exists()


def test_sidecars_that_cannot_be_called_are_refused(source, tmp_path):
    """They are refused when the job is made, not at its end."""
    with pytest.raises(OptionError, match="sidecars holds 'checksums'"):
        job(source, tmp_path / "out", sidecars=["checksums"])


def test_directory_that_is_being_written_is_not_exported(output):
    """Two writers would be at work; and nothing is made for one without a manifest."""
    with locked(output / ".datamat/lock"), pytest.raises(OutputLockedError):
        export(output)
    (output / "manifest.json").unlink()
    assert main(["export", str(output)]) == 2


def test_link_is_replaced_and_not_written_through(output, tmp_path):
    """What it leads to does not change."""
    (tmp_path / "victim").write_text("mine")
    (output / "features.json").unlink()
    (output / "features.json").symlink_to(tmp_path / "victim")

    export(output)

    assert (tmp_path / "victim").read_text() == "mine"
    assert not (output / "features.json").is_symlink()


def test_tfds_gets_counts_names_and_types(made):
    """Counts of each shard in order, and the fields as they are stored."""
    info = json.loads((made("tfrecord") / "dataset_info.json").read_text())
    features = json.loads((made("tfrecord") / "features.json").read_text())["content"]["features"]

    counts = {split["name"]: [int(count) for count in split["shardLengths"]] for split in info["splits"]}
    assert counts == {
        split: [shard.num_records for shard in shards]
        for split, shards in Manifest.read(made("tfrecord")).splits.items()
    }
    assert (info["name"], info["fileFormat"]) == ("pairs", "tfrecord")
    assert features["image"]["image"]["shape"]["dimensions"] == ["24", "32", "3"]
    assert features["mask"]["image"]["label"] == {"numClasses": "4"}
    assert (made("tfrecord") / "mask.labels.txt").read_text().splitlines() == list(small_pairs.NAMES)
