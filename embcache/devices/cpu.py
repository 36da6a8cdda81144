"""The CPU as a device: the compiled kernels on the tensors' own memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core import kernels
from .._core.kernels import UpdateRule
from ..errors import HostMemoryError
from ..hostmemory import DONE, HUGE_PAGE_BYTES, Event, StagingBlock, map_rows, unpromised_bytes
from ..lookup import GroupLookup
from .backend import Flags, Indexes, check_rows, host_view, readable_view

__all__ = ["CpuBackend"]


class CpuBackend:
    """The compiled kernels on tensors in host memory.

    Parameters
    ----------
    num_threads : int, optional
    """

    direct = True

    def __init__(self, num_threads: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.num_threads = num_threads

    # memory

    def allocate(self, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeroed (rows, dim) in huge pages, given by the kernel page by page at first touch.

        A forked child sees zeros in place of a buffer of 2 MiB or more: it neither copies nor pins the parent's rows
        (promise I12), and its doors refuse it anyway.
        """
        check_rows(rows, dim)
        nbytes = rows * dim * dtype.itemsize
        if nbytes < HUGE_PAGE_BYTES:
            return torch.zeros(rows, dim, dtype=dtype)
        try:
            return map_rows(rows, dim, dtype)
        except (OSError, OverflowError, ValueError) as error:
            raise HostMemoryError(
                f"no memory for a buffer of {rows} rows x {dim} ({nbytes} bytes): {error}; give fewer hbm_rows or hbm_bytes"
            ) from error

    def free_memory(self) -> int:
        return unpromised_bytes()

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        return host_view(tensor)

    # copies

    def to_device(self, values: NDArray[Any] | Tensor) -> Tensor:
        if isinstance(values, Tensor):
            return values
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        return host_view(tensor)

    def fetched(self, tensor: Tensor) -> contextlib.AbstractContextManager[NDArray[Any]]:
        return contextlib.nullcontext(self.to_host(tensor))

    @contextlib.contextmanager
    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> Iterator[StagingBlock]:
        array = np.empty(tuple(shape), dtype)
        yield StagingBlock(array, torch.from_numpy(array))

    def upload(self, block: StagingBlock) -> Tensor:
        return block.tensor

    def download(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Event:
        for array, slots, piece in parts:
            self.gather_rows(array, slots, piece)
        return DONE

    def side_stream(self) -> Any:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return None

    def end_step(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    # rows

    def gather_rows(self, weights: Tensor, slots: Indexes, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(slots), weights.shape[-1], dtype=weights.dtype)
        kernels.gather(host_view(weights), host_view(slots), host_view(out), self.num_threads)
        return out

    def scatter_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        kernels.scatter(host_view(weights), host_view(slots), host_view(rows), self.num_threads)

    def add_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        kernels.add_rows(host_view(weights), host_view(slots), host_view(rows), self.num_threads)

    def lookup(self, **arrays: Any) -> GroupLookup:
        return GroupLookup(**arrays)

    def pooled_forward(
        self, weights: Tensor, lookup: GroupLookup, out: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        kernels.pooled_forward(
            host_view(weights),
            lookup.slots,
            lookup.inverse,
            *lookup.bags(),
            host_view(out),
            per_sample_weights=None if per_sample_weights is None else readable_view(per_sample_weights),
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return out

    def sequence_forward(self, weights: Tensor, lookup: GroupLookup, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(lookup.position_count, weights.shape[-1], dtype=torch.float32)
        kernels.sequence_forward(
            host_view(weights),
            lookup.slots,
            lookup.inverse[lookup.first_position : lookup.last_position],
            host_view(out),
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return out

    def segment_grad_pooled(
        self, grad_out: Tensor, lookup: GroupLookup, dim: int, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        grad = torch.empty(lookup.unique_count, dim, dtype=torch.float32)
        order, offsets = lookup.segments()
        kernels.segment_grad_pooled(
            readable_view(grad_out),
            order,
            offsets,
            *lookup.bags(),
            grad.numpy(),
            per_sample_weights=None if per_sample_weights is None else readable_view(per_sample_weights),
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return grad

    def segment_grad_sequence(self, grad_out: Tensor, lookup: GroupLookup) -> Tensor:
        grad = torch.empty(lookup.unique_count, grad_out.shape[-1], dtype=torch.float32)
        kernels.segment_grad_sequence(
            readable_view(grad_out),
            *lookup.segments(),
            grad.numpy(),
            first_position=lookup.first_position,
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return grad

    def per_sample_weight_grad(self, grad_out: Tensor, weights: Tensor, lookup: GroupLookup) -> Tensor:
        grad = torch.empty(lookup.position_count, dtype=torch.float32)
        kernels.per_sample_weight_grad(
            readable_view(grad_out),
            host_view(weights),
            lookup.slots,
            lookup.inverse,
            *lookup.bags(),
            grad.numpy(),
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return grad

    def update(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        slots: Indexes,
        grad: Tensor,
        admitted: Flags | None = None,
    ) -> None:
        kernels.update(
            rule,
            host_view(weights),
            [host_view(state) for state in states],
            host_view(slots),
            readable_view(grad),
            admitted=None if admitted is None else host_view(admitted),
            num_threads=self.num_threads,
        )

    def segment_update_pooled(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        lookup: GroupLookup,
        grad_out: Tensor,
        per_sample_weights: Tensor | None = None,
    ) -> None:
        order, offsets = lookup.segments()
        kernels.segment_update_pooled(
            rule,
            host_view(weights),
            [host_view(state) for state in states],
            lookup.slots,
            readable_view(grad_out),
            order,
            offsets,
            *lookup.bags(),
            per_sample_weights=None if per_sample_weights is None else readable_view(per_sample_weights),
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )

    def segment_update_sequence(
        self, rule: UpdateRule, weights: Tensor, states: Sequence[Tensor], lookup: GroupLookup, grad_out: Tensor
    ) -> None:
        kernels.segment_update_sequence(
            rule,
            host_view(weights),
            [host_view(state) for state in states],
            lookup.slots,
            readable_view(grad_out),
            *lookup.segments(),
            first_position=lookup.first_position,
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
