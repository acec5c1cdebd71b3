"""The command line: what it prints, and the exit codes that scripts go by."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest
import sets

from datamat import Materializer, ShardOptions, WorkerOptions
from datamat.cli import main


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished directory."""
    folder = tmp_path_factory.mktemp("template")
    Materializer(
        sets.Pairs(),
        sets.make_pairs(folder / "source"),
        folder / "out",
        shards=ShardOptions(num_shards=2),
        workers=WorkerOptions(num_workers=1),
    ).run(progress=False)
    return folder / "out"


@pytest.fixture
def output(template, tmp_path):
    """A finished directory to damage."""
    return shutil.copytree(template, tmp_path / "out")


@pytest.mark.parametrize("command", [["status"], ["verify"], ["verify", "--deep"], ["repair"]])
def test_good_directory_gives_zero(output, capsys, command):
    """Whatever is asked of it."""
    assert main([*command, str(output)]) == 0

    assert f"{output}: " in (found := capsys.readouterr()).out
    assert found.err == ""


def test_damage_gives_one_and_is_named(output, capsys):
    """By `verify`; `repair` says how it is mended."""
    shard = next(output.glob("*-train-00001-*.tfrecord"))
    os.truncate(shard, 100)

    codes = [main(["verify", str(output)]), main(["repair", str(output)])]

    assert codes == [1, 1]
    assert f"{shard.name}: record 0 is cut off" in (found := capsys.readouterr().out)
    assert "give Materializer the arguments of the run and call repair()" in found


def test_repair_writes_offsets_without_the_source(output, template, capsys):
    """They are found again in their shard."""
    for path in output.glob("*.idx"):
        path.write_text("0 16\n")

    assert main(["repair", str(output)]) == 0

    assert capsys.readouterr().out.count("written anew from its shard") == 4
    assert sets.digests(output) == sets.digests(template)


def test_damaged_manifest_gives_one(output, capsys):
    """To every command."""
    (output / "manifest.json").write_bytes(b"\x80\x04N.")

    assert [main([command, str(output)]) for command in ("status", "verify", "repair")] == [1, 1, 1]
    assert "manifest" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["nowhere", "file", "other"])
def test_nothing_to_look_at_gives_two(tmp_path, capsys, place):
    """No such directory, no directory, not one of ours."""
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()

    codes = [main([command, str(tmp_path / place)]) for command in ("status", "verify", "repair")]

    assert codes == [2, 2, 2]
    assert "is not a directory" in (err := capsys.readouterr().err) or "holds no manifest.json" in err


def test_unfinished_run_gives_one(output, capsys):
    """`status` says how to go on."""
    (output / "manifest.json").unlink()

    assert main(["status", str(output)]) == 1
    assert "not finished" in capsys.readouterr().out
    assert main(["verify", str(output)]) == 2


@pytest.mark.parametrize("arguments", [[], ["clean", "x"], ["verify"], ["status", "x", "--deep"]])
def test_wrong_command_line_gives_two(arguments, capsys):
    """As every command of a system does."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    assert raised.value.code == 2 and "usage: datamat" in capsys.readouterr().err


def test_help_tells_the_exit_codes(capsys):
    """Scripts need them."""
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "exit codes:\n    0   all is well" in capsys.readouterr().out


def test_terminal_is_never_told_what_to_do(output, capsys):
    """Names of files and words of a ledger are text of others: no control character of theirs is printed."""
    (output / "pairs-\x1b[2J\r\nok\u202e.tfrecord").touch()
    with (output / ".datamat" / "ledger.jsonl").open("a") as ledger:
        ledger.write(
            '{"time": "2026-01-01T00:00:00.000Z", "run": "ab", "event": "run_started", "host": "\\u001b[31m\\u0007"}\n'
            '{"time": "2026-01-01T00:00:00.000Z", "run": "ab", "event": "run_failed", "message": "a\\nb\\u009b"}\n'
        )

    main(["verify", str(output)])
    main(["status", str(output)])
    main(["status", str(output / "\x1b[31m")])

    found = capsys.readouterr()
    assert all(letter.isprintable() for letter in (found.out + found.err).replace("\n", ""))
    assert "\\x1b[2J\\r\\nok\\u202e.tfrecord: not in the manifest" in found.out and "a\\nb\\x9b" in found.out


def test_it_runs_as_a_module_without_the_heavy_packages(output):
    """Asking how far a run is takes a moment."""
    code = (
        "import sys; from datamat.cli import main; code = main(['status', sys.argv[1]]); "
        "heavy = ('tensorflow', 'cv2', 'albumentations', 'pyarrow'); "
        "print([name for name in heavy if name in sys.modules]); sys.exit(code)"
    )

    found = subprocess.run([sys.executable, "-c", code, output], capture_output=True, text=True, check=False)

    assert found.returncode == 0 and found.stdout.endswith("[]\n"), found


def test_package_installs_the_command():
    """Under its name."""
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    assert project["scripts"] == {"datamat": f"{main.__module__}:{main.__name__}"}
