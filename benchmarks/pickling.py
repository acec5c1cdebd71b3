"""How long `self` and plain data take to pickle and to come back, as ratios to dill and cloudpickle in one run.

    python benchmarks/pickling.py [--points 50000]

Prints a table: for each object the milliseconds of datamat, and how many times as long dill and cloudpickle take.
Each figure is the best of several rounds in which the three take turns. cloudpickle's column is empty where it is not
installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pickle
import time
from typing import TYPE_CHECKING, Any

import dill
import numpy as np

from datamat.parallel import pickling

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 3


class Point:
    """Ordinary data with a class."""

    def __init__(self, x: int) -> None:
        self.x = x
        self.row = [x]


class Holder:
    """An object whose bound method is sent."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def use(self) -> int:
        """Return a number."""
        return len(self.held)


def _send(obj: Any) -> Any:
    return pickling.dumps_code(obj)


def _receive(pickled: Any) -> Any:
    return pickling.load_code(pickled.stream, [bytearray(buffer.raw()) for buffer in pickled.buffers])


def _seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50_000)
    num_points = parser.parse_args().points
    objects = {
        f"self with {num_points:,} objects": Holder([Point(i) for i in range(num_points)]).use,
        f"{num_points:,} tuples": [(i, str(i)) for i in range(num_points)],
        f"dictionary of {num_points:,} lists": {str(i): [i, float(i)] for i in range(num_points)},
        "self with 100 MB of arrays": Holder([np.ones(1_250_000) for _ in range(10)]).use,
        "a function": _seconds,
    }
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        objects["self with 100 MB of tensors"] = Holder([torch.ones(2_500_000) for _ in range(10)]).use
    tools: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "datamat": (_send, _receive),
        "dill": (dill.dumps, dill.loads),
    }
    try:
        tools["cloudpickle"] = (importlib.import_module("cloudpickle").dumps, pickle.loads)
    except ImportError:
        tools.pop("cloudpickle", None)
    print(f"{'':<34}{'':<6}{'datamat ms':>12}{'dill x':>10}{'cloudpickle x':>15}")
    for what, obj in objects.items():
        sent = {name: dumps(obj) for name, (dumps, _) in tools.items()}
        for step in ("dump", "load"):
            best = dict.fromkeys(tools, float("inf"))
            for _ in range(_ROUNDS):
                for name, (dumps, loads) in tools.items():
                    took = _seconds(lambda: dumps(obj) if step == "dump" else loads(sent[name]))  # noqa: B023
                    best[name] = min(best[name], took)
            ours = best["datamat"]
            ratios = "".join(
                f"{best[name] / ours:>{width}.1f}"
                for name, width in (("dill", 10), ("cloudpickle", 15))
                if name in best
            )
            print(f"{what:<34}{step:<6}{1000 * ours:>12.2f}{ratios}")


if __name__ == "__main__":
    main()
