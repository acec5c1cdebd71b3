"""The command line: its output, and the exit codes that scripts rely on."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest
import small_pairs

from datamat import Materializer, ShardOptions, WorkerOptions
from datamat.cli import main


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished directory that tests only read."""
    folder = tmp_path_factory.mktemp("template")
    Materializer(
        small_pairs.Pairs(),
        small_pairs.make_pairs(folder / "source"),
        folder / "out",
        shards=ShardOptions(num_shards=2),
        workers=WorkerOptions(num_workers=1),
    ).run(progress=False)
    return folder / "out"


@pytest.fixture
def output(template, tmp_path):
    """A finished directory that a test may damage."""
    return shutil.copytree(template, tmp_path / "out")


@pytest.mark.parametrize("command", [["status"], ["verify"], ["verify", "--deep"], ["repair"]])
def test_good_directory_gives_zero(output, capsys, command):
    """Every command returns it."""
    assert main([*command, str(output)]) == 0

    assert f"{output}: " in (found := capsys.readouterr()).out
    assert found.err == ""


def test_damage_gives_one_and_is_named(output, capsys):
    """`verify` names it; `repair` says how to restore it."""
    shard = next(output.glob("*-train-00001-*.tfrecord"))
    os.truncate(shard, 100)

    codes = [main(["verify", str(output)]), main(["repair", str(output)])]

    assert codes == [1, 1]
    assert f"{shard.name}: record 0 is cut off" in (found := capsys.readouterr().out)
    assert "give Materializer the arguments of the run and call repair()" in found


def test_repair_writes_offsets_without_the_source(output, template, capsys):
    """The shards hold all that is needed."""
    for path in output.glob("*.idx"):
        path.write_text("0 16\n")

    assert main(["repair", str(output)]) == 0

    assert capsys.readouterr().out.count("rewritten from its shard") == 4
    assert small_pairs.digests(output) == small_pairs.digests(template)


def test_damaged_manifest_gives_one(output, capsys):
    """Every command returns it."""
    (output / "manifest.json").write_bytes(b"\x80\x04N.")

    assert [main([command, str(output)]) for command in ("status", "verify", "repair")] == [1, 1, 1]
    assert "manifest" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["nowhere", "file", "other"])
def test_directory_without_a_dataset_gives_two(tmp_path, capsys, place):
    """It is missing, no directory, or not written by datamat."""
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()

    codes = [main([command, str(tmp_path / place)]) for command in ("status", "verify", "repair")]

    assert codes == [2, 2, 2]
    assert "is not a directory" in (err := capsys.readouterr().err) or "holds no manifest.json" in err


def test_unfinished_run_gives_one(output, capsys):
    """`status` says how to continue."""
    (output / "manifest.json").unlink()

    assert main(["status", str(output)]) == 1
    assert "not finished" in capsys.readouterr().out
    assert main(["verify", str(output)]) == 2


@pytest.mark.parametrize("arguments", [[], ["clean", "x"], ["verify"], ["status", "x", "--deep"]])
def test_wrong_command_line_gives_two(arguments, capsys):
    """Other commands do the same."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    assert raised.value.code == 2 and "usage: datamat" in capsys.readouterr().err


def test_help_lists_the_exit_codes(capsys):
    """Scripts need them."""
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "exit codes:\n    0   all is well" in capsys.readouterr().out


def test_no_control_character_reaches_the_terminal(output, capsys):
    """Strangers may have written file names and the text of a ledger."""
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
    """A question about a run is answered at once."""
    code = (
        "import sys; from datamat.cli import main; code = main(['status', sys.argv[1]]); "
        "heavy = ('tensorflow', 'cv2', 'albumentations', 'pyarrow'); "
        "print([name for name in heavy if name in sys.modules]); sys.exit(code)"
    )

    found = subprocess.run([sys.executable, "-c", code, output], capture_output=True, text=True, check=False)

    assert found.returncode == 0 and found.stdout.endswith("[]\n"), found


def test_package_installs_the_command():
    """It has its own name."""
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

    assert project["scripts"] == {"datamat": f"{main.__module__}:{main.__name__}"}
