"""Kernels on float16 and bfloat16 rows: bit for bit what the float32 kernels make of the widened rows, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embcache._core import kernels
from embcache._core.kernels import UpdateRule
from embcache.errors import ShapeError
from unit.test_kernels import DIMS, RULES, Batch, batches, make_batch, pooled, sample_weight_grad, updated
from unit.test_row_types import NARROW, U32, hard_floats, narrowed, widened

F32 = np.float32
STORED = {"float16": np.float16, "bfloat16": np.int16}


@pytest.fixture(params=["baseline", "auto"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both clones of the kernels, one after the other."""
    kernels._set_isa(request.param)
    yield request.param
    kernels._set_isa("auto")


def in_type(dtype: str, values: np.ndarray) -> np.ndarray:
    """float32 as the kernels take a 2-byte type."""
    return narrowed(dtype, values).view(STORED[dtype])


def bits_of(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint16 if rows.dtype.itemsize == 2 else U32)


def twins(batch: Batch, dtype: str) -> tuple[Batch, Batch]:
    """The batch with its weights in `dtype`, and with the same numbers in float32."""
    narrow = in_type(dtype, batch.weights)
    return replace(batch, weights=narrow), replace(batch, weights=widened(dtype, narrow.view(np.uint16)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 4, 7, 64])
def test_gather_widens_every_number_and_scatter_brings_it_back(dtype: str, dim: int) -> None:
    bits = np.resize(np.arange(2**16, dtype=np.uint16), (-(-(2**16) // dim), dim))
    weights, slots = bits.view(STORED[dtype]), np.random.default_rng(0).permutation(len(bits))
    same, wide = np.empty_like(weights), np.empty(bits.shape, F32)
    kernels.gather(weights, slots, same)
    assert np.array_equal(bits_of(same), bits[slots])  # NaNs too: a copy
    kernels.gather(weights, slots, wide)
    expected = widened(dtype, bits[slots])
    nan = np.isnan(expected)
    assert np.array_equal(bits_of(wide)[~nan], bits_of(expected)[~nan])
    assert np.isnan(wide[nan]).all() and np.array_equal(np.signbit(wide), np.signbit(expected))
    back = np.zeros_like(weights)
    kernels.scatter(back, slots, wide)
    assert np.array_equal(bits_of(back[slots])[~nan], bits[slots][~nan])
    kernels.scatter(back, slots, same)
    assert np.array_equal(bits_of(back), bits)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 64])
def test_scatter_rounds_to_nearest_even(dtype: str, dim: int) -> None:
    values = hard_floats(dtype)
    values = np.resize(values, (-(-len(values) // dim), dim))
    weights, nan = np.zeros(values.shape, STORED[dtype]), np.isnan(values)
    kernels.scatter(weights, np.arange(len(values)), values)
    assert np.array_equal(bits_of(weights)[~nan], narrowed(dtype, values)[~nan])
    assert np.isnan(widened(dtype, bits_of(weights)[nan])).all()


def test_both_clones_agree_on_every_nan() -> None:
    values = np.concatenate([np.arange(a, a + 2**23, 61, dtype=U32) for a in (0x7F800000, 0xFF800000)]).view(F32)
    values = np.resize(values, (len(values) // 16, 16))
    halves = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)
    for dtype in NARROW:
        seen = []
        for isa in ("baseline", "auto"):
            kernels._set_isa(isa)
            rows, wide = np.zeros(values.shape, STORED[dtype]), np.zeros(halves.shape, F32)
            kernels.scatter(rows, np.arange(len(rows)), values)
            kernels.gather(halves.view(STORED[dtype]), np.arange(len(halves)), wide)
            seen.append((rows.tobytes(), wide.tobytes()))
        assert seen[0] == seen[1]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_forwards_are_those_of_the_widened_rows(dtype: str, batch: Batch) -> None:
    narrow, wide = twins(batch, dtype)
    assert pooled(narrow).tobytes() == pooled(wide).tobytes()
    assert sample_weight_grad(narrow).tobytes() == sample_weight_grad(wide).tobytes()
    first, last = batch.bag_offsets[0], batch.bag_offsets[-1]
    out = np.empty((last - first, batch.dim), F32)
    kernels.sequence_forward(narrow.weights, batch.slots, batch.inverse[first:last], out, **batch.range)
    assert np.array_equal(out, wide.weights[batch.slots[batch.inverse[first:last]]])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("dtype", NARROW)
@given(batch=batches(), decay=st.sampled_from([0.0, 0.01]))
@settings(max_examples=15, deadline=None)
def test_updates_are_those_of_the_widened_rows_rounded_once(dtype: str, kind: str, batch: Batch, decay: float) -> None:
    narrow, wide = twins(batch, dtype)
    untouched = np.ones(len(batch.weights), bool)
    kept = slice(batch.start, batch.stop)
    admitted = slice(None) if batch.admitted is None else batch.admitted[kept] != 0
    untouched[batch.slots[kept][admitted]] = False
    for how in ("pooled", "sequence", "pooled in two steps", "sequence in two steps"):
        got, want = updated(narrow, kind, how, decay), updated(wide, kind, how, decay)
        assert bits_of(got[0]).tobytes() == narrowed(dtype, want[0]).tobytes()
        assert [state.tobytes() for state in got[1:]] == [state.tobytes() for state in want[1:]]
        assert bits_of(got[0][untouched]).tobytes() == bits_of(narrow.weights[untouched]).tobytes()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [*DIMS, 12, 20, 100, 8192])
def test_i9_any_number_of_threads_and_any_isa(dtype: str, dim: int) -> None:
    batch, _ = twins(make_batch(dim, dim, [[3, 1, 0, 700], [5, 2, 1, 1]], key_count=9, weighted=True, means=2), dtype)
    plain = replace(batch, sample_weights=None)

    def everything(threads: int) -> list[bytes]:
        results = [f(case, num_threads=threads) for f in (pooled, sample_weight_grad) for case in (batch, plain)]
        for kind in RULES:
            results += updated(batch, kind, "pooled", 0.01, num_threads=threads)
            results += updated(plain, kind, "sequence", num_threads=threads)
        return [result.tobytes() for result in results]

    former = kernels._set_parallel_floats(0)
    try:
        want = everything(1)
        assert everything(3) == want
        kernels._set_isa("baseline")
        assert everything(2) == want
    finally:
        kernels._set_isa("auto")
        kernels._set_parallel_floats(former)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", NARROW)
def test_infinity_nan_and_subnormals_go_through_an_update(dtype: str) -> None:
    smallest = 2.0**-24 if dtype == "float16" else 2.0**-133
    largest = float(np.nextafter(F32(65520), F32(0))) if dtype == "float16" else 3.3e38
    given = np.array([[np.inf, -np.inf, np.nan, smallest, -smallest, 0.0, -0.0, largest]], dtype=F32)
    weights, slots = in_type(dtype, given), np.zeros(1, np.int64)
    before = bits_of(weights).copy()
    kernels.update(UpdateRule("sgd", lr=1.0), weights, [], slots, np.zeros((1, 8), F32))
    assert np.array_equal(np.delete(bits_of(weights), 2, 1), np.delete(before, 2, 1)) and np.isnan(
        widened(dtype, bits_of(weights))[0, 2]
    )
    kernels.update(UpdateRule("sgd", lr=1.0), weights, [], slots, np.full((1, 8), -largest, F32))
    assert widened(dtype, bits_of(weights))[0, 7] == np.inf  # beyond the largest number: as torch stores it


def test_torch_flushing_subnormals_changes_nothing() -> None:
    halves = np.arange(2**16, dtype=np.uint16).reshape(-1, 8)
    values = np.abs(hard_floats("float16"))
    values = np.resize(values[values < 1e-4], (4096, 8))
    seen = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            for isa in ("baseline", "auto"):
                kernels._set_isa(isa)
                wide, rows = np.zeros(halves.shape, F32), np.zeros(values.shape, np.float16)
                kernels.gather(halves.view(np.float16), np.arange(len(halves)), wide)
                kernels.scatter(rows, np.arange(len(rows)), values)
                seen.append((wide.tobytes(), rows.tobytes()))
        finally:
            torch.set_flush_denormal(False)
            kernels._set_isa("auto")
    assert len(set(seen)) == 1


def test_i11_types_that_do_not_fit_are_named() -> None:
    slots = np.arange(2)
    rows: dict[str, Any] = {
        name: np.zeros((2, 3), name) for name in ("float32", "float16", "int16", "uint16", "float64", "int32")
    }
    for weights in ("uint16", "float64", "int32"):
        with pytest.raises(ShapeError, match=f"weights is {weights}.*float16 or int16"):
            kernels.gather(rows[weights], slots, rows["float32"])
    for weights, other in (("float16", "int16"), ("int16", "float16"), ("float32", "float16")):
        with pytest.raises(ShapeError, match="out is .* but weights is .*same type, or float32"):
            kernels.gather(rows[weights], slots, rows[other])
        with pytest.raises(ShapeError, match="rows is .* but weights is"):
            kernels.scatter(rows[weights], slots, rows[other])
    with pytest.raises(ShapeError, match="weights is float16.*writable float32"):
        kernels.add_rows(rows["float16"], slots, rows["float16"])
    with pytest.raises(ShapeError, match="out is float16.*float32"):
        kernels.pooled_forward(
            rows["float16"], slots, slots, np.arange(3), np.zeros(1, np.uint8), np.zeros(1, np.int64), rows["float16"]
        )
    with pytest.raises(ShapeError, match=r"states\[0\] is float16"):
        kernels.update(UpdateRule("adagrad", lr=0.1), rows["float16"], [rows["float16"]], slots, rows["float32"])
