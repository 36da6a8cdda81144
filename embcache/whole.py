"""`save` and `restore` of a whole model: all its collections and its dense part, in one generation; what a save sees as one step."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._core.doors import Steps
from .checkpoint import RestoreReport
from .densepart import DensePart
from .errors import ConfigError
from .modules import CachedCollection
from .restoring import restore_managers
from .saving import SaveOptions, Saving, save_managers

if TYPE_CHECKING:
    from .manager import EmbCacheManager

__all__ = ["restore", "save", "training_step"]


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    background: Literal[False] = False,
    **options: Unpack[SaveOptions],
) -> int: ...


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    background: Literal[True],
    **options: Unpack[SaveOptions],
) -> Saving: ...


@overload
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    background: bool,
    **options: Unpack[SaveOptions],
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

    What others than `embcache` have spread over the ranks (tables of TorchRec's own sharders, with their optimizer's state and learning
    rate; DTensors) is written by each rank, part by part, and goes into any number of ranks too.

    Parameters
    ----------
    model : torch.nn.Module
        Holds at least one collection, or is one. Tables are saved under the path of their collection in the model, without what that is
        wrapped in (``DistributedDataParallel``, TorchRec's ``DistributedModelParallel``, ``torch.compile``).
    path, delta, background, state, keep
        As for `EmbCacheManager.save`; the dense optimizer's ``state_dict()`` belongs into `state`. Where another thread trains the model
        through a pipeline, or in a loop that has its steps in `training_step`, all of it is as of one step, and what `state` holds too, if
        that is a function. Beside any other loop in another thread each table is as of a batch, and the parts may be as of different ones.

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
    >>> model = torch.nn.ModuleDict({"rows": ec.EmbeddingBagCollection([ec.TableConfig("item", 4)]), "top": torch.nn.Linear(4, 1)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     generation = ec.save(model, folder, state={"batches": 0})
    ...     report = ec.restore(model, folder)
    >>> generation, report.matched, report.state
    (1, ['rows/item'], {'batches': 0})
    """
    bare = _bare(model)
    return save_managers(
        path, _managers(bare), delta=delta, background=background, state=state, dense=DensePart(bare), keep=keep
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
    bare = _bare(model)
    return restore_managers(path, _managers(bare), generation, DensePart(bare))


def training_step(model: nn.Module) -> AbstractContextManager[None]:
    """One training step of a loop of your own, to `save` in another thread: that sees the model before the step, or after all of it.

    Not needed where no other thread saves while steps run: with `TrainPipeline`, which does this itself, or where the loop's own
    thread calls `save` between two steps, in the background too.

    Parameters
    ----------
    model : torch.nn.Module
        As for `save`.

    Returns
    -------
    context manager
        May be entered again and again, by one thread at a time: another one waits. Inside, `save` raises `PlanError`.

    Raises
    ------
    ConfigError
        The model holds no collection.

    Examples
    --------
    >>> import torch, embcache as ec
    >>> model = torch.nn.ModuleDict({"rows": ec.EmbeddingBagCollection([ec.TableConfig("item", 4)]), "top": torch.nn.Linear(4, 1)})
    >>> optimizer, step = torch.optim.SGD(model["top"].parameters(), lr=0.1), ec.training_step(model)
    >>> for keys in torch.arange(12).split(4):
    ...     with step:
    ...         optimizer.zero_grad()
    ...         pooled = model["rows"](ec.JaggedFeatures(["item"], keys, torch.ones_like(keys))).values()
    ...         model["top"](pooled).sum().backward()
    ...         optimizer.step()
    """
    steps: AbstractContextManager[None] = Steps(manager.door for manager in _managers(_bare(model)).values())
    return steps


def _bare(model: nn.Module) -> nn.Module:
    """The model without what it is wrapped in: torch's DistributedDataParallel, TorchRec's DistributedModelParallel, torch.compile. So
    what it is saved under does not depend on them."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    while True:
        if isinstance(model, DistributedDataParallel) or hasattr(model, "_dmp_wrapped_module"):
            inner: Any = model.module
        else:
            inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _managers(model: nn.Module) -> dict[str, EmbCacheManager]:
    """The managers of a model's collections, by module path."""
    found = {name: part.manager for name, part in model.named_modules() if isinstance(part, CachedCollection)}
    if not found:
        raise ConfigError(f"the {type(model).__name__} holds no embedding collection; save it with torch.save")
    return found
