"""The tests of a type for `register_standin`."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from datamat.parallel import PathosExecutor
from datamat.parallel.standins import registrations
from datamat.testing.assertions import compare


@contextlib.contextmanager
def _one_worker(start_method: Any) -> Iterator[PathosExecutor]:
    with warnings.catch_warnings():
        # Other tests in this process may have used libraries that do not survive a fork; these tests do not.
        warnings.filterwarnings("ignore", "start_method='fork' was asked for", RuntimeWarning)
        with PathosExecutor(1, start_method=start_method) as pool:
            yield pool


class _Held:
    """An object that holds another and uses it."""

    def __init__(self, use: Callable[[Any], Any], thing: Any) -> None:
        self.use, self.thing = use, thing

    def call(self) -> Any:
        return self.use(self.thing)


def _same(thing: Any) -> Any:
    return thing


class StandinConformance:
    """What every `register_standin` does: an object of the type works the same in workers as in the caller."""

    def make_object(self) -> Any:
        """Return an object of the type, which the test module registers."""
        raise NotImplementedError(f"{type(self).__name__}: define make_object(self)")

    def use(self, thing: Any) -> Any:
        """Use the object, and return a result that can be compared and pickled."""
        raise NotImplementedError(f"{type(self).__name__}: define use(self, thing)")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests that take a start method with each method."""
        if "start_method" in metafunc.fixturenames:
            metafunc.parametrize("start_method", ["fork", "forkserver", "spawn"])

    def test_object_on_self_works_in_a_worker(self, start_method: Any) -> None:
        """A method whose `self` holds the object gets one in the worker that does the same."""
        thing = self.make_object()
        expected = self.use(thing)

        with _one_worker(start_method) as pool:
            found = pool.submit(_Held(self.use, thing).call).result()

        compare(found, expected, f"{start_method}: result of `use` in a worker")

    def test_object_travels_as_argument_and_result(self, start_method: Any) -> None:
        """It arrives in the worker, comes back, and works in both places."""
        thing = self.make_object()
        expected = self.use(thing)

        with _one_worker(start_method) as pool:
            there = pool.submit(self.use, thing).result()
            back = pool.submit(_same, thing).result()

        compare(there, expected, f"{start_method}: result of `use` with the object as argument")
        compare(self.use(back), expected, f"{start_method}: result of `use` with the object that came back")

    def test_reduce_is_the_same_each_time(self) -> None:
        """Two calls for one object return equal arguments, so that an unchanged function is not sent again."""
        thing = self.make_object()
        names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(thing).__mro__]
        reduces = [registrations()[name] for name in names if name in registrations()]
        assert reduces, f"register_standin: found no registration of {names[0]}, expected one"

        first, second = (pickle.dumps(reduces[0](thing)[1]) for _ in range(2))

        assert first == second, f"reduce, called twice: found {reduces[0](thing)[1]!r}, expected equal arguments"
