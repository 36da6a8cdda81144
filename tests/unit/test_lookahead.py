"""Policy "lookahead" of the planner: notices, what they do to victims, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embcache as ec
from embcache._core.notice import Notice
from embcache._core.swap import SwapManager, _fail_allocation
from embcache._core.table import Table
from embcache.errors import ConfigError, HostMemoryError, PlanError, ShapeError
from models.policy_model import hits_of_belady


def ints(*values):
    return np.array(values, np.int64)


def looking(*capacities):
    return SwapManager([Table(f"t{t}", 1) for t in range(len(capacities))], capacities, policy="lookahead")


def settle(manager, plan):
    manager.mark_swapped_out(plan)
    manager.mark_swapped_in(plan)
    manager.finish(plan)
    return plan


def replay(keys, capacity, window):
    """Hits of a planner whose batches are single keys, each of which it is told of `window` batches before."""
    hits, notices, edge = 0, [], ints(0, 1)
    with looking(capacity) as manager:
        for i, key in enumerate(keys):
            while len(notices) < min(len(keys), i + window + 1):
                notices.append(manager.look_ahead(ints(keys[len(notices)]), edge))
            hits += settle(manager, manager.plan(ints(key), edge, notice=notices[i])).hits
        manager.check()
        assert all(notice.state == "spent" for notice in notices)
        assert manager.stats()[0]["coming_keys"] == manager.stats()[0]["coming_uses"] == 0
    return hits


@given(
    keys=st.lists(st.integers(-3, 9), max_size=60), capacity=st.integers(1, 6), window=st.just(100) | st.integers(0, 9)
)
def test_the_planner_hits_as_often_as_the_oracle(keys, capacity, window):
    assert replay(keys, capacity, window) == hits_of_belady(keys, capacity, window)
    assert window < len(keys) or replay(keys, capacity, window) == hits_of_belady(keys, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 20, 100])
@pytest.mark.parametrize("window", [0, 1, 7, 60, 900])
def test_the_planner_agrees_with_simulate(capacity, window):
    keys = ((np.random.default_rng(5).zipf(1.3, 800) % 200) - 100).astype(np.int64)
    assert replay(keys.tolist(), capacity, window) == ec.simulate(keys, capacity, "lookahead", window)


@given(batches=st.lists(st.lists(st.integers(0, 15), max_size=4), max_size=40), capacity=st.integers(4, 9))
def test_without_notices_it_is_lru_exactly(batches, capacity):
    with looking(capacity) as mine, SwapManager([Table("lru", 1)], [capacity]) as lru:
        for keys in batches:
            offsets = ints(0, len(keys))
            one, other = (settle(m, m.plan(ints(*keys), offsets)) for m in (mine, lru))
            assert one.slots.tolist() == other.slots.tolist()
            assert one.swap_out_keys.tolist() == other.swap_out_keys.tolist()
        assert mine.standings(0)["keys"].tolist() == lru.standings(0)["keys"].tolist()


def test_who_is_used_last_goes_last_of_all_to_who_is_not_used():
    with looking(4) as manager:
        settle(manager, manager.plan(ints(1, 2, 3, 4), ints(0, 4)))
        for keys in ((2, 9), (1, 3)):
            manager.look_ahead(ints(*keys), ints(0, 2))
        assert manager.standings(0)["keys"].tolist() == [4, 3, 1, 2]
        plan = manager.plan(ints(5, 6, 7), ints(0, 3))
        assert plan.swap_out_keys.tolist() == [4, 3, 1]
        manager.cancel(plan)
        assert manager.standings(0)["keys"].tolist() == [4, 3, 1, 2]


def test_a_batch_may_come_out_of_turn_or_not_at_all():
    with looking(2) as manager:
        first, second, third = (manager.look_ahead(ints(*keys), ints(0, 2)) for keys in ((1, 2), (3, 4), (1, 3)))
        assert [notice.number for notice in manager.notices_given] == [1, 2, 3]
        plan = manager.plan(ints(3, 4), ints(0, 2), notice=second)
        assert (first.state, second.state) == ("given", "planned")
        settle(manager, plan)
        manager.withdraw(first)
        manager.withdraw(first)
        assert manager.notices_given == (third,)
        plan = manager.plan(ints(7), ints(0, 1))
        assert plan.swap_out_keys.tolist() == [4]  # 3 is expected
        settle(manager, plan)
        settle(manager, manager.plan(ints(8), ints(0, 1), notice=first))  # as without it
        assert manager.stats()[0]["coming_uses"] == 2
        settle(manager, manager.plan(ints(1, 2), ints(0, 2), notice=third))  # it has a key that the batch lacks
        assert manager.stats()[0]["coming_uses"] == 0
        manager.check()


def test_memory_follows_the_window():
    keys, n = np.random.default_rng(1).permutation(40_000).astype(np.int64), 1000
    with looking(100) as manager:
        waiting = []
        held = []
        for turn in range(200):
            start = turn * n % len(keys)
            waiting.append((keys[start : start + 100], manager.look_ahead(keys[start : start + n], ints(0, n))))
            if len(waiting) > 8:
                batch, notice = waiting.pop(0)
                settle(manager, manager.plan(batch, ints(0, 100), notice=notice))
            held.append(manager.stats()[0]["coming_bytes"])
        assert manager.stats()[0]["coming_keys"] == 8000
        assert max(held[50:]) == max(held[20:30]) < 9000 * 100
        for _, notice in waiting:
            manager.withdraw(notice)
        assert manager.stats()[0]["coming_keys"] == 0
        manager.check()


def test_a_large_notice_falls_out_of_sight_at_once():
    """Slots that no notice names any more go back among the others by their last use."""
    rng = np.random.default_rng(2)
    keys = rng.permutation(5000).astype(np.int64)
    with looking(5000) as manager, looking(5000) as plain:
        for m in (manager, plain):
            settle(m, m.plan(keys, ints(0, 5000)))
        notices = [manager.look_ahead(rng.permutation(keys)[:2000].copy(), ints(0, 2000)) for _ in range(4)]
        for notice in (notices[2], notices[0], notices[3], notices[1]):
            manager.withdraw(notice)
            manager.check()
        assert np.array_equal(manager.standings(0)["keys"], plain.standings(0)["keys"])


@pytest.mark.parametrize("countdown", range(12))
def test_i3_no_memory_for_a_notice_changes_nothing(countdown):
    with looking(3, 3) as manager:
        settle(manager, manager.plan(ints(1, 2, 3, 4), ints(0, 2, 4)))
        manager.look_ahead(ints(2, 9, 3), ints(0, 2, 3))
        before = [manager.standings(t)["ranks"].tolist() for t in range(2)]
        many = np.arange(600, dtype=np.int64)
        _fail_allocation(countdown)
        try:
            manager.look_ahead(many, ints(0, 300, 600))
        except HostMemoryError:
            assert [manager.standings(t)["ranks"].tolist() for t in range(2)] == before
            assert [stats["coming_uses"] for stats in manager.stats()] == [2, 1]
        else:
            assert [stats["coming_uses"] for stats in manager.stats()] == [302, 301]
        finally:
            _fail_allocation(-1)
        manager.check()


def test_what_is_refused():
    with looking(2) as manager, looking(2) as other, SwapManager([Table("lru", 1)], [2]) as lru:
        with pytest.raises(ConfigError, match="lookahead"):
            lru.look_ahead(ints(1), ints(0, 1))
        with pytest.raises(ShapeError, match="table_offsets"):
            manager.look_ahead(ints(1), ints(0, 2))
        with pytest.raises(ShapeError, match="int64"):
            manager.look_ahead(np.ones(1), ints(0, 1))
        notice = manager.look_ahead(ints(1), ints(0, 1))
        for call in (other.withdraw, lru.withdraw, lambda notice: other.plan(ints(1), ints(0, 1), notice=notice)):
            with pytest.raises(PlanError, match="another"):
                call(notice)
        with pytest.raises(PlanError, match="look_ahead"):
            manager.plan(ints(1), ints(0, 1), notice=7)
        plan = manager.plan(ints(1), ints(0, 1), notice=notice)
        for call in (
            manager.withdraw,
            manager.noticed,
            lambda notice: manager.plan(ints(1), ints(0, 1), notice=notice),
        ):
            with pytest.raises(PlanError, match="planned"):
                call(notice)
        settle(manager, plan)
        assert "spent" in repr(notice)
        with pytest.raises(TypeError):
            Notice()
    assert notice.state == "spent"


def test_notices_end_with_their_planner():
    manager = looking(2)
    given_up, planned = (manager.look_ahead(ints(key), ints(0, 1)) for key in (1, 2))
    manager.plan(ints(2), ints(0, 1), notice=planned)
    manager.close()
    assert (given_up.state, planned.state) == ("withdrawn", "withdrawn")


# --------------------------------------------------------------------------------------------------------------- managers


def batch_of(*keys):
    return ec.JaggedFeatures(["a"], torch.tensor(keys), torch.ones(len(keys), dtype=torch.int64))


def train(manager, batch, notice=None):
    info = manager.plan_and_move(batch, notice)
    manager.finish(info)
    return info


def test_a_new_planner_goes_on_with_the_notices(tmp_path):
    """`rebalance` and `restore` put a planner in the place of another, while batches that were announced are on their way."""
    tables = [ec.TableConfig("t", 4, feature_names=["a"]), ec.TableConfig("u", 4, feature_names=["b"])]
    batch = ec.JaggedFeatures(["a", "b"], torch.tensor([1, 2, 3, 5]), torch.tensor([3, 1]))
    with ec.EmbCacheManager(tables, policy="lookahead", hbm_bytes=4000) as manager:
        train(manager, batch)
        notices = [manager.look_ahead(batch) for _ in range(2)]
        before = manager.planner
        manager.rebalance()
        assert manager.planner is not before
        train(manager, batch, notices[0])
        manager.save(str(tmp_path / "saved"))
        manager.restore(str(tmp_path / "saved"))
        assert manager.stats()["coming_uses"] == 4
        train(manager, batch, notices[1])
        assert [notice.state for notice in notices] == ["spent", "spent"]
        assert manager.stats()["coming_uses"] == 0


def test_managers_pass_notices_on():
    with ec.EmbCacheManager([ec.TableConfig("t", 4, feature_names=["a"], hbm_rows=2)], policy="lookahead") as manager:
        train(manager, batch_of(1, 2))
        notice = manager.look_ahead(batch_of(1))
        again = manager.look_ahead(manager.layout.flatten(batch_of(1)))
        info = manager.plan_async(batch_of(3), None).result()
        assert info.swap_out_keys.tolist() == [2]
        manager.cancel(info)
        assert train(manager, batch_of(1), notice).hits == 1
        manager.withdraw(again)
        with pytest.raises(PlanError):
            manager.withdraw(notice)
        stats = manager.stats()
        assert stats["coming_keys"] == 0 < stats["coming_bytes"]
    with (
        ec.EmbCacheManager([ec.TableConfig("t", 4, feature_names=["a"])]) as manager,
        pytest.raises(ConfigError, match="lookahead"),
    ):
        manager.look_ahead(batch_of(1))


def test_a_growing_buffer_keeps_the_notice():
    """A plan that shows that the buffer is to grow is cancelled and made again, with its notice."""
    with ec.EmbCacheManager([ec.TableConfig("t", 4, feature_names=["a"])], policy="lookahead") as manager:
        for start in range(0, 2000, 500):
            batch = batch_of(*range(start, start + 500))
            train(manager, batch, manager.look_ahead(batch))
        assert manager.stats()["coming_uses"] == 0 and manager.stats()["capacity"] >= 2000
        manager.planner.check()
