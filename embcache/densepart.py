"""What a model has beside its collections: the dense part, and tables that others (TorchRec's sharders) spread over the ranks.

Of a plain tensor every rank has the same, and one writes it. Of what is spread each writes its parts (`embcache.shards`), with the state of
the fused optimizer that trains it, which is in no ``state_dict()`` of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import ConfigError
from .modules import CachedCollection
from .shards import SavedParts, Sharded, encode_parts, sharded
from .values import encode

__all__ = ["DensePart"]

WEIGHT, STATE = "weight ", "optimizer state "  # what names of parts begin with


class DensePart:
    """The dense part of a model, for a save or a restore.

    Parameters
    ----------
    model : torch.nn.Module
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[str, Any] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rates: list[tuple[dict[str, Any], float]] = []
        self._before: dict[str, Any] | None = None
        self._before_pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before_rates: list[tuple[dict[str, Any], float]] = []

    # ---------------------------------------------------------------------------------------------------------- saving

    def values(self, rank: int) -> dict[str, tuple[bytes, bytes]]:
        """What a rank writes, by name; the first one also what all have.

        Raises
        ------
        ConfigError
            Something in it cannot be saved; the message says what.
        """
        plain, spread = self._present()
        spread |= self._optimizer_state()
        made = {"model": encode(plain, "the model's state_dict()")} if rank == 0 else {}
        if spread:
            rates = {path: [float(group["lr"]) for group in groups] for path, groups in self._groups()}
            made |= encode_parts(rank, spread, rates)
        return made

    def _present(self) -> tuple[dict[str, Any], dict[str, Sharded]]:
        """What every rank has in its ``state_dict()``; and what is spread, under names of parts."""
        plain: dict[str, Any] = {}
        spread: dict[str, Sharded] = {}
        for name, value in self._model.state_dict().items():
            parts = sharded(value, f"the model's {name!r}")
            if parts is None:
                plain[name] = value
            else:
                spread[WEIGHT + name] = parts
        return plain, spread

    def _fused(self) -> Iterator[tuple[str, Any]]:
        """Path and fused optimizer of each collection that has one and is not ours."""
        last = None
        for path, part in self._model.named_modules():
            kind = type(part)
            if isinstance(part, CachedCollection) or not hasattr(kind, "fused_optimizer"):
                continue
            if last is not None and path.startswith(last):
                continue  # a part of the one before
            last = f"{path}." if path else ""
            found = part.fused_optimizer
            yield path, found() if callable(found) else found

    def _groups(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for path, fused in self._fused():
            yield path, fused.param_groups

    def _optimizer_state(self) -> dict[str, Sharded]:
        """State of fused optimizers, under names of parts."""
        found: dict[str, Sharded] = {}
        for path, fused in self._fused():
            for parameter, held in fused.state_dict()["state"].items():
                for key, value in held.items():
                    name = f"{STATE}{path}/{parameter}/{key}"
                    parts = sharded(value, name)
                    if parts is not None:
                        found[name] = parts
                    elif isinstance(value, torch.Tensor):
                        found[name] = Sharded.whole(value)
        return found

    # ------------------------------------------------------------------------------------------------------- restoring

    def check(self, values: Any, saved: SavedParts) -> None:
        """Read what `load` is to take over, and see that it fits. Nothing changes.

        Parameters
        ----------
        values
            The ``state_dict()`` without what was spread; None, of a checkpoint of collections alone, fits a model without parameters.
        saved : SavedParts

        Raises
        ------
        ConfigError, CorruptionError
        """
        self._values, self._pairs, self._rates = {}, [], []  # it may be the turn of an older generation
        plain, spread = self._present()
        if values is None:
            if plain or spread:
                names = sorted([*plain, *(name.removeprefix(WEIGHT) for name in spread)])
                raise ConfigError(
                    f"the checkpoint has no dense part, the model has {names[:5]!r} ...; restore its collections one by one"
                )
            return
        stored = set(values) | {name.removeprefix(WEIGHT) for name in saved.sizes if name.startswith(WEIGHT)}
        wanted = set(plain) | {name.removeprefix(WEIGHT) for name in spread}
        missing, unknown = sorted(wanted - stored), sorted(stored - wanted)
        if missing or unknown:
            raise ConfigError(
                f"the model's dense part is another one: the checkpoint lacks {missing[:5]!r} and has {unknown[:5]!r} besides; build the "
                "model as it was saved, or restore its collections one by one"
            )
        self._values = {name: values[name] if name in values else saved.together(WEIGHT + name) for name in plain}
        for name, value in plain.items():
            other = self._values[name]
            if not isinstance(value, torch.Tensor) or is_lazy(value):
                continue
            if not isinstance(other, torch.Tensor) or other.shape != value.shape or other.dtype != value.dtype:
                found = (
                    f"{other.dtype} {tuple(other.shape)}" if isinstance(other, torch.Tensor) else type(other).__name__
                )
                raise ConfigError(
                    f"the model's {name!r} is {value.dtype} {tuple(value.shape)}, in the checkpoint {found}; build the model as it was "
                    "saved"
                )
        for name, parts in spread.items():
            self._pairs += _from_whole(name, parts, values) if name not in saved.sizes else saved.fill(name, parts)
        if any(name.startswith(STATE) for name in saved.sizes):
            self._check_state(saved)

    def _check_state(self, saved: SavedParts) -> None:
        """Take the state of optimizers, unless nothing here has any: then weights are all that is wanted."""
        for name, parts in self._optimizer_state().items():
            if name not in saved.sizes:
                raise ConfigError(
                    f"the checkpoint lacks the {name}; give those tables the optimizer that they were saved with, or restore the "
                    "collections one by one"
                )
            self._pairs += saved.fill(name, parts)
        for path, groups in self._groups():
            self._rates += zip(groups, saved.rates.get(path, ()), strict=False)

    def load(self) -> None:
        """Take over what `check` has read, after what there is was copied."""
        state = self._model.state_dict()
        self._before = {}
        for name, value in state.items():
            if name in self._values and not is_lazy(value):
                self._before[name] = value.clone() if isinstance(value, torch.Tensor) else value
        self._before_pairs = [(here, here.clone()) for here, _ in self._pairs]
        self._before_rates = [(group, group["lr"]) for group, _ in self._rates]
        # What is spread is given as what it is: its owner takes its own parts of that, and they are filled below.
        self._model.load_state_dict({name: self._values.get(name, value) for name, value in state.items()})
        _copy(self._pairs, self._rates)

    def put_back(self) -> None:
        """By the model's own ``load_state_dict``; where that refuses again, as it has a hook that does, tensor by tensor."""
        if self._before is None:
            return
        _copy(self._before_pairs, self._before_rates)
        try:
            self._model.load_state_dict(self._before, strict=False)
        except Exception:
            with torch.no_grad():
                for name, value in self._model.state_dict().items():
                    if isinstance(self._before.get(name), torch.Tensor):
                        value.copy_(self._before[name])


def _from_whole(name: str, parts: Sharded, values: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `SavedParts.fill`, of what was not spread when it was saved."""
    title = name.removeprefix(WEIGHT)
    whole = values[title]
    if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != parts.size:
        found = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
        raise ConfigError(
            f"the model's {title!r} is {parts.size}, in the checkpoint {found}; build the model as it was saved"
        )
    pairs = []
    for start, part in parts.parts:
        if part.dtype != whole.dtype:
            raise ConfigError(
                f"the model's {title!r} is {part.dtype}, in the checkpoint {whole.dtype}; build the model as it was saved"
            )
        pairs.append((part, whole[tuple(slice(at, at + n) for at, n in zip(start, part.shape, strict=True))]))
    return pairs


@torch.no_grad()
def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], rates: list[tuple[dict[str, Any], float]]) -> None:
    for here, there in pairs:
        here.copy_(there)
    for group, rate in rates:
        group["lr"] = rate
