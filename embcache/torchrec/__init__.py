"""The TorchRec face: the collections of TorchRec's users, with tables larger than device memory.

What this room owns: the names and the ways of TorchRec (configurations, ``KeyedJaggedTensor`` in, ``KeyedTensor`` or
``dict[str, JaggedTensor]`` out, `apply_optimizer_in_backward`, ``fused_optimizer``, train pipelines), and the names that RecSDK's
users know. It only translates: what trains is `embcache.modules` and `embcache.pipeline`.

It is the only room that imports TorchRec, which is not a dependency of the package: importing this without it says what to install.
"""

from __future__ import annotations

try:
    import torchrec as _torchrec  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"embcache.torchrec needs TorchRec, which cannot be imported ({error}). Install it beside torch 2.13.0: "
        "pip install 'embcache[torchrec]'; pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
    ) from error

from .configs import (
    AdmitAndEvictConfig,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingConfig,
    InitializerType,
    PolicyType,
    ShowClickParams,
)
from .jagged import JaggedTensorWithTimestamp, KeyedJaggedTensorWithTimestamp
from .modules import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection
from .optimizers import TableOptimizer, sparse_optimizer
from .pipeline import EmbCacheTrainPipelineSparseDist
from .replace import ReplacedCollection, ReplaceReport, replace_embeddings
from .sharding import (
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheShardedEmbeddingBagCollection,
    EmbCacheShardedEmbeddingCollection,
    sharding_plan,
)

__all__ = [
    "AdmitAndEvictConfig",
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingBagCollectionSharder",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingCollection",
    "EmbCacheEmbeddingCollectionSharder",
    "EmbCacheEmbeddingConfig",
    "EmbCacheShardedEmbeddingBagCollection",
    "EmbCacheShardedEmbeddingCollection",
    "EmbCacheTrainPipelineSparseDist",
    "InitializerType",
    "JaggedTensorWithTimestamp",
    "KeyedJaggedTensorWithTimestamp",
    "PolicyType",
    "ReplaceReport",
    "ReplacedCollection",
    "ShowClickParams",
    "TableOptimizer",
    "replace_embeddings",
    "sharding_plan",
    "sparse_optimizer",
]
