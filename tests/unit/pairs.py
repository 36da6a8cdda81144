"""A data set for DataLoader workers. In a module of its own: a worker that was spawned imports it by name, wherever pytest was started."""

from __future__ import annotations

import torch

import embcache as ec

__all__ = ["Pairs"]


class Pairs(torch.utils.data.Dataset[tuple[ec.JaggedFeatures, torch.Tensor]]):
    """Twelve pairs of (features, labels) that workers can have by fork and by spawn."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> tuple[ec.JaggedFeatures, torch.Tensor]:
        keys = torch.arange(place, place + 6) % 20
        return ec.JaggedFeatures(["item"], keys, torch.ones_like(keys)), (keys % 2).float()
