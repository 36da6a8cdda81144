"""One training run and what it left: on embcache with a given share of the rows in HBM, or on plain PyTorch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

import embcache as ec
from checkpoints import Checkpoints
from clicks import Clicks
from dlrm import Dlrm
from embcache.view import TableView
from scores import auc, log_loss
from stock import StockEmbeddings

__all__ = ["Rows", "Run", "Setting", "run_embcache", "run_stock"]

# Keys in ascending order, their weights, their optimizer state.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]

EVALUATION_BATCH = 4096


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    dim: int
    batch_size: int
    epochs: int
    seed: int
    optimizer: str
    sparse_lr: float
    dense_lr: float

    def sparse_spec(self) -> ec.OptimizerSpec:
        """The optimizer of the embeddings, for embcache."""
        return {"adagrad": ec.Adagrad, "adam": ec.Adam, "sgd": ec.SGD}[self.optimizer](lr=self.sparse_lr)

    def sparse_stock(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """The same for plain PyTorch."""
        rules = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}
        return rules[self.optimizer](parameters, lr=self.sparse_lr)

    def dense(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the dense model."""
        rules = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        return rules[self.optimizer](model.parameters(), lr=self.dense_lr)


@dataclass
class Run:
    """What one run showed; counts that plain PyTorch does not have are None."""

    name: str
    seconds: float
    lookups: int
    auc: float
    log_loss: float
    host_bytes: int
    hbm_bytes: int
    hit_rate: float | None = None
    device_busy: float | None = None
    overlap: float | None = None
    swap_in_rows: int | None = None
    swap_out_rows: int | None = None
    swap_bytes: int | None = None
    rows: dict[str, Rows] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Embedding rows looked up, and updated, per second of training."""
        return self.lookups / self.seconds


class Whole(torch.nn.Module):
    """The dense model and the embeddings: a batch of `Clicks` to (loss, number of rows looked up)."""

    def __init__(self, dense: Dlrm, rows: ec.EmbeddingBagCollection) -> None:
        super().__init__()
        self.dense, self.rows = dense, rows

    def forward(self, batch: tuple[ec.JaggedFeatures, Clicks]) -> tuple[torch.Tensor, int]:
        features, clicks = batch
        logits = self.dense(torch.from_numpy(clicks.dense), self.rows(features).values())
        return binary_cross_entropy_with_logits(logits, torch.from_numpy(clicks.labels)), clicks.keys.size


def _features(batch: Clicks) -> ec.JaggedFeatures:
    lengths = torch.ones(batch.keys.size, dtype=torch.int64)
    return ec.JaggedFeatures(batch.features, torch.from_numpy(batch.keys.ravel()), lengths)


def run_embcache(
    name: str,
    tables: list[ec.TableConfig],
    train: Clicks,
    test: Clicks,
    setting: Setting,
    checkpoints: Checkpoints | None = None,
) -> Run:
    """Train with the slots that `tables` say (all rows resident where they say nothing), through a pipeline."""
    model = _dense_model(train, setting)
    ebc = ec.EmbeddingBagCollection(tables, optimizer=setting.sparse_spec())
    dense = setting.dense(model)
    whole = Whole(model, ebc)
    checkpoints = checkpoints or Checkpoints()
    first = checkpoints.resume(whole, dense, setting)

    with ec.TrainPipeline(whole, dense) as pipe:
        pipe.batches_done = first  # it counts on: what a checkpoint says is the position in the whole run

        def after_step(_: int) -> None:
            checkpoints.after_step(pipe.batches_done, whole, dense, setting)

        def steps() -> Iterator[tuple[float, int]]:
            source = ((_features(batch), batch) for batch in _batches(train, setting, first))
            while True:
                try:
                    loss, lookups = pipe.progress(source)
                except StopIteration:
                    return
                yield loss.item(), lookups

        def note() -> str:
            now = pipe.stats()
            return f", hit rate {now['hit_rate']:.1%}, swaps {now['swap_mb_per_s']:.1f} MB/s, device busy {now['device_busy']:.0%}"

        seconds, lookups = _train(name, steps(), train, setting, note, first, after_step)
        checkpoints.finish()
        moved = pipe.stats()
    stats = ebc.manager.stats()
    ebc.eval()
    logits = _predict(model, lambda batch: ebc(_features(batch)).values(), test)
    run = Run(
        name=name,
        seconds=seconds,
        lookups=lookups,
        auc=auc(test.labels, logits),
        log_loss=log_loss(test.labels, logits),
        host_bytes=stats["host_bytes"],
        hbm_bytes=stats["hbm_bytes"],
        hit_rate=stats["hits"] / max(stats["hits"] + stats["misses"], 1),
        device_busy=moved["device_busy"],
        overlap=moved["overlap"],
        swap_in_rows=stats["swap_in_rows"],
        swap_out_rows=stats["swap_out_rows"],
        swap_bytes=stats["swap_in_bytes"] + stats["swap_out_bytes"],
        rows={table: _sorted_rows(view) for table, view in ebc.tables().items()},
        dense={key: value.clone() for key, value in model.state_dict().items()},
    )
    ebc.manager.close()
    return run


def run_stock(name: str, tables: list[ec.TableConfig], train: Clicks, test: Clicks, setting: Setting) -> Run:
    """Train plain PyTorch from the same initial values with the same optimizer."""
    model = _dense_model(train, setting)
    embeddings = StockEmbeddings(tables, np.concatenate([train.keys, test.keys], axis=1))
    # Numbering the keys is not counted: plain PyTorch leaves it to whoever prepares the data.
    train = train.with_keys(embeddings.index(train.keys))
    test = test.with_keys(embeddings.index(test.keys))

    def embed(batch: Clicks) -> torch.Tensor:
        return embeddings(torch.from_numpy(batch.keys))

    optimizers = [setting.dense(model), setting.sparse_stock(list(embeddings.parameters()))]

    def steps() -> Iterator[tuple[float, int]]:
        for batch in _batches(train, setting, 0):
            logits = model(torch.from_numpy(batch.dense), embed(batch))
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss.item(), batch.keys.size

    seconds, lookups = _train(name, steps(), train, setting)
    logits = _predict(model, embed, test)
    return Run(
        name=name,
        seconds=seconds,
        lookups=lookups,
        auc=auc(test.labels, logits),
        log_loss=log_loss(test.labels, logits),
        host_bytes=0,
        hbm_bytes=embeddings.row_bytes(len(setting.sparse_spec().state_widths(setting.dim))),
    )


def _dense_model(train: Clicks, setting: Setting) -> Dlrm:
    """The same initial values in every run."""
    torch.manual_seed(setting.seed)
    return Dlrm(train.dense.shape[1], len(train.features), setting.dim)


def _batches(train: Clicks, setting: Setting, first: int) -> Iterator[Clicks]:
    """The batches of all epochs in time order, without the first `first`."""
    every = (batch for _ in range(setting.epochs) for batch in train.batches(setting.batch_size))
    return itertools.islice(every, first, None)


def _train(
    name: str,
    run: Iterator[tuple[float, int]],
    train: Clicks,
    setting: Setting,
    note: Callable[[], str] = lambda: "",
    first: int = 0,
    after_step: Callable[[int], None] = lambda step: None,
) -> tuple[float, int]:
    """Go through the steps of `run`, which give loss and rows looked up, from step `first` on; return seconds and all rows."""
    steps = setting.epochs * -(-len(train) // setting.batch_size)
    bar = tqdm(total=steps, initial=first, desc=f"{name:>12}", unit="step", disable=None)
    recent, lookups = 0.0, 0
    start = time.perf_counter()
    for step, (loss, count) in enumerate(run, first + 1):
        recent = 0.98 * recent + 0.02 * loss if recent else loss
        lookups += count
        after_step(step)
        bar.update()
        if bar.n % 16 == 0 or bar.n == steps:
            bar.set_postfix_str(f"loss {recent:.4f}{note()}", refresh=False)
    seconds = time.perf_counter() - start
    bar.close()
    return seconds, lookups


@torch.no_grad()
def _predict(model: Dlrm, embed: Callable[[Clicks], torch.Tensor], test: Clicks) -> np.ndarray:
    parts = [model(torch.from_numpy(batch.dense), embed(batch)) for batch in test.batches(EVALUATION_BATCH)]
    return torch.cat(parts).numpy()


def _sorted_rows(view: TableView) -> Rows:
    """All rows of a table in the order of their keys: row indexes may differ between runs, rows may not."""
    parts = [(keys.copy(), weights.copy(), state.copy()) for keys, weights, state, _, _ in view.items()]
    keys, weights, state = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(keys)
    return keys[order], weights[order], state[order]
