"""The row kernels against plain float64 NumPy, and the same bits at any thread count, ISA and placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from embcache._core import kernels
from embcache._core.kernels import UpdateRule
from embcache.errors import ConfigError, ShapeError

DIMS = [1, 3, 8, 64, 129]
Floats = NDArray[np.float32]
RULES = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-10},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-10},
    "adam": {"lr": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "step": 3},
}


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Spread the smallest call over threads."""
    former = kernels._set_parallel_floats(0)
    yield
    kernels._set_parallel_floats(former)


@dataclass
class Batch:
    """A random batch of one dim group that sits in the middle of a larger batch."""

    dim: int
    weights: Floats
    slots: NDArray[np.int64]
    inverse: NDArray[np.int64]
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]
    start: int
    stop: int
    bag_offsets: NDArray[np.int64]
    means: NDArray[np.uint8]
    columns: NDArray[np.int64]
    batch_size: int
    width: int
    sample_weights: Floats | None
    admitted: NDArray[np.uint8] | None

    @property
    def bags(self) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        return self.bag_offsets, self.means, self.columns

    @property
    def range(self) -> dict[str, int]:
        return {"unique_start": self.start, "unique_stop": self.stop}

    def positions(self) -> Iterator[tuple[int, int, slice, np.float64]]:
        """Position, sample, columns and factor of every element of a bag."""
        for bag in range(len(self.bag_offsets) - 1):
            feature, sample = divmod(bag, self.batch_size)
            first, last = self.bag_offsets[bag], self.bag_offsets[bag + 1]
            for position in range(first, last):
                factor = np.float64(1 if self.sample_weights is None else self.sample_weights[position])
                if self.means[feature]:
                    factor /= last - first
                yield position, sample, slice(self.columns[feature], self.columns[feature] + self.dim), factor


def make_batch(
    seed: int,
    dim: int,
    lengths: list[list[int]],
    *,
    key_count: int = 5,
    means: int = 1,
    weighted: bool = False,
    filtered: bool = False,
    before: int = 3,
    after: int = 2,
) -> Batch:
    """A batch of ``len(lengths)`` features; `before` and `after` are foreign positions and uniques around it."""
    rng = np.random.default_rng(seed)
    feature_count, batch_size = len(lengths), len(lengths[0]) if lengths else 0
    flat = [length for feature in lengths for length in feature]
    count = sum(flat)
    keys = rng.integers(0, key_count, count)
    _, first, inner = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    inner = rank[inner] if count else inner
    unique_count = len(first)
    inverse = np.concatenate([np.arange(before), inner + before, np.arange(after) + before + unique_count]).astype(
        np.int64
    )
    total = before + unique_count + after
    order = np.argsort(inverse, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=total))]).astype(np.int64)
    row_count = unique_count + 4
    slots = np.full(total, -7, np.int64)  # foreign slots are not rows of these weights
    slots[before : before + unique_count] = rng.permutation(row_count)[:unique_count]
    gap = 2
    columns = (rng.permutation(feature_count) * (dim + gap)).astype(np.int64)
    width = feature_count * (dim + gap) + 1
    return Batch(
        dim=dim,
        weights=rng.standard_normal((row_count, dim)).astype(np.float32),
        slots=slots,
        inverse=inverse,
        order=order,
        offsets=offsets,
        start=before,
        stop=before + unique_count,
        bag_offsets=(before + np.concatenate([[0], np.cumsum(flat)])).astype(np.int64),
        means=np.array([means >> feature & 1 for feature in range(feature_count)], np.uint8),
        columns=columns,
        batch_size=batch_size,
        width=width,
        sample_weights=rng.standard_normal(len(inverse)).astype(np.float32) if weighted else None,
        admitted=rng.integers(0, 2, total).astype(np.uint8) if filtered else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    feature_count = draw(st.integers(0, 3))
    batch_size = draw(st.integers(0, 4))
    length = st.one_of(st.integers(0, 4), st.integers(0, 4), st.sampled_from([256, 257, 600]))
    lengths = [[draw(length) for _ in range(batch_size)] for _ in range(feature_count)]
    return make_batch(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from(DIMS)),
        lengths,
        key_count=draw(st.sampled_from([1, 2, 7, 1000])),
        means=draw(st.integers(0, 7)),
        weighted=draw(st.booleans()),
        filtered=draw(st.booleans()),
        before=draw(st.integers(0, 3)),
        after=draw(st.integers(0, 3)),
    )


# ---------------------------------------------------------------------------------------------------------- doors


def pooled(batch: Batch, **options: Any) -> Floats:
    out = np.full((batch.batch_size, batch.width), 9, np.float32)
    kernels.pooled_forward(
        batch.weights, batch.slots, batch.inverse, *batch.bags, out,
        per_sample_weights=batch.sample_weights, **batch.range, **options,
    )  # fmt: skip
    return out


@cache
def normals(rows: int, cols: int) -> Floats:
    values = np.random.default_rng(1).standard_normal((rows, cols), np.float32)
    values.flags.writeable = False
    return values


def grad_out_of(batch: Batch) -> Floats:
    return normals(batch.batch_size, batch.width)


def pooled_grad(batch: Batch, **options: Any) -> Floats:
    out = np.full((batch.stop - batch.start, batch.dim), 9, np.float32)
    kernels.segment_grad_pooled(
        grad_out_of(batch), batch.order, batch.offsets, *batch.bags, out,
        per_sample_weights=batch.sample_weights, admitted=batch.admitted, **batch.range, **options,
    )  # fmt: skip
    return out


def sequence_grad_out(batch: Batch) -> Floats:
    return normals(int(batch.bag_offsets[-1] - batch.bag_offsets[0]), batch.dim)


def sequence_grad(batch: Batch, **options: Any) -> Floats:
    out = np.full((batch.stop - batch.start, batch.dim), 9, np.float32)
    kernels.segment_grad_sequence(
        sequence_grad_out(batch), batch.order, batch.offsets, out,
        first_position=int(batch.bag_offsets[0]), admitted=batch.admitted, **batch.range, **options,
    )  # fmt: skip
    return out


def sample_weight_grad(batch: Batch, **options: Any) -> Floats:
    out = np.full(batch.bag_offsets[-1] - batch.bag_offsets[0], 9, np.float32)
    kernels.per_sample_weight_grad(
        grad_out_of(batch), batch.weights, batch.slots, batch.inverse, *batch.bags, out, **batch.range, **options
    )
    return out


def fresh_states(kind: str, rows: int, dim: int) -> list[Floats]:
    rng = np.random.default_rng(5)
    widths = {"sgd": [], "adagrad": [dim], "rowwise_adagrad": [1], "adam": [dim, dim]}[kind]
    return [rng.random((rows, width)).astype(np.float32) for width in widths]


def updated(batch: Batch, kind: str, how: str, decay: float = 0.0, **options: Any) -> list[Floats]:
    """Weights and states after one update, fused or in two steps, of the pooled or the sequence gradient."""
    rule = UpdateRule(kind, weight_decay=decay, **RULES[kind])
    weights, states = batch.weights.copy(), fresh_states(kind, len(batch.weights), batch.dim)
    if how == "pooled":
        kernels.segment_update_pooled(
            rule, weights, states, batch.slots, grad_out_of(batch), batch.order, batch.offsets, *batch.bags,
            per_sample_weights=batch.sample_weights, admitted=batch.admitted, **batch.range, **options,
        )  # fmt: skip
    elif how == "sequence":
        kernels.segment_update_sequence(
            rule, weights, states, batch.slots, sequence_grad_out(batch), batch.order, batch.offsets,
            first_position=int(batch.bag_offsets[0]), admitted=batch.admitted, **batch.range, **options,
        )  # fmt: skip
    else:
        grad = pooled_grad(batch, **options) if how == "pooled in two steps" else sequence_grad(batch, **options)
        admitted = None if batch.admitted is None else batch.admitted[batch.start : batch.stop]
        slots = batch.slots[batch.start : batch.stop]
        kernels.update(rule, weights, states, slots, grad, admitted=admitted, **options)
    return [weights, *states]


def every_result(batch: Batch, **options: Any) -> list[Floats]:
    """All kernels on one batch."""
    results = [f(batch, **options) for f in (pooled, pooled_grad, sequence_grad, sample_weight_grad)]
    for kind in RULES:
        results += updated(batch, kind, "pooled", 0.01, **options)
        results += updated(batch, kind, "sequence", **options)
    return results


def assert_same_bits(left: list[Floats], right: list[Floats]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


# ------------------------------------------------------------------------------------------ against float64 NumPy


@given(batches())
@settings(max_examples=60, deadline=None)
def test_pooled_forward_is_the_sum_or_mean_of_each_bag(batch: Batch) -> None:
    out = pooled(batch)
    want, scale = np.zeros(out.shape), np.ones(out.shape)
    touched = np.zeros(out.shape, bool)
    for column in batch.columns:
        touched[:, column : column + batch.dim] = True
    for position, sample, columns, factor in batch.positions():
        row = batch.weights[batch.slots[batch.inverse[position]]].astype(np.float64)
        want[sample, columns] += factor * row
        scale[sample, columns] += abs(factor * row)
    assert (abs(out - want)[touched] <= 1e-5 * scale[touched]).all()
    assert (out[~touched] == 9).all()


@given(batches())
@settings(max_examples=60, deadline=None)
def test_segment_grad_pooled_is_the_sum_over_occurrences(batch: Batch) -> None:
    grad_out, want = grad_out_of(batch).astype(np.float64), np.zeros((batch.stop - batch.start, batch.dim))
    size = want + 1
    for position, sample, columns, factor in batch.positions():
        unique = batch.inverse[position]
        if batch.admitted is None or batch.admitted[unique]:
            want[unique - batch.start] += factor * grad_out[sample, columns]
            size[unique - batch.start] += abs(factor * grad_out[sample, columns])
    assert (abs(pooled_grad(batch) - want) <= 1e-5 * size).all()


@given(batches())
@settings(max_examples=60, deadline=None)
def test_sequence_forward_and_grad(batch: Batch) -> None:
    first, last = batch.bag_offsets[0], batch.bag_offsets[-1]
    out = np.empty((last - first, batch.dim), np.float32)
    kernels.sequence_forward(batch.weights, batch.slots, batch.inverse[first:last], out, **batch.range)
    np.testing.assert_array_equal(out, batch.weights[batch.slots[batch.inverse[first:last]]])
    want, size = (np.zeros((batch.stop - batch.start, batch.dim)) for _ in range(2))
    np.add.at(want, batch.inverse[first:last] - batch.start, sequence_grad_out(batch).astype(np.float64))
    np.add.at(size, batch.inverse[first:last] - batch.start, abs(sequence_grad_out(batch)))
    if batch.admitted is not None:
        want[batch.admitted[batch.start : batch.stop] == 0] = 0
    assert (abs(sequence_grad(batch) - want) <= 1e-5 * size).all()


@given(batches())
@settings(max_examples=60, deadline=None)
def test_per_sample_weight_grad_is_a_dot_product(batch: Batch) -> None:
    want = np.zeros(batch.bag_offsets[-1] - batch.bag_offsets[0])
    grad_out, unweighted = grad_out_of(batch).astype(np.float64), Batch(**{**vars(batch), "sample_weights": None})
    for position, sample, columns, factor in unweighted.positions():
        row = batch.weights[batch.slots[batch.inverse[position]]].astype(np.float64)
        want[position - batch.bag_offsets[0]] = factor * (grad_out[sample, columns] @ row)
    np.testing.assert_allclose(sample_weight_grad(batch), want, rtol=1e-4, atol=1e-4)


@given(st.integers(0, 3000), st.sampled_from(DIMS), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_gather_scatter_and_add_rows(count: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((count + 5, dim)).astype(np.float32)
    rows = rng.standard_normal((count, dim)).astype(np.float32)
    some = rng.integers(0, count + 5, count)
    out = np.empty((count, dim), np.float32)
    kernels.gather(weights, some, out)
    np.testing.assert_array_equal(out, weights[some])
    distinct = rng.permutation(count + 5)[:count]
    want = weights.copy()
    want[distinct] = rows
    kernels.scatter(weights, distinct, rows)
    np.testing.assert_array_equal(weights, want)
    want[distinct] += out
    kernels.add_rows(weights, distinct, out)
    np.testing.assert_array_equal(weights, want)


# --------------------------------------------------------------------------------------------- the same bits (I9)


@given(batches())
@settings(max_examples=30, deadline=None)
def test_i9_same_bits_at_any_thread_count_and_isa(batch: Batch) -> None:
    former = kernels._set_parallel_floats(0)
    try:
        want = every_result(batch, num_threads=1)
        for threads in (2, 4):
            assert_same_bits(every_result(batch, num_threads=threads), want)
        kernels._set_isa("baseline")
        assert_same_bits(every_result(batch, num_threads=1), want)
    finally:
        kernels._set_isa("auto")
        kernels._set_parallel_floats(former)


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("weighted", "means"), [(False, 0), (True, 1)])
def test_i9_one_key_a_hundred_thousand_times(dim: int, weighted: bool, means: int) -> None:
    batch = make_batch(3, dim, [[50_000, 0, 50_001]], key_count=1, weighted=weighted, means=means)
    want = every_result(batch, num_threads=1)
    for threads in (2, 4):
        assert_same_bits(every_result(batch, num_threads=threads), want)
    exact, size = np.zeros(dim), np.zeros(dim)
    for bag, sample in ((0, 0), (2, 2)):
        rows = slice(batch.bag_offsets[bag], batch.bag_offsets[bag + 1])
        factor = 1.0 if batch.sample_weights is None else batch.sample_weights[rows].astype(np.float64).sum()
        count = rows.stop - rows.start
        scale = factor * (count if batch.sample_weights is None else 1) / (count if means else 1)
        part = scale * grad_out_of(batch)[sample, batch.columns[0] : batch.columns[0] + dim].astype(np.float64)
        exact += part
        size += abs(part)
    assert (abs(want[1][0] - exact) <= 1e-5 * size + 1e-4).all()


@pytest.mark.usefixtures("eager_threads")
def test_i9_hot_keys_among_others_and_not_admitted_ones() -> None:
    batch = make_batch(4, 20, [[3000, 1, 0, 5000], [7, 2500, 1, 1]], key_count=3, weighted=True, means=2, filtered=True)
    many = make_batch(5, 20, [[3000] * 8], key_count=5000)
    skewed = make_batch(6, 20, [[3000] * 8], key_count=4, filtered=True)
    for case in (batch, many, skewed):
        want = every_result(case, num_threads=1)
        for threads in (2, 3, 4):
            assert_same_bits(every_result(case, num_threads=threads), want)


@pytest.mark.parametrize("kind", RULES)
@given(batch=batches(), decay=st.sampled_from([0.0, 0.01]))
@settings(max_examples=25, deadline=None)
def test_i9_fused_equals_two_steps(kind: str, batch: Batch, decay: float) -> None:
    for how in ("pooled", "sequence"):
        assert_same_bits(updated(batch, kind, how, decay), updated(batch, kind, f"{how} in two steps", decay))


@pytest.mark.parametrize("kind", RULES)
def test_i9_an_update_depends_on_its_row_and_gradient_only(kind: str) -> None:
    rng = np.random.default_rng(8)
    rule = UpdateRule(kind, weight_decay=0.02, **RULES[kind])
    for dim in DIMS:
        weights, grad = (rng.standard_normal((40, dim)).astype(np.float32) for _ in range(2))
        states = fresh_states(kind, 40, dim)
        moved = rng.permutation(100)[:40]
        far = [np.zeros((100, array.shape[1]), np.float32) for array in (weights, *states)]
        for array, place in zip((weights, *states), far, strict=True):
            place[moved] = array
        kernels.update(rule, weights, states, np.arange(40), grad)
        order = rng.permutation(40)
        kernels.update(rule, far[0], far[1:], moved[order], grad[order])
        assert_same_bits([weights, *states], [place[moved] for place in far])


def test_rows_that_are_not_touched_stay_as_they_are() -> None:
    batch = make_batch(9, 8, [[5, 5]], key_count=4, filtered=True)
    assert batch.admitted is not None
    touched = batch.slots[batch.start : batch.stop][batch.admitted[batch.start : batch.stop] != 0]
    assert 0 < len(touched) < len(batch.weights)
    rest = np.setdiff1d(np.arange(len(batch.weights)), touched)
    for kind in RULES:
        before = [batch.weights, *fresh_states(kind, len(batch.weights), 8)]
        after = updated(batch, kind, "pooled", 0.1)
        assert_same_bits([array[rest] for array in after], [array[rest] for array in before])
        assert (after[0][touched] != before[0][touched]).any()


# ------------------------------------------------------------------------------------------------ bad input (I11)


def test_i11_bad_arrays_are_named() -> None:
    weights, slots, out = np.zeros((4, 3), np.float32), np.arange(2), np.zeros((2, 3), np.float32)
    cases: list[tuple[str, Any, Any, Any]] = [
        ("weights", weights.astype(np.float64), slots, out),
        ("weights", weights[:, :2], slots, out),
        ("weights", weights[0], slots, out),
        ("weights", None, slots, out),
        ("weights", np.zeros((4, 0), np.float32), slots, np.zeros((2, 0), np.float32)),
        ("weights", np.zeros((4, 8193), np.float32), slots, np.zeros((2, 8193), np.float32)),
        ("slots", weights, slots.astype(np.int32), out),
        ("slots", weights, slots[:, None], out),
        ("slots", weights, [0, 1], out),
        ("slots", weights, np.array([0, 4]), out),
        ("slots", weights, np.array([-1, 0]), out),
        ("slots", weights, np.array([0, 2**62]), out),
        ("slots", weights, np.array([-(2**63), 0]), out),
        ("out", weights, slots, np.zeros((2, 4), np.float32)),
        ("out", weights, slots, np.zeros((3, 3), np.float32)),
        ("out", weights, slots, np.zeros((2, 3))),
    ]
    for name, *arguments in cases:
        with pytest.raises(ShapeError, match=rf"^{name}\b"):
            kernels.gather(*arguments)
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match=r"out is .*read-only"):
        kernels.gather(weights, slots, frozen)
    slots.flags.writeable = False
    weights.flags.writeable = False
    kernels.gather(weights, slots, out)  # inputs may be read-only
    with pytest.raises(ShapeError, match=r"slots\[1\] = 9 is outside \[0, 4\), the range of rows of weights"):
        kernels.scatter(weights.copy(), np.array([0, 9]), out)


def test_i11_bad_bags_and_segments_are_named() -> None:
    batch = make_batch(10, 4, [[2, 0, 3], [1, 1, 1]], weighted=True, filtered=True)

    def broken(field: str, value: Any) -> Batch:
        return Batch(**{**vars(batch), field: value})

    def changed(array: NDArray[Any], index: int, value: int) -> NDArray[Any]:
        copy = array.copy()
        copy[index] = value
        return copy

    forward = [
        ("bag_offsets", broken("bag_offsets", batch.bag_offsets[:-1])),
        ("bag_offsets", broken("bag_offsets", changed(batch.bag_offsets, 2, 1))),
        ("bag_offsets", broken("bag_offsets", changed(batch.bag_offsets, 0, -1))),
        ("bag_offsets", broken("bag_offsets", changed(batch.bag_offsets, -1, 1000))),
        ("bag_offsets", broken("bag_offsets", changed(batch.bag_offsets, -1, -(2**63)))),
        ("out_cols", broken("columns", changed(batch.columns, 0, batch.width - 3))),
        ("out_cols", broken("columns", changed(batch.columns, 1, -1))),
        ("feature_mean", broken("means", batch.means[:1])),
        ("inverse", broken("inverse", changed(batch.inverse, 4, batch.start - 1))),
        ("inverse", broken("inverse", changed(batch.inverse, 4, batch.stop))),
        ("slots", broken("slots", changed(batch.slots, batch.start, len(batch.weights)))),
        ("unique_start", broken("stop", len(batch.slots) + 1)),
        ("unique_start", broken("start", -1)),
    ]
    for name, bad in forward:
        with pytest.raises(ShapeError, match=rf"^{name}\b"):
            pooled(bad)
    assert batch.sample_weights is not None
    with pytest.raises(ShapeError, match=r"^per_sample_weights\b"):
        pooled(broken("sample_weights", batch.sample_weights[:-1]))
    backward = [
        ("occurrence_order", broken("order", changed(batch.order, 4, 0))),
        ("occurrence_order", broken("order", batch.order.astype(np.int32))),
        ("segment_offsets", broken("offsets", changed(batch.offsets, batch.start + 1, 10**6))),
        ("segment_offsets", broken("offsets", changed(batch.offsets, batch.start + 1, 0))),
        ("unique_start", broken("offsets", batch.offsets[: batch.stop])),
        ("admitted", broken("admitted", np.ones(3, np.uint8))),
    ]
    for name, bad in backward:
        with pytest.raises(ShapeError, match=rf"^{name}\b"):
            pooled_grad(bad)
        with pytest.raises(ShapeError, match=rf"^{name}\b"):
            sequence_grad(bad)
    with pytest.raises(ShapeError, match="states has 0 arrays; adam needs 2"):
        kernels.update(
            UpdateRule("adam", lr=1), np.zeros((2, 3), np.float32), [], np.arange(2), np.zeros((2, 3), np.float32)
        )
    rows, rowwise = np.zeros((2, 3), np.float32), UpdateRule("rowwise_adagrad", lr=1)
    with pytest.raises(ShapeError, match=r"^states\[0\]"):
        kernels.update(rowwise, rows, [rows.copy()], np.arange(2), rows.copy())
    with pytest.raises(ShapeError, match=r"^rule is None"):
        kernels.update(None, np.zeros((2, 3), np.float32), [], np.arange(2), np.zeros((2, 3), np.float32))  # type: ignore[arg-type]


def test_i11_bad_rules_are_refused() -> None:
    for options in (
        {"lr": -1.0}, {"lr": float("nan")}, {"lr": float("inf")}, {"lr": 1, "eps": -1.0}, {"lr": 1, "weight_decay": float("nan")},
        {"lr": 1, "beta1": 1.0}, {"lr": 1, "beta2": -0.1}, {"lr": 1, "beta2": float("nan")}, {"lr": 1, "step": 0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            UpdateRule("adam", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="adamw"):
        UpdateRule("adamw", lr=1)


def test_empty_calls_do_nothing() -> None:
    for dim in DIMS:
        for lengths in ([], [[]], [[0, 0]], [[0], [0]]):
            batch = make_batch(0, dim, lengths, before=0, after=0)
            for result in every_result(batch)[:4]:
                assert result.size == 0 or set(np.unique(result)) <= {0, 9}
    batch = make_batch(0, 2, [[0, 0]], means=1)
    np.testing.assert_array_equal(pooled(batch)[:, batch.columns[0] : batch.columns[0] + 2], 0)


def test_boolean_masks_are_as_good_as_bytes() -> None:
    batch = make_batch(11, 4, [[2, 3]], means=1, filtered=True)
    assert batch.admitted is not None
    flags = Batch(**{**vars(batch), "means": batch.means.astype(bool), "admitted": batch.admitted.astype(bool)})
    assert_same_bits(every_result(flags), every_result(batch))
