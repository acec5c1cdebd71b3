"""`datamat convert`: a finished directory in another format, or in other shards."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from datamat.cli.console import NOT_WELL, OK, say
from datamat.conversion import convert
from datamat.formats import format_names
from datamat.options import WorkerOptions

if TYPE_CHECKING:
    import argparse

__all__ = ["add_commands"]

_DOES = "write a finished directory anew in another format or number of shards, without computing a sample again"
_FORMATS = f"{', '.join(format_names())}; may be given several times; left out, it stays"
_WHERE = "folder of the new directory; DIR-FORMAT, or DIR-N-shards where the format stays, if left out"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("convert", help=_DOES, description=_DOES)
    command.add_argument("directory", metavar="DIR", type=pathlib.Path, help="the output of a run")
    command.add_argument("--format", action="append", metavar="F", help=_FORMATS)
    command.add_argument("--num-shards", type=int, metavar="N", help="in each split; left out, shards stay")
    command.add_argument("--output", metavar="OUT", type=pathlib.Path, help=_WHERE)
    command.add_argument("--num-workers", type=int, metavar="N", help="processes; one per core, if left out")
    command.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    output = options.output or _beside(options.directory, options.format, options.num_shards)
    report = convert(
        options.directory,
        output,
        format=options.format,
        shards=options.num_shards,
        workers=WorkerOptions(num_workers=options.num_workers),
    )
    say(str(output))
    return OK if report.is_complete else NOT_WELL


def _beside(directory: pathlib.Path, formats: list[str] | None, num_shards: int | None) -> pathlib.Path:
    """Return where the new directory goes that the command line names no place for."""
    folder = directory.resolve()
    return folder.with_name("-".join([folder.name, *(formats or [f"{num_shards}-shards"])]))
