"""A tf.data service: a dispatcher and workers that prepare batches for consumers in other processes or on other hosts.

    serve ──spawns──> dispatcher   hands out file names one by one, each to one worker in each epoch of a job
          ──spawns──> worker ...   reads, decodes, shuffles, transforms and batches the records of its files
    consumer: TfOptions(service=...) ── sends the pipeline to the dispatcher, takes batches from every worker

Consumers that name the same job share each epoch: no two of them get the same record. A job delivers each epoch once,
so a second training run on the same service must name another job.

A server prints its port on standard output once it is ready, and ends when its standard input closes, as it does when
the process that started it is killed. It ignores Ctrl-C, which a terminal sends to all processes.

There is no authentication: anyone who can reach the ports can make the workers run TensorFlow graphs, and so read and
write files. Use it only in networks that you trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, final

from datamat.errors import OptionError, ParallelError
from datamat.readers.tf.decode import tensorflow
from datamat.values import frozen

_ADDRESS = re.compile(r"grpc://(?P<host>[^\s:/]+):(?P<port>\d{1,5})")
_CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 5.0
_HEARTBEAT_MS = 1000
_NEEDS_PYTHON = (
    "a transform calls Python (tf.py_function, tf.numpy_function), which the workers of a service do not have; write "
    "it in TensorFlow operations, or apply it to what to_tf returns"
)
_NOT_IN_WORKERS = {
    **dict.fromkeys(["PyFunc", "EagerPyFunc", "PyFuncStateless"], _NEEDS_PYTHON),
    "VarHandleOp": (
        "a transform holds a tf.Variable or tf.random.Generator: each worker would start each epoch with a copy of it "
        "as it is now, and draw the same numbers again; draw with tf.random.uniform and its kin"
    ),
}
"""Operations that work only in the process that made the dataset, and why."""
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from datamat.readers.tf.service import run_server; "
_CODE += "run_server(sys.argv[2])"


def check_address(address: Any) -> tuple[str, int]:
    """Return host and port of a service.

    Args:
        address: address of the dispatcher, as the user gave it.

    Raises:
        OptionError: the address does not have the form `grpc://HOST:PORT`.
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise OptionError(f"service is {address!r}; want 'grpc://HOST:PORT', as printed by the command: datamat serve")
    return found["host"], int(found["port"])


def distribute(dataset: Any, address: str, job: str) -> Any:
    """Return this consumer's share of each epoch of a dataset that the workers of a service run.

    Args:
        dataset: `tf.data.Dataset` that begins with file names.
        address: address of the dispatcher, `grpc://HOST:PORT`.
        job: name of the job; consumers that name the same one share each epoch.

    Raises:
        OptionError: no service answers, or the dataset calls Python or holds variables, which workers do not have.
    """
    tf = tensorflow()
    _check_reachable(address)
    _check_graph(dataset)
    experimental = tf.data.experimental.service
    # DYNAMIC is the only sharding policy that neither repeats records in an epoch nor needs the workers' addresses.
    shared = dataset.apply(experimental.distribute(experimental.ShardingPolicy.DYNAMIC, address, job_name=job))
    return _refusing_empty_epochs(tf, shared, f"job {job!r} of {address}")


def _check_reachable(address: str) -> None:
    """Raise if nothing listens: TensorFlow would silently retry for an hour."""
    try:
        with socket.create_connection(check_address(address), _CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise OptionError(
            f"no service answers at {address} ({error}); start one with: datamat serve, which prints its address"
        ) from error


def _check_graph(dataset: Any) -> None:
    """Raise `OptionError` if the graph to send to a service has operations that need this process."""
    tf = tensorflow()
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset))
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in _NOT_IN_WORKERS:
            raise OptionError(_NOT_IN_WORKERS[node.op])


def _refusing_empty_epochs(tf: Any, dataset: Any, what: str) -> Any:
    """Return `dataset`, with an error at the end of an epoch that yields nothing."""
    num_seen = tf.Variable(0, trainable=False, dtype=tf.int64)
    nothing = dataset.take(0)

    def begin(_: Any) -> Any:
        with tf.control_dependencies([num_seen.assign(0)]):
            return nothing

    def count(*parts: Any) -> Any:
        with tf.control_dependencies([num_seen.assign_add(1)]):
            return tf.nest.map_structure(tf.identity, parts if len(parts) > 1 else parts[0])

    def end(_: Any) -> Any:
        message = (
            f"this consumer got nothing of an epoch of {what}: the epoch was over before it connected, or the others "
            "took all of it; give the consumers of each new run a new job name: TfOptions(job='run-2')"
        )
        with tf.control_dependencies([tf.debugging.assert_positive(num_seen, message)]):
            return nothing

    once = tf.data.Dataset.range(1)
    return once.flat_map(begin).concatenate(dataset.map(count)).concatenate(once.flat_map(end))


@final
@frozen()
class Service:
    """A running service.

    Args:
        address: address for `TfOptions(service=...)`, `grpc://HOST:PORT`.
        servers: server processes by name: "dispatcher", "worker 0" and so on.
    """

    address: str
    servers: dict[str, subprocess.Popen[bytes]]

    def wait(self) -> None:
        """Wait until a server ends, which is always an error.

        Raises:
            ParallelError: a server ended; the message says which, and how.
        """
        ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name, process in self.servers.items():
            threading.Thread(target=_wait_for, args=(name, process, ended), daemon=True).start()
        name = ended.get()
        raise ParallelError(
            f"the {name} of the service ended ({_ending(self.servers[name].wait())}); the records that it was "
            "processing are lost to this epoch, so the service cannot continue; consumers wait until a service starts "
            "on the same port, and then get an error"
        )


def _wait_for(name: str, process: subprocess.Popen[bytes], ended: queue.SimpleQueue[str]) -> None:
    process.wait()
    ended.put(name)


@contextlib.contextmanager
def serving(num_workers: int = 1, *, port: int = 0, host: str = "localhost") -> Iterator[Service]:
    """Run a dispatcher and workers, each in a process of its own, for the duration of the block.

    Args:
        num_workers: number of worker processes that prepare batches; each uses all cores.
        port: port of the dispatcher; 0 picks a free one.
        host: name by which consumers reach this machine.

    Yields:
        The service, once the dispatcher knows every worker.

    Raises:
        OptionError: an argument is out of range.
        ParallelError: a server does not start; its output is on standard error.
    """
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers!r}; want an int, 1 or more")
    if not 0 <= port < 1 << 16:
        raise OptionError(f"port is {port}; want 1 to 65535, or 0 for any free port")
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        servers["dispatcher"] = _spawn("dispatcher")
        workers = {f"worker {number}": _spawn("worker") for number in range(num_workers)}
        servers.update(workers)
        _send(servers["dispatcher"], str(port))
        found = _port_of("dispatcher", servers["dispatcher"])
        for process in workers.values():
            _send(process, f"localhost:{found} {host}")
        for name, process in workers.items():
            _port_of(name, process)
        yield Service(f"grpc://{host}:{found}", servers)
    finally:
        _end(servers.values())


def run_server(kind: str) -> None:
    """Run a server, configured by a line on standard input, until standard input closes.

    Args:
        kind: "dispatcher", whose line is its port; or "worker", whose line is the dispatcher's address and this host's
            name.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tf = tensorflow()  # takes seconds, so all servers import it at once, before there is a dispatcher
    settings = sys.stdin.readline().split()
    server, port = _dispatcher(tf, *settings) if kind == "dispatcher" else _worker(tf, *settings)
    print(port, flush=True)  # noqa: T201 -- read by the process that started this one
    sys.stdin.read()
    del server  # a server runs until it is collected
    os._exit(0)  # TensorFlow's own shutdown waits for consumers


def _dispatcher(tf: Any, port: str) -> tuple[Any, int]:
    service = tf.data.experimental.service
    server = service.DispatchServer(service.DispatcherConfig(port=int(port)))
    return server, int(server.target.rpartition(":")[2])


def _worker(tf: Any, dispatcher: str, host: str) -> tuple[Any, int]:
    service = tf.data.experimental.service
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=f"{host}:%port%",
        heartbeat_interval_ms=_HEARTBEAT_MS,  # how soon it learns of a new job; the default is 30 s
    )
    return service.WorkerServer(config), 0  # consumers learn its port from the dispatcher


def _spawn(kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path), kind]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ}  # no hints on CPU features
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet)  # noqa: S603 -- this very program


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the server has ended; `_port_of` reports that
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def _port_of(name: str, process: subprocess.Popen[bytes]) -> int:
    """Wait until a server prints its port, and return it."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise ParallelError(
            f"the {name} of the service did not start ({_ending(process.wait())}); its output is on standard error. "
            "Is the port taken?"
        )
    return int(line)


def _end(servers: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in servers:
        with contextlib.suppress(BrokenPipeError):  # it never read its settings
            process.stdin.close()  # type: ignore[union-attr]  # all have pipes
    for process in servers:
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
