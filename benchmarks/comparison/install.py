"""From nothing to the first finished shards: what `pip install` brings for each tool, and how long both take.

    python benchmarks/comparison/install.py                            # all tools of compare.py
    python benchmarks/comparison/install.py --only datamat,webdataset

For each tool: an empty virtual environment, `pip install` of its package, for TFDS of TensorFlow, which it writes with
but leaves to you, and of OpenCV, which the task itself calls, and then the program of `compare.py` on 300 pictures.
datamat is installed from a wheel built from this clone.
The clock of `pip install` depends on the network; compare the processor time, or take the second of two runs.

    packages    distributions in the environment, without pip
    MB          of the environment, without pip
    install     `pip install`: seconds of the clock, and of the processor
    shards      the program, the first one in that environment: the same
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
import venv

from compare import TOOLS, Place

HERE = pathlib.Path(__file__).parent
ALSO = {"tfds": ["tensorflow"]}  # what a program needs and the package of its tool does not bring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="pictures")
    parser.add_argument("--only", default=",".join(TOOLS), help="names of tools, with commas")
    options = parser.parse_args()
    print("| tool | packages | MB | install, s | processor, s | shards, s | processor, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="install-") as folder:
            print(f"| {name} | " + " | ".join(installed(name, pathlib.Path(folder), options.count)) + " |", flush=True)


def installed(name: str, folder: pathlib.Path, count: int) -> list[str]:
    """Return the cells of a tool."""
    wanted = TOOLS[name][0]
    if name == "datamat":
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        subprocess.run([*pip, str(HERE.parents[1])], check=True)
        wanted = str(next(folder.glob("datamat-*.whl")))
    home = folder / "venv"
    venv.create(home, with_pip=True)
    python, (site,) = str(home / "bin/python"), home.glob("lib/python3*/site-packages")
    before = {path.name for path in site.glob("*.dist-info")}, size_of(home)
    pip = timed([python, "-m", "pip", "install", "--quiet", wanted, *ALSO.get(name, []), "opencv-python-headless"])
    packages = len({path.name for path in site.glob("*.dist-info")} - before[0])
    megabytes = (size_of(home) - before[1]) / 1e6
    place = Place(folder, count, python)
    return [str(packages), f"{megabytes:,.0f}", *pip, *(f"{value:.1f}" for value in place.timed(name, "first"))]


def size_of(folder: pathlib.Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def timed(command: list[str]) -> tuple[str, str]:
    """Run a command; return its seconds of the clock, and of the processor."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{time.perf_counter() - start:.1f}", f"{processor:.1f}"


if __name__ == "__main__":
    main()
