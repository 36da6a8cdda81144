"""Tables whose keys are nearly all resident are planned the short way (ec_resident.h): with the same plans as the long way.

A filter that admits every key and evicts none forces the long way, so two planners can be compared.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from embcache._core.plan import Plan
from embcache._core.swap import SwapManager, _fail_allocation, _set_long_ago
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig
from embcache.errors import HbmCapacityError, HostMemoryError

ARRAYS = (
    "table_offsets unique_keys unique_offsets inverse occurrence_order segment_offsets slots admitted swap_in_keys swap_in_slots "
    "swap_in_rows swap_in_offsets swap_out_keys swap_out_slots swap_out_rows swap_out_offsets table_hits table_misses"
).split()
EVERYBODY = AdmitAndEvictConfig(time_source="step")


def make(capacities: list[int], *, long: bool, threads: int = 1) -> SwapManager:
    tables = [Table(f"t{t}", 2, with_filter=long) for t in range(len(capacities))]
    return SwapManager(tables, capacities, [EVERYBODY if long else None] * len(capacities), num_threads=threads)


def flatten(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key for part in lists for key in part], np.int64), np.cumsum([0] + [len(part) for part in lists])


def arrays(plan: Plan) -> dict[str, list[int]]:
    return {name: getattr(plan, name).tolist() for name in ARRAYS}


def move(manager: SwapManager, plan: Plan) -> None:
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)


def state(manager: SwapManager) -> list[object]:
    manager.check()
    return [[column.tolist() for column in manager.standings(t).values()] for t in range(len(manager.stats()))]


def draw(rng: random.Random, tables: int, step: int) -> list[list[int]]:
    """Keys that stay with a working set which wanders slowly, many of them repeated; now and then a batch of strangers."""
    lists = []
    for t in range(tables):
        near = [100 * t + step // 4 + rng.randint(0, 11) for _ in range(rng.choice([0, 1, 8, 30]))]
        far = [rng.randint(-(2**63), 2**63 - 1) for _ in range(rng.choice([0, 0, 0, 1, 5]))]
        lists.append(rng.sample(near + far, len(near) + len(far)))
    return lists


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_short_way_and_long_way_plan_alike(seed, threads):
    rng = random.Random(seed)
    capacities = [rng.randint(18, 40) for _ in range(rng.randint(1, 3))]
    short, long = make(capacities, long=False, threads=threads), make(capacities, long=True)
    if seed % 2:
        _set_long_ago(short, rng.randint(0, 60))
    open_plans: list[tuple[Plan, Plan]] = []
    failures = hits = 0
    for step in range(160):
        keys, offsets = flatten(draw(rng, len(capacities), step))
        try:
            theirs = long.plan(keys, offsets)
        except HbmCapacityError as error:
            before = state(short)
            with pytest.raises(HbmCapacityError) as caught:
                short.plan(keys, offsets)
            assert (str(caught.value), caught.value.need, caught.value.have) == (str(error), error.need, error.have)
            assert state(short) == before
            failures += 1
        else:
            ours = short.plan(keys, offsets)
            assert arrays(ours) == arrays(theirs)
            hits += ours.hits
            if rng.random() < 0.2:
                short.cancel(ours)
                long.cancel(theirs)
            else:
                open_plans.append((ours, theirs))
                move(short, ours)
                move(long, theirs)
        while len(open_plans) > (0 if failures % 2 else 2):
            ours, theirs = open_plans.pop(rng.randrange(len(open_plans)))
            short.finish(ours)
            long.finish(theirs)
        assert state(short) == state(long)
    assert hits > 500


def test_short_way_leaves_nothing_behind_when_memory_runs_out():
    manager = make([6, 6], long=False)
    known = flatten([[1, 2, 3, 4], [5, 6, 7, 8]])
    first = manager.plan(*known)
    move(manager, first)
    manager.finish(first)
    manager.finish(again := moved(manager, known))
    mixed = flatten([[2, 2, 9, 1, 9, 10, 11], [6, 12, 5, 12, 6]])
    for countdown in range(100):
        before = state(manager)
        _fail_allocation(countdown)
        try:
            plan = manager.plan(*mixed)
        except HostMemoryError:
            assert state(manager) == before
            continue
        finally:
            _fail_allocation(-1)
        break
    assert countdown > 3
    assert plan.misses == 4
    assert plan.unique_keys.tolist() == [2, 9, 1, 10, 11, 6, 12, 5]
    assert plan.inverse.tolist() == [0, 0, 1, 2, 1, 3, 4, 5, 6, 7, 6, 5]
    assert again.hits == 8
    manager.cancel(plan)
    assert state(manager) == before


def moved(manager: SwapManager, batch: tuple[np.ndarray, np.ndarray]) -> Plan:
    plan = manager.plan(*batch)
    move(manager, plan)
    return plan


@pytest.mark.parametrize("threads", [1, 2])
def test_occurrences_are_grouped_once_whoever_asks(threads):
    rng = np.random.default_rng(3)
    manager = make([70_000, 100], long=False, threads=threads)
    keys = np.concatenate([rng.permutation(70_000).repeat(2), rng.integers(0, 90, 500)])
    offsets = np.array([0, 140_000, 140_500])
    for _ in range(2):
        plan = moved(manager, (keys, offsets))
        manager.finish(plan)
    assert plan.hits == plan.num_uniques
    seen: list[np.ndarray] = []
    askers = [threading.Thread(target=lambda: seen.append(plan.occurrence_order)) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    expected = np.argsort(plan.inverse, kind="stable")
    now = moved(manager, (keys, offsets))
    for _ in range(2):  # again is no harm
        now.group_now()
    assert np.array_equal(now.occurrence_order, expected)
    assert all(np.array_equal(order, expected) for order in seen)
    assert np.array_equal(plan.segment_offsets, np.concatenate([[0], np.cumsum(np.bincount(plan.inverse))]))
