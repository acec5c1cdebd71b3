"""`datamat export`: write the files that other readers need beside the shards."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from datamat.cli.console import OK, say
from datamat.interop import export

if TYPE_CHECKING:
    import argparse

__all__ = ["add_commands"]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    does = "write the files that other readers need beside the shards, where they are not as they should be"
    command = commands.add_parser("export", help=does, description=does)
    command.add_argument("directory", metavar="DIR", type=pathlib.Path, help="the output of a run")
    command.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    say(str(export(options.directory)))
    return OK
