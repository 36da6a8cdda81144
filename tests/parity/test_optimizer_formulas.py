"""Each optimizer over 20 steps against torch.optim on sparse gradients, and against its formula in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import embcache.config as ec
from embcache.devices import Backend, backend_for, update_rule
from embcache.errors import ConfigError

STEPS, ROWS = 20, 30
SPECS = [ec.SGD(lr=0.1), ec.Adagrad(lr=0.1, initial_accumulator_value=0.1), ec.RowWiseAdagrad(lr=0.1), ec.Adam(lr=0.05)]
DIMS = [1, 3, 8, 64, 129]
Doubles = NDArray[np.float64]


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from torch's threads, and waiting for them on a busy machine takes long."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


@pytest.fixture(params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return backend_for("cpu", kernels=request.param)


def steps(dim: int) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Rows touched at each step, and their gradients: of all sizes, zeros included."""
    rng = np.random.default_rng(dim)
    result = []
    for step in range(STEPS):
        slots = rng.permutation(ROWS)[: rng.integers(1, ROWS)]
        grad = (rng.standard_normal((len(slots), dim)) * 10.0 ** rng.integers(-3, 2)).astype(np.float32)
        grad[rng.random(grad.shape) < 0.1] = 0
        result.append((slots, grad * (step % 7 != 3)))
    return result


def first_weights(dim: int) -> NDArray[np.float32]:
    return np.random.default_rng(99).standard_normal((ROWS, dim)).astype(np.float32)


def first_states(spec: ec.OptimizerSpec, dim: int) -> list[torch.Tensor]:
    values = zip(spec.state_widths(dim), spec.initial_state(), strict=True)
    return [torch.full((ROWS, width), value) for width, value in values]


def trained(
    backend: Backend, spec: ec.OptimizerSpec, dim: int
) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
    weights, states = torch.from_numpy(first_weights(dim)), first_states(spec, dim)
    for step, (slots, grad) in enumerate(steps(dim), 1):
        backend.update(update_rule(spec, step=step), weights, states, slots, torch.from_numpy(grad))
    return weights.numpy(), [state.numpy() for state in states]


def in_float64(spec: Any, dim: int) -> tuple[Doubles, list[Doubles]]:
    """The formulas of config.py, written down once more."""
    w = first_weights(dim).astype(np.float64)
    s = [state.numpy().astype(np.float64) for state in first_states(spec, dim)]
    for t, (rows, grad) in enumerate(steps(dim), 1):
        g = grad.astype(np.float64) + spec.weight_decay * w[rows]
        if spec.kind == "sgd":
            w[rows] -= spec.lr * g
        elif spec.kind == "adagrad":
            s[0][rows] += g * g
            w[rows] -= spec.lr * g / (np.sqrt(s[0][rows]) + spec.eps)
        elif spec.kind == "rowwise_adagrad":
            s[0][rows] += (g * g).mean(1, keepdims=True)
            w[rows] -= spec.lr * g / (np.sqrt(s[0][rows]) + spec.eps)
        else:
            b1, b2 = spec.betas
            s[0][rows] += (1 - b1) * (g - s[0][rows])
            s[1][rows] += (1 - b2) * (g * g - s[1][rows])
            rate = spec.lr * np.sqrt(1 - b2**t) / (1 - b1**t)
            w[rows] -= rate * s[0][rows] / (np.sqrt(s[1][rows]) + spec.eps)
    return w, s


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_every_formula_against_float64(backend: Backend, spec: ec.OptimizerSpec, decay: float, dim: int) -> None:
    spec = dataclasses.replace(spec, weight_decay=decay)
    weights, states = trained(backend, spec, dim)
    want_weights, want_states = in_float64(spec, dim)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-4, atol=2e-5)
    for state, want in zip(states, want_states, strict=True):
        np.testing.assert_allclose(state, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1], SPECS[3]], ids=lambda spec: spec.kind)
def test_against_torch_optim_on_sparse_gradients(backend: Backend, spec: Any, dim: int) -> None:
    table = torch.from_numpy(first_weights(dim)).requires_grad_()
    peer: torch.optim.Optimizer
    if spec.kind == "sgd":
        peer = torch.optim.SGD([table], lr=spec.lr)
    elif spec.kind == "adagrad":
        start = spec.initial_accumulator_value
        peer = torch.optim.Adagrad([table], lr=spec.lr, eps=spec.eps, initial_accumulator_value=start)
    else:
        peer = torch.optim.SparseAdam([table], lr=spec.lr, betas=spec.betas, eps=spec.eps)
    for slots, grad in steps(dim):
        table.grad = torch.sparse_coo_tensor(
            torch.from_numpy(slots)[None], torch.from_numpy(grad), (ROWS, dim), check_invariants=True
        )
        with torch.sparse.check_sparse_tensor_invariants():
            peer.step()
    weights, states = trained(backend, spec, dim)
    np.testing.assert_allclose(weights, table.detach().numpy(), rtol=1e-4, atol=1e-5)
    names = {"sgd": [], "adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"]}[spec.kind]
    for name, state in zip(names, states, strict=True):
        np.testing.assert_allclose(state, peer.state[table][name].numpy(), rtol=1e-4, atol=1e-6)


def test_rowwise_adagrad_averages_squares_and_does_not_square_the_mean(backend: Backend) -> None:
    """CASES.md line 11: a gradient whose mean is 0 still counts."""
    weights, total = torch.zeros(1, 2), torch.zeros(1, 1)
    backend.update(
        update_rule(ec.RowWiseAdagrad(lr=1)), weights, [total], np.zeros(1, np.int64), torch.tensor([[3.0, -3.0]])
    )
    assert total.item() == 9
    np.testing.assert_allclose(weights.numpy(), [[-1, 1]], rtol=1e-6)


def test_a_zero_gradient_moves_nothing_where_the_formula_says_so(backend: Backend) -> None:
    for spec in SPECS[:3]:
        weights, states = torch.from_numpy(first_weights(5)), first_states(dataclasses.replace(spec), 5)
        before = weights.clone()
        backend.update(update_rule(spec), weights, states, np.arange(ROWS), torch.zeros(ROWS, 5))
        assert torch.equal(weights, before)


def test_a_rule_takes_its_rate_from_a_scheduler_and_its_bias_correction_from_the_step() -> None:
    spec = ec.Adam(lr=0.001, betas=(0.9, 0.99))
    for t in (1, 2, 17, 100_000, 2**40):
        want = 0.5 * (1 - 0.99**t) ** 0.5 / (1 - 0.9**t)
        assert update_rule(spec, step=t, lr=0.5).lr == pytest.approx(want, rel=1e-6)
    assert update_rule(ec.SGD(lr=0.25)).lr == 0.25
    for lr in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="lr"):
            update_rule(ec.SGD(), lr=lr)
