"""Random streams that depend on the sample alone, never on the process or order in which it is computed.

Every random choice of a run comes from the stream for (seed, key, copy), or for (seed, key) while a row is read.
Workers keep no random state: they derive it for each row and record, so any number of them draws the same numbers.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import inspect
import random
import re
import struct
import sys
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import numpy as np
import xxhash

from datamat.errors import OptionError
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NO_COPY = (1 << 32) - 1  # in place of a copy number: the stream of the row itself
_SEED: dict[str, Callable[[Any, int], object]] = {
    # Not `torch.manual_seed`, which looks for every kind of device and takes 100 us.
    "torch": lambda torch, seed: torch.default_generator.manual_seed(seed),
    "tensorflow": lambda tensorflow, seed: tensorflow.random.set_seed(seed),
}
"""How to seed the global generators of libraries that a process has loaded."""

OUTPUT_VERSION = 1
"""Incremented when the streams change: shards of augmented splits are then rebuilt."""


def sample_seed(seed: int, key: str, copy: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return the seed of one record.

    The entropy is (128-bit XXH3 hash of the key, copy, attempt, seed) as 32-bit words: two records share a stream only
    if a 128-bit hash collides.

    Args:
        seed: base seed, not negative.
        key: the key of the input row, without the `#COPY` suffix.
        copy: number of the copy, or of the epoch when reading, from 0.
        attempt: above 0 for a copy that is drawn again because it came out like an earlier one.

    Returns:
        A `numpy.random.SeedSequence`; equal arguments give equal streams on every machine.

    Example:
        >>> sample_seed(7, "0001TP_006690", 0).generate_state(2).tolist()
        [1528537292, 4123725432]
    """
    num_words = max(1, -(-seed.bit_length() // 32))
    words = (
        xxhash.xxh3_128_digest(key.encode())
        + struct.pack("<II", copy, attempt)
        + seed.to_bytes(4 * num_words, "little")
    )
    # An array, because numpy takes three times as long to convert a list of int.
    return np.random.SeedSequence(np.frombuffer(words, "<u4").astype(np.uint32))


def sample_rng(seed: int, key: str, copy: int) -> np.random.Generator:
    """Return the generator of one record: PCG64 over `sample_seed`."""
    return np.random.Generator(np.random.PCG64(sample_seed(seed, key, copy)))


def row_rng(seed: int, key: str) -> np.random.Generator:
    """Return the generator for `read`, or for the function of `materialize`, whose stream no copy shares."""
    return sample_rng(seed, key, _NO_COPY)


def seed_row(seed: int, key: str, *, uses_globals: bool = True) -> frozenset[str]:
    """Seed the global generators of this process for one input row, so that `read` draws from (seed, key) alone.

    `random` and `numpy.random` get all of a 128-bit hash: with the 32 bits that `numpy.random.seed` usually gets, some
    two of 100,000 rows would most likely draw the same numbers. Takes about 10 us, and as much again with TensorFlow.

    Args:
        seed: base seed, not negative; with the key it decides what `read` draws.
        key: key of the row that is about to be read.
        uses_globals: whether anything will be drawn from `random` or `numpy.random`. If False, they are not seeded, and
            `GlobalDraws` tells whether that was right.

    Returns:
        The names of the other libraries that were loaded and therefore seeded.
    """
    if not uses_globals and not loaded_libraries():
        return frozenset()
    digest = xxhash.xxh3_128_digest(f"{seed} {key}".encode())
    if uses_globals:
        _seed_both(digest)
    return _seed_libraries(int.from_bytes(digest[:8], "little"))


def _seed_both(digest: bytes) -> None:
    np.random.seed(np.frombuffer(digest, "<u4"))
    random.seed(int.from_bytes(digest, "big"))  # in another byte order: both are MT19937, and must not draw alike


class GlobalDraws:
    """Detects draws from `random` and `numpy.random` in this process, at a cost of 1 us.

    Attributes:
        are_expected: whether there have been draws, or they cannot be detected.
    """

    def __init__(self) -> None:
        self._words_of_random = _words_of_random()
        self.are_expected = self._words_of_random is None
        self._generator: Any = None
        self._words: Any = ()
        self._resting: tuple[int, tuple[int, ...]] | None = None

    def mark(self) -> tuple[int, ...]:
        """Return a value that differs after the next draw."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # the stubs lack it
        if generator is not self._generator:
            if not isinstance(generator, np.random.MT19937):
                self.are_expected = True
                return ()
            # struct { uint32_t key[624]; int pos; }, which numpy documents for use by C and numba
            self._words = _words_at(generator.ctypes.state_address)
            self._generator = generator
        words, others = self._words, self._words_of_random
        # Position and two words of each: after 624 draws the position is the same, but the words differ.
        if others is None:
            return words[624], words[0], words[1]
        return words[624], words[0], words[1], others[0], others[1], others[2]

    def rest(self, seed: int) -> tuple[int, ...]:
        """Set the generators to the state shared by all rows that do not draw; return its mark.

        A row that inspects a generator without drawing from it then finds the same state in every process.

        Args:
            seed: base seed, which alone decides that state.
        """
        mark = self.mark()
        if self._resting != (seed, mark):
            _seed_both(xxhash.xxh3_128_digest(f"{seed}".encode()))
            mark = self.mark()
            self._resting = seed, mark
        return mark


def _words_at(address: int) -> memoryview:
    """Return 625 32-bit words of this process's memory; a ctypes array takes 1.5 times as long to convert."""
    return memoryview((ctypes.c_uint32 * 625).from_address(address)).cast("B").cast("I")


def _words_of_random() -> memoryview | None:
    """Return the words of the generator behind the functions of `random`, position then state; None if not CPython's.

    CPython stores them right after the object header, as `int index; uint32_t state[624]`, which is verified here.
    """
    generator = getattr(random.random, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if random.Random.__mro__[1].__basicsize__ < object.__basicsize__ + 625 * 4:
        return None
    words = _words_at(id(generator) + object.__basicsize__)
    *state, position = generator.getstate()[1]
    return words if words[0] == position and words[1:].tolist() == state else None


global_draws = GlobalDraws()
"""Of this process."""


def seed_globals(seed: int, *, has_tensorflow: bool = True) -> None:
    """Seed the global generators of `random`, `numpy.random`, and, if they are loaded, of torch and TensorFlow.

    User transforms draw from them directly; seeded for each record, they too depend on the sample alone.

    Args:
        seed: 32-bit seed for all of them.
        has_tensorflow: whether to include TensorFlow. Seeding it drops its kernels, which crashes a `tf.data` pipeline
            that is running in another thread (2.21).
    """
    random.seed(seed)
    np.random.seed(seed)
    _seed_libraries(seed, loaded_libraries() - (set() if has_tensorflow else {"tensorflow"}))


def loaded_libraries() -> frozenset[str]:
    """Return the names of the loaded libraries that have global generators of their own."""
    modules = sys.modules
    if "torch" not in modules and "tensorflow" not in modules:  # called twice per row; this takes a third of the time
        return frozenset()
    return frozenset([name for name in _SEED if name in modules])


@contextlib.contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore the global random state after the block, for work in the caller's own process."""
    state = GlobalState.take()
    try:
        yield
    finally:
        state.put_back()


@frozen(slots=False)
class GlobalState:
    """The states of the global generators of this process; equal to another one if nothing was drawn in between.

    Attributes:
        of_random: state of `random`.
        of_numpy: state of `numpy.random`, its words as bytes.
        of_torch: state of torch on the CPU, as bytes; None if torch is not loaded.
        of_tensorflow: seed and state of TensorFlow's eager context, and its generator; None without a context, False
            if it was not included.
    """

    of_random: tuple[Any, ...]
    of_numpy: tuple[Any, ...]
    of_torch: bytes | None
    of_tensorflow: tuple[Any, ...] | Literal[False] | None

    @classmethod
    def take(cls, *, has_tensorflow: bool = True) -> GlobalState:
        """Return the current states.

        Args:
            has_tensorflow: whether to include TensorFlow's.
        """
        name, words, *rest = np.random.get_state(legacy=True)
        torch, context = sys.modules.get("torch"), _tensorflow_context() if has_tensorflow else None
        generator = getattr(context, "_rng", None)  # created when first seeded
        return cls(
            random.getstate(),
            (name, words.tobytes(), *rest),  # type: ignore[union-attr]  # words are an array in the legacy form
            None if torch is None else torch.get_rng_state().numpy().tobytes(),
            (context._seed, generator, generator and generator.getstate())
            if context is not None
            else None
            if has_tensorflow
            else False,
        )

    def put_back(self) -> None:
        """Restore these states; libraries loaded since then start from their defaults."""
        random.setstate(self.of_random)
        name, words, *rest = self.of_numpy
        np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))
        torch, context = sys.modules.get("torch"), _tensorflow_context()
        if torch is not None and self.of_torch is not None:
            torch.set_rng_state(torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8))
        if context is not None and self.of_tensorflow is not False:
            context._seed, context._rng, state = self.of_tensorflow or (None, None, None)
            if state is not None:
                context._rng.setstate(state)


def _seed_libraries(seed: int, loaded: frozenset[str] | None = None) -> frozenset[str]:
    """Seed the given libraries, by default all that are loaded, without importing any, which would take seconds."""
    loaded = loaded_libraries() if loaded is None else loaded
    for name in loaded:
        with contextlib.suppress(AttributeError):  # another thread is still importing it
            _SEED[name](sys.modules[name], seed)
    return loaded


def _tensorflow_context() -> Any:
    return getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, whose annotations may name objects imported for type checkers only.

    Raises:
        TypeError: it is not callable.
        ValueError: it has no signature, like some built-in functions.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)


_ASKS = re.compile("rng|rand|gen|^_|^[gr] ")


def with_rng(function: Callable[..., Any]) -> Callable[[Any, np.random.Generator], Any] | None:
    """Return `function` as one of (argument, generator) if its signature asks for a generator, else None.

    A parameter named `rng` asks for one, with or without a default; so does a second parameter without a default whose
    name or annotation suggests it ("generator", "random"). A second parameter with a default is the function's own
    (`lambda item, scale=2: ...`), and so is an `rng` that `functools.partial` has bound. Callables without a signature
    do not ask.

    Args:
        function: callable of (item) or of (item, generator).

    Raises:
        OptionError: its second argument is something else, such as an index, in whose place it would get a generator.

    Example:
        >>> def draw(item, rng):
        ...     return item + rng.integers(10)
        >>> with_rng(draw) is draw
        True
        >>> with_rng(lambda item, scale=2: item * scale) is None
        True
    """
    try:
        parameters = list(signature_of(function).parameters.values())
    except (TypeError, ValueError):  # some callables written in C
        return None
    places = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    if len(places) > 1 and (places[1].name == "rng" or places[1].default is inspect.Parameter.empty):
        if not _ASKS.search(f"{places[1].name} {places[1].annotation}".lower()):
            raise OptionError(
                f"{getattr(function, '__name__', function)} takes {places[1].name!r} besides its first argument, where "
                "a numpy.random.Generator is passed: call that parameter rng; or give it a default; or put its value "
                "into the item, as in enumerate(items)"
            )
        return function
    is_named = any(
        one.name == "rng" and one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY} for one in parameters[1:]
    )
    if not is_named or _is_given_rng(function):
        return None
    return lambda argument, rng: function(argument, rng=rng)


def _is_given_rng(function: Any) -> bool:
    """Return True if `functools.partial` has bound the `rng` of a function."""
    return isinstance(function, functools.partial) and "rng" in function.keywords


# ---------------------------------------------------------------- draws
#
# The stages in which a copy of a sample is drawn, and the generators that they draw from.


Sample: TypeAlias = dict[str, Any]

_globals_taken = threading.Lock()
"""Held by the thread for whose draw the global generators are seeded."""


@final
class RandomStreams:
    """The generators of one draw, each an independent stream of `sample_seed`, created on first use.

    Args:
        seed: base seed of the run or of the reader, not negative.
        key: key of the row when writing, of the record when reading.
        copy: number of the copy when writing, of the epoch when reading.
        attempt: above 0 for a copy that is drawn again because it came out like an earlier one.
    """

    def __init__(self, seed: int, key: str, copy: int, attempt: int = 0) -> None:
        self._name = seed, key, copy, attempt
        self._drew_globally = False

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """The generator passed to functions."""
        return np.random.Generator(np.random.PCG64(self._sequence))

    @functools.cached_property
    def of_pipeline(self) -> tuple[np.random.Generator, random.Random]:
        """The two generators that an albumentations pipeline draws from."""
        return np.random.Generator(np.random.PCG64(self._words[0])), random.Random(self._words[1])  # noqa: S311

    @property
    def global_seed(self) -> int:
        """The 32-bit seed of the process's global generators."""
        return self._words[2]

    @contextlib.contextmanager
    def as_globals(self) -> Iterator[None]:
        """Seed the global generators of this process for the block, and restore them after it.

        For libraries that draw only from them; TensorFlow's are left alone. One thread at a time can enter the block.
        """
        with _globals_taken:
            before = GlobalState.take(has_tensorflow=False)
            seed_globals(self._words[3], has_tensorflow=False)
            seeded = GlobalState.take(has_tensorflow=False)
            try:
                yield
            finally:
                self._drew_globally |= GlobalState.take(has_tensorflow=False) != seeded
                before.put_back()

    def decided_nothing(self, num_coins: int) -> bool:
        """Return True if the draw that just ended did not depend on random numbers.

        That is so if nothing was drawn, apart from the coins that a pipeline tosses for stages that it always applies.
        If TensorFlow is loaded, there is no telling: an op with its own seed, or one in a `tf.function`, leaves no
        trace in the state that Python sees. Seeds the global generators again.

        Args:
            num_coins: number of coins tossed for stages that are always applied.
        """
        if "tensorflow" in loaded_libraries() or self._drew_globally:
            return False
        found = GlobalState.take()
        fresh = RandomStreams(*self._name)
        if "rng" in self.__dict__ and not _are_alike(self.rng, fresh.rng):
            return False
        if "of_pipeline" in self.__dict__:
            (numbers, coins), (fresh_numbers, fresh_coins) = self.of_pipeline, fresh.of_pipeline
            for _ in range(num_coins):
                fresh_coins.random()
            if coins.getstate() != fresh_coins.getstate() or not _are_alike(numbers, fresh_numbers):
                return False
        seed_globals(self.global_seed)
        return found == GlobalState.take()

    @functools.cached_property
    def _sequence(self) -> np.random.SeedSequence:
        return sample_seed(*self._name)

    @functools.cached_property
    def _words(self) -> list[int]:
        # PCG64 takes the first 8 words of the sequence; the other streams use different words.
        words: list[int] = self._sequence.generate_state(12).tolist()
        return words[8:]


def _are_alike(one: np.random.Generator, other: np.random.Generator) -> bool:
    """Return True if neither of two equally seeded generators was drawn from or spawned others."""
    sequences = (one.bit_generator.seed_seq, other.bit_generator.seed_seq)
    spawned, others = (getattr(sequence, "n_children_spawned", 0) for sequence in sequences)
    return one.bit_generator.state == other.bit_generator.state and spawned == others


class Stage(abc.ABC):
    """One stage of a draw; picklable by dill. It draws only from the `RandomStreams` passed to it."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name used in messages."""

    @abc.abstractmethod
    def apply(self, sample: Sample, streams: RandomStreams) -> Any:
        """Return a sample or an iterable of samples; may write to `sample`."""

    @property
    def num_coins(self) -> int:
        """Number of coins tossed for each sample whose outcome does not matter."""
        return 0

    @abc.abstractmethod
    def parts(self) -> Iterator[Stage]:
        """Yield the parts of this stage, to find out which of them misbehaves."""

    @abc.abstractmethod
    def for_thread(self) -> Stage:
        """Return a stage that another thread may use at the same time."""
