"""The planner by example: order of slots and victims, refusals, undo, movements, evaluation, doors.

Promise numbers in the names; the state machine in tests/property covers combinations.
"""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from embcache._core.plan import Plan
from embcache._core.swap import (
    PEEK_ABSENT,
    PEEK_DEFAULT,
    PEEK_ROW,
    PEEK_SLOT,
    SwapManager,
    _fail_allocation,
)
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig
from embcache.errors import (
    ClosedError,
    ConfigError,
    ForkError,
    HbmCapacityError,
    HostMemoryError,
    PinnedKeyError,
    PlanError,
    ShapeError,
)

ARRAYS = (
    "table_offsets unique_keys unique_offsets inverse occurrence_order segment_offsets slots admitted swap_in_keys swap_in_slots "
    "swap_in_rows swap_in_offsets swap_out_keys swap_out_slots swap_out_rows swap_out_offsets table_hits table_misses"
).split()


def ints(*values):
    return np.array(values, np.int64)


def make(*capacities, filters=None, num_threads=1, **table_options):
    filters = filters or [None] * len(capacities)
    tables = [Table(f"t{t}", 2, with_filter=config is not None, **table_options) for t, config in enumerate(filters)]
    return SwapManager(tables, capacities, filters, num_threads=num_threads), tables


def plan(manager, *lists, times=None):
    offsets = np.cumsum([0] + [len(keys) for keys in lists]).astype(np.int64)
    keys = np.array([key for part in lists for key in part], np.int64)
    return manager.plan(keys, offsets, None if times is None else np.array(times, np.int64))


def move(manager, one):
    manager.mark_swapped_out(one)
    manager.mark_swapped_in(one)


def run(manager, *lists, times=None):
    one = plan(manager, *lists, times=times)
    move(manager, one)
    manager.finish(one)
    return one


def arrays(one):
    return {name: getattr(one, name).tolist() for name in ARRAYS}


def state(manager):
    """Everything about a manager that a plan could change."""
    tables = range(manager.num_tables)
    seen = [
        (
            {name: column.tolist() for name, column in manager.standings(t).items()},
            [column.tolist() for column in manager.residents(t)],
            manager.stats()[t],
        )
        for t in tables
    ]
    return seen, manager.step, manager.outstanding


# ------------------------------------------------------------------------------------------------------ slots and victims


def test_new_keys_take_the_smallest_free_slots_and_victims_go_in_order_of_use():
    manager, _ = make(4)
    assert run(manager, [10, 11, 12, 10]).slots.tolist() == [0, 1, 2]
    assert run(manager, [11]).hits == 1
    third = run(manager, [13, 14, 15])  # slot 3 is free, then 10 and 12 are the oldest
    assert third.slots.tolist() == [3, 0, 2]
    assert third.swap_out_keys.tolist() == [10, 12] and third.swap_out_slots.tolist() == [0, 2]
    assert manager.recency(0).tolist() == [11, 13, 14, 15]


def test_case_15_and_17_a_cache_as_large_as_the_keys_keeps_them_all():
    manager, _ = make(1024)
    keys = np.arange(1024) * 7919 - 2**40
    run(manager, keys)
    again = run(manager, keys[::-1])
    assert again.hits == 1024 and again.misses == 0 and len(again.swap_out_keys) == 0


def test_a_key_that_is_hit_in_the_batch_is_no_victim_of_the_batch():
    manager, _ = make(2)
    run(manager, [1, 2])
    assert run(manager, [3, 1]).swap_out_keys.tolist() == [2]  # 1 is older, but used by the same batch


def test_each_table_has_its_own_slots_and_keys():
    manager, _ = make(2, 3)
    one = run(manager, [5, 6], [5, 6, 7])
    assert one.slots.tolist() == [0, 1, 3, 4, 5]
    assert (manager.base(0), manager.base(1), manager.capacity(1)) == (0, 3, 3)
    manager.set_bases(ints(100, 50))
    assert run(manager, [5], [7]).slots.tolist() == [100, 52]


def test_i2_pinned_slots_are_never_victims():
    manager, _ = make(4)
    first = plan(manager, [1, 2])
    second = plan(manager, [3])
    assert manager.pinned(0) == 3
    with pytest.raises(HbmCapacityError):
        plan(manager, [4, 5])
    third = plan(manager, [2, 4])
    assert third.slots.tolist() == [1, 3]
    for one in (first, second, third):
        move(manager, one)
    manager.finish(third)  # in any order; 2 stays pinned by the first
    assert manager.pinned(0) == 3
    assert plan(manager, [6]).swap_out_keys.tolist() == [4]
    manager.finish(first)
    manager.finish(second)
    assert manager.pinned(0) == 1


def test_many_plans_pin_one_slot():
    manager, _ = make(1)
    plans = [plan(manager, [7]) for _ in range(100)]
    for one in plans:
        move(manager, one)
    for one in plans[::-1]:
        assert manager.pinned(0) == 1
        manager.finish(one)
    assert manager.pinned(0) == 0


# ------------------------------------------------------------------------------------------------------------- refusals


def test_case_16_a_batch_that_never_fits_changes_nothing():
    manager, tables = make(3, 2)
    run(manager, [1, 2], [9])
    before = state(manager)
    with pytest.raises(
        HbmCapacityError, match="table 't0': the batch needs 4 slots, 3 of 3 can be had.*at least 4 slots"
    ) as caught:
        plan(manager, [1, 3, 4, 5], [8])
    error = caught.value
    assert (error.table, error.need, error.have, error.never_fits) == ("t0", 4, 3, True)
    assert state(manager) == before and len(tables[0]) == 2 and len(tables[1]) == 1
    manager.check()


def test_i3_a_batch_that_has_to_wait_says_so_and_then_succeeds():
    manager, _ = make(3)
    first = plan(manager, [1, 2])
    before = state(manager)
    with pytest.raises(HbmCapacityError, match="finish one first") as caught:
        plan(manager, [1, 3, 4])
    assert (caught.value.need, caught.value.have, caught.value.never_fits) == (3, 2, False)
    assert state(manager) == before
    move(manager, first)
    manager.finish(first)
    assert plan(manager, [1, 3, 4]).misses == 2


def test_i3_the_first_table_without_room_is_named_and_all_are_undone():
    manager, tables = make(4, 1, 1)
    with pytest.raises(HbmCapacityError, match="'t1'"):
        plan(manager, [1, 2, 3], [1, 2], [1, 2])
    assert [len(table) for table in tables] == [0, 0, 0]


@pytest.mark.parametrize("countdown", range(40))
def test_i3_no_memory_at_any_point_leaves_everything_as_it_was(countdown):
    config = AdmitAndEvictConfig(admit_threshold=2, evict_threshold=2, evict_step_interval=2)
    manager, tables = make(8, 4, filters=[config, None])
    run(manager, [1, 1, 2, 2, 3], [1, 2, 3], times=[0, 0, 5, 5, 0, 0, 0, 0])
    before, filtered, rows = state(manager), manager.filter_state(0), len(tables[0])
    batch = ([4, 4, 5, 6, 6, 2, 3], [4, 1, 5])
    times = [9, 9, 9, 1, 1, 9, 9, 0, 0, 0]
    _fail_allocation(countdown)
    try:
        one = plan(manager, *batch, times=times)
    except HostMemoryError as error:
        assert "nothing has changed" in str(error)
        assert state(manager) == before and len(tables[0]) == rows
        for name, value in manager.filter_state(0).items():
            assert np.array_equal(value, filtered[name])
    else:
        assert countdown > 5  # there are that many requests at least
        manager.cancel(one)
    finally:
        _fail_allocation(-1)
    manager.check()
    assert plan(manager, *batch, times=times).misses == 4


# ------------------------------------------------------------------------------------------------------------------ undo


def test_cancel_and_plan_again_gives_the_same_plan():
    config = AdmitAndEvictConfig(admit_threshold=2, evict_threshold=3, evict_step_interval=1)
    manager, tables = make(6, 3, filters=[config, None])
    rng = np.random.default_rng(0)

    def host():
        return [column.tolist() for column in tables[0].columns(tables[0].scan(0, 1000)[0])]

    for step in range(60):
        lists = rng.integers(0, 9, 6).tolist(), rng.integers(0, 9, 3).tolist()
        times = [step - int(x) for x in rng.integers(0, 3, 9)]
        before, filtered, columns = state(manager), manager.filter_state(0), host()
        one = plan(manager, *lists, times=times)
        manager.cancel(one)
        assert one.state == "cancelled" and state(manager) == before
        assert host() == columns  # stale ones of residents too
        for name, value in manager.filter_state(0).items():
            assert np.array_equal(value, filtered[name])
        again = plan(manager, *lists, times=times)
        assert arrays(again) == arrays(one)
        move(manager, again)
        manager.finish(again)
        manager.check()
    assert manager.stats()[0]["evicted"] > 0 and manager.stats()[1]["swap_out_rows"] > 0


def test_cancelled_rows_are_handed_out_again():
    manager, tables = make(8)
    run(manager, [1, 2])
    one = plan(manager, [3, 4, 5])
    assert one.swap_in_rows.tolist() == [2, 3, 4] and len(tables[0]) == 5
    manager.cancel(one)
    assert len(tables[0]) == 2
    assert plan(manager, [6, 7]).swap_in_rows.tolist() == [2, 3]


def test_only_the_newest_plan_that_has_not_moved_can_be_cancelled():
    manager, _ = make(4)
    first, second = plan(manager, [1]), plan(manager, [2])
    with pytest.raises(PlanError, match="step 2 was planned after step 1"):
        manager.cancel(first)
    manager.cancel(second)
    with pytest.raises(PlanError, match="cancelled"):
        manager.cancel(second)
    manager.mark_swapped_out(first)
    with pytest.raises(PlanError, match="swapped_out"):
        manager.cancel(first)
    assert manager.step == 1 and manager.outstanding == (first,)


def test_the_order_of_use_is_restored_even_where_the_neighbour_was_dropped():
    manager, _ = make(4)
    run(manager, [1, 2, 3, 4])
    one = plan(manager, [3])
    manager.drop(0, ints(2))  # 3 stood behind 2
    manager.cancel(one)
    assert manager.recency(0).tolist() == [1, 3, 4]
    manager.check()


# ------------------------------------------------------------------------------------------------------------- movements


def test_i5_movements_follow_the_order_of_the_plans():
    manager, _ = make(4)
    first, second = plan(manager, [1]), plan(manager, [2])
    with pytest.raises(PlanError, match="step 2 cannot be swapped out before step 1"):
        manager.mark_swapped_out(second)
    with pytest.raises(PlanError, match="must be swapped_out"):
        manager.mark_swapped_in(first)
    with pytest.raises(PlanError, match="must be swapped_in"):
        manager.finish(first)
    manager.mark_swapped_out(first)
    with pytest.raises(PlanError, match="before step 1 is swapped in"):
        manager.mark_swapped_out(second)
    manager.mark_swapped_in(first)
    move(manager, second)
    for call in (manager.mark_swapped_out, manager.mark_swapped_in):
        with pytest.raises(PlanError):
            call(second)
    manager.finish(second)
    with pytest.raises(PlanError, match="finished"):
        manager.finish(second)
    assert [one.state for one in (first, second)] == ["swapped_in", "finished"]


def test_a_plan_of_another_manager_is_refused():
    manager, _ = make(2)
    other, _ = make(2)
    one = plan(other, [1])
    for call in (manager.cancel, manager.mark_swapped_out, manager.mark_swapped_in, manager.finish):
        with pytest.raises(PlanError, match="another SwapManager"):
            call(one)
        with pytest.raises(TypeError):
            call(None)
    with pytest.raises(TypeError):
        Plan()


def test_case_33_a_key_out_of_one_batch_and_into_the_next_keeps_its_row():
    manager, _ = make(2)
    run(manager, [1, 2])
    first = plan(manager, [3])  # out: 1
    move(manager, first)
    manager.finish(first)
    second = plan(manager, [1])
    assert second.swap_in_rows.tolist() == first.swap_out_rows.tolist()


# ------------------------------------------------------------------------------------------------------------ evaluation


def where(manager, key, table=0):
    slots, rows, states = manager.peek(ints(key), table)
    return int(slots[0]), int(rows[0]), int(states[0])


def test_i6_peek_follows_a_victim_on_its_way():
    manager, _ = make(1)
    run(manager, [1])
    assert where(manager, 1) == (0, 0, PEEK_SLOT)
    one = plan(manager, [2])
    assert where(manager, 1) == (0, 0, PEEK_SLOT)  # still there
    assert where(manager, 2) == (-1, -1, PEEK_ABSENT)  # made by a batch that has not trained
    manager.mark_swapped_out(one)
    assert where(manager, 1) == (-1, 0, PEEK_ROW)
    manager.mark_swapped_in(one)
    assert where(manager, 1) == (-1, 0, PEEK_ROW)
    assert where(manager, 2) == (-1, -1, PEEK_ABSENT)
    manager.finish(one)
    assert where(manager, 2) == (0, 1, PEEK_SLOT)


def test_i6_peek_reads_a_returning_key_from_the_host_until_it_is_in():
    manager, _ = make(1)
    run(manager, [1])
    run(manager, [2])
    one = plan(manager, [1])
    assert where(manager, 1) == (-1, 0, PEEK_ROW)
    manager.mark_swapped_out(one)
    assert where(manager, 1) == (-1, 0, PEEK_ROW)
    manager.mark_swapped_in(one)
    assert where(manager, 1) == (0, 0, PEEK_SLOT)


def test_i6_peek_finds_an_evicted_key_until_the_evicting_batch_has_trained():
    config = AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1)
    manager, _ = make(2, filters=[config])
    run(manager, [1, 2], times=[0, 9])
    assert manager.stats()[0]["evicted"] == 0 and where(manager, 1)[2] == PEEK_ABSENT  # 1 was too old for its own batch
    run(manager, [1, 2], times=[9, 9])
    one = plan(manager, [3], times=[20])
    assert manager.stats()[0]["evicted"] == 2
    slot = where(manager, 1)[0]
    assert where(manager, 1)[2] == PEEK_SLOT
    # both slots hold evicted keys; the smaller is taken, and its row is written back for readers like this one
    assert one.swap_out_slots.tolist() == [0]
    move(manager, one)
    assert {where(manager, 1)[2], where(manager, 2)[2]} == {PEEK_ROW, PEEK_SLOT} and slot in (0, 1)
    manager.finish(one)
    assert where(manager, 1) == (-1, -1, PEEK_ABSENT) == where(manager, 2)
    manager.check()


def test_i6_a_waiting_key_reads_the_default():
    manager, _ = make(2, filters=[AdmitAndEvictConfig(admit_threshold=2)])
    one = run(manager, [5])
    assert one.slots.tolist() == [2] and one.admitted.tolist() == [0] and one.misses == 0
    assert where(manager, 5) == where(manager, 6) == (-1, -1, PEEK_DEFAULT)


def test_i6_peek_changes_nothing():
    manager, tables = make(3)
    run(manager, [1, 2])
    before = state(manager)
    slots, rows, _ = manager.peek(ints(2, 1, 77, 2, -(2**63)), 0)
    assert slots.tolist() == [1, 0, -1, 1, -1] and rows.tolist() == [1, 0, -1, 1, -1]
    assert state(manager) == before and len(tables[0]) == 2
    assert [len(part) for part in manager.peek(ints(), 0)] == [0, 0, 0]


# ----------------------------------------------------------------------------------------------------------------- drop


def test_i1_drop_refuses_every_key_in_use_and_names_it():
    manager, tables = make(2)
    run(manager, [1, 2])
    one = plan(manager, [3])  # moves 1 out, makes and pins 3
    for keys, named in (([2, 3], 3), ([2, 1], 1)):
        with pytest.raises(PinnedKeyError, match=f"key {named} is in use"):
            manager.drop(0, ints(*keys))
    assert manager.recency(0).tolist() == [2, 3]
    assert manager.drop(0, ints(2, 2, 99)) == 1
    assert manager.free_slots(0) == 1
    move(manager, one)
    assert manager.drop(0, ints(1)) == 0
    manager.finish(one)
    assert manager.drop(0, ints(3)) == 1
    assert tables[0].erase(ints(1, 2, 3)) == 3
    manager.check()


def test_case_18_counters_of_a_reused_slot_and_row_start_afresh():
    manager, tables = make(1, filters=[AdmitAndEvictConfig()])
    run(manager, [1, 1, 1])
    manager.drop(0, ints(1))
    assert tables[0].columns(tables[0].find(ints(1)))[1].tolist() == [3]  # counters went to the host column
    tables[0].erase(ints(1))
    run(manager, [2])
    assert [column.tolist() for column in manager.residents(0)][3] == [1]


# ----------------------------------------------------------------------------------------------------------------- grow


def test_grow_keeps_residents_and_gives_room():
    manager, _ = make(2, 2)
    run(manager, [1, 2], [3])
    one = plan(manager, [1], [])
    with pytest.raises(PlanError, match="unfinished"):
        manager.grow(0, 5)
    with pytest.raises(PlanError, match="unfinished"):
        manager.set_bases(ints(0, 9))
    manager.cancel(one)
    manager.grow(0, 5)
    manager.grow(0, 5)
    assert manager.base(1) == 6
    one = run(manager, [9, 8, 7, 1, 2], [3])
    assert one.slots.tolist() == [2, 3, 4, 0, 1, 6] and one.hits == 3
    with pytest.raises(ConfigError, match="below the present 5"):
        manager.grow(0, 4)
    manager.check()


def test_grow_under_a_plan_that_is_swapped_in_keeps_pins_and_limbo():
    config = AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1, time_source="step")
    manager, _ = make(3, 2, filters=[config, None])
    run(manager, [1, 2, 3], [])
    pinning = plan(manager, [1], [])
    move(manager, pinning)
    sweeping = plan(manager, [1], [])  # 2 and 3 are gone for later plans
    with pytest.raises(PlanError, match="step 3.*planned"):
        manager.grow(0, 6)
    move(manager, sweeping)
    assert len(manager.unsettled(0)[1]) > 0, "rows are in limbo"
    before = [manager.pinned(0), [part.tolist() for part in manager.peek(ints(1, 2, 3), 0)]]
    for capacity in (4, 6):
        manager.grow(0, capacity)
        manager.check()
    assert [part.tolist() for part in manager.peek(ints(1, 2, 3), 0)] == before[1]
    assert manager.pinned(0) == before[0] and manager.capacity(0) == 6 and manager.base(1) == 7
    late = plan(manager, [2, 4, 5, 6], [7])
    move(manager, late)
    manager.check()
    for one in (pinning, sweeping, late):
        manager.finish(one)
        manager.check()
    assert {4, 5, 6} <= set(manager.residents(0)[0].tolist())


def test_no_memory_while_growing_or_making_a_planner():
    manager, tables = make(2)
    run(manager, [1, 2])
    before = state(manager)
    for countdown in range(8):
        _fail_allocation(countdown)
        with pytest.raises(HostMemoryError):
            manager.grow(0, 100)
        assert state(manager) == before
        _fail_allocation(countdown)
        with pytest.raises(HostMemoryError):
            SwapManager(tables, [100])
    _fail_allocation(-1)
    manager.check()


# ---------------------------------------------------------------------------------------------------------- thread counts


def test_i4_plans_and_state_are_the_same_at_any_thread_count():
    config = AdmitAndEvictConfig(admit_threshold=2, evict_threshold=40, evict_step_interval=2)
    capacities, filters = [60_000, 90_000, 9_000, 30], [config, None, config, None]
    managers = [make(*capacities, filters=filters, num_threads=threads)[0] for threads in (1, 2, 4)]
    rng = np.random.default_rng(1)
    for step in range(4):
        lists = [
            (rng.zipf(1.1, 100_000) % 50_000).astype(np.int64) - 25_000,
            rng.integers(-(2**63), 2**63 - 1, 80_000),
            rng.integers(0, 8_000, 20_000),
            rng.integers(0, 25, 1_000),
        ]
        times = 30 * step + rng.integers(-30, 30, sum(map(len, lists)))
        plans = [plan(manager, *lists, times=times) for manager in managers]
        for name in ARRAYS:
            assert np.array_equal(getattr(plans[0], name), getattr(plans[1], name)), name
            assert np.array_equal(getattr(plans[0], name), getattr(plans[2], name)), name
        for manager, one in zip(managers, plans, strict=True):
            if step == 2:
                manager.cancel(one)
            else:
                move(manager, one)
                manager.finish(one)
            manager.check()
    for t in range(4):
        assert all(np.array_equal(managers[0].recency(t), manager.recency(t)) for manager in managers)
    for t in (0, 2):
        states = [manager.filter_state(t) for manager in managers]
        for name, value in states[0].items():
            assert all(np.array_equal(value, other[name]) for other in states)
    figures = managers[0].stats()
    assert figures[0]["evicted"] > 0 and figures[0]["rejected"] > 0 and figures[1]["swap_out_rows"] > 0
    assert [manager.stats() for manager in managers] == [figures] * 3


# -------------------------------------------------------------------------------------------------------------- doors


def test_i7_empty_batches_and_extreme_keys():
    manager, _ = make(4, 4)
    empty = run(manager, [], [])
    assert all(array.dtype == np.int64 for name in ARRAYS if name != "admitted" for array in [getattr(empty, name)])
    assert empty.num_uniques == 0 and empty.segment_offsets.tolist() == [0] and empty.step == 1
    extreme = [-(2**63), 2**63 - 1, 0, -1]
    one = run(manager, [], extreme + extreme)
    assert one.unique_keys.tolist() == extreme and one.inverse.tolist() == [0, 1, 2, 3] * 2
    assert run(manager, extreme, extreme).hits == 4


def test_arrays_are_read_only_and_outlive_everything():
    manager, _ = make(4)
    one = run(manager, [3, 4, 3])
    inverse, keys = one.inverse, one.unique_keys
    assert inverse is one.inverse
    for name in ARRAYS:
        with pytest.raises(ValueError):
            getattr(one, name)[...] = 0
    manager.close()
    del one, manager
    assert inverse.tolist() == [0, 1, 0] and keys.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("keys", "offsets", "times", "message"),
    [
        (np.array([1, 2], np.int32), ints(0, 2), None, "keys: got int32"),
        (np.arange(4)[::2], ints(0, 2), None, "contiguous"),
        (np.zeros((1, 2), np.int64), ints(0, 2), None, "shape"),
        ([1, 2], ints(0, 2), None, "keys: got list"),
        (ints(1, 2), ints(0, 1, 2), None, "table_offsets: 3 elements; give 2"),
        (ints(1, 2), ints(0, 3), None, "for 2 keys give 0 to 2"),
        (ints(1, 2), ints(1, 2), None, "run from 1"),
        (ints(1, 2), ints(0, 2), ints(1), "timestamps: 1 elements; give 2"),
        (ints(1, 2), ints(0, 2), np.zeros(2), "timestamps: got float64"),
    ],
)
def test_i11_bad_batches_name_the_array(keys, offsets, times, message):
    manager, _ = make(4)
    with pytest.raises(ShapeError, match=message):
        manager.plan(keys, offsets, times)
    assert manager.step == 0


def test_i11_falling_offsets_and_missing_timestamps_name_the_table():
    manager, _ = make(4, 4, filters=[None, AdmitAndEvictConfig(evict_threshold=1, evict_step_interval=1)])
    with pytest.raises(ShapeError, match="follows 3"):
        manager.plan(ints(1, 2), ints(0, 3, 2))
    with pytest.raises(ConfigError, match="'t1' evicts by time"):
        manager.plan(ints(1, 2), ints(0, 1, 2))
    assert manager.step == 0
    assert manager.plan(ints(1, 2), ints(0, 2, 2)).step == 1  # no keys there, no timestamps needed


def test_i7_read_only_input_is_welcome():
    manager, _ = make(4)
    keys, offsets = ints(1, 2), ints(0, 2)
    keys.flags.writeable = offsets.flags.writeable = False
    assert manager.plan(keys, offsets).misses == 2


def test_i11_bad_construction():
    table, other = Table("a", 2), Table("b", 2)
    config = AdmitAndEvictConfig(admit_threshold=2)
    for arguments, options, message in [
        (([], []), {}, "none given"),
        (([table], [1, 2]), {}, "2 capacities"),
        (([table, table], [1, 2]), {}, "twice"),
        (([table], [0]), {}, "capacity = 0"),
        (([table], [2**31]), {}, "capacity = 2147483648"),
        (([table], [True]), {}, "capacity = True"),
        (([table], [1.5]), {}, "capacity = 1.5"),
        ((["a"], [1]), {}, "not a Table"),
        (([table], [1], [config]), {}, "with_filter"),
        (([table], [1], ["count"]), {}, "AdmitAndEvictConfig"),
        (([table, other], [1, 1], [None]), {}, "1 filters"),
        (([table], [1]), {"policy": "lfr"}, "policy = 'lfr'"),
        (([table], [1]), {"num_threads": 0}, "num_threads"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SwapManager(*arguments, **options)


def test_table_numbers_are_checked():
    manager, _ = make(1)
    for bad in (1, -1, "t0", None, True, 0.0):
        for call in (manager.residents, manager.free_slots, manager.recency, manager.filter_state, manager.base):
            with pytest.raises(ConfigError, match="table = "):
                call(bad)
    with pytest.raises(ConfigError, match="has no filter"):
        manager.filter_state(0)


def test_closed():
    manager, tables = make(2)
    one = plan(manager, [1])
    with manager:
        pass
    manager.close()
    for call in (
        lambda: plan(manager, [1]),
        lambda: manager.finish(one),
        manager.stats,
        lambda: manager.peek(ints(1), 0),
    ):
        with pytest.raises(ClosedError):
            call()
    assert len(tables[0]) == 0  # the plan that had not moved was undone


def test_a_closed_table_is_named():
    manager, tables = make(2, 2)
    one = run(manager, [1], [1])
    two = plan(manager, [1], [1])
    tables[1].close()
    for call in (
        lambda: plan(manager, [1], [1]),
        lambda: manager.cancel(two),
        lambda: manager.peek(ints(1), 1),
        lambda: manager.drop(1, ints(77)),
        manager.check,
    ):
        with pytest.raises(ClosedError, match="'t1'"):
            call()
    assert one.state == "finished" and two.state == "planned"
    manager.close()


def test_i12_a_forked_child_is_refused_and_does_no_harm():
    manager, _ = make(4)
    run(manager, [1, 2])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            plan(manager, [3])
        except ForkError:
            try:
                manager.close()
            except ForkError:
                code = 0
        finally:
            del manager
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert run(manager, [1, 2]).hits == 2


def test_peek_from_another_thread_while_plans_are_made():
    manager, _ = make(3000)
    keys = np.arange(1000)
    run(manager, keys)
    wrong, stop = [], threading.Event()

    def evaluate():
        while not stop.is_set():
            slots, _, states = manager.peek(keys, 0)
            if not (np.array_equal(slots, keys) and (states == PEEK_SLOT).all()):
                wrong.append(slots)

    reader = threading.Thread(target=evaluate)
    reader.start()
    for step in range(200):
        one = plan(manager, keys[step:] if step % 2 else keys[::3])
        if step % 3:
            move(manager, one)
            manager.finish(one)
        else:
            manager.cancel(one)
    stop.set()
    reader.join()
    assert not wrong


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_arrays_of_a_large_plan_serve_the_next_one_and_never_two_at_once(num_threads):
    n = 100_000  # keys whose arrays are worth keeping
    first, second = np.arange(n), np.arange(n)[::-1].copy()
    with SwapManager([Table("t", 1)], [2 * n], num_threads=num_threads) as manager:

        def plan(keys):
            made = manager.plan(keys, np.array([0, len(keys)]))
            manager.cancel(made)
            return made

        def address(array):
            return array.__array_interface__["data"][0]

        held = plan(first).occurrence_order  # its plan is gone, the array is not
        kept, other = held.copy(), plan(second)
        assert address(other.inverse) != address(held) - 8 * n
        assert np.array_equal(held, kept) and np.array_equal(other.inverse, np.arange(n))
        where = address(other.inverse)
        del other
        again = plan(first[: n - 1000])
        assert address(again.inverse) == where and len(again.inverse) == n - 1000
        assert address(plan(first).inverse) != where  # in use
        del again
        small = plan(first[:10])
        assert address(small.inverse) != where and small.inverse.tolist() == list(range(10))
    assert np.array_equal(held, kept)


def test_i03_a_large_plan_that_fails_gives_its_block_back():
    n = 100_000
    with SwapManager([Table("t", 1)], [10], num_threads=1) as manager:

        def where():
            made = manager.plan(np.zeros(n, np.int64), np.array([0, n]))
            manager.cancel(made)
            return made.inverse.__array_interface__["data"][0]

        before = where()
        for _ in range(3):
            with pytest.raises(HbmCapacityError):
                manager.plan(np.arange(n), np.array([0, n]))
        assert where() == before
