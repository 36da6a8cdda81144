"""Planner and model side by side, and the rows that they talk about actually moved.

The host table and the HBM buffer are dicts of row histories. A swap copies a history, training appends to it, so a row
that was overwritten, read too early or mixed up shows as a wrong history (I1, I2, I5), and evaluation is compared with
the history as of the last finished batch (I6).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from embcache._core.notice import Notice
from embcache._core.plan import Plan
from embcache._core.swap import PEEK_ABSENT, PEEK_DEFAULT, PEEK_ROW, PEEK_SLOT, SwapManager, _fail_allocation
from embcache._core.table import Table
from embcache.config import AdmitAndEvictConfig
from embcache.errors import HbmCapacityError, HostMemoryError, PinnedKeyError, PlanError
from models.planner_model import ModelCapacityError, PlannerModel

History = tuple


def flat(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Keys table by table, and the offsets."""
    offsets = np.concatenate([[0], np.cumsum([len(keys) for keys in lists])]).astype(np.int64)
    return np.array([key for keys in lists for key in keys], np.int64), offsets


def cut(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return [values[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]


def cut_lists(values: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in cut(values, offsets)]


class Rig:
    def __init__(
        self,
        capacities: list[int],
        configs: list[AdmitAndEvictConfig | None],
        *,
        policy: str = "lru",
        num_threads: int = 1,
        sweep_rows: int | None = None,
    ) -> None:
        self.tables = [Table(f"table{t}", 1, with_filter=config is not None) for t, config in enumerate(configs)]
        slices = {} if sweep_rows is None else {"sweep_rows": sweep_rows}
        self.manager = SwapManager(self.tables, capacities, configs, policy=policy, num_threads=num_threads, **slices)
        self.lazy = sweep_rows is not None  # see take_slots
        self.model = PlannerModel(capacities, configs, policy)
        for table in self.model.tables:
            table.lazy = self.lazy
        self.plans: list[Plan] = []  # unfinished, oldest first
        self.notices: dict[Notice, list[list[int]]] = {}  # that wait for their batches -> keys
        self.noticed: dict[int, tuple[Notice, list[list[int]]]] = {}  # step of an unfinished plan -> its notice
        self.host: dict[tuple[int, int], History] = {}  # (table, row) -> history
        self.hbm: dict[int, History] = {}  # slot -> history
        self.truth: dict[tuple[int, int], History] = {}  # (table, row) -> history as trained
        self.serial = 0
        self.last_finished = 0
        self.hands = 0  # changes from outside
        self.hands_at: dict[int, int] = {}  # step -> how many there were before it
        # step -> table -> admitted key -> row of the life that it trains
        self.rows_used: dict[int, list[dict[int, int]]] = {}
        self.seen: Counter[str] = Counter()  # what has happened, so that a test can tell that it has tested something

    def close(self) -> None:
        _fail_allocation(-1)
        self.manager.close()
        for table in self.tables:
            assert table.check() is not None
            table.close()

    # ------------------------------------------------------------------------------------------------------------- plans

    def plan(
        self,
        keys: list[list[int]],
        times: list[list[int]] | None,
        clicks: list[list[int]] | None = None,
        *,
        fail_allocation: int = -1,
        notice: Notice | None = None,
    ) -> Plan | None:
        """Plan on both sides; None where both say that there is no room, or the memory request that was to fail did."""
        number = None if notice is None else notice.number
        batch, offsets = flat(keys)
        stamps = None if times is None else flat(times)[0]
        clicked = None if clicks is None else flat(clicks)[0].astype(np.uint8)
        _fail_allocation(fail_allocation)
        try:
            plan = self.manager.plan(batch, offsets, stamps, clicked, notice)
        except HostMemoryError:
            assert fail_allocation >= 0
            return None
        except HbmCapacityError as error:
            try:
                self.seen["refused"] += 1
                rows_at_will = [{key: -1 - i for i, key in enumerate(set(part))} for part in keys]
                self.model.plan(keys, times, rows_at_will, clicks, number)
            except ModelCapacityError as expected:
                assert (error.table, error.need, error.have) == (f"table{expected.table}", expected.need, expected.have)
                assert error.never_fits == (expected.need > expected.capacity)
                assert str(expected.need) in str(error) and str(expected.have) in str(error)
                return None
            raise AssertionError("the planner refused what the model accepts") from error
        finally:
            _fail_allocation(-1)
        ins = zip(
            cut(plan.swap_in_keys, plan.swap_in_offsets), cut(plan.swap_in_rows, plan.swap_in_offsets), strict=True
        )
        rows = [dict(zip(k.tolist(), r.tolist(), strict=True)) for k, r in ins]
        shares = self.model.plan(keys, times, rows, clicks, number)
        if notice is not None:
            self.noticed[plan.step] = notice, self.notices.pop(notice)
            assert notice.state == "planned"
        if self.lazy:
            self.take_slots(plan, shares)
        self.compare_plan(plan, shares, keys, offsets)
        self.rows_used[plan.step] = [
            {key: table.rows[key].index for key, admitted in zip(share.unique, share.admitted, strict=True) if admitted}
            for share, table in zip(shares, self.model.tables, strict=True)
        ]
        for t, share in enumerate(shares):
            for key in share.born:
                self.serial += 1
                self.host[t, rows[t][key]] = self.truth[t, rows[t][key]] = ("born", key, self.serial)
            self.seen["hits"] += share.hits
            self.seen["swap_out_rows"] += len(share.swap_out)
            self.seen["evicted"] += len(share.killed)
            self.seen["forgotten"] += share.forgotten
            self.seen["rejected"] += len(share.admitted) - sum(share.admitted)
            gone = self.model.tables[t].gone
            self.seen["zombies"] += sum(bool(one.pins) and one.killer == plan.step for one in gone)
            self.seen["dying slots taken"] += sum(one.writer == plan.step for one in gone)
        self.hands_at[plan.step] = self.hands
        self.plans.append(plan)
        return plan

    def compare_plan(self, plan: Plan, shares: list, keys: list[list[int]], offsets: np.ndarray) -> None:
        assert plan.step == self.model.step and plan.state == "planned"
        assert plan.num_keys == offsets[-1] and plan.num_uniques == sum(len(share.unique) for share in shares)
        assert plan.table_offsets.tolist() == offsets.tolist()
        assert plan.unique_offsets.tolist() == np.cumsum([0] + [len(share.unique) for share in shares]).tolist()
        assert plan.swap_in_offsets.tolist() == np.cumsum([0] + [len(share.swap_in) for share in shares]).tolist()
        assert plan.swap_out_offsets.tolist() == np.cumsum([0] + [len(share.swap_out) for share in shares]).tolist()
        assert plan.table_hits.tolist() == [share.hits for share in shares] and plan.hits == sum(plan.table_hits)
        assert plan.table_misses.tolist() == [len(share.swap_in) for share in shares] and plan.misses == sum(
            plan.table_misses
        )
        first = 0
        groups: list[list[int]] = []
        for t, share in enumerate(shares):
            part = slice(plan.unique_offsets[t], plan.unique_offsets[t + 1])
            assert plan.unique_keys[part].tolist() == share.unique
            assert plan.slots[part].tolist() == share.slots
            assert plan.admitted[part].tolist() == share.admitted
            assert plan.inverse[offsets[t] : offsets[t + 1]].tolist() == [first + unique for unique in share.inverse]
            groups += [[int(offsets[t]) + at for at in group] for group in share.groups]
            first += len(share.unique)
            for mine, theirs in (("swap_in", share.swap_in), ("swap_out", share.swap_out)):
                part = slice(*getattr(plan, f"{mine}_offsets")[t : t + 2])
                columns = (getattr(plan, f"{mine}_{column}")[part].tolist() for column in ("keys", "slots", "rows"))
                assert list(zip(*columns, strict=True)) == theirs
        assert [group.tolist() for group in cut(plan.occurrence_order, plan.segment_offsets)] == groups
        assert plan.segment_offsets[0] == 0 and plan.segment_offsets[-1] == plan.num_keys

    def take_slots(self, plan: Plan, shares: list) -> None:
        """Put the planner's choice of slots into the model's plan.

        The model takes everything that a sweep kills at once, the planner in slices. So dead residents are still there to
        be victims, and slots differ. What is observable but for slots, hits and movements must not: plans are compared
        without those, and the rows that move, being histories, show whether the slots hold what they should.
        """
        for t, share in enumerate(shares):
            part = slice(*plan.unique_offsets[t : t + 2])
            share.slots = plan.slots[part].tolist()
            share.hits = int(plan.table_hits[t])
            assert share.hits + int(plan.table_misses[t]) == sum(share.admitted)
            for kind in ("swap_in", "swap_out"):
                part = slice(*getattr(plan, f"{kind}_offsets")[t : t + 2])
                columns = (getattr(plan, f"{kind}_{column}")[part].tolist() for column in ("keys", "slots", "rows"))
                setattr(share, kind, list(zip(*columns, strict=True)))

    def cancel(self) -> None:
        plan = self.plans.pop()
        self.manager.cancel(plan)
        self.model.cancel(plan.step)
        self.seen["cancelled"] += 1
        if plan.step in self.noticed:
            notice, keys = self.noticed.pop(plan.step)
            self.notices[notice] = keys
            assert notice.state == "given"
        assert plan.state == "cancelled"

    def take_back(self) -> None:
        """Undo the newest plan though its rows have moved: victims come back from where they were written to."""
        plan = self.plans[-1]
        if self.hands > self.hands_at[plan.step] or plan.step != self.model.step:
            try:
                self.manager.take_back(plan)
            except PlanError as error:
                assert "since" in str(error) or "after" in str(error)
                assert plan.state == "swapped_in"
                self.seen["not taken back"] += 1
                return
            raise AssertionError(f"step {plan.step} was taken back over later changes")
        self.manager.take_back(plan)
        assert plan.state == "planned"
        parts = (cut(getattr(plan, f"swap_out_{what}"), plan.swap_out_offsets) for what in ("slots", "rows"))
        for t, (slots, rows) in enumerate(zip(*parts, strict=True)):
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                self.hbm[slot] = self.host[t, row]
        self.seen["taken back"] += 1
        self.cancel()

    def move(self) -> None:
        """The next movement that is due: swap-out or swap-in of the oldest plan that is not swapped in."""
        plan = next(plan for plan in self.plans if plan.state in ("planned", "swapped_out"))
        out = plan.state == "planned"
        kind = "swap_out" if out else "swap_in"
        parts = (cut(getattr(plan, f"{kind}_{what}"), getattr(plan, f"{kind}_offsets")) for what in ("slots", "rows"))
        for t, (slots, rows) in enumerate(zip(*parts, strict=True)):
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                if out:
                    self.host[t, row] = self.hbm[slot]
                else:
                    self.hbm[slot] = self.host[t, row]
        if out:
            self.manager.mark_swapped_out(plan)
            self.model.swapped_out(plan.step)
        else:
            self.manager.mark_swapped_in(plan)
            self.model.swapped_in(plan.step)

    def train_and_finish(self, which: int) -> None:
        """Train the `which`-th swapped-in plan: read and change the slots that it was promised."""
        plan = [plan for plan in self.plans if plan.state == "swapped_in"][which]
        for t, share in enumerate(self.model.unfinished[plan.step]):
            for key, slot, admitted in zip(share.unique, share.slots, share.admitted, strict=True):
                if not admitted:
                    assert slot == self.model.tables[t].base + self.model.tables[t].capacity
                    continue
                row = self.rows_used[plan.step][t][key]
                assert self.hbm[slot] == self.truth[t, row], f"step {plan.step}: slot {slot} does not hold key {key}"
                self.hbm[slot] = self.truth[t, row] = (*self.truth[t, row], plan.step)
        self.manager.finish(plan)
        self.last_finished = max(self.last_finished, plan.step)
        self.model.finish(plan.step)
        self.plans.remove(plan)
        if plan.step in self.noticed:
            assert self.noticed.pop(plan.step)[0].state == "spent"

    # ---------------------------------------------------------------------------------------------------------- looking ahead

    def look_ahead(self, keys: list[list[int]], *, fail_allocation: int = -1) -> Notice | None:
        """Give notice of a batch on both sides; None where the memory request that was to fail did."""
        _fail_allocation(fail_allocation)
        try:
            notice = self.manager.look_ahead(*flat(keys))
        except HostMemoryError:
            assert fail_allocation >= 0
            self.seen["notices refused"] += 1
            return None
        finally:
            _fail_allocation(-1)
        self.model.look_ahead(notice.number, keys)
        self.notices[notice] = keys
        self.seen["notices"] += 1
        assert notice.state == "given" and notice.num_keys == sum(map(len, keys))
        assert cut_lists(*self.manager.noticed(notice)) == [list(dict.fromkeys(part)) for part in keys]
        return notice

    def withdraw(self, notice: Notice) -> None:
        self.manager.withdraw(notice)
        self.model.withdraw(notice.number)
        del self.notices[notice]
        self.seen["withdrawn"] += 1
        assert notice.state == "withdrawn"

    # ------------------------------------------------------------------------------------------------------ from outside

    def put(self, t: int, key: int) -> None:
        """The user writes a row: the resident copy is dropped, then the host row is written."""
        keys = np.array([key], np.int64)
        if self.model.in_use(t, key):
            self.refused(t, keys)
            return
        if not self.dropped(t, keys):
            return
        row = int(self.tables[t].insert(keys)[0])
        self.model.put(t, key, row)
        self.serial += 1
        self.host[t, row] = self.truth[t, row] = ("put", key, self.serial)

    def erase(self, t: int, key: int) -> None:
        keys = np.array([key], np.int64)
        if self.model.in_use(t, key):
            self.refused(t, keys)
            return
        if not self.dropped(t, keys):
            return
        assert self.tables[t].erase(keys) == (key in self.model.tables[t].rows)
        self.model.erase(t, key)

    def dropped(self, t: int, keys: np.ndarray) -> bool:
        """Drop a key that is not in use. False: it died before, and the plan that has taken it away is not finished."""
        try:
            dropped = self.manager.drop(t, keys)
        except PinnedKeyError:
            assert self.lazy and self.plans
            self.seen["refused for being taken away"] += 1
            return False
        assert self.lazy or dropped == (int(keys[0]) in self.model.tables[t].resident)
        self.hands += 1
        return True

    def grow(self, t: int, more: int) -> None:
        """More slots; the buffer is laid out anew, so residents move with their table's base."""
        before = [table.base for table in self.model.tables]
        self.manager.grow(t, self.model.tables[t].capacity + more)
        self.model.grow(t, more)
        moved: dict[int, History] = {}
        for base, table in zip(before, self.model.tables, strict=True):
            for slot in range(table.capacity):
                if self.lazy or slot in table.resident.values():
                    moved[table.base + slot] = self.hbm.get(base + slot)
        self.hbm = moved

    def refused(self, t: int, keys: np.ndarray) -> None:
        try:
            self.manager.drop(t, keys)
        except PinnedKeyError as error:
            assert str(keys[0]) in str(error)
        else:
            raise AssertionError(f"key {keys[0]} is in use and was dropped")

    # --------------------------------------------------------------------------------------------------------- comparing

    def compare_state(self, keys: list[int]) -> None:
        """Everything that can be seen, and where evaluation would read each of `keys`."""
        self.manager.check()
        assert self.manager.step == self.model.step
        assert list(self.manager.outstanding) == self.plans
        assert set(self.manager.notices_given) == set(self.notices)
        for t, table in enumerate(self.model.tables):
            stats = self.manager.stats()[t]
            uses = [set(keys[t]) for keys in (*self.notices.values(), *(keys for _, keys in self.noticed.values()))]
            assert (stats["coming_keys"], stats["coming_uses"]) == (len(set().union(*uses)), sum(map(len, uses)))
            assert stats["swap_in_rows"] == stats["misses"]
            if self.lazy:
                self.compare_lazily(t, stats)
                self.compare_peek(t, keys)
                continue
            assert {name: stats[name] for name in table.totals} == table.totals
            assert (stats["free"], stats["pinned"], stats["resident"]) == (
                len(table.free),
                table.pinned(),
                len(table.resident),
            )
            assert len(self.tables[t]) == len(table.rows)
            standings = {name: column.tolist() for name, column in self.manager.standings(t).items()}
            ranks = table.policy.ranks()
            if table.policy.only_order:
                ranks, standings["ranks"] = (
                    [sorted(set(some)).index(one) for one in some] for some in (ranks, standings["ranks"])
                )
            assert standings == {
                "keys": table.policy.ordered(),
                "ranks": ranks,
                "uses": table.policy.uses(),
                "ghosts": table.policy.ghosts(),
            }
            assert set(standings["keys"]) == set(table.resident)
            residents = [column.tolist() for column in self.manager.residents(t)]
            expected = sorted((slot, key) for key, slot in table.resident.items())
            assert residents[0] == [key for _, key in expected]
            assert residents[1] == [table.base + slot for slot, _ in expected]
            assert residents[2] == [table.rows[key].index for _, key in expected]
            if table.config is not None:
                assert residents[3] == [table.rows[key].count for _, key in expected]
                assert residents[4] == [table.rows[key].last for _, key in expected]
                self.compare_filter(t)
            self.compare_peek(t, keys)

    def compare_lazily(self, t: int, stats: dict[str, int]) -> None:
        """What does not depend on slots."""
        table = self.model.tables[t]
        names = ("admitted", "rejected", "evicted", "forgotten", "born", "pinned")
        assert [stats[name] for name in names] == [*(table.totals[name] for name in names[:-1]), table.pinned()]
        assert stats["hits"] + stats["misses"] == stats["admitted"]
        assert len(self.tables[t]) - stats["dead"] == len(table.rows)
        self.seen["dead not taken away"] += stats["dead"]
        if table.config is not None:
            self.compare_filter(t)

    def compare_filter(self, t: int) -> None:
        table = self.model.tables[t]
        state = self.manager.filter_state(t)
        assert (state["newest"], state["step"], state["epoch"]) == (table.newest, self.model.step, table.epoch)
        columns = (state[name].tolist() for name in ("keys", "counts", "last", "has_row"))
        found, expected = sorted(zip(*columns, strict=True)), table.counters()
        assert found == expected, (table.config, sorted(set(found) ^ set(expected)))
        assert state["keys"].tolist() == sorted(state["keys"].tolist())

    def taken_away_early(self, t: int, key: int) -> bool:
        """Whether the key died in a sweep whose plan has not finished though a later plan has.

        That later plan may have taken the row away, and made a new one; evaluation then shows what there is.
        """
        killers = [step for step, shares in self.model.unfinished.items() if key in dict(shares[t].killed)]
        return self.lazy and bool(killers) and self.last_finished > killers[0]

    def compare_peek(self, t: int, keys: list[int]) -> None:
        config = self.model.tables[t].config
        unknown = PEEK_DEFAULT if config is not None and config.admits else PEEK_ABSENT
        slots, rows, states = (column.tolist() for column in self.manager.peek(np.array(keys, np.int64), t))
        for key, slot, row, state in zip(keys, slots, rows, states, strict=True):
            life = self.model.row_as_trained(t, key)
            if self.taken_away_early(t, key):
                life = row if row >= 0 else None
            if life is None:
                assert (slot, row, state) == (-1, -1, unknown)
            else:
                assert row == life and state == (PEEK_ROW if slot < 0 else PEEK_SLOT)
                found = self.host[t, row] if slot < 0 else self.hbm[slot]
                assert found == self.truth[t, life], f"evaluation would read {found} for key {key}"
