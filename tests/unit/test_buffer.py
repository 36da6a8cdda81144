"""HbmBuffer: one allocation for all tables, bases, constant slots, resizing, and rows through either kind of backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.buffer import HbmBuffer
from embcache.devices import backend_for
from embcache.layout import TableLayout
from embcache.rowtypes import ROW_TYPES

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


def put(buffer, host, table, rows, slots):
    """Host rows into slots, as they are."""
    group = buffer.group_of[table]
    arrays = [buffer.weights[group], *buffer.states[group]]
    kinds = [ROW_TYPES[host.dtype].storage, *[np.float32] * (len(arrays) - 1)]
    values = [np.empty((len(rows), array.shape[1]), kind) for array, kind in zip(arrays, kinds, strict=True)]
    host.read_into(rows, values[0], None, values[1:])
    for array, rows_here in zip(arrays, values, strict=True):
        buffer.backend.scatter_rows(array, slots, torch.from_numpy(rows_here).view(array.dtype))


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
    put(buffer, host, 2, rows, slots)
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


MIXED = [
    ec.TableConfig("a", 8),
    ec.TableConfig("b", 8, dtype="bfloat16"),
    ec.TableConfig("c", 8, dtype="float16"),
    ec.TableConfig("d", 3, dtype="bfloat16"),
    ec.TableConfig("e", 8, dtype="bfloat16"),
    ec.TableConfig(
        "f",
        16,
        dtype="float16",
        admit_and_evict=ec.AdmitAndEvictConfig(admit_threshold=2, not_admitted_default_value=0.1),
    ),
]


def test_one_allocation_a_dtype_and_one_a_state_array():
    layout = TableLayout(MIXED)
    assert [table.name for table in layout.tables] == ["a", "f", "c", "b", "e", "d"]
    assert [(g.dim, g.dtype, g.first_table, g.last_table) for g in layout.groups] == [
        (8, "float32", 0, 1), (16, "float16", 1, 2), (8, "float16", 2, 3), (8, "bfloat16", 3, 5), (3, "bfloat16", 5, 6),
    ]  # fmt: skip
    buffer = HbmBuffer(layout, ec.Adam(), backend_for("cpu"), [2, 3, 4, 5, 6, 7])
    f32, wide, f16, bf16, odd = buffer.weights
    assert [str(w.dtype)[6:] for w in buffer.weights] == ["float32", "float16", "float16", "bfloat16", "bfloat16"]
    assert f16.data_ptr() == wide.data_ptr() + 2 * wide.numel() and odd.data_ptr() == bf16.data_ptr() + 2 * bf16.numel()
    assert len({w.untyped_storage().data_ptr() for w in (f32, f16, bf16)}) == 3
    for s in range(2):
        arrays = [states[s] for states in buffer.states]
        assert all(array.dtype is torch.float32 for array in arrays)
        for before, after in zip(arrays, arrays[1:], strict=False):
            assert after.data_ptr() == before.data_ptr() + 4 * before.numel()
    rows = {"a": 3, "f": 4, "c": 5, "b": 6, "e": 7, "d": 8}
    size = {"a": 8 * 4, "f": 16 * 2, "c": 8 * 2, "b": 8 * 2, "e": 8 * 2, "d": 3 * 2}
    assert buffer.bytes == sum(
        count * (size[name] + 8 * (size[name] // (4 if name == "a" else 2))) for name, count in rows.items()
    )
    assert buffer.constants[1] == float(np.float16(0.1)) and buffer.weights[1][3].tolist() == [buffer.constants[1]] * 16


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_rows_in_and_out_keep_every_bit(kernels, dtype):
    """Signalling NaNs and subnormals included: swaps copy, they do not convert."""
    config = ec.TableConfig("t", 5, dtype=dtype)
    buffer = HbmBuffer(TableLayout([config]), ec.RowWiseAdagrad(), backend_for("cpu", kernels=kernels), [20_000])
    host = ec.EmbCacheManager([config], optimizer=ec.RowWiseAdagrad()).host_tables[0]
    storage = {"float16": np.float16, "bfloat16": np.int16}[dtype]
    bits = np.resize(np.arange(2**16, dtype=np.uint16), (14_000, 5))
    rows = host.insert(np.arange(len(bits)))
    state = np.random.default_rng(0).random((len(bits), 1), dtype=np.float32)
    host.write_from(rows, bits.view(storage), None, [state])
    slots = np.random.default_rng(1).permutation(20_000)[: len(bits)]
    put(buffer, host, 0, rows, slots)
    read, read_state = buffer.read(0, slots)
    assert read.dtype == storage and np.array_equal(read.view(np.uint16), bits) and np.array_equal(read_state, state)
    host.write_from(rows, np.zeros_like(bits).view(storage), None, [np.zeros_like(state)])
    buffer.swap_out(host, 0, rows, slots)
    back, back_state = np.zeros_like(bits), np.zeros_like(state)
    host.read_into(rows, back.view(storage), None, [back_state])
    assert np.array_equal(back, bits) and np.array_equal(back_state, state)
    buffer.resize([25_000])
    assert np.array_equal(buffer.read(0, slots)[0].view(np.uint16), bits)
    buffer.move(backend_for("cpu", kernels="torch"))
    assert np.array_equal(buffer.read(0, slots)[0].view(np.uint16), bits)
