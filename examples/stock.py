"""The same embeddings in plain PyTorch: one `nn.EmbeddingBag(sparse=True)` a feature, with every row on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import embcache as ec

__all__ = ["StockEmbeddings"]


class StockEmbeddings(nn.Module):
    """Tables over the distinct keys of a data set, starting from the values that embcache gives to those keys.

    Plain PyTorch needs to know the keys beforehand, to number them; `index` does that outside the training loop.
    """

    def __init__(self, tables: Sequence[ec.TableConfig], keys: np.ndarray) -> None:
        super().__init__()
        self.known = [np.unique(column) for column in keys]
        self.bags = nn.ModuleList()
        for table, known in zip(tables, self.known, strict=True):
            with ec.EmbTable(table.name, table.embedding_dim, initializer=table.initializer, seed=table.seed) as source:
                weights = torch.from_numpy(source.lookup(known, insert=False))
            self.bags.append(nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode="sum", sparse=True))

    def index(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of `keys` (F, n), each of which was in the data set."""
        columns = [np.searchsorted(known, column) for known, column in zip(self.known, keys, strict=True)]
        return np.stack(columns)

    def forward(self, indexes: torch.Tensor) -> torch.Tensor:
        """`indexes` (F, B) to embeddings (B, F * dim)."""
        return torch.cat([bag(column.unsqueeze(1)) for bag, column in zip(self.bags, indexes, strict=True)], dim=1)

    def row_bytes(self, states: int) -> int:
        """Bytes of all rows with `states` optimizer states of a weight's size each."""
        return sum(weights.nbytes for weights in self.parameters()) * (1 + states)
