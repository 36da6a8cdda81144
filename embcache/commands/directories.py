"""`embcache save` and `embcache restore`: clean table directories to a checkpoint, and a table of a checkpoint to a directory."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from .._core.table import Table
from ..checkpoint import TableDescription, Writer, empty_table, save_table
from ..config import SGD, Adagrad, Adam, OptimizerSpec, RowWiseAdagrad
from ..errors import ConfigError, CorruptionError
from ..filterfile import take_apart
from .filters import filter_bytes, write_filter
from .output import FINDINGS, FINE, Output, bytes_text
from .paths import CHECKPOINT, TABLE, expect
from .sources import ALL, CheckpointTable, DirectoryTable, Pages, open_sources, put_all, windows_of
from .targets import check_apart, replacing

__all__ = ["OPTIMIZERS", "add", "make_table", "restored_name", "started_state"]

_SAVE = """\
Write the tables that lie in table directories to a new checkpoint, all in one generation. The directories must be clean:
closed, or flushed and not changed since. A manager restores the checkpoint as its own, filters included; a collection too,
if --module gives its path in the model."""

_RESTORE = """\
Write a table of a checkpoint (CHECKPOINT, or CHECKPOINT@GENERATION for an older one than the newest that holds) to a new
table directory, which EmbTable(directory=...), or a manager with that table, opens at once, whatever its size."""

_FORCE = "replace what is there, once the new one is whole"
OPTIMIZERS: dict[str, type[OptimizerSpec]] = {one.kind: one for one in (SGD, Adagrad, RowWiseAdagrad, Adam)}


def add(commands: Any) -> None:
    """Describe the two commands."""
    one: argparse.ArgumentParser = commands.add_parser(
        "save", help="table directories to a checkpoint", description=_SAVE
    )
    one.add_argument("directories", metavar="DIRECTORY", nargs="+", help="a clean table directory")
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="the checkpoint to make")
    one.add_argument("--module", metavar="PATH", default="", help="the tables belong to the collection at this path")
    one.add_argument("--force", action="store_true", help=_FORCE)
    one.set_defaults(run=save)
    one = commands.add_parser("restore", help="a table of a checkpoint to a table directory", description=_RESTORE)
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or CHECKPOINT@GENERATION")
    one.add_argument("directory", metavar="DIRECTORY", help="the table directory to make")
    one.add_argument("--table", metavar="NAME", help="which table, where there are several")
    one.add_argument("--force", action="store_true", help=_FORCE)
    one.set_defaults(run=restore)


# ----------------------------------------------------------------------------------------------------------------- save


def save(given: argparse.Namespace, output: Output) -> int:
    """Write one generation."""
    for path in given.directories:
        check_apart(expect(path, TABLE), given.checkpoint)
    with ExitStack() as stack:
        tables = []
        for path in given.directories:
            tables.append(DirectoryTable(path))
            stack.callback(tables[-1].close)
        names = [one.description.name for one in tables]
        if len(set(names)) < len(names):
            raise ConfigError(f"tables of one name: {', '.join(map(repr, sorted(names)))}; save them apart")
        rows = {one.description.name: one.rows_expected for one in tables}
        where = os.path.abspath(given.checkpoint)
        with replacing(where, CHECKPOINT, given.force) as content:
            generation = _write(content, tables, given.module, output)
        for one in tables:
            assert one.core.directory is not None
            one.core.directory.note_checkpoint(f"generation {generation} of {where}")
    result = {"checkpoint": where, "generation": generation, "tables": rows}
    lines = [f"{name}: {rows:,} rows" for name, rows in rows.items()]
    output.give(result, [*lines, f"{where}: generation {generation}"])
    return FINE


def _write(content: str, tables: list[DirectoryTable], module: str, output: Output) -> int:
    filters = [_filter_of(one) for one in tables]
    steps = [step for _, step, _ in filters]
    total = sum(one.rows_expected * one.description.row_bytes for one in tables)
    with Writer(content) as writer, output.progress(total, "save") as progress:
        generation = writer.begin(metadata={"steps": {module: max(steps)}}, expected_bytes=total)
        for one, (state, _, rule) in zip(tables, filters, strict=True):
            table = one.description
            description = replace(table, name=f"{module}/{table.name}") if module else table
            about: dict[str, Any] = {"table": table.name, "module": module}
            about |= {"initial_state": one.identity["initial_state"]} | ({"filter": rule} if rule else {})

            def written(rows: int, one: DirectoryTable = one) -> None:
                one.pages.limit()
                progress.add(rows * one.description.row_bytes)

            save_table(writer, one.core, description, metadata=about, written=written)
            if state:
                write_filter(writer, description, state)
        writer.commit()
        writer.publish()
    return generation


def _filter_of(one: DirectoryTable) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """(state, step, meaning) of a directory's filter; empty and 0 where there is none."""
    kept = one.core.filter_state
    return take_apart(kept, one.where) if kept else ({}, 0, {})


# -------------------------------------------------------------------------------------------------------------- restore


def restore(given: argparse.Namespace, output: Output) -> int:
    """Fill a directory."""
    with open_sources(given.checkpoint) as opened:
        reader, source = opened.reader, opened.one(given.table)
        if reader is None or not isinstance(source, CheckpointTable):
            raise ConfigError(f"{given.checkpoint}: is a table directory already; copy it while nobody has it open")
        check_apart(reader.path, given.directory)
        for number, reason in opened.skipped:
            output.note(f"generation {number} is damaged and was passed over: {reason}")
        name = source.description.name
        with replacing(given.directory, TABLE, given.force) as content:
            core = make_table(source, content)
            try:
                rows = _fill(core, source, output)
                core.flush(filter_bytes(reader, name))
                assert core.directory is not None
                core.directory.note_checkpoint(f"generation {reader.generation} of {reader.path}")
            finally:
                core.close()
        where = os.path.abspath(given.directory)
        result = {"directory": where, "generation": reader.generation, "table": core.name, "rows": rows}
        size = bytes_text(rows * source.description.row_bytes)
        output.give(result, [f"{where}: table {core.name!r}, {rows:,} rows, {size}, of generation {reader.generation}"])
        return FINDINGS if opened.skipped else FINE


def _fill(core: Table, source: CheckpointTable, output: Output) -> int:
    """Copy all rows of `source` into an empty table that lies in a directory; returns their number."""
    count, size = 0, source.description.row_bytes
    expected = source.rows_expected
    core.reserve(expected)
    pages = Pages(core)
    with output.progress(expected * size, "restore") as progress:
        for window in windows_of(source.reader, source.description.name, ALL):
            for rows in source.rows(window):
                put_all(core, rows, pages)
                count += len(rows.keys)
                progress.add(len(rows.keys) * size)
    return count


def restored_name(source: CheckpointTable) -> str:
    """What its owner calls a table: a collection's goes by another name in a checkpoint."""
    return str(source.reader.table_metadata(source.description.name)[0].get("table", source.description.name))


def make_table(source: CheckpointTable, path: str) -> Table:
    """An empty table directory for the rows of a checkpoint's table, as its owner would make it."""
    description = source.description
    try:
        return empty_table(
            description, name=restored_name(source), initial_state=_initial_state(source), directory=path
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CorruptionError(
            f"{source.where}: the description of table {description.name!r} is not what this version writes ({error})",
            table=description.name,
        ) from None


def _initial_state(source: CheckpointTable) -> Any:
    """State of a new row, which a manager compares: as `save` noted it, or else as the optimizer starts."""
    description = source.description
    runs = source.reader.table_metadata(description.name)[0].get("initial_state")
    if runs:
        return np.concatenate([np.full(int(count), value, np.float32) for count, value in runs])
    return started_state(description)


def started_state(description: TableDescription) -> Any:
    """State of a new row by the description's optimizer, float32 (state_dim,); None where that is not known: zeros."""
    rule = dict(description.optimizer or {})
    kind = OPTIMIZERS.get(rule.pop("kind", ""))
    if kind is None:
        return None
    spec = kind(**rule)
    values = np.repeat(np.array(spec.initial_state(), np.float32), spec.state_widths(description.dim))
    return values if len(values) == description.state_dim else None
