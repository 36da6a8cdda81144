"""Policies cost O(1) amortized: what they look at to find victims is counted, for small and large caches and traces that are hard on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from embcache._core.swap import SwapManager, _looked_at
from embcache._core.table import Table

BATCH = 128
STEPS_A_USE = (
    12  # the most looks for a key of a batch (up to 8.3 are found); a search through the slots would take thousands
)


def random_keys(capacity: int, batches: int) -> Iterator[np.ndarray]:
    """Few keys come often, many seldom."""
    rng = np.random.default_rng(0)
    for _ in range(batches):
        yield np.append(rng.zipf(1.3, BATCH // 2) % 10**6, rng.integers(0, 4 * capacity, BATCH // 2))


def loop(capacity: int, batches: int) -> Iterator[np.ndarray]:
    """Round and round over a little more than fits: all misses under "lru"."""
    for number in range(batches):
        yield np.arange(number * BATCH, (number + 1) * BATCH) % (capacity + BATCH)


def hits_and_one_miss(capacity: int, batches: int) -> Iterator[np.ndarray]:
    """One new key a batch; all others are used again and again, so that what was least recently used soon is not."""
    for number in range(batches):
        yield np.append(np.arange(number * BATCH, (number + 1) * BATCH) % (capacity - 2 * BATCH), 10**9 + number)


def oldest_again(capacity: int, batches: int) -> Iterator[np.ndarray]:
    """Half of each batch are the keys that would go next, used just in time; the other half are new."""
    half = BATCH // 2
    for number in range(batches):
        old = np.arange(number * half, (number + 1) * half) % (capacity // 2)
        yield np.concatenate([old, 10**9 + np.arange(number * half, (number + 1) * half)])


def often_then_never(capacity: int, batches: int) -> Iterator[np.ndarray]:
    """Keys that were used as often as policies count, and then others only."""
    part = -(-capacity // BATCH)
    for number in range(batches):
        at = number % part if number < batches // 2 else number
        yield np.arange(at * BATCH, (at + 1) * BATCH) + (10**9 if number >= batches // 2 else 0)


@pytest.mark.parametrize("trace", [random_keys, loop, hits_and_one_miss, oldest_again, often_then_never])
@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo"])
def test_finding_victims_costs_the_same_in_small_and_large_caches(policy, trace):
    for capacity in (500, 4000, 32000):
        manager = SwapManager([Table("t", 1)], [capacity], policy=policy, num_threads=1)
        used = victims = 0
        for keys in trace(capacity, max(4 * capacity // BATCH, 400)):
            plan = manager.plan(keys, np.array([0, len(keys)]))
            used += len(plan.unique_keys)
            victims += len(plan.swap_out_keys)
            manager.mark_swapped_out(plan)
            manager.mark_swapped_in(plan)
            manager.finish(plan)
        looks = _looked_at(manager, 0)
        assert victims <= looks <= STEPS_A_USE * used + 2 * capacity, (capacity, looks / used)
        assert victims > 50
        manager.close()


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo"])
def test_a_search_passes_over_each_pinned_slot_once(policy):
    """Batches that have not finished pin the oldest slots, which every search for victims meets first."""
    capacity, pinned = 4000, 1000
    manager = SwapManager([Table("t", 1)], [capacity], policy=policy, num_threads=1)
    held = [manager.plan(np.arange(pinned), np.array([0, pinned]))]
    manager.mark_swapped_out(held[0])
    manager.mark_swapped_in(held[0])
    for number in range(100):
        before = _looked_at(manager, 0)
        keys = 10**6 + np.arange(number * BATCH, (number + 1) * BATCH)
        plan = manager.plan(keys, np.array([0, BATCH]))
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)
        # "lru" lists all slots anew once its list is used up: here no more than these and the pinned ones are on it
        most = pinned + STEPS_A_USE * BATCH + (4 * capacity if policy == "lru" else 0)
        assert _looked_at(manager, 0) - before <= most
    assert manager.stats()[0]["swap_out_rows"] > 5000
    manager.finish(held[0])
    manager.close()
