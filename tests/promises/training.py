"""Running a collection, and everything about it that can be seen afterwards, as plain values that ``==`` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

import embcache as ec
from promises.strategies import World, with_rows

Collection = Any  # EmbeddingBagCollection or EmbeddingCollection


def make_collection(
    world: World, rows: dict[str, int] | int | None, num_threads: int | None = None, policy: str = "lru"
) -> Collection:
    """The collection of `world` with that many slots a table (None: a buffer that grows)."""
    kind = ec.EmbeddingBagCollection if world.pooled else ec.EmbeddingCollection
    return kind(
        with_rows(world.tables, rows),
        optimizer=world.optimizer,
        accumulate=world.accumulate,
        num_threads=num_threads,
        policy=policy,
    )


def outputs_of(out: Any) -> list[torch.Tensor]:
    """The output tensors of either collection."""
    return (
        [out.values()] if hasattr(out, "values") and not isinstance(out, dict) else [o.values() for o in out.values()]
    )


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient depends on each element and its place."""
    total = torch.zeros(())
    for out in outputs:
        slope = torch.linspace(-1.0, 1.0, out.numel()).view_as(out)
        total = total + (out * slope).sum() + 0.25 * (out * out).sum()
    return total


def train_window(collection: Collection, window: Sequence[ec.JaggedFeatures], joint: int = 1) -> list[bytes]:
    """Train on the batches of one update; `joint` forwards share a backward. Returns the outputs' bytes."""
    seen = []
    for start in range(0, len(window), joint):
        losses = []
        for batch in window[start : start + joint]:
            outputs = outputs_of(collection(batch))
            seen += [out.detach().numpy().tobytes() for out in outputs]
            losses.append(loss_of(outputs))
        torch.stack(losses).sum().backward()
    collection.optimizer.step()
    return seen


def train(collection: Collection, world: World, between: Callable[[int], object] = lambda window: None) -> list[bytes]:
    """Train on the whole run, calling `between` before each window."""
    seen = []
    for number, window in enumerate(world.windows()):
        between(number)
        seen += train_window(collection, window, world.joint)
    return seen


def evaluate(collection: Collection, batch: ec.JaggedFeatures) -> list[bytes]:
    """A forward in evaluation mode; leaves the mode as it was."""
    was = collection.training
    collection.eval()
    try:
        return [out.detach().numpy().tobytes() for out in outputs_of(collection(batch))]
    finally:
        collection.train(was)


def rows_of(view: Any) -> dict[int, tuple[bytes, bytes, float | None, int | None]]:
    """key -> (weights, state, frequency, timestamp) of every row, by iteration over the coherent view."""
    rows: dict[int, tuple[bytes, bytes, float | None, int | None]] = {}
    for keys, weights, state, frequency, timestamp in view.items(batch_rows=7):
        for i, key in enumerate(keys.tolist()):
            assert key not in rows, f"key {key} came twice"
            counters = (None, None) if frequency is None else (frequency[i].item(), int(timestamp[i]))
            rows[key] = (weights[i].tobytes(), state[i].tobytes(), *counters)
    return rows


def frozen(values: dict[str, Any]) -> dict[str, Any]:
    """A dict of arrays and numbers as one that ``==`` compares."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def model_state(manager: ec.EmbCacheManager) -> dict[str, Any]:
    """All that training has made, wherever it is: rows, optimizer state, counters, filters. No places, no sizes."""
    state: dict[str, Any] = {}
    for t, config in enumerate(manager.layout.tables):
        view = manager.table(config.name)
        state[config.name] = {"rows": rows_of(view), "length": len(view)}
        if config.admit_and_evict is not None:
            state[config.name]["filter"] = frozen(manager.planner.filter_state(t))
    return state


def whole_state(manager: ec.EmbCacheManager) -> dict[str, Any]:
    """`model_state` and besides all places, counters and pins: what a call that changes nothing must leave alone."""
    state = {"model": model_state(manager), "stats": manager.stats(), "step": manager.planner.step}
    for t in range(len(manager.layout.tables)):
        residents = [array.tolist() for array in manager.planner.residents(t)]
        state[f"residents {t}"] = residents
        state[f"free {t}"] = (manager.planner.free_slots(t), manager.planner.pinned(t))
    # Host bytes may grow ahead of rows that were then given back; rows and their number may not.
    for entry in (state["stats"], *state["stats"]["tables"].values()):
        entry.pop("host_bytes")
    return state


def check(manager: ec.EmbCacheManager) -> None:
    """The product's own invariants."""
    manager.planner.check()
    for table in manager.host_tables:
        table.check()


def plan_arrays(plan: Any) -> dict[str, Any]:
    """Every array of a plan, as lists."""
    names = (
        "table_offsets unique_keys unique_offsets inverse occurrence_order segment_offsets slots admitted table_hits table_misses "
        "swap_in_keys swap_in_slots swap_in_rows swap_in_offsets swap_out_keys swap_out_slots swap_out_rows swap_out_offsets"
    ).split()
    arrays = {name: np.asarray(getattr(plan, name)).tolist() for name in names}
    return {**arrays, "step": plan.step, "hits": plan.hits, "misses": plan.misses}


def total(manager: ec.EmbCacheManager, names: Iterable[str]) -> dict[str, int]:
    """Totals of some of the manager's counters."""
    stats = manager.stats()
    return {name: stats[name] for name in names}
