"""TorchRec's DLRM, converted in one call, trained over any number of processes, saved as it goes, and going on after it was killed.

    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --save run --kill-at 150   # rank 1 is killed, rank 0 hears of it at once
    torchrun --nproc-per-node 2 examples/torchrec_dlrm.py --save run                 # goes on from the newest generation
    python examples/torchrec_dlrm.py --save run                                      # so does one process, with what two have saved

What a user of TorchRec changes is in `model_of` and `spread`: `replace_embeddings`, the sharder, the plan. Clicks are made up, or Criteo's
(``--criteo FILE``); each process trains its part of each batch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from tqdm import tqdm

import embcache as ec
from clicks import Clicks
from criteo import load_criteo
from embcache.torchrec import (
    EmbCacheEmbeddingBagCollectionSharder,
    EmbCacheTrainPipelineSparseDist,
    replace_embeddings,
    sharding_plan,
)
from scores import auc
from synthetic import make_clicks

CPU = torch.device("cpu")
DIM = 16
TRAIN_SHARE = 0.9
KEPT = 2


@dataclass(frozen=True)
class Batch:
    """What TorchRec's ``DLRMTrain`` takes."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


def batch_of(clicks: Clicks, rows: int) -> Batch:
    """Clicks as TorchRec's tensors, their keys as ids below `rows`, which the model before its conversion asks for."""
    ids = torch.from_numpy(np.remainder(clicks.keys, rows).ravel())
    lengths = torch.ones(len(ids), dtype=torch.int32)
    sparse = KeyedJaggedTensor.from_lengths_sync(clicks.features, ids, lengths)
    return Batch(torch.from_numpy(clicks.dense), sparse, torch.from_numpy(clicks.labels))


def parts(clicks: Clicks, options: argparse.Namespace, first: int) -> Iterator[Batch]:
    """This process's part of each batch, from batch `first` on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for batch in itertools.islice(clicks.batches(options.batch_size), first, options.steps):
        yield batch_of(batch.between(rank * len(batch) // world, (rank + 1) * len(batch) // world), options.rows)


def model_of(clicks: Clicks, options: argparse.Namespace) -> torch.nn.Module:
    """A model as TorchRec's users have it, the same on all ranks; then converted: a tenth of its rows have a place on the device."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=options.rows, embedding_dim=DIM, feature_names=[name])
        for name in clicks.features
    ]
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables), clicks.dense.shape[1], [64, DIM], [64, 1]))
    apply_optimizer_in_backward(torch.optim.Adagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})
    row_bytes = DIM * 4 * 2  # weights, and Adagrad's sums
    replace_embeddings(model, hbm_bytes=options.rows * len(tables) * row_bytes // 10)
    return model


def spread(model: torch.nn.Module) -> DistributedModelParallel:
    """Tables by rows over all processes, the rest under DistributedDataParallel."""
    sharders: list[Any] = [EmbCacheEmbeddingBagCollectionSharder()]
    return DistributedModelParallel(model, device=CPU, plan=sharding_plan(model, sharders), sharders=sharders)


def train(options: argparse.Namespace) -> float:
    """Train and save; returns the AUC of the clicks that were held out."""
    clicks = load_criteo(options.criteo, TRAIN_SHARE) if options.criteo else make_clicks(options.clicks, 1.1, 0)[0]
    clicks, held_out = clicks.split(TRAIN_SHARE)
    model = spread(model_of(clicks, options))
    dense = torch.optim.Adagrad([one for one in model.parameters() if not one.is_meta], lr=0.05)
    done = 0
    if options.save and ec.generations(options.save):
        report = ec.restore(model, options.save)
        dense.load_state_dict(report.state["dense"])
        done = report.state["batches"]
    source = parts(clicks, options, done)
    total = min(options.steps, -(-len(clicks) // options.batch_size))
    saving: ec.Saving | None = None
    with (
        EmbCacheTrainPipelineSparseDist(model, dense, CPU, return_loss=True) as pipe,
        tqdm(total=total, initial=done, unit="batch", disable=None if dist.get_rank() == 0 else True) as bar,
    ):
        while done < total:
            loss, _ = pipe.progress(source)
            done += 1
            if bar.update():  # it was drawn just now: what it shows the next time
                bar.set_postfix_str(f"loss {loss.item():.4f}, {seen(pipe.pipeline.stats())}", refresh=False)
            if options.save and done % options.every == 0:
                if saving is not None:
                    saving.result()  # raises what the last one has failed with
                state = {"batches": done, "dense": dense.state_dict()}
                saving = ec.save(model, options.save, delta=True, background=True, state=state, keep=KEPT)
            if done == options.kill_at and dist.get_rank() == dist.get_world_size() - 1:
                die()
        if saving is not None:
            saving.result()
    return score(model, held_out, options)


def seen(now: dict[str, Any]) -> str:
    """What the pipeline says of itself, for the progress bar."""
    return (
        f"hit rate {now['hit_rate']:.1%}, swaps {now['swap_mb_per_s']:.1f} MB/s, device busy {now['device_busy']:.0%}"
    )


def die() -> None:
    """As when the machine takes the process away: nothing can catch it or clean up."""
    os.kill(os.getpid(), signal.SIGKILL)


@torch.no_grad()
def score(model: torch.nn.Module, held_out: Clicks, options: argparse.Namespace) -> float:
    """AUC, which every process finds for itself; rows come from their owners, so all ask for the same batches."""
    model.eval()
    logits = [model(batch_of(part, options.rows))[1][1] for part in held_out.batches(4096)]
    return auc(held_out.labels, torch.cat(logits).numpy())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save", type=Path, help="save there as it goes, and go on with what is there")
    parser.add_argument("--every", type=int, default=50, help="batches from one save to the next (%(default)s)")
    parser.add_argument("--kill-at", type=int, help="kill the last process after this batch")
    parser.add_argument("--steps", type=int, default=400, help="batches in all, at most (%(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=512, help="examples of a batch of all processes (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each table (%(default)s)")
    parser.add_argument("--clicks", type=int, default=200_000, help="made-up clicks (%(default)s)")
    parser.add_argument("--criteo", type=Path, help="a file in Criteo's format, in place of made-up clicks")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Run it in this process, one of torchrun's or the only one; returns the AUC."""
    options = parse(arguments)
    mine = not dist.is_initialized()
    if mine and "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    elif mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = train(options)
        if dist.get_rank() == 0:
            print(f"AUC of clicks that were held out: {found:.4f}")
    finally:
        if mine:
            dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
