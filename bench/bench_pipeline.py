"""Steps through a pipeline on the emulated device, whose figures are those of an emulation.

A step of the device takes what the resident step was measured to take in the same run, so host work cannot hide behind a slow
device. Where the share of host work is given, the batches are what makes it so: the more of their ids are those of the batch before,
the fewer rows move. The device computes nothing (`Emulated(dry=True)`), so it takes no processor either. Ratios are times of whole runs of
`STEPS` steps; where the peer is the device alone they are its share of our time: how busy it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import embcache as ec
from embcache.devices import Emulated
from race import MILLISECONDS, QUERY_SETS, Contender, Race
from steps import Batch, OurStep, Shape, draw, features_of

SHAPE = Shape(4, 1_000_000, 32)
BROAD = Shape(26, 100_000, 32)  # whose planning and moving is much more than what a step costs in Python
STEPS = 100
SEARCH = 5  # halvings of the share of repeated ids
GBPS = 25.0
DEPTH = 4


class Fixed(torch.nn.Module):
    """The collection alone, with a gradient that is there already."""

    def __init__(self, collection: ec.EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection


class Trained:
    """A collection with a share of its rows in HBM, on an emulated device, serial or through a pipeline."""

    def __init__(self, batches: list[Batch], hbm_share: float, compute_ms: float, shape: Shape = SHAPE) -> None:
        self.batches = batches
        self.device = Emulated(GBPS, GBPS, compute_ms, num_threads=1, dry=True)
        self.ours = OurStep(shape, "RowWiseAdagrad", hbm_share=hbm_share, device=self.device)
        self.position = 0
        for _ in range(2):
            self.run(STEPS, 1)  # who is hot is resident

    def source(self, steps: int) -> Iterator[Batch]:
        for _ in range(steps):
            yield self.batches[self.position % len(self.batches)]
            self.position += 1

    def step(self, batch: Batch) -> tuple[None, None]:
        self.ours.step(batch)
        return None, None

    def run(self, steps: int, depth: int) -> ec.TrainPipeline:
        """Train; the pipeline, closed."""
        with ec.TrainPipeline(
            Fixed(self.ours.collection), None, depth=depth, step=self.step, features=lambda batch: batch.features
        ) as pipe:
            source = self.source(steps)
            for _ in range(steps):
                pipe.progress(source)
        return pipe

    def host_s(self) -> float:
        """What the host does a step, measured without overlap."""
        stages = self.run(STEPS, 1).stats()["stage_s"]
        return sum(stages[name] for name in ("prepare", "plan", "swap_out", "swap_in"))


def drawn(shape: Shape) -> list[Batch]:
    """More batches than query sets, so that rows come and go."""
    made: list[Batch] = []
    while len(made) < 32:
        made += draw(shape, "zipf", 1, seed=len(made) + 1)[:QUERY_SETS]
    return made


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    """Of few tables."""
    return drawn(SHAPE)


@pytest.fixture(scope="module")
def broad() -> list[Batch]:
    """Of many tables."""
    return drawn(BROAD)


@pytest.fixture(scope="module")
def resident_ms(batches: list[Batch]) -> float:
    """A step of the compiled kernels with every row in place."""
    ours = OurStep(SHAPE, "RowWiseAdagrad")
    seconds = step_s(ours, batches)
    ours.close()
    return 1e3 * seconds


def step_s(ours: OurStep, batches: list[Batch]) -> float:
    """Median seconds of a step."""
    times = []
    for batch in batches:
        began = time.perf_counter()
        ours.step(batch)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def repeating(fresh: list[Batch], share: float) -> list[Batch]:
    """Batches in which that share of the ids is what stood at the same place in the batch before."""
    rng, before, made = np.random.default_rng(0), fresh[-1].ids.numpy(), []
    lengths = np.diff(fresh[0].offsets.numpy())
    for batch in fresh:
        before = np.where(rng.random(len(before)) < share, before, batch.ids.numpy())
        made.append(replace(batch, ids=torch.from_numpy(before), features=features_of(BROAD, before, lengths)))
    return made


def balanced(fresh: list[Batch], aim: float) -> Trained:
    """A tenth of the rows in HBM, the device's step that of all rows resident, host work at most `aim` of it and hardly less."""
    resident, ours = OurStep(BROAD, "RowWiseAdagrad"), Trained(fresh, 0.1, 0.0, BROAD)
    too_much, enough = 0.0, 1.0  # shares of repeated ids
    for _ in range(SEARCH):
        share = (too_much + enough) / 2
        ours.batches, ours.device.compute_s = repeating(fresh, share), 0.0
        ours.run(len(fresh), 1)
        work = ours.host_s() / step_s(resident, ours.batches)
        too_much, enough = (share, enough) if work > aim else (too_much, share)
    ours.batches = repeating(fresh, enough)
    ours.run(len(fresh), 1)
    ours.device.compute_s = step_s(resident, ours.batches)
    resident.close()
    return ours


def compete(race: Race, case: str, ours: Trained, peer: Contender) -> None:
    """`STEPS` steps of ours through a pipeline against `peer`."""
    race(
        "pipeline, emulated device",
        case,
        Contender("embcache", lambda i: ours.run(STEPS, DEPTH)),
        [peer],
        work=STEPS,
        unit=MILLISECONDS,
        rounds=5,
    )


def alone(device: Emulated) -> Contender:
    """The device computing one step after the other, with nobody else."""

    def steps(_: int) -> None:
        for _ in range(STEPS):
            device.begin_step()
            device.end_step()

    return Contender("limit: the device alone", steps)


def test_the_device_is_busy_while_the_host_does_three_quarters_of_its_work(race: Race, broad: list[Batch]) -> None:
    ours = balanced(broad, 0.75)
    compete(race, "pipeline, emulated device, host work 0.75 of its step", ours, alone(ours.device))
    ours.ours.close()


def test_twice_as_fast_where_host_and_device_are_equal(race: Race, broad: list[Batch]) -> None:
    ours = balanced(broad, 1.0)
    serial = Contender("embcache, serial", lambda i: ours.run(STEPS, 1))
    compete(race, "pipeline, emulated device, host work equal to its step", ours, serial)
    ours.ours.close()


@pytest.mark.parametrize("percent", [10, 1])
def test_a_step_with_few_rows_in_hbm(race: Race, batches: list[Batch], resident_ms: float, percent: int) -> None:
    ours, resident = Trained(batches, percent / 100, resident_ms), Trained(batches, 1.0, resident_ms)
    peer = Contender("embcache, all resident", lambda i: resident.run(STEPS, DEPTH))
    compete(race, f"pipeline, emulated device, {percent}% of the rows in HBM, pooling 1, zipf", ours, peer)
    ours.ours.close()
    resident.ours.close()
