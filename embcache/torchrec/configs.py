"""Configurations of tables: TorchRec's own, and these with what a cached table knows besides; as `TableConfig` for the engine.

A TorchRec configuration says initial values by a range (``weight_init_min`` and ``max``, by default the inverse root of the number of
rows) or by a function of the whole weight. A range, and those functions of ``torch.nn.init`` that treat every element alike, become
initializers: rows then come into being when they are first used. For any other function the whole weight is made once.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.types import DataType

from .. import config as plain
from ..config import Initializer, LinearRamp, ShowClick, TableConfig, TruncatedNormal, Uniform
from ..errors import ConfigError, shown

__all__ = [
    "AdmitAndEvictConfig",
    "EmbCacheEmbeddingBagConfig",
    "EmbCacheEmbeddingConfig",
    "InitializerType",
    "PolicyType",
    "ShowClickParams",
    "table_configs",
    "whole_weight",
]

MOST_SLOTS = 2**31 - 2
DTYPES = {DataType.FP32: "float32", DataType.FP16: "float16", DataType.BF16: "bfloat16"}
# Fields of TorchRec's that ask for something else than a table of rows; only their defaults are taken.
FOREIGN = (
    "num_embeddings_post_pruning",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)


class InitializerType(enum.Enum):
    """RecSDK's initial values: a ramp from ``weight_init_min`` to ``max``, uniform between them, or a truncated normal."""

    LINEAR = "linear"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"


class PolicyType(enum.Enum):
    """RecSDK's filters: none, by count and time, or by show/click score."""

    NONE = "none"
    POLICY_COUNT = "count"
    POLICY_SHOWCLICK = "show_click"


@dataclass(frozen=True)
class ShowClickParams:
    """RecSDK's parameters of the show/click policy; see `embcache.ShowClick`.

    Attributes
    ----------
    alpha, beta : float
        Worth of a show and of a click.
    admit_threshold : float
        Score that admits; 0 admits at once.
    evict_percentage, score_decay : float
    """

    alpha: float = 1.0
    beta: float = 0.0
    admit_threshold: float = 0.0
    evict_percentage: float = 0.0
    score_decay: float = 1.0


class AdmitAndEvictConfig(plain.AdmitAndEvictConfig):
    """`embcache.AdmitAndEvictConfig` that also takes RecSDK's arguments.

    Parameters
    ----------
    admit_threshold, not_admitted_default_value, evict_threshold, evict_step_interval
        As there. An interval where nothing is swept is taken as none: RecSDK wants one for all tables.
    policy_type : PolicyType, optional
    showclick_params : ShowClickParams, optional
        With ``PolicyType.POLICY_SHOWCLICK``; its ``admit_threshold`` is the one that counts.
    **options
        Any other argument of `embcache.AdmitAndEvictConfig`.

    Examples
    --------
    >>> from embcache.torchrec import AdmitAndEvictConfig, PolicyType, ShowClickParams
    >>> AdmitAndEvictConfig(admit_threshold=2, evict_threshold=600, evict_step_interval=100).policy
    'count'
    >>> AdmitAndEvictConfig(
    ...     policy_type=PolicyType.POLICY_SHOWCLICK, showclick_params=ShowClickParams(beta=3.0, admit_threshold=2.0)
    ... ).admit_threshold
    2.0
    """

    def __init__(
        self,
        admit_threshold: float = -1,
        not_admitted_default_value: float = 0.0,
        evict_threshold: int = 0,
        evict_step_interval: int = 0,
        policy_type: Any = None,
        showclick_params: ShowClickParams | None = None,
        **options: Any,
    ) -> None:
        policy = None if policy_type is None else _named(PolicyType, "policy_type", policy_type)
        if policy is PolicyType.POLICY_SHOWCLICK:
            params = ShowClickParams() if showclick_params is None else showclick_params
            options |= {
                "policy": "show_click",
                "show_click": ShowClick(params.alpha, params.beta, params.score_decay, params.evict_percentage),
            }
            admit_threshold = params.admit_threshold
        elif showclick_params is not None:
            raise ConfigError(
                f"AdmitAndEvictConfig: showclick_params = {showclick_params!r} with policy_type = {policy_type!r}; give "
                "PolicyType.POLICY_SHOWCLICK"
            )
        elif policy is PolicyType.NONE:
            admit_threshold, evict_threshold, evict_step_interval = -1, 0, 0
        show_click: ShowClick | None = options.get("show_click")
        swept = bool(evict_threshold) or options.get("policy") == "show_click"
        if show_click is not None and not show_click.sweeps:
            swept = False
        super().__init__(
            admit_threshold, not_admitted_default_value, evict_threshold, evict_step_interval if swept else 0, **options
        )


@dataclass
class _Cached(BaseEmbeddingConfig):
    """What a cached table knows beside what TorchRec's configurations say."""

    initializer_type: Any = None
    weight_init_mean: float = 0.0
    weight_init_stddev: float = 0.05
    admit_and_evict_config: plain.AdmitAndEvictConfig | None = None
    is_incremental: bool = False
    initializer: Initializer | None = None
    seed: int = 0
    hbm_rows: int | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.num_embeddings is not None:
            super().__post_init__()


@dataclass
class EmbCacheEmbeddingBagConfig(_Cached, EmbeddingBagConfig):
    """TorchRec's ``EmbeddingBagConfig`` with what a cached table knows besides.

    Attributes
    ----------
    num_embeddings : int or None
        As in TorchRec; here it bounds the table's device slots, never its keys, and gives the default range of initial values. None:
        unbounded.
    admit_and_evict_config : AdmitAndEvictConfig, optional
    initializer : Initializer, optional
        Of new rows; goes before all of TorchRec's and RecSDK's ways to say it.
    seed : int
        Of the initializer.
    hbm_rows : int, optional
        Fixed number of device slots.
    directory : path, optional
        Keeps the table in files there; see `embcache.TableConfig`.
    initializer_type : InitializerType, optional
        As in RecSDK, where the default is ``LINEAR``; here None: as TorchRec initializes.
    weight_init_mean, weight_init_stddev : float
        Of ``TRUNCATED_NORMAL``.
    is_incremental : bool
        Taken and not needed: every table can be saved incrementally.
    """


@dataclass
class EmbCacheEmbeddingConfig(_Cached, EmbeddingConfig):
    """TorchRec's ``EmbeddingConfig`` with what a cached table knows besides: the fields of `EmbCacheEmbeddingBagConfig`."""


def _named(kind: type[enum.Enum], name: str, value: Any) -> Any:
    """`value` as a member of `kind`: one of its own, one of the same name of another enum, or the name."""
    label = value if isinstance(value, str) else getattr(value, "name", None)
    for member in kind:
        if label is not None and label.upper() == member.name:
            return member
    raise ConfigError(f"{name} = {shown(value)}; give one of {[member.name for member in kind]!r}")


def _default_of(name: str) -> Any:
    return next(field.default for field in fields(BaseEmbeddingConfig) if field.name == name)


def table_configs(configs: Sequence[BaseEmbeddingConfig], pooled: bool) -> list[TableConfig]:
    """The `TableConfig` of each configuration, TorchRec's or ours. Empty ``feature_names`` are filled in, as TorchRec does.

    Raises
    ------
    ConfigError
        One of them is none, or asks for something that a cached table is not.
    """
    return [_table_config(config, pooled) for config in configs]


def _table_config(config: BaseEmbeddingConfig, pooled: bool) -> TableConfig:
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    if not isinstance(config, kind):
        raise ConfigError(f"tables: {shown(config)} is no {kind.__name__}; give TorchRec's, or EmbCache{kind.__name__}")
    owner = f"table {config.name!r}"
    for name in FOREIGN:
        value = getattr(config, name, None)
        if value not in (None, _default_of(name)):
            remedy = "give admit_and_evict_config" if "eviction" in name else "leave it out"
            raise ConfigError(f"{owner}: {name} = {shown(value)}, which a cached table does not have; {remedy}")
    if config.data_type not in DTYPES:
        raise ConfigError(f"{owner}: data_type = {config.data_type}; give one of {[kind.name for kind in DTYPES]!r}")
    pooling = config.pooling if isinstance(config, EmbeddingBagConfig) else PoolingType.SUM
    if pooling not in (PoolingType.SUM, PoolingType.MEAN):
        raise ConfigError(f"{owner}: pooling = {pooling}; give SUM or MEAN, or use an EmbeddingCollection")
    if not config.feature_names:
        config.feature_names = [config.name]
    count = config.num_embeddings
    return TableConfig(
        config.name,
        config.embedding_dim,
        list(config.feature_names),
        num_embeddings=None if count is None or count > MOST_SLOTS else count,
        pooling=pooling.value.lower(),
        dtype=DTYPES[config.data_type],
        initializer=_initializer(config) or Uniform(),
        seed=getattr(config, "seed", 0),
        hbm_rows=getattr(config, "hbm_rows", None),
        admit_and_evict=getattr(config, "admit_and_evict_config", None),
        directory=getattr(config, "directory", None),
    )


def _initializer(config: BaseEmbeddingConfig) -> Initializer | None:
    """What new rows of the table start from; None where only a function of the whole weight says it."""
    if isinstance(config, _Cached) and config.initializer is not None:
        return config.initializer
    if isinstance(config, _Cached) and config.initializer_type is not None:
        kind = _named(InitializerType, f"table {config.name!r}: initializer_type", config.initializer_type)
        low = 0.0 if config.weight_init_min is None else config.weight_init_min
        high = 1.0 if config.weight_init_max is None else config.weight_init_max
        if kind is InitializerType.TRUNCATED_NORMAL:
            return TruncatedNormal(config.weight_init_mean, config.weight_init_stddev)
        return LinearRamp(low, high) if kind is InitializerType.LINEAR else Uniform(low, high)
    if config.init_fn is None:
        return Uniform()
    return _of_function(config.init_fn)


def _of_function(function: Callable[..., Any]) -> Initializer | None:
    """The initializer that does what a function of ``torch.nn.init`` does to each element alike; None for any other."""
    called = function if isinstance(function, functools.partial) else functools.partial(function)
    options = dict(called.keywords)
    if called.args or options.pop("generator", None) is not None:
        return None
    init = torch.nn.init
    if called.func is init.zeros_ and not options:
        return plain.Zeros()
    if called.func is init.ones_ and not options:
        return plain.Constant(1.0)
    if called.func is init.constant_ and set(options) == {"val"}:
        return plain.Constant(options["val"])
    if called.func is init.uniform_ and set(options) <= {"a", "b"}:
        return Uniform(options.get("a", 0.0), options.get("b", 1.0))
    if called.func is init.normal_ and set(options) <= {"mean", "std"}:
        return plain.Normal(options.get("mean", 0.0), options.get("std", 1.0))
    return None


def whole_weight(config: BaseEmbeddingConfig) -> torch.Tensor | None:
    """The weight that the table's own ``init_fn`` makes of all its rows, (num_embeddings, dim); None where initializers do.

    Raises
    ------
    ConfigError
        There is such a function, and no number of rows.
    """
    if _initializer(config) is not None or config.init_fn is None:
        return None
    if config.num_embeddings is None:
        raise ConfigError(
            f"table {config.name!r}: init_fn = {shown(config.init_fn)} makes a whole weight, and num_embeddings is None; give a number, or "
            "initializer="
        )
    dtype = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}.get(config.data_type, torch.float32)
    weight = torch.empty((config.num_embeddings, config.embedding_dim), dtype=dtype)
    with torch.no_grad():
        config.init_fn(weight)
    return weight
