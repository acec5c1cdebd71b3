"""Jobs by name, as on the command line: MODULE:JOB, or a TOML file with the arguments.

A job is a `Materializer` and options for its `run`. A module names one by a `Materializer`, a pair of it and a dict of
run options, or a function that returns either; a file has the arguments of the `Materializer`, and a table `run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import pathlib
import sys
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from datamat.errors import OptionError
from datamat.folders.urls import is_url, without_secrets
from datamat.options import ErrorPolicy, RunKeywords, ShardOptions, WorkerOptions
from datamat.run.materializer import Materializer
from datamat.run.report import RunReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

RUN_OPTIONS = tuple(RunKeywords.__annotations__)
"""The names of run options in a file or a job's dict."""

_WANTED = "want a Materializer, a pair of it and a dict of run options, or a function that returns one of them"
_HOW = "want MODULE:JOB, as in jobs:camvid for `camvid` in jobs.py, or the name of a TOML file"
_TABLES: dict[str, type] = {"shards": ShardOptions, "workers": WorkerOptions, "errors": ErrorPolicy}
# Arguments that a file cannot contain, only name.
_NAMED = ("transform", "groups", "sidecars", "executor", "hooks", "logger")


class NamedJob(NamedTuple):
    """A job found by its name, with options for its `run`."""

    materializer: Materializer
    options: dict[str, Any]

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the `Materializer` with the job's options that it accepts; `given` ones take precedence."""
        called, chosen = getattr(self.materializer, method), {**self.options, **given}
        for name, field in (("workers", "num_workers"), ("errors", "action")):  # keeps their other limits
            whole = self.options.get(name)
            if isinstance(whole, (WorkerOptions, ErrorPolicy)) and isinstance(given.get(name), int | str):
                chosen[name] = dataclasses.replace(whole, **{field: given[name]})
        return called(**{name: chosen[name] for name in inspect.signature(called).parameters.keys() & chosen.keys()})


def find_job(name: str) -> NamedJob:
    """Return the job named by "module:job" or a TOML file, and its run options.

    The module must be importable from the current folder; paths in a file are relative to that folder.

    Raises:
        OptionError: there is no such job, or the name stands for something else.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    if is_url(name):
        raise OptionError(f"{without_secrets(name)} is a URL, not a JOB; {_HOW}, whose output may be a URL")
    if name.endswith(".toml"):
        return _job_of_file(pathlib.Path(name))
    if not all(name.partition(":")):
        raise OptionError(f"{name!r} does not name a job; {_HOW}")
    found = _find_object(name, _WANTED)
    if callable(found) and not isinstance(found, Materializer):
        if needed := _needed_arguments(found):
            raise OptionError(
                f"{name} needs arguments ({', '.join(needed)}), and a JOB is called without any; give them defaults, "
                "or name a function that calls it"
            )
        found = found()
    made, options = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(made, Materializer) or not isinstance(options, dict):
        ran = "the report of a run that has already taken place, " if isinstance(made, RunReport) else ""
        raise OptionError(f"{name} gives {ran}{found!r}; {_WANTED}")
    for option in options:
        _refuse_unknown(f"{name}: option {option!r}", option, RUN_OPTIONS, "Materializer.run")
    return NamedJob(made, {**options})


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the required arguments of a function; [] if Python does not know its signature."""
    with contextlib.suppress(TypeError, ValueError):
        taken = inspect.signature(function).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [one.name for one in taken if one.default is one.empty and one.kind not in variable]
    return []


def _find_object(name: str, wanted: str) -> Any:
    """Return the object named by "module:name".

    Raises:
        OptionError: there is no such module, or it has no such name.
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


def _job_of_file(path: pathlib.Path) -> NamedJob:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror}); want a TOML file of arguments") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not valid TOML ({error})") from error
    run = given.pop("run", {})
    if not isinstance(run, dict):
        raise OptionError(f"{path}: run is {run!r}; want a table [run] of run options")
    for name in given.keys() & {*RUN_OPTIONS}:
        raise OptionError(f"{path}: {name} is an option of run; move it into the table [run]")
    dataset = inspect.signature(Materializer).parameters
    options = _arguments(path, "run.", run, RUN_OPTIONS, "Materializer.run")
    return NamedJob(Materializer(**_arguments(path, "", given, dataset, "Materializer")), options)


def _arguments(
    path: pathlib.Path, table: str, given: Mapping[str, Any], known: Collection[str], taker: str
) -> dict[str, Any]:
    """Return the arguments in a table of a file, as Python objects."""
    arguments = {}
    for name, value in given.items():
        _refuse_unknown(f"{path}: {table}{name}", name, known, taker)
        if (kind := _TABLES.get(name)) and isinstance(value, dict):
            for option in value:
                taken = inspect.signature(kind).parameters
                _refuse_unknown(f"{path}: {table}{name}.{option}", option, taken, kind.__name__)
            arguments[name] = kind(**value)
        else:
            arguments[name] = _named_objects(path, table + name, value) if name in _NAMED else value
    return arguments


def _refuse_unknown(place: str, name: str, known: Collection[str], taker: str) -> None:
    if name not in known:
        raise OptionError(f"{place} is not an argument of {taker}, which takes {', '.join(known)}")


def _named_objects(path: pathlib.Path, argument: str, value: Any) -> Any:
    """Return the object named by MODULE:NAME, also in a list; "ray", an address or a field name stays unchanged."""
    if isinstance(value, list):
        return [_named_objects(path, argument, inner) for inner in value]
    if not isinstance(value, str):
        return value
    if argument in {"groups", "run.executor"} and (":" not in value or "://" in value):
        return value
    if ":" not in value:
        raise OptionError(
            f"{path}: {argument} is {value!r}; want MODULE:NAME, as in jobs:augment for `augment` in jobs.py"
        )
    return _find_object(value, f"{path} names it as its {argument}; name what is in the module")
