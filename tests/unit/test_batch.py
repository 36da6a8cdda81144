"""The geometry of a batch: lengths that fit, and where bags and tables start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embcache._core.batch import batch_offsets, lengths_fit

INT64 = st.integers(-(2**63), 2**63 - 1)


def fits(lengths: list[int], total: int) -> bool:
    return all(length >= 0 for length in lengths) and sum(lengths) == total


@given(st.lists(st.one_of(st.integers(0, 5), INT64), max_size=20), st.integers(0, 100), st.booleans())
def test_lengths_fit_where_exact_arithmetic_says_so(lengths, total, right):
    total = sum(lengths) if right and 0 <= sum(lengths) < 2**62 else total
    array = np.array(lengths, dtype=np.int64)
    assert lengths_fit(array, total) == fits(lengths, total)
    offsets = batch_offsets(array, np.array([0, len(lengths)]), total)
    assert (offsets is not None) == fits(lengths, total)
    if offsets is not None:
        assert offsets[0].tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize(
    "lengths",
    [
        [2**63 - 1, 2**63 - 1, 2, 3],  # wraps round to 3
        [-1, 4],
        [-(2**63), -(2**63), 3],
        [3] + [2**62] * 4,
    ],
)
def test_lengths_that_wrap_round_to_the_right_sum_do_not_fit(lengths):
    array = np.array(lengths, dtype=np.int64)
    with np.errstate(over="ignore"):
        assert array.sum() == 3
    assert not lengths_fit(array, 3) and batch_offsets(array, np.array([0, len(lengths)]), 3) is None


def test_tables_start_at_their_first_bag():
    bags, tables = batch_offsets(np.array([1, 0, 2, 3, 0, 1]), np.array([0, 2, 2, 5, 6]), 7)
    assert bags.tolist() == [0, 1, 1, 3, 6, 6, 7] and tables.tolist() == [0, 1, 1, 6, 7]
    assert bags.dtype == tables.dtype == np.int64


@pytest.mark.parametrize("first_bags", [[0, 3], [-1, 2], [0, 2**40]])
def test_i11_tables_beyond_the_bags_are_refused(first_bags):
    assert batch_offsets(np.array([1, 1]), np.array(first_bags), 2) is None


def test_nothing_at_all_fits_zero():
    empty = np.zeros(0, dtype=np.int64)
    assert lengths_fit(empty, 0) and not lengths_fit(empty, 1)
    bags, tables = batch_offsets(empty, np.zeros(3, dtype=np.int64), 0)
    assert bags.tolist() == [0] and tables.tolist() == [0, 0, 0]
