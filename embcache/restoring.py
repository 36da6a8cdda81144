"""Restoring managers from a checkpoint: filled beside what they hold, and put in its place at the end.

Everything that may fail happens on fresh tables and fresh planners: bytes that do not match their digest, a table of another
dim, no memory. Then all managers take over what was made for them, which cannot fail. A file-backed table cannot exist twice:
its directory must hold no row yet, and a restore that fails empties it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.swap import SwapManager
from ._core.table import Table
from .checkpoint import Reader, RestoreReport, TableDescription, fill, holding, row_batches
from .errors import ConfigError, CorruptionError
from .filterfile import SKETCHES, meaning, merged_numbers, sketch_name
from .saving import check_names, describe, doors_of, path_of
from .values import decode

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["restore_managers"]

_ROWS = 1 << 16


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
            state = _filter_state(reader, self.manager, t, name) if name in report.matched else None
            if state is not None:
                self.planner.import_filter(t, state)
        self.planner.start_at(max(steps, default=0))

    def discard(self) -> None:
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
        self.manager.note_saved(where, reader.generation, self.module)


def restore_managers(
    path: str | os.PathLike[str],
    managers: Mapping[str, EmbCacheManager],
    generation: int | None = None,
    check_model: Callable[[Any], None] | None = None,
) -> tuple[RestoreReport, Any]:
    """Restore all `managers`, by module path; see `EmbCacheManager.restore`.

    `check_model` looks at the dense state_dict, None where there is none, and raises where it does not fit; it is returned beside the
    report, for the caller to load.
    """
    where = path_of(path)
    check_names(managers)
    with doors_of(managers):
        for manager in managers.values():
            manager.check_between_steps("restore")
        for reader, skipped in holding(where, generation):
            report = RestoreReport(reader.generation, skipped=skipped, metadata=reader.metadata)
            prepared = [_Prepared(manager, module) for module, manager in managers.items()]
            try:
                _compare(reader, prepared, report)
                for one in prepared:
                    one.fill(reader, report)
                report.state = _value(reader, "state")
                model = _value(reader, "model")
                if check_model is not None:
                    check_model(model)
                _load_optimizers(managers, _value(reader, "optimizers") or {})
            except CorruptionError as error:
                _discard(prepared)
                if generation is not None:
                    raise
                skipped.append((reader.generation, str(error)))
                continue
            except BaseException:
                _discard(prepared)
                raise
            report.count(reader)
            for one in prepared:
                one.publish(where, reader)
            return report, model
    raise AssertionError("holding() ends by raising")


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


def _filter_state(reader: Reader, manager: EmbCacheManager, t: int, name: str) -> dict[str, Any] | None:
    """What `SwapManager.import_filter` takes; None where there is none, or nobody to take it."""
    kept = reader.filter(name)
    if kept is None or manager.layout.tables[t].admit_and_evict is None:
        return None
    state: dict[str, Any] = {"keys": kept.keys, "counts": kept.counts, "last": kept.last, "late": kept.late}
    for which in SKETCHES:
        blob = sketch_name(name, which)
        content = reader.state(blob) if blob in reader.state_names else b""
        state[which] = np.frombuffer(content, np.uint8)
    return state | merged_numbers(kept.numbers)


def _value(reader: Reader, name: str) -> Any:
    """A value that was saved under `name`; None where it was not."""
    if f"{name}.json" not in reader.state_names:
        return None
    tensors = f"{name}.safetensors"
    content = reader.state(tensors) if tensors in reader.state_names else b""
    return decode(reader.state(f"{name}.json"), content, f"generation {reader.generation}, {name}")


def _load_optimizers(managers: Mapping[str, EmbCacheManager], states: dict[str, Any]) -> None:
    """Give each collection's optimizer its step count and hyper-parameters; all of them, or none."""
    before: list[tuple[EmbCacheManager, Any]] = []
    try:
        for module, manager in managers.items():
            if states.get(module) is not None:
                before.append((manager, manager.optimizer_state()))
                manager.load_optimizer_state(states[module])
    except BaseException:
        for manager, state in before:
            manager.load_optimizer_state(state)
        raise
