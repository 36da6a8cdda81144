"""TorchRec's DLRM on clicks with planted labels: the same losses and the same AUC with TorchRec's tables and with ours."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain

from clicks import Clicks
from criteo import load_criteo
from embcache.torchrec import EmbCacheTrainPipelineSparseDist, replace_embeddings
from scores import auc

ROWS, DIM, BATCH, STEPS, HELD_OUT = [5000, 2000, 800], 8, 64, 200, 40
FEATURES = ["user", "item", "shop"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The operations are small: more threads would mostly wait for each other, and on a busy machine wait long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def model(features: list[str], rows: list[int], dense: int) -> DLRMTrain:
    torch.manual_seed(2)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=count, embedding_dim=DIM, feature_names=[name])
        for name, count in zip(features, rows, strict=True)
    ]
    dlrm = DLRM(EmbeddingBagCollection(tables), dense, [16, DIM], [16, 1])
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


def learn_the_same(
    features: list[str], rows: list[int], data: list[Batch], held_out: list[Batch], hbm_bytes: int
) -> tuple[float, dict[str, Any]]:
    """TorchRec's model and ours side by side: every loss within 1e-5, the AUC equal. Returns our AUC, and what our manager says."""
    dense = data[0].dense_features.shape[1]
    stock, ours = model(features, rows, dense), model(features, rows, dense)
    report = replace_embeddings(ours, hbm_bytes=hbm_bytes)
    optimizer, losses = dense_optimizer(stock), []
    for batch in data:
        optimizer.zero_grad()
        loss, _ = stock(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    source, found = iter(data), []
    with EmbCacheTrainPipelineSparseDist(ours, dense_optimizer(ours), return_loss=True) as pipe:
        found = [pipe.progress(source)[0].item() for _ in data]
    assert len(losses) == STEPS and max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-5
    labels, expected = scores_of(stock, held_out)
    _, scores = scores_of(ours, held_out)
    assert abs(auc(labels, expected) - auc(labels, scores)) < 2e-6  # three of the million and a half pairs at most
    return auc(labels, scores), report.collections[0].module.manager.stats()


def test_dlrm_learns_the_same() -> None:
    data = clicks(STEPS + HELD_OUT)
    score, stats = learn_the_same(FEATURES, ROWS, data[:STEPS], data[STEPS:], 64 * 1024)
    resident = sum(stats["tables"][f"t_{name}"]["capacity"] for name in FEATURES)
    assert resident < sum(ROWS) / 4 and stats["swap_out_rows"] > 1000
    assert score > 0.65  # it has learned something


@pytest.mark.skipif("EMBCACHE_CRITEO" not in os.environ, reason="EMBCACHE_CRITEO names no file in Criteo's format")
def test_dlrm_learns_the_same_on_criteo() -> None:
    """The file is not ours to give away; one of 200 lines will do: then the same few batches come again and again."""
    rows = 1000
    train, test = load_criteo(os.environ["EMBCACHE_CRITEO"], 0.8).split(0.8)

    def batch_of(part: Clicks) -> Batch:
        ids = torch.from_numpy(np.remainder(part.keys, rows).ravel())
        sparse = KeyedJaggedTensor.from_lengths_sync(part.features, ids, torch.ones(len(ids), dtype=torch.int32))
        return Batch(torch.from_numpy(part.dense), sparse, torch.from_numpy(part.labels))

    several = itertools.cycle(train.batches(16))
    data = [batch_of(part) for part in itertools.islice(several, STEPS)]
    held_out = [batch_of(part) for part in itertools.islice(test.batches(512), HELD_OUT)]
    _, stats = learn_the_same(train.features, [rows] * len(train.features), data, held_out, 26 * 2 * DIM * 4 * 40)
    assert stats["swap_out_rows"] > 1000
