"""The geometry of a collection: order of tables, dim groups, output columns, and flattening of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embcache.config import TableConfig
from embcache.errors import ConfigError, ShapeError
from embcache.features import JaggedFeatures
from embcache.layout import TableLayout


def test_tables_of_equal_dim_stand_together_and_outputs_keep_the_users_order():
    layout = TableLayout(
        [
            TableConfig("odd", 3, ["a"]),
            TableConfig("wide", 16, ["b", "c"]),
            TableConfig("odd2", 3, ["d"], pooling="mean"),
            TableConfig("eight", 8, ["e"]),
        ]
    )
    assert [table.name for table in layout.tables] == ["wide", "eight", "odd", "odd2"]
    assert [(g.dim, g.first_table, g.last_table, g.first_column, g.last_column) for g in layout.groups] == [
        (16, 0, 1, 0, 2),
        (8, 1, 2, 2, 3),
        (3, 2, 4, 3, 5),
    ]
    assert layout.column_features == ["b", "c", "e", "a", "d"]
    assert layout.output_names == ["a", "b", "c", "d", "e"] and layout.output_dims == [3, 16, 16, 3, 8]
    assert layout.column_offsets.tolist() == [3, 19, 38, 0, 35]
    assert layout.column_is_mean.tolist() == [0, 0, 0, 0, 1]
    assert layout.output_width == 46


def test_a_feature_shared_by_tables_is_named_as_torchrec_does():
    layout = TableLayout([TableConfig("t1", 4, ["x", "y"]), TableConfig("t2", 4, ["x"])])
    assert layout.output_names == ["x@t1", "y", "x@t2"]


def make_batch(**changes: object) -> JaggedFeatures:
    arguments: dict = {
        "keys": ["spare", "y", "x"],
        "values": torch.tensor([100, 10, 11, 12, 1, 2, 3]),
        "lengths": torch.tensor([1, 0, 2, 1, 0, 3]),
        "weights": torch.arange(7.0),
        "timestamps": torch.arange(7),
    }
    return JaggedFeatures(**{**arguments, **changes})


def test_flatten_orders_by_table_and_shares_features():
    layout = TableLayout([TableConfig("t1", 4, ["x", "y"]), TableConfig("t2", 4, ["x"])])
    flat = layout.flatten(make_batch())
    assert flat.batch_size == 2
    assert flat.keys.tolist() == [1, 2, 3, 10, 11, 12, 1, 2, 3]
    assert flat.table_offsets.tolist() == [0, 6, 9]
    assert flat.bag_offsets.tolist() == [0, 0, 3, 5, 6, 6, 9]
    assert flat.timestamps.tolist() == [4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert flat.weights.tolist() == [4, 5, 6, 1, 2, 3, 4, 5, 6]
    assert [lengths.tolist() for lengths in flat.column_lengths()] == [[0, 3], [2, 1], [0, 3]]


def test_weights_stay_connected_to_the_callers():
    layout = TableLayout([TableConfig("t1", 4, ["x", "y"]), TableConfig("t2", 4, ["x"])])
    weights = torch.ones(7, requires_grad=True)
    layout.flatten(make_batch(weights=weights)).weights.backward(torch.arange(9.0))
    assert weights.grad.tolist() == [0, 3, 4, 5, 0 + 6, 1 + 7, 2 + 8]


def test_a_batch_in_table_order_is_not_copied():
    layout = TableLayout([TableConfig("x", 4), TableConfig("y", 4)])
    values = torch.tensor([5, 6, 7])
    flat = layout.flatten(JaggedFeatures(["x", "y"], values, torch.tensor([1, 2])))
    assert np.shares_memory(flat.keys, values.numpy())
    assert flat.table_offsets.tolist() == [0, 1, 3]


@pytest.mark.parametrize("size", [0, 3])
def test_empty_batches_flatten(size):
    layout = TableLayout([TableConfig("x", 4), TableConfig("y", 8)])
    flat = layout.flatten(JaggedFeatures(["x", "y"], [], torch.zeros(2 * size, dtype=torch.int64)))
    assert flat.keys.dtype == np.int64 and flat.table_offsets.tolist() == [0, 0, 0]
    assert flat.bag_offsets.tolist() == [0] * (2 * size + 1) and len(flat.column_lengths()) == 2


def test_i11_a_missing_feature_is_named_with_its_table():
    layout = TableLayout([TableConfig("t1", 4, ["x", "z"])])
    with pytest.raises(ShapeError, match=r"no feature 'z', which table 't1' needs; it has \['spare', 'y', 'x'\]"):
        layout.flatten(make_batch())


def test_i11_lengths_spoiled_after_construction_are_refused():
    layout = TableLayout([TableConfig("x", 4), TableConfig("y", 4)])
    batch = make_batch()
    batch.lengths()[5] = 1 << 40
    with pytest.raises(ShapeError, match="1099511627776"):
        layout.flatten(batch)


def test_i11_lengths_resized_after_construction_are_refused():
    layout = TableLayout([TableConfig("x", 4), TableConfig("y", 4)])
    batch = make_batch()
    batch.lengths().resize_(5)
    with pytest.raises(ShapeError, match="5 lengths for 3 features of 2 examples"):
        layout.flatten(batch)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "non-empty list"),
        (TableConfig("a", 4), "non-empty list"),
        ([("a", 4)], "non-empty list"),
        ([TableConfig("a", 4), TableConfig("a", 8)], "table 'a' is listed 2 times"),
        ([TableConfig("t", 4, ["x", "x@u"]), TableConfig("u", 4, ["x"])], "called 'x@u'"),
    ],
)
def test_i11_bad_tables_are_named(tables, message):
    with pytest.raises(ConfigError, match=message):
        TableLayout(tables)
