"""What several writers' checkpoints hold of one table's filter, put together for whoever takes over a share of the keys.

Each writer has counted the keys of its own vshards. Where as many ranks read as have written, a rank gets exactly what that rank
wrote. Otherwise it gets the waiting keys of its vshards (the reader's business), the furthest clocks of the writers that held them, and of
their sketches the larger one of each two counters: every occurrence of a key was counted in one of them, so no estimate is too low,
and to read, write and read again makes none larger. Counters of other ranks' keys raise estimates until the sketch has turned twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checkpoint import FilterState, Reader, vshards_of
from .errors import CorruptionError
from .filterfile import SKETCHES, merged_numbers, sketch_cell_bytes, sketch_name

__all__ = ["filter_state", "numbers_of", "sketch_of", "writers_of_share"]


def writers_of_share(wrote: list[int], written: int, rank: int, world: int) -> list[int]:
    """Those of the writers `wrote`, of `written` in all, that may have counted keys of a reader rank.

    Where some wrote nothing, rows are not spread by vshards (one rank has the table), and all that did may have.
    """
    if len(wrote) < written:
        return wrote
    low, high = vshards_of(rank, world)
    return [one for one in wrote if vshards_of(one, written)[0] < high and low < vshards_of(one, written)[1]]


def numbers_of(reader: Reader, found: FilterState, rank: int, world: int) -> dict[str, Any]:
    """The filter's clocks, cut-offs and counts for a rank."""
    share = writers_of_share(found.writers, reader.world_written, rank, world)
    return merged_numbers([found.numbers[found.writers.index(one)] for one in share])


def sketch_of(reader: Reader, name: str, which: str, rank: int, world: int) -> np.ndarray:
    """One generation of a table's sketch for a rank: uint8, empty where there is none.

    Raises
    ------
    CorruptionError
        Two writers' have different sizes, or it is none of whole counters.
    """
    blob = sketch_name(name, which)
    writers = writers_of_share(reader.state_writers(blob), reader.world_written, rank, world)
    if not writers:
        return np.empty(0, np.uint8)
    whole = np.empty(reader.state_bytes(blob, writers[0]), np.uint8)
    _cells(reader, name, blob, writers[0], whole, first=True)
    for writer in writers[1:]:
        _cells(reader, name, blob, writer, whole, first=False)
    return whole


def _cells(reader: Reader, name: str, blob: str, writer: int, whole: np.ndarray, first: bool) -> None:
    """Put a writer's counters into `whole`, or the larger ones of theirs and those there."""
    size = sketch_cell_bytes(reader.table_metadata(name)[0].get("filter"))
    at = 0
    for piece in reader.state_pieces(blob, writer):
        there = whole[at : at + len(piece)]
        if len(there) < len(piece) or len(piece) % size:
            break
        if first:
            there[:] = piece
        else:
            cells = there.view(f"<u{size}")
            np.maximum(cells, piece.view(f"<u{size}"), out=cells)
        at += len(piece)
    if at != len(whole) or reader.state_bytes(blob, writer) != at:
        raise CorruptionError(
            f"generation {reader.generation}, table {name!r}: writer {writer} has a sketch of {reader.state_bytes(blob, writer)} bytes in counters "
            f"of {size}, where {len(whole)} are expected",
            generation=reader.generation,
            table=name,
        )


def filter_state(reader: Reader, name: str) -> dict[str, Any] | None:
    """What `SwapManager.import_filter` takes of a table, for the reader's rank; None where its filter was not written."""
    found = reader.filter(name)
    if found is None:
        return None
    state: dict[str, Any] = {"keys": found.keys, "counts": found.counts, "last": found.last, "late": found.late}
    for which in SKETCHES:
        state[which] = sketch_of(reader, name, which, reader.rank, reader.world)
    return state | numbers_of(reader, found, reader.rank, reader.world)
