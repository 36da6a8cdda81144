"""The fused update: one optimizer update of device rows at the end of each backward pass, and the pins that wait for it.

Every training forward leaves a `Forward` here. Its life: open (its plan pins its rows) -> arrived (backward brought the
gradient of its output) -> done (the update was applied and the pins ended), or held (its gradient is part of an
accumulation window that is still open). All forwards whose gradients arrive in one backward pass make one update on
the summed gradient, applied by a callback at the end of the pass.

Pins never leak (promise I13). They end with the update; or, for a forward that never gets that far, when its graph is
released, or at the next ``optimizer.step()``. A backward pass that dies of an error leaves arrived forwards behind: they
are dropped, without an update, by whatever happens next outside of a backward pass. (Inside of one they may belong to a
pass around it, as reentrant checkpointing makes them.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .devices import GroupLookup
from .errors import ConfigError, PlanError, whole_number
from .manager import EmbCacheManager
from .optim import EmbOptimizer
from .swapinfo import SwapInfo

__all__ = ["Forward", "FusedUpdate"]

OPEN, ARRIVED, HELD, DONE = "open", "arrived", "held", "done"
NO_PASS = -1

queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
current_pass: Callable[[], int] = torch._C._current_graph_task_id


class Forward:
    """One training forward: its plan, and from backward on the gradients of its outputs."""

    __slots__ = ("arrived_in", "gradients", "info", "state", "weights")

    def __init__(self, info: SwapInfo, weights: torch.Tensor | None) -> None:
        self.info = info
        self.weights = weights
        self.state = OPEN
        self.arrived_in = NO_PASS
        self.gradients: tuple[torch.Tensor | None, ...] = ()


def _graph_released(forward: Forward) -> None:
    """The autograd node of `forward` is gone. May run inside a garbage collection, so it only leaves a note."""
    if forward.state is OPEN or (forward.state is ARRIVED and forward.arrived_in != current_pass()):
        forward.state, forward.gradients = DONE, ()
        manager = forward.info._owner()
        if manager is not None:
            manager.finish_late(forward.info)


class GraphToken:
    """Held by the autograd node of a forward, and by nothing else: when it goes, the graph was released."""

    __slots__ = ("_forward",)

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    # The function is bound as a default: at interpreter exit the module's globals may be gone before the last graph.
    def __del__(self, released: Callable[..., None] = _graph_released) -> None:
        released(self._forward)


@dataclass
class RowGradient:
    """Summed gradients of some rows of a dim group: slots int64 (k,), each once, and rows float32 (k, dim)."""

    slots: np.ndarray
    rows: torch.Tensor


class FusedUpdate:
    """Collects gradients of a collection's forwards and applies them.

    Parameters
    ----------
    manager : EmbCacheManager
    accumulate : int
        Backward passes that make one update.
    pooled : bool
        Whether outputs are pooled (one gradient for all dim groups) or sequences (one a group).

    Notes
    -----
    Backward passes of one collection must not run at the same time.
    """

    def __init__(self, manager: EmbCacheManager, accumulate: int, pooled: bool) -> None:
        passes = whole_number(accumulate)
        if passes is None or passes < 1:
            raise ConfigError(f"accumulate = {accumulate!r}; give an integer of at least 1")
        self.manager, self.accumulate, self.pooled = manager, passes, pooled
        on_step = weakref.WeakMethod(self.end_step)
        self.optimizer = EmbOptimizer(manager.spec, lambda: _call(on_step))
        manager.note_optimizer(self.optimizer)
        self.grad_scale: Any = None
        self.settles = (
            True  # False where somebody plans ahead, who ends what has trained: the device waits for whoever computes
        )
        self.skipped_updates = 0
        self.anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device=manager.backend.device)
        self._open: list[Forward] = []
        self._arrived: dict[int, list[Forward]] = {}  # by backward pass
        self._held: list[Forward] = []
        self._window: list[list[RowGradient]] = []
        self._window_passes = 0
        self._window_spoiled = False
        manager.reserve_forwards(passes + 3, weakref.WeakMethod(self._on_shift))

    # --------------------------------------------------------------------------------------------------------- forwards

    def begin(self, info: SwapInfo, weights: torch.Tensor | None) -> tuple[Forward, GraphToken]:
        """Register a forward; its pins end with the returned token unless a backward comes first."""
        forward = Forward(info, weights)
        self._open = [other for other in self._open if other.state is OPEN]
        self._open.append(forward)
        return forward, GraphToken(forward)

    def _finish(self, forwards: list[Forward]) -> None:
        """End the pins of these forwards and let go of their gradients.

        The planner may be busy with a later batch, and whoever trains does not wait for it: it hears of this when it next looks.
        """
        for forward in forwards:
            if forward.state is not DONE:  # a collector may have ended it
                self.manager.finish_late(forward.info)  # first: an interrupt may come between, and twice is no harm
                forward.state, forward.gradients = DONE, ()
        if self.settles:
            self.manager.door.settle()

    def abandon(self, forward: Forward) -> None:
        """End a forward that failed before it had an output."""
        self._finish([forward])

    def holds(self, info: SwapInfo) -> bool:
        """Whether the gradient of a forward of `info` is part of a window that is still open."""
        return any(forward.info is info for forward in self._held)

    def drop_stale(self) -> None:
        """Drop what backward passes that did not reach their end have left."""
        if self._arrived and current_pass() == NO_PASS:
            stale, self._arrived = self._arrived, {}
            for forwards in stale.values():
                self._finish(forwards)

    def end_step(self) -> None:
        """End what no backward has followed; called by ``optimizer.step()``."""
        self.manager.door.check_process()
        self.drop_stale()
        waiting, self._open = self._open, []
        self._finish([forward for forward in waiting if forward.state is OPEN])

    # --------------------------------------------------------------------------------------------------------- backward

    def receive(self, forward: Forward, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Backward has brought the gradients of `forward`'s outputs; schedules the update of this pass.

        Raises
        ------
        PlanError
            The forward was used up already, or the caller wants a graph of the gradient.
        ConfigError
            A hyper-parameter cannot be used. Nothing has changed then.
        """
        self.check_arrival(forward)
        self.optimizer.next_rule()
        self.scale()
        number = current_pass()
        if number not in self._arrived:
            queue_callback(lambda: self._end_of_pass(number))
            self._arrived[number] = []
        forward.state, forward.arrived_in, forward.gradients = ARRIVED, number, gradients
        self._arrived[number].append(forward)

    def check_arrival(self, forward: Forward) -> None:
        """`PlanError` where backward may not reach `forward` now, as for `receive`."""
        if torch.is_grad_enabled():
            raise PlanError(
                "backward(create_graph=True) reached an embedding collection, whose rows are updated in backward and have no second "
                "derivative; call it without create_graph, or detach the embeddings from that part of the graph"
            )
        if forward.state is not OPEN:
            raise PlanError(
                f"this forward of step {forward.info.plan.step} is used up (its pins ended with an earlier backward or optimizer.step()), "
                "and its rows may be gone from the device; run forward again, or sum the losses and call backward once"
            )
        self.manager.door.check_process()

    def scale(self) -> float | None:
        """The loss scale that gradients arrive with, or None.

        Raises
        ------
        ConfigError
            ``grad_scale`` is not a finite number > 0.
        """
        scale = self.grad_scale() if callable(self.grad_scale) else self.grad_scale
        if scale is None:
            return None
        try:
            number = float(scale)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise ConfigError(f"grad_scale = {scale!r}; give a finite number > 0, a function that returns one, or None")
        return number

    def _end_of_pass(self, number: int) -> None:
        """Apply what arrived in a backward pass. Called by the autograd engine at its end."""
        arrived = self._arrived.pop(number)
        if len(arrived) > 1:
            arrived.sort(key=lambda forward: forward.info.plan.step)
        # To the end: nobody may see rows that have trained and a plan that has not, least of all who saves them.
        with self.manager.door.training:
            self._train_on(arrived)
        if self._window_passes >= self.accumulate:
            self._apply_agreed()
        self.manager.backend.end_step()

    def _train_on(self, arrived: list[Forward]) -> None:
        """Apply the gradients of these forwards, or add them to the window; inside the door of those who train."""
        try:
            if self.accumulate == 1 and len(arrived) == 1 and self.grad_scale is None:
                self._update_fused(arrived[0])
            else:
                self._add_to_window(arrived)
                if self._window_passes >= self.accumulate and not self._asks:
                    self._apply_window(self._window_spoiled)
        except BaseException:
            self._drop_window(arrived)
            raise
        self.manager.buffer.note_use()
        if self._window_passes == 0:
            held, self._held = self._held, []
            self._finish(arrived + held)
        else:
            for forward in arrived:
                forward.state, forward.gradients = HELD, ()
            self._held += arrived

    def _apply_agreed(self) -> None:
        """Apply the window, or pass it over, as all say who have a part in it: they are asked outside of the door, which others pass."""
        try:
            spoiled = self._spoiled()
        except BaseException:
            self._drop_window([])
            raise
        with self.manager.door.training:
            try:
                self._apply_window(spoiled)
            except BaseException:
                self._drop_window([])
                raise
            self.manager.buffer.note_use()
            held, self._held = self._held, []
            self._finish(held)

    def _drop_window(self, arrived: list[Forward]) -> None:
        """Half a window is no gradient: all of it goes, and what has arrived."""
        held, self._held = self._held, []
        self._window, self._window_passes, self._window_spoiled = [], 0, False
        self._finish(arrived + held)

    def _gradient_of(self, forward: Forward, group: int) -> torch.Tensor | None:
        """The gradient that belongs to a dim group, contiguous; None where backward brought none."""
        gradient = forward.gradients[0 if self.pooled else group]
        return None if gradient is None else gradient.contiguous()

    def _lookups(self, forward: Forward) -> list[GroupLookup]:
        """For each dim group, what the gradients of a forward belong to."""
        return forward.info.lookups(self.manager.backend, pooled=self.pooled)

    @property
    def _asks(self) -> bool:
        """Whether others have a say in it if a window is applied, which `_spoiled` asks them."""
        return False

    def _spoiled(self) -> bool:
        """Whether the window holds a gradient that is not finite under `grad_scale`. Outside of the door where `_asks`."""
        return self._window_spoiled

    def _update_fused(self, forward: Forward) -> None:
        """One forward, one update: gradients go from the output straight into rows, nothing is materialized."""
        backend, buffer = self.manager.backend, self.manager.buffer
        rule = self.optimizer.next_rule()
        for g, lookup in enumerate(self._lookups(forward)):
            gradient = self._gradient_of(forward, g)
            if gradient is None:
                continue
            if self.pooled:
                backend.segment_update_pooled(
                    rule, buffer.weights[g], buffer.states[g], lookup, gradient, forward.weights
                )
            else:
                backend.segment_update_sequence(rule, buffer.weights[g], buffer.states[g], lookup, gradient)
        self.optimizer.count_update()

    def _row_gradient(self, forward: Forward, group: int) -> RowGradient | None:
        """Per-row gradients of one forward in one dim group; rows without a slot of their own are left out."""
        gradient = self._gradient_of(forward, group)
        if gradient is None:
            return None
        backend, layout, plan = self.manager.backend, self.manager.layout, forward.info.plan
        lookup = self._lookups(forward)[group]
        spec = layout.groups[group]
        if self.pooled:
            rows = backend.segment_grad_pooled(gradient, lookup, spec.dim, forward.weights)
        else:
            rows = backend.segment_grad_sequence(gradient, lookup)
        part = slice(int(plan.unique_offsets[spec.first_table]), int(plan.unique_offsets[spec.last_table]))
        slots = forward.info.slots[part]
        if layout.filtered[group]:
            kept = np.flatnonzero(plan.admitted[part])
            if len(kept) < len(slots):
                slots, rows = slots[kept], rows[torch.from_numpy(kept).to(rows.device)]
        return RowGradient(slots, rows)

    def _sum(self, parts: list[RowGradient]) -> RowGradient:
        """Sum gradients of the same slots, in the order of `parts`."""
        if len(parts) == 1:
            return parts[0]
        slots, places = np.unique(np.concatenate([part.slots for part in parts]), return_inverse=True)
        rows = torch.zeros((len(slots), parts[0].rows.shape[1]), dtype=torch.float32, device=parts[0].rows.device)
        start = 0
        for part in parts:
            stop = start + len(part.slots)
            self.manager.backend.add_rows(rows, np.ascontiguousarray(places[start:stop]), part.rows)
            start = stop
        return RowGradient(slots, rows)

    def _add_to_window(self, arrived: list[Forward]) -> None:
        """Add this pass to the window."""
        scale = self.scale()
        groups = range(len(self.manager.layout.groups))
        window = self._window or [[] for _ in groups]
        for g in groups:
            parts = [part for forward in arrived if (part := self._row_gradient(forward, g)) is not None]
            if scale is not None:
                for part in parts:
                    part.rows.mul_(1.0 / scale)
                    self._window_spoiled = self._window_spoiled or not bool(torch.isfinite(part.rows).all())
            if window[g] or parts:
                window[g] = [self._sum(window[g] + parts)]
        self._window = window
        self._window_passes += 1

    def _apply_window(self, spoiled: bool) -> None:
        """Update the rows, unless the window is spoiled; it is empty then. Inside the door."""
        backend, buffer = self.manager.backend, self.manager.buffer
        if spoiled:
            self.skipped_updates += 1
        else:
            rule = self.optimizer.next_rule()
            for g, parts in enumerate(self._window):
                for part in parts:
                    backend.update(rule, buffer.weights[g], buffer.states[g], part.slots, part.rows)
            self.optimizer.count_update()
        self._window, self._window_passes, self._window_spoiled = [], 0, False

    def _on_shift(self, shifts: np.ndarray) -> None:
        """The buffer has grown: the window's slots move with their tables' bases, which are the new ones already."""
        manager = self.manager
        for group, parts in zip(manager.layout.groups, self._window, strict=False):  # between windows there are none
            tables = slice(group.first_table, group.last_table)
            moved = shifts[tables]
            old_bases = manager.buffer.bases[tables] - moved
            for part in parts:
                part.slots = part.slots + moved[np.searchsorted(old_bases, part.slots, side="right") - 1]

    def finish_accumulation(self) -> None:
        """Apply an incomplete window now."""
        self.drop_stale()
        if self._window_passes:
            self._apply_agreed()


def _call(method: weakref.WeakMethod[Any]) -> None:
    bound = method()
    if bound is not None:
        bound()
