"""Pieces of rows of any size to full chunks of a checkpoint."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Rows, TableDescription, Writer

__all__ = ["ChunkFiller"]


class ChunkFiller:
    """Takes rows of one table and writes a chunk whenever there are enough for one. It alone writes meanwhile."""

    def __init__(self, writer: Writer, description: TableDescription) -> None:
        self._writer = writer
        self._description = description
        self._most = writer.rows_per_chunk(description)
        self._held = 0
        self._arrays = {what: array.copy() for what, array in writer.rows_to_fill(description, self._most).items()}

    def add(self, rows: Rows) -> None:
        """Take rows; the arrays are copied."""
        at = 0
        while at < len(rows.keys):
            n = min(self._most - self._held, len(rows.keys) - at)
            for what, array in self._arrays.items():
                array[self._held : self._held + n] = getattr(rows, what)[at : at + n]
            self._held += n
            at += n
            if self._held == self._most:
                self.end()

    def end(self) -> None:
        """Write what is left."""
        if self._held:
            arrays: dict[str, Any] = {what: array[: self._held] for what, array in self._arrays.items()}
            self._writer.write_rows(self._description, **arrays)
            self._held = 0
