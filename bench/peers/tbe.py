"""FBGEMM's table-batched embeddings on CPU. Optional: `pip install --no-deps fbgemm-gpu-cpu==1.8.0`, or set
BENCH_PEERS to a folder where `pip install --no-deps --target FOLDER fbgemm-gpu-cpu==1.8.0` has put it."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

__all__ = ["NAME", "TableBatched", "why_absent"]

NAME = "FBGEMM CPU TBE"
OPTIMIZERS = {"SGD": "EXACT_SGD", "RowWiseAdagrad": "EXACT_ROWWISE_ADAGRAD"}


def why_absent(optimizer: str) -> str:
    """Why FBGEMM cannot take part; empty where it can."""
    if optimizer not in OPTIMIZERS:
        return f"no {optimizer} on CPU"
    folder = os.environ.get("BENCH_PEERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError) as error:
        return f"{error}; pip install --no-deps fbgemm-gpu-cpu==1.8.0"
    return ""


class TableBatched:
    """Equal tables in host memory."""

    def __init__(self, weights: list[np.ndarray], optimizer: str, lr: float, eps: float) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        specs = [(*rows.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in weights]
        kind = getattr(EmbOptimType, OPTIMIZERS[optimizer])
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=kind, learning_rate=lr, eps=eps)
        for table, rows in zip(self._tables.split_embedding_weights(), weights, strict=True):
            table.copy_(torch.from_numpy(rows))
        for state in self._tables.split_optimizer_states():
            for part in state:
                part.mul_(1)  # written, as every table here

    def step(self, ids: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Forward and backward with the update in it. `ids` and `offsets` are feature-major."""
        out = self._tables(ids, offsets)
        out.backward(gradient)
        return out.detach()
