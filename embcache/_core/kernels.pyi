from collections.abc import Sequence
from typing import Any

from numpy import bool_, float32, int64, uint8
from numpy.typing import NDArray

_Weights = NDArray[Any]  # float32, float16, or int16 that holds the bits of bfloat16
_Flags = NDArray[uint8] | NDArray[bool_]

class UpdateRule:
    kind: str
    state_count: int
    def __init__(
        self,
        kind: str,
        *,
        lr: float,
        weight_decay: float = 0.0,
        eps: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        step: int = 1,
    ) -> None: ...
    @property
    def lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def one_minus_beta1(self) -> float: ...
    @property
    def one_minus_beta2(self) -> float: ...

def gather(weights: _Weights, slots: NDArray[int64], out: _Weights, num_threads: int | None = None) -> None: ...
def scatter(weights: _Weights, slots: NDArray[int64], rows: _Weights, num_threads: int | None = None) -> None: ...
def add_rows(
    weights: NDArray[float32], slots: NDArray[int64], rows: NDArray[float32], num_threads: int | None = None
) -> None: ...
def sequence_forward(
    weights: _Weights,
    slots: NDArray[int64],
    inverse: NDArray[int64],
    out: _Weights,
    *,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def pooled_forward(
    weights: _Weights,
    slots: NDArray[int64],
    inverse: NDArray[int64],
    bag_offsets: NDArray[int64],
    feature_mean: _Flags,
    out_cols: NDArray[int64],
    out: NDArray[float32],
    *,
    per_sample_weights: NDArray[float32] | None = None,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def per_sample_weight_grad(
    grad_out: NDArray[float32],
    weights: _Weights,
    slots: NDArray[int64],
    inverse: NDArray[int64],
    bag_offsets: NDArray[int64],
    feature_mean: _Flags,
    out_cols: NDArray[int64],
    out: NDArray[float32],
    *,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def segment_grad_pooled(
    grad_out: NDArray[float32],
    occurrence_order: NDArray[int64],
    segment_offsets: NDArray[int64],
    bag_offsets: NDArray[int64],
    feature_mean: _Flags,
    out_cols: NDArray[int64],
    out: NDArray[float32],
    *,
    per_sample_weights: NDArray[float32] | None = None,
    admitted: _Flags | None = None,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def segment_grad_sequence(
    grad_out: NDArray[float32],
    occurrence_order: NDArray[int64],
    segment_offsets: NDArray[int64],
    out: NDArray[float32],
    *,
    first_position: int = 0,
    admitted: _Flags | None = None,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def update(
    rule: UpdateRule,
    weights: _Weights,
    states: Sequence[NDArray[float32]],
    slots: NDArray[int64],
    grad: NDArray[float32],
    *,
    admitted: _Flags | None = None,
    num_threads: int | None = None,
) -> None: ...
def segment_update_pooled(
    rule: UpdateRule,
    weights: _Weights,
    states: Sequence[NDArray[float32]],
    slots: NDArray[int64],
    grad_out: NDArray[float32],
    occurrence_order: NDArray[int64],
    segment_offsets: NDArray[int64],
    bag_offsets: NDArray[int64],
    feature_mean: _Flags,
    out_cols: NDArray[int64],
    *,
    per_sample_weights: NDArray[float32] | None = None,
    admitted: _Flags | None = None,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def segment_update_sequence(
    rule: UpdateRule,
    weights: _Weights,
    states: Sequence[NDArray[float32]],
    slots: NDArray[int64],
    grad_out: NDArray[float32],
    occurrence_order: NDArray[int64],
    segment_offsets: NDArray[int64],
    *,
    first_position: int = 0,
    admitted: _Flags | None = None,
    unique_start: int = 0,
    unique_stop: int | None = None,
    num_threads: int | None = None,
) -> None: ...
def _set_isa(isa: str) -> str: ...
def _set_parallel_floats(floats: int) -> int: ...
