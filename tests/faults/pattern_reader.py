"""A reader by pattern, in a process of its own: `python pattern_reader.py FOLDER PATTERN TABLE`, until its input ends.

It knows nothing of manifests: it lists the files that match the pattern, opens all of them, and lists again. Where the
same files are still there, it has seen the dataset as it was at one moment. TABLE is a JSON file with the digest of
each file in each version of the dataset; files of one moment that no version has together are a mixture.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import pathlib
import select
import sys


def listed(pattern):
    """Return path and inode of each file that matches."""
    found = {}
    for path in sorted(glob.glob(pattern)):
        if path.endswith((".idx", ".offsets")):
            continue
        with contextlib.suppress(FileNotFoundError):
            found[path] = os.stat(path).st_ino
    return found


def seen(pattern):
    """Return the digest of each file, as all were at one moment; None where they changed meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            files = {path: stack.enter_context(open(path, "rb")) for path in listed(pattern)}
        except FileNotFoundError:
            return None
        if {path: os.fstat(file.fileno()).st_ino for path, file in files.items()} != listed(pattern):
            return None
        return {os.path.basename(path): hashlib.sha256(file.read()).hexdigest() for path, file in files.items()}


def main(folder, pattern, table):
    """List the files again and again, and report what was seen."""
    versions = json.loads(pathlib.Path(table).read_text())
    states, mixed, looks = set(), [], 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        found = seen(os.path.join(folder, pattern))
        if found is None:
            continue
        looks += 1
        holding = [name for name, files in versions.items() if found.items() <= files.items()]
        states.add("none" if not found else "+".join(holding))
        if not holding and found not in mixed:
            mixed.append(found)
        if looks == 1:
            print("looking", flush=True)
    print(json.dumps({"looks": looks, "states": sorted(states), "mixed": mixed}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
