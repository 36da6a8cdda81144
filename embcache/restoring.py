"""Restoring managers from a checkpoint: filled beside what they hold, and put in its place at the end.

Everything that may fail happens on fresh tables and fresh planners: bytes that do not match their digest, a table of another
dim, no memory. Then the dense part, the optimizers and all managers take over what was made for them, all or none: what they had is
kept until the last has, and put back where one refuses or a signal comes in between. A file-backed table cannot exist twice:
its directory must hold no row yet, and a restore that fails empties it again.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ._core.cut import filter_saved
from ._core.doors import Doors, Steps
from ._core.swap import SwapManager
from ._core.table import Table
from .checkpoint import Reader, RestoreReport, TableDescription, created_of, fill, holding, row_batches
from .errors import ConfigError, CorruptionError, EmbCacheError
from .filterfile import meaning
from .filterparts import filter_state
from .saving import check_names, describe, path_of, shared_with
from .shards import SavedParts
from .values import decode

if TYPE_CHECKING:
    from .manager import EmbCacheManager, Held

__all__ = ["Dense", "restore_managers"]

_ROWS = 1 << 16
_NONE = -1  # in place of a generation: this rank has none, or cannot go on


class Dense(Protocol):
    """The part of a model that is not in its collections."""

    def check(self, values: Any, saved: SavedParts) -> None:
        """`ConfigError` where a state_dict, None where there is none, and what was spread over ranks do not fit. Changes nothing."""

    def load(self) -> None:
        """Take over what was checked; whatever raises may leave half of it."""

    def put_back(self) -> None:
        """Have the values of before `load` again; nothing where it was not called."""


class _Prepared:
    """What one manager is going to hold: tables and planner, complete or to be discarded."""

    def __init__(self, manager: EmbCacheManager, module: str) -> None:
        self.manager, self.module = manager, module
        self.names = [describe(manager, t, module).name for t in range(len(manager.host_tables))]
        self.tables: list[Table] = []
        self.planner: SwapManager | None = None

    def fill(self, reader: Reader, report: RestoreReport) -> None:
        """Make the tables and the planner."""
        steps = [int(one["steps"].get(self.module, 0)) for one in reader.metadata if "steps" in one]
        for t, name in enumerate(self.names):
            table = self.manager.fresh_table(t)
            self.tables.append(table)
            if name in report.matched:
                report.rows[name] = fill(reader, table, name)
        self.planner = self.manager.fresh_planner(self.tables)
        for t, name in enumerate(self.names):
            if name in report.matched and self.manager.layout.tables[t].admit_and_evict is not None:
                state = filter_state(reader, name)
                if state is not None:
                    self.planner.import_filter(t, state)
        self.planner.start_at(max(steps, default=0))

    def discard(self) -> None:
        """Throw away what was made, unless the manager has taken it over."""
        if self.planner is self.manager.planner:
            return
        if self.planner is not None:
            self.planner.close()
        for old, fresh in zip(self.manager.host_tables, self.tables, strict=False):
            if fresh is not old:
                fresh.close()
                continue
            for rows in row_batches(fresh, _ROWS):
                fresh.erase(np.ascontiguousarray(fresh.columns(rows)[0]))

    def publish(self, where: str, reader: Reader) -> None:
        """Hand them over. A delta may follow on the generation; a table of another description is written whole then."""
        assert self.planner is not None
        self.manager.take_over(self.tables, self.planner)
        for t, name in enumerate(self.names):
            self.tables[t].mark_saved()
            if reader.tables.get(name) != describe(self.manager, t, self.module):
                self.tables[t].mark_erased(None)
            else:
                filter_saved(self.planner, t)
        self.manager.note_saved(where, reader.generation, created_of(where, reader.generation), self.module)


def restore_managers(
    path: str | os.PathLike[str],
    managers: Mapping[str, EmbCacheManager],
    generation: int | None = None,
    dense: Dense | None = None,
) -> RestoreReport:
    """Restore all `managers`, by module path, and what a model has beside them; see `EmbCacheManager.restore`."""
    where = path_of(path)
    check_names(managers)
    others = shared_with(managers)
    if others is not None:
        return _restore_together(where, managers, generation, dense, others)
    doors = [manager.door for manager in managers.values()]
    with Steps(doors, between_saves=True), Doors(doors):
        _check_between_steps(managers)
        for reader, skipped in holding(where, generation):
            report = RestoreReport(reader.generation, skipped=skipped, metadata=reader.metadata)
            prepared = [_Prepared(manager, module) for module, manager in managers.items()]
            try:
                values = _fill(reader, prepared, report, dense)
                exchange = _Exchange(where, reader, prepared, *values)
                exchange.make()
            except CorruptionError as error:
                _discard(prepared)
                if generation is not None:
                    raise
                skipped.append((reader.generation, str(error)))
                continue
            except BaseException:
                _discard(prepared)
                raise
            exchange.settle()
            return report
    raise AssertionError("holding() ends by raising")


def _check_between_steps(managers: Mapping[str, EmbCacheManager]) -> None:
    """`PlanError` while a plan of one of the managers is outstanding. Inside the doors."""
    for manager in managers.values():
        manager.check_between_steps("restore")


def _fill(
    reader: Reader, prepared: list[_Prepared], report: RestoreReport, dense: Dense | None
) -> tuple[dict[str, Any], Dense | None]:
    """Make everything that a generation holds; returns what `_exchange` takes besides: optimizers by module path, and `dense` to load."""
    _compare(reader, prepared, report)
    for one in prepared:
        one.fill(reader, report)
    report.state = _value(reader, "state")
    model = _value(reader, "model")
    if dense is not None:
        dense.check(model, SavedParts(reader))
    optimizers = _value(reader, "optimizers") or {}
    report.count(reader)
    return optimizers, None if model is None else dense


def _restore_together(
    where: str, managers: Mapping[str, EmbCacheManager], generation: int | None, dense: Dense | None, others: Any
) -> RestoreReport:
    """`restore_managers` of one rank of several, each of which reads its share: all restore one generation, or none does.

    The ranks go down the generations together. Where one finds damage in the part that it reads, all pass that generation over.
    Nobody waits for another rank inside the doors: that one may be waiting for a thread which wants to get in here.
    """
    doors = Doors(manager.door for manager in managers.values())
    failure: BaseException | None = None
    try:
        with doors:
            _check_between_steps(managers)
    except EmbCacheError as error:
        failure = error
    others.settle("save", "a restore", failure)
    readers = holding(where, generation, others.rank, others.world)
    candidate, failure = _next_of(readers, None)
    try:
        while True:
            mine = _NONE if candidate is None else candidate[0].generation
            numbers = [number for (number,) in others.save.gather("a restore", [mine])]
            if _NONE in numbers:
                others.settle("save", "a restore", failure)
            assert candidate is not None
            reader, skipped = candidate
            if min(numbers) < mine:
                skipped.append((mine, f"rank {numbers.index(min(numbers))} has passed it over"))
                candidate, failure = _next_of(readers, None)
            if min(numbers) < max(numbers):
                continue
            report = RestoreReport(mine, skipped=skipped, metadata=reader.metadata)
            prepared = [_Prepared(manager, module) for module, manager in managers.items()]
            damage: CorruptionError | None = None
            values: Any = None
            try:
                try:
                    with doors:
                        _check_between_steps(managers)
                        values = _fill(reader, prepared, report, dense)
                except CorruptionError as error:
                    damage = error
                except Exception as error:
                    failure = error
                damaged = [flag for (flag,) in others.save.gather("a restore", [int(damage is not None)])]
                others.settle("save", "a restore", failure)
                if not any(damaged):
                    exchange = _Exchange(where, reader, prepared, *values)
                    _exchange_together(exchange, doors, managers, others)
                    return report
            except BaseException:
                with doors:
                    _discard(prepared)
                raise
            with doors:
                _discard(prepared)
            skipped.append((mine, str(damage) if damage else f"rank {damaged.index(1)} has found it damaged"))
            candidate, failure = _next_of(readers, damage)
    finally:
        readers.close()


def _next_of(
    readers: Generator[tuple[Reader, list[tuple[int, str]]], None, None], damage: CorruptionError | None
) -> tuple[tuple[Reader, list[tuple[int, str]]] | None, BaseException | None]:
    """The next older generation; or why there is none."""
    try:
        return next(readers), None
    except StopIteration:  # the given one alone was wanted
        return None, damage
    except Exception as error:
        return None, error


def _discard(prepared: list[_Prepared]) -> None:
    for one in prepared:
        one.discard()


def _compare(reader: Reader, prepared: list[_Prepared], report: RestoreReport) -> None:
    """Say which tables match; `ConfigError` where a table's rows would mean something else."""
    wanted: dict[str, TableDescription] = {}
    for one in prepared:
        for t, name in enumerate(one.names):
            wanted[name] = describe(one.manager, t, one.module)
            stored = reader.tables.get(name)
            if stored is None:
                continue
            stored.refuse_change(wanted[name])
            _refuse_filter(reader, one.manager, t, name)
    report.matched = [name for name in wanted if name in reader.tables]
    report.new = [name for name in wanted if name not in reader.tables]
    report.missing = sorted(set(reader.tables) - set(wanted))
    if wanted and reader.tables and not report.matched:
        raise ConfigError(
            f"generation {reader.generation} at {reader.path} has none of the tables {sorted(wanted)!r}; it has {report.missing!r}: "
            "give the path of another checkpoint, or name collections and tables as they were"
        )
    for name in report.matched:
        changes = reader.tables[name].changes(wanted[name])
        if changes:
            report.changed[name] = changes


def _refuse_filter(reader: Reader, manager: EmbCacheManager, t: int, name: str) -> None:
    """`ConfigError` where counters and times of the checkpoint mean something else to this table's filter."""
    rule = manager.layout.tables[t].admit_and_evict
    kept = reader.table_metadata(name)[0].get("filter")
    if rule is None or kept is None:
        return
    for what, value in meaning(rule).items():
        if kept.get(what) != value:
            raise ConfigError(
                f"table {name!r}: the checkpoint has a filter with {what} = {kept.get(what)!r}, not {value!r}, so its counters mean something "
                "else. Describe the filter as it was saved; or restore into a table without one, and copy the rows from there"
            )


def _value(reader: Reader, name: str) -> Any:
    """A value that was saved under `name`; None where it was not."""
    if f"{name}.json" not in reader.state_names:
        return None
    tensors = f"{name}.safetensors"
    content = reader.state(tensors) if tensors in reader.state_names else b""
    return decode(reader.state(f"{name}.json"), content, f"generation {reader.generation}, {name}")


def _exchange_together(exchange: _Exchange, doors: Doors, managers: Mapping[str, EmbCacheManager], others: Any) -> None:
    """Have everything taken over on all ranks, or on none."""
    failure: BaseException | None = None
    try:
        with doors:
            _check_between_steps(managers)
            exchange.make()
    except Exception as error:
        failure = error
    try:
        others.settle("save", "a restore", failure)
    except BaseException:
        with doors:
            exchange.undo()
        raise
    with doors:
        exchange.settle()


class _Exchange:
    """Has everything take over what was made for it, or nothing: `dense`, the optimizers by module path, the managers.

    `make`, then `undo` or `settle`; inside the doors.
    """

    def __init__(
        self,
        where: str,
        reader: Reader,
        prepared: list[_Prepared],
        optimizers: dict[str, Any],
        dense: Dense | None,
    ) -> None:
        self._where, self._reader, self._prepared = where, reader, prepared
        self._optimizers, self._dense = optimizers, dense
        self._before: list[tuple[EmbCacheManager, Held, dict[str, Any] | None]] = []

    def make(self) -> None:
        """Exchange. Where it raises, everything is as before."""
        managers = [one.manager for one in self._prepared]
        self._before = [(manager, manager.held, manager.optimizer_state()) for manager in managers]
        try:
            if self._dense is not None:
                self._dense.load()
            for one in self._prepared:
                if self._optimizers.get(one.module) is not None:
                    one.manager.load_optimizer_state(self._optimizers[one.module])
            for one in self._prepared:
                one.publish(self._where, self._reader)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Have everything hold what it held before `make`. Again is no harm."""
        for manager, held, state in self._before:
            manager.hold(held)
            if state is not None:
                manager.load_optimizer_state(state)
        if self._before and self._dense is not None:
            self._dense.put_back()

    def settle(self) -> None:
        """It stays so: let go of what there was before."""
        for one, (_, (tables, planner, *_), _) in zip(self._prepared, self._before, strict=True):
            one.manager.note_in_directories(self._where, self._reader.generation)
            planner.close()
            for old, new in zip(tables, one.tables, strict=True):
                if old is not new:
                    old.close()
