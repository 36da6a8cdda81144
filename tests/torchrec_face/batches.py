"""Batches and tables that the tests of the TorchRec face draw or share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType


def kjt(keys: Sequence[str], bags: Sequence[Sequence[Sequence[int]]], weights: torch.Tensor | None = None) -> Any:
    """Of ``bags[feature][example]``."""
    lengths = [len(bag) for feature in bags for bag in feature]
    values = [key for feature in bags for bag in feature for key in bag]
    return KeyedJaggedTensor.from_lengths_sync(
        list(keys), torch.tensor(values, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32), weights=weights
    )


@dataclass
class Shape:
    """Of a collection: (name, rows, dim, mean, features) of each table; and batches of bags for all features, one more than are used."""

    tables: list[tuple[str, int, int, bool, list[str]]]
    features: list[str]
    batches: list[list[list[list[int]]]]

    def configs(self, pooled: bool) -> list[Any]:
        if pooled:
            return [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=list(features),
                    pooling=PoolingType.MEAN if mean else PoolingType.SUM,
                )
                for name, rows, dim, mean, features in self.tables
            ]
        return [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))
            for name, rows, dim, _, features in self.tables
        ]

    def kjts(self, weighted: bool = False) -> list[Any]:
        made = []
        for number, bags in enumerate(self.batches):
            count = sum(len(bag) for feature in bags for bag in feature)
            weights = torch.rand(count, generator=torch.Generator().manual_seed(number)) + 0.5 if weighted else None
            made.append(kjt(self.features, bags, weights))
        return made


@st.composite
def shapes(draw: st.DrawFn, same_dim: bool = False, batch_count: int = 3, means: bool = True) -> Shape:
    """Tables of several features, features of several tables, empty bags."""
    features = [f"f{number}" for number in range(draw(st.integers(1, 4)))]
    dims = [draw(st.sampled_from([4, 8]))] if same_dim else [1, 3, 4, 8]
    tables = []
    for number in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))
        rows, dim = draw(st.integers(1, 12)), draw(st.sampled_from(dims))
        tables.append((f"t{number}", rows, dim, means and draw(st.booleans()), used))
    # A feature's ids exist in each of its tables; a feature that no table has may bring any.
    limit = {
        feature: min((rows for _, rows, _, _, used in tables if feature in used), default=100) for feature in features
    }
    batches = []
    for _ in range(batch_count):
        size = draw(st.integers(1, 4))  # TorchRec's own cannot take an empty batch
        batches.append(
            [
                [draw(st.lists(st.integers(0, limit[feature] - 1), max_size=4)) for _ in range(size)]
                for feature in features
            ]
        )
    return Shape(tables, features, batches)
