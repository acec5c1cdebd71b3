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
    datamat export DIR            write the files that TFDS, Hugging Face and other readers need next to the shards
    datamat convert DIR --format parquet --shards 16    rewrite it in another format or number of shards
    datamat merge A B --output C  combine finished directories into one, without rewriting any record
    datamat describe FILE         show what any TFRecord, Parquet, tar or ArrayRecord file holds
    datamat serve --num-workers 4 prepare batches in separate processes, for to_tf(tf=TfOptions(service=...))

A directory that is only read (status, verify, describe, preview, view, convert) may be a URL, as in s3://bucket/out.
Every command takes --json: standard output is then one JSON object.

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
import inspect
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import shtab

from datamat import __version__
from datamat.directory.describe import describe
from datamat.directory.files import printable
from datamat.directory.sidecars.exporting import export
from datamat.directory.verify import VerifyReport, verify
from datamat.errors import (
    DatamatError,
    InputError,
    OptionError,
    OutputError,
    ParallelError,
    count_of,
    kind_of,
    place_of,
)
from datamat.features import Feature
from datamat.folders.urls import is_url, without_secrets
from datamat.formats import format_names
from datamat.options import FOR_COMMANDS
from datamat.readers.dataset import ShardedDataset, load
from datamat.readers.tf.service import check_address, serving
from datamat.run.convert import convert
from datamat.run.jobs import NamedJob, find_job
from datamat.run.limits import signals_raised
from datamat.run.materializer import Materializer
from datamat.run.merge import merge
from datamat.run.repair import repair_without_source
from datamat.run.slurm import as_slurm_says
from datamat.run.status import State, Status, output_status
from datamat.run.status import status as read_status
from datamat.run.watch import watch
from datamat.values import frozen
from datamat.view.page import view
from datamat.view.server import viewing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from datamat.run.report import RunReport

OK, NOT_WELL, NOTHING_THERE = 0, 1, 2
INTERRUPTED, PIPE_CLOSED, TERMINATED = (128 + number for number in (2, 13, 15))  # as shells count signals

# ---------------------------------------------------------------- the console
#
# Answers of all commands, in words for people or as JSON.


class Console:
    """Shows the answer of a command, in words for people or as a JSON object for programs.

    Args:
        command: name of the command.
        as_json: whether to answer in JSON.
        out: where the answer goes.
    """

    def __init__(self, command: str, *, as_json: bool, out: TextIO) -> None:
        self.as_json = as_json
        self._command = command
        self._out = out
        self._height = 0  # of the text that the next one overwrites

    def answer(self, code: int, found: Any, text: str | None = None, *, error: bool = False, over: bool = False) -> int:
        """Show the answer; return its exit code.

        Args:
            code: exit code.
            found: the answer, whose attributes become JSON.
            text: the answer in words; None takes `str` of it.
            error: whether the words go to standard error.
            over: whether the words replace the last ones, in a terminal.
        """
        if over and self.is_terminal:
            self._draw_over(str(text))
        elif self.as_json:
            facts = {"command": self._command, "exit_code": code, "ok": code == OK, **_plain(found)}
            print(json.dumps(facts), file=self._out, flush=True)
        else:
            self.say(str(found) if text is None else text, error=error)
        return code

    def fail(self, code: int, error: BaseException) -> int:
        """Show why there is no answer; return the exit code."""
        text = str(error) + (place_of(error) if isinstance(error, DatamatError) else "")
        if isinstance(error, OSError) and error.strerror and error.filename is not None:  # as Unix programs say it
            text = f"{error.filename}: {error.strerror}"
        return self.answer(code, {"error": {"type": type(error).__name__, "message": text}}, text, error=True)

    def say(self, text: str, *, error: bool = False) -> None:
        """Print lines without control characters: file names and messages may come from others."""
        shown = "\n".join(map(printable, text.split("\n")))
        if error or self.as_json:
            sys.stderr.write(f"datamat: {shown}\n")
        else:
            print(shown, file=self._out, flush=True)

    def _draw_over(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        lines = [printable(line) for line in text.split("\n")]
        before = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        print(before + "\n".join(lines), file=self._out, flush=True)
        self._height = sum(max(len(line) - 1, 0) // width + 1 for line in lines)

    @property
    def is_terminal(self) -> bool:
        """Whether someone watches the answer as it comes."""
        return not self.as_json and self._out.isatty()


def _plain(value: Any) -> Any:
    """Return a value for JSON: for a dataclass, the fields, and the properties that are numbers or text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Feature):
        found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
        properties = [name for name, own in vars(type(value)).items() if isinstance(own, property)]
        told = {name: getattr(value, name) for name in properties if name[0] != "_"}
        return _plain({**found, **{name: inner for name, inner in told.items() if _is_plain(inner)}})
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and all(map(_is_plain, value)))


@contextlib.contextmanager
def _console(command: str, *, as_json: bool) -> Iterator[Console]:
    """Give a command its console; if that shows JSON, all other output goes to standard error.

    Jobs print, and so do their workers and libraries, even outside Python.
    """
    out = sys.stdout
    if not as_json:
        yield Console(command, as_json=False, out=out)
        return
    try:
        number = out.fileno()
    except (OSError, ValueError):  # something other than a file has replaced it, as in a test
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


# ---------------------------------------------------------------- options
#
# Each option is the parameter of that name in the Python call; options that are not given keep their defaults there.


def _json_object(given: str) -> dict[str, Any]:
    wanted = """want a JSON object, such as '{"anon": true}', or a file that holds one"""
    try:
        is_object = given.lstrip().startswith("{")
        found = json.loads(given if is_object else pathlib.Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given} cannot be read ({error.strerror}); {wanted}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error}); {wanted}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"it holds {kind_of(found)}; {wanted}")
    return found


def _number_or_text(given: str) -> float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(given)
    return given


def _place(given: str) -> pathlib.Path | str:
    return given if is_url(given) else pathlib.Path(given)


_FLAG = {"action": "store_true"}
_REPEATED = {"action": "append"}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    # what is made, or shown
    "format": {**_REPEATED, "metavar": "F", "help": f"{', '.join(format_names())}; repeatable (default: unchanged)"},
    "shards": {
        "type": _number_or_text,
        "metavar": "N|SIZE",
        "help": "shards in each split, or the size of each, as in 256MB (default: unchanged)",
    },
    "output": {"metavar": "OUT", "type": _place, "help": "what is written"},
    "name": {"help": "name of the new dataset (default: theirs, if they have the same)"},
    "split": {"metavar": "NAME", "help": "split to show (default: all)"},
    "count": {"type": int, "metavar": "N", "help": "samples to show, spread over the split"},
    "columns": {"type": int, "metavar": "N", "help": "samples in a row"},
    "opacity": {"type": float, "metavar": "X", "help": "of the masks, 0 to 1"},
    "records": {"type": int, "metavar": "N", "help": "how many records to show, from the first"},
    "num_samples": {"type": int, "metavar": "N", "help": "rows to process"},
    "deep": {**_FLAG, "help": "decode every record, pixels included"},
    "sample": {
        "type": float,
        "metavar": "X",
        "help": "of a JOB: also make this fraction of the rows again, and compare",
    },
    "failed": {**_FLAG, "help": "list the samples that were skipped or quarantined, and why"},
    # how a run goes
    "workers": {"type": int, "metavar": "N", "help": "worker processes (default: one per core)"},
    "executor": {"metavar": "ENGINE", "help": "`ray`, or the address of a Ray cluster or a Dask scheduler"},
    "errors": {
        "choices": ("raise", "skip", "quarantine"),
        "help": "what to do with a sample that fails (default: raise)",
    },
    "include": {**_REPEATED, "metavar": "PATTERN", "help": "make only shards whose names match; repeatable"},
    "exclude": {**_REPEATED, "metavar": "PATTERN", "help": "leave out shards whose names match; repeatable"},
    "task_index": {"type": int, "metavar": "I", "help": "number of this task, from 0 (default: Slurm's)"},
    "num_tasks": {"type": int, "metavar": "N", "help": "number of tasks (default: Slurm's)"},
    "existing": {
        "choices": ("update", "append", "replace", "refuse"),
        "help": "update: rebuild what changed, stop if the source lacks finished rows; append: make new shards of the "
        "rows that are not there, and no others; replace: the source alone decides; refuse: stop before any finished "
        "shard is replaced",
    },
    "retry_failed": {**_FLAG, "help": "also try again the rows that failed in earlier runs"},
    "deadline": {
        "type": _number_or_text,
        "metavar": "T",
        "help": "stop cleanly within this time, as in 23h30m, or within so many seconds, with exit code 1",
    },
    "max_disk": {"metavar": "SIZE", "help": "stop before the output grows larger, as in 20GB, with exit code 1"},
    "scratch": {
        "metavar": "FOLDER",
        "help": "where shards are made for an output that is a URL, and files of a source that is one wait (default: "
        "in TMPDIR)",
    },
    # what is behind a URL
    "storage_options": {
        "type": _json_object,
        "metavar": "JSON|FILE",
        "help": "options for fsspec that go with a URL: a JSON object, or a file that holds one (default: from the "
        "environment); others on this machine can see a command line, so secrets belong in the environment or a file",
    },
    "source_options": {
        "type": _json_object,
        "metavar": "JSON|FILE",
        "help": "the same for DIR alone, if OUT is a URL in another store",
    },
    "cache_dir": {
        "metavar": "FOLDER",
        "help": "where fetched shards of a URL go, to be used again (default: datamat in your cache folder; convert: a "
        "temporary folder)",
    },
    # servers
    "serve": {**_FLAG, "help": "serve all samples, and print the address; Ctrl-C ends it"},
    "num_workers": {"type": int, "metavar": "N", "help": "processes that prepare batches"},
    "host": {"help": "name under which consumers reach this machine"},
    "port": {"type": int, "help": "port of the server (default: any that is free)"},
    "restarts": {
        "type": int,
        "metavar": "N",
        "help": "how often to restart when a worker dies; consumers then get an error instead of waiting (default: 3)",
    },
    # while it goes on
    "watch": {**_FLAG, "help": "show it until no process is at work, with the rate and the time that is left"},
    "interval": {"type": float, "metavar": "S", "help": "seconds between checks (default: 2)"},
    "progress": {
        "action": argparse.BooleanOptionalAction,
        "help": "show a progress bar (default: if standard error is a terminal)",
    },
}

Target: TypeAlias = "NamedJob | pathlib.Path | str"
Options: TypeAlias = dict[str, Any]

_JOB = (
    "MODULE:JOB, a Materializer, a pair of it and a dict of run options, or a function that returns either, in a "
    "module that can be imported here; or FILE.toml"
)
_TARGETS: Mapping[str, str] = {
    "": "",
    "DIR": "the output of a run",
    "DIR ...": "the outputs of runs",
    "DIR|JOB": f"the output of a run; or {_JOB}",
    "DIR|URL": "the output of a run, or its URL",
    "DIR|URL|JOB": f"the output of a run, or its URL; or {_JOB}",
    "FILE|URL": "a file of records, or the output of a run",
    "JOB": _JOB,
}
"""The target of a command, as its usage names it, and in words."""


def _find_target(text: str, kinds: str) -> Target:
    """Return the job, path or URL that an argument names.

    Raises:
        OutputError: it is not of a kind that the command takes.
        OptionError: it names a job that does not exist.
    """
    path = pathlib.Path(text)
    if kinds != "JOB" and is_url(text):
        return text
    if "FILE" in kinds or ("DIR" in kinds and path.is_dir()):
        return path
    is_job = path.suffix == ".toml" or (":" in text and os.sep not in text.partition(":")[0])
    if kinds == "JOB" or ("JOB" in kinds and is_job):
        job = find_job(text)
        job.options.setdefault("progress", sys.stderr.isatty())
        return job
    raise OutputError(f"{path} is not a directory; pass the output of a run")


def _name_of(target: Target) -> str:
    """Return the last name of a path or URL, after which files about it are named."""
    if isinstance(target, pathlib.Path):
        return target.resolve().name
    return without_secrets(str(target)).partition("?")[0].rstrip("/").rpartition("/")[2]


# ---------------------------------------------------------------- jobs


def _answer_run(report: RunReport, console: Console, text: str | None = None) -> int:
    return console.answer(OK if report.is_complete else NOT_WELL, report, text, error=not report.is_complete)


def _run(options: Options, console: Console, job: NamedJob) -> int:
    chosen = {**job.options, **options}
    with as_slurm_says(chosen) as completed:
        report: RunReport = job.call("run", **completed)
    if console.is_terminal and chosen["progress"] and sys.stderr.isatty():
        return OK if report.is_complete else NOT_WELL  # the progress bar has shown the summary
    return _answer_run(report, console)


def _estimate(options: Options, console: Console, job: NamedJob) -> int:
    found = job.call("estimate", **options)
    return console.answer(OK if found.fits else NOT_WELL, found)


# ---------------------------------------------------------------- outputs


_IN_STORE = "`datamat repair JOB`, or repair() of its Materializer, rebuilds what is damaged"
_IN_PYTHON = "the rest needs the source: name the job instead of the directory, or call repair() of its Materializer"
_STATES: dict[State, int] = {
    "complete": OK,
    "running": OK,
    "unfinished": NOT_WELL,
    "damaged": NOT_WELL,
    "empty": NOTHING_THERE,
}


def _status(options: Options, console: Console, target: Target) -> int:
    own = {name: options.pop(name) for name in ("failed", "watch", "interval") if name in options}
    if isinstance(target, NamedJob):
        look: Callable[[], Status] = functools.partial(target.call, "status")
        glance = functools.partial(output_status, target.materializer._job)
    else:
        look = glance = functools.partial(read_status, target, **options)
    if "failed" in own:
        found = glance()
        text = "\n".join(f"{failure.shard}: {failure}" for failure in found.failures)
        return console.answer(_STATES[found.state], found, text or f"{found.output}: no sample failed")
    if "watch" not in own:
        return _answer_status(look(), console)
    code, shown = OK, ""
    for status, pace in watch(glance, every_s=own.get("interval", 2.0)):
        if console.is_terminal or str(status) != shown:  # logs show each change once
            shown = str(status)
            code = _answer_status(status, console, "\n".join(filter(None, [shown, pace and f"  {pace}"])))
    return code


def _answer_status(status: Status, console: Console, text: str | None = None) -> int:
    return console.answer(_STATES[status.state], status, text, over=text is not None)


def _verify(options: Options, console: Console, target: Target) -> int:
    if isinstance(target, NamedJob):
        return _answer_verify(target.call("verify", **options), console)
    if "sample" in options:
        raise OptionError("--sample makes records again, which takes the source; name the JOB instead of the directory")
    return _answer_verify(verify(target, **options), console, _IN_STORE if isinstance(target, str) else "")


def _repair(options: Options, console: Console, target: Target) -> int:
    if isinstance(target, NamedJob):
        target.call("repair", **options)
        return _answer_verify(target.call("verify"), console)
    if isinstance(target, str):
        raise OptionError(
            f"repair: {without_secrets(target)} is in a store, where shards are made from the source; name its JOB "
            "instead of the URL, or call repair() of its Materializer"
        )
    done, report = repair_without_source(target)
    return _answer_verify(report, console, _IN_PYTHON, done)


def _answer_verify(report: VerifyReport, console: Console, note: str = "", done: Sequence[str] = ()) -> int:
    text = "\n".join([*done, str(report), *([note] if note and not report.ok else [])])
    return console.answer(OK if report.ok else NOT_WELL, report, text)


def _describe(options: Options, console: Console, place: pathlib.Path | str) -> int:
    try:
        found = describe(place, **options)
    except (FileNotFoundError, InputError) as error:
        return console.fail(NOTHING_THERE, error)
    return console.answer(OK if found.ok else NOT_WELL, found)


def _preview(options: Options, console: Console, place: pathlib.Path | str) -> int:
    output = options.pop("output", None) or pathlib.Path(f"{_name_of(place)}-preview.png")
    shown = {name: options.pop(name) for name in ("count", "columns", "opacity") if name in options}
    load(place, **options).preview(**shown).save(output)
    return console.answer(OK, {"output": output}, str(output))


def _view(options: Options, console: Console, place: pathlib.Path | str) -> int:
    output = options.pop("output", None) or pathlib.Path(f"{_name_of(place)}.html")
    is_served = options.pop("serve", False)
    options.pop("count" if is_served else "port", None)
    if not is_served:
        view(place, **options).save(output)
        return console.answer(OK, {"output": output}, str(output))
    served = viewing(place, **options)
    with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised(), served as server:
        console.answer(OK, {"address": server.url}, server.url)  # while it serves
        server.wait()
    return OK  # a request to end is a success


def _convert(options: Options, console: Console, place: pathlib.Path | str) -> int:
    output = options.pop("output", None) or _beside(place, options)
    report = convert(place, output, **{"progress": sys.stderr.isatty(), **options})
    return _answer_run(report, console, str(output) if report.is_complete else None)


def _beside(place: pathlib.Path | str, options: Options) -> pathlib.Path:
    """Return where the new directory goes by default: next to a folder, or here for a URL."""
    folder = place.resolve() if isinstance(place, pathlib.Path) else pathlib.Path(_name_of(place))
    return folder.with_name("-".join([folder.name, *(options.get("format") or [f"{options.get('shards')}-shards"])]))


def _merge(options: Options, console: Console, *places: pathlib.Path | str) -> int:
    output = options.pop("output", None)
    if output is None:
        raise OptionError("merge: --output is missing; name the new directory")
    manifest = merge(places, output, **options)
    return console.answer(
        OK, manifest, f"{output}: {count_of(len(manifest.shards), 'shard')}, {count_of(manifest.num_records, 'record')}"
    )


def _serve(options: Options, console: Console) -> int:
    restarts = max(options.pop("restarts", 3), 0)
    with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised():  # a request to end is a success
        for restarts_left in range(restarts, -1, -1):
            with serving(**options) as service:
                options["port"] = check_address(service.address)[1]
                if restarts_left == restarts or not console.as_json:
                    console.answer(OK, {"address": service.address}, service.address)  # while it serves
                try:
                    service.wait()
                except ParallelError as error:
                    if not restarts_left:
                        raise
                    console.say(f"{error}; restarting", error=True)
    return OK


# ---------------------------------------------------------------- the table of commands


@frozen(kw_only=True)
class Command:
    """One command.

    Attributes:
        name: the word of the command line.
        does: what it does, in one line.
        about: further text for its `--help`, or "".
        target: its target: a key of `_TARGETS`.
        own: names of its options besides those of Python.
        run: called with the given options, the console and each target; returns the exit code.
        python: the function or class that does the same in Python; its parameters become options.
        answers: the answer of `--json`: its keys, or a class whose attributes are the keys.
    """

    name: str
    does: str
    about: str = ""
    target: str
    own: tuple[str, ...] = ()
    run: Callable[..., int]
    python: tuple[Callable[..., Any], ...]
    answers: str

    @property
    def options(self) -> tuple[str, ...]:
        """Names of its options, in the order of the table."""
        known = {name for call in self.python for name in inspect.signature(call).parameters}
        return tuple(name for name in _OPTIONS if name in known or name in self.own)


COMMANDS = (
    Command(
        name="run",
        does="make what is missing in the output of a job",
        about="""\
Make what is missing in the output of a job. MODULE:JOB names a Materializer, a pair of it and a dict of run options, or
a function without arguments that returns either; the module is imported as a program in this folder would import it.
FILE.toml holds the arguments of a Materializer by name, and a table [run] with those of its run; shards, workers and
errors may be tables with the arguments of ShardOptions, WorkerOptions and ErrorPolicy; transform, logger, sidecars and
hooks are named as MODULE:NAME; so are executor, unless it is "ray" or an address, and groups, unless it names a field.
Options of the command line win. With --task-index and --num-tasks, or in a Slurm array job, several such processes make
one output together, on a shared file system or in a bucket (S3, Google's or Azure's).""",
        target="JOB",
        run=_run,
        python=(Materializer.run,),
        answers="RunReport",
    ),
    Command(
        name="plan",
        does="show which rows of a job go to which shard; nothing is written",
        target="JOB",
        run=lambda options, console, job: console.answer(OK, job.call("plan", **options)),
        python=(Materializer.plan,),
        answers="Plan",
    ),
    Command(
        name="estimate",
        does="process a few rows of a job, and estimate the time, disk space and memory of the run; nothing is written",
        target="JOB",
        run=_estimate,
        python=(Materializer.estimate,),
        answers="Estimate",
    ),
    Command(
        name="finalize",
        does="write the manifest for what the tasks that share an output have made; make nothing else",
        target="JOB",
        run=lambda options, console, job: _answer_run(job.call("finalize", **options), console),
        python=(Materializer.finalize,),
        answers="RunReport",
    ),
    Command(
        name="status",
        does="show how far a directory has got, while its run is alive or after it crashed",
        about="For a JOB, also show which shards `datamat run` would make, and why. With --watch and --json, each "
        "change is an object on a line of its own.",
        target="DIR|URL|JOB",
        own=("failed", "watch", "interval"),
        run=_status,
        python=(Materializer.status, read_status),
        answers="Status",
    ),
    Command(
        name="verify",
        does="compare a finished directory with its manifest: every file and every record",
        target="DIR|URL|JOB",
        run=_verify,
        python=(Materializer.verify, verify),
        answers="VerifyReport",
    ),
    Command(
        name="repair",
        does="rewrite damaged offsets and sidecars; of a JOB, also shards, index and manifest",
        target="DIR|JOB",
        run=_repair,
        python=(Materializer.repair,),
        answers="VerifyReport",
    ),
    Command(
        name="describe",
        does="show what a TFRecord, Parquet, tar or ArrayRecord file or a directory holds, whoever wrote it",
        target="FILE|URL",
        run=_describe,
        python=(describe,),
        answers="Description",
    ),
    Command(
        name="preview",
        does="draw samples of a finished directory into a PNG file (default: DIR-preview.png, here)",
        target="DIR|URL",
        own=("output", "split", "storage_options", "cache_dir"),
        run=_preview,
        python=(ShardedDataset.preview,),
        answers="`output`",
    ),
    Command(
        name="view",
        does="show a finished directory in a browser: as one page, or from a server on this machine",
        about="The page is one self-contained file (default: DIR.html, here); the server shows all samples, on "
        "127.0.0.1 only, under a random path. With --serve and --json, the object is printed as soon as the server is "
        "up.",
        target="DIR|URL",
        own=("output", "serve"),
        run=_view,
        python=(view, viewing),
        answers="`output`, or with --serve `address`",
    ),
    Command(
        name="convert",
        does="rewrite a finished directory in another format or number of shards, without recomputing any sample",
        about="Rewrite a finished directory in another format or number of shards, without recomputing any sample. "
        "Without --output, the new directory is DIR-FORMAT, or DIR-N-shards if the format is unchanged.",
        target="DIR|URL",
        run=_convert,
        python=(convert,),
        answers="RunReport",
    ),
    Command(
        name="merge",
        does="combine finished directories that were made separately into one, without rewriting any record",
        target="DIR ...",
        run=_merge,
        python=(merge,),
        answers="Manifest",
    ),
    Command(
        name="export",
        does="write the files that other readers need next to the shards, if they are missing or wrong",
        target="DIR",
        run=lambda options, console, folder: console.answer(OK, export(folder, **options)),
        python=(export,),
        answers="ExportReport",
    ),
    Command(
        name="serve",
        does="start a tf.data service",
        about="""\
Start a dispatcher and workers that prepare batches for `to_tf(tf=TfOptions(service="grpc://HOST:PORT"))`, print the
address, and serve until Ctrl-C or SIGTERM. Consumers on other hosts need --host. There is no authentication: anyone who
can reach the ports can make the workers read and write files, so use it only on a network that you trust.""",
        target="",
        own=("restarts",),
        run=_serve,
        python=(serving,),
        answers="`address`, printed as soon as the service is up",
    ),
)


_OF_JOB = "a JOB has its own: give its Materializer storage_options={...}, or set the environment"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        arguments: words of the command line; None takes those of the process.
    """
    parsed, unknown = build_parser().parse_known_args(arguments)
    given = vars(parsed)
    if unknown:
        hint = f"; {_OF_JOB}" if "--storage-options" in " ".join(unknown) else ""
        given["parser"].error(
            f"unrecognized arguments: {' '.join(unknown)}{hint}"
        )  # argparse shows the usage of all commands
    before = FOR_COMMANDS.set(True)
    try:
        with _console(given["called"].name, as_json=given["json"]) as console:
            return _ended(given, console)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes what is left
        return PIPE_CLOSED
    finally:
        FOR_COMMANDS.reset(before)


def _ended(given: Mapping[str, Any], console: Console) -> int:
    """Run the command; show why it failed."""
    command: Command = given["called"]
    options = {name: given[name] for name in command.options if name in given}
    try:
        targets = [_find_target(text, command.target) for text in given["targets"]]
        if "storage_options" in options and isinstance(targets[0], NamedJob):
            raise OptionError(f"--storage-options go with a URL; {_OF_JOB}")
        return command.run(options, console, *targets)
    except (OptionError, OutputError) as error:
        return console.fail(NOTHING_THERE, error)
    except BrokenPipeError:
        raise
    except (DatamatError, OSError) as error:
        return console.fail(NOT_WELL, error)
    except Exception as error:  # from a job, whose lines a traceback shows
        if not given["json"]:
            raise
        return console.fail(NOT_WELL, error)
    except KeyboardInterrupt:
        # CPython ends with SIGINT, whatever we return, if it was raised within code that `exec` runs, as dataclasses
        # do.
        exec("")  # noqa: S102 -- running more code clears that: run_eval_code_obj in Python/pythonrun.c
        return console.fail(INTERRUPTED, KeyboardInterrupt("interrupted; the same command continues from here"))
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        return console.fail(TERMINATED, SystemExit("ended by SIGTERM; the same command continues from here"))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    summary, _, codes = (__doc__ or "").partition("EXIT CODES\n")
    parser = argparse.ArgumentParser(
        prog="datamat",
        description=summary,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"datamat {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        more = command.about or f"{command.does[0].upper()}{command.does[1:]}."
        sub = commands.add_parser(command.name, help=command.does, description=more)
        sub.set_defaults(called=command, parser=sub, targets=())
        if command.target:
            metavar, _, several = command.target.partition(" ")
            about: dict[str, Any] = {"metavar": metavar, "nargs": "+" if several else 1}
            place = sub.add_argument("targets", help=_TARGETS[command.target], **about)
            place.complete = shtab.FILE  # type: ignore[attr-defined]  # as shtab expects
        for name in command.options:
            about = {**_OPTIONS[name], "help": f"{_OPTIONS[name]['help']}{_default(command, name)}"}
            sub.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **about)
        sub.add_argument("--json", action="store_true", help="answer with one JSON object, and print nothing else")
    return parser


def _default(command: Command, name: str) -> str:
    """Return the text about an option's default in Python for its help, if that is a number or a word."""
    for call in command.python:
        default = getattr(inspect.signature(call).parameters.get(name), "default", None)
        if default and isinstance(default, int | float | str) and "(default" not in str(_OPTIONS[name]["help"]):
            return f" (default: {default})"
    return ""
