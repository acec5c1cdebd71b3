"""The command `datamat`: check, repair and convert directories without writing Python.

    datamat run module:job        make what is missing in the output of a job; with others, as a task of an array
    datamat finalize module:job   write the manifest over what the tasks of an array have made
    datamat status DIR            show how far it is and what its last run did
    datamat verify DIR [--deep]   compare it with its manifest, byte for byte
    datamat repair DIR            repair what can be repaired without the source
    datamat export DIR            write the files that TFDS, Hugging Face and other readers need beside the shards
    datamat convert DIR --format parquet --num-shards 16    rewrite it in another format or number of shards
    datamat merge A B --output C  make one finished directory of several, without writing a record again
    datamat inspect FILE          show what any TFRecord, Parquet, tar or ArrayRecord file holds
    datamat serve --workers 4     prepare batches in separate processes, for to_tf(service=...)

EXIT CODES
    0   all is well: the directory is complete or being written; nothing is damaged, or all damage was repaired
    1   something is wrong: the run stopped early, also by --deadline or --max-disk, or something is damaged
    2   nothing was done: no such directory, no manifest, or the command line makes no sense
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pathlib
import signal
import sys
import time
from typing import TYPE_CHECKING

from datamat.directory.files import printable
from datamat.directory.inspect import inspect
from datamat.directory.manifest import MANIFEST_FILE, Manifest
from datamat.directory.sidecars.exporting import export, known_sidecars, sidecar_names
from datamat.directory.verify import verify
from datamat.errors import DatamatError, InputError, OptionError, OutputError, ParallelError
from datamat.formats import format_names
from datamat.options import WorkerOptions
from datamat.readers.tf.service import check_address, serving
from datamat.run.convert import convert
from datamat.run.limits import Deadline, seconds_until, signals_raised
from datamat.run.materializer import Materializer
from datamat.run.merge import merge
from datamat.run.repair import repair_offsets
from datamat.run.status import read_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


__all__ = ["main"]

# ---------------------------------------------------------------- console
#
# What the commands share: exit codes, and how they print.


OK, NOT_WELL, NOTHING_THERE = 0, 1, 2


def say(text: str, *, error: bool = False) -> None:
    """Print lines without control characters: file names and messages may come from others."""
    shown = "\n".join(map(printable, text.split("\n")))
    print(f"datamat: {shown}" if error else shown, file=sys.stderr if error else sys.stdout)


# ---------------------------------------------------------------- convert
#
# `datamat convert`: a finished directory in another format, or in other shards.


_CONVERT_DOES = "rewrite a finished directory in another format or number of shards, without computing a sample again"
_FORMATS = f"{', '.join(format_names())}; may be given several times (default: unchanged)"
_WHERE = "the new directory (default: DIR-FORMAT, or DIR-N-shards where the format is unchanged)"


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("convert", help=_CONVERT_DOES, description=_CONVERT_DOES)
    command.add_argument("directory", metavar="DIR", type=pathlib.Path, help="the output of a run")
    command.add_argument("--format", action="append", metavar="F", help=_FORMATS)
    command.add_argument("--num-shards", type=int, metavar="N", help="shards in each split (default: unchanged)")
    command.add_argument("--output", metavar="OUT", type=pathlib.Path, help=_WHERE)
    command.add_argument("--num-workers", type=int, metavar="N", help="worker processes (default: one per core)")
    command.add_argument("--deadline", metavar="T", help="stop cleanly within this time, as in 23h30m; exit code 1")
    command.add_argument(
        "--max-disk", metavar="SIZE", help="stop before OUT grows larger than this, as in 20GB; exit code 1"
    )
    command.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    output = options.output or _beside(options.directory, options.format, options.num_shards)
    report = convert(
        options.directory,
        output,
        format=options.format,
        shards=options.num_shards,
        workers=WorkerOptions(num_workers=options.num_workers),
        deadline=options.deadline,
        max_disk=options.max_disk,
    )
    say(str(output))
    if not report.is_complete:
        say(str(report), error=True)
    return OK if report.is_complete else NOT_WELL


def _beside(directory: pathlib.Path, formats: list[str] | None, num_shards: int | None) -> pathlib.Path:
    """Return where the new directory goes if the command line does not say."""
    folder = directory.resolve()
    return folder.with_name("-".join([folder.name, *(formats or [f"{num_shards}-shards"])]))


# ---------------------------------------------------------------- export
#
# `datamat export`: write the files that other readers need beside the shards.


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    does = "write the files that other readers need beside the shards, where they are missing or wrong"
    command = commands.add_parser("export", help=does, description=does)
    command.add_argument("directory", metavar="DIR", type=pathlib.Path, help="the output of a run")
    command.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    say(str(export(options.directory)))
    return OK


# ---------------------------------------------------------------- inspect
#
# `datamat inspect`: what is in a file of records, whoever wrote it.


_INSPECT_DOES = "show what a TFRecord, Parquet, tar or ArrayRecord file or a directory holds, whoever wrote it"


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("inspect", help=_INSPECT_DOES, description=_INSPECT_DOES)
    command.add_argument("file", metavar="FILE", type=pathlib.Path, help="a file of records, or the output of a run")
    command.add_argument(
        "--records", type=int, default=1, metavar="N", help="how many records to show, from the first (1)"
    )
    command.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    try:
        found = inspect(options.file, records=options.records)
    except (FileNotFoundError, InputError) as error:
        say(str(error), error=True)
        return NOTHING_THERE
    say(str(found))
    return OK if found.ok else NOT_WELL


# ---------------------------------------------------------------- merge
#
# `datamat merge`: several finished directories as one.


_MERGE_DOES = "make one finished directory of several that were made apart, without writing a record again"


def _add_merge(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("merge", help=_MERGE_DOES, description=_MERGE_DOES)
    command.add_argument("directories", metavar="DIR", type=pathlib.Path, nargs="+", help="the outputs of runs")
    command.add_argument("--output", metavar="OUT", type=pathlib.Path, required=True, help="the new directory")
    command.add_argument("--name", metavar="NAME", help="name of the new dataset (default: theirs, if it is the same)")
    command.set_defaults(run=_merge)


def _merge(options: argparse.Namespace) -> int:
    manifest = merge(options.directories, options.output, name=options.name)
    say(f"{options.output}: {len(manifest.shards)} shards, {manifest.num_records:,} records")
    return OK


# ---------------------------------------------------------------- maintenance
#
# `datamat status`, `verify` and `repair`: the state of the output of a run.


_IN_PYTHON = "the rest needs the source: in Python, give Materializer the arguments of the run and call repair()"


def _add_maintenance(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    for name, does, run in (
        ("status", "show how far a directory is, while its run is alive or after it crashed", _status),
        ("verify", "compare a finished directory with its manifest: every file and every record", _verify),
        ("repair", "rewrite damaged offsets and sidecars, and say how to repair the rest", _repair),
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
            say(f"{name}: rewritten from its shard")
        report = verify(options.directory)
        names = sidecar_names(Manifest.read(options.directory)) | known_sidecars(options.directory)
        if not report.ok and set(report.files) <= names:
            say(str(export(options.directory)))
            report = verify(options.directory)
    say(str(report))
    if not report.ok:
        say(_IN_PYTHON)
    return OK if report.ok else NOT_WELL


# ---------------------------------------------------------------- run
#
# `datamat run` and `datamat finalize`: a job that a module names, alone or as one task of several.


_RUN_DOES = """\
Make what is missing in the output of a job. MODULE:JOB names a Materializer, or a function without arguments that
returns one; the module is imported as a program in this folder would. With --task-index and --num-tasks, or in an array
job of Slurm, several such processes make one output together, on a file system that they share."""
_FINALIZE_DOES = "write the manifest over what tasks have made that share an output; make nothing"
_JOB = "a Materializer, or a function that returns one, in a module that can be imported from this folder"
_SLURM = {"ID": "", "MIN": "0", "STEP": "1", "COUNT": ""}  # SLURM_ARRAY_TASK_..., and what they are where not set
_ENDS_BEFORE_S = 60.0  # the end that Slurm has set: parts under way end, and the program too


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the commands."""
    command = commands.add_parser("run", help="make what is missing in the output of a job", description=_RUN_DOES)
    command.add_argument("job", metavar="MODULE:JOB", help=_JOB)
    command.add_argument("--task-index", type=int, metavar="I", help="number of this task, from 0 (Slurm's)")
    command.add_argument("--num-tasks", type=int, metavar="N", help="how many there are (Slurm's)")
    command.add_argument(
        "--deadline", metavar="T", help="stop cleanly within this time, as in 23h30m (a minute before Slurm's); exit 1"
    )
    command.add_argument("--max-disk", metavar="SIZE", help="stop before the output grows larger, as in 20GB; exit 1")
    command.set_defaults(run=_run)
    command = commands.add_parser("finalize", help=_FINALIZE_DOES, description=_FINALIZE_DOES)
    command.add_argument("job", metavar="MODULE:JOB", help=_JOB)
    command.set_defaults(run=_finalize)


def _run(options: argparse.Namespace) -> int:
    index, count = options.task_index, options.num_tasks
    if index is None and count is None:
        index, count = _task_of_slurm(os.environ)
    given = None if options.deadline is None else seconds_until(options.deadline)
    ends = [left_s for left_s in (given, _seconds_of_slurm(os.environ)) if left_s is not None]
    deadline = Deadline(min(ends, default=None), may_be_called=True)
    with _usr1_calls(deadline):
        job = _job(options.job)
        report = job.run(
            deadline=deadline, max_disk=options.max_disk, progress=False, task_index=index, num_tasks=count
        )
    say(str(report), error=not report.is_complete)
    return OK if report.is_complete else NOT_WELL


def _finalize(options: argparse.Namespace) -> int:
    say(str(_job(options.job).finalize(progress=False)))
    return OK


@contextlib.contextmanager
def _usr1_calls(deadline: Deadline) -> Iterator[None]:
    """Have SIGUSR1, which Slurm sends before a limit where it is asked to, be the deadline in the block."""
    before = signal.signal(signal.SIGUSR1, lambda *_: deadline.come())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _task_of_slurm(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return number and count of the tasks of an array job; None for both outside of one.

    Raises:
        OptionError: the variables do not fit together.
    """
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None, None
    found = {name: environ.get(f"SLURM_ARRAY_TASK_{name}", default) for name, default in _SLURM.items()}
    try:
        number, first, step, count = (int(found[name]) for name in ("ID", "MIN", "STEP", "COUNT"))
        return (number - first) // step, count
    except (ValueError, ZeroDivisionError) as error:
        raise OptionError(
            f"the variables SLURM_ARRAY_TASK_... say {found}; want numbers, or give --task-index and --num-tasks"
        ) from error


def _seconds_of_slurm(environ: Mapping[str, str]) -> float | None:
    """Return how long a job of Slurm may still take, with a minute to spare; None outside of one."""
    try:
        left_s = float(environ["SLURM_JOB_END_TIME"]) - time.time()
    except (KeyError, ValueError):
        return None
    return max(left_s - _ENDS_BEFORE_S, 0.0)


def _job(name: str) -> Materializer:
    """Return the job that "module:job" names.

    Raises:
        OptionError: there is none of that name, or it is something else.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise OptionError(f"{name!r} names no job; want MODULE:JOB, as in jobs:camvid for `camvid` in jobs.py")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise OptionError(
            f"there is no module {module_name!r} in {os.getcwd()} or among the installed packages; change to the "
            "folder of the module, or install it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(
                f"{module_name} has no {attribute!r}; want a Materializer, or a function that returns one"
            )
        found = getattr(found, part)
    job = found if isinstance(found, Materializer) else found() if callable(found) else found
    if not isinstance(job, Materializer):
        raise OptionError(f"{name} gives {job!r}; want a Materializer, or a function that returns one")
    return job


# ---------------------------------------------------------------- serve
#
# `datamat serve`: a tf.data service, until a signal ends it.


_ABOUT = """\
Start a dispatcher and workers, which prepare batches for `to_tf(service="grpc://HOST:PORT")`, print the address, and
serve until Ctrl-C or SIGTERM. Consumers on other hosts need --host. There is no authentication: whoever reaches the
ports can have the workers read and write files; use it in networks that you trust."""


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("serve", help="start a tf.data service", description=_ABOUT)
    command.add_argument("--workers", type=int, default=1, metavar="N", help="processes that prepare batches (1)")
    command.add_argument("--port", type=int, default=0, help="port of the dispatcher (any that is free)")
    command.add_argument(
        "--host", default="localhost", help="name under which consumers reach this machine (localhost)"
    )
    command.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often to restart when a worker dies; consumers then get an error instead of waiting (3)",
    )
    command.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised():  # a request to end is a success
        port = options.port
        for restarts_left in range(max(options.restarts, 0), -1, -1):
            with serving(options.workers, port=port, host=options.host) as service:
                _, port = check_address(service.address)
                say(service.address)
                sys.stdout.flush()  # the reader of a pipe waits for it
                try:
                    service.wait()
                except ParallelError as error:
                    if not restarts_left:
                        raise
                    say(f"{error}; restarting", error=True)
    return OK


# Each declares commands, and sets the function that runs one as `run`.
_COMMANDS = (_add_run, _add_maintenance, _add_convert, _add_merge, _add_export, _add_inspect, _add_serve)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        arguments: words of the command line; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    if "directory" in options and not options.directory.is_dir():
        say(f"{options.directory} is not a directory; pass the output of a run", error=True)
        return NOTHING_THERE
    try:
        code: int = options.run(options)
    except (OptionError, OutputError) as error:
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
    for add_commands in _COMMANDS:
        add_commands(commands)
    return parser


# ---------------------------------------------------------------- the command
#
# `python -m datamat.cli` runs the command where its script is not on the path.


if __name__ == "__main__":
    sys.exit(main())
