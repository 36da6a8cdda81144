"""I1: one coherent view of a table, wherever its rows are and whatever is outstanding."""

from __future__ import annotations

import numpy as np
import pytest

import embcache as ec
from embcache._core.swap import SwapManager
from embcache.table import EmbTable


def manager_of(hbm_rows: int = 3, **options: object) -> ec.EmbCacheManager:
    table = ec.TableConfig("t", 2, initializer=ec.Constant(1.0), hbm_rows=hbm_rows, **options)
    return ec.EmbCacheManager([table], optimizer=ec.Adagrad(initial_accumulator_value=0.5))


def begin(manager: ec.EmbCacheManager, keys: list[int], **options: object) -> ec.SwapInfo:
    info = manager.plan(ec.JaggedFeatures(["t"], keys, [1] * len(keys), **options))
    manager.swap_out(info)
    manager.swap_in(info)
    return info


def train(manager: ec.EmbCacheManager, keys: list[int], add: float = 10.0, **options: object) -> None:
    """Stand-in for a training batch: adds to weights and state of its rows."""
    info = begin(manager, keys, **options)
    slots = info.slots[info.admitted.astype(bool)]
    manager.buffer.weights[0].numpy()[slots] += add
    manager.buffer.states[0][0].numpy()[slots] += 1
    manager.finish(info)


def column(rows: np.ndarray) -> list[float]:
    return rows[:, 0].tolist()


def contents(view: ec.TableView, batch_rows: int = 2) -> dict[int, tuple[float, float, int, int]]:
    found = {}
    for keys, weights, state, counts, stamps in view.items(batch_rows):
        assert 0 < len(keys) <= batch_rows and weights.shape == (len(keys), 2) and state.shape == (len(keys), 2)
        for i, key in enumerate(keys.tolist()):
            assert key not in found
            kept = (None, None) if counts is None else (int(counts[i]), int(stamps[i]))
            found[key] = (weights[i, 0].item(), state[i, 0].item(), *kept)
    return found


def test_i1_reads_see_the_device():
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])
    train(manager, [4, 1])
    assert column(view.lookup([1, 2, 3, 4, 5], insert=False)) == [21, 11, 11, 11, 1]
    weights, state = view.lookup_rows([1, 2, 5])
    assert column(weights) == [21, 11, 1] and column(state) == [2.5, 1.5, 0.5]
    assert {key: value[:2] for key, value in contents(view).items()} == {
        1: (21, 2.5),
        2: (11, 1.5),
        3: (11, 1.5),
        4: (11, 1.5),
    }
    assert len(view) == 4 and 4 in view and 5 not in view and "x" not in view and True not in view and 2**70 not in view
    assert (view.find([1, 5]) >= 0).tolist() == [True, False]
    view.check()


def test_lookup_into_an_array_of_the_caller_and_inserting():
    view = manager_of().table("t")
    out = np.full((2, 2), 7, dtype=np.float32)
    assert view.lookup([8, 9], out) is out and out.tolist() == [[1, 1], [1, 1]]
    assert len(view) == 2
    assert view.insert([9, 10, 9]).tolist() == [1, 2, 1] and len(view) == 3


def test_i1_a_change_drops_the_resident_copy():
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])
    view.assign([1], np.array([[5, 5]], dtype=np.float32), np.array([[6, 6]], dtype=np.float32))
    view.assign([2], np.array([[7, 7]], dtype=np.float32))
    assert manager.stats()["resident"] == 1
    assert column(view.lookup([1, 2, 3], insert=False)) == [5, 7, 11]
    assert column(view.lookup_rows([1, 2, 3])[1]) == [6, 0, 1.5]
    train(manager, [1, 2])
    assert column(view.lookup([1, 2], insert=False)) == [15, 17]
    assert view.erase([1, 3, 99]) == 2
    assert len(view) == 1 and 1 not in view
    train(manager, [1])
    assert column(view.lookup([1], insert=False)) == [11]
    view.check()


def test_i1_an_assignment_that_memory_refuses_loses_nothing():
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])

    class Refusing:
        def __init__(self, host: object) -> None:
            self._host = host

        def __getattr__(self, name: str) -> object:
            return getattr(self._host, name)

        def assign(self, *columns: object) -> None:
            raise ec.HostMemoryError("refused")

        def write_from(self, *columns: object, **options: object) -> None:
            self._host.write_from(*columns, **options)

    host = manager.host_tables[0]
    manager.host_tables[0] = Refusing(host)
    with pytest.raises(ec.HostMemoryError):
        view.assign([1, 9], np.zeros((2, 2), dtype=np.float32))
    manager.host_tables[0] = host
    assert column(view.lookup([1, 2, 9], insert=False)) == [11, 11, 1] and 9 not in view


def test_i1_a_pinned_key_refuses_and_nothing_changes():
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])
    info = begin(manager, [1, 4])
    before = contents(view)
    row = np.ones((1, 2), dtype=np.float32)
    for change in (
        lambda: view.assign([1], row),
        lambda: view.erase([2, 1]),
        lambda: view.assign([4], row),
        lambda: view.insert([4]),
        lambda: view.lookup([4]),
        lambda: view.erase([4]),
    ):
        with pytest.raises(ec.PinnedKeyError, match="'t'"):
            change()
    assert contents(view) == before
    view.assign([3], 2 * row)
    assert column(view.lookup([3], insert=False)) == [2]
    manager.finish(info)
    view.assign([1], row)
    assert column(view.lookup([1, 4], insert=False)) == [1, 1]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_i1_keys_of_unfinished_batches_are_invisible_at_any_step(steps):
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])
    before = contents(view)
    info = manager.plan(ec.JaggedFeatures(["t"], [3, 8, 9], [1, 1, 1]))
    for step in (manager.swap_out, manager.swap_in)[:steps]:
        step(info)
    assert contents(view) == before and len(view) == 3 and 8 not in view
    assert column(view.lookup([1, 2, 3, 8], insert=False)) == [11, 11, 11, 1]
    assert view.find([8]).tolist() == [-1]
    for step in (manager.swap_out, manager.swap_in)[steps:]:
        step(info)
    manager.finish(info)
    assert len(view) == 5 and set(contents(view)) == {1, 2, 3, 8, 9}


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_i1_keys_that_an_unfinished_batch_evicts_are_still_there(steps):
    admit = ec.AdmitAndEvictConfig(evict_threshold=10, evict_step_interval=1)
    manager = manager_of(admit_and_evict=admit)
    view = manager.table("t")
    train(manager, [1, 2], timestamps=[100, 100])
    train(manager, [3, 4], timestamps=[101, 101])  # 1 or 2 leaves the device: one dead key resident, one in host memory
    before = contents(view)
    assert before[1][2:] == (1, 100)
    info = manager.plan(ec.JaggedFeatures(["t"], [3], [1], timestamps=[111]))
    for step in (manager.swap_out, manager.swap_in)[:steps]:
        step(info)
    after = contents(view)
    assert {k: v[:2] for k, v in after.items()} == {k: v[:2] for k, v in before.items()} and len(view) == 4
    assert column(view.lookup([1, 2], insert=False)) == [11, 11] and 1 in view
    for step in (manager.swap_out, manager.swap_in)[steps:]:
        step(info)
    manager.finish(info)
    assert set(contents(view)) == {3, 4} and len(view) == 2
    view.check()


def test_counters_of_residents_are_the_planners():
    admit = ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=1000, evict_step_interval=1)
    manager = manager_of(admit_and_evict=admit)
    view = manager.table("t")
    train(manager, [1, 1, 2], timestamps=[5, 6, 7])
    train(manager, [1, 2], timestamps=[8, 9])
    assert {key: value[2:] for key, value in contents(view).items()} == {1: (3, 8), 2: (2, 9)}
    view.assign([1], np.zeros((1, 2), dtype=np.float32))  # touches neither
    assert {key: value[2:] for key, value in contents(view).items()} == {1: (3, 8), 2: (2, 9)}
    assert column(view.lookup([77], insert=False)) == [0]  # not admitted: the default


def test_i1_items_notice_a_change():
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2, 3])
    changes = (
        lambda: train(manager, [1]),
        lambda: view.insert([50]),
        lambda: view.erase([2]),
        lambda: view.assign([3], np.ones((1, 2), dtype=np.float32)),
    )
    for change in changes:
        iterator = view.items(1)
        next(iterator)
        change()
        with pytest.raises(ec.ChangedError, match="changed during"):
            next(iterator)
    with pytest.raises(ec.ConfigError, match="batch_rows"):
        view.items(0)


def test_an_empty_table():
    view = manager_of().table("t")
    assert list(view.items()) == [] and len(view) == 0 and view.erase([]) == 0
    assert view.lookup([]).shape == (0, 2) and view.lookup_rows([])[1].shape == (0, 2)
    view.assign([], np.empty((0, 2), dtype=np.float32))
    view.flush()
    assert view.stats()["rows"] == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda view: view.lookup([1.5]),
        lambda view: view.find([[1]]),
        lambda view: view.lookup([1], np.empty((2, 2), dtype=np.float32)),
        lambda view: view.lookup([1], np.empty((1, 2))),
        lambda view: view.assign([1], np.ones((1, 3), dtype=np.float32)),
        lambda view: view.assign([1], np.ones((1, 2))),
        lambda view: view.assign([1], np.ones((1, 2), dtype=np.float32), np.ones((1, 1), dtype=np.float32)),
        lambda view: view.erase(["a"]),
    ],
)
def test_i11_bad_input_changes_nothing(use):
    manager = manager_of()
    view = manager.table("t")
    train(manager, [1, 2])
    before = contents(view), manager.stats()
    with pytest.raises(ec.ShapeError, match="'t'"):
        use(view)
    assert (contents(view), manager.stats()) == before


def test_adam_state_is_both_moments_side_by_side():
    manager = ec.EmbCacheManager([ec.TableConfig("t", 2, hbm_rows=2)], optimizer=ec.Adam())
    view = manager.table("t")
    state = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=np.float32)
    view.assign([1, 2], np.zeros((2, 2), dtype=np.float32), state)
    info = begin(manager, [2, 1])
    assert manager.buffer.states[0][0].numpy()[info.slots].tolist() == [[5, 6], [1, 2]]
    assert manager.buffer.states[0][1].numpy()[info.slots].tolist() == [[7, 8], [3, 4]]
    manager.finish(info)
    assert view.lookup_rows([1, 2])[1].tolist() == state.tolist()
    begin(manager, [8, 9])
    assert view.lookup_rows([1, 2])[1].tolist() == state.tolist()


def test_erase_of_a_key_that_waits_for_admission_forgets_its_counters():
    manager = manager_of(admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=3))
    view = manager.table("t")
    train(manager, [1, 1, 2, 2])
    assert view.erase([1, 9]) == 0  # no row, but counters
    assert manager.planner.filter_state(0)["keys"].tolist() == [2]
    train(manager, [1, 2])
    assert 1 not in view and 2 in view
    assert manager.planner.filter_state(0)["counts"].tolist() == [1, 3]
    assert view.erase([2, 1]) == 1 and len(manager.planner.filter_state(0)["keys"]) == 0
    view.check()


def test_i1_a_waiting_key_that_an_unfinished_batch_counts_refuses_erase():
    manager = manager_of(admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=3))
    view = manager.table("t")
    train(manager, [5, 6, 6, 6])
    info = manager.plan(ec.JaggedFeatures(["t"], [4, 5], [1, 1]))
    before = manager.planner.filter_state(0)["counts"].tolist()
    for keys in ([4], [5], [6, 5]):
        with pytest.raises(ec.PinnedKeyError, match=f"key {keys[-1]}"):
            view.erase(keys)
    assert manager.planner.filter_state(0)["counts"].tolist() == before and 6 in view
    manager.cancel(info)
    assert manager.planner.filter_state(0)["counts"].tolist() == [1, 3]
    info = begin(manager, [6])
    with pytest.raises(ec.PinnedKeyError, match="key 6"):
        view.erase([5, 6])  # 5 waits and is free: nothing changes all the same
    assert manager.planner.filter_state(0)["keys"].tolist() == [5, 6]
    manager.finish(info)
    assert view.erase([5, 6]) == 1
    view.check()


def test_a_view_and_an_embtable_take_and_give_the_same():
    view, table = manager_of().table("t"), EmbTable("t", 2, state_dim=2)
    for one in (view, table):
        one.assign([], [])
        one.assign([], [], [])
        one.assign([1], np.ones((1, 2), dtype=np.float32))
        ((keys, _, _, frequency, timestamp),) = one.items()
        assert keys.tolist() == [1] and frequency is None and timestamp is None
        with pytest.raises(ec.ShapeError, match="'t': weights has dtype float64; give float32"):
            one.assign([1], np.ones((1, 2)))


def test_i1_rows_that_a_sweep_killed_are_not_there_though_they_are_not_taken_away():
    rule = ec.AdmitAndEvictConfig(evict_threshold=2, evict_step_interval=5, time_source="step")
    m = manager_of(4, admit_and_evict=rule)
    m.planner.close()
    m.planner = m.door.planner = SwapManager(m.host_tables, [4], [rule], sweep_rows=1)
    t = m.table("t")
    for keys in ([1, 2, 3], [4, 5, 6], [9], [9], [9]):
        train(m, keys)
    t.flush()
    assert m.planner.stats()[0]["dead"] > 3
    assert len(t) == 1 == m.stats()["rows"] and m.stats()["evicted"] == 6
    assert [keys.tolist() for keys, *_ in t.items()] == [[9]]
    weights, state = t.lookup_rows([1, 4, 9, 6])
    assert weights.tolist() == [[1, 1], [1, 1], [31, 31], [1, 1]] and np.array_equal(
        t.lookup([1, 4, 9, 6], insert=False), weights
    )
    assert state.tolist() == [[0.5, 0.5], [0.5, 0.5], [3.5, 3.5], [0.5, 0.5]]
    assert (t.find([1, 4]) == -1).all() and 4 not in t and 9 in t
    t.assign([1], np.full((1, 2), 2, np.float32))
    assert t.insert([4])[0] >= 0 and len(t) == 3
    assert t.lookup([1, 4, 9, 6], insert=False).tolist() == [[2, 2], [1, 1], [31, 31], [1, 1]]
    assert t.lookup_rows([4])[1].tolist() == [[0.5, 0.5]]
    assert t.erase([1, 6]) == 1 and len(t) == 2
    t.check()
    m.close()
