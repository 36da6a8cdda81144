"""float16 and bfloat16 rows in host memory: exact conversions, what doors take and give, bytes, and the state behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embcache._core.table import Table
from embcache.config import Constant, LinearRamp, Normal, TruncatedNormal, Uniform, Zeros
from embcache.errors import ConfigError, ShapeError
from embcache.rowtypes import ROW_TYPES
from embcache.table import EmbTable

F16, F32, U16, U32 = np.float16, np.float32, np.uint16, np.uint32
NARROW = ["float16", "bfloat16"]
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def widened(dtype: str, bits: np.ndarray) -> np.ndarray:
    """What 2-byte elements stand for, by someone else's code."""
    if dtype == "float16":
        return bits.view(F16).astype(F32)
    return (bits.astype(U32) << U32(16)).view(F32)


def narrowed(dtype: str, values: np.ndarray) -> np.ndarray:
    """Bits of float32 rounded to nearest even, by torch."""
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().view(U16)


def rounded(dtype: str, values: np.ndarray) -> np.ndarray:
    return values if dtype == "float32" else widened(dtype, narrowed(dtype, values))


def stored(table: EmbTable, keys: Any) -> np.ndarray:
    """The bits of the rows of keys that are in a 2-byte table."""
    kind = ROW_TYPES[table.dtype]
    bits = np.empty((len(keys), table.dim), kind.storage)
    table.core.read_into(table.find(keys), bits)
    return bits.view(U16)


def hard_floats(dtype: str) -> np.ndarray:
    """Float32 around every tie and every number of the narrow type, both signs, with the subnormals of both types."""
    step = 1 << (13 if dtype == "float16" else 16)
    bits = np.arange(0, 2**16 if dtype == "bfloat16" else 2**32, 1 if dtype == "bfloat16" else 2**13, dtype=np.uint64)
    centres = bits << np.uint64(16) if dtype == "bfloat16" else bits
    around = centres[:, None] + np.array([0, 1, step // 2 - 1, step // 2, step // 2 + 1, step - 1], dtype=np.uint64)
    tiny = np.arange(0, 2**12, dtype=np.uint64) * np.uint64(2**17 + 1)  # where a half is subnormal or zero
    return np.unique(np.concatenate([around.ravel(), tiny]).astype(U32)).view(F32)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 3, 8, 64])
def test_every_number_of_the_type_comes_back_as_it_is(dtype: str, dim: int) -> None:
    bits = np.resize(np.arange(2**16, dtype=U16), (-(-(2**16) // dim), dim))
    keys, kind = np.arange(len(bits)), ROW_TYPES[dtype]
    with EmbTable("t", dim, dtype=dtype) as table:
        rows = table.insert(keys)
        table.core.write_from(rows, bits.view(kind.storage))
        assert np.array_equal(stored(table, keys), bits)
        wide = table.lookup(keys, np.empty((len(keys), dim), F32))
        expected = widened(dtype, bits)
        nan = np.isnan(expected)
        assert np.array_equal(wide.view(U32)[~nan], expected.view(U32)[~nan])
        assert np.isnan(wide[nan]).all() and np.array_equal(np.signbit(wide), np.signbit(expected))
        table.assign(keys, wide)
        assert np.array_equal(stored(table, keys)[~nan], bits[~nan]) and np.isnan(table.lookup(keys)[nan]).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 64])
def test_float32_is_rounded_to_nearest_even(dtype: str, dim: int) -> None:
    values = hard_floats(dtype)
    values = values[
        ~(np.abs(values) >= ROW_TYPES[dtype].end) | np.isinf(values)
    ]  # NaN stays, what overflows has its own test
    values = np.resize(values, (-(-len(values) // dim), dim))
    keys = np.arange(len(values))
    with EmbTable("t", dim, dtype=dtype) as table:
        table.assign(keys, values)
        bits, expected, nan = stored(table, keys), narrowed(dtype, values), np.isnan(values)
        assert np.array_equal(bits[~nan], expected[~nan])
        assert np.isnan(widened(dtype, bits[nan])).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_would_become_infinite_is_refused_and_infinity_is_data(dtype: str, sign: int) -> None:
    end = F32(ROW_TYPES[dtype].end) * F32(sign)
    last = np.nextafter(end, F32(0))
    assert np.isfinite(rounded(dtype, np.array([last]))).all() and np.isinf(rounded(dtype, np.array([end]))).all()
    with EmbTable("t", 3, dtype=dtype) as table:
        rows = np.array([[0, last, np.inf], [np.nan, -np.inf, end]], dtype=F32)
        table.assign([1], rows[:1])
        assert np.isfinite(table.lookup([1])[0, 1]) and table.lookup([1])[0, 2] == np.inf
        with pytest.raises(
            ShapeError, match=rf"'t': weights\[1, 2\] = {float(end)!r} is infinite in {dtype}".replace("+", r"\+")
        ):
            table.assign([1, 2], rows)
        assert len(table) == 1 and table.lookup([1])[0, 0] == 0


@pytest.mark.parametrize("dtype", ["float32", *NARROW])
def test_what_reads_give_and_writes_take(dtype: str) -> None:
    door = ROW_TYPES[dtype].door
    given: Any
    assert door == {"float32": F32, "float16": F16, "bfloat16": F32}[dtype]
    with EmbTable("t", 3, state_dim=5, dtype=dtype) as table:
        assert table.dtype == dtype and (dtype in repr(table)) == (dtype != "float32")
        for given in (
            np.ones((2, 3), F16),
            np.ones((2, 3), F32),
            np.ones((2, 3), np.int16),
            np.ones((2, 6), F32)[:, ::2],
        ):
            table.assign([1, 2], given)
            assert (table.lookup([1, 2]) == 1).all()
        table.assign([], [])
        for given in (
            np.ones((2, 3)),
            np.ones((2, 3), np.int32),
            np.ones((2, 3), complex),
            np.ones((2, 3), np.longdouble),
        ):
            with pytest.raises(ShapeError, match=f"weights has dtype {given.dtype}"):
                table.assign([1, 2], given)
        with pytest.raises(ShapeError, match="masked"):
            table.assign([1], np.ma.MaskedArray(np.ones((1, 3), F16), mask=True))
        weights, state = table.lookup_rows([1, 9])
        assert table.lookup([1]).dtype == weights.dtype == door and state.dtype == F32 and state.shape == (2, 5)
        keys, weights, state, *_ = next(table.items())
        assert weights.dtype == door and state.dtype == F32 and keys.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", *NARROW])
def test_out_everywhere(dtype: str) -> None:
    door = ROW_TYPES[dtype].door
    bad: Any
    with EmbTable("t", 4, state_dim=3, dtype=dtype, initializer=Normal(0, 1)) as table:
        rows = np.full(3, 77, np.int64)
        assert table.insert([5, 6, 5], out=rows) is rows and rows.tolist() == [0, 1, 0]
        assert table.find([6, 7, 5], rows) is rows and rows.tolist() == [1, -1, 0]
        keys = np.array([8, 5, 6, 8])
        assert table.insert(keys, out=keys) is keys and keys.tolist() == [2, 0, 1, 2]  # in place: read before written
        for kind in dict.fromkeys((door, np.dtype(F32))):
            out = np.zeros((3, 4), kind)
            assert table.lookup([5, 6, 99], out, insert=False) is out
            assert np.array_equal(out.astype(F32), table.lookup([5, 6, 99], insert=False).astype(F32)) and out.all()
            pair = np.zeros((3, 4), kind), np.ones((3, 3), F32)
            weights, state = table.lookup_rows([5, 6, 99], out=pair)
            assert weights is pair[0] and state is pair[1] and np.array_equal(weights, out) and not state.any()
        for bad in (
            np.zeros((3, 4), np.float64),
            np.zeros((3, 5), door),
            np.zeros((4, 3), door).T,
            np.zeros((3, 4), np.int16),
            5,
        ):
            with pytest.raises(ShapeError, match="'t': out"):
                table.lookup([5, 6, 7], bad)
            with pytest.raises(ShapeError, match=r"'t': out"):
                table.lookup_rows([5, 6, 7], (bad, np.zeros((3, 3), F32)))
        for bad in (np.zeros(3, np.int32), np.zeros(4, np.int64), np.zeros(6, np.int64)[::2]):
            for method in (table.find, table.insert):
                with pytest.raises(ShapeError, match="'t': out"):
                    method([5, 6, 7], bad)
        with pytest.raises(ShapeError, match="pair"):
            bad = np.zeros((1, 4), door)
            table.lookup_rows([5], bad)
        both = np.zeros(40, F32)
        with pytest.raises(ShapeError, match="share memory"):
            table.lookup_rows([5], (both[:4].reshape(1, 4), both[2:5].reshape(1, 3)))
        assert 7 not in table and len(table) == 3


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    "initializer",
    [Zeros(), Constant(0.1), Uniform(-0.3, 0.3), Normal(0.01, 0.2), TruncatedNormal(0.0, 0.5), LinearRamp(-1.0, 3.0)],
    ids=lambda i: i.kind,
)
@pytest.mark.parametrize("dim", [1, 7, 64, 8192])
def test_i8_initial_values_are_those_of_float32_rounded(dtype: str, initializer: Any, dim: int) -> None:
    keys = np.array([0, -1, 2**63 - 1, -(2**63), 12345] if dim > 100 else range(300))
    with (
        EmbTable("t", dim, initializer=initializer, seed=3) as exact,
        EmbTable("t", dim, dtype=dtype, initializer=initializer, seed=3) as table,
    ):
        expected = narrowed(dtype, exact.lookup(keys))
        for _ in range(2):  # ahead of the insert, inserted, after erase and return
            assert np.array_equal(narrowed(dtype, table.lookup(keys, insert=False).astype(F32)), expected)
            table.insert(keys)
            assert np.array_equal(stored(table, keys), expected)
            assert np.array_equal(narrowed(dtype, table.lookup_rows(keys)[0].astype(F32)), expected)
            table.erase(keys)


@pytest.mark.parametrize(
    ("dtype", "initializer"),
    [
        ("float16", Constant(65520.0)), ("float16", Uniform(-70000, 0)), ("float16", LinearRamp(0, 1e5)), ("float16", Normal(0, 8000)),
        ("float16", TruncatedNormal(60000, 3000)), ("bfloat16", Constant(3.397e38)),
    ],
    ids=repr,
)  # fmt: skip
def test_i11_initial_values_must_fit_the_type(dtype: str, initializer: Any) -> None:
    with pytest.raises(ConfigError, match=f"range of {dtype}"):
        EmbTable("t", 4, dtype=dtype, initializer=initializer)
    EmbTable("t", 4, initializer=initializer).close()


def test_the_largest_initial_values_that_fit_are_finite() -> None:
    for initializer in (Constant(65519.0), Uniform(-65519, 65519), Normal(0, 7890), TruncatedNormal(1000, 32000)):
        with EmbTable("t", 64, dtype="float16", initializer=initializer) as table:
            assert np.isfinite(table.lookup(np.arange(20000), insert=False)).all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 17, 32, 33, 300, 8192])
@pytest.mark.parametrize("state_dim", [0, 1, 2, 3, 8, 33])
def test_rows_of_odd_length_do_not_touch_each_other_or_their_state(dtype: str, dim: int, state_dim: int) -> None:
    n = 40 if dim > 1000 else 3000
    rng, keys = np.random.default_rng(dim), np.arange(n)
    weights = rng.integers(-100, 100, (n, dim)).astype(F32)
    state = rng.normal(size=(n, state_dim)).astype(F32)
    with EmbTable("t", dim, state_dim=state_dim, dtype=dtype) as table:
        table.assign(keys, weights, state)
        got, got_state = table.lookup_rows(keys)
        assert np.array_equal(got, weights) and np.array_equal(got_state, state)
        table.assign(keys[::2], weights[::2] + 1, state[::2])
        got, got_state = table.lookup_rows(keys)
        assert np.array_equal(got[::2], weights[::2] + 1) and np.array_equal(got[1::2], weights[1::2])
        assert np.array_equal(got_state, state)
        assert all(
            np.array_equal(part, other) for part, other in zip(next(table.items())[1:3], (got, got_state), strict=True)
        )
        stats, payload = table.stats(), 2 * dim + 4 * state_dim
        assert stats["row_bytes"] == n * payload
        own = 2 * dim + (4 * state_dim + 2 * (dim % 2) if state_dim > 2 else 0)
        power = 1 << (own - 1).bit_length()
        stride = power if own <= 32 else -(-own // 64) * 64
        assert stats["padding_bytes"] == n * (
            stride - 2 * dim if state_dim > 2 else stride - own
        ) - n * 4 * state_dim * (state_dim > 2)
        table.check()


@pytest.mark.parametrize("dtype", NARROW)
def test_large_batches_past_the_cache_at_any_thread_count(dtype: str) -> None:
    """Outputs above 8 MiB are written past the cache: the same rows, by one thread and by three."""
    n, dim = 70_000, 72
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(n, dim)).astype(F32)
    expected = rounded(dtype, weights)
    for threads in (1, 3):
        with EmbTable("t", dim, dtype=dtype, num_threads=threads) as table:
            table.assign(np.arange(n), weights)
            order = rng.permutation(n)
            out = np.empty((n, dim), F32)
            assert np.array_equal(table.lookup(order, out), expected[order])
            assert np.array_equal(table.lookup(order).astype(F32), expected[order])
            assert np.array_equal(table.lookup_rows(order)[0].astype(F32), expected[order])


def test_the_core_takes_rows_of_its_own_bits_only() -> None:
    tables = {dtype: Table("t", 2, dtype=dtype) for dtype in ROW_TYPES}
    keys = np.arange(3)
    for dtype, table in tables.items():
        own = {"float32": {F32}, "float16": {F16, F32}, "bfloat16": {np.int16, F32}}[dtype]
        for kind in (F16, F32, np.int16, U16, np.float64, np.int32):
            rows = np.zeros((3, 2), kind)
            if kind in own:
                table.assign(keys, rows)
                table.lookup(keys, rows)
                table.init_rows(keys, rows)
                table.lookup_rows(keys, rows)
                continue
            for call in (table.assign, table.lookup, table.init_rows, table.lookup_rows):
                with pytest.raises(ShapeError, match=f"{np.dtype(kind)} of shape"):
                    call(keys, rows)
        for shape in ((3, 3), (2, 2), (3,), (3, 2, 1)):
            with pytest.raises(ShapeError, match="shape"):
                table.assign(keys, np.zeros(shape, F32))
        rows = np.zeros((3, 2), F32)
        rows.flags.writeable = False
        table.assign(keys, rows)
        with pytest.raises(ShapeError, match="writeable"):
            table.lookup(keys, rows)
        table.close()


@pytest.mark.parametrize(
    "dtype", ["half", "float64", "bf16", F16, torch.bfloat16, None, 16, ["float16"], "Float16", ""]
)
def test_i11_unknown_types_are_named(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"'t': dtype = .*'float32', 'float16', 'bfloat16'"):
        EmbTable("t", 2, dtype=dtype)


def test_constants_are_rounded_as_rows_are() -> None:
    for dtype in NARROW:
        values = np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-10, 0).repeat(50)
        expected = rounded(dtype, values.astype(F32))
        assert [ROW_TYPES[dtype].rounded(value) for value in values.tolist()] == expected.tolist()
    assert ROW_TYPES["float32"].rounded(0.1) == float(F32(0.1))
