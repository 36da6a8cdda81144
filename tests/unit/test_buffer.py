"""HbmBuffer: one allocation for all tables, bases, constant slots, resizing, and rows through either kind of backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.buffer import HbmBuffer
from embcache.devices import backend_for
from embcache.layout import TableLayout

TABLES = [
    ec.TableConfig("a", 3),
    ec.TableConfig("b", 16, admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.5)),
    ec.TableConfig("c", 3),
]


def make(spec: ec.OptimizerSpec, capacities: list[int], kernels: str = "auto") -> HbmBuffer:
    return HbmBuffer(TableLayout(TABLES), spec, backend_for("cpu", kernels=kernels), capacities)


def test_one_contiguous_allocation_with_groups_and_bases():
    buffer = make(ec.Adam(), [4, 5, 6])  # in the order of the layout: b, a, c
    assert [tuple(w.shape) for w in buffer.weights] == [(5, 16), (6 + 7, 3)]
    assert buffer.bases.tolist() == [0, 0, 6] and buffer.group_of == [0, 1, 1]
    assert [buffer.constant_slot(t) for t in range(3)] == [4, 5, 12]
    assert buffer.weights[1].data_ptr() == buffer.weights[0].data_ptr() + 4 * 5 * 16
    for s in range(2):
        assert buffer.states[1][s].data_ptr() == buffer.states[0][s].data_ptr() + 4 * 5 * 16
    assert buffer.bytes == 4 * 3 * (5 * 16 + 13 * 3)
    assert make(ec.SGD(), [4, 5, 6]).states == [[], []]
    assert [s.shape[1] for states in make(ec.RowWiseAdagrad(), [4, 5, 6]).states for s in states] == [1, 1]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_constant_slots_hold_the_default_and_resizing_keeps_the_rest(kernels):
    buffer = make(ec.Adagrad(), [4, 5, 6], kernels)
    for array in (*buffer.weights, *(state for states in buffer.states for state in states)):
        array.copy_(torch.arange(float(array.numel())).view(array.shape))
    before = [
        [part.clone() for part in (w, states[0])] for w, states in zip(buffer.weights, buffer.states, strict=True)
    ]
    buffer.resize([8, 5, 3])
    assert buffer.bases.tolist() == [0, 0, 6] and buffer.bytes == 4 * 2 * (9 * 16 + (6 + 4) * 3)
    for kept, now in zip(before[0], (buffer.weights[0], buffer.states[0][0]), strict=True):
        assert torch.equal(now[:4], kept[:4])
    for kept, now in zip(before[1], (buffer.weights[1], buffer.states[1][0]), strict=True):
        assert torch.equal(now[:5], kept[:5]) and torch.equal(now[6:9], kept[6:9])
    assert buffer.weights[0][8].tolist() == [0.5] * 16
    assert not buffer.weights[1][5].any() and not buffer.weights[1][9].any() and not buffer.states[0][0][8].any()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("spec", [ec.SGD(), ec.RowWiseAdagrad(), ec.Adam()], ids=lambda spec: spec.kind)
def test_rows_in_and_out_are_exact(kernels, spec):
    manager = ec.EmbCacheManager(TABLES, optimizer=spec)
    buffer, host = make(spec, [4, 5, 6], kernels), manager.host_tables[2]
    generator = np.random.default_rng(0)
    weights = generator.random((4, 3), dtype=np.float32)
    state = generator.random((4, host.state_dim), dtype=np.float32)
    host.assign(np.arange(4), weights, state)
    rows, slots = host.find(np.array([2, 0, 3])), np.array([6, 9, 8])
    buffer.swap_in(host, 2, rows, slots)
    read, *states = buffer.read(2, slots)
    np.testing.assert_array_equal(read, weights[[2, 0, 3]])
    if states:
        np.testing.assert_array_equal(np.concatenate(states, axis=1), state[[2, 0, 3]])
    host.assign(np.arange(4), np.zeros_like(weights), np.zeros_like(state))
    buffer.swap_out(host, 2, rows, slots)
    back = host.lookup_rows(np.arange(4))
    weights[1], state[1] = 0, 0
    np.testing.assert_array_equal(back[0], weights)
    np.testing.assert_array_equal(back[1], state)
