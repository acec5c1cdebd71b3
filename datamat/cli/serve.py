"""`datamat serve`: a tf.data service, until it is told to end."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from datamat.cli.console import OK, say
from datamat.errors import ParallelError
from datamat.interrupts import signals_raised
from datamat.readers.service import check_address, serving

if TYPE_CHECKING:
    import argparse

__all__ = ["add_commands"]

_ABOUT = """\
Start a dispatcher and workers that prepare batches for `to_tf(service="grpc://HOST:PORT")`, print the address, and
serve until Ctrl-C or SIGTERM. Consumers on other hosts need --host. There is no authentication: whoever reaches the
ports can have the workers read and write files; use it in networks that you trust."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = commands.add_parser("serve", help="start a tf.data service", description=_ABOUT)
    command.add_argument("--workers", type=int, default=1, metavar="N", help="processes that prepare batches (1)")
    command.add_argument("--port", type=int, default=0, help="of the dispatcher (any that is free)")
    command.add_argument(
        "--host", default="localhost", help="name under which consumers reach this machine (localhost)"
    )
    command.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often to start anew when a worker died; consumers then get an error instead of waiting (3)",
    )
    command.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt, SystemExit), signals_raised():  # asked to end, it ends well
        port = options.port
        for restarts_left in range(max(options.restarts, 0), -1, -1):
            with serving(options.workers, port=port, host=options.host) as service:
                _, port = check_address(service.address)
                say(service.address)
                sys.stdout.flush()  # whoever reads it from a pipe waits for it
                try:
                    service.wait()
                except ParallelError as error:
                    if not restarts_left:
                        raise
                    say(f"{error}; starting anew", error=True)
    return OK
