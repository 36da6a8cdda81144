"""`save` and `restore` of a whole model: all its collections and its dense part, in one generation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .checkpoint import RestoreReport
from .errors import ConfigError
from .modules import CachedCollection
from .restoring import restore_managers
from .saving import Saving, save_managers

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["restore", "save"]


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    delta: bool = False,
    background: Literal[False] = False,
    state: Any = None,
    keep: int | None = None,
) -> int: ...


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    delta: bool = False,
    background: Literal[True],
    state: Any = None,
    keep: int | None = None,
) -> Saving: ...


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    delta: bool = False,
    background: bool,
    state: Any = None,
    keep: int | None = None,
) -> int | Saving: ...


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    delta: bool = False,
    background: bool = False,
    state: Any = None,
    keep: int | None = None,
) -> int | Saving:
    """Write a generation of a checkpoint with everything of a model: its collections' tables and its ``state_dict()``.

    Parameters
    ----------
    model : torch.nn.Module
        Holds at least one collection, or is one. Tables are saved under the path of their collection in the model.
    path, delta, background, state, keep
        As for `EmbCacheManager.save`; the dense optimizer's ``state_dict()`` belongs into `state`.

    Returns
    -------
    int or Saving
        The generation; in the background a future of it.

    Raises
    ------
    ConfigError
        The model holds no collection, or ``state_dict()`` something that cannot be saved.
    PlanError, LockedError, DiskFullError, StorageError, CorruptionError
        As `EmbCacheManager.save`.

    Examples
    --------
    >>> import tempfile, torch, embcache as ec
    >>> model = torch.nn.ModuleDict({"items": ec.EmbeddingBagCollection([ec.TableConfig("item", 4)]), "top": torch.nn.Linear(4, 1)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     generation = ec.save(model, folder, state={"batches": 0})
    ...     report = ec.restore(model, folder)
    >>> generation, report.matched, report.state
    (1, ['items/item'], {'batches': 0})
    """
    managers = _managers(model)
    return save_managers(
        path, managers, delta=delta, background=background, state=state, model=model.state_dict(), keep=keep
    )


def restore(model: nn.Module, path: str | os.PathLike[str], generation: int | None = None) -> RestoreReport:
    """Take over what `save` wrote of a model that has the same parts: tables, step counts, and ``load_state_dict()``.

    Tables may have been added or dropped; the dense part must be the same. Parameters are as for `EmbCacheManager.restore`.

    Raises
    ------
    ConfigError
        Also where the dense part has other names, shapes or types of tensors; nothing has changed then.
    CorruptionError, PlanError, HostMemoryError, DiskFullError, StorageError
        As `EmbCacheManager.restore`.
    Whatever the model's own ``load_state_dict`` raises
        The dense part has its values of before again, and nothing else has changed.
    """
    return restore_managers(path, _managers(model), generation, _DensePart(model))


def _managers(model: nn.Module) -> dict[str, EmbCacheManager]:
    """The managers of a model's collections, by module path."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    found = {name: part.manager for name, part in model.named_modules() if isinstance(part, CachedCollection)}
    if not found:
        raise ConfigError(f"the {type(model).__name__} holds no embedding collection; save it with torch.save")
    return found


class _DensePart:
    """What a model has beside its collections, for a restore."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Any] | None = None

    def check(self, values: Any) -> None:
        """None, of a checkpoint of collections alone, fits a model without parameters."""
        present = self._model.state_dict()
        if values is None:
            if present:
                raise ConfigError(
                    f"the checkpoint has no dense part, the model has {sorted(present)[:5]!r} ...; restore its collections one by one"
                )
            return
        missing, unknown = sorted(set(present) - set(values)), sorted(set(values) - set(present))
        if missing or unknown:
            raise ConfigError(
                f"the model's dense part is another one: the checkpoint lacks {missing[:5]!r} and has {unknown[:5]!r} besides; build the "
                "model as it was saved, or restore its collections one by one"
            )
        for name, value in present.items():
            other = values[name]
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

    def load(self, values: Any) -> None:
        """After what there is was copied."""
        self._before = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._model.state_dict().items()
            if not is_lazy(value)
        }
        self._model.load_state_dict(values)

    def put_back(self) -> None:
        """By the model's own ``load_state_dict``; where that refuses again, as it has a hook that does, tensor by tensor."""
        if self._before is None:
            return
        try:
            self._model.load_state_dict(self._before, strict=False)
        except Exception:
            with torch.no_grad():
                for name, value in self._model.state_dict().items():
                    if isinstance(self._before.get(name), torch.Tensor):
                        value.copy_(self._before[name])
