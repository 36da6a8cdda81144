"""One generation as its catalogues describe it, checked: which tables it has, and where their chunks lie.

A restored state is a chain of levels: a full generation, and the deltas that lead from it to the one that is wanted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptionError, FormatVersionError
from .catalogue import BLOB_CHUNKS, CHUNK_RECORD, CHUNKS, GENERATION, TABLE, CatalogueReader, parts_of
from .chunk import BLOB, MOST_CHUNK_BYTES, NO_TABLE, ChunkBuffer, Header, open_chunk
from .description import TableDescription
from .manifest import Manifest, read_manifest, records_of
from .names import rank_name
from .segment import SegmentReader

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Catalogues", "ChunkPlace", "Level", "LevelTable", "open_chain"]

MOST_CHAIN = 4096


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk lies, and what it must turn out to be."""

    rank: int
    table: int
    name: str
    number: int
    kind: int
    vshard_from: int
    vshard_to: int
    file: int
    offset: int
    length: int
    rows: int
    digest: bytes

    def overlaps(self, vshards: tuple[int, int]) -> bool:
        """Whether a key of these vshards may be in it."""
        return self.vshard_from < vshards[1] and vshards[0] < self.vshard_to


@dataclass
class LevelTable:
    """A table in one generation: the ranks' parts put together."""

    description: TableDescription
    whole: bool
    rows: int = 0
    erased: int = 0
    filter: dict[int, dict[str, Any]] = field(default_factory=dict)  # by writer
    filter_changes: set[int] = field(default_factory=set)  # writers whose filter is what has changed since the parent
    metadata: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[ChunkPlace] = field(default_factory=list)


class Catalogues:
    """The catalogues of a directory, each copied and verified once, for as long as somebody reads generations from it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._open: dict[int, CatalogueReader] = {}

    def of(self, rank: int, least_bytes: int, transaction: int) -> CatalogueReader:
        """The catalogue of a rank; `CorruptionError` where it is not what a manifest says."""
        if rank not in self._open:
            self._open[rank] = CatalogueReader(os.path.join(self.path, rank_name(rank)), least_bytes, transaction)
        return self._open[rank]

    def close(self) -> None:
        """Free them all."""
        for one in self._open.values():
            one.close()
        self._open.clear()


class Level:
    """One generation whose manifest, lengths and catalogues hold.

    Raises
    ------
    CorruptionError, FormatVersionError, ConfigError
        They do not, or there is no such generation.
    """

    def __init__(self, path: str, generation: int, catalogues: Catalogues) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path, generation)
        self.generation = generation
        self.tables: dict[str, LevelTable] = {}
        self.blobs: dict[str, dict[int, list[ChunkPlace]]] = {}  # by name and writer
        self.metadata: list[dict[str, Any]] = []
        self._segments: dict[tuple[int, int], SegmentReader] = {}
        for part in self.manifest.ranks:
            part.check_lengths(path, generation)
            catalogue = catalogues.of(part.rank, part.catalogue_bytes, part.transaction)
            records = records_of(self.manifest, part, catalogue)
            try:
                self._take(part.rank, records)
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise CorruptionError(
                    f"{catalogue.path}: what it says of generation {generation} is not what this version writes ({error!r})",
                    generation=generation,
                ) from None

    def _take(self, rank: int, records: list[tuple[bytes, bytes]]) -> None:
        """Add a rank's records."""
        body: dict[str, Any] = {}
        tables: dict[int, LevelTable] = {}
        for key, value in records:
            _, kind, table, _ = parts_of(key)
            if kind == GENERATION:
                body = json.loads(value)
                self.metadata.append(dict(body["metadata"]))
            elif kind == TABLE:
                tables[table] = self._take_table(rank, json.loads(value))
            elif kind == CHUNKS:
                one = tables[table]
                one.chunks += _places(rank, table, one.description.name, value)
            elif kind == BLOB_CHUNKS:
                name = str(body["blobs"][table])
                self._blob(name, rank).extend(_places(rank, NO_TABLE, name, value))
        for name in body["blobs"]:
            self._blob(str(name), rank)
        if len(tables) != len(body["tables"]):
            raise ValueError("a table's record is missing")

    def _blob(self, name: str, rank: int) -> list[ChunkPlace]:
        return self.blobs.setdefault(name, {}).setdefault(rank, [])

    def _take_table(self, rank: int, about: dict[str, Any]) -> LevelTable:
        description = TableDescription.from_json(about["description"])
        one = self.tables.setdefault(description.name, LevelTable(description, True))
        if one.description != description:
            raise ValueError("ranks describe a table in different ways")
        one.whole = one.whole and bool(about["whole"])
        one.rows += int(about["rows"])
        one.erased += int(about["erased"])
        one.metadata.append(dict(about["metadata"]))
        if about["filter"] is not None:
            one.filter[rank] = dict(about["filter"])
            if about.get("filter_changes", False):
                one.filter_changes.add(rank)
        return one

    def segment(self, place: ChunkPlace) -> SegmentReader:
        """The file that a chunk lies in, opened once."""
        at = (place.rank, place.file)
        if at not in self._segments:
            files = self.manifest.ranks[place.rank].files
            if place.file >= len(files):
                raise self.damage(place, "lies in a file that does not exist")
            name, length = files[place.file]
            folder = os.path.join(self.path, rank_name(place.rank))
            self._segments[at] = SegmentReader(folder, name, length, self.generation, place.rank, place.file)
        return self._segments[at]

    def hold(self, vshards: tuple[int, int]) -> None:
        """Open the files that hold something of these vshards, or of no table: they can be read from now on, pruned or not."""
        for place in self.chunks():
            if place.kind == BLOB or place.overlaps(vshards):
                self.segment(place)

    def read(self, place: ChunkPlace, buffer: ChunkBuffer) -> tuple[Header, dict[str, npt.NDArray[Any]]]:
        """Read a chunk and check every bit of it. The columns lie in `buffer`, until its next use.

        Raises
        ------
        CorruptionError
            It names generation, table and chunk, the expected and the found digest.
        """
        segment = self.segment(place)
        if place.offset + place.length > segment.length:
            raise self.damage(place, "ends behind its file")
        if place.length > MOST_CHUNK_BYTES and place.rows > 1:  # before there is memory for it
            raise self.damage(
                place, f"is {place.length} bytes long, where one of several rows has {MOST_CHUNK_BYTES} at most"
            )
        content = buffer.room(place.length)

        def read(piece: memoryview, at: int) -> None:
            segment.read_into(piece, place.offset + at)

        try:
            header, columns = open_chunk(content, place.digest, read)
        except CorruptionError as error:
            raise self.damage(place, str(error), error.expected, error.found) from None
        found = (header.generation, header.rank, header.table, header.number, header.kind, header.rows)
        if found != (self.generation, place.rank, place.table, place.number, place.kind, place.rows):
            raise self.damage(place, f"is another one: (generation, rank, table, number, kind, rows) = {found}")
        return header, columns

    def damage(
        self, place: ChunkPlace, what: str, expected: str | None = None, found: str | None = None
    ) -> CorruptionError:
        """The error for a chunk."""
        digests = f" (expected {expected}, found {found})" if expected else ""
        return CorruptionError(
            f"generation {self.generation}, table {place.name!r}, chunk {place.number} of rank {place.rank}: {what}{digests}",
            generation=self.generation,
            table=place.name,
            chunk=place.number,
            expected=expected,
            found=found,
        )

    def chunks(self) -> Iterator[ChunkPlace]:
        """All chunks, of tables and of the caller's own bytes."""
        for table in self.tables.values():
            yield from table.chunks
        for written in self.blobs.values():
            for places in written.values():
                yield from places

    def close(self) -> None:
        """Close the files; what is read later opens them again."""
        for one in self._segments.values():
            one.close()
        self._segments.clear()


def _places(rank: int, table: int, name: str, page: bytes) -> list[ChunkPlace]:
    records = np.frombuffer(page, CHUNK_RECORD)
    return [
        ChunkPlace(rank, table, name, number, kind, low, high, file, offset, length, rows, bytes(digest))
        for file, number, kind, _, low, high, _, offset, length, rows, digest, _ in records.tolist()
    ]


def open_chain(path: str, generation: int, catalogues: Catalogues) -> list[Level]:
    """The levels that make up a generation: it first, then its parents, up to a full one.

    Raises
    ------
    CorruptionError, FormatVersionError, ConfigError
        One of them does not hold; for a parent the message says whose.
    """
    levels = [Level(path, generation, catalogues)]
    try:
        while (parent := levels[-1].manifest.parent) is not None:
            if len(levels) == MOST_CHAIN:
                raise CorruptionError(
                    f"{path}: more than {MOST_CHAIN} deltas on a full generation", generation=generation
                )
            try:
                levels.append(Level(path, parent, catalogues))
            except Exception as error:
                if isinstance(error, (CorruptionError, FormatVersionError)):
                    error.args = (f"its parent {parent}: {error}",)
                    raise
                raise CorruptionError(f"its parent {parent}: {error}", generation=parent) from error
    except BaseException:
        for level in levels:
            level.close()
        raise
    return levels
