"""What the members of a crew do in the tests of the sharders. Each job returns plain arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim import RowWiseAdagrad
from torchrec.streamable import Pipelineable

import embcache as ec
from embcache.errors import ConfigError
from embcache.torchrec import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheEmbeddingCollection,
    EmbCacheEmbeddingCollectionSharder,
    EmbCacheTrainPipelineSparseDist,
    replace_embeddings,
    sharding_plan,
)

ROWS, BATCH, STEPS, CPU = 60, 6, 6, torch.device("cpu")
SHARDERS = [
    EmbCacheEmbeddingBagCollectionSharder(reduction="exact"),
    EmbCacheEmbeddingCollectionSharder(reduction="exact"),
]


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device, non_blocking), self.labels.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.sparse.record_stream(stream)


def batches(rank: int, world: int) -> list[Batch]:
    """A rank's examples of each batch of all ranks."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (2, BATCH), generator=generator)
        keys = [torch.randint(0, ROWS, (int(row.sum()),), generator=generator) for row in lengths]
        labels = torch.rand(BATCH, generator=generator)
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        bags = [list(torch.split(values, row.tolist()))[part] for values, row in zip(keys, lengths, strict=True)]
        sparse = KeyedJaggedTensor.from_lengths_sync(
            ["f", "g"],
            torch.cat([bag for feature in bags for bag in feature]),
            lengths[:, part].reshape(-1).to(torch.int32),
        )
        made.append(Batch(sparse, labels[part]))
    return made


class Model(torch.nn.Module):
    """Case 39, 40: two cached collections of mixed dims, and tables of TorchRec's beside them."""

    def __init__(self, plain: bool, hbm_bytes: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        tables = [
            EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"]),
            EmbeddingBagConfig(name="u", num_embeddings=ROWS, embedding_dim=8, feature_names=["f", "g"]),
        ]
        self.bags = EmbCacheEmbeddingBagCollection(tables, hbm_bytes=hbm_bytes)
        self.sequence = EmbCacheEmbeddingCollection(
            [EmbeddingConfig(name="s", num_embeddings=ROWS, embedding_dim=4, feature_names=["g"])], hbm_bytes=hbm_bytes
        )
        for part, optimizer in ((self.bags, torch.optim.Adagrad), (self.sequence, torch.optim.SGD)):
            apply_optimizer_in_backward(optimizer, part.parameters(), {"lr": 0.5})
        self.plain = None
        if plain:
            table = EmbeddingBagConfig(
                name="p",
                num_embeddings=ROWS,
                embedding_dim=8,
                feature_names=["g"],
                init_fn=torch.nn.init.ones_,  # TorchRec initializes shards by the generators of their ranks
            )
            self.plain = EmbeddingBagCollection([table])
            apply_optimizer_in_backward(torch.optim.Adagrad, self.plain.parameters(), {"lr": 0.5, "eps": 1e-8})
        self.top = torch.nn.Linear(32 if plain else 24, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.bags(batch.sparse).values(), self.sequence(batch.sparse)["g"].to_padded_dense(3).sum(1)]
        if self.plain is not None:
            parts.append(self.plain(batch.sparse).values())
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def trained(model: Any, data: list[Batch], how: str = "loop") -> None:
    """Train on all batches."""
    dense = [one for name, one in model.named_parameters() if "top" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    if how == "loop":
        for batch in data:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
        return
    source = iter(data)
    kind: Any = TrainPipelineSparseDist if how == "torchrec" else EmbCacheTrainPipelineSparseDist
    pipe = kind(model, optimizer, CPU)
    with_end(pipe, source)
    if how == "ours":
        pipe.close()


def with_end(pipe: Any, source: Iterator[Batch]) -> None:
    """Until the source has ended."""
    try:
        while True:
            pipe.progress(source)
    except StopIteration:
        pass


def learned(model: Model) -> dict[str, np.ndarray]:
    """Keys and rows of each table that are here, and the dense part."""
    found: dict[str, np.ndarray] = {"top": model.top.weight.detach().numpy().copy()}
    for part in (model.bags, model.sequence):
        for name, view in part.tables().items():
            keys = np.flatnonzero(view.find(np.arange(ROWS)) >= 0)
            found[f"{name}.keys"], found[name] = keys, view.lookup(keys, insert=False)
    return found


def spread(model: Model, world: int, planned_by: str = "ours", plain: str = "table_wise") -> Any:
    """The model over the ranks, the collection of TorchRec's that may be in it in this way."""
    sharders: list[Any] = [*SHARDERS, EmbeddingBagCollectionSharder()] if model.plain is not None else SHARDERS
    if planned_by == "torchrec":
        planner = EmbeddingShardingPlanner(topology=Topology(world_size=world, compute_device="cpu"))
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    else:
        # Else it may choose to replicate the small table, and then each rank trains a copy of its own.
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world, compute_device="cpu"),
            constraints={"p": ParameterConstraints(sharding_types=[plain], min_partition=4)},
        )
        plan = sharding_plan(model, sharders, planner=planner)
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


def train(
    rank: int, world: int, how: str, plain: bool, planned_by: str, hbm_bytes: int | None
) -> dict[str, np.ndarray]:
    """Train the model over the ranks; `plain` with a collection of TorchRec's in it."""
    wrapped = spread(Model(plain, hbm_bytes), world, planned_by)
    names = dict(wrapped.named_parameters())
    assert {"bags.embedding_bags.t.weight", "sequence.embeddings.s.weight"} <= set(names)
    assert "bags" in [path for path, _ in wrapped.fused_optimizer.optimizers]
    trained(wrapped, batches(rank, world), how)
    return learned(wrapped.module)


def convert(rank: int, world: int, path: str) -> dict[str, np.ndarray]:
    """A TorchRec model that is converted, trained a step, spread over the ranks, trained on, and saved by all."""
    torch.manual_seed(4)
    table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])
    model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection([table]), "top": torch.nn.Linear(4, 1)})
    apply_optimizer_in_backward(torch.optim.Adagrad, model["bags"].parameters(), {"lr": 0.5})
    replace_embeddings(model)
    data = batches(0, 1)
    model["top"](model["bags"](data[0].sparse).values()).sum().backward()
    wrapped = DistributedModelParallel(model, device=CPU, plan=sharding_plan(model), sharders=SHARDERS)
    part = batches(rank, world)[1]
    inner = wrapped.module
    (inner["top"](inner["bags"](part.sparse).values()).sum() * world).backward()
    ec.save(inner, path)
    view = inner["bags"].tables()["t"]
    keys = np.flatnonzero(view.find(np.arange(ROWS)) >= 0)
    weights, state = view.lookup_rows(keys)
    return {"keys": keys, "weights": weights, "state": state}


def plain_parts(model: Any) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """What this rank holds of TorchRec's own table, and where that begins."""
    weight = model.plain.state_dict()["embedding_bags.p.weight"]
    return [(tuple(one.metadata.shard_offsets), one.tensor.numpy().copy()) for one in weight.local_shards()]


def save_mixed(rank: int, world: int, path: str) -> list[Any]:
    """Half of the training, a checkpoint, the other half: what is learned then."""
    wrapped = spread(Model(True), world)
    data = batches(rank, world)
    trained(wrapped, data[:3])
    for group in wrapped.module.plain.fused_optimizer.param_groups:
        group["lr"] = 0.25
    ec.save(wrapped, path)
    saved = plain_parts(wrapped.module)
    trained(wrapped, data[3:])
    return [learned(wrapped.module), plain_parts(wrapped.module), saved]


def resume_mixed(rank: int, world: int, path: str, plain: str) -> list[Any]:
    """The other half, from the checkpoint."""
    wrapped = spread(Model(True), world, plain=plain)
    trained(wrapped, batches(rank, world)[3:])  # lost
    report = ec.restore(wrapped, path)
    assert sorted(report.matched) == ["bags/t", "bags/u", "sequence/s"]
    restored = plain_parts(wrapped.module)
    trained(wrapped, batches(rank, world)[3:])
    return [learned(wrapped.module), plain_parts(wrapped.module), restored]


def refuse_mixed(rank: int, world: int, path: str) -> list[str]:
    """What a model says whose table of TorchRec's is another one, or is trained by another optimizer; and that nothing has changed."""
    said = []
    for rows, optimizer in ((ROWS + 1, torch.optim.Adagrad), (ROWS, RowWiseAdagrad)):
        model = Model(False)
        table = EmbeddingBagConfig(name="p", num_embeddings=rows, embedding_dim=8, feature_names=["g"])
        model.plain, model.top = EmbeddingBagCollection([table]), torch.nn.Linear(32, 1)
        apply_optimizer_in_backward(optimizer, model.plain.parameters(), {"lr": 0.5})
        wrapped = spread(model, world)
        before = plain_parts(wrapped.module)
        try:
            ec.restore(wrapped, path)
        except ConfigError as error:
            said.append(str(error))
        except ec.RankRefusedError as error:
            said.append(str(error))
        after = plain_parts(wrapped.module)
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
        assert all(not len(view) for view in wrapped.module.bags.tables().values())
    return said


def dense_tensors(rank: int, world: int, path: str) -> list[Any]:
    """A dense part that is spread over the ranks as torch does it (FSDP and its like), saved and restored; what a sum yet to be made says."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    bags = ec.distributed.ShardedEmbeddingBagCollection([ec.TableConfig("t", 4, ["f"])])
    model = torch.nn.ModuleDict({"bags": bags, "top": torch.nn.Linear(4, 3)})
    whole = torch.arange(12.0).reshape(3, 4)
    model["top"].weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))  # two rows, and one
    model["top"].bias = torch.nn.Parameter(distribute_tensor(torch.arange(3.0), mesh, [Replicate()]))
    ec.save(model, path)
    with torch.no_grad():
        for one in model["top"].parameters():
            one.to_local().fill_(-1.0)
    ec.restore(model, path)
    found = [one.full_tensor().detach().numpy() for one in (model["top"].weight, model["top"].bias)]
    model["top"].bias = torch.nn.Parameter(
        torch.distributed.tensor.DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    )
    try:
        ec.save(model, path)
    except (ConfigError, ec.RankRefusedError) as error:
        found.append(str(error))
    return found


def refusals(rank: int, world: int) -> list[str]:
    """What each wrong call says."""
    said = []
    model = Model(False)
    plan = sharding_plan(model)
    plan.plan["bags"]["t"].sharding_type = "table_wise"
    del plan.plan["sequence"]["s"]
    for wrong in (
        lambda: DistributedModelParallel(model, device=CPU, plan=plan, sharders=SHARDERS),
        lambda: SHARDERS[1].shard(model.sequence, plan.plan["sequence"], None, CPU, "sequence"),
        lambda: EmbCacheEmbeddingBagCollectionSharder({"learning_rate": 0.1}),
        lambda: EmbCacheEmbeddingBagCollectionSharder(qcomm_codecs_registry={"a": 1}),
        lambda: sharding_plan(torch.nn.Linear(1, 1)),
    ):
        try:
            wrong()
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
    return said


def run_example(rank: int, world: int, arguments: list[str]) -> float:
    """What the example finds."""
    import torchrec_dlrm

    found: float = torchrec_dlrm.main(arguments)
    return found
