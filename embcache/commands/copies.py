"""`embcache compact` and `embcache reshard`: one generation of a checkpoint, written anew as a full one."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from ..checkpoint import Reader, Writer, publish, verify, vshards_of
from ..checkpoint.names import next_generation, published
from ..errors import ConfigError, CorruptionError
from ..filterfile import CLOCKS, SKETCHES, sketch_blobs, sketch_name
from ..filterparts import numbers_of, sketch_of, sketch_of_writer, sketch_writers
from .gathering import ChunkFiller
from .output import FINDINGS, FINE, Output, Progress, bytes_text
from .paths import CHECKPOINT, expect
from .sources import ALL, parse, split, windows_of
from .targets import check_apart, put_back, replacing

__all__ = ["add"]

_COMPACT = """\
Write the newest generation that holds (or CHECKPOINT@GENERATION) as one full generation: deltas are merged, what was pruned
or overwritten gives its space back. With TARGET into a new checkpoint; without, and with --force, the checkpoint itself is
replaced by it, in one step and once it is whole and verified: it holds this generation alone then, all others are gone. The
number of writers stays."""

_RESHARD = """\
Write the newest generation that holds (or CHECKPOINT@GENERATION) as one full generation of so many writers, each with its
share of the vshards. Restoring into any number of ranks needs no resharding; it saves those that read chunks of others. With
TARGET into a new checkpoint; without, and with --force, the checkpoint itself is replaced, in one step and once the new one is
whole and verified: it holds this generation alone then, all others are gone. Of what several writers have said themselves (metadata, state), writer r of the new
ones repeats what r modulo the old number said; of a filter's clocks and cut-offs it has the furthest of those whose keys it takes
over, and of their sketches the larger one of each two counters, in memory."""

_FILTER_KEYS = 2 << 20  # that are in memory at a time


def add(commands: Any) -> None:
    """Describe the two commands."""
    for name, about, short in (
        ("compact", _COMPACT, "a generation and its deltas to one full generation"),
        ("reshard", _RESHARD, "a generation to another number of writers"),
    ):
        one: argparse.ArgumentParser = commands.add_parser(name, help=short, description=about)
        one.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or CHECKPOINT@GENERATION")
        one.add_argument(
            "target", metavar="TARGET", nargs="?", help="the checkpoint to make (default: itself, with --force)"
        )
        if name == "reshard":
            one.add_argument("--writers", metavar="N", type=int, required=True, help="how many, 1 to 4096")
        one.add_argument("--force", action="store_true", help="replace what is there, once the new one is whole")
        one.set_defaults(run=run, writers=None, doing=name)


def run(given: argparse.Namespace, output: Output) -> int:
    """Copy, verify, put into place."""
    path, generation = parse(given.checkpoint)
    if path and not os.path.lexists(path) and os.path.isdir(os.path.dirname(os.path.abspath(path))):
        put_back(path)  # where a command has died that replaced it, and the file system cannot exchange in one step
    expect(path, CHECKPOINT)
    if given.writers is not None and not 1 <= given.writers <= 4096:
        raise ConfigError(f"--writers {given.writers}: give a number from 1 to 4096")
    path = os.path.realpath(path)
    if given.target is not None:
        check_apart(path, given.target)
    elif not given.force:
        raise ConfigError(
            f"{path}: would be replaced by one full generation, and its {len(published(path))} present ones would go; give a TARGET, or "
            "--force to replace it once the new one is whole"
        )
    # In place: locked before it is looked at, so that no generation that comes in between is lost.
    with replacing(given.target or path, CHECKPOINT, given.force) as content:
        with Reader(path, generation, check="catalogue") as reader:
            if reader.skipped and given.target is None:
                raise CorruptionError(
                    f"{path}: generation {reader.skipped[0][0]} is damaged ({reader.skipped[0][1]}), and would be gone afterwards; give "
                    f"{path}@{reader.generation} if that is meant, or a TARGET",
                    generation=reader.skipped[0][0],
                )
            for number, reason in reader.skipped:
                output.note(f"generation {number} is damaged and was passed over: {reason}")
            held = published(path)
            number = reader.generation if reader.generation == held[-1] else next_generation(path)
            result = _copy(reader, content, number, given.writers or reader.world_written, given.doing, output)
            skipped = bool(reader.skipped)
        damage = [one.what for one in verify(content) if one.severity == "damage"]
        if damage:
            raise CorruptionError(f"the copy does not verify, so nothing was replaced: {damage[0]}")
        result["bytes"] = {"before": _size(path), "after": _size(content)}
    where = os.path.abspath(given.target or path)
    merged = " + ".join(map(str, result["chain"]))
    lines = [f"table {name!r}: {rows:,} rows" for name, rows in result["tables"].items()]
    lines.append(
        f"{where}: generation {number}, full, {result['writers']} writer(s), made of {merged}; "
        f"{bytes_text(result['bytes']['before'])} -> {bytes_text(result['bytes']['after'])}"
    )
    output.give({"checkpoint": where} | result, lines)
    return FINDINGS if skipped else FINE


def _size(path: str) -> int:
    """Bytes of all files."""
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def _copy(reader: Reader, content: str, number: int, world: int, doing: str, output: Output) -> dict[str, Any]:
    """Write what `reader` has as generation `number` of `world` writers; they come one after the other.

    It is as old as what it was made of: whoever has saved that may go on with a delta.
    """
    tables = dict.fromkeys(sorted(reader.tables), 0)
    total = sum(reader.bytes_of(name, ALL) for name in tables)
    with output.progress(total, doing) as progress:
        for rank in range(world):
            with Writer(content, rank, world, clock=lambda: reader.created) as writer:
                writer.begin(number, metadata=reader.metadata[rank % len(reader.metadata)])
                for name in tables:
                    tables[name] += _copy_table(reader, writer, name, progress)
                _copy_states(reader, writer)
                writer.commit()
        publish(content, number, world)
    return {"generation": number, "chain": reader.chain, "writers": world, "tables": tables}


def _copy_states(reader: Reader, writer: Writer) -> None:
    """This writer's share of the caller's bytes, and of the filters' sketches, which are written whole."""
    same = writer.rank % reader.world_written
    for table in reader.tables:
        wrote = sketch_writers(reader, table)
        if not wrote:
            continue
        if len(wrote) == reader.world_written or (len(wrote) > 1 and writer.world != reader.world_written):
            for which, content in sketch_of(reader, table, writer.rank, writer.world).items():
                writer.write_state(sketch_name(table, which), content.view(np.uint8).data)
        elif writer.rank == 0 if len(wrote) == 1 else same in wrote:
            for which in (*SKETCHES, CLOCKS):
                content = sketch_of_writer(reader, table, which, wrote[0] if len(wrote) == 1 else same)
                writer.write_state(sketch_name(table, which), content.data)
    for name in sorted(set(reader.state_names).difference(*map(sketch_blobs, reader.tables))):
        wrote = reader.state_writers(name)
        if len(wrote) == 1:
            if writer.rank == 0:
                writer.write_state_pieces(name, reader.state_pieces(name))
        elif same in wrote:
            writer.write_state_pieces(name, reader.state_pieces(name, same))


def _copy_table(reader: Reader, writer: Writer, name: str, progress: Progress) -> int:
    """This writer's share of a table: its rows, and what its filter knows of waiting keys."""
    description, abouts = reader.tables[name], reader.table_metadata(name)
    writer.table(description, metadata=abouts[writer.rank % len(abouts)])
    filler, rows = ChunkFiller(writer, description), 0
    mine = vshards_of(writer.rank, writer.world)
    for window in windows_of(reader, name, mine):
        reader.vshards = window
        for piece in reader.rows(name):
            filler.add(piece)
            rows += len(piece.keys)
            progress.add(len(piece.keys) * description.row_bytes)
    filler.end()
    for window in split(mine, -(-reader.waiting_expected(name) // _FILTER_KEYS) or 1):
        reader.vshards = window
        found = reader.filter(name)
        if found is not None:
            numbers = numbers_of(reader, name, writer.rank, writer.world)
            writer.write_filter(description, found.keys, found.counts, found.last, found.late, numbers)
    reader.vshards = ALL
    return rows
