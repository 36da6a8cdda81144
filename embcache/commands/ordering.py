"""Rows of any number and order, put into the order of their keys' hashes, in bounded memory.

`Ordering` does it exactly. Rows are dealt out by the top bits of the hash into buckets of a temporary file; a bucket that fits into memory is sorted
there, one that does not is dealt out again by the next bits. In this order chunks hold neighbouring vshards, a table's pages
are touched one after the other, and equal keys meet. (The partitioning pass of an external radix sort.)

`gathering.WindowFiller` does it for as many rows as fit into memory at a time, without a temporary file: all that is written once is
the checkpoint. Of a table that is larger than a window each chunk holds a few dozenths of the vshards, which is what readers
of some vshards, and `windows_of`, can do with. Equal keys do not meet; `check_unique` looks for them before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.digest import hash_keys
from ..checkpoint import Rows, TableDescription
from ..checkpoint.files import refusals
from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DUPLICATES", "Ordering", "check_unique", "row_dtype"]

DUPLICATES = ("refuse", "first", "last")
_BUCKET_BYTES = 64 << 20  # what is sorted in memory, with what sorting takes for each row
_SORTING_BYTES = 48
_HELD_BYTES = 32 << 20  # of all buckets together, before they are written
_MOST_BITS = 8  # of the hash that are dealt out by at a time
_READ_BYTES = 4 << 20
_KEYS_ONLY = np.dtype([("keys", np.int64)])


def row_dtype(description: TableDescription) -> np.dtype[Any]:
    """A row as one record."""
    fields: list[Any] = [("keys", np.int64)]
    if description.with_filter:
        fields += [("frequencies", np.int64), ("timestamps", np.int64)]
    fields.append(("weights", description.storage, (description.dim,)))
    fields.append(("state", np.float32, (description.state_dim,)))
    return np.dtype(fields)


class Ordering:
    """Takes rows, and gives them back in the order of their hashes, each key once.

    Parameters
    ----------
    description : TableDescription
    where : str
        Where the rows come from, for messages.
    folder : path
        Where the temporary file may lie: it takes as much as the rows.
    expected_rows : int
        About how many come; more are no harm.
    duplicates : {"refuse", "first", "last", "newest"}
        What becomes of a key that comes several times; ``"newest"``: the row with the largest timestamp stays.
    dtype : dtype, optional
        What is kept of a row, ``keys`` among it; default: all.
    """

    def __init__(
        self,
        description: TableDescription,
        where: str,
        folder: str,
        expected_rows: int,
        duplicates: str,
        dtype: np.dtype[Any] | None = None,
        used_bits: int = 0,
    ) -> None:
        self.description = description
        self.dropped = 0
        self._where = where
        self._folder = folder
        self._duplicates = duplicates
        self._dtype = row_dtype(description) if dtype is None else dtype
        self._cost = self._dtype.itemsize + _SORTING_BYTES
        wanted = max(0, (expected_rows * self._cost // _BUCKET_BYTES).bit_length())
        self._bits = min(_MOST_BITS, wanted, 64 - used_bits)
        self._used_bits = used_bits
        count = 1 << self._bits
        self._held: list[list[npt.NDArray[Any]]] = [[] for _ in range(count)]
        self._held_bytes = [0] * count
        self._spilled: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # offset and bytes
        self._file: Any = None
        self._at = 0

    def add(self, rows: Rows) -> None:
        """Take rows; the arrays are copied."""
        records = np.empty(len(rows.keys), self._dtype)
        for what in self._dtype.names or ():
            records[what] = getattr(rows, what)
        self._deal(records)

    def _deal(self, records: npt.NDArray[Any]) -> None:
        if self._bits == 0:
            self._hold(0, records)
            return
        hashes = hash_keys(np.ascontiguousarray(records["keys"]))
        shift = np.uint64(64 - self._used_bits - self._bits)
        buckets = (hashes >> shift & np.uint64((1 << self._bits) - 1)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        records = records[order]
        edges = np.searchsorted(buckets[order], np.arange((1 << self._bits) + 1)).tolist()
        for bucket in np.unique(buckets).tolist():
            self._hold(bucket, records[edges[bucket] : edges[bucket + 1]])

    def _hold(self, bucket: int, records: npt.NDArray[Any]) -> None:
        self._held[bucket].append(records.copy())
        self._held_bytes[bucket] += records.nbytes
        if self._held_bytes[bucket] > _HELD_BYTES >> self._bits:
            self._spill(bucket)

    def _spill(self, bucket: int) -> None:
        with refusals(self._folder, "putting rows into order"):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - it lives as long as this does
            for records in self._held[bucket]:
                self._file.write(records.view(np.uint8).data)
            self._file.flush()
        self._spilled[bucket].append((self._at, self._held_bytes[bucket]))
        self._at += self._held_bytes[bucket]
        self._held[bucket], self._held_bytes[bucket] = [], 0

    def add_records(self, records: npt.NDArray[Any]) -> None:
        """Take rows as records of `dtype`; the array is copied."""
        self._deal(records)

    def add_keys(self, keys: npt.NDArray[np.int64]) -> None:
        """Take rows of which nothing but the keys is kept; the array is copied."""
        self._deal(keys.view(_KEYS_ONLY))

    def drain(self) -> Iterator[Rows]:
        """All rows in order; afterwards there are none.

        Raises
        ------
        ConfigError
            A key came twice, and `duplicates` is ``"refuse"``.
        """
        return map(_rows, self.records())

    def records(self) -> Iterator[npt.NDArray[Any]]:
        """The same as records."""
        for bucket in range(1 << self._bits):
            held = self._held_bytes[bucket] + sum(length for _, length in self._spilled[bucket])
            count = held // self._dtype.itemsize
            if count * self._cost <= 2 * _BUCKET_BYTES:
                records = np.empty(count, self._dtype)
                at = 0
                for piece in self._pieces(bucket):
                    records[at : at + len(piece)] = piece
                    at += len(piece)
                if count:
                    yield from self._sorted(records)
            elif self._used_bits + self._bits >= 64:
                yield from self._one_key(bucket)
            else:
                used = self._used_bits + self._bits
                finer = Ordering(
                    self.description, self._where, self._folder, count, self._duplicates, self._dtype, used
                )
                for piece in self._pieces(bucket):
                    finer._deal(piece)
                yield from finer.records()
                self.dropped += finer.dropped
        if self._file is not None:
            self._file.close()
            self._file = None

    def _pieces(self, bucket: int) -> Iterator[npt.NDArray[Any]]:
        """What a bucket holds, in the order in which it came."""
        most = max(1, _READ_BYTES // self._dtype.itemsize) * self._dtype.itemsize
        for offset, length in self._spilled[bucket]:
            for at in range(offset, offset + length, most):
                content = os.pread(self._file.fileno(), min(most, offset + length - at), at)
                yield np.frombuffer(content, self._dtype)
        yield from self._held[bucket]
        self._held[bucket], self._spilled[bucket] = [], []

    def _sorted(self, records: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
        hashes = hash_keys(np.ascontiguousarray(records["keys"]))
        if (
            self._dtype is _KEYS_ONLY
        ):  # nobody wants them in order, and sorting numbers is faster than finding their order
            ordered = np.sort(hashes)
            again = ordered[1:] == ordered[:-1]
            if again.any():
                self._refuse(int(records["keys"][hashes == ordered[1:][again][0]][0]))
            return
        newest = self._duplicates == "newest"
        order = np.lexsort((records["timestamps"], hashes)) if newest else np.argsort(hashes, kind="stable")
        keys = records["keys"][order]
        again = keys[1:] == keys[:-1]
        if again.any():
            if self._duplicates == "refuse":
                self._refuse(int(keys[1:][again][0]))
            first = self._duplicates == "first"
            order = order[np.r_[True, ~again] if first else np.r_[~again, True]]
            self.dropped += len(keys) - len(order)
        most = max(1, _READ_BYTES // self._dtype.itemsize)
        for at in range(0, len(order), most):
            yield records[order[at : at + most]]

    def _one_key(self, bucket: int) -> Iterator[npt.NDArray[Any]]:
        """A bucket of one hash, and so of one key: the hash of 8 bytes is one to one."""
        kept, count = None, 0
        for piece in self._pieces(bucket):
            if self._duplicates == "newest":
                both = piece if kept is None else np.concatenate([kept, piece])
                at = int(both["timestamps"].argmax())
                kept = both[at : at + 1]
            elif kept is None or self._duplicates == "last":
                kept = piece[-1:] if self._duplicates == "last" else piece[:1]
            count += len(piece)
            if count > 1 and self._duplicates == "refuse":
                self._refuse(int(piece["keys"][0]))
        assert kept is not None
        self.dropped += count - 1
        yield kept

    def _refuse(self, key: int) -> None:
        raise ConfigError(
            f"{self._where}: table {self.description.name!r}: key {key} comes more than once; repair the file, or say which of its rows "
            "counts with --duplicates first or last"
        )


def _rows(records: npt.NDArray[Any]) -> Rows:
    names = records.dtype.names or ()
    columns = {what: np.ascontiguousarray(records[what]) for what in names}
    return Rows(
        columns["keys"], columns["weights"], columns["state"], columns.get("frequencies"), columns.get("timestamps")
    )


def check_unique(
    description: TableDescription, where: str, pieces: Iterator[npt.NDArray[np.int64]], folder: str, count: int
) -> None:
    """Raise `ConfigError` where one of about `count` keys comes more than once; the temporary file takes 8 bytes a key."""
    ordering = Ordering(description, where, folder, count, "refuse", _KEYS_ONLY)
    for keys in pieces:
        ordering.add_keys(keys)
    for _ in ordering.records():
        pass
