"""Runs on clusters of Dask, whose processes die: the bytes are those of a run on this machine."""

import asyncio
import concurrent.futures
import functools
import logging
import os
import signal

import pytest

pytest.importorskip("distributed", reason="make test-all installs Dask")

import dask
import engine_job
import numpy as np
from clusters import HERE, DaskCluster, Host, wait_for, waiting_pids
from distributed import Client, LocalCluster
from loopback_s3 import s3

from datamat import BrokenPoolError, Features, FingerprintError, OptionError, Scalar, WorkerOptions, materialize, verify
from datamat.run import dispatch

__all__ = ["s3"]

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),  # Dask's own, of Python and of its sockets
]


@pytest.fixture
def in_thread():
    """Call a function in a thread; return how to wait for its result."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    yield lambda function: functools.partial(pool.submit(function).result, 120)
    pool.shutdown(wait=False)


@pytest.fixture
def run(tmp_path, flags, in_thread):
    """Start a run on a cluster in a thread; return how to wait for its report."""
    return lambda cluster: in_thread(
        lambda: engine_job.job(tmp_path / "out", flags, executor=cluster.address).run(progress=False)
    )


def test_cluster_gives_the_bytes_of_this_machine(tmp_path, programs, caplog):
    """By the address of its scheduler and by a client; what workers log arrives at the handlers of the program."""
    engine_job.job(tmp_path / "here").run(progress=False)
    cluster = DaskCluster(programs)

    with caplog.at_level(logging.INFO, "engine_job"):
        report = engine_job.job(tmp_path / "address", executor=cluster.address).run(progress=False)
    with Client(cluster.address, set_as_default=False) as client:
        engine_job.job(tmp_path / "client", executor=client).run(progress=False)
        again = engine_job.job(tmp_path / "client", executor=client).run(progress=False)

    wanted = engine_job.digests(tmp_path / "here")
    assert engine_job.digests(tmp_path / "address") == wanted
    assert engine_job.digests(tmp_path / "client") == wanted
    assert report.engine == f"Dask at {cluster.address}" and report.engine in str(report)
    assert again.did_nothing
    records = [record for record in caplog.records if record.name == "engine_job"]
    assert {record.getMessage() for record in records} >= {
        f"reading {number:04d}" for number in range(engine_job.NUM_ROWS)
    }
    assert all("process" in record.processName and record.process != os.getpid() for record in records)


def test_workers_without_a_common_disk_are_tasks(tmp_path, programs, s3):
    """Each makes whole shards in a scratch folder of its own, and uploads them."""
    engine_job.job(tmp_path / "here").run(progress=False)
    cluster = DaskCluster(programs)

    with Client(cluster.address, set_as_default=False) as client:
        written = client.gather(client.map(engine_job.share, range(2), scratch=str(tmp_path), pure=False))

    assert sum(written) == 3
    assert s3.objects["bucket/out/manifest.json"].content == (tmp_path / "here" / "manifest.json").read_bytes()
    assert verify("s3://bucket/out").ok


def test_worker_killed_in_the_middle_of_a_part(tmp_path, programs, flags, held, run):
    """Dask hands the part to another worker; no record is lost or there twice."""
    cluster = DaskCluster(programs)
    result = run(cluster)

    (first,) = wait_for(lambda: waiting_pids(flags))
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: waiting_pids(flags) - {first})
    (flags / "go").touch()

    assert result().is_complete
    assert engine_job.digests(tmp_path / "out") == held
    assert verify(tmp_path / "out", deep=True).ok


@pytest.fixture
def hosts():
    """Two hosts, each with a network of its own."""
    found = []
    try:
        found += [Host(0)]
        found += [Host(1)]
    except OSError as error:
        pytest.skip(f"no network of its own can be made here: {error}")
    else:
        yield found
    finally:
        for host in found:
            host.close()


def test_host_that_is_cut_off_in_the_middle_of_a_part(tmp_path, programs, hosts, flags, held, run):
    """Dask hands its part to the other host; both write it, to the same files, and the first that is done has it."""
    options = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "4s"}
    cluster = DaskCluster(programs, num_workers=0, listens_at="0.0.0.0", options=options)
    cluster.start_worker(host=hosts[0])
    result = run(cluster)

    (first,) = wait_for(lambda: waiting_pids(flags))
    cluster.start_worker(host=hosts[1])
    hosts[0].cut()
    wait_for(lambda: waiting_pids(flags) - {first})
    (flags / "go").touch()

    assert result().is_complete
    assert engine_job.digests(tmp_path / "out") == held
    assert verify(tmp_path / "out", deep=True).ok


def test_scheduler_started_anew(tmp_path, programs, flags, held, caplog, run):
    """The parts that it has forgotten are handed out again."""
    cluster = DaskCluster(programs)
    result = run(cluster)

    wait_for(lambda: waiting_pids(flags))
    programs.kill(cluster.scheduler)
    (flags / "go").touch()
    cluster.start_scheduler()
    cluster.start_worker()

    assert result().is_complete
    assert engine_job.digests(tmp_path / "out") == held
    assert "is submitted again" in caplog.text


def test_scheduler_that_does_not_come_back(programs, flags, run):
    """Nobody takes the parts any more: an error of the engine, which names one of them."""
    cluster = DaskCluster(programs)
    result = run(cluster)
    wait_for(lambda: waiting_pids(flags))

    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        programs.kill(cluster.scheduler)
        with pytest.raises(
            BrokenPoolError, match=r"part \d+ of .* was lost: Dask at .* takes no more calls: .*run again"
        ):
            result()


@pytest.mark.parametrize("begins_with", ["features", "parts"])
def test_cluster_without_workers(tmp_path, programs, in_thread, caplog, monkeypatch, begins_with):
    """The run waits, and says for what; a function that is sent but once waits with it."""
    monkeypatch.setattr(dispatch, "_SILENCE_S", 0.2)
    large = np.random.default_rng(0).bytes(100_000)
    features = Features({"n": Scalar("int64")}) if begins_with == "parts" else None
    cluster = DaskCluster(programs, 0)

    def run():
        return materialize(
            lambda n: {"n": n + len(large)}, range(20), tmp_path / "out", features=features, executor=cluster.address,
            progress=False,
        )  # fmt: skip

    result = in_thread(run)
    wait_for(lambda: "has no workers: start some, or stop with Ctrl-C" in caplog.text)
    cluster.start_worker()

    assert result().is_complete
    assert caplog.text.count("has no workers") == 1


def test_driver_killed_and_run_again(tmp_path, programs, flags, held, run):
    """Its parts stay; a worker that is still at one of them does no harm to the next run, on another cluster.

    (On the same one, Dask may queue that part behind the call that it has forgotten.)
    """
    cluster = DaskCluster(programs)
    driver = programs.start(HERE / "engine_job.py", tmp_path / "out", cluster.address, flags)
    first = wait_for(lambda: waiting_pids(flags))
    wait_for(lambda: list((tmp_path / "out" / ".datamat" / "parts").glob("*/*.receipt")))  # of the other worker
    programs.kill(driver)

    other = DaskCluster(programs)
    result = run(other)
    wait_for(lambda: waiting_pids(flags) - first)
    (flags / "go").touch()

    report = result()
    assert report.is_complete and report.num_parts_resumed > 0
    assert engine_job.digests(tmp_path / "out") == held


def test_worker_with_other_code_is_refused(tmp_path, programs):
    """Before it writes anything, and by the name of what differs."""
    other = tmp_path / "other"
    other.mkdir()
    source = (HERE / "engine_job.py").read_text()
    (other / "engine_job.py").write_text(source.replace('"n": row.fields["n"], "drawn"', '"n": 7, "drawn"'))
    cluster = DaskCluster(programs, 1, path=[other])

    with pytest.raises(FingerprintError, match=r"writer\.read: not the same in this worker"):
        engine_job.job(tmp_path / "out", executor=cluster.address).run(progress=False)

    assert not list(tmp_path.glob("out/*.tfrecord")) and not list(tmp_path.glob("out/.datamat/parts/*/*"))


def test_row_that_ends_each_worker_is_named_by_its_part(tmp_path, programs, flags, run):
    """Dask gives up after some workers; the message says which rows, and how to find the one."""
    cluster = DaskCluster(programs, 5)
    result = run(cluster)

    killed = set()

    def waiting():
        return waiting_pids(flags) - killed

    for _ in range(4):
        (pid,) = wait_for(waiting)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)

    with pytest.raises(BrokenPoolError, match=rf"part \d+ of numbers-train-.*{engine_job.HELD}.* was lost: Dask at"):
        result()


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    """Before anything is connected to."""
    with pytest.raises(OptionError, match="only datamat's own workers, which can be replaced, enforce sample_timeout"):
        engine_job.job(tmp_path, executor="tcp://127.0.0.1:1", workers=WorkerOptions(sample_timeout_s=3)).run()


def test_client_that_cannot_be_waited_for_is_refused(tmp_path):
    """One that is closed, one of an event loop, which a run would block for ever, and an address of nobody's."""
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster:
        with Client(cluster) as client:
            pass
        with pytest.raises(OptionError, match="executor is a Client that was closed; pass one that is open"):
            engine_job.job(tmp_path, executor=client).run()

        async def waits():
            async with Client(cluster.scheduler_address, asynchronous=True) as client:
                with pytest.raises(
                    OptionError, match="made with asynchronous=True, whose event loop a run would block"
                ):
                    engine_job.job(tmp_path, executor=client).run()

        asyncio.run(waits())
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(OptionError, match=r"executor is 'tcp://127\.0\.0\.1:1', where no cluster answers: .*; start it"),
    ):
        engine_job.job(tmp_path, executor="tcp://127.0.0.1:1").run(progress=False)
