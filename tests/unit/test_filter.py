"""The feature filter by example: when a key earns its row and when it loses it."""

from __future__ import annotations

import numpy as np
import pytest

from embcache._core.filter import FeatureFilter
from embcache._core.swap import SwapManager, _set_bracket, _set_isa
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig
from embcache.errors import ConfigError, PinnedKeyError

NEVER = -(2**63)
LAST = 2**63 - 1


def make(capacity=8, *, with_row=(), sweep_rows=1 << 21, **config):
    table = Table("t", 1, with_filter=True)
    if with_row:
        table.insert(np.array(with_row, np.int64))
    return SwapManager(
        [table], [capacity], [AdmitAndEvictConfig(**config)], num_threads=1, sweep_rows=sweep_rows
    ), table


def run(manager, keys, times=None):
    one = manager.plan(
        np.array(keys, np.int64), np.array([0, len(keys)]), None if times is None else np.array(times, np.int64)
    )
    manager.mark_swapped_out(one)
    manager.mark_swapped_in(one)
    manager.finish(one)
    manager.check()
    return dict(zip(one.unique_keys.tolist(), one.admitted.tolist(), strict=True))


def counters(manager):
    """key -> (count, last, has row)"""
    state = manager.filter_state(0)
    columns = (state[name].tolist() for name in ("counts", "last", "has_row"))
    return dict(zip(state["keys"].tolist(), zip(*columns, strict=True), strict=True))


# ------------------------------------------------------------------------------------------------------------ admission


def test_case_22_and_23_occurrences_count_and_the_threshold_itself_admits():
    manager, table = make(admit_threshold=3)
    assert run(manager, [1, 1, 2]) == {1: 0, 2: 0}
    assert len(table) == 0
    assert run(manager, [1, 2]) == {1: 1, 2: 0}  # third occurrence of 1, second of 2
    assert run(manager, [3, 3, 3, 2]) == {3: 1, 2: 1}  # all of the batch counts first, for every occurrence of it
    assert counters(manager) == {1: (3, NEVER, 1), 2: (3, NEVER, 1), 3: (3, NEVER, 1)}
    assert len(table) == 3


@pytest.mark.parametrize("threshold", [-1, 0, 1])
def test_low_thresholds_admit_at_once(threshold):
    manager, _ = make(admit_threshold=threshold)
    assert run(manager, [7, 8, 7]) == {7: 1, 8: 1}
    assert counters(manager) == {7: (2, NEVER, 1), 8: (1, NEVER, 1)}


def test_an_admitted_key_stays_admitted_through_hbm_and_host():
    manager, _ = make(1, admit_threshold=2)
    assert run(manager, [1, 1]) == {1: 1}
    assert run(manager, [2, 2]) == {2: 1}  # 1 goes to the host
    assert counters(manager)[1] == (2, NEVER, 1)
    assert run(manager, [1]) == {1: 1}
    assert counters(manager) == {1: (3, NEVER, 1), 2: (2, NEVER, 1)}


def test_rejected_keys_take_no_slot_and_no_row():
    manager, table = make(1, admit_threshold=2)
    assert set(run(manager, list(range(500))).values()) == {0}
    assert len(table) == 0 and manager.free_slots(0) == 1
    assert manager.stats()[0]["rejected"] == 500 and manager.stats()[0]["admitted"] == 0


# -------------------------------------------------------------------------------------------------------------- eviction


def test_a_sweep_evicts_what_is_more_than_the_threshold_behind():
    manager, table = make(evict_threshold=10, evict_step_interval=2)
    run(manager, [1, 2, 3], [0, 1, 2])
    run(manager, [4], [11])  # cut-off 1: only 1 is below it
    assert counters(manager) == {2: (1, 1, 1), 3: (1, 2, 1), 4: (1, 11, 1)}
    run(manager, [4], [100])  # step 3: no sweep
    assert len(table) == 3
    run(manager, [], [])  # step 4: a sweep without keys
    assert counters(manager) == {4: (2, 100, 1)}
    assert len(table) == 1 and manager.stats()[0]["evicted"] == 3


def test_last_is_the_largest_timestamp_not_the_latest_seen():
    manager, _ = make(evict_threshold=5, evict_step_interval=1)
    run(manager, [1, 1, 1], [3, 9, 4])
    run(manager, [1], [2])
    assert counters(manager) == {1: (4, 9, 1)} and manager.filter_state(0)["newest"] == 9


def test_eviction_from_host_rows_residents_and_waiting_keys():
    manager, table = make(2, admit_threshold=2, evict_threshold=3, evict_step_interval=4)
    run(manager, [1, 1, 2, 2], [0, 0, 0, 0])
    run(manager, [3, 3], [1, 1])  # 1 goes to the host
    run(manager, [4], [1])  # waits
    assert {key: has_row for key, (_, _, has_row) in counters(manager).items()} == {1: 1, 2: 1, 3: 1, 4: 0}
    assert run(manager, [3], [9]) == {3: 1}
    assert counters(manager) == {3: (3, 9, 1)}
    assert manager.stats()[0]["evicted"] == 2 and manager.stats()[0]["forgotten"] == 1 and len(table) == 1


def test_an_evicted_key_must_qualify_again_and_gets_a_new_row():
    manager, table = make(admit_threshold=2, evict_threshold=1, evict_step_interval=2)
    run(manager, [1, 1], [0, 0])
    run(manager, [2], [50])
    assert 1 not in counters(manager) and table.find(np.array([1])).tolist() == [-1]
    assert run(manager, [1], [50]) == {1: 0}
    assert run(manager, [1], [50]) == {1: 1}
    assert manager.stats()[0]["born"] == 2


@pytest.mark.parametrize("admit", [-1, 2])
def test_a_key_swept_in_its_own_batch_reads_the_default(admit):
    manager, table = make(admit_threshold=admit, evict_threshold=5, evict_step_interval=2)
    run(manager, [1, 1, 2, 2], [0, 0, 0, 0])
    batch = run(manager, [1, 1, 3, 4, 4], [3, 2, 1, 20, 20])  # sweep with cut-off 15
    assert batch == {1: 0, 3: 0, 4: 1}  # a resident, a new key, and one that is young enough
    assert counters(manager) == {4: (2, 20, 1)} and len(table) == 1


def test_steps_as_time():
    manager, _ = make(evict_threshold=2, evict_step_interval=1, time_source="step")
    run(manager, [1])
    run(manager, [2])
    run(manager, [2])
    assert 1 in counters(manager)  # last 1, newest 3: not more than 2 behind
    run(manager, [2])
    assert counters(manager) == {2: (3, 4, 1)}


@pytest.mark.parametrize("threshold", [1, 2**62, LAST])
def test_extreme_timestamps_do_not_overflow(threshold):
    manager, _ = make(evict_threshold=threshold, evict_step_interval=1)
    run(manager, [1], [NEVER])
    assert counters(manager) == {1: (1, NEVER, 1)}  # nothing is further behind than there are timestamps
    run(manager, [2], [NEVER + 1])
    assert set(counters(manager)) == {1, 2}
    run(manager, [3], [LAST])
    assert set(counters(manager)) == {3}
    run(manager, [4], [LAST - 1])
    assert set(counters(manager)) == {3, 4}


def test_newest_stays_newest_when_its_key_is_gone():
    manager, _ = make(evict_threshold=5, evict_step_interval=1)
    run(manager, [1], [100])
    run(manager, [2], [10])
    assert manager.filter_state(0)["newest"] == 100 and set(counters(manager)) == {1}


# ------------------------------------------------------------------------------------------------------------- the floor


def test_case_25_a_floor_of_rows_keeps_the_most_recent():
    manager, table = make(evict_threshold=10, evict_step_interval=2, evict_keep_min=2)
    run(manager, [1, 2, 3, 4], [0, 5, 9, 7])
    run(
        manager, [5], [1000]
    )  # all rows are too old: the two most recent of them stay, and 5 is admitted after the sweep
    assert counters(manager) == {3: (1, 9, 1), 4: (1, 7, 1), 5: (1, 1000, 1)} and len(table) == 3
    assert manager.stats()[0]["evicted"] == 2


def test_rows_that_are_equally_recent_stay_together_at_the_floor():
    manager, _ = make(evict_threshold=10, evict_step_interval=2, evict_keep_min=3)
    run(manager, [1, 2, 3, 4], [0, 7, 7, 7])
    run(manager, [5], [1000])
    assert set(counters(manager)) == {2, 3, 4, 5}


def test_a_table_below_its_floor_loses_no_row_but_waiting_keys_go():
    manager, _ = make(admit_threshold=2, evict_threshold=10, evict_step_interval=2, evict_keep_min=5)
    run(manager, [1, 1, 2, 2, 3], [0, 0, -5, -5, 0])
    assert run(manager, [4, 1], [1000, 1]) == {4: 0, 1: 1}
    assert set(counters(manager)) == {1, 2, 4}
    assert manager.stats()[0]["evicted"] == 0 and manager.stats()[0]["forgotten"] == 1


def test_rows_of_the_user_count_for_the_floor():
    manager, _ = make(evict_threshold=10, evict_step_interval=2, evict_keep_min=2, with_row=[8, 9])
    run(manager, [1], [0])
    run(manager, [], [])
    assert set(counters(manager)) == {1, 8, 9}
    run(manager, [2], [1000])
    run(manager, [], [])
    assert set(counters(manager)) == {2, 8, 9}


@pytest.mark.parametrize("keep", [0, 1, 70, 700, 5000])
def test_the_floor_among_many_timestamps(keep):
    rng = np.random.default_rng(keep)
    stamps = rng.integers(-(2**63), 2**63 - 1, 3000)
    manager, table = make(512, evict_threshold=1, evict_step_interval=2, evict_keep_min=keep)
    for at in range(0, 3000, 500):
        run(manager, np.arange(at, at + 500).tolist(), stamps[at : at + 500].tolist())
        run(manager, [], [])
        alive = np.sort(stamps[: at + 500])[::-1][: max(keep, 1)]
        expected = sorted(set(alive.tolist()))
        assert sorted(set(manager.filter_state(0)["last"].tolist())) == expected[-len(expected) :]
    assert len(table) == min(max(keep, 1), 3000)


@pytest.mark.parametrize("bracket", [0.0, 2.0, 10.0])
@pytest.mark.parametrize("keep", [1, 9000, 14321, 19998])
def test_the_floor_of_a_large_table_whatever_the_sample_says(bracket, keep):
    rng = np.random.default_rng(keep)
    manager, table = make(64, evict_threshold=1, evict_step_interval=1000, evict_keep_min=keep)
    _set_bracket(manager, bracket)
    keys = rng.permutation(20000)
    last = rng.integers(-3000, 0, len(keys))
    table.write_columns(table.insert(keys), np.ones(len(keys), np.int64), last)
    manager.start_at(999)
    run(manager, [20000], [5])  # all are too old, and it is born after the sweep
    oldest = np.sort(last)[-keep]
    assert (table.find(keys) >= 0).tolist() == (last >= oldest).tolist()


@pytest.mark.parametrize("isa", ["baseline", "auto"])
def test_the_floor_where_few_of_many_rows_are_old(isa):
    """They are gathered without a sample: one place in 64 at most, and more than 4,096."""
    rng = np.random.default_rng(7)
    n, old, keep = 300_000, 4_500, 298_001
    manager, table = make(64, evict_threshold=1, evict_step_interval=1000, evict_keep_min=keep)
    _set_isa(manager, isa)
    keys = rng.permutation(n)
    last = np.full(n, 5)
    last[rng.choice(n, old, replace=False)] = rng.integers(-(10**12), 0, old)
    counts = np.ones(n, np.int64)
    counts[last == 5] = rng.integers(0, 2, n - old)  # some rows are the user's and have no counters
    table.write_columns(table.insert(keys), counts, last)
    manager.start_at(999)
    run(manager, [n], [5])
    oldest = np.sort(last)[-keep]
    assert np.array_equal(table.find(keys) >= 0, last >= oldest)


# ------------------------------------------------------------------------------------------------- pins, undo, rows by hand


def test_a_key_pinned_by_an_earlier_batch_dies_at_once_and_frees_its_slot_later():
    manager, table = make(2, evict_threshold=1, evict_step_interval=2)
    first = manager.plan(np.array([1]), np.array([0, 1]), np.array([0]))
    second = manager.plan(np.array([2]), np.array([0, 1]), np.array([9]))
    assert set(counters(manager)) == {2} and manager.free_slots(0) == 0 and manager.pinned(0) == 2
    third = manager.plan(np.array([2]), np.array([0, 1]), np.array([9]))
    for one in (first, second, third):
        manager.mark_swapped_out(one)
        manager.mark_swapped_in(one)
    manager.finish(first)
    assert manager.pinned(0) == 1 and manager.free_slots(0) == 0  # evaluation may still ask for key 1
    manager.finish(second)
    assert manager.free_slots(0) == 1
    fourth = manager.plan(np.array([1]), np.array([0, 1]), np.array([9]))
    assert len(fourth.swap_out_keys) == 0 and fourth.slots.tolist() == first.slots.tolist()
    assert fourth.swap_in_rows.tolist() == first.swap_in_rows.tolist()  # the row index is free again, the row is new
    assert len(table) == 2
    manager.check()


def test_an_evicted_key_comes_back_with_another_row_while_the_old_one_is_in_use():
    manager, _ = make(4, evict_threshold=1, evict_step_interval=2)
    first = manager.plan(np.array([1]), np.array([0, 1]), np.array([0]))
    manager.plan(np.array([2]), np.array([0, 1]), np.array([9]))
    third = manager.plan(np.array([1]), np.array([0, 1]), np.array([9]))
    assert third.misses == 1 and third.slots.tolist() != first.slots.tolist()
    assert third.swap_in_rows.tolist() != first.swap_in_rows.tolist()
    assert counters(manager)[1] == (1, 9, 1)
    manager.check()


def test_cancel_brings_evicted_keys_back_with_their_rows():
    manager, table = make(2, admit_threshold=2, evict_threshold=1, evict_step_interval=2)
    run(manager, [1, 1, 2, 2], [0, 0, 0, 0])
    before, rows = counters(manager), table.find(np.array([1, 2])).tolist()
    one = manager.plan(np.array([3, 3, 4]), np.array([0, 3]), np.array([9, 9, 9]))
    assert set(counters(manager)) == {3, 4}
    manager.cancel(one)
    assert counters(manager) == before and table.find(np.array([1, 2])).tolist() == rows
    assert manager.filter_state(0)["newest"] == 0 and manager.step == 1
    manager.check()


def test_rows_put_in_by_the_user_are_admitted_and_not_swept_unseen():
    manager, table = make(admit_threshold=5, evict_threshold=1, evict_step_interval=1, with_row=[1, 2])
    assert run(manager, [1], [50]) == {1: 1}
    run(manager, [3], [60])  # 1 is too old now; 2 has no timestamp
    assert set(counters(manager)) == {2, 3} and len(table) == 1


def test_a_row_put_in_for_a_waiting_key_takes_over_its_counters():
    manager, table = make(admit_threshold=5)
    run(manager, [1, 1])
    assert manager.drop(0, np.array([1])) == 0
    table.insert(np.array([1]))
    assert run(manager, [1]) == {1: 1}
    assert counters(manager) == {1: (3, NEVER, 1)}


# ---------------------------------------------------------------------------------------------------------- state in and out


def test_an_empty_filter():
    waiting = FeatureFilter(AdmitAndEvictConfig(admit_threshold=2), 0)
    assert len(waiting) == 0 and waiting.newest == NEVER and waiting.nbytes >= 0
    waiting.check()


# ------------------------------------------------------------------------------------------------------ sweeps in slices


def test_what_a_sweep_killed_is_dead_at_once_and_taken_away_later():
    manager, table = make(4, evict_threshold=5, evict_step_interval=8, sweep_rows=1)
    for first in range(0, 49, 7):
        run(manager, [first % 28, first % 28 + 1, first % 28 + 2], [0, 0, 0])
    known = len(table)
    run(manager, [1000], [100])  # step 8
    assert set(counters(manager)) == {1000}
    assert len(table) == 1 + manager.stats()[0]["dead"] and manager.stats()[0]["dead"] >= known - 1
    assert manager.stats()[0]["evicted"] == known
    assert (manager.peek(np.arange(30), 0)[2] == 0).all() and len(table) - manager.unsettled(0)[2] == 1
    left = []
    while manager.stats()[0]["dead"]:
        run(manager, [1000], [100])
        left.append(manager.stats()[0]["dead"])
        assert manager.stats()[0]["evicted"] == known
        assert len(left) < 500
    assert left == sorted(left, reverse=True) and len(left) >= known - 1 and len(table) == 1


@pytest.mark.parametrize("isa", ["baseline", "auto"])
@pytest.mark.parametrize("rows", [1, 63, 1024, 777_777])
def test_a_pass_finds_exactly_the_dead_rows(isa, rows):
    """Thousands of rows, with places that are free, resident or new among them, and timestamps at both ends."""
    rng = np.random.default_rng(rows)
    manager, table = make(700, evict_threshold=2**62, evict_step_interval=1000, sweep_rows=rows)
    _set_isa(manager, isa)
    keys = rng.permutation(6000)
    at = table.insert(keys)
    last = rng.choice([NEVER, -2, -1, 0, 2**62 - 1], len(keys), p=[0.1, 0.2, 0.2, 0.4, 0.1])
    counted = rng.random(len(keys)) < 0.9  # the others are rows that training has not met
    table.write_columns(at, counted.astype(np.int64), last)
    table.erase(keys[:1500])
    for first in range(2000, 3500, 500):  # these become residents, some with their own old timestamps
        run(manager, keys[first : first + 500].tolist(), last[first : first + 500].tolist())
    manager.start_at(999)
    run(manager, [keys[5999]], [2**62 - 1])  # the cut-off is -1
    counted[2000:3500], last[5999] = True, 0
    stays = (np.arange(len(keys)) >= 1500) & ((last >= -1) | ~counted)
    for _ in range(20000):
        if not manager.export_filter(0)["sweeping"]:
            break
        run(manager, [], [])
    assert (table.find(keys) >= 0).tolist() == stays.tolist()
    assert manager.stats()[0]["evicted"] == 4500 - stays.sum() > 500
    manager.check()


@pytest.mark.parametrize("size", [1, 64, 65, 128, 3000])
def test_rows_that_are_taken_away_together_come_back_with_a_cancelled_plan(size):
    """Blocks of rows, with survivors in each of them: rows that training has not met, and keys that came late."""
    manager, table = make(700, evict_threshold=5, evict_step_interval=3, sweep_rows=1 << 40)
    keys = np.random.default_rng(size).permutation(size) * 3 + 1
    at = table.insert(keys)
    last = np.where(np.arange(size) % 7 == 3, 100, 0)
    counts = (np.arange(size) % 5 != 2).astype(np.int64)
    table.write_columns(at, counts, last)
    dead = keys[(last == 0) & (counts > 0)]
    run(manager, [], [])
    run(manager, [], [])
    before = manager.filter_state(0)
    one = manager.plan(np.array([-1]), np.array([0, 1]), np.array([100]))  # step 3: the sweep, and its whole pass
    assert (table.find(dead) < 0).all() and len(table) == size - len(dead) + 1
    manager.cancel(one)
    manager.check()
    assert table.find(keys).tolist() == at.tolist() and len(table) == size
    after = manager.filter_state(0)
    assert all(np.array_equal(before[name], after[name]) for name in ("keys", "counts", "last", "has_row"))
    run(manager, [-1], [100])
    assert (table.find(dead) < 0).all() and manager.stats()[0]["evicted"] == len(dead)
    fresh = table.insert(np.arange(len(dead)) - 10**6)  # their rows are free: no row more is needed
    assert set(fresh.tolist()) <= set(at.tolist()) | {size}
    table.check()


def test_steps_do_not_go_back():
    manager, _ = make(admit_threshold=2)
    run(manager, [5])
    with pytest.raises(ConfigError, match="before this manager's step 1"):
        manager.start_at(0)


def test_a_dead_key_starts_anew_before_the_pass_has_come_to_it():
    manager, table = make(4, admit_threshold=2, evict_threshold=5, evict_step_interval=3, sweep_rows=1)
    run(manager, [1, 1, 2, 2, 3], [0] * 5)
    born = manager.stats()[0]["born"]
    run(manager, [4, 4, 5, 5], [0] * 4)
    run(manager, [9], [100])  # the sweep
    assert run(manager, [1, 2, 2, 3], [100] * 4) == {1: 0, 2: 1, 3: 0}
    assert counters(manager) == {9: (1, 100, 0), 1: (1, 100, 0), 2: (2, 100, 1), 3: (1, 100, 0)}
    assert manager.stats()[0]["born"] == born + 3 and manager.stats()[0]["evicted"] == 4
    assert manager.stats()[0]["forgotten"] == 1 and len(table) == 1 + manager.stats()[0]["dead"]


def test_a_key_that_comes_late_lives_until_the_next_sweep():
    for rows in (1, 1 << 21):
        manager, _ = make(4, evict_threshold=5, evict_step_interval=4, sweep_rows=rows)
        for key in (1, 2, 3):
            run(manager, [key], [0])
        run(manager, [9], [100])  # step 4: a sweep, cut-off 95
        assert run(manager, [1, 7], [3, 4]) == {1: 1, 7: 1}
        assert run(manager, [7], [2]) == {7: 1}
        assert counters(manager) == {9: (1, 100, 1), 1: (1, 3, 1), 7: (2, 4, 1)}
        run(manager, [], [])
        run(manager, [], [])  # step 8
        assert counters(manager) == {9: (1, 100, 1)}


def test_the_user_can_write_and_erase_dead_keys_at_once():
    manager, table = make(4, evict_threshold=5, evict_step_interval=3, sweep_rows=1)
    run(manager, [1, 2, 3], [0, 0, 0])
    run(manager, [4, 5, 6], [0, 0, 0])
    run(manager, [9], [100])
    assert manager.stats()[0]["dead"] >= 5 and manager.stats()[0]["evicted"] == 6
    assert manager.drop(0, np.array([1, 2, 6])) == 0  # some in the host, some resident: all go for good
    assert table.find(np.array([1, 2, 6])).tolist() == [-1, -1, -1]
    assert 2 <= manager.stats()[0]["dead"] <= 3 and manager.stats()[0]["evicted"] == 6
    row = table.insert(np.array([1]))
    assert counters(manager)[1] == (0, NEVER, 1) and manager.peek(np.array([1]), 0)[1].tolist() == row.tolist()
    assert run(manager, [1], [50]) == {1: 1}
    assert counters(manager)[1] == (1, 50, 1)
    manager.check()


def test_keys_killed_by_an_unfinished_sweep_are_in_use():
    manager, _ = make(4, admit_threshold=2, evict_threshold=5, evict_step_interval=2, sweep_rows=1)
    run(manager, [1, 1, 2], [0, 0, 0])
    one = manager.plan(np.array([9]), np.array([0, 1]), np.array([100]))
    with pytest.raises(PinnedKeyError, match="key 1"):
        manager.drop(0, np.array([1]))
    with pytest.raises(PinnedKeyError, match="key 2"):
        manager.forget_waiting(0, np.array([2]))
    assert manager.peek(np.array([1]), 0)[0].tolist() == [0]  # evaluation still sees it
    manager.cancel(one)
    assert manager.forget_waiting(0, np.array([2])) == 1 and manager.drop(0, np.array([1])) == 1


def test_undo_after_entries_were_forgotten_by_hand():
    """The list of unused entries keeps its sense when the user forgets a key between a plan and its cancel."""
    manager, _ = make(4, admit_threshold=2)
    run(manager, [1, 2, 3])
    one = manager.plan(np.array([1]), np.array([0, 1]))  # takes the entry of 1 away
    assert manager.forget_waiting(0, np.array([2])) == 1
    manager.cancel(one)
    run(manager, [7])
    run(manager, [8])
    assert counters(manager) == dict.fromkeys((1, 3, 7, 8), (1, NEVER, 0))
    manager.check()


def test_bad_slices_are_refused():
    for rows in (0, -1, 1.5, "many", 2**62):
        with pytest.raises(ConfigError, match="sweep_rows"):
            make(sweep_rows=rows)
