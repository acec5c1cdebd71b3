"""Files that workers open and no row declares: they are named once, and no others are."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from datamat.plan.inputs import Neighbourhood

WRITER = """
    import json, pathlib
    from datamat import DatasetWriter, Features, Index, Scalar, Text

    HERE = pathlib.Path(__file__).parent

    class Notes(DatasetWriter):
        name = "notes"
        features = Features({"x": Scalar("int64"), "label": Text(), "side": Text()})

        def index(self, source):
            return Index.from_folder(source, field="file", suffixes=[".txt"])

        def setup_worker(self):
            self.labels = json.loads((HERE / "labels.json").read_text())

        def read(self, row):
            text = pathlib.Path(row.fields["file"]).read_text()
            side = open(row.fields["file"].replace(".txt", ".side").encode()).read()
            (HERE / f"{row.key}.log").write_text("written, not read")
            return {"x": int(text), "label": self.labels["a"], "side": side}
"""

PROGRAM = """
    import sys
    from datamat import Materializer, ShardOptions, WorkerOptions
    from mine.notes import Notes

    if __name__ == "__main__":
        workers = WorkerOptions(num_workers=2, start_method=sys.argv[1])
        shards = ShardOptions(num_shards=2)
        job = Materializer(Notes(), "data", "out", shards=shards)
        print(job.run(workers=workers, progress=False).is_complete)
"""


pytestmark = pytest.mark.timeout(180)  # each test starts several interpreters


@pytest.fixture
def project(tmp_path):
    """Return a folder with a package, a program and a source, as a user's project has them; it becomes current."""
    for folder in ("mine", "data"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "notes.py").write_text(textwrap.dedent(WRITER))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "mine" / "labels.json").write_text('{"a": "tree"}')
    for number in range(8):
        (tmp_path / "data" / f"{number}.txt").write_text(str(number))
        (tmp_path / "data" / f"{number}.side").write_text("left")
    return tmp_path


def said(project, program, *arguments):
    """Run a program and return its standard error."""
    ended = subprocess.run(
        [sys.executable, program, *arguments], cwd=project, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "method", ["forkserver", *(pytest.param(name, marks=pytest.mark.long) for name in ("fork", "spawn"))]
)
def test_undeclared_files_are_named_once(project, method):
    """They are a label map beside the code, and files beside those of the index; no code, no file that is written."""
    warning = said(project, "program.py", method)

    assert warning.count("no row of the index declares") == 1
    assert str(project / "mine" / "labels.json") in warning
    assert ".side" in warning
    assert not any(word in warning for word in (".txt", ".py", ".log", "/out/", ".json.", "site-packages"))
    assert "IndexRow(files=[...])" in warning and "version=" in warning


@pytest.mark.parametrize(
    "files", ["[row.fields['file'].replace('.txt', '.side')]", pytest.param("['.']", marks=pytest.mark.long)]
)
def test_files_that_rows_declare_are_not_named(project, files):
    """Some are listed beside their fields, alone or by their folder; the undeclared label map is still named."""
    notes = project / "mine" / "notes.py"
    index = 'return Index.from_folder(source, field="file", suffixes=[".txt"])'
    text = notes.read_text().replace(index, f"return [row._replace(files={files}) for row in {index[7:]}]")
    notes.write_text(text)

    warning = said(project, "program.py", "fork")

    assert f"opened '{project / 'mine' / 'labels.json'}', which no row" in warning
    assert ".side" not in warning
    notes.write_text(text.replace('    name = "notes"', '    name = "notes"\n    files = (HERE / "labels.json",)'))
    shutil.rmtree(project / "out")
    assert said(project, "program.py", "fork") == ""


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.long) for name in ("forkserver", "spawn"))]
)
def test_warning_covers_files_that_a_function_opens(tmp_path, method):
    """By `open`, memory map, database, program and C code, with relative paths; the transform counts."""
    (tmp_path / "scale.txt").write_text("3")
    (tmp_path / "shift.txt").write_text("4")
    (tmp_path / "mapped.bin").write_bytes(bytes(8))
    (tmp_path / "tool.py").write_text("print(1)")
    sqlite3.connect(tmp_path / "words.db").execute("create table words (word)").connection.close()
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import functools, sqlite3, subprocess, sys
            import numpy as np
            import pyarrow
            from datamat import WorkerOptions, materialize

            @functools.cache
            def held():  # as HDF5 does, it opens its file without Python
                return pyarrow.OSFile("scale.txt")

            def scaled(number):
                words = sqlite3.connect("file:words.db?mode=ro", uri=True)
                words.close()
                started = int(subprocess.check_output([sys.executable, "-S", "tool.py"]))
                assert np.memmap("mapped.bin")[0] + started == 1
                return {"x": number * int(held().read_at(1, 0))}

            def shifted(sample, rng):
                return {"x": sample["x"] + int(open("shift.txt").read())}

            workers = WorkerOptions(num_workers=2, start_method=sys.argv[1])
            materialize(scaled, range(8), "out", transform=shifted, workers=workers, progress=False)
            """
        )
    )

    warning = said(tmp_path, "program.py", method)

    assert warning.count("no row of the index declares") == 1
    named = ("words.db", "tool.py", "mapped.bin", "shift.txt", "scale.txt")
    assert ", ".join(f"'{tmp_path}/{name}'" for name in named) + ", which no row" in warning


def test_only_data_near_source_and_code_counts(tmp_path, monkeypatch):
    """Code, hidden folders, installed packages, system folders and the output do not."""
    monkeypatch.chdir(tmp_path)
    near = Neighbourhood.of(tmp_path / "data", [Neighbourhood.of], without=[str(tmp_path / "data" / "out")])

    counted = ["data/a.txt", "data/deep/b.json", "labels.csv"]
    others = ["data/a.py", "data/.cache/c.bin", "data/out/shard", "data/__pycache__/x", "lib/site-packages/p/d.json"]

    assert all(near.holds(str(tmp_path / name)) for name in counted)
    assert not any(near.holds(str(tmp_path / name)) for name in others)
    assert not any(near.holds(path) for path in ("/etc/hosts", "/proc/self/stat", json.__file__, sys.executable))
    monkeypatch.chdir("/")
    assert Neighbourhood.of(None, [], without=[]).roots == (), "else everything would lie below it"


@pytest.mark.long
def test_process_of_the_user_gets_no_hook(tmp_path):
    """A hook cannot be removed: threads and the caller's own process run without one."""
    program = """
        import concurrent.futures, sys
        hooks = []
        sys.addaudithook(lambda event, args: hooks.append(event) if event == "sys.addaudithook" else None)
        from datamat import materialize
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            materialize(lambda n: {"x": n}, range(4), sys.argv[1], executor=threads, progress=False)
        materialize(lambda n: {"x": n}, range(4), sys.argv[1] + "2", progress=False)
        print(hooks)
    """

    command = [sys.executable, "-c", textwrap.dedent(program), os.fspath(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout == "[]\n"
