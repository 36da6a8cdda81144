"""SwapInfo: a planned batch, as the manager hands it out and as the modules' kernels want it.

It holds the core's plan and the flattened batch. It moves nothing and knows its manager only to tell whose it is.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from ._core.plan import Plan
from .devices import Backend, GroupLookup
from .layout import FlatBatch

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["SwapInfo"]


class SwapInfo:
    """What one batch needs: the slots of its keys, the rows to swap in, the rows to swap out.

    Made by `EmbCacheManager.plan`. Besides the attributes below it has those of the core's plan, read-only int64 arrays
    in the order of `tables`: ``step``, ``state``, ``table_offsets``, ``unique_keys``, ``unique_offsets``, ``inverse``,
    ``occurrence_order``, ``segment_offsets``, ``slots``, ``admitted``, ``swap_in_keys``/``_slots``/``_rows``/``_offsets``,
    ``swap_out_keys``/``_slots``/``_rows``/``_offsets``, ``hits``, ``misses``, ``table_hits``, ``table_misses``.

    Attributes
    ----------
    tables : list of str
        Names in the order of the arrays. (Tables of one dim stand together.)
    batch_size : int
    """

    __slots__ = ("__weakref__", "_layout", "_lookups", "_owner", "_shifts", "_slots", "flat", "plan")

    def __init__(self, owner: EmbCacheManager, plan: Plan, flat: FlatBatch) -> None:
        self._owner = weakref.ref(owner)
        self._layout = owner.layout
        self._lookups: dict[bool, list[GroupLookup]] = {}
        self._slots: np.ndarray | None = None
        self._shifts: np.ndarray | None = None  # of each table's base since the plan was made
        self.plan, self.flat = plan, flat

    @property
    def slots(self) -> np.ndarray:
        """Slot of each unique key, int64 (U,): the plan's, shifted where the buffer has grown since."""
        slots: np.ndarray = self.plan.slots if self._slots is None else self._slots
        return slots

    def shift_slots(self, shifts: np.ndarray, constants: np.ndarray) -> None:
        """Tables' slots have moved by `shifts`; keys that are not admitted read `constants`, the tables' constant slots."""
        uniques = np.diff(self.plan.unique_offsets)
        self._slots = np.where(
            self.plan.admitted.astype(bool), self.slots + np.repeat(shifts, uniques), np.repeat(constants, uniques)
        )
        self._slots.flags.writeable = False
        self._shifts = shifts if self._shifts is None else self._shifts + shifts
        self._lookups.clear()

    def moved(self, slots: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """`slots` of the plan, cut into tables by `offsets`, where they are now."""
        return slots if self._shifts is None else slots + np.repeat(self._shifts, np.diff(offsets))

    @property
    def tables(self) -> list[str]:
        return [table.name for table in self._layout.tables]

    @property
    def batch_size(self) -> int:
        return self.flat.batch_size

    def lookups(self, backend: Backend, *, pooled: bool) -> list[GroupLookup]:
        """The batch as each dim group's kernels want it; made once, used by forward and backward."""
        made = self._lookups.get(pooled)
        if made is None:
            made = [self.group_lookup(backend, g, self.slots, pooled=pooled) for g in range(len(self._layout.groups))]
            self._lookups[pooled] = made
        return made

    def group_lookup(self, backend: Backend, group: int, slots: np.ndarray, *, pooled: bool) -> GroupLookup:
        """The look-up of one dim group with `slots` in place of the plan's."""
        plan, spec = self.plan, self._layout.groups[group]
        return backend.lookup(
            slots=slots,
            inverse=plan.inverse,
            occurrence_order=plan.occurrence_order,
            segment_offsets=plan.segment_offsets,
            admitted=plan.admitted if self._layout.filtered[group] else None,
            unique_start=int(plan.unique_offsets[spec.first_table]),
            unique_stop=int(plan.unique_offsets[spec.last_table]),
            **(self._layout.bags if pooled else self._layout.positions)(group, self.flat),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.plan, name)

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"SwapInfo(step={plan.step}, state={plan.state!r}, uniques={len(plan.unique_keys)}, hits={plan.hits}, "
            f"swap_in={len(plan.swap_in_keys)}, swap_out={len(plan.swap_out_keys)})"
        )
