"""A tf.data service: one dispatcher and some workers that prepare batches for consumers in other processes or hosts.

    serve ──spawns──> dispatcher   hands out the names of files, one by one: each to one worker, in each epoch of a job
          ──spawns──> worker ...   reads, decodes, shuffles, transforms and batches what is in its files
    consumer: to_tf(service=...) ── describes the pipeline to the dispatcher, takes batches of every worker

Consumers that name the same job share each epoch: what one gets, no other does. An epoch of a job is given once; to go
through it anew (a second training run beside the same service) another job must be named.

A server tells its port in a line on its standard output when it can be used, and ends when its standard input does:
also when the process that started it was killed. Of Ctrl-C, which a terminal sends to all, it takes no notice.

There is no authentication: whoever reaches the ports can have the workers run TensorFlow graphs, and so read and write
files. Use it in networks that you trust.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, final

from datamat.errors import OptionError, ParallelError
from datamat.readers.tf_features import tensorflow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Service", "check_address", "distribute", "run_server", "serving"]

_ADDRESS = re.compile(r"grpc://(?P<host>[^\s:/]+):(?P<port>\d{1,5})")
_CONNECT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 5.0
_HEARTBEAT_MS = 1000
_NEEDS_PYTHON = (
    "a transform calls Python (tf.py_function, tf.numpy_function), which the workers of a service do not have; write "
    "it in TensorFlow's operations, or apply it to what to_tf returns"
)
_NOT_IN_WORKERS = {
    **dict.fromkeys(["PyFunc", "EagerPyFunc", "PyFuncStateless"], _NEEDS_PYTHON),
    "VarHandleOp": (
        "a transform holds a tf.Variable or tf.random.Generator: each worker would begin each epoch with a copy of it, "
        "as it is now, and draw the same numbers again; draw with tf.random.uniform and its like"
    ),
}
"""What is wrong with operations that a data set may have in this process only."""
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from datamat.readers.service import run_server; "
_CODE += "run_server(sys.argv[2])"


def check_address(address: Any) -> tuple[str, int]:
    """Return host and port of a service.

    Raises:
        OptionError: it is not `grpc://HOST:PORT`.
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise OptionError(f"service is {address!r}; want 'grpc://HOST:PORT', as printed by the command: datamat serve")
    return found["host"], int(found["port"])


def distribute(dataset: Any, address: str, job: str) -> Any:
    """Return what a service makes of a data set: the share that this consumer gets of each epoch.

    Args:
        dataset: a `tf.data.Dataset` that begins with file names.
        address: of the dispatcher, `grpc://HOST:PORT`.
        job: consumers that name the same one share each epoch.

    Raises:
        OptionError: nothing answers, or the data set calls Python or holds variables, which workers do not have.
    """
    tf = tensorflow()
    _check_reachable(address)
    _check_graph(dataset)
    experimental = tf.data.experimental.service
    # Of the ways to divide, only this one neither repeats a record in an epoch nor needs the addresses of workers.
    shared = dataset.apply(experimental.distribute(experimental.ShardingPolicy.DYNAMIC, address, job_name=job))
    return _refusing_empty_epochs(tf, shared, f"job {job!r} of {address}")


def _check_reachable(address: str) -> None:
    """Raise if nothing listens: TensorFlow would try for an hour without a word."""
    try:
        with socket.create_connection(check_address(address), _CONNECT_TIMEOUT_S):
            pass
    except OSError as error:
        raise OptionError(
            f"no service answers at {address} ({error}); start one with: datamat serve; it prints its address"
        ) from error


def _check_graph(dataset: Any) -> None:
    graph = _graph_of(dataset)
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        if node.op in _NOT_IN_WORKERS:
            raise OptionError(_NOT_IN_WORKERS[node.op])


def _graph_of(dataset: Any) -> Any:
    """Return the graph that a service would be sent, as a GraphDef."""
    tf = tensorflow()
    serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset))
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def _refusing_empty_epochs(tf: Any, dataset: Any, what: str) -> Any:
    """Return `dataset`, with an error for an epoch of which nothing came: TensorFlow would end it without a word."""
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
            f"this consumer got nothing of an epoch of {what}: the epoch was over before it came, or the others took "
            "all of it; give all consumers of a new run a job name of its own: to_tf(job='run-2')"
        )
        with tf.control_dependencies([tf.debugging.assert_positive(num_seen, message)]):
            return nothing

    once = tf.data.Dataset.range(1)
    return once.flat_map(begin).concatenate(dataset.map(count)).concatenate(once.flat_map(end))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A service that runs.

    Args:
        address: for `to_tf(service=...)`: `grpc://HOST:PORT`.
        servers: its processes, by name.
    """

    address: str
    servers: dict[str, subprocess.Popen[bytes]]

    def wait(self) -> None:
        """Wait until a server ends, which none should.

        Raises:
            ParallelError: one did; says which, and how.
        """
        watched = {os.pidfd_open(process.pid): name for name, process in self.servers.items()}
        try:
            (first, *_) = wait(list(watched))
        finally:
            for descriptor in watched:
                os.close(descriptor)
        name = watched[first]  # type: ignore[index]  # what was waited for
        raise ParallelError(
            f"the {name} of the service ended ({_ending(self.servers[name].wait())}); records that it had at work are "
            "lost to this epoch, so it cannot go on; consumers wait until a service starts on the same port, and then "
            "get an error"
        )


@contextlib.contextmanager
def serving(num_workers: int = 1, *, port: int = 0, host: str = "localhost") -> Iterator[Service]:
    """Run a dispatcher and workers, each a process, as long as the block lasts.

    Args:
        num_workers: processes that prepare batches; each uses all cores.
        port: of the dispatcher; 0 takes a free one.
        host: the name under which consumers reach this machine.

    Yields:
        The service, when every worker is known to the dispatcher.

    Raises:
        OptionError: an argument makes no sense.
        ParallelError: a server does not start; what it said is on standard error.
    """
    if num_workers < 1:
        raise OptionError(f"num_workers is {num_workers}; want 1 or more")
    if not 0 <= port < 1 << 16:
        raise OptionError(f"port is {port}; want 1 to 65535, or 0 for any that is free")
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        servers["dispatcher"] = _spawn("dispatcher")
        workers = {f"worker {number}": _spawn("worker") for number in range(num_workers)}
        servers.update(workers)
        _tell(servers["dispatcher"], str(port))
        found = _port_of("dispatcher", servers["dispatcher"])
        for process in workers.values():
            _tell(process, f"localhost:{found} {host}")
        for name, process in workers.items():
            _port_of(name, process)
        yield Service(f"grpc://{host}:{found}", servers)
    finally:
        _end(servers.values())


def run_server(kind: str) -> None:
    """Be a server, as a line on standard input says, until there is no more of that.

    Args:
        kind: "dispatcher", which is told its port; or "worker", which is told the dispatcher's address and the name of
            this host.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tf = tensorflow()  # takes seconds: for all servers at once, before there is a dispatcher
    told = sys.stdin.readline().split()
    server, port = _dispatcher(tf, *told) if kind == "dispatcher" else _worker(tf, *told)
    print(port, flush=True)  # noqa: T201 -- for the process that waits for it
    sys.stdin.read()
    del server  # until here it was served: a server stops when it is collected
    os._exit(0)  # TensorFlow's own end waits for consumers


def _dispatcher(tf: Any, port: str) -> tuple[Any, int]:
    service = tf.data.experimental.service
    server = service.DispatchServer(service.DispatcherConfig(port=int(port)))
    return server, int(server.target.rpartition(":")[2])


def _worker(tf: Any, dispatcher: str, host: str) -> tuple[Any, int]:
    service = tf.data.experimental.service
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=f"{host}:%port%",
        heartbeat_interval_ms=_HEARTBEAT_MS,  # how soon it hears of a new job; the default is 30 s
    )
    return service.WorkerServer(config), 0  # consumers hear its port from the dispatcher


def _spawn(kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path), kind]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ}  # no notes on what this machine could do better
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet)  # noqa: S603 -- ourselves


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which `_port_of` finds
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def _port_of(name: str, process: subprocess.Popen[bytes]) -> int:
    """Wait for the line with which a server says that it can be used."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.isdigit():
        raise ParallelError(
            f"the {name} of the service did not start ({_ending(process.wait())}); what it said is on standard error. "
            "Is the port taken?"
        )
    return int(line)


def _end(servers: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in servers:
        with contextlib.suppress(BrokenPipeError):  # what it was told and has not read
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
