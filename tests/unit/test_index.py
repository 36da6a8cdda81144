"""The index: a map of any int64 key, against a dict, with exact overflow counts after any churn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embcache._core.digest import hash_keys
from embcache._core.index import Index
from embcache.errors import HostMemoryError, ShapeError

HOSTILE = [-(2**63), -(2**63) + 1, -2, -1, 0, 1, 2, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1]
keys_of = st.sampled_from(HOSTILE) | st.integers(-(2**63), 2**63 - 1) | st.integers(-40, 40)


def longs(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(
    st.lists(st.tuples(st.sampled_from(["put", "erase"]), st.lists(keys_of, max_size=60)), max_size=30),
    st.integers(0, 2**64 - 1),
)
def test_index_equals_a_dict(steps: list[tuple[str, list[int]]], seed: int) -> None:
    index, model = Index(seed), dict[int, int]()
    count = 0
    for action, keys in steps:
        if action == "put":
            values = list(range(count, count + len(keys)))
            count += len(keys)
            index.put(longs(keys), np.array(values, dtype=np.uint32))
            model.update(zip(keys, values, strict=True))
        else:
            assert index.erase(longs(keys)).tolist() == [model.pop(key, -1) for key in keys]
        index.check()
        assert len(index) == len(model)
        probe = [*HOSTILE, *keys]
        assert index.find(longs(probe)).tolist() == [model.get(key, -1) for key in probe]


def test_values_use_all_32_bits() -> None:
    index = Index()
    index.put(longs([5, 6]), np.array([2**32 - 1, 2**31], dtype=np.uint32))
    assert index.find(longs([5, 6, 7])).tolist() == [2**32 - 1, 2**31, -1]


@pytest.mark.parametrize("pattern", ["sequential", "equal_low_bits", "equal_high_bits", "strided", "equal_hash_bits"])
def test_patterned_keys_do_not_chain(pattern: str) -> None:
    n = 20_000
    run = np.arange(n, dtype=np.int64)
    if pattern == "equal_low_bits":
        run = run << 44
    elif pattern == "equal_high_bits":
        run = run + (-(2**63))
    elif pattern == "strided":
        run = run * 4096 * 1_000_003
    elif pattern == "equal_hash_bits":
        candidates = np.arange(n * 64, dtype=np.int64)
        run = candidates[hash_keys(candidates) >> np.uint64(58) == 7][: n // 2]
    index = Index(12345)
    index.put(run, np.arange(len(run), dtype=np.uint32))
    assert np.array_equal(index.find(run), np.arange(len(run)))
    assert index.check() < 100
    assert (index.find(run + 2**40 + 1) >= 0).sum() == np.isin(run + 2**40 + 1, run).sum()


def test_case_20_churn_at_the_brim_leaves_no_marks() -> None:
    """Fill to the last reserved place, then replace every key many times: probes stay bounded, memory does not grow."""
    index = Index(1)
    index.reserve(1)
    room = index.grow_at
    keys = np.arange(room, dtype=np.int64)
    index.put(keys, keys.astype(np.uint32))
    held, buckets = index.nbytes, index.bucket_count
    for generation in range(1, 400):
        index.erase(keys)
        assert len(index) == 0 and index.check() == 0
        assert (index.find(keys) == -1).all()
        keys = keys + generation * room
        index.put(keys, np.arange(room, dtype=np.uint32))
        assert index.check() <= buckets
    assert (index.nbytes, index.bucket_count) == (held, buckets)


def test_erasing_absent_keys_changes_nothing() -> None:
    index = Index()
    index.put(longs([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint32))
    assert index.erase(longs([4, 4, -1])).tolist() == [-1, -1, -1]
    assert index.find(longs([1, 2, 3])).tolist() == [1, 2, 3]


def test_growth_is_by_half_and_any_bucket_count_works() -> None:
    index = Index()
    counts = set()
    for key in range(5000):
        index.put(longs([key]), np.array([key], dtype=np.uint32))
        counts.add(index.bucket_count)
    steps = sorted(counts)
    assert all(after <= before * 1.5 + 1 for before, after in itertools.pairwise(steps))
    assert any(count & (count - 1) for count in counts)
    assert index.check() < 64


def test_reserve_is_exact_and_refuses_the_impossible() -> None:
    index = Index()
    index.put(longs([9]), np.array([7], dtype=np.uint32))
    index.reserve(100_000)
    assert index.grow_at >= 100_001
    buckets = index.bucket_count
    index.put(np.arange(10, 100_010), np.arange(100_000, dtype=np.uint32))
    assert index.bucket_count == buckets
    with pytest.raises(HostMemoryError):
        index.reserve(2**50)
    assert index.find(longs([9])).tolist() == [7] and len(index) == 100_001
    with pytest.raises(ShapeError, match="1 values for 2 keys"):
        index.put(longs([1, 2]), np.array([1], dtype=np.uint32))
