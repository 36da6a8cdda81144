"""Training a `World` through a pipeline, as `promises.training.train` does it batch by batch; and delays in every stage."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import embcache as ec
from embcache.timeline import Timeline
from promises.strategies import World
from promises.training import Collection, loss_of, outputs_of


class Delays(Timeline):
    """A timeline whose stages begin late now and then, by a seed: which thread is ahead of which becomes arbitrary."""

    def __init__(self, seed: int, most_s: float = 1e-3, share: float = 0.3) -> None:
        super().__init__()
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._most_s, self._share = most_s, share

    def start(self, stage: str, number: int) -> float:
        with self._lock:
            wait = self._random.random() * self._most_s if self._random.random() < self._share else 0.0
        if wait:
            time.sleep(wait)
        return super().start(stage, number)


class Piped(torch.nn.Module):
    """A collection as a model: a batch is a list of features objects, whose forwards share a backward."""

    def __init__(self, collection: Collection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, batch: list[ec.JaggedFeatures]) -> tuple[torch.Tensor, list[bytes]]:
        losses, seen = [], []
        for features in batch:
            outputs = outputs_of(self.collection(features))
            seen += [out.detach().numpy().tobytes() for out in outputs]
            losses.append(loss_of(outputs))
        return torch.stack(losses).sum(), seen


def steps_of(world: World) -> Iterator[list[ec.JaggedFeatures]]:
    """The batches of a world by backward passes. Each is a new object, since a run may hold one twice."""
    for start in range(0, len(world.batches), world.joint):
        yield world.batches[start : start + world.joint]


def open_pipe(collection: Collection, depth: int, seed: int | None = None, **options: Any) -> ec.TrainPipeline:
    """A pipeline that trains `collection`; with a seed, with delays."""
    pipe = ec.TrainPipeline(Piped(collection), None, depth=depth, features=lambda batch: batch, **options)
    if seed is not None:
        pipe._flow.timeline = Delays(seed)
    return pipe


def drain(
    pipe: ec.TrainPipeline, source: Iterator[Any], between: Callable[[int], object] = lambda n: None
) -> list[Any]:
    """Train until the source ends; the outputs."""
    seen = []
    while True:
        between(pipe.batches_done)
        try:
            seen.append(pipe.progress(source)[1])
        except StopIteration:
            return seen


def train_piped(
    collection: Collection,
    world: World,
    depth: int,
    seed: int | None = None,
    between: Callable[[int], object] = lambda n: None,
    **options: Any,
) -> tuple[list[bytes], dict[str, Any]]:
    """Train on the whole run; the outputs' bytes as `train` returns them, and the pipeline's stats."""
    with open_pipe(collection, depth, seed, **options) as pipe:
        seen = [out for outputs in drain(pipe, steps_of(world), between) for out in outputs]
        return seen, pipe.stats()
