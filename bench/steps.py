"""What the benches of a training step share: batches of bags, and our collection filled with every row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import embcache as ec
from embcache.devices import Emulated
from race import QUERY_SETS
from samples import Sampler, keys_of

__all__ = ["LR", "Batch", "OurStep", "Shape", "draw"]

BATCH = 4096
LR = 0.05
EPS = 1e-8
OPTIMIZERS = {
    "SGD": ec.SGD(lr=LR),
    "RowWiseAdagrad": ec.RowWiseAdagrad(lr=LR, eps=EPS),
    "Adam": ec.Adam(lr=LR, eps=EPS),
}
FILL_KEYS = 500_000  # keys of a planned batch while every row is put in place


@dataclass(frozen=True)
class Shape:
    """Tables of equal size, one feature each."""

    tables: int
    rows: int
    dim: int

    def __str__(self) -> str:
        rows = f"{self.rows / 1e6:g} M" if self.rows >= 1_000_000 else f"{self.rows / 1e3:g} k"
        return f"{self.tables} x {rows} x {self.dim}"


@dataclass(frozen=True)
class Batch:
    """One batch, feature-major: dense ids for those who need them, random 64-bit keys of the same ids for us."""

    ids: torch.Tensor
    offsets: torch.Tensor  # [tables * BATCH + 1]
    features: ec.JaggedFeatures
    gradient: torch.Tensor  # [BATCH, tables * dim]


def names(shape: Shape) -> list[str]:
    """Feature names."""
    return [f"f{t}" for t in range(shape.tables)]


def features_of(shape: Shape, ids: np.ndarray, lengths: np.ndarray) -> ec.JaggedFeatures:
    """Features whose keys are random 64-bit images of the ids, the same for equal ids in any table."""
    return ec.JaggedFeatures(names(shape), torch.from_numpy(keys_of(ids)), torch.from_numpy(lengths))


def draw(shape: Shape, kind: str, pooling: int, seed: int = 1, count: int = QUERY_SETS) -> list[Batch]:
    """`count` batches of bags of `pooling` ids."""
    sampler = Sampler(shape.rows)  # who is hot is the same for every seed
    if seed != 1:
        sampler.rng = np.random.default_rng(seed)
    lengths = np.full(shape.tables * BATCH, pooling, dtype=np.int64)
    offsets = torch.from_numpy(np.arange(len(lengths) + 1, dtype=np.int64) * pooling)
    batches = []
    for _ in range(count):
        ids = sampler.draw(kind, shape.tables * BATCH * pooling)
        gradient = sampler.rng.standard_normal((BATCH, shape.tables * shape.dim), dtype=np.float32)
        batches.append(
            Batch(torch.from_numpy(ids), offsets, features_of(shape, ids, lengths), torch.from_numpy(gradient))
        )
    return batches


class OurStep:
    """Our collection with every row born and, as far as slots go, in the buffer."""

    def __init__(
        self,
        shape: Shape,
        optimizer: str,
        *,
        hbm_share: float = 1.0,
        threads: int = 1,
        device: str | Emulated = "cpu",
    ) -> None:
        slots = int(shape.rows * hbm_share)
        tables = [ec.TableConfig(name, shape.dim, [name], hbm_rows=slots) for name in names(shape)]
        self.collection = ec.EmbeddingBagCollection(
            tables, optimizer=OPTIMIZERS[optimizer], num_threads=threads, device=device
        )
        manager = self.collection.manager
        piece = min(slots, FILL_KEYS // shape.tables)
        for start in range(0, shape.rows, piece):
            ids = np.arange(start, min(start + piece, shape.rows))
            whole = np.tile(ids, shape.tables)
            info = manager.plan(features_of(shape, whole, np.ones(len(whole), dtype=np.int64)))
            manager.swap_out(info)
            manager.swap_in(info)
            manager.finish(info)

    def weights(self, shape: Shape) -> list[np.ndarray]:
        """Rows of every table in the order of their ids."""
        keys = keys_of(np.arange(shape.rows))
        return [self.collection.manager.table(name).lookup(keys, insert=False) for name in names(shape)]

    def step(self, batch: Batch) -> torch.Tensor:
        """Forward, backward with the update in it."""
        out = self.collection(batch.features).values()
        out.backward(batch.gradient)
        self.collection.optimizer.step()
        return out.detach()

    def close(self) -> None:
        """Free the tables."""
        self.collection.close()


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same outputs up to the order of summation.

    A first Adam step is lr times the *sign* of a gradient: where a sum of many cancels almost to zero, rounding decides. And
    hot keys sum thousands of gradients, which the peers do one after the other: after three SGD steps of Zipf bags of 20 they
    were up to 9e-4 off a float64 computation, ours 9e-5. Hence one element in a thousand may differ.
    """
    close = torch.isclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.shape == theirs.shape
    assert close.float().mean() > 0.999, f"{(~close).sum()} of {close.numel()} outputs differ"
