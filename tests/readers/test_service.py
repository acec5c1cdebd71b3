"""A tf.data service in processes of its own, its consumers, and what goes wrong with one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from datamat import OptionError, ShardOptions, load
from datamat.cli import main
from datamat.errors import ParallelError
from datamat.readers.tf import TfOptions
from datamat.readers.tf.service import check_address, serving

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("tf")]  # each server imports TensorFlow


@pytest.fixture(scope="module")
def many_shards(make_pairs_output, tmp_path_factory):
    """180 records in `train`, in twelve shards: workers are given whole ones."""
    options = {"copies": {"train": 9}, "shards": ShardOptions(num_shards=12)}
    return make_pairs_output(tmp_path_factory.mktemp("many") / "out", **options)


@pytest.fixture(scope="module")
def address():
    """A service of one worker."""
    with serving() as service:
        yield service.address


@contextlib.contextmanager
def started(*arguments):
    """Run Python in a process of its own, with pipes; end it, whatever happens."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *map(str, arguments)], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def keys_of(dataset):
    return [key.decode() for batch in dataset.as_numpy_iterator() for key in np.ravel(batch["key"])]


def children_of(pid):
    """Return the processes that one has started, in the order of their start."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)


# ---------------------------------------------------------------- consumers


def test_values_are_those_without_a_service(tf, many_shards, address):
    """One consumer gets all, transformed by the workers, in each round of a repeated set."""
    data = load(many_shards, "val")
    halved = lambda sample: {**sample, "image": sample["image"] // 2}  # noqa: E731

    found = list(data.to_tf(tf=TfOptions(service=address, job="values"), transform=halved).as_numpy_iterator())
    endless = data.to_tf(tf=TfOptions(service=address, job="endless", repeat=True))

    assert sorted(sample["key"].decode() for sample in found) == sorted(data.keys())
    for sample in found:
        assert (sample["image"] == data[sample["key"].decode()]["image"] // 2).all()
    assert sorted(keys_of(endless.take(2 * len(data)))) == sorted(2 * data.keys())
    assert endless.element_spec["image"] == tf.TensorSpec((24, 32, 3), tf.uint8)


@pytest.mark.long
def test_two_consumers_share_each_epoch_without_duplicates(many_shards, address):
    """Together they get every record once in each of two epochs."""
    data = load(many_shards, "train")
    one, other = (data.to_tf(1, shuffle=True, seed=1, tf=TfOptions(service=address, job="both")) for _ in range(2))

    for _ in range(2):
        walks = [iter(one), iter(other)]
        begun = [key.numpy().decode() for walk in walks for key in next(walk)["key"]]
        rest = [key.numpy().decode() for walk in walks for batch in walk for key in batch["key"]]

        assert sorted(begun + rest) == sorted(data.keys())


def test_damaged_shard_is_an_error_that_names_it(tf, pairs, copied, address):
    """The workers run no Python of ours that could name the record; a shard cut off between two is found as well."""
    data = load(copied, "train")
    content = bytearray(pathlib.Path(data.files[0]).read_bytes())
    content[200] ^= 1
    flipped, cut = (data.to_tf(tf=TfOptions(service=address, job=job)) for job in ("flipped", "cut"))

    for dataset, damage in ((flipped, bytes(content)), (cut, b"")):
        pathlib.Path(data.files[0]).write_bytes(damage)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{re.escape(data.files[0])}.*is damaged"):
            list(dataset)


@pytest.mark.long
def test_epoch_that_is_over_is_an_error(tf, many_shards, address):
    """TensorFlow silently gives a late consumer nothing; another job starts from the beginning.

    Consumers without a job share one if they read the same records with the same options and transform.
    """
    data = load(many_shards, "val")
    for job in ({"job": "over"}, {}):
        assert sorted(keys_of(data.to_tf(2, tf=TfOptions(service=address, **job)))) == sorted(data.keys())
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"got nothing of an epoch of job .*TfOptions\(job="):
            keys_of(load(many_shards, "val").to_tf(2, tf=TfOptions(service=address, **job)))

    assert len(keys_of(data.to_tf(2, tf=TfOptions(service=address, job="over-2")))) == len(data)
    assert len(keys_of(data.to_tf(4, tf=TfOptions(service=address)))) == len(data)
    assert len(
        keys_of(data.to_tf(2, tf=TfOptions(service=address), transform=lambda sample: {"key": sample["key"]}))
    ) == len(data)


def test_what_workers_cannot_do_is_refused(tf, pairs, formats, address):
    """They know operations, but no functions of this process; each would start with the same state of a generator."""
    generator = tf.random.Generator.from_seed(1)

    @tf.function
    def inner(image):
        return tf.numpy_function(lambda array: array, [image], tf.uint8)

    for transform, job, message in (
        (lambda sample: inner(sample["image"]), "python", "a transform calls Python"),
        (lambda sample: generator.uniform(()), None, "draw the same numbers again"),
        # What it holds is not the same in another process: then the consumers must say what they share.
        (tf.function(lambda sample: sample), None, r"cannot name the job: .*TfOptions\(job='run-1'\)"),
    ):
        with pytest.raises(OptionError, match=message):
            load(pairs).to_tf(tf=TfOptions(service=address, job=job), transform=transform)
    with pytest.raises(OptionError, match="datamat convert DIR --format tfrecord"):
        load(formats, format="webdataset").to_tf(tf=TfOptions(service="grpc://localhost:5000"))


def test_nobody_at_the_address_is_an_error(pairs):
    """TensorFlow would try for an hour."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]

    with pytest.raises(OptionError, match=rf"no service answers at grpc://localhost:{port} .*datamat serve"):
        load(pairs).to_tf(tf=TfOptions(service=f"grpc://localhost:{port}"))


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("arguments", [["--num-workers", "0"], ["--port", "70000"]])
def test_arguments_of_the_command_are_checked(arguments, capsys):
    """The error comes before a process is started."""
    assert main(["serve", *arguments]) == 2

    assert f"is {arguments[1]}; want" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_it_is_asked_to_end(many_shards, ending):
    """It prints the address alone, ends with 0, and leaves no process; this holds with a consumer at work."""
    with started("-m", "datamat", "serve", "--num-workers", "2") as served:
        address = served.stdout.readline().strip()
        servers = children_of(served.pid)
        keys = load(many_shards, "train").to_tf(1, tf=TfOptions(service=address)).as_numpy_iterator()
        next(keys)

        served.send_signal(ending)
        code = served.wait()

        assert check_address(address)[0] == "localhost"
        assert (code, served.stdout.read()) == (0, "")
        assert "Traceback" not in served.stderr.read()  # of TensorFlow there is more
        assert len(servers) == 3 and not [pid for pid in servers if pathlib.Path(f"/proc/{pid}").exists()]
        del keys


@pytest.mark.long
def test_dead_worker_is_reported_and_its_consumers_get_an_error(tf, many_shards):
    """They get no short epoch, nor wait for an hour: a service restarted at the same port does not know them."""
    with started("-m", "datamat", "serve", "--num-workers", "2", "--restarts", "1") as served:
        address = served.stdout.readline().strip()
        batches = iter(load(many_shards, "train").to_tf(1, tf=TfOptions(service=address)))
        next(batches)

        os.kill(children_of(served.pid)[2], signal.SIGKILL)
        assert served.stdout.readline().strip() == address
        with pytest.raises(tf.errors.NotFoundError, match="dispatcher restart"):
            list(batches)
        os.kill(children_of(served.pid)[2], signal.SIGKILL)

        assert served.wait() == 1
        deaths = [line for line in served.stderr if "worker 1 of the service ended (signal SIGKILL)" in line]
        assert [line.endswith("; restarting\n") for line in deaths] == [True, False]


@pytest.mark.long
def test_servers_end_with_the_process_that_started_them():
    """This holds where that process was killed and could send them nothing."""
    with started("-m", "datamat", "serve") as served:
        assert check_address(served.stdout.readline().strip())[0] == "localhost"
        ends = [os.pidfd_open(pid) for pid in children_of(served.pid)]

        served.kill()

        for end in ends:
            assert select.select([end], [], [], 30)[0]
            os.close(end)


@pytest.mark.long
def test_taken_port_is_an_error(capsys):
    """It exits with 1 and the reason."""
    with socket.create_server(("", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1

    assert "the dispatcher of the service did not start (" in capsys.readouterr().err


@pytest.mark.long
def test_service_whose_server_is_dead_says_so():
    """The error names the server; the block of `serving` ends the others."""
    with serving(1) as service:
        service.servers["dispatcher"].kill()
        with pytest.raises(ParallelError, match="the dispatcher of the service ended"):
            service.wait()

    assert all(process.returncode is not None for process in service.servers.values())
