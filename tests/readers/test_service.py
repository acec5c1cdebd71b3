"""A tf.data service in processes of its own, its consumers, and what goes wrong with one."""

from __future__ import annotations

import contextlib
import json
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
from datamat.readers.tf.service import check_address, serving

pytestmark = pytest.mark.timeout(180)  # up to five processes import TensorFlow: half a minute beside other work
CONSUMER = pathlib.Path(__file__).with_name("service_consumer.py")


@pytest.fixture(scope="module")
def many_shards(make_pairs_output, tmp_path_factory):
    """600 records in `train`, in twelve shards: workers are given whole ones."""
    options = {"copies": {"train": 30}, "shards": ShardOptions(num_shards=12)}
    return make_pairs_output(tmp_path_factory.mktemp("many") / "out", **options)


@pytest.fixture(scope="module")
def address():
    """A service of two workers."""
    with serving(2) as service:
        yield service.address


@contextlib.contextmanager
def started(*arguments):
    """Run Python in a process of its own, with pipes; end it, whatever happens."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *map(str, arguments)], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read_json(process):
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def keys_of(dataset):
    return [key.decode() for batch in dataset.as_numpy_iterator() for key in np.ravel(batch["key"])]


def test_two_consumers_share_each_epoch_without_duplicates(many_shards, address):
    """The consumers run in processes of their own: together they get every record once in each of two epochs."""
    wanted = sorted(load(many_shards, "train").keys())
    arguments = (CONSUMER, many_shards, address, "shared", 2)

    with started(*arguments) as one, started(*arguments) as other:
        for _ in range(2):
            for process in (one, other):
                assert isinstance(read_json(process), str)  # it has begun
            for process in (one, other):
                process.stdin.write("\n")
                process.stdin.flush()
            shares = [read_json(process) for process in (one, other)]

            assert sorted(shares[0] + shares[1]) == wanted
            assert all(shares)


def test_values_are_those_without_a_service(many_shards, address):
    """One consumer gets all, transformed by the workers, in each round of a repeated set."""
    import tensorflow as tf

    data = load(many_shards, "val")
    halved = lambda sample: {**sample, "image": sample["image"] // 2}  # noqa: E731

    found = list(data.to_tf(service=address, job="values", transform=halved).as_numpy_iterator())
    endless = data.to_tf(service=address, job="endless", repeat=True)

    assert sorted(sample["key"].decode() for sample in found) == sorted(data.keys())
    for sample in found:
        assert (sample["image"] == data[sample["key"].decode()]["image"] // 2).all()
    assert sorted(keys_of(endless.take(2 * len(data)))) == sorted(2 * data.keys())
    assert endless.element_spec["image"] == tf.TensorSpec((24, 32, 3), tf.uint8)


def test_damaged_shard_is_an_error_that_names_it(make_pairs_output, address, tmp_path):
    """The workers run no Python of ours that could name the record; a shard cut off between two is found as well."""
    import tensorflow as tf

    flipped, cut = (load(make_pairs_output(tmp_path / name), "train") for name in ("flipped", "cut"))
    with open(flipped.files[0], "r+b") as file:
        file.seek(200)
        value = file.read(1)[0]
        file.seek(200)
        file.write(bytes([value ^ 1]))
    options = {"service": address, "job": "damaged"}
    datasets = flipped.to_tf(**options), cut.to_tf(**options | {"job": "cut"})
    os.truncate(cut.files[1], 0)

    for dataset, file in zip(datasets, (flipped.files[0], cut.files[1]), strict=True):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{re.escape(file)}.*is damaged"):
            list(dataset)


def test_epoch_that_is_over_is_an_error(many_shards, address):
    """TensorFlow silently gives a late consumer nothing; another job starts from the beginning."""
    import tensorflow as tf

    data = load(many_shards, "val")
    assert sorted(keys_of(data.to_tf(2, service=address, job="over"))) == sorted(data.keys())

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"got nothing of an epoch of job .*over.*to_tf\(job="):
        keys_of(data.to_tf(2, service=address, job="over"))

    assert len(keys_of(data.to_tf(2, service=address, job="over-2"))) == len(data)


def test_consumers_without_a_job_share_one(many_shards, address):
    """They share it if they read the same records with the same options; other options or transforms make another."""
    data = load(many_shards, "val")
    assert len(keys_of(data.to_tf(3, service=address))) == len(data)

    with pytest.raises(Exception, match="this consumer got nothing of an epoch of job"):
        keys_of(load(many_shards, "val").to_tf(3, service=address))
    assert len(keys_of(data.to_tf(4, service=address))) == len(data)
    assert len(keys_of(data.to_tf(3, service=address, transform=lambda sample: {"key": sample["key"]}))) == len(data)


def test_python_in_a_transform_is_refused(many_shards, address):
    """So is Python nested in other functions: workers know operations, but no functions of this process."""
    import tensorflow as tf

    @tf.function
    def inner(image):
        return tf.numpy_function(lambda array: array, [image], tf.uint8)

    with pytest.raises(OptionError, match=r"a transform calls Python .*to what to_tf returns"):
        load(many_shards).to_tf(service=address, job="python", transform=lambda sample: inner(sample["image"]))


def test_variables_in_a_transform_are_refused(many_shards, address):
    """TensorFlow would give each worker the same state of a generator, in each epoch."""
    import tensorflow as tf

    generator = tf.random.Generator.from_seed(1)

    with pytest.raises(
        OptionError, match=r"holds a tf\.Variable or .*draw the same numbers again; .*tf\.random\.uniform"
    ):
        load(many_shards).to_tf(service=address, transform=lambda sample: generator.uniform(()))


def test_transform_that_names_no_job_is_an_error(pairs):
    """What it holds is not the same in another process: then the consumers must say what they share."""
    import tensorflow as tf

    traced = tf.function(lambda sample: sample)

    with pytest.raises(OptionError, match=r"no name for the job: .*to_tf\(job='run-1'\)"):
        load(pairs).to_tf(service="grpc://localhost:1", transform=traced)


def test_nobody_at_the_address_is_an_error(pairs):
    """TensorFlow would try for an hour."""
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]

    with pytest.raises(OptionError, match=rf"no service answers at grpc://localhost:{port} .*datamat serve"):
        load(pairs).to_tf(service=f"grpc://localhost:{port}")


@pytest.mark.parametrize(
    "address", ["localhost:5000", "grpc://", "grpc://host", "grpc://host:0", "grpc://h:70000", 5, ""]
)
def test_addresses_are_checked(pairs, address):
    """They have the form that the command prints."""
    with pytest.raises(OptionError, match="want 'grpc://HOST:PORT', as printed by the command: datamat serve"):
        load(pairs).to_tf(service=address)
    assert check_address("grpc://gpu-3.local:5000") == ("gpu-3.local", 5000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": True}, "service together with cache or snapshot: .*would come twice"),
        ({"snapshot": "folder"}, "service together with cache or snapshot"),
        ({"job": ""}, "job is ''; want a name"),
        ({"service": None, "job": "night"}, "job is 'night' but there is no service"),
    ],
)
def test_options_that_do_not_go_with_a_service_are_refused(pairs, options, message):
    """The error comes before any request to it."""
    with pytest.raises(OptionError, match=message):
        load(pairs).to_tf(**{"service": "grpc://localhost:5000", **options})


def test_formats_that_workers_cannot_read_are_refused(make_pairs_output, tmp_path):
    """The error says what to do."""
    data = load(make_pairs_output(tmp_path / "out", format="webdataset"))

    with pytest.raises(OptionError, match=r"these shards are webdataset.*datamat convert DIR --format tfrecord"):
        data.to_tf(service="grpc://localhost:5000")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_it_is_asked_to_end(many_shards, ending):
    """It prints the address alone, ends with 0, and leaves no process; this holds with a consumer at work."""
    with started("-m", "datamat.cli", "serve", "--num-workers", "2") as served:
        address = served.stdout.readline().strip()
        servers = children_of(served.pid)
        keys = load(many_shards, "train").to_tf(1, service=address).as_numpy_iterator()
        next(keys)

        served.send_signal(ending)
        code = served.wait()

        assert check_address(address)[0] == "localhost"
        assert (code, served.stdout.read()) == (0, "")
        assert "Traceback" not in served.stderr.read()  # of TensorFlow there is more
        assert len(servers) == 3 and not [pid for pid in servers if pathlib.Path(f"/proc/{pid}").exists()]
        del keys


def test_dead_worker_is_reported_and_its_consumers_get_an_error(many_shards):
    """They get no short epoch, nor wait for an hour: a service restarted at the same port does not know them."""
    import tensorflow as tf

    with started("-m", "datamat.cli", "serve", "--num-workers", "2", "--restarts", "1") as served:
        address = served.stdout.readline().strip()
        batches = iter(load(many_shards, "train").to_tf(1, service=address))
        next(batches)

        os.kill(children_of(served.pid)[2], signal.SIGKILL)
        assert served.stdout.readline().strip() == address
        with pytest.raises(tf.errors.NotFoundError, match="dispatcher restart"):
            list(batches)
        os.kill(children_of(served.pid)[2], signal.SIGKILL)

        assert served.wait() == 1
        deaths = [line for line in served.stderr if "worker 1 of the service ended (signal SIGKILL)" in line]
        assert [line.endswith("; restarting\n") for line in deaths] == [True, False]


def test_servers_end_with_the_process_that_started_them():
    """This holds where that process was killed and could send them nothing."""
    with started("-m", "datamat.cli", "serve") as served:
        served.stdout.readline()
        ends = [os.pidfd_open(pid) for pid in children_of(served.pid)]

        served.kill()

        for end in ends:
            assert select.select([end], [], [], 30)[0]
            os.close(end)


def test_taken_port_is_an_error(capsys):
    """It exits with 1 and the reason."""
    with socket.create_server(("", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1

    assert "the dispatcher of the service did not start (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-workers", "0"], "num_workers is 0; want 1 or more"),
        (["--port", "70000"], "port is 70000; want 1 to 65535, or 0"),
    ],
)
def test_arguments_of_the_command_are_checked(arguments, message, capsys):
    """The error comes before a process is started."""
    assert main(["serve", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_service_whose_server_is_dead_says_so():
    """The error names the server; the block of `serving` ends the others."""
    with serving(1) as service:
        service.servers["dispatcher"].kill()
        with pytest.raises(ParallelError, match="the dispatcher of the service ended"):
            service.wait()

    assert all(process.returncode is not None for process in service.servers.values())


def children_of(pid):
    """Return the processes that one has started, in the order of their start."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return sorted(found)
