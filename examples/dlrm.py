"""The dense half of a DLRM (Naumov et al., 2019): bottom MLP, pairwise interactions, top MLP."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Dlrm"]


class Dlrm(nn.Module):
    """Logits from dense numbers and pooled embeddings.

    Parameters
    ----------
    dense_count : int
        Dense numbers of an example.
    feature_count : int
        Sparse features of an example.
    dim : int
        Elements of an embedding; the bottom MLP ends in as many.
    """

    pairs: torch.Tensor

    def __init__(self, dense_count: int, feature_count: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        vectors = feature_count + 1
        self.bottom = nn.Sequential(nn.Linear(dense_count, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)
        self.top = nn.Sequential(nn.Linear(dim + pairs.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """`dense` (B, D) and `embeddings` (B, F * dim) to logits (B,)."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, embeddings], dim=1).view(len(dense), -1, self.dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)).squeeze(1)
