"""I3 at full width: a plan that lets everything grow, sweeps and evicts, with each request for memory or disk refused once."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embcache._core.swap import SwapManager, _fail_allocation
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig, ShowClick
from embcache.errors import DiskFullError, HostMemoryError

SLOTS = 700  # fewer than what three batches use: the last one has victims
FILTERS = {
    "counts": AdmitAndEvictConfig(admit_threshold=2, evict_threshold=50, evict_step_interval=3, evict_keep_min=20),
    "sketch": AdmitAndEvictConfig(admit_threshold=2, evict_threshold=50, evict_step_interval=3, sketch_bytes=4096),
    "scores": AdmitAndEvictConfig(
        admit_threshold=1.5,
        evict_step_interval=3,
        policy="show_click",
        show_click=ShowClick(score_decay=0.9, evict_percentage=0.3),
    ),
}

Batch = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def batch_of(number: int, config: AdmitAndEvictConfig) -> Batch:
    """Keys of two tables, new and old ones; offsets; timestamps and clicks where they are wanted."""
    rng, n = np.random.default_rng(number), (600, 800, 1100)[number]
    times = number * 40 + rng.integers(0, 30, n)
    clicks = (rng.random(n) < 0.5).astype(np.uint8)
    return (
        rng.integers(-400, 400, n) * (number + 1),
        np.array([0, n // 2, n]),
        times if config.needs_timestamps else None,
        clicks if config.needs_labels else None,
    )


def before_the_third(
    config: AdmitAndEvictConfig, policy: str, base: Path | None = None
) -> tuple[SwapManager, list[Table]]:
    """Tables that are about to split, and a planner with two batches behind it: the third one sweeps."""
    tables = [
        Table(
            f"t{t}",
            2,
            with_filter=t == 0,
            split_above=150,
            index_seed=1,
            num_threads=1,
            directory=None if base is None else base / f"t{t}",
        )
        for t in range(2)
    ]
    manager = SwapManager(tables, [SLOTS, SLOTS], [config, None], num_threads=1, policy=policy)
    for number in range(2):
        plan = manager.plan(*batch_of(number, config))
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)
    return manager, tables


def everything(manager: Any, tables: list[Table]) -> list[Any]:
    """What a plan may change: residents and their order, filters, host rows, columns and their places."""
    seen: list[Any] = [manager.step, len(manager.outstanding)]
    for t, table in enumerate(tables):
        rows = table.scan(0, 10**6)[0]
        seen += [{name: column.tolist() for name, column in manager.standings(t).items()}, len(table), rows.tolist()]
        seen += [column.tolist() for column in (*manager.residents(t), *table.columns(rows))]
        seen.append(table.find(np.arange(-1200, 1200)).tolist())
    filters = [manager.filter_state(0)] if manager.outstanding else [manager.filter_state(0), manager.export_filter(0)]
    return seen + [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in filters]


def arrays_of(plan: Any) -> list[list[int]]:
    names = "slots admitted swap_in_keys swap_in_slots swap_in_rows swap_out_keys swap_out_slots swap_out_rows"
    return [getattr(plan, name).tolist() for name in names.split()]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *(("counts", policy) for policy in ("lru", "lfu", "s3fifo", "lookahead")),
        ("sketch", "s3fifo"),
        ("scores", "lru"),
    ],
)
def test_i3_every_request_of_a_growing_plan_refused_in_turn_changes_nothing(kind: str, policy: str) -> None:
    config = FILTERS[kind]
    batch = batch_of(2, config)
    manager, tables = before_the_third(config, policy)
    had, plan = sum(table.stats()["partitions"] for table in tables), manager.plan(*batch)
    assert sum(table.stats()["partitions"] for table in tables) > had and len(plan.swap_out_keys)
    assert manager.stats()[0]["evicted"] > 0
    wanted, after = arrays_of(plan), everything(manager, tables)
    refused, countdown, served = 0, 0, 0
    while served < 12:  # in a row: there is nothing left to refuse (a few requests can be done without)
        manager, tables = before_the_third(config, policy)
        before = everything(manager, tables)
        _fail_allocation(countdown)
        try:
            plan = manager.plan(*batch)
        except HostMemoryError as error:
            assert "nothing has changed" in str(error)
            refused, served = refused + 1, 0
            _fail_allocation(-1)
            assert everything(manager, tables) == before
            manager.check()
            plan = manager.plan(*batch)
        else:
            served += 1
        finally:
            _fail_allocation(-1)
        assert arrays_of(plan) == wanted and everything(manager, tables) == after
        manager.cancel(plan)
        assert everything(manager, tables) == before
        manager.check()
        for table in tables:
            table.check()
        countdown += 1
    assert refused >= 15


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_i3_every_call_of_a_growing_plan_that_a_full_disk_refuses_changes_nothing(tmp_path: Path, error: int) -> None:
    """The same with tables in files, where growing means calls of the file system."""
    config = FILTERS["counts"]
    batch = batch_of(2, config)
    memory, twins = before_the_third(config, "lru")
    wanted, after = arrays_of(memory.plan(*batch)), everything(memory, twins)
    manager, tables = before_the_third(config, "lru", tmp_path)
    before = everything(manager, tables)
    outcomes = []
    for full in tables:
        assert full.directory is not None
        for calls in range(200):
            full.directory.fail_after(calls, error)
            try:
                plan = manager.plan(*batch)
            except (DiskFullError, HostMemoryError) as refusal:  # the latter where it is the mapping that fails
                outcomes.append(type(refusal))
                assert "nothing has changed" in str(refusal)
                if isinstance(refusal, DiskFullError):
                    assert refusal.filename == str(tmp_path / full.name) and f"'{full.name}'" in str(refusal)
            else:
                manager.cancel(plan)
                break
            finally:
                full.directory.fail_after(-1, 0)
            assert everything(manager, tables) == before
            manager.check()
    plan = manager.plan(*batch)
    assert arrays_of(plan) == wanted and everything(manager, tables) == after
    assert DiskFullError in outcomes and len(outcomes) >= 4
