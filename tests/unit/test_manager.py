"""The manager: plans in order, budgets, growth, rebalancing, statistics, and what it refuses."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.budget import layout_bytes


def batch(values: list[int], name: str = "t", **options: object) -> ec.JaggedFeatures:
    return ec.JaggedFeatures([name], values, [1] * len(values), **options)


def make(hbm_rows: int | None = 4, **options: object) -> ec.EmbCacheManager:
    return ec.EmbCacheManager([ec.TableConfig("t", 2, hbm_rows=hbm_rows)], optimizer=ec.SGD(lr=1.0), **options)


def through(manager: ec.EmbCacheManager, values: list[int]) -> ec.SwapInfo:
    info = manager.plan(batch(values))
    manager.swap_out(info)
    manager.swap_in(info)
    manager.finish(info)
    return info


def slot_rows(manager: ec.EmbCacheManager, info: ec.SwapInfo) -> list[list[float]]:
    return manager.buffer.weights[0].numpy()[info.slots].tolist()


# --------------------------------------------------------------------------------------------------------------- plans


def test_a_plan_shows_what_its_batch_needs():
    manager = make()
    info = manager.plan(batch([5, 7, 5, 9]))
    assert info.tables == ["t"] and info.batch_size == 4 and info.step == 1 and info.state == "planned"
    assert info.unique_keys.tolist() == [5, 7, 9] and info.inverse.tolist() == [0, 1, 0, 2]
    assert (info.hits, info.misses, len(info.swap_in_keys), len(info.swap_out_keys)) == (0, 3, 3, 0)
    assert "step=1" in repr(info)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = info.nonsense
    manager.swap_out(info)
    manager.swap_in(info)
    assert slot_rows(manager, info) == manager.host_tables[0].lookup_rows(np.array([5, 7, 9]))[0].tolist()
    manager.finish(info)
    assert through(manager, [7, 9, 11]).hits == 2


def test_rows_travel_out_and_back():
    manager = make(hbm_rows=2)
    info = through(manager, [1, 2])
    manager.buffer.weights[0].numpy()[info.slots] = [[1, 1], [2, 2]]
    through(manager, [3, 4])
    assert manager.table("t").lookup([1, 2], insert=False).tolist() == [[1, 1], [2, 2]]
    info = through(manager, [2, 1])
    assert slot_rows(manager, info) == [[2, 2], [1, 1]]
    stats = manager.stats()
    assert (stats["swap_in_rows"], stats["swap_out_rows"]) == (6, 4)
    assert (stats["swap_in_bytes"], stats["swap_out_bytes"]) == (48, 32)


def test_the_order_of_steps_is_enforced_before_any_row_moves():
    manager = make()
    first, second = manager.plan(batch([1, 2])), manager.plan(batch([3]))
    for wrong in (
        lambda: manager.swap_in(first),
        lambda: manager.swap_out(second),
        lambda: manager.finish(first),
        manager.flush,
    ):
        with pytest.raises(ec.PlanError):
            wrong()
    with pytest.raises(ec.PlanError):
        manager.cancel(first)  # not the newest
    manager.swap_out(first)
    with pytest.raises(ec.PlanError, match="step 2 waits for step 1"):
        manager.swap_out(second)
    with pytest.raises(ec.PlanError, match="swap_out of step 1"):
        manager.swap_out(first)
    manager.swap_in(first)
    manager.swap_out(second)
    manager.swap_in(second)
    with pytest.raises(ec.PlanError):
        manager.cancel(second)
    manager.finish(second)
    manager.finish(first)
    with pytest.raises(ec.PlanError):
        manager.finish(first)
    assert manager.outstanding == 0


def test_a_swap_in_before_its_swap_out_moves_nothing():
    manager = make(hbm_rows=2)
    info = through(manager, [1, 2])
    manager.buffer.weights[0].numpy()[info.slots] = [[1, 1], [2, 2]]
    early = manager.plan(batch([3, 4]))
    with pytest.raises(ec.PlanError, match="swap_in of step 2"):
        manager.swap_in(early)
    assert slot_rows(manager, info) == [[1, 1], [2, 2]]
    assert manager.table("t").lookup([1, 2], insert=False).tolist() == [[1, 1], [2, 2]]


def test_cancel_takes_everything_back():
    manager = make(hbm_rows=2)
    through(manager, [1, 2])
    before = manager.stats()
    info = manager.plan(batch([3, 4]))
    assert len(info.swap_out_keys) == 2 and 3 not in manager.table("t")
    manager.cancel(info)
    after = manager.stats()
    assert {k: v for k, v in after.items() if k not in ("host_bytes", "tables")} == {
        k: v for k, v in before.items() if k not in ("host_bytes", "tables")
    }
    assert manager.plan(batch([3, 4])).unique_keys.tolist() == info.unique_keys.tolist()


def test_a_plan_of_another_manager_is_refused():
    one, other = make(), make()
    info = one.plan(batch([1]))
    for use in (other.cancel, other.swap_out, other.swap_in, other.finish):
        with pytest.raises(ec.PlanError, match="not a plan of this manager"):
            use(info)
        with pytest.raises(ec.PlanError, match="not a plan of this manager"):
            use(None)


def test_plan_async_keeps_the_order_of_calls():
    manager = make(hbm_rows=None)
    futures = [manager.plan_async(batch([step, step + 1])) for step in range(20)]
    last = manager.plan(batch([99]))
    assert [future.result().step for future in futures] == list(range(1, 21)) and last.step == 21
    bad = manager.plan_async("nonsense")
    with pytest.raises(ec.ShapeError):
        bad.result()
    assert manager.plan(batch([1])).step == 22
    manager.close()


def test_timestamps_are_asked_for_where_they_are_needed():
    admit = ec.AdmitAndEvictConfig(evict_threshold=10, evict_step_interval=1)
    manager = ec.EmbCacheManager([ec.TableConfig("t", 2, admit_and_evict=admit)])
    with pytest.raises(ec.ConfigError, match="timestamps"):
        manager.plan(batch([1]))
    assert manager.plan(batch([1], timestamps=[5])).step == 1


# -------------------------------------------------------------------------------------------------------------- budgets


def test_a_byte_budget_holds_and_is_split_by_dim_and_features():
    tables = [ec.TableConfig("a", 8, ["x", "y"]), ec.TableConfig("b", 8), ec.TableConfig("c", 16)]
    manager = ec.EmbCacheManager(tables, optimizer=ec.Adam(), hbm_bytes=100_000)
    stats = manager.stats()
    slots = {name: entry["capacity"] for name, entry in stats["tables"].items()}
    assert slots["a"] == pytest.approx(2 * slots["b"], abs=2) and slots["b"] == pytest.approx(slots["c"], abs=2)
    held = sum(
        t.numel() * 4 for t in [*manager.buffer.weights, *(s for states in manager.buffer.states for s in states)]
    )
    assert held == stats["hbm_bytes"] == manager.buffer.bytes <= 100_000
    assert held > 99_000


@pytest.mark.parametrize("budget", [0, -5, 1.5, "1GB", True])
def test_i11_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(ec.ConfigError, match="hbm_bytes"):
        make(hbm_bytes=budget)


def test_i11_a_budget_too_small_names_the_table_and_the_bytes():
    with pytest.raises(ec.ConfigError, match=r"hbm_bytes = 100 .*at least 144 bytes, table 'b'"):
        ec.EmbCacheManager([ec.TableConfig("a", 2), ec.TableConfig("b", 16)], optimizer=ec.SGD(), hbm_bytes=100)


def test_i11_bad_arguments_are_named():
    table = ec.TableConfig("t", 2)
    for options, message in (
        ({"optimizer": "adam"}, "optimizer"),
        ({"optimizer": torch.optim.Adam}, "optimizer"),
        ({"device": "warp drive"}, "warp drive"),
        ({"policy": "random"}, "random"),
        ({"num_threads": 0}, "num_threads"),
    ):
        with pytest.raises(ec.ConfigError, match=message):
            ec.EmbCacheManager([table], **options)
    with pytest.raises(ec.ConfigError, match="table 't' is listed 2 times"):
        ec.EmbCacheManager([table, table])
    with pytest.raises(ec.ConfigError, match=r"no table 'x'; there are \['t'\]"):
        make().table("x")


# --------------------------------------------------------------------------------------------------------------- growth


def test_the_buffer_grows_between_plans_and_keeps_its_rows():
    manager = ec.EmbCacheManager([ec.TableConfig("t", 2), ec.TableConfig("u", 3)], optimizer=ec.Adagrad())
    expected = {}
    for step in range(8):
        keys = np.arange(step * 700, (step + 1) * 700)
        info = manager.plan(ec.JaggedFeatures(["t", "u"], np.concatenate([keys, keys]), np.ones(1400, dtype=np.int64)))
        manager.swap_out(info)
        manager.swap_in(info)
        for g, part in enumerate((slice(0, 700), slice(700, 1400))):
            rows = np.random.default_rng(step).random((700, manager.buffer.weights[g].shape[1])).astype(np.float32)
            manager.buffer.weights[g].numpy()[info.slots[part]] = rows
            manager.buffer.states[g][0].numpy()[info.slots[part]] = -rows
            expected[g, step] = rows
        manager.finish(info)
    stats = manager.stats()
    assert stats["swap_out_rows"] == 0 and stats["resident"] == 2 * 5600 and stats["hbm_bytes"] == manager.buffer.bytes
    for (g, step), rows in expected.items():
        weights, state = manager.table(manager.layout.tables[g].name).lookup_rows(
            np.arange(step * 700, (step + 1) * 700)
        )
        np.testing.assert_array_equal(weights, rows)
        np.testing.assert_array_equal(state, -rows)


def test_growth_leaves_room_for_several_forwards():
    manager = make(hbm_rows=None)
    for _ in range(2):
        plans = [manager.plan(batch(list(range(k * 1000, (k + 1) * 1000)))) for k in range(4)]
        for plan in plans:
            manager.swap_out(plan)
            manager.swap_in(plan)
        for plan in plans:
            manager.finish(plan)


def test_growth_stops_at_num_embeddings_and_swaps_from_there():
    manager = ec.EmbCacheManager([ec.TableConfig("t", 2, num_embeddings=300)], optimizer=ec.SGD())
    for step in range(5):
        through(manager, list(range(step * 100, step * 100 + 100)))
    stats = manager.stats()
    assert stats["capacity"] == 300 and stats["swap_out_rows"] == 200
    with pytest.raises(ec.HbmCapacityError) as caught:
        manager.plan(batch(list(range(301))))
    assert caught.value.never_fits


def test_growth_stops_at_a_share_of_the_free_memory(monkeypatch):
    manager = make(hbm_rows=None)
    start = manager.buffer.bytes
    monkeypatch.setattr(type(manager.backend), "free_memory", lambda self: 8000)
    through(manager, list(range(250)))
    for step in range(1, 20):
        through(manager, list(range(step * 250, step * 250 + 250)))
    stats = manager.stats()
    assert start < stats["hbm_bytes"] <= (start + 8000) * 0.6 and stats["swap_out_rows"] > 0
    monkeypatch.undo()
    through(manager, list(range(6000, 6250)))
    assert manager.stats()["hbm_bytes"] == stats["hbm_bytes"]  # the limit was reached: it stays


def test_a_growing_buffer_that_is_short_only_while_plans_are_outstanding_says_so():
    manager = make(hbm_rows=None)
    first = manager.plan(batch([1]))
    with pytest.raises(ec.HbmCapacityError, match="can grow, but only while no plan is outstanding") as caught:
        manager.plan(batch(list(range(100_000))))
    assert not caught.value.never_fits
    manager.cancel(first)
    assert len(manager.plan(batch(list(range(100_000)))).slots) == 100_000


def test_growth_that_memory_refuses_leaves_the_buffer_as_it_was(monkeypatch):
    manager = make(hbm_rows=None)
    info = through(manager, [1, 2])
    manager.buffer.weights[0].numpy()[info.slots] = [[1, 1], [2, 2]]

    def refuse(self: object, *shape: object) -> None:
        raise ec.HostMemoryError("refused")

    monkeypatch.setattr(type(manager.backend), "allocate", refuse)
    with pytest.raises(ec.HbmCapacityError):
        manager.plan(batch(list(range(1000))))
    for step in range(10):
        through(manager, list(range(step * 100, step * 100 + 100)))
    assert manager.stats()["swap_out_rows"] > 0
    assert manager.table("t").lookup([1, 2], insert=False).tolist() == [[1, 1], [2, 2]]


class PlannerThatRefusesToGrow:
    """The planner of `manager`, except that table `at` cannot grow."""

    def __init__(self, planner: object, at: int) -> None:
        self._planner, self._at = planner, at

    def grow(self, table: int, capacity: int) -> None:
        if table == self._at:
            raise ec.HostMemoryError("refused")
        self._planner.grow(table, capacity)

    def __getattr__(self, name: str) -> object:
        return getattr(self._planner, name)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_growth_that_the_planner_refuses_keeps_buffer_and_planner_agreed(at):
    admit = ec.AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=7.0)
    tables = [ec.TableConfig(name, 2, admit_and_evict=admit, initializer=ec.Zeros()) for name in "abc"]
    ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.SGD(lr=1.0))
    manager = ebc.manager

    def features_of(keys: np.ndarray) -> ec.JaggedFeatures:
        return ec.JaggedFeatures(list("abc"), np.tile(keys, 3), np.ones(3 * len(keys), dtype=np.int64))

    for _ in range(2):
        ebc(features_of(np.arange(50))).values().sum().backward()
    manager.planner = PlannerThatRefusesToGrow(manager.planner, at)
    with pytest.raises(ec.HbmCapacityError):
        for _ in range(2):
            ebc(features_of(np.arange(5000, 6000)))
    manager.planner = manager.planner._planner
    slots = [manager.planner.capacity(t) for t in range(3)]
    assert slots[at] == 256 and slots == manager.buffer.capacities
    assert manager.buffer.bases.tolist() == [manager.planner.base(t) for t in range(3)]
    out = ebc(features_of(np.arange(40, 60))).values()
    assert out.tolist() == [[-1.0] * 6] * 10 + [[7.0] * 6] * 10
    out.sum().backward()
    for view in ebc.tables().values():
        assert view.lookup([39, 40, 60], insert=False)[:, 0].tolist() == [-1, -2, 7]
        view.check()


# ------------------------------------------------------------------------------------------------------ flush, rebalance


def test_flush_writes_residents_to_their_host_rows():
    manager = make()
    info = through(manager, [1, 2])
    manager.buffer.weights[0].numpy()[info.slots] = [[1, 1], [2, 2]]
    manager.flush()
    assert manager.host_tables[0].lookup_rows(np.array([1, 2]))[0].tolist() == [[1, 1], [2, 2]]
    assert through(manager, [1, 2]).hits == 2


def test_rebalance_follows_the_measured_keys_and_changes_no_result():
    admit = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=50, evict_step_interval=7, time_source="step")
    tables = [ec.TableConfig("few", 4), ec.TableConfig("many", 4, admit_and_evict=admit)]
    budget = layout_bytes(tables, ec.Adagrad(), [100, 100])
    outcomes = []
    for rebalanced in (False, True):
        ebc = ec.EmbeddingBagCollection(tables, optimizer=ec.Adagrad(lr=0.1), hbm_bytes=budget)
        generator = np.random.default_rng(0)
        for step in range(30):
            many = generator.integers(0, 300, 60)
            values = np.concatenate([generator.integers(0, 5, 60), many])
            ebc(ec.JaggedFeatures(["few", "many"], values, np.ones(120, dtype=np.int64))).values().pow(
                2
            ).sum().backward()
            if rebalanced and step in (9, 19):
                before = ebc.manager.stats()
                ebc.manager.rebalance()
                after = ebc.manager.stats()
                assert after["hbm_bytes"] <= budget and after["step"] == before["step"] == step + 1
                assert {k: after[k] for k in ("hits", "misses", "evicted")} == {
                    k: before[k] for k in ("hits", "misses", "evicted")
                }
        slots = {name: entry["capacity"] for name, entry in ebc.manager.stats()["tables"].items()}
        assert (slots["many"] > 3 * slots["few"]) == rebalanced
        rows = {
            name: sorted(zip(*(c.tolist() for c in next(iter(v.items())) if c is not None), strict=True))
            for name, v in ebc.tables().items()
        }
        outcomes.append(
            (
                rows,
                {
                    k: v.tolist() if isinstance(v, np.ndarray) else v
                    for k, v in ebc.manager.planner.filter_state(1).items()
                },
            )
        )
        ebc.manager.planner.check()
    assert outcomes[0] == outcomes[1]


def test_steps_go_on_after_rebalance_without_a_filter():
    tables = [ec.TableConfig("few", 4), ec.TableConfig("many", 4)]
    manager = ec.EmbCacheManager(tables, optimizer=ec.SGD(), hbm_bytes=16 * 202)
    for step in range(3):
        values = np.concatenate([np.zeros(50, dtype=np.int64), np.arange(50) + step])
        info = manager.plan(ec.JaggedFeatures(["few", "many"], values, np.ones(100, dtype=np.int64)))
        manager.swap_out(info)
        manager.swap_in(info)
        manager.finish(info)
    before = manager.stats()
    manager.rebalance()
    after = manager.stats()
    assert after["tables"]["many"]["capacity"] > 1.5 * before["tables"]["many"]["capacity"]
    assert after["step"] == 3 and after["swap_in_rows"] == before["swap_in_rows"]
    assert manager.plan(ec.JaggedFeatures(["few", "many"], [0], [1, 0])).step == 4


def test_rebalance_waits_for_plans_and_needs_a_budget():
    manager = make(hbm_bytes=1000, hbm_rows=None)
    info = manager.plan(batch([1]))
    with pytest.raises(ec.PlanError, match="1 plan"):
        manager.rebalance()
    manager.cancel(info)
    manager.rebalance()
    growing = make(hbm_rows=None)
    growing.rebalance()
    assert growing.stats()["capacity"] == make(hbm_rows=None).stats()["capacity"]


# ------------------------------------------------------------------------------------------------------- stats and close


def test_stats_are_totals_over_tables():
    manager = ec.EmbCacheManager([ec.TableConfig("a", 2), ec.TableConfig("b", 3)], optimizer=ec.Adagrad())
    info = manager.plan(ec.JaggedFeatures(["a", "b"], [1, 2, 1, 7], [1, 1, 1, 1]))
    manager.swap_out(info)
    manager.swap_in(info)
    stats = manager.stats()
    assert (
        stats["step"] == 1
        and stats["misses"] == 4
        and stats["pinned"] == 4
        and stats["rows"] == 4
        and stats["born"] == 4
    )
    for name, value in stats.items():
        if name not in ("step", "tables"):
            assert value == sum(entry[name] for entry in stats["tables"].values()), name
    assert stats["host_bytes"] > 0 and set(stats["tables"]) == {"a", "b"}


def test_close_waits_for_a_plan_being_made_and_refuses_what_comes_after():
    manager = make(hbm_rows=None)
    future = manager.plan_async(batch(list(range(200_000))))
    manager.close()
    assert future.result().step == 1
    for use in (
        lambda: manager.plan(batch([1])),
        lambda: manager.plan_async(batch([1])),
        manager.stats,
        manager.flush,
        manager.rebalance,
    ):
        with pytest.raises(ec.ClosedError):
            use()
    with make() as other:
        pass
    with pytest.raises(ec.ClosedError):
        other.stats()


def test_evaluation_from_another_thread_sees_whole_rows():
    ebc = ec.EmbeddingBagCollection(
        [ec.TableConfig("t", 16, initializer=ec.Zeros(), hbm_rows=64)], optimizer=ec.SGD(lr=1.0)
    )
    stop, torn = threading.Event(), []

    def read() -> None:
        view = ebc.tables()["t"]
        while not stop.is_set():
            rows = view.lookup(np.arange(200), insert=False)
            torn.extend(row for row in rows if not (row == row[0]).all())

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(150):
        keys = (np.arange(50) * 7 + step * 13) % 200
        ebc(ec.JaggedFeatures(["t"], keys, np.ones(50, dtype=np.int64))).values().sum().backward()
    stop.set()
    reader.join()
    assert torn == [] and ebc.manager.stats()["swap_out_rows"] > 0


def test_late_ends_of_plans_happen_at_the_next_entry():
    manager = make()
    info = manager.plan(batch([1]))
    manager.swap_out(info)
    manager.swap_in(info)
    with manager.door:  # a collector may run while the lock is held
        manager.finish_late(info)
        gc.collect()
    assert manager.outstanding == 0


def test_a_late_end_of_a_plan_is_a_change_that_iterators_notice():
    manager = make()
    through(manager, [1, 2, 3])
    info = manager.plan(batch([4]))
    manager.swap_out(info)
    manager.swap_in(info)
    iterator = manager.table("t").items(1)
    next(iterator)
    manager.finish_late(info)
    with pytest.raises(ec.ChangedError):
        list(iterator)


def test_a_door_that_could_not_end_a_late_plan_lets_go_of_its_lock_and_tries_again(monkeypatch):
    manager = make()
    info = manager.plan(batch([1]))
    manager.swap_out(info)
    manager.swap_in(info)
    manager.finish_late(info)

    class Refusing:
        def finish(self, plan: object) -> None:
            raise ec.HostMemoryError("refused")

    monkeypatch.setattr(manager.door, "planner", Refusing())
    with pytest.raises(ec.HostMemoryError):
        manager.stats()
    monkeypatch.undo()
    outstanding: list[int] = []
    other = threading.Thread(target=lambda: outstanding.append(manager.outstanding), daemon=True)
    other.start()
    other.join(10)
    assert outstanding == [0]


def test_a_cancelled_future_is_not_waited_for():
    manager = make()
    with manager.door:  # the worker waits for the lock, so later plans wait for the worker
        first = manager.plan_async(batch([1]))
        second = manager.plan_async(batch([2]))
        while not first.running():
            pass
        assert second.cancel()
    assert first.result().step == 1
    manager._worker.shutdown(wait=True)  # the callback of the first has run then
    assert manager._queued == 0
    assert manager.plan(batch([3])).step == 2


def test_budgets_are_whole_numbers_of_any_kind():
    assert make(hbm_bytes=np.int64(1000), hbm_rows=None).stats()["hbm_bytes"] <= 1000
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 2)], optimizer=ec.SGD(lr=1.0), accumulate=np.int64(2))
    for steps in (0, 1):
        ebc(batch([1])).values().sum().backward()
        assert ebc.optimizer.step_count == steps


def test_inside_an_accumulation_window_the_way_out_is_named():
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("t", 2)], optimizer=ec.SGD(lr=1.0), hbm_bytes=1000, accumulate=2)
    ebc(batch([1])).values().sum().backward()
    for use in (ebc.manager.rebalance, lambda: ebc.manager.move("cpu")):
        with pytest.raises(ec.PlanError, match=r"finish_accumulation\(\)"):
            use()
    ebc.finish_accumulation()
    ebc.manager.rebalance()
