"""`datamat status`, `verify` and `repair`: look after the output of a run."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from datamat.cli.console import NOT_WELL, NOTHING_THERE, OK, say
from datamat.interop import export, sidecar_names
from datamat.manifest import MANIFEST_FILE, Manifest
from datamat.repair import repair_offsets
from datamat.status import read_status
from datamat.verification import verify

if TYPE_CHECKING:
    import argparse

__all__ = ["add_commands"]

_IN_PYTHON = "the rest is made from the source: in Python, give Materializer the arguments of the run and call repair()"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    for name, does, run in (
        ("status", "tell how far a directory is, while its run is alive or after it crashed", _status),
        ("verify", "compare a finished directory with its manifest: every file and every record", _verify),
        ("repair", "write damaged offsets and sidecars anew, and tell how the rest is repaired", _repair),
    ):
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument("directory", metavar="DIR", type=pathlib.Path, help="the output of a run")
        command.set_defaults(run=run)
        if name == "verify":
            command.add_argument("--deep", action="store_true", help="decode every record, pixels included")


def _status(options: argparse.Namespace) -> int:
    status = read_status(options.directory)
    say(str(status))
    if status.state == "empty":
        return NOTHING_THERE
    return OK if status.state in {"complete", "running"} else NOT_WELL


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.directory, options.deep)
    say(str(report))
    return OK if report.ok else NOT_WELL


def _repair(options: argparse.Namespace) -> int:
    report = verify(options.directory)
    if not report.ok and MANIFEST_FILE not in report.files:
        for name in sorted(repair_offsets(options.directory, set(report.files))):
            say(f"{name}: written anew from its shard")
        report = verify(options.directory)
        if not report.ok and set(report.files) <= sidecar_names(Manifest.read(options.directory)):
            say(str(export(options.directory)))
            report = verify(options.directory)
    say(str(report))
    if not report.ok:
        say(_IN_PYTHON)
    return OK if report.ok else NOT_WELL
