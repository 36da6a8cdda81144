"""I4: a plan is a function of state and batch, the same at any thread count."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

import embcache as ec
from embcache._core.notice import Notice
from embcache._core.swap import SwapManager
from embcache._core.table import Table
from promises.strategies import make_batch
from promises.training import check, model_state, plan_arrays, train_window

THREADS = (1, 2, 3, 7)


def big_plans(num_threads: int, policy: str) -> list[dict]:
    """Plans large enough to wake the pool, over tables of many partitions, with two filters and a rollback."""
    rules = [
        None,
        ec.AdmitAndEvictConfig(admit_threshold=2),
        ec.AdmitAndEvictConfig(evict_threshold=25, evict_step_interval=2),
    ]
    tables = [
        Table(f"t{t}", 4, with_filter=rule is not None, num_threads=num_threads, split_above=1024)
        for t, rule in enumerate(rules)
    ]
    capacities = [16_500, 9_000, 8_500]
    manager = SwapManager(tables, capacities, rules, policy=policy, num_threads=num_threads)
    rng = np.random.default_rng(7)
    plans, batches = [], []
    for step in range(8):
        parts = [
            (60_000 * rng.random(size) ** 2).astype(np.int64) * 0x9E3779B97F4A7C1 for size in (20_000, 12_000, 9_000)
        ]
        keys = np.concatenate(parts)
        batches.append((keys, np.cumsum([0, *map(len, parts)]), 10 * step + rng.integers(-20, 1, len(keys))))
    ahead = deque(batches) if policy == "lookahead" else deque()
    notices: deque[Notice] = deque()
    for step, (keys, offsets, stamps) in enumerate(batches):
        while ahead and len(notices) < 3:
            notices.append(manager.look_ahead(*ahead.popleft()[:2]))
        notice = notices.popleft() if notices else None
        plan = manager.plan(keys, offsets, stamps, notice=notice)
        if step == 3:
            manager.cancel(plan)
            plan = manager.plan(keys, offsets, stamps, notice=notice)
        if step == 5:
            with pytest.raises(ec.HbmCapacityError):
                manager.plan(np.arange(50_000), np.array([0, 50_000, 50_000, 50_000]), np.zeros(50_000, np.int64))
        manager.mark_swapped_out(plan)
        manager.mark_swapped_in(plan)
        manager.finish(plan)
        plans.append(plan_arrays(plan))
    manager.check()
    plans.append({"stats": manager.stats()})
    for t, rule in enumerate(rules):
        plans.append({"residents": [array.tolist() for array in manager.residents(t)]})
        if rule is not None:
            plans.append({k: np.asarray(v).tolist() for k, v in manager.filter_state(t).items()})
    stats = manager.stats()
    assert sum(s["swap_out_rows"] for s in stats) > 10_000 and stats[1]["rejected"] > 1000 and stats[2]["evicted"] > 100
    assert all(table.stats()["partitions"] > 4 for table in tables)
    return plans


@pytest.mark.parametrize("policy", ["lru", "lfu", "s3fifo", "lookahead"])
def test_i4_plans_are_the_same_at_any_thread_count(policy: str) -> None:
    expected = big_plans(1, policy)
    for num_threads in THREADS[1:] if policy == "lru" else THREADS[-1:]:
        for step, (found, want) in enumerate(zip(big_plans(num_threads, policy), expected, strict=True)):
            assert found == want, f"{num_threads} threads, part {step}"


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_i4_training_is_the_same_at_any_thread_count(pooled: bool) -> None:
    tables = [
        ec.TableConfig("a", 16, hbm_rows=12_000, admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2)),
        ec.TableConfig("b", 5, ["b", "c"], hbm_rows=14_000, pooling="mean"),
    ]
    results = []
    for num_threads in THREADS:
        kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection
        collection = kind(tables, optimizer=ec.Adagrad(lr=0.1), num_threads=num_threads)
        rng = np.random.default_rng(11)
        outputs = []
        for _ in range(4):
            # Skewed: some keys have thousands of occurrences, whose gradients are summed in blocks.
            batch = make_batch(rng, ["a", "b", "c"], range(40_000), 4096, lengths=(0, 1, 2, 4), weighted=True, skew=4.0)
            outputs += train_window(collection, [batch])
        check(collection.manager)
        assert collection.manager.stats()["swap_out_rows"] > 0
        results.append((outputs, model_state(collection.manager)))
        collection.close()
    for num_threads, result in zip(THREADS[1:], results[1:], strict=True):
        assert result == results[0], f"{num_threads} threads"


def test_i4_plan_async_keeps_the_order_of_calls() -> None:
    table = ec.TableConfig("f", 4, hbm_rows=64)
    rng = np.random.default_rng(3)
    batches = [make_batch(rng, ["f"], range(200), 8, lengths=(0, 1, 2)) for _ in range(20)]
    runs = []
    for ahead in (False, True):
        with ec.EmbCacheManager([table], optimizer=ec.SGD()) as m:
            plans = []
            for start in range(0, len(batches), 2):
                pair = batches[start : start + 2]
                futures = [m.plan_async(batch) for batch in pair] if ahead else []
                infos = [future.result() for future in futures] if ahead else [m.plan(batch) for batch in pair]
                for info in infos:
                    m.swap_out(info)
                    m.swap_in(info)
                    m.finish(info)
                plans += [plan_arrays(info) for info in infos]
            runs.append(plans)
    assert runs[0] == runs[1]


def test_i4_a_failed_plan_async_raises_in_its_future_and_changes_nothing() -> None:
    with ec.EmbCacheManager([ec.TableConfig("f", 4, hbm_rows=2)], optimizer=ec.SGD()) as m:
        batch = ec.JaggedFeatures(["f"], torch.arange(3), torch.tensor([3]))
        future = m.plan_async(batch)
        with pytest.raises(ec.HbmCapacityError):
            future.result()
        assert m.planner.step == 0 and m.outstanding == 0
        assert m.plan(ec.JaggedFeatures(["f"], torch.arange(2), torch.tensor([2]))).step == 1
