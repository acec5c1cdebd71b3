"""Random streams that depend on the sample alone, never on the process or the order that computes it.

Every random choice of a run is drawn from a stream named by (seed, key, copy). Workers hold no random state of
their own: they derive it anew for each record, so any number of them draws the same numbers.
"""

from __future__ import annotations

import contextlib
import random
import struct
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["global_state_kept", "key_hash", "mix64", "sample_rng", "sample_seed", "seed_globals"]


def key_hash(key: str) -> int:
    """Return the stable 64-bit hash of `key` (XXH3) that decides its split and its place in a shard."""
    return xxhash.xxh3_64_intdigest(key.encode())


def mix64(values: np.ndarray) -> np.ndarray:
    """Return uint64 values scattered over the whole range: the finisher of splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def sample_seed(seed: int, key: str, copy: int, attempt: int = 0) -> np.random.SeedSequence:
    """Return the seed of one record.

    The entropy is (the 128-bit XXH3 hash of the key, copy, attempt, seed) in words of 32 bits: two records share a
    stream only if a 128-bit hash collides.

    Args:
        seed: the seed of the run, not negative.
        key: the key of the input row, without the `#COPY` suffix.
        copy: number of the copy, from 0.
        attempt: above 0 for a copy that is drawn anew because it came out as an earlier one did.

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
    # As an array, because numpy takes three times as long over a list of int, which it converts one by one.
    return np.random.SeedSequence(np.frombuffer(words, "<u4").astype(np.uint32))


def sample_rng(seed: int, key: str, copy: int) -> np.random.Generator:
    """Return the generator of one record: PCG64 over `sample_seed`."""
    return np.random.Generator(np.random.PCG64(sample_seed(seed, key, copy)))


def seed_globals(seed: int) -> None:
    """Seed the global generators of `random` and `numpy.random`.

    Transforms that users wrote draw from them directly; seeded per record they, too, depend on the sample alone.

    Args:
        seed: 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def global_state_kept() -> Iterator[None]:
    """Put the global random state back after the block: for work done in the caller's own process."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
