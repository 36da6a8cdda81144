"""nn.EmbeddingBag(sparse=True) and a torch optimizer: what a user without a library writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["TorchBags"]


class RowWiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad on coalesced sparse gradients; torch has none of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the touched rows."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros(len(parameter))
                state["sum"].index_add_(0, rows, values.square().mean(dim=1))
                scale = group["lr"] / (state["sum"][rows].sqrt() + group["eps"])
                parameter.index_add_(0, rows, values * scale[:, None], alpha=-1)


class TorchBags:
    """One nn.EmbeddingBag a table, outputs side by side."""

    def __init__(self, weights: list[np.ndarray], optimizer: str, lr: float, eps: float) -> None:
        self._bags = []
        for rows in weights:
            bag = nn.EmbeddingBag(*rows.shape, mode="sum", sparse=True, include_last_offset=True)
            with torch.no_grad():
                bag.weight.copy_(torch.from_numpy(rows))
            self._bags.append(bag)
        parameters = [bag.weight for bag in self._bags]
        makers = {
            "SGD": lambda: torch.optim.SGD(parameters, lr=lr),
            "RowWiseAdagrad": lambda: RowWiseAdagrad(parameters, lr=lr, eps=eps),
            "Adam": lambda: torch.optim.SparseAdam(parameters, lr=lr, eps=eps),
        }
        self._optimizer = makers[optimizer]()
        self._written = False

    def step(self, ids: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Forward, backward, update. `ids` and `offsets` are feature-major."""
        bags = (len(offsets) - 1) // len(self._bags)
        outputs = []
        for t, bag in enumerate(self._bags):
            edges = offsets[t * bags : (t + 1) * bags + 1]
            first, last = int(edges[0]), int(edges[-1])
            outputs.append(bag(ids[first:last], edges - first))
        out = torch.cat(outputs, dim=1)
        out.backward(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not self._written:
            # State comes as untouched zero pages: write them, or the first visits of every row would be timed.
            for state in self._optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        value.mul_(1)
            self._written = True
        return out.detach()
