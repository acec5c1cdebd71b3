"""Makes the page about the commands: `python docs/pages.py` writes it, and a test compares it with the code."""

from __future__ import annotations

import argparse
import pathlib
import re

from datamat.cli import COMMANDS, Command, build_parser

FOLDER = pathlib.Path(__file__).parent

_MADE = "<!-- From here on: made by"
_ERRORS_OF_JOBS = """
If a job raises an error of its own, such as `ImportError`, the command prints its traceback and ends with
1; with `--json`, it prints an object with the `error`.
"""


def _prose(name: str) -> str:
    """Return what is written by hand in a page, with the line that ends it."""
    before, mark, after = (FOLDER / name).read_text(encoding="utf-8").partition(_MADE)
    return before + mark + after.partition("\n")[0] + "\n"


def command_line() -> str:
    """Return the page about the commands."""
    parser = build_parser()
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    codes = re.split(
        r"\s*^ {4}(?=\d)", (parser.epilog or "").partition("\n")[2], flags=re.MULTILINE
    )[1:]
    rows = [
        f"| {code.split(None, 1)[0]} | {_line(code.split(None, 1)[1])} |"
        for code in codes
    ]
    sections = [
        _section(command, commands.choices[command.name]) for command in COMMANDS
    ]
    table = "\n".join(["| code | meaning |", "| --- | --- |", *rows, _ERRORS_OF_JOBS])
    return "\n".join(
        [
            _prose("command-line.md"),
            "## Exit codes\n",
            table,
            "## Commands\n",
            "\n\n".join(sections),
            "",
        ]
    )


def _section(command: Command, parser: argparse.ArgumentParser) -> str:
    usage = _line(
        " ".join(
            [
                action.metavar or action.dest
                for action in parser._actions
                if not action.option_strings
            ]
        )
    )
    lines = [
        f"### datamat {command.name} {usage}".rstrip().replace("\\|", "|"),
        "",
        _line(parser.description or ""),
        "",
    ]
    names = ", ".join(f"`{call.__qualname__}`" for call in command.python)
    lines += [f"In Python: {names}.", ""]
    lines += ["| argument | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if "-h" not in action.option_strings:
            lines.append(f"| {_argument(action)} | {_line(action.help or '')} |")
    keys = (
        command.answers if "`" in command.answers else f"those of `{command.answers}`"
    )
    return "\n".join([*lines, "", f"Keys of `--json`: {keys}."])


def _argument(action: argparse.Action) -> str:
    names = action.option_strings or [
        action.metavar or "|".join(action.choices or ()) or action.dest
    ]
    value = ""
    if action.option_strings and action.nargs != 0:
        value = " " + (
            action.metavar
            or "|".join(map(str, action.choices or ()))
            or action.dest.upper()
        )
    return "`" + ", ".join(f"{name}{value}" for name in names).replace("|", "\\|") + "`"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    (FOLDER / "command-line.md").write_text(command_line(), encoding="utf-8")
