"""What is published works where it is installed: the wheel without the clone, the sdist with its own tests."""

from __future__ import annotations

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import datamat

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
import datamat

assert datamat.__file__.startswith({site!r}), datamat.__file__
report = datamat.materialize(lambda n: {{"square": n * n}}, range(500), "out", progress=False)
assert report.num_records == len(datamat.load("out")) == 500
assert datamat.verify("out").ok
"""


def run(*arguments, folder, **environment) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a wheel and an sdist that were just built."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("built")
    for target in ("wheel", "sdist"):
        run("-m", "hatchling", "build", "--target", target, "--directory", folder, folder=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder into which pip has installed the wheel."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", site]
    run("-m", "pip", "install", *options, wheel, folder=site)
    return site


@pytest.mark.long
@pytest.mark.timeout(200)
def test_wheel_works_without_the_clone(installed, tmp_path):
    """It makes, reads and verifies a dataset, and brings its command and its plug-ins."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(site=str(installed)))

    run(program, folder=tmp_path, PYTHONPATH=str(installed))

    assert "complete" in run(installed / "bin/datamat", "status", "out", folder=tmp_path, PYTHONPATH=str(installed))
    entries = (next(installed.glob("datamat-*.dist-info")) / "entry_points.txt").read_text()
    assert "camvid = datamat.writers.camvid:CamVidWriter" in entries
    assert (installed / "datamat/py.typed").exists()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_wheel_holds_the_package_and_nothing_else(built):
    """Every module of the package is there; tests and examples are not."""
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "datamat").rglob("*.py")}
    assert wanted <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"datamat"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_tests_of_the_sdist_pass_against_the_wheel(built, installed, tmp_path):
    """The sdist holds all that a clone has; a few of its tests run from there, on the installed package."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (clone,) = tmp_path.iterdir()

    for name in ("Makefile", "constraints.txt", "CONTRIBUTING.md", "CITATION.cff", "SECURITY.md", "CHANGELOG.md"):
        assert (clone / name).is_file(), name
    for folder in ("tests", "docs", "examples", "benchmarks"):
        wanted = {
            path.relative_to(ROOT)
            for path in (ROOT / folder).rglob("*.*")
            if path.suffix in {".py", ".md", ".ipynb", ".jpg", ".svg"} and "_build" not in path.parts
        }
        assert {path.relative_to(clone) for path in (clone / folder).rglob("*.*")} >= wanted
    shutil.rmtree(clone / "datamat")
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    said = run(
        *("-m", "pytest", *options, "tests/test_options.py", "tests/formats/test_formats_ustar.py"),
        folder=clone,
        PYTHONPATH=f"{installed}{os.pathsep}{clone / 'tests'}",
    )
    assert re.search(r"\d{2,} passed", said)


def test_release_files_name_one_version():
    """Project, citation, changelog and package say the same."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert datamat.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_metadata_is_what_the_project_says(built):
    """The page of a package index shows the README, whose pictures and links are there."""
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))

    about = email.message_from_bytes(archive.read(name))

    assert about["License-Expression"] == "Apache-2.0"
    assert "make demo" in about.get_payload()
    links = re.findall(r"\]\(((?!https?:|#)[^)]+?)(?:#[^)]*)?\)", about.get_payload())
    assert all((ROOT / link).exists() for link in links), links
