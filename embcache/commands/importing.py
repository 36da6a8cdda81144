"""`embcache import`: tables from NumPy's, safetensors' and Parquet's files, a dense tensor, or a RecSDK save directory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from .._core.table import INIT_KINDS
from ..checkpoint import Rows, TableDescription, Writer, empty_table
from ..errors import ConfigError
from ..filterfile import pack_as
from ..rowtypes import ROW_TYPES
from .counters import RULE, CountedArrays, Times
from .directories import OPTIMIZERS, started_state
from .filters import write_filter
from .gathering import ChunkFiller, WindowFiller
from .incoming import Arrays, Incoming, StreamArrays, described, natural_dtype
from .ordering import DUPLICATES, Ordering, check_unique
from .output import FINE, Output, Progress, bytes_text
from .parquet import ParquetArrays
from .paths import CHECKPOINT, TABLE
from .recsdk import COUNTS, NO_KEY, STATES, TIMES, is_recsdk, left_out, parts_of, tables_of
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
directory, where keys may come twice, or a RecSDK save has times of keys, the folder around the target has room for the rows twice.

Of a RecSDK filter, counts and times of keys with rows are taken over. A row whose time it does not say has the newest time of the
save, or that which --time says; a save with counts and no times at all needs --time, else its counts are left out. Keys that wait for
admission start anew: a save has none of their counts. Rows of key -1, which is RecSDK's for no key, are left out."""


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
    one.add_argument("--time", metavar="T", type=int, help="of a RecSDK save: the last time of rows without one")
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


@dataclass
class _Table:
    """A table of a file or a save: its parts, whose rows follow each other.

    Attributes
    ----------
    parts : list of Incoming
    times : Times or None
        Of a RecSDK save whose filter is taken over.
    left_out : list of str
        Names of what of a save is not read.
    """

    parts: list[Incoming]
    times: Times | None = None
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for one in self.parts:
            if one.description != self.description:
                raise ConfigError(f"{one.arrays.where}: its rows are not like those of {self.where}")

    @property
    def description(self) -> TableDescription:
        return self.parts[0].description

    @property
    def where(self) -> str:
        return self.parts[0].arrays.where

    @property
    def count(self) -> int:
        """Rows; some less where rows of no key are left out."""
        return sum(one.arrays.count for one in self.parts)

    def rows(self) -> Iterator[Rows]:
        """All rows, some at a time."""
        return chain.from_iterable(one.rows(batch_rows(self.description)) for one in self.parts)

    def report(self, rows: int, dropped: int) -> dict[str, Any]:
        """What became of it, once all rows are written."""
        one, times = self.description, self.times
        about: dict[str, Any] = {"dim": one.dim, "dtype": one.dtype, "state_dim": one.state_dim, "rows": rows}
        about |= {"dropped": dropped, "bytes": bytes_text(rows * one.row_bytes)}
        about["without_key"] = sum(part.without_key for part in self.parts)
        if times is not None:
            about["filter"] = {
                "rows_with_time": times.found,
                "time_of_others": times.others,
                "keys_that_waited": times.without_row,
            }
        return {one.name: about}


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
        if given.time is not None and (kind != "recsdk" or not -(2**63) < given.time < 2**63):
            raise ConfigError(f"--time {given.time}: is for a RecSDK save; give an int64 above -2**63")
        tables = list(_open(given, source, kind, stack))
        ignored = {one.description.name: one.left_out for one in tables if kind == "recsdk"}
        for name, what in ignored.items():
            if what:
                more = "; a count needs a time, so give --time T to take them" if COUNTS in what else ""
                output.note(f"table {name!r}: not imported: {', '.join(what)}{more}")
        if given.to == "directory" and len(tables) != 1:
            names = ", ".join(repr(one.description.name) for one in tables)
            raise ConfigError(f"a table directory holds one table; {source} has {len(tables)}: {names}; give --table")
        done = (_to_directory if given.to == "directory" else _to_checkpoint)(given, tables, output)
    for name, about in done.items():
        _note(name, about, output)
    where = os.path.abspath(given.target)
    result = {"target": where, "kind": given.to, "format": kind, "tables": done, "left_out": ignored}
    lines = [
        f"table {name!r}: {about['rows']:,} rows of dim {about['dim']} ({about['dtype']}), state {about['state_dim']}"
        + (f"; {about['dropped']:,} rows of keys that came again were dropped" if about["dropped"] else "")
        for name, about in done.items()
    ]
    output.give(result, [*lines, f"{where}: {given.to}"])
    return FINE


def _note(name: str, about: dict[str, Any], output: Output) -> None:
    """Say what of a RecSDK save has no place in a table."""
    if about["without_key"]:
        output.note(f"table {name!r}: {about['without_key']} rows of key {NO_KEY}, which is no key there, are left out")
    waited = about.get("filter", {}).get("keys_that_waited")
    if waited:
        output.note(
            f"table {name!r}: {waited} keys have a time and no row: they waited for admission, and start anew, since the save has no counts "
            "of them"
        )


def _open(given: argparse.Namespace, source: str, kind: str, stack: ExitStack) -> Iterator[_Table]:
    """The tables of a file or a save."""
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
            yield _of_save(given, name, folder, names, stack)
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
    yield _Table([_incoming(given, arrays, described(about, source), os.path.splitext(os.path.basename(source))[0])])


def _of_save(given: argparse.Namespace, name: str, folder: str, names: dict[str, str], stack: ExitStack) -> _Table:
    """A table of a RecSDK save."""
    parts, ignored = parts_of(folder, stack), left_out(folder)
    pairs = [part.times for part in parts if part.times is not None]
    filtered = bool(pairs) or given.time is not None
    if not filtered and any(part.counts is not None for part in parts):
        ignored = sorted([*ignored, COUNTS])
    arrays: list[Arrays] = [
        CountedArrays(folder, part.arrays, names, part.counts) if filtered else StreamArrays(folder, part.arrays, names)
        for part in parts
    ]
    times = Times(f"{folder}/{TIMES}", pairs, given.time, NO_KEY) if filtered else None
    return _Table([_incoming(given, one, None, name, NO_KEY) for one in arrays], times, ignored)


def _incoming(
    given: argparse.Namespace, arrays: Arrays, stored: TableDescription | None, name: str, no_key: int | None = None
) -> Incoming:
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
    return Incoming(description, arrays, given.allow_nan, no_key)


# -------------------------------------------------------------------------------------------------------------- writing


def _to_checkpoint(given: argparse.Namespace, tables: list[_Table], output: Output) -> dict[str, Any]:
    done: dict[str, Any] = {}
    total = sum(one.count * one.description.row_bytes for one in tables)
    alone = given.duplicates == DUPLICATES[0]  # each key has to be, so rows need not meet in a temporary file
    with replacing(given.target, CHECKPOINT, given.force) as content:
        with Writer(content) as writer, _both(total, output) as progress:
            writer.begin(expected_bytes=total if alone else 2 * total)
            for one in tables:
                about: dict[str, Any] = {"table": one.description.name, "module": ""}
                writer.table(one.description, metadata=about | ({"filter": RULE} if one.times else {}))
                move = _move_by_windows if alone and one.times is None else _move_in_order
                done |= move(given, one, os.path.dirname(content), writer, progress)
            writer.commit()
            writer.publish()
    return done


def _move_in_order(
    given: argparse.Namespace, table: _Table, folder: str, writer: Writer, progress: Progress
) -> dict[str, Any]:
    """All rows of a table, in order and each key once, to a checkpoint."""
    filler = ChunkFiller(writer, table.description)
    done = _move(given, table, folder, filler.add, progress)
    filler.end()
    if table.times is not None:
        write_filter(writer, table.description, table.times.filter_state())
    return done


def _move_by_windows(
    given: argparse.Namespace, table: _Table, folder: str, writer: Writer, progress: Progress
) -> dict[str, Any]:
    """All rows of a table to a checkpoint, if each key comes once."""
    description, rows = table.description, 0
    keys = chain.from_iterable(one.keys(_KEYS) for one in table.parts)
    check_unique(description, table.where, keys, folder, table.count)
    filler = WindowFiller(writer, description, table.count)
    for piece in table.rows():
        filler.add(piece)
        rows += len(piece.keys)
        progress.add(2 * description.row_bytes * len(piece.keys))  # it is as good as written
    filler.end()
    return table.report(rows, 0)


def _to_directory(given: argparse.Namespace, tables: list[_Table], output: Output) -> dict[str, Any]:
    (table,) = tables
    description, count = table.description, table.count
    with replacing(given.target, TABLE, given.force) as content:
        core = empty_table(description, initial_state=started_state(description), directory=content)
        try:
            core.reserve(count)
            pages = Pages(core)

            def put(rows: Rows) -> None:
                put_all(core, rows, pages)

            with _both(count * description.row_bytes, output) as progress:
                done = _move(given, table, os.path.dirname(content), put, progress)
            if table.times is not None:
                core.flush(pack_as(table.times.filter_state(), 0, RULE))
            return done
        finally:
            core.close()


@contextmanager
def _both(total: int, output: Output) -> Iterator[Progress]:
    """Progress over reading and writing the same bytes."""
    with output.progress(2 * total, "import") as progress:
        yield progress


def _move(
    given: argparse.Namespace, table: _Table, folder: str, put: Callable[[Rows], None], progress: Progress
) -> dict[str, Any]:
    """All rows of a table, in order and each key once, to `put`."""
    description, rows = table.description, 0
    size = description.row_bytes
    ordering = Ordering(description, table.where, folder, table.count, given.duplicates)
    for piece in table.rows():
        ordering.add(piece)
        progress.add(size * len(piece.keys))
    ordered = ordering.drain()
    for piece in ordered if table.times is None else table.times.join(ordered, description, folder):
        put(piece)
        rows += len(piece.keys)
        progress.add(size * len(piece.keys))
    return table.report(rows, ordering.dropped)
