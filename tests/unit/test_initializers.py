"""I8: a new row is a pure function of (table name, seed, key, element): NumPy twins give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from embcache._core.digest import hash_keys
from embcache.config import Constant, Initializer, LinearRamp, Normal, TruncatedNormal, Uniform, Zeros
from embcache.errors import ConfigError
from embcache.table import EmbTable

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
KEYS = np.array([0, 1, -1, 2, INT64_MIN, INT64_MAX, 123456789, *range(1000, 1200)], dtype=np.int64)
U64 = np.uint64
F32 = np.float32


def splitmix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def words(name: str, seed: int, keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    base = splitmix(np.array([xxhash.xxh3_64_intdigest(name.encode(), seed=seed % 2**64)], dtype=U64))
    stream = splitmix(hash_keys(keys) ^ base)
    return splitmix(stream[:, None] + (counters.astype(U64) + U64(1)) * U64(0x9E3779B97F4A7C15))


def logarithm(x: np.ndarray) -> np.ndarray:
    bits = x.view(U64)
    exponent = (bits >> U64(52)).astype(np.int64) - 1023
    m = ((bits & U64(0xFFFFFFFFFFFFF)) | U64(0x3FF0000000000000)).view(np.float64)
    high = m > 1.4142135623730951
    m = np.where(high, m * 0.5, m)
    exponent = exponent + high
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    total = np.full_like(s, 1.0 / 21.0)
    for odd in range(19, 0, -2):
        total = total * t + 1.0 / odd
    return 2.0 * (s * total) + exponent.astype(np.float64) * 0.6931471805599453


def horner(coefficients: list[float], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def probit(p: np.ndarray) -> np.ndarray:
    a = [
        -3.969683028665376e01,
        2.209460984245205e02,
        -2.759285104469687e02,
        1.383577518672690e02,
        -3.066479806614716e01,
        2.506628277459239e00,
    ]
    b = [
        -5.447609879822406e01,
        1.615858368580409e02,
        -1.556989798598866e02,
        6.680131188771972e01,
        -1.328068155288572e01,
        1.0,
    ]
    c = [
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e00,
        -2.549732539343734e00,
        4.374664141464968e00,
        2.938163982698783e00,
    ]
    d = [7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0]
    edge = 0.02425
    q = p - 0.5
    r = q * q
    centre = horner(a, r) * q / horner(b, r)
    low = p < edge
    tail = np.where(low, p, 1.0 - p)
    q = np.sqrt(-2.0 * logarithm(tail))
    outer = horner(c, q) / horner(d, q)
    return np.where(low | (p > 1.0 - edge), np.where(low, outer, -outer), centre)


def gauss(word: np.ndarray) -> np.ndarray:
    return probit(((word >> U64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def twin(initializer: Initializer, name: str, seed: int, keys: np.ndarray, dim: int) -> np.ndarray:
    j = np.arange(dim)
    if isinstance(initializer, Uniform):
        word = words(name, seed, keys, j >> 1)
        half = np.where(j & 1, word >> U64(32), word & U64(0xFFFFFFFF)) >> U64(8)
        low, high = F32(initializer.low), F32(initializer.high)
        top = np.nextafter(high, low) if low < high else low
        return np.minimum(low + (high - low) * (half.astype(F32) * F32(2.0**-24)), top)
    if isinstance(initializer, Normal):
        return F32(initializer.mean) + F32(initializer.std) * gauss(words(name, seed, keys, j)).astype(F32)
    if isinstance(initializer, TruncatedNormal):
        z = np.zeros((len(keys), dim))
        open_ = np.ones_like(z, dtype=bool)
        for attempt in range(64):
            drawn = gauss(words(name, seed, keys, j + (attempt << 32)))
            z = np.where(open_ & (np.abs(drawn) < 2.0), drawn, z)
            open_ &= np.abs(drawn) >= 2.0
        return F32(initializer.mean) + F32(initializer.std) * z.astype(F32)
    if isinstance(initializer, LinearRamp):
        start, stop = F32(initializer.start), F32(initializer.stop)
        return np.broadcast_to(start + (stop - start) * (j.astype(F32) / F32(dim)), (len(keys), dim))
    value = initializer.value if isinstance(initializer, Constant) else 0.0
    return np.full((len(keys), dim), F32(value))


INITIALIZERS = [
    Zeros(),
    Constant(0.3),
    Constant(-0.0),
    Uniform(),
    Uniform(1.0, 1.0000001192092896),
    Uniform(-3.0, 5.0),
    Uniform(0.25, 0.25),
    Uniform(0.0, 1e-38),  # whose steps are subnormal
    Normal(0.5, 2.0),
    Normal(0.0, 0.0),
    TruncatedNormal(-1.0, 0.1),
    LinearRamp(-1.0, 3.0),
]


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=F32).view(np.uint32)


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=repr)
@pytest.mark.parametrize("dim", [1, 7, 47, 64])
def test_i8_initial_values_equal_the_numpy_twin(initializer: Initializer, dim: int) -> None:
    for name, seed in (("users", 0), ("Größe", -5), ("users", INT64_MIN), ("u" * 300, INT64_MAX)):
        with EmbTable(name, dim, initializer=initializer, seed=seed) as table:
            expected = bits(twin(initializer, name, seed, KEYS, dim))
            assert np.array_equal(bits(table.lookup(KEYS, insert=False)), expected)
            assert len(table) == 0
            assert np.array_equal(bits(table.lookup(KEYS)), expected)
            assert np.array_equal(bits(table.lookup_rows(KEYS)[0]), expected)


@given(
    st.integers(INT64_MIN, INT64_MAX),
    st.integers(INT64_MIN, INT64_MAX),
    st.integers(1, 9),
    st.sampled_from(INITIALIZERS),
)
def test_i8_any_key_any_seed(key: int, seed: int, dim: int, initializer: Initializer) -> None:
    keys = np.array([key], dtype=np.int64)
    with EmbTable("t", dim, initializer=initializer, seed=seed) as table:
        assert np.array_equal(bits(table.lookup(keys)), bits(twin(initializer, "t", seed, keys, dim)))


def test_i8_neither_order_nor_threads_nor_eviction_matter() -> None:
    keys = np.random.default_rng(1).integers(INT64_MIN, INT64_MAX, 30_000)
    with EmbTable("t", 8, num_threads=1) as one, EmbTable("t", 8, num_threads=4) as four:
        expected = one.lookup(keys)
        backwards = four.lookup(keys[::-1])
        assert np.array_equal(bits(expected), bits(backwards[::-1]))
        four.assign(keys[:100], np.full((100, 8), 9, dtype=F32))
        four.erase(keys[:100])
        assert np.array_equal(bits(four.lookup(keys[:100])), bits(expected[:100]))


def test_names_seeds_keys_and_elements_give_different_values() -> None:
    keys = np.arange(100, dtype=np.int64)
    tables = [EmbTable("a", 16), EmbTable("b", 16), EmbTable("a", 16, seed=1)]
    values = np.stack([table.lookup(keys) for table in tables])
    assert len(np.unique(values)) > 0.99 * values.size


@pytest.mark.parametrize(
    ("initializer", "mean", "std", "low", "high"),
    [
        (Uniform(-1.0, 3.0), 1.0, 4 / 12**0.5, -1.0, 3.0),
        (Normal(2.0, 0.5), 2.0, 0.5, -2.0, 6.0),
        (TruncatedNormal(2.0, 0.5), 2.0, 0.5 * 0.8796, 1.0, 3.0),
    ],
    ids=repr,
)
def test_distributions(initializer: Initializer, mean: float, std: float, low: float, high: float) -> None:
    with EmbTable("t", 32, initializer=initializer) as table:
        values = table.lookup(np.arange(20_000), insert=False).astype(np.float64).ravel()
    tolerance = 5 * std / len(values) ** 0.5
    assert abs(values.mean() - mean) < tolerance
    assert abs(values.std() - std) < 5 * tolerance
    assert low <= values.min() and values.max() <= high
    if isinstance(initializer, Normal):
        cut = np.array([0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999])
        quantiles = np.array([-3.0902, -2.3263, -0.6745, 0.0, 0.6745, 2.3263, 3.0902])
        assert np.abs((np.quantile(values, cut) - mean) / std - quantiles).max() < 0.05


def test_uniform_never_reaches_its_upper_end() -> None:
    with EmbTable("t", 64, initializer=Uniform(1.0, 1.0000002384185791)) as table:
        values = table.lookup(np.arange(1000), insert=False)
    assert set(np.unique(values)) == {F32(1.0), F32(1.0000001192092896)}


@pytest.mark.parametrize(
    "initializer", [Constant(1e300), Uniform(-3e38, 3e38), Normal(0.0, 1e39), LinearRamp(-3e38, 3e38)], ids=repr
)
def test_values_beyond_float32_are_refused(initializer: Initializer) -> None:
    with pytest.raises(ConfigError, match="float32"):
        EmbTable("t", 4, initializer=initializer)


def test_something_else_is_no_initializer() -> None:
    with pytest.raises(ConfigError, match="'uniform'"):
        EmbTable("t", 4, initializer="uniform")  # type: ignore[arg-type]
