"""Routes of keys to their owners, and plans of a part of a batch: what one rank does, without any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache._core.digest import hash_keys
from embcache._core.route import Router, owners_of
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from embcache.checkpoint import vshards_of

KEYS = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))


@given(st.lists(st.lists(KEYS, max_size=30), min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_i7_each_key_of_a_table_goes_once_to_the_owner_of_its_vshard(
    tables: list[list[int]], world: int, two: bool
) -> None:
    keys = np.array([key for table in tables for key in table], np.int64)
    offsets = np.cumsum([0, *map(len, tables)]).astype(np.int64)
    group_of = np.array([int(two and t >= len(tables) // 2) for t in range(len(tables))], np.int64)
    group_of -= group_of.min()
    unique, blocks, inverse, times, order, segments = Router(group_of, world).route(keys, offsets)
    expected: list[int] = []
    for group in range(int(group_of.max()) + 1):
        for owner in range(world):
            low, high = vshards_of(owner, world)
            for t, table in enumerate(tables):
                mine: list[int] = []
                if group_of[t] == group:
                    vshards = hash_keys(np.array(table, np.int64)) >> np.uint64(52)
                    mine = list(
                        dict.fromkeys(k for k, v in zip(table, vshards.tolist(), strict=True) if low <= v < high)
                    )
                assert blocks[group, owner, t] == len(mine)
                expected += mine
    assert unique.tolist() == expected
    assert np.array_equal(unique[inverse], keys)
    assert np.array_equal(np.bincount(inverse, minlength=len(unique)), times)
    assert np.array_equal(np.diff(segments), times)
    for u in range(len(unique)):
        assert order[segments[u] : segments[u + 1]].tolist() == np.flatnonzero(inverse == u).tolist()
    assert np.array_equal(blocks.sum(axis=(0, 2)), np.bincount(owners_of(unique, world), minlength=world))


def test_i11_bad_routes_are_refused() -> None:
    with pytest.raises(ec.ShapeError, match="world = 0"):
        Router(np.zeros(1, np.int64), 0)
    router = Router(np.zeros(2, np.int64), 2)
    with pytest.raises(ec.ShapeError, match="give 3 of them"):
        router.route(np.arange(3), np.array([0, 3]))
    with pytest.raises(ec.ShapeError, match="table 1 has -1 keys"):
        router.route(np.arange(3), np.array([0, 4, 3]))


def planner(rule: ec.AdmitAndEvictConfig, slots: int = 40) -> SwapManager:
    return SwapManager([Table("t", 2, with_filter=True)], [slots], [rule])


def finish(manager: SwapManager, plan: object) -> None:
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)
    manager.finish(plan)


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8), st.integers(1, 4))
def test_positions_that_stand_for_several_occurrences_count_as_those(batches: list[list[int]], threshold: int) -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=threshold, evict_threshold=3, evict_step_interval=2)
    one, other = planner(rule), planner(rule)
    for step, batch in enumerate(batches):
        keys = np.array(batch, np.int64)
        first = one.plan(keys, np.array([0, len(keys)]), np.full(len(keys), step))
        unique, times = np.unique(keys, return_counts=True)
        newest = np.array([step if len(keys) else -(2**63)])
        second = other.plan(
            unique,
            np.array([0, len(unique)]),
            np.full(len(unique), step),
            occurrences=times.astype(np.int64),
            newest=newest,
        )
        admitted = dict(zip(first.unique_keys.tolist(), first.admitted.tolist(), strict=True))
        assert admitted == dict(zip(second.unique_keys.tolist(), second.admitted.tolist(), strict=True))
        finish(one, first)
        finish(other, second)
    for name in ("keys", "counts", "last", "newest", "cutoff"):
        assert np.array_equal(one.export_filter(0)[name], other.export_filter(0)[name])


def test_newest_of_the_larger_batch_dates_a_part_of_it() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=5, evict_step_interval=1)
    manager = planner(rule)
    finish(manager, manager.plan(np.array([1, 2]), np.array([0, 2]), np.array([10, 17])))
    none = np.empty(0, np.int64)
    finish(manager, manager.plan(none, np.array([0, 0]), none, newest=np.array([20])))
    assert manager.export_filter(0)["newest"] == 20
    finish(manager, manager.plan(none, np.array([0, 0]), none, newest=np.array([-(2**63)])))


def test_i3_what_others_decide_may_fail_and_nothing_has_changed() -> None:
    rule = ec.AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=2, evict_keep_min=1)
    manager = planner(rule)
    asked: list[object] = []

    def refuse(questions: list[object]) -> list[object]:
        asked.extend(questions)
        raise ArithmeticError("no answer")

    finish(manager, manager.plan(np.array([1, 2]), np.array([0, 2]), np.array([1, 5]), agree=refuse))
    assert asked == []  # no sweep in step 1
    with pytest.raises(ArithmeticError, match="no answer"):
        manager.plan(np.array([3]), np.array([0, 1]), np.array([9]), agree=refuse)
    assert len(asked) == 1
    assert manager.step == 1
    assert manager.export_filter(0)["newest"] == 5
    manager.check()
    plan = manager.plan(np.array([3]), np.array([0, 1]), np.array([9]), agree=lambda questions: [4])
    finish(manager, plan)
    assert manager.export_filter(0)["cutoff"] == 4
    with pytest.raises(ec.ShapeError, match="occurrences: 0"):
        manager.plan(np.array([3]), np.array([0, 1]), np.array([9]), occurrences=np.array([0]))
    assert manager.step == 2
