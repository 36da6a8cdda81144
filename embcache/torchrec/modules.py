"""EmbCacheEmbeddingBagCollection and EmbCacheEmbeddingCollection: TorchRec's two collections on cached tables.

Each is the engine's collection behind TorchRec's interface. What differs is when it is made: TorchRec's users name the optimizer after
the module (``apply_optimizer_in_backward``), and make modules on the meta device. So the tables come into being when they are first
needed: by a forward, by a pipeline, or by whoever asks for ``manager``, ``optimizer`` or a checkpoint.

Parameters. A table has no tensor that holds it. In its place stands a parameter on the meta device, ``embedding_bags.<table>.weight``
of shape (num_embeddings, dim), without data and without gradient: it is what `apply_optimizer_in_backward` is applied to, what
sharding plans are made of, and what names in optimizers are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.optim.fused import FusedOptimizerModule

from ..config import OptimizerSpec, TableConfig
from ..devices import Emulated
from ..errors import ConfigError, ShapeError, shown
from ..manager import DEFAULT_OPTIMIZER, EmbCacheManager
from ..modules import CachedCollection, EmbeddingBagCollection, EmbeddingCollection
from .configs import table_configs, whole_weight
from .faces import PooledFace, SequenceFace
from .optimizers import TableOptimizer, applied_optimizer, sparse_optimizer

__all__ = ["EmbCacheEmbeddingBagCollection", "EmbCacheEmbeddingCollection"]

MADE_LATER = ("_manager", "_update")
ROWS_AT_A_TIME = 1 << 16


class TableOwner(Protocol):
    """Whose tables the holders stand for."""

    @property
    def is_made(self) -> bool: ...

    def load_weight(self, name: str, weight: torch.Tensor, prefix: str = "") -> None: ...


class TableParameter(nn.Parameter):
    """Stands for a table of a collection: its shape, and the optimizer that is applied to it. It has no data."""

    is_open: Callable[[], bool]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_in_backward_optimizers" and not self.is_open():
            raise ConfigError(
                "apply_optimizer_in_backward on a collection whose tables are made already, with an optimizer's state beside each row; "
                "apply it before the first forward"
            )
        if name == "requires_grad" and not value:
            self.requires_grad_(False)
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> TableParameter:
        """It never has a gradient, so clearing this would change nothing: refused, lest rows be trained that are taken for frozen.

        Raises
        ------
        ConfigError
        """
        if not requires_grad:
            raise ConfigError(
                "requires_grad = False of a cached table's parameter would not freeze its rows; keep the collection in eval(): it reads and "
                "changes nothing then, also where the rest of the model trains"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (
            torch.empty_like(self.data),
        )  # its shape, for whoever lists parameters; whose it is stays here


class TableHolder(nn.Module):
    """Where TorchRec has an ``nn.EmbeddingBag`` or ``nn.Embedding``: the parameter of one table, and its part of a state dict."""

    def __init__(self, collection: TableOwner, config: BaseEmbeddingConfig) -> None:
        super().__init__()
        shape = (config.num_embeddings or 0, config.embedding_dim)
        self.weight = TableParameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        self.config = config
        self.belong_to(collection)

    def belong_to(self, collection: TableOwner) -> None:
        """From now on it stands for a table of `collection`."""
        # Weak: tables are to go with the last who holds their collection, not at the next search for cycles.
        owner = weakref.ref(collection)
        self.weight.is_open = lambda: (found := owner()) is None or not found.is_made
        self._owner = owner

    def apply(self, fn: Callable[[nn.Module], Any]) -> TableHolder:
        """Nothing: what initializes parameters (TorchRec, of those on the meta device) is not to make one of the table's size."""
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TableHolder:
        """There is nothing to move."""
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: tables are saved by ``save``."""

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """A weight of TorchRec's under this name becomes rows; without one the table stays as it is."""
        weight = state_dict.get(f"{prefix}weight")
        collection = self._owner()
        if weight is None or collection is None:
            return
        try:
            collection.load_weight(self.config.name, weight, prefix)
        except (ConfigError, ShapeError) as error:
            error_msgs.append(str(error))


class CachedTables(FusedOptimizerModule, CachedCollection):
    """What both collections of this room share: when their tables are made, and of what."""

    holders = ""  # name of the module that holds the parameters, as in TorchRec
    weighted: bool | None = None

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        device: str | torch.device | Emulated | None,
        optimizer: OptimizerSpec | None,
        embedding_optimizer_cls: type | None,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            raise ConfigError(
                f"optimizer = {shown(optimizer)}; give an embcache optimizer such as Adagrad(lr=0.01), or None"
            )
        self._configs = list(tables)
        self._plain = table_configs(self._configs, self.pooled)
        names = [config.name for config in self._plain]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None or not names:
            what = "no tables" if twice is None else f"table {twice!r} twice"
            raise ConfigError(f"tables: {what}; give a list of tables, each name once")
        self._feed = None
        self._named_optimizer, self._optimizer_class = optimizer, embedding_optimizer_cls
        if embedding_optimizer_cls is not None:
            sparse_optimizer(embedding_optimizer_cls)
        self._where: str | torch.device | Emulated = "cpu" if device is None else device
        self._options, self._making = options, threading.RLock()
        self._fused: TableOptimizer | None = None
        try:
            held = nn.ModuleDict({config.name: TableHolder(self, config) for config in self._configs})
        except KeyError as error:
            raise ConfigError(f"tables: a name that no module can have ({error.args[0]}); give another one") from None
        self.add_module(self.holders, held)

    # ------------------------------------------------------------------------------------------------------ being made

    @property
    def is_made(self) -> bool:
        """Whether the tables exist."""
        return "_update" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there: the engine's parts, before they are first used.
        if name in MADE_LATER:
            self._make()
            return self.__dict__[name]
        return super().__getattr__(name)

    def _make(self) -> None:
        with self._making:
            if self.is_made:
                return
            if not isinstance(self._where, Emulated) and torch.device(self._where).type == "meta":
                raise ConfigError(
                    "the collection is on the meta device, where nothing is; call to_empty(device=...) on it or on its model first"
                )
            whole = self.whole_weights()
            self._build(self._plain, self.optimizer_spec(), self._where, **self._options)
            manager: EmbCacheManager = self.__dict__["_manager"]
            try:
                manager.layout.weighted = self.weighted
                for name, weight in whole.items():
                    assign_rows(manager, name, weight, None)
            except BaseException:
                manager.close()
                for name in MADE_LATER:
                    del self.__dict__[name]
                raise

    def optimizer_spec(self) -> OptimizerSpec:
        """Of what was applied to the parameters, given to the constructor, or named there by class; these must agree."""
        applied = applied_optimizer({name: holder.weight for name, holder in self._holders()})
        given, kind = self._named_optimizer, self._optimizer_class
        if applied is not None and given is not None and applied != given:
            raise ConfigError(
                f"optimizer = {given!r}, and apply_optimizer_in_backward was called with what is {applied!r} here; give one of them"
            )
        chosen = applied or given
        if kind is not None:
            named = sparse_optimizer(kind)
            if chosen is not None and type(chosen) is not type(named):
                raise ConfigError(
                    f"embedding_optimizer_cls = {kind.__name__}, and the optimizer is {chosen!r}; give the same one"
                )
            chosen = chosen or named
        return chosen or DEFAULT_OPTIMIZER

    def _holders(self) -> Iterator[tuple[str, Any]]:
        yield from getattr(self, self.holders).items()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """By table the weights that functions of whole weights make, where initial values are said by such; anew at each call."""
        if self.is_made:
            return {}
        return {config.name: weight for config in self._configs if (weight := whole_weight(config)) is not None}

    def options(self) -> dict[str, Any]:
        """The engine's arguments besides tables, optimizer and device."""
        return dict(self._options)

    def table_configs(self) -> list[TableConfig]:
        """The engine's configuration of each table."""
        return list(self._plain)

    def reset_parameters(self) -> None:
        """New tables are as they are initialized; of others it is refused.

        Raises
        ------
        ConfigError
            There are rows.
        """
        if self.is_made and any(len(view) for view in self.tables().values()):
            raise ConfigError("reset_parameters: the tables hold rows; make a new collection")

    def load_weight(self, name: str, weight: torch.Tensor, prefix: str = "") -> None:
        """Take over a whole weight of TorchRec's, (num_embeddings, dim), as rows 0, 1, ...; their optimizer state starts anew."""
        check_weight(self.table_configs(), name, weight, prefix)
        assign_rows(self.manager, name, weight, None)

    # -------------------------------------------------------------------------------------------- as TorchRec's modules

    @property
    def device(self) -> torch.device:
        """Where outputs appear."""
        if self.is_made:
            return super().device
        return torch.device("cpu") if isinstance(self._where, Emulated) else torch.device(self._where)

    @property
    def fused_optimizer(self) -> TableOptimizer:
        """The optimizer of the rows under the names of their parameters. Its learning rate, a scheduler's too, is that of the next update."""
        if self._fused is None:
            names = {f"{self.holders}.{name}.weight": holder.weight for name, holder in self._holders()}
            self._fused = TableOptimizer(names, self.optimizer)
        return self._fused

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CachedTables:
        if self.is_made:
            super()._apply(fn, recurse)
        elif isinstance(self._where, Emulated):
            self._device_after(fn)
        else:
            self._where = self._device_after(fn)
        return self

    def extra_repr(self) -> str:
        lines = [f"{t.name}: dim={t.embedding_dim}, features={t.feature_names!r}" for t in self._plain]
        return "\n".join([*lines, f"device={str(self.device)!r}, made={self.is_made}"])


def check_weight(tables: Sequence[TableConfig], name: str, weight: torch.Tensor, prefix: str) -> None:
    """`ShapeError` where `weight` is no whole weight of that table, of any number of rows."""
    dim = next(table.embedding_dim for table in tables if table.name == name)
    if weight.dim() != 2 or weight.shape[1] != dim or weight.is_meta:
        raise ShapeError(
            f"{prefix}weight has shape {tuple(weight.shape)} on {weight.device}; table {name!r} takes (rows, {dim})"
        )


def assign_rows(
    manager: EmbCacheManager,
    name: str,
    weight: torch.Tensor,
    state: torch.Tensor | None,
    owned: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Make row r of `weight` the row of key r, with `state` (rows, state_dim), float32, or what a new row's is; where it is `owned`."""
    view = manager.table(name)
    rows = weight.detach()
    initial = manager.initial_state(view.dim)
    for start in range(0, len(rows), ROWS_AT_A_TIME):
        part = rows[start : start + ROWS_AT_A_TIME].cpu()
        own = (
            np.broadcast_to(initial, (len(part), len(initial)))
            if state is None
            else state[start : start + len(part)].cpu().numpy()
        )
        plain = (part if part.dtype is torch.float16 and view.dtype == "float16" else part.float()).numpy()
        keys = np.arange(start, start + len(part))
        if owned is not None:
            mine = owned(keys)
            keys, plain, own = keys[mine], plain[mine], own[mine]
        view.assign(keys, np.ascontiguousarray(plain), np.ascontiguousarray(own, dtype=np.float32))


class EmbCacheEmbeddingBagCollection(  # outputs are TorchRec's, not ours
    PooledFace, CachedTables, EmbeddingBagCollectionInterface, EmbeddingBagCollection
):
    """TorchRec's ``EmbeddingBagCollection`` with tables larger than device memory.

    Parameters
    ----------
    tables : list of EmbeddingBagConfig or EmbCacheEmbeddingBagConfig
        Any mix of dims, poolings and data types.
    is_weighted : bool
        Whether batches bring per-sample weights. (A mean divides by the bag's length all the same.)
    device : str or torch.device, optional
        Default: the CPU. On ``"meta"`` nothing is made until ``to_empty(device=...)``.
    hbm_bytes, policy, accumulate, num_threads
        As for `embcache.EmbeddingBagCollection`.
    optimizer : OptimizerSpec, optional
        Of the rows. By default what ``apply_optimizer_in_backward`` was called with before the first forward, else
        ``embedding_optimizer_cls`` with its defaults, else ``Adagrad(lr=0.01)``.
    embedding_optimizer_cls : type, optional
        RecSDK's way to name it.
    world_size, batch_size, multi_hot_sizes, need_accumulate_offset
        Of RecSDK's signature, taken by keyword; nothing depends on them: capacities follow `hbm_bytes` and the traffic.

    Notes
    -----
    Everything of `embcache.EmbeddingBagCollection` is here too: ``manager``, ``optimizer``, ``tables()``, ``save``, ``restore``,
    ``grad_scale``. Training, evaluation and saving are as there.

    ``parameters()`` are one a table, ``embedding_bags.<table>.weight`` as in TorchRec, on the meta device: shape without data, and
    never a gradient. ``state_dict()`` has nothing of the tables; ``load_state_dict()`` takes TorchRec's weights where it finds them, as the
    rows of keys 0, 1, ... A plain ``DistributedDataParallel`` around the model has to be told to pass them over
    (``_set_params_and_buffers_to_ignore_for_model``), as it has of a TorchRec model.

    A key of ``num_embeddings`` or more is as good as any other: it has a row of its own.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    >>> from embcache.torchrec import EmbCacheEmbeddingBagCollection
    >>> from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    >>> ebc = EmbCacheEmbeddingBagCollection(
    ...     [EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=1000, feature_names=["clicked"])], hbm_bytes=1 << 16
    ... )
    >>> apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    >>> out = ebc(KeyedJaggedTensor.from_lengths_sync(["clicked"], torch.tensor([7, 9, 7]), torch.tensor([2, 1])))
    >>> out["clicked"].shape, ebc.fused_optimizer.param_groups[0]["lr"]
    (torch.Size([2, 8]), 0.1)
    >>> out.values().sum().backward()
    """

    holders = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: str | torch.device | Emulated | None = None,
        *,
        hbm_bytes: int | None = None,
        optimizer: OptimizerSpec | None = None,
        policy: str = "lru",
        accumulate: int = 1,
        num_threads: int | None = None,
        embedding_optimizer_cls: type | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        multi_hot_sizes: Sequence[int] | None = None,
        need_accumulate_offset: bool = True,
    ) -> None:
        if not isinstance(is_weighted, bool):
            raise ConfigError(
                f"is_weighted = {shown(is_weighted)}; give True or False, and RecSDK's world_size, batch_size, ... by keyword"
            )
        self_options = {"hbm_bytes": hbm_bytes, "policy": policy, "accumulate": accumulate, "num_threads": num_threads}
        super().__init__(tables, device, optimizer, embedding_optimizer_cls, **self_options)
        self.weighted = is_weighted
        self._show(self._configs, self._plain)


class EmbCacheEmbeddingCollection(  # outputs are TorchRec's, not ours
    SequenceFace, CachedTables, EmbeddingCollectionInterface, EmbeddingCollection
):
    """TorchRec's ``EmbeddingCollection`` with tables larger than device memory: a row for each value.

    Parameters
    ----------
    tables : list of EmbeddingConfig or EmbCacheEmbeddingConfig
        Dims may differ, which TorchRec's may not.
    device, hbm_bytes, optimizer, ...
        As for `EmbCacheEmbeddingBagCollection`.
    need_indices : bool
        Whether outputs bring the ids as their weights.
    use_gather_select, use_gather_select_per_sharding
        Of TorchRec's signature: how it picks rows out of what ranks have sent. Taken and given back; nothing here depends on them.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingConfig, KeyedJaggedTensor
    >>> from embcache.torchrec import EmbCacheEmbeddingCollection
    >>> emc = EmbCacheEmbeddingCollection(
    ...     [EmbeddingConfig(name="item", embedding_dim=8, num_embeddings=1000, feature_names=["seen"])], need_indices=True
    ... )
    >>> out = emc(KeyedJaggedTensor.from_lengths_sync(["seen"], torch.tensor([7, 9, 7]), torch.tensor([2, 1])))
    >>> out["seen"].values().shape, out["seen"].weights().tolist()
    (torch.Size([3, 8]), [7, 9, 7])
    """

    holders = "embeddings"
    weighted = False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: str | torch.device | Emulated | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
        *,
        hbm_bytes: int | None = None,
        optimizer: OptimizerSpec | None = None,
        policy: str = "lru",
        accumulate: int = 1,
        num_threads: int | None = None,
        embedding_optimizer_cls: type | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        multi_hot_sizes: Sequence[int] | None = None,
        need_accumulate_offset: bool = True,
    ) -> None:
        for name, flag in (("need_indices", need_indices), ("use_gather_select", use_gather_select)):
            if not isinstance(flag, bool):
                raise ConfigError(
                    f"{name} = {shown(flag)}; give True or False, and RecSDK's world_size, batch_size, ... by keyword"
                )
        self_options = {"hbm_bytes": hbm_bytes, "policy": policy, "accumulate": accumulate, "num_threads": num_threads}
        super().__init__(tables, device, optimizer, embedding_optimizer_cls, **self_options)
        self._show(self._configs, self._plain, need_indices)
        self._use_gather_select, self._use_gather_select_per_sharding = (
            use_gather_select,
            use_gather_select_per_sharding,
        )

    def use_gather_select(self) -> bool:
        """As it was given."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """As it was given."""
        return self._use_gather_select_per_sharding
