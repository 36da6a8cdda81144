"""Unique keys, inverse and occurrence lists: plain calls, large calls cut into blocks and parts, any thread count."""

from __future__ import annotations

import numpy as np
import pytest

from embcache._core.swap import SwapManager, _age_dedup
from embcache._core.table import Table

EXTREMES = np.array([0, -1, 1, -(2**63), 2**63 - 1, -2, 2**62], np.int64)
LARGE = 65536  # keys of one table from which a call is cut, where there are several threads


def planned(lists, num_threads=1):
    offsets = np.concatenate([[0], np.cumsum([len(keys) for keys in lists])]).astype(np.int64)
    tables = [Table(f"t{t}", 1) for t in range(len(lists))]
    with SwapManager(tables, [max(len(keys), 1) for keys in lists], num_threads=num_threads) as manager:
        return manager.plan(np.concatenate([*lists, np.empty(0, np.int64)]), offsets)


def check(plan, lists):
    """Against NumPy: uniques by first occurrence, inverse, groups in batch order."""
    position = first = 0
    for t, keys in enumerate(lists):
        _, at, back = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(at, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        inverse = first + rank[back]
        assert np.array_equal(plan.unique_keys[first : first + len(at)], keys[at[order]])
        assert np.array_equal(plan.inverse[position : position + len(keys)], inverse)
        group_order = np.argsort(inverse, kind="stable")
        assert np.array_equal(plan.occurrence_order[position : position + len(keys)], position + group_order)
        ends = position + np.cumsum(np.bincount(inverse - first, minlength=len(at)))
        assert np.array_equal(plan.segment_offsets[first + 1 : first + len(at) + 1], ends)
        position += len(keys)
        first += len(at)
        assert plan.unique_offsets[t + 1] == first
    assert plan.segment_offsets[0] == 0 and plan.num_uniques == first


def zipf(rng, n, keys):
    return (rng.zipf(1.2, n) % keys).astype(np.int64) * np.int64(0x9E3779B97F4A7C15 - 2**64)


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 255, 4096, 20000])
def test_small_calls(n):
    rng = np.random.default_rng(n)
    lists = [rng.integers(-n - 1, n + 1, n), rng.choice(EXTREMES, n), np.arange(n), np.full(n, -7)]
    check(planned(lists), lists)


@pytest.mark.parametrize("num_threads", [1, 2, 3])  # the plain way, halves, parts
@pytest.mark.parametrize("n", [LARGE - 1, LARGE, LARGE + 1, 8192 * 9, 200_001])
def test_large_calls_are_cut_and_agree(n, num_threads):
    rng = np.random.default_rng(n)
    lists = [zipf(rng, n, 10**6), rng.choice(EXTREMES, n), rng.integers(-(2**63), 2**63 - 1, n)]
    check(planned(lists, num_threads), lists)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_small_and_large_tables_in_one_batch_with_empty_ones_between(num_threads):
    rng = np.random.default_rng(5)
    empty = np.empty(0, np.int64)
    lists = [empty, zipf(rng, 100, 50), empty, zipf(rng, 90_000, 10**5), EXTREMES, zipf(rng, 70_000, 100), empty]
    check(planned(lists, num_threads), lists)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_keys_of_the_second_half_alone_of_both_and_of_the_first_alone(num_threads):
    rng = np.random.default_rng(8)
    old, new = np.arange(50_000), np.arange(50_000, 100_000)
    lists = [
        np.concatenate([rng.permutation(old), rng.permutation(new)]),  # nothing in common
        np.concatenate([rng.permutation(old), rng.permutation(old)]),  # everything
        np.concatenate([old, np.full(50_001, 7)]),
        np.concatenate([np.full(50_000, 7), rng.permutation(new)[:40_000], old[:10_001]]),
    ]
    check(planned(lists, num_threads), lists)


def test_a_small_call_after_a_large_one_finds_nothing_of_it():
    table = Table("t", 1)
    rng = np.random.default_rng(6)
    with SwapManager([table], [300_000], num_threads=1) as manager:
        for n in (10, 150_000, 10, 60_000, 3):
            keys = rng.integers(0, 2 * n, n)
            plan = manager.plan(keys, np.array([0, n]))
            check(plan, [keys])
            manager.cancel(plan)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_one_key_alone_fills_a_large_call(num_threads):
    keys = np.full(LARGE * 2, -(2**63), np.int64)
    plan = planned([keys], num_threads)
    assert plan.unique_keys.tolist() == [-(2**63)] and plan.segment_offsets.tolist() == [0, len(keys)]
    assert np.array_equal(plan.occurrence_order, np.arange(len(keys)))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("n", [300, 20_000, 100_000])
def test_more_distinct_keys_than_the_last_batch_let_one_expect(n, num_threads):
    """The probe table is sized after the last batch, and grows in the middle of a call where that was too small."""
    rng = np.random.default_rng(n)
    with SwapManager([Table("t", 1)], [2 * n], num_threads=num_threads) as manager:
        for keys in (
            np.full(n, 5),
            rng.integers(-(2**63), 2**63 - 1, n),
            np.arange(n) // 2,
            np.full(n, 6),
            -np.arange(n),
        ):
            plan = manager.plan(keys, np.array([0, n]))
            check(plan, [keys])
            manager.cancel(plan)


@pytest.mark.parametrize("last", [2**32 - 1, 2**32 - 2000, 2**32 - 50_000])
def test_stamps_start_anew_before_they_wrap_round(last):
    rng = np.random.default_rng(7)
    with SwapManager([Table("t", 1)], [100_000], num_threads=1) as manager:
        for turn in range(4):
            keys = rng.integers(0, 40_000 if turn % 2 else 2**60, 30_000)
            plan = manager.plan(keys, np.array([0, len(keys)]))
            check(plan, [keys])
            manager.cancel(plan)
            _age_dedup(manager, last)
