"""`embcache inspect`: what is in the tables of a checkpoint or a table directory."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError
from .histogram import Integers, Largest, Sizes, bars
from .output import FINDINGS, FINE, Output, bytes_text, columns_text
from .sources import DirectoryTable, Opened, Source, open_sources, vshards_of_keys, weights_of

if TYPE_CHECKING:
    from ..checkpoint import Rows

__all__ = ["add", "key_number"]

_ABOUT = """\
Show the tables of a checkpoint (CHECKPOINT, or CHECKPOINT@GENERATION for an older one than the newest that holds) or of a
table directory: what they are, how many rows and bytes they have, and over all rows how keys, frequencies, ages and norms
are spread, with the keys on top. An age is how much older a key's timestamp is than the newest one. Frequencies and ages
exist where the table has a filter.

All rows are read once. --quick leaves that out; --key K shows one key's row instead."""


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "inspect", help="tables, rows, bytes, histograms, top keys, one key's row", description=_ABOUT
    )
    one.add_argument("source", metavar="SOURCE", help="a checkpoint, CHECKPOINT@GENERATION, or a table directory")
    one.add_argument("--table", metavar="NAME", help="this table only")
    one.add_argument("--key", metavar="K", type=key_number, help="show the row of this key (an int64, or 0x...)")
    one.add_argument("--top", metavar="N", type=int, default=10, help="how many keys on top to show (10)")
    one.add_argument("--quick", action="store_true", help="leave out what needs all rows to be read")
    one.set_defaults(run=run)


def key_number(text: str) -> int:
    """A key as users write it: decimal, or hexadecimal of 64 bits."""
    try:
        value = int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if not -(2**63) <= value < 2**64:
        raise argparse.ArgumentTypeError(f"{text} is no key: keys are int64")
    return value - 2**64 if value >= 2**63 else value


def run(given: argparse.Namespace, output: Output) -> int:
    """Print what the tables hold."""
    if not 0 <= given.top <= 1_000_000:
        raise ConfigError(f"--top {given.top}; give a number from 0 to 1000000")
    with open_sources(given.source) as opened:
        for number, reason in opened.skipped:
            output.note(f"generation {number} is damaged and was passed over: {reason}")
        tables = opened.tables if given.table is None else {given.table: opened.one(given.table)}
        if given.key is not None:
            return _show_key(given.key, tables, output)
        total = sum(one.rows_expected for one in tables.values())
        with output.progress(0 if given.quick else total, "inspect", "rows") as progress:
            found = [_examine(one, given.top, not given.quick, progress.add) for one in tables.values()]
        result = _of_source(opened, given.source) | {"tables": found}
        output.give(result, _lines(result))
        return FINDINGS if opened.skipped else FINE


def _of_source(opened: Opened, source: str) -> dict[str, Any]:
    reader = opened.reader
    if reader is None:
        return {"source": source, "generation": None}
    return {
        "source": source,
        "generation": reader.generation,
        "chain": reader.chain,
        "skipped": reader.skipped,
        "writers": reader.world_written,
        "created": reader.created,
        "states": {
            name: sum(reader.state_bytes(name, writer) for writer in reader.state_writers(name))
            for name in reader.state_names
        },
        "metadata": reader.metadata,
    }


def _examine(one: Source, top: int, scan: bool, progress: Any) -> dict[str, Any]:
    """What there is to say of a table."""
    description = one.description
    about = {field: value for field, value in description.to_json().items() if value is not None}
    if isinstance(one, DirectoryTable):
        about["stats"] = one.core.stats()
    if not scan:
        return about | {
            "rows": one.rows_expected,
            "exact": isinstance(one, DirectoryTable),
            "bytes": _parts(one, one.rows_expected),
        }
    rows = 0
    keys, frequencies, ages, norms = Integers(), Integers(), Integers(), Sizes()
    by_norm, by_frequency = Largest(top), Largest(top)
    newest = _newest(one) if description.with_filter else 0
    for piece in one.rows():
        rows += len(piece.keys)
        keys.add(piece.keys)
        lengths = _norms(one, piece)
        norms.add(lengths)
        finite = np.isfinite(lengths)
        by_norm.add(piece.keys[finite], lengths[finite])
        if piece.frequencies is not None and piece.timestamps is not None:
            frequencies.add(piece.frequencies)
            by_frequency.add(piece.keys, piece.frequencies)
            ages.add(_ages(newest, piece.timestamps))
        progress(len(piece.keys))
    about |= {"rows": rows, "exact": True, "bytes": _parts(one, rows)}
    about |= {"keys": keys.bins(), "norms": norms.bins(), "not_finite": norms.not_finite, "top_norms": by_norm.pairs()}
    if description.with_filter:
        about |= {"frequencies": frequencies.bins(), "ages": ages.bins(), "top_frequencies": by_frequency.pairs()}
        about["newest_timestamp"] = newest
    return about


def _newest(one: Source) -> int:
    """The largest timestamp of all rows: ages need it before the first of them can be told."""
    newest = -(2**63)
    for piece in one.rows():
        if piece.timestamps is not None and len(piece.timestamps):
            newest = max(newest, int(piece.timestamps.max()))
    return newest


def _ages(newest: int, timestamps: Any) -> Any:
    """newest - timestamps; what exceeds int64 (a key without a timestamp has -2**63) counts as 2**63 - 1."""
    ages = np.int64(newest) - timestamps  # wraps where it exceeds
    return np.where(ages < 0, np.int64(2**63 - 1), ages)


def _norms(one: Source, piece: Rows) -> Any:
    """Euclidean length of each row of weights, float64."""
    weights = weights_of(one.description, piece).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", weights, weights))


def _parts(one: Source, rows: int) -> dict[str, int]:
    """Bytes of the rows by part, as they lie in a checkpoint."""
    description = one.description
    counters = 8 * rows if description.with_filter else 0
    return {
        "keys": 8 * rows,
        "weights": description.dim * description.storage.itemsize * rows,
        "state": 4 * description.state_dim * rows,
        "frequencies": counters,
        "timestamps": counters,
    }


def _lines(result: dict[str, Any]) -> list[str]:
    lines = []
    if result["generation"] is not None:
        chain = " + ".join(map(str, result["chain"]))
        lines.append(f"generation {result['generation']} (made of {chain}), {result['writers']} writer(s)")
        lines += [f"state {name!r}: {bytes_text(size)}" for name, size in result["states"].items()]
    for one in result["tables"]:
        bound = "" if one["exact"] else "about "
        total = sum(one["bytes"].values())
        lines += ["", f"table {one['name']!r}: {bound}{one['rows']:,} rows, {bytes_text(total)}"]
        lines.append(
            f"  dim {one['dim']} of {one['dtype']}, state {one['state_dim']}, "
            f"initializer {one['initializer']}, seed {one['seed']}, {'with' if one['with_filter'] else 'no'} filter"
        )
        parts = [(part, size, bytes_text(size)) for part, size in one["bytes"].items() if size]
        if "stats" in one:
            stats = one["stats"]
            parts += [
                (f"files: {part}", stats[f"{part}_bytes"], bytes_text(stats[f"{part}_bytes"]))
                for part in ("index", "padding", "slack", "file")
            ]
        lines += [f"  {line}" for line in columns_text(("part", "bytes", ""), parts)]
        for field, title in (
            ("keys", "keys"),
            ("frequencies", "frequencies"),
            ("ages", "ages"),
            ("norms", "norms of the weights"),
        ):
            if field in one:
                lines += [f"  {line}" for line in bars(title, one[field])]
        if one.get("not_finite"):
            lines.append(f"  {one['not_finite']:,} rows have NaN or infinity among their weights")
        for field, title in (("top_frequencies", "frequency"), ("top_norms", "norm")):
            if one.get(field):
                lines += [f"  {line}" for line in columns_text(("key", title), one[field])]
    return lines


# -------------------------------------------------------------------------------------------------------------- one key


def _show_key(key: int, tables: dict[str, Source], output: Output) -> int:
    """Print the row of a key in each table that has it; exit 1 where none has."""
    found = {name: row for name, one in tables.items() if (row := _row_of(key, one)) is not None}
    vshard = int(vshards_of_keys(np.array([key], np.int64))[0])
    lines = [f"key {key} (vshard {vshard})" + ("" if found else f" is in none of {', '.join(map(repr, tables))}")]
    for name, row in found.items():
        lines += [f"table {name!r}", *(f"  {field}: {value}" for field, value in row.items())]
    output.give({"key": key, "vshard": vshard, "tables": found}, lines)
    return FINE if found else FINDINGS


def _row_of(key: int, one: Source) -> dict[str, Any] | None:
    wanted = np.array([key], np.int64)
    if isinstance(one, DirectoryTable):
        index = one.core.find(wanted)
        return _row(one, one.read(index), 0) if index[0] >= 0 else None
    vshard = int(vshards_of_keys(wanted)[0])
    for piece in one.rows((vshard, vshard + 1)):
        at = np.flatnonzero(piece.keys == key)
        if len(at):
            return _row(one, piece, int(at[0]))
    return None


def _row(one: Source, piece: Rows, at: int) -> dict[str, Any]:
    row: dict[str, Any] = {"weights": _numbers(weights_of(one.description, piece)[at])}
    if one.description.state_dim:
        row["state"] = _numbers(piece.state[at])
    if piece.frequencies is not None and piece.timestamps is not None:
        row |= {"frequency": int(piece.frequencies[at]), "timestamp": int(piece.timestamps[at])}
    return row


def _numbers(values: Any) -> list[Any]:
    """Numbers for JSON, which has neither NaN nor infinity: these as text."""
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]
