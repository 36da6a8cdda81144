"""Buffers of more than 2^32 elements: kernels read and write the rows at their end as they do those of a small buffer.

The buffers are address space only, of which a few pages get memory: those that are touched.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from embcache._core import kernels
from embcache._core.kernels import UpdateRule
from unit.test_kernels import RULES, Batch, fresh_states, grad_out_of, make_batch

DIM = 64
ROWS = 2**32 // DIM + 1000  # 16 GiB of float32
NORESERVE = 0x4000

Rows = NDArray[Any]


def address_space(dim: int, dtype: Any = np.float32) -> Rows:
    size = ROWS * dim * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        pytest.skip(f"no {size} bytes of address space: {error}")
    return np.frombuffer(memory, dtype).reshape(ROWS, dim)


@pytest.fixture
def batch() -> Batch:
    return make_batch(3, DIM, [[2, 0, 3, 9], [1, 4, 0, 2]], key_count=9, weighted=True)


def far(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the rows of a small buffer lie in a large one, each beyond element 2^32, and the batch's slots there."""
    places = ROWS - 1 - 7 * np.arange(len(batch.weights))
    assert places.min() * DIM >= 2**32
    return places, np.where(batch.slots >= 0, places[batch.slots], batch.slots)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int16])
def test_rows_beyond_element_2_to_the_32_are_read_and_written(batch: Batch, dtype: Any, threads: int) -> None:
    places, slots = far(batch)
    large, some = address_space(DIM, dtype), np.arange(len(places) * DIM).reshape(-1, DIM).astype(dtype)
    kernels.scatter(large, places, some, num_threads=threads)
    assert np.array_equal(large[places], some) and not large[places - 1].any() and not large[:100].any()
    found = np.empty_like(some)
    kernels.gather(large, places[::-1].copy(), found, num_threads=threads)
    assert np.array_equal(found, some[::-1])
    shape = batch.batch_size, batch.width
    pooled = [np.zeros(shape, np.float32) for _ in range(2)]
    grads = [np.zeros(batch.bag_offsets[-1] - batch.bag_offsets[0], np.float32) for _ in range(2)]
    for i, (weights, at) in enumerate(((some, batch.slots), (large, slots))):
        options: dict[str, Any] = {**batch.range, "num_threads": threads}
        kernels.pooled_forward(weights, at, batch.inverse, *batch.bags, pooled[i], **options)
        kernels.per_sample_weight_grad(grad_out_of(batch), weights, at, batch.inverse, *batch.bags, grads[i], **options)
    assert pooled[0].any() and np.array_equal(pooled[0], pooled[1])
    assert grads[0].any() and np.array_equal(grads[0], grads[1])


@pytest.mark.parametrize("kind", RULES)
def test_rows_beyond_element_2_to_the_32_are_trained(batch: Batch, kind: str) -> None:
    places, slots = far(batch)
    rule = UpdateRule(kind, weight_decay=0.01, **RULES[kind])
    small = [batch.weights.copy(), *fresh_states(kind, len(places), DIM)]
    large = [address_space(array.shape[1]) for array in small]
    for array, other in zip(small, large, strict=True):
        other[places] = array
    for (weights, *states), at in ((small, batch.slots), (large, slots)):
        kernels.segment_update_pooled(
            rule, weights, states, at, grad_out_of(batch), batch.order, batch.offsets, *batch.bags,
            per_sample_weights=batch.sample_weights, **batch.range,
        )  # fmt: skip
    assert not np.array_equal(small[0], batch.weights)
    for array, other in zip(small, large, strict=True):
        assert np.array_equal(other[places], array) and not other[places - 1].any()
