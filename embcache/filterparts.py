"""What several writers' checkpoints hold of one table's filter, put together for whoever takes over a share of the keys.

Each writer has counted the keys of its own vshards. Where as many ranks read as have written, a rank gets exactly what that rank
wrote. Otherwise it gets the waiting keys of its vshards (the reader's business), the furthest clocks of the writers that held them, and the
blocks of its vshards of their sketches (ec_sketch.h), each from the writer that has it. Of a block that several have, since it has vshards of
several, it gets the larger one of each two counters: every occurrence of a key was counted in one of them, so no estimate is too low,
and to read, write and read again makes none larger. Counters of other ranks' keys raise estimates until the block has turned twice. So it is with
the whole of an earlier version's sketch, which has one block on each rank.

A delta may have of a sketch the counters that have changed since the parent: their places in the young generation, then in the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoint import Reader, vshards_of
from .checkpoint.names import VSHARDS
from .errors import CorruptionError
from .filterfile import (
    CLOCKS,
    OLD,
    SKETCH_CHANGES,
    SKETCHES,
    YOUNG,
    merged_numbers,
    sketch_cell_bytes,
    sketch_name,
)

__all__ = [
    "filter_state",
    "numbers_of",
    "sketch_of",
    "sketch_of_writer",
    "sketch_part",
    "sketch_writers",
    "writers_of_share",
]

_EARLIER = ("sketch_added", "sketch_old_added", "sketch_since")  # the clocks where there are no blocks


def writers_of_share(wrote: list[int], written: int, rank: int, world: int) -> list[int]:
    """Those of the writers `wrote`, of `written` in all, that may have counted keys of a reader rank.

    Where some wrote nothing, rows are not spread by vshards (one rank has the table), and all that did may have.
    """
    if len(wrote) < written:
        return wrote
    low, high = vshards_of(rank, world)
    return [one for one in wrote if vshards_of(one, written)[0] < high and low < vshards_of(one, written)[1]]


def numbers_of(reader: Reader, name: str, rank: int, world: int) -> dict[str, Any]:
    """The filter's clocks, cut-offs and counts for a rank, and which blocks its sketch has."""
    wrote, with_sketch = reader.filter_numbers(name), sketch_writers(reader, name)
    numbers = merged_numbers([wrote[one] for one in writers_of_share(sorted(wrote), reader.world_written, rank, world)])
    blocks = _blocks_of(wrote.get(with_sketch[0], {})) if with_sketch else 0
    for earlier in _EARLIER:
        numbers.pop(earlier, None)
    return numbers | {"sketch_blocks": blocks, "sketch_first": _blocks_from(blocks, rank, world)[0]}


def _blocks_of(numbers: dict[str, Any]) -> int:
    """Blocks of a whole sketch, by what a writer has said of it."""
    return int(numbers.get("sketch_blocks", 1))


def _blocks_from(blocks: int, rank: int, world: int) -> tuple[int, int]:
    """Those of a rank's vshards: the first and the last + 1."""
    low, high = vshards_of(rank, world)
    return low * blocks // VSHARDS, -(-high * blocks // VSHARDS)


def sketch_of(reader: Reader, name: str, rank: int, world: int) -> dict[str, np.ndarray]:
    """A table's sketch for a rank: ``sketch_young``, ``sketch_old`` (uint8) and ``sketch_clocks`` (int64), empty where there is none.

    Raises
    ------
    CorruptionError
        Two writers' blocks have different sizes, or one is none of whole counters.
    """
    writers = writers_of_share(sketch_writers(reader, name), reader.world_written, rank, world)
    if not writers:
        return {YOUNG: np.empty(0, np.uint8), OLD: np.empty(0, np.uint8), CLOCKS: np.empty(0, np.int64)}
    size = sketch_cell_bytes(reader.table_metadata(name)[0].get("filter"))
    parts = {writer: sketch_part(reader, name, writer) for writer in writers}
    blocks, block_bytes = parts[writers[0]].blocks, parts[writers[0]].block_bytes
    first, end = _blocks_from(blocks, rank, world)
    whole = {which: np.zeros((end - first, block_bytes), np.uint8) for which in SKETCHES}
    clocks = np.zeros((end - first, 3), np.int64)
    clocks[:, 2] = np.iinfo(np.int64).min
    for writer, part in parts.items():
        if (part.blocks, part.block_bytes) != (blocks, block_bytes):
            raise _damage(
                reader,
                name,
                writer,
                f"has a sketch of {part.blocks} blocks of {part.block_bytes} bytes where {blocks} of {block_bytes} are expected",
            )
        low, high = max(first, part.first), min(end, part.first + len(part.clocks))
        here, there = slice(low - first, high - first), slice(low - part.first, high - part.first)
        if low >= high:
            continue
        np.maximum(clocks[here], part.clocks[there], out=clocks[here])
        for which in SKETCHES:
            mine = whole[which][here].view(f"<u{size}")
            np.maximum(mine, part.generations[which][there].view(f"<u{size}"), out=mine)
    return {which: whole[which].reshape(-1) for which in SKETCHES} | {CLOCKS: clocks.reshape(-1)}


@dataclass(frozen=True)
class SketchPart:
    """What one writer has of a sketch.

    Attributes
    ----------
    blocks, first : int
        Of the whole sketch, and the first one here.
    generations : dict
        ``sketch_young`` and ``sketch_old``, uint8 (blocks here, bytes of a block).
    clocks : int64 (blocks here, 3)
    """

    blocks: int
    first: int
    generations: dict[str, np.ndarray]
    clocks: np.ndarray

    @property
    def block_bytes(self) -> int:
        """Of a generation."""
        return int(self.generations[YOUNG].shape[1])


def sketch_part(reader: Reader, name: str, writer: int) -> SketchPart:
    """One writer's sketch, with what later deltas have changed in it; `CorruptionError` as `sketch_of`."""
    numbers = reader.filter_numbers(name).get(writer, {})
    clocks = sketch_of_writer(reader, name, CLOCKS, writer).view("<i8")
    count = len(clocks) // 3
    generations = {which: sketch_of_writer(reader, name, which, writer) for which in SKETCHES}
    for content in generations.values():
        if count == 0 or len(clocks) != 3 * count or len(content) % count or len(content) != len(generations[YOUNG]):
            raise _damage(
                reader, name, writer, f"has a sketch of {len(content)} bytes in {count} blocks, by {len(clocks)} clocks"
            )
    return SketchPart(
        _blocks_of(numbers),
        int(numbers.get("sketch_first", 0)),
        {which: content.reshape(count, -1) for which, content in generations.items()},
        clocks.reshape(count, 3),
    )


def sketch_writers(reader: Reader, name: str) -> list[int]:
    """The writers that have a sketch of a table's, whole or what of it has changed."""
    blobs = [sketch_name(name, which) for which in (*SKETCHES, SKETCH_CHANGES)]
    return sorted({writer for blob in blobs for writer in reader.state_writers(blob)})


def sketch_of_writer(reader: Reader, name: str, which: str, writer: int) -> np.ndarray:
    """What one writer has of a generation of the sketch, with what later deltas have changed in it, or of its clocks: uint8.

    `CorruptionError` as `sketch_of`.
    """
    if which == CLOCKS:
        if writer in reader.state_writers(sketch_name(name, CLOCKS)):
            return _bytes_of(reader, sketch_name(name, CLOCKS), writer, 0)
        numbers = reader.filter_numbers(name).get(writer, {})
        return np.array([numbers.get(clock, 0) for clock in _EARLIER], "<i8").view(np.uint8)
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
    for newer in reversed(range(back)):
        packed = _bytes_of(reader, changes, writer, newer)
        count = len(packed) // (4 + size)
        places, values = packed[: 4 * count].view("<u4"), packed[4 * count :].copy()
        if len(packed) != count * (4 + size) or (count and int(places.max()) >= 2 * len(cells)):
            raise _damage(
                reader, name, writer, f"has changes of a sketch that do not fit into one of {len(whole)} bytes"
            )
        mine = (places >= len(cells)) == (which == OLD)
        cells[places[mine] - (len(cells) if which == OLD else 0)] = values.view(f"<u{size}")[mine]
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
    state |= sketch_of(reader, name, reader.rank, reader.world)
    return state | numbers_of(reader, name, reader.rank, reader.world)
