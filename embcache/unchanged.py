"""Whether tensors were changed in place since somebody looked: torch counts the writes to each.

A batch of a pipeline is laid out and planned long before a model sees it. An iterator that fills the same memory again for its
next batch, or a forward that changes ids before it looks them up, would train other rows than those that were planned.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Unchanged"]


class Unchanged:
    """The tensors of one features object, and how often each had been written to.

    Writes that bypass torch (to an array that shares the memory) are not seen, nor those to inference tensors.
    """

    __slots__ = ("_seen",)

    def __init__(self, features: Any) -> None:
        tensors = [features.values(), features.lengths(), features.weights_or_none()]
        for name in ("timestamps_or_none", "labels_or_none"):
            get = getattr(features, name, None)
            tensors.append(get() if callable(get) else None)
        self._seen = [
            (tensor, tensor._version)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        ]

    def __bool__(self) -> bool:
        return all(tensor._version == version for tensor, version in self._seen)
