"""Counts and times of a RecSDK filter, brought to the rows of a table.

Counts stand in the keys' order, times in one of their own: these are put into the order of hashes, in which the rows come too, and
both are walked through together, in bounded memory. Of a key with several times the largest counts.

A row with a time has been met, so it counts once at least. Of a row without one nobody can say when it was last used: at the latest at
the newest time there is, or at that which the user says, and this is what it gets. Where there is no time at all it counts as never met:
with a count and no time the first sweep would take it, as it is it stays until it has been used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.digest import hash_keys
from .._core.filter import FeatureFilter
from ..checkpoint import Rows, TableDescription
from ..config import AdmitAndEvictConfig
from ..filterfile import meaning
from .incoming import Pieces, StreamArrays
from .ordering import Ordering
from .streams import Stream

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RULE", "CountedArrays", "Times"]

RULE = meaning(AdmitAndEvictConfig())  # counts are of occurrences, times are timestamps, and there is no sketch
_NO_TIME = -(2**63)
_PAIR = np.dtype([("keys", np.int64), ("timestamps", np.int64)])
_PAIRS = 1 << 16  # that are looked at together


class CountedArrays(StreamArrays):
    """A save's rows with their counts, 0 where there is none; times come later."""

    def __init__(self, where: str, streams: dict[str, Stream], names: dict[str, str], counts: Stream | None) -> None:
        super().__init__(where, streams, names)
        self._counts = counts
        self.filtered = True

    def pieces(self, rows: int) -> Iterator[Pieces]:
        for piece in super().pieces(rows):
            n = len(piece.keys)
            counts = np.zeros(n, np.int64) if self._counts is None else np.maximum(self._counts.take(n), 0)
            yield replace(piece, frequencies=counts, timestamps=np.full(n, _NO_TIME))
        if self._counts is not None:
            self._counts.end()


class Times:
    """The times of a table's keys.

    Parameters
    ----------
    where : str
        For messages.
    pairs : list of (Stream, Stream)
        Keys, and their times.
    others : int, optional
        The time of rows without one; default: the newest there is.
    no_key : int
        What stands for none among the keys.

    Attributes
    ----------
    found, without_row : int
        Keys with a time, by whether there is a row; known once all rows have been joined.
    newest, others : int or None
        The newest time, and that of rows without one.
    """

    def __init__(self, where: str, pairs: list[tuple[Stream, Stream]], others: int | None, no_key: int) -> None:
        self._where = where
        self._pairs = pairs
        self._no_key = no_key
        self.others = others
        self.newest: int | None = None
        self.found = self.without_row = 0

    def join(self, pieces: Iterator[Rows], description: TableDescription, folder: str) -> Iterator[Rows]:
        """The rows with their times; they come in the order of their hashes, each key once. `folder` is for a temporary file."""
        times = self._ordered(description, folder).records()
        held, hashes = self._next(times)
        for rows in pieces:
            of_rows = hash_keys(rows.keys)
            last, known = np.full(len(of_rows), _NO_TIME), np.zeros(len(of_rows), bool)
            while held is not None:
                at = np.searchsorted(of_rows, hashes)
                at[at == len(of_rows)] = 0
                found = of_rows[at] == hashes
                last[at[found]], known[at[found]] = held["timestamps"][found], True
                if hashes[-1] > of_rows[-1]:
                    break
                held, hashes = self._next(times)
            self.found += int(np.count_nonzero(known))
            yield self._timed(rows, last, known)
        while held is not None:
            held, hashes = self._next(times)
        self.without_row -= self.found

    def _next(self, times: Iterator[npt.NDArray[Any]]) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.uint64]]:
        held = next(times, None)
        if held is None:
            return None, np.empty(0, np.uint64)
        self.without_row += len(held)
        return held, hash_keys(np.ascontiguousarray(held["keys"]))

    def _timed(self, rows: Rows, last: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]) -> Rows:
        assert rows.frequencies is not None
        if self.others is None:
            return replace(rows, frequencies=np.zeros_like(rows.frequencies), timestamps=last)
        return replace(
            rows, frequencies=np.maximum(rows.frequencies, 1), timestamps=np.where(known, last, np.int64(self.others))
        )

    def _ordered(self, description: TableDescription, folder: str) -> Ordering:
        """All pairs, each key once with its largest time, in the order of hashes; and the newest time."""
        count = sum(keys.rows for keys, _ in self._pairs)
        ordering = Ordering(description, self._where, folder, count, "newest", _PAIR)
        for keys, times in self._pairs:
            for at in range(0, keys.rows, _PAIRS):
                records = np.empty(min(_PAIRS, keys.rows - at), _PAIR)
                for what, stream in zip(_PAIR.names or (), (keys, times), strict=True):
                    records[what] = stream.take(len(records))
                records = records[records["keys"] != self._no_key]
                if len(records):
                    newest = int(records["timestamps"].max())
                    self.newest = newest if self.newest is None else max(self.newest, newest)
                ordering.add_records(records)
        if self.others is None:
            self.others = self.newest
        return ordering

    def filter_state(self) -> dict[str, Any]:
        """What a filter holds that has met the newest time and has no key waiting."""
        state = FeatureFilter(AdmitAndEvictConfig(), 0).state()
        known = [time for time in (self.newest, self.others) if time is not None]
        return state | {"newest": max(known, default=_NO_TIME)}
