"""What several writers' checkpoints hold of one table's filter, put together for whoever takes over a share of the keys.

Each writer has counted the keys of its own vshards. Where as many ranks read as have written, a rank gets exactly what that rank
wrote. Otherwise it gets the waiting keys of its vshards (the reader's business), the furthest clocks of the writers that held them, and of
their sketches the larger one of each two counters: every occurrence of a key was counted in one of them, so no estimate is too low,
and to read, write and read again makes none larger. Counters of other ranks' keys raise estimates until the sketch has turned twice.

A delta may have of a sketch the counters of its young generation that have changed since the parent, as long as no generation has ended.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checkpoint import FilterState, Reader, vshards_of
from .errors import CorruptionError
from .filterfile import SKETCH_CHANGES, SKETCHES, YOUNG, merged_numbers, sketch_blobs, sketch_cell_bytes, sketch_name

__all__ = ["filter_state", "numbers_of", "sketch_of", "sketch_of_writer", "sketch_writers", "writers_of_share"]


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
    writers = writers_of_share(sketch_writers(reader, name), reader.world_written, rank, world)
    if not writers:
        return np.empty(0, np.uint8)
    whole = sketch_of_writer(reader, name, which, writers[0])
    size = sketch_cell_bytes(reader.table_metadata(name)[0].get("filter"))
    for writer in writers[1:]:
        more = sketch_of_writer(reader, name, which, writer)
        if len(more) != len(whole):
            raise _damage(reader, name, writer, f"has a sketch of {len(more)} bytes where {len(whole)} are expected")
        np.maximum(whole.view(f"<u{size}"), more.view(f"<u{size}"), out=whole.view(f"<u{size}"))
    return whole


def sketch_writers(reader: Reader, name: str) -> list[int]:
    """The writers that have a sketch of a table's, whole or what of it has changed."""
    return sorted({writer for blob in sketch_blobs(name) for writer in reader.state_writers(blob)})


def sketch_of_writer(reader: Reader, name: str, which: str, writer: int) -> np.ndarray:
    """What one writer has of a generation of the sketch, with what later deltas have changed in it: uint8. `CorruptionError` as `sketch_of`."""
    blob, changes = sketch_name(name, which), sketch_name(name, SKETCH_CHANGES)
    size = sketch_cell_bytes(reader.table_metadata(name)[0].get("filter"))
    back = 0
    while writer not in reader.state_writers(blob, back):
        if writer not in reader.state_writers(changes, back) or back + 1 == len(reader.chain):
            raise _damage(
                reader, name, writer, f"has changes of a sketch that generation {reader.chain[-1 - back]} lacks"
            )
        back += 1
    whole = _bytes_of(reader, blob, writer, back)
    if len(whole) % size:
        raise _damage(reader, name, writer, f"has a sketch of {len(whole)} bytes in counters of {size}")
    cells = whole.view(f"<u{size}")
    for newer in reversed(range(back if which == YOUNG else 0)):
        packed = _bytes_of(reader, changes, writer, newer)
        count = len(packed) // (4 + size)
        places = packed[: 4 * count].view("<u4")
        if len(packed) != count * (4 + size) or (count and int(places.max()) >= len(cells)):
            raise _damage(
                reader, name, writer, f"has changes of a sketch that do not fit into one of {len(whole)} bytes"
            )
        cells[places] = packed[4 * count :].copy().view(f"<u{size}")
    return whole


def _bytes_of(reader: Reader, blob: str, writer: int, back: int) -> np.ndarray:
    content = np.empty(reader.state_bytes(blob, writer, back), np.uint8)
    at = 0
    for piece in reader.state_pieces(blob, writer, back):
        content[at : at + len(piece)] = piece
        at += len(piece)
    return content


def _damage(reader: Reader, name: str, writer: int, what: str) -> CorruptionError:
    return CorruptionError(
        f"generation {reader.generation}, table {name!r}: writer {writer} {what}",
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
