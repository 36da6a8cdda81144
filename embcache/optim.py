"""The optimizer face of a collection: a `torch.optim.Optimizer` whose update happens in backward.

A collection's rows are updated at the end of each backward pass, on the rows that the pass touched. `EmbOptimizer`
holds what such an update needs besides gradients (hyper-parameters in ``param_groups``, so that ordinary learning-rate
schedulers work, and the step count) and makes the update rule of each backward pass of it. Its `step` is bookkeeping only.

It never holds rows or row state: those move with the rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.optim.optimizer as hooks

from .config import OptimizerSpec, shown
from .devices import UpdateRule, update_rule
from .errors import ConfigError

__all__ = ["EmbOptimizer"]

# Sets the optimizer's start, not its course: a scheduler has no business with it.
FIXED_AT_START = {"initial_accumulator_value"}
# Every step up to here has a next one that int64 holds, for longer than anyone trains.
MOST_STEPS = 2**62


def _snapshot(value: Any) -> Any:
    """`value` of a parameter group, as what can be compared later: a tensor or list may be changed in place.

    A tensor that is not one number on a real device is left as it is, for the spec to refuse.
    """
    if isinstance(value, (list, tuple)):
        return tuple(_snapshot(item) for item in value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        try:
            return value.item()
        except (RuntimeError, ValueError):
            return value
    return value


class EmbOptimizer(torch.optim.Optimizer):
    """Hyper-parameters and step count of a collection's fused sparse update.

    Get it as ``ebc.optimizer``. It has one parameter group with the fields of the optimizer's spec (``lr``,
    ``weight_decay``, ``eps``, ``betas``); learning-rate schedulers and your own code may change them at any time, and
    the backward pass uses the values current at its end.

    Parameters
    ----------
    spec : OptimizerSpec
    on_step : callable
        Called by `step`: the collection ends the pins of forwards that were never followed by a backward.

    Notes
    -----
    ``step()`` changes no row: the update has already happened in ``backward()``. Calling it after each backward, as for
    any optimizer, keeps schedulers content and frees what an abandoned forward still holds. ``zero_grad()`` is harmless.
    Not thread-safe.

    With loss scaling, do not pass it to ``GradScaler.step``; set ``ebc.grad_scale = scaler.get_scale`` instead.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> ebc = ec.EmbeddingBagCollection([ec.TableConfig("item", 4)], optimizer=ec.SGD(lr=0.5))
    >>> scheduler = torch.optim.lr_scheduler.StepLR(ebc.optimizer, step_size=1, gamma=0.1)
    >>> ebc(ec.JaggedFeatures(["item"], torch.tensor([3]), torch.tensor([1]))).values().sum().backward()
    >>> ebc.optimizer.step(); scheduler.step()
    >>> ebc.optimizer.param_groups[0]["lr"], ebc.optimizer.step_count
    (0.05, 1)
    """

    def __init__(self, spec: OptimizerSpec, on_step: Callable[[], None]) -> None:
        self._spec = spec
        self._names = [field.name for field in dataclasses.fields(spec) if field.name not in FIXED_AT_START]
        self._on_step = on_step
        self._sealed = False
        self._checked: tuple[tuple[Any, ...], OptimizerSpec] | None = None
        self._rule: tuple[OptimizerSpec, int, UpdateRule] | None = None  # of an earlier call
        # torch.optim insists on a parameter. This one has no elements; it is where the step count hangs.
        self._anchor = torch.empty(0, device="cpu")
        defaults: dict[str, Any] = {name: getattr(spec, name) for name in self._names}
        super().__init__([{"params": [self._anchor], "kind": spec.kind}], defaults)
        self.state[self._anchor]["step"] = 0
        self._sealed = True

    @property
    def step_count(self) -> int:
        """Number of updates applied so far."""
        return int(self.state[self._anchor]["step"])

    def current_spec(self) -> OptimizerSpec:
        """The spec with the hyper-parameters that ``param_groups`` holds now.

        Raises
        ------
        ConfigError
            One of them is missing or not allowed (a negative or NaN learning rate, for example).
        """
        group = self.param_groups[0]
        # A learning rate may be a tensor that is changed in place: compare its value, never its identity.
        try:
            found = [group[name] for name in self._names]
        except KeyError as error:
            (name,) = error.args
            raise ConfigError(
                f"ebc.optimizer.param_groups[0] has no {name!r}; set it, for example to {getattr(self._spec, name)!r}"
            ) from None
        values = tuple([value if type(value) is float else _snapshot(value) for value in found])
        try:
            same = self._checked is not None and bool(self._checked[0] == values)
        except (RuntimeError, ValueError):  # something that has no one truth, as a tensor of two
            same = False
        if self._checked is None or not same:
            try:
                spec = dataclasses.replace(self._spec, **dict(zip(self._names, values, strict=True)))
            except ConfigError as error:
                raise ConfigError(f"ebc.optimizer.param_groups[0] holds a value that cannot be used: {error}") from None
            self._checked = values, spec
        return self._checked[1]

    def next_rule(self) -> UpdateRule:
        """The rule of the next update, from the hyper-parameters current now. Changes nothing.

        Raises
        ------
        ConfigError
            As `current_spec`.
        """
        spec, known = self.current_spec(), self._rule
        if known is not None and known[0] is spec and spec.kind != "adam":
            return known[2]
        step = self.step_count + 1
        if known is not None and known[0] is spec and known[1] == step:
            return known[2]
        rule = update_rule(spec, step=step)
        if not math.isfinite(rule.lr):  # Adam's bias correction can make it larger
            raise ConfigError(
                f"ebc.optimizer.param_groups[0]: lr = {spec.lr!r} is infinite in float32 after Adam's bias correction; lower it"
            )
        self._rule = spec, step, rule
        return rule

    def count_update(self) -> None:
        """Advance the step count: an update made by `next_rule` has been applied."""
        self.state[self._anchor]["step"] += 1
        # Schedulers warn when they step before their optimizer did; for them, it just did.
        self._opt_called = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish a training step: end what abandoned forwards hold. The rows were updated in backward already."""
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        ):
            return self._observed_step() if closure is None else self._observed_step(closure)
        return self._step(closure)

    # Torch would wrap every call in a profiler's range and its hooks, which takes ten times as long as a step of ours.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._on_step()
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients of rows live only inside a backward pass (or an open accumulation window)."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: a collection has one group. (Called once by torch's constructor.)"""
        if self._sealed:
            raise ConfigError(
                "a collection's optimizer has exactly one parameter group; give other tables their own collection"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load step count and hyper-parameters as `state_dict` gave them. Row state is not part of it.

        Raises
        ------
        ConfigError
            It is the state of another kind of optimizer, or holds a value that is not allowed. Nothing changes then.
        """
        try:
            (group,) = state_dict["param_groups"]
            (parameter,) = group["params"]
            kind = group["kind"]
            step = state_dict["state"][parameter]["step"]
            values = {name: group[name] for name in self._names if kind == self._spec.kind}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"this is not the state of a collection's optimizer ({type(error).__name__}: {error})"
            ) from error
        if kind != self._spec.kind:
            raise ConfigError(
                f"the state is that of a {kind!r} optimizer, this is {self._spec.kind!r}; make the collection with the same one"
            )
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MOST_STEPS:
            raise ConfigError(f"the state's step count is {shown(step)}; it is an integer from 0 to {MOST_STEPS}")
        dataclasses.replace(self._spec, **values)
        super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "a collection's optimizer cannot be copied or pickled; use state_dict() and load_state_dict()"
        )
