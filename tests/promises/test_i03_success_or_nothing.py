"""I3: a plan either succeeds or leaves everything as it was, filters included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from promises.strategies import (
    ROW_TYPES,
    World,
    examples,
    features_of,
    filters,
    make_batch,
    one_feature,
    table_lists,
    with_rows,
    worlds,
)
from promises.training import check, make_collection, model_state, plan_arrays, train_window, whole_state

EVICTING = ec.AdmitAndEvictConfig(
    admit_threshold=2, evict_threshold=20, evict_step_interval=2, not_admitted_default_value=0.25
)


def too_big(world: World, step: int, rows: dict[str, int]) -> ec.JaggedFeatures:
    """A batch that no table of the world can hold even with filters: every key occurs four times, and is new."""
    names = features_of(world.tables)
    most = max(rows.values()) + 1
    values = np.tile(np.repeat(np.arange(most, dtype=np.int64) * 7919 + 10**15, 4), len(names))
    stamps = np.full(len(values), 10 * step + 100)
    weights = np.ones(len(values), np.float32)
    lengths = np.full(len(names), most * 4, dtype=np.int64)
    return ec.JaggedFeatures(names, values, lengths, weights, stamps, np.ones(1, np.int64))


def test_i3_a_run_with_failures_equals_a_run_without() -> None:
    seen = {"failures": 0, "evicted": 0, "rejected": 0}

    @examples(40)
    @given(
        world=worlds(tables=table_lists(filtered=filters(chance=False), dtypes=ROW_TYPES)), fail_every=st.integers(1, 3)
    )
    def run(world: World, fail_every: int) -> None:
        world = replace(world, accumulate=1, joint=1)
        rows = world.least_rows()
        never, often = make_collection(world, rows), make_collection(world, rows)
        for step, batch in enumerate(world.batches):
            if step % fail_every == 0:
                before = whole_state(often.manager)
                with pytest.raises(ec.HbmCapacityError) as caught:
                    often(too_big(world, step, rows))
                error = caught.value
                assert error.never_fits and error.need == max(rows.values()) + 1
                assert error.have == rows[error.table] < error.need
                for fact in (repr(error.table), str(error.need), str(error.have), "hbm_"):
                    assert fact in str(error), fact
                assert whole_state(often.manager) == before
                check(often.manager)
                seen["failures"] += 1
            assert train_window(often, [batch]) == train_window(never, [batch])
        # Placement too is that of a run that never failed.
        assert whole_state(often.manager) == whole_state(never.manager)
        for name in ("evicted", "rejected"):
            seen[name] += often.manager.stats()[name]
        never.close()
        often.close()

    run()
    assert all(count > 0 for count in seen.values()), seen


def test_i3_a_table_that_fits_is_untouched_when_another_fails() -> None:
    tables = [
        ec.TableConfig("small", 2, hbm_rows=2, admit_and_evict=EVICTING),
        ec.TableConfig("large", 4, hbm_rows=50, admit_and_evict=EVICTING),
    ]
    ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.Adam(lr=0.1))
    for step in range(3):
        values = torch.tensor([1, 1, 9, 9, 8])
        stamps = torch.full((5,), 50 * step)
        batch = ec.JaggedFeatures(["small", "large"], values, torch.tensor([2, 3]), timestamps=stamps)
        ebc(batch).values().sum().backward()
    before = whole_state(ebc.manager)
    # Step 4 sweeps both tables, admits 8 in the large one, and asks for three slots of the small one.
    values = torch.tensor([1, 2, 2, 3, 3, 8, 7, 7])
    batch = ec.JaggedFeatures(["small", "large"], values, torch.tensor([5, 3]), timestamps=torch.full((8,), 400))
    with pytest.raises(ec.HbmCapacityError, match="'small'") as caught:
        ebc(batch)
    assert caught.value.table == "small" and caught.value.never_fits
    assert whole_state(ebc.manager) == before
    check(ebc.manager)


def test_i3_failure_beside_outstanding_plans_can_be_retried() -> None:
    def manager() -> ec.EmbCacheManager:
        table = ec.TableConfig("f", 2, hbm_rows=6, admit_and_evict=EVICTING)
        return ec.EmbCacheManager([table], optimizer=ec.SGD())

    def batch(values: list[int], now: int) -> ec.JaggedFeatures:
        return one_feature(values, timestamps=torch.full((len(values),), now))

    failing, plain = manager(), manager()
    unfinished = []
    for m in (failing, plain):
        for step, values in enumerate(([1, 1, 2, 2], [3, 3, 3, 4])):
            info = m.plan(batch(values, step))
            m.swap_out(info)
            m.swap_in(info)
            if step == 0:
                m.finish(info)
        unfinished.append(info)  # kept, since its plan ends with it
    wanted = batch([5, 5, 6, 6, 7, 7, 8, 8, 4, 4], 30)
    with_pins = whole_state(failing)
    with pytest.raises(ec.HbmCapacityError, match=r"unfinished|outstanding|pinned") as caught:
        failing.plan(batch([*range(10, 16)] * 2, 30))
    assert not caught.value.never_fits and (caught.value.need, caught.value.have) == (6, 5)
    assert whole_state(failing) == with_pins
    plans = [plan_arrays(m.plan(wanted)) for m in (failing, plain)]
    assert plans[0] == plans[1]
    assert model_state(failing) == model_state(plain)


def test_i3_cancelled_plans_leave_nothing() -> None:
    seen = {"cancelled": 0, "evicted": 0, "swap_out_rows": 0}

    @examples(40)
    @given(
        tables=table_lists(dtypes=ROW_TYPES),
        seed=st.integers(0, 2**32),
        steps=st.integers(3, 25),
    )
    def run(tables: list[ec.TableConfig], seed: int, steps: int) -> None:
        rng, names = np.random.default_rng(seed), features_of(tables)
        managers = [ec.EmbCacheManager(with_rows(tables, 16), optimizer=ec.SGD()) for _ in range(2)]
        for step in range(steps):
            batch = make_batch(rng, names, range(30), 2, lengths=(0, 1, 2), now=10 * step, skew=1.0)
            before = whole_state(managers[0])
            unused = []
            for ahead in range(int(rng.integers(0, 3))):
                other = make_batch(rng, names, range(20, 60), 2, lengths=(0, 1), now=10 * step + 40 * ahead)
                try:
                    unused.append(managers[0].plan(other))
                except ec.HbmCapacityError:
                    break
            for info in reversed(unused):
                seen["evicted"] += managers[0].stats()["evicted"] - before["stats"]["evicted"]
                managers[0].cancel(info)
                seen["cancelled"] += 1
            assert whole_state(managers[0]) == before
            check(managers[0])
            plans = [m.plan(batch) for m in managers]
            assert plan_arrays(plans[0]) == plan_arrays(plans[1])
            for m, info in zip(managers, plans, strict=True):
                m.swap_out(info)
                m.swap_in(info)
                m.finish(info)
            seen["swap_out_rows"] += len(plans[0].swap_out_keys)
        for m in managers:
            m.close()

    run()
    assert all(count > 0 for count in seen.values()), seen


def test_i3_only_the_newest_unused_plan_can_be_cancelled() -> None:
    m = ec.EmbCacheManager([ec.TableConfig("f", 2, hbm_rows=10)], optimizer=ec.SGD())
    first, second = m.plan(one_feature([1, 2])), m.plan(one_feature([2, 3]))
    before = whole_state(m)
    with pytest.raises(ec.PlanError):
        m.cancel(first)
    assert whole_state(m) == before
    m.swap_out(first)
    m.cancel(second)
    with pytest.raises(ec.PlanError):
        m.cancel(second)
    with pytest.raises(ec.PlanError):
        m.cancel(first)
    m.swap_in(first)
    m.finish(first)
    for late in (m.finish, m.swap_in, m.swap_out, m.cancel):
        with pytest.raises(ec.PlanError):
            late(first)
    check(m)


def test_i3_a_failed_forward_leaves_nothing_outstanding() -> None:
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("f", 2, hbm_rows=3)], optimizer=ec.SGD(lr=1.0))
    ebc(one_feature([1, 2, 3])).values().sum().backward()
    before = whole_state(ebc.manager)
    for _ in range(5):
        with pytest.raises(ec.HbmCapacityError):
            ebc(one_feature([1, 2, 3, 4]))
        assert ebc.manager.outstanding == 0 and whole_state(ebc.manager) == before


def test_i3_a_growing_buffer_cancels_and_replans_without_a_trace() -> None:
    table = ec.TableConfig("f", 2, admit_and_evict=EVICTING)
    growing = ec.EmbeddingBagCollection([table], optimizer=ec.SGD(lr=1.0))
    fixed = ec.EmbeddingBagCollection(with_rows([table], 4000), optimizer=ec.SGD(lr=1.0))
    first = growing.manager.stats()["capacity"]
    rng = np.random.default_rng(1)
    for step in range(12):
        pool = rng.integers(-(2**40), 2**40, 40 * (step + 1) ** 2).tolist() * 2
        batch = make_batch(rng, ["f"], pool, len(pool) // 4, now=10 * step, skew=1.0)
        assert train_window(growing, [batch]) == train_window(fixed, [batch])
    assert growing.manager.stats()["capacity"] > first
    assert model_state(growing.manager) == model_state(fixed.manager)
    for name in ("evicted", "rejected", "admitted", "born", "hits", "misses"):
        assert growing.manager.stats()[name] == fixed.manager.stats()[name], name
