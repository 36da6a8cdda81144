"""One training run over tables of every row type and filter, to be cut in two, also by a process of its own.

``python -m promises.resuming OPTIMIZER PATH`` restores the newest generation at PATH, finishes the run, and prints a digest
of everything that training has made.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

import embcache as ec
from promises.strategies import make_batch
from promises.training import model_state, train_window

OPTIMIZERS: dict[str, ec.OptimizerSpec] = {
    "sgd": ec.SGD(lr=0.1),
    "adagrad": ec.Adagrad(lr=0.1),
    "rowwise": ec.RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "adam": ec.Adam(lr=0.01),
}
FILTERS = {
    "none": None,
    "count": ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=40, evict_step_interval=2),
    "chance": ec.AdmitAndEvictConfig(
        admit_probability=0.5, evict_threshold=4, evict_step_interval=3, time_source="step"
    ),
    "sketch": ec.AdmitAndEvictConfig(admit_threshold=3, sketch_bytes=1024),
    "floor": ec.AdmitAndEvictConfig(evict_threshold=5, evict_step_interval=1, evict_keep_min=10),
    "scores": ec.AdmitAndEvictConfig(
        admit_threshold=2,
        policy="show_click",
        show_click=ec.ShowClick(beta=0.5, score_decay=0.9, evict_percentage=0.2),
        evict_step_interval=3,
    ),
}
BATCHES = 16


def tables() -> list[ec.TableConfig]:
    """A table for each filter and row type."""
    return [
        ec.TableConfig(f"{name} {dtype}", 3 + i, ["f"], dtype=dtype, admit_and_evict=rule, hbm_rows=40)
        for i, dtype in enumerate(("float32", "float16", "bfloat16"))
        for name, rule in FILTERS.items()
    ]


def collection_of(optimizer: str) -> Any:
    """A fresh collection of all of them."""
    return ec.EmbeddingBagCollection(tables(), optimizer=OPTIMIZERS[optimizer])


def batches() -> list[ec.JaggedFeatures]:
    """The run's batches."""
    rng = np.random.default_rng(7)
    return [make_batch(rng, ["f"], list(range(-30, 60)), 8, now=10 * i, skew=1.3) for i in range(BATCHES)]


def digest(collection: Any) -> str:
    """Of all that training has made, and the step count."""
    state = repr((sorted_items(model_state(collection.manager)), collection.optimizer.step_count))
    return hashlib.sha256(state.encode()).hexdigest()


def sorted_items(value: Any) -> Any:
    """Nested dicts as sorted lists."""
    if isinstance(value, dict):
        return [(key, sorted_items(item)) for key, item in sorted(value.items())]
    return value


def finish(collection: Any, first: int) -> str:
    """Train on the batches from number `first` on."""
    for batch in batches()[first:]:
        train_window(collection, [batch])
    return digest(collection)


if __name__ == "__main__":
    resumed = collection_of(sys.argv[1])
    sys.stdout.write(finish(resumed, resumed.restore(sys.argv[2]).state["next"]) + "\n")
