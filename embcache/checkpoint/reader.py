"""`Reader`: the newest generation that holds, and the rows of the vshards that a rank owns.

Owns the choice of the generation and the resolution of deltas: each live key comes out once, with its newest row. No row
is handed out before the digest of its chunk was checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.digest import hash_keys
from ..errors import ConfigError, CorruptionError, EmbCacheError, FormatVersionError, StorageError
from .chunk import BLOB, ERASED, GONE, LATE, ROWS, WAITING, ChunkBuffer
from .description import TableDescription
from .helper import Helper
from .level import Catalogues, ChunkPlace, Level, LevelTable, open_chain
from .manifest import stamp_of
from .names import VSHARDS, check_rank, published, vshards_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["FilterState", "Reader", "Rows"]

_TRIES = 100  # each but the last takes a pruning between two steps
_WINDOW_KEYS = 8 << 20  # changed keys that are held in memory at a time, 8 bytes each
_Beside = Callable[[int], Callable[[], bool]]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table. The arrays are the reader's: valid until it is asked for the next ones.

    Attributes
    ----------
    keys : int64 (n,)
    weights : (n, dim)
        As the table keeps them: float32, float16, or for bfloat16 its bits as int16.
    state : float32 (n, state_dim)
    frequencies, timestamps : int64 (n,), or None where the table has no filter
    """

    keys: npt.NDArray[np.int64]
    weights: npt.NDArray[Any]
    state: npt.NDArray[np.float32]
    frequencies: npt.NDArray[np.int64] | None
    timestamps: npt.NDArray[np.int64] | None


@dataclass(frozen=True)
class FilterState:
    """A filter's waiting keys in the reader's vshards, sorted by key, and its numbers, one dict for each writer that had some.

    Attributes
    ----------
    keys, counts, last, late : int64 arrays
    numbers : list of dict
    writers : list of int
        Whose they are.
    """

    keys: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    late: npt.NDArray[np.int64]
    numbers: list[dict[str, Any]]
    writers: list[int]


class Reader:
    """Reads one generation of a checkpoint, or one rank's share of it.

    Parameters
    ----------
    path : path
    generation : int, optional
        Default: the newest that holds.
    rank, world : int
        Whose vshards to read; any number of readers, whatever number of writers there was.
    check : {"chunks", "catalogue"}
        ``"chunks"``: a generation holds if every chunk of it that this rank is going to read does, which is found out by
        reading them all now. ``"catalogue"``: if its manifest, its catalogues and the lengths of its files do; a damaged chunk
        then raises when it is read, so whoever fills something must be able to throw it away.
    before : int, optional
        Without `generation`: look at older ones than this only.

    Attributes
    ----------
    generation : int
    chain : list of int
        The generations it is made of: a full one, then deltas; `generation` is the last.
    skipped : list of (int, str)
        Newer generations that do not hold, with the reason.
    stats : dict
        ``chunks`` and ``bytes`` read, and ``bytes_beyond`` of these, for keys outside the vshards that were asked for (chunks
        overlap a border, or are wide: rows that were placed before their partition was split); ``rows_read``, and
        ``rows_kept`` of these, the others being of other vshards or older than a delta's.

    Raises
    ------
    ConfigError
        There is no checkpoint at `path`, or not that generation.
    CorruptionError
        The wanted generation does not hold, or none does; the message lists the reasons.
    FormatVersionError
        The wanted generation, or the newest, is of a newer format: it is no damage, so it is not passed over.
    StorageError
        The process has no descriptor left.

    Notes
    -----
    What is open does not change: all its files are open, so generations that are published or pruned meanwhile are not seen, and the
    disk gets the space of a pruned one back when the last reader of it is closed. One that is pruned, or put into the place of
    another, between two steps of opening it is no damage: the newest ones are looked at again. Thread safety: one thread at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        generation: int | None = None,
        rank: int = 0,
        world: int = 1,
        *,
        check: str = "chunks",
        before: int | None = None,
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.rank, self.world = check_rank("Reader", rank, world)
        if check not in ("chunks", "catalogue"):
            raise ConfigError(f"Reader: check = {check!r}; give 'chunks' or 'catalogue'")
        self.vshards = vshards_of(self.rank, self.world)
        self.skipped: list[tuple[int, str]] = []
        self.stats = {"chunks": 0, "bytes": 0, "bytes_beyond": 0, "rows_read": 0, "rows_kept": 0}
        self._buffer = ChunkBuffer()
        self._levels: list[Level] = []  # the newest first
        catalogues = Catalogues(self.path)
        try:
            self._choose(generation, before, check == "chunks", catalogues)
        except BaseException:  # a signal, with files open
            self.close()
            raise
        finally:
            catalogues.close()
        self.generation = self._levels[0].generation
        self.chain = [level.generation for level in reversed(self._levels)]

    def _choose(self, generation: int | None, before: int | None, chunks: bool, catalogues: Catalogues) -> None:
        tries = 1
        while not self._look(generation, before, chunks, catalogues, tries == _TRIES):
            catalogues.close()  # their copies may be older than what is there by now
            tries += 1

    def _look(
        self, generation: int | None, before: int | None, chunks: bool, catalogues: Catalogues, last: bool
    ) -> bool:
        """Open the first one that holds; False where one that did not was pruned or replaced meanwhile, unless it is the `last` try."""
        self.skipped = []
        held = [number for number in published(self.path) if before is None or number < before]
        if generation is None and not held:
            older = "" if before is None else f" older than generation {before}"
            raise ConfigError(f"{self.path}: holds no checkpoint{older}; save one there, or give another path")
        for number in reversed(held) if generation is None else [generation]:
            stamp = stamp_of(self.path, number)
            try:
                self._levels = open_chain(self.path, number, catalogues)
                self._hold_files()
                if chunks:
                    self.verify()
                return True
            except EmbCacheError as error:
                self.close()
                moved = stamp_of(self.path, number) != stamp or (stamp is None and generation is None)
                if moved and not last:
                    return False
                if generation is not None or isinstance(error, StorageError):
                    raise
                if isinstance(error, FormatVersionError):
                    raise FormatVersionError(
                        f"{error}; or give the number of an older generation ({self.path} holds {', '.join(map(str, held[-8:]))})"
                    ) from error
                self.skipped.append((number, str(error)))
        reasons = "; ".join(f"{number}: {reason}" for number, reason in self.skipped)
        raise CorruptionError(f"{self.path}: no generation holds: {reasons}", generation=self.skipped[0][0])

    def _hold_files(self) -> None:
        """Have everything open that is going to be read; a chain of more files than the process may open has them opened one by one."""
        try:
            for level in self._levels:
                level.hold(self.vshards)
        except StorageError:
            for level in self._levels:
                level.close()

    def verify(self) -> int:
        """Check the digest of every chunk that this rank reads; returns their bytes. `CorruptionError` at the first damage."""
        total = 0
        for level in self._levels:
            for place in level.chunks():
                if place.kind == BLOB or place.overlaps(self.vshards):
                    level.read(place, self._buffer)
                    total += place.length
        return total

    # --------------------------------------------------------------------------------------------------------- content

    @property
    def world_written(self) -> int:
        """Number of ranks that wrote the generation."""
        return self._levels[0].manifest.world

    @property
    def created(self) -> float:
        """When the generation was committed: seconds since 1970."""
        return self._levels[0].manifest.created

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """The caller's own JSON of the generation, one for each writer."""
        return self._levels[0].metadata

    @property
    def tables(self) -> dict[str, TableDescription]:
        """The tables of the generation, by name."""
        return {name: table.description for name, table in self._levels[0].tables.items()}

    def table_metadata(self, name: str) -> list[dict[str, Any]]:
        """The caller's own JSON of a table, one for each writer."""
        return self._table(name).metadata

    @property
    def state_names(self) -> list[str]:
        """Names of the caller's bytes in the generation."""
        return sorted(self._levels[0].blobs)

    def state(self, name: str, writer: int | None = None) -> bytes:
        """The caller's bytes of that name.

        Parameters
        ----------
        name : str
        writer : int, optional
            Whose, of several that wrote bytes of that name (`state_writers`); default: those of the first of them.

        Raises
        ------
        ConfigError
            There are none.
        """
        return b"".join(piece.tobytes() for piece in self.state_pieces(name, writer))

    def state_writers(self, name: str, back: int = 0) -> list[int]:
        """The writers that wrote bytes of that name, in order; with `back`, in so many generations further down the chain."""
        return sorted(self._levels[back].blobs.get(name, {}))

    def state_bytes(self, name: str, writer: int | None = None, back: int = 0) -> int:
        """How many bytes `state` gives, as the catalogue says: none is read. `back` as in `state_writers`."""
        return sum(place.rows for place in self._places_of_state(name, writer, back))

    def state_pieces(self, name: str, writer: int | None = None, back: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
        """What `state` gives, a chunk at a time; each piece is valid until the next one is asked for. `back` as in `state_writers`."""
        for place in self._places_of_state(name, writer, back):
            yield self._read(self._levels[back], place)["bytes"]

    def _places_of_state(self, name: str, writer: int | None, back: int) -> list[ChunkPlace]:
        level, writers = self._levels[back], self.state_writers(name, back)
        if not writers:
            raise ConfigError(f"generation {level.generation} has no state {name!r}; it has {sorted(level.blobs)}")
        if writer is not None and writer not in writers:
            raise ConfigError(f"generation {level.generation}: writer {writer} wrote no state {name!r}; {writers} did")
        return level.blobs[name][writers[0] if writer is None else writer]

    def filter(self, name: str) -> FilterState | None:
        """A filter's state, as the generation holds it; None where the table's was not written."""
        table = self._table(name)
        if not table.filter:
            return None
        waiting = np.empty((3, self.waiting_expected(name)), np.int64)
        held, late = 0, [np.empty(0, np.int64)]
        newer = np.empty(0, np.int64)
        for level, writers in self._levels_of_filter(name):
            here, last_one = [newer], not writers & level.tables[name].filter_changes
            for place in self._own(level.tables[name], WAITING, LATE, GONE):
                if place.rank not in writers or (place.kind == LATE and level is not self._levels[0]):
                    continue
                columns = self._read(level, place)
                keys, kept = columns["keys"], self._mask(place, columns["keys"])
                if place.kind == LATE:
                    late.append(keys[kept].copy())
                    continue
                if not last_one:
                    here.append(keys[kept].copy())
                if place.kind == WAITING:
                    fresh = _without(keys, newer, kept) if len(newer) else kept
                    count = len(keys[fresh])
                    for i, what in enumerate(("keys", "frequencies", "timestamps")):
                        waiting[i, held : held + count] = columns[what][fresh]
                    held += count
            newer = np.concatenate(here)
            newer.sort()
        waiting = waiting[:, :held]
        order = np.argsort(waiting[0], kind="stable")
        for column in waiting:  # one after the other: there may be many keys
            column[:] = column[order]
        keys, counts, last = waiting
        return FilterState(
            keys, counts, last, np.sort(np.concatenate(late)), list(table.filter.values()), list(table.filter)
        )

    def filter_numbers(self, name: str) -> dict[int, dict[str, Any]]:
        """The numbers of a filter, by the writer that wrote them; the state is `filter`."""
        return dict(self._table(name).filter)

    def _levels_of_filter(self, name: str) -> Iterator[tuple[Level, set[int]]]:
        """The levels that a table's filter is made of, the newest first, and the writers whose part of it lies there."""
        self._table(name)
        writers: set[int] | None = None
        for level in self._levels:
            table = level.tables.get(name)
            wrote = set() if table is None else set(table.filter)
            writers = wrote if writers is None else writers
            if not writers <= wrote:
                raise CorruptionError(
                    f"generation {level.generation}: lacks the filter of table {name!r}, whose changes a later one has",
                    generation=level.generation,
                    table=name,
                )
            yield level, writers
            assert table is not None
            writers = writers & table.filter_changes
            if not writers:
                return
        raise CorruptionError(
            f"generation {self._levels[-1].generation}: has changes of the filter of table {name!r} alone",
            generation=self._levels[-1].generation,
            table=name,
        )

    def erased(self, name: str) -> npt.NDArray[np.int64]:
        """Keys, in this rank's vshards, that the newest delta says were erased since its parent: int64, sorted."""
        pieces = [np.empty(0, np.int64)]
        for place in self._own(self._table(name), ERASED):
            keys = self._read(self._levels[0], place)["keys"]
            pieces.append(keys[self._mask(place, keys)].copy())
        return np.unique(np.concatenate(pieces))

    def rows_expected(self, name: str) -> int:
        """About how many rows `rows` gives, for room in advance: those of the full level, as far as they are this rank's."""
        low, high = self.vshards
        total = 0.0
        for place in self._own(self._of(name)[-1].tables[name], ROWS):
            shared = min(high, place.vshard_to) - max(low, place.vshard_from)
            total += place.rows * shared / (place.vshard_to - place.vshard_from)
        return int(total)

    def levels_of(self, name: str) -> int:
        """How many generations a table's rows have to be looked for in: 1 where no delta changes it."""
        return len(self._of(name))

    def bytes_of(self, name: str, vshards: tuple[int, int]) -> int:
        """Bytes of the chunks that `rows` reads for the keys of these vshards."""
        levels = self._of(name)
        return sum(
            place.length for one in levels for place in self._own(one.tables[name], ROWS, ERASED, vshards=vshards)
        )

    def waiting_expected(self, name: str) -> int:
        """At most so many keys `filter` gives in all vshards."""
        return sum(
            place.rows
            for level, writers in self._levels_of_filter(name)
            for place in level.tables[name].chunks
            if place.kind in (WAITING, LATE) and place.rank in writers
        )

    def rows(self, name: str, *, ahead: bool = False, beside: _Beside | None = None) -> Iterator[Rows]:
        """All rows of a table in this rank's vshards, each key once with its newest row, some at a time.

        Parameters
        ----------
        name : str
        ahead : bool
            A thread reads and checks the next chunk while the caller is busy with this one; it takes memory for another chunk.
        beside : callable, optional
            What else that thread may do for the caller: ``beside(rows)`` is called before so many rows are handed out, and returns
            what the thread calls, again and again, once it has read and nobody waits for it, until that returns False.

        Raises
        ------
        ConfigError
            There is no such table.
        CorruptionError
            A chunk does not match its digest.
        """
        levels = self._of(name)
        changed = sum(p.rows for level in levels[:-1] for p in self._own(level.tables[name], ROWS, ERASED))
        windows = max(1, -(-changed // _WINDOW_KEYS))
        low, high = self.vshards
        windows = min(windows, high - low)
        for i in range(windows):
            window = (low + (high - low) * i // windows, low + (high - low) * (i + 1) // windows)
            yield from self._rows_of_window(name, levels, window, ahead, beside)

    # ---------------------------------------------------------------------------------------------------------- levels

    def _rows_of_window(
        self, name: str, levels: list[Level], window: tuple[int, int], ahead: bool, beside: _Beside | None
    ) -> Iterator[Rows]:
        """The same for keys of some vshards: from the newest level to the oldest, without keys that a newer level has."""
        newer = np.empty(0, np.int64)
        for depth, level in enumerate(levels):
            here = [newer]
            places = list(self._own(level.tables[name], ROWS, ERASED, vshards=window))
            for place, columns in zip(places, self._read_all(level, places, ahead, beside), strict=True):
                kept = self._mask(place, columns["keys"], window)
                if depth + 1 < len(levels):  # before a row is handed out: the caller may use the reader meanwhile
                    here.append(columns["keys"][kept].copy())
                if place.kind == ROWS:
                    if len(newer):
                        kept = _without(columns["keys"], newer, kept)
                    rows = self._take(columns, kept)
                    if len(rows.keys):
                        yield rows
            if depth + 1 < len(levels):
                newer = np.concatenate(here)
                newer.sort()  # in place: some keys may be there twice, which finds them as well

    def _take(self, columns: dict[str, npt.NDArray[Any]], kept: npt.NDArray[np.bool_] | slice) -> Rows:
        picked = {what: array[kept] for what, array in columns.items()}
        keys = picked["keys"]
        self.stats["rows_read"] += len(columns["keys"])
        self.stats["rows_kept"] += len(keys)
        state = picked.get("state", np.empty((len(keys), 0), np.float32))
        return Rows(keys, picked["weights"], state, picked.get("frequencies"), picked.get("timestamps"))

    def _table(self, name: str) -> LevelTable:
        table = self._levels[0].tables.get(name) if self._levels else None
        if table is None:
            raise ConfigError(
                f"generation {self.generation} has no table {name!r}; it has {', '.join(map(repr, sorted(self.tables)))}"
            )
        return table

    def _of(self, name: str) -> list[Level]:
        """The levels that a table is made of, the newest first: up to the one that holds it whole."""
        description = self._table(name).description
        found: list[Level] = []
        for level in self._levels:
            table = level.tables.get(name)
            if table is None:
                raise CorruptionError(
                    f"generation {level.generation}: lacks table {name!r}, whose changes generation {found[-1].generation} has",
                    generation=level.generation,
                    table=name,
                )
            description.refuse_change(table.description)
            found.append(level)
            if table.whole:
                break
        return found

    def _own(self, table: LevelTable, *kinds: int, vshards: tuple[int, int] | None = None) -> Iterator[ChunkPlace]:
        wanted = vshards or self.vshards
        return (place for place in table.chunks if place.kind in kinds and place.overlaps(wanted))

    def _mask(
        self, place: ChunkPlace, keys: npt.NDArray[np.int64], vshards: tuple[int, int] | None = None
    ) -> npt.NDArray[np.bool_] | slice:
        """Which keys are of the wanted vshards."""
        low, high = vshards or self.vshards
        if low <= place.vshard_from and place.vshard_to <= high:
            return slice(None)
        of_keys = hash_keys(keys) >> np.uint64(64 - VSHARDS.bit_length() + 1)
        mine = (of_keys >= np.uint64(low)) & (of_keys < np.uint64(high))
        others = len(keys) - int(np.count_nonzero(mine))
        self.stats["bytes_beyond"] += place.length * others // max(len(keys), 1)
        return mine

    def _read(self, level: Level, place: ChunkPlace) -> dict[str, npt.NDArray[Any]]:
        _, columns = level.read(place, self._buffer)
        self._count(place)
        return columns

    def _count(self, place: ChunkPlace) -> None:
        self.stats["chunks"] += 1
        self.stats["bytes"] += place.length

    def _read_all(
        self, level: Level, places: list[ChunkPlace], ahead: bool, beside: _Beside | None = None
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """The columns of chunks, one after the other; with `ahead` the next one is read meanwhile, into the other of two buffers."""
        if not ahead or len(places) < 2:
            yield from (self._read(level, place) for place in places)
            return
        for place in places:
            level.segment(place)  # opened here: the thread only reads
        buffers = [self._buffer, ChunkBuffer()]
        with Helper() as helper:

            def read(place: ChunkPlace, buffer: ChunkBuffer, also: Callable[[], bool] | None) -> Any:
                found = level.read(place, buffer)
                while also is not None and not helper.wanted and also():
                    pass
                return found

            for i, place in enumerate(places):
                _, columns = helper.result() if i else level.read(place, buffers[0])
                if i + 1 < len(places):
                    also = None if beside is None else beside(place.rows)
                    helper.start(read, places[i + 1], buffers[(i + 1) % 2], also)
                self._count(place)
                yield columns

    # ------------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Close the files; again does nothing."""
        for level in self._levels:
            level.close()
        self._levels = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _without(
    keys: npt.NDArray[np.int64], newer: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_] | slice
) -> npt.NDArray[np.bool_]:
    """Those of `kept` whose keys are not in the sorted array `newer`."""
    at = np.searchsorted(newer, keys)
    at[at == len(newer)] = 0
    fresh = newer[at] != keys
    return fresh if isinstance(kept, slice) else fresh & kept
