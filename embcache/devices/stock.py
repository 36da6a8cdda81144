"""Any device that torch knows, by stock operators alone: CUDA, NPU, and CPU tensors too, which is how it is tested.

Only deterministic operators: gradients are summed through the planner's CSR arrays in blocks, never by an atomic
``index_add_``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core.kernels import UpdateRule
from ..errors import ConfigError, ShapeError
from ..hostmemory import DONE, Event, StagingBlock, StagingPool, unpromised_bytes
from ..lookup import GroupLookup, TorchIndexes
from .backend import Flags, Indexes, check_rows, host_view

__all__ = ["TorchBackend"]


def _sum_segments(rows: Tensor, indexes: Tensor, offsets: Tensor, factors: Tensor | None = None) -> Tensor:
    """Sum of ``rows[indexes[offsets[s] : offsets[s + 1]]]`` for each s, each in order by one thread: deterministic."""
    count = offsets.numel() - 1
    if indexes.numel() == 0 or count == 0:
        return rows.new_zeros(count, rows.shape[1])
    return torch.nn.functional.embedding_bag(
        indexes, rows, offsets, mode="sum", include_last_offset=True, per_sample_weights=factors
    )


class TorchBackend:
    """Stock, deterministic torch operators on any device.

    Parameters
    ----------
    device : torch.device
    """

    direct = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_threads: int | None = None
        # torch.cuda or torch.npu: streams, events and memory under the same names.
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._staging = StagingPool(pin=self._module is not None)
        self._side_stream: Any = None
        self._out_stream: Any = None

    # memory

    def allocate(self, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        check_rows(rows, dim)
        return torch.zeros(rows, dim, dtype=dtype, device=self.device)

    def free_memory(self) -> int:
        return unpromised_bytes() if self._module is None else int(self._module.mem_get_info(self.device)[0])

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        raise ConfigError(
            f"a tensor of device {str(self.device)!r} has no NumPy view; use to_host, or staging and upload"
        )

    # copies

    def to_device(self, values: NDArray[Any] | Tensor) -> Tensor:
        array = host_view(values)
        if isinstance(array, Tensor):
            return array.to(self.device)
        with self.staging(array.shape, array.dtype) as block:
            block.array[...] = array
            return self.upload(block)

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        with self.fetched(tensor) as values:
            return values.copy()

    @contextlib.contextmanager
    def fetched(self, tensor: Tensor) -> Iterator[NDArray[Any]]:
        tensor = tensor.detach()
        memory = self._staging.take(tensor.numel() * tensor.element_size())
        staged = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        try:
            staged.copy_(tensor, non_blocking=True)
            self.event().synchronize()
            yield host_view(staged)
        finally:
            self._staging.give(memory, DONE)

    @contextlib.contextmanager
    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> Iterator[StagingBlock]:
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        memory = self._staging.take(nbytes)
        array = memory.numpy()[:nbytes].view(kind).reshape(tuple(shape))
        block = StagingBlock(array, torch.from_numpy(array))
        try:
            yield block
        finally:
            self._staging.give(memory, block.pending)

    def upload(self, block: StagingBlock) -> Tensor:
        if self._module is None:
            return block.tensor.clone()
        memory = block.tensor.to(self.device, non_blocking=True)
        block.pending = self.event()
        return memory

    def download(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Event:
        if self._module is None:
            for array, slots, piece in parts:
                self.gather_rows(array, slots, piece)
            return DONE
        gathered = [self.gather_rows(array, slots) for array, slots, _ in parts]
        ready = self.event()
        if self._out_stream is None:  # one of its own: copies of both directions go on at the same time
            self._out_stream = self._module.Stream(device=self.device)
        with self.stream(self._out_stream):
            self.wait(ready)
            for rows, (_, _, piece) in zip(gathered, parts, strict=True):
                piece.copy_(rows, non_blocking=True)
                rows.record_stream(self._out_stream)
            return self.event()

    def side_stream(self) -> Any:
        if self._side_stream is None and self._module is not None:
            self._side_stream = self._module.Stream(device=self.device)
        return self._side_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        if stream is None or self._module is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def event(self) -> Event:
        if self._module is None:
            return DONE
        event: Any = self._module.Event()
        event.record(self._module.current_stream(self.device))
        done: Event = event
        return done

    def wait(self, event: Event) -> None:
        if self._module is not None and event is not DONE:
            self._module.current_stream(self.device).wait_event(event)

    def end_step(self) -> None:
        return None

    def synchronize(self) -> None:
        if self._module is not None:
            self._module.synchronize(self.device)

    # rows

    def _indexes(self, values: Indexes) -> Tensor:
        return values.to(self.device) if isinstance(values, Tensor) else self.to_device(values)

    def _of(self, lookup: GroupLookup) -> TorchIndexes:
        if lookup.on_device is None:
            lookup.on_device = TorchIndexes(lookup, self.to_device)
        indexes: TorchIndexes = lookup.on_device
        return indexes

    @torch.no_grad()
    def gather_rows(self, weights: Tensor, slots: Indexes, out: Tensor | None = None) -> Tensor:
        if out is None or out.dtype is not weights.dtype:
            rows = weights.index_select(0, self._indexes(slots))
            return rows if out is None else out.copy_(rows)
        return torch.index_select(weights, 0, self._indexes(slots), out=out)

    @torch.no_grad()
    def scatter_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        weights.index_copy_(0, self._indexes(slots), rows)

    @torch.no_grad()
    def add_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        places = self._indexes(slots)
        weights.index_copy_(0, places, weights.index_select(0, places) + rows)

    def lookup(self, **arrays: Any) -> GroupLookup:
        return GroupLookup(**arrays)

    @torch.no_grad()
    def pooled_forward(
        self, weights: Tensor, lookup: GroupLookup, out: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        indexes, columns = self._of(lookup), lookup.bags()[2]
        factors = (
            None if per_sample_weights is None else per_sample_weights[lookup.first_position : lookup.last_position]
        )
        if weights.dtype is torch.float32:
            pooled = _sum_segments(weights, indexes.position_slots, indexes.bag_offsets, factors)
        else:
            rows = weights.index_select(0, indexes.unique_slots).float()
            pooled = _sum_segments(rows, indexes.position_uniques, indexes.bag_offsets, factors)
        if indexes.divisors is not None:
            pooled = pooled / indexes.divisors
        batch_size, dim = out.shape[0], weights.shape[1]
        for feature, column in enumerate(columns.tolist()):
            out[:, column : column + dim] = pooled[feature * batch_size : (feature + 1) * batch_size]
        return out

    @torch.no_grad()
    def sequence_forward(self, weights: Tensor, lookup: GroupLookup, out: Tensor | None = None) -> Tensor:
        rows = self.gather_rows(weights, self._of(lookup).position_slots, out)
        return rows if out is not None else rows.float()

    def _bag_grads(self, grad_out: Tensor, lookup: GroupLookup, dim: int) -> Tensor:
        """Gradient of each bag, feature-major: (F * B, dim)."""
        parts = [grad_out[:, column : column + dim] for column in lookup.bags()[2].tolist()]
        return torch.cat(parts) if parts else grad_out.new_zeros(0, dim)

    def _sum_occurrences(self, rows: Tensor, places: Tensor, lookup: GroupLookup, factors: Tensor | None) -> Tensor:
        """Gradient of each unique: occurrences summed by block, then blocks by unique; 0 where not admitted."""
        indexes = self._of(lookup)
        block_offsets, unique_blocks = indexes.blocks
        partials = _sum_segments(rows, places, block_offsets, factors)
        each_block = torch.arange(partials.shape[0], device=self.device)
        grad = _sum_segments(partials, each_block, unique_blocks)
        if indexes.kept is None:
            return grad
        return torch.zeros_like(grad).index_copy_(0, indexes.kept, grad.index_select(0, indexes.kept))

    @torch.no_grad()
    def segment_grad_pooled(
        self, grad_out: Tensor, lookup: GroupLookup, dim: int, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        indexes = self._of(lookup)
        factors = indexes.occurrence_factors
        if per_sample_weights is not None:
            chosen = per_sample_weights[lookup.first_position : lookup.last_position].index_select(
                0, indexes.occurrences
            )
            factors = chosen if factors is None else chosen * factors
        return self._sum_occurrences(self._bag_grads(grad_out, lookup, dim), indexes.occurrence_bags, lookup, factors)

    @torch.no_grad()
    def segment_grad_sequence(self, grad_out: Tensor, lookup: GroupLookup) -> Tensor:
        return self._sum_occurrences(grad_out.contiguous(), self._of(lookup).occurrences, lookup, None)

    @torch.no_grad()
    def per_sample_weight_grad(self, grad_out: Tensor, weights: Tensor, lookup: GroupLookup) -> Tensor:
        indexes = self._of(lookup)
        bag_grads = self._bag_grads(grad_out, lookup, weights.shape[1])
        if indexes.divisors is not None:
            bag_grads = bag_grads / indexes.divisors
        rows = weights.index_select(0, indexes.position_slots).float()
        return (bag_grads.index_select(0, indexes.bag_of_position) * rows).sum(1)

    @torch.no_grad()
    def update(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        slots: Indexes,
        grad: Tensor,
        admitted: Flags | None = None,
    ) -> None:
        places = self._indexes(slots)
        if admitted is not None:
            mask = admitted if isinstance(admitted, Tensor) else self.to_device(np.asarray(admitted, np.uint8))
            kept = mask.to(self.device).nonzero().squeeze(1)
            places, grad = places.index_select(0, kept), grad.index_select(0, kept)
        self._apply(rule, weights, states, places, grad)

    def _apply(self, rule: UpdateRule, weights: Tensor, states: Sequence[Tensor], places: Tensor, grad: Tensor) -> None:
        """The formulas of `UpdateRule` on the rows at `places`."""
        if len(states) != rule.state_count:
            raise ShapeError(f"states has {len(states)} arrays; {rule.kind} needs {rule.state_count}")
        rows = weights.index_select(0, places).float()
        old = [state.index_select(0, places) for state in states]
        if rule.weight_decay != 0:
            grad = grad + rule.weight_decay * rows
        if rule.kind == "sgd":
            new, change = [], grad
        elif rule.kind == "adam":
            mean = old[0] + rule.one_minus_beta1 * (grad - old[0])
            square = old[1] + rule.one_minus_beta2 * (grad * grad - old[1])
            new, change = [mean, square], mean / (square.sqrt() + rule.eps)
        else:
            squares = grad * grad
            total = old[0] + (squares if rule.kind == "adagrad" else squares.mean(1, keepdim=True))
            new, change = [total], grad / (total.sqrt() + rule.eps)
        weights.index_copy_(0, places, (rows - rule.lr * change).to(weights.dtype))
        for state, values in zip(states, new, strict=True):
            state.index_copy_(0, places, values)

    def _apply_to_uniques(
        self, rule: UpdateRule, weights: Tensor, states: Sequence[Tensor], lookup: GroupLookup, grad: Tensor
    ) -> None:
        indexes = self._of(lookup)
        places = indexes.unique_slots
        if indexes.kept is not None:
            places, grad = places.index_select(0, indexes.kept), grad.index_select(0, indexes.kept)
        self._apply(rule, weights, states, places, grad)

    @torch.no_grad()
    def segment_update_pooled(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        lookup: GroupLookup,
        grad_out: Tensor,
        per_sample_weights: Tensor | None = None,
    ) -> None:
        grad = self.segment_grad_pooled(grad_out, lookup, weights.shape[1], per_sample_weights)
        self._apply_to_uniques(rule, weights, states, lookup, grad)

    @torch.no_grad()
    def segment_update_sequence(
        self, rule: UpdateRule, weights: Tensor, states: Sequence[Tensor], lookup: GroupLookup, grad_out: Tensor
    ) -> None:
        self._apply_to_uniques(rule, weights, states, lookup, self.segment_grad_sequence(grad_out, lookup))
