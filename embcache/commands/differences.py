"""`embcache diff`: in what two tables, or two checkpoints, differ.

Both sides are looked at by ranges of the keys' hashes: of one side a range's rows are in memory, the other's pass by.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from .._core.digest import hash_keys
from ..checkpoint import Reader, Rows
from ..checkpoint.names import VSHARDS
from ..errors import ConfigError
from ..filterfile import CLOCKS, SKETCHES, sketch_blobs, sketch_name
from ..filterparts import sketch_of_writer, sketch_writers
from .histogram import Largest
from .output import FINDINGS, FINE, Output, Progress, columns_text
from .sources import Opened, Source, open_sources, weights_of

__all__ = ["add"]

_ABOUT = """\
Compare two checkpoints (CHECKPOINT or CHECKPOINT@GENERATION each), table directories, or one of each: for every table how many
keys were added, removed or changed, by how much weights and state differ at most, and the keys that differ most. A row has
changed where one bit of it has, frequency and timestamp included. Of two checkpoints the bytes of the caller's are compared too
(not: metadata, and keys that wait for admission). Tables of one name are compared, or the only ones of both sides.

Exit code 0: no difference; 1: some."""

_WINDOW_BYTES = 96 << 20
_KEY_BYTES = 32  # what finding a row takes beside it
_HASHES = 1 << 64
_MOST_OF_VSHARDS = VSHARDS  # windows that are whole vshards; more are parts of them


def add(commands: Any) -> None:
    """Describe the command."""
    one: argparse.ArgumentParser = commands.add_parser(
        "diff", help="keys added, removed, changed; the largest difference", description=_ABOUT
    )
    one.add_argument("one", metavar="ONE", help="a checkpoint, CHECKPOINT@GENERATION, or a table directory")
    one.add_argument("other", metavar="OTHER", help="what it is compared with")
    one.add_argument("--table", metavar="NAME", help="this table only")
    one.add_argument("--other-table", metavar="NAME", help="what it is called in OTHER (default: the same)")
    one.add_argument("--top", metavar="N", type=int, default=10, help="how many keys to show (10)")
    one.set_defaults(run=run)


def run(given: argparse.Namespace, output: Output) -> int:
    """Print the differences."""
    if not 0 <= given.top <= 1_000_000:
        raise ConfigError(f"--top {given.top}; give a number from 0 to 1000000")
    if given.other_table is not None and given.table is None:
        raise ConfigError("--other-table goes with --table")
    with open_sources(given.one) as one, open_sources(given.other) as other:
        for number, reason in one.skipped + other.skipped:
            output.note(f"generation {number} is damaged and was passed over: {reason}")
        pairs = _pairs(given, one, other)
        names = {name for name, _, _ in pairs}
        missing = [] if given.table else sorted(set(one.tables) - names)
        matched = {two.description.name for _, _, two in pairs}
        new = [] if given.table else sorted(set(other.tables) - matched)
        total = sum(first.rows_expected + second.rows_expected for _, first, second in pairs)
        with output.progress(total, "diff", "rows") as progress:
            tables = {name: _Comparison(first, second, given.top).run(progress) for name, first, second in pairs}
        states = {} if given.table else _states(one.reader, other.reader)
    result = {
        "one": given.one,
        "other": given.other,
        "tables": tables,
        "tables_removed": missing,
        "tables_added": new,
        "states": states,
    }
    same = not (missing or new or states or any(not about["same"] for about in tables.values()))
    output.give(result | {"same": same}, _lines(result, same))
    return FINE if same and not one.skipped and not other.skipped else FINDINGS


def _pairs(given: argparse.Namespace, one: Opened, other: Opened) -> list[tuple[str, Source, Source]]:
    if given.table is not None:
        return [(given.table, one.one(given.table), other.one(given.other_table or given.table))]
    if len(one.tables) == 1 == len(other.tables):
        return [(next(iter(one.tables)), one.one(None), other.one(None))]
    return [(name, one.tables[name], other.tables[name]) for name in one.tables if name in other.tables]


def _states(one: Reader | None, other: Reader | None) -> dict[str, str]:
    """Names of the caller's bytes that differ, and how."""
    if one is None or other is None:
        return {}
    found = {}
    names = [_states_of(reader) for reader in (one, other)]
    for name in sorted(names[0] | names[1]):
        if name not in names[1]:
            found[name] = "removed"
        elif name not in names[0]:
            found[name] = "added"
        elif _digests(one, name) != _digests(other, name):
            found[name] = "changed"
    return found


def _states_of(reader: Reader) -> set[str]:
    """Names of the caller's bytes; of a sketch those of its generations and clocks, whether they are written whole or not."""
    return set(reader.state_names).difference(*map(sketch_blobs, reader.tables)) | set(_sketches(reader))


def _sketches(reader: Reader) -> dict[str, tuple[str, str]]:
    """The names of sketches -> their table, and which generation it is."""
    tables = [table for table in reader.tables if sketch_writers(reader, table)]
    return {sketch_name(table, which): (table, which) for table in tables for which in (*SKETCHES, CLOCKS)}


def _digests(reader: Reader, name: str) -> list[bytes]:
    """One for each writer that wrote bytes of that name."""
    digests = []
    sketches = _sketches(reader)
    if name in sketches:
        table, which = sketches[name]
        return [
            xxhash.xxh3_128_digest(sketch_of_writer(reader, table, which, one).data)
            for one in sketch_writers(reader, table)
        ]
    for writer in reader.state_writers(name):
        running = xxhash.xxh3_128()
        for piece in reader.state_pieces(name, writer):
            running.update(piece.data)
        digests.append(running.digest())
    return digests


class _Comparison:
    """Of two tables; those whose rows have other shapes are compared by their keys alone."""

    def __init__(self, one: Source, other: Source, top: int) -> None:
        self._one, self._other = one, other
        shapes = [(it.description.dim, it.description.state_dim, it.description.dtype) for it in (one, other)]
        self._alike = shapes[0] == shapes[1]
        self._filtered = one.description.with_filter and other.description.with_filter
        self._rows = [0, 0]
        self._added = self._removed = self._changed = self._counters = self._not_finite = 0
        self._weights = self._state = 0.0
        self._most = Largest(top)
        self._some: dict[str, list[int]] = {"added": [], "removed": []}
        self._top = top

    def run(self, progress: Progress) -> dict[str, Any]:
        """Compare all rows."""
        description = self._one.description
        size = self._one.rows_expected * (description.row_bytes + _KEY_BYTES)
        windows = max(1, -(-size // _WINDOW_BYTES))
        # Whole vshards, as long as there are enough: readers give these without a look at each key.
        unit = _HASHES // VSHARDS if windows <= _MOST_OF_VSHARDS else 1
        count = _HASHES // unit
        for i in range(windows):
            self._compare(i * count // windows * unit, (i + 1) * count // windows * unit, progress)
        changes = self._one.description.changes(self._other.description)
        if not self._alike:
            for what in ("dim", "state_dim", "dtype"):
                pair = [getattr(one.description, what) for one in (self._one, self._other)]
                changes += [f"{what}: {pair[0]!r} -> {pair[1]!r}"] if pair[0] != pair[1] else []
        same = self._alike and not (self._added or self._removed or self._changed)
        return {
            "same": same,
            "rows": self._rows,
            "added": self._added,
            "removed": self._removed,
            "changed": self._changed if self._alike else None,
            "counters_changed": self._counters if self._filtered else None,
            "max_delta_weights": self._weights if self._alike else None,
            "max_delta_state": self._state if self._alike else None,
            "not_finite": self._not_finite,
            "description": changes,
            "some_added": self._some["added"],
            "some_removed": self._some["removed"],
            "top_changed": self._most.pairs(),
        }

    def _compare(self, low: int, high: int, progress: Progress) -> None:
        held = _Held(_pieces(self._one, low, high, progress))
        self._rows[0] += len(held.keys)
        for piece in _pieces(self._other, low, high, progress):
            self._rows[1] += len(piece.keys)
            at, known = held.find(piece.keys)
            self._added += self._note("added", piece.keys[~known])
            if self._alike and known.any():
                self._compare_rows(held, at[known], piece, known)
        self._removed += self._note("removed", held.unseen())

    def _note(self, what: str, keys: Any) -> int:
        some = self._some[what]
        some += keys[: max(0, self._top - len(some))].tolist()
        return len(keys)

    def _compare_rows(self, held: _Held, at: Any, piece: Rows, known: Any) -> None:
        keys, differs = piece.keys[known], np.zeros(len(at), bool)
        largest = np.zeros(len(at))
        for what in ("weights", "state"):
            one, other = held.columns[what][at], getattr(piece, what)[known]
            if not one.shape[1]:
                continue
            bits = f"u{one.dtype.itemsize}"
            changed = np.flatnonzero((one.view(bits) != other.view(bits)).any(axis=1))
            if not len(changed):
                continue
            differs[changed] = True
            delta = np.abs(self._numbers(what, one[changed]) - self._numbers(what, other[changed])).max(axis=1)
            self._not_finite += int(np.count_nonzero(~np.isfinite(delta)))
            delta = np.where(np.isfinite(delta), delta, 0.0)
            if what == "weights":
                self._weights = max(self._weights, float(delta.max()))
            else:
                self._state = max(self._state, float(delta.max()))
            largest[changed] = np.maximum(largest[changed], delta)
        if self._filtered:
            counters = np.zeros(len(at), bool)
            for what in ("frequencies", "timestamps"):
                counters |= held.columns[what][at] != getattr(piece, what)[known]
            self._counters += int(np.count_nonzero(counters))
            differs |= counters
        self._changed += int(np.count_nonzero(differs))
        self._most.add(keys[differs], largest[differs])

    def _numbers(self, what: str, rows: Any) -> Any:
        """As float64; differences of infinities are NaN, which are counted."""
        if what == "weights":
            none = np.empty((len(rows), 0), np.float32)
            rows = weights_of(self._one.description, Rows(np.empty(0, np.int64), rows, none, None, None))
        return np.asarray(rows, np.float64)


class _Held:
    """Rows of one side, to be found by the hashes of their keys, which are one to one.

    Both sides come more or less in the order of hashes, so that a search ends near the last one.
    """

    def __init__(self, pieces: Iterator[Rows]) -> None:
        parts: dict[str, list[Any]] = {}
        for piece in pieces:
            for what in ("keys", "weights", "state", "frequencies", "timestamps"):
                array = getattr(piece, what)
                if array is not None:
                    parts.setdefault(what, []).append(array.copy())
        self.columns = {}
        for what in list(parts):  # one column after the other, so that only one is there twice
            self.columns[what] = np.concatenate(parts.pop(what))
        self.keys = self.columns.pop("keys", np.empty(0, np.int64))
        hashes = hash_keys(self.keys)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._seen = np.zeros(len(self.keys), bool)

    def find(self, keys: Any) -> tuple[Any, Any]:
        """Places of keys, and whether they are there; they count as seen."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        hashes = hash_keys(keys)
        places = np.searchsorted(self._sorted, hashes)
        places[places == len(self._sorted)] = 0
        known = self._sorted[places] == hashes
        at = self._order[places]
        self._seen[at[known]] = True
        return at, known

    def unseen(self) -> Any:
        """Keys that nobody has looked for."""
        return self.keys[~self._seen]


def _pieces(source: Source, low: int, high: int, progress: Progress) -> Iterator[Rows]:
    """Rows whose keys' hashes are in the range."""
    shift = 64 - VSHARDS.bit_length() + 1
    vshards = (low >> shift, ((high - 1) >> shift) + 1)
    for piece in source.rows(vshards):
        if (low, high) != (vshards[0] << shift, vshards[1] << shift):
            hashes = hash_keys(piece.keys)
            kept = (hashes >= np.uint64(low)) & (hashes <= np.uint64(high - 1))
            columns = (getattr(piece, what) for what in ("keys", "weights", "state", "frequencies", "timestamps"))
            picked: Any = [None if one is None else one[kept] for one in columns]
            piece = Rows(*picked)
        if len(piece.keys):
            progress.add(len(piece.keys))
            yield piece


def _lines(result: dict[str, Any], same: bool) -> list[str]:
    lines = []
    for name, one in result["tables"].items():
        lines.append(f"table {name!r}: {one['rows'][0]:,} and {one['rows'][1]:,} rows")
        lines += [f"  {change}" for change in one["description"]]
        lines.append(f"  added {one['added']:,}, removed {one['removed']:,}")
        if one["changed"] is None:
            lines.append("  rows of other shapes: only keys are compared")
        else:
            deltas = f"max |delta| weights {one['max_delta_weights']:.9g}, state {one['max_delta_state']:.9g}"
            lines.append(f"  changed {one['changed']:,}; {deltas}")
            if one["counters_changed"]:
                lines.append(f"  frequency or timestamp differs in {one['counters_changed']:,} rows")
            if one["not_finite"]:
                lines.append(f"  {one['not_finite']:,} differences are NaN or infinite, and not among these")
            if one["top_changed"]:
                lines += [f"  {line}" for line in columns_text(("changed key", "|delta|"), one["top_changed"])]
        for what in ("added", "removed"):
            if one[f"some_{what}"]:
                lines.append(f"  {what}: {', '.join(map(str, one[f'some_{what}']))} ...")
    lines += [f"table {name!r}: only in {result['one']}" for name in result["tables_removed"]]
    lines += [f"table {name!r}: only in {result['other']}" for name in result["tables_added"]]
    lines += [f"state {name!r}: {how}" for name, how in result["states"].items()]
    return [*lines, "no difference" if same else "they differ"]
