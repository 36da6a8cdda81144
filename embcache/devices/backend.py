"""What a device is asked for: the `Backend` protocol, the kernels' form of an optimizer, tensors as NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .._core.kernels import UpdateRule
from ..config import MAX_EMBEDDING_DIM, Adagrad, Adam, OptimizerSpec
from ..errors import ShapeError
from ..hostmemory import Event, StagingBlock
from ..lookup import GroupLookup

__all__ = ["Backend", "Flags", "Indexes", "check_rows", "host_view", "readable_view", "update_rule"]

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

    def fetched(self, tensor: Tensor) -> contextlib.AbstractContextManager[NDArray[Any]]:
        """As `to_host`, in memory that is reused after the block."""

    def staging(self, shape: Sequence[int], dtype: Any = np.float32) -> contextlib.AbstractContextManager[StagingBlock]:
        """Host memory to fill and `upload`."""

    def upload(self, block: StagingBlock) -> Tensor:
        """The block's values on the device, ordered before later work of the current stream."""

    def download(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Event:
        """Rows ``array[slots]`` of each (array, slots, piece) into the piece, of a staging block, beside what the device does next.

        Later work of the current stream may overwrite the rows. Returns the event after which they are in the block.
        """

    def side_stream(self) -> Any:
        """The backend's own stream for copies, or None where there are no streams."""

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` current within the block; None changes nothing."""

    def event(self) -> Event:
        """The present end of the current stream."""

    def wait(self, event: Event) -> None:
        """Let later work of the current stream wait for `event`."""

    def end_step(self) -> None:
        """A training step has made its update."""

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


def check_rows(rows: int, dim: int) -> None:
    """Raise `ShapeError` unless a buffer may have this shape."""
    if rows < 0 or not 1 <= dim <= MAX_EMBEDDING_DIM:
        raise ShapeError(
            f"a buffer of {rows} rows of {dim} elements; give 0 or more rows of 1 to {MAX_EMBEDDING_DIM} elements"
        )


def host_view(values: Any) -> Any:
    """NumPy view of a CPU tensor's memory, of bfloat16 as the int16 that hold its bits; anything else as it is, for the kernels to refuse."""
    if not isinstance(values, Tensor) or not values.is_cpu:
        return values
    if values.requires_grad:
        values = values.detach()
    return (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy()


def readable_view(values: Any) -> Any:
    """As `host_view`, for values that are only read: a strided tensor, such as the gradient of a sum, is copied."""
    return host_view(values.contiguous() if isinstance(values, Tensor) else values)
