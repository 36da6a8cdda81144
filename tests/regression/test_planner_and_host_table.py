"""A planner that wrote past its journal in a sweep, read a closed table, and undid the birth of a row that was gone."""

from __future__ import annotations

import numpy as np
import pytest

import embcache as ec
from embcache._core.swap import SwapManager
from embcache._core.table import Table


def train(manager: SwapManager, keys: np.ndarray, timestamps: np.ndarray) -> None:
    plan = manager.plan(keys.astype(np.int64), np.array([0, len(keys)]), timestamps.astype(np.int64))
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)
    manager.finish(plan)


def test_a_floor_that_ends_a_pass_at_once_leaves_room_for_the_batch() -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=10, evict_threshold=100, evict_step_interval=1, evict_keep_min=10)
    table = Table("a", 4, with_filter=True)
    rows, dead, late = np.arange(10), np.arange(10_000, 11_002), np.arange(50_000, 51_000)
    with SwapManager([table], [2000], [rule], sweep_rows=1) as manager:
        stamps = np.concatenate([np.full(100, 1000), np.full(len(dead), 950), np.full(len(late), 990)])
        train(manager, np.concatenate([np.repeat(rows, 10), dead, late]), stamps)
        train(manager, rows, np.full(10, 1060))  # a pass over the dead begins
        train(manager, np.append(late, 77), np.append(np.full(len(late), 990), 5000))  # the floor ends it at once
        assert manager.stats()[0]["forgotten"] == len(dead) + len(late) and len(table) == 10
        manager.check()


@pytest.mark.parametrize("door", ["drop", "forget_waiting"])
def test_a_closed_table_is_not_looked_into(door: str) -> None:
    rule = ec.AdmitAndEvictConfig(admit_threshold=1, evict_threshold=10, evict_step_interval=1)
    table = Table("a", 4, with_filter=True, split_above=500)
    with SwapManager([table], [2000], [rule], sweep_rows=1) as manager:
        train(manager, np.arange(1000), np.full(1000, 100))
        train(manager, np.arange(1000, 1005), np.full(5, 200))  # the pass over the first thousand is under way
        table.close()
        with pytest.raises(ec.ClosedError):
            getattr(manager, door)(0, np.array([5_000_000]))


def test_cancel_passes_over_rows_that_were_erased_by_hand() -> None:
    table = Table("a", 4)
    with SwapManager([table], [100]) as manager:
        keys = np.arange(50)
        plan = manager.plan(keys, np.array([0, 50]))
        table.erase(keys[:10])
        manager.cancel(plan)
        assert len(table) == 0
        table.check()
