"""A compiled table to a generation, and back: rows are copied between the table and a chunk, without another array between.

Nothing here holds a lock for longer than a chunk. A table that changes while it is saved is noticed by its version, and
the save is given up: whoever wants to go on training meanwhile has to copy out what is about to change (the manager does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.table import Table
from ..errors import ChangedError, ConfigError
from .description import TableDescription
from .reader import Reader, Rows
from .writer import Writer

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RestoreReport", "batches_of_rows", "empty_table", "fill", "put_rows", "row_batches", "save_table"]

_BLOCK_EXTENTS = 64  # of 1024 rows: what is looked through at a time
_AHEAD_BYTES = 16 << 20  # of rows to come, whose memory is made ready while others are inserted
_CUT_FROM = 16  # a run ends a chunk only where it holds a sixteenth of one: small deltas would be mostly padding


@dataclass
class RestoreReport:
    """What a restore did.

    Attributes
    ----------
    generation : int
    skipped : list of (int, str)
        Newer generations that do not hold, with the reason.
    matched : list of str
        Tables that were restored.
    new : list of str
        Tables that the checkpoint lacks: they start as they were made.
    missing : list of str
        Tables of the checkpoint that nobody asked for.
    changed : dict
        Table -> what of its description has changed, of no consequence for its rows.
    rows : dict
        Table -> rows restored.
    state
        The caller's own, as it was given; of an `EmbTable` bytes, by name.
    metadata : list of dict
        The caller's JSON of the generation, one for each rank that wrote it.
    bytes_read, bytes_beyond : int
        Bytes of the chunks that were read, and how many of these for keys of other ranks' vshards, which share chunks with
        this one's.
    """

    generation: int
    skipped: list[tuple[int, str]] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changed: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    state: Any = None
    metadata: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0
    bytes_beyond: int = 0

    def count(self, reader: Reader) -> None:
        """Note what a reader has read by now."""
        self.bytes_read, self.bytes_beyond = reader.stats["bytes"], reader.stats["bytes_beyond"]


def row_batches(core: Table, most: int, *, changed: bool = False) -> Iterator[npt.NDArray[np.int64]]:
    """Row indexes of all live rows, or of those that changed since `mark_saved`: at most `most` at a time.

    Each batch is one chunk's: its keys are of neighbouring vshards, as far as the table keeps them together.
    """
    yield from batches_of_rows(*core.save_order(), lambda extents: core.rows_of(extents, changed), most)


def batches_of_rows(
    extents: npt.NDArray[np.int64],
    starts: npt.NDArray[np.bool_],
    rows_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
    most: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Rows that `rows_of` finds in some extents, at most `most` at a time; `extents` and `starts` are a table's `save_order`."""
    edges = [*np.flatnonzero(starts).tolist(), len(extents)]
    pending: list[npt.NDArray[np.int64]] = []
    held = 0
    for begin, end in pairwise(edges):
        for at in range(begin, end, _BLOCK_EXTENTS):
            rows = rows_of(extents[at : min(at + _BLOCK_EXTENTS, end)])
            if len(rows):
                pending.append(rows)
                held += len(rows)
            while held >= most:
                together = pending[0] if len(pending) == 1 else np.concatenate(pending)
                yield together[:most]
                pending, held = [together[most:]], held - most
        if held * _CUT_FROM >= most:
            yield np.concatenate(pending)
            pending, held = [], 0
    if held:
        yield np.concatenate(pending)


def save_table(
    writer: Writer,
    core: Table,
    description: TableDescription,
    *,
    changed: bool = False,
    metadata: dict[str, Any] | None = None,
    written: Callable[[int], object] | None = None,
) -> int:
    """Write the rows of a table, or with `changed` those that changed and the keys that were erased since `mark_saved`.

    Parameters
    ----------
    writer : Writer
        Between `begin` and `commit`.
    core : Table
        Not changed by anybody meanwhile.
    description : TableDescription
    changed : bool
    metadata : dict, optional
        See `Writer.table`.
    written : callable, optional
        Called after each chunk, with its number of rows.

    Returns
    -------
    int
        The version of the table that was saved, for `mark_saved`.

    Raises
    ------
    ChangedError
        The table was changed meanwhile; the generation must be aborted.
    """
    version = core.version
    writer.table(description, metadata=metadata)
    if changed:
        erased = core.erased_keys()
        if erased is None:
            raise ConfigError(f"table {description.name!r}: its erased keys are not known; write it whole")
        writer.write_erased(description, erased)
    for rows in row_batches(core, writer.rows_per_chunk(description), changed=changed):
        _copy_out(writer, core, description, rows)
        if written is not None:
            written(len(rows))
    if core.version != version:
        raise ChangedError(f"table {description.name!r}: changed while it was saved; save it between changes")
    return version


def _copy_out(writer: Writer, core: Table, description: TableDescription, rows: npt.NDArray[np.int64]) -> None:
    """One chunk: the table's rows go straight into the memory that is written."""
    arrays = writer.rows_to_fill(description, len(rows))
    keys, frequencies, timestamps = core.columns(rows)
    arrays["keys"][:] = keys
    if description.with_filter:
        arrays["frequencies"][:] = frequencies
        arrays["timestamps"][:] = timestamps
    core.read_into(rows, arrays["weights"], None, [arrays["state"]] if description.state_dim else [])
    writer.write_filled(description, len(rows))


def empty_table(description: TableDescription, **more: Any) -> Table:
    """A compiled table as `description` has it, without rows; `more` goes to `Table` and may say otherwise."""
    options: dict[str, Any] = {
        "name": description.name,
        "state_dim": description.state_dim,
        "dtype": description.dtype,
        "initializer": tuple(description.initializer),
        "seed": description.seed,
        "with_filter": description.with_filter,
    }
    options |= more
    return Table(options.pop("name"), description.dim, **options)


def fill(reader: Reader, core: Table, name: str) -> int:
    """Put a table's rows, of the reader's vshards, into an empty table of the same shape; returns their number.

    Raises
    ------
    CorruptionError, HostMemoryError, DiskFullError
        The table holds some of the rows and must be thrown away, or emptied.
    """
    count = 0
    expected = reader.rows_expected(name)
    core.reserve(expected)
    threads = core.num_threads

    def beside(rows: int) -> Callable[[], bool]:
        room = _AHEAD_BYTES // (4 * (core.dim + core.state_dim))
        return core.coming_memory(rows, min(room, expected - count - rows)).ready

    # One thread reads, checks, and has memory cleared for the rows to come; the others insert.
    for rows in reader.rows(name, ahead=threads > 1, beside=beside):
        put_rows(core, rows, max(threads - 1, 1))
        count += len(rows.keys)
    return count


def put_rows(core: Table, rows: Rows, num_threads: int | None = None) -> None:
    """Insert or overwrite rows of the shape that the table has."""
    state = rows.state if core.state_dim else None
    if core.with_filter and rows.frequencies is not None and rows.timestamps is not None:
        core.assign(rows.keys, rows.weights, state, rows.frequencies, rows.timestamps, num_threads=num_threads)
    else:
        core.assign(rows.keys, rows.weights, state, num_threads=num_threads)
