"""A data set for DataLoader workers. In a module of its own: a worker that was spawned imports it by name, wherever pytest was started."""

from __future__ import annotations

import os
import signal

import torch

import embcache as ec

__all__ = ["Deadly", "Pairs"]


class Pairs(torch.utils.data.Dataset[tuple[ec.JaggedFeatures, torch.Tensor]]):
    """Twelve pairs of (features, labels) that workers can have by fork and by spawn."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> tuple[ec.JaggedFeatures, torch.Tensor]:
        keys = torch.arange(place, place + 6) % 20
        return ec.JaggedFeatures(["item"], keys, torch.ones_like(keys)), (keys % 2).float()


class Deadly(Pairs):
    """The worker that is asked for the sixth dies of SIGKILL, as the system's killer of processes has it."""

    def __getitem__(self, place: int) -> tuple[ec.JaggedFeatures, torch.Tensor]:
        if place == 5 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(place)
