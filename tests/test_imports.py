"""What is loaded when: heavy packages cost seconds and hundreds of megabytes, in the caller and in every worker.

Told by the modules that a new process holds afterwards, never by milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("albumentations", "cv2", "pyarrow", "tensorflow", "torch")
NOT_AT_FIRST = (*HEAVY, "dill", "multiprocess", "numpy", "pandas", "pathos", "scipy", "tqdm", "xxhash")


def _loaded_after(code: str, tmp_path) -> set[str]:
    """Return the top-level modules that a new process holds after running `code`."""
    told = code + "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    found = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=50
    )
    assert found.returncode == 0, found.stderr
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_import_of_the_package_loads_nothing_heavy(tmp_path):
    """`import datamat` loads its own module and the standard library only."""
    loaded = _loaded_after("import datamat", tmp_path)

    assert "datamat" in loaded
    assert loaded.isdisjoint(NOT_AT_FIRST)


@pytest.mark.parametrize("name", ["Materializer", "DatasetWriter", "PathosExecutor", "load", "verify", "materialize"])
def test_first_use_of_a_name_loads_nothing_heavy(name, tmp_path):
    """What users begin with is ready before any of the heavy packages is needed."""
    loaded = _loaded_after(f"from datamat import {name}", tmp_path)

    assert loaded.isdisjoint(HEAVY)


def test_parallel_core_needs_nothing_of_data_sets(tmp_path):
    """The executor is usable by itself: it does not even load numpy."""
    loaded = _loaded_after("from datamat import PathosExecutor", tmp_path)

    assert loaded.isdisjoint({*HEAVY, "numpy", "pandas", "scipy"})


RUN = """
import json, sys
import datamat

def item(number):
    import sys
    return {"number": number, "loaded": json.dumps(sorted({name.partition(".")[0] for name in sys.modules}))}

options = datamat.WorkerOptions(num_workers=1, start_method=sys.argv[1])
datamat.materialize(item, range(3), "out", workers=options, progress=False)
print(datamat.load("out")[0]["loaded"])
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_worker_loads_no_tensorflow(start_method, tmp_path):
    """A worker writes TFRecords without TensorFlow: 590 MB and six seconds less for each of them."""
    script = tmp_path / "run.py"
    script.write_text(RUN)

    found = subprocess.run(
        [sys.executable, script, start_method], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=50
    )

    assert found.returncode == 0, found.stderr
    loaded = set(json.loads(found.stdout.splitlines()[-1]))
    assert "datamat" in loaded
    assert loaded.isdisjoint({"albumentations", "cv2", "tensorflow", "torch"})
