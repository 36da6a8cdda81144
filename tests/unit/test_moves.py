"""Rows of plans between host tables and slots, or blocks, all tables in one call; and rows that are under way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import embcache as ec
from embcache._core.moves import Moves, _fail_allocation, _forget_what_is_under_way
from embcache._core.plan import Plan
from embcache._core.swap import SwapManager
from embcache._core.table import Table

DIMS = (8, 8, 3)  # two groups
STATES = ([8, 8], [1])  # floats of a row of each state array, by group
GROUPS = [(0, 2, STATES[0]), (2, 3, STATES[1])]


class Rig:
    """Three tables in two groups, a planner with few slots, and the moves of both."""

    def __init__(self, slots: int = 6, threads: int = 1, direct: bool = True) -> None:
        states = (16, 16, 1)
        self.tables = [
            Table(f"t{t}", dim, state_dim=states[t], num_threads=threads, seed=t) for t, dim in enumerate(DIMS)
        ]
        self.planner = SwapManager(self.tables, [slots] * 3, num_threads=threads)
        self.planner.set_bases(np.array([0, slots + 1, 0]))
        self.moves = Moves(self.tables, GROUPS, threads)
        rows = (2 * slots + 2, slots + 1)
        self.arrays = [
            [np.zeros((rows[g], dim), np.float32), *[np.zeros((rows[g], width), np.float32) for width in STATES[g]]]
            for g, dim in enumerate((8, 3))
        ]
        if direct:
            self.moves.use_arrays(self.arrays)

    def plan(self, keys: list[list[int]], chained: bool = True) -> Plan:
        flat = np.array([key for part in keys for key in part], np.int64)
        offsets = np.cumsum([0, *map(len, keys)])
        return self.planner.plan(flat, offsets, moves=self.moves if chained else None)

    def done(self, plan: Plan) -> None:
        if plan.state == "planned":
            self.planner.mark_swapped_out(plan)
            self.planner.mark_swapped_in(plan)
        self.planner.finish(plan)

    def train(self, plan: Plan, value: float) -> None:
        """Every row of the batch becomes `value`, its state ten times that."""
        edges = plan.unique_offsets
        for t in range(3):
            slots, g = plan.slots[edges[t] : edges[t + 1]], t // 2
            self.arrays[g][0][slots] = value
            for state in self.arrays[g][1:]:
                state[slots] = 10 * value

    def host(self, t: int, key: int) -> tuple[float, float]:
        """First weight and first float of the state of a host row."""
        weights, state = np.empty((1, DIMS[t]), np.float32), np.empty((1, self.tables[t].state_dim), np.float32)
        self.tables[t].read_into(self.tables[t].find(np.array([key])), weights, None, [state])
        assert (weights == weights[0, 0]).all() and (state == state[0, 0]).all()
        return float(weights[0, 0]), float(state[0, 0])

    def close(self) -> None:
        self.planner.close()
        for table in self.tables:
            table.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def batch(step: int) -> list[list[int]]:
    """Six keys a table, of which two are those of the batch before."""
    return [[100 * t + (4 * step + i) % 40 for i in range(6)] for t in range(3)]


@pytest.mark.parametrize("threads", [1, 3])
def test_planning_and_moving_in_one_call_is_planning_and_then_moving(threads: int) -> None:
    one, two = Rig(threads=threads), Rig(threads=threads)
    for step in range(12):
        plan = one.plan(batch(step))
        assert plan.state == "swapped_in" and one.moves.gathered
        other = two.plan(batch(step), chained=False)
        two.moves.send(other)
        two.planner.mark_swapped_out(other)
        two.moves.bring(other)
        two.planner.mark_swapped_in(other)
        for name in ("slots", "swap_in_rows", "swap_in_slots", "swap_out_rows", "swap_out_slots"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(other, name))
        for left, right in zip(one.arrays, two.arrays, strict=True):
            for a, b in zip(left, right, strict=True):
                np.testing.assert_array_equal(a, b)
        for rig, each in ((one, plan), (two, other)):
            rig.train(each, float(step + 1))
            rig.planner.finish(each)
    for t in range(3):
        keys = np.arange(40, dtype=np.int64) + 100 * t
        resident = set(one.planner.residents(t)[0].tolist())
        gone = [int(key) for key in keys if key not in resident]
        assert len(gone) == 34 and [one.host(t, key) for key in gone] == [two.host(t, key) for key in gone]
        assert all(one.host(t, key)[1] == 10 * one.host(t, key)[0] for key in gone)
    one.close()
    two.close()


def test_many_rows_and_threads() -> None:
    """More rows than a task takes, and than one thread moves."""
    rigs = [Rig(slots=6000, threads=threads) for threads in (1, 4)]
    for step in range(3):
        keys = [list(range(step * 5000, step * 5000 + 5500)) for _ in range(3)]
        for rig in rigs:
            plan = rig.plan(keys)
            rig.train(plan, step + 1.0)
            rig.planner.finish(plan)
    for left, right in zip(*(rig.arrays for rig in rigs), strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    assert [rig.host(1, 100) for rig in rigs] == [(1.0, 10.0)] * 2
    for rig in rigs:
        rig.close()


def test_an_earlier_plan_has_to_be_moved_first(rig: Rig) -> None:
    first = rig.plan(batch(0), chained=False)
    with pytest.raises(ec.PlanError, match="plan and move while the plan of step 1"):
        rig.plan(batch(1))
    assert rig.planner.step == 1
    rig.planner.cancel(first)
    rig.done(rig.plan(batch(1)))


def test_a_plan_that_fails_moves_nothing(rig: Rig) -> None:
    rig.train(plan := rig.plan(batch(0)), 1.0)
    before = [[array.copy() for array in group] for group in rig.arrays]
    with pytest.raises(ec.HbmCapacityError):
        rig.plan([[1000, 1001], [], []])
    for left, right in zip(before, rig.arrays, strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    rig.planner.finish(plan)


def block_for(rig: Rig, plan: Plan, out: bool = False) -> np.ndarray:
    return np.zeros(rig.moves.block_needed(plan, out), np.uint8)


def part(block: np.ndarray, at: int, rows: int, width: int) -> np.ndarray:
    return block[at : at + rows * width * 4].view(np.float32).reshape(rows, width)


def scatter(rig: Rig, plan: Plan, block: np.ndarray) -> None:
    """What a device does with a block of rows that come in."""
    slots = block[: 8 * len(plan.swap_in_rows)].view(np.int64)
    np.testing.assert_array_equal(slots, plan.swap_in_slots)
    for g, a, at, first, rows in rig.moves.pieces(plan):
        assert at % 64 == 0
        array = rig.arrays[g][a]
        array[slots[first : first + rows]] = part(block, at, rows, array.shape[1])


def gather(rig: Rig, plan: Plan, block: np.ndarray) -> None:
    """What a device does with rows that go out."""
    for g, a, at, first, rows in rig.moves.pieces(plan, out=True):
        array = rig.arrays[g][a]
        part(block, at, rows, array.shape[1])[:] = array[plan.swap_out_slots[first : first + rows]]


def staged(rig: Rig, keys: list[list[int]], room: int = 1 << 16) -> tuple[Plan, np.ndarray]:
    block = np.zeros(room, np.uint8)
    rig.moves.use_block(block)
    return rig.plan(keys), block


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_i5_a_row_under_way_is_taken_from_where_it_is(arrives: str) -> None:
    """Keys leave with one batch and return with the next, before or after the device's copy has ended, never from old host rows."""
    rig = Rig(direct=False)
    first, block = staged(rig, batch(0))
    scatter(rig, first, block)
    rig.train(first, 7.0)
    rig.done(first)
    second, block = staged(rig, [[500 + i for i in range(6)] for _ in range(3)])
    leaving = block_for(rig, second, out=True)
    rig.moves.prepare(second)
    rig.moves.depart(second, leaving)
    scatter_later = block.copy()
    if arrives == "before":
        gather(rig, second, leaving)
        rig.moves.arrive()
    else:  # the device copies later; its slots do not change before it does
        with pytest.raises(ec.PlanError, match="have not arrived"):
            rig.moves.land()
        gather(rig, second, late := leaving.copy())
    rig.arrays[0][0][:] = rig.arrays[1][0][:] = -1
    scatter(rig, second, scatter_later)
    rig.train(second, 8.0)
    rig.done(second)
    third, block = staged(rig, [[100 * t + 1, 100 * t + 3] for t in range(3)])
    assert third.misses == 6 and rig.moves.gathered
    if arrives == "before":
        assert (rig.moves.awaited, rig.moves.under_way) == (0, False)  # served, and landed in the same call
    else:
        assert (rig.moves.awaited, rig.moves.under_way) == (6, True)
        with pytest.raises(ec.PlanError, match="awaited rows have not arrived"):
            rig.moves.serve()
        leaving[:] = late
        rig.moves.arrive()
        rig.moves.serve()
        old = np.empty((1, 8), np.float32)
        rig.tables[0].read_into(rig.tables[0].find(np.array([1])), old)
        assert not (old == 7.0).any()
        rig.moves.land()
    for g, a, at, _, rows in rig.moves.pieces(third):
        assert (part(block, at, rows, rig.arrays[g][a].shape[1]) == (70.0 if a else 7.0)).all(), (g, a)
    assert [rig.host(t, 100 * t + i) for t in range(3) for i in range(6)] == [(7.0, 70.0)] * 18
    assert not rig.moves.under_way
    rig.close()


def test_a_planted_bug_rows_under_way_are_not_looked_for() -> None:
    rig = Rig(direct=False)
    first, block = staged(rig, batch(0))
    scatter(rig, first, block)
    rig.train(first, 7.0)
    rig.done(first)
    second, block = staged(rig, [[500 + i for i in range(6)] for _ in range(3)])
    rig.moves.prepare(second)
    rig.moves.depart(second, leaving := block_for(rig, second, out=True))
    gather(rig, second, leaving)
    rig.moves.arrive()
    _forget_what_is_under_way(rig.moves)
    rig.done(second)
    third, block = staged(rig, [[1], [], []])
    _, _, at, _, rows = rig.moves.pieces(third)[0]
    assert not (part(block, at, rows, 8) == 7.0).any()
    rig.close()


def test_a_block_that_is_too_small_is_said() -> None:
    rig = Rig(direct=False)
    plan, block = staged(rig, batch(0), room=128)
    assert not rig.moves.gathered and not block.any() and plan.state == "planned"
    with pytest.raises(ec.ShapeError, match="block of 128 bytes"):
        rig.moves.bring(plan, block)
    block = block_for(rig, plan)
    rig.moves.bring(plan, block)
    assert rig.moves.gathered
    scatter(rig, plan, block)
    back = block_for(rig, plan)
    rig.moves.bring(plan, back, slots=plan.swap_in_slots[::-1].copy())
    np.testing.assert_array_equal(back[: 8 * 18].view(np.int64), plan.swap_in_slots[::-1])
    with pytest.raises(ec.ShapeError, match="slots: 1 for 18 rows"):
        rig.moves.bring(plan, back, slots=np.zeros(1, np.int64))
    with pytest.raises(ec.PlanError, match="go through blocks"):
        rig.moves.send(plan)
    rig.close()


def test_memory_for_rows_under_way_is_had_before_they_leave() -> None:
    rig = Rig(direct=False)
    rig.done(staged(rig, batch(0))[0])
    plan, _ = staged(rig, batch(5))
    for countdown in (0, 1):
        _fail_allocation(countdown)
        try:
            with pytest.raises(ec.HostMemoryError, match="leave the device"):
                rig.moves.prepare(plan)
        finally:
            _fail_allocation(-1)
    rig.moves.prepare(plan)
    rig.moves.depart(plan, block_for(rig, plan, out=True))
    with pytest.raises(ec.PlanError, match="land them first"):
        rig.moves.prepare(plan)
    rig.close()


def test_what_does_not_fit_is_refused(rig: Rig) -> None:
    for groups in ([(0, 2, [8, 8])], [(0, 3, [8, 8])], [(1, 3, [1])], [(0, 2, [8, 8]), (2, 3, [2])]):
        with pytest.raises(ec.ShapeError, match="group"):
            Moves(rig.tables, groups)
    with pytest.raises(ec.ShapeError, match="weights and state arrays"):
        rig.moves.use_arrays(rig.arrays[:1])
    with pytest.raises(ec.ShapeError, match="bytes in 14 rows"):
        rig.moves.use_arrays([[np.zeros((14, 9), np.float32), *rig.arrays[0][1:]], rig.arrays[1]])
    other = Rig()
    with pytest.raises(ec.PlanError, match="moves of other tables"):
        rig.planner.plan(np.empty(0, np.int64), np.zeros(4, np.int64), moves=other.moves)
    rig.tables[2].close()
    with pytest.raises(ec.ClosedError):
        rig.plan(batch(0))
    other.close()
