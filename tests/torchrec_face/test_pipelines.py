"""Models with our collections under our pipeline, TorchRec's TrainPipelineBase and its TrainPipelineSparseDist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from batches import kjt
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.streamable import Pipelineable

import embcache as ec
from embcache.errors import ConfigError
from embcache.torchrec import (
    AdmitAndEvictConfig,
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagConfig,
    EmbCacheEmbeddingCollection,
    EmbCacheTrainPipelineSparseDist,
    KeyedJaggedTensorWithTimestamp,
)

CPU = torch.device("cpu")


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.sparse.record_stream(stream)


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        bags = [
            [
                torch.randint(0, 60, (int(n),), generator=generator).tolist()
                for n in torch.randint(0, 4, (5,), generator=generator)
            ]
            for _ in "fg"
        ]
        made.append(Batch(kjt(["f", "g"], bags), torch.rand(5, generator=generator)))
    return made


class Model(torch.nn.Module):
    """Case 39: two cached collections; case 40: beside a table that is not cached."""

    def __init__(self, hbm_bytes: int | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        table = EmbCacheEmbeddingBagConfig(num_embeddings=60, embedding_dim=4, name="t", feature_names=["f"], **options)
        self.bags = EmbCacheEmbeddingBagCollection([table], hbm_bytes=hbm_bytes, optimizer=ec.Adagrad(lr=0.1))
        self.sequence = EmbCacheEmbeddingCollection(
            [EmbeddingConfig(name="s", num_embeddings=60, embedding_dim=4, feature_names=["g"])],
            hbm_bytes=hbm_bytes,
            optimizer=ec.SGD(lr=0.1),
        )
        self.plain = torch.nn.EmbeddingBag(60, 4, mode="sum")
        self.top = torch.nn.Linear(12, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        part = batch.sparse["g"]
        parts = [
            self.bags(batch.sparse).values(),
            self.sequence(batch.sparse)["g"].to_padded_dense(3).sum(1),
            self.plain(part.values(), part.offsets()[:-1]),
        ]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()

    def dense(self) -> list[torch.nn.Parameter]:
        return [*self.plain.parameters(), *self.top.parameters()]


def plain_loop(model: Model, data: list[Batch]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.dense(), lr=0.1)
    outputs = []
    for batch in data:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def drained(pipe: Any, iterator: Iterator[Batch]) -> list[Any]:
    outputs = []
    while True:
        try:
            outputs.append(pipe.progress(iterator))
        except StopIteration:
            return outputs


def rows_of(model: Model) -> torch.Tensor:
    tables = {**model.bags.tables(), **model.sequence.tables()}
    return torch.cat([torch.from_numpy(view.lookup(range(60), insert=False)) for view in tables.values()])


@pytest.mark.parametrize("depth", [1, 6])
def test_our_pipeline_is_a_plain_loop_bit_for_bit(depth: int) -> None:
    data = batches(12)
    looped, piped = Model(), Model(hbm_bytes=1200)
    expected = plain_loop(looped, data)
    optimizer = torch.optim.SGD(piped.dense(), lr=0.1)
    with EmbCacheTrainPipelineSparseDist(piped, optimizer, CPU, depth=depth) as pipe:
        found = drained(pipe, iter(data))
        assert pipe.batches_done == 12
        pipe.wait_pipeline_compute_swapinfo()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(rows_of(looped), rows_of(piped)) and torch.equal(looped.top.weight, piped.top.weight)
    assert piped.bags.manager.stats()["swap_out_rows"] > 0


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist])
def test_torchrecs_pipelines_take_our_collections(kind: Any) -> None:
    data = batches(6)
    looped, piped = Model(), Model(hbm_bytes=1200)
    expected = plain_loop(looped, data)
    pipe = kind(piped, torch.optim.SGD(piped.dense(), lr=0.1), CPU)
    found = drained(pipe, iter(data))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(rows_of(looped), rows_of(piped))


def test_a_combined_optimizer_and_a_second_epoch() -> None:
    """Case 37: the second epoch trains too."""
    model = Model()
    dense = {name: one for name, one in model.named_parameters() if not one.is_meta}
    optimizer = CombinedOptimizer(
        [
            ("bags", model.bags.fused_optimizer),
            ("sequence", model.sequence.fused_optimizer),
            ("dense", KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.1))),
        ]
    )
    data = batches(4)
    with EmbCacheTrainPipelineSparseDist(model, optimizer, CPU) as pipe:
        drained(pipe, iter(data))
        before = rows_of(model)
        assert len(drained(pipe, iter(data))) == 4 and pipe.batches_done == 8
    assert not torch.equal(before, rows_of(model))


def test_rec_sdk_calls() -> None:
    model = Model()
    seen: list[str] = []
    optimizer = torch.optim.SGD(model.dense(), lr=0.1)

    def zero_grad() -> None:
        seen.append("zero")
        optimizer.zero_grad()

    def backward(losses: torch.Tensor) -> None:
        seen.append("backward")
        losses.sum().backward()

    def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("forward")
        return model(batch)

    pipe = EmbCacheTrainPipelineSparseDist(
        model,
        optimizer,
        CPU,
        CPU,
        return_loss=True,
        custom_model_fwd=forward,
        custom_model_zero_grad=zero_grad,
        custom_model_bwd=backward,
    )
    losses, output = pipe.progress(iter(batches(1)))
    assert losses.dim() == 0 and output.shape == (5,)
    assert seen == ["zero", "forward", "backward"]
    assert pipe.detach() is model
    model(batches(1)[0])  # plans for itself again


def test_evaluation_goes_through_progress() -> None:
    model = Model()
    with EmbCacheTrainPipelineSparseDist(model, torch.optim.SGD(model.dense(), lr=0.1), CPU) as pipe:
        drained(pipe, iter(batches(3)))
        before = rows_of(model)
        model.eval()
        outputs = drained(pipe, iter(batches(2, seed=1)))
        with torch.no_grad():
            assert all(torch.equal(a, model(b)[1]) for a, b in zip(outputs, batches(2, seed=1), strict=True))
        assert torch.equal(before, rows_of(model)) and pipe.batches_done == 3


def test_timestamps_reach_the_filters_through_the_pipeline() -> None:
    model = Model(admit_and_evict_config=AdmitAndEvictConfig(evict_threshold=5, evict_step_interval=2))
    data = batches(6)
    for number, batch in enumerate(data):
        stamps = torch.full(batch.sparse.values().shape, number * 10)
        batch.sparse = KeyedJaggedTensorWithTimestamp.wrap(batch.sparse, stamps)
    with EmbCacheTrainPipelineSparseDist(
        model, torch.optim.SGD(model.dense(), lr=0.1), CPU, evict_step_interval=2
    ) as pipe:
        drained(pipe, iter(data))
    assert model.bags.manager.stats()["evicted"] > 0


def test_variable_batches_through_the_pipeline() -> None:
    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                EmbeddingBagConfig(name=name, num_embeddings=60, embedding_dim=4, feature_names=[name]) for name in "fg"
            ]
            self.bags = EmbCacheEmbeddingBagCollection(tables, optimizer=ec.SGD(lr=0.1))

        def forward(self, batch: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.bags(batch).values()
            return (out * out).sum(), out.detach()

    batch = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 0, 3, 4]),
        lengths=torch.tensor([2, 0, 1, 2]),
        stride_per_key_per_rank=[[3], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[2, 0, 1, 0], [0, 0, 0, 0]])),
    )
    alone, piped = Pooled(), Pooled()
    expected = []
    for _ in range(3):
        loss, output = alone(batch)
        loss.backward()
        expected.append(output)
    with EmbCacheTrainPipelineSparseDist(piped, None, CPU) as pipe:
        found = drained(pipe, iter([batch] * 3))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert found[0].shape == (4, 8)


def test_what_the_pipeline_does_not_know_is_refused() -> None:
    model = Model(admit_and_evict_config=AdmitAndEvictConfig(evict_threshold=5, evict_step_interval=20))
    optimizer = torch.optim.SGD(model.dense(), lr=0.1)
    for options, message in (
        ({"execute_all_batches": False}, "execute_all_batches"),
        ({"apply_jit": True}, "apply_jit"),
        ({"pipeline_postproc": True}, "pipeline_postproc"),
        ({"evict_step_interval": 10}, "'t' of collection 'bags' has 20"),
    ):
        with pytest.raises(ConfigError, match=message):
            EmbCacheTrainPipelineSparseDist(model, optimizer, CPU, **options)
    with pytest.raises(ConfigError, match="give a torch.nn.Module"):
        EmbCacheTrainPipelineSparseDist("model", optimizer, CPU)
    with pytest.raises(ConfigError, match="no embedding collection"):
        EmbCacheTrainPipelineSparseDist(torch.nn.Linear(1, 1), optimizer, CPU)
