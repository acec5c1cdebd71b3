"""Workers of forkserver and spawn have one hash seed, whatever the caller's: sets of texts have one order in them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from datamat import PathosExecutor, materialize
from datamat.fingerprint import examine
from datamat.run import dispatch
from datamat.testing import InlineExecutor

PROGRAM = """
import os, sys
from datamat import WorkerOptions, load, materialize

NAMES = ["cat", "dog", "bird", "fish", "cow", "hen", "pig"]

def look(n):
    name = NAMES[n % 7]
    found = {"in_set": list(set(NAMES)).index(name), "in_frozenset": list(frozenset(NAMES)).index(name)}
    return found | {"hash": hash(name), "of_bytes": hash(name.encode()), "seen": str(os.environ.get("PYTHONHASHSEED"))}

before = dict(os.environ)
workers = WorkerOptions(num_workers=2, start_method=sys.argv[2])
materialize(look, range(14), sys.argv[1], workers=workers, progress=False)
assert dict(os.environ) == before
records = [dict(record) for record in load(sys.argv[1])]
assert {record.pop("seen") for record in records} == {str(before.get("PYTHONHASHSEED"))}
print([sorted((name, str(value)) for name, value in record.items()) for record in records])
"""


def _labels(folder, method, seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    command = [sys.executable, "-c", PROGRAM, str(folder), method]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=True, timeout=120).stdout


@pytest.mark.parametrize(
    ("method", "seed"),
    [("forkserver", "7"), pytest.param("spawn", None, marks=pytest.mark.long),
     pytest.param("spawn", "7", marks=pytest.mark.long), pytest.param("forkserver", None, marks=pytest.mark.long)],
)  # fmt: skip
def test_hash_seed_is_the_same_in_all_workers(tmp_path, method, seed):
    """Labels by the order of a set are those of another program, with another hash seed."""
    assert _labels(tmp_path / "a", method, seed) == _labels(tmp_path / "b", "forkserver", "8")


NAMES = ["cat", "dog", "bird", "fish"]
MEMBERS = frozenset({"cat", "dog", "cow"})


def by_set(n):
    return {"n": list(set(NAMES)).index(NAMES[n % 4])}


def by_frozenset(n):
    return {"n": [*frozenset(NAMES)].index("cat")}


def by_hash(n):
    return {"n": hash(NAMES[n % 4])}


def by_comprehension(n):
    return {"n": list({name.upper() for name in NAMES}).index("CAT")}


def by_literal(n):
    return {"n": next(place for place, name in enumerate({"a", "b", "c"}) if name == "a")}


def by_global(n):
    return {"n": sorted(enumerate(MEMBERS))[0][1]}


def by_helper(n):
    return by_set(n)


def with_default(n, names=frozenset(NAMES)):
    return {"n": [*names].index("cat")}


class Holder:
    names = frozenset({"cat", "dog"})

    def __init__(self):
        self.others = {"cow", "hen"}


HOLDER, TABLE = Holder(), {"names": {"cat", "dog"}}


def by_attribute(n):
    return {"n": [*HOLDER.others].index("cow")}


def by_class(n):
    return {"n": [*Holder.names].index("cat")}


def by_item(n):
    return {"n": [*TABLE["names"]].index("cat")}


def made():
    names = set(NAMES)
    return lambda n: {"n": [*names].index("cat")}


def by_sorted_set(n):
    return {"n": sorted(set(NAMES)).index("cat") + len({name[0] for name in NAMES}) + max({n, 1, 2})}


def by_membership(n):
    return {"n": int(NAMES[n % 4] in {"cat", "dog"})}


def by_list(n):
    return {"n": NAMES.index(NAMES[n % 4])}


HASHING = [by_set, by_frozenset, by_hash, by_comprehension, by_literal, by_global, by_helper]
HASHING += [with_default, by_attribute, by_class, by_item, made()]


@pytest.mark.parametrize("function", [*HASHING, by_membership, by_list, by_sorted_set])
def test_code_that_depends_on_hashes_is_found(function):
    found = examine(function, where="fn").hashing

    assert bool(found) == (function in HASHING)


def test_code_that_depends_on_hashes_is_not_forked(tmp_path):
    """By default; who asks for fork is warned. A set in which something is looked for does no harm."""
    program = (
        "import sys; from datamat import WorkerOptions, materialize\n"
        "def by_set(n): return {'n': [*{str(n), 'b', 'c'}].index('b')}\n"
        "def looking(n): return {'n': int(str(n) in {'1', '2'})}\n"
        "for function in (by_set, looking):\n"
        "    for method in (None, 'fork'):\n"
        "        workers = WorkerOptions(num_workers=2, start_method=method)\n"
        "        report = materialize(\n"
        "            function, range(40), f'{function.__name__}-{method}', workers=workers, progress=False\n"
        "        )\n"
        "        print(function.__name__, method, report.start_method.partition(':')[0])\n"
    )

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True, cwd=tmp_path)

    assert done.stdout.splitlines() == [
        "by_set None forkserver",
        "by_set fork fork",
        "looking None fork",
        "looking fork fork",
    ]
    assert done.stderr.count("makes a set") == 1 and "leave out 'fork'" in done.stderr


@pytest.mark.parametrize(
    ("make", "warning"),
    [
        (InlineExecutor, "two programs that make the calls themselves have"),
        (lambda: PathosExecutor(1, start_method="fork"), "forks of two programs have"),
        (lambda: PathosExecutor(1, start_method="forkserver"), ""),
        (lambda: ThreadPoolExecutor(1), ""),
    ],
    ids=["inline", "fork", "forkserver", "threads"],
)
def test_executor_whose_calls_hash_as_the_caller_does_is_warned_of(tmp_path, monkeypatch, caplog, make, warning):
    """Others make them in processes with the one hash seed."""
    monkeypatch.setattr(dispatch, "hashes_as_workers_do", lambda: False)
    with make() as executor:
        materialize(by_set, range(8), tmp_path / "out", executor=executor, progress=False)

    assert caplog.text.count("makes a set") == bool(warning)
    assert warning in caplog.text
