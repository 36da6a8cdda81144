"""`embcache import`: tables from NumPy's, safetensors' and Parquet's files, a dense tensor, or a RecSDK save directory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

from .._core.table import INIT_KINDS
from ..checkpoint import Rows, TableDescription, Writer, empty_table
from ..errors import ConfigError
from ..rowtypes import ROW_TYPES
from .directories import OPTIMIZERS, started_state
from .gathering import ChunkFiller, WindowFiller
from .incoming import Arrays, Incoming, StreamArrays, described, natural_dtype
from .ordering import DUPLICATES, Ordering, check_unique
from .output import FINE, Output, Progress, bytes_text
from .parquet import ParquetArrays
from .paths import CHECKPOINT, TABLE
from .recsdk import STATES, is_recsdk, left_out, parts_of, tables_of
from .sources import Pages, batch_rows, put_all
from .streams import open_npy, open_npz, open_safetensors
from .targets import check_apart, replacing

__all__ = ["FORMATS", "add", "format_of"]

_KEYS = 1 << 16  # that are looked at together
FORMATS = {".npz": "npz", ".safetensors": "safetensors", ".parquet": "parquet", ".pq": "parquet", ".npy": "npy"}

_ABOUT = """\
Make a checkpoint, or with --to directory a table directory, of foreign files:

  FILE.npz, FILE.safetensors   arrays keys (n,), weights (n, dim), and state (n, s), frequencies (n,), timestamps (n,) if any
  FILE.parquet                 columns of these names; weights and state are lists (needs pyarrow)
  FILE.npy                     a dense tensor (n, dim): row i is the row of key i, or of --first-key + i
  DIRECTORY                    what RecSDK's embedding cache has saved: all its tables, or one with --table

--dense takes the weights of an .npz or .safetensors file as such a tensor. Other names are said by --keys, --weights and
--state; several arrays of state, one after the other in a row, as A+B. What `embcache export` wrote describes its table; of
other files --name, --dtype, --seed, --initializer and --optimizer say what they cannot. Keys come in any order. With --to
directory, or where keys may come twice, the folder around the target has room for the rows twice."""


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "import", help="foreign files to a checkpoint or a table directory", description=_ABOUT
    )
    one.add_argument("source", metavar="SOURCE", help="a file, or a RecSDK save directory")
    one.add_argument("target", metavar="TARGET", help="what to make")
    one.add_argument("--to", choices=("checkpoint", "directory"), default="checkpoint", help="(checkpoint)")
    one.add_argument("--format", choices=sorted({*FORMATS.values(), "recsdk"}), help="default: by the file's name")
    one.add_argument("--table", metavar="NAME", help="of a RecSDK save: this table only")
    one.add_argument("--name", help="the table's name (default: its description's, or the file's)")
    one.add_argument("--keys", metavar="ARRAY", default="keys")
    one.add_argument("--weights", metavar="ARRAY", default="weights")
    one.add_argument("--state", metavar="ARRAY", default="state")
    one.add_argument("--dense", action="store_true", help="the weights are a dense tensor, without keys")
    one.add_argument("--first-key", metavar="K", type=int, default=0, help="of a dense tensor (0)")
    one.add_argument("--dtype", choices=sorted(ROW_TYPES), help="of the weights (default: the file's, else float32)")
    one.add_argument("--seed", type=int, help="of rows to come (0)")
    one.add_argument(
        "--initializer", metavar="KIND,A,B", type=_initializer, help="of rows to come (uniform,-0.05,0.05)"
    )
    one.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), help="what the state is of; checked when it is restored"
    )
    one.add_argument(
        "--duplicates", choices=DUPLICATES, default=DUPLICATES[0], help="what a key that comes twice means"
    )
    one.add_argument("--allow-nan", action="store_true", help="take NaN and infinity as they are")
    one.add_argument("--force", action="store_true", help="replace what is there, once the new one is whole")
    one.set_defaults(run=run)


def _initializer(text: str) -> list[Any]:
    kind, *numbers = text.split(",")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if kind not in INIT_KINDS or not len(values) <= 2 or len(values) != len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: give one of {', '.join(INIT_KINDS)}, and two numbers")
    return [kind, *values, 0.0, 0.0][:3]


def format_of(path: str, given: str | None, reading: bool = True) -> str:
    """The format of a file: as said, or by its name."""
    if given is not None:
        return given
    if reading and is_recsdk(path):
        return "recsdk"
    ending = os.path.splitext(path)[1].lower()
    if ending not in FORMATS or (reading and os.path.isdir(path)):
        what = "no file of a known name, nor a RecSDK save" if reading else "a name without a known ending"
        raise ConfigError(f"{path}: {what}; give one that ends in {', '.join(FORMATS)}, or --format")
    return FORMATS[ending]


def run(given: argparse.Namespace, output: Output) -> int:
    """Read, put into order, write."""
    source = os.path.abspath(given.source)
    if not os.path.exists(source):
        raise ConfigError(f"{source}: does not exist; give a file, or a RecSDK save directory")
    if not os.path.isfile(source) and not os.path.isdir(source):
        raise ConfigError(f"{source}: is a pipe, a device or the like, which cannot be read twice; give a file")
    check_apart(source, given.target)
    kind = format_of(source, given.format)
    with ExitStack() as stack:
        tables = list(_open(given, source, kind, stack))
        ignored = {parts[0].description.name: left_out(parts[0].arrays.where) for parts in tables if kind == "recsdk"}
        for name, what in ignored.items():
            if what:
                output.note(
                    f"table {name!r}: not imported: {', '.join(what)}. All its rows count as admitted, and none is evicted before its key has "
                    "come again; keys that waited for admission start anew"
                )
        if given.to == "directory" and len(tables) != 1:
            names = ", ".join(repr(parts[0].description.name) for parts in tables)
            raise ConfigError(f"a table directory holds one table; {source} has {len(tables)}: {names}; give --table")
        done = (_to_directory if given.to == "directory" else _to_checkpoint)(given, tables, output)
    where = os.path.abspath(given.target)
    result = {"target": where, "kind": given.to, "format": kind, "tables": done, "left_out": ignored}
    lines = [
        f"table {name!r}: {about['rows']:,} rows of dim {about['dim']} ({about['dtype']}), state {about['state_dim']}"
        + (f"; {about['dropped']:,} rows of keys that came again were dropped" if about["dropped"] else "")
        for name, about in done.items()
    ]
    output.give(result, [*lines, f"{where}: {given.to}"])
    return FINE


def _open(given: argparse.Namespace, source: str, kind: str, stack: ExitStack) -> Iterator[list[Incoming]]:
    """The tables of a file or a save: of each its parts, whose rows follow each other."""
    names = {one: getattr(given, one, one) for one in ("keys", "weights", "state")}
    names |= {one: one for one in ("frequencies", "timestamps")}
    if kind == "recsdk":
        folders = tables_of(source)
        if given.table is not None:
            if given.table not in folders:
                raise ConfigError(
                    f"{source}: no table {given.table!r}; there is {', '.join(map(repr, folders)) or 'none'}"
                )
            folders = {given.table: folders[given.table]}
        if not folders:
            raise ConfigError(f"{source}: holds no <table>/key/slice.data; give the directory of a save")
        if given.name is not None and len(folders) > 1:
            raise ConfigError(f"{source}: has {len(folders)} tables; give --table with --name")
        names = {one: one for one in names} | {"state": "+".join(STATES)}
        for name, folder in folders.items():
            parts: list[Arrays] = [StreamArrays(folder, streams, names) for streams in parts_of(folder, stack)]
            yield [_incoming(given, one, None, name) for one in parts]
        return
    if given.table is not None:
        raise ConfigError(
            "--table is for a RecSDK save; the arrays of a file are named by --keys, --weights and --state"
        )
    arrays: Arrays
    if kind == "parquet":
        arrays = ParquetArrays(source, names, stack)
        about = arrays.about.decode("utf-8", "replace") if arrays.about else None
    else:
        if kind == "npy":
            streams, about = open_npy(source, stack, names["weights"]), None
        else:
            streams, about = (open_npz if kind == "npz" else open_safetensors)(source, stack)
        dense = given.dense or kind == "npy"
        arrays = StreamArrays(source, streams, names, given.first_key if dense else None)
        if dense and not -(2**63) <= given.first_key <= 2**63 - max(arrays.count, 1):
            raise ConfigError(f"--first-key {given.first_key}: keys would leave int64; give a smaller one")
    yield [_incoming(given, arrays, described(about, source), os.path.splitext(os.path.basename(source))[0])]


def _incoming(given: argparse.Namespace, arrays: Arrays, stored: TableDescription | None, name: str) -> Incoming:
    description = stored or TableDescription(
        name, arrays.dim, arrays.state_dim, natural_dtype(arrays.dtype), with_filter=arrays.filtered
    )
    changes: dict[str, Any] = {
        what: getattr(given, what)
        for what in ("name", "dtype", "seed", "initializer")
        if getattr(given, what) is not None
    }
    if given.optimizer is not None:
        changes["optimizer"] = {"kind": given.optimizer}
    description = replace(description, **changes)
    if given.optimizer is not None:
        widths = OPTIMIZERS[given.optimizer]().state_widths(description.dim)
        if sum(widths) != description.state_dim:
            raise ConfigError(
                f"{arrays.where}: has {description.state_dim} numbers of state a row; {given.optimizer} has {sum(widths)} for dim "
                f"{description.dim}"
            )
    return Incoming(description, arrays, given.allow_nan)


# -------------------------------------------------------------------------------------------------------------- writing


def _to_checkpoint(given: argparse.Namespace, tables: list[list[Incoming]], output: Output) -> dict[str, Any]:
    done: dict[str, Any] = {}
    total = sum(one.arrays.count * one.description.row_bytes for parts in tables for one in parts)
    alone = given.duplicates == DUPLICATES[0]  # each key has to be, so rows need not meet in a temporary file
    with replacing(given.target, CHECKPOINT, given.force) as content:
        with Writer(content) as writer, _both(total, output) as progress:
            writer.begin(expected_bytes=total if alone else 2 * total)
            for parts in tables:
                description = parts[0].description
                writer.table(description, metadata={"table": description.name, "module": ""})
                move = _move_by_windows if alone else _move_in_order
                done |= move(given, parts, os.path.dirname(content), writer, progress)
            writer.commit()
            writer.publish()
    return done


def _move_in_order(
    given: argparse.Namespace, parts: list[Incoming], folder: str, writer: Writer, progress: Progress
) -> dict[str, Any]:
    """All rows of a table's parts, in order and each key once, to a checkpoint."""
    filler = ChunkFiller(writer, parts[0].description)
    done = _move(given, parts, folder, filler.add, progress)
    filler.end()
    return done


def _move_by_windows(
    given: argparse.Namespace, parts: list[Incoming], folder: str, writer: Writer, progress: Progress
) -> dict[str, Any]:
    """All rows of a table's parts to a checkpoint, if each key comes once."""
    description, count = _description_of(parts), sum(one.arrays.count for one in parts)
    check_unique(
        description, parts[0].arrays.where, chain.from_iterable(one.keys(_KEYS) for one in parts), folder, count
    )
    filler = WindowFiller(writer, description, count)
    for piece in chain.from_iterable(one.rows(batch_rows(description)) for one in parts):
        filler.add(piece)
        progress.add(2 * description.row_bytes * len(piece.keys))  # it is as good as written
    filler.end()
    return _about(description, count, 0)


def _to_directory(given: argparse.Namespace, tables: list[list[Incoming]], output: Output) -> dict[str, Any]:
    (parts,) = tables
    description = parts[0].description
    count = sum(one.arrays.count for one in parts)
    with replacing(given.target, TABLE, given.force) as content:
        core = empty_table(description, initial_state=started_state(description), directory=content)
        try:
            core.reserve(count)
            pages = Pages(core)

            def put(rows: Rows) -> None:
                put_all(core, rows, pages)

            with _both(count * description.row_bytes, output) as progress:
                return _move(given, parts, os.path.dirname(content), put, progress)
        finally:
            core.close()


@contextmanager
def _both(total: int, output: Output) -> Iterator[Progress]:
    """Progress over reading and writing the same bytes."""
    with output.progress(2 * total, "import") as progress:
        yield progress


def _move(
    given: argparse.Namespace,
    parts: list[Incoming],
    folder: str,
    put: Callable[[Rows], None],
    progress: Progress,
) -> dict[str, Any]:
    """All rows of a table's parts, in order and each key once, to `put`."""
    description = _description_of(parts)
    size, rows = description.row_bytes, 0
    count = sum(one.arrays.count for one in parts)
    ordering = Ordering(description, parts[0].arrays.where, folder, count, given.duplicates)
    for one in parts:
        for piece in one.rows(batch_rows(description)):
            ordering.add(piece)
            progress.add(size * len(piece.keys))
    for piece in ordering.drain():
        put(piece)
        rows += len(piece.keys)
        progress.add(size * len(piece.keys))
    return _about(description, rows, ordering.dropped)


def _description_of(parts: list[Incoming]) -> TableDescription:
    """Of all parts of a table; `ConfigError` where they are of different ones."""
    description = parts[0].description
    for one in parts:
        if one.description != description:
            raise ConfigError(f"{one.arrays.where}: its rows are not like those of {parts[0].arrays.where}")
    return description


def _about(description: TableDescription, rows: int, dropped: int) -> dict[str, Any]:
    about = {"dim": description.dim, "dtype": description.dtype, "state_dim": description.state_dim}
    size = bytes_text(rows * description.row_bytes)
    return {description.name: about | {"rows": rows, "dropped": dropped, "bytes": size}}
