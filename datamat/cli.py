"""The command `datamat`: make, check, see, repair and convert directories without writing Python.

    datamat run module:job        make what is missing in the output of a job; with others, as a task of an array
    datamat run job.toml          the same; the file holds the arguments of a Materializer
    datamat plan JOB              show which rows go to which shard
    datamat estimate JOB          process a few rows, and estimate what the whole run will take
    datamat finalize JOB          write the manifest over what the tasks of an array have made
    datamat status DIR [--watch]  show how far it has got and what its last run did
    datamat verify DIR [--deep]   compare it with its manifest, byte for byte
    datamat repair DIR            repair what can be repaired without the source; of a JOB, everything
    datamat preview DIR           draw samples into a picture
    datamat view DIR [--serve]    show it in a browser: as one page, or from a server on this machine
    datamat export DIR            write the files that TFDS, Hugging Face and other readers need beside the shards
    datamat convert DIR --format parquet --num-shards 16    rewrite it in another format or number of shards
    datamat merge A B --output C  combine finished directories into one, without rewriting any record
    datamat describe FILE         show what any TFRecord, Parquet, tar or ArrayRecord file holds
    datamat serve --num-workers 4 prepare batches in separate processes, for to_tf(service=...)
    datamat --print-completion bash    print a script that makes the shell complete all this

A directory that is only read (status, verify, describe, preview, view, convert) may be a URL, as in s3://bucket/out.
Every command takes --json: standard output is then one JSON object, with the same keys each time.

EXIT CODES
    0   all is well: the directory is complete or being written; nothing is damaged, or all damage was repaired
    1   something is wrong: the run stopped early (--deadline and --max-disk included), something is damaged, or the
        disk does not have room for what was estimated
    2   nothing was done: no such directory, no manifest, or an invalid command line
    130 interrupted by Ctrl-C; finished work stays, and the next run continues from there
    141 the reader of the output has gone, such as `| head`
    143 ended by SIGTERM; otherwise as for Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib
import inspect as signatures
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import shtab

from datamat import __version__
from datamat.directory.describe import describe
from datamat.directory.files import printable
from datamat.directory.manifest import MANIFEST_FILE, Manifest
from datamat.directory.remote import is_url, without_secrets
from datamat.directory.sidecars.exporting import export, known_sidecars, sidecar_names
from datamat.directory.verify import VerifyReport, verify
from datamat.errors import DatamatError, InputError, OptionError, OutputError, ParallelError, place_of
from datamat.formats import format_names
from datamat.options import ErrorPolicy, ShardOptions, WorkerOptions
from datamat.readers.dataset import ShardedDataset, load
from datamat.readers.tf.service import check_address, serving
from datamat.readers.view import view, viewing
from datamat.run.convert import convert
from datamat.run.limits import Deadline, seconds_until, signals_raised
from datamat.run.materializer import Materializer
from datamat.run.merge import merge
from datamat.run.repair import repair_offsets
from datamat.run.status import State, Status, output_status, read_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from datamat.run.report import RunReport


__all__ = ["COMMANDS", "Command", "build_parser", "main"]

OK, NOT_WELL, NOTHING_THERE = 0, 1, 2
INTERRUPTED, PIPE_CLOSED, TERMINATED = (128 + number for number in (2, 13, 15))  # as shells count signals

# ---------------------------------------------------------------- the console
#
# What the commands share: how they answer, in words or as JSON.


class Console:
    """Takes the answer of a command, in words for people and as facts for programs; shows one of them.

    Args:
        command: name of the command.
        as_json: whether to show the facts, as a JSON object.
        out: where the answer goes.
    """

    def __init__(self, command: str, *, as_json: bool, out: TextIO) -> None:
        self.as_json = as_json
        self._command = command
        self._out = out

    def answer(self, code: int, text: str, facts: Mapping[str, Any], *, error: bool = False) -> int:
        """Show the answer; return its exit code.

        Args:
            code: exit code.
            text: the answer in words.
            facts: the answer by keys; those that the command declares.
            error: whether the words go to standard error.
        """
        if self.as_json:
            found = {"command": self._command, "exit_code": code, "ok": code == OK, **_plain(facts)}
            print(json.dumps(found), file=self._out, flush=True)
        else:
            self.say(text, error=error)
        return code

    def fail(self, code: int, error: BaseException | str) -> int:
        """Show why there is no answer; return the exit code."""
        kind = type(error).__name__ if isinstance(error, BaseException) else "OutputError"
        text = str(error) + (place_of(error) if isinstance(error, DatamatError) else "")
        if isinstance(error, OSError) and error.strerror and error.filename is not None:  # as programs of Unix say it
            text = f"{error.filename}: {error.strerror}"
        return self.answer(code, text, {"error": {"type": kind, "message": text}}, error=True)

    def say(self, text: str, *, error: bool = False) -> None:
        """Print lines without control characters: file names and messages may come from others."""
        shown = "\n".join(map(printable, text.split("\n")))
        if error or self.as_json:
            sys.stderr.write(f"datamat: {shown}\n")
        else:
            print(shown, file=self._out, flush=True)

    @property
    def is_terminal(self) -> bool:
        """Whether someone watches the answer as it comes."""
        return not self.as_json and self._out.isatty()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what JSON does not have, as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@contextlib.contextmanager
def _console(command: str, *, as_json: bool) -> Iterator[Console]:
    """Give a command its console; where that shows JSON, all else that is printed goes to standard error.

    Jobs print, and so do their workers and the libraries in them, below Python.
    """
    out = sys.stdout
    if not as_json:
        yield Console(command, as_json=False, out=out)
        return
    try:
        number = out.fileno()
    except (OSError, ValueError):  # something else than a file has replaced it, as in a test
        with contextlib.redirect_stdout(sys.stderr):
            yield Console(command, as_json=True, out=out)
        return
    out.flush()
    before = os.dup(1)
    with open(os.dup(number), "w", encoding="utf-8") as answers, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        try:
            yield Console(command, as_json=True, out=answers)
        finally:
            os.dup2(before, 1)
            os.close(before)


# ---------------------------------------------------------------- a command
#
# What the table below holds of each; parsers, pages and completion are made of it.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        name: the word of the command line.
        does: what it does, in one line.
        about: more, for its `--help`; "" where that is all.
        add: declares its arguments.
        run: does it; returns the exit code.
        python: what does the same in Python, whose parameters its options are named as.
        keys: keys of its JSON object, each with its meaning.
    """

    name: str
    does: str
    about: str = ""
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Console], int]
    python: tuple[Callable[..., Any], ...]
    keys: Mapping[str, str]


def _attributes(found: object, keys: Collection[str]) -> dict[str, Any]:
    """Return the attributes of an answer that have a key."""
    return {key: getattr(found, key) for key in keys}


def _place(text: str) -> pathlib.Path | str:
    """Return a path, or a URL as it is."""
    return text if is_url(text) else pathlib.Path(text)


def _add_directory(command: argparse.ArgumentParser, *, is_read: bool = False) -> None:
    """Declare the directory of a command; one that only reads also takes its URL."""
    if not is_read:
        command.add_argument("directory", metavar="DIR", type=_place, help="the output of a run")
        return
    command.add_argument("directory", metavar="DIR|URL", type=_place, help="the output of a run, or its URL")
    _add_storage(command)


def _add_storage(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage-options",
        metavar="JSON|FILE",
        help="options for fsspec that go with a URL: a JSON object, or a file that holds one (without: the "
        "environment); others on this machine can see a command line, so secrets belong into the environment or a file",
    )


def _add_cache(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        help="where fetched shards of a URL go, to be used again (a temporary folder, which is removed)",
    )


def _storage(options: argparse.Namespace, name: str = "storage_options") -> dict[str, Any] | None:
    """Return the options for fsspec that the command line gives under a name.

    Raises:
        OptionError: they are no JSON object.
    """
    given: str | None = getattr(options, name)
    option = f"--{name.replace('_', '-')}"
    if given is None:
        return None
    wanted = """want a JSON object, such as '{"anon": true}', or a file that holds one"""
    try:
        is_object = given.lstrip().startswith("{")
        found = json.loads(given if is_object else pathlib.Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{option}: {given} cannot be read ({error.strerror}); {wanted}") from error
    except ValueError as error:
        raise OptionError(f"{option} is no JSON ({error}); {wanted}") from error
    if not isinstance(found, dict):
        raise OptionError(f"{option} holds a {type(found).__name__}; {wanted}")
    return found


@contextlib.contextmanager
def _fetching(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Give what a reader takes for a URL: its options, and a folder for copies; nothing for a path."""
    storage_options = _storage(options)
    if not is_url(options.directory):
        yield {} if storage_options is None else {"storage_options": storage_options}
        return
    with contextlib.ExitStack() as stack:
        cache_dir = options.cache_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="datamat-"))
        yield {"storage_options": storage_options, "cache_dir": cache_dir}


def _name_of(directory: pathlib.Path | str) -> str:
    """Return the last name of a path or URL, by which files about it are called."""
    if isinstance(directory, pathlib.Path):
        return directory.resolve().name
    return without_secrets(directory).partition("?")[0].rstrip("/").rpartition("/")[2]


def _add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("job", metavar="JOB", help=_JOB)


def _add_target(command: argparse.ArgumentParser, *, is_read: bool = False) -> None:
    """Declare the directory or job of a command; one that only reads also takes a URL."""
    if not is_read:
        command.add_argument("target", metavar="DIR|JOB", help=f"the output of a run; or {_JOB}")
        return
    command.add_argument("target", metavar="DIR|URL|JOB", help=f"the output of a run, or its URL; or {_JOB}")
    _add_storage(command)


def _target(options: argparse.Namespace) -> Materializer | pathlib.Path | str:
    """Return the job that the command line names, or the directory, or its URL.

    Raises:
        OutputError: it is none of them.
    """
    path = pathlib.Path(options.target)
    if path.is_dir():
        return path
    if is_url(options.target):
        return str(options.target)
    if path.suffix == ".toml" or (":" in options.target and os.sep not in options.target.partition(":")[0]):
        return _find_job(options.target)
    raise OutputError(f"{path} is not a directory; pass the output of a run")


def _add_progress(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show a progress bar if standard error is a terminal",
    )


def _shows_bar(options: argparse.Namespace) -> bool:
    return bool(options.progress) and sys.stderr.isatty()


def _answer_run(report: RunReport, options: argparse.Namespace, console: Console) -> int:
    """Show the report of a run; the bar has shown it where somebody saw that."""
    code = OK if report.is_complete else NOT_WELL
    if console.is_terminal and _shows_bar(options):
        return code
    return console.answer(code, str(report), _attributes(report, _REPORT), error=not report.is_complete)


_REPORT = {
    "output": "folder or URL of the output",
    "is_complete": "whether the output is finished",
    "num_rows": "input rows that are done, including by earlier runs",
    "num_records": "records in the output",
    "num_bytes": "size of the shards, in bytes",
    "num_failed": "rows that failed",
    "num_dropped": "rows that were left out on purpose",
    "num_dropped_records": "records left out of other rows",
    "num_shards_written": "shards that this run made",
    "num_shards_reused": "shards that already existed",
    "num_parts_written": "parts that this run made",
    "num_parts_resumed": "parts reused from a run that was stopped",
    "num_workers": "worker processes",
    "elapsed_s": "wall time, in seconds",
    "busy_share": "fraction of it that the workers were busy, 0 to 1",
    "stopped": "`deadline` or `max_disk` if that ended the run, else empty",
    "limit": "what limited the run, and what to change",
}

# ---------------------------------------------------------------- convert
#
# `datamat convert`: a finished directory in another format, or in other shards.


_FORMATS = f"{', '.join(format_names())}; repeatable (default: unchanged)"
_WHERE = "the new directory, or its URL (default: DIR-FORMAT, or DIR-N-shards if the format is unchanged)"


def _add_convert(command: argparse.ArgumentParser) -> None:
    _add_directory(command, is_read=True)
    command.add_argument(
        "--source-options", metavar="JSON|FILE", help="the same for DIR alone, if OUT is a URL in another store"
    )
    _add_cache(command)
    command.add_argument("--scratch", metavar="FOLDER", help="where shards are made for an OUT that is a URL (TMPDIR)")
    command.add_argument("--format", action="append", metavar="F", help=_FORMATS)
    command.add_argument("--num-shards", type=int, metavar="N", help="shards in each split (default: unchanged)")
    command.add_argument("--output", metavar="OUT", type=_place, help=_WHERE)
    command.add_argument("--num-workers", type=int, metavar="N", help="worker processes (default: one per core)")
    command.add_argument("--deadline", metavar="T", help="stop cleanly within this time, as in 23h30m; exit code 1")
    command.add_argument(
        "--max-disk", metavar="SIZE", help="stop before OUT grows larger than this, as in 20GB; exit code 1"
    )
    _add_progress(command)


def _convert(options: argparse.Namespace, console: Console) -> int:
    output = options.output or _beside(options.directory, options.format, options.num_shards)
    given = {name: _storage(options, f"{name}_options") for name in ("storage", "source")}
    report = convert(
        options.directory,
        output,
        format=options.format,
        shards=options.num_shards,
        workers=WorkerOptions(num_workers=options.num_workers),
        deadline=options.deadline,
        max_disk=options.max_disk,
        progress=_shows_bar(options),
        storage_options=given["storage"],
        source_options=given["source"],
        scratch=options.scratch,
        cache_dir=options.cache_dir,
    )
    facts = _attributes(report, _REPORT)
    if report.is_complete:
        return console.answer(OK, str(output), facts)
    if not console.as_json:
        console.say(str(output))
    return console.answer(NOT_WELL, str(report), facts, error=True)


def _beside(directory: pathlib.Path | str, formats: list[str] | None, num_shards: int | None) -> pathlib.Path:
    """Return where the new directory goes if the command line does not say: beside a folder; of a URL, here."""
    folder = directory.resolve() if isinstance(directory, pathlib.Path) else pathlib.Path(_name_of(directory))
    return folder.with_name("-".join([folder.name, *(formats or [f"{num_shards}-shards"])]))


# ---------------------------------------------------------------- export
#
# `datamat export`: write the files that other readers need beside the shards.


def _export(options: argparse.Namespace, console: Console) -> int:
    report = export(options.directory)
    return console.answer(OK, str(report), _attributes(report, _EXPORT))


_EXPORT = {
    "path": "the directory",
    "written": "files that were missing or out of date",
    "unchanged": "files that were up to date",
    "kept": "files that are not datamat's, or are for people and were edited; they stay as they are",
    "edited": "files for programs that were edited; the edited versions are in `.datamat/quarantine/edited`",
}


# ---------------------------------------------------------------- describe
#
# `datamat describe`: what is in a file of records, whoever wrote it.


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE|URL", type=_place, help="a file of records, or the output of a run")
    _add_storage(command)
    command.add_argument(
        "--records", type=int, default=1, metavar="N", help="how many records to show, from the first (1)"
    )


def _inspect(options: argparse.Namespace, console: Console) -> int:
    try:
        found = describe(options.file, records=options.records, storage_options=_storage(options))
    except (FileNotFoundError, InputError) as error:
        return console.fail(NOTHING_THERE, error)
    facts = _attributes(found, _INSPECTION)
    facts["fields"] = [{**_plain(field), "feature": field.feature and repr(field.feature)} for field in found.fields]
    return console.answer(OK if found.ok else NOT_WELL, str(found), facts)


_INSPECTION = {
    "path": "the file or directory, or its URL",
    "format": "its format, in words",
    "num_bytes": "size of the file, or of all shards",
    "num_records": "records that could be read",
    "contents": "number of records of each kind; of a directory, by split",
    "fields": "for each field `name`, `kind`, `num_records`, `lengths`, `details` and `feature`",
    "num_looked_into": "records that `fields` describes",
    "records": "the first records, as text",
    "problem": "the first damage; empty if there is none",
    "statistics": "of a directory, what is known about the values of each field, by split and field",
}


# ---------------------------------------------------------------- merge
#
# `datamat merge`: several finished directories as one.


def _add_merge(command: argparse.ArgumentParser) -> None:
    command.add_argument("directories", metavar="DIR", type=_place, nargs="+", help="the outputs of runs")
    command.add_argument("--output", metavar="OUT", type=_place, required=True, help="the new directory")
    command.add_argument(
        "--name", metavar="NAME", help="name of the new dataset (default: theirs, if they have the same)"
    )


def _merge(options: argparse.Namespace, console: Console) -> int:
    manifest = merge(options.directories, options.output, name=options.name)
    facts = {"output": options.output, "num_shards": len(manifest.shards), "num_records": manifest.num_records}
    text = f"{options.output}: {len(manifest.shards)} shards, {manifest.num_records:,} records"
    return console.answer(OK, text, facts)


_MERGED = {"output": "the new directory", "num_shards": "its shards", "num_records": "its records"}


# ---------------------------------------------------------------- plan and estimate
#
# `datamat plan` and `datamat estimate`: what a run would do; nothing is written.


def _plan(options: argparse.Namespace, console: Console) -> int:
    plan = _find_job(options.job).plan()
    shards = [
        {
            "name": shard.name,
            "split": shard.split,
            "num_rows": shard.num_rows,
            "copies": shard.copies,
            "num_parts": len(shard.parts),
        }
        for shard in plan.shards
    ]
    return console.answer(OK, str(plan), {**_attributes(plan, [*_PLAN][:-1]), "shards": shards})


_PLAN = {
    "name": "name of the dataset",
    "num_rows": "input rows",
    "num_records": "records, if every draw of the transform gives one",
    "ranks": "training processes that share the shards; null if not given",
    "shards": "each file with `name`, `split`, `num_rows`, `copies` and `num_parts`",
}


def _add_estimate(command: argparse.ArgumentParser) -> None:
    _add_job(command)
    command.add_argument("--num-samples", type=int, default=32, metavar="N", help="rows to process (32)")


def _estimate(options: argparse.Namespace, console: Console) -> int:
    found = _find_job(options.job).estimate(options.num_samples)
    return console.answer(OK if found.fits else NOT_WELL, str(found), _attributes(found, _ESTIMATE))


_ESTIMATE = {
    "num_samples": "rows that were processed",
    "num_rows": "rows of the run",
    "num_workers": "workers that will share the work",
    "seconds": "wall time of the run",
    "num_bytes": "size of the shards",
    "needed_bytes": "most disk space that the run takes",
    "free_bytes": "free disk space",
    "fits": "whether there is enough room",
    "worker_bytes": "peak memory of each worker",
    "stages": "seconds per row on one core, by stage",
    "failed": "messages of the rows that failed",
}


# ---------------------------------------------------------------- preview
#
# `datamat preview`: samples, drawn into a file.


def _add_preview(command: argparse.ArgumentParser) -> None:
    _add_directory(command, is_read=True)
    _add_cache(command)
    command.add_argument("--split", metavar="NAME", help="split to draw from (all)")
    command.add_argument("--count", type=int, default=8, metavar="N", help="samples, spread over the split (8)")
    command.add_argument("--columns", type=int, default=4, metavar="N", help="samples in a row (4)")
    command.add_argument("--opacity", type=float, default=0.5, metavar="X", help="of the masks, 0 to 1 (0.5)")
    command.add_argument(
        "--output", type=pathlib.Path, metavar="PNG", help="the picture (default: DIR-preview.png, here)"
    )


def _preview(options: argparse.Namespace, console: Console) -> int:
    output = options.output or pathlib.Path(f"{_name_of(options.directory)}-preview.png")
    with _fetching(options) as given:
        samples = load(options.directory, options.split, **given)
        picture = samples.preview(options.count, columns=options.columns, opacity=options.opacity)
    picture.save(output)
    height, width = picture.array.shape[:2]
    return console.answer(OK, str(output), {"output": output, "height": height, "width": width})


_PICTURE = {"output": "the picture, a PNG file", "height": "its height in pixels", "width": "its width"}


# ---------------------------------------------------------------- view
#
# `datamat view`: a finished directory in a browser.


_VIEW = {"output": "the page, an HTML file", "num_samples": "samples on it", "address": "address of the server"}


def _add_view(command: argparse.ArgumentParser) -> None:
    _add_directory(command, is_read=True)
    _add_cache(command)
    command.add_argument("--split", metavar="NAME", help="split to show (all)")
    command.add_argument("--count", type=int, default=96, metavar="N", help="samples on the page (96)")
    command.add_argument("--output", type=pathlib.Path, metavar="HTML", help="the page (default: DIR.html, here)")
    command.add_argument(
        "--serve", action="store_true", help="serve all samples, and print the address; Ctrl-C ends it"
    )
    command.add_argument("--port", type=int, default=0, help="port of the server (any that is free)")


def _view(options: argparse.Namespace, console: Console) -> int:
    with _fetching(options) as given:
        if not options.serve:
            output = options.output or pathlib.Path(f"{_name_of(options.directory)}.html")
            page = view(options.directory, options.split, count=options.count, **given)
            page.save(output)
            return console.answer(OK, str(output), {"output": output, "num_samples": page.num_samples, "address": None})
        served = viewing(options.directory, options.split, port=options.port, **given)
        with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised(), served as server:
            facts = {"output": None, "num_samples": None, "address": server.url}
            console.answer(OK, server.url, facts)  # while it serves
            server.wait()
    return OK  # a request to end is a success


# ---------------------------------------------------------------- status, verify and repair
#
# The state of the output of a run.


_IN_STORE = "`datamat repair JOB`, or repair() of its Materializer, makes again what is damaged"
_IN_PYTHON = "the rest needs the source: name the job in place of the directory, or call repair() of its Materializer"


def _add_status(command: argparse.ArgumentParser) -> None:
    _add_target(command, is_read=True)
    command.add_argument(
        "--watch", action="store_true", help="show it again whenever it changes, until no process is at work"
    )
    command.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between checks (2)")


def _status(options: argparse.Namespace, console: Console) -> int:
    target = _target(options)
    if not options.interval > 0:
        raise OptionError(f"--interval is {options.interval:g}; want a positive number of seconds")
    if isinstance(target, Materializer):
        _refuse_storage(options)
        status = target.status()
        again = functools.partial(output_status, target.job)
    else:
        again = functools.partial(read_status, target, storage_options=_storage(options))
        status = again()
    while options.watch and status.is_running:
        _show_status(status, console)
        shown = str(status)
        while status.is_running and str(status) == shown:
            time.sleep(options.interval)
            status = again()
    return _show_status(status, console)


def _refuse_storage(options: argparse.Namespace) -> None:
    if options.storage_options is not None:
        raise OptionError("--storage-options go with a URL, and a JOB has its own; leave them out")


def _show_status(status: Status, console: Console) -> int:
    return console.answer(_STATES[status.state], str(status), _attributes(status, _STATUS))


_STATES: dict[State, int] = {
    "complete": OK,
    "running": OK,
    "unfinished": NOT_WELL,
    "damaged": NOT_WELL,
    "empty": NOTHING_THERE,
}
_STATUS = {
    "output": "the directory, or its URL",
    "state": "`empty`, `running`, `unfinished`, `complete` or `damaged`",
    "holder": "the process at work; empty if there is none",
    "done": "what is there: `num_shards`, `num_rows`, `num_failed`, `num_dropped`, `num_dropped_records`, "
    "`num_records`, `num_bytes`",
    "num_shards": "planned shards of an unfinished run; null if no plan is known",
    "num_rows": "its planned rows",
    "events": "first and last ledger lines of the last run: `time`, `run`, `event`, `values`",
    "changes": "of a JOB, the shards that `run` would make: `shard`, `reasons`; null for a DIR",
    "obsolete": "of a JOB, the shards that `run` would remove",
    "note": "why this answer is incomplete; empty if it is not",
    "tasks": "of tasks that share the output: name, the process at work (empty if there is none), finished shards",
    "growing": "of an unfinished output in a store, shards of which pieces are there: name, parts, rows, bytes",
}


def _add_verify(command: argparse.ArgumentParser) -> None:
    _add_target(command, is_read=True)
    command.add_argument("--deep", action="store_true", help="decode every record, pixels included")
    command.add_argument(
        "--sample", type=float, metavar="X", help="of a JOB: also make this fraction of the rows again, and compare"
    )


def _verify(options: argparse.Namespace, console: Console) -> int:
    target = _target(options)
    if isinstance(target, Materializer):
        _refuse_storage(options)
        report = target.verify(options.deep, sample=options.sample)
    elif options.sample is not None:
        raise OptionError(
            "--sample makes records again, which takes the source; name the JOB in place of the directory"
        )
    else:
        report = verify(target, options.deep, storage_options=_storage(options))
    return _answer_verify(report, _IN_STORE if isinstance(target, str) else "", [], console)


def _answer_verify(report: VerifyReport, note: str, rewritten: list[str], console: Console) -> int:
    text = "\n".join([*rewritten, str(report), *([note] if note and not report.ok else [])])
    code = OK if report.ok else NOT_WELL
    return console.answer(code, text, _attributes(report, _VERIFIED))


_VERIFIED = {
    "path": "the directory, or its URL",
    "num_shards": "shards that were read, in every format",
    "num_records": "records that the manifest counts",
    "num_formats": "formats that hold them",
    "problems": "one line per problem",
    "notes": "one line per edited file for people",
    "files": "the damaged files",
}


def _repair(options: argparse.Namespace, console: Console) -> int:
    target = _target(options)
    if isinstance(target, Materializer):
        target.repair(progress=_shows_bar(options))
        return _answer_verify(target.verify(), "", [], console)
    if isinstance(target, str):
        raise OptionError(
            f"repair: {without_secrets(target)} is in a store, where shards are made from the source; name its JOB "
            "in place of the URL, or call repair() of its Materializer"
        )
    done = []
    report = verify(target)
    if not report.ok and MANIFEST_FILE not in report.files:
        done += [f"{name}: rewritten from its shard" for name in sorted(repair_offsets(target, set(report.files)))]
        report = verify(target)
        names = sidecar_names(Manifest.read(target)) | known_sidecars(target)
        if not report.ok and set(report.files) <= names:
            done.append(str(export(target)))
            report = verify(target)
    return _answer_verify(report, _IN_PYTHON, done, console)


def _add_repair(command: argparse.ArgumentParser) -> None:
    _add_target(command)
    _add_progress(command)


# ---------------------------------------------------------------- run
#
# `datamat run` and `datamat finalize`: a job that a module or a file names, alone or as one task of several.


_RUN_DOES = """\
Make what is missing in the output of a job. MODULE:JOB names a Materializer, or a function without arguments that
returns one; the module is imported as a program in this folder would import it. FILE.toml holds the arguments of a
Materializer by name; its tables shards, workers and errors hold those of ShardOptions, WorkerOptions and ErrorPolicy;
transform, logger, sidecars and hooks are named as MODULE:NAME; so is executor, unless it is "ray" or an address. With
--task-index and --num-tasks, or in a Slurm array job, several such processes make one output together, on a shared file
system or in a bucket (S3, Google's or Azure's)."""
_JOB = "MODULE:JOB, a Materializer or a function that returns one, in a module that can be imported here; or FILE.toml"
_ENDS_BEFORE_S = 60.0  # the end that Slurm has set: parts under way end, and the program too


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_job(command)
    command.add_argument("--task-index", type=int, metavar="I", help="number of this task, from 0 (Slurm's)")
    command.add_argument("--num-tasks", type=int, metavar="N", help="number of tasks (Slurm's)")
    command.add_argument(
        "--deadline", metavar="T", help="stop cleanly within this time, as in 23h30m (a minute before Slurm's); exit 1"
    )
    command.add_argument("--max-disk", metavar="SIZE", help="stop before the output grows larger, as in 20GB; exit 1")
    _add_existing(command)
    _add_progress(command)


def _add_existing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--existing",
        choices=("update", "replace", "refuse"),
        default="update",
        help="update: rebuild what changed, stop if the source lacks finished rows (default); replace: the source "
        "alone decides; refuse: stop before any finished shard is replaced",
    )


def _run(options: argparse.Namespace, console: Console) -> int:
    index, count = options.task_index, options.num_tasks
    if index is None and count is None:
        index, count = _task_of_slurm(os.environ)
    given = None if options.deadline is None else seconds_until(options.deadline)
    ends = [left_s for left_s in (given, _seconds_of_slurm(os.environ)) if left_s is not None]
    deadline = Deadline(min(ends, default=None), may_be_called=True)
    with _usr1_calls(deadline):
        report = _find_job(options.job).run(
            deadline=deadline,
            max_disk=options.max_disk,
            progress=_shows_bar(options),
            existing=options.existing,
            task_index=index,
            num_tasks=count,
        )
    return _answer_run(report, options, console)


def _add_finalize(command: argparse.ArgumentParser) -> None:
    _add_job(command)
    _add_existing(command)
    _add_progress(command)


def _finalize(options: argparse.Namespace, console: Console) -> int:
    report = _find_job(options.job).finalize(progress=_shows_bar(options), existing=options.existing)
    return _answer_run(report, options, console)


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

    The number is that of the array: one that is submitted again, without those that are at work, finds its own parts.

    Raises:
        OptionError: the variables do not fit together.
    """
    if "SLURM_ARRAY_TASK_ID" not in environ:
        return None, None
    found = {name: environ.get(f"SLURM_ARRAY_TASK_{name}", "0") for name in ("ID", "MAX")}
    try:
        number, last = map(int, found.values())
        return number, max(number, last) + 1
    except ValueError as error:
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


def _find_job(name: str) -> Materializer:
    """Return the job that "module:job" or the name of a TOML file stands for.

    Raises:
        OptionError: there is none of that name, or it is something else.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    if is_url(name):
        raise OptionError(
            f"{without_secrets(name)} is a URL, not a JOB; want MODULE:JOB, as in jobs:camvid for `camvid` in jobs.py, "
            "or the name of a TOML file: its output may be a URL"
        )
    if name.endswith(".toml"):
        return _job_of_file(pathlib.Path(name))
    if not all(name.partition(":")):
        raise OptionError(
            f"{name!r} names no job; want MODULE:JOB, as in jobs:camvid for `camvid` in jobs.py, or the name of a "
            "TOML file"
        )
    found = _find_object(name, "want a Materializer, or a function that returns one")
    if callable(found) and not isinstance(found, Materializer) and (needed := _needed_arguments(found)):
        raise OptionError(
            f"{name} needs arguments ({', '.join(needed)}), and a JOB is called without any; give them defaults, or "
            "name a function that calls it"
        )
    job = found() if callable(found) and not isinstance(found, Materializer) else found
    if not isinstance(job, Materializer):
        raise OptionError(f"{name} gives {job!r}; want a Materializer, or a function that returns one")
    return job


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called; [] where Python cannot tell."""
    with contextlib.suppress(TypeError, ValueError):
        taken = signatures.signature(function).parameters.values()
        variable = (signatures.Parameter.VAR_POSITIONAL, signatures.Parameter.VAR_KEYWORD)
        return [one.name for one in taken if one.default is one.empty and one.kind not in variable]
    return []


def _find_object(name: str, wanted: str) -> Any:
    """Return what "module:name" stands for, in a module that a program in this folder can import.

    Raises:
        OptionError: there is no such module, or nothing of that name in it.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name or "\\" in module_name:
        module = pathlib.PurePath(module_name).stem
        raise OptionError(
            f"{name!r} names a file; name the module, as in {module}:{attribute}, from the folder that it is in"
        )
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
            raise OptionError(f"{module_name} has no {attribute!r}; {wanted}")
        found = getattr(found, part)
    return found


_OPTIONS: dict[str, type] = {"shards": ShardOptions, "workers": WorkerOptions, "errors": ErrorPolicy}
_NAMED = ("transform", "executor", "logger", "sidecars", "hooks")  # arguments that no file can hold, but name


def _job_of_file(path: pathlib.Path) -> Materializer:
    """Return the job whose arguments a TOML file holds; paths in it are those of the current folder.

    Raises:
        OptionError: the file cannot be read, or its arguments are not those of a `Materializer`.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); want a TOML file of arguments") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is no TOML ({error}); correct it there") from error
    arguments = {}
    for name, value in given.items():
        _refuse_unknown(path, "", name, Materializer)
        if name in _OPTIONS and isinstance(value, dict):
            for option in value:
                _refuse_unknown(path, f"{name}.", option, _OPTIONS[name])
            value = _OPTIONS[name](**value)  # noqa: PLW2901 -- the same argument, as Python has it
        arguments[name] = _named_objects(path, name, value) if name in _NAMED else value
    return Materializer(**arguments)


def _refuse_unknown(path: pathlib.Path, table: str, name: str, taker: Callable[..., Any]) -> None:
    known = list(signatures.signature(taker).parameters)
    if name not in known:
        raise OptionError(f"{path}: {table}{name} is no argument of {taker.__name__}; it takes {', '.join(known)}")


def _named_objects(path: pathlib.Path, argument: str, value: Any) -> Any:
    """Return what MODULE:NAME stands for, also in a list; other text, such as "ray", as it is."""
    if isinstance(value, list):
        return [_named_objects(path, argument, inner) for inner in value]
    if isinstance(value, str) and (argument != "executor" or ("://" not in value and ":" in value)):
        wanted = f"{path} names it as its {argument}; name what is in the module"
        return _find_object(value, wanted) if ":" in value else _refuse_word(path, argument, value)
    return value


def _refuse_word(path: pathlib.Path, argument: str, value: str) -> str:
    if argument == "executor":
        return value
    raise OptionError(f"{path}: {argument} is {value!r}; want MODULE:NAME, as in jobs:augment for `augment` in jobs.py")


# ---------------------------------------------------------------- serve
#
# `datamat serve`: a tf.data service, until a signal ends it.


_ABOUT = """\
Start a dispatcher and workers that prepare batches for `to_tf(service="grpc://HOST:PORT")`, print the address, and
serve until Ctrl-C or SIGTERM. Consumers on other hosts need --host. There is no authentication: anyone who can reach
the ports can make the workers read and write files, so use it only on a network that you trust."""


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("--num-workers", type=int, default=1, metavar="N", help="processes that prepare batches (1)")
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


def _serve(options: argparse.Namespace, console: Console) -> int:
    with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised():  # a request to end is a success
        port = options.port
        for restarts_left in range(max(options.restarts, 0), -1, -1):
            with serving(options.num_workers, port=port, host=options.host) as service:
                _, port = check_address(service.address)
                if restarts_left == max(options.restarts, 0) or not console.as_json:
                    console.answer(OK, service.address, {"address": service.address})  # while it serves
                try:
                    service.wait()
                except ParallelError as error:
                    if not restarts_left:
                        raise
                    console.say(f"{error}; restarting", error=True)
    return OK


# ---------------------------------------------------------------- the table of commands


COMMANDS = (
    Command(
        name="run",
        does="make what is missing in the output of a job",
        about=_RUN_DOES,
        add=_add_run,
        run=_run,
        python=(Materializer.run,),
        keys=_REPORT,
    ),
    Command(
        name="plan",
        does="show which rows of a job go to which shard; nothing is written",
        add=_add_job,
        run=_plan,
        python=(Materializer.plan,),
        keys=_PLAN,
    ),
    Command(
        name="estimate",
        does="process a few rows of a job, and estimate the time, disk space and memory of the run; nothing is written",
        add=_add_estimate,
        run=_estimate,
        python=(Materializer.estimate,),
        keys=_ESTIMATE,
    ),
    Command(
        name="finalize",
        does="write the manifest for what the tasks that share an output have made; make nothing else",
        add=_add_finalize,
        run=_finalize,
        python=(Materializer.finalize,),
        keys=_REPORT,
    ),
    Command(
        name="status",
        does="show how far a directory has got, while its run is alive or after it crashed",
        about="For a JOB, also show which shards `datamat run` would make, and why. With --watch and --json, each "
        "change is an object on a line of its own.",
        add=_add_status,
        run=_status,
        python=(Materializer.status, read_status),
        keys=_STATUS,
    ),
    Command(
        name="verify",
        does="compare a finished directory with its manifest: every file and every record",
        add=_add_verify,
        run=_verify,
        python=(Materializer.verify, verify),
        keys=_VERIFIED,
    ),
    Command(
        name="repair",
        does="rewrite damaged offsets and sidecars; of a JOB, also shards, index and manifest",
        add=_add_repair,
        run=_repair,
        python=(Materializer.repair,),
        keys=_VERIFIED,
    ),
    Command(
        name="describe",
        does="show what a TFRecord, Parquet, tar or ArrayRecord file or a directory holds, whoever wrote it",
        add=_add_inspect,
        run=_inspect,
        python=(describe,),
        keys=_INSPECTION,
    ),
    Command(
        name="preview",
        does="draw samples of a finished directory into a PNG file",
        add=_add_preview,
        run=_preview,
        python=(load, ShardedDataset.preview, Materializer),
        keys=_PICTURE,
    ),
    Command(
        name="view",
        does="show a finished directory in a browser: as one page, or from a server on this machine",
        about="The page is one self-contained file; the server shows all samples, on 127.0.0.1 only, under a "
        "random path. With --serve and --json, the object is printed as soon as the server is up.",
        add=_add_view,
        run=_view,
        python=(view, viewing, Materializer),
        keys=_VIEW,
    ),
    Command(
        name="convert",
        does="rewrite a finished directory in another format or number of shards, without recomputing any sample",
        add=_add_convert,
        run=_convert,
        python=(convert, ShardOptions, WorkerOptions),
        keys=_REPORT,
    ),
    Command(
        name="merge",
        does="combine finished directories that were made separately into one, without rewriting any record",
        add=_add_merge,
        run=_merge,
        python=(merge,),
        keys=_MERGED,
    ),
    Command(
        name="export",
        does="write the files that other readers need beside the shards, if they are missing or wrong",
        add=_add_directory,
        run=_export,
        python=(export,),
        keys=_EXPORT,
    ),
    Command(
        name="serve",
        does="start a tf.data service",
        about=_ABOUT,
        add=_add_serve,
        run=_serve,
        python=(serving,),
        keys={"address": "address for `to_tf(service=...)`; printed as soon as the service is up"},
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        arguments: words of the command line; None takes those of the process.
    """
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with _console(options.command, as_json=options.json) as console:
            return _ended(options, console)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes what is left
        return PIPE_CLOSED


def _ended(options: argparse.Namespace, console: Console) -> int:
    """Run the command; show why it did not end well."""
    if "directory" in options and isinstance(options.directory, pathlib.Path) and not options.directory.is_dir():
        return console.fail(NOTHING_THERE, f"{options.directory} is not a directory; pass the output of a run")
    try:
        code: int = options.run(options, console)
    except (OptionError, OutputError) as error:
        return console.fail(NOTHING_THERE, error)
    except BrokenPipeError:
        raise
    except (DatamatError, OSError) as error:
        return console.fail(NOT_WELL, error)
    except KeyboardInterrupt:
        return console.fail(INTERRUPTED, KeyboardInterrupt("interrupted; the same command continues from here"))
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        return console.fail(TERMINATED, SystemExit("ended by SIGTERM; the same command continues from here"))
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about, _, codes = (__doc__ or "").partition("EXIT CODES\n")
    parser = argparse.ArgumentParser(
        prog="datamat",
        description=about,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"datamat {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        about = command.about or f"{command.does[0].upper()}{command.does[1:]}."
        sub = commands.add_parser(command.name, help=command.does, description=about)
        command.add(sub)
        sub.add_argument("--json", action="store_true", help="answer with one JSON object, and print nothing else")
        for place in sub._get_positional_actions():
            place.complete = shtab.FILE  # type: ignore[attr-defined]
        # Of arguments that nobody takes argparse says so with the usage of all commands.
        sub.set_defaults(run=command.run, refuse=sub.error)
    return parser
