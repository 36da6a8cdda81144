"""The index arrays of one dim group of one batch, as the kernels need them.

What this room owns: the words between a plan and a `Backend`. A `GroupLookup` is plain data; `TorchIndexes` are the
same facts as index tensors on a device, derived on the host so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .errors import ShapeError

__all__ = ["GroupLookup", "TorchIndexes"]

# Occurrences of a key whose gradients are added up before the partial sum is added: as in the compiled kernels.
SUM_BLOCK = 256


@dataclass(kw_only=True)
class GroupLookup:
    """What the kernels need to know of one dim group of one batch; reuse it for the backward pass.

    The arrays are the plan's, for the whole batch, on the host; a backend copies its share of them when it first needs
    them. They must not change meanwhile.

    Attributes
    ----------
    slots : int64 (U,)
        Row of each unique in the group's weights; looked at for the group's uniques only.
    inverse : int64 (n,)
        Unique of each position.
    occurrence_order, segment_offsets : int64 (n,), (U + 1,), or None
        Positions by unique; needed for gradients.
    admitted : uint8 (U,), or None
        Uniques with 0 have no gradient and no update. None: all have.
    unique_start, unique_stop : int
        The group's uniques; default: all.
    bag_offsets : int64 (F * B + 1,), or None
        Pooled: positions of each bag, feature-major.
    feature_mean, out_cols : uint8 (F,), int64 (F,), or None
        Pooled: whether a feature is averaged, and its first column.
    first_position, last_position : int
        The group's positions; default: those of the bags, else all.
    """

    slots: NDArray[np.int64]
    inverse: NDArray[np.int64]
    occurrence_order: NDArray[np.int64] | None = None
    segment_offsets: NDArray[np.int64] | None = None
    admitted: NDArray[np.uint8] | None = None
    unique_start: int = 0
    unique_stop: int = -1
    bag_offsets: NDArray[np.int64] | None = None
    feature_mean: NDArray[np.uint8] | None = None
    out_cols: NDArray[np.int64] | None = None
    first_position: int = 0
    last_position: int = -1
    on_device: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.unique_stop < 0:
            self.unique_stop = len(self.slots)
        if self.bag_offsets is not None and len(self.bag_offsets) > 0:
            self.first_position, self.last_position = int(self.bag_offsets[0]), int(self.bag_offsets[-1])
        elif self.last_position < 0:
            self.last_position = len(self.inverse)

    @property
    def unique_count(self) -> int:
        """Uniques of the group."""
        return self.unique_stop - self.unique_start

    @property
    def position_count(self) -> int:
        """Positions of the group."""
        return self.last_position - self.first_position

    def bags(self) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
        """`bag_offsets`, `feature_mean` and `out_cols`; `ShapeError` for a look-up without bags."""
        if self.bag_offsets is None or self.feature_mean is None or self.out_cols is None:
            raise ShapeError("this look-up has no bags; give bag_offsets, feature_mean and out_cols to lookup()")
        return self.bag_offsets, self.feature_mean, self.out_cols

    def segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`occurrence_order` and `segment_offsets`; `ShapeError` for a look-up without them."""
        if self.occurrence_order is None or self.segment_offsets is None:
            raise ShapeError("this look-up has no occurrences; give occurrence_order and segment_offsets to lookup()")
        return self.occurrence_order, self.segment_offsets


class TorchIndexes:
    """Index tensors of one `GroupLookup` on a device: made on the host, uploaded when first needed.

    All are relative to the group: unique 0 is its first unique, position 0 its first position.
    """

    def __init__(self, lookup: GroupLookup, upload: Callable[[NDArray[Any]], Tensor]) -> None:
        self._lookup = lookup
        self._upload = upload
        self._positions = slice(lookup.first_position, lookup.last_position)

    @cached_property
    def position_slots(self) -> Tensor:
        """Row of each position."""
        return self._upload(self._lookup.slots[self._lookup.inverse[self._positions]])

    @cached_property
    def position_uniques(self) -> Tensor:
        """Unique of each position, counted from the group's first."""
        return self._upload(self._lookup.inverse[self._positions] - self._lookup.unique_start)

    @cached_property
    def unique_slots(self) -> Tensor:
        """Row of each unique."""
        return self._upload(self._lookup.slots[self._lookup.unique_start : self._lookup.unique_stop])

    @cached_property
    def bag_offsets(self) -> Tensor:
        return self._upload(self._lookup.bags()[0] - self._lookup.first_position)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.diff(self._lookup.bags()[0])

    @cached_property
    def _bag_of_position(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self._lengths), dtype=np.int64), self._lengths)

    @cached_property
    def bag_of_position(self) -> Tensor:
        return self._upload(self._bag_of_position)

    @cached_property
    def _divisors(self) -> NDArray[np.float32]:
        """What each bag's sum is divided by."""
        _, means, _ = self._lookup.bags()
        batch_size = len(self._lengths) // max(len(means), 1)
        return np.where(np.repeat(means != 0, batch_size), np.maximum(self._lengths, 1), 1).astype(np.float32)

    @cached_property
    def divisors(self) -> Tensor | None:
        """Column of divisors, or None where nothing is averaged."""
        return self._upload(self._divisors[:, None]) if (self._lookup.bags()[1] != 0).any() else None

    @cached_property
    def _occurrences(self) -> NDArray[np.int64]:
        """Positions in order of unique."""
        order, offsets = self._lookup.segments()
        occurrences = order[offsets[self._lookup.unique_start] : offsets[self._lookup.unique_stop]]
        return occurrences - self._lookup.first_position

    @cached_property
    def occurrences(self) -> Tensor:
        return self._upload(self._occurrences)

    @cached_property
    def occurrence_bags(self) -> Tensor:
        """Bag of each occurrence, in order of unique."""
        return self._upload(self._bag_of_position[self._occurrences])

    @cached_property
    def occurrence_factors(self) -> Tensor | None:
        """One over the divisor of each occurrence's bag, or None where nothing is averaged."""
        if self.divisors is None:
            return None
        return self._upload((1 / self._divisors)[self._bag_of_position[self._occurrences]])

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """Offsets of the blocks in the occurrences, and of the uniques in the blocks."""
        offsets = self._lookup.segments()[1][self._lookup.unique_start : self._lookup.unique_stop + 1]
        counts = np.diff(offsets)
        block_counts = (counts + SUM_BLOCK - 1) // SUM_BLOCK
        unique_blocks = np.concatenate([[0], np.cumsum(block_counts)]).astype(np.int64)
        starts = np.repeat(offsets[:-1] - offsets[0] - unique_blocks[:-1] * SUM_BLOCK, block_counts)
        starts = starts + np.arange(unique_blocks[-1]) * SUM_BLOCK
        return self._upload(np.append(starts, offsets[-1] - offsets[0])), self._upload(unique_blocks)

    @cached_property
    def kept(self) -> Tensor | None:
        """Numbers of the admitted uniques, or None where all are."""
        admitted = self._lookup.admitted
        if admitted is None:
            return None
        mask = admitted[self._lookup.unique_start : self._lookup.unique_stop] != 0
        return None if mask.all() else self._upload(np.flatnonzero(mask))
