"""How a collection looks to TorchRec's users, sharded or not: what goes in and comes out, and what it says of itself.

Mixed into modules that have the engine's ``pool`` or ``look_up``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from ..config import TableConfig
from ..errors import ConfigError
from ..features import stride_of
from ..layout import FlatBatch
from ..manager import EmbCacheManager
from ..modules import outside_graphs

__all__ = ["PooledFace", "SequenceFace"]


class PooledFace:
    """A collection of pooled embeddings, to TorchRec."""

    pool: Callable[[Any], torch.Tensor]
    weighted: bool | None

    def _show(self, configs: Sequence[BaseEmbeddingConfig], tables: Sequence[TableConfig]) -> None:
        """Set what outputs are called, and what the configurations were."""
        self._shown = list(configs)
        self._embedding_names = [name for names in embedding_names(tables) for name in names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names or ()]

    @outside_graphs
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings, (B, sum of dims), one block a feature in the order of the tables."""
        if isinstance(features, torch.fx.Proxy):
            node: KeyedTensor = _node(self, features)
            return node
        values = self.pool(maybe_td_to_kjt(features, None))
        return KeyedTensor(keys=self._embedding_names, length_per_key=self._dims, values=values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configurations that were given."""
        return cast(list[EmbeddingBagConfig], self._shown)

    def is_weighted(self) -> bool:
        """Whether batches bring per-sample weights."""
        return bool(self.weighted)


class SequenceFace:
    """A collection of sequence embeddings, to TorchRec."""

    look_up: Callable[[Any], tuple[list[torch.Tensor], FlatBatch]]
    manager: EmbCacheManager

    def _show(self, configs: Sequence[BaseEmbeddingConfig], tables: Sequence[TableConfig], need_indices: bool) -> None:
        """Set what outputs are called and bring, and what the configurations were."""
        self._shown, self._need_indices = list(configs), need_indices
        self._names_by_table = embedding_names(tables)

    @outside_graphs
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Name -> rows of the feature's values, with the feature's lengths."""
        if isinstance(features, torch.fx.Proxy):
            node: dict[str, JaggedTensor] = _node(self, features)
            return node
        batch = maybe_td_to_kjt(features, None)
        columns, flat = self.look_up(batch)
        layout = self.manager.layout
        keys = list(batch.keys())
        strides = list((stride_of(batch) or dict.fromkeys(keys, flat.batch_size)).values())
        lengths = torch.split(batch.lengths(), strides)
        indices: Sequence[Any] = torch.split(batch.values(), batch.length_per_key()) if self._need_indices else ()
        out: dict[str, JaggedTensor] = {}
        for name, column in zip(layout.output_names, layout.output_columns, strict=True):
            place = int(flat.sources[column])
            weights = indices[place] if self._need_indices else None
            out[name] = JaggedTensor(values=columns[column], lengths=lengths[place], weights=weights)
        return out

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configurations that were given."""
        return cast(list[EmbeddingConfig], self._shown)

    def need_indices(self) -> bool:
        """Whether outputs bring the ids as their weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of all tables.

        Raises
        ------
        ConfigError
            They have several.
        """
        dims = sorted({config.embedding_dim for config in self._shown})
        if len(dims) > 1:
            raise ConfigError(f"the tables have the dims {dims!r}; ask the configurations one by one")
        return dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the outputs of each table."""
        return self._names_by_table


def _node(collection: Any, features: torch.fx.Proxy) -> Any:
    """The collection as one node of a graph: what tracing finds that goes into it (TorchRec's pipelines trace whole models)."""
    tracer: Any = features.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(cast(nn.Module, collection)), (features,), {})


def embedding_names(tables: Sequence[TableConfig]) -> list[list[str]]:
    """Output names of each table: the feature's, or where several tables share a feature ``feature@table``."""
    features = [feature for table in tables for feature in table.feature_names or ()]
    return [
        [f"{name}@{table.name}" if features.count(name) > 1 else name for name in table.feature_names or ()]
        for table in tables
    ]
