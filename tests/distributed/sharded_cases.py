"""Cases of training over ranks: tables, batches of all ranks, and what one process makes of the same.

A case is drawn from a seed, so that each process of a crew makes the same one for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import embcache as ec
from embcache.manager import EmbCacheManager

__all__ = ["Case", "batch_of", "one_process", "same", "state_of", "train", "train_piped"]

FEATURES = ["a", "b", "c", "d", "e"]


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes
    ----------
    seed, steps : int
    kind : str
        Of the tables' filters: "none", "count", "time", "floor", "step", "clicks", "chance", "sketch" (of 8 blocks), "sketches" (a block a vshard).
    pooled, weighted : bool
    small : bool
        Whether HBM holds little more than a batch.
    """

    seed: int
    steps: int = 12
    kind: str = "time"
    pooled: bool = True
    weighted: bool = False
    small: bool = True
    optimizer: str = "Adagrad"
    accumulate: int = 1
    dtype: str = "float32"
    most: int = 9  # examples of a rank
    policy: str = "lru"

    def tables(self) -> list[Any]:
        rule: Any = {
            "none": None,
            "count": ec.AdmitAndEvictConfig(admit_threshold=3, not_admitted_default_value=0.25),
            "time": ec.AdmitAndEvictConfig(
                admit_threshold=2, evict_threshold=30, evict_step_interval=3, not_admitted_default_value=-0.5
            ),
            "floor": ec.AdmitAndEvictConfig(
                admit_threshold=1, evict_threshold=4, evict_step_interval=2, evict_keep_min=25
            ),
            "step": ec.AdmitAndEvictConfig(
                admit_threshold=2, evict_threshold=3, evict_step_interval=2, time_source="step", evict_keep_min=10
            ),
            "chance": ec.AdmitAndEvictConfig(admit_threshold=2, admit_probability=0.5, admit_seed=5),
            "sketch": ec.AdmitAndEvictConfig(
                admit_threshold=3, sketch_bytes=4096, evict_threshold=30, evict_step_interval=3
            ),
            "sketches": ec.AdmitAndEvictConfig(
                admit_threshold=3, sketch_bytes=1 << 21, evict_threshold=30, evict_step_interval=3
            ),
            "clicks": ec.AdmitAndEvictConfig(
                admit_threshold=1.5,
                policy="show_click",
                evict_step_interval=3,
                evict_keep_min=5,
                show_click=ec.ShowClick(alpha=0.5, beta=2.0, score_decay=0.9, evict_percentage=0.3),
            ),
        }[self.kind]
        slots = 130 if self.small else None
        return [
            ec.TableConfig(
                "one", 4, ["a", "b"], hbm_rows=slots, admit_and_evict=rule, seed=self.seed, dtype=self.dtype
            ),
            ec.TableConfig("two", 8, ["c"], pooling="mean", hbm_rows=slots, admit_and_evict=rule),
            ec.TableConfig("three", 4, ["d"], hbm_rows=slots),
            ec.TableConfig("four", 6, ["e", "a"], pooling="mean", hbm_rows=slots, admit_and_evict=rule),
        ]

    def make_optimizer(self) -> Any:
        return getattr(ec, self.optimizer)(lr=0.1)


def batch_of(case: Case, step: int, world: int) -> list[dict[str, Any]]:
    """Step `step`'s batch, cut into `world` parts; the same batch for any world: examples are drawn first, then dealt."""
    rng = np.random.default_rng([case.seed, step])
    count = int(rng.integers(0, 4 * case.most + 1))
    lengths = rng.integers(0, 4, (len(FEATURES), count))
    values = [[rng.zipf(1.3, n) % 150 * 4 - 60 for n in row] for row in lengths]
    stamps = [[step * 10 + rng.integers(-8, 5, n) for n in row] for row in lengths]
    weights = [[rng.standard_normal(n).astype(np.float32) for n in row] for row in lengths]
    labels = rng.integers(0, 2, count)
    edges = np.concatenate(([0], np.sort(rng.integers(0, count + 1, max(world - 1, 0))), [count])).astype(int)
    parts = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):

        def flat(ragged: Any, dtype: Any) -> torch.Tensor:
            pieces = [piece for row in ragged for piece in row[low:high]]  # noqa: B023
            return torch.from_numpy(np.concatenate([np.empty(0, dtype), *pieces]).astype(dtype))

        part = {
            "values": flat(values, np.int64),
            "lengths": torch.from_numpy(lengths[:, low:high].reshape(-1).copy()),
            "timestamps": flat(stamps, np.int64),
            "weights": flat(weights, np.float32),
            "labels": torch.from_numpy(labels[low:high].copy()),
            "rows": (int(low), int(high)),
            "count": count,
        }
        parts.append(part)
    return parts


def features_of(case: Case, part: dict[str, Any]) -> Any:
    return ec.JaggedFeatures(
        FEATURES,
        part["values"],
        part["lengths"],
        weights=part["weights"].clone() if case.weighted else None,
        timestamps=part["timestamps"],
        labels=part["labels"],
    )


def gradient_of(case: Case, step: int, part: dict[str, Any], shape: tuple[int, ...], what: int = 0) -> torch.Tensor:
    """The gradient of a part's pooled output: rows of one tensor that is drawn for the whole batch."""
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + what)
    low, high = part["rows"]
    return torch.randn((part["count"], shape[1]), generator=generator)[low:high]


def value_gradients(
    case: Case, step: int, parts: list[dict[str, Any]], mine: int, feature: int, dim: int
) -> torch.Tensor:
    """The gradient of a part's values of one feature, of a sequence."""
    counts = [int(part["lengths"].view(len(FEATURES), -1)[feature].sum()) for part in parts]
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + feature)
    whole = torch.randn((sum(counts), dim), generator=generator)
    return torch.split(whole, counts)[mine]


def step_on(case: Case, module: Any, rank: int, world: int, step: int, features: Any) -> Any:
    """Forward and backward of this rank's part of a step; returns the outputs."""
    parts = batch_of(case, step, world)
    part = parts[rank]
    out = module(features)
    if case.pooled:
        values = out.values()
        values.backward(gradient_of(case, step, part, tuple(values.shape)))
        module.optimizer.step()
        return values.detach().clone()
    loss = torch.zeros(())
    for name, one in out.items():
        feature, dim = FEATURES.index(name.split("@")[0]), one.values().shape[1]
        loss = loss + (one.values() * value_gradients(case, step, parts, rank, feature, dim)).sum()
    loss.backward()
    module.optimizer.step()
    return [one.values().detach().clone() for one in out.values()]


def train(case: Case, module: Any, rank: int, world: int, steps: range) -> list[Any]:
    """Train `module` on this rank's parts; returns the outputs of each step."""
    outputs = [
        step_on(case, module, rank, world, step, features_of(case, batch_of(case, step, world)[rank])) for step in steps
    ]
    module.finish_accumulation()
    return outputs


def train_piped(case: Case, module: Any, rank: int, world: int, steps: range, depth: int) -> list[Any]:
    """`train` through a pipeline of that depth."""
    batches = iter([(step, features_of(case, batch_of(case, step, world)[rank])) for step in steps])

    def one_step(batch: Any) -> Any:
        step, features = batch
        return torch.zeros(()), step_on(case, module, rank, world, step, features)

    outputs = []
    with ec.TrainPipeline(module, None, depth=depth, step=one_step) as pipe:
        for _ in steps:
            outputs.append(pipe.progress(batches)[1])
        assert pipe.batches_done == len(steps)
    module.finish_accumulation()
    return outputs


def state_of(manager: EmbCacheManager) -> dict[str, dict[str, np.ndarray]]:
    """All that the tables hold, sorted by key: rows, counters, and keys that wait."""
    states = {}
    for name in manager.layout.names:
        t, view = manager.layout.index_of[name], manager.table(name)
        pieces = list(view.items())
        names = ["keys", "weights", "state", "frequency", "timestamp"]
        columns = {what: [piece[i] for piece in pieces] for i, what in enumerate(names)}
        merged = {what: np.concatenate(some) for what, some in columns.items() if some and some[0] is not None}
        if merged:
            order = np.argsort(merged["keys"])
            merged = {what: array[order] for what, array in merged.items()}
        if manager.layout.tables[t].admit_and_evict is not None:
            manager.flush()
            planner = manager.planner
            kept = planner.export_filter(t)
            for what in ("keys", "counts", "last"):
                merged[f"waiting {what}"] = kept[what]
            for what in ("sketch_young", "sketch_old", "sketch_clocks"):
                merged[what] = kept[what]
            merged["newest"] = np.array([kept["newest"]])
        states[name] = merged
    return states


def joined(states: list[dict[str, dict[str, np.ndarray]]]) -> dict[str, dict[str, np.ndarray]]:
    """The ranks' states as that of one."""
    whole = {}
    for name in states[0]:
        parts = [state[name] for state in states]
        merged: dict[str, np.ndarray] = {}
        for what in {key for part in parts for key in part}:
            some = [part[what] for part in parts if what in part]
            merged[what] = some[0] if what == "newest" else np.concatenate(some)
        for prefix in ("", "waiting "):
            keys = merged.get(f"{prefix}keys")
            if keys is None:
                continue
            order = np.argsort(keys, kind="stable")
            for what in list(merged):
                if what != "newest" and "sketch" not in what and what.startswith("waiting ") == bool(prefix):
                    merged[what] = merged[what][order]
        whole[name] = merged
    return whole


def one_process(case: Case) -> tuple[list[Any], dict[str, Any], int]:
    """Outputs, state and evictions of one process that is given whole batches."""
    kind = ec.EmbeddingBagCollection if case.pooled else ec.EmbeddingCollection
    module = kind(replace_small(case), optimizer=case.make_optimizer(), accumulate=case.accumulate, policy=case.policy)
    outputs = train(case, module, 0, 1, range(case.steps))
    stats = module.manager.stats()
    result = outputs, state_of(module.manager), stats["evicted"]
    module.close()
    return result


def replace_small(case: Case) -> list[Any]:
    """A case's tables, with the slots that one process needs for all keys of a batch."""
    return [replace(table, hbm_rows=None if table.hbm_rows is None else 160) for table in case.tables()]


def same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    """Assert that two states are equal: all but weights and state exactly, those within a relative tolerance."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].keys() == theirs[name].keys(), (name, ours[name].keys(), theirs[name].keys())
        for what in ours[name]:
            a, b = ours[name][what], theirs[name][what]
            assert a.shape == b.shape, (name, what, a.shape, b.shape)
            if tolerance and what in ("weights", "state"):
                scale = np.maximum(np.abs(b).max(initial=0), 1e-3)
                assert np.abs(a - b).max(initial=0) <= tolerance * scale, (name, what, np.abs(a - b).max())
            else:
                assert np.array_equal(a, b), (name, what, a, b)
