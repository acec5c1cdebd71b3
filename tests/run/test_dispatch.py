"""The order of parts: which worker gets which part when, so that parts find those before them in the shard's file."""

import random

from datamat.plan.plan import PartSpec
from datamat.run.dispatch import PartOrder


def parts_of(*counts, costs=None):
    """Return the parts of shards that have these numbers of parts."""
    return [
        PartSpec(f"s-train-{shard:05d}-of-00009", number, 0, 1, (costs or {}).get(shard, 10), 1, False, "f", count)
        for shard, count in enumerate(counts)
        for number in range(count)
    ]


def simulate(parts, num_workers, *, seed=0, num_spare=1):
    """Hand out parts to workers that take random times; return the parts in order, and those that had to lie apart."""
    order, draw = PartOrder(parts), random.Random(seed)
    under_way, done, handed, apart = [], set(), [], []
    while True:
        while len(under_way) < num_workers + num_spare:
            part = order.next(may_lie_apart=len(under_way) < num_workers)
            if part is None:
                break
            handed.append(part)
            under_way.append(part)
        if not under_way:
            break
        # The workers have taken the first parts; a part is appended to the file if the one before it is there.
        for part in under_way[:num_workers]:
            if (part.shard, part.number) not in done and part.number and part not in apart:
                before = (part.shard, part.number - 1) in done
                apart += [] if before else [part]
        ended = under_way.pop(draw.randrange(min(num_workers, len(under_way))))
        done.add((ended.shard, ended.number))
        order.end(ended)
    assert not order
    return handed, apart


def test_workers_at_one_shard_append_every_second_part():
    """One of two workers appends to the file; the other leaves a gap for it to fill."""
    for seed in range(20):
        _, apart = simulate(parts_of(100), 2, seed=seed)

        assert len(apart) <= 60


def test_largest_shard_is_begun_first_and_begun_ones_are_finished():
    """Workers finish together, and few shards are unfinished at a time."""
    handed, _ = simulate(parts_of(3, 3, 3, 3, costs={2: 30}), 1, num_spare=0)

    shards = [int(part.shard[8:13]) for part in handed]
    assert shards == [2] * 3 + [0] * 3 + [1] * 3 + [3] * 3
