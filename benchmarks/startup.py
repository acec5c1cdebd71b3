"""How long a pool takes to start, beside what the program has imported: ours against the same start methods of others.

    uv run --with loky --with pandas --with tensorflow python benchmarks/startup.py [--rounds 5] [--parents plain,heavy]

Each measurement is a program of its own, as people write them: imports on top, a class, a guard, and a pool of two
workers that makes two calls of a bound method. Three programs: `plain` imports numpy alone, `heavy` imports pandas and
TensorFlow too, which its method does not need, and `needed` imports pandas, which its method uses.

Milliseconds, the best of all rounds: `first` is the time from the pool's constructor to the results, in a new program;
`again` the same for a second pool of that program; `end` what it takes to shut the second one down. Behind each stands
its ratio to the best of the others with the same start method: below 1, ours is faster. loky starts its workers by
fork and exec, which compares with spawn. All are run in turn in each round, so that a busy moment hits all alike, and
with bytecode written, as for packages that are installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

PARENTS = {
    "plain": ("import numpy", "x + self.offset"),
    "heavy": ("import numpy, pandas, tensorflow", "x + self.offset"),
    "needed": ("import numpy, pandas", "int(pandas.Series([x]).sum()) + self.offset"),
}
NEEDS = {"plain": (), "heavy": ("pandas", "tensorflow"), "needed": ("pandas",)}
PROGRAM = """
import json, sys, time
{imports}

class Job:
    def __init__(self):
        self.offset = 1
    def add(self, x):
        return {body}

def measure(make_pool):
    begin = time.perf_counter()
    pool = make_pool()
    assert list(pool.map(Job().add, [1, 2])) == [2, 3]
    ready = time.perf_counter()
    {end}
    return ready - begin, time.perf_counter() - ready

if __name__ == "__main__":
    {setup}
    first, _ = measure(make_pool)
    again, end = measure(make_pool)
    print(json.dumps([first, again, end]))
"""
FUTURES = """import concurrent.futures, multiprocessing
    context = multiprocessing.get_context({method!r})
    make_pool = lambda: concurrent.futures.ProcessPoolExecutor(2, mp_context=context)"""
POOLS = {
    "datamat": (
        "from datamat.parallel import PathosExecutor as P; make_pool = lambda: P(2, start_method={method!r})",
        "pool.shutdown()",
    ),
    "multiprocessing.Pool": (
        "import multiprocessing\n    make_pool = lambda: multiprocessing.get_context({method!r}).Pool(2)",
        "pool.close(); pool.join()",
    ),
    "concurrent.futures": (
        FUTURES,
        "pool.shutdown()",
    ),
    "loky": ("import loky\n    make_pool = lambda: loky.ProcessPoolExecutor(2)", "pool.shutdown()"),
}
CASES = [(name, method) for method in ("fork", "forkserver", "spawn") for name in POOLS
         if name != "loky" or method == "spawn"]  # fmt: skip


def measure(parent: str, pool: str, method: str, folder: Path) -> list[float]:
    """Run one program; return its three times in milliseconds."""
    imports, body = PARENTS[parent]
    setup, end = POOLS[pool]
    path = folder / "program.py"
    path.write_text(PROGRAM.format(imports=imports, body=body, setup=setup.format(method=method), end=end))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False,
                          env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": ""})  # fmt: skip
    if done.returncode:
        sys.exit(f"{pool} by {method} beside {parent}:\n{done.stderr}")
    return [1000 * seconds for seconds in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parents", default=",".join(PARENTS))
    options = parser.parse_args()
    packages = [name for name in ("numpy", "pandas", "tensorflow", "loky") if importlib.util.find_spec(name)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}, {options.rounds} rounds", flush=True
    )
    cases = [case for case in CASES if case[0] != "loky" or "loky" in packages]
    with tempfile.TemporaryDirectory() as folder:
        for parent in options.parents.split(","):
            if missing := set(NEEDS[parent]).difference(packages):
                print(f"{parent}: not run, {', '.join(missing)} is not installed")
                continue
            rounds = [{case: measure(parent, *case, Path(folder)) for case in cases} for _ in range(options.rounds)]
            best = {case: [min(each) for each in zip(*(times[case] for times in rounds), strict=True)]
                    for case in cases}  # fmt: skip
            show(parent, best)


def show(parent: str, best: dict[tuple[str, str], list[float]]) -> None:
    """Print a table: each figure, and for ours its ratio to the best of the others."""
    print(f"\n{parent:8} {'':22} {'first':>14} {'again':>14} {'end':>14}")
    for (name, method), times in best.items():
        peers = [others for (peer, by), others in best.items() if by == method and peer != "datamat"]
        ratios = [mine / min(each) for mine, each in zip(times, zip(*peers, strict=True), strict=True)]
        cells = [f"{mine:7.1f} ({ratio:.2f})" if name == "datamat" else f"{mine:7.1f}       "
                 for mine, ratio in zip(times, ratios, strict=True)]  # fmt: skip
        print(f"{method:10} {name:20}", *cells)


if __name__ == "__main__":
    main()
