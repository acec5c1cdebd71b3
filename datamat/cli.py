"""The command `datamat`: look after directories without writing Python.

    datamat status DIR            how far it is, and what its last run did
    datamat verify DIR [--deep]   compare it with its manifest, byte for byte
    datamat repair DIR            mend what can be mended without the source

EXIT CODES
    0   all is well: the directory is complete, or being written; nothing is damaged, or all of it was mended
    1   it is not: the run stopped before its end, or something is damaged
    2   there is nothing to look at: no such directory, no manifest, or the command line makes no sense
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from datamat.errors import DatamatError, OutputError
from datamat.manifest import MANIFEST_FILE
from datamat.repair import repair_offsets
from datamat.status import read_status
from datamat.text import printable
from datamat.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["main"]

_OK, _NOT_WELL, _NOTHING_THERE = 0, 1, 2
_IN_PYTHON = "the rest is made from the source: in Python, give Materializer the arguments of the run and call repair()"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        arguments: of the command line; None takes those of the process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    folder = pathlib.Path(options.directory)
    if not folder.is_dir():
        return _refuse(f"{folder} is not a directory; give the output of a run")
    commands: dict[str, Callable[[argparse.Namespace, pathlib.Path], int]] = {
        "status": _status,
        "verify": _verify,
        "repair": _repair,
    }
    try:
        return commands[options.command](options, folder)
    except OutputError as error:
        return _refuse(str(error))
    except (DatamatError, OSError) as error:
        _say(str(error), error=True)
        return _NOT_WELL


def _parser() -> argparse.ArgumentParser:
    about, _, codes = (__doc__ or "").partition("EXIT CODES\n")
    parser = argparse.ArgumentParser(
        prog="datamat",
        description=about,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, does in {
        "status": "tell how far a directory is, while its run is alive or after it crashed",
        "verify": "compare a finished directory with its manifest: every file and every record",
        "repair": "write damaged offsets anew, and tell how the rest is repaired",
    }.items():
        command = commands.add_parser(name, help=does, description=does)
        command.add_argument("directory", metavar="DIR", help="the output of a run")
        if name == "verify":
            command.add_argument("--deep", action="store_true", help="decode every record, pixels included")
    return parser


def _status(_: argparse.Namespace, folder: pathlib.Path) -> int:
    status = read_status(folder)
    _say(str(status))
    if status.state == "empty":
        return _NOTHING_THERE
    return _OK if status.state in {"complete", "running"} else _NOT_WELL


def _verify(options: argparse.Namespace, folder: pathlib.Path) -> int:
    report = verify(folder, options.deep)
    _say(str(report))
    return _OK if report.ok else _NOT_WELL


def _repair(_: argparse.Namespace, folder: pathlib.Path) -> int:
    report = verify(folder)
    if not report.ok and MANIFEST_FILE not in report.files:
        for name in sorted(repair_offsets(folder, set(report.files))):
            _say(f"{name}: written anew from its shard")
        report = verify(folder)
    _say(str(report))
    if not report.ok:
        _say(_IN_PYTHON)
    return _OK if report.ok else _NOT_WELL


def _refuse(text: str) -> int:
    _say(text, error=True)
    return _NOTHING_THERE


def _say(text: str, *, error: bool = False) -> None:
    """Print lines, without what a terminal would obey: names of files and messages are text of others."""
    shown = "\n".join(map(printable, text.split("\n")))
    print(f"datamat: {shown}" if error else shown, file=sys.stderr if error else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
