"""`replace_embeddings`: every collection of a TorchRec model becomes a cached one, in one call.

Nothing of the model is changed before all the new collections are made and filled: a failure leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection

from ..config import OptimizerSpec
from ..devices import Emulated
from ..errors import ConfigError, shown, whole_number
from .modules import CachedTables, EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection, assign_rows
from .optimizers import applied_optimizer, sparse_optimizer

__all__ = ["ReplaceReport", "ReplacedCollection", "replace_embeddings"]

POOLED = (EmbeddingBagCollection, FusedEmbeddingBagCollection)
SEQUENCES = (EmbeddingCollection, FusedEmbeddingCollection)
# Names of row state: in torch's optimizers, and in those of TorchRec's fused modules.
STATES = (("sum",), ("exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class ReplacedCollection:
    """One collection that was replaced.

    Attributes
    ----------
    path : str
        In the model; "" for the model itself.
    kind : str
        Of the class that it had.
    rows : dict of str to int
        Rows that were copied, by table.
    optimizer : OptimizerSpec
    with_state : bool
        Whether optimizer state was copied too.
    hbm_bytes : int, optional
        Budget of device rows that it has now.
    module : EmbCacheEmbeddingBagCollection or EmbCacheEmbeddingCollection
    """

    path: str
    kind: str
    rows: dict[str, int]
    optimizer: OptimizerSpec
    with_state: bool
    hbm_bytes: int | None
    module: CachedTables


@dataclass(frozen=True)
class ReplaceReport:
    """What `replace_embeddings` did.

    Attributes
    ----------
    model : torch.nn.Module
        The model; another object only where it was a collection itself.
    collections : list of ReplacedCollection
    """

    model: nn.Module
    collections: list[ReplacedCollection]

    def __str__(self) -> str:
        lines = []
        for one in self.collections:
            budget = "default" if one.hbm_bytes is None else f"{one.hbm_bytes} bytes"
            state = " and state" if one.with_state else ""
            tables = ", ".join(f"{name}: {rows}" for name, rows in one.rows.items())
            lines.append(
                f"{one.path or '(model)'}: {one.kind}, rows{state} of {{{tables}}}, {one.optimizer!r}, HBM {budget}"
            )
        return "\n".join(lines)


def replace_embeddings(
    model: nn.Module,
    *,
    hbm_bytes: int | Mapping[str, int] | None = None,
    optimizer: OptimizerSpec | None = None,
    device: str | torch.device | Emulated | None = None,
    policy: str = "lru",
    accumulate: int = 1,
    num_threads: int | None = None,
) -> ReplaceReport:
    """Replace every embedding collection of TorchRec in `model` by a cached one, with its weights and optimizer.

    Call it before the dense optimizer is made, or make that one anew: the old collections' parameters are gone.

    Parameters
    ----------
    model : torch.nn.Module
        Holds ``EmbeddingBagCollection``, ``EmbeddingCollection`` or their ``Fused`` kinds, unsharded, anywhere.
    hbm_bytes : int or mapping of str to int, optional
        Device bytes for rows: of the whole model, shared out by the collections' sizes; or of each collection, by path.
    optimizer : OptimizerSpec, optional
        For collections to whose parameters none was applied (``apply_optimizer_in_backward``); the others keep theirs.
    device, policy, accumulate, num_threads
        Of the new collections; `device` is by default that of the old one's weights.

    Returns
    -------
    ReplaceReport

    Raises
    ------
    ConfigError
        No collection; one without an optimizer; several optimizers in one; a frozen table (``requires_grad=False``); a setting that a cached
        table does not have. Nothing has changed then.
    HostMemoryError
        For a moment both exist. Nothing has changed.

    Notes
    -----
    Row r of a weight becomes the row of key r, bit for bit. The state of optimizers that have stepped already (Adagrad's sums, Adam's
    moments and step) is taken over too.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    >>> import embcache as ec
    >>> from embcache.torchrec import replace_embeddings
    >>> model = torch.nn.ModuleDict(
    ...     {"rows": EmbeddingBagCollection([EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=50, feature_names=["f"])])}
    ... )
    >>> report = replace_embeddings(model, hbm_bytes=4096, optimizer=ec.SGD(lr=0.1))
    >>> print(report)
    rows: EmbeddingBagCollection, rows of {t: 50}, SGD(lr=0.1, weight_decay=0.0), HBM 4096 bytes
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    found = list(_collections(model))
    if not found:
        raise ConfigError(
            f"the {type(model).__name__} holds no unsharded embedding collection of TorchRec; there is nothing to replace"
        )
    budgets = _budgets(found, hbm_bytes)
    made: dict[int, ReplacedCollection] = {}
    try:
        for path, old in found:
            if id(old) not in made:
                options = {"policy": policy, "accumulate": accumulate, "num_threads": num_threads}
                made[id(old)] = _replaced(path, old, budgets[path], optimizer, device, options)
    except BaseException:
        for one in made.values():
            one.module.close()
        raise
    for path, old in found:
        if path:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made[id(old)].module)
    root = made.get(id(model))
    return ReplaceReport(model if root is None else root.module, list(made.values()))


def _collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and collection, as often as it is there."""
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, (*POOLED, *SEQUENCES)):
            yield path, part


def _configs(old: Any) -> Sequence[Any]:
    configs: Sequence[Any] = old.embedding_bag_configs() if isinstance(old, POOLED) else old.embedding_configs()
    return configs


def _weights(old: Any) -> dict[str, nn.Parameter]:
    """Weight of each table."""
    holders: Any = old.embedding_bags if isinstance(old, POOLED) else old.embeddings
    return {config.name: holders[config.name].weight for config in _configs(old)}


def _budgets(found: Sequence[tuple[str, Any]], hbm_bytes: Any) -> dict[str, int | None]:
    """Device bytes of each collection, by path."""
    if hbm_bytes is None:
        return {path: None for path, _ in found}
    if isinstance(hbm_bytes, Mapping):
        unknown = sorted(set(hbm_bytes) - {path for path, _ in found})
        if unknown:
            raise ConfigError(
                f"hbm_bytes names {unknown!r}; the model's collections are {[path for path, _ in found]!r}"
            )
        return {path: hbm_bytes.get(path) for path, _ in found}
    total = whole_number(hbm_bytes)
    if total is None or total < 1:
        raise ConfigError(
            f"hbm_bytes = {shown(hbm_bytes)}; give a number of bytes, a mapping from collections' paths to it, or None"
        )
    sizes = {
        id(old): sum(weight.numel() * weight.element_size() for weight in _weights(old).values()) for _, old in found
    }
    whole = max(1, sum(sizes.values()))
    return {path: max(1, total * sizes[id(old)] // whole) for path, old in found}


def _replaced(
    path: str, old: Any, budget: int | None, optimizer: OptimizerSpec | None, device: Any, options: dict[str, Any]
) -> ReplacedCollection:
    """A cached collection with the contents of `old`."""
    weights = _weights(old)
    if isinstance(old, (FusedEmbeddingBagCollection, FusedEmbeddingCollection)):
        spec: OptimizerSpec | None = _fused_optimizer(old)
    else:
        _check_trained(path or type(old).__name__, weights)
        spec = applied_optimizer(weights) or optimizer
    where = path or type(old).__name__
    if spec is None:
        raise ConfigError(
            f"{where}: no optimizer was applied to its parameters (apply_optimizer_in_backward); give replace_embeddings(optimizer=...)"
        )
    here = next(iter(weights.values())).device if device is None else device
    if isinstance(old, POOLED):
        new: CachedTables = EmbCacheEmbeddingBagCollection(
            _configs(old), old.is_weighted(), here, hbm_bytes=budget, optimizer=spec, **options
        )
    else:
        new = EmbCacheEmbeddingCollection(
            _configs(old), here, bool(old.need_indices()), hbm_bytes=budget, optimizer=spec, **options
        )
    new.train(old.training)
    rows: dict[str, int] = {}
    steps: set[int] = set()
    with_state = False
    if not any(weight.is_meta for weight in weights.values()):
        try:
            for name, weight in weights.items():
                state, step = _state(old, name, weight, spec)
                assign_rows(new.manager, name, weight, state)
                rows[name] = len(weight)
                with_state = with_state or state is not None
                steps.add(step)
            _set_step(new, steps, where)
        except BaseException:
            new.close()
            raise
    return ReplacedCollection(path, type(old).__name__, rows, spec, with_state, budget, new)


def _check_trained(where: str, weights: dict[str, nn.Parameter]) -> None:
    """`ConfigError` where a table is frozen: it would be trained. (TorchRec's fused kernels train such tables too.)"""
    frozen = [name for name, weight in weights.items() if not weight.requires_grad]
    if frozen:
        raise ConfigError(
            f"{where}: requires_grad is False for the tables {frozen!r}, and a cached collection trains all of its tables or, in eval(), none; "
            "give them a collection of their own, convert it with requires_grad_(True), and keep it in eval() where the model trains"
        )


def _state(old: Any, name: str, weight: nn.Parameter, spec: OptimizerSpec) -> tuple[torch.Tensor | None, int]:
    """Row state of a table, float32 (rows, state_dim), or None where there is none yet; and the optimizer's step."""
    widths = spec.state_widths(weight.shape[1])
    held: Any
    if isinstance(old, (FusedEmbeddingBagCollection, FusedEmbeddingCollection)):
        held = next(
            (
                state
                for key, state in old.fused_optimizer().state_dict()["state"].items()
                if key.rpartition(".weight")[0].rpartition(".")[2] == name  # "item" is no end of "new_item"
            ),
            {},
        )
        parts = [value for key, value in held.items() if "momentum" in key][: len(widths)]
        step = _fused_step(old)
    else:
        applied = getattr(weight, "_in_backward_optimizers", None) or [None]
        held = {} if applied[0] is None else applied[0].state.get(weight, {})
        names = next((names for names in STATES if all(one in held for one in names)), ())
        parts, step = [held[one] for one in names], int(held.get("step", 0))
    if not widths or not parts:
        return None, step
    columns = [part.detach().float().reshape(len(weight), width) for part, width in zip(parts, widths, strict=True)]
    return torch.cat(columns, dim=1), step


def _fused_step(old: Any) -> int:
    """Updates that a fused module has made."""
    return max((int(module._emb_module.iter.item()) for module in old._emb_modules), default=0)


def _fused_optimizer(old: Any) -> OptimizerSpec:
    """Of a fused module, whose kernels have defaults of their own."""
    kind, options = old.optimizer_type(), dict(old._optimizer_kwargs)
    if not {"lr", "learning_rate"} & set(options):
        options["lr"] = 0.01
    if kind is not torch.optim.SGD:
        options.setdefault("eps", 1e-8)
    return sparse_optimizer(kind, options)


def _set_step(new: CachedTables, steps: set[int], where: str) -> None:
    """Go on from the step of the old optimizers, which have to agree on it where it counts."""
    if new.manager.spec.kind != "adam" or steps == {0}:
        return
    if len(steps) > 1:
        raise ConfigError(
            f"{where}: its tables' Adam has made {sorted(steps)!r} steps, and a collection has one step count; put them in collections of "
            "their own"
        )
    state = new.optimizer.state_dict()
    for held in state["state"].values():
        held["step"] = next(iter(steps))
    new.optimizer.load_state_dict(state)
