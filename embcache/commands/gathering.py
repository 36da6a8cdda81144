"""Pieces of rows of any size to chunks of a checkpoint: in the order in which they come, or a window of them by hash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._core.digest import hash_keys
from ..checkpoint import Rows, TableDescription, Writer
from .ordering import row_dtype

__all__ = ["ChunkFiller", "WindowFiller"]

_WINDOW_BYTES = 192 << 20  # of rows that are put into order together where there is no temporary file


class _Filler:
    """Takes rows of one table into arrays, and writes them whenever those are full. It alone writes meanwhile."""

    def __init__(self, writer: Writer, description: TableDescription, columns: Mapping[str, np.ndarray]) -> None:
        self._writer = writer
        self._description = description
        self._columns = columns
        self._held = 0

    def add(self, rows: Rows) -> None:
        """Take rows; the arrays are copied."""
        at, most = 0, len(self._columns["keys"])
        while at < len(rows.keys):
            n = min(most - self._held, len(rows.keys) - at)
            for what, column in self._columns.items():
                column[self._held : self._held + n] = getattr(rows, what)[at : at + n]
            self._held += n
            at += n
            if self._held == most:
                self.end()

    def end(self) -> None:
        """Write what is left."""
        if self._held:
            self._write()
            self._held = 0

    def _write(self) -> None:
        raise NotImplementedError


class ChunkFiller(_Filler):
    """Writes a chunk whenever there are rows enough for one."""

    def __init__(self, writer: Writer, description: TableDescription) -> None:
        most = writer.rows_per_chunk(description)
        columns = {what: array.copy() for what, array in writer.rows_to_fill(description, most).items()}
        super().__init__(writer, description, columns)

    def _write(self) -> None:
        arrays: dict[str, Any] = {what: column[: self._held] for what, column in self._columns.items()}
        self._writer.write_rows(self._description, **arrays)


class WindowFiller(_Filler):
    """Takes rows of one table, each key once, and writes a window of them at a time, in the order of their hashes.

    Parameters
    ----------
    writer : Writer
    description : TableDescription
    expected_rows : int
        How many come, so that windows are of one size; more are no harm.
    """

    def __init__(self, writer: Writer, description: TableDescription, expected_rows: int) -> None:
        windows = -(-expected_rows * description.row_bytes // _WINDOW_BYTES) or 1
        most, dtype = max(-(-expected_rows // windows), 1), row_dtype(description)
        columns = {what: np.empty((most, *dtype[what].shape), dtype[what].base) for what in dtype.names or ()}
        super().__init__(writer, description, columns)

    def _write(self) -> None:
        hashes = hash_keys(self._columns["keys"][: self._held])
        # By more bits than vshards have, few enough for a radix sort.
        order = np.argsort((hashes >> np.uint64(48)).astype(np.uint16), kind="stable")
        most = self._writer.rows_per_chunk(self._description)
        for at in range(0, self._held, most):
            part = order[at : at + most]
            for what, array in self._writer.rows_to_fill(self._description, len(part)).items():
                np.take(self._columns[what], part, axis=0, out=array, mode="clip")  # "raise" would take a copy of all
            self._writer.write_filled(self._description, len(part))
