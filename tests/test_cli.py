"""The command line: its output, and the exit codes that scripts rely on."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys

import pytest
import small_pairs

import datamat
from datamat import IncompleteRunError, load, verify
from datamat.cli import COMMANDS, main

pytestmark = pytest.mark.timeout(300)

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished directory that tests only read."""
    folder = tmp_path_factory.mktemp("template")
    small_pairs.job(small_pairs.make_pairs(folder / "source"), folder / "out").run(progress=False)
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
    assert "name the job instead of the directory" in found


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


def test_file_that_is_not_there_gives_two(tmp_path, capsys):
    assert main(["describe", f"{tmp_path}/nothing"]) == 2
    assert f"datamat: {tmp_path}/nothing is not a file of records, and has no manifest.json" in capsys.readouterr().err


def test_json_has_the_error_of_a_job(tmp_path, capsys, monkeypatch):
    """Whatever it raises: a program reads one object."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs_that_raise.py").write_text("def job():\n    raise RuntimeError('no disk')\n")

    code, found = _json(capsys, "run", "jobs_that_raise:job")

    assert code == 1 and found["error"] == {"type": "RuntimeError", "message": "no disk"}
    with pytest.raises(RuntimeError, match="no disk"):
        main(["run", "jobs_that_raise:job"])


def test_error_in_the_module_of_a_job_names_its_line(tmp_path, capsys, monkeypatch):
    """It may be any of a hundred declarations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs_of_a_line.py").write_text("import datamat\n\nlabel = datamat.ClassLabel(names=('a', 'a'))\n")

    assert main(["plan", "jobs_of_a_line:job"]) == 1
    assert "a class name appears twice in" in (told := capsys.readouterr().err)
    assert told.endswith("(in <module>, jobs_of_a_line.py:3)\n")


def test_unfinished_run_gives_one(output, capsys):
    """`status` says how to continue."""
    (output / "manifest.json").unlink()

    assert main(["status", str(output)]) == 1
    assert "not finished" in capsys.readouterr().out
    assert main(["verify", str(output)]) == 2


def test_deadline_is_in_seconds_where_it_has_no_unit(pair, capfd):
    """As in Python."""
    assert _json(capfd, "run", "pair_jobs:job", "--include", "*", "--deadline", "0.001")[1]["stopped"] == "deadline"
    assert main(["run", "pair_jobs:job", "--include", "*", "--deadline", "3600"]) == 0


@pytest.mark.parametrize("arguments", [[], ["clean", "x"], ["verify"], ["status", "x", "--deep"]])
def test_wrong_command_line_gives_two(arguments, capsys):
    """Other commands do the same."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    assert raised.value.code == 2 and "usage: datamat" in capsys.readouterr().err


def test_usage_of_the_command_follows_an_argument_that_it_does_not_take(capsys):
    """`convert DIR OUT` is what other tools take."""
    with pytest.raises(SystemExit):
        main(["convert", "x", "y"])

    said = capsys.readouterr().err
    assert "usage: datamat convert" in said and "--output OUT" in said and "unrecognized arguments: y" in said


def test_help_lists_the_exit_codes(capsys):
    """Scripts need them."""
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "exit codes:\n    0   all is well" in capsys.readouterr().out


def test_version_is_that_of_the_package():
    """`python -m datamat` is the command, too."""
    said = subprocess.run([sys.executable, "-m", "datamat", "--version"], capture_output=True, text=True, check=True)

    assert said.stdout == f"datamat {datamat.__version__}\n"


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


# ---------------------------------------------------------------- jobs


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A folder with a module and files that name jobs; the current one."""
    source = small_pairs.make_pairs(tmp_path / "source")
    (tmp_path / "cli_jobs.py").write_text(
        "import os, small_pairs\n"
        "os.write(1, b'printed below Python\\n')\n"
        "print('printed')\n\n"
        "def augment(sample, rng):\n    return small_pairs.jitter(sample, rng)\n\n"
        f"def build():\n    return small_pairs.job({str(source)!r}, 'out').pair\n"
    )
    (tmp_path / "job.toml").write_text(
        'writer = "small_pairs:Pairs"\nsource = "source"\noutput = "out"\ncopies = {train = 2}\n'
        'transform = "cli_jobs:augment"\n'
        '[shards]\nnum_shards = 2\n[run]\nerrors = "skip"\nworkers = {num_workers = 1}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("cli_jobs", None)


def _json(capfd, *arguments):
    """Run a command with `--json`; return its exit code and the one object on standard output."""
    capfd.readouterr()
    code = main([*map(str, arguments), "--json"])
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found.pop("command"), found.pop("exit_code"), found.pop("ok")) == (arguments[0], code, code == 0)
    return code, found


def test_json_of_each_command_has_the_attributes_of_its_object_and_nothing_else_is_printed(jobs, capfd):
    """This holds for jobs that print, in Python and below it."""
    steps = [
        ("plan", "cli_jobs:build"),
        ("estimate", "cli_jobs:build", "--num-samples", 2),
        ("run", "cli_jobs:build"),
        ("finalize", "cli_jobs:build"),
        ("status", "out"),
        ("verify", "out"),
        ("repair", "out"),
        ("describe", "out"),
        ("preview", "out"),
        ("convert", "out", "--shards", 1, "--output", "one", "--workers", 1),
        ("export", "out"),
    ]
    answers = {command.name: command.answers for command in COMMANDS}

    for step in steps:
        code, found = _json(capfd, *step)
        rooms = [module for name, module in sys.modules.items() if name.startswith("datamat.")]
        wanted = next((vars(room)[answers[step[0]]] for room in rooms if answers[step[0]] in vars(room)), None)
        named = {"output"} if wanted is None else {*dir(wanted), *wanted.__dataclass_fields__}
        assert code == 0 and found and set(found) <= named - {"timeline"}, step

    assert set(answers) - {step[0] for step in steps} == {"merge", "serve", "view"}  # tested with what they show


def test_json_holds_what_the_objects_hold(jobs, capfd):
    """Those inside, too: the shards of a plan with their parts, the counts of a status."""
    plan, status = small_pairs.job("source", "out").plan(), datamat.status("out")

    assert _json(capfd, "status", "cli_jobs:build")[1]["done"] == dataclasses.asdict(status.done)
    _, found = _json(capfd, "plan", "cli_jobs:build")
    assert (found["num_rows"], len(found["shards"])) == (plan.num_rows, len(plan.shards))
    assert found["shards"][0]["num_rows"] == plan.shards[0].num_rows
    assert found["shards"][0]["parts"] == [{**dataclasses.asdict(part), "removed": []} for part in plan.shards[0].parts]


def test_every_run_option_that_a_word_can_say_has_a_flag():
    """What has none comes with the job."""
    (run,) = (command for command in COMMANDS if command.name == "run")

    assert {*inspect.signature(datamat.Materializer.run).parameters} - {*run.options} == {"self", "hooks", "logger"}


def test_json_says_why_there_is_no_answer(output, tmp_path, capfd):
    """The error has a kind and a message, and the code is that of the words."""
    next(output.glob("*-train-00001-*.tfrecord")).unlink()

    nothing = _json(capfd, "status", tmp_path / "nothing")
    wrong = _json(capfd, "merge", output, output, "--output", tmp_path / "m")
    damaged = _json(capfd, "verify", output)

    assert nothing == (
        2,
        {
            "error": {
                "type": "OutputError",
                "message": f"{tmp_path}/nothing is not a directory; pass the output of a run",
            }
        },
    )
    assert wrong[0] == 2 and wrong[1]["error"]["type"] == "OptionError"
    assert damaged[0] == 1 and damaged[1]["problems"][0].endswith("No such file or directory")


def test_merged_directory_is_described(output, tmp_path, capfd):
    """Two outputs of other keys."""
    other = small_pairs.make_pairs(tmp_path / "other", seed=1)
    for path in sorted(other.rglob("train*.png")) + sorted(other.rglob("val*.png")):
        path.rename(path.with_name(f"b{path.name}"))
    for path in other.glob("*.txt"):
        path.write_text(path.read_text().replace("/train0", "/btrain0").replace("/val0", "/bval0"))
    small_pairs.job(other, tmp_path / "b").run(progress=False)

    code, found = _json(capfd, "merge", output, tmp_path / "b", "--output", tmp_path / "m")

    assert (code, found["num_records"], len(found["shards"])) == (0, 48, 8)


def test_file_of_arguments_makes_what_python_makes(jobs, capfd):
    """Names in it are those of modules in the current folder."""
    options = {"copies": {"train": 2}, "transform": small_pairs.jitter, "errors": "skip"}
    small_pairs.job("source", "python", **options).run(progress=False)

    assert main(["run", "job.toml"]) == 0

    shards = sorted(path.name for path in pathlib.Path("out").glob("*.tfrecord"))
    assert len(shards) == 4
    assert all((jobs / "out" / name).read_bytes() == (jobs / "python" / name).read_bytes() for name in shards)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output = ", "job.toml is not valid TOML ("),
        (
            'writer = "camvid"\nsorce = "x"',
            "job.toml: sorce is not an argument of Materializer, which takes writer, source",
        ),
        ("[shards]\nshards = 3", "job.toml: shards.shards is not an argument of ShardOptions, which takes num_shards"),
        ('transform = "flip"', "job.toml: transform is 'flip'; want MODULE:NAME"),
        ('transform = "cli_jobs:flip"', "cli_jobs has no 'flip'; job.toml names it as its transform"),
        ("[run.workers]\nnum_workers = 0", "num_workers is 0; want a positive number"),
        ('errors = "skip"', "job.toml: errors is an option of run; move it into the table [run]"),
        ("[run]\nseed = 1", "job.toml: run.seed is not an argument of Materializer.run, which takes workers"),
        ('[run]\nhooks = ["x"]', "job.toml: run.hooks is 'x'; want MODULE:NAME"),
        ("run = 1", "job.toml: run is 1; want a table [run]"),
        ('writer = "camvid"\nsource = "x"', "output is missing"),
        (None, "job.toml cannot be read (No such file or directory)"),
    ],
)
def test_wrong_file_of_arguments_is_refused(jobs, capfd, text, message):
    """With code 2, the file and what is wrong in it."""
    (jobs / "job.toml").unlink()
    if text is not None:
        (jobs / "job.toml").write_text(text)

    assert main(["plan", "job.toml"]) == 2

    assert message in capfd.readouterr().err


@pytest.fixture
def pair(jobs):
    """A module whose job comes with run options, one of whose rows fails."""
    (jobs / "pair_jobs.py").write_text(
        "import small_pairs\n\n"
        "class Failing(small_pairs.Pairs):\n"
        "    def read(self, row):\n"
        "        if IS_BROKEN and row.key == 'train003':\n            raise ValueError('broken')\n"
        "        return super().read(row)\n\n"
        "IS_BROKEN = True\n\n"
        "def job():\n"
        "    made = small_pairs.job('source', 'out', Failing(), version=1).materializer\n"
        "    return made, {'errors': 'skip', 'include': '*-train-*'}\n"
    )
    yield jobs
    sys.modules.pop("pair_jobs", None)


def test_run_options_of_a_job_count_unless_the_command_line_has_others(pair, capfd):
    """So one job serves a trial and the real thing."""
    shards = _json(capfd, "run", "pair_jobs:job")[1]["num_shards_written"]
    refused = main(["run", "pair_jobs:job", "--errors", "raise", "--retry-failed"])

    assert (
        shards
        == len([*pathlib.Path("out").glob("*.tfrecord")])
        == len([*pathlib.Path("out").glob("*-train-*.tfrecord")])
    )
    assert refused == 1 and "train003" in capfd.readouterr().err


def test_remedies_are_flags_of_the_command(pair, capfd):
    """A command line has no keywords; the same error in Python names those."""
    main(["run", "pair_jobs:job"])
    assert "--retry-failed" in capfd.readouterr().err

    assert main(["run", "pair_jobs:job", "--errors", "raise"]) == 1
    said = capfd.readouterr().err
    assert {"--retry-failed", "--errors skip", "`datamat status --failed`"} <= set(
        re.findall(r"`.+?`|--[\w-]+(?: \w+)?", said)
    )
    assert "run(" not in said
    main(["run", "pair_jobs:job", "--include", "nothing"])
    assert "--include nothing names no shard" in capfd.readouterr().err
    with pytest.raises(IncompleteRunError, match=r"run\(retry_failed=True\)"):
        sys.modules["pair_jobs"].job()[0].run(progress=False)


def test_failed_rows_are_listed_and_tried_again_on_request(pair, capfd):
    """A plain run leaves them out again."""
    code, first = _json(capfd, "run", "pair_jobs:job", "--include", "*")
    listed = [main(["status", target, "--failed"]) for target in ("out", "pair_jobs:job")]
    assert listed == [0, 0]
    (line, same) = capfd.readouterr().out.splitlines()
    assert line == same and "-train-0000" in line and ": train003: ValueError: broken" in line
    sys.modules["pair_jobs"].IS_BROKEN = False
    again = _json(capfd, "run", "pair_jobs:job", "--include", "*")[1]
    last = _json(capfd, "run", "pair_jobs:job", "--include", "*", "--retry-failed")[1]

    assert (code, first["num_failed"], again["num_failed"], last["num_failed"]) == (0, 1, 1, 0)
    assert "train003" in load("out", "train")
    main(["status", "out", "--failed"])
    assert capfd.readouterr().out == f"{pathlib.Path('out').absolute()}: no sample failed\n"


def test_other_limits_of_a_job_stay_where_the_command_line_has_a_number(jobs):
    """`--workers 2` says how many, `--errors skip` what to do; timeouts and limits are the job's."""
    with (jobs / "cli_jobs.py").open("a") as module:
        module.write(
            "\nimport datamat\nlimits = {'workers': datamat.WorkerOptions(sample_timeout_s=60), "
            "'errors': datamat.ErrorPolicy('raise', max_errors=5), 'hooks': [lambda event: heard.append(event)]}\n"
            "heard = []\npair = build()[0], limits\n"
        )

    assert main(["run", "cli_jobs:pair", "--workers", "1", "--errors", "skip"]) == 0

    started = sys.modules["cli_jobs"].heard[0]
    assert (started.workers.num_workers, started.workers.sample_timeout_s) == (1, 60)
    assert (started.errors.action, started.errors.max_errors) == ("skip", 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{'seed': 1}", "option 'seed' is not an argument of Materializer.run, which takes workers"),
        ("3", "want a Materializer, a pair of it and a dict of run options"),
    ],
)
def test_pair_of_a_job_and_something_else_is_refused(jobs, capfd, options, message):
    """What belongs to the dataset is an argument of the Materializer."""
    with (jobs / "cli_jobs.py").open("a") as module:
        module.write(f"\npair = build()[0], {options}\n")

    assert main(["run", "cli_jobs:pair"]) == 2
    assert message in capfd.readouterr().err


def test_job_in_place_of_a_directory_is_compared_and_repaired_with_its_source(jobs, capfd):
    """A directory alone lacks what `run` would make, the share of rows to make again, and the shards."""
    main(["run", "cli_jobs:build"])
    before = small_pairs.digests("out")
    status = _json(capfd, "status", "cli_jobs:build")
    sampled = main(["verify", "cli_jobs:build", "--sample", "0.5"])
    alone = main(["verify", "out", "--sample", "0.5"])
    os.truncate(next(pathlib.Path("out").glob("*-train-00001-*.tfrecord")), 100)

    repaired = main(["repair", "out"]), main(["repair", "cli_jobs:build"])

    assert status[1]["changes"] == [] and (sampled, alone, repaired) == (0, 2, (1, 0))
    assert small_pairs.digests("out") == before and verify("out").ok


@pytest.fixture
def growing(template, monkeypatch):
    """A run that is looked at four times: twice the same, then further on, then at its end."""
    ended = datamat.status(template)
    part, more = (dataclasses.replace(ended.done, num_rows=count) for count in (10, 20))
    looks = iter([("running", part), ("running", part), ("running", more), ("complete", ended.done)])

    def look(path, **_):
        state, done = next(looks)
        return datamat.Status(path, state, done=done, num_shards=4, num_rows=24)

    monkeypatch.setattr("datamat.cli.read_status", look)
    return template


def test_watched_status_ends_with_the_run(growing, capfd):
    """Each change is an object on a line of its own; the exit code is that of the last."""
    code = main(["status", str(growing), "--watch", "--interval", "0.001", "--json"])

    shown = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert code == 0
    assert [(found["state"], found["done"]["num_rows"]) for found in shown] == [
        ("running", 10),
        ("running", 20),
        ("complete", 24),
    ]
    assert main(["status", str(growing), "--watch", "--interval", "0"]) == 2


def test_watched_status_is_drawn_over_in_a_terminal(growing, monkeypatch, capsys):
    """With the rate and the time that is left; what stays is the end."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")

    main(["status", str(growing), "--watch", "--interval", "0.001"])

    drawn = capsys.readouterr().out.split("\x1b[J")
    height = sum(-(-len(line) // 40) for line in drawn[0].splitlines()[:-1])
    assert len(drawn) == 4 and "10 of 24 rows" in drawn[0] and drawn[0].endswith(f"\x1b[{height}F")
    assert "rows/s, 0:00:00 left" in drawn[2] and "complete" in drawn[3] and "left" not in drawn[3]


def test_interrupt_in_executed_text_has_its_code(jobs):
    """CPython would end by the signal: it may fall into the making of a dataclass, which runs text."""
    (jobs / "stopped.py").write_text("exec('import signal; signal.raise_signal(signal.SIGINT)')\n")

    ended = _command("run", "stopped:job", cwd=jobs)

    assert ended.returncode == 130, ended


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_run_has_the_code_of_its_signal(jobs, number, code):
    """One line says so, no traceback; the next run continues."""
    (jobs / "stopped.py").write_text(
        "import os, signal, datamat, small_pairs\n\n"
        "class Stopped(small_pairs.Pairs):\n"
        "    def read(self, row):\n"
        f"        os.kill(os.getppid() if DRIVER is None else DRIVER, {int(number)})\n"
        "        signal.pause()\n\n"
        "DRIVER = os.getpid()\n"
        "workers = datamat.WorkerOptions(num_workers=1)\n"
        "job = small_pairs.job('source', 'stopped', Stopped(), workers=workers).pair\n"
    )

    ended = _command("run", "stopped:job", cwd=jobs)

    assert ended.returncode == code, ended
    assert "the same command continues from here" in ended.stderr and "Traceback" not in ended.stderr


def test_closed_pipe_is_no_error(output):
    """`| head` ends the command without a word."""
    read, write = os.pipe()
    os.close(read)

    ended = subprocess.run(
        [sys.executable, "-m", "datamat", "status", output], stdout=write, stderr=subprocess.PIPE, check=False
    )

    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


def _command(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "datamat", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


# ---------------------------------------------------------------- what is made of the parsers


def test_page_is_as_the_code_makes_it():
    """`python docs/pages.py` writes it anew."""
    page = runpy.run_path(str(ROOT / "docs/pages.py"))["command_line"]()

    assert (ROOT / "docs/command-line.md").read_text() == page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ver"], {"verify"}),
        (["verify", "--d"], {"--deep"}),
        (["run", "jobs:x", "--existing", ""], {"update", "append", "replace", "refuse"}),
        (["run", "jobs:x", "--ex"], {"--existing", "--exclude", "--executor"}),
        (["verify", "ou"], {"out"}),
    ],
)
def test_bash_completes(words, found, output, monkeypatch, capsys):
    """Real bash does, with what the command prints."""
    monkeypatch.chdir(output.parent)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    quoted = " ".join(f"'{word}'" for word in ["datamat", *words])
    ask = (
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; set -- $(complete -p datamat)\n"
        'while [ "$1" != -F ]; do shift; done; "$2"; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    done = subprocess.run(["bash", "--norc"], input=f"{script}\n{ask}\n", capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, ""), done
    assert set(done.stdout.split()) == found


@pytest.mark.parametrize("given", ["gone", "{", "list"])
def test_options_of_a_url_that_are_no_object(tmp_path, monkeypatch, capsys, given):
    """They are refused before any request."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("list").write_text("[]")

    with pytest.raises(SystemExit) as ended:
        main(["verify", "s3://nowhere/out", "--storage-options", given])

    assert ended.value.code == 2 and "--storage-options" in capsys.readouterr().err


def test_preview_is_a_picture(output, tmp_path, capsys):
    """In the file that is named."""
    assert main(["preview", str(output), "--split", "val", "--count", "2", "--output", str(tmp_path / "x.png")]) == 0

    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{tmp_path / 'x.png'}\n"
    assert main(["preview", str(output), "--count", "0"]) == 2
