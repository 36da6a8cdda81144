"""Slots from bytes: exact, never above the budget, and clear when it cannot be done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embcache.budget import layout_bytes, row_bytes, split_budget
from embcache.config import SGD, Adagrad, Adam, RowWiseAdagrad, TableConfig
from embcache.errors import ConfigError


@pytest.mark.parametrize(("spec", "floats"), [(SGD(), 6), (Adagrad(), 12), (RowWiseAdagrad(), 7), (Adam(), 18)])
def test_row_bytes_count_weights_and_state(spec, floats):
    assert row_bytes(TableConfig("a", 6), spec) == 4 * floats


def test_shares_are_by_dim_and_features_and_a_capped_table_leaves_its_rest():
    tables = [TableConfig("a", 4), TableConfig("b", 4), TableConfig("c", 4, num_embeddings=10)]
    slots = split_budget(tables, SGD(), 16 * (3 + 310), [4, 8, 4])
    assert slots == [100, 200, 10]


def test_hbm_rows_are_fixed_and_come_out_of_the_budget():
    tables = [TableConfig("a", 4, hbm_rows=50), TableConfig("b", 4)]
    assert split_budget(tables, SGD(), 16 * (2 + 80), [4, 4]) == [50, 30]


@pytest.mark.parametrize("tables", [[TableConfig("a", 4)], [TableConfig("a", 4, hbm_rows=1)]])
def test_i11_a_budget_too_small_names_table_and_bytes(tables):
    assert split_budget(tables, SGD(), 32, [1]) == [1]
    with pytest.raises(ConfigError, match=r"hbm_bytes = 31 is too small.* 32 bytes, table 'a'"):
        split_budget(tables, SGD(), 31, [1])


@given(
    st.lists(
        st.tuples(
            st.integers(1, 65), st.none() | st.integers(1, 50), st.none() | st.integers(1, 50), st.integers(1, 1000)
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 200_000),
    st.sampled_from([SGD(), Adagrad(), RowWiseAdagrad(), Adam()]),
)
def test_the_budget_is_never_exceeded_and_hardly_wasted(rows, budget, spec):
    tables = [
        TableConfig(f"t{i}", dim, hbm_rows=fixed, num_embeddings=cap) for i, (dim, fixed, cap, _) in enumerate(rows)
    ]
    shares = [share for *_, share in rows]
    try:
        slots = split_budget(tables, spec, budget, shares)
    except ConfigError:
        assert budget < layout_bytes(tables, spec, [table.hbm_rows or 1 for table in tables])
        return
    assert layout_bytes(tables, spec, slots) <= budget
    for table, count in zip(tables, slots, strict=True):
        assert count >= 1
        assert table.hbm_rows is None or count == table.hbm_rows
        assert table.hbm_rows is not None or table.num_embeddings is None or count <= table.num_embeddings
    open_tables = [t for t, table in enumerate(tables) if table.hbm_rows is None and slots[t] != table.num_embeddings]
    if open_tables:
        slack = budget - layout_bytes(tables, spec, slots)
        assert slack <= sum(row_bytes(tables[t], spec) + 1 for t in open_tables)


def test_a_narrow_row_costs_half_the_weights_and_the_same_state():
    for dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        table = TableConfig("t", 7, dtype=dtype)
        assert row_bytes(table, SGD()) == 7 * size
        assert row_bytes(table, RowWiseAdagrad()) == 7 * size + 4
        assert row_bytes(table, Adam()) == 7 * size + 56
    tables = [TableConfig("wide", 8), TableConfig("narrow", 8, dtype="bfloat16")]
    assert split_budget(tables, SGD(), 32 + 16 + 960, [1, 1]) == [15, 30]
