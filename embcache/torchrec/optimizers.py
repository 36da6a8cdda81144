"""Optimizers as TorchRec's users name them (a class and its arguments), as the engine's; and a collection's as a ``KeyedOptimizer``.

``torch.distributed.optim``'s ``_apply_optimizer_in_backward`` leaves the class and the arguments at each parameter. From there
`applied_optimizer` reads what the rows of a collection are updated by. Only what has the same formula is taken; the rest is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torchrec.optim as torchrec_optim
from torch import nn
from torchrec.optim.fused import FusedOptimizer

from ..config import SGD, Adagrad, Adam, OptimizerSpec, RowWiseAdagrad
from ..errors import ConfigError, shown
from ..optim import EmbOptimizer

__all__ = ["TableOptimizer", "applied_optimizer", "sparse_optimizer"]

# Classes of torch and TorchRec with the formula of one of ours, for dense gradients that are 0 where a row was not touched.
# (TorchRec's own SGD, Adagrad and Adam only name what FBGEMM's kernels do; their defaults are those kernels'.)
KINDS: dict[type, type[OptimizerSpec]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adagrad: Adagrad,
    torch.optim.Adam: Adam,
    torch.optim.SparseAdam: Adam,
    torchrec_optim.SGD: SGD,
    torchrec_optim.Adagrad: Adagrad,
    torchrec_optim.Adam: Adam,
    torchrec_optim.RowWiseAdagrad: RowWiseAdagrad,
}
KERNEL_DEFAULTS: dict[type, dict[str, Any]] = {
    torchrec_optim.SGD: {"lr": 0.01},
    torchrec_optim.Adagrad: {"lr": 0.01, "eps": 1e-8},
    torchrec_optim.Adam: {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8},
}
TAKEN = {
    SGD: ("lr", "weight_decay"),
    Adagrad: ("lr", "weight_decay", "eps", "initial_accumulator_value"),
    RowWiseAdagrad: ("lr", "weight_decay", "eps", "initial_accumulator_value"),
    Adam: ("lr", "weight_decay", "eps", "betas"),
}
# What changes how a result is computed and not which.
WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable")


def sparse_optimizer(kind: type, options: Mapping[str, Any] | None = None) -> OptimizerSpec:
    """The engine's optimizer with the formula of a class of torch or TorchRec and its arguments.

    Parameters
    ----------
    kind : type
        ``SGD``, ``Adagrad``, ``Adam`` or ``SparseAdam`` of ``torch.optim``; ``SGD``, ``Adagrad``, ``Adam`` or ``RowWiseAdagrad`` of
        ``torchrec.optim``.
    options : mapping, optional
        Its keyword arguments; also under FBGEMM's names ``learning_rate``, ``beta1``, ``beta2``. Those that are left out have the
        class's own defaults.

    Raises
    ------
    ConfigError
        Another class, or an argument that asks for another formula (momentum, amsgrad, lr_decay, ...).

    Examples
    --------
    >>> import torch
    >>> from embcache.torchrec import sparse_optimizer
    >>> sparse_optimizer(torch.optim.Adagrad, {"lr": 0.1})
    Adagrad(lr=0.1, weight_decay=0.0, eps=1e-10, initial_accumulator_value=0.0)
    """
    spec = KINDS.get(kind) if isinstance(kind, type) else None
    if spec is None:
        names = sorted({f"{one.__module__.split('.')[0]}.optim.{one.__name__}" for one in KINDS})
        raise ConfigError(f"optimizer {shown(kind)} is none that cached rows have; give one of {', '.join(names)}")
    given = dict(options or {})
    for theirs, name in (("learning_rate", "lr"),):
        if theirs in given:
            given[name] = given.pop(theirs)
    if {"beta1", "beta2"} & set(given):
        given["betas"] = (given.pop("beta1", 0.9), given.pop("beta2", 0.999))
    defaults = KERNEL_DEFAULTS.get(kind) or {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    for name, value in given.items():
        if name in TAKEN[spec] or name in WITHOUT_EFFECT:
            continue
        if name not in defaults:
            raise ConfigError(f"optimizer {kind.__name__} has no argument {name!r}; it has {sorted(defaults)!r}")
        if value != defaults[name] and not (name == "dampening" and not given.get("momentum")):
            raise ConfigError(
                f"optimizer {kind.__name__}: {name} = {shown(value)}, which cached rows do not have; leave it at {defaults[name]!r}"
            )
    chosen = {name: given.get(name, defaults.get(name)) for name in TAKEN[spec]}
    return spec(**{name: _number(value) for name, value in chosen.items() if value is not None})


def _number(value: Any) -> Any:
    """A tensor of one number as that number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def applied_optimizer(parameters: Mapping[str, nn.Parameter]) -> OptimizerSpec | None:
    """The optimizer that ``apply_optimizer_in_backward`` has left at the parameters of tables, by table; None where at none.

    Raises
    ------
    ConfigError
        Some tables have one and others not, or another one: a collection has one optimizer.
    """
    specs: dict[str, OptimizerSpec | None] = {}
    for name, parameter in parameters.items():
        kinds = getattr(parameter, "_optimizer_classes", [])
        if len(kinds) > 1:
            raise ConfigError(
                f"table {name!r} has {len(kinds)} optimizers ({[one.__name__ for one in kinds]!r}); call apply_optimizer_in_backward once"
            )
        # The arguments: `_optimizer_kwargs`, a list beside the classes (of one dict in TorchRec's older function).
        options = getattr(parameter, "_optimizer_kwargs", [])
        specs[name] = sparse_optimizer(kinds[0], options[0]) if kinds else None
    first, *others = specs
    for name in others:
        if specs[name] != specs[first]:
            raise ConfigError(
                f"tables {first!r} and {name!r} of one collection have the optimizers {specs[first]!r} and {specs[name]!r}; apply the same one, or "
                "put them in collections of their own"
            )
    return specs[first]


class _Group(MutableMapping[str, Any]):
    """A parameter group of a collection's tables whose hyper-parameters are those of its `EmbOptimizer`, there and here."""

    def __init__(self, parameters: list[nn.Parameter], source: dict[str, Any]) -> None:
        self._own = {"params": parameters}
        self._source = source

    def __getitem__(self, name: str) -> Any:
        return self._own[name] if name in self._own else self._source[name]

    def __setitem__(self, name: str, value: Any) -> None:
        (self._own if name in self._own else self._source)[name] = value

    def __delitem__(self, name: str) -> None:
        del self._source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class TableOptimizer(FusedOptimizer):
    """A collection's optimizer as TorchRec's ``KeyedOptimizer``; get it as ``ebc.fused_optimizer``.

    Its ``param_groups`` are those of ``ebc.optimizer``, under the parameters' names: a scheduler of either reaches the next update.
    ``step`` and ``zero_grad`` change no row, which ``backward`` has updated. It may be part of a ``CombinedOptimizer``.

    Notes
    -----
    ``state_dict`` holds no row state, which lies with the rows and is saved with them (``ebc.save``, `embcache.save`, step count
    and learning rate too).

    Parameters
    ----------
    parameters : mapping of str to Parameter
        By name in the collection.
    optimizer : EmbOptimizer
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: EmbOptimizer) -> None:
        self._optimizer = optimizer
        groups: Any = [_Group(list(parameters.values()), group) for group in optimizer.param_groups]
        super().__init__(dict(parameters), {}, groups)

    def step(self, closure: Any = None) -> Any:
        """End the step, as ``ebc.optimizer.step()``; the rows were updated in backward."""
        return self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: there are no gradients outside of backward."""
