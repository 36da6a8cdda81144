"""Tables in Parquet files, by pyarrow, which is there only where somebody has installed it.

Columns have the names of the arrays (``keys``, ``weights``, ``state``, ``frequencies``, ``timestamps``); weights and state are
lists of one length. Row groups are read a few pages at a time.

What ends a file says of each of its row groups where it lies, and is in memory as a whole, as is a group that is being filled: groups are
larger where there is more to write, so that both stay small. (Of 1 TB, groups of 70 MB, and 140 MB for the end.)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..checkpoint import Rows, TableDescription
from ..checkpoint.files import refusals
from ..errors import ConfigError, CorruptionError
from ..rowtypes import ROW_TYPES
from .incoming import Pieces
from .streams import DESCRIPTION

__all__ = ["ParquetArrays", "ParquetWriter", "arrow_package"]

_GROUP_BYTES = 16 << 20
_ENDING_BYTES = 10_000  # of memory for each group, as measured of five columns
_BUFFER_BYTES = 1 << 20
_COUNTERS = ("frequencies", "timestamps")


def arrow_package() -> Any:
    """pyarrow; an `ImportError` that says what to do where it is missing."""
    try:
        for module in ("pyarrow.compute", "pyarrow.parquet"):
            importlib.import_module(module)
    except ImportError:
        raise ImportError(
            "Parquet needs the package pyarrow: pip install 'embcache[parquet]'; .npz and .safetensors need none"
        ) from None
    return importlib.import_module("pyarrow")


class ParquetArrays:
    """See `incoming.Arrays`."""

    dtype: str

    def __init__(self, path: str, names: dict[str, str], stack: ExitStack) -> None:
        self._arrow = arrow_package()
        self._broken = (self._arrow.ArrowException, OSError, UnicodeError)
        self.where = path
        self._names = names
        try:
            self._open(path, names, stack)
        except self._broken as error:
            raise self._damaged(error) from None

    def _open(self, path: str, names: dict[str, str], stack: ExitStack) -> None:
        source = stack.enter_context(self._arrow.OSFile(path, "rb"))
        self._file = self._arrow.parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        schema = self._file.schema_arrow
        self.about = (schema.metadata or {}).get(DESCRIPTION.encode())
        self.count = self._file.metadata.num_rows
        found = set(schema.names)
        for what in ("keys", "weights"):
            if names[what] not in found:
                known = ", ".join(map(repr, sorted(found)))
                raise ConfigError(
                    f"{path}: no column {names[what]!r}; there is {known}: say which with --keys, --weights"
                )
        self._states = [one for one in names["state"].split("+") if one in found or one != "state"]
        if set(self._states) - found:
            raise ConfigError(f"{path}: no column {names['state']!r}; there is {', '.join(map(repr, sorted(found)))}")
        counters = [names[one] in found for one in _COUNTERS]
        if counters[0] != counters[1]:
            raise ConfigError(f"{path}: has one of frequencies and timestamps; a table has both, or none")
        self.filtered = counters[0]
        self.dtype = self._list_type(schema.field(names["weights"]))
        first = self._file.schema_arrow.empty_table() if self.count == 0 else next(self._batches(1), None)
        self.dim = self._width(first, names["weights"])
        self._widths = [self._width(first, one) for one in self._states]
        self.state_dim = sum(self._widths)

    def _list_type(self, field: Any) -> str:
        types, kind = self._arrow.types, field.type
        if not (
            types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        ) or not types.is_floating(kind.value_type):
            raise ConfigError(
                f"{self.where}: column {field.name!r} has type {kind}; give lists of floating-point numbers"
            )
        return str(np.dtype(kind.value_type.to_pandas_dtype()))

    def _width(self, batch: Any, name: str) -> int:
        kind = self._file.schema_arrow.field(name).type
        self._list_type(self._file.schema_arrow.field(name))
        if self._arrow.types.is_fixed_size_list(kind):
            return int(kind.list_size)
        if self.count == 0:
            raise ConfigError(f"{self.where}: has no rows, and column {name!r} does not say of how many numbers one is")
        return len(batch.column(name)[0])

    def keys(self, rows: int) -> Iterator[Any]:
        try:
            at = 0
            for batch in self._file.iter_batches(rows, columns=[self._names["keys"]], use_threads=False):
                yield self._plain(batch, self._names["keys"], at)
                at += batch.num_rows
        except self._broken as error:
            raise self._damaged(error) from None

    def _batches(self, rows: int) -> Iterator[Any]:
        columns = [self._names["keys"], self._names["weights"], *self._states]
        columns += [self._names[one] for one in _COUNTERS] if self.filtered else []
        yield from self._file.iter_batches(rows, columns=columns, use_threads=False)

    def _damaged(self, error: Exception) -> CorruptionError:
        return CorruptionError(f"{self.where}: is no Parquet file, or is damaged ({error}); get it anew")

    def pieces(self, rows: int) -> Iterator[Pieces]:
        try:
            yield from self._pieces(rows)
        except self._broken as error:
            raise self._damaged(error) from None

    def _pieces(self, rows: int) -> Iterator[Pieces]:
        at = 0
        for batch in self._batches(rows):
            keys = self._plain(batch, self._names["keys"], at)
            weights = self._lists(batch, self._names["weights"], self.dim, at)
            states = [
                self._lists(batch, name, width, at) for name, width in zip(self._states, self._widths, strict=True)
            ]
            counters = (
                [self._plain(batch, self._names[one], at) for one in _COUNTERS] if self.filtered else [None, None]
            )
            yield Pieces(keys, weights, np.concatenate(states, axis=1) if states else None, *counters)
            at += batch.num_rows

    def _plain(self, batch: Any, name: str, at: int) -> Any:
        column = batch.column(name)
        if column.null_count or not self._arrow.types.is_primitive(column.type):
            raise ConfigError(
                f"{self.where}: column {name!r} has nulls, or values of type {column.type}, behind row {at}"
            )
        return column.to_numpy(zero_copy_only=False)

    def _lists(self, batch: Any, name: str, width: int, at: int) -> Any:
        column = batch.column(name)
        values = column.flatten()
        lengths = self._arrow.compute.list_value_length(column)
        if (
            column.null_count
            or values.null_count
            or len(values) != width * len(column)
            or (len(column) and int(self._arrow.compute.min(lengths).as_py()) != width)
        ):
            raise ConfigError(
                f"{self.where}: column {name!r} has a null, or a list without {width} numbers, behind row {at}"
            )
        return values.to_numpy(zero_copy_only=False).reshape(-1, width)


class ParquetWriter:
    """See `outgoing.Writer`; bfloat16 becomes float32. `count` rows are expected."""

    def __init__(self, path: str, description: TableDescription, about: str, count: int) -> None:
        arrow = self._arrow = arrow_package()
        self._description = description
        self._kind = ROW_TYPES[description.dtype]
        real = {"float32": arrow.float32(), "float16": arrow.float16()}[str(self._kind.door)]
        fields = [("keys", arrow.int64()), ("weights", arrow.list_(real, description.dim))]
        if description.state_dim:
            fields.append(("state", arrow.list_(arrow.float32(), description.state_dim)))
        if description.with_filter:
            fields += [(one, arrow.int64()) for one in _COUNTERS]
        self._schema = arrow.schema(fields, metadata={DESCRIPTION: about})
        self._path = path
        self._writer = arrow.parquet.ParquetWriter(path, self._schema, compression="none", use_dictionary=False)
        self._group_bytes = max(_GROUP_BYTES, math.isqrt(count * description.row_bytes * _ENDING_BYTES // 2))
        self._pending: list[Any] = []
        self._held = 0

    def add(self, rows: Rows) -> None:
        """Take rows; the arrays are copied."""
        arrow, n = self._arrow, len(rows.keys)
        columns = [arrow.array(rows.keys.copy()), self._lists(self._kind.from_storage(rows.weights))]
        if self._description.state_dim:
            columns.append(self._lists(rows.state))
        if rows.frequencies is not None and rows.timestamps is not None:
            columns += [arrow.array(rows.frequencies.copy()), arrow.array(rows.timestamps.copy())]
        self._pending.append(arrow.RecordBatch.from_arrays(columns, schema=self._schema))
        self._held += n * self._description.row_bytes
        if self._held > self._group_bytes:
            self._flush()

    def _lists(self, numbers: Any) -> Any:
        flat = self._arrow.array(np.ascontiguousarray(numbers).reshape(-1).copy())
        return self._arrow.FixedSizeListArray.from_arrays(flat, numbers.shape[1])

    def _flush(self) -> None:
        if self._pending:
            with refusals(self._path, "exporting"):
                self._writer.write_table(self._arrow.Table.from_batches(self._pending))
        self._pending, self._held = [], 0

    def end(self) -> None:
        """Write what is left, and what ends the file."""
        self._flush()
        with refusals(self._path, "exporting"):
            self._writer.close()
