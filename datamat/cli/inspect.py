"""`datamat inspect`: what is in a file of records, whoever wrote it."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from datamat.cli.console import NOT_WELL, NOTHING_THERE, OK, say
from datamat.errors import InputError
from datamat.inspection import inspect

if TYPE_CHECKING:
    import argparse

__all__ = ["add_commands"]

_DOES = "tell what is in a TFRecord, Parquet, tar or ArrayRecord file, or in a directory, whoever wrote it"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("inspect", help=_DOES, description=_DOES)
    command.add_argument("file", metavar="FILE", type=pathlib.Path, help="a file of records, or the output of a run")
    command.add_argument("--records", type=int, default=1, metavar="N", help="how many of the first records to show")
    command.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    try:
        found = inspect(options.file, records=options.records)
    except (FileNotFoundError, InputError) as error:
        say(str(error), error=True)
        return NOTHING_THERE
    say(str(found))
    return OK if found.ok else NOT_WELL
