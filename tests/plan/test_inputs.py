"""Input files: which ones count, and how a run notices a change of one."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import small_pairs

from datamat import (
    DatasetWriter,
    Features,
    Index,
    IndexRow,
    SampleError,
    Scalar,
    ShardOptions,
    SourceError,
    Text,
    WorkerOptions,
    load,
    materialize,
    verify,
)
from datamat.codecs import read_file
from datamat.sources.writing import write_rows
from datamat.testing import InlineExecutor

NUM_FILES = 24
HERE = {"executor": InlineExecutor(), "progress": False}


class Numbers(DatasetWriter):
    """A file of digits for each row, read as anyone reads a file."""

    name = "numbers"
    features = Features({"number": Scalar("int64")})

    def index(self, source):
        return Index.from_folder(source, field="file")

    def read(self, row):
        return {"number": int(pathlib.Path(row.fields["file"]).read_text())}


class Counted(Numbers):
    """Reads with datamat's own function."""

    def read(self, row):
        return {"number": int(read_file(row.fields["file"]))}


class Given(DatasetWriter):
    """Its rows are given; a record holds the text of all files of its row, and the values of its fields."""

    name = "given"
    features = Features({"text": Text(), "fields": Text()})

    def __init__(self, rows):
        self.rows = rows

    def index(self, source):
        return self.rows

    def read(self, row):
        paths = [*sorted(str(value) for value in row.fields.values() if _is_path(value)), *row.files]
        return {"text": "".join(map(_content, paths)), "fields": repr(dict(row.fields))}


def _is_path(value):
    return isinstance(value, (str, os.PathLike)) and os.path.isabs(value) and os.path.exists(value)


def _content(path):
    path = pathlib.Path(path)
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    return "".join(file.read_text() for file in files)


@pytest.fixture
def source(tmp_path):
    """A folder of two dozen files of four digits."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(NUM_FILES):
        (folder / f"{number:03d}.txt").write_text(str(1000 + number))
        os.utime(folder / f"{number:03d}.txt", (1, 1))
    return folder


def job(source, output, writer=Numbers, **shards):
    return small_pairs.job(source, output, writer, shards=ShardOptions(**{"num_shards": 3, **shards}))


def run(source, output, writer=Numbers, **options):
    """Run; return how many shards were written, after a check that `status` announced them."""
    wanted = job(source, output, writer, **options).status().changes
    report = job(source, output, writer, **options).run(progress=False)
    assert report.num_shards_written == len(wanted)
    assert verify(output).ok
    return report.num_shards_written


def touch(folder, time_s=99):
    for path in folder.rglob("*"):
        os.utime(path, (time_s, time_s))


# ------------------------------------------------------------ other times, same content


def test_new_times_alone_rebuild_nothing(source, tmp_path, monkeypatch):
    """The finished directory does not change by a byte, and the next run does not read the files again."""
    run(source, tmp_path / "out")
    before = small_pairs.digests(tmp_path / "out")

    touch(source)
    assert run(source, tmp_path / "out") == 0
    monkeypatch.setattr("datamat.plan.inputs.digest_files", None)

    assert run(source, tmp_path / "out") == 0
    assert small_pairs.digests(tmp_path / "out") == before


@pytest.mark.parametrize("how", ["git", "without .datamat"])
def test_a_copy_of_the_project_rebuilds_nothing(source, tmp_path, how):
    """In a fresh clone or on another machine, every file has a new time."""
    project = tmp_path / "project"
    shutil.copytree(source, project / "source")
    run(project / "source", project / "out")
    before = small_pairs.digests(project / "out")
    other = tmp_path / "other"

    if how == "git":
        git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "all"]):
            subprocess.run([*git, *command], cwd=project, check=True)
        subprocess.run(["git", "clone", "-q", str(project), str(other)], check=True)
    else:
        shutil.copytree(project, other, copy_function=shutil.copyfile)
        shutil.rmtree(other / "out" / ".datamat")

    assert run(other / "source", other / "out") == 0
    assert small_pairs.digests(other / "out") == before


@pytest.mark.parametrize("reads", [Numbers, Counted], ids=["as anyone", "with read_file"])
def test_content_that_changed_rebuilds_its_shard(source, tmp_path, reads):
    """The size is the same, and the times of all files are new; `status` names the row."""
    run(source, tmp_path / "out", reads)
    (source / "007.txt").write_text("7007")
    touch(source)

    (change,) = job(source, tmp_path / "out", reads).status().changes

    assert change.reasons == ("row 007 changed on disk",)
    assert run(source, tmp_path / "out", reads) == 1
    assert load(tmp_path / "out")["007"]["number"] == 7007


class Stopping(Numbers):
    """Fails at a row for as long as a file is there."""

    def __init__(self, gate, key):
        self.gate, self.key = str(gate), key

    def read(self, row):
        if row.key == self.key and os.path.exists(self.gate):
            raise OSError("not now")
        return super().read(row)


def stopped(source, output, gate):
    """Leave a run in which one row failed, with the other parts done; return the writer."""
    gate.touch()
    writer = Stopping(gate, "020")
    with pytest.raises(SampleError, match="not now"):
        job(source, output, writer).run(progress=False)
    gate.unlink()
    return writer


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["copy", "rows deleted"])
def test_parts_of_an_unfinished_run_are_reused(source, tmp_path, how):
    """New times, a copied project or deleted rows change nothing: the bytes are those of an undisturbed run."""
    writer = stopped(source, tmp_path / "out", tmp_path / "gate")
    num_parts = len(list((tmp_path / "out" / ".datamat" / "parts").rglob("*.receipt")))
    output = tmp_path / "out"
    if how == "copy":
        output = shutil.copytree(output, tmp_path / "other", copy_function=shutil.copyfile)
        source = shutil.copytree(source, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    else:
        shutil.rmtree(output / ".datamat" / "rows")
        touch(source)

    report = job(source, output, writer).run(progress=False)

    assert report.num_parts_resumed >= num_parts > 3
    job(source, tmp_path / "reference", writer).run(progress=False)
    assert small_pairs.digests(output) == small_pairs.digests(tmp_path / "reference")


def test_parts_of_files_that_changed_are_made_again(source, tmp_path):
    """The others are reused."""
    writer = stopped(source, tmp_path / "out", tmp_path / "gate")
    done = {path.parent.name for path in (tmp_path / "out" / ".datamat" / "parts").rglob("*.receipt")}
    for path in source.iterdir():
        path.write_text(path.read_text().replace("1", "3"))

    report = job(source, tmp_path / "out", writer).run(progress=False)

    assert done
    assert report.num_parts_resumed == 0
    assert {sample["number"] // 1000 for sample in load(tmp_path / "out")} == {3}


class Rewriting(Numbers):
    """Rewrites its file while it reads, a given number of times."""

    def __init__(self, count, folder):
        self.count, self.folder = count, str(folder)

    def read(self, row):
        sample = super().read(row)
        mark = pathlib.Path(self.folder, row.key)
        seen = len(mark.read_text()) if mark.exists() else 0
        if row.key == "007" and seen < self.count:
            mark.write_text("x" * (seen + 1))
            pathlib.Path(row.fields["file"]).write_text(str(7001 + seen))
        return sample


def test_a_file_that_changes_while_it_is_read_is_read_again(source, tmp_path):
    """The record has the final content, and the next run has nothing to do; one that always changes is a bad sample."""
    (tmp_path / "marks").mkdir()
    writer = Rewriting(1, tmp_path / "marks")

    job(source, tmp_path / "out", writer).run(progress=False)

    assert load(tmp_path / "out")["007"]["number"] == 7001
    assert job(source, tmp_path / "out", writer).run(progress=False).did_nothing
    with pytest.raises(SampleError, match=r"'007'.*changed each time that it was read"):
        job(source, tmp_path / "other", Rewriting(99, tmp_path / "marks")).run(progress=False)


# ------------------------------------------------------------ identity by content


def test_content_alone_decides_where_asked(source, tmp_path):
    """Edits that keep size and time are seen, and the same files give the same directory wherever they are."""
    run(source, tmp_path / "out", identity="content")
    copy = tmp_path / "copy"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    run(copy, tmp_path / "other", identity="content")
    assert small_pairs.digests(tmp_path / "out") == small_pairs.digests(tmp_path / "other")

    (source / "007.txt").write_text("7007")
    os.utime(source / "007.txt", (1, 1))

    assert run(source, tmp_path / "out", identity="content") == 1
    touch(source)
    assert run(source, tmp_path / "out", identity="content") == 0


# ------------------------------------------------------------ which files count


def rebuilt_by(tmp_path, source, rows, path, **options):
    """Return how many of three shards a change of one file rebuilds."""
    writer = Given(rows)
    run(source, tmp_path / "out", writer, **options)
    path.write_text("changed")
    return run(source, tmp_path / "out", writer, **options)


@pytest.mark.parametrize(("given", "rest"), [("", 15), (None, 15), ("none", 22)])
def test_a_field_whose_first_rows_are_blank_holds_files(source, tmp_path, given, rest):
    """The few values that are files count, and can be opened; blanks and words reach `read` unchanged."""
    rows = [IndexRow(f"{n:03d}", fields={"file": f"{n:03d}.txt" if n > rest else given}) for n in range(NUM_FILES)]

    assert rebuilt_by(tmp_path, source, rows, source / "023.txt") == 1
    samples = {sample["key"]: sample for sample in load(tmp_path / "out")}
    assert samples["003"]["fields"] == repr({"file": given})
    assert samples["023"]["text"] == "changed"


@pytest.mark.parametrize("as_path", [pathlib.Path, lambda path: [path]])
def test_a_folder_counts_with_all_its_files(source, tmp_path, as_path):
    """Files count at any depth; hidden files and pipes do not. New times alone rebuild nothing."""
    for number in range(12):
        folder = tmp_path / "volumes" / f"v{number:02d}" / "deep"
        folder.mkdir(parents=True)
        (folder / "slice.txt").write_text(f"{number}")
        (folder.parent / "other.txt").write_text(f"{number}")
    os.mkfifo(tmp_path / "volumes" / "v03" / "pipe")
    rows = [IndexRow(f"{n}", fields={"volume": as_path(tmp_path / "volumes" / f"v{n:02d}")}) for n in range(12)]

    assert rebuilt_by(tmp_path, source, rows, tmp_path / "volumes" / "v03" / "deep" / "slice.txt") == 1
    (tmp_path / "volumes" / "v05" / "new.txt").write_text("new")
    assert run(source, tmp_path / "out", Given(rows)) == 1
    (tmp_path / "volumes" / "v05" / ".hidden.txt").write_text("hidden")
    touch(tmp_path / "volumes")
    assert run(source, tmp_path / "out", Given(rows)) == 0


TEXTS = {"text": str, "list": lambda path: [str(path)], "dict": lambda path: {"dir": str(path)}}
PATHS = {"path": pathlib.Path, "paths": lambda path: (path,), "path in a dict": lambda path: {"dir": path}}


@pytest.mark.parametrize(
    ("shape", "place", "options", "rebuilt"),
    [
        *((shape, "elsewhere", {}, 0) for shape in TEXTS),
        *((shape, "source/inner", {}, 1) for shape in TEXTS),
        *((shape, "source", {}, 0) for shape in TEXTS),
        ("text", "elsewhere", {"file_fields": ("where",)}, 1),
        *((shape, "elsewhere", {}, 1) for shape in PATHS),
    ],
)
def test_text_names_a_folder_only_in_the_source_or_where_it_is_declared(
    source, tmp_path, shape, place, options, rebuilt
):
    """Other texts that look like paths are texts: nobody means to read /usr/lib whole."""
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("a")
    writer = Given([IndexRow("a", fields={"where": {**TEXTS, **PATHS}[shape](folder)})])
    for name, value in options.items():
        setattr(writer, name, value)
    run(source, tmp_path / "out", writer, num_shards=1)

    (folder / "b.txt").write_text("b")

    assert run(source, tmp_path / "out", writer, num_shards=1) == rebuilt


@pytest.mark.parametrize("shape", [*TEXTS, *PATHS])
def test_folder_among_items_is_a_path(source, tmp_path, shape):
    """Texts that look like one are texts."""
    make = {**TEXTS, **PATHS}[shape]

    def made():
        return materialize(lambda item: {"x": repr(item)}, [make(source)], tmp_path / "out", **HERE).num_shards_written

    assert made() == 1
    (source / "new.txt").write_text("new")
    assert made() == (shape in PATHS)


def test_a_class_name_is_no_folder(source, tmp_path):
    """The folder of a row's file is not its input: neither another file in it nor its name counts."""
    (source / "cat").mkdir()
    for number in range(20):
        (source / "cat" / f"{number}.txt").write_text("cat")
    rows = [IndexRow(f"{n}", fields={"file": f"cat/{n}.txt", "label": "cat"}) for n in range(20)]
    run(source, tmp_path / "out", Given(rows))

    (source / "cat" / "new.txt").write_text("new")

    assert run(source, tmp_path / "out", Given(rows)) == 0
    assert load(tmp_path / "out")["7"]["fields"].endswith("'label': 'cat'}")


def test_further_files_of_a_row_count(source, tmp_path):
    """They reach `read` as paths that can be opened; a missing one is named with its row, and one path is no list."""
    rows = [IndexRow(f"{n}", fields={"n": n}, files=[f"{n:03d}.txt", source / f"{n + 1:03d}.txt"]) for n in range(20)]

    assert rebuilt_by(tmp_path, source, rows, source / "000.txt") == 1
    assert load(tmp_path / "out")["0"]["text"] == "changed1001"
    found = job(source, tmp_path / "out", Given(rows)).provenance("0").sources
    assert found == {"files.0": str(source / "000.txt"), "files.1": str(source / "001.txt")}
    for files, message in ((["no.txt"], "'no.txt': no such file"), ("no.txt", "is 'no.txt'; want a list of paths")):
        with pytest.raises(SourceError, match=rf"l:3: files:? {message}"):
            job(source, tmp_path / "out", Given([IndexRow("a", origin="l:3", files=files)])).plan()


class Globbing(DatasetWriter):
    """Lists its source as most people do, and reads each file and one beside it."""

    name = "globbing"
    features = Features({"text": Text()})
    kind = str

    def index(self, source):
        for path in sorted(pathlib.Path(source).glob("0*.txt")):
            yield IndexRow(path.stem, fields={"file": self.kind(path), "all": [(path, 1)]}, files=[path])

    def read(self, row):
        assert all(os.path.isabs(path) for path in (row.fields["file"], row.fields["all"][0][0], *row.files))
        return {"text": pathlib.Path(row.fields["file"]).read_text()}


@pytest.mark.parametrize(("given", "kind"), [("source", str), ("./source/", pathlib.Path), ("nested/../source", str)])
def test_paths_that_start_from_the_working_folder_are_input_files(source, tmp_path, monkeypatch, given, kind):
    """The source is relative, and so are the paths that `glob` finds in it."""
    (tmp_path / "nested").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Globbing, "kind", kind)
    assert run(given, "out", Globbing) == 3

    (source / "003.txt").write_text("changed")

    assert run(given, "out", Globbing) == 1
    assert load("out")["003"]["text"] == "changed"
    assert pathlib.Path("out/_index/train.index").read_bytes().find(b"source/003") == -1


class Refusing(Given):
    """Refuses all samples."""

    def read(self, row):
        if row.key != "good":
            raise ValueError("no")
        return super().read(row)


def test_all_files_of_a_bad_sample_are_kept(source, tmp_path):
    """Files in lists and beside the fields are among them; the error names the first."""
    fields = {"frames": ["000.txt", pathlib.Path("001.txt")], "box": (1, 2), "where": pathlib.Path("x")}
    rows = [IndexRow("bad", fields=fields, files=["002.txt"]), IndexRow("good", fields={**fields, "frames": []})]
    writer = Refusing(rows)

    small_pairs.job(source, tmp_path / "out", writer, errors="quarantine").run(progress=False)

    (folder,) = (tmp_path / "out" / ".datamat" / "quarantine" / "train").iterdir()
    names = {"frames.0-000.txt", "frames.1-001.txt", "files.0-002.txt", "traceback.txt", "sample.json"}
    assert {path.name for path in folder.iterdir()} == names
    kept = json.loads((folder / "sample.json").read_text())
    assert kept["fields"] == {"frames": [str(source / "000.txt"), str(source / "001.txt")], "box": [1, 2], "where": "x"}
    assert str(source / "000.txt") in kept["message"]


class Scaled(Numbers):
    """Reads a file of the whole dataset when a worker begins."""

    files = ("scale.json",)

    def bind(self, source):
        self.scale_file = str(pathlib.Path(source, "scale.json"))

    def index(self, source):
        return [row for row in super().index(source) if row.key != "scale"]

    def setup_worker(self):
        self.scale = int(pathlib.Path(self.scale_file).read_text())

    def read(self, row):
        return {"number": super().read(row)["number"] * self.scale}


def test_a_file_of_the_whole_dataset_rebuilds_all_shards(source, tmp_path):
    """Its content counts; `status` names it, and a missing one is an error."""
    (source / "scale.json").write_text("1")
    run(source, tmp_path / "out", Scaled)
    touch(source)
    assert run(source, tmp_path / "out", Scaled) == 0

    (source / "scale.json").write_text("2")

    changes = job(source, tmp_path / "out", Scaled).status().changes
    assert {change.reasons for change in changes} == {("file scale.json changed",)}
    assert run(source, tmp_path / "out", Scaled) == 3
    (source / "scale.json").unlink()
    with pytest.raises(SourceError, match=r"Scaled.files names 'scale.json': .*No such file"):
        job(source, tmp_path / "out", Scaled).plan()


# ------------------------------------------------------------ items of materialize that are files


def read_item(item):
    """Return the text of the first path in an item."""
    while not isinstance(item, (str, bytes, os.PathLike)):
        item = vars(item) if dataclasses.is_dataclass(item) else item
        item = next(iter(item.values() if isinstance(item, dict) else item))
    return {"text": _content(os.fsdecode(item))}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Paths below a dataclass."""

    files: object
    split: str = "train"


SHAPES = {
    "str": str,
    "path": pathlib.Path,
    "tuple": lambda path: (str(path), 1),
    "dict": lambda path: {"a": [path]},
    "bytes": os.fsencode,
    "set": lambda path: {path},
    "frozen set": lambda path: (frozenset({str(path)}), 2),
    "dataclass": lambda path: Pair((path, 1)),
    "dataclass of text": lambda path: Pair(str(path)),
    "numpy text": lambda path: np.str_(path),
    "array": lambda path: np.array([str(path)]),
    "array of objects": lambda path: {"files": np.array([path, None], object)},
    "array of bytes": lambda path: [np.array([os.fsencode(path)])],
}


@pytest.mark.parametrize(
    ("shape", "where"),
    [*((shape, HERE) for shape in SHAPES), ("path", {"workers": WorkerOptions(num_workers=1)})],
    ids=[*SHAPES, "path in a worker"],
)
def test_an_edited_input_of_materialize_is_noticed(source, tmp_path, monkeypatch, shape, where):
    """Items are paths or hold them; relative ones start from the caller's folder, in workers, too."""
    monkeypatch.chdir(tmp_path)
    items = [SHAPES[shape](pathlib.Path("source", f"{number:03d}.txt")) for number in range(9)]

    def make():
        options = {"shards": ShardOptions(num_shards=3), "progress": False, **where}
        return materialize(read_item, items, tmp_path / "out", **options).num_shards_written

    assert make() == 3
    touch(source)
    assert make() == 0
    (source / "007.txt").write_text("7007")
    assert make() == 1
    assert sorted(sample["text"] for sample in load(tmp_path / "out"))[-1] == "7007"


def test_words_among_items_are_no_folders(source, tmp_path, monkeypatch):
    """Nor is a folder that all items name, or that their files are in; files that the function opens are `files=`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    items = [{"file": str(source / f"{number:03d}.txt"), "root": str(source), "split": "train"} for number in range(9)]

    def make():
        options = {"files": [source / "020.txt"], "shards": ShardOptions(num_shards=3), **HERE}
        return materialize(read_item, items, tmp_path / "out", **options)

    make()
    (source / "new.txt").write_text("new")
    (tmp_path / "train" / "new.txt").write_text("new")
    assert make().did_nothing

    (source / "020.txt").write_text("changed")
    assert make().num_shards_written == 3


# ------------------------------------------------------------ the values that rows may hold

VALUES = {
    "list": [1, 2.5, "x", None, [True]],
    "tuple": (1, ("a", 2)),
    "dict": {"a": [1], "b": (2,)},
    "path": pathlib.Path("some/where"),
    "none or text": None,
    "none or number": None,
    "truth": True,
    "numpy integer": np.int64(7),
    "numpy float": np.float32(0.5),
    "numpy text": np.str_("é"),
    "large": 2**70,
    "nan": float("nan"),
    "floats": (0.1, np.float64(1e300)),
}
OTHERS = {**VALUES, "none or text": "text", "none or number": 3, "large": -1, "nan": 1.5, "tuple": None}


def test_values_reach_read_unchanged(source, tmp_path):
    """They are equal and of the same type, except for numpy's; so are those in the index beside the shards."""
    rows = [IndexRow("a", fields=VALUES), IndexRow("b", fields=OTHERS)]

    run(source, tmp_path / "out", Given(rows), num_shards=1)

    for key, fields in (("a", VALUES), ("b", OTHERS)):
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in fields.items()}
        assert load(tmp_path / "out")[key]["fields"] == repr({**plain, "floats": (0.1, 1e300)})
        found = job(source, tmp_path / "out", Given(rows)).provenance(key).fields
        assert repr(dict(found)) == repr({**plain, "floats": (0.1, 1e300)})


@pytest.mark.parametrize("value", [2**60 + 1, 0.5, None, 2**70])
def test_a_column_may_change_its_kind_late(tmp_path, value):
    """After many rows of integers come a float, an integer that no float holds, and None."""
    rows = [IndexRow(f"{n}", fields={"x": n, "p": None}) for n in range(9_000)]
    (tmp_path / "rows").mkdir()

    late = IndexRow("z", fields={"x": value, "p": pathlib.Path("a")})
    store = write_rows([*rows, late], tmp_path / "rows", source=str(tmp_path))

    found = store.read(np.array([0, 8_999, 9_000]))
    assert [row.fields for row in found] == [{"x": 0, "p": None}, {"x": 8_999, "p": None}, late.fields]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2), r"array\(\[0., 0.\]\) \(ndarray\)"),
        (b"x", r"b'x' \(bytes\)"),
        ([b"x"], r"\[b'x'\], with a value of type bytes in it"),
    ],
)
def test_values_that_no_row_can_hold_are_named(source, tmp_path, value, message):
    """Arrays, bytes and objects."""
    with pytest.raises(SourceError, match=rf"l:1: field 'x' holds {message}"):
        job(source, tmp_path / "out", Given([IndexRow("a", fields={"x": value}, origin="l:1")])).plan()
