"""Paths of `pathlib.glob` that a function opens: one file is edited, one is added; only their shards are made again.

Prints: 60 files, 8 shards / edited: 1 shard made, 60 files / added: 1 made, 61 files / other seed: 0 values differ
Says: will be rebuilt: .*changed
Again: edits its input.
Place: the index names the files of items by their absolute paths.
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import os
import pathlib
import shutil

from datamat import ShardOptions, WorkerOptions, load, materialize

raw = pathlib.Path("raw")
shutil.rmtree(raw, ignore_errors=True)
raw.mkdir()
for i in range(60):
    (raw / f"doc {i:02d}.txt").write_text(f"text of {i}")
    os.utime(raw / f"doc {i:02d}.txt", (1_700_000_000, 1_700_000_000 + i))


def read(path):
    text = path.read_text()
    return {"name": path.name, "text": text, "length": len(text)}


def run(seed=0):
    report = materialize(
        read,
        sorted(raw.glob("*.txt")),
        "out",
        seed=seed,
        existing="replace",  # this program begins again without the file that it adds
        shards=ShardOptions(num_shards=8),
        workers=WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS),
    )
    stored = {sample["name"]: sample["text"] for sample in load("out")}
    assert stored == {path.name: path.read_text() for path in raw.glob("*.txt")}
    return report, len(stored)


# %%
report, count = run()
print(f"{count} files, {report.num_shards_written + report.num_shards_reused} shards")

# %%
(raw / "doc 17.txt").write_text("other words")
os.utime(raw / "doc 17.txt", (1_800_000_000, 1_800_000_000))
report, count = run()
print(f"edited: {report.num_shards_written} shard made, {count} files")

# %%
(raw / "doc 60.txt").write_text("one more")
os.utime(raw / "doc 60.txt", (1_800_000_000, 1_800_000_000))
report, count = run()
print(f"added: {report.num_shards_written} made, {count} files")

# %%
before = {sample["name"]: sample["text"] for sample in load("out")}
run(seed=1)
after = {sample["name"]: sample["text"] for sample in load("out")}
print(f"other seed: {sum(before[name] != after[name] for name in before)} values differ")
