"""Where things stand in a collection: the order of its tables, their dim groups, the columns of its output, and how a
feature-major batch becomes the flat, table-major arrays that the planner and the kernels work on.

Tables of equal dim and dtype stand next to each other, so that one kernel call serves a whole dim group. Groups whose dim
divides by a larger power of two come first: then every group of one contiguous allocation starts at its rows' natural
alignment, without padding. The order of tables in here is *not* the user's; output names and columns are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ._core.batch import batch_offsets
from .config import TableConfig
from .errors import ConfigError, ShapeError
from .features import JaggedFeatures, check_lengths, refuse_lengths
from .rowtypes import ROW_TYPES

__all__ = ["DimGroup", "FlatBatch", "TableLayout"]

REMEMBERED_KEY_LISTS = 64


@dataclass(frozen=True)
class DimGroup:
    """Tables of one dim and dtype: half-open ranges of tables and of columns (a column is one feature of one table)."""

    dim: int
    dtype: str
    first_table: int
    last_table: int
    first_column: int
    last_column: int


@dataclass(frozen=True)
class FlatBatch:
    """One batch, table-major: the values of column 0, then of column 1, ...

    Attributes
    ----------
    keys : int64 (n,)
    table_offsets : int64 (tables + 1,)
    bag_offsets : int64 (columns * batch_size + 1,)
        Positions at which each bag starts; a table's bags are adjacent.
    timestamps : int64 (n,), or None
    clicked : uint8 (n,), or None
        Whether the label of the value's example is above 0; only where a table has the show/click policy.
    weights : float32 tensor (n,), or None
        Per-sample weights in the same order; connected to the caller's weights in autograd.
    lengths : int64 tensor (features of the batch * batch_size,)
        The batch's own.
    sources : int64 (columns,)
        Place of each column's feature in the batch.
    """

    batch_size: int
    keys: np.ndarray
    table_offsets: np.ndarray
    bag_offsets: np.ndarray
    timestamps: np.ndarray | None
    clicked: np.ndarray | None
    weights: torch.Tensor | None
    lengths: torch.Tensor
    sources: np.ndarray

    def more(self) -> dict[str, Any]:
        """Further arguments of `SwapManager.plan`."""
        return {}

    def owned(self) -> FlatBatch:
        """The same with keys and timestamps that nobody else can change: planning reads them more than once."""
        keys, stamps = self.keys, self.timestamps
        if keys.base is None and (stamps is None or stamps.base is None):
            return self
        return replace(self, keys=keys.copy(), timestamps=None if stamps is None else stamps.copy())

    def column_lengths(self) -> list[torch.Tensor]:
        """int64 (batch_size,) of each column."""
        if self.batch_size == 0:
            return [self.lengths] * len(self.sources)
        per_feature = torch.split(self.lengths, self.batch_size)
        return [per_feature[f] for f in self.sources]


class TableLayout:
    """The fixed geometry of a collection's tables.

    Attributes
    ----------
    names : list of str
        Of the tables, in the user's order.
    tables : list of TableConfig
        In the order of the core: dim groups adjacent.
    groups : list of DimGroup
    column_features : list of str
        Input feature of each column, in the order of the core.
    column_offsets : int64 (columns,)
        First output column of each, in the user's order of tables and features.
    column_is_mean : uint8 (columns,)
    filtered : list of bool
        For each dim group whether keys of it may be without a slot (not admitted, or swept in their own batch).
    output_names, output_dims : list
        In the user's order. A feature that several tables share is called ``"feature@table"``, as TorchRec does.
    output_columns : list of int
        Column of each output.
    output_features : list of str
        Input feature of each output.
    weighted : bool or None
        Whether a batch's per-sample weights count: True, and it must bring them; False, never; None (default), where it has them.
    """

    def __init__(self, tables: Sequence[TableConfig]) -> None:
        given: Any = tables
        try:
            tables = list(given)
        except TypeError:  # not iterable
            tables = []
        if not tables or not all(isinstance(table, TableConfig) for table in tables):
            raise ConfigError(f"tables = {given!r}; give a non-empty list of TableConfig")
        names = [table.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"table {name!r} is listed {names.count(name)} times; table names are unique within a collection"
                )
        self.names = names
        self.tables = sorted(tables, key=_place)
        self.index_of = {table.name: t for t, table in enumerate(self.tables)}
        self.column_features: list[str] = []
        self.column_table: list[int] = []
        for t, table in enumerate(self.tables):
            self.column_features += _features_of(table)
            self.column_table += [t] * len(_features_of(table))
        self._first_column = np.searchsorted(self.column_table, np.arange(len(self.tables) + 1))
        self.groups = self._make_groups()
        self.filtered = [
            any(table.admit_and_evict for table in self.tables[g.first_table : g.last_table]) for g in self.groups
        ]
        self._name_outputs(tables)
        self.weighted: bool | None = None
        self._needs_labels = any(
            table.admit_and_evict is not None and table.admit_and_evict.needs_labels for table in self.tables
        )
        self._sources: dict[tuple[str, ...], tuple[np.ndarray, bool]] = {}

    def _make_groups(self) -> list[DimGroup]:
        kinds = [(table.embedding_dim, table.dtype) for table in self.tables]
        starts = [t for t, kind in enumerate(kinds) if t == 0 or kind != kinds[t - 1]]
        stops = [*starts[1:], len(kinds)]
        first = self._first_column
        return [DimGroup(*kinds[a], a, b, int(first[a]), int(first[b])) for a, b in zip(starts, stops, strict=True)]

    def _name_outputs(self, tables: Sequence[TableConfig]) -> None:
        """Set the output names, dims and columns, in the user's order of tables."""
        self.output_names: list[str] = []
        self.output_dims: list[int] = []
        self.output_columns: list[int] = []
        for table in tables:
            first = int(self._first_column[self.index_of[table.name]])
            for k, feature in enumerate(_features_of(table)):
                shared = self.column_features.count(feature) > 1
                self.output_names.append(f"{feature}@{table.name}" if shared else feature)
                self.output_dims.append(table.embedding_dim)
                self.output_columns.append(first + k)
        for name in self.output_names:
            if self.output_names.count(name) > 1:
                raise ConfigError(f"two outputs would be called {name!r}; rename the feature or the table")
        self.column_offsets = np.zeros(len(self.column_features), dtype=np.int64)
        self.column_offsets[self.output_columns] = np.cumsum([0, *self.output_dims[:-1]])
        self.column_is_mean = np.array([self.tables[t].pooling == "mean" for t in self.column_table], dtype=np.uint8)
        self.output_width = sum(self.output_dims)
        self.output_features = [self.column_features[column] for column in self.output_columns]

    def bags(self, group: int, flat: FlatBatch) -> dict[str, Any]:
        """Arguments of ``Backend.lookup`` for pooling the group's part of a batch."""
        spec = self.groups[group]
        columns = slice(spec.first_column, spec.last_column)
        bags = slice(spec.first_column * flat.batch_size, spec.last_column * flat.batch_size + 1)
        return {
            "bag_offsets": flat.bag_offsets[bags],
            "feature_mean": self.column_is_mean[columns],
            "out_cols": self.column_offsets[columns],
        }

    def positions(self, group: int, flat: FlatBatch) -> dict[str, Any]:
        """Arguments of ``Backend.lookup`` for the group's part of a batch as a sequence."""
        spec = self.groups[group]
        return {
            "first_position": int(flat.table_offsets[spec.first_table]),
            "last_position": int(flat.table_offsets[spec.last_table]),
        }

    def _source_columns(self, keys: tuple[str, ...]) -> tuple[np.ndarray, bool]:
        """For each column the place of its feature in `keys`, and whether these are all of `keys` in order."""
        known = self._sources.get(keys)
        if known is not None:
            return known
        place = {key: f for f, key in enumerate(keys)}
        for feature, t in zip(self.column_features, self.column_table, strict=True):
            if feature not in place:
                raise ShapeError(
                    f"the batch has no feature {feature!r}, which table {self.tables[t].name!r} needs; it has {list(keys)!r}"
                )
        source = np.array([place[feature] for feature in self.column_features], dtype=np.int64)
        if len(self._sources) >= REMEMBERED_KEY_LISTS:
            self._sources.clear()
        self._sources[keys] = source, bool(np.array_equal(source, np.arange(len(keys))))
        return self._sources[keys]

    def _clicked(self, labels: torch.Tensor | None, lengths: np.ndarray) -> np.ndarray | None:
        """Whether each value's example was clicked, uint8 (n,); `lengths` are those of the columns' bags.

        Raises
        ------
        ShapeError
            A label is NaN, which is neither a click nor none.
        """
        if labels is None:
            return None
        labels = labels.detach().cpu().reshape(-1)
        if labels.is_floating_point() and bool((unknown := labels.isnan()).any()):
            raise ShapeError(
                f"batch: labels[{int(unknown.nonzero()[0])}] is NaN; give a number, above 0 for a click, or leave the example out"
            )
        clicked = (labels > 0).numpy().astype(np.uint8)
        return np.repeat(np.tile(clicked, len(self.column_features)), lengths)

    def flatten(self, batch: JaggedFeatures) -> FlatBatch:
        """Return `batch` in table-major order. Features that no table uses are left out.

        Raises
        ------
        ShapeError
            A feature is missing, weights are, a table needs labels and one is NaN, or the tensors of the batch were changed
            into something that no longer fits.
        """
        source, identical = self._source_columns(batch._keys)
        size = batch._batch_size
        values, lengths = _host(batch._values), _host(batch._lengths)
        # Checked at construction too, but tensors can change since, and kernels index by these numbers.
        if lengths.size != len(batch._keys) * size:
            raise ShapeError(f"batch: {lengths.size} lengths for {len(batch._keys)} features of {size} examples")
        timestamps = batch._timestamps
        stamps = None if timestamps is None else _host(timestamps)
        weights = None if self.weighted is False else batch._weights
        if self.weighted and weights is None:
            raise ShapeError("batch: it has no weights, and this collection is weighted; give one weight a value")
        if not identical:
            check_lengths("batch", lengths, values.size)
            bags = lengths.reshape(len(batch._keys), size)
            counts = bags.sum(axis=1)
            edges = np.concatenate(([0], np.cumsum(counts)))
            slices = [slice(edges[f], edges[f + 1]) for f in source]
            values = np.concatenate([values[piece] for piece in slices])
            stamps = None if stamps is None else np.concatenate([stamps[piece] for piece in slices])
            if weights is not None:
                # A split's backward is one concatenation; a slice each would pad a full-length gradient each.
                pieces = torch.split(weights, counts.tolist())
                weights = torch.cat([pieces[f] for f in source])
            lengths = bags[source].reshape(-1)
        offsets = batch_offsets(lengths, self._first_column * size, values.size)
        if offsets is None:
            refuse_lengths("batch", lengths, values.size)
        bag_offsets, table_offsets = offsets
        return FlatBatch(
            batch_size=size,
            keys=values,
            table_offsets=table_offsets,
            bag_offsets=bag_offsets,
            timestamps=stamps,
            clicked=self._clicked(batch._labels, lengths) if self._needs_labels else None,
            weights=weights,
            lengths=batch._lengths,
            sources=source,
        )


def _place(table: TableConfig) -> tuple[int, int, int]:
    """What tables are ordered by: alignment of a row, widest first; then dim and dtype."""
    dim, types = table.embedding_dim, list(ROW_TYPES)
    return -min((dim & -dim) * ROW_TYPES[table.dtype].bytes, 64), dim, types.index(table.dtype)


def _features_of(table: TableConfig) -> list[str]:
    """The table's features; `TableConfig` fills in the default, which the type of the field cannot say."""
    features: Any = table.feature_names
    return list(features)


def _host(tensor: torch.Tensor) -> np.ndarray:
    """An integer tensor's values in host memory, without a copy where they are there."""
    values: np.ndarray = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return values
