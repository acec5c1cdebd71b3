"""A writer of another package: installed, listed without being imported, used by name."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "plugin_package"

SCRIPT = """
import sys

from datamat.writers.base import writer_names

names = writer_names()
assert "datamat_squares" not in sys.modules, "listing imported it"

from datamat import Materializer, load

Materializer("squares", source="5", output=sys.argv[1]).run(progress=False)
squares = {sample["key"]: int(sample["square"]) for sample in load(sys.argv[1], "train")}
print(",".join(names), sorted(squares.items())[-1])
"""


def install(package: pathlib.Path, target: pathlib.Path) -> None:
    """Install the package as a user would, without network; hatchling is available."""
    uv = shutil.which("uv")
    command = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(target), str(package)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="builds a package with hatchling")
def test_installed_writer_is_found_by_name(tmp_path):
    """An entry point in the group `datamat.writers` is all it takes."""
    shutil.copytree(PACKAGE, tmp_path / "package")
    install(tmp_path / "package", tmp_path / "target")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "target")}

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    names, _, found = done.stdout.partition(" ")
    assert {"camvid", "squares", "table"} <= set(names.split(",")), done.stderr
    assert found == "('004', 16)\n"
