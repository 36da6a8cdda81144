"""What each of two ranks does in bench_distributed.py: the same tables, ids and gradients through TorchRec's sharded collection and ours."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["Job", "build", "steps", "wire"]

LR, EPS = 0.05, 1e-8
LIVE: dict[str, Any] = {}


@dataclass(frozen=True)
class Job:
    """Tables, and a batch of each rank."""

    tables: int = 8
    rows: int = 100_000
    dim: int = 32
    batch: int = 1024
    pooling: int = 8
    zipf: float = 1.05  # exponent of the ids' frequencies; 0: all alike

    @property
    def names(self) -> list[str]:
        return [f"t{t}" for t in range(self.tables)]

    def ids(self, rank: int, number: int) -> torch.Tensor:
        """Ids of one batch, table by table."""
        rng = np.random.default_rng([7, rank, number])
        count = self.tables * self.batch * self.pooling
        if not self.zipf:
            return torch.from_numpy(rng.integers(0, self.rows, count))
        weights = np.arange(1, self.rows + 1) ** -self.zipf
        ends = np.cumsum(weights / weights.sum())
        popular = np.searchsorted(ends, rng.random(count)).clip(0, self.rows - 1)
        return torch.from_numpy(popular * 7919 % self.rows)

    def gradient(self) -> torch.Tensor:
        """Of one sign: where a popular row's occurrences nearly cancel, Adagrad would make much of how each side rounds their sum."""
        return torch.linspace(0.5, 1.5, self.batch * self.tables * self.dim).view(self.batch, -1)


def stock(job: Job, device: torch.device) -> torch.nn.Module:
    """TorchRec's collection, half of the tables on each rank: what it offers on a CPU."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(
                device=device,
                tables=[
                    EmbeddingBagConfig(name=name, num_embeddings=job.rows, embedding_dim=job.dim, feature_names=[name])
                    for name in job.names
                ],
            )

        def forward(self, features: Any) -> Any:
            return self.ebc(features)

    holder = Holder()
    apply_optimizer_in_backward(RowWiseAdagrad, holder.ebc.parameters(), {"lr": LR, "eps": EPS})
    plan = construct_module_sharding_plan(
        holder.ebc,
        {name: table_wise(rank=2 * t // job.tables) for t, name in enumerate(job.names)},
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        holder,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel():  # else the other rank has the table
                table = name.split("embedding_bags.")[1].split(".")[0]
                parameter.view(job.rows, job.dim).copy_(first_rows(job, table))
    return model


def first_rows(job: Job, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.names.index(name))
    return torch.rand((job.rows, job.dim), generator=generator) * 0.1 - 0.05


def ours(job: Job) -> Any:
    import embcache as ec

    collection = ec.distributed.ShardedEmbeddingBagCollection(
        [ec.TableConfig(name, job.dim, hbm_rows=job.rows) for name in job.names],
        optimizer=ec.RowWiseAdagrad(lr=LR, eps=EPS),
        num_threads=1,
    )
    keys = np.arange(job.rows)
    mine = ec.distributed.owners(keys, dist.get_world_size()) == dist.get_rank()
    for name in job.names:
        rows = first_rows(job, name).numpy()[mine]
        collection.manager.table(name).assign(keys[mine], rows)
    return collection


def build(rank: int, world: int, job: Job, with_peer: bool) -> bool:
    """Make what is timed."""
    torch.set_num_threads(1)
    LIVE["job"], LIVE["ours"] = job, ours(job)
    LIVE["ids"] = [job.ids(rank, number) for number in range(4)]
    LIVE["lengths"] = torch.full((job.tables * job.batch,), job.pooling, dtype=torch.int64)
    LIVE["gradient"] = job.gradient()
    if with_peer:
        LIVE["stock"] = stock(job, torch.device("cpu"))
    return True


def step(name: str, number: int) -> torch.Tensor:
    """Forward, and backward with the update in it; returns this rank's output."""
    job: Job = LIVE["job"]
    if name == "ours":
        import embcache as ec

        features: Any = ec.JaggedFeatures(job.names, LIVE["ids"][number], LIVE["lengths"])
    else:
        from torchrec import KeyedJaggedTensor

        features = KeyedJaggedTensor(job.names, LIVE["ids"][number], lengths=LIVE["lengths"])
    out = LIVE[name](features)
    values: torch.Tensor = (out if name == "ours" else out.wait() if hasattr(out, "wait") else out).values()
    values.backward(LIVE["gradient"])
    return values.detach()


def steps(rank: int, world: int, name: str, first: int, count: int) -> tuple[float, torch.Tensor]:
    """`count` steps one after the other, begun by all ranks together; seconds of one, and the output of the last."""
    dist.barrier()
    began = time.perf_counter()
    for number in range(first, first + count):
        out = step(name, number % len(LIVE["ids"]))
    return (time.perf_counter() - began) / count, out


def wire(rank: int, world: int, number: int) -> tuple[int, int]:
    """Bytes that a step has sent to the other rank, and what they would be if every occurrence sent its key and had its row."""
    ranks, job = LIVE["ours"].ranks, LIVE["job"]
    before = ranks.plan.bytes_sent + ranks.train.bytes_sent
    step("ours", number)
    sent = ranks.plan.bytes_sent + ranks.train.bytes_sent - before
    import embcache as ec

    others = int((ec.distributed.owners(LIVE["ids"][number].numpy(), world) != rank).sum())
    return sent, others * (8 + 2 * 4 * job.dim)
