"""`EmbTable.save` and `EmbTable.restore`: one table, one writer, a directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from .._core.table import Table
from ..errors import ConfigError, CorruptionError
from .generations import created_of, delta_pays, number_to_keep, prune_after
from .names import published
from .reader import Reader
from .snapshot import RestoreReport, empty_table, fill, row_batches, save_table
from .writer import Writer

if TYPE_CHECKING:
    from ..table import EmbTable

__all__ = ["holding", "restore_emb_table", "save_emb_table"]

LOG = logging.getLogger("embcache")


def save_emb_table(
    table: EmbTable,
    path: str | os.PathLike[str],
    *,
    delta: bool = False,
    state: dict[str, bytes] | None = None,
    keep: int | None = None,
) -> int:
    """See `EmbTable.save`."""
    core, description, most = table.core, table.description, number_to_keep(keep)
    where = os.path.realpath(os.fspath(path))
    full_bytes = len(core) * description.row_bytes
    parent = _parent(table, where, full_bytes) if delta else None
    writer = Writer(where)
    try:
        with writer:
            generation = writer.begin(parent=parent, expected_bytes=0 if parent else full_bytes)
            version = save_table(writer, core, description, changed=parent is not None)
            for name, content in (state or {}).items():
                writer.write_state(name, content)
            writer.commit()
            writer.publish()
    finally:
        writer.close()  # again, should a signal have come into the first one
    # In this order: should a signal come in between, the next delta holds too much and never too little.
    table.note_saved(where, generation, created_of(where, generation))
    core.mark_saved(version)  # where it changed since, what was saved is counted as changed: a waste, no fault
    if core.directory is not None:
        core.directory.note_checkpoint(f"generation {generation} of {where}")
    prune_after(where, most, generation)
    return generation


def _parent(table: EmbTable, where: str, full_bytes: int) -> int | None:
    """The generation that a delta of the table changes; None where a full one is better, or must be."""
    core = table.core
    if table.saved is None or table.saved[0] != where:
        return None
    erased = core.erased_keys()
    if erased is None:
        return None
    delta_bytes = core.changed() * table.description.row_bytes + 8 * len(erased)
    pays = delta_pays(where, table.saved[1], delta_bytes, full_bytes, created=table.saved_created)
    return table.saved[1] if pays else None


def holding(
    path: str | os.PathLike[str], generation: int | None, rank: int = 0, world: int = 1
) -> Generator[tuple[Reader, list[tuple[int, str]]], None, None]:
    """Readers of generations whose catalogues hold, the newest first, with what was skipped so far; of one rank's share.

    For those who fill something that they can throw away: chunks are checked as they are read, and on `CorruptionError`
    the caller notes ``(reader.generation, reason)`` in the list and takes the next. What is passed over is logged as a warning. The
    given generation alone, if one is.
    """
    skipped: list[tuple[int, str]] = []
    before, newest, named = None, 0, 0
    while True:
        try:
            reader = Reader(path, generation, rank, world, check="catalogue", before=before)
        except (ConfigError, CorruptionError) as error:
            if before is None:
                raise
            if max(published(os.fspath(path)), default=0) > newest:
                before = None  # saved while the others were found damaged, which may have been pruned for it
                continue
            older = [] if isinstance(error, ConfigError) else [str(error)]
            reasons = "; ".join([*(f"{number}: {reason}" for number, reason in skipped), *older])
            raise CorruptionError(
                f"{os.fspath(path)}: no generation holds: {reasons}", generation=skipped[0][0]
            ) from None
        skipped += reader.skipped
        newest = max([newest, reader.generation, *(number for number, _ in skipped)])
        for number, reason in skipped[named:]:
            LOG.warning("%s: generation %d is damaged and was passed over: %s", reader.path, number, reason)
        named = len(skipped)
        with reader:
            yield reader, skipped
            before = reader.generation
        if generation is not None:
            return


def restore_emb_table(table: EmbTable, path: str | os.PathLike[str], generation: int | None) -> RestoreReport:
    """See `EmbTable.restore`."""
    core, wanted = table.core, table.description
    where = os.path.realpath(os.fspath(path))
    if core.directory is not None and len(core):
        raise ConfigError(
            f"table {table.name!r}: its directory {core.directory.path!r} holds {len(core)} rows; restore into a new directory"
        )
    for reader, skipped in holding(where, generation):
        stored = reader.tables.get(table.name)
        if stored is None:
            names = ", ".join(map(repr, sorted(reader.tables)))
            raise ConfigError(f"generation {reader.generation} at {where} has no table {table.name!r}; it has {names}")
        stored.refuse_change(wanted)
        fresh = core
        if core.directory is None:
            fresh = empty_table(wanted, with_filter=stored.with_filter, num_threads=core.num_threads)
        elif stored.with_filter and not core.with_filter:
            raise ConfigError(
                f"table {table.name!r}: the checkpoint has frequencies and timestamps, the directory {core.directory.path!r} has "
                "no room for them; restore into memory, or into a directory whose table was made with a filter"
            )
        try:
            report = RestoreReport(reader.generation, matched=[table.name], metadata=reader.metadata)
            report.rows[table.name] = fill(reader, fresh, table.name)
            report.state = {name: reader.state(name) for name in reader.state_names}
            report.count(reader)
        except CorruptionError as error:
            _empty(fresh)
            if generation is not None:
                raise
            skipped.append((reader.generation, str(error)))
            continue
        except BaseException:
            _empty(fresh)
            raise
        report.skipped = skipped
        report.missing = sorted(set(reader.tables) - {table.name})
        changes = [change for change in stored.changes(wanted) if not change.startswith("with_filter")]
        report.changed = {table.name: changes} if changes else {}
        fresh.mark_saved()
        table.note_saved(where, reader.generation, reader.created, fresh)
        return report
    raise AssertionError("holding() ends by raising")


def _empty(core: Table) -> None:
    for rows in row_batches(core, 1 << 16):
        core.erase(np.ascontiguousarray(core.columns(rows)[0]))
