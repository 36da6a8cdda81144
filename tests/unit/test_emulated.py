"""The emulated device: stated times on a clock of the test's own, results of the CPU, rows that only copies reach."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.devices import Emulated, backend_for
from promises.piped import train_piped
from promises.strategies import World
from promises.training import make_collection, model_state, train


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def device(h2d: float = 2.0, d2h: float = 1.0, compute_ms: float = 5.0) -> tuple[Emulated, Clock]:
    clock = Clock()
    return Emulated(h2d, d2h, compute_ms, clock=clock, sleep=clock.sleep), clock


@pytest.mark.parametrize(
    "arguments", [(0, 1, 1), (1, -1, 1), (1, 1, -1), (math.nan, 1, 1), ("1", 1, 1), (1, 1, math.inf), (True, 1, 1)]
)
def test_bad_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(ec.ConfigError, match="gbps|compute_ms"):
        Emulated(*arguments)


def test_copies_take_their_bytes_over_the_bandwidth() -> None:
    backend, clock = device()
    with backend.staging((1000, 250)) as block:
        block.array[...] = 3.0
        rows = backend.upload(block)
        assert clock.now == pytest.approx(100 + 1e6 / 2e9)
        values = backend.to_host(rows)
    assert clock.now == pytest.approx(100 + 1e6 / 2e9 + 1e6 / 1e9) and (values == 3).all()
    assert (backend.h2d.bytes, backend.d2h.bytes) == (10**6, 10**6)
    with pytest.raises(ec.ConfigError, match="no NumPy view"):
        backend.as_numpy(rows)


def test_a_copy_waits_for_the_one_before_it() -> None:
    backend, clock = device()
    backend.h2d.copy(2_000)
    busy_until = backend.h2d._free_at
    clock.now -= 0.5e-6  # as if another thread had asked in between
    backend.h2d.copy(2_000)
    assert clock.now == pytest.approx(busy_until + 1e-6)


def test_a_step_takes_the_stated_time_whatever_it_took() -> None:
    backend, clock = device()
    ebc = ec.EmbeddingBagCollection([ec.TableConfig("item", 4, hbm_rows=8)], device=backend)
    assert ebc.manager.backend is backend is backend_for(backend)
    batch = ec.JaggedFeatures(["item"], torch.arange(4), torch.ones(4, dtype=torch.int64))
    for step in range(3):
        loss = ebc(batch).values().sum()
        began = clock.now
        clock.now += 0.002  # the dense model
        loss.backward()
        assert clock.now - began == pytest.approx(0.005) and backend.steps == step + 1
    with torch.no_grad():
        ebc(batch)
    ebc.eval()
    ebc(batch)
    assert backend.steps == 3 and backend.busy_s == pytest.approx(0.015)


@pytest.mark.parametrize("pooled", [True, False])
def test_results_are_those_of_the_cpu(pooled: bool) -> None:
    """Serial and through a pipeline, with rows that go in and out by copies."""
    rng = np.random.default_rng(1)
    tables = [ec.TableConfig("f", 6, dtype="bfloat16"), ec.TableConfig("g", 3, pooling="mean")]
    batches = [ec.JaggedFeatures(["f", "g"], rng.integers(0, 40, 12), np.full(6, 2)) for _ in range(30)]
    world = World(tables, ec.Adam(lr=0.01), pooled, 1, 1, batches)
    plain = make_collection(world, 100)
    outputs, state = train(plain, world), model_state(plain.manager)
    for depth in (0, 1, 4):
        backend = Emulated(math.inf, math.inf, 0)
        kind = ec.EmbeddingBagCollection if pooled else ec.EmbeddingCollection
        sized = [ec.TableConfig(t.name, t.embedding_dim, pooling=t.pooling, dtype=t.dtype, hbm_rows=12) for t in tables]
        collection = kind(sized, optimizer=world.optimizer, device=backend)
        found = train(collection, world) if depth == 0 else train_piped(collection, world, depth)[0]
        assert found == outputs and model_state(collection.manager) == state
        assert backend.h2d.bytes > 0 and backend.d2h.bytes > 0 and backend.steps == 30
        staged = sum(len(blocks) for blocks in backend._staging._idle.values())
        assert staged <= 4 * len(backend._staging._idle)
