"""The planner and the feature filter in plain Python: dicts, lists and sets, written to be read, not to be fast.

`PlannerModel` follows DESIGN.md section 3 word by word. Undo is not programmed: before a plan the whole model is copied,
and a cancelled plan goes back to the copy and repeats what has happened since except the plan. The one thing the model
does not know is which row index the host table gives to a new key; it is told, and checks that the row was free.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from embcache.config import AdmitAndEvictConfig
from models.filter_model import NEVER, Sketch, as_count, as_score, decayed, drawn, share
from models.policy_model import POLICIES


class ModelCapacityError(Exception):
    def __init__(self, table: int, need: int, have: int, capacity: int) -> None:
        super().__init__(table, need, have, capacity)
        self.table, self.need, self.have, self.capacity = table, need, have, capacity


@dataclass
class Row:
    """A live key's row: its index and its counters, wherever those are kept."""

    index: int
    count: int = 0
    last: int = NEVER


@dataclass
class Gone:
    """An evicted key whose row is not given back yet."""

    key: int
    row: int
    killer: int
    slot: int | None
    pins: set[int]
    killer_finished: bool = False
    writer: int | None = None  # step of the plan that took the slot and has yet to write the row back


@dataclass
class PlanModel:
    """One table's share of a plan."""

    unique: list[int] = field(default_factory=list)
    inverse: list[int] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    admitted: list[bool] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)  # key, slot, row
    swap_out: list[tuple[int, int, int]] = field(default_factory=list)
    hits: int = 0
    born: list[int] = field(default_factory=list)
    killed: list[tuple[int, int]] = field(default_factory=list)  # key, row
    forgotten: int = 0


class TableModel:
    def __init__(self, capacity: int, config: AdmitAndEvictConfig | None, base: int, policy: str) -> None:
        self.capacity, self.config, self.base = capacity, config, base
        self.policy = POLICIES[policy](capacity)
        self.rows: dict[int, Row] = {}
        self.resident: dict[int, int] = {}  # key -> slot
        self.pins: dict[int, set[int]] = {}  # resident key -> steps of the unfinished plans that use it
        self.free = set(range(capacity))
        self.gone: list[Gone] = []
        self.waiting: dict[int, list[int]] = {}  # key without a row -> [count, last]
        self.newest = self.cutoff = NEVER
        self.epoch = 0  # show/click: sweeps so far
        self.sketch = Sketch(config) if config is not None and config.sketch_bytes else None
        self.lazy = False  # the planner takes away what a sweep has killed at another time, so that other rows are free
        self.totals = dict.fromkeys(
            ("hits", "misses", "swap_out_rows", "admitted", "rejected", "evicted", "forgotten", "born"), 0
        )

    # ---------------------------------------------------------------------------------------------------------- planning

    def plan(
        self,
        number: int,
        keys: list[int],
        times: list[int] | None,
        step: int,
        new_rows: dict[int, int],
        clicks: list[int] | None = None,
        notice: int | None = None,
    ) -> PlanModel:
        p = PlanModel()
        p.unique = list(dict.fromkeys(keys))
        index = {key: i for i, key in enumerate(p.unique)}
        p.inverse = [index[key] for key in keys]
        p.groups = [[at for at, key in enumerate(keys) if key == unique] for unique in p.unique]
        swept = self._count_and_sweep(p, times, clicks, step) if self.config else set()
        for key in p.unique:
            p.admitted.append(key not in swept and self._admit(key, step))
        wanted = [key for key, admitted in zip(p.unique, p.admitted, strict=True) if admitted]
        blocked = sum(bool(pins) for key, pins in self.pins.items() if key not in wanted) + sum(
            bool(gone.pins) for gone in self.gone
        )
        if len(wanted) > self.capacity - blocked:
            raise ModelCapacityError(number, len(wanted), self.capacity - blocked, self.capacity)
        self._place(p, wanted, step, new_rows, notice)
        totals = self.totals
        totals["hits"] += p.hits
        totals["misses"] += len(p.swap_in)
        totals["swap_out_rows"] += len(p.swap_out)
        totals["admitted"] += len(wanted)
        totals["rejected"] += len(p.unique) - len(wanted)
        totals["evicted"] += len(p.killed)
        totals["forgotten"] += p.forgotten
        totals["born"] += len(p.born)
        return p

    def _count_and_sweep(self, p: PlanModel, times: list[int] | None, clicks: list[int] | None, step: int) -> set[int]:
        config = self.config
        occurrences: dict[int, int] = {}
        latest: dict[int, int] = {}
        clicked: dict[int, int] = {}
        for at, unique in enumerate(p.inverse):
            key = p.unique[unique]
            time = step if config.time_source == "step" else times[at] if times is not None else NEVER
            time = NEVER if config.needs_labels else time
            occurrences[key] = occurrences.get(key, 0) + 1
            clicked[key] = clicked.get(key, 0) + (clicks[at] if clicks is not None else 0)
            latest[key] = max(latest.get(key, NEVER), time)
        if self.sketch:
            self.sketch.turn(self.cutoff, self.newest)
        self.newest = max([self.newest, *latest.values()])

        def add(count: int, last: int, key: int) -> tuple[int, int]:
            if config.needs_labels:
                more = config.show_click.alpha * float(occurrences[key]) + config.show_click.beta * float(clicked[key])
                return as_count(self.score(count, last) + more), self.epoch
            return count + occurrences[key], max(last, latest[key])

        fresh: dict[int, list[int]] = {}  # counters of keys that nobody knows yet
        self.occurrences = occurrences
        for key in p.unique:
            row = self.rows.get(key)
            if row is not None:
                if row.count == 0 and key in self.waiting:  # the user made this row: it takes over the key's counters
                    row.count, row.last = self.waiting.pop(key)
                row.count, row.last = add(row.count, row.last, key)
            elif self.sketch:
                fresh[key] = [self.sketch.add(key, occurrences[key]), latest[key]]
            elif key in self.waiting:
                self.waiting[key] = list(add(*self.waiting[key], key))
            else:
                fresh[key] = list(add(0, NEVER, key))
        swept: set[int] = set()
        if config.evict_step_interval > 0 and step % config.evict_step_interval == 0:
            if config.needs_labels:
                self._sweep_scores(p, step, swept)
            else:
                self._sweep_times(p, step, swept, fresh)
        self.waiting.update(fresh)
        return swept

    def _sweep_times(self, p: PlanModel, step: int, swept: set[int], fresh: dict[int, list[int]]) -> None:
        cutoff = self.newest - self.config.evict_threshold  # Python's integers do not overflow
        self.cutoff = max(cutoff, self.cutoff)
        floor = self._floor(cutoff)
        for key, row in list(self.rows.items()):
            if row.count > 0 and row.last < floor:
                swept.add(key)
                self._kill(p, key, step)
        for counters in (self.waiting, fresh):
            for key, (_, last) in list(counters.items()):
                if last < cutoff:
                    swept.add(key)
                    del counters[key]
                    p.forgotten += counters is self.waiting

    def _sweep_scores(self, p: PlanModel, step: int, swept: set[int]) -> None:
        self.epoch += 1
        part = self.config.show_click.evict_percentage
        rows = sorted((self.score(row.count, row.last), key) for key, row in self.rows.items() if row.count > 0)
        doomed = min(share(part, len(rows)), len(self.rows) - self.config.evict_keep_min)
        waiting = sorted((self.score(*counters), key) for key, counters in self.waiting.items())
        for _, key in rows[: max(doomed, 0)]:
            swept.add(key)
            self._kill(p, key, step)
        for _, key in waiting[: share(part, len(waiting))]:
            swept.add(key)
            del self.waiting[key]
            p.forgotten += 1

    def score(self, count: int, last: int) -> float:
        """The score that show/click counters stand for."""
        return decayed(as_score(count), self.config.show_click.score_decay, self.epoch - last) if count > 0 else 0.0

    def _floor(self, cutoff: int) -> int:
        """The cut-off for rows: lower than `cutoff` where fewer than evict_keep_min rows would survive."""
        doomed = sorted((row.last for row in self.rows.values() if row.count > 0 and row.last < cutoff), reverse=True)
        missing = self.config.evict_keep_min - (len(self.rows) - len(doomed))
        if missing <= 0:
            return cutoff
        return doomed[missing - 1] if missing <= len(doomed) else NEVER

    def _kill(self, p: PlanModel, key: int, step: int) -> None:
        row = self.rows.pop(key)
        slot = self.resident.pop(key, None)
        pins = self.pins.pop(key, set())
        if slot is not None:
            self.policy.leave(key)
        self.gone.append(Gone(key, row.index, step, slot, set(pins)))
        p.killed.append((key, row.index))

    def _admit(self, key: int, step: int) -> bool:
        config = self.config
        if key in self.rows or config is None:
            return True
        count, last = self.waiting[key]
        draws = self.occurrences[key]
        if config.needs_labels:
            earned = self.score(count, last) >= config.admit_threshold
        else:
            earned = count >= config.admit_threshold
            draws = min(draws, count - config.admit_threshold + 1) if config.admit_threshold > 1 else draws
        if earned and drawn(config, key, step, draws):
            return True
        if self.sketch or config.admit_threshold <= (0 if config.needs_labels else 1):
            del self.waiting[key]  # no counters are kept
        return False

    def _place(self, p: PlanModel, wanted: list[int], step: int, new_rows: dict[int, int], notice: int | None) -> None:
        for key in wanted:
            if key in self.resident:
                p.hits += 1
                self.pins[key].add(step)
        for key in wanted:
            if key not in self.rows:
                index = new_rows[key]
                assert self.lazy or index not in self.rows_in_use(), f"row {index} was given out while it is in use"
                count, last = self.waiting.pop(key, (0, NEVER))
                self.rows[key] = Row(index, count, last)
                p.born.append(key)
        spare = len(self.free) + sum(gone.slot is not None and not gone.pins for gone in self.gone)
        misses = sum(key not in self.resident for key in wanted)
        pinned = {key for key, pins in self.pins.items() if pins}
        victims = [self.policy.choose(pinned) for _ in range(misses - spare)]
        for key in wanted:
            if key not in self.resident:
                self.policy.back(key)
                slot = self._take_slot(p, step, victims)
                self.resident[key] = slot
                self.pins[key] = {step}
                p.swap_in.append((key, self.base + slot, self.rows[key].index))
        if notice is not None:
            self.policy.spend(notice)
        for key in wanted:
            self.policy.use(key)
        for key, admitted in zip(p.unique, p.admitted, strict=True):
            p.slots.append(self.base + (self.resident[key] if admitted else self.capacity))

    def _take_slot(self, p: PlanModel, step: int, victims: list[int]) -> int:
        if self.free:
            slot = min(self.free)
            self.free.remove(slot)
            return slot
        dying = [gone for gone in self.gone if gone.slot is not None and not gone.pins]
        if dying:
            gone = min(dying, key=lambda gone: gone.slot)
            slot, gone.slot, gone.writer = gone.slot, None, step
            p.swap_out.append((gone.key, self.base + slot, gone.row))
            return slot
        victim = victims.pop(0)
        slot = self.resident.pop(victim)
        del self.pins[victim]
        p.swap_out.append((victim, self.base + slot, self.rows[victim].index))
        return slot

    # ------------------------------------------------------------------------------------------------------------ settling

    def finish(self, step: int) -> None:
        for pins in self.pins.values():
            pins.discard(step)
        for gone in self.gone:
            gone.pins.discard(step)
            if gone.writer == step:
                gone.writer = None
            gone.killer_finished |= gone.killer == step
        self._release()

    def _release(self) -> None:
        for gone in list(self.gone):
            if gone.killer_finished and not gone.pins and gone.writer is None:
                self.gone.remove(gone)
                if gone.slot is not None:
                    self.free.add(gone.slot)

    # --------------------------------------------------------------------------------------------------- from outside

    def drop(self, key: int) -> None:
        if key in self.resident:
            self.free.add(self.resident.pop(key))
            self.policy.leave(key)
            del self.pins[key]

    def put(self, key: int, row: int) -> None:
        """The user writes a row: a new one, or over the old one."""
        self.drop(key)
        if key not in self.rows:
            assert row not in self.rows_in_use()
            self.rows[key] = Row(row)

    def erase(self, key: int) -> None:
        self.drop(key)
        self.rows.pop(key, None)

    # ------------------------------------------------------------------------------------------------------------- looking

    def rows_in_use(self) -> set[int]:
        return {row.index for row in self.rows.values()} | {gone.row for gone in self.gone}

    def pinned(self) -> int:
        return sum(map(bool, self.pins.values())) + sum(bool(gone.pins) for gone in self.gone)

    def counters(self) -> list[tuple[int, int, int, int]]:
        """(key, count, last, has row) in order of the keys; a waiting key whose row the user made shows twice."""
        waiting = [(key, count, last, 0) for key, (count, last) in self.waiting.items()]
        return sorted(waiting + [(key, row.count, row.last, 1) for key, row in self.rows.items()])


class PlannerModel:
    """All tables of a collection and the plans that have not finished."""

    def __init__(self, capacities: list[int], configs: list[AdmitAndEvictConfig | None], policy: str = "lru") -> None:
        self.tables: list[TableModel] = []
        base = 0
        for capacity, config in zip(capacities, configs, strict=True):
            self.tables.append(TableModel(capacity, config, base, policy))
            base += capacity + 1
        self.step = 0
        self.unfinished: dict[int, list[PlanModel]] = {}  # step -> shares, oldest first
        self.state: dict[int, str] = {}
        self._before: dict[int, tuple[PlannerModel, int]] = {}  # step -> copy before the plan, length of the log then
        self._log: list[tuple[str, tuple]] = []

    def _copy(self) -> PlannerModel:
        before, log, self._before, self._log = self._before, self._log, {}, []
        try:
            return pickle.loads(pickle.dumps(self))  # a deep copy, several times faster than copy.deepcopy
        finally:
            self._before, self._log = before, log

    def plan(
        self,
        keys: list[list[int]],
        times: list[list[int]] | None,
        new_rows: list[dict[int, int]],
        clicks: list[list[int]] | None = None,
        notice: int | None = None,
    ) -> list[PlanModel]:
        """Plan a batch; `new_rows`: table -> key -> row index for the keys that get a row; `notice` told of it."""
        trial = self._copy()
        step = trial.step = self.step + 1
        shares = [
            table.plan(
                t,
                keys[t],
                None if times is None else times[t],
                step,
                new_rows[t],
                None if clicks is None else clicks[t],
                notice,
            )
            for t, table in enumerate(trial.tables)
        ]
        self._before[step] = (self._copy(), len(self._log))
        self.tables, self.step = trial.tables, step
        self.unfinished[step] = shares
        self.state[step] = "planned"
        return shares

    def cancel(self, step: int) -> None:
        """Back to the copy made before the plan; then repeat what happened since."""
        before, since = self._before.pop(step)
        log = self._log[since:]
        self.tables, self.step = before.tables, before.step
        self.unfinished, self.state = before.unfinished, before.state
        del self._log[since:]
        for name, arguments in log:
            if arguments != (step,):  # its own movements are undone with it
                getattr(self, name)(*arguments)

    def swapped_out(self, step: int) -> None:
        self._log.append(("swapped_out", (step,)))
        self.state[step] = "swapped_out"

    def swapped_in(self, step: int) -> None:
        self._log.append(("swapped_in", (step,)))
        self.state[step] = "swapped_in"

    def finish(self, step: int) -> None:
        self._log.append(("finish", (step,)))
        del self.unfinished[step], self.state[step]
        self._before.pop(step, None)
        for table in self.tables:
            table.finish(step)

    def look_ahead(self, number: int, keys: list[list[int]]) -> None:
        self._log.append(("look_ahead", (number, keys)))
        for table, part in zip(self.tables, keys, strict=True):
            table.policy.notice(number, part)

    def withdraw(self, number: int) -> None:
        self._log.append(("withdraw", (number,)))
        for table in self.tables:
            table.policy.spend(number)

    def drop(self, t: int, key: int) -> None:
        self._log.append(("drop", (t, key)))
        self.tables[t].drop(key)

    def put(self, t: int, key: int, row: int) -> None:
        self._log.append(("put", (t, key, row)))
        self.tables[t].put(key, row)

    def erase(self, t: int, key: int) -> None:
        self._log.append(("erase", (t, key)))
        self.tables[t].erase(key)

    def grow(self, t: int, more: int) -> None:
        assert not self.unfinished
        table = self.tables[t]
        table.free |= set(range(table.capacity, table.capacity + more))
        table.capacity += more
        table.policy.grow(table.capacity)
        base = 0
        for table in self.tables:
            table.base = base
            base += table.capacity + 1

    # ------------------------------------------------------------------------------------------------------------- looking

    def in_use(self, t: int, key: int) -> bool:
        """Whether an unfinished plan uses, moves, made or evicted the key."""
        if self.tables[t].pins.get(key):
            return True
        for step, shares in self.unfinished.items():
            share = shares[t]
            if key in share.born or key in (k for k, _ in share.killed):
                return True
            live = self.tables[t].rows.get(key)
            if self.state[step] == "planned" and any(
                k == key and live is not None and live.index == row for k, _, row in share.swap_out
            ):
                return True
        return False

    def row_as_trained(self, t: int, key: int) -> int | None:
        """Row of the key as of the last finished batch: the oldest unfinished plan that made or evicted it tells."""
        for shares in self.unfinished.values():
            if key in shares[t].born:
                return None
            for killed, row in shares[t].killed:
                if killed == key:
                    return row
        row = self.tables[t].rows.get(key)
        return None if row is None else row.index
