"""The collections over many ranks: sharders for TorchRec's ``DistributedModelParallel``, and the plan that it shards by.

A sharder turns a collection of this package into one whose rows are spread over the ranks (`embcache.distributed`), behind TorchRec's
``ShardedModule``. All of the distribution happens in its forward, on process groups of its own: TorchRec's pipelines find nothing of it
to start early, and `EmbCacheTrainPipelineSparseDist` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    NoWait,
    NullShardedModuleContext,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.optim.fused import FusedOptimizerModule

from ..distributed import ShardedCollection, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, owners
from ..errors import ConfigError, shown
from .faces import PooledFace, SequenceFace
from .modules import (
    CachedTables,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    assign_rows,
    check_weight,
)
from .optimizers import TableOptimizer

__all__ = [
    "EmbCacheEmbeddingBagCollectionSharder",
    "EmbCacheEmbeddingCollectionSharder",
    "EmbCacheShardedEmbeddingBagCollection",
    "EmbCacheShardedEmbeddingCollection",
    "sharding_plan",
]

KERNEL = "fused"
Tables = TypeVar("Tables", bound=CachedTables)


class ShardedTables(ShardedModule[Any, Any, Any, Any], FusedOptimizerModule):
    """What both sharded modules share. Mixed in before the engine's sharded collection."""

    holders = ""
    is_made = True  # from the start: their optimizer is known when they are sharded
    update: Any = ShardedCollection.update  # ShardedModule has a method of that name, for tables that are written to

    def _take_over(self, module: CachedTables) -> None:
        """Stand for the tables of `module`: its parameters, its rows as far as this rank owns them, its settings."""
        # What TorchRec's own constructor sets, which hands no arguments on to the engine's.
        self._qcomm_codecs_registry: dict[str, Any] = {}
        self.is_pipelined = False
        collection = self._collection
        self._plain = module.table_configs()
        collection.manager.layout.weighted = module.weighted
        held: Any = getattr(module, self.holders)
        for holder in held.values():
            holder.belong_to(self)
        self.add_module(self.holders, held)
        for name, weight in module.whole_weights().items():
            assign_rows(collection.manager, name, weight, None, self._owned)
        if module.is_made:
            for name, view in module.tables().items():
                mine = collection.tables()[name]
                for keys, weights, state, *_ in view.items():
                    kept = self._owned(keys)
                    mine.assign(keys[kept], weights[kept], state[kept])
            collection.optimizer.load_state_dict(module.optimizer.state_dict())
        self.train(module.training)
        names = {f"{self.holders}.{name}.weight": holder.weight for name, holder in held.items()}
        self._fused = TableOptimizer(names, collection.optimizer)

    @property
    def _collection(self) -> ShardedCollection:
        """Itself, as what the class it is mixed into makes it."""
        assert isinstance(self, ShardedCollection)
        return self

    def _owned(self, keys: np.ndarray) -> np.ndarray:
        """Whether this rank owns each key, bool (n,)."""
        ranks = self._collection.ranks
        mine: np.ndarray = owners(keys, ranks.world) == ranks.rank
        return mine

    def load_weight(self, name: str, weight: torch.Tensor, prefix: str = "") -> None:
        """Take over this rank's rows of a whole weight of TorchRec's."""
        check_weight(self._plain, name, weight, prefix)
        assign_rows(self._collection.manager, name, weight, None, self._owned)

    @property
    def fused_optimizer(self) -> TableOptimizer:
        """The optimizer of this rank's rows; each rank's has the same hyper-parameters, and a scheduler steps on each."""
        return self._fused

    # ---------------------------------------------------------------------------------- as TorchRec's pipelines call it

    def create_context(self) -> Any:
        return NullShardedModuleContext()

    def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any:
        """The batch as it is: keys travel in `compute`, which owners plan by."""
        (features,) = input or tuple(kwargs.values())
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def compute(self, ctx: Any, dist_input: KJTList) -> Any:
        """The whole forward. (A pipeline has put a function of its own in the place of this object's.)"""
        forward: Any = type(self).forward
        return forward(self, dist_input[0])

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """There is nothing left to send."""
        return output


class EmbCacheShardedEmbeddingBagCollection(  # outputs are TorchRec's, not ours
    PooledFace, ShardedTables, EmbeddingBagCollectionInterface, ShardedEmbeddingBagCollection
):
    """An `EmbCacheEmbeddingBagCollection` whose rows are spread over ranks; made by its sharder."""

    holders = "embedding_bags"

    def __init__(self, module: EmbCacheEmbeddingBagCollection, options: Mapping[str, Any]) -> None:
        ShardedEmbeddingBagCollection.__init__(self, module.table_configs(), module.optimizer_spec(), **options)
        self.weighted = module.weighted
        self._show(module.embedding_bag_configs(), module.table_configs())
        self._take_over(module)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbCacheEmbeddingBagCollection


class EmbCacheShardedEmbeddingCollection(  # outputs are TorchRec's, not ours
    SequenceFace, ShardedTables, EmbeddingCollectionInterface, ShardedEmbeddingCollection
):
    """An `EmbCacheEmbeddingCollection` whose rows are spread over ranks; made by its sharder."""

    holders = "embeddings"

    def __init__(self, module: EmbCacheEmbeddingCollection, options: Mapping[str, Any]) -> None:
        ShardedEmbeddingCollection.__init__(self, module.table_configs(), module.optimizer_spec(), **options)
        self._show(module.embedding_configs(), module.table_configs(), module.need_indices())
        self._take_over(module)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return EmbCacheEmbeddingCollection


class _Sharder(ModuleSharder[Tables], Generic[Tables]):
    """What both sharders share."""

    sharded: Any
    unsharded: type[Tables]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        *,
        reduction: str = "rank",
        average: bool = True,
        wire_rows: str = "float32",
        wire_gradients: str = "float32",
        timeout_s: float = 600.0,
        cpu_device: Any = None,
        cpu_env: Any = None,
        npu_device: Any = None,
        npu_env: Any = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=None)
        if fused_params is not None and (not isinstance(fused_params, Mapping) or fused_params):
            raise ConfigError(
                f"fused_params = {shown(fused_params)}; say the optimizer with apply_optimizer_in_backward, and RecSDK's cpu_device, cpu_env, "
                "npu_device, npu_env by keyword"
            )
        if qcomm_codecs_registry:
            raise ConfigError("qcomm_codecs_registry is not taken; give wire_rows= and wire_gradients=")
        self._options = {
            "reduction": reduction,
            "average": average,
            "wire_rows": wire_rows,
            "wire_gradients": wire_gradients,
            "timeout_s": timeout_s,
        }

    @property
    def module_type(self) -> type[Tables]:
        return self.unsharded

    def shardable_parameters(self, module: Tables) -> dict[str, nn.Parameter]:
        """The parameter of each table, by its name."""
        holders: Any = getattr(module, module.holders)
        return {name: holder.weight for name, holder in holders.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Row-wise, by the hash of the key."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """``"fused"``."""
        return [KERNEL]

    def shard(  # TorchRec says that it is a class method, and calls it as one of an object
        self,
        module: Tables,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """The sharded module that takes the place of `module`, whose rows it takes over. All ranks call it, in the same order."""
        for name, one in params.items():
            if one.sharding_type != ShardingType.ROW_WISE.value or one.compute_kernel != KERNEL:
                raise ConfigError(
                    f"{module_fqn}: table {name!r} is planned {one.sharding_type} with the kernel {one.compute_kernel}; cached tables are "
                    f'row-wise and "{KERNEL}": make the plan with these sharders, or with sharding_plan()'
                )
        missing = sorted(set(self.shardable_parameters(module)) - set(params))
        if missing:
            raise ConfigError(f"{module_fqn}: the plan lacks tables {missing!r}; a collection is sharded as a whole")
        options = module.options() | self._options | {"process_group": env.process_group}
        options["device"] = module.device if device is None else device
        made: ShardedModule[Any, Any, Any, Any] = self.sharded(module, options)
        if module.is_made:
            module.close()
        return made


class EmbCacheEmbeddingBagCollectionSharder(_Sharder[EmbCacheEmbeddingBagCollection]):
    """Shards `EmbCacheEmbeddingBagCollection` in TorchRec's ``DistributedModelParallel``: rows by the hash of their keys.

    Parameters
    ----------
    fused_params, qcomm_codecs_registry
        Of TorchRec's signature; not taken: the optimizer is said by ``apply_optimizer_in_backward``, precision on the wire by `wire_rows` and
        `wire_gradients`.
    reduction, average, wire_rows, wire_gradients, timeout_s
        As for `embcache.distributed.ShardedEmbeddingBagCollection`, whose notes hold too.
    cpu_device, cpu_env, npu_device, npu_env
        Of RecSDK's signature, by keyword; nothing depends on them.

    Notes
    -----
    Rows that the collection has already (by `replace_embeddings`, say, the same on all ranks) go to their owners. ``hbm_bytes`` is of one
    rank then.

    Examples
    --------
    In each process of ``torchrun``, after ``torch.distributed.init_process_group``::

        sharders = [EmbCacheEmbeddingBagCollectionSharder()]
        model = DistributedModelParallel(model, plan=sharding_plan(model), sharders=sharders)
    """

    sharded = EmbCacheShardedEmbeddingBagCollection
    unsharded = EmbCacheEmbeddingBagCollection


class EmbCacheEmbeddingCollectionSharder(_Sharder[EmbCacheEmbeddingCollection]):
    """Shards `EmbCacheEmbeddingCollection`; otherwise as `EmbCacheEmbeddingBagCollectionSharder`."""

    sharded = EmbCacheShardedEmbeddingCollection
    unsharded = EmbCacheEmbeddingCollection


def sharding_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]] = (),
    process_group: Any = None,
    planner: EmbeddingShardingPlanner | None = None,
) -> ShardingPlan:
    """A plan for ``DistributedModelParallel``: cached collections row-wise, and all else as TorchRec's planner plans it.

    TorchRec's planner wants each table to fit into memory by its number of rows, which cached ones need not.

    Parameters
    ----------
    model : torch.nn.Module
    sharders : sequence of ModuleSharder
        Those of the model's other modules; ours may be among them.
    process_group : ProcessGroup, optional
        Default: all ranks. Collective where there are other modules to plan.
    planner : EmbeddingShardingPlanner, optional
        For the others; default: TorchRec's, for the CPU.

    Raises
    ------
    ConfigError
        The model holds no cached collection, or ``torch.distributed`` is not initialized.
    """
    if not dist.is_initialized():
        raise ConfigError("sharding_plan: torch.distributed is not initialized; call init_process_group first")
    group = dist.group.WORLD if process_group is None else process_group
    ranks = list(range(dist.get_world_size(group)))
    plan: dict[str, Any] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, CachedTables):
            plan[path] = EmbeddingModuleShardingPlan(
                {
                    table.name: ParameterSharding(ShardingType.ROW_WISE.value, KERNEL, ranks=ranks)
                    for table in part.table_configs()
                }
            )
    if not plan:
        raise ConfigError(
            f"the {type(model).__name__} holds no cached collection: convert it first (replace_embeddings(model, hbm_bytes=...)), or leave it "
            "to TorchRec's own planner"
        )
    others = [sharder for sharder in sharders if not isinstance(sharder, _Sharder)]
    if others:
        if planner is None:
            planner = EmbeddingShardingPlanner(topology=Topology(world_size=len(ranks), compute_device="cpu"))
        plan |= planner.collective_plan(model, others, group).plan
    return ShardingPlan(plan)
