"""embcache: embedding tables larger than accelerator memory.

Importing this package does not import torch, and neither does `EmbTable`: the names below that need it are loaded when
they are first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import (
    SGD,
    Adagrad,
    Adam,
    AdmitAndEvictConfig,
    Constant,
    LinearRamp,
    Normal,
    OptimizerSpec,
    RowWiseAdagrad,
    ShowClick,
    TableConfig,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from .errors import (
    ChangedError,
    ClosedError,
    ConfigError,
    CorruptionError,
    DiskFullError,
    EmbCacheError,
    ForkError,
    FormatVersionError,
    HbmCapacityError,
    HostMemoryError,
    LockedError,
    PinnedKeyError,
    PlanError,
    RankError,
    RankRefusedError,
    ShapeError,
    StorageError,
    UncleanDirectoryError,
)

if TYPE_CHECKING:
    from .checkpoint import RestoreReport, generations
    from .features import JaggedFeatures, JaggedTensor, KeyedTensor
    from .manager import EmbCacheManager
    from .modules import EmbeddingBagCollection, EmbeddingCollection
    from .optim import EmbOptimizer
    from .pipeline import TrainPipeline
    from .replay import simulate
    from .saving import Saving
    from .swapinfo import SwapInfo
    from .table import EmbTable, hash_strings
    from .view import TableView
    from .whole import restore, save, training_step

__version__ = "0.1.0"

_LAZY = {
    "EmbCacheManager": "manager",
    "EmbOptimizer": "optim",
    "EmbTable": "table",
    "EmbeddingBagCollection": "modules",
    "EmbeddingCollection": "modules",
    "JaggedFeatures": "features",
    "JaggedTensor": "features",
    "KeyedTensor": "features",
    "Saving": "saving",
    "SwapInfo": "swapinfo",
    "RestoreReport": "checkpoint",
    "TableView": "view",
    "TrainPipeline": "pipeline",
    "generations": "checkpoint",
    "hash_strings": "table",
    "restore": "whole",
    "save": "whole",
    "simulate": "replay",
    "training_step": "whole",
}
# Packages of their own that ``ec.NAME`` finds without an import of its own.
_ROOMS = frozenset({"checkpoint", "devices", "distributed", "metrics", "torchrec"})

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdmitAndEvictConfig",
    "ChangedError",
    "ClosedError",
    "ConfigError",
    "Constant",
    "CorruptionError",
    "DiskFullError",
    "EmbCacheError",
    "EmbCacheManager",
    "EmbOptimizer",
    "EmbTable",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "ForkError",
    "FormatVersionError",
    "HbmCapacityError",
    "HostMemoryError",
    "JaggedFeatures",
    "JaggedTensor",
    "KeyedTensor",
    "LinearRamp",
    "LockedError",
    "Normal",
    "OptimizerSpec",
    "PinnedKeyError",
    "PlanError",
    "RankError",
    "RankRefusedError",
    "RestoreReport",
    "RowWiseAdagrad",
    "Saving",
    "ShapeError",
    "ShowClick",
    "StorageError",
    "SwapInfo",
    "TableConfig",
    "TableView",
    "TrainPipeline",
    "TruncatedNormal",
    "UncleanDirectoryError",
    "Uniform",
    "Zeros",
    "generations",
    "hash_strings",
    "restore",
    "save",
    "simulate",
    "training_step",
]


def __getattr__(name: str) -> Any:
    """Load a name of the torch half, or of the compiled core, on first use."""
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'embcache' has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
