"""What a rank has written of a generation so far, and the records that its catalogue gets of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import catalogue
from .description import TableDescription
from .manifest import Manifest

__all__ = ["Contents", "WrittenTable"]


class WrittenTable:
    """What is known of a table so far: its place, its chunks, its counts."""

    def __init__(self, number: int, description: TableDescription, whole: bool) -> None:
        self.number = number
        self.description = description
        self.whole = whole
        self.records: list[tuple[Any, ...]] = []
        self.metadata: dict[str, Any] = {}
        self.filter: dict[str, Any] | None = None
        self.filter_changes = False
        self.rows = self.erased = self.bytes = 0

    def about(self) -> dict[str, Any]:
        """Its own record."""
        about = {
            "description": self.description.to_json(),
            "whole": self.whole,
            "rows": self.rows,
            "erased": self.erased,
            "chunks": len(self.records),
            "filter": self.filter,
            "metadata": self.metadata,
        }
        if self.filter_changes:
            about["filter_changes"] = True
        return about


class Contents:
    """The tables and the caller's own bytes of one generation, by name. Thread safety: one thread.

    Attributes
    ----------
    tables : dict of str to WrittenTable
    blobs : dict of str to list
        The chunks of bytes that have a name of their own.
    """

    def __init__(
        self, generation: int, rank: int, world: int, parent: Manifest | None, metadata: dict[str, Any]
    ) -> None:
        self._generation, self._rank, self._world = generation, rank, world
        self._parent, self._metadata = parent, metadata
        self.tables: dict[str, WrittenTable] = {}
        self.blobs: dict[str, list[tuple[Any, ...]]] = {}

    def table(self, description: TableDescription, whole: bool | None = None) -> WrittenTable:
        """The table of that name, new where it is not there yet; `ConfigError` where it is another one, or said to be whole too late."""
        one = self.tables.get(description.name)
        if one is None:
            new = self._parent is None or description.name not in self._parent.tables
            if whole is False and new:
                raise ConfigError(f"table {description.name!r}: the parent lacks it, so it must be written whole")
            one = WrittenTable(len(self.tables), description, new if whole is None else bool(whole))
            self.tables[description.name] = one
        elif one.description is not description and one.description != description:
            raise ConfigError(f"table {description.name!r}: two tables of one name in a generation; name them apart")
        elif whole is not None and whole != one.whole:
            raise ConfigError(f"table {description.name!r}: whole = {whole} after its first rows; say so before")
        return one

    def records(self, files: list[tuple[str, int]]) -> list[catalogue.Record]:
        """All records of the generation, whose segment files have these names and bytes, in the order of their keys."""
        generation, names = self._generation, list(self.blobs)
        body = {
            "parent": self._parent.generation if self._parent else None,
            "rank": self._rank,
            "world": self._world,
            "files": files,
            "tables": list(self.tables),
            "blobs": names,
            "metadata": self._metadata,
        }
        records = [(catalogue.key_of(generation, catalogue.GENERATION), _text(body))]
        for one in self.tables.values():
            records.append((catalogue.key_of(generation, catalogue.TABLE, one.number), _text(one.about())))
        for one in self.tables.values():
            records += _pages(generation, catalogue.CHUNKS, one.number, one.records)
        for number, name in enumerate(names):
            records += _pages(generation, catalogue.BLOB_CHUNKS, number, self.blobs[name])
        return records


def _pages(generation: int, kind: int, table: int, records: list[tuple[Any, ...]]) -> Iterable[catalogue.Record]:
    for page, begin in enumerate(range(0, len(records), catalogue.PAGE_RECORDS)):
        content = np.array(records[begin : begin + catalogue.PAGE_RECORDS], catalogue.CHUNK_RECORD)
        yield catalogue.key_of(generation, kind, table, page), content.tobytes()


def _text(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
