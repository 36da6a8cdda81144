"""What the tests of the promises draw: hostile keys, tables, filters, batches, and whole training runs.

Shapes are drawn by hypothesis, so that it can shrink them; the content of batches comes from a drawn seed, which is
quick. Nothing in here touches the product but its configuration and `JaggedFeatures`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

import embcache as ec

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

# Keys that other systems reserve, truncate or mix up: CASES.md lines 1 to 3.
HOSTILE_KEYS = (
    *(0, 1, 2, -1, -2, -3),
    *(INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 1),
    *(2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**32 + 1),
    *(2**24 + 1, 2**52 + 1, 2**53 + 1, 2**62, -(2**62), 0x7FFFFFFF00000000, 0x0123456789ABCDEF),
)

int64 = st.integers(INT64_MIN, INT64_MAX)
keys = st.sampled_from(HOSTILE_KEYS) | st.integers(-50, 50) | int64

SOAK = int(os.environ.get("EMBCACHE_SOAK") or 1)


def examples(count: int) -> settings:
    """`count` examples in ``make test``, ``EMBCACHE_SOAK`` times as many in a soak run."""
    return settings(max_examples=count * SOAK)


@st.composite
def pools(draw: st.DrawFn, low: int = 3, high: int = 40) -> list[int]:
    """Distinct keys from which a run's batches draw: a few hostile ones, and a pattern that unmixed hashes fear."""
    count = draw(st.integers(low, high))
    pool = dict.fromkeys(draw(st.lists(keys, max_size=min(count, 8), unique=True)))
    start = draw(st.sampled_from([0, -17, 2**40, INT64_MIN, 12345]))
    stride = draw(st.sampled_from([1, 2**7, 2**32, 2**56, 0x9E3779B97F4A7C15]))
    place = 0
    while len(pool) < count:
        value = (start + place * stride) % 2**64
        pool[value - 2**64 if value > INT64_MAX else value] = None
        place += 1
    return list(pool)


initializers = st.sampled_from(
    [ec.Uniform(-0.05, 0.05), ec.Normal(0.0, 0.1), ec.TruncatedNormal(0.01, 0.02), ec.Zeros(), ec.LinearRamp(-1.0, 1.0)]
)

optimizers = st.sampled_from(
    [
        ec.SGD(lr=0.1),
        ec.SGD(lr=0.05, weight_decay=0.01),
        ec.Adagrad(lr=0.1, initial_accumulator_value=0.01),
        ec.RowWiseAdagrad(lr=0.05, weight_decay=0.001),
        ec.Adam(lr=0.01),
    ]
)


@st.composite
def filters(draw: st.DrawFn, *, time_source: str | None = None, chance: bool = True) -> ec.AdmitAndEvictConfig:
    """A filter that admits late, evicts by time, or both, or does both by score; some draw by chance or count in a sketch."""
    kinds = ["admit", "evict", "both"] + (["scores"] if time_source is None else [])
    kind = draw(st.sampled_from(kinds))
    options: dict[str, object] = {"not_admitted_default_value": draw(st.sampled_from([0.0, 0.5, -1.0]))}
    if kind != "evict":
        options["admit_threshold"] = draw(st.integers(2, 4))
        options["admit_probability"] = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])) if chance else 1.0
        options["sketch_bytes"] = draw(st.sampled_from([0, 0, 0, 1024])) if kind != "scores" else 0
    if kind in ("evict", "both"):
        source = time_source or draw(st.sampled_from(["timestamps", "step"]))
        options["evict_threshold"] = draw(st.integers(1, 6) if source == "step" else st.integers(5, 60))
        options["time_source"] = source
    if kind == "scores":
        options["policy"] = "show_click"
        options["show_click"] = ec.ShowClick(
            alpha=1.0,
            beta=draw(st.sampled_from([0.0, 1.5])),
            score_decay=draw(st.sampled_from([1.0, 0.7])),
            evict_percentage=draw(st.sampled_from([0.2, 0.6])),
        )
    if kind != "admit":
        options["evict_step_interval"] = draw(st.integers(1, 4))
        options["evict_keep_min"] = draw(st.sampled_from([0, 0, 0, 2, 6]))
    return ec.AdmitAndEvictConfig(**options)  # type: ignore[arg-type]


DIMS = (1, 2, 3, 4, 5, 6, 8, 16, 24)
ROW_TYPES = ("float32", "float16", "bfloat16")


@st.composite
def table_lists(
    draw: st.DrawFn,
    *,
    most: int = 3,
    filtered: st.SearchStrategy = st.none() | filters(),
    dtypes: Sequence[str] = ("float32",),
) -> list[ec.TableConfig]:
    """One to `most` tables of mixed dims, types and poolings, one or two features each; a feature may serve two tables."""
    count = draw(st.integers(1, most))
    shared = count > 1 and draw(st.booleans())
    tables = []
    for t in range(count):
        features = [f"f{t}"] + ([f"g{t}"] if draw(st.booleans()) else [])
        if shared and t < 2:
            features.append("both")
        tables.append(
            ec.TableConfig(
                f"table {t}",
                draw(st.sampled_from(DIMS)),
                features,
                pooling=draw(st.sampled_from(["sum", "mean"])),
                dtype=draw(st.sampled_from(dtypes)),
                initializer=draw(initializers),
                seed=draw(st.integers(-3, 3)),
                admit_and_evict=draw(filtered),
            )
        )
    return tables


def features_of(tables: Sequence[ec.TableConfig]) -> list[str]:
    """The features that the tables need, each once."""
    return list(dict.fromkeys(name for table in tables for name in table.feature_names))


def make_batch(
    rng: np.random.Generator,
    names: Sequence[str],
    pool: Sequence[int],
    batch_size: int,
    *,
    lengths: Sequence[int] = (0, 1, 1, 2, 3, 5),
    now: int | None = None,
    weighted: bool = False,
    skew: float = 2.0,
) -> ec.JaggedFeatures:
    """A batch whose keys lie toward the front of `pool`; timestamps around `now`, some of them old, and labels."""
    bags = rng.choice(np.array(lengths), size=len(names) * batch_size)
    count = int(bags.sum())
    places = (len(pool) * rng.random(count) ** skew).astype(np.int64)
    values = np.array(pool, dtype=np.int64)[places]
    weights = rng.integers(-8, 9, count).astype(np.float32) / 4 if weighted else None
    timestamps = None if now is None else now + rng.integers(-30, 6, count)
    labels = None if now is None else rng.integers(0, 2, batch_size)
    return ec.JaggedFeatures(list(names), values, bags.astype(np.int64), weights, timestamps, labels)


@dataclass(frozen=True)
class World:
    """A whole training run, but for the sizes that promise I9 says do not matter.

    Attributes
    ----------
    joint : int
        Forwards whose gradients arrive in one backward pass.
    accumulate : int
        Backward passes that make one update.
    """

    tables: list[ec.TableConfig]
    optimizer: ec.OptimizerSpec
    pooled: bool
    accumulate: int
    joint: int
    batches: list[ec.JaggedFeatures]

    def windows(self) -> list[list[ec.JaggedFeatures]]:
        """The batches that are pinned at the same time."""
        size = self.accumulate * self.joint
        return [self.batches[start : start + size] for start in range(0, len(self.batches), size)]

    def keys_of(self, table: ec.TableConfig, batches: Sequence[ec.JaggedFeatures]) -> set[int]:
        """The distinct keys that `batches` look up in `table`."""
        return {key for batch in batches for name in table.feature_names for key in batch[name].values().tolist()}

    def least_rows(self) -> dict[str, int]:
        """Slots that hold each window's unique rows: the smallest that promise I9 asks for."""
        return {
            table.name: max(1, *(len(self.keys_of(table, window)) for window in self.windows()))
            for table in self.tables
        }

    def all_rows(self) -> dict[str, int]:
        """Slots that hold every key of the run."""
        return {table.name: max(1, len(self.keys_of(table, self.batches))) for table in self.tables}


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    steps: tuple[int, int] = (4, 24),
    tables: st.SearchStrategy[list[ec.TableConfig]] | None = None,
) -> World:
    """A training run: tables, optimizer, and batches with duplicates, empty bags and empty batches."""
    chosen = draw(table_lists(dtypes=ROW_TYPES) if tables is None else tables)
    names = features_of(chosen)
    pool = draw(pools(high=60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weighted = draw(st.booleans())
    rules = [table.admit_and_evict for table in chosen if table.admit_and_evict is not None]
    stamped = any(rule.needs_timestamps or rule.needs_labels for rule in rules)
    accumulate, joint = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]))
    count = draw(st.integers(*steps)) // 2 * 2
    batches = []
    for step in range(count):
        size = int(rng.choice([0, 1, 2, 3, 4, 6]))
        names_now = rng.permutation(names).tolist() if step % 3 == 2 else names
        batches.append(make_batch(rng, names_now, pool, size, now=10 * step if stamped else None, weighted=weighted))
    return World(chosen, draw(optimizers), draw(st.booleans()), accumulate, joint, batches)


def with_rows(tables: Sequence[ec.TableConfig], rows: dict[str, int] | int | None) -> list[ec.TableConfig]:
    """`tables` with fixed numbers of slots; None leaves the buffer to grow."""
    if rows is None:
        return list(tables)
    return [replace(table, hbm_rows=rows if isinstance(rows, int) else rows[table.name]) for table in tables]


def one_feature(values: Sequence[int], name: str = "f", **more: object) -> ec.JaggedFeatures:
    """A batch of one feature and one example for each value."""
    return ec.JaggedFeatures(
        [name],
        torch.tensor(list(values), dtype=torch.int64),
        torch.ones(len(values), dtype=torch.int64),
        **more,  # type: ignore[arg-type]
    )
