"""What a user says about tables, filters, optimizers and initial values: frozen dataclasses that check themselves.

Everything here is plain data: no torch, no compiled code. A bad value raises `ConfigError` when the object is made, so
no later stage has to look at it again.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import ConfigError, shown, whole_number
from .rowtypes import row_type

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdmitAndEvictConfig",
    "Constant",
    "Initializer",
    "LinearRamp",
    "Normal",
    "OptimizerSpec",
    "RowWiseAdagrad",
    "ShowClick",
    "TableConfig",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
]

MAX_EMBEDDING_DIM = 8192
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# Numbers of this size and above become infinite in float32: the largest float32 plus half of its last place.
FLOAT32_END = (2.0 - 2.0**-24) * 2.0**127


def _finite(
    owner: str,
    name: str,
    value: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    float32: bool = True,
) -> float:
    """Return `value` as float, or raise `ConfigError` naming the owner, the field, the value and the allowed range.

    With `float32`, a number that is infinite in float32 is refused too: one such rate or constant spoils every row it
    touches. Initializers leave that to the table, whose limits are narrower.
    """
    allowed = "a finite number"
    if low is not None:
        allowed += f" >= {low:g}"
    if above is not None:
        allowed += f" > {above:g}"
    if below is not None:
        allowed += f" and < {below:g}"
    try:
        item = value if isinstance(value, (int, float)) or not hasattr(value, "item") else value.item()
        number = float(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else math.nan
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    except OverflowError:  # an integer beyond float64
        number = math.inf
    bad = not math.isfinite(number)
    if float32 and not bad and abs(number) >= FLOAT32_END:
        raise ConfigError(
            f"{owner}: {name} = {shown(value)} is infinite in float32; give {allowed}, below 3.4e38 in size"
        )
    bad = bad or (low is not None and number < low) or (above is not None and number <= above)
    bad = bad or (below is not None and number >= below)
    if bad:
        raise ConfigError(f"{owner}: {name} = {shown(value)}; give {allowed}")
    return number


def _integer(owner: str, name: str, value: Any, *, low: int, high: int = INT64_MAX) -> int:
    """Return `value` as int, or raise `ConfigError`; booleans and fractions are refused."""
    number = whole_number(value)
    if number is None or not low <= number <= high:
        raise ConfigError(f"{owner}: {name} = {shown(value)}; give an integer from {low} to {high}")
    return number


# ---------------------------------------------------------------------------------------------------- initial values


@dataclass(frozen=True)
class Initializer:
    """Base of the initial-value rules. A new row is a pure function of (table name, seed, key, element): promise I8."""

    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Zeros(Initializer):
    """Every element is 0."""

    kind: ClassVar[str] = "zeros"


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element is `value`."""

    kind: ClassVar[str] = "constant"
    value: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _finite("Constant", "value", self.value, float32=False))


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high): low + (high - low) * u in float32, u a multiple of 2**-24."""

    kind: ClassVar[str] = "uniform"
    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", _finite("Uniform", "low", self.low, float32=False))
        object.__setattr__(self, "high", _finite("Uniform", "high", self.high, float32=False))
        if self.low > self.high:
            raise ConfigError(f"Uniform: low = {self.low!r} exceeds high = {self.high!r}; swap them")


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with the given mean and standard deviation, by inversion with IEEE basic operations only."""

    kind: ClassVar[str] = "normal"
    mean: float = 0.0
    std: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _finite("Normal", "mean", self.mean, float32=False))
        object.__setattr__(self, "std", _finite("Normal", "std", self.std, low=0.0, float32=False))


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal truncated to mean +- 2 std, by counter-based rejection."""

    kind: ClassVar[str] = "truncated_normal"
    mean: float = 0.0
    std: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _finite("TruncatedNormal", "mean", self.mean, float32=False))
        object.__setattr__(self, "std", _finite("TruncatedNormal", "std", self.std, low=0.0, float32=False))


@dataclass(frozen=True)
class LinearRamp(Initializer):
    """Element j of a row of dim d is start + (stop - start) * (j / d) in float32: the same row for every key."""

    kind: ClassVar[str] = "linear_ramp"
    start: float = 0.0
    stop: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _finite("LinearRamp", "start", self.start, float32=False))
        object.__setattr__(self, "stop", _finite("LinearRamp", "stop", self.stop, float32=False))


# -------------------------------------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class OptimizerSpec:
    """Base of the sparse optimizers. They are lazy: only rows touched by the batch change, weight decay included.

    Attributes
    ----------
    lr : float
        Learning rate, >= 0. A scheduler may change it later through ``ebc.optimizer.param_groups``.
    weight_decay : float
        L2 penalty added to the gradient of the touched rows, once per update; >= 0.
    """

    kind: ClassVar[str] = ""
    lr: float = 0.01
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        object.__setattr__(self, "lr", _finite(owner, "lr", self.lr, low=0.0))
        object.__setattr__(self, "weight_decay", _finite(owner, "weight_decay", self.weight_decay, low=0.0))

    def state_widths(self, dim: int) -> tuple[int, ...]:
        """Width in float32 elements of each state array of a row of `dim` weights."""
        return ()

    def initial_state(self) -> tuple[float, ...]:
        """Initial value of each state array."""
        return ()


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """w -= lr * g."""

    kind: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Adagrad(OptimizerSpec):
    """s += g * g; w -= lr * g / (sqrt(s) + eps), as `torch.optim.Adagrad` on sparse gradients with lr_decay = 0."""

    kind: ClassVar[str] = "adagrad"
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        object.__setattr__(self, "eps", _finite(owner, "eps", self.eps, low=0.0))
        value = _finite(owner, "initial_accumulator_value", self.initial_accumulator_value, low=0.0)
        object.__setattr__(self, "initial_accumulator_value", value)

    def state_widths(self, dim: int) -> tuple[int, ...]:
        return (dim,)

    def initial_state(self) -> tuple[float, ...]:
        return (self.initial_accumulator_value,)


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """s += mean(g * g); w -= lr * g / (sqrt(s) + eps): one accumulator a row."""

    kind: ClassVar[str] = "rowwise_adagrad"

    def state_widths(self, dim: int) -> tuple[int, ...]:
        return (1,)


@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """As `torch.optim.SparseAdam`: m += (1-b1)(g-m); v += (1-b2)(g*g-v); w -= lr*sqrt(1-b2^t)/(1-b1^t) * m/(sqrt(v)+eps).

    t is the collection's step count, advanced once per applied update.
    """

    kind: ClassVar[str] = "adam"
    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ConfigError(f"Adam: betas = {self.betas!r}; give two numbers >= 0 and < 1")
        betas = tuple(_finite("Adam", f"betas[{i}]", beta, low=0.0, below=1.0) for i, beta in enumerate(self.betas))
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "eps", _finite("Adam", "eps", self.eps, low=0.0))

    def state_widths(self, dim: int) -> tuple[int, ...]:
        return (dim, dim)

    def initial_state(self) -> tuple[float, ...]:
        return (0.0, 0.0)


# ---------------------------------------------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class ShowClick:
    """How keys are scored by the show/click policy: score = alpha * shows + beta * clicks, in float64.

    Each occurrence of a key is a show; it is a click too where the label of its example is above 0.

    Attributes
    ----------
    alpha, beta : float
        Worth of a show and of a click, >= 0; not both 0.
    score_decay : float
        What every score is multiplied by at each sweep, 0 to 1.
    evict_percentage : float
        Share of the keys, 0 to 1, that each sweep evicts: those with rows that have the lowest scores, rounded down, ties
        by the smaller key; and the same share of the keys that wait for a row. Keys that the batch of the sweep brings for
        the first time, and rows that training has not met, are not in it. 0 is off.

    Notes
    -----
    A score that was last changed s sweeps ago is read as score * score_decay ** s, the power by repeated squaring. A sweep
    with an `evict_percentage` looks at every row in its own step, since which ones have the lowest scores depends on all of
    them; that step is long: about 50 ms a million rows. Decay alone touches no row.
    """

    alpha: float = 1.0
    beta: float = 0.0
    score_decay: float = 1.0
    evict_percentage: float = 0.0

    def __post_init__(self) -> None:
        owner = "ShowClick"
        for name in ("alpha", "beta"):
            value = _finite(owner, name, getattr(self, name), low=0.0, float32=False)
            object.__setattr__(self, name, value + 0.0)  # no negative zero
        for name in ("score_decay", "evict_percentage"):
            value = _finite(owner, name, getattr(self, name), low=0.0, float32=False)
            if value > 1.0:
                raise ConfigError(f"{owner}: {name} = {value!r}; give a number from 0 to 1")
            object.__setattr__(self, name, value + 0.0)
        if self.alpha == 0.0 and self.beta == 0.0:
            raise ConfigError(f"{owner}: alpha = beta = 0.0 scores every key 0; make one of them positive")

    @property
    def sweeps(self) -> bool:
        """Whether a sweep has anything to do."""
        return self.score_decay < 1.0 or self.evict_percentage > 0.0


@dataclass(frozen=True)
class AdmitAndEvictConfig:
    """When a key earns a row and when it loses it.

    In step s = 1, 2, ... of training: all occurrences of the batch are counted; then, where s is a multiple of
    `evict_step_interval`, the sweep; then each key is admitted, or not, for the whole batch. A key swept in its own batch
    reads the default.

    Attributes
    ----------
    admit_threshold : int
        A key is admitted once its number of occurrences (all of the current batch included) has reached this;
        -1 (off), 0 and 1 admit at once. With ``policy="show_click"`` a float, and the score that admits; <= 0 admits at once.
    not_admitted_default_value : float
        What every element of a key reads until it is admitted.
    evict_threshold : int
        A sweep evicts keys whose largest timestamp is more than this below the newest timestamp seen; 0 is off. They are
        dead from that step on; their memory comes back over the next steps, a bounded amount of work in each.
        Unit: that of the timestamps (steps for ``time_source="step"``).
    evict_step_interval : int
        A sweep happens at each training step that is a multiple of this; needed when `evict_threshold` is set.
    evict_keep_min : int
        A floor: a sweep leaves at least so many rows of the table, where there are as many: the most recent ones by largest
        timestamp. Rows that are equally recent stay or go together, so it may leave more. Keys without a row do not count
        and are not protected. 0 is off; needs `evict_threshold`. Where the floor binds, a sweep looks at every row in its
        own step, about 20 ms a million rows.
    time_source : str
        ``"timestamps"``: each batch brings int64 timestamps, one per value. ``"step"``: the step number is the time.
    policy : str
        ``"count"``: occurrences admit, time evicts. ``"show_click"``: a score does both (`ShowClick`); each batch brings
        labels, one an example.
    show_click : ShowClick, optional
        Parameters of the show/click policy; default: ``ShowClick()``.
    admit_probability : float
        Chance above 0, up to 1 (always), that an occurrence admits: each occurrence from the `admit_threshold`-th on is
        drawn once, in its step. The draws are a function of `admit_seed`, key, step and place among the key's occurrences
        in the step, so they do not depend on threads or slots. With an `admit_threshold` of 1 or less no counters of waiting
        keys are kept.
    admit_seed : int
        Of those draws and of the sketch.
    sketch_bytes : int
        Bound of the memory for counts of keys that wait: instead of one entry a key, a count-min sketch (see
        ``_core/include/ec_sketch.h``). Its counts are never too low within its window, and too high by 2 or more in at
        most 3.7 % of the cases: then a key is admitted early. (A generation ends between batches, so this holds where
        width / 2 is no less than a batch's occurrences; on the traces of ``bench/sketch_error.py``, in batches of 1,024, it was
        0.14 % or less with 16 KiB, and up to 8.8 % with 4 KiB, a quarter of what such batches ask for.) The window is two generations of up to width / 2 occurrences
        of waiting keys each, width = ``sketch_bytes`` / 8 for thresholds up to 255 (/ 16 up to 65,535; / 32 above); older
        occurrences are forgotten, and so are, at a sweep, generations that began before its cut-off. Each of up to 4,096 blocks, by the
        keys' hashes, has its share of the width and a window of its own; a block is no narrower than 64, nor than 8 times the
        threshold. Over many ranks the bytes are those of all together, and counts those of one process where each rank's keys are in blocks of
        their own: at any number of ranks with 4,096 blocks (2 MiB and a threshold up to 8, say), at powers of two up to the number of blocks
        with fewer. Waiting keys are not
        listed and not swept one by one: `forgotten` does not count them. 0 is off (exact counts); else 1,024 or more, with
        an `admit_threshold` of 2 or more and policy ``"count"``.
    """

    admit_threshold: float = -1
    not_admitted_default_value: float = 0.0
    evict_threshold: int = 0
    evict_step_interval: int = 0
    evict_keep_min: int = 0
    time_source: str = "timestamps"
    policy: str = "count"
    show_click: ShowClick | None = None
    admit_probability: float = 1.0
    admit_seed: int = 0
    sketch_bytes: int = 0

    def __post_init__(self) -> None:
        owner = "AdmitAndEvictConfig"
        self._check_policy(owner)
        scores = self.show_click is not None
        if scores:
            threshold: float = _finite(owner, "admit_threshold", self.admit_threshold, low=-1.0, float32=False) + 0.0
        else:
            threshold = _integer(owner, "admit_threshold", self.admit_threshold, low=-1)
        object.__setattr__(self, "admit_threshold", threshold)
        value = _finite(owner, "not_admitted_default_value", self.not_admitted_default_value)
        object.__setattr__(self, "not_admitted_default_value", value)
        object.__setattr__(self, "evict_threshold", _integer(owner, "evict_threshold", self.evict_threshold, low=0))
        interval = _integer(owner, "evict_step_interval", self.evict_step_interval, low=0)
        object.__setattr__(self, "evict_step_interval", interval)
        if self.evict_threshold > 0 and interval == 0:
            raise ConfigError(
                f"{owner}: evict_threshold = {self.evict_threshold} without a sweep; set evict_step_interval to 1 or more"
            )
        if self.evict_threshold == 0 and interval > 0 and not scores:
            raise ConfigError(
                f"{owner}: evict_step_interval = {interval} without an evict_threshold; set evict_threshold to 1 or more"
            )
        if not isinstance(self.time_source, str) or self.time_source not in ("timestamps", "step"):
            raise ConfigError(f'{owner}: time_source = {self.time_source!r}; give "timestamps" or "step"')
        keep = _integer(owner, "evict_keep_min", self.evict_keep_min, low=0)
        object.__setattr__(self, "evict_keep_min", keep)
        if keep > 0 and not self.evicts:
            raise ConfigError(
                f"{owner}: evict_keep_min = {keep} without eviction; set evict_threshold (or evict_percentage of ShowClick)"
            )
        self._check_chance_and_sketch(owner)

    def _check_policy(self, owner: str) -> None:
        """Fill in or refuse `show_click`, and what does not go with it."""
        if not isinstance(self.policy, str) or self.policy not in ("count", "show_click"):
            raise ConfigError(f'{owner}: policy = {self.policy!r}; give "count" or "show_click"')
        if self.policy == "count":
            if self.show_click is not None:
                raise ConfigError(
                    f'{owner}: show_click = {self.show_click!r} with policy "count"; set policy="show_click"'
                )
            return
        if self.show_click is None:
            object.__setattr__(self, "show_click", ShowClick())
        if not isinstance(self.show_click, ShowClick):
            raise ConfigError(f"{owner}: show_click = {self.show_click!r}; give a ShowClick or None")
        if self.evict_threshold != 0:
            raise ConfigError(
                f'{owner}: evict_threshold = {self.evict_threshold!r} with policy "show_click"; a score evicts, not time: leave it 0'
            )
        if self.time_source != "timestamps":
            raise ConfigError(
                f'{owner}: time_source = {self.time_source!r} with policy "show_click", which has no time; leave it out'
            )
        interval = whole_number(self.evict_step_interval)
        if interval == 0 and self.show_click.sweeps:
            raise ConfigError(f"{owner}: {self.show_click!r} without a sweep; set evict_step_interval to 1 or more")
        if interval and not self.show_click.sweeps:
            raise ConfigError(
                f"{owner}: evict_step_interval = {interval} with nothing to sweep; set score_decay or evict_percentage of ShowClick"
            )

    def _check_chance_and_sketch(self, owner: str) -> None:
        chance = _finite(owner, "admit_probability", self.admit_probability, above=0.0, float32=False)
        if chance > 1.0:
            raise ConfigError(f"{owner}: admit_probability = {chance!r}; give a number above 0, up to 1")
        object.__setattr__(self, "admit_probability", chance)
        object.__setattr__(self, "admit_seed", _integer(owner, "admit_seed", self.admit_seed, low=INT64_MIN))
        sketch = _integer(owner, "sketch_bytes", self.sketch_bytes, low=0, high=2**46)
        object.__setattr__(self, "sketch_bytes", sketch)
        if sketch == 0:
            return
        if sketch < 1024:
            raise ConfigError(f"{owner}: sketch_bytes = {sketch}; give 1024 or more, or 0 for exact counts")
        if self.policy != "count" or not 2 <= self.admit_threshold < 2**32:
            raise ConfigError(
                f"{owner}: sketch_bytes = {sketch} with policy {self.policy!r} and admit_threshold = {self.admit_threshold!r}; a sketch counts "
                'occurrences: it goes with policy "count" and an admit_threshold from 2 to 2**32 - 1'
            )

    @property
    def admits(self) -> bool:
        """Whether a key may have to wait for its row."""
        at_once = 0 if self.policy == "show_click" else 1
        return self.admit_threshold > at_once or self.admit_probability < 1.0

    @property
    def evicts(self) -> bool:
        """Whether sweeps happen."""
        return self.evict_threshold > 0 or (self.show_click is not None and self.show_click.evict_percentage > 0.0)

    @property
    def needs_timestamps(self) -> bool:
        """Whether a batch must bring timestamps."""
        return self.evict_threshold > 0 and self.time_source == "timestamps"

    @property
    def needs_labels(self) -> bool:
        """Whether a batch must bring labels."""
        return self.policy == "show_click"


@dataclass(frozen=True)
class TableConfig:
    """One embedding table.

    Attributes
    ----------
    name : str
        Unique within a collection; part of what a new row's values are made of.
    embedding_dim : int
        Elements of a row, 1 to 8192.
    feature_names : list of str
        Features that look rows up in this table; default: one feature named like the table.
    num_embeddings : int, optional
        An upper bound of device slots (never of keys: any int64 key is legal).
    pooling : str
        ``"sum"`` or ``"mean"`` of a bag's rows; sequence collections ignore it.
    dtype : str
        How weights are kept: ``"float32"``, ``"float16"`` or ``"bfloat16"``. Outputs, gradients and optimizer state are
        float32 for all of them; an update is computed in float32 and stored rounded to nearest even. A weight that grows
        beyond the type's largest number becomes infinite, as in torch.
    initializer : Initializer
    seed : int
    hbm_rows : int, optional
        Fixed number of device slots of this table; default: a share of the collection's ``hbm_bytes``.
    admit_and_evict : AdmitAndEvictConfig, optional
    directory : path, optional
        This table's own directory: its rows and the state of its filter lie there in files, which may exceed memory, and come
        back when a manager is made with the same description (see `EmbTable`). Default: in memory. The step count of Adam
        is the collection's, not a table's: it is in ``ebc.optimizer.state_dict()``, to be saved beside the directory.
    """

    name: str
    embedding_dim: int
    feature_names: list[str] | None = None
    num_embeddings: int | None = field(default=None, kw_only=True)
    pooling: str = field(default="sum", kw_only=True)
    dtype: str = field(default="float32", kw_only=True)
    initializer: Initializer = field(default=Uniform(-0.05, 0.05), kw_only=True)
    seed: int = field(default=0, kw_only=True)
    hbm_rows: int | None = field(default=None, kw_only=True)
    admit_and_evict: AdmitAndEvictConfig | None = field(default=None, kw_only=True)
    directory: str | os.PathLike[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"TableConfig: name = {self.name!r}; give a non-empty string")
        owner = f"table {self.name!r}"
        dim = _integer(owner, "embedding_dim", self.embedding_dim, low=1, high=MAX_EMBEDDING_DIM)
        object.__setattr__(self, "embedding_dim", dim)
        given: Any = [self.name] if self.feature_names is None else self.feature_names
        try:
            names = [] if isinstance(given, str) else list(given)
        except TypeError:  # not iterable
            names = []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"{owner}: feature_names = {given!r}; give a non-empty list of non-empty strings")
        if len(set(names)) != len(names):
            raise ConfigError(f"{owner}: feature_names = {names!r} has a name twice; list each once")
        object.__setattr__(self, "feature_names", names)
        for option in ("num_embeddings", "hbm_rows"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, _integer(owner, option, value, low=1, high=2**31 - 2))
        if not isinstance(self.pooling, str) or self.pooling not in ("sum", "mean"):
            raise ConfigError(f'{owner}: pooling = {self.pooling!r}; give "sum" or "mean"')
        kind = row_type(owner, self.dtype)
        if not isinstance(self.initializer, Initializer):
            raise ConfigError(
                f"{owner}: initializer = {self.initializer!r}; give an embcache initializer such as Uniform(-0.05, 0.05)"
            )
        object.__setattr__(self, "seed", _integer(owner, "seed", self.seed, low=INT64_MIN))
        if self.admit_and_evict is not None and not isinstance(self.admit_and_evict, AdmitAndEvictConfig):
            raise ConfigError(
                f"{owner}: admit_and_evict = {self.admit_and_evict!r}; give an AdmitAndEvictConfig or None"
            )
        default = 0.0 if self.admit_and_evict is None else self.admit_and_evict.not_admitted_default_value
        if abs(default) >= kind.end:
            raise ConfigError(
                f"{owner}: not_admitted_default_value = {default!r} is infinite in {kind.name}; give less than {kind.end:g} in size"
            )
        path = self.directory
        if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
            raise ConfigError(f"{owner}: directory = {path!r}; give a path, or None to keep the table in memory")
