"""A table that is read in pieces, whether it lies in a checkpoint or in a table directory.

Both give their rows by ranges of vshards, so that two of them can be compared a range at a time, in bounded memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._core.digest import hash_keys
from .._core.directory import Directory
from .._core.table import Table
from ..checkpoint import Reader, Rows, TableDescription, put_rows, row_batches
from ..checkpoint.names import VSHARDS
from ..errors import ConfigError, CorruptionError
from ..rowtypes import ROW_TYPES
from .paths import CHECKPOINT, TABLE, expect, kind_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "ALL",
    "CheckpointTable",
    "DirectoryTable",
    "Pages",
    "Source",
    "batch_rows",
    "open_directory",
    "open_sources",
    "parse",
    "put_all",
    "split",
    "vshards_of_keys",
    "weights_of",
    "windows_of",
]

ALL = (0, VSHARDS)
PIECE_BYTES = 4 << 20  # of rows that are looked at together
_MOST_MAPPED_BYTES = 96 << 20
_MOST_PUT_ROWS = 1 << 16
_MOST_WINDOWS = 256


class Source(Protocol):
    """A table's rows, to be read in pieces."""

    description: TableDescription
    where: str

    @property
    def rows_expected(self) -> int:
        """About how many rows it has; exact of a directory and of a full generation."""

    def rows(self, vshards: tuple[int, int] = ALL) -> Iterator[Rows]:
        """Rows of some vshards, each once. The arrays are valid until the next ones are asked for."""

    def close(self) -> None:
        """Give back what is open."""


def batch_rows(description: TableDescription) -> int:
    """Rows that are looked at together."""
    return max(1, PIECE_BYTES // description.row_bytes)


def put_all(core: Table, rows: Rows, pages: Pages) -> None:
    """Insert or overwrite rows of a table that is mapped, few enough at a time."""
    filtered = rows.frequencies is not None and rows.timestamps is not None
    at = 0
    while at < len(rows.keys):
        part = slice(at, at + pages.rows)
        at += pages.rows
        frequencies = rows.frequencies[part] if rows.frequencies is not None and filtered else None
        timestamps = rows.timestamps[part] if rows.timestamps is not None and filtered else None
        put_rows(core, Rows(rows.keys[part], rows.weights[part], rows.state[part], frequencies, timestamps))
        pages.limit()


def vshards_of_keys(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The vshard of each key."""
    return hash_keys(keys) >> np.uint64(64 - VSHARDS.bit_length() + 1)


def weights_of(description: TableDescription, rows: Rows) -> npt.NDArray[Any]:
    """Weights as NumPy's numbers: float16, else float32."""
    return ROW_TYPES[description.dtype].from_storage(rows.weights)


class CheckpointTable:
    """A table of a generation. The reader may be shared by several, used one after the other."""

    def __init__(self, reader: Reader, name: str) -> None:
        self.reader = reader
        self.description = reader.tables[name]
        self.where = f"generation {reader.generation} of {reader.path}"

    @property
    def rows_expected(self) -> int:
        return self.reader.rows_expected(self.description.name)

    def rows(self, vshards: tuple[int, int] = ALL) -> Iterator[Rows]:
        self.reader.vshards = vshards
        return self.reader.rows(self.description.name)

    def close(self) -> None:
        self.reader.close()


def windows_of(reader: Reader, name: str, vshards: tuple[int, int]) -> list[tuple[int, int]]:
    """Ranges of vshards to be read one after the other, so that rows come with their neighbours.

    Deltas hold keys of all vshards, and chunks of an import some of them: they are read for each range again, for as many ranges
    as double the reading at most. Where each vshard is in few chunks there is one range.
    """
    total, count = reader.bytes_of(name, vshards), _MOST_WINDOWS
    middle = sum(vshards) // 2
    if reader.levels_of(name) == 1 and reader.bytes_of(name, (middle, middle + 1)) <= _MOST_MAPPED_BYTES // 4:
        count = 1
    while count > 1:
        windows = list(split(vshards, count))
        if sum(reader.bytes_of(name, window) for window in windows) <= 2 * total:
            return windows
        count //= 2
    return [vshards]


def split(vshards: tuple[int, int], count: int) -> Iterator[tuple[int, int]]:
    """The vshards in `count` ranges, or in as many as there are vshards."""
    low, high = vshards
    count = min(count, high - low)
    for i in range(count):
        yield low + (high - low) * i // count, low + (high - low) * (i + 1) // count


class Pages:
    """Keeps the mapped pages of a table directory from filling memory: to be told after each piece.

    Attributes
    ----------
    rows : int
        How many rows at any places to touch before it is told. What the kernel maps around a place is its own choice, 64 KiB
        or 2 MiB, so this follows from what the last pieces came to.
    """

    def __init__(self, core: Table) -> None:
        self.rows = 512
        self._directory = core.directory
        self._page = os.sysconf("SC_PAGESIZE")
        self._start = self._last = self._mapped()

    def _mapped(self) -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[2]) * self._page  # pages of files, which are what a directory's rows are

    def limit(self) -> None:
        """Give pages back where they have come to too much."""
        mapped = self._mapped()
        if mapped - self._last > _MOST_MAPPED_BYTES // 2:
            self.rows = max(16, self.rows // 2)
        elif mapped - self._last < _MOST_MAPPED_BYTES // 16:
            self.rows = min(_MOST_PUT_ROWS, 2 * self.rows)
        if self._directory is not None and mapped - self._start > _MOST_MAPPED_BYTES:
            self._directory.release_pages()
            mapped = self._mapped()
        self._last = mapped


class DirectoryTable:
    """A table directory: opened, locked, and not changed."""

    def __init__(self, path: str) -> None:
        self.core, self.identity = open_directory(path)
        self.where = path
        self.description = describe(self.identity)
        self.pages = Pages(self.core)
        self._blocks: list[tuple[int, int, npt.NDArray[np.int64]]] | None = None

    @property
    def rows_expected(self) -> int:
        return len(self.core)

    def rows(self, vshards: tuple[int, int] = ALL) -> Iterator[Rows]:
        most = batch_rows(self.description)
        if vshards == ALL:
            for batch in row_batches(self.core, most):
                yield self.read(batch)
                self.pages.limit()
            return
        for low, high, extents in self._ranges():
            if low < vshards[1] and vshards[0] < high:
                batch = self.core.rows_of(extents, False)
                keys = vshards_of_keys(self.core.columns(batch)[0])
                batch = batch[(keys >= np.uint64(vshards[0])) & (keys < np.uint64(vshards[1]))]
                at = 0
                while at < len(batch):
                    n = min(most, self.pages.rows)
                    yield self.read(batch[at : at + n])
                    self.pages.limit()
                    at += n

    def _ranges(self) -> list[tuple[int, int, npt.NDArray[np.int64]]]:
        """Runs of extents, and which vshards their keys are of: found by reading the keys once."""
        if self._blocks is None:
            self._blocks = []
            extents, starts = self.core.save_order()
            edges = [*np.flatnonzero(starts).tolist(), len(extents)]
            for begin, end in pairwise(edges):
                for at in range(begin, end, 64):
                    run = extents[at : min(at + 64, end)]
                    batch = self.core.rows_of(run, False)
                    if len(batch):
                        found = vshards_of_keys(self.core.columns(batch)[0])
                        self._blocks.append((int(found.min()), int(found.max()) + 1, run))
                    self.pages.limit()
        return self._blocks

    def read(self, rows: npt.NDArray[np.int64]) -> Rows:
        """The rows of these row indexes."""
        keys, frequencies, timestamps = self.core.columns(rows)
        weights = np.empty((len(rows), self.description.dim), self.description.storage)
        state = np.empty((len(rows), self.description.state_dim), np.float32)
        self.core.read_into(rows, weights, None, [state] if self.description.state_dim else [])
        filtered = self.description.with_filter
        return Rows(keys, weights, state, frequencies if filtered else None, timestamps if filtered else None)

    def close(self) -> None:
        self.core.close()


def describe(identity: dict[str, Any]) -> TableDescription:
    """What a checkpoint would say of a table directory's table."""
    wanted = ("name", "dim", "state_dim", "dtype", "initializer", "seed", "with_filter")
    return TableDescription(**{field: identity[field] for field in wanted})


def open_directory(path: str) -> tuple[Table, dict[str, Any]]:
    """Open a clean table directory as it describes itself: the table, and its description.

    Raises
    ------
    ConfigError
        It is none.
    LockedError, UncleanDirectoryError, CorruptionError, FormatVersionError, StorageError
    """
    expect(path, TABLE)
    directory = Directory(path, f"table directory {path!r}")
    identity = directory.identity
    del directory  # its lock is the table's from here on
    if identity is None:
        raise CorruptionError(f"{path}: holds no table: it was never completed; delete it")
    try:
        core = Table(
            identity["name"],
            identity["dim"],
            state_dim=identity["state_dim"],
            dtype=identity["dtype"],
            initializer=tuple(identity["initializer"]),
            seed=identity["seed"],
            directory=path,
        )
    except (KeyError, TypeError) as error:
        raise CorruptionError(f"{path}: its description is not what this version writes ({error!r})") from None
    return core, identity


# ------------------------------------------------------------------------------------------------------------- by path


def parse(text: str) -> tuple[str, int | None]:
    """`PATH` or `PATH@GENERATION`, as users write it; a path that exists is taken as it is."""
    found = re.fullmatch(r"(.+)@(\d{1,16})", text, re.DOTALL)
    if found is None or os.path.exists(text):
        return text, None
    return found[1], int(found[2])


class Opened:
    """Tables by name, in what a user named; a context manager.

    Attributes
    ----------
    tables : dict of str to Source
    reader : Reader or None
        Of a checkpoint.
    skipped : list of (int, str)
        Newer generations that do not hold.
    """

    def __init__(self, tables: dict[str, Source], reader: Reader | None = None) -> None:
        self.tables = tables
        self.reader = reader
        self.skipped = [] if reader is None else reader.skipped

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self.tables.values():
            one.close()
        if self.reader is not None:
            self.reader.close()

    def one(self, name: str | None) -> Source:
        """The table of that name, or the only one; `ConfigError` where there is none, or several without a name."""
        names = ", ".join(map(repr, self.tables)) or "none"
        if name is None and len(self.tables) != 1:
            raise ConfigError(f"there are {len(self.tables)} tables: {names}; say which with --table NAME")
        if name is not None and name not in self.tables:
            raise ConfigError(f"no table {name!r}; there is {names}")
        return self.tables[name] if name is not None else next(iter(self.tables.values()))


def open_sources(text: str) -> Opened:
    """The tables of ``CHECKPOINT``, ``CHECKPOINT@GENERATION`` or of a table directory.

    Of a checkpoint, manifests, catalogues and lengths are checked here, chunks as they are read.
    """
    path, generation = parse(text)
    if kind_of(path) == TABLE:
        if generation is not None:
            raise ConfigError(f"{text}: a table directory has no generations; leave out @{generation}")
        table = DirectoryTable(path)
        return Opened({table.description.name: table})
    expect(path, CHECKPOINT, TABLE)
    reader = Reader(path, generation, check="catalogue")
    return Opened({name: CheckpointTable(reader, name) for name in sorted(reader.tables)}, reader)
