"""A table that comes from foreign arrays: what it is, and its rows in pieces, converted and checked.

Keys are any integers that int64 holds; weights and state any floating-point numbers, rounded to nearest even where the
table's type is narrower. What would be lost (a number beyond the type's range) or is hardly meant (NaN) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..checkpoint import Rows, TableDescription
from ..errors import ConfigError, CorruptionError
from ..rowtypes import ROW_TYPES
from .recsdk import STATES
from .streams import BFLOAT16, Stream

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Arrays", "Incoming", "Pieces", "described", "natural_dtype"]

_LARGEST = 2**63
_MAY_LACK = ("state", *STATES)  # what nobody has asked for by name


@dataclass
class Pieces:
    """Arrays of some rows as they are in the file; bfloat16 as int16."""

    keys: npt.NDArray[Any]
    weights: npt.NDArray[Any]
    state: npt.NDArray[Any] | None
    frequencies: npt.NDArray[Any] | None
    timestamps: npt.NDArray[Any] | None


class Arrays(Protocol):
    """Where pieces come from.

    Attributes
    ----------
    where : str
    count, dim, state_dim : int
    dtype : str
        Of the weights in the file: NumPy's name, or ``"bfloat16"``.
    filtered : bool
        Whether there are frequencies and timestamps.
    """

    where: str
    count: int
    dim: int
    state_dim: int
    dtype: str
    filtered: bool

    def pieces(self, rows: int) -> Iterator[Pieces]:
        """All rows, at most so many at a time."""

    def keys(self, rows: int) -> Iterator[npt.NDArray[Any]]:
        """All keys, at most so many at a time, before the first piece is asked for; none where they are counted up."""


class StreamArrays:
    """Pieces from streams: each array's rows in the same order."""

    def __init__(
        self, where: str, streams: dict[str, Stream], names: dict[str, str], first_key: int | None = None
    ) -> None:
        self.where = where
        self._keys = None if first_key is not None else self._of(streams, names["keys"])
        self._first_key = first_key or 0
        self._weights = self._of(streams, names["weights"])
        states = names["state"].split("+")
        self._states = [self._of(streams, one) for one in states if one in streams or one not in _MAY_LACK]
        self._counters = [streams[names[one]] for one in ("frequencies", "timestamps") if names[one] in streams]
        if len(self._counters) == 1:
            raise ConfigError(f"{where}: has one of frequencies and timestamps; a table has both, or none")
        self.count = self._weights.rows
        self.dim, self.dtype = self._weights.width, str(self._weights.dtype)
        self.state_dim = sum(one.width for one in self._states)
        self.filtered = bool(self._counters)
        if len(self._weights.shape) != 2:
            raise ConfigError(f"{self._weights.where}: has shape {self._weights.shape}; give a row for each key")
        for one in ([self._keys] if self._keys else []) + self._states + self._counters:
            if one.rows != self.count:
                raise ConfigError(f"{one.where}: has {one.rows} rows, the weights {self.count}; give as many")
            if one not in self._states and len(one.shape) != 1:
                raise ConfigError(f"{one.where}: has shape {one.shape}; give one dimension")

    def _of(self, streams: dict[str, Stream], name: str) -> Stream:
        if name not in streams:
            found = ", ".join(map(repr, sorted(streams))) or "none"
            raise ConfigError(
                f"{self.where}: no array {name!r}; there is {found}: say which with --keys, --weights, --state"
            )
        return streams[name]

    def keys(self, rows: int) -> Iterator[npt.NDArray[Any]]:
        if self._keys is not None:
            for at in range(0, self.count, rows):
                yield self._keys.take(min(rows, self.count - at))
            self._keys.rewind()

    def pieces(self, rows: int) -> Iterator[Pieces]:
        for at in range(0, self.count, rows):
            n = min(rows, self.count - at)
            if self._keys is None:
                keys: Any = np.arange(self._first_key + at, self._first_key + at + n, dtype=np.int64)
            else:
                keys = self._keys.take(n)
            weights = self._weights.take(n)
            states = [_numbers(one, one.take(n)).reshape(n, one.width) for one in self._states]
            counters: list[Any] = [one.take(n) for one in self._counters] or [None, None]
            state = None if not states else states[0] if len(states) == 1 else np.concatenate(states, axis=1)
            yield Pieces(keys, weights, state, *counters)
        for one in ([self._keys] if self._keys else []) + [self._weights, *self._states, *self._counters]:
            one.end()


def _numbers(stream: Stream, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return ROW_TYPES[BFLOAT16].from_storage(array) if stream.dtype == BFLOAT16 else array


def natural_dtype(dtype: str) -> str:
    """The row type that weights of a file's dtype have without being told otherwise."""
    return dtype if dtype == BFLOAT16 else "float16" if np.dtype(dtype) == np.float16 else "float32"


def described(text: str | None, where: str) -> TableDescription | None:
    """The description that an exported file brings along; `CorruptionError` where it is none."""
    if text is None:
        return None
    try:
        return TableDescription.from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{where}: its description of the table is damaged ({error})") from None


class Incoming:
    """Rows of a table that is described and comes from arrays.

    Attributes
    ----------
    description : TableDescription
    arrays : Arrays
    without_key : int
        Rows of `no_key` so far, which are left out.
    """

    def __init__(
        self, description: TableDescription, arrays: Arrays, allow_nan: bool, no_key: int | None = None
    ) -> None:
        self.description = description
        self.arrays = arrays
        self.without_key = 0
        self._allow_nan = allow_nan
        self._no_key = no_key
        for what, found, wanted in (
            ("dim", arrays.dim, description.dim),
            ("state_dim", arrays.state_dim, description.state_dim),
        ):
            if found != wanted:
                raise ConfigError(f"{arrays.where}: has {what} {found}, its description says {wanted}")

    def keys(self, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """All keys in the file's order, at most so many at a time, before `rows`; none where they are counted up."""
        at = 0
        for keys in self.arrays.keys(most):
            found = self._integers("key", keys, at)
            yield found if self._no_key is None else found[found != self._no_key]
            at += len(keys)

    def rows(self, most: int) -> Iterator[Rows]:
        """All rows in the file's order, at most so many at a time.

        Raises
        ------
        ConfigError
            A key that int64 does not hold, a number that the type does not hold, NaN or infinity; with its place.
        CorruptionError
            The file ends before its time.
        """
        at, where, table = 0, self.arrays.where, self.description
        for piece in self.arrays.pieces(most):
            n = len(piece.keys)
            keys = self._integers("key", piece.keys, at)
            weights = self._stored(piece.weights, at)
            state = np.empty((n, 0), np.float32)
            if piece.state is not None:
                state = self._floats("state", piece.state, at)
            counters = []
            for what, values in (("frequency", piece.frequencies), ("timestamp", piece.timestamps)):
                if table.with_filter and values is not None:
                    counters.append(self._integers(what, values, at))
            if table.with_filter and not counters:
                raise ConfigError(f"{where}: lacks frequencies and timestamps, which its description says it has")
            at += n
            columns = [keys, weights, state, *counters]
            if self._no_key is not None and self._no_key in keys:
                kept = keys != self._no_key
                columns = [one[kept] for one in columns]
                self.without_key += n - len(columns[0])
            yield Rows(*columns, *([] if counters else [None, None]))

    def _integers(self, what: str, values: npt.NDArray[Any], at: int) -> npt.NDArray[np.int64]:
        if values.dtype.kind not in "iu":
            raise ConfigError(f"{self.arrays.where}: a {what} has dtype {values.dtype}; give integers")
        if values.dtype == np.uint64 and len(values) and int(values.max()) >= _LARGEST:
            row = int(np.argmax(values >= np.uint64(_LARGEST)))
            raise ConfigError(
                f"{self.arrays.where}: row {at + row}: {what} {int(values[row])} is no int64; store the same bits as int64 if "
                "that is what they are"
            )
        return np.ascontiguousarray(values, np.int64)

    def _stored(self, values: npt.NDArray[Any], at: int) -> npt.NDArray[Any]:
        """Weights as the table keeps them."""
        table = self.description
        if table.dtype == BFLOAT16 and self.arrays.dtype == BFLOAT16:
            self._check("weights", values & np.int16(0x7F80) == np.int16(0x7F80), at)
            return values
        if self.arrays.dtype == BFLOAT16:
            values = ROW_TYPES[BFLOAT16].from_storage(values)
        if table.dtype == "float16" and values.dtype == np.float16:
            self._check("weights", ~np.isfinite(values), at)
            return values
        numbers = self._floats("weights", values, at)
        if table.dtype == "float32":
            return numbers
        end = ROW_TYPES[table.dtype].end
        with np.errstate(invalid="ignore"):
            beyond = (np.abs(numbers) >= end) & np.isfinite(numbers)
        if beyond.any():
            row, column = np.unravel_index(int(beyond.argmax()), beyond.shape)
            raise ConfigError(
                f"{self.arrays.where}: row {at + int(row)}: weight {float(numbers[row, column])} is infinite in {table.dtype}; give "
                "--dtype float32"
            )
        return numbers.astype(np.float16) if table.dtype == "float16" else _bfloat16(numbers)

    def _floats(self, what: str, values: npt.NDArray[Any], at: int) -> npt.NDArray[np.float32]:
        if values.dtype.kind != "f":
            raise ConfigError(f"{self.arrays.where}: {what} has dtype {values.dtype}; give floating-point numbers")
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(values, np.float32)
        self._check(what, ~np.isfinite(numbers), at)
        if self._allow_nan and values.dtype.itemsize > 4 and not np.array_equal(np.isinf(values), np.isinf(numbers)):
            raise ConfigError(f"{self.arrays.where}: {what}: a number behind row {at} is infinite in float32")
        return numbers

    def _check(self, what: str, wrong: npt.NDArray[np.bool_], at: int) -> None:
        if not self._allow_nan and wrong.any():
            row = int(np.argmax(wrong.reshape(len(wrong), -1).any(axis=1)))
            raise ConfigError(
                f"{self.arrays.where}: row {at + row}: {what} holds NaN, infinity or a number beyond float32; repair the row, or "
                "give --allow-nan to take NaN and infinity as they are"
            )


def _bfloat16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Rounded to nearest even; a NaN stays one."""
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    kept = np.where(np.isnan(numbers), bits >> np.uint32(16) | np.uint32(0x40), rounded)
    return kept.astype(np.uint16).view(np.int16)
