"""A model whose state is a function of the number of batches it has trained on, and what that state must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import embcache as ec
from promises.resuming import digest
from promises.strategies import make_batch
from promises.training import train_window

__all__ = ["Truth", "model", "step"]

FILTERS = [
    None,
    ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=60, evict_step_interval=2),
    ec.AdmitAndEvictConfig(admit_probability=0.5, evict_threshold=6, evict_step_interval=3, time_source="step"),
    ec.AdmitAndEvictConfig(admit_threshold=2, evict_threshold=70, evict_step_interval=4, sketch_bytes=1024),
]
UNUSED = 800  # rows that no batch meets, so that several deltas come to less than a full generation
DTYPES = ("float32", "float16", "bfloat16", "float32")


def model() -> Any:
    """A collection of tables of every row type, without a filter and with all kinds of them, whose slots hold little more than a batch."""
    tables = [
        ec.TableConfig(f"t{i}", 3 + i, ["f"], dtype=dtype, admit_and_evict=rule, hbm_rows=40)
        for i, (dtype, rule) in enumerate(zip(DTYPES, FILTERS, strict=True))
    ]
    collection = ec.EmbeddingBagCollection(tables, optimizer=ec.Adagrad(lr=0.1), num_threads=1)
    collection.tables()["t0"].insert(np.arange(-UNUSED, 0))
    return collection


def step(collection: Any, number: int) -> None:
    """Train on batch `number`: keys come and go, so that rows are swapped in and out and evicted."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(number)
    train_window(collection, [make_batch(rng, ["f"], list(range(number, number + 120)), 8, now=10 * number, skew=1.3)])


class Truth:
    """Digests of the state after each number of batches, from one run without interruption."""

    def __init__(self) -> None:
        self._run = model()
        self._digests = [digest(self._run)]

    def after(self, steps: int) -> str:
        """The digest after so many batches."""
        while len(self._digests) <= steps:
            step(self._run, len(self._digests))
            self._digests.append(digest(self._run))
        return self._digests[steps]


model()  # once where the file is imported: torch imports much when its first optimizer is made, which takes seconds
