"""The command `datamat`: look after directories without writing Python.

    datamat status DIR            how far it is, and what its last run did
    datamat verify DIR [--deep]   compare it with its manifest, byte for byte
    datamat repair DIR            mend what can be mended without the source
    datamat export DIR            write the files that TFDS, Hugging Face and other readers need beside the shards
    datamat convert DIR --format parquet --num-shards 16    write it anew in another format or number of shards
    datamat inspect FILE          tell what is in any TFRecord, Parquet, tar or ArrayRecord file
    datamat serve --workers 4     prepare batches in processes of their own, for to_tf(service=...)

EXIT CODES
    0   all is well: the directory is complete, or being written; nothing is damaged, or all of it was mended
    1   it is not: the run stopped before its end, or something is damaged
    2   there is nothing to look at: no such directory, no manifest, or the command line makes no sense
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from datamat.cli import convert, export, inspect, maintenance, serve
from datamat.cli.console import NOT_WELL, NOTHING_THERE, say
from datamat.errors import DatamatError, OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# Each declares its commands, with the function that runs them as `run`.
_MODULES = (maintenance, convert, export, inspect, serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        arguments: of the command line; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    if "directory" in options and not options.directory.is_dir():
        say(f"{options.directory} is not a directory; give the output of a run", error=True)
        return NOTHING_THERE
    try:
        code: int = options.run(options)
    except OutputError as error:
        say(str(error), error=True)
        return NOTHING_THERE
    except (DatamatError, OSError) as error:
        say(str(error), error=True)
        return NOT_WELL
    return code


def _parser() -> argparse.ArgumentParser:
    about, _, codes = (__doc__ or "").partition("EXIT CODES\n")
    parser = argparse.ArgumentParser(
        prog="datamat",
        description=about,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _MODULES:
        module.add_commands(commands)
    return parser
