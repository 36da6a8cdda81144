"""Models, batches and loops that the tests of `TrainPipeline` share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import embcache as ec

SOAK = int(os.environ.get("EMBCACHE_SOAK") or 1)
Pair = tuple[ec.JaggedFeatures, torch.Tensor]


def features(keys: Any, name: str = "item") -> ec.JaggedFeatures:
    values = torch.as_tensor(keys, dtype=torch.int64)
    return ec.JaggedFeatures([name], values, torch.ones_like(values))


def batches(count: int, seed: int = 0, size: int = 8, keys: int = 60) -> Iterator[Pair]:
    """`count` batches of (features, labels)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        values = torch.randint(0, keys, (size,), generator=generator)
        yield features(values), (values % 2).float()


class Model(torch.nn.Module):
    """Logistic regression on one embedding."""

    def __init__(self, rows: int | None = 40, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        table = ec.TableConfig("item", 4, hbm_rows=rows, **options.pop("table", {}))
        self.rows = ec.EmbeddingBagCollection([table], optimizer=ec.Adagrad(lr=0.1), **options)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, labels = batch
        logits = self.top(self.rows(keys).values()).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels), logits


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows_of(model: Model) -> dict[int, bytes]:
    found = {}
    for keys, weights, state, *counters in model.rows.tables()["item"].items():
        for i, key in enumerate(keys.tolist()):
            extra = [column[i].tobytes() for column in counters if column is not None]
            found[key] = b"".join([weights[i].tobytes(), state[i].tobytes(), *extra])
    return found


def serial(model: Model, source: Iterator[Pair]) -> list[float]:
    """The loop that a pipeline must equal."""
    optimizer, losses = sgd(model), []
    for batch in source:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        model.rows.optimizer.step()
        losses.append(loss.item())
    return losses


def train(pipe: ec.TrainPipeline, source: Iterator[Any], most: int = 10**9) -> list[float]:
    losses: list[float] = []
    while len(losses) < most:
        try:
            losses.append(pipe.progress(source)[0].item())
        except StopIteration:
            break
    return losses


def same(one: Model, other: Model) -> bool:
    dense = zip(one.top.parameters(), other.top.parameters(), strict=True)
    return rows_of(one) == rows_of(other) and all(torch.equal(a, b) for a, b in dense)


def no_thread_left() -> bool:
    """Whether the threads of pipelines have ended."""
    return not [t for t in threading.enumerate() if t.name in ("embcache load", "embcache plan")]


class Towers(torch.nn.Module):
    """Two cached collections, one of sequences, beside a plain embedding (CASES.md 39, 40)."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        torch.manual_seed(2)
        spec = ec.Adam(lr=0.01)
        self.user = ec.EmbeddingBagCollection([ec.TableConfig("user", 4, hbm_rows=rows)], optimizer=spec)
        self.item = ec.EmbeddingCollection([ec.TableConfig("item", 4, ["item", "both"], hbm_rows=rows)], optimizer=spec)
        self.stock = torch.nn.Embedding(10, 4)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, plain = batch
        user, item = self.user(keys)["user"], self.item(keys)
        score = (user * item["item"].values() * self.stock(plain)).sum(1) + item["both"].values().sum(1)
        return (score * score).mean(), score


def tower_batches(count: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        keys = torch.randint(0, 40, (18,), generator=generator)
        yield (
            ec.JaggedFeatures(["user", "item", "both", "unused"], torch.cat([keys, keys[:6]]), torch.ones(24).long()),
            keys[:6] % 10,
        )


def threads_end() -> Iterator[None]:
    """For an autouse fixture: no test leaves a thread of a pipeline."""
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while not no_thread_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert no_thread_left()


def script(body: str) -> list[str]:
    """The command that runs `body` in a process of its own, behind the definitions of this file."""
    path = [str(Path(ec.__file__).parents[1]), str(Path(__file__).parent)]
    return [sys.executable, "-c", f"import sys, time; sys.path[:0] = {path!r}\nfrom pipelines import *\n{body}"]


def run_child(body: str, timeout_s: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process of its own."""
    return subprocess.run(script(body), capture_output=True, text=True, timeout=timeout_s, check=False, **options)
