"""How long a run takes to its first record in a notebook: from a cell whose imports are done, in a real kernel.

    python benchmarks/notebook.py [--rounds 5]

Each round starts a kernel. Its first cell imports numpy and datamat and defines a writer of 200 small pictures, the
second one runs the job with two workers, and the third one does so again, into another folder. A kernel has threads,
so workers come from a forkserver: the first run starts it, the second one finds it. The first call of `read` writes
down when it was made. Seconds of the clock, the median of all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile

import nbclient
import nbformat

IMPORTS = """
import os, time
import numpy as np
from datamat import DatasetWriter, Features, Image, IndexRow, Materializer, WorkerOptions

class Grey(DatasetWriter):
    name = "grey"
    features = Features({"image": Image((64, 64, 3))})

    def index(self, source):
        return [IndexRow(f"{n:04d}", "train", {"n": n, "note": source}) for n in range(200)]

    def read(self, row):
        try:
            with open(row.fields["note"], "x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            pass
        return {"image": np.full((64, 64, 3), row.fields["n"], np.uint8)}
"""
RUN = """
began = time.time()
note = os.path.abspath("NAME.txt")
Materializer(Grey, note, "NAME").run(workers=2, progress=False)
print(float(open(note).read()) - began, time.time() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="kernels")
    rounds = [measured() for _ in range(parser.parse_args().rounds)]
    print("| run | first record, s | whole run, s |")
    print("| --- | --- | --- |")
    for name, results in zip(("first", "second"), zip(*rounds, strict=True), strict=True):
        print(f"| {name} | " + " | ".join(f"{statistics.median(one):.2f}" for one in zip(*results, strict=True)) + " |")
    print("\nload of the machine:", *(f"{load:.1f}" for load in os.getloadavg()))


def measured() -> list[tuple[float, ...]]:
    """Return seconds to the first record and to the end, for both runs in a new kernel."""
    sources = [IMPORTS, RUN.replace("NAME", "first"), RUN.replace("NAME", "second")]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": folder}}).execute()
    return [tuple(map(float, cell.outputs[0]["text"].split())) for cell in book.cells[1:]]


if __name__ == "__main__":
    main()
