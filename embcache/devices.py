"""Devices: the only file that knows cpu, cuda and npu.

A `Backend` is everything the rest of the package asks of a device: memory, copies, streams, and the row kernels on
tensors. There are two. `CpuBackend` runs the compiled kernels on the tensors' own memory. `TorchBackend` uses stock
torch operators and runs anywhere, on CPU tensors too, which is how it is tested; it uses deterministic operators only:
gradients are summed through the planner's CSR arrays in blocks, never by an atomic ``index_add_``.

Invariants. Every result is a pure function of its arguments on a given backend and machine: no thread count, placement
of rows or earlier call shows in it. Copies from a staging block are ordered before its memory is used again.
``torch_npu`` is imported only when an NPU is asked for; merely installed, without its runtime, it breaks ``import torch``.

Thread safety: a backend may be used from several threads; the caller orders calls that touch the same rows.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._core import kernels
from ._core.kernels import UpdateRule
from .config import MAX_EMBEDDING_DIM, Adagrad, Adam, OptimizerSpec
from .errors import ConfigError, HostMemoryError, ShapeError
from .hostmemory import DONE, HUGE_PAGE_BYTES, Event, StagingBlock, StagingPool, host_free_bytes, map_rows
from .lookup import GroupLookup, TorchIndexes

__all__ = [
    "Backend",
    "CpuBackend",
    "GroupLookup",
    "StagingBlock",
    "TorchBackend",
    "UpdateRule",
    "backend_for",
    "update_rule",
]

Indexes: TypeAlias = "NDArray[np.int64] | Tensor"
Flags: TypeAlias = "NDArray[np.uint8] | Tensor"


def update_rule(spec: OptimizerSpec, *, step: int = 1, lr: float | None = None) -> UpdateRule:
    """The kernels' form of an optimizer spec at one step.

    Parameters
    ----------
    spec : OptimizerSpec
    step : int
        Number of this update, from 1 (Adam's t).
    lr : float, optional
        Replaces ``spec.lr``, for a scheduler.

    Raises
    ------
    ConfigError
        For a rate that is negative or not finite, or a step below 1.
    """
    numbers: dict[str, float] = {"lr": spec.lr if lr is None else float(lr), "weight_decay": spec.weight_decay}
    if isinstance(spec, (Adagrad, Adam)):
        numbers["eps"] = spec.eps
    if isinstance(spec, Adam):
        numbers["beta1"], numbers["beta2"] = spec.betas
    return UpdateRule(spec.kind, step=step, **numbers)


# ------------------------------------------------------------------------------------------------------------- backend


class Backend(Protocol):
    """What a device can do. All row methods take tensors of the device; index arrays may be NumPy or torch.

    `weights` are float32, float16 or bfloat16; everything else, results included, is float32. A narrower weight is
    widened when read; when written it is rounded to nearest even. Nothing is recorded for autograd.

    Attributes
    ----------
    device : torch.device
    direct : bool
        Tensors lie in host memory that NumPy can see: rows may be moved by writing to ``as_numpy(tensor)``.
    num_threads : int, optional
    """

    device: torch.device
    direct: bool
    num_threads: int | None

    def allocate(self, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeroed (rows, dim); `HostMemoryError` where host memory is refused."""

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """The tensor's memory, on a direct backend; bfloat16, which NumPy has not, as the int16 that hold its bits."""

    def to_device(self, values: NDArray[Any] | Tensor) -> Tensor:
        """Host values on the device; where the device is the host, the same memory."""

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        """Values of a tensor, complete on return; where the device is the host, the same memory. bfloat16 as in `as_numpy`."""

    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> contextlib.AbstractContextManager[StagingBlock]:
        """Host memory to fill and `upload`."""

    def upload(self, block: StagingBlock) -> Tensor:
        """The block's values on the device, ordered before later work of the current stream."""

    def side_stream(self) -> Any:
        """The backend's own stream for copies, or None where there are no streams."""

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` current within the block; None changes nothing."""

    def event(self) -> Event:
        """The present end of the current stream."""

    def wait(self, event: Event) -> None:
        """Let later work of the current stream wait for `event`."""

    def synchronize(self) -> None:
        """Block until the device has done everything."""

    def gather_rows(self, weights: Tensor, slots: Indexes, out: Tensor | None = None) -> Tensor:
        """``weights[slots]``, (n, D): of the weights' own type, or `out`, which may be float32 besides."""

    def scatter_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        """``weights[slots] = rows``, of the same type; slots are distinct."""

    def add_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        """``weights[slots] += rows``; slots are distinct."""

    def lookup(self, **arrays: Any) -> GroupLookup:
        """A `GroupLookup` of these arrays."""

    def pooled_forward(
        self, weights: Tensor, lookup: GroupLookup, out: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Sum or mean of each bag, written into the features' columns of `out` (B, W); returns `out`."""

    def sequence_forward(self, weights: Tensor, lookup: GroupLookup, out: Tensor | None = None) -> Tensor:
        """Row of each position of the group, (position_count, D)."""

    def segment_grad_pooled(
        self, grad_out: Tensor, lookup: GroupLookup, dim: int, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Gradient of each unique of the group, (unique_count, dim), from that of the bags (B, W)."""

    def segment_grad_sequence(self, grad_out: Tensor, lookup: GroupLookup) -> Tensor:
        """Gradient of each unique of the group from that of its positions (position_count, D)."""

    def per_sample_weight_grad(self, grad_out: Tensor, weights: Tensor, lookup: GroupLookup) -> Tensor:
        """Gradient of each position's weight, (position_count,)."""

    def update(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        slots: Indexes,
        grad: Tensor,
        admitted: Flags | None = None,
    ) -> None:
        """Apply the rule to the rows at `slots`, in place; slots are distinct where admitted."""

    def segment_update_pooled(
        self,
        rule: UpdateRule,
        weights: Tensor,
        states: Sequence[Tensor],
        lookup: GroupLookup,
        grad_out: Tensor,
        per_sample_weights: Tensor | None = None,
    ) -> None:
        """`segment_grad_pooled` and `update` at once, bit for bit the same."""

    def segment_update_sequence(
        self, rule: UpdateRule, weights: Tensor, states: Sequence[Tensor], lookup: GroupLookup, grad_out: Tensor
    ) -> None:
        """`segment_grad_sequence` and `update` at once, bit for bit the same."""


def backend_for(device: str | torch.device, kernels: str = "auto", num_threads: int | None = None) -> Backend:
    """The backend of a device.

    Parameters
    ----------
    device : str or torch.device
        ``"cpu"``, ``"cuda"`` or ``"npu"``, the latter two with an optional index.
    kernels : {"auto", "torch"}
        ``"torch"`` asks for `TorchBackend` on CPU as well.
    num_threads : int, optional
        Of the compiled kernels; None: the CPUs this process may use.

    Raises
    ------
    ConfigError
        For a device that is unknown or not there; says what would help.
    """
    if kernels not in ("auto", "torch"):
        raise ConfigError(f'kernels = {kernels!r}; give "auto" or "torch"')
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda", "npu") or (index and not index.isdigit()):
        raise ConfigError(f'device = {str(device)!r}; give "cpu", "cuda", "cuda:N", "npu" or "npu:N"')
    if kind == "cpu":
        return TorchBackend(torch.device("cpu")) if kernels == "torch" else CpuBackend(num_threads)
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise ConfigError(
                f'device = {str(device)!r}, but torch_npu cannot be imported ({error}); install it with Ascend CANN, or use "cpu"'
            ) from error
    module = getattr(torch, kind)
    if not module.is_available():
        raise ConfigError(
            f'device = {str(device)!r}, but torch {torch.__version__} finds no {kind} device here; install a build and a driver for it, or use "cpu"'
        )
    count = module.device_count()
    if index and int(index) >= count:
        raise ConfigError(
            f"device = {str(device)!r}, but there are {count} {kind} devices; give an index below {count}"
        )
    return TorchBackend(torch.device(kind, int(index) if index else module.current_device()))


def _check_rows(rows: int, dim: int) -> None:
    if rows < 0 or not 1 <= dim <= MAX_EMBEDDING_DIM:
        raise ShapeError(
            f"a buffer of {rows} rows of {dim} elements; give 0 or more rows of 1 to {MAX_EMBEDDING_DIM} elements"
        )


# ----------------------------------------------------------------------------------------------------------------- cpu


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
        _check_rows(rows, dim)
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
        return host_free_bytes()

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        return _numpy(tensor)

    # copies

    def to_device(self, values: NDArray[Any] | Tensor) -> Tensor:
        if isinstance(values, Tensor):
            return values
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        return _numpy(tensor)

    @contextlib.contextmanager
    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> Iterator[StagingBlock]:
        array = np.empty(tuple(shape), dtype)
        yield StagingBlock(array, torch.from_numpy(array))

    def upload(self, block: StagingBlock) -> Tensor:
        return block.tensor

    def side_stream(self) -> Any:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return DONE

    def wait(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None

    # rows

    def gather_rows(self, weights: Tensor, slots: Indexes, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(len(slots), weights.shape[-1], dtype=weights.dtype)
        kernels.gather(_host(weights), _host(slots), _host(out), self.num_threads)
        return out

    def scatter_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        kernels.scatter(_host(weights), _host(slots), _host(rows), self.num_threads)

    def add_rows(self, weights: Tensor, slots: Indexes, rows: Tensor) -> None:
        kernels.add_rows(_host(weights), _host(slots), _host(rows), self.num_threads)

    def lookup(self, **arrays: Any) -> GroupLookup:
        return GroupLookup(**arrays)

    def pooled_forward(
        self, weights: Tensor, lookup: GroupLookup, out: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        kernels.pooled_forward(
            _host(weights),
            lookup.slots,
            lookup.inverse,
            *lookup.bags(),
            _host(out),
            per_sample_weights=_read(per_sample_weights),
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return out

    def sequence_forward(self, weights: Tensor, lookup: GroupLookup, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(lookup.position_count, weights.shape[-1], dtype=torch.float32)
        kernels.sequence_forward(
            _host(weights),
            lookup.slots,
            lookup.inverse[lookup.first_position : lookup.last_position],
            _host(out),
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
            _read(grad_out),
            order,
            offsets,
            *lookup.bags(),
            grad.numpy(),
            per_sample_weights=_read(per_sample_weights),
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )
        return grad

    def segment_grad_sequence(self, grad_out: Tensor, lookup: GroupLookup) -> Tensor:
        grad = torch.empty(lookup.unique_count, grad_out.shape[-1], dtype=torch.float32)
        kernels.segment_grad_sequence(
            _read(grad_out),
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
            _read(grad_out),
            _host(weights),
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
            _host(weights),
            [_host(state) for state in states],
            _host(slots),
            _read(grad),
            admitted=None if admitted is None else _host(admitted),
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
            _host(weights),
            [_host(state) for state in states],
            lookup.slots,
            _read(grad_out),
            order,
            offsets,
            *lookup.bags(),
            per_sample_weights=_read(per_sample_weights),
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
            _host(weights),
            [_host(state) for state in states],
            lookup.slots,
            _read(grad_out),
            *lookup.segments(),
            first_position=lookup.first_position,
            admitted=lookup.admitted,
            unique_start=lookup.unique_start,
            unique_stop=lookup.unique_stop,
            num_threads=self.num_threads,
        )


def _numpy(tensor: Tensor) -> NDArray[Any]:
    """NumPy view of a CPU tensor's memory; of bfloat16, as the int16 that hold its bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _host(values: Any) -> Any:
    """NumPy view of a tensor's memory; NumPy arrays as they are; anything else for the kernels to refuse."""
    return _numpy(values) if isinstance(values, Tensor) and values.is_cpu else values


def _read(values: Any) -> Any:
    """As `_host`, for values that are only read: a strided tensor, such as the gradient of a sum, is copied."""
    return _host(values.contiguous() if isinstance(values, Tensor) else values)


# --------------------------------------------------------------------------------------------------- any torch device


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

    # memory

    def allocate(self, rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
        _check_rows(rows, dim)
        return torch.zeros(rows, dim, dtype=dtype, device=self.device)

    def free_memory(self) -> int:
        return host_free_bytes() if self._module is None else int(self._module.mem_get_info(self.device)[0])

    def as_numpy(self, tensor: Tensor) -> NDArray[Any]:
        raise ConfigError(
            f"a tensor of device {str(self.device)!r} has no NumPy view; use to_host, or staging and upload"
        )

    # copies

    def to_device(self, values: NDArray[Any] | Tensor) -> Tensor:
        array = _host(values)
        if isinstance(array, Tensor):
            return array.to(self.device)
        with self.staging(array.shape, array.dtype) as block:
            block.array[...] = array
            return self.upload(block)

    def to_host(self, tensor: Tensor) -> NDArray[Any]:
        tensor = tensor.detach()
        memory = self._staging.take(tensor.numel() * tensor.element_size())
        staged = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor, non_blocking=True)
        self.event().synchronize()
        values = _numpy(staged).copy()
        self._staging.give(memory, DONE)
        return values

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
