"""TorchRec's DLRM on clicks with planted labels: the same losses and the same AUC with TorchRec's tables and with ours."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain

from embcache.torchrec import EmbCacheTrainPipelineSparseDist, replace_embeddings
from scores import auc

ROWS, DIM, BATCH, STEPS, HELD_OUT = [5000, 2000, 800], 8, 64, 200, 40
FEATURES = ["user", "item", "shop"]


class Batch:
    """What ``DLRMTrain`` asks of a batch."""

    def __init__(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense, sparse, labels


def clicks(count: int) -> list[Batch]:
    """Keys follow Zipf's law, labels follow a planted weight of each key."""
    generator = np.random.default_rng(11)
    planted = [generator.normal(0.0, 1.0, rows) for rows in ROWS]
    made = []
    for _ in range(count):
        lengths = [generator.integers(1, 4, BATCH) for _ in ROWS]
        ids = [np.minimum(generator.zipf(1.2, int(n.sum())), rows) - 1 for n, rows in zip(lengths, ROWS, strict=True)]
        logits = sum(
            np.add.reduceat(weights[keys], np.concatenate(([0], np.cumsum(n)[:-1])))
            for weights, keys, n in zip(planted, ids, lengths, strict=True)
        )
        labels = generator.random(BATCH) < 1 / (1 + np.exp(-logits))
        sparse = KeyedJaggedTensor.from_lengths_sync(
            FEATURES,
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
        )
        dense = torch.from_numpy(generator.normal(size=(BATCH, 5)).astype(np.float32))
        made.append(Batch(dense, sparse, torch.from_numpy(labels.astype(np.float32))))
    return made


def model() -> DLRMTrain:
    torch.manual_seed(2)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in zip(FEATURES, ROWS, strict=True)
    ]
    dlrm = DLRM(EmbeddingBagCollection(tables), 5, [16, DIM], [16, 1])
    apply_optimizer_in_backward(torch.optim.Adagrad, dlrm.sparse_arch.parameters(), {"lr": 0.1})
    return DLRMTrain(dlrm)


def dense_optimizer(train: DLRMTrain) -> torch.optim.Optimizer:
    dense = [
        *train.model.dense_arch.parameters(),
        *train.model.inter_arch.parameters(),
        *train.model.over_arch.parameters(),
    ]
    return torch.optim.SGD(dense, lr=0.1)


def scores_of(train: DLRMTrain, data: list[Batch]) -> tuple[np.ndarray, np.ndarray]:
    train.eval()
    with torch.no_grad():
        outputs = [train(batch)[1][1] for batch in data]
    return torch.cat([batch.labels for batch in data]).numpy(), torch.cat(outputs).numpy()


def test_dlrm_learns_the_same() -> None:
    data = clicks(STEPS + HELD_OUT)
    stock, ours = model(), model()
    report = replace_embeddings(ours, hbm_bytes=64 * 1024)
    optimizer, losses = dense_optimizer(stock), []
    for batch in data[:STEPS]:
        optimizer.zero_grad()
        loss, _ = stock(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    source, found = iter(data[:STEPS]), []
    with EmbCacheTrainPipelineSparseDist(ours, dense_optimizer(ours), return_loss=True) as pipe:
        found = [pipe.progress(source)[0].item() for _ in range(STEPS)]
    assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-5
    manager = report.collections[0].module.manager
    resident = sum(manager.stats()["tables"][f"t_{name}"]["capacity"] for name in FEATURES)
    assert resident < sum(ROWS) / 4 and manager.stats()["swap_out_rows"] > 1000
    labels, expected = scores_of(stock, data[STEPS:])
    _, scores = scores_of(ours, data[STEPS:])
    assert abs(auc(labels, expected) - auc(labels, scores)) < 1e-5
    assert auc(labels, scores) > 0.65  # it has learned something
