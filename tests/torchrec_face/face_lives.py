"""A life of a rank in the tests of kills through TorchRec's face: it goes on from what is saved, trains and saves, and may die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import face_jobs
import numpy as np
import torch
from sharded_jobs import die_in, note

import embcache as ec
from embcache.checkpoint import Files
from embcache.distributed.ranks import Channel
from embcache.torchrec import EmbCacheTrainPipelineSparseDist

STEPS = 2 * face_jobs.STEPS
PLACES = {
    "collective": (Channel, "_wait"),
    "file": (Files, "point"),
    "backward": (torch.Tensor, "backward"),
    "dense": (torch.optim.SGD, "step"),
}


def stepper(model: Any, source: Iterator[Any], piped: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What takes a step, and what ends the training."""
    if piped:
        dense = torch.optim.SGD([one for name, one in model.named_parameters() if "top" in name], lr=0.1)
        pipe = EmbCacheTrainPipelineSparseDist(model, dense, face_jobs.CPU)
        return lambda: pipe.progress(source), pipe.close
    return lambda: face_jobs.trained(model, [next(source)]), lambda: None


def live(
    rank: int,
    world: int,
    folder: str,
    notes: str,
    piped: bool,
    life: int = 0,
    victim: int = -1,
    place: str = "",
    left: int = 0,
) -> tuple[int, str, Any]:
    """Train to the end from the last generation, with a save after each step, beside a table of TorchRec's own.

    The victim is killed before its call number `left` of a place. Returns with how many steps it began, and what it has learned, or,
    where the other rank is gone, what it hears and the seconds since the victim died.
    """
    wrapped = face_jobs.spread(face_jobs.Model(True), world)
    report = ec.restore(wrapped, folder) if ec.generations(folder) else None
    done = 0 if report is None else report.state["done"]
    real = [(kind, name, getattr(kind, name)) for kind, name in PLACES.values()]
    if rank == victim:
        die_in(*PLACES[place], left, lambda: note(notes, life, rank, "died", time.monotonic()))
    step, close = stepper(wrapped, iter((2 * face_jobs.batches(rank, world))[done:]), piped)
    try:
        for number in range(done + 1, STEPS + 1):
            step()
            ec.save(wrapped, folder, delta=number % 4 != 0, state={"done": number}, keep=3)
        close()
    except (ec.EmbCacheError, RuntimeError) as error:
        heard = time.monotonic()
        with contextlib.suppress(ec.EmbCacheError, RuntimeError):
            close()
        return done, f"{type(error).__name__}: {error}", heard
    finally:
        for one in real:  # it may have come to its end alive
            setattr(*one)
    learned: dict[str, np.ndarray] = face_jobs.learned(wrapped.module)
    for number, (_, part) in enumerate(face_jobs.plain_parts(wrapped.module)):
        learned[f"plain.{number}"] = part
    return done, "", learned
